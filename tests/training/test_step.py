"""What a training step computes, compared with formulas."""
import pytest
import torch

from qie_nb.models import flow_matching as flow
from qie_nb.data.batches import pad_prompts
from qie_nb.data.dataset import ImageDataset, loader
from qie_nb.encoding.encoder import Encoder
from qie_nb.encoding.precompute import precompute
from qie_nb.models.components import Components
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer

from helpers import OnStep, settings

slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)


def batch_of(pairs, tmp_path, variant, controls, sizes=((48, 32),) * 2, **kw):
    "A cached batch of a data set, with its trainer."
    trainer = QwenImageEditTrainer(settings(pairs(sizes, controls=controls, **kw), tmp_path, variant, data=dict(caption_dropout_rate=0.0))).set_lora()
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
    x0 = torch.stack([torch.stack([batch["pixel_latent"][b, :, 0, 2*i:2*i+2, 2*j:2*j+2].reshape(-1) for i in range(h//2) for j in range(w//2)]) for b in range(B)])
    trainer.components.loaded["transformer"] = PerfectTransformer(x0)
    assert trainer.training_step(batch).item() < 1e-6


def test_the_transformer_gets_what_the_pipeline_would_give_it(pairs, tmp_path):
    trainer, batch = batch_of(pairs, tmp_path, "2511", 2)
    seen = {}
    trainer.transformer.register_forward_pre_hook(lambda m, a, kw: seen.update(kw), with_kwargs=True)
    trainer.training_step(batch)
    h, w = batch["pixel_latent"].shape[-2:]
    shapes = [(1, h // 2, w // 2)] + [(1, c.shape[-2] // 2, c.shape[-1] // 2) for c in batch["control_latent"]]
    assert seen["img_shapes"] == [shapes] * 2 and seen["guidance"] is None
    assert seen["hidden_states"].shape[1] == sum(r * c for _, r, c in shapes)
    assert ((seen["timestep"] > 0) & (seen["timestep"] <= 1)).all()
    n = h * w // 4
    for k, c in enumerate(batch["control_latent"]):
        m = c.shape[-2] * c.shape[-1] // 4
        assert torch.equal(seen["hidden_states"][:, n:n + m], flow.pack_latents(c)), f"control {k} must stay clean"
        n += m


@pytest.mark.parametrize("variant, controls", [slow("v1", 1), slow("2509", 2), ("2511", 3)])
def test_samples_of_unequal_prompts_train_as_if_alone(variant, controls, pairs, tmp_path):
    trainer, batch = batch_of(pairs, tmp_path, variant, controls, caption=["invert", "invert all of the colours, please"])
    assert len({len(e) for e in batch["prompt_embed"]}) == 2
    params = [p for p in trainer.transformer.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in params: p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    gradients = lambda loss: torch.autograd.grad(loss, params)
    together = trainer.training_step(batch)
    alone = [trainer.training_step(b) for b in loader(trainer.make_loader().dataset, batch_size=1)]
    torch.testing.assert_close(together, sum(alone) / 2, rtol=1e-5, atol=1e-6)
    for a, b in zip(gradients(together), gradients(sum(alone) / 2)): torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_padded_prompts_with_a_mask_train_like_unpadded_ones(pairs, tmp_path):
    trainer, batch = batch_of(pairs, tmp_path, "2511", 1, caption=["invert", "invert all of the colours, please"])
    embeds, mask = pad_prompts(batch["prompt_embed"])
    assert batch["prompt_embeds_mask"] is None
    padded = {**batch, "prompt_embed": embeds, "prompt_embeds_mask": mask}
    torch.testing.assert_close(trainer.training_step(padded), trainer.training_step(batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dropout", [0., slow(1.)])
def test_a_caption_or_its_dropout_is_encoded_with_the_samples_own_images(dropout, pairs, tmp_path):
    dataset = ImageDataset(dict(dataset_path=str(pairs(((48, 32),) * 2)), image_size=[64, 64], cache_dir=str(tmp_path/"cache"), caption_dropout_rate=dropout))
    encoder = Encoder(Components(str(tiny_folder("2511"))), dataset.cache)
    precompute(dataset, encoder)
    for i in range(2):
        want = encoder.prompt("" if dropout else dataset[i]["prompt"], dataset.images(i)["control"], dataset.geometry)[0]
        assert dataset[i]["cached"] and torch.equal(dataset[i]["prompt_embed"], want)
    assert not torch.equal(dataset[0]["prompt_embed"], dataset[1]["prompt_embed"])


def test_accumulated_batches_give_the_gradient_of_one(pairs, tmp_path):
    root = pairs(((48, 32),) * 4)
    def norms(batch_size, steps):
        seen = []
        data, train = dict(batch_size=batch_size, caption_dropout_rate=0.0), dict(gradient_accumulation_steps=steps, num_epochs=1)
        QwenImageEditTrainer(settings(root, tmp_path, data=data, train=train), [OnStep(lambda t: seen.append(float(t.state.grad_norm)))]).fit()
        return seen
    one, four = norms(4, 1), norms(1, 4)
    assert len(one) == len(four) == 1 and abs(one[0] - four[0]) < 1e-4 * one[0]
