"""Fault injection for the cache: kills, damage, many processes, full disks, malformed files. Each case counts its trials and reports the worst."""
import argparse, builtins, collections, contextlib, ctypes, datetime, fractions, functools, hashlib, io, itertools, json, math, mmap
import os, pickle, platform, random, shutil, signal, struct, subprocess, sys, tempfile, time, traceback
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import qie_nb.encoding.prompts, qie_nb.models.components
from safetensors.torch import save
from qie_nb.core import files
from qie_nb.cache import CacheEntryError, EmbeddingCacheManager, image_parts, key_of, prefix_parts, prompt_parts
from qie_nb.core import cache_entries as entries
from qie_nb.core.cache_entries import ALL_KINDS, entry_bytes, unpack_entry
from qie_nb.core.cache_layers import FolderStore, _index_checksum, verify_entry
from qie_nb.core.files import file_digest
from qie_nb.data.dataset import ImageDataset, collate
from qie_nb.encoding.encoder import Encoder
from qie_nb.encoding.precompute import precompute
from qie_nb.lora.adapters import load_lora, lora_state
from qie_nb.models.components import Components
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.training.checkpoint import find_checkpoint

ROOT = Path(__file__).parent.parent
LATENTS, TEXTS = ("pixel_latent", "control_latent"), ("prompt_prefix", "prompt_embed", "prompt_embeds_mask", "empty_prompt_embed", "empty_prompt_embeds_mask")
SETTINGS = dict(image_size=[64, 64], caption_dropout_rate=0.1)


# --- counting
class NotRun(Exception): "A case that this machine does not allow."


class Tally:
    "Trials of one case: how many passed, and the failures."
    def __init__(self, case, of=0): self.case, self.of, self.trials, self.passed, self.failed, self.t0, self.last = case, of, 0, 0, [], time.time(), time.time()

    @contextlib.contextmanager
    def trial(self, name):
        self.trials += 1
        try:
            yield
            self.passed += 1
        except Exception as e:
            self.failed.append(f"{name}: {type(e).__name__}: {e}")
            if os.environ.get("FAULTS_TRACE"): traceback.print_exc(file=sys.__stderr__)
        if time.time() - self.last > 20: self.last = time.time(); print(f"  {self.case}: {self.trials}{f' of {self.of}' if self.of else ''}, {len(self.failed)} failed", flush=True)

    def result(self, worst) -> dict:
        for why in self.failed[:20]: print(f"  failed: {why}"[:600], flush=True)
        return dict(case=self.case, trials=self.trials, passed=self.passed, worst=f"{self.failed[0]}"[:600] if self.failed else worst, seconds=round(time.time() - self.t0, 1))


@contextlib.contextmanager
def quiet():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()): yield


@contextlib.contextmanager
def patched(*changes): # (object, name, value)
    old = [(o, n, getattr(o, n)) for o, n, _ in changes]
    for o, n, v in changes: setattr(o, n, v)
    try: yield
    finally:
        for o, n, v in reversed(old): setattr(o, n, v)


def sentence(e, *words):
    "Check that an error is of a kind that the command line prints without a traceback, has one line, and contains `words`."
    assert isinstance(e, (ValueError, OSError)), f"{type(e).__name__} is no sentence: {e}"
    assert str(e).strip() and "\n" not in str(e), f"not one line: {e}"
    for w in words: assert w in str(e), f"{w!r} is not in: {e}"


def refused(fn, *words):
    try: fn()
    except Exception as e: return sentence(e, *words)
    raise AssertionError("was not refused")


# --- a data set, a model in memory, and the cache of an undisturbed run
def picture(seed, size=(48, 32), path=None):
    im = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))
    if path: Path(path).parent.mkdir(parents=True, exist_ok=True); im.save(path)
    return im


def write_set(root, same=(0, 1, 2, 0, 4, 5), captions="abcdefgh"):
    "Pairs; sample i has the control image of sample same[i]."
    sizes = ((48, 32), (32, 48), (40, 40))
    for i, s in enumerate(same):
        picture(2 * s, sizes[s % 3], root/"control_images"/f"{i:04}.png")
        picture(2 * i + 1, sizes[i % 3], root/"training_images"/f"{i:04}.png")
        (root/"training_images"/f"{i:04}.txt").write_text(f"make it {captions[i]}")
    return root


@functools.lru_cache
def components(variant="2511", areas=(64*64, 64*64), seed=0, dtype=torch.float32):
    with quiet():
        c = Components(str(tiny_folder(variant, areas, seed)), dtype)
        for part in ("vae", "text_encoder", "processor"): c.get(part)
        c.identity()
    return c


def snapshot(cache) -> dict: # {path in the cache: bytes} of what counts as content
    cache = Path(cache)
    return {str(p.relative_to(cache)): p.read_bytes() for p in sorted(cache.rglob("*"))
            if p.is_file() and p.relative_to(cache).parts[0] in (*LATENTS, *TEXTS, "manifest.json") and not p.name.startswith(".")}


class World:
    def __init__(self, tmp, same=(0, 1, 2, 0, 4, 5), variant="2511", areas=(64*64, 64*64), **settings):
        self.tmp, self.settings, self.components = Path(tmp), SETTINGS | settings, components(variant, areas)
        self.root, self.n = write_set(self.tmp/"set", same), 0
        self.reference = self.tmp/"reference"
        self.report, self.calls = self.run(self.reference)
        self.files = snapshot(self.reference)
        self.entries = [(*p.split("/")[::2], self.files[p]) for p in self.files if "/" in p] # (kind, name.safetensors, bytes)
        self.entries = [(kind, name.removesuffix(".safetensors"), data) for kind, name, data in self.entries]
        assert len(self.entries) == self.report.tensors and {k for k, *_ in self.entries} == set(ALL_KINDS)
        self.piece = 4 * 7 # entries that one piece of work can have: four samples, seven kinds

    def folder(self, name="trial"):
        path = self.tmp/name
        if path.exists(): shutil.rmtree(path)
        return path

    def copy(self, name="trial"):
        return Path(shutil.copytree(self.reference, self.folder(name)))

    def dataset(self, cache, **settings):
        return ImageDataset(dict(dataset_path=str(self.root), cache_dir=cache if isinstance(cache, list) else str(cache)) | self.settings | settings)

    def run(self, cache, shared=None, at=0, ahead=4, **kw): # -> (Report, encoder calls)
        with quiet():
            dataset = self.dataset(cache)
            encoder = Encoder(self.components, dataset.cache, **kw)
            if shared: encoder.calls = Shared.Calls(shared, at, encoder.calls)
            return precompute(dataset, encoder, prefetch=ahead), dict(encoder.calls)

    def train(self, cache, model=None, **sections):
        from qie_nb.trainer import QwenImageEditTrainer
        config = dict(model=dict(pretrained_model_name_or_path=str(model or self.components.folder), lora=dict(r=2)),
                      data=dict(dataset_path=str(self.root)) | self.settings, cache=dict(cache_dir=cache),
                      train=dict(output_dir=str(self.folder("out")), device="cpu", mixed_precision="no", max_train_steps=3, save_interval=0, eval_interval=0),
                      logging=dict(log_dir=str(self.tmp/"runs"), report_to="none"))
        for k, v in sections.items(): config[k] = config[k] | v
        with quiet(): return QwenImageEditTrainer(config).fit()


# --- other processes
class Shared:
    "Sixty-four numbers that processes share; each writes its own."
    def __init__(self): self.m = mmap.mmap(-1, 64 * 8)
    def __getitem__(self, i): return struct.unpack_from("q", self.m, i * 8)[0]
    def __setitem__(self, i, v): struct.pack_into("q", self.m, i * 8, v)

    class Calls(dict):
        "An encoder's counts, seen from outside while they grow."
        def __init__(self, shared, at, old): self.shared, self.at = shared, at; super().__init__(old)
        def __setitem__(self, k, v): super().__setitem__(k, v); self.shared[self.at + 1 + list(self).index(k)] = v


def fork(job, log) -> int:
    "Run a job in a forked child."
    sys.stdout.flush(), sys.stderr.flush()
    if pid := os.fork(): return pid
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = open(1, "w", closefd=False)
        job()
        code = 0
    except BaseException: traceback.print_exc()
    finally:
        with contextlib.suppress(Exception): sys.stdout.flush()
        os._exit(code)


def child(job, log):
    "Run a job in a child, and wait for its success."
    assert os.waitpid(fork(job, log), 0)[1] == 0, log.read_text()[-2000:]


def child_value(job, log, opened=open): # what the job returns, as JSON
    out = log.with_suffix(".json")
    def run():
        data = json.dumps(job())
        with opened(out, "w") as f: f.write(data)
    child(run, log)
    return json.loads(out.read_text())


def wait(pids, seconds) -> dict: # {pid: status}; those that hang are killed and missing
    done, end = {}, time.time() + seconds
    while len(done) < len(pids) and time.time() < end:
        for p in set(pids) - done.keys():
            if (got := os.waitpid(p, os.WNOHANG))[0]: done[p] = got[1]
        time.sleep(0.002)
    for p in set(pids) - done.keys(): os.kill(p, signal.SIGKILL); os.waitpid(p, 0)
    return done


def counted(world, cache, shared, at=0, die_at=None, **kw):
    "In a child: precompute, with entries and encoder calls counted in shared memory; killed at its entry `die_at`, while it holds a lock."
    real = Encoder.save
    def keep(self, *a, **kw):
        shared[at] += 1
        if shared[at] == die_at: os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *a, **kw)
    Encoder.save = keep
    report, _ = world.run(cache, shared, at, **kw)
    shared[at + 4] = report.tensors + 1


class Written:
    "An open file that reports each write before it and at its middle."
    def __init__(self, f, path, tell): self._f, self._path, self._tell = f, path, tell
    def __getattr__(self, name): return getattr(self._f, name)
    def __enter__(self): return self
    def __exit__(self, *a): self._f.close()
    def write(self, data):
        self._tell("write", self._path)
        half = len(data) // 2
        self._f.write(data[:half]), self._f.flush()
        self._tell("half of a write", self._path)
        self._f.write(data[half:])
        return len(data)


