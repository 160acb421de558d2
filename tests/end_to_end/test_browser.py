"""The notebooks in a real JupyterLab and Chromium: displays, clicks, and saved notebooks without their kernel.

`make browser` runs this file in two environments, ipywidgets 7.7.1 and 8.1 with their front ends (tests/end_to_end/browser/*.txt)."""
import json, os, re, shutil, sys
from pathlib import Path

import pytest
from nbformat import v4

from browser.lab import ROOT, Lab, Page, chrome

WHICH = os.environ.get("QIE_NB_BROWSER", "")
pytestmark = [pytest.mark.browser, pytest.mark.slow,
              pytest.mark.skipif(not WHICH, reason="needs JupyterLab and Playwright; use `make browser`")]
HOSTILE = '<img src=x onerror="window.pwned=1">'
LEFT = ".jp-OutputArea-child:has(+ * [class^=qie-]) > .jp-OutputArea-output:not([data-mime-type])" # our widgets, with or without their kernel
STILL = "[class^=qie-]:not([class*=live])"
STOPS = "button:has-text('stop and save')"


@pytest.fixture(scope="module")
def browser():
    with chrome() as b: yield b


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    for d in ("notebooks", "home"): (folder/d).mkdir()
    with Lab(folder/"notebooks", folder/"home") as running: yield running


@pytest.fixture
def opened(browser, lab, tmp_path, request):
    "Opens notebooks; keeps a screenshot if the test fails."
    pages = []

    def open_(name, cells=None, server=lab):
        file = server.folder/f"{name}.ipynb"
        if cells is not None: file.write_text(json.dumps(notebook(cells)))
        elif not file.exists(): file.write_text(json.dumps(chapter(file.name)))
        pages.append(Page(browser, server, file.name, tmp_path))
        return pages[-1]
    yield open_
    failed = getattr(request.node, "failed", False)
    for page in pages:
        if failed: print("screenshot:", page.keep(f"failed_{page.name}"))
        page.close()


def chapter(name) -> dict:
    "A notebook of the project without outputs, export and clean-up cells."
    book = json.loads((ROOT/"nbs"/name).read_text())
    code = [c | dict(outputs=[]) for c in book["cells"] if c["cell_type"] == "code"]
    return book | dict(cells=[c for c in code if not re.search(r"^(shutil\.rmtree\(|import nbdev|.*\.cleanup\()", "".join(c["source"]), re.M)])


def notebook(cells) -> dict:
    return v4.new_notebook(cells=[v4.new_code_cell(c) for c in cells], metadata=dict(kernelspec=dict(name="python3", display_name="python3", language="python")))


def pwned(page): return page.page.evaluate("window.pwned") # by `HOSTILE`
def visible(page, selector) -> int: return sum(e.is_visible() for e in page.page.locator(selector).all())


def test_environment_has_the_pinned_versions(opened):
    page = opened("versions", ["import ipywidgets, ipykernel, jupyterlab, torch, qie_nb\n"
                               "print(ipywidgets.__version__, jupyterlab.__version__, ipykernel.__version__, qie_nb.__file__)"]).kernel().run_all()
    pins = dict(line.split("==") for line in (ROOT/"tests"/"end_to_end"/"browser"/f"{WHICH}.txt").read_text().split() if "==" in line)
    assert page.outputs()[0]["text"].split() == [pins["ipywidgets"], pins["jupyterlab"], pins["ipykernel"], str(ROOT/"qie_nb"/"__init__.py")]


def test_unescaped_html_is_detected(opened):
    page = opened("control", [f"import ipywidgets\nipywidgets.HTML({HOSTILE!r})"]).kernel().run_all()
    page.page.wait_for_function("window.pwned")


def changes(p, element, was, what="e.innerText"): p.wait_for_function(f"([e, was]) => {what} !== was", arg=[element.element_handle(), was])
def seen(page, text): page.page.wait_for_function("t => document.querySelector('.jp-Notebook').innerText.replace(/\\s+/g, ' ').includes(t)", arg=text)


