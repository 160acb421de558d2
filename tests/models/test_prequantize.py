"""The prequantized copy: what quantizing on the fly gives to the last bit, under the checkpoint's identity, made file by file, interrupted anywhere, read from where nothing can be written."""
import json, os, shutil
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image
from safetensors import safe_open
from transformers import Qwen2_5_VLForConditionalGeneration

from qie_nb import cli

from qie_nb.models import prequantize as prequantized
from qie_nb.models.hub import base_digest
from qie_nb.core.cache_layers import open_layer
from qie_nb.models.modulation import ModulationTable, training_times
from qie_nb.models.components import component_digest, load_component
from qie_nb.planning.plan import plan
from qie_nb.config import make_config
from qie_nb.models.hub import LocalShards
from qie_nb.models.prequantize import quantize_checkpoint
from qie_nb.models.loading import source_checkpoint
from qie_nb.models.loading import load_quantized
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from helpers import adapters_equal, settings
from test_quantize import run, same_tensors

KINDS = ["nf4", "qint8", "qfloat8", "int8", "float8", "fp8_storage"]
SETS = [(0.,), training_times(torch.float32)[::100]]
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch): monkeypatch.setenv("QIE_NB_HOME", str(tmp_path/"home"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    "A model whose components are in many files, cut between a layer's weight and bias, and within a block's modulation."
    from safetensors.torch import load_file, save_file
    root = tmp_path_factory.mktemp("sharded")/"model"
    shutil.copytree(tiny_folder("2511"), root)
    for name in ("transformer", "text_encoder"):
        file = next((root/name).glob("*.safetensors"))
        weights = load_file(file)
        file.unlink()
        keys, n = sorted(weights), 13 # by the alphabet bias comes before weight, and img_mod long before txt_mod
        cuts = [keys[len(keys) * i // n:len(keys) * (i + 1) // n] for i in range(n)]
        names = [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
        for cut, f in zip(cuts, names): save_file({k: weights[k] for k in cut}, root/name/f)
        (root/name/"model.safetensors.index.json").write_text(json.dumps(dict(metadata=dict(total_size=0), weight_map={k: f for cut, f in zip(cuts, names) for k in cut})))
        halves = [k for cut in cuts for k in (cut[-1],) if k.endswith(".bias")]
        assert halves, "a layer is divided over two files"
    return root


CLASSES = dict(transformer=QwenImageTransformer2DModel, text_encoder=Qwen2_5_VLForConditionalGeneration)

@kinds
@pytest.mark.parametrize("name", CLASSES)
def test_a_component_is_the_one_that_is_quantized_on_the_fly(kind, name, sharded, tmp_path):
    for dtype in (torch.bfloat16, torch.float32):
        out = quantize_checkpoint(CLASSES[name], LocalShards(sharded/name), tmp_path/str(dtype)/name, kind, dtype, hash_files=True, part_bytes=100_000)
        assert len(list(out.glob("part-*"))) > 3 and not list(out.glob("left-*"))
        a, b = load_quantized(CLASSES[name], sharded/name, kind, dtype), load_quantized(CLASSES[name], out, kind, dtype)
        assert same_tensors(a, b) and not b.training and not any(p.requires_grad for p in b.parameters())
        assert [(n, type(m)) for n, m in a.named_modules()] == [(n, type(m)) for n, m in b.named_modules()]
        assert component_digest(out.parent, name) == component_digest(sharded, name)
        if name == "transformer":
            assert base_digest(out.parent) == base_digest(sharded)
            with torch.no_grad(): assert torch.equal(run(a, dtype), run(b, dtype))


def test_four_bits_serve_both_dtypes(tmp_path):
    out = quantize_checkpoint(QwenImageTransformer2DModel, LocalShards(tiny_folder("2511")/"transformer"), tmp_path/"transformer", "nf4", torch.bfloat16)
    wide, fly = (load_quantized(QwenImageTransformer2DModel, f, "nf4", torch.float32) for f in (out, tiny_folder("2511")/"transformer"))
    quantized = [n for n, m in fly.named_modules() if type(m).__name__ == "Linear4bit"]
    weights = lambda m, n: m.get_submodule(n).weight
    far = [n for n in quantized if (weights(wide, n) != weights(fly, n)).float().mean() > 0.02]
    assert len(quantized) > 20 and not far, "a checkpoint rounded to bfloat16 falls into another of sixteen values only at the edge"
    to_q = wide.transformer_blocks[0].attn.to_q
    assert to_q.compute_dtype == to_q.weight.quant_state.dtype == torch.float32 and to_q(torch.randn(1, 96)).dtype == torch.float32


def test_what_stays_plain_is_no_wider_than_in_the_checkpoint(tmp_path):
    "A run in float32 on a checkpoint in bfloat16: a T4's."
    model = QwenImageTransformer2DModel.from_pretrained(tiny_folder("2511")/"transformer").to(torch.bfloat16)
    model.save_pretrained(tmp_path/"bf16")
    out = quantize_checkpoint(QwenImageTransformer2DModel, LocalShards(tmp_path/"bf16"), tmp_path/"copy"/"transformer", "nf4", torch.float32)
    with safe_open(next(out.glob("part-*")), "pt") as f: assert f.get_tensor("img_in.weight").dtype == torch.bfloat16
    assert same_tensors(load_quantized(QwenImageTransformer2DModel, tmp_path/"bf16", "nf4", torch.float32), load_quantized(QwenImageTransformer2DModel, out, "nf4", torch.float32))


def table_of_copy(folder, dtype=torch.float32):
    from qie_nb.cache import EmbeddingCacheManager
    return ModulationTable(base_digest(folder), dtype, 2, None, EmbeddingCacheManager([str(folder/"transformer"/"modulation")]))


def test_the_rows_are_those_that_are_computed_from_the_checkpoint(sharded, tmp_path):
    quantize_checkpoint(QwenImageTransformer2DModel, LocalShards(sharded/"transformer"), tmp_path/"transformer", "nf4", torch.float32, sets=SETS, part_bytes=100_000)
    own, shipped = ModulationTable(base_digest(sharded), torch.float32, 2, sharded/"transformer"), table_of_copy(tmp_path)
    for times in SETS:
        assert own.make(times) == 2 and shipped.find(times)
    for t in (*SETS[0], *SETS[1]): assert torch.equal(own.rows([t]), shipped.rows([t]))
    keys = {k for p in (tmp_path/"transformer").glob("part-*") for k in safe_open(p, "pt").keys()}
    assert not any("_mod." in k for k in keys) and "time_text_embed.timestep_embedder.linear_1.weight" in keys


class Counted(LocalShards):
    "Notes which files are asked for, and how many are held."
    def __init__(self, folder):
        super().__init__(folder)
        self.asked, self.held, self.most = [], set(), 0

    def get(self, name):
        self.asked.append(name), self.held.add(name)
        self.most = max(self.most, len(self.held))
        return super().get(name)

    def release(self, name): self.held.discard(name)


def test_each_file_is_asked_for_once_and_none_while_another_is_held(sharded, tmp_path):
    shards = Counted(sharded/"transformer")
    quantize_checkpoint(QwenImageTransformer2DModel, shards, tmp_path/"transformer", "nf4", torch.float32, sets=SETS)
    assert sorted(shards.asked) == sorted(shards.names) and shards.most == 1 and not shards.held


def test_interrupted_after_any_write_it_goes_on_behind_what_is_finished(sharded, tmp_path, monkeypatch):
    bytes_of = lambda d: {p.relative_to(d).as_posix(): p.read_bytes() for p in d.rglob("*") if p.is_file()}
    job = lambda out, shards=None: quantize_checkpoint(QwenImageTransformer2DModel, shards or LocalShards(sharded/"transformer"), out/"transformer", "nf4", torch.float32, sets=SETS, part_bytes=60_000)
    whole, real, writes = bytes_of(job(tmp_path/"whole")), prequantized.write_atomic, []
    monkeypatch.setattr(prequantized, "write_atomic", lambda p, d, real=real: (writes.append(p), real(p, d))[1])
    job(tmp_path/"counted")
    for stop in (*range(1, len(writes), 5), len(writes)):
        out, n = tmp_path/f"cut{stop}", 0
        def killed(path, data):
            nonlocal n
            n += 1
            if n == stop: raise KeyboardInterrupt
            real(path, data)
        monkeypatch.setattr(prequantized, "write_atomic", killed)
        with pytest.raises(KeyboardInterrupt): job(out)
        assert not (out/"transformer").exists(), "it is complete or absent"
        done = len(json.loads((out/".transformer.partial"/"progress.json").read_text())["done"]) if (out/".transformer.partial"/"progress.json").is_file() else 0
        monkeypatch.setattr(prequantized, "write_atomic", real)
        shards = Counted(sharded/"transformer")
        job(out, shards)
        assert len(shards.asked) == 13 - done
        assert bytes_of(out/"transformer") == whole and not list(out.glob(".*"))
    assert done == 13


def test_another_checkpoint_in_an_interrupted_folder_begins_anew(sharded, tmp_path, monkeypatch):
    other = shutil.copytree(sharded/"transformer", tmp_path/"other")
    file = sorted(other.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data), os.utime(file)
    real = prequantized._save_progress
    def stop(work, state, left, number):
        real(work, state, left, number)
        if number == 4: raise KeyboardInterrupt
    monkeypatch.setattr(prequantized, "_save_progress", stop)
    make = lambda folder, out: quantize_checkpoint(QwenImageTransformer2DModel, LocalShards(folder), out, "nf4", torch.float32, sets=SETS)
    with pytest.raises(KeyboardInterrupt): make(sharded/"transformer", tmp_path/"a"/"transformer")
    monkeypatch.setattr(prequantized, "_save_progress", real)
    make(other, tmp_path/"a"/"transformer"), make(other, tmp_path/"b"/"transformer")
    bytes_of = lambda d: {p.relative_to(d).as_posix(): p.read_bytes() for p in d.rglob("*") if p.is_file()}
    assert bytes_of(tmp_path/"a") == bytes_of(tmp_path/"b")


def test_a_checkpoint_that_lacks_a_tensor(sharded, tmp_path):
    from safetensors.torch import load_file, save_file
    folder = shutil.copytree(sharded/"transformer", tmp_path/"transformer")
    file = sorted(folder.glob("*.safetensors"))[3]
    weights = load_file(file)
    gone = sorted(k for k in weights if k.endswith(".weight"))[0]
    del weights[gone]
    save_file(weights, file)
    with pytest.raises(ValueError, match="the weights in .* lack "): quantize_checkpoint(QwenImageTransformer2DModel, LocalShards(folder), tmp_path/"out", "nf4", torch.float32)
    assert not (tmp_path/"out").exists()


def configured(root, tmp_path, name, model, **sections):
    c = settings(root, tmp_path/name, cache=dict(cache_dir=str(tmp_path/name/"cache")), train=dict(output_dir=str(tmp_path/name), max_train_steps=3, save_steps=3), **sections)
    c["model"] |= dict(pretrained_model_name_or_path=str(model)) | ({} if "copy" in str(model) else dict(quantize="nf4", text_encoder_quantize="nf4"))
    return c


def state_of(folder): return {p: (p.stat().st_ino, p.stat().st_mtime_ns, p.stat().st_size) for p in [Path(folder), *Path(folder).rglob("*")]}


def test_the_whole_job_from_the_copy_is_the_job_from_the_model(sharded, pairs, tmp_path):
    "Precompute, train, predict, resume; bit for bit, from a folder in which nothing changes; cache, checkpoint and LoRA change sides."
    root = pairs()
    full = QwenImageEditTrainer(configured(root, tmp_path, "full", sharded, ))
    copy = full.save_prequantized(tmp_path/"copy", part_bytes=100_000)
    before = state_of(copy)
    small = QwenImageEditTrainer(configured(root, tmp_path, "small", copy))
    assert small.quantize == "nf4" and small.components.quantize["text_encoder"] == "nf4"
    for t in (full, small): t.cache_embeddings(), t.fit()
    assert adapters_equal(full, small) and full.checkpoints.fingerprint == small.checkpoints.fingerprint
    kinds = ("pixel_latent", "control_latent", "prompt_embed", "prompt_prefix", "empty_prompt_embed")
    entries = lambda n: {(k, key): open_layer(tmp_path/n/"cache").read(k, key) for k in kinds for key, _ in open_layer(tmp_path/n/"cache").entries(k)}
    assert entries("full") == entries("small") and len(entries("full")) > 6
    assert not (tmp_path/"small"/"cache"/"modulation").exists(), "the table is read where it was attached"
    a, b = (t.predict(Image.new("RGB", (40, 30), "red"), "x", num_inference_steps=2, seed=1) for t in (full, small))
    assert a.std() > 0 and (a == b).mean() > 0.9, "the sampler's own timesteps are not in the copy: the nearest are taken"
    assert QwenImageEditTrainer(configured(root, tmp_path, "small", copy, )).components.has_encoders()
    crossed = configured(root, tmp_path, "full", copy)
    crossed["train"] |= dict(max_train_steps=5, resume_checkpoint="latest")
    straight = configured(root, tmp_path, "straight", sharded)
    straight["train"] |= dict(max_train_steps=5)
    assert adapters_equal(QwenImageEditTrainer(crossed).fit(), QwenImageEditTrainer(straight).fit()), "a run goes on from the copy"
    assert state_of(copy) == before


def test_a_copy_for_training_alone_from_a_packed_cache(sharded, pairs, tmp_path):
    from qie_nb.cache import EmbeddingCacheManager
    root = pairs()
    full = QwenImageEditTrainer(configured(root, tmp_path, "full", sharded))
    full.cache_embeddings()
    EmbeddingCacheManager(str(tmp_path/"full"/"cache")).pack(tmp_path/"packed")
    copy = full.save_prequantized(tmp_path/"copy", encoders=False)
    assert not (copy/"vae").exists() and not (copy/"text_encoder").exists()
    c = configured(root, tmp_path, "small", copy)
    c["cache"] = dict(cache_dir=str(tmp_path/"packed"))
    small = QwenImageEditTrainer(c).fit()
    assert adapters_equal(full.fit(), small) and sorted(small.components.built) == ["scheduler", "transformer"]


def test_schedules_that_were_asked_for_are_in_the_copy(sharded, pairs, tmp_path, capsys):
    root = pairs()
    config = configured(root, tmp_path, "full", sharded)
    config["model"]["modulation_table_steps"] = [2]
    full = QwenImageEditTrainer(config)
    copy = full.save_prequantized(tmp_path/"copy")
    c = configured(root, tmp_path, "small", copy)
    small = QwenImageEditTrainer(c)
    edit = lambda t: t.predict(str(root/"control_images"/"0000.png"), "x", num_inference_steps=2, height=80, width=48)
    sizes = sorted(full.modulation.target_tokens())
    capsys.readouterr()
    small.setup_predict()
    table = small.modulation_table or small.set_lora().modulation_table
    from qie_nb.models.modulation import extra_timesteps, model_timesteps
    from qie_nb.sampling.denoising import sampling_schedule
    for tokens in sizes:
        times = model_timesteps(sampling_schedule(small.components.get("scheduler"), 2, tokens).timesteps, table.dtype)
        table.ensure(times)
        assert not table.missing(times)
    assert "nearest" not in capsys.readouterr().out


REFUSED = [
    (dict(model=dict(quantize="qint8")), "is prequantized as nf4, but `model.quantize` is qint8; set it to nf4 or none"),
    (dict(model=dict(text_encoder_quantize="qint8")), "is prequantized as nf4, but `model.text_encoder_quantize` is qint8"),
    (dict(model=dict(modulation_table=False)), "`model.modulation_table` is false, and the prequantized copy .* has no modulation layers, only a table of them; name the full model"),
    (dict(model=dict(lora=dict(r=4, target_modules=["to_q", "img_mod.1"]))), r"names transformer_blocks.0.img_mod.1, so what it says will change, and the prequantized copy .* has no modulation layers")]

def test_refused_before_anything_is_loaded(sharded, pairs, tmp_path):
    root = pairs()
    copy = QwenImageEditTrainer(configured(root, tmp_path, "full", sharded)).save_prequantized(tmp_path/"copy")
    for change, sentence in REFUSED:
        c = configured(root, tmp_path, "x", copy)
        c["model"] |= change["model"]
        with pytest.raises(ValueError, match=sentence): t = QwenImageEditTrainer(c); t.components.check(); t.set_lora()
    with pytest.raises(ValueError, match="has a complete copy"): QwenImageEditTrainer(configured(root, tmp_path, "full", sharded)).save_prequantized(copy)
    with pytest.raises(ValueError, match="is a prequantized copy already"): QwenImageEditTrainer(configured(root, tmp_path, "x", copy)).save_prequantized(tmp_path/"again")
    with pytest.raises(ValueError, match="make the copy again here, or use nf4"):
        quantize_checkpoint(QwenImageTransformer2DModel, LocalShards(sharded/"transformer"), tmp_path/"q"/"transformer", "qint8", torch.bfloat16)
        shutil.copyfile(sharded/"model_index.json", tmp_path/"q"/"model_index.json")
        load_component(tmp_path/"q", "transformer", torch.float32, quantization="qint8")
    for kind, sentence in ((None, "`model.quantize` is none, but a prequantized copy"), ("qint4", "qint4 is packed for one kind of device and cannot be saved; use nf4")):
        t = QwenImageEditTrainer(configured(root, tmp_path, "full", sharded))
        t.quantize = kind
        with pytest.raises(ValueError, match=sentence): t.save_prequantized(tmp_path/"no")
    t = QwenImageEditTrainer(configured(root, tmp_path, "full", sharded))
    t.components.quantize["text_encoder"] = None
    with pytest.raises(ValueError, match="at full width the text encoder is 16.6 GB"): t.save_prequantized(tmp_path/"no")
    assert not (tmp_path/"no").exists()


def test_no_room_is_told_with_sizes_before_the_first_file(sharded, pairs, tmp_path, monkeypatch):
    from qie_nb.models import prequantize as prequantise
    monkeypatch.setattr(prequantise, "free_bytes", lambda p: 1000)
    monkeypatch.setattr(prequantise, "quantize_checkpoint", lambda *a, **kw: pytest.fail("it began"))
    with pytest.raises(OSError, match=r"'.*copy' has 0\.0 MB free, but the copy needs .* MB \(transformer .* MB, modulation table .* MB, text_encoder .*, the table twice while it is packed\)"):
        QwenImageEditTrainer(configured(pairs(), tmp_path, "full", sharded)).save_prequantized(tmp_path/"copy")


def test_modulation_layers_are_kept_where_they_are_needed(sharded, pairs, tmp_path):
    config = configured(pairs(), tmp_path, "full", sharded)
    config["model"]["modulation_table"] = False
    full = QwenImageEditTrainer(config)
    copy = full.save_prequantized(tmp_path/"copy", encoders=False)
    c = configured(tmp_path/"set", tmp_path, "small", copy)
    c["model"]["lora"] = dict(r=4, target_modules=["img_mod.1"])
    small = QwenImageEditTrainer(c).set_lora()
    full._transformer()
    assert not source_checkpoint(copy/"transformer")["table"] and small.modulation_table is None
    with torch.no_grad(): assert torch.equal(run(full.transformer), run(small.transformer))


def test_from_the_shell_and_in_the_plan(sharded, pairs, tmp_path, capsys):
    import yaml
    config = configured(pairs(), tmp_path, "full", sharded)
    (tmp_path/"run.yaml").write_text(yaml.safe_dump(config))
    assert cli.main(["prequantise", "--config", str(tmp_path/"run.yaml"), "--out", str(tmp_path/"copy"), "--no_encoders"]) == 0
    assert "prequantized copy: transformer" in capsys.readouterr().out
    from qie_nb.planning.memory_query import memory_query
    own = make_config(configured(tmp_path/"set", tmp_path, "x", tmp_path/"copy"))
    assert memory_query(own).quantization == "nf4"
    for p in (plan(own, gpu="2xT4"), plan(str(tmp_path/"copy"), gpu="2xT4")):
        assert {m.query.quantization for m in p.tried} == {"nf4"} and p.changes.get("model", {}).get("quantize") in (None, "nf4"), "a copy has no other form"
    assert cli.main(["prequantise", "--config", str(tmp_path/"run.yaml"), "--out", str(tmp_path/"copy")]) == 2


@pytest.fixture(scope="module")
def narrow(sharded, tmp_path_factory):
    "The model with its weights in bfloat16, as the published ones are."
    from safetensors.torch import load_file, save_file
    root = shutil.copytree(sharded, tmp_path_factory.mktemp("narrow")/"model")
    for file in root.glob("*/*.safetensors"): save_file({k: t.to(torch.bfloat16) if t.is_floating_point() else t for k, t in load_file(file).items()}, file)
    return root


def test_a_card_without_bfloat16_takes_the_copy_s_narrow_rows(narrow, pairs, tmp_path, capsys):
    "A copy of a bfloat16 checkpoint carries 500 rows in bfloat16; float32 with products in float16 looks each timestep up that a bfloat16 run would."
    from qie_nb.planning.disk_space import disk_plan
    from qie_nb.models.modulation import model_timesteps
    root, fp16 = pairs(), dict(mixed_precision="fp16", gradient_checkpointing=False)
    full = QwenImageEditTrainer(configured(root, tmp_path, "full", narrow))
    copy = full.save_prequantized(tmp_path/"copy")
    assert source_checkpoint(copy/"transformer")["table_dtype"] == "bfloat16"
    c = configured(root, tmp_path, "small", copy)
    c["train"] |= fp16
    assert not [i.bytes for i in disk_plan(c).items if i.what == "modulation table" and i.bytes]
    small = QwenImageEditTrainer(c)
    capsys.readouterr()
    small.cache_embeddings(), small.fit()
    table, layers = small.modulation_table, [n for n, _ in small.transformer.named_parameters() if "_mod." in n]
    assert small.half and small.weight_dtype == torch.float32 and not layers and (table.dtype, len(table.index)) == (torch.bfloat16, 501)
    assert not (tmp_path/"small"/"cache"/"modulation").exists() and small.global_step == 3
    look = small.transformer.lookup
    for t in torch.arange(1, 1001).float():
        look.choose(t[None] / 1000, "cpu")
        assert look.key[0][:1] == model_timesteps([t], torch.bfloat16)
    assert "nearest" not in capsys.readouterr().out
    wide = configured(root, tmp_path, "wide", narrow)
    wide["train"] |= fp16
    wide = QwenImageEditTrainer(wide).fit()
    assert wide.modulation_table.dtype == torch.float32 and len(wide.modulation_table.index) == 1001
    a, b = (torch.cat([p.detach().flatten() for n, p in t.transformer.named_parameters() if "lora_" in n]) for t in (small, wide))
    assert torch.isfinite(a).all() and not torch.equal(a, b) and torch.nn.functional.cosine_similarity(a, b, 0) > 0.99


def test_room_is_reckoned_by_what_the_files_keep(narrow, pairs, tmp_path, monkeypatch):
    from qie_nb.models import prequantize as prequantise
    real, said = prequantise.quantized_bytes, []
    monkeypatch.setattr(prequantise, "quantized_bytes", lambda *a: said.append(a[3]) or real(*a))
    monkeypatch.setattr(prequantise, "free_bytes", lambda p: 1000)
    full = QwenImageEditTrainer(configured(pairs(), tmp_path, "full", narrow))
    with pytest.raises(OSError, match="but the copy needs"): full.save_prequantized(tmp_path/"copy")
    assert full.weight_dtype == torch.float32 and said == [torch.bfloat16] * 2
