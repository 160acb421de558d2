"""LoRA files as people bring them: read right, or refused in one sentence that says what they are."""
import json
import math
import os
import re

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors import safe_open
from safetensors.torch import save_file

from qie_nb.lora import adapters as lora
from qie_nb.lora.formats import check_lora, find_lora, read_lora
from loras import B0, bare, file_of, pair, tensors_file, written

B1 = "transformer_blocks.1.attn.to_k"
PREFIXES = [
    "", "transformer.", "diffusion_model.", "base_model.model.", "model.diffusion_model.", "module.", "_orig_mod.",
    "pipe.dit.", "unet.", "transformer.base_model.model.", "base_model.model.transformer.", "module._orig_mod."]
ENDINGS = [
    ("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight"), ("lora.down.weight", "lora.up.weight"),
    ("lora_A.default.weight", "lora_B.default.weight"), ("lora_A.style-1.weight", "lora_B.style-1.weight"),
    ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"), ("lora_A", "lora_B")]


def two(layer=B0, prefix="transformer.", down="lora_A.weight", up="lora_B.weight", r=4):
    """A pair of weights with its own values, under the names that a tool gives it."""
    g = torch.Generator().manual_seed(1)
    return {f"{prefix}{layer}.{down}": torch.randn(r, 96, generator=g), f"{prefix}{layer}.{up}": torch.randn(96, r, generator=g)}


def scale_of(file):
    """alpha / r of the first block's to_q, as peft computes with it."""
    tr = bare()
    lora.load_lora(tr, file)
    return tr.transformer_blocks[0].attn.to_q.scaling["default"]


def refusal(file):
    """The one sentence of a refusal, which is the same from both doors."""
    sentences = set()
    for door in (check_lora, read_lora):
        with pytest.raises((ValueError, FileNotFoundError)) as e:
            door(file)
        sentences.add(str(e.value))
    assert len(sentences) == 1 and "\n" not in str(e.value)
    assert str(e.value).startswith("LoRA ") and "; " in str(e.value), "the file, the fault and the remedy"
    return str(e.value)


# --- names
@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_that_can_mean_one_thing_only(prefix, tmp_path):
    plain = read_lora(tensors_file(tmp_path, **two()))
    got = read_lora(tensors_file(tmp_path, **two(prefix=prefix)))
    assert got.state.keys() == plain.state.keys()
    assert all(torch.equal(t, plain.state[k]) for k, t in got.state.items())


@pytest.mark.parametrize("down, up", ENDINGS, ids=[e[0] for e in ENDINGS])
def test_endings(down, up, tmp_path):
    plain = read_lora(tensors_file(tmp_path, **two()))
    got = read_lora(tensors_file(tmp_path, **two(down=down, up=up)))
    assert got.state.keys() == plain.state.keys()
    assert all(torch.equal(t, plain.state[k]) for k, t in got.state.items())


@pytest.mark.parametrize("prefix", ["lora_unet_", "lycoris_", "lora_transformer_"])
def test_flattened_names(prefix, tmp_path):
    tensors = two(layer=B0.replace(".", "_"), prefix=prefix, down="lora_down.weight", up="lora_up.weight")
    assert read_lora(tensors_file(tmp_path, **tensors)).state.keys() == read_lora(tensors_file(tmp_path, **two())).state.keys()


@pytest.mark.parametrize("prefix, named", [
    ("foo.", "foo."), ("module.foo.", "module.foo."), ("net.transformer.", "net.transformer."), ("lora_foo_", "lora_foo_")])
def test_an_unknown_prefix_is_named_and_not_the_base_model(prefix, named, tmp_path):
    layer = B0.replace(".", "_") if prefix.endswith("_") else B0
    text = refusal(tensors_file(tmp_path, **two(layer=layer, prefix=prefix)))
    assert f"has the unknown prefix {named!r}" in text and "base model" not in text


# --- what a file is
KINDS = {
    "LoKr": ({f"diffusion_model.{B0}.lokr_w1": torch.ones(4, 4)}, "is a LoKr"),
    "LoHa": ({f"lora_unet_{B0.replace('.', '_')}.hada_w1_a": torch.ones(4, 4)}, "is a LoHa"),
    "OFT": ({f"transformer.{B0}.oft_R.weight": torch.ones(4, 4)}, "is an OFT"),
    "BOFT": ({f"transformer.{B0}.boft_R": torch.ones(4, 4)}, "is a BOFT"),
    "IA3": ({f"base_model.model.{B0}.ia3_l": torch.ones(96)}, "is an IA3"),
    "GLoRA": ({f"diffusion_model.{B0}.a1.weight": torch.ones(4, 4)}, "is a GLoRA"),
    "diff": ({f"diffusion_model.{B0}.diff": torch.ones(96, 96)}, "has differences of whole weights"),
    "diff_b beside a LoRA": (two() | {f"diffusion_model.{B0}.diff_b": torch.ones(96)}, "has differences of whole weights"),
    "DoRA of ComfyUI": (two() | {f"transformer.{B0}.dora_scale": torch.ones(96, 1)}, "ComfyUI's DoRA"),
    "biases": (two() | {f"transformer.{B0}.lora_B.bias": torch.ones(96)}, "has biases"),
    "whole layers": (two() | {"base_model.model.img_in.modules_to_save.weight": torch.ones(4, 4)}, "whole layers"),
    "checkpoint": ({f"{B0}.weight": torch.ones(4, 4)}, "it is a checkpoint"),
    "VAE": ({"decoder.conv_in.weight": torch.ones(4, 4)}, "it is a checkpoint"),
    "ControlNet": ({"controlnet_blocks.0.weight": torch.ones(4, 4)}, "is a ControlNet"),
    "text encoder": ({"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.ones(4, 4)}, "changes the text encoder"),
    "text encoder beside": (two() | {"text_encoder.model.layers.0.lora_A.weight": torch.ones(4, 4)}, "changes the text encoder"),
    "Wan": ({"lora_unet_blocks_0_self_attn_q.lora_down.weight": torch.ones(4, 4)}, "another model, Wan"),
    "Wan in ComfyUI": ({"diffusion_model.blocks.0.cross_attn.k.lora_A.weight": torch.ones(4, 4)}, "another model, Wan"),
    "Flux": ({"transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight": torch.ones(4, 4)}, "another model, Flux"),
    "Flux beside Qwen's names": (two() | {"transformer.transformer_blocks.0.ff.net.2.lora_A.weight": torch.ones(4, 4)}, "another model, Flux"),
    "HunyuanVideo": ({"diffusion_model.double_blocks.0.img_attn_qkv.lora_A.weight": torch.ones(4, 4)}, "Flux or HunyuanVideo"),
    "SDXL": ({"lora_unet_input_blocks_4_1_proj_in.lora_down.weight": torch.ones(4, 4)}, "another model, Stable Diffusion or SDXL"),
    "SD1.5": ({"unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight": torch.ones(4, 4)}, "Stable Diffusion or SDXL"),
    "Z-Image": ({"diffusion_model.layers.0.attention.to_q.lora_A.weight": torch.ones(4, 4)}, "another model, Z-Image"),
    "LTX": ({"transformer.transformer_blocks.0.attn1.to_q.lora_A.weight": torch.ones(4, 4)}, "another model, LTX"),
    "other layers": ({"transformer.encoder.q.lora_A.weight": torch.ones(4, 4), "transformer.encoder.q.lora_B.weight": torch.ones(4, 4)}, "no adapter for a Qwen-Image"),
    "half a pair": ({k: t for k, t in two().items() if "lora_B" in k}, "there is no lora_A for it"),
    "alpha alone": (two() | {f"transformer.{B1}.alpha": torch.tensor(4.)}, "there is no lora_A for it"),
    "twice": (two() | two(prefix="diffusion_model."), "has the same weights twice"),
    "two adapters": (two() | two(down="lora_A.b.weight", up="lora_B.b.weight"), "has the same weights twice"),
    "rank 0": ({k: t[:0] if "lora_A" in k else t[:, :0] for k, t in two().items()}, r"has no numbers in .* its shape is \[0, 96\]"),
    "two ranks": (two() | {k: t for k, t in two(r=3).items() if "lora_B" in k}, "different ranks in .* 4 and 3"),
    "three dimensions": (two() | {f"transformer.{B0}.lora_A.weight": torch.ones(4, 96, 1)}, "must be two dimensions"),
    "integers": ({k: t.to(torch.int8) for k, t in two().items()}, "in I8"),
    "booleans": ({k: t > 0 for k, t in two().items()}, "in BOOL"),
    "scaled float8": (two() | {f"transformer.{B0}.scale_weight": torch.ones(1)}, "has quantized weights"),
    "NaN": (two() | {f"transformer.{B1}.lora_A.weight": torch.full((4, 96), math.nan), f"transformer.{B1}.lora_B.weight": torch.ones(96, 4)}, f"has NaN in 'transformer.{B1}.lora_A"),
    "infinity": ({k: t / 0 if "lora_A" in k else t for k, t in two().items()}, "has infinity in"),
    "1e30": ({k: t * 1e30 for k, t in two().items()}, r"has .*e\+30 in"),
    "times 1e6": ({k: t * 1e6 for k, t in two().items()}, r"has .*e\+06 in"),
    "two alphas in one tensor": (two() | {f"transformer.{B0}.alpha": torch.tensor([32., 32.])}, r"of shape \[2\], which must be one number"),
    "alpha NaN": (two() | {f"transformer.{B0}.alpha": torch.tensor(math.nan)}, "has NaN in"),
    "alpha 1e30": (two() | {f"transformer.{B0}.alpha": torch.tensor(1e30)}, r"has 1e\+30 in"),
    "magnitudes for one of two layers": (two() | two(B1) | {f"transformer.{B0}.lora_magnitude_vector": torch.ones(96)}, "magnitudes of a DoRA for some layers only"),
}


@pytest.mark.parametrize("tensors, sentence", KINDS.values(), ids=KINDS)
def test_what_is_no_plain_lora_is_named(tensors, sentence, tmp_path):
    file = tensors_file(tmp_path, **{k: t.contiguous() for k, t in tensors.items()})
    text = refusal(file)
    assert re.search(sentence, text), text
    assert "keys must begin with" not in text and "base model" not in text


CONTENTS = {
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1234\n", "it is a Git LFS pointer; run `git lfs pull`"),
    "web page": (b"<!DOCTYPE html><html>Please log in</html>", "it is a web page; download"),
    "XML": (b"<?xml version='1.0'?><Error>AccessDenied</Error>", "it is a web page"),
    "JSON": (b'{"error": "not found"}', "it is JSON text"),
    "pickle": (b"\x80\x02}q\x00.", "it is a pickle, which could run code"),
    "torch.save": (b"PK\x03\x04\0\0\0\0archive/data.pkl", "it is a pickle of torch.save"),
    "ZIP": (b"PK\x03\x04\0\0\0\0lora.safetensors", "it is a ZIP archive; unpack it"),
    "GGUF": (b"GGUF\x03\0\0\0", "it is a GGUF file"),
    "PNG": (b"\x89PNG\r\n\x1a\n", "it is a PNG image"),
    "empty": (b"", "it is empty; download"),
    "zeros": (b"\0" * 5000, "it has only zeros; download"),
    "side file of macOS": (b"\0\x05\x16\x07\0\x02\0\0", "it is a side file of macOS"),
    "something": (b"hello", "it is no safetensors file"),
    "header alone": ((200).to_bytes(8, "little") + b'{"a": ', "it is cut off in its header"),
    "header that is no JSON": ((4).to_bytes(8, "little") + b"{a:}", "its header is not valid JSON"),
    "deep header": ((60_000).to_bytes(8, "little") + b'{"a":' * 12_000, "its header is not valid JSON (nested too deeply)"),
}


@pytest.mark.parametrize("content, sentence", CONTENTS.values(), ids=CONTENTS)
def test_what_is_no_safetensors_file_is_named(content, sentence, tmp_path):
    assert f"cannot be read: {sentence}" in refusal(written(tmp_path/"x.safetensors", content))


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.99])
def test_half_a_file_says_so(kept, tmp_path):
    data = tensors_file(tmp_path, **two()).read_bytes()
    assert "it is cut off, " in refusal(written(tmp_path/"x.safetensors", data[:int(len(data) * kept)]))


def test_a_name_that_stands_twice_in_the_header(tmp_path):
    file = tensors_file(tmp_path, **two())
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8:8 + length].decode().rstrip()
    name, _, rest = text[1:].partition(":{")
    text = text[:-1] + "," + name + ":{" + rest.partition("}")[0] + "}}"
    file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data[8 + length:])
    assert " twice (line 1)" in refusal(file)


