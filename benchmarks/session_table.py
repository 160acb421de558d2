"""Fifty pairs at 512 x 512 on a place's free machine, on paper: `python benchmarks/session_table.py` prints the tables of docs/kaggle.md, docs/colab.md and docs/recipes.md, `--write` puts them there."""
import argparse, json, re, sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from table import markdown

DOCS = HERE.parent/"docs"
PAIRS, SIDE = 50, 512
AREAS = (512, 1024)                                        # sides of the control images
PRODUCTS = dict(float32=dict(mixed_precision="no"), float16={})
PHASES = ("download", "quantize", "precompute", "train", "save")


@lru_cache(None)
def case(place, side, products, weights="hub", quantize=None):
    from qie_nb.planning.path import whole_path
    config = dict(data=dict(control_area=side * side), train=PRODUCTS[products])
    return whole_path("2511", place, PAIRS, None, SIDE, config, quantize, weights, fp16=products == "float16")


def cases(place): return [(side, products) for side in AREAS for products in PRODUCTS]
def hours(minutes): return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
def gb(n): return f"{n / 1e9:.1f}"


def times(place):
    rows = []
    for side, products in cases(place):
        w = case(place, side, products)
        d = w.data()
        rows.append([f"{side} x {side}", products, d["way"], *(hours(p["minutes"]) for p in d["phases"]), f"{d['hours']} h", d["sessions"]])
    return markdown(["control images", "products in", "way", *PHASES[:3], f"{w.task.steps} steps", "save", "together", f"sessions of {w.limits.hours:g} h"], rows)


def peaks(place):
    rows = []
    for side, products in cases(place):
        w, at = case(place, side, products), lambda what, w: f"{gb(w.peak(what)[0])} ({w.peak(what)[1]})"
        if products == "float16": rows.append([f"{side} x {side}", *(at(k, w) for k in ("output", "host", "gpu"))])
    l, free = w.limits, gb(0.93 * w.task.card.bytes)
    return markdown(["control images", f"disk kept, of {gb(l.output)} GB", f"host, of {gb(l.host)} GB", f"fullest GPU, of {free} GB"], rows)


def disk(place):
    from qie_nb.planning.path import WEIGHTS
    said = dict(hub="downloaded whole", shards="downloaded file by file, each let go when it is quantized (nf4)", attached="the model attached as an input", prequantized="a copy in nf4 attached, with its table and encoders")
    rows = [[n, said[n], gb((w := case(place, 512, "float16", n, None if n in ("hub", "attached") else "nf4")).peak("scratch")[0]), gb(w.peak("output")[0])] for n in WEIGHTS]
    return markdown(["weights", "", "GB of disk, not kept", "GB of disk, kept"], rows)


def verdicts(place):
    "What fits and what does not, in sentences."
    from qie_nb.planning.path import kept_bytes, largest, table_bytes
    out, w0 = [], case(place, 512, "float16")
    name, size = largest(w0.task.files)
    out.append(f"- The largest file is `{name}` with {size / 1e9:.2f} GB (computed from the tensors by the rule that cut the files).")
    for side, products in cases(place):
        w = case(place, side, products)
        bad = [f"{n} ({need} of {given})" for n, need, given, fits, _ in w.checks() if fits is False and not n.startswith("a prequantized")]
        out.append(f"- Controls at {side} x {side}, products in {products}: " + (f"does not fit: {'; '.join(bad)}" if bad else "fits") + f"; {w.hours:.1f} h.")
    j = replace(w0.task.job, kind="nf4")
    room, sizes = w0.limits.output, [(kind, e, kept_bytes(replace(j, kind=kind), e)) for kind, e in (("nf4", True), ("qint8", True), ("qint8", False))]
    for kind, encoders, size in sizes:
        out.append(f"- A prequantized copy in {kind} with its table, {'the text encoder in nf4 and the VAE' if encoders else 'without the encoders'}, is {gb(size)} GB: it {'fits' if size <= room else 'does not fit'} into {gb(room)} GB.")
    out.append(f"- The modulation table is {gb(table_bytes(replace(j, wide=2)))} GB in such a copy (bfloat16, as the checkpoint) and {gb(table_bytes(j))} GB where precompute makes it on this machine (float32).")
    return "\n".join(out)


