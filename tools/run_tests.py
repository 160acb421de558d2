"""Run a lane of tests and print what each part took: `make lint`, `make test`, `make test-all` and `make test-weekly` call this.

A lane has rows of parts. The parts of a row run one after the other, the rows side by side. All parts run, whichever fails.
Each part leaves its output, and pytest a junit file, in the folder `reports` of the environment. At the end come a table of parts
and the slowest cases. QIE_NB_PARTS names a file with lines `part<tab>seconds` of what ran before, which the table repeats."""
import os, re, shlex, subprocess, sys, threading, time, xml.etree.ElementTree as xml
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORTS = Path(sys.prefix)/"reports"
WORKERS = os.environ.get("WORKERS", "2")
SHOWN = 30 # slowest cases
# tests/test_notebooks.py runs these in a kernel: with each change, and weekly
IN_KERNELS = r"^(index|00_cache|03_logging)\.ipynb$"
CHAPTERS = r"^(index|00_cache|01_trainer|02_predict|03_logging|04_cli)\.ipynb$"


@dataclass
class Part:
    "One command of a lane."
    name: str
    command: list
    seconds: float = 0.
    code: int = 0

    @property
    def junit(self) -> Path:
        "Where pytest writes its cases."
        return REPORTS/f"{self.name.replace(' ', '_')}.xml"

    @property
    def log(self) -> Path:
        "Where its output is kept."
        return self.junit.with_suffix(".txt")


def notebooks(*options) -> Part:
    "The notebooks, as `nbdev_test` runs them."
    return Part("notebooks", ["nbdev_test", "--n_workers", WORKERS, "--timing", *options])


def pytest(name:str, *arguments, workers:str=WORKERS) -> Part:
    "Tests of pytest; a file's tests run in one process, in their order."
    parallel = ["-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"] if workers else []
    part = Part(name, [])
    part.command = [sys.executable, "-m", "pytest", *parallel, "--junitxml", str(part.junit), *arguments]
    return part


def make(target:str, *variables) -> Part:
    "A target of the Makefile, in this environment."
    return Part(target, ["make", "-s", target, f"VENV={sys.prefix}", *variables])


def lanes() -> dict: # {name: rows of parts}
    "What `make` calls by these names."
    everyday = "not slow and not browser and not mounts and not weekly"
    tests = ["--ignore=tests/lint", "--ignore=tests/test_style.py"]
    return dict(
        lint=[[Part("derived files", [sys.executable, "tools/refresh.py", "--check"]),
               Part("breakages that fit", [sys.executable, "tests/breakages/fit.py"])],
              [pytest("pages and style", "tests/lint", "tests/test_style.py", workers="")]],
        test=[[notebooks(), pytest("tests", *tests, "-m", everyday)]],
        all=[[notebooks("--skip_file_re", IN_KERNELS, "--flags", "slow"), pytest("tests", *tests, "-m", "not browser and not weekly")],
             [make("browser", "BROWSERS=w8", "LANE=browser and not weekly"), make("types")]],
        weekly=[[notebooks("--skip_file_re", CHAPTERS, "--flags", "slow weekly"), pytest("tests", *tests, "-m", "not browser"),
                 make("mutations"), make("faults"), make("kills"), make("outputs")],
                [make("browser"), make("space")]])


def run(part:Part, live:bool):
    "Runs a part; its output goes into a file, and is shown if `live`."
    print(f"--- {part.name}: {shlex.join(part.command)}", flush=True)
    began = time.time()
    part.junit.unlink(missing_ok=True)
    process = subprocess.Popen(part.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace")
    with part.log.open("w") as log:
        for line in process.stdout:
            log.write(line)
            if live:
                print(line, end="", flush=True)
    part.code, part.seconds = process.wait(), time.time() - began


def run_row(row:list, live:bool):
    "Runs the parts of a row in turn."
    for part in row:
        run(part, live)


def run_lane(rows:list):
    "Runs all parts. The first row is shown while it runs, the others when all have ended."
    REPORTS.mkdir(parents=True, exist_ok=True)
    beside = [threading.Thread(target=run_row, args=(row, False)) for row in rows[1:]]
    for thread in beside:
        thread.start()
    run_row(rows[0], True)
    for thread in beside:
        thread.join()
    for row in rows[1:]:
        for part in row:
            print(f"--- {part.name}\n{part.log.read_text()}", flush=True)


def cases(part:Part) -> list: # [(seconds, name, outcome)]
    "The tests of a part, or the notebooks."
    if not part.junit.is_file():
        timed = re.findall(r"^(\S+\.ipynb): (\d+) secs$", part.log.read_text(), re.M)
        return [(float(seconds), name, "passed") for name, seconds in timed]
    found = []
    for case in xml.parse(part.junit).getroot().iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        found.append((float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}", outcome))
    return found


def earlier() -> list: # [(part, seconds)]
    "What ran before this lane."
    file = os.environ.get("QIE_NB_PARTS")
    if not file or not Path(file).is_file():
        return []
    lines = [line.split("\t") for line in Path(file).read_text().splitlines()]
    return [(name, float(seconds)) for name, seconds in lines]


def report(lane:str, rows:list, seconds:float) -> int: # exit code
    "Prints the table of parts and the slowest cases."
    parts = [part for row in rows for part in row]
    print(f"\n{'part':<22}{'seconds':>8}{'cases':>7}{'skipped':>9}{'failed':>8}")
    before = earlier()
    for name, took in before:
        print(f"{name:<22}{took:>8.0f}")
    for part in parts:
        outcomes = [outcome for _, _, outcome in cases(part)]
        failed = sum(outcome in ("failure", "error") for outcome in outcomes)
        note = "" if not part.code else f"  exit code {part.code}"
        print(f"{part.name:<22}{part.seconds:>8.0f}{len(outcomes) or '':>7}{outcomes.count('skipped') or '':>9}{failed or '':>8}{note}")
    total = seconds + sum(took for _, took in before)
    print(f"{'all':<22}{total:>8.0f}" + ("   rows of parts ran side by side" if len(rows) > 1 else ""))
    slowest = sorted((case for part in parts for case in cases(part)), reverse=True)[:SHOWN]
    if lane != "lint" and slowest:
        print(f"\nthe {len(slowest)} slowest cases, seconds")
        for took, name, _ in slowest:
            print(f"{took:8.1f}  {name}")
    bad = [part.name for part in parts if part.code]
    print(f"\nmake {COMMANDS[lane]}: " + (f"failed in {', '.join(bad)}" if bad else "passed") + f" in {seconds:.0f} s{LEFT_OUT.get(lane, '')}")
    return int(bool(bad))


COMMANDS = dict(lint="lint", test="test", all="test-all", weekly="test-weekly")
LEFT_OUT = dict(test=". Not included: tests that take long or start processes, kernels, mounts or a browser (make test-all), and full matrices (make test-weekly)")


def main():
    "The command line: the name of a lane."
    lane = sys.argv[1]
    rows, began = lanes()[lane], time.time()
    run_lane(rows)
    sys.exit(report(lane, rows, time.time() - began))


if __name__ == "__main__":
    main()
