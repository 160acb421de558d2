"""kohya-ss/musubi-tuner."""
import sys
from pathlib import Path
from run import Patch, run_module

TITLE, FOLDER = "musubi-tuner", "musubi-tuner"
URL, COMMIT = "https://github.com/kohya-ss/musubi-tuner", "30c658c"
PRESENT = "src/musubi_tuner/qwen_image_train_network.py"
MADE_FOR = "many image and video models on one consumer GPU, with fp8 weights and block swap"
DTYPES = "bfloat16", "float32"
STATE = "`--save_state` keeps adapter, optimizer and random states; `--resume` reads them and begins a new epoch"
# what its pyproject.toml pins, without bitsandbytes; torch comes from the main environment
REQUIREMENTS = ["accelerate==1.6.0", "av==14.0.1", "diffusers==0.32.1", "einops==0.7.0", "huggingface-hub==0.34.3", "opencv-python-headless==4.10.0.84", "safetensors==0.4.5",
                "toml==0.10.2", "tqdm==4.67.1", "transformers==4.57.6", "voluptuous==0.15.2", "ftfy==6.3.1", "easydict==1.13", "sentencepiece==0.2.1"]


def patches(job):
    utils, model = "musubi_tuner.qwen_image.qwen_image_utils", "musubi_tuner.qwen_image.qwen_image_model"
    small = "the sizes of the real model are in the code: those of the small one instead"
    found = [Patch(utils, "config = json.loads(QWEN2_5_VL_CONFIG_JSON)", f"config = json.load(open('{job['model']}/text_encoder/config.json'))", small),
            Patch(utils, '"base_dim": 96,', '"base_dim": 16,', small),
            Patch(utils, 'QWEN_IMAGE_ID = "Qwen/Qwen-Image"', f'QWEN_IMAGE_ID = "{job["model"]}"', "the hub's name of the tokenizer is in the code"),
            Patch(utils, 'QWEN_IMAGE_EDIT_ID = "Qwen/Qwen-Image-Edit"', f'QWEN_IMAGE_EDIT_ID = "{job["model"]}"', "the hub's name of the processor is in the code"),
            Patch(model, "num_attention_heads=24,", f"num_attention_heads={job['heads']},", small),
            Patch(model, "joint_attention_dim=3584,", f"joint_attention_dim={job['text']},", small)]
    if job["dtype"] == "float32":
        train, why = "musubi_tuner.qwen_image_train_network", "bfloat16 is fixed in the code; float32 runs only"
        found += [Patch(train, "self.dit_dtype = torch.bfloat16", "self.dit_dtype = torch.float32", why), Patch(train, 'args.dit_dtype = "bfloat16"', 'args.dit_dtype = "float32"', why)]
    return found


def data_config(job):
    w, h = job["size"]
    path = Path(job["cache"]).parent/f"musubi-{Path(job['cache']).name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"""
[general]
resolution = [{w}, {h}]
caption_extension = ".txt"
batch_size = 1
enable_bucket = true
[[datasets]]
image_directory = "{job['pairs']}/training_images"
control_directory = "{job['pairs']}/control_images"
cache_directory = "{job['cache']}"
qwen_image_edit_control_resolution = [{w}, {h}]
""")
    return path


def source(job): sys.path.insert(0, str(Path(job["source"])/"src"))


def cache(job):
    source(job)
    Path(job["cache"]).mkdir(parents=True, exist_ok=True)
    common = ["--dataset_config", data_config(job), "--model_version", f"edit-{job['variant']}", "--device", "cpu", "--num_workers", 1]
    run_module("musubi_tuner.qwen_image_cache_latents", [*common, "--vae", f"{job['model']}/vae/diffusion_pytorch_model.safetensors"])
    run_module("musubi_tuner.qwen_image_cache_text_encoder_outputs", [*common, "--text_encoder", f"{job['model']}/text_encoder/model.safetensors", "--batch_size", 1])


def train(job, meter):
    source(job)
    from musubi_tuner.qwen_image.qwen_image_model import QwenImageTransformer2DModel
    meter.watch(QwenImageTransformer2DModel)
    extra = ["--gradient_checkpointing"] if job.get("checkpointing") else []
    if job.get("stop_at"): extra += ["--save_state", "--save_last_n_steps_state", 10**6]
    if job.get("resume"): extra += ["--resume", next(Path(job["resume"]).glob("run-state"))]
    targets = r"include_patterns=[r'.*attn_(to_q|to_k|to_v|to_out_0)$', r'.*attn\.(to_q|to_k|to_v|to_out\.0)$']"
    run_module("musubi_tuner.qwen_image_train_network", [
        "--dataset_config", data_config(job), "--dit", f"{job['model']}/transformer/diffusion_pytorch_model.safetensors", "--model_version", f"edit-{job['variant']}",
        "--num_layers", job["blocks"], "--sdpa", "--mixed_precision", "bf16" if job["dtype"] == "bfloat16" else "no", "--network_module", "musubi_tuner.networks.lora_qwen_image", "--network_dim", 16, "--network_alpha", 16,
        "--network_args", "exclude_patterns=[r'.*']", targets, "--optimizer_type", "adamw", "--learning_rate", 1e-4, "--timestep_sampling", "uniform", "--weighting_scheme", "none",
        "--max_train_steps", job.get("stop_at") or job["steps"], "--max_data_loader_n_workers", 0, "--seed", job.get("seed", 0), "--output_dir", job["out"], "--output_name", "run", *extra])


def lora(out): return Path(out)/"run.safetensors"


def entry(job, sample, ending):
    from safetensors.torch import load_file
    path = next(p for p in Path(job["cache"]).glob(f"{sample:04}*{ending}.safetensors"))
    return path, load_file(path)


def embedding(job, sample): return next(v for k, v in entry(job, sample, "_te")[1].items() if "vl_embed" in k)


def latent(job, sample):
    path = next(p for p in sorted(Path(job["cache"]).glob(f"{sample:04}*.safetensors")) if not p.stem.endswith("_te"))
    from safetensors.torch import load_file
    return path, next(v for k, v in load_file(path).items() if k.startswith("latents_") and "control" not in k)
