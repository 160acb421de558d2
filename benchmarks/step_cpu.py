"""What a training step costs over a bare loop of the same transformer: operations, modules walked, things built; and paired times.

`make bench-cpu` writes results/step_cpu.json and prints a table. Tiny models of the real classes, random weights, float32, one thread.
Parts can be named: `python benchmarks/step_cpu.py counts times`; the others then stay in the file as they were.
"""
import argparse, collections, functools, gc, json, os, platform, shutil, tempfile, time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OUT = Path(__file__).parent/"results"/"step_cpu.json"
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors")


# --- what is counted
class Operations(TorchDispatchMode):
    "Within, aten operations of this thread by name: forward, recomputation and, on a CPU, the backward pass."
    def __init__(self): super().__init__(); self.seen = collections.Counter()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


class Walks:
    "Within, modules and parameters that `Module.modules`, `named_modules`, `parameters` ... went over."
    def __init__(self): self.n = 0
    def __enter__(self):
        real, me = torch.nn.Module.named_modules, self
        def counted(module, *a, **kw): # all the others are made of it
            for item in real(module, *a, **kw): me.n += 1; yield item
        self.patch = patch.object(torch.nn.Module, "named_modules", counted)
        self.patch.start()
        return self
    def __exit__(self, *exc): self.patch.stop()


class Built:
    "Within, calls of the encoders and copies or constructions of a scheduler, by name."
    def __enter__(self):
        from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
        from transformers import Qwen2_5_VLForConditionalGeneration
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
        self.seen, self.patches = collections.Counter(), []
        for name, cls, method in (("encoder calls", AutoencoderKLQwenImage, "_encode"), ("encoder calls", Qwen2_5_VLForConditionalGeneration, "forward"),
                                  ("encoder calls", Qwen2_5_VLModel, "forward"), ("schedulers made", FlowMatchEulerDiscreteScheduler, "__init__"),
                                  ("schedulers made", FlowMatchEulerDiscreteScheduler, "__deepcopy__"), ("schedulers set", FlowMatchEulerDiscreteScheduler, "set_timesteps")):
            self.patches.append(patch.object(cls, method, self.counted(name, getattr(cls, method, None)), create=True))
        for p in self.patches: p.start()
        return self
    def counted(self, name, real):
        def fn(obj, *a, **kw):
            self.seen[name] += 1
            if real is not None: return real(obj, *a, **kw)
            return type(obj).from_config(obj.config) # a copy of a scheduler
        return fn if real is None else functools.wraps(real)(fn)
    def __exit__(self, *exc):
        for p in self.patches: p.stop()


