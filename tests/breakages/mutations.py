"""Small mistakes, put into the library one at a time: which of them do the everyday tests notice?

`make mutations` runs all of them and prints the score; `ARGS="seed key"` those whose name contains one of these words. Each runs in a process of its own that reads
the changed code: first the tests of its folder, then all others, until one fails. torch is loaded once, before. On two cores: about half an hour.
"""
import argparse, importlib.machinery, os, re, sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).parents[2]

EVERYDAY = "not slow and not browser and not mounts"
MUTATIONS = { # name: [(module, old, new), ...]
    # --- step
    "same noise in every epoch": [("training/step", "return [stable_seed(seed, epoch, i) for i in ids]", "return [stable_seed(seed, i) for i in ids]")],
    "same noise for all samples of an epoch": [("training/step", "return [stable_seed(seed, epoch, i) for i in ids]", "return [stable_seed(seed, epoch) for i in ids]")],
    "same noise in every step of a foreign loader": [("training/step", 'stable_seed(seed, "step", step, i)', 'stable_seed(seed, "step", i)')],
    "one noise level for a batch": [("models/flow_matching", "lambda g: draw((), generator=g)) for seed in seeds])", "lambda g: draw((), generator=g)) for seed in [seeds[0]] * len(seeds)])")],
    "noise and level from the same numbers": [("models/flow_matching", "0x7369676D61", "0x6E6F697365")],
    "shift by the unpacked tokens": [("training/step", "flow.calculate_mu(shape[-2] * shape[-1] // 4, scheduler_config)", "flow.calculate_mu(shape[-2] * shape[-1], scheduler_config)")],
    "shift ignores the size": [("training/step", "flow.calculate_mu(shape[-2] * shape[-1] // 4, scheduler_config)", "flow.calculate_mu(256, scheduler_config)")],
    "timestep not divided by 1000": [("models/flow_matching", "times = timesteps.to(x_t.dtype) / 1000", "times = timesteps.to(x_t.dtype)")],
    "continuous levels rounded": [("training/step", "steps = None if train.continuous_timesteps else 1000", "steps = 1000")],
    "weights by the level of the first sample": [("training/step", "loss * flow.level_weights(sigma, weighting)", "loss * flow.level_weights(sigma[:1], weighting)")],
    "mask inverted": [("models/flow_matching", "w = 1 - (1 - background) * (1 - mask.float())", "w = 1 - (1 - background) * mask.float()")],
    "parts of a batch joined in their own order": [("trainer", "return torch.stack([losses[i] for i in range(len(eps))])", "return torch.stack(list(losses.values()))")],
    "gradients never clipped": [("trainer", 'c.train.max_grad_norm or float("inf")', 'float("inf")')],
    "gradients of accumulated batches averaged twice": [("trainer", "if count * n != group.samples: loss", "if True: loss"), ("trainer", "loss = loss * (count * n / group.samples)", "loss = loss * (count * n / group.samples) / len(group)")],
    "dropout repeats in every step": [("trainer", 'stable_seed(c.train.seed, "dropout", s.global_step, s.process)', 'stable_seed(c.train.seed, "dropout", s.process)')],
    "a step with an infinite gradient is made": [("training/optimizer", "torch.logical_not(ok).float()", "torch.logical_not(ok).float() * 0")],
    "the mean follows from the start at full decay": [("training/optimizer", "return min(self.decay, (1 + n) / (10 + n))", "return self.decay")],
    # --- batches
    "the epoch is not passed to the data set": [("data/batches", "        self.dataset.set_epoch(epoch)\n", "        pass\n")],
    "the same order in every epoch": [("data/batches", 'stable_seed(self.seed, self.epoch, "order")', 'stable_seed(self.seed, "order")')],
    "the position in an epoch is ignored": [("data/batches", "for b in self.batches()[self.start:]])\n    def counts", "for b in self.batches()])\n    def counts")],
    "mask of a sample without one is black": [("data/batches", "np.full_like(known, 255)", "np.full_like(known, 0)")],
    "controls stacked in the order of their names": [("data/batches", 'sorted(names, key=lambda k: int(k.split(".")[1]))', "sorted(names)")],
    "padding counts as tokens": [("data/batches", "return out, (None if mask.all() else mask.bool())", "return out, None")],
    # --- samples and images
    "held out by sample": [("data/samples", "    first = _first_images(samples)\n", "    first = [s.id for s in samples]\n")],
    "the same pairs held out for every seed": [("data/samples", 'stable_seed(seed, d, "held out")', 'stable_seed(0, d, "held out")')],
    "trigger word put before prompts that have it": [("data/samples", "return prompt if re.search(", "return prompt if False and re.search(")],
    "captions dropped with the empty image set": [("data/dataset", 'out = dict(cached=tensors is not None, sample_id=s.id, prompt="" if drop else s.prompt', 'out = dict(cached=tensors is not None, sample_id=s.id, prompt=s.prompt')],
    "controls resized before encoding": [("data/samples", "control=[crop_to(c, geometry.aspect) for c in controls]", "control=[crop_to(c, geometry.aspect).resize(geometry.target(c.size)) for c in controls]")],
    "target resized with another filter": [("data/samples", "image.resize(geometry.target(image.size), Image.Resampling.LANCZOS)", "image.resize(geometry.target(image.size), Image.Resampling.BICUBIC)")],
    "a changed file goes unnoticed": [("data/samples", "if digest and source_digest(data) != digest:", "if False:")],
    # --- cache keys
    "prompts keyed in lower case": [("cache", 'prompt=prompt if prompt.strip() else " "', 'prompt=prompt.lower() if prompt.strip() else " "')],
    "latents keyed without the crop": [("cache", "crop=list(crop) if crop else None", "crop=None")],
    "prompts keyed without the crop": [("cache", "crop=list(crop) if crop and controls else None", "crop=None")],
    "prompts keyed without the images' sizes": [("cache", "vl_sizes=[list(s) for s in vl_sizes]", "vl_sizes=[]")],
    "latents keyed without the dtype": [("cache", 'vae=identity["vae"], dtype=identity["dtype"])', 'vae=identity["vae"])')],
    "controls keyed as a set": [("cache", "controls=list(controls)", "controls=sorted(controls)")],
    # --- encoding and packing
    "latents sampled instead of their mode": [("encoding/vae", ".latent_dist.mode()", ".latent_dist.sample()")],
    "latents not normalised by the deviation": [("encoding/vae", "return (z - mean) / std", "return z - mean")],
    "latent pixels packed by columns": [("models/flow_matching", ".permute(0, 2, 4, 1, 3, 5)", ".permute(0, 2, 4, 1, 5, 3)"), ("models/flow_matching", ".permute(0, 3, 1, 4, 2, 5)", ".permute(0, 3, 1, 5, 2, 4)")],
    "a prefix kept after its images changed": [("encoding/encoder", "if self._last_prefix[0] != known_by:", "if self._last_prefix[1] is None:")],
    "a prefix known by its pixels alone": [("encoding/encoder", "repr(p.size).encode() + p.tobytes()", "p.tobytes()")],
    "prompts after a prefix at its length": [("encoding/prompts", "torch.arange(prefix.next, prefix.next + n", "torch.arange(prefix.count, prefix.count + n")],
    "a suffix with its padding": [("encoding/prompts", "return [h[:len(r)]", "return [h")],
    "the control's size for the target": [("encoding/encoder", 'if name == "pixel_latent": size = target', 'if name == "pixel_latent": size = controls[0] if controls else target')],
    # --- precompute
    "an error in one sample skips its group": [("encoding/precompute", "if len(missing) > 1:", "if False:")],
    "processes encode the same samples": [("encoding/precompute", "return work[rank::world]", "return work")],
    "entries reused without a look": [("encoding/precompute", "for entry in dataset.keys(i).values() if verify else ():", "for entry in ():")],
    "space counted without the table": [("encoding/precompute", "sizes = detect_environment().free_space(folder), block_size(folder), [*entries, *table]", "sizes = detect_environment().free_space(folder), block_size(folder), [*entries]")],
    # --- evaluation
    "held-out loss in training mode": [("sampling/cached_edits", "    transformer.eval()\n", "    pass\n")],
    "the transformer stays in evaluation mode": [("sampling/cached_edits", "finally: transformer.train(was)", "finally: pass")],
    "held-out noise of one draw": [("evaluation/validation_loss", 'stable_seed("held out noise", i, draw)', 'stable_seed("held out noise", i)')],
    "held-out levels of one pair": [("evaluation/validation_loss", 'stable_seed("held out level", sample_id, draw, k)', 'stable_seed("held out level", draw, k)')],
    "levels weighed alike": [("evaluation/validation_loss", "    return sigma**2 * s /", "    return 0 * sigma + s /")],
    "interval of a normal distribution": [("evaluation/validation_loss", "margin = t_quantile(n - 1) *", "margin = 1.96 *")],
    "evaluation trains the raw weights": [("evaluation/evaluate", "with trainer.ema_weights(), temporarily_load", "with temporarily_load")],
    # --- sampling
    "guidance without the norm": [("models/flow_matching", "    return comb * (torch.norm(cond, dim=-1, keepdim=True) / torch.norm(comb, dim=-1, keepdim=True))", "    return comb")],
    "negative prompt of the first edit": [("sampling/edits", "text(k, e.negative) if guidance", "text(k, edits[0].negative) if guidance")],
    "generator of the caller not used": [("sampling/denoising", "g = generator or torch", "g = torch")],
    # --- checkpoints
    "generator not restored": [("training/resume", "    if saved.rng is not None: torch.set_rng_state(saved.rng)\n", "")],
    # --- planning and placement
    "gradients left out of the plan": [("planning/training_memory", '("gradients", share * trained * 4', '("gradients", share * trained * 0')],
    "checkpointing ignores the batch": [("planning/training_memory", "total, one = Saved(), (img + txt) * q.dim * q.base_bytes", "total, one = Saved(), (img + txt) // q.batch * q.dim * q.base_bytes")],
    "the runtime left out of the plan": [("planning/training_memory", "if gpu: rows.append", "if False: rows.append")],
    "evaluation leaves the VAE on the GPU": [("devices/placement", "components.drop(*(n for n in names if n not in before))", "pass")],
    "memory reused before its copy": [("devices/block_swap", "        if t.is_cuda: t.record_stream(self.streams.side) # its memory must not be reused before the copy\n", "")],
    "a block computes before its copy": [("devices/block_swap", "    self.streams.wait(self.events[n % len(self.slots)])\n", "    pass\n")],
}


