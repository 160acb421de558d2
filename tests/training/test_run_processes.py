"""`fit` and `cache_embeddings` with processes that they start, on a CPU with gloo."""
import json, os, signal, subprocess, sys, time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from qie_nb.config import make_config
from qie_nb.devices.processes import ProcessEnded
from qie_nb.lora.formats import lora_info
from qie_nb.models.components import Components
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.checkpoint import complete_checkpoints
from qie_nb.training.run_processes import check_processes

from helpers import OnStep, settings

SITE, ROOT = Path(__file__).parent/"started_processes", Path(__file__).parents[2]
LONG = dict(num_epochs=1000, max_train_steps=4000)


@pytest.fixture
def config(pairs, tmp_path):
    "Of 9 pairs in two buckets; each run has its own cache. eps: with the usual 1e-8 Adam turns the rounding of a tiny gradient into a step."
    root = pairs(((48, 32),) * 7 + ((32, 48),) * 2, caption=[f"make it {'very ' * i}dark" for i in range(9)])
    def made(out, **train):
        cache = dict(cache_dir=str(tmp_path/f"cache_{out}"))
        return settings(root, tmp_path, model=dict(lora=dict(r=4, lora_alpha=8, lora_dropout=0.2)), data=dict(batch_size=1), optimizer=dict(eps=1e-5), cache=cache,
                        train=dict(output_dir=str(tmp_path/out), save_steps=2) | train)
    return made