def watch_operations(below, tell):
    "In a child: tell(what, path) before every write, in its middle, and before and after every fsync and rename below a folder."
    real_open, fsync, replace, below = io.open, os.fsync, os.replace, str(below)
    def open_(file, mode="r", *a, **kw):
        mine = set(mode) & set("wxa+") and str(file).startswith(below)
        if mine: tell("open", str(file))
        f = real_open(file, mode, *a, **kw)
        return Written(f, str(file), tell) if mine else f
    def fsync_(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.startswith(below): tell("fsync", path)
        fsync(fd)
    def replace_(src, dst, *a, **kw):
        mine = str(dst).startswith(below)
        if mine: tell("rename", f"{src}\t{dst}")
        replace(src, dst, *a, **kw)
        if mine: tell("renamed", f"{src}\t{dst}")
    builtins.open = io.open = open_
    os.fsync, os.replace, os.rename = fsync_, replace_, replace_


# --- kills
def after_a_kill(world, cache, shared, at=0) -> tuple: # (entries made again, images and prompts encoded again)
    "A killed precompute leaves complete entries; the next one does the rest, with the same bytes."
    there = snapshot(cache)
    wrong = [p for p, data in there.items() if world.files.get(p) != data]
    assert not wrong, f"{len(wrong)} files are not whole: {wrong[0]}"
    report, calls = world.run(cache)
    assert not report.skipped and not report.bad, str(report)
    again = shared[at] + report.tensors - len(world.entries)
    encoded = [shared[at + 1 + n] + calls[k] - world.calls[k] for n, k in enumerate(world.calls)]
    assert 0 <= again <= world.piece and max(encoded) <= 4, f"{again} entries made again, {encoded} images, prefixes, prompts"
    assert snapshot(cache) == world.files, "the final cache differs"
    left = [p for d in (".tmp", "quarantine") for p in (cache/d).glob("*") if (cache/d).is_dir()]
    assert not left or not report.tensors, f"left over: {left}"
    return again, sum(encoded)


def kills_at_random(world, trials, seed=0) -> dict:
    t, rng, worst, missed, lasts = Tally("precompute killed at a random moment", trials), random.Random(seed), (0, 0), 0, []
    for _ in range(2): # what an undisturbed one takes
        began = time.time()
        child(lambda: world.run(world.folder()), world.tmp/"log")
        lasts.append(time.time() - began)
    moments = []
    while t.trials < trials:
        cache, shared, moment = world.folder(), Shared(), rng.uniform(0, min(lasts) * 0.97 ** missed)
        pid = fork(lambda: counted(world, cache, shared), world.tmp/"log")
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]): missed += 1; continue # it was done already
        moments.append(shared[0])
        with t.trial(f"killed after {moment:.3f} s"): worst = max(worst, after_a_kill(world, cache, shared))
    return t.result(f"{worst[0]} entries made again and {worst[1]} images or prompts encoded again after a kill; "
                    f"kills fell after {min(moments)} to {max(moments)} of {len(world.entries)} entries")


def operations_of(world) -> list: # [(what, path)]
    "All writes, fsyncs and renames of an undisturbed precompute."
    cache, said = world.folder(), []
    def job():
        watch_operations(cache, lambda *what: said.append(what))
        world.run(cache)
        return said
    return [tuple(o) for o in child_value(job, world.tmp/"log")]


def kills_at_operations(world, each=None, seed=0) -> dict:
    "At all of them, or at `each` of every kind."
    said, places, rng = operations_of(world), collections.defaultdict(list), random.Random(seed)
    for n, (what, _) in enumerate(said): places[what].append(n)
    chosen = sorted(itertools.chain(*(ns if each is None else rng.sample(ns, each) for ns in places.values())))
    t, worst = Tally("precompute killed at every write, fsync and rename", len(chosen)), (0, 0)
    for n in chosen:
        cache, shared = world.folder(), Shared()
        def tell(what, path):
            shared[10] += 1
            if shared[10] == n + 1: os.kill(os.getpid(), signal.SIGKILL)
        def job():
            watch_operations(cache, tell)
            counted(world, cache, shared)
        status = os.waitpid(fork(job, world.tmp/"log"), 0)[1]
        with t.trial(f"killed at {said[n][0]} {n + 1}"):
            assert os.WIFSIGNALED(status), "was not killed"
            worst = max(worst, after_a_kill(world, cache, shared))
    kinds = collections.Counter(w for w, _ in said)
    return t.result(f"{worst[0]} entries made again and {worst[1]} images or prompts encoded again after a kill; an undisturbed run has "
                    f"{kinds['write']} writes (killed before and in the middle), {kinds['fsync']} fsyncs and {kinds['rename']} renames (killed before and after)")


def order_of_writes(world) -> dict:
    "A power cut loses what no fsync has secured: every file is synced before its rename, and its folder right after."
    t, said = Tally("synced before the rename, the folder after"), operations_of(world)
    for n, (what, path) in enumerate(said):
        if what != "rename": continue
        src, dst = path.split("\t")
        with t.trial(dst):
            own = [w for w, p in said[:n] if p == src]
            assert own and own[-1] == "fsync", f"{own[-1:]} before the rename"
            assert said[n + 1][0] == "renamed" and said[n + 2] == ("fsync", str(Path(dst).parent)), f"{said[n + 2:n + 3]} after the rename"
    return t.result("none out of order")


