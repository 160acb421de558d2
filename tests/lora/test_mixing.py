"""Several adapters at prediction: diffusers' own images, errors, training beside them, merging, few-step schedules, the command line."""
import math

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from PIL import Image

from qie_nb.lora import adapters as lora
from qie_nb.cli import main
from qie_nb.config import make_config
from qie_nb.sampling.denoising import SCHEDULES, as_schedule, steps_in_name
from qie_nb.lora.formats import read_lora
from qie_nb.lora.adapters import parse_loras, split_weight, write_lora
from qie_nb.models.components import restore_image_positions
from qie_nb.models.quantizations.known import QUANTIZATIONS, library_version
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.run_adapters import info_of_sizes
from helpers import COMPILES, OnStep, adapters_close, close_images as close, merged, settings, slow, small_areas, weekly, write_pairs
from loras import bare, same, trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
AREA, VL = 96 * 96, 112 * 112 # of the tiny folders
SIZE = dict(height=48, width=64)
IMAGE = Image.fromarray(np.random.default_rng(1).integers(0, 255, (40, 56, 3), dtype=np.uint8))


@pytest.fixture(autouse=True, scope="module")
def small_pipelines():
    with small_areas("v1", AREA, VL), small_areas("2511", AREA, VL): yield


def trainer(variant="2511", **sections):
    base = dict(model=dict(pretrained_model_name_or_path=str(tiny_folder(variant))), train=dict(device="cpu", mixed_precision="no"))
    return QwenImageEditTrainer(merged(base, sections))


def predict(t, **kw): return t.predict(IMAGE, "make it blue", seed=5, **SIZE | dict(num_inference_steps=2) | kw)


def write(path, seed, info=None, format="diffusers", **settings):
    return lora.save_lora(trained(seed=seed, scale=0.15, **settings), path, info, format=format)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    d = tmp_path_factory.mktemp("loras")
    return dict(style=write(d/"style.safetensors", 1), wide=write(d/"wide.safetensors", 2, r=8, lora_alpha=3, target_modules="all_linear"),
                root=write(d/"root.safetensors", 3, r=6, lora_alpha=2, use_rslora=True, target_modules="attention_text"),
                comfy=write(d/"comfy.safetensors", 4, format="comfyui", lora_alpha=2), dora=write(d/"dora.safetensors", 5, use_dora=True, target_modules=["to_q", "to_v"]))


def pipeline(variant, files, scheduler=None, **mix):
    pipe = DiffusionPipeline.from_pretrained(tiny_folder(variant), **(dict(scheduler=scheduler) if scheduler else {}))
    restore_image_positions(pipe).set_progress_bar_config(disable=True)
    for n in mix: pipe.load_lora_weights(str(files[n]), adapter_name=n)
    pipe.set_adapters(list(mix), list(mix.values()))
    return pipe


def piped(pipe, steps=2, cfg=4.0):
    images = [IMAGE] if "Plus" in type(pipe).__name__ else IMAGE
    return np.asarray(pipe(images, "make it blue", negative_prompt=" ", true_cfg_scale=cfg, num_inference_steps=steps, generator=torch.Generator().manual_seed(5), **SIZE).images[0])


def mixed(files, mix, t=None): return (t or trainer()).load_loras([dict(path=files[n], weight=w, name=n) for n, w in mix.items()])


@pytest.mark.parametrize("variant, mix", [("2511", dict(root=1.2, comfy=-0.4, style=0.7)), slow("v1", dict(dora=0.6, wide=1)), slow("2509", dict(comfy=0.5, wide=0))], ids=str)
def test_weighted_adapters_give_diffusers_image(variant, mix, files):
    ours, pipe = mixed(files, mix, trainer(variant)), pipeline(variant, files, **mix)
    theirs = piped(pipe)
    assert ours.active_adapters() == mix and close(predict(ours), theirs)
    pipe.set_adapters(list(mix), [1.0] * len(mix))
    assert not close(piped(pipe), theirs, 5), "the weights have no effect"


