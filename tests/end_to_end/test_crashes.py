"""Few trials of the cases in crash_trials.py, in a process that forks; `make kills` runs all.

The stop button, started processes and their stages are weekly: test_kernel_processes and test_run_processes
interrupt and kill them at every change."""
import pytest

from helpers import few_trials
from crash_trials import cases

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(request, tmp_path_factory): return few_trials("crash_trials", request, tmp_path_factory)


WEEKLY = "interrupts", "started", "stages"
CASES = [pytest.param(c, marks=[pytest.mark.weekly] if c in WEEKLY else []) for c in cases(False)]


@pytest.mark.parametrize("case", CASES)
def test_every_trial_goes_as_it_must(case, results):
    r = results[case]
    assert r["trials"] and r["passed"] == r["trials"], r["worst"]
