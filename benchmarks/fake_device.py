"""A device that is not there: tensors that say they are elsewhere (on `meta`), with their numbers on the CPU, and an account of what passes between the two.

Separates operations that a host with a GPU waits for from those that it does not wait for: numbers that are read, shapes that follow from numbers, copies to the host,
and blocking copies to the device. Autograd, checkpointing and optimizers run as they are; kernels are the CPU's.
"""
import collections
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal")
VIEWS = ("view", "_unsafe_view", "expand", "permute", "transpose", "t", "slice", "select", "unsqueeze", "squeeze", "split", "split_with_sizes", "unbind", "chunk", "alias", "detach",
         "as_strided", "view_as_real", "view_as_complex", "unflatten", "_reshape_alias") # nothing runs on the device for them


class Away(torch.Tensor):
    "A tensor that says it is on the device."
    @staticmethod
    def __new__(cls, numbers):
        numbers = numbers.resolve_conj().resolve_neg() # the wrapper has no such mark
        out = torch.Tensor._make_wrapper_subclass(cls, numbers.size(), numbers.stride(), numbers.storage_offset(), dtype=numbers.dtype, device=DEVICE, requires_grad=False)
        out.numbers = numbers
        return out
    __torch_function__ = torch._C._disabled_torch_function_impl
    def tolist(self): return self.cpu().tolist() # torch refuses it of a subclass
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None): raise RuntimeError(f"{func} outside the device's mode")


def _modes(): return torch._C._len_torch_function_stack()


class Device(TorchDispatchMode):
    "Within, the device exists. `waits`: {why: times}; `launched`: operations that would run on it; `sent`: copies to it without waiting."
    def __init__(self):
        super().__init__()
        self.waits, self.launched, self.sent = collections.Counter(), collections.Counter(), 0

    def take(self):
        "The account so far; a new one begins."
        out = dict(waits=self.waits, launched=self.launched, sent=self.sent)
        self.waits, self.launched, self.sent = collections.Counter(), collections.Counter(), 0
        return out

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        held = {id(t.numbers): t for t in tree_leaves((args, kwargs)) if isinstance(t, Away)}
        to, away = kwargs.get("device"), bool(held)
        if to is not None: kwargs["device"] = torch.device("cpu") if torch.device(to) == DEVICE else to
        here = torch.device(to) == DEVICE if to is not None else away # where the result is
        if away or here: self.note(name, args, kwargs, away, here)
        out = func(*tree_map(lambda t: t.numbers if isinstance(t, Away) else t, args), **tree_map(lambda t: t.numbers if isinstance(t, Away) else t, kwargs))
        if not here or name == "_local_scalar_dense": return out
        return tree_map(lambda t: held.get(id(t)) if id(t) in held else Away(t) if isinstance(t, torch.Tensor) else t, out)

    def note(self, name, args, kwargs, away, here):
        bools = name in ("index", "index_put", "index_put_") and any(isinstance(t, Away) and t.dtype == torch.bool for t in tree_leaves(args[1]))
        copied = name in ("copy_", "_copy_from") and isinstance(args[0], torch.Tensor)
        if away and (name in READS or bools): self.waits[f"{name} of a tensor on the device"] += 1
        elif away and not here or copied and not isinstance(args[0], Away): self.waits["a copy to the host"] += 1
        elif name == "_to_copy" and not away or copied and isinstance(args[0], Away) and not isinstance(args[1], Away):
            if kwargs.get("non_blocking") or len(args) > 2 and args[2]: self.sent += 1
            else: self.waits["a blocking copy to the device"] += 1
        elif name not in VIEWS: self.launched[name] += 1


def send(module):
    "Put a module on the device, in place."
    seen = {}
    for m in module.modules():
        for k, p in m._parameters.items():
            if p is not None: m._parameters[k] = seen.setdefault(id(p), torch.nn.Parameter(Away(p.data), requires_grad=p.requires_grad))
        for k, b in m._buffers.items():
            if b is not None: m._buffers[k] = Away(b)
    return module


@contextmanager
def pretended():
    "Within, modules go to the device by `.to`, fused AdamW takes its tensors, and a tensor made there by `torch.tensor` counts as a blocking copy."
    mode, to = Device(), torch.nn.Module.to
    def module_to(m, *args, **kw):
        where = kw.get("device", args[0] if args and not isinstance(args[0], torch.dtype) else None)
        if where is None or torch.device(where) != DEVICE: return to(m, *args, **kw)
        return send(m)
    def made(real, data, *args, device=None, **kw): # in C++, below the mode's sight
        if device is None or torch.device(device) != DEVICE or isinstance(data, torch.Tensor): return real(data, *args, device=device, **kw)
        out = real(data, *args, device=device if _modes() else None, **kw) # a mode may make something else of it
        if isinstance(out, Away): return out
        mode.waits["a blocking copy to the device"] += 1
        return Away(out.cpu())
    with patch.object(torch.nn.Module, "to", module_to), patch.object(torch, "tensor", partial(made, torch.tensor)), \
         patch.object(torch, "as_tensor", partial(made, torch.as_tensor)), sdpa_kernel(SDPBackend.MATH), mode, \
         patch("torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["meta", "cpu"]), \
         patch("torch.utils._foreach_utils._get_foreach_kernels_supported_devices", lambda: ["meta"]): yield mode
