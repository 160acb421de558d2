"""The prequantized copy: the model that quantizing while loading gives, with the checkpoint's identity."""
import json, shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from diffusers import QwenImageTransformer2DModel
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from qie_nb import cli
from qie_nb.cache import EmbeddingCacheManager
from qie_nb.config import make_config
from qie_nb.lora.adapters import lora_parameters
from qie_nb.models import prequantize
from qie_nb.models.components import component_digest, load_component
from qie_nb.models.hub import LocalShards, base_digest
from qie_nb.models.loading import load_quantized, source_checkpoint
from qie_nb.models.modulation import model_timesteps, training_times
from qie_nb.models.prequantize import quantize_checkpoint
from qie_nb.planning.disk_space import disk_plan
from qie_nb.planning.memory import memory_query
from qie_nb.planning.cards import plan
from qie_nb.sampling.denoising import sampling_schedule
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from helpers import adapters_close, interrupted, modulation_reads, on_call, settings, slow_except
from test_quantize import CLASSES, LOADED, narrow, run, same_tensors, sharded # noqa: F401 (fixtures)

SETS = [(0.,), training_times(torch.float32)[::100]]


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch): monkeypatch.setenv("QIE_NB_HOME", str(tmp_path/"home"))


def transformer_copy(folder, out, q="nf4", dtype=torch.float32, sets=SETS, **kw): # folder, or its `counted` files
    shards = folder if isinstance(folder, LocalShards) else LocalShards(folder)
    return quantize_checkpoint(QwenImageTransformer2DModel, shards, out/"transformer", q, dtype, sets=sets, **kw)


