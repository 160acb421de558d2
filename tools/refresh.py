"""Write every file of the repository that is made from others, then show what changed: `make refresh`.

`--check` does it in a copy and names the files that are out of step; it changes nothing. `make lint` runs it.
`--no-outputs` leaves the outputs of notebooks as they are; without that option, notebooks are run if their code changed."""
import argparse, os, re, shutil, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent

# what the library is exported from comes first, because the pages are made by the library
EXPORT = [
    ("library", ["nbdev_export"]),
    ("notebooks", ["nbdev_clean"]),
    ("place notebooks", ["nbdev_clean", "--fname", "kaggle"])]
# in two rows that run side by side; no two of them write to the same page
PAGES = [
    [("options", ["python", "tools/options_page.py"]),
     ("refusals", ["python", "tests/end_to_end/test_bad_input.py"])],
    [("tables of the planner", ["python", "benchmarks/session_table.py", "--write"]),
     ("tables of results", ["python", "benchmarks/table.py", "--write"]),
     ("table of peers", ["python", "benchmarks/peers/compare.py", "--write"]),
     ("quoted messages", ["python", "tools/quotes.py"]),
     ("style ceilings", ["python", "tests/test_style.py", "--lower"])]]
DERIVED = ["qie_nb/**/*.py", "nbs/**/*.ipynb", "kaggle/**/*.ipynb", "docs/**/*.md", "README.md",
           "tests/style_ceilings.json"]
NOT_COPIED = (".git", ".venv*", ".peers", "__pycache__", "*.egg-info", "demo_out", "rehearsal",
              "build", "dist", "site")


def run_step(name:str, command:list, root:Path) -> str:
    "Runs one step in a checkout. Returns how long it took; raises SystemExit with its output if it fails."
    began = time.time()
    env = os.environ | dict(PYTHONPATH=str(root))
    done = subprocess.run([BIN/command[0], *command[1:]], cwd=root, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: `{' '.join(command)}` failed\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return f"{name}: {time.time() - began:.0f} s"


def write_derived(root:Path):
    "Runs all steps but the outputs of notebooks."
    for step in EXPORT:
        print(run_step(*step, root), flush=True)

    def write_row(row):
        for step in row:
            print(run_step(*step, root), flush=True)
    with ThreadPoolExecutor(len(PAGES)) as pool:
        for _ in pool.map(write_row, PAGES):
            pass


def derived_files(root:Path) -> dict: # {relative path: Path}
    "The files that the steps may write."
    found = [p for pattern in DERIVED for p in root.glob(pattern) if ".ipynb_checkpoints" not in p.parts]
    return {str(p.relative_to(root)): p for p in found if p.name != "_modidx.py"}


def comparable(path:Path) -> str:
    """The text of a file, without what depends on the versions of libraries where it is made.

    A page of messages shows digests of files and the names of the trackers that accelerate knows."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        return text
    return re.sub(r"(trackers: aim).*", r"\1", re.sub(r"[0-9a-f]{12,}", "#", text))


def out_of_step() -> list: # relative paths
    "The derived files that differ from what the steps write, found in a copy."
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(ROOT, Path(folder)/"copy", ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
        write_derived(copy)
        here, there = derived_files(ROOT), derived_files(copy)
        return sorted(name for name in here.keys() | there.keys()
                      if name not in here or name not in there
                      or comparable(here[name]) != comparable(there[name]))


def check() -> int: # exit code
    "Says which derived files are out of step."
    stale = out_of_step()
    if stale:
        print(f"out of step: {', '.join(stale)}; run `make refresh` and commit what it changes")
    return int(bool(stale))


def refresh(outputs:bool):
    "Writes all derived files here and shows what git sees."
    write_derived(ROOT)
    if outputs:
        import outputs as notebooks
        for name in notebooks.stale():
            print(run_step(f"outputs of {name}", ["python", "tools/outputs.py", name], ROOT), flush=True)
    print(subprocess.run(["git", "status", "--short"], cwd=ROOT, capture_output=True, text=True).stdout, end="")


def main():
    "The command line."
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--check", action="store_true")
    p.add_argument("--no-outputs", action="store_true")
    a = p.parse_args()
    if a.check:
        sys.exit(check())
    refresh(not a.no_outputs)


if __name__ == "__main__":
    main()
