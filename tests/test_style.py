"""Counts how often the library uses what is hard to read. The counts may only fall.

The ceilings are in style_ceilings.json. `python tests/test_style.py` prints each count and its
ceiling, and `--lower` writes the ceilings that have become lower.
"""
import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Iterator, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
CEILINGS = Path(__file__).with_name("style_ceilings.json")
LOWER = "python tests/test_style.py --lower"
LONGEST_MODULE = 500  # lines of code
SHORT = 20            # columns: the longest value in an assignment like `a, b = x, y`

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
JUMP = (ast.Return, ast.Raise, ast.Continue, ast.Break)
SEQUENCE = (ast.List, ast.Tuple, ast.JoinedStr, ast.ListComp)
ASKS = {"bool", "any", "all", "isinstance", "issubclass", "hasattr", "callable"}
COUNTS = {}  # {name: function of a source that yields the line of each occurrence}


class Source(NamedTuple):
    """One file: a module, or a notebook with its cells."""
    name: str          # its path below the repository
    tree: ast.Module   # of a module
    parts: list        # every part of that tree
    lines: list        # its lines as bytes, because columns of the syntax tree count bytes
    cells: list        # the sources of a notebook's code cells


def counted(name):
    """Register a function that yields the line of each occurrence of what is counted."""
    def register(function):
        COUNTS[name] = function
        return function
    return register


def nodes(source, *kinds) -> Iterator[ast.AST]:
    """All parts of the syntax tree that are of one of the kinds."""
    return (node for node in source.parts if isinstance(node, kinds))


def contains(node, *kinds) -> bool:
    """Is there a part of one of the kinds inside of the node?"""
    return any(isinstance(part, kinds) for part in ast.walk(node) if part is not node)


def blocks(source) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """Each list of statements, with the part of the syntax tree that it belongs to."""
    for node in source.parts:
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and statements:
                yield node, statements


def functions(source) -> Iterator[ast.FunctionDef]:
    """Functions and methods.

    Those inside other functions are left out: they are read with what surrounds them. Setters and
    overloads are left out, because the first of their definitions has the docstring.
    """
    def below(parent):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, FUNCTION):
                if not any(is_further_definition(d) for d in node.decorator_list):
                    yield node
            else:
                yield from below(node)
    return below(source.tree)


def is_further_definition(decorator) -> bool:
    """Does it mark one more definition of a name, as `@size.setter` and `@overload` do?"""
    return name_of(decorator) in ("setter", "deleter", "overload")


def name_of(node) -> str:
    """The last part of a dotted name, or ""."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


@counted("lambdas outside arguments")
def _(source):
    arguments = set()
    for call in nodes(source, ast.Call):
        arguments.update(call.args)
        arguments.update(keyword.value for keyword in call.keywords)
    for node in nodes(source, ast.Lambda):
        if node not in arguments:
            yield node.lineno


@counted("walruses")
def _(source):
    for node in nodes(source, ast.NamedExpr):
        yield node.lineno


@counted("comprehensions that contain another")
def _(source):
    for node in nodes(source, *COMPREHENSION):
        if contains(node, *COMPREHENSION):
            yield node.lineno


@counted("values multiplied by a condition")
def _(source):
    for node in nodes(source, ast.BinOp, ast.AugAssign):
        if not isinstance(node.op, ast.Mult):
            continue
        if isinstance(node, ast.BinOp):
            one, other = node.left, node.right
        else:
            one, other = node.target, node.value
        if is_condition(one, times=other) or is_condition(other, times=one):
            yield node.lineno


def is_condition(node, times) -> bool:
    """Is it true or false? `mask * (x > 0)` may be arithmetic with tensors, `[i] * (x > 0)` not."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        return name_of(node.func) in ASKS and isinstance(node.func, ast.Name)
    if isinstance(node, ast.Compare):
        if any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops):
            return True
    elif not isinstance(node, ast.BoolOp):
        return False
    is_text = isinstance(times, ast.Constant) and isinstance(times.value, (str, bytes))
    return is_text or isinstance(times, SEQUENCE)


