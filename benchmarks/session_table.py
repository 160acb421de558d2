"""Estimates time, disk and GPU memory of a run on Kaggle's and Colab's free machines, for the tables of docs/.

`python benchmarks/session_table.py` prints the tables and `--write` puts them into the pages. Nothing here is measured:
memory and disk come from the planner, work from counted operations, and time from the rates assumed below."""
import argparse, json, math, re, statistics, sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from anchors import anchor_table
from table import markdown
from qie_nb.core.display import duration

DOCS = HERE.parent/"docs"
PAIRS, SIDE, SAMPLING_STEPS = 50, 512, 20
AREAS = (512, 1024)                                                # sides of the control images
PRODUCTS = dict(float32=dict(mixed_precision="no"), float16={})    # `train` settings: dtype of the matrix products
LARGEST = ("transformer/diffusion_pytorch_model-00002-of-00005.safetensors", 9.99e9) # file of the 2511 checkpoint, bytes
ENCODING = dict(vae=2.85e12, token=13.3e9, patch=1.31e9)           # operations a megapixel, text token, vision patch: benchmarks/precompute.py
TEMPLATE_TOKENS = 86                                               # of both prompts, encoded and not stored


@dataclass(frozen=True)
class Site:
    gpu: str
    output: float  # bytes of disk that are kept
    hours: float   # of a session
    cores: int

SITES = dict(kaggle=Site("2xT4", 20e9, 9, 4), colab=Site("T4", 15e9, 12, 2))


def rates(site): # {name: (amount a second, source)}
    return dict(download=(40e6, "bytes, one connection to the hub: assumed"), read=(100e6, "bytes from a mounted data set: assumed"),
                write=(100e6, "bytes: assumed"), cpu=(25e9 * site.cores, f"operations of {site.cores} slow cores in float32: assumed"),
                **gpu_rates(site.gpu))


def gpu_rates(gpu): # {name: (amount a second, source)}
    "The planner's own rates of a GPU."
    from qie_nb.core.presets import KNOWN_GPUS
    from qie_nb.planning.cards import parse_gpu
    from qie_nb.planning.step_work import ATTENTION, BANDWIDTH, bytes_rate, product_rate
    known = KNOWN_GPUS[parse_gpu(gpu).name]
    float32, float16 = (product_rate(known, dtype) * 1e12 for dtype in ("float32", "float16"))
    return dict(
        float32=(float32, "operations of linear layers, half of the data sheet: assumed"),
        float16=(float16, f"operations of linear layers, attention at {ATTENTION:.0%} of it. {known.reached.source}"),
        memory=(bytes_rate(known), f"bytes of GPU memory, {BANDWIDTH:.0%} of the data sheet: assumed"))


def samples_for(pairs): # musubi-tuner's 16 passes, at least diffusers' 500 steps
    from qie_nb.core.presets import first_run
    return first_run(pairs).samples

def encoding_work(q): # operations a pair: (VAE, text encoder)
    vae = ENCODING["vae"] * (q.target + q.control) * 256 / 2**20
    return vae, ENCODING["token"] * (q.text + TEMPLATE_TOKENS) + ENCODING["patch"] * 4 * (q.text - 62)

def forward_work(q): # operations of one forward pass: what recomputing everything adds to a step
    from qie_nb.planning.cards import step_work
    return 1e12 * (step_work(replace(q, checkpointing=True)) - step_work(replace(q, checkpointing=False)))

def forward_seconds(q, gpu):
    "Seconds of one forward pass: what recomputing everything adds to a step."
    from qie_nb.planning.cards import step_seconds
    with_it, without = (step_seconds(replace(q, checkpointing=how), gpu) for how in (True, False))
    return with_it - without

def loads(q):
    "How often a run reads and quantizes the model: each process, and the notebook for the pictures before and after."
    return q.processes + (q.processes > 1)

def copy_bytes(q): # a prequantized transformer without its modulation layers
    from qie_nb.planning.memory import block_bytes, other_bytes
    stored = replace(q, base_bytes=2, table=True)
    return q.layers * block_bytes(stored) + other_bytes(stored)


