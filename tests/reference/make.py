"""Writes what the library decided before settings and variations became one class each.

`plans.json` has the plan's figures, `decisions.json` the trainer's decisions and the comparison on
resume, and `before_variations.zip` a data set, its cache and a checkpoint. `test_reference.py`
computes all of it again and compares.

    python tests/reference/make.py             # writes the two JSON files
    python tests/reference/make.py --archive   # and the archive

Run it ONLY if a difference is a fault that was corrected, and say so in CHANGELOG. The archive was
written by the library as it was, so it is never replaced without `--archive`.

Where the library keeps something is known only to the first section, and to `test_reference.py` as
far as it calls the trainer and the cache. A refactoring that moves functions changes that section.
"""
import argparse, contextlib, dataclasses, functools, io, json, os, re, shutil, sys, tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

HERE = Path(__file__).parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import torch

# --- The library, as the cases see it. Everything that knows where something is kept is in this
# --- section, so that a function that moves is followed here and nowhere else.
from qie_nb.config import describe, make_config
from qie_nb.core import presets
from qie_nb.core.environment import Environment, detect_environment
from qie_nb.planning import cards as planning, first_config
from qie_nb.planning.disk_space import disk_plan
from qie_nb.planning.cards import card_table, parse_gpu, plan, strategy_name

LIBRARY = str(Path(planning.__file__).parents[1]) # its folder, which messages may contain
GPUS = ["RTX 3060", "T4", "RTX 4080", "L4", "A10G", "RTX 3090", "RTX 4090", "RTX 5090", "A100 40", "A100 80", "H100",
        "H200"]
PRESETS = list(presets.GPU_PRESETS)
GIB = {name: planning.GPUS[name].bytes / 2**30 for name in GPUS}
preset_of, first_file = presets.preset_of, first_config.file_text
NOWHERE = "/nowhere/at/all" # a folder that no machine has


def quantization_names() -> list:
    "All values of `model.quantize` that quantize."
    from qie_nb.models.quantizations.known import QUANTIZATIONS
    return list(QUANTIZATIONS)


@contextlib.contextmanager
def remembered():
    """A context in which what depends on arguments alone is computed once.

    It only saves time; without it the values are the same."""
    from qie_nb.planning import memory, plan as run_plan
    from qie_nb.training import run_table
    with contextlib.ExitStack() as stack:
        for owner, name in (
                (planning, "memory_of"), (planning, "step_work"), (planning, "step_seconds"),
                (memory, "memory_of"), (run_plan, "memory_of"), (run_table, "empty_model")):
            found = functools.lru_cache(maxsize=None)(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, found))
        decide = functools.lru_cache(maxsize=None)(memory.is_target)

        def is_target(setting, layer):
            "`is_target`, remembered also for a list."
            return decide(tuple(setting) if isinstance(setting, list) else setting, layer)

        stack.enter_context(mock.patch.object(memory, "is_target", is_target))
        yield


@contextlib.contextmanager
def no_gpu():
    "A context without GPUs, whatever the machine has."
    with mock.patch.object(torch.cuda, "is_available", no), \
         mock.patch.object(torch.cuda, "device_count", nothing), \
         mock.patch.object(torch.backends.mps, "is_available", no):
        yield


def no(*args, **kw) -> bool:
    "Always False."
    return False


def nothing(*args, **kw) -> int:
    "Always 0."
    return 0


def parts_of(memory) -> dict:
    "Bytes of each part of a planned step, and its pinned host memory."
    return {name: size for name, size, _ in memory.parts} | dict(host=memory.host)


def reasons_of(memory) -> list:
    "What the plan says about each part."
    return [why for _, _, why in memory.parts]


def plan_facts(p) -> dict:
    "What a plan found, without the list of strategies."
    facts = dict(asked=parts_of(p.asked), asked_fits=p.fits(p.asked), asked_time=p.time(p.asked))
    facts |= dict(changes=p.changes, tried=[m.total for m in p.tried])
    if p.chosen:
        facts |= dict(chosen=strategy_name(p.chosen.query), total=p.chosen.total, time=p.time())
    return facts


def strategies_of(p) -> list:
    "[name, bytes, pinned bytes, 10^12 operations a step, time, does it fit?] in the plan's order."
    rows = p.data()["strategies"]
    return [[row["strategy"], m.total, m.host, row["work_tf"], row["time"], row["fits"]]
            for row, m in zip(rows, p.tried)]


def on_gpus(p, names) -> dict:
    """{GPU: time if the step fits it, else 'too large'}

    The step is that of the plan's own GPU: not in float32 for one without bfloat16."""
    out = {}
    for name in names:
        other = dataclasses.replace(p, gpu=parse_gpu(name))
        out[name] = other.time(p.asked) if other.fits(p.asked) else "too large"
    return out


# (still the library: a machine with GPUs, and what a trainer decides there)
# name: (GPU as torch reports it, bytes of each, compute capability, native bfloat16?, how many)
MACHINES = {
    "no GPU": None,
    "P100": ("Tesla P100-PCIE-16GB", 17_059_545_088, (6, 0), False, 1),
    "T4": ("Tesla T4", 15_835_660_288, (7, 5), False, 1),
    "2xT4": ("Tesla T4", 15_835_660_288, (7, 5), False, 2),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", 25_393_692_672, (8, 9), True, 1),
    "H100": ("NVIDIA H100 80GB HBM3", 84_929_347_584, (9, 0), True, 1),
    "4xH100": ("NVIDIA H100 80GB HBM3", 84_929_347_584, (9, 0), True, 4)}


