"""The header of a LoRA file says what it is, in words of the published specification and of kohya's scripts."""
import base64
import datetime
import getpass
import hashlib
import io
import json
import re
import socket
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save, save_file

from helpers import noise_image, write_pairs
from loras import file_of, same, tensors_file, trained
from qie_nb.lora.adapters import convert_lora, save_lora
from qie_nb.lora.file_header import (
    LONGEST_CAPTION, MOST_CAPTIONS, counted_captions, thumbnail_of, trained_on)
from qie_nb.lora.formats import read_lora
from qie_nb.models.single_file import expected_shapes
from qie_nb.models.variants.base import VARIANTS
from qie_nb.trainer import QwenImageEditTrainer

# Stability-AI/ModelSpec, README.md, version 1.0.0: {key: pattern}
MUST = dict(sai_model_spec=r"1\.0\.0", architecture=r".+", implementation=r".+", title=r".+")
SHOULD = dict(description=r".+", author=r".+", date=r"\d{4}-\d\d-\d\d(T.*)?",
              hash_sha256=r"0x[0-9a-f]{64}", resolution=r"\d+x\d+")
CAN = dict(implementation_version=r".+", license=r".+", usage_hint=r".+", category=r".+",
           thumbnail=r"data:image/jpeg;base64,[A-Za-z0-9+/=]+", merged_from=r".+",
           trigger_phrase=r".+", prediction_type=r".+", timestep_range=r"\d+,\d+")
PROMPT = "invert the colours" # of `write_pairs`
KEY = "modelspec."


def against_the_specification(header):
    "What is wrong with the header's `modelspec` keys."
    known = MUST | SHOULD | CAN
    given = {k.removeprefix(KEY): v for k, v in header.items() if k.startswith(KEY)}
    wrong = [f"{key} is missing" for key in MUST if key not in given]
    for key, text in given.items():
        if key not in known:
            wrong.append(f"{key} is not in the specification")
        elif not re.fullmatch(known[key], text, re.S):
            wrong.append(f"{key} is {text!r}")
    return wrong


def hash_of(file):
    "The hash as a reader of the file computes it: all bytes after the header."
    data = file.read_bytes()
    return hashlib.sha256(data[8 + int.from_bytes(data[:8], "little"):]).hexdigest()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A trainer after two steps, in folders with private names."
    root = tmp_path_factory.mktemp("julia_private")
    pairs = write_pairs(root/"holiday_of_julia", ((32, 32),) * 3)
    t = QwenImageEditTrainer(dict(
        preset="tiny", data=dict(dataset_path=str(pairs), image_size=[48, 32]),
        train=dict(output_dir=str(root/"out"), max_train_steps=2, val_fraction=0.),
        cache=dict(cache_dir=str(root/"cache")), logging=dict(log_dir=str(root/"runs"), panel=False)))
    t.cache_embeddings()
    return t.fit(), root


@pytest.mark.parametrize("format", ["diffusers", "comfyui"])
def test_a_saved_file_obeys_the_specification(run, format, tmp_path):
    t, _ = run
    file = t.save_lora(tmp_path/"x.safetensors", format=format)
    _, header = file_of(file)
    assert against_the_specification(header) == []
    assert header[KEY + "architecture"] == f"{t.components.variant.published_name}/lora"
    assert header[KEY + "trigger_phrase"] == PROMPT
    assert header[KEY + "resolution"] == "x".join(map(str, t.geometry().image_size))
    assert header[KEY + "date"] == datetime.date.today().isoformat()
    lora = t.config.model.lora
    assert header["ss_network_dim"] == str(lora.r) and header["ss_network_alpha"] == f"{lora.lora_alpha or lora.r:g}"
    assert json.loads(header["ss_tag_frequency"]) == {"pairs": {PROMPT: 3}}
    assert header["ss_steps"] == "2" and header["ss_num_train_images"] == "3"
    assert header["ss_base_model_version"].startswith("qwen_image_edit")