@pytest.mark.parametrize("name, told", [("modelspec.architecture", "flux-1-dev/lora"), ("ss_base_model_version", "sdxl_base_v1-0"), ("ss_base_model_version", "wan2.1")])
def test_a_header_that_names_another_model(name, told, tmp_path):
    assert f"is for another model, {told!r}" in refusal(tensors_file(tmp_path, {name: told}, **two()))


@pytest.mark.parametrize("told", ["Qwen-Image/lora", "qwen_image_edit_2511", "something new"])
def test_a_header_that_names_this_model_or_an_unknown_one(told, tmp_path):
    assert check_lora(tensors_file(tmp_path, {"modelspec.architecture": told}, **two())).file.is_file()


def test_float8_without_a_scale_is_read_exactly(tmp_path):
    file = tensors_file(tmp_path, **{k: (t / 8).to(torch.float8_e4m3fn) for k, t in two().items()})
    tr = bare()
    lora.load_lora(tr, file, trainable=True)
    for key, tensor in lora.lora_state(tr).items():
        assert torch.equal(tensor, file_of(file)[0][key].float())


# --- alpha
JSON = "lora_adapter_metadata"
def header(**settings): return {JSON: json.dumps({f"transformer.{k}": v for k, v in settings.items()})}


ALPHAS = { # (header, adapter_config.json, .alpha tensor or None, scale)
    "nothing": ({}, None, None, 1),
    "tensor": ({}, None, 8., 2),
    "tensor of integers": ({}, None, 8, 2),
    "header, peft's settings": (header(r=4, lora_alpha=12), None, None, 3),
    "header without the rank": (header(lora_alpha=12), None, None, 3),
    "header with alpha_pattern": (header(r=4, lora_alpha=4, alpha_pattern={"to_q": 20}), None, None, 5),
    "rsLoRA": (header(r=4, lora_alpha=6, use_rslora=True), None, None, 3),
    "plain lora_alpha": (dict(lora_alpha="8"), None, None, 2),
    "plain network_alpha": (dict(network_alpha="8.0"), None, None, 2),
    "plain alpha": (dict(alpha="2"), None, None, 0.5),
    "kohya's": (dict(ss_network_alpha="8", ss_network_dim="4"), None, None, 2),
    "kohya's None": (dict(ss_network_alpha="None"), None, None, 1),
    "peft's file": ({}, dict(peft_type="LORA", r=4, lora_alpha=32), None, 8),
    "peft's file with rsLoRA": ({}, dict(r=4, lora_alpha=8, use_rslora=True, bias="none", modules_to_save=None), None, 4),
    "peft's file with patterns": ({}, dict(r=16, lora_alpha=16, rank_pattern={"to_q": 4}, alpha_pattern={B0: 6}), None, 1.5),
    "peft's file against the header": (header(r=4, lora_alpha=12), dict(r=4, lora_alpha=8), None, 3),
    "peft's file against plain": (dict(lora_alpha="12"), dict(r=4, lora_alpha=8), None, 2),
    "tensor above the header": (header(r=4, lora_alpha=2), None, 8., 2),
    "tensor against all": (header(r=4, lora_alpha=12) | dict(ss_network_alpha="16"), dict(r=4, lora_alpha=8), 4., 1),
}


