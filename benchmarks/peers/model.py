"""The small model and the photographs that every trainer of this comparison gets.

The classes are the real ones, the weights random: a transformer of 58 M parameters (6 blocks, 4 heads of 128, as in the real one, text dimension 64),
the VAE with 16 instead of 96 channels, and a Qwen2.5-VL of two layers. Variants differ in `zero_cond_t` alone, as 2509 and 2511 do.
"""
import json, sys
from pathlib import Path

SIZE = 256, 192 # pixels of targets and controls, (width, height)
AREA = SIZE[0] * SIZE[1]
PHOTO = 384, 288 # of the photographs: every trainer has to resize them
BLOCKS, HEADS, HEAD, TEXT = 6, 4, 128, 64
PAIRS, CAPTION = 8, "print it in dark blue and orange"


def make_model(folder, variant="2511"):
    "Write a model folder in the layout of diffusers."
    import torch
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from qie_nb.tiny.random_models import tiny_pipeline
    pipe = tiny_pipeline(variant, seed=0, words=(CAPTION,))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe.register_modules(
            transformer=QwenImageTransformer2DModel(num_layers=BLOCKS, attention_head_dim=HEAD, num_attention_heads=HEADS, joint_attention_dim=TEXT, zero_cond_t=variant == "2511"),
            vae=AutoencoderKLQwenImage(base_dim=16).eval())
    pipe.save_pretrained(folder)
    older_layout(Path(folder))
    return sum(p.numel() for p in pipe.transformer.parameters())


def older_layout(folder):
    "Add the files that the published checkpoint has and transformers 5 no longer writes, so that trainers which pin transformers 4 can read the folder."
    tok = json.loads((folder/"tokenizer"/"tokenizer.json").read_text())
    added = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in tok["added_tokens"]}
    for sub in ("tokenizer", "processor"):
        (folder/sub/"vocab.json").write_text(json.dumps(tok["model"]["vocab"]))
        (folder/sub/"merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in tok["model"]["merges"]))
        path = folder/sub/"tokenizer_config.json"
        own = json.loads(path.read_text())
        special = own.pop("extra_special_tokens")
        path.write_text(json.dumps(own | dict(added_tokens_decoder=added, additional_special_tokens=special)))
    one = folder/"processor"/"processor_config.json"
    processor = json.loads(one.read_text())
    one.unlink()
    image = processor["image_processor"]
    image |= dict(processor_class="Qwen2VLProcessor", min_pixels=image["size"]["shortest_edge"], max_pixels=image["size"]["longest_edge"])
    (folder/"processor"/"preprocessor_config.json").write_text(json.dumps(image))
    (folder/"processor"/"video_preprocessor_config.json").write_text(json.dumps(processor["video_processor"]))
    path = folder/"text_encoder"/"config.json"
    own = json.loads(path.read_text())
    rope = own["text_config"]["rope_parameters"]
    own["text_config"] |= dict(rope_theta=rope["rope_theta"], rope_scaling=dict(type="mrope", rope_type="default", mrope_section=rope["mrope_section"]))
    path.write_text(json.dumps(own))


def make_photos(folder, n=PAIRS):
    "Write `n` pairs of photographs with their captions."
    from qie_nb.tiny.photos import make_pairs
    made = make_pairs(folder, "duotone", n, size=PHOTO)
    if n == PAIRS: # the smaller set keeps one caption for all
        for i, p in enumerate(sorted((made/"training_images").glob("*.txt"))): p.write_text(f"{CAPTION}, photograph {i}")
    return made


def make(root):
    "Write models and photographs; return the number of the transformer's parameters."
    root = Path(root)
    for n in (2, PAIRS): make_photos(root/f"pairs-{n}", n)
    return [make_model(root/v, v) for v in ("2509", "2511")][0]


if __name__ == "__main__": print(make(sys.argv[1]))
