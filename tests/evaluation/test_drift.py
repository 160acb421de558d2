"""Drift: each measure against known changes, what is left out, and where the numbers go."""
import csv, json

import numpy as np
import pytest
from PIL import Image, ImageFilter

from qie_nb.data.alignment import Alignment
from qie_nb.evaluation import compare as comparison, eval_images, evaluate as module
from qie_nb.evaluation.eval_images import COLUMNS, at_size, box_mean, changed_region, drift_of, medians, notable, pack, say_drift
from qie_nb.evaluation.eval_images import notable_text, place_text, unpack
from qie_nb.evaluation.compare import table
from qie_nb.evaluation.evaluate import evaluate
from qie_nb.logging import ROW, csv_line
from qie_nb.tiny.photos import crops
from qie_nb.trainer import QwenImageEditTrainer as Trainer
from qie_nb.training.callbacks import EvalImage, RunState
from qie_nb.training.run_processes import state_message, take_state
from qie_nb.widgets.tensorboard import CURVES
from qie_nb.widgets.training_panel import TrainingPanel

W, H, M = 256, 192, 16
AT = (slice(60, 120), slice(100, 160)) # the edit


@pytest.fixture(scope="module")
def scene():
    "A control, its target with a green square, and what is around them."
    whole = crops(1, (W + 2 * M, H + 2 * M), seed=3, split="held_out")[0]
    control = np.asarray(whole)[M:-M, M:-M]
    target = control.copy()
    target[AT] = (30, 160, 60)
    around = np.asarray(whole).copy()
    around[M:-M, M:-M] = target
    return control, target, Image.fromarray(around)


def moved(around, dx=0., dy=0., sx=1., sy=1.):
    "The content shifted by pixels and scaled around the centre."
    x, y = M + W / 2 - (W / 2 + dx) / sx, M + H / 2 - (H / 2 + dy) / sy
    return np.asarray(around.resize((W, H), Image.Resampling.BICUBIC, box=(x, y, x + W / sx, y + H / sy)))


@pytest.mark.parametrize("dx,dy,sx,sy", [(3, 0, 1, 1), (-1.5, 2, 1, 1), (0, 0, 1.02, 1.02), (0, 0, 1, 0.98), (2, -1, 1.015, 1.015)])
def test_shift_and_scale_are_those_of_the_result(scene, dx, dy, sx, sy):
    control, target, around = scene
    row = drift_of(moved(around, dx, dy, sx, sy), control, target)
    assert row["drift_shift_px"] == pytest.approx(np.hypot(dx, dy), abs=0.5) and row["drift_scale_percent"] == pytest.approx(100 * (max(sx - 1, sy - 1, key=abs)), abs=0.3)
    assert (row["dx"], row["dy"]) == pytest.approx((dx, dy), abs=0.5) and (row["sx"], row["sy"]) == pytest.approx((sx, sy), abs=0.003)
    assert row["outside_psnr"] < 30 and abs(row["outside_contrast"]) < 4 and row["outside_colour"] < 3, "no other kind of change"


def test_a_faded_a_tinted_and_a_blurred_result(scene):
    control, target, _ = scene
    good, faded = drift_of(target, control, target), drift_of((target * 0.8 + 25).round().astype(np.uint8), control, target)
    assert good["outside_psnr"] == pytest.approx(58.92, abs=0.01) and good["inside_error"] == good["outside_colour"] == good["outside_contrast"] == 0 and good["detail_ratio"] == 1
    assert faded["outside_contrast"] == pytest.approx(-20, abs=0.3) and faded["detail_ratio"] == pytest.approx(0.64, abs=0.02)
    tinted = drift_of(np.clip(target + np.array([6., 0, -6]), 0, 255).round().astype(np.uint8), control, target)
    assert tinted["outside_colour"] == pytest.approx(np.sqrt(72 / 3), abs=0.7) and abs(tinted["outside_contrast"]) < 1
    blurred = drift_of(np.asarray(Image.fromarray(target).filter(ImageFilter.GaussianBlur(1.5))), control, target)
    assert blurred["detail_ratio"] < 0.3 and blurred["outside_colour"] < 0.5 and abs(blurred["outside_contrast"]) < 8
    for row in (good, faded, tinted, blurred): assert row["drift_shift_px"] < 0.5 and abs(row["drift_scale_percent"]) < 0.3, "none of them moves anything"


def test_the_error_inside_is_that_of_the_edit(scene):
    control, target, _ = scene
    undone, spoilt = drift_of(control, control, target), target.copy()
    assert undone["outside_psnr"] > 58 and undone["inside_error"] > 20, "an edit that was not made changes nothing outside"
    spoilt[:30, :30] += 20
    row = drift_of(spoilt, control, target)
    assert row["inside_error"] == 0 and row["outside_psnr"] < 45


