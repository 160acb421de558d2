"""float16 products inside a float32 model: finite, and much closer to float32 than bfloat16 is. What the planner expects of them: tests/planning."""
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from counted_step import empty_step, empty_transformer
from fp16 import with_outliers # benchmarks/fp16.py
from qie_nb.devices import fp16
from qie_nb.devices.strategies.block_swap import enable_block_swap
from qie_nb.devices.compile import attention_kernel, obstacle, set_up, watch_attention
from qie_nb.devices.fp16 import (
    LIMIT, MOST, PLACES, AttnScale, Fp16Stats, enable_fp16, fp16_weight, power_of_two, scale_to_fp16, weight_norms)
from qie_nb.lora.adapters import load_lora, lora_parameters, save_lora
from qie_nb.lora.adapters import merge_lora, unmerge_lora
from qie_nb.models.quantizations.known import quantize
from qie_nb.planning.memory import MemoryQuery
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training import stopping

from helpers import OnStep, close_images, noise_image, settings, slow
from small_transformer import OnOperation, adapted, base, call, far

WILD = dict(residual=2.**18, power=16)


def model(dtype=torch.float32, on=False, zero=False, adapter=True, kind=None, **outliers):
    "The same weights in every dtype."
    tr = with_outliers(base(zero, layers=3, head=32, text=48), **dict(residual=0., power=2) | outliers)
    tr = quantize(tr.to(torch.bfloat16).to(dtype), kind)
    if on: enable_fp16(tr)
    return adapted(tr, "all_linear", std=0.02) if adapter else tr


def results(tr, size=1., **kw):
    "The output minus its mean over tokens, and the gradients of the adapter."
    for p in tr.parameters(): p.grad = None
    out = call(tr, **kw)
    if out.requires_grad: (out.square().mean() * size).backward()
    return (out - out.mean(1, keepdim=True)).detach().flatten(), torch.cat([p.grad.flatten() for p in lora_parameters(tr)] or [torch.ones(1)])


def farthest(got, exact): return max(map(far, got, exact)) if all(x.isfinite().all() for x in got) else float("inf")


# --- outputs and gradients
MASK = torch.arange(5) < torch.tensor([[5], [3]])


@pytest.mark.parametrize("of_model, of_call", [
    (WILD | dict(power=17), {}), slow(dict(zero=True) | WILD, {}), slow({}, dict(large=(3, 30))), ({}, dict(size=1e-9)), slow(WILD, dict(size=1e-12)), slow(WILD, dict(size=1e12)), ({}, dict(batch=2, mask=MASK))])
def test_errors_are_a_tenth_of_bfloat16s(of_model, of_call):
    exact, bf16, ours = (results(model(dtype, on, **of_model), **of_call) for dtype, on in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)))
    assert exact[1].norm() > 0
    for o, b, e in zip(ours, bf16, exact): assert o.isfinite().all() and far(o, e) < 0.1 * far(b, e)


@pytest.mark.parametrize("kind", ["qint8", slow("qfloat8"), slow("int8"), slow("float8")])
def test_quantized_bases(kind):
    exact, ours = (results(model(on=on, kind=kind, **WILD if kind == "qint8" else {})) for on in (False, True))
    assert farthest(ours, exact) < 0.003


@pytest.mark.parametrize("kind", ["qint8", "qfloat8"])
def test_eight_bit_weights_are_exact_in_float16(kind):
    layer = quantize(torch.nn.Sequential(torch.nn.Linear(64, 48).requires_grad_(False)), kind)[0]
    w, rows = fp16_weight(layer, weight_norms(layer)[0])
    torch.testing.assert_close(w.float() * rows[:, None], layer.weight.dequantize(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [None, "qint8", "qfloat8", "nf4"])
def test_gradients_through_one_layer(kind):
    "In a model most of a gradient passes beside the layers."
    layer = quantize(torch.nn.Sequential(torch.nn.Linear(64, 48).requires_grad_(False)), kind)[0]
    layer.fp16 = fp16.LayerStats(Fp16Stats(1), 0)
    x, g = torch.randn(5, 64, requires_grad=True), torch.randn(5, 48)
    exact, = torch.autograd.grad(layer(x), x, g)
    ours, = torch.autograd.grad(fp16.ScaledLinear.apply(x, layer), x, g)
    assert far(ours, exact) < 0.003


def attended(q, k, v, g, on=True):
    "Output and gradients of attention."
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    inner = lambda q, k, v, scale=None: F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scale=scale).transpose(1, 2)
    place = fp16.LayerStats(fp16.Fp16Stats(1), 6)
    place.norms = tuple((t.abs().max() / t.shape[-1]**0.5).item() for t in (q, k)) # the bound from the norms' weights
    out = (fp16.fp16_attention(None, place, inner) if on else inner)(q, k, v)
    out.backward(g)
    return out.detach(), q.grad, k.grad, v.grad


