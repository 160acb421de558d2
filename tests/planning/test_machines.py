"""Ten machines written down as data, and every decision of the plan on them; torch is not imitated."""

import ast
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

from qie_nb.config import describe, make_config
from qie_nb.core import presets
from qie_nb.core.choice import (
    ALWAYS, IN_TRAINING, NEVER, Change, Choice, EvalInterval, Plan, RunLength, TimeLimit)
from qie_nb.core.presets import GPU_PRESETS
from qie_nb.core.section import ABOUT_PLANNED, PLANNED, all_settings
from qie_nb.core.settings import setting
from qie_nb.data.samples import ONE_IMAGE
from qie_nb.planning.cards import plan
from qie_nb.planning.decisions import (
    AS_DTYPE,
    MARGIN,
    SCALED,
    choose_compile,
    choose_device,
    choose_dtype,
    choose_held_out,
    choose_hours,
    choose_modulation,
    choose_processes,
    choose_products,
    fits_gpus,
    room_of,
)
from qie_nb.planning.facts import (
    UNKNOWN,
    DecodingFacts,
    EncodingFacts,
    GpuInfo,
    Machine,
    ModelFacts,
    PairFacts,
    SoFar,
    TextEncoderFacts,
    KAGGLE_HOST,
    Gpu,
    cached_kinds,
    drives_a_screen,
    first_kind,
    hides_gpus,
    host_bytes,
    machine_with,
    old_driver,
)
from qie_nb.devices.edit_model import EditModel
from qie_nb.models.components import WHEN_NEEDED
from qie_nb.models.loading import free_device_bytes, work_bytes
from qie_nb.planning.facts import encoding_facts
from qie_nb.planning.memory import REAL
from qie_nb.planning.plan import (
    PlanFacts,
    Planner,
    changed,
    expected_steps,
    first_that_fits,
    fits_machine,
    make_plan,
    smaller,
    smaller_settings,
    step_memory,
    ways_to_save,
)
from qie_nb.planning.parts import (
    PredictionFacts,
    choose_decoder,
    choose_encode_batch,
    choose_part_devices,
    choose_placement,
    choose_text_encoder_quantize,
    encoder_room,
    encoding_bytes,
    text_encoder_facts,
)

GB = 1_000_000_000
T4 = GpuInfo("Tesla T4", 15_835_660_288, (7, 5), False)
RTX3060 = GpuInfo("NVIDIA GeForce RTX 3060", 12_563_000_000, (8, 6))
RTX4090 = GpuInfo("NVIDIA GeForce RTX 4090", 25_393_692_672, (8, 9), screen=True, free=23 * GB)
A100 = GpuInfo("NVIDIA A100-SXM4-40GB", 42_300_000_000, (8, 0))
H100 = GpuInfo("NVIDIA H100 80GB HBM3", 84_929_347_584, (9, 0))

OWN = Machine(
    cores=16,
    memory=64 * GB,
    disk=500 * GB,
    driver="580.95.05",
    cuda="13.0",
    compiler=True,
    headers=True,
    triton=True,
)
KAGGLE = replace(
    OWN,
    cores=4,
    memory=31 * GB,
    disk=60 * GB,
    session_quota=62 * GB,
    platform="kaggle",
    hours=9.0,
    session_start=1000.0,
)
MACHINES = {
    "T4": replace(OWN, gpus=(T4,)),
    "2 x T4": replace(KAGGLE, gpus=(T4, T4)),
    "RTX 3060": replace(OWN, gpus=(RTX3060,)),
    "RTX 4090 with a screen": replace(OWN, gpus=(RTX4090,)),
    "A100": replace(OWN, gpus=(A100,), platform="colab", hours=12.0),
    "H100": replace(OWN, gpus=(H100,)),
    "no GPU": replace(OWN, driver="", triton=False),
    "old driver": replace(OWN, driver="535.183.01"), # torch sees no GPU then
    "WSL2": replace(OWN, gpus=(RTX4090,), wsl2=True, driver="", compiler=False),
    "Kaggle's disk": replace(KAGGLE, gpus=(T4,), disk=8 * GB),
}


MODEL = ModelFacts(REAL)
PAIRS = PairFacts(50, 50)


def plan_on(name, so_far=SoFar(), facts=MODEL, pairs=PAIRS, **sections):
    "The plan of a configuration on one of the machines."
    return make_plan(make_config(sections), MACHINES[name], facts, pairs, so_far)


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
    assert plan_on("T4", train=dict(device="cpu")).device == Choice(
        "cpu", "`train.device` says so", "train.device", True
    )
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
    for other in (
        dict(gpu=replace(T4, capability=(6, 0))),
        dict(mixed_precision="no"),
        dict(mixed_precision="bf16"),
        dict(kind="fp8_storage"),
        dict(compile=True),
        dict(fsdp=True),
        dict(gpu=H100),
        dict(gpu=None),
    ):
        assert products(**other).value == AS_DTYPE, other
    for against in (dict(kind="fp8_storage"), dict(compile=True), dict(fsdp=True)):
        assert "fp16 is incompatible with" in products(mixed_precision="fp16", **against).problem
    assert choose_dtype("fp16", H100).value == "float32"


def test_a_launch_with_fsdp_forbids_scaled_products():
    launched = replace(MACHINES["2 x T4"], fsdp=True, world=2)
    plan = make_plan(make_config(None), launched, MODEL)
    assert plan.products.value == AS_DTYPE and plan.sharded == Choice(
        True, "the processes were launched with FSDP", "train.distributed"
    )
    assert set(values("sharded").values()) == {False} and set(
        values("sharded", train=dict(distributed="fsdp")).values()
    ) == {True}
    ddp = make_config(dict(train=dict(distributed="ddp")))
    assert make_plan(ddp, launched).products.value == SCALED


SMALL = dict(
    model=dict(quantize="nf4"),
    data=dict(image_size=[512, 512], control_area=512 * 512),
    train=dict(gradient_checkpointing="selective"),
)


