"""What the planner chooses for a GPU, and the settings it writes."""
import json
from dataclasses import replace

import pytest
import torch
import yaml

from qie_nb.cli import main
from qie_nb.core.presets import GPU_PRESETS
from qie_nb.config import make_config
from qie_nb.planning.memory import MemoryQuery, memory_of, memory_query, model_facts
from qie_nb.planning.cards import run_seconds, step_seconds
from qie_nb.planning.cards import (
    GPUS, Gpu, encoder_settings, parse_gpu, plan, rank_cost, strategies, strategy_name, strategy_settings)

SMALL = dict(num_layers=3, num_attention_heads=2, attention_head_dim=64, joint_attention_dim=128, in_channels=64)


@pytest.mark.parametrize("names, gpu", [
    (("T4", "Tesla T4", "nvidia t4"), GPUS["T4"]),
    (("2xT4", "T4 x2"), replace(GPUS["T4"], count=2)),
    (("A100", "A100 40GB", "NVIDIA A100-SXM4-40GB"), GPUS["A100 40"]),
    (("2 x NVIDIA A100-SXM4-80GB",), replace(GPUS["A100 80"], count=2)),
    (("H100 80GB", "NVIDIA H100 80GB HBM3"), GPUS["H100"]),
    (("5090",), GPUS["RTX 5090"]),
    (("RTX 2070 8GB x4",), replace(GPUS["RTX 2070"], count=4)),
    ((24, "24 GB"), Gpu("24 GB", 24 * 10**9)),
    (("NVIDIA L40S 48 GB", "L40S"), GPUS["L40S"]),
    (("RTX 2080 Ti 11GB",), GPUS["RTX 2080 Ti"]),
])
def test_gpus_by_name(names, gpu):
    assert [parse_gpu(n) for n in names] == [gpu] * len(names)


def test_a_wrong_resolution():
    with pytest.raises(ValueError, match="`resolution` must be a side or width x height in pixels, got 'big'"): plan(gpu="T4", resolution="big")


def test_two_processes_take_half_of_the_steps_and_no_pair_less():
    three = make_config(dict(train=dict(max_train_steps=3, num_processes=1)))
    found = strategy_settings(MemoryQuery(processes=2), three)["train"]
    assert (found["num_processes"], found["max_train_steps"]) == (2, 2)


@pytest.mark.slow
def test_choice_for_common_gpus():
    chosen = {gpu: plan("2511", gpu, 1024).chosen for gpu in ("RTX 4090", "A100-80", "H200")}
    assert {g: m.query.quantization for g, m in chosen.items()} == {"RTX 4090": "qfloat8", "A100-80": None, "H200": None}
    for gpu, m in chosen.items(): assert m.total <= 0.93 * parse_gpu(gpu).bytes
    p = plan("2511", "T4", 512)
    assert p.chosen.query.quantization == "nf4" and p.chosen.query.fp16 and not p.chosen.query.compiled and "4-bit (nf4) weights, scaled float16, " in repr(p)
    assert all(any(text in n for n in p.notes) for text in ("no native bfloat16", "scaled float16", "control_area"))
    assert plan("2511", "A100-80", 1024, quantize="nf4").chosen.query.quantization == "nf4"


def test_seven_percent_stay_free():
    on = lambda gpu: plan("v1", gpu, 512, transformer=SMALL)
    need = on(80).tried[0].total
    assert on(Gpu("large enough", int(need / 0.929))).chosen.total == need
    tight = on(Gpu("too small", int(need / 0.931)))
    assert tight.chosen is None or tight.chosen is not tight.tried[0]


@pytest.mark.parametrize("gpu, how, expected", [
    ("H100", "no", (4, False)), ("H100", "auto", (2, False)), ("H100", "bf16", (2, False)),
    ("T4", "auto", (4, True)), ("T4", "no", (4, False)), ("RTX 2080 Ti", "auto", (4, True)),
    ("RTX 4090", "auto", (2, False)), ("RTX 4090", "fp16", (4, True))])
def test_base_dtype_and_scaled_float16_follow_the_gpu_and_mixed_precision(gpu, how, expected):
    q = plan("v1", gpu, 512, config=dict(train=dict(mixed_precision=how)), transformer=SMALL).asked.query
    assert (q.base_bytes, q.fp16) == expected


