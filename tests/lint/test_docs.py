"""Settings, commands, messages and files that README and docs/ name exist."""
import re, shlex, sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from qie_nb.cli import parser
from qie_nb.config import describe, make_config
from qie_nb.core.presets import LENGTHS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT/"tools"))
import quotes

PAGES = sorted(p.stem for p in (ROOT/"docs").glob("*.md"))
WRITTEN = ["../README", *(p for p in PAGES if p != "refusals")] # refusals.md is generated
SECTIONS = "model|data|train|cache|predict|optimizer|lr_scheduler|logging"
read = lambda page: (ROOT/"docs"/f"{page}.md").read_text()
each_page = pytest.mark.parametrize("page", WRITTEN)


@cache
def known() -> set: return {".".join(name.split(".")[:n]) for name, *_ in describe() for n in range(1, 5)}


def unknown_settings(text): return {n for n in re.findall(rf"`(?:[^`]*[\s(])?((?:{SECTIONS})\.[a-z0-9_.]+[a-z0-9_])", text) if n not in known() and not n.endswith(".md")}


@each_page
def test_settings_exist(page): assert not unknown_settings(read(page))


def test_unknown_settings_are_found():
    assert unknown_settings("`train.max_hour: 8`") == {"train.max_hour"} and unknown_settings("set `train.max_hours: 8` x") == set()


def test_the_recipe_is_a_configuration():
    blocks = re.findall(r"```yaml\n(.*?)```", read("recipes"), re.S)
    assert blocks
    for b in blocks:
        c = make_config(yaml.safe_load(b))
        assert c.model.lora.r == 16 and c.optimizer.lr == 1e-4
        assert not any(getattr(c.train, length) for length in LENGTHS), "the recommended one is for all numbers of pairs"


@each_page
def test_commands_exist(page):
    text = read(page)
    for c in re.findall(r"`(qie-nb [^`]+)`", text) + re.findall(r"^(qie-nb .*)$", text, re.M):
        words = shlex.split(c, comments=True)[1:]
        if len(words) > 1 and not {"|", "..."} & {*words}: parser().parse_args(words)
    with pytest.raises(SystemExit): parser().parse_args(shlex.split("qie-nb plan --gpuu T4")[1:])


@pytest.mark.parametrize("page", quotes.PAGES)
def test_messages_are_quoted_exactly(page):
    found = quotes.quoted(read(page))
    assert len(found) >= (12 if page == "kaggle" else 3)
    assert not [m for m in found if not quotes.in_code(m)]


@each_page
def test_links_exist(page):
    for target in re.findall(r"\]\(([^)]+)\)", read(page)):
        if target.startswith("https://"): continue
        file, _, section = target.partition("#")
        here = (ROOT/"docs"/f"{page}.md").resolve()
        path = here.parent/file if file else here
        assert path.is_file(), target
        if section: assert section in {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)", path.read_text(), re.M)}, target


@pytest.mark.parametrize("page", PAGES)
def test_pages_open_with_what_they_answer(page):
    title, gap, first, *_ = read(page).splitlines()
    assert title.startswith("# ") and not gap and re.match(r"[A-Z][^#|`!*-].{40,}[.:?!]", first), "one sentence below the title: what does this page answer?"


def test_readme_links_every_page():
    assert not set(PAGES) - {*re.findall(r"\]\(docs/(\w+)\.md", read("../README"))}


@each_page
def test_table_rows_have_equal_length(page):
    for table in re.findall(r"(?:^\|.*\n)+", read(page), re.M):
        counts = {len(re.sub(r"`+[^`]*`+", "", row).split("|")) for row in table.splitlines()}
        assert len(counts) == 1, table[:200]


# --- claims
def claims() -> list: # (claim, [page], what supports it)
    rows = [[c.strip() for c in r.strip("|").split("|")] for r in read("claims").splitlines() if r.startswith("| ") and "---" not in r][1:]
    return [(claim, re.findall(r"\[(\w+)\]", pages), support) for claim, pages, support in rows]


def page_text(name): return " ".join((ROOT/"README.md" if name == "README" else ROOT/"docs"/f"{name}.md").read_text().replace("\n> ", " ").replace("**", "").split())


def test_each_claim_is_in_its_page_and_has_its_support():
    found, named = claims(), 0
    for claim, pages, support in found:
        for page in pages: assert claim.replace("**", "") in page_text(page), (claim, page)
        for path in re.findall(r"`((?:tests|benchmarks)/[^`]+)`", support):
            file, _, test = path.partition("::")
            assert (ROOT/file).is_file() and (not test or f"def {test}(" in (ROOT/file).read_text()), path
            named += 1
        assert "`" in support or support == "the same"
    assert len(found) > 35 and named > 50


def test_each_bold_sentence_is_a_claim_or_a_heading():
    "Bold words of up to five words, or at the beginning of a paragraph, are names and headings."
    known = " ".join(c for c, *_ in claims())
    for page in ("README", *(p.stem for p in (ROOT/"docs").glob("*.md") if p.stem not in ("claims", "security", "options", "refusals"))):
        text = (ROOT/"README.md" if page == "README" else ROOT/"docs"/f"{page}.md").read_text()
        for m in re.finditer(r"\*\*([^*]+)\*\*", text):
            words, before = " ".join(m[1].split()).strip("."), text[:m.start()].rpartition("\n")[2]
            heading = not before.strip("-> 0123456789.") and page != "README"
            assert heading or len(words.split()) < 6 or words in known or all(part.strip() in known for part in words.split(",", 1)), (page, words)


# --- the security page
def test_the_security_page_names_tests_that_exist():
    page = read("security")
    named = {(file, name) for file, names in re.findall(r"(tests/[\w/]+\.py):\s+([\w,\s]+)", page) for name in re.split(r",\s+", names)}
    assert len(named) > 20
    missing = [f"{file}: {name}" for file, name in named if not re.search(rf"^def (test_)?{name}\(", (ROOT/file).read_text(), re.M)]
    assert not missing, missing
    own = set(re.findall(r"^def test_(\w+)\(", (ROOT/"tests"/"test_security.py").read_text(), re.M))
    assert own <= {name for file, name in named if file == "tests/test_security.py"}, "the page names every test of that file"
