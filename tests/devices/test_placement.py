"""Three devices without a GPU: fake tensors say where everything is and refuse to mix, and their numbers are computed on the CPU beside them.

Covered: everything that `predict` calls between the processor's tensors and the image, text encoder and vision tower included, with the
math attention kernel (the fused ones have no fake CUDA form that runs on a CPU). Not covered: GPU kernels themselves.
"""
import inspect, itertools, sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from qie_nb.sampling import edits

from qie_nb.encoding import encode

from qie_nb.models import flow_matching as flow

from qie_nb.devices import placement as place

from qie_nb.sampling import denoising as sample
from qie_nb.training.callbacks import Callback
from qie_nb.models.components import Components, device_of
from qie_nb.devices.placement import PARTS, Placement, Place, component_bytes, pick_evicted, plan_placement
from qie_nb.models.quantize import held_bytes
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer

THREE = dict(transformer="cuda:0", vae="cuda:1", text_encoder="cuda:2")
GB = 10**9


def pictures(n): return [Image.fromarray(np.random.default_rng(i).integers(0, 256, (h, w, 3), dtype=np.uint8)) for i, (w, h) in enumerate(((50, 75), (90, 45), (40, 80))[:n])]


def trainer_of(variant="2511", **sections):
    return QwenImageEditTrainer(dict(model=dict(pretrained_model_name_or_path=str(tiny_folder(variant, (64 * 64, 56 * 56)))),
                                     train=dict(device="cpu", mixed_precision="no"), cache=dict(use_cache=False)) | sections)


def ask(t, n=1, scale=4.0, **kw): return t.predict(pictures(n), "make it blue", "grey", 2, scale, 48, 64, 3, **kw)


# --- the rig
class Numbers(FakeTensorMode):
    "Fake tensors with their numbers, so that what depends on numbers (positions, windows, the least value of an image) goes its real way."
    inside, worked = False, None

    def dispatch(self, func, types, args=(), kwargs=None):
        def fake():
            self.inside = True
            try: return FakeTensorMode.dispatch(self, func, types, args, kwargs or {})
            finally: self.inside = False
        if self.inside or func.namespace == "prim": return FakeTensorMode.dispatch(self, func, types, args, kwargs or {})
        plain = lambda t: t.numbers if isinstance(t, FakeTensor) else torch.device("cpu") if isinstance(t, torch.device) else t
        def numbers():
            with _disable_current_modes(): return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        try: out, got = fake(), None
        except (DataDependentOutputException, DynamicOutputShapeException): # a number, or a shape that follows from numbers
            got, out = numbers(), None
            if not isinstance(got, torch.Tensor): return got
            self.inside = True
            try:
                with self: out = torch.empty(got.shape, dtype=got.dtype, device=next(t for t in tree_leaves(args) if isinstance(t, FakeTensor)).device)
            finally: self.inside = False
        fakes = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if not fakes: return out
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.convolution.default): self.worked.add(str(fakes[0].device))
        for f, t in zip(fakes, [t for t in tree_leaves(numbers() if got is None else got) if isinstance(t, torch.Tensor)], strict=True): f.numbers = t
        return out


def set_parameters(self, fn, recurse=True):
    "`Module._apply`, which cannot swap fake tensors."
    for m in self.children() if recurse else (): m._apply(fn)
    for k, p in self._parameters.items():
        if p is not None: self._parameters[k] = torch.nn.Parameter(fn(p.detach()), requires_grad=False)
    for k, b in self._buffers.items():
        if b is not None: self._buffers[k] = fn(b)
    return self


@pytest.fixture
def pretend(monkeypatch):
    "A function that turns a trainer's components into fake ones, and a context in which three GPUs exist."
    real = torch.Tensor.numpy
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(place, "free_bytes", lambda d: 80 * GB)
    mode = Numbers(allow_non_fake_inputs=True)
    mode.worked = set()

    def numpy(t, **kw):
        if not isinstance(t, FakeTensor): return real(t, **kw)
        assert t.device.type == "cpu", f"numpy of a tensor on {t.device}"
        with _disable_current_modes(): return real(t.numbers, **kw)

    def fake(t):
        f = mode.from_tensor(t, static_shapes=True)
        f.numbers = t
        return f

    @contextmanager
    def at(trainer):
        for n in (*PARTS, "processor", "scheduler"): trainer.components.get(n)
        with pytest.MonkeyPatch.context() as mp, sdpa_kernel(SDPBackend.MATH):
            mp.setattr(torch.nn.Module, "_apply", set_parameters)
            mp.setattr(torch.Tensor, "numpy", numpy)
            mp.setattr(place, "held_bytes", lambda m: 4 * sum(p.numel() for p in m.parameters()))
            for n in PARTS: trainer.components.parts[n]._apply(lambda t: fake(t.data))
            with mode: yield mode
    return at


