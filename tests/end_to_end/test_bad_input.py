"""What is refused: one sentence with the name, the value and the remedy.

It comes before a model is loaded, without touching the disk. Each message must be the one in
docs/refusals.md; `python tests/end_to_end/test_bad_input.py` writes that page.
"""
import functools, json, re, shutil, sys, tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1])) # as a script
from helpers import TEXT, VAE, settings, write_pairs
from qie_nb.cli import main
from qie_nb.core.files import _sha256
from qie_nb.tiny.random_models import save_tiny, tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.checkpoint import complete_checkpoints
from qie_nb.training.resume import checkpoint_misfit

PAGE = Path(__file__).parents[2]/"docs"/"refusals.md"
AREAS = (64*64, 64*64)


# --- a case: settings by their dotted names, with functions of the test's folder as values, or a function of (configuration, folder, MonkeyPatch)
def apply(case, c, here, patch=None):
    if callable(case): return case(c, here, patch)
    for name, value in case.items():
        *path, leaf = name.split(".")
        section = functools.reduce(lambda section, p: section.setdefault(p, {}), path, c)
        section[leaf] = str(value(here)) if callable(value) else value


def all_of(*cases): return lambda *args: [apply(case, *args) for case in cases]


def model(variant, seed):
    def folder(here):
        if not (here/"other").exists(): save_tiny(variant, here/"other", AREAS, seed=seed)
        return here/"other"
    return {"model.pretrained_model_name_or_path": folder}


def data(edit): return lambda c, here, patch: edit(Path(c["data"]["dataset_path"]))


def repaint(path): Image.fromarray(np.random.default_rng(99).integers(0, 255, np.asarray(Image.open(path)).shape, dtype=np.uint8)).save(path)


def add_a_pair(root):
    for d in ("training_images", "control_images"): shutil.copy(root/d/"0000.png", root/d/"0099.png"); repaint(root/d/"0099.png")
    (root/"training_images"/"0099.txt").write_text("a new one")


RESUME = { # the checkpoint is of another run
    "rank": {"model.lora.r": 4},
    "alpha": {"model.lora.lora_alpha": 8.},
    "layers": {"model.lora.target_modules": ["to_q"]},
    "rsLoRA": {"model.lora.use_rslora": True},
    "DoRA": {"model.lora.use_dora": True},
    "dropout": {"model.lora.lora_dropout": 0.1},
    "seed": {"train.seed": 7},
    "image size": {"data.image_size": [64, 96]},
    "crop": {"data.crop": True},
    "controls' area": {"data.control_area": 48*48},
    "text encoder's area": {"data.vl_area": 96*96},
    "batch size": {"data.batch_size": 2},
    "shuffling": {"data.shuffle": False},
    "caption dropout": {"data.caption_dropout_rate": 0.5},
    "accumulation": {"train.gradient_accumulation_steps": 2},
    "precision": {"train.mixed_precision": "bf16"},
    "timestep sampling": {"train.timestep_sampling": "shift"},
    "loss weighting": {"train.loss_weighting": "cosmap"},
    "mask weight": {"train.mask_min_weight": 0.5},
    "edit masks": {"data.edit_mask": "auto"},
    "held-out share": {"train.val_fraction": 0.3},
    "EMA switched on": {"train.ema_decay": 0.9},
    "optimizer": {"optimizer.name": "adafactor"},
    "quantization": {"model.quantize": "qfloat8"},
    "other weights": model("2511", 1),
    "variant": model("2509", 0),
    "a pair more": data(add_a_pair),
    "a pair less": data(lambda root: [p.unlink() for p in root.rglob("0002.*")]),
    "another target": data(lambda root: repaint(root/"training_images"/"0001.png")),
    "another control": data(lambda root: repaint(root/"control_images"/"0001.png")),
    "another caption": data(lambda root: (root/"training_images"/"0001.txt").write_text("make it new")),
}
MAY_CHANGE = {
    "optimizer.lr": 1e-3, "lr_scheduler.scheduler_type": "cosine", "lr_scheduler.warmup_steps": 1, "train.max_grad_norm": 5.,
    "train.logit_mean": 1., # which this sampling does not read
    "train.max_train_steps": None, "train.num_epochs": 1, "train.save_steps": 3, "train.eval_interval": 2, "train.max_hours": 5., "train.keep_checkpoints": 4,
    "train.gradient_checkpointing": True, "train.device": "auto",
    "train.eval_num_inference_steps": 2, "logging.log_dir": "elsewhere", "logging.log_every": 2,
}


