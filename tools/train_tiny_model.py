"""Trains the embedded tiny model, qie_nb/assets/tiny-edit, on photographs: `python tools/train_tiny_model.py --out my-tiny`.

It takes an hour on one core. A VAE that is already in the folder is kept, so an interrupted run continues from there. The
shipped transformer was trained in two runs of 22 and 20 minutes, the second with the harder edits twice as often; this script
does it in one. The text encoder is random and stays random, which is enough to distinguish ten instructions."""
import argparse, json, math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn

from qie_nb.data.batches import pad_prompts
from qie_nb.models.flow_matching import (add_noise, calculate_mu, flow_loss, flow_target, img_shapes, pack_latents, sample_noise,
                                         shift_sigmas, unpack_latents)
from qie_nb.tiny.photos import EDITS, crop, crops, photos
from tiny_vae import fit_for, jitter, single_frame, train_vae

AREAS = dict(control_area=96*96, vl_area=64*64) # pixels; the pipelines hard-code 1024*1024 and 384*384
SIZES = [(96, 96), (64, 64), (128, 64), (64, 128)] # trained at; all but 64x64 have the area `control_area`


def _stats(vae):
    c = vae.config
    return torch.tensor(c.latents_mean).view(1, -1, 1, 1, 1), torch.tensor(c.latents_std).view(1, -1, 1, 1, 1)


