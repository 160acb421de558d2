"""The embedded model and what `make demo` promises of it."""
import json

import numpy as np
import pytest
from PIL import Image

from qie_nb.tiny.demo import demo
from qie_nb.encoding.vae import decode_latents, encode_image
from qie_nb.models.components import Components
from qie_nb.tiny.photos import PHOTOS, crops


def test_the_embedded_model_is_small_and_holds_no_pickle():
    files = [p for p in Components("tiny").folder.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 12e6
    assert {p.suffix for p in files} == {".json", ".safetensors"}


def test_its_vae_sees_photographs_it_never_saw():
    assert not set(PHOTOS["held_out"]) & set(PHOTOS["train"] + PHOTOS["more"])
    vae = Components("tiny").get("vae")
    for size in ((64, 64), (128, 128)):
        errors = [decode_latents(vae, encode_image(vae, c, size))[0].astype(float) - np.asarray(c) for c in crops(6, size, seed=3, split="held_out")]
        assert np.mean([10 * np.log10(255 ** 2 / (e ** 2).mean()) for e in errors]) >= 24, "PSNR in dB"


@pytest.mark.slow
def test_the_demo_learns_an_edit_that_the_model_does_not_know(tmp_path):
    first = demo(tmp_path)
    assert first["crops"] >= 8 and len(first["ratio_per_seed"]) == 3 and max(first["ratio_per_seed"]) <= 0.6
    assert json.loads((tmp_path/"metrics.json").read_text()) == json.loads(json.dumps(first))
    assert not {"vae", "text_encoder"} & set(first["built_in_training"]) and first["precompute"]["encoded"] == 60
    assert all((tmp_path/name).stat().st_size for name in ("before_after.png", "loss.png", "lora/pytorch_lora_weights.safetensors"))
    assert Image.open(tmp_path/"before_after.png").size[0] > 500
    assert demo(tmp_path, steps=2, held_out=2, seeds=(0,))["precompute"]["encoded"] == 0