def always(value):
    "A function that returns this value, whatever its arguments are."
    def answer(*args, **kw):
        "The value."
        return value
    return answer


@contextlib.contextmanager
def machine(name):
    "A context in which torch reports the GPUs of one of `MACHINES`; compilers and packages exist."
    import qie_nb.trainer # noqa: F401
    # its import looks at the real torch.cuda
    from diffusers import QwenImageTransformer2DModel # noqa: F401
    from qie_nb.planning import facts as planned
    from qie_nb.models.quantizations import base as quantizations, torchao
    from qie_nb.training.optimizers import base as optimizer
    known = MACHINES[name]
    gpu, size, capability, bf16, count = known or ("", 0, (0, 0), False, 0)

    def supported(including_emulation=True):
        "Does it compute in bfloat16?"
        return bf16 or including_emulation

    found = dataclasses.replace(detect_environment(), memory=31 * 10**9 if name == "2xT4" else 10**12)
    facts = SimpleNamespace(name=gpu, total_memory=size, major=capability[0], minor=capability[1])
    fakes = dict(
        is_available=always(known is not None), device_count=always(count),
        get_device_properties=always(facts), get_device_name=always(gpu),
        get_device_capability=always(capability), is_bf16_supported=supported,
        device=always(contextlib.nullcontext()), mem_get_info=always((size - 10**9, size)),
        memory_reserved=nothing, memory_allocated=nothing, empty_cache=nothing)
    with contextlib.ExitStack() as stack:
        for key, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, key, fake))
        for owner, key, fake in (
                (torch.backends.mps, "is_available", no), (shutil, "which", always("/usr/bin/cc")),
                (planned, "find_spec", always(object())), (planned, "detect_environment", always(found)),
                (optimizer, "find_spec", always(object())),
                (quantizations, "library_version", always((9, 9))),
                (torchao, "library_version", always((9, 9))),
                (torchao, "check_torchao", nothing)):
            stack.enter_context(mock.patch.object(owner, key, fake))
        stack.enter_context(mock.patch.dict(os.environ, clear=False))
        for key in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_USE_FSDP", "CC"):
            os.environ.pop(key, None)
        yield


class StandIn(torch.nn.Module):
    "A transformer as far as the decision to compile looks at it."
    def __init__(self, trainer):
        super().__init__()
        dropout = torch.nn.Dropout(trainer.config.model.lora.lora_dropout)
        self.transformer_blocks = torch.nn.ModuleList([torch.nn.Sequential(dropout)])
        if trainer.components.fp16:
            self.fp16_stats = {}


def run_of_blocks(trainer) -> dict:
    "How the trainer would run the transformer's blocks, and the dtype of the adapter's products."
    from qie_nb.devices import edit_model as part
    seen, tr = {}, StandIn(trainer)
    names = ("assert_float32", "prepare_distributed", "watch_attention", "set_up",
             "offload_checkpoint_inputs", "adapters_in_base_dtype")
    from qie_nb.devices.strategies import offload

    def take(name):
        "A function that notes its arguments after the transformer, and returns the transformer."
        def called(model, *args, **kw):
            "Note the arguments."
            seen[name] = [str(a) for a in args]
            return model
        return called

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(part.EditModel, "transformer", tr))
        stack.enter_context(mock.patch.object(trainer, "setup_accelerator", always(None)))
        stack.enter_context(mock.patch.object(trainer.data, "samples", range(40)))
        for name in names:
            owner = next(o for o in (part, part.lora, offload) if hasattr(o, name))
            stack.enter_context(mock.patch.object(owner, name, take(name)))
        said = printed(trainer.prepare_model)
    return dict(checkpointing_and_compiled=seen["set_up"], said=said,
                adapter_in_base_dtype=seen["adapters_in_base_dtype"],
                inputs_offloaded="offload_checkpoint_inputs" in seen)


def printed(function, *args) -> str:
    "What a function prints."
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        function(*args)
    return text.getvalue()


def attempt(function, *args):
    "What a function returns, or the sentence with which it refuses."
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return function(*args)
    except (ValueError, OSError) as e:
        text = f"{type(e).__name__}: {e}".replace(LIBRARY, "qie_nb")
        return re.sub(r"\b[0-9a-f]{12,16}\b", "(digest)", text) # follows diffusers' version


def trainer_facts(t) -> dict:
    "The decisions of a trainer that has loaded nothing."
    from qie_nb.training.run_processes import processes_to_start
    parts = t.components
    encoder = t.encoder()
    return dict(
        device=str(t.device), dtype=str(t.weight_dtype), why=t.dtype_reason, fp16=parts.fp16,
        quantize={k: parts.quantize.get(k) for k in ("transformer", "text_encoder")},
        checked=attempt(parts.check), offload=list(parts.offload),
        encoders=[str(t.vae_device), str(t.text_device)],
        encoder_batch=attempt(getattr, encoder, "batch_size"),
        placement=parts.fixed_weights or "on its device",
        table=attempt(table_setting, t.run_table), layers_because=attempt(t.run_table.why_layers),
        processes=attempt(processes_to_start, t), blocks=attempt(run_of_blocks, t))


