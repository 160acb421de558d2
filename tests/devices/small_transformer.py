"A small transformer with known weights, its outputs and gradients for known inputs, and how far two results are from each other."
import torch
from diffusers import QwenImageTransformer2DModel
from torch.utils._python_dispatch import TorchDispatchMode

from qie_nb.config import LoraSection
from qie_nb.lora.adapters import add_lora
from qie_nb.models.quantizations.known import quantize

from helpers import random_lora

LAYERS = 4


class OnOperation(TorchDispatchMode):
    "`fn(name, arguments, result)` after each operation of torch."
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.fn(func.name(), args, out)
        return out


def base(zero=True, kind=None, layers=LAYERS, head=16, text=64):
    torch.manual_seed(0)
    size = dict(attention_head_dim=head, num_attention_heads=64 // head, joint_attention_dim=text, axes_dims_rope=(head // 4, head * 3 // 8, head * 3 // 8))
    return quantize(QwenImageTransformer2DModel(num_layers=layers, zero_cond_t=zero, **size).requires_grad_(False).eval(), kind)


def adapted(tr, targets="attention", std=0.05, **lora):
    "With an adapter that changes the output; frozen otherwise."
    return random_lora(add_lora(tr, LoraSection(**dict(r=4, target_modules=targets) | lora)), std)


def call(tr, seed=1, time=0.5, size=(4, 6), words=5, batch=1, mask=None, large=()):
    "The output for inputs that have the same values in every dtype; some tokens may be large."
    g = torch.Generator().manual_seed(seed)
    shapes = (size[0] * size[1] + 16, 64), (words, tr.config.joint_attention_dim)
    x, text = (torch.randn(batch, *shape, generator=g).bfloat16().to(tr.dtype) for shape in shapes)
    x[:, list(large)] *= 2.**14
    return tr(hidden_states=x, encoder_hidden_states=text, encoder_hidden_states_mask=mask, timestep=torch.full((batch,), time, dtype=tr.dtype),
              img_shapes=[[(1, *size), (1, 4, 4)]] * batch, return_dict=False)[0].float()


def gradients(tr, *losses, **kw):
    "{parameter: gradient}, of the mean square of the output unless other losses are given."
    for p in tr.parameters(): p.grad = None
    for loss in losses or [lambda tr: call(tr, **kw).square().mean()]: loss(tr).backward()
    return {n: p.grad.clone() for n, p in tr.named_parameters() if p.grad is not None}


def whole(tensors): return torch.cat([t.flatten() for t in tensors.values()])
def far(got, exact): return ((got - exact).norm() / exact.norm()).item()


def assert_same(got, want, rtol=1e-4, atol=1e-6):
    assert got.keys() == want.keys()
    for n in want: torch.testing.assert_close(got[n], want[n], rtol=rtol, atol=atol, msg=lambda m: f"{n}: {m}")
