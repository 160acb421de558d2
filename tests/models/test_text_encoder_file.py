"""Text encoders in one file, as ComfyUI keeps Qwen2.5-VL, written here independently of the reader."""
import json
import math
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLConfig

from helpers import adapters_equal, settings, write_pairs
from qie_nb.config import make_config
from qie_nb.core.presets import PUBLISHED_MODELS
from qie_nb.devices.edit_model import EditModel
from qie_nb.extras.instructions import write_instructions
from qie_nb.extras.ray_cluster import describe_job
from qie_nb.models import hub
from qie_nb.models.components import Components, text_encoder_shapes
from qie_nb.models.single_file import SingleFile
from qie_nb.models.tensor_files import TEXT_ENCODER
from qie_nb.planning.disk_space import disk_plan
from qie_nb.planning.doctor import doctor
from qie_nb.tiny.random_models import save_tiny, tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.resume import checkpoint_misfit
from test_single_file import NoHub, home # noqa: F401 (a fixture for all tests here, too)

SETTING = "model.text_encoder_file"


# --- an independent writer
def weights_of(folder):
    return load_file(*(folder/"text_encoder").glob("*.safetensors"))


def bf16(weights):
    return {n: t.bfloat16() for n, t in weights.items()}


def scaled_fp8(weights):
    "Layers of both towers in float8 with a scale, as InvokeAI's tests list them of Comfy-Org's file."
    out = {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    for name, tensor in weights.items():
        layer = name.removesuffix(".weight")
        out[name] = tensor.bfloat16()
        inner = ".layers." in name or ".blocks." in name or ".merger.mlp." in name
        if inner and tensor.ndim == 2:
            scale = tensor.abs().max() / 448
            out[name] = (tensor / scale).to(torch.float8_e4m3fn)
            out[f"{layer}.scale_weight"] = scale.float()
            out[f"{layer}.scale_input"] = torch.ones(())
    return out


def write(path, form=bf16, weights=None, change=None):
    "The tiny text encoder as a file."
    tensors = form(weights or weights_of(tiny_folder("2511")))
    if change:
        change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path)
    return path


@pytest.fixture(scope="module")
def bits(tmp_path_factory):
    "A model folder whose text encoder is in bfloat16, and the same numbers in one file."
    root = tmp_path_factory.mktemp("bits")
    save_tiny("2511", root/"model")
    (file,) = (root/"model"/"text_encoder").glob("*.safetensors")
    weights = weights_of(tiny_folder("2511"))
    save_file(bf16(weights), file)
    return root/"model", write(root/"qwen_2.5_vl.safetensors")


def run(root, out, folder, file=None, **sections):
    model = dict(pretrained_model_name_or_path=str(folder), text_encoder_file=file and str(file))
    train = dict(output_dir=str(out), max_train_steps=2, eval_images=0, save_steps=2)
    own = dict(cache_dir=str(out/"cache"))
    return QwenImageEditTrainer(settings(root, out, model=model, train=train, cache=own,
                                         logging=dict(log_dir=str(out/"runs")), **sections))


# --- what is read
@pytest.mark.parametrize("form, most", [(bf16, 2 ** -8), (scaled_fp8, 0.04)])
@pytest.mark.parametrize("new_names", [False, True])
def test_the_weights_are_those_of_the_folder_within_the_rounding(tmp_path, form, most, new_names):
    weights = weights_of(tiny_folder("2511"))
    own = {n: t for n, t in EditModel(str(tiny_folder("2511"))).text_encoder.state_dict().items()}
    if new_names: # as transformers writes them today
        def renamed(name):
            if name.startswith("visual."):
                return f"model.{name}"
            return name.replace("model.", "model.language_model.", 1)
        weights = {renamed(n): t for n, t in weights.items()}
    file = write(tmp_path/"one.safetensors", form, weights)
    got = EditModel(str(tiny_folder("2511")), text_encoder_file=str(file)).text_encoder.state_dict()
    assert got.keys() == own.keys() and not any("lm_head" in n for n in got)
    for name, tensor in own.items():
        assert (got[name] - tensor).norm() <= most * tensor.norm(), name
    assert any((got[n] != own[n]).any() for n in own), "it was rounded"


@pytest.mark.slow
def test_a_run_and_its_embeddings_are_those_of_the_folder(bits, tmp_path, capsys):
    folder, file = bits
    root = write_pairs(tmp_path/"set", [(80, 48)] * 3, controls=2)
    whole, one = run(root, tmp_path/"a", folder), run(root, tmp_path/"b", folder, file)
    whole.fit(), one.fit()
    assert "text encoder: qwen_2.5_vl.safetensors: 0.0 GB, BF16\n" in capsys.readouterr().out
    assert adapters_equal(whole, one)
    first, second = (next(iter(t.make_loader()))["prompt_embed"] for t in (whole, one))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert (whole.components.text_encoder.state_dict().keys() == one.components.text_encoder.state_dict().keys())


