"""Few trials of the cases in crash_trials.py, in a process that forks; `make kills` runs the full counts."""
import pytest

from helpers import few_trials
from crash_trials import SLOW, cases

CASES = [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in cases(False)]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    "One run of the cases that were selected, by name."
    return few_trials("crash_trials", request, tmp_path_factory)


@pytest.mark.parametrize("case", CASES)
def test_every_trial_goes_as_it_must(case, results):
    r = results[case]
    assert r["trials"] and r["passed"] == r["trials"], r["worst"]