@pytest.mark.parametrize("meta, side, tensor, scale", ALPHAS.values(), ids=ALPHAS)
def test_alpha_from_every_place(meta, side, tensor, scale, tmp_path, capsys):
    tensors = two(prefix="base_model.model.")
    if tensor is not None:
        tensors[f"base_model.model.{B0}.alpha"] = torch.tensor(tensor)
    file = tmp_path/"adapter_model.safetensors"
    save_file(tensors, file, metadata=meta)
    if side is not None:
        (tmp_path/"adapter_config.json").write_text(json.dumps(side))
    assert scale_of(tmp_path) == pytest.approx(scale)
    places = len(meta.keys() & {JSON, "lora_alpha"}) + (side is not None) + (tensor is not None)
    assert ("has two alphas" in capsys.readouterr().out) == (places > 1), "a disagreement is one note"


def test_alphas_of_single_layers_stay(tmp_path, capsys):
    "A header has the alpha of one of them, which is no second opinion."
    tensors = two() | two(B1) | {f"transformer.{B0}.alpha": torch.tensor(8.), f"transformer.{B1}.alpha": torch.tensor(2.)}
    tr = bare()
    lora.load_lora(tr, tensors_file(tmp_path, dict(ss_network_alpha="8"), **tensors))
    assert tr.transformer_blocks[0].attn.to_q.scaling["default"] == 2
    assert tr.transformer_blocks[1].attn.to_k.scaling["default"] == 0.5
    assert "two alphas" not in capsys.readouterr().out


