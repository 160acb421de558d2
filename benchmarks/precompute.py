"""Precompute: samples a second against the bare encoders in the same run, and the operations of a sample counted against the naive way.

`python benchmarks/precompute.py` takes the tiny model on the CPU; `--gpu` the real sizes with random weights in bfloat16 on the first GPU.
It writes results/precompute.json. The operations are counted on the meta device at the real sizes either way.
`--patches` measures only the embedding of an image's patches, as a 3-D convolution and as a product.
"""
import argparse, contextlib, gc, io, json, os, platform, shutil, sys, tempfile, time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median

OUT = Path(__file__).parent/"results"/"precompute.json"
SIDE, CAPTION = 1024, "make the sky green and remove the second boat from the left, but keep its shadow on the water"
TEXT = dict(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18944,
            vocab_size=152064, rope_scaling=dict(type="mrope", rope_type="default", mrope_section=[16, 24, 24]))
VISION = dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584, patch_size=14, window_size=112,
              fullatt_block_indexes=[7, 15, 23, 31])


# --- the real sizes, without the real weights
def qwen_vl(tokenizer=None):
    "Qwen2.5-VL-7B with its published sizes, on the default device; with a tokenizer, its numbers for images."
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    names = dict(image="image_pad", video="video_pad", vision_start="vision_start", vision_end="vision_end")
    ids = {f"{k}_token_id": tokenizer.convert_tokens_to_ids(f"<|{v}|>") for k, v in names.items()} if tokenizer else {}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, **ids))


# --- operations of a sample
def counted(run):
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    with torch.no_grad(), FlopCounterMode(display=False) as count: run()
    return count.get_total_flops()


