"""The training panel leaves the run unchanged, stays small, and its button stops and saves."""
import json, re, shutil
from types import SimpleNamespace

import pytest
import torch

from qie_nb.training.callbacks import EvalImage, EvalWork, RunState
from qie_nb.config import Config, LoggingSection
from qie_nb.logging import ProgressCallback, progress_callback
from qie_nb.widgets.loss_curve import curve_svg, smooth, ticks
from qie_nb.widgets.training_panel import TrainingPanel
from qie_nb.core.display import Progress, VIEW
from qie_nb.planning.plan import Planner
from qie_nb.trainer import QwenImageEditTrainer
from helpers import OnStep, StopAt, adapters_close, settings

HOSTILE = '<img src=x onerror="window.pwned=1">'


@pytest.fixture(autouse=True)
def progress_bars_on(monkeypatch): monkeypatch.setattr(Progress, "hush", None)


@pytest.fixture
def is_interactive(monkeypatch):
    "Simulates a live notebook; collects what is displayed."
    shown = []
    for module in ("core.display", "logging"):
        monkeypatch.setattr(f"qie_nb.{module}.kernel", lambda: object())
        monkeypatch.setattr(f"qie_nb.{module}.is_interactive", lambda stream=None: True)
    monkeypatch.setattr(Progress, "open_bar", lambda self: None) # progress as lines, for capsys
    for name in ("display", "update_display"):
        monkeypatch.setattr(f"IPython.display.{name}", lambda bundle, name=name, **kw: shown.append((name, kw.get("display_id"), bundle)))
    return shown


def fake(tmp_path, log_every=1, max_steps=100):
    "The parts of a trainer that the panel reads."
    config = Config(logging=dict(log_every=log_every))
    return SimpleNamespace(state=RunState(max_steps=max_steps, began=0.), config=config, device=torch.device("cpu"),
                           checkpoint_root=lambda: tmp_path, global_step=0, plan=Planner(config).plan)


def begun(tmp_path, panel, **kw): # the trainer's parts and the panel
    panel.on_train_begin(t := fake(tmp_path, **kw))
    return t, panel


@pytest.fixture
def clock(monkeypatch):
    "The panel's time in seconds; a test moves it."
    at = SimpleNamespace(now=1000.)
    monkeypatch.setattr("qie_nb.widgets.training_panel.time", SimpleNamespace(time=lambda: at.now))
    return at


def go(t, panel, steps, loss=0.5):
    for _ in range(steps):
        t.state.loss = loss(t.global_step + 1) if callable(loss) else torch.tensor(loss)
        t.state.global_step = t.global_step = t.global_step + 1
        panel.on_step_end(t)


def panels_of(shown):
    "What is displayed, without the summaries of runs."
    return [s for s in shown if not s[2].get("text/plain", "").startswith("took: ")]


def trainer(root, folder, panel="auto", callbacks=(), **train):
    return QwenImageEditTrainer(settings(root, folder, train=train, logging=dict(panel=panel), cache=dict(cache_dir=str(root.parent/"cache"))), callbacks)


@pytest.mark.slow
def test_same_adapter_when_stopped_and_continued(pairs, tmp_path, is_interactive, monkeypatch):
    root, panels, begin = pairs(), [], TrainingPanel.on_train_begin
    plain = trainer(root, tmp_path/"a", panel=False).fit()
    (_, _, summary), = is_interactive
    assert summary["text/plain"].startswith("took: ") and VIEW not in summary
    is_interactive.clear()
    monkeypatch.setattr(TrainingPanel, "on_train_begin", lambda panel, t: (panel in panels or panels.append(panel), begin(panel, t)))
    seen = trainer(root, tmp_path/"b", callbacks=[OnStep(lambda t: t.global_step == 4 and panels[0].button.click())]).fit()
    assert (seen.global_step, seen.state.stop) == (4, "the stop button") and (tmp_path/"b"/"checkpoints"/"step_00000004"/"COMPLETE").is_file()
    assert "<b>stopped: the stop button</b>, step 4 of 6, epoch 2 of 2" in panels[0].html() and "fit() continues from here" in panels[0].html()
    assert panels[0].button.disabled and panels[0].button.layout.display == "none"
    (_, _, live), (_, mark, still), *updates = panels_of(is_interactive)
    assert list(live) == [VIEW] and "text/html" in still and VIEW not in still and updates[-1][:2] == ("update_display", mark)
    seen.fit()
    assert seen.state.stop == "done"
    adapters_close(seen, plain)
    assert [s for s, _ in panels[1].data()["curve"]] == [1, 2, 3, 4, 5, 6], "the second panel begins with the curve so far"
    last = panels_of(is_interactive)[-1][2]
    assert "finished</b>, step 6 of 6, epoch 2 of 2" in last["text/html"]
    assert "what comes next" in last["text/html"]
    assert "training panel: step" in last["text/plain"]


