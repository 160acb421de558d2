"""Does a LoRA of backward pairs edit as well as one of true pairs? On the learnt tiny model, five seeds.

`python benchmarks/backward_pairs.py` takes photographs and their negatives. True pairs have the photograph before and
the negative after. For backward pairs only the negatives are given: the tiny model, which knows "invert the colors",
makes the images before, and `pairs_from_results` checks them. Both train the same instruction, which the model does
not know, with the same settings, and edit the same held-out photographs. Without LoRA is beside them. The error is the
root mean square difference from the true negative, grey levels, mean of the held-out photographs.
About two minutes a seed on two idle cores. The results go to benchmarks/results/backward_pairs.json.
"""
import argparse
import json
import os
import platform
import shutil
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import mean

SEEDS = (0, 1, 2, 3, 4)
PAIRS, HELD_OUT = 24, 8
STEPS, SAMPLING_STEPS = 30, 8
DO = "show it as a negative" # the model has not seen this instruction
OUT = Path(__file__).parent/"results"/"backward_pairs.json"


def settings(
    root:Path, # of the run
    data:Path, # training pairs
    held_out:Path,
    seed:int,
    steps:int=STEPS,
) -> dict:
    "The demo's settings, shorter."
    return dict(
        preset="tiny", data=dict(dataset_path=str(data), image_size=[96, 96], batch_size=4),
        train=dict(output_dir=str(root), max_train_steps=steps, save_interval=0, val_path=str(held_out),
                   eval_interval=0, eval_steps=None, eval_images=0, eval_at_start=False, seed=seed),
        optimizer=dict(lr=5e-3, weight_decay=0.), cache=dict(cache_dir=str(root/"cache")),
        lr_scheduler=dict(scheduler_type="cosine", warmup_steps=5),
        logging=dict(report_to="none", log_dir=str(root/"runs"), panel=False))


def held_out_error(
    trainer,
    held_out:Path,
) -> float: # grey levels
    "Mean distance of the edits of held-out photographs from their negatives."
    from PIL import Image
    import numpy as np
    from qie_nb.evaluation.eval_images import image_error
    found = []
    for before in sorted((held_out/"control_images").glob("*.png")):
        true = np.asarray(Image.open(held_out/"training_images"/before.name))
        made = trainer.predict(before, DO, num_inference_steps=SAMPLING_STEPS, true_cfg_scale=1.,
                               width=96, height=96, progress=False)
        found.append(image_error(made, true))
    return mean(found)


def run(
    root:Path,
    seed:int,
) -> dict: # {arm: error}, and how many backward pairs were kept
    "One seed."
    from qie_nb.extras.backward_pairs import pairs_from_results
    from qie_nb.tiny.photos import EDITS, PhotoEdit, make_pairs
    from qie_nb.trainer import QwenImageEditTrainer
    negative = PhotoEdit(DO, EDITS["invert"].formula)
    true = make_pairs(root/"true", negative, PAIRS, seed=seed)
    held_out = make_pairs(root/"held_out", negative, HELD_OUT, seed=100 + seed, split="held_out")
    maker = QwenImageEditTrainer(settings(root/"maker", true, held_out, seed))
    made = pairs_from_results(maker, true/"training_images", EDITS["invert"].instruction, DO, root/"backward",
                              num_inference_steps=SAMPLING_STEPS, true_cfg_scale=1., seed=seed)
    found = {"kept": sum(p.kept for p in made.pairs), "without LoRA": held_out_error(maker, held_out)}
    for arm in ("true", "backward"):
        trainer = QwenImageEditTrainer(settings(root/f"run_{arm}", root/arm, held_out, seed))
        trainer.cache_embeddings()
        trainer.fit()
        found[arm] = held_out_error(trainer, held_out)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    a = parser.parse_args()
    rows = {}
    for seed in a.seeds:
        root = Path(tempfile.mkdtemp())
        try:
            rows[seed] = run(root, seed)
        finally:
            shutil.rmtree(root)
        print(f"seed {seed}: {rows[seed]}", flush=True)
    arms = list(rows[a.seeds[0]])
    spread = {arm: [min(r[arm] for r in rows.values()), mean(r[arm] for r in rows.values()),
                    max(r[arm] for r in rows.values())] for arm in arms}
    facts = dict(date=date.today().isoformat(), cpu=platform.processor() or platform.machine(),
                 cores=os.cpu_count(), torch=version("torch"), diffusers=version("diffusers"),
                 pairs=PAIRS, held_out=HELD_OUT, steps=STEPS)
    OUT.write_text(json.dumps(facts | dict(seeds=rows, min_mean_max=spread), indent=1) + "\n")
    print(OUT.read_text())


if __name__ == "__main__":
    main()
