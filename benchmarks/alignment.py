"""How well `measure_alignment` finds a known shift, zoom and rotation under eight edits, and whether it stays silent about aligned pairs.

`python benchmarks/alignment.py` writes results/alignment.json; about 5 minutes on one core. Limits were chosen on the `tuned` photographs only. `--photos FOLDER` adds a group of your own.
200 more pairs of the other photographs are aligned: a wrong number there is a false alarm.
A result is wrong if one of its numbers is off by more than 0.5 px or 0.3 %. Each pair's control is a photograph of 256 to 1024 pixels or a crop of one; its target shows the
same scene through `PIL.Image.transform` or `skimage.transform.warp` and is then edited. Pixels from outside are real (`crop`), black (`fill`), or the border's own (`edge`, `reflect`).
"""
import argparse, json, math, platform, time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageOps

OUT = Path(__file__).parent/"results"/"alignment.json"
TUNED = ["astronaut.png", "rocket.jpg", "motorcycle_left.png", "chelsea.png", "coins.png"]
HELD_OUT = ["coffee.png", "camera.png", "retina.jpg", "ihc.png", "hubble_deep_field.jpg", "gravel.png", "grass.png", "brick.png", "grace_hopper.jpg"]
SIDES, BORDERS = (256, 384, 512, 768, 1024), ("crop", "crop", "fill", "edge", "reflect")


def group(names) -> list:
    import matplotlib
    from qie_nb.tiny.photos import photo_folder
    other = Path(matplotlib.get_data_path())/"sample_data"
    return [next(f for f in (photo_folder("more")/n, other/n) if f.exists()) for n in names]


def colour(im, rng):
    a = np.asarray(im.convert("HSV")).astype(int)
    a[..., 0] = (a[..., 0] + rng.integers(40, 200)) % 256
    rgb = np.asarray(Image.fromarray(a.astype(np.uint8), "HSV").convert("RGB")) * rng.uniform(0.7, 1.1, 3)
    return Image.fromarray(rgb.clip(0, 255).astype(np.uint8))


def sepia(im, rng):
    from qie_nb.tiny.photos import EDITS as formulas
    return formulas["sepia"](im)


def blur(im, rng): return im.filter(ImageFilter.GaussianBlur(rng.uniform(1.5, 4)))


def posterize(im, rng): return ImageOps.posterize(im, int(rng.integers(1, 4)))


def inpaint(im, rng):
    "An ellipse of up to half the width and height shows another photograph."
    (w, h), other = im.size, Image.open(rng.choice(group(TUNED))).convert("RGB").resize(im.size)
    mask, size = Image.new("L", im.size), (w * rng.uniform(0.25, 0.55), h * rng.uniform(0.25, 0.55))
    x, y = rng.uniform(0, w - size[0]), rng.uniform(0, h - size[1])
    ImageDraw.Draw(mask).ellipse((x, y, x + size[0], y + size[1]), fill=255)
    return Image.composite(other, im, mask.filter(ImageFilter.GaussianBlur(2)))


def style(im, rng):
    "A median filter, coarse noise and fine noise: a painting on rough paper."
    a, (w, h) = np.asarray(im.filter(ImageFilter.MedianFilter(5)), float), im.size
    coarse = rng.normal(128, 60, (h // 2 + 1, w // 2 + 1)).clip(0, 255).astype(np.uint8)
    coarse = np.asarray(Image.fromarray(coarse).resize(im.size, Image.Resampling.BICUBIC), float)[..., None] - 128
    return Image.fromarray((a * 1.1 - 10 + coarse * rng.uniform(0.3, 0.8) + rng.normal(0, 15, a.shape)).clip(0, 255).astype(np.uint8))


def mirror(im, rng):
    (w, h), out = im.size, im.copy()
    ww, hh = int(w * rng.uniform(0.3, 0.6)), int(h * rng.uniform(0.3, 0.9))
    x, y = int(rng.integers(0, w - ww + 1)), int(rng.integers(0, h - hh + 1))
    out.paste(ImageOps.mirror(im.crop((x, y, x + ww, y + hh))), (x, y))
    return out


EDITS = dict(colour=colour, sepia=sepia, blur=blur, posterize=posterize, inpaint=inpaint, style=style, mirror=mirror, nothing=lambda im, rng: im)


def random_truth(rng) -> tuple: # dx, dy, sx, sy, rotation
    angle, length = rng.uniform(0, 2 * math.pi), rng.integers(0, 25) / 2
    dx, dy = round(2 * length * math.cos(angle)) / 2, round(2 * length * math.sin(angle)) / 2
    sx, sy, rotation = *rng.uniform(0.97, 1.03, 2), rng.uniform(-2, 2)
    kind = rng.integers(6) # shift only, one zoom, two zooms, no shift, everything twice
    if kind == 0: sx = sy = 1.
    if kind == 1: sy = sx
    if kind < 3: rotation = 0.
    return (0., 0., sx, sy, rotation) if kind == 3 else (dx, dy, sx, sy, rotation)


def inverse(truth, size, scale=1., corner=(0, 0)) -> list:
    "The affine map from target pixels to those of the photograph, for PIL."
    dx, dy, sx, sy, rotation = truth
    c, s, middle = math.cos(math.radians(rotation)), math.sin(math.radians(rotation)), np.array(size) / 2
    back = np.linalg.inv([[sx * c, sx * s], [-sy * s, sy * c]])
    return list(np.c_[back * scale, (middle - back @ (middle + (dx, dy))) * scale + corner].ravel())


def moved(photo, truth, side, border, rng) -> tuple: # control, target
    affine, bicubic = Image.Transform.AFFINE, Image.Resampling.BICUBIC
    if border == "crop":
        w, h = int(min(side, photo.width * 0.86)), int(min(side * rng.uniform(0.7, 1), photo.height * 0.86))
        scale = rng.uniform(1, max(1.001, min(photo.width / w, photo.height / h) * 0.92))
        small = photo.resize((round(photo.width / scale), round(photo.height / scale)), Image.Resampling.LANCZOS) # no aliasing
        room = small.width - w, small.height - h
        corner = [rng.uniform(0.3, 0.7) * max(0, r) for r in room]
        return [small.transform((w, h), affine, inverse(t, (w, h), 1., corner), bicubic) for t in ((0, 0, 1, 1, 0), truth)]
    shrink = min(1, side / max(photo.size))
    control = photo.resize([round(n * shrink) for n in photo.size], Image.Resampling.LANCZOS)
    data = inverse(truth, control.size)
    if border == "fill": return control, control.transform(control.size, affine, data, bicubic)
    from skimage.transform import warp
    half = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]]) # PIL counts from the corner of a pixel, scikit-image from its centre
    matrix = np.linalg.inv(half) @ np.array([*data, 0, 0, 1]).reshape(3, 3) @ half
    return control, Image.fromarray((warp(np.asarray(control), matrix, order=3, mode=border).clip(0, 1) * 255).round().astype(np.uint8))