@counted("comprehensions unpacked into names")
def _(source):
    for node in nodes(source, ast.Assign):
        to_names = any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets)
        if to_names and isinstance(node.value, COMPREHENSION):
            yield node.lineno


@counted("statements joined by a comma")
def _(source):
    for node in nodes(source, ast.Expr):
        if isinstance(node.value, ast.Tuple):
            yield node.lineno


@counted("statements joined by a semicolon")
def _(source):
    for _, statements in blocks(source):
        for before, after in zip(statements, statements[1:]):
            if before.end_lineno == after.lineno:
                yield after.lineno


@counted("conditional expressions that contain another")
def _(source):
    for node in nodes(source, ast.IfExp):
        if contains(node, ast.IfExp):
            yield node.lineno


@counted("tuple assignments of more than two short values")
def _(source):
    for node in nodes(source, ast.Assign):
        if not isinstance(node.value, ast.Tuple) or not isinstance(node.targets[0], ast.Tuple):
            continue
        if len(node.value.elts) > 2 or not all(is_short(value) for value in node.value.elts):
            yield node.lineno


def is_short(value) -> bool:
    """At most 20 columns, on one line."""
    return value.lineno == value.end_lineno and value.end_col_offset - value.col_offset <= SHORT


@counted("setattr on a class")
def _(source):
    for node in nodes(source, ast.Call):
        if name_of(node.func) == "setattr" and node.args and is_class(node.args[0]):
            yield node.lineno


def is_class(node) -> bool:
    """Does it look like a class: `Trainer`, `cls`, `type(self)`, `self.__class__`?"""
    if isinstance(node, ast.Call):
        return name_of(node.func) == "type"
    name = name_of(node)
    return name[:1].isupper() or name in ("cls", "__class__")


@counted("expressions used as statements for their effect")
def _(source):
    for node in nodes(source, ast.Expr):
        if isinstance(node.value, (ast.BoolOp, ast.IfExp, *COMPREHENSION)):
            yield node.lineno


@counted("one-line compound statements")
def _(source):
    for node, statements in blocks(source):
        first = statements[0]
        before = source.lines[first.lineno - 1][:first.col_offset]
        if before.strip() and not may_be_on_one_line(node, statements):
            yield first.lineno


def may_be_on_one_line(node, statements) -> bool:
    """An `if` before a jump, and a small function: `def folder_of(name): return root/name`."""
    if isinstance(node, ast.If):
        return statements is node.body and isinstance(statements[0], JUMP)
    if isinstance(node, FUNCTION):
        return isinstance(statements[0], (ast.Return, ast.Raise)) or is_ellipsis(statements[0])
    return False


def is_ellipsis(statement) -> bool:
    """The `...` of a method that subclasses define."""
    return isinstance(statement, ast.Expr) and ast.unparse(statement) == "..."


@counted("functions without docstring")
def _(source):
    for node in functions(source):
        if not node.name.startswith("_") and not ast.get_docstring(node):
            yield node.lineno


@counted("functions without types")
def _(source):
    for node in functions(source):
        a = node.args
        all_of_them = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        parameters = [p for p in all_of_them if p and p.arg not in ("self", "cls")]
        if not node.name.startswith("_") and not all(p.annotation for p in parameters):
            yield node.lineno


@counted("functions with underscore and without docstring")
def _(source):
    for node in functions(source):
        hidden = node.name.startswith("_") and not node.name.startswith("__")
        if hidden and not ast.get_docstring(node):
            yield node.lineno


@counted("modules of more than 500 lines of code")
def _(source):
    lines = lines_of_code(source)
    if lines > LONGEST_MODULE:
        yield lines


def lines_of_code(source) -> int:
    """Lines that hold code: no docstring, no comment, no blank line, and no generated `__all__`."""
    others = set()
    for node in nodes(source, ast.Module, ast.ClassDef, *FUNCTION):
        if ast.get_docstring(node):
            others.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for node in nodes(source, ast.Assign):
        if name_of(node.targets[0]) == "__all__":
            others.update(range(node.lineno, node.end_lineno + 1))
    numbered = enumerate(source.lines, 1)
    code = [line for number, line in numbered if number not in others]
    return sum(bool(line.strip()) and not line.strip().startswith(b"#") for line in code)


