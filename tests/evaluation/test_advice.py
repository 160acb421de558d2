"""What an evaluation advises: on recorded runs, cause by cause, and in a run at ten times the right rate."""
import json

import pytest

import advice_trials as trials # of benchmarks/
from qie_nb.evaluation.compare import Evaluation, adapter_of
from qie_nb.evaluation.evaluate import results_of
from qie_nb.evaluation.validation_loss import (
    CAUSES,
    Interval,
    LossChange,
    Measures,
    advise,
    causes_of,
    doubt,
    progress_of_images,
    readings,
)
from qie_nb.tiny.photos import make_pairs
from qie_nb.trainer import QwenImageEditTrainer as Trainer

RUNS = json.loads(trials.RESULTS.read_text())["runs"]
LEARNS = Measures(
    step=60, held_out=Interval(0.3, 0.2, 0.4), training=Interval(0.3, 0.2, 0.4), swapped=Interval(1.2, 1.1, 1.3),
    controls=Interval(7., 5., 9.), controls_before=Interval(3., 2., 4.), pace=0.3, image=20., image_before=40., control=43.,
    blank=31., steps=60, pairs=48, lr=5e-3)
WORSE, SAME = Interval(2., 1.5, 2.7), Interval(1., 0.8, 1.2)
USELESS = Interval(1., 0.97, 1.03) # controls of other pairs do as well
SIGNS = { # cause: what differs from a run that learns
    "rate too high": dict(held_out=WORSE, training=WORSE, swapped=WORSE, controls=USELESS, image=60., lr=0.05),
    "swapped sides": dict(held_out=WORSE, swapped=Interval(0.5, 0.4, 0.6), image=60.),
    "mixed-up pairs": dict(held_out=WORSE, swapped=WORSE, controls=USELESS, image=60.),
    "too few pairs": dict(held_out=Interval(0.7, 0.6, 0.8), pairs=5, pace=-0.2),
    "captions dropped": dict(held_out=SAME, training=SAME, swapped=WORSE, dropout=1.),
    "adapter too weak": dict(held_out=Interval(0.98, 0.97, 0.99), training=Interval(0.98, 0.97, 0.99), alpha=0.01, pace=3.),
    "too few steps": dict(held_out=Interval(0.8, 0.7, 0.9), training=Interval(0.8, 0.7, 0.9), steps=4, step=4, pace=1.2),
    "rate too low": dict(held_out=Interval(0.8, 0.7, 0.9), training=Interval(0.8, 0.7, 0.9), pace=0.9, lr=5e-4),
    "not seen by the loss": dict(image=67., image_before=60.)}
REMEDIES = { # cause: the setting that the advice names, and its value
    "rate too high": "set `optimizer.lr` to 0.005 instead of 0.05", "swapped sides": "exchange the two folders or columns",
    "mixed-up pairs": "look at the pairs with sample_viewer", "too few pairs": "add pairs until there are 20",
    "captions dropped": "set `data.caption_dropout_rate` to 0.1 instead of 1", "adapter too weak": "set `model.lora.lora_alpha` to 16 instead of 0.01",
    "too few steps": "set `train.max_train_steps` to 100", "rate too low": "set `optimizer.lr` to 0.0025 instead of 0.0005",
    "not seen by the loss": "judge checkpoints by their images"}


def test_recorded_runs_get_the_right_cause_or_none():
    "The table as it is now, on the measures of real runs of the tiny model."
    found = {}
    for run in RUNS:
        m = trials.recorded(run["measures"])
        advice = advise(m)
        if not run["cause"] and advice.cause: assert m.image > m.blank, "a right setting may still have learnt nothing to see"
        assert advice.cause == run["named"], "results/advice.json is not of this table: run advice_trials.py --results"
        found.setdefault(trials.outcome(run["cause"], advice), []).append(run["setting"])
    assert not found.get("wrong") and not found.get("false alarm"), found
    bad = sum(bool(run["cause"]) for run in RUNS)
    assert len(found["right"]) >= 0.45 * bad and bad >= 24


def test_an_image_near_its_target_may_be_a_little_further_than_before():
    "A few grey levels say nothing where the untouched control is more than twice as far."
    near, far = (Measures(step=60, image=20., image_before=15., control=control) for control in (43., 30.))
    assert (progress_of_images(near), progress_of_images(far)) == ("follow", "further")


def test_settings_alone_are_no_cause():
    unmeasured = readings(Measures(step=60, steps=4, pairs=5, dropout=1., alpha=0.01))
    assert causes_of(unmeasured, certain=False) == []


def test_an_image_that_did_not_follow_is_never_called_better():
    for run in RUNS:
        m = trials.recorded(run["measures"])
        if m.image > min(m.control, m.blank): assert doubt(m), run["setting"]
    assert doubt(LEARNS) == "" and doubt(Measures()) == ""


