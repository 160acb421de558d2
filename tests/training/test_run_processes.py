"""`fit` and `cache_embeddings` with processes that they start, on a CPU with gloo.

One run of two processes serves most tests; each kind of fault has one run, and a weekly one in every process."""
import contextlib, io, json, os, re, signal, subprocess, sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from safetensors.torch import load_file

from qie_nb.devices.processes import Processes, ProcessEnded
from qie_nb.lora.formats import lora_info
from qie_nb.devices import edit_model
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.checkpoint import complete_checkpoints
from qie_nb.training.run_processes import (
    Watched, job_config, processes_to_start, state_message, sum_reports)

from helpers import PATIENCE, OnStep, finish, on_call, settings, wait_for, write_pairs

SITE, ROOT = Path(__file__).parent/"started_processes", Path(__file__).parents[2]
LONG = dict(num_epochs=1000, max_train_steps=4000)


def data_set(folder):
    "9 pairs in two buckets."
    captions = [f"make it {'very ' * i}dark" for i in range(9)]
    return write_pairs(folder/"set", ((48, 32),) * 7 + ((32, 48),) * 2, caption=captions)


def run_settings(root, folder, out, cache, **train):
    "A run's configuration, with its output in `folder`."
    return settings(root, folder, model=dict(lora=dict(r=4, lora_alpha=8, lora_dropout=0.2)),
                    data=dict(batch_size=1), cache=dict(cache_dir=str(cache)),
                    # with Adam's usual eps of 1e-8 the rounding of a tiny gradient becomes a step
                    optimizer=dict(eps=1e-5),
                    train=dict(output_dir=str(folder/out), save_steps=2) | train)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    "A data set and its cache, so that `fit` starts no processes to fill it."
    folder = tmp_path_factory.mktemp("filled")
    root, cache = data_set(folder), folder/"cache"
    QwenImageEditTrainer(run_settings(root, folder, "unused", cache)).cache_embeddings()
    return root, cache


@pytest.fixture
def config(filled, tmp_path):
    "Makes configurations of runs on the same data and cache."
    def made(out, **train):
        return run_settings(filled[0], tmp_path, out, filled[1], **train)
    return made


def watch(folder, monkeypatch):
    "Started processes write down what they do; returns a function that reads it, by rank."
    folder.mkdir()
    monkeypatch.setenv("QIE_NB_WATCHED", str(folder))
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    def watched():
        files = sorted(folder.glob("*.jsonl"))
        return [list(map(json.loads, f.read_text().splitlines())) for f in files]
    return watched


@pytest.fixture
def watched(tmp_path, monkeypatch):
    "What each started process did, by rank."
    return watch(tmp_path/"watched", monkeypatch)


def started(): # by rank
    all_ = [p for p in psutil.Process().children(recursive=True) if "started_process" in " ".join(p.cmdline())]
    return {int(p.environ()["RANK"]): p for p in all_ if p.is_running() and p.status() != "zombie"}


def same_lora(a, b, limit=1e-6):
    a, b = (load_file(Path(f)/"pytorch_lora_weights.safetensors" if Path(f).is_dir() else f) for f in (a, b))
    assert a.keys() == b.keys() and max((a[k] - b[k]).abs().max().item() for k in a) < limit
    assert max(v.abs().max().item() for k, v in a.items() if "lora_B" in k) > 1e-3, "training must change the adapter"


@dataclass
class Compared:
    "The same data used by two started processes, and by one with twice the accumulation."
    folder: Path      # of the caches `cache_two`, `cache_one` and the outputs `two`, `one`
    one: object       # trainer as `fit` left it
    two: object
    reports: dict     # of `cache_embeddings`: two, one, again
    precomputed: list # what each started process did in `cache_embeddings`, by rank
    trained: list     # and in `fit`
    printed: dict     # by `cache_embeddings` and by `fit`
    loaded: list      # components that were loaded here to write `lora_two`


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    root, more = data_set(folder), dict(stratified_timesteps=True, ema_decay=0.9)
    both = run_settings(root, folder, "two", folder/"cache_two", num_processes=2, **more)
    alone = run_settings(root, folder, "one", folder/"cache_one", gradient_accumulation_steps=2, **more)
    reports, printed, loaded = {}, {}, []
    def printing(what, work):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            result = work()
        printed[what] = said.getvalue()
        return result
    with pytest.MonkeyPatch.context() as monkeypatch:
        watched = watch(folder/"precomputed", monkeypatch)
        reports["two"] = printing("precompute", QwenImageEditTrainer(both).cache_embeddings)
        precomputed = watched()
        reports["again"] = QwenImageEditTrainer(both).cache_embeddings()
        assert watched() == precomputed, "nothing is missing: no process is started"
        watched = watch(folder/"trained", monkeypatch)
        two = printing("fit", QwenImageEditTrainer(both).fit)
        trained = watched()
    with pytest.MonkeyPatch.context() as monkeypatch:
        def note(where, name, *_, **__): loaded.append(name)
        on_call(monkeypatch, edit_model, "load_component", note)
        two.save_lora(folder/"lora_two")
    reports["one"] = QwenImageEditTrainer(alone).cache_embeddings()
    one = QwenImageEditTrainer(alone).fit()
    one.save_lora(folder/"lora_one")
    return Compared(folder, one, two, reports, precomputed, trained, printed, loaded)


