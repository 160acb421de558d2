"""The scripts that run the lanes and bring derived files in step."""
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT/"tools"))
import quotes, refresh, run_tests

JUNIT = """<testsuites><testsuite name="pytest" tests="3">
<testcase classname="tests.a" name="test_slow" time="2.5"/>
<testcase classname="tests.a" name="test_bad" time="0.5"><failure message="no"/></testcase>
<testcase classname="tests.a" name="test_left_out" time="0.0"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def reports(tmp_path, monkeypatch):
    "A folder for the files of parts."
    monkeypatch.setattr(run_tests, "REPORTS", tmp_path)
    monkeypatch.delenv("QIE_NB_PARTS", raising=False)
    return tmp_path


def part(name, text="", junit=None, code=0, seconds=3.):
    "A part that has run."
    made = run_tests.Part(name, [], seconds, code)
    made.log.write_text(text)
    if junit:
        made.junit.write_text(junit)
    return made


# --- lanes
def test_a_report_has_each_part_its_cases_and_the_slowest(reports, monkeypatch, capsys):
    (reports/"before").write_text("environment\t117\n")
    monkeypatch.setenv("QIE_NB_PARTS", str(reports/"before"))
    rows = [[part("notebooks", "Success.\nindex.ipynb: 31 secs\na.ipynb: 2 secs\n"), part("tests", junit=JUNIT, code=1)]]
    assert run_tests.report("test", rows, 40.) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["environment", "117"]
    assert lines[3].split() == ["notebooks", "3", "2"]
    assert lines[4].split() == ["tests", "3", "3", "1", "1", "exit", "code", "1"]
    assert lines[5].split() == ["all", "157"]
    assert [line.split()[1] for line in lines[8:13]] == ["index.ipynb", "tests.a::test_slow", "a.ipynb", "tests.a::test_bad", "tests.a::test_left_out"]
    assert lines[-1].startswith("make test: failed in tests in 40 s")


def test_all_parts_run_and_one_that_fails_is_seen(reports, capfd):
    failing = run_tests.Part("failing", [sys.executable, "-c", "print('first'); raise SystemExit(3)"])
    after = run_tests.Part("after", [sys.executable, "-c", "print('second')"])
    beside = run_tests.Part("beside", [sys.executable, "-c", "print('third')"])
    rows = [[failing, after], [beside]]
    run_tests.run_lane(rows)
    said = capfd.readouterr().out
    assert [failing.code, after.code, beside.code] == [3, 0, 0] and all(word in said for word in ("first", "second", "third"))
    assert run_tests.report("all", rows, 1.) == 1
    assert run_tests.report("all", [[after]], 1.) == 0


def test_lanes_contain_each_other():
    "The everyday tests are part of the lane of every change, and that one of the weekly lane."
    def marks(lane):
        command = next(p for row in run_tests.lanes()[lane] for p in row if p.name == "tests").command
        return set(command[command.index("-m", 3) + 1].split(" and "))
    assert marks("weekly") < marks("all") < marks("test") and "not weekly" in marks("all")


# --- derived files
def test_a_page_is_compared_without_digests(tmp_path):
    for name, text in (("a.md", "digest 0123456789abcdef\n"), ("b.md", "digest fedcba9876543210\n"), ("c.md", "number 7\n"), ("a.py", "x = '0123456789abcdef'"), ("b.py", "x = 'fedcba9876543210'")):
        (tmp_path/name).write_text(text)
    same = refresh.comparable
    assert same(tmp_path/"a.md") == same(tmp_path/"b.md") != same(tmp_path/"c.md") and same(tmp_path/"a.py") != same(tmp_path/"b.py")


def test_a_step_that_fails_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"tables: `python -c raise SystemExit\('no results'\)` failed\n.*no results"):
        refresh.run_step("tables", ["python", "-c", "raise SystemExit('no results')"], tmp_path)


def test_a_quoted_message_follows_its_change(monkeypatch):
    monkeypatch.setattr(quotes, "literals", lambda: ("`model` cannot be fetched from the hub; attach it", "something else entirely"))
    assert quotes.like("cannot be downloaded from the hub") == "cannot be fetched from the hub"
    assert quotes.like("a sentence about zebras") == ""
    assert quotes.in_code("fetched from the hub") and not quotes.in_code("downloaded")
    page = "| message | remedy |\n|---|---|\n| `cannot be fetched` … ` from the hub` | attach it |\n| `short` | x |\n"
    assert quotes.quoted(page) == ["cannot be fetched", "from the hub"]
