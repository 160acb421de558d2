"""Writes what ComfyUI says about the nodes of our workflows into tests/extras/comfyui_nodes.json.

`python tools/comfyui_nodes.py CHECKOUT --commit SHA` with a Python that has ComfyUI's requirements (`pip install -r CHECKOUT/requirements.txt` in a virtual
environment of its own; torchaudio and its frontend packages may be missing). Only facts are kept: names and types of inputs and outputs, limits, and the
choices of short lists. `benchmarks/comfyui.py` runs the nodes themselves.
"""
import argparse, asyncio, json, logging, os, re, sys, types
from datetime import date
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

from qie_nb.extras.comfyui_workflow import NODES, inputs_of

ROOT = Path(__file__).parent.parent
OUT = ROOT/"tests"/"extras"/"comfyui_nodes.json"


class Absent(types.ModuleType):
    "Stands for a package that ComfyUI imports and these nodes do not use."
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return MagicMock()


def stand_in(*names):
    for name in names:
        try: __import__(name)
        except ImportError:
            sys.modules[name] = Absent(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)


def load_nodes(checkout) -> dict: # {name: class}
    "ComfyUI's built-in nodes, on the CPU and without its server."
    stand_in("torchaudio", "torchaudio.functional", "torchaudio.transforms", "comfy_angle")
    sys.path.insert(0, str(Path(checkout).resolve()))
    os.chdir(checkout) # it looks for its folders here
    from comfy.cli_args import args
    args.cpu = True
    import server
    server.PromptServer.instance = MagicMock()
    logging.getLogger().setLevel(logging.CRITICAL)
    import nodes
    asyncio.run(nodes.init_builtin_extra_nodes())
    return nodes.NODE_CLASS_MAPPINGS


def facts(kind, node) -> dict:
    given = node.INPUT_TYPES()
    if hasattr(node, "define_schema"): # an input that grows, as ComfyMathExpression's, is resolved for the names that we use
        from comfy_api.latest import _io
        given, _, _ = _io.get_finalized_class_inputs(given, {name: 1 for name, _, _ in inputs_of(kind)})
    out = {}
    for need in ("required", "optional"):
        out[need] = {}
        for name, (of, *more) in given.get(need, {}).items():
            if name.startswith("values.") and name not in [n for n, _, _ in inputs_of(kind)]: continue # it grows up to values.z
            more = more[0] if more else {}
            choices = of if isinstance(of, list) else more.get("options") if of == "COMBO" else None
            files = name.endswith("_name") and name != "sampler_name" or name == "image" # lists of this installation
            row = dict(type="COMBO" if choices is not None else str(of)) | {k: more[k] for k in ("min", "max") if k in more}
            out[need][name] = row | (dict(choices=list(choices)) if choices and not files else {})
    return out | dict(outputs=list(node.RETURN_TYPES), is_output=bool(getattr(node, "OUTPUT_NODE", False)))


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("checkout", type=Path)
    p.add_argument("--commit", required=True)
    a = p.parse_args()
    version = re.search(r'"(.+)"', (a.checkout/"comfyui_version.py").read_text())[1]
    found = load_nodes(a.checkout)
    source = dict(project="ComfyUI", version=version, commit=a.commit, read=date.today().isoformat())
    OUT.write_text(json.dumps(dict(source=source, nodes={k: facts(k, found[k]) for k in NODES}), indent=1) + "\n")
    print(OUT, version, len(NODES), "nodes")