def table_setting(run_table):
    "When a table replaces the modulation layers, in the words of the setting."
    from qie_nb.core.choice import ALWAYS, IN_TRAINING, NEVER
    return {ALWAYS: True, IN_TRAINING: "auto", NEVER: False}[run_table.setting()]


def advice_for(config) -> list:
    "What an out-of-memory error in training names: (setting, GB saved)."
    from qie_nb.planning.plan import Planner
    return [[str(change), change.saved] for change in Planner(config).ways_to_train()]


def schedule_facts(config, batches=37) -> dict:
    "Steps of a run of so many batches an epoch, and after which of them it saves and evaluates."
    from qie_nb.planning.decisions import choose_eval_interval, choose_length, choose_save_interval
    from qie_nb.planning.facts import PairFacts
    from qie_nb.training.callbacks import RunState, due
    c, state = config.train, RunState()
    length = choose_length(c, PairFacts(batches))
    state.set_lengths(length.value, batches, c.gradient_accumulation_steps)
    saves = choose_save_interval(c, length).value.of(state.max_steps)
    saved, evaluated, per_step = [], [], c.gradient_accumulation_steps
    intervals = choose_eval_interval(c).value.of(state.max_steps)
    while state.global_step < state.max_steps:
        state.advance(min(per_step, batches - state.position), batches)
        if due(state, *saves):
            saved.append(state.global_step)
        if due(state, *intervals):
            evaluated.append(state.global_step)
    return dict(epochs=state.num_epochs, steps=state.max_steps, saved=saved, evaluated=evaluated)


def rates(settings) -> list:
    "The learning rate before some steps of a run of 100."
    from qie_nb.training.step import make_schedule
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = make_schedule(made, make_config(dict(lr_scheduler=settings)).lr_scheduler, 100, 0)
    out = []
    for step in range(100):
        if step in (0, 1, 5, 10, 33, 50, 77, 99):
            out.append(made.param_groups[0]["lr"])
        made.step()
        schedule.step()
    return out


def limit_of(max_hours, name) -> list:
    "When a run that began at second 5000 ends, on a platform where the session began before."
    from qie_nb.planning.decisions import choose_hours
    from qie_nb.planning.facts import Machine
    known = dict(script={}, kaggle=dict(hours=12, session_start=1000.), colab=dict(hours=12.))
    choice = choose_hours(max_hours, Machine(platform=name, **known[name]))
    return [choice.value.end(5000.), choice.why] if choice.value else [None, ""]


def make_trainer(config):
    "The trainer of a configuration."
    from qie_nb.trainer import QwenImageEditTrainer
    return QwenImageEditTrainer(config)


@contextlib.contextmanager
def working_in(folder):
    "A context with another working directory."
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield Path(folder)
    finally:
        os.chdir(before)


def embedded_model() -> Path:
    "The folder of the model that comes with the library."
    from qie_nb.models.components import resolve_model
    return resolve_model("tiny")


def large_model(folder) -> str:
    "A model folder with the real shapes and next to no weights; returns its path."
    from qie_nb.planning.memory import REAL
    from safetensors.torch import save_file
    out = Path(folder)/"large"
    shutil.copytree(embedded_model(), out)
    for file in (out/"transformer").glob("*.safetensors*"):
        file.unlink()
    save_file({"norm_out.linear.bias": torch.zeros(1, dtype=torch.bfloat16)},
              out/"transformer"/"diffusion_pytorch_model.safetensors")
    config = json.loads((out/"transformer"/"config.json").read_text()) | REAL
    (out/"transformer"/"config.json").write_text(json.dumps(config))
    return str(out)


class ServedFolder:
    "A hub that serves a model folder, with a cache on a disk with so much free space."
    def __init__(self, served, folder, free):
        self.served, self.folder, self.free = Path(served), Path(folder), free

    def files(self, name, revision=None):
        "The commit, and the files with their sizes."
        files = [p for p in self.served.rglob("*") if p.is_file()]
        return "c" * 40, {p.relative_to(self.served).as_posix(): p.stat().st_size for p in files}

    def has(self, name, path, commit):
        "Is it downloaded?"
        return (self.folder/path).is_file()

    def get(self, name, path, commit):
        "Download a file."
        (self.folder/path).parent.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(self.served/path, self.folder/path))


def deletes_shards(setting, kind, free, folder) -> bool:
    "Are the transformer's downloaded files deleted, with so many bytes free?"
    from qie_nb.models import components, hub
    from qie_nb.devices.edit_model import EditModel
    from qie_nb.planning.decisions import choose_delete_shards
    setting = choose_delete_shards(setting).value
    served = ServedFolder(embedded_model(), Path(folder)/"hub", free)
    with mock.patch.object(hub, "HUB", served), \
         mock.patch.object(components, "free_bytes", always(free)), \
         mock.patch.dict(os.environ, QIE_NB_HOME=str(Path(folder)/"home")):
        parts = EditModel("someone/model", quantize=dict(transformer=kind), release=setting)
        return parts.deletes_shards("transformer")


