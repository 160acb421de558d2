"""This library."""
from pathlib import Path

TITLE, FOLDER = "qie_nb", "."
URL, COMMIT = "https://github.com/qie-nb/qie_nb", "this checkout"
PRESENT = "qie_nb/trainer.py"
MADE_FOR = "Qwen-Image-Edit alone, in notebooks, on small GPUs and in sessions that end too soon"
DTYPES = "bfloat16", "float32"
STATE = "each checkpoint holds adapter, optimizer, random states and the position in the data"
REQUIREMENTS = []


def patches(job): return []


def config(job):
    w, h = job["size"]
    return dict(
        model=dict(pretrained_model_name_or_path=job["model"], lora=dict(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"])) | job.get("model_settings", {}),
        data=dict(dataset_path=job["pairs"], image_size=[w, h], control_area=job["area"], batch_size=1, caption_dropout_rate=0.),
        train=dict(output_dir=job["out"], device="cpu", mixed_precision="bf16" if job["dtype"] == "bfloat16" else "no", gradient_checkpointing=job.get("checkpointing", False),
                   max_train_steps=max(1, job.get("total") or job.get("steps", 1)), save_interval=0, save_steps=job.get("total"), eval_interval=0, seed=job.get("seed", 0),
                   resume_checkpoint=job.get("resume") and str(last(job["resume"]))) | job.get("train_settings", {}),
        cache=dict(cache_dir=job["cache"] + ("-bfloat16" if job["dtype"] == "bfloat16" else "")), optimizer=dict(lr=1e-4), lr_scheduler=dict(scheduler_type="constant", warmup_steps=0),
        logging=dict(log_dir=str(Path(job["out"])/"runs"), report_to="none", log_images=False, panel=False))


def trainer(job):
    from qie_nb.trainer import QwenImageEditTrainer
    return QwenImageEditTrainer(config(job))


def cache(job): trainer(job).cache_embeddings()


def train(job, meter):
    t = trainer(job)
    from diffusers import QwenImageTransformer2DModel
    meter.watch(QwenImageTransformer2DModel)
    from qie_nb.models import flow_matching
    real_loss = flow_matching.flow_loss
    def flow_loss(pred, target, *a, **kw):
        meter.predicted(pred[:, :target.shape[1]], target)
        return real_loss(pred, target, *a, **kw)
    flow_matching.flow_loss = flow_loss
    if not job.get("resume") and job.get("stop_at", 10**9) < job.get("total", 0): job["interrupt_after"] = job["stop_at"] # Ctrl-C: it finishes the step and saves
    if job.get("bare"): return bare(t)
    t.fit()


def bare(t):
    "The trainer's transformer and batch in the loop of benchmarks/step_cpu.py."
    import sys
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import torch
    from step_cpu import bare_of, bare_step
    from qie_nb.training.callbacks import call
    run = t.setup_run()
    call(run.callbacks, "on_train_begin", t)
    group = next(iter(run.groups(t.state)))
    t.optimizer_step(group)
    norm = t.config.train.max_grad_norm
    step = bare_of(t)
    if not norm: torch.nn.utils.clip_grad_norm_ = lambda *a, **kw: None
    while True: step()


def last(out): return sorted(Path(out).glob("checkpoints/step_*"))[-1]
def lora(out): return last(out)/"pytorch_lora_weights.safetensors"


def data_set(job):
    from qie_nb.data.dataset import ImageDataset
    data = ImageDataset(config(job))
    data.refresh()
    return data


def embedding(job, sample): return data_set(job)[sample]["prompt_embed"]


def latent(job, sample):
    data = data_set(job)
    entry = data.keys(sample)["pixel_latent"]
    return data.cache.find(*entry.id).where(*entry.id), data[sample]["pixel_latent"]
