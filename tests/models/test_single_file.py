"""Transformers in one file, as ComfyUI keeps them, written here independently of the reader."""
import gc
import json
import math
import shutil
import struct
import weakref

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qie_nb.cache import EmbeddingCacheManager
from qie_nb.config import make_config
from qie_nb.core.presets import PUBLISHED_MODELS
from qie_nb.devices.edit_model import EditModel
from qie_nb.models import hub, single_file, tensor_files
from qie_nb.models.components import VARIANTS, Components
from qie_nb.models.hub import transformer_digest
from qie_nb.models.loading import component_bytes, empty_model
from qie_nb.models.single_file import SingleFile, expected_shapes, open_weights
from qie_nb.planning.cards import plan
from qie_nb.planning.disk_space import disk_plan
from qie_nb.planning.doctor import doctor
from qie_nb.planning.memory import row_dtype, stored_quantization
from qie_nb.tiny.random_models import save_tiny, tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.resume import checkpoint_misfit
from helpers import adapters_equal, noise_image, settings, slow_except, write_pairs

PREFIX = "model.diffusion_model."
MARK = "__index_timestep_zero__"
MARKED = ("2511",) # variants whose file has the mark
GROUP = 16 # columns that are rotated together: the tiny model has 96, published ones 256 of 3072


# --- an independent writer, from ComfyUI's published code
def hadamard(size):
    """The regular Hadamard matrix of ConvRot, entry by entry: -1 for each base-4 digit of row and column
    that sum to 3 (comfy-kitchen, comfy_kitchen/tensor/int8_utils.py has it as a Kronecker power)."""
    def sign(row, column):
        out = 1
        while row or column:
            out = -out if row % 4 + column % 4 == 3 else out
            row, column = row // 4, column // 4
        return out
    rows = []
    for row in range(size):
        rows.append([sign(row, column) for column in range(size)])
    return torch.tensor(rows).double() / size ** 0.5


def turned(weight, group):
    "Each group of columns times the matrix, in float64."
    matrix = hadamard(group)
    parts = [part.double() @ matrix.T for part in weight.split(group, 1)]
    return torch.cat(parts, 1)


def int8_rows(weight):
    "int8 numbers and a scale for each row."
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale.float()


def int8_whole(weight):
    "int8 numbers and one scale."
    scale = weight.abs().max() / 127
    return (weight / scale).round().to(torch.int8), scale.float()


def float8(weight, dtype=torch.float8_e4m3fn):
    "float8 numbers and one scale."
    scale = weight.abs().max() / torch.finfo(dtype).max
    return (weight / scale).to(dtype), scale.float()


def noted(layer, **conf) -> dict:
    "The tensor that says how a layer is quantized (ComfyUI, comfy/ops.py)."
    return {f"{layer}.comfy_quant": torch.tensor(list(json.dumps(conf).encode()), dtype=torch.uint8)}


def is_inner(name, tensor): return tensor.ndim == 2 and name.startswith("transformer_blocks.")


def bf16(weights):
    return {n: t.bfloat16() for n, t in weights.items()}, {}


def fp32(weights):
    return dict(weights), {}


def fp8(weights):
    "As ComfyUI's files of v1 and 2509: float8 without scales."
    return {n: t.to(torch.float8_e4m3fn) if is_inner(n, t) else t.bfloat16() for n, t in weights.items()}, {}