def resume_facts(raw) -> dict:
    "What resuming the archive's checkpoint says with these settings; the archive is the cwd."
    from qie_nb.training.checkpoint import find_checkpoint
    from qie_nb.training.resume import changed_settings, checkpoint_misfit
    config = make_config(raw)
    folder = find_checkpoint("latest", Path("run/checkpoints"))
    t = make_trainer(config)
    t.data.continued = folder
    fingerprint = t.checkpoints.make_fingerprint(t.make_loader())
    t.checkpoints.find(str(folder), fingerprint)
    was = json.loads((folder/"state.json").read_text())["config"]
    return dict(printed=changed_settings(was, config.model_dump(mode="json")),
                before_loading=checkpoint_misfit(folder, config))


def held_out(raw, fraction, seed) -> list:
    "The held-out pairs of the archive's data set."
    from qie_nb.data.samples import config_samples, split_held_out
    from qie_nb.planning.decisions import choose_held_out
    from qie_nb.planning.facts import pair_facts
    config = make_config(merged(raw, dict(train=dict(val_fraction=fraction))))
    samples = list(config_samples(config.data))
    share = choose_held_out(config.train, pair_facts(samples)).value
    return [s.id for s in split_held_out(samples, share, seed)[1]]


def choices_of(name) -> list:
    "The words that a setting accepts."
    from typing import get_args
    part, found = type(make_config(None)), []
    *sections, key = name.split(".")
    for section in sections:
        part = part.model_fields[section].annotation
    waiting = [part.model_fields[key].annotation]
    while waiting:
        kind = waiting.pop(0)
        found += [v for v in get_args(kind) if isinstance(v, (str, bool))]
        waiting += [k for k in get_args(kind) if get_args(k)]
    return found


def setting_names() -> list:
    "(dotted name, default) of all settings."
    return [(row[0], row[1]) for row in describe()]


# --- Plans
MODELS = ("v1", "2509", "2511")
SIZES = ((512, 512), (768, 768), (1024, 1024), (832, 576))
SEVERAL = ("2xT4", "4xT4", "2xL4", "2xRTX 4090", "2xH100")
WITHOUT_BF16 = ("RTX 2080 Ti 11GB", "RTX 8000 48GB")


def text_of(size) -> str:
    "832x576"
    return f"{size[0]}x{size[1]}"


def sized(size, variant=None, **sections) -> dict:
    "A configuration for images of a size, whose controls have the same area."
    data = dict(image_size=list(size), control_area=size[0] * size[1]) | sections.pop("data", {})
    out = dict(data=data, **sections)
    if variant:
        name = f"Qwen/Qwen-Image-Edit-{variant}"
        out["model"] = dict(pretrained_model_name_or_path=name) | out.get("model", {})
    return out


def gpu_plans(model) -> dict:
    "What the plan chooses for each GPU and size, and for each size the list of strategies."
    out = {}
    for size in SIZES:
        for gpu in (*GPUS, *SEVERAL, *WITHOUT_BF16, 24):
            p = plan(model, gpu, config=sized(size))
            out[f"gpu {gpu}, {model}, {text_of(size)}"] = plan_facts(p)
        for gpu in ("2xT4", "RTX 4090"):
            p = plan(model, gpu, config=sized(size))
            out[f"strategies {gpu}, {model}, {text_of(size)}"] = strategies_of(p)
    return out


def plan_texts() -> dict:
    "What the plan says, and its table of GPUs."
    out = {f"cards {n}": line for n, line in enumerate(card_table().splitlines())}
    for gpu in GPUS:
        p = plan("2511", gpu, 512)
        case = f"texts {gpu}, 2511, 512x512, controls of the model's area"
        out[case] = [reasons_of(p.shown), p.notes, p.other, repr(p).splitlines()[0]]
    return out


def preset_plans(model) -> dict:
    "Each preset with each size and quantization: memory, where it fits, and its time there."
    out = {}
    for preset in PRESETS:
        for size in SIZES:
            for kind in ("the preset's", "none", *quantization_names()):
                own = {} if kind == "the preset's" else dict(model=dict(quantize=kind))
                p = plan(sized(size, model, preset=preset, **own), preset)
                fits = {name: m for name, m in on_gpus(p, GPUS).items() if m != "too large"}
                out[f"preset {preset}, {model}, {text_of(size)}, quantize {kind}"] = dict(
                    asked=list(parts_of(p.asked).values()), fits=p.fits(p.asked), on=fits,
                    changes=p.changes)
    return out


def preset_choices() -> dict:
    "The preset for a GPU's name and memory, and the settings of each preset."
    out = {}
    for gpu in (*GPUS, *WITHOUT_BF16, "Quadro RTX 6000", "NVIDIA A100-SXM4-80GB", "Tesla T4"):
        for gib in (8, 11.7, 14.6, 22, 39.5, 79.2):
            names = [preset_of(gpu, gib, count) for count in (1, 2)]
            out[f"preset of {gpu} with {gib} GiB, alone and two"] = names
    for name in ("tiny", *PRESETS):
        for size in SIZES:
            raw = dict(preset=name, data=dict(image_size=list(size)))
            out[f"settings of {name}, {text_of(size)}"] = changed_from_defaults(make_config(raw))
    return out


def changed_from_defaults(config) -> dict:
    "{dotted name: value} of the settings that are not the defaults."
    out, plain_values = {}, config.model_dump(mode="json")
    for name, default in setting_names():
        value = plain_values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if name != "preset" and value != plain(default):
            out[name] = value
    return out


TARGETS = dict(attention="attention", attention_text="attention_text", all_linear="all_linear",
               two=["to_q", "img_mlp.net.2"], modulation=["to_q", "img_mod.1"],
               ends=["img_in", "txt_in", "proj_out", "to_v"],
               pattern=r"transformer_blocks\.\d\.attn\.to_[qkv]")