def plain(*args, **kw):
    with sdpa_kernel(SDPBackend.MATH): return ask(*args, **kw)


# --- three devices
@pytest.mark.parametrize("variant, n, scale", [("v1", 1, 4.0), ("2509", 3, 1.0), ("2511", 2, 4.0)] + [pytest.param(*c, marks=pytest.mark.slow) for c in
    [("v1", 1, 1.0), *(("2509", n, 4.0) for n in (1, 2, 3)), ("2509", 1, 1.0), ("2511", 1, 4.0), ("2511", 3, 4.0), ("2511", 2, 1.0)]])
def test_on_three_devices_nothing_is_mixed_and_the_image_is_the_same(variant, n, scale, pretend):
    expected, t = plain(trainer_of(variant), n, scale), trainer_of(variant, predict=dict(devices=THREE))
    with pretend(t) as mode: got = ask(t, n, scale)
    assert {k: str(device_of(t.components.parts[k])) for k in PARTS} == THREE and mode.worked >= set(THREE.values())
    assert np.array_equal(got, expected)


@pytest.mark.slow
def test_a_list_with_previews_on_three_devices(pretend):
    call = lambda t, **kw: t.predict(pictures(1)[0], ["a", "b"], num_inference_steps=2, height=48, width=64, **kw)
    with sdpa_kernel(SDPBackend.MATH): expected = call(trainer_of())
    t, seen = trainer_of(predict=dict(devices=THREE)), []
    with pretend(t): got = call(t, preview=lambda n, steps, im: seen.append(im.shape), preview_every=1)
    assert all(np.array_equal(a, b) for a, b in zip(got, expected)) and seen == [(48, 64, 3)] * 4


def test_moved_to_other_devices_between_two_calls(pretend):
    t = trainer_of(predict=dict(devices=THREE))
    expected = plain(trainer_of())
    with pretend(t):
        first = ask(t)
        t.predict_devices = {k: torch.device(f"cuda:{(int(d[-1]) + 1) % 3}") for k, d in THREE.items()} # the positions' table was made on another
        t.setup_predict()
        second = ask(t)
    assert np.array_equal(first, expected) and np.array_equal(second, expected)


def broken(monkeypatch, module, name, old, new):
    "Put a function with one line changed in the place of the original, wherever that is known."
    was = vars(module)[name]
    source = inspect.getsource(was)
    assert source.count(old) == 1, (name, old)
    space = dict(vars(module))
    exec("from __future__ import annotations\n" + source.replace(old, new), vars(module) | {}, space)
    now = space[name]
    fn = type(was)(now.__code__, vars(module), name, now.__defaults__) if not hasattr(now, "__wrapped__") else now
    for m in [m for k, m in sys.modules.items() if k.startswith("qie_nb.")]:
        for k, v in list(vars(m).items()):
            if v is was: monkeypatch.setattr(m, k, fn)


