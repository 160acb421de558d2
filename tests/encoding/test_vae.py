"""2-D convolutions give the latents and images of the 3-D ones with fewer operations, and leave no trace in the VAE."""
import copy, weakref
from functools import lru_cache

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.image_processor import VaeImageProcessor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from qie_nb.models.encoders import decode_latents, encode_image, encode_images, vae_2d
from qie_nb.models.components import load_component
from qie_nb.models.loading import work_bytes
from qie_nb.tiny.random_models import tiny_folder
from tiny_rig import close, random_image, rms

SIZE = (96, 64)
both_depths = pytest.mark.parametrize("stages", [3, pytest.param(2, marks=pytest.mark.slow)])


@lru_cache
def vae(stages, dtype=torch.float32): return load_component(tiny_folder("2511", vae_stages=stages), "vae", dtype)


class Live(TorchDispatchMode):
    "Bytes of all tensors that exist at the same time, at most."
    def __init__(self):
        super().__init__()
        self.now, self.peak, self.held = 0, 0, set()

    def free(self, key, size): self.now -= size; self.held.discard(key)

    def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
        out = fn(*args, **kwargs or {})
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if (key := storage._cdata) in self.held: continue
            self.held.add(key)
            self.now += storage.nbytes()
            weakref.finalize(storage, self.free, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_plan_has_room_for_the_vae_at_full_size(dtype):
    "On the meta device, by the pipeline's own operations; ours need less."
    with torch.device("meta"): v, z = AutoencoderKLQwenImage().to(dtype), torch.empty(1, 16, 1, 96, 128, dtype=dtype)
    with torch.no_grad(), Live() as live: v.decode(z)
    planned = work_bytes(64 * 96 * 128, dtype.itemsize)["vae"]
    assert 1.1 * live.peak < planned < 1.6 * live.peak, (live.peak, planned)
    with torch.device("meta"): image = torch.empty(1, 3, 1, 768, 1024, dtype=dtype)
    with torch.no_grad(), Live() as live: v.encode(image)
    assert live.peak < work_bytes(768 * 1024)["vae"], "also with all scores of the VAE's attention"


@both_depths
def test_a_batch_gives_the_latents_of_its_images_in_3d(stages): # decoded images: in the notebook and tests/parity
    v, images = vae(stages), [random_image(SIZE, i) for i in range(3)]
    together = encode_images(v, images, SIZE)
    for i, im in enumerate(images): close(together[i:i + 1], encode_image(v, im, SIZE, use_2d=False))


@pytest.mark.parametrize("call", [lambda v, **kw: encode_image(v, random_image(SIZE, 0), SIZE, **kw),
                                  lambda v, **kw: decode_latents(v, torch.zeros(1, 16, 1, 8, 12), **kw)], ids=["encode", "decode"])
def test_2d_is_the_default_and_can_be_switched_off(call):
    count = {}
    for name, kw in dict(default={}, on=dict(use_2d=True), off=dict(use_2d=False)).items():
        with FlopCounterMode(display=False) as counter: call(vae(3), **kw)
        count[name] = counter.get_total_flops()
    assert count["default"] == count["on"] and count["off"] / count["on"] >= 2.5


@pytest.mark.slow
@both_depths
def test_bfloat16_is_as_close_to_float32(stages):
    bf16, fp32 = vae(stages, torch.bfloat16), copy.deepcopy(vae(stages))
    fp32.load_state_dict(bf16.state_dict())
    error = {True: [], False: []}
    for im in (random_image(SIZE, i) for i in range(4)):
        exact = encode_image(fp32, im, SIZE, use_2d=False)
        for on in error: error[on].append(encode_image(bf16, im, SIZE, use_2d=on).float() - exact)
    assert rms(error[False]) > 1e-3 and rms(error[True]) <= 1.1 * rms(error[False])


def test_the_vae_is_restored_after_an_error():
    v, other = copy.deepcopy(vae(3)), vae(3)
    conv = v.encoder.conv_in
    conv.forward = wrapper = lambda *a, real=conv.forward, **kw: real(*a, **kw) # like accelerate's hooks
    with pytest.raises(ZeroDivisionError), vae_2d(v):
        assert sum("forward" in vars(m) for m in v.modules()) > 10 and not any("forward" in vars(m) for m in other.modules())
        1 / 0
    assert [m for m in v.modules() if "forward" in vars(m)] == [conv] and conv.forward is wrapper


def test_pixels_are_rounded_as_by_the_pipelines():
    v, z = vae(3), torch.randn(1, 16, 1, 6, 8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(getattr(v.config, f"latents_{k}")).view(1, -1, 1, 1, 1) for k in ("mean", "std"))
    with torch.no_grad(): x = v.decode(z * std + mean, return_dict=False)[0][:, :, 0]
    want, = VaeImageProcessor(vae_scale_factor=16).postprocess(x, output_type="pil")
    got = decode_latents(v, z, use_2d=False)[0].astype(int)
    assert np.abs(got - np.asarray(want)).max() <= 1 and abs((got - np.asarray(want)).mean()) < 0.01, "rounded, not cut"