def optimizer_names() -> list:
    "What the configuration accepts as `optimizer.name`."
    return ["adamw", "adamw8bit", "adafactor", "prodigy"]


def adapter_plans() -> dict:
    "Memory with each optimizer, rank and choice of layers, and what a checkpoint takes."
    out = {}
    for optimizer in optimizer_names():
        for rank in (1, 8, 16, 128):
            for name, layers in TARGETS.items():
                lora = dict(r=rank, target_modules=layers)
                config = sized((768, 768), "2511", model=dict(lora=lora),
                               optimizer=dict(name=optimizer))
                p = plan(config)
                disk = {i.what: i.bytes for i in disk_of(config).items if i.group == "checkpoints"}
                out[f"adapter {optimizer}, r {rank}, {name}"] = dict(
                    parts=parts_of(p.asked), disk=disk)
    return out


def disk_of(config):
    "What a run writes on a machine where nothing is there yet."
    places = dict(train=dict(output_dir=NOWHERE), cache=dict(cache_dir=NOWHERE),
                  logging=dict(log_dir=NOWHERE))
    for section, settings in places.items():
        config = config | {section: settings | config.get(section, {})}
    machine = Environment("script", working=Path(NOWHERE), env=dict(HF_HOME=NOWHERE))
    return disk_plan(config, machine, pairs=50)


ONE_SETTING = dict(
    model=dict(quantize=[True, *quantization_names()], modulation_table=[True, False],
               modulation_table_steps=[[20, 4]], text_encoder_quantize=["nf4", "qint8"],
               text_encoder_offload=[True]),
    lora=dict(use_dora=[True], lora_dropout=[0.1]),
    data=dict(batch_size=[2, 7], control_area=[2**18, 2**21], vl_area=[2**16, 2**20],
              edit_mask=["auto"]),
    train=dict(gradient_checkpointing=[False, "selective"], compile=[True, False],
               blocks_to_swap=[True], offload_activations=[True],
               model_parallel_devices=[["cuda:0", "cuda:1"]],
               mixed_precision=["bf16", "fp16", "no"],
               ema_decay=[0.99], num_processes=[1, 2], gradient_accumulation_steps=[4],
               max_train_steps=[2000], keep_checkpoints=[5],
               val_fraction=[0.1]),
    cache=dict(vae_encoder_device=["cpu"], use_cache=[False]))


def setting_plans() -> dict:
    "The plan with one setting changed: without a GPU, and for a GPU with and one without bfloat16."
    out = {}
    for section, settings in ONE_SETTING.items():
        for name, values in settings.items():
            for value in values:
                own = {section: {name: value}}
                if section == "lora":
                    own = dict(model=dict(lora={name: value}))
                config = sized((1024, 1024), "2511", **own)
                case = f"setting {section}.{name} {json.dumps(value)}"
                p = plan(config)
                out[case] = dict(parts=parts_of(p.asked), why=reasons_of(p.asked), other=p.other)
                out[f"{case}, disk"] = {i.what: [i.bytes, i.why] for i in disk_of(config).items}
                for gpu in ("RTX 4090", "2xT4"):
                    out[f"{case}, {gpu}"] = plan_facts(plan(config, gpu))
    for controls in (1, 2, 3):
        for model in MODELS:
            p = plan(model, "RTX 4090", 768, controls=controls)
            out[f"controls {controls}, {model}"] = plan_facts(p)
    return out


def first_files() -> dict:
    "The settings that `qie-nb init` writes."
    import yaml
    out = {}
    for gpu in (None, *GPUS, "Tesla T4", "NVIDIA GeForce GTX 1080"):
        gib = GIB.get(gpu, 14.7)
        for count in (1, 2, 4):
            for pairs in (0, 5, 40, 400):
                gpus = [] if gpu is None else [(gpu, gib)] * count
                text = first_file("pairs", pairs, gpus)
                out[f"init {gpu} x {count}, {pairs} pairs"] = yaml.safe_load(text)
    return out


PLANS = dict(
    gpus_v1=functools.partial(gpu_plans, "v1"), gpus_2509=functools.partial(gpu_plans, "2509"),
    gpus_2511=functools.partial(gpu_plans, "2511"),
    presets_v1=functools.partial(preset_plans, "v1"),
    presets_2509=functools.partial(preset_plans, "2509"),
    presets_2511=functools.partial(preset_plans, "2511"), choices=preset_choices,
    adapters=adapter_plans,
    settings=setting_plans, files=first_files, texts=plan_texts)


def plan_cases(names=tuple(PLANS)) -> dict:
    "{group of cases: {case: values}} of `plans.json`."
    with remembered(), no_gpu():
        return {name: PLANS[name]() for name in names}


