"""Quantized base models: outputs, training, loading layer by layer, refusals; offloading."""
import gc, importlib.metadata, json, shutil, subprocess, sys, weakref
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import Qwen2_5_VLForConditionalGeneration

from qie_nb.config import LoraSection
from qie_nb.models.encoders import encode_prompt
from qie_nb.lora.adapters import add_lora, assert_float32, load_lora, lora_parameters, lora_state, save_lora
from qie_nb.devices import edit_model
from qie_nb.models import loading
from qie_nb.devices.edit_model import EditModel, offload
from qie_nb.models.components import VARIANTS, load_component
from qie_nb.models.loading import device_of
from qie_nb.models.hub import LocalShards
from qie_nb.models.loading import component_bytes, load_quantized, stored_dtype
from qie_nb.models.prequantize import quantize_checkpoint
from qie_nb.models.quantizations import base
from qie_nb.models.quantizations.known import QUANTIZATIONS, check_quantization, held_bytes, plain_tensors, quantizable_layers, quantize
from qie_nb.models.quantizations.known import quantize_linear
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from helpers import COMPILES, PatchConvolutions, divided, noise_image, on_call, random_lora, settings, slow_except

ROOT, FOLDER = Path(__file__).parents[2], tiny_folder("2511")
CLASSES = dict(transformer=QwenImageTransformer2DModel, text_encoder=Qwen2_5_VLForConditionalGeneration)
TOLERANCE = dict(qfloat8=0.03, qint8=0.005, qint4=0.08, nf4=0.1, int8=0.005, float8=0.03, fp8_storage=0.03) # of the plain output's norm


each = pytest.mark.parametrize("q", slow_except(["qfloat8", "nf4", "int8", "fp8_storage"], QUANTIZATIONS, COMPILES)) # one of each library


def load(name, q=None, dtype=torch.float32, folder=FOLDER): return quantize(load_component(folder, name, dtype), q)
def transformer(q=None, dtype=torch.float32): return load("transformer", q, dtype)
def adapted(q=None, dtype=torch.float32): return random_lora(add_lora(transformer(q, dtype), LoraSection(r=4, lora_alpha=8)))
def distance(a, b): return ((a - b).norm() / b.norm()).item()
def trainer_for(root, tmp_path, **model): return QwenImageEditTrainer(settings(root, tmp_path, model=model))


def run(tr, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    x, text = (torch.randn(1, n, 64, generator=g).to(dtype) for n in (32, 7))
    return tr(x, text, timestep=torch.tensor([0.5], dtype=dtype), img_shapes=[[(1, 4, 4), (1, 4, 4)]], return_dict=False)[0].float()


def embed(text_encoder, prompt="make it blue", variant="2511", image=noise_image((84, 84), 80), **kw):
    return encode_prompt(text_encoder, load_component(tiny_folder(variant), "processor"), VARIANTS[variant], prompt, [image], **kw)[0]


def gradients(tr, dtype=torch.float32):
    for p in lora_parameters(tr): p.grad = None
    run(tr, dtype).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in lora_parameters(tr)])


# --- outputs and training
@each
def test_outputs_are_close_to_the_plain_model(q):
    with torch.no_grad(): plain, got = run(transformer()), run(transformer(q))
    assert 1e-4 < distance(got, plain) < TOLERANCE[q]
    te = load("text_encoder", q)
    assert {type(m) for n, m in te.named_modules() if hasattr(m, "in_features") and ".visual." in n} == {torch.nn.Linear}
    assert 1e-4 < distance(embed(te), embed(load("text_encoder"))) < 2 * TOLERANCE[q]
    assert embed(load("text_encoder", q, torch.bfloat16)).dtype == torch.bfloat16, "an embedding has the dtype of training"


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear") # of merging
@each
@pytest.mark.parametrize("dtype", slow_except([torch.bfloat16], [torch.bfloat16, torch.float32]))
def test_adapters_are_float32_with_the_gradients_of_the_plain_model(q, dtype):
    tr = adapted(q, dtype).train()
    assert_float32(tr)
    assert all(".lora_" in n for n, p in tr.named_parameters() if p.requires_grad)
    g = gradients(tr, dtype)
    tr.enable_gradient_checkpointing()
    assert distance(gradients(tr, dtype), g) < (0.01 if dtype == torch.bfloat16 else 1e-4), "one rounding of bfloat16 may fall otherwise"
    tr.eval()
    with torch.no_grad(): run(tr, dtype) # an evaluation between the steps
    torch.optim.AdamW(lora_parameters(tr), lr=1e-3).step()
    assert_float32(tr.train())
    plain = gradients(adapted(None, dtype), dtype)
    assert torch.nn.functional.cosine_similarity(g, plain, dim=0) > 0.97 and 0.9 < g.norm() / plain.norm() < 1.1
    assert gradients(tr, dtype).norm() > 0.5 * plain.norm(), "training continues after an evaluation"


