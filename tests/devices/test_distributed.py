"""Two CPU processes train what one trains, with DDP and with FSDP2."""
import json, os, subprocess, sys
from pathlib import Path
from types import SimpleNamespace as NS

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from qie_nb.data.batches import batch_size
from qie_nb.data.dataset import loader
from qie_nb.devices.processes import shard_loader
from qie_nb.training.callbacks import RunState
from qie_nb.training.step import BatchStream
from qie_nb.trainer import QwenImageEditTrainer

from helpers import finish, settings, write_pairs

JOB = Path(__file__).parent/"distributed_job.py"


def launch(*runs):
    "Two processes do these runs, (configuration, folder of the LoRA, ddp or fsdp), in turn."
    jobs = json.dumps([(config, str(out), kind) for config, out, kind in runs])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    finish(subprocess.Popen([*torchrun, JOB, jobs], env=os.environ | dict(OMP_NUM_THREADS="1"),
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))


def maker(folder):
    "Makes configurations of runs that share a filled cache."
    captions = [f"make it {'very ' * i}dark" for i in range(9)]
    root = write_pairs(folder/"set", ((48, 32),) * 7 + ((32, 48),) * 2, caption=captions)

    def config(out, batch_size=2, **train):
        # with Adam's usual eps of 1e-8 the rounding of a tiny gradient becomes a step
        return settings(root, folder, data=dict(batch_size=batch_size), optimizer=dict(eps=1e-5),
                        train=dict(output_dir=str(folder/out), save_steps=2) | train)
    QwenImageEditTrainer(config("cache", 1)).cache_embeddings()
    return config


def without_hashes(header):
    "Tensors that agree within rounding have other hashes."
    return {key: text for key, text in header.items() if "hash" not in key}


def agrees(lora, trainer):
    "The saved LoRA file is, to rounding, the one that this trainer saves."
    own = lora.with_name(f"{lora.name}_of_one")
    trainer.save_lora(own)
    one, two = (folder/"pytorch_lora_weights.safetensors" for folder in (own, lora))
    a, b = load_file(one), load_file(two)
    assert a.keys() == b.keys() and max((a[k] - b[k]).abs().max().item() for k in a) < 1e-6
    assert max(v.abs().max().item() for k, v in b.items() if "lora_B" in k) > 1e-3, "training must change the adapter"
    with safe_open(one, "pt") as f, safe_open(two, "pt") as g:
        assert without_hashes(f.metadata()) == without_hashes(g.metadata())


DDP = dict(ema_decay=0.9, gradient_checkpointing=False, stratified_timesteps=True)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    "A folder in which two processes have trained, with DDP and with FSDP2; the configurations."
    folder = tmp_path_factory.mktemp("launched")
    config = maker(folder)
    ddp = config("ddp", gradient_accumulation_steps=2, **DDP)
    launch((ddp, folder/"lora_ddp", "ddp"), (config("fsdp", ema_decay=0.9), folder/"lora_fsdp", "fsdp"))
    return folder, config


@pytest.mark.weekly
def test_two_processes_equal_one_that_accumulates_twice_the_batches(launched):
    "Buckets of 7 and 2: batches of 2 and one of 1, in an odd number, so one process has none in the last step of an epoch."
    folder, config = launched
    one = QwenImageEditTrainer(config("one_ddp", gradient_accumulation_steps=4, **DDP)).fit()
    step, loss, n = json.loads((folder/"lora_ddp"/"loss.json").read_text())
    assert (step, n) == (one.global_step, 2) and loss == pytest.approx(float(one.state.loss), rel=1e-5)
    agrees(folder/"lora_ddp", one)
    logs = [sorted((folder/name/"checkpoints"/"logs").glob("*.csv")) for name in ("one_ddp", "ddp")]
    rows = [len(files[0].read_text().splitlines()) for files in logs]
    assert len(logs[1]) == 1 and rows[0] == rows[1]