def test_failing_panel_does_not_end_the_run(tmp_path, is_interactive, monkeypatch, capsys):
    def broken(self, still=False):
        if self.state.global_step > 2: raise RuntimeError("no ink")
        return ""
    monkeypatch.setattr(TrainingPanel, "body", broken)
    monkeypatch.setattr(TrainingPanel, "cost", property(lambda self: 0., lambda self, seconds: None), raising=False)
    t, panel = begun(tmp_path, TrainingPanel(0., 0.), max_steps=6)
    go(t, panel, 6)
    panel.on_train_end(t)
    said = capsys.readouterr()
    assert said.out.count("the training panel failed (RuntimeError: no ink); the run continues with plain progress") == 1 and "train 6/6" in said.out
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    TrainingPanel().on_train_begin(t)
    assert "the training panel failed (ModuleNotFoundError" in capsys.readouterr().out


@pytest.mark.parametrize("asked, looked_at, wanted", [("auto", True, True), ("auto", False, False), (True, False, True), (False, True, False)])
def test_when_the_panel_is_used(asked, looked_at, wanted, monkeypatch):
    monkeypatch.setattr("qie_nb.logging.kernel", lambda: object())
    monkeypatch.setattr("qie_nb.logging.is_interactive", lambda: looked_at)
    assert type(progress_callback(LoggingSection(panel=asked))) is (TrainingPanel if wanted else ProgressCallback)


def test_losses_are_read_at_logged_steps(tmp_path):
    read = []
    class Loss:
        def __float__(self): read.append(1); return 0.5
    t, panel = begun(tmp_path, TrainingPanel(every=0), log_every=10)
    go(t, panel, 95, lambda step: Loss())
    assert len(read) == len(panel.data()["curve"]) == 9
    panel.on_train_end(t)
    assert len(read) == 9


def test_the_advice_of_an_evaluation_is_shown_as_text(tmp_path):
    t, panel = begun(tmp_path, TrainingPanel(every=0))
    assert "advice:" not in panel.html()
    t.state.advice = f"set `optimizer.lr` to 0.005 {HOSTILE}"
    shown = panel.html()
    assert "advice:</b> set <code" in shown and ">optimizer.lr</code> to 0.005" in shown
    assert "&lt;img src=x" in shown and "<img src=x" not in shown


def test_an_evaluation_is_one_line_with_its_intervals_folded(tmp_path):
    t, panel = begun(tmp_path, TrainingPanel(every=0))
    assert "<details" not in panel.html()
    t.state.evaluated = f"step 50: better {HOSTILE}"
    t.state.evaluations = [
        dict(step=0, loss=[0.6, 0.5, 0.72], ratio=None, image=68.),
        dict(step=50, loss=[0.19, None, None], ratio=[0.32, None, None], image=None),
    ]
    page = panel.html()
    assert "<summary>step 50: better &lt;img" in page
    assert "0.5000 to 0.7200" in page
    assert "0.32" in page
    assert "<img src=x" not in page
    assert "None" not in page
    assert "<details" not in panel.body(), (
        "the headline is redrawn every second, which would fold it again")


