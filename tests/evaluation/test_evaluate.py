"""Evaluation: fixed noise, images from cached inputs, and the same adapter with and without it."""
import csv, math, json, os, random, re, shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace as NS
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

import shuffled_controls, validation_loss as benchmark # of benchmarks/
from helpers import TRANSFORMER, VAE, OnStep, adapters_close, close_images, interrupted, merged, on_call, settings, slow, write_pairs
from qie_nb.cli import main
from qie_nb.config import make_config
from qie_nb.core.files import file_digest
from qie_nb.data.samples import samples_of
from qie_nb.encoding.encoder import Encoder
from qie_nb.evaluation import evaluate as module, validation_loss
from qie_nb.evaluation.eval_images import COLUMNS as DRIFT
from qie_nb.evaluation.eval_images import EvalCase, edit_cached, eval_cases, file_name, find_styles, overview, render_eval_images, save_image, sheet_caption
from qie_nb.evaluation.compare import compare_validation, table
from qie_nb.evaluation.evaluate import EvaluationCallback, evaluate
from qie_nb.evaluation.validation_loss import COLUMNS, Interval, Measures, ValidationLoss, compare_losses, confidence_interval, fixed_sigmas, held_out_loss, level_weight, partners
from qie_nb.models.flow_matching import calculate_mu, shift_sigmas
from qie_nb.models.variants.text_to_image import QwenImage
from qie_nb.planning.plan import Planner
from qie_nb.sampling import denoising
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer as Trainer
from qie_nb.training import stopping
from qie_nb.training.callbacks import EvalImage, RunState
from qie_nb.training.step import EMA
from qie_nb.training.resume import checkpoint_misfit
from tiny_rig import random_image

SIZES = ((96, 32), (96, 32), (32, 48), (48, 32), (40, 40)) # the first two share a bucket
losses_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-7)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "Training pairs, validation pairs, two styles, a cache without the empty prompts of the validation pairs, and a copy of it."
    d = tmp_path_factory.mktemp("world")
    write_pairs(d/"set", ((48, 32), (32, 48), (40, 40), (48, 32)))
    write_pairs(d/"val", SIZES, caption=["x", "invert", "invert the colours", "invert all of the colours, please", "y z"], seed=1)
    for style, size in (("monet", (64, 40)), ("photo", (40, 64))):
        (d/"test"/style).mkdir(parents=True)
        random_image(size, size[0]).save(d/"test"/style/"1.png")
        (d/"test"/style/"prompt.txt").write_text(f"make it a {style}")
    Trainer(config_in(d, d/"filling")).cache_embeddings()
    shutil.copytree(d/"cache", d/"pristine")
    return d


def config_in(world, out, styles=False, **sections):
    train = dict(output_dir=str(out), val_path=str(world/"val"), eval_num_inference_steps=2, eval_images=2, max_train_steps=4)
    if styles: train["test_image_dir"] = str(world/"test")
    return settings(world/"set", Path(out), **merged(dict(train=train, cache=dict(cache_dir=str(world/"cache"))), sections))


@pytest.fixture
def made(world, tmp_path):
    return lambda out="out", **kw: config_in(world, tmp_path/out, **kw)


@pytest.fixture
def pristine(world, tmp_path):
    shutil.copytree(world/"pristine", tmp_path/"pristine")
    return str(tmp_path/"pristine")


@pytest.fixture
def trainer(made):
    "With an adapter, an encoded cache and held-out pairs."
    t = Trainer(made())
    t.make_loader()
    t.set_lora()
    torch.manual_seed(5)
    for p in t.transformer.parameters():
        if p.requires_grad: p.data += 0.1 * torch.randn_like(p)
    return t


@pytest.mark.slow
def test_noise_is_a_function_of_pair_and_draw(trainer, monkeypatch):
    monkeypatch.setattr(trainer, "loss", lambda batch, eps, sigmas: eps.mean((1, 2, 3, 4)))
    noise = lambda n: {i: v[1] for i, v in held_out_loss(trainer, trainer.held_out, n).losses.items()}
    one, two = noise(1), noise(2)
    trainer.config.data.batch_size, trainer.config.train.seed, trainer.state.global_step, trainer.state.epoch = 5, 99, 7, 3
    losses_close(noise(1), one)
    assert len({round(v, 6) for v in one.values()}) == len(SIZES), "every pair has its own noise"
    assert all(abs(one[i] - two[i]) > 1e-6 for i in one), "every draw has its own noise"


@pytest.mark.slow
def test_loss_is_independent_of_batches_and_training_options(trainer):
    first = held_out_loss(trainer, trainer.held_out)
    trainer.config.data.batch_size = 5
    trainer.config.train.loss_weighting, trainer.config.train.timestep_sampling = "sigma_sqrt", "shift"
    losses_close(held_out_loss(trainer, trainer.held_out).losses, first.losses)
    alone = held_out_loss(trainer, trainer.data.subset(trainer.held_out, trainer.held_out.samples[2:3]))
    losses_close(alone.losses["0002"], first.losses["0002"])
    row, means = first.row(), np.mean(list(first.losses.values()), 0)
    assert row["held_out_pairs"] == len(SIZES) and row["held_out_loss_low"] < row["held_out_loss"] < row["held_out_loss_high"]
    assert (row["held_out_loss"], row["held_out_loss_plain"]) == pytest.approx((means[0], means[1:].mean()))


@pytest.mark.slow
def test_held_out_loss_has_no_dropout_and_leaves_the_training_mode(made):
    "Neither dropout nor the mode of training reaches the loss; an adapter in training goes on in it, with its dropout."
    t = Trainer(made(model=dict(lora=dict(r=4, lora_alpha=8, lora_dropout=0.5))))
    t.make_loader(), t.set_lora()
    for p in t.transformer.parameters():
        if p.requires_grad: p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    drops = [m for m in t.transformer.modules() if isinstance(m, torch.nn.Dropout)]
    plain = held_out_loss(t, t.held_out).losses
    for m in drops: m.p = 0.
    losses_close(held_out_loss(t, t.held_out).losses, plain)
    for training in (True, False):
        for m in drops: m.p = 0.5
        t.transformer.train(training)
        losses_close(held_out_loss(t, t.held_out).losses, plain)
        assert {m.training for m in t.transformer.modules()} == {training} and len(drops) > 4


