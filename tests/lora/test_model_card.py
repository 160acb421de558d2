"""Model cards: escaping, header, usage code, upload."""
import re
from fnmatch import fnmatch
from unittest import mock

import huggingface_hub
import numpy as np
import pytest
import yaml
from PIL import Image

from qie_nb.config import make_config
from qie_nb.lora import adapters as lora
from qie_nb.lora.formats import COMFY_NAME, WEIGHT_NAME
from qie_nb.lora.model_card import card_settings, model_card, published, push_to_hub, write_model_card
from qie_nb.models.components import VARIANTS
from qie_nb.sampling.denoising import SCHEDULES
from qie_nb.tiny.random_models import tiny_folder
from helpers import slow, small_areas
from loras import http_error, trained, written

NASTY = "blue | </td><script>alert(1)</script> ![x](http://evil/p.png) `code` \n---\n# heading\n``` \n````md"
FACTS = dict(base_model="Qwen/Qwen-Image-Edit-2511", license="apache-2.0", variant="2511", samples=40, held_out=4, controls=2, image_size=[1024, 768],
             captions=[NASTY, "```", "# injected", "make it red"], held_out_loss=0.1234, weights="ema", steps=500, title=NASTY, settings={"train.note": NASTY, "optimizer.lr": 1e-4})


def test_captions_are_escaped():
    card = model_card(FACTS, [("samples/00.jpg", NASTY)], "me/lora")
    body = re.sub(r"^(`{3,})(?!`).*\n(?:.*\n)*?\1$", "", card.split("---\n", 2)[2], flags=re.M).splitlines() # without its fenced blocks
    assert not any(line.startswith("```") or "<script" in line or "</td>" in line or "](http" in line for line in body)
    assert [line for line in body if line.startswith("#")][1:] == ["## Images", "## Use", "## Data", "## Captions", "## Validation loss", "## Weights", "## Settings"]
    for line in body:
        if line.startswith("|"): assert len(re.findall(r"(?<!\\)\|", line)) == 3, line
    assert "make it red" in card and "running mean (EMA) over the steps, after 500 steps" in card


def test_a_card_says_how_many_captions_it_leaves_out():
    card = model_card(FACTS | dict(captions=[f"edit {n}" for n in range(8)]))
    assert "edit 4\n```\n\nand 3 more." in card and "edit 5" not in card


def test_header_is_yaml_with_known_facts_only(tmp_path):
    top = lambda facts: yaml.safe_load(model_card(facts).split("---\n")[1])
    assert top(FACTS) == dict(base_model="Qwen/Qwen-Image-Edit-2511", license="apache-2.0", library_name="diffusers", pipeline_tag="image-to-image",
                              tags=["lora", "diffusers", "qwen-image-edit", "image-to-image"])
    assert {"base_model", "license"}.isdisjoint(top(dict(base_model=str(tmp_path)))) and top(dict(license="x\nevil: 1")).get("evil") is None
    assert model_card({}).count("\n## ") == 1, "unknown parts are omitted"


LIGHTNING = vars(SCHEDULES["lightning"])


@pytest.mark.parametrize("variant, schedule", [slow("v1", None), ("2511", None), ("2511", LIGHTNING)])
def test_usage_code_runs(variant, schedule, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lora.save_lora(trained(variant), "lora")
    Image.new("RGB", (64, 64), "red").save("input.png")
    v = VARIANTS[variant]
    facts = FACTS | dict(variant=variant, pipeline=v.pipeline, several_images=v.multi_image,
                         base_model=str(tiny_folder(variant)), captions=["say \"it's\" blue"], schedule=schedule)
    code = re.search(r"```python\n(.*?)\n```", write_model_card("lora", facts, where=str(tmp_path/"lora")).read_text(), re.S)[1]
    steps = f"num_inference_steps={schedule['steps'] if schedule else 20}"
    small = "num_inference_steps=2, height=32, width=32"
    for old, new in (("bfloat16", "float32"), ('"cuda"', '"cpu"'), (steps, small)):
        assert old in code
        code = code.replace(old, new)
    made = {}
    with small_areas(variant, 96 * 96, 112 * 112): exec(code, made)
    if schedule:
        used = made["pipe"].scheduler.config
        assert {name: used[name] for name in schedule["scheduler"]} == schedule["scheduler"]
        assert "true_cfg_scale=1.0" in code
    assert np.asarray(Image.open("output.png")).shape == (32, 32, 3)


@pytest.fixture
def hub(monkeypatch):
    api = mock.Mock(**{"create_repo.side_effect": lambda repo, **kw: f"https://huggingface.co/{repo}"})
    for name in ("create_repo", "upload_folder"): monkeypatch.setattr(huggingface_hub.HfApi, name, getattr(api, name))
    return api


def test_upload_takes_lora_card_and_images_only(hub, tmp_path):
    image, folder, tr = tmp_path/"me [1] ](x).png", tmp_path/"run", trained()
    Image.new("RGB", (4, 4)).save(image)
    lora.save_lora(tr, folder), lora.save_lora(tr, folder, format="comfyui")
    for name in ("optimizer.safetensors", "state.json", "samples/99.png", "samples/secret.png", "logs/x.csv", "training_images/0.png"): written(folder/name)
    write_model_card(folder, FACTS, [image, (image, "again")], "me/lora")
    assert push_to_hub(folder, "me/lora") == "https://huggingface.co/me/lora"
    made, sent = hub.create_repo.call_args, hub.upload_folder.call_args.kwargs
    assert made.args == ("me/lora",) and made.kwargs["private"] is True and made.kwargs["exist_ok"] and sent["folder_path"] == str(folder)
    files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    taken = {f for f in files if any(fnmatch(f, p) for p in sent["allow_patterns"])}
    assert taken == {WEIGHT_NAME, COMFY_NAME, "README.md", "samples/00.png", "samples/01.png"} == set(published(folder)) and len(files) == 11


def test_upload_errors_name_the_remedy(hub, tmp_path):
    hub.create_repo.side_effect = http_error("LocalTokenNotFoundError", 0)
    def refused(sentence, repo="me/lora"):
        with pytest.raises(ValueError, match=sentence): push_to_hub(tmp_path, repo)
    written(tmp_path/WEIGHT_NAME), refused("write the model card there first")
    write_model_card(tmp_path, {})
    refused("'me/lora' cannot be written without a token that allows it; log in with `hf auth login`, or set HF_TOKEN")
    refused("`repo_id` must be owner/name, got 'lora'", "lora")


def test_settings_contain_no_paths(): # nor those that the notebook tries
    paths = dict(train=dict(output_dir="/home/me"), logging=dict(log_dir="/home/me"), cache=dict(cache_dir="/home/me"))
    assert "/home/me" not in str(card_settings(make_config(paths)))
