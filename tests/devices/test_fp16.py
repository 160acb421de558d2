"""float16 products inside a float32 model: finite, closer to float32 than bfloat16 is, and what fails without each scale."""
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from qie_nb.devices import fp16
from qie_nb.planning import plan as planner
from qie_nb.devices.compile import attention_kernel, compile_choice, set_up, watch_attention
from qie_nb.config import LoraSection, make_config
from counted_step import count_step, empty_step, empty_transformer
from qie_nb.devices.fp16 import LIMIT, MOST, AttnScale, pick_fp16, fp16_weight, enable_fp16, weight_norms, power_of_two, scale_to_fp16
from qie_nb.lora.adapters import add_lora, load_lora, lora_parameters, save_lora
from qie_nb.lora.mixing import merge_lora, unmerge_lora
from qie_nb.planning.memory_query import MemoryQuery
from qie_nb.planning.training_memory import memory_of, saved_activations
from qie_nb.planning.plan import plan
from qie_nb.models.quantize import plain_tensors, quantize
from qie_nb.devices.block_swap import enable_block_swap
from qie_nb.trainer import QwenImageEditTrainer

from helpers import OnStep, settings
from fp16 import with_outliers # benchmarks/fp16.py
from test_training_memory import ALL, TINY, close, counted_saved, saved_bytes

NONE = dict(residual=0., power=2)
WILD = dict(residual=2.**18, power=16)


def model(dtype=torch.float32, on=False, zero=False, adapter=True, kind=None, layers=3, **outliers):
    "The same weights in every dtype."
    torch.manual_seed(0)
    tr = QwenImageTransformer2DModel(num_layers=layers, attention_head_dim=32, num_attention_heads=2, joint_attention_dim=48, axes_dims_rope=(8, 12, 12), zero_cond_t=zero)
    with_outliers(tr, **NONE | outliers)
    tr = quantize(tr.to(torch.bfloat16).to(dtype).requires_grad_(False), kind)
    if on: enable_fp16(tr)
    if not adapter: return tr
    add_lora(tr, LoraSection(r=4, target_modules="all_linear"))
    g = torch.Generator().manual_seed(3)
    for n, p in tr.named_parameters():
        if "lora_B" in n: p.data = torch.randn(p.shape, generator=g) * 0.02
    return tr


def call(tr, batch=1, mask=None, wild=()):
    g = torch.Generator().manual_seed(1)
    x, text = (torch.randn(batch, n, c, generator=g).bfloat16() for n, c in ((24 + 16, 64), (9, 48)))
    for token in wild: x[:, token] *= 2.**14
    t = torch.full((batch,), 0.5).to(tr.dtype)
    return tr(hidden_states=x.to(tr.dtype), encoder_hidden_states=text.to(tr.dtype), encoder_hidden_states_mask=mask, timestep=t, img_shapes=[[(1, 4, 6), (1, 4, 4)]] * batch, return_dict=False)[0].float()


def results(tr, size=1., **kw): # output minus its mean over tokens, gradients of the adapter
    for p in tr.parameters(): p.grad = None
    out = call(tr, **kw)
    (out.square().mean() * size).backward()
    return (out - out.mean(1, keepdim=True)).detach().flatten(), torch.cat([p.grad.flatten() for p in lora_parameters(tr)])


def results_without_grad(tr):
    with torch.no_grad(): out = call(tr)
    return (out - out.mean(1, keepdim=True)).flatten()


def far(got, exact): return [((a - b).norm() / b.norm()).item() for a, b in zip(got, exact)]
def finite(got): return all(x.isfinite().all() for x in got)


# --- outputs and gradients

