"""Which signs tell why a run does not learn its edit? On the learnt tiny model, good runs and bad settings.

`python benchmarks/advice_trials.py --out trials.jsonl` trains each setting with each seed and appends one JSON line a
run with all that could be a sign: losses of held-out pairs as they are, with other pairs' controls, with control and
target swapped, and without caption; the same loss of training pairs; loss and gradient norm of each step; image errors
and what a blank sheet or the untouched control would have; the adapter's strength. Runs that the file has are left
out, so it can be started again after a kill; seeds are outermost. About an hour on one idle core.
`--results` then writes what the table of causes says of each run, with its measures, to results/advice.json.
"""
import argparse
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shuffled_controls import mix_up

SEEDS = (0, 1, 2, 3, 4)
RESULTS = Path(__file__).parent/"results"/"advice.json"
COLOURS = ("duotone", "sepia", "rotate", "duotone", "alien") # the edit of each seed where a setting names none
HELD_OUT, TRAINING_JUDGED = 8, 8 # pairs
LR = 5e-3 # right for the tiny model
NOISES_OF_TESTS = 1


class Setting(NamedTuple):
    """A run: what differs from the demo's configuration, and what is wrong with it."""
    name: str
    cause: str = "" # what a reader should be told; empty for a good run
    edit: str = "" # a key of `edits`, empty: the seed's colours
    second: str = "" # another edit in the same data set
    pairs: int = 24
    lr: float = LR
    rank: int = 16
    alpha: float = 16
    batch: int = 4
    dropout: float = 0. # of captions
    optimizer: str = "adamw"
    schedule: str = "constant_with_warmup"
    steps: int = 24
    middle: int = 12 # step of an evaluation before the last one
    wrong: str = "" # swapped, mixed or captions
    wrong_held_out: bool = False # are the held-out pairs wrong too?


GOOD = (
    Setting("colours"),
    Setting("12 pairs", pairs=12, rank=8, alpha=8),
    Setting("rank 4", rank=4, alpha=8, dropout=0.1, schedule="cosine"),
    Setting("adafactor", optimizer="adafactor"),
    Setting("two edits", second="invert"),
    Setting("square", edit="square"),
    Setting("blur", edit="blur"),
    Setting("known edit", edit="brighter"))
BAD = (
    Setting("lr x 10", "rate too high", lr=10 * LR),
    Setting("lr x 0.1", "rate too low", lr=0.1 * LR),
    Setting("2 pairs", "too few pairs", pairs=2, batch=2, rank=64, alpha=64, lr=2 * LR, steps=60, middle=15),
    Setting("swapped in training", "swapped sides", wrong="swapped"),
    Setting("swapped", "swapped sides", wrong="swapped", wrong_held_out=True),
    Setting("mixed up in training", "mixed-up pairs", wrong="mixed"),
    Setting("captions dropped", "captions dropped", second="invert", dropout=1.),
    Setting("edge drawing", "not seen by the loss", edit="edges"),
    Setting("4 steps", "too few steps", steps=4, middle=2),
    Setting("alpha 0.01", "adapter too weak", alpha=0.01))
MORE_BAD = ( # after all others
    Setting("lr x 30", "rate too high", lr=30 * LR),
    Setting("mixed up", "mixed-up pairs", wrong="mixed", wrong_held_out=True),
    Setting("a few pixels", "not seen by the loss", edit="dot"),
    Setting("captions mixed up", "mixed-up captions", second="invert", wrong="captions"))


