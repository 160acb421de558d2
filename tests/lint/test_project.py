"""The project is consistent: one source of settings, no circles, light imports, no pickle, plain words."""
import ast, json, re, subprocess, sys
from collections import Counter
from configparser import ConfigParser
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT/"nbs").rglob("*.ipynb")) + sorted((ROOT/"kaggle").rglob("*.ipynb"))
MODULES = {".".join(p.relative_to(ROOT/"qie_nb").with_suffix("").parts).removesuffix(".__init__"): p
           for p in sorted((ROOT/"qie_nb").rglob("*.py")) if p.name != "_modidx.py" and p.parent != ROOT/"qie_nb" or p.stem[0] != "_"}
ORDER = "core config cache data lora models devices encoding sampling planning predict training evaluation widgets logging trainer tiny cli extras".split()
# what users ask for by name, in these functions alone: a core module imports no extra at its top level
ASKED_FOR = {
    "core.cache_layers": {"open_place": "remote_shards"},
    "training.run_adapters": {"workflow_facts": "comfyui_workflow", "save": "comfyui_workflow"},
    "cli": {"precompute": "ray_cluster", "caption": "instructions", "overfit": "diagnostics",
            "selfcheck": "selfcheck"},
    "widgets.sample_viewer": {"propose": "instructions"}}


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


def tree_of(name):
    "A module without `if __name__ == ...` and `if TYPE_CHECKING`, whose imports are for types alone and never run."
    tree = ast.parse(MODULES[name].read_text())
    def is_no_part(node):
        return isinstance(node, ast.If) and re.search("__name__|TYPE_CHECKING", ast.unparse(node.test))
    tree.body = [node for node in tree.body if not is_no_part(node)]
    return tree


def is_extra(module):
    "Extras are to the right of all."
    return module.startswith("extras.")


