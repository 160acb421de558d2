"""What does a Lightning LoRA do to a LoRA of one's own? On the learnt tiny model, five seeds.

`python benchmarks/with_lightning.py` first makes a stand-in for a Lightning LoRA, as published
ones are made: by distillation. The tiny model edits photographs with instructions that it knows,
in 16 guided steps at Lightning's noise levels, and a LoRA learns to go two or four of these steps
at once, without guidance. Then, for each seed, a LoRA learns an edit that the model does not know,
and edits held-out photographs alone and with Lightning at several strengths. Error and colour are
against the true edit, in grey levels; effect is how far an edit goes towards it; grid lines are of
period 16. About ten minutes on one idle core. The results go to
benchmarks/results/with_lightning.json, and from there into docs/lightning.md
(benchmarks/table.py).
"""
import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import mean

from backward_pairs import settings

SEEDS = (0, 1, 2, 3, 4)
EDIT = "duotone" # the model does not know it
KNOWN = ("keep", "grayscale", "invert", "brighter", "darker", "swap", "blue", "contrast")
PAIRS, HELD_OUT, STEPS = 24, 8, 40
CROPS, TEACHER_STEPS, GUIDANCE = 4, 16, 4. # of an instruction; as `predict` guides
UNSEEN = ("invert", "blue", "contrast") # on photographs that the stand-in has not seen
DISTILLING_STEPS, DISTILLING_RATE = 300, 5e-3
SIDE = 96 # pixels
OUT = Path(__file__).parent/"results"/"with_lightning.json"
# columns with Lightning: (steps, strength of the LoRA, strength of Lightning)
FAST = [(8, 1., 1.), (4, 1., 1.), (4, 0.8, 1.), (4, 1.25, 1.), (4, 1.5, 1.), (4, 1., 0.75),
        (4, 0., 1.)]


# --- the measure of grid lines
def planted() -> list: # of {period, height, found, of, strength}
    "Lines planted in the package's photographs: how many are found, and their mean strength."
    import numpy as np
    from qie_nb.extras.with_lightning import grid_lines
    from qie_nb.tiny.photos import photos
    images = [np.asarray(im) for split in ("train", "held_out") for im in photos(split)]
    rows = []
    for period, height in ((16, 0), *((p, h) for p in (16, 8, 12, 15, 17, 24) for h in (1, 2, 4, 8))):
        found = []
        for image in images:
            lines = np.zeros(image.shape[:2])
            lines[::period] = height
            lines[:, ::period] = height
            with_lines = (image + lines[..., None]).clip(0, 255).round().astype(np.uint8)
            found.append(grid_lines(with_lines))
        rows.append(dict(period=period, height=height, found=sum(one.found for one in found),
                         of=len(images), strength=mean(one.strength for one in found)))
    return rows


# --- the stand-in
def teach(
    trainer,
    name:str, # of a known edit
    split:str, # of the photographs
    seed:int,
) -> dict: # inputs of the transformer, noise levels, and the latents at each of them
    "Edits of one instruction by the model alone, guided, in many steps."
    import torch
    from dataclasses import replace
    from qie_nb.sampling.denoising import SCHEDULES, denoise, sampling_schedule
    from qie_nb.sampling.edits import encode_edits, make_edits
    from qie_nb.tiny.photos import EDITS, crops
    images = crops(CROPS, (SIDE, SIDE), seed=seed, split=split)
    geometry = replace(trainer.geometry(), crop=False)
    prompts = [EDITS[name].instruction] * CROPS
    edits = make_edits(trainer.components, geometry, images, prompts, height=SIDE, width=SIDE)
    predictor, variant = trainer.predictor, trainer.components.variant
    with predictor.predicting():
        encoded = encode_edits(predictor.encoder, edits, geometry, True, predictor.at)
        controls = [torch.cat([one.controls[0] for one in encoded])]
        cond = torch.cat([one.cond for one in encoded]), None
        uncond = torch.cat([one.uncond for one in encoded]), None
        draw = torch.Generator().manual_seed(seed)
        noise = torch.randn(CROPS, *encoded[0].shape, generator=draw)
        overrides = dict(SCHEDULES["lightning"].scheduler)
        tokens = variant.token_count(*noise.shape[-2:])
        schedule = sampling_schedule(trainer.components.get("scheduler"), TEACHER_STEPS, tokens,
                                     "cpu", overrides, variant)
        path = [noise]

        def keep(step, steps, latents):
            path.append(latents.clone())
        denoise(predictor.at("transformer"), schedule, noise, controls, cond, uncond, GUIDANCE,
                keep, variant=variant)
    return dict(controls=controls, cond=cond, path=path, sigmas=schedule.sigmas.tolist())


