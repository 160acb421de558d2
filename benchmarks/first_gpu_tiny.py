"""Part 2 of first_gpu.py: the tiny model end to end in sixteen modes.

Each is compared with the same run on the CPU and with the plain run in float32. A mode precomputes, evaluates
before the first step, trains four steps, saves, continues for two, saves the LoRA and predicts. What is compared:
the losses (they see weights, scales, masks and noise), what of the adapter has moved (gradients), dtypes and
devices, the continued run, the prediction.
"""

import contextlib
import io
import tempfile
import time
import traceback
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from qie_nb.devices.strategies.block_swap import BlockSwapping
from qie_nb.devices.strategies.offload import OffloadedActivations
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer

STEPS, MORE = 4, 2
SIDE = 64


def mode(quantize="none", precision="no", checkpointing=True, **train) -> dict:
    "Sections of a configuration."
    settings = dict(mixed_precision=precision, gradient_checkpointing=checkpointing, compile=False) | train
    return dict(model=dict(quantize=quantize), train=settings)


MODES = {
    "float32": mode(),
    "float32, selective": mode(checkpointing="selective"),
    "float32, all kept": mode(checkpointing=False),
    "bf16": mode(precision="bf16"),
    "bf16, all kept": mode(precision="bf16", checkpointing=False),
    "fp16": mode(precision="fp16"),
    "fp16, selective": mode(precision="fp16", checkpointing="selective"),
    "nf4": mode("nf4"),
    "nf4, fp16, selective": mode("nf4", "fp16", "selective"),
    "qint8, bf16": mode("qint8", "bf16"),
    "qfloat8, bf16": mode("qfloat8", "bf16"),
    "int8": mode("int8"),
    "blocks swapped": mode(blocks_to_swap=1),
    "inputs offloaded": mode(offload_activations=True),
    "both": mode(blocks_to_swap=1, offload_activations=True),
    "compiled": mode(compile=True),
}
GPU_ONLY = ("compiled",) # compiling for a CPU takes minutes and says nothing of the GPU
REFERENCE = "float32" # what all others are compared with

# Relative difference of each loss from the plain run in float32: at least twice what was measured on a CPU.
LIMITS = {
    "float32": 1e-4,
    "bf16": 0.04,
    "fp16": 0.02,
    "nf4": 0.08,
    "qint8": 0.03,
    "qfloat8": 0.05,
    "int8": 0.03,
    "blocks": 1e-4,
    "inputs": 1e-4,
    "both": 1e-4,
    "compiled": 1e-3,
}
SAME_MODE = 0.01 # relative difference of a loss on the GPU from the same mode's on the CPU


def limit_of(name: str) -> float: # the largest of what the mode's name says
    "How far a mode's losses may be from the plain run's."
    return max(limit for word, limit in LIMITS.items() if word in name)