# --- what is given as a checkpoint is none, or not whole
LORA, *OTHERS = NAMES = ("pytorch_lora_weights.safetensors", "optimizer.safetensors", "state.json", "COMPLETE")


def last(here): return complete_checkpoints(here/"out"/"checkpoints")[-1]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def newer(state):
    state.write_text(json.dumps(json.loads(state.read_text()) | dict(format=999)))
    listed = state.with_name("COMPLETE")
    listed.write_text(json.dumps(json.loads(listed.read_text()) | {"state.json": _sha256(state)}))


def lora_as(name):
    def path(here):
        (here/"lora").mkdir()
        return shutil.copy(last(here)/LORA, here/"lora"/name)
    return path


def resume_from(checkpoint): return {"train.resume_checkpoint": checkpoint}


def damaged(name, how):
    def path(here):
        checkpoint = last(here)
        how(checkpoint/name)
        return checkpoint
    return resume_from(path)


CHECKPOINTS = {
    "a bare LoRA file": resume_from(lora_as("my.safetensors")),
    "a folder with only a LoRA": resume_from(lambda here: Path(lora_as(LORA)(here)).parent),
    "missing folder": resume_from(lambda here: here/"out"/"checkpoints"/"epoch_0077"),
    "missing, older name": resume_from("checkpoints/epoch_0077.pt"),
    "latest where nothing was saved": lambda c, here, patch: shutil.rmtree(here/"out"),
    "one of a newer format": damaged("state.json", newer),
    **{f"{name}, one bit flipped": damaged(name, flip) for name in NAMES},
    **{f"{name} missing": damaged(name, Path.unlink) for name in NAMES},
    "a new run in another's folder": resume_from(None),
}


# --- configurations that cannot run
def without_packages(settings):
    def hide(c, here, patch):
        for finds in ("training.optimizers.base.find_spec", "models.quantizations.base.library_version"): patch.setattr(f"qie_nb.{finds}", lambda name: None)
    return all_of(hide, settings)


def without_gpu(c, here, patch):
    "A machine on which torch finds no GPU."
    patch.setattr(torch.cuda, "is_available", lambda: False)


def a_file(here):
    (here/"a").mkdir()
    (here/"a"/"file").touch()
    return here/"a"/"file"


def one_style(here):
    (here/"styles"/"ink").mkdir(parents=True)
    Image.new("RGB", (48, 32)).save(here/"styles"/"ink"/"a.png")
    return here/"styles"


CONFIGS = {
    "a misspelt key": {"train.max_train_step": 3},
    "a key of another section": {"train.batch_size": 3},
    "image size 500": {"data.image_size": [500, 512]},
    "rank 0": {"model.lora.r": 0},
    "float16": {"train.mixed_precision": "float16"},
    "a rate of 0": {"optimizer.lr": 0},
    "an EMA that never moves": {"train.ema_decay": 1.},
    "an unknown optimizer": {"optimizer.name": "lion"},
    "unknown tracker": {"logging.report_to": "tensorbored"},
    "tracker not installed": {"logging.report_to": "clearml"},
    "log folder is a file": {"logging.report_to": "tensorboard", "logging.log_dir": a_file},
    "no data": {"data.dataset_path": None},
    "missing data": {"data.dataset_path": "/no/such"},
    "missing model": {"model.pretrained_model_name_or_path": "/no/such"},
    "missing styles": {"train.test_image_dir": "/no/such"},
    "one style only": {"train.test_image_dir": one_style, "train.style_prompts": dict(ink="as an ink drawing")},
    "missing held-out pairs": {"train.val_path": "/no/such"},
    "missing LoRA": {"model.lora.pretrained_weight": "/no/such.safetensors"},
    "adamw8bit without bitsandbytes": without_packages({"optimizer.name": "adamw8bit"}),
    "prodigy without prodigyopt": without_packages({"optimizer.name": "prodigy", "optimizer.lr": 1.}),
    "prodigy at AdamW's rate": {"optimizer.name": "prodigy", "optimizer.lr": 1e-4},
    "nf4 without bitsandbytes": without_packages({"model.quantize": "nf4"}),
    "two processes announced, one here": lambda c, here, patch: patch.setenv("WORLD_SIZE", "2"),
    "missing GPU": all_of({"train.device": "cuda"}, without_gpu),
    "output folder is a file": {"train.output_dir": a_file},
}
def files(*names, **settings):
    "A data set of images and captions; in a name, `,` separates files of one folder."
    def write(here):
        for name in [f"{n.rpartition('/')[0]}/{file}" for n in names for file in n.rpartition("/")[2].split(",")]:
            path = here/"mine"/name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix in (".png", ".jpg"): Image.new("RGB", (48, 32)).save(path)
            else: path.write_bytes(b"\0\0\0\x18ftypheic" + bytes(50) if path.suffix == ".HEIC" else b"make it blue")
        return here/"mine"
    return {"data.dataset_path": write} | {f"data.{k}": v for k, v in settings.items()}