# --- Decisions
RUNS = { # what a case adds to the defaults
    "defaults": {},
    "nf4": dict(model=dict(quantize="nf4", text_encoder_quantize="nf4")),
    "qfloat8, selective": dict(model=dict(quantize="qfloat8"),
                               train=dict(gradient_checkpointing="selective")),
    "fp8_storage, text encoder offloaded": dict(
        model=dict(quantize="fp8_storage", text_encoder_offload=True)),
    "text encoder quantized and offloaded": dict(
        model=dict(text_encoder_quantize="nf4", text_encoder_offload=True)),
    "qint4, block swap": dict(model=dict(quantize="qint4"), train=dict(blocks_to_swap=True)),
    "block swap": dict(train=dict(blocks_to_swap=True)),
    "block swap, dora": dict(train=dict(blocks_to_swap=True), model=dict(lora=dict(use_dora=True))),
    "inputs offloaded": dict(train=dict(offload_activations=True)),
    "inputs offloaded, no checkpointing": dict(
        train=dict(offload_activations=True, gradient_checkpointing=False)),
    "compiled": dict(train=dict(compile=True, gradient_checkpointing=False)),
    "compiled, short, nf4": dict(train=dict(compile=True, max_train_steps=30),
                                 model=dict(quantize="nf4")),
    "short": dict(train=dict(max_train_steps=499)),
    "long": dict(train=dict(max_train_steps=500)),
    "dropout": dict(model=dict(lora=dict(lora_dropout=0.1)), train=dict(max_train_steps=900)),
    "fp16": dict(train=dict(mixed_precision="fp16")),
    "fp16, compiled": dict(train=dict(mixed_precision="fp16", compile=True)),
    "bf16": dict(train=dict(mixed_precision="bf16")),
    "float32": dict(train=dict(mixed_precision="no")),
    "two devices": dict(train=dict(model_parallel_devices=["cuda:0", "cuda:1"])),
    "two devices, block swap": dict(
        train=dict(model_parallel_devices=["cuda:0", "cuda:1"], blocks_to_swap=True)),
    "same device twice": dict(train=dict(model_parallel_devices=["cuda:0", "cuda:0"])),
    "second GPU": dict(train=dict(device="cuda:1")),
    "cpu": dict(train=dict(device="cpu")),
    "two processes": dict(train=dict(num_processes=2)),
    "two processes, two devices": dict(
        train=dict(num_processes=2, model_parallel_devices=["cuda:0", "cuda:1"])),
    "fsdp": dict(train=dict(distributed="fsdp")),
    "encoders elsewhere": dict(cache=dict(vae_encoder_device="cpu", text_encoder_device="cuda:1")),
    "encoder batch": dict(cache=dict(batch_size=7), data=dict(batch_size=4)),
    "no cache": dict(cache=dict(use_cache=False)),
    "modulation trained": dict(model=dict(lora=dict(target_modules=["to_q", "img_mod.1"]))),
    "no table": dict(model=dict(modulation_table=False)),
    "table": dict(model=dict(modulation_table=True)),
    "prodigy": dict(optimizer=dict(name="prodigy")),
    "prodigy, lr 1": dict(optimizer=dict(name="prodigy", lr=1.)),
    "adafactor": dict(optimizer=dict(name="adafactor"), data=dict(batch_size=3)),
    "warm-up of a constant rate": dict(
        lr_scheduler=dict(scheduler_type="constant", warmup_steps=10)),
    "t4x2": dict(preset="t4x2"), "rtx4090": dict(preset="rtx4090"), "h100": dict(preset="h100")}


def run_decisions(folder) -> dict:
    "The trainer's decisions for `RUNS`, with the embedded model and with one of the real shapes."
    out, large = {}, large_model(folder)
    for where in MACHINES:
        with machine(where):
            for model, path in (("tiny", "tiny"), ("large", large)):
                if model == "tiny" and where not in ("no GPU", "2xT4", "H100"):
                    continue
                for name, own in RUNS.items():
                    raw = own | dict(model=dict(pretrained_model_name_or_path=path)
                                     | own.get("model", {}))
                    made = attempt(make_trainer, raw)
                    facts = made if isinstance(made, str) else trainer_facts(made)
                    text = json.dumps(facts).replace(large, "large")
                    out[f"run {name}, {model}, {where}"] = json.loads(text)
    return out


ADVISED = ("defaults", "nf4", "qfloat8, selective", "inputs offloaded, no checkpointing",
           "encoder batch", "adafactor", "rtx4090") # cases of `RUNS`
SCHEDULES = [
    dict(),
    dict(num_epochs=10),
    dict(max_train_steps=10),
    dict(max_train_steps=1000),
    dict(num_epochs=3),
    dict(save_interval=0),
    dict(save_steps=50),
    dict(save_interval=0, save_steps=7),
    dict(eval_interval=2),
    dict(eval_interval=0),
    dict(eval_steps=30),
    dict(eval_interval=3, eval_steps=100),
    dict(gradient_accumulation_steps=4),
    dict(gradient_accumulation_steps=5, num_epochs=2, eval_interval=1),
    dict(max_train_steps=40, gradient_accumulation_steps=50),
]
RATES = [dict(scheduler_type="constant"), dict(), dict(warmup_steps=10),
         dict(scheduler_type="linear", warmup_steps=10), dict(scheduler_type="cosine"),
         dict(scheduler_type="cosine", num_cycles=1.5, warmup_steps=5),
         dict(scheduler_type="cosine_with_restarts", num_cycles=3),
         dict(scheduler_type="polynomial", power=2.)]