def write_pairs(root: Path, n: int = 6):
    "Pairs of two sizes; the edit inverts the colours."
    rng = np.random.default_rng(0)
    for folder in ("training_images", "control_images"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for i in range(n):
        shape = (SIDE, SIDE + 32, 3) if i % 2 else (SIDE, SIDE, 3)
        smooth = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(shape[1::-1], Image.BICUBIC)
        smooth.save(root / "control_images" / f"{i}.png")
        Image.fromarray(255 - np.asarray(smooth)).save(root / "training_images" / f"{i}.png")
        (root / "training_images" / f"{i}.txt").write_text("invert the colours")


def configuration(sections: dict, device: str, folder: Path, steps: int) -> dict:
    "The whole configuration of a run."
    train = dict(
        output_dir=str(folder / "out"),
        device=device,
        max_train_steps=steps,
        save_interval=0,
        save_steps=STEPS,
        eval_interval=0,
        eval_steps=STEPS,
        eval_at_start=True,
        eval_num_inference_steps=2,
        eval_images=1,
        val_fraction=0.2,
        num_processes=1,
        seed=3,
    )
    return dict(
        model=dict(
            pretrained_model_name_or_path=str(tiny_folder("2511", (SIDE * SIDE, SIDE * SIDE))),
            lora=dict(r=4, lora_alpha=8),
        )
        | sections["model"],
        data=dict(
            dataset_path=str(folder.parent / "pairs"), image_size=[SIDE, SIDE], batch_size=2, caption_dropout_rate=0.2
        ),
        cache=dict(cache_dir=str(folder / "cache")),
        optimizer=dict(lr=1e-3),
        train=train | sections["train"],
        logging=dict(log_dir=str(folder / "runs"), report_to="none", panel=False),
    )


class Losses:
    "A callback that keeps the loss of each step."

    def __init__(self):
        self.all = []

    def __getattr__(self, name):
        if name.startswith("on_") or name == "prepare":
            return lambda trainer: None
        raise AttributeError(name)

    def on_step_end(self, trainer):
        self.all.append(float(trainer.state.loss))


def adapter(trainer) -> dict: # {name: float32 tensor on the CPU}
    "The trained weights."
    parameters = trainer.transformer.named_parameters()
    return {name: p.detach().float().cpu().clone() for name, p in parameters if p.requires_grad}


def run(sections: dict, device: str, folder: Path) -> dict:
    "One mode from the first image to a prediction: what it gave."
    seen = Losses()
    trainer = QwenImageEditTrainer(configuration(sections, device, folder, STEPS), callbacks=[seen])
    report = trainer.cache_embeddings()
    trainer.fit()
    trained = {name: p for name, p in trainer.transformer.named_parameters() if p.requires_grad}
    found = dict(
        encoded=report.encoded,
        skipped=len(report.skipped),
        losses=list(seen.all),
        skipped_steps=trainer.state.skipped,
        dtypes=sorted({str(p.dtype) for p in trained.values()}),
        devices=sorted({p.device.type for p in trained.values()}),
        held_out=trainer.state.metrics.get("held_out_loss"),
        files=sorted(p.name for p in folder.rglob("held_out*.png")),
    )
    before = adapter(trainer)
    found["still"] = sorted(name for name, t in before.items() if "lora_B" in name and not t.any())
    again = Losses()
    config = configuration(sections, device, folder, STEPS + MORE)
    config["train"] |= dict(resume_checkpoint="latest")
    del trainer
    trainer = QwenImageEditTrainer(config, callbacks=[again])
    trainer.fit()
    found["continued"] = again.all
    after = adapter(trainer)
    found["moved_on"] = sum(not torch.equal(before[name], t) for name, t in after.items()) / len(after)
    found["lora"] = Path(trainer.save_lora(str(folder / "lora"))).exists()
    image = Image.open(folder.parent / "pairs" / "control_images" / "0.png")
    found["prediction"] = np.asarray(
        trainer.predict(image, "invert the colours", num_inference_steps=2, true_cfg_scale=1.0), np.float32
    )
    return found


def differences(ours, theirs) -> float:
    "The largest relative difference of two lists of losses."
    if len(ours) != len(theirs):
        return float("inf")
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(ours, theirs))


def same_noise() -> bool:
    "Are a seed's numbers in bfloat16 those of float32, rounded? torch draws them so since 2.14, not in 2.11."
    drawn = [torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=t) for t in (torch.bfloat16, torch.float32)]
    return torch.equal(drawn[0], drawn[1].bfloat16())


