"""Few trials of every case in faults.py, in a process of their own that forks freely; `make faults` runs the full counts."""
import pytest

from helpers import few_trials
from cache_fault_trials import cases

MOUNTS = ["full_disk", "read_only_loose", "read_only_packed"]
CASES = [pytest.param(c, marks=[pytest.mark.mounts, pytest.mark.slow]) if c in MOUNTS else c for c in cases(False)]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    "One run of the cases that were selected, by name."
    return few_trials("cache_fault_trials", request, tmp_path_factory)


@pytest.mark.parametrize("case", CASES)
def test_every_trial_goes_as_it_must(case, results):
    r = results[case]
    if r["worst"].startswith("not run"): pytest.skip(r["worst"])
    assert r["trials"] and r["passed"] == r["trials"], r["worst"]
