"""A transformer over two fake devices that refuse to be mixed, forward and backward.

They are called lazy:0 and lazy:1, because torch's autograd asks for a driver when it meets fake CUDA tensors.
"""
from contextlib import contextmanager

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from qie_nb.config import make_config
from qie_nb.devices.strategies import model_parallel
from qie_nb.devices.strategies.ways import StrategyFacts, weight_loader
from qie_nb.devices.strategies.model_parallel import ModelParallelLoader, SplitBlocks, enable_model_parallel, split_blocks
from qie_nb.models.loading import load_quantized
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.step import EMA, guarded_step
from qie_nb.training.optimizers.known import make_optimizer

from fake_devices import Numbers, numpy
from helpers import settings, slow
from small_transformer import base
from test_block_swap import checkpointed, with_table

LAYERS = 2
FIRST, SECOND = torch.device("lazy:0"), torch.device("lazy:1")
TWO = dict(model_parallel_devices=["cuda:0", "cuda:1"])


class Counted(Numbers):
    "Notes what is copied from one device to another."
    def dispatch(self, func, types, args=(), kwargs=None):
        out = super().dispatch(func, types, args, kwargs)
        if not self.inside and func is torch.ops.aten._to_copy.default and out.device != args[0].device: self.moved.append((str(args[0].device), str(out.device), tuple(out.shape)))
        return out


@contextmanager
def fake_gpus():
    mode = Counted()
    mode.moved = []
    with pytest.MonkeyPatch.context() as mp, sdpa_kernel(SDPBackend.MATH), mode:
        mp.setattr(torch.Tensor, "numpy", numpy)
        mp.setattr(torch.utils.checkpoint, "_infer_device_type", lambda *args: "cpu") # whose random state it keeps
        yield mode


def distribute(mode, tr, placement):
    "Move a real transformer's weights and adapters as a placement says."
    for name, m in tr.named_modules():
        for k, p in m._parameters.items():
            if p is not None:
                f = mode.fake(p, placement.device(f"{name}.{k}"))
                m._parameters[k] = torch.nn.Parameter(f, requires_grad=p.requires_grad)
                m._parameters[k].numbers = f.numbers
        for k, b in m._buffers.items():
            if b is not None: m._buffers[k] = mode.fake(b, placement.device(f"{name}.{k}"))


def inputs():
    g = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 40, 64, generator=g), torch.randn(1, 5, 64, generator=g)
    return dict(hidden_states=x, encoder_hidden_states=text, encoder_hidden_states_mask=torch.tensor([[True] * 4 + [False]]),
                timestep=torch.tensor([0.5]), img_shapes=[[(1, 4, 6), (1, 4, 4)]], return_dict=False), torch.zeros(1, 40, 64)


def trained(tr): return [p for p in tr.parameters() if p.requires_grad]


def steps(tr, count, name, given, target):
    "Some steps of the trainer: loss, backward, clip, a guarded optimizer step, EMA. Returns losses and norms."
    with pytest.MonkeyPatch.context() as mp: # fused optimizers do not know the fake devices
        mp.setattr(torch.optim, "AdamW", lambda params, fused=None, real=torch.optim.AdamW, **kw: real(params, **kw, fused=False, foreach=False))
        optimizer, ema = make_optimizer(trained(tr), make_config(dict(optimizer=dict(name=name, lr=1e-3, weight_decay=0.1))).optimizer), EMA(trained(tr), 0.9)
    out = []
    for _ in range(count):
        loss = (tr(**given)[0] - target).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)
        ok = torch.isfinite(norm) & torch.isfinite(loss)
        guarded_step(optimizer, ok)
        ema.update(ok)
        optimizer.zero_grad(set_to_none=True)
        out += [getattr(t, "numbers", t).item() for t in (loss, norm)]
    return out


def made(tmp_path, table=True): return checkpointed(with_table(base(layers=LAYERS), tmp_path/"tr") if table else base(layers=LAYERS))


def run(tmp_path, count=1, table=True, optimizer="adamw"):
    "Losses, norms and adapters after some steps on fake devices, and what was moved."
    with torch.random.fork_rng(): tr = made(tmp_path, table)
    placement, (given, target) = ModelParallelLoader([FIRST, SECOND]), inputs()
    placement.prepare(tr)
    if table: # rows come from the CPU
        rows = tr.lookup.table.rows
        def real(times):
            with _disable_current_modes(): return rows(times)
        tr.lookup.choose = lambda timestep, device: setattr(tr.lookup, "rows", put(real([0.5, 0.])))
    with fake_gpus() as mode:
        put = lambda t: mode.fake(t, FIRST) if torch.is_tensor(t) else t
        distribute(mode, tr, placement)
        enable_model_parallel(tr, placement.blocks)
        out = steps(tr, count, optimizer, {k: put(x) for k, x in given.items()}, put(target))
        return out, [p.numbers for p in trained(tr)], mode.moved, {p.device for p in trained(tr)}


