"""The picture of the slider recipe, docs/slider_scales.jpg: `python tools/slider_picture.py`. Some minutes on a CPU.

The embedded model learns warm light from 48 pairs of crops of photographs, under an instruction that it knows as "no change". Then two photographs
that it was not trained on are edited with the LoRA at six scales.
"""
import io, tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from qie_nb.config import make_config
from qie_nb.evaluation.compare import compare_edits
from qie_nb.tiny.photos import demo_config, squares, EDITS, PhotoEdit, make_pairs
from qie_nb.trainer import QwenImageEditTrainer

OUT, MOST = Path(__file__).parent.parent/"docs"/"slider_scales.jpg", 60_000 # bytes
WARM = PhotoEdit(EDITS["keep"].instruction, lambda a: a ** np.float32([0.75, 1.0, 1.45]), known=False)
SCALES = [-1, -0.5, 0, 0.5, 1, 1.5]


def train(work, steps=100):
    for name, n, seed, split in (("data", 48, 0, "train"), ("held_out", 12, 1, "held_out")): make_pairs(work/name, WARM, n, seed=seed, split=split)
    config = make_config(demo_config(work, steps))
    config.model.lora.r = config.model.lora.lora_alpha = 8
    return QwenImageEditTrainer(config).fit()


def warmth(image): return float(image[..., 0].mean() - image[..., 2].mean()) # red minus blue, grey levels


def main():
    trainer, images = train(Path(tempfile.mkdtemp())), squares()
    shown = compare_edits(trainer, images, [WARM.instruction] * len(images), scales=SCALES, num_inference_steps=8, true_cfg_scale=1.0,
                          height=images[0].height, width=images[0].width)
    for title, column in zip([c.title for c in shown.columns], zip(*shown.images)): print(f"{title}: red minus blue {np.mean([warmth(i) for i in column]):.1f}")
    raw, quality = io.BytesIO(), 90
    shown.figure(scale=1.6).savefig(raw, format="png", dpi=100)
    while True:
        out = io.BytesIO()
        Image.open(raw).convert("RGB").save(out, "JPEG", quality=quality, optimize=True)
        if out.tell() <= MOST: break
        quality -= 5
    OUT.write_bytes(out.getvalue())
    print(OUT.name, Image.open(OUT).size, f"{out.tell() / 1e3:.0f} kB, quality {quality}")


if __name__ == "__main__": main()
