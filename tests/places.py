"""Precomputes two data sets and encodes prompts with the Python that runs it: `places.py FOLDER OUT CACHE...`. FOLDER has models and pairs."""
import sys
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import save_file

from qie_nb.data.images import Geometry
from qie_nb.models.encoders import encode_prompt, vl_images
from qie_nb.devices.edit_model import EditModel
from qie_nb.models.components import restore_image_positions
from qie_nb.trainer import QwenImageEditTrainer

CASES = [("v1", 1), ("2509", 1), ("2509", 2), ("2509", 3), ("2511", 2)] # number of control images
PROMPT = "make the sky green"


def precompute(folder, variant, cache):
    QwenImageEditTrainer(dict(
        model=dict(pretrained_model_name_or_path=str(folder/variant)), cache=dict(cache_dir=f"{cache}/{variant}"),
        data=dict(dataset_path=str(folder/("one" if variant == "v1" else "three")), image_size=[64, 64], caption_dropout_rate=0.3),
        train=dict(output_dir=str(folder/"unused"), device="cpu", mixed_precision="no"))).cache_embeddings()


@torch.no_grad()
def embeddings(folder):
    out = {}
    for variant, n in CASES:
        parts, pipe = EditModel(str(folder/variant)), restore_image_positions(DiffusionPipeline.from_pretrained(folder/variant))
        images = [Image.open(folder/"three"/f"control_images{k}"/"0000.png") for k in ("", "_2", "_3")[:n]]
        seen, te, processor = vl_images(images, Geometry(**parts.areas)), parts.get("text_encoder"), parts.get("processor")
        for share in (True, False): out[f"{variant} {n} ours, {'shared' if share else 'whole'}"] = encode_prompt(te, processor, parts.variant, PROMPT, seen, share)[0]
        out[f"{variant} {n} pipeline"] = pipe.encode_prompt([PROMPT], list(seen))[0]
    return {k: v.contiguous() for k, v in out.items()}


if __name__ == "__main__":
    folder, out, *caches = sys.argv[1:]
    for cache in caches:
        for variant in ("v1", "2511"): precompute(Path(folder), variant, cache)
    if out != "-": save_file(embeddings(Path(folder)), out)
