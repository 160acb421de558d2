"""Fault injection for the cache: kills, damage, many processes, full disks, malformed files. Each case counts its trials."""
import collections, contextlib, copy, fractions, functools, hashlib, io, itertools, json, math
import os, pickle, random, re, shutil, signal, sqlite3, sys, tempfile, time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from helpers import PATIENCE, entries_of, make_older, settings, signed_again
from qie_nb.cache import CacheEntryError, EmbeddingCacheManager, key_of
from qie_nb.core import cache_entries, files
from qie_nb.core.cache_entries import ALL_KINDS, read_header
from qie_nb.core.cache_layers import FolderStore, verify_entry
from qie_nb.core.cache_layers import INDEX, open_layer
from qie_nb.core.packed_index import DATABASE, index_checksum as _index_checksum
from qie_nb.core.files import file_digest
from qie_nb.data.dataset import ImageDataset
from qie_nb.encoding.encoder import Encoder
from qie_nb.encoding.precompute import precompute
from qie_nb.lora.adapters import load_lora, lora_state
from qie_nb.devices.edit_model import EditModel
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.checkpoint import find_checkpoint
from trials import NotRun, Shared, Tally, child_value, fork, main, mount, mount_read_only, own_mounts, quiet, wait, watch_operations

LATENTS = "pixel_latent", "control_latent"
SIZES = (48, 32), (32, 48), (40, 40)


def sentence(e, *words):
    "An error is of a kind that the command line prints without a traceback, has one line, and contains `words`."
    assert isinstance(e, (ValueError, OSError)), f"{type(e).__name__} is no sentence: {e}"
    assert str(e).strip() and "\n" not in str(e) and all(w in str(e) for w in words), f"not one line with {words}: {e}"


def refused(fn, *words):
    try: fn()
    except Exception as e: return sentence(e, *words)
    raise AssertionError("was not refused")


# --- a data set, a model in memory, and the cache of an undisturbed run
def image(seed, size, path):
    "Without compression: equally large images have equally large files."
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, compress_level=0)


def write_set(root, same):
    "Pairs; sample i has the control image of sample same[i]."
    for i, s in enumerate(same):
        image(2 * s, SIZES[s % 3], root/"control_images"/f"{i:04}.png")
        image(2 * i + 1, SIZES[i % 3], root/"training_images"/f"{i:04}.png")
        (root/"training_images"/f"{i:04}.txt").write_text(f"make it {'abcdefgh'[i]}")
    return root


def snapshot(cache) -> dict: # {path in the cache: bytes} of what counts as content
    found = [(p.relative_to(cache), p) for p in sorted(Path(cache).rglob("*")) if p.is_file() and not p.name.startswith(".")]
    return {str(name): p.read_bytes() for name, p in found if name.parts[0] in (*ALL_KINDS, "manifest.json")}


def names(cache): return [str(c) for c in cache] if isinstance(cache, list) else str(cache)
def place(cache, kind, key, *_): return FolderStore(cache).path(kind, key)
def start_of(data): return 8 + int.from_bytes(data[:8], "little") # of the tensor


class World:
    "A data set, an encoder and its cache; `files` is the cache's content, `entries` has (kind, key, bytes)."
    def __init__(self, tmp, same=(0, 1, 2, 0, 4, 5)):
        self.tmp, self.data = Path(tmp), dict(image_size=[64, 64], caption_dropout_rate=0.1)
        self.root, self.reference = write_set(self.tmp/"set", same), self.tmp/"reference"
        with quiet():
            self.components = EditModel(str(tiny_folder("2511", (64*64, 64*64))), torch.float32)
            for part in ("vae", "text_encoder", "processor"): self.components.get(part) # once, for all processes
            self.components.identity()
        report = self.run(self.reference)
        self.files = snapshot(self.reference)
        self.entries = [(Path(p).parts[0], Path(p).stem, data) for p, data in self.files.items() if "/" in p]
        assert len(self.entries) == report.tensors and {k for k, *_ in self.entries} == set(ALL_KINDS)
        prompts = [read_header(data)["__metadata__"] for kind, _, data in self.entries if kind == "prompt_embed"]
        assert all("prefix" in p for p in prompts), "prompts are stored whole"

    def first(self, kind): return next(e for e in self.entries if e[0] == kind)

    def folder(self, name="trial"):
        shutil.rmtree(self.tmp/name, ignore_errors=True)
        return self.tmp/name

    def copy(self, name="trial"): return Path(shutil.copytree(self.reference, self.folder(name)))

    def pack(self, name="packed", **kw):
        packed = self.folder(name)
        return packed, EmbeddingCacheManager(self.reference).pack(packed, **kw)

    def dataset(self, cache, strict=False, **data):
        with quiet(): return ImageDataset(dict(dataset_path=str(self.root), cache_dir=names(cache)) | self.data | data, strict=strict)

    def run(self, cache, *part, ahead=4):
        dataset = self.dataset(cache)
        with quiet(): return precompute(dataset, Encoder(self.components, dataset.cache), *part, prefetch=ahead)

    def makes_again(self, cache, *bad, missing=0):
        "A precompute encodes the missing and bad entries again, nothing else."
        report = self.run(cache)
        assert {w for w, _ in report.bad} == set(map(str, bad)) and report.tensors == len(bad) + missing, str(report)
        assert snapshot(cache).keys() == self.files.keys() and not EmbeddingCacheManager(cache).verify()

    def train(self, cache, **train):
        config = settings(self.root, self.tmp, data=dict(batch_size=1) | self.data, cache=dict(cache_dir=names(cache)),
                          model=dict(pretrained_model_name_or_path=str(self.components.folder), lora=dict(r=2)),
                          train=dict(output_dir=str(self.folder("out")), max_train_steps=3) | train)
        with quiet(): return QwenImageEditTrainer(config).fit()


