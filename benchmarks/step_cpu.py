"""What a training step costs over a bare loop of the same transformer: operations, modules walked, things built; and paired times.

`make bench-cpu` writes results/step_cpu.json and prints a table. Tiny models of the real classes, random weights, float32, one thread.
Parts can be named: `python benchmarks/step_cpu.py counts times`; the others then stay in the file as they were.
"""
import argparse, collections, functools, json, os, platform, shutil, tempfile, time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OUT = Path(__file__).parent/"results"/"step_cpu.json"
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors")


# --- what is counted
class Operations(TorchDispatchMode):
    "Within, aten operations of this thread by name: forward, recomputation and, on a CPU, the backward pass."
    def __init__(self): super().__init__(); self.seen = collections.Counter()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


class Walks:
    "Within, modules and parameters that `Module.modules`, `named_modules`, `parameters` ... went over."
    def __init__(self): self.n = 0
    def __enter__(self):
        real, me = torch.nn.Module.named_modules, self
        def counted(module, *a, **kw): # all the others are made of it
            for item in real(module, *a, **kw): me.n += 1; yield item
        self.patch = patch.object(torch.nn.Module, "named_modules", counted)
        self.patch.start()
        return self
    def __exit__(self, *exc): self.patch.stop()


class Built:
    "Within, calls of the encoders and copies or constructions of a scheduler, by name."
    def __enter__(self):
        from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
        from transformers import Qwen2_5_VLForConditionalGeneration
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
        self.seen, self.patches = collections.Counter(), []
        for name, cls, method in (("encoder calls", AutoencoderKLQwenImage, "_encode"), ("encoder calls", Qwen2_5_VLForConditionalGeneration, "forward"),
                                  ("encoder calls", Qwen2_5_VLModel, "forward"), ("schedulers made", FlowMatchEulerDiscreteScheduler, "__init__"),
                                  ("schedulers made", FlowMatchEulerDiscreteScheduler, "__deepcopy__"), ("schedulers set", FlowMatchEulerDiscreteScheduler, "set_timesteps")):
            self.patches.append(patch.object(cls, method, self.counted(name, getattr(cls, method, None)), create=True))
        for p in self.patches: p.start()
        return self
    def counted(self, name, real):
        def fn(obj, *a, **kw):
            self.seen[name] += 1
            if real is not None: return real(obj, *a, **kw)
            return type(obj).from_config(obj.config) # a copy of a scheduler
        return fn if real is None else functools.wraps(real)(fn)
    def __exit__(self, *exc):
        for p in self.patches: p.stop()


