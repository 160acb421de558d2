"""What is refused, and in which words: one sentence with the name, the value and the remedy, before a model is loaded and without touching the disk.
`python tests/end_to_end/test_bad_input.py` prints the table."""
import contextlib, gc, json, re, shutil, signal, sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers import settings, write_pairs
from crash_trials import complete
from qie_nb.tiny.random_models import save_tiny, tiny_folder
from qie_nb.trainer import QwenImageEditTrainer

AREAS = (64*64, 64*64)


def change(name, value):
    "A setting by its dotted name."
    def apply(c, here):
        *path, leaf = name.split(".")
        for p in path: c = c.setdefault(p, {})
        c[leaf] = value
    return apply


def merged(*changes):
    def apply(c, here):
        for f in changes: f(c, here)
    return apply


def model_of(variant, seed):
    def apply(c, here):
        folder = Path(here)/"other"/f"{variant}-{seed}"
        if not folder.exists(): save_tiny(variant, folder, AREAS, seed=seed)
        c["model"]["pretrained_model_name_or_path"] = str(folder)
    return apply


def own_data(edit):
    "The data set at the same place, edited."
    def apply(c, here):
        root = Path(c["data"]["dataset_path"])
        edit(root)
    return apply


def repaint(path): Image.fromarray(np.random.default_rng(99).integers(0, 255, np.asarray(Image.open(path)).shape, dtype=np.uint8)).save(path)
def without(root, i): [p.unlink() for p in root.rglob(f"{i:04}.*")]
def with_one_more(root):
    for d in ("training_images", "control_images"): shutil.copy(root/d/"0000.png", root/d/"0099.png"); repaint(root/d/"0099.png")
    (root/"training_images"/"0099.txt").write_text("a new one")


# --- a checkpoint's run is another one than the configuration's: {what: (change, name in the message, value in the checkpoint, value now)}
def differs(name, was, now, shown=None): return change(name, now), difference(shown or name, was, now)
def begins(apply, text): return apply, text # the rest is a digest or depends on the model
def sample(edit, text): return begins(own_data(edit), f"data set: 4 samples in the checkpoint, {text}")
def difference(name, was, now): return f"`{name}`: {was} in the checkpoint, {now} now"


DIFFERENCES = {
    "rank": differs("model.lora.r", 2, 4),
    "alpha": differs("model.lora.lora_alpha", 4., 8.),
    "layers": differs("model.lora.target_modules", ["to_k", "to_out.0", "to_q", "to_v"], ["to_q"]),
    "rsLoRA": differs("model.lora.use_rslora", False, True),
    "DoRA": differs("model.lora.use_dora", False, True),
    "dropout": differs("model.lora.lora_dropout", 0., 0.1),
    "seed": differs("train.seed", 0, 7),
    "image size": differs("data.image_size", [64, 64], [64, 96]),
    "crop": differs("data.crop", False, True),
    "area of the controls": begins(change("data.control_area", 48*48), "`data.control_area`:"),
    "area of the text encoder's images": begins(change("data.vl_area", 96*96), "`data.vl_area`:"),
    "batch size": differs("data.batch_size", 1, 2, "data.batch_size x processes"),
    "shuffling": differs("data.shuffle", True, False),
    "caption dropout": differs("data.caption_dropout_rate", 0.1, 0.5),
    "accumulation": differs("train.gradient_accumulation_steps", 1, 2),
    "precision": (change("train.mixed_precision", "bf16"), difference("dtype of the base", "float32", "bfloat16")),
    "timestep sampling": differs("train.timestep_sampling", "uniform", "shift"),
    "loss weighting": differs("train.loss_weighting", "none", "cosmap"),
    "mask weight": differs("train.mask_min_weight", 0.1, 0.5),
    "held-out share": differs("train.val_fraction", 0., 0.3),
    "EMA switched on": differs("train.ema_decay", None, 0.9),
    "optimizer": differs("optimizer.name", "adamw", "adafactor"),
    "quantisation": differs("model.quantize", "none", "qfloat8"),
    "other weights": begins(model_of("2511", 1), "base: 2511"),
    "variant": begins(model_of("2509", 0), "base: 2511"),
    "a pair more": sample(with_one_more, "5 now (new '0099')"),
    "a pair less": sample(lambda root: without(root, 2), "3 now (without '0002')"),
    "another target": sample(lambda root: repaint(root/"training_images"/"0001.png"), "4 now (changed '0001')"),
    "another control": sample(lambda root: repaint(root/"control_images"/"0001.png"), "4 now (changed '0001')"),
    "another caption": sample(lambda root: (root/"training_images"/"0001.txt").write_text("make it new"), "4 now (changed '0001')"),
}
MAY_CHANGE = {
    "optimizer.lr": 1e-3, "lr_scheduler.scheduler_type": "cosine", "lr_scheduler.warmup_steps": 1, "train.max_grad_norm": 5., "train.logit_mean": 1., # which this sampling does not read
    "train.max_train_steps": None, "train.num_epochs": 1, "train.save_steps": 3, "train.eval_interval": 2, "logging.log_dir": "elsewhere", "logging.log_every": 2, "train.max_hours": 5., "train.keep_checkpoints": 4,
    "train.checkpoint_budget_gb": 1., "data.num_workers": 1, "train.gradient_checkpointing": True, "train.max_nonfinite_steps": 2, "train.device": "auto", "train.eval_num_inference_steps": 2,
}


