"""Fault injection for the cache: kills, damage, many processes, full disks, malformed files. Each case counts its trials and reports the worst."""
import collections, contextlib, ctypes, errno, fractions, functools, hashlib, io, itertools, json, math
import os, pickle, random, re, shutil, signal, subprocess, sys, tempfile, time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

import qie_nb.encoding.prompts, qie_nb.models.components
from helpers import settings
from qie_nb.cache import CacheEntryError, EmbeddingCacheManager, key_of
from qie_nb.core import cache_entries, files
from qie_nb.core.cache_entries import ALL_KINDS, unpack_entry
from qie_nb.core.cache_layers import FolderStore, _index_checksum, verify_entry
from qie_nb.data.dataset import ImageDataset
from qie_nb.encoding.encoder import Encoder
from qie_nb.encoding.precompute import precompute
from qie_nb.lora.adapters import load_lora, lora_state
from qie_nb.models.components import Components
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.training.checkpoint import find_checkpoint
from trials import Shared, Tally, child_value, fork, main, quiet, wait, watch_operations

LATENTS, TEXTS = ("pixel_latent", "control_latent"), ("prompt_prefix", "prompt_embed", "prompt_embeds_mask", "empty_prompt_embed", "empty_prompt_embeds_mask")
SIZES = ((48, 32), (32, 48), (40, 40))


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
def image(seed, size, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).save(path)


def write_set(root, same=(0, 1, 2, 0, 4, 5)):
    "Pairs; sample i has the control image of sample same[i]."
    for i, s in enumerate(same):
        image(2 * s, SIZES[s % 3], root/"control_images"/f"{i:04}.png")
        image(2 * i + 1, SIZES[i % 3], root/"training_images"/f"{i:04}.png")
        (root/"training_images"/f"{i:04}.txt").write_text(f"make it {'abcdefgh'[i]}")
    return root


@functools.lru_cache
def components(variant="2511", areas=(64*64, 64*64), dtype=torch.float32):
    with quiet():
        c = Components(str(tiny_folder(variant, areas)), dtype)
        for part in ("vae", "text_encoder", "processor"): c.get(part)
        c.identity()
    return c


def snapshot(cache) -> dict: # {path in the cache: bytes} of what counts as content
    cache = Path(cache)
    return {str(p.relative_to(cache)): p.read_bytes() for p in sorted(cache.rglob("*"))
            if p.is_file() and p.relative_to(cache).parts[0] in (*LATENTS, *TEXTS, "manifest.json") and not p.name.startswith(".")}


class World:
    "A data set, an encoder and its cache; `files` is the cache's content, `entries` has (kind, key, bytes)."
    def __init__(self, tmp, same=(0, 1, 2, 0, 4, 5), parts=None, **data):
        self.tmp, self.data, self.components = Path(tmp), dict(image_size=[64, 64], caption_dropout_rate=0.1) | data, parts or components()
        self.root, self.reference = write_set(self.tmp/"set", same), self.tmp/"reference"
        report = self.run(self.reference)
        self.files = snapshot(self.reference)
        self.entries = [(Path(p).parts[0], Path(p).stem, data) for p, data in self.files.items() if "/" in p]
        assert len(self.entries) == report.tensors and {k for k, *_ in self.entries} == set(ALL_KINDS)
        tokens = lambda kind: [header(data)[kind]["shape"][0] for k, _, data in self.entries if k == kind]
        assert max(tokens("prompt_embed")) < min(tokens("prompt_embeds_mask")), "prompts are stored with their prefix"

    def first(self, kind): return next(e for e in self.entries if e[0] == kind)

    def folder(self, name="trial"):
        shutil.rmtree(self.tmp/name, ignore_errors=True)
        return self.tmp/name

    def copy(self, name="trial"): return Path(shutil.copytree(self.reference, self.folder(name)))

    def pack(self, name="packed", **kw):
        packed = self.folder(name)
        return packed, EmbeddingCacheManager(self.reference).pack(packed, **kw)

    def dataset(self, cache, **data):
        cache = [str(c) for c in cache] if isinstance(cache, list) else str(cache)
        with quiet(): return ImageDataset(dict(dataset_path=str(self.root), cache_dir=cache) | self.data | data)

    def run(self, cache, *part, ahead=4):
        dataset = self.dataset(cache)
        with quiet(): return precompute(dataset, Encoder(self.components, dataset.cache), *part, prefetch=ahead)

    def makes_again(self, cache, *bad, missing=0):
        "A precompute encodes the missing and bad entries again, nothing else, with the same bytes."
        report = self.run(cache)
        assert {w for w, _ in report.bad} == set(map(str, bad)) and report.tensors == len(bad) + missing, str(report)
        assert snapshot(cache) == self.files, "made again with other bytes"

    def train(self, cache, **train):
        from qie_nb.trainer import QwenImageEditTrainer
        config = settings(self.root, self.tmp, model=dict(pretrained_model_name_or_path=str(self.components.folder), lora=dict(r=2)), data=dict(batch_size=1) | self.data,
                          cache=dict(cache_dir=[str(c) for c in cache] if isinstance(cache, list) else str(cache)), train=dict(output_dir=str(self.folder("out")), max_train_steps=3) | train)
        with quiet(): return QwenImageEditTrainer(config).fit()


def place(cache, kind, key, *_): return Path(cache)/kind/key[:2]/f"{key}.safetensors"
def header(data): return json.loads(data[8:8 + int.from_bytes(data[:8], "little")])


# --- kills
def counted(world, cache, shared, at=0, die_at=None):
    "In a child: precompute, with entries counted in shared memory; killed at its entry `die_at`, while it holds a lock."
    real = Encoder.save
    def count_and_save(self, *a, **kw):
        shared[at] += 1
        if shared[at] == die_at: os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *a, **kw)
    Encoder.save = count_and_save
    world.run(cache)


def operations_of(world) -> list: # [(what, path)]
    "All writes, fsyncs and renames of an undisturbed precompute."
    cache, heard = world.folder(), []
    def job():
        watch_operations(cache, lambda *what: heard.append(what))
        world.run(cache)
        return heard
    return [tuple(o) for o in child_value(job, world.tmp/"log")]


def kills_at_operations(world, each=None) -> dict:
    "At all of them, or at `each` of every kind. The entries left are complete; the next precompute does the rest, with the same bytes."
    heard, places, rng, worst = operations_of(world), collections.defaultdict(list), random.Random(0), 0
    for n, (what, _) in enumerate(heard): places[what].append(n)
    chosen = sorted(itertools.chain(*(ns if each is None else rng.sample(ns, each) for ns in places.values())))
    t = Tally("precompute killed at every write, fsync and rename", len(chosen))
    for n in chosen:
        cache, shared = world.folder(), Shared()
        def tell(what, path):
            shared[10] += 1
            if shared[10] == n + 1: os.kill(os.getpid(), signal.SIGKILL)
        def job():
            watch_operations(cache, tell)
            counted(world, cache, shared)
        status = os.waitpid(fork(job, world.tmp/"log"), 0)[1]
        with t.trial(f"killed at {heard[n][0]} {n + 1}"):
            assert os.WIFSIGNALED(status), "was not killed"
            assert snapshot(cache).items() <= world.files.items(), "a file is not complete"
            report = world.run(cache)
            again = shared[0] + report.tensors - len(world.entries)
            worst = max(worst, again)
            assert not report.skipped and not report.bad and 0 <= again <= 4, f"{again} entries made again; {report}"
            assert snapshot(cache) == world.files, "the final cache differs"
            left = [p for d in (".tmp", "quarantine") for p in (cache/d).glob("*")]
            assert not left or not report.tensors, f"left over: {left}"
    return t.result(f"at most {worst} entries made again after a kill; an undisturbed run has " + ", ".join(f"{len(ns)} times {what!r}" for what, ns in places.items()))