def test_loading_weighting_and_deleting_follow_diffusers(files):
    ours, pipe = trainer().load_lora(files["style"], "style").load_lora(files["wide"], "wide", weight=0.7), pipeline("2511", files, style=1.0, wide=1.0)
    assert ours.active_adapters() == dict(wide=0.7), "only the last one loaded, as in diffusers"
    for t in (ours, pipe):
        t.set_adapters(["wide", "style"], [0.2, 1.0])
        t.delete_adapters("wide")
    assert ours.active_adapters() == dict(style=1.0) and close(predict(ours), piped(pipe))
    ours.transformer.set_adapters(["style"], [0.25])
    assert ours.active_adapters() == dict(style=0.25), "set through diffusers"
    assert ours.load_lora(files["wide"], "wide").delete_adapters("wide").active_adapters() == {}, "peft activates the other one"


def state_of(t): return {k: v.clone() for k, v in t.transformer.state_dict().items()}, t.active_adapters(), dict(t.adapters.loaded)


def same_state(a, b): return a[1:] == b[1:] and a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0])


def changed(d, change):
    "The `style` file with its A matrices changed."
    state, config, info = read_lora(write(d/"x.safetensors", 1))[:3]
    return write_lora(d/"changed.safetensors", {k: change(t) if "lora_A" in k else t for k, t in state.items()}, config, info)


@pytest.fixture(scope="module")
def with_style(files): return mixed(files, dict(style=0.5))


@pytest.mark.parametrize("act, sentence", [
    (lambda t, f, d: t.set_adapters(["style", "third"]), "there is no adapter 'third'; loaded are"),
    (lambda t, f, d: t.set_adapters(["style"], [1, 2]), "`names` and `weights`"),
    (lambda t, f, d: t.set_adapters(["style", "style"]), "each name once"),
    (lambda t, f, d: t.load_lora(f["wide"], "wide", weight=math.nan), "must be a finite number, got nan"),
    (lambda t, f, d: t.load_lora(f["wide"], "a.b"), "must consist of letters.* got 'a.b'"),
    (lambda t, f, d: t.load_loras([f["wide"], changed(d, lambda a: a.repeat(1, 2))]), "does not fit this transformer"),
    (lambda t, f, d: t.load_loras([f["wide"], changed(d, lambda a: a[:3])]), "has different ranks in .*lora_A.* give the file as it was trained"),
    (lambda t, f, d: t.delete_adapters("third"), "there is no adapter 'third'"),
    (lambda t, f, d: t.save_lora(d), "there is no adapter to save")])
def test_errors_change_nothing(act, sentence, with_style, files, tmp_path):
    t, before = with_style, state_of(with_style)
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as e: act(t, files, tmp_path)
    assert "\n" not in str(e.value) and same_state(before, state_of(t))


def test_a_missing_file_is_reported_before_the_transformer_is_built(built, tmp_path):
    for act in (trainer().load_lora, lambda path: predict(trainer(predict=dict(loras=[dict(path=path)])))):
        with pytest.raises(FileNotFoundError): act(tmp_path/"none.safetensors")
    assert not built


def test_an_interrupted_load_leaves_nothing(with_style, files, monkeypatch):
    t, before, tr = with_style, state_of(with_style), bare()
    real, keys = type(tr).load_lora_adapter, tr.state_dict().keys()

    def cut(self, *a, **kw):
        real(self, *a, **kw)
        if kw["adapter_name"] != "root": raise KeyboardInterrupt
    monkeypatch.setattr(type(tr), "load_lora_adapter", cut)
    with pytest.raises(KeyboardInterrupt): t.load_loras([files["root"], files["wide"]]) # at the second one
    assert same_state(before, state_of(t))
    with pytest.raises(KeyboardInterrupt): lora.load_lora(tr, files["style"])
    assert tr.state_dict().keys() == keys and lora.active_loras(tr) == {}


