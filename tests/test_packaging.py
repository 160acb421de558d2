"""What is installed: each import is a declared requirement, the archives hold what they should, and the wheel works by itself."""
import ast, os, runpy, shutil, subprocess, sys, tarfile, zipfile
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement

from qie_nb.planning.doctor import TRIED
from qie_nb.tiny import photos as photos_module
from qie_nb.tiny.photos import PHOTOS, photo_folder, photos

ROOT = Path(__file__).parent.parent
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "zmq": "pyzmq", "optimum": "optimum-quanto"} # import name: another name on PyPI
GUARDED = { # imported inside a function that works without them, or says what to install
    "google": "Colab's secrets",
    "kaggle_secrets": "Kaggle's secrets",
    "jupyter_core": "folders of a Jupyter server; without it there is none",
    "kagglehub": "an upload to Kaggle; `upload_copy` says what to install",
    "torchao": "two kinds of quantization; the configuration says what to install"}
NOT_IMPORTED = {"torchvision": "transformers' image processor needs it"}


@pytest.fixture(scope="module")
def setup_arguments():
    "What setup.py passes to setuptools."
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT/"setup.py"))
    return setup.call_args.kwargs


def normal(name): return name.lower().replace("_", "-")


def names_of(requirements): return {normal(Requirement(text).name) for text in requirements}


def imported_by(node):
    "The modules that one statement or one `__import__` call imports."
    if isinstance(node, ast.Import): return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0: return [node.module]
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "__import__"
    return [ast.literal_eval(node.args[0])] if called else []


def imports_of(source):
    "{top-level package: is it imported outside functions?}, without the standard library."
    found, tree = {}, ast.parse(source)
    for node in ast.walk(tree):
        for module in imported_by(node):
            package = module.split(".")[0]
            found[package] = found.get(package, False) or node in tree.body
    return {name: top for name, top in found.items() if name not in sys.stdlib_module_names and name != "qie_nb"}


IMPORTS = [(path, imports_of(path.read_text())) for path in sorted((ROOT/"qie_nb").rglob("*.py"))]
IMPORTED = {name for _, found in IMPORTS for name in found}


def test_each_import_is_declared(setup_arguments):
    extras = [text for name, texts in setup_arguments["extras_require"].items() if name != "dev" for text in texts]
    declared = names_of(setup_arguments["install_requires"] + extras)
    missing = {name for name in IMPORTED - GUARDED.keys() if normal(DISTRIBUTIONS.get(name, name)) not in declared}
    assert not missing, f"{missing} is imported and neither a requirement nor an extra of settings.ini"


def test_each_requirement_is_imported(setup_arguments):
    used = {normal(DISTRIBUTIONS.get(name, name)) for name in IMPORTED}
    assert not names_of(setup_arguments["install_requires"]) - used - NOT_IMPORTED.keys(), "remove it from settings.ini"
    assert GUARDED.keys() <= IMPORTED, "remove it from GUARDED"


def test_optional_packages_are_imported_inside_functions(setup_arguments):
    extras = names_of([text for name, texts in setup_arguments["extras_require"].items() if name != "dev" for text in texts])
    for path, found in IMPORTS:
        outside = {name for name, top in found.items() if top and (name in GUARDED or normal(name) in extras)}
        assert not outside, f"{path.relative_to(ROOT)} imports {outside} outside a function"


def test_imports_are_found():
    source = "import os, a.b\ndef f():\n    from c.d import e\n    from . import g\n    return __import__('h')"
    assert imports_of(source) == {"a": True, "c": False, "h": False}


def test_lower_bounds_are_the_oldest_tested_versions(setup_arguments):
    bounds = {normal(r.name): str(r.specifier) for r in map(Requirement, setup_arguments["install_requires"])}
    assert {name for name, bound in bounds.items() if bound} == TRIED.keys() - {"torch"}
    assert bounds["torch"] == "" and bounds["transformers"] == ">=" + TRIED["transformers"][0]


def test_extras_are_optional_and_a_part_of_dev(setup_arguments):
    extras = setup_arguments["extras_require"]
    assert extras.keys() == {"dev", "nf4", "prodigy", "heif", "ray"}
    assert all(set(texts) <= set(extras["dev"]) for texts in extras.values())
    assert "scikit-image" in names_of(extras["dev"]) - names_of(setup_arguments["install_requires"])


# ---- the photographs ----

def test_the_photographs_come_with_the_package(monkeypatch):
    "Training and held-out ones need no other package; the others say which one they need."
    monkeypatch.setattr(photos_module.importlib.util, "find_spec", find_spec_without("skimage"))
    photos.cache_clear()
    found = photos("train") + photos("held_out")
    assert len(found) == 7 and all(max(photo.size) <= 512 and photo.mode == "RGB" for photo in found)
    with pytest.raises(ImportError, match="split `more` need `scikit-image`; pip install scikit-image"): photos("more")


