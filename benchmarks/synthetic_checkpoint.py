"""Checkpoints that are not there: every tensor is drawn from a normal distribution when it is read, on the device, the same each time.

The library's own loading, quantizing, streaming and table-making run on them as on the files of a real model; nothing but a configuration is on the disk.
"""
import json, shutil, zlib
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

FULL = dict(patch_size=2, in_channels=64, out_channels=16, num_layers=60, attention_head_dim=128, num_attention_heads=24, joint_attention_dim=3584, axes_dims_rope=(16, 56, 56))
SMALL = FULL | dict(num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=64, axes_dims_rope=(4, 6, 6))
MARK = "made up" # in the metadata of the one file that stands for a checkpoint


class Rows:
    "A tensor of which rows are asked for."
    def __init__(self, source, name): self.source, self.name = source, name
    def get_shape(self): return list(self.source.shapes[self.name])
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
            rng = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
            t = torch.empty(self.shapes[name], device=self.device, dtype=self.dtype).normal_(0, 0.02, generator=rng)
            self.last = name, t.add_(1.) if "norm" in name and name.endswith("weight") and t.ndim == 1 else t
        return self.last[1]


@contextmanager
def made_up(
    device, # where tensors are drawn
    dtype=torch.bfloat16,
):
    "Within, files that `stand_in` wrote are read as checkpoints."
    import safetensors
    real = safetensors.safe_open
    def opened(path, *a, **kw):
        with real(path, "pt") as f: shapes = json.loads((f.metadata() or {}).get(MARK, "null"))
        if shapes is None: return real(path, *a, **kw)
        return MadeUp(shapes, device, dtype)
    with patch.object(safetensors, "safe_open", opened): yield


def stand_in(folder, cls, config):
    "A component's folder with its configuration and a file that names its tensors."
    from safetensors.torch import save_file
    from qie_nb.models.loading import empty_model
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True)
    if hasattr(config, "save_pretrained"): config.save_pretrained(folder)
    else: (Path(folder)/"config.json").write_text(json.dumps(dict(_class_name=cls.__name__, **config)))
    shapes = {n: list(t.shape) for n, t in empty_model(cls, folder, torch.bfloat16).named_parameters()}
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