# --- kills
def counted(world, cache, shared, at=0, die_at=None):
    "In a child: precompute, with entries counted in shared memory; killed at its entry `die_at`, while it holds a lock."
    def count_and_save(*a, real=Encoder.save):
        shared[at] += 1
        if shared[at] == die_at: os.kill(os.getpid(), signal.SIGKILL)
        return real(*a)
    Encoder.save = count_and_save
    world.run(cache)


def operations_of(world) -> list: # [(what, path)]
    "All writes, fsyncs and renames of an undisturbed precompute."
    cache, heard = world.folder(), []
    def job():
        watch_operations(cache, lambda *what: heard.append(what))
        world.run(cache)
        return heard
    return child_value(job, world.tmp/"log")


def kills_at_operations(world, each=None) -> dict:
    "At all of them, or at `each` of every kind. The entries left are complete; the next precompute does the rest, with the same bytes."
    heard, places, rng, worst = operations_of(world), collections.defaultdict(list), random.Random(0), 0
    for n, (what, _) in enumerate(heard): places[what].append(n)
    chosen = sorted(n for ns in places.values() for n in (ns if each is None else rng.sample(ns, each)))
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
            assert os.WIFSIGNALED(status)
            assert snapshot(cache).items() <= world.files.items()
            report = world.run(cache)
            again = shared[0] + report.tensors - len(world.entries)
            worst = max(worst, again)
            assert not report.skipped and not report.bad and 0 <= again <= 4, f"{again} again; {report}"
            assert snapshot(cache) == world.files
            left = [p for d in (".tmp", "quarantine") for p in (cache/d).glob("*")]
            assert not left or not report.tensors, left
    return t.result(f"at most {worst} entries made again after a kill")


def order_of_writes(world) -> dict:
    "A power cut loses what no fsync has secured: every file is synced before its rename, and its folder right after."
    t, heard = Tally("synced before the rename, the folder after"), operations_of(world)
    for n, (what, path) in enumerate(heard):
        if what != "rename": continue
        source, target = path.split("\t")
        with t.trial(target):
            assert [w for w, p in heard[:n] if p == source][-1] == "fsync"
            assert heard[n + 1][0] == "renamed" and heard[n + 2] == ["fsync", str(Path(target).parent)]
    return t.result()


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


def reading(cache, kind, key):
    "A bad entry is not returned, is reported in one sentence and moved; prompts with a bad prefix are not returned either."
    m = EmbeddingCacheManager(cache)
    assert verify_entry(FolderStore(cache), kind, key)
    on_prefix = [e[1:3] for e in m.entries(["prompt_embed"]) if m.prefix_of("prompt_embed", e.key) == key]
    for e in on_prefix: assert m.load_cache(*e) is None
    assert m.load_cache(kind, key) is None
    where, why = m.quarantined[0]
    assert where == str(place(cache, kind, key)) and why and "\n" not in why
    moved = cache/"quarantine"/f"{kind}-{key}.safetensors"
    assert not m.cache_exists(kind, key) and moved.is_file() and why in moved.with_suffix(".reason.txt").read_text()


def damaged_loose(world, t, damage, trials, rng):
    "Most are found by a read; every 25th by a precompute that knew the file as good."
    cache = world.copy()
    for n in range(trials):
        kind, key, data = rng.choice(world.entries)
        path, bad = place(cache, kind, key), damage(data, rng)
        with t.trial(f"{kind} {key} {n}"), patch.object(files, "_MIN_AGE", 0.03):
            if n % 25 == 0: time.sleep(0.05), world.makes_again(cache)
            overwrite(path, bad)
            if n % 25: reading(cache, kind, key)
            else: world.makes_again(cache, path)
        path.write_bytes(data)


def damaged_packed(world, t, damage, trials, rng) -> int: # damages in a table of contents, which no read depends on
    "The packed layer or the entry is refused; every returned tensor is right."
    (packed, paths), idle = world.pack(shard_bytes=40_000), 0
    load_all = lambda m: {(kind, key): m.load_cache(kind, key) for kind, key, _ in world.entries}
    right = load_all(EmbeddingCacheManager(packed))
    for n in range(trials):
        path = rng.choice(paths)
        good = path.read_bytes()
        bad = damage(good, rng)
        overwrite(path, bad)
        with t.trial(f"{path.name} {n}"):
            try: m = EmbeddingCacheManager(packed)
            except CacheEntryError as e: sentence(e, str(packed/INDEX))
            else:
                got = load_all(m)
                none = sum(x is None for x in got.values())
                idle += not none
                assert all(x is None or torch.equal(x, right[k]) for k, x in got.items())
                assert none or bad[start_of(good):] == good[start_of(good):]
                assert bool(m.quarantined) == bool(none) and len(m.quarantined) <= none # a bad prefix takes its prompts along
                assert all("\n" not in why for _, why in m.quarantined)
        overwrite(path, good)
    return idle


def damages(world, name, damage, trials) -> dict:
    t, rng, packed = Tally(f"entries: {name}", trials), random.Random(name), trials // 5
    damaged_loose(world, t, damage, trials - packed, rng)
    idle = damaged_packed(world, t, damage, packed, rng)
    return t.result(f"{packed} in a packed layer, {idle} of them in a table of contents, which no read depends on")