# --- damage
def flip(data, rng):
    n = rng.randrange(len(data) * 8)
    return data[:n // 8] + bytes([data[n // 8] ^ 1 << n % 8]) + data[n // 8 + 1:]


def truncate(data, rng): return data[:rng.randrange(len(data))]


def zero_tail(data, rng):
    last = len(data.rstrip(b"\0"))
    n = rng.randrange(last)
    return data[:n] + bytes(len(data) - n)


DAMAGES = dict(flip=("one bit flipped", flip), truncate=("truncated", truncate), zero=("tail of zeros", zero_tail))


def overwrite(path, data):
    "In place, with its times restored, as by a bad disk."
    st = os.stat(path)
    path.write_bytes(data)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


def place(cache, kind, key): return Path(cache)/kind/key[:2]/f"{key}.safetensors"


def reading(cache, kind, key, front_of=()):
    "A bad entry is not returned, is reported in one sentence and moved; prompts with a bad prefix are not returned either."
    m = EmbeddingCacheManager(cache)
    assert verify_entry(FolderStore(cache), kind, key), "`verify_entry` finds nothing"
    for k in front_of: assert m.load_cache("prompt_embed", k) is None, "a prompt on a bad prefix was handed out"
    assert m.load_cache(kind, key) is None, "was handed out"
    where, why = m.quarantined[0]
    assert where == str(place(cache, kind, key)) and why and "\n" not in why
    assert not place(cache, kind, key).exists() and not m.cache_exists(kind, key)
    moved = cache/"quarantine"/f"{kind}-{key}.safetensors"
    assert moved.is_file() and why in moved.with_suffix(".reason.txt").read_text()


def damaged_loose(world, t, damage, trials, rng, whole_job):
    "Most are found by a read; every `whole_job`-th by a precompute that knew the file as good and encodes it again."
    cache, on = world.copy(), collections.defaultdict(list)
    for kind, key, data in world.entries:
        if kind == "prompt_embed": on[header(data)["__metadata__"]["prefix"]].append(key)
    with patched((files, "_MIN_AGE", 0.03)):
        for n in range(trials):
            kind, key, data = rng.choice(world.entries)
            path, bad = place(cache, kind, key), damage(data, rng)
            with t.trial(f"{kind} {key} {n}"):
                assert bad != data
                if n % whole_job:
                    overwrite(path, bad)
                    reading(cache, kind, key, on[key] if kind == "prompt_prefix" else ())
                else:
                    time.sleep(0.05)
                    assert world.run(cache)[0].tensors == 0
                    overwrite(path, bad)
                    report, _ = world.run(cache)
                    assert [w for w, _ in report.bad] == [str(path)] and report.tensors == 1, f"{report.tensors} made again, bad: {report.bad}"
                    assert snapshot(cache) == world.files, "rebuilt otherwise"
            path.write_bytes(data)
    return f"every {whole_job}th was found by a whole precompute, which made that entry again and no other, with the same bytes"


def header(data): return json.loads(data[8:8 + int.from_bytes(data[:8], "little")])


def damaged_packed(world, t, damage, trials, rng):
    "The packed layer or the entry is refused; every returned tensor is right."
    packed, idle = world.folder("packed"), 0
    files = EmbeddingCacheManager(world.reference).pack(packed, shard_bytes=40_000)
    right = {(k, key): unpack_entry(data, k, key)[0] for k, key, data in world.entries}
    for n in range(trials):
        path = rng.choice(files)
        good = path.read_bytes()
        bad = damage(good, rng)
        overwrite(path, bad)
        with t.trial(f"{path.name} {n}"):
            assert bad != good
            try: m = EmbeddingCacheManager(packed)
            except CacheEntryError as e: sentence(e, str(packed/"cache-index.json"))
            else:
                none = 0
                for kind, key, _ in world.entries:
                    front, got = m.prefix_of(kind, key), m._read(m.layers[0], kind, key)
                    none += got is None
                    assert got is None or torch.equal(got[0], right[kind, key]) and got[1].get("prefix", "") == front, f"{kind} {key} is wrong"
                toc = 8 + int.from_bytes(good[:8], "little")
                idle += not none
                assert none or bad[toc:] == good[toc:], "not noticed"
                assert len(m.quarantined) == none and all("\n" not in why for _, why in m.quarantined)
        overwrite(path, good)
    return f"{idle} fell into a shard's table of contents, which no read depends on: all tensors right"


def damages(world, what, trials, seed=0, whole_job=25) -> dict:
    name, damage = DAMAGES[what]
    t, rng = Tally(f"entries: {name}", trials), random.Random(f"{seed} {what}")
    packed = trials // 5
    said = [damaged_loose(world, t, damage, trials - packed, rng, whole_job), damaged_packed(world, t, damage, packed, rng)]
    return t.result(f"all noticed; {said[0]}; {packed} in a packed layer: {said[1]}")


def swaps(world, trials=None, seed=0) -> dict:
    "Whole, valid entries in the wrong place."
    cache, pairs = world.copy(), list(itertools.combinations(world.entries, 2))
    if trials and trials < len(pairs): pairs = random.Random(seed).sample(pairs, trials)
    t = Tally("entries: swapped", len(pairs))
    for n, (a, b) in enumerate(pairs):
        (pa, pb), moved = (place(cache, *e[:2]) for e in (a, b)), (cache/"quarantine")
        os.rename(pa, cache/"x"), os.rename(pb, pa), os.rename(cache/"x", pb)
        with t.trial(f"{a[:2]} with {b[:2]}"):
            if n % 40: [reading(cache, *e[:2]) for e in (a, b)]
            else:
                report, _ = world.run(cache)
                assert report.tensors == 2 and {w for w, _ in report.bad} == {str(pa), str(pb)} and snapshot(cache) == world.files, str(report)
        for p, e in ((pa, a), (pb, b)): p.write_bytes(e[2])
        if moved.exists(): shutil.rmtree(moved)
    kinds = collections.Counter("the same kind" if a[0] == b[0] else "different kinds" for a, b in pairs)
    fronts = sum(a[0] == b[0] == "prompt_prefix" for a, b in pairs)
    return t.result(f"all noticed: {kinds['the same kind']} exchanges within a kind ({fronts} of them prefixes of other images) and {kinds['different kinds']} between kinds")


# --- which entries an edit invalidates, by a model of the rules that does not use the library's keys
def sha(path): return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def by_area(area, size): # the pipelines' own rounding
    w = math.sqrt(area * size[0] / size[1])
    return max(32, round(w / 32) * 32), max(32, round(w / (size[0] / size[1]) / 32) * 32)


class Studio:
    "A data set that is edited, its cache, and the entries that the cache must hold by now."
    def __init__(self, tmp, variant="2511", areas=(64*64, 64*64), settle=0.03, same=(0, 1, 2, 0, 4, 5)):
        self.tmp, self.root, self.cache, self.settle = Path(tmp), Path(tmp)/"set", Path(tmp)/"cache", settle
        write_set(self.root, same)
        self.variant, self.areas, self.weights, self.dtype, self.template, self.quantized = variant, areas, "00", torch.float32, "", None
        self.data, self.encoder, self.part, self.dirs, self.bare = dict(image_size=[64, 64], caption_dropout_rate=0.), {}, (0, None), None, None
        self.known, self.models, self.pool = set(), {}, itertools.count(1000)

    # the model of the rules
    def samples(self): # (target, controls, caption) of each, by its own look at the folders
        out, folders = [], sorted(self.root.glob("control_images*"), key=lambda d: (len(d.name), d.name))
        for p in sorted((self.root/"training_images").iterdir()):
            if p.suffix == ".txt": continue
            controls = [c for d in folders for c in sorted(d.glob(f"{p.stem}.*"))]
            out.append((p, controls, p.with_suffix(".txt").read_bytes().decode("utf-8-sig").strip()))
        return out

    def expected(self) -> set: # of (what, model): what is (kind, ...) as in `seen`
        d, out = self.data, set()
        aspect = fractions.Fraction(*d["image_size"]) if d.get("crop") else None
        shape = lambda size: (aspect.numerator, aspect.denominator) if aspect else size
        area, control, vl = d["image_size"][0] * d["image_size"][1], d.get("control_area", self.areas[0]), d.get("vl_area", self.areas[1])
        vae, text = (self.weights[0], self.dtype), (self.weights[1], self.dtype, self.template, self.variant == "v1", self.quantized)
        for target, controls, caption in self.samples()[slice(*self.part)]:
            size = tuple(d["image_size"]) if aspect else by_area(area, Image.open(target).size)
            out.add((("pixel_latent", sha(target), size, aspect), vae))
            sizes, shas = [shape(Image.open(c).size) for c in controls], tuple(map(sha, controls))
            for digest, s in zip(shas, sizes): out.add((("control_latent", digest, by_area(control, s), aspect), vae))
            on = shas, tuple(by_area(control if self.variant == "v1" else vl, s) for s in sizes), aspect
            out.add((("prompt_prefix", None, *on), text))
            for kind in ("prompt_embed", "prompt_embeds_mask"):
                out.add(((kind, caption, *on), text))
                if d["caption_dropout_rate"]: out.add((("empty_" + kind, " ", *on), text))
        return out

    # what the library does
    def model(self):
        name = (self.variant, self.weights, self.dtype, self.quantized)
        if name in self.models: return self.models[name]
        with quiet():
            folder = tiny_folder("v1" if self.variant == "v1" else "2511", self.areas)
            if self.variant == "2509": # the flag in the transformer's settings is all that differs
                folder = Path(shutil.copytree(folder, self.tmp/"model-2509", dirs_exist_ok=True))
                (folder/"transformer"/"config.json").write_text((folder/"transformer"/"config.json").read_text().replace('"zero_cond_t": true', '"zero_cond_t": false'))
            if self.weights != "00":
                folder = Path(shutil.copytree(folder, self.tmp/f"model-{self.variant}-{self.weights}", dirs_exist_ok=True))
                for part, w in zip(("vae", "text_encoder"), self.weights): shutil.copytree(tiny_folder(self.variant, self.areas, int(w))/part, folder/part, dirs_exist_ok=True)
            self.models[name] = Components(str(folder), self.dtype, quantize=dict(text_encoder=self.quantized))
        return self.models[name]

    def precompute(self) -> tuple: # (Counter of what was stored, Report, encoder's calls)
        stored, save, template = collections.Counter(), EmbeddingCacheManager.save_cache, qie_nb.models.components.template_of
        def save_cache(manager, kind, key, tensor, parts=None, prefix=None):
            stored[seen(kind, parts)] += 1
            return save(manager, kind, key, tensor, parts, prefix)
        def template_of(pipeline):
            text, drop = template(pipeline)
            return text.replace("<|im_start|>user", f"{self.template}<|im_start|>user"), drop
        changes = [(EmbeddingCacheManager, "save_cache", save_cache), (files, "_MIN_AGE", self.settle)]
        if self.template: changes += [(m, "template_of", template_of) for m in (qie_nb.models.components, qie_nb.encoding.prompts)]
        dirs = self.dirs or str(self.cache)
        with patched(*changes), quiet():
            dataset = ImageDataset(dict(dataset_path=str(self.root), cache_dir=dirs) | self.data)
            encoder = Encoder(self.model(), dataset.cache, **self.encoder)
            report = precompute(dataset, encoder, *self.part)
        return stored, report, encoder.calls

    def step(self, t, name, edit, says=None):
        "One edit: exactly the entries of the rules are stored, and `says` many of each kind."
        with t.trial(name):
            edit()
            time.sleep(self.settle * 1.5)
            want = self.expected() - self.known
            stored, report, calls = self.precompute()
            asked = collections.Counter(what for what, _ in want)
            assert not report.skipped and stored == asked, f"stored beyond the rules {list((stored - asked).items())[:3]}, not stored {list((asked - stored).items())[:3]} {report.skipped}"
            assert report.tensors == len(want) and calls["vae"] == sum(k[0] in LATENTS for k in asked), f"{report}, {calls}"
            kinds = collections.Counter(what[0] for what, _ in want)
            assert says is None or kinds == collections.Counter(says), f"{dict(kinds)}, but the edit is to cost {says}"
        self.known |= self.expected()

    def from_scratch(self, t, name):
        "A fresh cache has the same files, byte for byte."
        with t.trial(name):
            own, self.cache = self.cache, self.tmp/"scratch"
            if self.cache.exists(): shutil.rmtree(self.cache)
            try: self.precompute()
            finally: fresh, self.cache = self.cache, own
            old, new = (snapshot(c) for c in (own, fresh))
            differ = [p for p in new if p != "manifest.json" and new[p] != old.get(p)]
            assert len(new) > 7 and not differ, f"{len(differ)} of {len(new)} differ: {differ[:2]}"

    # edits
    def target(self, n, suffix=".png"): return self.root/"training_images"/f"{n:04}{suffix}"
    def control(self, n, folder="control_images"): return self.root/folder/f"{n:04}.png"
    def caption(self, n, text): self.target(n, ".txt").write_bytes(text.encode() if isinstance(text, str) else text)
    def new_image(self, path, size=None): picture(next(self.pool), size or Image.open(path).size, path)

    def replace_unseen(self, path):
        "Another image under the same name, of the same size and time."
        st, old = os.stat(path), path.read_bytes()
        while True:
            im = np.array(Image.open(path))
            im[0, 0] = np.random.default_rng(next(self.pool)).integers(0, 255, 3)
            out = io.BytesIO(); Image.fromarray(im).save(out, "PNG", compress_level=0)
            path.write_bytes(out.getvalue())
            if len(out.getvalue()) == len(old) and out.getvalue() != old: break
            old = out.getvalue(); st = os.stat(path); time.sleep(self.settle * 1.5); self.precompute(); self.known |= self.expected() # the first time it is stored without compression
        os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
        assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (st.st_size, st.st_mtime_ns)

    def exchange(self, a, b): t = a.with_suffix(".tmp"); os.rename(a, t), os.rename(b, a), os.rename(t, b)
    def touch_all(self, root): [os.utime(p, (1e9 + n, 1e9 + n)) for n, p in enumerate(Path(root).rglob("*"))]
    def add(self, n, like=None, caption="as well", second=False):
        for get in (self.target, self.control):
            get(n).write_bytes(get(like).read_bytes()) if like is not None else picture(next(self.pool), (48, 32), get(n))
        self.caption(n, caption)
    def remove(self, n):
        for p in [*self.root.glob(f"*/{n:04}.*")]: p.unlink()
    def set(self, **kw): self.data = self.data | kw
    def unset(self, *names): self.data = {k: v for k, v in self.data.items() if k not in names}
    def table(self, name):
        rows = [dict(image=str(p.relative_to(self.root)), edit_image=[str(c.relative_to(self.root)) for c in cs], prompt=text) for p, cs, text in self.samples()]
        if name.endswith(".csv"): (self.root/name).write_text("image,edit_image,prompt\n" + "".join(f"{r['image']},{r['edit_image'][0]},{r['prompt']}\n" for r in rows))
        else: (self.root/name).write_text("\n".join(map(json.dumps, rows)) if name.endswith("l") else json.dumps(rows))


def seen(kind, parts) -> tuple: # what an entry says that it was made of, in the rules' terms
    aspect = fractions.Fraction(*parts["crop"]) if parts["crop"] else None
    if kind in LATENTS: return kind, parts["image"], tuple(parts["size"]), aspect
    return kind, parts.get("prompt"), tuple(parts["controls"]), tuple(map(tuple, parts["vl_sizes"])), aspect


SUFFIX = dict(prompt_embed=1, prompt_embeds_mask=1)
TEXT = SUFFIX | dict(prompt_prefix=1)
EMPTY = dict(empty_prompt_embed=1, empty_prompt_embeds_mask=1)
def times(n, *kinds): return {k: v * n for d in kinds for k, v in d.items()}


def scripted(s): # (name, edit, what it is to cost)
    t0, move, nothing = s.target(0), (lambda a, b: shutil.move(a, b)), {}
    all_text = times(5, SUFFIX) | dict(prompt_prefix=5) | times(5, EMPTY) # six captions, two of them the same, on five sets of images
    def forget_digests(): shutil.rmtree(os.environ["QIE_NB_HOME"]); files._facts.clear(), files._folders.clear(); setattr(files._local, "owner", None)
    def spoil_digests(): forget_digests(); Path(os.environ["QIE_NB_HOME"]).mkdir(); (Path(os.environ["QIE_NB_HOME"])/"files.sqlite").write_bytes(b"not a data base" * 100)
    def new_root(name): move(s.root, s.tmp/name); s.root = s.tmp/name
    def copied(): shutil.copytree(s.root, s.tmp/"copy"); s.root = s.tmp/"copy"
    def pack():
        EmbeddingCacheManager(s.cache).pack(s.tmp/"packed"); s.dirs = [str(s.tmp/"packed"), str(s.tmp/"behind")]
    return [
        ("a first precompute", lambda: None, dict(pixel_latent=6, control_latent=5, prompt_prefix=5) | times(6, SUFFIX)),
        ("again", lambda: None, nothing),
        ("captions are dropped from now on", lambda: s.set(caption_dropout_rate=0.1), times(5, EMPTY)),
        ("they are dropped more often", lambda: s.set(caption_dropout_rate=0.6), nothing),
        ("one caption", lambda: s.caption(1, "make it sharp"), SUFFIX),
        ("one caption of two on the same images", lambda: s.caption(3, "make it round"), SUFFIX),
        ("a line end behind a caption", lambda: s.caption(1, "make it sharp\n"), nothing),
        ("a caption with a byte order mark", lambda: s.caption(1, b"\xef\xbb\xbfmake it sharp"), nothing),
        ("a caption as it was before", lambda: s.caption(1, "make it b"), nothing),
        ("the caption of another image", lambda: s.caption(1, "make it a"), SUFFIX),
        ("the caption of the same images", lambda: s.caption(3, "make it a"), nothing),
        ("captions exchanged between two images", lambda: s.exchange(s.target(4, ".txt"), s.target(5, ".txt")), times(2, SUFFIX)),
        ("and back", lambda: s.exchange(s.target(4, ".txt"), s.target(5, ".txt")), nothing),
        ("captions touched", lambda: [os.utime(p) for p in s.root.rglob("*.txt")], nothing),
        ("a target", lambda: s.new_image(t0), dict(pixel_latent=1)),
        ("a target under the same name, size and time", lambda: s.replace_unseen(t0), dict(pixel_latent=1)),
        ("a target of another size", lambda: s.new_image(t0, (64, 24)), dict(pixel_latent=1)),
        ("a target's file written anew, the same pixels", lambda: Image.open(t0).save(t0, compress_level=1), dict(pixel_latent=1)),
        ("a target as a bitmap", lambda: (Image.open(t0).save(s.target(0, ".bmp")), t0.unlink()), dict(pixel_latent=1)),
        ("a target back", lambda: (Image.open(s.target(0, ".bmp")).save(t0, compress_level=1), s.target(0, ".bmp").unlink()), nothing),
        ("targets exchanged", lambda: s.exchange(s.target(1), s.target(2)), nothing),
        ("everything touched", lambda: s.touch_all(s.root), nothing),
        ("rights changed", lambda: [os.chmod(p, 0o600) for p in s.root.rglob("*.*")], nothing),
        ("a sample renamed", lambda: [move(p, p.with_name(p.name.replace("0005", "0009"))) for p in s.root.glob("*/0005.*")], nothing),
        ("and back", lambda: [move(p, p.with_name(p.name.replace("0009", "0005"))) for p in s.root.glob("*/0009.*")], nothing),
        ("the data set moved", lambda: new_root("elsewhere"), nothing),
        ("the data set copied", copied, nothing),
        ("an image behind a link", lambda: (move(s.control(1), s.tmp/"away.png"), s.control(1).symlink_to(s.tmp/"away.png")), nothing),
        ("the linked image replaced", lambda: s.new_image(s.tmp/"away.png", (32, 48)), dict(control_latent=1) | TEXT | EMPTY),
        ("and no link", lambda: shutil.move(shutil.copy(s.control(1), s.tmp/"same.png"), s.control(1)), nothing),
        ("a control image", lambda: s.new_image(s.control(5)), dict(control_latent=1) | TEXT | EMPTY),
        ("a control image under the same name, size and time", lambda: s.replace_unseen(s.control(5)), dict(control_latent=1) | TEXT | EMPTY),
        ("one of two equal control images", lambda: s.new_image(s.control(3)), dict(control_latent=1) | TEXT | EMPTY),
        ("and equal again", lambda: shutil.copy(s.control(0), s.control(3)), nothing),
        ("control images exchanged", lambda: s.exchange(s.control(2), s.control(4)), times(2, SUFFIX)),
        ("target and control exchanged", lambda: s.exchange(s.target(4), s.control(4)), dict(pixel_latent=1, control_latent=1) | TEXT | EMPTY),
        ("and back", lambda: s.exchange(s.target(4), s.control(4)), nothing),
        ("a sample taken out", lambda: [move(p, s.tmp/f"{p.parent.name}-{p.name}") for p in s.root.glob("*/0005.*")], nothing),
        ("and put back", lambda: [move(p, s.root/p.name.split("-")[0]/"0005{}".format(p.suffix)) for p in s.tmp.glob("*_images-0005.*")], nothing),
        ("a sample added", lambda: s.add(10), dict(pixel_latent=1, control_latent=1) | TEXT | EMPTY),
        ("a sample copied", lambda: s.add(11, 10), nothing),
        ("a sample copied with another caption", lambda: s.add(12, 10, "but not so much"), SUFFIX),
        ("three samples removed", lambda: [s.remove(n) for n in (10, 11, 12)], nothing),
        ("a second control image", lambda: picture(next(s.pool), (40, 40), s.control(2, "control_images_2")), dict(control_latent=1) | TEXT | EMPTY),
        ("the two the other way round", lambda: s.exchange(s.control(2), s.control(2, "control_images_2")), TEXT | EMPTY),
        ("only the first again", lambda: (s.exchange(s.control(2), s.control(2, "control_images_2")), shutil.rmtree(s.root/"control_images_2")), nothing),
        ("a table instead of folders", lambda: s.table("metadata.jsonl"), nothing),
        ("a table of another kind", lambda: ((s.root/"metadata.jsonl").unlink(), s.table("metadata.csv")), nothing),
        ("folders again", lambda: (s.root/"metadata.csv").unlink(), nothing),
        ("batch size, order and workers", lambda: s.set(batch_size=2, shuffle=False, num_workers=1), nothing),
        ("resolution", lambda: s.set(image_size=[96, 96]), dict(pixel_latent=6)),
        ("resolution back", lambda: s.set(image_size=[64, 64]), nothing),
        ("a resolution of the same area", lambda: s.set(image_size=[128, 32]), nothing),
        ("cut to a shape", lambda: s.set(image_size=[64, 32], crop=True), dict(pixel_latent=6, control_latent=5) | all_text),
        ("larger, cut to the same shape", lambda: s.set(image_size=[128, 64]), dict(pixel_latent=6)),
        ("not cut again", lambda: (s.set(image_size=[64, 64]), s.unset("crop")), nothing),
        ("area of the controls for the VAE", lambda: s.set(control_area=96*96), dict(control_latent=5)),
        ("an area that rounds to the same", lambda: s.set(control_area=96*96 + 50), nothing),
        ("area of the controls for the text encoder", lambda: (s.unset("control_area"), s.set(vl_area=112*112)), all_text),
        ("the model's own areas", lambda: s.unset("vl_area"), nothing),
        ("other weights of the VAE", lambda: setattr(s, "weights", "50"), dict(pixel_latent=6, control_latent=5)),
        ("other weights of the text encoder", lambda: setattr(s, "weights", "05"), all_text),
        ("both, each known", lambda: setattr(s, "weights", "55"), nothing),
        ("the first weights", lambda: setattr(s, "weights", "00"), nothing),
        ("another template", lambda: setattr(s, "template", "Be brief. "), all_text),
        ("the first template", lambda: setattr(s, "template", ""), nothing),
        ("bfloat16", lambda: setattr(s, "dtype", torch.bfloat16), dict(pixel_latent=6, control_latent=5) | all_text),
        ("float32", lambda: setattr(s, "dtype", torch.float32), nothing),
        ("a quantized text encoder", lambda: setattr(s, "quantized", "qint8"), all_text),
        ("not quantized", lambda: setattr(s, "quantized", None), nothing),
        ("2509 instead of 2511, the same encoders", lambda: setattr(s, "variant", "2509"), nothing),
        ("v1, another template and order of sizes", lambda: setattr(s, "variant", "v1"), all_text),
        ("2511", lambda: setattr(s, "variant", "2511"), nothing),
        ("the model's files touched", lambda: s.touch_all(s.model().folder), nothing),
        ("prompts encoded whole, convolutions in 3-D", lambda: setattr(s, "encoder", dict(share_prefix=False, vae_2d=False)), nothing),
        ("and as before", lambda: setattr(s, "encoder", {}), nothing),
        ("part of the data set, with one new target in it", lambda: (setattr(s, "part", (0, 2)), s.new_image(s.target(0)), s.new_image(s.target(5))), dict(pixel_latent=1)),
        ("all of it, with another outside the part", lambda: setattr(s, "part", (0, None)), dict(pixel_latent=1)),
        ("the memory of digests lost", forget_digests, nothing),
        ("the memory of digests spoilt", spoil_digests, nothing),
        ("a good memory again", forget_digests, nothing),
        ("the cache moved", lambda: (move(s.cache, s.tmp/"cache2"), setattr(s, "cache", s.tmp/"cache2")), nothing),
        ("the cache packed, before an empty folder", pack, nothing),
        ("the cache itself again", lambda: setattr(s, "dirs", None), nothing),
    ]


def edits_scripted(tmp, settle=0.03, only=None) -> dict:
    s, t = Studio(tmp, settle=settle), Tally("invalidation: scripted edits")
    steps = scripted(s)
    for n, (name, edit, says) in enumerate(steps):
        if only and n >= only: break
        s.step(t, name, edit, says)
    s.from_scratch(t, "a cache from scratch after all these edits")
    without_encoders(s, t)
    edits_v1(Path(tmp)/"v1", t, settle)
    return t.result(f"exactly the entries that the rules name, after each of {min(len(steps), only or len(steps)) + 4} edits; and a cache from scratch is the same byte for byte")


def edits_of_the_model(tmp) -> dict:
    "The edits of the script that change the model, by themselves."
    s, t = Studio(tmp, same=(0, 1, 0)), Tally("invalidation: other weights, template, type")
    names = ("a first precompute", "other weights of the VAE", "other weights of the text encoder", "the first weights", "another template", "the first template", "bfloat16", "float32", "2509 instead of 2511, the same encoders", "the model's files touched")
    for name, edit, _ in scripted(s):
        if name in names: s.step(t, name, edit)
    assert t.trials == len(names)
    return t.result("exactly the entries that the rules name")


def edits_v1(tmp, t, settle):
    "v1's text encoder sees the VAE's control image, so that its area concerns both; the target's does not."
    s = Studio(tmp, "v1", (64*64, None), settle)
    s.step(t, "v1: a first precompute", lambda: None, dict(pixel_latent=6, control_latent=5, prompt_prefix=5) | times(6, SUFFIX))
    s.step(t, "v1: resolution", lambda: s.set(image_size=[96, 96]), dict(pixel_latent=6))
    s.step(t, "v1: area of the controls", lambda: s.set(control_area=96*96), dict(control_latent=5, prompt_prefix=5) | times(6, SUFFIX))
    s.step(t, "v1: one caption", lambda: s.caption(1, "make it sharp"), SUFFIX)


def without_encoders(s, t):
    "Without encoders on the disk, training finds every entry by the manifest."
    from qie_nb.trainer import QwenImageEditTrainer
    with t.trial("trained without any encoder"):
        s.cache, s.dirs = s.tmp/"one model", None
        s.precompute()
        bare = shutil.copytree(s.model().folder, s.tmp/"bare", ignore=shutil.ignore_patterns("vae", "text_encoder"))
        before = snapshot(s.cache)
        config = dict(model=dict(pretrained_model_name_or_path=str(bare), lora=dict(r=2)), data=dict(dataset_path=str(s.root)) | s.data | dict(num_workers=0, batch_size=1), cache=dict(cache_dir=str(s.cache)),
                      train=dict(output_dir=str(s.tmp), device="cpu", mixed_precision="no", max_train_steps=6, save_interval=0, eval_interval=0), logging=dict(report_to="none"))
        with quiet(): trainer = QwenImageEditTrainer(config).fit()
        assert trainer.global_step == 6 and not {"vae", "text_encoder"} & set(trainer.components.built) and snapshot(s.cache) == before


def losses(tmp, settle=0.03, every=1) -> dict:
    "An entry removed or damaged: only that one is encoded again."
    s, t = Studio(tmp, settle=settle), Tally("invalidation: entries removed or spoilt")
    s.data["caption_dropout_rate"] = 0.1
    s.precompute()
    whole = snapshot(s.cache)
    for kind in (*LATENTS, *TEXTS):
        for how in ("removed", "spoilt", "emptied"):
            for path in sorted((s.cache/kind).rglob("*.safetensors"))[::every]:
                with t.trial(f"{path.relative_to(s.cache)} {how}"):
                    time.sleep(s.settle * 1.5)
                    if how == "removed": path.unlink()
                    elif how == "emptied": path.write_bytes(b"")
                    else: overwrite(path, flip(path.read_bytes(), random.Random(str(path))))
                    stored, report, _ = s.precompute()
                    assert sum(stored.values()) == report.tensors == 1 and len(report.bad) == (how != "removed"), f"{dict(stored)} {report}"
                    assert snapshot(s.cache) == whole
    return t.result("one entry made again, the same bytes")


def edits_meanwhile(world, times=(1, 2, 9)) -> dict:
    "An image is replaced between its digest and its read: entries match their keys."
    t, real = Tally("invalidation: images replaced while they are encoded"), ImageDataset.images
    old = {p: p.read_bytes() for p in world.root.rglob("*.png")}
    for side in ("training_images", "control_images"):
        for size, ahead in ((None, 0), ((64, 24), 0), (None, 4), ((64, 24), 4)):
            for often in times:
                with t.trial(f"{side}, {'another' if size else 'the same'} size, {often} times, {ahead} samples read ahead"):
                    cache, left = world.folder(), [often]
                    path = world.root/side/"0002.png"
                    def pictures(dataset, i, *a):
                        if dataset.samples[i].id == "0002" and left[0]: left[0] -= 1; picture(9000 + left[0], size or Image.open(path).size, path)
                        return real(dataset, i, *a)
                    with patched((ImageDataset, "images", pictures)): report, _ = world.run(cache, ahead=ahead)
                    assert not left[0] or (len(report.skipped) == 1 and "changed" in report.skipped[0][1]), str(report)
                    m = EmbeddingCacheManager(cache)
                    assert not m.verify()
                    for kind in LATENTS:
                        for _, _, key, _ in m.entries([kind]):
                            said = json.loads(header(place(cache, kind, key).read_bytes())["__metadata__"]["parts"])
                            assert list(m.load_cache(kind, key).shape[-2:]) == [said["size"][1] // 8, said["size"][0] // 8], f"a {kind} said to be of {said['size']}"
                    world.run(fresh := world.folder("fresh"))
                    now, new = snapshot(cache), snapshot(fresh)
                    assert all(new[p] == now.get(p, new[p]) for p in new), "an entry holds another image than its key says"
                for p, data in old.items(): p.write_bytes(data)
    return t.result("every entry is of the image that its key names; an image that changed again and again is skipped with that reason")


def edits_random(tmp, trials, seed=0, settle=0.03) -> dict:
    s, t, rng, sizes = Studio(tmp, settle=settle), Tally("invalidation: random edits", trials), random.Random(seed), ((48, 32), (32, 48), (40, 40))
    stock = [(n, rng.choice(sizes)) for n in range(40)]
    def ids(): return [int(p.stem) for p, *_ in s.samples()]
    def draw(path): n, size = rng.choice(stock); picture(5000 + n, size, path)
    def one(): return rng.choice(ids())
    def two(): return rng.sample(ids(), 2)
    def second(n): return s.control(n, "control_images_2")
    def remove(): [s.remove(n) for n in [one()] if len(ids()) > 4]
    def rename():
        n, new = one(), next(s.pool)
        for p in [*s.root.glob(f"*/{n:04}.*")]: p.rename(p.with_name(f"{new:04}{p.suffix}"))
    def second_gone():
        found = [n for n in ids() if second(n).exists()]
        if found: second(rng.choice(found)).unlink()
    def second_first():
        found = [n for n in ids() if second(n).exists()]
        if found: n = rng.choice(found); s.exchange(s.control(n), second(n))
    def crop(): s.set(crop=True, image_size=rng.choice([[64, 32], [128, 64], [64, 64]])) if not s.data.get("crop") else s.unset("crop")
    edits = dict(
        caption=(6, lambda: s.caption(one(), f"make it {rng.choice('abcdefghij')}")), same_caption=(1, lambda: s.caption(two()[0], s.target(one(), ".txt").read_text() + "\n")),
        target=(4, lambda: draw(s.target(one()))), control=(4, lambda: draw(s.control(one()))),
        target_unseen=(3, lambda: s.replace_unseen(s.target(one()))), control_unseen=(3, lambda: s.replace_unseen(s.control(one()))),
        targets_exchanged=(2, lambda: s.exchange(*map(s.target, two()))), controls_exchanged=(2, lambda: s.exchange(*map(s.control, two()))),
        captions_exchanged=(2, lambda: s.exchange(*(s.target(n, ".txt") for n in two()))), sides_exchanged=(1, lambda: (lambda n: s.exchange(s.target(n), s.control(n)))(one())),
        shared=(2, lambda: (lambda a, b: s.control(a).write_bytes(s.control(b).read_bytes()))(*two())),
        add=(2, lambda: s.add(next(s.pool))), copy=(2, lambda: s.add(next(s.pool), one(), f"make it {rng.choice('abcdefghij')}")), remove=(3, remove), rename=(2, rename),
        touch=(1, lambda: s.touch_all(s.root)), second=(3, lambda: draw(second(one()))), second_gone=(2, second_gone), second_first=(2, second_first),
        image_size=(1, lambda: s.set(image_size=rng.choice([[64, 64], [96, 96], [96, 64]]))), control_area=(1, lambda: s.set(control_area=rng.choice([64*64, 96*96]))),
        vl_area=(1, lambda: s.set(vl_area=rng.choice([64*64, 112*112]))), crop=(1, crop), dropout=(1, lambda: s.set(caption_dropout_rate=rng.choice([0., 0.1]))),
        weights=(0.5, lambda: setattr(s, "weights", rng.choice(["00", "50", "05"]))), dtype=(0.3, lambda: setattr(s, "dtype", rng.choice([torch.float32, torch.bfloat16]))))
    made = 0
    for n in range(trials):
        name = rng.choices(list(edits), [w for w, _ in edits.values()])[0]
        before = len(s.known)
        s.step(t, f"{n} {name}", edits[name][1])
        made = max(made, len(s.known) - before) if n else made
        if n % 100 == 99 or n == trials - 1: s.from_scratch(t, f"{n} a cache from scratch")
    return t.result(f"exactly the entries that the rules name, up to {made} after one edit, {len(s.known)} in all; caches from scratch in between are the same byte for byte")


# --- several processes on one cache
def crowd(world, processes, repetitions, kill=True, seed=0) -> dict:
    t, rng, most = Tally(f"{processes} processes on one cache{', one killed' if kill else ''}", repetitions), random.Random(seed), 0
    began = time.time()
    world.run(world.folder())
    alone, entries = time.time() - began, len(world.entries)
    while t.trials < repetitions:
        cache, shared, victim = world.folder(), Shared(), rng.randrange(processes)
        at_work = t.trials % 2 == 0 # killed while it surely holds a file_lock; else at any moment
        die_at = rng.randint(1, 5)
        def job(n):
            while not shared[63]: time.sleep(0.0005)
            counted(world, cache, shared, n * 8, die_at=die_at if kill and at_work and n == victim else None)
        pids = [fork(lambda: job(n), world.tmp/"log") for n in range(processes)]
        shared[63] = 1
        if kill and not at_work:
            time.sleep(rng.uniform(0, alone * 0.9))
            os.kill(pids[victim], signal.SIGKILL)
        done = wait(pids, 30 + 20 * alone)
        if kill and not os.WIFSIGNALED(done.get(pids[victim], 0)): continue # it was done already
        with t.trial(f"repetition {t.trials}"):
            assert len(done) == processes, f"{processes - len(done)} processes hang"
            assert all(done[p] == 0 for n, p in enumerate(pids) if not (kill and n == victim)), f"exit codes {done}: {(world.tmp/'log').read_text()[-500:]}"
            assert not EmbeddingCacheManager(cache).verify() and snapshot(cache) == world.files, "the cache differs from an undisturbed one"
            assert not [*(cache/"quarantine").glob("*")], "good entries were set aside"
            made = sum(shared[n * 8] for n in range(processes))
            most = max(most, made)
            assert entries <= made <= entries + (world.piece if kill else entries // 10), f"{made} entries made for {entries}"
            assert world.run(cache)[0].tensors == 0
    lost = f", {most - entries} of them lost with the killed process or made by two" if kill else ""
    return t.result(f"{most} entries made for {entries}{lost}; none bad, none hung")


# --- disks
def in_own_mounts(tmp, job, t):
    "job(trial) in a child with its own mounts."
    def run():
        libc, inner = ctypes.CDLL(None, use_errno=True), Tally("", 0)
        said = dict(refused=None)
        if libc.unshare(0x20000): said["refused"] = os.strerror(ctypes.get_errno()) # CLONE_NEWNS
        else:
            private = subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, text=True)
            if private.returncode: said["refused"] = private.stderr.strip()
            else:
                try: said["worst"] = job(inner.trial)
                except NotRun as e: said["refused"] = str(e)
        return said | dict(trials=inner.trials, passed=inner.passed, failed=inner.failed)
    said = child_value(run, Path(tmp)/"mounts")
    if said["refused"]: raise NotRun(f"mounting is not permitted here ({said['refused']})")
    t.trials, t.passed, t.failed = said["trials"], said["passed"], said["failed"]
    return said["worst"]


def mount(*args):
    done = subprocess.run(["mount", *map(str, args)], capture_output=True, text=True)
    if done.returncode: raise NotRun(done.stderr.strip())


def fill(disk, leave=0):
    "Another file takes all but `leave` bytes."
    st = os.statvfs(disk)
    fd = os.open(Path(disk)/"ballast", os.O_WRONLY | os.O_CREAT)
    try:
        n = st.f_bavail * st.f_frsize - leave
        while n > 0: n -= os.write(fd, bytes(min(n, 1 << 20)))
    except OSError: pass
    finally: os.close(fd)


def full_disk(world, every=1) -> dict:
    t = Tally("full disk at every write")
    def job(trial):
        import re
        disk, rng = world.folder("disk"), random.Random(0)
        disk.mkdir()
        mount("-t", "tmpfs", "-o", "size=6m", "tmpfs", disk)
        cache, start = disk/"cache", world.folder("start")
        def fresh(half=True):
            if cache.exists(): shutil.rmtree(cache)
            (disk/"ballast").unlink(missing_ok=True)
            if half: shutil.copytree(start, cache)
            return snapshot(cache)
        def attempt(nth=None, leave=0): # in a grandchild: its message, or "" where it went through
            def run():
                count = itertools.count()
                def tell(what, path):
                    if what == "open" and next(count) == nth: fill(disk, leave)
                if nth is not None: watch_operations(cache, tell)
                try: report, _ = world.run(cache)
                except Exception as e: return [type(e).__name__, str(e)]
                return ["", str(report)]
            return child_value(run, world.tmp/"attempt")
        def check(before, kind, message, need, leave):
            assert kind in ("OSError", "DiskFull"), f"{kind}: {message}"
            sentence(OSError(message), str(cache), " MB")
            missing = re.search(r"([\d.]+) MB (?:more|are missing)", message)
            assert missing, f"does not say how much is missing: {message}"
            assert float(missing[1]) * 1e6 >= need - leave > 0, f"{need - leave} bytes are missing, but it says {missing[1]} MB: {message}"
            there = snapshot(cache)
            assert before.items() <= there.items() and there.items() <= world.files.items(), "what was there is not intact"
            assert not [*(cache/".tmp").glob("*")], "a temporary file is left"
            (disk/"ballast").unlink()
            assert attempt()[0] == "" and snapshot(cache) == world.files, "afterwards, with room: another cache"
        half = world.dataset(start)
        with quiet(): precompute(half, Encoder(world.components, half.cache), 0, 2)
        written = order_written(world, lambda: fresh(), cache)
        for n in range(0, len(written), every):
            need = len(world.files[written[n]])
            leave = rng.randrange(-(-need // 4096)) * 4096 # pages
            with trial(f"write {n}: {written[n]}"):
                before = fresh()
                check(before, *attempt(n, leave), need, leave)
        with trial("the first write of all, the manifest"):
            check(fresh(False), *attempt(0), len(world.files["manifest.json"]), 0)
        with trial("full before it begins"):
            before = fresh()
            fill(disk, 8192)
            kind, message = attempt()
            sentence(OSError(message), "Nothing was written", str(cache))
            assert snapshot(cache) == before
            check(before, kind, message, sum(map(len, world.files.values())) - sum(map(len, before.values())), 8192)
        for kind in ("pixel_latent", "prompt_prefix"):
            with trial(f"a bad {kind} on a full disk is not handed out"):
                fresh(False)
                shutil.copytree(world.reference, cache)
                _, key, data = next(e for e in world.entries if e[0] == kind)
                overwrite(place(cache, kind, key), flip(data, rng))
                fill(disk)
                m = EmbeddingCacheManager(cache)
                assert m.load_cache(kind, key) is None and len(m.quarantined) == 1
                (disk/"ballast").unlink()
                assert attempt()[0] == "" and snapshot(cache) == world.files
        with trial("packing to a full disk"):
            fresh(False)
            fill(disk, 20_000)
            refused(lambda: EmbeddingCacheManager(world.reference).pack(disk/"packed"), str(disk/"packed"), " MB more")
            assert not (disk/"packed"/"cache-index.json").exists()
        return f"none lost; after each the message named the folder and enough MB, and a run with room again ended with the same bytes ({len(written)} writes)"
    return settled(t, lambda: in_own_mounts(world.tmp, job, t))


def order_written(world, fresh, cache) -> list: # entries' paths in the cache, in the order in which a precompute writes them
    fresh()
    said = []
    def job():
        watch_operations(cache, lambda what, path: said.append(path.split("\t")[1]) if what == "renamed" else None)
        world.run(cache)
        return [str(Path(p).relative_to(cache)) for p in said]
    return child_value(job, world.tmp/"log")


def settled(t, run) -> dict:
    try: return t.result(run())
    except NotRun as e: return t.result(f"not run: {e}")


def read_only(world, packed) -> dict:
    t = Tally(f"a {'packed' if packed else 'loose'} layer on a read-only mount")
    def job(trial):
        ro, source, tried = world.folder("ro"), world.folder("source"), []
        if packed: EmbeddingCacheManager(world.reference).pack(source)
        else: shutil.copytree(world.reference, source)
        adapter = lambda trainer: {k: v.numpy().tobytes() for k, v in lora_state(trainer.transformer).items()}
        usual = adapter(world.train(str(world.copy("usual"))))
        ro.mkdir()
        mount("--bind", source, ro), mount("-o", "remount,ro,bind", ro)
        try: (ro/"x").write_text("x")
        except OSError as e: assert e.errno == 30, e
        else: raise NotRun("the mount takes writes")
        def hook(event, args):
            if event == "open" and str(args[0]).startswith(str(ro)) and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT): tried.append(args[0])
            if event in ("os.mkdir", "os.rename", "os.remove", "os.link", "os.truncate") and any(str(a).startswith(str(ro)) for a in args): tried.append((event, *map(str, args)))
        sys.addaudithook(hook)
        with trial("trains on it alone, the same adapter"): assert adapter(world.train(str(ro))) == usual
        with trial("trains on it and a folder that does not exist yet"):
            rw = world.folder("rw")
            assert adapter(world.train([str(ro), str(rw)])) == usual and not snapshot(rw)
        with trial("a whole precompute is a look"):
            report, _ = world.run(str(ro))
            assert (report.tensors, report.reused) == (0, 6)
        caption = world.root/"training_images"/"0001.txt"
        old = caption.read_text()
        caption.write_text("make it new")
        with trial("a new caption goes to the folder behind it"):
            rw = world.folder("rw")
            report, _ = world.run([str(ro), str(rw)])
            assert report.tensors == 2 and {p.split("/")[0] for p in snapshot(rw)} == {"prompt_embed", "prompt_embeds_mask"}, f"{report} {list(snapshot(rw))}"
            world.train([str(ro), str(rw)])
        with trial("without one, precompute refuses in a sentence"): refused(lambda: world.run(str(ro)), str(ro), "cannot be written")
        with trial("and so does training"): refused(lambda: world.train(str(ro)), str(ro), "prompt_embed of sample '0001' is missing")
        caption.write_text(old)
        with trial("a bad entry in it is made again behind it"):
            files, rw = sorted(p for p in source.rglob("*") if p.suffix == ".safetensors"), world.folder("rw")
            path = next(p for p in files if packed or "pixel_latent" in str(p))
            good = path.read_bytes()
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 1])) # from outside, where it can be written
            report, _ = world.run([str(ro), str(rw)])
            assert report.tensors == len(report.bad) == 1, str(report)
            assert adapter(world.train([str(ro), str(rw)])) == usual, "another adapter"
            refused(lambda: world.train(str(ro)), str(ro), "checksum differs")
            path.write_bytes(good)
        with trial("nothing tried to write there"): assert not tried, tried[:3]
        return "no write was tried there; adapters are the same bit for bit as from a folder that can be written"
    return settled(t, lambda: in_own_mounts(world.tmp, job, t))


