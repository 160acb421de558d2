"""What the sample viewer costs with thousands of samples: making the data set, opening, leafing, filters, search for duplicates; and its memory.

`python benchmarks/widgets.py` writes results/widgets.json. Photographs of scikit-image are cropped and edited by formula; every file of the set
has bytes of its own. Each run is a process of its own; `first` means that nothing is remembered of any file, `again` that all is. The cache
has an identity and no entries; listing full ones is in cache.json. The page cache is warm throughout.
"""
import argparse, json, os, platform, subprocess, sys, tempfile, time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median

WHO = dict(model="made up", variant="2511", vae="0" * 64, text_encoder="1" * 64, template="edit-plus-1", dtype="bfloat16",
           control_area=1024*1024, vl_area=384*384)
OUT = Path(__file__).parent/"results"/"widgets.json"
CHILD = """
import gc, json, sys, time, tracemalloc
t, out = time.perf_counter(), {}
def lap(name):
    global t
    out[name], t = time.perf_counter() - t, time.perf_counter()
import ipywidgets
from qie_nb.data.dataset import ImageDataset
from qie_nb.widgets.sample_viewer import sample_viewer
lap("import")
ds = ImageDataset(dict(dataset_path=sys.argv[1], image_size=[1024, 1024], cache_dir=sys.argv[2]))
lap("make the data set")
view = sample_viewer(ds)
view.box
lap("open the live form")
still = view.html()
lap("draw the still form")
c = view.controls
for _ in range(20): c.on.click()
lap("20 pages")
out["20 pages"] /= 20; out["a page"] = out.pop("20 pages")
def held():
    gc.collect()
    return sum(len(x.value) for x in (c.page, c.message)), len(ipywidgets.Widget.widgets if hasattr(ipywidgets.Widget, "widgets") else ipywidgets.widgets.widget._instances)
tracemalloc.start(); held(); a = held(), tracemalloc.get_traced_memory()[0]
for n in range(200): c.slider.value = 30 + n * 20
b = held(), tracemalloc.get_traced_memory()[0]
tracemalloc.stop()
t = time.perf_counter()
c.filter.value = "missing"
lap("filter: not cached"); assert view.filters()["missing"] == len(ds)
c.filter.value = "near"
lap("filter: near duplicates and swaps"); assert view.filters()["near"] is not None
c.filter.value = [k for k in view.filters() if k.startswith("bucket")][0]
lap("filter: bucket")
sample_viewer(ds, "tiny", whole=True).box
lap("open with a model and the whole text, diffusers and transformers imported for it")
sample_viewer(ds, "tiny", whole=True).box
lap("the same when they are imported")
print(json.dumps(dict(seconds=out, near=view.filters()["near"], pages_bytes=[a[0][0], b[0][0]], widgets=[a[0][1], b[0][1]], traced_bytes=b[1] - a[1])))
"""


def make_set(root, n, side):
    "Pairs whose files all differ: crops of photographs, a pixel of each with its number."
    from qie_nb.tiny.photos import EDITS, crops
    for d in ("training_images", "control_images"): (root/d).mkdir(parents=True)
    ims = crops(100, (side, side * 3 // 4), seed=0)
    edited = [EDITS["duotone"](im) for im in ims]
    for i in range(n):
        for folder, im in (("control_images", ims[i % 100]), ("training_images", edited[i % 100])):
            im.putpixel((0, 0), (i % 256, i // 256, 0)) # JPEG would lose it, PNG does not
            im.save(root/folder/f"{i:05}.png", compress_level=1)
        (root/"training_images"/f"{i:05}.txt").write_text(f"print number {i} in two colours")


def measure(root, home):
    env = os.environ | dict(QIE_NB_HOME=str(home), PYTHONPATH=os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")])))
    run = subprocess.run([sys.executable, "-c", CHILD, str(root/"set"), str(root/"cache")], capture_output=True, text=True, env=env)
    if run.returncode: sys.exit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def spread(values, digits=3): return dict(median=round(median(values), digits), min=round(min(values), digits), max=round(max(values), digits), runs=len(values))


def device():
    if Path("/proc/cpuinfo").is_file():
        names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        if names: return f"{names[0]}, {len(names)} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--samples", type=int, default=5000)
    p.add_argument("--side", type=int, default=192, help="pixels of the longer side of the images")
    p.add_argument("--runs", type=int, default=5, help="processes with everything remembered; the first one comes on top")
    a = p.parse_args()
    began = time.time()
    with tempfile.TemporaryDirectory() as d:
        root = Path(d)
        make_set(root/"set", a.samples, a.side)
        from qie_nb.cache import EmbeddingCacheManager
        EmbeddingCacheManager(root/"cache").add_identity(WHO)
        time.sleep(3) # facts of files that changed a moment ago are not remembered
        first, again = measure(root, root/"home"), [measure(root, root/"home") for _ in range(a.runs)]
    seconds = {k: dict(first=round(v, 3), again=spread([r["seconds"][k] for r in again])) for k, v in first["seconds"].items()}
    result = dict(device=device(), accelerator=None, date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                  versions={"python": platform.python_version(), **{m: version(m) for m in ("numpy", "pillow", "ipywidgets", "torch")}},
                  load_average=[round(x, 2) for x in os.getloadavg()[:2]], seconds_taken=round(time.time() - began, 1),
                  samples=a.samples, picture=[a.side, a.side * 3 // 4], seconds=seconds,
                  memory=dict(note="200 pages: characters in the widgets' values before and after, widgets alive, bytes that Python's allocators hold more",
                              page_characters=[again[0]["pages_bytes"][0], again[0]["pages_bytes"][1]], widgets=again[0]["widgets"],
                              traced_bytes=spread([r["traced_bytes"] for r in again], 0)),
                  note=__doc__.split("\n\n")[1].replace("\n", " ").strip())
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__": main()