@pytest.mark.slow
def test_two_processes_train_what_one_trains_with_twice_the_accumulation(compared):
    "And a step sends the adapter's gradients once."
    one, two, folder = compared.one, compared.two, compared.folder
    same_lora(folder/"lora_two", folder/"lora_one")
    assert two.global_step == one.global_step == 10 and two.state.epoch == one.state.epoch == 2
    assert two.state.stop == one.state.stop == "done" and not two.state.running
    assert float(two.state.loss) == pytest.approx(float(one.state.loss), rel=1e-5)
    assert two.state.lr == one.state.lr
    size = sum(p.numel() for p in two.transformer.parameters() if p.requires_grad)
    assert [d["sent"] for d in compared.trained[0] if "sent" in d] == [4 * size], "bytes a step"


@pytest.mark.slow
def test_the_trainer_has_file_state_and_adapter_after_a_run_of_two_processes(compared):
    "The file is written without the base."
    one, two, folder = compared.one, compared.two, compared.folder
    assert "transformer" not in compared.loaded
    info = lora_info(folder/"lora_two")
    assert info == lora_info(folder/"lora_one") and info["weights"] == "ema"
    assert two.active_adapters() == {"default": 1.0}
    assert two.state.stop == "done" and two.state.metrics == one.state.metrics


@pytest.mark.slow
def test_two_processes_load_no_encoder_print_and_log_once(compared):
    assert len(compared.trained) == 2
    for rank in compared.trained:
        assert {d["loads"] for d in rank if "loads" in d} == {"scheduler", "transformer"}
    one, two = (sorted((compared.folder/name/"checkpoints"/"logs").glob("*.csv")) for name in ("one", "two"))
    assert len(two) == 1
    assert len(two[0].read_text().splitlines()) == len(one[0].read_text().splitlines())
    said = compared.printed["fit"]
    assert said.count("data set: 9 samples") == 1
    assert "training in 2 processes, 2 samples a step (`train.num_processes` 1: one process)" in said


@pytest.mark.slow
def test_precompute_by_two_processes_makes_the_bytes_of_one_and_each_entry_once(compared):
    def files(root):
        return {p.relative_to(root): p.read_bytes() for p in sorted(root.rglob("*.safetensors"))}
    found = files(compared.folder/"cache_two")
    assert found == files(compared.folder/"cache_one") and len(found) > 30
    def counts(report):
        return {name: value for name, value in vars(report).items() if name not in ("seconds", "elsewhere")}
    assert counts(compared.reports["two"]) == counts(compared.reports["one"]), "no entry is made twice"
    assert len(compared.precomputed) == 2
    for rank in compared.precomputed:
        assert "text_encoder" in {d.get("loads") for d in rank}
        assert all(d["alone"] for d in rank if "alone" in d), "one process loads at a time"
    assert "precomputing in 2 processes" in compared.printed["precompute"]
    assert compared.reports["again"].reused == 9


def stop_at_4(seen):
    "A callback that asks for the end of the run, and what it saw."
    def stop(t):
        seen.append(t.global_step)
        if t.global_step == 4: t.state.stop = "test"
    return OnStep(stop)


def check_stopped(t, seen, root):
    "The run ended for the callback's reason, soon, with a checkpoint."
    n = t.global_step
    assert t.state.stop == "test" and 4 <= n < 2000
    assert seen == list(range(1, n + 1)), "callbacks see every step"
    assert complete_checkpoints(root)[-1].name.endswith(f"{n:08}") or t.state.epoch_ended


