"""Few trials of the cases in crash_trials.py, in a process that forks; `make kills` runs the full counts."""
import pytest

from helpers import few_trials
from crash_trials import cases

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(request, tmp_path_factory): return few_trials("crash_trials", request, tmp_path_factory)


@pytest.mark.parametrize("case", cases(False))
def test_every_trial_goes_as_it_must(case, results):
    r = results[case]
    assert r["trials"] and r["passed"] == r["trials"], r["worst"]