def test_the_slider_shows_the_images_of_earlier_evaluations(tmp_path, is_interactive):
    import numpy as np
    from PIL import Image
    t, panel = begun(tmp_path, TrainingPanel(every=0))
    for step in (0, 10, 20):
        Image.fromarray(np.full((32, 64, 3), 10 * step, np.uint8)).save(tmp_path/f"{step}.png")
        t.state.global_step = t.global_step = step
        t.state.eval_images = [EvalImage("a", "pair", tmp_path/f"{step}.png")]
        panel.show_eval_images(t.state)
        panel.draw()
    assert list(panel.history.options) == [0, 10, 20]
    assert panel.history.value == 20
    assert "after step 20" in panel.bottom.value
    panel.history.value = 0
    assert "before the first step" in panel.bottom.value and panel.data()["sampled"] == [0, 10, 20]
    t.state.global_step = 30
    panel.show_eval_images(t.state)
    panel.draw()
    assert panel.history.value == 0, "a new evaluation does not move it"
    assert "before the first step" in panel.bottom.value


def test_long_run_stays_small(tmp_path):
    t, panel = begun(tmp_path, TrainingPanel(every=1e9), max_steps=20_000)
    go(t, panel, 20_000, lambda step: 1 / step)
    d = panel.data()
    assert d["step"] == 20_000 and len(d["curve"]) <= 513 and len(panel.times) <= 60
    assert len(panel.html()) < 60_000 and len(panel.body()) < 40_000
    steps = [s for s, _ in d["curve"]]
    assert steps == sorted(set(steps)) and steps[-1] == 20_000
    json.dumps(d)


@pytest.mark.parametrize("points", [[], [(1, 0.5)], [(1, 0.), (2, 0.)], [(5, 1e9), (6, -1e9)], [(1, 1e-12), (2, 2e-12)], [(i, 1.) for i in range(500)]])
def test_extreme_curves(points):
    from xml.dom.minidom import parseString
    svg = curve_svg(points, points[:1])
    assert parseString(svg) and "nan" not in svg and "inf" not in svg and len(smooth(points)) == len(points)
    assert len(ticks(0, 1)) <= 6


@pytest.mark.slow
def test_stop_button_during_an_evaluation(pairs, tmp_path, is_interactive, capsys):
    pressed, wrap = [], StopAt(0)
    def begin(t):
        poll = t.state.poll
        def press(): pressed.append(t.global_step); t.state.stop = "the stop button"; poll()
        t.state.poll = press
    wrap.on_train_begin = begin
    trainer = QwenImageEditTrainer(settings(pairs(((48, 32),) * 4), tmp_path, train=dict(val_fraction=0.3, eval_steps=2, eval_num_inference_steps=2)), [wrap]).fit()
    assert set(pressed) == {2} and trainer.global_step == 2
    assert "Evaluation at step 2 was interrupted (the stop button); it will be repeated on resume" in capsys.readouterr().out


def test_evaluation_images_and_captions(tmp_path):
    from PIL import Image
    Image.new("RGB", (600, 300), (200, 30, 30)).save(tmp_path/"edit.jpg")
    t, panel = begun(tmp_path, TrainingPanel(every=0))
    t.state.eval_images = [EvalImage("00", HOSTILE, tmp_path/"edit.jpg")] * 9
    go(t, panel, 1)
    t.state.eval_images, t.state.stop = None, HOSTILE
    go(t, panel, 1)
    for page in (panel.html(), panel.body(), panel.gallery()): assert "<img src=x" not in page
    assert panel.html().count("&lt;img src=x") == 1 + 1 and panel.data()["images"] == [HOSTILE] * 4, "a caption that all share is shown once"
    assert len(panel.html()) < 60_000


@pytest.mark.parametrize("n, each, cost, most", [(1000, 0.01, 0., 11), (1000, 0.1, 0.2, 12), (3, 60., 0.2, 3)]) # seconds per step and per page
def test_time_between_updates(n, each, cost, most, tmp_path, monkeypatch, clock):
    drawn, (t, panel) = [], begun(tmp_path, TrainingPanel())
    def draw(self): drawn.append(1); clock.now += cost; self.drawn, self.cost = clock.now, cost
    monkeypatch.setattr(TrainingPanel, "draw", draw)
    for _ in range(n): clock.now += each; go(t, panel, 1)
    assert len(drawn) <= most and (n > 3 or len(drawn) == 3)


