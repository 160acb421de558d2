"""README's five cells run as they are, end with an image, and continue when they are run again."""
import ast, re
from pathlib import Path

import nbformat, pytest
from nbclient import NotebookClient
from nbformat import v4

import qie_nb
from qie_nb.config import make_config

ROOT = Path(__file__).parents[2]
TEXT = (ROOT/"README.md").read_text()
CELLS = re.findall(r"```python\n(.*?)```", TEXT.split("## Five cells")[1].split("\n## ")[0], re.S)


def test_readme_is_short_and_has_five_cells():
    assert len(CELLS) == 5 and len(TEXT.split()) <= 1100
    names = {n.id for c in CELLS for n in ast.walk(ast.parse(c)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    made = {n.id for c in CELLS for n in ast.walk(ast.parse(c)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    assert not names - made - {*qie_nb.__all__, "make_pairs", "dict"}


@pytest.mark.parametrize("own", [False, True])
def test_the_first_cell_is_a_configuration(own, monkeypatch):
    "With the trial's line, and with the line for own pairs."
    cell = CELLS[0].replace("\n# run, ", "\nrun, ") if own else CELLS[0]
    assert (cell != CELLS[0]) == own
    monkeypatch.setattr("qie_nb.tiny.photos.make_pairs", lambda folder, *_: Path(folder))
    checked = []
    monkeypatch.setattr("qie_nb.trainer.QwenImageEditTrainer", lambda config: checked.append(make_config(config)))
    exec(cell, {})
    assert checked[0].preset == ("rtx4090" if own else "tiny") and checked[0].train.output_dir == ("my-run" if own else "trial")


def run(folder) -> list: # outputs of each cell
    nb = v4.new_notebook(cells=[v4.new_code_cell(c) for c in CELLS])
    NotebookClient(nb, timeout=None, kernel_name="python3", resources=dict(metadata=dict(path=str(folder)))).execute()
    nbformat.write(nb, folder/"readme.ipynb")
    return [c.outputs for c in nb.cells]


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.weekly)], ids=["once", "then again"])
def test_the_cells_run_as_they_are(twice, tmp_path):
    outputs = run(tmp_path)
    assert not [o for cell in outputs for o in cell if o.get("name") == "stderr"]
    assert {"image/png", "image/jpeg"} & outputs[-1][-1].data.keys() or "<img" in outputs[-1][-1].data["text/html"]
    assert (tmp_path/"trial"/"lora"/"pytorch_lora_weights.safetensors").is_file()
    if not twice: return
    again = "".join(o.get("text", "") for cell in run(tmp_path) for o in cell)
    assert "48 reused" in again and "resumed from" in again and "already at 150 of 150" in again