def changed_files(changes) -> dict: # {path: text}
    texts = {}
    for module, old, new in changes:
        path = str(ROOT/"qie_nb"/f"{module}.py")
        text = texts.get(path) or Path(path).read_text()
        assert text.count(old) == 1, f"{old!r} is in {module} {text.count(old)} times; update the mutation"
        texts[path] = text.replace(old, new)
    return texts


def read_changed(texts):
    "Let the import system read these texts, and no compiled file of theirs."
    loader = importlib.machinery.SourceFileLoader
    read, code = loader.get_data, loader.get_code
    loader.get_data = lambda self, path: texts[path].encode() if path in texts else read(self, path)
    loader.get_code = lambda self, name: compile(texts[self.path], self.path, "exec") if self.path in texts else code(self, name)


def in_order(changes) -> list: # test files, the changed module's own first
    modules = [Path(m) for m, _, _ in changes]
    def rank(path):
        own = any(path.stem == f"test_{m.name}" for m in modules)
        return 0 if own else 1 if any(path.parent.name == m.parent.name for m in modules) else 2 if path.parent.name == "parity" else 3
    return [str(p) for p in sorted(sorted((ROOT/"tests").rglob("test_*.py")), key=rank) if p.parent.name != "breakages"]


def run_in_child(changes, log) -> int: # process id
    if pid := os.fork(): return pid
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1), os.dup2(out, 2)
    read_changed(changed_files(changes))
    import pytest
    os._exit(int(pytest.main(["-x", "-q", "-rf", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", f"{log}.tmp", "-m", EVERYDAY, *in_order(changes)])))


def judge(log, code) -> str: # the test that noticed it, or ""
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", Path(log).read_text(errors="replace"), re.M)
    if code == 1 and found: return found[0]
    if code: raise SystemExit(f"the tests did not run: see {log}")
    return ""


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("words", nargs="*", help="only mutations whose name contains one of these")
    p.add_argument("--workers", type=int, default=2)
    a = p.parse_args()
    todo = [n for n in MUTATIONS if not a.words or any(w in n for w in a.words)]
    for n in todo: changed_files(MUTATIONS[n])
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT/"tests")]
    import diffusers, peft, pytest, torch, transformers # noqa: F401
    folder, running, results, left = tempfile.mkdtemp(), {}, {}, list(enumerate(todo))
    while left or running:
        while left and len(running) < a.workers:
            n, name = left.pop(0)
            log = f"{folder}/{n}"
            running[run_in_child(MUTATIONS[name], log)] = name, log, time.time()
        pid, status = os.wait()
        name, log, began = running.pop(pid)
        results[name] = judge(log, os.waitstatus_to_exitcode(status))
        print(f"{len(results)}/{len(todo)} {name}: {results[name] or 'SURVIVED'} ({time.time() - began:.0f} s)", flush=True)
    survived = [n for n, test in results.items() if not test]
    print(f"{len(results) - len(survived)} of {len(results)} mutations are noticed" + (f"; not: {'; '.join(survived)}" if survived else ""))
    return bool(survived)


if __name__ == "__main__": sys.exit(main())
