"""Host memory while two processes that `fit()` starts load a transformer of full size in nf4, without its modulation layers.

`python benchmarks/two_loads.py` reads random weights (synthetic_checkpoint.py) of the published shapes and writes results/two_loads.json.
On a machine with GPUs a layer leaves host memory when it is placed; here its numbers are dropped then. What stays in the host is asked every
20 ms: memory of all processes that no file can give back (RssAnon). Quantizing runs on the CPU, so its work memory counts too. `--together`
lets both processes load at the same time, to compare.
"""
import argparse, json, os, sys, tempfile, time
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
OUT = HERE/"results"/"two_loads.json"


class LeavesHost:
    "A placement: the numbers of a layer that is complete are dropped, as if they were on a GPU."
    def __init__(self): self.bytes = 0
    def device(self, name): return "cpu"
    def prepare(self, model): pass
    def finish(self, model): return model
    def settle(self, model, owner):
        module = model.get_submodule(owner)
        parts = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(p.is_meta for p in parts): return
        self.bytes += sum(p.numel() * p.element_size() for p in parts)
        for p in parts: p.data = p.data.new_empty(0)
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None: state.absmax = None


def anonymous(pid) -> int:
    try: lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError: return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def load(job, notebook):
    "In a started process."
    import torch
    from synthetic_checkpoint import made_up
    from qie_nb.config import make_config
    from qie_nb.devices import edit_model
    times, placement = [], LeavesHost()
    parts = edit_model.EditModel(job["folder"], quantize=dict(transformer="nf4"))
    def without_modulation(model): # called when loading begins
        times.append(time.time())
        for block in model.transformer_blocks: block.img_mod = block.txt_mod = torch.nn.Identity()
    parts.prepare_empty("transformer", without_modulation)
    edit_model.weight_loader = lambda *_: placement
    parts.keep_weights_as(make_config())
    if job["together"]: edit_model.take_turns = nullcontext
    imported = anonymous(os.getpid())
    with made_up("cpu"):
        parts.get("transformer")
    notebook.send(done=dict(began=times[0], ended=time.time(), imported=imported, placed=placement.bytes))
    time.sleep(2)


def started():
    from qie_nb.devices.processes import run_started
    run_started(load)


def measure(folder, together) -> dict:
    from qie_nb.devices.processes import Processes
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    peak, done = 0, []
    with Processes("two_loads.started", dict(folder=str(folder), together=together), 2) as processes:
        for heard in processes.events():
            peak = max(peak, sum(anonymous(p.pid) for p in processes.all))
            if heard and "done" in heard[1]: done.append(heard[1]["done"])
    first, second = sorted(done, key=lambda d: d["ended"])
    return dict(peak_gb=peak / 1e9, libraries_gb=sum(d["imported"] for d in done) / 1e9, on_gpus_gb=[d["placed"] / 1e9 for d in done],
                seconds=second["ended"] - min(d["began"] for d in done), overlap_seconds=max(0., first["ended"] - second["began"]))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--blocks", type=int, default=60)
    p.add_argument("--together", action="store_true", help="both at the same time")
    a = p.parse_args()
    from precompute import about
    from synthetic_checkpoint import FULL, model_folder
    with tempfile.TemporaryDirectory() as tmp:
        folder = model_folder(Path(tmp)/"model", "2509", FULL | dict(num_layers=a.blocks))
        made = measure(folder, a.together)
    results = json.loads(OUT.read_text())["results"] if OUT.is_file() else {}
    results[f"{a.blocks} blocks, {'together' if a.together else 'one after the other'}"] = made
    print(json.dumps(made, indent=1))
    OUT.write_text(json.dumps(dict(made=datetime.now(timezone.utc).isoformat(timespec="seconds"), machine=about(), results=results), indent=1) + "\n")


if __name__ == "__main__": main()