def test_first_strategy_that_fits_is_chosen():
    p = plan("v1", "RTX 5090", 512)
    fits = [p.fits(m) for m in p.tried]
    assert p.chosen is p.tried[fits.index(True)] and [rank_cost(m.query) for m in p.tried] == sorted(rank_cost(m.query) for m in p.tried)
    assert p.data()["strategies"][fits.index(True)]["chosen"] and json.dumps(p.data())


@pytest.mark.parametrize("gpu", ["T4", "H200"])
def test_changes_make_the_chosen_configuration(gpu):
    raw = dict(model=dict(quantize="qint8"), data=dict(control_area=512 * 512))
    p = plan("2511", gpu, 512, config=raw)
    for section, keys in yaml.safe_load(yaml.safe_dump(p.changes)).items(): raw[section] = raw.get(section, {}) | keys
    again = plan("2511", gpu, config=raw)
    assert replace(again.asked.query, compiled=False) == replace(p.chosen.query, compiled=False) and not again.changes


CPU, SECOND = dict(cache=dict(vae_encoder_device="cpu")), dict(cache=dict(vae_encoder_device="cuda:1"))
AUTO = dict(model=dict(text_encoder_quantize="auto"))

@pytest.mark.parametrize("gpu, side, area, expected", [
    ("T4", 512, 1280, AUTO | CPU), ("T4", 512, 1024, AUTO), ("2xT4", 1280, 1280, AUTO | SECOND),
    ("2xT4", 1024, 1024, AUTO), ("L4", 512, 1280, AUTO), ("L4", 512, 1024, {}), ("H100", 1024, 1024, {})])
def test_encoders_are_made_to_fit(gpu, side, area, expected):
    c = make_config(dict(data=dict(image_size=[side, side], control_area=area**2)))
    q = memory_query(c, model_facts("2511")[0], 2 if gpu in ("L4", "H100") else 4)
    assert encoder_settings(q, parse_gpu(gpu), c) == expected


def test_settings_for_the_encoders_are_kept():
    q, t4, c = memory_query(make_config(None), model_facts("2511")[0], 4), parse_gpu("T4"), make_config(None)
    new = lambda **sections: encoder_settings(q, t4, make_config(sections))
    large = dict(data=dict(control_area=1280**2))
    assert new() == AUTO and new(model=dict(text_encoder_quantize="qint8")) == CPU, "eight bits leave less"
    query = memory_query(make_config(large), model_facts("2511")[0], 4)
    vae_here = make_config(large | dict(cache=dict(vae_encoder_device="cuda:0")))
    assert encoder_settings(query, t4, vae_here) == AUTO
    assert new(model=dict(text_encoder_offload=True)).get("model") is None
    assert new(model=dict(text_encoder_quantize="auto")) == {}, "it is set already"
    assert encoder_settings(q, None, c) == {}, "no GPU"
    assert encoder_settings(memory_query(c, model_facts("tiny")[0], 4), t4, c) == {}, "a tiny model"


@pytest.mark.parametrize("name", GPU_PRESETS)
@pytest.mark.parametrize("side", [512, 1024])
def test_presets_are_the_plans_choice(name, side):
    data = dict(image_size=[side, side], control_area=side * side)
    found = plan("2511", name, config=dict(data=data)).changes
    assert {f"{s}.{k}": v for s, keys in found.items() for k, v in keys.items()} == GPU_PRESETS[name][side > 512]
    p = plan(dict(preset=name, data=data), name)
    assert p.fits(p.asked) and not p.changes and p.asked.query.target * 256 == side * side


def test_compiled_blocks_are_requested():
    p = plan("2511", "H100", 1024)
    assert p.chosen.query.compiled and p.changes["train"] == dict(gradient_checkpointing=False, compile=True) and any("torch.compile" in n for n in p.notes)
    plain = plan("2511", "H100", 1024, config=dict(train=dict(compile=False)))
    assert plain.chosen.query.checkpointing == "selective" and not plain.chosen.query.compiled and not any("torch.compile" in n for n in plain.notes)


