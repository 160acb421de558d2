"""What a GPU reaches: its own floor, the bare loop of diffusers and peft, and this library in each mode, in one run.

`make bench-gpu` writes results/step_gpu.json after each part. Weights are random normal numbers at the published model's full size, drawn on
the GPU (benchmarks/synthetic_checkpoint.py); nothing is downloaded. A part fits into ten minutes, and what is in the file already is not measured again:
    python benchmarks/step_gpu.py --part floor | bare | ours | small | infer | quantized | profile   [--modes a,b] [--again] [--minutes 9]
`--tiny` runs the same code on a CPU with tiny widths, to see that it runs.
"""
import argparse, copy, gc, json, math, os, platform, sys, tempfile, time, traceback
from contextlib import contextmanager, nullcontext
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent))
from synthetic_checkpoint import FULL, SMALL, made_up, model_folder # noqa: E402

OUT = Path(__file__).parent/"results"/"step_gpu.json"
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes", "torchao", "optimum-quanto", "triton")
BACKENDS = dict(flash=SDPBackend.FLASH_ATTENTION, cudnn=SDPBackend.CUDNN_ATTENTION, efficient=SDPBackend.EFFICIENT_ATTENTION, math=SDPBackend.MATH)


class Bench:
    "The device, the sizes, the file, the time that is left."
    def __init__(self, a):
        self.a, self.tiny, self.began = a, a.tiny, time.monotonic()
        self.device = torch.device("cpu" if a.tiny else "cuda")
        self.model = SMALL if a.tiny else FULL
        self.text, self.sides = (10, {1024: 8, 512: 4}) if a.tiny else (250, {1024: 128, 512: 64}) # tokens; latent pixels
        self.dim = self.model["attention_head_dim"] * self.model["num_attention_heads"]
        self.out = a.out
        self.result = json.loads(self.out.read_text()) if self.out.is_file() else {}
        if self.result.get("device", self.where()) != self.where() and not a.again: raise SystemExit(f"{self.out} is of {self.result['device']}; give another --out, or --again")
        if a.again and self.result.get("device") != self.where(): self.result = {}

    def where(self):
        if self.device.type == "cpu": return f"CPU, {os.cpu_count()} cores"
        p = torch.cuda.get_device_properties(0)
        return f"{p.name}, {p.total_memory / 1e9:.0f} GB"

    def save(self):
        driver = torch.version.cuda and dict(cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version())
        self.result |= dict(device=self.where(), versions=dict(python=platform.python_version()) | {p: _version(p) for p in LIBRARIES} | (driver or {}), date=datetime.now(timezone.utc).isoformat(timespec="seconds"), tiny=self.tiny)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def over(self): return time.monotonic() - self.began > 60 * self.a.minutes

    def tokens(self, size): return self.text + 2 * (self.sides[size] // 2) ** 2

    def measure(self, part, name, fn):
        "One row of a part: what it gives, or why there is none. Nothing that it raises ends the run."
        rows = self.result.setdefault(part, {})
        if name in rows and "failed" not in rows[name] and not self.a.again: return rows[name]
        if self.a.modes and not any(m == name for m in self.a.modes): return
        if self.over():
            rows.setdefault(name, dict(failed="no time was left; run this part once more"))
            return self.save()
        clean(self)
        began = time.monotonic()
        try: rows[name] = fn()
        except NotThere as e: rows[name] = dict(failed=f"not there: {e}")
        except Exception as e: rows[name] = dict(failed=f"{type(e).__name__}: {str(e).strip()[:400]}", where=_place_of(e))
        rows[name]["seconds_taken"] = round(time.monotonic() - began, 1)
        print(f"{part}: {name}: {json.dumps({k: v for k, v in rows[name].items() if k not in ('losses', 'top')})}", flush=True)
        clean(self)
        self.save()
        return rows[name]


class NotThere(Exception): "A mode that this version does not have."


def _version(p):
    try: return version(p)
    except PackageNotFoundError: return None


def _place_of(e):
    out = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(e.__traceback__)][-3:]
    e.__traceback__ = None # it would hold tensors
    return out


