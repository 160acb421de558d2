"""The whole job at the published model's full size on a machine without a GPU: about an hour on two cores, 12 GB of memory, 45 GB of disk.

`make rehearsal` runs it and writes results/rehearsal.json. The weights are random (benchmarks/synthetic_checkpoint.py), everything else is what a user runs: a hub (pretended,
20 GB of disk in each of two sessions, as on Kaggle), precompute, training at 256 x 256, SIGKILL, resume, LoRA, sampling. Products are in float32, as on a T4: many CPUs
compute bfloat16 far more slowly. glibc returns freed memory from 1 MB on to the system, so that what is measured is in use. Each phase is a process of its own; after an
interruption, run it again: finished phases are not repeated, and the library continues the others.
    python benchmarks/rehearsal.py [--work FOLDER] [--small] [--again PHASE]
`--small` takes tiny widths, to see that it runs.
"""
import argparse, json, os, platform, shutil, signal, subprocess, sys, threading, time
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

OUT = Path(__file__).parent/"results"/"rehearsal.json"
NAME, DISK, SIDE, STEPS = "someone/full-size", 20 * 10**9, 256, 2
PHASES = dict(
    encoder="session 1: download the text encoder, quantize it to nf4, delete each file",
    precompute="session 1: encode three pairs",
    transformer="session 2: download the transformer, quantize it to nf4, delete each file, make the table",
    kill="session 2: train, killed (SIGKILL) in the second step",
    resume="session 2: continue from the first checkpoint to the end, save the LoRA",
    sample="session 2: load the LoRA in a new process, two sampling steps (the scheduler refuses one)",
    table="without a hub: the modulation table from the layers of a folder",
    whole="without a hub: quantize while loading, train without interruption, save the LoRA")
ENVIRONMENT = dict(MKL_CBWR="AUTO,STRICT", MALLOC_MMAP_THRESHOLD_=str(2**20)) # equal bits; memory is returned
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "bitsandbytes")


# --- measuring
def anonymous(): # bytes of this process that no file can give back
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"): return int(line.split()[1]) * 1024


class Peak(threading.Thread):
    "The largest value of a function, asked every 20 ms."
    def __init__(self, fn): super().__init__(daemon=True); self.fn, self.bytes, self.done = fn, fn(), threading.Event()
    def run(self):
        while not self.done.wait(0.02): self.bytes = max(self.bytes, self.fn())
    def __enter__(self): self.start(); return self
    def __exit__(self, *exc): self.done.set(); self.join()


def size_of(folder, pattern="*"): return sum(p.stat().st_size for p in Path(folder).rglob(pattern) if p.is_file())


# --- the job
class Job:
    def __init__(self, work, small): self.work, self.small = Path(work), small

    def session(self, n): return self.work/f"session-{n}" # its disk

    def served(self):
        from synthetic_checkpoint import FULL, SMALL, model_folder
        folder = self.work/"model"
        if not (folder/"done").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            model_folder(folder, "2509", SMALL if self.small else FULL, encoders=not self.small)
            (folder/"done").touch()
        return folder

    def pairs(self):
        from qie_nb.tiny.photos import make_pairs
        return self.work/"pairs" if (self.work/"pairs").is_dir() else make_pairs(self.work/"pairs", "duotone", 3, (SIDE, SIDE))

    def config(self, out, **train):
        areas = dict(image_size=[SIDE, SIDE], control_area=SIDE * SIDE, vl_area=SIDE * SIDE) if not self.small else dict(image_size=[64, 64])
        return dict(model=dict(pretrained_model_name_or_path=NAME, quantize="nf4", text_encoder_quantize="qint8" if self.small else "nf4", delete_downloaded_shards=True), data=dict(dataset_path=str(self.pairs()), **areas),
                    cache=dict(cache_dir=str(self.work/"cache")), logging=dict(log_dir=str(self.work/out/"logs"), report_to="none"),
                    train=dict(output_dir=str(self.work/out), max_train_steps=STEPS, save_steps=1, keep_checkpoints=2, mixed_precision="no", val_fraction=0., max_hours=None, device="cpu") | train)

    def hub(self, n):
        from synthetic_checkpoint import PretendedHub
        disk = self.session(n)
        os.environ["QIE_NB_HOME"] = str(disk/"home")
        return PretendedHub(self.served(), disk/"downloads", disk, DISK, 20_000 if self.small else 5 * 10**9)

    def trainer(self, out, session, **train):
        "On the pretended hub of a session."
        from qie_nb.models import components, hub as hubs
        from qie_nb.trainer import QwenImageEditTrainer
        hub = self.hub(session)
        hubs.HUB = hub
        for module in (hubs, components): module.free_bytes = hub.free
        return QwenImageEditTrainer(self.config(out, **train)), hub

    def local(self, out):
        "On a folder: the transformer is drawn while it is read, the rest is session 1's."
        from qie_nb.trainer import QwenImageEditTrainer
        folder = self.work/"local"/NAME.split("/")[1]
        if not folder.is_dir():
            folder.mkdir(parents=True)
            made = next((self.session(1)/"home"/"models").glob("*/text_encoder-*"))
            for part in ("vae", "tokenizer", "processor", "scheduler", "transformer"): (folder/part).symlink_to(self.served()/part)
            (folder/"text_encoder").symlink_to(made/"text_encoder")
            for path in self.served().glob("*.json"): shutil.copy(path, folder)
        config = self.config(out)
        config["model"] |= dict(pretrained_model_name_or_path=str(folder))
        return QwenImageEditTrainer(config)


