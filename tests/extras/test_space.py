"""A Space for a LoRA: its app makes the images of `predict`, and no text from data becomes code, YAML or HTML."""
import importlib, inspect, re, sys
from unittest import mock

import diffusers
import numpy as np
import pytest
import yaml
from PIL import Image

from qie_nb.extras.space import requirements, space_app, space_facts, space_readme, write_space
from qie_nb.lora.formats import COMFY_NAME, WEIGHT_NAME
from qie_nb.models.components import VARIANTS
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from helpers import close_images, random_lora, settings, weekly

HOSTILE = ("it's \"\"\"\n---\nlicense: evil\n''' \\ \\N {x} %s <img src=x onerror='window.pwned=1'> "
           "![x](http://evil/p.png) $x$ \ud800 ü\r\n\t# blue")
FACTS = dict(base_model="Qwen/Qwen-Image-Edit-2511", title="Dusk", license="apache-2.0",
             instruction="make it dusk", image_positions="3d")
PIPELINES = [f"diffusers.pipelines.qwenimage.pipeline_qwenimage_{name}" for name in ("edit", "edit_plus")]


@pytest.fixture
def made(pairs, tmp_path):
    "A function of a variant: a trainer with a LoRA, and the folder where it is saved."
    def make(variant="2511", **save):
        trainer = QwenImageEditTrainer(settings(pairs(), tmp_path, variant))
        trainer.set_lora()
        random_lora(trainer.transformer)
        return trainer, trainer.save_lora(tmp_path/"lora", **save).parent
    return make


class Refused(Exception):
    "As gradio's Error."
    def __init__(self, message, **how): super().__init__(message)


@pytest.fixture
def running(monkeypatch):
    "A function of an app's code: its names after it has run, with a stand-in for gradio, in float32 on the CPU."
    def run(code, file):
        for name in PIPELINES: # the app replaces their sizes
            module = importlib.import_module(name)
            monkeypatch.setattr(module, "calculate_dimensions", module.calculate_dimensions)
        monkeypatch.setitem(sys.modules, "gradio", mock.MagicMock(Error=Refused))
        assert code.count("bfloat16") == 1
        names = dict(__name__="app", __file__=str(file))
        exec(compile(code.replace("bfloat16", "float32"), "app.py", "exec"), names)
        return names
    return run


def photo(size, seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("variant", [weekly("v1"), "2511"])
def test_the_app_makes_the_images_of_predict(variant, made, running):
    trainer, lora = made(variant)
    space = write_space(lora, base_model=str(tiny_folder(variant)))
    app = running((space/"app.py").read_text(), space/"app.py")
    images = [photo((150, 100), 1), photo((80, 90), 2)][:2 if VARIANTS[variant].multi_image else 1]
    inputs = [*images, None, None][:3 if VARIANTS[variant].multi_image else 1]
    seen = mock.Mock()
    theirs = app["edit"](*inputs, "make it dusk", 3, 3.0, 5, progress=seen)
    guided = dict(num_inference_steps=3, true_cfg_scale=3.0, progress=False)
    ours = trainer.predict(images, "make it dusk", " ", seed=5, **guided)
    assert theirs.size == ours.shape[1::-1] and theirs.size != (1024, 1024)
    assert close_images(np.asarray(theirs), ours)
    other = trainer.predict(images, "make it dusk", " ", seed=6, **guided)
    assert np.abs(np.asarray(theirs).astype(int) - other).mean() > 1, "another seed is another image"
    assert [call.args[0] for call in seen.call_args_list][1:] == [(1, 3), (2, 3), (3, 3)]
    # without guidance; a seed that was removed
    theirs = app["edit"](*inputs, "make it dusk", 2, 1, None, progress=seen)
    ours = trainer.predict(images, "make it dusk", num_inference_steps=2, true_cfg_scale=1, progress=False)
    assert close_images(np.asarray(theirs), ours)
    refused = [([None] * len(inputs) + ["make it dusk"], "There is no image yet"),
               ([*inputs, "  \n"], "The instruction is empty"), ([*inputs, None], "The instruction is empty")]
    for wrong, message in refused:
        with pytest.raises(Refused, match=message): app["edit"](*wrong, 3, 3.0, 5, progress=seen)
        with pytest.raises(Refused, match=message): app["check"](*wrong, 3, 3.0, 5)


def constants(code):
    names = {}
    exec(code[:code.index("import inspect")], names)
    return {key: value for key, value in names.items() if key.isupper()}


def facts(made, **changes): return space_facts(made()[1]) | FACTS | changes


def test_text_from_data_is_text(made):
    app = space_app(facts(made, title=HOSTILE, instruction=HOSTILE, base_model=f"me/{HOSTILE}"))
    compile(app, "app.py", "exec")
    app.encode()
    found = constants(app)
    assert found["TITLE"] == found["INSTRUCTION"] == HOSTILE
    assert not re.search(r"<img|(?<!\\)!\[|(?<!\\)\$|\n---", found["ABOUT"]) and found["ABOUT"].count("\n") == 2
    plain = space_app(facts(made, title="a", instruction="b"))
    assert app.count("evil") == plain.count("evil") + 4 * HOSTILE.count("evil"), "in four literals and nowhere else"


def test_a_hostile_title_in_a_lora_file(made, running):
    title = HOSTILE.replace("\ud800", "")
    _, lora = made(title=title)
    space = write_space(lora, base_model=str(tiny_folder("2511")))
    code = (space/"app.py").read_text()
    assert constants(code)["TITLE"] == " ".join(title.split())
    assert yaml.safe_load((space/"README.md").read_text().split("\n---\n")[0])["title"] == " ".join(title.split())
    running(code, space/"app.py")


def test_the_header_is_yaml(made):
    title = " ".join(HOSTILE.replace("\ud800", "").split())
    text = space_readme(facts(made, title=title, license="x\nsdk: static\n---\n"))
    header = yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.S)[1])
    assert header["title"].startswith("it's") and header["license"] == "x\nsdk: static\n---\n"
    expected = dict(sdk="gradio", app_file="app.py", base_model=FACTS["base_model"], models=[FACTS["base_model"]],
                    suggested_hardware="zero-a10g", python_version="3.12")
    assert {key: header[key] for key in expected} == expected
    assert re.fullmatch(r"\d+\.\d+\.\d+", header["sdk_version"])
    body = text.split("---\n")[-1]
    assert "<img" not in body and "](http" not in body