def order_of_writes(world) -> dict:
    "A power cut loses what no fsync has secured: every file is synced before its rename, and its folder right after."
    t, heard = Tally("synced before the rename, the folder after"), operations_of(world)
    for n, (what, path) in enumerate(heard):
        if what != "rename": continue
        src, dst = path.split("\t")
        with t.trial(dst):
            own = [w for w, p in heard[:n] if p == src]
            assert own and own[-1] == "fsync", f"{own[-1:]} before the rename"
            assert heard[n + 1][0] == "renamed" and heard[n + 2] == ("fsync", str(Path(dst).parent)), f"{heard[n + 2:n + 3]} after the rename"
    return t.result("none out of order")


# --- damage
def flip(data, rng):
    n = rng.randrange(len(data) * 8)
    return data[:n // 8] + bytes([data[n // 8] ^ 1 << n % 8]) + data[n // 8 + 1:]


def truncate(data, rng): return data[:rng.randrange(len(data))]


def zero_tail(data, rng):
    n = rng.randrange(len(data.rstrip(b"\0")))
    return data[:n] + bytes(len(data) - n)


def overwrite(path, data):
    "In place, with its times restored, as by a bad disk."
    st = os.stat(path)
    path.write_bytes(data)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


def reading(cache, kind, key, on_prefix=()):
    "A bad entry is not returned, is reported in one sentence and moved; prompts with a bad prefix are not returned either."
    m = EmbeddingCacheManager(cache)
    assert verify_entry(FolderStore(cache), kind, key), "`verify_entry` finds nothing"
    for k in on_prefix: assert m.load_cache("prompt_embed", k) is None, "a prompt on a bad prefix was returned"
    assert m.load_cache(kind, key) is None, "was returned"
    where, why = m.quarantined[0]
    assert where == str(place(cache, kind, key)) and why and "\n" not in why
    assert not place(cache, kind, key).exists() and not m.cache_exists(kind, key)
    moved = cache/"quarantine"/f"{kind}-{key}.safetensors"
    assert moved.is_file() and why in moved.with_suffix(".reason.txt").read_text()


def damaged_loose(world, t, damage, trials, rng):
    "Most are found by a read; every 25th by a precompute that knew the file as good."
    cache, on = world.copy(), collections.defaultdict(list)
    for kind, key, data in world.entries:
        if kind == "prompt_embed": on[header(data)["__metadata__"]["prefix"]].append(key)
    for n in range(trials):
        kind, key, data = rng.choice(world.entries)
        path, bad = place(cache, kind, key), damage(data, rng)
        with t.trial(f"{kind} {key} {n}"), patch.object(files, "_MIN_AGE", 0.03):
            if n % 25 == 0: time.sleep(0.05); world.makes_again(cache)
            overwrite(path, bad)
            if n % 25: reading(cache, kind, key, on[key] if kind == "prompt_prefix" else ())
            else: world.makes_again(cache, path)
        path.write_bytes(data)


def damaged_packed(world, t, damage, trials, rng) -> int: # damages in a table of contents, which no read depends on
    "The packed layer or the entry is refused; every returned tensor is right."
    (packed, paths), idle = world.pack(shard_bytes=40_000), 0
    good_layer = EmbeddingCacheManager(packed)
    right = {(kind, key): good_layer.load_cache(kind, key) for kind, key, _ in world.entries} # prompts with their prefix
    for n in range(trials):
        path = rng.choice(paths)
        good = path.read_bytes()
        bad = damage(good, rng)
        overwrite(path, bad)
        with t.trial(f"{path.name} {n}"):
            try: m = EmbeddingCacheManager(packed)
            except CacheEntryError as e: sentence(e, str(packed/"cache-index.json"))
            else:
                got = {k: m.load_cache(*k) for k in right}
                wrong = [k for k, x in got.items() if x is not None and not torch.equal(x, right[k])]
                none, toc = sum(x is None for x in got.values()), 8 + int.from_bytes(good[:8], "little")
                idle += not none
                assert not wrong, f"{wrong} are wrong"
                assert none or bad[toc:] == good[toc:], "not noticed"
                assert bool(m.quarantined) == bool(none) and len(m.quarantined) <= none # a bad prefix takes its prompts along
                assert all("\n" not in why for _, why in m.quarantined)
        overwrite(path, good)
    return idle


def damages(world, name, damage, trials) -> dict:
    t, rng, packed = Tally(f"entries: {name}", trials), random.Random(name), trials // 5
    damaged_loose(world, t, damage, trials - packed, rng)
    idle = damaged_packed(world, t, damage, packed, rng)
    return t.result(f"all noticed, every 25th by a precompute, which made that entry again and no other; {packed} in a packed layer, {idle} of them in a table of contents, which no read depends on")


def losses(world, every=1) -> dict:
    "An entry removed: only that one is encoded again."
    t, cache = Tally("entries: removed"), world.copy()
    for e in world.entries[::every]:
        with t.trial(f"{e[:2]}"):
            place(cache, *e).unlink()
            world.makes_again(cache, missing=1)
    return t.result("one entry made again, the same bytes")


def swaps(world, trials=None) -> dict:
    "Whole, valid entries in the wrong place."
    cache, pairs = world.copy(), list(itertools.combinations(world.entries, 2))
    if trials: # half of them within a kind, where only the key differs
        inside, across = ([p for p in pairs if (p[0][0] == p[1][0]) is same] for same in (True, False))
        pairs = inside[:trials // 2] + random.Random(0).sample(across, trials - len(inside[:trials // 2]))
    t = Tally("entries: swapped", len(pairs))
    for n, (a, b) in enumerate(pairs):
        pa, pb = place(cache, *a), place(cache, *b)
        pa.write_bytes(b[2]), pb.write_bytes(a[2])
        with t.trial(f"{a[:2]} with {b[:2]}"):
            if n % 40: [reading(cache, *e[:2]) for e in (a, b)]
            else: world.makes_again(cache, pa, pb)
        pa.write_bytes(a[2]), pb.write_bytes(b[2])
        shutil.rmtree(cache/"quarantine", ignore_errors=True)
    within = sum(a[0] == b[0] for a, b in pairs)
    return t.result(f"all noticed: {within} exchanges within a kind and {len(pairs) - within} between kinds")


# --- which entries an edit invalidates, by a model of the rules that does not use the library's keys
def sha(path): return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def by_area(area, size): # the pipelines' own rounding
    w = math.sqrt(area * size[0] / size[1])
    return max(32, round(w / 32) * 32), max(32, round(w / (size[0] / size[1]) / 32) * 32)


def described(kind, parts) -> tuple: # what an entry says that it was made of, in the rules' terms
    aspect = fractions.Fraction(*parts["crop"]) if parts["crop"] else None
    if kind in LATENTS: return kind, parts["image"], tuple(parts["size"]), aspect
    return kind, parts.get("prompt"), tuple(parts["controls"]), tuple(map(tuple, parts["vl_sizes"])), aspect


class Studio:
    "A data set that is edited, its cache, and the entries that the cache must hold by now."
    def __init__(self, tmp, variant="2511", areas=(64*64, 64*64), settle=0.03, same=(0, 1, 2, 0, 4, 5)):
        self.tmp, self.root, self.cache, self.settle = Path(tmp), write_set(Path(tmp)/"set", same), Path(tmp)/"cache", settle
        self.variant, self.areas, self.weights, self.dtype, self.template, self.quantized = variant, areas, "00", torch.float32, "", None
        self.data, self.encoder, self.part, self.dirs = dict(image_size=[64, 64], caption_dropout_rate=0.), {}, (0, None), None
        self.known, self.models, self.pool, self.sizes, self.levels = set(), {}, itertools.count(1000), itertools.cycle(SIZES), itertools.cycle((9, 1))

    # the model of the rules
    def samples(self): # (target, controls, caption) of each, by its own look at the folders
        folders = sorted(self.root.glob("control_images*"), key=lambda d: (len(d.name), d.name))
        return [(p, [c for d in folders for c in d.glob(f"{p.stem}.*")], p.with_suffix(".txt").read_bytes().decode("utf-8-sig").strip())
                for p in sorted((self.root/"training_images").iterdir()) if p.suffix != ".txt"]

    def expected(self) -> set: # of (as `described`, model)
        d, out = self.data, set()
        aspect = fractions.Fraction(*d["image_size"]) if d.get("crop") else None
        shape = lambda path: (aspect.numerator, aspect.denominator) if aspect else Image.open(path).size
        area, control, vl = d["image_size"][0] * d["image_size"][1], d.get("control_area", self.areas[0]), d.get("vl_area", self.areas[1])
        vae, text = (self.weights[0], self.dtype), (self.weights[1], self.dtype, self.template, self.variant == "v1", self.quantized)
        for target, controls, caption in self.samples()[slice(*self.part)]:
            size = tuple(d["image_size"]) if aspect else by_area(area, Image.open(target).size)
            out.add((("pixel_latent", sha(target), size, aspect), vae))
            for c in controls: out.add((("control_latent", sha(c), by_area(control, shape(c)), aspect), vae))
            on = tuple(map(sha, controls)), tuple(by_area(control if self.variant == "v1" else vl, shape(c)) for c in controls), aspect
            out.add((("prompt_prefix", None, *on), text))
            for kind in ("prompt_embed", "prompt_embeds_mask"):
                out.add(((kind, caption, *on), text))
                if d["caption_dropout_rate"]: out.add((("empty_" + kind, " ", *on), text))
        return out

    # what the library does
    def model(self):
        name = (self.variant, self.weights, self.dtype, self.quantized)
        if name in self.models: return self.models[name]
        tiny = lambda seed: tiny_folder("v1" if self.variant == "v1" else "2511", self.areas, seed)
        with quiet():
            folder = Path(shutil.copytree(tiny(0), self.tmp/f"model-{self.variant}-{self.weights}", dirs_exist_ok=True))
            config = folder/"transformer"/"config.json"
            if self.variant == "2509": config.write_text(config.read_text().replace('"zero_cond_t": true', '"zero_cond_t": false')) # the only difference
            for part, seed in zip(("vae", "text_encoder"), self.weights): shutil.copytree(tiny(int(seed))/part, folder/part, dirs_exist_ok=True)
            self.models[name] = Components(str(folder), self.dtype, quantize=dict(text_encoder=self.quantized))
        return self.models[name]

    def precompute(self) -> tuple: # (Counter of what was stored, Report, encoder's calls)
        stored, save, template = collections.Counter(), EmbeddingCacheManager.save_cache, qie_nb.models.components.template_of
        def save_cache(manager, kind, key, tensor, parts=None, prefix=None):
            stored[described(kind, parts)] += 1
            return save(manager, kind, key, tensor, parts, prefix)
        def template_of(pipeline):
            text, drop = template(pipeline)
            return text.replace("<|im_start|>user", f"{self.template}<|im_start|>user"), drop
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet())
            for o, name, new in [(EmbeddingCacheManager, "save_cache", save_cache), (files, "_MIN_AGE", self.settle), (qie_nb.models.components, "template_of", template_of), (qie_nb.encoding.prompts, "template_of", template_of)]:
                if new is not template_of or self.template: stack.enter_context(patch.object(o, name, new))
            dataset = ImageDataset(dict(dataset_path=str(self.root), cache_dir=self.dirs or str(self.cache)) | self.data)
            encoder = Encoder(self.model(), dataset.cache, **self.encoder)
            return stored, precompute(dataset, encoder, *self.part), encoder.calls

    def step(self, t, name, edit, costs=None):
        "One edit: exactly the entries of the rules are stored, and `costs` many of each kind."
        with t.trial(name):
            edit()
            time.sleep(self.settle * 1.5)
            want = self.expected() - self.known
            stored, report, calls = self.precompute()
            asked = collections.Counter(what for what, _ in want)
            assert not report.skipped and stored == asked, f"stored beyond the rules {list((stored - asked).items())[:3]}, not stored {list((asked - stored).items())[:3]} {report.skipped}"
            assert report.tensors == len(want) and calls["vae"] == sum(k[0] in LATENTS for k in asked), f"{report}, {calls}"
            kinds = collections.Counter(what[0] for what in asked)
            assert costs is None or kinds == collections.Counter(costs), f"{dict(kinds)}, but the edit is to cost {costs}"
        self.known |= self.expected()

    def from_scratch(self, t, name):
        "A fresh cache has the same files, byte for byte."
        with t.trial(name):
            old, own = snapshot(self.cache), self.cache
            self.cache = Path(tempfile.mkdtemp(dir=self.tmp))
            try: self.precompute(); new = snapshot(self.cache)
            finally: self.cache = own
            differ = [p for p in new if p != "manifest.json" and new[p] != old.get(p)]
            assert len(new) > 7 and not differ, f"{len(differ)} of {len(new)} differ: {differ[:2]}"

    # edits
    def target(self, n, suffix=".png"): return self.root/"training_images"/f"{n:04}{suffix}"
    def control(self, n, folder="control_images"): return self.root/folder/f"{n:04}.png"
    def caption(self, n, text): self.target(n, ".txt").write_bytes(text.encode() if isinstance(text, str) else text)
    def new_image(self, path, size=None): image(next(self.pool), size or Image.open(path).size, path)

    def replace_unseen(self, path):
        "Another image under the same name, of the same size and time."
        while True:
            st, old, im = os.stat(path), path.read_bytes(), np.array(Image.open(path))
            im[0, 0] = np.random.default_rng(next(self.pool)).integers(0, 255, 3)
            Image.fromarray(im).save(path, compress_level=0)
            if path.stat().st_size == len(old) and path.read_bytes() != old: break
            time.sleep(self.settle * 1.5), self.precompute()
            self.known |= self.expected() # the first time it is stored without compression
        os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))

    def exchange(self, a, b): x, y = a.read_bytes(), b.read_bytes(); a.write_bytes(y), b.write_bytes(x)
    def touch_all(self, root): [os.utime(p, (1e9 + n, 1e9 + n)) for n, p in enumerate(Path(root).rglob("*"))]
    def remove(self, n): [p.unlink() for p in self.root.glob(f"*/{n:04}.*")]
    def set(self, **kw): self.data = {k: v for k, v in (self.data | kw).items() if v is not None}
    def be(self, **kw): vars(self).update(kw)
    def copy_sample(self, n, to, caption):
        for get in (self.target, self.control): shutil.copy(get(n), get(to))
        self.caption(to, caption)
    def move(self, name, copy=False):
        (shutil.copytree if copy else shutil.move)(self.root, self.tmp/name)
        self.root = self.tmp/name
    def table(self, name):
        rows = [dict(image=str(p.relative_to(self.root)), edit_image=str(c.relative_to(self.root)), prompt=text) for p, (c,), text in self.samples()]
        (self.root/name).write_text("\n".join(map(json.dumps, rows)) if name.endswith("l") else "\n".join(["image,edit_image,prompt", *(",".join(r.values()) for r in rows)]))


