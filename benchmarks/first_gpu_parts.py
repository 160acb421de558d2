"""The parts of first_gpu.py beside the tiny model: the machine, a block, full size, launching, stopping.

Full size uses the code of step_gpu.py; with `--device cpu` the widths are tiny and compiled graphs run without kernels.
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import step_gpu
from synthetic_checkpoint import made_up, model_folder

CARDS = {"T4": 15.6e9, "RTX 4090": 25.3e9} # bytes that torch reports


class Rows:
    "Runs rows of a part; nothing that one raises ends the others."

    def __init__(self, note, device: str, only=None):
        self.note = note
        self.device = torch.device(device)
        self.only = only

    def add(self, name: str, fn, **facts):
        "Note what `fn` returns, with what is `wrong`, or why it failed."
        if self.only and name not in self.only:
            return
        free_memory(self.device)
        began = time.perf_counter()
        try:
            row = fn() or {}
        except Exception as e:
            where = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(e.__traceback__)][-4:]
            row = dict(failed=f"{type(e).__name__}: {str(e).strip()[:500]}", where=where)
            e.__traceback__ = None # it holds tensors
        self.note(name, took=round(time.perf_counter() - began, 2), **facts, **row)
        free_memory(self.device)


def free_memory(device: torch.device):
    "Return what is not in use, and begin to look for a peak."
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wrong_if(*pairs) -> list: # of sentences
    "The sentences whose condition holds."
    return [sentence for condition, sentence in pairs if condition]


# --- 1: the machine
def facts(device: str, note, only=None):
    "Driver, libraries, compilers, one kernel, pinned memory, what the library sees and would choose."
    rows = Rows(note, device, only)
    rows.add("torch", partial(torch_facts, device))
    rows.add("what the library sees", library_facts)
    rows.add("libraries", import_libraries)
    rows.add("compiler", compiler)
    rows.add("one compiled kernel", partial(one_kernel, device))
    rows.add("pinned memory", partial(pinned_memory, device))
    rows.add("patch embedding", partial(patch_embedding, device))


def torch_facts(device: str) -> dict:
    "What torch says of the GPU and of its allocator."
    import qie_nb # noqa: F401, sets the allocator

    found = dict(
        torch=torch.__version__, built_for=torch.version.cuda, allocator=os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    )
    if device == "cpu":
        return found
    if not torch.cuda.is_available():
        return found | dict(wrong=["torch sees no GPU"])
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    torch.ones(1, device=device) # torch reads the allocator's settings at the first tensor
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    expandable = settings.get("expandable_segments")
    asked = "expandable_segments:True" in (found["allocator"] or "")
    return found | dict(
        wrong=wrong_if((asked and not expandable, "segments of GPU memory do not grow")),
        gpu=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        total_GB=round(total / 1e9, 2),
        free_GB=round(free / 1e9, 2),
        count=torch.cuda.device_count(),
        expandable_segments=expandable,
        cudnn=torch.backends.cudnn.version(),
    )


def library_facts() -> dict:
    "The facts from which a plan is made, and the plan of a run with the defaults."
    from qie_nb.planning.facts import this_machine_facts

    machine = this_machine_facts()
    return dict(machine=repr(machine))


def import_libraries() -> dict:
    "Import what a run may use; the name of bitsandbytes' binary."
    found, wrong = {}, []
    for name in (
        "bitsandbytes",
        "optimum.quanto",
        "torchao",
        "triton",
        "peft",
        "accelerate",
        "diffusers",
        "transformers",
    ):
        try:
            module = __import__(name)
            found[name] = getattr(module, "__version__", "yes")
        except Exception as e:
            found[name] = None
            wrong.append(f"{name}: {type(e).__name__}: {str(e)[:150]}")
    try:
        from bitsandbytes.cextension import lib

        found["bitsandbytes' library"] = str(getattr(lib, "_lib", lib))
    except Exception as e:
        wrong.append(f"bitsandbytes' library: {type(e).__name__}: {str(e)[:150]}")
    return dict(found=found, wrong=wrong)


def compiler() -> dict:
    "Has triton what it needs at its first use: a C compiler and `Python.h`?"
    from shutil import which

    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return dict(compiler=which("cc") or which("gcc"), header=header.is_file())


def one_kernel(device: str) -> dict:
    "Compile a product with what follows it, and compare."
    x = torch.randn(64, 64, device=device)

    def fn(t):
        return torch.nn.functional.gelu(t @ t).sum(0)

    compiled = torch.compile(fn, fullgraph=True, backend="eager" if device == "cpu" else "inductor")
    difference = float((compiled(x) - fn(x)).abs().max())
    return dict(
        difference=difference, wrong=wrong_if((difference > 1e-2, f"the compiled kernel is off by {difference:.2g}"))
    )


def pinned_memory(device: str) -> dict:
    "Small buffers as a swapped tiny block has them; CUDA refuses two in one page."
    found = step_gpu.pinned_buffers(argparse.Namespace(device=torch.device(device)))
    return found | dict(wrong=wrong_if((found["pinned"] is False, "buffers are not pinned")))


def patch_embedding(device: str) -> dict:
    "Seconds of the vision tower's patch embedding as a Conv3d and as a product, bfloat16, 1,024 patches."
    conv = torch.nn.Conv3d(3, 1280, (2, 14, 14), (2, 14, 14), bias=False).to(device, torch.bfloat16)
    x = torch.randn(1024, 3 * 2 * 14 * 14, device=device, dtype=torch.bfloat16)
    ways = {
        "conv3d": lambda: conv(x.view(-1, 3, 2, 14, 14)).flatten(1),
        "product": lambda: torch.nn.functional.linear(x, conv.weight.flatten(1)),
    }
    bench = argparse.Namespace(device=torch.device(device))
    with torch.no_grad():
        difference = float((ways["conv3d"]() - ways["product"]()).abs().max())
        seconds = {name: sorted(step_gpu.timed(bench, fn, runs=3, warm=1))[1] for name, fn in ways.items()}
    return dict(seconds_of=seconds, difference=difference, wrong=wrong_if((difference > 0.1, "the two differ")))


# --- 3: one block
def one_block(device: str, note, only=None):
    "Each quantization's layer and block against the CPU, scaled float16 with outliers, the decoder's memory."
    rows = Rows(note, device, only)
    bench = bench_of(device)
    from qie_nb.models.quantizations.known import QUANTIZATIONS

    for side in (512, 1024):
        for dtype in (torch.float32, torch.bfloat16):
            rows.add(f"decoder, {side}, {str(dtype)[6:]}", partial(decoder_memory, device, side, dtype))
    for kind in (None, "nf4", "qint8"):
        rows.add(f"float16 with outliers, {kind or 'plain'}", partial(scaled_float16, device, kind))
    # what is packed for a kind of GPU comes last: quanto compiles its kernels, for minutes
    for kind in sorted(QUANTIZATIONS, key=lambda name: QUANTIZATIONS[name].packed):
        rows.add(f"layer, {kind}", partial(quantized_layer, bench, kind))


def quantized_layer(bench, kind: str) -> dict:
    "A layer here and on the CPU; relative differences."
    row = step_gpu.quantized_layer(bench, kind)
    off = row["difference"]
    return row | dict(wrong=wrong_if((not off < 0.02, f"{off:.2g} between this device and the CPU")))


def scaled_float16(device: str, kind: str) -> dict:
    "One block in scaled float16 against float32, with a trained model's outliers, in benchmarks/fp16.py."
    out = Path(tempfile.mkdtemp()) / "fp16.json"
    command = [
        sys.executable,
        str(Path(__file__).with_name("fp16.py")),
        "--layers",
        "1",
        "--modes",
        "float32",
        "half",
        "--steps",
        "1",
        "--out",
        str(out),
    ]
    command += ["--kind", kind] if kind else []
    command += ["--tiny"] if device == "cpu" else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return dict(failed=done.stderr.strip()[-400:])
    exact, half = json.loads(out.read_text())["results"]
    errors = half.get("errors", {})
    bad = [f"{name}: {e}" for name, e in errors.items() if e is None or e > 0.05]
    return dict(
        errors=errors,
        kernel=half.get("kernel"),
        seconds_of=dict(float32=exact["seconds"], half=half["seconds"]),
        wrong=bad + wrong_if((not half["finite_gradients"], "gradients are not finite")),
    )


def decoder_memory(device: str, side: int, dtype: torch.dtype) -> dict:
    "Peak bytes of decoding one image, against what the plan counts."
    from diffusers import AutoencoderKLQwenImage
    from qie_nb.models.encoders import decode_latents
    from qie_nb.models.loading import work_bytes

    tiny = device == "cpu"
    sizes = dict(base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1) if tiny else {}
    vae = AutoencoderKLQwenImage(**sizes).to(device, dtype).eval()
    pixels = 64 if tiny else side
    free_memory(torch.device(device))
    held = torch.cuda.memory_allocated() if not tiny else 0
    image = decode_latents(vae, torch.randn(1, 16, 1, pixels // 8, pixels // 8))
    planned = work_bytes(side * side, dtype.itemsize)["vae"]
    if tiny:
        return dict(shape=list(image.shape), planned_GB=round(planned / 1e9, 2))
    peak = torch.cuda.max_memory_allocated() - held
    return dict(
        peak_GB=round(peak / 1e9, 2),
        planned_GB=round(planned / 1e9, 2),
        wrong=wrong_if((peak > 1.05 * planned, f"decoding takes {peak / planned:.2f} times the plan")),
    )


# --- full size
def bench_of(device: str, steps: int = 3, warm: int = 2) -> step_gpu.Bench:
    "step_gpu's bench, with its files in a temporary folder."
    folder = Path(tempfile.mkdtemp(prefix="first_gpu_"))
    args = argparse.Namespace(
        tiny=device == "cpu", minutes=60.0, again=True, out=folder / "step.json", modes=None, steps=steps, warm=warm
    )
    bench = step_gpu.Bench(args)
    bench.tmp = folder
    bench.folder = folder / "model"
    return bench


def with_model(bench, layers: int = None) -> step_gpu.Bench:
    "Write the model's folder, with fewer layers if asked."
    if layers and not bench.tiny:
        bench.model = bench.model | dict(num_layers=layers)
    model_folder(bench.folder, "2509", bench.model, tiny=bench.tiny)
    return bench


def pretending(bench):
    "On a CPU, graphs are made without kernels and swapping is allowed."
    return step_gpu.as_on_a_gpu() if bench.tiny else nullcontext()


def trained(bench, mode: dict, how: str, size: int) -> dict:
    "A mode's row, with what is wrong in it."
    with pretending(bench):
        row = step_gpu.mode_of(bench, mode, how, size)
    over = row.get("peak_over_plan") or 1
    return row | dict(
        wrong=wrong_if(
            (not row["finite"], "a loss is not finite"),
            (over > 1.03, f"the peak is {over:.2f} times the plan"),
            (row["graphs_made_later"] > 0, "graphs were made again after the first steps"),
        )
    )


def full_bf16(device: str, note, only=None):
    "bfloat16, 1024: compiled without recomputation, and selective without compiling."
    rows = Rows(note, device, only)
    bench = with_model(bench_of(device))
    compiled, how = step_gpu.MODES["no recompute, table, compiled"]
    rows.add("no recomputation, compiled", partial(trained, bench, compiled, how, 1024))
    eager = step_gpu.change(step_gpu.TABLE, train=dict(gradient_checkpointing="selective"))
    rows.add("selective, eager", partial(trained, bench, eager, "selective", 1024))


@contextmanager
def memory_of(card: str, device: str):
    "Within, torch may take no more than another card has."
    if device == "cpu":
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, CARDS[card] / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def as_on_a_t4(device: str, note, only=None):
    "nf4 in scaled float16 at 512 with a T4's attention kernel; a decoded image of 512 and of 1024 beside it."
    rows = Rows(note, device, only)
    bench = with_model(bench_of(device))
    mode = step_gpu.change(
        step_gpu.QUANTIZED("nf4"), train=dict(gradient_checkpointing="selective", mixed_precision="fp16")
    )
    kernel = nullcontext() if bench.tiny else sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    with memory_of("T4", device), kernel:
        rows.add("nf4, fp16, selective, 512", partial(trained, bench, mode, "selective", 512))
        for side in (512, 1024):
            rows.add(f"decoding at {side} beside it", partial(decoder_memory, device, side, torch.float32))


def as_on_a_4090(device: str, note, only=None):
    "qfloat8 and nf4 at 1024 in 24 GB."
    rows = Rows(note, device, only)
    bench = with_model(bench_of(device))
    with memory_of("RTX 4090", device):
        for kind in ("qfloat8", "nf4"):
            mode = step_gpu.change(step_gpu.QUANTIZED(kind), train=dict(gradient_checkpointing="selective"))
            rows.add(f"{kind}, selective, 1024", partial(trained, bench, mode, "selective", 1024))


def swapped(device: str, note, only=None):
    "Twenty blocks: all on the device, swapped, with offloaded inputs, both; the losses must be equal."
    rows = Rows(note, device, only)
    bench = with_model(bench_of(device), layers=20)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True) # else two resident runs differ, too: attention's gradients are sums in any order
    modes = {
        "resident": {},
        "swapped": dict(blocks_to_swap=True),
        "offloaded": dict(offload_activations=True),
        "both": dict(blocks_to_swap=True, offload_activations=True),
    }
    losses = {}

    def one(name):
        row = trained(bench, step_gpu.change(step_gpu.TABLE, train=modes[name]), "full", 1024)
        losses[name] = row["losses"]
        if losses[name] != losses.get("resident", losses[name]):
            row["wrong"].append(f"losses {losses[name]} differ from the resident run's {losses['resident']}")
        return row

    for name in modes:
        rows.add(name, partial(one, name))


# --- 8: encoding
def text_encoder(device: str, note, only=None):
    "The text encoder in nf4 with float32 and bfloat16 products: four pairs at 512."
    rows = Rows(note, device, only)
    for precision in ("no", "bf16"):
        rows.add(f"nf4, mixed_precision {precision}", partial(encode, device, precision))


def encode(device: str, precision: str) -> dict:
    "Precompute four pairs with random weights."
    import contextlib
    import io
    import first_gpu_tiny
    from qie_nb.trainer import QwenImageEditTrainer

    bench = bench_of(device)
    model_folder(bench.folder, "2509", bench.model, encoders=True, tiny=bench.tiny)
    first_gpu_tiny.write_pairs(bench.tmp / "pairs", 4)
    side = 64 if bench.tiny else 512
    config = dict(
        model=dict(pretrained_model_name_or_path=str(bench.folder), text_encoder_quantize="nf4"),
        data=dict(dataset_path=str(bench.tmp / "pairs"), image_size=[side, side]),
        cache=dict(cache_dir=str(bench.tmp / "cache")),
        train=dict(device=device, mixed_precision=precision, output_dir=str(bench.tmp / "out"), num_processes=1),
    )
    with made_up(bench.device), contextlib.redirect_stdout(io.StringIO()):
        trainer = QwenImageEditTrainer(config)
        report = trainer.cache_embeddings()
    row = dict(encoded=report.encoded, encoding_seconds=round(report.seconds, 1), **step_gpu.memory(bench))
    return row | dict(
        wrong=wrong_if(
            (len(report.skipped) > 0, f"{len(report.skipped)} samples were skipped"),
            (report.encoded != 4, f"{report.encoded} of 4 samples were encoded"),
        )
    )


# --- 9: processes
JOB = """
import json
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from diffusers import QwenImageTransformer2DModel
from torch.distributed.fsdp import FSDPModule

