"""Numbers, times and counts as a person reads them."""
import io

import pytest

from qie_nb.core import display
from qie_nb.core.display import (
    Progress, counted_reasons, digits_text, duration, short_time, size_text, status_html,
    status_text, two_numbers)


@pytest.mark.parametrize("seconds, text", [
    (59.9, "59 s"), (60, "1:00 min"), (3599, "59:59 min"), (3725, "1:02 h"), (90_000, "25:00 h")])
def test_times_are_short(seconds, text):
    assert short_time(seconds) == text


def test_an_estimate_is_rounded():
    assert [duration(s) for s in (5, 900, 5999, 6480)] == ["1 min", "15 min", "100 min", "1.8 h"]


def test_sizes_are_in_powers_of_ten():
    sizes = 3000, 99_999, 100_000, 2_100_000, 1_500_000_000
    assert [size_text(n) for n in sizes] == ["3.0 kB", "100.0 kB", "0.10 MB", "2.10 MB", "1.50 GB"]


@pytest.mark.parametrize("pair, text", [
    ((0.604, 0.189), "0.60 to 0.19"), ((0.0191, 0.0189), "0.0191 to 0.0189"),
    ((101.2, 99.), "101 to 99"), ((1., 0.27), "1.00 to 0.27")])
def test_two_numbers_have_the_digits_that_tell_them_apart(pair, text):
    assert two_numbers(*pair) == text


def test_a_number_has_the_digits_that_were_asked_for():
    values = [(0.4123, 3), (41.26, 3), (0.00012, 2), (123_456., 2)]
    assert [digits_text(*v) for v in values] == ["0.412", "41.3", "1.2e-04", "1.2e+05"]


def test_the_rate_of_work_that_continues_is_that_of_its_own_steps(monkeypatch):
    clock = [1000.]
    monkeypatch.setattr(display.time, "time", lambda: clock[0])
    monkeypatch.setattr(Progress, "began", None)
    work = Progress(100, "train", start=80, stream=io.StringIO())
    clock[0] += 20
    work.update(10)
    assert work.pace() == (0.5, 20.)
    assert work.text().endswith("train 90/100, 0.50/s, 20 s left")


def test_reasons_that_are_not_listed_are_counted():
    reasons = [(str(n), f"reason {chr(97 + n)}") for n in range(7)] + [("x", "reason g")]
    assert counted_reasons(reasons, most=5)[-1] == "and 3 more"
    assert counted_reasons(reasons[:5])[-1] == "4: reason e"


def status(complete:int) -> dict:
    """Of a data set of four samples and its cache."""
    kind = dict(needed=4, present=complete, missing=4 - complete, bytes=3000)
    layer = dict(folder="cache", packed=False, writable=True, count=complete, bytes=3000)
    return dict(samples=4, complete=complete, kinds=dict(pixel_latent=kind), layers=[layer],
                models={}, bad=[], quarantined=0)


def test_a_cache_that_lacks_entries_is_marked_and_says_how_many():
    red = "background:#b3261e"
    assert red in status_html(status(3)) and red not in status_html(status(4))
    assert status_text(status(3)).splitlines() == [
        "3 of 4 samples are complete", "pixel_latent: 3 entries, 3.0 kB, 1 missing",
        "cache: 3 entries, 3.0 kB"]
    assert "missing" not in status_text(status(4))
