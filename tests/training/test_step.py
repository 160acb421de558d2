"""What a training step computes, compared with formulas."""
import pytest
import torch
from diffusers import QwenImageEditPlusPipeline

from qie_nb.models import flow_matching as flow
from qie_nb.core.choice import RunLength
from qie_nb.data.batches import collate
from qie_nb.data.dataset import loader
from qie_nb.encoding.encoder import encode_prompt
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.callbacks import RunState
from qie_nb.training.step import BatchStream

from helpers import settings, slow


def batch_of(pairs, tmp_path, variant, controls, dropout=0., **kw):
    "A cached batch of a data set, with its trainer."
    trainer = QwenImageEditTrainer(settings(pairs(((48, 32),) * 2, controls=controls, **kw), tmp_path, variant, data=dict(caption_dropout_rate=dropout))).set_lora()
    trainer.cache_embeddings()
    return trainer, next(iter(trainer.make_loader()))


class PerfectTransformer(torch.nn.Module):
    "Answers with the true velocity (x_t - x0) / sigma on the target's tokens and with nonsense on the controls'."
    def __init__(self, x0): super().__init__(); self.x0 = x0
    def forward(self, hidden_states, timestep, **kw):
        n = self.x0.shape[1]
        x_t, s = hidden_states[:, :n], timestep.float().view(-1, 1, 1)
        return (torch.cat([(x_t - self.x0) / s, torch.full_like(hidden_states[:, n:], 99.)], 1),)


@pytest.mark.parametrize("variant, controls", [slow("v1", 1), slow("2509", 1), ("2511", 2)])
def test_the_true_velocity_has_no_loss(variant, controls, pairs, tmp_path):
    trainer, batch = batch_of(pairs, tmp_path, variant, controls)
    B, C, _, h, w = batch["pixel_latent"].shape
    trainer.components.adopt("transformer", PerfectTransformer(QwenImageEditPlusPipeline._pack_latents(batch["pixel_latent"], B, C, h, w)))
    assert trainer.training_step(batch).item() < 1e-6