def jump(
    transformer, variant,
    lesson:dict, # of `teach`
    start:int, # number of the teacher's step
    every:int, # of the teacher's steps, to go at once
) -> tuple: # velocity as the student has it, and as it should be, packed
    "One long step of the student."
    import torch
    x, wanted = (variant.pack(lesson["path"][n]) for n in (start, start + every))
    sigma, later = lesson["sigmas"][start], lesson["sigmas"][start + every]
    controls = [variant.pack(c) for c in lesson["controls"]]
    h, w = lesson["path"][0].shape[-2:]
    places = variant.token_positions((h, w), [c.shape[-2:] for c in lesson["controls"]], len(x))
    times = torch.full((len(x),), 1000 * sigma)
    made = variant.velocity(transformer, x, controls, times, *lesson["cond"], places)
    return made, (wanted - x) / (later - sigma)


def distil(
    lessons:list, # of `teach`
    folder:Path,
) -> Path: # a LoRA with the name of a Lightning file
    "Trains the stand-in, for 4 and for 8 steps."
    import torch
    from qie_nb.trainer import QwenImageEditTrainer
    size = dict(r=16, lora_alpha=16, target_modules="all_linear")
    student = QwenImageEditTrainer(dict(preset="tiny", model=dict(lora=size)))
    student.set_lora()
    transformer, variant = student.transformer, student.components.variant
    parameters = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=DISTILLING_RATE, weight_decay=0.)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, DISTILLING_STEPS)
    draw = torch.Generator().manual_seed(0)
    for _ in range(DISTILLING_STEPS):
        lesson = lessons[int(torch.randint(len(lessons), (), generator=draw))]
        steps = 4 * int(torch.randint(1, 3, (), generator=draw))
        every = TEACHER_STEPS // steps
        start = every * int(torch.randint(steps, (), generator=draw))
        made, wanted = jump(transformer, variant, lesson, start, every)
        loss = ((made - wanted)**2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
    return Path(student.save_lora(folder/"tiny-Lightning-4steps.safetensors"))


def likeness(
    lessons:list, # of photographs that the stand-in has not seen
    steps:int,
    file:Path=None, # the stand-in; None: the model as it is
) -> float: # root mean square distance from the teacher's latents, in their standard deviations
    "How well few steps without guidance do what many guided steps do."
    import torch
    from qie_nb.trainer import QwenImageEditTrainer
    trainer = QwenImageEditTrainer(dict(preset="tiny"))
    if file:
        trainer.load_lora(file)
    transformer, variant = trainer._transformer(), trainer.components.variant
    every, found = TEACHER_STEPS // steps, []
    for lesson in lessons:
        own = lesson | dict(path=list(lesson["path"]))
        h, w = own["path"][0].shape[-2:]
        for start in range(0, TEACHER_STEPS, every):
            with torch.no_grad():
                velocity = jump(transformer, variant, own, start, every)[0]
            length = own["sigmas"][start + every] - own["sigmas"][start]
            x = variant.pack(own["path"][start]) + length * velocity
            own["path"][start + every] = variant.unpack(x, h, w)
        last = lesson["path"][-1]
        found.append(float(((own["path"][-1] - last)**2).mean()**0.5 / last.std()))
    return mean(found)


def stand_in(
    folder:Path,
) -> tuple: # its file, {steps: (distance from the teacher without and with it)}
    "A Lightning LoRA for the tiny model, and how good it is."
    from qie_nb.trainer import QwenImageEditTrainer
    trainer = QwenImageEditTrainer(dict(preset="tiny"))
    lessons = [teach(trainer, name, "train", 10 + n) for n, name in enumerate(KNOWN)]
    unseen = [teach(trainer, name, "held_out", 90 + n) for n, name in enumerate(UNSEEN)]
    file = distil(lessons, folder)
    distances = {n: [likeness(unseen, n), likeness(unseen, n, file)] for n in (8, 4)}
    return file, distances


# --- the comparison
def title_of(
    steps:int, strength:float, speed:float,
) -> str:
    "A column with Lightning."
    if not strength:
        return f"Lightning alone, {steps} steps"
    name = "LoRA" if strength == 1 else f"{strength:g} x LoRA"
    fast = "Lightning" if speed == 1 else f"{speed:g} x Lightning"
    return f"{name} + {fast}, {steps} steps"


def run(
    root:Path,
    seed:int,
    fast_file:Path, # the Lightning LoRA
) -> dict: # {column: {measure: number}}
    "One seed: train, and edit held-out photographs in all ways."
    from PIL import Image
    from qie_nb.evaluation.compare import Comparison, compare_edits
    from qie_nb.extras.with_lightning import advice, few_steps_of, lightning_columns, measured
    from qie_nb.tiny.photos import EDITS, make_pairs
    from qie_nb.trainer import QwenImageEditTrainer
    data = make_pairs(root/"data", EDIT, PAIRS, seed=seed)
    held_out = make_pairs(root/"held_out", EDIT, HELD_OUT, seed=100 + seed, split="held_out")
    trainer = QwenImageEditTrainer(settings(root/"run", data, held_out, seed, STEPS))
    trainer.cache_embeddings()
    trainer.fit()
    file = trainer.save_lora(root/"lora.safetensors")
    judge = QwenImageEditTrainer(dict(preset="tiny"))
    columns = lightning_columns(judge, file, [], seed=seed)
    for steps, strength, speed in FAST:
        fast = few_steps_of(judge, {steps: fast_file}, ())
        columns += lightning_columns(judge, file, fast, [strength], [speed], seed)[2:]
    names = sorted(path.name for path in (held_out/"control_images").glob("*.png"))
    images = [Image.open(held_out/"control_images"/name) for name in names]
    targets = [Image.open(held_out/"training_images"/name) for name in names]
    prompts = [EDITS[EDIT].instruction] * len(names)
    made = compare_edits(judge, images, prompts, targets=targets, height=SIDE, width=SIDE,
                         columns=columns, progress=False)
    found = measured(made)
    unknown = measured(Comparison(made.columns, made.edits, made.images)) # no images after
    titles = ["without LoRA, 20 steps", "LoRA, 20 steps", *(title_of(*fast) for fast in FAST)]
    kept = ("steps", "strength", "few_steps_strength", "error", "colour", "effect", "grid",
            "gridded", "place")
    rows = {}
    for title, column, alone in zip(titles, found, unknown, strict=True):
        rows[title] = {name: getattr(column, name) for name in kept}
        rows[title]["effect_of_alone"] = alone.effect
    print(f"seed {seed}: {advice(found[:4])}", flush=True)
    print(f"without images after: {advice(unknown[:4])}", flush=True)
    return dict(rows=rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    a = parser.parse_args()
    began, root, runs = time.time(), Path(tempfile.mkdtemp()), {}
    try:
        fast_file, distances = stand_in(root)
        print(f"distance from the teacher, without and with the stand-in: {distances}", flush=True)
        for seed in a.seeds:
            runs[seed] = run(root/str(seed), seed, fast_file)
    finally:
        shutil.rmtree(root)
    facts = dict(
        date=date.today().isoformat(), cpu=platform.processor() or platform.machine(), device="cpu",
        cores=os.cpu_count(), threads=os.environ.get("OMP_NUM_THREADS"), torch=version("torch"),
        diffusers=version("diffusers"), peft=version("peft"), edit=EDIT, pairs=PAIRS,
        held_out=HELD_OUT, steps=STEPS, minutes=round((time.time() - began) / 60, 1),
        load_average=os.getloadavg()[0], teacher_distance=distances)
    OUT.write_text(json.dumps(facts | dict(planted=planted(), seeds=runs), indent=1) + "\n")
    print(OUT.read_text())


if __name__ == "__main__":
    main()