def random_attention(n=300, d=32):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, 2, d, generator=g) for _ in range(4)]


@pytest.mark.parametrize("factors", [(1, 1, 1e6, 1), (1, 1, 1, 1e8), (1e5, 1e-5, 1, 1), (1, 1, 1, 1e-9)])
def test_attention_with_large_and_with_small_numbers(factors):
    inputs = [t * f for t, f in zip(random_attention(), factors)] # queries, keys, values, gradient
    assert farthest(attended(*inputs), attended(*inputs, on=False)) < 0.003


def test_products_are_summed_in_float32():
    "By default torch lets cuBLAS sum in float16."
    products = torch.backends.cuda.matmul
    before = products.allow_fp16_reduced_precision_reduction
    products.allow_fp16_reduced_precision_reduction = True
    try:
        model(on=True)
        assert not products.allow_fp16_reduced_precision_reduction
    finally:
        products.allow_fp16_reduced_precision_reduction = before


def test_a_gradient_with_nan_names_where_it_began():
    "A backward pass begins with the last block."
    stats = Fp16Stats(3)
    for block in (0, 1):
        stats.note(1, block * len(PLACES), torch.tensor([float("nan")]))
    assert stats.first() == "block 1, the gradient of the output of attn.to_q, backward"


def test_products_stay_below_the_limit():
    g = torch.Generator().manual_seed(0)
    for scale in (1e-15, 1., 1e18):
        w = torch.randn(48, 64, generator=g)
        x = torch.cat([w, torch.zeros(1, 64), torch.eye(64)[:2], w.sign()]) * scale # parallel to a row is the worst case
        x16, s, _ = scale_to_fp16(x, w.norm(dim=1).max().item())
        y = F.linear(x16, w.half())
        assert y.abs().max() <= LIMIT and x16.isfinite().all() and y.abs().max() > LIMIT / 8
        torch.testing.assert_close(y * s, x @ w.T, rtol=0.01, atol=1e-3 * scale * 64)
    assert power_of_two(torch.tensor([1., 1.5, 0.25])).tolist() == [2., 2., 0.5]


@pytest.mark.parametrize("case", ["one value", "one query", "random"])
def test_gradients_of_attention_stay_below_the_limit(case):
    (q, k, v, g), largest, n, d = random_attention(), {}, 300, 32
    one, other = torch.eye(d)[:2]
    if case == "one value": # its gradient is the sum over all queries
        q[:], g[:], v[:], k[:] = one * d**0.5, one * 1e3, one, -one * d**0.5
        k[:, 0], v[:, 0] = one * d**0.5, -one
    if case == "one query": # values and keys in opposite directions
        sides = torch.ones(n, 1, 1).index_fill_(0, torch.arange(0, n, 2), -1.)
        q[:], g[:], v[:], k[:] = other * d**0.5, 0., sides * one, sides * one * d**0.5
        g[:, 0] = one

    def see(name, args, out):
        if "attention" in name and "backward" in name: largest.update(zip("qkv", (t.abs().max().item() for t in out[:3])))
    with OnOperation(see): got = attended(q, k, v, g)
    most = AttnScale(None, 1., 1.).most
    assert all(x.isfinite().all() for x in got) and 0 < max(largest.values()) <= MOST
    if case == "one value": assert MOST / most / 4 < largest["v"] <= MOST / most # all of the sum, and no more
    if case == "one query": assert largest["q"] >= MOST / 16 # times `most`, it would be past the end of float16


# --- with other features: 1 bit of float32 may round to another float16 number, hence the tolerances
def test_recomputing_changes_no_gradient():
    tr = model(on=True, **WILD)
    want = results(tr)
    set_up(tr, "selective")
    assert farthest(results(tr), want) < 0.004


@pytest.mark.parametrize("kind", [None, slow("nf4")])
def test_block_swap_gives_the_same(kind):
    tr = enable_block_swap(enable_fp16(model(kind=kind)), "cpu", slots=2)
    set_up(tr, True)
    assert farthest(results(tr), results(model(on=True, kind=kind))) < 0.002