def test_two_processes_start_only_if_the_run_fits_each_gpu():
    assert values("processes") == on(1)
    assert values("processes", **SMALL) == on(1, **{"2_x_T4": 2})
    small, large = (plan_on("2 x T4", **sections).processes for sections in (SMALL, {}))
    assert small.why.startswith("the run fits each GPU (") and not small.warning
    assert large.why.startswith("the run does not fit each GPU (") and large.warning.startswith("one process: ")
    assert plan_on("2 x T4", facts=None).processes.value == 2, "without a model nothing speaks against it"


def test_two_processes_pin_host_memory_twice():
    swapped = SMALL | dict(model={}, train=dict(blocks_to_swap=True))
    one, enough_for_one, two = (
        make_plan(make_config(swapped), replace(KAGGLE, gpus=(T4, T4), memory=memory * GB), MODEL).processes
        for memory in (60, 100, 200)
    )
    assert (
        (one.value, enough_for_one.value, two.value) == (1, 1, 2)
        and "of host memory" in one.why
        and one.warning.startswith("one process: each process would pin")
    )


def test_two_processes_that_were_asked_for_must_fit_the_host_together():
    asked = SMALL | dict(model={}, train=dict(blocks_to_swap=True, num_processes=2))

    def fits(memory):
        machine = replace(KAGGLE, gpus=(T4, T4), memory=memory * GB)
        facts = PlanFacts(make_config(asked), machine, MODEL, PAIRS, SoFar())
        return fits_machine(make_plan(*facts), facts)

    assert (fits(60), fits(100), fits(200)) == (False, False, True), "100 GB are enough for one of them"


def test_the_weights_of_a_t4_are_counted_in_float32():
    "In bfloat16 the same run would fit: an H100 of that size takes it."
    eight = dict(
        model=dict(quantize="none", modulation_table=True), data=dict(image_size=[256, 256], control_area=256 * 256)
    )
    wide = replace(T4, bytes=40 * GB, name="T4 with more memory")
    two = [
        make_plan(make_config(eight), replace(KAGGLE, gpus=(gpu, gpu)), MODEL).processes.value
        for gpu in (wide, replace(wide, bf16=True, capability=(9, 0)))
    ]
    assert two == [1, 2]


@pytest.mark.parametrize(
    "words, gpus, given, train",
    [
        (
            "`train.num_processes` 3, but there are 2 GPUs; use 2, or auto",
            2,
            "",
            dict(num_processes=3, device="auto"),
        ),
        ("cannot hand a loader to other processes; set it to 1", 0, "a loader", dict(num_processes=2)),
        (
            "`train.model_parallel_devices` cannot be combined",
            2,
            "",
            dict(num_processes=2, model_parallel_devices=["cuda:0", "cuda:1"]),
        ),
        ("for FSDP use `accelerate launch --use_fsdp", 2, "", dict(num_processes=2, distributed="fsdp")),
        ("needs `train.device` auto", 2, "", dict(num_processes=2, device="cuda:1")),
    ],
)
def test_what_cannot_be_started_is_a_problem_of_the_choice(words, gpus, given, train):
    choice = choose_processes(make_config(dict(train=train)).train, Machine((T4,) * gpus), SoFar(given=given))
    with pytest.raises(ValueError, match=words):
        choice.checked()


@pytest.mark.parametrize(
    "n, gpus, so_far, train",
    [
        (2, 2, {}, {}),
        (1, 1, {}, {}),
        (1, 2, dict(given="callbacks", optional=True), {}),
        (1, 2, {}, dict(device="cuda:0")),
        (1, 2, {}, dict(distributed="fsdp")),
        (1, 2, dict(begun_here=True), {}),
        (2, 2, dict(given="callbacks", optional=True), dict(num_processes=2)),
    ],
)
def test_how_many_processes_start(n, gpus, so_far, train):
    config = make_config(dict(train=dict(num_processes="auto") | train))
    machine = Machine((T4,) * gpus)
    assert choose_processes(config.train, machine, SoFar(**so_far)).checked() == n
    launched = replace(machine, world=2)
    assert choose_processes(config.train, launched, SoFar(**so_far)).checked() == 2, "those that were launched"


def test_a_run_ends_before_its_session():
    kaggle = TimeLimit(9 - MARGIN, 1000.0)
    assert values("hours") == on(None, A100=TimeLimit(12 - MARGIN), **{"2_x_T4": kaggle}) | {"Kaggle's disk": kaggle}
    choice = plan_on("2 x T4").hours
    assert choice.why == "max_hours auto (8.5 of kaggle's 9 h, from its start)"
    assert choice.value.end(5000.0) == 1000.0 + 8.5 * 3600
    assert choose_hours("auto", replace(KAGGLE, session_start=None)).value.end(5000.0) == 5000.0 + 8.5 * 3600
    assert choose_hours(None, KAGGLE).value is None and choose_hours(2.5, KAGGLE).value.end(5000.0) == 14000.0


def test_a_run_is_evaluated_four_times_unless_it_is_asked_otherwise():
    assert set(values("eval_interval").values()) == {EvalInterval(parts=4)}
    for train, interval in (
        (dict(eval_steps=30), (0, 30)),
        (dict(eval_interval=2), (2, None)),
        (dict(eval_interval=0), (0, None)),
    ):
        assert plan_on("T4", train=train).eval_interval.value.of(1000) == interval


def test_a_tenth_of_the_control_images_is_held_out_and_at_least_five_of_twenty():
    assert set(values("held_out").values()) == {5}
    for images, held in (
        (9, 0),
        (10, 1),
        (19, 1),
        (20, 5),
        (30, 5),
        (54, 5),
        (200, 20),
    ):
        assert plan_on("T4", pairs=PairFacts(50, images)).held_out.value == held
    assert plan_on("T4", pairs=None).held_out is None
    train = make_config(None).train
    for before, held in (("auto", ONE_IMAGE), (0, 0), (0.1, 0.1), (3, 3)):
        found = choose_held_out(train, PAIRS, before).value
        assert found == held, "a resumed run goes on with what its checkpoint held out"
    for asked, share in (
        (dict(val_fraction=0.2), 0.2),
        (dict(val_path="held"), 0),
        (dict(val_fraction=0.2, val_path="held"), 0),
    ):
        assert plan_on("T4", pairs=None, train=asked).held_out.value == share