def faults(
    name: str, found: dict, plain: dict, on_cpu: dict, device: str
) -> tuple: # (list of sentences, measured numbers)
    "What is wrong with a run."
    wrong, limit = [], limit_of(name)
    losses = found["losses"] + found["continued"]
    numbers = dict(losses=[round(x, 5) for x in losses])
    if not np.isfinite(losses).all():
        wrong.append("a loss is not finite")
    numbers["from_float32"] = round(differences(losses, plain["losses"] + plain["continued"]), 6)
    if not numbers["from_float32"] <= limit:
        wrong.append(f"losses are {numbers['from_float32']:.2g} from the plain run's in float32 (limit {limit:g})")
    if on_cpu is not None:
        numbers["from_cpu"] = round(differences(losses, on_cpu["losses"] + on_cpu["continued"]), 6)
        if not numbers["from_cpu"] <= SAME_MODE:
            wrong.append(
                f"losses are {numbers['from_cpu']:.2g} from the same mode's on the CPU (limit {SAME_MODE:g})"
            )
    if len(found["losses"]) != STEPS or len(found["continued"]) != MORE:
        wrong.append(f"{len(found['losses'])} and {len(found['continued'])} steps instead of {STEPS} and {MORE}")
    if found["skipped"] or found["skipped_steps"]:
        wrong.append(f"{found['skipped']} samples and {found['skipped_steps']} steps were skipped")
    if found["still"]:
        wrong.append(f"no gradient reached {len(found['still'])} weights, e.g. {found['still'][0]}")
    if found["moved_on"] < 1:
        wrong.append(f"{1 - found['moved_on']:.0%} of the adapter's weights did not move after resuming")
    if found["devices"] != [device]:
        wrong.append(f"the adapter is on {found['devices']} instead of {device}")
    if found["dtypes"] != plain["dtypes"]:
        wrong.append(f"the adapter's weights are {found['dtypes']}, those of the plain run {plain['dtypes']}")
    if found["held_out"] is None or not np.isfinite(found["held_out"]):
        wrong.append("there is no held-out loss")
    if not found["lora"]:
        wrong.append("no LoRA file was written")
    beside = plain if on_cpu is None or same_noise() else on_cpu
    levels = np.abs(found["prediction"] - beside["prediction"]).mean()
    numbers["levels"] = round(float(levels), 3)
    if not levels <= 1 + 100 * limit:
        wrong.append(f"the prediction is {levels:.1f} levels from the plain run's (limit {1 + 100 * limit:.1f})")
    return wrong, numbers


def quiet_run(sections: dict, device: str, folder: Path) -> dict:
    "`run` without its prints; the adapter's beginning is the same in all modes."
    with contextlib.redirect_stdout(io.StringIO()):
        return run(sections, device, folder)


def allowed(strategy, facts) -> str: # as `Strategy.problem`
    "No problem."
    return ""


@contextlib.contextmanager
def all_modes(device: str):
    "Within, a CPU swaps blocks and offloads inputs too: without streams, by the same code."
    if device != "cpu":
        yield
        return
    with patch.object(BlockSwapping, "problem", allowed), patch.object(OffloadedActivations, "problem", allowed):
        yield


def tiny_runs(device: str, note, only=None):
    "All modes; each is noted as soon as it is done."
    with all_modes(device):
        run_modes(device, note, only)


def run_modes(device: str, note, only=None):
    "Compare each mode with the plain run on the CPU, and on a GPU also with itself on the CPU."
    root = Path(tempfile.mkdtemp(prefix="first_gpu_"))
    plain = plain_run(root)
    for name in only or MODES:
        note(name, **checked(name, device, root, plain))


def plain_run(root: Path) -> dict:
    "Make the pairs, and run the mode that the others are compared with."
    write_pairs(root / "pairs")
    return quiet_run(MODES[REFERENCE], "cpu", root / "plain")


def checked(name: str, device: str, root: Path, plain: dict) -> dict: # a row of the result
    "Run a mode and say what is wrong with it, why it failed, or why it was refused."
    began = time.perf_counter()
    folder = root / name.replace(" ", "_").replace(",", "")
    try:
        beside = folder.with_name(f"{folder.name}_on_the_cpu")
        on_cpu = quiet_run(MODES[name], "cpu", beside) if device != "cpu" and name not in GPU_ONLY else None
    except Exception: # a mode that needs a GPU
        on_cpu = None
    try:
        found = quiet_run(MODES[name], device, folder)
        wrong, numbers = faults(name, found, plain, on_cpu, device)
        row = dict(wrong=wrong, **numbers)
    except (ValueError, ImportError) as e: # refused with a sentence
        row = dict(refused=str(e)[:300])
    except Exception as e:
        where = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(e.__traceback__)][-4:]
        row = dict(failed=f"{type(e).__name__}: {str(e).strip()[:400]}", where=where)
    return row | dict(seconds=round(time.perf_counter() - began, 1))
