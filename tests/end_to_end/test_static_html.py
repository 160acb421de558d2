"""Notebooks run as a batch job, like nbconvert: static HTML in the output, no widget, no error; the exported page contains the images."""
import json, os, re
from pathlib import Path

import nbformat, pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from qie_nb.core.display import VIEW

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name, texts", [("index", ["1 of 12", "pixel_latent", "with the LoRA so far"]), ("00_cache", ["pixel_latent"]), ("03_logging", ["trained 10 steps"])])
def test_batch_run_shows_static_forms(name, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    book = nbformat.read(ROOT/"nbs"/f"{name}.ipynb", 4)
    book.cells = [c for c in book.cells if "nbdev_export()" not in c.source]
    NotebookClient(book, timeout=600, resources=dict(metadata=dict(path=str(tmp_path)))).execute()
    outputs = [o for c in book.cells if c.cell_type == "code" for o in c.outputs]
    assert not [o for o in outputs if VIEW in o.get("data", {})]
    page, _ = HTMLExporter().from_notebook_node(book)
    for text in texts: assert text in page
    if name == "index":
        images = [d for o in outputs for d in re.findall("data:image/jpeg;base64,[^\"]+", o.get("data", {}).get("text/html", ""))]
        assert len(images) >= 4 and all(d in page for d in images)
        assert len(json.dumps(book)) < 3e6