def test_a_table_replaces_the_modulation_layers_in_training():
    assert set(values("modulation").values()) == {IN_TRAINING}
    for wanted, value in ((True, ALWAYS), (False, NEVER)):
        choice = plan_on("T4", model=dict(modulation_table=wanted), facts=None).modulation
        assert (choice.value, choice.asked) == (value, True)
    assert choose_modulation("auto", replace(MODEL, table=False), "bfloat16").value == NEVER
    assert choose_modulation("auto", None, "bfloat16") is None
    small = ModelFacts(dict(REAL, num_attention_heads=1, attention_head_dim=64), rows="float32")
    assert choose_modulation("auto", small, "float32").value == NEVER, (
        "the table of a small model is larger than its layers"
    )


def test_long_runs_on_gpus_with_a_compiler_are_compiled():
    compiled = values("compile", train=dict(max_train_steps=1000))
    assert compiled == on(True, T4=False, no_GPU=False, old_driver=False, WSL2=False, **{"2_x_T4": False}) | {
        "Kaggle's disk": False
    }
    reasons = {name: plan_on(name, train=dict(max_train_steps=1000)).compile.why for name in ("T4", "no GPU", "WSL2")}
    assert reasons == {
        "T4": "products are scaled into float16 (`train.mixed_precision` fp16)",
        "no GPU": "eager code is as fast on a CPU, and starts at once",
        "WSL2": "there is no C compiler here",
    }
    assert set(values("compile", train=dict(max_train_steps=499)).values()) == {False}


@pytest.mark.parametrize(
    "why, machine, device, facts, train",
    [
        ("`train.compile` is false", "H100", "cuda:0", {}, dict(compile=False)),
        (
            "a compiled nf4 base is not tried on GPUs yet; set `train.compile` to true for it",
            "H100",
            "cuda:0",
            dict(quantized="nf4"),
            {},
        ),
        (
            "compiling does not pay off in 100 steps; set `train.compile` to true for it",
            "H100",
            "cuda:0",
            dict(steps=100),
            {},
        ),
        (
            "`train.offload_activations` moves the kept tensors",
            "no GPU",
            "cpu",
            {},
            dict(compile=True, offload_activations=True),
        ),
        (
            "FSDP has sharded the blocks",
            "H100",
            "cuda:0",
            dict(obstacle="FSDP has sharded the blocks"),
            dict(compile=True),
        ),
        ("there is no C compiler here", "WSL2", "cpu", {}, dict(compile=True)),
        ("torch.compile is not used on mps", "H100", "mps", {}, {}),
    ],
)
def test_what_forbids_compiling(why, machine, device, facts, train):
    choice = choose_compile(make_config(dict(train=train)).train, MACHINES[machine], device, **facts)
    assert (choice.value, choice.why) == (False, why)
    loud = train.get("compile") is True or device.startswith("cuda") and train.get("compile") is not False
    assert choice.warning == (f"blocks run uncompiled: {why}" if loud else "")


def test_a_gpu_needs_triton():
    train, old = (
        make_config(None).train,
        replace(MACHINES["H100"], gpus=(replace(H100, capability=(6, 1), name="Tesla P40"),)),
    )
    assert (
        choose_compile(train, replace(MACHINES["H100"], triton=False), "cuda:0", 1000).why
        == "triton is not installed"
    )
    assert choose_compile(train, old, "cuda:0", 1000).why == "Tesla P40 is too old for triton"
    for asked, steps in (("auto", 1000), ("auto", None), (True, 3)):
        choice = choose_compile(make_config(dict(train=dict(compile=asked))).train, MACHINES["H100"], "cuda:0", steps)
        assert choice.value and choice.warning.startswith(
            "blocks are compiled (triton and a C compiler are here), so"
        )
    asked = make_config(dict(train=dict(compile=True))).train
    assert choose_compile(asked, MACHINES["no GPU"], "cpu", quantized="nf4").value


