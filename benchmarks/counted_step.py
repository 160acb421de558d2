"""Counts every allocation of a training step on the real classes, to check the planner's figures.

A few blocks of the real transformer with adapter and modulation table run the trainer's own loss. On torch's `meta` device
this takes a second at any size and needs no GPU. Used by tests/planning, tests/devices and benchmarks/step_cpu.py."""
import math, weakref
from dataclasses import replace

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qie_nb.planning.memory import stream_tokens


class LiveBytes(TorchDispatchMode):
    "Counts the bytes of tensors that operations made and that are still held: now, and at most."
    def __init__(self, known=(), scratch=None): # tensors that existed before; function of an operation: (its own bytes, those of an unpacked weight)
        super().__init__()
        self.now = self.peak = self.unpacked = 0 # `unpacked`: the peak with quantized weights
        self.known = {id(s): s for s in (t.untyped_storage() for t in known)}
        self.scratch = scratch or (lambda func, args: (0, 0))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor): self.add(t.untyped_storage())
        own, weight = self.scratch(func, args)
        self.peak, self.unpacked = max(self.peak, self.now + own), max(self.unpacked, self.now + own + weight)
        return out

    def add(self, storage):
        if id(storage) in self.known: return
        size = storage.nbytes()
        self.known[id(storage)], self.now = None, self.now + size
        weakref.finalize(storage, self.remove, id(storage), size)

    def remove(self, key, size):
        del self.known[key]
        self.now -= size


PRODUCTS = ("mm", "scaled_dot_product") # parts of the names of matrix products and attention

class Traffic(TorchDispatchMode):
    """Counts the bytes that operations other than products read and write, as if no cache held anything."""
    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name()
        moves_nothing = func.is_view or name.startswith(("aten::empty", "aten::detach", "aten::_unsafe_view"))
        if not moves_nothing and not any(part in name for part in PRODUCTS):
            self.bytes += touched((args, kwargs)) + touched(out)
        return out


def touched(tensors) -> int:
    """The bytes of tensors; an expanded one counts as what it holds."""
    found = [t for t in tree_leaves(tensors) if isinstance(t, torch.Tensor)]
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in found)


class AttentionKernel(TorchFunctionMode):
    "Computes attention with one kernel: without data torch would take the CPU's."
    def __init__(self, name): super().__init__(); self.name = name
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention: return func(*args, **kwargs)
        q, k, v, a = *(kwargs[n] for n in ("query", "key", "value")), torch.ops.aten
        if self.name == "flash": return a._scaled_dot_product_flash_attention(q, k, v, 0., False, False)[0]
        if self.name == "cudnn": return a._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0]
        if self.name == "efficient": return a._scaled_dot_product_efficient_attention(q, k, v, None, True)[0]
        return a._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


def set_kernel(transformer, name):
    def wrap(forward):
        def with_kernel(*args, **kwargs):
            with AttentionKernel(name): return forward(*args, **kwargs)
        return with_kernel
    for block in transformer.transformer_blocks: block.attn.forward = wrap(block.attn.forward)


def scratch(q, weights):
    "Bytes that kernels allocate inside: attention's float32 gradient of q, and the copy of a quantized weight."
    largest = sum(stream_tokens(q).values()) * q.dim * 4
    held = {t.untyped_storage()._cdata: t.numel() * t.element_size() for t in weights if t.ndim == 2}
    def of(func, args):
        name = func.name()
        if "scaled_dot_product" in name and "backward" in name: return 0 if q.kernel == "cpu" else largest, 0
        if not name.startswith(("aten::mm", "aten::addmm")): return 0, 0
        return 0, max((held.get(a.untyped_storage()._cdata, 0) for a in args if isinstance(a, torch.Tensor)), default=0)
    return of


class TableOfShape: # stands for a `ModulationTable`
    def __init__(self, q, dtype): self.q, self.dtype = q, dtype
    def rows(self, times, device): return torch.empty(len(times), 12 * self.q.layers, self.q.dim, dtype=self.dtype, device=device)


