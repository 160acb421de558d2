"""GPUs without a GPU: fake tensors know their device and refuse to mix devices; their values are computed on the CPU beside them.

This covers everything `predict` calls, text encoder and vision tower included, with the math attention kernel (the fused ones have
no fake CUDA form that runs on a CPU). It does not cover the GPU kernels themselves.
"""
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from qie_nb.devices.placement import PARTS
from qie_nb.planning import parts as planned
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer

THREE = dict(transformer="cuda:0", vae="cuda:1", text_encoder="cuda:2")
GB = 10**9


def images(n):
    sizes = ((50, 75), (90, 45), (40, 80))[:n]
    return [Image.fromarray(np.random.default_rng(i).integers(0, 256, (h, w, 3), dtype=np.uint8)) for i, (w, h) in enumerate(sizes)]


def trainer_of(variant="2511", **sections):
    return QwenImageEditTrainer(dict(model=dict(pretrained_model_name_or_path=str(tiny_folder(variant, (64 * 64, 56 * 56)))),
                                     train=dict(device="cpu", mixed_precision="no"), cache=dict(use_cache=False)) | sections)


def edit(t, n=1, scale=4.0, **kw): return t.predict(images(n), "make it blue", "grey", 2, scale, 48, 64, 3, **kw)


class Numbers(FakeTensorMode):
    "Fake tensors with values, so that code that depends on values (positions, windows, the minimum of an image) runs as usual."
    inside = False

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        self.worked = set()

    @contextmanager
    def alone(self):
        "Without values."
        self.inside = True
        try: yield
        finally: self.inside = False

    def fake(self, t, device):
        "A fake tensor on a device, with the values of a real one."
        with self.alone(), self: f = torch.empty(t.shape, dtype=t.dtype, device=device)
        with _disable_current_modes(): f.numbers = t.detach().clone()
        return f

    def dispatch(self, func, types, args=(), kwargs=None):
        if self.inside or func.namespace == "prim": return FakeTensorMode.dispatch(self, func, types, args, kwargs or {})
        plain = lambda t: t.numbers if isinstance(t, FakeTensor) else torch.device("cpu") if isinstance(t, torch.device) else t
        def numbers():
            with _disable_current_modes(): return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        got = None
        try:
            with self.alone(): out = FakeTensorMode.dispatch(self, func, types, args, kwargs or {})
        except (DataDependentOutputException, DynamicOutputShapeException): # a number, or a shape that depends on numbers
            got = numbers()
            if not isinstance(got, torch.Tensor): return got
            device = next(t for t in tree_leaves(args) if isinstance(t, FakeTensor)).device
            with self.alone(), self: out = torch.empty(got.shape, dtype=got.dtype, device=device)
        fakes = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if not fakes:
            if func._schema.is_mutable: numbers() # of several tensors, in place
            return out
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.convolution.default):
            self.worked.add(str(fakes[0].device))
        values = [t for t in tree_leaves(numbers() if got is None else got) if isinstance(t, torch.Tensor)]
        for f, t in zip(fakes, values, strict=True): f.numbers = t
        return out


def numpy(t, real=torch.Tensor.numpy, **kw):
    "`Tensor.numpy`, of a fake tensor's values too."
    assert t.device.type == "cpu", f"numpy of a tensor on {t.device}"
    with _disable_current_modes(): return real(getattr(t, "numbers", t), **kw)


def tensor(data, *args, real=torch.tensor, **kw):
    "`torch.tensor`, of a list of fake tensors' values too."
    if isinstance(data, list): data = [t.item() if isinstance(t, FakeTensor) else t for t in data]
    return real(data, *args, **kw)


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
    "A context in which three GPUs exist and a trainer's components are fake."
    if torch.cuda.is_available():
        pytest.skip("a pretended GPU needs a machine without one: torch would ask the driver for the others")
    gpu = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GB, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda n: (80 * GB, 80 * GB))
    monkeypatch.setattr(planned, "free_device_bytes", lambda d: 80 * GB)
    mode = Numbers()

    @contextmanager
    def at(trainer):
        for n in (*PARTS, "processor", "scheduler"): trainer.components.get(n)
        with pytest.MonkeyPatch.context() as mp, sdpa_kernel(SDPBackend.MATH):
            mp.setattr(torch.nn.Module, "_apply", set_parameters)
            mp.setattr(torch.Tensor, "numpy", numpy)
            mp.setattr(torch, "tensor", tensor)
            mp.setattr(planned, "held_bytes", lambda m: 4 * sum(p.numel() for p in m.parameters()))
            for n in PARTS: trainer.components.loaded[n]._apply(lambda t: mode.fake(t, t.device))
            with mode: yield mode
    return at
