"""The question that is asked first: train without a cache, fill it on the way, or precompute? Time, memory and bytes, side by side.

`make bench-modes` trains the embedded model on the CPU in each way, in a process of its own, and writes results/modes.json and a table.
`--full` takes random weights of full size on a GPU (1024 x 1024, benchmarks/synthetic_checkpoint.py) instead.
"""
import argparse, json, os, platform, subprocess, sys, tempfile, threading, time
from contextlib import nullcontext
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
OUT = Path(__file__).parent/"results"/"modes.json"
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors")
MODES = ("uncached", "lazy", "precomputed")


class Peak:
    "Within, the largest anonymous memory of this process over what it was, looked at every five milliseconds; on a GPU what torch allocated."
    def __init__(self, gpu): self.gpu, self.on, self.most = gpu, True, 0
    def now(self):
        if self.gpu: import torch; return torch.cuda.max_memory_allocated()
        if not Path("/proc/self/status").exists(): import psutil; return psutil.Process().memory_info().rss
        return 1024 * next(int(r.split()[1]) for r in Path("/proc/self/status").read_text().splitlines() if r.startswith("RssAnon"))
    def __enter__(self):
        self.base = 0 if self.gpu else self.now()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self
    def watch(self):
        while self.on: self.most = max(self.most, self.now()); time.sleep(0.005)
    def __exit__(self, *exc): self.on = False; self.thread.join()
    @property
    def bytes(self): return max(self.most, self.now()) - self.base


def configuration(root, mode, a):
    if a.full:
        base = dict(model=dict(pretrained_model_name_or_path=str(root/"model"), lora=dict(r=16, lora_alpha=16)), data=dict(dataset_path=str(root/"data"), image_size=[1024, 1024], batch_size=1),
                    train=dict(device="cuda", mixed_precision="bf16", gradient_checkpointing=True), optimizer={}, lr_scheduler={})
    else:
        from qie_nb.tiny.photos import demo_config
        base = demo_config(root, 1)
        del base["train"]["val_path"], base["train"]["max_train_steps"], base["train"]["eval_steps"]
    base["train"] |= dict(output_dir=str(root/mode), num_epochs=a.epochs, save_interval=0, eval_interval=0, val_fraction=0)
    base["lr_scheduler"] = dict(scheduler_type="constant")
    return base | dict(cache=dict(cache_dir=str(root/f"cache-{mode}"), use_cache=mode != "uncached"),
                       logging=dict(log_dir=str(root/"runs"), report_to="none", log_every=10**6, log_images=False, panel=False))


class Epochs:
    "A callback that takes the time of each epoch."
    def __init__(self): self.at, self.steps = [], 0
    def prepare(self, t): pass
    def on_train_begin(self, t): self.at.append(time.perf_counter())
    def on_step_end(self, t): self.steps += 1
    def on_epoch_end(self, t):
        if t.device.type == "cuda": import torch; torch.cuda.synchronize()
        self.at.append(time.perf_counter())
    def on_train_end(self, t): pass


def child(root, mode, a):
    "One way of training, in this process."
    import diffusers, peft, torch, transformers # noqa: F401, before memory is measured
    from qie_nb.trainer import QwenImageEditTrainer
    if not a.full: torch.set_num_threads(1)
    def trainer(*callbacks):
        t = QwenImageEditTrainer(configuration(root, mode, a), callbacks)
        if a.full: t.components.prepare_empty("text_encoder", lambda model: None)
        return t
    epochs, out = Epochs(), {}
    if a.full: from made_up import made_up
    with made_up("cuda") if a.full else nullcontext(), Peak(a.full) as peak:
        if mode == "precomputed":
            began = time.perf_counter()
            trainer().cache_embeddings()
            out = dict(precompute_s=round(time.perf_counter() - began, 2), precompute_peak_MB=round(peak.bytes / 1e6, 1))
            if a.full: torch.cuda.reset_peak_memory_stats()
            peak.most = 0
        t = trainer(epochs).fit()
    each = [b - a for a, b in zip(epochs.at, epochs.at[1:])]
    per = epochs.steps // len(each)
    cache = root/f"cache-{mode}"
    held = sum(p.stat().st_size for p in cache.rglob("*") if p.is_file() and "modulation" not in p.parts) if cache.exists() else 0
    rows = sum(p.stat().st_size for p in cache.rglob("*.safetensors") if "modulation" in p.parts) if cache.exists() else 0
    return out | dict(epochs_s=[round(s, 3) for s in each], steps_an_epoch=per, first_epoch_step_s=round(each[0] / per, 4), later_step_s=round(sum(each[1:]) / len(each[1:]) / per, 4),
                      peak_MB=round(peak.bytes / 1e6, 1), cache_bytes=held, modulation_table_bytes=rows, encoders_left=sorted(k for k in ("vae", "text_encoder") if k in t.components.loaded))


def about(a):
    cpu = next((r.split(":")[1].strip() for r in Path("/proc/cpuinfo").read_text().splitlines() if r.startswith("model name")), "") if Path("/proc/cpuinfo").exists() else platform.processor()
    device = f"{cpu}, {os.cpu_count()} cores" + ("" if a.full else ", one thread used")
    if a.full: import torch; device = f"{torch.cuda.get_device_name()}; {device}"
    return dict(device=device, versions=dict(python=platform.python_version()) | {p: version(p) for p in LIBRARIES}, date=datetime.now(timezone.utc).isoformat(timespec="seconds"))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--pairs", type=int, default=24)
    p.add_argument("--epochs", type=int, default=3, help="2 at least")
    p.add_argument("--full", action="store_true", help="random weights of full size, on a GPU")
    p.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    p.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--out", type=Path, default=OUT)
    a = p.parse_args()
    if a.epochs < 2: p.error("--epochs must be 2 or more, for the first and the later ones")
    if a.child: return print("RESULT " + json.dumps(child(a.root, a.child, a)))
    rows = {}
    with tempfile.TemporaryDirectory() as tmp:
        root = Path(tmp)
        if a.full:
            from synthetic_checkpoint import FULL, model_folder
            from precompute import make_pairs
            model_folder(root/"model", "2509", FULL, encoders=True)
            make_pairs(root/"data", a.pairs, 1024)
        else:
            from qie_nb.tiny.photos import write_pairs
            write_pairs(root, a.pairs, 1)
        for mode in MODES:
            run = subprocess.run([sys.executable, __file__, "--child", mode, "--root", str(root), "--epochs", str(a.epochs)] + ["--full"] * a.full, capture_output=True, text=True)
            said = [r for r in run.stdout.splitlines() if r.startswith("RESULT ")]
            rows[mode] = json.loads(said[0][7:]) if said else dict(failed=run.stderr[-500:])
            print(mode, rows[mode], flush=True)
    result = json.loads(a.out.read_text()) if a.out.is_file() else {}
    result["full" if a.full else "embedded"] = about(a) | dict(pairs=a.pairs, epochs=a.epochs, load_average=round(os.getloadavg()[0], 2), rows=rows)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(result, indent=1) + "\n")
    from table import modes_table
    print(modes_table(result))


if __name__ == "__main__": main()