def test_hashes_are_those_of_the_file(run, tmp_path):
    t, _ = run
    file = t.save_lora(tmp_path/"x.safetensors")
    tensors, header = file_of(file)
    assert header["sshs_model_hash"] == hash_of(file)
    assert header[KEY + "hash_sha256"] == "0x" + hash_of(file)
    edited = tmp_path/"edited.safetensors" # a manager that writes another title keeps the hash
    save_file(tensors, edited, metadata=header | {KEY + "title": "My sketch"})
    assert hash_of(edited) == header["sshs_model_hash"]


def test_the_legacy_hash_is_of_64_kb_from_the_first_megabyte(tmp_path):
    layer = "transformer.transformer_blocks.0.attn.to_q"
    tensors = {f"{layer}.lora_A.weight": torch.rand(64, 4096),
               f"{layer}.lora_B.weight": torch.rand(4096, 64)}
    other = tensors_file(tmp_path, None, **tensors)
    _, header = file_of(convert_lora(other, tmp_path/"y.safetensors"))
    tensors, _ = file_of(tmp_path/"y.safetensors")
    alone = {k: v for k, v in header.items() if k.startswith("ss_")} # as kohya's scripts do
    plain = save(tensors, metadata=alone)
    assert len(plain) > 0x110000
    assert header["sshs_legacy_hash"] == hashlib.sha256(plain[0x100000:0x110000]).hexdigest()[:8]


def test_a_checkpoint_has_the_same_header(run):
    t, root = run
    _, header = file_of(next((root/"out").rglob("pytorch_lora_weights.safetensors")))
    assert against_the_specification(header) == [] and header[KEY + "trigger_phrase"] == PROMPT


def test_title_and_thumbnail_are_the_users(run, tmp_path):
    t, _ = run
    photo = noise_image((90, 60), 40)
    file = t.save_lora(tmp_path/"x.safetensors", title="Dusk </b>", thumbnail=photo)
    _, header = file_of(file)
    assert header[KEY + "title"] == "Dusk </b>" and against_the_specification(header) == []
    data = base64.b64decode(header[KEY + "thumbnail"].partition(",")[2])
    assert Image.open(io.BytesIO(data)).size == (256, 256) and len(data) < 100_000


def test_a_thumbnail_shows_the_centre():
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste("blue", (100, 0, 200, 100))
    data = base64.b64decode(thumbnail_of(wide).partition(",")[2])
    red, _, blue = Image.open(io.BytesIO(data)).getpixel((30, 128))
    assert blue > 200 and red < 50


def test_comfyui_shows_the_longest_header(run, tmp_path):
    "Its window asks for headers of at most a mebibyte (ComfyUI, server.py: view_metadata)."
    t, _ = run
    _, header = file_of(t.save_lora(tmp_path/"x.safetensors", thumbnail=noise_image((512, 512), 90)))
    captions = counted_captions([f"{n} " + "日" * LONGEST_CAPTION for n in range(MOST_CAPTIONS)])
    header |= dict(ss_tag_frequency=json.dumps(dict(pairs=captions)), qie_nb=header["qie_nb"] + json.dumps(captions))
    layers = [name for name, shape in expected_shapes(VARIANTS["2511"].published_config()).items()
              if name.endswith(".weight") and len(shape) == 2 and name.startswith("transformer_blocks.")]
    tensors = {"__metadata__": header}
    for layer in layers:
        for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
            tensors[f"transformer.{layer}.{part}.weight"] = dict(
                dtype="BF16", shape=[12288, 3072], data_offsets=[10**9, 10**9 + 10**6])
    assert len(layers) == 60 * 14 and len(json.dumps(tensors)) < 1024 * 1024


def test_nothing_personal_is_in_a_file(run, tmp_path):
    t, root = run
    _, header = file_of(t.save_lora(tmp_path/"x.safetensors"))
    texts = " ".join(header.values())
    for private in (*root.parts[1:], "julia", "holiday", socket.gethostname(), str(tmp_path)):
        assert private not in texts, private
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", texts)


def test_a_model_folder_of_ones_own_is_not_named(run):
    t, root = run
    name, t.components.name = t.components.name, str(root)
    try:
        assert t.adapters.metadata()["base"] == t.components.variant.published_name
    finally:
        t.components.name = name


