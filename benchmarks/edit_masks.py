"""Does `data.edit_mask: auto` help? Edits, trained with and without it, on the learnt tiny model.

`python benchmarks/edit_masks.py` trains each of three local and three global edits with five
seeds for 60 steps in each mode (`--modes none auto auto_half` for another floor), edits held-out
crops, and writes results/edit_masks.json; `python benchmarks/session_table.py --write` puts the
table into docs/measured/data.md. Error: root mean square difference in grey levels between the
edited image and the true edit seen through the VAE, inside the region that the edit changes and
outside of it; the region comes from how the pairs were made. All modes of a seed have the same
pairs, order, noise and number of steps, so their difference is paired. The spread is over the
training seeds.
"""
import argparse, json, shutil, sys, tempfile, time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
from validation_loss import machine, new_edits

OUT = Path(__file__).parent/"results"/"edit_masks.json"
SIDE, PAIRS, BATCH, STEPS, RATE = 96, 48, 2, 60, 5e-3
LOCAL, GLOBAL = ("square", "disc", "quarter"), ("duotone", "sepia", "rotate")
MODES = dict(none=dict(edit_mask="none", weight=0.1), auto=dict(edit_mask="auto", weight=0.1), auto_half=dict(edit_mask="auto", weight=0.5)) # weight: train.mask_min_weight


