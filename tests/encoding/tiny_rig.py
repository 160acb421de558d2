"""The tiny encoders and random images for the tests of this room."""
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
from PIL import Image

from qie_nb.models.components import VARIANTS, load_component
from qie_nb.tiny.random_models import tiny_folder

SIZES = (84, 140), (168, 56), (112, 112) # (w, h) as the text encoder sees them


@lru_cache
def rig(variant):
    folder = tiny_folder(variant)
    return SimpleNamespace(folder=folder, variant=VARIANTS[variant], te=load_component(folder, "text_encoder"),
                           proc=load_component(folder, "processor"))


def random_image(size, seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def random_images(n, seed=0): return [random_image(s, 10 * seed + i) for i, s in enumerate(SIZES[:n])]


def close(a, b, rtol=1e-5):
    "Equal up to rounding, relative to the largest value."
    assert a.shape == b.shape and a.dtype == b.dtype
    difference, scale = (a - b).abs().max(), b.abs().max()
    assert difference <= rtol * scale, f"{difference:.3g} apart at a scale of {scale:.3g}"


def rms(errors): return sum(e.pow(2).sum() for e in errors).div(sum(e.numel() for e in errors)).sqrt().item()