def edits() -> dict: # {name: `PhotoEdit`}
    """Edits of colours, a place, sharpness and geometry."""
    from scipy.ndimage import gaussian_filter
    from qie_nb.tiny.photos import PhotoEdit, luma_channel
    from validation_loss import new_edits

    def alien(a):
        return np.stack([1 - a[..., 1], a[..., 0], 1 - a[..., 2]], -1)

    def blur(a):
        return gaussian_filter(a, (2, 2, 0))

    def edges(a):
        grey = gaussian_filter(luma_channel(a)[..., 0], 1)
        slope = np.hypot(*np.gradient(grey))
        return np.repeat(np.where(slope > 0.06, 0., 1.)[..., None], 3, -1)

    def dot(a):
        out = a.copy()
        out[8:13, 8:13] = (0.9, 0.1, 0.1)
        return out
    return new_edits() | dict(
        alien=PhotoEdit("give it alien colors", alien, known=False),
        blur=PhotoEdit("blur it softly", blur, known=False),
        edges=PhotoEdit("draw its edges with a pencil", edges, known=False),
        dot=PhotoEdit("put a small red dot into the corner", dot, known=False))


# --- data

def write_pairs(folder:Path, chosen:list, n:int, seed:int, split:str):
    """`n` pairs, of each of the edits in turn."""
    from qie_nb.tiny.photos import crops
    for name in ("training_images", "control_images"):
        (folder/name).mkdir(parents=True)
    for i, image in enumerate(crops(n, (96, 96), seed, split)):
        edit = chosen[i % len(chosen)]
        image.save(folder/"control_images"/f"{i:04}.png")
        edit(image).save(folder/"training_images"/f"{i:04}.png")
        (folder/"training_images"/f"{i:04}.txt").write_text(edit.instruction)


def swap_sides(folder:Path):
    """Controls become targets."""
    for target in sorted((folder/"training_images").glob("*.png")):
        control = folder/"control_images"/target.name
        first, second = control.read_bytes(), target.read_bytes()
        control.write_bytes(second)
        target.write_bytes(first)


def exchange_captions(folder:Path):
    """Half of the pairs get the other edit's caption, so that captions tell nothing."""
    files = sorted((folder/"training_images").glob("*.txt"))
    texts = [f.read_text() for f in files]
    for i in range(0, len(files) - 3, 4):
        files[i].write_text(texts[i + 1])
        files[i + 1].write_text(texts[i])


def spoil(folder:Path, wrong:str, seed:int):
    """Make the pairs of a folder wrong."""
    if wrong == "swapped":
        swap_sides(folder)
    elif wrong == "mixed":
        mix_up(folder, seed)
    elif wrong == "captions":
        exchange_captions(folder)


def write_data(out:Path, s:Setting, seed:int):
    """Training pairs in `data`, held-out pairs in `held_out`."""
    known = edits()
    chosen = [known[s.edit or COLOURS[seed % len(COLOURS)]]]
    if s.second:
        chosen.append(known[s.second])
    write_pairs(out/"data", chosen, s.pairs, seed, "train")
    write_pairs(out/"held_out", chosen, HELD_OUT, 100 + seed, "held_out")
    spoil(out/"data", s.wrong, seed)
    if s.wrong_held_out:
        spoil(out/"held_out", s.wrong, seed)


def digest_of(folder:Path) -> str:
    """Of names and contents of the files below a folder."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            found.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return found.hexdigest()


def config_of(out:Path, cache:Path, s:Setting, seed:int) -> dict:
    """The demo's configuration with the setting's changes."""
    warmup = min(5, s.steps // 4)
    return dict(
        model=dict(pretrained_model_name_or_path="tiny", lora=dict(r=s.rank, lora_alpha=s.alpha)),
        data=dict(dataset_path=str(out/"data"), image_size=[96, 96], batch_size=s.batch,
                  caption_dropout_rate=s.dropout),
        train=dict(output_dir=str(out), device="cpu", mixed_precision="no", gradient_checkpointing=False,
                   max_train_steps=s.steps, save_interval=0, eval_interval=0, eval_at_start=False,
                   eval_images=2, eval_num_inference_steps=8, val_path=str(out/"held_out"), seed=seed),
        cache=dict(cache_dir=str(cache)),
        optimizer=dict(name=s.optimizer, lr=s.lr, weight_decay=0.),
        lr_scheduler=dict(scheduler_type=s.schedule, warmup_steps=warmup),
        logging=dict(report_to="none", log_dir=str(out/"runs")))


# --- measures

def swapped_batch(trainer, dataset, which, batch) -> dict:
    """Control and target of each pair exchanged."""
    return {**batch, "pixel_latent": batch["control_latent"], "control_latent": batch["pixel_latent"]}


def batch_without_caption(trainer, dataset, which, batch) -> dict:
    """The empty prompt's embedding for each pair."""
    from qie_nb.sampling.edits import empty_prompt
    return {**batch, "prompt_embed": [empty_prompt(trainer, dataset, i) for i in which]}


