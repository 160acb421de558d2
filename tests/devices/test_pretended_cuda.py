"""Training, evaluation, sampling, encoding and saving on a pretended GPU, with data on the CPU: nothing mixes devices.

Left out: nf4, whose weights cannot be wrapped in a fake tensor; pinned memory and CUDA streams, which ask the driver
(`test_block_swap` has fake streams); the fused attention kernels, which have no fake form that runs on a CPU; and
`predict` as a whole, which `test_placement` runs on three fake GPUs.
"""
import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch.utils._python_dispatch import _disable_current_modes

from qie_nb.data.dataset import ImageDataset
from qie_nb.devices.placement import PARTS
from qie_nb.devices.strategies.block_swap import enable_block_swap
from qie_nb.encoding.encoder import image_set
from qie_nb.evaluation.validation_loss import PARTS as LEVELS, held_out_loss
from qie_nb.lora.adapters import WEIGHT_NAME, add_lora, lora_parameters, lora_state
from qie_nb.models.modulation import ModulationTable, use_modulation_table
from qie_nb.sampling.denoising import denoise, sampling_schedule
from qie_nb.tiny.random_models import tiny_pipeline
from qie_nb.training.checkpoint import read_checkpoint, split_state

from helpers import random_lora, settings, write_pairs
from pretended import CPU, GPU, components_of, devices_of, pretend, pretended_gpu, trainer_on_gpu


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline("2511")


@pytest.fixture
def gpu():
    with pretended_gpu() as mode: yield mode


@pytest.fixture
def ready(pipe, gpu, tmp_path):
    "A function that makes a trainer ready for its first step: models and adapter on the GPU."
    def make(
        prepare=None, # function of the real transformer
        dtype=torch.float32, # of the transformer
        fp16=False, # products in scaled float16?
        parts=("transformer",), # models that the test uses
        blocks=1, # of the transformer: each costs the fake tensors time
        **sections, # of the configuration
    ):
        with _disable_current_modes():
            own = components_of(pipe, parts, dtype, blocks)
            t = trainer_on_gpu(settings(tmp_path/"set", tmp_path, **sections), own)
            if prepare is not None: prepare(own["transformer"])
            random_lora(add_lora(own["transformer"], t.config.model.lora))
        t.components.fp16 = fp16
        for part in parts: pretend(gpu, own[part])
        t.components.move("transformer", GPU)
        t.prepare_model().configure_optimizers()
        t.started = True
        return t
    return make


def batch_of(n=2, words=5, **more):
    "A batch as the data loader gives it: on the CPU."
    g = torch.Generator().manual_seed(0)
    target = torch.randn(n, 16, 1, 8, 12, generator=g)
    control = torch.randn(n, 16, 1, 8, 8, generator=g)
    prompts = list(torch.randn(n, words, 64, generator=g))
    return dict(pixel_latent=target, control_latent=[control], prompt_embed=prompts, prompt_embeds_mask=None,
                sample_id=[f"pair {i}" for i in range(n)]) | more


def prompts_of_two_lengths():
    g = torch.Generator().manual_seed(1)
    return [torch.randn(words, 64, generator=g) for words in (5, 3)]


def painted():
    mask = torch.zeros(2, 1, 8, 12)
    mask[..., :6] = 1
    return mask


def one_step(t, batch):
    "The first step of a run, as `fit` takes it."
    run = t.setup_run([batch])
    assert devices_of([t.finite.skipped, t.finite.row, t.finite.worst]) == {GPU}, "the counter"
    t.optimizer_step(next(run.groups(t.state)))


def assert_trained_on_gpu(t):
    "All that a step computes is on the GPU, and every adapter weight has a gradient."
    adapter = lora_parameters(t.transformer)
    assert all(p.grad is not None and p.grad.numbers.isfinite().all() for p in adapter)
    assert any(p.grad.numbers.any() for p in adapter)
    assert devices_of(adapter) == devices_of(p.grad for p in adapter) == {GPU}
    assert devices_of(t.ema.mean) == {GPU}, "the running mean"
    moments = [m for state in t.optimizer.state.values() for m in state.values()]
    assert len(moments) == 3 * len(adapter) and devices_of(moments) == {GPU}
    assert devices_of([t.state.loss, t.state.grad_norm]) == {GPU}
    assert devices_of([t.finite.skipped, t.finite.row, t.finite.worst]) == {GPU}
    assert t.state.loss.numbers.isfinite() and not t.finite.skipped.numbers


