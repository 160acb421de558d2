"""What the drift columns of an evaluation report, against truth; and whether `align_pairs` removes the drift that shifted pairs teach.

`python benchmarks/drift.py` measures (1) results made from photographs: good, shifted, zoomed, faded, blurred; (2) the learnt tiny model, trained on pairs as they are (`right`), on
pairs whose targets are shifted by 3 pixels (`shifted`), and on what `align_pairs` makes of those (`aligned`), and edits of held-out photographs by it. The truth of (2) is the shift at which
the exact edit of the control fits the result best (root mean square); it does not use `measure_alignment`. It writes results/drift.json after each run; parts: `--parts columns`, `--parts training`; about an hour on one core.
"""
import argparse, contextlib, io, json, os, platform, tempfile, time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

OUT = Path(__file__).parent/"results"/"drift.json"
SIZE, MARGIN = (384, 288), 16 # pixels
KINDS = ("good", "shifted", "zoomed", "faded", "blurred")
SEEDS, ARMS, SHIFT = (0, 1, 2), ("shifted", "aligned", "right"), 3
STEPS, PAIRS, HELD_OUT, SAMPLING = 120, 48, 8, 8


def window(around, size, margin, dx=0., dy=0., scale=1.):
    "The middle of an image, its content shifted by pixels and scaled around the centre."
    (w, h), s = size, scale
    box = (margin + w / 2 - (w / 2 + dx) / s, margin + h / 2 - (h / 2 + dy) / s)
    return around.resize(size, Image.Resampling.BICUBIC, box=(*box, box[0] + w / s, box[1] + h / s))


def stored(image, quality=95): # as an evaluation's file
    raw = io.BytesIO()
    image.save(raw, "JPEG", quality=quality)
    return np.asarray(Image.open(raw).convert("RGB"))


def made_of(around, size=SIZE, margin=MARGIN) -> dict: # PIL image with the target in its middle; {kind: uint8 [H, W, 3]}
    middle = window(around, size, margin)
    faded = Image.fromarray((np.asarray(middle) * 0.8 + 30).round().astype(np.uint8))
    made = dict(good=middle, shifted=window(around, size, margin, 2.5, -1.5), zoomed=window(around, size, margin, scale=1.015), faded=faded, blurred=middle.filter(ImageFilter.GaussianBlur(1.2)))
    return {k: stored(im) for k, im in made.items()}


