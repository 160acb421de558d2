"""Messages on a page: settings between backticks become code, and everything is escaped."""
import pytest

from qie_nb.config import make_config
from qie_nb.core.display import PrintedResult, badge, note, status_html, table_html
from qie_nb.data.dataset import ImageDataset
from qie_nb.data.prompts import Samples
from qie_nb.planning.doctor import DoctorReport, Finding
from qie_nb.tiny.photos import make_pairs
from qie_nb.training.callbacks import RunState
from qie_nb.widgets import sample_viewer
from qie_nb.widgets.training_panel import TrainingPanel

MESSAGE = "this caption is in `data.prompt`; <b>edit</b> it there"


def is_shown(page:str):
    "The message is escaped, its setting is code, and no backtick is left."
    assert ">data.prompt</code>" in page and "`" not in page
    assert "&lt;b&gt;edit" in page and "<b>edit" not in page


def panel(**values) -> str: # HTML
    "The panel of a run with these results."
    made = TrainingPanel()
    made.state = RunState()
    for name, value in values.items():
        setattr(made.state, name, value)
    return made.html()


def status(why:str) -> str: # HTML
    "A cache of which `why` is known."
    layer = dict(models={}, layers=[], kinds={}, bad=[("file", why)], quarantined=0, why=why)
    return status_html(layer)


@pytest.mark.parametrize("shown", [
    note, badge, status,
    lambda text: table_html([("data set", text)]),
    lambda text: panel(evaluated=text),
    lambda text: panel(advice=text),
    lambda text: Samples(notes=[text])._repr_html_(),
    lambda text: DoctorReport([Finding("data set", "pairs", "error", text)])._repr_html_(),
], ids="note badge cache table evaluation advice samples doctor".split())
def test_settings_in_a_message_are_code(shown):
    is_shown(shown(MESSAGE))


def test_the_viewer_says_where_a_caption_is(tmp_path):
    folder = make_pairs(tmp_path/"pairs", "duotone", 2)
    for file in folder.rglob("*.txt"):
        file.unlink()
    data = ImageDataset(make_config(dict(data=dict(dataset_path=str(folder), prompt="age it"))))
    viewer = sample_viewer(data)
    assert viewer.box and ">data.prompt</code>" in viewer.controls.where.value
    assert "`" not in viewer.controls.where.value