@pytest.mark.weekly
def test_fsdp2_trains_and_saves_the_same(launched):
    folder, config = launched
    alone = config("one_fsdp", gradient_accumulation_steps=2, ema_decay=0.9)
    one = QwenImageEditTrainer(alone).fit()
    agrees(folder/"lora_fsdp", one)
    ours, theirs = (folder/name/"checkpoints/epoch_0002" for name in ("one_fsdp", "fsdp"))
    assert {p.name for p in ours.iterdir()} == {p.name for p in theirs.iterdir()}
    a, b = (load_file(checkpoint/"optimizer.safetensors") for checkpoint in (ours, theirs))
    assert a.pop("rng").shape == b.pop("rng").shape
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.weekly
@pytest.mark.slow
def test_a_run_of_two_processes_resumes_in_one_and_back(tmp_path):
    config = maker(tmp_path)
    uncut = QwenImageEditTrainer(config("uncut", gradient_accumulation_steps=2)).fit()
    launch((config("cut", max_train_steps=2), tmp_path/"first", "ddp"))
    alone = dict(gradient_accumulation_steps=2, resume_checkpoint="latest")
    QwenImageEditTrainer(config("cut", max_train_steps=4, **alone)).fit()
    launch((config("cut", resume_checkpoint="latest"), tmp_path/"lora", "ddp"))
    agrees(tmp_path/"lora", uncut)


def test_a_step_of_two_processes_is_one_of_a_single_process_with_twice_the_accumulation(pairs):
    "The same batches in each step, each sample counted once, and its place among the step's samples the same."
    def steps(processes, accumulate):
        out = []
        for rank in range(processes):
            data = shard_loader(loader(root, batch_size=2, image_size=[64, 64], seed=3), NS(num_processes=processes, process_index=rank))
            made = []
            for group in BatchStream(data, accumulate, []).groups(RunState()):
                counted = [(b["sample_id"][:n], group.places(k)[:n]) for k, (b, n) in enumerate(zip(group, group.counts))]
                made.append(({i: place for ids, places in counted for i, place in zip(ids, places)}, group.samples, group.batches))
                assert all(batch_size(b) for b in group), "every process has something to compute, because the others wait for its gradient"
            out.append(made)
        return out
    root = pairs(((48, 32),) * 5 + ((32, 48),) * 2)
    [one], two = steps(1, 4), steps(2, 2)
    for (ids, *sizes), *parts in zip(one, *two, strict=True):
        assert ids == {k: v for mine, *_ in parts for k, v in mine.items()} and len(ids) == sizes[0]
        assert sum(len(mine) for mine, *_ in parts) == len(ids) and all(rest == sizes for _, *rest in parts)
    assert [batches for *_, batches in one] == [4] and [s for _, s, _ in one] == [7]


def test_fsdp_that_became_something_else_raises(pairs, tmp_path, monkeypatch):
    def check(**train):
        with pytest.raises(ValueError, match="`train.distributed` is fsdp, but accelerate started NO; launch with"):
            QwenImageEditTrainer(settings(pairs(), tmp_path, train=train)).fit()
    check(distributed="fsdp")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check()


STOPS = """
import sys, torch.distributed as dist
from types import SimpleNamespace as NS
from qie_nb.devices.processes import broadcast_stop
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
accelerator = NS(num_processes=2, device="meta") # a tensor there has no value
print([broadcast_stop(accelerator, s) for s in ("", ("interrupted", "")[rank], ("", "max_hours")[rank], ("first", "second")[rank], "")])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_all_processes_stop_for_the_first_ones_reason_without_waiting_for_a_device(tmp_path):
    both = [subprocess.Popen([sys.executable, "-c", STOPS, str(rank), str(tmp_path/"store")], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    assert [finish(p).strip() for p in both] == [str(["", "interrupted", "max_hours", "first", ""])] * 2


def test_only_the_first_process_of_all_nodes_is_the_main_one(tmp_path, pairs):
    "Each node has a process with local index 0; a state that took that index would let every node write."
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path))
    trainer.accelerator = NS(process_index=1, local_process_index=0, num_processes=2, distributed_type=NS(value="NO"))
    trainer.setup_accelerator()
    assert trainer.state.process == 1 and trainer.state.processes == 2 and not trainer.is_main