def test_the_region_is_where_control_and_target_differ(scene):
    control, target, _ = scene
    region = changed_region(control, target)
    assert region[AT].all() and region[60 - 8:120 + 8, 100 - 8:160 + 8].all() and not region[:40].any() and not region[:, :80].any()
    noise = np.random.default_rng(0).integers(-6, 7, control.shape)
    assert not changed_region(control, np.clip(control + noise, 0, 255).astype(np.uint8)).any(), "noise, as of JPEG, is no edit"
    a = np.random.default_rng(1).random((9, 7))
    assert box_mean(a, 1)[4, 3] == pytest.approx(a[3:6, 2:5].mean()) and box_mean(a, 0) == pytest.approx(a)
    assert not changed_region(np.minimum(control, 243), np.minimum(control, 243) + np.uint8(12)).any(), "exactly `LEVELS`, however it is rounded"


def test_what_cannot_be_told_is_left_out(scene, monkeypatch):
    control, target, _ = scene
    monkeypatch.setattr(eval_images, "measure_alignment", lambda *a: None)
    assert drift_of(target, control) == {} and set(drift_of(target, control, target)) == {*COLUMNS[2:]}
    assert set(drift_of(target, control, 255 - control)) == {"inside_error", "detail_ratio"}, "an edit of the whole image has no outside"
    assert set(drift_of(target, None, target)) == {"detail_ratio"}, "text-to-image"
    flat = np.full_like(control, 90)
    assert set(drift_of(flat, flat, flat)) == {"outside_psnr", "outside_colour"}, "no contrast and no detail to compare with"
    assert "nan" not in str(drift_of(target, flat, flat)) and unpack(pack({})) == {} == medians([{}])


def test_numbers_survive_their_exchange(scene):
    control, target, around = scene
    row = drift_of(moved(around, 3), control, target, Alignment(3., 0., 1., 1.02, 0., 0.1))
    assert (row["target_shift_px"], row["target_scale_percent"]) == pytest.approx((3, 2)) and unpack(pack(row)) == pytest.approx(row, abs=1e-4)
    assert medians([row, {}, dict(drift_shift_px=row["drift_shift_px"] + 2)])["drift_shift_px"] == pytest.approx(row["drift_shift_px"] + 1)


def test_words_come_with_large_and_certain_drift_only():
    of = lambda px=0., percent=0., **kw: dict(drift_shift_px=px, drift_scale_percent=percent) | kw
    assert say_drift([of(1.9, 0.9)] * 2) == say_drift([of(9.), of(0.1)]) == say_drift([of(9.), {}]) == say_drift([of(9.), {}, {}]) == say_drift([]) == ""
    assert say_drift([of(0., 3.), of(0., -3.)]) == "", "no common direction"
    assert say_drift([of(2.0, 1.3), of(2.2, 1.5)]) == "the edited images are shifted by 2.1 px and 1.4 % larger than their controls (median of 2)"
    assert say_drift([of(3.)]) == "the edited image is shifted by 3.0 px against its control"
    assert say_drift([of(0., -1.5)] * 3) == "the edited images are 1.5 % smaller than their controls (median of 3)"
    learned = of(3., target_shift_px=2.9, target_scale_percent=0.)
    assert say_drift([learned, learned, of(3.)]) == "the edited images are shifted by 3.0 px against their controls (median of 3); so are their targets (shift 2.9 px): `qie-nb check FOLDER --align OUT` writes aligned pairs"
    assert say_drift([of(3.)], [of(0.5)]) == "the edited image is shifted by 3.0 px against its control; before the first step: not"
    assert say_drift([of(3.)], [of(2.5)]) == "the edited image is shifted by 3.0 px against its control; before the first step: shift 2.5 px"
    assert say_drift([of(3.)] * 2, [of(9.), {}]) == say_drift([of(3.)] * 2), "half of the images tell nothing"
    assert notable([of(5., 5.)]) == (5, 5)
    assert notable_text({}) == ""
    assert notable_text(of(1.9, -0.99)) == ""
    assert place_text(of(0., -0.04)) == ""
    assert place_text(of(2., -1.24)) == "shift 2.0 px, scale -1.2 %"


@pytest.mark.parametrize("ratio, words", [
    (0.05, "blurred: a tenth of the target's fine detail"),
    (0.25, "blurred: a quarter of the target's fine detail"),
    (0.29, "blurred: a third of the target's fine detail"),
    (0.5, "blurred: half of the target's fine detail"),
    (0.7, "blurred: two thirds of the target's fine detail"),
    (0.8, ""),
    (1.3, ""),
    (2.5, "rough: 2.5 times the target's fine detail"),
])
def test_fine_detail_is_told_in_words_only_where_it_is_off(ratio, words):
    assert notable_text(dict(detail_ratio=ratio)) == words


MADE = dict(drift_shift_px=3.25, drift_scale_percent=1.5, outside_psnr=30.5, inside_error=12., outside_colour=2., outside_contrast=-8., detail_ratio=0.75, dx=3., dy=1.25, sx=1.015, sy=1.01)


@pytest.fixture
def config(trained_run, tmp_path):
    own = [dict(image=str(trained_run.root/"control_images"/"0000.png"), prompt="x")]
    return lambda **train: trained_run.settings(tmp_path/"out", train=dict(eval_num_inference_steps=2, eval_steps=1, max_train_steps=1, samples=own, save_steps=None) | train)