def clean(b):
    gc.collect()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    if b.device.type == "cuda": torch.cuda.empty_cache(), torch.cuda.reset_peak_memory_stats()


def spread(values, digits=4): return dict(median=round(median(values), digits), min=round(min(values), digits), max=round(max(values), digits), runs=len(values))


class Marks:
    "CUDA events; recording them does not wait."
    def __init__(self, device): self.cuda, self.all = device.type == "cuda", []
    def mark(self):
        if not self.cuda: return self.all.append(time.perf_counter())
        self.all.append(torch.cuda.Event(enable_timing=True))
        self.all[-1].record()
    def seconds(self):
        if not self.cuda: return [b - a for a, b in zip(self.all, self.all[1:])]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(self.all, self.all[1:])]


def timed(b, fn, runs=10, warm=3):
    for _ in range(warm): fn()
    marks = Marks(b.device)
    marks.mark()
    for _ in range(runs): fn(); marks.mark()
    return marks.seconds()


def memory(b):
    if b.device.type != "cuda": return {}
    return dict(peak_allocated_GB=round(torch.cuda.max_memory_allocated() / 1e9, 3), peak_reserved_GB=round(torch.cuda.max_memory_reserved() / 1e9, 3))


# --- operations of a step, counted by formula (2 per multiply-add; modulation and the LoRA's own products left out)
def work(b, size, how):
    "Floating-point operations: forward, and backward to activations; `full` recomputes the forward pass, `selective` all of it but attention."
    n, linear = b.tokens(size), 2 * 12 * b.dim**2 * b.tokens(size)
    attention = 4 * n**2 * b.dim
    forward, backward = linear + attention, linear + 2.5 * attention
    again = dict(none=0, full=forward, selective=linear)[how]
    return b.model["num_layers"] * (forward + backward + again)


# --- the floor
def gemms(b, size):
    "Products of a block: {(rows, in, out): how often}; rows are image or text tokens."
    d, n, t = b.dim, b.tokens(size) - b.text, b.text
    return {(rows, i, o): k for rows in (n, t) for i, o, k in ((d, d, 4), (d, 4 * d, 1), (4 * d, d, 1))}


def gemm_seconds(b, rows, i, o):
    x, w = torch.randn(rows, i, device=b.device, dtype=torch.bfloat16), torch.randn(o, i, device=b.device, dtype=torch.bfloat16) * 0.02
    g = torch.randn(rows, o, device=b.device, dtype=torch.bfloat16)
    return median(timed(b, lambda: torch.nn.functional.linear(x, w))), median(timed(b, lambda: g @ w))


def attention_seconds(b, n, backend):
    heads, width = b.model["num_attention_heads"], b.model["attention_head_dim"]
    q, k, v = (torch.randn(1, heads, n, width, device=b.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    g = torch.randn(1, heads, n, width, device=b.device, dtype=torch.bfloat16)
    with sdpa_kernel(backend):
        with torch.no_grad(): forward = median(timed(b, lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)))
        def both(): torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v), (q, k, v), g)
        return forward, median(timed(b, both)) - forward


def floor_of(b, size):
    "The time that the products and the attention of a step take alone, each at its real shape, by the best kernel at hand."
    n, layers, flops = b.tokens(size), b.model["num_layers"], lambda rows, i, o: 2 * rows * i * o
    products, forward, backward = {}, 0., 0.
    for (rows, i, o), k in gemms(b, size).items():
        f, g = gemm_seconds(b, rows, i, o)
        products[f"{rows}x{i}x{o}"] = dict(forward_TFs=round(flops(rows, i, o) / f / 1e12, 1), backward_TFs=round(flops(rows, i, o) / g / 1e12, 1), times=k)
        forward, backward = forward + k * f, backward + k * g
    attention, best = {}, None
    for name, backend in BACKENDS.items():
        if name == "math" and not b.tiny: continue # 24 x 8442 x 8442 scores
        try: f, g = attention_seconds(b, n, backend)
        except (RuntimeError, torch.OutOfMemoryError) as e: attention[name] = dict(failed=str(e).strip().splitlines()[0][:200]); continue
        a = 4 * n**2 * b.dim
        attention[name] = dict(forward_s=f, backward_s=g, forward_TFs=round(a / f / 1e12, 1), backward_TFs=round(2.5 * a / max(g, 1e-9) / 1e12, 1))
        if best is None or 2 * f + g < 2 * best[0] + best[1]: best = f, g
    f, g = best
    return dict(tokens=n, products=products, attention=attention, products_forward_s=layers * forward, products_backward_s=layers * backward,
                step_s=dict(none=layers * (forward + backward + f + g), selective=layers * (2 * forward + backward + f + g), full=layers * (2 * forward + backward + 2 * f + g)))