KILLED = (r"process {} of 2 was killed by SIGKILL; the system does so when host memory runs out. "
          r"The checkpoints are intact; fit\(\) continues from step_")


def killer(rank, step):
    "A callback that kills a process at a step."
    def kill(t):
        if t.global_step == step: started()[rank].kill()
    return OnStep(kill)


@pytest.mark.slow
def test_a_run_that_is_stopped_and_loses_a_process_ends_like_an_uncut_one(config, tmp_path):
    "It is finished in one process."
    seen, long = [], config("cut", num_processes=2, num_epochs=400, max_train_steps=2000)
    two = QwenImageEditTrainer(long, [stop_at_4(seen)]).fit()
    check_stopped(two, seen, tmp_path/"cut"/"checkpoints")
    n = two.global_step
    two.callbacks = [killer(1, n + 3)]
    with pytest.raises(ProcessEnded, match=KILLED.format(2)): two.fit()
    assert not started() and not two.state.running
    there = two.checkpoints.find("latest").state["global_step"]
    assert there >= n + 2, "a checkpoint after every second step"
    end = there + 3
    alone = dict(gradient_accumulation_steps=2, max_train_steps=end, num_epochs=400)
    again = QwenImageEditTrainer(config("cut", resume_checkpoint="latest", **alone)).fit()
    uncut = QwenImageEditTrainer(config("uncut", **alone)).fit()
    assert again.global_step == end and again.state.stop == "done"
    same_lora(again.save_lora(tmp_path/"a"), uncut.save_lora(tmp_path/"b"), 1e-6 if end < 100 else 1e-4)


@pytest.mark.weekly
@pytest.mark.slow
def test_a_stopped_run_continues_in_two_processes_in_one_and_back(config, tmp_path):
    seen = []
    long = config("cut", num_processes=2, num_epochs=400, max_train_steps=2000)
    two = QwenImageEditTrainer(long, [stop_at_4(seen)]).fit()
    check_stopped(two, seen, tmp_path/"cut"/"checkpoints")
    n = two.global_step
    two.callbacks, two.config.train.max_train_steps = [], n + 4
    assert two.fit().global_step == n + 4 and two.state.stop == "done"
    end = n + 8
    QwenImageEditTrainer(config("cut", gradient_accumulation_steps=2, max_train_steps=end - 2, num_epochs=400, resume_checkpoint="latest")).fit()
    again = QwenImageEditTrainer(config("cut", num_processes=2, max_train_steps=end, num_epochs=400, resume_checkpoint="auto")).fit()
    uncut = QwenImageEditTrainer(config("uncut", gradient_accumulation_steps=2, max_train_steps=end, num_epochs=400)).fit()
    same_lora(again.save_lora(tmp_path/"a"), uncut.save_lora(tmp_path/"b"), 1e-6 if end < 100 else 1e-4)


@pytest.mark.weekly
@pytest.mark.slow
def test_interrupt(config, tmp_path, capsys):
    "The first one saves; the second one, while the first is not heard, ends all processes at once."
    def interrupt(t):
        if t.global_step == 3: os.kill(os.getpid(), signal.SIGINT)
    t = QwenImageEditTrainer(config("out", num_processes=2, **LONG), [OnStep(interrupt)]).fit()
    assert t.state.stop == "interrupted" and 3 <= t.global_step < 4000 and not started()
    assert "stopping after this step, with a checkpoint; interrupt again to stop without one" in capsys.readouterr().out
    assert t.checkpoints.find("latest").state["global_step"] == t.global_step
    def twice(t):
        if t.global_step != 3: return
        for p in started().values(): p.suspend() # a step that takes long
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    t = QwenImageEditTrainer(config("twice", num_processes=2, **LONG | dict(save_steps=2000)), [OnStep(twice)]).fit()
    assert t.state.stop == "interrupted" and not started() and not complete_checkpoints(tmp_path/"twice"/"checkpoints")


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_death_of_a_process_ends_the_run_and_fit_continues(config, rank):
    t = QwenImageEditTrainer(config("out", num_processes=2, **LONG), [killer(rank, 5)])
    with pytest.raises(ProcessEnded, match=KILLED.format(rank + 1)): t.fit()
    assert not started() and not t.state.running
    there = t.checkpoints.find("latest").state["global_step"]
    t.callbacks, t.config.train.max_train_steps = [], there + 2
    assert there >= 4 and t.fit().global_step == there + 2 and t.state.stop == "done"