DATA = { # pairs that are not found
    "folders called A and B": files("A/1.jpg,2.jpg", "B/1.jpg,2.jpg"),
    "missing target_dir": files("A/1.jpg", "B/1.jpg", target_dir="C", control_dir="A"),
    "no control images": files("after/1.jpg,1.txt"),
    "a control is missing": files("after/1.jpg,2.jpg", "before/1.jpg", prompt="x"),
    "two data sets side by side": files("cats/after/1.jpg,1.txt", "cats/before/1.jpg", "dogs/after/1.jpg,1.txt", "dogs/before/1.jpg"),
    "other names in the two folders": files("after/DSC_1.jpg,DSC_2.jpg", "before/IMG_1.jpg,IMG_2.jpg", prompt="x"),
    "captions missing": files("after/1.jpg,2.jpg,3.jpg,3.txt", "before/1.jpg,2.jpg,3.jpg"),
    "HEIC without pillow-heif": all_of(files("after/1.HEIC,2.HEIC", "before/1.HEIC,2.HEIC", prompt="x"),
                                       lambda c, here, patch: patch.setattr("qie_nb.data.images._add_heif", lambda: None)),
    "a zip file": {"data.dataset_path": lambda here: files("pairs.zip")["data.dataset_path"](here)/"pairs.zip"},
    "a data set of the hub": {"data.dataset_path": "me/cats"},
}
CASES = dict(resume=RESUME, checkpoint=CHECKPOINTS, configuration=CONFIGS, data=DATA)


class Run:
    "A run of two steps with a checkpoint at each, its data and its cache."
    def __init__(self, tmp):
        self.tmp = tmp
        root = write_pairs(tmp/"set", ((48, 32),) * 4, caption=[f"invert {i}" for i in range(4)])
        QwenImageEditTrainer(self.config(tmp/"out", root)).fit()
        assert len(complete_checkpoints(tmp/"out"/"checkpoints")) == 2

    def config(self, out, root):
        return settings(root, self.tmp, model=dict(pretrained_model_name_or_path=str(tiny_folder("2511", AREAS)), lora=dict(r=2, lora_alpha=4)),
                        data=dict(batch_size=1, caption_dropout_rate=0.1), train=dict(output_dir=str(out), max_train_steps=2, save_steps=1, gradient_checkpointing=False))

    def again(self, here, case={}, resume="latest", patch=None):
        "The run's folder and data in another place, and a configuration that goes on with it, changed."
        for name in ("out", "set"): shutil.copytree(self.tmp/name, here/name)
        c = self.config(here/"out", here/"set")
        c["train"] |= dict(resume_checkpoint=resume, max_train_steps=3)
        apply(case, c, here, patch)
        return c

    def refused(self, kind, what, here, patch):
        if kind not in ("configuration", "data"): return self.again(here, CASES[kind][what], patch=patch)
        c = self.config(here/"out", self.tmp/"set")
        apply(CASES[kind][what], c, here, patch)
        return c


@pytest.fixture(scope="module")
def run(tmp_path_factory): return Run(tmp_path_factory.mktemp("refusals"))


def files_of(folder): return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def refusal(config) -> str:
    "The one sentence with which a run is refused."
    with pytest.raises((ValueError, OSError)) as e: QwenImageEditTrainer(config).fit()
    assert "\n" not in str(e.value)
    return str(e.value)


ANY = "…" # what differs between messages that share a line
BEGIN = "checkpoint step_00000002 belongs to a different run ("
END = ("). To start a new run, choose another `train.output_dir`; to continue that run, use its "
       "settings and pairs, or set `train.force_resume` (--force)")


def short(difference:str) -> str:
    "A difference between a checkpoint and a run: before and after an arrow."
    return re.sub(r" in the checkpoint, (.*?) now(?=$|;| \()", r"→\1", difference)


def long(difference:str) -> str:
    "The opposite of `short`."
    made = []
    for part in difference.split("; "):
        made.append(re.sub(r"→(.*?)(?=$| \()", r" in the checkpoint, \1 now", part))
    return "; ".join(made)