SIDES = {
    "LoKr": (dict(peft_type="LOKR"), "is a LOKR by adapter_config.json beside it"),
    "DoRA without magnitudes": (dict(r=4, lora_alpha=4, use_dora=True), "is a DoRA by adapter_config.json beside it, but has no magnitudes"),
    "whole layers": (dict(r=4, lora_alpha=4, modules_to_save=["img_in"]), "has `modules_to_save`"),
    "biases": (dict(r=4, lora_alpha=4, bias="lora_only"), "has trained biases"),
    "all biases": (dict(r=4, lora_alpha=4, bias="all"), "has trained biases"),
    "PiSSA": (dict(r=4, lora_alpha=4, init_lora_weights="pissa_niter_4"), "was trained on changed base weights"),
    "NaN": (dict(r=4, lora_alpha=math.nan), "has an impossible `lora_alpha` in adapter_config.json beside it"),
    "1e30": (dict(r=4, lora_alpha=1e30), "has an impossible `lora_alpha`"),
    "rank 0": (dict(r=0, lora_alpha=4), "has an impossible `r`"),
    "no object": ([1], "adapter_config.json beside it is no JSON object"),
}


@pytest.mark.parametrize("side, sentence", SIDES.values(), ids=SIDES)
def test_peft_settings_that_cannot_be_applied(side, sentence, tmp_path):
    file = tensors_file(tmp_path, **two())
    (tmp_path/"adapter_config.json").write_text(json.dumps(side))
    with pytest.raises(ValueError, match=sentence) as e:
        read_lora(file)
    assert "\n" not in str(e.value)


