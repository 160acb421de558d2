"""Does it harm an edit to train also on targets without a control image (`data.allow_missing_control`)? On the learnt tiny model.

`python benchmarks/missing_controls.py` trains the demo's edit on 48 pairs, and on the same pairs with 12 more targets (25 %) that have no control and a
prompt that describes them: once with as many steps, once with as many steps on pairs. It writes results/missing_controls.json. The error is that of
the demo: the mean over 12 crops of photographs that nothing was trained on of the root-mean-square difference in grey levels from the true edit,
encoded and decoded by the VAE; each number is the mean of three sampling seeds, and there is one for each training seed.
"""
import argparse, json, os, platform, shutil, tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np

from qie_nb.config import make_config
from qie_nb.data.dataset import ImageDataset, find_samples
from qie_nb.tiny.photos import EDIT, SEEDS, answers, demo_config, errors, truths, write_pairs, PHOTOS, make_pairs
from qie_nb.trainer import QwenImageEditTrainer

OUT = Path(__file__).parent/"results"/"missing_controls.json"
PAIRS, LONE, STEPS = 48, 12, 150
RUNS = {"pairs": (False, STEPS), "mixed, as many steps": (True, STEPS), "mixed, as many steps on pairs": (True, STEPS * (PAIRS + LONE) // PAIRS)}


def write_lone(folder):
    "Targets of other crops, each with a description."
    make_pairs(folder, EDIT, LONE, seed=2, split="train")
    shutil.rmtree(folder/"control_images")
    names = [Path(n).stem for n in PHOTOS["train"]]
    for i in range(LONE): (folder/"training_images"/f"{i:04}.txt").write_text(f"a photograph of {names[i % len(names)]}, printed in dark blue and orange")


def trained(out, name, seed):
    mixed, steps = RUNS[name]
    c = demo_config(out, steps)
    c["data"] |= dict(dataset_path=[str(out/"data"), str(out/"lone")] if mixed else str(out/"data"), allow_missing_control=mixed)
    c["train"] |= dict(output_dir=str(out/f"{name} {seed}"), seed=seed, eval_steps=None, eval_interval=0, val_path=None, val_fraction=0)
    c["logging"] = dict(report_to="none", log_dir=str(out/"runs"))
    return QwenImageEditTrainer(make_config(c)).fit()


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--seeds", type=int, default=3)
    a = p.parse_args()
    out, found = Path(tempfile.mkdtemp()), {name: [] for name in ["not trained", *RUNS]}
    write_pairs(out, PAIRS, 12), write_lone(out/"lone")
    def error(t):
        held = ImageDataset(t.config, samples=find_samples(out/"held_out"))
        held.set_areas(t.components.areas)
        return float(np.mean(errors(answers(t, held, SEEDS), truths(t, held))))
    found["not trained"].append(error(QwenImageEditTrainer(make_config(demo_config(out)))))
    for seed in range(a.seeds):
        for name in RUNS: found[name].append(error(trained(out, name, seed)))
    for name, v in found.items(): print(f"{name}: {np.mean(v):.2f} ({min(v):.2f} to {max(v):.2f})")
    machine = dict(device="cpu", cores=os.cpu_count(), machine=platform.machine()) | {n: version(n) for n in ("torch", "diffusers", "transformers", "peft")}
    facts = dict(made=datetime.now(timezone.utc).isoformat(timespec="seconds"), machine=machine, pairs=PAIRS, without_control=LONE, steps={k: n for k, (_, n) in RUNS.items()})
    OUT.write_text(json.dumps(facts | dict(error=found), indent=1) + "\n")


if __name__ == "__main__": main()
