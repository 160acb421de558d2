"""Changes of library code that find their place by function and tokens.

A change still fits after the code was formatted, moved or edited elsewhere: line breaks, spaces,
comments, semicolons and the kind of quotation marks do not matter.
"""
import ast
import io
import os
import shutil
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENDMARKER}


class Change(NamedTuple):
    """One replacement in a function of a module."""
    module: str    # below qie_nb, e.g. "training/step"
    function: str  # `function`, `Class.method`, `outer.inner`; "": outside of functions and classes
    old: str       # Python tokens that occur once in that function; all its brackets are closed
    new: str       # their replacement; lines after the first are indented like the first


class Mutation(NamedTuple):
    """A small mistake, and the test that should notice it."""
    test: str  # file of a test of the lane of each change; with "::function" where the file takes long to get there
    changes: list[Change]


class Misfit(Exception):
    """A change does not fit the code (any more)."""


class Token(NamedTuple):
    """A token of Python code."""
    key: str    # what is compared
    start: int  # position of its first character
    end: int
    line: int   # its first line, from 1


def raw_tokens(text) -> list[tokenize.TokenInfo]:
    """The tokens that matter, with each f-string as one token, as Python 3.11 reads it."""
    started, kept = [], []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            started.append(token)
        elif kind == "FSTRING_END":
            first = started.pop()
            if not started:
                kept.append(first._replace(type=tokenize.STRING, string="", end=token.end))
        elif not started and token.type not in IGNORED and token.string != ";":
            kept.append(token)
    return kept


@cache
def tokens_of(text) -> list[Token]:
    """The tokens of some code with their positions."""
    begins = [0, 0]  # of line 1 at index 1, and so on
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    tokens = []
    for raw in raw_tokens(text):
        start = begins[raw.start[0]] + raw.start[1]
        end = begins[raw.end[0]] + raw.end[1]
        tokens.append(Token(key_of(raw, text[start:end]), start, end, raw.start[0]))
    return tokens


def key_of(raw, text) -> str:
    """What is compared: the token, or for a string without f its value."""
    if raw.type == tokenize.STRING and "f" not in text[:text.index(text[-1])].lower():
        return repr(ast.literal_eval(text))
    return text


def keys_of(fragment) -> list[str]:
    """The tokens of a piece of code, which need not be a whole statement."""
    try:
        # in brackets a line may begin at any column
        keys = [token.key for token in tokens_of(f"({fragment}\n)")]
    except (tokenize.TokenError, SyntaxError) as e:
        raise Misfit(f"`{fragment}` cannot be read as Python: {e}") from None
    open_brackets = 0
    for key in keys[:-1]:
        if key in ("(", "[", "{"):
            open_brackets += 1
        elif key in (")", "]", "}"):
            open_brackets -= 1
        if not open_brackets:
            raise Misfit(f"`{fragment}` cannot be read as Python: a bracket was not opened")
    return keys[1:-1]


@cache
def lines_of_definitions(text) -> list[tuple[str, range]]:
    """The qualified name of each function and class, and its lines with those of decorators."""
    found = []
    def visit(parent, prefix):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, DEFINITION):
                name = prefix + node.name
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                found.append((name, range(first, node.end_lineno + 1)))
                visit(node, f"{name}.")
            else:
                visit(node, prefix)
    visit(ast.parse(text), "")
    return found


def tokens_in(text, function) -> list[Token]:
    """The tokens of a function or class, with all that is defined inside; "": outside of all."""
    definitions = lines_of_definitions(text)
    if function:
        chosen = [lines for name, lines in definitions if name == function]
        return [t for t in tokens_of(text) if any(t.line in lines for lines in chosen)]
    return [t for t in tokens_of(text) if not any(t.line in lines for _, lines in definitions)]


def places(text, function, old) -> list[tuple[int, int]]:
    """Where `old` is in that function of the code: (start, end) of each occurrence."""
    wanted, tokens = keys_of(old), tokens_in(text, function)
    if not wanted:
        raise Misfit(f"`{old}` has no tokens")
    keys = [token.key for token in tokens]
    found = []
    for n in range(len(keys) - len(wanted) + 1):
        if keys[n:n + len(wanted)] == wanted:
            found.append((tokens[n].start, tokens[n + len(wanted) - 1].end))
    return found


def misfit(change, times, where) -> Misfit:
    """The sentence for a change whose tokens are not there exactly once."""
    function = f"in `{change.function}`" if change.function else "outside of functions and classes"
    number = {0: "not", 2: "twice"}.get(times, f"{times} times")
    return Misfit(f"`{change.old}` is {number} {function} of {where}, but must be there once")


def changed(text, changes, where="the code") -> str:
    """The code with all changes. Each is looked for in the unchanged code."""
    spans = []
    for change in changes:
        found = places(text, change.function, change.old)
        if len(found) != 1:
            raise misfit(change, len(found), where)
        spans.append((*found[0], change.new))
    for start, end, new in sorted(spans, reverse=True):
        text = replaced(text, start, end, new)
    return text


def replaced(text, start, end, new) -> str:
    """The code with `new` at this place; its further lines are indented like the place's line."""
    line = text[text.rfind("\n", 0, start) + 1:]
    indent = line[:len(line) - len(line.lstrip())]
    return text[:start] + new.replace("\n", "\n" + indent) + text[end:]


def changed_files(changes, root=ROOT) -> dict[Path, str]:
    """The changed code of each module that the changes name: {file: text}."""
    texts = {}
    for module in dict.fromkeys(change.module for change in changes):
        path = Path(root)/"qie_nb"/f"{module}.py"
        if not path.is_file():
            raise Misfit(f"there is no module {module}")
        own = [change for change in changes if change.module == module]
        texts[path] = changed(path.read_text(), own, module)
    return texts


def changed_cells(cells, changes, where) -> dict[int, str]:
    """The changed sources of exported notebook cells, of {number of the cell: source}."""
    chosen = {}  # {number of the cell: its changes}
    for change in changes:
        found = {n: len(places(cell, change.function, change.old)) for n, cell in cells.items()}
        if sum(found.values()) != 1:
            raise misfit(change, sum(found.values()), where)
        chosen.setdefault(max(found, key=found.get), []).append(change)
    return {n: changed(cells[n], own, where) for n, own in chosen.items()}


def broken_copy(changes, to) -> dict:
    """A copy of library and tests with these changes; the arguments to run a process there."""
    for folder in ("qie_nb", "tests"):
        shutil.copytree(ROOT/folder, to/folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT/"pyproject.toml", to)
    for path, text in changed_files(changes, to).items():
        path.write_text(text)
    environment = os.environ | dict(PYTHONPATH=str(to), OMP_NUM_THREADS="1")
    return dict(cwd=to, env=environment, capture_output=True, text=True)