CASES = dict(wild=WILD, zero_cond=dict(zero=True, **WILD), token=dict(wild=(3, 30)), small_loss=dict(size=1e-12, **WILD),
             large_loss=dict(size=1e12, **WILD), batch=dict(batch=2, mask=True))


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in ("wild", "small_loss", "batch"))) for c in CASES])
def test_errors_are_a_tenth_of_bfloat16s(case):
    kw = dict(CASES[case])
    run = {k: kw.pop(k) for k in ("wild", "size", "batch", "mask") if k in kw}
    if run.get("mask"): run["mask"] = torch.arange(9) < torch.tensor([[9], [6]])
    exact, bf16, ours = (results(model(dtype, on, **kw), **run) for dtype, on in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)))
    assert finite(ours) and exact[1].norm() > 0
    ratios = [a / b for a, b in zip(far(ours, exact), far(bf16, exact))]
    assert max(ratios) < 0.1


@pytest.mark.parametrize("kind", ["qint8", *(pytest.param(k, marks=pytest.mark.slow) for k in ("qfloat8", "int8", "float8"))])
def test_quantized_bases(kind):
    kw = WILD if kind == "qint8" else {}
    exact, ours = (results(model(on=on, kind=kind, **kw)) for on in (False, True))
    assert finite(ours) and max(far(ours, exact)) < 0.003, far(ours, exact)


@pytest.mark.parametrize("kind", ["qint8", "qfloat8"])
def test_eight_bit_weights_are_exact_in_float16(kind):
    torch.manual_seed(0)
    layer = quantize(torch.nn.Sequential(torch.nn.Linear(64, 48).requires_grad_(False)), kind)[0]
    w, rows = fp16_weight(layer, weight_norms(layer)[0])
    torch.testing.assert_close(w.float() * rows[:, None], layer.weight.dequantize(), rtol=1e-6, atol=1e-8)


# --- without each scale

def unscaled(x): return torch.ones_like(x)


def only_cast(x, longest):
    "`scale_to_fp16` without a power of two."
    return (x16 := x.half()), torch.ones_like(x[..., :1]), torch.linalg.vector_norm(x16.float(), dim=-1, keepdim=True)


def test_an_unscaled_product_overflows_and_the_layer_is_named(monkeypatch):
    monkeypatch.setattr(fp16, "scale_to_fp16", only_cast)
    tr = model(on=True, power=17)
    with torch.no_grad(): out = call(tr)
    assert not out.isfinite().all() and tr.fp16_stats.first() == "block 0, the input of img_mlp.net.2, forward"


def test_an_unscaled_gradient_vanishes(monkeypatch):
    exact, real = results(model(), 1e-9)[1], fp16.scale_to_fp16
    assert far([results(model(on=True), 1e-9)[1]], [exact])[0] < 0.005
    def only_forward(x, longest):
        return (real if torch._C._current_graph_task_id() == -1 else only_cast)(x, longest)
    monkeypatch.setattr(fp16, "scale_to_fp16", only_forward)
    assert far([results(model(on=True), 1e-9)[1]], [exact])[0] > 0.1


def attended(q, k, v, g, on=True, kernel=None):
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    inner = lambda q, k, v, scale=None: F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scale=scale).transpose(1, 2)
    place = fp16.LayerStats(fp16.Fp16Stats(1), 6)
    place.norms = tuple((t.abs().max() / t.shape[-1]**0.5).item() for t in (q, k)) # the bound from the norms' weights
    out = (fp16.fp16_attention(None, place, inner) if on else inner)(q, k, v)
    out.backward(g)
    return out.detach(), q.grad, k.grad, v.grad


def random_attention(n=200, d=32):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, 2, d, generator=g) for _ in range(4)]


@pytest.mark.parametrize("case", ["values", "gradients", "queries", "small"])
def test_attention_with_large_and_with_small_numbers(case, monkeypatch):
    q, k, v, g = random_attention()
    if case == "values": v = v * 1e6
    if case == "gradients": g = g * 1e8
    if case == "queries": q, k = q * 1e5, k * 1e-5
    if case == "small": g = g * 1e-9
    exact = attended(q, k, v, g, False)
    assert max(far(attended(q, k, v, g), exact)) < 0.003
    if case == "queries": monkeypatch.setattr(fp16, "AttnScale", lambda note, a, b: AttnScale(note, 1., 1.)) # no power
    else: monkeypatch.setattr(fp16, "power_of_two", unscaled)
    without = attended(q, k, v, g)
    assert not finite(without) or max(far(without, exact)) > 0.5