def other_decisions(folder) -> dict:
    "Intervals, rates, time limits, deleted files and held-out pairs."
    out = {}
    for name in ADVISED:
        raw = merged(RUNS[name], dict(model=dict(pretrained_model_name_or_path="Qwen/2511")))
        out[f"advice {name}"] = advice_for(make_config(raw))
    out |= {f"steps {json.dumps(t)}": schedule_facts(make_config(dict(train=t))) for t in SCHEDULES}
    out |= {f"rates {json.dumps(s)}": rates(s) for s in RATES}
    for hours in ("auto", None, 2.5):
        for where in ("script", "kaggle", "colab"):
            out[f"time limit {hours}, {where}"] = limit_of(hours, where)
    for setting in ("auto", True, False):
        for kind in (None, "nf4", "qint4", "qfloat8"):
            for free in (1000, 10**12):
                case = f"shards deleted? {setting}, quantize {kind}, {free} bytes free"
                out[case] = deletes_shards(setting, kind, free, folder)
    raw = dict(data=dict(dataset_path="pairs"))
    for fraction in (0, "auto", 0.1, 0.3, 0.9):
        for seed in (0, 1):
            out[f"held out {fraction}, seed {seed}"] = held_out(raw, fraction, seed)
    return out


ANOTHER = { # values of settings for which `another_value` finds none that is accepted
    "data.exclude": ["0001"],
    "preset": "tiny", "model.revision": "main", "model.variant": "2509",
    "model.pretrained_model_name_or_path": "copy", "model.quantize": "qint8",
    "model.text_encoder_quantize": "qint8", "model.modulation_table_steps": [4],
    "model.lora.target_modules": "attention_text", "model.lora.pretrained_weight": "lora",
    "data.dataset_path": "fewer", "data.target_dir": "training_images",
    "model.transformer_file": "one.safetensors", "model.text_encoder_file": "one.safetensors", "data.control_dir": "control_images", "data.prompt": "one prompt for all",
    "data.image_size": [64, 32], "data.control_area": 4096, "data.vl_area": 4096,
    "data.edit_mask": "auto", "train.mixed_precision": "bf16", "train.timestep_sampling": "shift",
    "train.device": "auto", "train.model_parallel_devices": ["cuda:0", "cuda:1"],
    "train.samples": [dict(image="pairs/control_images/0000.png", prompt="sharpen")],
    "train.style_prompts": dict(a="b"), "train.val_path": "fewer", "train.max_hours": 3.,
    "train.test_image_dir": "pairs", "train.num_processes": 2, "train.eval_schedule": "lightning",
    "cache.cache_dir": "packed", "cache.batch_size": 3, "train.val_fraction": 0.3,
    "predict.loras": ["lora"], "optimizer.betas": [0.8, 0.9], "optimizer.name": "adafactor",
    "data.trigger_word": "TOK",
    "cache.vae_encoder_device": "cpu", "cache.text_encoder_device": "cpu",
    "predict.devices.vae": "cpu", "predict.devices.text_encoder": "cpu",
    "predict.devices.transformer": "cpu", "logging.report_to": "tensorboard",
    "lr_scheduler.scheduler_type": "cosine",
    "logging.tracker_options": dict(wandb=dict(mode="offline")),
    "train.seed": 5, "train.resume_checkpoint": "auto", "data.allow_missing_control": True,
    "train.eval_interval": 2, "cache.encoder_id": "abc", "lr_scheduler.num_cycles": 2.}


def another_value(name, value):
    "A value that differs from a setting's own."
    if name in ANOTHER:
        return ANOTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 or 0.5
    choices = choices_of(name)
    if choices:
        return next((c for c in choices if c != value), False)
    return 3 if value is None else "other"


COMBINED = { # settings that count only together with another one
    "train.timestep_shift with fixed_shift": dict(
        train=dict(timestep_sampling="fixed_shift", timestep_shift=2.)),
    "train.logit_mean with logit_normal": dict(
        train=dict(timestep_sampling="logit_normal", logit_mean=1., logit_std=2.)),
    "lora_alpha as it is by default": dict(model=dict(lora=dict(lora_alpha=4.))),
    "target_modules in another order": dict(model=dict(lora=dict(target_modules=["to_v", "to_q"]))),
    "target_modules a preset": dict(model=dict(lora=dict(target_modules="attention"))),
    "val_fraction 0 instead of auto": dict(train=dict(val_fraction=0.)),
    "forced": dict(train=dict(force_resume=True, seed=9)),
    "batches of a step in two accumulated": dict(
        data=dict(batch_size=1), train=dict(gradient_accumulation_steps=2)),
    "several at once": dict(train=dict(seed=9, ema_decay=0.5, max_train_steps=20),
                            optimizer=dict(lr=1.)),
    "cycles of a cosine": dict(lr_scheduler=dict(scheduler_type="cosine", num_cycles=2.)),
    "a second process is a batch more": dict(train=dict(num_processes=2)),
    "nothing changed": {}}


def with_setting(raw, name, value) -> dict:
    "A copy of a nested configuration with one more setting."
    out = json.loads(json.dumps(raw))
    *sections, key = name.split(".")
    inner = out
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    return out


def merged(base, changes) -> dict:
    "Nested settings, those of `changes` over those of `base`."
    out = dict(base)
    for key, value in changes.items():
        out[key] = merged(out.get(key, {}), value) if isinstance(value, dict) else value
    return out