def test_the_lines_of_recorded_runs_are_short_and_do_not_call_a_worse_image_better():
    lines = {}
    for run in RUNS:
        measures = trials.recorded(run["measures"])
        lines[run["setting"], run["seed"]] = trials.line_of(measures)
    assert len(lines) == len(RUNS) >= 85
    assert max(map(len, lines.values())) < 140
    for run in RUNS:
        m, line = trials.recorded(run["measures"]), lines[run["setting"], run["seed"]]
        # a decimal where both would look equal
        shown = (f" {m.image:.0f} grey levels", f" {m.image:.1f} grey levels")
        assert "-" not in line, line
        assert m.image < 10 or any(number in line for number in shown), line
        if "better than" in line and "not clearly" not in line:
            assert not doubt(m)
            assert m.held_out.high < 1
        if m.image > m.image_before + 0.5: assert "images worse" in line


FALLS = Interval(0.32, 0.25, 0.41)
GOOD = Measures(100, FALLS, FALLS, image=36., image_before=68., control=43., blank=71.)
BLIND = Measures(100, FALLS, FALLS, controls=USELESS, controls_before=USELESS)
FELL = LossChange(0.604, 0.189, FALLS, 5)
ROSE = LossChange(0.189, 0.604, Interval(3., 2., 4.), 5)
FEW = LossChange(0.604, 0.189, Interval(0.32, None, None), 2)
LOWER = LossChange(0.191, 0.189, SAME, 5)
HIGHER = LossChange(0.189, 0.191, SAME, 5)


@pytest.mark.parametrize("m, change, line", [
    (GOOD, FELL, "better than without LoRA (loss 0.60 to 0.19); images 68 to 36 grey levels"),
    (GOOD, ROSE, "worse than without LoRA (loss 0.19 to 0.60); images 68 to 36 grey levels"),
    (GOOD, LOWER,
     "not clearly better than without LoRA (loss 0.191 to 0.189); images 68 to 36 grey levels"),
    (GOOD, HIGHER,
     "not clearly worse than without LoRA (loss 0.189 to 0.191); images 68 to 36 grey levels"),
    (GOOD, FEW, "loss 0.60 without LoRA, now 0.19 (2 pairs, too few to judge); "
     "images 68 to 36 grey levels"),
    (GOOD._replace(image_before=35.6), FELL,
     "better than without LoRA (loss 0.60 to 0.19); images 36 grey levels as before"),
    (GOOD._replace(image_before=35.), FELL,
     "better than without LoRA (loss 0.60 to 0.19); images worse, 35 to 36 grey levels"),
    (GOOD._replace(image=50.), FELL,
     "lower loss than without LoRA (0.60 to 0.19), but images 68 to 50 grey levels "
     "(untouched: 43)"),
    (GOOD._replace(image=72., image_before=90.), FELL,
     "lower loss than without LoRA (0.60 to 0.19), but images 90 to 72 grey levels "
     "(a blank sheet: 71)"),
    (BLIND, FELL, "lower loss than without LoRA (0.60 to 0.19), but not by the control images")])
def test_an_evaluation_is_better_only_if_its_images_agree(m, change, line):
    "And the earlier number is always the first one."
    assert str(Evaluation(m, change.now, change)) == f"step 100: {line}"


def test_an_evaluation_says_what_has_changed_since_the_last_one():
    line = str(Evaluation(GOOD, 0.189, FELL, FELL, 50, earlier=30.))
    assert line.endswith("; better since step 50; images 68 to 36 grey levels (30 at step 50)")
    assert str(Evaluation(GOOD, 0.189, FELL, FELL, 50, earlier=40.)).endswith("36 grey levels")
    assert str(Evaluation(BLIND, 0.189, FELL, FELL, 50)).endswith("; lower since step 50")
    assert "since" not in str(Evaluation(GOOD, 0.189, FELL, FEW, 50))


@pytest.mark.parametrize("doubted", [False, True])
@pytest.mark.parametrize("begun", ["without LoRA", "at step 0"])
def test_no_line_is_longer_than_139_characters(doubted, begun):
    """With large steps and numbers that differ in the last digit only.

    The change since the last evaluation goes first."""
    falls = Interval(0.9999, 0.9998, 0.99991)
    m = LEARNS._replace(
        step=1234567, held_out=falls, image=253.91, image_before=254.92, control=255., blank=255.)
    if doubted:
        m = m._replace(blank=100.)
    change = LossChange(0.123456, 0.123455, falls, 99)
    line = str(Evaluation(m, 0.1, change, change, 1234500, 252.9, begun))
    assert len(line) < 140
    assert line.startswith("step 1234567: ")
    if doubted:
        assert "(a blank sheet: 100)" in line
    else:
        early = m._replace(step=1234)
        unclear = change._replace(ratio=Interval(1., 0.9, 1.1))
        line = str(Evaluation(early, 0.1, change, unclear, 1200, None, begun))
        assert "since step 1200" in line


