"""What the cache costs: looking through it, reading it in training, its bytes, and the operations that sharing a prompt's front saves.

`make bench-cache` writes results/cache.json and prints a table. Entries are made up, with the sizes and layout of real ones; no model
is run. Parts can be named: `python benchmarks/cache.py status loader bytes operations`; the others then stay in the file as they were.
"""
import argparse, gc, itertools, json, os, platform, shutil, subprocess, sys, tempfile, time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from unittest.mock import patch

OUT = Path(__file__).parent/"results"/"cache.json"
WHO = dict(model="made up", variant="2511", vae="0" * 64, text_encoder="1" * 64, template="edit-plus-1", dtype="bfloat16",
           control_area=64*64, vl_area=64*64)


def spread(values, digits=3):
    "Median and range of repeated measurements."
    return dict(median=round(median(values), digits), min=round(min(values), digits), max=round(max(values), digits), runs=len(values))


def seconds(f):
    t = time.perf_counter()
    out = f()
    return time.perf_counter() - t, out


# --- data sets and caches, made up
def make_pairs(root, n, side):
    import numpy as np
    from PIL import Image
    rng = np.random.default_rng(0)
    for d in ("training_images", "control_images"): (root/"set"/d).mkdir(parents=True)
    for i in range(n):
        a = rng.integers(0, 255, (side, side, 3), dtype=np.uint8)
        Image.fromarray(a).save(root/"set"/"control_images"/f"{i:05}.png")
        Image.fromarray(255 - a).save(root/"set"/"training_images"/f"{i:05}.png")
        (root/"set"/"training_images"/f"{i:05}.txt").write_text(f"make number {i} blue")


def data_set(root, layer, dropout=0.1):
    from qie_nb.data.dataset import ImageDataset
    return ImageDataset(dict(dataset_path=str(root/"set"), image_size=[64, 64], cache_dir=str(root/layer), use_cache=True,
                             caption_dropout_rate=dropout))


def fill(dataset, latent, front, rest, width):
    "Entries as `precompute` lays them out: the prefix once, prompts on top of it. Nothing is forced to the disk."
    import torch
    from qie_nb.cache import PREFIX
    dataset.cache.add_identity(WHO)
    dataset.refresh()
    random = lambda *shape: torch.randn(shape).bfloat16()
    with patch("os.fsync"):
        for i in range(len(dataset)):
            keys, n = dataset.keys(i), rest(i)
            for name in (*dataset.needed(i), PREFIX):
                (kind, key, parts), needs = keys[name], None
                if name.endswith("mask"): t = torch.ones(front + n, dtype=torch.bool)
                elif name == PREFIX: t = random(front, width)
                elif "prompt" in name: t, needs = random(n, width), keys[PREFIX][1]
                else: t = random(*latent)
                dataset.cache.save_cache(kind, key, t, parts, needs)


# --- 1. looking through a data set's cache
CHILD = """
import json, sys, time
t = [time.perf_counter()]
from qie_nb.data.dataset import ImageDataset
t.append(time.perf_counter())
ds = ImageDataset(dict(dataset_path=sys.argv[1], image_size=[64, 64], cache_dir=sys.argv[2], use_cache=True, caption_dropout_rate=0.1))
t.append(time.perf_counter())
ds.refresh(json.loads(sys.argv[3]))
s = ds.status()
t.append(time.perf_counter())
s = ds.status()
t.append(time.perf_counter())
names = "import", "construct", "first", "again"
print(json.dumps(dict(zip(names, (b - a for a, b in zip(t, t[1:])))) | dict(complete=s["complete"])))
"""


def look(root, layer, home, complete):
    out = subprocess.run([sys.executable, "-c", CHILD, str(root/"set"), str(root/layer), json.dumps(WHO)], capture_output=True, text=True,
                         check=True, env=os.environ | dict(QIE_NB_HOME=str(home)))
    got = json.loads(out.stdout.splitlines()[-1])
    assert got["complete"] == complete, got
    return got | dict(both=got["construct"] + got["first"])