def find_spec_without(absent, real=photos_module.importlib.util.find_spec):
    "`find_spec` where one package is not installed."
    def find(name): return None if name == absent else real(name)
    return find


def test_each_photograph_has_its_source_and_a_licence():
    sources = (photo_folder()/"SOURCES.txt").read_text()
    files = {f.name for f in photo_folder().iterdir()} - {"SOURCES.txt"}
    assert files == {*PHOTOS["train"], *PHOTOS["held_out"]} and all(name in sources for name in files)
    assert sum(f.stat().st_size for f in photo_folder().iterdir()) < 600_000


def test_each_asset_is_packed(setup_arguments):
    "The archives themselves are built weekly."
    patterns = setup_arguments["package_data"]["qie_nb"]
    packed = {path for pattern in patterns for path in (ROOT/"qie_nb").glob(pattern) if path.is_file()}
    assets = {path for path in (ROOT/"qie_nb"/"assets").rglob("*") if path.is_file()}
    templates = {ROOT/"qie_nb"/"extras"/f"comfyui_{name}.json" for name in ("edit", "text_to_image")}
    marker = ROOT/"qie_nb"/"py.typed" # type checkers read the annotations of an installed package
    assert assets and packed == assets | templates | {marker}
    assert {photo_folder(split)/name for split in ("train", "held_out") for name in PHOTOS[split]} <= assets
    others = [path for path in (ROOT/"qie_nb").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert {*others} == packed, "each file of the package that is no module is packed"
    included = (ROOT/"MANIFEST.in").read_text()
    assert "recursive-include qie_nb/assets *" in included and "recursive-include qie_nb/extras *.json" in included
    assert "include qie_nb/py.typed" in included


# ---- the archives (weekly) ----

@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    "{kind: path} of the source distribution and the wheel that is built from it, of the files that git lists."
    folder = tmp_path_factory.mktemp("archives")
    listed = run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT).splitlines()
    files = [name for name in listed if (ROOT/name).is_file()] # others are deleted and not committed yet
    for name in files:
        (folder/"copy"/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT/name, folder/"copy"/name)
    tools = new_environment(folder/"tools", "build")
    run([tools, "-m", "build", "-q", "--outdir", folder/"dist", folder/"copy"])
    source, wheel = (next((folder/"dist").glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
    return {"sdist": source, "wheel": wheel, "files": files}


def run(command, **options):
    "Runs it without this checkout in the environment; its output."
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, **options)
    assert ran.returncode == 0, f"{command}: {ran.stdout[-2000:]}{ran.stderr[-4000:]}"
    return ran.stdout


def new_environment(folder, *packages):
    "The Python of a virtual environment with these packages and nothing else."
    run([sys.executable, "-m", "venv", folder])
    run([folder/"bin"/"python", "-m", "pip", "install", "-q", "--no-cache-dir", *packages])
    return folder/"bin"/"python"


@pytest.mark.weekly
def test_the_source_distribution_has_the_notebooks_and_no_tests(archives):
    with tarfile.open(archives["sdist"]) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    notebooks = {name for name in archives["files"] if name.startswith("nbs/") and name.endswith(".ipynb")}
    assert notebooks and {name for name in found if name.endswith(".ipynb")} == notebooks
    assert not [name for name in found if name.startswith(("tests", "benchmarks", "tools", "docs"))]
    assert {"settings.ini", "setup.py", "LICENSE", "README.md", "CHANGELOG.md"} <= found


@pytest.mark.weekly
def test_the_wheel_has_the_modules_and_the_assets(archives):
    with zipfile.ZipFile(archives["wheel"]) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == {name for name in archives["files"] if name.startswith("qie_nb/") and name != "qie_nb/_modidx.py"}


@pytest.mark.weekly
def test_the_wheel_runs_the_demo_in_an_environment_of_its_own(archives, tmp_path):
    "About 6 GB, and some minutes on two cores."
    try:
        python = new_environment(tmp_path/"environment", str(archives["wheel"]))
        listed = run([python, "-m", "pip", "list", "--format=freeze"])
        installed = {normal(line.partition("==")[0]) for line in listed.splitlines()}
        assert "qie-nb" in installed and not installed & {"nbdev", "pytest", "scikit-image"}
        printed = run([python.parent/"qie-nb", "demo", "--out", "demo"], cwd=tmp_path)
    finally: shutil.rmtree(tmp_path/"environment", ignore_errors=True)
    assert "error against the true edit" in printed and (tmp_path/"demo"/"before_after.png").is_file()
