"Logging: content of event files, rows and trackers, the cost of images, and that no log changes or ends a run."
import contextlib, io, json, re, sys, time, weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from helpers import adapters_close, settings, write_pairs

import qie_nb.logging as logs
from qie_nb.data.dataset import loader
from qie_nb.training.callbacks import Callback
from qie_nb.widgets.tensorboard import read_run, run_folders
from qie_nb.logging import LogCallback, Tracker, image_grid
from qie_nb.core.progress import Progress, quiet_bars
from qie_nb.trainer import QwenImageEditTrainer

TAGS = {"loss", "lr", "grad_norm", "gpu_memory/utilization", "gpu_modules/transformer_MB_cpu", "gpu_modules/vae_MB_cpu", "gpu_modules/text_encoder_MB_cpu", "held_out_loss",
        "held_out_loss_low", "held_out_loss/0.0-0.2", "held_out_pairs"}
IMAGES = {"training/training_images", "training/control_images", "individual/training_image_0", "individual/training_image_1"}
NASTY = "<img src=x onerror=alert(1)> *make* $it$ [blue](http://x) `now`"
SIZES = ((96, 64), (64, 64), (64, 96)) * 2 # with an area of 96x64 each is its own bucket: nothing is resized


def logged(root, tmp_path, **sections):
    base = dict(data=dict(image_size=[96, 64]), logging=dict(report_to="tensorboard", log_images_every=2),
                train=dict(num_epochs=2, val_fraction=0.4, eval_interval=1, eval_num_inference_steps=2, eval_noise_samples=1))
    return settings(root, tmp_path, **{k: base.get(k, {}) | sections.get(k, {}) for k in base.keys() | sections.keys()})


class Each(Callback):
    "Calls a function of the trainer after each step, after the logs."
    def __init__(self, f): self.on_step_end = f


def notes():
    from accelerate.tracking import GeneralTracker
    class Notes(GeneralTracker):
        name, requires_logging_directory, main_process_only = "notes", False, True
        fails = ()
        def __init__(self, project="", **kw): super().__init__(); self.seen, self.project, self.options = [], project, kw
        tracker = property(lambda self: self)
        def start(self): self.say("start")
        def store_init_configuration(self, values): self.say("config", values)
        def log(self, values, step=None, **kw): self.say("log", values, step)
        def log_images(self, values, step=None, **kw): self.say("images", {k: [im.shape for im in v] for k, v in values.items()}, step)
        def finish(self): self.say("finish")
        def say(self, what, *a):
            if what in self.fails: raise ConnectionError("the tracker's server is away")
            self.seen.append((what, *a))
    return Notes


def Notes(*fails):
    made = notes()()
    made.fails = fails
    return made


@pytest.fixture(scope="module")
def cached_run(tmp_path_factory):
    import accelerate.tracking as tracking
    tmp, made = tmp_path_factory.mktemp("cached"), []
    class Named(notes()):
        def __init__(self, *a, **kw): super().__init__(*a, **kw); made.append(self)
    root = write_pairs(tmp/"set", SIZES, controls=2, caption=NASTY)
    trainer = QwenImageEditTrainer(logged(root, tmp, logging=dict(report_to=["tensorboard", "wandb"], project="mine", tracker_options=dict(wandb=dict(mode="offline")))))
    trainer.cache_embeddings()
    with pytest.MonkeyPatch.context() as m, contextlib.redirect_stdout(io.StringIO()) as said:
        m.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Named)
        m.setattr(tracking, "get_available_trackers", lambda: [tracking.LoggerType.WANDB])
        trainer.fit()
    return SimpleNamespace(tmp=tmp, root=root, trainer=trainer, said=said.getvalue(), run=read_run(tmp/"runs"), tracker=made[0])


def test_all_tags_with_cached_latents(cached_run):
    r, t = cached_run.run, cached_run.trainer
    assert t.qwen_vl is None and t.vae is None
    assert TAGS <= set(r.scalars) and IMAGES - {"individual/training_image_1"} <= set(r.images)
    assert [s for s, _ in r.scalars["loss"]] == list(range(1, t.global_step + 1)) == [s for s, _ in r.scalars["gpu_memory/utilization"]]
    assert 0 < r.scalars["gpu_memory/utilization"][-1][1] < 1
    size = sum(p.numel() * p.element_size() for p in (*t.transformer.parameters(), *t.transformer.buffers())) / 1e6
    assert r.scalars["gpu_modules/transformer_MB_cpu"][-1][1] == pytest.approx(size) and r.scalars["gpu_modules/vae_MB_cpu"][-1][1] == 0


