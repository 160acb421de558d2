"""Do evaluation images in four steps without guidance rank checkpoints as twenty steps with guidance do? On the learnt tiny model.

`python benchmarks/few_steps.py` trains the adapters of validation_loss.py (good, slow, overfitted, too high a rate) on edits that the model
does not know, edits twelve held-out crops with each checkpoint in both ways, and writes results/few_steps.json: Spearman's coefficient
between the two mean distances from the true edit, and the forward passes of an image. The embedded model has no Lightning file; it is
sampled in four steps as it is.
"""
import argparse, json, shutil, sys, tempfile
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from validation_loss import RUNS, config_of, machine, new_edits, spearman, train

OUT = Path(__file__).parent/"results"/"few_steps.json"
WAYS = dict(twenty=dict(eval_schedule="none", eval_num_inference_steps=20), four=dict(eval_schedule="lightning"))


def errors_of(judge, cases, way) -> list:
    from qie_nb.evaluation.eval_images import edit_cached, eval_sampling, image_error
    for k, v in WAYS[way].items(): setattr(judge.config.train, k, v)
    s, passes = eval_sampling(judge.config), []
    hook = judge.transformer.register_forward_pre_hook(lambda *_: passes.append(1))
    made = [judge.decode_vae_latent(edit_cached(judge, c, *s[:2], overrides=s.overrides))[0] for c in cases]
    hook.remove()
    return [image_error(a, c.shown[1]) for a, c in zip(made, cases)], len(passes) / len(cases)


def measure(out, edit, runs=RUNS, crops=12) -> dict:
    from qie_nb.evaluation.eval_images import pair_cases
    from qie_nb.tiny.photos import make_pairs
    from qie_nb.trainer import QwenImageEditTrainer
    formula = new_edits()[edit]
    for n in sorted({r["pairs"] for r in runs.values()}): make_pairs(out/f"data_{edit}_{n}", formula, n, seed=0, split="train")
    make_pairs(out/f"held_out_{edit}", formula, crops, seed=1, split="held_out")
    made = [dict(run="base", step=0)] + [row for name, run in runs.items() for row in train(out, name, run, edit)]
    judge = QwenImageEditTrainer(config_of(out, next(iter(runs.values())), edit))
    judge.make_loader()
    cases, rows, passes = pair_cases(judge, judge.held_out, crops), [], {}
    for row in made:
        if "lora" in row: judge.load_lora(row["lora"])
        errors = {}
        judge.components.get("transformer")
        for way in WAYS: errors[way], passes[way] = errors_of(judge, cases, way)
        rows.append(dict(run=row["run"], step=row["step"], **{w: round(float(np.mean(e)), 2) for w, e in errors.items()}))
        print(edit, rows[-1], flush=True)
    return dict(spearman=round(spearman(*([r[w] for r in rows] for w in WAYS)), 3), passes=passes, rows=rows)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--edits", nargs="+", default=["duotone"])
    p.add_argument("--work", help="folder for data and adapters, kept and taken up again; default a temporary one")
    a = p.parse_args()
    work, results = Path(a.work or tempfile.mkdtemp()), json.loads(OUT.read_text())["results"] if OUT.is_file() else {}
    for edit in a.edits:
        results[edit] = measure(work, edit)
        print(edit, results[edit]["spearman"], results[edit]["passes"], flush=True)
        facts = dict(made=datetime.now(timezone.utc).isoformat(timespec="seconds"), machine=machine(), runs=RUNS, crops=12, ways=WAYS)
        OUT.write_text(json.dumps(facts | dict(results=results), indent=1) + "\n")
    if not a.work: shutil.rmtree(work)


if __name__ == "__main__": sys.exit(main())
