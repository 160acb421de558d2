"""The estimates of docs/kaggle.md rest on counted operations."""
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import session_table
from counted_step import empty_step, empty_transformer
from qie_nb.planning.memory import MemoryQuery

RESULTS = Path(session_table.__file__).parent/"results"


@pytest.mark.slow
def test_forward_work_matches_counted_operations():
    q = MemoryQuery(layers=2, dim=512, heads=4, text_dim=256, target=256, control=256, text=64, targets=("to_q",), r=1)
    tr = empty_transformer(q)
    for m in tr.modules():
        if hasattr(m, "disable_adapters"): m._disable_adapters = True
    loss, _ = empty_step(q, tr)
    with torch.no_grad(), FlopCounterMode(display=False) as flops: loss()
    assert session_table.forward_work(q) == pytest.approx(flops.get_total_flops(), rel=0.03)


@pytest.mark.parametrize("number", [0, 1])
def test_encoding_work_matches_counted_operations(number):
    row = json.loads((RESULTS/"precompute.json").read_text())["operations"][number]
    q = MemoryQuery(text=row["vision_patches"] // 4 + 62)
    assert sum(session_table.encoding_work(q)) == pytest.approx(row["total"]["ours"], rel=0.05)


@pytest.mark.slow
def test_phases_sessions_and_disk():
    (p, disk, small), (_, _, large) = (session_table.case("kaggle", side, "float32") for side in (512, 1024))
    fast = session_table.case("kaggle", 512, "float16")[2]
    assert [p.shown.query.target + p.shown.query.control + p.shown.query.text] == [2298] and list(small) == ["download", "quantize", "precompute", "train", "save"]
    assert session_table.sessions(small, 9) == 1 and session_table.sessions(large, 9) == 2
    assert fast["train"] < small["train"] / 3
    assert sum(disk.bytes(g) for g in ("cache", "checkpoints", "logs")) < session_table.SITES["kaggle"].output and p.chosen.total <= 0.93 * p.gpu.bytes
    assert [session_table.samples_for(n) for n in (20, 50, 200)] == [500, 800, 2000]


def test_a_copy_that_is_too_large_is_named():
    text = session_table.tables("kaggle")
    assert "is 15.4 GB: it fits into 20.0 GB" in text
    assert "is 22.0 GB: it does not fit into 20.0 GB" in text
    [slow] = [row for row in text.splitlines() if row.startswith("| 1024 x 1024 | float32 |")]
    assert slow.split(" | ")[-3] == "2", "sessions of nine hours"


def test_one_figure_for_one_question_in_all_pages():
    "Hours of a session, and gigabytes of the model and of the text encoder in memory."
    from qie_nb.planning.parts import PUBLISHED, text_encoder_bytes
    docs = Path(session_table.__file__).parents[1]/"docs"
    pages = {p.stem: p.read_text() for p in [*docs.glob("*.md"), docs.parent/"README.md"]}
    hours = {}
    for where in ("kaggle", "colab"):
        phases = session_table.case(where, 512, "float16")[2]
        hours[where] = round(sum(phases.values()) / 3600)
    for where, number in hours.items():
        assert f"about {number} hours for 50 pairs" in pages[where]
    assert f"about {hours['kaggle']} and {hours['colab']} hours" in pages["faq"]
    assert f"about {hours['kaggle']} hours" in pages["recipes"]
    assert f"about {hours['colab']} hours" in pages["jobs"]
    assert f"{sum(PUBLISHED.values()) / 1e9:.1f} GB in each session" in pages["kaggle"]
    memory = f"{text_encoder_bytes(None, 2) / 1e9:.1f} GB"
    for page in ("README", "cache"):
        assert memory in pages[page]
    for page, text in pages.items():
        assert "16.6 GB" not in text and "57.7 GB" not in text, page