BF16 = dict(dtype=torch.bfloat16, train=dict(mixed_precision="bf16"))
CASES = dict(
    plain=(dict(), dict()),
    selective=(dict(train=dict(gradient_checkpointing="selective")), dict()),
    fp16=(dict(fp16=True), dict()),
    fp16_selective=(dict(fp16=True, train=dict(gradient_checkpointing="selective")), dict()),
    painted_mask=(dict(train=dict(mask_min_weight=0.1, loss_weighting="sigma_sqrt")), dict(mask=painted())),
    prompts_in_parts=(dict(), dict(prompt_embed=prompts_of_two_lengths())),
    prompt_mask=(dict(train=dict(loss_weighting="cosmap")),
                 dict(prompt_embed=torch.ones(2, 5, 64),
                      prompt_embeds_mask=torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 0]]))),
    bf16=(BF16, dict()),
    bf16_recomputed=(BF16 | dict(train=dict(mixed_precision="bf16", gradient_checkpointing=True)), dict()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_mixes_no_devices(name, ready, gpu):
    how, more = CASES[name]
    train = dict(gradient_checkpointing=False, ema_decay=0.9) | how.get("train", {})
    t = ready(**how | dict(train=train))
    before = {k: p.numbers.clone() for k, p in t.transformer.named_parameters() if p.requires_grad}
    one_step(t, batch_of(**more))
    assert_trained_on_gpu(t)
    assert gpu.worked == {str(GPU)}, "products were computed elsewhere"
    if t.components.fp16: assert set(t.transformer.fp16_stats.tops) == {GPU}
    after = dict(t.transformer.named_parameters())
    assert any(not torch.equal(after[k].numbers, was) for k, was in before.items())


def test_a_step_that_is_not_finite_changes_nothing(ready):
    t = ready(train=dict(gradient_checkpointing=False, ema_decay=0.9))
    before = {k: p.numbers.clone() for k, p in t.transformer.named_parameters()}
    one_step(t, batch_of(control_latent=[torch.full((2, 16, 1, 8, 8), torch.nan)]))
    assert devices_of([t.finite.skipped]) == {GPU} and t.finite.read() == (1, 1)
    for name, p in t.transformer.named_parameters(): assert torch.equal(p.numbers, before[name]), name
    mean = [m.numbers for m in t.ema.mean]
    assert all(torch.equal(m, p.numbers) for m, p in zip(mean, t.ema.params, strict=True))


# --- modulation table
def table_for(transformer, folder):
    "A table of the times at which a batch's levels may be, computed on the CPU."
    transformer.save_pretrained(folder)
    table = ModulationTable("a digest", torch.float32, len(transformer.transformer_blocks), folder)
    table.make((0., 0.25, 0.5, 1.))
    return table


def test_rows_of_the_modulation_table_go_to_the_gpu(ready, gpu, tmp_path):
    def with_table(transformer):
        use_modulation_table(transformer, table_for(transformer, tmp_path/"transformer"))
    t = ready(with_table, train=dict(gradient_checkpointing=False, ema_decay=0.9))
    one_step(t, batch_of())
    assert_trained_on_gpu(t)
    assert devices_of([t.transformer.lookup.rows]) == {GPU}


# --- block swap
@pytest.mark.slow
def test_swapped_blocks_compute_with_weights_on_the_gpu(ready, gpu):
    "Without streams: the copies wait. The blocks' own weights are on the CPU between two calls."
    t = ready(blocks=2, train=dict(gradient_checkpointing=True, ema_decay=0.9))
    swap = enable_block_swap(t.transformer, GPU, slots=1).block_swap
    assert devices_of(swap.slots) == {GPU} and devices_of(p.flat for p in swap.pinned) == {CPU}
    seen = []
    for block in t.transformer.transformer_blocks:
        block.register_forward_pre_hook(lambda block, args: seen.append(devices_of(block.parameters())))
    one_step(t, batch_of())
    assert_trained_on_gpu(t)
    assert seen == [{GPU}] * (2 * len(swap.pinned)) and gpu.worked == {str(GPU)}
    assert swap.holds == [0]


# --- encoders
def photo(seed=0, size=(64, 48)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


@pytest.mark.slow
def test_encoders_take_images_and_prompts_from_the_cpu(ready, gpu):
    t = ready(parts=PARTS)
    encoder = t.encoder(None)
    latent = encoder.encode_images([photo(), photo(1)], (64, 48))
    assert devices_of([latent]) == {GPU} and latent.shape == (2, 16, 1, 6, 8)
    vae = t.components.vae
    assert devices_of(vae.encoder.parameters()) == {GPU} and devices_of(vae.decoder.parameters()) == {CPU}
    images = image_set([photo()], t.geometry())
    for share in (True, False):
        embedding = encoder.encode_prompts(["make it blue"], [images], share)[0]
        assert devices_of([embedding.whole]) == {GPU}
    assert devices_of(t.components.text_encoder.parameters()) == {GPU}
    assert gpu.worked == {str(GPU)}


# --- evaluation
@pytest.mark.slow
def test_the_held_out_loss_reads_pairs_from_the_cpu(ready, gpu, tmp_path, monkeypatch):
    write_pairs(tmp_path/"set", [(48, 32)])
    t = ready(parts=PARTS, cache=dict(use_cache=False))
    dataset = ImageDataset(t.config)
    t.set_geometry_and_identity(dataset)
    noted = []
    loss_of = t.loss
    def loss(batch, *args):
        assert devices_of([batch["pixel_latent"], *batch["control_latent"], *batch["prompt_embed"]]) == {CPU}
        noted.append(loss_of(batch, *args))
        return noted[-1]
    monkeypatch.setattr(t, "loss", loss)
    losses = held_out_loss(t, dataset, noises=1)
    assert len(noted) == len(LEVELS) and devices_of(noted) == {GPU}
    assert np.isfinite(losses.interval.mean) and gpu.worked == {str(GPU)}


# --- sampling
@pytest.mark.slow
@pytest.mark.parametrize("guided", [False, True])
def test_sampling_and_decoding_stay_on_the_gpu(guided, ready, gpu):
    t = ready(parts=("transformer", "vae"))
    t.transformer.eval()
    noise = torch.randn(1, 16, 1, 6, 8).to(GPU)
    control = torch.randn(1, 16, 1, 4, 4).to(GPU)
    text = (torch.randn(1, 5, 64).to(GPU), None)
    schedule = sampling_schedule(t.components.get("scheduler"), 2, 12, GPU, variant=t.components.variant)
    estimates = []
    def note(n, steps, get): estimates.append(get())
    latents = denoise(t.transformer, schedule, noise, [control], text, text if guided else None, on_estimate=note,
                      variant=t.components.variant)
    assert devices_of([latents, *estimates]) == {GPU} and len(estimates) == 2
    t.components.move("vae", GPU)
    image = t.decode_vae_latent(latents)
    assert image.shape == (1, 48, 64, 3) and gpu.worked == {str(GPU)}


# --- saving
@pytest.mark.slow
def test_a_checkpoint_is_gathered_on_the_cpu_and_resumed_on_the_gpu(ready):
    t = ready(train=dict(gradient_checkpointing=False, ema_decay=0.9))
    one_step(t, batch_of())
    tensors = split_state(t.optimizer.state_dict())[0]
    assert devices_of(tensors.values()) == {CPU} and len(tensors) == 3 * len(t.ema.params)
    adapter = lora_state(t.transformer)
    assert devices_of(adapter.values()) == {CPU}
    saved = read_checkpoint(t.save_checkpoint(1, 1))
    stored = safetensors.torch.load_file(saved.folder/WEIGHT_NAME)
    for name, tensor in adapter.items(): assert torch.equal(stored[name], tensor.numbers), name

    again = ready(train=dict(gradient_checkpointing=False, ema_decay=0.9))
    again.checkpoints.restore(saved)
    one_step(again, batch_of())
    assert_trained_on_gpu(again)