def vae_flops(vae, size=(1024, 1024), use_2d=True):
    "{encode, decode: operations} of one image of (width, height); a multiply-add counts as two. The meta device is enough."
    import torch
    from qie_nb.models.encoders import vae_2d, vae_factor
    like, f = dict(device=vae.device, dtype=vae.dtype), vae_factor(vae)
    z = torch.empty(1, vae.config.z_dim, 1, size[1] // f, size[0] // f, **like)
    x = torch.empty(1, 3, 1, size[1], size[0], **like)
    with vae_2d(vae, use_2d): return dict(encode=counted(lambda: vae.encode(x)), decode=counted(lambda: vae.decode(z)))


def vision_flops(model, grid):
    "An image through the vision tower; its grid is known, its patches are not."
    import torch
    n = int(grid[0].prod())
    return counted(lambda: model.model.visual(torch.empty(n, 1176, device="meta"), grid_thw=grid, position_ids=torch.empty(n, 2, device="meta")))


def text_flops(model, tokens, before=0, head=False):
    "A pass of the language model, on top of the tokens before it."
    import torch
    from qie_nb.models.encoders import cache_name
    name = cache_name(model)
    make = lambda n: dict(inputs_embeds=torch.empty(1, n, 3584, device="meta"), position_ids=torch.empty(3, 1, n, dtype=torch.long, device="meta"))
    with torch.no_grad(): held = getattr(model.model.language_model(**make(before), use_cache=True), name) if before else None
    mask = torch.empty(1, before + tokens, dtype=torch.long, device="meta") if before else None
    def run():
        hidden = model.model.language_model(**make(tokens), **{name: held}, use_cache=True, attention_mask=mask).last_hidden_state
        if head: model.lm_head(hidden)
    return counted(run)


def operations(variant):
    """Of a pair of 1024x1024 with a caption and the empty prompt. Naive: each prompt in a pass of its own with images and language head,
    the VAE's convolutions in three dimensions. Ours: what `Encoder` runs (tests/encoding/test_precompute.py looks that it does)."""
    import torch
    from diffusers import AutoencoderKLQwenImage
    from PIL import Image
    from qie_nb.models.components import VARIANTS, load_component
    from qie_nb.data.images import Geometry
    from qie_nb.models.encoders import VLImages, prefix_tokens, suffix_ids
    from qie_nb.tiny.random_models import tiny_folder
    v, proc = VARIANTS[variant], load_component(tiny_folder(variant), "processor")
    image = Image.new("RGB", Geometry(vl_area=v.vl_area).vl((SIDE, SIDE)))
    front, grid = prefix_tokens(proc, v, [image]), VLImages([image]).process(proc)[1]
    rests = [len(suffix_ids(proc, v, front, p)) for p in (CAPTION, "")]
    with torch.device("meta"): vae, model = AutoencoderKLQwenImage(), qwen_vl()
    vaes = [vae_flops(vae, (SIDE, SIDE), flat)["encode"] for flat in (False, True)]
    vision = vision_flops(model, grid)
    parts = dict(naive=dict(vae=2 * vaes[0], vision=2 * vision, text=sum(text_flops(model, front.count + n, head=True) for n in rests)),
                 ours=dict(vae=2 * vaes[1], vision=vision,
                           text=text_flops(model, front.count) + sum(text_flops(model, n, front.count) for n in rests)))
    total = {k: sum(p.values()) for k, p in parts.items()}
    return dict(variant=variant, tokens=dict(front=front.count, caption=rests[0], empty=rests[1]), vision_patches=int(grid[0].prod()), **parts,
                total=total, ratio=round(total["ours"] / total["naive"], 4))


# --- samples a second
def make_pairs(root, n, side):
    import numpy as np
    from PIL import Image
    rng = np.random.default_rng(0)
    for d in ("training_images", "control_images"): (root/d).mkdir(parents=True)
    for i in range(n):
        a = np.asarray(Image.fromarray(rng.integers(0, 255, (side // 8, side // 8, 3), dtype=np.uint8)).resize((side, side))) # files like photographs'
        Image.fromarray(a).save(root/"control_images"/f"{i:05}.png")
        Image.fromarray(255 - a).save(root/"training_images"/f"{i:05}.png")
        (root/"training_images"/f"{i:05}.txt").write_text(f"{CAPTION}, number {i}")


def full_size(folder, variant, device):
    "EditModel with the real sizes and random normal weights, which no file holds."
    import torch
    from diffusers import AutoencoderKLQwenImage
    from qie_nb.devices.edit_model import EditModel
    from qie_nb.tiny.random_models import tiny_folder
    shutil.copytree(tiny_folder(variant, areas=None), folder)
    parts = EditModel(str(folder), torch.bfloat16, devices=dict(vae=device, text_encoder=device))
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device), torch.no_grad():
            made = dict(vae=AutoencoderKLQwenImage(), text_encoder=qwen_vl(parts.get("processor").tokenizer))
            for m in made.values():
                for p in m.parameters(): p.normal_(0, 0.02) if p.ndim > 1 else None
    finally: torch.set_default_dtype(before)
    for name, m in made.items():
        m.eval().requires_grad_(False)
        m.config.save_pretrained(folder/name) if name == "text_encoder" else m.save_config(folder/name)
        parts.adopt(name, m)
    return parts


def synchronised(device):
    import torch
    if torch.device(device).type == "cuda": torch.cuda.synchronize()
    return time.perf_counter()


def bare(parts, dataset, n, device, naive):
    "Seconds that the encoders alone take for samples whose images are tensors already; nothing is read or written."
    import torch
    from qie_nb.models.encoders import encode_prefix, encode_prompt, encode_suffixes, vl_images, encode_images, pixels_of
    vae, text = parts.get("vae"), (parts.get("text_encoder"), parts.get("processor"), parts.variant)
    held = dataset.images(0)
    size, control = held["image"].shape[1::-1], held["control"][0]
    from PIL import Image
    pixels = [pixels_of(vae, im, s).to(device) for im, s in ((Image.fromarray(held["image"]), size), (control, dataset.geometry.control(control.size)))]
    seen = vl_images([control], dataset.geometry)
    seen.process(text[1])
    def sample():
        for x in pixels: encode_images(vae, [x], None, not naive)
        prompts = dataset.samples[0].prompt, ""
        if naive:
            for p in prompts:
                e = encode_prompt(*text, p, seen, share_prefix=False)[0]
                with torch.no_grad(): text[0].lm_head(e)
        else:
            front = encode_prefix(*text, [seen])
            for p in prompts: encode_suffixes(*text, front, [p])
    sample()
    began = synchronised(device)
    for _ in range(n): sample()
    return synchronised(device) - began


def rates(a, root):
    "Paired in one run: precompute into an empty cache, the bare encoders, the naive ones."
    import torch
    from qie_nb.data.dataset import ImageDataset
    from qie_nb.encoding.encoder import Encoder
    from qie_nb.devices.edit_model import EditModel
    from qie_nb.encoding.precompute import precompute
    from qie_nb.tiny.random_models import tiny_folder
    device, side = ("cuda:0", SIDE) if a.gpu else ("cpu", 96)
    make_pairs(root/"set", a.samples, side)
    parts = full_size(root/"model", a.variant, device) if a.gpu else EditModel(str(tiny_folder(a.variant)))
    parts.get("vae"), parts.get("text_encoder")
    rows, settings = [], {}
    for n in range(a.runs + 1):
        dataset = ImageDataset(dict(dataset_path=str(root/"set"), image_size=[side, side], cache_dir=str(root/f"cache{n}"), caption_dropout_rate=0.1))
        encoder = Encoder(parts, dataset.cache, device, device, batch_size=a.batch_size)
        began = synchronised(device)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()): report = precompute(dataset, encoder, prefetch=a.ahead)
        took = synchronised(device) - began
        assert report.encoded == a.samples and not report.skipped, str(report)
        settings = dict(batch_size=encoder.batch_size, prefetch=a.ahead, side=side, bytes_a_sample=report.bytes // a.samples)
        row = dict(precompute=a.samples / took, **{k: a.samples / bare(parts, dataset, a.samples, device, k == "naive") for k in ("bare", "naive")})
        shutil.rmtree(root/f"cache{n}")
        gc.collect()
        if n: rows.append(row) # the first one warms up
    of = lambda f: dict(median=round(median(v := [f(r) for r in rows]), 3), min=round(min(v), 3), max=round(max(v), 3), runs=len(v))
    return dict(variant=a.variant, samples=a.samples, **settings, samples_a_second={k: of(lambda r: r[k]) for k in rows[0]},
                of_bare=of(lambda r: r["precompute"] / r["bare"]), of_naive=of(lambda r: r["precompute"] / r["naive"]),
                peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 2) if a.gpu else None)


# --- patches of an image
PATCHES = 784 # of an image of 384 x 384, as Edit-Plus sees it

def spread(values, digits):
    "Median, least and largest of several runs."
    middle = round(median(values), digits)
    return dict(median=middle, min=round(min(values), digits), max=round(max(values), digits), runs=len(values))


def one_dtype(dtype, device, runs):
    "Milliseconds of both ways, measured in turn, and how far apart their results are."
    import torch
    from qie_nb.models.encoders import patch_product
    layer = torch.nn.Conv3d(3, VISION["hidden_size"], (2, 14, 14), (2, 14, 14), bias=False, dtype=dtype, device=device)
    patches = torch.randn(PATCHES, 3, 2, 14, 14, device=device).to(dtype)

    def timed(fast):
        "Milliseconds, and the result."
        with patch_product(layer, fast):
            began = synchronised(device)
            made = layer(patches)
            took = synchronised(device) - began
        return took * 1000, made

    convolution, product = [], []
    for n in range(runs + 3):
        slow, expected = timed(False)
        fast, made = timed(True)
        if n >= 3: # the first ones warm up
            convolution.append(slow)
            product.append(fast)
    ratios = [c / p for c, p in zip(convolution, product)]
    apart = ((made - expected).abs().max() / expected.abs().max()).item()
    return dict(
        convolution_ms=spread(convolution, 2), product_ms=spread(product, 2), times_as_fast=spread(ratios, 1),
        apart=float(f"{apart:.1e}"))


def patch_times(device, runs=30):
    "The vision tower's patch embedding of one image, 3 x 2 x 14 x 14 numbers to 1280."
    import torch
    torch.manual_seed(0)
    with torch.no_grad():
        rows = dict(float32=one_dtype(torch.float32, device, runs), bfloat16=one_dtype(torch.bfloat16, device, runs))
    return dict(about=about(), patches=PATCHES, rows=rows)


def about():
    import torch
    info = Path("/proc/cpuinfo")
    rows = info.read_text().splitlines() if info.is_file() else []
    cpu = next((r.split(":")[1].strip() for r in rows if r.startswith("model name")), platform.processor())
    return dict(device=f"{cpu}, {os.cpu_count()} cores", accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                threads=torch.get_num_threads(), date=datetime.now(timezone.utc).isoformat(timespec="seconds"), load_average=os.getloadavg()[0],
                versions=dict(python=platform.python_version()) | {p: version(p) for p in ("torch", "diffusers", "transformers", "safetensors")})


def table(r):
    for o in r.get("operations", ()):
        tf = lambda p: ", ".join(f"{k} {v/1e12:.2f}" for k, v in p.items())
        print(f"{o['variant']}: 10^12 operations a sample: naive {o['total']['naive']/1e12:.1f} ({tf(o['naive'])}), "
              f"ours {o['total']['ours']/1e12:.1f} ({tf(o['ours'])}): {o['ratio']:.3f}")
    for k in ("cpu", "gpu"):
        if s := r.get(k):
            each = ", ".join(f"{n} {v['median']:.2f} ({v['min']:.2f}-{v['max']:.2f})" for n, v in s["samples_a_second"].items())
            print(f"{k} ({s['about']['accelerator'] if k == 'gpu' else s['about']['device']}), {s['variant']} at {s['side']}: samples a second: {each}; "
                  f"precompute is {s['of_bare']['median']:.2f} of the bare encoders, {s['of_naive']['median']:.2f} of the naive ones")


    for k, held in r.get("patches", {}).items():
        for dtype, row in held["rows"].items():
            slow, fast = row["convolution_ms"], row["product_ms"]
            both = f"{slow['median']:.2f} ms ({slow['min']:.2f}-{slow['max']:.2f}) as a convolution, "
            both += f"{fast['median']:.2f} ms ({fast['min']:.2f}-{fast['max']:.2f}) as a product"
            factor = row["times_as_fast"]["median"]
            times = f"{factor:.1f} times as fast, {row['apart']:.1e} apart"
            print(f"{k}, {held['patches']} patches, {dtype}: {both}: {times}")


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--gpu", action="store_true", help="full size with random weights on the first GPU; needs about 30 GB")
    p.add_argument("--variant", default="v1", choices=("v1", "2509", "2511"))
    p.add_argument("--samples", type=int, help="default 16; 32 on a GPU")
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--batch_size", default="auto", type=lambda s: s if s == "auto" else int(s))
    p.add_argument("--ahead", type=int, default=4)
    p.add_argument("--patches", action="store_true", help="only the embedding of patches")
    p.add_argument("--out", type=Path, default=OUT)
    a = p.parse_args()
    a.samples = a.samples or (32 if a.gpu else 16)
    if a.gpu:
        import torch
        if not torch.cuda.is_available(): p.error("--gpu needs a GPU, and none is here")
    result = json.loads(a.out.read_text()) if a.out.is_file() else {}
    where = "gpu" if a.gpu else "cpu"
    result.setdefault("patches", {})[where] = patch_times("cuda:0" if a.gpu else "cpu")
    if not a.patches:
        measure_all(a, result, where)
    a.out.parent.mkdir(exist_ok=True)
    a.out.write_text(json.dumps(result, indent=1) + "\n")
    table(result)


def measure_all(a, result, where):
    "Rates and operations into the results."
    root = Path(tempfile.mkdtemp())
    os.environ["QIE_NB_HOME"] = str(root/"home") # nothing is remembered in the user's own folder
    try: result[where] = dict(about=about()) | rates(a, root)
    finally: shutil.rmtree(root)
    result |= dict(operations=[operations(v) for v in ("v1", "2511")], counted_with=about()["versions"])


if __name__ == "__main__": main()