def test_a_quantized_text_encoder_is_made_of_the_file(bits, tmp_path):
    folder, file = bits
    made = [EditModel(str(folder), quantize=dict(text_encoder="qint8"), text_encoder_file=f and str(f))
            for f in (None, file)]
    a, b = ({n: t for n, t in m.text_encoder.state_dict().items() if isinstance(t, torch.Tensor)} for m in made)
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# --- identity
def test_the_cache_knows_it_by_its_content(bits, tmp_path):
    folder, file = bits
    moved = tmp_path/"renamed.safetensors"
    moved.write_bytes(file.read_bytes())
    known = [Components(str(folder), text_encoder_file=str(f)).identity() for f in (file, moved)]
    assert known[0] == known[1]
    other = write(tmp_path/"other.safetensors", scaled_fp8)
    assert Components(str(folder), text_encoder_file=str(other)).identity()["text_encoder"] != known[0]["text_encoder"]
    root = write_pairs(tmp_path/"set", [(48, 32)] * 3)
    assert run(root, tmp_path, folder, file).cache_embeddings().encoded == 3
    assert run(root, tmp_path, folder, moved).cache_embeddings().encoded == 0


@pytest.mark.slow
def test_a_run_is_continued_with_the_same_file_alone(bits, tmp_path):
    folder, file = bits
    root = write_pairs(tmp_path/"set", [(48, 32)] * 3)
    run(root, tmp_path, folder, file).fit()
    again = run(root, tmp_path, folder, file)
    again.config.train.max_train_steps, again.config.train.resume_checkpoint = 4, "auto"
    assert again.fit().global_step == 4
    assert run(root, tmp_path, folder).components.identity() == again.components.identity(), "the same bytes"
    eight_bits = write(tmp_path/"eight_bits.safetensors", scaled_fp8)
    other = run(root, tmp_path, folder, eight_bits)
    other.config.train.max_train_steps, other.config.train.resume_checkpoint = 6, "auto"
    with pytest.raises(ValueError, match="belongs to a different run .*encoders"):
        other.fit()


def test_instructions_are_written_by_the_head_in_the_file(bits, tmp_path):
    folder, file = bits
    root = write_pairs(tmp_path/"set", [(48, 32)] * 2)
    texts = [repr(write_instructions(run(root, tmp_path, folder, f), dry_run=True, overwrite=True)) for f in (None, file)]
    assert texts[0] == texts[1] and "0000" in texts[0]
    bare = write(tmp_path/"bare.safetensors", change=lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="has no lm_head.weight"):
        write_instructions(run(root, tmp_path, folder, bare), dry_run=True, overwrite=True)


def test_workers_of_a_cluster_get_the_file(bits, tmp_path):
    folder, file = bits
    trainer = run(write_pairs(tmp_path/"set", [(48, 32)]), tmp_path, folder, file)
    dataset = trainer.make_loader().dataset
    model = describe_job(dataset, trainer.data.encoder(dataset.cache))["model"]
    assert model["text_encoder_file"] == str(file)
    assert EditModel(**model).identity() == trainer.components.identity()


# --- downloads
class NoTextEncoder(NoHub):
    "A hub that fails for the weights of the text encoder, but not for those of the transformer."
    def get(self, name, path, commit):
        assert not (path.startswith("text_encoder/") and path.endswith(".safetensors"))
        out = self.folder/path
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.served/path, out)
        return out


def test_the_text_encoder_of_a_hub_model_is_not_downloaded(bits, tmp_path, monkeypatch, capsys):
    folder, file = bits
    monkeypatch.setattr(hub, "HUB", NoTextEncoder(folder, tmp_path/"hub"))
    root = write_pairs(tmp_path/"set", [(48, 32)] * 3)
    trainer = run(root, tmp_path/"a", "owner/edit", file).fit()
    assert trainer.global_step == 2 and trainer.components.is_local("text_encoder")
    parts = ("vae", "transformer")
    weights = sum(p.stat().st_size for part in parts for p in (folder/part).glob("*.safetensors"))
    assert f"downloading owner/edit, {weights / 1e6:.1f} MB in all" in capsys.readouterr().out


