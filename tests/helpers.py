"""Data sets, configurations and comparisons that several tests share."""
import hashlib, json, os, shutil, subprocess, sys, time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from qie_nb.core.cache_layers import INDEX, open_layer
from qie_nb.core.packed_index import DATABASE, index_checksum
from qie_nb.lora.adapters import lora_state
from qie_nb.models import modulation
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.training.callbacks import Callback

def noise_image(
    size, # (width, height)
    spread=60, # standard deviation of a pixel around 128
    seed=0,
) -> Image.Image: # RGB, grey
    "Noise that is the same in every process; Pillow's own depends on what ran before."
    width, height = size
    levels = np.random.default_rng(seed).normal(128, spread, (height, width))
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8)).convert("RGB")


def divided(folder, n) -> dict: # {tensor: its file}
    "Divide the weights of a component into `n` files, as large models are published."
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    names = sorted(weights)
    where = {}
    file.unlink()
    for i in range(n):
        cut = names[len(names) * i // n:len(names) * (i + 1) // n]
        part = f"model-{i + 1:05}-of-{n:05}.safetensors"
        where |= dict.fromkeys(cut, part)
        save_file({k: weights[k] for k in cut}, folder/part)
    index = dict(metadata=dict(total_size=0), weight_map=where)
    (folder/f"{file.name}.index.json").write_text(json.dumps(index))
    return where


VAE, TEXT, TRANSFORMER = "AutoencoderKLQwenImage", "Qwen2_5_VLForConditionalGeneration", "QwenImageTransformer2DModel"


def write_pairs(root, sizes, controls=1, caption="invert the colours", seed=0):
    "Random pairs of the given (width, height); the target inverts the first control."
    folders = [root/"training_images", root/"control_images", *(root/f"control_images_{n + 1}" for n in range(1, controls))]
    for f in folders: f.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for i, (w, h) in enumerate(sizes):
        images = [rng.integers(0, 255, (h, w, 3), dtype=np.uint8) for _ in range(controls)]
        Image.fromarray(255 - images[0]).save(root/"training_images"/f"{i:04}.png")
        (root/"training_images"/f"{i:04}.txt").write_text(caption if isinstance(caption, str) else caption[i])
        for f, p in zip(folders[1:], images): Image.fromarray(p if f.name == "control_images" else np.ascontiguousarray(p.transpose(1, 0, 2))).save(f/f"{i:04}.png")
    return root


@contextmanager
def small_areas(variant, control, vl):
    "The areas that the edit pipelines hard-code made small; all in pixels."
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit_v1, pipeline_qwenimage_edit_plus as edit_plus
    module = edit_v1 if variant == "v1" else edit_plus
    real = module.calculate_dimensions
    with pytest.MonkeyPatch.context() as mp:
        mp.setattr(module, "calculate_dimensions", lambda area, ratio: real(control if area == 1024 * 1024 else area, ratio))
        if variant != "v1":
            mp.setattr(edit_plus, "CONDITION_IMAGE_SIZE", vl)
            mp.setattr(edit_plus, "VAE_IMAGE_SIZE", control)
        yield


class PatchConvolutions(TorchDispatchMode):
    "Counts the 3-D convolutions with the patches of a text encoder's vision tower."
    def __init__(self, text_encoder):
        super().__init__()
        self.shape = text_encoder.model.visual.patch_embed.proj.weight.shape
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        convolves = function is torch.ops.aten.convolution.default
        if convolves and args[1].shape == self.shape:
            self.count += 1
        return function(*args, **kwargs or {})


def entries_of(layer) -> dict:
    "{kind: {key: [shard, begin, size, header]}} of a packed layer, sorted."
    found = {}
    for kind, table in sorted(layer.index.items()):
        found[kind] = {key: list(table[key]) for key, _ in layer.entries(kind)}
    return found


def older_index(
    kinds:dict, # of `entries_of`
    rest:dict, # shards, identities, perhaps sha256 of the shards
) -> bytes:
    "The index of a packed cache as versions before the database wrote it."
    lines = ['{"entries": {']
    for kind, rows in sorted(kinds.items()):
        lines.append(f"{json.dumps(kind)}: {{")
        lines += [f"{json.dumps(key)}: {json.dumps(row)}, " for key, row in sorted(rows.items())]
        lines[-1] = lines[-1][:-2] + "}, "
    lines[-1] = lines[-1][:-2] + "}, "
    lines.append(json.dumps(dict(format="qie_nb-pack-1") | rest, sort_keys=True)[1:-1])
    checksum = hashlib.sha256("".join([*lines, "}"]).encode()).hexdigest()
    return "\n".join([*lines, f', "checksum": "{checksum}"}}']).encode()


def make_older(
    folder:Path, # of a packed cache, which gets an older index
    digests=True, # has it the sha256 of the shards?
) -> Path: # the index
    "Turn a packed cache into one of a version before the database."
    layer, index = open_layer(folder), folder/INDEX
    rest = dict(shards=layer.shards, identities=layer.identities)
    if digests: rest["sha256"] = json.loads(index.read_text())["sha256"]
    text = older_index(entries_of(layer), rest)
    (folder/DATABASE).unlink()
    index.write_bytes(text)
    return index


def signed_again(
    folder:Path, # of a packed cache
    **changes, # of the index
):
    "Make the index of a packed cache right for its database, as a hostile author would."
    index = json.loads((folder/INDEX).read_text())
    data = (folder/DATABASE).read_bytes()
    index["database"] |= dict(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    index |= changes
    (folder/INDEX).write_text(json.dumps(index | dict(checksum=index_checksum(index))))


def merged(base, changes):
    "Sections {name: {setting: value}}, those of `changes` over those of `base`."
    return {name: base.get(name, {}) | changes.get(name, {}) for name in [*base, *(n for n in changes if n not in base)]}


def settings(root, tmp_path, variant="2511", **sections):
    return merged(dict(
        model=dict(pretrained_model_name_or_path=str(tiny_folder(variant)), lora=dict(r=4, lora_alpha=8)),
        data=dict(dataset_path=str(root), image_size=[64, 64], batch_size=2, caption_dropout_rate=0.3),
        train=dict(output_dir=str(tmp_path), device="cpu", mixed_precision="no", num_epochs=2, save_interval=0, eval_interval=0, eval_at_start=False),
        cache=dict(cache_dir=str(tmp_path/"cache")), optimizer=dict(lr=1e-3), logging=dict(log_dir=str(tmp_path/"runs"), report_to="none")), sections)


def adapters_equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(lora_state(a.transformer).values(), lora_state(b.transformer).values(), strict=True))


def adapters_close(a, b, rtol=1e-3, atol=1e-5):
    "The adapters of two trainers are equal up to rounding."
    a, b = lora_state(a.transformer), lora_state(b.transformer)
    assert a.keys() == b.keys()
    for k in a: torch.testing.assert_close(a[k], b[k], rtol=rtol, atol=atol, msg=lambda m: f"{k}: {m}")


def random_lora(transformer, std=0.1):
    "Gives a fresh adapter random weights, so that it has an effect; returns its transformer."
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for n, p in transformer.named_parameters():
            if "lora_B" in n: p.copy_(torch.randn(p.shape, generator=g) * std)
    return transformer


def on_call(monkeypatch, owner, name, fn):
    "`fn` is called before each call of a function, with the same arguments."
    real = getattr(owner, name)
    def wrapped(*args, **kw):
        fn(*args, **kw)
        return real(*args, **kw)
    monkeypatch.setattr(owner, name, wrapped)


@contextmanager
def interrupted(owner, name, at, counts=lambda *a: True):
    "The `at`-th call of a function, of those that count, raises KeyboardInterrupt."
    calls = []
    def count(*args):
        if counts(*args): calls.append(name)
        if len(calls) == at: raise KeyboardInterrupt
    with pytest.MonkeyPatch.context() as mp, pytest.raises(KeyboardInterrupt):
        on_call(mp, owner, name, count)
        yield


COMPILES = ["qint4"] # quantizations that compile C++ at their first use, for a minute


def slow(*row): return pytest.param(*row, marks=pytest.mark.slow)


def weekly(*row):
    "A row of `parametrize` that only `make test-weekly` runs."
    return pytest.param(*row, marks=pytest.mark.weekly)


def slow_except(everyday, cases, expensive=()):
    """Rows for `parametrize`, of which each change runs one for each value of each parameter.

    Those in `everyday` are not marked. Of the others, in their order, a row with a value that no earlier one had is `slow`,
    and the rest is `weekly`, as are all rows with a value of `expensive`."""
    everyday = [row_of(case) for case in everyday]
    seen = {(place, value) for row in everyday for place, value in enumerate(row)}
    rows = []
    for row in map(row_of, cases):
        values = set(enumerate(row))
        if row in everyday:
            rows.append(pytest.param(*row))
        elif values <= seen or any(value in expensive for value in row):
            rows.append(weekly(*row))
        else:
            rows.append(slow(*row))
            seen |= values
    return rows


def row_of(case) -> tuple:
    "The values of a case: those of a tuple, or itself."
    return case if isinstance(case, tuple) else (case,)


def close_images(a, b, levels=1):
    "Two computed images are equal up to so many grey levels; rounding alone may change one."
    return a.shape == b.shape and np.abs(a.astype(int) - b).max() <= levels


class OnStep(Callback):
    "`fn(trainer)` after every step."
    def __init__(self, fn): self.on_step_end = fn


class StopAt(Callback):
    def __init__(self, n): self.n = n
    def on_step_end(self, t):
        if t.global_step == self.n: t.state.stop = "test"


def few_trials(script, request, tmp_path_factory):
    "The selected cases of cache_fault_trials.py or crash_trials.py, run in a process that may fork: {name: result}."
    chosen = [item.callspec.params["case"] for item in request.session.items if item.fspath == request.node.fspath and "results" in item.fixturenames]
    here, out = Path(__file__).parent, tmp_path_factory.mktemp(script)/"results.json"
    paths = os.pathsep.join(filter(None, [str(here.parent), os.environ.get("PYTHONPATH")]))
    run = subprocess.run([sys.executable, here/f"{script}.py", "--only", *chosen, "--out", out], capture_output=True, text=True, env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=paths))
    assert out.is_file(), run.stdout[-2000:] + run.stderr[-2000:]
    return {r["name"]: r for r in json.loads(out.read_text())["cases"]}


