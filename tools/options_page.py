"""Writes the table of all settings into docs/options.md: `python tools/options_page.py`. A test compares the page with the configuration."""
import re
from pathlib import Path

from qie_nb.config import describe

PAGE = Path(__file__).parent.parent/"docs"/"options.md"
INTRODUCTIONS = { # a sentence below the heading of a section
    "model": "The base model, its quantization and the LoRA.",
    "data": "The pairs, their sizes and instructions.",
    "train": "A step, the length of the run, checkpoints and [evaluation](evaluation.md).",
    "cache": "Where latents and prompt embeddings are stored, and where they are computed. See [cache.md](cache.md).",
    "predict": "Editing images.",
    "optimizer": "The optimizer of the LoRA's weights.",
    "lr_scheduler": "The learning rate over the run, with diffusers' names.",
    "logging": "Logs, TensorBoard and the training panel."}


def filled(text:str) -> str:
    "The page with today's settings."
    made = describe().markdown()
    for s, sentence in INTRODUCTIONS.items(): made = made.replace(f"### `{s}`\n", f"### `{s}`\n\n{sentence}\n")
    return re.sub(r"(<!-- options: .*? -->\n).*?(\n<!-- end -->)", lambda m: m[1] + made + m[2], text, flags=re.S)


if __name__ == "__main__": PAGE.write_text(filled(PAGE.read_text()))
