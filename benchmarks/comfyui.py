"""Does ComfyUI take our workflows, and do its nodes give the sizes, texts and noise levels of the training?

`COMFYUI=/path/to/checkout python benchmarks/comfyui.py`, or `python benchmarks/comfyui.py COMFYUI=/path/to/checkout`, with a Python that has ComfyUI's
requirements (see tools/comfyui_nodes.py). On the CPU, without weights: ComfyUI's own `validate_prompt` reads each API file; then its own executor runs the
graph, where only the loaders, the patches of the model and KSampler are stand-ins that record what they get. Scaling, expressions, encode nodes, tokenizer,
reference latents and the text encoder's image processing are ComfyUI's. Sizes are compared with `Geometry`, prompts with `prompt_text`, noise levels with
`sampling_schedule`, and the scaled guidance with `true_cfg`. Everything here is exact arithmetic on sizes or one evaluation of a formula: there is no spread.
"""
import argparse, asyncio, json, math, os, platform, random, re, sys, tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/"tools"))
OUT = ROOT/"benchmarks"/"results"/"comfyui.json"

import numpy as np
import torch
from PIL import Image

from comfyui_nodes import load_nodes
from qie_nb.data.images import Geometry, calculate_dimensions
from qie_nb.extras.comfyui_workflow import (WorkflowFacts, differences, encoded_squares,
                                          vl_squares, vl_size, workflow)
from qie_nb.models.components import VARIANTS
from qie_nb.models.flow_matching import calculate_mu, true_cfg
from qie_nb.sampling.denoising import SCHEDULES, sampling_schedule

SIZES = [(1024, 1024), (1600, 1200), (1200, 1600), (1536, 1024), (1024, 1536), (1920, 1080), (1080, 1920), (1250, 1000), (1280, 720), (640, 427),
         (1184, 880), (900, 1350)]
MODELS = [v.comfyui for v in VARIANTS.values()]
CASES = { # (image_size, crop, control_area)
    "pipelines' sizes": ((1024, 1024), False, 1024**2), "small": ((512, 512), False, 512**2), "result smaller than controls": ((512, 512), False, 1024**2),
    "cropped": ((1024, 768), True, 768**2)}
PROMPT = 'make it "dusk" {now|later} (very: 1.2)'
LORAS = ["dusk.safetensors", "Qwen-Image-Edit-Lightning-4steps-V1.0.safetensors"]


def facts_of(variant, case, controls=1, **changes):
    image_size, crop, area = CASES[case]
    geometry = Geometry(image_size, crop, area, VARIANTS[variant].vl_area)
    return WorkflowFacts(VARIANTS[variant].comfyui, LORAS[0], geometry, controls, prompt=PROMPT, **changes)


# stand-ins: what they get is kept in `seen`
seen = {}