def test_the_first_adapters_areas_are_used_and_differences_printed_once(tmp_path, capsys):
    infos = dict(fast={}, small=dict(control_area=64 * 64, variant="2511"), large=dict(control_area=96 * 96, variant="v1"))
    t = trainer().load_loras([write(tmp_path/f"{n}.safetensors", 1, info) for n, info in infos.items()])
    printed = capsys.readouterr().out
    assert t.geometry().control_area == 64 * 64 and "'control_area': 9216" in printed and "'control_area': 4096" in printed
    assert "adapter 'large' was trained on v1, and the base is 2511" in printed
    for names, weights, area, lines in ((["large", "small"], None, 96 * 96, 1), (["large", "small"], [0, 1], 64 * 64, 0), (["small", "large"], None, 64 * 64, 0), ("fast", None, AREA, 0)):
        assert t.set_adapters(names, weights).geometry().control_area == area and capsys.readouterr().out.count("\n") == lines, "another order, another message"


@pytest.fixture
def run_of(tmp_path):
    "A function that makes a trainer of two steps; loading other adapters first keeps the modulation layers, so every run keeps them."
    root = write_pairs(tmp_path/"set", ((48, 32),) * 2)
    return lambda out, *callbacks, **train: QwenImageEditTrainer(settings(
        root, tmp_path/out, train=dict(max_train_steps=2) | train, model=dict(modulation_table=False), optimizer=dict(lr=0.01)), callbacks)


@pytest.mark.slow
def test_training_saves_and_resumes_its_own_adapter(files, run_of, tmp_path, capsys):
    alone, beside = run_of("a").fit(), run_of("b").load_loras({files["style"]: 0.5})
    beside.fit()
    assert "training uses only adapter 'default'; deactivated: style" in capsys.readouterr().out
    adapters_close(beside, alone)
    assert beside.active_adapters() == dict(default=1.0)
    beside.set_adapters(["default", "style"], [0.3, 0.5])
    saved = read_lora(beside.save_lora(tmp_path/"saved")).state
    same({f"transformer.{k}": t for k, t in saved.items()}, lora.lora_state(beside.transformer)) # weights are not part of the file
    beside.save_checkpoint(2, 2)
    again = run_of("b", resume_checkpoint="latest").load_lora(files["wide"], "wide").fit()
    adapters_close(again, alone)
    assert again.active_adapters() == dict(default=1.0)


def trainable(t): return {n for n, p in t.transformer.named_parameters() if p.requires_grad}


@pytest.mark.slow
def test_predicting_with_others_does_not_change_a_run(files, run_of):
    def edit(t):
        before = trainable(t)
        assert before and trainable(t.load_lora(files["wide"], "wide")) == before
        predict(t), t.delete_adapters("wide"), t.set_adapters("default")
        assert trainable(t) == before
    a, b = run_of("a").fit(), run_of("b", OnStep(edit)).fit()
    adapters_close(a, b)
    with pytest.raises(ValueError, match="adapter 'default' is being trained"): b.delete_adapters("default")


def test_the_configuration_names_adapters(files, capsys):
    t = trainer(predict=dict(loras=[dict(path=files["style"], weight=0.8), dict(path=files["wide"], weight=0.5, name="w")]))
    predict(t)
    assert t.active_adapters() == dict(style=0.8, w=0.5)
    own = trainer(predict=dict(loras=[str(files["style"])])).load_lora(files["root"])
    predict(own)
    assert own.active_adapters() == dict(default=1.0) and "`predict.loras`" in capsys.readouterr().out
    with pytest.raises(ValueError, match="predict.loras"): make_config(dict(predict=dict(loras=[dict(path="x", weight=math.inf)])))


@pytest.mark.parametrize("mix", [dict(style=0.8, wide=0.5, root=-0.3), slow(dict(dora=0.7))], ids=str)
def test_active_adapters_are_merged_at_their_weights(mix, files):
    t = mixed(files, mix, trainer().load_lora(files["comfy"], "idle"))
    weights, beside = {n: m.base_layer.weight.clone() for n, m in t.transformer.named_modules() if hasattr(m, "lora_A")}, predict(t)
    assert close(predict(t.merge_lora()), beside) and any(not torch.equal(weights[n], t.transformer.get_submodule(n).base_layer.weight) for n in weights)
    with pytest.raises(ValueError, match="call unmerge_lora"): t.set_adapters("idle")
    t.unmerge_lora()
    assert close(predict(t), beside) and t.active_adapters() == mix
    t.merge_lora().delete_adapters(["idle", *mix])
    assert not any("lora" in k or "base_layer" in k for k in t.transformer.state_dict())
    assert all(torch.equal(w, t.transformer.get_submodule(n).weight) for n, w in weights.items())