# --- malicious and malformed files
class Payload:
    def __init__(self, marker): self.marker = marker
    def __reduce__(self): return open, (str(self.marker), "w")


def payloads(marker) -> dict: # {name: bytes}; each writes a marker when it is unpickled
    buffer = io.BytesIO()
    torch.save(dict(weight=Payload(marker)), buffer)
    out = dict(binary=pickle.dumps(Payload(marker)), text=pickle.dumps(Payload(marker), protocol=0), torch=buffer.getvalue())
    for data in (out["binary"], out["text"]):
        pickle.loads(data)
        assert marker.exists(), "the payload does nothing, so the case could not fail"
        marker.unlink()
    torch.load(io.BytesIO(out["torch"]), weights_only=False)
    assert marker.exists()
    marker.unlink()
    return out


def pickles(world) -> dict:
    t, marker = Tally("pickles under harmless names"), world.tmp/"executed"
    packed, run = world.folder("packed"), world.folder("run")
    EmbeddingCacheManager(world.reference).pack(packed)
    whole = world.train(str(world.copy("usual")), train=dict(save_interval=1, max_train_steps=6, output_dir=str(run)))
    whole.save_lora(run/"lora")
    point = find_checkpoint("latest", run/"checkpoints")
    model = Path(shutil.copytree(world.components.folder, world.folder("model")))
    def resumed():
        (point/"COMPLETE").write_text(json.dumps({p.name: file_digest(p) for p in sorted(point.iterdir()) if p.name != "COMPLETE"}))
        world.train(str(world.tmp/"usual"), train=dict(max_train_steps=9, output_dir=str(run), resume_checkpoint=str(point)))
    def entry(path):
        m = EmbeddingCacheManager(world.tmp/"usual")
        kind, key = path.parts[-3], path.stem
        assert m.load_cache(kind, key) is None
        (_, why), = m.quarantined
        report, _ = world.run(world.tmp/"usual")
        assert report.tensors == 1 and snapshot(world.tmp/"usual") == world.files
        raise ValueError(why)
    def shard(path):
        m = EmbeddingCacheManager(packed)
        assert all(m._read(m.layers[0], kind, key) is None for kind, key, _ in world.entries)
        raise ValueError(m.quarantined[0][1])
    def data_set(path):
        d = world.dataset(world.tmp/"usual", strict=True)
        if path.suffix == ".txt": assert any(s.prompt.startswith("c") for s in d.samples); raise ValueError("read as the text that it is")
    picked = lambda kind: place(world.tmp/"usual", *next(e for e in world.entries if e[0] == kind)[:2])
    loads = lambda name: lambda path: Components(str(model)).get(name)
    targets = {
        "an entry": (picked("prompt_embed"), entry), "a latent": (picked("pixel_latent"), entry), "a prefix": (picked("prompt_prefix"), entry),
        "manifest.json": (world.tmp/"usual"/"manifest.json", lambda p: EmbeddingCacheManager(world.tmp/"usual").identities()),
        "cache-index.json": (packed/"cache-index.json", lambda p: EmbeddingCacheManager(packed)), "a shard": (next(packed.glob("cache-0*")), shard),
        "a target image": (world.root/"training_images"/"0000.png", data_set), "a control image": (world.root/"control_images"/"0001.png", data_set),
        "a caption": (world.root/"training_images"/"0002.txt", data_set), "metadata.jsonl": (world.root/"metadata.jsonl", data_set), "metadata.csv": (world.root/"metadata.csv", data_set),
        "a LoRA": (run/"lora"/"pytorch_lora_weights.safetensors", lambda p: load_lora(whole.transformer, p)),
        "a checkpoint's LoRA": (point/"pytorch_lora_weights.safetensors", lambda p: resumed()),
        "a checkpoint's optimizer": (point/"optimizer.safetensors", lambda p: resumed()), "a checkpoint's state": (point/"state.json", lambda p: resumed()),
        "a checkpoint's COMPLETE": (point/"COMPLETE", lambda p: find_checkpoint(str(point))),
        "the VAE's weights": (model/"vae"/"diffusion_pytorch_model.safetensors", loads("vae")), "the text encoder's weights": (model/"text_encoder"/"model.safetensors", loads("text_encoder")),
        "the VAE's config": (model/"vae"/"config.json", loads("vae")), "model_index.json": (model/"model_index.json", lambda p: Components(str(model))),
    }
    foreign = ("the VAE's weights", "the text encoder's weights", "the VAE's config") # diffusers' and transformers' own words
    for name, (path, use) in targets.items():
        old, complete = path.read_bytes() if path.exists() else None, (point/"COMPLETE").read_bytes()
        for form, data in payloads(marker).items():
            with t.trial(f"{name}, {form}"):
                path.write_bytes(data)
                try:
                    with quiet(): use(path)
                except Exception as e:
                    if name not in foreign: sentence(e)
                else: raise AssertionError("was taken for good")
                finally:
                    assert not marker.exists(), "was executed"
        path.unlink()
        if old is not None: path.write_bytes(old)
        (point/"COMPLETE").write_bytes(complete)
    with t.trial("a memory of digests that is a pickle"):
        store = world.tmp/"home"; store.mkdir(); (store/"files.sqlite").write_bytes(payloads(marker)["binary"])
        home, os.environ["QIE_NB_HOME"] = os.environ.get("QIE_NB_HOME"), str(store)
        try: assert world.run(world.reference)[0].tensors == 0 and not marker.exists()
        finally: os.environ["QIE_NB_HOME"] = home or ""; home or os.environ.pop("QIE_NB_HOME")
    with t.trial("no pickle in the sources"):
        found = subprocess.run(["grep", "-rnE", "--include=*.py", r"import pickle|pickle\.|torch\.load\(", str(ROOT/"qie_nb")], capture_output=True, text=True).stdout
        assert not found, found
    return t.result(f"each of {len(targets)} names in three forms refused in a sentence, and nothing was executed")