def copies(b):
    "Host to device, from pinned memory: rows of a table, a block's weights."
    out = {}
    for name, n in dict(rows=12 * b.model["num_layers"] * b.dim, block=24 * b.dim**2 + 12 * b.dim**2).items():
        host = torch.empty(n, dtype=torch.bfloat16, pin_memory=b.device.type == "cuda")
        there = torch.empty(n, dtype=torch.bfloat16, device=b.device)
        s = median(timed(b, lambda: there.copy_(host, non_blocking=True)))
        out[name] = dict(bytes=2 * n, seconds=s, GBs=round(2 * n / s / 1e9, 2))
    return out


def pinned_buffers(b):
    "Small buffers of pinned memory, as a swapped tiny block has them; CUDA refuses two in one page."
    from qie_nb.devices.strategies.host_memory import pinned
    began, made = time.perf_counter(), [pinned(n, b.device) for n in (1000, 4096, 100_000) * 20]
    return dict(buffers=len(made), pinned=all(t.is_pinned() for t in made) if b.device.type == "cuda" else None, seconds=time.perf_counter() - began)


def floor(b):
    for size in b.sides: b.measure("floor", str(size), partial(floor_of, b, size))
    b.measure("floor", "copies from pinned memory", partial(copies, b))
    b.measure("floor", "small pinned buffers", partial(pinned_buffers, b))


# --- a batch that is cached
def batch_of(b, size, mask=False):
    g, side = torch.Generator().manual_seed(0), b.sides[size]
    draw = lambda *s: torch.randn(*s, generator=g).bfloat16()
    return dict(pixel_latent=draw(1, 16, 1, side, side), control_latent=draw(1, 16, 1, side, side), prompt_embed=draw(1, b.text, b.model["joint_attention_dim"]),
                prompt_embeds_mask=torch.ones(1, b.text, dtype=torch.bool) if mask else None)