def resume_decisions(raw) -> dict:
    "What happens on resume if one setting alone changes."
    out, now = {}, make_config(raw).model_dump(mode="json")
    for name, default in setting_names():
        value = now
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else default
        other = another_value(name, default if value is None else value)
        said = attempt(resume_facts, with_setting(raw, name, other))
        out[f"resume {name}"] = dict(value=other, result=said)
    for case, changes in COMBINED.items():
        said = attempt(resume_facts, merged(raw, changes))
        out[f"resume, {case}"] = dict(value=changes, result=said)
    return out


def unpacked(folder) -> Path:
    "The archive, unpacked; also with the model's copy, and with fewer pairs."
    shutil.unpack_archive(HERE/ARCHIVE, folder)
    shutil.copytree(embedded_model(), Path(folder)/"copy")
    shutil.copytree(Path(folder)/"pairs", Path(folder)/"fewer")
    for file in Path(folder).glob("fewer/*/0000.*"):
        file.unlink()
    return Path(folder)


def raw_run(folder) -> dict:
    "The configuration in the archive."
    import yaml
    return yaml.safe_load((Path(folder)/"run.yaml").read_text())


def decisions_of(group, folder) -> dict:
    "The cases of one of `DECISIONS`; `folder` has the unpacked archive."
    if group == "runs":
        with working_in(folder/"empty"), remembered():
            return run_decisions(folder/"made")
    with working_in(folder), machine("no GPU"), remembered():
        if group == "resumed":
            return resume_decisions(raw_run(folder))
        return other_decisions(folder/"made")


DECISIONS = ("runs", "resumed", "others")


def decision_cases(groups=DECISIONS) -> dict:
    "{group of cases: {case: values}} of `decisions.json`."
    with tempfile.TemporaryDirectory() as made:
        folder = unpacked(Path(made)/"before")
        (folder/"empty").mkdir()
        return {group: decisions_of(group, folder) for group in groups}


# --- The archive: a data set, its cache in both layouts, and a run
ARCHIVE = "before_variations.zip"
RUN = """\
model: {pretrained_model_name_or_path: tiny, modulation_table: false,
        lora: {r: 2, target_modules: [to_q, to_v]}}
data: {dataset_path: pairs, image_size: [32, 32], control_area: 1024, batch_size: 2,
       caption_dropout_rate: 0.3}
train: {output_dir: run, device: cpu, mixed_precision: "no", max_train_steps: 4, save_steps: 4,
        save_interval: 0, eval_interval: 0, eval_at_start: false, ema_decay: 0.9}
cache: {cache_dir: cache}
optimizer: {lr: 0.01}
logging: {report_to: none, log_dir: runs, log_images: false}
"""


def continued(cache_dir) -> list:
    "The losses of steps 5 to 8 of the run in the cwd; nothing there is changed."
    from qie_nb.trainer import QwenImageEditTrainer
    from qie_nb.training.callbacks import Callback

    class Losses(Callback):
        "Notes the loss of every step."
        def __init__(self):
            self.seen = []

        def on_step_end(self, trainer):
            "Note it."
            self.seen.append(float(trainer.state.loss))

    losses = Losses()
    with tempfile.TemporaryDirectory() as out:
        train = dict(output_dir=out, max_train_steps=8, save_steps=None,
                     resume_checkpoint=str(Path("run/checkpoints/step_00000004").absolute()))
        raw = merged(raw_run("."), dict(train=train, cache=dict(cache_dir=cache_dir),
                                        logging=dict(log_dir=out)))
        with contextlib.redirect_stdout(io.StringIO()):
            QwenImageEditTrainer(raw, [losses]).fit()
    return losses.seen


def write_archive():
    "Write the archive anew."
    from helpers import write_pairs
    from qie_nb.cache import EmbeddingCacheManager
    with tempfile.TemporaryDirectory() as made, working_in(made):
        write_pairs(Path("pairs"), ((32, 32),) * 10)
        Path("run.yaml").write_text(RUN)
        t = make_trainer(raw_run("."))
        t.cache_embeddings()
        EmbeddingCacheManager("cache").pack("packed")
        t.fit()
        shutil.rmtree("runs", ignore_errors=True)
        expected = dict(losses=continued("cache"), loss_4=float(t.state.loss))
        Path("expected.json").write_text(json.dumps(expected))
        shutil.make_archive(HERE/Path(ARCHIVE).stem, "zip", made)
    print(f"{ARCHIVE}: {(HERE/ARCHIVE).stat().st_size / 1e3:.0f} kB")


# --- Files
def plain(value):
    "As JSON would read it back."
    return json.loads(json.dumps(value, default=str))


def named(groups) -> dict:
    "{group and case: values} as JSON has them."
    return {f"{group}: {case}": plain(values)
            for group, cases in groups.items() for case, values in cases.items()}


def write_cases(name, groups):
    "Write cases as JSON, sorted, one a line."
    cases = named(groups)
    lines = [f"{json.dumps(case)}: {json.dumps(cases[case], sort_keys=True)}"
             for case in sorted(cases)]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (HERE/name).write_text(text)
    print(f"{name}: {len(lines)} cases, {len(text) / 1e6:.2f} MB")


def read_cases(name) -> dict:
    "{case: values} of a file that `write_cases` wrote."
    return json.loads((HERE/name).read_text())


def main():
    "Write the files."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archive", action="store_true", help="write the archive anew, too")
    if parser.parse_args().archive:
        write_archive()
    write_cases("plans.json", plan_cases())
    write_cases("decisions.json", decision_cases())


if __name__ == "__main__":
    main()