def test_the_tour(opened, lab, tmp_path):
    page = opened("index").kernel().run_all()
    assert not page.errors()
    p = page.page
    seen(page, "finished, step 40 of 40") # the training panel
    hidden = "the widgets hide the static forms"
    assert visible(page, LEFT) == 4, hidden
    assert page.page.locator(STILL).count() == 4, hidden
    assert not visible(page, STILL), hidden

    viewer = p.locator(".jp-OutputArea-output:has(button:has-text('next'))").first
    first = viewer.inner_text()
    image = viewer.locator("img").first
    small = image.bounding_box()
    image.click()
    assert image.bounding_box()["height"] > 3 * small["height"], "a click enlarges an image"
    image.click()
    assert image.bounding_box()["height"] == small["height"]
    viewer.locator("button:has-text('next')").click()
    changes(p, viewer, first)
    image = viewer.locator("img").first.get_attribute("src")
    slide(viewer, "ArrowRight", 3)
    viewer.get_by_text("5 of 12").wait_for()
    assert viewer.locator("img").first.get_attribute("src") != image
    was = viewer.inner_text()
    viewer.locator("select").select_option(index=1)
    changes(p, viewer, was)

    status = p.locator(".jp-OutputArea-output:has(button:has-text('verify'))").first
    before = status.inner_text()
    assert "pixel_latent" in before
    status.locator("button:has-text('verify')").click()
    changes(p, status, before)

    both = p.locator("[role=slider][aria-valuenow]:has(img)").first
    both.scroll_into_view_if_needed()
    box = both.bounding_box()
    p.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 20)
    p.mouse.down()
    p.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 30, steps=4)
    p.mouse.up()
    at = int(both.get_attribute("aria-valuenow"))
    assert abs(at - 20) <= 2, "the line is dragged on the image"
    p.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 30)
    assert abs(int(both.get_attribute("aria-valuenow")) - 20) <= 2, "and stays where it was left"

    assert not page.errors() and not page.console
    page.save()
    reopened(page, opened, lab, tmp_path, "finished", "with the LoRA so far", "pixel_latent")
    p.evaluate("() => (window.jupyterapp || window.jupyterlab).shell.currentWidget.sessionContext.session.kernel.restart()")
    p.wait_for_timeout(1000)
    p.reload(wait_until="domcontentloaded")
    page.kernel()
    still = "widgets without a kernel are hidden"
    page.until(lambda: visible(page, STILL) == 4 and not visible(page, LEFT), still)
    p.wait_for_timeout(3000) # and stay so
    page.keep("restarted")
    assert visible(page, STILL) == 4, still
    assert not visible(page, LEFT), still


def slide(box, key, times):
    handle = box.locator(".noUi-handle, .ui-slider-handle").first
    handle.focus()
    for _ in range(times): handle.press(key)


@pytest.mark.weekly # with each change test_notebooks.py runs them, without a browser
@pytest.mark.parametrize("name, text", [("00_cache", "pixel_latent"), ("03_logging", "finished, step 10 of 10")])
def test_notebook_runs(name, text, opened):
    page = opened(name).kernel().run_all()
    assert not page.errors() and not page.console
    seen(page, text)


EVENTS = """
import tempfile
from torch.utils.tensorboard import SummaryWriter
from qie_nb.logging import show_tensorboard
runs = tempfile.mkdtemp()
with SummaryWriter(runs) as w: [w.add_scalar("loss", 1 / n, n) for n in range(1, 9)]
show_tensorboard(runs)"""


def test_tensorboard_is_served_inline(opened):
    page = opened("tensorboard", [EVENTS]).kernel().run_all()
    assert not page.errors()
    page.page.frame_locator("iframe").first.locator("text=loss").first.wait_for()


WIDGETS = """
import tempfile, torch
from pathlib import Path
from qie_nb.cache import EmbeddingCacheManager, key_of
from qie_nb.data.dataset import ImageDataset
from qie_nb.tiny.photos import make_pairs
from qie_nb.widgets.before_after import before_after
from qie_nb.widgets import cache_status, pair_grid, sample_viewer
hostile = {hostile!r}
work = Path(tempfile.mkdtemp())
folder = make_pairs(work/"pairs", "duotone", 4)
name = hostile.replace("/", "")
for f in sorted(folder.rglob("0000.*")): f.rename(f.with_name(name + f.suffix))
for f in (folder/"training_images").glob("*.txt"): f.write_text("text of " + hostile)
dataset = ImageDataset(dict(dataset_path=str(folder), image_size=[96, 96]))
cache = EmbeddingCacheManager(work/name)
bad = cache.save_cache("pixel_latent", key_of("pixel_latent", a=1), torch.randn(4))
bad.write_bytes(bad.read_bytes()[:-1] + b"\\0")"""


