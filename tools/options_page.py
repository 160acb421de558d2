"""Writes the list of all settings into docs/options.md: `python tools/options_page.py`.

A test compares the page with the configuration."""
import json, re
from pathlib import Path

from qie_nb.config import describe
from qie_nb.core.section import PLANNED, Options

PAGE = Path(__file__).parent.parent/"docs"/"options.md"


def written(default) -> str:
    "A default as a command line takes it: without blanks."
    return re.sub(r"([,:]) ", r"\1", json.dumps(default)).replace('"', "")


def short(about:str) -> str:
    "The first part of a use, up to a semicolon; `qie-nb options` shows the rest."
    return re.match(r"(?:\([^()]*\)|[^;(])+", about)[0].strip()


def listed(options:Options) -> str: # Markdown
    "The settings by who needs them, as a command line has them; the rarer ones by name."
    made = []
    for heading, rows in options.groups().items():
        section = heading in options.sections()
        if heading:
            made.append(f"### Others: `{heading}`" if section else f"### {heading}")
        if heading in options.introductions and not section:
            made.append(options.introductions[heading])
        if section:
            made.append(", ".join(f"`{name}={written(default)}`" for name, default, _ in rows))
            continue
        shown = short if heading == PLANNED else str
        lines = [f"- `{name}={written(default)}` {shown(about)}" for name, default, about in rows]
        made.append("\n".join(lines))
    return "\n\n".join(made)


def filled(text:str) -> str:
    "The page with today's settings."
    made = listed(describe())
    return re.sub(r"(<!-- options: .*? -->\n).*?(\n<!-- end -->)", lambda m: m[1] + made + m[2], text, flags=re.S)


if __name__ == "__main__": PAGE.write_text(filled(PAGE.read_text()))
