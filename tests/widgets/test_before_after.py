"""Before and after: image types, sizes, and the page.

Its line is dragged in tests/end_to_end/test_browser.py.
"""
import base64, io, re

import numpy as np
import pytest
from PIL import Image

from qie_nb.widgets.before_after import before_after

HOSTILE = '<img src=x onerror="window.pwned=1">'
rng = np.random.default_rng(0)
noise = lambda w, h: rng.integers(0, 255, (h, w, 3), dtype=np.uint8)


def test_input_types(tmp_path):
    array = noise(48, 32)
    was, exif = array.copy(), Image.Exif()
    exif[274] = 6 # the camera was held upright
    Image.fromarray(array).save(tmp_path/"a.jpg", exif=exif)
    rgba = Image.fromarray(noise(64, 48)).convert("RGBA")
    assert before_after(tmp_path/"a.jpg", array).data()["sizes"] == ((32, 48), (48, 32))
    assert before_after(str(tmp_path/"a.jpg"), rgba).data()["sizes"][1] == (64, 48)
    before_after(array, rgba).html()
    assert (array == was).all() and rgba.size == (64, 48) and rgba.mode == "RGBA"


def test_different_sizes(tmp_path):
    view = before_after(noise(96, 64), noise(1344, 768))
    assert view.data()["note"] == "after is 1344x768, shown at the size of before, 96x64" and view.before.size == view.after.size
    assert view.note() in view.html() and not before_after(noise(8, 8), noise(8, 8)).data()["note"]


@pytest.mark.parametrize("size", [(3000, 4000), (2000, 130), (3, 2)])
def test_images_are_in_the_page_at_display_size(size):
    view = before_after(noise(*size), noise(*size))
    page = view.html()
    encoded = re.findall("base64,([^\"]*)", page)
    images = [Image.open(io.BytesIO(base64.b64decode(data))) for data in encoded]
    assert len(images) == 2 and len(page) < 800_000
    for image in images:
        assert max(image.size) <= 640 + 2
        assert image.size[1] <= 362
        assert max(image.size) >= min(max(view.before.size), 640)


def test_without_a_script_both_images_are_whole_side_by_side():
    view = before_after(noise(96, 64), noise(96, 64), ["a", "b"])
    page = view.html().partition("<script>")[0]
    assert page.count("<figure") == 2
    assert "position:absolute" not in page
    assert "clip" not in page
    assert re.findall("<figcaption[^>]*>([^<]*)", page) == ["a", "b"]


def test_each_title_is_that_of_its_image():
    dark, light = (np.full((48, 64, 3), level, np.uint8) for level in (20, 230))
    page = before_after(dark, light).html().partition("<script>")[0]
    encoded = re.findall("base64,([^\"]*)", page)
    levels = [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).mean() for data in encoded]
    assert re.findall("<figcaption[^>]*>([^<]*)", page) == ["before", "after"]
    assert levels == pytest.approx([20, 230], abs=2)


def test_titles_are_escaped_and_not_in_the_script():
    view = before_after(noise(8, 8), noise(9, 9), [HOSTILE, HOSTILE])
    page, _, script = view.html().partition("<script>")
    assert "<img src=x" not in page
    assert page.count("&lt;img src=x") == 4, "in two captions, twice in the note"
    assert "pwned" not in script


@pytest.mark.parametrize("args, sentence", [
    ((noise(8, 8), np.zeros((8, 8, 3))), "`after` must be a path, a PIL image or a uint8 array"),
    ((noise(8, 8), noise(8, 8), ["one"]), "`titles` must be two, got 1; give one per image"),
    ((noise(8, 8), noise(8, 8), ("a", "b"), 0), "`height` must be 1 or more pixels, got 0"),
])
def test_wrong_arguments(args, sentence):
    with pytest.raises(ValueError, match=sentence): before_after(*args)
