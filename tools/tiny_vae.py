"""A small VAE, trained from photographs in a quarter of an hour on one core: 33 dB on photographs that it never saw.

It is diffusers' AutoencoderKLQwenImage with two downsampling stages and narrow layers. Two things make so short a training
enough: varied images, and a start from a linear code that is copied into the network."""
import contextlib, math, time

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import nn

from qie_nb.tiny.photos import crop, photos


def fit_for(
    minutes:float, # on the wall clock
    params, # list of parameters; they hold their moving average afterwards
    loss_of, # step -> (loss, dict of numbers to show)
    lr:float, # at its highest: a short warm-up, then half a cosine over the time
    clip:float=1., # greatest norm of the gradient
    decay:float=0.998, # of the moving average
    what:str="", # name in the progress lines
    every:int=100, # steps between progress lines
) -> int: # steps taken
    "AdamW for a given time, with a moving average of the weights; the machine decides the number of steps."
    opt = torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.98), weight_decay=1e-4)
    average, t0, step, shown = [p.detach().clone() for p in params], time.time(), 0, []
    while (part := (time.time() - t0) / 60 / minutes) < 1:
        for g in opt.param_groups: g["lr"] = lr * min(1, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * part)) + 1e-6
        loss, show = loss_of(step)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, clip)
        opt.step()
        step += 1
        torch._foreach_lerp_(average, [p.detach() for p in params], 1 - min(decay, (step + 1) / (step + 10)))
        shown.append(show)
        if step % every == 0:
            numbers = " ".join(f"{k} {np.mean([s[k] for s in shown if k in s]):.3f}" for k in sorted({k for s in shown for k in s}))
            print(f"{what} {(time.time() - t0) / 60:.1f} of {minutes:g} min, step {step}: {numbers}", flush=True)
            shown = []
    with torch.no_grad():
        for p, a in zip(params, average): p.copy_(a)
    return step


def jitter(
    a, # array [h, w, 3] in 0..1
    rng:np.random.Generator,
): # the same shape and range
    "Changes colors, contrast and brightness."
    a = a[..., rng.permutation(3)]
    if rng.random() < 0.5:
        m = np.eye(3) + rng.normal(0, 0.25, (3, 3))
        a = a @ (m / np.abs(m.sum(1, keepdims=True)).clip(0.5)).T
    if rng.random() < 0.2: a = 1 - a
    if rng.random() < 0.15: a = np.repeat(a.mean(-1, keepdims=True), 3, -1) * (rng.uniform(0.5, 1.2, 3) if rng.random() < 0.5 else 1)
    a = ((a - a.mean()) * rng.uniform(0.5, 1.4) + a.mean() + rng.uniform(-0.2, 0.2)).clip(0, 1)
    return (a ** np.exp(rng.uniform(-0.6, 0.6)) if rng.random() < 0.4 else a).astype(np.float32)


def dead_leaves(
    n:int, # side in pixels
    rng:np.random.Generator,
): # array [n, n, 3], about 0..1
    "Discs, squares and lines that cover each other, with radii by a power law (Lee, Mumford & Huang 2001)."
    s, base, spread = 2 * n, rng.integers(0, 256, 3), rng.choice([30, 80, 160])
    im = Image.new("RGB", (s, s), tuple(base.tolist()))
    d = ImageDraw.Draw(im)
    for _ in range(rng.integers(10, 70)):
        r, (x, y), turn = min(s, s * 0.04 * rng.pareto(1.5) + 1.5), rng.uniform(-0.1 * s, 1.1 * s, 2), rng.uniform(0, 6.28)
        color, kind = tuple(int(v) for v in np.clip(base + rng.normal(0, spread, 3), 0, 255)), rng.integers(3)
        if kind == 0: d.ellipse((x - r, y - r * rng.uniform(0.4, 1), x + r, y + r), fill=color)
        if kind == 1:
            corners = turn + np.arange(4) * 1.57 + rng.normal(0, 0.3, 4)
            d.polygon([(x + r * math.cos(t), y + r * math.sin(t)) for t in corners], fill=color)
        if kind == 2:
            dx, dy = 2 * r * math.cos(turn), 2 * r * math.sin(turn)
            d.line((x - dx, y - dy, x + dx, y + dy), fill=color, width=int(rng.integers(1, 6)))
    a, ramp = np.asarray(im.resize((n, n), Image.Resampling.BOX), dtype=np.float32) / 255, np.linspace(-1, 1, n)
    if rng.random() < 0.5: a = a + (rng.normal() * ramp[:, None] + rng.normal() * ramp)[..., None] * rng.normal(0, 0.15, 3)
    return a + rng.normal(0, rng.uniform(0.01, 0.06), (n, n, 1)) if rng.random() < 0.5 else a


