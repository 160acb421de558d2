"""Quantized bases: near the plain one, trained with float32 adapters, streamed in to the last bit, refused before a weight is read; the offloaded encoder."""
import gc, json, shutil, subprocess, sys, weakref
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from qie_nb.models import components as models

from qie_nb.models import quantize as rooms
from qie_nb.config import LoraSection
from qie_nb.encoding.prompts import encode_prompt
from qie_nb.lora.adapters import add_lora, assert_float32, load_lora, lora_parameters, lora_state, save_lora
from qie_nb.models.components import Components, device_of, load_component, offload
from qie_nb.models.quantize import QUANTIZATIONS, check_torchao, check_quantization, held_bytes, quantizable_layers, quantize
from qie_nb.models.loading import load_quantized
from qie_nb.tiny.random_models import tiny_folder, tiny_pipeline
from qie_nb.trainer import QwenImageEditTrainer
from helpers import TEXT, TRANSFORMER, VAE, settings, write_pairs

ROOT = Path(__file__).parents[2]
COMPILED = pytest.param("qint4", marks=pytest.mark.slow) # half a minute of compiling on first use
ALL = [*(k for k in QUANTIZATIONS if k != "qint4"), COMPILED]
FAR = dict(qfloat8=0.03, qint8=0.005, qint4=0.08, nf4=0.1, int8=0.005, float8=0.03, fp8_storage=0.03) # of the plain output's norm
kinds = pytest.mark.parametrize("kind", ALL)


def inputs(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g).to(dtype)
    return dict(hidden_states=draw(1, 32, 64), encoder_hidden_states=draw(1, 7, 64), timestep=torch.tensor([0.5], dtype=dtype),
                img_shapes=[[(1, 4, 4), (1, 4, 4)]], return_dict=False)


def transformer(kind=None, dtype=torch.float32): return quantize(load_component(tiny_folder("2511"), "transformer", dtype), kind)
def run(tr, dtype=torch.float32): return tr(**inputs(dtype))[0].float()
def distance(a, b): return ((a - b).norm() / b.norm()).item()


def gradients(tr, dtype=torch.float32):
    for p in lora_parameters(tr): p.grad = None
    run(tr, dtype).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in lora_parameters(tr)])


def adapted(kind=None, dtype=torch.float32):
    "With an adapter whose B is not zero, so that A has a gradient too."
    tr = add_lora(transformer(kind, dtype), LoraSection(r=4, lora_alpha=8))
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for n, p in tr.named_parameters():
            if "lora_B" in n: p.copy_(torch.randn(p.shape, generator=g) * 0.1)
    return tr


# --- what it computes
@kinds
def test_near_the_plain_base(kind):
    with torch.no_grad(): plain, got = run(transformer()), run(transformer(kind))
    assert 1e-4 < distance(got, plain) < FAR[kind]


@kinds
def test_the_text_encoder_too(kind):
    picture, (processor, variant) = Image.effect_noise((84, 84), 80).convert("RGB"), (load_component(tiny_folder("2511"), "processor"), models.VARIANTS["2511"])
    embed = lambda te: encode_prompt(te, processor, variant, "make it blue", [picture])[0].float()
    for dtype in (torch.float32, torch.bfloat16):
        got = quantize(load_component(tiny_folder("2511"), "text_encoder", dtype), kind)
        assert not any(".visual." in n or "lm_head" in n for n, m in got.named_modules() if type(m) is not torch.nn.Linear and hasattr(m, "in_features"))
        e = encode_prompt(got, processor, variant, "make it blue", [picture])[0]
        assert e.dtype == dtype, "an embedding keeps the dtype of training, not the weights'"
    assert 1e-4 < distance(embed(quantize(load_component(tiny_folder("2511"), "text_encoder"), kind)), embed(load_component(tiny_folder("2511"), "text_encoder"))) < 2 * FAR[kind]


# --- what it trains
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear") # of merging
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_float32_and_get_the_gradients_of_the_plain_base(kind, dtype):
    tr = adapted(kind, dtype).train()
    assert_float32(tr)
    assert all(".lora_" in n for n, p in tr.named_parameters() if p.requires_grad)
    g = gradients(tr, dtype)
    tr.enable_gradient_checkpointing()
    again = gradients(tr, dtype)
    tr.eval()
    with torch.no_grad(): run(tr, dtype) # an evaluation in between
    torch.optim.AdamW(lora_parameters(tr), lr=1e-3).step()
    assert_float32(tr.train())
    plain = gradients(adapted(None, dtype), dtype)
    assert torch.equal(g, again)
    assert torch.nn.functional.cosine_similarity(g, plain, dim=0) > 0.97 and 0.9 < g.norm() / plain.norm() < 1.1
    assert gradients(tr, dtype).norm() > 0.5 * plain.norm(), "training goes on after an evaluation"


