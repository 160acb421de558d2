"""bghira/SimpleTuner."""
import hashlib, json, os, shutil, sys
from pathlib import Path
from run import Patch, run_script

TITLE, FOLDER = "SimpleTuner", "SimpleTuner"
URL, COMMIT = "https://github.com/bghira/SimpleTuner", "bc8e6ab77"
SCRIPT = PRESENT = "simpletuner/train.py"
MADE_FOR = "many image, video and audio models, on one to many GPUs and with data sets of any size, with a web interface"
DTYPES = "bfloat16", "float32"
STATE = "checkpoints hold adapter, optimizer, random states and the position in the data; `--resume_from_checkpoint`"
# of what its setup.py asks for, that which its start imports, without CUDA; transformers 5.24 lacks a class that it imports; torch comes from the main environment
REQUIREMENTS = ["transformers==5.16.1", "trainingsample==0.3.2", "wandb==0.31.0", "einops==0.8.2", "toml==0.10.2", "colorama==0.4.6", "loguru==0.7.3", "atomicwrites==1.4.1",
                "fastapi==0.165.0", "python-multipart==0.0.34", "httpx==0.28.1", "ftfy==6.3.1", "sentencepiece==0.2.3", "torchaudio==2.11.0", "librosa==0.11.0",
                "spacy==3.8.18", "num2words==0.5.14", "hangul-romanize==0.1.0", "py3langid==0.4.0", "pypinyin==0.55.0", "skrample==0.5.3; python_version >= '3.12'"]


def patches(job):
    collate = "simpletuner.helpers.training.collate"
    found = [Patch(collate, "if not torch.backends.mps.is_available():", "if torch.cuda.is_available():", "pinned memory needs a GPU")]
    if sys.version_info < (3, 12):
        found.append(Patch("simpletuner.helpers.scheduled_sampling.skrample_adapter", "from skrample import scheduling as sk_scheduling\n", "",
                           "made for Python 3.12: an import for scheduled sampling, which is off, needs it"))
    return found


def data_config(job, folder):
    "Its list of datasets: targets with captions, controls, text embeddings."
    w, h = job["size"]
    links(job, folder)
    name = Path(job["cache"]).name # part of each id: what it remembers of a dataset within a process has the id as its key
    common = dict(type="local", resolution=min(w, h), resolution_type="pixel", crop=False, minimum_image_size=0)
    made = [dict(id=f"targets-{name}", dataset_type="image", instance_data_dir=str(folder/"training_images"), caption_strategy="textfile", conditioning_data=[f"controls-{name}"],
                 cache_dir_vae=f"{job['cache']}/targets", repeats=0, **common),
            dict(id=f"controls-{name}", dataset_type="conditioning", instance_data_dir=str(folder/"control_images"), conditioning_type="reference_strict", caption_strategy=None,
                 cache_dir_vae=f"{job['cache']}/controls", **common),
            dict(id=f"text-{name}", dataset_type="text_embeds", type="local", default=True, cache_dir=f"{job['cache']}/text")]
    path = folder/"data.json"
    path.write_text(json.dumps(made))
    return path


def links(job, folder):
    "A folder of links to the pairs: it writes its lists of sizes beside the images."
    for sub in ("training_images", "control_images"):
        (folder/sub).mkdir(parents=True, exist_ok=True)
        for p in Path(job["pairs"], sub).iterdir():
            if not (folder/sub/p.name).exists(): (folder/sub/p.name).symlink_to(p)


def start(job, **changes):
    sys.path.insert(0, job["source"])
    folder = Path(job["cache"] + "-data")
    settings = dict(
        model_type="lora", model_family="qwen_image", model_flavour={"2509": "edit-v2", "2511": "edit-v3"}[job["variant"]], pretrained_model_name_or_path=job["model"],
        lora_type="standard", lora_rank=16, lora_alpha=16, lora_dropout=0, mixed_precision="bf16" if job["dtype"] == "bfloat16" else "no", vae_dtype="fp32",
        data_backend_config=str(data_config(job, folder)), output_dir=job["out"], cache_dir=job["cache"] + "-data/cache",
        train_batch_size=1, gradient_checkpointing=job.get("checkpointing", False), optimizer="torch-adamw", learning_rate=1e-4, lr_scheduler="constant", lr_warmup_steps=0,
        max_grad_norm=1., flow_use_uniform_schedule=True, flow_schedule_shift=0, caption_dropout_probability=0, max_train_steps=max(1, job.get("steps", 1)), num_train_epochs=0,
        checkpoint_step_interval=10**6, seed=job.get("seed", 0) + 42, report_to="none", validation_disable=True, disable_benchmark=True, vae_batch_size=1) | changes
    path = folder/f"{Path(job['result']).stem}.json"
    path.write_text(json.dumps(settings))
    os.environ |= dict(CONFIG_BACKEND="json", CONFIG_PATH=str(path))
    run_script(Path(job["source"])/SCRIPT, [])


def cache(job):
    "Its training run, interrupted as by Ctrl-C once everything is encoded; on its command line nothing ends there."
    sys.path.insert(0, job["source"])
    from simpletuner.helpers.training.trainer import Trainer
    def stop(trainer): raise KeyboardInterrupt
    Trainer.init_load_base_model = stop
    start(job)


def train(job, meter):
    sys.path.insert(0, job["source"])
    from simpletuner.helpers.models.qwen_image.transformer import QwenImageTransformer2DModel
    meter.watch(QwenImageTransformer2DModel)
    stop, before = job.get("stop_at"), job.get("resume")
    if before: shutil.copytree(before, job["out"], dirs_exist_ok=True) # it resumes within its output folder
    start(job, max_train_steps=job["total"] if before else stop or job["steps"], checkpoint_step_interval=stop or 10**6, resume_from_checkpoint="latest" if before else None)


def lora(out): return Path(out)/"pytorch_lora_weights.safetensors"


def embedding(job, sample):
    import gzip, torch
    prompt = Path(job["pairs"], "training_images", f"{sample:04}.txt").read_text()
    key = hashlib.md5(f"targets-{Path(job['cache']).name}:{sample:04}.png\0prompt\0{prompt}".encode()).hexdigest()
    found = torch.load(gzip.open(f"{job['cache']}/text/{key}-qwen_image.pt"))
    return found["prompt_embeds"][found["attention_masks"].bool()] # without what fills it up to 1024 tokens


def latent(job, sample):
    "Its file and, since that is compressed, the file's bytes."
    import torch
    path = Path(job["cache"], "targets", hashlib.sha256(f"{sample:04}".encode()).hexdigest() + ".pt")
    return path, torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
