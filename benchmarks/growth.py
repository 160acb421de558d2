"""What grows with the number of samples.

That is files, bytes, start-up, memory, the look through the cache, an epoch's order, a step and
packing. `python benchmarks/growth.py` measures 100 to 100,000 samples, extrapolates to a million
and writes results/growth.json; `python benchmarks/session_table.py --write` puts the table into
docs/measured/growth.md. Samples are made up: pairs of 16 x 16 PNG files, a caption file each, and
entries with tiny tensors and full headers, as `precompute` lays them out. Every figure is from a
process of its own. Name numbers of samples to measure only those; the others stay in the file.
"""
import argparse, gc, json, math, os, platform, shutil, struct, subprocess, sys, tempfile, threading, time, tracemalloc, zlib
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median

OUT = Path(__file__).parent/"results"/"growth.json"
SIZES, RUNS, STEPS = (100, 1000, 10_000, 100_000), 3, 200
WHO = dict(model="made up", variant="2511", vae="0" * 64, text_encoder="1" * 64, template="edit-plus-1", dtype="bfloat16",
           control_area=64*64, vl_area=64*64)


# --- samples and entries, made up
def png(number, side=16): # a grey image whose first pixels are a number, as no other image's
    rows = bytearray(side * (side + 1))
    rows[1:9] = struct.pack(">Q", number)
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(rows), 1)) + chunk(b"IEND", b"")


def make_pairs(root, n):
    for d in ("training_images", "control_images"): (root/"set"/d).mkdir(parents=True)
    for i in range(n):
        (root/"set/training_images"/f"{i:07}.png").write_bytes(png(2 * i))
        (root/"set/control_images"/f"{i:07}.png").write_bytes(png(2 * i + 1))
        (root/"set/training_images"/f"{i:07}.txt").write_text(f"make number {i} blue, and leave everything else in the image as it is")


def data_set(root, layer):
    from qie_nb.data.dataset import ImageDataset
    data = dict(image_size=[64, 64], caption_dropout_rate=0.1)
    return ImageDataset(dict(dataset_path=str(root/"set"), cache_dir=str(root/layer), use_cache=True, encoder_id=None) | data)


def entry_file(kind, key, parts, prefix): # as `pack_entry` makes it of a tiny tensor
    from qie_nb.core.cache_entries import _checksum, _header, _meta
    shape = [16, 1, 2, 2] if "latent" in kind else [6] if kind.endswith("mask") else [4, 8] if kind == "prompt_prefix" else [2, 8]
    dtype, wide = ("BOOL", 1) if kind.endswith("mask") else ("BF16", 2)
    payload = bytes(wide * math.prod(shape) - 1) + b"\1"
    record, meta = dict(dtype=dtype, shape=shape, data_offsets=[0, len(payload)]), _meta(kind, key, parts, prefix)
    meta["checksum"] = _checksum(meta, record, payload)
    return _header(kind, meta, record) + payload


def fill(root): # one file per entry, written without waiting for the disk
    from qie_nb.cache import PREFIX
    dataset = data_set(root, "cache")
    dataset.cache.add_identity(WHO)
    dataset.refresh()
    folders = set()
    for i in range(len(dataset)):
        keys = dataset.keys(i)
        for name in (*dataset.needed(i), PREFIX):
            kind, key, parts = keys[name]
            path = dataset.cache.layers[-1].path(kind, key)
            if path.parent not in folders: path.parent.mkdir(parents=True, exist_ok=True)
            folders.add(path.parent)
            path.write_bytes(entry_file(kind, key, parts, keys[PREFIX].key if name.endswith("prompt_embed") else None))


# --- counted and measured in a process of its own
class Counted:
    "Within: files opened, and questions about files, by the thread that counts; libraries may have others."
    on = None

    def __enter__(self):
        self.opened = self.asked = 0
        self.thread = threading.get_ident()
        Counted.on, self.real = self, os.stat

        def stat(*a, **kw):
            self.asked += threading.get_ident() == self.thread
            return self.real(*a, **kw)
        os.stat = stat
        return self

    def __exit__(self, *_): Counted.on, os.stat = None, self.real

    @staticmethod
    def hook(event, args):
        "For `sys.addaudithook`."
        counting = Counted.on and Counted.on.thread == threading.get_ident()
        if counting and event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
            Counted.on.opened += 1


def memory(): # resident bytes: (now, at most so far)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return tuple(int(status[k].split()[0]) * 1024 for k in ("VmRSS", "VmHWM"))


def took(f):
    t = time.perf_counter()
    out = f()
    return time.perf_counter() - t, out


