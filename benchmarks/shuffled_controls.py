"""What a run says about its adapter if the control images are in the wrong order. On the learnt tiny model, with edits that it does not know.

`python benchmarks/shuffled_controls.py` trains, for each edit and seed, on pairs as they are (`right`), with the training pairs' control images mixed up and the held-out
pairs right (`training pairs`), and with those of all pairs mixed up (`all pairs`), 60 steps with an evaluation every 20, and collects what the run prints.
It writes results/shuffled_controls.json; about 40 minutes on two cores.
"""
import argparse, contextlib, io, json, os, platform, random, re, tempfile
from importlib.metadata import version
from pathlib import Path

OUT = Path(__file__).parent/"results"/"shuffled_controls.json"
EDITS, SEEDS, MODES = ("duotone", "sepia", "rotate"), (0, 1, 2, 3, 4), ("right", "training pairs", "all pairs")
STEPS, EVERY = 60, 20


def mix_up(root, seed):
    "Every control image gets another pair's name."
    files = sorted((root/"control_images").glob("*.png"))
    data, order = [f.read_bytes() for f in files], list(range(len(files)))
    while any(i == j for i, j in enumerate(order)): random.Random(seed).shuffle(order); seed += 1000
    for f, j in zip(files, order): f.write_bytes(data[j])


def run(out, edit, mode, seed, steps=STEPS, every=EVERY) -> list: # of {step, line, news}
    from qie_nb.tiny.photos import make_pairs
    from qie_nb.trainer import QwenImageEditTrainer
    from validation_loss import new_edits
    edits = new_edits()
    for name, n, s, split in (("data", 48, seed, "train"), ("held_out", 12, 100 + seed, "held_out")):
        make_pairs(out/name, edits[edit], n, seed=s, split=split)
        if mode == "all pairs" or mode == "training pairs" and name == "data": mix_up(out/name, seed)
    config = dict(
        model=dict(pretrained_model_name_or_path="tiny", lora=dict(r=16, lora_alpha=16)), data=dict(dataset_path=str(out/"data"), image_size=[96, 96], batch_size=4, caption_dropout_rate=0.),
        train=dict(output_dir=str(out), device="cpu", mixed_precision="no", gradient_checkpointing=False, max_train_steps=steps, save_interval=0, eval_interval=0, eval_steps=every,
                   val_path=str(out/"held_out"), seed=seed), cache=dict(cache_dir=str(out/"cache")), optimizer=dict(lr=5e-3, weight_decay=0.),
        lr_scheduler=dict(scheduler_type="cosine", warmup_steps=10), logging=dict(report_to="none", log_dir=str(out/"runs")))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        QwenImageEditTrainer(config).cache_embeddings()
        QwenImageEditTrainer(config).fit()
    lines, rows = said.getvalue().splitlines(), []
    for line in lines:
        found = re.match(r"step (\d+): ", line)
        if found:
            rows.append(dict(step=int(found[1]), line=line, news=""))
        elif rows and line.startswith("advice: "):
            rows[-1]["news"] = line
    return rows


def verdicts(rows) -> dict:
    """What the run said in all: better than no adapter, worse, control images not used.

    False words are judged by `wrong`."""
    later = [r for r in rows if r["step"]]
    verdict = r"step \d+: (better|worse|lower loss|not clearly \w+) than without LoRA"
    against = [re.match(verdict, r["line"])[1] for r in later]
    return dict(against=against, warned_by_second=any(r["news"] for r in rows[:2]), warned=[r["step"] for r in rows if r["news"]])


def wrong(mode, v) -> bool:
    "Is a word false? With right controls any warning, or no `better`; otherwise `better` alone, or no warning by the second evaluation."
    if mode == "right": return bool(v["warned"]) or set(v["against"]) != {"better"}
    return "better" in v["against"] or not v["warned_by_second"]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--edits", nargs="*", default=EDITS)
    p.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    p.add_argument("--out", type=Path, default=OUT)
    a = p.parse_args()
    results = []
    for edit in a.edits:
        for mode in MODES:
            for seed in a.seeds:
                with tempfile.TemporaryDirectory() as folder: rows = run(Path(folder), edit, mode, seed)
                v = verdicts(rows)
                results.append(dict(edit=edit, mode=mode, seed=seed, wrong=wrong(mode, v), **v, rows=rows))
                print(f"{edit}, {mode}, seed {seed}: {', '.join(v['against'])}; warned at steps {v['warned']}{' WRONG' * results[-1]['wrong']}", flush=True)
    machine = dict(device="cpu", cores=os.cpu_count(), machine=platform.machine(), python=platform.python_version()) | {p: version(p) for p in ("torch", "diffusers", "transformers", "peft")}
    a.out.write_text(json.dumps(dict(machine=machine, steps=STEPS, every=EVERY, results=results), indent=1) + "\n")
    print(f"{sum(r['wrong'] for r in results)} of {len(results)} runs say something false")


if __name__ == "__main__": main()
