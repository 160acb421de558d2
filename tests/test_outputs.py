"""The notebooks that are committed with outputs: static, small, without errors and up to date (`make outputs` writes them)."""
import ast, json, re, sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]/"tools"))
import outputs
from outputs import CHAPTERS, LIMIT, PLACES, SKIPPED, comparable, execute, path_of, text_of, tidy

each_notebook = pytest.mark.parametrize("name", CHAPTERS + PLACES)


def cells_of(name): return [c for c in json.loads(path_of(name).read_text())["cells"] if c["cell_type"] == "code"]


def has_value(source) -> bool:
    "Does the cell end in an expression that is no call (calls may return None)?"
    if re.search(r"^#\| *(export|hide)", source, re.M) or SKIPPED.search(source): return False
    last = (ast.parse(re.sub(r"^[%!].*", "", source, flags=re.M)).body or [None])[-1]
    return isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call)


@each_notebook
def test_outputs_are_static_and_small(name):
    assert path_of(name).stat().st_size <= LIMIT
    cells = cells_of(name)
    assert sum(bool(c["outputs"]) for c in cells) >= 2
    for c in cells:
        source = "".join(c["source"])
        assert c["outputs"] or not has_value(source), f"{name}: no output of {source[-80:]!r}; run `make outputs`"
        for o in c["outputs"]:
            assert o["output_type"] != "error" and o.get("name") != "stderr", f"{name}: {source[:60]!r} shows {o}"
            assert not [kind for kind in o.get("data", {}) if kind == "image/png" or "widget" in kind]
            assert "data:image/png" not in text_of(o.get("data", {}).get("text/html", ""))


def test_values_are_recognized():
    assert has_value("x = 1\nx") and has_value("%pip install x\nx.shape") and not has_value("#| export\nx") and not has_value("f(x)") and not has_value("#| cuda\nx")


def test_what_differs_between_runs_is_not_compared():
    def cell(text): return dict(outputs=[dict(output_type="stream", name="stdout", text=text)])
    assert comparable(cell("loss 0.51 in 3.2 s, key 75df56e4\ntrain 3/40, 2.47/s, 15 s left\n")) == comparable(cell("loss 1.4e-3 in 11 s,  key 8ddf56e4\n"))
    assert comparable(cell("final evaluation: 2 images x 8 steps, about 17 s\n")) == [], "announced only where it takes more than 10 s"
    assert comparable(cell("12 samples")) != comparable(cell("12 pairs")) and comparable(cell("")) == []


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


@pytest.mark.slow
@each_notebook
def test_outputs_are_current(name):
    "Text outputs are compared, except numbers and progress."
    if name in PLACES:
        from fake_kaggle import unsharing
        if not unsharing(): pytest.skip("the places' imitations need mounts of their own (Linux with unshare)")
    new = [c for c in execute(name)["cells"] if c["cell_type"] == "code"]
    for old, new in zip(cells_of(name), new, strict=True):
        assert comparable(old) == comparable(new), f"{name}: the output of {''.join(old['source'])[-80:]!r} is stale; run `make outputs`"