# --- the bare loop
def bare_setup(b, size):
    "A transformer with peft's adapter, and a step as diffusers' examples/dreambooth/train_dreambooth_lora_qwen_image.py has it, with a control image."
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
    from diffusers.training_utils import cast_training_params, compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
    from peft import LoraConfig
    from qie_nb.models.flow_matching import pack_latents
    from qie_nb.models.loading import load_quantized
    with made_up(b.device): tr = load_quantized(QwenImageTransformer2DModel, b.folder/"transformer", None, torch.bfloat16, b.device)
    tr.add_adapter(LoraConfig(r=16, lora_alpha=16, init_lora_weights="gaussian", target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    cast_training_params([tr], dtype=torch.float32)
    tr.enable_gradient_checkpointing()
    tr.train()
    params = [p for p in tr.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(b.folder/"scheduler")
    held = {k: v.to(b.device) for k, v in batch_of(b, size, mask=True).items()}
    x0, control, side = held["pixel_latent"], held["control_latent"], b.sides[size] // 2

    def sigmas_of(timesteps):
        sigmas, known = scheduler.sigmas.to(b.device, x0.dtype), scheduler.timesteps.to(b.device)
        return sigmas[[(known == t).nonzero().item() for t in timesteps]].flatten().view(-1, 1, 1, 1, 1)

    def step():
        noise = torch.randn_like(x0)
        u = compute_density_for_timestep_sampling(weighting_scheme="none", batch_size=len(x0))
        timesteps = scheduler.timesteps[(u * scheduler.config.num_train_timesteps).long()].to(b.device)
        sigmas = sigmas_of(timesteps)
        x_t = (1. - sigmas) * x0 + sigmas * noise
        with torch.autocast(b.device.type, torch.bfloat16):
            pred = tr(hidden_states=torch.cat([pack_latents(x_t), pack_latents(control)], 1), timestep=timesteps / 1000, encoder_hidden_states=held["prompt_embed"],
                      encoder_hidden_states_mask=held["prompt_embeds_mask"], img_shapes=[[(1, side, side)] * 2], return_dict=False)[0][:, :side**2]
        weighting = compute_loss_weighting_for_sd3("none", sigmas).flatten(1)[:, :, None]
        loss = (weighting.float() * (pred.float() - pack_latents(noise - x0).float()) ** 2).reshape(len(x0), -1).mean(1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tr.parameters(), 1.)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach().item()
    return step


def bare_mode(b, size):
    step = bare_setup(b, size)
    for _ in range(b.a.warm): step()
    if b.device.type == "cuda": torch.cuda.reset_peak_memory_stats()
    marks = Marks(b.device)
    marks.mark()
    losses = []
    for _ in range(b.a.steps): losses.append(step()); marks.mark()
    return row_of(b, size, "full", marks.seconds(), losses)


def row_of(b, size, how, seconds, losses, predicted=None):
    s, flops, against = median(seconds), work(b, size, how), b.result.get("floor", {}).get(str(size), {}).get("step_s", {})
    bare = b.result.get("bare", {}).get(str(size), {}).get("step_s", {}).get("median")
    peak = memory(b)
    out = dict(step_s=spread(seconds), TFs=round(flops / s / 1e12, 1), model_TFs=round(work(b, size, "none") / s / 1e12, 1), over_floor=round(s / against[how], 3) if how in against else None,
               times_as_fast_as_bare=round(bare / s, 3) if bare else None, **peak, finite=all(math.isfinite(x) for x in losses), losses=[round(x, 4) for x in losses])
    if predicted is not None: out |= dict(planned_GB=round(predicted, 3), peak_over_plan=round(peak["peak_allocated_GB"] / predicted, 3) if peak else None)
    return out


def bare(b):
    for size in (1024, 512): b.measure("bare", str(size), partial(bare_mode, b, size))


# --- ours
BASE = dict(model=dict(modulation_table=False, quantize="none"), train=dict(gradient_checkpointing=True, compile=False, adapter_dtype="float32", blocks_to_swap=False, offload_activations=False))
def change(of=None, **kw): return {s: (of or BASE).get(s, {}) | kw.get(s, {}) for s in BASE}

TABLE = change(model=dict(modulation_table=True), train=dict(adapter_dtype="base"))
COMPILED = change(TABLE, train=dict(compile=True))
MODES = { # in the order to measure them; each is (configuration, what is recomputed)
    "full checkpointing, eager": (BASE, "full"),
    "the same, compiled": (change(train=dict(compile=True)), "full"),
    "adapters in bf16, eager": (change(train=dict(adapter_dtype="base")), "full"),
    "table, adapters in bf16, eager": (TABLE, "full"),
    "table, adapters in bf16, compiled": (COMPILED, "full"),
    "selective, table, compiled": (change(COMPILED, train=dict(gradient_checkpointing="selective")), "selective"),
    "no recompute, table, compiled": (change(COMPILED, train=dict(gradient_checkpointing=False)), "none")}
QUANTIZED = lambda kind: change(TABLE, model=dict(quantize=kind))
SMALLER = {f"{name}, {size}": (c, "full", size) for size in (1024, 512) for name, c in {
    "nf4, table": QUANTIZED("nf4"), "int8, table": QUANTIZED("int8"), "streamed, table": change(TABLE, train=dict(blocks_to_swap=True)),
    "streamed, inputs on the host, table": change(TABLE, train=dict(blocks_to_swap=True, offload_activations=True))}.items()}
OFF = dict(compile=False, adapter_dtype="float32", blocks_to_swap=False, offload_activations=False, gradient_checkpointing=True)


def always_in_base():
    "Has this version no setting for the dtype in which adapters compute?"
    from qie_nb.config import TrainSection
    from qie_nb.lora import adapters
    return "adapter_dtype" not in TrainSection.model_fields and hasattr(adapters, "adapters_in_base_dtype")


@contextmanager
def adapters_as(mode):
    "Adapters compute in float32 where a mode says so, also in a version that has no setting for it."
    from qie_nb.lora import adapters
    if not (mode["train"].get("adapter_dtype") == "float32" and always_in_base()):
        yield
        return
    real = adapters.adapters_in_base_dtype
    adapters.adapters_in_base_dtype = lambda transformer, on=True: real(transformer, False)
    try: yield
    finally: adapters.adapters_in_base_dtype = real


def configuration(b, mode, size, steps):
    "A configuration of a mode, without settings that this version does not know; raises `NotThere` where they matter."
    from qie_nb.config import Config
    out = {}
    for section, values in mode.items():
        known = Config.model_fields[section].annotation.model_fields
        for k, v in values.items():
            if k in known: out.setdefault(section, {})[k] = v
            elif k == "adapter_dtype" and always_in_base(): continue # see `adapters_as`
            elif v != OFF.get(k): raise NotThere(f"`{section}.{k}` {v}")
    if mode["train"]["gradient_checkpointing"] == "selective" and known["gradient_checkpointing"].annotation is bool: raise NotThere("`train.gradient_checkpointing` selective")
    out["model"] |= dict(pretrained_model_name_or_path=str(b.folder), lora=dict(r=16, lora_alpha=16, target_modules="attention"))
    out["train"].setdefault("mixed_precision", "bf16")
    out["train"] |= dict(output_dir=str(b.tmp/"out"), device=b.device.type, max_train_steps=steps, save_interval=0, eval_interval=0, val_fraction=0)
    return out | dict(data=dict(dataset_path=str(b.tmp), image_size=[8 * b.sides[size]] * 2, control_area=(8 * b.sides[size]) ** 2, batch_size=1), cache=dict(cache_dir=str(b.tmp/"cache")),
                      logging=dict(log_dir=str(b.tmp/"runs"), report_to="none", log_every=10**6, log_images=False, panel=False))


class Watch:
    "A callback that marks the steps and, after those that warm up, begins to look at memory."
    def __init__(self, b, then=None): self.b, self.marks, self.losses, self.n, self.then = b, Marks(b.device), [], 0, then
    def __getattr__(self, name):
        if name.startswith("on_") or name == "prepare": return lambda t: None
        raise AttributeError(name)
    def on_step_end(self, t):
        self.n += 1
        if self.n == self.b.a.warm and self.b.device.type == "cuda": torch.cuda.reset_peak_memory_stats()
        if self.n >= self.b.a.warm: self.marks.mark(); self.losses.append(t.state.loss)
        if self.then: self.then(self.n)


def trained(b, mode, size, steps, then=None, tell=None):
    from qie_nb.trainer import QwenImageEditTrainer
    config, watch = configuration(b, mode, size, steps), Watch(b, then)
    with made_up(b.device):
        t = QwenImageEditTrainer(config, callbacks=[watch])
        if t.config.model.modulation_table is False: t.components.prepare_empty("transformer", lambda model: None) # read tensor by tensor all the same
        with adapters_as(mode): t.fit([batch_of(b, size)] * steps)
    return t, watch


def mode_of(b, mode, how, size):
    graphs = lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    counted = {}
    t, watch = trained(b, mode, size, b.a.warm + b.a.steps, lambda n: counted.__setitem__(n, graphs()))
    unplanned = mode["train"].get("adapter_dtype") == "float32" and always_in_base() # the plan knows adapters in the base's dtype
    row = row_of(b, size, how, watch.marks.seconds(), [float(x) for x in watch.losses], None if unplanned else planned(t, b))
    row |= dict(table=t.modulation_table is not None, graphs=counted[b.a.warm], graphs_made_later=counted[max(counted)] - counted[b.a.warm])
    del t
    return row


def planned(t, b):
    "What the planner says of this configuration, in GB; None where it cannot say."
    try:
        from qie_nb.planning.cards import plan
        return plan(t.config, transformer=b.model, prompt=b.text).asked.total / 1e9
    except Exception as e:
        print(f"no plan: {type(e).__name__}: {e}", flush=True)


def ours(b):
    for name, (mode, how) in MODES.items(): b.measure("ours", name, partial(mode_of, b, mode, how, 1024))


def small(b):
    for name, (mode, how, size) in SMALLER.items(): b.measure("small", name, partial(mode_of, b, mode, how, size))


# --- inference
def infer_mode(b, table, compiled, scale, steps=8):
    from qie_nb.sampling.edits import edit_cached
    from qie_nb.sampling.edits import EncodedEdit
    from qie_nb.trainer import QwenImageEditTrainer
    with made_up(b.device):
        t = QwenImageEditTrainer(configuration(b, change(model=dict(modulation_table=table)), 1024, 1))
        if not table: t.components.prepare_empty("transformer", lambda model: None)
        tr = t._transformer()
        if compiled: tr.compile_repeated_blocks(fullgraph=True, backend="eager" if b.tiny else "inductor")
        x = batch_of(b, 1024)
        shot = EncodedEdit(tuple(x["pixel_latent"].shape[1:]), [x["control_latent"]], x["prompt_embed"], x["prompt_embed"][:, :-4] if scale > 1 else None)
        edit_cached(t, shot, steps, scale) # rows are made, graphs too
        marks = Marks(b.device)
        if b.device.type == "cuda": torch.cuda.reset_peak_memory_stats()
        edit_cached(t, shot, steps, scale, on_step=lambda *a: marks.mark())
    seconds = marks.seconds()
    n, linear = b.tokens(1024), 2 * 12 * b.dim**2 * b.tokens(1024)
    flops = b.model["num_layers"] * (linear + 4 * n**2 * b.dim) * (2 if scale > 1 else 1)
    return dict(step_s=spread(seconds), TFs=round(flops / median(seconds) / 1e12, 1), **memory(b))


def infer(b):
    for name, args in {"guidance, table, compiled": (True, True, 4.), "guidance, table": (True, False, 4.), "guidance, layers": (False, False, 4.), "no guidance, table, compiled": (True, True, 1.)}.items():
        b.measure("infer", name, partial(infer_mode, b, *args))


# --- what holds it back
def profile_mode(b, mode, how):
    from torch.profiler import ProfilerActivity, profile
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (b.device.type == "cuda")
    p = profile(activities=kinds)
    def then(n):
        if n == b.a.warm: p.start()
        if n == b.a.warm + 2: p.stop()
    trained(b, mode, 1024, b.a.warm + 3, then)
    self_time = lambda e: getattr(e, "self_device_time_total", 0) if b.device.type == "cuda" else e.self_cpu_time_total
    events = sorted(p.key_averages(), key=self_time, reverse=True)
    if b.device.type == "cuda": events = [e for e in events if str(getattr(e, "device_type", "")).endswith("CUDA")] or events
    kinds = dict(attention=("flash", "attention", "fmha", "cudnn_generated"), products=("gemm", "cutlass", "nvjet", "matmul", "addmm", "::mm", "xmma"), copies=("memcpy", "copy_"), triton=("triton",))
    kind = lambda name: next((k for k, words in kinds.items() if any(w in name.lower() for w in words)), "the rest")
    by = {}
    for e in events: by[kind(e.key)] = by.get(kind(e.key), 0) + self_time(e) / 2e6
    return dict(seconds_a_step=round(sum(by.values()), 4), by_kind={k: round(v, 4) for k, v in sorted(by.items(), key=lambda x: -x[1])},
                top=[dict(name=e.key[:120], ms_a_step=round(self_time(e) / 2e3, 3), calls_a_step=e.count / 2) for e in events[:25]])


def profiles(b):
    for name in ("table, adapters in bf16, compiled", "no recompute, table, compiled", "full checkpointing, eager"): b.measure("profile", name, partial(profile_mode, b, *MODES[name]))


# --- quantized layers: the tables in docs/measured/quantization.md are measured on a CPU
def quantized_layer(b, kind):
    "A quantized layer on this device and on the CPU, against the plain product in float32, and compiled against not compiled; relative errors."
    from qie_nb.models.quantizations.known import quantize_linear
    torch.manual_seed(0)
    plain = torch.nn.Linear(b.dim, 4 * b.dim).to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(1, 64 if b.tiny else 4096, b.dim, dtype=torch.bfloat16)
    exact = torch.nn.functional.linear(x.float(), plain.weight.float(), plain.bias.float())
    layers = {d: quantize_linear(copy.deepcopy(plain).to(d), kind) for d in dict.fromkeys(("cpu", b.device.type))}
    got = {d: layer(x.to(d)) for d, layer in layers.items()}
    here, there = layers[b.device.type], x.to(b.device)
    relative = lambda a, c: round(float((a.float().cpu() - c.float().cpu()).norm() / exact.norm()), 6)
    out = dict(error_on_the_cpu=relative(got["cpu"], exact), error_here=relative(got[b.device.type], exact), difference=relative(got["cpu"], got[b.device.type]))
    seconds = median(timed(b, lambda: here(there)))
    try: out["compiled_difference"] = relative(torch.compile(here, fullgraph=True, backend="eager" if b.tiny else "inductor")(there), got[b.device.type])
    except Exception as e: out["compiled_difference"] = f"failed: {type(e).__name__}: {str(e).strip()[:200]}"
    return out | dict(seconds=seconds, plain_seconds=median(timed(b, lambda moved=plain.to(b.device): moved(there))))


def quantized(b):
    from qie_nb.models.quantizations.known import QUANTIZATIONS
    for kind in QUANTIZATIONS: b.measure("quantized", kind, partial(quantized_layer, b, kind))


@contextmanager
def as_on_a_gpu():
    "For `--tiny`: graphs are made without kernels, and block swap is allowed on the CPU."
    import qie_nb.devices.compile as compiled
    from qie_nb.devices.strategies.block_swap import BlockSwapping
    from qie_nb.devices.strategies.offload import OffloadedActivations
    def allowed(self, facts): return ""
    with patch.object(compiled, "BACKEND", "eager"), patch.object(BlockSwapping, "problem", allowed), patch.object(OffloadedActivations, "problem", allowed): yield


PARTS = dict(floor=floor, bare=bare, ours=ours, small=small, infer=infer, quantized=quantized, profile=profiles)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--part", action="append", choices=PARTS, help="default: all, in this order")
    p.add_argument("--modes", type=lambda s: [m.strip() for m in s.split(";")], help="names of rows, with ; between them")
    p.add_argument("--steps", type=int, default=8, help="measured, after those that warm up")
    p.add_argument("--warm", type=int, default=3)
    p.add_argument("--minutes", type=float, default=9., help="after these no further row is begun")
    p.add_argument("--again", action="store_true", help="measure what is in the file already, too")
    p.add_argument("--tiny", action="store_true", help="tiny widths on the CPU")
    p.add_argument("--keep", type=Path, help="folder for what is written meanwhile (a modulation table takes 2.3 GB), kept for the next call; default a temporary one")
    p.add_argument("--out", type=Path, default=OUT)
    a = p.parse_args(argv)
    if not a.tiny and not torch.cuda.is_available(): raise SystemExit("no GPU is here; --tiny runs the same code on the CPU")
    b = Bench(a)
    with tempfile.TemporaryDirectory() as tmp:
        b.tmp = a.keep or Path(tmp)
        b.tmp.mkdir(parents=True, exist_ok=True)
        b.folder = b.tmp/"model"
        if not b.folder.exists(): model_folder(b.folder, "2509", b.model, tiny=a.tiny)
        with as_on_a_gpu() if a.tiny else nullcontext():
            for name in a.part or PARTS: PARTS[name](b)
    b.save()
    return b.result


if __name__ == "__main__": main()
