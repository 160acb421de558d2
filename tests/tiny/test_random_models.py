"""Random models differ by their seed, and have the parts of their variant."""
import json

import torch

from qie_nb.core.presets import VARIANT_NAMES
from qie_nb.models.components import VARIANTS
from qie_nb.tiny.random_models import tiny_folder, tiny_pipeline


def test_the_seed_decides_the_weights_and_leaves_the_callers_random_numbers():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    weights = []
    for seed in (0, 0, 1):
        transformer = tiny_pipeline("2511", seed=seed).transformer
        weights.append(transformer.img_in.weight)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_each_variant_has_its_own_timestep_and_areas():
    for name in VARIANT_NAMES:
        folder, variant = tiny_folder(name, areas=(96 * 96, 112 * 112)), VARIANTS[name]
        transformer = json.loads((folder/"transformer"/"config.json").read_text())
        assert transformer["zero_cond_t"] == variant.zero_cond_t, name
        areas = json.loads((folder/"qie_nb.json").read_text())
        expected = 112 * 112 if variant.vl_area else None
        assert areas == dict(control_area=96 * 96, vl_area=expected), name
    assert {VARIANTS[name].zero_cond_t for name in VARIANT_NAMES} == {False, True}
