"""A GPU that is not there: fake tensors with values that refuse to mix devices, and a trainer whose model they hold.

The GPU is called `lazy:0`, because autograd asks CUDA's driver for streams as soon as a tensor says `cuda:0`.
"""
import copy
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from qie_nb.trainer import QwenImageEditTrainer

from fake_devices import Numbers, numpy, tensor

CPU = torch.device("cpu")
GPU = torch.device("lazy:0")


def move_weights(self, fn, recurse=True):
    "`Module._apply`, which cannot swap fake tensors."
    if recurse:
        for m in self.children(): m._apply(fn)
    for name, p in self._parameters.items():
        if p is None: continue
        with torch.no_grad():
            moved = fn(p)
        if moved is not p: self._parameters[name] = torch.nn.Parameter(moved, requires_grad=p.requires_grad)
    for name, b in self._buffers.items():
        if b is not None: self._buffers[name] = fn(b)
    return self


def written(tensors:dict, *args, real=safetensors.torch.save, **kw) -> bytes:
    "`safetensors.torch.save` of fake tensors' values; all must have been copied to the CPU."
    elsewhere = [name for name, t in tensors.items() if t.device != CPU]
    assert not elsewhere, f"written from another device: {elsewhere[:3]}"
    values = {name: getattr(t, "numbers", t) for name, t in tensors.items()}
    with _disable_current_modes(): return real(values, *args, **kw)


def read(file, *args, real=safetensors.torch.load_file, **kw) -> dict:
    "`safetensors.torch.load_file`, whose tensors are real: on the CPU, as after any reading."
    with _disable_current_modes(): return real(file, *args, **kw)


@contextmanager
def pretended_gpu():
    "Within, the GPU exists, and has the optimizers' fused kernels as CUDA has."
    mode = Numbers()
    fused = patch("torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["lazy", "cpu"])
    several = patch("torch.utils._foreach_utils._get_foreach_kernels_supported_devices", lambda: ["lazy"])
    with pytest.MonkeyPatch.context() as mp, fused, several, sdpa_kernel(SDPBackend.MATH):
        mp.setattr(torch.nn.Module, "_apply", move_weights)
        mp.setattr(torch.Tensor, "numpy", numpy)
        mp.setattr(np, "from_dlpack", numpy)
        mp.setattr(torch, "tensor", tensor)
        mp.setattr(safetensors.torch, "save", written)
        mp.setattr(safetensors.torch, "load_file", read)
        mp.setattr(torch.utils.checkpoint, "_infer_device_type", lambda *args: "cpu") # whose random state it keeps
        with mode: yield mode


def pretend(
    mode:Numbers,
    module:torch.nn.Module, # real
): # the same module
    "Make a module's weights fake, on the CPU; the library moves them."
    return module._apply(lambda t: mode.fake(t, CPU))


def components_of(
    pipe, # a tiny pipeline
    parts:tuple, # names of the models
    dtype:torch.dtype=torch.float32, # of the transformer
    blocks:int=1, # of the transformer
) -> dict: # {component: model, processor or scheduler}
    "Copies of a pipeline's models, which a test may change; processor and scheduler are shared."
    own = {part: copy.deepcopy(getattr(pipe, part)) for part in parts}
    del own["transformer"].transformer_blocks[blocks:]
    if dtype != torch.float32: own["transformer"].to(dtype)
    return own | dict(processor=pipe.processor, scheduler=pipe.scheduler)


def trainer_on_gpu(
    settings:dict, # for the CPU
    components:dict, # of `components_of`
) -> QwenImageEditTrainer:
    "A trainer that trains and encodes on the GPU, with models that were made elsewhere."
    t = QwenImageEditTrainer(settings)
    t.device = GPU
    t.components.training_device = GPU
    t.vae_device = GPU
    t.text_device = GPU
    for name, component in components.items(): t.components.adopt(name, component)
    return t


def devices_of(tensors) -> set:
    "The devices of tensors."
    return {t.device for t in tensors}