@lru_cache(None)
def case(where, side, products, pairs=PAIRS):
    "(plan, disk plan, {phase: seconds}) of one run."
    from qie_nb.config import make_config
    from qie_nb.core.environment import Environment
    from qie_nb.planning.disk_space import disk_plan, table_bytes
    from qie_nb.planning.cards import plan, speedup
    from qie_nb.planning.parts import PUBLISHED
    from qie_nb.planning.cards import step_seconds
    site, samples = SITES[where], samples_for(pairs)
    config = dict(model=dict(pretrained_model_name_or_path="Qwen/Qwen-Image-Edit-2511"), data=dict(image_size=[SIDE, SIDE], control_area=side * side),
                  train=PRODUCTS[products] | dict(output_dir="/nowhere"), cache=dict(cache_dir="/nowhere/cache"), logging=dict(log_dir="/nowhere/runs"))
    p = plan(config, site.gpu)
    disk = disk_plan(config, Environment(where, working=Path("/nowhere"), env=dict(HOME="/nowhere")), pairs, base_bytes=4)
    q, rate, whole = p.shown.query, {n: v for n, (v, _) in rates(site).items()}, PUBLISHED["transformer"]
    table, (vae, text) = table_bytes(make_config(config), q), encoding_work(q)
    vae_rate = rate["cpu" if p.changes.get("cache", {}).get("vae_encoder_device") == "cpu" else "float32"]
    precompute = ((PUBLISHED["text_encoder"] + PUBLISHED["vae"] + whole / 3) / rate["read"] + disk.bytes("cache") / rate["write"]
                  + pairs * (vae / vae_rate + text / rate["float32"]) + table * q.dim / rate["cpu"]) # 2 bytes a number
    train = samples * step_seconds(q, p.gpu.name) / speedup(q.processes)
    passes = 2 * 2 * SAMPLING_STEPS # one edit before and one after, each with guidance
    edits = passes * forward_seconds(q, p.gpu.name)
    phases = dict(download=sum(PUBLISHED.values()) / rate["download"], quantize=loads(q) * whole / rate["read"],
                  precompute=precompute, train=train, save=edits)
    return p, disk, phases


def cases(where): return [(side, products, *case(where, side, products)) for side in AREAS for products in PRODUCTS]
def gb(n): return f"{n / 1e9:.1f}"

def sessions(phases, hours): # download and quantization again in each one; a quarter of an hour of each is lost
    again, total = (phases["download"] + phases["quantize"]) / 3600, sum(phases.values()) / 3600
    return 1 if total <= hours else math.ceil((total - again) / (hours - again - 0.25))


def times(where):
    "Phases, memory and kept disk of each case."
    hours, rows = SITES[where].hours, []
    for side, products, p, disk, phases in cases(where):
        kept = sum(disk.bytes(group) for group in ("cache", "checkpoints", "logs"))
        together = sum(phases.values())
        rows.append([
            f"{side} x {side}", products, *map(duration, phases.values()), duration(together),
            sessions(phases, hours), gb(p.shown.total), gb(kept),
        ])
    head = ["control images", "precision", "download", "quantize", "precompute",
            f"{samples_for(PAIRS)} samples", "before and after", "total",
            f"sessions of {hours:g} h", "GB on a GPU", "GB of kept disk"]
    return markdown(head, rows)


def session_times(where):
    "The phases of what a notebook does, for the place's own page."
    columns = {side: case(where, side, "float16")[2] for side in AREAS}
    names = dict(
        download="download the model",
        quantize="read and quantize it",
        precompute="precompute",
        train=f"train on {samples_for(PAIRS)} samples",
        save="edits before and after",
    )
    rows = []
    for key, name in names.items():
        rows.append([name, *(duration(phases[key]) for phases in columns.values())])
    rows.append(["together", *(duration(sum(phases.values())) for phases in columns.values())])
    head = [f"{PAIRS} pairs at {SIDE} x {SIDE}"]
    head += [f"before images of {side} x {side}" for side in AREAS]
    return markdown(head, rows)


