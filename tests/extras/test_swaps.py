"""`swap_test`: what it loads and leaves, and pairs with masks. What it says of right and swapped pairs: nbs/evaluation/06_swaps.ipynb."""
import numpy as np
import pytest
from PIL import Image

from qie_nb.evaluation.validation_loss import Interval
from qie_nb.extras.diagnostics import ControlTest, SwapTest, control_test, swap_test
from qie_nb.trainer import QwenImageEditTrainer
from helpers import random_lora, settings


def test_the_encoders_do_not_stay_beside_the_transformer(pairs, tmp_path):
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path))
    assert swap_test(trainer, 3).pairs == 3
    assert {"vae", "text_encoder"}.isdisjoint(trainer.components.loaded) and "transformer" in trainer.components.loaded


@pytest.mark.slow
def test_the_adapter_is_off_unless_asked_for(pairs, tmp_path):
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path))
    bare = swap_test(trainer, 3)
    random_lora(trainer.set_lora().transformer, 0.5)
    means = lambda test: (test.given.mean, test.exchanged.mean)
    assert means(swap_test(trainer, 3)) == pytest.approx(means(bare), rel=1e-3, abs=1e-5)
    assert means(swap_test(trainer, 3, use_lora=True)) != pytest.approx(means(bare), rel=1e-2, abs=1e-4)


@pytest.mark.slow
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


def test_a_control_test_takes_pairs_of_one_size(pairs, tmp_path):
    "Of two landscape and three portrait pairs it takes the three; two of them are too few, which it says before it computes."
    root = pairs([(48, 32), (32, 48)] * 2 + [(32, 48)])
    trainer = QwenImageEditTrainer(settings(root, tmp_path))
    assert control_test(trainer, 5).pairs == control_test(trainer, 3).pairs == 3
    with pytest.raises(ValueError, match="at least 3 pairs of equal sizes with different control images, got 2"): control_test(trainer, 2)


def test_what_is_uncertain_is_no_use_of_the_control_images():
    "The mean alone would be a false all-clear."
    own, others = Interval(0.5, 0.4, 0.6), Interval(0.51, 0.4, 0.6)
    assert ControlTest(own, others, Interval(0.01, -0.02, 0.04), 5).verdict == "not used"
    assert ControlTest(own, others, Interval(0.01, 0.005, 0.02), 5).verdict == "used"


def test_two_directions_that_fit_cannot_be_told_apart():
    "The instruction gains in both; also if it gains more in one."
    gains, more = Interval(0.2, 0.1, 0.3), Interval(0.5, 0.4, 0.6)
    nothing, difference = Interval(0., -0.1, 0.1), Interval(0.3, 0.2, 0.4)
    back = Interval(-0.3, -0.4, -0.2)
    assert SwapTest(more, gains, difference, 5).verdict == "cannot tell"
    assert SwapTest(gains, more, back, 5).verdict == "cannot tell"
    assert SwapTest(more, nothing, difference, 5).verdict == "right"
    assert SwapTest(nothing, more, back, 5).verdict == "swapped"
