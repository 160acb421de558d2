"""Does held-out loss rank checkpoints as their true pixel error does? On the learnt tiny model, with edits that it does not know.

`python benchmarks/validation_loss.py` trains a few adapters for each edit, good ones, overfitted ones and ones at too high a rate, keeps
checkpoints on the way, and writes results/held_out.json; with `--edits` the others stay in the file as they were. For each checkpoint:
held-out loss on one set of crops; root-mean-square error in grey levels of the edited images against the true edit seen through the
VAE, on another set of crops, with several sampling seeds; and what training loss would have said, the mean of the last 20 steps in front
of it. Both sets are cut from photographs that nothing was ever trained on.

How the noise levels are weighed was chosen on `duotone` and `sepia`; `rotate` was not looked at before that, and confirms it or does not.

Checkpoints whose pixel errors cannot be told apart are not asked to be ranked. The rule, set before `rotate` was measured: going from the
best to the worst, a checkpoint is kept if its error exceeds that of the one kept last by more than twice the seed noise of the two, which
is the standard deviation, over the sampling seeds, of the difference of their errors. Held-out loss has no say in it; the correlation
over all checkpoints stands beside.
"""
import argparse, json, os, platform, shutil, sys, tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

OUT = Path(__file__).parent/"results"/"held_out.json"
EDITS = ("duotone", "sepia", "rotate", "square", "mirror")
RUNS = dict( # name: training pairs, learning rate, rank, steps at which a checkpoint is kept
    good=dict(pairs=48, lr=5e-3, r=16, keep=(10, 20, 40, 80, 150)),
    slow=dict(pairs=48, lr=1e-3, r=8, keep=(20, 60, 150)),
    overfitted=dict(pairs=2, lr=1e-2, r=64, keep=(20, 60, 150, 400)),
    too_high=dict(pairs=48, lr=5e-2, r=16, keep=(20, 60, 120)))