@pytest.mark.slow
def test_an_evaluation_writes_its_drift(config, tmp_path, monkeypatch, capsys):
    "Rows, result file, TensorBoard, panel, `evaluate` and its table; pairs are measured with their target, samples without."
    from qie_nb.widgets.tensorboard import read_events
    asked = []
    monkeypatch.setattr(eval_images, "drift_of", lambda *a: asked.append(a) or dict(MADE))
    panel = TrainingPanel(every=0)
    t = Trainer(config(), [panel]).fit()
    (edited, control, target, _), own = asked
    pair = t.held_out.images(0)
    assert np.array_equal(target, pair["image"]) and edited.shape == target.shape and np.array_equal(control, at_size(pair["control"][0], target)) and own[2] is None and own[1].shape == own[0].shape
    assert {k: t.state.metrics[k] for k in COLUMNS} == {k: MADE[k] for k in COLUMNS}
    root = tmp_path/"out"/"checkpoints"
    with next(root.glob("logs/*.csv")).open() as f: row = list(csv.DictReader(f))[-1]
    assert {k: float(row[k]) for k in COLUMNS} == {k: MADE[k] for k in COLUMNS}
    result = json.loads(next(root.glob("inference/*/held_out.json")).read_text())
    assert result["drift"] == {i.name: MADE for i in t.state.eval_images}
    assert len(result["drift"]) == 2
    assert result["detail_ratio"] == 0.75
    assert read_events(tmp_path/"out"/"runs")[0]["drift_shift_px"] == [(1, 3.25)]
    assert {"drift_shift_px", "drift_scale_percent"} <= {*CURVES}
    said = [l for l in capsys.readouterr().out.splitlines() if "shifted" in l]
    assert said == ["the edited images are shifted by 3.2 px and 1.5 % larger than their controls (median of 2)"]
    assert panel.data()["drift"]["outside_psnr"] == 30.5
    assert "shift 3.2 px, scale +1.5 %" in panel.body()
    assert panel.gallery().count("scale +1.5 %") == 2
    base = evaluate(t)
    assert base["drift"] == result["drift"] and "shift 3.2 px, scale +1.5 %" in table([base, base])


@pytest.mark.slow
def test_drift_is_compared_with_that_before_the_first_step(config, monkeypatch, capsys):
    "Also by a run that is resumed, from the result file."
    measured = iter([4., 4.] + [3.25] * 9) # of two images before the first step, then of later ones
    monkeypatch.setattr(eval_images, "drift_of", lambda *a: dict(MADE, drift_shift_px=next(measured)))
    said = lambda: [l.partition("; ")[2] for l in capsys.readouterr().out.splitlines() if "shifted" in l]
    Trainer(config(eval_at_start=True)).fit()
    assert said() == ["", "before the first step: shift 4.0 px, scale +1.5 %"]
    Trainer(config(eval_at_start=True, max_train_steps=2, resume_checkpoint="latest")).fit()
    assert said() == ["before the first step: shift 4.0 px, scale +1.5 %"]


def test_unknown_drift_has_no_column(config, monkeypatch, capsys):
    monkeypatch.setattr(eval_images, "drift_of", lambda *a: {})
    panel = TrainingPanel(every=0)
    t = Trainer(config(samples=[]), [panel]).fit()
    assert not {*COLUMNS} & {*t.state.metrics} and panel.data()["drift"] == {} and "edited images" not in panel.body() and "shifted" not in capsys.readouterr().out
    assert {*COLUMNS} <= {*ROW} and "nan" not in csv_line(t.state.metrics).lower() and [i.drift for i in t.state.eval_images] == [{}]


def test_a_started_process_sends_its_drift():
    there, here = RunState(), RunState()
    there.eval_images = [EvalImage("a", "", "a.jpg", (), 1., MADE)]
    take_state(here, json.loads(json.dumps(state_message(type("T", (), dict(state=there))))))
    assert here.eval_images[0].drift == MADE


def test_a_comparison_shows_shift_and_scale(scene):
    from types import SimpleNamespace as NS
    control, target, around = scene
    columns = [comparison.Column("with LoRA", "now"), comparison.Column("without LoRA", "base")]
    edits = [NS(images=[Image.fromarray(control)], prompt="x", negative="", size=(W, H))]
    seen = comparison.Comparison(columns, edits, [[moved(around, 3), target]], [Image.fromarray(target)])
    (first, second), = seen.data()["drift"]
    assert first["drift_shift_px"] == pytest.approx(3, abs=0.5) and second["outside_psnr"] > 58
    notes = [note for _, note in seen.shown_rows()[1][0]]
    assert notes[1].endswith(place_text(first))
    assert notes[1].count("shift ") == 1
    assert seen.html().count("shift ") == 1, "the other one is where it belongs"
    assert [t.get_text() for a in seen.figure().axes for t in a.texts].count(notes[1].replace(", ", "\n", 1)) == 1
    without = comparison.Comparison(columns, edits, [[target, target]])
    assert "outside_psnr" not in without.drift[0][0] and "drift_shift_px" in without.drift[0][0]