def test_a_dora_is_not_merged_with_others(files):
    t = mixed(files, dict(style=1, dora=1))
    before = state_of(t)
    with pytest.raises(ValueError, match="adapters style, dora both change .* and one is a DoRA"): t.merge_lora()
    assert same_state(before, state_of(t))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [weekly(q) if q in COMPILES else q for q in QUANTIZATIONS])
def test_only_plain_layers_of_a_quantized_base_are_merged(quantization, files, tmp_path):
    if not library_version(QUANTIZATIONS[quantization].package): pytest.skip(f"{QUANTIZATIONS[quantization].package} is not installed")
    t = trainer(model=dict(quantize=quantization)).load_lora(files["style"])
    before = predict(t)
    with pytest.raises(ValueError, match="^the base is quantized .*use it unmerged, or load the base with `model.quantize` none$"): t.merge_lora()
    assert close(predict(t), before) and not lora.is_merged(t.transformer)
    t.load_lora(write(tmp_path/"plain.safetensors", 7, target_modules=["proj_out", "img_in"]))
    beside, merged = predict(t), predict(t.merge_lora())
    assert lora.is_merged(t.transformer) and close(merged, beside) and not close(merged, before)
    t.unmerge_lora()
    assert close(predict(t), beside)


LIGHTNING = FlowMatchEulerDiscreteScheduler( # as ModelTC/Qwen-Image-Lightning gives it to the pipelines
    base_shift=math.log(3), max_shift=math.log(3), max_image_seq_len=8192, shift_terminal=None, use_dynamic_shifting=True, time_shift_type="exponential")
LIGHTNING_NAME = "Qwen-Image-Edit-2511-Lightning-4steps-V1.0-bf16.safetensors"


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    d = tmp_path_factory.mktemp("fast")
    return {n: write(d/LIGHTNING_NAME.replace("4", str(n)), 9, format="comfyui", lora_alpha=8) for n in (4, 8)}


@pytest.mark.parametrize("variant", ["2511", slow("v1")])
def test_a_lightning_file_is_recognized_and_sampled_as_by_the_pipeline(variant, fast, files, capsys):
    pipe = pipeline(variant, files | dict(fast=fast[4]), LIGHTNING, style=0.8, fast=1.0)
    t, theirs = trainer(variant).load_loras({files["style"]: 0.8, fast[4]: 1.0}), piped(pipe, 4, 1.0)
    assert close(predict(t, num_inference_steps=None), theirs)
    printed = capsys.readouterr().out
    assert "schedule lightning, 4 steps, guidance 1" in printed and LIGHTNING_NAME in printed
    assert t.sampling()[:2] == t.sampling("lightning")[:2] == (4, 1.0) and t.sampling(None, 2, 2.5)[:2] == (2, 2.5) and capsys.readouterr().out == "", "printed once"
    names = list(t.active_adapters())
    t.set_adapters(names, [1, 0])
    assert t.sampling() == (20, 4.0, {}) # the model's own, with the adapter at 0 or without a schedule
    t.set_adapters(names, [0.8, 1])
    pipe.scheduler = LIGHTNING.from_config(LIGHTNING.config, shift_terminal=0.3)
    assert close(predict(t, num_inference_steps=None, scheduler_overrides=dict(shift_terminal=0.3)), piped(pipe, 4, 1.0)), "the caller's overrides win"
    pipe.scheduler = LIGHTNING.from_pretrained(tiny_folder(variant), subfolder="scheduler")
    assert close(predict(t, num_inference_steps=3, true_cfg_scale=1.0, schedule="none"), piped(pipe, 3, 1.0))


