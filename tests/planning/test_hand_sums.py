"""The memory plan against sums that were worked out by hand from the code of the model, without the plan's functions.

Each is of one GPU and one process; what several processes need besides is a row of its own."""
from dataclasses import replace

import pytest

from qie_nb.config import make_config
from qie_nb.core.choice import Choice
from qie_nb.planning.cards import parse_gpu, plan
from qie_nb.planning.decisions import fits_gpus, room_of
from qie_nb.planning.facts import GpuInfo, Machine, ModelFacts
from qie_nb.planning.memory import NCCL, REAL, memory_of, model_facts, sampling_bytes
from qie_nb.planning.plan import PlanFacts, fits_machine, make_plan, step_memory, ways_to_save

GB = 1e9
T4 = GpuInfo("Tesla T4", 15_635_660_288, (7, 5), False)
NEAR = 0.03


def settings_of(side, quantize=False, control=None, **train):
    "A configuration of this size."
    data = dict(image_size=[side, side], control_area=(control or side)**2)
    return dict(model=dict(quantize=quantize), data=data, train=train)


# weights, adapter with gradient and AdamW, block inputs, attention outputs, one block, context; in GB
T4_512 = 7.19 + 0.37 + 1.69 + 0.85 + 0.02 + 0.85 + 0.7
RTX4090_1024 = 13.68 + 0.37 + 6.33 + 1.6 + 0.7
# 60 blocks x 52 MB x (12 saved tensors and 2 to 3 of the modulation by token)
H100_1024 = 27.3 + 0.4 + (43.5 + 46.7) / 2 + 0.4 + 0.7


@pytest.mark.parametrize("gpu, config, low, high", [
    ("T4", settings_of(512, "nf4", gradient_checkpointing="selective"), T4_512, T4_512),
    ("RTX 4090", settings_of(1024, "qfloat8", gradient_checkpointing="selective"), RTX4090_1024, 23.1),
    ("H100", settings_of(1024, gradient_checkpointing=False, compile=True), 72, 75.5)], ids=["T4", "RTX 4090", "H100"])
def test_the_memory_of_three_cards(gpu, config, low, high):
    step = plan("2511", gpu, config=config).asked
    assert step.query.processes == 1 and not step.part("NCCL")
    assert low * (1 - NEAR) <= step.total / GB <= high * (1 + NEAR)


def test_the_sums_are_as_they_were_written_down():
    assert round(T4_512, 1) == 11.7 and round(RTX4090_1024, 1) == 22.7 and 72 < H100_1024 < 75.5


def test_two_processes_need_their_exchange_besides():
    one, two = (plan("2511", gpu, config=settings_of(512, "nf4")).chosen for gpu in ("T4", "2xT4"))
    assert two.query.processes == 2 and two.part("NCCL") == NCCL == 0.3 * GB
    assert two.total == one.total + NCCL and memory_of(two.query, gpu=False).part("NCCL") == 0


# --- a T4 computes in float32, and multiplies in scaled float16
ROWS = [ # (configuration, as bfloat16 would be, as it is)
    (settings_of(512, "nf4", control=1024, gradient_checkpointing="selective"), 12.93, 15.84),
    (settings_of(512, "nf4", gradient_checkpointing="selective") | dict(
        data=dict(image_size=[512, 512], control_area=512**2, batch_size=2)), 12.27, 14.74),
    (settings_of(768, "nf4", gradient_checkpointing="selective"), 12.48, 15.13),
    (settings_of(1024, "nf4", gradient_checkpointing=True), 12.50, 16.99)]


def facts_on(gpu, config, count=2, **more):
    "All that the plan of a configuration is made from."
    machine = Machine((gpu,) * count, compiler=True, headers=True, triton=True, **more)
    return PlanFacts(make_config(config), machine, ModelFacts(REAL))


@pytest.mark.parametrize("config, halved, real", ROWS)
def test_what_fits_neither_of_two_t4s_starts_one_process(config, halved, real):
    facts = facts_on(T4, config)
    made = make_plan(*facts)
    step = step_memory(made, facts)
    assert step.query.base_bytes == 4 and step.query.fp16
    assert step.total / GB == pytest.approx(real, rel=NEAR)
    assert made.processes.value == 1 and not fits_machine(made, facts)
    assert fits_gpus(halved * GB, [room_of(T4)]), "as it was counted"
    planned = plan("2511", parse_gpu("2xT4"), config=config, transformer=REAL)
    assert planned.asked.total == step.total, "the doctor and `plan` agree"


