"""What do stratified noise levels (`train.stratified_timesteps`) change? On the learnt tiny model, with an edit that it does not know.

`python benchmarks/step_variance.py` measures, with and without them, for steps of 4 samples (`--sizes 4 8` for more):
- the variance of a step's gradient over 200 draws of noise and levels for the same samples, as the sum over the adapter's numbers,
  divided by the squared length of the mean gradient; before the first step and with an adapter of 60 steps;
- the held-out loss and the distance of the edited images from the true edit after 60 steps, for five seeds.
Both kinds have the same seeds, so the differences are of pairs. results/step_variance.json has the figures.
"""
import argparse, json, shutil, sys, tempfile
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch

from validation_loss import config_of, machine, new_edits

OUT = Path(__file__).parent/"results"/"step_variance.json"
RUN = dict(pairs=48, lr=5e-3, r=16, keep=(60,))


def gradients(t, n, draws, stratified) -> torch.Tensor:
    "[draws, numbers of the adapter] of one step's samples."
    from qie_nb.sampling.edits import load_batch
    from qie_nb.training.step import sample_noise_and_sigmas, step_strata
    data, out = t.make_loader().dataset, []
    batch = load_batch(t, data, range(n))
    trained = [p for p in t.transformer.parameters() if p.requires_grad]
    for k in range(draws):
        strata = step_strata([(i, n) for i in range(n)], k, 0) if stratified else None
        eps, sigmas = sample_noise_and_sigmas(batch, [100_000 * k + i for i in range(n)], t.config.train, t.components.get("scheduler").config, strata)
        t.transformer.zero_grad()
        t.loss(batch, eps, sigmas).mean().backward()
        out.append(torch.cat([p.grad.flatten() for p in trained]))
    return torch.stack(out)


def variance(g) -> dict:
    mean = g.mean(0)
    every = ((g - mean)**2).sum(1) * len(g) / (len(g) - 1)
    scale = float((mean**2).sum())
    return dict(relative_variance=float(every.mean()) / scale, standard_error=float(every.std() / len(g)**0.5) / scale)


def trainer(out, edit, batch, seed=0, stratified=False, steps=60):
    from qie_nb.trainer import QwenImageEditTrainer
    c = config_of(out, RUN, edit)
    c["data"]["batch_size"] = batch
    c["train"] |= dict(seed=seed, stratified_timesteps=stratified, max_train_steps=steps, output_dir=str(out/f"{batch}_{seed}_{stratified}"))
    return QwenImageEditTrainer(c)


def after_training(out, edit, batch, seed, stratified) -> dict:
    from qie_nb.evaluation.eval_images import edit_cached, image_error, pair_cases
    from qie_nb.evaluation.validation_loss import held_out_loss
    t = trainer(out, edit, batch, seed, stratified).fit()
    cases = pair_cases(t, t.held_out, 12)
    errors = [image_error(t.decode_vae_latent(edit_cached(t, c, 8))[0], c.shown[1]) for c in cases]
    return dict(held_out_loss=held_out_loss(t, t.held_out).row()["held_out_loss"], image_error=float(np.mean(errors)))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--draws", type=int, default=200)
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--sizes", type=int, nargs="+", default=[4])
    p.add_argument("--edit", default="duotone")
    a = p.parse_args()
    from qie_nb.tiny.photos import make_pairs
    out, results = Path(tempfile.mkdtemp()), {}
    make_pairs(out/f"data_{a.edit}_48", new_edits()[a.edit], 48, seed=0, split="train")
    make_pairs(out/f"held_out_{a.edit}", new_edits()[a.edit], 12, seed=1, split="held_out")
    trainer(out, a.edit, 4).cache_embeddings()
    for n in a.sizes:
        row = results[f"{n} samples"] = dict(gradient={}, after_60_steps={})
        for when in ("before", "after 60 steps"):
            t = trainer(out, a.edit, n)
            if when == "before": t.set_lora()
            else: t.fit()
            t.transformer.train()
            row["gradient"][when] = {name: variance(gradients(t, n, a.draws, on)) for name, on in (("independent", False), ("stratified", True))}
            print(n, when, row["gradient"][when], flush=True)
        for seed in range(a.seeds):
            for name, on in (("independent", False), ("stratified", True)):
                row["after_60_steps"].setdefault(name, []).append(after_training(out, a.edit, n, seed + 1, on))
            print(n, seed, {k: v[-1] for k, v in row["after_60_steps"].items()}, flush=True)
        for what in ("held_out_loss", "image_error"):
            d = [b[what] - a_[what] for a_, b in zip(*row["after_60_steps"].values())]
            row[f"difference_{what}"] = dict(mean=float(np.mean(d)), sd=float(np.std(d, ddof=1)) if len(d) > 1 else None)
        facts = dict(made=datetime.now(timezone.utc).isoformat(timespec="seconds"), machine=machine(), draws=a.draws, edit=a.edit, run=RUN)
        OUT.write_text(json.dumps(facts | dict(results=results), indent=1) + "\n")
    shutil.rmtree(out)


if __name__ == "__main__": sys.exit(main())
