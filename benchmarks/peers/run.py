"""Runs one trainer's own code in its own process, and measures it there. `compare.py` starts it with that trainer's Python.

`python run.py PEER ACTION job.json` calls a function of `PEER.py` and writes what was measured into the job's `result`.
"""
import functools, hashlib, importlib, importlib.abc, importlib.machinery, json, os, random, shutil, signal, sys, time
from pathlib import Path
from typing import NamedTuple


class Patch(NamedTuple):
    "A replacement in a peer's source while it is loaded; its files stay as they are."
    where: str  # module, or the end of a script's path
    old: str    # must be there
    new: str
    why: str


def apply(source, where, patches):
    "The source with all replacements made; one that no longer fits is an error."
    for p in patches:
        if p.where != where: continue
        if p.old not in source: raise LookupError(f"{where} has changed: it has no {p.old!r}; adapt the patch in benchmarks/peers/")
        source = source.replace(p.old, p.new)
    return source


class Patches(importlib.abc.MetaPathFinder):
    "Loads modules with their replacements."
    def __init__(self, patches): self.patches = patches
    def find_spec(self, name, path, target=None):
        if not any(p.where == name for p in self.patches): return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec: spec.loader = self.loader(spec.loader.name, spec.loader.path)
        return spec
    def loader(self, name, path):
        patches = self.patches
        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname): return compile(apply(self.get_source(fullname), fullname, patches), self.path, "exec")
        return Loader(name, path)


def run_script(path, argv, patches=()):
    "Run a script as `python path argv` does, with its replacements."
    source = apply(Path(path).read_text(), Path(path).name, patches)
    sys.argv = [str(path), *map(str, argv)]
    exec(compile(source, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})


def run_module(name, argv):
    "Run a module's `main` as `python -m name argv` does."
    sys.argv = [name, *map(str, argv)]
    importlib.import_module(name).main()


# --- what is measured in a training process
def memory(field): return next(int(r.split()[1]) * 1024 for r in Path("/proc/self/status").read_text().splitlines() if r.startswith(field))


def pack(x):
    "[..., 16, h, w] latents as tokens of 64 channels, as the pipeline packs them; tokens stay as they are."
    if x.ndim == 3: return x
    x = x.reshape(1, 16, *x.shape[-2:])
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h // 2 * (w // 2), c * 4)


class Meter:
    """Counts a process's optimizer steps by torch's own hook: CPU seconds, peak memory, one recorded step.

    `warm` steps come first. With `turns`, a pair of file descriptors, the process then waits at each step's end for the number of steps to do next.
    `fresh` is for a trainer that encodes control images in its steps: the CPU seconds of that."""
    def __init__(self, job):
        self.job, self.n, self.quota, self.case, self.encoded = job, 0, 0, {}, 0
        self.cpu = self.wall = self.fresh = 0.
    def start(self):
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook
        register_optimizer_step_post_hook(lambda *a: self.after_step())
        if self.job.get("case"): self.record(torch)
        from transformers import Qwen2_5_VLModel
        real = Qwen2_5_VLModel.forward
        def forward(model, *a, **kw):
            self.encoded += 1
            return real(model, *a, **kw)
        Qwen2_5_VLModel.forward = forward
    def record(self, torch):
        "The first step's noise, prediction and target, as they pass through torch."
        kept, real_loss = [], torch.nn.functional.mse_loss
        def watched(fn):
            def inner(*a, **kw):
                out = fn(*a, **kw)
                if self.n == 0 and hasattr(out, "numel"): kept.append(out)
                return out
            return inner
        torch.randn, torch.randn_like = watched(torch.randn), watched(torch.randn_like)
        self.kept = kept
        def mse_loss(pred, target, *a, **kw):
            self.predicted(pred, target)
            return real_loss(pred, target, *a, **kw)
        torch.nn.functional.mse_loss = mse_loss
    def predicted(self, pred, target):
        "What the loss compares; torch's `mse_loss` tells it by itself."
        if self.n or "pred" in self.case or not self.job.get("case"): return
        noise = next(x for x in reversed(self.kept) if x.numel() == target.numel())
        self.case |= dict(pred=pack(pred), target=pack(target), noise=pack(noise))
    def watch(self, transformer):
        "Look at the arguments of each call of a class with the arguments of diffusers' transformer."
        real = transformer.forward
        @functools.wraps(real)
        def forward(model, *a, **kw):
            embeds, mask = kw["encoder_hidden_states"], kw.get("encoder_hidden_states_mask")
            self.seen(kw["hidden_states"], kw["timestep"], embeds if mask is None else embeds[mask.bool()][None])
            return real(model, *a, **kw)
        transformer.forward = forward
    def seen(self, tokens, sigma, embeds):
        "What the transformer got: target and control tokens, timestep / 1000, prompt embedding."
        if self.n == 0 and self.job.get("case"): self.case |= dict(tokens=tokens, sigma=sigma.reshape(-1)[:1], embeds=embeds)
    def after_step(self):
        self.n += 1
        warm = self.job.get("warm", 2)
        if self.n == 1 and self.job.get("case"):
            from safetensors.torch import save_file
            save_file({k: v.detach().float().contiguous().clone() for k, v in self.case.items()}, self.job["case"])
            self.case = {}
        if self.n == warm:
            Path("/proc/self/clear_refs").write_text("5") # VmHWM begins anew
            self.cpu, self.wall, self.fresh = time.process_time(), time.perf_counter(), 0.
        if self.n == self.job.get("interrupt_after"): os.kill(os.getpid(), signal.SIGINT)
        if self.job.get("turns") and self.n >= warm: self.take_turns()
    def take_turns(self):
        read, write = self.job["turns"]
        if self.quota: self.quota -= 1
        if self.quota: return
        cpu, wall = time.process_time(), time.perf_counter() # work of other threads while we wait counts in the next turn
        os.write(write, (json.dumps(dict(cpu=cpu - self.cpu, wall=wall - self.wall, fresh=self.fresh, peak=memory("VmHWM"))) + "\n").encode())
        self.cpu, self.fresh = cpu, 0.
        order = os.read(read, 64).strip()
        if not order or order == b"stop": os._exit(0)
        self.quota, self.wall = int(order), time.perf_counter()