def empty_transformer(q, device="meta"):
    "The transformer of a `MemoryQuery` with its adapter; on another device its tensors have arbitrary values."
    from diffusers import QwenImageTransformer2DModel
    from qie_nb.config import make_config
    from qie_nb.devices.fp16 import enable_fp16
    from qie_nb.lora.adapters import add_lora, adapters_in_base_dtype, set_dropout
    from qie_nb.models.modulation import use_modulation_table
    head, dtype = q.dim // q.heads, torch.float32 if q.base_bytes == 4 else torch.bfloat16
    side = head * 7 // 16 // 2 * 2 # rotary features: an eighth for the image number, the rest for its sides
    with torch.device(device):
        tr = QwenImageTransformer2DModel(num_layers=q.layers, num_attention_heads=q.heads, attention_head_dim=head, in_channels=q.channels,
                                         out_channels=q.channels // 4, joint_attention_dim=q.text_dim, axes_dims_rope=(head - 2 * side, side, side), zero_cond_t=q.zero_cond)
        for p in tr.parameters(): p.data = p.data.to(dtype)
        if q.table: use_modulation_table(tr, TableOfShape(q, dtype))
        lora = dict(r=q.r, target_modules=q.targets if isinstance(q.targets, str) else list(q.targets), use_dora=q.dora)
        add_lora(tr, make_config(dict(model=dict(lora=lora))).model.lora)
    if q.dropout: set_dropout(tr, q.dropout)
    set_kernel(enable_fp16(tr) if q.fp16 else tr, q.kernel)
    adapters_in_base_dtype(tr, q.adapter_bytes < 4)
    if q.checkpointing: tr.enable_gradient_checkpointing()
    return tr.train()


def empty_step(q, transformer, device="meta"): # (function that gives the loss, tensors that it uses)
    "The trainer's loss on a batch of the query's shapes."
    from qie_nb.training.step import flow_matching_loss
    def latent(tokens):
        rows = next(n for n in range(math.isqrt(tokens), 0, -1) if tokens % n == 0)
        return torch.zeros(q.batch, q.channels // 4, 1, 2 * rows, 2 * tokens // rows, device=device)
    dtype, x0, noise = torch.float32 if q.base_bytes == 4 else torch.bfloat16, latent(q.target), latent(q.target)
    controls, sigmas = [latent(q.control)] if q.control else [], torch.full((q.batch,), .5)
    text = torch.zeros(q.batch, q.text, q.text_dim, dtype=dtype, device=device)
    batch = dict(pixel_latent=x0, control_latent=controls, prompt_embed=text, prompt_embeds_mask=None)
    used = [x0, noise, *controls, text, transformer.pos_embed.pos_freqs, transformer.pos_embed.neg_freqs]
    return lambda: flow_matching_loss(transformer, batch, noise, sigmas, device, dtype).mean(), used


def count_step(q, device="meta"): # (bytes, the same with quantized weights)
    "The most that a training step holds besides weights, adapter and batch."
    tr = empty_transformer(q, device)
    loss, batch = empty_step(q, tr, device)
    loss() # fills what is kept between steps
    with LiveBytes([*tr.parameters(), *tr.buffers(), *batch], scratch(q, tr.parameters())) as live: loss().backward()
    return live.peak, live.unpacked


def count_traffic(q) -> tuple:
    """Reads and writes of all tokens of a block, by elementwise operations: (forward, the whole step)."""
    tokens = sum(stream_tokens(q).values()) * q.dim * q.base_bytes
    counted = []
    for layers in (2, 4): # the difference leaves out what is outside the blocks
        few = replace(q, layers=layers)
        loss, _ = empty_step(few, empty_transformer(few))
        loss() # fills what is kept between steps
        with Traffic() as traffic:
            value = loss()
            forward = traffic.bytes
            value.backward()
        counted.append((forward, traffic.bytes))
    return tuple((more - less) / 2 / tokens for less, more in zip(*counted))
