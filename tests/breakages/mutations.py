"""Small mistakes, put into the library one at a time: which of them does `make test` notice?

`make mutations` runs all of them and prints the score; `ARGS="seed key"` those whose name contains one of these words. Each runs in a process of its own that reads
the changed code: first the test that noticed it last time (noticed_by.json), then the tests of its folder, all others, and the changed module's notebook, until something fails.
torch is loaded once, before. On two cores: about a quarter of an hour, and as much again for each mutation that no known test notices.
"""
import argparse, importlib.machinery, json, os, re, sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).parents[2]

EVERYDAY = "not slow and not browser and not mounts"
KNOWN = Path(__file__).with_name("noticed_by.json") # {name: test}
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
    "dropout repeats in every step": [("trainer", 'stable_seed(c.train.seed, "dropout", s.global_step, k * n + s.process)', 'stable_seed(c.train.seed, "dropout", k * n + s.process)')],
    "a step with an infinite gradient is made": [("training/optimizer", "torch.logical_not(ok).float()", "torch.logical_not(ok).float() * 0")],
    "the mean follows from the start at full decay": [("training/optimizer", "return min(self.decay, (1 + n) / (10 + n))", "return self.decay")],
    "mean and deviation of the levels exchanged": [("training/step", "train.logit_mean, train.logit_std, strata)", "train.logit_std, train.logit_mean, strata)")],
    "fixed shift without its logarithm": [("models/flow_matching", "math.log(shift)", "shift")],
    "accumulated batches weighed alike": [("trainer", "loss = loss * (count * n / group.samples)", "loss = loss / len(group)")],
    "weight decay not passed": [("training/optimizer", "kw = dict(lr=settings.lr, weight_decay=settings.weight_decay)", "kw = dict(lr=settings.lr)")],
    # --- batches
    "the epoch is not passed to the data set": [("data/batches", "        self.dataset.set_epoch(epoch)\n", "        pass\n")],
    "the same order in every epoch": [("data/batches", 'stable_seed(self.seed, self.epoch, "order")', 'stable_seed(self.seed, "order")')],
    "the position in an epoch is ignored": [("data/batches", "left = self.batches()[self.start:]", "left = self.batches()")],
    "mask of a sample without one is black": [("data/batches", "np.full_like(known, 255)", "np.full_like(known, 0)")],
    "controls stacked in reverse order": [("data/batches", 'sorted(names, key=lambda k: int(k.split(".")[1]))', "sorted(names, reverse=True)")],
    "padding counts as tokens": [("data/batches", "return out, (None if mask.all() else mask.bool())", "return out, None")],
    "strata of levels are ignored": [("models/flow_matching", "[(part + u) / parts for u", "[u for u")],
    "the same strata in every step": [("training/step", 'stable_seed(seed, "strata", step)', 'stable_seed(seed, "strata")')],
    "processes take the same batches": [("data/batches", "(r[self.rank:self.rank + 1] or [r[0][:1]])[0]", "r[0]")],
    "a foreign loader begins again on resume": [("training/step", "islice(iter(self.loader), state.position, None)", "iter(self.loader)")],
    "captions dropped for all samples at once": [("data/dataset", 'self.epoch, self.samples[i].id, "caption") / 2**63', 'self.epoch, "caption") / 2**63')],
    # --- samples and images
    "held out by sample": [("data/samples", "    first = _first_images(samples)\n", "    first = [s.id for s in samples]\n")],
    "the same pairs held out for every seed": [("data/samples", 'stable_seed(seed, d, "held out")', 'stable_seed(0, d, "held out")')],
    "trigger word put before prompts that have it": [("data/samples", "return prompt if re.search(", "return prompt if False and re.search(")],
    "captions dropped with the empty image set": [("data/dataset", 'out = dict(cached=tensors is not None, sample_id=s.id, prompt="" if drop else s.prompt', 'out = dict(cached=tensors is not None, sample_id=s.id, prompt=s.prompt')],
    "controls resized before encoding": [("data/samples", "control=[crop_to(c, geometry.aspect) for c in controls]", "control=[crop_to(c, geometry.aspect).resize(geometry.target(c.size)) for c in controls]")],
    "target resized with another filter": [("data/samples", "image.resize(geometry.target(image.size), Image.Resampling.LANCZOS)", "image.resize(geometry.target(image.size), Image.Resampling.BICUBIC)")],
    "a changed file goes unnoticed": [("data/samples", "if digest and source_digest(data) != digest:", "if False:")],
    "mask resized without averaging": [("data/samples", "Image.Resampling.BOX", "Image.Resampling.NEAREST")],
    "held-out share rounded down": [("data/samples", "max(1, round(len(groups) * fraction))", "max(1, int(len(groups) * fraction))")],
    "tall images cropped at the top": [("data/images", "x, y = (w - cw) // 2, (h - ch) // 2", "x, y = (w - cw) // 2, 0")],
    # --- cache keys
    "prompts keyed in lower case": [("cache", 'prompt=prompt if prompt.strip() else " "', 'prompt=prompt.lower() if prompt.strip() else " "')],
    "latents keyed without the crop": [("cache", "crop=list(crop) if crop else None", "crop=None")],
    "prompts keyed without the crop": [("cache", "crop=list(crop) if crop and controls else None", "crop=None")],
    "prompts keyed without the images' sizes": [("cache", "vl_sizes=[list(s) for s in vl_sizes]", "vl_sizes=[]")],
    "latents keyed without the dtype": [("cache", 'vae=identity["vae"], dtype=identity["dtype"])', 'vae=identity["vae"])')],
    "controls keyed as a set": [("cache", "controls=list(controls)", "controls=sorted(controls)")],
    "a suffix without its lost prefix": [("cache", "return None if prefix is None else torch.cat", "return tensor if prefix is None else torch.cat")],
    "a quantized text encoder under the same key": [("models/components", "f\"{text}-{self.quantize.get('text_encoder') or 'plain'}\"", "text")],
    # --- encoding and packing
    "latents sampled instead of their mode": [("encoding/vae", ".latent_dist.mode()", ".latent_dist.sample()")],
    "latents not normalised by the deviation": [("encoding/vae", "return (z - mean) / std", "return z - mean")],
    "latent pixels packed by columns": [("models/flow_matching", ".permute(0, 2, 4, 1, 3, 5)", ".permute(0, 2, 4, 1, 5, 3)"), ("models/flow_matching", ".permute(0, 3, 1, 4, 2, 5)", ".permute(0, 3, 1, 5, 2, 4)")],
    "a prefix kept after its images changed": [("encoding/encoder", "if self._last_prefix[0] != known_by:", "if self._last_prefix[1] is None:")],
    "a prefix known by its pixels alone": [("encoding/encoder", "repr(p.size).encode() + p.tobytes()", "p.tobytes()")],
    "prompts after a prefix at its length": [("encoding/prompts", "torch.arange(prefix.next, prefix.next + n", "torch.arange(prefix.count, prefix.count + n")],
    "a suffix with its padding": [("encoding/prompts", "return [h[:len(r)]", "return [h")],
    "the control's size for the target": [("encoding/encoder", 'if name == "pixel_latent": size = target', 'if name == "pixel_latent": size = controls[0] if controls else target')],
    "decoded pixels not rounded": [("encoding/vae", "* 255).round().astype(", "* 255).astype(")],
    "all controls in the group of the first": [("encoding/encoder", 'size = controls[int(name.split(".")[1])]', "size = controls[0]")],
    # --- precompute
    "an error in one sample skips its group": [("encoding/precompute", "if len(missing) > 1:", "if False:")],
    "processes encode the same samples": [("encoding/precompute", "return work[rank::world]", "return work")],
    "entries reused without a look": [("encoding/precompute", "for entry in dataset.keys(i).values() if verify else ():", "for entry in ():")],
    "space counted without the table": [("encoding/precompute", "sizes = detect_environment().free_space(folder), block_size(folder), [*entries, *table]", "sizes = detect_environment().free_space(folder), block_size(folder), [*entries]")],
    "strict ignored in precompute": [("encoding/precompute", "            if dataset.config.strict: raise\n", "")],
    "validation pairs not precomputed": [("training/run_data", "if c.train.val_path and whole:", "if False:")],
    # --- evaluation
    "held-out loss in training mode": [("sampling/cached_edits", "    transformer.eval()\n", "    pass\n")],
    "the transformer stays in evaluation mode": [("sampling/cached_edits", "finally: transformer.train(was)", "finally: pass")],
    "the LoRA for few steps stays": [("evaluation/eval_images", "finally: remove_loras(transformer, [name])", "finally: pass")],
    "few steps without the trained adapter": [("evaluation/eval_images", "before | {name: 1.0}", "{name: 1.0}")],
    "few steps with the model's schedule": [("evaluation/eval_images", "overrides=sampling.overrides", "overrides={}")],
    "held-out noise of one draw": [("evaluation/validation_loss", 'stable_seed("held out noise", i, draw)', 'stable_seed("held out noise", i)')],
    "held-out levels of one pair": [("evaluation/validation_loss", 'stable_seed("held out level", sample_id, draw, k)', 'stable_seed("held out level", draw, k)')],
    "levels weighed alike": [("evaluation/validation_loss", "    return sigma**2 * s /", "    return 0 * sigma + s /")],
    "interval of a normal distribution": [("evaluation/validation_loss", "margin = t_quantile(n - 1) *", "margin = 1.96 *")],
    "evaluation trains the raw weights": [("evaluation/evaluate", "with trainer.ema_weights(), temporarily_load", "with temporarily_load")],
    "distance of an image from its control": [("evaluation/eval_images", "image_error(image, target)", "image_error(image, case.shown[0])")],
    "drift of the target": [("evaluation/eval_images", "drift_of(image, case.control, target, case.pair)", "drift_of(image, case.shown[-1], target, case.pair)")],
    "drift outside and inside exchanged": [("evaluation/drift", "changed_region(at_size(control, target), target))", "~changed_region(at_size(control, target), target))")],
    "swap test with the adapter": [("evaluation/swaps", "off = nullcontext if use_lora else", "off = nullcontext if not use_lora else")],
    "exchanged with the same control": [("evaluation/validation_loss", "for j, d in group[k + 1:] + group[:k] if d != digest]", "for j, d in group[k + 1:] + group[:k]]")],
    # --- sampling
    "guidance without the norm": [("models/flow_matching", "    return comb * (torch.norm(cond, dim=-1, keepdim=True) / torch.norm(comb, dim=-1, keepdim=True))", "    return comb")],
    "negative prompt of the first edit": [("sampling/edits", "text(k, e.negative) if guidance", "text(k, edits[0].negative) if guidance")],
    "generator of the caller not used": [("sampling/denoising", "g = generator or torch", "g = torch")],
    "shift without the overrides": [("sampling/denoising", "mu=calculate_mu(tokens, own.config)", "mu=calculate_mu(tokens, config)")],
    "predict crops": [("predict", "_converter(output_type), replace(self.geometry(), crop=False)", "_converter(output_type), self.geometry()")],
    # --- checkpoints
    "generator not restored": [("training/resume", "    if saved.rng is not None: torch.set_rng_state(saved.rng)\n", "")],
    "settings of the optimizer stay the old ones": [("training/resume", "group.update(settings)", "pass")],
    "the best loss forgotten": [("training/resume", 'was.get("best") and tuple(was["best"]), True', "None, True")],
    "the mean restored from the raw weights": [("training/resume", "        put_back(tr, load_file(file))\n", "")],
    # --- planning and placement
    "gradients left out of the plan": [("planning/training_memory", '("gradients", share * trained * 4', '("gradients", share * trained * 0')],
    "checkpointing ignores the batch": [("planning/training_memory", "total, one = Saved(), (img + txt) * q.dim * q.base_bytes", "total, one = Saved(), (img + txt) // q.batch * q.dim * q.base_bytes")],
    "the runtime left out of the plan": [("planning/training_memory", "if gpu: rows.append", "if False: rows.append")],
    "evaluation leaves the VAE on the GPU": [("devices/placement", "components.drop(*(n for n in names if n not in before))", "pass")],
    "memory reused before its copy": [("devices/block_swap", "        if t.is_cuda: t.record_stream(self.streams.side) # its memory must not be reused before the copy\n", "")],
    "a block computes before its copy": [("devices/block_swap", "    self.streams.wait(self.events[n % len(self.slots)])\n", "    pass\n")],
    "EMA left out of the plan": [("planning/training_memory", "if q.ema: rows.append", "if False: rows.append")],
    "the checkpoint being written left out": [("planning/disk_space", "(c.keep_checkpoints + best + 1) * one", "(c.keep_checkpoints + best) * one")],
    "held memory counted as taken": [("devices/placement", "free_device_bytes(d) + sum(sizes[n] for n in loaded if loaded[n] == d)", "free_device_bytes(d)")],
    "placed in training mode": [("devices/placement", "torch.device(choice.device)).eval()", "torch.device(choice.device))")],
    # --- pairs and drift
    "shift measured from the target to the control": [("data/alignment", "return p @ _matrix(t).T + t[:2]", "return p @ _matrix(t).T - t[:2]")],
    "rotation with the other sign": [("data/alignment", "return Alignment(*map(float, t[:4]), math.degrees(t[4]))", "return Alignment(*map(float, t[:4]), -math.degrees(t[4]))")],
    "scales of both directions exchanged": [("data/alignment", "return Alignment(*map(float, t[:4]), math.degrees(t[4]))", "return Alignment(*map(float, (t[0], t[1], t[3], t[2])), math.degrees(t[4]))")],
    "zoom is no misfit": [("data/alignment_check", "max(ZOOMED, 1 / side)", "1.")],
    "kept alignments known by the target alone": [("data/alignment_check", 'f"{source_digest(control)} {source_digest(target)}"', 'f"{source_digest(target)}"')],
    "inside and outside of the edit exchanged": [("evaluation/drift", "out, row = ~region, {}", "out, row, region = region, {}, ~region")],
    "detail of the target over that of the result": [("evaluation/drift", "detail(edited) / energy", "energy / detail(edited)")],
    "drift said of the targets' own": [("evaluation/drift", 'px, percent = notable(rows)\n', 'px, percent = notable(rows, "target")\n')],
    "edit masks inverted": [("data/edit_masks", ".clamp(max=1)).round()", ".clamp(max=1).neg() + 255).round()")],
    "edit masks keyed without the control": [("data/edit_masks", "return dict(target=target, control=control, **RULE)", "return dict(target=target, **RULE)")],
    "edit masks for samples with a mask image": [("data/dataset", 'self.config.edit_mask == "auto" and s.mask is None and', 'self.config.edit_mask == "auto" and')],
    "a diverging setup learns": [("evaluation/overfit", 'if loss > 2 - _LEARNS: return "too high"', 'if loss > 2 - _LEARNS: return "learns"')],
    # --- remote shards
    "a shard's digest is not checked": [("core/remote_shards", "if digest and h.hexdigest() != digest: raise _Damaged", "pass")],
    "the most recently used shard is deleted": [("core/remote_shards", "        return sorted(found)", "        return sorted(found, reverse=True)")],
    "local copies without a limit": [("core/remote_shards", "if total + size <= self.limit and", "if")],
    "deleted shards stay open": [("core/remote_shards", "if not os.fstat(f.fileno()).st_nlink: self.open_files.pop(k).close()", "pass")],
    "a bad local copy is not fetched again": [("core/cache_layers", "        if not layer.renew(kind, key): raise", "        raise")],
    "an index is known by its URL alone": [("core/remote_shards", 'facts = {k: v for k, v in found[INDEX].items() if k != "name"}', "facts = {}")],
    "a look fetches shards": [("core/cache_layers", "return ShardStore.payload(self, kind, key)[2]", "return self.payload(kind, key)[2]")],
    "passwords in messages": [("core/remote_shards", "    text = re.sub(", "    re.sub(")],
    "matched grids ignore the setting": [("data/images", "if not self.match_grids: return", "if True: return")],
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


