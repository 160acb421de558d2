"""What a training step computes, compared with formulas."""
import pytest
import torch
from diffusers import QwenImageEditPlusPipeline

from qie_nb.models import flow_matching as flow
from qie_nb.data.dataset import loader
from qie_nb.trainer import QwenImageEditTrainer

from helpers import settings

slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)


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
    trainer.components.loaded["transformer"] = PerfectTransformer(QwenImageEditPlusPipeline._pack_latents(batch["pixel_latent"], B, C, h, w))
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


@pytest.mark.parametrize("dropout", [0., slow(1.)])
def test_a_caption_or_its_dropout_is_encoded_with_the_samples_own_images(dropout, pairs, tmp_path):
    trainer, batch = batch_of(pairs, tmp_path, "2511", 1, dropout)
    dataset, encoder = trainer.make_loader().dataset, trainer.encoder()
    for i, got in enumerate(dataset[i]["prompt_embed"] for i in range(2)):
        want = encoder.prompt("" if dropout else "invert the colours", dataset.images(i)["control"], dataset.geometry)[0]
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert batch["cached"] and not torch.allclose(got, dataset[0]["prompt_embed"], rtol=0.1, atol=0.1), "the images count"
