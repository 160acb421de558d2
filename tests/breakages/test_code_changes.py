"""A change finds its place by function and tokens, whatever the formatting."""
import pytest

import fit
import mutations
from code_changes import ROOT, Change, Misfit, changed, changed_cells, changed_files
from mutations import EVERYDAY, OF_EACH_CHANGE, Mutation, attempts, in_order, noticed_elsewhere

CODE = '''
SIZE = 3 # not 4
def scaled(x, by=3):
    "Scale."
    return x * by

class Picture:
    size = 3
    @property
    def area(self): return self.size * self.size
    def name(self):
        def short(text):
            return text[:3]
        return short("a" + f"{self.size * 2} px")

if SIZE:
    def area(): return 0
'''


def one(function, old, new, code=CODE):
    """The code after one change."""
    return changed(code, [Change("picture", function, old, new)], "picture")


def refused(function, old, code=CODE):
    """The sentence of a change that does not fit."""
    with pytest.raises(Misfit) as e:
        one(function, old, "0", code)
    return str(e.value)


@pytest.mark.parametrize("function, old, new, before, after", [
    ("scaled", "x * by", "x / by", "return x * by", "return x / by"),
    ("Picture.area", "self.size * self.size", "0", "return self.size * self.size", "return 0"),
    ("Picture.name.short", "3", "4", "text[:3]", "text[:4]"),
    ("Picture.name", "3", "4", "text[:3]", "text[:4]"),         # with what is defined inside
    ("Picture", "size = 3", "size = 4", "size = 3\n    @", "size = 4\n    @"),
    ("area", "0", "1", "return 0", "return 1"),                 # below an `if`
    ("", "SIZE = 3", "SIZE = 4", "SIZE = 3", "SIZE = 4"),
    ("", "3", "4", "SIZE = 3", "SIZE = 4"),                     # not those of functions and classes
    ("Picture.area", "@property", "", "@property", ""),
    ("scaled", "'Scale.'", "", '"Scale."', ""),
])
def test_a_place_is_found_in_its_function(function, old, new, before, after):
    """Only this place changes."""
    assert CODE.count(before) == 1
    assert one(function, old, new) == CODE.replace(before, after)


@pytest.mark.parametrize("written", [
    "    return f(a, 'b', [c for c in d])",
    '    return f(a,"b",[c for c in d])',
    "    return f( # why\n        a,\n\n        'b', # and why\n        [c\n         for c in d])",
    "    if a: x = 1; return f(a, 'b', [c for c in d])",
    "    return f(a, '''b''', \\\n  [c for c in d])",
])
@pytest.mark.parametrize("old", [
    "return f(a, 'b', [c for c in d])", "return f(\n  a,\n'b', # then\n[c for c in d])"])
def test_formatting_does_not_matter(written, old):
    """Neither in the code nor in the change."""
    code = f"def g(a):\n{written}\n"
    assert one("g", old, "return 0", code) == code[:code.index("return")] + "return 0\n"


def test_two_statements_on_one_line_or_on_two():
    """A semicolon is a line break."""
    for code in ("def g():\n    a(); b()\n", "def g():\n    a()\n    b()\n"):
        assert one("g", "a()\nb()", "c()", code) == "def g():\n    c()\n"
        assert one("g", "a(); b()", "c()", code) == "def g():\n    c()\n"


def test_tokens_are_compared_whole():
    """Not parts of names, strings and numbers."""
    code = "def g(mean, means, i):\n    return means[30] + mean[3] + other.mean + 'mean'\n"
    assert one("g", "mean[3]", "i", code) == code.replace("mean[3]", "i")
    assert one("g", "3", "4", code) == code.replace("[3]", "[4]")
    assert "not in" in refused("g", "eans", code)


def test_an_f_string_is_one_token():
    """Python 3.12 reads it as several."""
    text = 'f"{self.size * 2} px"'
    assert one("Picture.name", text, "0") == CODE.replace(text, "0")
    assert "not in" in refused("Picture.name", "self.size * 2")


def test_further_lines_are_indented_like_the_place():
    """A replacement of two statements needs no spaces of its own."""
    assert one("Picture.name.short", "return text[:3]", "text += 'x'\nreturn text") == CODE.replace(
        "            return text[:3]", "            text += 'x'\n            return text")


def test_wide_characters_before_the_place():
    """Positions are counted in characters."""
    code = "def g(a):\n    return 'größer' + a + '🙂' + a*2\n"
    assert one("g", "a*2", "b", code) == code.replace("a*2", "b")


def test_what_is_not_there_once_is_a_sentence():
    """It names tokens, number, function and module."""
    assert refused("scaled", "x * bx") == (
        "`x * bx` is not in `scaled` of picture, but must be there once")
    assert refused("Picture.area", "self.size") == (
        "`self.size` is twice in `Picture.area` of picture, but must be there once")
    assert refused("", "SIZE") == (
        "`SIZE` is twice outside of functions and classes of picture, but must be there once")
    assert refused("Picture.gone", "3").startswith("`3` is not in `Picture.gone` of picture")
    assert "is 3 times in `f`" in refused("f", "a", "def f(a): return a + a\n")
    assert "cannot be read as Python" in refused("scaled", "x * by)[")
    assert "cannot be read as Python" in refused("scaled", "f(x")
    assert "has no tokens" in refused("scaled", "# a comment")