def rebuilt(data, change): # an entry with another header, its length and padding as they must be
    n = 8 + int.from_bytes(data[:8], "little")
    text = change(json.loads(data[8:n])) if callable(change) else change
    text = text if isinstance(text, bytes) else json.dumps(text).encode() if not isinstance(text, str) else text.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[n:]


def signed(data, kind, change, payload=None): # changed by a liar who knows the format: the checksum is right
    n = 8 + int.from_bytes(data[:8], "little")
    head, payload = change(json.loads(data[8:n])), data[n:] if payload is None else payload
    meta = head["__metadata__"]
    meta["checksum"] = entries._checksum(meta, head[kind], payload)
    return entries._header(kind, meta, head[kind]) + payload


def headers(world) -> dict:
    "Headers that lie: never an error but a sentence, never a tensor."
    t, cache = Tally("malformed headers"), world.copy()
    kind, key, good = next(e for e in world.entries if e[0] == "prompt_embed")
    front = next(e for e in world.entries if e[0] == "prompt_prefix")
    path, n = place(cache, kind, key), 8 + int.from_bytes(good[:8], "little")
    def put(**kw):
        def change(h): h[kind] = h[kind] | kw; return h
        return change
    def meta(**kw):
        def change(h): h["__metadata__"] = h["__metadata__"] | kw; return h
        return change
    size = len(good) - n
    lies = {
        "no bytes": b"", "seven bytes": good[:7], "length 0": bytes(8) + good[8:], "length of 2**63": (1 << 63).to_bytes(8, "little") + good[8:], "length of 2**64 - 1": b"\xff" * 8 + good[8:],
        "one byte too long": (n - 8 + 1).to_bytes(8, "little") + good[8:], "one byte too short": (n - 8 - 1).to_bytes(8, "little") + good[8:], "longer than the file": len(good).to_bytes(8, "little") + good[8:],
        "no JSON": rebuilt(good, "{]"), "not UTF-8": rebuilt(good, b"\xff\xfe{}"), "a list": rebuilt(good, "[]"), "a number": rebuilt(good, "1"), "null": rebuilt(good, "null"),
        "100 000 brackets": rebuilt(good, "[" * 100_000), "100 000 braces": rebuilt(good, '{"a":' * 100_000), "a number of 10 000 digits": rebuilt(good, '{"__metadata__":{},"x":' + "9" * 10_000 + "}"),
        "metadata is a list": rebuilt(good, lambda h: h | dict(__metadata__=[])), "metadata is null": rebuilt(good, lambda h: h | dict(__metadata__=None)), "no metadata": rebuilt(good, lambda h: {kind: h[kind]}),
        "metadata's values are lists": rebuilt(good, meta(prefix=["a"], key=[key], kind=[kind])), "another format": rebuilt(good, meta(format="qie_nb-1")), "no tensor": rebuilt(good, lambda h: dict(__metadata__=h["__metadata__"])),
        "two tensors": rebuilt(good, lambda h: h | dict(more=h[kind])), "a name twice": rebuilt(good, good[8:n].decode().replace('{"__metadata__"', '{"__metadata__":{},"__metadata__"', 1)),
        "the tensor is a string": rebuilt(good, lambda h: h | {kind: "x"}), "offsets beyond the file": rebuilt(good, put(data_offsets=[0, size + 8])), "offsets backwards": rebuilt(good, put(data_offsets=[size, 0])),
        "negative offsets": rebuilt(good, put(data_offsets=[-8, size - 8])), "offsets that leave some over": rebuilt(good, put(data_offsets=[0, size - 4])), "an unknown dtype": rebuilt(good, put(dtype="F31")),
        "another dtype": rebuilt(good, put(dtype="I32")), "a negative shape": rebuilt(good, put(shape=[-1, 64])), "a shape of 2**64": rebuilt(good, put(shape=[1 << 32, 1 << 32])), "another shape": rebuilt(good, put(shape=[64, size // 256])),
        "bytes behind the end": good + b"12345678", "the prefix is a path": rebuilt(good, meta(prefix="../../../etc/passwd")), "another prefix": rebuilt(good, meta(prefix="0" * 40)),
        "signed: the tensor is a string": signed(good, kind, lambda h: h | {kind: dict(dtype="F32", shape="64", data_offsets="ab")}),
        "signed: a shape that does not fit": signed(good, kind, put(shape=[3, 64])), "signed: a shape of 2**64": signed(good, kind, put(shape=[1 << 32, 1 << 32])),
        "signed: the prefix is a path": signed(good, kind, meta(prefix="../../../etc/passwd")), "signed: the prefix is a list": signed(good, kind, meta(prefix=["a", "b"])), "signed: the prefix is a number": signed(good, kind, meta(prefix=7)),
    }
    for name, data in lies.items():
        path.parent.mkdir(exist_ok=True), path.write_bytes(data)
        with t.trial(name):
            m = EmbeddingCacheManager(cache)
            m.cache_exists(kind, key), m.prefix_of(kind, key), m.get_cache_stats(), m.gc(dry_run=True)
            with quiet(): world.dataset(cache).status()
            (where, why), = m.verify()
            assert where == str(path) and why and "\n" not in why
            got = m.load_cache(kind, key)
            assert got is None, f"handed out {got.shape}"
            report, _ = world.run(cache)
            assert snapshot(cache) == world.files, f"not made again: {report}"
        shutil.rmtree(cache/"quarantine", ignore_errors=True)
        path.write_bytes(good)
    with t.trial("signed: no such prefix"):
        path.write_bytes(signed(good, kind, meta(prefix="0" * 40)))
        m = EmbeddingCacheManager(cache)
        assert m.load_cache(kind, key) is None and not m.cache_exists(kind, key)
        path.write_bytes(good)
    with t.trial("signed: a prefix that stands on itself"):
        own = place(cache, *front[:2])
        def itself(h): h["__metadata__"] = h["__metadata__"] | dict(prefix=front[1]); return h
        own.write_bytes(signed(front[2], "prompt_prefix", itself))
        m = EmbeddingCacheManager(cache)
        assert m.load_cache("prompt_prefix", front[1]) is None
        own.write_bytes(front[2])
    with t.trial("foreign files between the entries"):
        for odd in ("notes (copy).safetensors", "a.safetensors", "x" * 200 + ".safetensors", ".hidden.safetensors", "readme.txt"): (path.parent/odd).write_bytes(good)
        (cache/kind/"zz").mkdir(), (cache/kind/"not two").mkdir(), (cache/kind/"ab.txt").write_text("x"), (cache/kind/"xy").write_text("a file")
        m = EmbeddingCacheManager(cache)
        with quiet(): world.dataset(cache).status()
        assert not m.verify() and m.gc(dry_run=True) and m.pack(world.folder("packed")) and world.run(cache)[0].tensors == 0
    t_index(world, t)
    return t.result(f"each of {len(lies)} was refused in a sentence, moved away and made again")


def t_index(world, t):
    "Indexes of a packed layer that lie, with a right checksum."
    packed = world.folder("packed")
    EmbeddingCacheManager(world.reference).pack(packed)
    index = packed/"cache-index.json"
    whole = json.loads(index.read_text())
    kind, key, _ = next(e for e in world.entries if e[0] == "pixel_latent")
    where = whole["entries"][kind][key]
    def entry(v): return whole | dict(entries=whole["entries"] | {kind: whole["entries"][kind] | {key: v}})
    lies = {
        "a list": [], "empty": {}, "entries are a list": whole | dict(entries=[]), "entries of a kind are a list": whole | dict(entries={kind: [key]}), "shards are a number": whole | dict(shards=3),
        "a shard that is a path": whole | dict(shards=["../cache-1.safetensors"]), "a shard that is missing": whole | dict(shards=["cache-9.safetensors"]), "identities are a list": whole | dict(identities=[1]),
        "a shard's number beyond": entry([7, *where[1:]]), "a negative place": entry([where[0], -8, *where[2:]]), "a place beyond the file": entry([where[0], 1 << 40, *where[2:]]),
        "a size of 2**50": entry([*where[:2], 1 << 50, where[3]]), "a negative size": entry([*where[:2], -1, where[3]]), "three values": entry(where[:3]), "a header that is a number": entry([*where[:3], 5]), "nothing": entry(None)}
    for name, lie in lies.items():
        if isinstance(lie, dict): lie = lie | dict(checksum=_index_checksum(lie))
        index.write_text(json.dumps(lie))
        with t.trial(f"index: {name}"):
            try:
                m = EmbeddingCacheManager(packed)
                m.identities(), m.get_cache_stats()
                assert m.load_cache(kind, key) is None, "handed out"
                m.verify()
            except Exception as e: sentence(e)


# --- what is kept
def bits(tmp) -> dict:
    "Tensors keep their bits and dtype, loose and packed."
    t, cache = Tally("bits and types kept"), EmbeddingCacheManager(Path(tmp)/"bits")
    g = torch.Generator().manual_seed(0)
    every = torch.arange(-2**15, 2**15, dtype=torch.int32).to(torch.int16)
    finite = lambda x: x[torch.isfinite(x)]
    tensors = {"every finite bfloat16": finite(every.view(torch.bfloat16)), "every finite float16": finite(every.view(torch.float16)),
               "float32 of random bits": finite(torch.randint(-2**31, 2**31 - 1, (50_000,), generator=g, dtype=torch.int64).to(torch.int32).view(torch.float32)),
               "a bool mask": torch.rand(77, generator=g) > 0.5, "an int64 mask": torch.randint(0, 2, (77,), generator=g), "an int32 mask": torch.ones(5, dtype=torch.int32), "a uint8 mask": torch.ones(5, dtype=torch.uint8),
               "float64": torch.rand(9, generator=g, dtype=torch.float64), "nothing": torch.zeros(0, 64), "one number": torch.tensor(1.5), "turned": torch.rand(6, 4, generator=g).T.bfloat16(), "every other": torch.rand(9, 8, generator=g)[:, ::2],
               "five axes": torch.rand(16, 1, 3, 5, 2, generator=g).bfloat16()}
    kinds = ("pixel_latent", "prompt_embed", "prompt_embeds_mask", "empty_prompt_embeds_mask", "prompt_prefix")
    for name, x in tensors.items():
        for kind in kinds: cache.save_cache(kind, key_of(kind, name=name), x)
    cache.pack(Path(tmp)/"packed")
    for where, m in (("loose", cache), ("packed", EmbeddingCacheManager(Path(tmp)/"packed"))):
        for name, x in tensors.items():
            for kind in kinds:
                with t.trial(f"{name} as {kind}, {where}"):
                    got = m.load_cache(kind, key_of(kind, name=name))
                    assert got.dtype == x.dtype and got.shape == x.shape
                    assert got.contiguous().numpy(force=True).tobytes() == x.contiguous().numpy(force=True).tobytes() if x.dtype != torch.bfloat16 else torch.equal(got.view(torch.int16), x.contiguous().view(torch.int16))
    for name, x in dict(nan=torch.tensor([1., float("nan")]), inf=torch.tensor([float("inf")]).bfloat16(), minus_inf=torch.tensor([-float("inf")]).half()).items():
        with t.trial(f"{name} is refused"): refused(lambda: cache.save_cache("pixel_latent", "ab" * 20, x), "NaN or inf")
    return t.result("every bit and type as it was, loose and packed; NaN and inf refused")


def bits_of_a_run(world) -> dict:
    "Training reads from a bfloat16 model's cache what its encoders returned, and masks are bool."
    t, parts = Tally("bfloat16 from the encoders to the batch"), components("2511", dtype=torch.bfloat16)
    raw = lambda x: x.contiguous().view(torch.int16) if x.dtype == torch.bfloat16 else x
    for packed in (False, True):
        cache = world.folder("bf16")
        with quiet():
            d = world.dataset(cache)
            encoder = Encoder(parts, d.cache)
            d.refresh(encoder.identity)
            encoder.cache.add_identity(encoder.identity)
            given = {i: encoder.encode_sample(d, i) for i in range(len(d))}
            if packed: EmbeddingCacheManager(cache).pack(world.folder("bf16p"))
            d = world.dataset(world.tmp/"bf16p" if packed else cache, caption_dropout_rate=0.)
        for i in given:
            with t.trial(f"sample {i}, {'packed' if packed else 'loose'}"):
                item, want = d[i], given[i]
                assert item["cached"] and want["pixel_latent"].dtype == torch.bfloat16
                for name in ("pixel_latent", "prompt_embed", "prompt_embeds_mask"): assert item[name].dtype == want[name].dtype and torch.equal(raw(item[name]), raw(want[name])), name
                assert torch.equal(raw(item["control_latent"]), raw(want["control_latent.0"])) and item["prompt_embeds_mask"].dtype == torch.bool
                assert collate([item, item])["prompt_embed"][0].dtype == torch.bfloat16
    return t.result("every tensor the same, bit for bit")


def sizes(tmp) -> dict:
    "Against a file each for the whole prompt, the whole empty prompt, two latents and two masks."
    t, said = Tally("bytes per sample, v1 with one control image"), []
    with t.trial("a tiny model, 1400 image tokens"):
        w = World.__new__(World)
        w.tmp, w.root, w.components = Path(tmp), Path(tmp)/"set", components("v1", (128*128, None), dtype=torch.bfloat16)
        w.settings = dict(image_size=[128, 128], vl_area=1024*1024, caption_dropout_rate=0.1)
        write_set(w.root, (0, 1))
        for n in (0, 1):
            picture(n, (1216, 896), w.root/"control_images"/f"{n:04}.png")
            (w.root/"training_images"/f"{n:04}.txt").write_text(("turn the sky dark", "make her coat red")[n])
        cache = w.folder("sizes")
        w.run(cache)
        d, naive = w.dataset(cache), 0
        with quiet(): m = EmbeddingCacheManager(cache)
        for i in range(2):
            tensors = {name: m.load_cache(*k[:2]) for name, k in d.needed(i).items()}
            naive += sum(len(save({name: x})) for name, x in tensors.items())
        ours, (whole, width), short = sum(len(v) for p, v in snapshot(cache).items() if "/" in p), tensors["prompt_embed"].shape, tensors["empty_prompt_embed"].shape[0]
        assert 1300 <= whole <= 1600 and tensors["pixel_latent"].numel() * 16 < whole * width
        said.append(f"{ours/naive:.3f} on a tiny model ({whole} tokens of {width}, latents {list(tensors['pixel_latent'].shape)}, {ours/2e3:.0f} KB instead of {naive/2e3:.0f})")
        assert ours <= 0.6 * naive, said[-1]
    with t.trial("the real model"):
        who = dict(vae="0" * 16, text_encoder="0" * 56, template="0" * 15, dtype="bfloat16")
        image, text = image_parts("0" * 64, (1024, 1024), who), prompt_parts("make the sky above the old town a little darker", ["0" * 64], [(1184, 896)], who)
        front, prompt, empty, latent, key = 1420, 30, 6, (16, 1, 128, 128), "0" * 40
        e = lambda kind, parts, dtype, shape, prefix=None: entry_bytes(kind, key, parts, dtype, shape, prefix)
        masks = [e("prompt_embeds_mask", text, "bool", (front + prompt,)), e("empty_prompt_embeds_mask", text, "bool", (front + empty,))]
        latents = [e(k, image, "bfloat16", latent) for k in LATENTS]
        ours = sum(masks + latents) + e("prompt_prefix", prefix_parts(["0" * 64], [(1184, 896)], who), "bfloat16", (front, 3584)) + sum(e(k, text, "bfloat16", (n, 3584), key) for k, n in (("prompt_embed", prompt), ("empty_prompt_embed", empty)))
        naive = 2 * (2 * math.prod(latent)) + sum(2 * 3584 * (front + n) + front + n for n in (prompt, empty))
        said.append(f"{ours/naive:.3f} on the real one ({front} tokens of 3584, latents {list(latent)}, {ours/1e6:.2f} MB instead of {naive/1e6:.2f})")
        assert ours <= 0.6 * naive, said[-1]
    return t.result("; ".join(said))


def opens(world) -> dict:
    "Files opened while samples are read, by audit hook."
    t, packed = Tally("file opens per sample"), world.folder("packed")
    shards = len(EmbeddingCacheManager(world.reference).pack(packed, shard_bytes=60_000)) - 1
    assert shards > 1
    def counted_opens(cache):
        d, count = world.dataset(cache, caption_dropout_rate=0.), collections.Counter()
        first = [d[i] for i in range(len(d))]
        assert all(x["cached"] for x in first)
        if Path(cache) == packed: d.cache.layers[0].open_files.clear()
        def hook(event, args):
            if event == "open" and str(args[0]).startswith(str(cache)): count[str(args[0])] += 1
        sys.addaudithook(hook)
        counts = []
        for epoch in range(2):
            for i in range(len(d)): count.clear(); d[i]; counts.append(sum(count.values()))
        return counts
    counts = lambda cache: child_value(lambda: counted_opens(cache), world.tmp/"log")
    for n, c in enumerate(counts(world.reference)):
        with t.trial(f"loose, read {n}"): assert c == 5, f"{c} opens"
    for process in range(2):
        found = counts(packed)
        with t.trial(f"packed, process {process}"): assert sum(found) == shards and not any(found[6:]), f"{sum(found)} opens of {shards} shards"
    with t.trial("the tensors are the same"):
        a, b = world.dataset(world.reference), world.dataset(packed)
        for i in range(len(a)):
            for name in ("pixel_latent", "control_latent", "prompt_embed", "prompt_embeds_mask"): assert torch.equal(a[i][name], b[i][name])
    return t.result(f"loose: 5 a sample (latent, control latent, prefix, suffix, mask); packed: {shards} in all, one a shard and process")


# --- all of them
def cases(full): # {name: function of a folder}
    world = functools.lru_cache(lambda: World(tempfile.mkdtemp(prefix="faults-")))
    crowded = functools.lru_cache(lambda: World(tempfile.mkdtemp(prefix="faults-"), (0, 1, 2, 0, 0, 0, 0, 7)))
    n = lambda much, little: much if full else little
    return dict(
        kills_at_random=lambda tmp: kills_at_random(world(), n(200, 5)), kills_at_operations=lambda tmp: kills_at_operations(world(), n(None, 1)), order_of_writes=lambda tmp: order_of_writes(world()),
        flips=lambda tmp: damages(world(), "flip", n(1000, 60)), truncations=lambda tmp: damages(world(), "truncate", n(1000, 60)), zeroed_tails=lambda tmp: damages(world(), "zero", n(1000, 60)),
        swaps=lambda tmp: swaps(world(), n(None, 40)),
        edits_scripted=lambda tmp: edits_scripted(tmp, n(2.1, 0.03), n(None, 31)), edits_of_the_model=edits_of_the_model, losses=lambda tmp: losses(tmp, every=n(1, 9)), edits_random=lambda tmp: edits_random(tmp, n(500, 15)), edits_meanwhile=lambda tmp: edits_meanwhile(world(), n((1, 2, 9), (1,))),
        crowd_of_2=lambda tmp: crowd(crowded(), 2, n(20, 1)), crowd_of_4=lambda tmp: crowd(crowded(), 4, n(20, 1)), crowd_undisturbed=lambda tmp: crowd(crowded(), 4, n(10, 1), kill=False),
        full_disk=lambda tmp: full_disk(world(), n(1, 12)), read_only_loose=lambda tmp: read_only(world(), False), read_only_packed=lambda tmp: read_only(world(), True),
        pickles=lambda tmp: pickles(world()), headers=lambda tmp: headers(world()), bits=bits, bits_of_a_run=lambda tmp: bits_of_a_run(world()), sizes=sizes, opens=lambda tmp: opens(world()))


def about() -> dict:
    import diffusers, safetensors, transformers
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.processor()) if Path("/proc/cpuinfo").exists() else platform.processor()
    return dict(device=f"{cpu}, one thread", system=f"{platform.system()} {platform.release()}", date=datetime.date.today().isoformat(),
                versions=dict(python=platform.python_version(), torch=torch.__version__, safetensors=safetensors.__version__, diffusers=diffusers.__version__, transformers=transformers.__version__))


def main(argv=None):
    p = argparse.ArgumentParser(description="Fault injection for the cache")
    p.add_argument("--full", action="store_true", help="the full counts")
    p.add_argument("--only", nargs="*", help="names of cases")
    p.add_argument("--out", help="JSON file for the results")
    a = p.parse_args(argv)
    torch.set_num_threads(1)
    chosen, results, began = cases(a.full), [], time.time()
    with tempfile.TemporaryDirectory(prefix="faults-") as home:
        tempfile.tempdir = home # everything made on the way goes with it
        os.environ["QIE_NB_HOME"] = str(Path(home)/"home")
        for name in a.only or chosen:
            tmp = Path(home)/name
            tmp.mkdir()
            try: got = chosen[name](tmp)
            except Exception as e:
                traceback.print_exc()
                got = dict(case=name, trials=1, passed=0, worst=f"broke off: {type(e).__name__}: {e}", seconds=0.)
            results.append(dict(name=name) | got)
            print(f"{'FAIL' if got['passed'] != got['trials'] else 'ok  ' if got['trials'] else 'none'} {got['case']}: {got['passed']} of {got['trials']} in {got['seconds']:.0f} s; {got['worst']}", flush=True)
            shutil.rmtree(tmp, ignore_errors=True)
    said = about() | dict(counts="full" if a.full else "few", seconds=round(time.time() - began), cases=results)
    if a.out: Path(a.out).parent.mkdir(parents=True, exist_ok=True); Path(a.out).write_text(json.dumps(said, indent=1) + "\n")
    return any(r["passed"] != r["trials"] for r in results)


if __name__ == "__main__": sys.exit(main())