def test_rate_and_time_left(tmp_path, clock):
    t, panel = begun(tmp_path, TrainingPanel(), max_steps=200)
    assert panel.data()["rate"] is None
    for _ in range(100): clock.now += 2.; go(t, panel, 1)
    d = panel.data()
    assert d["rate"] == pytest.approx(0.5) and d["seconds_left"] == pytest.approx(200)
    assert "2.0 s per step" in panel.html() and "3:20 min" in panel.html()


def test_bars_are_hidden_during_the_run(tmp_path, capsys):
    t, panel = begun(tmp_path, TrainingPanel())
    def images():
        bar = Progress(2, "images", every=0)
        bar.update(2), bar.close()
        return "images 2/2" in capsys.readouterr().out
    assert not images()
    panel.on_train_end(t)
    assert Progress.hush is None and images()


def test_run_that_fails_before_it_begins(tmp_path, capsys):
    TrainingPanel().on_train_end(fake(tmp_path))
    assert not capsys.readouterr().out
    TrainingPanel().stop() # no run: nothing to do


def test_an_evaluation_is_announced_and_not_counted_in_the_rate(tmp_path, clock, monkeypatch):
    monkeypatch.setattr("qie_nb.training.callbacks.time", SimpleNamespace(time=lambda: clock.now))
    t, panel = begun(tmp_path, TrainingPanel(every=0), max_steps=10)
    t.state.began = clock.now
    for _ in range(4): clock.now += 2.; go(t, panel, 1)
    work = t.state.work = EvalWork("final evaluation: 2 images x 12 steps, about 1:20 min", 48, 1., began=clock.now)
    for _ in range(24): clock.now += 2.; work.done += 1; t.state.poll()
    page = panel.body()
    assert "final evaluation: 2 images x 12 steps, about 1:20 min" in page and "48 s left of it" in page
    assert panel.data()["rate"] == pytest.approx(0.5) and panel.data()["seconds_left"] == pytest.approx(12 + 48)
    clock.now, t.state.work, t.state.eval_seconds = clock.now + 48., None, 96.
    for _ in range(6): clock.now += 2.; go(t, panel, 1)
    assert panel.data()["rate"] == pytest.approx(0.5) and panel.data()["seconds"] == 8 + 96 + 12


def test_images_stand_between_control_and_target(tmp_path):
    import numpy as np
    from PIL import Image
    Image.new("RGB", (64, 32)).save(tmp_path/"edit.jpg")
    shown = np.zeros((32, 64, 3), np.uint8), np.full((32, 64, 3), 255, np.uint8)
    t, panel = begun(tmp_path, TrainingPanel(every=0))
    t.state.eval_images = [EvalImage("a", "pair", tmp_path/"edit.jpg", shown), EvalImage("b", "own", tmp_path/"edit.jpg", shown[:1])]
    panel.on_train_begin(t) # again, after an evaluation before the first step
    titles = re.findall("font-weight:bold\">([^<]*)", panel.gallery())
    assert titles == ["before", "edit before the first step", "after"], "once for all rows"
    assert panel.gallery().count("<img") == 5
    assert "repeat(3, minmax(0, 1fr))" in panel.gallery()
    assert panel.gallery().count("aspect-ratio:64/32") == 5
    assert panel.gallery().count("edited with 12 steps, guidance 4") == 1
    assert panel.gallery().count("pair") == panel.gallery().count("own") == 1


def test_time_continues_after_a_stop(trained_run, tmp_path):
    out = trained_run.copy(tmp_path/"out")
    state = json.loads((out/"checkpoints"/"step_00000006"/"state.json").read_text())
    assert state["seconds"] > 0
    t = QwenImageEditTrainer(trained_run.settings(out, train=dict(resume_checkpoint=str(out/"checkpoints"/"step_00000006"), eval_steps=None, num_epochs=2))).fit()
    assert t.state.seconds > state["seconds"] and t.state.shown_epoch == 2


