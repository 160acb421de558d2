"""Training options: noise levels and weights against diffusers, masks by hand, optimizers that leave no trace of a bad step, EMA."""
import json, shutil

import numpy as np
import pytest
import torch
from PIL import Image

from qie_nb.models import flow_matching as flow

from qie_nb.training import optimizer as optimize

from qie_nb.data import samples
from qie_nb.training.checkpoint import join_state, split_state
from qie_nb.config import OptimizerSection, SchedulerSection, TrainSection
from qie_nb.data.dataset import ImageDataset, loader
from qie_nb.training.optimizer import EMA
from qie_nb.training.optimizer import check_optimizer, guarded_step, make_optimizer, make_schedule
from qie_nb.data.samples import Sample, find_samples, load_mask
from qie_nb.training.step import batch_seeds, draw, loss_at
from qie_nb.tiny.random_models import tiny_pipeline
from qie_nb.trainer import QwenImageEditTrainer

from helpers import settings

QUANTILES = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
SEEDS = range(3000)


# noise levels

@pytest.mark.parametrize("mean, std", [(0., 1.), (0.8, 1.), (-1., 0.5)])
def test_logit_normal_has_the_distribution_of_diffusers(mean, std):
    from diffusers.training_utils import compute_density_for_timestep_sampling
    theirs = compute_density_for_timestep_sampling("logit_normal", 100_000, mean, std, generator=torch.Generator().manual_seed(0))
    ours = flow.sample_sigmas(SEEDS, "logit_normal", mean=mean, std=std)
    torch.testing.assert_close(ours.quantile(QUANTILES), theirs.quantile(QUANTILES), atol=0.025, rtol=0)
    assert abs(ours.mean() - theirs.mean()) < 0.015


@pytest.mark.parametrize("tokens", [256, 4096, 8192])
def test_shift_is_the_schedulers_own(tokens):
    scheduler = tiny_pipeline("2511").scheduler
    mu = flow.calculate_mu(tokens, scheduler.config)
    plain, shifted = flow.sample_sigmas(SEEDS), flow.sample_sigmas(SEEDS, "shift", mu)
    low, high = (scheduler.time_shift(mu, 1.0, (plain - d).clamp_min(1e-6)) for d in (0.001, 0.))
    assert (shifted > low - 1e-4).all() and (shifted < high + 0.0011).all(), "the draw lies in its timestep, and so does its image"


@pytest.mark.parametrize("shift", [0.5, 3.0])
def test_fixed_shift_is_that_of_a_scheduler_with_this_shift(shift):
    from diffusers import FlowMatchEulerDiscreteScheduler
    theirs = FlowMatchEulerDiscreteScheduler(1000, shift=shift).sigmas.flip(0) # of timesteps 1 ... 1000, after the end's 0
    theirs = theirs[-1000:]
    plain, shifted = flow.sample_sigmas(SEEDS), flow.sample_sigmas(SEEDS, "fixed_shift", mu=5., shift=shift)
    t = (plain * 1000).round().long() # a draw lies in (t - 1, t]
    assert (shifted < theirs[t - 1] + 0.0011).all() and (shifted > torch.where(t > 1, theirs[t - 2], 0.) - 1e-4).all()


@pytest.mark.parametrize("how", flow.SAMPLINGS)
def test_a_level_is_a_timestep_and_depends_on_its_own_seed_alone(how):
    s = flow.sample_sigmas(SEEDS, how, 0.7)
    assert ((s * 1000 - (s * 1000).round()).abs() < 1e-3).all() and s.min() > 0 and s.max() <= 1
    assert torch.equal(flow.sample_sigmas([7, 3], how, 0.7), s[[7, 3]])


def test_the_noise_is_the_same_however_levels_are_drawn():
    batch, config = dict(pixel_latent=torch.zeros(3, 16, 1, 4, 6)), tiny_pipeline("2511").scheduler.config
    options = [*flow.SAMPLINGS, TrainSection(timestep_sampling="fixed_shift", timestep_shift=9.), TrainSection(timestep_sampling="logit_normal", logit_mean=2., logit_std=0.1)]
    drawn = [draw(batch, [1, 2, 3], how, config) for how in options]
    assert all(torch.equal(eps, drawn[0][0]) for eps, _ in drawn)
    assert len({tuple(s.tolist()) for _, s in drawn}) == len(options), "and the settings reach the levels"


# weights of noise levels