# --- steps
@pytest.mark.slow
@pytest.mark.parametrize("table, optimizer", [(True, "adamw"), (False, "adafactor")])
def test_steps_over_two_devices_are_the_same_and_shared_tensors_are_moved_once(table, optimizer, tmp_path):
    plain = made(tmp_path, table)
    with sdpa_kernel(SDPBackend.MATH): out = steps(plain, 2, optimizer, *inputs())
    got, ours, moved, devices = run(tmp_path, 2, table, optimizer)
    torch.testing.assert_close(got, out, rtol=1e-5, atol=1e-7)
    for a, b in zip(ours, trained(plain), strict=True): torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-6)
    assert devices == {FIRST, SECOND}
    tokens, there, back = (1, 40, 64), ("lazy:0", "lazy:1"), ("lazy:1", "lazy:0")
    if table: assert moved.count((*there, (2, 1 + 12 * LAYERS, 64))) == 2, "time embedding and rows, once a step"
    assert moved.count((*there, tokens)) == 2 * 3, "the image tokens at the boundary, again for the recomputation, and the prediction's gradient"
    assert moved.count((*back, tokens)) == 2 * 2, "the prediction, and the gradient over the boundary"


def test_a_skipped_step_changes_neither_device(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "isfinite", lambda t: t != t)
    _, ours, *_ = run(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ours, trained(made(tmp_path)), strict=True))


# --- loading
@pytest.mark.parametrize("kind", ["nf4", slow(None)])
def test_each_weight_is_read_to_its_own_device(kind, tmp_path, monkeypatch):
    base(layers=LAYERS).save_pretrained(tmp_path/"tr", max_shard_size="200KB")
    monkeypatch.setattr(model_parallel, "enable_model_parallel", lambda tr, blocks: tr) # everything is on the CPU here
    placement, seen = ModelParallelLoader(["cpu", "meta"]), {}
    plain = placement.device
    placement.device = lambda name: (seen.setdefault(name, str(plain(name))), torch.device("cpu"))[1]
    load_quantized(QwenImageTransformer2DModel, tmp_path/"tr", kind, placement=placement)
    on = {n.removesuffix(".weight"): d for n, d in seen.items()}
    assert on["transformer_blocks.0.attn.to_q"] == on["img_in"] == on["txt_in"] == "cpu"
    assert on["transformer_blocks.1.attn.to_q"] == on["norm_out.linear"] == on["proj_out"] == "meta"


def test_blocks_are_split_by_bytes():
    for sizes in ([3] * 60, [1, 5] * 10, [9, 1, 1, 1, 9, 1, 1, 1]):
        for parts in (2, 3):
            at = split_blocks(sizes, parts)
            load = [sum(s for s, d in zip(sizes, at) if d == p) for p in range(parts)]
            assert at == sorted(at) and max(load) <= sum(sizes) / parts + max(sizes)


# --- refusals
@pytest.mark.parametrize("train, text", [
    (dict(model_parallel_devices=["cuda:0"]), "must be at least two different GPUs, got \\['cuda:0'\\]"),
    (dict(model_parallel_devices=["cuda:0", "cuda"]), "must be at least two different GPUs"),
    (dict(model_parallel_devices=["cuda:0", "cuda:7"]), "'cuda:7' does not exist here"),
    (TWO | dict(device="cuda:1"), "`train.device` must be auto or cuda:0, .* got cuda:1; set it to auto"),
    (TWO | dict(distributed="fsdp"), "needs a single process"),
    (TWO | dict(blocks_to_swap=True), "`train.blocks_to_swap` is incompatible with"),
    (TWO, "start without `accelerate launch`")])
def test_impossible_settings_raise(train, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if train == TWO: monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=text): weight_loader(StrategyFacts(make_config(dict(train=train)).train, "cuda:0"))


def test_a_trainer_trains_and_moves_nothing(pairs, tmp_path, monkeypatch):
    make = lambda *devices: QwenImageEditTrainer(settings(pairs(), tmp_path, train=dict(model_parallel_devices=devices, device="auto", max_train_steps=1)))
    with pytest.raises(ValueError, match="'cuda:0' does not exist here"): make("cuda:0", "cuda:1")
    monkeypatch.setattr(SplitBlocks, "problem", lambda self, facts: "")
    t = make("cpu", "cpu")
    t.fit()
    assert t.global_step == 1 and t.transformer.fixed == "on several GPUs"
    with pytest.raises(ValueError, match="on several GPUs cannot be moved"): t.transformer.to("meta")