def test_savings_are_those_of_the_cards_dtype():
    facts = facts_on(T4, settings_of(512, "none", gradient_checkpointing=True), 1)
    other = facts_on(GpuInfo("L4", T4.bytes, (8, 9)), settings_of(512, "none", gradient_checkpointing=True), 1)
    four, half = (ways_to_save(found)[0] for found in (facts, other))
    assert four.setting == half.setting == "model.quantize" and four.saved > 1.9 * half.saved


# --- what does not compile is not counted as compiled
@pytest.mark.parametrize("train, compiler, compiled", [
    ({}, True, True), ({}, False, False), (dict(compile=True), False, False), (dict(compile=False), True, False),
    (dict(max_train_steps=100), True, False)])
def test_memory_is_that_of_the_plans_decision(train, compiler, compiled):
    facts = facts_on(GpuInfo("H100", 85_000_000_000, (9, 0)), settings_of(1024, **train), 1)
    facts = facts._replace(machine=Machine(facts.machine.gpus, compiler=compiler, headers=compiler, triton=True))
    made = make_plan(*facts)
    assert made.compile.value == compiled == step_memory(made, facts).query.compiled


def test_without_a_compiler_a_step_recomputes_because_it_would_not_fit():
    facts = facts_on(
        GpuInfo("H100", 85_000_000_000, (9, 0)), settings_of(1024, gradient_checkpointing=False, compile=True), 1)
    newest = ModelFacts(model_facts("2511").transformer, variant="2511")
    facts = facts._replace(model=newest)
    assert fits_machine(make_plan(*facts), facts)
    bare = facts._replace(machine=Machine(facts.machine.gpus, triton=True))
    made = make_plan(*bare)
    assert made.checkpointing.value == "selective" and fits_machine(made, bare)
    as_set = replace(made, checkpointing=Choice(False))
    assert not fits_machine(as_set, bare) and step_memory(as_set, bare).total > 93 * GB


# --- evaluation and saving
@pytest.mark.parametrize("gpu, side, expected", [
    (T4, 512, "cuda:0"), (T4, 1024, "cpu"), (GpuInfo("RTX 3060", 12_563_000_000, (8, 6)), 1024, "cpu"),
    (GpuInfo("RTX 4090", 25_340_000_000, (8, 9)), 1024, "cuda:0")])
def test_the_decoder_of_an_evaluation_is_placed_by_the_plan(gpu, side, expected):
    facts = facts_on(gpu, settings_of(side, "nf4"), 1)
    decoder = make_plan(*facts).decoder
    assert decoder.value == expected and decoder.setting == "predict.devices.vae"
    assert decoder.why.startswith("fits: " if expected == "cuda:0" else "too large: ")
    here = dict(predict=dict(devices=dict(vae="cuda:0")))
    asked = make_plan(make_config(settings_of(side, "nf4") | here), *facts[1:])
    assert asked.decoder == Choice("cuda:0", "`predict.devices.vae` says so", "predict.devices.vae", True)


def test_styles_are_decoded_at_the_size_of_control_images():
    styles = settings_of(512, "nf4", control=1024, test_image_dir="styles")
    assert make_plan(*facts_on(T4, styles, 1)).decoder.value == "cpu"
    plain = settings_of(512, "nf4", control=1024)
    assert make_plan(*facts_on(T4, plain, 1)).decoder.value == "cuda:0"
    small_controls = settings_of(1024, "nf4", control=512, test_image_dir="styles")
    assert make_plan(*facts_on(T4, small_controls, 1)).decoder.value == "cpu", "targets are decoded, too"


@pytest.mark.parametrize("gpu", ["T4", "RTX 3060", "H100"])
def test_evaluation_and_saving_have_rows(gpu, tmp_path):
    lora = tmp_path/"fast.safetensors"
    lora.write_bytes(bytes(1000))
    p = plan("2511", gpu, config=settings_of(1024, eval_schedule=str(lora), ema_decay=0.99, keep_checkpoints=4))
    rows = dict(p.other)
    device = "cuda:0, fits" if gpu == "H100" else "cpu, too large"
    assert rows["evaluation: VAE"].startswith(device) and "`train.eval_schedule`" in rows["evaluation: sampling"]
    assert "5 x 0.4 GB (adapter, optimizer, EMA" in rows["saving"] and "evaluation: VAE" in repr(p)
    assert "host memory 0.8 GB" in rows["saving"]
    for step in p.tried:
        assert step.kept + sampling_bytes(step.query) <= step.total, "sampling fits where a step fits"
