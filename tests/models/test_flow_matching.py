"""Noise levels, level weights and mask weights against diffusers and against plain sums."""
import pytest
import torch
from torch.testing import assert_close

from helpers import Scaled, made_batch
from qie_nb.config import TrainSection
from qie_nb.models import flow_matching as flow
from qie_nb.tiny.random_models import tiny_pipeline
from qie_nb.training.step import flow_matching_loss, sample_noise_and_sigmas, step_strata

QUANTILES = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
SEEDS = range(3000)

# noise levels

@pytest.mark.parametrize("mean, std", [(0., 1.), (0.8, 1.), (-1., 0.5)])
def test_logit_normal_matches_diffusers(mean, std):
    from diffusers.training_utils import compute_density_for_timestep_sampling
    theirs = compute_density_for_timestep_sampling("logit_normal", 100_000, mean, std, generator=torch.Generator().manual_seed(0))
    ours = flow.sample_sigmas(SEEDS, "logit_normal", mean=mean, std=std)
    assert_close(ours.quantile(QUANTILES), theirs.quantile(QUANTILES), atol=0.025, rtol=0)
    assert abs(ours.mean() - theirs.mean()) < 0.015


@pytest.mark.parametrize("tokens", [256, 8192])
def test_shift_matches_the_scheduler(tokens):
    scheduler = tiny_pipeline("2511").scheduler
    mu = flow.calculate_mu(tokens, scheduler.config)
    plain, shifted = flow.sample_sigmas(SEEDS), flow.sample_sigmas(SEEDS, "shift", mu)
    low, high = (scheduler.time_shift(mu, 1.0, (plain - d).clamp_min(1e-6)) for d in (0.001, 0.))
    assert (shifted > low - 1e-4).all() and (shifted < high + 0.0011).all(), "a draw and its shifted value share a timestep"


@pytest.mark.parametrize("how", flow.SAMPLINGS)
def test_a_sigma_is_a_timestep_and_depends_on_its_seed_alone(how):
    s = flow.sample_sigmas(SEEDS, how, 0.7)
    assert ((s * 1000 - (s * 1000).round()).abs() < 1e-3).all() and s.min() > 0 and s.max() <= 1
    assert torch.equal(flow.sample_sigmas([7, 3], how, 0.7), s[[7, 3]])


def test_noise_does_not_depend_on_the_sampling_of_sigmas():
    batch, config = dict(pixel_latent=torch.zeros(3, 16, 1, 4, 6)), tiny_pipeline("2511").scheduler.config
    options = [TrainSection(timestep_sampling=how) for how in flow.SAMPLINGS]
    options += [TrainSection(timestep_sampling="fixed_shift", timestep_shift=9.), TrainSection(timestep_sampling="logit_normal", logit_mean=2.)]
    drawn = [sample_noise_and_sigmas(batch, [1, 2, 3], how, config) for how in options]
    assert all(torch.equal(eps, drawn[0][0]) for eps, _ in drawn)
    assert len({tuple(s.tolist()) for _, s in drawn}) == len(options), "the settings change sigmas"


def test_noise_and_level_of_a_sample_come_from_different_numbers():
    "With the same ones the normal level would be the noise's first number."
    levels = flow.sample_sigmas(SEEDS, "logit_normal", steps=None)
    first = torch.sigmoid(flow.sample_noise(SEEDS, (1,))[:, 0]) # drawn as a level is
    assert (levels - first).abs().mean() > 0.1 and abs(torch.corrcoef(torch.stack([levels, first]))[0, 1]) < 0.3


# weights of noise levels

def test_level_weights_are_those_of_diffusers_with_mean_one():
    from diffusers.training_utils import compute_loss_weighting_for_sd3
    levels = torch.arange(1, 1001) / 1000
    assert torch.equal(flow.level_weights(levels, "cosmap"), compute_loss_weighting_for_sd3("cosmap", levels))
    bounded = flow.level_weights(levels, "sigma_sqrt")
    assert_close(bounded[99:] * 19, compute_loss_weighting_for_sd3("sigma_sqrt", levels[99:]))
    assert bounded.max() < 5.3 and (bounded[:99] == bounded[99]).all()


