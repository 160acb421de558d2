"""Makes tables of docs/speed.md, docs/lightning.md and docs/measured/ from benchmarks/results/*.json and the planner.

`python benchmarks/table.py` prints them. `--write` puts them into the pages, and the table of
GPUs into README, too."""
import argparse, json, re
from pathlib import Path
from statistics import mean, median, stdev

HERE = Path(__file__).parent
DOCS = HERE.parent/"docs"
README = HERE.parent/"README.md"


def markdown(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(c) for c in r) + " |" for r in lines)


def held(name): return json.loads(p.read_text()) if (p := HERE/"results"/f"{name}.json").is_file() else {}


def about(r):
    load = r.get("load_average")
    busy = f"; load average {load[0] if isinstance(load, list) else load:.1f}" if load is not None else ""
    return f"{r['device']}{busy}; torch {r['versions']['torch']}, diffusers {r['versions']['diffusers']}"


def of(s, unit="", digits=2): return f"{s['median']:.{digits}f}{unit} ({s['min']:.{digits}f} to {s['max']:.{digits}f})"


WAYS = {"adapters in float32, as peft has them": "adapters in float32", "the same on the table": "adapters in bfloat16, modulation table", "selective": "selective checkpointing", "blocks recomputed": "checkpointing"}

def step_table(r):
    "What a step does beyond the bare loop."
    if "counts" not in r: return "not yet measured: `make bench-cpu`"
    c, get = r["counts"], lambda **kw: [x for x in r["counts"]["rows"] if all(x[k] == v for k, v in kw.items())]
    over = lambda **kw: ", ".join(str(n) for n in sorted({x["over"] for x in get(**kw)}))
    depth = " / ".join(str(x["blocks"]) for x in get(batch=1, table=True))
    rows = [["operations beyond the bare loop, batch 1 and 2, " + depth + " blocks", f"{over(batch=1, table=True)} and {over(batch=2, table=True)}, at every depth"],
            ["operations in the bare loop", " / ".join(str(x["bare"]) for x in get(batch=1, table=True)) + " aten calls of forward pass, backward pass and optimizer"],
            ["modules traversed, encoder calls, schedulers created", f"{max(x['modules_walked'] for x in c['rows'])}, {max(x['built'].get('encoder calls', 0) for x in c['rows'])}, "
             f"{max(x['built'].get('schedulers made', 0) for x in c['rows'])}"]]
    for name, d in c["elsewhere"].items():
        said = lambda w: ", ".join(f"{n} x {k}" for k, n in w.items()) or "nothing"
        rows.append([f"waits for the device, {name}", f"{said(d['unlogged'])}; when a row is logged: {said(d['logged'])}"])
    if k := r.get("kept"):
        for x in k["rows"]: rows.append([f"saved for the backward pass, bfloat16, {WAYS.get(x['way'], x['way'])}", f"{x['bytes'] / 1e6:.2f} MB (planned {x['planned'] / 1e6:.2f})"])
        rows.append([f"compiled graphs after two steps, and after {k['codes']['steps'] - 2} more with {k['codes']['sizes']} sizes and {k['codes']['prompts']} prompt lengths", f"{k['codes']['after_two_steps']}, {k['codes']['later']}"])
    times = r.get("times", {})
    paired = [t for t in times.values() if isinstance(t, dict) and "trainer_over_bare" in t]
    for t in paired:
        rows.append([f"processor time relative to the bare loop, {t['blocks']} blocks of {t['width']}, {t['tokens']} tokens", of(t["trainer_over_bare"])])
        rows.append([f"processor time with the modulation table relative to without, {t['blocks']} blocks of {t['width']}", of(t["table_over_layers"])])
    timed = f" Processor time: {about(times)}; median and range of {paired[0]['trainer_over_bare']['runs']} paired rounds." if paired else ""
    return markdown(["a training step", "figure"], rows) + f"\n\nCounts: {about(c)}.{timed}"


