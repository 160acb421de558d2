"""Tiny transformers with adapters, and the LoRA files of several tests."""
import copy, re
from functools import lru_cache
from unittest import mock

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from qie_nb.lora import adapters as lora
from qie_nb.config import LoraSection
from qie_nb.tiny.random_models import tiny_pipeline

B0 = "transformer_blocks.0.attn.to_q"
pipeline = lru_cache(tiny_pipeline)


def bare(variant="2511", dtype=torch.float32): return copy.deepcopy(pipeline(variant).transformer).to(dtype)


@torch.no_grad()
def randomize(tr, seed, scale=0.1):
    g = torch.Generator().manual_seed(seed)
    for n, p in tr.named_parameters():
        if ".lora_" in n: p.copy_(p * (1 + 0.2 * torch.rand(p.shape, generator=g)) if "magnitude" in n else torch.randn(p.shape, generator=g) * scale)
    return tr


def trained(variant="2511", dtype=torch.float32, seed=1, scale=0.1, **settings):
    return randomize(lora.add_lora(bare(variant, dtype), LoraSection(**dict(r=4, lora_alpha=6) | settings)), seed, scale)


def forward(tr, seed=1):
    "The prediction for two random samples: a target of 2x3 tokens, a control of 3x2."
    randn = lambda *shape, g=torch.Generator().manual_seed(seed): torch.randn(2, *shape, generator=g).to(tr.dtype)
    return tr(hidden_states=randn(12, 64), encoder_hidden_states=randn(7, 64), encoder_hidden_states_mask=torch.tensor([[True] * 7, [True] * 5 + [False] * 2]),
              timestep=torch.full((2,), 0.6, dtype=tr.dtype), img_shapes=[[(1, 2, 3), (1, 3, 2)]] * 2, return_dict=False)[0][:, :6].float()


output = torch.no_grad()(forward)


def same(a, b, rtol=1e-4, atol=1e-5): torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def loaded(path, variant="2511"):
    tr = bare(variant)
    lora.load_lora(tr, path)
    return tr


def adapted(tr): return {re.sub(r"\.lora_.*", "", k.removeprefix("transformer.")) for k in lora.lora_tensors(tr)}


def file_of(path):
    with safe_open(path, "pt") as f: return {k: f.get_tensor(k) for k in f.keys()}, f.metadata()


def same_file(a, b):
    (ta, ma), (tb, mb) = file_of(a), file_of(b)
    return ma == mb and ta.keys() == tb.keys() and all(torch.equal(ta[k], tb[k]) and ta[k].dtype == tb[k].dtype for k in ta)


def pair(layer, r=4, n=96, m=96): return {f"transformer.{layer}.lora_A.weight": torch.ones(r, n), f"transformer.{layer}.lora_B.weight": torch.ones(m, r)}


def tensors_file(folder, header=None, **tensors):
    save_file(tensors, folder/"x.safetensors", metadata=header)
    return folder/"x.safetensors"


def written(path, text=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


def http_error(name, status):
    from huggingface_hub import errors
    response = mock.Mock(status_code=status, headers={}, request=mock.Mock())
    try: return getattr(errors, name)("no", response=response)
    except TypeError: return getattr(errors, name)("no")