def test_two_definitions_of_one_name_are_searched_together():
    """As with a property and its setter, or one name in two branches."""
    code = "if a:\n    def f(): return 1\nelse:\n    def f(): return 2\n"
    assert one("f", "2", "3", code) == code.replace("2", "3")
    assert "is twice in `f`" in refused("f", "return", code)


def test_changes_of_one_module_are_found_in_its_unchanged_code():
    """The first does not make the place of the second unclear."""
    changes = [Change("m", "g", "a", "b + b"), Change("m", "g", "b", "a")]
    assert changed("def g(): return a - b\n", changes) == "def g(): return b + b - a\n"


def test_files_of_a_folder(tmp_path):
    """Each module once, whatever the order of the changes."""
    (tmp_path/"qie_nb"/"data").mkdir(parents=True)
    (tmp_path/"qie_nb"/"a.py").write_text("def f(): return 1, 2\n")
    (tmp_path/"qie_nb"/"data"/"b.py").write_text("def g(): return 1\n")
    changes = [
        Change("a", "f", "1", "3"), Change("data/b", "g", "1", "3"), Change("a", "f", "2", "4")]
    assert changed_files(changes, tmp_path) == {
        tmp_path/"qie_nb"/"a.py": "def f(): return 3, 4\n",
        tmp_path/"qie_nb"/"data"/"b.py": "def g(): return 3\n"}
    with pytest.raises(Misfit, match="there is no module c"):
        changed_files([Change("c", "f", "1", "3")], tmp_path)


def test_cells_of_a_notebook():
    """The cell is the one that has the function and the tokens."""
    cells = {2: "#| export\ndef f(a): return a\n", 5: "#| export\ndef g(a): return a + 1\nX = 1"}
    changes = [Change("m", "g", "1", "2"), Change("m", "", "1", "3"),
               Change("m", "f", "return a", "return 0")]
    assert changed_cells(cells, changes, "m.ipynb") == {
        2: "#| export\ndef f(a): return 0\n", 5: "#| export\ndef g(a): return a + 2\nX = 3"}
    with pytest.raises(Misfit, match="`1` is not in `f` of m.ipynb"):
        changed_cells(cells, [Change("m", "f", "1", "2")], "m.ipynb")
    cells[7] = cells[2]
    with pytest.raises(Misfit, match="`return a` is twice in `f` of m.ipynb"):
        changed_cells(cells, [Change("m", "f", "return a", "0")], "m.ipynb")


def test_a_change_that_no_longer_fits_is_a_warning(monkeypatch, capsys):
    """With the names that one needs to repair it; the exit status stays 0."""
    test = "tests/training/test_randomness.py"
    here = ("training/step", "batch_seeds")
    monkeypatch.setattr(mutations, "MUTATIONS", {
        "a mistake": Mutation(test, [Change(*here, "no_such(name)", "x")]),
        "no Python": Mutation(test, [Change(*here, "def", "")]),
        "no file": Mutation("tests/gone.py", []),
        "no function": Mutation(f"{test}::test_gone", []),
        "right": Mutation(f"{test}::test_gradients_are_clipped_at_their_norm", [
            Change(*here, "def", "async def")])})
    assert fit.main() == 0
    said = capsys.readouterr().out
    assert ("warning: mutation 'a mistake': `no_such(name)` is not in `batch_seeds` of "
            "training/step, but must be there once\n") in said
    assert "warning: mutation 'no Python': the changed step.py is not Python" in said
    assert "warning: mutation 'no file': there is no test tests/gone.py\n" in said
    assert f"warning: mutation 'no function': there is no test {test}::test_gone\n" in said
    assert "'right'" not in said


def test_all_tables_are_checked():
    """Mutations and both kinds of breakages."""
    kinds = {name.partition(" '")[0].partition(' "')[0] for name in fit.all_changes()}
    assert kinds == {"mutation", "breakage", "breakage of the cache"}


def test_what_the_runner_tries():
    """The named test, its file and the module's own with what CI runs, then all everyday tests."""
    change = [Change("training/step", "batch_seeds", "seed", "0")]
    own = [str(ROOT/"tests"/"training"/"test_step.py")]
    file = "tests/training/test_randomness.py"
    every = in_order(change)
    assert every[0] == own[0] and len(every) > 50 and not any("breakages" in p for p in every)
    end = ["-m", EVERYDAY, *every]
    named, whole, module = [["-m", OF_EACH_CHANGE, *tests] for tests in ([f"{file}::test_x"], [file], own)]
    assert attempts(Mutation(file, change)) == [whole, module, end]
    assert attempts(Mutation(f"{file}::test_x", change)) == [named, whole, module, end]
    assert attempts(Mutation("tests/gone.py::test_x", change)) == [module, end]


def test_another_file_that_noticed_a_mutation_is_named(monkeypatch):
    """So that the table can follow."""
    monkeypatch.setattr(mutations, "MUTATIONS", {
        name: Mutation("tests/a.py::test_x", []) for name in ("one", "two", "three")})
    results = dict(one="tests/a.py::test_y[1]", two="tests/b.py::test_z", three="")
    assert noticed_elsewhere(results) == [
        "update the table: 'two' was noticed by tests/b.py::test_z, not by tests/a.py"]
