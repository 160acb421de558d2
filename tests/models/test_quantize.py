"""Quantized base models: outputs, training, loading layer by layer, refusals; offloading."""
import gc, json, shutil, subprocess, sys, weakref
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import Qwen2_5_VLForConditionalGeneration

from qie_nb.config import LoraSection
from qie_nb.encoding.prompts import encode_prompt
from qie_nb.lora.adapters import add_lora, assert_float32, load_lora, lora_parameters, lora_state, save_lora
from qie_nb.models import components, quantize as quantization
from qie_nb.models.components import VARIANTS, Components, device_of, load_component, offload
from qie_nb.models.loading import load_quantized
from qie_nb.models.quantize import QUANTIZATIONS, check_quantization, held_bytes, plain_tensors, quantizable_layers, quantize, quantize_linear
from qie_nb.tiny.random_models import tiny_folder, tiny_pipeline
from qie_nb.trainer import QwenImageEditTrainer
from helpers import settings

ROOT = Path(__file__).parents[2]
CLASSES = dict(transformer=QwenImageTransformer2DModel, text_encoder=Qwen2_5_VLForConditionalGeneration)
TOLERANCE = dict(qfloat8=0.03, qint8=0.005, qint4=0.08, nf4=0.1, int8=0.005, float8=0.03, fp8_storage=0.03) # of the plain output's norm
FOLDER = tiny_folder("2511")


def slow_except(everyday, cases): return [c if c in everyday else pytest.param(*(c if isinstance(c, tuple) else [c]), marks=pytest.mark.slow) for c in cases]
each = pytest.mark.parametrize("q", slow_except(["qfloat8", "nf4", "int8", "fp8_storage"], QUANTIZATIONS)) # one of each library; qint4 compiles


def inputs(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g).to(dtype)
    return dict(hidden_states=draw(1, 32, 64), encoder_hidden_states=draw(1, 7, 64), timestep=torch.tensor([0.5], dtype=dtype),
                img_shapes=[[(1, 4, 4), (1, 4, 4)]], return_dict=False)


def load(name, q=None, dtype=torch.float32, folder=FOLDER): return quantize(load_component(folder, name, dtype), q)
def transformer(q=None, dtype=torch.float32): return load("transformer", q, dtype)
def run(tr, dtype=torch.float32): return tr(**inputs(dtype))[0].float()
def distance(a, b): return ((a - b).norm() / b.norm()).item()
def embed(text_encoder, prompt="make it blue", variant="2511", image=Image.effect_noise((84, 84), 80).convert("RGB"), **kw):
    return encode_prompt(text_encoder, load_component(tiny_folder(variant), "processor"), VARIANTS[variant], prompt, [image], **kw)[0]
def trainer_for(root, tmp_path, **model): return QwenImageEditTrainer(settings(root, tmp_path, model=model))


def gradients(tr, dtype=torch.float32):
    for p in lora_parameters(tr): p.grad = None
    run(tr, dtype).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in lora_parameters(tr)])


def adapted(q=None, dtype=torch.float32):
    tr = add_lora(transformer(q, dtype), LoraSection(r=4, lora_alpha=8))
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for n, p in tr.named_parameters():
            if "lora_B" in n: p.copy_(torch.randn(p.shape, generator=g) * 0.1)
    return tr


# --- outputs
@each
def test_outputs_are_close_to_the_plain_model(q):
    with torch.no_grad(): plain, got = run(transformer()), run(transformer(q))
    assert 1e-4 < distance(got, plain) < TOLERANCE[q]
    te = load("text_encoder", q)
    assert not any(".visual." in n or "lm_head" in n for n, m in te.named_modules() if type(m) is not torch.nn.Linear and hasattr(m, "in_features"))
    assert 1e-4 < distance(embed(te), embed(load("text_encoder"))) < 2 * TOLERANCE[q]
    assert embed(load("text_encoder", q, torch.bfloat16)).dtype == torch.bfloat16, "an embedding has the dtype of training"


# --- training
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear") # of merging
@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_adapters_are_float32_with_the_gradients_of_the_plain_model(q, dtype):
    tr = adapted(q, dtype).train()
    assert_float32(tr)
    assert all(".lora_" in n for n, p in tr.named_parameters() if p.requires_grad)
    g = gradients(tr, dtype)
    tr.enable_gradient_checkpointing()
    again = gradients(tr, dtype)
    tr.eval()
    with torch.no_grad(): run(tr, dtype) # an evaluation between the steps
    torch.optim.AdamW(lora_parameters(tr), lr=1e-3).step()
    assert_float32(tr.train())
    plain = gradients(adapted(None, dtype), dtype)
    assert distance(again, g) < (0.01 if dtype == torch.bfloat16 else 1e-4), "one rounding of bfloat16 may fall otherwise"
    assert torch.nn.functional.cosine_similarity(g, plain, dim=0) > 0.97 and 0.9 < g.norm() / plain.norm() < 1.1
    assert gradients(tr, dtype).norm() > 0.5 * plain.norm(), "training continues after an evaluation"