def times(n, *kinds): return {k: v * n for d in kinds for k, v in d.items()}
SUFFIX, EMPTY, PIXEL, CONTROL, PREFIX = dict(prompt_embed=1, prompt_embeds_mask=1), dict(empty_prompt_embed=1, empty_prompt_embeds_mask=1), dict(pixel_latent=1), dict(control_latent=1), dict(prompt_prefix=1)
NOTHING, ALL_LATENTS, NEW_CONTROL = {}, times(6, PIXEL) | times(5, CONTROL), CONTROL | PREFIX | SUFFIX | EMPTY
ALL_TEXTS = times(5, PREFIX, SUFFIX, EMPTY) # six captions, two of them the same, on five sets of images
FIRST = ALL_LATENTS | times(5, PREFIX) | times(6, SUFFIX)


def repeatable(s): # (name, edit, what it is to cost after those above it)
    target, control, text, new = s.target, s.control, lambda n: s.target(n, ".txt"), lambda path: s.new_image(path, next(s.sizes))
    return [
        ("a first precompute", lambda: None, FIRST),
        ("captions are dropped from now on", lambda: s.set(caption_dropout_rate=0.1), times(5, EMPTY)),
        ("one caption of two on the same images", lambda: s.caption(3, f"make it {next(s.pool)}"), SUFFIX),
        ("a byte order mark and a line end", lambda: s.caption(3, b"\xef\xbb\xbf" + text(3).read_bytes() + b"\n"), NOTHING),
        ("the caption of another image", lambda: shutil.copy(text(0), text(1)), SUFFIX),
        ("the caption of the same images", lambda: shutil.copy(text(0), text(3)), NOTHING),
        ("captions exchanged between two images", lambda: s.exchange(text(4), text(5)), times(2, SUFFIX)),
        ("a target", lambda: new(target(0)), PIXEL),
        ("a target under the same name, size and time", lambda: s.replace_unseen(target(0)), PIXEL),
        ("a target's file written again, the same pixels", lambda: Image.open(target(0)).save(target(0), compress_level=next(s.levels)), PIXEL),
        ("targets exchanged", lambda: s.exchange(target(1), target(2)), NOTHING),
        ("a control image", lambda: new(control(5)), NEW_CONTROL),
        ("a control image under the same name, size and time", lambda: s.replace_unseen(control(5)), NEW_CONTROL),
        ("one of two equal control images", lambda: new(control(3)), NEW_CONTROL),
        ("and equal again", lambda: shutil.copy(control(0), control(3)), NOTHING),
        ("target and control exchanged", lambda: s.exchange(target(4), control(4)), PIXEL | NEW_CONTROL),
        ("and back", lambda: s.exchange(target(4), control(4)), NOTHING),
        ("a sample copied with another caption", lambda: s.copy_sample(5, 12, "but not so much"), SUFFIX),
        ("the sample removed", lambda: s.remove(12), NOTHING),
        ("everything touched", lambda: s.touch_all(s.root), NOTHING),
        ("resolution", lambda: s.set(image_size=[96, 96]), times(6, PIXEL)),
        ("cut to a shape", lambda: s.set(image_size=[64, 32], crop=True), ALL_LATENTS | ALL_TEXTS),
        ("larger, cut to the same shape", lambda: s.set(image_size=[128, 64], crop=True), times(6, PIXEL)),
        ("not cut, another area for the VAE", lambda: s.set(image_size=[64, 64], crop=None, control_area=96*96), times(5, CONTROL)),
        ("an area that rounds to the same", lambda: s.set(control_area=96*96 + 50), NOTHING),
        ("area of the controls for the text encoder", lambda: s.set(control_area=None, vl_area=112*112), ALL_TEXTS),
        ("the model's own areas", lambda: s.set(vl_area=None), NOTHING),
        ("other weights of the VAE", lambda: s.be(weights="50"), ALL_LATENTS),
        ("other weights of the text encoder", lambda: s.be(weights="05"), ALL_TEXTS),
        ("both, each known", lambda: s.be(weights="55"), NOTHING),
        ("another template", lambda: s.be(weights="00", template="Be brief. "), ALL_TEXTS),
        ("bfloat16", lambda: s.be(template="", dtype=torch.bfloat16), ALL_LATENTS | ALL_TEXTS),
        ("a quantized text encoder", lambda: s.be(dtype=torch.float32, quantized="qint8"), ALL_TEXTS),
        ("2509 instead of 2511, the same encoders", lambda: s.be(quantized=None, variant="2509"), NOTHING),
        ("the model's files touched", lambda: (s.be(variant="2511"), s.touch_all(s.model().folder)), NOTHING),
    ]