def test_a_converted_file_keeps_what_it_is_and_gets_its_own_hash(run, tmp_path):
    t, _ = run
    first = t.save_lora(tmp_path/"x.safetensors", title="Dusk")
    other = convert_lora(first, tmp_path/"y.safetensors")
    (_, was), (_, now) = file_of(first), file_of(other)
    kept = [k for k in was if k.startswith(("modelspec.", "ss_")) and "hash" not in k]
    assert kept and {k: was[k] for k in kept} == {k: now[k] for k in kept}
    assert now["sshs_model_hash"] == hash_of(other) != was["sshs_model_hash"]


def test_nothing_is_made_up_for_a_file_of_another_program(tmp_path):
    layer = "transformer.transformer_blocks.0.attn.to_q"
    tensors = {k: v for k, v in load_file(save_lora(trained(), tmp_path/"a.safetensors")).items() if layer in k}
    other = convert_lora(tensors_file(tmp_path, None, **tensors), tmp_path/"y.safetensors")
    _, header = file_of(other)
    assert not [k for k in header if k.startswith("modelspec.") and "hash" not in k]
    assert header["ss_network_dim"] == "4" and "ss_base_model_version" not in header


@pytest.mark.parametrize("settings, dim, alpha", [
    (dict(), "4", "6"),
    (dict(use_rslora=True), "4", "12"), # 6 * sqrt(4), for readers that divide by the rank
])
def test_rank_and_alpha_as_kohya_writes_them_are_read_back(settings, dim, alpha, tmp_path):
    file = save_lora(trained(**settings), tmp_path/"x.safetensors")
    tensors, header = file_of(file)
    assert (header["ss_network_dim"], header["ss_network_alpha"]) == (dim, alpha)
    read = read_lora(file)
    assert read.config["r"] == 4 and read.config["lora_alpha"] == 6
    alone = {k: v for k, v in header.items() if k.startswith("ss_")} # kohya's keys only
    save_file(tensors, tmp_path/"kohya.safetensors", metadata=alone)
    assert read_lora(tmp_path/"kohya.safetensors").config["lora_alpha"] == float(alpha)
    same(list(read.state.values())[0], list(tensors.values())[0])


def test_layers_that_differ_are_dynamic_and_such_a_header_is_read(tmp_path):
    uneven = dict(tensors_of_two_layers(4, 2))
    file = convert_lora(tensors_file(tmp_path, None, **uneven), tmp_path/"y.safetensors")
    _, header = file_of(file)
    assert header["ss_network_dim"] == header["ss_network_alpha"] == "Dynamic"
    alone = {k: v for k, v in header.items() if k.startswith("ss_")}
    again = read_lora(tensors_file(tmp_path, alone, **uneven))
    assert again.config["r"] in (2, 4) and again.config["rank_pattern"]


def tensors_of_two_layers(*ranks):
    for n, rank in enumerate(ranks):
        layer = f"transformer.transformer_blocks.{n}.attn.to_q"
        yield f"{layer}.lora_A.weight", torch.rand(rank, 8)
        yield f"{layer}.lora_B.weight", torch.rand(8, rank)


def test_captions_are_one_line_each_shortened_and_few():
    many = [f"edit {n}" for n in range(50)] + ["edit 7"] * 2 + ["x\ny" + "z" * 500, "  "]
    found = counted_captions(many)
    assert len(found) == MOST_CAPTIONS and next(iter(found.items())) == ("edit 7", 3)
    assert not any("\n" in text or len(text) > 300 for text in counted_captions(many[-2:]))


def test_a_trigger_word_of_the_user_stays():
    "Without one it is the instruction that all pairs have."
    samples = [SimpleNamespace(prompt="make it blue")] * 2
    assert trained_on(samples, "sks")["trigger"] == "sks"
    assert trained_on(samples)["trigger"] == "make it blue"


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_variant_is_named_or_says_nothing(name):
    note = VARIANTS[name].note()
    if note.get("model"):
        assert set(note["model"]) == {"name", "implementation", "base_version"}
        assert all(note["model"].values())
