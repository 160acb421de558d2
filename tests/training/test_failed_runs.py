"""Runs whose result is not usable say so: nothing is saved as done, `fit` raises, the exit code is not 0."""
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from qie_nb import QwenImageEditTrainer
from qie_nb.lora.adapters import lora_tensors
from qie_nb.models.encoders import NoImage
from qie_nb.tiny.photos import make_pairs
from qie_nb.training.callbacks import Callback
from qie_nb.training.checkpoint import complete_checkpoints
from qie_nb.training.stopping import TrainingFailed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failed")
    make_pairs(folder/"set", "invert", 4, size=(48, 32))
    return folder


def config_for(folder, name, **sections):
    base = dict(
        preset="tiny", data=dict(dataset_path=str(folder/"set"), image_size=[64, 64], batch_size=1), cache=dict(cache_dir=str(folder/"cache")),
        train=dict(output_dir=str(folder/name), max_train_steps=4, val_fraction=0, eval_at_start=False, eval_interval=0, save_interval=0, device="cpu"),
        lr_scheduler=dict(warmup_steps=0, scheduler_type="constant"), logging=dict(report_to="none", log_every=1, log_dir=str(folder/"runs")))
    return {k: base.get(k, {}) if k == "preset" else base.get(k, {}) | sections.get(k, {}) for k in base.keys() | sections.keys()}


def trainer_for(folder, name, callbacks=(), **sections):
    return QwenImageEditTrainer(config_for(folder, name, **sections), callbacks)


class Break(Callback):
    """Writes NaN into the adapter after a step, as an update with an infinite rate does."""
    def __init__(self, step): self.step = step
    def on_step_end(self, t):
        if t.global_step == self.step:
            with torch.no_grad(): next(iter(lora_tensors(t.components.transformer).values()))[0, 0] = float("nan")


class NoLoss(Callback):
    """Makes the loss of all later steps infinite."""
    def on_train_begin(self, t): t._compute_loss = lambda batch, seeds, strata=None: sum(p.sum() for p in lora_tensors(t.components.transformer).values())[None] * float("inf")


def weights_in(folder): return sorted(folder.rglob("*.safetensors"))


def test_an_infinite_rate_is_no_result(folder):
    t = trainer_for(folder, "rate")
    vars(t.config.optimizer)["lr"] = float("inf") # the configuration refuses it
    with pytest.raises(TrainingFailed, match=r"the training failed: transformer\..*lora_A.weight has NaN after step 4, so nothing is saved: lower `optimizer.lr` \(inf now\). There is no checkpoint") as e:
        t.fit()
    assert isinstance(e.value, ValueError) and "\n" not in str(e.value)
    assert not weights_in(folder/"rate")
    with pytest.raises(ValueError, match="the LoRA is not written: .* has NaN"): t.save_lora(folder/"rate"/"lora")
    assert not weights_in(folder/"rate")
    with pytest.raises(NoImage, match="so it would be black"): t.predict(np.zeros((64, 64, 3), np.uint8), "make it blue", num_inference_steps=2, progress=False)


@pytest.mark.parametrize("ema", [None, 0.9], ids=["raw", "ema"])
def test_the_last_good_checkpoint_is_kept_and_named(ema, folder):
    name = f"kept-{ema}"
    t = trainer_for(folder, name, [Break(3)], train=dict(save_steps=1, ema_decay=ema))
    with pytest.raises(TrainingFailed, match="has NaN after step 4, .* The last checkpoint is step_00000003"): t.fit()
    found = complete_checkpoints(folder/name/"checkpoints")
    for checkpoint in found:
        for file in checkpoint.glob("*.safetensors"):
            assert all(torch.isfinite(v).all() for v in load_file(file).values() if v.is_floating_point()), file
    assert found and not list((folder/name/"checkpoints").glob(".*.partial"))
    with pytest.raises(TrainingFailed, match="step 9 is not saved: .*go on from"): t.save_checkpoint(0, 9)
    again = trainer_for(folder, name, train=dict(save_steps=1, ema_decay=ema, resume_checkpoint="latest"))
    assert again.fit().state.stop == "done", "the good one is continued"


