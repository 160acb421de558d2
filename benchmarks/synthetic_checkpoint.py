"""Checkpoints that are not there: every tensor is taken from random normal numbers when it is read, on the device, the same each time.

The library's own loading, quantizing, streaming and table-making run on them as on the files of a real model; nothing but a configuration is on the disk.
`PretendedHub` serves such a checkpoint as a hub does: a file is written, with all its bytes, when it is downloaded.
"""
import json, math, os, shutil, zlib
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch

FULL = dict(patch_size=2, in_channels=64, out_channels=16, num_layers=60, attention_head_dim=128, num_attention_heads=24, joint_attention_dim=3584, axes_dims_rope=(16, 56, 56))
SMALL = FULL | dict(num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=64, axes_dims_rope=(4, 6, 6))
MARK = "made up" # in the metadata of the one file that stands for a checkpoint
POOL = 2**24 + 43 # random numbers; odd, so that rows of a layer differ


@cache
def pool(device, dtype):
    rng = torch.Generator(device).manual_seed(0)
    return torch.empty(POOL, device=device, dtype=dtype).normal_(0, 0.02, generator=rng)


def pieces(name, shape, device="cpu", dtype=torch.bfloat16):
    "A tensor's numbers as parts of `pool`, which begin at a place of its own."
    n, at, numbers = math.prod(shape), zlib.crc32(name.encode()) % POOL, pool(device, dtype)
    if "norm" in name and name.endswith("weight") and len(shape) == 1: numbers = numbers[:n] + 1
    while n > 0:
        part = numbers[at % len(numbers):][:n]
        yield part
        n, at = n - len(part), 0


class Rows:
    "A tensor of which rows are asked for."
    def __init__(self, source, name): self.source, self.name = source, name
    def get_shape(self): return list(self.source.shapes[self.name])
    def get_dtype(self): return dict(bfloat16="BF16", float32="F32")[str(self.source.dtype).removeprefix("torch.")]
    def __getitem__(self, at): return self.source.get_tensor(self.name)[at].cpu()


class MadeUp:
    "Replaces `safetensors.safe_open` for a synthetic checkpoint."
    def __init__(self, shapes, device, dtype): self.shapes, self.device, self.dtype, self.last = shapes, device, dtype, (None, None)
    def __enter__(self): return self
    def __exit__(self, *exc): self.last = None, None
    def keys(self): return self.shapes.keys()
    def get_slice(self, name): return Rows(self, name)
    def get_tensor(self, name):
        if self.last[0] != name:
            shape = self.shapes[name]
            self.last = name, torch.cat(list(pieces(name, shape, self.device, self.dtype))).view(shape)
        return self.last[1]


def shapes_in(path): # {name: shape} of a file that `stand_in` wrote, else None
    with open(path, "rb") as f: head = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return json.loads(head.get("__metadata__", {}).get(MARK, "null"))


@contextmanager
def made_up(
    device, # where tensors are drawn
    dtype=torch.bfloat16,
):
    "Within, files that `stand_in` wrote are read as checkpoints."
    import safetensors
    real = safetensors.safe_open
    def opened(path, *a, **kw):
        shapes = shapes_in(path)
        if shapes is None: return real(path, *a, **kw)
        return MadeUp(shapes, device, dtype)
    with patch.object(safetensors, "safe_open", opened): yield


def stand_in(folder, cls, config):
    "A component's folder with its configuration and a file that names its tensors."
    from safetensors.torch import save_file
    from accelerate import init_empty_weights
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True)
    if hasattr(config, "save_pretrained"): config.save_pretrained(folder)
    else: (Path(folder)/"config.json").write_text(json.dumps(dict(_class_name=cls.__name__, **config)))
    with init_empty_weights(): model = cls(config) if hasattr(config, "save_pretrained") else cls(**config)
    shapes = {n: list(t.shape) for n, t in model.named_parameters()}
    save_file({"nothing": torch.zeros(1)}, Path(folder)/"model.safetensors", {"format": "pt", MARK: json.dumps(shapes)})


