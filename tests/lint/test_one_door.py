"""The model has one door: only `Components` and `EditModel` change what is loaded, where, and how."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "qie_nb"
OWN = {"models/components.py", "devices/edit_model.py"}
DICTIONARIES = {
    "loaded",
    "quantize",
    "devices",
    "areas",
    "_loaded",
    "_loaded_as",
    "_prepare",
    "_devices",
    "_quantize",
    "_areas",
}
CHANGES = {"update", "pop", "popitem", "clear", "setdefault", "__setitem__"}
LOADERS = {"load_component", "load_quantized"} # what reads weights


def dictionary_of_another(node) -> bool:
    "Is this `x.loaded` (not `self.loaded`, which is the object's own)?"
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return isinstance(node, ast.Attribute) and node.attr in DICTIONARIES and not own


def targets(node) -> list:
    "What a statement assigns to or deletes."
    if isinstance(node, (ast.Assign, ast.Delete)):
        found = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        found = [node.target]
    else:
        found = []
    return [t for top in found for t in ast.walk(top)]


def writes(text: str) -> list: # of source text
    "Where a module changes a dictionary of another object that has a name of `Components`."
    found = []
    for node in ast.walk(ast.parse(text)):
        for t in targets(node):
            entry = isinstance(t, ast.Subscript) and dictionary_of_another(t.value)
            whole = isinstance(node, ast.AugAssign) and dictionary_of_another(t)
            if entry or whole:
                found.append(ast.unparse(node))
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in CHANGES and dictionary_of_another(called.value):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    "line",
    [
        "self.components.loaded['vae'] = x",
        "parts.devices['vae'] = 'cpu'",
        "components.devices.update(a=1)",
        "del c.loaded['vae']",
        "parts.loaded['vae'], y = 1, 2",
        "t.components.quantize |= {}",
        "parts.loaded.pop('vae')",
    ],
)
def test_a_write_is_found(line):
    assert len(writes(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "self.loaded['default'] = x",
        "dataset.areas = parts.areas",
        "x = parts.loaded['vae']",
        "parts.loaded.get('vae')",
    ],
)
def test_what_is_no_write_is_not_found(line):
    assert not writes(line)


def modules() -> dict: # {path in the package: text}
    "The library's modules."
    found = {p.relative_to(PACKAGE).as_posix(): p for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py"}
    return {where: p.read_text() for where, p in found.items()}


def test_no_other_module_changes_the_dictionaries_of_components():
    found = {where: lines for where, text in modules().items() if where not in OWN and (lines := writes(text))}
    assert not found, "call a method of `EditModel`"


def test_no_other_module_reads_weights():
    found = {
        where
        for where, text in modules().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in LOADERS
    }
    assert found == OWN, "ask `EditModel` for the component"
