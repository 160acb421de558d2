"""FSDP2 as accelerate prepares it: each block is a unit of its own, and two processes train what one trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from qie_nb.devices.strategies.fsdp import launch_problem
from qie_nb.lora.formats import find_lora
from qie_nb.trainer import QwenImageEditTrainer

from helpers import finish, settings, write_pairs

JOB = Path(__file__).parent / "fsdp_job.py"


@pytest.mark.parametrize("wanted, made, sharded, why", [
    ("auto", "MULTI_GPU", True, "`train.distributed` is fsdp, but accelerate started MULTI_GPU"),
    ("fsdp", "MULTI_GPU", False, "`train.distributed` is fsdp, but accelerate started MULTI_GPU"),
    ("ddp", "FSDP", False, "`train.distributed` is ddp, but FSDP was launched"),
    ("auto", "FSDP", False, ""), ("fsdp", "FSDP", True, ""), ("ddp", "MULTI_GPU", False, "")])
def test_what_was_launched_must_be_what_is_planned(wanted, made, sharded, why):
    found = launch_problem(wanted, made, sharded)
    assert found.startswith(why) and bool(found) == bool(why)


@pytest.mark.slow
def test_accelerate_shards_block_by_block(tmp_path):
    "Without a policy the units are the whole transformer and its last norm: all blocks would be gathered at once."
    root = write_pairs(tmp_path / "set", ((48, 32),) * 4)

    def config(out, **train):
        # with Adam's usual eps of 1e-8 the rounding of a tiny gradient becomes a step
        return settings(
            root,
            tmp_path,
            data=dict(batch_size=1),
            optimizer=dict(eps=1e-5),
            train=dict(output_dir=str(tmp_path / out), max_train_steps=2) | train,
        )

    one = QwenImageEditTrainer(config("one", gradient_accumulation_steps=2))
    one.cache_embeddings()
    one.fit()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    started = subprocess.Popen(
        [*torchrun, JOB, json.dumps(config("two")), str(tmp_path / "lora")],
        env=os.environ | dict(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    text = finish(started)
    result = json.loads(next(line for line in text.splitlines() if line.startswith("RESULT")).removeprefix("RESULT"))
    blocks = [f"transformer_blocks.{n}" for n in range(len(one.transformer.transformer_blocks))]
    assert [name for name in result["wrapped"] if name.startswith("transformer_blocks")] == blocks
    assert result["step"] == one.global_step == 2
    assert result["loss"] == pytest.approx(float(one.state.loss), rel=1e-4)
    a, b = (load_file(find_lora(folder)) for folder in (one.save_lora(tmp_path / "lora_of_one"), tmp_path / "lora"))
    assert a.keys() == b.keys() and max((a[k] - b[k]).abs().max().item() for k in a) < 1e-6