@counted("exporti cells")
def _(source):
    for number, cell in enumerate(source.cells):
        if re.search(r"^\s*#\s*\|\s*exporti\b", cell, re.M):
            yield number


def module(name, text) -> Source:
    """A module of the library."""
    tree = ast.parse(text)
    return Source(name, tree, list(ast.walk(tree)), text.encode().splitlines(), [])


def notebook(name, cells) -> Source:
    """A notebook, from the sources of its code cells."""
    return Source(name, ast.parse(""), [], [], cells)


def code_cells(path) -> list[str]:
    """The sources of a notebook's code cells."""
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@cache
def occurrences() -> dict[str, list[tuple[str, int]]]:
    """{count: [(file, line or number of the code cell)]} of the whole library."""
    modules = [p for p in sorted((ROOT/"qie_nb").rglob("*.py")) if p.name != "_modidx.py"]
    sources = [module(str(p.relative_to(ROOT)), p.read_text()) for p in modules]
    notebooks = sorted((ROOT/"nbs").rglob("*.ipynb"))
    notebooks = [p for p in notebooks if ".ipynb_checkpoints" not in p.parts]
    sources += [notebook(str(p.relative_to(ROOT)), code_cells(p)) for p in notebooks]
    found = {}
    for name, find in COUNTS.items():
        found[name] = [(source.name, line) for source in sources for line in find(source)]
    return found


def changed_files() -> set[str]:
    """Files that differ from the last commit, or if none does, those that it changed."""
    for since in ("HEAD", "HEAD~1"):
        command = ["git", "diff", "--name-only", since, "--", "qie_nb", "nbs"]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
        if found:
            return set(found)
    return set()


def places(name, most=10) -> str:
    """Some occurrences as `file:line`, first those in files that were changed last."""
    changed = changed_files()
    found = sorted(occurrences()[name], key=lambda place: (place[0] not in changed, place))
    rest = [f"and {len(found) - most} more"] if len(found) > most else []
    return "\n".join([f"{file}:{line}" for file, line in found[:most]] + rest)


def ceilings() -> dict[str, int]:
    """The counts that may not be exceeded."""
    return json.loads(CEILINGS.read_text()) if CEILINGS.is_file() else {}


def lower() -> None:
    """Write the ceilings that became lower, and those of new counts."""
    old = ceilings()
    now = {name: len(found) for name, found in occurrences().items()}
    new = {name: min(count, old.get(name, count)) for name, count in now.items()}
    for name in new:
        if new[name] != old.get(name):
            print(f"{name}: {old.get(name, 'new')} -> {new[name]}")
    CEILINGS.write_text(json.dumps(new, indent=1) + "\n")


def problem(name, count, ceiling) -> str:
    """What is wrong with a count, or ""."""
    if ceiling is None:
        return f"{name} has no ceiling; run `{LOWER}`"
    if count > ceiling:
        return f"{name}: {count}, at most {ceiling}; write the new ones to be read:\n{places(name)}"
    if count < ceiling:
        return f"{name}: {count}, fewer than the {ceiling} that are allowed; run `{LOWER}`"
    return ""


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_may_only_fall(name):
    """More is a fault; fewer is welcome, and the ceiling must follow."""
    wrong = problem(name, len(occurrences()[name]), ceilings().get(name))
    assert not wrong, wrong


