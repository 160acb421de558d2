"""The notebooks in a real JupyterLab, in a real browser: what appears, what a click does, what a saved notebook shows the day after.

`make browser` runs this file in two environments of its own, ipywidgets 7.7.1 and 8.1 with their front ends (tests/browser/*.txt)."""
import json, os, re, shutil, sys
from pathlib import Path

import pytest

from browser.lab import ROOT, Lab, Page, chrome

WHICH = os.environ.get("QIE_NB_BROWSER", "")
pytestmark = [pytest.mark.browser, pytest.mark.slow,
              pytest.mark.skipif(not WHICH, reason="needs JupyterLab and Playwright: `make browser` runs it in environments of its own")]
HOSTILE = '<img src=x onerror="window.pwned=1">'
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
def opened(browser, lab, tmp_path):
    "Opens notebooks; keeps what was to be seen where a test fails."
    pages = []

    def open_(name, cells=None, server=lab):
        file = server.folder/f"{name}.ipynb"
        if cells is not None: file.write_text(json.dumps(notebook(cells)))
        elif not file.exists(): shutil.copy(ROOT/"nbs"/file.name, file)
        pages.append(Page(browser, server, file.name, tmp_path))
        return pages[-1]
    yield open_
    for page in pages: page.close()


def notebook(cells) -> dict:
    code = [dict(cell_type="code", id=f"cell{i}", source=c, metadata={}, outputs=[], execution_count=None) for i, c in enumerate(cells)]
    return dict(cells=code, metadata=dict(kernelspec=dict(name="python3", display_name="python3", language="python")), nbformat=4, nbformat_minor=5)


def text_of(page): return page.page.inner_text(".jp-NotebookPanel:not(.lm-mod-hidden):not(.p-mod-hidden)")


def test_the_environment_is_the_one_that_is_meant(opened):
    page = opened("versions", ["import ipywidgets, ipykernel, jupyterlab, torch, qie_nb\n"
                               "print(ipywidgets.__version__, jupyterlab.__version__, ipykernel.__version__, qie_nb.__file__)"]).kernel().run_all()
    pins = dict(line.split("==") for line in (ROOT/"tests"/"browser"/f"{WHICH}.txt").read_text().split() if "==" in line)
    assert page.outputs()[0]["text"].split() == [pins["ipywidgets"], pins["jupyterlab"], pins["ipykernel"], str(ROOT/"qie_nb"/"__init__.py")]


def test_a_hostile_caption_would_be_noticed(opened):
    page = opened("control", [f"import ipywidgets\nipywidgets.HTML({HOSTILE!r})"]).kernel().run_all()
    page.page.wait_for_function("() => window.pwned === 1")
