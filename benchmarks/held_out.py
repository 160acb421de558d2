"""Does held-out loss rank checkpoints as their true pixel error does? On the learnt tiny model, with an edit that it does not know.

`python benchmarks/held_out.py` trains a few adapters, good ones, overfitted ones and ones at too high a rate, keeps checkpoints on the way, and
writes results/held_out.json. For each checkpoint: held-out loss on one set of crops; root-mean-square error in grey levels of the edited
pictures against the true edit seen through the VAE, on another set of crops, with several sampling seeds; and what training loss would have
said, the mean of the last 20 steps in front of it. Both sets are cut from photographs that nothing was ever trained on.

Checkpoints whose pixel error cannot be told apart are not asked to be ranked. The rule, set before anything was measured: seed noise is the
standard deviation of a checkpoint's error over the sampling seeds, pooled over all checkpoints; going from the best to the worst, a checkpoint
is kept if its error exceeds that of the one kept last by more than three times the seed noise. Held-out loss has no say in it.
"""
import argparse, json, os, platform, shutil, sys, tempfile, time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

OUT = Path(__file__).parent/"results"/"held_out.json"
RUNS = dict( # name: training pairs, learning rate, rank, steps at which a checkpoint is kept
    good=dict(pairs=48, lr=5e-3, r=16, keep=(10, 20, 40, 80, 150)),
    slow=dict(pairs=48, lr=1e-3, r=8, keep=(20, 60, 150)),
    overfitted=dict(pairs=2, lr=1e-2, r=64, keep=(20, 60, 150, 400)),
    too_high=dict(pairs=48, lr=5e-2, r=16, keep=(20, 60, 120)))


def config_of(out, run, edit):
    return dict(
        model=dict(pretrained_model_name_or_path="tiny", lora=dict(r=run["r"], lora_alpha=run["r"])),
        data=dict(dataset_path=str(out/f"data_{edit}_{run['pairs']}"), image_size=[96, 96], batch_size=min(4, run["pairs"]), caption_dropout_rate=0.0),
        train=dict(output_dir=str(out), device="cpu", mixed_precision="no", gradient_checkpointing=False, max_train_steps=max(run["keep"]),
                   save_interval=0, eval_interval=0, eval_pictures=0, val_path=str(out/f"held_out_{edit}")),
        cache=dict(cache_dir=str(out/"cache")), optimizer=dict(lr=run["lr"], weight_decay=0.0),
        lr_scheduler=dict(scheduler_type="constant_with_warmup", warmup_steps=10), logging=dict(report_to="none", log_dir=str(out/"runs")))


def spearman(a, b) -> float:
    "Correlation of the ranks; there are no ties."
    rank = lambda v: np.argsort(np.argsort(v))
    return float(np.corrcoef(rank(a), rank(b))[0, 1])


def told_apart(errors, noise, times=3.0) -> list:
    "Numbers of the checkpoints that are kept, from the best to the worst."
    kept = []
    for i in np.argsort(errors):
        if not kept or errors[i] - errors[kept[-1]] > times * noise: kept.append(int(i))
    return kept


def train(out, name, run, edit):
    "Checkpoints of one run: folder, step, training loss."
    from qie_nb.callback import Callback
    from qie_nb.trainer import QwenImageEditTrainer
    made, losses = [], []

    class Keep(Callback):
        def on_step_end(self, t):
            losses.append(float(t.state.loss))
            if t.global_step in run["keep"]:
                t.save_lora(out/"lora"/f"{edit}_{name}_{t.global_step}")
                made.append(dict(run=name, edit=edit, step=t.global_step, training_loss=float(np.mean(losses[-20:])),
                                 lora=str(out/"lora"/f"{edit}_{name}_{t.global_step}")))
    config = config_of(out, run, edit)
    QwenImageEditTrainer(config).cache_embeddings()
    QwenImageEditTrainer(config, callbacks=[Keep()]).fit()
    return made


