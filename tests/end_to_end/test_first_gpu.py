"""Parts of benchmarks/first_gpu.py on the CPU: modes run as they are asked for, and mistakes of five kinds are found."""
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import first_gpu_parts
import first_gpu_tiny
import step_gpu
from qie_nb.devices import fp16
from qie_nb.devices.strategies.host_memory import Streams
from qie_nb.models import flow_matching
from qie_nb.training import step

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "A folder with pairs, and the plain run that every mode is compared with."
    root = tmp_path_factory.mktemp("first_gpu")
    return SimpleNamespace(root=root, plain=first_gpu_tiny.plain_run(root))


def row_of(mode, world, tmp_path):
    "What the script says of a mode."
    (tmp_path/"pairs").symlink_to(world.root/"pairs")
    with first_gpu_tiny.all_modes("cpu"):
        return first_gpu_tiny.checked(mode, "cpu", tmp_path, world.plain)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nf4, fp16, selective", "both"])
def test_a_mode_runs(mode, world, tmp_path):
    row = row_of(mode, world, tmp_path)
    assert row["wrong"] == [] and len(row["losses"]) == first_gpu_tiny.STEPS + first_gpu_tiny.MORE, row


def test_a_mode_keeps_its_precision():
    "What was called a T4's path ran in bfloat16."
    bench = first_gpu_parts.bench_of("cpu")
    for asked, expected in ((dict(mixed_precision="fp16"), "fp16"), ({}, "bf16")):
        mode = step_gpu.change(step_gpu.TABLE, train=asked)
        assert step_gpu.configuration(bench, mode, 512, 1)["train"]["mixed_precision"] == expected


def test_a_decoder_is_compared_with_the_plan_of_its_dtype():
    whole, half = (first_gpu_parts.decoder_memory("cpu", 1024, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert whole["planned_GB"] > half["planned_GB"]


# --- mistakes of five kinds
def on_another_device(monkeypatch):
    "The prompts do not come to the device where the model is."
    real = step.to_device

    def moved(t, dtype=None, device="cpu"):
        there = real(t, dtype, device)
        return there.to("meta") if there.ndim == 3 else there
    monkeypatch.setattr(step, "to_device", moved)


def in_another_dtype(monkeypatch):
    "Everything that comes to the device is rounded to bfloat16 on its way."
    real = step.to_device

    def rounded(t, dtype=None, device="cpu"):
        there = real(t, dtype, device)
        return there.bfloat16().to(there.dtype) if there.is_floating_point() else there
    monkeypatch.setattr(step, "to_device", rounded)


def before_its_copy(monkeypatch):
    "A block computes before the copy of its weights has arrived."
    real, late = Streams.copy, []

    def delayed(streams, to, source):
        late.append((to, source))
        if len(late) > 1:
            return real(streams, *late.pop(0))
    monkeypatch.setattr(Streams, "copy", delayed)


def without_an_argument(monkeypatch):
    "The transformer is called without the shapes of its images."
    real = flow_matching.transformer_inputs

    def fewer(*args, **kw):
        return {name: value for name, value in real(*args, **kw).items() if name != "img_shapes"}
    monkeypatch.setattr(flow_matching, "transformer_inputs", fewer)


def with_a_wrong_scale(monkeypatch):
    "A scaled product is divided by half of its factor."
    real = fp16.scale_to_fp16

    def doubled(x, *args, **kw):
        scaled, *factors = real(x, *args, **kw)
        return (scaled, *(2 * f for f in factors))
    monkeypatch.setattr(fp16, "scale_to_fp16", doubled)


@pytest.mark.slow
@pytest.mark.parametrize("mode, mistake", [
    ("bf16", on_another_device), ("float32", in_another_dtype), ("blocks swapped", before_its_copy),
    ("float32, all kept", without_an_argument), ("fp16", with_a_wrong_scale)], ids=lambda v: getattr(v, "__name__", ""))
def test_a_mistake_is_found(mode, mistake, world, tmp_path, monkeypatch):
    mistake(monkeypatch)
    row = row_of(mode, world, tmp_path)
    assert row.get("wrong") or row.get("failed"), row


@pytest.mark.weekly
def test_all_modes_run_and_every_part_ends(tmp_path):
    out = tmp_path/"first_gpu.json"
    command = [sys.executable, "benchmarks/first_gpu.py", "--device", "cpu", "--patience", "20", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = json.loads(out.read_text())["parts"]
    modes = found["2"]["rows"]
    assert done.returncode == 0, done.stdout[-3000:]
    assert list(modes) == list(first_gpu_tiny.MODES) and all(row["wrong"] == [] for row in modes.values())
    assert len(found) == 10 and all(part["ended"] == "ended" for part in found.values())