def test_captions_and_file_names_are_escaped(opened):
    shown = ["sample_viewer(dataset)", "pair_grid(dataset, 4)", "cache_status(cache)",
             "image = next(folder.rglob('0001.png'))\nbefore_after(image, image, [hostile, hostile])"]
    page = opened("hostile", [WIDGETS.format(hostile=HOSTILE), *shown]).kernel().run_all()
    assert not page.errors()
    page.page.locator("button:has-text('next')").first.click()
    page.page.locator("button:has-text('verify')").first.click()
    seen(page, "1 of 1 entries are bad")
    seen(page, "text of <img src=x") # as text
    page.page.locator(".jp-OutputArea-output textarea:visible").first.fill(f"edited {HOSTILE}")
    page.page.locator("button:has-text('save caption')").first.click()
    seen(page, "this pair is encoded again in the next run")
    page.page.locator("button:has-text('undo')").first.click()
    seen(page, "is as before")
    page.page.locator("button:has-text('look for duplicates and swaps')").first.click()
    seen(page, "cannot be told from the images alone: look at three pairs")
    page.page.wait_for_timeout(500)
    assert not pwned(page) and not page.page.locator("img[src=x]").count()



def test_a_narrow_page_cuts_nothing_off(opened):
    "At 700 pixels, also with an image that is wider than its share of the page."
    shown = ["make_pairs(work/'wide', 'duotone', 2, size=(192, 96))\nsample_viewer(ImageDataset(str(work/'wide')))"]
    page = opened("narrow", [WIDGETS.format(hostile=HOSTILE), *shown])
    page.page.set_viewport_size(dict(width=700, height=1200))
    page.kernel().run_all()
    assert not page.errors()
    viewer = page.page.locator(".jp-OutputArea-output:has(button:has-text('next'))").first
    image = viewer.locator("figure img").first
    box = image.bounding_box()
    assert box["width"] == pytest.approx(2 * box["height"], rel=0.03), "no empty space above and below"
    area = viewer.bounding_box()
    right = area["x"] + area["width"]
    for part in (*viewer.locator("button").all(), viewer.locator("textarea"), *viewer.locator("figure").all()):
        found = part.bounding_box()
        if found is not None: # it is visible
            assert found["x"] >= area["x"] and found["x"] + found["width"] <= right


PROPOSE = '''
import tempfile
from pathlib import Path
from qie_nb.extras.instructions import write_instructions
from qie_nb.tiny.photos import make_pairs
from qie_nb.tiny.random_models import save_tiny
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.widgets import sample_viewer
work = Path(tempfile.mkdtemp())
folder = make_pairs(work/"pairs", "duotone", 3)
(folder/"training_images"/"0000.txt").write_text("my own words")
trainer = QwenImageEditTrainer(dict(
    preset="tiny", model=dict(pretrained_model_name_or_path=str(save_tiny("2511", work/"model"))),
    data=dict(dataset_path=str(folder)), train=dict(output_dir=str(work)),
    cache=dict(cache_dir=str(work/"cache")), logging=dict(log_dir=str(work/"runs"))))'''
LEFT_IN_MEMORY = "print('in memory:', sorted(trainer.components.loaded), (folder/'training_images'/'0000.txt').read_text())"


