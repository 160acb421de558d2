"""ostris/ai-toolkit."""
import math, os, shutil, sys, time
from pathlib import Path
from run import Patch, run_script

TITLE, FOLDER = "ai-toolkit", "ai-toolkit"
URL, COMMIT = "https://github.com/ostris/ai-toolkit", "27a03a9"
PRESENT = "extensions_built_in/diffusion_models/qwen_image/qwen_image_edit_plus.py"
MADE_FOR = "many image, video and audio models on consumer GPUs, from a web page or a YAML file"
DTYPES = "bfloat16", "float32"
STATE = "each save holds adapter, optimizer and step number; a job of the same name goes on from the last and begins random numbers and epoch anew"
# what its requirements_base.txt pins, and what its models import; instead of its commit of diffusers the release that followed it
REQUIREMENTS = ["diffusers==0.39.0", "transformers==5.5.3", "huggingface_hub==1.23.0", "peft==0.18.1", "lycoris-lora==1.8.3", "optimum-quanto==0.2.4", "albumentations==1.4.15", "albucore==0.0.16",
                "opencv-python-headless", "torchaudio==2.11.0", "av==16.0.1", "mutagen==1.47.0", "timm==1.0.22", "controlnet_aux==0.0.10",
                "open_clip_torch", "lpips", "oyaml", "flatten_json", "einops", "toml", "omegaconf"]


def patches(job):
    return [Patch("extensions_built_in.diffusion_models.omnigen2.src.utils.import_utils", "return _triton_available", "return False",
                  "all its model families are imported, and OmniGen2 asks for the GPU then if triton is installed; no GPU")]


def dataset(job):
    "It caches in folders beside the images: a folder with links to images and captions, and to the cache."
    cache, pairs = Path(job["cache"]), Path(job["pairs"])
    folder = cache.parent/f"ai-toolkit-{cache.name}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder/"training_images").mkdir(parents=True)
    for p in sorted((pairs/"training_images").iterdir()): (folder/"training_images"/p.name).symlink_to(p.resolve())
    (folder/"control_images").symlink_to((pairs/"control_images").resolve())
    for name in ("_latent_cache", "_t_e_cache"):
        (cache/name).mkdir(parents=True, exist_ok=True)
        (folder/"training_images"/name).symlink_to((cache/name).resolve())
    return folder


def config(job, steps):
    "Its YAML file."
    import yaml
    full = job["dtype"] == "float32"
    made = dict(job="extension", meta=dict(name="[name]", version="1.0"), config=dict(name="run", process=[dict(
        type="diffusion_trainer", training_folder=job["out"], training_seed=job.get("seed", 0), device="cpu",
        network=dict(type="lora", linear=16, linear_alpha=16, network_kwargs=dict(only_if_contains=["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"])),
        save=dict(dtype="float32" if full else "bf16", save_every=10**6),
        # paths below the working folder, since its keys of text embeddings contain the control's path
        datasets=[dict(folder_path="training_images", control_path="control_images", caption_ext="txt", caption_dropout_rate=0., cache_latents_to_disk=True, num_workers=0,
                       resolution=math.ceil(job["area"] ** .5))], # the side of a square that is just large enough
        train=dict(batch_size=1, cache_text_embeddings=True, steps=steps, timestep_type="linear", noise_scheduler="flowmatch", optimizer="adamw", lr=1e-4,
                   gradient_checkpointing=bool(job.get("checkpointing")), disable_sampling=True, dtype="fp32" if full else "bf16"),
        model=dict(name_or_path=job["model"], arch="qwen_image_edit_plus", model_kwargs=dict(match_target_res=True)))])) # else controls of 1024x1024 pixels
    path = Path(job["cache"]).parent/f"ai-toolkit-{Path(job['result']).stem}.yaml"
    path.write_text(yaml.safe_dump(made))
    return path


def start(job, steps):
    folder = dataset(job)
    path = config(job, steps)
    os.chdir(folder)
    run_script(Path(job["source"])/"run.py", [path])


def source(job):
    if job["source"] not in sys.path: sys.path.insert(0, job["source"])


def cache(job):
    "A job of no steps caches and ends."
    source(job)
    shutil.rmtree(job["out"], ignore_errors=True)
    start(job, 0)


def train(job, meter):
    source(job)
    from diffusers import QwenImageTransformer2DModel
    meter.watch(QwenImageTransformer2DModel)
    watch(meter)
    steps = job.get("stop_at") or job["steps"]
    if job.get("resume"):
        shutil.copytree(job["resume"], job["out"], dirs_exist_ok=True) # it goes on from what it finds in its own folder
        steps = job["total"]
    start(job, steps)


def watch(meter):
    "Count what it does besides the step apart from the step."
    from extensions_built_in.diffusion_models.qwen_image.qwen_image import QwenImageModel
    from extensions_built_in.sd_trainer.SDTrainer import SDTrainer
    real_images, real_static = QwenImageModel.encode_images, SDTrainer.encode_static_prompt
    def encode_images(*a, **kw): # it encodes the control image in each step; the VAE's random numbers are not the step's noise
        kept, began = len(getattr(meter, "kept", ())), time.process_time()
        out = real_images(*a, **kw)
        if kept: del meter.kept[kept:]
        meter.fresh += time.process_time() - began
        return out
    def encode_static_prompt(*a, **kw): # it encodes an empty prompt at each start
        before = meter.encoded
        out = real_static(*a, **kw)
        meter.encoded = before
        return out
    QwenImageModel.encode_images, SDTrainer.encode_static_prompt = encode_images, encode_static_prompt


def lora(out): return Path(out)/"run"/"run.safetensors"


def entry(job, sample, kind, name):
    from safetensors.torch import load_file
    path = next((Path(job["cache"])/kind).glob(f"{sample:04}_*.safetensors"))
    return path, load_file(path)[name]


def caption(text): return ", ".join(text.split(",")) # with a second space after each comma, from its `get_caption`
def embedding(job, sample): return entry(job, sample, "_t_e_cache", "text_embed")[1]
def latent(job, sample): return entry(job, sample, "_latent_cache", "latent")
