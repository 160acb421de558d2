"""The times of the plan rest on counted operations, counted traffic and published steps."""
import json
from pathlib import Path

import pytest

import anchors
from counted_step import count_traffic
from qie_nb.planning import memory, step_work as operations
from qie_nb.planning.cards import GPUS, parse_gpu, plan, step_seconds, step_work
from qie_nb.core.presets import KNOWN_GPUS, known_gpu_name
from qie_nb.planning.memory import MemoryQuery
from synthetic_checkpoint import FULL

STEP = dict(text=250, zero_cond=True, adapter_bytes=2) # of 2511 at 1024 x 1024
T4 = dict(text=250, zero_cond=True, target=1024, control=1024, base_bytes=4, fp16=True, quantization="nf4",
          checkpointing="selective", kernel="efficient")


# --- sums made by hand, in seconds
@pytest.mark.parametrize("gpu, shapes, by_hand", [
    ("Tesla T4", T4, 3.9 + 1.4 + 0.3 + 2.4), # products, attention, nf4, elementwise
    ("RTX 4090", STEP | dict(quantization="qfloat8", checkpointing="selective"), 8.0 + 1.1),
    ("H100", STEP | dict(checkpointing=False, compiled=True), 0.9), # 1.2 by hand, at rates that others published
    ("A100 80", STEP | dict(batch=2), 14.7)])
def test_times_are_those_of_hand_made_sums(gpu, shapes, by_hand):
    assert step_seconds(MemoryQuery(**shapes), gpu) == pytest.approx(by_hand, rel=0.3)


@pytest.mark.parametrize("gpu, shapes, published", [
    ("T4", T4, 13), ("RTX 4090", STEP | dict(quantization="qfloat8", checkpointing="selective"), 77),
    ("A100 80", STEP | dict(batch=2), 79)])
def test_operations_a_second_of_whole_steps_are_the_published_ones(gpu, shapes, published):
    "In 10^12; everything that a step does is in its time."
    query = MemoryQuery(**shapes)
    assert step_work(query) / step_seconds(query, gpu) == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize("anchor", anchors.ANCHORS, ids=lambda a: a.gpu)
def test_published_steps_are_reproduced(anchor):
    assert anchor.computed() == pytest.approx(anchor.seconds, rel=0.4)


H100 = json.loads((Path(anchors.__file__).parent/"results/gpu_h100.json").read_text())["parts"]
MEASURED = [ # part, row, shapes
    ("4", "no recomputation, compiled", dict(checkpointing=False, compiled=True)),
    ("4", "selective, eager", dict(checkpointing="selective")),
    ("7", "resident, not deterministic", dict(layers=20)),
]


@pytest.mark.parametrize("part, row, shapes", MEASURED, ids=lambda v: v if isinstance(v, str) else "")
def test_steps_measured_on_an_h100_are_reproduced(part, row, shapes):
    "Of the rows whose step waits for the GPU and not for the CPU."
    query = MemoryQuery(text=250, adapter_bytes=2, **shapes)
    measured = H100[part]["rows"][row]["step_s"]["median"]
    assert step_seconds(query, "H100") == pytest.approx(measured, rel=0.06)


def gigabytes(size, kind="none", layers=60, **train) -> float:
    "What the plan says of a configuration of the measurements."
    config = dict(
        model=dict(modulation_table=True, quantize=kind, lora=dict(r=16, lora_alpha=16)),
        data=dict(image_size=size, control_area=size * size, batch_size=1),
        train=dict(mixed_precision="bf16", compile=False) | train)
    return plan(config, "H100", transformer=FULL | dict(num_layers=layers), prompt=250).asked.total / 1e9