def edited(edit, image, rng) -> tuple: # (control, target, region or None), arrays [h, w, 3] in 0..1 and bool [h, w]
    "A pair of one of the edits. The disc is in both images, at a random place, because an edit must be told from the control."
    (h, w), inside = image.shape[:2], np.zeros(image.shape[:2], bool)
    control, target = image.copy(), image.copy()
    if edit == "disc":
        r = rng.uniform(0.14, 0.22) * h
        y, x = rng.uniform(r, h - r), rng.uniform(r, w - r)
        inside = np.hypot(*(np.mgrid[:h, :w] - np.array([y, x])[:, None, None])) < r
        control[inside], target[inside] = (0.85, 0.15, 0.1), (0.1, 0.3, 0.9)
    elif edit == "quarter":
        inside[:h // 2, w // 2:] = True
        target[inside] = 1 - target[inside]
    else:
        target = new_edits()[edit].formula(image)
        if edit == "square": inside[h // 3:2 * h // 3, w // 3:2 * w // 3] = True
    return control, target, inside if edit in LOCAL else None

INSTRUCTIONS = dict(disc="paint the red disc blue", quarter="invert the upper right quarter")


def make(folder, edit, n, seed, split) -> list: # the regions
    "Write `n` pairs."
    from qie_nb.tiny.photos import crops
    rng, regions, text = np.random.default_rng(seed), [], INSTRUCTIONS.get(edit) or new_edits()[edit].instruction
    for d in ("training_images", "control_images"): (folder/d).mkdir(parents=True, exist_ok=True)
    for i, im in enumerate(crops(n, (SIDE, SIDE), seed, split)):
        control, target, inside = edited(edit, np.asarray(im, np.float32) / 255, rng)
        for d, a in (("control_images", control), ("training_images", target)):
            Image.fromarray((a.clip(0, 1) * 255).round().astype(np.uint8)).save(folder/d/f"{i:04}.png")
        (folder/"training_images"/f"{i:04}.txt").write_text(text)
        regions.append(inside)
    return regions


def config_of(out, edit, seed=0, edit_mask="none", weight=0.1, steps=STEPS):
    return dict(
        model=dict(pretrained_model_name_or_path="tiny", lora=dict(r=16, lora_alpha=16)),
        data=dict(dataset_path=str(out/f"data_{edit}"), image_size=[SIDE, SIDE], batch_size=BATCH, caption_dropout_rate=0.0, edit_mask=edit_mask),
        train=dict(output_dir=str(out), device="cpu", mixed_precision="no", gradient_checkpointing=False, max_train_steps=steps, seed=seed,
                   save_interval=0, eval_interval=0, eval_at_start=False, eval_images=0, val_fraction=0, mask_min_weight=weight),
        cache=dict(cache_dir=str(out/"cache")), optimizer=dict(lr=RATE, weight_decay=0.0),
        lr_scheduler=dict(scheduler_type="constant_with_warmup", warmup_steps=10), logging=dict(report_to="none", log_dir=str(out/"runs")))


def errors(trainer, dataset, true, regions, sampling_steps) -> dict:
    "RMS in grey levels over all held-out crops: whole image, inside and outside the region."
    from qie_nb.data.batches import pad_prompts
    from qie_nb.models.flow_matching import sample_noise
    from qie_nb.predict import denoise, sampling_schedule
    from qie_nb.sampling.edits import eval_mode, load_batch
    batch = load_batch(trainer, dataset, range(len(dataset)))
    shape = batch["pixel_latent"].shape[1:]
    schedule = sampling_schedule(trainer.components.get("scheduler"), sampling_steps, shape[-2] * shape[-1] // 4)
    with eval_mode(trainer.transformer):
        z = denoise(trainer.transformer, schedule, sample_noise(range(len(dataset)), shape), [batch["control_latent"]], pad_prompts(list(batch["prompt_embed"])))
    square = (trainer.decode_vae_latent(z).astype(float) - np.stack(true)) ** 2
    out = dict(whole=float(np.sqrt(square.mean())))
    if regions[0] is None: return out
    inside = np.stack(regions)
    return out | dict(inside=float(np.sqrt(square[inside].mean())), outside=float(np.sqrt(square[~inside].mean())))


def prepare(out, edit, crops): # (trainer, judged data set, true images, regions, mean of the masks)
    from qie_nb.data.samples import find_samples
    from qie_nb.tiny.photos import truths
    from qie_nb.trainer import QwenImageEditTrainer
    make(out/f"data_{edit}", edit, PAIRS, 0, "train")
    regions = make(out/f"judge_{edit}", edit, crops, 2, "held_out")
    t = QwenImageEditTrainer(config_of(out, edit, edit_mask="auto"))
    t.cache_embeddings()
    data = t.make_loader().dataset
    judged = t.data.subset(data, find_samples(out/f"judge_{edit}"), edit_mask="none")
    return judged, truths(t, judged), regions, float(np.mean([data.mask(i).mean() / 255 for i in range(len(data))]))


def run(out, edit, seed, mode, prepared, sampling_steps, steps) -> dict: # a row
    from qie_nb.trainer import QwenImageEditTrainer
    judged, true, regions, _ = prepared
    t, began = QwenImageEditTrainer(config_of(out, edit, seed, **MODES[mode], steps=steps)), time.process_time()
    t.fit()
    row = dict(mode=mode, seed=seed, cpu_seconds=round(time.process_time() - began, 1), **errors(t, judged, true, regions, sampling_steps))
    print(edit, {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def summary(rows) -> dict: # {mode: {measure: {mean, low, high, and paired differences to `none`}}}
    "Mean and range over the seeds, and how each mode differs from `none`, seed by seed."
    out, by = {}, {(r["mode"], r["seed"]): r for r in rows}
    for mode in dict.fromkeys(r["mode"] for r in rows):
        seeds = [s for m, s in by if m == mode and ("none", s) in by]
        for what in ("whole", "inside", "outside"):
            if what not in rows[0] or not seeds: continue
            v = np.array([by[mode, s][what] for s in seeds])
            d = v - np.array([by["none", s][what] for s in seeds])
            found = out.setdefault(mode, {})[what] = dict(mean=float(v.mean()), low=float(v.min()), high=float(v.max()), seeds=len(seeds))
            if mode != "none": found |= dict(difference=float(d.mean()), sd=float(d.std(ddof=1)) if len(d) > 1 else None, lower=int((d < 0).sum()))
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--edits", nargs="+", default=[*LOCAL, *GLOBAL])
    p.add_argument("--modes", nargs="+", default=["none", "auto"], choices=[*MODES])
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--crops", type=int, default=12)
    p.add_argument("--sampling-steps", type=int, default=8)
    p.add_argument("--steps", type=int, default=STEPS)
    p.add_argument("--out", type=Path, default=OUT, help="rows that are there are kept")
    a = p.parse_args()
    work, results = Path(tempfile.mkdtemp()), json.loads(a.out.read_text())["results"] if a.out.is_file() else {}
    torch.set_num_threads(1)
    facts = dict(machine=machine(), pairs=PAIRS, batch=BATCH, steps=a.steps, rate=RATE, crops=a.crops, sampling_steps=a.sampling_steps, modes=MODES)
    prepared = {}
    for seed in range(a.seeds):
        for edit in a.edits:
            rows = results.setdefault(edit, {}).setdefault("rows", [])
            for mode in a.modes:
                if any((r["mode"], r["seed"]) == (mode, seed) for r in rows): continue
                if edit not in prepared: prepared[edit] = prepare(work, edit, a.crops)
                rows.append(run(work, edit, seed, mode, prepared[edit], a.sampling_steps, a.steps))
                results[edit] |= dict(kind="local" if edit in LOCAL else "global", mask_mean=prepared[edit][-1], summary=summary(rows))
                shutil.rmtree(work/"checkpoints", ignore_errors=True)
            a.out.parent.mkdir(exist_ok=True)
            a.out.write_text(json.dumps(dict(made=datetime.now(timezone.utc).isoformat(timespec="seconds"), **facts, results=results), indent=1) + "\n")
    shutil.rmtree(work)


if __name__ == "__main__": sys.exit(main())
