"""Run the notebooks that are committed with outputs, and write the outputs into them: `make outputs`.

A notebook's metadata keeps a key of its code (`key_of`), so that `make refresh` runs those again whose code changed; `make outputs` runs all.
Widgets keep their static form, images become JPEG, and temporary folders get one name. Cells with `#| cuda` or `#| eval: false` are not run.
The place notebooks run in the tests' imitations of Kaggle and Colab, which need Linux and `unshare`.
"""
import ast, base64, hashlib, io, json, os, re, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHAPTERS = ["nbs/index", "nbs/00_cache", "nbs/01_trainer", "nbs/02_predict", "nbs/03_logging", "nbs/04_cli"]
PLACES = ["kaggle/precompute/precompute", "kaggle/train/train", "kaggle/prequantize/prequantize", "kaggle/colab"]
LIMIT = 450_000 # bytes of a notebook
KEY = "outputs_of" # in a notebook's metadata; `allowed_metadata_keys` of settings.ini lets nbdev_clean keep it
SKIPPED = re.compile(r"^#\| *(cuda|eval: *false)", re.M)


def path_of(name) -> Path: return ROOT/f"{name}.ipynb"


def other_notebooks() -> list: # names
    "The notebooks of the library beside the chapters."
    found = [p.relative_to(ROOT).with_suffix("").as_posix() for p in (ROOT/"nbs").rglob("*.ipynb")]
    return sorted(name for name in found if name not in CHAPTERS)


PAGES = other_notebooks()


def module_of(nb:dict) -> str: # its text, "" without one
    "The module that a notebook exports."
    for cell in nb["cells"]:
        found = re.match(r"#\| *default_exp +(\S+)", "".join(cell["source"]))
        if found:
            return (ROOT/"qie_nb"/(found[1].replace(".", "/") + ".py")).read_text()
    return ""


def key_of(nb:dict) -> str:
    "A digest of what a notebook's outputs are made from: its code cells, and the module that it exports."
    cells = ["".join(c["source"]) for c in nb["cells"] if c["cell_type"] == "code"]
    return hashlib.sha256(json.dumps([*cells, module_of(nb)]).encode()).hexdigest()[:16]


def stale() -> list: # names
    "The notebooks whose code changed since their outputs were written."
    return [name for name in CHAPTERS + PAGES + PLACES if is_stale(notebook(name))]


def is_stale(nb:dict) -> bool:
    "Was its code changed since its outputs were written?"
    return nb["metadata"].get(KEY) != key_of(nb)


def notebook(name:str) -> dict:
    "A committed notebook as JSON."
    return json.loads(path_of(name).read_text())


def has_value(source:str) -> bool:
    "Does a cell end in an expression that is no call (calls may return None)? It has an output, then."
    if re.search(r"^#\| *(export|hide)", source, re.M) or SKIPPED.search(source):
        return False
    body = ast.parse(re.sub(r"^[%!].*", "", source, flags=re.M)).body
    return bool(body) and isinstance(body[-1], ast.Expr) and not isinstance(body[-1].value, ast.Call)


def run(name:str) -> dict:
    "Runs a notebook. Returns it as JSON with its new outputs; raises the error of the first cell that fails."
    import nbformat
    with tempfile.TemporaryDirectory() as folder:
        if name in PLACES:
            return in_its_place(name, Path(folder))
        return in_a_kernel(nbformat.read(path_of(name), 4), Path(folder))


def execute(name:str) -> dict:
    "A committed notebook as JSON, with the new outputs of a run; a page beside the chapters shows no warnings."
    nb = notebook(name)
    for cell, other in zip(nb["cells"], run(name)["cells"], strict=True):
        if cell["cell_type"] == "code":
            shown = [o for o in joined(other["outputs"]) if name not in PAGES or o.get("name") != "stderr"]
            cell["outputs"] = [tidy(o) for o in shown]
    return nb


def in_a_kernel(nb, folder) -> dict:
    from nbclient import NotebookClient
    os.environ["IN_TEST"] = "1" # the last cell does not export
    for cell in nb.cells:
        if cell.cell_type == "code" and SKIPPED.search(cell.source): cell.source = ""
    NotebookClient(nb, timeout=None, kernel_name="python3", resources=dict(metadata=dict(path=str(folder)))).execute()
    return nb


def in_its_place(name, folder) -> dict:
    sys.path.insert(0, str(ROOT/"tests"))
    from fake_kaggle import colab, kaggle, run_notebook
    (folder/"drive").mkdir()
    place = colab(folder, drive=folder/"drive") if name.endswith("colab") else kaggle(folder)
    run = run_notebook(path_of(name), place)
    if run.error: raise RuntimeError(f"{name}: {run.error}")
    return run.notebook


def text_of(value) -> str: return value if isinstance(value, str) else "".join(value)


def joined(outputs) -> list:
    "One stream output for what a cell printed without interruption."
    out = []
    for o in map(dict, outputs):
        if o["output_type"] == "stream" and out and out[-1].get("name") == o["name"]: out[-1]["text"] = text_of(out[-1]["text"]) + text_of(o["text"])
        else: out.append(o)
    return out


def jpeg(data:str, quality=72) -> str: # base64 of a PNG or JPEG
    from PIL import Image
    image, out = Image.open(io.BytesIO(base64.b64decode(data))), io.BytesIO()
    if image.mode != "RGB": image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    image.save(out, "JPEG", quality=quality)
    return base64.b64encode(out.getvalue()).decode()


def tidy(output) -> dict:
    "Static, small, and the same for every temporary folder."
    out = {k: v for k, v in output.items() if k != "execution_count"} | (dict(execution_count=None) if output["output_type"] == "execute_result" else {})
    if "text" in out: out["text"] = lines(out["text"])
    if "data" not in out: return out
    data, out["metadata"] = out["data"], {}
    picture = data.get("image/jpeg") or data.get("image/png")
    out["data"] = {kind: lines(v) for kind, v in data.items() if kind.startswith("text/")}
    if picture: out["data"]["image/jpeg"] = jpeg(text_of(picture))
    return out


def lines(text) -> list:
    text = text_of(text).replace(str(ROOT), "/repository").replace(sys.prefix, "/environment")
    text = re.sub(r"(<[^<>\n]*) at 0x[0-9a-fA-F]+>", r"\1>", text) # as nbdev_clean does
    text = re.sub(r"tmp([/_])tmp\w{8}", r"tmp\1folder", text) # also in names made from paths
    text = re.sub(r"data:image/png;base64,([\w+/=]+)", lambda m: "data:image/jpeg;base64," + jpeg(m[1]), text)
    return text.splitlines(keepends=True)


def main(names):
    known = CHAPTERS + PAGES + PLACES
    unknown = [n for n in names if n not in known]
    if unknown: sys.exit(f"there is no notebook {unknown[0]!r}; choose from: {', '.join(known)}")
    for name in names or known:
        nb = execute(name)
        nb["metadata"][KEY] = key_of(nb)
        text = json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        if len(text.encode()) > LIMIT: sys.exit(f"{name}: {len(text.encode()):,} bytes with outputs; at most {LIMIT:,} are committed, so show smaller images")
        path_of(name).write_text(text)
        print(f"{name}: {sum(bool(c.get('outputs')) for c in nb['cells'])} cells with outputs, {len(text.encode()):,} bytes", flush=True)


if __name__ == "__main__": main(sys.argv[1:])
