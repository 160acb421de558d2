"""The photographs' edits are what they say, and the held-out ones come from other photographs."""
import numpy as np
import pytest
from PIL import Image

from qie_nb.tiny.photos import EDITS, PHOTOS, crops, make_pairs, write_pairs


def read(folder, side, name="0000") -> np.ndarray:
    """An image of a folder of pairs: uint8 [H, W, 3]."""
    return np.asarray(Image.open(folder/side/f"{name}.png").convert("RGB"))


def test_the_control_is_the_photograph_and_the_target_its_edit(tmp_path):
    folder = make_pairs(tmp_path, "invert", 2, size=(48, 32), seed=4)
    photo = np.asarray(crops(2, (48, 32), 4)[1])
    assert (read(folder, "control_images", "0001") == photo).all()
    assert (read(folder, "training_images", "0001") == 255 - photo).all()
    assert (folder/"training_images"/"0001.txt").read_text() == "invert the colors"


@pytest.mark.parametrize("edit, color, expected", [
    ("grayscale", (255, 0, 0), (76, 76, 76)), ("grayscale", (0, 255, 0), (150, 150, 150)),
    ("grayscale", (0, 0, 255), (29, 29, 29)), ("swap", (9, 8, 7), (7, 8, 9)),
    ("duotone", (0, 0, 0), (13, 20, 102)), ("duotone", (255, 255, 255), (255, 184, 51)),
    ("darker", (200, 100, 0), (90, 45, 0)), ("brighter", (64, 64, 64), (128, 128, 128))])
def test_an_edit_is_its_formula(edit, color, expected):
    made = EDITS[edit](Image.new("RGB", (2, 2), color)).getpixel((0, 0))
    assert np.abs(np.subtract(made, expected)).max() <= 1


def test_the_demo_is_judged_on_photographs_that_it_never_saw(tmp_path):
    assert not set(PHOTOS["held_out"]) & {*PHOTOS["train"], *PHOTOS["more"]}
    write_pairs(tmp_path, 1, 1)
    for folder, seed, split in (("data", 0, "train"), ("held_out", 1, "held_out")):
        photo = np.asarray(crops(1, (96, 96), seed, split)[0])
        assert (read(tmp_path/folder, "control_images") == photo).all()


def test_pairs_of_an_earlier_call_go_and_those_of_the_user_stay(tmp_path):
    make_pairs(tmp_path, "invert", 4, size=(48, 32))
    (tmp_path/"training_images"/"0003.txt").write_text("a pair of your own")
    folder = make_pairs(tmp_path, "sepia", 1, size=(48, 32))
    assert sorted(p.stem for p in (folder/"control_images").iterdir()) == ["0000", "0003"]
