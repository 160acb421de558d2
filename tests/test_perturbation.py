"""The perturbed mode of `make test-perturbed` changes bits, and no more than bits."""
import os, subprocess, sys
from pathlib import Path

import pytest

CODE = """
import sitecustomize, torch
import torch.nn.functional as F
x, w = torch.randn(64, 32), torch.randn(48, 32)
a, b = F.linear(x, w), F.linear(x.clone(), w.clone())
assert not torch.equal(a, b) and (a - b).abs().max() < 1e-5 * a.abs().max()
im, k = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
assert not torch.equal(F.conv2d(im, k), F.conv2d(im.clone(), k.clone()))
q = torch.randn(1, 2, 16, 8, requires_grad=True)
out = F.scaled_dot_product_attention(q, q, q)
out.sum().backward()
assert not torch.equal(out, F.scaled_dot_product_attention(query=q.clone(), key=q, value=q)) and torch.isfinite(q.grad).all()
assert torch.equal(F.linear(torch.zeros(2, 3), torch.zeros(4, 3)), torch.zeros(2, 4)), "zeros stay zeros"
class Doubled(torch.Tensor): # like a quantized weight
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func is F.linear
        return func(args[0], args[1].as_subclass(torch.Tensor) * 2)
before = sitecustomize.results
torch.testing.assert_close(F.linear(x, w.as_subclass(Doubled)), 2 * a)
assert sitecustomize.results == before + 1
print("perturbed", sitecustomize.results)
"""


@pytest.mark.slow
def test_perturbed_mode_changes_the_last_bits():
    env = os.environ | dict(PYTHONPATH=str(Path(__file__).parent/"perturb"))
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env)
    assert "perturbed" in done.stdout, done.stderr
