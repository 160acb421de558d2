"""The embedded model and what `make demo` promises of it."""
import json, re, signal, subprocess, sys

import numpy as np
import pytest
from PIL import Image

from qie_nb.cli import main
from qie_nb.tiny import photos
from qie_nb.tiny.photos import PHOTOS, crops, demo
from qie_nb.models.encoders import decode_latents, encode_image
from qie_nb.devices.edit_model import EditModel
from qie_nb.trainer import QwenImageEditTrainer


def test_the_embedded_model_is_small_and_holds_no_pickle():
    files = [p for p in EditModel("tiny").folder.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 12e6
    assert {p.suffix for p in files} == {".json", ".safetensors"}


def test_its_vae_sees_photographs_it_never_saw():
    assert not set(PHOTOS["held_out"]) & set(PHOTOS["train"] + PHOTOS["more"])
    vae = EditModel("tiny").get("vae")
    for size in ((64, 64), (128, 128)):
        errors = [decode_latents(vae, encode_image(vae, c, size))[0].astype(float) - np.asarray(c) for c in crops(6, size, seed=3, split="held_out")]
        assert np.mean([10 * np.log10(255 ** 2 / (e ** 2).mean()) for e in errors]) >= 24, "PSNR in dB"


@pytest.mark.slow
@pytest.mark.parametrize("shorter, seeds", [
    pytest.param(dict(steps=60, held_out=8, seeds=(0,)), 1, id="60 steps"),
    pytest.param({}, 3, id="as `make demo`", marks=pytest.mark.weekly)])
def test_the_demo_learns_an_edit_that_the_model_does_not_know(shorter, seeds, tmp_path):
    first = demo(tmp_path, **shorter)
    encoded = 48 + first["crops"] # pairs to train on, and to judge on
    assert first["crops"] >= 8 and len(first["ratio_per_seed"]) == seeds
    assert max(first["ratio_per_seed"]) <= 0.6
    assert json.loads((tmp_path/"metrics.json").read_text()) == json.loads(json.dumps(first))
    assert not {"vae", "text_encoder"} & set(first["built_in_training"]) and first["precompute"]["encoded"] == encoded
    assert all((tmp_path/name).stat().st_size for name in ("before_after.png", "loss.png", "lora/pytorch_lora_weights.safetensors"))
    assert Image.open(tmp_path/"before_after.png").size[0] > 500
    assert demo(tmp_path, steps=2, held_out=2, seeds=(0,))["precompute"]["encoded"] == 0


@pytest.mark.parametrize("reason, code", [("SIGTERM", 143), ("interrupted", 130), ("`train.max_hours` 1 is nearly over", 130)])
def test_a_stopped_demo_judges_nothing(reason, code, tmp_path, monkeypatch, capsys):
    "`fit` returns after a signal, because the run is saved; five minutes of judging used to follow."
    def stopped_fit(trainer):
        trainer.state.stop, trainer.state.global_step = reason, 12
        return trainer
    monkeypatch.setattr(QwenImageEditTrainer, "cache_embeddings", nothing)
    monkeypatch.setattr(QwenImageEditTrainer, "fit", stopped_fit)
    monkeypatch.setattr(QwenImageEditTrainer, "save_lora", nothing)
    monkeypatch.setattr(photos, "_judge", nothing)
    assert main(["demo", "--out", str(tmp_path/"demo")]) == code
    said = capsys.readouterr().err.strip()
    assert said == "qie-nb demo: stopped; 12 of 150 steps were trained and nothing was judged; run it again: it begins anew and reuses the encoded images"


def nothing(*args): "Does nothing."


@pytest.mark.weekly # with each change `qie-nb train` gets this signal, and a demo is stopped without a process
def test_sigterm_during_training_ends_the_demo(tmp_path):
    command = [sys.executable, "-u", "-m", "qie_nb.cli", "demo", "--out", str(tmp_path/"demo")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if re.match(r"train \d+/150", line):
                break
        process.send_signal(signal.SIGTERM)
        printed, said = process.communicate()
    assert process.returncode == 143 and "stopping after this step" in printed
    assert "qie-nb demo: stopped; " in said and "Traceback" not in said
    assert not (tmp_path/"demo"/"metrics.json").exists() and not (tmp_path/"demo"/"before_after.png").exists()