@pytest.mark.slow
@pytest.mark.parametrize("rank, continues", [
    pytest.param(0, False, id="0"),
    pytest.param(0, True, id="0, then it continues", marks=pytest.mark.weekly),
    pytest.param(1, True, id="1, then it continues", marks=pytest.mark.weekly)])
def test_error_of_a_process_is_raised_here(config, watched, monkeypatch, rank, continues, capsys):
    monkeypatch.setenv("QIE_NB_FAULT", f"{rank} 4")
    t = QwenImageEditTrainer(config("out", num_processes=2))
    with pytest.raises(ProcessEnded, match=rf"process {rank + 1} of 2 stopped with ZeroDivisionError: a fault of the test. The checkpoints are intact; fit\(\) continues from step_00000002"): t.fit()
    assert not started() and "raise ZeroDivisionError" in capsys.readouterr().out
    monkeypatch.delenv("QIE_NB_FAULT")
    if continues: assert t.fit().global_step == 10


# a regular expression
BROKEN = "the training failed: .*NaN.* The last checkpoint is step_00000004"


@pytest.mark.slow
def test_an_adapter_with_nan_ends_the_run_of_two_processes_as_it_ends_one(
        config, watched, monkeypatch):
    """From the fifth step on the adapter has NaN; the checkpoint of step 4 is good.

    No LoRA is written, and `fit` raises here."""
    monkeypatch.setenv("QIE_NB_FAULT", "NaN 5")
    t = QwenImageEditTrainer(config("out", num_processes=2))
    with pytest.raises(ValueError, match="(?s)" + BROKEN):
        t.fit()
    assert not started()
    nothing_broken_was_saved(Path(t.config.train.output_dir))


def test_a_launched_process_starts_no_others(monkeypatch):
    "The plan says how many there are, and counts the memory of several."
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = QwenImageEditTrainer(dict(train=dict(num_processes=4)))
    assert processes_to_start(run) == 1 and run.plan.processes.value == 2
    assert any("processes 2" in line for line in run.plan.lines())


@pytest.mark.weekly
@pytest.mark.slow
def test_a_launched_run_whose_adapter_has_nan_ends_with_an_error(
        config, watched, monkeypatch, tmp_path):
    "Of `torchrun`, as `accelerate launch` starts it."
    monkeypatch.setenv("QIE_NB_FAULT", "NaN 5")
    (tmp_path/"run.yaml").write_text(json.dumps(config("out")))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    train = ["-m", "qie_nb.cli", "train", "--config", str(tmp_path/"run.yaml")]
    command = [sys.executable, *torchrun, *train]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode != 0
    assert re.search(BROKEN, done.stderr), done.stderr
    nothing_broken_was_saved(tmp_path/"out")


def nothing_broken_was_saved(out:Path):
    """All checkpoints are from before the fifth step, each with finite numbers.

    No LoRA of the end was written."""
    found = [c.name for c in complete_checkpoints(out/"checkpoints")]
    assert found == ["step_00000002", "step_00000004"]
    files = list(out.rglob("*.safetensors"))
    assert files and all(t.isfinite().all() for f in files for t in load_file(f).values())
    assert not (out/"lora").exists()


KERNEL = """
import json, sys
from qie_nb.trainer import QwenImageEditTrainer
QwenImageEditTrainer(json.loads(sys.argv[1])).fit()
"""


@pytest.mark.slow
def test_processes_save_and_end_if_their_notebook_is_killed(config, tmp_path):
    made = config("out", num_processes=2, **LONG | dict(save_steps=2))
    parent = subprocess.Popen([sys.executable, "-c", KERNEL, json.dumps(made)], cwd=ROOT, stdout=subprocess.DEVNULL)
    root = tmp_path/"out"/"checkpoints"
    wait_for(lambda: complete_checkpoints(root), "a checkpoint", process=parent)
    ranks = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=PATIENCE)
    assert len(gone) == 2 and not alive
    saved = json.loads((complete_checkpoints(root)[-1]/"state.json").read_text())
    assert 2 <= saved["global_step"] < 4000
    end = saved["global_step"] + 2
    alone = dict(num_processes=1, gradient_accumulation_steps=2)
    again = made["train"] | alone | dict(max_train_steps=end, resume_checkpoint="latest")
    assert QwenImageEditTrainer(made | dict(train=again)).fit().global_step == end