def precompute_table(r):
    "Operations and time to encode a sample, relative to encoding each image and prompt separately."
    if "operations" not in r: return "not yet measured: `make bench-cpu`"
    tf = lambda n: f"{n / 1e12:.1f}"
    rows = [[f"10\u00b9\u00b2 operations per sample at 1024 x 1024, one control, {o['variant']}", tf(o["total"]["naive"]), tf(o["total"]["ours"]), f"{o['ratio']:.2f}"] for o in r["operations"]]
    for where, name in (("cpu", "the tiny model"), ("gpu", f"full size, random weights, {r.get('gpu', {}).get('about', {}).get('accelerator')}")):
        for m in [r[where]] if where in r else []:
            s = m["samples_a_second"]
            rows.append([f"samples per second, {name}, {m['variant']}, {m['side']} x {m['side']}, batches of {m['batch_size']}", of(s["naive"]), of(s["precompute"]), of(m["of_naive"])])
            rows.append(["the same, relative to only the encoders, called as precompute calls them", of(s["bare"]), of(s["precompute"]), of(m["of_bare"])])
    rows += patch_rows(r)
    measured = f"{about(r['cpu']['about']) if 'cpu' in r else ''}."
    for patches in r.get("patches", {}).values():
        runs = patches["rows"]["float32"]["product_ms"]["runs"]
        here = patches["about"]
        measured += " Patch embedding, as a 3-D convolution and as a product: "
        measured += f"{runs} runs of each in turn, threads: {here['threads']}; {about(here)}."
    made = markdown(["precompute", "naive", "qie_nb", "ratio"], rows)
    return f"{made}\n\nOperations are counted at the real sizes without weights. {measured}"


def patch_rows(r):
    "The patches of an image, as a 3-D convolution and as a product."
    rows = []
    for measured in r.get("patches", {}).values():
        where = measured["about"]["accelerator"] or measured["about"]["device"]
        for dtype, row in measured["rows"].items():
            what = f"patch embedding of an image of 384 x 384, {dtype}, {where}"
            # as for the other rows: what it takes, relative to the naive way
            ratio = 1 / row["times_as_fast"]["median"]
            rows.append([what, of(row["convolution_ms"], " ms"), of(row["product_ms"], " ms"), f"{ratio:.2f}"])
    return rows


GPUS = [("T4", 512), ("T4", 1024), ("2xT4", 512), ("2xT4", 1024), ("RTX 4090", 512), ("RTX 4090", 1024), ("A100-40", 1024), ("H100", 1024)]

def cards_table():
    "What the planner chooses."
    from qie_nb.planning.cards import plan, strategy_name
    rows = []
    for gpu, side in GPUS:
        p = plan("2511", gpu, side, config=dict(data=dict(control_area=side * side)))
        m = p.chosen
        rows.append([gpu.replace("2x", "2 x "), f"{side} x {side}"] + ([strategy_name(m.query), f"{m.total / 1e9:.1f}", f"{m.host / 1e9:.1f}" if m.host else ""] if m else ["nothing fits", "", ""]))
    return markdown(["GPU", "target and control", "strategy", "GB", "GB on the host"], rows) + "\n\nLoRA of rank 16 on attention, batch 1. Computed, not measured."


def short_table():
    "README's table of four GPUs."
    from qie_nb.planning.cards import card_table
    return card_table()


def with_table(text:str, table:str) -> str:
    "A page whose table that begins with `| GPU |` is this one. Raises SystemExit if it has none, or two."
    new, n = re.subn(r"(?:^\| GPU \|.*\n)(?:^\|.*\n)+", lambda m: table + "\n", text, flags=re.M)
    if n != 1:
        raise SystemExit(f"README.md needs one table that begins with `| GPU |`, it has {n}")
    return new

