"""Warns of mutations and breakages that no longer fit the code or the tests; exits with 0."""
import ast
import sys

import mutations
import test_cache_breakages
import test_code_breakages
from code_changes import ROOT, Change, Misfit, changed_files


def all_changes() -> dict[str, list[Change]]:
    """{kind and name: changes} of every mutation and breakage."""
    named = {f"mutation {name!r}": m.changes for name, m in mutations.MUTATIONS.items()}
    for name, breakage in test_cache_breakages.BREAKAGES.items():
        named[f"breakage of the cache {name!r}"] = breakage.changes
    for table in ("BREAKAGES", "POSITIONS", "TEXT"):
        for name, changes in getattr(test_code_breakages, table).items():
            named[f"breakage {name!r}"] = changes
    return named


def problems(changes) -> list[str]:
    """Why changes that are made together do not fit the code."""
    found = []
    for change in changes:
        try:
            changed_files([change])
        except Misfit as e:
            found.append(str(e))
    if found: return found
    for path, text in changed_files(changes).items():
        try:
            ast.parse(text)
        except SyntaxError as e:
            found.append(f"the changed {path.name} is not Python: {e}")
    return found


def is_there(test) -> bool:
    """Is there a test file, or a test function given as `file::function`?"""
    file, _, function = test.partition("::")
    path = ROOT/file
    return path.is_file() and (not function or f"def {function}(" in path.read_text())


def unfit() -> list[str]:
    """A sentence for each change that no longer fits the code, and for each test that is gone."""
    sentences = []
    for name, mutation in mutations.MUTATIONS.items():
        if not is_there(mutation.test):
            sentences.append(f"mutation {name!r}: there is no test {mutation.test}")
    for name, changes in all_changes().items():
        sentences += [f"{name}: {why}" for why in problems(changes)]
    return sentences


def main() -> int:
    """Print a warning for each; 0, because the library may be right."""
    for sentence in unfit():
        print(f"warning: {sentence}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