def scripted(s):
    home, second, t0 = Path(os.environ["QIE_NB_HOME"]), s.root/"control_images_2", s.target(0)
    def forget_digests():
        shutil.rmtree(home)
        files._facts.clear(), files._folders.clear(), setattr(files._local, "owner", None)
    def spoil_digests(): forget_digests(); home.mkdir(); (home/"files.sqlite").write_bytes(b"not a data base" * 100)
    def link(): s.control(1).rename(s.tmp/"away.png"); s.control(1).symlink_to(s.tmp/"away.png")
    def pack(): EmbeddingCacheManager(s.cache).pack(s.tmp/"packed"); s.dirs = [str(s.tmp/"packed"), str(s.tmp/"behind")]
    return repeatable(s) + [
        ("v1, another template and order of sizes", lambda: s.be(variant="v1"), ALL_TEXTS),
        ("a target as a bitmap", lambda: (s.be(variant="2511"), Image.open(t0).save(s.target(0, ".bmp")), t0.unlink()), PIXEL),
        ("an image behind a link", link, NOTHING),
        ("the linked image replaced", lambda: s.new_image(s.tmp/"away.png", (32, 48)), NEW_CONTROL),
        ("a second control image", lambda: image(next(s.pool), (40, 40), second/"0002.png"), NEW_CONTROL),
        ("the two the other way round", lambda: s.exchange(s.control(2), second/"0002.png"), PREFIX | SUFFIX | EMPTY),
        ("only the first again", lambda: (s.exchange(s.control(2), second/"0002.png"), shutil.rmtree(second)), NOTHING),
        ("a table instead of folders", lambda: s.table("metadata.jsonl"), NOTHING),
        ("a table of another kind", lambda: ((s.root/"metadata.jsonl").unlink(), s.table("metadata.csv")), NOTHING),
        ("folders again", lambda: (s.root/"metadata.csv").unlink(), NOTHING),
        ("the data set moved", lambda: s.move("elsewhere"), NOTHING),
        ("the data set copied", lambda: s.move("copy", True), NOTHING),
        ("prompts encoded whole, convolutions in 3-D", lambda: s.be(encoder=dict(share_prefix=False, vae_2d=False)), NOTHING),
        ("part of the data set, with one new target in it", lambda: (s.be(encoder={}, part=(0, 2)), s.new_image(s.target(1)), s.new_image(s.target(5))), PIXEL),
        ("all of it, with another outside the part", lambda: s.be(part=(0, None)), PIXEL),
        ("the memory of digests lost", forget_digests, NOTHING),
        ("the memory of digests spoilt", spoil_digests, NOTHING),
        ("a good memory again", forget_digests, NOTHING),
        ("the cache moved", lambda: s.be(cache=shutil.move(s.cache, s.tmp/"cache2")), NOTHING),
        ("the cache packed, before an empty folder", pack, NOTHING),
    ]