@dataclass
class TrainedRun:
    "A finished run: 5 pairs, one of them for validation, 2 epochs of 4 steps, checkpoints after every second step, TensorBoard log, evaluations."
    folder: Path    # of everything below
    root: Path      # data set
    cache: Path     # filled, with the modulation table
    output: Path    # `train.output_dir`: checkpoints/step_00000002 ... 8, logs, inference
    lora: Path      # LoRA file in diffusers format
    trainer: object # as `fit` left it
    losses: list    # of the 8 steps

    def settings(self, output=None, **sections):
        "Configuration of the run, with another output folder and other values."
        out = Path(output or self.output)
        base = merged(RUN, dict(train=dict(output_dir=str(out)), logging=dict(log_dir=str(out/"runs"))))
        return settings(self.root, self.folder, **merged(base, sections))

    def copy(self, to): # a copy of the output folder that a test may change
        shutil.copytree(self.output, to)
        return to


RUN = dict(data=dict(batch_size=1), train=dict(save_steps=2, keep_checkpoints=9, val_fraction=0.2, eval_steps=4, eval_images=1),
           logging=dict(report_to="tensorboard", log_every=1))


def make_trained_run(folder):
    from qie_nb.trainer import QwenImageEditTrainer
    run = TrainedRun(folder, write_pairs(folder/"set", ((48, 32),) * 4 + ((32, 48),)), folder/"cache", folder/"out", None, None, [])
    run.trainer = QwenImageEditTrainer(run.settings())
    run.trainer.cache_embeddings()
    run.trainer.callbacks.append(OnStep(lambda t: run.losses.append(float(t.state.loss))))
    run.trainer.fit()
    run.lora = run.trainer.save_lora(folder/"lora")
    return run


