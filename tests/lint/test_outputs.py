"""The notebooks that are committed with outputs: static, small, without errors and made by the code that they show (`make refresh` writes them)."""
import json, re, sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]/"tools"))
from outputs import CHAPTERS, LIMIT, PAGES, PLACES, has_value, is_stale, key_of, path_of, text_of, tidy

each_notebook = pytest.mark.parametrize("name", CHAPTERS + PAGES + PLACES)


def cells_of(name): return [c for c in json.loads(path_of(name).read_text())["cells"] if c["cell_type"] == "code"]


@each_notebook
def test_outputs_are_static_and_small(name):
    assert path_of(name).stat().st_size <= LIMIT
    cells = cells_of(name)
    uses = [c for c in cells if not re.search(r"^#\| *(export|hide|default_exp)", "".join(c["source"]), re.M)]
    least = 2 if name not in PAGES else min(1, len(uses))
    assert sum(bool(c["outputs"]) for c in cells) >= least
    for c in cells:
        source = "".join(c["source"])
        assert c["outputs"] or not has_value(source), f"{name}: no output of {source[-80:]!r}; run `make refresh`"
        for o in c["outputs"]:
            assert o["output_type"] != "error" and o.get("name") != "stderr", f"{name}: {source[:60]!r} shows {o}"
            assert not [kind for kind in o.get("data", {}) if kind == "image/png" or "widget" in kind]
            assert "data:image/png" not in text_of(o.get("data", {}).get("text/html", ""))


@each_notebook
def test_outputs_name_no_folder_of_the_machine_that_made_them(name):
    words = re.split(r"[\s\"']+", json.dumps([c["outputs"] for c in cells_of(name)]))
    # an image is one long word with many slashes: a search from each of them took 16 s
    files = [found for word in words if ".py" in word for found in re.findall(r"/.*\.py\b", word)]
    named = [f for f in files if "/qie_nb/" in f or "site-packages" in f]
    assert all(f.startswith(("/repository/", "/environment/")) for f in named), f"{named}; run `make outputs`"


def test_values_are_recognized():
    assert has_value("x = 1\nx") and has_value("%pip install x\nx.shape") and not has_value("#| export\nx") and not has_value("f(x)") and not has_value("#| cuda\nx")


@each_notebook
def test_outputs_are_those_of_the_code(name):
    "Fails also where only the module that the notebook exports has changed."
    stale = is_stale(json.loads(path_of(name).read_text()))
    assert not stale, f"the code of {name} has changed; run `make refresh`"


def test_a_key_covers_the_code_and_nothing_else():
    def book(code, prose="x", outputs=()):
        return dict(metadata={}, cells=[dict(cell_type="markdown", source=prose), dict(cell_type="code", source=code, outputs=outputs)])
    key = key_of(book("f(1)"))
    assert key == key_of(book(["f(", "1)"], "y", ["text"])) != key_of(book("f(2)"))
    assert key_of(book("#| default_exp cache")) != key_of(book("#| default_exp config")) and is_stale(book("f(1)"))


def test_images_become_jpeg_and_folders_get_one_name():
    import base64, io
    from PIL import Image
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(png := io.BytesIO(), "PNG")
    png = base64.b64encode(png.getvalue()).decode()
    made = tidy(dict(output_type="display_data", data={"image/png": png, "text/html": f"<img src='data:image/png;base64,{png}'>", "text/plain": "/tmp/tmpabc_1234/x", "application/vnd.jupyter.widget-view+json": {}}, metadata={"x": 1}))
    image = Image.open(io.BytesIO(base64.b64decode(made["data"]["image/jpeg"])))
    assert image.format == "JPEG" and min(image.getpixel((0, 0))) > 250, "transparent is white"
    assert made["data"].keys() == {"image/jpeg", "text/html", "text/plain"} and made["data"]["text/plain"] == ["/tmp/folder/x"]
    assert "data:image/jpeg" in made["data"]["text/html"][0] and made["metadata"] == {}