@pytest.mark.slow
def test_the_curve_goes_on_in_another_folder_and_not_from_another_run(pairs, tmp_path):
    root, held = pairs(((48, 32),) * 10), dict(eval_steps=2, eval_images=0, save_steps=2)
    def points(folder, **train):
        panel = TrainingPanel()
        QwenImageEditTrainer(settings(root, tmp_path/folder, train=held | train, cache=dict(cache_dir=str(tmp_path/"cache"))), [panel]).fit()
        return [s for s, _ in panel.loss.points], [s for s, _ in panel.held_out.points]
    assert points("a", max_train_steps=4) == ([1, 2, 3, 4], [2, 4])
    assert points("b", max_train_steps=6, resume_checkpoint=str(tmp_path/"a"/"checkpoints"/"latest")) == ([1, 2, 3, 4, 5, 6], [2, 4, 6])
    shutil.rmtree(tmp_path/"a"/"checkpoints"/"step_00000002"), shutil.rmtree(tmp_path/"a"/"checkpoints"/"step_00000004")
    assert points("a", max_train_steps=2) == ([1, 2], [2]), "the log there is an earlier run's"


@pytest.mark.slow
def test_sample_now_edits_the_images_after_the_step_by_button_or_file(pairs, tmp_path, is_interactive, monkeypatch):
    root, panels, begin = pairs(((48, 32),) * 4), [], TrainingPanel.on_train_begin
    monkeypatch.setattr(TrainingPanel, "on_train_begin", lambda panel, t: (panels.append(panel), begin(panel, t)))
    def ask(t):
        if t.global_step == 2: panels[0].sample.click()
        if t.global_step == 4: (t.checkpoint_root()/"sample_now").touch()
    more = dict(samples=[dict(image=str(root/"control_images"/"0000.png"), prompt="make it dark")], eval_num_inference_steps=2, val_fraction=0, num_epochs=3)
    seen = trainer(root, tmp_path/"b", callbacks=[OnStep(ask)], **more).fit()
    made = sorted(p.name for p in (tmp_path/"b"/"checkpoints"/"inference").iterdir())
    assert made == ["step_00000003_now", "step_00000005_now"] and seen.global_step == 6
    assert "edit after step 5" in panels[0].gallery() and panels[0].sample.layout.display == "none"
    assert not (tmp_path/"b"/"checkpoints"/"sample_now").exists()
    adapters_close(seen, trainer(root, tmp_path/"a", panel=False, **more).fit())


def test_the_images_before_the_first_step_are_kept_to_compare_with(tmp_path, monkeypatch):
    from PIL import Image
    monkeypatch.setattr("qie_nb.widgets.training_panel.MOST_SAMPLES", 3)
    Image.new("RGB", (64, 32)).save(tmp_path/"edit.jpg")
    t, panel = begun(tmp_path, TrainingPanel(every=0))
    for step in range(0, 60, 10):
        t.state.global_step = t.global_step = step
        t.state.eval_images = [EvalImage("a", "pair", tmp_path/"edit.jpg")]
        panel.show_eval_images(t.state)
    assert panel.data()["sampled"] == [0, 40, 50]


def test_the_held_out_loss_is_the_last_one_beside_the_first(tmp_path):
    t, panel = begun(tmp_path, TrainingPanel(every=0))
    for step, loss in ((0, 0.61), (10, 0.45), (20, 0.31)):
        panel.add_losses(step, None, loss)
    assert panel.data()["held_out_loss"] == 0.31
    assert "0.3100 (first 0.6100)" in panel.html()


@pytest.mark.parametrize("step, left", [(0, 3), (9, 3), (10, 2), (29, 1)])
def test_the_time_left_has_the_evaluations_to_come(step, left, tmp_path):
    "After the steps 10 and 20, and at the end."
    t, panel = begun(tmp_path, TrainingPanel(every=0), max_steps=30)
    panel.interval = SimpleNamespace(of=lambda max_steps: (0, 10))
    t.state.eval_cost, t.state.global_step = 7., step
    assert panel.evaluating_left() == 7. * left
    t.state.stop = "the stop button"
    assert panel.evaluating_left() == 0