# {name in block 0 or outside of the blocks: shape}, from InvokeAI's tests (a listing of
# qwen_2.5_vl_7b_fp8_scaled.safetensors, which has 1446 tensors)
LISTED = {
    "visual.blocks.0.attn.proj": (1280, 1280), "visual.blocks.0.attn.qkv": (3840, 1280),
    "visual.blocks.0.mlp.down_proj": (1280, 3420), "visual.blocks.0.mlp.gate_proj": (3420, 1280),
    "visual.blocks.0.mlp.up_proj": (3420, 1280), "visual.merger.mlp.0": (5120, 5120),
    "visual.merger.mlp.2": (3584, 5120), "model.layers.0.mlp.down_proj": (3584, 18944),
    "model.layers.0.mlp.gate_proj": (18944, 3584), "model.layers.0.mlp.up_proj": (18944, 3584),
    "model.layers.0.self_attn.k_proj": (512, 3584), "model.layers.0.self_attn.o_proj": (3584, 3584),
    "model.layers.0.self_attn.q_proj": (3584, 3584), "model.layers.0.self_attn.v_proj": (512, 3584)}
WITHOUT_BIAS = ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "o_proj") # of the language model
NORMS = {
    "visual.blocks.0.norm1": 1280, "visual.blocks.0.norm2": 1280, "visual.merger.ln_q": 1280,
    "model.layers.0.input_layernorm": 3584, "model.layers.0.post_attention_layernorm": 3584, "model.norm": 3584}
BLOCKS = dict(visual=32, model=28)


def full_header(path):
    "The listed tensors in all blocks; the numbers are a hole in the file."
    entries = {}
    def add(name, dtype, shape, width):
        begin = max((e["data_offsets"][1] for e in list(entries.values())[-1:]), default=0)
        end = begin + math.prod(shape) * width
        entries[name] = dict(dtype=dtype, shape=list(shape), data_offsets=[begin, end])
    def names(name):
        tower = name.partition(".")[0]
        if ".0." not in name or "merger" in name:
            return [name]
        return [name.replace(".0.", f".{n}.", 1) for n in range(BLOCKS[tower])]
    for listed, shape in LISTED.items():
        for layer in names(listed):
            add(f"{layer}.weight", "F8_E4M3", shape, 1)
            add(f"{layer}.scale_weight", "F32", (), 4)
            add(f"{layer}.scale_input", "F32", (), 4)
            if not (layer.startswith("model.") and layer.endswith(WITHOUT_BIAS)):
                add(f"{layer}.bias", "BF16", shape[:1], 2)
    for listed, width in NORMS.items():
        for norm in names(listed):
            add(f"{norm}.weight", "BF16", (width,), 2)
    add("visual.patch_embed.proj.weight", "BF16", (1280, 3, 2, 14, 14), 2)
    add("model.embed_tokens.weight", "BF16", (152064, 3584), 2)
    add("lm_head.weight", "BF16", (152064, 3584), 2)
    add("scaled_fp8", "F8_E4M3", (0,), 1)
    text = json.dumps(entries).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + list(entries.values())[-1]["data_offsets"][1])
    return path


@pytest.fixture
def published(tmp_path):
    "A folder with the index and the configuration of the published text encoder, as far as it gives shapes."
    folder = tmp_path/"published"
    shutil.copytree(tiny_folder("2511"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    text = dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                num_key_value_heads=4, vocab_size=152064)
    vision = dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584)
    Qwen2_5_VLConfig(text_config=text, vision_config=vision, **text).save_pretrained(folder/"text_encoder")
    return folder


def test_the_names_of_the_published_file_are_those_of_the_model(tmp_path, published):
    file = SingleFile(full_header(tmp_path/"qwen_2.5_vl_7b_fp8_scaled.safetensors"))
    assert len(file.tensors) == 1446 and len(file.scaled) == 28 * 7 + 32 * 5 + 2
    assert repr(file) == "qwen_2.5_vl_7b_fp8_scaled.safetensors: 9.4 GB, F8_E4M3, scaled" and file.kind == TEXT_ENCODER
    expected = text_encoder_shapes(file, published)
    assert expected == {n: file.tensors[n].shape for n in file.names if n != "lm_head.weight"}


def test_the_plan_downloads_no_text_encoder(tmp_path):
    file = full_header(tmp_path/"qwen_2.5_vl_7b_fp8_scaled.safetensors")
    model = dict(pretrained_model_name_or_path=PUBLISHED_MODELS["2511"], quantize="nf4")
    base, one = (make_config(dict(model=model | more)) for more in ({}, {"text_encoder_file": str(file)}))
    def downloads(c):
        return {i.what: i.bytes for i in disk_plan(c, pairs=30).items if i.group == "downloads"}
    less = {k: v for k, v in downloads(base).items() if k != "download text_encoder"}
    assert downloads(one) == less != downloads(base)
    deleted = make_config(one.model_dump() | dict(
        model=one.model.model_dump() | dict(delete_downloaded_shards=True, text_encoder_quantize="qint8")))
    assert not any("text_encoder" in what for what in downloads(deleted))