OF_THE_MODEL = "a first precompute", "captions are dropped from now on", "other weights of the VAE", "other weights of the text encoder", "another template", "bfloat16", "the model's files touched"


def edits_scripted(tmp, settle=0.03, only=None) -> dict:
    s, t = Studio(tmp, settle=settle), Tally("invalidation: scripted edits")
    for name, edit, costs in scripted(s)[:only]: s.step(t, name, edit, costs)
    s.dirs = None
    s.from_scratch(t, "a cache from scratch after all these edits")
    v1 = Studio(Path(tmp)/"v1", "v1", (64*64, None), settle) # its text encoder sees the VAE's control image, so that its area concerns both
    v1.step(t, "v1: a first precompute", lambda: None, FIRST)
    v1.step(t, "v1: area of the controls", lambda: v1.set(control_area=96*96), times(5, CONTROL, PREFIX) | times(6, SUFFIX))
    return t.result(f"exactly the entries that the rules name, after each of {t.trials - 1} edits; and a cache from scratch is the same byte for byte")


def edits_of_the_model(tmp) -> dict:
    s, t = Studio(tmp, same=(0, 1, 0)), Tally("invalidation: other weights, template, type")
    for name, edit, _ in scripted(s):
        if name in OF_THE_MODEL: s.step(t, name, edit)
    return t.result("exactly the entries that the rules name")