def test_products_stay_below_the_limit():
    g = torch.Generator().manual_seed(0)
    for scale in (1e-15, 1., 1e18):
        w = torch.randn(48, 64, generator=g)
        x = torch.cat([w * scale, torch.full((1, 64), scale), torch.zeros(1, 64), torch.eye(64)[:2] * scale, w.sign() * scale]) # parallel to a row is the worst case
        x16, s, _ = scale_to_fp16(x, w.norm(dim=1).max().item())
        y = F.linear(x16, w.half())
        assert y.abs().max() <= LIMIT and x16.isfinite().all() and y.abs().max() > LIMIT / 8
        torch.testing.assert_close(y * s, x @ w.T, rtol=0.01, atol=1e-3 * scale * 64)
    assert power_of_two(torch.tensor([1., 1.5, 0.25])).tolist() == [2., 2., 0.5]


def worst(case, n=300, d=32):
    "Attention with gradients close to the bound."
    q, k, v, g = random_attention(n, d)
    one, other = torch.eye(d)[0], torch.eye(d)[1]
    if case == "one value": q[:], g[:], v[:], k[:], k[:, 0], v[:, 0] = one * d**0.5, one * 1e3, one, -one * d**0.5, one * d**0.5, -one # its gradient is the sum over all queries
    if case == "one query": # values and keys in opposite directions
        q[:], g[:], g[:, 0] = other * d**0.5, 0., one
        sides = torch.ones(n, 1, 1).index_fill_(0, torch.arange(0, n, 2), -1.)
        v[:], k[:] = sides * one, sides * one * d**0.5
    return q, k, v, g


@pytest.mark.parametrize("case", ["one value", "one query", "random"])
def test_gradients_of_attention_stay_below_the_limit(case):
    largest = {}
    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            if "attention" in str(func) and "backward" in str(func): largest.update(zip("qkv", (t.abs().max().item() for t in out[:3])))
            return out
    with See(): got = attended(*worst(case))
    most = AttnScale(None, 1., 1.).most
    assert finite(got) and 0 < max(largest.values()) <= MOST
    if case == "one value": assert MOST / most / 4 < largest["v"] <= MOST / most # all of the sum, and no more
    if case == "one query": assert largest["q"] >= MOST / 16 # times `most`, it would be past the end of float16


# --- with other features

def test_recomputing_changes_no_gradient():
    tr = model(on=True, **WILD)
    want = results(tr)
    set_up(tr, "selective")
    for a, b in zip(results(tr), want): torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())


@pytest.mark.parametrize("kind", [None, pytest.param("nf4", marks=pytest.mark.slow)])
def test_block_swap_gives_the_same(kind):
    want = results(model(on=True, kind=kind))
    tr = enable_block_swap(enable_fp16(model(kind=kind)), "cpu", slots=2)
    set_up(tr, True)
    for a, b in zip(results(tr), want): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


def test_adapters_can_be_loaded_merged_and_unmerged(tmp_path):
    tr = model(on=True)
    want, _ = results(tr)
    save_lora(tr, tmp_path)
    other = model(on=True, adapter=False)
    load_lora(other, tmp_path, trainable=True)
    torch.testing.assert_close(results(other)[0], want, rtol=1e-4, atol=1e-5)
    merge_lora(other)
    assert far([results_without_grad(other)], [want])[0] < 0.002
    unmerge_lora(other)
    torch.testing.assert_close(results(other)[0], want, rtol=1e-4, atol=1e-5)
    assert enable_fp16(other) is other