def test_logged_images_are_those_on_disk(cached_run):
    r, root = cached_run.run, cached_run.root
    read = lambda folder: [np.asarray(Image.open(p)) for p in sorted((root/folder).glob("*.png"))]
    targets, first, second = read("training_images"), read("control_images"), read("control_images_2")
    same = lambda a, b: a.shape == b.shape and (a == b).all()
    for step, grid in r.images["training/training_images"]:
        held = [im for i in (0, 1) for s, im in r.images.get(f"individual/training_image_{i}", ()) if s == step]
        which = [next(k for k, t in enumerate(targets) if same(t, im)) for im in held]
        assert same(grid, image_grid([targets[k] for k in which]))
        controls = next(im for s, im in r.images["training/control_images"] if s == step)
        assert same(controls, image_grid([c[k] for k in which for c in (first, second)], 2)), "a row a sample, its controls side by side"


def test_exif_rotated_images_are_logged_upright(pairs):
    root, exif, wide = pairs(((96, 64),)), Image.Exif(), np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8)
    exif[274] = 6 # shown turned clockwise
    Image.fromarray(np.rot90(wide)).save(root/"training_images"/"0000.png", exif=exif)
    got = logs.images_of(next(iter(loader(str(root), image_size=[96, 64]))), 1)
    assert (got["training_images"][0] == wide).all()


