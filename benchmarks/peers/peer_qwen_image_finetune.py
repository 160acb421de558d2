"""tsiendragon/qwen-image-finetune."""
import sys
from pathlib import Path
from run import Patch, run_module

TITLE, FOLDER = "qwen-image-finetune", "qwen-image-finetune"
URL, COMMIT = "https://github.com/tsiendragon/qwen-image-finetune", "460ba1a"
PRESENT = "src/qflux/main.py"
MADE_FOR = "full-size models on one or several large GPUs; two trainers for Qwen-Image-Edit and 2509, not for 2511"
DTYPES = "bfloat16", "float32"
STATE = "interrupted by Ctrl-C, it saves adapter and optimizer; `--resume` reads the adapter and the epoch"
ENVIRONMENT = dict(HF_HUB_OFFLINE="0", TRANSFORMERS_OFFLINE="0") # offline, diffusers refuses to resume from its file; nothing is downloaded
# what its requirements.txt pins, and what its Qwen-Image-Edit path imports; torch comes from the main environment
REQUIREMENTS = ["diffusers==0.37.0", "transformers==4.52.4", "huggingface-hub<1.0", "datasets==3.6.0", "oyaml", "tensorboardX", "einops", "omegaconf", "opencv-python-headless", "matplotlib==3.10.1", "tabulate", "optimum-quanto",
                "prodigyopt", "swanlab", "wandb", "pydantic==2.11.7", "blake3", "rich", "python-dotenv", "ImageHash"]


def patches(job):
    load, plus, base = "qflux.models.load_model", "qflux.trainer.qwen_image_edit_plus_trainer", "qflux.trainer.base_trainer"
    found = [Patch(load, '"Qwen/Qwen2.5-VL-7B-Instruct",', f'"{job["model"]}", subfolder="text_encoder",', "the hub's name of the text encoder is in the code: the small one instead"),
             Patch(load, 'attn_implementation="flash_attention_2"', 'attn_implementation="sdpa"', "flash attention needs a GPU"),
             Patch(plus, 'load_vae("Qwen/Qwen-Image-Edit-2509"', f'load_vae("{job["model"]}"', "the hub's name of the VAE is in the code: the small one instead"),
             Patch("qflux.trainer.qwen_image_edit_trainer", "torch.cuda.synchronize()", "pass", "no GPU"),
             Patch("qflux.data.config", '@field_validator("batch_size", "num_workers")', '@field_validator("batch_size")',
                   "its loader starts a worker each epoch, that is every 8 steps here; none, as for the others")]
    if job["dtype"] == "float32":
        found.append(Patch(base, "self.weight_dtype = torch.bfloat16", "self.weight_dtype = torch.float32", "bfloat16 is fixed in the code; float32 runs only"))
    return found


def config(job):
    "Its YAML file."
    import yaml
    w, h = job["size"]
    made = dict(
        trainer="QwenImageEditPlus",
        model=dict(pretrained_model_name_or_path=job["model"], quantize=False, lora=dict(r=16, lora_alpha=16, target_modules=["to_k", "to_q", "to_v", "to_out.0"])),
        data=dict(class_path="qflux.data.dataset.ImageDataset", batch_size=1, num_workers=0, shuffle=True,
                  init_args=dict(dataset_path=job["pairs"], caption_dropout_rate=0., prompt_image_dropout_rate=0., cache_dir=job["cache"], use_cache=True,
                                 processor=dict(class_path="qflux.data.preprocess.ImageProcessor",
                                                init_args=dict(process_type="resize", target_size=[h, w], controls_size=[[h, w]])))),
        logging=dict(output_dir=job["out"], report_to="tensorboard", tracker_project_name="run"),
        optimizer=dict(class_path="torch.optim.AdamW", init_args=dict(lr=1e-4)),
        lr_scheduler=dict(scheduler_type="constant", warmup_steps=0),
        train=dict(gradient_accumulation_steps=1, max_train_steps=max(1, job.get("steps", 1)), checkpointing_steps=10**6, max_grad_norm=1.,
                   mixed_precision="bf16" if job["dtype"] == "bfloat16" else "no", gradient_checkpointing=job.get("checkpointing", False)),
        cache=dict(devices=dict(vae="cpu", text_encoder="cpu"), cache_dir=job["cache"], use_cache=True),
        predict=dict(devices=dict(vae="cpu", text_encoder="cpu", dit="cpu")), resume=None)
    path = Path(job["cache"]).parent/f"qflux-{Path(job['result']).stem}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(made))
    return path


def source(job): sys.path.insert(0, str(Path(job["source"])/"src"))


def cache(job):
    source(job)
    run_module("qflux.main", ["--config", config(job), "--cache"])


def train(job, meter):
    source(job)
    from qflux.models.transformer_qwenimage import QwenImageTransformer2DModel
    meter.watch(QwenImageTransformer2DModel)
    from qflux.losses import MseLoss
    real_loss = MseLoss.forward
    def loss(module, model_pred, target, *a, **kw):
        meter.predicted(model_pred, target)
        return real_loss(module, model_pred, target, *a, **kw)
    MseLoss.forward = loss
    job["interrupt_after"] = job.get("stop_at") # Ctrl-C: it finishes the step and saves
    resume = ["--resume", state(job["resume"])] if job.get("resume") else []
    run_module("qflux.main", ["--config", config(job), *resume])


def state(out): return next(Path(out).rglob("checkpoint-last-*"))
def lora(out): return next(Path(out).rglob("checkpoint-last-*/pytorch_lora_weights.safetensors"))


def entry(job, sample, kind):
    "Its cached tensor of a sample and that tensor's file."
    import torch
    source(job)
    from qflux.data.config import load_config_from_yaml
    from qflux.data.dataset import ImageDataset
    data = ImageDataset(load_config_from_yaml(str(config(job))).data.init_args)
    at = next(i for i, s in enumerate(data.all_samples) if Path(s["image"]).stem == f"{sample:04}")
    import json
    main = data.load_data(at)["file_hashes"]["main_hash"]
    names = json.loads(Path(data.cache_manager.get_metadata_path(job["cache"], main)).read_text())
    path = data.cache_manager.get_cache_embedding_path(kind, names[kind])
    return path, torch.load(path)


def embedding(job, sample): return entry(job, sample, "prompt_embeds")[1]
def latent(job, sample): return entry(job, sample, "image_latents")