@contextlib.contextmanager
def a_run(tmp):
    "A run of two steps with a checkpoint at each, its data and its cache."
    gc.freeze()
    root = write_pairs(tmp/"set", ((48, 32),) * 4, caption=[f"invert {i}" for i in range(4)])
    run = Run(tmp)
    t = QwenImageEditTrainer(run.config(tmp/"out", root))
    t.cache_embeddings()
    t.fit()
    assert len(complete(tmp/"out")) == 2
    yield run
    gc.unfreeze()


class Run:
    def __init__(self, tmp): self.tmp = tmp
    def config(self, out, root):
        return settings(root, self.tmp, model=dict(pretrained_model_name_or_path=str(tiny_folder("2511", AREAS)), lora=dict(r=2, lora_alpha=4)), data=dict(batch_size=1, caption_dropout_rate=0.1),
                        train=dict(output_dir=str(out), max_train_steps=2, save_steps=1, gradient_checkpointing=False))

    def again(self, here, change=None, resume="latest", steps=3):
        "The run's folder and data in another place, and a configuration that goes on with it, changed."
        shutil.copytree(self.tmp/"out", here/"out", dirs_exist_ok=True)
        shutil.copytree(self.tmp/"set", here/"set", dirs_exist_ok=True)
        c = self.config(here/"out", here/"set")
        c["train"] |= dict(resume_checkpoint=resume, max_train_steps=steps)
        if change: change(c, here)
        return c


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with a_run(tmp_path_factory.mktemp("refusals")) as r: yield r


@pytest.fixture(autouse=True)
def an_end():
    "A run that never comes back fails its own test and not the suite."
    def late(*a): raise TimeoutError("it goes on and on")
    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0), signal.signal(signal.SIGALRM, old)


def files_of(folder): return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(Path(folder).rglob("*"))}


def refusal(config, kinds=(ValueError, OSError)) -> str:
    "The one sentence with which a run is refused."
    with pytest.raises(kinds) as e: QwenImageEditTrainer(config).fit()
    text = str(e.value)
    assert text.strip() and "\n" not in text, text
    return text


def check_difference(text, what):
    assert DIFFERENCES[what][1] in text, text
    assert text.endswith("set it back, start a new run in another `train.output_dir`, or set `train.force_resume` (--force)"), f"the remedy is not named: {text}"


@pytest.mark.parametrize("what", DIFFERENCES)
def test_another_run_is_not_resumed(what, run, tmp_path, built):
    c = run.again(tmp_path, DIFFERENCES[what][0])
    before = files_of(tmp_path/"out")
    text = refusal(c, ValueError)
    check_difference(text, what)
    names = {shown.split(":")[0] for _, shown in DIFFERENCES.values()} - {DIFFERENCES[what][1].split(":")[0]}
    assert what == "held-out share" or not [name for name in names if f"{name}:" in text], f"other things are as they were: {text}" # it changes the data set
    assert files_of(tmp_path/"out") == before, "the disk was touched"
    assert not built, f"loaded {dict(built)} before it was refused"


def test_all_differences_are_named_at_once(run, tmp_path, built):
    what = ("rank", "seed", "batch size", "another caption")
    text = refusal(run.again(tmp_path, merged(*(DIFFERENCES[w][0] for w in what))), ValueError)
    for w in what: check_difference(text, w)
    assert not built