def status(root, a):
    "A process that knows nothing of the files yet (cold), and processes after it (warm)."
    make_pairs(root, a.samples, 8)
    dataset = data_set(root, "loose")
    fill(dataset, (16, 1, 8, 8), 7, lambda i: 2 + i % 3, 8)
    dataset.cache.pack(root/"packed")
    (root/"empty").mkdir()
    entries = dataset.get_cache_stats()["total"]["count"]
    time.sleep(2.5) # facts are kept only of files that have settled
    looks = lambda layer, home, n: [look(root, layer, home(i), a.samples if layer != "empty" else 0) for i in range(n)]
    cold = looks("loose", lambda i: root/f"home{i}", min(a.runs, 3))
    rows = dict(cold_loose=cold) | {f"warm_{k}": looks(k, lambda i: root/"home0", a.runs) for k in ("loose", "packed", "empty")}
    what = "construct", "first", "again", "both", "import"
    return dict(samples=a.samples, entries=entries, seconds={k: {w: spread([r[w] for r in v]) for w in what} for k, v in rows.items()},
                note="construct: ImageDataset(); first: refresh() and the process's first status(); again: its second; both: construct and "
                     "first. The page cache is warm throughout; cold means that no digest is remembered. empty: a cache without entries")


# --- 2. training's loader
def sleep_step(_): time.sleep(0.1)


def matmul_step():
    "About 100 ms of one thread in torch, which lets other threads of Python run."
    import torch
    a = torch.randn(768, 768)
    once = min(seconds(lambda: a @ a)[0] for _ in range(20))
    return lambda _, n=max(1, round(0.1 / once)): [a @ a for _ in range(n)]


def python_step():
    "About 100 ms of Python that never releases the interpreter lock: the worst case for a thread."
    spin = lambda n: sum(i * i for i in range(n))
    once = min(seconds(lambda: spin(10_000))[0] for _ in range(20))
    return lambda _, n=round(0.1 / once * 10_000): spin(n)


def batches_of(dataset, how, size):
    "Batches as `Run` gives them (from its thread, or from a loader process), or as the loader does, or the same one again and again."
    from qie_nb.data.dataset import loader
    from qie_nb.training.step import BatchStream
    ready = loader(dataset, batch_size=size, num_workers=int(how == "process"))
    if how in ("ahead", "process"): return (b for g in BatchStream(ready, 1, []).groups(SimpleNamespace(epoch=0, position=0)) for b in g)
    return iter(ready) if how == "plain" else itertools.repeat(next(iter(ready)))


def loop(dataset, how, size, step, steps):
    "Waits for batches and times of whole steps, without the first, which cannot have been fetched ahead."
    batches, waits, whole = batches_of(dataset, how, size), [], []
    step(next(batches))
    for _ in range(steps):
        t = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - t)
        assert batch["cached"] and len(batch["pixel_latent"]) == size
        step(batch)
        whole.append(time.perf_counter() - t)
        del batch
    if hasattr(batches, "close"): batches.close()
    return waits, whole