def batch_with_other_captions(trainer, dataset, which, batch) -> dict:
    """The caption of the next pair, which has another edit in sets of two."""
    from qie_nb.sampling.edits import load_batch
    others = load_batch(trainer, dataset, [(i + 1) % len(dataset) for i in which])
    return {**batch, "prompt_embed": others["prompt_embed"]}


def loss_of(trainer, dataset, change=None) -> dict: # {pair: weighted loss}
    """Losses at fixed noise, one noise sample, with changed batches."""
    from qie_nb.evaluation import validation_loss
    plain = validation_loss.load_pairs

    def load(trainer, dataset, which, *partner_and_side):
        return change(trainer, dataset, which, plain(trainer, dataset, which))
    try:
        if change is not None:
            validation_loss.load_pairs = load
        found = validation_loss.held_out_loss(trainer, dataset, NOISES_OF_TESTS)
    finally:
        validation_loss.load_pairs = plain
    return {name: row[0] for name, row in found.losses.items()}


def strengths(transformer) -> list: # of each adapted layer
    """Norm of the adapter's change relative to that of the layer's weight."""
    found = []
    for layer in transformer.modules():
        if not getattr(layer, "lora_A", None) or "default" not in layer.lora_A:
            continue
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        change = (up.detach() @ down.detach()) * layer.scaling["default"]
        found.append(float(change.norm() / layer.base_layer.weight.norm()))
    return found


def blank_error(target:np.ndarray) -> float:
    """Distance of the sheet of the target's mean colour from it, in grey levels."""
    return float(np.sqrt(np.mean((target - target.mean((0, 1)))**2.)))


def image_facts(trainer) -> list: # of {error, control, blank, white, changed}
    """What an evaluation image could be compared with, in grey levels."""
    from qie_nb.evaluation.eval_images import changed_region, eval_cases, image_error
    found = []
    for case in eval_cases(trainer):
        target = case.shown[1]
        found.append(dict(
            control=image_error(case.control, target), blank=blank_error(target),
            white=image_error(np.full_like(target, 255), target),
            changed=float(changed_region(case.control, target).mean()),
            pixels=float((np.abs(case.control.astype(float) - target).max(2) > 12).mean())))
    return found


def held_out_measures(trainer, out:Path) -> dict:
    """All measures of held-out pairs with the adapter as it is."""
    from qie_nb.evaluation.eval_images import eval_cases, image_errors, render_eval_images
    from qie_nb.evaluation.validation_loss import held_out_loss
    data = trainer.held_out
    images = render_eval_images(trainer, eval_cases(trainer), out)
    exchanged = held_out_loss(trainer, data, NOISES_OF_TESTS, exchange=True)
    found = dict(losses=held_out_loss(trainer, data).losses, image_errors=image_errors(images),
                 one_noise=loss_of(trainer, data),
                 exchanged={name: row[0] for name, row in exchanged.losses.items()},
                 swapped=loss_of(trainer, data, swapped_batch),
                 without_caption=loss_of(trainer, data, batch_without_caption))
    if len({s.prompt for s in data.samples}) > 1:
        found["other_captions"] = loss_of(trainer, data, batch_with_other_captions)
    return found


def training_measures(trainer, folder:Path) -> dict:
    """The loss of some training pairs at fixed noise."""
    from qie_nb.data.samples import find_samples
    samples = find_samples(folder)[:TRAINING_JUDGED]
    return dict(training=loss_of(trainer, trainer.data.subset(trainer.held_out, samples)))