FORGOTTEN = {
    "embedding": (edits, "denoise_encoded", "text(edit.cond)", "(edit.cond, None)"),
    "negative prompt": (edits, "denoise_encoded", "text(uncond)", "uncond if uncond is None else (uncond, None)"),
    "control latents": (edits, "denoise_encoded", "[put(c) for c in edit.controls]", "edit.controls"),
    "timesteps": (flow, "velocity", "times.to(x_t.device, non_blocking=True)", "times"),
    "noise": (sample, "start_noise", "device=torch.device(device)", 'device=torch.device("cpu")'),
    "latents to the VAE": (encode, "decode_latents", "latents.to(vae.device, vae.dtype)", "latents.to(vae.dtype)"),
    "image to the VAE": (encode, "encode_images", "x.to(device or vae.device, vae.dtype)", "x.to(vae.dtype)"),
    "statistics of the latents": (encode, "_stats", ".to(like.device, like.dtype)", ".to(like.dtype)"),
    "tokens to the text encoder": (encode, "_encode_whole", 'return_tensors="pt").to(device)', 'return_tensors="pt")'),
    "image from the VAE": (encode, "decode_latents", 'postprocess(x, output_type="np")', 'postprocess(x, output_type="pt").permute(0, 2, 3, 1).numpy()'),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_forgotten_move_is_found(what, pretend, monkeypatch):
    t = trainer_of(predict=dict(devices=THREE))
    broken(monkeypatch, *FORGOTTEN[what])
    with pretend(t), pytest.raises((RuntimeError, AssertionError), match="found at least two devices|different from other tensors|numpy of a tensor on cuda:1"): ask(t)


def test_a_forgotten_component_is_found(pretend, monkeypatch):
    t, at = trainer_of(predict=dict(devices=THREE)), place.PlaceMethods._at
    monkeypatch.setattr(place.PlaceMethods, "_at", lambda self, name: self.components.get(name) if name == "transformer" else at(self, name))
    with pretend(t) as mode: ask(t)
    assert "cuda:0" not in mode.worked, "the transformer worked where it was: this is what the test above would see"


# --- one small device
def test_each_component_visits_a_small_gpu_in_its_turn(pretend, monkeypatch):
    expected, t = plain(trainer_of(), 2), trainer_of()
    t.device, at, seen = torch.device("cuda:0"), place.PlaceMethods._at, []
    sizes = {n: component_bytes(t.components.folder/n, torch.float32) for n in PARTS}
    work = dict.fromkeys(PARTS, 1000)
    monkeypatch.setattr(place, "work_bytes", lambda area: work)
    room = (max(sizes.values()) + sizes["vae"] // 2) / 0.95
    monkeypatch.setattr(place, "free_bytes", lambda d: room if d == "cuda:0" else 0 if d.startswith("cuda") else 80 * GB)
    monkeypatch.setattr(place.PlaceMethods, "_at", lambda self, n: (at(self, n), seen.append((n, sorted(k for k in PARTS if str(device_of(self.components.parts[k])) == "cuda:0"))))[0])
    with pretend(t) as mode:
        got = ask(t, 2)
        assert [p.how for p in t.placement.values()] == ["model"] * 3 and mode.worked >= {"cuda:0"} and "cpu" not in mode.worked
    assert [n for n, _ in seen] == ["text_encoder", "vae", "transformer", "vae"] and all(n in there for n, there in seen)
    assert all(sum(sizes[k] for k in there) <= 0.95 * room for _, there in seen), seen
    assert np.array_equal(got, expected)


def test_layer_by_layer_gives_the_same_image_and_leaves_nothing_behind(monkeypatch):
    expected, t = ask(trainer_of()), trainer_of()
    hows = dict(text_encoder="layers", vae="model", transformer="layers")
    plan = lambda *a, **kw: Placement({n: Place("cpu", h, "", 1) for n, h in hows.items()}, {"cpu": GB}, dict.fromkeys(PARTS, 0))
    monkeypatch.setattr(place, "plan_placement", plan)
    assert np.array_equal(ask(t), expected)
    for n in ("text_encoder", "transformer"): assert all(p.is_meta for p in t.components.parts[n].parameters())
    assert np.array_equal(ask(t), expected), "a second call"
    monkeypatch.undo()
    t.setup_predict()
    assert not t.components.offload and not any(p.is_meta for p in t.transformer.parameters())
    assert np.array_equal(ask(t), expected), "whole again"


def test_adapters_and_training_after_layer_by_layer(monkeypatch, tmp_path, pairs):
    data = pairs(((48, 32),) * 2)
    config = dict(train=dict(output_dir=str(tmp_path), max_train_steps=1, save_interval=0, device="cpu", mixed_precision="no"), data=dict(dataset_path=str(data), image_size=[48, 48]),
                  cache=dict(cache_dir=str(tmp_path/"cache")), logging=dict(report_to="none"))
    first = trainer_of(**config)
    first.config.model.modulation_table = False # else its image differs by rounding from those of a trainer that only predicts
    first.fit()
    for p in first.transformer.parameters(): p.data += 0.01 * p.requires_grad
    first.save_lora(tmp_path/"lora")
    expected = ask(first)
    t = trainer_of(**config)
    plain = ask(t)
    plan = lambda *a, trained=False, **kw: Placement({n: Place("cpu", h, "", 1) for n, h in dict(text_encoder="layers", vae="model", transformer="layers").items()}, {"cpu": GB}, dict.fromkeys(PARTS, 0))
    monkeypatch.setattr(place, "plan_placement", plan)
    t.setup_predict()
    assert np.array_equal(ask(t), plain) and t.components.offload
    t.load_lora(tmp_path/"lora")
    assert np.array_equal(ask(t), expected) and "transformer" in t.components.offload and not np.array_equal(expected, plain)
    t.save_lora(tmp_path/"again")
    assert (tmp_path/"again"/"pytorch_lora_weights.safetensors").stat().st_size == (tmp_path/"lora"/"pytorch_lora_weights.safetensors").stat().st_size
    t.set_adapters([])
    assert np.array_equal(ask(t), plain)
    t.delete_adapters("default")
    assert np.array_equal(ask(t), plain) and "transformer" in t.components.offload
    t.fit()
    assert t.global_step == 1 and "transformer" not in t.components.offload and not any(p.is_meta for p in t.transformer.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("where", [w for w in itertools.product(["cpu", "cuda:0"], repeat=3) if "cuda:0" in w], ids="-".join)
def test_cpu_and_gpu_split_give_the_same_image(where):
    expected = ask(trainer_of(), 2).astype(int)
    t = trainer_of(predict=dict(devices=dict(zip(PARTS, where))))
    assert np.abs(ask(t, 2) - expected).max() <= 2
    assert [device_of(t.components.parts[n]).type for n in PARTS] == [w.split(":")[0] for w in where]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("offload", ["model", "layers"])
def test_offloaded_on_a_gpu(offload):
    expected = ask(trainer_of(), 2).astype(int)
    t = trainer_of(train=dict(device="cuda", mixed_precision="no"), predict=dict(offload=offload))
    for _ in range(2): assert np.abs(ask(t, 2) - expected).max() <= 2


# --- the plan
REAL = dict(text_encoder=16.6 * GB, vae=.25 * GB, transformer=40.9 * GB)
NF4 = dict(text_encoder=5 * GB, vae=.25 * GB, transformer=11.5 * GB)
WORK = dict(text_encoder=1 * GB, vae=5 * GB, transformer=2 * GB)
gpus = lambda *gb: {f"cuda:{i}": g * GB for i, g in enumerate(gb)} | {"cpu": 200 * GB}
PLANS = [ # sizes, free, keywords, (device, how) of text encoder, VAE, transformer
    (REAL, {"cpu": 60 * GB}, dict(main="cpu"), ["cpu stay", "cpu stay", "cpu stay"]),
    (REAL, gpus(70), {}, ["cuda:0 stay", "cuda:0 stay", "cuda:0 stay"]),
    (REAL, gpus(60), {}, ["cuda:0 model", "cuda:0 model", "cuda:0 model"]),
    (REAL, gpus(46), {}, ["cuda:0 model", "cuda:0 model", "cuda:0 model"]),
    (REAL, gpus(44), {}, ["cuda:0 model", "cuda:0 model", "cuda:0 layers"]),
    (REAL, gpus(15), {}, ["cuda:0 layers", "cuda:0 model", "cuda:0 layers"]),
    (REAL, gpus(5), {}, ["cuda:0 layers", "cpu stay", "cuda:0 layers"]),
    (REAL, gpus(50, 30), {}, ["cuda:1 stay", "cuda:0 stay", "cuda:0 stay"]),
    (REAL, gpus(46, 20, 30), {}, ["cuda:2 stay", "cuda:2 stay", "cuda:0 stay"]),
    (REAL, gpus(46, 5), {}, ["cuda:0 model", "cuda:0 model", "cuda:0 model"]),
    (REAL, gpus(46), dict(wanted=dict(text_encoder="cpu")), ["cpu stay", "cuda:0 model", "cuda:0 model"]),
    (REAL, gpus(50, 30), dict(wanted=dict(text_encoder="cuda:0", vae="cuda:0")), ["cuda:0 model", "cuda:0 model", "cuda:0 model"]),
    (REAL, gpus(46), dict(offload="none"), ["cuda:0 stay", "cuda:0 stay", "cuda:0 stay"]),
    (REAL, gpus(80), dict(offload="model"), ["cuda:0 model", "cuda:0 model", "cuda:0 model"]),
    (REAL, gpus(80), dict(offload="layers"), ["cuda:0 layers", "cuda:0 model", "cuda:0 layers"]),
    (NF4, gpus(15, 15), dict(quantized=("transformer", "text_encoder")), ["cuda:1 stay", "cuda:1 stay", "cuda:0 stay"]),
    (NF4, gpus(15), dict(quantized=("transformer", "text_encoder")), ["cuda:0 model", "cuda:0 model", "cuda:0 model"]),
    (NF4, gpus(15), dict(quantized=("transformer", "text_encoder"), fixed=dict(transformer="packed")), ["cpu stay", "cpu stay", "cuda:0 stay"]),
    (NF4, gpus(19), dict(quantized=("transformer",), fixed=dict(transformer="packed")), ["cuda:0 model", "cuda:0 model", "cuda:0 stay"]),
    (NF4, gpus(8), dict(quantized=("transformer",)), ["cuda:0 model", "cuda:0 model", "cuda:0 stay"]),
]


@pytest.mark.parametrize("case", range(len(PLANS)))
def test_the_plan(case):
    sizes, free, kw, expected = PLANS[case]
    plan = plan_placement(sizes, free, **(dict(main="cuda:0", work=WORK) | kw))
    assert [f"{plan[n].device} {plan[n].how}" for n in PARTS] == expected
    assert all(p.why for p in plan.values()) and plan.moves == any("model" in e or "layers" in e for e in expected)


def test_the_plan_says_why_and_shows_itself():
    plan = plan_placement(REAL, gpus(46), "cuda:0", dict(vae="cpu"), work=WORK)
    assert plan["vae"].why == "`predict.devices` says so" and plan["transformer"].why == "not all fit in 46.0 GB: it comes for its turn"
    assert "text_encoder" in repr(plan) and "<table" in plan._repr_html_() and plan.data()[0][:3] == ("text_encoder", "cuda:0", "model")
    assert plan_placement(NF4, gpus(8), "cuda:0", quantized=("transformer",), work=WORK)["transformer"].why.endswith("quantize it further, or compute on cpu")
    with pytest.raises(ValueError, match="`predict.offload` layers does not go with a quantized transformer"): plan_placement(NF4, gpus(8), "cuda:0", offload="layers", quantized=("transformer",))


def test_only_who_is_in_the_way_leaves():
    plan = plan_placement(REAL, gpus(50), "cuda:0", work=WORK)
    assert pick_evicted(plan, "vae", ["transformer"]) == [] and pick_evicted(plan, "text_encoder", ["vae", "transformer"]) == ["transformer"]
    assert pick_evicted(plan, "transformer", ["text_encoder", "vae"]) == ["text_encoder"] and pick_evicted(plan, "transformer", ["transformer"]) == []


@pytest.mark.parametrize("kind", [None, "qint8", "nf4"])
@pytest.mark.parametrize("name", ["transformer", "text_encoder"])
def test_bytes_from_the_headers_are_what_is_held(name, kind):
    folder = tiny_folder("2511")
    held = held_bytes(Components(str(folder), quantize={name: kind}).get(name))
    assert abs(component_bytes(folder/name, torch.float32, kind) / held - 1) <= (0.15 if kind else 0.001)
    assert component_bytes(folder/name, torch.bfloat16) * 2 == component_bytes(folder/name, torch.float32)


def test_setup_says_the_plan_and_an_explicit_device_is_obeyed(capsys, monkeypatch):
    t = trainer_of(predict=dict(devices=dict(vae="cpu"))).setup_predict()
    assert "vae           cpu     stay" in (out := capsys.readouterr().out) and "`predict.devices` says so" in out
    ask(t)
    assert capsys.readouterr().out == "", "a plan in which nothing moves is said only when asked for"
    with pytest.raises(ValueError, match="`predict.offload`: .*got 'much'"): trainer_of(predict=dict(offload="much"))


def test_predicting_in_mid_run_leaves_every_component_where_it_was(pairs, tmp_path):
    class Predict(Callback):
        def on_step_end(self, t):
            where = lambda: {n: {k: p.device for k, p in part.named_parameters()} for n, part in t.components.parts.items() if n in PARTS}
            before, devices = where(), dict(t.components.devices)
            ask(t)
            assert t.running and str(t.placement["transformer"].device) == "cpu"
            assert where() == before and {k: d for k, d in t.components.devices.items() if k in devices} == devices
            assert t.transformer.training and t.vae is None and t.qwen_vl is None
            self.ran = True
    c = Predict()
    config = lambda out: dict(model=dict(pretrained_model_name_or_path=str(tiny_folder("2511")), lora=dict(r=2)), data=dict(dataset_path=str(root), image_size=[64, 64]),
                              train=dict(device="cpu", mixed_precision="no", max_train_steps=1, output_dir=str(tmp_path/out), save_interval=0, eval_interval=0),
                              cache=dict(cache_dir=str(tmp_path/"cache")), logging=dict(report_to="none", log_dir=str(tmp_path/"runs")))
    root = pairs(((48, 32),))
    QwenImageEditTrainer(config("a")).cache_embeddings()
    t = QwenImageEditTrainer(config("a"), callbacks=[c]).fit()
    assert c.ran and not t.running


def test_a_transformer_in_training_is_not_taken_apart():
    for offload in ("auto", "layers"):
        for trained, how in ((False, "layers"), (True, "stay" if offload == "auto" else "model")):
            assert plan_placement(REAL, gpus(15), "cuda:0", offload=offload, trained=trained)["transformer"].how == how