def edits_meanwhile(world, times=(1, 2, 9)) -> dict:
    "An image is replaced between its digest and its read: entries match their keys."
    t, real = Tally("invalidation: images replaced while they are encoded"), ImageDataset.images
    for side, size, ahead, often in itertools.product(("training_images", "control_images"), (None, (64, 24)), (0, 4), times):
        with t.trial(f"{side}, {'another' if size else 'the same'} size, {often} times, {ahead} samples read ahead"):
            cache, left, path = world.folder(), often, world.root/side/"0002.png"
            old = path.read_bytes()
            def images(dataset, i, *a):
                nonlocal left
                if dataset.samples[i].id == "0002" and left: left -= 1; image(9000 + left, size or Image.open(path).size, path)
                return real(dataset, i, *a)
            try:
                with patch.object(ImageDataset, "images", images): report = world.run(cache, ahead=ahead)
                world.run(fresh := world.folder("fresh"))
            finally: path.write_bytes(old)
            assert not left or (len(report.skipped) == 1 and "changed" in report.skipped[0][1]), str(report)
            assert not EmbeddingCacheManager(cache).verify()
            now, new = snapshot(cache), snapshot(fresh)
            assert all(new[p] == now.get(p, new[p]) for p in new), "an entry holds another image than its key says"
            for kind, data in ((p.split("/")[0], data) for p, data in now.items() if p.startswith(LATENTS)):
                h = header(data)
                w, h = json.loads(h["__metadata__"]["parts"])["size"], h[kind]["shape"]
                assert h[-2:] == [w[1] // 8, w[0] // 8], f"a {kind} said to be of {w}"
    return t.result("every entry is of the image that its key names; an image that keeps changing is skipped")


def edits_random(tmp, trials) -> dict:
    s, t, rng = Studio(tmp), Tally("invalidation: random edits", trials), random.Random(0)
    edits = repeatable(s)
    for n in range(trials):
        name, edit, _ = rng.choice(edits)
        s.step(t, f"{n} {name}", edit)
        if n % 100 == 99 or n == trials - 1: s.from_scratch(t, f"{n} a cache from scratch")
    return t.result(f"exactly the entries that the rules name, {len(s.known)} in all; caches from scratch are the same byte for byte")


# --- several processes on one cache
def crowd(world, processes, repetitions, kill=True) -> dict:
    t, rng, most = Tally(f"{processes} processes on one cache{', one killed' if kill else ''}", repetitions), random.Random(0), 0
    began = time.time()
    world.run(world.folder())
    alone, entries = time.time() - began, len(world.entries)
    while t.trials < repetitions:
        cache, shared, victim, die_at = world.folder(), Shared(), rng.randrange(processes), rng.randint(1, 5)
        locked = t.trials % 2 == 0 # killed while it surely holds a lock; else at any moment
        def job(n):
            while not shared[63]: time.sleep(0.0005)
            counted(world, cache, shared, n, die_at if kill and locked and n == victim else None)
        pids = [fork(lambda: job(n), world.tmp/"log") for n in range(processes)]
        shared[63] = 1
        if kill and not locked:
            time.sleep(rng.uniform(0, alone * 0.9))
            os.kill(pids[victim], signal.SIGKILL)
        done = wait(pids, 30 + 20 * alone)
        if kill and not os.WIFSIGNALED(done.get(pids[victim], 0)): continue # it was done already
        with t.trial(f"repetition {t.trials}"):
            assert len(done) == processes, f"{processes - len(done)} processes hang"
            assert all(done[p] == 0 for n, p in enumerate(pids) if not (kill and n == victim)), f"exit codes {done}: {(world.tmp/'log').read_text()[-500:]}"
            assert not EmbeddingCacheManager(cache).verify() and snapshot(cache) == world.files, "the cache differs from an undisturbed one"
            assert not [*(cache/"quarantine").glob("*")], "good entries were set aside"
            made = sum(shared[n] for n in range(processes))
            most = max(most, made)
            assert entries <= made <= entries + (28 if kill else entries // 10), f"{made} entries made for {entries}" # one piece of work: four samples of seven kinds
            world.makes_again(cache)
    return t.result(f"{most} entries made for {entries}; none bad, none hung")


# --- disks
class NotRun(Exception): "A case that this machine does not allow."


def mount(*args):
    done = subprocess.run(["mount", *map(str, args)], capture_output=True, text=True)
    if done.returncode: raise NotRun(done.stderr.strip())


def in_own_mounts(world, t, job) -> dict:
    "job(trial) in a child with its own mounts; it returns the worst."
    def run():
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(0x20000): raise NotRun(os.strerror(ctypes.get_errno())) # CLONE_NEWNS
            mount("--make-rprivate", "/")
            return vars(t), job(t.trial)
        except NotRun as e: return {}, f"not run: mounting is not permitted here ({e})"
    counts, worst = child_value(run, world.tmp/"mounts")
    vars(t).update(counts)
    return t.result(worst)


def fill(disk, leave=0):
    "Another file takes all but `leave` bytes."
    st = os.statvfs(disk)
    with open(Path(disk)/"ballast", "wb", buffering=0) as f, contextlib.suppress(OSError):
        n = st.f_bavail * st.f_frsize - leave
        while n > 0: n -= f.write(bytes(min(n, 1 << 20)))


def full_disk(world, every=1) -> dict:
    def job(trial):
        disk, start, rng = world.folder("disk"), world.folder("start"), random.Random(0)
        cache = disk/"cache"
        disk.mkdir()
        mount("-t", "tmpfs", "-o", "size=6m", "tmpfs", disk)
        def fresh(source):
            shutil.rmtree(cache, ignore_errors=True)
            (disk/"ballast").unlink(missing_ok=True)
            if source: shutil.copytree(source, cache)
            return snapshot(cache)
        def attempt(nth=None, leave=0): # precompute in a grandchild: the kind of its error or "", its message, the files that it wrote
            def run():
                opened, renamed = itertools.count(), []
                def tell(what, path):
                    if what == "open" and next(opened) == nth: fill(disk, leave)
                    if what == "renamed": renamed.append(str(Path(path.split("\t")[1]).relative_to(cache)))
                watch_operations(cache, tell)
                try: world.run(cache)
                except Exception as e: return type(e).__name__, str(e), renamed
                return "", "", renamed
            return child_value(run, world.tmp/"attempt")
        def check(before, failed, need, leave):
            kind, message, _ = failed
            assert kind in ("OSError", "DiskFull"), f"{kind}: {message}"
            sentence(OSError(message), str(cache), " MB")
            missing = re.search(r"([\d.]+) MB (?:more|are missing)", message)
            assert missing and float(missing[1]) * 1e6 >= need - leave > 0, f"{need - leave} bytes are missing, but it says: {message}"
            there = snapshot(cache)
            assert before.items() <= there.items() <= world.files.items(), "what was there is not intact"
            assert not [*(cache/".tmp").glob("*")], "a temporary file is left"
            (disk/"ballast").unlink()
            assert not attempt()[0] and snapshot(cache) == world.files, "afterwards, with room: another cache"
        world.run(start, 0, 2)
        fresh(start)
        written = attempt()[2]
        for n in range(0, len(written), every):
            need = len(world.files[written[n]])
            leave = rng.randrange(-(-need // 4096)) * 4096 # pages
            with trial(f"write {n}: {written[n]}"): check(fresh(start), attempt(n, leave), need, leave)
        with trial("the first write of all, the manifest"): check(fresh(None), attempt(0), len(world.files["manifest.json"]), 0)
        with trial("full before it begins"):
            before = fresh(start)
            fill(disk, 8192)
            failed = attempt()
            sentence(OSError(failed[1]), "Nothing was written", str(cache))
            assert snapshot(cache) == before
            check(before, failed, sum(map(len, world.files.values())) - sum(map(len, before.values())), 8192)
        with trial("packing to a full disk"):
            fresh(None)
            fill(disk, 20_000)
            refused(lambda: EmbeddingCacheManager(world.reference).pack(disk/"packed"), str(disk/"packed"), " MB more")
            assert not (disk/"packed"/"cache-index.json").exists()
        return f"{len(written)} writes; each message named the folder and enough MB, and a run with room again ended with the same bytes"
    return in_own_mounts(world, Tally("full disk at every write"), job)


def read_only(world, packed) -> dict:
    def job(trial):
        ro, tried = world.folder("ro"), []
        source = world.pack("source")[0] if packed else world.copy("source")
        adapter = lambda *cache: {k: v.numpy().tobytes() for k, v in lora_state(world.train([*cache]).transformer).items()}
        usual = adapter(world.copy("usual"))
        ro.mkdir()
        mount("--bind", source, ro), mount("-o", "remount,ro,bind", ro)
        try: (ro/"x").write_text("x")
        except OSError as e: assert e.errno == errno.EROFS, e
        else: raise NotRun("the mount takes writes")
        def hook(event, args):
            if event == "open" and str(args[0]).startswith(str(ro)) and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT): tried.append(args[0])
            if event in ("os.mkdir", "os.rename", "os.remove", "os.link", "os.truncate") and any(str(a).startswith(str(ro)) for a in args): tried.append((event, *map(str, args)))
        sys.addaudithook(hook)
        with trial("trains on it alone, the same adapter"): assert adapter(ro) == usual
        with trial("a whole precompute writes nothing"):
            report = world.run(ro)
            assert (report.tensors, report.reused) == (0, 6)
        caption = world.root/"training_images"/"0001.txt"
        old = caption.read_text()
        caption.write_text("make it new")
        with trial("a new caption goes to the folder behind it"):
            report = world.run([ro, rw := world.folder("rw")])
            assert report.tensors == 2 and {p.split("/")[0] for p in snapshot(rw)} == {"prompt_embed", "prompt_embeds_mask"}, f"{report} {list(snapshot(rw))}"
            world.train([ro, rw])
        with trial("without one, precompute and training refuse in a sentence"):
            refused(lambda: world.run(ro), str(ro), "cannot be written")
            refused(lambda: world.train(ro), str(ro), "prompt_embed of sample '0001' is missing")
        caption.write_text(old)
        with trial("a bad entry in it is made again behind it"):
            path = min(p for p in source.rglob("*.safetensors") if packed or "pixel_latent" in str(p))
            good = path.read_bytes()
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 1])) # from outside, where it can be written
            report = world.run([ro, rw := world.folder("rw")])
            assert report.tensors == len(report.bad) == 1, str(report)
            assert adapter(ro, rw) == usual, "another adapter"
            refused(lambda: world.train(ro), str(ro), "checksum differs")
        with trial("nothing tried to write there"): assert not tried, tried[:3]
        return "no write was tried there; adapters are bit for bit those of a writable folder"
    return in_own_mounts(world, Tally(f"a {'packed' if packed else 'loose'} layer on a read-only mount"), job)


# --- malicious and malformed files
class Payload:
    def __init__(self, marker): self.marker = marker
    def __reduce__(self): return open, (str(self.marker), "w")