def opened(root, layer): # (figures, data set)
    before, cpu = memory()[0], time.process_time()
    with Counted() as c: seconds, ds = took(lambda: data_set(root, layer))
    return dict(open_s=seconds, open_cpu_s=time.process_time() - cpu, open_opened=c.opened, open_asked=c.asked,
                open_peak=memory()[1] - before, open_bytes=memory()[0] - before), ds


def part_open(root, layer):
    import torch # noqa: not a cost of the data set
    from qie_nb.data.dataset import ImageDataset # noqa
    return opened(root, layer)[0]


def part_work(root, layer): # open, then what `precompute` and `fit` do before the first step, then steps
    import torch # noqa: not a cost of the data set
    from qie_nb.data.dataset import ImageDataset, loader # noqa
    before, (out, ds) = memory()[0], opened(root, layer)
    from types import SimpleNamespace as NS
    from qie_nb.encoding.precompute import Report, scan_cache
    with Counted() as c: out["first_keys_s"], _ = took(lambda: [ds.keys(i) for i in range(len(ds))])
    out |= dict(keys_opened=c.opened, keys_asked=c.asked)
    with Counted() as c: out["scan_s"], missing = took(lambda: scan_cache(ds, range(len(ds)), False, Report()))
    out |= dict(scan_opened=c.opened, scan_asked=c.asked, complete=sum(not m for m in missing.values()))
    with Counted() as c: out["status_s"], status = took(ds.status)
    assert status["complete"] == out["complete"]
    out |= dict(status_opened=c.opened, status_asked=c.asked)
    with Counted() as c: out["drop_unreadable_s"], _ = took(ds.drop_unreadable)
    out |= dict(drop_opened=c.opened, drop_asked=c.asked, scanned_peak=memory()[1] - before)
    ready = loader(ds, batch_size=1)
    out["length_s"], n = took(lambda: len(ready))
    def order():
        ready.batch_sampler.set_epoch(ready.batch_sampler.epoch + 1)
        return ready.batch_sampler.sizes(), list(ready.batch_sampler)
    out["epoch_order_s"], (_, batches) = took(order)
    chosen = batches[:STEPS] # the order is random
    sample = lambda: [ready.collate_fn([ds[i] for i in b]) for b in chosen]
    sample()
    with Counted() as c: seconds, made = took(sample)
    assert all(b["cached"] for b in made)
    out |= dict(step_s=seconds / len(chosen), step_opened=c.opened / len(chosen), step_asked=c.asked / len(chosen), calls=calls(sample) / len(chosen))
    return out | dict(peak=memory()[1] - before, samples=n)


def calls(f) -> int:
    "How many Python and C functions a function calls. Nothing is collected meanwhile, because that calls functions of others."
    n = 0
    def count(frame, event, arg):
        nonlocal n
        n += event in ("call", "c_call")
    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        f()
    finally:
        sys.setprofile(None)
        gc.enable()
    return n


def part_allocated(root, layer):
    "Bytes of Python objects a sample: of an open data set, and added by looking at each sample."
    data_set(root, layer).status() # imports, and facts of files
    gc.collect()
    tracemalloc.start()
    ds = data_set(root, layer)
    opened = tracemalloc.get_traced_memory()[0]
    for i in range(len(ds)):
        assert not ds.missing(i)
    known = tracemalloc.get_traced_memory()[0] - opened
    return dict(opened=opened / len(ds), known=known / len(ds))


def part_allocated_packed(root, layer):
    "Bytes of Python objects an entry of a packed cache: kept, and at most while it is opened."
    from qie_nb.core.cache_layers import open_layer
    open_layer(root/layer)
    gc.collect()
    tracemalloc.start()
    opened = open_layer(root/layer)
    held, most = tracemalloc.get_traced_memory()
    n = sum(1 for kind in opened.index for _ in opened.entries(kind))
    return dict(entries=n, kept=held / n, most=most / n, tables=sorted({type(t).__name__ for t in opened.index.values()}))


def part_opened_packed(root, layer):
    "Resident bytes that an open packed cache adds, SQLite's too: before and after a list and 2,000 look-ups."
    import random
    from qie_nb.core.cache_layers import open_layer
    open_layer(root/"small") # imports
    gc.collect()
    before = memory()[0]
    opened = open_layer(root/layer)
    held = memory()[0] - before
    n = sum(1 for kind in opened.index for _ in opened.entries(kind))
    for key in random.Random(0).sample([key for key, _ in opened.entries("pixel_latent")], 2000):
        opened.payload("pixel_latent", key)
    del key
    gc.collect()
    return dict(entries=n, opened=held, used=memory()[0] - before)