def new_edits() -> dict:
    "Edits that the tiny model does not know: of colours, of a place, and of the geometry."
    from qie_nb.tiny.photos import EDITS as known, PhotoEdit

    def square(a):
        (h, w), out = a.shape[:2], a.copy()
        out[h // 3:2 * h // 3, w // 3:2 * w // 3] = (0.1, 0.8, 0.2)
        return out
    return known | dict(rotate=PhotoEdit("let red become green, green blue and blue red", lambda a: a[..., [2, 0, 1]], known=False),
                        square=PhotoEdit("put a green square into the middle", square, known=False),
                        mirror=PhotoEdit("mirror it from left to right", lambda a: a[:, ::-1], known=False))


def config_of(out, run, edit):
    return dict(
        model=dict(pretrained_model_name_or_path="tiny", lora=dict(r=run["r"], lora_alpha=run["r"])),
        data=dict(dataset_path=str(out/f"data_{edit}_{run['pairs']}"), image_size=[96, 96], batch_size=min(4, run["pairs"]),
                  caption_dropout_rate=0.0),
        train=dict(output_dir=str(out), device="cpu", mixed_precision="no", gradient_checkpointing=False, max_train_steps=max(run["keep"]),
                   save_interval=0, eval_interval=0, eval_images=0, val_path=str(out/f"held_out_{edit}")),
        cache=dict(cache_dir=str(out/"cache")), optimizer=dict(lr=run["lr"], weight_decay=0.0),
        lr_scheduler=dict(scheduler_type="constant_with_warmup", warmup_steps=10), logging=dict(report_to="none", log_dir=str(out/"runs")))


def spearman(a, b) -> float:
    "Correlation of the ranks; there are no ties."
    rank = lambda v: np.argsort(np.argsort(v))
    return float(np.corrcoef(rank(a), rank(b))[0, 1])


def told_apart(errors, times=2.0) -> list:
    "Numbers of the checkpoints that are kept, from the best to the worst; `errors` is [checkpoints, sampling seeds]."
    kept, mean = [], np.mean(errors, 1)
    for i in np.argsort(mean):
        gap = errors[i] - errors[kept[-1]] if kept else None
        if not kept or gap.mean() > times * gap.std(ddof=1): kept.append(int(i))
    return kept


def train(out, name, run, edit):
    "Checkpoints of one run: name, step, training loss and folder. What an earlier call left in `out` is taken as it is."
    from qie_nb.training.callbacks import Callback
    from qie_nb.trainer import QwenImageEditTrainer
    made, losses, done = [], [], out/"lora"/f"{edit}_{name}.json"
    if done.is_file(): return json.loads(done.read_text())

    class Keep(Callback):
        def on_step_end(self, t):
            losses.append(float(t.state.loss))
            if t.global_step not in run["keep"]: return
            made.append(dict(run=name, edit=edit, step=t.global_step, training_loss=float(np.mean(losses[-20:])),
                             lora=str(t.save_lora(out/"lora"/f"{edit}_{name}_{t.global_step}"))))
    config = config_of(out, run, edit)
    QwenImageEditTrainer(config).cache_embeddings()
    QwenImageEditTrainer(config, callbacks=[Keep()]).fit()
    done.write_text(json.dumps(made))
    return made


def pixel_errors(judge, dataset, true, seeds, steps=8):
    "Mean error in grey levels over the crops, one for each seed of the sampler's noise."
    from qie_nb.evaluation.eval_images import image_error
    from qie_nb.sampling.edits import eval_mode, load_batch
    from qie_nb.predict import denoise, sampling_schedule
    from qie_nb.data.batches import pad_prompts
    from qie_nb.models.flow_matching import sample_noise
    batch, out = load_batch(judge, dataset, range(len(dataset))), []
    shape = batch["pixel_latent"].shape[1:]
    for seed in seeds:
        noise = sample_noise([1000 * seed + i for i in range(len(dataset))], shape)
        schedule = sampling_schedule(judge.components.get("scheduler"), steps, shape[-2] * shape[-1] // 4)
        with eval_mode(judge.transformer):
            z = denoise(judge.transformer, schedule, noise, [batch["control_latent"]], pad_prompts(list(batch["prompt_embed"])))
        out.append(float(np.mean([image_error(a, b) for a, b in zip(judge.decode_vae_latent(z), true)])))
    return out


def run_errors(judge, pairs=4) -> list:
    "The image errors that a run reports: held-out pairs, one seed, guidance, and the evaluation's number of steps."
    from qie_nb.evaluation.eval_images import edit_cached, image_error, pair_cases
    steps = judge.config.train.eval_num_inference_steps
    cases = pair_cases(judge, judge.held_out, pairs)
    return [image_error(judge.decode_vae_latent(edit_cached(judge, c, steps))[0], c.shown[1]) for c in cases]


def measure(out, runs=RUNS, edit="duotone", seeds=(0, 1, 2, 3, 4), crops=12, noises=2) -> list:
    "One row a checkpoint, the model without an adapter first."
    from qie_nb.data.samples import find_samples
    from qie_nb.tiny.photos import truths, make_pairs
    from qie_nb.evaluation.validation_loss import held_out_loss
    from qie_nb.trainer import QwenImageEditTrainer
    formula = new_edits()[edit]
    for n in sorted({r["pairs"] for r in runs.values()}): make_pairs(out/f"data_{edit}_{n}", formula, n, seed=0, split="train")
    make_pairs(out/f"held_out_{edit}", formula, crops, seed=1, split="held_out")
    make_pairs(out/f"judge_{edit}", formula, crops, seed=2, split="held_out")
    rows = [dict(run="base", edit=edit, step=0)] + [row for name, run in runs.items() for row in train(out, name, run, edit)]
    first = next(iter(runs.values()))
    judge = QwenImageEditTrainer(config_of(out, first, edit))
    judge.make_loader()
    with_images = judge.data.subset(judge.held_out, find_samples(out/f"judge_{edit}"))
    true, known = truths(judge, with_images), out/f"pixels_{edit}.json"
    pixels = json.loads(known.read_text()) if known.is_file() else {}
    for row in rows:
        if "lora" in row: judge.load_lora(row.pop("lora"))
        held, name = held_out_loss(judge, judge.held_out, noises), f"{row['run']} {row['step']}"
        if name not in pixels: pixels[name] = pixel_errors(judge, with_images, true, seeds)
        known.write_text(json.dumps(pixels))
        row["pixel_error_per_seed"] = pixels[name]
        four = run_errors(judge)
        row |= dict(image_error_4=float(np.mean(four)), image_error_2=(four[0] + four[-1]) / 2)
        row |= dict(pixel_error=float(np.mean(row["pixel_error_per_seed"]))) | held.row() | dict(losses=held.losses)
        print(name, {k: round(v, 4) for k, v in row.items() if isinstance(v, float)}, flush=True)
    return rows


def judge_ranking(rows) -> dict:
    "Spearman's coefficient between pixel error and each measure, over the checkpoints that can be told apart, and over all."
    errors, name = np.array([r["pixel_error_per_seed"] for r in rows]), lambda i: f"{rows[i]['run']} {rows[i]['step']}"
    kept, measures = told_apart(errors), [k for k in rows[-1] if k.startswith(("held_out_loss", "image_error")) and not k.endswith(("_low", "_high"))]

    def of(what, among):
        among = [i for i in among if what in rows[i]] # the model alone has no training loss
        return round(spearman(errors[among].mean(1), [rows[i][what] for i in among]), 3)
    return dict(checkpoints=len(rows), kept=[name(i) for i in kept], seed_noise=float(np.sqrt(np.mean(errors.var(1, ddof=1)))),
                smallest_gap=float(np.diff(errors[kept].mean(1)).min()),
                spearman={m: of(m, kept) for m in (*measures, "training_loss")},
                spearman_over_all={m: of(m, range(len(rows))) for m in (*measures, "training_loss")})


def machine() -> dict:
    return dict(device="cpu", cores=os.cpu_count(), threads=torch.get_num_threads(), machine=platform.machine(),
                python=platform.python_version(), **{p: version(p) for p in ("torch", "diffusers", "transformers", "peft")})


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--edits", nargs="+", default=EDITS)
    p.add_argument("--work", help="folder for data and adapters, kept and taken up again; default a temporary one")
    a = p.parse_args()
    work, results = Path(a.work or tempfile.mkdtemp()), json.loads(OUT.read_text())["results"] if OUT.is_file() else {}
    for edit in a.edits:
        rows = measure(work, edit=edit)
        results[edit] = dict(**judge_ranking(rows), rows=[{k: v for k, v in row.items() if k != "losses"} for row in rows])
        print(json.dumps({k: v for k, v in results[edit].items() if k != "rows"}, indent=1), flush=True)
    OUT.parent.mkdir(exist_ok=True)
    facts = dict(made=datetime.now(timezone.utc).isoformat(timespec="seconds"), machine=machine(), runs=RUNS)
    OUT.write_text(json.dumps(facts | dict(sampling_seeds=[0, 1, 2, 3, 4], sampling_steps=8, results=results), indent=1) + "\n")
    if not a.work: shutil.rmtree(work)


if __name__ == "__main__": sys.exit(main())
