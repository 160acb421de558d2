"""Bring the messages that pages quote in step with the code: `python tools/quotes.py`.

The tables headed "message" in docs/kaggle.md and docs/colab.md quote pieces of messages word for word. A quoted piece that is
no longer in the code is replaced by the piece of a message that is most like it; if none is alike, the piece is reported."""
import ast, difflib, re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["kaggle", "colab"]
ALIKE = 0.6 # ratio of difflib, from which on two pieces are one message that changed
LEAST = 8   # characters of a piece that is compared


@cache
def literals(root:Path=ROOT) -> tuple: # str
    "The pieces of text in the library's code; values in f-strings separate them."
    found = set()
    for path in sorted((root/"qie_nb").rglob("*.py")):
        if path.name == "_modidx.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return tuple(sorted(found))


def in_code(piece:str) -> bool:
    "Is it part of a message?"
    return any(piece in text for text in literals())


def quoted(page:str) -> list: # str, without the spaces around a piece
    "The pieces that the first column of a page's tables of messages quotes."
    tables = re.findall(r"\| message \|.*?\n\n?(?=\Z|\n|#)", page + "\n\n", re.S)
    rows = [row.split("|")[1] for table in tables for row in table.splitlines()[2:] if row.startswith("|")]
    spans = [m[2] for row in rows for m in re.finditer(r"(`+)(.+?)\1(?!`)", row)]
    pieces = [piece.strip() for span in spans for piece in span.split("…")]
    return [piece for piece in pieces if len(piece) >= LEAST]


def like(piece:str) -> str: # "" if none is alike
    "The text in the code that a piece has become."
    best, score = "", ALIKE
    for text in literals():
        matcher = difflib.SequenceMatcher(None, text, piece, autojunk=False)
        blocks = [b for b in matcher.get_matching_blocks() if b.size]
        if not blocks:
            continue
        begin = max(0, blocks[0].a - blocks[0].b)
        end = blocks[-1].a + blocks[-1].size + len(piece) - blocks[-1].b - blocks[-1].size
        candidate = words(text, begin, end)
        ratio = difflib.SequenceMatcher(None, candidate, piece, autojunk=False).ratio()
        if ratio > score:
            best, score = candidate, ratio
    return best


def words(text:str, begin:int, end:int) -> str:
    "A part of a text, extended to whole words."
    while begin > 0 and not text[begin - 1].isspace():
        begin -= 1
    while end < len(text) and not text[end].isspace():
        end += 1
    return text[begin:end].strip(" :;,")


def main():
    "Corrects the pages."
    for name in PAGES:
        path = ROOT/"docs"/f"{name}.md"
        text = path.read_text(encoding="utf-8")
        for piece in quoted(text):
            if in_code(piece):
                continue
            new = like(piece)
            if new:
                text = text.replace(piece, new)
                print(f"docs/{name}.md: `{piece}` is now `{new}`")
            else:
                print(f"docs/{name}.md quotes `{piece}`, and no message is like it; quote another one, or delete the row")
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
