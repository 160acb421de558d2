"""What `auto` means is decided in planning: no other module compares a value with it.

What else may say auto is in one list, with the reason."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "qie_nb"
WORD = "auto"

ALLOWED = { # {"module: function": why it may compare with auto}
    "core/sections.py: _check_hours": "checks what the setting accepts",
    "data/dataset.py: wants_edit_mask": "`data.edit_mask` auto is a way to make masks, also without a trainer",
    "data/dataset.py: status": "the same",
    "devices/processes.py: local_device": "a worker of a cluster decides for its own machine",
    "devices/strategies/model_parallel.py: problem": "refuses two settings that contradict each other",
    "logging.py: progress_callback": "auto is the panel in a live notebook, which depends on no GPU",
    "models/components.py: find_variant": "auto is what the model's files say",
    "sampling/denoising.py: pick_schedule": "auto is what the LoRA's file says",
    "training/checkpoint.py: find_checkpoint": "`train.resume_checkpoint` auto is the newest one, if there is one",
    "training/resume.py: make_fingerprint": "notes that auto held out nothing; the plan has decided before",
    "training/run_data.py: cache_embeddings": "hands auto on to the machines of a cluster",
}
PLANNING = "planning"


def bound_names(tree) -> set:
    "Names that a module binds to the word, at any place."
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant) and node.value.value == WORD
    }


def says_auto(node, names) -> bool:
    "Is it the word, a name bound to it, or a literal that contains it?"
    if isinstance(node, ast.Constant):
        return node.value == WORD
    if isinstance(node, ast.Name):
        return node.id in names
    return isinstance(node, (ast.Tuple, ast.List, ast.Set)) and any(says_auto(part, names) for part in node.elts)


def comparisons(text: str, names=frozenset()) -> list:
    "The functions, or classes, of a module that compare a value with auto."
    tree, found = ast.parse(text), []
    names = bound_names(tree) | set(names)

    def look(node, place):
        "Note the comparisons below a node."
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else place
            if isinstance(child, ast.Compare) and any(
                says_auto(part, names) for part in (child.left, *child.comparators)
            ):
                found.append(place)
            look(child, inner)

    look(tree, "")
    return found


def outside_planning() -> set:
    "'module: function' of each comparison with auto outside planning, also with the name that planning gives the word."
    modules = {
        p.relative_to(PACKAGE).as_posix(): p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py"
    }
    return {
        f"{module}: {place}"
        for module, text in modules.items()
        if module.split("/")[0] != PLANNING
        for place in comparisons(text, {"AUTO"})
    }


def test_comparisons_are_found():
    assert comparisons("def f(x): return x == 'auto'") == ["f"]
    assert comparisons("class A:\n    def g(self, x): return x not in ('auto', None)") == ["g"]
    assert comparisons("WORD = 'auto'\ndef f(x): return x is not WORD") == ["f"]
    assert comparisons("def f(x): return x == AUTO", {"AUTO"}) == ["f"]
    assert not comparisons("def f(x='auto'): return dict(x=x)")


def test_auto_is_decided_in_planning_alone():
    found = outside_planning()
    new = sorted(found - ALLOWED.keys())
    assert not new, f"{new}: take the value from the plan"
    gone = sorted(ALLOWED.keys() - found)
    assert not gone, f"{gone}: remove it from the list of this test"
