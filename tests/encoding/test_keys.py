"""A cache key names all that an entry is made of: two settings with one key give the same tensors."""
import shutil
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from PIL import Image

from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.tiny.random_models import tiny_folder

from helpers import settings, write_pairs

SIZE = 100, 64
BASE = dict(image_size=[64, 64], control_area=64 * 64, vl_area=56 * 56, crop=False)
CHANGES = dict( # what differs from the base: settings of `data`, `model` and `train`, or files
    base={}, case=dict(prompt="Make It Blue"), lower=dict(prompt="make it blue"), slight=dict(data=dict(image_size=[96, 64], crop=True)), # the text encoder sees the same size
    words=dict(prompt="make it red"), space=dict(prompt="make it blue "), empty=dict(prompt=""),
    size=dict(data=dict(image_size=[48, 96])), crop=dict(data=dict(crop=True)), areas=dict(data=dict(control_area=96 * 96)), sight=dict(data=dict(vl_area=84 * 84)),
    order=dict(order=(1, 0)), one=dict(order=(0,)), dtype=dict(train=dict(mixed_precision="bf16")), template=dict(variant="v1", order=(0,)),
    positions=dict(model=dict(image_positions="installed")), weights=dict(other="text_encoder"), quantized=dict(model=dict(text_encoder_quantize="qint8")), vae=dict(other="vae"), filter=dict(touched=True))


def data_with(changes, images, folder):
    "The data set of one sample that is built so, and a fresh encoder."
    root = folder/"set"
    (root/"training_images").mkdir(parents=True)
    Image.fromarray(images[2]).save(root/"training_images"/"a.png")
    (root/"training_images"/"a.txt").write_text(changes.get("prompt") or "x")
    for n, k in enumerate(changes.get("order", (0, 1))):
        (root/f"control_images{f'_{n}' * (n > 0)}").mkdir()
        image = images[k].copy()
        if changes.get("touched"): image[0, 0] ^= 8 # a pixel
        Image.fromarray(image).save(root/f"control_images{f'_{n}' * (n > 0)}"/"a.png")
    model = tiny_folder(changes.get("variant", "2511"))
    if part := changes.get("other"):
        model = shutil.copytree(model, folder/"model")
        from safetensors.torch import load_file, save_file
        file = next((model/part).glob("*.safetensors"))
        save_file({k: v * 1.5 if v.is_floating_point() else v for k, v in load_file(file).items()}, file, {"format": "pt"})
    sections = {k: changes.get(k, {}) for k in ("train", "model", "data")}
    sections["model"] = dict(pretrained_model_name_or_path=str(model)) | sections["model"]
    trainer = QwenImageEditTrainer(settings(root, folder, **sections | dict(data=BASE | sections["data"])))
    dataset = trainer.make_loader().dataset
    if "prompt" in changes: # as it is, also empty
        dataset.samples[0] = replace(dataset.samples[0], prompt=changes["prompt"])
        dataset.refresh(dataset.identity)
    return dataset, trainer.encoder()


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    "{change: {(kind, key): tensor}} without any cache, of the latents, the prompt and the empty prompt."
    rng, out = np.random.default_rng(0), {}
    images = [rng.integers(0, 255, (SIZE[1], SIZE[0], 3), dtype=np.uint8) for _ in range(3)]
    for name, changes in CHANGES.items():
        dataset, encoder = data_with(changes, images, tmp_path_factory.mktemp(name))
        keys = dataset.keys(0)
        made = encoder.encode_missing(dataset, {0: list(dataset.needed(0))})[0]
        out[name] = {keys[n].id: t.float() for n, t in made.items()}
    return out


@pytest.mark.slow
def test_what_shares_a_key_is_the_same_tensor(entries):
    for one, other in combinations(CHANGES, 2):
        a, b = entries[one], entries[other]
        for key in a.keys() & b.keys(): torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-4, msg=lambda m: f"{one} and {other}, {key}: {m}")


def test_most_changes_change_a_key_and_spare_the_others(entries):
    kinds = lambda name: {kind.removeprefix("empty_") for kind, _ in entries[name].keys() - entries["base"].keys()} # new ones
    text, both = {"prompt_embed"}, {"pixel_latent", "control_latent", "prompt_embed"}
    assert {name: kinds(name) for name in CHANGES if name not in ("base", "positions")} == dict( # positions: as installed, perhaps the same
        case=text, lower=text, slight=both, words=text, space=text, empty=text, size={"pixel_latent"}, crop=both, areas={"control_latent"}, sight=text, order=text,
        one=text, dtype=both, template=text, weights=text, quantized=text, vae={"pixel_latent", "control_latent"}, filter=both - {"pixel_latent"})
    prompts = lambda name: {key for kind, key in entries[name] if "prompt" in kind}
    assert not prompts("one") & prompts("template")