def test_base_model_and_licence_are_the_cards(made, tmp_path, capsys):
    _, lora = made()
    local = space_facts(lora)
    assert local["base_model"] == "Qwen/Qwen-Image-Edit-2511"
    assert local["license"] is None, "the card of a model folder has neither"
    card = (lora/"README.md").read_text()
    (lora/"README.md").write_text(card.replace("---\n", "---\nbase_model: me/mine\nlicense: mit\n", 1))
    assert {k: space_facts(lora)[k] for k in ("base_model", "license")} == dict(base_model="me/mine", license="mit")
    assert space_facts(lora, "me/other")["base_model"] == "me/other", "what is asked for wins over the card"
    space = write_space(lora, tmp_path/"other")
    assert f"hf upload YOU/NAME {space} --repo-type space --private" in capsys.readouterr().out
    assert sorted(p.name for p in space.iterdir()) == ["README.md", "app.py", WEIGHT_NAME, "requirements.txt"]
    assert (space/WEIGHT_NAME).read_bytes() == (lora/WEIGHT_NAME).read_bytes()
    for broken in ("", "no header", "---\na: [\n---\n", "---\n- a\n---\n"):
        (lora/"README.md").write_text(broken)
        assert space_facts(lora)["license"] is None


@pytest.mark.slow
def test_a_schedule_for_few_steps_is_used(made, running):
    trainer, lora = made(schedule="lightning")
    space = write_space(lora, base_model=str(tiny_folder("2511")))
    code = (space/"app.py").read_text()
    found = constants(code)
    assert (found["STEPS"], found["GUIDANCE"]) == (4, 1.0) and found["SCHEDULER"]["shift_terminal"] is None
    image = photo((150, 100), 1)
    theirs = running(code, space/"app.py")["edit"](image, None, None, "make it dusk", 4, 1.0, 0, progress=mock.Mock())
    plain = trainer.predict(image, "make it dusk", num_inference_steps=4, true_cfg_scale=1, progress=False)
    ours = trainer.predict(image, "make it dusk", schedule="lightning", progress=False)
    assert close_images(np.asarray(theirs), ours)
    assert np.abs(ours.astype(int) - plain).mean() > 0.1, "the schedule makes a difference"


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_has_its_pipeline_and_images(variant, made):
    v, app = VARIANTS[variant], None
    app = space_app(facts(made, pipeline=v.pipeline, several_images=v.multi_image, images=v.trained_images))
    assert f"from diffusers import {v.pipeline}\n" in app and hasattr(diffusers, v.pipeline)
    assert app.count("gr.Image(") == 1 + (v.trained_images if v.multi_image else 1)
    assert ("image=images," in app) == v.multi_image and ("More images" in app) == v.multi_image
    assert inspect.getmodule(getattr(diffusers, v.pipeline)).calculate_dimensions(1024 * 1024, 1.5)[:2] == (1248, 832)


