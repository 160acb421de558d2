"""Few trials of every case in kills.py, in a process of their own that forks freely; `make kills` runs the full counts."""
import json, os, subprocess, sys
from pathlib import Path

import pytest

from kills import SLOW, cases

CASES = [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in cases(False)]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    "One run of the cases that were selected, by name."
    chosen = [item.callspec.params["case"] for item in request.session.items if item.fspath.basename == Path(__file__).name and hasattr(item, "callspec")]
    out = tmp_path_factory.mktemp("kills")/"kills.json"
    run = subprocess.run([sys.executable, Path(__file__).parent/"kills.py", "--only", *chosen, "--out", out], capture_output=True, text=True,
                         env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))))
    assert out.is_file(), run.stdout[-2000:] + run.stderr[-2000:]
    return {r["name"]: r for r in json.loads(out.read_text())["cases"]}


@pytest.mark.parametrize("case", CASES)
def test_every_trial_goes_as_it_must(case, results):
    r = results[case]
    assert r["trials"] and r["passed"] == r["trials"], r["worst"]