def scenes(n, size=SIZE, margin=MARGIN, seed=0): # (control, target, target with its surroundings)
    "Photographs with a local edit: a coloured ellipse."
    from PIL import ImageDraw
    from qie_nb.tiny.photos import crops
    rng, whole = np.random.default_rng(seed), (size[0] + 2 * margin, size[1] + 2 * margin)
    for around in crops(n // 2, whole, seed, "held_out") + crops(n - n // 2, whole, seed, "more"):
        control, edited = window(around, size, margin), around.copy()
        (x, y), (w, h) = rng.uniform(0.25, 0.5, 2) * whole, rng.uniform(0.15, 0.3, 2) * whole
        ImageDraw.Draw(edited).ellipse((x, y, x + w, y + h), fill=tuple(rng.integers(0, 256, 3).tolist()))
        yield np.asarray(control), np.asarray(window(edited, size, margin)), edited


def columns(n=12) -> dict: # {kind: {column: {median, min, max, told}}}
    from qie_nb.evaluation.eval_images import COLUMNS, drift_of
    rows = {k: [] for k in KINDS}
    for control, target, edited in scenes(n):
        for kind, image in made_of(edited).items(): rows[kind].append(drift_of(image, control, target))
    summed = lambda v, n: dict(median=float(np.median(v)), min=min(v), max=max(v), told=len(v), of=n)
    return {k: {c: summed(v, len(r)) for c in COLUMNS if (v := [x[c] for x in r if c in x])} for k, r in rows.items()}


def seconds() -> dict: # of the processor, which other work on the machine does not change
    "What measuring one image takes, in the middle of five."
    from qie_nb.evaluation.eval_images import drift_of
    out = {}
    for side in (512, 1024):
        times, (control, target, _) = [], next(scenes(2, (side, side)))
        for _ in range(5):
            began = time.process_time()
            drift_of(target, control, target)
            times.append(time.process_time() - began)
        out[f"{side} x {side}"] = round(sorted(times)[2], 2)
    return out


def pairs(folder, edit, n, seed, split, shift=0, size=(96, 96), margin=8):
    "Pairs whose targets are shifted to the right; real pixels come in at the edge. Crops without detail are left out."
    from qie_nb.tiny.photos import crop, photos
    for d in ("training_images", "control_images"): (folder/d).mkdir(parents=True, exist_ok=True)
    rng, k, i = np.random.default_rng(seed), 0, 0
    while i < n:
        around, k = crop(photos(split)[k % len(photos(split))], (size[0] + 2 * margin, size[1] + 2 * margin), rng, (2., 4.)), k + 1
        if np.abs(np.diff(np.asarray(around.convert("L"), float), axis=1)).mean() < 5: continue
        window(around, size, margin).save(folder/"control_images"/f"{i:04}.png")
        edit(window(around, size, margin, shift)).save(folder/"training_images"/f"{i:04}.png")
        (folder/"training_images"/f"{i:04}.txt").write_text(edit.instruction)
        i += 1
    return folder


def config_of(out, data, seed, steps):
    return dict(model=dict(pretrained_model_name_or_path="tiny", lora=dict(r=16, lora_alpha=16)),
                data=dict(dataset_path=str(data), image_size=[96, 96], batch_size=4, caption_dropout_rate=0.),
                train=dict(output_dir=str(out), device="cpu", mixed_precision="no", gradient_checkpointing=False, max_train_steps=steps, save_interval=0, eval_interval=0, val_fraction=0, seed=seed),
                cache=dict(cache_dir=str(out/"cache")), optimizer=dict(lr=5e-3, weight_decay=0.), lr_scheduler=dict(scheduler_type="cosine", warmup_steps=10),
                logging=dict(report_to="none", log_dir=str(out/"runs")))


def true_shift(control, edit, result, most=5, step=0.25) -> float: # pixels to the right
    "The shift of the exact edit that fits the result best; its brightness may differ by a factor and an offset."
    from scipy.ndimage import shift as moved
    edited = np.asarray(edit(control), float).mean(2)
    got, c = result.astype(float).mean(2), slice(most + 1, -most - 1)
    def misfit(dx):
        a, b = moved(edited, (0, dx), order=3, mode="nearest")[c, c].ravel(), got[c, c].ravel()
        return 1 - abs(np.corrcoef(a, b)[0, 1])
    tried = np.arange(-most, most + step / 2, step)
    return float(tried[np.argmin([misfit(dx) for dx in tried])])


def run(out, edit, arm, seed, steps=STEPS) -> dict:
    "One training and the edits of the held-out photographs by it."
    from qie_nb.data.alignment_check import align_pairs
    from qie_nb.evaluation.eval_images import drift_of
    from qie_nb.tiny.photos import EDITS
    from qie_nb.trainer import QwenImageEditTrainer
    edit, began = EDITS[edit], time.time()
    data = pairs(out/"data", edit, PAIRS, seed, "train", 0 if arm == "right" else SHIFT)
    held = pairs(out/"held_out", edit, HELD_OUT, 100 + seed, "held_out")
    done = align_pairs(str(data), out/"aligned") if arm == "aligned" else {}
    config = config_of(out, out/"aligned" if done else data, seed, steps)
    QwenImageEditTrainer(config).cache_embeddings()
    lora = QwenImageEditTrainer(config).fit().save_lora(out/"lora")
    judge, rows = QwenImageEditTrainer(config).setup_predict().load_lora(lora), []
    for f in sorted((held/"control_images").glob("*.png")):
        control, truth = Image.open(f), np.asarray(Image.open(held/"training_images"/f.name))
        image = judge.predict(control, edit.instruction, num_inference_steps=SAMPLING, true_cfg_scale=1., seed=seed, width=96, height=96, progress=False)
        Image.fromarray(image).save(out/f"edit_{f.stem}.png")
        rows.append({k: round(v, 4) for k, v in drift_of(image, control, truth).items()} | dict(true_shift=true_shift(control, edit, image)))
    return dict(arm=arm, seed=seed, aligned={k: len(v) for k, v in done.items()}, rows=rows, seconds=round(time.time() - began))


def machine() -> dict:
    return dict(device="cpu", cores=os.cpu_count(), machine=platform.machine(), python=platform.python_version()) | {p: version(p) for p in ("torch", "diffusers", "transformers", "scikit-image")}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", nargs="*", default=("columns", "training"))
    p.add_argument("--edit", default="duotone")
    p.add_argument("--arms", nargs="*", default=ARMS)
    p.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    p.add_argument("--steps", type=int, default=STEPS)
    p.add_argument("--work", type=Path, help="keep the runs' folders here")
    p.add_argument("--out", type=Path, default=OUT)
    a = p.parse_args()
    found = json.loads(a.out.read_text()) if a.out.is_file() else {}
    def keep(**parts):
        found.update(machine=machine(), **parts)
        a.out.write_text(json.dumps(found, indent=1) + "\n")
    if "columns" in a.parts: keep(columns=columns(), columns_images=12, columns_size=SIZE, seconds=seconds())
    for seed in a.seeds if "training" in a.parts else ():
        for arm in a.arms:
            with contextlib.ExitStack() as stack:
                out = a.work/f"{arm}_{seed}" if a.work else Path(stack.enter_context(tempfile.TemporaryDirectory()))
                out.mkdir(parents=True, exist_ok=True)
                with contextlib.redirect_stdout(io.StringIO()): row = run(out, a.edit, arm, seed, a.steps)
            runs = [r for r in found.get("runs", []) if (r["arm"], r["seed"]) != (arm, seed)]
            keep(runs=[*runs, row], edit=a.edit, steps=a.steps, shift=SHIFT, sampling_steps=SAMPLING)
            print(arm, seed, [(r.get("dx"), r["true_shift"]) for r in row["rows"]], f"{row['seconds']} s", flush=True)


if __name__ == "__main__": main()