def verdicts(where):
    from qie_nb.planning.disk_space import table_bytes
    from qie_nb.planning.parts import PUBLISHED
    from qie_nb.planning.disk_space import TEXT_4BIT
    from qie_nb.config import make_config
    site, out = SITES[where], []
    q = case(where, AREAS[0], "float32")[0].shown.query
    table = table_bytes(make_config(None), q)
    sizes = []
    for kind, encoders in (("nf4", True), ("qint8", True), ("qint8", False)):
        size = copy_bytes(replace(q, quantization=kind)) + table
        what = "no encoders"
        if encoders:
            size += sum(TEXT_4BIT) + PUBLISHED["vae"]
            what = "the text encoder in nf4 and the VAE"
        fits = "fits" if size <= site.output else "does not fit"
        sizes.append(size)
        copy = f"A prequantized {kind} copy with its modulation table ({gb(table)} GB) and {what}"
        out.append(f"- {copy} is {gb(size)} GB: it {fits} into {gb(site.output)} GB.")
    if min(sizes) > site.output:
        return f"- No prequantized copy fits into {gb(site.output)} GB; the smallest has {gb(min(sizes))} GB."
    return "\n".join(out)


def tables(where):
    "What a place needs, with the limits that it has."
    gpu, site = case(where, AREAS[0], "float32")[0].gpu, SITES[where]
    usable = 0.93 * gpu.bytes
    about = (f"{PAIRS} pairs at {SIDE} x {SIDE}, model 2511, rank 16 on attention, batch 1, "
             "no evaluation, the model downloaded whole. "
             f"A GPU has {gb(gpu.bytes)} GB, {gb(usable)} of them usable; "
             f"{gb(site.output)} GB of disk are kept.")
    return "\n\n".join([times(where), about, verdicts(where)])


def rate_table():
    "The rates that are assumed, once for both places."
    from qie_nb.planning.parts import PUBLISHED
    rows = [[n, f"{v:.3g}", why] for n, (v, why) in rates(SITES["kaggle"]).items()]
    name, largest = LARGEST
    size = (f"Downloaded whole, the model is {gb(sum(PUBLISHED.values()))} GB; "
            f"its largest file is `{name}` with {largest / 1e9:.2f} GB.")
    return f"{size}\n\n{markdown(['rate', 'a second', 'source'], rows)}"

def recipe_row(pairs):
    "Pairs, samples, held-out pairs, and the times of training on Kaggle."
    from qie_nb.core.presets import first_run
    run = first_run(pairs)
    seconds = [case("kaggle", SIDE, products, pairs)[2]["train"] for products in PRODUCTS]
    return [pairs, run.samples, run.held_out, *map(duration, seconds)]

def recipe_times():
    head = ["pairs", "samples", "held-out pairs", "float32", "scaled float16"]
    return markdown(head, map(recipe_row, (20, 50, 200)))

KINDS = dict(duotone="colours", sepia="colours", rotate="colours", square="a place", mirror="the geometry") # what an edit of benchmarks/validation_loss.py changes

def ranking():
    "How each measure ranks the checkpoints of the tiny model, compared with their pixel errors."
    results = json.loads((HERE/"results"/"held_out.json").read_text())["results"]
    head = ["edit", "changes", "checkpoints with gaps above seed noise"]
    measures = dict(
        held_out_loss="held-out loss",
        image_error_2="image error of two pairs",
        training_loss="mean training loss",
    )
    rows = []
    for edit, kind in KINDS.items():
        r = results[edit]
        rows.append([edit, kind, len(r["kept"]), *(f"{r['spearman'][m]:.2f} ({r['spearman_over_all'][m]:.2f})" for m in measures)])
    return markdown([*head, *measures.values()], rows)