def test_a_run_without_any_finite_loss_is_no_result(folder):
    t = trainer_for(folder, "none", [NoLoss()])
    with pytest.raises(TrainingFailed, match="the loss was finite in none of 4 steps, so nothing was trained: lower `optimizer.lr`"): t.fit()
    assert not (folder/"none"/"lora").exists()


def test_a_long_row_of_such_losses_raises_too(folder):
    t = trainer_for(folder, "row", [NoLoss()], train=dict(max_train_steps=9))
    with pytest.raises(TrainingFailed, match="the loss was not finite in 5 steps in a row"): t.fit()
    assert t.global_step < 9


class Fails(Callback):
    """Raises an error after a step, as a full disk of a tracker does."""
    def __init__(self, step): self.step = step
    def on_step_end(self, t):
        if t.global_step == self.step: raise ConnectionError("an error of the test")


def test_a_run_that_ends_with_an_error_is_saved_first(folder):
    with pytest.raises(ConnectionError, match="an error of the test"):
        trainer_for(folder, "error", [Fails(3)]).fit()
    assert [c.name for c in complete_checkpoints(folder/"error"/"checkpoints")] == ["step_00000003"]


class FirstLosses(Callback):
    """Makes the losses of the first steps infinite."""
    def __init__(self, steps): self.steps = steps
    def on_train_begin(self, t):
        real = type(t)._compute_loss
        t._compute_loss = lambda *a: real(t, *a) * (float("inf") if t.global_step < self.steps else 1)


def test_steps_that_were_skipped_in_an_earlier_fit_do_not_count_again(folder):
    t = trainer_for(folder, "earlier", [FirstLosses(3)]).fit()
    assert t.state.skipped == 3 and t.state.stop == "done"
    t.config.train.max_train_steps = 6
    assert t.fit().state.stop == "done" and t.global_step == 6


def test_one_skipped_step_is_no_failure(folder):
    class Once(Callback):
        def on_train_begin(self, t): self.real, t._compute_loss = t._compute_loss, lambda *a: t.__class__._compute_loss(t, *a) * (float("inf") if t.global_step == 1 else 1)
    t = trainer_for(folder, "once", [Once()]).fit()
    assert t.state.stop == "done" and t.state.skipped == 1 and t.save_lora(folder/"once"/"lora").is_file()


def test_the_shell_hears_it(folder):
    config = config_for(folder, "shell", model=dict(lora=dict(lora_alpha=60000.)), optimizer=dict(lr=1e30))
    (folder/"run.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run([sys.executable, "-m", "qie_nb.cli", "train", str(folder/"run.yaml")], capture_output=True, text=True)
    assert done.returncode not in (0, None) and "Traceback" not in done.stderr
    assert re.search(r"qie-nb train: .*(the training failed|lr)", done.stderr), done.stderr
    assert not list((folder/"shell").glob("lora/*"))


def test_a_start_from_a_broken_lora_is_refused_before_anything_is_loaded(folder):
    good = trainer_for(folder, "first").fit().save_lora(folder/"first"/"lora.safetensors")
    from safetensors.torch import save_file
    tensors = load_file(good)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, folder/"nan.safetensors")
    t = trainer_for(folder, "second", model=dict(lora=dict(pretrained_weight=str(folder/"nan.safetensors"))))
    with pytest.raises(ValueError, match="nan.safetensors' has NaN in 'transformer"): t.fit()
    assert "transformer" not in t.components.loaded and not weights_in(folder/"second")


def test_a_black_evaluation_image_is_a_note(folder, capsys):
    t = trainer_for(folder, "black", [Break(1)], train=dict(max_train_steps=1, val_fraction=0.25, eval_steps=1, eval_images=1, eval_num_inference_steps=2))
    from qie_nb.evaluation.eval_images import ImageDecoder
    decoder = ImageDecoder(t, [])
    image = decoder(torch.full((1, 16, 1, 8, 8), float("nan")))
    assert image.shape == (32, 32, 3) and not image.any()
    assert "an evaluation image is black: the image's latent is not finite" in capsys.readouterr().out