def recorder(out:Path, s:Setting, first:dict):
    """A callback that measures before the first step, in the middle and at the end.

    `first` keeps what was measured before the first step, where no adapter has an effect, by data."""
    from qie_nb.evaluation.validation_loss import held_out_loss
    from qie_nb.training.callbacks import Callback

    class Recorder(Callback):
        def __init__(self):
            self.evaluations, self.loss, self.norm, self.rate = {}, [], [], []

        def on_train_begin(self, t):
            held_out, data = digest_of(out/"held_out"), digest_of(out/"data")
            if held_out not in first:
                first[held_out] = held_out_measures(t, out/"images") | dict(image_facts=image_facts(t))
            if data not in first:
                first[data] = training_measures(t, out/"data")
            self.evaluations[0] = first[held_out] | first[data]

        def on_step_end(self, t):
            self.loss.append(float(t.state.loss))
            self.norm.append(float(t.state.grad_norm))
            self.rate.append(float(t.state.lr))
            if t.global_step == s.middle:
                self.evaluations[s.middle] = dict(losses=held_out_loss(t, t.held_out).losses)
            if t.global_step == s.steps:
                self.evaluations[s.steps] = held_out_measures(t, out/"images") | training_measures(t, out/"data")
                self.strengths = strengths(t.transformer)
    return Recorder()


def run(s:Setting, seed:int, cache:Path, first:dict) -> dict:
    """One run's measures."""
    from qie_nb.trainer import QwenImageEditTrainer
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        write_data(out, s, seed)
        config, record = config_of(out, cache, s, seed), recorder(out, s, first)
        QwenImageEditTrainer(config).cache_embeddings()
        trainer = QwenImageEditTrainer(config, callbacks=[record])
        trainer.fit()
        config = trainer.config.train
        edit = s.edit or COLOURS[seed % len(COLOURS)]
        return dict(
            setting=s.name, cause=s.cause, seed=seed, edit=edit, facts=s._asdict(),
            loss=record.loss, grad_norm=record.norm, lr=record.rate, strengths=record.strengths,
            max_grad_norm=config.max_grad_norm, skipped=trainer.state.skipped,
            evaluations=record.evaluations)


# --- what the table of causes says of them

def plain(losses:dict) -> dict: # {pair: weighted loss}
    """Losses with or without those of the noise levels."""
    return {name: row[0] if isinstance(row, list) else row for name, row in losses.items()}


