"""A few trials of each case of cache_fault_trials.py; `make faults` runs all. Cases that start no process run here, the others in a process of their own."""
import pytest, torch

from cache_fault_trials import cases
from helpers import few_trials

FAST = ["flips", "swaps", "losses", "bits", "edits_of_the_model"] # `losses` compares the bytes of entries that were encoded twice
MOUNTS = ["full_disk", "read_only_loose", "read_only_packed"]
WEEKLY = ["crowd_of_4", "edits_random", "kills_at_operations"] # crowd_of_2, edits_scripted and order_of_writes run at every change


def marks(case):
    found = [pytest.mark.slow]
    if case in MOUNTS: found.append(pytest.mark.mounts)
    if case in WEEKLY: found.append(pytest.mark.weekly)
    return found


SLOW = [pytest.param(c, marks=marks(c)) for c in cases(False) if c not in FAST]


def check(result):
    if result["worst"].startswith("not run"): pytest.skip(result["worst"])
    assert result["trials"] and result["passed"] == result["trials"], result["worst"]


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    with pytest.MonkeyPatch.context() as mp:
        mp.setenv("QIE_NB_HOME", str(tmp_path_factory.mktemp("home")))
        mp.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("worlds")))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield cases(False)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.bits] * (c == "losses")) for c in FAST])
def test_trials_in_process(case, in_process, tmp_path): check(in_process[case](tmp_path))


@pytest.fixture(scope="module")
def results(request, tmp_path_factory): return few_trials("cache_fault_trials", request, tmp_path_factory)


@pytest.mark.parametrize("case", SLOW)
def test_trials_with_processes(case, results): check(results[case])