# --- a model, data, a trainer
def model_folder(folder, layers, variant="2511", width=(2, 16)):
    "A tiny model with so many blocks; heads and their size may be given."
    from diffusers import QwenImageTransformer2DModel
    from qie_nb.tiny import tiny_folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(tiny_folder(variant, (64*64, 56*56)), folder)
    shutil.rmtree(folder/"transformer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        heads, size = width
        tr = QwenImageTransformer2DModel(num_layers=layers, attention_head_dim=size, num_attention_heads=heads, joint_attention_dim=64, axes_dims_rope=(4, (size - 4) // 2, (size - 4) // 2),
                                         zero_cond_t=variant == "2511")
    tr.save_pretrained(folder/"transformer")
    return folder


def make_pairs(root, n=4, size=(64, 48), captions=("invert the colours",)):
    import numpy as np
    from PIL import Image
    rng = np.random.default_rng(0)
    for d in ("training_images", "control_images"): (root/d).mkdir(parents=True)
    for i in range(n):
        a = rng.integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
        Image.fromarray(a).save(root/"control_images"/f"{i}.png")
        Image.fromarray(255 - a).save(root/"training_images"/f"{i}.png")
        (root/"training_images"/f"{i}.txt").write_text(captions[i % len(captions)])
    return root


def configuration(root, folder, batch=1, steps=6, every=10**6, table=True, out="out", **sections):
    base = dict(model=dict(pretrained_model_name_or_path=str(folder), lora=dict(r=4, lora_alpha=8), modulation_table=table),
                data=dict(dataset_path=str(root/"set"), image_size=[64, 48], batch_size=batch, caption_dropout_rate=0.),
                train=dict(output_dir=str(root/out), device="cpu", mixed_precision="no", max_train_steps=steps, save_interval=0, eval_interval=0, gradient_checkpointing=False),
                cache=dict(cache_dir=str(root/f"cache-{Path(folder).name}")), optimizer=dict(lr=1e-4),
                logging=dict(log_dir=str(root/"runs"), report_to="none", log_every=every, log_images=False, panel=False))
    for k, v in sections.items(): base[k] = base[k] | v
    return base


class Boundaries:
    "A callback that is told of each step after all others, and calls a function there."
    def __init__(self, fn): self.fn = fn
    def __getattr__(self, name): return lambda t: None
    def on_step_end(self, t): self.fn(t)


# --- the bare loop
def pack(x):
    B, C, _, h, w = x.shape
    return x.view(B, C, h//2, 2, w//2, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, h//2 * (w//2), C * 4)


def bare_step(transformer, params, optimizer, schedule, batch, max_norm=1.):
    "What has to be done, by hand: noise, pack, forward, loss, backward, clip, step."
    x0, controls, embeds, mask = batch
    eps, sigmas = torch.randn_like(x0), torch.rand(len(x0)).mul_(1000).ceil_().div_(1000).to(x0.device, non_blocking=True)
    s = sigmas.view(-1, 1, 1, 1, 1)
    x_t = pack((1 - s) * x0 + s * eps)
    shapes = [[(1, z.shape[-2] // 2, z.shape[-1] // 2) for z in (x0, *controls)]] * len(x0)
    pred = transformer(hidden_states=torch.cat([x_t, *map(pack, controls)], 1), timestep=sigmas, encoder_hidden_states=embeds, encoder_hidden_states_mask=mask,
                       img_shapes=shapes, return_dict=False)[0][:, :x_t.shape[1]]
    loss = torch.nn.functional.mse_loss(pred, pack(eps - x0))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def bare_of(trainer, put=lambda t: t):
    "A function that does one bare step with a trainer's own transformer, on its last batch."
    params = [p for p in trainer.transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.)
    b = trainer.batch
    controls, mask = b["control_latent"], b["prompt_embeds_mask"]
    batch = put(b["pixel_latent"]), [put(c) for c in (controls if isinstance(controls, list) else [controls])], put(b["prompt_embed"]), None if mask is None else put(mask)
    return lambda: bare_step(trainer.transformer, params, optimizer, schedule, batch)


# --- counts
def counted(config):
    "Steps of the trainer from the third on, and one of the bare loop: {operations, walked, built} of each."
    ops, walks, built = Operations(), Walks(), Built()
    def read():
        row = dict(operations=ops.seen, walked=walks.n, built=dict(built.seen))
        ops.seen, walks.n, built.seen = collections.Counter(), 0, collections.Counter()
        return row
    from qie_nb.trainer import QwenImageEditTrainer
    rows, trainer = [], QwenImageEditTrainer(config)
    trainer.callbacks.append(Boundaries(lambda t: rows.append(read())))
    with walks, built, ops: trainer.fit()
    bare = bare_of(trainer)
    bare(), bare()
    with walks, built, ops: read(), bare()
    return rows[2:], read(), trainer


def waited(config):
    "The same on a device that is not there: {waits, launched, sent} of each step."
    import away
    from qie_nb.trainer import QwenImageEditTrainer
    trainer = QwenImageEditTrainer(config).set_lora() # on the CPU; what follows is there
    rows = []
    with away.pretended() as device:
        trainer.callbacks.append(Boundaries(lambda t: rows.append(device.take())))
        trainer.device = away.DEVICE
        away.send(trainer.transformer)
        trainer.fit()
        bare = bare_of(trainer, lambda t: t.to(away.DEVICE))
        bare(), bare(), device.take(), bare()
    return rows[2:], device.take()


def precomputed(root, *models, sizes=((64, 48),), captions=("invert the colours",)):
    "Fill the caches that `configuration` names."
    from qie_nb.trainer import QwenImageEditTrainer
    if not (root/"set").exists(): make_pairs(root/"set", captions=captions)
    for m in models: QwenImageEditTrainer(configuration(root, m)).cache_embeddings()