def test_levels_are_weighted_by_the_samplers_density(trainer, monkeypatch):
    "With a loss of 1 in one bin and 0 elsewhere the result is the weight of that bin."
    shares = []
    for k in range(5):
        monkeypatch.setattr(trainer, "loss", lambda batch, eps, sigmas: ((sigmas * 5).ceil() - 1 == k).float())
        got = held_out_loss(trainer, trainer.held_out).losses
        for v in got.values(): assert v[1:] == [float(j == k) for j in range(5)]
        shares.append(got["0000"][0])
    (w, h), scheduler = trainer.held_out.bucket(0)[0], trainer.components.get("scheduler").config
    weights = level_weight(np.array([fixed_sigmas("0000", d) for d in range(2)]), calculate_mu(h * w // 16**2, scheduler))
    np.testing.assert_allclose(shares, weights.sum(0) / weights.sum(), rtol=1e-4)


def test_every_pair_and_draw_has_levels_of_its_own_one_in_each_bin():
    levels = [fixed_sigmas(i, d) for i in ("a", "b", "c") for d in (0, 1)]
    assert len(set(map(tuple, levels))) == 6
    for found in levels: assert [int(np.ceil(s * 5)) for s in found] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("mu", [0., 0.7, 1.2])
def test_the_weight_of_a_level_is_its_square_times_how_often_the_sampler_is_there(mu):
    "By differences of the shift itself."
    times = torch.linspace(0.001, 1, 2000, dtype=torch.float64)
    sigmas = shift_sigmas(times, mu)
    middle = (sigmas[1:] + sigmas[:-1]) / 2
    torch.testing.assert_close(level_weight(middle, mu), middle**2 * times.diff() / sigmas.diff(), rtol=1e-3, atol=1e-6)


def test_an_interval_needs_three_pairs_and_a_comparison_the_same_noise():
    pair = lambda v, noises=2: ValidationLoss({"0": [v] * 6}, noises)
    assert confidence_interval([1., 2., 3., 4.]) == pytest.approx((2.5, 0.4457, 4.5543), abs=0.0001)
    assert compare_losses(pair(1.), pair(0.5)).verdict == "no clear change"
    several = lambda n, v: ValidationLoss({str(i): [v * (1 + i)] * 6 for i in range(n)})
    said = {n: str(compare_losses(several(n, 1.), several(n, 0.5))) for n in (2, 3, 5)}
    assert said[2] == "0.500 (too few pairs to judge)"
    assert said[3] == "0.500: better"
    assert said[5] == "0.500 (0.500 to 0.500): better"


def test_a_loss_interval_is_positive_and_left_out_below_five_pairs():
    "Computed in log space: the mean times and divided by exp(margin / mean)."
    apart = ValidationLoss({str(i): [v] * 6 for i, v in enumerate((0.02, 0.03, 0.02, 0.9, 0.04))})
    assert confidence_interval([v[0] for v in apart.losses.values()]).low < 0
    mean, low, high = apart.interval
    assert 0 < low < mean < high and low * high == pytest.approx(mean**2)
    few = ValidationLoss(dict(list(apart.losses.items())[:4]))
    assert few.interval.low is None
    assert few.interval.high is None
    assert not {"held_out_loss_low", "held_out_loss_high"} & set(few.row())


def test_a_change_is_not_called_better_if_the_mean_loss_rose():
    "Many small losses fell a little, a large one rose a lot: the ratio and the mean disagree."
    before = {str(i): [0.1] * 6 for i in range(9)} | {"large": [1.] * 6}
    now = {i: [0.8 * v[0]] * 6 for i, v in before.items()} | {"large": [1.3] * 6}
    change = compare_losses(ValidationLoss(before), ValidationLoss(now))
    assert change.ratio.high < 1
    assert change.now > change.before
    assert change.verdict == "no clear change"
    broken = ValidationLoss({i: [math.nan] * 6 for i in now})
    assert compare_losses(ValidationLoss(now), broken).verdict == "worse"


def test_an_evaluation_is_compared_with_the_first_and_with_the_last_one():
    def result(loss, pairs=5):
        losses = {str(i): [loss * (1 + i / 10)] * 6 for i in range(pairs)}
        return dict(losses=losses, noises=2)

    first = {0: result(1.), 4: result(0.5)}
    assert "since" not in module.say_change(first, Measures(4))
    line = module.say_change(first | {6: result(0.4)}, Measures(6))
    assert "(loss 1.20 to 0.48)" in line and line.endswith("; better since step 4")
    few = {0: result(1., 4), 4: result(0.5, 4)}
    for results, shown in ((first, True), (few, False)):
        _, row = module.rows_of(results)
        assert row["ratio"][0] == pytest.approx(0.5)
        assert [row["ratio"][1] is not None, row["loss"][1] is not None] == [shown] * 2


@pytest.mark.parametrize("lora, begun", [(None, "without LoRA"), ("a.safetensors", "at step 0")])
def test_a_run_that_begins_with_a_lora_is_not_compared_with_none(lora, begun):
    config = make_config(dict(model=dict(lora=dict(pretrained_weight=lora))))
    callback = EvaluationCallback(config)
    callback.on_train_begin(NS(config=config, global_step=0, held_out=None))
    assert callback.begun == begun


def test_noise_samples_are_part_of_a_comparison():
    pair = lambda v, noises=2: ValidationLoss({"0": [v] * 6}, noises)
    with pytest.raises(ValueError, match="the same `noises`"): compare_losses(pair(1.), pair(1., 3))


def state_of(t):
    s = t.scheduler
    return dict(random=(torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()), unloaded=(t.vae is None, t.qwen_vl is None),
                scheduler=(s.timesteps.tolist(), s.sigmas.tolist(), s.step_index, s.begin_index, dict(s.config)),
                transformer=(t.transformer.training, [p.requires_grad for p in t.transformer.parameters()]))


def run_in(world, name, *callbacks, **kw):
    train = dict(gradient_checkpointing=True, save_steps=2) | kw.pop("train", {})
    lora = dict(lora=dict(r=4, lora_alpha=8, lora_dropout=0.3))
    return Trainer(config_in(world, world/name, train=train, optimizer=dict(lr=1e-2), model=lora, **kw), callbacks=callbacks).fit()


@pytest.fixture(scope="module")
def run(world):
    "Evaluations at steps 2 and 4, images of two pairs and two styles, and a prediction at step 3."
    states, real = [], EvaluationCallback.evaluate

    def noted(act, t): states.append(state_of(t)), act(t), states.append(state_of(t))
    edit = lambda t: t.predict(str(world/"test"/"photo"/"1.png"), "make it a monet", num_inference_steps=3)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(EvaluationCallback, "evaluate", lambda self, t: noted(lambda t: real(self, t), t))
        t = run_in(world, "out", OnStep(lambda t: noted(edit, t) if t.global_step == 3 else None), styles=True, train=dict(eval_steps=2))
    return NS(trainer=t, states=states, root=world/"out"/"checkpoints")


@pytest.mark.slow
def test_evaluation_and_prediction_change_nothing_of_the_run(run, world):
    adapters_close(run_in(world, "plain"), run.trainer)
    (before, after), predicted, end = zip(run.states[::2], run.states[1::2]) # the first one in the middle of an epoch
    assert before == after and before["transformer"][0] and before["unloaded"] == (True, True)
    for a, b in (predicted, end): assert all(a[k] == b[k] for k in ("random", "scheduler", "transformer"))
    assert sorted(p.name for p in (run.root/"inference").iterdir()) == ["step_00000002", "step_00000004"] and {*COLUMNS, "held_out_image_error"} <= {*run.trainer.state.metrics} <= {*COLUMNS, "held_out_image_error", *DRIFT}


def test_panel_and_comparison_have_one_error_for_an_image(run):
    "The evaluation at the end and `compare_validation` edit the same pairs, sampled alike."
    result = json.loads((run.root/"inference"/"step_00000004"/"held_out.json").read_text())
    found = compare_validation(run.trainer)
    assert found.sampling in found.html() and found.columns[1].steps == 2
    shown = [row[1] for row in found.distances]
    assert shown == pytest.approx(list(result["image_errors"].values()), abs=0.005)
    assert all(abs(base - own) > 0.01 for base, own in found.distances), "not without LoRA"


@pytest.mark.parametrize("asked, sampled", [
    (dict(), (4, 1.0, True)), (dict(true_cfg_scale=2.), (4, 2.0, True)),
    (dict(num_inference_steps=3), (3, 4.0, False))])
def test_a_comparison_follows_the_schedule_of_the_evaluation(asked, sampled, trainer, monkeypatch):
    trainer.config.train.eval_schedule = "lightning"
    blank = lambda t, columns, edits, ready: [
        [np.zeros((*e.size[::-1], 3), np.uint8) for c in columns] for e in edits]
    monkeypatch.setattr("qie_nb.evaluation.compare.denoise_columns", blank)
    for c in compare_validation(trainer, **asked).columns:
        assert (c.steps, c.true_cfg_scale, bool(c.scheduler)) == sampled


@pytest.mark.slow
def test_images_are_those_of_predict(run, world):
    t, folder = run.trainer, run.root/"inference"/"step_00000004"
    assert sorted(p.name for p in folder.glob("*.jpg")) == ["00_0000.jpg", "01_0004.jpg", "grid.jpg", "monet_to_photo.jpg", "photo_to_monet.jpg"]
    cases = eval_cases(t, find_styles(world/"test"))
    close = lambda case, expected: close_images(t.decode_vae_latent(edit_cached(t, case, 2))[0], expected, 2)
    for case, i in zip(cases, (0, 4)):
        (w, h), s = t.held_out.bucket(i)[0], t.held_out.samples[i]
        assert Image.open(folder/f"{case.name}.jpg").size == (w, h), "a wide pair stays wide"
        assert close(case, t.predict(s.controls[0], s.prompt, num_inference_steps=2, width=w, height=h, seed=0))
    style = next(c for c in cases if c.name == "photo_to_monet")
    expected = t.predict(str(world/"test"/"photo"/"1.png"), "make it a monet", num_inference_steps=2)
    assert expected.shape[0] > expected.shape[1] and close(style, expected)


@pytest.mark.slow
def test_resumed_run_compares_with_the_last_evaluation(trained_run, tmp_path, capsys):
    out = trained_run.copy(tmp_path/"out")
    shutil.rmtree(out/"checkpoints"/"inference"/"step_00000008", ignore_errors=True)
    Trainer(trained_run.settings(out, train=dict(resume_checkpoint=str(out/"checkpoints"/"step_00000006"), eval_images=0, num_epochs=2))).fit()
    line, = (l for l in capsys.readouterr().out.splitlines() if l.startswith("step 8: "))
    assert line.startswith("step 8: loss") and "(0.0" not in line
    print(line)


def test_a_pair_gets_the_controls_of_another_of_its_sizes(trainer, monkeypatch):
    "The exchanged loss is that of the pair's target, noise and prompt with another pair's control latents; a pair alone in its bucket, or with the same image, has no partner."
    seen = []
    monkeypatch.setattr(trainer, "loss", lambda batch, eps, sigmas: seen.append((batch, eps, sigmas)) or batch["control_latent"].mean((1, 2, 3, 4)))
    trainer.config.data.batch_size = 1
    given, other = (held_out_loss(trainer, trainer.held_out, 1, e) for e in (False, True))
    assert partners(trainer.held_out) == {0: 1, 1: 0} and list(other.losses) == ["0000", "0001"]
    losses_close([other.losses[i][1] for i in ("0000", "0001")], [given.losses[i][1] for i in ("0001", "0000")])
    once, again = ({b["sample_id"][0]: (b["pixel_latent"], b["prompt_embed"][0], eps, s) for b, eps, s in part} for part in (seen[:25], seen[25:]))
    for i in ("0000", "0001"): assert all(torch.equal(x, y) for x, y in zip(once[i], again[i]))
    same = [replace(s, controls=trainer.held_out.samples[0].controls) for s in trainer.held_out.samples[:2]]
    assert not partners(trainer.data.subset(trainer.held_out, same))


def test_passes_with_exchanged_controls_are_announced_only_if_they_are_made(trainer, monkeypatch):
    "The fixture's held-out pairs have two partners, which is too few to judge."
    callback = EvaluationCallback(trainer.config)
    trainer.state = RunState(max_steps=4)
    few = callback.plan(trainer).passes
    monkeypatch.setattr(module, "partners", lambda dataset: range(3))
    assert callback.plan(trainer).passes == few + 3 * 2 * 5 + 3 * 5, "three batches, five parts of the levels; two noises exchanged, one swapped"
    callback.checked, trainer.state.global_step = True, 2
    assert not callback.tests(trainer) and callback.plan(trainer).passes == few - 2 * 5, "nor four pairs that are trained on, in two batches"


def run_with_losses(made, monkeypatch, capsys, values, others, resume=False, **kw):
    "A run of 3 steps, evaluated at each, in which four pairs have these mean losses: what it prints, and how often controls were exchanged."
    left, calls = iter(values), []
    spread = lambda v: ValidationLoss({str(i): [v + i / 100] * 6 for i in range(4)}, 1)
    def loss(trainer, dataset, noises=None, exchange=False, swap=False):
        if swap: return spread(3.)
        if dataset is not trainer.held_out: return spread(calls[-1]) # pairs that are trained on
        if not exchange: calls.append(next(left)); return spread(calls[-1])
        return spread(calls[-1] + (others[len(calls) - 1] if isinstance(others, tuple) else others))
    monkeypatch.setattr(module, "held_out_loss", loss)
    monkeypatch.setattr(module, "partners", lambda dataset: range(4))
    Trainer(made(train=dict(eval_steps=1, eval_images=0, max_train_steps=3, save_steps=1, eval_at_start=True) | kw)).fit()
    return [l for l in capsys.readouterr().out.splitlines() if l.startswith(("step ", "advice: "))]


def test_a_run_compares_with_no_adapter_and_says_when_it_is_worse(made, monkeypatch, capsys):
    start, one, two, three, few = run_with_losses(made, monkeypatch, capsys, (1., 0.9, 0.9, 0.8), 0.5)
    assert few.startswith("advice: 3 steps are too few to judge: held-out loss 0.8")
    assert start == "step 0: loss 1.0 without LoRA"
    assert one == "step 1: better than without LoRA (loss 1.01 to 0.92)"
    as_good = "step 2: better than without LoRA (loss 1.01 to 0.92); no clear change since step 1"
    assert two == as_good
    assert three == "step 3: better than without LoRA (loss 1.01 to 0.82); better since step 2"
    result = json.loads(next(Path(made()["train"]["output_dir"]).rglob("step_00000001/held_out.json")).read_text())
    assert len(result["losses"]) == len(result["exchanged"]) == 4
    start, *lines = run_with_losses(made, monkeypatch, capsys, (1., 1.5, 0.9, 1.4), 0.5, output_dir=str(Path(made()["train"]["output_dir"])/"b"))
    assert [l.startswith("advice: the learning rate is too high: ") for l in lines] == [False, True, False, False, True]
    assert lines[3].count("better") == 0 and "worse since step 2" in lines[3]


def test_a_run_says_that_the_control_images_make_no_difference(made, monkeypatch, capsys):
    lines = run_with_losses(made, monkeypatch, capsys, (1., 0.5, 0.4, 0.3), 0.)
    assert lines[1].startswith("advice: with the control images of other pairs the model's loss is no higher (1.00 times")
    lower = "step 1: lower loss than without LoRA (1.01 to 0.52), but not by the control images"
    assert lines[2] == lower
    unsure = "advice: cannot tell why the control images make little difference"
    assert lines[3].startswith(f"{unsure}. Possible: ")
    assert "sample_viewer" in lines[3]
    assert not any("better" in l for l in lines) and len(lines) == 8, "the tests are repeated while they fail"
    losses, uses = (1., 0.9, 0.8, 0.7), (0.5, 0.1, 0.3, 0.4)
    other = str(Path(made()["train"]["output_dir"])/"b")
    lines = run_with_losses(made, monkeypatch, capsys, losses, uses, output_dir=other)
    assert lines[1].endswith("but not by the control images")
    assert lines[2].startswith(unsure)
    enough = "more than half as much as before the first step is enough"
    assert "better than without" in lines[3], enough
    assert "too few" in lines[4], enough
    assert "better than without" in lines[5], enough


def test_an_uncertain_use_of_the_control_images_is_news():
    "The four pairs differ, so the interval of their mean contains one although the mean does not."
    own = {str(i): [1. + i / 100] * 6 for i in range(4)}
    exchanged = {str(i): [1. + i / 100 + extra] * 6 for i, extra in enumerate((-0.2, 0.1, 0.3, 0.4))}
    ratio = module.control_ratio(dict(losses=own, exchanged=exchanged))
    assert ratio.low < 1 < ratio.mean < ratio.high
    assert "no higher" in module.first_advice(Measures(controls=ratio)).text
    of_two_pairs = Interval(0.9, None, None)
    assert not module.first_advice(Measures(controls=of_two_pairs)).text, "they say too little"


def test_a_run_says_how_far_its_images_are_from_their_targets(made, monkeypatch, capsys):
    "Two edited pairs at 20 and 40 grey levels before the first step; then closer, then further although the loss is lower. A resumed run knows the first result."
    errors = iter(((20., 40.), (18., 30.), (30., 40.), (40., 40.)))
    monkeypatch.setattr(module, "render_eval_images", lambda t, cases, out: [EvalImage(n, "", Path(out)/n, (), e) for n, e in zip("ab", next(errors))] + [EvalImage("own", "", Path(out)/"own")])
    monkeypatch.setattr(EvaluationCallback, "tests", lambda *a: False)
    monkeypatch.setattr(module, "untouched_errors", lambda cases: {}) # of these controls, any edit is better than none
    quiet = dict(logging=dict(report_to="none"))
    def lines(values, **kw):
        left = iter(values)
        monkeypatch.setattr(module, "held_out_loss", lambda *a, **kw: ValidationLoss({str(i): [v + i / 100] * 6 for i, v in enumerate([next(left)] * 4)}, 1))
        Trainer(made(train=dict(eval_steps=1, max_train_steps=2, save_steps=1, eval_at_start=True) | kw, **quiet)).fit()
        return [l for l in capsys.readouterr().out.splitlines() if l.startswith(("step ", "advice: "))]
    start, one, two, news = lines((1., 0.9, 0.8))
    assert start == "step 0: loss 1.0 without LoRA; images 30 grey levels"
    assert one.startswith("step 1: better than without LoRA (loss 1.0")
    assert one.endswith("; images 30 to 24 grey levels")
    worse = "but images worse, 30 to 35 grey levels (24 at step 1)"
    assert f"lower loss than without LoRA (1.01 to 0.82), {worse}" in two
    assert "better" not in two
    assert news.startswith("advice: cannot tell why the edited images do not follow their targets")
    root = Path(made()["train"]["output_dir"])/"checkpoints"
    assert json.loads((root/"inference"/"step_00000001"/"held_out.json").read_text())["image_errors"] == dict(a=18., b=30.)
    with next(root.glob("logs/training_*.csv")).open() as f: assert [r["held_out_image_error"] for r in csv.DictReader(f)] == ["30.0", "24.0", "35.0"]
    three, news = lines((0.7,), max_train_steps=3, resume_checkpoint="latest")
    assert three.endswith("images worse, 30 to 40 grey levels (35 at step 2); lower since step 2")
    assert "do not follow their targets" in news


def test_a_resumed_run_still_compares_with_no_adapter(made, monkeypatch, capsys):
    first = run_with_losses(made, monkeypatch, capsys, (1., 0.5), 0.5, max_train_steps=1)
    then = run_with_losses(made, monkeypatch, capsys, (0.6, 0.7), (0.1, 0.5), resume_checkpoint="latest")
    assert len(first) == 2
    assert "than without LoRA (1.01 to 0.61)" in then[0]
    assert "worse since step 1" in then[0]
    assert "without LoRA (loss 1.01 to 0.71)" in then[2]
    assert "the control images make little difference" in then[1], "and with the control images' use before the first step"


@pytest.mark.slow
def test_nothing_frozen_is_encoded_twice(made, monkeypatch, built, pristine):
    encoders = []
    on_call(monkeypatch, Encoder, "__init__", lambda self, *a, **kw: encoders.append(self))
    count = lambda: {k: sum(e.calls[k] for e in encoders) for k in ("vae", "text_encoder")}
    cache = dict(cache_dir=pristine)
    t = Trainer(made(styles=True, cache=cache, train=dict(eval_steps=1, max_train_steps=1))).fit()
    first = count()
    assert first == dict(vae=2, text_encoder=2 + 2 + 2), "two test images; two empty prompts of pairs; a prompt and an empty one for each image"
    assert t.vae is None and t.qwen_vl is None
    t.config.train.max_train_steps = 2
    t.fit()
    assert t.global_step == 2 and count() == first
    built.clear()
    Trainer(made("again", cache=cache, train=dict(eval_steps=1, max_train_steps=2))).fit() # empty prompts are cached now
    assert count() == first and built == {TRANSFORMER: 1, VAE: 2}, "the decoder for each evaluation, the text encoder never"


@pytest.mark.slow
def test_encoders_stay_loaded_without_a_cache(made):
    t = Trainer(made(cache=dict(use_cache=False), train=dict(eval_steps=1, max_train_steps=1, eval_images=0))).fit()
    assert "held_out_loss" in t.state.metrics and t.vae is not None and t.qwen_vl is not None


@pytest.mark.parametrize("owner, name, steps, calls", [
    pytest.param(validation_loss, "losses_at_sigma", 9, 3, id="loss"),
    pytest.param(QwenImage, "velocity", 1, 4, id="sampling", marks=pytest.mark.slow)])
def test_a_stop_interrupts_an_evaluation(owner, name, steps, calls, made, monkeypatch, capsys):
    t = Trainer(made(train=dict(eval_steps=1, max_train_steps=steps, eval_num_inference_steps=9)))
    stop = mock.Mock(side_effect=lambda *a: stop.call_count == 3 and setattr(t.state, "stop", "SIGTERM"))
    on_call(monkeypatch, owner, name, stop)
    t.fit()
    assert stop.call_count == calls and t.global_step == 1 and t.state.stop == "SIGTERM"
    assert "held_out_loss" not in t.state.metrics and "was interrupted (SIGTERM)" in capsys.readouterr().out
    assert t.transformer.training and t.vae is None


@pytest.mark.parametrize("stop, heard", [("deadline", "deadline"), ("", "SIGTERM")], ids=["this process", "another process"])
def test_no_process_evaluates_after_a_stop(stop, heard, made, monkeypatch):
    "A signal may reach one process before the other; an evaluation would wait for both."
    monkeypatch.setattr(module, "evaluate_now", lambda *a: pytest.fail("evaluated"))
    monkeypatch.setattr(stopping, "broadcast_stop", lambda accelerator, own: heard if own == stop else "")
    callback = EvaluationCallback(config := Trainer(made(train=dict(eval_steps=2))).config)
    t = NS(config=config, plan=Planner(config).plan, held_out=[1], global_step=2, accelerator=None, state=RunState(max_steps=9, global_step=2, stop=stop), checkpoint_root=Path)
    callback.on_step_end(t), callback.on_train_end(t)
    assert t.state.pending == "step_00000002"


def test_a_stop_in_one_process_stops_all():
    one = NS(state=NS(stop="", poll=None), accelerator=NS(process_index=0, num_processes=2, device="cpu", reduce=lambda t, how: t + 1))
    with pytest.raises(validation_loss.StopRequested): validation_loss.StopCheck(one)()


def test_evaluations_are_due_at_steps_epochs_and_the_end(made, monkeypatch):
    at = []
    on_call(monkeypatch, EvaluationCallback, "evaluate", lambda self, t: at.append((t.global_step, t.state.epoch_ended)))
    monkeypatch.setattr(module, "evaluate_now", lambda *a: module.Evaluated(ValidationLoss({"a": [0.5] * 6})))
    monkeypatch.setattr(module, "eval_cases", lambda *a: [])
    t = Trainer(made("a", train=dict(eval_steps=3))).fit()
    assert [s for s, _ in at] == [3, 4]
    rows = list(csv.DictReader(next((t.checkpoint_root()/"logs").glob("*.csv")).open()))
    assert [bool(row["held_out_loss"]) for row in rows] == [False, False, True, True], "the last one is logged with its step"
    t.fit() # nothing left to train or evaluate
    Trainer(made("b", train=dict(eval_interval=1, max_train_steps=6))).fit() # 3 batches per epoch
    assert at[2:] == [(3, True), (6, True)]
    for train, held in ((dict(), [1]), (dict(eval_steps=1, val_path=None), None)): # not configured, or no pairs
        t = Trainer(made("c", train=train))
        assert not EvaluationCallback(t.config).enabled(NS(config=t.config, held_out=held))


def test_names_and_captions_may_be_anything(tmp_path):
    for bad in ("../../c\\d:e", "..", "\n", "風" * 300):
        name = file_name(bad)
        assert name and not set(name) & set("/\\ :\n") and not name.startswith(".") and len(name.encode()) < 200
    pair = tuple(np.full((40, w, 3), 90, np.uint8) for w in (80, 60))
    captions = ["costs $5^_{ and $6 \\frac{", "two\nlines\x00 and\ta tab", "", "long " * 200]
    texts = [sheet_caption(c, 3) for c in captions]
    assert texts[0] == captions[0] and texts[1].split() == "two lines and a tab".split() and len(texts[3]) <= 152
    fig = overview([(EvalCase(f"{i}", c, None, [], None, None, pair), pair[1]) for i, c in enumerate(captions)])
    with interrupted(os, "replace", 1): save_image(tmp_path/"grid.jpg", fig)
    assert not (tmp_path/"grid.jpg").exists(), "a kill leaves no partial image"
    save_image(tmp_path/"grid.jpg", fig)
    assert Image.open(tmp_path/"grid.jpg").size[1] > 200


@pytest.mark.slow
def test_a_model_without_encoders_is_evaluated_by_its_loss(made, tmp_path, capsys, pristine):
    for d in ("bare", "with_vae"):
        shutil.copytree(tiny_folder("2511"), tmp_path/d, ignore=shutil.ignore_patterns("text_encoder", "processor", *(["vae"] if d == "bare" else [])))
    judge = lambda d, **kw: evaluate(Trainer(made(f"out_{d}", cache=dict(cache_dir=pristine), **kw) | dict(model=dict(pretrained_model_name_or_path=str(tmp_path/d)))))
    r = judge("bare")
    assert "has no VAE to make images with" in capsys.readouterr().out and r["held_out_loss"] > 0 and not r["pictures"]
    with pytest.raises(ValueError, match="needs a VAE and a text encoder"): judge("bare", styles=True)
    r = judge("with_vae") # without guidance, because there is no empty prompt
    assert len(r["pictures"]) == 2 and (tmp_path/"out_with_vae"/"checkpoints"/"inference"/"now"/"grid.jpg").is_file()


@pytest.mark.parametrize("break_it, message", [
    (lambda d: shutil.rmtree(d), "does not exist; give a folder"),
    (lambda d: shutil.rmtree(d/"monet"), "holds 1 style folders; it needs at least two"),
    (lambda d: (d/"photo"/"1.png").unlink(), "holds no image; put one in"),
    (lambda d: (d/"photo"/"1.png").write_bytes(b"no image"), "cannot be read")])
def test_a_faulty_test_folder_is_refused_before_loading(break_it, message, made, world, tmp_path, built):
    shutil.copytree(world/"test", tmp_path/"test")
    break_it(tmp_path/"test")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Trainer(made(train=dict(eval_steps=1, test_image_dir=str(tmp_path/"test")))).fit()
    assert not built


@pytest.mark.slow
def test_processes_share_the_work(trainer, tmp_path, monkeypatch): # the notebook adds up their losses
    cases, turns, counts, names = eval_cases(trainer), mock.Mock(wraps=validation_loss.losses_at_sigma), set(), lambda: {p.name for p in (tmp_path/"p").glob("*.jpg")}
    monkeypatch.setattr(validation_loss, "losses_at_sigma", turns)
    for me in (1, 2, 0): # the main process last: it combines the images
        trainer.accelerator = NS(process_index=me, num_processes=3, device="cpu", reduce=lambda t, how: t, wait_for_everyone=lambda: None)
        turns.reset_mock()
        held_out_loss(trainer, trainer.held_out)
        counts.add(turns.call_count)
        render_eval_images(trainer, cases, tmp_path/"p", 2)
        if me: assert names() == {"01_0004.jpg"}
    assert len(counts) == 1 and names() == {"00_0000.jpg", "01_0004.jpg", "grid.jpg"}


def test_any_checkpoint_is_evaluated_without_training(trained_run, tmp_path):
    judge = Trainer(trained_run.settings(trained_run.copy(tmp_path/"out")))
    base = evaluate(judge, "base")
    assert judge.modulation_table is not None, "as in the run"
    made, = (np.asarray(Image.open(f), float) for f in base["pictures"])
    want = (made - judge.held_out.images(0)["image"])**2
    assert base["held_out_image_error"] == base["image_errors"]["00_" + judge.held_out.samples[0].id] == pytest.approx(want.mean()**0.5, abs=4), "JPEG"
    judge.config.train.eval_images = 0
    two, last, file = (evaluate(judge, c) for c in ("step_00000002", "latest", trained_run.lora))
    assert (base["weights"], two["weights"], two["steps"], last["steps"]) == ("none", "raw", 2, 8) and not two["pictures"]
    assert len({round(r["held_out_loss"], 8) for r in (base, two, last)}) == 3
    of_run = module.results_of(trained_run.output/"checkpoints")[8]["losses"] # which used the modulation table
    after = evaluate(judge, "base")["losses"], evaluate(judge)["losses"] # after adapters were loaded; the last one is active again
    for got, want in ((file["losses"], last["losses"]), (of_run, last["losses"]), (after[0], base["losses"]), (after[1], last["losses"])): losses_close(got, want)
    assert judge.optimizer is None and json.loads(json.dumps(two)) == two, "plain data"
    shown = table([base, two, last])
    assert f"{base['held_out_image_error']:.1f}" in shown.splitlines()[1] and shown.count("\n") == 3 and shown.count("*") == 1 and "base" in shown


@pytest.mark.slow
def test_the_ema_is_what_is_evaluated(trainer): # the one in a folder: test_names_of_checkpoints in test_compare.py
    before = held_out_loss(trainer, trainer.held_out).losses
    trainer.adapters.ema = EMA([p for p in trainer.transformer.parameters() if p.requires_grad], 0.9)
    for m in trainer.adapters.ema.mean: m *= 0.5
    trainer.config.train.eval_images = 0
    result = evaluate(trainer)
    assert result["weights"] == "ema" and result["losses"]["0000"][0] != pytest.approx(before["0000"][0], rel=1e-5)
    losses_close(held_out_loss(trainer, trainer.held_out).losses, before)


def test_mistakes_of_evaluate(trained_run, tmp_path):
    new = lambda **train: Trainer(trained_run.settings(tmp_path/"out", train=train))
    broken = trained_run.copy(tmp_path/"out")/"checkpoints"/"step_00000002"
    (broken/"state.json").write_text("{}")
    for t, checkpoint, message in ((trained_run.trainer, "latest", "would replace the adapter that this trainer trains"), (new(val_fraction=0), "latest", "nothing to evaluate on"),
                                   (new(), "step_00000099", "does not exist"), (new(), "step_00000002", "incomplete or damaged")):
        with pytest.raises((ValueError, FileNotFoundError), match=message): evaluate(t, checkpoint)


@pytest.mark.slow
def test_the_command_prints_numbers_and_a_table(run, made, world, tmp_path, capsys):
    file = tmp_path/"run.json"
    file.write_text(json.dumps(made(train=dict(eval_images=0, output_dir=str(world/"out")))))
    assert main(["evaluate", "--config", str(file), "--checkpoint", "base", "--checkpoint", "latest"]) == 0
    out = capsys.readouterr().out
    losses = list(map(float, re.findall('"held_out_loss": ([0-9.]+)', out)))
    rows = [line for line in out.splitlines()[-2:] if "*" in line]
    assert len(losses) == 2 and losses[0] != losses[1]
    assert len(rows) == 1 and f" {min(losses):.4f} " in rows[0], "the best one is marked"
    assert main(["evaluate", "--config", str(file), "--checkpoint", "nowhere"]) == 2


@pytest.mark.weekly
def test_held_out_loss_ranks_checkpoints_as_their_images_do(tmp_path):
    "Good, overfitted and ruined adapters, ranked by loss and by the images' true error."
    runs = dict(good=dict(pairs=48, lr=5e-3, r=16, keep=(10, 40, 80)), overfitted=dict(pairs=2, lr=1e-2, r=64, keep=(20, 60)),
                too_high=dict(pairs=48, lr=5e-2, r=16, keep=(20,)))
    rows = benchmark.measure(tmp_path, runs, edit="sepia", seeds=(0, 1, 2))
    result = benchmark.judge_ranking(rows)
    assert {n.split()[0] for n in result["kept"]} == {"base", "good", "overfitted", "too_high"}
    assert result["spearman_over_all"]["held_out_loss"] >= 0.9, result
    clear = [(a, b) for a in rows for b in rows if b["pixel_error"] > 1.5 * a["pixel_error"]] # 17 of 21 pairs
    assert len(clear) >= 15 and all(a["held_out_loss"] < b["held_out_loss"] for a, b in clear), rows


@pytest.mark.weekly
@pytest.mark.parametrize("mode", shuffled_controls.MODES)
def test_a_run_on_mixed_up_controls_is_not_called_better(mode, tmp_path):
    "Of the learnt model: better with right pairs, worse than none or a warning with pairs in the wrong order, by the second evaluation."
    rows = shuffled_controls.run(tmp_path, "sepia", mode, 3, steps=40)
    found = shuffled_controls.verdicts(rows)
    assert len(rows) == 3 and not shuffled_controls.wrong(mode, found), rows
    if mode != "right": assert rows[0]["news" if mode == "all pairs" else "line"] and rows[1]["news"]


# --- images of one's own, and the pair that is held out by default

@pytest.mark.parametrize("n, changes, held", [(9, {}, 0), (10, {}, 1), (10, dict(val_fraction=0), 0), (10, dict(val_fraction=0.3), 3), (10, dict(resume_checkpoint="old"), 0)])
def test_one_pair_of_ten_is_held_out(n, changes, held, tmp_path):
    folder = tmp_path/"checkpoints"/"step_00000001"
    folder.mkdir(parents=True)
    (folder/"state.json").write_text(json.dumps(dict(config=dict(train=dict(val_fraction=0.0))))) # trained on all pairs
    (folder/"COMPLETE").write_text(json.dumps({"state.json": file_digest(folder/"state.json")}))
    if changes.get("resume_checkpoint"): changes = dict(resume_checkpoint=str(folder))
    t = Trainer(settings(write_pairs(tmp_path/"set", ((48, 32),) * n), tmp_path, train=changes))
    dataset = t.make_loader().dataset
    assert len(t.held_out or ()) == held and len(dataset) == n - held
    assert not {s.id for s in dataset.samples} & {s.id for s in (t.held_out.samples if held else ())}
    recorded = t.checkpoints.make_fingerprint(t.make_loader())["settings"]["train.val_fraction"]
    assert recorded == changes.get("val_fraction", held)


@pytest.mark.slow
def test_a_run_on_all_pairs_keeps_them_in_every_session(pairs, tmp_path):
    root = pairs(((48, 32),) * 10)
    made = lambda steps, **train: Trainer(settings(root, tmp_path, train=dict(max_train_steps=steps, save_steps=1, resume_checkpoint="auto") | train))
    made(1, val_fraction=0).fit()
    for steps in (2, 3, 4):
        t = made(steps)
        assert checkpoint_misfit(tmp_path/"checkpoints"/f"step_{steps - 1:08}", t.config) == ""
        assert len(t.fit().samples) == 10 and t.global_step == steps and not t.held_out
    t.config.train.max_train_steps = 5 # and in the same trainer
    assert len(t.fit().samples) == 10
    with pytest.raises(ValueError, match="nothing to evaluate on"): evaluate(Trainer(settings(root, tmp_path)), "latest")


@pytest.mark.parametrize("fraction", ["auto", 0.5])
def test_given_validation_pairs_leave_all_others_for_training(fraction, pairs, tmp_path):
    t = Trainer(settings(pairs(((48, 32),) * 10), tmp_path, train=dict(val_fraction=fraction, val_path=str(write_pairs(tmp_path/"val", ((48, 32),) * 2)))))
    assert len(t.make_loader().dataset) == 10 and len(t.held_out) == 2


def test_own_prompts_get_the_trigger_word(tmp_path):
    Image.new("RGB", (48, 32)).save(tmp_path/"x.png")
    samples = [dict(image=str(tmp_path/"x.png"), prompt=p) for p in ("[trigger] make it red", "make it blue", "zxc as it is")]
    c = make_config(dict(data=dict(trigger_word="zxc"), train=dict(samples=samples)))
    assert [s.prompt for s in samples_of(c.train.samples, c.data.trigger_word)] == ["zxc make it red", "zxc, make it blue", "zxc as it is"]


@pytest.mark.slow
def test_own_images_are_edited_from_before_the_first_step(world, tmp_path, built):
    photo, monet = (str(world/"test"/style/"1.png") for style in ("photo", "monet"))
    samples = [dict(image=photo, prompt="make it dusk"), dict(image=[photo, monet], prompt="mix them")]
    made = lambda **kw: Trainer(config_in(world, tmp_path, train=dict(val_path=None, samples=samples, eval_at_start=True, eval_interval="auto", max_train_steps=2) | kw))
    made().cache_embeddings()
    built.clear()
    t = made().fit()
    assert built == {TRANSFORMER: 1, VAE: 2}, "their embeddings are cached: the decoder for each of two evaluations"
    folders = sorted((tmp_path/"checkpoints"/"inference").iterdir())
    assert [f.name for f in folders] == ["step_00000000", "step_00000002"]
    names = ["grid.jpg", "sample_1_1.jpg", "sample_2_1.jpg"]
    assert all(sorted(p.name for p in f.glob("*.jpg")) == names for f in folders)
    edit = np.asarray(Image.open(folders[0]/"sample_1_1.jpg"))
    w, h = t.geometry().target((40, 64))
    base = Trainer(config_in(world, tmp_path/"base")).predict(photo, "make it dusk", num_inference_steps=2, width=w, height=h)
    close_images(edit, base, 6) # JPEG
    shown = t.state.eval_images
    assert [(len(i.shown), i.caption) for i in shown] == [(1, "make it dusk"), (1, "mix them")]


@pytest.mark.parametrize("sample, error, sentence", [
    (dict(image="/nowhere/x.jpg", prompt="x"), FileNotFoundError, "`train.samples` 1: image '/nowhere/x.jpg' does not exist"),
    (dict(image="x.jpg", prompt=" "), ValueError, "`train.samples.0.prompt`"),
    (dict(image=[], prompt="x"), ValueError, "`train.samples.0.image`")])
def test_wrong_samples_are_refused_before_anything_is_loaded(sample, error, sentence, world, tmp_path, built):
    for work in ("fit", "cache_embeddings"):
        with pytest.raises(error, match=sentence): getattr(Trainer(config_in(world, tmp_path, train=dict(samples=[sample]))), work)()
    assert not built and not (tmp_path/"checkpoints"/"inference").exists()