def validation():
    "Error without LoRA, then of each run's best and last checkpoint, on the tiny model."
    results = json.loads((HERE/"results"/"held_out.json").read_text())
    names = dict(good="48 pairs, rank 16, rate 5e-3", slow="48 pairs, rank 8, rate 1e-3", overfitted="2 pairs, rank 64, rate 1e-2", too_high="48 pairs, rank 16, rate 5e-2")

    def show(point):
        return f"{point['pixel_error']:.1f} (step {point['step']})"

    def both(best, last):
        return show(best) if best is last else f"{show(best)}, {show(last)}"
    rows = []
    for edit in KINDS:
        r = results["results"][edit]
        runs = {name: sorted((x for x in r["rows"] if x["run"] == name), key=lambda x: x["step"]) for name in ("base", *names)}
        best = {name: min(points, key=lambda x: x["pixel_error"]) for name, points in runs.items()}
        rows.append([edit, f"{runs['base'][0]['pixel_error']:.1f}", *(both(best[n], runs[n][-1]) for n in names)])
    return markdown(["edit", "without LoRA", *names.values()], rows)

def few_steps():
    "Checkpoints judged by images of four forward passes and of forty."
    rows = [[edit, len(r["rows"]), f"{r['passes']['four']:.0f} and {r['passes']['twenty']:.0f}", f"{r['spearman']:.2f}"]
            for edit, r in json.loads((HERE/"results"/"few_steps.json").read_text())["results"].items()]
    return markdown(["edit", "checkpoints", "forward passes an image", "Spearman's coefficient of the two errors"], rows)

def advice_of(runs, outcome, shown): # "4: rate too high"
    """How many runs had this outcome, and what was named."""
    found = [run for run in runs if run["outcome"] == outcome]
    named = sorted({run["named"] for run in found} - {"", "cannot tell"}) if shown else []
    return f"{len(found)}: {', '.join(named)}" if found and named else str(len(found) or "")


def advice_table():
    """What evaluations name as the cause, for good runs and bad settings."""
    runs = json.loads((HERE/"results"/"advice.json").read_text())["runs"]
    rows = []
    for setting in dict.fromkeys(run["setting"] for run in runs):
        own = [run for run in runs if run["setting"] == setting]
        cause, seeds = own[0]["cause"], sorted(run["seed"] for run in own)
        lower = sum(bool(run["doubt"]) for run in own)
        silent = advice_of(own, "nothing", False)
        right = advice_of(own, "right", False) if cause else silent
        unsure = advice_of(own, "cannot tell", False)
        wrong = advice_of(own, "wrong" if cause else "false alarm", True)
        rows.append([
            setting, cause or "nothing", len(seeds), right, unsure,
            silent if cause else "", wrong, lower or "",
        ])
    head = ["setting", "what is wrong", "seeds", "right", "cannot tell",
            "silent", "wrong or false alarm", "not called *better*"]
    return markdown(head, rows)


def drift_columns():
    "What an evaluation's measures report for results whose change is known."
    r, head = json.loads((HERE/"results"/"drift.json").read_text())["columns"], ["result", "what was done"]
    done = dict(good="JPEG", shifted="2.5 px right, 1.5 px up", zoomed="1.5 % larger", faded="0.8 x + 30 grey levels", blurred="Gaussian, 1.2 px")
    shown = dict(drift_shift_px=2, drift_scale_percent=2, outside_psnr=1, inside_error=1, outside_colour=1, outside_contrast=1, detail_ratio=2)
    cell = lambda v, n: f"{v['median'] + 0.:.{n}f} ({v['min']:.{n}f} to {v['max']:.{n}f})".replace("-0.00 ", "0.00 ").replace("-0.0 ", "0.0 ")
    return markdown([*head, *(f"`{c}`" for c in shown)], [[kind, done[kind], *(cell(r[kind][c], n) for c, n in shown.items())] for kind in done])