def scaled_fp8(weights):
    "The first form of fp8_scaled (ComfyUI, comfy/utils.py, convert_old_quants)."
    out = {"scaled_fp8": torch.empty(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in weights.items():
        out[name] = tensor.bfloat16()
        if is_inner(name, tensor):
            layer = name.removesuffix(".weight")
            out[name], out[f"{layer}.scale_weight"] = float8(tensor)
            out[f"{layer}.scale_input"] = torch.ones(())
    return out, {}


def fp8_mixed(weights):
    "Some layers in float8, of both kinds, each with a note."
    out = {}
    for number, (name, tensor) in enumerate(weights.items()):
        out[name] = tensor.bfloat16()
        if is_inner(name, tensor) and number % 3:
            layer = name.removesuffix(".weight")
            dtype = torch.float8_e4m3fn if number % 3 == 1 else torch.float8_e5m2
            out[name], out[f"{layer}.weight_scale"] = float8(tensor, dtype)
            out |= noted(layer, format=str(dtype).removeprefix("torch."), full_precision_matrix_mult=True)
    return out, {}


def fp8_metadata(weights):
    "The notes in the file's metadata."
    out, layers = {}, {}
    for name, tensor in weights.items():
        out[name] = tensor.bfloat16()
        if is_inner(name, tensor):
            layer = name.removesuffix(".weight")
            out[name], out[f"{layer}.weight_scale"] = float8(tensor)
            layers[layer] = dict(format="float8_e4m3fn")
    return out, dict(_quantization_metadata=json.dumps(dict(format_version="1.0", layers=layers)))


def int8(weights):
    "int8 without rotation: one scale for a layer, or one for each row."
    out = {}
    for number, (name, tensor) in enumerate(weights.items()):
        out[name] = tensor.bfloat16()
        if is_inner(name, tensor):
            layer = name.removesuffix(".weight")
            quantized = int8_rows if number % 2 else int8_whole
            out[name], out[f"{layer}.weight_scale"] = quantized(tensor.double())
            out |= noted(layer, format="int8_tensorwise")
    return out, {}


def int8_convrot(weights, group=GROUP):
    "int8 of rotated weights, a scale for each row."
    out = {}
    for name, tensor in weights.items():
        out[name] = tensor.bfloat16()
        if is_inner(name, tensor):
            layer = name.removesuffix(".weight")
            out[name], out[f"{layer}.weight_scale"] = int8_rows(turned(tensor, group))
            out |= noted(layer, format="int8_tensorwise", convrot=True, convrot_groupsize=group)
    return out, {}


# of a weight's norm; rounding to nearest: 2**-4 relative for e4m3, 2**-3 for e5m2, half a step of 127 for int8
FORMATS = {bf16: 2 ** -8, fp8: 0.05, scaled_fp8: 0.04, fp8_mixed: 0.08, fp8_metadata: 0.04, int8: 0.03, int8_convrot: 0.02}


def transformer_weights(variant):
    return load_file(*(tiny_folder(variant)/"transformer").glob("*.safetensors"))


def write(path, variant="2511", form=bf16, prefix=True, marked=None, weights=None):
    "A file of a tiny transformer in one of ComfyUI's forms."
    tensors, metadata = form(weights or transformer_weights(variant))
    if variant in MARKED if marked is None else marked:
        tensors[MARK] = torch.tensor([])
    if prefix:
        tensors = {PREFIX + n: t for n, t in tensors.items()}
        if metadata:
            text = metadata["_quantization_metadata"]
            layers = {PREFIX + n: conf for n, conf in json.loads(text)["layers"].items()}
            metadata = dict(_quantization_metadata=json.dumps(dict(layers=layers)))
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata=metadata or None)
    return path


def rebuilt(variant, folder, weights):
    "A model folder with these weights in the transformer."
    save_tiny(variant, folder)
    file, = (folder/"transformer").glob("*.safetensors")
    save_file(weights, file)
    return folder


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    "Small folders of single files go to a temporary home."
    with pytest.MonkeyPatch.context() as mp:
        mp.setenv("QIE_NB_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def bits(tmp_path_factory):
    "{variant: (model folder in bfloat16, file in bfloat16)}, the same numbers."
    out = {}
    for variant in ("v1", "2509", "2511"):
        root = tmp_path_factory.mktemp(variant)
        weights = {n: t.bfloat16() for n, t in transformer_weights(variant).items()}
        out[variant] = rebuilt(variant, root/"model", weights), write(root/"one.safetensors", variant)
    return out


# --- what is read
each_form = pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.__name__)


@each_form
@pytest.mark.parametrize("prefix", [True, False])
def test_each_form_gives_the_weights_within_its_rounding(tmp_path, form, prefix):
    weights, file = transformer_weights("2511"), write(tmp_path/"one.safetensors", form=form, prefix=prefix)
    part = EditModel(str(tiny_folder("2511")), transformer_file=str(file)).transformer
    got = dict(part.named_parameters())
    assert got.keys() == weights.keys()
    for name, own in weights.items():
        assert (got[name] - own).norm() <= FORMATS[form] * own.norm(), name
    plain = [n for n, t in weights.items() if not is_inner(n, t)]
    assert plain and all(torch.equal(got[n], weights[n].bfloat16().float()) for n in plain)


@pytest.mark.parametrize("variant", ["v1", "2509", "2511"])
def test_a_bf16_file_gives_the_bits_of_the_folder(bits, variant):
    folder, file = bits[variant]
    one = EditModel(str(folder), transformer_file=str(file))
    own = EditModel(str(folder)).transformer.state_dict()
    assert one.variant.name == variant and one.transformer.state_dict().keys() == own.keys()
    assert all(torch.equal(t, own[n]) for n, t in one.transformer.state_dict().items())


def test_names_and_shapes_are_those_of_diffusers(tmp_path):
    for config in (VARIANTS["2511"].published_config(), json.loads((tiny_folder("v1")/"transformer/config.json").read_text())):
        (tmp_path/"config.json").write_text(json.dumps(config))
        model = empty_model(QwenImageTransformer2DModel, tmp_path)
        assert {n: tuple(t.shape) for n, t in model.state_dict().items()} == expected_shapes(config)


@pytest.mark.slow
@pytest.mark.parametrize("form, most", [(fp8_metadata, 0.03), (int8_convrot, 0.01)])
def test_a_layer_of_full_width(tmp_path, form, most):
    "One layer of the published width, rotated in groups of 256, with columns of outliers."
    g = torch.Generator().manual_seed(0)
    layer = "transformer_blocks.0.attn.to_q"
    weight = torch.randn(3072, 3072, generator=g) * 0.02
    weight[:, ::700] *= 30
    tensors, metadata = int8_convrot({f"{layer}.weight": weight}, 256) if form is int8_convrot else form({f"{layer}.weight": weight})
    tensors |= {"txt_norm.weight": torch.ones(8), "img_in.weight": torch.ones(8, 8), "transformer_blocks.0.attn.add_q_proj.weight": torch.ones(8, 8)}
    save_file(tensors, tmp_path/"layer.safetensors", metadata=metadata or None)
    with open_weights(tmp_path/"layer.safetensors") as f:
        whole, rows = f.get_tensor(f"{layer}.weight"), f.get_slice(f"{layer}.weight")[1000:1007]
    assert torch.equal(rows, whole[1000:1007]) and whole.dtype == torch.float32
    assert 1e-4 < (whole - weight).norm() / weight.norm() < most
    if form is int8_convrot: # dequantizing adds nothing to the rounding to eight bits
        stored, scale = (tensors[f"{layer}.{n}"] for n in ("weight", "weight_scale"))
        exact = torch.cat([p @ hadamard(256) for p in (stored.double() * scale).split(256, 1)], 1)
        assert (whole - exact).abs().max() < 1e-5 * exact.abs().max()


def test_the_matrices_of_reader_and_writer_are_equal():
    for size in (4, 16, 64, 256):
        assert torch.equal(single_file.rotation(size).double(), hadamard(size))
        assert torch.allclose(hadamard(size) @ hadamard(size).T, torch.eye(size).double())


@pytest.mark.parametrize("quantization", slow_except(["nf4"], ["nf4", "qfloat8", "int8"]))
def test_the_quantizer_gets_what_it_gets_from_the_folder(bits, quantization):
    folder, file = bits["2509"]
    def layers(**kw):
        model = EditModel(str(folder), quantize=dict(transformer=quantization), **kw)
        with torch.no_grad():
            inputs = torch.ones(1, 96)
            return [model.transformer.transformer_blocks[n].attn.to_q(inputs) for n in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(layers(), layers(transformer_file=str(file)), strict=True))


# --- runs
def run(root, out, folder, file=None, steps=2, **sections):
    model = dict(pretrained_model_name_or_path=str(folder), transformer_file=file and str(file))
    train = dict(output_dir=str(out), max_train_steps=steps, eval_images=0, save_steps=steps)
    made = dict(model=model, train=train, cache=dict(cache_dir=str(out/"cache")), logging=dict(log_dir=str(out/"runs")))
    for name, keys in sections.items():
        made[name] = made.get(name, {}) | keys
    return QwenImageEditTrainer(settings(root, out, **made))


def edited(trainer, images):
    return trainer.predict(images, "make it blue", num_inference_steps=2, height=48, width=80)


@pytest.mark.slow
@pytest.mark.parametrize("variant, controls", [("2511", 2), ("2509", 3), ("v1", 1)])
def test_a_fit_and_a_prediction_are_those_of_the_folder(bits, tmp_path, variant, controls, capsys):
    folder, file = bits[variant]
    root = write_pairs(tmp_path/"set", [(80, 48)] * 3, controls)
    a, b = run(root, tmp_path/"a", folder), run(root, tmp_path/"b", folder, file)
    a.fit(), b.fit()
    assert f"transformer: one.safetensors: 0.0 GB, BF16; taken for {variant}" in capsys.readouterr().out
    assert b.modulation_table is not None and adapters_equal(a, b)
    images = [noise_image((80, 48), 60 + 9 * n, seed=n) for n in range(controls)]
    images = images if controls > 1 else images[0]
    assert (edited(a, images) == edited(b, images)).all()
    assert (edited(a, images) != edited(run(root, tmp_path/"c", folder, file), images)).any(), "the adapter changes the edit"


def test_the_pipeline_of_the_folder_predicts_the_velocity_of_the_file(bits):
    folder, file = bits["2511"]
    pipeline = QwenImageTransformer2DModel.from_pretrained(folder/"transformer", torch_dtype=torch.float32)
    ours = EditModel(str(folder), transformer_file=str(file)).transformer
    g = torch.Generator().manual_seed(0)
    x, text = (torch.randn(1, n, 64, generator=g) for n in (24 + 16, 7))
    call = dict(hidden_states=x, encoder_hidden_states=text, timestep=torch.tensor([0.4]), img_shapes=[[(1, 4, 6), (1, 4, 4)]], return_dict=False)
    with torch.no_grad():
        assert torch.equal(pipeline(**call)[0], ours(**call)[0])


@pytest.mark.slow
@pytest.mark.parametrize("form", [int8_convrot, scaled_fp8, fp8])
def test_a_run_on_eight_bits_is_near_that_of_the_folder(bits, tmp_path, form):
    folder, _ = bits["2511"]
    root, file = write_pairs(tmp_path/"set", [(48, 32)] * 3), write(tmp_path/"one.safetensors", form=form)
    losses = []
    for out, one in (("a", None), ("b", file)):
        trainer = run(root, tmp_path/out, folder, one).fit()
        losses.append(float(trainer.state.loss))
    assert losses[0] != losses[1] and abs(losses[0] / losses[1] - 1) < 0.1


# --- identity
def test_cache_and_table_know_the_file_by_its_content(bits, tmp_path):
    folder, file = bits["2511"]
    other = tmp_path/"renamed.safetensors"
    other.write_bytes(file.read_bytes())
    parts = [Components(str(folder), transformer_file=str(p)) for p in (file, other)]
    digests = [transformer_digest(p.place_of("transformer")) for p in parts]
    assert digests[0] == digests[1]
    assert parts[0].identity() == Components(str(folder)).identity(), "the cache of embeddings stays"
    write(other, weights={n: t * 2 for n, t in transformer_weights("2511").items()})
    changed = Components(str(folder), transformer_file=str(other))
    assert transformer_digest(changed.place_of("transformer")) != digests[0]
    assert transformer_digest(parts[1].place_of("transformer")) != digests[0], "also for a model that was made before"


def test_a_run_is_continued_with_the_same_file_alone(bits, tmp_path):
    folder, file = bits["2511"]
    root = write_pairs(tmp_path/"set", [(48, 32)] * 3)
    run(root, tmp_path/"a", folder, file).fit()
    checkpoint = tmp_path/"a"/"checkpoints"/(tmp_path/"a"/"checkpoints"/"latest").read_text().strip()
    again = run(root, tmp_path/"a", folder, file, steps=3, train=dict(resume_checkpoint="latest", max_train_steps=3))
    assert not checkpoint_misfit(checkpoint, again.config)
    again.fit()
    assert again.global_step == 3
    other = write(tmp_path/"other.safetensors", weights={n: t * 1.5 for n, t in transformer_weights("2511").items()})
    wrong = run(root, tmp_path/"a", folder, other, steps=4, train=dict(resume_checkpoint="latest", max_train_steps=4))
    assert "another model" in checkpoint_misfit(checkpoint, wrong.config)
    with pytest.raises(ValueError, match="belongs to a different run"): wrong.fit()


def test_a_table_of_the_folder_is_not_taken_for_that_of_another_file(bits, tmp_path):
    folder, file = bits["2511"]
    root, cache = write_pairs(tmp_path/"set", [(48, 32)] * 3), str(tmp_path/"cache")
    run(root, tmp_path/"a", folder, file, cache=dict(cache_dir=cache)).cache_embeddings()
    def tables(): return EmbeddingCacheManager(cache).get_cache_stats()["modulation"]["count"]
    first = tables()
    run(root, tmp_path/"b", folder, file, cache=dict(cache_dir=cache)).cache_embeddings()
    assert first > 0 and tables() == first
    other = write(tmp_path/"other.safetensors", weights={n: t * 1.5 for n, t in transformer_weights("2511").items()})
    run(root, tmp_path/"c", folder, other, cache=dict(cache_dir=cache)).cache_embeddings()
    assert tables() > first


def test_a_prequantized_copy_is_made_of_the_file(bits, tmp_path):
    folder, file = bits["2511"]
    copies = []
    for out, one in (("a", None), ("b", file)):
        trainer = QwenImageEditTrainer(dict(model=dict(pretrained_model_name_or_path=str(folder), quantize="nf4", text_encoder_quantize="nf4", transformer_file=one and str(one)), train=dict(device="cpu", mixed_precision="no")))
        copies.append(trainer.save_prequantized(tmp_path/out))
    state = [{n: t for p in sorted((c/"transformer").glob("*.safetensors")) for n, t in load_file(p).items()} for c in copies]
    assert state[0].keys() == state[1].keys() and all(torch.equal(t, state[1][n]) for n, t in state[0].items())
    assert not (copies[1]/"transformer"/single_file.POINTER).exists(), "the copy has its own weights"


# --- memory and disk
def test_one_weight_at_a_time_is_in_memory(tmp_path, monkeypatch):
    "Bytes of the reader's tensors that are still alive, while a model is quantized as it is read."
    file, alive, peak = write(tmp_path/"one.safetensors", form=int8_convrot), [], []
    def watch(owner, name):
        real = getattr(owner, name)
        def counted(*args):
            out = real(*args)
            gc.collect()
            alive.append((weakref.ref(out), out.nbytes))
            peak.append(sum(size for ref, size in alive if ref() is not None))
            return out
        monkeypatch.setattr(owner, name, counted)
    watch(tensor_files.FileSlice, "_read"), watch(single_file.ScaledSlice, "whole")
    EditModel(str(tiny_folder("2511")), quantize=dict(transformer="nf4"), transformer_file=str(file)).transformer
    largest = max(t.numel() for t in transformer_weights("2511").values()) # of which each takes 4 bytes, and 1 in the file
    assert len(peak) > 100 and 4 * largest <= max(peak) <= 5.5 * largest < file.stat().st_size / 2


def test_a_large_file_is_not_mapped(tmp_path, monkeypatch):
    file = tmp_path/"plain.safetensors"
    save_file(transformer_weights("v1"), file)
    with open_weights(file) as f: mapped = {n: f.get_tensor(n) for n in f.keys()}
    monkeypatch.setattr(single_file, "MOST_MAPPED", 1000)
    monkeypatch.setattr("safetensors.safe_open", lambda *a: pytest.fail("the file is mapped"))
    with open_weights(file) as f:
        assert list(f.keys()) == sorted(mapped) and all(torch.equal(f.get_tensor(n), t) for n, t in mapped.items())


def test_a_file_that_becomes_shorter_is_noticed(tmp_path):
    file = write(tmp_path/"one.safetensors")
    with open_weights(file) as f:
        file.write_bytes(file.read_bytes()[:-40_000])
        with pytest.raises(ValueError, match="has become shorter since it was opened; download it again"):
            for name in f.keys(): f.get_tensor(name)


class NoHub:
    "A hub that serves the configuration and the encoders, and fails for the transformer's weights."
    def __init__(self, served, folder): self.served, self.folder, self.got = served, folder, []
    def files(self, name, revision=None):
        return "c" * 40, {p.relative_to(self.served).as_posix(): p.stat().st_size for p in self.served.rglob("*") if p.is_file()}
    def has(self, name, path, commit): return (self.folder/path).is_file()
    def get(self, name, path, commit):
        assert not (path.startswith("transformer/") and path.endswith(".safetensors"))
        if not self.has(name, path, commit):
            self.got.append(path)
            (self.folder/path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder/path).write_bytes((self.served/path).read_bytes())
        return self.folder/path
    def release(self, path): pass


@pytest.mark.slow
def test_the_transformer_of_a_hub_model_is_not_downloaded(bits, tmp_path, monkeypatch, capsys):
    folder, file = bits["2511"]
    served = NoHub(folder, tmp_path/"hub")
    monkeypatch.setattr(hub, "HUB", served)
    root = write_pairs(tmp_path/"set", [(48, 32)] * 3)
    trainer = run(root, tmp_path/"a", "owner/edit", file).fit()
    assert trainer.global_step == 2 and trainer.components.is_local("transformer")
    assert any(p.startswith("text_encoder/") for p in served.got)
    weights = sum(p.stat().st_size for part in ("vae", "text_encoder") for p in (folder/part).glob("*.safetensors"))
    assert f"downloading owner/edit, {weights / 1e6:.1f} MB in all" in capsys.readouterr().out
    assert adapters_equal(trainer, run(root, tmp_path/"b", folder, file).fit())


def full_header(path):
    "The header of ComfyUI's int8_convrot of 2511, in full size; the numbers are a hole in the file."
    entries, at, notes = {}, 0, []
    conf = b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}'
    def add(name, dtype, shape, width):
        nonlocal at
        size = math.prod(shape) * width
        entries[PREFIX + name] = dict(dtype=dtype, shape=list(shape), data_offsets=[at, at + size])
        at += size
    for name, shape in expected_shapes(VARIANTS["2511"].published_config()).items():
        layer = name.removesuffix(".weight")
        if len(shape) == 2 and name.startswith("transformer_blocks."):
            add(name, "I8", shape, 1)
            add(f"{layer}.weight_scale", "F32", (shape[0], 1), 4)
            notes.append(at)
            add(f"{layer}.comfy_quant", "U8", (len(conf),), 1)
        else:
            add(name, "BF16", shape, 2)
    add(MARK, "F32", (0,), 4)
    text = json.dumps(entries).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + at)
        for note in notes:
            f.seek(8 + len(text) + note)
            f.write(conf)
    return path