def _pixels(ims) -> torch.Tensor: # [B, 3, 1, h, w] in -1..1
    return torch.stack([torch.from_numpy(np.asarray(i, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)[:, None] for i in ims])


@torch.no_grad()
def to_latents(
    vae, # AutoencoderKLQwenImage
    ims, # PIL images of one size
) -> torch.Tensor: # [B, 16, 1, h, w], normalized
    "Encodes images to the mode of the posterior."
    mean, std = _stats(vae)
    return (vae.encode(_pixels(ims)).latent_dist.mode() - mean) / std


@torch.no_grad()
def to_images(
    vae, # AutoencoderKLQwenImage
    z:torch.Tensor, # [B, 16, 1, h, w], normalized
) -> list: # PIL images
    "Decodes latents."
    mean, std = _stats(vae)
    a = ((vae.decode(z * std + mean).sample[:, :, 0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(i.permute(1, 2, 0).numpy()) for i in a]


@torch.no_grad()
def embed(
    pipe, # QwenImageEditPlusPipeline
    im, # PIL image
    instruction:str, # `" "` for the empty prompt
) -> torch.Tensor: # [tokens, width]
    "The embedding of a prompt with its image."
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions
    w, h = calculate_dimensions(AREAS["vl_area"], im.width / im.height)
    return pipe.encode_prompt(instruction, [pipe.image_processor.resize(im, h, w)])[0][0]


@torch.no_grad()
def edit_images(
    pipe, # QwenImageEditPlusPipeline
    ims, # PIL images of one size, sides multiples of 8
    instruction:str,
    steps:int=8, # of the sampler
    seed:int=0, # of the noise
) -> list: # PIL images of the same size
    "Edits several images at once, which the Edit-Plus pipeline refuses: same scheduler and template, no guidance."
    n, h, w = len(ims), ims[0].height // 4, ims[0].width // 4
    control = pack_latents(to_latents(pipe.vae, ims))
    prompts, mask = pad_prompts([embed(pipe, i, instruction) for i in ims])
    x = pack_latents(sample_noise([1000 * seed + i for i in range(n)], (16, 1, h, w)))
    pipe.scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=calculate_mu(x.shape[1], pipe.scheduler.config))
    for t in pipe.scheduler.timesteps:
        v = pipe.transformer(hidden_states=torch.cat([x, control], 1), encoder_hidden_states=prompts, encoder_hidden_states_mask=mask,
                             timestep=t.expand(n) / 1000, img_shapes=img_shapes((h, w), [(h, w)], n), return_dict=False)[0][:, :x.shape[1]]
        x = pipe.scheduler.step(v, t, x, return_dict=False)[0]
    return to_images(pipe.vae, unpack_latents(x, h, w))


def edit_error(
    pipe, # QwenImageEditPlusPipeline
    edit, # an `Edit`: its formula is the truth
    ims, # PIL images of one size
    steps:int=8, # of the sampler
    seed:int=0, # of the noise
) -> float: # root mean square, in grey levels of 255
    "Distance of the model's edits from the true ones, which go through the same VAE."
    truth = to_images(pipe.vae, to_latents(pipe.vae, [edit(i) for i in ims]))
    made = edit_images(pipe, ims, edit.instruction, steps, seed)
    return float(np.sqrt(np.mean([np.square(np.float32(a) - np.float32(b)).mean() for a, b in zip(truth, made)])))


def new_transformer(seed:int=0): # QwenImageTransformer2DModel
    """A random transformer in which two of four heads attend to the same position of the control image.

    Their q and k share a constant vector, and q is rotated by one frame. Attention with rotary positions learns this slowly."""
    from diffusers import QwenImageTransformer2DModel
    torch.manual_seed(seed)
    tr = QwenImageTransformer2DModel(num_layers=4, attention_head_dim=32, num_attention_heads=4, joint_attention_dim=64,
                                     axes_dims_rope=(8, 12, 12), zero_cond_t=True)
    bias = torch.zeros(16, 2) # pairs that RoPE turns: 0-3 by frame, 4-9 by row, 10-15 by column, fastest first
    bias[[0, 4, 5, 10, 11], 0] = 1.5 * torch.tensor([1., 1., 0.7, 1., 0.7])
    ahead = bias.clone()
    ahead[0] = 1.5 * torch.tensor([math.cos(1.), math.sin(1.)])
    with torch.no_grad():
        for attn in (b.attn for b in tr.transformer_blocks):
            for lin, b in ((attn.to_q, ahead), (attn.to_k, bias)): lin.weight[:64] *= 0.3; lin.bias[:64] = b.flatten().repeat(2)
            attn.norm_q.weight.fill_(1.6), attn.norm_k.weight.fill_(1.6)
    return tr


def new_pipe(
    vae, # trained
): # QwenImageEditPlusPipeline
    "The VAE with a new transformer and a random text encoder, whose tokenizer knows the words of all instructions."
    from qie_nb.tiny.random_models import tiny_pipeline
    pipe = tiny_pipeline("2511", vae_stages=2, words=tuple(e.instruction for e in EDITS.values()))
    pipe.register_modules(vae=vae, transformer=new_transformer())
    return pipe


class Sample(NamedTuple):
    "One crop with all its edits."
    size: tuple # width and height in pixels
    latents: torch.Tensor # [edits, tokens, 64]; the first edit keeps the image, so it is the control too
    prompts: list # embedding of each edit's instruction, then of the empty prompt


def known_edits() -> list: # of `Edit`, "keep" first
    "The edits that the model is trained on."
    return [e for e in EDITS.values() if e.known]


def recolored(
    im, # PIL image
    rng:np.random.Generator,
): # PIL image
    "Other colors, by `jitter`."
    return Image.fromarray((jitter(np.asarray(im, dtype=np.float32) / 255, rng) * 255).round().astype(np.uint8))


@torch.no_grad()
def make_samples(
    pipe, # with the trained VAE
    n:int=130, # crops of each of `SIZES`
    seed:int=5,
) -> list: # of `Sample`
    "Encodes crops of training photographs, many recolored, once with all their edits."
    rng, ims, out = np.random.default_rng(seed), photos("train") + photos("more")[:3], []
    weights = np.array([3, 3, 2, 1.5, 1.5, 2, 0.7, 1.3]) / 15
    for size in SIZES:
        for _ in range(n):
            for _ in range(20):
                im = crop(ims[rng.choice(len(ims), p=weights)], size, rng, zoom=(0.7, 3))
                if np.asarray(im.convert("L")).std() >= 10: break
            if rng.random() < 0.6: im = recolored(im, rng)
            if rng.random() < 0.5: im = im.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            with single_frame(): latents = pack_latents(to_latents(pipe.vae, [e(im) for e in known_edits()]))
            out.append(Sample(size, latents, [embed(pipe, im, p) for p in [e.instruction for e in known_edits()] + [" "]]))
        print(f"{len(out)} crops encoded", flush=True)
    return out


def train_transformer(
    pipe, # its transformer is trained in place
    samples:list, # of `make_samples`
    minutes:float=42,
    seed:int=2, # of the order, the noise levels and the noise
    batch:int=8,
):
    "Flow matching on all known edits at once. One prompt in ten is empty, as guidance needs it."
    tr, rng, g = pipe.transformer.train().requires_grad_(True), np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    names = [k for k, e in EDITS.items() if e.known]
    often = np.array([2 if k in ("invert", "swap", "contrast") else 1 for k in names]) # the harder ones
    def loss(step):
        size = SIZES[rng.choice(4, p=[0.4, 0.3, 0.15, 0.15])]
        here = [s for s in samples if s.size == size]
        some = [here[i] for i in rng.integers(len(here), size=batch)]
        edits, empty = rng.choice(len(names), size=batch, p=often / often.sum()), rng.random(batch) < 0.1
        x0, control = torch.stack([s.latents[e] for s, e in zip(some, edits)]), torch.stack([s.latents[0] for s in some])
        prompts, mask = pad_prompts([s.prompts[-1 if no else e] for s, e, no in zip(some, edits, empty)])
        sigma = shift_sigmas(torch.rand(batch, generator=g).clamp_min(1e-4), calculate_mu(x0.shape[1], pipe.scheduler.config))
        eps, hw = torch.randn(x0.shape, generator=g), (size[1] // 4, size[0] // 4)
        x_t = add_noise(x0, eps, sigma)
        v = tr(hidden_states=torch.cat([x_t, control], 1), encoder_hidden_states=prompts, encoder_hidden_states_mask=mask,
               timestep=sigma, img_shapes=img_shapes(hw, [hw], batch), return_dict=False)[0]
        each = flow_loss(v, flow_target(x0, eps))
        return each.mean(), {"empty" if no else names[e]: l for l, e, no in zip(each.tolist(), edits, empty)}
    fit_for(minutes, list(tr.parameters()), loss, lr=2e-3, what="transformer")
    tr.eval().requires_grad_(False)


def save_model(
    pipe, # QwenImageEditPlusPipeline
    folder, # written in diffusers' layout
) -> Path:
    "Writes the pipeline, VAE and transformer in bfloat16, with the areas it was trained at."
    folder = Path(folder)
    for part in (pipe.vae, pipe.transformer): nn.Module.to(part, torch.bfloat16)
    pipe.save_pretrained(folder)
    for part in (pipe.vae, pipe.transformer): nn.Module.to(part, torch.float32)
    note = "A tiny model trained on a few photographs: use it at 96x96, 128x64 or 64x128 pixels."
    (folder/"qie_nb.json").write_text(json.dumps(dict(AREAS, note=note), indent=1) + "\n")
    return folder


def main(argv=None):
    "Trains what is missing and writes the folder."
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", default="tiny-edit", help="folder to write; a trained VAE in it is kept")
    p.add_argument("--minutes-vae", type=float, default=15)
    p.add_argument("--minutes-transformer", type=float, default=42)
    p.add_argument("--crops", type=int, default=130, help="of each size, for the transformer")
    p.add_argument("--threads", type=int, default=1)
    a = p.parse_args(argv)
    from diffusers import AutoencoderKLQwenImage
    torch.set_num_threads(a.threads)
    kept = Path(a.out)/"vae"
    if not (kept/"config.json").exists(): train_vae(a.minutes_vae).save_pretrained(kept)
    pipe = new_pipe(AutoencoderKLQwenImage.from_pretrained(kept).eval().requires_grad_(False))
    train_transformer(pipe, make_samples(pipe, a.crops), a.minutes_transformer)
    test = crops(8, (96, 96), seed=7, split="held_out")
    print({name: round(edit_error(pipe, e, test), 1) for name, e in EDITS.items()}, "grey levels from the true edit", flush=True)
    print(f"wrote {save_model(pipe, a.out)}", flush=True)


if __name__ == "__main__": main()