def documented() -> dict: # {(kind, what): message}
    "The messages of the page. Inputs that have the same message share a line."
    found, sections = {}, re.split(r"^## (\w+)$", PAGE.read_text(), flags=re.M)
    for kind, section in zip(sections[1::2], sections[2::2]):
        for inputs, message in re.findall(r"^- \*(.*?)\*:? (.*)$", section, re.M):
            for what in inputs.split("; "):
                found[kind, what] = f"{BEGIN}{long(message)}{END}" if kind == "resume" else message
    return found


def is_message(text:str, shown:str) -> bool:
    "Is it what the page shows, apart from names that the page leaves out?"
    pattern = re.escape(comparable(shown)).replace(re.escape(ANY), "[^'`]*")
    return bool(re.fullmatch(pattern, comparable(text)))


def comparable(text):
    "Without the digests of files and the names of trackers, which depend on the versions of libraries."
    return re.sub(r"[0-9a-f]{12,}", "#", re.sub(r"(trackers: aim).*", r"\1", text))


def test_the_page_lists_exactly_these():
    assert sorted(documented()) == sorted((kind, what) for kind in CASES for what in CASES[kind])


@pytest.mark.parametrize("kind, what", [(kind, what) for kind in CASES for what in CASES[kind]])
def test_refused_with_the_documented_message(kind, what, run, tmp_path, built, monkeypatch):
    c = run.refused(kind, what, tmp_path, monkeypatch)
    before = files_of(tmp_path)
    text = refusal(c).replace(str(tmp_path), "")
    assert is_message(text, documented()[kind, what])
    assert files_of(tmp_path) == before, "the disk was touched"
    assert not built, f"loaded {dict(built)} before it was refused"


def difference(what):
    "What the message of another run names in brackets."
    return documented()["resume", what].removeprefix(BEGIN).removesuffix(END)


def test_all_differences_are_named_at_once(run, tmp_path, built):
    what = ("rank", "seed", "batch size", "another caption")
    text = refusal(run.again(tmp_path, all_of(*(RESUME[w] for w in what))))
    assert all(difference(w) in text for w in what) and not built


def test_ema_switched_off_is_a_difference(run, tmp_path):
    c = run.config(tmp_path/"ema", run.tmp/"set")
    c["train"]["ema_decay"] = 0.9
    QwenImageEditTrainer(c).fit()
    c["train"] |= dict(ema_decay=None, resume_checkpoint="latest", max_train_steps=3)
    assert "`train.ema_decay`: 0.9 in the checkpoint, None now" in refusal(c)


def test_force_goes_on_although_something_differs(run, tmp_path, capsys):
    what = "seed", "other weights", "another caption", "batch size", "caption dropout", "accumulation"
    assert QwenImageEditTrainer(run.again(tmp_path, all_of(*(RESUME[w] for w in what), {"train.force_resume": True}))).fit().global_step == 3
    assert difference("seed") in capsys.readouterr().out, "it does not print what differs"


def test_force_from_the_command_line(run, tmp_path):
    file = tmp_path/"run.yaml"
    file.write_text(yaml.safe_dump(run.again(tmp_path, RESUME["seed"], resume=None)))
    command = ["train", "--config", str(file), "--resume", "latest"]
    assert main(command) == 2 and main([*command, "--force"]) == 0