def test_our_files_store_their_schedule(files, tmp_path, capsys):
    t = trainer().load_lora(files["style"])
    file = t.save_lora(tmp_path/"own.safetensors", schedule=dict(steps=3, true_cfg_scale=1.0, scheduler=dict(shift_terminal=None)))
    assert trainer().load_lora(file).sampling() == (3, 1.0, dict(shift_terminal=None)) and "own.safetensors" in capsys.readouterr().out
    assert read_lora(t.save_lora(tmp_path/"named.safetensors", schedule="lightning")).info["schedule"]["steps"] == 4
    with pytest.raises(ValueError, match="`schedule` must be one of"): t.save_lora(tmp_path/"x", schedule="fast")
    odd = write(tmp_path/"odd.safetensors", 1, dict(schedule=dict(steps="many")))
    with pytest.raises(ValueError, match="`schedule` of LoRA .*odd.safetensors' has 'steps'"): trainer().load_lora(odd).sampling()


def test_the_configuration_chooses_the_schedule(fast):
    t = trainer(predict=dict(schedule="lightning"))
    assert t.sampling() == (4, 1.0, SCHEDULES["lightning"].scheduler) and t.load_lora(fast[8]).sampling()[0] == 8 # from the file's name
    t = trainer(predict=dict(schedule="none")).load_lora(fast[8])
    assert t.sampling() == (20, 4.0, {}) and t.sampling("lightning", 6)[:2] == (6, 1.0)
    assert [steps_in_name(f"/loras/{n}.safetensors") for n in ("qwen_image_edit_2509_lightning_4_step", "lightning-2000steps")] == [4, None]
    with pytest.raises(ValueError, match="predict.schedule"): make_config(dict(predict=dict(schedule="turbo")))


@pytest.mark.parametrize("wrong", [dict(steps=0), dict(steps=2.5), dict(true_cfg_scale=math.nan), dict(scheduler=dict(shift="3")), dict(scheduler=dict(beta=1.0)), dict(code="x"), 3])
def test_a_files_schedule_is_checked(wrong):
    with pytest.raises(ValueError, match="`schedule` (must be|has)"): as_schedule(wrong)


def test_a_file_called_default_does_not_replace_the_trained_adapter():
    assert [one.name for one in parse_loras(["loras/default.safetensors", "b.safetensors"])] == ["default_2", "b"]
    same = [f"{folder}/b.safetensors" for folder in ("one", "two", "three")]
    assert [one.name for one in parse_loras(same)] == ["b", "b_2", "b_3"]


def test_the_first_adapter_with_image_sizes_gives_them():
    sizes = dict(control_area=4096, vl_area=1024)
    assert info_of_sizes([dict(variant="2511"), sizes, dict(control_area=9)]) == sizes
    assert info_of_sizes([dict(variant="2511")]) == dict(variant="2511") and info_of_sizes([]) == {}


def test_a_colon_in_a_path_is_no_weight(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"y:2").mkdir()
    for path in ("C:/loras/a", "y:2"): assert split_weight(path) == (path, 1.0, None)


@pytest.mark.slow
def test_predict_on_the_command_line(files, tmp_path, capsys):
    red, out, model = Image.new("RGB", (40, 40), "red"), tmp_path/"out"/"edited.png", ("--model", tiny_folder("2511"))
    IMAGE.save(tmp_path/"a.png"), red.save(tmp_path/"b.png")

    def shell(*flags): # the image, or the exit status
        flags = "--image", tmp_path/"a.png", "--prompt", "make it blue", "--seed", 5, "--height", 48, "--width", 64, "--out", out, *flags
        return main(["predict", *map(str, flags)]) or np.asarray(Image.open(out))
    t = trainer(train=dict(mixed_precision="auto")).load_loras([(files["style"], 0.5), files["root"]])
    want = t.predict([IMAGE, red], "make it blue", seed=5, schedule="lightning", num_inference_steps=2, **SIZE)
    assert close(shell(*model, "--lora", f"{files['style']}:0.5", "--lora", files["root"], "--steps", 2, "--cfg", 1, "--schedule", "lightning", "--image", tmp_path/"b.png"), want)
    for flags, sentence in ((("--lora", "none.safetensors:0.5"), "'none.safetensors' does not exist"), (("--config", "x.yaml"), "give a configuration or `--model`, not both")):
        assert shell(*model, *flags) == 2 and sentence in capsys.readouterr().err
    with pytest.raises(SystemExit): shell(*model, "--schedule", "turbo")