def test_large_products_are_in_float16_and_nothing_is_read_from_the_device():
    "Reading from the meta device would raise."
    job, work = MemoryQuery(layers=2, target=256, control=256, text=64, checkpointing=False, fp16=True, base_bytes=4, kernel="efficient"), {}
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            a = [t for t in args if isinstance(t, torch.Tensor)]
            if func.name().startswith(("aten::mm", "aten::addmm", "aten::bmm")): work[a[-1].dtype] = work.get(a[-1].dtype, 0) + 2 * a[-2].numel() * a[-1].shape[-1]
            if "attention" in func.name(): assert all(t.dtype == torch.float16 for t in a[:3])
            return func(*args, **kwargs or {})
    tr = empty_transformer(job)
    loss, _ = empty_step(job, tr)
    with Count(): loss().backward()
    assert work[torch.float16] / sum(work.values()) > 0.96 and set(work) == {torch.float16, torch.float32}


def test_the_attention_kernel_is_that_of_float16_and_blocks_are_not_compiled():
    tr = model(on=True)
    assert compile_choice(True, "cuda", tr) == (False, "products are scaled into float16 (`train.mixed_precision` fp16)")
    watch_attention(tr, (lines := []).append)
    call(tr)
    assert "float16" in lines[0] and attention_kernel(tr, dtype=torch.float16)


# --- the planner

KEPT = dict(plain={}, out_only=dict(targets=("to_out.0",)), everything=dict(batch=3, zero_cond=True, table=True, targets=ALL), dropout=dict(dropout=0.1), dora=dict(dora=True), checkpointing=dict(checkpointing=True, table=True))


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c != "everything")) for c in KEPT])
def test_the_planner_predicts_the_tensors_autograd_keeps(case):
    job = replace(TINY, fp16=True, **KEPT[case])
    assert close(saved_activations(job).bytes, counted_saved(job), 0.01)
    if case == "plain": assert saved_activations(job).bytes < 0.95 * saved_activations(replace(job, fp16=False)).bytes


@pytest.mark.parametrize("kind", ["nf4", pytest.param("qint8", marks=pytest.mark.slow)])
def test_a_quantized_base_keeps_no_copies(kind):
    job = replace(TINY, quantization=kind, dim=128, heads=4, fp16=True)
    tr = empty_transformer(replace(job, fp16=False), "cpu")
    for m in list(tr.modules()):
        if hasattr(m, "base_layer"): m.base_layer = quantize(torch.nn.Sequential(m.base_layer), kind)[0]
    enable_fp16(quantize(tr, kind))
    loss, batch = empty_step(job, tr, "cpu")
    there = [t for p in (*tr.parameters(), *tr.buffers()) for t in plain_tensors(p)]
    loss()
    assert close(saved_activations(job).bytes, saved_bytes(loss, [*there, *batch]))


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_peak_of_a_step_is_the_sum_of_the_parts(checkpointing):
    job = replace(TINY, layers=5, fp16=True, checkpointing=checkpointing)
    m = memory_of(job, gpu=False)
    assert close(m.part("saved activations") + m.part("working memory") + m.parts[1][1], count_step(job, "cpu")[0])


def test_plans_for_cards_without_bfloat16(monkeypatch):
    some = partial(plan, "2511", resolution=512, quantize="nf4")
    p = some("T4")
    assert p.chosen.query.fp16 and p.chosen.query.base_bytes == 4 and not p.chosen.query.compiled and "nf4, float16 products" in repr(p) and any("scaled float16" in n for n in p.notes)
    small = dict(num_layers=3, num_attention_heads=2, attention_head_dim=64, joint_attention_dim=128, in_channels=64)
    monkeypatch.setattr(planner, "strategies", lambda *a: []) # what was asked is enough
    asked = lambda gpu, how="auto": some(gpu, transformer=small, config=dict(train=dict(mixed_precision=how))).asked.query
    assert [asked(g).fp16 for g in ("T4", "V100 32GB", "P100 16GB", "RTX 4090")] == [True, True, False, False]
    assert not asked("T4", "no").fp16 and asked("RTX 4090", "fp16").fp16 and asked("P100 16GB").base_bytes == 4