def modes_table(r):
    "Uncached, lazy, precomputed."
    out = []
    for name, m in r.items():
        rows = [[k, "failed", "", "", "", ""] if "failed" in v else
                [k, f"{v['precompute_s']:.1f} s" if "precompute_s" in v else "", f"{v['first_epoch_step_s']:.3f} s", f"{v['later_step_s']:.3f} s",
                 f"{v['peak_MB']:.0f} MB" + (f" (precompute {v['precompute_peak_MB']:.0f})" if "precompute_s" in v else ""), f"{v['cache_bytes'] / 1e6:.2f} MB"] for k, v in m["rows"].items()]
        out.append(markdown(["cache", "precompute", "a step, first epoch", "a step, later", "peak memory in training", "cache size"], rows) + f"\n\n{m['pairs']} pairs, {about(m)}.")
    return "\n\n".join(out) or "not yet measured: `make bench-modes`"


NAMES = {"none": "plain, bfloat16"} # of kinds in the table

def layer_rows(measured):
    "Error of the embeddings by kind, in percent of a token's length."
    rows = []
    for weights, kinds in measured["rows"].items():
        for kind, errors in kinds.items():
            cells = [of(errors[what], " %", 1) for what in ("median", "p90", "max")]
            rows.append([NAMES.get(kind, kind), weights, *cells])
    return markdown(["text encoder", "random weights", "median token", "90th percentile", "worst token"], rows)


def run_rows(measured):
    "Held-out error of runs on the learnt tiny model, by the kind of the cache."
    raw = measured["raw"]
    plain = raw["none"]
    rows = [["plain", f"{of(measured['rows']['none']['own'])} grey levels", ""]]
    for kind, of_seeds in raw.items():
        if kind == "none":
            continue
        cells = []
        for who in ("own", "plain"):
            more = [errors[who] - plain[seed]["own"] for seed, errors in of_seeds.items() if seed in plain]
            cells.append(f"{median(more):+.2f} ({min(more):+.2f} to {max(more):+.2f})")
        rows.append([kind, *cells])
    head = ["text encoder of the cache", "edits with the same text encoder", "edits with a plain text encoder"]
    return markdown(head, rows)


def text_encoder_table(r):
    "Precision of quantized text encoders."
    parts = []
    if "layers" in r:
        here = r["layers"]["about"]
        seeds = r["layers"]["rows"]["normal"]["none"]["median"]["runs"]
        parts.append(layer_rows(r["layers"]))
        parts.append(
            "Error of a token's embedding relative to float32, in two language and two vision layers of the published "
            f"width: median and range of {seeds} seeds. With outliers, one weight of a thousand and four features of "
            f"each layer's input are 16 times as large. The published model has 28 and 32 layers. {about(here)}.")
    if "held_out" in r:
        here = r["held_out"]["about"]
        runs = r["held_out"]["rows"]["none"]["own"]["runs"]
        parts.append(run_rows(r["held_out"]))
        parts.append(
            f"Held-out error of the learnt tiny model after {here['steps']} steps in grey levels, median and range of "
            f"{runs} seeds; of the quantized ones, the difference from the plain run of the same seed. All pairs have "
            f"one instruction, so this run hardly depends on the text. {about(here)}.")
    return "\n\n".join(parts) or "not yet measured: `python benchmarks/text_encoder_precision.py`"


def gpu_table(r):
    if not r or r.get("tiny"): return "Not yet measured. `make bench-gpu` measures the installed GPU: its limits, the bare diffusers + peft loop, and each mode."
    cell = lambda v, k, digits=3: "" if v.get(k) is None else f"{v[k]:.{digits}f}"
    rows = []
    for part in ("bare", "ours", "small", "infer"):
        for name, v in r.get(part, {}).items():
            if "step_s" not in v: rows.append([part, name, v.get("failed", "")[:80], "", "", "", "", ""]); continue
            rows.append([part, name, of(v["step_s"], digits=3), cell(v, "TFs", 0), cell(v, "over_floor"), cell(v, "times_as_fast_as_bare", 2), cell(v, "peak_allocated_GB", 1), cell(v, "planned_GB", 1)])
    heads = ["part", "mode", "s per step", "TF/s", "relative to the limit", "speed relative to bare", "peak GB", "planned GB"]
    shown = [i for i in range(len(heads)) if any(row[i] for row in rows)] # a part that was not measured leaves a column empty
    return markdown([heads[i] for i in shown], [[row[i] for i in shown] for row in rows]) + f"\n\n{about(r)}; random normal weights of full size, {r['date'][:10]}."