# --- the phases: {figure: value}
def encoder(job):
    trainer, hub = job.trainer("out", 1)
    with Peak(hub.used) as disk: folder = trainer.components.folder_of("text_encoder")
    return dict(disk=size_of(folder), disk_plan=trainer.components.copy_bytes("text_encoder"), disk_peak=disk.bytes, downloaded=len([p for p in hub.got if p.endswith(".safetensors")]), left=len(list(hub.folder.glob("text_encoder/*.safetensors"))))


def precompute(job):
    from qie_nb.planning.parts import _encoders
    trainer, hub = job.trainer("out", 1)
    trainer.cache_embeddings()
    e = _encoders(query(job))
    memory = None if job.small else e["quantized"] + e["vae"] + max(e["work"]["vae"], e["work"]["text_encoder"])
    return dict(disk=size_of(job.work/"cache"), disk_plan=cache_plan(job, "latents", "prompts"), memory_plan=memory)


def cache_plan(job, *names):
    from qie_nb.planning import disk_space
    empty = job.config("out") | dict(cache=dict(cache_dir=str(job.work/"no cache")))
    empty["model"] |= dict(pretrained_model_name_or_path=str(job.served()))
    return sum(i.bytes for i in disk_space.disk_plan(empty).items if i.what in names)


def query(job):
    from qie_nb.planning.memory import memory_query, model_facts
    from qie_nb.config import make_config
    t = json.loads((job.served()/"transformer"/"config.json").read_text())
    variant = model_facts(str(job.served())).variant
    return memory_query(make_config(job.config("out")), t, 4, text=variant.prompt_tokens(1, SIDE * SIDE),
                        kernel="cpu", compiled=False)


def transformer(job):
    trainer, hub = job.trainer("out", 2)
    with Peak(hub.used) as disk: folder = trainer.components.folder_of("transformer")
    parts = trainer.components
    timesteps = sum(map(len, parts.modulation_sets(parts.row_dtype())))
    return dict(disk=size_of(folder), disk_plan=parts.copy_bytes("transformer"), disk_peak=disk.bytes, timesteps=timesteps,
                downloaded=len([p for p in hub.got if p.endswith(".safetensors")]), left=len(list(hub.folder.glob("transformer/*.safetensors"))))


def train(trainer):
    "Train and save the LoRA: (its file, seconds until the first step, seconds and loss of each step)."
    from qie_nb.training.callbacks import Callback
    began, marks, losses = time.time(), [], []
    class Times(Callback):
        def on_train_begin(self, t): marks.append(time.time())
        def on_step_end(self, t): marks.append(time.time()), losses.append(float(t.state.loss))
    trainer.callbacks.append(Times())
    trainer.fit()
    lora = Path(trainer.save_lora(Path(trainer.config.train.output_dir)/"lora"))
    return lora, dict(loading_seconds=round(marks[0] - began, 1), step_seconds=[round(b - a, 1) for a, b in zip(marks, marks[1:])], losses=losses)


def figures(job, lora, out):
    from qie_nb.training.checkpoint import complete_checkpoints
    from qie_nb.planning.disk_space import _adapter_bytes, checkpoint_bytes
    from qie_nb.planning.memory import memory_of
    q = query(job)
    last = complete_checkpoints(job.work/out/"checkpoints")[-1]
    return dict(memory_plan=memory_of(q, gpu=False).total, parts=memory_of(q, gpu=False).data(), disk=size_of(last), disk_plan=checkpoint_bytes(q), lora=lora.stat().st_size, lora_plan=_adapter_bytes(q))


def kill(job):
    train(job.trainer("out", 2)[0])
    raise SystemExit("the run was not killed")


def resume(job):
    trainer, _ = job.trainer("out", 2, resume_checkpoint="latest")
    lora, rows = train(trainer)
    return rows | figures(job, lora, "out") | dict(resumed_from=str(trainer.resumed_from).rpartition("/")[2])


def sample(job):
    trainer, _ = job.trainer("out", 2)
    trainer.load_lora(str(job.work/"out"/"lora"))
    image = trainer.predict_cached(0, num_inference_steps=2, true_cfg_scale=1.)
    return dict(image=list(image.shape), distinct_values=len(set(image.flat)), memory_plan=None if job.small else sampling_plan(job))


def sampling_plan(job):
    from qie_nb.planning.disk_space import _adapter_bytes
    from qie_nb.planning.parts import _encoders
    from qie_nb.planning.memory import weight_bytes
    q = query(job)
    e = _encoders(q)
    return weight_bytes(q)[0] + _adapter_bytes(q) + e["vae"] + max(e["work"]["vae"], e["work"]["transformer"])