def pixel_errors(judge, dataset, true, seeds, steps=8):
    "Mean error in grey levels over the crops, one for each seed of the sampler's noise."
    from qie_nb.demo import rms
    from qie_nb.held_out import evaluating, fetch
    from qie_nb.predict import denoise, sampling_schedule
    from qie_nb.flow import sample_noise
    batch, out = fetch(judge, dataset, range(len(dataset))), []
    shape = batch["pixel_latent"].shape[1:]
    for seed in seeds:
        noise = sample_noise([1000 * seed + i for i in range(len(dataset))], shape)
        schedule = sampling_schedule(judge.components.get("scheduler"), steps, shape[-2] * shape[-1] // 4)
        with evaluating(judge.transformer):
            z = denoise(judge.transformer, schedule, noise, [batch["control_latent"]], (batch["prompt_embed"], batch["prompt_embeds_mask"]))
        out.append(float(np.mean([rms(a, b) for a, b in zip(judge.decode_vae_latent(z), true)])))
    return out


def measure(out, runs=RUNS, edit="duotone", seeds=(0, 1, 2, 3, 4), crops=12, noises=2) -> list:
    "One row a checkpoint, the model without an adapter first."
    from qie_nb.data import ImageDataset, find_samples
    from qie_nb.demo import truths
    from qie_nb.held_out import held_out_loss
    from qie_nb.photos import make_pairs
    from qie_nb.trainer import QwenImageEditTrainer
    for n in sorted({r["pairs"] for r in runs.values()}): make_pairs(out/f"data_{edit}_{n}", edit, n, seed=0, split="train")
    make_pairs(out/f"held_out_{edit}", edit, crops, seed=1, split="held_out")
    make_pairs(out/f"judge_{edit}", edit, crops, seed=2, split="held_out")
    rows = [dict(run="base", edit=edit, step=0)] + [row for name, run in runs.items() for row in train(out, name, run, edit)]
    first = next(iter(runs.values()))
    judge = QwenImageEditTrainer(config_of(out, first, edit))
    judge.make_loader()
    with_pictures = judge._subset(judge.held_out, find_samples(out/f"judge_{edit}"))
    true = truths(judge, with_pictures)
    for row in rows:
        if "lora" in row: judge.load_lora(row.pop("lora"))
        held = held_out_loss(judge, judge.held_out, noises)
        row["pixel_error_per_seed"] = pixel_errors(judge, with_pictures, true, seeds)
        row |= dict(pixel_error=float(np.mean(row["pixel_error_per_seed"]))) | held.row() | dict(losses=held.losses)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if k not in ("losses", "pixel_error_per_seed")}, flush=True)
    return rows


def judge_ranking(rows) -> dict:
    "Spearman's coefficient between pixel error and each loss, over the checkpoints that can be told apart."
    errors = np.array([r["pixel_error"] for r in rows])
    noise = float(np.sqrt(np.mean([np.var(r["pixel_error_per_seed"], ddof=1) for r in rows])))
    kept = told_apart(errors, noise)
    pick = lambda what, among: [rows[i][what] for i in among]
    trained = [i for i in kept if "training_loss" in rows[i]]
    everyone = [i for i, r in enumerate(rows) if "training_loss" in r]
    return dict(seed_noise=noise, checkpoints=len(rows), kept=[f"{rows[i]['run']} {rows[i]['step']}" for i in kept],
                spearman_held_out=spearman(pick("pixel_error", kept), pick("held_out_loss", kept)),
                spearman_training=spearman(pick("pixel_error", trained), pick("training_loss", trained)),
                spearman_held_out_all=spearman(errors, [r["held_out_loss"] for r in rows]),
                spearman_training_all=spearman(pick("pixel_error", everyone), pick("training_loss", everyone)))


def machine() -> dict:
    return dict(device="cpu", cores=os.cpu_count(), threads=torch.get_num_threads(), machine=platform.machine(), python=platform.python_version(),
                **{p: version(p) for p in ("torch", "diffusers", "transformers", "peft")})


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--edits", nargs="+", default=["duotone", "sepia"])
    p.add_argument("--work", help="folder for data and adapters, kept; default a temporary one")
    a = p.parse_args()
    work, began, results = Path(a.work or tempfile.mkdtemp()), time.time(), {}
    for edit in a.edits:
        rows = measure(work, edit=edit)
        results[edit] = dict(**judge_ranking(rows), rows=rows)
        print(json.dumps({k: v for k, v in results[edit].items() if k != "rows"}, indent=1), flush=True)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(dict(made=datetime.now(timezone.utc).isoformat(timespec="seconds"), minutes=round((time.time() - began) / 60, 1),
                                   machine=machine(), runs=RUNS, sampling_seeds=[0, 1, 2, 3, 4], sampling_steps=8, results=results), indent=1) + "\n")
    if not a.work: shutil.rmtree(work)


if __name__ == "__main__": sys.exit(main())
