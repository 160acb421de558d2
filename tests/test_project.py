"""The project is consistent: one source of settings, notebooks exported and clean, no circles, light imports, no pickle."""
import ast, json, re, shutil, subprocess, sys
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {p.stem: p for p in (ROOT/"qie_nb").glob("*.py") if not p.stem.startswith("_")}
NOTEBOOKS = sorted((ROOT/"nbs").glob("*.ipynb")) + sorted((ROOT/"kaggle").rglob("*.ipynb"))


def settings():
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT/"settings.ini")
    return parser["DEFAULT"]


def test_pyproject_says_what_settings_say():
    tomllib = pytest.importorskip("tomllib")
    project, cfg = tomllib.loads((ROOT/"pyproject.toml").read_text()), settings()
    table = project["tool"]["nbdev"]
    assert project["project"]["name"] == cfg["lib_name"]
    assert project["project"]["urls"]["Repository"] == cfg["git_url"]
    for key in ("lib_path", "nbs_path", "doc_path", "branch", "tst_flags"): assert table[key] == cfg[key], key
    for key in ("recursive", "black_formatting"): assert table[key] == (cfg[key] == "True"), key


def test_version_is_the_same_everywhere():
    assert f'__version__ = "{settings()["version"]}"' in (ROOT/"qie_nb"/"__init__.py").read_text()
    assert settings()["version"] in (ROOT/"CHANGELOG.md").read_text()


def test_clean_and_export_leave_the_tree_unchanged(tmp_path):
    copy = tmp_path/"repo"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "demo_out", "*.egg-info", "__pycache__"))
    bin = Path(sys.executable).parent
    for cmd in (["nbdev_clean"], ["nbdev_clean", "--fname", "kaggle"], ["nbdev_export"]): subprocess.run([bin/cmd[0], *cmd[1:]], cwd=copy, check=True, capture_output=True)
    for p in [*NOTEBOOKS, *(ROOT/"qie_nb").glob("*.py")]: assert (copy/p.relative_to(ROOT)).read_bytes() == p.read_bytes(), f"{p.name} is not clean or not exported"


def imports_of(path):
    "Modules of ours that a module imports, anywhere in it but under `if __name__ == ...`, which no import runs."
    found, tree = set(), ast.parse(path.read_text())
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and "__name__" in ast.unparse(n.test))]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            name = ".".join(filter(None, ["qie_nb" if node.level else "", node.module])) # nbdev writes `from .flow`
            if name == "qie_nb": found |= {a.name for a in node.names}
            elif name.startswith("qie_nb."): found.add(name.split(".")[1])
        elif isinstance(node, ast.Import): found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("qie_nb.")}
    return found & MODULES.keys()


def test_imports_make_no_circle():
    graph, done = {name: imports_of(path) for name, path in MODULES.items()}, set()

    def walk(name, path):
        assert name not in path, " -> ".join([*path[path.index(name):], name])
        if name in done: return
        for other in sorted(graph[name]): walk(other, [*path, name])
        done.add(name)
    for name in graph: walk(name, [])
    assert {"prepare", "predict"} <= graph["trainer"] and "data" in graph["prepare"] and "torch" not in graph, "imports are seen at all"


@pytest.mark.parametrize("statement, absent", [
    ("import qie_nb", ["torch", "numpy", "pydantic", "diffusers", "transformers"]),
    ("from qie_nb.cache import EmbeddingCacheManager", ["torch", "numpy", "diffusers", "transformers"]),
    ("from qie_nb.config import load_config_from_yaml", ["torch", "diffusers", "transformers"]),
    ("from qie_nb.data.dataset import ImageDataset, loader", ["diffusers", "transformers", "tensorboard", "ipywidgets", "matplotlib"]),
    ("from qie_nb.trainer import QwenImageEditTrainer", ["diffusers", "tensorboard", "ipywidgets", "matplotlib", "optimum"])])
def test_imports_are_light(statement, absent):
    code = f"{statement}; import sys; print(' '.join(m for m in {absent!r} if m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip() == ""


def test_no_pickle():
    bad = re.compile(r"import pickle|pickle\.|torch\.(load|save)\(|np\.load\(|joblib")
    for p in [*MODULES.values(), *NOTEBOOKS]: assert not bad.search(p.read_text()), p.name


def test_kaggle_notebooks_only_call():
    for p in (ROOT/"kaggle").rglob("*.ipynb"):
        code = ["".join(c["source"]) for c in json.loads(p.read_text())["cells"] if c["cell_type"] == "code"]
        assert not any(re.search(r"^\s*(def|class) ", c, re.M) for c in code), p.name
        assert len(code) <= 5, f"{p.name} has {len(code)} cells to run; five or fewer lead from pictures to a LoRA"
        if p.parent.name == "kaggle": continue # Colab has no metadata
        meta = json.loads((p.parent/"kernel-metadata.json").read_text())
        assert meta["code_file"] == p.name


def test_config_table_of_readme_names_exist():
    from qie_nb.config import describe
    known = {".".join(name.split(".")[:n]) for name, *_ in describe() for n in range(1, 5)}
    named = set(re.findall(r"`((?:model|data|train|cache|predict|optimizer|lr_scheduler|logging)\.[a-z_.]+)`", (ROOT/"README.md").read_text()))
    assert named <= known, named - known