def test_adapters_can_be_loaded_merged_and_unmerged(tmp_path):
    tr, other = model(on=True), model(on=True, adapter=False)
    save_lora(tr, tmp_path)
    want, without = results(tr)[0], results(other)[0]
    assert far(without, want) > 0.1
    load_lora(other, tmp_path)
    for act in (lambda tr: tr, merge_lora, unmerge_lora):
        act(other)
        assert far(results(other)[0], want) < 0.002
    assert enable_fp16(other) is other


def test_large_products_are_in_float16_and_nothing_is_read_from_the_device():
    "Reading from the meta device would raise."
    job, work = MemoryQuery(layers=2, target=256, control=256, text=64, checkpointing=False, fp16=True, base_bytes=4, kernel="efficient"), {}
    def count(name, args, out):
        a = [t for t in args if isinstance(t, torch.Tensor)]
        if name.startswith(("aten::mm", "aten::addmm", "aten::bmm")): work[a[-1].dtype] = work.get(a[-1].dtype, 0) + 2 * a[-2].numel() * a[-1].shape[-1]
        if "attention" in name: assert all(t.dtype == torch.float16 for t in a[:3])
    loss, _ = empty_step(job, empty_transformer(job))
    with OnOperation(count): loss().backward()
    assert work[torch.float16] / sum(work.values()) > 0.96 and set(work) == {torch.float16, torch.float32}


def test_the_attention_kernel_is_that_of_float16_and_blocks_are_not_compiled():
    tr = model(on=True)
    assert obstacle(tr) == "products are scaled into float16 (`train.mixed_precision` fp16)"
    watch_attention(tr, (lines := []).append)
    call(tr)
    assert "float16" in lines[0] and attention_kernel(tr, dtype=torch.float16)


# --- the setting; what auto means is tested in tests/planning/test_machines.py
@pytest.mark.parametrize("change, why", [(dict(compile=True), "`train.compile` true; set it to auto"), (dict(distributed="fsdp"), "`train.distributed` fsdp; set it to ddp")])
def test_incompatible_settings_raise_before_anything_is_loaded(change, why, tmp_path, built):
    with pytest.raises(ValueError, match=f"`train.mixed_precision` fp16 is incompatible with {why}"): run(tmp_path, tmp_path, "fp16", train=change)
    assert not built


# --- training
def run(pairs, tmp_path, how, **kw):
    return QwenImageEditTrainer(settings(pairs, tmp_path/how, train=dict(mixed_precision=how, max_train_steps=4, gradient_checkpointing=True) | kw.pop("train", {}), optimizer=dict(lr=3e-3), **kw))


@pytest.mark.slow
def test_training_gives_float32s_losses(pairs, tmp_path):
    where, losses = pairs(), {}
    for how in ("no", "fp16"):
        trainer, losses[how] = run(where, tmp_path, how, train=dict(save_steps=4)), []
        trainer.callbacks.append(OnStep(lambda t: losses[how].append(float(t.state.loss))))
        trainer.fit()
    assert len(losses["no"]) == 4 and losses["fp16"] == pytest.approx(losses["no"], rel=0.01)
    tr = trainer.transformer
    assert "scaled float16" in repr(trainer) and all(type(m).__name__ == "Fp16Linear" for n, m in tr.named_modules() if n.endswith("to_q.base_layer"))
    assert trainer.finite.read()[0] == 0 and tr.fp16_stats.read().isfinite().all()
    with pytest.raises(ValueError, match="computes in float16 cannot be quantized any more"): trainer.quantize_model(tr, "cpu")
    again = run(where, tmp_path, "fp16", train=dict(resume_checkpoint=str(tmp_path/"no"/"checkpoints"/"latest"), output_dir=str(tmp_path/"third")))
    with pytest.raises(ValueError, match="products in float16"): again.fit()


def test_a_run_with_nan_names_the_block(pairs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stopping, "MAX_NONFINITE_STEPS", 2)
    trainer = run(pairs(), tmp_path, "fp16")
    trainer.set_lora()
    trainer.transformer.transformer_blocks[0].attn.to_add_out.bias.data[3] = float("nan")
    with pytest.raises(stopping.TrainingFailed): trainer.fit()
    assert "(step 2, first in block 0, the input of txt_mlp.net.0.proj, forward)" in trainer.state.stop
    assert capsys.readouterr().out.count("a step was skipped: not finite first in block 0") == 2


@pytest.mark.slow
def test_prediction(pairs, tmp_path):
    image = noise_image((64, 64))
    full, ours = (run(pairs(), tmp_path, how).predict(image, "invert", num_inference_steps=2) for how in ("no", "fp16"))
    assert close_images(full, ours, 2)