def _patch(n, rng, ims, weights):
    if rng.random() < 0.2: a = dead_leaves(n, rng)
    else:
        im, m = ims[rng.choice(len(ims), p=weights)], n * 3 // 2
        if rng.random() < 0.3:
            o = (m - n) // 2
            im = crop(im, (m, m), rng, zoom=(0.5, 3.5)).rotate(rng.uniform(-45, 45), Image.Resampling.BICUBIC).crop((o, o, o + n, o + n))
        else: im = crop(im, (n, n), rng, zoom=(0.5, 5))
        a = np.asarray(im, dtype=np.float32) / 255
    a = np.rot90(a, rng.integers(4))
    if rng.random() < 0.5: a = a[:, ::-1]
    return jitter(a, rng) if rng.random() < 0.85 else a


def patches(
    n:int, # how many
    size:int, # side in pixels
    rng:np.random.Generator,
) -> torch.Tensor: # [n, 3, 1, size, size] in -1..1
    "Varied square images for the VAE, never of held-out photographs."
    ims = photos("train") + photos("more")
    weights = np.array([4, 3, 2, 1, 1.5] + [3, 1, .5, 2, 1, 1, 1, 1, 1]) # richer photographs more often
    out = []
    for _ in range(n):
        a = _patch(size, rng, ims, weights / weights.sum())
        if rng.random() < 0.12:
            t = rng.uniform(0.2, 0.8)
            a = t * a + (1 - t) * _patch(size, rng, ims, weights / weights.sum())
        out.append(np.ascontiguousarray(a, dtype=np.float32))
    return torch.from_numpy(np.stack(out)).permute(0, 3, 1, 2).clamp(0, 1)[:, :, None].contiguous() * 2 - 1


@contextlib.contextmanager
def single_frame():
    "Runs the VAE's causal 3-D convolutions as 2-D ones, which is exact for a single frame and costs less than half."
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d as Conv
    def forward(self, x, cache_x=None):
        return F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, padding=(self._padding[2], self._padding[0])).unsqueeze(2)
    old, Conv.forward = Conv.forward, forward
    try: yield
    finally: Conv.forward = old


def new_vae(): # AutoencoderKLQwenImage
    "A random VAE with two downsampling stages (factor 4); kernel slices that a single frame never uses are zero."
    from diffusers import AutoencoderKLQwenImage
    vae = AutoencoderKLQwenImage(base_dim=16, dim_mult=[1, 2, 3], num_res_blocks=1, temperal_downsample=[False, True])
    with torch.no_grad():
        for n, p in vae.named_parameters():
            if p.ndim == 5 and p.shape[2] > 1: p[:, :, :-1] = 0
    return vae


def _run(vae, x, noise=0.):
    h = vae.quant_conv(vae.encoder(x))
    z = h[:, :16]
    return vae.decoder(vae.post_quant_conv(z + noise * torch.randn_like(z))), z, h[:, 16:]


class LinearCode(nn.Module):
    "The VAE's convolutions along its main path, without norms and activations."
    def __init__(self):
        super().__init__()
        same = lambda i, o: nn.Conv2d(i, o, 3, padding=1)
        self.e_in, self.e_out = same(3, 15), same(23, 16)
        self.down1, self.down2 = nn.Conv2d(15, 15, 3, stride=2), nn.Conv2d(15, 23, 3, stride=2)
        self.d_in, self.up1, self.up2, self.d_out = same(16, 46), same(46, 22), same(22, 7), same(7, 3)

    def forward(self,
        x, # [B, 3, h, w]
        noise:float=0., # standard deviation of the noise added to latents
    ): # (image, latents, end of the encoder, end of the decoder)
        pad, up = lambda t: F.pad(t, (0, 1, 0, 1)), lambda t: F.interpolate(t, scale_factor=2., mode="nearest-exact")
        h = self.down2(pad(self.down1(pad(self.e_in(x)))))
        z = self.e_out(h)
        g = self.up2(up(self.up1(up(self.d_in(z + noise * torch.randn_like(z))))))
        return self.d_out(g), z, h, g


@torch.no_grad()
def _put(conv, weight, bias, constant=None, pairs=False):
    w = conv.weight if conv.weight.ndim == 4 else conv.weight[:, :, -1]
    (o, i), b = weight.shape[:2], conv.bias
    w.zero_(), b.zero_()
    w[:o, :i], b[:o] = weight, bias
    if pairs: w[o:2*o, :i], b[o:2*o] = -weight, -bias
    if constant: b[-1] = constant