def contents(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_an_identity_is_of_words_and_settings_and_not_of_who_wrote_them(tmp_path):
    model = shutil.copytree(tiny_folder("2511"), tmp_path/"model")
    config = model/"vae"/"config.json"
    settings = json.loads(config.read_text())

    def with_settings(**more) -> str:
        config.write_text(json.dumps(settings | more))
        return component_digest(model, "vae")
    first = with_settings()
    assert with_settings(_diffusers_version="9.9", _name_or_path="/home/me/vae", torch_dtype="bfloat16") == first
    assert with_settings(num_res_blocks=7) != first
    words = [component_digest(model, "tokenizer")]
    for name in ("vocab.json", "merges.txt"):
        (model/"tokenizer"/name).write_text("other words")
        words.append(component_digest(model, "tokenizer"))
    assert len(set(words)) == 3


@pytest.mark.parametrize("name, dtype, q", slow_except(
    [("transformer", torch.bfloat16, "nf4"), ("text_encoder", torch.float32, "qint8")], [c for c in LOADED if c[2] not in (None, "qint4")]))
def test_a_component_is_the_one_that_load_quantized_gives(name, dtype, q, sharded, tmp_path):
    out = quantize_checkpoint(CLASSES[name], LocalShards(sharded/name), tmp_path/name, q, dtype, hash_files=True, part_bytes=100_000)
    assert len(list(out.glob("part-*"))) > 3 and not list(out.glob("left-*"))
    a, b = load_quantized(CLASSES[name], sharded/name, q, dtype), load_quantized(CLASSES[name], out, q, dtype)
    assert same_tensors(a, b) and not b.training and not any(p.requires_grad for p in b.parameters())
    assert [(n, type(m)) for n, m in a.named_modules()] == [(n, type(m)) for n, m in b.named_modules()]
    assert component_digest(tmp_path, name) == component_digest(sharded, name)
    if name == "transformer":
        assert base_digest(tmp_path) == base_digest(sharded)
        with torch.no_grad(): assert_close(run(a, dtype), run(b, dtype), rtol=1e-4, atol=1e-5)


def test_plain_weights_are_as_narrow_as_in_the_checkpoint_and_nf4_serves_both_dtypes(narrow, tmp_path):
    out = transformer_copy(narrow/"transformer", tmp_path, dtype=torch.bfloat16, sets=None)
    assert {t.dtype for p in out.glob("part-*") for n, t in load_file(p).items() if n == "img_in.weight"} == {torch.bfloat16}
    to_q = load_quantized(QwenImageTransformer2DModel, out, "nf4", torch.float32).transformer_blocks[0].attn.to_q
    assert to_q.compute_dtype == to_q.weight.quant_state.dtype == torch.float32 and to_q(torch.randn(1, 96)).dtype == torch.float32


def counted(folder):
    "The files of a folder, and in `asked` those that are requested; only one may be held at once."
    shards = LocalShards(folder)
    shards.asked, shards.held, get = [], [], shards.get
    def ask(name):
        assert not shards.held
        shards.asked.append(name), shards.held.append(name)
        return get(name)
    shards.get, shards.release = ask, lambda name: shards.held.clear()
    return shards


@pytest.mark.bits
@pytest.mark.parametrize("step", slow_except([40], [40, 5]))
def test_an_interrupted_call_continues_after_the_last_finished_file(step, sharded, tmp_path):
    def job(out):
        shards = counted(sharded/"transformer")
        return contents(transformer_copy(shards, out, part_bytes=60_000)), shards
    with mock.patch.object(prequantize, "write_atomic", wraps=prequantize.write_atomic) as write: whole, shards = job(tmp_path/"whole")
    assert sorted(shards.asked) == sorted(shards.names) and not shards.held
    for stop in (*range(step // 2, write.call_count, step), write.call_count):
        out = tmp_path/f"cut{stop}"
        with interrupted(prequantize, "write_atomic", stop): job(out)
        assert not (out/"transformer").exists(), "the folder appears when it is complete"
        progress = out/".transformer.partial"/"progress.json"
        done = len(json.loads(progress.read_text())["done"]) if progress.is_file() else 0
        again, shards = job(out)
        assert again == whole and len(shards.asked) == 13 - done and not list(out.glob(".*"))
    assert done == 13
    with interrupted(EmbeddingCacheManager, "save_cache", 3, lambda cache, kind, key, rows, parts: parts["base"]): job(tmp_path/"rows") # while they are packed
    assert job(tmp_path/"rows")[0] == whole


@pytest.mark.bits
@pytest.mark.slow
def test_another_checkpoint_in_an_interrupted_folder_starts_again(sharded, tmp_path):
    other = shutil.copytree(sharded/"transformer", tmp_path/"other")
    data = (file := min(other.glob("*.safetensors"))).read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with interrupted(prequantize, "_save_progress", 6): transformer_copy(sharded/"transformer", tmp_path/"a")
    transformer_copy(other, tmp_path/"a"), transformer_copy(other, tmp_path/"b")
    assert contents(tmp_path/"a") == contents(tmp_path/"b")


def test_a_missing_tensor_is_named(sharded, tmp_path):
    folder = shutil.copytree(sharded/"transformer", tmp_path/"transformer")
    file = sorted(folder.glob("*.safetensors"))[3]
    save_file({k: t for k, t in load_file(file).items() if not k.endswith(".weight")}, file)
    with pytest.raises(ValueError, match="the weights in .* lack "): transformer_copy(folder, tmp_path/"out", sets=None)
    assert not (tmp_path/"out"/"transformer").exists()


# --- save_prequantized
def configured(root, tmp_path, name, folder, train={}, cache={}, **model):
    quantized = {} if (Path(folder)/"prequantized.json").is_file() else dict(quantize="nf4", text_encoder_quantize="nf4")
    return settings(root, tmp_path/name, model=dict(pretrained_model_name_or_path=str(folder)) | quantized | model,
                    train=dict(max_train_steps=2, save_steps=2) | train, cache=cache)


def trainer(*args, **kw): return QwenImageEditTrainer(configured(*args, **kw))


@pytest.fixture(scope="module")
def copied(sharded, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("copied")
    return trainer(tmp, tmp, "full", sharded).save_prequantized(tmp/"copy", part_bytes=100_000)


@pytest.mark.slow
def test_a_copy_replaces_the_model_from_precompute_to_resume(sharded, copied, pairs, tmp_path, capsys):
    state = lambda: {p: (p.stat().st_ino, p.stat().st_mtime_ns, p.stat().st_size) for p in [copied, *copied.rglob("*")]}
    root, before = pairs(), state()
    full, small = trainer(root, tmp_path, "full", sharded), trainer(root, tmp_path, "small", copied)
    assert small.quantize == small.components.quantize["text_encoder"] == "nf4"
    for t in (full, small): t.cache_embeddings(), t.fit()
    capsys.readouterr()
    adapters_close(full, small)
    assert not any("_mod." in k for p in copied.glob("transformer/part-*") for k in load_file(p))
    for times in SETS: assert_close(*(t.modulation_table.rows(times) for t in (small, full)), rtol=1e-4, atol=1e-5)
    assert full.checkpoints.fingerprint == small.checkpoints.fingerprint
    entries = lambda n: {(kind, key) for _, kind, key, _ in EmbeddingCacheManager(tmp_path/n/"cache").entries() if n == "small" or kind != "modulation"}
    assert entries("full") == entries("small") and len(entries("full")) > 6, "and no modulation: the table is read from the copy"
    a, b = (t.predict(Image.new("RGB", (40, 30), "red"), "x", num_inference_steps=2, seed=1) for t in (full, small))
    assert a.std() > 0 and (abs(a.astype(int) - b) <= 2).mean() > 0.9 and "is not in the modulation table" not in capsys.readouterr().out, "timesteps that differ by rounding"
    more = dict(max_train_steps=4, resume_checkpoint="latest")
    adapters_close(*(trainer(root, tmp_path, "full", m, more).fit() for m in (copied, sharded)))
    assert state() == before


@pytest.mark.slow
def test_a_copy_without_encoders_trains_from_a_packed_cache(sharded, pairs, tmp_path):
    root = pairs()
    full = trainer(root, tmp_path, "full", sharded, modulation_table_steps=[2])
    full.cache_embeddings()
    EmbeddingCacheManager(str(tmp_path/"full"/"cache")).pack(tmp_path/"packed")
    copy = full.save_prequantized(tmp_path/"copy", encoders=False)
    assert not (copy/"vae").exists() and not (copy/"text_encoder").exists()
    small = trainer(root, tmp_path, "small", copy, cache=dict(cache_dir=str(tmp_path/"packed"))).fit()
    adapters_close(full.fit(), small)
    assert sorted(small.components.built) == ["scheduler", "transformer"]
    times = model_timesteps(sampling_schedule(small.components.get("scheduler"), 2, 4 * 4).timesteps, small.modulation_table.dtype)
    small.modulation_table.ensure(times)
    assert not small.modulation_table.missing(times), "configured schedules are in the copy"
    layers = trainer(root, tmp_path, "layers", sharded, modulation_table=False).save_prequantized(tmp_path/"layers copy", encoders=False)
    small = trainer(root, tmp_path, "on layers", layers, lora=dict(r=4, target_modules=["img_mod.1"])).set_lora()
    assert not source_checkpoint(layers/"transformer")["table"] and small.modulation_table is None


def test_a_copy_with_its_layers_needs_no_table(sharded, tmp_path, capsys):
    layers = trainer(tmp_path, tmp_path, "full", sharded, modulation_table=False).save_prequantized(tmp_path/"copy", encoders=False)
    ready = lambda **model: trainer(tmp_path, tmp_path, "run", layers, **model).set_lora().modulation_table
    assert ready() is None and ready(modulation_table=True) is None
    assert "no modulation table: the prequantized copy has none, but the layers" in capsys.readouterr().out
    whole = trainer(tmp_path, tmp_path, "run", sharded).run_table
    rows = whole.make_table()
    assert repr(ready()) == repr(rows), "that of the whole model, from the cache"


@pytest.mark.parametrize("model, sentence", [ # others are in the notebook
    (dict(text_encoder_quantize="qint8"), "is prequantized as nf4, but `model.text_encoder_quantize` is qint8; set it to nf4 or none"),
    (dict(modulation_table=False), "`model.modulation_table` is false.*the prequantized copy "),
    (dict(lora=dict(r=4, target_modules=["to_q", "img_mod.1"])), r"names transformer_blocks.0.img_mod.1.*the prequantized copy ")])
def test_a_copy_cannot_be_used_in_another_form(model, sentence, copied, tmp_path):
    t = trainer(tmp_path, tmp_path, "x", copied, **model)
    with pytest.raises(ValueError, match=sentence): t.components.check(), t.set_lora()


def test_what_cannot_be_copied_is_refused(sharded, copied, tmp_path):
    new = tmp_path/"no"
    for model, changes, folder, sentence in (
            (sharded, {}, copied, "has a complete copy; use another folder"), (copied, {}, new, "is a prequantized copy already"),
            (sharded, dict(quantize="qint4"), new, "cannot be saved; use nf4"),
            (sharded, dict(text_encoder_quantize="none"), new, "`model.text_encoder_quantize` is none")):
        with pytest.raises(ValueError, match=sentence): trainer(tmp_path, tmp_path, "x", model, **changes).save_prequantized(folder)
    assert not new.exists()
    transformer_copy(sharded/"transformer", tmp_path/"q", "qint8", torch.bfloat16, None)
    shutil.copyfile(sharded/"model_index.json", tmp_path/"q"/"model_index.json")
    with pytest.raises(ValueError, match="make the copy again here, or use nf4"):
        load_component(tmp_path/"q", "transformer", torch.float32, quantization="qint8")


def test_a_copy_in_four_bits_fits_each_dtype(sharded, tmp_path):
    transformer_copy(sharded/"transformer", tmp_path/"q", "nf4", torch.bfloat16, None)
    shutil.copyfile(sharded/"model_index.json", tmp_path/"q"/"model_index.json")
    loaded = load_component(tmp_path/"q", "transformer", torch.float32, quantization="nf4")
    assert loaded.proj_out.weight.dtype == torch.float32


def test_the_command_and_the_plan(sharded, pairs, tmp_path, capsys):
    root = pairs()
    (tmp_path/"run.yaml").write_text(yaml.safe_dump(configured(root, tmp_path, "full", sharded)))
    command = ["prequantise", "--config", str(tmp_path/"run.yaml"), "--out", str(tmp_path/"copy")]
    assert cli.main([*command, "--no_encoders"]) == 0 and "prequantized copy: transformer" in capsys.readouterr().out
    own = make_config(configured(root, tmp_path, "x", tmp_path/"copy"))
    assert memory_query(own).quantization == "nf4"
    for p in (plan(own, gpu="2xT4"), plan(str(tmp_path/"copy"), gpu="2xT4")):
        assert {m.query.quantization for m in p.tried} == {"nf4"} and p.changes.get("model", {}).get("quantize") in (None, "nf4")
    assert cli.main(command) == 2, "the folder has a copy"


# --- a bfloat16 checkpoint
def test_a_float32_run_stores_bfloat16_rows_and_reads_each_layer_once(narrow, pairs, tmp_path, monkeypatch):
    t, reads = trainer(pairs(), tmp_path, "run", narrow, quantize="none"), modulation_reads(monkeypatch)
    planned, = (i.bytes for i in disk_plan(t.config).items if i.what == "modulation table")
    table = t.cache_modulation()
    assert (t.weight_dtype, table.dtype, len(table.index)) == (torch.float32, torch.bfloat16, 501)
    assert reads and len(set(reads)) == len(reads)
    written = sum(p.stat().st_size for p in table.cache.cache_dir.glob("modulation/*/*.safetensors"))
    assert abs(planned - written) < 0.01 * written


@pytest.mark.slow
def test_a_gpu_without_bfloat16_uses_the_bfloat16_rows(narrow, pairs, tmp_path, capsys):
    root, fp16 = pairs(), dict(mixed_precision="fp16", gradient_checkpointing=False)
    copy = trainer(root, tmp_path, "full", narrow).save_prequantized(tmp_path/"copy")
    assert source_checkpoint(copy/"transformer")["table_dtype"] == "bfloat16"
    c = configured(root, tmp_path, "small", copy, fp16)
    assert not [i.bytes for i in disk_plan(c).items if i.what == "modulation table" and i.bytes]
    small = QwenImageEditTrainer(c)
    capsys.readouterr()
    small.cache_embeddings(), small.fit()
    table, layers = small.modulation_table, [n for n, _ in small.transformer.named_parameters() if "_mod." in n]
    assert small.weight_dtype == torch.float32 and not layers and (table.dtype, len(table.index)) == (torch.bfloat16, 501)
    assert not (tmp_path/"small"/"cache"/"modulation").exists() and small.global_step == 2
    for t in torch.arange(1, 1001).float():
        small.transformer.lookup.choose(t[None] / 1000, "cpu")
        assert small.transformer.lookup.key[0][:1] == model_timesteps([t], torch.bfloat16)
    assert "nearest" not in capsys.readouterr().out
    wide = trainer(root, tmp_path, "wide", narrow, fp16).fit()
    assert wide.modulation_table.dtype == torch.bfloat16 and len(wide.modulation_table.index) == 501 # the checkpoint's dtype
    a, b = (torch.cat([p.detach().flatten() for p in lora_parameters(t.transformer)]) for t in (small, wide))
    assert torch.isfinite(a).all()
    assert_close(a, b)


def test_too_small_a_disk_is_refused_before_the_first_file(narrow, pairs, tmp_path, monkeypatch):
    dtypes = []
    on_call(monkeypatch, prequantize, "quantized_bytes", lambda *a: dtypes.append(a[3]))
    monkeypatch.setattr(prequantize, "free_bytes", lambda p: 1000)
    monkeypatch.setattr(prequantize, "quantize_checkpoint", lambda *a, **kw: pytest.fail("it started"))
    full = trainer(pairs(), tmp_path, "full", narrow)
    with pytest.raises(OSError, match=r"copy' has 0\.0 MB free, but the copy needs .* \(transformer .*, modulation table .*, text_encoder .*, the table twice"):
        full.save_prequantized(tmp_path/"copy")
    assert full.weight_dtype == torch.float32 and dtypes == [torch.bfloat16] * 2, "sizes are those of the checkpoint's dtype"


class Begun(Exception):
    "A copy is being made."


def test_the_modulation_table_needs_room_twice(sharded, tmp_path, monkeypatch):
    "Its rows are kept one by one, and then packed."
    def begin(*args, **kw): raise Begun
    monkeypatch.setattr(prequantize, "quantize_checkpoint", begin)
    monkeypatch.setattr(prequantize, "quantized_bytes", lambda *args: 1000)
    monkeypatch.setattr(prequantize, "modulation_table_bytes", lambda *args: 500)
    full = trainer(tmp_path, tmp_path, "full", sharded)
    for free, outcome in ((2000, Begun), (1999, OSError)):
        monkeypatch.setattr(prequantize, "free_bytes", lambda path, free=free: free)
        with pytest.raises(outcome):
            full.save_prequantized(tmp_path/"copy", encoders=False)
