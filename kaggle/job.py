# /// script
# requires-python = ">=3.10"
# dependencies = ["qie_nb[nf4] @ git+https://github.com/qie-nb/qie_nb"]
# ///
"""Trains a LoRA on a rented machine that keeps nothing.

Pairs come from the hub, and the LoRA goes back there. `uv run job.py --pairs me/my-pairs --to
me/my-lora` installs what the lines above name and runs; docs/jobs.md has the command for Hugging
Face Jobs. `--preset tiny --pairs FOLDER` without `--to` tries it here."""
import argparse, tempfile
from pathlib import Path


def folder_of(pairs:str) -> Path:
    "A folder here, or a copy of a data set repository of the hub."
    if Path(pairs).expanduser().is_dir():
        return Path(pairs).expanduser()
    from huggingface_hub import snapshot_download
    return Path(snapshot_download(pairs, repo_type="dataset"))


def settings(
    preset:str,
    pairs:Path,
    work:Path, # gets cache, checkpoints and logs
    prompt:str=None, # one instruction for all pairs
    steps:int=None, # optimizer steps; default the preset's
) -> dict: # a configuration
    "What `QwenImageEditTrainer` is given."
    train = dict(output_dir=str(work), resume_checkpoint="auto")
    if steps:
        train["max_train_steps"] = steps
    return dict(preset=preset, data=dict(dataset_path=str(pairs), prompt=prompt), train=train,
                cache=dict(cache_dir=str(work/"cache")), logging=dict(log_dir=str(work/"runs")))


def parser() -> argparse.ArgumentParser:
    "The command line."
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--pairs", required=True, help="a data set repository of the hub, or a folder")
    p.add_argument("--to", help="the model repository that gets the LoRA; "
                                "default: it stays in --work")
    p.add_argument("--preset", default="t4", help="the machine's GPU, or tiny")
    p.add_argument("--prompt", help="one instruction for all pairs")
    p.add_argument("--steps", type=int, help="optimizer steps")
    work = tempfile.gettempdir() + "/qie_nb_job"
    p.add_argument("--work", default=work, help="a folder for cache and checkpoints")
    return p


def main(argv=None):
    "Encodes, trains, saves and uploads."
    a = parser().parse_args(argv)
    from qie_nb.trainer import QwenImageEditTrainer
    work = Path(a.work)
    trainer = QwenImageEditTrainer(settings(a.preset, folder_of(a.pairs), work, a.prompt, a.steps))
    trainer.cache_embeddings()
    trainer.fit()
    trainer.save_lora(work/"lora")
    if a.to:
        trainer.push_to_hub(a.to)


if __name__ == "__main__":
    main()