# --- the setting

def test_auto_by_device_and_settings(monkeypatch):
    train = lambda **kw: make_config(dict(train=kw)).train
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d=None: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "device", lambda d: nullcontext())
    for capability, want in (((7, 5), True), ((7, 0), True), ((6, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d=None: capability)
        assert pick_fp16(train(), "cuda")[0] == want
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d=None: (7, 5))
    assert pick_fp16(train(), "cuda", "nf4")[1].startswith("Tesla T4 has no bfloat16: ")
    assert not any(pick_fp16(train(mixed_precision=m), "cuda")[0] for m in ("no", "bf16")) and not pick_fp16(train(), "cuda", "fp8_storage")[0]
    assert not pick_fp16(train(compile=True), "cuda")[0] and not pick_fp16(train(), "cpu")[0]
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert not pick_fp16(train(), "cuda")[0] and pick_fp16(train(mixed_precision="fp16"), "cuda")[0]


@pytest.mark.parametrize("change, why", [(dict(compile=True), "`train.compile` true; set it to auto"), (dict(distributed="fsdp"), "`train.distributed` fsdp; set it to ddp")])
def test_incompatible_settings_raise_before_anything_is_loaded(change, why, tmp_path):
    with pytest.raises(ValueError, match=f"`train.mixed_precision` fp16 is incompatible with {why}"):
        QwenImageEditTrainer(dict(train=dict(device="cpu", mixed_precision="fp16", output_dir=str(tmp_path)) | change))


# --- training

def losses(trainer):
    out = []
    trainer.callbacks.append(OnStep(lambda t: out.append(float(t.state.loss))))
    trainer.fit()
    return torch.tensor(out)


def run(pairs, tmp_path, how, **kw):
    return QwenImageEditTrainer(settings(pairs, tmp_path/how, train=dict(mixed_precision=how, max_train_steps=4, gradient_checkpointing=True) | kw.pop("train", {}), optimizer=dict(lr=3e-3), **kw))


def test_training_gives_float32s_losses(pairs, tmp_path):
    where = pairs()
    full, ours = run(where, tmp_path, "no", train=dict(save_steps=4)), run(where, tmp_path, "fp16")
    a, b = losses(full), losses(ours)
    assert len(a) == 4 and ((a - b).abs() / a).max() < 0.01
    tr = ours.transformer
    assert "scaled float16" in repr(ours) and all(type(m).__name__ == "Fp16Linear" for n, m in tr.named_modules() if n.endswith("to_q.base_layer"))
    assert ours.finite.read()[0] == 0 and ours.transformer.fp16_stats.read().isfinite().all()
    with pytest.raises(ValueError, match="computes in float16 cannot be quantized any more"): ours.quantize_model(tr, "cpu")
    again = run(where, tmp_path, "fp16", train=dict(resume_checkpoint=str(tmp_path/"no"/"checkpoints"/"latest"), output_dir=str(tmp_path/"third")))
    with pytest.raises(ValueError, match="products in float16"): again.fit()


def test_a_run_with_nan_names_the_block(pairs, tmp_path, capsys):
    trainer = run(pairs(), tmp_path, "fp16", train=dict(max_nonfinite_steps=2))
    trainer.set_lora()
    trainer.transformer.transformer_blocks[0].attn.to_add_out.bias.data[3] = float("nan")
    trainer.fit()
    assert "(step 2, first in block 0, the input of txt_mlp.net.0.proj, forward)" in trainer.state.stop
    assert capsys.readouterr().out.count("a step was skipped: not finite first in block 0") == 2


@pytest.mark.slow
def test_prediction(pairs, tmp_path):
    from PIL import Image
    image = Image.effect_noise((64, 64), 60).convert("RGB")
    out = {how: run(pairs(), tmp_path, how).predict(image, "invert", num_inference_steps=2) for how in ("no", "fp16")}
    assert abs(out["no"].astype(int) - out["fp16"].astype(int)).max() <= 2