def losses(world, every=1) -> dict:
    "An entry removed: only that one is encoded again, with the same bytes."
    t, cache = Tally("entries: removed"), world.copy()
    for e in world.entries[::every]:
        with t.trial(f"{e[:2]}"):
            place(cache, *e).unlink()
            world.makes_again(cache, missing=1)
            assert snapshot(cache) == world.files
    return t.result()


def swaps(world, trials=None) -> dict:
    "Whole, valid entries in the wrong place."
    cache, pairs = world.copy(), list(itertools.combinations(world.entries, 2))
    if trials: # half of them within a kind, where only the key differs
        inside, across = ([p for p in pairs if (p[0][0] == p[1][0]) is same] for same in (True, False))
        pairs = inside[:trials // 2] + random.Random(0).sample(across, trials - trials // 2)
    t = Tally("entries: swapped", len(pairs))
    for n, (a, b) in enumerate(pairs):
        pa, pb = place(cache, *a), place(cache, *b)
        pa.write_bytes(b[2]), pb.write_bytes(a[2])
        with t.trial(f"{a[:2]} with {b[:2]}"):
            if n % 40: [reading(cache, *e[:2]) for e in (a, b)]
            else: world.makes_again(cache, pa, pb)
        pa.write_bytes(a[2]), pb.write_bytes(b[2])
        shutil.rmtree(cache/"quarantine", ignore_errors=True)
    return t.result(f"{sum(a[0] == b[0] for a, b in pairs)} within a kind")


# --- which entries an edit invalidates, by a model of the rules that does not use the library's keys
def sha(path): return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def by_area(area, size): # the pipelines' own rounding
    w = math.sqrt(area * size[0] / size[1])
    return max(32, round(w / 32) * 32), max(32, round(w / (size[0] / size[1]) / 32) * 32)


def described(path) -> tuple: # what an entry says that it was made of, in the rules' terms
    meta = read_header(path.read_bytes())["__metadata__"]
    kind, parts = meta["kind"], json.loads(meta["parts"])
    aspect = fractions.Fraction(*parts["crop"]) if parts["crop"] else None
    if kind in LATENTS: return kind, parts["image"], tuple(parts["size"]), aspect
    return kind, parts.get("prompt"), tuple(parts["controls"]), tuple(map(tuple, parts["vl_sizes"])), aspect


class Studio:
    "A data set that is edited, its cache, and the entries that the cache must hold by now."
    def __init__(self, tmp, variant="2511", areas=(64*64, 64*64), settle=0.03, same=(0, 1, 2, 0, 4, 5)):
        self.tmp, self.root, self.cache, self.settle = Path(tmp), write_set(Path(tmp)/"set", same), Path(tmp)/"cache", settle
        self.variant, self.areas, self.weights, self.dtype, self.template, self.quantized = variant, areas, "00", torch.float32, "", None
        self.data, self.encoder, self.part, self.dirs = dict(image_size=[64, 64], caption_dropout_rate=0.), {}, (0, None), None
        self.known, self.models, self.pool = set(), {}, itertools.count(1000)
        self.sizes, self.levels = itertools.cycle(SIZES), itertools.cycle((9, 1))

    # the model of the rules
    def samples(self): # (target, controls, caption) of each, by its own look at the folders
        folders = sorted(self.root.glob("control_images*"), key=lambda d: (len(d.name), d.name))
        return [(p, [c for d in folders for c in d.glob(f"{p.stem}.*")], p.with_suffix(".txt").read_bytes().decode("utf-8-sig").strip())
                for p in sorted((self.root/"training_images").iterdir()) if p.suffix != ".txt"]

    def expected(self) -> set: # of (as `described`, model)
        d, out = self.data, set()
        aspect = fractions.Fraction(*d["image_size"]) if d.get("crop") else None
        shape = lambda path: (aspect.numerator, aspect.denominator) if aspect else Image.open(path).size
        area, control, vl = math.prod(d["image_size"]), d.get("control_area", self.areas[0]), d.get("vl_area", self.areas[1])
        vae = self.weights[0], self.dtype
        text = self.weights[1], self.dtype, self.template, self.variant == "v1", self.quantized
        for target, controls, caption in self.samples()[slice(*self.part)]:
            size = tuple(d["image_size"]) if aspect else by_area(area, Image.open(target).size)
            out.add((("pixel_latent", sha(target), size, aspect), vae))
            for c in controls: out.add((("control_latent", sha(c), by_area(control, shape(c)), aspect), vae))
            on = tuple(map(sha, controls)), tuple(by_area(control if self.variant == "v1" else vl, shape(c)) for c in controls), aspect
            out.add((("prompt_prefix", None, *on), text))
            out.add((("prompt_embed", caption, *on), text))
            if d["caption_dropout_rate"]: out.add((("empty_prompt_embed", " ", *on), text))
        return out

    # what the library does
    def model(self):
        name = (self.variant, self.weights, self.dtype, self.quantized, self.template)
        if name in self.models: return self.models[name]
        tiny = lambda seed: tiny_folder("v1" if self.variant == "v1" else "2511", self.areas, seed)
        with quiet():
            folder = Path(shutil.copytree(tiny(0), self.tmp/f"model-{self.variant}-{self.weights}", dirs_exist_ok=True))
            config = folder/"transformer"/"config.json"
            if self.variant == "2509": # the only difference
                config.write_text(config.read_text().replace('"zero_cond_t": true', '"zero_cond_t": false'))
            for part, seed in zip(("vae", "text_encoder"), self.weights): shutil.copytree(tiny(int(seed))/part, folder/part, dirs_exist_ok=True)
            c = self.models[name] = EditModel(str(folder), self.dtype, quantize=dict(text_encoder=self.quantized))
        c.variant = copy.copy(c.variant)
        c.variant.image_prefix = self.template + c.variant.image_prefix
        return c

    def precompute(self) -> tuple: # (Counter of what was stored, Report, encoder's calls)
        there = lambda: set(Path((self.dirs or [self.cache])[-1]).rglob("*.safetensors"))
        before = there()
        with quiet(), patch.object(files, "_MIN_AGE", self.settle):
            dataset = ImageDataset(dict(dataset_path=str(self.root), cache_dir=names(self.dirs or self.cache)) | self.data)
            encoder = Encoder(self.model(), dataset.cache, **self.encoder)
            report = precompute(dataset, encoder, *self.part)
        return collections.Counter(map(described, there() - before)), report, encoder.calls

    def step(self, t, name, edit):
        "One edit: exactly the entries of the rules are stored."
        with t.trial(name):
            edit()
            time.sleep(self.settle * 1.5)
            want = self.expected() - self.known
            stored, report, calls = self.precompute()
            asked = collections.Counter(what for what, _ in want)
            assert not report.skipped and stored == asked, f"beyond the rules {stored - asked}, not stored {asked - stored} {report.skipped}"
            assert report.tensors == len(want) and calls["vae"] == sum(k[0] in LATENTS for k in asked), f"{report}, {calls}"
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
        st = os.stat(path)
        self.new_image(path)
        os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
        assert path.stat().st_size == st.st_size

    def exchange(self, a, b): x, y = a.read_bytes(), b.read_bytes(); a.write_bytes(y), b.write_bytes(x)
    def touch_all(self, root): [os.utime(p, (1e9 + n, 1e9 + n)) for n, p in enumerate(Path(root).rglob("*"))]
    def set(self, **kw): self.data = {k: v for k, v in (self.data | kw).items() if v is not None}
    def be(self, **kw): vars(self).update(kw)
    def table(self):
        rows = [dict(image=str(p.relative_to(self.root)), edit_image=str(c.relative_to(self.root)), prompt=text) for p, (c,), text in self.samples()]
        (self.root/"metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))


def repeatable(s) -> dict: # {name: edit}
    target, control, text, new = s.target, s.control, lambda n: s.target(n, ".txt"), lambda path: s.new_image(path, next(s.sizes))
    return {
        "a first precompute": lambda: None,
        "captions are dropped from now on": lambda: s.set(caption_dropout_rate=0.1),
        "one caption of two on the same images": lambda: s.caption(3, f"make it {next(s.pool)}"),
        "a byte order mark and a line end": lambda: s.caption(3, b"\xef\xbb\xbf" + text(3).read_bytes() + b"\n"),
        "the caption of another image": lambda: shutil.copy(text(0), text(1)),
        "the caption of the same images": lambda: shutil.copy(text(0), text(3)),
        "captions exchanged between two images": lambda: s.exchange(text(4), text(5)),
        "a target": lambda: new(target(0)),
        "a target under the same name, size and time": lambda: s.replace_unseen(target(0)),
        "a target's file written again, the same pixels": lambda: Image.open(target(3)).save(target(3), compress_level=next(s.levels)),
        "targets exchanged": lambda: s.exchange(target(1), target(2)),
        "a control image": lambda: new(control(5)),
        "a control image under the same name, size and time": lambda: s.replace_unseen(control(5)),
        "one of two equal control images": lambda: new(control(3)),
        "and equal again": lambda: shutil.copy(control(0), control(3)),
        "target and control exchanged, or back": lambda: s.exchange(target(4), control(4)),
        "everything touched": lambda: s.touch_all(s.root),
        "resolution": lambda: s.set(image_size=[96, 96]),
        "cut to a shape": lambda: s.set(image_size=[64, 32], crop=True),
        "larger, cut to the same shape": lambda: s.set(image_size=[128, 64], crop=True),
        "not cut, another area for the VAE": lambda: s.set(image_size=[64, 64], crop=None, control_area=96*96),
        "an area that rounds to the same": lambda: s.set(control_area=96*96 + 50),
        "area of the controls for the text encoder": lambda: s.set(control_area=None, vl_area=112*112),
        "the model's own areas": lambda: s.set(vl_area=None),
        "other weights of the VAE": lambda: s.be(weights="50"),
        "other weights of the text encoder": lambda: s.be(weights="05"),
        "both, each known": lambda: s.be(weights="55"),
        "another template": lambda: s.be(weights="00", template="Be brief. "),
        "bfloat16": lambda: s.be(template="", dtype=torch.bfloat16),
        "a quantized text encoder": lambda: s.be(dtype=torch.float32, quantized="qint8"),
        "2509 instead of 2511, the same encoders": lambda: s.be(quantized=None, variant="2509"),
        "the model's files touched": lambda: (s.be(variant="2511"), s.touch_all(s.model().folder)),
    }


def scripted(s) -> dict:
    home, second = Path(os.environ["QIE_NB_HOME"]), s.root/"control_images_2"
    def forget_digests():
        shutil.rmtree(home)
        files._facts.clear(), files._folders.clear(), setattr(files._local, "owner", None)
    def spoil_digests(): forget_digests(); home.mkdir(); (home/"files.sqlite").write_bytes(b"not a data base" * 100)
    def link(): s.control(1).rename(s.tmp/"away.png"); s.control(1).symlink_to(s.tmp/"away.png")
    def pack(): EmbeddingCacheManager(s.cache).pack(s.tmp/"packed"); s.dirs = [s.tmp/"packed", s.tmp/"behind"]
    return repeatable(s) | {
        "v1, another template and order of sizes": lambda: s.be(variant="v1"),
        "an image behind a link": lambda: (s.be(variant="2511"), link()),
        "the linked image replaced": lambda: s.new_image(s.tmp/"away.png", (32, 48)),
        "and no link": lambda: shutil.move(shutil.copy(s.control(1), s.tmp/"same.png"), s.control(1)), # a table may not lead outside the data set
        "a second control image": lambda: image(next(s.pool), (40, 40), second/"0002.png"),
        "the two the other way round": lambda: s.exchange(s.control(2), second/"0002.png"),
        "only the first again": lambda: (s.exchange(s.control(2), second/"0002.png"), shutil.rmtree(second)),
        "a table instead of folders": s.table,
        "folders again": lambda: (s.root/"metadata.jsonl").unlink(),
        "the data set moved": lambda: s.be(root=Path(shutil.move(s.root, s.tmp/"elsewhere"))),
        "prompts encoded whole, convolutions in 3-D": lambda: s.be(encoder=dict(share_prefix=False, vae_2d=False)),
        "part of the data set, with one new target in it": lambda: (s.be(encoder={}, part=(0, 2)), s.new_image(s.target(1)), s.new_image(s.target(5))),
        "all of it, with another outside the part": lambda: s.be(part=(0, None)),
        "the memory of digests spoilt": spoil_digests,
        "a good memory again": forget_digests,
        "the cache moved": lambda: s.be(cache=Path(shutil.move(s.cache, s.tmp/"cache2"))),
        "the cache packed, before an empty folder": pack,
    }


OF_THE_MODEL = ("a first precompute", "captions are dropped from now on", "other weights of the VAE", "other weights of the text encoder",
                "another template", "bfloat16", "the model's files touched")


def edits_scripted(tmp, settle=0.03, only=None) -> dict:
    s, t = Studio(tmp, settle=settle), Tally("invalidation: scripted edits")
    for name, edit in itertools.islice(scripted(s).items(), only): s.step(t, name, edit)
    s.dirs = None
    s.from_scratch(t, "a cache from scratch after all these edits")
    v1 = Studio(Path(tmp)/"v1", "v1", (64*64, None), settle) # its text encoder sees the VAE's control image: its area concerns both
    v1.step(t, "v1: a first precompute", lambda: None)
    v1.step(t, "v1: area of the controls", lambda: v1.set(control_area=96*96))
    return t.result()


def edits_of_the_model(tmp) -> dict:
    s, t = Studio(tmp, same=(0, 1, 0)), Tally("invalidation: other weights, template, type")
    for name in OF_THE_MODEL: s.step(t, name, repeatable(s)[name])
    return t.result()


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
            assert all(new[p] == now.get(p, new[p]) for p in new)
            for h in (read_header(data) for p, data in now.items() if p.startswith(LATENTS)):
                w, shape = json.loads(h.pop("__metadata__")["parts"])["size"], h.popitem()[1]["shape"]
                assert shape[-2:] == [w[1] // 8, w[0] // 8], f"a latent said to be of {w} has the shape {shape}"
    return t.result()


def edits_random(tmp, trials) -> dict:
    s, t, rng = Studio(tmp), Tally("invalidation: random edits", trials), random.Random(0)
    edits = [*repeatable(s).items()]
    for n in range(trials):
        name, edit = rng.choice(edits)
        s.step(t, f"{n} {name}", edit)
        if n % 100 == 99 or n == trials - 1: s.from_scratch(t, f"{n} a cache from scratch")
    return t.result(f"{len(s.known)} entries in all")


# --- several processes on one cache
def crowd(world, processes, repetitions, kill=True) -> dict:
    t, rng, most = Tally(f"{processes} processes on one cache{', one killed' if kill else ''}", repetitions), random.Random(0), 0
    began = time.time()
    world.run(world.folder())
    alone, entries = time.time() - began, len(world.entries)
    while t.trials < repetitions:
        cache, shared, victim, die_at = world.folder(), Shared(), rng.randrange(processes) if kill else None, rng.randint(1, 5)
        locked = t.trials % 2 == 0 # killed while it surely holds a lock; else at any moment
        def job(n):
            while not shared[63]: time.sleep(0.0005)
            counted(world, cache, shared, n, die_at if locked and n == victim else None)
        pids = [fork(lambda: job(n), world.tmp/"log") for n in range(processes)]
        shared[63] = 1
        if kill and not locked:
            time.sleep(rng.uniform(0, alone * 0.9))
            os.kill(pids[victim], signal.SIGKILL)
        done = wait(pids, PATIENCE)
        if kill and not os.WIFSIGNALED(done.get(pids[victim], 0)): continue # it was done already
        with t.trial(f"repetition {t.trials}"):
            assert len(done) == processes
            assert all(done[p] == 0 for n, p in enumerate(pids) if n != victim), f"exit codes {done}: {(world.tmp/'log').read_text()[-500:]}"
            assert not EmbeddingCacheManager(cache).verify() and snapshot(cache) == world.files
            assert not [*(cache/"quarantine").glob("*")]
            made = sum(shared[n] for n in range(processes))
            most = max(most, made)
            # a killed process leaves one piece of work: four samples of seven kinds
            assert entries <= made <= entries + (28 if kill else entries // 10), f"{made} entries made for {entries}"
            world.makes_again(cache)
    return t.result(f"{most} entries made for {entries}")


# --- disks
def in_own_mounts(world, t, job) -> dict:
    "job(trial) in a child with its own mounts; it returns the worst."
    def run():
        try:
            own_mounts()
            return vars(t), job(t.trial)
        except NotRun as e: return {}, f"not run: mounting is not permitted here ({e})"
    counts, worst = child_value(run, world.tmp/"mounts")
    vars(t).update(counts)
    return t.result(worst)


def fill(disk, leave=0):
    "Another file takes all but `leave` bytes."
    with open(disk/"ballast", "wb", buffering=0) as f, contextlib.suppress(OSError):
        n = shutil.disk_usage(disk).free - leave
        while n > 0: n -= f.write(bytes(min(n, 1 << 20)))


def full_disk(world, every=1) -> dict:
    def job(trial):
        disk, start, rng = world.folder("disk"), world.folder("start"), random.Random(0)
        cache = disk/"cache"
        disk.mkdir()
        mount("-t", "tmpfs", "-o", "size=6m", "tmpfs", disk)
        def fresh(source=None):
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
            assert before.items() <= snapshot(cache).items() <= world.files.items()
            assert not [*(cache/".tmp").glob("*")]
            (disk/"ballast").unlink()
            assert not attempt()[0] and snapshot(cache) == world.files
        world.run(start, 0, 2)
        fresh(start)
        written = attempt()[2]
        for n in range(0, len(written), every):
            need = len(world.files[written[n]])
            leave = rng.randrange(-(-need // 4096)) * 4096 # pages
            with trial(f"write {n}: {written[n]}"): check(fresh(start), attempt(n, leave), need, leave)
        with trial("the first write of all, the manifest"): check(fresh(), attempt(0), len(world.files["manifest.json"]), 0)
        with trial("full before it begins"):
            before = fresh(start)
            fill(disk, 8192)
            failed = attempt()
            sentence(OSError(failed[1]), "Nothing was written", str(cache))
            assert snapshot(cache) == before
            check(before, failed, sum(map(len, world.files.values())) - sum(map(len, before.values())), 8192)
        with trial("packing to a full disk"):
            fresh()
            fill(disk, 20_000)
            refused(lambda: EmbeddingCacheManager(world.reference).pack(disk/"packed"), str(disk/"packed"), " MB more")
            assert not (disk/"packed"/INDEX).exists() and not (disk/"packed"/DATABASE).exists()
        with trial("packing to a disk without space for the index"):
            shards = sum(f.stat().st_size for f in world.pack()[1] if f.name not in (INDEX, DATABASE))
            fresh()
            fill(disk, shards + 30_000)
            refused(lambda: EmbeddingCacheManager(world.reference).pack(disk/"packed"), str(disk/"packed"), " MB more")
            assert {p.suffix for p in (disk/"packed").iterdir()} == {".safetensors"}
        return f"{len(written)} writes"
    return in_own_mounts(world, Tally("full disk at every write"), job)


def read_only(world, packed) -> dict:
    def job(trial):
        ro, tried = world.folder("ro"), []
        source = world.pack("source")[0] if packed else world.copy("source")
        adapter = lambda *cache: {k: v.numpy().tobytes() for k, v in lora_state(world.train([*cache]).transformer).items()}
        usual = adapter(world.copy("usual"))
        ro.mkdir()
        mount_read_only(source, ro)
        def hook(event, args):
            writes = event in ("os.mkdir", "os.rename", "os.remove", "os.link", "os.truncate")
            if event == "open": writes, args = (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), args[:1]
            if writes and any(str(a).startswith(str(ro)) for a in args): tried.append((event, *map(str, args)))
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
            assert report.tensors == 1 and {p.split("/")[0] for p in snapshot(rw)} == {"prompt_embed"}, str(report)
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
            assert adapter(ro, rw) == usual
            refused(lambda: world.train(ro), str(ro), "checksum differs")
        with trial("nothing tried to write there"): assert not tried, tried[:3]
        return "no write was tried there"
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
    t, marker, run, (packed, _), cache = Tally("pickles under harmless names"), world.tmp/"executed", world.folder("run"), world.pack(), world.copy("usual")
    whole = world.train(cache, save_interval=1, max_train_steps=6, output_dir=str(run))
    lora, point = whole.save_lora(run/"lora"), find_checkpoint("latest", run/"checkpoints")
    model = Path(shutil.copytree(world.components.folder, world.folder("model")))
    complete = point/"COMPLETE"
    def resumed(path):
        if path != complete: complete.write_text(json.dumps({p.name: file_digest(p) for p in point.iterdir() if p != complete}))
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
    uses = { # path: use
        **{place(cache, *world.first(kind)): entry for kind in ("prompt_embed", "pixel_latent", "prompt_prefix")},
        cache/"manifest.json": lambda p: EmbeddingCacheManager(cache).identities(),
        packed/INDEX: lambda p: EmbeddingCacheManager(packed),
        packed/DATABASE: lambda p: EmbeddingCacheManager(packed),
        min(packed.glob("cache-0*")): shard,
        **{world.root/name: lambda p: world.dataset(cache, strict=True)
           for name in ("training_images/0000.png", "control_images/0001.png", "metadata.jsonl", "metadata.csv")},
        lora: lambda p: load_lora(whole.transformer, p),
        **{point/name: resumed for name in ("pytorch_lora_weights.safetensors", "optimizer.safetensors", "state.json", "COMPLETE")},
        **{model/name: lambda p: EditModel(str(model)).get(p.parent.name)
           for name in ("vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors", "vae/config.json")},
        model/"model_index.json": lambda p: EditModel(str(model))}
    for path, use in uses.items():
        old, listed = path.read_bytes() if path.exists() else None, complete.read_bytes()
        for data in payloads(marker):
            with t.trial(f"{path}, {data[:9]}"):
                path.write_bytes(data)
                try:
                    with quiet(): use(path)
                except Exception as e:
                    if path.parent.parent != model: sentence(e) # else in diffusers' and transformers' own words
                else:
                    # a file that is no table is no reason to refuse the folders beside it
                    if path.name != "metadata.csv": raise AssertionError("was accepted")
                finally: assert not marker.exists()
        path.unlink()
        if old is not None: path.write_bytes(old)
        complete.write_bytes(listed)
    with t.trial("a memory of digests that is a pickle"):
        (home := world.folder("home")).mkdir()
        (home/"files.sqlite").write_bytes(payloads(marker)[0])
        with patch.dict(os.environ, QIE_NB_HOME=str(home)): world.makes_again(world.reference)
        assert not marker.exists()
    return t.result(f"{len(uses)} files in two forms")


def rebuilt(data, text): # an entry with another header, its length and padding as they must be
    text = text if isinstance(text, bytes) else (text if isinstance(text, str) else json.dumps(text)).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[start_of(data):]


def signed(data, h): # by a liar who knows the format: the checksum is right
    (kind, record), = ((k, v) for k, v in h.items() if k != "__metadata__")
    meta, payload = h["__metadata__"], data[start_of(data):]
    meta["checksum"] = cache_entries._checksum(meta, record, payload)
    return cache_entries._header(kind, meta, record) + payload


def headers(world) -> dict:
    "Headers that lie: never an error but a sentence, never a tensor."
    t, cache = Tally("malformed headers"), world.copy()
    (kind, key, good), front = world.first("prompt_embed"), world.first("prompt_prefix")
    path, h, n = place(cache, kind, key), read_header(good), start_of(good)
    size, bare, far = len(good) - n, {kind: h[kind]}, "../../../etc/passwd"
    def put(**kw): return h | {kind: h[kind] | kw}
    def meta(h=h, **kw): return h | dict(__metadata__=h["__metadata__"] | kw)
    texts = ["{]", b"\xff\xfe{}", "[]", "null", "[" * 100_000, '{"a":' * 100_000, '{"__metadata__":{},"x":' + "9" * 10_000 + "}"]
    lying = [*(bare | dict(__metadata__=m) for m in ([], None)), bare, meta(prefix=["a"], key=[key], kind=[kind]), meta(format="qie_nb-1"),
             dict(__metadata__=h["__metadata__"]), h | dict(more=h[kind]), h | {kind: "x"}, meta(prefix=far), meta(prefix="0" * 40),
             good[8:n].decode().replace('{"__metadata__"', '{"__metadata__":{},"__metadata__"', 1), # a name twice
             *(put(data_offsets=o) for o in ([0, size + 8], [size, 0], [-8, size - 8], [0, size - 4])), *(put(dtype=d) for d in ("F31", "I32")),
             *(put(shape=s) for s in ([-1, 64], [1 << 32, 1 << 32], [64, size // 256]))]
    right_sums = [*(put(shape=s) for s in ([3, 64], [1 << 32, 1 << 32])), h | {kind: dict(dtype="F32", shape="64", data_offsets="ab")},
                  *(meta(prefix=p) for p in (far, ["a", "b"], 7))]
    lies = [b"", good[:7], good + b"12345678", *(v.to_bytes(8, "little") + good[8:] for v in (0, 1 << 63, (1 << 64) - 1, n - 7, n - 9, len(good))),
            *(rebuilt(good, text) for text in (*texts, *lying)), *(signed(good, h) for h in right_sums)]
    for data in lies:
        path.parent.mkdir(exist_ok=True), path.write_bytes(data)
        with t.trial(f"{data[:400]}"):
            m = EmbeddingCacheManager(cache)
            m.cache_exists(kind, key), m.prefix_of(kind, key), m.get_cache_stats(), m.gc(dry_run=True)
            with quiet(): world.dataset(cache).status()
            (where, why), = m.verify()
            assert where == str(path) and why and "\n" not in why
            assert m.load_cache(kind, key) is None
            world.makes_again(cache, missing=1)
        shutil.rmtree(cache/"quarantine", ignore_errors=True)
    own = meta(read_header(front[2]), prefix=front[1])
    for name, lie, (k, key_, good_) in (("no such prefix", meta(prefix="0" * 40), (kind, key, good)), ("its own prefix", own, front)):
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
    return t.result(f"{len(lies)} headers")


def indexes(world, t):
    "Indexes of a packed layer that lie, with a right checksum: older ones, and those of a database."
    (packed, _), (kind, key, _) = world.pack(), world.first("pixel_latent")
    databases(packed, kind, key, t)
    world.pack()
    index = make_older(packed)
    whole = json.loads(index.read_text())
    shard, start, size, head = whole["entries"][kind][key]
    rows = ([7, start, size, head], [shard, -8, size, head], [shard, 1 << 40, size, head], [shard, start, 1 << 50, head], [shard, start, -1, head],
            [shard, start, size], [shard, start, size, 5], None)
    lies = [dict(entries=[]), dict(entries={kind: [key]}), dict(shards=3), dict(shards=["../cache-1.safetensors"]), dict(shards=["cache-9.safetensors"]),
            dict(identities=[1]), *(dict(entries=whole["entries"] | {kind: whole["entries"][kind] | {key: row}}) for row in rows)]
    for lie in ([], {}, *(whole | lie for lie in lies)):
        if lie: lie = lie | dict(checksum=_index_checksum(lie))
        index.write_text(json.dumps(lie))
        with t.trial(f"index: {str(lie)[-300:]}"):
            try:
                m = EmbeddingCacheManager(packed)
                m.identities(), m.get_cache_stats()
                assert m.load_cache(kind, key) is None
                m.verify()
            except Exception as e: sentence(e)


def databases(packed, kind, key, t):
    "Values of a database that lie: the entry or the packed layer is refused, and the others stay as they are."
    index, database = (packed/INDEX).read_bytes(), (packed/DATABASE).read_bytes()
    rows = {k: table for k, table in entries_of(open_layer(packed)).items()}
    shard, start, size, _ = rows[kind][key]
    right = {(k, x): EmbeddingCacheManager(packed).load_cache(k, x) for k in rows for x in rows[k]}
    values = ("7", "-8", "1 << 40", "1 << 62", "'a'", "x'ff'", "0.5", f"{start + 8}", f"{size - 8}")
    columns = ("shard", "begin", "size", "header", "header_bytes")
    lies = [f"UPDATE entries SET {c}={v} WHERE kind='{kind}' AND key='{key}'" for c in columns for v in values]
    lies += ["DELETE FROM headers", "DELETE FROM entries", "UPDATE headers SET header='{}'",
             "UPDATE headers SET header=x'00'", "UPDATE entries SET header=0",
             "UPDATE entries SET key='../' || key", "DROP TABLE headers", "CREATE TABLE more (x)",
             "CREATE VIEW more AS SELECT 1"]
    for lie in lies:
        (packed/INDEX).write_bytes(index), (packed/DATABASE).write_bytes(database)
        with contextlib.closing(sqlite3.connect(packed/DATABASE, isolation_level=None)) as db: db.execute(lie)
        signed_again(packed)
        with t.trial(f"database: {lie}"):
            try:
                m = EmbeddingCacheManager(packed)
                got = {id: m.load_cache(*id) for id in right}
                assert all(x is None or torch.equal(x, right[id]) for id, x in got.items())
                m.identities(), m.get_cache_stats(), m.verify()
            except Exception as e: sentence(e)
    (packed/INDEX).write_bytes(index), (packed/DATABASE).write_bytes(database)


# --- what is kept
def bits(tmp) -> dict:
    "Tensors keep their bits and dtype, loose and packed."
    t, cache, g = Tally("bits and types kept"), EmbeddingCacheManager(Path(tmp)/"bits"), torch.Generator().manual_seed(0)
    every = torch.arange(-2**15, 2**15, dtype=torch.int32).to(torch.int16)
    words = torch.randint(-2**31, 2**31 - 1, (50_000,), generator=g, dtype=torch.int64).to(torch.int32)
    finite = [x[torch.isfinite(x)] for x in (every.view(torch.bfloat16), every.view(torch.float16), words.view(torch.float32))]
    rand = functools.partial(torch.rand, generator=g)
    tensors = [*finite, rand(77) > 0.5, *((rand(77) * 2).to(d) for d in (torch.int64, torch.int32, torch.uint8, torch.float64)), torch.zeros(0, 64),
               torch.tensor(1.5), rand(6, 4).T.bfloat16(), rand(9, 8)[:, ::2], rand(16, 1, 3, 5, 2).bfloat16()]
    wanted = {(kind, key_of(kind, name=n)): x for n, x in enumerate(tensors) for kind in ("pixel_latent", "prompt_embed", "edit_mask")}
    for k, x in wanted.items(): cache.save_cache(*k, x)
    cache.pack(Path(tmp)/"packed")
    for where, m in (("loose", cache), ("packed", EmbeddingCacheManager(Path(tmp)/"packed"))):
        for (kind, key), x in wanted.items():
            with t.trial(f"{x.dtype} {list(x.shape)} as {kind}, {where}"):
                got = m.load_cache(kind, key)
                assert got.dtype == x.dtype and got.shape == x.shape
                assert torch.equal(*(y.contiguous().flatten().view(torch.uint8) for y in (got, x)))
    for x in (torch.tensor([1., float("nan")]), torch.tensor([float("inf")]).bfloat16(), torch.tensor([-float("inf")]).half()):
        with t.trial(f"{x} is refused"): refused(lambda: cache.save_cache("pixel_latent", "ab" * 20, x), "NaN or inf")
    return t.result()


# --- all of them
def cases(full): # {name: function of a folder}
    make = lambda *a: functools.lru_cache(lambda: World(tempfile.mkdtemp(prefix="faults-"), *a))
    world, crowded = make(), make((0, 1, 2, 0, 0, 0, 0, 7))
    n = lambda much, little: much if full else little
    on = lambda f, *a, of=world: lambda tmp: f(of(), *a)
    damaged = {name: on(damages, what, damage, n(1000, 30)) for name, what, damage in (
        ("flips", "one bit flipped", flip), ("truncations", "truncated", truncate), ("zeroed_tails", "tail of zeros", zero_tail))}
    return dict(
        kills_at_operations=on(kills_at_operations, n(None, 1)), order_of_writes=on(order_of_writes), **damaged,
        losses=on(losses, n(1, 9)), swaps=on(swaps, n(None, 20)),
        edits_scripted=lambda tmp: edits_scripted(tmp, n(2.1, 0.03), n(None, 20)), edits_of_the_model=edits_of_the_model,
        edits_random=lambda tmp: edits_random(tmp, n(500, 15)), edits_meanwhile=on(edits_meanwhile, n((1, 2, 9), (1,))),
        crowd_of_2=on(crowd, 2, n(20, 1), of=crowded), crowd_of_4=on(crowd, 4, n(20, 1), of=crowded),
        crowd_undisturbed=on(crowd, 4, n(10, 1), False, of=crowded),
        full_disk=on(full_disk, n(1, 12)), read_only_loose=on(read_only, False), read_only_packed=on(read_only, True),
        pickles=on(pickles), headers=on(headers), bits=bits)


if __name__ == "__main__": main("Fault injection for the cache", cases)
