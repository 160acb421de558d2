"""The before/after slider: image types, sizes, the line, and the static form."""
import io

import numpy as np
import pytest
from PIL import Image

from qie_nb.widgets.before_after import before_after, composite

HOSTILE = '<img src=x onerror="window.pwned=1">'
rng = np.random.default_rng(0)
noise = lambda w, h: rng.integers(0, 255, (h, w, 3), dtype=np.uint8)


def test_composite():
    a, b = (Image.fromarray(noise(100, 20)) for _ in range(2))
    for share in (0., 0.3, 1., -1., 2.):
        x, got = round(100 * min(max(share, 0), 1)), np.asarray(composite(a, b, share))
        assert (got[:, :max(x - 1, 0)] == np.asarray(a)[:, :max(x - 1, 0)]).all() and (got[:, x + 1:] == np.asarray(b)[:, x + 1:]).all()
        if 0 < x < 100: assert (got[:, x - 1:x + 1] == 255).all()


def test_input_types(tmp_path):
    array = noise(48, 32)
    was, exif = array.copy(), Image.Exif()
    exif[274] = 6 # the camera was held upright
    Image.fromarray(array).save(tmp_path/"a.jpg", exif=exif)
    rgba = Image.fromarray(noise(64, 48)).convert("RGBA")
    assert before_after(tmp_path/"a.jpg", array).data()["sizes"] == ((32, 48), (48, 32))
    assert before_after(str(tmp_path/"a.jpg"), rgba).data()["sizes"][1] == (64, 48)
    before_after(array, rgba).box
    assert (array == was).all() and rgba.size == (64, 48) and rgba.mode == "RGBA"


def test_different_sizes(tmp_path):
    view = before_after(noise(96, 64), noise(1344, 768))
    assert view.data()["note"] == "after is 1344x768, shown at the size of before, 96x64" and view.before.size == view.after.size
    assert view.note() in view.html() and not before_after(noise(8, 8), noise(8, 8)).data()["note"]


@pytest.mark.parametrize("size", [(3000, 4000), (2000, 130), (3, 2)])
def test_images_are_sent_at_display_size(size):
    view = before_after(noise(*size), noise(*size))
    image = view.box.children[0]
    shown = Image.open(io.BytesIO(image.value)).size
    assert shown == view.before.size and max(shown) <= 640 and shown[1] <= 360 and len(image.value) < 400_000
    assert view.html().count("data:image/jpeg") == 2 and len(view.html()) < 400_000


def test_slider_moves_the_line():
    view = before_after(np.zeros((40, 80, 3), "uint8"), np.full((40, 80, 3), 255, "uint8"))
    image, slider = view.box.children[:2]
    for at, light in ((0, 255), (30, 178), (100, 0)):
        slider.value = at
        assert abs(np.asarray(Image.open(io.BytesIO(image.value))).mean() - light) < 6 and view.data()["at"] == at


def test_titles_are_escaped():
    view = before_after(noise(8, 8), noise(9, 9), [HOSTILE, HOSTILE])
    pages = [view.html(), *(c.value for c in view.box.children if type(c).__name__ == "HTML")]
    assert len(pages) == 3 and not any("<img src=x" in p for p in pages) and all("&lt;img" in p for p in pages)


@pytest.mark.parametrize("args, sentence", [
    ((noise(8, 8), np.zeros((8, 8, 3))), "`after` must be a path, a PIL image or a uint8 array"),
    ((noise(8, 8), noise(8, 8), ["one"]), "`titles` must be two, got 1; give one per image"),
    ((noise(8, 8), noise(8, 8), ("a", "b"), 0), "`height` must be 1 or more pixels, got 0"),
])
def test_wrong_arguments(args, sentence):
    with pytest.raises(ValueError, match=sentence): before_after(*args)