def model_folder(folder, variant="2509", transformer=FULL, encoders=False, tiny=False):
    "A model's folder: the tiny one's tokenizer, processor and scheduler, the image areas of the pipelines, and components of full size that are made up."
    from diffusers import QwenImageTransformer2DModel
    from qie_nb.models.components import VARIANTS
    from qie_nb.tiny.random_models import tiny_folder
    shutil.copytree(tiny_folder(variant, (64*64, 56*56) if tiny else None), folder)
    stand_in(folder/"transformer", QwenImageTransformer2DModel, transformer | dict(zero_cond_t=VARIANTS[variant].zero_cond_t))
    if encoders and not tiny: encoders_into(folder)
    return folder


def encoders_into(folder):
    "Qwen2.5-VL 7B and the VAE by their published configurations, the special tokens' numbers by the tiny tokenizer."
    from diffusers import AutoencoderKLQwenImage
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    small = Qwen2_5_VLConfig.from_pretrained(folder/"text_encoder")
    ids = {k: getattr(small, k) for k in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id") if hasattr(small, k)}
    text = dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=128000,
                rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling=dict(type="mrope", rope_type="default", mrope_section=[16, 24, 24]), tie_word_embeddings=False)
    vision = dict(depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, out_hidden_size=3584, patch_size=14, spatial_merge_size=2, temporal_patch_size=2,
                  window_size=112, fullatt_block_indexes=[7, 15, 23, 31])
    stand_in(folder/"text_encoder", Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))
    shutil.rmtree(folder/"vae")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoencoderKLQwenImage().bfloat16().save_pretrained(folder/"vae")


def bytes_of(path):
    try: return path.stat().st_size
    except FileNotFoundError: return 0


class PretendedHub:
    "Serves a folder of `model_folder`; components that are made up in files of at most `part` bytes. `at_most` bytes fit the disk `disk`."
    def __init__(self, served, folder, disk, at_most, part=5 * 10**9):
        self.served, self.folder, self.disk, self.at_most, self.texts, self.shards, self.got = Path(served), Path(folder), Path(disk), at_most, {}, {}, []
        for stub in sorted(self.served.glob("*/model.safetensors")):
            if shapes := shapes_in(stub): self.split(stub.parent.name, shapes, part)

    def split(self, component, shapes, part):
        stem, files, size = "diffusion_pytorch_model" if component == "transformer" else "model", [{}], 0
        for name, shape in shapes.items():
            if size and size + 2 * math.prod(shape) > part: files, size = [*files, {}], 0
            files[-1][name], size = shape, size + 2 * math.prod(shape)
        names = [f"{stem}-{k:05}-of-{len(files):05}.safetensors" for k in range(1, len(files) + 1)]
        self.shards |= {f"{component}/{n}": f for n, f in zip(names, files)}
        index = dict(metadata={}, weight_map={t: n for n, f in zip(names, files) for t in f})
        self.texts[f"{component}/{stem}.safetensors.index.json"] = json.dumps(index)

    def files(self, name, revision=None):
        made = {p.split("/")[0] for p in self.shards}
        plain = {p.relative_to(self.served).as_posix(): p.stat().st_size for p in self.served.rglob("*") if p.is_file() and not (p.suffix == ".safetensors" and p.parent.name in made)}
        return "0" * 40, plain | {n: len(t) for n, t in self.texts.items()} | {n: 2 * sum(map(math.prod, f.values())) for n, f in self.shards.items()}

    def used(self): return sum(bytes_of(Path(folder)/n) for folder, _, names in os.walk(self.disk) for n in names) # folders may vanish meanwhile
    def free(self, path=None): return self.at_most - self.used()
    def has(self, name, path, commit): return (self.folder/path).is_file()
    def release(self, path): Path(path).unlink(missing_ok=True)

    def get(self, name, path, commit):
        out = self.folder/path
        if out.is_file(): return out
        self.got.append(path)
        out.parent.mkdir(parents=True, exist_ok=True)
        half = out.with_name(out.name + ".half")
        if path in self.texts: half.write_text(self.texts[path])
        elif path in self.shards: write_drawn(half, self.shards[path])
        else: shutil.copy(self.served/path, half)
        return half.rename(out)


def write_drawn(path, shapes):
    "A safetensors file in bfloat16, without holding a tensor of it."
    at, head = 0, {}
    for name, shape in shapes.items():
        head[name] = dict(dtype="BF16", shape=list(shape), data_offsets=[at, at := at + 2 * math.prod(shape)])
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            for part in pieces(name, shape): f.write(memoryview(part.view(torch.uint8).numpy()))
