"""What a training step does beyond a bare loop of the same transformer, counted and not timed."""
import json

import fake_device, step_cpu as cost, step_gpu as gpu, table as tables # of benchmarks/
import pytest
import torch

from helpers import slow
from qie_nb.lora.adapters import lora_state
from qie_nb.trainer import QwenImageEditTrainer

LAYERS = (2, 3, 4)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "Models of 2, 3 and 4 blocks and one of another variant, with filled caches: {name: configuration(**changes)}."
    root = tmp_path_factory.mktemp("costs")
    models = {n: cost.model_folder(root/f"{n}"/"2511", n) for n in LAYERS} | {"2509": cost.model_folder(root/"2509", 2, "2509")}
    cost.precomputed(root, models[2], models["2509"], captions=("invert", "invert the colours of all that is here"))
    return lambda name, *a, **kw: cost.configuration(root, models[name], *a, **kw)


def total(row): return sum(row["operations"].values())


CHECKPOINTING, DROPOUT = dict(train=dict(gradient_checkpointing=True)), dict(model=dict(lora=dict(r=4, lora_dropout=0.1)))
MEAN = dict(train=dict(ema_decay=0.9, gradient_accumulation_steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("batch, table, more", [(1, True, {}), (2, True, {}), (1, False, {}), (1, True, CHECKPOINTING)])
def test_a_step_adds_few_operations_to_the_bare_loop_whatever_the_models_depth(batch, table, more, world):
    over, whole = {}, {}
    for n in LAYERS:
        rows, bare, _ = cost.counted(world(n, batch, 5, table=table, **more))
        assert total(rows[0]) == total(rows[1]), "each step does the same"
        assert any("backward" in k for k in bare["operations"]), "the backward pass is counted"
        over[n], whole[n] = total(rows[0]) - total(bare), total(bare)
    assert whole[4] - whole[3] == whole[3] - whole[2] > 150, "the bare loop grows by the block"
    assert len(set(over.values())) == 1 and over[2] <= 41 + 2 * (batch - 1), over


@pytest.mark.parametrize("sections", [slow({}), MEAN, slow(DROPOUT)])
def test_a_step_walks_over_no_modules_calls_no_encoder_and_makes_no_scheduler(sections, world):
    rows, *_ = cost.counted(world(2, steps=4, **sections))
    assert len(rows) == 2
    for r in rows: assert r["walked"] == 0 and r["built"] == {}, r


@pytest.mark.slow
def test_a_logged_row_walks_over_no_modules_either(world, tmp_path):
    rows, _, trainer = cost.counted(world(2, every=1, logging=dict(report_to="tensorboard", log_dir=str(tmp_path), log_images=False, panel=False)))
    assert all(r["walked"] < len(list(trainer.transformer.modules())) / 5 for r in rows), "a look at the first parameter"


TABLELESS, WEIGHTED = dict(model=dict(modulation_table=False)), dict(train=dict(loss_weighting="cosmap", timestep_sampling="shift"))


@pytest.mark.slow
@pytest.mark.parametrize("sections", [MEAN, CHECKPOINTING, TABLELESS, DROPOUT, WEIGHTED])
def test_the_host_waits_for_nothing_between_logged_steps(sections, world):
    rows, _ = cost.waited(world("2509", every=3, **sections))
    assert all(sum(r["launched"].values()) > 300 for r in rows)
    assert [dict(r["waits"]) for r in rows] == [{"a copy to the host": 1}, {}, {}, {"a copy to the host": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_zero_cond_t_waits_once_per_batch(accumulate, world):
    rows, _ = cost.waited(world(2, every=10, train=dict(gradient_accumulation_steps=accumulate)))
    assert [dict(r["waits"]) for r in rows[:-1]] == [{"a blocking copy to the device": accumulate}] * 3


@pytest.mark.slow
def test_prompts_of_unequal_length_wait_for_no_more(world):
    rows, bare = cost.waited(world("2509", 4, every=10))
    assert bare["waits"]["a blocking copy to the device"] == 1
    for r in rows[:-1]: assert set(r["waits"]) <= {"a blocking copy to the device"} and sum(r["waits"].values()) <= 1


@pytest.mark.slow
def test_training_on_the_pretended_device_is_training(world):
    plain = QwenImageEditTrainer(world("2509", out="plain", optimizer=dict(eps=1e-3))).fit()
    t = QwenImageEditTrainer(world("2509", out="there", optimizer=dict(eps=1e-3))).set_lora()
    with fake_device.pretended():
        t.device = fake_device.DEVICE
        fake_device.send(t.transformer)
        t.fit()
        there = list(lora_state(t.transformer).values())
    for a, b in zip(lora_state(plain.transformer).values(), there, strict=True): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("why, act", [
    ("_local_scalar_dense", lambda x: float(x[0])), ("nonzero", lambda x: x.nonzero()), ("index", lambda x: x[x > 0]), ("a copy to the host", lambda x: x.cpu()),
    ("a blocking copy to the device", lambda x: torch.tensor([1, 2], device=x.device))])
def test_the_account_notices_what_waits(why, act):
    with fake_device.pretended() as device:
        x = torch.ones(3).to(fake_device.DEVICE, non_blocking=True)
        assert not (x * 2 + torch.ones((), device=fake_device.DEVICE)).sum().requires_grad and not device.waits and device.sent == 1
        act(x)
    assert len(device.waits) == 1 and why in next(iter(device.waits))


@pytest.mark.weekly
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path):
    out = tmp_path/"gpu.json"
    got = gpu.main(["--tiny", "--steps", "2", "--warm", "2", "--minutes", "999", "--out", str(out)])
    assert set(got) >= set(gpu.PARTS) and json.loads(out.read_text()).keys() == got.keys()
    for part in gpu.PARTS:
        for name, row in got[part].items(): assert row.get("failed", "not there").startswith("not there"), (part, name, row)
    measured = [r for r in got["ours"].values() if "step_s" in r]
    assert measured and not any(r["graphs_made_later"] for r in measured)
    assert all(r["finite"] for p in ("bare", "ours", "small") for r in got[p].values() if "step_s" in r) and "step_s" in got["bare"]["1024"]
    assert tables.gpu_table(got).startswith("Not yet measured") and "relative to the limit" in tables.gpu_table(got | dict(tiny=False))


@pytest.mark.slow
def test_a_mode_that_fails_leaves_the_others_and_is_tried_again(tmp_path, monkeypatch):
    calls = []
    def fails(): calls.append("a"); raise torch.OutOfMemoryError("CUDA out of memory")
    def fits(): calls.append("b"); return dict(step_s=1)
    monkeypatch.setitem(gpu.PARTS, "ours", lambda b: (b.measure("ours", "too big", fails), b.measure("ours", "fits", fits)))
    for _ in range(2): got = gpu.main(["--tiny", "--part", "ours", "--out", str(tmp_path/"gpu.json")])
    assert calls == ["a", "b", "a"] and got["ours"]["too big"]["failed"].startswith("OutOfMemoryError") and got["ours"]["fits"]["step_s"] == 1


@pytest.mark.slow
def test_the_docs_tables_are_current():
    for (page, mark), make in tables.TABLES.items():
        page_text = (tables.DOCS/f"{page}.md").read_text()
        assert make() in page_text, f"the table {mark} is old; python benchmarks/table.py --write"