@pytest.mark.parametrize("part, row, settings", [
    ("4", "no recomputation, compiled", dict(size=1024, gradient_checkpointing=False, compile=True)),
    ("4", "selective, eager", dict(size=1024, gradient_checkpointing="selective")),
    ("5", "nf4, fp16, selective, 512", dict(
        size=512, kind="nf4", gradient_checkpointing="selective", mixed_precision="fp16")),
    ("6", "qfloat8, selective, 1024", dict(size=1024, kind="qfloat8", gradient_checkpointing="selective")),
    ("6", "nf4, selective, 1024", dict(size=1024, kind="nf4", gradient_checkpointing="selective")),
    ("7", "resident, not deterministic", dict(size=1024, layers=20)),
    ("7", "swapped, not deterministic", dict(size=1024, layers=20, blocks_to_swap=True)),
    ("7", "both, not deterministic", dict(size=1024, layers=20, blocks_to_swap=True, offload_activations=True)),
])
def test_memory_measured_on_an_h100_is_planned(part, row, settings):
    "The plan may say more than torch's peak, which lacks CUDA's own share, and never less."
    measured = H100[part]["rows"][row]["peak_allocated_GB"]
    assert measured < gigabytes(**settings) < 1.05 * measured + 0.6


# --- elementwise operations
@pytest.mark.slow
@pytest.mark.parametrize("kind, shapes", [
    ("float32", dict(base_bytes=4, kernel="efficient")),
    ("float16", dict(base_bytes=4, fp16=True, kernel="efficient")),
    ("bfloat16", dict(adapter_bytes=2)),
    ("float32 adapter", dict()),
    ("two modulations", dict(adapter_bytes=2, zero_cond=True))])
def test_reads_and_writes_are_those_of_the_real_classes(kind, shapes):
    query = MemoryQuery(target=1024, control=1024, checkpointing=False, **shapes)
    forward, whole = count_traffic(query)
    expected = operations.elementwise_bytes(query) / memory.input_bytes(query) / query.layers
    assert whole == pytest.approx(expected, rel=0.06), kind
    again = operations.elementwise_bytes(MemoryQuery(target=1024, control=1024, **shapes))
    assert forward == pytest.approx(again / memory.input_bytes(query) / query.layers - expected, rel=0.06), kind


# --- GPUs
@pytest.mark.parametrize("name", KNOWN_GPUS)
def test_each_known_gpu_has_a_plan_with_a_time(name):
    p = plan("2511", name, 512, config=dict(data=dict(control_area=512 * 512)))
    smallest = min(m.total for m in p.tried)
    assert (p.chosen is not None) == any(map(p.fits, p.tried)) and smallest < 12e9
    assert p.time() and p.run.dtype.value == ("float32" if KNOWN_GPUS[name].reached.eager == 0.37 else "bfloat16")


@pytest.mark.parametrize("name", ["V100", "Tesla V100-SXM2-16GB", "P100", "GTX 1080 Ti", "2xV100"])
def test_a_gpu_without_kernels_is_refused(name):
    with pytest.raises(ValueError, match="is refused: torch 2.14 and later from PyPI has no kernels for it"):
        parse_gpu(name)


@pytest.mark.parametrize("name, known", [
    ("NVIDIA GeForce RTX 3080", "RTX 3080"),
    ("NVIDIA GeForce RTX 3080 Ti", "RTX 3080 Ti"),
    ("NVIDIA GeForce RTX 4070 SUPER", "RTX 4070 Super"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super"),
    ("NVIDIA RTX A6000", "RTX A6000"),
    ("NVIDIA A10G", "A10G"),
    ("NVIDIA A10", "A10"),
    ("NVIDIA L40S", "L40S"),
    ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
    ("Tesla T4", "T4"),
    ("NVIDIA B200", "B200"),
    ("NVIDIA A100-SXM4-40GB", "A100 40"),
    ("NVIDIA A100 80GB PCIe", "A100 80"),
    ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA GeForce RTX 3060 Ti", "RTX 3060 Ti"),
    ("NVIDIA L40", None),
])
def test_the_name_of_a_driver(name, known):
    assert known_gpu_name(name) == known


def test_a_size_that_a_gpu_is_also_sold_with():
    assert parse_gpu("RTX 4060 Ti 8GB").bytes == 8 * 10**9
    assert parse_gpu("T4 16GB") == GPUS["T4"]