class Vae:
    def encode(self, pixels): seen.setdefault("encoded", []).append((pixels.shape[2], pixels.shape[1])); return torch.zeros(1, 16, 1, pixels.shape[1] // 8, pixels.shape[2] // 8)
    def decode(self, samples, **kw): return torch.zeros(1, samples.shape[-2] * 8, samples.shape[-1] * 8, 3)


class Clip:
    def __init__(self):
        from comfy import sd1_clip
        from comfy.text_encoders.qwen_image import QwenImageTokenizer
        self.tokenizer, real = QwenImageTokenizer(), sd1_clip.SD1Tokenizer.tokenize_with_weights
        def noted(tokenizer, text, *args, **kw):
            seen["text"] = text
            return real(tokenizer, text, *args, **kw)
        sd1_clip.SD1Tokenizer.tokenize_with_weights = noted
    def tokenize(self, text, images=(), **kw):
        from comfy.text_encoders.qwen_vl import process_qwen2vl_images
        tokens = self.tokenizer.tokenize_with_weights(text, False, images=list(images), **kw)
        grids = [process_qwen2vl_images(i)[1][0].tolist() for i in images]
        return dict(text=seen["text"], squares=[(w // 2, h // 2) for _, h, w in grids], tokens=tokens)
    def encode_from_tokens_scheduled(self, tokens): return [[torch.zeros(1, 4, 8), dict(text=tokens["text"], squares=tokens["squares"])]]


def stand_in(real, result):
    return type("StandIn", (), dict(INPUT_TYPES=real.INPUT_TYPES, RETURN_TYPES=real.RETURN_TYPES, FUNCTION="run", run=lambda self, **kw: result(**kw)))


def sampler(latent_image, positive, negative, **kw):
    seen.update(latent=latent_image["samples"], positive=positive[0][1], negative=negative[0][1], sampled=kw)
    return ({"samples": latent_image["samples"]},)


def with_stand_ins(mappings):
    model, clip, vae = object(), Clip(), Vae()
    given = dict(UNETLoader=lambda **kw: (model,), LoraLoaderModelOnly=lambda **kw: (model,), ModelSamplingAuraFlow=lambda **kw: (model,),
                 CFGNorm=lambda **kw: (model,), CLIPLoader=lambda **kw: (clip,), VAELoader=lambda **kw: (vae,), KSampler=sampler)
    return {**mappings, **{k: stand_in(mappings[k], f) for k, f in given.items()}}


def prepare(folder, nodes):
    import folder_paths
    files = dict(diffusion_models=[m.unet for m in MODELS], text_encoders=[MODELS[0].text_encoder],
                 vae=[MODELS[0].vae], loras=LORAS)
    real = folder_paths.get_filename_list
    folder_paths.get_filename_list = lambda kind: files.get(kind) or real(kind)
    (folder/"input").mkdir(), (folder/"output").mkdir()
    folder_paths.set_input_directory(str(folder/"input")), folder_paths.set_output_directory(str(folder/"output"))


def image_of(folder, size): Image.fromarray(np.zeros((size[1], size[0], 3), np.uint8)).save(folder/"input"/"example.png", compress_level=1)


def validate(execution, api):
    ok, error, _, errors = asyncio.run(execution.validate_prompt("x", json.loads(json.dumps(api)), None))
    return ok, [e["message"] + ": " + e["details"] for n in errors.values() for e in n["errors"]] or [error and error["message"]]


def run(execution, api):
    seen.clear()
    server = MagicMock(client_id=None)
    executor = execution.PromptExecutor(server, execution.CacheType.NONE, dict(lru=0, ram=0, ram_inactive=0))
    outputs = [n for n, d in api.items() if d["class_type"] == "SaveImage"]
    executor.execute(json.loads(json.dumps(api)), "x", extra_data={}, execute_outputs=outputs)
    if "latent" not in seen: raise SystemExit(f"ComfyUI did not run the workflow: {server.send_sync.call_args_list} {getattr(executor, 'status_messages', '')}")
    return dict(seen)


def compared(f, size, got) -> dict: # {what: (ours, ComfyUI's)}
    g = f.geometry
    shown = tuple(g.image_size) if g.crop else size # as the images are cropped
    pixels = lambda z: (z.shape[-1] * 8, z.shape[-2] * 8)
    latents = got["positive"].get("reference_latents", [])
    rows = {"result": (g.target(size), pixels(got["latent"])), "controls": ([g.control(size)] * f.controls, [pixels(z) for z in latents]),
            "the negative's controls": ([g.control(size)] * f.controls, [pixels(z) for z in got["negative"].get("reference_latents", [])]),
            "text encoder": ([vl_squares(calculate_dimensions(f.vl_area, shown[0] / shown[1]))] * f.controls, got["positive"]["squares"])}
    for name, prompt in (("positive", PROMPT), ("negative", " ")):
        rows[f"{name} text"] = VARIANTS[f.model.name].prompt_text(prompt, f.controls), got[name]["text"]
    method = "index_timestep_zero" if f.model.controls_at_zero and f.controls else None
    rows["timestep of the controls"] = method, got["positive"].get("reference_latents_method")
    return rows


def breakages(api) -> dict: # {what is wrong: API file}
    find = lambda kind: next(n for n, d in api.items() if d["class_type"] == kind)
    out = {}
    for name, kind, key, value in (("a link of another type", "VAEDecode", "samples", [find("UNETLoader"), 0]), ("a file that is not there", "UNETLoader", "unet_name", "mine.safetensors"),
                                   ("a value out of range", "KSampler", "steps", 0), ("an unknown choice", "KSampler", "scheduler", "linear"), ("no input", "KSampler", "model", None)):
        copy = json.loads(json.dumps(api))
        inputs = copy[find(kind)]["inputs"]
        inputs.pop(key) if value is None else inputs.update({key: value})
        out[name] = copy
    unknown = json.loads(json.dumps(api))
    unknown[find("KSampler")]["class_type"] = "KSamplerOfOurs"
    return out | {"an unknown node": unknown}


def noise_levels(steps, size, overrides) -> dict:
    "The levels of KSampler with our shift, and those of the pipelines."
    import comfy.model_sampling, comfy.samplers
    from diffusers import FlowMatchEulerDiscreteScheduler
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(json.loads((ROOT/"qie_nb/assets/tiny-edit/scheduler/scheduler_config.json").read_text()))
    tokens = size[0] * size[1] // 256
    shift = math.exp(calculate_mu(tokens, {**scheduler.config, **overrides}))
    theirs = comfy.model_sampling.ModelSamplingDiscreteFlow()
    theirs.set_parameters(shift=round(shift, 4), multiplier=1.0)
    theirs = comfy.samplers.calculate_sigmas(theirs, "simple", steps)
    ours = sampling_schedule(scheduler, steps, tokens, overrides=overrides).sigmas
    off = (theirs - ours).abs()
    return dict(steps=steps, size=size, shift=round(shift, 4), largest_difference=round(off.max().item(), 4), at_step=int(off.argmax()) + 1,
                last_levels=dict(comfyui=round(theirs[-2].item(), 4), pipelines=round(ours[-2].item(), 4)))


def guidance(cfg_norm, scale=4.0, sigma=0.7) -> dict:
    "CFGNorm's two kinds, as relative RMS distance of the velocity from `true_cfg`; random latents of 16 channels."
    torch.manual_seed(0)
    cond, x = torch.randn(1, 16, 32, 32), torch.randn(1, 16, 32, 32)
    uncond = cond + 0.3 * torch.randn(1, 16, 32, 32)
    pack = lambda z: z.view(1, 16, 16, 2, 16, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, 256, 64)
    want, caught = true_cfg(pack(cond), pack(uncond), scale), {}
    model = MagicMock()
    model.clone.return_value = model
    model.set_model_sampler_cfg_function.side_effect = lambda f: caught.update(pre=f)
    model.set_model_sampler_post_cfg_function.side_effect = lambda f: caught.update(post=f)
    for pre in (True, False): cfg_norm.execute(model, 1.0, pre)
    pre = caught["pre"](dict(cond=sigma * cond, uncond=sigma * uncond, cond_scale=scale)) / sigma
    plain = uncond + scale * (cond - uncond)
    post = (x - caught["post"](dict(cond_denoised=x - sigma * cond, denoised=x - sigma * plain))) / sigma
    off = lambda v: round(((pack(v) - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt()).item(), 4)
    return dict(pre_cfg=off(pre), post_cfg=off(post), without=off(plain))


def shares(n=4000) -> dict: # of random image sizes whose squares are the pipelines'
    rng, out = random.Random(0), {}
    sizes = [(rng.randint(300, 4000), rng.randint(300, 4000)) for _ in range(n)]
    sizes = [s for s in sizes if max(s) <= 4 * min(s)]
    for name, area in (("v1", VARIANTS["v1"].comfyui.node_area), ("2509, 2511", VARIANTS["2511"].comfyui.node_area)):
        ours = [vl_squares(calculate_dimensions(area, w / h)) for w, h in sizes]
        share = lambda given: round(float(np.mean([encoded_squares(given(s), area) == o for s, o in zip(sizes, ours)])), 3)
        most = max(max(abs(a - b) for a, b in zip(encoded_squares(vl_size(s, area, area), area), o)) for s, o in zip(sizes, ours))
        out[name] = dict(image_sizes=len(sizes), with_our_nodes=share(lambda s: vl_size(s, area, area)), image_given_directly=share(lambda s: s), largest_difference_squares=most)
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("checkout", nargs="?", default=os.environ.get("COMFYUI"), help="COMFYUI=/path/to/checkout")
    a = p.parse_args()
    if not a.checkout: p.error("name a checkout: COMFYUI=/path/to/checkout")
    checkout = Path(a.checkout.removeprefix("COMFYUI="))
    mappings, folder = load_nodes(checkout), Path(tempfile.mkdtemp())
    import execution, nodes
    prepare(folder, mappings)
    image_of(folder, (64, 64))
    graphs = {(v, c, n): facts_of(v, c, n) for v in VARIANTS for c in CASES for n in ([1] if v == "v1" else [1, 2, 3])}
    graphs |= {(v, "text to image", 0): facts_of(v, "small", 0) for v in VARIANTS}
    few = dict(few_steps=LORAS[1], steps=4, true_cfg_scale=1.0, shift=3.0)
    graphs |= {(v, "for few steps", 1): facts_of(v, "small", 1, **few) for v in VARIANTS}
    checked = {", ".join(map(str, k)): validate(execution, workflow(f).api()) for k, f in graphs.items()}
    refused = {k: validate(execution, api) for k, api in breakages(workflow(graphs["2511", "small", 1]).api()).items()}
    print(sum(ok for ok, _ in checked.values()), "of", len(checked), "workflows pass validate_prompt;", sum(not ok for ok, _ in refused.values()), "of", len(refused), "broken ones are refused")
    cfg_norm = mappings["CFGNorm"]
    nodes.NODE_CLASS_MAPPINGS.update(with_stand_ins(mappings))
    rows = []
    for size in SIZES:
        image_of(folder, size)
        for (variant, case, controls), f in graphs.items():
            if case in CASES and (controls == 1 or size == SIZES[1]):
                found = compared(f, size, run(execution, workflow(f).api()))
                off = {k: pair for k, pair in found.items() if pair[0] != pair[1]}
                rows.append(dict(variant=variant, case=case, controls=controls, size=size, result=found["result"][1], control=found["controls"][1][0],
                                 text_encoder=found["text encoder"][1][0], differs=off, said=differences(f)))
        print(size, sum(not r["differs"] for r in rows if r["size"] == size), "of", sum(r["size"] == size for r in rows), "equal", flush=True)
    equal = lambda what: sum(what not in r["differs"] for r in rows)
    expected = [r for r in rows if r["differs"].keys() <= {"text encoder"} and (not r["differs"] or any("text encoder" in s for s in r["said"]))]
    source = dict(version=re.search(r'"(.+)"', (checkout/"comfyui_version.py").read_text())[1], **{k: v for k, v in json.loads((ROOT/"tests/extras/comfyui_nodes.json").read_text())["source"].items() if k == "commit"})
    result = dict(
        made=datetime.now(timezone.utc).isoformat(timespec="seconds"), comfyui=source,
        machine=dict(device="cpu", cores=os.cpu_count(), machine=platform.machine()) | {n: version(n) for n in ("torch", "diffusers", "transformers")},
        validation=dict(passed=sum(ok for ok, _ in checked.values()), of=len(checked), failed={k: why for k, (ok, why) in checked.items() if not ok},
                        broken_and_refused={k: why for k, (ok, why) in refused.items() if not ok}, broken_and_passed=[k for k, (ok, _) in refused.items() if ok]),
        runs=len(rows), equal={what: equal(what) for what in ("result", "controls", "the negative's controls", "text encoder", "positive text", "negative text", "timestep of the controls")},
        equal_or_said=len(expected), text_encoder_squares=shares(), guidance_distance=guidance(cfg_norm),
        noise_levels=[noise_levels(n, s, o) for n, o in ((20, {}), (40, {}), (4, SCHEDULES["lightning"].scheduler)) for s in ((1024, 1024), (512, 512))],
        rows=[{k: v for k, v in r.items() if k != "said"} for r in rows])
    OUT.write_text(re.sub(r"\[\s+([\d\s,]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(result, indent=1)) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1))


if __name__ == "__main__": main()