from qie_nb.config import make_config
from qie_nb.devices.processes import prepare_distributed
from qie_nb.devices.strategies.fsdp import shard
from qie_nb.lora.adapters import add_lora
sys.path.insert(0, sys.argv[2])
from synthetic_checkpoint import SMALL

kind, device = sys.argv[1], sys.argv[3]
if kind == "fsdp":
    os.environ |= dict(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
else:
    os.environ["LOCAL_RANK"] = "0" # both ranks compute on the one GPU
    torch.distributed.init_process_group("gloo")
accelerator = Accelerator(cpu=device == "cpu", mixed_precision="no")
if kind == "fsdp" and device == "cpu": # accelerate makes DDP of it
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator.state.__dict__ |= dict(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
torch.manual_seed(0)
model = QwenImageTransformer2DModel(**SMALL)
model.requires_grad_(False)
add_lora(model, make_config().model.lora)
prepare = shard if kind == "fsdp" else prepare_distributed # one process alone is not wrapped by the second
wrapped = prepare(model.to(accelerator.device), accelerator)
side = 4
at = accelerator.device
out = wrapped(hidden_states=torch.randn(1, side * side, 64, device=at), timestep=torch.tensor([0.5], device=at),
              encoder_hidden_states=torch.randn(1, 6, 64, device=at), img_shapes=[[(1, side, side)]],
              return_dict=False)[0]
out.square().mean().backward()
units = [name for name, part in wrapped.named_modules() if isinstance(part, FSDPModule)]
gradients = [float(p.grad.norm()) for p in wrapped.parameters() if p.requires_grad and p.grad is not None]
found = dict(kind=accelerator.distributed_type.value, wrapped=type(wrapped).__name__, units=units,
             processes=accelerator.num_processes, loss=float(out.detach().square().mean()), gradients=len(gradients))
print("RESULT" + json.dumps(found), flush=True)
accelerator.end_training()
"""


def launched(device: str, note, only=None):
    "FSDP2 in one process over NCCL, which refuses two on one GPU; DDP in two that share it, over gloo."
    rows = Rows(note, device, only)
    rows.add("FSDP by blocks, one process", partial(torchrun, device, "fsdp", 1))
    rows.add("DDP, two processes", partial(torchrun, device, "ddp", 2))


def torchrun(device: str, kind: str, processes: int) -> dict:
    "Prepare, one step forward and back."
    job = Path(tempfile.mkdtemp()) / "job.py"
    job.write_text(JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [str(job), kind, str(Path(__file__).parent), device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return dict(failed=done.stderr.strip()[-600:])
    row = json.loads(done.stdout.split("RESULT")[1].splitlines()[0])
    by_blocks = any(unit.startswith("transformer_blocks.") for unit in row["units"])
    return row | dict(
        wrong=wrong_if(
            (kind == "fsdp" and not by_blocks, f"FSDP has the units {row['units']}, no blocks"),
            (kind == "ddp" and row["wrapped"] != "DistributedDataParallel", f"DDP gave a {row['wrapped']}"),
            (row["gradients"] == 0, "no weight got a gradient"),
        )
    )


# --- 10: stopping
RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import first_gpu_tiny, pathlib
from qie_nb.trainer import QwenImageEditTrainer
folder = pathlib.Path(sys.argv[2])
config = first_gpu_tiny.configuration(first_gpu_tiny.mode(precision="bf16"), sys.argv[3], folder, 100000)
t = QwenImageEditTrainer(config)
t.fit()
print("ended at", t.global_step, t.state.stop, flush=True)
"""


def stopping(device: str, note, only=None):
    "Signals in the middle of a run end it with a checkpoint; out-of-memory names settings."
    rows = Rows(note, device, only)
    for name in ("SIGINT", "SIGTERM"):
        rows.add(name, partial(stopped_by, device, name))
    if device != "cpu":
        rows.add("out of memory", out_of_memory)


def stopped_by(device: str, name: str) -> dict:
    "Start a run, send a signal once it steps, and see how it ends."
    import first_gpu_tiny

    root = Path(tempfile.mkdtemp(prefix="first_gpu_"))
    first_gpu_tiny.write_pairs(root / "pairs")
    command = [sys.executable, "-c", RUN, str(Path(__file__).parent), str(root / "run"), device]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    waited = time.monotonic() + 80
    while not list((root / "run").rglob("COMPLETE")) and process.poll() is None and time.monotonic() < waited:
        time.sleep(0.2)
    asked = time.perf_counter()
    process.send_signal(getattr(signal, name))
    text = process.communicate(timeout=60)[0]
    seconds = round(time.perf_counter() - asked, 2)
    return dict(
        end_seconds=seconds,
        code=process.returncode,
        last=text.splitlines()[-1:],
        wrong=wrong_if(("ended at" not in text, f"no orderly end: {text[-300:]}")),
    )


def out_of_memory() -> dict:
    "With a tenth of the card the run ends with advice."
    bench = with_model(bench_of("cuda", steps=1, warm=0))
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        step_gpu.mode_of(bench, step_gpu.TABLE, "full", 1024)
    except torch.OutOfMemoryError as e:
        text = str(e)
        return dict(said=text[:600], wrong=wrong_if(("Try, in this order" not in text, "no advice is given")))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return dict(wrong=["a tenth of the card was enough"])
