"""How exact are prompt embeddings of a quantized text encoder, and what does a run lose that trains on them?

`python benchmarks/text_encoder_precision.py` measures two things on the CPU, in about 25 minutes on two idle cores, and
writes results/text_encoder_precision.json after each figure. `layers`: two language and two vision layers of
Qwen2.5-VL-7B's width with random weights, against the same weights in float32. `held_out`: the learnt tiny model,
trained on a cache of each kind, judged on held-out crops.
"""
import argparse, copy, gc, json, os, platform, tempfile
from collections.abc import Iterable
from contextlib import redirect_stdout
from datetime import datetime, timezone
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from statistics import mean, median

import torch
from torch import nn

OUT = Path(__file__).parent/"results"/"text_encoder_precision.json"
SEEDS = (0, 1, 2) # of the weights
DEPTH = 2 # language layers, and vision layers; the published model has 28 and 32
PROMPT = "make the sky green and remove the second boat from the left, but keep its shadow on the water"
VISION_TOO = "nf4, vision tower too" # our nf4 leaves the vision tower as it is
KINDS = ("none", "int8", "qint8", "qfloat8", "nf4", VISION_TOO)
NORMAL, OUTLIERS = "normal", "with outliers"
RUNS = (0, 1, 2, 3, 4) # seeds of a run on the tiny model
RUN_KINDS = ("none", "qint8", "qfloat8", "nf4") # the weights of int8 are those of qint8
STEPS = 40


# --- layers of full width
def full_width(seed:int, outliers:bool, tokenizer) -> nn.Module:
    "A text encoder in bfloat16 with few layers and random weights."
    from precompute import TEXT, VISION
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    names = dict(image="image_pad", video="video_pad", vision_start="vision_start", vision_end="vision_end")
    ids = {f"{k}_token_id": tokenizer.convert_tokens_to_ids(f"<|{v}|>") for k, v in names.items()}
    text = TEXT | dict(num_hidden_layers=DEPTH, vocab_size=len(tokenizer))
    vision = VISION | dict(depth=DEPTH, fullatt_block_indexes=[DEPTH - 1])
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.02)
        if outliers:
            with_outliers(model)
    return model.eval().requires_grad_(False)


