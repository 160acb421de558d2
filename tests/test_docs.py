"""What the pages under docs/ name exists: settings, commands, messages, files; and their tables are what the script makes of the planner."""
import re, shlex, sys
from functools import lru_cache
from pathlib import Path

import pytest
import yaml

from qie_nb.cli import parser
from qie_nb.config import describe, make_config

ROOT = Path(__file__).parent.parent
PAGES = ("kaggle", "colab", "recipes")
SECTIONS = "model|data|train|cache|predict|optimizer|lr_scheduler|logging"
read = lambda page: (ROOT/"docs"/f"{page}.md").read_text()
each_page = pytest.mark.parametrize("page", PAGES)
sys.path.insert(0, str(ROOT/"benchmarks"))


@lru_cache
def source() -> str:
    "The package's text, strings that stand in several pieces joined."
    text = "\n".join(p.read_text() for p in sorted((ROOT/"qie_nb").rglob("*.py")))
    return re.sub(r'"\s*\n?\s*f?"', "", text)


@lru_cache
def known() -> set: return {".".join(name.split(".")[:n]) for name, *_ in describe() for n in range(1, 5)}


def unknown_settings(text): return {n for n in re.findall(rf"`(?:[^`]*[\s(])?((?:{SECTIONS})\.[a-z_.]+[a-z_])", text) if n not in known()}


@each_page
def test_settings_that_are_named_exist(page):
    text = read(page)
    assert len(re.findall(rf"`(?:{SECTIONS})\.", text)) > 5 and not unknown_settings(text)
    assert unknown_settings("`train.max_hour: 8`") == {"train.max_hour"} and unknown_settings("set `train.max_hours: 8` x") == set(), "this test can fail"


def test_the_recipe_s_file_is_a_configuration():
    blocks = re.findall(r"```yaml\n(.*?)```", read("recipes"), re.S)
    assert blocks
    for b in blocks:
        c = make_config(yaml.safe_load(b))
        assert c.model.lora.r == 16 and c.optimizer.lr == 1e-4 and c.train.max_train_steps == 800


def commands(text): return [c for c in re.findall(r"`(qie-nb [^`]+)`", text)]

@each_page
def test_commands_can_be_given(page):
    for c in commands(read(page)):
        words = shlex.split(c)[1:]
        if words == [words[0]] and words[0] != "selfcheck": continue
        parser().parse_args(words)
    with pytest.raises(SystemExit): parser().parse_args(shlex.split("qie-nb plan --gpuu T4")[1:])


def messages(text) -> list: # what the first column of the tables of messages quotes of our code, in pieces
    rows = [r.split("|")[1] for table in re.findall(r"\| message \|.*?\n\n?(?=\Z|\n|#)", text + "\n\n", re.S) for r in table.splitlines()[2:] if r.startswith("|")]
    spans = [m[2] for r in rows for m in re.finditer(r"(`+)(.+?)\1(?!`)", r)]
    return [p.strip() for s in spans for p in s.split("…") if len(p.strip()) > 7]


@pytest.mark.parametrize("page", ["kaggle", "colab"])
def test_messages_are_in_the_code_word_for_word(page):
    found = messages(read(page))
    assert len(found) >= (20 if page == "kaggle" else 4)
    assert not [m for m in found if m not in source()]


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", read(page)):
        file, _, place = target.partition("#")
        path = ROOT/"docs"/file if file else ROOT/"docs"/f"{page}.md"
        assert path.is_file(), target
        heads = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)", path.read_text(), re.M)}
        assert not place or place in heads, target


@each_page
def test_a_table_has_as_many_cells_in_every_row(page):
    for table in re.findall(r"(?:^\|.*\n)+", read(page), re.M):
        counts = {len(re.sub(r"`+[^`]*`+", "", row).split("|")) for row in table.splitlines()}
        assert len(counts) == 1, table[:200]


def parts():
    import session_table
    return session_table.PARTS

@pytest.mark.parametrize("number", range(4))
def test_tables_are_what_the_script_makes(number):
    import session_table
    (file, name), make = list(parts().items())[number]
    assert session_table.filled(file, name, make()) == read(file), "python benchmarks/session_table.py --write"


def test_the_session_table_says_what_does_not_fit():
    text = read("kaggle").split("session: made by")[1].split("<!-- end")[0]
    assert "does not fit into one session" in text and "Computed, not measured" in text and "assumed" in text and ".safetensors` with 9.99 GB" in text
    assert len(re.findall(r"^\| (?:512 x 512|1024 x 1024) \| float", text, re.M)) == 8