@pytest.mark.weekly
def test_the_viewer_proposes_instructions(opened):
    page = opened("propose", [PROPOSE, "sample_viewer(trainer.config, model=trainer)", LEFT_IN_MEMORY,
                              "write_instructions(trainer)", "write_instructions(trainer, overwrite=True, dry_run=True)"])
    page.kernel().run_all()
    assert not page.errors()
    said = "".join(o.get("text", "") for o in page.outputs())
    area = page.page.locator(".jp-OutputArea-output textarea:visible").first
    assert "my own words" in said and area.input_value() != "", "kept, and shown"
    page.page.locator("button:has-text('propose an instruction')").first.click()
    seen(page, "proposed, not saved: correct it, then save it")
    proposed = area.input_value()
    assert proposed not in ("", "my own words")
    page.keep("proposed")
    page.page.locator("button:has-text('save caption')").first.click()
    seen(page, "this pair is encoded again in the next run")
    page.page.locator("button:has-text('undo')").first.click()
    seen(page, "is as before")
    assert re.search(r"in memory: \[[^\]]*\]", said) and "text_encoder" not in said
    seen(page, "3 kept"), seen(page, "3 proposed")


TRAIN = '''
import tempfile
from pathlib import Path
from qie_nb.tiny.photos import make_pairs
from qie_nb.trainer import QwenImageEditTrainer
work = Path(tempfile.mkdtemp())
folder = make_pairs(work/"pairs", "duotone", 12)
for f in (folder/"training_images").glob("*.txt"): f.write_text("print it in two colours " + {hostile!r})
trainer = QwenImageEditTrainer(dict(
    model=dict(pretrained_model_name_or_path="tiny", lora=dict(r=16)), data=dict(dataset_path=str(folder), image_size=[96, 96], batch_size=2),
    train=dict(output_dir=str(work), max_train_steps=5000, device="cpu", mixed_precision="no", gradient_checkpointing=False, save_interval=0,
               val_fraction=0.3, eval_interval=0, eval_steps=6, eval_images=3, eval_num_inference_steps=4),
    cache=dict(cache_dir=str(work/"cache")), optimizer=dict(lr=5e-3), logging=dict(log_dir=str(work/"runs"))))
trainer.cache_embeddings()'''
FIT = 'trainer.fit()\nprint("left with", trainer.state.stop, trainer.global_step, (trainer.checkpoint_root()/"latest").read_text())'
ON = "trainer.config.train.max_train_steps = trainer.global_step + 2\ntrainer.fit()\nprint('continued to', trainer.global_step)"


def steps_shown(page): return int(re.search(r"step (\d+) of", page.page.inner_text(f".jp-OutputArea:has({STOPS})"))[1])


def test_stop_button_saves_and_fit_continues(opened, browser, lab, tmp_path):
    page = opened("panel", [TRAIN.format(hostile=HOSTILE), FIT, ON]).kernel().run_all(wait=False)
    button = page.page.locator(STOPS)
    button.wait_for()
    page.page.get_by_text("edit after step").first.wait_for() # an evaluation's images
    curve, at = page.page.locator("svg polyline").first.get_attribute("points"), steps_shown(page)
    page.page.wait_for_function("was => document.querySelector('svg polyline').getAttribute('points') !== was", arg=curve)
    assert steps_shown(page) > at
    page.keep("training")
    button.click()
    page.finished()
    assert not page.errors() and not page.console
    said = "".join(o.get("text", "") for o in page.outputs())
    step = int(re.search(r"left with the stop button (\d+) (?:step|epoch)_\d+", said)[1])
    assert at < step < 5000 and f"continued to {step + 2}" in said
    assert not pwned(page)
    assert not visible(page, STOPS)
    seen(page, "stopped: the stop button"), seen(page, "finished, step")
    page.save()
    reopened(page, opened, lab, tmp_path, "stopped: the stop button")


def reopened(page, opened, lab, tmp_path, *texts):
    "The saved notebook in a new server shows the static forms, and no error."
    for d in ("notebooks", "home"): (tmp_path/d).mkdir()
    shutil.copy(lab.folder/page.name, tmp_path/"notebooks")
    with Lab(tmp_path/"notebooks", tmp_path/"home") as fresh:
        again = opened(page.name.removesuffix(".ipynb"), server=fresh).kernel()
        for text in texts: again.page.get_by_text(text).first.wait_for()
        again.page.wait_for_timeout(1500) # time for the widget manager to look for the models
        again.until(lambda: not visible(again, LEFT), "widgets without their kernel are hidden")
        again.keep("reopened")
        assert not pwned(again)