def test_as_many_samples_are_encoded_at_once_as_fit():
    one_gpu = dict(vae="cuda:0", text_encoder="cuda:0")
    work = dict(vae=5 * GB, text_encoder=1 * GB)
    for weights, batch in ((dict(vae=GB // 4, text_encoder=33 * GB), 1), (dict(vae=0, text_encoder=0), 2)):
        facts = EncodingFacts(one_gpu, weights, work, {"cuda:0": 26 * GB})
        assert choose_encode_batch("auto", facts).value == batch
    both = dict.fromkeys(one_gpu, 6 * GB)
    beside_both = EncodingFacts(one_gpu, both, dict.fromkeys(one_gpu, 1 * GB), {"cuda:0": 20 * GB})
    assert choose_encode_batch("auto", beside_both).value == 2, "8 GB stay free beside both encoders"
    assert values("encode_batch", cache=dict(batch_size=7)) == on(7)
    assert plan_on("no GPU").encode_batch == Choice(1, "nothing is gained on cpu", "cache.batch_size")
    assert plan_on("T4").encode_batch is None, "the memory is read when something is encoded"
    assert encoding_facts(EditModel("tiny"), dict(vae="cpu", text_encoder="cuda:0")).free == {}


def test_downloads_are_deleted_when_the_disk_is_too_small_or_a_session_may_write_little():
    kaggle = {"2_x_T4": True}
    assert values("delete_shards") == on(WHEN_NEEDED, **kaggle) | {"Kaggle's disk": True}
    assert plan_on("2 x T4", model=dict(delete_downloaded_shards=False)).delete_shards.asked
    assert [plan_on("T4", model=dict(delete_downloaded_shards=v)).delete_shards.value for v in (True, False)] == [
        True,
        False,
    ]


# --- what the facts say
def test_the_screen_of_a_gpu_is_found_by_its_bus(tmp_path):
    for card, bus, state in (("card0", "01", "disconnected"), ("card1", "0a", "connected")):
        device = tmp_path/"pci"/f"0000:{bus}:00.0"
        device.mkdir(parents=True)
        (tmp_path/"drm"/card).mkdir(parents=True)
        (tmp_path/"drm"/card/"device").symlink_to(device)
        (tmp_path/"drm"/f"{card}-HDMI-A-1").mkdir()
        (tmp_path/"drm"/f"{card}-HDMI-A-1"/"status").write_text(state + "\n")
    assert [drives_a_screen(bus, tmp_path/"drm") for bus in (1, 10, 2, None)] == [False, True, None, None]


def test_of_gpus_of_one_kind_the_smallest_and_the_fullest_count():
    sizes = (15 * GB, 14 * GB), (14 * GB, 12 * GB), (16 * GB, None)
    gpus = [replace(T4, bytes=size, free=free) for size, free in sizes]
    found = first_kind([*gpus, replace(H100, free=1 * GB)])
    assert (found.name, found.count, found.bytes, found.free) == ("Tesla T4", 3, 14 * GB, 12 * GB)


def test_a_card_that_is_only_named_has_the_capability_and_host_memory_of_its_kind():
    p100, t4, h100 = (Gpu(name, 16 * GB, bf16=name == "H100") for name in ("P100", "T4", "H100"))
    assert [machine_with(gpu).gpus[0].tensor_cores for gpu in (p100, t4, h100)] == [False, True, True]
    assert [host_bytes(gpu) for gpu in (p100, t4, None)] == [float("inf"), KAGGLE_HOST, float("inf")]


@pytest.mark.parametrize("value, hidden", [
    ("", True), ("-1", True), ("NoDevFiles", True), ("0", False), ("1,0", False), (None, False)])
def test_a_variable_hides_all_gpus(value, hidden):
    assert hides_gpus({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) is hidden


def test_what_torch_keeps_for_reuse_is_free_and_what_is_in_use_is_not(monkeypatch):
    for name, held in (("mem_get_info", (2 * GB, 16 * GB)), ("memory_reserved", 5 * GB), ("memory_allocated", 4 * GB)):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, held=held: held)
    assert free_device_bytes("cuda:0") == 3 * GB


# --- what is given instead of chosen
def test_a_dtype_that_is_given_is_not_chosen():
    assert plan_on("T4", SoFar(dtype="bfloat16")).dtype == Choice("bfloat16", "given", "train.mixed_precision")


def test_a_run_of_epochs_is_saved_by_epochs_and_one_of_samples_by_quarters():
    epochs, samples = (plan_on("T4", train=train) for train in (dict(num_epochs=3), {}))
    assert epochs.length.value.epochs == 3 and not epochs.save_interval.value.parts
    assert samples.length.value.samples and samples.save_interval.value.parts


@pytest.mark.parametrize("processes, steps", [("auto", 40), (1, 40), (2, 20)])
def test_the_steps_of_a_run_are_shared_by_the_processes_that_were_asked_for(processes, steps):
    train = dict(gradient_accumulation_steps=2, num_processes=processes)
    config = make_config(dict(data=dict(batch_size=2), train=train))
    assert expected_steps(config, Choice(RunLength(samples=160))) == steps


def test_a_smaller_batch_is_made_up_for_by_accumulation():
    config = make_config(dict(data=dict(batch_size=2), train=dict(gradient_accumulation_steps=3)))
    (batch,) = (change for change in smaller_settings(config) if change.setting == "data.batch_size")
    assert batch.value == 1 and batch.note == " with `train.gradient_accumulation_steps` 6"


def test_another_quantization_takes_the_place_of_that_which_was_loaded():
    facts = changed(facts_on("H100", SoFar(quantize="nf4")), Change("model.quantize", "qint8"))
    assert make_plan(*facts).quantize.value == "qint8"


def test_blocks_that_compile_recompute_as_it_is_set_although_the_run_does_not_fit():
    facts = facts_on("RTX 4090 with a screen", train=dict(gradient_checkpointing=False, compile=True))
    made = make_plan(*facts)
    assert made.compile.value and made.checkpointing.value is False and not fits_machine(made, facts)


def test_processes_of_a_launcher_may_be_on_other_machines():
    facts = facts_on("2 x T4", **SMALL)
    facts = facts._replace(machine=replace(facts.machine, world=4))
    made = make_plan(*facts)
    assert made.processes.value == 4 and fits_machine(made, facts), "two of them are here"


# --- a prediction
SIZES = dict(text_encoder=16.6 * GB, vae=0.25 * GB, transformer=40.9 * GB)
FOUR_BITS = dict(text_encoder=5 * GB, vae=0.25 * GB, transformer=11.5 * GB)


def placed_on(name, sizes, **facts) -> str:
    "Device and use of text encoder, VAE and transformer on one of the machines, with all its memory free."
    machine = MACHINES[name]
    free = {f"cuda:{n}": gpu.bytes for n, gpu in enumerate(machine.gpus)} | {"cpu": machine.memory}
    facts = PredictionFacts(sizes, free, choose_device("auto", machine).value, work_bytes(2**20), **facts)
    return " ".join(f"{choice.device}:{choice.how}" for choice in choose_placement("auto", facts).values())


@pytest.mark.parametrize(
    "name, sizes, expected",
    [
        ("no GPU", SIZES, "cpu:stay cpu:stay cpu:stay"),
        ("H100", SIZES, "cuda:0:stay cuda:0:stay cuda:0:stay"),
        ("A100", SIZES, "cuda:0:model cuda:0:model cuda:0:layers"),
        ("RTX 4090 with a screen", FOUR_BITS, "cuda:0:stay cuda:0:stay cuda:0:stay"),
        ("T4", FOUR_BITS, "cuda:0:model cuda:0:model cuda:0:model"),
        ("2 x T4", FOUR_BITS, "cuda:1:stay cuda:1:stay cuda:0:stay"),
    ],
)
def test_where_a_prediction_computes(name, sizes, expected):
    assert placed_on(name, sizes) == expected


def test_the_users_device_decides_where_a_part_of_a_prediction_computes():
    chosen = choose_part_devices(dict(vae="cpu", text_encoder="cuda:1", transformer="auto"), MACHINES["T4"], "cuda:0")
    assert [choice.value for choice in chosen.values()] == ["cpu", "cuda:1", "cuda:0"] and [
        choice.asked for choice in chosen.values()
    ] == [True, True, False]
    with pytest.raises(ValueError, match="device 'cuda:1' does not exist here; this machine has cpu, cuda:0"):
        chosen["text_encoder"].checked()


# --- does it fit, and what then
def facts_on(name, so_far=SoFar(), **sections):
    "The facts of a configuration on one of the machines."
    return PlanFacts(make_config(sections), MACHINES[name], MODEL, PAIRS, so_far)


@pytest.mark.parametrize(
    "needed, gpus, used, host, fits",
    [
        (14, 1, 1, {}, True),
        (15, 1, 1, {}, False),
        (14, 1, 2, {}, False),
        (14, 2, 2, {}, True),
        (1, 0, 1, {}, False),
        (14, 2, 2, dict(pinned=30, host=31), True),
        (14, 2, 2, dict(pinned=32, host=31), False),
    ],
)
def test_one_function_says_whether_a_run_fits(needed, gpus, used, host, fits):
    assert fits_gpus(needed * GB, [room_of(T4)] * gpus, used, **{k: v * GB for k, v in host.items()}) == fits


def test_a_run_on_several_gpus_must_fit_the_smallest():
    rooms = [20 * GB, 10 * GB]
    assert fits_gpus(9 * GB, rooms, 2) and not fits_gpus(14 * GB, rooms, 2)


def test_what_fits_each_machine():
    plans = {name: facts_on(name, **SMALL) for name in MACHINES}
    fits = {name: fits_machine(make_plan(*facts), facts) for name, facts in plans.items()}
    assert fits == on(True), "four bits at 512 x 512; without a GPU nothing is known"
    large = {
        name: fits_machine(make_plan(*facts), facts) for name, facts in ((name, facts_on(name)) for name in MACHINES)
    }
    assert large == on(False, A100=True, H100=True, no_GPU=True, old_driver=True)


def test_blocks_on_two_gpus_need_two_gpus():
    "They were said to fit a machine with one."
    split = dict(model=dict(quantize="nf4"), train=dict(device="cuda:0", model_parallel_devices=["cuda:0", "cuda:1"]))
    one, two = (facts_on(name, **split) for name in ("T4", "2 x T4"))
    assert not fits_machine(make_plan(*one), one) and fits_machine(make_plan(*two), two)


def test_after_out_of_memory_the_plan_is_made_again():
    facts = facts_on("T4")
    first = plan = make_plan(*facts)
    shown, steps = repr(first), []
    while plan is not None and len(steps) < 20:
        steps.append(plan)
        plan = smaller(plan, facts)
    settings = [change.setting for change in steps[-1].changes]
    assert (
        settings[:4] == ["model.quantize", "model.quantize", "train.offload_activations", "train.blocks_to_swap"]
        and len(steps) < 20
    )
    assert steps[1].quantize.value == "qint8" and steps[2].quantize.value == "nf4" and steps[3].offload.value
    assert all(change.saved > 0 for change in steps[-1].changes)
    assert repr(first) == shown and facts == facts_on("T4"), "what was made before stays as it was"
    for made in steps:
        with pytest.raises(FrozenInstanceError):
            made.changes = ()


def test_the_first_plan_that_fits():
    facts = facts_on("T4", model=dict(quantize="nf4"))
    found = first_that_fits(make_plan(*facts), facts)
    assert [str(change) for change in found.changes] == ["`train.offload_activations` true"]
    tiny_gpu = facts._replace(machine=replace(OWN, gpus=(replace(T4, bytes=1 * GB),)))
    assert first_that_fits(make_plan(*tiny_gpu), tiny_gpu) is None
    ready = facts_on("H100")
    assert first_that_fits(make_plan(*ready), ready).changes == ()


def test_savings_are_counted_in_the_dtype_of_the_machine():
    on_t4, on_h100 = (
        {change.setting: change.saved for change in ways_to_save(facts_on(name))} for name in ("T4", "H100")
    )
    assert on_t4["model.quantize"] > 1.9 * on_h100["model.quantize"], "a T4 holds the base in float32"


@pytest.mark.parametrize(
    "learned",
    [
        dict(rows="float32"), # an adapter was loaded, so the weights are known
        dict(steps=100, obstacle="the LoRA has dropout"), # the transformer is loaded
        dict(quantize="nf4"),
    ],
)
def test_a_plan_is_made_again_with_new_facts_and_never_patched(learned):
    planner = Planner(dict(train=dict(max_train_steps=1000)))
    before = planner.plan
    shown = repr(before)
    planner.learn(**learned)
    assert repr(before) == shown and before is not planner.plan
    assert planner.plan == make_plan(*planner.facts)
    with pytest.raises(FrozenInstanceError):
        before.device = None
    with pytest.raises(FrozenInstanceError):
        planner.so_far.steps = 3


# --- the text encoder's precision
NF4_CACHE = dict(cached=("nf4",), entries=50)


def text_facts(name, side, **more) -> TextEncoderFacts:
    "Those of the published model on a machine, for images of a size."
    plan, machine = plan_on(name), MACHINES[name]
    base_bytes = 4 if plan.dtype.value == "float32" else 2
    room = encoder_room(machine, plan.text_encoder_device.value)
    return TextEncoderFacts(encoding_bytes(side * side, base_bytes), room, **more)


def text_kinds(side, **more) -> dict: # {machine: kind}
    "What `auto` is on each machine."
    found = {}
    for name in MACHINES:
        so_far = SoFar(text_encoder=text_facts(name, side, **more))
        found[name] = plan_on(name, so_far, model=dict(text_encoder_quantize="auto")).text_encoder_quantize.value
    return found


def test_a_new_cache_is_encoded_by_the_most_exact_text_encoder_that_fits():
    small = {"T4": "qint8", "2 x T4": "qint8", "RTX 3060": "qint8", "Kaggle's disk": "qint8"}
    assert text_kinds(512) == on(None) | small
    large = dict.fromkeys(small, "nf4")
    assert text_kinds(1024) == on(None) | large, "the VAE needs more beside it"


def test_the_kind_of_a_filled_cache_is_kept():
    assert text_kinds(512, **NF4_CACHE) == on("nf4")
    assert text_kinds(512, cached=("nf4",)) == text_kinds(512), "a manifest without entries decides nothing"
    so_far = SoFar(text_encoder=text_facts("T4", 512, **NF4_CACHE))
    choice = plan_on("T4", so_far, model=dict(text_encoder_quantize="auto")).text_encoder_quantize
    assert choice.why == "the cache holds 50 entries of nf4" and not choice.asked
    plain = choose_text_encoder_quantize("auto", facts=text_facts("T4", 512, cached=(None,), entries=7))
    assert plain.value is None and plain.why == "the cache holds 7 entries of a plain text encoder"
    both = choose_text_encoder_quantize("auto", facts=text_facts("H100", 512, cached=("nf4", "qint8"), entries=9))
    assert both.value == "qint8" and both.why == "the cache holds entries of nf4 and qint8"
    other = choose_text_encoder_quantize("auto", facts=text_facts("H100", 512, cached=("qint4",), entries=9))
    assert other.value == "qint4", "also a kind that would not be chosen"


def test_a_setting_decides_the_text_encoder_itself():
    facts = text_facts("T4", 512, **NF4_CACHE)
    asked = choose_text_encoder_quantize("qfloat8", facts=facts)
    assert (asked.value, asked.asked) == ("qfloat8", True)
    for wanted in (False, "none", None):
        assert choose_text_encoder_quantize(wanted, facts=facts).value is None
    assert choose_text_encoder_quantize("auto", offload=True, facts=facts).value is None, "refused together"
    assert choose_text_encoder_quantize("auto") is None, "the files and the cache were not looked at yet"
    stored = replace(facts, stored="qint8")
    assert [choose_text_encoder_quantize(w, facts=stored).value for w in ("auto", False)] == ["qint8", "qint8"]
    small = replace(facts, cached=(), room=1.0)
    assert choose_text_encoder_quantize("auto", facts=small).value == "nf4", "the smallest, if none fits"


def test_kinds_are_those_of_this_variant_dtype_and_encoder():
    one = dict(variant="2511", dtype="float32")
    known = {
        "a": one | dict(text_encoder="1-2-nf4"),
        "b": one | dict(text_encoder="1-2-plain"),
        "c": one | dict(text_encoder="1-2-unheard"),
        "d": one | dict(text_encoder="1-2-qint8", dtype="bfloat16"),
        "e": one | dict(text_encoder="1-2-qint4", variant="v1"),
    }
    names = ("nf4", "qint8", "qint4")
    assert cached_kinds(known, "2511", "float32", names) == ("nf4", None)
    assert cached_kinds(known, "2511", "float32", names, "b") == (None,)
    assert cached_kinds({}, "2511", "float32", names) == ()


class Parts:
    "What the facts ask of a model that is not downloaded."
    variant = EditModel("tiny").variant
    areas = dict(control_area=512 * 512)
    quantize = {}

    def __init__(self, folder):
        self.folder = folder


class FilledCache:
    "A cache with three prompts by nf4, whose reads are counted."
    reads = 0

    def __init__(self, dtype):
        self.identity = dict(variant=Parts.variant.name, dtype=dtype, text_encoder="1-nf4")
        self.layers = [self]

    def identities(self):
        self.reads += 1
        return {"a": self.identity}

    def entries(self, kind):
        assert kind == "prompt_embed"
        yield from (("aa", 1), ("ab", 1), ("ac", 1))


def test_the_facts_of_a_text_encoder(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (7, 5))
    config = make_config(dict(data=dict(image_size=[512, 512], control_area=512 * 512)))
    machine, plan = MACHINES["T4"], plan_on("T4")
    found = text_encoder_facts(Parts(tmp_path), config, machine, plan)
    assert found == text_facts("T4", 512)
    cache = FilledCache("float32")
    filled = text_encoder_facts(Parts(tmp_path), config, machine, plan, cache)
    assert filled == replace(found, cached=("nf4",), entries=3) and cache.reads == 1
    assert not text_encoder_facts(Parts(tmp_path), config, machine, plan, FilledCache("bfloat16")).cached
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (5, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device=None: "old")
    assert "nf4" not in text_encoder_facts(Parts(tmp_path), config, machine, plan).bytes, "it cannot run there"
    unequal = replace(machine, gpus=(RTX4090, T4))
    assert [encoder_room(unequal, device) for device in ("cuda:0", "cuda:1")] == [room_of(T4)] * 2, (
        "all processes choose the same"
    )


def test_the_largest_image_of_a_pair_decides_about_the_text_encoder(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (7, 5))
    for side, control in ((512, 1024), (1024, 512)):
        config = make_config(dict(data=dict(image_size=[side, side], control_area=control * control)))
        found = text_encoder_facts(Parts(tmp_path), config, MACHINES["T4"], plan_on("T4"))
        assert found == text_facts("T4", 1024)


def test_what_ran_out_of_memory_once_is_decoded_on_the_cpu():
    fits = DecodingFacts("cuda:0", needed=1 * GB, free=9 * GB)
    main = Choice("cuda:0")
    assert choose_decoder(main, fits).value == "cuda:0"
    assert choose_decoder(main, fits, failed="cuda:0").value == "cpu"
    assert choose_decoder(main, replace(fits, needed=9.5 * GB)).value == "cpu"


# --- settings that decide instead, and presets
def overriding() -> dict:
    "{field of the plan: the settings that decide it}"
    out = {}
    for one in all_settings():
        for name in one.role.overrides:
            out.setdefault(name, set()).add(one.name)
    return out


def test_every_setting_that_overrides_names_a_decision_of_the_plan():
    assert overriding().keys() == {f.name for f in fields(Plan)} - {"changes"}
    with pytest.raises(TypeError):
        setting(1, "help", overrides="compile")
    assert setting(1, "help", on_resume="may change", overrides="compile").json_schema_extra["overrides"] == (
        "compile",
    )


@pytest.mark.parametrize(
    "sections",
    [
        {},
        SMALL,
        dict(train=dict(model_parallel_devices=["cuda:0", "cuda:1"])),
        dict(train=dict(mixed_precision="no", compile=True)),
    ],
)
def test_every_choice_names_a_setting_that_declares_it(sections):
    declared = overriding()
    for name in MACHINES:
        plan = plan_on(name, **sections)
        assert not [field for field, choice in plan.choices().items() if choice.setting not in declared[field]]
        assert not [row for row in plan.rows() if not row.setting.startswith("`")], "the table shows the setting"


def test_settings_that_override_are_listed_together():
    options = describe()
    listed = {row[0] for row in options.groups()[PLANNED]}
    assert listed == set().union(*overriding().values())
    assert f"# {PLANNED}\n" in repr(options) and f"### {PLANNED}\n\n{ABOUT_PLANNED}" in options.markdown()


CARD = { # {preset: (its card as data, number of cards, the plan's dtype, products)}
    "t4": (T4, 1, "float32", SCALED),
    "t4x2": (T4, 2, "float32", SCALED),
    "l4": (GpuInfo("NVIDIA L4", 23_600_000_000, (8, 9)), 1, "bfloat16", AS_DTYPE),
    "rtx3060": (RTX3060, 1, "bfloat16", AS_DTYPE),
    "rtx4080": (GpuInfo("NVIDIA GeForce RTX 4080", 16_750_000_000, (8, 9)), 1, "bfloat16", AS_DTYPE),
    "rtx3090": (GpuInfo("NVIDIA GeForce RTX 3090", 25_340_000_000, (8, 6)), 1, "bfloat16", AS_DTYPE),
    "rtx4090": (replace(RTX4090, free=None), 1, "bfloat16", AS_DTYPE),
    "rtx5090": (GpuInfo("NVIDIA GeForce RTX 5090", 33_600_000_000, (12, 0)), 1, "bfloat16", AS_DTYPE),
    "a100": (A100, 1, "bfloat16", AS_DTYPE),
    "a100-80": (GpuInfo("NVIDIA A100-SXM4-80GB", 85_000_000_000, (8, 0)), 1, "bfloat16", AS_DTYPE),
    "h100": (H100, 1, "bfloat16", AS_DTYPE),
}
DIFFERS = { # {(preset, decision): why the preset decides otherwise than the plan would}
    (
        "a100-80",
        "compile",
    ): "uncompiled blocks without recomputation take more memory than there is, also in a short run",
    ("h100", "compile"): "the same",
}


@pytest.mark.parametrize("side", [512, 1024])
@pytest.mark.parametrize("name", GPU_PRESETS)
def test_a_preset_is_the_plans_choice_for_its_card(name, side):
    gpu, count, dtype, products = CARD[name]
    data, train = dict(image_size=[side, side], control_area=side * side), dict(max_train_steps=400)
    config = make_config(dict(preset=name, data=data, train=train))
    facts = PlanFacts(config, replace(OWN, gpus=(gpu,) * count), MODEL, PAIRS)
    made = make_plan(*facts)
    assert fits_machine(made, facts) and (made.dtype.value, made.products.value, made.processes.value) == (
        dtype,
        products,
        count,
    )
    wanted = plan("2511", Gpu(gpu.name, gpu.bytes, gpu.bf16, count), config=dict(data=data, train=train))
    chosen = wanted.chosen.query
    assert (made.quantize.value, made.offload.value, made.block_swap.value, config.train.gradient_checkpointing) == (
        chosen.quantization,
        chosen.offload,
        chosen.block_swap,
        chosen.checkpointing,
    )
    alone = make_plan(
        *facts._replace(
            config=config.model_copy(update=dict(train=config.train.model_copy(update=dict(compile="auto"))))
        )
    )
    differing = {
        (name, field) for field, choice in made.choices().items() if choice.value != getattr(alone, field).value
    }
    assert differing == {key for key in DIFFERS if key[0] == name}


def test_presets_are_literal_tables():
    assert CARD.keys() == GPU_PRESETS.keys()
    tree = ast.parse(Path(presets.__file__).read_text())
    value = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and node.target.id == "GPU_PRESETS"
    )
    assert ast.literal_eval(value) == GPU_PRESETS


# --- a driver that is too old for torch
TOO_OLD = "driver 535.183.01 is too old for torch built with CUDA 13.0, which needs 580 or later; update it"
WHEELS = "--index-url https://download.pytorch.org/whl/cu126"


def test_a_large_model_is_not_trained_on_the_cpu_beside_a_gpu_that_an_old_driver_hides():
    plan = plan_on("old driver")
    with pytest.raises(ValueError, match=TOO_OLD) as refused:
        plan.device.checked()
    said = str(refused.value)
    assert WHEELS in said and said.endswith("; or set `train.device` to cpu")
    row = next(row for row in plan.rows() if row.what == "device")
    assert row.why == said, "the table says it, too"
    small = ModelFacts(dict(REAL, num_layers=1))
    for choice in (
        plan_on("old driver", facts=small).device,
        plan_on("old driver", facts=None).device,
        plan_on("old driver", train=dict(device="cpu")).device,
        plan_on("old driver", SoFar(device="cpu")).device,
        plan_on("no GPU").device,
    ):
        assert choice.checked() == "cpu"
    assert plan_on("old driver", facts=small).device.why.startswith(TOO_OLD)


@pytest.mark.parametrize(
    "facts, words, without",
    [
        ({}, [TOO_OLD, WHEELS], "Windows"),
        (dict(driver="470.256.02"), ["driver 470.256.02 is too old", "; update it"], WHEELS),
        (dict(driver="470.256.02", cuda="12.8"), ["CUDA 12.8, which needs 525 or later"], WHEELS),
        (dict(driver=UNKNOWN, wsl2=True), ["missing or too old for torch", "driver in Windows", WHEELS], "update it"),
        (dict(driver=UNKNOWN), ["the NVIDIA driver is missing or too old for torch built with CUDA 13.0"], "Windows"),
    ],
)
def test_what_an_old_driver_needs(facts, words, without):
    said = old_driver(replace(MACHINES["old driver"], **facts))
    assert all(word in said for word in words) and without not in said


@pytest.mark.parametrize(
    "facts",
    [dict(driver=""), dict(driver="580.65.06"), dict(driver="525.60.13", cuda="12.6"), dict(cuda=""), dict(gpus=(T4,))],
)
def test_what_is_no_old_driver(facts):
    machine = replace(MACHINES["old driver"], **facts)
    assert old_driver(machine) == "" and choose_device("auto", machine, parameters=20e9).checked()


# --- no recomputation without a compiler
UNCOMPILED = { # {why: (the machine's facts, sections)}
    "there is no C compiler here": (dict(compiler=False), {}),
    "there is no Python.h here (Debian and Ubuntu: apt install python3-dev)": (dict(headers=False), {}),
    "triton is not installed": (dict(triton=False), {}),
    "`model.lora.lora_dropout` draws random masks": ({}, dict(model=dict(lora=dict(lora_dropout=0.1)))),
}


def plan_of_preset(name, facts, so_far=SoFar(), side=1024, **sections):
    "The facts and the plan of a preset on its card."
    data = dict(image_size=[side, side], control_area=side * side)
    config = make_config(dict(preset=name, data=data, **sections))
    machine = replace(OWN, gpus=(CARD[name][0],), **facts)
    all_facts = PlanFacts(config, machine, MODEL, PAIRS, so_far)
    return all_facts, make_plan(*all_facts)


@pytest.mark.parametrize("name", ["h100", "a100-80"])
@pytest.mark.parametrize("why", UNCOMPILED)
def test_a_run_that_cannot_be_compiled_recomputes(why, name):
    machine, sections = UNCOMPILED[why]
    facts, plan = plan_of_preset(name, machine, **sections)
    assert (plan.compile.value, plan.compile.why) == (False, why)
    choice = plan.checkpointing
    assert (choice.value, choice.asked) == ("selective", False) and fits_machine(plan, facts)
    now = step_memory(plan, facts).total / 1e9
    kept = replace(plan, checkpointing=Choice(False))
    before = step_memory(kept, facts).total / 1e9
    size = CARD[name][0].bytes / 1e9
    assert not fits_machine(kept, facts) and before > 2 * now
    figures = f"would take {before:.1f} of {size:.1f} GB, this one takes {now:.1f}"
    assert choice.warning == (
        "`train.gradient_checkpointing` is selective in this run: an uncompiled step without recomputation " + figures
    )


@pytest.mark.parametrize("name", ["h100", "a100-80"])
def test_a_compiler_that_fails_counts_like_one_that_is_missing(name):
    _, plan = plan_of_preset(name, {})
    assert plan.compile.value and plan.checkpointing.value is False and not plan.checkpointing.warning
    failed = SoFar(steps=800, obstacle="compiling failed (BackendCompilerFailed: no such instruction)")
    facts, plan = plan_of_preset(name, {}, failed)
    assert plan.checkpointing.value == "selective" and fits_machine(plan, facts)


def test_what_fits_uncompiled_stays_as_it_is_set():
    small = ModelFacts(dict(REAL, num_layers=2))
    facts, _ = plan_of_preset("h100", dict(headers=False))
    for choice in (
        make_plan(*facts._replace(model=small)).checkpointing,
        make_plan(*facts._replace(model=None)).checkpointing,
        plan_of_preset("h100", dict(headers=False), side=256)[1].checkpointing,
        plan_on("no GPU", train=dict(gradient_checkpointing=False, compile=True)).checkpointing,
        plan_of_preset("h100", {}, train=dict(compile=False))[1].checkpointing,
    ):
        assert choice.value is False and choice.asked and not choice.warning
    assert plan_on("H100").checkpointing == Choice(
        True, "`train.gradient_checkpointing` is true", "train.gradient_checkpointing"
    )
    larger = replace(H100, bytes=36 * GB)
    config = make_config(dict(train=dict(gradient_checkpointing=False, compile=True)))
    least = make_plan(config, replace(OWN, gpus=(larger,), headers=False), MODEL).checkpointing
    assert least.value is True, "selective checkpointing does not fit either"


def test_the_memory_of_a_plan_is_counted_as_it_runs():
    "By the decision to compile, and not by the setting."
    whole = dict(gradient_checkpointing=False, compile="auto")
    for steps, compiled in ((1000, True), (100, False)):
        facts = facts_on("H100", train=dict(whole, max_train_steps=steps))
        memory = step_memory(make_plan(*facts), facts)
        assert memory.query.compiled == compiled
    dropout = dict(lora=dict(lora_dropout=0.1))
    assert not plan("2511", "H100", 512, config=dict(model=dropout, train=whole)).asked.query.compiled
    assert plan("2511", "H100", 512, config=dict(train=whole)).asked.query.compiled
