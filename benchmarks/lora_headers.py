"""Do kohya's scripts and ComfyUI read our LoRA files as we mean them?

`python benchmarks/lora_headers.py KOHYA` (a checkout of kohya-ss/sd-scripts) writes a LoRA of a tiny model in both
formats and reads it with functions of the checkout, which are taken out of their files, because the files import more
than a reader needs. Compared are the hashes, which kohya's scripts compute themselves, the keys of the specification,
and rank and alpha. With `--comfyui` (a checkout of ComfyUI, or a folder with its comfy/utils.py) the header is read as
ComfyUI's server reads it for its window. Everything is exact: there is no spread. The results go to
benchmarks/results/lora_headers.json.
"""
import argparse
import ast
import hashlib
import json
import os
import struct
import subprocess
import tempfile
from datetime import date
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import safetensors
import safetensors.torch
from safetensors.torch import load_file

from qie_nb.config import LoraSection
from qie_nb.lora.adapters import add_lora, save_lora
from qie_nb.tiny.random_models import tiny_pipeline

OUT = Path(__file__).parent/"results"/"lora_headers.json"
FUNCTIONS = {
    "library/train_util.py": ["precalculate_safetensors_hashes", "addnet_hash_legacy",
                              "addnet_hash_safetensors", "load_metadata_from_safetensors"],
    "library/sai_model_spec.py": ["get_title"],
}
OF_COMFYUI = {"comfy/utils.py": ["safetensors_header"]}
MOST_SHOWN = 1024 * 1024 # bytes of a header (ComfyUI, server.py: view_metadata)
NAMES = dict(safetensors=safetensors, hashlib=hashlib, os=os, BytesIO=BytesIO, struct=struct,
             MODELSPEC_TITLE="modelspec.title")


def functions_of(
    checkout:Path,
    wanted_names:dict, # {file: names}
) -> dict: # {name: function}
    "The functions of the checkout, without the imports of their files."
    found = dict(NAMES)
    for file, names in wanted_names.items():
        tree = ast.parse((checkout/file).read_text(encoding="utf-8"))
        wanted = [d for d in tree.body if isinstance(d, ast.FunctionDef) and d.name in names]
        code = compile(ast.Module(wanted, type_ignores=[]), file, "exec")
        exec(code, found)
    return found


def compared(
    file:Path, # LoRA
    kohya:dict, # of `functions_of`
    note:dict, # that was written
) -> dict: # {what: is it equal?}
    "What kohya's functions find in the file beside what was meant."
    header = kohya["load_metadata_from_safetensors"](str(file))
    whole, legacy = kohya["precalculate_safetensors_hashes"](load_file(file), header)
    with open(file, "rb") as opened:
        on_disk = kohya["addnet_hash_safetensors"](opened)
    return dict(
        hash_computed_again=whole == header["sshs_model_hash"],
        legacy_hash_computed_again=legacy == header["sshs_legacy_hash"],
        hash_of_the_file=on_disk == header["sshs_model_hash"],
        title=kohya["get_title"](header) == note["title"],
        rank=header["ss_network_dim"] == "64",
        alpha=header["ss_network_alpha"] == "32",
        captions=json.loads(header["ss_tag_frequency"]) == {"pairs": note["captions"]})


def shown_by_comfyui(
    file:Path, # LoRA
    comfyui:dict, # of `functions_of`
) -> bool:
    "Does its window show all that the header says?"
    header = comfyui["safetensors_header"](str(file), max_size=MOST_SHOWN)
    with safetensors.safe_open(file, "pt") as opened:
        return header is not None and json.loads(header)["__metadata__"] == opened.metadata()


def commit_of(
    checkout:Path,
) -> str: # "" if it is no git checkout
    "The commit of a checkout."
    asked = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kohya", type=Path, help="checkout of kohya-ss/sd-scripts")
    parser.add_argument("--commit", default="", help="of the checkout, if it is no git checkout")
    parser.add_argument("--comfyui", type=Path, help="checkout of ComfyUI")
    a = parser.parse_args()
    kohya = functions_of(a.kohya, FUNCTIONS)
    pipeline = tiny_pipeline("2511")
    model = add_lora(pipeline.transformer, LoraSection(r=64, lora_alpha=32))
    note = dict(model=dict(name="Qwen-Image-Edit-2511", implementation="https://example.org",
                           base_version="qwen_image_edit_plus"),
                title="Dusk", steps=500, pairs=30, captions={"make it dusk": 30})
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for format in ("diffusers", "comfyui"):
            file = save_lora(model, Path(folder)/f"{format}.safetensors", note, format=format)
            results[format] = compared(file, kohya, note) | dict(bytes=file.stat().st_size)
            if a.comfyui:
                results[format]["comfyui"] = shown_by_comfyui(file, functions_of(a.comfyui, OF_COMFYUI))
    facts = dict(date=date.today().isoformat(), safetensors=version("safetensors"),
                 commit=a.commit or commit_of(a.kohya))
    OUT.write_text(json.dumps(facts | dict(results=results), indent=1) + "\n")
    print(OUT.read_text())
    if not all(all(found.values()) for found in results.values()):
        raise SystemExit("the others read something else")


if __name__ == "__main__":
    main()