def rehearsal_table(r):
    import rehearsal
    return f"{rehearsal.text(r)}\n\n{about(r)}, {r['date']}." if r else "Not yet run to its end."


def of_results(make, name):
    "A table of a results file."
    return lambda: make(held(name))


def planted_text(
    rows:list, # of {period, height, found, of}
) -> str:
    "Grid lines that were planted in photographs, and how many were found."
    images = rows[0]["of"]
    grid = [row for row in rows if row["period"] == 16]
    others = [row for row in rows if row["period"] != 16]
    periods = ", ".join(str(period) for period in dict.fromkeys(row["period"] for row in others))
    heights = ", ".join(str(row["height"]) for row in grid)
    counts = ", ".join(str(row["found"]) for row in grid)
    found = f"{heights} grey levels: in {counts} of {images}"
    wrong = sum(row["found"] for row in others)
    return (f"Planted lines found, {found} photographs; periods {periods}: "
            f"{wrong} of {images * len(others)}.")


def lightning_table(r):
    "A LoRA with and without a stand-in for Lightning."
    if not r:
        return "Not yet measured: `python benchmarks/with_lightning.py`."
    runs = [run["rows"] for run in r["seeds"].values()]

    def cell(title, name, digits=1, factor=1):
        values = [factor * run[title][name] for run in runs]
        return f"{mean(values):.{digits}f}±{stdev(values):.{digits}f}"
    rows = []
    for title, first in runs[0].items():
        if first["strength"] == 0.8:
            continue # between the others
        rows.append([first["steps"], f"{first['strength']:g}", f"{first['few_steps_strength']:g}",
                     cell(title, "error"), cell(title, "colour"), cell(title, "effect", 0, 100),
                     cell(title, "grid")])
    head = ["steps", "LoRA", "Lightning", "error", "colour", "effect, %", "grid"]
    return (f"{markdown(head, rows)}\n\n{len(runs)} seeds, {r['held_out']} photographs, grey levels. "
            f"{planted_text(r['planted'])} CPU, torch {r['torch']}.")


TABLES = { # {(page in docs/, mark): what makes the table}
    ("speed", "short"): short_table,
    ("measured/speed", "cards"): cards_table,
    ("measured/speed", "precompute"): of_results(precompute_table, "precompute"),
    ("measured/speed", "step"): of_results(step_table, "step_cpu"),
    ("measured/speed", "modes"): of_results(modes_table, "modes"),
    ("measured/text_encoder", "text_encoder"):
        of_results(text_encoder_table, "text_encoder_precision"),
    ("measured/speed", "gpu"): of_results(gpu_table, "step_gpu"),
    ("measured/rehearsal", "rehearsal"): of_results(rehearsal_table, "rehearsal"),
    ("lightning", "lightning"): of_results(lightning_table, "with_lightning")}


def filled(page:str, mark:str, table:str) -> str:
    "A page with one of its tables replaced. Raises SystemExit if it has not that mark once."
    pattern = f"(<!-- {mark}: .*? -->\n).*?(\n<!-- end -->)"
    old = (DOCS/f"{page}.md").read_text()
    text, n = re.subn(pattern, lambda m: m[1] + table + m[2], old, flags=re.S)
    if n != 1:
        raise SystemExit(f"docs/{page}.md needs the mark of the table {mark} once, it has {n}")
    return text


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--write", action="store_true")
    a = p.parse_args()
    for (page, mark), make in TABLES.items():
        made = make()
        if a.write:
            (DOCS/f"{page}.md").write_text(filled(page, mark, made))
        else:
            print(f"{mark}\n\n{made}\n")
    if a.write:
        README.write_text(with_table(README.read_text(), short_table()))


if __name__ == "__main__": main()