def run_in_child(changes, log, known="") -> int: # process id; `known`: the test to try first
    if pid := os.fork(): return pid
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1), os.dup2(out, 2)
    read_changed(changed_files(changes))
    import pytest
    code = 0
    own = [p for p in in_order(changes) if any(Path(p).stem == f"test_{Path(m).name}" for m, _, _ in changes)]
    for tests in ([known] if known and (ROOT/known.partition("::")[0]).is_file() else [], own, in_order(changes)):
        if tests and code in (0, 4, 5): # 4, 5: the known test has another name now
            code = int(pytest.main(["-x", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", f"{log}.tmp", "-m", EVERYDAY, *tests]))
    for module in {m for m, _, _ in changes} if not code else ():
        if notebook_passes(module, [c for c in changes if c[0] == module]): continue
        print(f"FAILED notebook of {module}", flush=True)
        code = 1
    os._exit(code)


def notebook_passes(module, changes) -> bool:
    "Run the module's notebook with the same changes in its exported cells, as nbdev_test does."
    import nbdev.test as runner
    from nbdev.config import get_config
    from nbdev.process import NBProcessor
    from execnb.nbio import read_nb
    source = (ROOT/"qie_nb"/f"{module}.py").read_text()
    path = (ROOT/"qie_nb"/f"{module}.py").parent/re.search(r"File to edit: (\S+)\.$", source, re.M)[1]
    nb = read_nb(path)
    for _, old, new in changes:
        found = [c for c in nb.cells if c.source.startswith("#| export") and old in c.source]
        assert len(found) == 1, f"{old!r} is in {len(found)} exported cells of {path.name}"
        found[0].source = found[0].source.replace(old, new)
    runner.NBProcessor = lambda fn, **kw: NBProcessor(fn, nb=nb, **kw)
    return runner.test_nb(path.resolve(), skip_flags=get_config().tst_flags.split())[0]


def judge(log, code) -> str: # the test that noticed it, or ""
    found = re.findall(r"^(?:FAILED|ERROR) (notebook of \S+|\S+)", Path(log).read_text(errors="replace"), re.M)
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
    known = json.loads(KNOWN.read_text()) if KNOWN.is_file() else {}
    folder, running, results, left = tempfile.mkdtemp(), {}, {}, list(enumerate(todo))
    while left or running:
        while left and len(running) < a.workers:
            n, name = left.pop(0)
            log = f"{folder}/{n}"
            running[run_in_child(MUTATIONS[name], log, known.get(name, ""))] = name, log, time.time()
        pid, status = os.wait()
        name, log, began = running.pop(pid)
        results[name] = judge(log, os.waitstatus_to_exitcode(status))
        if results[name].startswith("tests"): known[name] = results[name].partition("[")[0]
        KNOWN.write_text(json.dumps({n: known[n] for n in MUTATIONS if n in known}, indent=1) + "\n")
        print(f"{len(results)}/{len(todo)} {name}: {results[name] or 'SURVIVED'} ({time.time() - began:.0f} s)", flush=True)
    survived = [n for n, test in results.items() if not test]
    print(f"{len(results) - len(survived)} of {len(results)} mutations are noticed" + (f"; not: {'; '.join(survived)}" if survived else ""))
    return bool(survived)


if __name__ == "__main__": sys.exit(main())
