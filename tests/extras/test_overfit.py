"""`overfit_check` and `qie-nb check --overfit`: its sentence for setups that learn and that do not, and the files it leaves."""
import hashlib, shutil, tempfile

import numpy as np
import pytest
import torch

from helpers import settings, slow, weekly
from qie_nb.cli import main
from qie_nb.config import make_config, save_config
from qie_nb.encoding.encoder import Encoder
from qie_nb.extras import diagnostics as overfit
from qie_nb.extras.diagnostics import OverfitReport, overfit_check
from qie_nb.tiny.photos import make_pairs
from qie_nb.trainer import QwenImageEditTrainer

BASE = dict(pairs=["a", "b"], steps=60, lr=1e-4)


def report(images=(37., 37.), loss=(0.5, 0.5), **kw): return OverfitReport(images=images, loss=loss, **BASE | kw)


@pytest.mark.parametrize("kw, verdict, said", [
    (dict(images=(37., 9.), loss=(0.5, 0.1)), "learns", "this setup learns: 37 -> 9 (distance of the edited images from their targets in grey levels, before and after 60 steps on 2 pairs; "
     "loss at fixed noise 0.500 -> 0.100)"),
    (dict(images=None, loss=(0.5, 0.3), pairs=["a"]), "learns", "this setup learns: loss at fixed noise 0.500 -> 0.300, before and after 60 steps on 1 pair"),
    (dict(images=(37., 36.), loss=(0.5, 0.48)), "slowly", "slowly: `optimizer.lr` 0.0003 may be better than 0.0001"),
    (dict(loss=(0.5, 0.499)), "too low", "this setup does not learn: 37 -> 37 (distance"), (dict(lr=1e-9), "too low", "try `optimizer.lr` 0.0001 instead of 1e-09"),
    (dict(loss=(0.5, 0.7), images=(37., 20.)), "too high", "The loss rises, so the learning rate is too high: try `optimizer.lr` 1e-05 instead of 0.0001"),
    (dict(loss=(0.5, 0.7), lr=3.), "too high", "try `optimizer.lr` 0.001 instead of 3"),
    (dict(loss=(0.5, 0.4), images=(37., 50.)), "learns", "the images are not better yet, more steps may show it"),
    (dict(loss=(0.5, 0.5), images=(37., 30.)), "learns", "learns: 37 -> 30"), (dict(loss=(0.5, 0.49), images=(37., 50.)), "images worse", "the edited images get worse, so the learning rate is probably too high"),
    (dict(loss=(0.5, 0.7), optimizer="prodigy"), "too high", "prodigy adapts it, so try `optimizer.name` adamw"),
    (dict(loss=(0.5, float("nan"))), "not finite", "does not learn: the loss was not finite. Lower `optimizer.lr` (0.0001 now)"),
    (dict(images=(37., float("inf"))), "not finite", "the loss was not finite"), (dict(stop="the loss was not finite in 5 steps"), "not finite", "the loss was not finite"),
    (dict(images=None, loss=None, equal=["a", "b"]), "equal", "does not learn: target and control are the same image"), (dict(equal=["a"], loss=(0.5, 0.1)), "learns", "learns")])
def test_the_sentence(kw, verdict, said):
    r = report(**kw)
    assert r.verdict == verdict and said in str(r) and "\n" not in str(r) and r.ok == (verdict in ("learns", "slowly"))


def test_names_are_escaped():
    page = report(shown=[("<img src=x>", {"control": np.zeros((8, 8, 3), np.uint8)})])._repr_html_()
    assert "<img src=x>" not in page and "&lt;img src=x&gt;" in page and "learning rate" in page


def photos(tmp_path, lr=5e-3, **sections):
    make_pairs(tmp_path/"set", "sepia", 3, (64, 64))
    base = dict(preset="tiny", data=dict(dataset_path=str(tmp_path/"set"), image_size=[64, 64]), optimizer=dict(lr=lr), cache=dict(cache_dir=str(tmp_path/"cache")),
                train=dict(output_dir=str(tmp_path/"out")), logging=dict(log_dir=str(tmp_path/"runs")))
    return {k: base.get(k, {}) | sections.get(k, {}) if isinstance(base.get(k, {}), dict) else base[k] for k in base | sections}