def forget(folder):
    "Ask the system to drop a folder's files from memory, so that they are read from the disk."
    for p in folder.rglob("*.safetensors"):
        fd = os.open(p, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def row_of(runs):
    "Figures of one loop's runs: all waits together, and each run's median step."
    waits = sorted(1e3 * w for waits, _ in runs for w in waits)
    return dict(wait_ms=dict(mean=round(mean(waits), 3), median=round(median(waits), 3), p99=round(waits[int(0.99 * len(waits))], 3),
                             max=round(waits[-1], 3)),
                step_ms=spread([1e3 * median(whole) for _, whole in runs], 2), steps=len(waits),
                step_mean_ms=round(mean(1e3 * w for _, ws in runs for w in ws), 2))


LOOPS = {"no loader": ("loose", "same", 1), "loose": ("loose", "ahead", 1), "packed": ("packed", "ahead", 1),
         "loose, from the disk": ("loose", "ahead", 1), "loose, batch of 2": ("loose", "ahead", 2), "packed, batch of 2": ("packed", "ahead", 2),
         "loose, a loader process": ("loose", "process", 1), "loose, not ahead": ("loose", "plain", 1),
         "packed, not ahead": ("packed", "plain", 1)}


def loader_costs(root, a):
    import torch
    torch.set_num_threads(1)
    n = 2 * a.steps + 8
    make_pairs(root, n, 64)
    time.sleep(2.5) # as above
    dataset = data_set(root, "loose", 0.)
    fill(dataset, (16, 1, 128, 128), 280, lambda i: 20 + i % 21, 3584)
    dataset.cache.pack(root/"packed")
    stats = dataset.get_cache_stats()
    each = {k: round(v["bytes"] / v["count"]) for k, v in stats.items() if isinstance(v, dict) and v.get("count") and k != "total"}
    out = dict(samples=n, steps=a.steps, bytes_of_an_entry=each, bytes_of_a_sample=round(stats["total"]["bytes"] / n), opens=opens(root))
    brief = {k: LOOPS[k] for k in ("no loader", "loose", "packed", "loose, a loader process", "loose, not ahead")}
    for name, step, loops in (("sleep", sleep_step, LOOPS), ("matmul", matmul_step(), brief), ("python", python_step(), brief)):
        out[name] = measure(root, step, loops, a)
    return out


def measure(root, step, loops, a):
    "The loops in turn, several times over, so that a busy neighbour meets all of them."
    runs = {name: [] for name in loops}
    for _, (name, (layer, how, size)) in itertools.product(range(a.runs), loops.items()):
        if "disk" in name: forget(root/layer)
        gc.collect()
        runs[name].append(loop(data_set(root, layer, 0.), how, size, step, a.steps))
    rows = {name: row_of(r) for name, r in runs.items()}
    each = {name: [median(whole) for _, whole in r] for name, r in runs.items()}
    for name, r in rows.items():
        r["wait_percent"] = round(100 * r["wait_ms"]["mean"] / rows["no loader"]["step_mean_ms"], 3)
        r["added_percent"] = spread([100 * (t / base - 1) for t, base in zip(each[name], each["no loader"])], 2) # of the same round
    return rows


COUNT = """
import collections, json, os, sys
opened, on = collections.Counter(), False
def hook(event, args):
    if on and event == "open" and isinstance(args[0], (str, bytes, os.PathLike)): opened[os.fsdecode(args[0])] += 1
sys.addaudithook(hook)
from qie_nb.data.dataset import loader
ready = loader(sys.argv[1], sys.argv[2], image_size=[64, 64], use_cache=True, caption_dropout_rate=0.)
out = []
for epoch in range(2):
    ready.batch_sampler.set_epoch(epoch)
    batches = iter(ready)
    opened.clear()
    on = True
    n = sum(b["cached"] for b in batches)
    on = False
    out.append(dict(samples=n, opens=sum(opened.values()), entries=sum(v for k, v in opened.items() if k.endswith(".safetensors"))))
print(json.dumps(out))
"""


def opens(root):
    "Files opened in two epochs of a process, by the interpreter's own account."
    out = {}
    for layer in ("loose", "packed"):
        got = subprocess.run([sys.executable, "-c", COUNT, str(root/"set"), str(root/layer)], capture_output=True, text=True, check=True)
        out[layer] = [e | dict(a_sample=round(e["opens"] / e["samples"], 3)) for e in json.loads(got.stdout.splitlines()[-1])]
    return out


# --- 3. bytes against the naive layout
def sizes(root, a):
    "A sample with one control: every prompt whole in one file, against the front once and the rests."
    from qie_nb.cache import image_parts, prefix_parts, prompt_parts
    from qie_nb.core.cache_entries import PREFIX, entry_bytes
    out, key, f = {}, "0" * 40, "2" * 64
    image, seen = image_parts(f, (1024, 1024), WHO), (["3" * 64], [(1024, 1024)], WHO)
    latents = 2 * entry_bytes("pixel_latent", key, image, "bfloat16", (16, 1, 128, 128))
    for name, whole in dict(v1=1420, plus=250).items():
        front, tokens = whole - 30, dict(prompt=30, empty=6)
        asked = {k: prompt_parts("make the sky a little darker" if k == "prompt" else "", *seen) for k in tokens}
        held = lambda k, n, prefix=None: entry_bytes("prompt_embed", key, asked[k], "bfloat16", (n, 3584), prefix)
        naive = {k: held(k, front + n) for k, n in tokens.items()}
        ours = {k: held(k, n, key) for k, n in tokens.items()}
        prefix = entry_bytes(PREFIX, key, prefix_parts(*seen), "bfloat16", (front, 3584))
        row = lambda n: dict(naive=latents + naive["prompt"] * n + naive["empty"], ours=latents + prefix + ours["prompt"] * n + ours["empty"])
        out[name] = dict(tokens=whole, front=front, latents=latents, prefix=prefix, rest=ours["prompt"], whole_prompt=naive["prompt"],
                         one_prompt_no_dropout=dict(naive=latents + naive["prompt"], ours=latents + prefix + ours["prompt"]),
                         one_prompt_and_empty=row(1), four_prompts_and_empty=row(4))
    return out


# --- 4. operations
def qwen_vl():
    "Qwen2.5-VL-7B with its published sizes, without weights."
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    text = dict(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18944,
                vocab_size=152064, rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]))
    vision = dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584)
    with torch.device("meta"): return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def vision_flops(v, patches):
    "Computed: the tower asks its input for sizes, which a meta tensor does not know. `v` is its configuration."
    d, window, m = v.hidden_size, (v.window_size // v.patch_size) ** 2, v.spatial_merge_size ** 2
    linear = v.depth * (4 * d * d + 3 * d * v.intermediate_size)
    attention = 2 * d * (len(v.fullatt_block_indexes) * patches + (v.depth - len(v.fullatt_block_indexes)) * min(window, patches))
    embed, merge = v.in_channels * v.temporal_patch_size * v.patch_size ** 2 * d, m * d * (m * d + v.out_hidden_size) / m
    return int(2 * patches * (linear + attention + embed + merge))


def operations(root, a):
    import torch
    from diffusers import AutoencoderKLQwenImage
    from precompute import text_flops, vae_flops
    with torch.device("meta"): vae = AutoencoderKLQwenImage()
    plain, flat = (vae_flops(vae, use_2d=f) for f in (False, True))
    out = dict(vae_1024=dict(plain=plain, flat=flat, ratio={k: round(plain[k] / flat[k], 3) for k in plain}), note="two operations for a "
               "multiplication with its addition; attention counted as a full square; the vision tower computed, the rest counted on the meta device")
    model = qwen_vl()
    for name, whole, patches in (("v1", 1420, 4 * 36 * 37), ("plus", 250, 4 * 14 * 14)): # the prompt and the empty one on one image
        front, vision = whole - 30, vision_flops(model.config.vision_config, patches)
        apart = 2 * vision + text_flops(model, whole, head=True) + text_flops(model, front + 6, head=True)
        shared = vision + text_flops(model, front) + text_flops(model, 30, front) + text_flops(model, 6, front)
        out[f"text_encoder_{name}"] = dict(tokens=whole, front=front, patches=patches, vision_once=vision, ratio=round(apart / shared, 3),
                                           two_whole_passes=apart, prefix_and_two_suffixes=shared)
    return out


# --- all of it
def about():
    import torch
    cpu = next((r.split(":")[1].strip() for r in Path("/proc/cpuinfo").read_text().splitlines() if r.startswith("model name")), platform.processor())
    return dict(device=f"{cpu}, {os.cpu_count()} cores", accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                versions=dict(python=platform.python_version()) | {p: version(p) for p in ("torch", "diffusers", "transformers", "safetensors")})


PARTS = dict(status=status, loader=loader_costs, bytes=sizes, operations=operations)


def table(r):
    if s := r.get("status"):
        print(f"\nlooking through {s['samples']} samples, {s['entries']} entries; seconds, median (range)")
        cell = lambda v: f"{v['median']:.2f} ({v['min']:.2f}-{v['max']:.2f})"
        print(f"  {'':14}{'construct':>20}{'first status()':>20}{'both':>20}{'status() again':>20}")
        for k, v in s["seconds"].items(): print(f"  {k:14}" + "".join(f"{cell(v[w]):>20}" for w in ("construct", "first", "both", "again")))
    if s := r.get("loader"):
        print(f"\nloader, {s['bytes_of_a_sample']/1e6:.2f} MB a sample; {s['steps']} steps a run; waits and steps in ms")
        counted = (f"{k} {v[0]['a_sample']}, {v[1]['a_sample']}" for k, v in s["opens"].items())
        print("  files opened a sample, first and second epoch: " + "; ".join(counted))
        for kind in ("sleep", "matmul", "python"):
            print(f"  {kind} step{'':19}{'wait mean':>10}{'median':>8}{'p99':>8}{'wait %':>8}{'step':>9}{'range':>16}{'added %':>9}")
            for k, v in s[kind].items():
                w, t = v["wait_ms"], v["step_ms"]
                print(f"    {k:24}{w['mean']:>10.3f}{w['median']:>8.3f}{w['p99']:>8.3f}{v['wait_percent']:>8.3f}{t['median']:>9.2f}"
                      f"{t['min']:>8.2f}-{t['max']:.2f}{v['added_percent']['median']:>9.2f}")
    if s := r.get("bytes"):
        print("\nMB a sample, naive and ours")
        for k, v in s.items():
            kinds = "one_prompt_no_dropout", "one_prompt_and_empty", "four_prompts_and_empty"
            print(f"  {k} ({v['tokens']} tokens): "
                  + "; ".join(f"{n.replace('_', ' ')} {v[n]['naive']/1e6:.2f}, {v[n]['ours']/1e6:.2f}" for n in kinds))
    if s := r.get("operations"):
        v = s["vae_1024"]
        print(f"\n10^12 operations\n  VAE 1024x1024 encode: plain {v['plain']['encode']/1e12:.2f}, flat {v['flat']['encode']/1e12:.2f}, "
              f"{v['ratio']['encode']} times fewer")
        for k in ("v1", "plus"):
            t = s[f"text_encoder_{k}"]
            print(f"  text encoder, {k}, {t['tokens']} tokens, prompt and empty prompt: whole with lm_head {t['two_whole_passes']/1e12:.2f}, "
                  f"shared without {t['prefix_and_two_suffixes']/1e12:.2f}, {t['ratio']} times fewer")


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; default all")
    p.add_argument("--samples", type=int, default=5000)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--out", type=Path, default=OUT)
    a = p.parse_args()
    if wrong := set(a.parts) - PARTS.keys(): p.error(f"unknown part {', '.join(wrong)}")
    result = json.loads(a.out.read_text()) if a.out.is_file() else {}
    for name in a.parts or PARTS:
        root = Path(tempfile.mkdtemp())
        os.environ["QIE_NB_HOME"] = str(root/"home") # nothing is remembered in the user's own folder
        load = os.getloadavg()[0]
        try: took, got = seconds(lambda: PARTS[name](root, a))
        finally: shutil.rmtree(root)
        when = dict(date=datetime.now(timezone.utc).isoformat(timespec="seconds"), seconds_taken=round(took, 1),
                    load_average=[round(load, 2), round(os.getloadavg()[0], 2)])
        result[name] = about() | when | got if name != "bytes" else got
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(result, indent=1) + "\n")
    table(result)


if __name__ == "__main__": main()