@pytest.mark.slow
def test_the_plan_of_a_full_model_in_one_file(tmp_path):
    file = full_header(tmp_path/"qwen_image_edit_2511_int8_convrot.safetensors")
    assert repr(SingleFile(file)) == "qwen_image_edit_2511_int8_convrot.safetensors: 20.5 GB, I8, scaled, rotated"
    model = dict(pretrained_model_name_or_path=PUBLISHED_MODELS["2511"], quantize="nf4")
    base, one = (make_config(dict(model=model | more)) for more in ({}, dict(transformer_file=str(file))))
    assert row_dtype(base, 2) == row_dtype(one, 2) == torch.bfloat16
    plans = [plan(c, gpu="RTX 4090", pairs=30) for c in (base, one)]
    assert plans[0].chosen.total == plans[1].chosen.total and "downloads 16.85 GB" in str(plans[1])
    def downloads(c): return {i.what: i.bytes for i in disk_plan(c, pairs=30).items if i.group == "downloads"}
    assert downloads(one) == {k: v for k, v in downloads(base).items() if k != "download transformer"} != downloads(base)
    deleted = make_config(one.model_dump() | dict(model=one.model.model_dump() | dict(delete_downloaded_shards=True)))
    assert not any("transformer" in what for what in downloads(deleted))


