"""`swap_test`: what it loads and leaves, and pairs with masks. What it says of right and swapped pairs: nbs/evaluation/06_swaps.ipynb."""
import numpy as np
from PIL import Image

from qie_nb.evaluation.swaps import swap_test
from qie_nb.trainer import QwenImageEditTrainer
from helpers import settings


def test_the_encoders_do_not_stay_beside_the_transformer(pairs, tmp_path):
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path))
    assert swap_test(trainer, 3).pairs == 3
    assert {"vae", "text_encoder"}.isdisjoint(trainer.components.loaded) and "transformer" in trainer.components.loaded


def test_masks_do_not_matter(pairs, tmp_path):
    root = pairs()
    plain = swap_test(QwenImageEditTrainer(settings(root, tmp_path/"plain")), 3)
    (root/"mask_images").mkdir()
    for p in (root/"training_images").glob("*.png"):
        w, h = Image.open(p).size
        Image.fromarray(np.tile(np.uint8([0, 255]), (h, (w + 1) // 2))[:, :w]).save(root/"mask_images"/p.name)
    control = next((root/"control_images").glob("*.png"))
    Image.open(control).resize((64, 64)).save(control) # another shape than its target and mask
    masked = swap_test(QwenImageEditTrainer(settings(root, tmp_path/"masked")), 3)
    assert masked.pairs == 3 and masked.given.mean != plain.given.mean