@pytest.mark.parametrize("codes, said", [
    ((-9, 1), "process 1 of 2 was killed by SIGKILL"),
    ((1, -9), "process 2 of 2 was killed by SIGKILL"),
    ((3, 0), "process 1 of 2 ended with 3: the last line")], ids=str)
def test_the_process_that_died_is_named_whichever_it_is(codes, said, monkeypatch):
    "The other process fails, too, because it waits for the one that died: its error is not the cause."
    group = Processes.__new__(Processes)
    group.all = [SimpleNamespace(returncode=code) for code in codes]
    group.killed = set()
    waiting = dict(kind="RuntimeError", text="connection closed by peer", ours=False, last="")
    group.errors = [(codes.index(1), waiting)] if 1 in codes else []
    monkeypatch.setattr(Processes, "log", lambda self, rank: "the last line")
    with pytest.raises(ProcessEnded, match=said):
        group.check()


def command_line(config, folder) -> subprocess.Popen:
    "`qie-nb train` of a configuration, started."
    file = folder/"run.yaml"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "qie_nb.cli", "train", "--config", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.weekly # with each change crash_trials.py sends these signals to the command of one process
@pytest.mark.slow
@pytest.mark.parametrize("stops, code", [("", 0), ("SIGINT", 130), ("SIGTERM", 143)])
def test_the_command_ends_with_the_code_of_how_the_run_ended(stops, code, config, tmp_path):
    "It trained and saved, and then ended with a traceback, because the processes that `fit` started have no accelerator here."
    much = LONG if stops else dict(max_train_steps=2)
    process = command_line(config("out", num_processes=2, **much), tmp_path)
    if stops:
        wait_for(lambda: complete_checkpoints(tmp_path/"out"/"checkpoints"), "the first checkpoint", process=process)
        process.send_signal(getattr(signal, stops))
    text = finish(process, code)
    assert "Traceback" not in text and (tmp_path/"out"/"lora"/"pytorch_lora_weights.safetensors").is_file(), text


@pytest.mark.weekly # with each change `fit` loses a process
@pytest.mark.slow
def test_the_command_ends_with_an_error_if_a_process_dies(config, tmp_path):
    process = command_line(config("out", num_processes=2, **LONG), tmp_path)
    wait_for(lambda: complete_checkpoints(tmp_path/"out"/"checkpoints"), "the first checkpoint", process=process)
    below = psutil.Process(process.pid).children(recursive=True)
    children = [p for p in below if "started_process" in " ".join(p.cmdline())]
    children[1].kill()
    text = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode not in (0, 130, 143), text
    assert "was killed by SIGKILL" in text and "fit() continues from" in text, text
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_a_quantization_that_was_set_on_the_trainer_is_handed_to_the_processes(config):
    t = QwenImageEditTrainer(config("out"))
    assert job_config(t)["model"]["quantize"] == t.quantize
    t.quantize = "qint8"
    assert job_config(t)["model"]["quantize"] == "qint8"


def test_a_started_process_starts_no_others(config):
    t = QwenImageEditTrainer(config("out", num_processes=2))
    assert job_config(t)["train"]["num_processes"] == 1


def test_a_stop_between_two_messages_is_passed_on(config):
    "A message that the processes sent before they heard of it must not take it back; it is sent once."
    t = QwenImageEditTrainer(config("out"))
    sent = []
    watched = Watched(t, SimpleNamespace(command=sent.append), None)
    before = dict(event="on_step_end", state=state_message(t))
    watched.take(before)
    watched.pass_on()
    assert not sent
    t.state.stop = "interrupted" # as a signal's handler does
    watched.take(before)
    watched.pass_on()
    watched.pass_on()
    assert t.state.stop == "interrupted" and sent == ["interrupted"]


def test_the_reports_of_processes_are_added_up():
    def report(encoded, seconds):
        return dict(samples=9, encoded=encoded, tensors=2 * encoded, bytes=10 * encoded, seconds=seconds,
                    skipped=[["0001", "cannot be read"]], bad=[])
    made = sum_reports([report(3, 1.), report(2, 4.)])
    assert (made.samples, made.encoded, made.reused) == (9, 5, 3)
    assert (made.tensors, made.bytes, made.seconds) == (10, 50, 4.)
    assert made.skipped == [("0001", "cannot be read")], "both have seen it"