def test_sizes_in_memory_are_those_of_the_folder(bits, tmp_path):
    folder, _ = bits["2511"]
    file = write(tmp_path/"one.safetensors", form=int8_convrot)
    one = Components(str(folder), transformer_file=str(file)).place_of("transformer")
    for kind in (None, "nf4"):
        assert component_bytes(one, torch.bfloat16, kind) == component_bytes(folder/"transformer", torch.bfloat16, kind)


def test_the_quantization_of_a_base_that_is_not_read_does_not_count(tmp_path, bits):
    folder, file = bits["2511"]
    copy = QwenImageEditTrainer(dict(model=dict(pretrained_model_name_or_path=str(folder), quantize="nf4", text_encoder_quantize="nf4"), train=dict(device="cpu", mixed_precision="no"))).save_prequantized(tmp_path/"copy")
    c = make_config(dict(model=dict(pretrained_model_name_or_path=str(copy), transformer_file=str(file))))
    assert stored_quantization(c.model) is None and stored_quantization(c.model.model_copy(update=dict(transformer_file=None))) == "nf4"
    model = EditModel(str(copy), transformer_file=str(file))
    model.follow_saved_quantization("transformer", "text_encoder")
    assert dict(model.quantize) == dict(transformer=None, text_encoder="nf4")


