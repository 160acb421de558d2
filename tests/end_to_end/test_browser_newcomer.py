"""The first hour in a real JupyterLab: README's cells and Kaggle's notebook as they are, then with a newcomer's own photographs. `make browser` runs this file.

The photographs are a zip that was unpacked (one folder in a folder), in freely named folders, with one instruction for all. QIE_NB_SCREENS names a folder that keeps every screen."""
import json, os, re, shutil
from pathlib import Path

import pytest

from browser.lab import ROOT, Lab, Page, chrome
from qie_nb.tiny.photos import EDITS, make_pairs
from test_browser import WHICH, notebook
from test_browser import pytestmark as browser_marks

pytestmark = [*browser_marks, pytest.mark.weekly, pytest.mark.skipif(WHICH != "w8", reason="runs with one version of ipywidgets; test_browser.py runs with both")]

INSTRUCTION = EDITS["duotone"].instruction
readme_cells = lambda: re.findall(r"```python\n(.*?)```", (ROOT/"README.md").read_text().split("## Five cells")[1].split("\n## ")[0], re.S)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path: # an unpacked zip, as Kaggle and macOS make it
    made, folder = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("unpacked")/"my-pairs"
    make_pairs(made/"pairs", "duotone", 24)
    for name, free in dict(training_images="After Photos", control_images="Before Photos").items():
        (folder/"my pairs"/free).mkdir(parents=True)
        for n, image in enumerate(sorted(p for p in (made/"pairs"/name).iterdir() if p.suffix != ".txt")): shutil.copy(image, folder/"my pairs"/free/f"IMG_{1000 + n}{image.suffix.upper()}")
    (folder/"__MACOSX").mkdir()
    (folder/"__MACOSX"/"._IMG_1000.JPG").write_bytes(b"x")
    return folder


@pytest.fixture(scope="module")
def browser():
    with chrome() as b: yield b


def played(browser, lab, name, cells, what):
    "Run the cells as a notebook, expect no error and nothing red, and keep a screen of every output."
    (lab.folder/f"{name}.ipynb").write_text(json.dumps(cells if isinstance(cells, dict) else notebook(cells)))
    page = Page(browser, lab, f"{name}.ipynb", Path(os.environ.get("QIE_NB_SCREENS") or lab.home/"screens")).kernel()
    try:
        page.run_all()
        for n, area in enumerate(page.page.locator(".jp-Cell-outputArea").all()):
            if not area.inner_text().strip() and not area.locator("img, canvas, svg, iframe").count(): continue
            area.scroll_into_view_if_needed()
            page.page.wait_for_timeout(500)
            page.keep(f"{what}_{n}")
        assert not page.errors(), page.errors()
        assert not [o for o in page.outputs() if o.get("name") == "stderr"], [o["text"] for o in page.outputs() if o.get("name") == "stderr"]
        return page.outputs()
    finally: page.close()


def images(outputs): return [o for o in outputs if {"image/png", "image/jpeg"} & o.get("data", {}).keys() or re.search("<img|widget-view", json.dumps(o.get("data", {})))]


def test_readme_then_own_photographs(browser, photographs, tmp_path_factory):
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("notebooks")
    cells = readme_cells()
    assert len(cells) == 5
    with Lab(folder, home) as lab:
        assert images(played(browser, lab, "trial", cells, "1_readme")[-1:])
        mine = f'run, preset, pairs = "my-run", "tiny", {str(photographs)!r}'
        own = [re.sub('run, preset, pairs = "trial".*', mine, c).replace("dataset_path=pairs", f"dataset_path=pairs, prompt={INSTRUCTION!r}") for c in cells]
        assert own[0].count(INSTRUCTION) == own[0].count(mine) == 1
        outputs = played(browser, lab, "trial", own, "2_own")
        assert images(outputs[-1:]) and "After Photos" in json.dumps(outputs)


def test_kaggle_notebook_then_own_photographs(browser, photographs, tmp_path_factory, monkeypatch):
    home, root = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("kaggle")
    (root/"kaggle"/"working").mkdir(parents=True)
    shutil.copytree(photographs, root/"kaggle"/"input"/"my-pairs")
    monkeypatch.setenv("QIE_NB_ROOT", str(root))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    book = json.loads((ROOT/"kaggle"/"train"/"train.ipynb").read_text())
    for c in book["cells"]:
        if c["cell_type"] == "code": c["outputs"] = []
        if "%pip" in "".join(c["source"]): c["source"] = "" # it would change this environment
    text = json.dumps(book)
    changes = {
        "TRIAL = True": "TRIAL = False",
        "/kaggle/input/my-pairs": str(root/"kaggle/input/my-pairs"),
        "prompt=None": f"prompt={INSTRUCTION!r}",
        'preset=\\"t4x2\\"': 'preset=\\"tiny\\"',
        "image_size=512": "image_size=96",
        "eval_images=1": "eval_images=1, max_train_steps=60",
        "lr=1e-4": "lr=5e-3",
        'model=dict(pretrained_model_name_or_path=\\"Qwen/Qwen-Image-Edit-2511\\"),': "",
    }
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    with Lab(root/"kaggle"/"working", home) as lab:
        played(browser, lab, "train", book, "3_kaggle_trial")
        shown = json.dumps(played(browser, lab, "train", json.loads(text), "4_kaggle_own"))
    for name in ("pytorch_lora_weights.safetensors", "pytorch_lora_weights_comfyui_workflow.json"):
        assert f'href=\\"lora/{name}\\"' in shown, name
    assert list((root/"kaggle"/"working").glob("lora/*.safetensors")) and list((root/"kaggle"/"working").glob("trial/lora/*.safetensors"))