def test_peft_settings_with_a_name_twice(tmp_path):
    file = tensors_file(tmp_path, **two())
    (tmp_path/"adapter_config.json").write_text('{"r": 4, "lora_alpha": 32, "lora_alpha": 16}')
    with pytest.raises(ValueError, match="adapter_config.json beside it has 'lora_alpha' twice"): read_lora(file)


def test_two_plain_alphas(tmp_path):
    assert "has two alphas in its header" in refusal(tensors_file(tmp_path, dict(lora_alpha="8", network_alpha="4"), **two()))


def test_settings_of_another_file_are_not_used(tmp_path):
    save_file(two(), tmp_path/"adapter_model.safetensors")
    save_file(two(), tmp_path/"other.safetensors")
    (tmp_path/"adapter_config.json").write_text(json.dumps(dict(r=4, lora_alpha=32)))
    assert scale_of(tmp_path/"adapter_model.safetensors") == 8
    assert scale_of(tmp_path/"other.safetensors") == 1


# --- places
def test_hidden_and_unfinished_files_are_no_candidates(tmp_path):
    file = tensors_file(tmp_path, **two())
    for name in ("._x.safetensors", ".x.safetensors", "x.safetensors.part", "x.safetensors.tmp", ".DS_Store"):
        written(tmp_path/name)
    assert find_lora(tmp_path) == file
    save_file(two(), tmp_path/"y.safetensors")
    with pytest.raises(ValueError, match="has 2 .safetensors files, .*x.safetensors, y.safetensors.; name one, e.g. .*/x.safetensors"):
        find_lora(tmp_path)


