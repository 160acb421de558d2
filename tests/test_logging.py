"What logs contain and cost, and that none changes or ends a run."
import contextlib, io, json, os, re, shutil, subprocess, sys, time, weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from accelerate import tracking
from PIL import Image, ImageOps
from helpers import OnStep, adapters_close, merged, settings, write_pairs

import qie_nb.logging as logs
from qie_nb.config import make_config
from qie_nb.training.callbacks import Callback, RunState
from qie_nb.widgets.tensorboard import read_run, run_folders
from qie_nb.logging import LogCallback, Tracker, image_grid
from qie_nb.training.sinks import event_files
from qie_nb.core.display import Progress, quiet_bars
from qie_nb.trainer import QwenImageEditTrainer

IMAGES = {"training/training_images", "training/control_images", "individual/training_image_0", "individual/training_image_1"}
NASTY = "<img src=x onerror=alert(1)> *make* $it$ [blue](http://x) `now`"
SIZES = ((96, 64), (64, 64), (64, 96)) * 2 # with an area of 96x64 each is its own bucket: nothing is resized


def logged(root, tmp_path, *callbacks, **sections):
    "A trainer that logs to TensorBoard, with held-out pairs."
    base = dict(data=dict(image_size=[96, 64]), logging=dict(report_to="tensorboard", log_images_every=2),
                train=dict(num_epochs=2, val_fraction=0.4, eval_interval=1, eval_num_inference_steps=2))
    return QwenImageEditTrainer(settings(root, tmp_path, **merged(base, sections)), callbacks)


def rows_of(folder, kind="csv"):
    path = next((folder/"checkpoints"/"logs").glob(f"*.{kind}"))
    return pd.read_csv(path) if kind == "csv" else pd.read_json(path, lines=True)


class Notes(tracking.GeneralTracker):
    "A tracker that remembers its calls; those of `fails` raise."
    name, requires_logging_directory, main_process_only, made = "notes", False, True, []
    tracker = property(lambda self: self)
    def __init__(self, project="", fails=(), **options):
        super().__init__()
        self.seen, self.fails, self.given = [], fails, (project, options)
        self.made.append(self)
    def start(self): self.say("start")
    def store_init_configuration(self, values): self.say("config", values)
    def log(self, values, step=None, **kw): self.say("log", values, step)
    def log_images(self, values, step=None, **kw): self.say("images", values.keys())
    def finish(self): self.say("finish")
    def say(self, what, *a):
        if what in self.fails: raise ConnectionError("the tracker's server is away")
        self.seen.append((what, *a))


@pytest.fixture(scope="module")
def cached_run(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("cached")
    root = write_pairs(tmp/"set", SIZES, controls=2, caption=NASTY)
    exif = Image.Exif()
    exif[274] = 6 # turn it back
    for path in (root/d/"0000.png" for d in ("training_images", "control_images")): Image.open(path).transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    trainer = logged(root, tmp, logging=dict(report_to=["tensorboard", "wandb"], project="mine", tracker_options=dict(wandb=dict(mode="offline"))))
    trainer.cache_embeddings()
    with pytest.MonkeyPatch.context() as m, contextlib.redirect_stdout(io.StringIO()) as said:
        m.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Notes)
        m.setattr(tracking, "get_available_trackers", lambda: [tracking.LoggerType.WANDB])
        trainer.fit()
    return SimpleNamespace(tmp=tmp, root=root, trainer=trainer, said=said.getvalue(), run=read_run(tmp/"runs"), tracker=Notes.made[-1])