def drift_training():
    """Drift of the tiny model after training on pairs as they are, shifted, and aligned again.

    The median of each seed, then mean and range over the seeds."""
    runs = json.loads((HERE/"results"/"drift.json").read_text())["runs"]
    names = dict(
        shifted="targets 3 px to the right",
        aligned="the same after `align_pairs`",
        right="as they are",
    )
    def over_seeds(arm, of): # of: function of a run's rows
        v = [statistics.median(x) for r in runs if r["arm"] == arm and (x := list(of(r["rows"])))]
        return f"{statistics.mean(v):.2f} ({min(v):.2f} to {max(v):.2f})"
    rows = []
    for arm, name in names.items():
        every = [x for r in runs if r["arm"] == arm for x in r["rows"]]
        if not every: continue
        told = [x for x in every if "dx" in x]
        gap = statistics.mean(abs(x["dx"] - x["true_shift"]) for x in told)
        rows.append([name, sum(r["arm"] == arm for r in runs), over_seeds(arm, lambda v: (x["drift_shift_px"] for x in v if "drift_shift_px" in x)),
                     over_seeds(arm, lambda v: (abs(x["true_shift"]) for x in v)), f"{gap:.2f}", f"{len(told)} of {len(every)}"])
    return markdown(["training pairs", "seeds", "`drift_shift_px`", "true shift, px", "measured minus true, mean size", "images with a figure"], rows)

def edit_masks():
    "Error inside and outside the region that an edit changes, with equal weights and with those of `data.edit_mask: auto`."
    path = HERE/"results"/"edit_masks.json"
    if not path.is_file(): return "not yet measured: `python benchmarks/edit_masks.py`"
    rows = []
    for edit, r in json.loads(path.read_text())["results"].items():
        s = r["summary"]
        def cell(mode, what):
            if what not in s[mode]: return "-"
            x = s[mode][what]
            return f"{x['mean']:.1f} ({x['low']:.1f} to {x['high']:.1f})"
        cells = [cell(mode, what) for what in ("inside", "outside", "whole") for mode in ("none", "auto")]
        rows.append([edit, r["kind"], f"{r['mask_mean']:.2f}", *cells])
    head = [f"{w}, {m}" for w in ("inside", "outside", "whole image") for m in ("none", "auto")]
    return markdown(["edit", "changes", "mean mask", *head], rows)


def identity_pairs():
    """Errors by `data.identity_share`, for the local and for the global edits together.

    Mean, smallest and largest of all runs; the rows of one seed have the same pairs and noise."""
    held = json.loads((HERE/"results"/"identity_pairs.json").read_text())

    def spread_of(runs, name):
        values = [row[name] for row in runs if name in row]
        if not values:
            return "-"
        return f"{statistics.mean(values):.1f} ({min(values):.0f}–{max(values):.0f})"
    measures = dict(whole="of the edit", inside="inside", outside="outside",
                    keep="of keeping", known="of known edits")
    rows = []
    for kind in ("local", "global"):
        runs = [row for r in held["results"].values() if r["kind"] == kind for row in r["rows"]]
        for share in sorted({row["share"] for row in runs}):
            of_share = [row for row in runs if row["share"] == share]
            rows.append([kind, f"{share:g}", *(spread_of(of_share, name) for name in measures)])
    table = markdown(["edits", "share", *measures.values()], rows)
    base = next(iter(held["results"].values()))["base"]
    without = f"Without LoRA: {base['keep']:.1f} of keeping, {base['known']:.1f} of known edits."
    return f"{table}\n\n{without}"