def payloads(marker) -> list: # of bytes, which write a marker when they are unpickled
    torch.save(dict(weight=Payload(marker)), buffer := io.BytesIO())
    text = pickle.dumps(Payload(marker), protocol=0)
    pickle.loads(text), marker.unlink()
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False), marker.unlink()
    return [text, buffer.getvalue()]


def pickles(world) -> dict:
    from qie_nb.core.files import file_digest
    t, marker, run, (packed, _), cache = Tally("pickles under harmless names"), world.tmp/"executed", world.folder("run"), world.pack(), world.copy("usual")
    whole = world.train(cache, save_interval=1, max_train_steps=6, output_dir=str(run))
    whole.save_lora(run/"lora")
    point, model = find_checkpoint("latest", run/"checkpoints"), Path(shutil.copytree(world.components.folder, world.folder("model")))
    def resumed(path):
        if path.name != "COMPLETE": (point/"COMPLETE").write_text(json.dumps({p.name: file_digest(p) for p in sorted(point.iterdir()) if p.name != "COMPLETE"}))
        world.train(cache, max_train_steps=9, output_dir=str(run), resume_checkpoint=str(point))
    def entry(path):
        m = EmbeddingCacheManager(cache)
        assert m.load_cache(path.parts[-3], path.stem) is None
        world.makes_again(cache, missing=1)
        raise ValueError(m.quarantined[0][1])
    def shard(path):
        m = EmbeddingCacheManager(packed)
        assert all(m.load_cache(kind, key) is None for kind, key, _ in world.entries)
        raise ValueError(m.quarantined[0][1])
    def data_set(path): world.dataset(cache, strict=True)
    loads = lambda name: lambda path: Components(str(model)).get(name)
    uses = [ # (path, use)
        *((place(cache, *world.first(kind)), entry) for kind in ("prompt_embed", "pixel_latent", "prompt_prefix")), (cache/"manifest.json", lambda p: EmbeddingCacheManager(cache).identities()),
        (packed/"cache-index.json", lambda p: EmbeddingCacheManager(packed)), (min(packed.glob("cache-0*")), shard),
        *((world.root/p, data_set) for p in ("training_images/0000.png", "control_images/0001.png", "metadata.jsonl", "metadata.csv")),
        (run/"lora"/"pytorch_lora_weights.safetensors", lambda p: load_lora(whole.transformer, p)), *((point/name, resumed) for name in ("pytorch_lora_weights.safetensors", "optimizer.safetensors", "state.json", "COMPLETE")),
        (model/"vae"/"diffusion_pytorch_model.safetensors", loads("vae")), (model/"text_encoder"/"model.safetensors", loads("text_encoder")), (model/"vae"/"config.json", loads("vae")),
        (model/"model_index.json", lambda p: Components(str(model)))]
    for path, use in uses:
        old, complete = path.read_bytes() if path.exists() else None, (point/"COMPLETE").read_bytes()
        for data in payloads(marker):
            with t.trial(f"{path}, {data[:9]}"):
                path.write_bytes(data)
                try:
                    with quiet(): use(path)
                except Exception as e:
                    if path.parent.parent != model: sentence(e) # else in diffusers' and transformers' own words
                else: raise AssertionError("was accepted")
                finally: assert not marker.exists(), "was executed"
        path.unlink()
        if old is not None: path.write_bytes(old)
        (point/"COMPLETE").write_bytes(complete)
    with t.trial("a memory of digests that is a pickle"):
        (home := world.folder("home")).mkdir()
        (home/"files.sqlite").write_bytes(payloads(marker)[0])
        with patch.dict(os.environ, QIE_NB_HOME=str(home)): world.makes_again(world.reference)
        assert not marker.exists(), "was executed"
    return t.result(f"each of {len(uses)} files in two forms refused in a sentence, and nothing was executed")


def rebuilt(data, text): # an entry with another header, its length and padding as they must be
    text = json.dumps(text).encode() if isinstance(text, dict) else text.encode() if isinstance(text, str) else text
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little"):]


def signed(data, h): # by a liar who knows the format: the checksum is right
    (meta, (kind, record)), payload = (h["__metadata__"], next((k, v) for k, v in h.items() if k != "__metadata__")), data[8 + int.from_bytes(data[:8], "little"):]
    meta["checksum"] = cache_entries._checksum(meta, record, payload)
    return cache_entries._header(kind, meta, record) + payload


