"""Do identity pairs keep what an edit should not change? On the learnt tiny model, five seeds.

`python benchmarks/identity_pairs.py` trains three local and three global edits (those of
edit_masks.py) for 120 steps with each value of `data.identity_share`, and edits held-out crops.
The error is the root mean square difference in grey levels from the true edit seen through the
VAE: inside and outside the region that the edit changes; of the instruction "keep it as it is";
and of three edits that the model knew before (grayscale, invert, brighter), mean of the three.
All shares of a seed have the same pairs, noise and number of steps, so their differences are
paired. The spread is over the training seeds. About half a minute a run on one core. The results go
to benchmarks/results/identity_pairs.json; `python benchmarks/session_table.py --write` puts the
table into docs/measured/data.md.
"""
import argparse
import json
import shutil
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import mean

import torch

sys.path.insert(0, str(Path(__file__).parent))
import edit_masks
from edit_masks import GLOBAL, LOCAL, PAIRS, SIDE
from validation_loss import machine

OUT = Path(__file__).parent/"results"/"identity_pairs.json"
SHARES = (0., 0.1, 0.25)
KNOWN = ("grayscale", "invert", "brighter") # of the tiny model
STEPS, CROPS, SAMPLING_STEPS = 120, 12, 8


class Judge:
    "Held-out crops of an edit, of keeping the image, and of the known edits, with their true images."

    def __init__(self,
        work:Path,
        edit:str, # of edit_masks.py
    ):
        from qie_nb.tiny.photos import make_pairs, truths
        from qie_nb.trainer import QwenImageEditTrainer
        edit_masks.make(work/f"data_{edit}", edit, PAIRS, 0, "train")
        self.regions = {edit: edit_masks.make(work/f"judge_{edit}", edit, CROPS, 2, "held_out")}
        for name in ("keep", *KNOWN):
            make_pairs(work/f"judge_{name}", name, CROPS, (SIDE, SIDE), 2, "held_out")
            self.regions[name] = [None]
        self.base = QwenImageEditTrainer(edit_masks.config_of(work, edit))
        self.base.cache_embeddings()
        whole = self.base.make_loader().dataset
        self.base._transformer() # loads it
        self.edit = edit
        self.data = {name: self._judged(whole, work/f"judge_{name}") for name in self.regions}
        self.true = {name: truths(self.base, data) for name, data in self.data.items()}

    def _judged(self, whole, folder:Path):
        "The pairs of a folder as a data set with the same cache."
        from qie_nb.data.samples import find_samples
        return self.base.data.subset(whole, find_samples(folder))

    def errors(self, trainer) -> dict: # grey levels
        "What a trainer's model does with each instruction."
        found = {name: edit_masks.errors(trainer, data, self.true[name], self.regions[name], SAMPLING_STEPS)
                 for name, data in self.data.items()}
        known = mean(found[name]["whole"] for name in KNOWN)
        return found[self.edit] | dict(keep=found["keep"]["whole"], known=known)


def run(
    work:Path,
    judge:Judge,
    share:float,
    seed:int,
) -> dict: # a row
    "Train one LoRA and judge it."
    from qie_nb.trainer import QwenImageEditTrainer
    settings = edit_masks.config_of(work, judge.edit, seed, steps=STEPS)
    settings["data"]["identity_share"] = share
    trainer = QwenImageEditTrainer(settings)
    trainer.fit()
    row = dict(share=share, seed=seed, **judge.errors(trainer))
    print(judge.edit, {name: round(value, 2) for name, value in row.items()}, flush=True)
    return row


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--edits", nargs="+", default=[*LOCAL, *GLOBAL])
    p.add_argument("--shares", nargs="+", type=float, default=SHARES)
    p.add_argument("--seeds", type=int, default=5)
    a = p.parse_args()
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp())
    results = {}
    for edit in a.edits:
        judge = Judge(work, edit)
        results[edit] = dict(kind="local" if edit in LOCAL else "global", base=judge.errors(judge.base), rows=[])
        for seed in range(a.seeds):
            for share in a.shares:
                results[edit]["rows"].append(run(work, judge, share, seed))
                shutil.rmtree(work/"checkpoints", ignore_errors=True)
        facts = dict(date=str(date.today()), machine=machine(), pairs=PAIRS, steps=STEPS,
                     batch=edit_masks.BATCH, crops=CROPS, sampling_steps=SAMPLING_STEPS)
        OUT.write_text(json.dumps(facts | dict(results=results), indent=1) + "\n")
    shutil.rmtree(work)


if __name__ == "__main__": sys.exit(main())
