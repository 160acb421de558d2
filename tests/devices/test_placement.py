"""Where components compute: the plan, three fake GPUs, a small GPU, layer by layer, and a prediction in the middle of a run."""
import itertools, sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from qie_nb import predict
from qie_nb.devices import placement
from qie_nb.devices.edit_model import EditModel
from qie_nb.devices.placement import PARTS, DeviceChoice, Placement
from qie_nb.models import encoders
from qie_nb.models.loading import device_of
from qie_nb.models.loading import component_bytes, work_bytes
from qie_nb.models.quantizations.known import held_bytes
from qie_nb.planning import parts as planned
from qie_nb.planning.parts import PredictionFacts, choose_placement
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer

from fake_devices import GB, THREE, edit, pretend, trainer_of # noqa: F401 (a fixture)
from helpers import OnStep, close_images, random_lora, settings, slow, weekly


def replace_everywhere(monkeypatch, old, new):
    "Replace a function in every module of the library that imported it."
    for m in [m for k, m in sys.modules.items() if k.startswith("qie_nb.")]:
        for k, v in list(vars(m).items()):
            if v is old: monkeypatch.setattr(m, k, new)


def plan_layer_by_layer(monkeypatch):
    "Every plan puts the components on the CPU, two of them layer by layer."
    choices = {n: DeviceChoice("cpu", "model" if n == "vae" else "layers", "", 1) for n in PARTS}
    monkeypatch.setattr(predict, "choose_placement", lambda *a, **kw: Placement(choices, {"cpu": GB}, dict.fromkeys(PARTS, 0)))


def edit_math(*args):
    with sdpa_kernel(SDPBackend.MATH): return edit(*args)


# --- three devices
@pytest.mark.slow
@pytest.mark.parametrize("variant, n, scale", [("2511", 1, 4.0), ("v1", 1, 1.0), ("2509", 2, 4.0), weekly("v1", 1, 4.0), weekly("2509", 3, 1.0)])
def test_three_devices_give_the_same_image_and_mix_nothing(variant, n, scale, pretend):
    expected, t, previews = edit_math(trainer_of(variant), n, scale), trainer_of(variant, predict=dict(devices=THREE)), []
    with pretend(t) as mode: got = edit(t, n, scale, preview=lambda n, steps, image: previews.append(image.shape), preview_every=1)
    assert previews == [(48, 64, 3)] * 2
    assert {k: str(device_of(t.components.loaded[k])) for k in PARTS} == THREE and mode.worked >= set(THREE.values())
    assert close_images(got, expected)


@pytest.mark.slow
def test_a_missing_move_raises(pretend, monkeypatch):
    t, real = trainer_of(predict=dict(devices=THREE)), encoders.decode_latents
    replace_everywhere(monkeypatch, real, lambda v, z, *a, **kw: v.decode(z.to(v.dtype)))
    with pretend(t), pytest.raises(RuntimeError, match="found at least two devices|different from other tensors"): edit(t)


