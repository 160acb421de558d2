"""The disk becomes full while a certain file is written: nothing that was there is lost, the error names the folder, and the run goes on afterwards."""
import json, os, subprocess, sys
from pathlib import Path

import pytest
from safetensors import safe_open

from crash_trials import complete
from helpers import settings, write_pairs
from qie_nb.core.files import DiskFull
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer

pytestmark = pytest.mark.mounts
SIZE = 40_000_000
EVALUATED = dict(val_fraction=0.25, eval_steps=2, eval_images=1, eval_at_start=False, eval_num_inference_steps=2)


class Disk:
    "A small disk that is filled when a file whose path contains `name` is opened for writing for the nth time."
    def __init__(self, folder):
        self.folder, self.filler = folder, folder/"filler"
        self.wait_for("", 0)
        sys.addaudithook(self.hear)

    def wait_for(self, name, nth=1):
        self.name, self.left, self.filled = name, nth, False

    def hear(self, event, args):
        if event != "open" or not self.name or self.filled: return
        path, mode, flags = os.fsdecode(args[0]) if isinstance(args[0], (str, bytes)) else "", args[1] or "", args[2] or 0
        writing = any(c in mode for c in "wxa+") or flags & (os.O_WRONLY | os.O_RDWR)
        if not (writing and path.startswith(str(self.folder)) and self.name in path): return
        self.left -= 1
        if not self.left: self.fill()

    def fill(self):
        self.filled = True
        with open(self.filler, "wb", buffering=0) as f:
            try:
                while f.write(bytes(1 << 16)): pass
            except OSError: pass

    def free(self):
        self.wait_for("")
        self.filler.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], check=True)
    yield Disk(folder)
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory, disk):
    "Of a run of four steps in a folder of the small disk; the pairs and, if filled, the cache are elsewhere."
    tmp = tmp_path_factory.mktemp("elsewhere")
    root = write_pairs(tmp/"set", ((48, 32),) * 5, caption="invert")
    def make(name, cache=tmp/"cache", **train):
        out = disk.folder/name
        run = dict(output_dir=str(out), max_train_steps=4, save_steps=1, gradient_checkpointing=False, val_fraction=0, ema_decay=0.9)
        return settings(root, tmp, model=dict(pretrained_model_name_or_path=str(tiny_folder("2511", (64*64, 64*64))), lora=dict(r=2)),
                        data=dict(batch_size=1), train=run | train, cache=dict(cache_dir=str(cache)),
                        logging=dict(log_dir=str(out/"runs"), report_to="tensorboard", log_images=True))
    QwenImageEditTrainer(make("first")).cache_embeddings()
    return make


def whole(folder):
    "Every LoRA, checkpoint and result there can be read."
    for f in folder.rglob("*.safetensors"):
        if any(part.startswith(".") for part in f.relative_to(folder).parts): continue
        with safe_open(str(f), "np") as tensors: assert list(tensors.keys())
    for f in folder.rglob("held_out.json"): json.loads(f.read_text())


@pytest.mark.parametrize("nth", [1, 9])
def test_precompute(nth, config, disk):
    cache = disk.folder/f"cache-{nth}"
    made = config(f"precompute-{nth}", cache)
    disk.wait_for(".tmp", nth)
    with pytest.raises(DiskFull, match=rf"{cache}.* is full: .* are needed and .* are free; .*What was there is intact"): QwenImageEditTrainer(made).cache_embeddings()
    assert disk.filled
    whole(cache)
    disk.free()
    report = QwenImageEditTrainer(made).cache_embeddings()
    assert report.encoded + report.reused == 5 and not report.skipped and report.reused >= (nth > 5)


# (file that is being written, how often it was opened before, steps that are safe then)
CHECKPOINTS = {"the first adapter": ("step_00000001.partial", 1, 0), "a later adapter": ("step_00000003.partial", 1, 2),
               "the mean": ("step_00000003.partial", 2, 2), "the optimizer": ("step_00000003.partial", 3, 2),
               "the state": ("step_00000003.partial", 4, 2), "COMPLETE": ("step_00000003.partial", 5, 2)}


@pytest.mark.parametrize("moment", CHECKPOINTS)
def test_a_checkpoint(moment, config, disk):
    name, nth, safe = CHECKPOINTS[moment]
    made = config(f"checkpoint {moment}".replace(" ", "-"))
    out = Path(made["train"]["output_dir"])
    disk.wait_for(name, nth)
    with pytest.raises(DiskFull, match="checkpoints.* is full: .*What was there is intact"): QwenImageEditTrainer(made).fit()
    assert disk.filled
    steps = [json.loads((d/"state.json").read_text())["global_step"] for d in complete(out)]
    assert max(steps, default=0) == safe
    whole(out)
    disk.free()
    assert QwenImageEditTrainer(made | dict(train=made["train"] | dict(resume_checkpoint="auto"))).fit().global_step == 4


LOGS = { # {moment: (part of a file's name, which one of these fills the disk)}
    "edited images": ("inference/step_00000002", 1),
    "the result of an evaluation": ("inference/step_00000002", 3),
    "rows": (".csv", 1),
    "event files": ("tfevents", 1),
}
WEEKLY_LOGS = ("edited images", "the result of an evaluation")


@pytest.mark.parametrize("moment", [
    *(moment for moment in LOGS if moment not in WEEKLY_LOGS),
    *(pytest.param(moment, marks=pytest.mark.weekly) for moment in WEEKLY_LOGS),
])
def test_a_log_or_an_image_ends_in_one_sentence_and_costs_no_checkpoint(moment, config, disk):
    name, nth = LOGS[moment]
    made = config(moment.replace(" ", "-"), **EVALUATED)
    out = Path(made["train"]["output_dir"])
    disk.wait_for(name, nth)
    try: QwenImageEditTrainer(made).fit()
    except OSError as e:
        assert "is full" in str(e), e
        print("ended:", e)
    assert disk.filled
    whole(out)
    disk.free()
    assert QwenImageEditTrainer(made | dict(train=made["train"] | dict(resume_checkpoint="auto"))).fit().global_step == 4


def test_the_lora_of_the_end(config, disk):
    made = config("lora")
    t = QwenImageEditTrainer(made).fit()
    old = t.save_lora(disk.folder/"lora"/"my").read_bytes()
    disk.wait_for("my/", 1)
    with pytest.raises(DiskFull, match="is full"): t.save_lora(disk.folder/"lora"/"my")
    assert disk.filled and next((disk.folder/"lora"/"my").glob("*.safetensors")).read_bytes() == old
    disk.free()
    t.save_lora(disk.folder/"lora"/"my")