def test_samples_and_their_captions(cached_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html
    r = cached_run.run
    tags = [t for t in r.images if t.startswith("samples/")]
    assert len(tags) == len(cached_run.trainer.held_out) and all(len(r.images[t]) == 2 for t in tags)
    assert all(r.texts[t][-1][1] == f"control, edit, target: {NASTY}" and len(r.texts[t]) == 1 for t in tags)
    edit = np.asarray(Image.open(sorted((cached_run.tmp/"checkpoints"/"inference").glob("epoch_0002/00_*.jpg"))[0]))
    h, w = edit.shape[:2]
    row = r.images[tags[0]][-1][1]
    assert (row[:h, row.shape[1] // 3:][:, :w] == edit).all(), "the edit as evaluation left it"
    acc = EventAccumulator(str(cached_run.tmp/"runs"), size_guidance=dict(tensors=0)).Reload()
    page = markdown_to_safe_html(acc.Tensors(f"{tags[0]}/text_summary")[0].tensor_proto.string_val[0])
    assert not re.search("<(img|em|a |code)", page) and "onerror" in page, "TensorBoard shows it as text"


def test_source_of_images_is_printed_once(cached_run, pairs, tmp_path, capsys):
    assert cached_run.said.count("[IMAGE_LOG] latents are cached; images are loaded from their files when due") == 1 and cached_run.said.count("[IMAGE_LOG]") == 1
    QwenImageEditTrainer(logged(pairs(SIZES, controls=2), tmp_path, cache=dict(use_cache=False), train=dict(eval_interval=0))).fit()
    said = capsys.readouterr().out
    assert said.count("[IMAGE_LOG] images come from the batch") == 1 and said.count("[IMAGE_LOG]") == 1
    plain, training = read_run(tmp_path/"runs"), lambda run: {t for t in run.images if not t.startswith("samples/")}
    assert training(plain) == training(cached_run.run)
    for tag in IMAGES & set(plain.images): # the same images, whichever way they came
        assert all(s == u and (a == b).all() for (s, a), (u, b) in zip(plain.images[tag], cached_run.run.images[tag], strict=True))


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_image_steps_open_few_files_and_release_memory(count, pairs, tmp_path, monkeypatch):
    import qie_nb.data.batches as batches
    root, opened, held, alive, at_once = pairs(((96, 64),) * 4, controls=2), [], [], [], []
    real_open = Path.open
    trainer = QwenImageEditTrainer(logged(root, tmp_path, train=dict(val_fraction=0., num_epochs=3), data=dict(batch_size=2), logging=dict(log_images_every=3, log_images_count=count)))
    trainer.cache_embeddings()

    def after(t):
        alive.append([w() is not None for w in held])
        at_once.append(len(held))
        held.clear()
        opened.append(f"step {t.global_step} over")

    def noted(real):
        def make(*a, **kw):
            held.append(weakref.ref(out := real(*a, **kw)))
            return out
        return make
    trainer.callbacks.append(Each(after))
    monkeypatch.setattr(Path, "open", lambda self, *a, **kw: (opened.append(self) if self.suffix == ".png" else None, real_open(self, *a, **kw))[1])
    monkeypatch.setattr(batches, "np", SimpleNamespace(asarray=noted(np.asarray), ndarray=np.ndarray))
    monkeypatch.setattr(logs, "image_grid", noted(logs.image_grid))
    class Begins(Callback):
        def on_train_begin(self, t): opened.clear() # the data set has been looked at
    trainer.callbacks.append(Begins())
    trainer.fit()
    counts = [step.count(".png") for step in " ".join(str(o) for o in opened).split("over")[:-1]]
    due = [n in (1, 3, 6) for n in range(1, 7)]
    assert counts == [count * 3 * d for d in due], "a target and two controls of each sample, at the steps that are due"
    assert at_once == [(count * 3 + 2) * d for d in due], "images of at most log_images_count samples, and two grids"
    assert not any(map(any, alive)), "nothing of them is left after the step"


@pytest.mark.slow
def test_logging_does_not_change_the_adapter(pairs, tmp_path):
    root = pairs(SIZES)
    loud = logged(root, tmp_path/"a", logging=dict(log_images_every=1, log_images_count=8))
    mute = logged(root, tmp_path/"b", logging=dict(report_to="none", log_images=False, log_every=3))
    a = QwenImageEditTrainer(loud, callbacks=[LogCallback([Tracker(Notes())])]).fit()
    b = QwenImageEditTrainer(mute).fit()
    adapters_close(a, b)
    assert (tmp_path/"a"/"runs").is_dir() and not (tmp_path/"b"/"runs").exists()


def test_moved_component_counts_0_on_the_old_device(monkeypatch):
    from qie_nb.training.callbacks import RunState
    seen, places = [], iter([{"vae_MB_cuda0": 250.}, {"vae_MB_cuda0": 250.}, {"vae_MB_cpu": 250.}])
    monkeypatch.setattr(logs, "module_gauges", lambda t: next(places))
    made = LogCallback([SimpleNamespace(name="x", scalars=lambda values, step: seen.append({k: v for k, v in values.items() if "modules" in k}))])
    made.modules = {}
    for n in (1, 2, 3): made.row(SimpleNamespace(device="cpu", state=RunState(global_step=n, loss=1., grad_norm=1.)))
    assert seen == [{"gpu_modules/vae_MB_cuda0": 250.}, {}, {"gpu_modules/vae_MB_cuda0": 0., "gpu_modules/vae_MB_cpu": 250.}]


# --- unreadable images
def test_missing_images_do_not_end_the_run(pairs, tmp_path, capsys):
    root = pairs(((96, 64),) * 6)
    trainer = QwenImageEditTrainer(logged(root, tmp_path, train=dict(val_fraction=0., num_epochs=4), logging=dict(log_images_every=1)))
    trainer.cache_embeddings()
    class Gone(Callback):
        def on_train_begin(self, t):
            for p in (root/"control_images").glob("*.png"): p.unlink()
    trainer.callbacks.append(Gone())
    trainer.fit()
    said = capsys.readouterr().out
    assert trainer.state.stop == "done" and trainer.global_step == 12
    assert said.count("image left out") == 3 and "cannot be read (it does not exist); replace it or remove the pair" in said
    assert said.count("more images cannot be read; they are left out without a message") == 1
    assert said.count("latents are cached; images are loaded from their files when due") == 1
    run = read_run(tmp_path/"runs")
    assert not run.images and len(run.scalars["loss"]) == 12


@pytest.mark.parametrize("batch, words", [
    (dict(pixel_latent=1), "this loader's batches cannot fetch images; use qie_nb.data.loader to see them"),
    (object(), "cannot fetch images; use qie_nb.data.loader"),
    (dict(image=[np.zeros((4, 4, 3))], control=[[]]), "this loader's images must be uint8 [H, W, 3]; convert them, or use qie_nb.data.loader"),
    (dict(image=[np.zeros((4, 4, 3), "uint8")]), "cannot fetch images (KeyError: 'control'); use qie_nb.data.loader")])
def test_foreign_batches(batch, words, capsys):
    made = LogCallback([])
    t = SimpleNamespace(batch=batch, global_step=1, config=SimpleNamespace(logging=SimpleNamespace(log_images_count=2)))
    for _ in range(3): made.images(t)
    assert capsys.readouterr().out.count(words) == 1


# --- failing logs
def test_full_disk_does_not_end_the_run(pairs, tmp_path, monkeypatch, capsys):
    "Event files are given up, rows wait; a row that was written in part is removed."
    from tensorboard.summary.writer import record_writer
    real, written, rows = record_writer.RecordWriter.write, [], []
    def full(self, data):
        written.append(data)
        if len(written) > 8: raise OSError(28, "No space left on device")
        real(self, data)
    class Short:
        def __init__(self, f): self.f = f
        def __enter__(self): return self
        def __exit__(self, *a): self.f.close()
        def write(self, data): return self.f.write(data[:2])
        def __getattr__(self, name): return getattr(self.f, name)
    def opened(self, mode="r", *a, real=Path.open, **kw):
        rows.append(self) if mode == "ab" else None
        return Short(real(self, mode, *a, **kw)) if mode == "ab" and 3 < len(rows) < 7 else real(self, mode, *a, **kw)
    monkeypatch.setattr(record_writer.RecordWriter, "write", full)
    monkeypatch.setattr("threading.excepthook", lambda a: None)
    monkeypatch.setattr(Path, "open", opened)
    trainer = QwenImageEditTrainer(logged(pairs(SIZES), tmp_path, train=dict(val_fraction=0., num_epochs=3), logging=dict(log_images_every=1))).fit()
    said = capsys.readouterr().out
    assert trainer.state.stop == "done" and said.count("TensorBoard's event files cannot be written (") == 1 and "No space left on device" in said
    assert said.count("cannot be written (no space left for a whole row); the run continues") == 1 and len(rows) > 7
    path = next((tmp_path/"checkpoints"/"logs").glob("*.csv"))
    assert list(pd.read_csv(path).step) == list(pd.read_json(path.with_suffix(".jsonl"), lines=True).step) == list(range(1, trainer.global_step + 1))


# --- rows
def test_rows_are_complete_and_equal_in_both_files(pairs, tmp_path):
    seen = []
    def look(t):
        path = next((tmp_path/"checkpoints"/"logs").glob("*.csv"))
        table = pd.read_csv(path)
        lines = pd.DataFrame([json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is no JSON")) for line in path.with_suffix(".jsonl").read_text().splitlines()])
        assert list(table.columns) == list(lines.columns) and path.read_text().endswith("\n")
        assert table.isna().equals(lines.isna()) and (table.fillna(0).to_numpy(float) == lines.fillna(0).to_numpy(float)).all()
        assert list(pd.read_json(path.with_suffix(".jsonl"), lines=True).step) == list(table.step) and list(table.step)[-1] == t.global_step
        seen.append(len(table))
    class Bad(QwenImageEditTrainer):
        def _compute_loss(self, batch, seeds): return super()._compute_loss(batch, seeds) * (float("nan") if self.global_step == 1 else 1)
    Bad(logged(pairs(SIZES), tmp_path, train=dict(eval_interval=2, val_fraction=0.2, eval_images=0), logging=dict(report_to="none")), callbacks=[Each(look)]).fit()
    assert seen == list(range(1, len(seen) + 1)) and len(seen) > 3
    rows = [json.loads(line) for line in next((tmp_path/"checkpoints"/"logs").glob("*.jsonl")).read_text().splitlines()]
    assert rows[1]["loss"] is None and rows[0]["loss"] > 0 and rows[1]["skipped"] in (0, 1) and rows[-1]["held_out_loss"] > 0


def test_logs_of_resumed_and_new_runs(pairs, tmp_path, monkeypatch):
    waited, real = [], logs.next_second
    monkeypatch.setattr(logs, "next_second", lambda d: (waited.append(Path(d)), real(d)))
    root = pairs(((96, 64),) * 6)
    config = logged(root, tmp_path, train=dict(save_steps=2, num_epochs=3, eval_interval=0, val_fraction=0.), logging=dict(log_images_every=1))
    straight = QwenImageEditTrainer(config | dict(train=config["train"] | dict(output_dir=str(tmp_path/"b")), logging=config["logging"] | dict(log_dir=str(tmp_path/"b_runs")))).fit()
    class Dies(Callback):
        def on_step_end(self, t):
            if t.global_step == 5: raise RuntimeError("the power fails")
    with pytest.raises(RuntimeError): QwenImageEditTrainer(config, callbacks=[Dies()]).fit()
    before = str(tmp_path/"checkpoints"/"step_00000004") # step 5 has been logged and is done again
    resumed = QwenImageEditTrainer(config | dict(train=config["train"] | dict(resume_checkpoint=before))).fit()
    assert resumed.global_step == straight.global_step == 9 and waited == [tmp_path/"runs"]
    a, b = read_run(tmp_path/"runs"), read_run(tmp_path/"b_runs")
    assert a.scalars["loss"] == b.scalars["loss"] and [s for s, _ in a.scalars["loss"]] == list(range(1, 10))
    assert [s for s, _ in a.images["training/training_images"]] == list(range(1, 10)) and len(list((tmp_path/"runs").glob("events*"))) == 2
    for kind, read in (("csv", pd.read_csv), ("jsonl", lambda p: pd.read_json(p, lines=True))):
        x, y = (read(next((d/"checkpoints"/"logs").glob(f"*.{kind}"))).drop(columns="time") for d in (tmp_path, tmp_path/"b"))
        assert x.equals(y) and list(x.step) == list(range(1, 10))
    assert len(list((tmp_path/"checkpoints"/"logs").iterdir())) == 2
    QwenImageEditTrainer(config | dict(train=config["train"] | dict(output_dir=str(tmp_path/"c"), max_train_steps=2))).fit()
    assert len(run_folders(tmp_path/"runs")) == 2 and [s for s, _ in read_run(tmp_path/"runs").scalars["loss"]] == [1, 2]
    earlier = next((tmp_path/"runs").glob("earlier_*"))
    assert read_run(earlier).scalars == a.scalars, "the earlier run keeps its own curve"


def test_event_files_of_one_second_keep_their_order(tmp_path, monkeypatch):
    "Within one second the names differ in a counter, and 10 sorts before 9."
    now, slept = time.time(), []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "time", lambda: now + sum(slept))
    (tmp_path/f"events.out.tfevents.{int(now):010}.host.1.9").touch()
    logs.next_second(tmp_path)
    assert len(slept) == 1 and int(now + slept[0]) == int(now) + 1
    logs.next_second(tmp_path)
    assert len(slept) == 1


@pytest.mark.slow
def test_error_before_the_logs_begin_is_raised(pairs, tmp_path, monkeypatch):
    import qie_nb.evaluation.evaluate as evaluate
    def fails(self, t): raise RuntimeError("no room for the encoder")
    monkeypatch.setattr(evaluate.EvaluationCallback, "on_train_begin", fails)
    with pytest.raises(RuntimeError, match="no room for the encoder"): QwenImageEditTrainer(logged(pairs(SIZES), tmp_path, train=dict(val_fraction=0.), cache=dict(use_cache=False))).fit()


def test_tracker_gets_numbers_images_captions_and_options(cached_run):
    trainer, mine = cached_run.trainer, cached_run.tracker
    assert mine.project == "mine" and mine.options == dict(mode="offline")
    kinds = [s[0] for s in mine.seen]
    assert kinds[:2] == ["start", "config"] and kinds[-1] == "finish" and kinds.count("finish") == 1
    numbers = [s for s in mine.seen if s[0] == "log" and "loss" in s[1]]
    assert [s[2] for s in numbers] == list(range(1, trainer.global_step + 1)) and "gpu_memory/utilization" in numbers[0][1] and any("held_out_loss" in s[1] for s in numbers)
    tags = {t for s in mine.seen if s[0] == "images" for t in s[1]}
    assert {"training/training_images", "training/control_images", "individual/training_image_0"} <= tags and any(t.startswith("samples/") for t in tags)
    assert any(v == f"control, edit, target: {NASTY}" for s in mine.seen if s[0] == "log" for v in s[1].values())
    assert mine.seen[1][1]["train.num_epochs"] == 2 and all(isinstance(v, (str, int, float)) for v in mine.seen[1][1].values())


def test_failing_trackers_do_not_end_the_run(pairs, tmp_path, capsys):
    broken, good = [Notes(*fails) for fails in (("start",), ("log",), ("images",), ("finish",), ("config", "log", "images", "finish"))], Notes()
    config = logged(pairs(((96, 64),) * 3), tmp_path, train=dict(val_fraction=0., eval_interval=0, num_epochs=4), data=dict(batch_size=1), logging=dict(report_to="none", log_images_every=1, log_every=5))
    trainer = QwenImageEditTrainer(config, callbacks=[LogCallback([Tracker(n) for n in (*broken, good)])]).fit()
    assert trainer.state.stop == "done"
    assert capsys.readouterr().out.count("notes cannot be written (the tracker's server is away); the run continues, and its rows are in checkpoints/logs") == 5
    assert [s[2] for s in good.seen if s[0] == "log"] == [5, 10, 12] == list(pd.read_csv(next((tmp_path/"checkpoints"/"logs").glob("*.csv"))).step), "log_every"
    assert good.seen[-1][0] == "finish"


@pytest.mark.parametrize("changed, words", [
    (dict(log_dir="{tmp}/file/runs"), r"`logging.log_dir` .*file/runs.* cannot be written \(.*file is a file\); give another folder, or set `logging.report_to` none"),
    (dict(report_to="tensorbored"), r"`logging.report_to` 'tensorbored' is not supported; use tensorboard or none, or one of accelerate's trackers: aim, "),
    (dict(report_to=["tensorboard", "clearml"]), r"`logging.report_to` clearml needs a package that is not installed; pip install clearml, or use tensorboard or none")])
def test_impossible_logs_are_refused_before_loading(changed, words, pairs, tmp_path, built):
    (tmp_path/"file").write_text("x")
    if "log_dir" in changed: changed = dict(log_dir=changed["log_dir"].format(tmp=tmp_path))
    with pytest.raises(ValueError, match=words): QwenImageEditTrainer(logged(pairs(), tmp_path, logging=changed)).fit()
    assert not built


# --- batch runs
def lines_of(monkeypatch, hours, seconds):
    out, clock = io.StringIO(), [1e9]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(Progress, "began", None)
    n = int(hours * 3600 / seconds)
    bar, when = Progress(n, "train", every=10., stream=out), []
    for _ in range(n):
        clock[0] += seconds
        before = out.tell()
        bar.update()
        if out.tell() > before: when.append(clock[0] - 1e9)
    bar.close()
    return out.getvalue().splitlines(), when


@pytest.mark.parametrize("seconds", [1, 30])
def test_number_of_log_lines(seconds, monkeypatch):
    lines, when = lines_of(monkeypatch, 9, seconds)
    assert 100 < len(lines) <= 200 and when[0] <= max(1, seconds) + 0.1 and when[1] - when[0] <= 10 + seconds, "the first soon, the next after ten seconds"
    if seconds == 1: assert len(lines_of(monkeypatch, 9 / 3600, 1)[0]) == 2
    gaps = np.diff(when)
    assert gaps[:-1].min() >= 10 - seconds and gaps.max() <= 300 + 2 * seconds, "never a line a step, never longer than five minutes without one"
    assert lines[-1].startswith(f"train {len(range(int(9 * 3600 / seconds)))}/") and not set("\r\x1b") & set("".join(lines))


def test_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self): return True
    out = Terminal()
    outer = Progress(3, "train", stream=out)
    outer.update(note="loss 0.5")
    inner = Progress(2, "pictures", stream=out)
    inner.update(2)
    inner.close()
    outer.update(2)
    outer.close()
    assert "train:" in out.getvalue() and "\r" in out.getvalue() and Progress.bars == 0
    left = out.getvalue().rsplit("\r", 1)[-1]
    assert out.getvalue().count("\n") == 1 and "train: 100%" in left and "pictures" not in left and "\x1b[A" not in out.getvalue(), "one line, which the outer work keeps"


@pytest.mark.slow
def test_batch_run_prints_no_bar(pairs, tmp_path):
    import os, subprocess
    config = logged(pairs(((96, 64),) * 4), tmp_path, train=dict(num_epochs=1, val_fraction=0.), cache=dict(use_cache=True))
    (tmp_path/"run.json").write_text(json.dumps(config))
    code = "import json, sys; from qie_nb.trainer import QwenImageEditTrainer as T; t = T(json.load(open(sys.argv[1]))); t.cache_embeddings(); t.fit()"
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_DISABLE_PROGRESS_BARS"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path/"run.json")], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not set("\r\x1b") & set(done.stdout + done.stderr) and "it/s" not in done.stderr
    assert re.search(r"^precompute 4/4, ", done.stderr, re.M) and re.search(r"^train \d+/\d+, .* left loss ", done.stderr, re.M)


def test_library_bars_are_off_in_batch_runs():
    import huggingface_hub.utils as hub, transformers.utils.logging as transformers_
    class Terminal(io.StringIO):
        def isatty(self): return True
    was = hub.are_progress_bars_disabled(), transformers_.is_progress_bar_enabled()
    assert quiet_bars(Terminal()) is False and (hub.are_progress_bars_disabled(), transformers_.is_progress_bar_enabled()) == was
    assert quiet_bars(io.StringIO()) and hub.are_progress_bars_disabled() and not transformers_.is_progress_bar_enabled()