def cases(paths, n, seed, aligned=False): # yields facts, control, target
    for i in range(n):
        rng, path = np.random.default_rng([seed, i]), paths[i % len(paths)]
        edit, truth = list(EDITS)[(i // len(paths)) % 8], random_truth(rng)
        if aligned: truth = (0., 0., 1., 1., 0.)
        side, border = int(rng.choice(SIDES)), str(rng.choice(BORDERS))
        control, target = moved(Image.open(path).convert("RGB"), truth, side, border, rng)
        yield dict(photo=path.name, edit=edit, size=control.size, border=border, truth=truth), control, EDITS[edit](target, rng)


def measured(facts, control, target) -> dict:
    from qie_nb.data.alignment import measure_alignment
    began = time.process_time()
    found = measure_alignment(control, target)
    seconds = time.process_time() - began
    errors = [None if f is None else abs(f - t) for f, t in zip(found, facts["truth"])]
    of = lambda part: max((e for e in part if e is not None), default=0.)
    return facts | dict(told=found.known, changed=found.changed, seconds=seconds, px=of(errors[:2]), scale=of(errors[2:4]), degrees=of(errors[4:]))


def summary(rows, aligned=False) -> dict:
    told, high = [r for r in rows if r["told"]], lambda key, q: round(float(np.quantile([r[key] for r in rows if r["told"]], q)), 5)
    wrong = [r for r in rows if r["px"] > 0.5 or r["scale"] > 0.003]
    untold = {e: sum(not r["told"] for r in rows if r["edit"] == e) for e in EDITS}
    out = dict(pairs=len(rows), told=len(told), told_share=round(len(told) / len(rows), 4), untold_by_edit={e: n for e, n in untold.items() if n}, false_alarms=len(wrong) if aligned else None, wrong=len(wrong))
    for key in ("px", "scale", "degrees"): out[key] = dict(median=high(key, 0.5), p95=high(key, 0.95), largest=high(key, 1))
    out["cpu_seconds"] = dict(median=high("seconds", 0.5), largest=high("seconds", 1))
    if aligned: out["listed_as_misfit"] = sum(r["px"] >= 2 or r["scale"] >= 0.005 or r["degrees"] >= 0.3 for r in rows) # by `qie-nb check`
    out["wrong_cases"] = [{k: r[k] for k in ("photo", "edit", "size", "border", "truth", "px", "scale", "degrees")} for r in wrong]
    return {k: v for k, v in out.items() if v is not None}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--photos", help="a folder of more photographs"); p.add_argument("--each", type=int, default=2, help="pairs of each photograph with each edit"); p.add_argument("--out", default=OUT)
    a = p.parse_args()
    groups = dict(tuned=group(TUNED), held_out=group(HELD_OUT))
    if a.photos: groups["others"] = sorted(f for f in Path(a.photos).iterdir() if f.suffix in (".jpg", ".png"))
    result = dict(device=platform.processor() or platform.machine(), python=platform.python_version(), versions={k: version(k) for k in ("numpy", "scipy", "scikit-image", "pillow")},
                  photographs={k: [f.name for f in v] for k, v in groups.items()}, edits=list(EDITS))
    for seed, (name, paths) in enumerate(groups.items(), 100):
        n = 8 * len(paths)
        result[name] = summary([measured(*case) for case in cases(paths, a.each * n, seed)])
        print(name, json.dumps(result[name]), flush=True)
    paths = groups["held_out"] + groups.get("others", [])
    result["aligned"] = summary([measured(*case) for case in cases(paths, 200, 1100, True)], True)
    print("aligned", json.dumps(result["aligned"]), flush=True)
    Path(a.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__": main()