def table(job):
    made = job.local("whole").cache_modulation()
    kept = sum(p.stat().st_size for d in made.cache.layers for p in Path(d.folder).rglob("modulation*/**/*") if p.is_file())
    return dict(disk=kept, disk_plan=cache_plan(job, "modulation table"), timesteps=len(made.index))


def whole(job):
    shutil.rmtree(job.work/"whole", ignore_errors=True)
    lora, rows = train(job.local("whole"))
    return rows | figures(job, lora, "whole") | dict(same_as_resumed=compare(job))


def compare(job):
    "The LoRA of the killed and continued run against the one without interruption."
    from safetensors.torch import load_file
    a, b = (load_file(next((job.work/out/"lora").glob("*.safetensors"))) for out in ("out", "whole"))
    assert a.keys() == b.keys()
    return dict(equal=all(a[k].equal(b[k]) for k in a), tensors=len(a), largest_difference=max(float((a[k].float() - b[k].float()).abs().max()) for k in a), largest_value=max(float(v.abs().max()) for v in a.values()))


# --- running
def run_phase(a):
    import torch # noqa: F401
    import diffusers, qie_nb.trainer, transformers # noqa: F401
    from synthetic_checkpoint import made_up
    job, before, began = Job(a.work, a.small), anonymous(), time.time()
    with made_up("cpu"), Peak(anonymous) as peak: row = globals()[a.phase](job)
    row |= dict(seconds=round(time.time() - began, 1), memory=peak.bytes, memory_before=before)
    (a.work/f"{a.phase}.json").write_text(json.dumps(row))


def killed_after_checkpoint(a, process):
    "SIGKILL in the step after the first checkpoint."
    from qie_nb.training.checkpoint import complete_checkpoints
    first = a.work/"out"/"checkpoints"
    while process.poll() is None and not complete_checkpoints(first): time.sleep(0.01 if a.small else 1)
    time.sleep(0 if a.small else 20)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL: raise SystemExit("the phase 'kill' ended by itself; see its message above")
    (a.work/"kill.json").write_text(json.dumps(dict(killed=True, checkpoints=sorted(p.name for p in first.glob("*")))))


def run_all(a):
    a.work.mkdir(parents=True, exist_ok=True)
    if a.again: [(a.work/f"{p}.json").unlink(missing_ok=True) for p in a.again]
    command = [sys.executable, __file__, "--work", str(a.work), *["--small"] * a.small]
    for n, (phase, what) in enumerate(PHASES.items(), 1):
        if (a.work/f"{phase}.json").is_file():
            print(f"{n} of {len(PHASES)}: {what}: done before", flush=True)
            continue
        print(f"{n} of {len(PHASES)}: {what}", flush=True)
        if phase == "kill": shutil.rmtree(a.work/"out", ignore_errors=True)
        process = subprocess.Popen([*command, "--phase", phase], env=os.environ | ENVIRONMENT)
        if phase == "kill": killed_after_checkpoint(a, process)
        if process.wait() and phase != "kill": raise SystemExit(f"the phase {phase!r} failed; run it again to continue")
    rows = {p: json.loads((a.work/f"{p}.json").read_text()) for p in PHASES}
    cpu = next((line.split(": ")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line), platform.machine())
    result = dict(device=f"{cpu}, {os.cpu_count()} cores", date=time.strftime("%F"), small=a.small, versions={p: version(p) for p in LIBRARIES}, phases=rows)
    a.out.write_text(json.dumps(result, indent=1) + "\n")
    print(text(result))


def text(result): # Markdown
    size = lambda n: "" if n is None else f"{n / 1e9:.2f} GB" if n > 1e9 else f"{n / 1e6:.1f} MB"
    rows = [["phase", "time", "memory", "planned", "", "on disk", "planned", ""]]
    for p, what in PHASES.items():
        r = result["phases"][p]
        seconds = r.get("seconds")
        cells = [what, seconds and f"{seconds // 60:.0f}:{seconds % 60:02.0f} min"]
        for name in ("memory", "disk"):
            measured, planned = r.get(name), r.get(f"{name}_plan")
            if name == "memory" and measured: measured -= r["memory_before"]
            cells += [size(measured), size(planned), f"{measured / planned - 1:+.1%}" if planned else ""]
        rows.append(cells)
    return "\n".join("| " + " | ".join(str(c or "") for c in row) + " |" for row in [rows[0], ["---"] * 8, *rows[1:]])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, default=Path("rehearsal"), help="folder for everything that is made; remove it afterwards")
    p.add_argument("--out", type=Path, default=OUT)
    p.add_argument("--small", action="store_true")
    p.add_argument("--again", nargs="*", choices=PHASES, help="phases to repeat")
    p.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    a = p.parse_args()
    a.work = a.work.resolve()
    run_phase(a) if a.phase else run_all(a)


if __name__ == "__main__": main()