def rates(place):
    w = case(place, 512, "float32")
    used = {r for side, p in cases(place) for ph in case(place, side, p).phases for *_, r in ph.work}
    return markdown(["rate", "a second", "where it comes from"], [[n, f"{v:.3g}", why] for n, (v, why) in w.rates.items() if n in used])


def tables(place):
    return "\n\n".join([times(place), f"Computed, not measured: {PAIRS} pairs at {SIDE} x {SIDE}, model 2511, rank 16 on attention, batch 1, no evaluation, weights downloaded whole.", "At most, in GB, with products in float16:",
                        peaks(place), "What the weights take on the disk:", disk(place), "What fits, and what does not:", verdicts(place), "The rates:", rates(place)])


def recipe_times():
    "Training alone for the recipes' pairs and steps."
    from qie_nb.planning.path import steps_for, whole_path
    rows = []
    for pairs in (20, 50, 200):
        at = {}
        for products, train in PRODUCTS.items():
            w = whole_path("2511", "kaggle", pairs, None, SIDE, dict(data=dict(control_area=SIDE * SIDE), train=train), fp16=products == "float16")
            at[products] = hours(next(p.seconds(w.rates) for p in w.phases if p.name == "train") / 60)
        rows.append([pairs, steps_for(pairs), at["float32"], at["float16"]])
    return markdown(["pairs", "steps", "products in float32", "products in float16"], rows)


def held_out():
    "What the runs on the embedded model came to: the model alone, then each run's best and last checkpoint."
    results = json.loads((HERE/"results"/"held_out.json").read_text())
    names = dict(good="48 pairs, rank 16, rate 5e-3", slow="48 pairs, rank 8, rate 1e-3", overfitted="2 pairs, rank 64, rate 1e-2", too_high="48 pairs, rank 16, rate 5e-2")
    assert all(f"rank {r['r']}" in names[n] and f"{r['pairs']} pairs" in names[n] and r["lr"] == float(names[n].split("rate ")[1]) for n, r in results["runs"].items())
    rows = []
    for edit, r in results["results"].items():
        of = lambda run: sorted((x for x in r["rows"] if x["run"] == run), key=lambda x: x["step"])
        cell = lambda run: f"{(best := min(of(run), key=lambda x: x['pixel_error']))['pixel_error']:.1f} (step {best['step']}), {of(run)[-1]['pixel_error']:.1f} (step {of(run)[-1]['step']})"
        rows.append([edit, f"{of('base')[0]['pixel_error']:.1f}", *(cell(run) for run in names)])
    return markdown(["edit", "model alone", *(f"{n}: best, last" for n in names.values())], rows)


PARTS = {("kaggle", "north star: made by benchmarks/session_table.py for kaggle"): lambda: tables("kaggle"), ("colab", "north star: made by benchmarks/session_table.py for colab"): lambda: tables("colab"),
         ("recipes", "recipes: made by benchmarks/session_table.py"): recipe_times, ("recipes", "held out: made by benchmarks/session_table.py from benchmarks/results/held_out.json"): held_out}

def filled(file, name, text): # the page with this part as the script makes it
    start, end = f"<!-- {name} -->\n", "<!-- end -->"
    page = (DOCS/f"{file}.md").read_text()
    assert page.count(start) == 1, f"docs/{file}.md has no place for {name!r}"
    return re.sub(re.escape(start) + ".*?" + re.escape(end), lambda m: f"{start}{text}\n{end}", page, flags=re.S)


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--write", action="store_true")
    write = p.parse_args().write
    for (file, name), make in PARTS.items():
        if write: (DOCS/f"{file}.md").write_text(filled(file, name, make()))
        else: print(make(), "\n")
