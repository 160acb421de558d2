"""What does it cost to use a LoRA with other positions of image tokens than it was trained with? On the learnt tiny model.

`python benchmarks/image_positions.py` trains adapters in both modes of `model.image_positions`, edits photographs that nothing was trained on in both
modes, and writes results/image_positions.json. Two tasks: one instruction for all pairs (the demo's), and three instructions, where the text decides
what to do. The error is the mean over the photographs of the root-mean-square difference in grey levels from the true edit, encoded and decoded by
the VAE; each number is the mean of three sampling seeds. The spread is over the training seeds. It needs a diffusers and transformers whose pipelines
encode with running positions, else both modes are the same.
"""
import argparse, json, os, platform, tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np

from qie_nb.config import make_config
from qie_nb.data.dataset import ImageDataset, find_samples
from qie_nb.models.variants.text_to_image import installed_positions
from qie_nb.tiny.photos import SEEDS, answers, demo_config, errors, truths, make_pairs
from qie_nb.trainer import QwenImageEditTrainer

OUT = Path(__file__).parent/"results"/"image_positions.json"
TASKS = dict(one_instruction=["duotone"], three_instructions=["duotone", "sepia", "invert"])
MODES = "3d", "installed"


def config_of(out, task, mode, seed, steps):
    c = demo_config(out/task, steps)
    c["model"]["image_positions"] = mode
    c["data"]["dataset_path"] = [str(out/task/f"data_{e}") for e in TASKS[task]]
    c["train"] |= dict(output_dir=str(out/task/f"{mode}_{seed}"), seed=seed, eval_steps=None, eval_interval=0, val_path=None, val_fraction=0)
    c["cache"]["cache_dir"], c["logging"] = str(out/"cache"), dict(report_to="none", log_dir=str(out/"runs"))
    return make_config(c)


def error(out, task, trained, used, seed, steps): # one per sampling seed
    t = QwenImageEditTrainer(config_of(out, task, used, seed, steps))
    if trained: t.load_lora(out/task/f"{trained}_{seed}"/"lora")
    found = []
    for e in TASKS[task]:
        held = ImageDataset(t.config, samples=find_samples(out/task/f"held_{e}"))
        held.set_areas(t.components.areas)
        found.append(errors(answers(t, held, SEEDS), truths(t, held)))
    return np.mean(found, 0)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--folder", type=Path, help="keep the runs here; what is there is not trained again")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--steps", type=int, default=150)
    a = p.parse_args()
    if installed_positions("QwenImageEditPlusPipeline") == "3d":
        raise SystemExit("the installed diffusers and transformers compute 3d positions, so there is nothing to compare")
    out, result = a.folder or Path(tempfile.mkdtemp()), {}
    for task, edits in TASKS.items():
        for e in edits:
            make_pairs(out/task/f"data_{e}", e, 48 // len(edits), seed=0, split="train")
            make_pairs(out/task/f"held_{e}", e, 12 // len(edits), seed=1, split="held_out")
        for mode in MODES:
            for seed in range(a.seeds):
                c = config_of(out, task, mode, seed, a.steps)
                if not (Path(c.train.output_dir)/"lora").is_dir(): QwenImageEditTrainer(c).fit().save_lora(Path(c.train.output_dir)/"lora")
        pairs = [(t, u) for t in (None, *MODES) for u in MODES]
        result[task] = {f"trained {t or 'not'}, used {u}": [float(error(out, task, t, u, s, a.steps).mean()) for s in range(a.seeds)] for t, u in pairs}
        for name, v in result[task].items(): print(f"{task}: {name}: {np.mean(v):.2f} ({min(v):.2f} to {max(v):.2f})")
    machine = dict(device="cpu", cores=os.cpu_count(), machine=platform.machine()) | {n: version(n) for n in ("torch", "diffusers", "transformers", "peft")}
    OUT.write_text(json.dumps(dict(made=datetime.now(timezone.utc).isoformat(timespec="seconds"), machine=machine, steps=a.steps, tasks=TASKS, error=result), indent=1) + "\n")


if __name__ == "__main__": main()