@pytest.fixture
def watched(tmp_path, monkeypatch):
    "What each started process did, by rank."
    (tmp_path/"watched").mkdir()
    monkeypatch.setenv("QIE_NB_WATCHED", str(tmp_path/"watched"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return lambda: [list(map(json.loads, f.read_text().splitlines())) for f in sorted((tmp_path/"watched").glob("*.jsonl"))]


def started(): # by rank
    all_ = [p for p in psutil.Process().children(recursive=True) if "started_process" in " ".join(p.cmdline())]
    return {int(p.environ()["RANK"]): p for p in all_ if p.is_running() and p.status() != "zombie"}


def same_lora(a, b, limit=1e-6):
    a, b = (load_file(Path(f)/"pytorch_lora_weights.safetensors" if Path(f).is_dir() else f) for f in (a, b))
    assert a.keys() == b.keys() and max((a[k] - b[k]).abs().max().item() for k in a) < limit
    assert max(v.abs().max().item() for k, v in a.items() if "lora_B" in k) > 1e-3, "training must change the adapter"


@pytest.mark.slow
def test_two_processes_train_what_one_trains_with_twice_the_accumulation(config, tmp_path, watched, built, capsys):
    "And the trainer has state, file and adapter afterwards; no process loads an encoder; a step sends the adapter's gradients once."
    more = dict(stratified_timesteps=True, ema_decay=0.9)
    QwenImageEditTrainer(config("two")).cache_embeddings()
    capsys.readouterr()
    two = QwenImageEditTrainer(config("two", num_processes=2, **more)).fit()
    did, made = watched(), dict(built)
    file = two.save_lora(tmp_path/"lora_two")
    assert built["QwenImageTransformer2DModel"] == made.get("QwenImageTransformer2DModel", 0), "the file is written without the base"
    one = QwenImageEditTrainer(config("one", gradient_accumulation_steps=2, **more)).fit()
    same_lora(file, one.save_lora(tmp_path/"lora_one"))
    assert lora_info(file) == lora_info(tmp_path/"lora_one") and lora_info(file)["weights"] == "ema"
    assert (two.global_step, two.state.epoch, two.state.stop) == (one.global_step, one.state.epoch, "done") == (10, 2, "done")
    assert float(two.state.loss) == pytest.approx(float(one.state.loss), rel=1e-5) and two.state.lr == one.state.lr and not two.state.running
    assert len(did) == 2 and all({d["loads"] for d in rank if "loads" in d} == {"scheduler", "transformer"} for rank in did)
    rows = [len(sorted((tmp_path/d/"checkpoints"/"logs").glob("*.csv"))[0].read_text().splitlines()) for d in ("one", "two")]
    assert rows[0] == rows[1] and len(list((tmp_path/"two"/"checkpoints"/"logs").glob("*.csv"))) == 1
    said = capsys.readouterr().out
    assert said.count("data set: 9 samples") == 2 and "training in 2 processes, 2 samples a step (`train.num_processes` 1: one process)" in said
    size = sum(p.numel() for p in two.transformer.parameters() if p.requires_grad)
    assert [d["sent"] for d in did[0] if "sent" in d] == [4 * size], "bytes a step"
    assert two.active_adapters() == {"default": 1.0} and two.state.stop == "done" and two.state.metrics == one.state.metrics


@pytest.mark.slow
def test_a_stopped_run_continues_in_two_processes_in_one_and_back(config, tmp_path, watched):
    seen = []
    def stop(t):
        seen.append(t.global_step)
        if t.global_step == 4: t.state.stop = "test"
    two = QwenImageEditTrainer(config("cut", num_processes=2, num_epochs=400, max_train_steps=2000), [OnStep(stop)]).fit()
    n = two.global_step
    assert two.state.stop == "test" and 4 <= n < 2000 and seen == list(range(1, n + 1)), "callbacks see every step"
    assert complete_checkpoints(tmp_path/"cut"/"checkpoints")[-1].name.endswith(f"{n:08}") or two.state.epoch_ended
    two.callbacks, two.config.train.max_train_steps = [], n + 4
    assert two.fit().global_step == n + 4 and two.state.stop == "done"
    end = n + 8
    QwenImageEditTrainer(config("cut", gradient_accumulation_steps=2, max_train_steps=end - 2, num_epochs=400, resume_checkpoint="latest")).fit()
    again = QwenImageEditTrainer(config("cut", num_processes=2, max_train_steps=end, num_epochs=400, resume_checkpoint="auto")).fit()
    uncut = QwenImageEditTrainer(config("uncut", gradient_accumulation_steps=2, max_train_steps=end, num_epochs=400)).fit()
    same_lora(again.save_lora(tmp_path/"a"), uncut.save_lora(tmp_path/"b"), 1e-6 if end < 100 else 1e-4)


@pytest.mark.slow
def test_interrupt(config, tmp_path, capsys):
    "The first one saves; the second one, while the first is not heard, ends all processes at once."
    def interrupt(t): t.global_step == 3 and os.kill(os.getpid(), signal.SIGINT)
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


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_death_of_a_process_ends_the_run_and_fit_continues(config, tmp_path, rank):
    def kill(t): t.global_step == 5 and started()[rank].kill()
    t = QwenImageEditTrainer(config("out", num_processes=2, **LONG), [OnStep(kill)])
    with pytest.raises(ProcessEnded, match=rf"process {rank + 1} of 2 was killed by SIGKILL; the system does so when host memory runs out. The checkpoints are intact; fit\(\) continues from step_"): t.fit()
    assert not started() and not t.state.running
    there = t.checkpoints.find("latest").state["global_step"]
    t.callbacks, t.config.train.max_train_steps = [], there + 2
    assert there >= 4 and t.fit().global_step == there + 2 and t.state.stop == "done"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_error_of_a_process_is_raised_here(config, watched, monkeypatch, rank, capsys):
    monkeypatch.setenv("QIE_NB_FAULT", f"{rank} 4")
    t = QwenImageEditTrainer(config("out", num_processes=2))
    with pytest.raises(ProcessEnded, match=rf"process {rank + 1} of 2 stopped with ZeroDivisionError: a fault of the test. The checkpoints are intact; fit\(\) continues from step_00000002"): t.fit()
    assert not started() and "raise ZeroDivisionError" in capsys.readouterr().out
    monkeypatch.delenv("QIE_NB_FAULT")
    assert t.fit().global_step == 10


KERNEL = """
import json, sys
from qie_nb.trainer import QwenImageEditTrainer
QwenImageEditTrainer(json.loads(sys.argv[1])).fit()
"""


@pytest.mark.slow
def test_processes_save_and_end_if_their_notebook_is_killed(config, tmp_path):
    made = config("out", num_processes=2, **LONG | dict(save_steps=2))
    parent = subprocess.Popen([sys.executable, "-c", KERNEL, json.dumps(made)], cwd=ROOT, stdout=subprocess.DEVNULL)
    root, until = tmp_path/"out"/"checkpoints", time.time() + 120
    while not complete_checkpoints(root) and time.time() < until: time.sleep(0.05)
    ranks = psutil.Process(parent.pid).children(recursive=True)
    parent.kill(), parent.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert len(gone) == 2 and not alive
    saved = json.loads((complete_checkpoints(root)[-1]/"state.json").read_text())
    assert 2 <= saved["global_step"] < 4000
    end = saved["global_step"] + 2
    assert QwenImageEditTrainer(made | dict(train=made["train"] | dict(max_train_steps=end, resume_checkpoint="latest"))).fit().global_step == end


@pytest.mark.slow
def test_precompute_by_two_processes_makes_the_bytes_of_one_and_each_entry_once(config, tmp_path, watched, capsys):
    two = QwenImageEditTrainer(config("two", num_processes=2)).cache_embeddings()
    did = watched()
    one = QwenImageEditTrainer(config("one")).cache_embeddings()
    files = [{p.relative_to(root): p.read_bytes() for p in sorted(root.rglob("*.safetensors"))} for root in (tmp_path/"cache_two", tmp_path/"cache_one")]
    assert files[0] == files[1] and len(files[0]) > 30
    same = lambda r: (r.samples, r.encoded, r.reused, r.tensors, r.bytes, r.skipped, r.bad)
    assert same(two) == same(one), "the entries made by both are those of one: none is made twice"
    for rank in did: assert "text_encoder" in {d.get("loads") for d in rank} and all(d["alone"] for d in rank if "alone" in d), "one process loads at a time"
    assert "precomputing in 2 processes" in capsys.readouterr().out
    assert QwenImageEditTrainer(config("two", num_processes=2)).cache_embeddings().reused == 9 and watched() == did, "nothing is missing: no process is started"


def test_what_cannot_be_started_is_said_before_anything_is(config, tmp_path, monkeypatch):
    c = lambda **train: make_config(config("out", **train))
    for words, gpus, given, train in (
            ("`train.num_processes` 3, but there are 2 GPUs; use 2, or auto", 2, "", dict(num_processes=3, device="auto")),
            ("cannot hand a loader to other processes; set it to 1", 0, "a loader", dict(num_processes=2)),
            ("`train.model_parallel_devices` cannot be combined", 2, "", dict(num_processes=2, model_parallel_devices=["cuda:0", "cuda:1"])),
            ("for FSDP use `accelerate launch --use_fsdp", 2, "", dict(num_processes=2, distributed="fsdp")),
            ("needs `train.device` auto", 2, "", dict(num_processes=2, device="cuda:1"))):
        with pytest.raises(ValueError, match=words): check_processes(c(**train), gpus, given)
    for n, gpus, given, train in ((2, 2, "", {}), (1, 1, "", {}), (1, 2, "callbacks", {}), (1, 2, "", dict(device="cuda:0")), (1, 2, "", dict(distributed="fsdp"))):
        assert check_processes(c(**dict(num_processes="auto", device="auto") | train), gpus, given) == n
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check_processes(c(num_processes=2), 2) == 1, "a started process starts none"