# --- refusals
def without(name): return lambda tensors: tensors.pop(name)


def more(name, tensor=None):
    return lambda tensors: tensors.update({name: torch.zeros(2) if tensor is None else tensor})


def made(change, form=bf16): return lambda path: write(path, form, change=change)


def only(*names): return lambda path: save_file({n: torch.zeros(2, 2) for n in names}, path)


def starts(data): return lambda path: path.write_bytes(data + bytes(200))


def cut(path): path.write_bytes(write(path).read_bytes()[:50_000])


SCALE = "model.layers.1.mlp.up_proj.scale_weight"
FILES = {
    "GGUF": (starts(b"GGUF"), "is a GGUF file, which we do not read; give ComfyUI's file of Qwen2.5-VL 7B"),
    "pickle": (starts(b"PK\x03\x04"), "is a pickle"),
    "Git LFS": (starts(b"version https://git-lfs.github.com/spec/v1"), "is a pointer of Git LFS"),
    "cut": (cut, "is cut off"),
    "transformer": (only("model.diffusion_model.transformer_blocks.0.attn.to_q.weight"),
                    "is a transformer, not a text encoder; give it as `model.transformer_file`"),
    "AIO": (only("vae.decoder.weight", "model.diffusion_model.img_in.weight"), r"\(AIO\); .* models/text_encoders"),
    "VAE": (only("encoder.conv1.weight"), "is a VAE, not a text encoder"),
    "LoRA": (only("model.layers.0.self_attn.q_proj.lora_A.weight"), "is a LoRA, not a text encoder"),
    "no vision tower": (made(lambda t: [t.pop(n) for n in list(t) if n.startswith("visual.")]),
                        "is another model's: it lacks visual.patch_embed.proj.weight"),
    "no biases, as of Qwen3": (made(without("model.layers.0.self_attn.q_proj.bias")), "it lacks model.layers.0.self_attn.q_proj.bias"),
    "a layer is missing": (made(without("model.layers.1.mlp.up_proj.weight")), "lacks .*layers.1.mlp.up_proj.weight and 0 more"),
    "a layer more": (made(more("model.layers.2.mlp.up_proj.weight")), "has model.layers.2.mlp.up_proj.weight and 0 more"),
    "another width": (made(more("model.norm.weight", torch.ones(8))), r"has model.norm.weight of shape \[8\]"),
    "no scale": (made(without(SCALE), scaled_fp8), "in F8_E4M3|lacks|has"),
    "unknown format": (made(more("model.layers.0.mlp.up_proj.comfy_quant", torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8))),
                       "stores model.layers.0.mlp.up_proj as nvfp4"),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_not_known_is_refused_in_one_sentence_before_any_work(tmp_path, monkeypatch, name):
    make, why = FILES[name]
    file = tmp_path/"odd.safetensors"
    make(file)
    for loader in ("load_component", "take_turns"):
        monkeypatch.setattr(f"qie_nb.devices.edit_model.{loader}", lambda *a, **kw: pytest.fail("something is loaded"))
    model = dict(pretrained_model_name_or_path=str(tiny_folder("2511")), text_encoder_file=str(file))
    c = dict(model=model, train=dict(device="cpu"))
    with pytest.raises(ValueError, match=why) as error:
        QwenImageEditTrainer(c)
    text = str(error.value)
    assert text.startswith(f"`{SETTING}` {str(file)!r} ") and text.count("; ") == 1 and "\n" not in text
    found = doctor(c, internet=False).of("error")
    assert [f.remedy for f in found if f.what == "model file"] == [text]


def test_a_missing_file_and_a_base_without_the_configuration(bits, tmp_path):
    folder, file = bits
    with pytest.raises(FileNotFoundError, match=rf"`{SETTING}` '.*none.safetensors' does not exist; fix the path"):
        EditModel(str(folder), text_encoder_file=str(tmp_path/"none.safetensors"))
    bare = shutil.copytree(folder, tmp_path/"bare")
    shutil.rmtree(bare/"text_encoder")
    with pytest.raises(FileNotFoundError, match=f"lacks text_encoder/config.json, which `{SETTING}` needs"):
        EditModel(str(bare), text_encoder_file=str(file))
    (bare/"text_encoder").mkdir()
    shutil.copy(folder/"text_encoder"/"config.json", bare/"text_encoder")
    assert Components(str(bare), text_encoder_file=str(file)).has_encoders()