def test_ema_switched_off_is_a_difference(run, tmp_path, built):
    c = run.config(tmp_path/"ema", run.tmp/"set")
    c["train"]["ema_decay"] = 0.9
    QwenImageEditTrainer(c).fit()
    c["train"] |= dict(ema_decay=None, resume_checkpoint="latest", max_train_steps=3)
    assert difference("train.ema_decay", 0.9, None) in refusal(c, ValueError)


def test_force_goes_on_although_something_differs(run, tmp_path, capsys):
    whats = "seed", "other weights", "another caption", "batch size", "caption dropout", "accumulation"
    t = QwenImageEditTrainer(run.again(tmp_path, merged(*(DIFFERENCES[w][0] for w in whats), change("train.force_resume", True)))).fit()
    assert t.global_step == 3
    assert "in the checkpoint" in capsys.readouterr().out, "it does not print what differs"


def test_force_from_the_command_line(run, tmp_path):
    import yaml
    from qie_nb.cli import main
    (tmp_path/"run.yaml").write_text(yaml.safe_dump(run.again(tmp_path, DIFFERENCES["seed"][0], resume=None)))
    assert main(["train", "--config", str(tmp_path/"run.yaml"), "--resume", "latest"]) == 2
    assert main(["train", "--config", str(tmp_path/"run.yaml"), "--resume", "latest", "--force"]) == 0


