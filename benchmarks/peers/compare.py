"""Compares qie_nb with other trainers of Qwen-Image-Edit on one small model: steps, memory, precompute, conditioning, stale and damaged caches, resume.

`make bench-peers PEERS=/path` (a folder with their checkouts) makes an environment for each, measures, writes results/peers.json and prints a table.
`--table` prints the table of the last results, `--write` puts it into docs/peers.md.
docs/measured/peers.md says what is measured, and how to add a peer.
"""
import argparse, importlib, json, os, platform, re, shutil, subprocess, sys, sysconfig, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUT, DOCS = HERE.parent/"results"/"peers.json", ROOT/"docs"
PEERS = "qie_nb", "qwen_image_finetune", "diffsynth", "musubi", "ai_toolkit", "simpletuner"
INTERFACE = "TITLE FOLDER URL COMMIT PRESENT MADE_FOR STATE DTYPES REQUIREMENTS patches cache train lora embedding latent".split()
MARK = "peers: made by benchmarks/peers/compare.py from benchmarks/results/peers.json"
QUIET = dict(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1",
             MKL_NUM_THREADS="1", MKL_CBWR="AUTO,STRICT", WANDB_MODE="disabled", SWANLAB_MODE="disabled", QFLUX_DOTENV_LOADED="1", PYTHONDONTWRITEBYTECODE="1")
sys.path[:0] = [p for p in (str(HERE), str(ROOT)) if p not in sys.path]


# --- peers and their environments
def load(name):
    "A peer's file; it has the names of `INTERFACE`."
    peer = importlib.import_module(f"peer_{name}")
    missing = [n for n in INTERFACE if not hasattr(peer, n)]
    if missing: raise TypeError(f"benchmarks/peers/peer_{name}.py lacks {', '.join(missing)}")
    return peer


def source_of(peer, folder):
    "A peer's checkout, or None."
    if peer.FOLDER == ".": return ROOT
    at = Path(folder or "peers-missing")/peer.FOLDER
    return at.resolve() if (at/peer.PRESENT).is_file() else None


def not_found(peer): return f"{peer.TITLE}: not found; clone it from {peer.URL} at commit {peer.COMMIT} into PEERS/{peer.FOLDER}"


def commit_of(peer, source):
    if peer.FOLDER == ".": return version("qie_nb")
    if (source/".git").exists(): return subprocess.run(["git", "-C", source, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return f"{peer.COMMIT} (as named; the folder is no git checkout)"


def environment(peer):
    "Its Python: an environment with what it pins; torch and all else come from this one."
    if not peer.REQUIREMENTS: return Path(sys.executable)
    folder = ROOT/".peers"/peer.FOLDER
    python, ready, wanted = folder/"bin"/"python", folder/".ready", "\n".join(peer.REQUIREMENTS)
    if not ready.is_file() or ready.read_text() != wanted:
        print(f"making {folder.relative_to(ROOT)}", flush=True)
        if not python.is_file(): subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        purelib = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, check=True).stdout.strip()
        (Path(purelib)/"main.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-cache-dir", "--no-warn-conflicts", *peer.REQUIREMENTS], check=True)
        ready.write_text(wanted)
    return python


def versions_of(python):
    code = ("import importlib.metadata as m, json\nout = {}\nfor n in 'torch diffusers transformers peft accelerate safetensors diffsynth'.split():\n"
            "    try: out[n] = m.version(n)\n    except m.PackageNotFoundError: pass\nprint(json.dumps(out))")
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=tempfile.gettempdir()).stdout)


# --- processes
class Failed(RuntimeError): pass