def test_level_weights_apply_per_sample_and_only_on_request():
    batch, sigmas = made_batch(), torch.tensor([0.2, 0.9])
    loss = lambda batch=batch, eps=torch.randn(2, 16, 1, 4, 6), **kw: flow_matching_loss(Scaled(), batch, eps, sigmas, **kw)
    assert_close(loss(weighting="sigma_sqrt"), loss() * torch.tensor([25., 1 / 0.81]) / 19)
    assert_close(loss({**batch, "mask": torch.rand(2, 1, 4, 6)}), loss()) # by default neither weights nor masks


# masks in the loss

@pytest.mark.parametrize("background, controls", [(0., 1), (0.1, 3)])
def test_masked_loss_and_gradient_by_hand(background, controls):
    batch, scale = made_batch(3, controls=controls), 0.7
    g = torch.Generator().manual_seed(5)
    mask, eps, sigmas = torch.rand(3, 1, 4, 6, generator=g), torch.randn(3, 16, 1, 4, 6, generator=g), torch.tensor([0.3, 0.8, 0.5])
    mask[2] = 0. # black everywhere: without a background no loss and no nan
    model = Scaled(scale)
    loss = flow_matching_loss(model, {**batch, "mask": mask}, eps, sigmas, mask_min_weight=background)
    for b, s in enumerate(sigmas.tolist()):
        x, n = batch["pixel_latent"][b, :, 0].double(), eps[b, :, 0].double()
        w = background + (1 - background) * mask[b].double().expand(16, -1, -1)
        total = w.sum().clamp_min(1e-9)
        x_t, v = (1 - s) * x + s * n, n - x
        grad, = torch.autograd.grad(loss[b], model.scale, retain_graph=True)
        assert loss[b].item() == pytest.approx(((w * (scale * x_t - v) ** 2).sum() / total).item(), rel=1e-5)
        assert grad.item() == pytest.approx(((2 * w * (scale * x_t - v) * x_t).sum() / total).item(), rel=1e-4)


def test_a_mask_in_pixels_is_averaged_over_latent_pixels():
    big = torch.rand(1, 1, 32, 48)
    blocks = big.view(1, 1, 4, 8, 6, 8).mean((3, 5))
    like = torch.zeros(1, 16, 1, 4, 6)
    assert_close(flow.mask_weights(big, like, 0.), flow.mask_weights(blocks, like, 0.))


@pytest.mark.parametrize("how", flow.SAMPLINGS)
def test_strata_divide_a_step_and_leave_each_samples_distribution_as_it_is(how):
    "The samples of a step draw from as many equally likely parts; over many steps a sample has all levels."
    plain = flow.sample_sigmas(range(8000), how, 0.5, None)
    edges = plain.quantile(torch.tensor([0., 0.25, 0.5, 0.75, 1.]))
    first = []
    for step in range(1500):
        strata = step_strata([(i, 4) for i in range(4)], 3, step)
        assert sorted(strata) == [(k, 4) for k in range(4)]
        s = flow.sample_sigmas([4 * step + i for i in range(4)], how, 0.5, None, strata=strata)
        for (k, _), level in zip(strata, s): assert edges[k] - 0.03 <= level <= edges[k + 1] + 0.03
        first.append(s[0])
    wanted = torch.tensor([0.1, 0.5, 0.9])
    assert_close(torch.stack(first).quantile(wanted), plain.quantile(wanted), atol=0.04, rtol=0)
    orders = {tuple(k for k, _ in step_strata([(i, 4) for i in range(4)], 3, step)) for step in range(200)}
    assert len(orders) == 24, "each step has another order"
    if how != "logit_normal": assert_close(flow.sample_sigmas([5], how, 0.5, None, strata=[(0, 1)]), flow.sample_sigmas([5], how, 0.5, None))