@pytest.mark.parametrize("q", ["qfloat8", "nf4"])
def test_a_loaded_adapter_has_the_same_values_as_on_the_plain_model(q, tmp_path):
    file = save_lora(adapted(), tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        tr, plain = transformer(q, dtype), transformer(None, dtype)
        for t in (tr, plain): load_lora(t, file, trainable=True)
        assert_float32(tr)
        assert_close(lora_state(tr), load_file(file) if dtype == torch.float32 else lora_state(plain), rtol=0, atol=0)


@pytest.mark.parametrize("q", slow_except([], QUANTIZATIONS, COMPILES))
def test_a_run_and_its_lora_on_the_plain_model(q, trained_run, tmp_path):
    trainer = QwenImageEditTrainer(trained_run.settings(tmp_path, model=dict(quantize=q), train=dict(max_train_steps=4, eval_images=0))).fit()
    assert trainer.global_step == 4 and trainer.state.loss.isfinite() and trainer.modulation_table is not None
    assert_float32(trainer.transformer)
    assert not quantizable_layers(trainer.transformer), "every inner layer is quantized"
    load_lora(plain := transformer(), trainer.save_lora(tmp_path/"lora")) # in diffusers: tests/lora
    assert_close(lora_state(plain), lora_state(trainer.transformer), rtol=0, atol=0)
    with torch.no_grad(): assert distance(run(plain), run(transformer())) > 1e-6
    assert trainer.predict(Image.new("RGB", (40, 30), "red"), "x", num_inference_steps=2).std() > 0


# --- what a plan counts
@pytest.mark.parametrize("q, shared", [("qfloat8", 0), ("qint8", 0), ("fp8_storage", 0), ("nf4", 1024)])
def test_planned_bytes_of_a_layer_are_those_that_it_holds(q, shared):
    "All layers of nf4 share a table of 256 float32 numbers."
    layer = quantize_linear(torch.nn.Linear(1024, 256).bfloat16(), q)
    held = sum(t.nbytes for p in (layer.weight, layer.bias) for t in plain_tensors(p))
    assert held - shared == QUANTIZATIONS[q].bytes(1024, 256)


@pytest.mark.parametrize("q", [q for q in QUANTIZATIONS if q not in COMPILES])
def test_autograd_keeps_what_a_plan_counts(q):
    "Copies of dequantized weights, and the inputs of frozen layers."
    kept = []
    def keep(t):
        if type(t) in (torch.Tensor, torch.nn.Parameter): kept.append((t.dtype, t.numel()))
        return t
    layer = quantize_linear(torch.nn.Linear(256, 64).bfloat16(), q)
    x = torch.randn(32, 256, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t): layer(x)
    found = QUANTIZATIONS[q]
    assert ((torch.bfloat16, 256 * 64) in kept) == found.copies
    assert ((torch.bfloat16, 256 * 32) in kept) == found.keeps_inputs


# --- loading
@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    "A model with 13 files for each component; layers and modulations are divided between them."
    root = shutil.copytree(tiny_folder("2511"), tmp_path_factory.mktemp("sharded")/"model")
    for name in CLASSES:
        where = divided(root/name, 13)
        assert any(where[k] != where.get(f"{k[:-5]}.weight") for k in where if k.endswith(".bias")), "a layer is divided over two files"
    return root


@pytest.fixture(scope="module")
def narrow(sharded, tmp_path_factory): # in bfloat16
    root = shutil.copytree(sharded, tmp_path_factory.mktemp("narrow")/"model")
    for file in root.glob("*/*.safetensors"): save_file({k: t.to(torch.bfloat16) if t.is_floating_point() else t for k, t in load_file(file).items()}, file)
    return root


def same_tensors(a, b):
    raw = lambda t: t.view(torch.uint8) if t.ndim else t
    x, y = ({f"{n}.{i}": p for n, t in (*m.named_parameters(), *m.named_buffers()) for i, p in enumerate(plain_tensors(t))} for m in (a, b))
    return x.keys() == y.keys() and all(v.dtype == y[n].dtype and torch.equal(raw(v), raw(y[n])) for n, v in x.items())


def without_head(model):
    if hasattr(model, "lm_head"): model.lm_head = torch.nn.Identity()
    return model


LOADED = [(name, dtype, q) for name in CLASSES for dtype in (torch.bfloat16, torch.float32) for q in (None, *QUANTIZATIONS)]
EVERYDAY = [("transformer", torch.bfloat16, None), ("transformer", torch.bfloat16, "qfloat8"), ("text_encoder", torch.float32, "nf4")]


@pytest.mark.parametrize("name, dtype, q", slow_except(EVERYDAY, LOADED, COMPILES))
def test_load_quantized_gives_the_model_quantized_after_loading(name, dtype, q, narrow):
    folder = narrow/name
    after = CLASSES[name].from_pretrained(folder, **{"dtype" if name == "text_encoder" else "torch_dtype": dtype}).requires_grad_(False).eval()
    after, during = quantize(without_head(after), q), load_quantized(CLASSES[name], folder, q, dtype)
    assert same_tensors(after, during) and not during.training and not any(p.requires_grad for p in during.parameters())
    assert [n for n, _ in after.named_modules()] == [n for n, _ in during.named_modules()]
    with torch.no_grad(): a, b = (run(m, dtype) if name == "transformer" else embed(m) for m in (after, during))
    assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_newer_tensor_names_and_tied_weights_of_text_encoders(tmp_path):
    cls, folder = Qwen2_5_VLForConditionalGeneration, shutil.copytree(FOLDER/"text_encoder", tmp_path/"text_encoder")
    model, file = load("text_encoder"), folder/"model.safetensors"
    plain = {n: t.clone() for n, t in load_file(file).items()} # mapped tensors would change with the file
    newer = {n: t.contiguous() for n, t in model.state_dict().items()}
    assert "model.language_model.norm.weight" in newer.keys() - plain.keys()
    save_file(newer, file)
    assert same_tensors(model, load_quantized(cls, folder))
    config = json.loads((folder/"config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (folder/"config.json").write_text(json.dumps(config))
    save_file({n: t for n, t in plain.items() if n != "lm_head.weight"}, file)
    assert same_tensors(load_quantized(cls, folder, "qint8"), quantize(model, "qint8"))


def test_the_language_head_is_neither_read_nor_kept_nor_counted(tmp_path, monkeypatch):
    "The logits' layer is 1.1 GB of the real text encoder; a pipeline can still call the encoder."
    plain, read = Qwen2_5_VLForConditionalGeneration.from_pretrained(FOLDER/"text_encoder").eval(), []
    head = sum(p.nbytes for p in plain.lm_head.parameters())
    on_call(monkeypatch, loading, "place_tensor", lambda model, name, *a: read.append(name))
    te = EditModel(str(FOLDER)).get("text_encoder")
    assert len(read) > 20 and not any("lm_head" in n for n in read)
    assert head > 1e5 and held_bytes(plain) - held_bytes(te) == head
    assert component_bytes(FOLDER/"text_encoder", torch.float32) == sum(p.nbytes for p in te.parameters())
    ids = torch.arange(5)[None]
    with torch.no_grad(): a, b = (m(input_ids=ids, output_hidden_states=True).hidden_states[-1] for m in (plain, te))
    assert_close(a, b, rtol=1e-5, atol=1e-6)
    shards = LocalShards(FOLDER/"text_encoder")
    out = quantize_checkpoint(type(te), shards, tmp_path/"text_encoder", "nf4", torch.float32)
    with safe_open(next(out.glob("*.safetensors")), "pt") as f: assert not any("lm_head" in n for n in f.keys())


def test_no_layer_waits_for_quantization(narrow, monkeypatch):
    waiting = []
    on_call(monkeypatch, loading, "place_tensor",
            lambda model, *a: waiting.append(sum(not model.get_submodule(n).weight.is_meta for n in quantizable_layers(model))))
    load_quantized(QwenImageTransformer2DModel, narrow/"transformer", "qfloat8", torch.bfloat16)
    assert len(waiting) > 20 and max(waiting) <= 2


@pytest.mark.parametrize("q", [None, "nf4"])
def test_a_tensor_of_another_shape_is_named(q, tmp_path):
    folder = shutil.copytree(FOLDER/"transformer", tmp_path/"transformer")
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["proj_out.weight"] = torch.cat([weights["proj_out.weight"]] * 2)
    save_file(weights, file)
    sentence = r"proj_out.weight has shape \[\d+, \d+\] in the checkpoint, but \[\d+, \d+\] by its config.json"
    with pytest.raises(ValueError, match=sentence):
        load_quantized(QwenImageTransformer2DModel, folder, q)


@pytest.mark.parametrize("name, kept", [("proj_out", torch.float32), ("no_such_part", torch.bfloat16)])
def test_parts_that_a_class_keeps_in_float32_stay_so(name, kept, monkeypatch):
    monkeypatch.setattr(QwenImageTransformer2DModel, "_keep_in_fp32_modules", [name])
    loaded = load_quantized(QwenImageTransformer2DModel, FOLDER/"transformer", dtype=torch.bfloat16)
    assert loaded.proj_out.weight.dtype == kept and loaded.img_in.weight.dtype == torch.bfloat16


def test_a_files_dtype_is_that_of_most_tensors(tmp_path):
    narrow = torch.zeros(2, dtype=torch.bfloat16)
    save_file(dict(a=torch.zeros(2), b=narrow, c=narrow.clone()), tmp_path/"x.safetensors")
    assert stored_dtype(tmp_path/"x.safetensors") == torch.bfloat16


def test_a_missing_shard_is_named(sharded, tmp_path):
    folder = shutil.copytree(sharded/"transformer", tmp_path/"transformer")
    (gone := max(folder.glob("*.safetensors"))).unlink()
    with pytest.raises(FileNotFoundError, match=f"{gone.name} is missing in .* but its index names it"): load_quantized(QwenImageTransformer2DModel, folder)


def memory_while_loading(folder, *arguments) -> dict: # {kind: figures in bytes}
    "Of a made-up checkpoint, in processes of their own: at most the largest shard and what is held at the end."
    status = Path("/proc/self/status")
    if not status.exists() or "RssAnon" not in status.read_text():
        pytest.skip("no RssAnon in /proc")
    command = [sys.executable, ROOT/"benchmarks"/"quantize.py", "memory", "--out", folder/"memory.json", *arguments]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    rows = json.loads((folder/"memory.json").read_text())["memory"]["rows"]
    for name, row in rows.items():
        assert "from_pretrained" in name or row["peak"] <= 1.1 * (row["largest_shard"] + row["held"]), (name, row)
    return rows


@pytest.mark.slow
def test_the_full_weights_are_never_in_memory(tmp_path):
    row = memory_while_loading(tmp_path, "--gb", "0.3", "--kinds", "qfloat8")["qfloat8"]
    assert row["held"] < row["peak"] < 0.9 * row["checkpoint"] and row["largest_shard"] < 0.3 * row["checkpoint"]


@pytest.mark.weekly
def test_the_full_weights_are_never_in_memory_with_any_quantization(tmp_path):
    assert memory_while_loading(tmp_path, "--gb", "2").keys() > QUANTIZATIONS.keys()


# --- refused before weights are read
NOT_INSTALLED = base, "library_version", lambda library: None
OLD = dict(torchao="0.10.0+cu124", peft="0.19.1")
REFUSED = [
    ("qint8", "cpu", [NOT_INSTALLED], "qint8 needs optimum-quanto, which is not installed; pip install optimum-quanto, or use fp8_storage"),
    ("nf4", "cpu", [NOT_INSTALLED], "nf4 needs bitsandbytes, which is not installed; pip install bitsandbytes, or use qfloat8"),
    ("int8", "cpu", [(importlib.metadata, "version", lambda n: OLD.get(n, "1.0"))], "torchao 0.10.0+cu124 is installed, and peft 0.19.1 fails on every LoRA"),
    ("qint4", "cpu", [(shutil, "which", lambda *a, **kw: None)], "needs ninja and g++, not found here; pip install ninja, "),
    ("qint4", "cuda", [(shutil, "which", lambda n, **kw: n if n != "nvcc" else None)], "needs nvcc, not found here"),
    ("nf4", "mps", [], "nf4 runs on cpu and cuda, got mps; use qint8"),
    ("qfloat8", "mps", [], "stores weights in float8, which mps does not support; use qint8"),
    ("nf4", "cuda", [(torch.cuda, "get_device_capability", lambda d: (5, 2)), (torch.cuda, "get_device_name", lambda d: "Tesla M60")],
     "compute capability 6.0 or higher, got Tesla M60; use qint8")]


@pytest.mark.parametrize("q, device, changes, sentence", REFUSED)
def test_refused_before_weights_are_read(q, device, changes, sentence, monkeypatch):
    monkeypatch.setattr(edit_model, "load_component", lambda *a, **kw: pytest.fail("weights were read"))
    for change in changes: monkeypatch.setattr(*change)
    parts = EditModel(str(FOLDER), devices=dict(transformer=device), quantize=dict(transformer=q))
    for ask in (lambda: parts.get("transformer"), parts.check):
        with pytest.raises(ValueError) as e: ask()
        assert sentence in str(e.value)
    if q == "int8": assert check_quantization("nf4") == "nf4", "bitsandbytes itself works"


def test_settings_of_the_trainer_are_checked_before_weights_are_read(monkeypatch, pairs, tmp_path, built):
    root = pairs()
    trainer, encoding = trainer_for(root, tmp_path), trainer_for(root, tmp_path, text_encoder_quantize="nf4")
    trainer.quantize = "nf4" # after the constructor
    monkeypatch.setattr(*NOT_INSTALLED)
    with pytest.raises(ValueError, match="`model.quantize` nf4 needs bitsandbytes"): trainer.set_lora()
    with pytest.raises(ValueError, match="`model.text_encoder_quantize` nf4 needs bitsandbytes"): encoding.cache_embeddings()
    assert not built


def test_kernels_unfit_for_training_are_avoided(monkeypatch):
    to_q = lambda q, width=128: quantize_linear(torch.nn.Linear(width, 64).bfloat16(), q)
    weight = to_q("qfloat8").weight
    assert weight.activation_qtype is not None and weight.to("cpu", copy=True).activation_qtype is not None
    assert [to_q("qint4", w).weight._group_size for w in (128, 256, 96)] == [64, 64, 32]
    assert type(to_q("qint4").weight).__name__ == "WeightQBitsTensor"
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    assert not to_q("nf4").support_avx512bf16_for_cpu, "repacked weights give no gradients"


def test_torchao_changes_no_global_settings():
    import torch._inductor.config as inductor
    now = lambda: (torch.get_float32_matmul_precision(), inductor.coordinate_descent_tuning, inductor.force_fuse_int_mm_with_mul)
    before = now()
    transformer("int8"), transformer("float8")
    assert now() == before


# --- moving, dropping, offloading
@pytest.mark.parametrize("q, offloaded", slow_except([(None, True)], [(None, True), ("nf4", False), ("qfloat8", False), ("int8", False)]))
def test_a_dropped_component_is_freed(q, offloaded):
    parts = EditModel(str(FOLDER), quantize=dict(text_encoder=q), offload=["text_encoder"] if offloaded else ())
    part = parts.move("text_encoder", "cpu")
    assert parts.move("text_encoder", torch.device("cpu")) is part and device_of(part) == torch.device("cpu")
    alive, size = weakref.ref(part), held_bytes(part)
    del part
    parts.drop("text_encoder")
    gc.collect()
    assert alive() is None and (offloaded or size > 0)


@pytest.mark.parametrize("variant", slow_except(["2511"], ["2511", "v1"]))
def test_an_offloaded_encoder_gives_the_same_embeddings(variant):
    plain, offloaded = (load("text_encoder", folder=tiny_folder(variant)) for _ in range(2))
    for prompt in ("make it blue", "", "a much longer prompt than the others were"):
        a, b = (embed(te, prompt, variant, share_prefix=bool(prompt)) for te in (plain, offload(offloaded, "cpu"))) # again each time
        assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert all(p.is_meta for p in offloaded.parameters())


@pytest.mark.parametrize("how", ["plain", "offloaded", *slow_except(["nf4"], ["nf4", "qint8", "int8"])])
def test_every_text_encoder_embeds_patches_by_a_product(how):
    te = load("text_encoder", None if how in ("plain", "offloaded") else how)
    if how == "offloaded":
        offload(te, "cpu")
    with PatchConvolutions(te) as fast:
        a = embed(te)
    with PatchConvolutions(te) as plain:
        b = embed(te, share_prefix=False)
    assert (fast.count, plain.count) == (0, 1)
    assert distance(a, b) < (1e-5 if how in ("plain", "offloaded") else 1e-2)


@pytest.mark.slow
def test_a_cache_of_one_kind_is_not_encoded_again(pairs, tmp_path, built):
    root = pairs()
    assert trainer_for(root, tmp_path, text_encoder_quantize="nf4").cache_embeddings().encoded == 3
    built.clear()
    again = trainer_for(root, tmp_path, text_encoder_quantize="auto")
    choice = again.plan.text_encoder_quantize
    assert (choice.value, choice.why) == ("nf4", "the cache holds 3 entries of nf4")
    assert again.components.quantize["text_encoder"] == "nf4"
    report = again.cache_embeddings()
    assert (report.encoded, report.reused) == (0, 3) and not built, "no encoder is loaded"
    explicit = trainer_for(root, tmp_path, text_encoder_quantize="qint8")
    assert explicit.plan.text_encoder_quantize.asked and explicit.cache_embeddings().encoded == 3


def test_a_new_cache_gets_the_most_exact_kind(pairs, tmp_path):
    trainer = trainer_for(pairs(), tmp_path, text_encoder_quantize="auto")
    choice = trainer.plan.text_encoder_quantize
    assert choice.value is None and choice.why.startswith("it fits as it is")
    assert trainer.components.quantize["text_encoder"] is None
    assert trainer.cache_embeddings().encoded == 3
    assert trainer.components.identity()["text_encoder"].endswith("-plain")


@pytest.mark.slow
def test_precompute_with_an_offloaded_encoder_makes_the_same_cache(pairs, tmp_path, built):
    root = pairs()
    offloaded, plain = trainer_for(root, tmp_path, text_encoder_offload=True), trainer_for(root, tmp_path)
    assert offloaded.cache_embeddings().encoded == 3 and offloaded.qwen_vl is None
    built.clear()
    report = plain.cache_embeddings()
    assert (report.encoded, report.reused) == (0, 3) and not built


def test_the_quantization_is_part_of_the_encoders_identity():
    suffix = lambda q: EditModel(str(FOLDER), quantize=dict(text_encoder=q)).identity()["text_encoder"].rsplit("-", 1)[1]
    assert [suffix(q) for q in (None, False, "none")] == ["plain"] * 3 and suffix(True) == suffix("qfloat8") == "qfloat8" and suffix("nf4") == "nf4"