def test_all_of_this_may_change_on_resume(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert QwenImageEditTrainer(run.again(tmp_path, merged(*(change(*c) for c in MAY_CHANGE.items())))).fit().global_step == 4


def test_data_moved_to_another_place_is_the_same_data(run, tmp_path):
    c = run.again(tmp_path)
    shutil.move(tmp_path/"set", tmp_path/"moved")
    c["data"]["dataset_path"] = str(tmp_path/"moved")
    assert QwenImageEditTrainer(c).fit().global_step == 3


# --- what is given as a checkpoint is none, or not whole
def last(here): return here/"out"/"checkpoints"/(here/"out"/"checkpoints"/"latest").read_text().strip()
NAMES = ("pytorch_lora_weights.safetensors", "optimizer.safetensors", "state.json", "COMPLETE")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def newer(folder):
    from qie_nb.core.files import _sha256
    state, listed = (json.loads((folder/name).read_text()) for name in ("state.json", "COMPLETE"))
    (folder/"state.json").write_text(json.dumps(state | dict(format=999)))
    (folder/"COMPLETE").write_text(json.dumps(listed | {"state.json": _sha256(folder/"state.json")}))


def given(what):
    def apply(c, here): c["train"]["resume_checkpoint"] = str(what(here))
    return apply


def damaged(name, how):
    def apply(c, here):
        how(last(here)/name) if name else how(last(here))
        c["train"]["resume_checkpoint"] = str(last(here))
    return apply


def moved(name):
    def what(here): (here/"lora").mkdir(); return shutil.copy(last(here)/NAMES[0], here/"lora"/name)
    return what


def nothing_to_resume(c, here): shutil.rmtree(here/"out")


CHECKPOINTS = {
    "a bare LoRA file": (given(moved("my.safetensors")), "resume_checkpoint.*bare LoRA.*`model.lora.pretrained_weight`"),
    "a folder with only a LoRA": (given(lambda here: moved(NAMES[0])(here).parent), "resume_checkpoint.*bare LoRA.*`model.lora.pretrained_weight`"),
    "a folder that is missing": (given(lambda here: here/"out"/"checkpoints"/"epoch_0077"), "resume_checkpoint.*does not exist.*epoch|step"),
    "an older name that is missing": (given(lambda here: "checkpoints/epoch_0077.pt"), "resume_checkpoint.*does not exist"),
    "latest where nothing was saved": (nothing_to_resume, "resume_checkpoint.*latest.*no complete checkpoint.*start without"),
    "one of a newer format": (damaged(None, newer), "has format 999, and this qie_nb knows up to 2; upgrade qie_nb"),
    **{f"{name}, one bit flipped": (damaged(name, flip), "resume_checkpoint.*(incomplete|damaged)") for name in NAMES},
    **{f"{name} missing": (damaged(name, Path.unlink), "resume_checkpoint.*incomplete or damaged") for name in NAMES},
}


@pytest.mark.parametrize("what", CHECKPOINTS)
def test_this_is_no_checkpoint_to_resume_from(what, run, tmp_path, built):
    c = run.again(tmp_path)
    CHECKPOINTS[what][0](c, tmp_path)
    before = files_of(tmp_path/"out") if (tmp_path/"out").exists() else {}
    text = refusal(c)
    assert re.search(CHECKPOINTS[what][1], text), text
    assert (files_of(tmp_path/"out") if (tmp_path/"out").exists() else {}) == before and not built


@pytest.mark.parametrize("name, how", [("optimizer.safetensors", flip), pytest.param("state.json", Path.unlink, marks=pytest.mark.slow)])
def test_latest_passes_over_a_damaged_one(name, how, run, tmp_path):
    c = run.again(tmp_path)
    how(last(tmp_path)/name)
    t = QwenImageEditTrainer(c)
    t.fit()
    assert t.global_step == 3 and len(complete(tmp_path/"out")) >= 2


def test_latest_with_none_whole_does_not_start_over(run, tmp_path, built):
    c = run.again(tmp_path)
    for d in complete(tmp_path/"out"): flip(d/"optimizer.safetensors")
    before = files_of(tmp_path/"out")
    assert "no complete checkpoint" in refusal(c)
    assert files_of(tmp_path/"out") == before and not built


def test_a_new_run_is_not_mixed_with_another(run, tmp_path, built):
    c = run.again(tmp_path, resume=None)
    before = files_of(tmp_path/"out")
    text = refusal(c, ValueError)
    assert "holds another run" in text and "`train.resume_checkpoint`" in text and "`train.output_dir`" in text
    assert files_of(tmp_path/"out") == before and not built


# --- configurations that cannot run: {what: (change, the whole message or a pattern of it)}
def hidden(name, *changes):
    apply = merged(*changes)
    apply.hides = name
    return apply


def two_processes(c, here): pass
two_processes.environment = dict(WORLD_SIZE="2")


def hide(name, set_item, set_attribute):
    "As if a library were not installed: neither imported nor listed."
    import importlib.metadata, importlib.util
    from qie_nb.models import quantize
    for m in [m for m in sys.modules if m.split(".")[0] == name] + [name]: set_item(sys.modules, m, None)
    version, find_spec = importlib.metadata.version, importlib.util.find_spec
    def no_version(n):
        if n == name: raise importlib.metadata.PackageNotFoundError(n)
        return version(n)
    set_attribute(importlib.metadata, "version", no_version), set_attribute(quantize, "version", no_version)
    set_attribute(importlib.util, "find_spec", lambda n, *a: None if n.split(".")[0] == name else find_spec(n, *a))


def one_style(c, here):
    (here/"styles"/"ink").mkdir(parents=True)
    Image.new("RGB", (48, 32)).save(here/"styles"/"ink"/"a.png")
    c["train"]["test_image_dir"] = str(here/"styles")


CONFIGS = {
    "a misspelt key": (change("train.max_train_step", 3), "`train.max_train_step` is not a known key; did you mean `train.max_train_steps`?"),
    "a key of another section": (change("train.batch_size", 3), "`train.batch_size` is not a known key; did you mean `data.batch_size`?"),
    "a size that is no multiple of 16": (change("data.image_size", [500, 512]), "`image_size` must be a multiple of 16, got 500; use 496 or 512"),
    "rank 0": (change("model.lora.r", 0), "`model.lora.r`: input should be greater than or equal to 1, got 0"),
    "float16": (change("train.mixed_precision", "float16"), "`train.mixed_precision`: input should be 'auto', 'bf16', 'fp16' or 'no', got 'float16'"),
    "a rate of 0": (change("optimizer.lr", 0), "`optimizer.lr`: input should be greater than 0, got 0"),
    "an EMA that never moves": (change("train.ema_decay", 1.), "`train.ema_decay`: input should be less than 1, got 1.0"),
    "an unknown optimizer": (change("optimizer.name", "lion"), "`optimizer.name`: input should be 'adamw', 'adamw8bit', 'adafactor' or 'prodigy', got 'lion'"),
    "an unknown place for logs": (change("logging.report_to", "tensorbored"), "`logging.report_to` 'tensorbored' is not supported; use tensorboard or none, or one of accelerate's trackers: aim, "),
    "a tracker that is not installed": (change("logging.report_to", "clearml"), "`logging.report_to` clearml needs a package that is not installed; pip install clearml, or use tensorboard or none"),
    "a log folder that is a file": (merged(change("logging.report_to", "tensorboard"), change("logging.log_dir", __file__)), "`logging.log_dir` .* cannot be written .*is a file.*; give another folder, or set `logging.report_to` none"),
    "no data": (change("data.dataset_path", None), "`data.dataset_path` is not set; set it to the folder of your pairs"),
    "data that is not there": (change("data.dataset_path", "/no/such"), "`data.dataset_path` '/no/such' does not exist; set it to the folder of your pairs"),
    "a model that is not there": (change("model.pretrained_model_name_or_path", "/no/such"), "pretrained_model_name_or_path.*/no/such"),
    "images to try that are not there": (change("train.test_image_dir", "/no/such"), "`train.test_image_dir` '/no/such' does not exist; give a folder with one sub-folder per style"),
    "one style only": (merged(one_style, change("train.style_prompts", dict(ink="as an ink drawing"))), "`train.test_image_dir` .* holds 1 style folders; it needs at least two"),
    "held-out pairs that are not there": (change("train.val_path", "/no/such"), "`train.val_path` ./no/such. does not exist"),
    "a LoRA to start from that is not there": (change("model.lora.pretrained_weight", "/no/such.safetensors"), "/no/such.safetensors.*does not exist"),
    "adamw8bit without bitsandbytes": (hidden("bitsandbytes", change("optimizer.name", "adamw8bit")), "`optimizer.name` adamw8bit needs bitsandbytes, which is not installed; .*adamw"),
    "prodigy without prodigyopt": (hidden("prodigyopt", change("optimizer.name", "prodigy"), change("optimizer.lr", 1.)), "`optimizer.name` prodigy needs prodigyopt"),
    "prodigy at AdamW's rate": (merged(change("optimizer.name", "prodigy"), change("optimizer.lr", 1e-4)), "`optimizer.lr`.*1e-04|`optimizer.lr`.*0.0001"),
    "nf4 without bitsandbytes": (hidden("bitsandbytes", change("model.quantize", "nf4")), "`model.quantize` nf4 needs bitsandbytes|`model.quantize`.*bitsandbytes"),
    "two processes announced, one here": (two_processes, "WORLD_SIZE.*2"),
    "a GPU where there is none": (change("train.device", "cuda"), "cuda"),
    "an output folder that is a file": (change("train.output_dir", __file__), "output_dir|test_refusals"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_this_is_refused(what, run, tmp_path, built, monkeypatch):
    import torch
    apply, words = CONFIGS[what]
    if what == "a GPU where there is none" and torch.cuda.is_available(): pytest.skip("there is one")
    if name := getattr(apply, "hides", None): hide(name, monkeypatch.setitem, monkeypatch.setattr)
    for k, v in getattr(apply, "environment", {}).items(): monkeypatch.setenv(k, v)
    c = run.config(tmp_path/"out", run.tmp/"set")
    apply(c, tmp_path)
    text = refusal(c)
    assert text == words or re.search(words, text), text
    assert not built, f"loaded {dict(built)} before it was refused"
    assert not (tmp_path/"out"/"checkpoints").exists(), "the disk was touched"


def table() -> list: # (what, message) of every refusal
    import tempfile
    rows = []
    with tempfile.TemporaryDirectory() as tmp, a_run(Path(tmp)/"base") as run:
        def say(kind, what, make):
            here = Path(tmp)/f"{len(rows)}"
            here.mkdir()
            try: QwenImageEditTrainer(make(here)).fit()
            except Exception as e: text = str(e)
            else: text = "goes on"
            rows.append((kind, what, " ".join(text.replace(str(here), "").replace(tmp, "").split())))
            shutil.rmtree(here)
        with contextlib.redirect_stdout(sys.stderr):
            for what, (f, *_) in DIFFERENCES.items(): say("resume", what, lambda here: run.again(here, f))
            for what, (f, _) in CHECKPOINTS.items(): say("checkpoint", what, lambda here: run.again(here, f))
            say("checkpoint", "a new run in another's folder", lambda here: run.again(here, resume=None))
            for what, (f, _) in CONFIGS.items():
                def make(here):
                    c = run.config(here/"out", run.tmp/"set")
                    f(c, here)
                    return c
                with pytest.MonkeyPatch.context() as m:
                    if hasattr(f, "hides"): hide(f.hides, m.setitem, m.setattr)
                    for k, v in getattr(f, "environment", {}).items(): m.setenv(k, v)
                    say("configuration", what, make)
    return rows


if __name__ == "__main__":
    print("| | input | message |\n|---|---|---|")
    for kind, what, text in table(): print(f"| {kind} | {what} | {text.replace('|', chr(92) + '|')} |")