def test_the_transformer_gets_what_the_pipeline_would_give_it(pairs, tmp_path):
    trainer, batch = batch_of(pairs, tmp_path, "2511", 2)
    seen = {}
    trainer.transformer.register_forward_pre_hook(lambda m, a, kw: seen.update(kw), with_kwargs=True)
    trainer.training_step(batch)
    shapes = [(1, x.shape[-2] // 2, x.shape[-1] // 2) for x in (batch["pixel_latent"], *batch["control_latent"])]
    assert seen["img_shapes"] == [shapes] * 2 and seen["guidance"] is None
    assert ((seen["timestep"] > 0) & (seen["timestep"] <= 1)).all()
    controls = torch.cat([flow.pack_latents(c) for c in batch["control_latent"]], 1)
    rows, columns = shapes[0][1:]
    assert torch.equal(seen["hidden_states"][:, rows * columns:], controls), "controls must stay clean"


@pytest.mark.parametrize("variant, controls", [slow("v1", 1), slow("2509", 2), ("2511", 3)])
def test_samples_of_unequal_prompts_train_as_if_alone(variant, controls, pairs, tmp_path):
    trainer, batch = batch_of(pairs, tmp_path, variant, controls, caption=["invert", "invert all of the colours, please"])
    assert len({len(e) for e in batch["prompt_embed"]}) == 2
    params = [p for p in trainer.transformer.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in params: p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    together, alone = trainer.training_step(batch), sum(trainer.training_step(b) for b in loader(trainer.make_loader().dataset, batch_size=1)) / 2
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    for a, b in zip(torch.autograd.grad(together, params), torch.autograd.grad(alone, params)): torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("weighting", ["sigma_sqrt", "cosmap"])
def test_each_sample_is_weighted_by_its_own_level(weighting, pairs, tmp_path):
    trainer, batch = batch_of(pairs, tmp_path, "2511", 1)
    eps, sigmas = flow.sample_noise([1, 2], batch["pixel_latent"].shape[1:]), torch.tensor([0.2, 0.7])
    with torch.no_grad(): plain, weighted = (trainer.loss(batch, eps, sigmas, how) for how in ("none", weighting))
    weights = torch.cat([flow.level_weights(s[None], weighting) for s in sigmas])
    torch.testing.assert_close(weighted, plain * weights, rtol=1e-4, atol=1e-6)
    assert abs(weights[0] / weights[1] - 1) > 0.1


@pytest.mark.parametrize("dropout", [0., slow(1.)])
def test_a_caption_or_its_dropout_is_encoded_with_the_samples_own_images(dropout, pairs, tmp_path):
    trainer, batch = batch_of(pairs, tmp_path, "2511", 1, dropout)
    dataset, encoder = trainer.make_loader().dataset, trainer.encoder()
    for i, got in enumerate(dataset[i]["prompt_embed"] for i in range(2)):
        want = encode_prompt(encoder, "" if dropout else "invert the colours", dataset.images(i)["control"], dataset.geometry)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert batch["cached"] and not torch.allclose(got, dataset[0]["prompt_embed"], rtol=0.1, atol=0.1), "the images count"


def test_losses_of_a_split_batch_are_in_the_order_of_its_samples(pairs, tmp_path):
    "Another loader's batch with prompts of lengths 1, 2, 1: the equal ones are computed together, the losses come back in the batch's order."
    trainer = QwenImageEditTrainer(settings(pairs(((48, 32),) * 3, caption=["invert", "invert all of the colours, please", "invert"]), tmp_path)).set_lora()
    trainer.cache_embeddings()
    data = trainer.make_loader().dataset
    batch = collate([data[i] for i in (0, 1, 2)])
    assert [len(e) == len(batch["prompt_embed"][0]) for e in batch["prompt_embed"]] == [True, False, True]
    eps, sigmas = torch.randn(batch["pixel_latent"].shape, generator=torch.Generator().manual_seed(0)), torch.tensor([0.2, 0.5, 0.9])
    alone = [trainer.loss(collate([data[i]]), eps[i:i + 1], sigmas[i:i + 1]).item() for i in range(3)]
    assert trainer.loss(batch, eps, sigmas).tolist() == pytest.approx(alone, rel=1e-4) and len({round(x, 3) for x in alone}) == 3


def test_another_loader_is_taken_up_where_the_run_stopped():
    state = RunState(position=2)
    assert [list(g) for g in BatchStream([dict(prompt=["x"], n=n) for n in range(5)], 2, []).groups(state)] == [[dict(prompt=["x"], n=2), dict(prompt=["x"], n=3)], [dict(prompt=["x"], n=4)]]


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("accumulated", [1, 2, 3])
def test_a_run_is_planned_to_the_end_of_its_epoch_wherever_a_forced_resume_takes_it_up(position, accumulated):
    "Its earlier steps may have had another number of batches."
    state = RunState(position=position, global_step=5)
    epoch = [dict(prompt=["x"]) for _ in range(8)]
    state.plan_lengths(RunLength(epochs=1), len(epoch), accumulated)
    assert state.max_steps == 5 + len(list(BatchStream(epoch, accumulated, []).groups(state)))
    assert state.num_epochs == 1


@pytest.mark.slow
def test_the_batches_of_a_step_draw_from_different_parts_of_the_levels(pairs, tmp_path, monkeypatch):
    "With `train.stratified_timesteps`; without it the parts are not made."
    def drawn(**train):
        seen = []
        class Watching(QwenImageEditTrainer):
            def loss(self, batch, eps, sigmas, *a):
                seen.append((self.global_step, sigmas.tolist()))
                return super().loss(batch, eps, sigmas, *a)
        Watching(settings(pairs(((48, 32),) * 8), tmp_path/str(len(train)), data=dict(batch_size=2), cache=dict(cache_dir=str(tmp_path/"cache")),
                          train=dict(output_dir=str(tmp_path/str(len(train))), gradient_accumulation_steps=2, val_fraction=0) | train)).fit()
        return [sorted(level for at, levels in seen for level in levels if at == step) for step in range(4)]
    for levels in drawn(stratified_timesteps=True): assert [min(3, int(level * 4 - 1e-4)) for level in levels] == [0, 1, 2, 3]
    assert any([min(3, int(level * 4 - 1e-4)) for level in levels] != [0, 1, 2, 3] for levels in drawn())