def mean_of(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def measures_of_run(row:dict): # `Measures` at the last evaluation
    """A recorded run as an evaluation sees it."""
    from qie_nb.evaluation.validation_loss import Measures, loss_ratio
    steps = sorted(row["evaluations"], key=int)
    first, middle, last = (row["evaluations"][step] for step in steps)
    _, half, end = map(int, steps)
    start, then, now = (mean_of(plain(e["losses"]).values()) for e in (first, middle, last))
    before = (start - then) / half
    images, facts = first["image_facts"], row["facts"]
    return Measures(
        step=end, steps=facts["steps"],
        held_out=loss_ratio(plain(first["losses"]), plain(last["losses"])),
        training=loss_ratio(first["training"], last["training"]),
        swapped=loss_ratio(first["swapped"], last["swapped"]),
        controls=loss_ratio(last["one_noise"], last["exchanged"]),
        controls_before=loss_ratio(first["one_noise"], first["exchanged"]),
        pace=(then - now) / (end - half) / before if before > 0 else 0.,
        image=mean_of(last["image_errors"].values()),
        image_before=mean_of(first["image_errors"].values()),
        control=mean_of(image["control"] for image in images),
        blank=mean_of(image["blank"] for image in images),
        pairs=facts["pairs"], lr=facts["lr"], optimizer=facts["optimizer"],
        rank=facts["rank"], alpha=facts["alpha"], dropout=facts["dropout"])


def outcome(cause:str, advice) -> str:
    """right, cannot tell, nothing, wrong or false alarm. A good run should get nothing."""
    if not cause:
        return {"": "nothing", "cannot tell": "cannot tell"}.get(advice.cause, "false alarm")
    if advice.cause in ("", "cannot tell"):
        return advice.cause or "nothing"
    return "right" if advice.cause == cause else "wrong"


def judged(rows:list) -> list: # of {setting, cause, seed, edit, named, outcome, doubt, measures}
    """What the table says of recorded runs."""
    from qie_nb.evaluation.validation_loss import advise, doubt
    found = []
    for row in rows:
        measures = measures_of_run(row)
        advice = advise(measures)
        facts = {name: row[name] for name in ("setting", "cause", "seed", "edit")}
        found.append(facts | dict(named=advice.cause, outcome=outcome(row["cause"], advice), doubt=doubt(measures),
                                  measures=rounded(measures._asdict())))
    return found


def recorded(measures:dict): # `Measures`
    """Measures as results/advice.json has them."""
    from qie_nb.evaluation.validation_loss import Interval, Measures
    return Measures(**{name: Interval(*v) if isinstance(v, list) else v for name, v in measures.items()})


def line_of(measures) -> str: # `Measures`
    """The line that an evaluation prints of a recorded run.

    Its losses are relative: those without LoRA are 1."""
    from qie_nb.evaluation.compare import Evaluation
    from qie_nb.evaluation.validation_loss import LossChange
    found = measures.held_out
    change = LossChange(1., found.mean, found, 8) if found else None
    return str(Evaluation(measures, 1., change))


def write_results(trials:Path, out:Path=RESULTS):
    """Judge the recorded runs, in the order of the settings."""
    rows = [json.loads(line) for line in trials.read_text().splitlines()]
    order = [s.name for s in (*GOOD, *BAD, *MORE_BAD)]
    rows.sort(key=lambda row: (order.index(row["setting"]), row["seed"]))
    lines = ",\n".join(json.dumps(row) for row in judged(rows))
    out.write_text(f'{{"machine": {json.dumps(rows[0]["machine"])}, "steps": {GOOD[0].steps}, "runs": [\n{lines}]}}\n')


def machine() -> dict:
    """The device and the versions."""
    import torch
    packages = ("torch", "diffusers", "transformers", "peft")
    return dict(device="cpu", cores=os.cpu_count(), threads=torch.get_num_threads(), machine=platform.machine(),
                python=platform.python_version()) | {name: version(name) for name in packages}


def rounded(value):
    """Numbers to five significant figures, so that the file stays small."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(v) for v in value]
    return value


def run_all(settings:list, seed:int, out:Path, cache:Path):
    """Append the measures of each run that the file lacks."""
    done, first = set(), {}
    if out.is_file():
        done = {(r["setting"], r["seed"]) for r in map(json.loads, out.read_text().splitlines())}
    for s in settings:
        if (s.name, seed) in done:
            continue
        began = time.time()
        row = run(s, seed, cache, first) | dict(seconds=round(time.time() - began, 1), machine=machine())
        with out.open("a") as f:
            f.write(json.dumps(rounded(row)) + "\n")
        print(f"{s.name}, seed {seed}: {row['seconds']} s", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--settings", nargs="*", help="names; default all")
    p.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    p.add_argument("--out", type=Path, required=True, help="JSON lines, one a run")
    p.add_argument("--cache", type=Path, help="folder for encoded images")
    p.add_argument("--results", action="store_true", help="train nothing: judge the runs of --out")
    a = p.parse_args()
    if a.results:
        return write_results(a.out)
    for settings in ((*GOOD, *BAD), MORE_BAD):
        chosen = [s for s in settings if not a.settings or s.name in a.settings]
        for seed in a.seeds:
            run_all(chosen, seed, a.out, a.cache)


if __name__ == "__main__":
    main()