@pytest.fixture
def temporary(tmp_path, monkeypatch): # the folder of temporary files, empty at the end
    (folder := tmp_path/"temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder # torch and the models of tests have folders of their own there
    assert not list(folder.glob("qie_nb*")), "nothing is left behind"


def tree(folder): return {p.relative_to(folder): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.slow
def test_a_setup_that_learns_says_so_and_leaves_nothing(tmp_path, temporary, capsys):
    config, seed = make_config(photos(tmp_path, train=dict(eval_num_inference_steps=2))), torch.random.get_rng_state()
    before, written = config.model_dump(), tree(tmp_path)
    r = overfit_check(QwenImageEditTrainer(config), steps=12)
    out = capsys.readouterr().out
    assert r.ok and r.pairs == ["0000", "0002"] and r.loss[1] < 0.9 * r.loss[0] and str(r) in out and "overfit 12/12" in out
    assert len(r.shown) == 2 and r._repr_html_().count("<figure") == 8
    assert config.model_dump() == before and tree(tmp_path) == written and torch.equal(seed, torch.random.get_rng_state())


@pytest.mark.slow
def test_a_trainer_its_checkpoints_and_its_cache_stay_as_they_are(tmp_path, temporary, monkeypatch):
    config = photos(tmp_path, train=dict(max_train_steps=4, save_steps=2, val_fraction=0, eval_steps=None))
    t = QwenImageEditTrainer(config)
    t.cache_embeddings()
    t.fit()
    weights, written = {n: p.clone() for n, p in t.transformer.named_parameters() if "lora" in n}, tree(tmp_path)
    def never(*a): raise AssertionError("encoded again")
    monkeypatch.setattr(Encoder, "fill", never)
    assert overfit_check(t, steps=20).ok
    assert t.global_step == 4 and all(torch.equal(p, weights[n]) for n, p in t.transformer.named_parameters() if n in weights) and tree(tmp_path) == written
    t.config.train.max_train_steps = 6
    t.fit()
    assert t.global_step == 6, "the run continues"


@pytest.mark.parametrize("lr, status, said", [
    slow(5e-3, 0, "this setup learns: "),
    weekly(1e-12, 1, "the learning rate is probably too low: try `optimizer.lr` 0.0001 instead of 1e-12"),
    weekly(5., 1, "too high: try `optimizer.lr` 0.001 instead of 5")])
def test_the_command(lr, status, said, tmp_path, temporary, capsys):
    save_config(make_config(photos(tmp_path, lr)), tmp_path/"run.yaml")
    assert main(["check", "--overfit", str(tmp_path/"run.yaml")]) == status
    assert said in capsys.readouterr().out and not (tmp_path/"out").exists() and not (tmp_path/"cache").exists()


@pytest.mark.slow
def test_losses_that_are_not_finite_are_told(tmp_path, temporary, monkeypatch):
    real = QwenImageEditTrainer.training_step
    monkeypatch.setattr(QwenImageEditTrainer, "training_step", lambda self, batch: real(self, batch) * float("nan"))
    r = overfit_check(QwenImageEditTrainer(photos(tmp_path, logging=dict(log_every=2))), steps=20)
    assert r.verdict == "not finite" and r.stop and r.steps < 20 and not r.ok


@pytest.mark.slow
@pytest.mark.parametrize("at", ["before the first step", "after a step"])
def test_a_stopped_check_measures_nothing_more(at, tmp_path, temporary, monkeypatch, capsys):
    save_config(make_config(photos(tmp_path, train=dict(eval_num_inference_steps=2))), tmp_path/"run.yaml")
    measured, real = [], overfit.render_eval_images
    def render(trainer, *args):
        measured.append(trainer.global_step)
        if at == "before the first step": trainer.state.stop = "SIGTERM" # as the signal's handler does
        if trainer.state.stop: raise overfit.StopRequested # as the check between two denoising steps does
        return real(trainer, *args)
    def on_step_end(watch, trainer): trainer.state.stop = "SIGTERM"
    monkeypatch.setattr(overfit, "render_eval_images", render)
    monkeypatch.setattr(overfit._Measure, "on_step_end", on_step_end)
    assert main(["check", "--overfit", str(tmp_path/"run.yaml")]) == 143 and measured == [0]
    assert "qie-nb check: stopped; nothing is kept of the check; run it again" in capsys.readouterr().err


def test_equal_images_are_told_before_a_model_is_loaded(pairs, tmp_path, temporary, monkeypatch):
    root = pairs()
    for p in (root/"training_images").glob("*.png"): shutil.copy(p, root/"control_images"/p.name)
    monkeypatch.setattr(overfit, "_fit", None)
    r = overfit_check(QwenImageEditTrainer(settings(root, tmp_path)))
    assert r.verdict == "equal" and not r.ok and r.steps == 0


def test_bad_input_is_one_sentence(pairs, tmp_path, temporary, capsys):
    for kw in (dict(steps=0), dict(steps=True), dict(pairs=2.)):
        with pytest.raises(ValueError, match=f"`{next(iter(kw))}` must be a whole number from 1 to"): overfit_check(QwenImageEditTrainer(settings(pairs(), tmp_path)), **kw)
    with pytest.raises(ValueError, match="`trainer` must be a QwenImageEditTrainer, got {'data'"): overfit_check(dict(data=1))
    found = f"data.dataset_path={pairs()}"
    nowhere = f"data.dataset_path={tmp_path/'none'}"
    for args, said in (
        (["check", "--overfit"], "`check` needs a configuration"),
        (["check", "--overfit", nowhere], "none"),
        (["check", "--overfit", "preset=tiny", found, "--steps", "0"], "`--steps` must be"),
    ):
        assert main(args) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
        assert error.startswith("qie-nb check: ")


def test_what_is_judged_has_its_captions_and_no_edit_mask(tmp_path, monkeypatch):
    "Whatever a training step drops; else the loss before and after would be of other prompts."
    config = make_config(photos(tmp_path, train=dict(eval_num_inference_steps=2)))
    config.data.caption_dropout_rate = 1.
    t = QwenImageEditTrainer(config)
    data, _ = overfit.trial_pairs(config, 2)
    monkeypatch.setattr(overfit, "is_available", lambda *names: False)
    watch = overfit._Measure(data, tmp_path, 2)
    watch.prepare(t)
    judged = watch.judged
    assert not any(judged.dropped(i) for i in range(len(judged)))
    assert all(data.dropped(i) for i in range(len(data)))
    assert judged.config.edit_mask == "none"