# --- refusals
def changed(path, change, variant="2511", **kw):
    "A file whose tensors were changed."
    write(path, variant, **kw)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def without(*names):
    def change(tensors):
        for name in names: del tensors[PREFIX + name]
    return change


def more(**named):
    def change(tensors):
        tensors.update({n.replace("__", "."): torch.zeros(4, 4) for n in named})
    return change


def renamed(old, new):
    def change(tensors):
        tensors[new] = tensors.pop(PREFIX + old)
    return change


def sized(name, *shape):
    def change(tensors): tensors[PREFIX + name] = torch.zeros(shape, dtype=torch.bfloat16)
    return change


def formatted(conf, layer="transformer_blocks.1.attn.to_v"):
    def change(tensors): tensors.update(noted(PREFIX + layer, **conf))
    return change


def names_only(*names):
    def make(path): save_file({n: torch.zeros(2, 2) for n in names}, path)
    return make


def starts(data): return lambda path: path.write_bytes(data + bytes(200))


def made(change, **kw): return lambda path: changed(path, change, **kw)


def cut(size): return lambda path: path.write_bytes(write(path).read_bytes()[:size])


LAYER = "transformer_blocks.1.attn.to_v"
FILES = {
    "GGUF": (starts(b"GGUF\x03\0\0\0"), "is a GGUF file"),
    "pickle": (starts(b"PK\x03\x04"), "is a pickle"),
    "old pickle": (starts(b"\x80\x02ctorch._utils\n"), "is a pickle"),
    "LFS pointer": (starts(b"version https://git-lfs.github.com/spec/v1\n"), "pointer of Git LFS"),
    "web page": (starts(b"<!doctype html>"), "is a web page"),
    "zeros": (starts(b""), "is no safetensors file"),
    "cut in its header": (cut(300), "is cut off within its header; download it again"),
    "cut": (cut(-1000), "is cut off: it has"),
    "damaged header": (starts(struct.pack("<Q", 20) + b'{"a": {"dtype": 1}}  '), "has a damaged header"),
    "AIO": (made(more(first_stage_model__decoder__weight=1)), r"has a VAE or a text encoder beside the transformer \(AIO\)"),
    "AIO with a text encoder": (made(more(text_encoders__qwen25_7b__transformer__model__norm__weight=1)), r"\(AIO\)"),
    "nunchaku": (names_only("transformer_blocks.0.attn.to_qkv.qweight", "transformer_blocks.0.attn.to_qkv.wscales"), "is a nunchaku"),
    "LoRA": (names_only("transformer_blocks.0.attn.to_q.lora_A.weight", "transformer_blocks.0.attn.to_q.lora_B.weight"), "is a LoRA"),
    "LoRA of kohya": (names_only("lora_unet_transformer_blocks_0_attn_to_q.lora_down.weight"), "is a LoRA"),
    "VAE": (names_only("encoder.conv1.weight", "decoder.conv1.weight"), "is a VAE"),
    "text encoder": (names_only("model.layers.0.self_attn.q_proj.weight", "visual.patch_embed.proj.weight"),
                     "is a text encoder, not a transformer; give it as `model.text_encoder_file`"),
    "ControlNet": (names_only("controlnet_blocks.0.weight", "transformer_blocks.0.attn.to_q.weight"), "is a ControlNet"),
    "Flux": (names_only("double_blocks.0.img_attn.qkv.weight", "img_in.weight"), "is another model's: it lacks txt_norm.weight"),
    "Wan": (names_only("blocks.0.self_attn.q.weight", "patch_embedding.weight"), "is another model's"),
    "missing": (made(without(f"{LAYER}.bias")), rf"lacks {LAYER}.bias and 0 more"),
    "fewer blocks": (made(lambda t: [t.pop(n) for n in list(t) if ".1." in n and "blocks.1." in n]), "lacks transformer_blocks.1"),
    "one more": (made(more(**{"transformer_blocks__2__odd__weight": 1})), "transformer_blocks.2.odd.weight and 0 more tensors"),
    "other width": (made(sized("img_in.weight", 128, 64)), r"has img_in.weight of shape \[128, 64\], but \[96, 64\]"),
    "nvfp4": (made(formatted(dict(format="nvfp4"))), "as nvfp4, a format that we do not read"),
    "four bits, rotated": (made(formatted(dict(format="convrot_w4a4"))), "as convrot_w4a4"),
    "scale that nothing announces": (made(lambda t: t.update({f"{PREFIX}{LAYER}.weight_scale": torch.ones(())})), f"has {LAYER}.weight_scale in F32, a quantization that we do not read"),
    "int8 without a note": (made(lambda t: t.update({f"{PREFIX}{LAYER}.weight": torch.zeros(96, 96, dtype=torch.int8)})), f"{LAYER}.weight in I8, a quantization"),
    "note without scale": (made(formatted(dict(format="float8_e4m3fn"))), f"it lacks {LAYER}.weight_scale"),
    "note of another dtype": (made(lambda t: (formatted(dict(format="int8_tensorwise"))(t), t.update({f"{PREFIX}{LAYER}.weight_scale": torch.ones(())}))), "is int8_tensorwise, but its weight is BF16"),
    "scale of another size": (made(lambda t: t.update({f"{PREFIX}{LAYER}.weight_scale": torch.ones(7, 1)}), form=int8), r"with scales \[7, 1\]"),
    "odd groups": (made(formatted(dict(format="int8_tensorwise", convrot=True, convrot_groupsize=32)), form=int8_convrot), "rotated in groups of 32"),
    "damaged note": (made(lambda t: t.update({f"{PREFIX}{LAYER}.comfy_quant": torch.tensor([1, 2], dtype=torch.uint8)})), "has a damaged description of its quantization"),
    "sizes that are not the shapes'": (starts(struct.pack("<Q", 64) + b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}'.ljust(64)), "has a damaged header"),
    "names twice": (made(lambda t: t.update({"img_in.weight": torch.zeros(96, 64)})), f"has tensors twice, with and without {PREFIX}"),
    "no mark": (lambda path: write(path, "2509"), f"lacks {MARK}, the mark of 2511, which `model.pretrained_model_name_or_path` is"),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_not_known_is_refused_in_one_sentence_before_any_work(tmp_path, monkeypatch, name):
    make, why = FILES[name]
    file = tmp_path/"odd.safetensors"
    make(file)
    for loader in ("load_component", "take_turns"):
        monkeypatch.setattr(f"qie_nb.devices.edit_model.{loader}", lambda *a, **kw: pytest.fail("something is loaded"))
    c = dict(model=dict(pretrained_model_name_or_path=str(tiny_folder("2511")), transformer_file=str(file)), train=dict(device="cpu"))
    with pytest.raises(ValueError, match=why) as error: QwenImageEditTrainer(c)
    text = str(error.value)
    assert text.startswith(f"`model.transformer_file` {str(file)!r} ") and text.count("; ") == 1 and "\n" not in text
    found = doctor(c, internet=False).of("error")
    assert [f.remedy for f in found if f.what == "model file"] == [text]


def test_a_shard_a_folder_and_a_missing_file(tmp_path):
    def refused(path, error=ValueError):
        with pytest.raises(error) as found: EditModel(str(tiny_folder("2511")), transformer_file=str(path))
        return str(found.value)
    shard = tmp_path/"diffusion_pytorch_model-00002-of-00005.safetensors"
    save_file({"transformer_blocks.12.attn.to_q.weight": torch.zeros(2, 2)}, shard)
    assert "is one of several shards; set `model.pretrained_model_name_or_path` to the folder" in refused(shard)
    assert "is a folder; give a file in it" in refused(tmp_path)
    assert "does not exist; fix the path" in refused(tmp_path/"none.safetensors", FileNotFoundError)


def test_a_model_folder_cannot_name_a_file_of_this_machine(bits, tmp_path):
    folder, file = bits["2511"]
    hostile = shutil.copytree(folder, tmp_path/"model")
    (hostile/"transformer"/single_file.POINTER).write_text(str(file))
    assert single_file.pointed_file(hostile/"transformer") is None
    ours = Components(str(folder), transformer_file=str(file)).place_of("transformer")
    assert single_file.pointed_file(ours) == file


def test_a_foreign_file_is_refused_before_the_hub_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "HUB", None)
    file = tmp_path/"model.gguf"
    starts(b"GGUF")(file)
    with pytest.raises(ValueError, match="is a GGUF file"): EditModel("owner/other-edit", transformer_file=str(file))


def test_variants_are_told_apart_where_the_file_can_tell(bits, tmp_path):
    folders = {v: str(f) for v, (f, _) in bits.items()}
    files = {v: str(f) for v, (_, f) in bits.items()}
    with pytest.raises(ValueError, match=rf"is 2511 \(it has {MARK}\), but `model.pretrained_model_name_or_path` is 2509; set it to {PUBLISHED_MODELS['2511']}"):
        Components(folders["2509"], transformer_file=files["2511"])
    with pytest.raises(ValueError, match="or `model.variant` to 2511 if you know"): Components(folders["2511"], transformer_file=files["v1"])
    assert Components(folders["2511"], variant="2511", transformer_file=files["2509"]).variant.name == "2511"
    assert Components(folders["2509"], transformer_file=files["v1"]).variant.name == "2509", "their transformers are alike"
    assert "transformer: one.safetensors" in repr(Components(folders["v1"], transformer_file=files["v1"]))


@pytest.mark.parametrize("variant", ["v1", "2509", "2511"])
def test_a_base_without_a_transformer_gives_the_published_configuration(tmp_path, variant, monkeypatch):
    folder = shutil.copytree(tiny_folder(variant), tmp_path/"base")
    config = json.loads((folder/"transformer/config.json").read_text())
    shutil.rmtree(folder/"transformer")
    kept = {k: config[k] for k in ("in_channels", "num_layers", "attention_head_dim", "num_attention_heads", "joint_attention_dim", "axes_dims_rope")}
    for v in VARIANTS.values(): monkeypatch.setattr(type(v), "published", kept)
    file = write(tmp_path/"one.safetensors", variant, form=fp32)
    model = EditModel(str(folder), transformer_file=str(file))
    own, got = (EditModel(str(tiny_folder(variant))).transformer, model.transformer)
    assert model.variant.name == variant and bool(got.config.zero_cond_t) == bool(own.config.zero_cond_t)
    assert all(torch.equal(t, own.state_dict()[n]) for n, t in got.state_dict().items())


def test_the_base_folder_is_left_alone_and_says_nothing_of_the_file(bits, tmp_path):
    folder, file = bits["2511"]
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    root = write_pairs(tmp_path/"set", [(48, 32)] * 3)
    trainer = run(root, tmp_path/"a", folder, file).fit()
    lora = trainer.save_lora(tmp_path/"lora")
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    with safe_open(lora, "pt") as f: assert str(file) not in json.dumps(f.metadata())