@kinds
def test_an_adapter_is_loaded_with_the_digits_that_the_plain_base_gives_it(kind, tmp_path):
    file = save_lora(adapted(), tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        tr, plain = transformer(kind, dtype), transformer(None, dtype)
        for t in (tr, plain): load_lora(t, file, trainable=True)
        assert_float32(tr)
        got, want = lora_state(tr), load_file(file) if dtype == torch.float32 else lora_state(plain)
        assert want.keys() == got.keys() and all(torch.equal(v, want[k]) for k, v in got.items())


@pytest.fixture(scope="module")
def trained_set(tmp_path_factory):
    root = tmp_path_factory.mktemp("set")
    pairs = write_pairs(root/"set", ((48, 32), (32, 48), (40, 40)))
    QwenImageEditTrainer(settings(pairs, root)).cache_embeddings()
    return pairs, root


@kinds
def test_a_run_and_its_lora_on_the_plain_base(kind, trained_set, tmp_path):
    import diffusers
    pairs, root = trained_set
    config = settings(pairs, tmp_path, cache=dict(cache_dir=str(root/"cache")), train=dict(max_train_steps=4))
    config["model"]["quantize"] = kind
    trainer = QwenImageEditTrainer(config).fit()
    assert trainer.global_step == 4 and trainer.state.loss.isfinite()
    assert_float32(trainer.transformer)
    assert not quantizable_layers(trainer.transformer), "every inner layer is quantized"
    state = lora_state(trainer.transformer)
    assert all(v.isfinite().all() for v in state.values()) and any(v.abs().max() > 0 for k, v in state.items() if "lora_B" in k)
    path = trainer.save_lora(tmp_path/"lora")
    ours, pipe = transformer(), diffusers.QwenImageEditPlusPipeline.from_pretrained(tiny_folder("2511"))
    load_lora(ours, path)
    pipe.load_lora_weights(path.parent)
    pipe.transformer.eval()
    with torch.no_grad(): a, b, plain = run(ours), run(pipe.transformer), run(transformer())
    assert torch.equal(a, b) and not torch.equal(a, plain)
    image = trainer.predict(Image.new("RGB", (40, 30), "red"), "x", num_inference_steps=2)
    assert image.std() > 0


# --- streamed
def sharded(tmp_path, name, cls, dtype=torch.bfloat16):
    "A component of the tiny model in shards, as diffusers and transformers write them."
    model = cls.from_pretrained(tiny_folder("2511")/name).to(dtype)
    model.save_pretrained(tmp_path/name, max_shard_size="300KB" if name == "transformer" else "60KB")
    assert len(list((tmp_path/name).glob("*.safetensors"))) > 2
    return tmp_path/name


def same_tensors(a, b):
    plain = lambda m: {n: p for n, t in (*m.named_parameters(), *m.named_buffers()) for i, p in enumerate(rooms.plain_tensors(t)) for n in [f"{n}.{i}"]}
    x, y = plain(a), plain(b)
    return x.keys() == y.keys() and all(v.dtype == y[n].dtype and torch.equal(v.view(torch.uint8) if v.ndim else v, y[n].view(torch.uint8) if v.ndim else y[n]) for n, v in x.items())


@pytest.mark.parametrize("kind", [None, *ALL])
@pytest.mark.parametrize("name, cls", [("transformer", QwenImageTransformer2DModel), ("text_encoder", Qwen2_5_VLForConditionalGeneration)])
def test_streamed_is_loaded_then_quantized(kind, name, cls, tmp_path):
    folder = sharded(tmp_path, name, cls)
    for dtype in (torch.bfloat16, torch.float32):
        kw = {"dtype" if name == "text_encoder" else "torch_dtype": dtype}
        loaded = quantize(cls.from_pretrained(folder, **kw).requires_grad_(False).eval(), kind)
        streamed = load_quantized(cls, folder, kind, dtype)
        assert same_tensors(loaded, streamed) and not streamed.training and not any(p.requires_grad for p in streamed.parameters())
        assert [n for n, _ in loaded.named_modules()] == [n for n, _ in streamed.named_modules()]
        if name == "transformer":
            with torch.no_grad(): assert torch.equal(run(loaded, dtype), run(streamed, dtype))
        else:
            processor, picture = load_component(tiny_folder("2511"), "processor"), Image.effect_noise((84, 84), 80).convert("RGB")
            a, b = (encode_prompt(m, processor, models.VARIANTS["2511"], "x", [picture])[0] for m in (loaded, streamed))
            assert torch.equal(a, b)


def test_the_vae_streams_too():
    a, b = AutoencoderKLQwenImage.from_pretrained(tiny_folder("2511")/"vae").eval(), load_quantized(AutoencoderKLQwenImage, tiny_folder("2511")/"vae")
    assert same_tensors(a, b)


def test_names_of_a_newer_text_encoder(tmp_path):
    "A checkpoint whose tensors are called as the modules are."
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_folder("2511")/"text_encoder")
    folder = shutil.copytree(tiny_folder("2511")/"text_encoder", tmp_path/"text_encoder")
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, folder/"model.safetensors")
    with safe_open(folder/"model.safetensors", "pt") as f: assert "model.language_model.norm.weight" in f.keys()
    assert same_tensors(model, load_quantized(Qwen2_5_VLForConditionalGeneration, folder))