def imports_of(name, tree=None):
    "Modules of qie_nb that a module (or a part of it) imports, also inside functions."
    found, package = set(), ".".join(MODULES[name].parent.relative_to(ROOT).parts)
    for node in ast.walk(tree or tree_of(name)):
        if isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package) # nbdev writes `from ..core.files`
            found |= {module, *(f"{module}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.Import): found |= {a.name for a in node.names}
    return {m.removeprefix("qie_nb.") for m in found if m.startswith("qie_nb.")} & MODULES.keys() - {name}


def functions_with_extras(name):
    "{function: the extra that it imports} of a core module."
    found = {}
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.FunctionDef):
            extras = [m.removeprefix("extras.") for m in imports_of(name, node) if is_extra(m)]
            if extras:
                found[node.name.strip("_")] = ", ".join(sorted(extras))
    return found


CORE = [name for name in MODULES if not is_extra(name)]
GRAPH = {name: imports_of(name) for name in MODULES}
for name in CORE: # else the functions of `ASKED_FOR` would make circles
    GRAPH[name] = {m for m in GRAPH[name] if not is_extra(m)}
FACES = {m for m, p in MODULES.items() if p.name == "__init__.py" and p.stat().st_size}


def test_imports_make_no_circle():
    tuple(TopologicalSorter(GRAPH).static_order()) # raises CycleError with the circle
    assert "data.dataset" in GRAPH["data"] and "torch" not in GRAPH, "imports are seen at all"


def room(module):
    "Place in the order. Planning asks each optimizer for its memory, so their files, which import nothing of training, are left of it."
    if is_extra(module): return ORDER.index("extras")
    if module.startswith("training.optimizers"): return ORDER.index("planning") - 0.5
    return ORDER.index(module.split(".")[0])


def test_rooms_import_only_from_rooms_to_their_left():
    wrong = [f"{name} imports {other}" for name, imports in GRAPH.items() for other in imports if room(other) > room(name)]
    assert not wrong, wrong
    assert not [f"{n} imports the face {m}" for n, found in GRAPH.items() for m in found & FACES]


def test_extras_are_imported_only_where_the_user_asks_for_them():
    found = {name: functions_with_extras(name) for name in CORE}
    assert {name: functions for name, functions in found.items() if functions} == ASKED_FOR
    for name in CORE:
        outside = [n for n in tree_of(name).body if not isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        assert not [m for node in outside for m in imports_of(name, node) if is_extra(m)], f"{name} imports an extra at its top level"


def modules_in_strings(tree):
    "Modules of this library that a string constant names and nothing else, e.g. for a loader; `f\"qie_nb.{name}\"` counts too."
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and ast.unparse(node)[2:].startswith("qie_nb.{"): found.append("qie_nb.{")
        named = isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"qie_nb((\.\w+)+)(:\w+)?", node.value)
        if named: found += [m for m in MODULES if f"{named[1]}.".startswith(f".{m}.")]
    return found


def test_no_module_is_named_by_a_string():
    "It would hide an import from a room to the right. Only qie_nb/__init__.py, which is above all rooms, hands out stand-ins by names."
    assert {*modules_in_strings(ast.parse('load("qie_nb.planning.doctor:x"), "qie_nb.cli.main", f"qie_nb.{x}"'))} >= {"planning.doctor", "cli", "qie_nb.{"}
    assert not modules_in_strings(ast.parse('"qie_nb.json", "qie_nb.", "use `python -m qie_nb.cli`"'))
    found = {name: modules_in_strings(tree_of(name)) for name in MODULES}
    assert not {name: strings for name, strings in found.items() if strings}


def test_the_top_level_holds_the_public_modules_and_nothing_else():
    top = {m for m, p in MODULES.items() if "." not in m and p.name != "__init__.py"}
    assert top == {"config", "cache", "trainer", "predict", "logging", "cli"}
    assert {m.split(".")[0] for m in MODULES} == set(ORDER)


def test_each_module_names_a_notebook_that_exists_and_has_a_name_of_its_own():
    for path in MODULES.values():
        edited = re.search(r"File to edit: (\S+\.ipynb)|^\s*$", path.read_text())
        assert edited and (path.parent/(edited[1] or "")).resolve().exists(), f"{path} is stale: delete it"
    assert max(Counter(p.stem for p in MODULES.values() if p.stem not in ("__init__", "base", "known")).values()) == 1


ONE_CLASS = re.compile(r"(models\.(variants|quantizations)|training\.(optimizers|sinks)|devices\.strategies)\.") # folders with a file for each variation
MOST_MODULES = 92 # outside `extras` and these; only to be lowered


def test_there_are_few_modules():
    counted = [name for name in CORE if MODULES[name].stat().st_size and name not in FACES and not ONE_CLASS.match(name)]
    assert len(counted) <= MOST_MODULES, f"{len(counted)} modules: write it into the one where a reader looks for it, or merge others"


def test_git_holds_no_run_time_files():
    if not (ROOT/".git").exists(): pytest.skip("not a git checkout")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    made = re.compile(r"(^|/)(cache/(modulation|pixel_latent|control_latent|prompt_)|\.locks/|runs/|events\.out|demo_out/|checkpoints/)")
    assert not [f for f in files if made.search(f)]


LIGHT = [ # (statement, modules that it must not import)
    ("import qie_nb", ["torch", "numpy", "pydantic", "diffusers", "transformers"]),
    ("import qie_nb.cache", ["torch", "numpy", "diffusers", "transformers"]),
    ("import qie_nb.config", ["torch", "diffusers", "transformers"]),
    ("import qie_nb.data.dataset", ["diffusers", "transformers", "tensorboard", "ipywidgets", "matplotlib"]),
    ("import qie_nb.trainer", ["diffusers", "tensorboard", "ipywidgets", "matplotlib", "optimum"])]


def imported(statements):
    "Modules that they import although they must not; one process, in which each import adds to the earlier ones."
    code = "import sys\n" + "\n".join(f"{s}; print(*({s!r} + ' imports ' + m for m in {absent!r} if m in sys.modules), sep='\\n', end='')" for s, absent in statements)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_imports_are_light(): assert not imported(LIGHT)


def test_no_pickle():
    bad = re.compile(r"import pickle|pickle\.|torch\.(load|save)\(|np\.load\(|joblib")
    for p in [*MODULES.values(), *NOTEBOOKS]: assert not bad.search(p.read_text()), p.name


def source(path):
    "The text that a person reads: a notebook's cells, or the file."
    if path.suffix != ".ipynb": return path.read_text()
    return "\n".join("".join(c["source"]) for c in json.loads(path.read_text())["cells"])


def written():
    "Every file that we write by hand."
    folders = [(ROOT/f).rglob(g) for f, g in (("nbs", "*.ipynb"), ("kaggle", "*.ipynb"), ("docs", "*.md"), ("tests", "*.py"), ("benchmarks", "*.py"), ("tools", "*.py"))]
    return [*ROOT.glob("*.md"), ROOT/"Makefile", *(p for f in folders for p in sorted(f) if ".ipynb_checkpoints" not in p.parts)]


# the words are split, so that this file does not contain them
IDIOMS = ["nobo" "dy", "somebo" "dy", "who" "ever", "what sta" "nds", "in fron" "t of a", "is sa" "id", "of ou" "rs", "let" "s? go", "in pla" "ce of", "is none o" "f",
          "is tol" "d", "is looked a" "t", "de" "ar"]
IDIOM = re.compile(rf"\b(?:{'|'.join(IDIOMS)})\b", re.I)


def test_prose_avoids_the_idioms_of_version_1():
    found = [f"{p.relative_to(ROOT)}: {line.strip()[:120]}" for p in written() for line in source(p).splitlines() if IDIOM.search(line)]
    assert not found, "\n".join(found)
    assert IDIOM.search("Progress of a notebook that no" "body watches") and not IDIOM.search("linearly, letting go-karts, yours")


def test_each_notebook_opens_with_a_title_and_a_promise():
    for p in sorted((ROOT/"nbs").rglob("*.ipynb")):
        first = next("".join(c["source"]) for c in json.loads(p.read_text())["cells"] if c["cell_type"] == "markdown")
        assert re.match(r"# \S.*\n\n> [A-Z][\w-]*[ ,]", first), f"{p.relative_to(ROOT)} opens with {first[:80]!r}"


def test_each_test_file_has_a_name_of_its_own():
    "Without packages pytest imports them by their names alone, and refuses a second one of the same name."
    names = Counter(p.name for p in (ROOT/"tests").rglob("test_*.py"))
    assert max(names.values()) == 1, names.most_common(1)