def test_strategies():
    found = strategies(MemoryQuery(compiled=True), replace(GPUS["T4"], count=2))
    names = [strategy_name(q) for q in found]
    assert {"bfloat16 weights, gradient checkpointing, block swap", "4-bit (nf4) weights, gradient checkpointing, activations offloaded to host memory",
            "8-bit (qint8) weights, gradient checkpointing, split over 2 GPUs", "bfloat16 weights, selective gradient checkpointing"} <= set(names)
    assert names.index("4-bit (nf4) weights, gradient checkpointing") < names.index("bfloat16 weights, gradient checkpointing, block swap")
    assert any(q.compiled for q in found) and not any(q.compiled for q in found if q.block_swap or q.offload or q.devices > 1 or q.quantization)
    assert not any(q.devices > 1 and (q.block_swap or q.offload) for q in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_configuration_is_shown():
    p = plan(make_config(dict(data=dict(image_size=[512, 512]))))
    assert p.gpu is None and p.chosen is None and not p.changes and "saved activations" in repr(p) and "<table" in p._repr_html_()
    assert plan(config=dict(data=dict(image_size=[512, 512]))).asked.query == p.asked.query
    assert "no GPU found" in repr(plan("2511")) and plan(dict(preset="rtx4090")).gpu == GPUS["RTX 4090"], "a preset names a GPU"


def test_command(capsys, tmp_path):
    assert main(["plan", "--gpu", "L4", "--resolution", "512", "--model", "tiny"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("L4: bfloat16 weights, ") and " of 23.6 GB (computed)" in out and "chosen" in out and "settings:" in out and "saved activations" in out
    (tmp_path/"c.yaml").write_text("model: {quantize: nf4}")
    assert main(["plan", "--config", str(tmp_path/"c.yaml"), "--gpu", "24"]) == 0 and main(["plan", "--gpu", "voodoo"]) == 2


@pytest.mark.slow
def test_the_time_is_that_of_the_session_table():
    import session_table
    for products in ("float32", "float16"):
        p, _, phases = session_table.case("kaggle", 512, products)
        query = p.shown.query
        seconds = step_seconds(query, "Tesla T4") * session_table.samples_for(50)
        assert seconds == pytest.approx(phases["train"] * 1.84)
        assert query.processes == 2
    known = plan("2511", "RTX 4090", 1024, config=dict(train=dict(max_train_steps=100)))
    assert "for 100 samples" in repr(known) and known.data()["strategies"][0]["time"].endswith(" min") and "TFLOP" not in repr(known)
    assert not plan("2511", 48, 1024).time() and "TFLOP a step" in repr(plan("2511", 48, 1024)), "of unknown speed"


def test_the_tiny_model_has_its_own_control_size():
    p = plan("tiny", "T4", 96)
    assert p.asked.query.control == p.asked.query.target == 36 and not any("control images are larger" in n for n in p.notes)


@pytest.mark.slow
def test_the_table_of_cards(capsys):
    assert main(["plan", "--table"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 6 and all(r.count("|") == 6 for r in rows)
    assert "4-bit weights, both GPUs at once, 12 GB on each | 66 min" in rows[2]


def test_each_control_image_of_a_pair_counts():
    one, two = (plan("2511", "RTX 4090", 512, controls=n).asked for n in (1, 2))
    assert two.query.control == 2 * one.query.control
    assert two.total > one.total


def test_each_process_pins_host_memory_of_its_own():
    p = plan("2511", "2xT4", 512)
    step = memory_of(replace(p.chosen.query, block_swap=True, quantization=None, fp16=False))
    assert step.query.processes == 2 and step.host > 1e10
    roomy = replace(p, gpu=replace(p.gpu, bytes=10**12), host=2 * step.host)
    assert roomy.fits(step)
    assert not replace(roomy, host=1.5 * step.host).fits(step)


def test_a_batch_takes_its_time_once_for_all_its_samples():
    def seconds(batch):
        asked = plan("2511", "RTX 4090", 512, config=dict(data=dict(batch_size=batch))).asked
        return run_seconds(asked.query, "RTX 4090", 800)
    assert 0.8 * seconds(1) < seconds(4) < 1.2 * seconds(1)


def test_block_swap_takes_time():
    q = replace(plan("2511", "RTX 4090", 512).asked.query, checkpointing=True, compiled=False)
    assert step_seconds(replace(q, block_swap=True), "RTX 4090") > 1.05 * step_seconds(q, "RTX 4090")