# --- a model, data, a trainer
def model_folder(folder, layers, variant="2511", width=(2, 16)):
    "A tiny model with so many blocks; heads and their size may be given."
    from diffusers import QwenImageTransformer2DModel
    from qie_nb.tiny.random_models import tiny_folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(tiny_folder(variant, (64*64, 56*56)), folder)
    shutil.rmtree(folder/"transformer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        heads, size = width
        tr = QwenImageTransformer2DModel(num_layers=layers, attention_head_dim=size, num_attention_heads=heads, joint_attention_dim=64, axes_dims_rope=(4, (size - 4) // 2, (size - 4) // 2),
                                         zero_cond_t=variant == "2511")
    tr.save_pretrained(folder/"transformer")
    return folder


def make_pairs(root, n=4, size=(64, 48), captions=("invert the colours",)):
    import numpy as np
    from PIL import Image
    rng = np.random.default_rng(0)
    for d in ("training_images", "control_images"): (root/d).mkdir(parents=True)
    for i in range(n):
        a = rng.integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
        Image.fromarray(a).save(root/"control_images"/f"{i}.png")
        Image.fromarray(255 - a).save(root/"training_images"/f"{i}.png")
        (root/"training_images"/f"{i}.txt").write_text(captions[i % len(captions)])
    return root


def configuration(root, folder, batch=1, steps=6, every=10**6, table=True, out="out", **sections):
    base = dict(model=dict(pretrained_model_name_or_path=str(folder), lora=dict(r=4, lora_alpha=8), modulation_table=table),
                data=dict(dataset_path=str(root/"set"), image_size=[64, 48], batch_size=batch, caption_dropout_rate=0.),
                train=dict(output_dir=str(root/out), device="cpu", mixed_precision="no", max_train_steps=steps, save_interval=0, eval_interval=0, gradient_checkpointing=False),
                cache=dict(cache_dir=str(root/f"cache-{Path(folder).name}")), optimizer=dict(lr=1e-4),
                logging=dict(log_dir=str(root/"runs"), report_to="none", log_every=every, log_images=False, panel=False))
    for k, v in sections.items(): base[k] = base[k] | v
    return base


class Boundaries:
    "A callback that runs after all others and calls a function at each step."
    def __init__(self, fn): self.fn = fn
    def __getattr__(self, name): return lambda t: None
    def on_step_end(self, t): self.fn(t)


# --- the bare loop
def pack(x):
    B, C, _, h, w = x.shape
    return x.view(B, C, h//2, 2, w//2, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, h//2 * (w//2), C * 4)


def bare_step(transformer, params, optimizer, schedule, batch, max_norm=1.):
    "What has to be done, by hand: noise, pack, forward, loss, backward, clip, step."
    x0, controls, embeds, mask = batch
    eps, sigmas = torch.randn_like(x0), torch.rand(len(x0)).mul_(1000).ceil_().div_(1000).to(x0.device, non_blocking=True)
    s = sigmas.view(-1, 1, 1, 1, 1)
    x_t = pack((1 - s) * x0 + s * eps)
    shapes = [[(1, z.shape[-2] // 2, z.shape[-1] // 2) for z in (x0, *controls)]] * len(x0)
    pred = transformer(hidden_states=torch.cat([x_t, *map(pack, controls)], 1), timestep=sigmas, encoder_hidden_states=embeds, encoder_hidden_states_mask=mask,
                       img_shapes=shapes, return_dict=False)[0][:, :x_t.shape[1]]
    loss = torch.nn.functional.mse_loss(pred, pack(eps - x0))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def bare_of(trainer, put=lambda t: t):
    "A function that does one bare step with a trainer's own transformer, on its last batch."
    params = [p for p in trainer.transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.)
    b = trainer.batch
    from qie_nb.data.batches import as_list, pad_prompts
    embeds, mask = pad_prompts(list(b["prompt_embed"]))
    batch = put(b["pixel_latent"]), [put(c) for c in as_list(b["control_latent"])], put(embeds), None if mask is None else put(mask)
    return lambda: bare_step(trainer.transformer, params, optimizer, schedule, batch)


# --- counts
def counted(config):
    "Steps of the trainer from the third on, and one of the bare loop: {operations, walked, built} of each."
    ops, walks, built = Operations(), Walks(), Built()
    def read():
        row = dict(operations=ops.seen, walked=walks.n, built=dict(built.seen))
        ops.seen, walks.n, built.seen = collections.Counter(), 0, collections.Counter()
        return row
    from qie_nb.trainer import QwenImageEditTrainer
    rows, trainer = [], QwenImageEditTrainer(config)
    trainer.callbacks.append(Boundaries(lambda t: rows.append(read())))
    with walks, built, ops: trainer.fit()
    bare = bare_of(trainer)
    bare(), bare()
    with walks, built, ops: read(), bare()
    return rows[2:], read(), trainer


def waited(config):
    "The same on a device that is not there: {waits, launched, sent} of each step."
    import fake_device
    from qie_nb.trainer import QwenImageEditTrainer
    trainer = QwenImageEditTrainer(config).set_lora() # on the CPU; what follows is there
    rows = []
    with fake_device.pretended() as device:
        trainer.callbacks.append(Boundaries(lambda t: rows.append(device.take())))
        trainer.device = fake_device.DEVICE
        fake_device.send(trainer.transformer)
        trainer.fit()
        bare = bare_of(trainer, lambda t: t.to(fake_device.DEVICE))
        bare(), bare(), device.take(), bare()
    return rows[2:], device.take()


def precomputed(root, *models, sizes=((64, 48),), captions=("invert the colours",)):
    "Fill the caches that `configuration` names."
    from qie_nb.trainer import QwenImageEditTrainer
    if not (root/"set").exists(): make_pairs(root/"set", captions=captions)
    for m in models: QwenImageEditTrainer(configuration(root, m)).cache_embeddings()


def counts(root, a):
    "Operations over the bare loop by depth and batch; waits; walks."
    models = {n: model_folder(root/f"{n}"/"2511", n) for n in (2, 4, 6)} | {"2509": model_folder(root/"2509", 2, "2509")}
    precomputed(root, models[2], models["2509"])
    rows, total = [], lambda r: sum(r["operations"].values())
    for n, batch, table in [(n, b, True) for n in (2, 4, 6) for b in (1, 2)] + [(n, 1, False) for n in (2, 4, 6)]:
        got, bare, _ = counted(configuration(root, models[n], batch, 5, table=table))
        logged, *_ = counted(configuration(root, models[n], batch, 5, 1, table=table)) if n == 2 else (None,)
        rows.append(dict(blocks=n, batch=batch, table=table, trainer=total(got[0]), bare=total(bare), over=total(got[0]) - total(bare), modules_walked=got[0]["walked"], built=got[0]["built"])
                    | (dict(over_when_logged=total(logged[0]) - total(bare)) if logged else {}))
        print(rows[-1], flush=True)
    there = {}
    for name, model, table in (("2509, table", "2509", True), ("2509, layers", "2509", False), ("2511 (zero_cond_t), table", 2, True)):
        got, bare = waited(configuration(root, models[model], every=3, table=table))
        there[name] = dict(unlogged=dict(got[1]["waits"]), logged=dict(got[0]["waits"]), bare=dict(bare["waits"]), launched=sum(got[1]["launched"].values()), launched_bare=sum(bare["launched"].values()))
        print(name, there[name], flush=True)
    return dict(rows=rows, elsewhere=there, note="operations: aten calls of the main thread, forward, backward and optimizer; the batch is fetched by another thread. "
                "elsewhere: the same steps on tensors that say they are elsewhere (benchmarks/fake_device.py): what the host waits for, and operations that would run there; the bare loop reads its timestep for the table")


# --- times
def stepper(config):
    "A function that does one step as `fit` does it, callbacks included, and the trainer."
    from qie_nb.training.callbacks import call
    from qie_nb.trainer import QwenImageEditTrainer
    t = QwenImageEditTrainer(config)
    run = t.setup_run()
    call(run.callbacks, "on_train_begin", t)
    def groups():
        while True: yield from run.groups(t.state)
    it = groups()
    def step():
        group = next(it)
        t.optimizer_step(group)
        t.state.advance(len(group), run.batches)
        call(run.callbacks, "on_step_end", t)
        if t.state.epoch_ended: call(run.callbacks, "on_epoch_end", t)
    step()
    return step, t


def spread(values, digits=3): return dict(median=round(median(values), digits), min=round(min(values), digits), max=round(max(values), digits), runs=len(values))


def times(root, a):
    "Paired: trainer, bare loop and a trainer without the table by turns, several times over; CPU time of all threads; ratios are of the same round."
    out = {}
    for name, layers, width, size in (("tiny", 2, (2, 16), (64, 48)), ("wider", 4, (4, 64), (128, 128)), ("half a second", 4, (8, 64), (256, 256)))[:1 if a.short else 3]:
        here = root/name
        model = model_folder(here/"2511", layers, width=width)
        make_pairs(here/"set", size=size)
        data = dict(data=dict(dataset_path=str(here/"set"), image_size=list(size), batch_size=1, caption_dropout_rate=0., control_area=size[0] * size[1]))
        config = lambda **kw: configuration(here, model, steps=10**6, **data, **kw)
        precomputed_at(config())
        (step, t), (plain, _) = stepper(config(every=1)), stepper(config(every=1, table=False, out="plain"))
        ways = dict(trainer=step, bare=bare_of(t), layers=plain)
        for f in ways.values(): f(), f()
        took = {k: [] for k in ways}
        for _ in range(a.runs):
            for k, f in ways.items():
                n, began = a.steps, time.process_time()
                for _ in range(n): f()
                took[k].append((time.process_time() - began) / n)
        ratio = lambda x, y: spread([p / q for p, q in zip(took[x], took[y])])
        b = t.batch["pixel_latent"].shape
        out[name] = dict(blocks=layers, width=width[0] * width[1], tokens=2 * b[-1] * b[-2] // 4 + max(map(len, t.batch["prompt_embed"])), steps_a_run=a.steps,
                         ms={k: spread([1e3 * x for x in v]) for k, v in took.items()}, trainer_over_bare=ratio("trainer", "bare"), table_over_layers=ratio("trainer", "layers"))
        print(name, out[name], flush=True)
    return out


def precomputed_at(config):
    from qie_nb.trainer import QwenImageEditTrainer
    QwenImageEditTrainer(config).cache_embeddings()


# --- bytes kept, and codes made
WAYS = {"adapters in float32, as peft has them": dict(adapter_bytes=4, table=False), "adapters in bfloat16": dict(table=False), "the same on the table": {},
        "selective": dict(checkpointing="selective"), "blocks recomputed": dict(checkpointing=True)}


def kept(root, a):
    "What a step keeps for its backward pass by mode, with the planner's figure; and how many codes compiled blocks take."
    from qie_nb.devices import compile as compiled
    from diffusers import QwenImageTransformer2DModel
    from qie_nb.config import make_config
    from counted_step import LiveBytes, empty_step, empty_transformer
    from qie_nb.lora.adapters import add_lora
    from qie_nb.planning.memory import MemoryQuery
    from qie_nb.planning.memory import modulation_bytes, saved_activations
    rows = []
    for name, way in WAYS.items():
        job = MemoryQuery(**dict(layers=4, dim=256, heads=4, text_dim=128, target=96, control=64, text=24, r=8, zero_cond=True, kernel="cpu", adapter_bytes=2, checkpointing=False) | way)
        tr = empty_transformer(job, "cpu")
        if job.checkpointing: compiled.set_up(tr, job.checkpointing)
        loss, there = empty_step(job, tr, "cpu")
        loss() # what it keeps between steps
        rotation = 4 * job.dim // job.heads * (job.target + job.control) # it and the rows of the table stay between steps
        with LiveBytes([*tr.parameters(), *tr.buffers(), *there]) as live: out = loss() # held as long as its graph is
        gc.collect()
        rows.append(dict(way=name, bytes=live.now - out.nbytes, planned=saved_activations(job).bytes + modulation_bytes(job) + rotation * bool(job.checkpointing)))
        print(rows[-1], flush=True)
    with patch.object(compiled, "BACKEND", "eager"):
        torch.compiler.reset(), torch._dynamo.utils.counters.clear()
        tr, made = QwenImageTransformer2DModel(num_layers=4, num_attention_heads=2, attention_head_dim=32, joint_attention_dim=64, axes_dims_rope=(4, 14, 14), zero_cond_t=True), []
        add_lora(tr, make_config({}).model.lora)
        code = compiled.set_up(tr, "selective", True)
        for n in range(20):
            job = MemoryQuery(layers=4, dim=64, heads=2, text_dim=64, target=(24, 40, 48, 64)[n % 4], control=16, text=9 + n % 7, zero_cond=True, base_bytes=4)
            loss, _ = empty_step(job, tr, "cpu")
            loss().backward()
            made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return dict(rows=rows, failed=code.failed, codes=dict(after_two_steps=made[1], later=made[-1] - made[1], steps=20, sizes=4, prompts=7),
                note="2511, bfloat16, 4 blocks of 256, 160 image tokens; codes are traced and run by torch's own operations")


# --- all of it
def about():
    cpu = next((r.split(":")[1].strip() for r in Path("/proc/cpuinfo").read_text().splitlines() if r.startswith("model name")), platform.processor()) if Path("/proc/cpuinfo").exists() else platform.processor()
    return dict(device=f"{cpu}, {os.cpu_count()} cores, one thread used", versions=dict(python=platform.python_version()) | {p: version(p) for p in LIBRARIES})


PARTS = dict(counts=counts, kept=kept, times=times)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; default all")
    p.add_argument("--runs", type=int, default=7, help="rounds of the paired times")
    p.add_argument("--steps", type=int, default=5, help="steps of each in a round")
    p.add_argument("--short", action="store_true", help="the smallest model alone")
    p.add_argument("--out", type=Path, default=OUT)
    a = p.parse_args()
    if wrong := set(a.parts) - PARTS.keys(): p.error(f"unknown {', '.join(wrong)}")
    torch.set_num_threads(1)
    result = json.loads(a.out.read_text()) if a.out.is_file() else {}
    for name in a.parts or PARTS:
        load, began = os.getloadavg()[0], time.perf_counter()
        with tempfile.TemporaryDirectory() as tmp: got = PARTS[name](Path(tmp), a)
        when = dict(date=datetime.now(timezone.utc).isoformat(timespec="seconds"), seconds_taken=round(time.perf_counter() - began, 1), load_average=[round(load, 2), round(os.getloadavg()[0], 2)])
        result[name] = about() | when | got
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__": main()