def test_every_cause_has_signs_that_name_it_alone():
    assert list(SIGNS) == [cause.name for cause in CAUSES] == list(REMEDIES)
    assert advise(LEARNS).cause == ""
    for name, changes in SIGNS.items():
        m = LEARNS._replace(**changes)
        advice = advise(m)
        assert advice.cause == name, (name, advice, readings(m))
        assert REMEDIES[name] in advice.text and "{" not in advice.text


@pytest.mark.parametrize("name", SIGNS)
def test_without_one_of_its_measures_a_cause_is_possible_and_never_another_one(name):
    "Whatever is not measured: the right cause, or none."
    fields = ("held_out", "training", "swapped", "controls", "pace", "image", "blank")
    for field in fields:
        m = LEARNS._replace(**SIGNS[name])._replace(**{field: None})
        assert advise(m).cause in (name, "cannot tell", ""), (field, advise(m))
        if advise(m).cause == "cannot tell" and "Possible" in advise(m).text:
            assert name in [cause.name for cause in causes_of(readings(m), certain=False)], field


def test_one_pair_does_not_name_a_cause_but_the_training_pairs_may():
    "The default holds out one pair, of which there is no interval."
    one = Interval(2., None, None)
    m = Measures(step=60, held_out=one, lr=0.05)
    assert advise(m).cause == "" and advise(m._replace(training=WORSE)).cause == "rate too high"


def test_two_causes_with_the_same_signs_are_both_named_as_possible():
    m = LEARNS._replace(held_out=WORSE, training=WORSE, dropout=1.)
    advice = advise(m)
    assert advice.cause == "cannot tell"
    assert "rate too high (train 20 steps with `optimizer.lr` 0.0005)" in advice.text and "captions dropped" in advice.text


def test_an_image_behind_a_blank_sheet_is_of_mixed_up_pairs_or_of_an_edit_that_the_loss_cannot_see():
    "A drawing that is not learnt, 69 grey levels from its target where a blank sheet has 58: the signs of both causes are the same."
    drawing = LEARNS._replace(controls=USELESS, controls_before=USELESS, image=69., image_before=182., control=159., blank=58.)
    advice = advise(drawing)
    assert advice.cause == "cannot tell" and "mixed-up pairs (look at ten pairs" in advice.text and "not seen by the loss (" in advice.text
    assert doubt(drawing) == "the images are not: 69.0 grey levels from the targets, a sheet of one colour 58.0"
    learning = drawing._replace(controls=LEARNS.controls, controls_before=LEARNS.controls_before)
    assert advise(learning).cause == "cannot tell" and "mixed-up" not in advise(learning).text, "with its own controls it may be learning"


def test_an_optimizer_that_adapts_its_rate_is_not_told_another_rate():
    m = LEARNS._replace(**SIGNS["rate too high"] | dict(optimizer="prodigy", lr=1.))
    assert "`optimizer.lr`" not in advise(m).text and "`optimizer.name`" in advise(m).text


@pytest.mark.slow
def test_a_run_at_ten_times_the_rate_names_the_rate_and_has_no_best_checkpoint(tmp_path, capsys):
    "The learnt tiny model and an edit that it does not know."
    for name, n, seed, split in (("data", 12, 0, "train"), ("held_out", 4, 100, "held_out")):
        make_pairs(tmp_path/name, "sepia", n, seed=seed, split=split)
    t = Trainer(dict(
        model=dict(pretrained_model_name_or_path="tiny", lora=dict(r=16, lora_alpha=16)),
        data=dict(dataset_path=str(tmp_path/"data"), image_size=[96, 96], batch_size=4, caption_dropout_rate=0.),
        train=dict(output_dir=str(tmp_path), device="cpu", mixed_precision="no", gradient_checkpointing=False, max_train_steps=20,
                   save_interval=0, eval_interval=0, eval_steps=20, eval_images=1, eval_num_inference_steps=2, val_path=str(tmp_path/"held_out")),
        cache=dict(cache_dir=str(tmp_path/"cache")), optimizer=dict(lr=5e-2, weight_decay=0.),
        logging=dict(report_to="none", log_dir=str(tmp_path/"runs")))).fit()
    printed = capsys.readouterr().out
    assert "advice: the learning rate is too high" in printed and "set `optimizer.lr` to 0.005 instead of 0.05" in printed
    assert "better" not in printed and "no evaluated step has a lower held-out loss than" in printed
    assert t.state.advice.startswith("the learning rate is too high")
    root = t.checkpoint_root()
    assert results_of(root)[20]["advice"]["cause"] == "rate too high"
    assert (root/"latest").is_file() and not (root/"best").exists(), "the run is kept, and is not called best"
    with pytest.raises(FileNotFoundError, match="no best checkpoint: no step with a lower held-out loss than without LoRA"):
        adapter_of(t, "best")