def headers(world) -> dict:
    "Headers that lie: never an error but a sentence, never a tensor."
    t, cache = Tally("malformed headers"), world.copy()
    (kind, key, good), front = world.first("prompt_embed"), world.first("prompt_prefix")
    path, h, n = place(cache, kind, key), header(good), 8 + int.from_bytes(good[:8], "little")
    size, bare = len(good) - n, {kind: h[kind]}
    def put(**kw): return h | {kind: h[kind] | kw}
    def meta(h=h, **kw): return h | dict(__metadata__=h["__metadata__"] | kw)
    lies = {
        "no bytes": b"", "seven bytes": good[:7], "bytes behind the end": good + b"12345678",
        **{f"length {v}": v.to_bytes(8, "little") + good[8:] for v in (0, 1 << 63, (1 << 64) - 1, n - 7, n - 9, len(good))},
        **{f"JSON {text[:9]}": rebuilt(good, text) for text in ("{]", b"\xff\xfe{}", "[]", "1", "null", "[" * 100_000, '{"a":' * 100_000, '{"__metadata__":{},"x":' + "9" * 10_000 + "}")},
        **{f"metadata {m}": rebuilt(good, bare | dict(__metadata__=m)) for m in ([], None)}, "no metadata": rebuilt(good, bare), "metadata's values are lists": rebuilt(good, meta(prefix=["a"], key=[key], kind=[kind])),
        "another format": rebuilt(good, meta(format="qie_nb-1")), "no tensor": rebuilt(good, dict(__metadata__=h["__metadata__"])), "two tensors": rebuilt(good, h | dict(more=h[kind])),
        "a name twice": rebuilt(good, good[8:n].decode().replace('{"__metadata__"', '{"__metadata__":{},"__metadata__"', 1)), "the tensor is a string": rebuilt(good, h | {kind: "x"}),
        **{f"offsets {o}": rebuilt(good, put(data_offsets=o)) for o in ([0, size + 8], [size, 0], [-8, size - 8], [0, size - 4])}, **{f"dtype {d}": rebuilt(good, put(dtype=d)) for d in ("F31", "I32")},
        **{f"shape {s}": rebuilt(good, put(shape=s)) for s in ([-1, 64], [1 << 32, 1 << 32], [64, size // 256])},
        **{f"prefix {p}": rebuilt(good, meta(prefix=p)) for p in ("../../../etc/passwd", "0" * 40)},
        **{f"signed: shape {s}": signed(good, put(shape=s)) for s in ([3, 64], [1 << 32, 1 << 32])}, "signed: a string for a shape": signed(good, h | {kind: dict(dtype="F32", shape="64", data_offsets="ab")}),
        **{f"signed: prefix {p}": signed(good, meta(prefix=p)) for p in ("../../../etc/passwd", ["a", "b"], 7)},
    }
    for name, data in lies.items():
        path.parent.mkdir(exist_ok=True), path.write_bytes(data)
        with t.trial(name):
            m = EmbeddingCacheManager(cache)
            m.cache_exists(kind, key), m.prefix_of(kind, key), m.get_cache_stats(), m.gc(dry_run=True)
            with quiet(): world.dataset(cache).status()
            (where, why), = m.verify()
            assert where == str(path) and why and "\n" not in why
            assert m.load_cache(kind, key) is None, "was returned"
            world.makes_again(cache, missing=1)
        shutil.rmtree(cache/"quarantine", ignore_errors=True)
    for name, lie, (k, key_, good_) in (("no such prefix", meta(prefix="0" * 40), (kind, key, good)), ("its own prefix", meta(header(front[2]), prefix=front[1]), front)):
        with t.trial(f"signed: {name}"):
            place(cache, k, key_).write_bytes(signed(good_, lie))
            assert EmbeddingCacheManager(cache).load_cache(k, key_) is None
        place(cache, k, key_).write_bytes(good_)
    with t.trial("foreign files between the entries"):
        for odd in ("notes (copy).safetensors", "a.safetensors", "x" * 200 + ".safetensors", ".hidden.safetensors", "readme.txt"): (path.parent/odd).write_bytes(good)
        (cache/kind/"zz").mkdir(), (cache/kind/"not two").mkdir(), (cache/kind/"ab.txt").write_text("x"), (cache/kind/"xy").write_text("a file")
        m = EmbeddingCacheManager(cache)
        with quiet(): world.dataset(cache).status()
        assert not m.verify() and m.gc(dry_run=True) and m.pack(world.folder("packed")) and world.run(cache).tensors == 0
    indexes(world, t)
    return t.result(f"each of {len(lies)} was refused in a sentence, moved away and made again")


def indexes(world, t):
    "Indexes of a packed layer that lie, with a right checksum."
    (packed, _), (kind, key, _) = world.pack(), world.first("pixel_latent")
    index = packed/"cache-index.json"
    whole = json.loads(index.read_text())
    shard, start, size, head = whole["entries"][kind][key]
    entry = lambda v: dict(entries=whole["entries"] | {kind: whole["entries"][kind] | {key: v}})
    lies = [dict(entries=[]), dict(entries={kind: [key]}), dict(shards=3), dict(shards=["../cache-1.safetensors"]), dict(shards=["cache-9.safetensors"]), dict(identities=[1]),
            *map(entry, ([7, start, size, head], [shard, -8, size, head], [shard, 1 << 40, size, head], [shard, start, 1 << 50, head], [shard, start, -1, head], [shard, start, size], [shard, start, size, 5], None))]
    for lie in ([], {}, *(whole | lie for lie in lies)):
        if lie: lie = lie | dict(checksum=_index_checksum(lie))
        index.write_text(json.dumps(lie))
        with t.trial(f"index: {str(lie)[-300:]}"):
            try:
                m = EmbeddingCacheManager(packed)
                m.identities(), m.get_cache_stats()
                assert m.load_cache(kind, key) is None, "was returned"
                m.verify()
            except Exception as e: sentence(e)


# --- what is kept
def bits(tmp) -> dict:
    "Tensors keep their bits and dtype, loose and packed."
    t, cache, g = Tally("bits and types kept"), EmbeddingCacheManager(Path(tmp)/"bits"), torch.Generator().manual_seed(0)
    every = torch.arange(-2**15, 2**15, dtype=torch.int32).to(torch.int16)
    words = torch.randint(-2**31, 2**31 - 1, (50_000,), generator=g, dtype=torch.int64).to(torch.int32)
    tensors = [*(x[torch.isfinite(x)] for x in (every.view(torch.bfloat16), every.view(torch.float16), words.view(torch.float32))), # all finite values of two types, random ones of the third
               torch.rand(77, generator=g) > 0.5, *((torch.rand(77, generator=g) * 2).to(d) for d in (torch.int64, torch.int32, torch.uint8, torch.float64)), torch.zeros(0, 64), torch.tensor(1.5),
               torch.rand(6, 4, generator=g).T.bfloat16(), torch.rand(9, 8, generator=g)[:, ::2], torch.rand(16, 1, 3, 5, 2, generator=g).bfloat16()]
    wanted = {(kind, key_of(kind, name=n)): x for n, x in enumerate(tensors) for kind in ("pixel_latent", "prompt_embed", "prompt_embeds_mask", "empty_prompt_embeds_mask", "prompt_prefix")}
    for k, x in wanted.items(): cache.save_cache(*k, x)
    cache.pack(Path(tmp)/"packed")
    for where, m in (("loose", cache), ("packed", EmbeddingCacheManager(Path(tmp)/"packed"))):
        for (kind, key), x in wanted.items():
            with t.trial(f"{x.dtype} {list(x.shape)} as {kind}, {where}"):
                got, x = m.load_cache(kind, key), x.contiguous()
                assert got.dtype == x.dtype and got.shape == x.shape and torch.equal(got.contiguous().flatten().view(torch.uint8), x.flatten().view(torch.uint8))
    for x in (torch.tensor([1., float("nan")]), torch.tensor([float("inf")]).bfloat16(), torch.tensor([-float("inf")]).half()):
        with t.trial(f"{x} is refused"): refused(lambda: cache.save_cache("pixel_latent", "ab" * 20, x), "NaN or inf")
    return t.result("every bit and type as it was, loose and packed; NaN and inf refused")


# --- all of them
def cases(full): # {name: function of a folder}
    make = lambda *a: functools.lru_cache(lambda: World(tempfile.mkdtemp(prefix="faults-"), *a))
    world, crowded = make(), make((0, 1, 2, 0, 0, 0, 0, 7))
    n = lambda much, little: much if full else little
    on = lambda f, *a, of=world, **kw: lambda tmp: f(of(), *a, **kw)
    return dict(
        kills_at_operations=on(kills_at_operations, n(None, 1)), order_of_writes=on(order_of_writes),
        flips=on(damages, "one bit flipped", flip, n(1000, 30)), truncations=on(damages, "truncated", truncate, n(1000, 30)), zeroed_tails=on(damages, "tail of zeros", zero_tail, n(1000, 30)),
        losses=on(losses, n(1, 9)), swaps=on(swaps, n(None, 20)),
        edits_scripted=lambda tmp: edits_scripted(tmp, n(2.1, 0.03), n(None, 20)), edits_of_the_model=edits_of_the_model, edits_random=lambda tmp: edits_random(tmp, n(500, 15)), edits_meanwhile=on(edits_meanwhile, n((1, 2, 9), (1,))),
        crowd_of_2=on(crowd, 2, n(20, 1), of=crowded), crowd_of_4=on(crowd, 4, n(20, 1), of=crowded), crowd_undisturbed=on(crowd, 4, n(10, 1), False, of=crowded),
        full_disk=on(full_disk, n(1, 12)), read_only_loose=on(read_only, False), read_only_packed=on(read_only, True),
        pickles=on(pickles), headers=on(headers), bits=bits)


if __name__ == "__main__": main("Fault injection for the cache", cases)
