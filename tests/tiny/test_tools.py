"""The scripts that train the embedded model."""
import subprocess, sys
from pathlib import Path

import numpy as np
import pytest
import torch

TOOLS = Path(__file__).parents[2]/"tools"
sys.path.append(str(TOOLS))
from tiny_vae import LinearCode, _run, new_vae, patches, plant, single_frame


def test_single_frame_convolutions_are_exact():
    vae, x = new_vae().eval(), patches(2, 32, np.random.default_rng(0))
    with torch.no_grad():
        slow = vae.decode(vae.encode(x).latent_dist.mode()).sample
        with single_frame(): fast = _run(vae, x)[0].clamp(-1, 1)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


def test_planted_vae_computes_the_linear_code():
    torch.manual_seed(0)
    code, vae, x = LinearCode(), new_vae().eval(), patches(16, 48, np.random.default_rng(0))
    for c in code.children(): torch.nn.init.orthogonal_(c.weight)
    plant(vae, code, x)
    with torch.no_grad(), single_frame(): a, b = _run(vae, x)[0][:, :, 0], code(x[:, :, 0])[0]
    assert ((a - b).square().mean() / b.var()).item() < 0.05


@pytest.mark.weekly
def test_the_script_writes_a_model(tmp_path):
    short = ["--minutes-vae", "0.05", "--minutes-transformer", "0.05", "--crops", "1"]
    done = subprocess.run([sys.executable, "train_tiny_model.py", "--out", tmp_path/"model", *short], cwd=TOOLS, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path/"model"/"qie_nb.json").is_file(), done.stderr[-2000:]