def test_paths_as_people_paste_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tensors_file(tmp_path, **two())
    for text in ("~/x.safetensors", f"'{file}'", f' "{file}" ', f"file://{file}"):
        assert find_lora(text) == file
    with pytest.raises(ValueError, match="is empty"): find_lora("")
    with pytest.raises(ValueError, match="is a web address; download it"): find_lora("https://example.org/x.safetensors")
    with pytest.raises(ValueError, match="is a web address; give me/lora:a/x.safetensors"):
        find_lora("https://huggingface.co/me/lora/resolve/main/a/x.safetensors?download=true")


def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path/"x.safetensors")
    with pytest.raises(ValueError, match="is no regular file"): find_lora(tmp_path/"x.safetensors")


def test_adapters_are_written_where_a_tilde_points(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    file = lora.write_lora("~/run/lora", {f"{B0}.lora_A.weight": torch.ones(4, 96), f"{B0}.lora_B.weight": torch.ones(96, 4)},
                           dict(r=4, lora_alpha=4), {})
    assert file == tmp_path/"run/lora/pytorch_lora_weights.safetensors" and find_lora("~/run/lora") == file
    assert not (tmp_path/"~").exists()
    with pytest.raises(ValueError, match="is an address; give a path on this machine"): lora.write_lora("s3://b/x", {}, {}, {})


def test_an_offline_switch_and_a_pasted_token_are_named(monkeypatch):
    def offline(*args, **kw): raise OfflineModeIsEnabled("no")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE is set, .* unset it"): find_lora("me/lora")
    def unicode(*args, **kw): raise UnicodeEncodeError("ascii", "“hf_abc”", 0, 1, "no")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unicode)
    for token in ("“hf_abc”", "hf_ abc", "'hf_abc'", "hf_\u200babc"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(FileNotFoundError, match="the token in HF_TOKEN .* contains .*, which no token has; copy it again") as e:
            find_lora("me/lora")
        assert "abc" not in str(e.value), "a secret"
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    with pytest.raises(FileNotFoundError, match="cannot be reached"): find_lora("me/lora")


def test_settings_of_peft_come_from_the_hub_too(tmp_path, monkeypatch):
    class Sibling:
        def __init__(self, name): self.rfilename = name
    class Info: siblings = [Sibling("adapter_model.safetensors"), Sibling("adapter_config.json"), Sibling("README.md")]
    save_file(two(), tmp_path/"adapter_model.safetensors")
    fetched = []
    def download(repo, name, **kw):
        if name == "adapter_config.json": (tmp_path/name).write_text(json.dumps(dict(r=4, lora_alpha=8)))
        fetched.append(name)
        return str(tmp_path/name)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **kw: Info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert scale_of("me/lora") == 2 and fetched[:2] == ["adapter_config.json", "adapter_model.safetensors"]