# --- one small device
@pytest.mark.slow
def test_components_take_turns_on_a_small_gpu(pretend, monkeypatch):
    expected, t = edit_math(trainer_of(), 2), trainer_of()
    t.predictor.device, real, seen = torch.device("cuda:0"), placement.place_component, []
    sizes = {n: component_bytes(t.components.folder/n, torch.float32) for n in PARTS}
    work = dict.fromkeys(PARTS, 1000)
    monkeypatch.setattr(planned, "work_bytes", lambda *_: work)
    free = (max(sizes.values()) + sizes["vae"] // 2) / 0.95
    monkeypatch.setattr(planned, "free_device_bytes", lambda d: free if d == "cuda:0" else 0 if d.startswith("cuda") else 80 * GB)

    def noted(parts, plan, name, *a, **kw):
        out = real(parts, plan, name, *a, **kw)
        seen.append((name, sorted(k for k in PARTS if str(device_of(parts.loaded[k])) == "cuda:0")))
        return out
    replace_everywhere(monkeypatch, real, noted)
    with pretend(t) as mode:
        got = edit(t, 2)
        assert [p.how for p in t.placement.values()] == ["model"] * 3 and mode.worked >= {"cuda:0"} and "cpu" not in mode.worked
    assert [n for n, _ in seen] == ["text_encoder", "vae", "transformer", "vae"] and all(n in loaded for n, loaded in seen)
    assert all(sum(sizes[k] for k in loaded) <= 0.95 * free for _, loaded in seen), seen
    assert close_images(got, expected)


@pytest.mark.slow
def test_layer_by_layer_gives_the_same_images_with_and_without_an_adapter_and_can_be_undone(monkeypatch, tmp_path, pairs):
    config = settings(pairs(((32, 32),)), tmp_path, data=dict(image_size=[32, 32]), train=dict(max_train_steps=1))
    del config["model"] # `trainer_of` has its own
    first = trainer_of(**config)
    first.set_lora()
    random_lora(first.transformer, 0.5)
    first.save_lora(tmp_path/"lora")
    expected, t = edit(first), trainer_of(**config)
    plain = edit(t)
    assert not close_images(plain, expected, 3)
    plan_layer_by_layer(monkeypatch)
    t.setup_predict()
    for _ in range(2): assert close_images(edit(t), plain)
    for n in ("text_encoder", "transformer"): assert all(p.is_meta for p in t.components.loaded[n].parameters())
    t.load_lora(tmp_path/"lora")
    assert close_images(edit(t), expected)
    t.save_lora(tmp_path/"again")
    assert len({(tmp_path/name/"pytorch_lora_weights.safetensors").stat().st_size for name in ("again", "lora")}) == 1
    t.delete_adapters("default")
    assert close_images(edit(t), plain)
    assert "transformer" in t.components.offload
    t.fit()
    assert t.global_step == 1 and "transformer" not in t.components.offload and not any(p.is_meta for p in t.transformer.parameters())
    monkeypatch.undo()
    assert not t.setup_predict().components.offload and edit(t).shape == plain.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("devices", [w for w in itertools.product(["cpu", "cuda:0"], repeat=3) if "cuda:0" in w], ids="-".join)
def test_cpu_and_gpu_split_give_the_same_image(devices):
    expected = edit(trainer_of(), 2)
    t = trainer_of(predict=dict(devices=dict(zip(PARTS, devices))))
    assert close_images(edit(t, 2), expected, 2)
    assert [device_of(t.components.loaded[n]).type for n in PARTS] == [w.split(":")[0] for w in devices]


# --- the plan
REAL = dict(text_encoder=16.6 * GB, vae=.25 * GB, transformer=40.9 * GB)
NF4 = dict(text_encoder=5 * GB, vae=.25 * GB, transformer=11.5 * GB)
WORK = dict(text_encoder=1 * GB, vae=5 * GB, transformer=2 * GB)
gpus = lambda *gb: {f"cuda:{i}": g * GB for i, g in enumerate(gb)} | {"cpu": 200 * GB}
PACKED = dict(transformer="packed")


@pytest.mark.parametrize("sizes, free, kw, expected", [ # GPU and how, of text encoder, VAE, transformer
    (REAL, {"cpu": 60 * GB}, dict(main="cpu"), "cpu:stay cpu:stay cpu:stay"),
    (REAL, gpus(5), {}, "0:layers cpu:stay 0:layers"),
    (REAL, gpus(50, 30), {}, "1:stay 0:stay 0:stay"),
    (REAL, gpus(46, 20, 30), {}, "2:stay 2:stay 0:stay"),
    (REAL, gpus(50, 30), dict(wanted=dict(text_encoder="cuda:0", vae="cuda:0")), "0:model 0:model 0:model"),
    (REAL, gpus(46), dict(offload="none"), "0:stay 0:stay 0:stay"),
    (REAL, gpus(80), dict(offload="layers"), "0:layers 0:model 0:layers"),
    (NF4, gpus(15, 15), dict(quantized=PARTS[::2]), "1:stay 1:stay 0:stay"),
    (NF4, gpus(15), dict(quantized=PARTS[::2], fixed=PACKED), "cpu:stay cpu:stay 0:stay"),
    (NF4, gpus(19), dict(quantized=PARTS[2:], fixed=PACKED), "0:model 0:model 0:stay"),
    (NF4, gpus(8), dict(quantized=PARTS[2:]), "0:model 0:model 0:stay"),
    *((REAL, gpus(15), dict(offload=offload, trained=trained), f"0:{encoder} 0:model 0:{how}") for offload, trained, encoder, how in (
        ("auto", False, "layers", "layers"), ("auto", True, "layers", "stay"), ("layers", False, "layers", "layers"), ("layers", True, "layers", "model")))])
def test_the_plan(sizes, free, kw, expected):
    facts = dict(main="cuda:0", work=WORK) | kw
    plan = choose_placement(facts.pop("offload", "auto"), PredictionFacts(sizes, free, **facts))
    assert " ".join(f"{plan[n].device}:{plan[n].how}".removeprefix("cuda:") for n in PARTS) == expected
    assert all(p.why for p in plan.values()) and plan.moves == ("model" in expected or "layers" in expected)


def test_the_largest_components_make_room():
    model = lambda gb: DeviceChoice("cuda:0", "model", "", gb * GB)
    plan = Placement(dict(text_encoder=model(10), vae=model(1), transformer=model(5)), gpus(16), dict.fromkeys(PARTS, GB))
    evicted = lambda name, *loaded, **free: placement.pick_evicted(plan, name, loaded)
    assert evicted("transformer", "text_encoder", "vae") == ["text_encoder"] and evicted("transformer", "vae") == []
    plan.free["cuda:0"] = 6.5 * GB
    assert evicted("transformer", "text_encoder", "vae") == ["text_encoder", "vae"]


def test_what_loaded_components_hold_counts_as_free(monkeypatch):
    monkeypatch.setattr(planned, "free_device_bytes", lambda d: 10 * GB)
    t = trainer_of()
    assert t.predictor.plan().free == {"cpu": 10 * GB}
    assert t.predictor.placement.work == work_bytes(t.predictor.geometry().control_area, 4), "the VAE decodes in float32"
    parts = [t.components.get(n) for n in ("vae", "transformer")]
    assert t.predictor.plan().free["cpu"] == 10 * GB + sum(map(held_bytes, parts))


def test_the_plan_gives_reasons():
    plan = choose_placement("auto", PredictionFacts(REAL, gpus(46), "cuda:0", WORK, dict(vae="cpu")))
    assert "<table" in plan._repr_html_() and plan["transformer"].why == "loaded to the GPU only while it works; not all fit in 46.0 GB"
    assert choose_placement("auto", PredictionFacts(NF4, gpus(8), "cuda:0", WORK, quantized=("transformer",)))["transformer"].why.endswith("quantize it further, or use cpu")


@pytest.mark.parametrize("name, kind", [("transformer", None), ("text_encoder", None), ("transformer", "nf4"), slow("text_encoder", "qint8")])
def test_bytes_from_headers_match_the_loaded_component(name, kind):
    folder = tiny_folder("2511")
    held = held_bytes(EditModel(str(folder), quantize={name: kind}).get(name))
    assert abs(component_bytes(folder/name, torch.float32, kind) / held - 1) <= (0.15 if kind else 0.001)
    assert component_bytes(folder/name, torch.bfloat16) * 2 == component_bytes(folder/name, torch.float32)


def test_setup_prints_the_plan_and_obeys_an_explicit_device(capsys, monkeypatch):
    t = trainer_of(predict=dict(devices=dict(vae="cpu"))).setup_predict()
    assert "vae           cpu     stay" in (out := capsys.readouterr().out) and "`predict.devices` says so" in out
    edit(t)
    assert capsys.readouterr().out == "", "a plan in which nothing moves is printed by setup_predict only"
    with pytest.raises(ValueError, match="`predict.offload` .*got 'much'"): trainer_of(predict=dict(offload="much"))


@pytest.mark.slow
def test_a_prediction_during_training_leaves_every_component_where_it_was(trained_run, tmp_path):
    def predict(t):
        where = lambda: {n: {k: p.device for k, p in part.named_parameters()} for n, part in t.components.loaded.items() if n in PARTS}
        before, devices = where(), dict(t.components.devices)
        modes = []
        edit(t, on_step=lambda *_: modes.append(t.transformer.training))
        assert modes and not any(modes), "no dropout in an image"
        assert t.running and str(t.placement["transformer"].device) == "cpu"
        assert where() == before and {k: d for k, d in t.components.devices.items() if k in devices} == devices
        assert t.transformer.training and t.vae is None and t.qwen_vl is None
        steps.append(t.global_step)
    steps, config = [], trained_run.settings(tmp_path, train=dict(max_train_steps=1, eval_steps=None, save_steps=None))
    QwenImageEditTrainer(config, callbacks=[OnStep(predict)]).fit()
    assert steps == [1]
