"""One home for one idea: a quantization, an optimizer, a variant or a way to fit a model is named in its own file and in the settings."""
import ast
import re
from functools import cache
from pathlib import Path

import pytest

from qie_nb.devices.strategies.ways import STRATEGIES
from qie_nb.models.components import VARIANTS
from qie_nb.models.quantizations.known import QUANTIZATIONS
from qie_nb.training.optimizers.known import OPTIMIZERS

PACKAGE = Path(__file__).parents[2]/"qie_nb"
SETTINGS = {"core/sections.py", "core/presets.py"}
OLDER = {"adamw": "core/settings.py", "adamw8bit": "core/settings.py"} # names of classes in older files
NAMES = {name: type(one).__module__ for table in (QUANTIZATIONS, OPTIMIZERS, VARIANTS, STRATEGIES) for name, one in table.items()}
FORMATS = {"float8", "int8"} # also the names of number formats


@cache # 18 names are looked for in each module
def strings(text:str) -> list:
    "The string constants of a module, without its docstrings."
    tree = ast.parse(text)
    documented = [n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    docstrings = {id(n.body[0].value) for n in documented if n.body and isinstance(n.body[0], ast.Expr)}
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docstrings]


def names_it(text:str, name:str) -> bool:
    "Does a string of a module hold a name as a word of its own?"
    if name in FORMATS: return name in strings(text)
    return any(re.search(rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])", s) for s in strings(text))


def test_names_in_strings_are_found():
    assert names_it('x = f"use {y} or nf4"', "nf4") and names_it('x = ["int8"]', "int8")
    assert not names_it('"""nf4"""\nx = "nf4_model"', "nf4") and not names_it('x = "8 bits without float8"', "float8")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_written_in_its_own_file_and_in_the_settings(name):
    own = "/".join(NAMES[name].split(".")[1:]) + ".py"
    allowed = SETTINGS | {own, OLDER.get(name)}
    texts = {p.relative_to(PACKAGE).as_posix(): p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py"}
    found = {where for where, text in texts.items() if where not in allowed and names_it(text, name)}
    assert names_it(texts[own], name) and not found, f"{name}: ask the class instead of naming it"


# --- what is handed on
def parameters(text:str) -> set:
    "Names of all parameters of a module's functions."
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    return {a.arg for f in functions for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)}


def test_at_most_six_modules_take_the_data_set_between_precompute_and_the_encoders():
    rooms = ("training", "encoding", "models", "extras/ray_cluster")
    texts = {p.relative_to(PACKAGE).as_posix(): p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py"}
    takes = [where for where, text in texts.items() if where.startswith(rooms) and "dataset" in parameters(text)]
    assert parameters("def f(a, *, b): return lambda c: a") == {"a", "b", "c"}
    assert "encoding/jobs.py" in takes and len(takes) <= 6, takes


# --- the configuration
TAKES_THE_CONFIGURATION = { # outside planning; any other module takes the section, or the settings, that it is about
    "config.py": "makes and writes it",
    "core/environment.py": "finds the caches and checkpoints that fit one",
    "data/dataset.py": "a public name: a data set of a configuration",
    "devices/edit_model.py": "the model that a configuration names",
    "evaluation/eval_images.py": "how a run's images are sampled: the schedule, and whether its LoRA fits the model",
    "evaluation/evaluate.py": "what a run evaluates",
    "lora/model_card.py": "the settings that a card shows",
    "tiny/photos.py": "the demo's own run",
    "trainer.py": "the run",
    "training/callbacks.py": "a planner for a part without a trainer",
    "training/resume.py": "compares it with a checkpoint's",
    "training/run_adapters.py": "a part of the run",
    "training/run_data.py": "a part of the run",
    "training/run_table.py": "a part of the run",
}


def takes_the_configuration(text:str) -> bool:
    "Has a function a parameter `config` that may be the whole configuration, not a mapping or a section?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                kind = ast.unparse(arg.annotation) if arg.annotation else "Config"
                if arg.arg == "config" and ("Config" in kind or kind == "object"):
                    return True
    return False


def test_the_configuration_is_handed_to_planning_and_to_what_is_about_it():
    texts = {p.relative_to(PACKAGE).as_posix(): p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py"}
    found = {where for where, text in texts.items() if takes_the_configuration(text) and not where.startswith(("planning/", "extras/"))}
    assert found == TAKES_THE_CONFIGURATION.keys(), found ^ TAKES_THE_CONFIGURATION.keys()
    assert takes_the_configuration("def f(config): pass") and takes_the_configuration("def f(x, config:Config|dict=None): pass")
    assert not takes_the_configuration("def f(config:dict): pass") and not takes_the_configuration("def f(config:LoggingSection): pass")