@torch.no_grad()
def plant(
    vae, # of `new_vae`
    code:LinearCode,
    x:torch.Tensor, # [B, 3, 1, h, w] some images, for the amplitudes
):
    """Copies a trained linear code into the VAE.

    A residual branch is silent if its last convolution is zero. An RMS norm keeps amplitudes if one channel is large and
    constant. silu(x) - silu(-x) = x, so a pair of channels of opposite sign passes the activation unchanged. Hence the widths:
    each leaves room for the constant channel and, before an activation, for the pairs."""
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageAttentionBlock, QwenImageResample, QwenImageResidualBlock
    _, _, h, g = code(x[:, :, 0])
    rms = [t.square().sum(1).mean().sqrt().item() for t in (h, g)]
    big = [4 * 2**0.5 * r for r in rms] # the constant channel: four times all others together
    for m in vae.modules():
        if isinstance(m, QwenImageResidualBlock): m.conv2.weight.zero_(), m.conv2.bias.zero_(), m.norm1.gamma.fill_(3.)
        if isinstance(m, QwenImageAttentionBlock): m.proj.weight.zero_(), m.proj.bias.zero_()
    e, d = vae.encoder, vae.decoder
    wb = lambda c: (c.weight, c.bias)
    same = lambda n: (torch.eye(n)[:, :, None, None], torch.zeros(n))
    def ends(conv, c, b, r, width): # undo the RMS norm's scale, and join the pairs
        _put(conv, torch.cat([c.weight, -c.weight], 1) * ((b**2 + 2 * r**2) / width)**0.5, c.bias)
    res = [m for m in e.down_blocks if isinstance(m, QwenImageResidualBlock)]
    down = [m.resample[1] for m in e.down_blocks if isinstance(m, QwenImageResample)]
    up = [b.upsamplers[0].resample[1] for b in d.up_blocks[:2]]
    _put(e.conv_in, *wb(code.e_in), big[0])
    _put(down[0], *wb(code.down1), big[0]), _put(res[1].conv_shortcut, *same(15), big[0])
    _put(down[1], *wb(code.down2), big[0]), _put(res[2].conv_shortcut, *same(23), big[0], pairs=True)
    ends(e.conv_out, code.e_out, big[0], rms[0], 48)
    _put(vae.quant_conv, *same(16)), _put(vae.post_quant_conv, *same(16))
    _put(d.conv_in, *wb(code.d_in), big[1]), _put(up[0], *wb(code.up1), big[1])
    _put(d.up_blocks[1].resnets[0].conv_shortcut, *same(22), big[1]), _put(up[1], *wb(code.up2), big[1], pairs=True)
    ends(d.conv_out, code.d_out, big[1], rms[1], 16)


def train_vae(
    minutes:float=15, # two fifths of it for the linear code
    seed:int=1, # of weights, images and noise
): # AutoencoderKLQwenImage with `latents_mean` and `latents_std`
    "Trains the linear code, copies it into the VAE, and trains the whole VAE."
    torch.manual_seed(seed)
    rng, vae, code = np.random.default_rng(seed), new_vae(), LinearCode()
    few = torch.cat([patches(200, 48, rng) for _ in range(12)])
    def linear_loss(step):
        x = few[torch.randint(len(few), (16,)), :, 0]
        y, z, _, _ = code(x, noise=0.03)
        mse = (y - x).square().mean()
        return mse + 3e-3 * (z.std((0, 2, 3)) - 1).square().mean(), dict(dB=10 * math.log10(4 / mse.item()))
    fit_for(0.4 * minutes, list(code.parameters()), linear_loss, lr=3e-3, what="linear code", every=500)
    plant(vae, code, few[:64])
    shapes = [(18, 32), (8, 48), (8, 48), (4, 64), (2, 96)] # (batch, side), about the same work each
    def loss(step):
        x = patches(*shapes[step % len(shapes)], rng)
        y, z, logvar = _run(vae, x, noise=0.03)
        mse = (y - x).square().mean()
        calm = 1e-3 * F.relu(z.std((0, 2, 3, 4)) - 1.2).square().mean() + 1e-5 * logvar.square().mean()
        return mse + 0.05 * (y - x).abs().mean() + calm, dict(dB=10 * math.log10(4 / mse.item()))
    trained = [p for n, p in vae.named_parameters() if "time_conv" not in n]
    with single_frame():
        fit_for(0.6 * minutes, trained, loss, lr=3e-4, clip=0.3, decay=0.997, what="VAE")
        with torch.no_grad(): z = torch.cat([_run(vae, patches(32, 64, rng))[1] for _ in range(6)])
    mean, std = z.mean((0, 2, 3, 4)), z.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=[round(v, 4) for v in mean.tolist()], latents_std=[round(v, 4) for v in std.tolist()])
    return vae.eval().requires_grad_(False)