def test_level_weights_are_those_of_diffusers_brought_to_a_mean_of_one():
    from diffusers.training_utils import compute_loss_weighting_for_sd3
    levels = torch.arange(1, 1001) / 1000
    for how in flow.WEIGHTINGS: assert abs(flow.level_weights(levels, how).mean() - 1) < 0.01
    assert torch.equal(flow.level_weights(levels, "cosmap"), compute_loss_weighting_for_sd3("cosmap", levels))
    bounded = flow.level_weights(levels, "sigma_sqrt")
    torch.testing.assert_close(bounded[99:] * 19, compute_loss_weighting_for_sd3("sigma_sqrt", levels[99:]))
    assert bounded.max() < 5.3 and (bounded[:99] == bounded[99]).all()


class Scaled(torch.nn.Module):
    "Predicts its input times a number."
    def __init__(self, scale=0.7): super().__init__(); self.scale = torch.nn.Parameter(torch.tensor(scale))
    def forward(self, hidden_states, **kw): return (hidden_states * self.scale,)


def made_batch(B=2, h=4, w=6, controls=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    control = [torch.randn(B, 16, 1, 2 + 2 * k, 4, generator=g) for k in range(controls)]
    return dict(pixel_latent=torch.randn(B, 16, 1, h, w, generator=g), control_latent=control if controls > 1 else control[0], prompt_embed=torch.randn(B, 3, 8, generator=g), prompt_embeds_mask=None)


def test_a_level_weighs_its_own_sample_and_only_where_it_is_asked_for():
    batch, eps, sigmas = made_batch(), torch.randn(2, 16, 1, 4, 6), torch.tensor([0.2, 0.9])
    plain = loss_at(Scaled(), batch, eps, sigmas)
    torch.testing.assert_close(loss_at(Scaled(), batch, eps, sigmas, weighting="sigma_sqrt"), plain * torch.tensor([25., 1 / 0.81]) / 19)
    assert torch.equal(loss_at(Scaled(), {**batch, "mask": torch.rand(2, 1, 4, 6)}, eps, sigmas), plain), "by default neither weights nor masks"


# masks in the loss

@pytest.mark.parametrize("background", [0., 0.1, 0.5])
@pytest.mark.parametrize("controls", [1, 3])
def test_masked_loss_and_gradient_are_those_computed_by_hand(background, controls):
    batch, scale = made_batch(controls=controls), 0.7
    g = torch.Generator().manual_seed(5)
    mask, eps, sigmas = torch.rand(2, 1, 4, 6, generator=g), torch.randn(2, 16, 1, 4, 6, generator=g), torch.tensor([0.3, 0.8])
    model = Scaled(scale)
    loss = loss_at(model, {**batch, "mask": mask}, eps, sigmas, background=background)
    x0, e, m = batch["pixel_latent"].double().numpy(), eps.double().numpy(), mask.double().numpy()
    for b in range(2):
        total = slope = weight = 0.
        for i in range(4):
            for j in range(6):
                w = background + (1 - background) * m[b, 0, i, j]
                weight += w
                for c in range(16):
                    s, x, n = sigmas[b].item(), x0[b, c, 0, i, j], e[b, c, 0, i, j]
                    x_t, v = (1 - s) * x + s * n, n - x
                    total, slope = total + w * (scale * x_t - v) ** 2 / 16, slope + w * 2 * (scale * x_t - v) * x_t / 16
        grad, = torch.autograd.grad(loss[b], model.scale, retain_graph=True)
        assert loss[b].item() == pytest.approx(total / weight, rel=1e-5) and grad.item() == pytest.approx(slope / weight, rel=1e-4)


def test_a_white_mask_changes_no_bit_of_loss_and_gradient():
    batch, eps, sigmas = made_batch(h=6, w=10), torch.randn(2, 16, 1, 6, 10), torch.tensor([0.3, 0.8])
    for background in (0., 0.1, 0.3):
        losses, grads = [], []
        for mask in (None, torch.ones(2, 1, 6, 10)):
            model = Scaled()
            losses.append(loss_at(model, {**batch, "mask": mask}, eps, sigmas, background=background))
            grads.append(torch.autograd.grad(losses[-1].sum(), model.scale)[0])
        assert torch.equal(*losses) and torch.equal(*grads)


def test_a_black_mask_from_elsewhere_gives_a_loss_of_nothing_and_no_nan():
    batch, eps, model = made_batch(), torch.randn(2, 16, 1, 4, 6), Scaled()
    mask = torch.ones(2, 1, 4, 6); mask[0] = 0
    loss = loss_at(model, {**batch, "mask": mask}, eps, torch.tensor([0.5, 0.5]), background=0.)
    assert loss[0] == 0 and torch.equal(loss[1], loss_at(model, batch, eps, torch.tensor([0.5, 0.5]))[1])
    assert torch.isfinite(torch.autograd.grad(loss.sum(), model.scale)[0])


def test_a_mask_in_pixels_is_averaged_over_latent_pixels():
    big = torch.rand(1, 1, 32, 48)
    blocks = big.view(1, 1, 4, 8, 6, 8).mean((3, 5))
    like = torch.zeros(1, 16, 1, 4, 6)
    torch.testing.assert_close(flow.mask_weights(big, like, 0.), flow.mask_weights(blocks, like, 0.))


# masks in the data

def paint(root, masks, folder="mask_images", ending=""):
    "Write masks {stem: array} beside a data set."
    (root/folder).mkdir(exist_ok=True)
    for stem, a in masks.items(): Image.fromarray(np.asarray(a, np.uint8)).save(root/folder/f"{stem}{ending}.png")
    return root


def halves(w, h):
    a = np.zeros((h, w), np.uint8); a[:, w // 2:] = 255
    return a


@pytest.mark.parametrize("folder, ending", [("mask_images", ""), ("masks", ""), ("masks", "_mask"), ("training_images", "_mask"), ("training_images", "-Mask")])
def test_masks_are_found_beside_and_in_folders(folder, ending, pairs):
    root = paint(pairs(((48, 32),) * 3), {"0000": halves(48, 32), "0002": halves(48, 32)}, folder, ending)
    found = find_samples(root)
    assert [s.mask and s.mask.name for s in found] == [f"0000{ending}.png", None, f"0002{ending}.png"]
    assert not found.ignored and repr(found).endswith("1 control each, masks for 2 of 3")
    both = find_samples([str(root), str(root)])
    assert [bool(s.mask) for s in both] == [True, False, True] * 2, "in several sets too"


def test_masks_of_pairs_told_by_their_endings(tmp_path):
    for name in ("a_start", "a_end", "a_mask", "b_start", "b_end", "c_mask"): Image.new("L", (8, 8), 255).save(tmp_path/f"{name}.png")
    for name in "ab": (tmp_path/f"{name}.txt").write_text("x")
    found = find_samples(tmp_path)
    assert [s.mask and s.mask.name for s in found] == ["a_mask.png", None] and dict(found.ignored) == {"c_mask.png": "neither target nor control by its name"}
    (tmp_path/"masks").mkdir(); shutil.move(tmp_path/"a_mask.png", tmp_path/"masks"/"a.png")
    assert [s.mask and s.mask.name for s in find_samples(tmp_path)] == ["a.png", None]


def test_orphan_masks_are_listed(pairs):
    root = paint(pairs(((48, 32),)), {"0000": halves(48, 32), "other": halves(48, 32)})
    assert dict(find_samples(root).ignored) == {"mask_images/other.png": "a mask without a target"}


@pytest.mark.parametrize("column", ["mask", "mask_image", "mask_path", "Mask File"])
def test_masks_of_a_table(column, pairs):
    root = paint(pairs(((48, 32),) * 2), {"0000": halves(48, 32)}, "painted")
    rows = [dict(image=f"training_images/000{i}.png", edit_image=f"control_images/000{i}.png", prompt="x") | ({column: "painted/0000.png"} if i == 0 else {column: ""}) for i in range(2)]
    (root/"metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = find_samples(root)
    assert [s.mask and s.mask.name for s in found] == ["0000.png", None] and f"mask `{column}`" in found.layout
    (root/"metadata.jsonl").write_text("\n".join(json.dumps(r | {column: "../../x.png"}) for r in rows))
    with pytest.raises(ValueError, match="row 1 of 'metadata.jsonl' names '../../x.png' outside the data set"): find_samples(root)


def test_masks_of_a_data_set_of_the_hub():
    datasets = pytest.importorskip("datasets")
    pictures, mask = [Image.new("RGB", (48, 32), c) for c in ("red", "green")], Image.fromarray(halves(48, 32))
    features = datasets.Features(target_image=datasets.Image(), control_image=datasets.Image(), prompt=datasets.Value("string"), mask=datasets.Image())
    data = datasets.Dataset.from_dict(dict(target_image=pictures, control_image=pictures, prompt=["x", "y"], mask=[None, mask]), features=features)
    found = find_samples(data)
    assert found[0].mask is None and found[1].mask.name == "mask[1]"
    dataset = ImageDataset(dict(image_size=[64, 64]), samples=found)
    assert dataset.mask(1).shape == (8, 8) and dataset[0].get("mask") is None and dataset[1]["mask"][0].tolist() == [0] * 4 + [255] * 4


def test_a_sample_is_made_as_before():
    assert Sample("a", "a.png", ("b.png",), "x").mask is None


def test_a_mask_is_cut_turned_and_averaged_as_its_target(pairs, tmp_path):
    upright = np.zeros((64, 96), np.uint8); upright[:, 32:] = 255 # white on the right, and not up to the middle
    target = Image.fromarray(upright).convert("RGB").transpose(Image.Transpose.ROTATE_90) # stored turned, marked 6: turn it back
    exif = Image.Exif(); exif[0x0112] = 6
    for d in ("training_images", "control_images", "masks"): (tmp_path/d).mkdir()
    for d in ("training_images", "control_images"): target.save(tmp_path/d/"a.jpg", exif=exif, quality=100)
    (tmp_path/"training_images"/"a.txt").write_text("x")
    Image.fromarray(upright).save(tmp_path/"masks"/"a.png")
    for kw, size in (dict(image_size=[96, 64]), (96, 64)), (dict(image_size=[64, 64], crop=True), (64, 64)), (dict(image_size=[48, 64], crop=True), (48, 64)):
        dataset = ImageDataset(dict(dataset_path=str(tmp_path), **kw))
        w, h = size
        seen = dataset.images(0)["image"].mean(2).reshape(h // 8, 8, w // 8, 8).mean((1, 3))
        assert dataset.mask(0).shape == (h // 8, w // 8)
        assert np.abs(dataset.mask(0).astype(float) - seen).max() < 16, "the mask lies on the image it was painted on"


def test_the_average_over_latent_pixels_by_hand(tmp_path):
    a = np.random.default_rng(0).integers(0, 256, (32, 48)).astype(np.uint8)
    Image.fromarray(a).save(tmp_path/"m.png")
    want = [[a[8 * i:8 * i + 8, 8 * j:8 * j + 8].astype(float).mean() for j in range(6)] for i in range(4)]
    assert np.abs(load_mask(tmp_path/"m.png", (48, 32)) - np.array(want)).max() <= 0.5


@pytest.mark.parametrize("write, sentence", [
    (lambda p: p.write_text("no image"), "cannot be read"),
    (lambda p: Image.new("L", (32, 48), 255).save(p), "is 32x48, another shape than its target of 48x32; cut it alike or take it out"),
    (lambda p: Image.new("L", (48, 32), 0).save(p), "is black everywhere; paint white what counts, or take it out"),
    (lambda p: Image.new("L", (48, 32), 1).save(p), "is black everywhere")])
def test_a_mask_that_cannot_be_used_leaves_its_sample_out(write, sentence, pairs, tmp_path, capsys):
    root = paint(pairs(((48, 32),) * 2), {"0000": halves(48, 32)})
    write(root/"mask_images"/"0001.png")
    kw = dict(data=dict(caption_dropout_rate=0.))
    made = QwenImageEditTrainer(settings(root, tmp_path, **kw)).make_loader()
    assert [s.id for s in made.dataset.samples] == ["0000"] and sentence in capsys.readouterr().out
    assert len(list(made)) == 1
    with pytest.raises(ValueError, match=sentence): QwenImageEditTrainer(settings(root, tmp_path, data=dict(strict=True))).make_loader()


def test_a_black_mask_is_noticed_where_all_tensors_are_cached_too(pairs, tmp_path, capsys):
    root = pairs(((48, 32),) * 2)
    QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings()
    paint(root, {"0001": np.zeros((32, 48))})
    made = QwenImageEditTrainer(settings(root, tmp_path)).make_loader()
    assert [s.id for s in made.dataset.samples] == ["0000"] and "0001.png' is black everywhere" in capsys.readouterr().out


def test_a_smaller_mask_of_the_same_shape_will_do(pairs):
    root = paint(pairs(((48, 32),)), {"0000": halves(24, 16)})
    assert ImageDataset(dict(dataset_path=str(root), image_size=[48, 32], crop=True)).mask(0).tolist() == [[0, 0, 0, 255, 255, 255]] * 4


def test_masks_change_no_key_and_run_no_encoder(pairs, tmp_path, built):
    root = pairs(((48, 32),) * 2)
    trainer = QwenImageEditTrainer(settings(root, tmp_path))
    trainer.cache_embeddings()
    before = [trainer.make_loader().dataset.keys(i) for i in range(2)]
    paint(root, {"0000": halves(48, 32)})
    built.clear()
    again = QwenImageEditTrainer(settings(root, tmp_path))
    report = again.cache_embeddings()
    assert (report.encoded, report.reused) == (0, 2)
    made = again.make_loader()
    assert [made.dataset.keys(i) for i in range(2)] == before and all(b["cached"] for b in made) and not built


def test_a_mask_is_decoded_once(pairs, tmp_path, monkeypatch):
    root = paint(pairs(((48, 32),) * 2), {"0000": halves(48, 32), "0001": halves(48, 32)})
    trainer, opened, real = QwenImageEditTrainer(settings(root, tmp_path)), [], samples.load_mask
    trainer.cache_embeddings()
    monkeypatch.setattr("qie_nb.data.dataset.load_mask", lambda mask, *a: opened.append(mask) or real(mask, *a))
    made = trainer.make_loader()
    for _ in range(3): assert all(b["mask"] is not None for b in made)
    assert len(opened) == 2


@pytest.mark.parametrize("controls", [1, 2])
def test_cached_and_uncached_batches_carry_the_same_masks(controls, pairs, tmp_path):
    root = paint(pairs(((64, 32),) * 3 + ((32, 64),), controls=controls), {"0000": halves(64, 32), "0001": 255 - halves(64, 32)})
    def batches(use):
        trainer = QwenImageEditTrainer(settings(root, tmp_path, data=dict(batch_size=3, shuffle=False, caption_dropout_rate=0.), cache=dict(use_cache=use)))
        if use: trainer.cache_embeddings()
        return trainer, list(trainer.make_loader())
    (a, cached), (b, plain) = batches(True), batches(False)
    assert [x["cached"] for x in cached] == [True] * 2 and [x["cached"] for x in plain] == [False] * 2
    for x, y in zip(cached, plain):
        if x["mask"] is None: assert y["mask"] is None and x["sample_id"] == ["0003"]
        else:
            h, w = x["pixel_latent"].shape[-2:]
            assert torch.equal(x["mask"], y["mask"]) and x["mask"].shape == (3, 1, h, w) and x["mask"].dtype == torch.float32
            assert (x["mask"][2] == 1).all() and (x["mask"][0] + x["mask"][1] == 1).all() and x["mask"][0, 0, 0, 0] == 0
            encoded = {**y, **b.encode_batch(y)}
            eps, sigmas = torch.randn(x["pixel_latent"].shape), torch.tensor([0.2, 0.5, 0.8])
            assert torch.equal(*(loss_at(Scaled(), z, eps, sigmas, background=0.1) for z in (x, encoded)))
        assert set(x.get_images_for_tensorboard()) == {"training_images", "control_images", "source", "problems"}


class Masked(QwenImageEditTrainer):
    "A trainer whose loss has the options of its configuration."
    def _compute_loss(self, batch, seeds):
        c = self.config.train
        drawn = draw(batch, seeds, c, self.components.get("scheduler").config)
        return loss_at(self._transformer(), batch, *drawn, self.device, self.weight_dtype, c.loss_weighting, c.mask_min_weight)


@pytest.mark.parametrize("controls", [1, 2])
def test_masked_samples_accumulate_exactly(controls, pairs, tmp_path):
    root = paint(pairs(((64, 32),) * 4, controls=controls), {"0000": halves(64, 32), "0001": np.pad(np.full((4, 4), 255), ((0, 28), (0, 60)))})
    def gradient(batch_size, **train):
        t = Masked(settings(root, tmp_path, data=dict(batch_size=batch_size, caption_dropout_rate=0.), train=dict(num_epochs=1, mask_min_weight=0.05, loss_weighting="cosmap", timestep_sampling="logit_normal", **train)))
        seen = []
        t.callbacks.append(type("N", (), dict(on_train_begin=lambda s, t: None, on_epoch_end=lambda s, t: None, on_train_end=lambda s, t: None,
                                              on_step_end=lambda s, t: seen.append([p.grad.clone() for g in t.optimizer.param_groups for p in g["params"] if p.grad is not None]))))
        t.callbacks[-1] = t.callbacks[-1]()
        t.fit()
        return seen
    one, four, plain = gradient(4), gradient(1, gradient_accumulation_steps=4), gradient(4)
    assert len(one) == len(four) == 1
    for a, b in zip(one[0], four[0], strict=True): torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
    shutil.rmtree(root/"mask_images")
    assert any(not torch.allclose(a, b, rtol=1e-2) for a, b in zip(one[0], gradient(4)[0])), "the masks were used at all"


# optimizers

NAMES = ("adamw", "adamw8bit", "adafactor", "prodigy")


def optimizer_of(name, seed=0, **kw):
    g = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(64, 128, generator=g)), torch.nn.Parameter(torch.zeros(8, 4)), torch.nn.Parameter(torch.randn(4100, generator=g))] # two of them large enough for 8 bits
    return params, make_optimizer(params, OptimizerSection(name=name, lr=1. if name == "prodigy" else 1e-2, **kw))


def put_gradients(params, step, bad=None):
    g = torch.Generator().manual_seed(100 + step)
    for p in params: p.grad = torch.randn(p.shape, generator=g)
    if bad is not None: params[0].grad[0, 0] = bad


def steps(params, opt, kinds): # a number is a step; nan and inf are bad gradients
    for k in kinds:
        bad = None if isinstance(k, int) else k
        put_gradients(params, 0 if bad is not None else k, bad)
        guarded_step(opt, torch.tensor(bad is None))


def same_state(a, b):
    (ta, ra), (tb, rb) = split_state(a), split_state(b)
    assert ta.keys() == tb.keys() and all(torch.equal(ta[k], tb[k]) and ta[k].dtype == tb[k].dtype for k in ta)
    assert ra == rb


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_called_off_leaves_no_trace(name, bad):
    (p, a), (q, b) = optimizer_of(name), optimizer_of(name)
    steps(p, a, [0, 1, 2, 3]); steps(q, b, [bad, bad, 0, 1, bad, 2, bad, bad, 3, bad])
    assert all(torch.equal(x, y) for x, y in zip(p, q)) and all(torch.isfinite(x).all() for x in q)
    same_state(a.state_dict(), b.state_dict())
    steps(p, a, [4, 5]); steps(q, b, [bad, 4, 5])
    assert all(torch.equal(x, y) for x, y in zip(p, q))


@pytest.mark.parametrize("name", NAMES)
def test_a_first_step_called_off_is_as_if_there_had_been_none(name):
    (p, fresh), (q, opt) = optimizer_of(name), optimizer_of(name)
    steps(q, opt, [float("nan")])
    assert all(torch.equal(x, y) for x, y in zip(p, q))
    tensors, rest = split_state(opt.state_dict())
    assert all((t == 0).all() for t in tensors.values()), "adamw has its zeros already, the others have nothing"
    assert rest["param_groups"] == fresh.state_dict()["param_groups"]


@pytest.mark.parametrize("name", NAMES)
def test_a_guarded_step_is_the_librarys_own(name):
    (p, a), (q, b) = optimizer_of(name), optimizer_of(name)
    for k in range(4):
        put_gradients(p, k); put_gradients(q, k)
        a.step(); guarded_step(b, torch.tensor(True))
    assert all(torch.equal(x, y) for x, y in zip(p, q))
    same_state(a.state_dict(), b.state_dict())


@pytest.mark.parametrize("name, theirs", [("adamw", 0), ("adamw8bit", 0), ("adafactor", 0), ("prodigy", None)])
@pytest.mark.parametrize("ok", [True, False])
def test_the_host_asks_the_device_nothing(name, theirs, ok, monkeypatch):
    params, opt = optimizer_of(name)
    steps(params, opt, [0, float("nan"), 1])
    put_gradients(params, 2)
    count = []
    for what in ("item", "__bool__", "__float__", "__int__", "tolist", "__index__"):
        real = getattr(torch.Tensor, what)
        monkeypatch.setattr(torch.Tensor, what, lambda self, *a, _real=real, _what=what: count.append(_what) or _real(self, *a))
    if theirs is None: # Prodigy asks by itself, as often without a guard
        opt.step()
        theirs = len(count)
        assert theirs == 2 * len(params)
        count.clear()
        put_gradients(params, 3)
    guarded_step(opt, torch.tensor(ok))
    assert len(count) == theirs, count


@pytest.mark.parametrize("name", NAMES)
def test_a_state_goes_through_safetensors_and_json_and_on_bit_for_bit(name, tmp_path):
    from safetensors.torch import load_file, save_file
    (p, a), (q, b) = optimizer_of(name), optimizer_of(name)
    steps(p, a, [0, 1, 2]); steps(q, b, [0, 1, 2])
    tensors, rest = split_state(b.state_dict())
    save_file(tensors, tmp_path/"state.safetensors")
    joined = join_state(load_file(tmp_path/"state.safetensors"), json.loads(json.dumps(rest)))
    same_state(joined, a.state_dict())
    r, c = optimizer_of(name, seed=9) # another process: other weights, a fresh optimizer
    with torch.no_grad():
        for x, y in zip(r, q): x.copy_(y)
    c.load_state_dict(joined)
    steps(p, a, [3, 4, 5]); steps(r, c, [3, float("nan"), 4, 5])
    assert all(torch.equal(x, y) for x, y in zip(p, r))
    same_state(a.state_dict(), c.state_dict())


def test_an_optimizer_that_accelerate_has_wrapped_is_guarded_too():
    from accelerate import Accelerator
    for name in ("adamw", "adafactor"):
        params, opt = optimizer_of(name)
        wrapped, was = Accelerator(cpu=True).prepare(opt), [p.detach().clone() for p in params]
        assert wrapped is not opt
        steps(params, wrapped, [float("nan")])
        assert all(torch.equal(p, w) for p, w in zip(params, was))
        steps(params, wrapped, [0])
        assert not any(torch.equal(p, w) for p, w in zip(params, was))


@pytest.mark.parametrize("name", ["adafactor", "prodigy"])
def test_a_state_loaded_after_a_step_that_was_called_off_stays_as_it_is(name):
    (p, a), (q, b) = optimizer_of(name), optimizer_of(name)
    steps(p, a, [0, 1]); steps(q, b, [0, 1])
    held = join_state(*split_state(a.state_dict()))
    steps(q, b, [2, float("nan")])
    b.load_state_dict(held)
    same_state(b.state_dict(), a.state_dict())


def test_missing_packages_and_impossible_settings_are_said_before_anything_is_loaded(monkeypatch):
    with pytest.raises(ValueError, match="`optimizer.lr` .* must be about 1, got 0.0001; set it to 1"): check_optimizer(OptimizerSection(name="prodigy"))
    monkeypatch.setattr(optimize, "find_spec", lambda name: None)
    for name, package in (("prodigy", "prodigyopt"), ("adamw8bit", "bitsandbytes")):
        with pytest.raises(ValueError, match=f"`optimizer.name` {name} needs {package}, which is not installed; `pip install {package}` or use adamw"): check_optimizer(OptimizerSection(name=name, lr=1.))
    monkeypatch.undo()
    def broken(*a): raise NotImplementedError("no kernel for this device")
    monkeypatch.setattr(optimize, "_adamw8bit", broken)
    with pytest.raises(ValueError, match="adamw8bit does not run on cpu .*NotImplementedError: no kernel.*; `pip install -U bitsandbytes` or use adamw"): check_optimizer(OptimizerSection(name="adamw8bit"))


@pytest.mark.parametrize("name", NAMES)
def test_each_optimizer_lowers_the_loss(name, pairs, tmp_path):
    root, rate = pairs(((48, 32),) * 2), dict(adamw=5e-3, adamw8bit=5e-3, adafactor=5e-3, prodigy=1.)[name]
    t = QwenImageEditTrainer(settings(root, tmp_path, optimizer=dict(name=name, lr=rate), data=dict(caption_dropout_rate=0.), train=dict(num_epochs=1)))
    t.cache_embeddings()
    batch = next(iter(t.make_loader()))
    t.set_lora().configure_optimizers()
    eps, sigmas = draw(batch, [1, 2], "uniform", t.components.get("scheduler").config)
    losses = []
    for _ in range(30):
        t.optimizer.zero_grad()
        loss = t.loss_at(batch, eps, sigmas).mean()
        loss.backward()
        guarded_step(t.optimizer, torch.isfinite(loss))
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.999, losses


def test_a_schedule_that_would_not_do_what_it_says_is_refused():
    _, opt = optimizer_of("adamw")
    with pytest.raises(ValueError, match="`lr_scheduler.warmup_steps` is 10, but the run has 10 optimizer steps"): make_schedule(opt, SchedulerSection(warmup_steps=10), 10)
    make_schedule(opt, SchedulerSection(warmup_steps=10), 11)
    make_schedule(opt, SchedulerSection(warmup_steps=10), 0) # the length is not known yet
    for section, sentence in ((dict(scheduler_type="constant", warmup_steps=1), "constant has no warm-up"), (dict(scheduler_type="polynomial", num_cycles=2), "polynomial has no cycles"),
                              (dict(scheduler_type="cosine_with_restarts", num_cycles=0.5), "must be a whole number with restarts, got 0.5; use 1")):
        with pytest.raises(ValueError, match=sentence): make_schedule(opt, SchedulerSection(**section), 100)


# the mean over the weights

def walk(ema, params, n, seed=0, **kw):
    g = torch.Generator().manual_seed(seed)
    seen = []
    for _ in range(n):
        with torch.no_grad():
            for p in params: p.add_(torch.randn(p.shape, generator=g))
        seen.append([p.detach().clone() for p in params])
        ema.update(**kw)
    return seen


def test_the_mean_is_the_one_of_the_formula():
    params = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.ones(4))]
    ema, want = EMA(params, 0.7), [p.detach().double() for p in params]
    for n, seen in enumerate(walk(ema, params, 30)): # 0.7 is reached at step 20
        decay = min(0.7, (1 + n) / (10 + n))
        want = [decay * w + (1 - decay) * s.double() for w, s in zip(want, seen)]
    for m, w in zip(ema.mean, want): torch.testing.assert_close(m, w.float(), rtol=1e-4, atol=1e-5)
    from diffusers.training_utils import EMAModel
    theirs = EMAModel(params, decay=0.9)
    assert [round(theirs.get_decay(n + 1), 12) for n in range(1, 200)] == [round(min(0.9, (1 + n) / (10 + n)), 12) for n in range(1, 200)]


def test_a_step_called_off_does_not_reach_the_mean_and_nobody_waits(monkeypatch):
    params = [torch.nn.Parameter(torch.randn(3))]
    ema = EMA(params, 0.9)
    walk(ema, params, 3, ok=torch.tensor(True))
    ema.mean[0][0] = -0.
    was, bits = ema.mean[0].clone(), ema.mean[0].view(torch.int32).clone()
    with torch.no_grad(): params[0][1] = float("nan")
    count = []
    for what in ("item", "__bool__", "__float__"):
        real = getattr(torch.Tensor, what)
        monkeypatch.setattr(torch.Tensor, what, lambda self, *a, _real=real: count.append(1) or _real(self, *a))
    ema.update(torch.tensor(False))
    assert not count
    monkeypatch.undo()
    assert torch.equal(ema.mean[0].view(torch.int32), bits) and torch.equal(ema.mean[0], was)


def test_asked_and_unasked_updates_give_the_same_bits():
    held = []
    for kw in ({}, dict(ok=torch.tensor(True))):
        params = [torch.nn.Parameter(torch.zeros(50))]
        ema = EMA(params, 0.99)
        walk(ema, params, 30, **kw)
        held.append(ema.mean[0])
    assert torch.equal(*held)


def test_the_adapter_comes_back_to_the_bit_whatever_happens_inside():
    params = [torch.nn.Parameter(torch.randn(5, 3))]
    ema = EMA(params, 0.9)
    walk(ema, params, 5)
    was, address = params[0].detach().clone(), params[0].data_ptr()
    with pytest.raises(KeyError):
        with ema.swap():
            assert torch.equal(params[0], ema.mean[0]) and params[0].requires_grad
            raise KeyError("evaluation failed")
    assert torch.equal(params[0], was) and params[0].data_ptr() == address, "the optimizer holds the same tensor"


def test_a_mean_resumes_to_the_bit(tmp_path):
    from safetensors.torch import load_file, save_file
    params = [torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(2, 2))]
    ema = EMA(params, 0.9)
    walk(ema, params, 4)
    state = ema.state_dict()
    save_file(state["mean"], tmp_path/"ema.safetensors")
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    again = EMA(twins, 0.9)
    again.load_state_dict(dict(n=json.loads(json.dumps(state["n"])), mean=load_file(tmp_path/"ema.safetensors")))
    walk(ema, params, 6, seed=3); walk(again, twins, 6, seed=3)
    assert again.n == ema.n == 10 and all(torch.equal(a, b) for a, b in zip(again.mean, ema.mean))
    with pytest.raises(ValueError, match="is of 2 tensors that do not fit this adapter's 1"): EMA(params[:1], 0.9).load_state_dict(state)
    with pytest.raises(ValueError, match="do not fit"): EMA([twins[0], torch.nn.Parameter(torch.zeros(4, 2, 2))], 0.9).load_state_dict(state)


def test_divided_parameters_are_averaged_and_stepped_too(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    dist.init_process_group("gloo", init_method=f"file://{tmp_path/'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain = torch.nn.Parameter(torch.randn(6, 4))
        divided = torch.nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
        held = []
        for p in (plain, divided):
            opt, ema = make_optimizer([p], OptimizerSection(lr=1e-2)), EMA([p], 0.9)
            for k, ok in enumerate((True, False, True)):
                g = torch.full((6, 4), 0.1 * k + 0.1 if ok else float("nan"))
                p.grad = g if p is plain else distribute_tensor(g, mesh, [Shard(0)])
                guarded_step(opt, torch.tensor(ok))
                ema.update(torch.tensor(ok))
            with ema.swap(): inside = p.detach().clone()
            held.append([t.full_tensor() if isinstance(t, DTensor) else t for t in (p.detach(), inside, ema.mean[0])])
        assert isinstance(ema.mean[0], DTensor) and all(torch.equal(a, b) for a, b in zip(*held))
    finally: dist.destroy_process_group()
