"""Writes the table of all settings into docs/options.md: `python tools/options_page.py`. A test compares the page with the configuration."""
import re
from pathlib import Path

from qie_nb.config import describe

PAGE = Path(__file__).parent.parent/"docs"/"options.md"


def filled(text:str) -> str:
    "The page with today's settings."
    made = describe().markdown()
    return re.sub(r"(<!-- options: .*? -->\n).*?(\n<!-- end -->)", lambda m: m[1] + made + m[2], text, flags=re.S)


if __name__ == "__main__": PAGE.write_text(filled(PAGE.read_text()))