def test_tied_weights(tmp_path):
    folder = shutil.copytree(tiny_folder("2511")/"text_encoder", tmp_path/"text_encoder")
    config = json.loads((folder/"config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (folder/"config.json").write_text(json.dumps(config))
    weights = load_file(folder/"model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder/"model.safetensors")
    te = load_quantized(Qwen2_5_VLForConditionalGeneration, folder, "qint8")
    assert te.lm_head.weight is te.model.language_model.embed_tokens.weight


def test_a_missing_shard_is_named(tmp_path):
    folder = sharded(tmp_path, "transformer", QwenImageTransformer2DModel)
    (gone := sorted(folder.glob("*.safetensors"))[1]).unlink()
    with pytest.raises(FileNotFoundError, match=f"{gone.name} is missing in .* but its index names it; copy the model again"): load_quantized(QwenImageTransformer2DModel, folder)


def memory(tmp_path, *args):
    if not Path("/proc/self/status").exists() or "RssAnon" not in Path("/proc/self/status").read_text(): pytest.skip("the system does not tell anonymous memory")
    out = tmp_path/"memory.json"
    subprocess.run([sys.executable, ROOT/"benchmarks"/"quantize.py", "memory", "--out", out, *args], check=True, capture_output=True, cwd=ROOT)
    rows = json.loads(out.read_text())["memory"]["rows"]
    for name, r in rows.items(): assert r["peak"] <= 1.1 * (r["largest_shard"] + r["held"]) or "from_pretrained" in name, (name, r)
    return rows


def test_a_streamed_checkpoint_is_never_in_memory_whole(tmp_path):
    row = memory(tmp_path, "--gb", "0.3", "--kinds", "qfloat8")["qfloat8"]
    assert row["held"] < row["peak"] < 0.9 * row["checkpoint"] and row["largest_shard"] < 0.3 * row["checkpoint"], "and the measure sees what is held"


@pytest.mark.slow
def test_two_gigabytes_of_each_kind(tmp_path):
    assert memory(tmp_path, "--gb", "2").keys() > QUANTIZATIONS.keys()


# --- refused before a weight is read
@pytest.fixture
def nothing_read(monkeypatch):
    def fail(*a, **kw): raise AssertionError("weights were read")
    monkeypatch.setattr(models, "load_component", fail)


def lacking(*names): return lambda m: m.setattr(rooms, "library_version", lambda lib, real=rooms.library_version: None if lib in names else real(lib))
def versions(**have):
    def change(m):
        text = lambda n, real=rooms.version: have.get(n) or real(n)
        m.setattr(rooms, "version", text)
    return change
def without(*tools): return lambda m: m.setattr(shutil, "which", lambda n, path=None, real=shutil.which: None if n in tools else real(n, path=path))
def gpu(capability):
    def change(m):
        m.setattr(torch.cuda, "get_device_capability", lambda d=None: capability)
        m.setattr(torch.cuda, "get_device_name", lambda d=None: "Tesla M60")
    return change
def both(*changes): return lambda m: [c(m) for c in changes]


REFUSED = [
    ("qint8", "cpu", lacking("optimum-quanto"),
     "`model.quantize` qint8 needs optimum-quanto, which is not installed; pip install optimum-quanto, or use fp8_storage, which needs no package"),
    ("nf4", "cpu", lacking("bitsandbytes"), "`model.quantize` nf4 needs bitsandbytes, which is not installed; pip install bitsandbytes, or use qfloat8"),
    ("float8", "cpu", lacking("torchao"),
     "`model.quantize` float8 needs torchao, which is not installed; pip install torchao, or use fp8_storage, which needs no package"),
    ("int8", "cpu", versions(torchao="0.10.0+cu124", peft="0.19.1"),
     "torchao 0.10.0+cu124 is installed, and peft 0.19.1 fails on every LoRA with it; pip install -U torchao, or pip uninstall -y torchao if nothing needs it"),
    ("int8", "cpu", versions(torchao="0.15.0", peft="0.18.0"),
     "`model.quantize` int8 needs torchao >= 0.16, got 0.15.0; pip install -U torchao, or use fp8_storage, which needs no package"),
    ("float8", "cpu", versions(peft="0.18.0"),
     "`model.quantize` float8 needs peft >= 0.19, got 0.18.0; pip install -U peft, or use fp8_storage, which needs no package"),
    ("qint4", "cpu", without("ninja"), "`model.quantize` qint4 compiles a part of quanto on first use and needs ninja, not found here; "
     "pip install ninja, install the compilers (g++; on a GPU the CUDA toolkit), or use nf4"),
    ("qint4", "cpu", without("ninja", "g++", "c++"), "`model.quantize` qint4 compiles a part of quanto on first use and needs ninja and g++, not found here; "
     "pip install ninja, install the compilers (g++; on a GPU the CUDA toolkit), or use nf4"),
    ("qint4", "cuda", without("nvcc"), "`model.quantize` qint4 compiles a part of quanto on first use and needs nvcc, not found here; "
     "pip install ninja, install the compilers (g++; on a GPU the CUDA toolkit), or use nf4"),
    ("qfloat8", "mps", both(), "`model.quantize` qfloat8 stores weights in float8, which mps does not support; use qint8"),
    ("fp8_storage", "mps", both(), "`model.quantize` fp8_storage stores weights in float8, which mps does not support; use qint8"),
    ("nf4", "mps", both(), "`model.quantize` nf4 runs on cpu and cuda, got mps; use qint8"),
    ("nf4", "cuda", gpu((5, 2)), "`model.quantize` nf4 needs a GPU of compute capability 6.0 or higher, got Tesla M60; use qint8")]


@pytest.mark.parametrize("kind, device, change, sentence", REFUSED, ids=[f"{k}-{d}-{n}" for n, (k, d, *_) in enumerate(REFUSED)])
def test_refused_before_a_weight_is_read(kind, device, change, sentence, monkeypatch, nothing_read):
    parts = Components(str(tiny_folder("2511")), devices=dict(transformer=device), quantize=dict(transformer=kind))
    with pytest.raises(AssertionError, match="weights were read"): Components(str(tiny_folder("2511"))).get("transformer") # the guard works
    change(monkeypatch)
    for ask in (lambda: parts.get("transformer"), lambda: parts.check("transformer"), parts.check):
        with pytest.raises(ValueError) as e: ask()
        assert str(e.value) == sentence


def test_what_is_set_after_the_constructor_is_looked_at_too(monkeypatch, nothing_read, pairs, tmp_path):
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path))
    trainer.quantize = "nf4"
    lacking("bitsandbytes")(monkeypatch)
    with pytest.raises(ValueError, match="`model.quantize` nf4 needs bitsandbytes"): trainer.set_lora()


def test_a_text_encoder_that_cannot_be_quantized_is_told_before_the_vae_is_built(monkeypatch, pairs, tmp_path, built):
    config = settings(pairs(), tmp_path)
    config["model"]["text_encoder_quantize"] = "nf4"
    lacking("bitsandbytes")(monkeypatch)
    with pytest.raises(ValueError, match="`model.text_encoder_quantize` nf4 needs bitsandbytes"): QwenImageEditTrainer(config).cache_embeddings()
    assert not built


def test_quantized_in_memory_is_looked_at_too(monkeypatch):
    tr = transformer()
    lacking("torchao")(monkeypatch)
    with pytest.raises(ValueError, match="int8 needs torchao"): quantize(tr, "int8")
    assert type(tr.transformer_blocks[0].attn.to_q) is torch.nn.Linear


def test_a_clash_that_nobody_asked_for(monkeypatch):
    check_torchao()
    assert check_quantization("none") is None and check_quantization(True) == "qfloat8"
    versions(torchao="0.10.0", peft="0.21.2")(monkeypatch)
    with pytest.raises(ValueError, match="torchao 0.10.0 is installed, and peft 0.21.2 fails on every LoRA with it"): check_torchao()
    assert check_quantization("nf4") == "nf4", "bitsandbytes itself does not mind"
    versions(torchao="0.10.0", peft="0.18.0")(monkeypatch)
    check_torchao()


def test_kernels_that_do_not_suit_training_are_never_taken(monkeypatch):
    "Marlin wants weights without a note on activations, tinygemm and AWQ groups of 128; bitsandbytes packs weights on CPUs with AVX512-BF16."
    to_q = lambda kind, width=128: rooms.quantize_linear(torch.nn.Linear(width, 64).bfloat16(), kind).weight
    assert to_q("qfloat8").activation_qtype is not None and to_q("qfloat8").to("cpu", copy=True).activation_qtype is not None
    assert [to_q("qint4", w)._group_size for w in (128, 256, 96)] == [64, 64, 32]
    assert type(to_q("qint4")).__name__ == "WeightQBitsTensor"
    import bitsandbytes.nn.modules as bnb
    monkeypatch.setattr(bnb, "has_avx512bf16", lambda: True)
    nf4 = rooms.quantize_linear(torch.nn.Linear(128, 64).bfloat16(), "nf4")
    assert not nf4.support_avx512bf16_for_cpu, "weights packed in an evaluation give no gradients"


def test_torchs_settings_are_left_alone():
    import torch._inductor.config as inductor
    now = lambda: (torch.get_float32_matmul_precision(), inductor.coordinate_descent_tuning, inductor.force_fuse_int_mm_with_mul)
    was = now()
    transformer("int8"), transformer("float8")
    assert now() == was


# --- held and let go
@pytest.mark.parametrize("kind, away", [(None, True), *((k, False) for k in (None, *QUANTIZATIONS) if k != "qint4")])
def test_moved_and_let_go(kind, away):
    parts = Components(str(tiny_folder("2511")), quantize=dict(text_encoder=kind), offload=["text_encoder"] if away else ())
    part = parts.move("text_encoder", "cpu")
    assert parts.move("text_encoder", torch.device("cpu")) is part and device_of(part) == torch.device("cpu")
    if not away: part.to("cpu")
    alive = weakref.ref(part)
    size = held_bytes(part)
    del part
    parts.drop("text_encoder")
    gc.collect()
    assert alive() is None and (away or size > 0)


# --- offloaded
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("variant", ["v1", "2511"])
def test_an_offloaded_encoder_gives_the_same_bits(shared, variant):
    folder, picture = tiny_folder(variant), Image.effect_noise((84, 112), 80).convert("RGB")
    processor, plain = load_component(folder, "processor"), load_component(folder, "text_encoder")
    away = offload(load_component(folder, "text_encoder"), "cpu")
    assert all(p.is_meta for p in away.parameters())
    for prompt in ("make it blue", "", "a much longer prompt than the others were"):
        a, b = (encode_prompt(te, processor, models.VARIANTS[variant], prompt, [picture], share_prefix=shared)[0] for te in (plain, away))
        assert torch.equal(a, b)
        assert all(p.is_meta for p in away.parameters()), "nothing stays behind"
    again = encode_prompt(offload(away, "cpu"), processor, models.VARIANTS[variant], prompt, [picture], share_prefix=shared)[0]
    assert torch.equal(a, again), "a second placing"


def test_precomputed_with_an_offloaded_encoder_is_the_same_cache(pairs, tmp_path, built):
    config = settings(root := pairs(), tmp_path)
    config["model"]["text_encoder_offload"] = True
    away = QwenImageEditTrainer(config)
    assert away.cache_embeddings().encoded == 3 and away.qwen_vl is None
    built.clear()
    report = QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings()
    assert (report.encoded, report.reused) == (0, 3) and not built
    image = away.predict(Image.new("RGB", (40, 30), "red"), "x", num_inference_steps=2)
    plain = QwenImageEditTrainer(settings(root, tmp_path)).predict(Image.new("RGB", (40, 30), "red"), "x", num_inference_steps=2)
    assert (image == plain).all()


def test_offloaded_and_quantized_do_not_go_together(pairs, tmp_path, built):
    config = settings(pairs(), tmp_path)
    config["model"] |= dict(text_encoder_offload=True, text_encoder_quantize="qint8")
    sentence = "`model.text_encoder_quantize` qint8 is incompatible with `model.text_encoder_offload`, which moves unquantized layers; choose one of them"
    with pytest.raises(ValueError) as e: QwenImageEditTrainer(config).cache_embeddings()
    assert str(e.value) == sentence and not built


def test_the_kind_is_part_of_an_encoders_identity():
    who = lambda kind: Components(str(tiny_folder("2511")), quantize=dict(text_encoder=kind)).identity()["text_encoder"].rsplit("-", 1)[1]
    assert [who(k) for k in (None, False, "none")] == ["plain"] * 3 and who(True) == who("qfloat8") == "qfloat8" and who("nf4") == "nf4"
