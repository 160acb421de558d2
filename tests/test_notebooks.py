"""The chapters of the tour, run once in a kernel as a batch job does: no error, nothing on stderr, static forms, and the images on the exported page."""
import json, re

import pytest
from nbformat import reads
from nbconvert import HTMLExporter

from helpers import weekly
from outputs import CHAPTERS, has_value
from qie_nb.core.display import VIEW

pytestmark = pytest.mark.slow # `make test` runs the chapters as the other notebooks

EACH_CHANGE = "nbs/index", "nbs/00_cache", "nbs/03_logging" # have widgets and a panel; the others are weekly here

SHOWN = {"nbs/index": ["1 of 12", "pixel_latent", "with the LoRA so far"], "nbs/00_cache": ["pixel_latent"],
         "nbs/03_logging": ["trained 10 steps"]} # on the page that is exported


def code_cells(book:dict) -> list: # [(source, outputs)]
    "The code cells that ran."
    return [("".join(c["source"]), c["outputs"]) for c in book["cells"] if c["cell_type"] == "code"]


def page_of(book:dict) -> str:
    "The notebook as an HTML page."
    return HTMLExporter().from_notebook_node(reads(json.dumps(book), 4))[0]


@pytest.mark.parametrize("name", [name if name in EACH_CHANGE else weekly(name) for name in CHAPTERS])
def test_a_chapter_runs_and_shows_its_values(name, executed):
    book = executed(name)
    for source, outputs in code_cells(book):
        assert outputs or not has_value(source), f"no output of {source[-80:]!r}"
        for output in outputs:
            assert output.get("name") != "stderr", f"{source[:60]!r} shows {''.join(output['text'])}"
            assert VIEW not in output.get("data", {}), f"{source[:60]!r} shows a live widget in a batch run"
    page = page_of(book)
    for text in SHOWN.get(name, []):
        assert text in page


def test_the_exported_tour_contains_its_images(executed):
    book = executed("nbs/index")
    shown = [output.get("data", {}).get("text/html", "") for _, outputs in code_cells(book) for output in outputs]
    images = [image for html in shown for image in re.findall('data:image/jpeg;base64,[^"]+', "".join(html))]
    page = page_of(book)
    assert len(images) >= 4 and all(image in page for image in images)
    assert len(json.dumps(book)) < 3e6