class Scaled(torch.nn.Module):
    "Predicts its input times a number."
    def __init__(self, scale=0.7): super().__init__(); self.scale = torch.nn.Parameter(torch.tensor(scale))
    def forward(self, hidden_states, **kw): return (hidden_states * self.scale,)


def made_batch(B=2, h=4, w=6, controls=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    control = [torch.randn(B, 16, 1, 2 + 2 * k, 4, generator=g) for k in range(controls)]
    return dict(pixel_latent=torch.randn(B, 16, 1, h, w, generator=g), control_latent=control if controls > 1 else control[0], prompt_embed=torch.randn(B, 3, 8, generator=g), prompt_embeds_mask=None)


def modulation_reads(monkeypatch):
    "(name, part) of each read of a modulation layer's weights."
    reads, opened = [], modulation.open_checkpoint
    class Counted:
        def __init__(self, name, part): self.name, self.part = name, part
        def __getitem__(self, at): reads.append((self.name, str(at))); return self.part[at]
    monkeypatch.setattr(modulation, "open_checkpoint", lambda folder: {k: Counted(k, v) if "_mod." in k else v for k, v in opened(folder).items()})
    return reads


PATIENCE = 900 # seconds to wait for a process: at load 30 one needed 300 s for 20 tiny steps


def wait_for(condition, what, seconds=PATIENCE, process=None):
    "Waits until `condition()` is true and returns its value; fails if this `Popen` ends before."
    end = time.monotonic() + seconds
    while True:
        ended = process is not None and process.poll() is not None
        value = condition()
        if value: return value
        if ended: raise RuntimeError(f"the process ended with {process.returncode} before {what}")
        if time.monotonic() > end: raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.05)


def finish(process, code=0, seconds=PATIENCE) -> str: # what it printed, "" without a pipe
    "Waits for the end of a process (`Popen`), which must have this exit code."
    late = False
    try:
        said, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        process.kill()
        said, errors = process.communicate()
    last = (said or "")[-3000:] + (errors or "")[-3000:]
    if late: raise TimeoutError(f"waited {seconds} s for {process.args}: {last}")
    assert process.returncode == code, f"exit code {process.returncode}: {last}"
    return said or ""
