"""Ten machines written down as data, and every decision of the plan on them; torch is not imitated."""
from dataclasses import replace

import pytest

from qie_nb.config import make_config
from qie_nb.core.choice import Choice
from qie_nb.planning.decisions import AS_DTYPE, SCALED, choose_device, choose_dtype, choose_products
from qie_nb.planning.facts import GpuInfo, Machine, SoFar
from qie_nb.planning.plan import make_plan

GB = 1_000_000_000
T4 = GpuInfo("Tesla T4", 15_835_660_288, (7, 5), False)
RTX3060 = GpuInfo("NVIDIA GeForce RTX 3060", 12_563_000_000, (8, 6))
RTX4090 = GpuInfo("NVIDIA GeForce RTX 4090", 25_393_692_672, (8, 9), screen=True, free=23 * GB)
A100 = GpuInfo("NVIDIA A100-SXM4-40GB", 42_300_000_000, (8, 0))
H100 = GpuInfo("NVIDIA H100 80GB HBM3", 84_929_347_584, (9, 0))

OWN = Machine(cores=16, memory=64 * GB, disk=500 * GB, driver="580.95.05", compiler=True, triton=True)
KAGGLE = replace(OWN, cores=4, memory=31 * GB, disk=60 * GB, platform="kaggle", hours=9., session_start=1000.)
MACHINES = {
    "T4": replace(OWN, gpus=(T4,)),
    "2 x T4": replace(KAGGLE, gpus=(T4, T4)),
    "RTX 3060": replace(OWN, gpus=(RTX3060,)),
    "RTX 4090 with a screen": replace(OWN, gpus=(RTX4090,)),
    "A100": replace(OWN, gpus=(A100,), platform="colab", hours=12.),
    "H100": replace(OWN, gpus=(H100,)),
    "no GPU": replace(OWN, triton=False),
    "old driver": replace(OWN, driver="535.183.01"), # torch sees no GPU then
    "WSL2": replace(OWN, gpus=(RTX4090,), wsl2=True, driver="", compiler=False),
    "Kaggle's disk": replace(KAGGLE, gpus=(T4,), disk=8 * GB),
}


def plan_on(name, so_far=SoFar(), **sections):
    "The plan of a configuration on one of the machines."
    return make_plan(make_config(sections), MACHINES[name], so_far)


def values(field, **sections) -> dict: # {machine: value of a decision}
    "What a decision is on each machine."
    return {name: getattr(plan_on(name, **sections), field).value for name in MACHINES}


def on(default, **others) -> dict:
    "{machine: value}: the others by name, written with underscores."
    named = {name.replace("_", " "): value for name, value in others.items()}
    assert named.keys() <= MACHINES.keys()
    return dict.fromkeys(MACHINES, default) | named


NO_GPU = dict(no_GPU="cpu", old_driver="cpu")


def test_the_device_is_the_first_gpu_or_that_of_the_process():
    assert values("device") == on("cuda:0", **NO_GPU)
    second = replace(MACHINES["2 x T4"], rank=1, world=2)
    assert choose_device("auto", second).value == "cuda:1"
    assert choose_device("auto", replace(second, rank=2)).value == "cuda"
    assert choose_device("auto", Machine(mps=True)).value == "mps"
    assert plan_on("T4", train=dict(device="cpu")).device == Choice("cpu", "`train.device` says so", "train.device", True)
    with pytest.raises(ValueError, match="device 'cuda:1' does not exist here; this machine has cpu, cuda:0"):
        plan_on("T4", train=dict(device="cuda:1")).device.checked()
    assert plan_on("T4", SoFar(device="cpu")).device.value == "cpu"


def test_several_gpus_that_share_the_blocks_decide_the_device():
    shared = dict(model_parallel_devices=["cuda:1", "cuda:0"])
    device = plan_on("2 x T4", train=shared).device
    assert (device.value, device.setting, device.asked) == ("cuda:1", "train.model_parallel_devices", True)


def test_encoders_are_where_the_run_trains_unless_the_cache_names_a_device():
    for field in ("vae_device", "text_encoder_device"):
        assert values(field) == on("cuda:0", **NO_GPU)
    plan = plan_on("2 x T4", cache=dict(text_encoder_device="cuda:1", vae_encoder_device="cpu"))
    assert [plan.vae_device.value, plan.text_encoder_device.value] == ["cpu", "cuda:1"]
    assert plan_on("T4", cache=dict(vae_encoder_device="cuda:3")).vae_device.problem


def test_only_gpus_without_bfloat16_compute_in_float32():
    float32 = dict.fromkeys(("T4", "2_x_T4"), "float32")
    assert values("dtype") == on("bfloat16", **float32) | {"Kaggle's disk": "float32"}
    assert plan_on("T4").dtype.why.startswith("Tesla T4 has no bfloat16 of its own, and float16 overflows")
    asked = plan_on("T4", train=dict(mixed_precision="bf16")).dtype
    assert asked.value == "bfloat16" and asked.asked and "it is emulated" in asked.why
    assert set(values("dtype", train=dict(mixed_precision="no")).values()) == {"float32"}


def test_products_are_scaled_float16_on_tensor_cores_without_bfloat16():
    assert values("products") == on(AS_DTYPE, T4=SCALED, **{"2_x_T4": SCALED}) | {"Kaggle's disk": SCALED}

    def products(gpu=T4, kind=None, fsdp=False, **train):
        "The decision for a GPU."
        return choose_products(make_config(dict(train=train)).train, gpu, kind, fsdp)
    assert products(kind="nf4").why.startswith("Tesla T4 has no bfloat16: ")
    assert products(replace(T4, capability=(7, 0))).value == SCALED
    assert products(H100, mixed_precision="fp16").value == SCALED
    for other in (dict(gpu=replace(T4, capability=(6, 0))), dict(mixed_precision="no"), dict(mixed_precision="bf16"),
                  dict(kind="fp8_storage"), dict(compile=True), dict(fsdp=True), dict(gpu=H100), dict(gpu=None)):
        assert products(**other).value == AS_DTYPE, other
    for against in (dict(kind="fp8_storage"), dict(compile=True), dict(fsdp=True)):
        assert "fp16 is incompatible with" in products(mixed_precision="fp16", **against).problem
    assert choose_dtype("fp16", H100).value == "float32"


def test_a_launch_with_fsdp_forbids_scaled_products():
    launched = replace(MACHINES["2 x T4"], fsdp=True, world=2)
    assert make_plan(make_config(None), launched).products.value == AS_DTYPE
    ddp = make_config(dict(train=dict(distributed="ddp")))
    assert make_plan(ddp, launched).products.value == SCALED
