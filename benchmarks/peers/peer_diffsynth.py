"""modelscope/DiffSynth-Studio."""
import json, os, sys
from pathlib import Path
from run import Patch, run_script

TITLE, FOLDER = "DiffSynth-Studio", "DiffSynth-Studio"
URL, COMMIT = "https://github.com/modelscope/DiffSynth-Studio", "fed7b18"
SCRIPT = PRESENT = "examples/qwen_image/model_training/train.py" # the package from PyPI does not contain it
MADE_FOR = "many model families on GPUs of any size, with one small loop that its users copy and change"
DTYPES = "bfloat16", "float32"
STATE = "saves adapters only; training goes on from them with a new optimizer (`--lora_checkpoint`)"
REQUIREMENTS = ["diffsynth==2.1.12"]


def patches(job):
    dit, pipe = "diffsynth.models.qwen_image_dit", "diffsynth.pipelines.qwen_image"
    small = "the sizes of the real model are in the code: those of the small one instead"
    found = [Patch(dit, "3072", str(job["dim"]), small), Patch(dit, "3584", str(job["text"]), small),
             Patch(dit, "num_attention_heads=24", f"num_attention_heads={job['heads']}", small),
             Patch("diffsynth.models.qwen_image_text_encoder", "self.model = Qwen2_5_VLModel(config)",
                   f"config = Qwen2_5_VLConfig.from_pretrained('{job['model']}/text_encoder'); self.model = Qwen2_5_VLModel(config)", small),
             Patch(pipe, "resized_edit_image.append(image)\n                image = pipe.preprocess_image(image)",
                   f"resized_edit_image.append(image)\n                image = pipe.preprocess_image(image.resize({tuple(job['size'])}))",
                   "controls of 1024x1024 pixels are fixed in the code, too many for a CPU: the VAE alone gets smaller ones")]
    if job["dtype"] == "float32":
        found.append(Patch("train.py", "torch_dtype=torch.bfloat16", "torch_dtype=torch.float32", "bfloat16 is fixed in the script; float32 runs only"))
    return found


def register(job):
    "Tell DiffSynth which class the small model's files belong to; it recognises files by a digest of their names and shapes."
    from diffsynth.configs import MODEL_CONFIGS
    from diffsynth.core.loader.file import hash_model_file
    for name, file in files(job).items():
        if any(c["model_hash"] == hash_model_file(file) for c in MODEL_CONFIGS): continue # registered before
        known = next(c for c in MODEL_CONFIGS if c["model_name"] == f"qwen_image_{name}" and not c.get("extra_kwargs"))
        extra = dict(dit=dict(num_layers=job["blocks"]), vae=dict(base_dim=16)).get(name)
        MODEL_CONFIGS.insert(0, known | dict(model_hash=hash_model_file(file)) | (dict(extra_kwargs=extra) if extra else {}))


def files(job):
    m = job["model"]
    return dict(dit=f"{m}/transformer/diffusion_pytorch_model.safetensors", text_encoder=f"{m}/text_encoder/model.safetensors", vae=f"{m}/vae/diffusion_pytorch_model.safetensors")


def script(job, task, models, *argv):
    register(job)
    w, h = job["size"]
    own = [files(job)[k] for k in models]
    zero = ["--zero_cond_t"] if job["variant"] == "2511" else []
    run_script(Path(job["source"])/SCRIPT, [
        "--model_paths", json.dumps(own), "--tokenizer_path", f"{job['model']}/tokenizer", "--processor_path", f"{job['model']}/processor", "--height", h, "--width", w,
        "--task", task, "--dataset_num_workers", 0, "--lora_base_model", "dit", "--lora_target_modules", "to_q,to_k,to_v,to_out.0", "--lora_rank", 16, *zero, *argv],
        patches(job))


def cache(job):
    pairs = Path(job["pairs"])
    rows = [dict(image=f"training_images/{p.name}", edit_image=[f"control_images/{p.name}"], prompt=p.with_suffix(".txt").read_text())
            for p in sorted((pairs/"training_images").glob("*.png"))]
    listing = Path(job["cache"]).parent/f"diffsynth-{Path(job['cache']).name}.json"
    listing.parent.mkdir(parents=True, exist_ok=True)
    listing.write_text(json.dumps(rows))
    script(job, "sft:data_process", ("text_encoder", "vae"), "--dataset_base_path", pairs, "--dataset_metadata_path", listing, "--data_file_keys", "image,edit_image",
           "--extra_inputs", "edit_image", "--output_path", job["cache"])


def train(job, meter):
    import diffsynth.pipelines.qwen_image as pipe
    from run import pack
    import torch
    real = pipe.model_fn_qwen_image
    def model_fn(**kw):
        edits = kw["edit_latents"]
        tokens = [pack(x) for x in (kw["latents"], *(edits if isinstance(edits, list) else [edits]))]
        meter.seen(torch.cat(tokens, 1), kw["timestep"] / 1000, kw["prompt_emb"])
        return real(**kw)
    pipe.model_fn_qwen_image = model_fn
    extra = ["--use_gradient_checkpointing"] if job.get("checkpointing") else []
    if job.get("resume"): extra += ["--lora_checkpoint", lora(job["resume"])]
    if job.get("stop_at"):
        job["interrupt_after"] = job["stop_at"] + 1 # it saves after the step, and has no end but that of an epoch
        extra += ["--save_steps", job["stop_at"]]
    epochs = -(-job["steps"] // job["n_pairs"])
    script(job, "sft:train", ("dit",), "--dataset_base_path", job["cache"], "--learning_rate", 1e-4, "--num_epochs", epochs, "--output_path", job["out"],
           "--remove_prefix_in_ckpt", "pipe.dit.", "--extra_inputs", "edit_image", *extra)


def lora(out): return max(Path(out).glob("step-*.safetensors"), key=lambda p: p.stat().st_mtime)


def entry(job, sample):
    import torch
    path = Path(job["cache"])/"0"/f"{sample}.pth"
    return path, torch.load(path, weights_only=False)


def embedding(job, sample): return entry(job, sample)[1][1]["prompt_emb"]


def latent(job, sample):
    path, data = entry(job, sample)
    return path, data[0]["input_latents"]