def part_pack(root, layer):
    import torch # noqa
    from qie_nb.cache import EmbeddingCacheManager
    before = memory()[0]
    seconds, files = took(lambda: EmbeddingCacheManager(root/"cache").pack(root/"packed", replace=True))
    sizes = [f.stat().st_size for f in files]
    return dict(pack_s=seconds, pack_peak=memory()[1] - before, shards=len(files) - 2,
                index_bytes=sum(sizes[-2:]), packed_bytes=sum(sizes))


def part_packed(root, layer):
    import torch # noqa
    from qie_nb.cache import EmbeddingCacheManager
    before = memory()[0]
    seconds, cache = took(lambda: EmbeddingCacheManager(root/"packed"))
    now, most = memory()
    return dict(packed_open_s=seconds, packed_open_bytes=now - before, packed_open_peak=most - before)


def part_fill(root, layer):
    fill(root)
    return {}


def child(part, root, layer, home):
    "A part in a fresh process; what is known of files is in `home`."
    run = subprocess.run([sys.executable, __file__, "--part", part, "--root", str(root), "--layer", layer], capture_output=True, text=True,
                         env=os.environ | dict(QIE_NB_HOME=str(home), OMP_NUM_THREADS="1"))
    if run.returncode: raise SystemExit(run.stderr[-3000:])
    return json.loads(run.stdout.splitlines()[-1])


def spread(rows):
    out = {}
    for k in rows[0]:
        v = [r[k] for r in rows]
        out[k] = dict(median=round(median(v), 6), min=round(min(v), 6), max=round(max(v), 6), runs=len(v)) if k.endswith("_s") else max(v)
    return out


def tree(folder): # (files, bytes)
    sizes = [os.stat(os.path.join(d, f)).st_size for d, _, files in os.walk(folder) for f in files]
    return len(sizes), sum(sizes)


def measure(n, scratch, runs=RUNS):
    root = Path(tempfile.mkdtemp(dir=scratch, prefix=f"growth_{n}_"))
    say = lambda text: print(f"{n}: {text}", file=sys.stderr, flush=True)
    try:
        seconds, _ = took(lambda: make_pairs(root, n))
        say(f"pairs made in {seconds:.0f} s")
        child("fill", root, "cache", root/"filled")
        files, size = tree(root/"cache")
        out = dict(samples=n, entries=files - 1, entry_bytes=size, image_files=tree(root/"set")[0])
        time.sleep(3) # facts of files that are younger than two seconds are not kept
        run = lambda part, layer, home: child(part, root, layer, home)
        out["cold"] = spread([run("work", "cache", root/"home")])
        say(f"cold {out['cold']['open_s']}")
        out["warm_open"] = spread([run("open", "cache", root/"home") for _ in range(runs)])
        say(f"warm {out['warm_open']}")
        out["warm"] = spread([run("work", "cache", root/"home")])
        say(f"peak {out['warm']['peak'] / 1e6:.0f} MB")
        out["known_bytes"] = tree(root/"home")[1]
        out["pack"] = spread([run("pack", "cache", root/"home")])
        say(f"pack {out['pack']}")
        out["packed"] = spread([run("packed", "packed", root/"home") for _ in range(runs)])
        out["packed_work"] = spread([run("work", "packed", root/"home")])
        say(f"packed {out['packed']}")
        return out
    finally: shutil.rmtree(root, ignore_errors=True)


def about():
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), platform.machine())
    return dict(device=f"{cpu}, {os.cpu_count()} cores", python=platform.python_version(), load_average=os.getloadavg()[0],
                versions={p: version(p) for p in ("torch", "diffusers", "safetensors", "pillow")}, date=datetime.now(timezone.utc).isoformat()[:19])


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("samples", nargs="*", type=int, default=SIZES)
    p.add_argument("--scratch", help="folder for 4 GB of made-up files")
    p.add_argument("--out", default=OUT, type=Path)
    p.add_argument("--runs", default=RUNS, type=int)
    p.add_argument("--part"), p.add_argument("--root", type=Path), p.add_argument("--layer")
    a = p.parse_args()
    if a.part:
        sys.addaudithook(Counted.hook)
        print("\n" + json.dumps(globals()[f"part_{a.part}"](a.root, a.layer)))
    else:
        for n in a.samples:
            held = json.loads(a.out.read_text()) if a.out.is_file() else {}
            held["results"] = held.get("results", {}) | {str(n): measure(n, a.scratch, a.runs)}
            a.out.write_text(json.dumps(about() | dict(results=held["results"]), indent=1) + "\n")