def growth():
    "What grows with the number of samples; a million is ten times the largest number."
    held = json.loads((HERE/"results"/"growth.json").read_text())
    rows, last = [], {}
    def row(n, r, times=1):
        get = lambda part, name: (lambda v: v["median"] if isinstance(v, dict) else v)(r.get(part, {}).get(name))
        show = lambda v, form, scale=1: "-" if v is None else form.format(v * times / scale)
        return [f"{n:,}" + " (extrapolated)" * (times > 1), show(r.get("image_files"), "{:,.0f}"), show(r.get("entries"), "{:,.0f}"), show(get("warm_open", "open_cpu_s"), "{:.2f}"),
                show(get("warm_open", "open_s"), "{:.2f}"), show(get("warm_open", "open_peak"), "{:.1f}", 1e6), show(get("warm", "scan_s"), "{:.2f}"), show(get("warm", "epoch_order_s"), "{:.3f}"),
                "-" if get("warm", "calls") is None else f"{get('warm', 'calls'):,.0f}"]
    for n, r in sorted(held["results"].items(), key=lambda x: int(x[0])): rows.append(row(int(n), r)); last = r
    rows.append(row(10**6, last, 10**6 / last["samples"]))
    head = ["samples", "files of the data set", "entries", "open, CPU s", "open, s", "open, MB",
            "look through the cache, s", "order of an epoch, s", "calls of a step"]
    where = (f"{held['device']}, load average {held['load_average']:.0f}, "
             f"Python {held['python']}, torch {held['versions']['torch']}, {held['date'][:10]}.")
    opened = ("Opened in a new process that knows the files (median of "
              f"{last['warm_open']['open_s']['runs']} to 3 runs); -: not measured.")
    return f"{markdown(head, rows)}\n\n{where} {opened}"


LINES = 20 # of recorded runs


def evaluation_lines():
    """What the last evaluation of recorded runs prints.

    One run of each setting, and one more of the first."""
    from advice_trials import line_of, recorded
    runs = json.loads((HERE/"results"/"advice.json").read_text())["runs"]
    first = {run["setting"]: run for run in reversed(runs)}
    chosen = [*first.values(), *(run for run in runs if run is not first[run["setting"]])][:LINES]
    chosen.sort(key=runs.index)
    rows = []
    for run in chosen:
        line = line_of(recorded(run["measures"]))
        rows.append([run["setting"], run["cause"] or "nothing", f"`{line}`"])
    return markdown(["setting", "what is wrong", "line"], rows)


MADE = "made by benchmarks/session_table.py"
RESULTS = f"{MADE} from benchmarks/results"
PARTS = { # {(page in docs/, mark): what makes the table}
    ("measured/evaluation_lines", f"lines: {RESULTS}/advice.json"): evaluation_lines,
    ("kaggle", f"session: {MADE} for kaggle"): lambda: session_times("kaggle"),
    ("colab", f"session: {MADE} for colab"): lambda: session_times("colab"),
    ("measured/sessions", f"kaggle: {MADE}"): lambda: tables("kaggle"),
    ("measured/sessions", f"colab: {MADE}"): lambda: tables("colab"),
    ("measured/sessions", f"rates: {MADE}"): rate_table,
    ("measured/speed", f"anchors: {MADE} from benchmarks/anchors.py"): anchor_table,
    ("recipes", f"recipes: {MADE}"): recipe_times,
    ("measured/recipes", f"validation: {RESULTS}/held_out.json"): validation,
    ("measured/data", f"edit masks: {RESULTS}/edit_masks.json"): edit_masks,
    ("measured/data", f"identity pairs: {RESULTS}/identity_pairs.json"): identity_pairs,
    ("measured/growth", f"growth: {RESULTS}/growth.json"): growth,
    ("measured/evaluation", f"few steps: {RESULTS}/few_steps.json"): few_steps,
    ("measured/evaluation", f"ranking: {RESULTS}/held_out.json"): ranking,
    ("measured/evaluation", f"advice: {RESULTS}/advice.json"): advice_table,
    ("measured/drift", f"drift: {RESULTS}/drift.json"): drift_columns,
    ("measured/drift", f"drift training: {RESULTS}/drift.json"): drift_training,
}

def filled(page, mark, text): # the page with its table replaced
    start, end = f"<!-- {mark} -->\n", "<!-- end -->"
    old = (DOCS/f"{page}.md").read_text()
    assert old.count(start) == 1, f"docs/{page}.md needs the mark {mark!r} once"
    return re.sub(re.escape(start) + ".*?" + re.escape(end), lambda m: f"{start}{text}\n{end}", old, flags=re.S)


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--write", action="store_true")
    write = p.parse_args().write
    for (page, mark), make in PARTS.items():
        if write: (DOCS/f"{page}.md").write_text(filled(page, mark, make()))
        else: print(make(), "\n")
