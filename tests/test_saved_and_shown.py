"""The image in the notebook is the image of the file; what predict refuses before it computes."""
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from qie_nb import QwenImageEditTrainer
from qie_nb.cli import main
from qie_nb.lora.formats import lora_info
from qie_nb.models.variants.base import VARIANTS
from qie_nb.sampling.edits import as_image
from qie_nb.tiny.photos import make_pairs
from helpers import noise_image


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    make_pairs(folder/"set", "invert", 4, size=(48, 32))
    noise_image((64, 64)).save(folder/"photo.png")
    return folder


def trainer_for(folder, name, **train):
    base = dict(output_dir=str(folder/name), max_train_steps=4, val_fraction=0, eval_at_start=False, eval_interval=0, save_interval=0, save_steps=2, ema_decay=0.9, device="cpu")
    return QwenImageEditTrainer(dict(
        preset="tiny", model=dict(modulation_table=False), data=dict(dataset_path=str(folder/"set"), image_size=[64, 64], batch_size=1), cache=dict(cache_dir=str(folder/"cache")),
        train=base | train, optimizer=dict(lr=0.02), lr_scheduler=dict(warmup_steps=0, scheduler_type="constant"), logging=dict(report_to="none", log_dir=str(folder/"runs"))))


def edit(t, folder): return t.predict(str(folder/"photo.png"), "make it blue", num_inference_steps=3, progress=False)


def same(a, b): assert np.array_equal(a, b), np.abs(a.astype(int) - b.astype(int)).max()


@pytest.mark.slow
def test_after_ema_the_notebook_and_the_file_give_one_image(folder, capsys):
    t = trainer_for(folder, "ema").fit()
    shown = edit(t, folder)
    assert "predict uses the running mean of the adapter (`train.ema_decay`), as save_lora writes it" in capsys.readouterr().out
    file = t.save_lora(folder/"ema"/"lora")
    fresh = trainer_for(folder, "other").load_lora(file)
    same(edit(fresh, folder), shown)
    ema, t.adapters.ema = t.adapters.ema, None
    raw = edit(t, folder)
    t.adapters.ema = ema
    assert np.abs(raw.astype(int) - shown.astype(int)).max() > 1, "the mean is another adapter"
    same(edit(t, folder), shown)


def test_an_adapter_that_is_loaded_after_a_run_is_used_without_the_runs_mean(folder):
    t = trainer_for(folder, "loaded").fit()
    newest = sorted((folder/"loaded"/"checkpoints").glob("epoch_*"))[-1]
    raw = newest/"pytorch_lora_weights.safetensors" # as the last step left it
    shown = edit(t.load_lora(raw), folder)
    same(edit(trainer_for(folder, "raw").load_lora(raw), folder), shown)
    file = t.save_lora(folder/"loaded"/"lora")
    assert lora_info(file)["weights"] == "raw"
    saved, loaded = load_file(file), load_file(raw)
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[k], loaded[k]) for k in saved)


def test_the_weights_that_train_stay(folder):
    t = trainer_for(folder, "stay").fit()
    before = [p.detach().clone() for p in t.adapters.ema.params]
    edit(t, folder)
    assert all((p == b).all() for p, b in zip(t.adapters.ema.params, before))


@pytest.mark.slow
def test_after_a_resume_too(folder):
    trainer_for(folder, "resume", max_train_steps=2).fit()
    t = trainer_for(folder, "resume", resume_checkpoint="latest").fit()
    shown = edit(t, folder)
    same(edit(trainer_for(folder, "third").load_lora(t.save_lora(folder/"resume"/"lora")), folder), shown)


@pytest.mark.slow
def test_a_merged_adapter_is_the_saved_one(folder):
    t = trainer_for(folder, "merged").fit()
    shown = edit(t, folder)
    t.merge_lora()
    assert np.abs(edit(t, folder).astype(int) - shown.astype(int)).max() <= 1, "merging rounds"


# --- the door
@pytest.fixture(scope="module")
def trainer(folder): return trainer_for(folder, "door")


@pytest.mark.parametrize("given, sentence", [
    (dict(height="96", width="96"), "`width` must be a whole number of pixels, got '96'; write it without quotes"),
    (dict(height=96.5), "`height` must be a whole number of pixels, got 96.5"), (dict(width=True), "`width` must be a whole number"),
    (dict(width=97), "`width` must be a multiple of .*, got 97; use 96 or"), (dict(width=-8), "`width` must be a multiple of .*, got -8")])
def test_sizes(given, sentence, trainer, folder):
    with pytest.raises(ValueError, match=sentence): trainer.predict(str(folder/"photo.png"), "make it blue", progress=False, **given)


def test_images_as_people_name_them(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    for text in ("~/photo.png", f"'{folder}/photo.png'", f" {folder}/photo.png "):
        assert as_image(text).size == (64, 64)
    with pytest.raises(ValueError, match="image 'https://h/a.png' is a web address; download it"): as_image("https://h/a.png")
    with pytest.raises(ValueError, match="is a folder; give an image file, or a list of them"): as_image(str(folder))
    with pytest.raises(FileNotFoundError, match="does not exist; check the path"): as_image(folder/"no.png")
    with pytest.raises(ValueError, match="image is empty"): as_image("")
    (folder/"broken.png").write_bytes(b"x")
    with pytest.raises(ValueError, match="cannot be read .*; give another image"): as_image(folder/"broken.png")


def test_more_images_than_the_model_knows_are_a_note(trainer, folder, capsys):
    photo = str(folder/"photo.png")
    trainer.predict([photo] * 3, "mix", num_inference_steps=2, progress=False)
    assert "control images: variant" not in capsys.readouterr().out
    trainer.predict([photo] * 4, "mix", num_inference_steps=2, progress=False)
    assert "4 control images: variant 2511 was trained on up to 3" in capsys.readouterr().out
    assert {v.name: v.trained_images for v in VARIANTS.values() if v.multi_image}.keys() >= {"2509", "2511"}


@pytest.mark.parametrize("out, sentence", [
    ("result.xyz", "must end in a suffix of images, got '.xyz'"), ("result", "must end in a suffix of images, got ''"), (".", "is a folder; name a file in it"),
    ("s3://b/x.png", "is an address; give a place on this machine"), ("photo.png/x.png", "cannot be written")])
def test_a_result_that_cannot_be_written_is_refused_before_the_edit(out, sentence, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    def never(*a, **kw): raise AssertionError("the edit has begun")
    monkeypatch.setattr("qie_nb.cli._trainer", never)
    assert main(["predict", "--image", "photo.png", "--prompt", "make it blue", "--model", "tiny", "--out", out]) == 2
    assert sentence in capsys.readouterr().err


def test_the_shell_names_images_too(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for image, sentence in ((".", "is a folder"), ("https://h/a.png", "is a web address; download it"), ("no.png", "does not exist")):
        assert main(["predict", "--image", image, "--prompt", "x", "--model", "tiny", "--out", "r.png"]) == 2
        assert sentence in capsys.readouterr().err
    assert not (folder/"r.png").exists()