@pytest.mark.parametrize("q", ["qfloat8", "nf4"])
def test_a_loaded_adapter_has_the_same_values_as_on_the_plain_model(q, tmp_path):
    file = save_lora(adapted(), tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        tr, plain = transformer(q, dtype), transformer(None, dtype)
        for t in (tr, plain): load_lora(t, file, trainable=True)
        assert_float32(tr)
        got, want = lora_state(tr), load_file(file) if dtype == torch.float32 else lora_state(plain)
        assert want.keys() == got.keys() and all(torch.equal(v, want[k]) for k, v in got.items())


@pytest.mark.slow
@pytest.mark.parametrize("q", QUANTIZATIONS)
def test_a_run_and_its_lora_on_the_plain_model(q, trained_run, tmp_path):
    trainer = QwenImageEditTrainer(trained_run.settings(tmp_path, model=dict(quantize=q), train=dict(max_train_steps=4, eval_images=0))).fit()
    assert trainer.global_step == 4 and trainer.state.loss.isfinite()
    assert_float32(trainer.transformer)
    assert not quantizable_layers(trainer.transformer), "every inner layer is quantized"
    state = lora_state(trainer.transformer)
    assert all(v.isfinite().all() for v in state.values()) and any(v.abs().max() > 0 for k, v in state.items() if "lora_B" in k)
    path = trainer.save_lora(tmp_path/"lora")
    ours, pipe = transformer(), tiny_pipeline("2511")
    load_lora(ours, path)
    pipe.load_lora_weights(path.parent)
    pipe.transformer.eval()
    with torch.no_grad(): a, b, plain = run(ours), run(pipe.transformer), run(transformer())
    assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert (a - plain).abs().max() > 1e-5
    assert trainer.predict(Image.new("RGB", (40, 30), "red"), "x", num_inference_steps=2).std() > 0


# --- loading
def sharded_bf16(tmp_path, name):
    CLASSES[name].from_pretrained(FOLDER/name).to(torch.bfloat16).save_pretrained(
        tmp_path/name, max_shard_size="300KB" if name == "transformer" else "60KB")
    assert len(list((tmp_path/name).glob("*.safetensors"))) > 2
    return tmp_path/name


def same_tensors(a, b):
    raw = lambda t: t.view(torch.uint8) if t.ndim else t
    x, y = ({f"{n}.{i}": p for n, t in (*m.named_parameters(), *m.named_buffers()) for i, p in enumerate(plain_tensors(t))} for m in (a, b))
    return x.keys() == y.keys() and all(v.dtype == y[n].dtype and torch.equal(raw(v), raw(y[n])) for n, v in x.items())


LOADED = [(name, dtype, q) for name in CLASSES for dtype in (torch.bfloat16, torch.float32) for q in (None, *QUANTIZATIONS)]
EVERYDAY = [("transformer", torch.bfloat16, None), ("transformer", torch.bfloat16, "qfloat8"), ("text_encoder", torch.float32, "nf4")]


@pytest.mark.parametrize("name, dtype, q", slow_except(EVERYDAY, LOADED))
def test_load_quantized_gives_the_model_quantized_after_loading(name, dtype, q, tmp_path):
    folder = sharded_bf16(tmp_path, name)
    kw = {"dtype" if name == "text_encoder" else "torch_dtype": dtype}
    after = quantize(CLASSES[name].from_pretrained(folder, **kw).requires_grad_(False).eval(), q)
    during = load_quantized(CLASSES[name], folder, q, dtype)
    assert same_tensors(after, during) and not during.training and not any(p.requires_grad for p in during.parameters())
    assert [n for n, _ in after.named_modules()] == [n for n, _ in during.named_modules()]
    with torch.no_grad(): a, b = (run(m, dtype) if name == "transformer" else embed(m) for m in (after, during))
    assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_newer_tensor_names_and_tied_weights_of_text_encoders(tmp_path):
    model, folder = load("text_encoder"), shutil.copytree(FOLDER/"text_encoder", tmp_path/"text_encoder")
    plain = load_file(folder/"model.safetensors")
    newer = {n: t.contiguous() for n, t in model.state_dict().items()}
    assert "model.language_model.norm.weight" in newer.keys() - plain.keys()
    save_file(newer, folder/"model.safetensors")
    assert same_tensors(model, load_quantized(Qwen2_5_VLForConditionalGeneration, folder))
    config = json.loads((folder/"config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (folder/"config.json").write_text(json.dumps(config))
    save_file({n: t for n, t in plain.items() if n != "lm_head.weight"}, folder/"model.safetensors")
    te = load_quantized(Qwen2_5_VLForConditionalGeneration, folder, "qint8")
    assert te.lm_head.weight is te.model.language_model.embed_tokens.weight


def test_a_missing_shard_is_named(tmp_path):
    folder = sharded_bf16(tmp_path, "transformer")
    (gone := sorted(folder.glob("*.safetensors"))[1]).unlink()
    with pytest.raises(FileNotFoundError, match=f"{gone.name} is missing in .* but its index names it"):
        load_quantized(QwenImageTransformer2DModel, folder)


def test_no_layer_waits_for_quantization(tmp_path, monkeypatch):
    from qie_nb.models import loading
    real, most = loading.place_tensor, 0
    def watched(model, *args):
        nonlocal most
        out = real(model, *args)
        most = max(most, sum(not m.weight.is_meta for m in (model.get_submodule(n) for n in quantizable_layers(model))))
        return out
    monkeypatch.setattr(loading, "place_tensor", watched)
    load_quantized(QwenImageTransformer2DModel, sharded_bf16(tmp_path, "transformer"), "qfloat8", torch.bfloat16)
    assert 0 < most <= 2


def memory(tmp_path, *args):
    if not Path("/proc/self/status").exists() or "RssAnon" not in Path("/proc/self/status").read_text(): pytest.skip("no RssAnon in /proc")
    out = tmp_path/"memory.json"
    subprocess.run([sys.executable, ROOT/"benchmarks"/"quantize.py", "memory", "--out", out, *args], check=True, capture_output=True, cwd=ROOT)
    rows = json.loads(out.read_text())["memory"]["rows"]
    for name, r in rows.items(): assert r["peak"] <= 1.1 * (r["largest_shard"] + r["held"]) or "from_pretrained" in name, (name, r)
    return rows


@pytest.mark.slow
def test_the_full_weights_are_never_in_memory(tmp_path):
    row = memory(tmp_path, "--gb", "0.3", "--kinds", "qfloat8")["qfloat8"]
    assert row["held"] < row["peak"] < 0.9 * row["checkpoint"] and row["largest_shard"] < 0.3 * row["checkpoint"]
    assert memory(tmp_path, "--gb", "2").keys() > QUANTIZATIONS.keys()


# --- refused before weights are read
@pytest.fixture
def nothing_read(monkeypatch):
    def fail(*a, **kw): raise AssertionError("weights were read")
    monkeypatch.setattr(components, "load_component", fail)


def without_library(*names):
    return lambda m: m.setattr(quantization, "library_version", lambda lib, real=quantization.library_version: None if lib in names else real(lib))
def versions(**installed): return lambda m: m.setattr(quantization, "version", lambda n, real=quantization.version: installed.get(n) or real(n))
def without_tool(*tools): return lambda m: m.setattr(shutil, "which", lambda n, path=None, real=shutil.which: None if n in tools else real(n, path=path))
def gpu(capability):
    def change(m):
        m.setattr(torch.cuda, "get_device_capability", lambda d=None: capability)
        m.setattr(torch.cuda, "get_device_name", lambda d=None: "Tesla M60")
    return change
def unchanged(m): pass


REFUSED = [
    *((q, "cpu", without_library(lib), f"{q} needs {lib}, which is not installed; pip install {lib}, or use {other}")
      for q, lib, other in (("qint8", "optimum-quanto", "fp8_storage"), ("nf4", "bitsandbytes", "qfloat8"), ("float8", "torchao", "fp8_storage"))),
    ("int8", "cpu", versions(torchao="0.10.0+cu124", peft="0.19.1"), "torchao 0.10.0+cu124 is installed, and peft 0.19.1 fails on every LoRA with it"),
    *(("qint4", device, without_tool(*tools), f"needs {names}, not found here; pip install ninja, ")
      for device, tools, names in (("cpu", ["ninja", "g++", "c++"], "ninja and g++"), ("cuda", ["nvcc"], "nvcc"))),
    ("fp8_storage", "mps", unchanged, "float8, which mps does not support; use qint8"), ("nf4", "mps", unchanged, "nf4 runs on cpu and cuda, got mps; use qint8"),
    ("nf4", "cuda", gpu((5, 2)), "compute capability 6.0 or higher, got Tesla M60; use qint8")]


@pytest.mark.parametrize("q, device, change, sentence", REFUSED, ids=[f"{q}-{d}-{n}" for n, (q, d, *_) in enumerate(REFUSED)])
def test_refused_before_weights_are_read(q, device, change, sentence, monkeypatch, nothing_read):
    parts = Components(str(FOLDER), devices=dict(transformer=device), quantize=dict(transformer=q))
    with pytest.raises(AssertionError, match="weights were read"): Components(str(FOLDER)).get("transformer") # the guard works
    change(monkeypatch)
    for ask in (lambda: parts.get("transformer"), parts.check):
        with pytest.raises(ValueError) as e: ask()
        assert sentence in str(e.value)
    if q == "int8": assert check_quantization("nf4") == "nf4", "bitsandbytes itself works"


def test_settings_of_the_trainer_are_checked_before_weights_are_read(monkeypatch, pairs, tmp_path, built):
    root = pairs()
    trainer, encoding = trainer_for(root, tmp_path), trainer_for(root, tmp_path, text_encoder_quantize="nf4")
    trainer.quantize = "nf4" # after the constructor
    without_library("bitsandbytes")(monkeypatch)
    with pytest.raises(ValueError, match="`model.quantize` nf4 needs bitsandbytes"): trainer.set_lora()
    with pytest.raises(ValueError, match="`model.text_encoder_quantize` nf4 needs bitsandbytes"): encoding.cache_embeddings()
    assert not built


def test_kernels_unfit_for_training_are_avoided(monkeypatch):
    to_q = lambda q, width=128: quantize_linear(torch.nn.Linear(width, 64).bfloat16(), q).weight
    assert to_q("qfloat8").activation_qtype is not None and to_q("qfloat8").to("cpu", copy=True).activation_qtype is not None
    assert [to_q("qint4", w)._group_size for w in (128, 256, 96)] == [64, 64, 32]
    assert type(to_q("qint4")).__name__ == "WeightQBitsTensor"
    import bitsandbytes.nn.modules as bnb
    monkeypatch.setattr(bnb, "has_avx512bf16", lambda: True)
    nf4 = quantize_linear(torch.nn.Linear(128, 64).bfloat16(), "nf4")
    assert not nf4.support_avx512bf16_for_cpu, "repacked weights give no gradients"


def test_torchao_changes_no_global_settings():
    import torch._inductor.config as inductor
    now = lambda: (torch.get_float32_matmul_precision(), inductor.coordinate_descent_tuning, inductor.force_fuse_int_mm_with_mul)
    before = now()
    transformer("int8"), transformer("float8")
    assert now() == before


# --- moving, dropping, offloading
@pytest.mark.parametrize("q, offloaded", slow_except([(None, True)], [(None, True), ("nf4", False), ("qfloat8", False), ("int8", False)]))
def test_a_dropped_component_is_freed(q, offloaded):
    parts = Components(str(FOLDER), quantize=dict(text_encoder=q), offload=["text_encoder"] if offloaded else ())
    part = parts.move("text_encoder", "cpu")
    assert parts.move("text_encoder", torch.device("cpu")) is part and device_of(part) == torch.device("cpu")
    alive, size = weakref.ref(part), held_bytes(part)
    del part
    parts.drop("text_encoder")
    gc.collect()
    assert alive() is None and (offloaded or size > 0)


@pytest.mark.parametrize("variant", ["2511", pytest.param("v1", marks=pytest.mark.slow)])
def test_an_offloaded_encoder_gives_the_same_embeddings(variant):
    plain, offloaded = (load("text_encoder", folder=tiny_folder(variant)) for _ in range(2))
    for prompt in ("make it blue", "", "a much longer prompt than the others were"):
        a, b = (embed(te, prompt, variant, share_prefix=bool(prompt)) for te in (plain, offload(offloaded, "cpu"))) # again each time
        assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert all(p.is_meta for p in offloaded.parameters())


@pytest.mark.slow
def test_precompute_with_an_offloaded_encoder_makes_the_same_cache(pairs, tmp_path, built):
    root = pairs()
    offloaded = trainer_for(root, tmp_path, text_encoder_offload=True)
    assert offloaded.cache_embeddings().encoded == 3 and offloaded.qwen_vl is None
    built.clear()
    plain = trainer_for(root, tmp_path)
    report = plain.cache_embeddings()
    assert (report.encoded, report.reused) == (0, 3) and not built
    a, b = (t.predict(Image.new("RGB", (40, 30), "red"), "x", num_inference_steps=2).astype(int) for t in (offloaded, plain))
    assert abs(a - b).max() <= 1


def test_the_quantization_is_part_of_the_encoders_identity():
    suffix = lambda q: Components(str(FOLDER), quantize=dict(text_encoder=q)).identity()["text_encoder"].rsplit("-", 1)[1]
    assert [suffix(q) for q in (None, False, "none")] == ["plain"] * 3 and suffix(True) == suffix("qfloat8") == "qfloat8" and suffix("nf4") == "nf4"