class Bench:
    "Starts jobs of one peer in its own processes."
    def __init__(self, name, source, python, root, model):
        self.name, self.peer, self.source, self.python, self.root = name, load(name), source, python, root/name
        import model as m
        self.common = dict(size=m.SIZE, area=m.AREA, dim=m.HEADS * m.HEAD, heads=m.HEADS, text=m.TEXT, blocks=m.BLOCKS, n_pairs=m.PAIRS, source=str(source), few=str(model/"pairs-2"),
                           difference=m.PAIRS - 2, pairs=str(model/f"pairs-{m.PAIRS}"))
        self.model = model
        self.root.mkdir(parents=True, exist_ok=True)
    def job(self, label, variant="2511", dtype="float32", **kw):
        made = self.common | dict(model=str(self.model/variant), variant=variant, dtype=dtype, cache=str(self.root/"cache"/variant), out=str(self.root/"out"/label), result=str(self.root/f"{label}.json")) | kw
        (self.root/f"{label}.job.json").write_text(json.dumps(made))
        return made
    def start(self, label, action, **kw):
        self.job(label, **kw)
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | QUIET | getattr(self.peer, "ENVIRONMENT", {})
        if self.peer.FOLDER == ".": env["PYTHONPATH"] = str(ROOT)
        fds = kw.get("turns", ())
        return subprocess.Popen([self.python, HERE/"run.py", self.name, action, self.root/f"{label}.job.json"], env=env, cwd=self.root, pass_fds=fds, stdin=subprocess.DEVNULL,
                                stdout=open(self.root/f"{label}.log", "wb"), stderr=subprocess.STDOUT)
    def finish(self, label, process):
        try: process.wait(600)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Failed(f"{self.name} {label}: not finished after 600 s")
        result = self.root/f"{label}.json"
        if process.returncode or not result.is_file(): raise Failed(f"{self.name} {label}: {self.last_words(label)}")
        return json.loads(result.read_text())
    def run(self, label, action, **kw): return self.finish(label, self.start(label, action, **kw))
    def last_words(self, label):
        text = re.sub(r"\x1b\[[0-9;]*m", "", (self.root/f"{label}.log").read_text(errors="replace")) # without colours
        lines = [r.strip() for r in text.splitlines() if r.strip()]
        return next((r for r in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", r)), lines[-1] if lines else "no output")[:300]


def attempt(fn, *args, **kw):
    "A measurement's result, or {error}; one that fails leaves the others alone."
    try: return fn(*args, **kw)
    except Exception as e:
        print(f"  {e}", flush=True)
        return dict(error=f"{type(e).__name__}: {e}" if not isinstance(e, Failed) else str(e))


def in_pairs(benches, fn):
    "fn(bench) for each, two at a time: for what is not timed."
    with ThreadPoolExecutor(2) as pool: return dict(zip((b.name for b in benches), pool.map(lambda b: attempt(fn, b), benches)))


def spread(values, digits=4): return dict(median=round(median(values), digits), min=round(min(values), digits), max=round(max(values), digits), runs=len(values))


# --- what is measured
def precompute(bench, repeats):
    r = bench.run("cache", "cache", repeats=repeats)
    r["seconds_a_sample"] = spread(r["seconds_a_sample"]) if r["seconds_a_sample"] else None
    same = Path(f"{bench.root}/cache/2511-0-pairs-2")
    return r | dict(one_caption=attempt(one_caption, bench, same) if repeats else None)


def one_caption(bench, cache):
    "Do two images with one caption have two embeddings?"
    from safetensors.torch import load_file
    out = bench.root/"one_caption.safetensors"
    bench.run("one_caption", "embeddings", cache=str(cache), pairs=bench.common["few"], samples=[0, 1], out=str(out))
    e = load_file(out)
    return "two embeddings" if e["0"].shape != e["1"].shape or not e["0"].equal(e["1"]) else "one embedding for both"


class Turns:
    "A training process that waits for each order to do some steps."
    def __init__(self, bench, label, **kw):
        self.bench, self.label = bench, label
        orders, self.orders = os.pipe()
        self.reports, reports = os.pipe()
        self.process = bench.start(label, "train", turns=[orders, reports], steps=10**4, **kw)
        os.close(orders), os.close(reports)
        self.file = os.fdopen(self.reports)
    def wait(self):
        line = self.file.readline()
        if not line:
            self.process.wait()
            raise Failed(f"{self.bench.name} {self.label}: {self.bench.last_words(self.label)}")
        return json.loads(line)
    def do(self, steps):
        os.write(self.orders, f"{steps}\n".encode())
        return self.wait()
    def stop(self):
        try: os.write(self.orders, b"stop\n")
        except OSError: pass
        try: self.process.wait(30)
        except subprocess.TimeoutExpired: self.process.kill()
        self.file.close(), os.close(self.orders)


def steps(ways, dtype, rounds, count, warm=3):
    """CPU seconds of a step, the trainers by turns in each round; peak memory within these steps; the first step's tensors.

    ways: {name: (bench, what differs in its job)}; ratios are to the first."""
    alive, out = {}, {}
    for name, (b, kw) in ways.items():
        if dtype in b.peer.DTYPES:
            alive[name] = Turns(b, f"steps-{dtype}-{name.replace(' ', '-')}", dtype=dtype, warm=warm, case=str(b.root/f"case-2511-{dtype}.safetensors"), **kw)
    for name, t in list(alive.items()):
        try: t.wait()
        except Failed as e:
            print(f"  {e}", flush=True)
            out[name] = dict(error=str(e))
            alive.pop(name).stop()
    took = {name: [] for name in alive}
    for k in range(rounds):
        order = list(alive)
        for name in order[k % len(order):] + order[:k % len(order)]: took[name].append(alive[name].do(count)) # each is first once
    for t in alive.values(): t.stop()
    first = took.get(next(iter(ways)))
    for name, rows in took.items():
        cpu = [r["cpu"] / count for r in rows]
        out[name] = dict(cpu_seconds=spread(cpu), wall_seconds=spread([r["wall"] / count for r in rows]), peak_mb=round(max(r["peak"] for r in rows) / 1e6),
                         of_ours=spread([c / (o["cpu"] / count) for c, o in zip(cpu, first)], 3) if first else None)
        if any(r["fresh"] for r in rows): out[name]["encoding"] = spread([r["fresh"] / count for r in rows])
    return out


# parts of our step, each switched off; "bare loop": our transformer and batch in a loop of ten lines, with the same clipping (benchmarks/step_cpu.py)
OWN = {"as it is": {}, "no clipping": dict(train_settings=dict(max_grad_norm=0)), "no table": dict(model_settings=dict(modulation_table=False)),
       "bare loop": dict(bare=True), "bare loop, no clipping": dict(bare=True, train_settings=dict(max_grad_norm=0))}


def checkpointed(bench, dtype):
    r = bench.run(f"checkpointed-{dtype}", "train", dtype=dtype, checkpointing=True, steps=6, warm=2, stop_at=6)
    return dict(peak_mb=round(r["peak"] / 1e6))


def reference(model, dtype="float32"):
    "The diffusers transformer of a model folder."
    import torch
    from diffusers import QwenImageTransformer2DModel
    return QwenImageTransformer2DModel.from_pretrained(model/"transformer", torch_dtype=getattr(torch, dtype)).eval()


def loss_difference(case, transformer, shapes):
    "|their loss - the pipeline's transformer's| / the latter, on the recorded latents, noise and timestep."
    import torch
    from safetensors.torch import load_file
    c = load_file(case)
    target, noise, s = c["target"], c["noise"], c["sigma"]
    x_t = (1 - s) * (noise - target) + s * noise
    n = target.shape[1]
    tokens = torch.cat([x_t, c["tokens"][:, n:]], 1).to(transformer.dtype)
    with torch.no_grad():
        pred = transformer(hidden_states=tokens, timestep=s.to(transformer.dtype), encoder_hidden_states=c["embeds"].reshape(1, -1, c["embeds"].shape[-1]).to(transformer.dtype),
                           encoder_hidden_states_mask=None, img_shapes=[shapes], return_dict=False)[0][:, :n]
    theirs, ours = ((p.float() - target).square().mean().item() for p in (c["pred"], pred))
    return dict(difference=abs(theirs - ours) / ours, loss=theirs, reference=ours, sigma=s.item())


def conditioning(benches, model):
    """Largest difference between a cached prompt embedding and the pipeline's, for a photograph that has to be resized.

    A trainer that changes the caption has a function `caption` that does the same: the pipeline gets that caption."""
    import torch
    from PIL import Image
    from diffusers import QwenImageEditPlusPipeline
    from qie_nb.models.components import restore_image_positions
    from safetensors.torch import load_file
    import model as m
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus
    sample = m.PAIRS - 1
    folder = model/f"pairs-{m.PAIRS}"
    image, prompt = Image.open(folder/"control_images"/f"{sample:04}.png"), (folder/"training_images"/f"{sample:04}.txt").read_text()
    @cache
    def expected(prompt):
        found = {}
        for kind in ("3d", "installed"):
            pipe = QwenImageEditPlusPipeline.from_pretrained(model/"2511")
            if kind == "3d": restore_image_positions(pipe)
            small = pipe.image_processor.resize(image, *plus.calculate_dimensions(plus.CONDITION_IMAGE_SIZE, image.width / image.height)[1::-1])
            with torch.no_grad(): found[kind] = pipe.encode_prompt(prompt, image=[small], device="cpu")[0][0]
        return found
    rows = {}
    for b in benches:
        def compare(bench):
            out = bench.root/"embedding.safetensors"
            bench.run("embedding", "embeddings", samples=[sample], out=str(out))
            e, found = load_file(out)[str(sample)], expected(bench.peer.caption(prompt) if hasattr(bench.peer, "caption") else prompt)
            r = dict(tokens=len(e), pipeline_tokens=len(expected(prompt)["3d"]))
            if any(len(e) != len(p) for p in found.values()): return r
            kind = min(found, key=lambda k: (e - found[k]).abs().max())
            return r | dict(difference=(e - found[kind]).abs().max().item(), positions=kind, largest=found[kind].abs().max().item())
        rows[b.name] = attempt(compare, b)
    exact = expected(prompt)["3d"]
    return rows | dict(rounding=dict(difference=(exact.bfloat16().float() - exact).abs().max().item()))


def copied(bench, label):
    "The cache and the pairs once more, to change them."
    folder = bench.root/label
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bench.root/"cache"/"2511", folder/"cache"/"2511")
    shutil.copytree(bench.common["pairs"], folder/"pairs")
    return folder, dict(cache=str(folder/"cache"/"2511"), pairs=str(folder/"pairs"))


def outcome(r, good):
    if r["failed"]: return "error: " + r["failed"].splitlines()[0][:160]
    if r["cache_changed"] or r["encoded"]: return good
    return "new control latent, old embedding" if r["fresh"] else "trained on the old entry"


def stale(bench, what):
    "Train after a caption or a control image has changed, with no new precompute; then precompute again and train."
    folder, where = copied(bench, f"stale-{what}")
    if what == "caption": (folder/"pairs"/"training_images"/"0000.txt").write_text("make it a pencil drawing with hard shadows")
    else: shutil.copy(folder/"pairs"/"training_images"/"0000.png", folder/"pairs"/"control_images"/"0000.png")
    r = bench.run(f"stale-{what}", "train", **where, steps=8, stop_at=8, may_fail=True)
    return dict(train=outcome(r, "encoded again"), log=bench.last_words(f"stale-{what}") if r["failed"] else None)


def damaged(bench):
    "Train with two flipped bytes in a cached latent."
    folder, where = copied(bench, "damaged")
    file = bench.run("flip", "damage", **where)["file"]
    path = Path(where["cache"])/file
    flipped = path.read_bytes()
    r = bench.run("damaged", "train", **where, steps=8, stop_at=8, may_fail=True)
    if r["failed"]: return dict(train=outcome(r, ""), file=file)
    return dict(train="trained on" if path.is_file() and path.read_bytes() == flipped else "found, encoded again", file=file)


def weights_difference(bench, a, b):
    from safetensors.torch import load_file
    one, two = (load_file(bench.peer.lora(bench.root/"out"/x)) for x in (a, b))
    assert one.keys() == two.keys(), "the adapters have other names"
    return max((one[k].float() - two[k].float()).abs().max().item() for k in one)


def resumed(bench):
    "10 steps at once, the same again, and 5 + a new process + 5."
    common = dict(steps=10, total=10, seed=1)
    for label in ("ten", "again"): bench.run(label, "train", **common, stop_at=10)
    bench.run("five", "train", **common, stop_at=5)
    bench.run("resumed", "train", **(common | dict(steps=5)), stop_at=5, resume=str(bench.root/"out"/"five"))
    return dict(repeated=weights_difference(bench, "ten", "again"), resumed=weights_difference(bench, "ten", "resumed"))


# --- all of it
def about(benches):
    import torch
    info = Path("/proc/cpuinfo")
    rows = info.read_text().splitlines() if info.is_file() else []
    cpu = next((r.split(":")[1].strip() for r in rows if r.startswith("model name")), platform.processor())
    return dict(device=f"{cpu}, {os.cpu_count()} cores, one thread a process", capability=torch.backends.cpu.get_cpu_capability(), bfloat16=bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
                date=datetime.now(timezone.utc).isoformat(timespec="seconds"), load_average=os.getloadavg()[0], python=platform.python_version(),
                peers={b.name: dict(title=b.peer.TITLE, url=b.peer.URL, commit=commit_of(b.peer, b.source), made_for=b.peer.MADE_FOR, state=b.peer.STATE, versions=versions_of(b.python),
                                    patches=patches_of(b)) for b in benches})


def patches_of(bench):
    "Where each patch is and why, for both dtypes; the text that it replaces is the trainer's own, and is not kept."
    seen, found = set(), []
    for dtype in ("bfloat16", "float32"):
        for p in bench.peer.patches(bench.common | dict(model="MODEL", variant="2511", dtype=dtype)):
            if p not in seen: found.append(dict(where=p.where, why=p.why))
            seen.add(p)
    return found


def measure(args):
    root = Path(args.work or tempfile.mkdtemp(prefix="peers-"))
    benches, missing = [], []
    for name in args.peers:
        peer = load(name)
        source = source_of(peer, args.folder)
        if source is None:
            missing.append(not_found(peer))
            print(missing[-1], flush=True)
        else: benches.append((name, source, environment(peer)))
    import model as m
    model = root/"model"
    parameters = m.make(model) if not (model/"2511"/"model_index.json").is_file() else None
    benches = [Bench(*b, root, model) for b in benches]
    result = json.loads(OUT.read_text()) if args.parts and OUT.is_file() else {}
    result |= dict(about=about(benches), missing=missing, model=dict(parameters=parameters or result.get("model", {}).get("parameters"), size=m.SIZE, photographs=m.PHOTO, pairs=m.PAIRS))
    dtypes = [d for d in ("bfloat16", "float32") if d == "float32" or result["about"]["bfloat16"]]
    wanted = lambda part: not args.parts or part in args.parts
    def part(name, fn):
        if not wanted(name): return
        began = time.perf_counter()
        print(name, flush=True)
        result[name] = attempt(fn)
        print(f"  {time.perf_counter() - began:.0f} s", flush=True)
        text = json.dumps(result, indent=1)
        for folder, shown in ((args.folder, "PEERS"), (root, "WORK"), (ROOT, "."), (Path(sysconfig.get_path("purelib")), "SITE")):
            if folder: text = text.replace(str(Path(folder).resolve()), shown).replace(str(folder), shown)
        OUT.write_text(text + "\n")
    part("precompute", lambda: {b.name: attempt(precompute, b, args.repeats) for b in benches})
    shapes = [(1, m.SIZE[1] // 16, m.SIZE[0] // 16)] * 2
    part("steps", lambda: {d: steps({b.name: (b, {}) for b in benches}, d, args.rounds, args.steps) for d in dtypes})
    if args.parts and "own" in args.parts: part("own", lambda: steps({k: (benches[0], kw) for k, kw in OWN.items()}, "float32", args.rounds, args.steps))
    part("checkpointed", lambda: {d: in_pairs([b for b in benches if d in b.peer.DTYPES], lambda b: checkpointed(b, d)) for d in dtypes})
    part("conditioning", lambda: conditioning(benches, model))
    def losses():
        out = {}
        for variant in ("2511", "2509"):
            def one(b):
                case = b.root/f"case-{variant}-float32.safetensors"
                if not case.is_file(): # a cache of its own: DiffSynth keeps the variant in it
                    common = dict(variant=variant, pairs=b.common["few"], n_pairs=2)
                    b.run(f"cache-{variant}", "cache", **common)
                    b.run(f"case-{variant}", "train", **common, case=str(case), steps=1, stop_at=1)
                return loss_difference(case, net, shapes)
            net = reference(model/variant)
            out[variant] = in_pairs(benches, one)
        return out
    part("losses", losses)
    for what in ("caption", "control"): part(f"stale_{what}", lambda: in_pairs(benches, lambda b: stale(b, what)))
    part("damaged", lambda: in_pairs(benches, damaged))
    part("resumed", lambda: in_pairs(benches, resumed))
    if not args.work: shutil.rmtree(root)
    return result


# --- the table
def cell(value, form="{}"): return "failed" if isinstance(value, dict) and "error" in value else "-" if value is None else form.format(value)


def got(result, *keys):
    "A value far inside the results; None where there is none, {error} where its measurement failed."
    for k in keys:
        if not isinstance(result, dict): return None
        if "error" in result: return result
        result = result.get(k)
    return result


def small(x): return "equal" if x == 0 else f"{x:.1e}"


def rows_of(result):
    names = [n for n in PEERS if n in result["about"]["peers"]]
    names += [n for n in result["about"]["peers"] if n not in names]
    each = lambda fn: [fn(n) for n in names]
    def value(*path, form="{}", then=lambda x: x):
        def of(n):
            v = got(result, *(n if p == "*" else p for p in path))
            return cell(v) if v is None or isinstance(v, dict) and "error" in v else form.format(then(v))
        return each(of)
    rows = []
    for d in [d for d in result.get("steps", {}) if d != "error"]:
        def step(n):
            r = got(result, "steps", d, n)
            if not r or "error" in r: return cell(r)
            c = r["cpu_seconds"]
            return f"{c['median']:.3f} s ({c['min']:.3f} to {c['max']:.3f})" if n == "qie_nb" or not r["of_ours"] else f"{r['of_ours']['median']:.2f} ({r['of_ours']['min']:.2f} to {r['of_ours']['max']:.2f})"
        rows.append([f"CPU time of a step, {d} (others: ratio to qie_nb)", *each(step)])
        if any(got(result, "steps", d, n, "encoding") for n in names):
            seconds = value("steps", d, "*", "encoding", then=seconds_of)
            rows.append(["in it, encoding the before image", *seconds])
        rows.append([f"peak memory in steps, {d}, MB", *value("steps", d, "*", "peak_mb")])
        rows.append(["the same, with gradient checkpointing", *value("checkpointed", d, "*", "peak_mb")])
    rows.append(["precompute, CPU s a sample, float32", *value("precompute", "*", "seconds_a_sample", then=lambda s: f"{s['median']:.2f} ({s['min']:.2f} to {s['max']:.2f})")])
    rows.append(["cache of 8 pairs", *value("precompute", "*", then=lambda r: f"{r['files']} files, {r['bytes'] / 1e6:.1f} MB")])
    rows.append(["two images with one caption", *value("precompute", "*", "one_caption")])
    def conditioned(n):
        r = got(result, "conditioning", n)
        if not r or "error" in r: return cell(r)
        differs, ours = small(r["difference"]) if "difference" in r else None, r.get("pipeline_tokens", r.get("tokens"))
        if r.get("tokens") == ours: return differs
        return (f"{differs} on its caption; " if differs else "") + f"{r['tokens']} tokens, the pipeline {ours}"
    rows.append(["prompt embedding against the pipeline", *each(conditioned)])
    for v in ("2511", "2509"): rows.append([f"loss for {v} against the pipeline's transformer", *value("losses", v, "*", "difference", then=small)])
    for w, name in (("caption", "caption"), ("control", "before image")):
        rows.append([f"{name} changed after caching, then training", *value(f"stale_{w}", "*", "train", then=lambda t: t.split(":")[0])])
    rows.append(["two flipped bytes in a cached latent", *value("damaged", "*", "train", then=lambda t: t.split(":")[0])])
    rows.append(["10 steps, twice", *value("resumed", "*", "repeated", then=small)])
    rows.append(["10 steps against 5 + new process + 5", *value("resumed", "*", "resumed", then=small)])
    return [result["about"]["peers"][n]["title"] for n in names], rows


def seconds_of(measured:dict) -> str:
    "Median and range in seconds."
    return f"{measured['median']:.2f} s ({measured['min']:.2f} to {measured['max']:.2f})"


def table(result):
    heads, rows = rows_of(result)
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|", *("| " + " | ".join(r) + " |" for r in rows)]
    a = result["about"]
    head = f"{a['date'][:10]}, {a['device']} ({a['capability']}{'' if a['bfloat16'] else ', no bfloat16 arithmetic: float32 only'}), load {a['load_average']:.1f} before the run; median (smallest to largest)."
    return "\n".join([head, "", *lines, *([""] + ["- " + x for x in result["missing"]] if result.get("missing") else [])])


def details(result):
    """What was compared: commits, versions and the number of patches.

    The results have their reasons."""
    lines = ["| | commit | versions | patches while loading |", "|---|---|---|---|"]
    for p in result["about"]["peers"].values():
        v = ", ".join(f"{k} {x}" for k, x in p["versions"].items())
        why = len({(patch["why"], patch["where"]) for patch in p["patches"]}) or "none"
        lines.append(f"| [{p['title']}]({p['url']}): {p['made_for']} | {p['commit']} | {v} | {why} |")
    return "\n".join(lines)


def pages(result=None) -> dict: # {path: text}
    "docs/peers.md and docs/measured/peers.md with their tables made from the results."
    if result is None and not OUT.is_file(): return {} # not yet measured
    result = result or json.loads(OUT.read_text())
    made = {}
    for path, mark, new in ((DOCS/"peers.md", MARK, table(result)),
                            (DOCS/"measured"/"peers.md", f"versions: {MARK}", details(result))):
        start, text = f"<!-- {mark} -->\n", path.read_text()
        assert text.count(start) == 1, f"{path.name} needs the mark {mark!r} once"
        block = re.escape(start) + ".*?<!-- end -->"
        filled = f"{start}{new}\n<!-- end -->"
        made[path] = re.sub(block, lambda m: filled, text, flags=re.S)
    return made


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--folder", default=os.environ.get("PEERS"), help="with one checkout a peer; default: the variable PEERS")
    p.add_argument("--peers", nargs="+", default=PEERS, help="some of them")
    p.add_argument("--parts", nargs="+", help="precompute steps checkpointed conditioning losses stale_caption stale_control damaged resumed, and own (parts of our step switched off); the others stay in the file as they were")
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--steps", type=int, default=4, help="of each peer in a round")
    p.add_argument("--repeats", type=int, default=2, help="of precompute")
    p.add_argument("--work", help="keep models, caches and logs in this folder")
    p.add_argument("--table", action="store_true")
    p.add_argument("--write", action="store_true", help="put the last results into docs/peers.md")
    args = p.parse_args(argv)
    if args.write:
        for path, text in pages().items(): path.write_text(text)
    elif not args.table: measure(args)
    print(table(json.loads(OUT.read_text())))


if __name__ == "__main__": main()
