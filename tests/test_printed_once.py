"""What is printed is printed once: by the first of several processes, and not again as the value of the cell."""
import pytest

from qie_nb.core import display
from qie_nb.trainer import QwenImageEditTrainer

from helpers import settings, write_pairs


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("once")/"set", [(48, 32)] * 4)


@pytest.fixture
def config(pairs, tmp_path):
    return settings(tmp_path, tmp_path, data=dict(dataset_path=str(pairs), batch_size=1),
                    cache=dict(cache_dir=str(tmp_path/"cache")),
                    train=dict(output_dir=str(tmp_path/"out"), max_train_steps=1))


def value_of_cell(result, cell:int, monkeypatch) -> list: # of texts
    "What a notebook shows if a cell ends with this result."
    shown = []
    monkeypatch.setattr(display, "running_cell", lambda: cell)
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle["text/plain"]))
    result._ipython_display_()
    return shown


def test_the_cell_that_prints_a_result_does_not_show_it_again(config, monkeypatch, capsys):
    monkeypatch.setattr(display, "running_cell", lambda: 3)
    t = QwenImageEditTrainer(config)
    report = t.cache_embeddings()
    printed = capsys.readouterr().out
    assert printed.count(str(report).strip()) == 1, "a script has no other value"
    assert value_of_cell(report, 3, monkeypatch) == []
    assert value_of_cell(report, 4, monkeypatch) == [repr(report)]
    assert "4 samples in" in printed and (report + report).samples == 8


@pytest.mark.parametrize("rank, printed", [("0", True), ("1", False), (None, True)])
def test_the_first_process_describes_the_data_set(rank, printed, config, monkeypatch, capsys):
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    QwenImageEditTrainer(config).make_loader()
    out = capsys.readouterr().out
    assert ("data set: 4 samples" in out) == printed