@pytest.mark.slow
def test_all_tags_with_cached_latents(cached_run):
    r, t = cached_run.run, cached_run.trainer
    assert t.qwen_vl is None and t.vae is None
    assert {"lr", "grad_norm", "gpu_modules/text_encoder_MB_cpu", "held_out_loss", "held_out_loss_plain", "held_out_loss/0.0-0.2", "held_out_pairs"} <= set(r.scalars)
    assert IMAGES - {"individual/training_image_1"} <= set(r.images)
    assert [s for s, _ in r.scalars["loss"]] == list(range(1, t.global_step + 1)) == [s for s, _ in r.scalars["gpu_memory/utilization"]]
    assert 0 < r.scalars["gpu_memory/utilization"][-1][1] < 1
    size = sum(p.numel() * p.element_size() for p in (*t.transformer.parameters(), *t.transformer.buffers())) / 1e6
    assert r.scalars["gpu_modules/transformer_MB_cpu"][-1][1] == pytest.approx(size) and r.scalars["gpu_modules/vae_MB_cpu"][-1][1] == 0


def test_logged_images_are_those_on_disk_turned_upright(cached_run):
    r, root = cached_run.run, cached_run.root
    read = lambda folder: [np.asarray(ImageOps.exif_transpose(Image.open(p))) for p in sorted((root/folder).glob("*.png"))]
    targets, first, second = read("training_images"), read("control_images"), read("control_images_2")
    same = lambda a, b: a.shape == b.shape and (a == b).all()
    for step, grid in r.images["training/training_images"]:
        held = [im for i in (0, 1) for s, im in r.images.get(f"individual/training_image_{i}", ()) if s == step]
        which = [next(k for k, t in enumerate(targets) if same(t, im)) for im in held]
        assert same(grid, image_grid([targets[k] for k in which]))
        controls = next(im for s, im in r.images["training/control_images"] if s == step)
        assert same(controls, image_grid([c[k] for k in which for c in (first, second)], 2)), "a row a sample, its controls side by side"