SNIPPETS = {  # name: (each counted once, none of them counted)
    "lambdas outside arguments": (
        ["f = lambda x: x", "f(dict(a=[lambda: 1]))", "def f(key=lambda x: x): pass",
         "[lambda: 1]"],
        ["sorted(a, key=lambda x: x)", "map(lambda x: x, a)", "f(a, *b, lambda: 1)"]),
    "walruses": (
        ["if (n := len(a)) > 1: pass", "[y for x in a if (y := f(x))]"],
        ["n = len(a)", "f(n=1)"]),
    "comprehensions that contain another": (
        ["[x for x in [y for y in z]]", "[[y for y in x] for x in z]",
         "{k: sum(w for w in v) for k, v in d}", "[x for x in z if any(y == x for y in w)]"],
        ["[x for y in z for x in y]", "[x for x in z] + [y for y in w]",
         "[f(x) for x in list(z)]"]),
    "values multiplied by a condition": (
        ["a = [i] * bool(x)", "a = 's' * (n > 1)", "a = f'{n}' * (a and b)",
         "a = (n != 1) * 's'", "a = b * (not c)", "a = n * (x in y)", "a = b * (c is None)",
         "a *= any(b)", "a = n * isinstance(b, c)"],
        ["a = [0] * n", "a = loss * (mask > 0)", "a = '-' * len(b)", "a = b * max(c, 1)",
         "a = x * (y or 1)", "a = t * t.all()", "a = b * -c"]),
    "comprehensions unpacked into names": (
        ["a, b = (f(x) for x in c)", "a, b = [f(x) for x in c]", "[a, b] = (f(x) for x in c)"],
        ["a, b = c", "a = [x for x in c]", "for a, b in ((x, y) for x, y in c): pass"]),
    "statements joined by a comma": (
        ["f(), g()", "f(a), b.append(c),"],
        ["f((a, b))", "a = f(), g()", "def f(): return a, b"]),
    "statements joined by a semicolon": (
        ["a = 1; b = 2", "if a:\n    f(); g()", "if a: pass\nelse: f(); g()",
         "try: f()\nfinally: g(); h()", "try: f()\nexcept E: g(); h()"],
        ["a = 1\nb = 2", "a = ';'", "a = 1;\nb = 2"]),
    "conditional expressions that contain another": (
        ["a if b else c if d else e", "(a if b else c) if d else e",
         "f(a if b else c) if d else e", "a if (b if c else d) else e"],
        ["a if b else c", "f(a if b else c, d if e else g)"]),
    "tuple assignments of more than two short values": (
        ["a, b, c = 1, 2, 3", "a, b = batch['prompt_embeds'], 1", "a, b = (1,\n 2), 3",
         "a, b, c = *d, 3, 4"],
        ["a, b = x, y", "a, b = b, a", "a, b, c = size", "a = 1, 2, 3",
         "w, h = self.width, self.height"]),
    "setattr on a class": (
        ["setattr(Trainer, name, f)", "setattr(parts.Trainer, name, f)",
         "setattr(cls, name, f)", "setattr(type(self), name, f)",
         "setattr(self.__class__, name, f)"],
        ["setattr(self, name, f)", "setattr(module.weights, name, f)",
         "getattr(Trainer, name)"]),
    "expressions used as statements for their effect": (
        ["a and f()", "a or f()", "f() if a else g()", "[f(x) for x in a]"],
        ["f()", "a = b and f()", "if a and b: f()", "'docstring'"]),
    "one-line compound statements": (
        ["if a: f()", "for x in a: f(x)", "while a: f()", "with a: f()", "class A: pass",
         "def f(self): self.a = 1", "if (a and\n    b): f()", "if a:\n    f()\nelse: g()",
         "if a: f(); g()", "try: f()\nfinally:\n    g()", "try:\n    f()\nfinally: g()",
         "try:\n    f()\nexcept E: g()", "if a:\n    f()\nelif b: g()",
         "def f():\n    if a:\n        return 1\n    else: return 2", "def f(): yield 1",
         "match a:\n    case 1: f()"],
        ["if a:\n    f()", "def f():\n    if a: return 1", "for x in a:\n    if x: continue",
         "if a: raise E", "for x in a:\n    if x:\n        f()\n    elif y: break",
         "def f(a): return a/2", "def f(self) -> str: ...", "if a: # why\n    f()",
         "f(lambda: 1)", "a = '''\n''' if b else c"]),
    "functions without docstring": (
        ["def f(): return 1", "class A:\n    def f(self): return 1",
         "class _A:\n    def f(self): return 1", "async def f(): return 1",
         "if a:\n    def f(): return 1"],
        ["def f():\n    'Says what it does.'", "def _f(): return 1",
         "def __len__(self): return 1", "def _f():\n    def g(): return 1",
         "@size.setter\ndef size(self, n): self.n = n",
         "@overload\ndef f(a: int) -> int: ..."]),
    "functions without types": (
        ["def f(a): return 1", "def f(a: int, b=1): return 1", "def f(*, a): return 1",
         "def f(*a): return 1", "def f(**a): return 1",
         "class A:\n    def f(self, a): return 1", "def f(a, /): return 1"],
        ["def f(): return 1", "def f(a: int, *b: int, c: int = 1, **d: int): return 1",
         "def _f(a): return 1", "class A:\n    def f(self): return 1",
         "class A:\n    @classmethod\n    def f(cls): return 1",
         "def _f():\n    def g(a): return 1"]),
    "functions with underscore and without docstring": (
        ["def _f(): return 1", "class A:\n    def _f(self): return 1"],
        ["def _f():\n    'Says what it does.'", "def f(): return 1",
         "def __len__(self): return 1", "def f():\n    def _g(): return 1"]),
    "modules of more than 500 lines of code": (
        ["a = 1\n" * 501],
        ["a = 1\n" * 500, "# why\n\na = 1\n" * 500, 'def f():\n    """Says\n    what it does."""\n' * 500,
         "__all__ = [\n" + "'a',\n" * 500 + "]"]),
    "exporti cells": (
        ["#| exporti\na = 1", "#|exporti\na = 1", "#| hide\n#| exporti\na = 1"],
        ["#| export\na = 1", "#| exports\na = 1", "a = 'exporti'"]),
}