def test_all_of_this_may_change_on_resume(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert QwenImageEditTrainer(run.again(tmp_path, MAY_CHANGE)).fit().global_step == 4


def test_data_moved_to_another_place_is_the_same_data(run, tmp_path):
    c = run.again(tmp_path, {"data.dataset_path": lambda here: shutil.move(here/"set", here/"moved")})
    assert QwenImageEditTrainer(c).fit().global_step == 3


@pytest.mark.parametrize("name, how", [("optimizer.safetensors", flip), pytest.param("state.json", Path.unlink, marks=pytest.mark.slow)])
def test_latest_passes_over_a_damaged_one(name, how, run, tmp_path):
    c = run.again(tmp_path)
    how(last(tmp_path)/name)
    assert QwenImageEditTrainer(c).fit().global_step == 3 and len(complete_checkpoints(tmp_path/"out"/"checkpoints")) >= 2


def test_latest_with_none_whole_does_not_start_over(run, tmp_path, built):
    c = run.again(tmp_path)
    for file in tmp_path.rglob("optimizer.safetensors"): flip(file)
    before = files_of(tmp_path)
    assert "no complete checkpoint" in refusal(c)
    assert files_of(tmp_path) == before and not built


def other_pipeline(here):
    (here/"other").mkdir()
    (here/"other"/"model_index.json").write_text(json.dumps(dict(_class_name="StableDiffusionPipeline")))
    return here/"other"


def empty(here): (here/"empty").mkdir(); return here/"empty"


@pytest.mark.parametrize("case, sentence", [
    ({"data.dataset_path": empty}, "No pairs found in .*empty.. It is empty. Put the images"),
    (data(lambda root: (root/"control_images"/"0001.png").unlink()), "1 of 3 targets have no control image of the same name in control_images/: .0001.png"),
    (data(lambda root: [p.write_text("no image") for p in (root/"control_images").glob("*.png")]),
     r"none of 3 samples can be used; the first: image .*control_images/0000.png' cannot be read \(it is text that begins 'no image'\); replace it"),
    ({"data.strict": True}, "`data.strict` is no longer a setting, got True; an unreadable image is skipped, with its reason: remove the line"),
    ({"model.pretrained_model_name_or_path": other_pipeline}, "contains a StableDiffusionPipeline; this library needs QwenImageEditPipeline"),
    ({"cache.vae_encoder_device": "tpu"}, "device 'tpu' does not exist here; this machine has"),
    ({"predict.devices": dict(vae="cuda:9")}, "device 'cuda:9' does not exist here"),
    ({"model.variant": "v1"}, "`model.variant` is v1, but .* is 2511"),
    ({"model.lora.target_modules": ["to_quit"]}, r"`model.lora.target_modules` \['to_quit'\] matches no layer")])
def test_bad_data_and_models_are_refused_before_an_encoder_runs(case, sentence, pairs, tmp_path, built):
    c = settings(pairs(), tmp_path)
    apply(case, c, tmp_path)
    assert re.search(sentence, refusal(c))
    assert not built[VAE] and not built[TEXT] and not (tmp_path/"cache").exists()


def without_names(text:str) -> str:
    "A message with the setting that it begins with, and the first quoted value, left out."
    return re.sub(r"'[^']*'", f"'{ANY}'", re.sub(r"^`[^`]*`", f"`{ANY}`", text), count=1)


def lines_of(kind, messages) -> list: # messages: {what: message}
    "A line for each message, with all inputs that it answers."
    if kind == "resume":
        found = {}
        for what, text in messages.items():
            found[what] = short(text.removeprefix(BEGIN).removesuffix(END))
        head = [f"> {BEGIN}{ANY}{END}", "", "checkpoint→now:", ""]
    else:
        found, head = messages, []
    same = {}
    for what, text in found.items():
        same.setdefault(text if kind == "resume" else without_names(text), []).append(what)
    lines = []
    for text, inputs in same.items():
        shown = {found[what] for what in inputs}
        lines.append(f"- *{'; '.join(inputs)}* {shown.pop() if len(shown) == 1 else text}")
    return [f"## {kind}", "", *head, *lines, ""]


def write_page():
    lines = []
    with tempfile.TemporaryDirectory() as tmp:
        run = Run(Path(tmp)/"run")
        for kind, cases in CASES.items():
            messages = {}
            for number, what in enumerate(cases):
                here = Path(tmp)/f"{kind}{number}"
                here.mkdir()
                with pytest.MonkeyPatch.context() as patch: text = refusal(run.refused(kind, what, here, patch)).replace(str(here), "")
                messages[what] = text
            lines += lines_of(kind, messages)
    PAGE.write_text(PAGE.read_text().partition("## resume\n")[0] + "\n".join(lines))


if __name__ == "__main__": write_page()


@pytest.mark.slow
def test_a_prompt_that_is_too_long_costs_no_work(tmp_path):
    "It is left out, with its reason, before anything is encoded; the run goes on and resumes without it."
    root = write_pairs(tmp_path/"set", ((64, 64),) * 4, caption=["invert", "make it blue " * 1200, "invert", "invert"])
    made = settings(root, tmp_path, train=dict(max_train_steps=2))
    t = QwenImageEditTrainer(made)
    report = t.cache_embeddings()
    assert report.encoded == 3 and "is too long: 108" in report.skipped[0][1] and "positions; shorten it" in report.skipped[0][1]
    assert t.fit().global_step == 2
    folder = t.save_checkpoint(9, 2)
    assert checkpoint_misfit(folder, made) == ""
    with pytest.raises(ValueError, match="is too long: 108.* shorten it"): t.predict(root/"control_images"/"0000.png", "make it blue " * 1200, num_inference_steps=2)