def test_trigger_and_instructions_are_proposed(pairs, tmp_path):
    from qie_nb.extras.space import first_instruction
    assert first_instruction({}) == ""
    assert first_instruction(dict(trigger="duo", captions={"a": 1})) == "duo"
    assert first_instruction(dict(captions={"a": 3, "b": 1})) == "a"


def test_files_of_others_are_kept(made):
    _, lora = made()
    space = write_space(lora)
    write_space(lora) # our own are written again
    for name in ("app.py", "README.md"):
        was = (space/name).read_text()
        (space/name).write_text("mine")
        with pytest.raises(ValueError, match=f"{name}' was not written by write_space, so it is kept"):
            write_space(lora)
        assert (space/name).read_text() == "mine"
        (space/name).write_text(was)
    card = (lora/"README.md").read_text()
    with pytest.raises(ValueError, match="README.md' was not written by write_space"): write_space(lora, lora)
    assert (lora/"README.md").read_text() == card, "the model card"


def test_folders_without_a_lora_of_ours_are_refused(made, tmp_path):
    trainer, lora = made()
    with pytest.raises(ValueError, match=f"contains no {WEIGHT_NAME}; call trainer.save_lora"): write_space(tmp_path)
    for wrong in ("", "https://huggingface.co/me/lora"):
        with pytest.raises(ValueError, match="`lora`"): write_space(wrong)
    comfy = trainer.save_lora(tmp_path/"comfy", format="comfyui").parent
    assert (comfy/COMFY_NAME).is_file()
    with pytest.raises(ValueError, match="contains no"): write_space(comfy)
    from safetensors import safe_open
    from safetensors.torch import save_file
    with safe_open(lora/WEIGHT_NAME, "pt") as f: tensors = {key: f.get_tensor(key) for key in f.keys()}
    save_file(tensors, lora/WEIGHT_NAME)
    with pytest.raises(ValueError, match="names no variant of the model"): write_space(lora)
    (lora/WEIGHT_NAME).write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="LoRA"): write_space(lora)
    assert not (lora/"space").exists() and not (comfy/"space").exists()


def test_a_note_of_wrong_types_is_not_used(made):
    from qie_nb.lora.adapters import write_lora
    from qie_nb.lora.formats import read_lora
    _, lora = made()
    was = read_lora(lora)
    wrong = dict(variant="2511", title=["x"], trigger={"a": 1}, captions=3, base=["/etc"],
                 control_area="__import__('os').abort()", vl_area=True, image_positions=[], schedule="none")
    write_lora(lora/WEIGHT_NAME, was.state, was.config, wrong)
    app = constants(space_app(space_facts(lora)))
    assert (app["INSTRUCTION"], app["STEPS"], app["TITLE"]) == ("", 20, "LoRA for Qwen-Image-Edit-2511")
    assert app["AREAS"] == {1024**2: 1024**2, 384**2: 384**2}
    write_lora(lora/WEIGHT_NAME, was.state, was.config, wrong | dict(schedule=dict(steps="many")))
    with pytest.raises(ValueError, match="`schedule` of LoRA"): space_facts(lora)
    for variant in ("other", ["2511"]):
        write_lora(lora/WEIGHT_NAME, was.state, was.config, dict(variant=variant))
        with pytest.raises(ValueError, match="names no variant of the model"): write_space(lora)


def test_requirements_are_the_installed_versions():
    lines = requirements().split()
    names = {line.split("==")[0] for line in lines}
    assert names == {"torch", "torchvision", "diffusers", "transformers", "accelerate", "peft"}
    assert f"diffusers=={diffusers.__version__}" in lines or not re.fullmatch(r"[\d.]+", diffusers.__version__)
    with mock.patch("qie_nb.extras.space.version", return_value="0.43.0.dev0"):
        assert "diffusers\n" in requirements(), "what no index has is not pinned"