def test_samples_and_their_captions(cached_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html
    r = cached_run.run
    tags = [t for t in r.images if t.startswith("samples/")]
    assert len(tags) == len(cached_run.trainer.held_out) and all(len(r.images[t]) == 2 for t in tags)
    assert all(r.texts[t][-1][1] == f"before, edit, after: {NASTY}" and len(r.texts[t]) == 1 for t in tags)
    edit = np.asarray(Image.open(sorted((cached_run.tmp/"checkpoints"/"inference").glob("epoch_0002/00_*.jpg"))[0]))
    h, w = edit.shape[:2]
    row = r.images[tags[0]][-1][1]
    assert (row[:h, row.shape[1] // 3:][:, :w] == edit).all(), "the edit that evaluation stored"
    acc = EventAccumulator(str(cached_run.tmp/"runs"), size_guidance=dict(tensors=0)).Reload()
    page = markdown_to_safe_html(acc.Tensors(f"{tags[0]}/text_summary")[0].tensor_proto.string_val[0])
    assert not re.search("<(img|em|a |code)", page) and "onerror" in page, "TensorBoard shows it as text"


@pytest.mark.slow
def test_images_are_the_same_with_and_without_a_cache(cached_run, pairs, tmp_path, capsys):
    logged(pairs(SIZES, controls=2), tmp_path, cache=dict(use_cache=False), train=dict(eval_interval=0)).fit()
    said = cached_run.said + capsys.readouterr().out
    assert "IMAGE_LOG" not in said and "attention:" not in said, "no line for developers"
    plain, training = read_run(tmp_path/"runs"), lambda run: {t for t in run.images if not t.startswith("samples/")}
    assert training(plain) == training(cached_run.run)
    for tag in IMAGES & set(plain.images): # the same images, whichever way they came
        assert all(s == u and (a == b).all() for (s, a), (u, b) in zip(plain.images[tag], cached_run.run.images[tag], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_image_steps_open_few_files_and_release_memory(count, pairs, tmp_path, monkeypatch):
    opened, held, steps, real_open = [], [], [], Path.open
    def after(t):
        steps.append((len(opened), len(held), any(w() is not None for w in held)))
        opened.clear(), held.clear()
    def noted(real):
        def make(*a, **kw):
            held.append(weakref.ref(out := real(*a, **kw)))
            return out
        return make
    begins = Callback()
    begins.on_train_begin = lambda t: opened.clear() # the data set has been looked at
    trainer = logged(pairs(((96, 64),) * 4, controls=2), tmp_path, OnStep(after), begins, train=dict(val_fraction=0., num_epochs=3), logging=dict(log_images_every=3, log_images_count=count))
    trainer.cache_embeddings()
    monkeypatch.setattr(Path, "open", lambda self, *a, **kw: (opened.append(self) if self.suffix == ".png" else None, real_open(self, *a, **kw))[1])
    monkeypatch.setattr("qie_nb.data.batches.np", SimpleNamespace(asarray=noted(np.asarray), ndarray=np.ndarray))
    monkeypatch.setattr(logs, "image_grid", noted(logs.image_grid))
    trainer.fit()
    # when due: a target and two controls of `log_images_count` samples are opened and held with two grids; nothing of them is left after the step
    assert steps == [(count * 3 * due, (count * 3 + 2) * due, False) for due in (n in (1, 3, 6) for n in range(1, 7))]


@pytest.mark.slow
def test_logging_does_not_change_the_adapter(pairs, tmp_path):
    root = pairs(SIZES)
    a = logged(root, tmp_path/"a", LogCallback([Tracker(Notes())]), logging=dict(log_images_every=1, log_images_count=8)).fit()
    b = logged(root, tmp_path/"b", logging=dict(report_to="none", log_images=False, log_every=3)).fit()
    adapters_close(a, b)
    assert (tmp_path/"a"/"runs").is_dir() and not (tmp_path/"b"/"runs").exists()


def test_moved_component_counts_0_on_the_old_device(monkeypatch):
    seen, places = [], iter([{"vae_MB_cuda0": 250.}, {"vae_MB_cuda0": 250.}, {"vae_MB_cpu": 250.}])
    monkeypatch.setattr(logs, "module_gauges", lambda t: next(places))
    made = LogCallback([SimpleNamespace(name="x", scalars=lambda values, step: seen.append({k: v for k, v in values.items() if "modules" in k}))])
    made.modules = {}
    for n in (1, 2, 3): made.row(SimpleNamespace(device="cpu", state=RunState(global_step=n, loss=1., grad_norm=1.)))
    assert seen == [{"gpu_modules/vae_MB_cuda0": 250.}, {}, {"gpu_modules/vae_MB_cuda0": 0., "gpu_modules/vae_MB_cpu": 250.}]


# --- unreadable images
@pytest.mark.slow
def test_missing_images_do_not_end_the_run(pairs, tmp_path, capsys):
    root, gone = pairs(((96, 64),) * 6), Callback()
    gone.on_train_begin = lambda t: [p.unlink() for p in (root/"control_images").glob("*.png")]
    trainer = logged(root, tmp_path, gone, train=dict(val_fraction=0., num_epochs=4), logging=dict(log_images_every=1))
    trainer.cache_embeddings()
    trainer.fit()
    said = capsys.readouterr().out
    assert trainer.state.stop == "done" and trainer.global_step == 12
    assert said.count("image left out") == 3 and "cannot be read (it does not exist); replace it or remove the pair" in said
    assert said.count("more images cannot be read; they are left out without a message") == 1
    run = read_run(tmp_path/"runs")
    assert not run.images and len(run.scalars["loss"]) == 12


@pytest.mark.parametrize("batch, words", [(object(), ""), (dict(image=[np.zeros((4, 4, 3), "uint8")]), " (KeyError: 'control')")])
def test_foreign_batches(batch, words, capsys):
    made = LogCallback([])
    t = SimpleNamespace(batch=batch, global_step=1, config=SimpleNamespace(logging=SimpleNamespace(log_images_count=2)))
    for _ in range(3): made.images(t)
    assert capsys.readouterr().out.count(f"cannot fetch images{words}; use qie_nb.data.loader") == 1


# --- failing logs
class Short(io.FileIO):
    def write(self, data): return super().write(data[:2])


@pytest.mark.slow
def test_full_disk_does_not_end_the_run(pairs, tmp_path, monkeypatch, capsys):
    "Event files are given up, rows wait; a row that was written in part is removed."
    from tensorboard.summary.writer import record_writer
    real, written, rows = record_writer.RecordWriter.write, [], []
    def full(self, data):
        written.append(data)
        if len(written) > 8: raise OSError(28, "No space left on device")
        real(self, data)
    def opened(self, mode="r", *a, real=Path.open, **kw):
        if mode == "ab": rows.append(self)
        return Short(self, mode) if mode == "ab" and 3 < len(rows) < 7 else real(self, mode, *a, **kw)
    monkeypatch.setattr(record_writer.RecordWriter, "write", full)
    monkeypatch.setattr("threading.excepthook", lambda a: None)
    monkeypatch.setattr(Path, "open", opened)
    trainer = logged(pairs(SIZES), tmp_path, train=dict(val_fraction=0., num_epochs=3), logging=dict(log_images_every=1)).fit()
    said = capsys.readouterr().out
    assert trainer.state.stop == "done" and said.count("TensorBoard's event files cannot be written (") == 1 and "No space left on device" in said
    assert said.count("cannot be written (no space left for a whole row); the run continues") == 1 and len(rows) > 7
    assert list(rows_of(tmp_path).step) == list(rows_of(tmp_path, "jsonl").step) == list(range(1, trainer.global_step + 1))


# --- rows
@pytest.mark.slow
def test_rows_are_complete_and_equal_in_both_files(pairs, tmp_path):
    steps = []
    def look(t):
        csv, lines = (next((tmp_path/"checkpoints"/"logs").glob(f"*.{kind}")).read_text() for kind in ("csv", "jsonl"))
        table = pd.read_csv(io.StringIO(csv))
        other = pd.DataFrame([json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is no JSON")) for line in lines.splitlines()])
        assert csv.endswith("\n") and (other.isna() == table.isna()).all(axis=None) and (table.fillna(0) == other.fillna(0)).all(axis=None)
        steps.append(t.global_step)
        assert list(table.step) == steps
    trainer = logged(pairs(SIZES), tmp_path, OnStep(look), train=dict(eval_interval=2, val_fraction=0.2, eval_images=0), logging=dict(report_to="none"))
    loss = trainer._compute_loss
    trainer._compute_loss = lambda *batch: loss(*batch) * (float("nan") if trainer.global_step == 1 else 1)
    trainer.fit()
    rows = rows_of(tmp_path, "jsonl")
    assert len(steps) > 3 and np.isnan(rows.loss[1]) and rows.loss[0] > 0 and rows.skipped[1] in (0, 1) and rows.held_out_loss.iloc[-1] > 0


def test_an_evaluation_is_logged_with_its_step_whatever_the_interval_of_the_log(pairs, tmp_path):
    train = dict(max_train_steps=5, num_epochs=None, eval_interval=0, eval_steps=2, eval_images=0, eval_at_start=False)
    logged(pairs(SIZES), tmp_path, train=train, logging=dict(report_to="none", log_every=100)).fit()
    rows = rows_of(tmp_path)
    assert list(rows.step) == [2, 4, 5] and (rows.held_out_loss > 0).all()


@pytest.mark.slow
def test_logs_of_resumed_and_new_runs(pairs, tmp_path, monkeypatch):
    waited, real, root = [], event_files.next_second, pairs(((96, 64),) * 6)
    monkeypatch.setattr(event_files, "next_second", lambda d: (waited.append(Path(d)), real(d)))
    def run(folder, *callbacks, runs="runs", **train):
        train = dict(save_steps=2, num_epochs=3, eval_interval=0, val_fraction=0., output_dir=str(tmp_path/folder)) | train
        return logged(root, tmp_path, *callbacks, train=train, logging=dict(log_images_every=1, log_dir=str(tmp_path/runs))).fit()
    def dies(t):
        if t.global_step == 5: raise RuntimeError("the power fails")
    straight = run("b", runs="b_runs")
    with pytest.raises(RuntimeError): run("a", OnStep(dies))
    # step 5 has been logged and is done again
    resumed = run("a", resume_checkpoint=str(tmp_path/"a"/"checkpoints"/"step_00000004"))
    assert resumed.global_step == straight.global_step == 9 and waited == [tmp_path/"runs"]
    a, b = read_run(tmp_path/"runs"), read_run(tmp_path/"b_runs")
    np.testing.assert_allclose(a.scalars["loss"], b.scalars["loss"], rtol=1e-2)
    for logged_steps in (a.scalars["loss"], a.images["training/training_images"]): assert [s for s, _ in logged_steps] == list(range(1, 10))
    assert len(list((tmp_path/"runs").glob("events*"))) == len(list((tmp_path/"a"/"checkpoints"/"logs").iterdir())) == 2
    for kind in ("csv", "jsonl"):
        x, y = (rows_of(tmp_path/d, kind).drop(columns="time") for d in "ab")
        pd.testing.assert_frame_equal(x, y, rtol=1e-2)
        assert list(x.step) == list(range(1, 10))
    run("c", max_train_steps=2)
    assert len(run_folders(tmp_path/"runs")) == 2 and [s for s, _ in read_run(tmp_path/"runs").scalars["loss"]] == [1, 2]
    assert read_run(next((tmp_path/"runs").glob("earlier_*"))).scalars == a.scalars, "the earlier run keeps its own curve"


def test_event_files_of_one_second_keep_their_order(tmp_path, monkeypatch):
    "Within one second the names differ in a counter, and 10 sorts before 9."
    now, slept = time.time(), []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "time", lambda: now + sum(slept))
    (tmp_path/f"events.out.tfevents.{int(now):010}.host.1.9").touch()
    event_files.next_second(tmp_path)
    assert len(slept) == 1 and int(now + slept[0]) == int(now) + 1
    event_files.next_second(tmp_path)
    assert len(slept) == 1


@pytest.mark.slow
def test_error_before_the_logs_begin_is_raised(pairs, tmp_path, monkeypatch):
    def fails(self, t): raise RuntimeError("no room for the encoder")
    monkeypatch.setattr("qie_nb.evaluation.evaluate.EvaluationCallback.on_train_begin", fails)
    with pytest.raises(RuntimeError, match="no room for the encoder"): logged(pairs(SIZES), tmp_path, train=dict(val_fraction=0.), cache=dict(use_cache=False)).fit()


def test_the_summary_says_which_checkpoint_is_best_and_why():
    t = SimpleNamespace(state=RunState())
    assert logs.best_text(t) == "", "nothing was held out"
    t.state.evaluations = [dict(step=0, loss=[0.71, None, None]), dict(step=5, loss=[0.41] * 3)]
    t.state.best = 0.4123, "step_00000005"
    assert logs.best_text(t) == ("step_00000005: the lowest held-out loss, 0.412; "
                                 "before the first step 0.710")
    t.state.best = 0.71, ""
    assert logs.best_text(t).startswith("none: no evaluated step has a lower held-out loss than ")


def test_the_summary_comes_last_and_names_files_that_are_there(cached_run, monkeypatch):
    t = cached_run.trainer
    shown = cached_run.said[cached_run.said.index("took: "):].splitlines()
    assert [line.partition(": ")[0] for line in shown][:3] == ["took", "memory", "best"]
    assert shown[-1].startswith("next: ")
    summary = logs.RunSummary(t, 3, 12.)
    assert str(summary).startswith(f"took: 12 s for 3 steps, {t.global_step} in total\n")
    files = summary.data()["files"]
    assert {"LoRA", "images", "log"} <= set(files) and all(map(os.path.exists, files.values()))
    lora = files.get("best LoRA") or files["LoRA"]
    monkeypatch.setattr(logs, "kernel", lambda: None)
    assert f"\nnext: qie-nb predict --lora {lora} " in str(logs.RunSummary(t, 3, 12.))
    monkeypatch.setattr(t.state, "stop", "SIGTERM")
    assert "\nnext: fit() continues from here" in str(logs.RunSummary(t, 3, 12.))


def test_the_rate_of_a_run_leaves_out_its_evaluations(monkeypatch, capsys):
    clock = [1000.]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(Progress, "began", None)
    t = SimpleNamespace(state=RunState(max_steps=5), global_step=0, config=make_config())
    lines = logs.ProgressCallback()
    lines.on_train_begin(t)
    for step in range(1, 6):
        clock[0] += 2
        t.state.global_step = t.global_step = step
        if step == 3:
            clock[0] += 50
            t.state.eval_seconds += 50
        lines.on_step_end(t)
    t.state.stop = "done"
    lines.on_train_end(t)
    said = capsys.readouterr().out
    rate = "0.50 steps/s without evaluations"
    assert f"trained 5 steps in 1:00 min ({rate}), 5 in total: done" in said
    lines.on_train_begin(t)
    lines.on_train_end(t)
    assert "already at 5 of 5 steps; raise `train.max_train_steps`" in capsys.readouterr().out


def test_the_command_names_the_best_lora_if_it_is_not_the_last(tmp_path, monkeypatch):
    found = {"LoRA": tmp_path/"last", "best LoRA": tmp_path/"best"}
    monkeypatch.setattr(logs, "files_of", lambda t: found)
    monkeypatch.setattr(logs, "kernel", lambda: None)
    t = SimpleNamespace(state=RunState(stop="done"), device="cpu")
    assert f"--lora {tmp_path/'best'} " in str(logs.RunSummary(t, 3, 12.))


def test_tracker_gets_numbers_images_captions_and_options(cached_run):
    trainer, mine = cached_run.trainer, cached_run.tracker
    assert mine.given == ("mine", dict(mode="offline"))
    kinds = [s[0] for s in mine.seen]
    assert kinds[:2] == ["start", "config"] and kinds[-1] == "finish" and kinds.count("finish") == 1
    numbers = [s for s in mine.seen if s[0] == "log" and "loss" in s[1]]
    assert [s[2] for s in numbers] == list(range(1, trainer.global_step + 1)) and "gpu_memory/utilization" in numbers[0][1] and any("held_out_loss" in s[1] for s in numbers)
    tags = {t for s in mine.seen if s[0] == "images" for t in s[1]}
    assert {"training/training_images", "training/control_images", "individual/training_image_0"} <= tags and any(t.startswith("samples/") for t in tags)
    assert any(v == f"before, edit, after: {NASTY}" for s in mine.seen if s[0] == "log" for v in s[1].values())
    assert mine.seen[1][1]["train.num_epochs"] == 2 and all(isinstance(v, (str, int, float)) for v in mine.seen[1][1].values())


def test_failing_trackers_do_not_end_the_run(pairs, tmp_path, capsys):
    *broken, good = [Notes(fails=fails) for fails in (("start",), ("log",), ("images",), ("finish",), ("config", "log", "images", "finish"), ())]
    trainer = logged(pairs(((96, 64),) * 3), tmp_path, LogCallback([Tracker(n) for n in (*broken, good)]), train=dict(val_fraction=0., eval_interval=0, num_epochs=4),
                     data=dict(batch_size=1), logging=dict(report_to="none", log_images_every=1, log_every=5)).fit()
    assert trainer.state.stop == "done"
    assert capsys.readouterr().out.count("notes cannot be written (the tracker's server is away); the run continues, and its rows are in checkpoints/logs") == 5
    assert [s[2] for s in good.seen if s[0] == "log"] == [5, 10, 12] == list(rows_of(tmp_path).step), "log_every"
    assert good.seen[-1][0] == "finish"


# --- batch runs
@pytest.mark.parametrize("steps, seconds, least, most", [(32400, 1, 100, 200), (1080, 30, 100, 200), (9, 1, 2, 2)]) # twice nine hours
def test_number_of_log_lines(steps, seconds, least, most, monkeypatch):
    out, clock, when = io.StringIO(), [0], []
    monkeypatch.setattr(time, "time", lambda: 1e9 + clock[0])
    monkeypatch.setattr(Progress, "began", None)
    bar = Progress(steps, "train", every=10., stream=out)
    for clock[0] in range(seconds, steps * seconds + 1, seconds):
        before = out.tell()
        bar.update()
        if out.tell() > before: when.append(clock[0])
    bar.close()
    lines, gaps = out.getvalue().splitlines(), np.diff(when)
    assert least <= len(lines) <= most and when[0] == seconds and gaps[0] <= 10 + seconds, "the first soon, the next after ten seconds"
    assert gaps[:-1].min(initial=99) >= 10 - seconds and gaps.max() <= 300 + 2 * seconds, "never a line a step, never longer than five minutes without one"
    assert lines[-1].startswith(f"train {steps}/") and not set("\r\x1b") & set("".join(lines))


class Terminal(io.StringIO):
    def isatty(self): return True


def test_bar_on_a_terminal(monkeypatch):
    out = Terminal()
    outer = Progress(3, "train", stream=out)
    outer.update(note="loss 0.5")
    inner = Progress(2, "images", stream=out)
    inner.update(2)
    inner.close()
    outer.update(2)
    outer.close()
    assert "train:" in out.getvalue() and "\r" in out.getvalue() and Progress.bars == 0
    left = out.getvalue().rsplit("\r", 1)[-1]
    assert out.getvalue().count("\n") == 1 and "train: 100%" in left and "images" not in left and "\x1b[A" not in out.getvalue(), "one line, which the outer work keeps"
    assert left.rstrip().endswith("loss 0.5]"), "the note stays until there is another"


@pytest.mark.slow
def test_batch_run_prints_no_bar(pairs, tmp_path):
    config = settings(pairs(((96, 64),) * 4), tmp_path, train=dict(num_epochs=1))
    code = f"from qie_nb.trainer import QwenImageEditTrainer; t = QwenImageEditTrainer({config!r}); t.cache_embeddings(); t.fit()"
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_DISABLE_PROGRESS_BARS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not set("\r\x1b") & set(done.stdout) and done.stderr == ""
    assert re.search(r"^precompute 4/4, ", done.stdout, re.M) and re.search(r"^train \d+/\d+, .* left loss ", done.stdout, re.M)


def test_library_bars_are_off_in_batch_runs():
    import huggingface_hub.utils as hub, transformers.utils.logging as transformers_
    was = hub.are_progress_bars_disabled(), transformers_.is_progress_bar_enabled()
    assert quiet_bars(Terminal()) is False and (hub.are_progress_bars_disabled(), transformers_.is_progress_bar_enabled()) == was
    assert quiet_bars(io.StringIO()) and hub.are_progress_bars_disabled() and not transformers_.is_progress_bar_enabled()


def test_a_folder_that_is_gone_is_one_line_and_no_traceback(tmp_path, monkeypatch, capsys):
    printed = []
    monkeypatch.setattr("threading.excepthook", printed.append)
    callback = LogCallback("tensorboard")
    folder = tmp_path/"runs"
    sink = event_files.EventFiles()
    sink.open(SimpleNamespace(global_step=0, config=SimpleNamespace(logging=SimpleNamespace(log_dir=str(folder)))))
    shutil.rmtree(folder)
    callback.sinks, callback.failures, callback.printed = [sink], [0], set()
    for step in range(20):
        callback.send("scalars", {"loss": 0.5}, step)
        with contextlib.suppress(OSError): sink.writer.flush()
    callback.send("close")
    assert not printed, "the thread's traceback"
    assert capsys.readouterr().out.count("TensorBoard's event files cannot be written (") == 1