def count(name, text) -> int:
    """How often a count finds something in a snippet: a module, or a cell of a notebook."""
    source = notebook("snippet", [text]) if name == "exporti cells" else module("snippet", text)
    return len(list(COUNTS[name](source)))


def test_each_count_has_snippets():
    """A new count needs examples of both kinds."""
    assert SNIPPETS.keys() == COUNTS.keys()
    assert all(yes and no for yes, no in SNIPPETS.values())


@pytest.mark.parametrize("name, text", [(n, t) for n, (yes, _) in SNIPPETS.items() for t in yes])
def test_counted(name, text):
    """Each of these is one occurrence."""
    assert count(name, text) == 1


@pytest.mark.parametrize("name, text", [(n, t) for n, (_, no) in SNIPPETS.items() for t in no])
def test_not_counted(name, text):
    """These are written as they should be."""
    assert count(name, text) == 0


def test_a_problem_names_count_numbers_places_and_command():
    """What a contributor needs to know when the test fails."""
    number = len(occurrences()["walruses"])
    more = problem("walruses", number, number - 1)
    assert f"walruses: {number}, at most {number - 1}" in more
    assert re.search(r"qie_nb/\S+\.py:\d+", more)
    fewer = problem("walruses", number, number + 1)
    assert f"walruses: {number}, fewer than the {number + 1}" in fewer and LOWER in fewer
    assert LOWER in problem("walruses", number, None) and not problem("walruses", number, number)


def test_ceilings_are_only_lowered(tmp_path, monkeypatch):
    """A count that rose keeps its ceiling, a new one gets today's number, an old one goes."""
    monkeypatch.setattr(sys.modules[__name__], "CEILINGS", tmp_path/"ceilings.json")
    now = {name: len(found) for name, found in occurrences().items()}
    known = now | {"walruses": now["walruses"] + 1, "exporti cells": now["exporti cells"] - 1}
    known["no longer counted"] = 3
    del known["setattr on a class"]
    CEILINGS.write_text(json.dumps(known))
    lower()
    assert ceilings() == now | {"exporti cells": now["exporti cells"] - 1}


def main() -> int:
    """Print the counts, or lower the ceilings; 1 if a count is not at its ceiling."""
    if "--lower" in sys.argv[1:]:
        lower()
        return 0
    allowed = ceilings()
    wrong = [problem(name, len(found), allowed.get(name)) for name, found in occurrences().items()]
    for name, found in occurrences().items():
        print(f"{len(found):5} of {allowed.get(name, '-'):>5}  {name}")
    print("\n".join(filter(None, wrong)))
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
