"""The whole path's figures against bytes on a disk, the published files and counted operations; what does not fit is said."""
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import write_pairs
from qie_nb.planning import path
from qie_nb.cli import main
from qie_nb.config import make_config
from qie_nb.planning.counting import empty_step, empty_transformer
from qie_nb.planning.training_memory import MemoryQuery, job_of
from qie_nb.planning.path import (LIMITS, WEIGHTS, cache_bytes, checkpoint_bytes, copy_bytes, encoding_work, forward_work, largest, model_files, rates_of, shard_sizes, steps_for,
                         table_bytes, whole_path)
from qie_nb.planning.plan import card_of
from qie_nb.models.quantize import held_bytes, quantize
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer

ROOT = Path(__file__).parents[2]
PLAIN = dict(train=dict(mixed_precision="no")) # float32 in products too
SMALL = PLAIN | dict(data=dict(control_area=512 * 512))
T4 = dict(model="2511", place="kaggle", pairs=50, gpu="2xT4", resolution=512, config=PLAIN)
size = lambda folder, kinds=None: sum(p.stat().st_size for k in (kinds or [""]) for p in (Path(folder)/k).rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A run on a tiny model: its trainer, the job as the planner sees it, and what lies on the disk."
    here = tmp_path_factory.mktemp("run")
    write_pairs(here/"set", ((64, 64),) * 6)
    t = QwenImageEditTrainer(dict(model=dict(pretrained_model_name_or_path=str(tiny_folder("2511", (64 * 64, 56 * 56))), lora=dict(r=8)),
        data=dict(dataset_path=str(here/"set"), image_size=[64, 64], control_area=64 * 64), logging=dict(report_to="none", log_images=False, log_dir=str(here/"runs")),
        train=dict(output_dir=str(here), device="cpu", mixed_precision="no", max_train_steps=2, save_interval=0, save_steps=1), cache=dict(cache_dir=str(here/"cache"))))
    t.cache_embeddings()
    t.fit()
    text = t.batch["prompt_embed"].shape[1]
    return t, here, job_of(t.config, dict(t.transformer.config), 4, target=16, control=16, text=text)


def test_cache_table_and_checkpoint_are_what_lies_on_the_disk(run):
    t, here, job = run
    kinds = [p.name for p in (here/"cache").iterdir() if p.is_dir() and not p.name.startswith(".")]
    assert table_bytes(job) == pytest.approx(size(here/"cache", ["modulation"]), rel=0.02)
    rest = size(here/"cache", [k for k in kinds if k not in ("modulation", "prompt_embeds_mask", "empty_prompt_embeds_mask", "quarantine")])
    assert cache_bytes(job, 6) == pytest.approx(rest, rel=0.15)
    assert checkpoint_bytes(job) == pytest.approx(size(here/"checkpoints"/"step_00000002"), rel=0.15)


@pytest.mark.parametrize("kind", [None, "nf4", "qint8"])
def test_a_prequantized_copy_is_what_such_a_model_holds(kind):
    job = MemoryQuery(layers=2, dim=256, heads=2, text_dim=96, kind=kind, wide=4, targets=("to_q",))
    tr = empty_transformer(replace(job, wide=2), "cpu")
    plain = tr.get_base_model() if hasattr(tr, "get_base_model") else tr
    for m in list(plain.modules()):
        if hasattr(m, "base_layer"): m.base_layer = quantize(torch.nn.Sequential(m.base_layer), kind)[0]
    assert copy_bytes(job) == pytest.approx(held_bytes(quantize(plain, kind)) - sum(p.nbytes for n, p in plain.named_parameters() if "lora_" in n), rel=0.02)


def test_published_files_and_the_rule_that_makes_them(tmp_path):
    published = [4_989_364_312, 4_984_214_160, 4_946_470_000, 4_984_213_736, 4_946_471_896, 4_946_451_560, 4_908_690_520, 4_984_232_856, 1_170_918_840]
    assert [round(a / 1e5) for a in shard_sizes(5e9)] == pytest.approx([round(a / 1e5) for a in published], abs=1)
    assert len(shard_sizes()) == 5 and max(shard_sizes()) == 9_987_271_168 < 1e10 < shard_sizes()[0] + min(shard_sizes()[1:]) + 1e8
    from diffusers import QwenImageTransformer2DModel
    tr = QwenImageTransformer2DModel.from_pretrained(tiny_folder("2511"), subfolder="transformer").to(torch.bfloat16)
    tr.save_pretrained(tmp_path, max_shard_size=300_000)
    made, out = sorted(p.stat().st_size for p in tmp_path.glob("*.safetensors")), [0]
    for p in tr.state_dict().values():
        if out[-1] and out[-1] + 2 * p.numel() > 300_000: out.append(0)
        out[-1] += 2 * p.numel()
    assert len(made) > 3 and len(made) == len(out), "the same rule as save_pretrained's"
    assert all(0 <= a - b < 8000 for a, b in zip(made, sorted(out)))


def test_a_folder_s_own_files_are_taken(tmp_path):
    folder = tiny_folder("2511")
    files = model_files(str(folder))
    assert {n for some in files.values() for n, _ in some} == {str(p.relative_to(folder)) for p in folder.glob("*/*.safetensors")}
    assert largest(files)[1] == max(p.stat().st_size for p in folder.glob("*/*.safetensors"))
    assert whole_path(str(folder), gpu="T4", pairs=4).data()["largest_file"][0] == largest(files)[0]


def test_a_forward_pass_is_counted():
    job = MemoryQuery(layers=2, dim=512, heads=4, text_dim=256, target=256, control=256, text=64, table=True, targets=("to_q",), kernel="flash", r=1)
    tr = empty_transformer(job)
    for m in list(tr.modules()):
        if hasattr(m, "disable_adapters"): m._disable_adapters = True
    loss, _ = empty_step(job, tr)
    with torch.no_grad(), FlopCounterMode(display=False) as flops: loss()
    assert forward_work(job) == pytest.approx(flops.get_total_flops(), rel=0.03)


@pytest.mark.parametrize("number", [0, 1])
def test_encoding_is_what_was_counted(number):
    row = json.loads((ROOT/"benchmarks"/"results"/"precompute.json").read_text())["operations"][number]
    seen = row["vision_patches"] // 4
    assert encoding_work(MemoryQuery(target=4096, control=4096, text=seen + 62)) == pytest.approx(row["total"]["ours"], rel=0.05)


# --- the north star
def test_every_phase_and_limit_is_there():
    d = whole_path(**T4, weights="hub").data()
    assert [p["phase"] for p in d["phases"]] == ["download", "quantize", "precompute", "train", "save"] and d["source"] == "computed, not measured"
    assert {"kept disk", "host memory", "GPU memory", "disk that is not kept", "time, all in one session"} <= {c[0] for c in d["checks"]}
    assert d["largest_file"] == ("transformer/diffusion_pytorch_model-00002-of-00005.safetensors", 9.99)
    assert all(p[k] >= 0 for p in d["phases"] for k in ("scratch_gb", "output_gb", "host_gb", "gpu_gb", "minutes")) and all(len(v) == 2 and v[1] for v in d["rates"].values())
    json.dumps(d)


def test_nine_hours_hold_small_controls_and_not_large_ones_in_float32():
    large, small = whole_path(**T4), whole_path(**T4 | dict(config=SMALL))
    fits = lambda w: {c[0]: c[3] for c in w.checks()}
    assert not fits(large)["time, all in one session"] and large.sessions > 1 and fits(small)["time, all in one session"] and small.sessions == 1
    assert [w.data()["tokens"] for w in (large, small)] == [5370, 2298]
    half = whole_path(**T4, fp16=True)
    assert half.hours < large.hours / 3 and fits(half)["time, all in one session"] and half.data()["products"] == "float16"
    train = next(p for p in large.phases if p.name == "train")
    assert dict((n, a) for n, a, _ in train.work)["800 steps"] == pytest.approx(800 * 293.3e12, rel=0.01) and large.rates["float32"][0] == 4.05e12


def test_the_plan_s_own_memory_is_what_training_takes():
    w = whole_path(**T4)
    assert dict((p.name, p.total("gpu")) for p in w.phases)["train"] == w.plan.chosen.total == w.plan.shown.total
    assert w.task.job == w.plan.chosen.job


def test_disk_by_where_the_weights_come_from():
    peak = {n: whole_path(**T4, weights=n, quantize="nf4") for n in WEIGHTS}
    scratch = {n: w.peak("scratch")[0] for n, w in peak.items()}
    shards = peak["shards"].task
    assert scratch["shards"] == 9_987_271_168 + copy_bytes(shards.job) + 2 * table_bytes(shards.job) < scratch["hub"]
    assert scratch["attached"] == 0 and round(scratch["hub"] / 1e9, 1) == 57.7 and scratch["prequantized"] == 0
    output = {n: w.peak("output")[0] for n, w in peak.items()}
    assert output["hub"] == output["shards"] == output["attached"] and output["hub"] - output["prequantized"] == table_bytes(peak["hub"].task.job)
    assert peak["hub"].hours > peak["shards"].hours - 1e-9 > peak["attached"].hours


def test_a_copy_that_is_too_large_to_keep_is_said():
    kept = lambda kind, place="kaggle", **kw: [c for c in whole_path(**T4 | dict(place=place, quantize=kind) | kw).checks() if c[0].startswith("a prequantized")][0]
    assert kept("qint8")[1:4] == ("23.1 GB", "20.0 GB", False) and kept("nf4")[1:4] == ("16.5 GB", "20.0 GB", True) and kept("nf4", "colab")[3] is False
    assert kept("nf4", config=dict(train=dict(mixed_precision="bf16")))[1] == "16.5 GB", "its rows have the checkpoint's dtype, not the run's"


def test_the_place_s_quota_and_hours_are_those_that_a_session_is_judged_by(tmp_path):
    from qie_nb.core.environment import detect_environment
    (tmp_path/"kaggle"/"working").mkdir(parents=True)
    p = detect_environment(tmp_path, dict(KAGGLE_KERNEL_RUN_TYPE="Batch", CUDA_VERSION="12"))
    assert (LIMITS["kaggle"].output, LIMITS["kaggle"].hours) == (p.quota, p.hours) == (20e9, 9.)


def test_encoders_are_where_the_plan_puts_them():
    of = lambda side=1024, **kw: whole_path(**T4 | dict(config=PLAIN | dict(data=dict(control_area=side * side))) | kw)
    phase = lambda w: next(p for p in w.phases if p.name == "precompute")
    names, cpu = (lambda w: [n for n, _ in phase(w).gpu]), lambda w: ("VAE" in {n for n, _, r in phase(w).work if r == "cpu"})
    two, one, small = of(), of(place="colab", gpu=None), of(512, place="colab", gpu=None)
    assert two.plan.changes["cache"] == dict(vae_encoder_device="cuda:1") and any("`cache.vae_encoder_device` cuda:1" in n for n in two.notes) and not cpu(two)
    assert one.plan.changes["cache"] == dict(vae_encoder_device="cpu") and "VAE" not in names(one) and cpu(one) and one.hours > two.hours + 0.5
    assert "cache" not in small.plan.changes and {"VAE", "text encoder, nf4"} <= set(names(small)) and not cpu(small)
    assert all(p.total("gpu") <= 0.93 * w.task.card.bytes for w in (two, one, small) for p in w.phases if p.name == "precompute")


def test_what_takes_more_is_seen():
    of = lambda **kw: whole_path(**T4 | dict(config=SMALL) | kw)
    base, more = of(), of(pairs=500, steps=800)
    assert more.peak("output")[0] - base.peak("output")[0] == pytest.approx(cache_bytes(base.task.job, 450), rel=0.01)
    held = of(config=SMALL | dict(train=dict(val_fraction=0.1, mixed_precision="no")))
    assert held.hours > base.hours and any("evaluations" in n for p in held.phases for n, *_ in p.work)
    assert of(rates=dict(float32=25e12)).hours < base.hours / 3 and of(steps=100).hours < base.hours / 4
    colab = of(place="colab", gpu=None)
    assert colab.limits.host == 12.7e9 and colab.task.card.count == 1 and colab.peak("host")[0] < 12.7e9


def test_as_text_as_html_and_from_the_shell(capsys):
    w = whole_path(**T4 | dict(config=SMALL))
    for text in (repr(w), w._repr_html_()):
        for part in ("computed, not measured", "9.99 GB", "does not fit", "NVIDIA", "data sheet", "/kaggle/working"): assert part in text or part == "/kaggle/working", part
    assert main("plan --place kaggle --pairs 50 --gpu 2xT4 --resolution 512 --weights shards".split()) == 0
    out = capsys.readouterr().out
    assert "kaggle, 2 x T4: 50 pairs, 800 steps of 5370 tokens" in out and "nobody says" in out


@pytest.mark.parametrize("kw, said", [
    (dict(place="mars"), "`place` must be one of kaggle, colab, got 'mars'"), (dict(pairs=1), "`pairs` must be a whole number, 2 or more, got 1"), (dict(pairs=2.5), "got 2.5"),
    (dict(steps=0), "`steps` must be a whole number, 1 or more, got 0"), (dict(weights="usb"), "`weights` must be one of hub, shards, attached, prequantized, got 'usb'"),
    (dict(gpu=48), "`gpu` 48 GB has no rates here"), (dict(rates=dict(light=1.)), "`rates` has 'light', which is not known"), (dict(resolution=500), "must be a multiple of 16")])
def test_what_cannot_be_computed_is_refused(kw, said):
    with pytest.raises(ValueError) as e: whole_path(**T4 | kw)
    assert said in str(e.value) and "\n" not in str(e.value)