def with_outliers(model:nn.Module):
    """Large weights and large features, as trained language models have them.

    One weight of a thousand is 16 times as large; four features of the input of each attention and MLP are."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and "lm_head" not in name:
            rows, columns = module.weight.shape
            n = rows * columns // 1000
            module.weight[torch.randint(rows, (n,)), torch.randint(columns, (n,))] *= 16
        if name.endswith(("input_layernorm", "post_attention_layernorm", "norm1", "norm2")):
            module.weight[torch.randperm(len(module.weight))[:4]] *= 16


def of_kind(model:nn.Module, kind:str, dtype:torch.dtype) -> nn.Module:
    "A copy of a model, quantized."
    from qie_nb.models.quantizations.known import quantize, quantize_linear
    made = copy.deepcopy(model)
    if dtype == torch.float32:
        made = made.float()
    quantize(made, "nf4" if kind == VISION_TOO else kind)
    if kind == VISION_TOO:
        tower = made.model.visual
        layers = [name for name, m in tower.named_modules() if type(m) is nn.Linear]
        for name in layers:
            tower.set_submodule(name, quantize_linear(tower.get_submodule(name), "nf4"))
    return made


def relative_errors(made:torch.Tensor, exact:torch.Tensor) -> torch.Tensor: # of each token
    "Distance from the exact embedding, relative to its length."
    made = made.float()
    return (made - exact).norm(dim=-1) / exact.norm(dim=-1)


def of_tokens(errors:torch.Tensor) -> dict: # percent
    "Median, 90th percentile and maximum."
    percent = errors * 100
    return dict(median=percent.median().item(), p90=percent.quantile(0.9).item(), max=percent.max().item())


def layers(raw:dict, weights:Iterable, kinds:Iterable, seeds:Iterable): # raw: {weights: {kind: {seed: errors}}}
    "Errors of a prompt embedding with an image of 384 x 384, for each kind in bfloat16; yields after each."
    import numpy as np
    from PIL import Image
    from qie_nb.models.components import VARIANTS, load_component
    from qie_nb.models.encoders import encode_prompt
    from qie_nb.tiny.random_models import tiny_folder
    processor = load_component(tiny_folder("2511"), "processor")
    for seed in seeds:
        for form in weights:
            model = full_width(seed, form == OUTLIERS, processor.tokenizer)
            pixels = np.random.default_rng(seed).integers(0, 256, (24, 24, 3), dtype=np.uint8)
            images = [Image.fromarray(pixels).resize((384, 384))]

            def embedding(kind, dtype):
                "Of the prompt with the image, by a text encoder of this kind."
                text_encoder = of_kind(model, kind, dtype)
                return encode_prompt(text_encoder, processor, VARIANTS["2511"], PROMPT, images)[0][0]
            exact = embedding("none", torch.float32)
            for kind in kinds:
                row = of_tokens(relative_errors(embedding(kind, torch.bfloat16), exact))
                raw.setdefault(form, {}).setdefault(kind, {})[str(seed)] = row
                print(f"{form}, seed {seed}, {kind}: {row}", flush=True)
                gc.collect()
                yield


# --- the learnt tiny model
def run_config(out:Path, kind:str, seed:int, steps:int) -> dict:
    "The demo's run on a cache of one kind."
    from qie_nb.tiny.photos import demo_config
    config = demo_config(out, steps)
    config.setdefault("model", {})["text_encoder_quantize"] = kind
    config["train"] |= dict(output_dir=str(out/f"{kind}_{seed}"), seed=seed, eval_steps=None, eval_interval=0,
                            val_path=None, val_fraction=0)
    config["cache"]["cache_dir"] = str(out/f"cache_{kind}")
    config["logging"] = dict(report_to="none", log_dir=str(out/"runs"))
    return config


def held_out(raw:dict, kinds:Iterable, seeds:Iterable): # raw: {kind: {seed: {own, plain: grey levels}}}
    "Error of a run's edits, made with the text encoder of its cache and with the plain one; yields after each."
    from qie_nb.data.dataset import ImageDataset, find_samples
    from qie_nb.tiny.photos import answers, errors, make_pairs, truths
    from qie_nb.trainer import QwenImageEditTrainer
    out = Path(tempfile.mkdtemp())
    make_pairs(out/"data", "duotone", 48, seed=0, split="train")
    make_pairs(out/"held", "duotone", 8, seed=1, split="held_out")
    judge = QwenImageEditTrainer(run_config(out, "none", 0, STEPS)).setup_predict()
    held = ImageDataset(judge.config, samples=find_samples(out/"held"))
    held.set_areas(judge.components.areas)
    true = truths(judge, held)
    for seed in seeds:
        for kind in kinds:
            with redirect_stdout(StringIO()):
                trained = QwenImageEditTrainer(run_config(out, kind, seed, STEPS)).fit()
                lora = trained.save_lora(out/"lora"/f"{kind}_{seed}")
                own = mean(errors(answers(trained, held, (0,)), true))
                plain = mean(errors(answers(judge.load_lora(lora), held, (0,)), true))
            raw.setdefault(kind, {})[str(seed)] = dict(own=own, plain=plain)
            print(f"seed {seed}, {kind}: {own:.2f} with its text encoder, {plain:.2f} with the plain one", flush=True)
            yield


# --- results
def about() -> dict:
    "The machine and the libraries."
    libraries = ("torch", "diffusers", "transformers", "bitsandbytes", "optimum-quanto", "torchao")
    return dict(device=f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
                threads=torch.get_num_threads(), load_average=os.getloadavg()[0],
                date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                versions={name: version(name) for name in libraries})


def spread(values:list) -> dict:
    "Median and range."
    middle = round(median(values), 2)
    return dict(median=middle, min=round(min(values), 2), max=round(max(values), 2), runs=len(values))


def summed_up(of_seeds:dict) -> dict: # {what: spread}
    "The errors of all seeds."
    rows = list(of_seeds.values())
    return {what: spread([row[what] for row in rows]) for what in rows[0]}


def rows_of(part:str, raw:dict) -> dict: # {weights: {kind: ...}} of layers, {kind: ...} of runs
    "The figures of a part for the table."
    if part == "held_out":
        return {kind: summed_up(of_seeds) for kind, of_seeds in raw.items()}
    return {form: rows_of("held_out", kinds) for form, kinds in raw.items()}


def measure(part:str, a):
    "Measure one part, and write the results after each figure; earlier ones of other seeds and kinds stay."
    known = json.loads(a.out.read_text()).get(part, {}) if a.out.is_file() else {}
    raw = known.get("raw", {})
    if part == "layers":
        size = dict(layers=DEPTH)
        steps = layers(raw, a.weights, a.kinds or KINDS, a.seeds or SEEDS)
    else:
        size = dict(steps=STEPS)
        steps = held_out(raw, a.kinds or RUN_KINDS, a.seeds or RUNS)
    for _ in steps:
        result = json.loads(a.out.read_text()) if a.out.is_file() else {}
        result[part] = dict(about=about() | size, rows=rows_of(part, raw), raw=raw)
        a.out.write_text(json.dumps(result, indent=1) + "\n")


def main():
    "Measure the named parts."
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("parts", nargs="*", default=["layers", "held_out"])
    p.add_argument("--kinds", nargs="+", help="only these")
    p.add_argument("--seeds", nargs="+", type=int, help="only these")
    p.add_argument("--weights", nargs="+", default=[NORMAL, OUTLIERS])
    p.add_argument("--out", type=Path, default=OUT)
    a = p.parse_args()
    for part in a.parts:
        measure(part, a)


if __name__ == "__main__":
    main()
