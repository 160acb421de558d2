"""The app of a Space, started as a Space starts it, in Chromium.

`make space` runs this file in an environment with gradio (browser/space.txt).
QIE_NB_SCREENS names a folder that keeps the screens."""
import os, re, subprocess, sys, time, urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from browser.lab import PATIENCE, ROOT, chrome, free_port
from qie_nb.extras.space import GRADIO, write_space
from qie_nb.tiny.photos import EDITS, make_pairs, squares
from qie_nb.trainer import QwenImageEditTrainer

ELSEWHERE = os.environ.get("QIE_NB_BROWSER") != "space"
pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.weekly,
              pytest.mark.skipif(ELSEWHERE, reason="needs gradio and Playwright; use `make space`")]
TITLE = "Dusk <img src=x onerror='window.pwned=1'> \"\"\"' \\ ![x](http://evil/p.png)\n---\n"
INSTRUCTION = EDITS["duotone"].instruction


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    "The tiny model with a LoRA that it was trained with for a moment."
    folder = tmp_path_factory.mktemp("run")
    make_pairs(folder/"pairs", "duotone", 12)
    trainer = QwenImageEditTrainer(dict(
        preset="tiny", data=dict(dataset_path=str(folder/"pairs")),
        train=dict(output_dir=str(folder/"out"), max_train_steps=20, eval_at_start=False, eval_interval=0)))
    trainer.fit()
    return trainer


def answers(url):
    "Is there a server?"
    try:
        urllib.request.urlopen(url, timeout=60).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def address(trainer, tmp_path_factory):
    "Where the app runs, in a process of its own."
    lora = trainer.save_lora(tmp_path_factory.mktemp("saved")/"lora", title=TITLE).parent
    space = write_space(lora, base_model=str(trainer.components.folder))
    port = free_port()
    log = (space/"log.txt").open("w")
    env = os.environ | dict(GRADIO_SERVER_PORT=str(port), GRADIO_ANALYTICS_ENABLED="False", HF_HUB_OFFLINE="1",
                            GRADIO_TEMP_DIR=str(space/"temp"))
    del env["PYTHONPATH"] # a Space does not have this library
    app = subprocess.Popen([sys.executable, "app.py"], cwd=space, env=env, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/"
    end = time.time() + PATIENCE
    while not answers(url):
        if app.poll() is not None or time.time() > end:
            pytest.fail(f"the app did not start:\n{(space/'log.txt').read_text()[-3000:]}")
        time.sleep(0.2)
    yield url
    app.terminate()
    app.wait(60)
    log.close()
    assert "Traceback" not in (space/"log.txt").read_text(), "refusals are no errors of the app"


@pytest.fixture(scope="module")
def browser():
    with chrome() as b: yield b


@pytest.fixture
def page(browser, address, tmp_path, request):
    "The app's page; screens are kept where QIE_NB_SCREENS says, or if the test fails."
    page = browser.new_page(viewport=dict(width=1280, height=900))
    page.set_default_timeout(300_000)
    page.problems = []
    page.on("pageerror", lambda e: page.problems.append(str(e)))
    page.goto(address)
    page.get_by_role("button", name="Edit", exact=True).wait_for()
    folder = Path(os.environ.get("QIE_NB_SCREENS") or tmp_path)

    def keep(what):
        page.screenshot(path=folder/f"{what}.png", full_page=True)
    page.keep = keep
    yield page
    if getattr(request.node, "failed", False):
        keep("failed")
        print("screen:", folder/"failed.png")
    page.close()


def press(page): page.get_by_role("button", name="Edit", exact=True).click()


def test_environment_has_the_sdks_version():
    import gradio
    assert gradio.__version__ == GRADIO
    assert f"gradio=={GRADIO}" in (ROOT/"tests"/"end_to_end"/"browser"/"space.txt").read_text().split()


def test_an_image_is_edited_as_predict_does(page, trainer, tmp_path):
    photo = squares(256)[0]
    photo.save(tmp_path/"photo.png")
    box = page.get_by_label("Instruction")
    assert box.input_value() == INSTRUCTION, "proposed from the LoRA"
    press(page)
    page.get_by_text("There is no image yet; add one to edit.").wait_for()
    page.locator("input[type=file]").first.set_input_files(tmp_path/"photo.png")
    page.locator("img[src*='photo.png']").wait_for()
    box.fill("   ")
    press(page)
    page.get_by_text("The instruction is empty; say what to change.").wait_for()
    page.keep("refused")
    box.fill(INSTRUCTION)
    press(page)
    page.get_by_text(re.compile(r"\d+/20 steps")).wait_for()
    page.keep("running")
    result = page.locator("img[src*='/file=']:not([src*='photo.png'])")
    result.wait_for()
    page.keep("edited")
    with urllib.request.urlopen(result.get_attribute("src")) as answer:
        (tmp_path/"after.png").write_bytes(answer.read())
    theirs = np.asarray(Image.open(tmp_path/"after.png").convert("RGB")).astype(int)
    ours = trainer.predict(photo, INSTRUCTION, " ", progress=False)
    assert theirs.shape == ours.shape == (96, 96, 3)
    # the app computes in bfloat16: its rounding, over 20 steps of a tiny model; without LoRA the image is another
    assert np.abs(theirs - ours).mean() < 8, np.abs(theirs - ours).mean()
    assert np.abs(theirs - np.asarray(photo.resize((96, 96)))).mean() > 16, "something was edited"
    assert not page.problems


def test_a_hostile_title_is_text(page):
    heading = page.get_by_role("heading").first.inner_text()
    assert heading == " ".join(TITLE.split())
    assert page.title() == " ".join(TITLE.split())
    assert page.evaluate("window.pwned") is None
    assert not page.locator("img[src*=evil]").count()


def test_a_narrow_and_dark_page(page, address):
    page.get_by_text("More images").click()
    page.get_by_text("Third image").wait_for()
    page.set_viewport_size(dict(width=480, height=900))
    page.goto(address + "?__theme=dark")
    page.get_by_role("button", name="Edit", exact=True).wait_for()
    page.keep("narrow")
    assert page.evaluate("document.documentElement.scrollWidth") <= 480, "nothing is cut off"