# --- actions
def cache_files(folder):
    "{path: digest} of the files below a folder, without those that hold no entries."
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def action_cache(peer, job):
    "Precompute into an empty cache, as often as `repeats` says with two pairs and with all; the difference is that of six samples."
    rows = []
    if job.get("repeats"): peer.cache(job | dict(pairs=job["few"], cache=f"{job['cache']}-0-{Path(job['few']).name}")) # loads the libraries; one caption for two images, read later
    for k in range(1, job.get("repeats", 0) + 1):
        took = []
        for pairs in (job["few"], job["pairs"]):
            trial = job | dict(pairs=pairs, cache=f"{job['cache']}-{k}-{Path(pairs).name}")
            began = time.process_time()
            peer.cache(trial)
            took.append(time.process_time() - began)
            shutil.rmtree(trial["cache"])
        rows.append((took[1] - took[0]) / job["difference"])
    peer.cache(job)
    files = [p for p in Path(job["cache"]).rglob("*") if p.is_file()]
    return dict(seconds_a_sample=rows, files=len(files), bytes=sum(p.stat().st_size for p in files))


def action_train(peer, job):
    meter = Meter(job)
    meter.start()
    before, failed = cache_files(job["cache"]), None
    try: peer.train(job, meter)
    except KeyboardInterrupt: pass
    except (Exception, SystemExit) as e:
        if job.get("may_fail"): failed = f"{type(e).__name__}: {e}"
        else: raise
    return dict(steps=meter.n, peak=memory("VmHWM"), failed=failed, encoded=meter.encoded, fresh=meter.fresh, cache_changed=cache_files(job["cache"]) != before)


def action_embeddings(peer, job):
    "Save the prompt embedding of each sample asked for."
    from safetensors.torch import save_file
    found = {str(i): peer.embedding(job, i).float().reshape(-1, job["text"]).contiguous() for i in job["samples"]}
    save_file(found, job["out"])
    return dict(lengths={k: len(v) for k, v in found.items()})


def action_damage(peer, job):
    "Flip two bytes in the middle of the first sample's target latent."
    import torch
    path, tensor = peer.latent(job, 0)
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    whole = bytearray(Path(path).read_bytes())
    at = whole.find(data)
    assert at >= 0, "the latent's bytes were not found in its file"
    for k in (at + len(data) // 2 + 1, at + len(data) // 2 + 3): whole[k] ^= 0x40
    Path(path).write_bytes(whole)
    return dict(file=str(Path(path).relative_to(job["cache"])))


def main(name, action, job):
    job = json.loads(Path(job).read_text())
    sys.path[:0] = [str(Path(__file__).parent), *job.get("path", ())]
    peer = importlib.import_module(f"peer_{name}")
    sys.meta_path.insert(0, Patches(peer.patches(job)))
    import numpy as np, torch
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed): seed(job.get("seed", 0))
    result = globals()[f"action_{action}"](peer, job)
    Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    sys.modules["run"] = sys.modules["__main__"]
    main(*sys.argv[1:])
