"""Model files: each job downloads what it needs, after a check of the disk; only downloaded files are deleted."""
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from qie_nb.core import environment, files
from qie_nb.core.environment import used_bytes
from qie_nb.models import components, hub as hubs, prequantize
from qie_nb.devices.edit_model import EditModel
from qie_nb.models.components import resolve_model
from qie_nb.models.hub import HubClient, base_digest, sampled_digest
from helpers import adapters_close, interrupted, on_call, slow_except
from test_prequantize import contents, sharded, trainer # noqa: F401, a fixture
from test_quantize import narrow, same_tensors # noqa: F401

NAME = "someone/model"


class FolderHub:
    "Serves a folder, and has a cache; a disk of `size` bytes for everything that is downloaded or made."
    def __init__(self, served, root):
        self.served, self.root, self.folder, self.size, self.got, self.deleted, self.peak = served, root, root/"hub", None, [], [], 0
    def used(self): return bytes_of(self.root, "*")
    def look(self, more=0): self.peak = max(self.peak, self.used() + more)
    def free(self, path=None): return 10**15 if self.size is None else self.size - self.used()
    def files(self, name, revision=None): return "c" * 40, {n: len(data) for n, data in contents(self.served).items()}
    def has(self, name, path, commit): return (self.folder/path).is_file()
    def get(self, name, path, commit):
        if not self.has(name, path, commit):
            self.got.append(path)
            (self.folder/path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.served/path, self.folder/path)
            self.look()
        return self.folder/path
    def release(self, path): self.deleted.append(path.relative_to(self.folder).as_posix()), path.unlink()


@pytest.fixture
def hub(sharded, tmp_path, monkeypatch): # noqa: F811
    monkeypatch.setenv("QIE_NB_HOME", str(tmp_path/"disk"/"home"))
    hub = FolderHub(sharded, tmp_path/"disk")
    hub.root.mkdir()
    monkeypatch.setattr(hubs, "HUB", hub)
    for module in (hubs, components): monkeypatch.setattr(module, "free_bytes", hub.free)
    on_call(monkeypatch, prequantize, "write_atomic", lambda path, data: hub.look(len(data)))
    return hub


def weights(names): return [n for n in names if n.endswith(".safetensors")]
def folders(names): return {n.split("/")[0] for n in names if "/" in n}
def large(names): return sorted(n for n in weights(names) if n.startswith(("transformer", "text_encoder")))
def bytes_of(folder, pattern="*.safetensors"): return sum(p.stat().st_size for p in Path(folder).rglob(pattern) if p.is_file())
def nf4(**kw): return EditModel(NAME, quantize=dict(transformer="nf4"), **kw)


def test_each_job_downloads_its_own_components(hub, pairs, tmp_path):
    root = pairs()
    make = lambda: trainer(root, tmp_path, "out", NAME, quantize="none", text_encoder_quantize="none")
    first = make()
    assert sorted(hub.got) == ["model_index.json", "qie_nb.json", "transformer/config.json"], "to know the variant"
    first.cache_embeddings()
    assert folders(hub.got) == {"transformer", "vae", "text_encoder", "tokenizer", "processor"}
    assert "transformer" not in folders(weights(hub.got))
    hub.got.clear()
    shutil.rmtree(hub.folder) # another machine with the cache only
    hubs._hub_model.cache_clear()
    second = make().fit()
    assert folders(hub.got) == {"transformer", "scheduler"} and len(weights(hub.got)) == 13 and second.components.built == ["transformer", "scheduler"]
    assert not hub.deleted, "the disk is large enough"


@pytest.mark.slow
def test_the_next_session_edits_with_a_copy_that_has_only_the_table(hub, pairs, tmp_path):
    "Training deleted the files with the modulation layers; the cache has what the text encoder would compute."
    root, how = pairs(), dict(text_encoder_quantize="qint8", delete_downloaded_shards=True)
    first = trainer(root, tmp_path, "hub", NAME, **how)
    first.cache_embeddings(), first.fit()
    lora, image = first.save_lora(tmp_path/"lora"), first.predict_cached(0, num_inference_steps=2)
    shutil.rmtree(next(hub.root.glob("home/models/*/text_encoder-*")))
    hub.got.clear()
    again = trainer(root, tmp_path, "hub", NAME, **how).load_lora(str(lora))
    assert again.modulation_table and abs(again.predict_cached(0, num_inference_steps=2).astype(int) - image).max() <= 1
    assert not large(hub.got), "neither the transformer nor the text encoder is downloaded"


def test_sizes_are_known_before_a_download(hub):
    "They decide on batches and devices."
    local, remote = (EditModel(n, quantize=dict(transformer="nf4")) for n in (str(hub.served), NAME))
    for name in ("vae", "text_encoder", "transformer"): assert abs(remote.bytes_of(name) / local.bytes_of(name) - 1) < 0.01
    assert not weights(hub.got)


def test_a_download_is_announced_once_and_before_its_first_byte(hub, tmp_path, monkeypatch, capsys):
    "Its size without other variants of the weights, where it goes, the space there, and the terms."
    hub.served = shutil.copytree(hub.served, tmp_path/"served")
    (hub.served/"vae"/"diffusion_pytorch_model.fp16.safetensors").write_bytes(b"x" * 9_000_000)
    size = sum(p.stat().st_size for p in hub.served.glob("*/*.safetensors") if "fp16" not in p.name)
    hub.size, hub.terms, said = 5 * 10**9, lambda name: "no token needed, Apache-2.0", []

    def first(self, path):
        if path.endswith(".safetensors"): said.append(capsys.readouterr().out)

    on_call(monkeypatch, hubs.HubModel, "fetch", first)
    resolve_model(NAME, ["vae"])
    assert said[0].splitlines()[0] == (
        f"downloading {NAME}, {hubs.format_bytes(size)} in all, to {hub.folder}, 5.00 GB free; "
        "no token needed, Apache-2.0")
    resolve_model(NAME, ["transformer"])
    assert "downloading" not in "".join(said[1:]) + capsys.readouterr().out


def test_what_is_here_is_not_announced_again(hub, capsys):
    "After an interruption the size is that of what is still to come."
    for path in (hub.served/"transformer").glob("*.safetensors"):
        hub.get(NAME, f"transformer/{path.name}", None)
    hubs.hub_model(NAME).announce()
    left = sum(p.stat().st_size for p in hub.served.glob("*/*.safetensors") if p.parent.name != "transformer")
    assert f"downloading {NAME}, {hubs.format_bytes(left)} in all" in capsys.readouterr().out


@pytest.mark.slow
def test_shards_are_deleted_after_they_are_quantized(hub, pairs, tmp_path, capsys):
    root, quantized = pairs(), dict(text_encoder_quantize="qint8", delete_downloaded_shards=True)
    remote, local = (trainer(root, tmp_path, n, m, **quantized) for n, m in (("hub", NAME), ("local", hub.served)))
    for t in (remote, local): t.cache_embeddings(), t.fit()
    adapters_close(remote, local)
    assert remote.checkpoints.fingerprint == local.checkpoints.fingerprint, "the same data, encoders and base"
    shards = large(hub.got)
    assert shards == sorted(hub.deleted) and len(shards) == 26, "each is downloaded once and deleted"
    made, small = hub.root/"home"/"models", sum((hub.folder/n).stat().st_size for n in hub.got if n not in shards)
    assert hub.peak <= bytes_of(made, "*") + small + max((hub.served/n).stat().st_size for n in shards) + bytes_of(made, "modulation/*")
    assert "each is deleted after it is quantized" in capsys.readouterr().out
    got = len(hub.got)
    adapters_close(trainer(root, tmp_path, "hub", NAME, dict(output_dir=str(tmp_path/"again")), **quantized).fit(), local)
    assert len(hub.got) == got, "the next process uses the quantized copy"


def test_shards_are_deleted_if_the_disk_is_too_small(hub):
    model = nf4()
    assert not model.deletes_shards("transformer")
    hub.size = hub.used() + bytes_of(hub.served/"transformer") - 1
    assert model.deletes_shards("transformer") and not EditModel(NAME).deletes_shards("transformer") and not nf4(release=False).deletes_shards("transformer")
    made = model.folder_of("transformer")
    assert hub.peak <= hub.size and not list(hub.folder.glob("transformer/*.safetensors")) and made.is_relative_to(hub.root/"home")
    assert same_tensors(model.get("transformer"), EditModel(str(hub.served), quantize=dict(transformer="nf4")).get("transformer"))


@pytest.fixture
def on_kaggle(hub, monkeypatch):
    "The hub's disk is a session of Kaggle that shows 1.9 TB."
    for folder in ("working", "temp", "input/attached"): (hub.root/"kaggle"/folder).mkdir(parents=True)
    place = dict(KAGGLE_KERNEL_RUN_TYPE="Batch", QIE_NB_ROOT=str(hub.root), HF_HUB_CACHE=str(hub.folder))
    for name, value in place.items(): monkeypatch.setenv(name, value)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=19 * 10**11))
    for module in (hubs, components): monkeypatch.setattr(module, "free_bytes", files.free_bytes)


def test_what_a_session_of_kaggle_may_write_counts_and_not_its_disk(hub, on_kaggle, monkeypatch):
    size = bytes_of(hub.served/"transformer")
    model = nf4()
    quota = used_bytes(hub.folder) + used_bytes(hub.root/"home") + size + 40_000
    monkeypatch.setattr(environment, "SESSION_QUOTA", quota)
    assert not model.deletes_shards("transformer"), "it fits by 40 kB"
    for folder in (hub.folder, hub.root/"home", hub.root/"kaggle/working", hub.root/"kaggle/temp"):
        (folder/"more.bin").write_bytes(bytes(100_000))
        assert model.deletes_shards("transformer"), folder
        (folder/"more.bin").unlink()
    (hub.root/"kaggle/input/attached/more.bin").write_bytes(bytes(100_000))
    assert not model.deletes_shards("transformer"), "inputs do not count"
    monkeypatch.setattr(environment, "SESSION_QUOTA", quota - size // 2)
    with pytest.raises(OSError, match="it needs .* of free space, but .* free; set `model.quantize`"):
        hubs.hub_model(NAME).check_disk_space("transformer")


def test_on_kaggle_downloads_are_deleted_although_all_of_them_fit(hub, on_kaggle, pairs, tmp_path):
    t = trainer(pairs(), tmp_path, "out", NAME, quantize="nf4")
    assert t.plan.delete_shards.why == "this session may write 61.8 GB, and the copy is read faster"
    assert t.components.deletes_shards("transformer") and not t.components.deletes_shards("vae")
    kept = trainer(pairs(), tmp_path, "out", NAME, quantize="nf4", delete_downloaded_shards=False)
    assert not kept.components.deletes_shards("transformer"), "the setting decides"


@pytest.mark.parametrize("quantization, sentence", [
    (None, r"someone/model: transformer is \d+\.\d MB in 13 files, the largest is model-000\d\d-of-.* has 0\.0 MB free; set `model.quantize` "),
    ("nf4", "; free some space, or use fewer bits, or give the folder of a copy")])
def test_too_small_a_disk_is_refused_before_the_first_shard(quantization, sentence, hub):
    model = EditModel(NAME, quantize=dict(transformer=quantization))
    hub.size = hub.used() + 20_000
    with pytest.raises(OSError, match=sentence): model.folder_of("transformer")
    assert not weights(hub.got)


def test_a_disk_holds_the_copy_and_the_largest_file(hub):
    "With room for the smallest one the download would end in the middle."
    model, kept = hubs.hub_model(NAME), 1000
    sizes = model.missing("transformer").values()
    hub.size = hub.used() + kept + max(sizes)
    model.check_disk_space("transformer", kept)
    hub.size -= 1
    with pytest.raises(OSError, match="it needs .* of free space"):
        model.check_disk_space("transformer", kept)


@pytest.mark.parametrize("small", ["downloads", "copy"])
def test_both_disks_must_hold_a_copy_and_its_largest_file(small, hub, monkeypatch):
    model = hubs.hub_model(NAME)
    folder = hub.folder if small == "downloads" else model.store
    monkeypatch.setattr(hubs, "free_for_downloads", lambda path: 1 if path == folder else 10**15)
    with pytest.raises(OSError, match="it needs .* of free space"):
        model.check_disk_space("transformer", 1000)


@pytest.mark.parametrize("gated, tags, said", [
    (False, ["lora", "license:apache-2.0"], "no token needed, Apache-2.0"),
    ("manual", ["license:other"], "a token of an account that has accepted its terms is needed, other"),
    ("auto", [], "a token of an account that has accepted its terms is needed")])
def test_what_a_model_asks_of_its_readers(gated, tags, said):
    assert hubs.access_terms(gated, tags) == said


@pytest.mark.parametrize("entry, sentence", [
    (["os", "PathLike"], "needs 'os' for vae; only diffusers and transformers are imported"),
    (["transformers", "AutoConfig"], "which is no Module"),
    ([None, None], "has no vae")])
def test_only_models_of_two_libraries_are_imported(entry, sentence, tmp_path):
    (tmp_path/"model_index.json").write_text(json.dumps(dict(vae=entry)))
    with pytest.raises(ValueError, match=sentence):
        hubs.component_class(tmp_path, "vae")


def test_without_a_network_the_revision_that_was_asked_for_is_looked_for(tmp_path, monkeypatch):
    asked = []
    def fails(*args, **kw): raise ConnectionError
    def snapshot(name, **kw):
        asked.append(kw)
        return str(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fails)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    (tmp_path/"model_index.json").write_text("{}")
    assert HubClient().files(NAME, "v2") == (tmp_path.name, {"model_index.json": 2})
    assert asked == [dict(revision="v2", local_files_only=True)]


@pytest.mark.parametrize("after", slow_except([6], [1, 6, 11]))
def test_a_killed_download_continues_and_deletes_only_what_it_downloaded(after, hub):
    before = sorted(f"transformer/{p.name}" for p in (hub.served/"transformer").glob("*.safetensors"))[3:5]
    for n in before: hub.get(NAME, n, None)
    with interrupted(hub, "release", after): nf4(release=True).folder_of("transformer") # a shard is recorded, but not deleted
    hubs._hub_model.cache_clear() # another process
    folder = nf4(release=True).folder_of("transformer")
    assert len(weights(hub.got)) == len(set(weights(hub.got))) == 13, "each is downloaded once"
    assert sorted(f"transformer/{p.name}" for p in hub.folder.glob("transformer/*.safetensors")) == before and base_digest(folder) == base_digest(hub.served)


def test_a_failed_download_continues(hub, monkeypatch):
    def broken(name, path, commit):
        if path.endswith("00005-of-00013.safetensors"): raise ConnectionError("reset by peer")
    with monkeypatch.context() as mp:
        on_call(mp, hub, "get", broken)
        with pytest.raises(OSError, match=r"model-00005-of-00013.safetensors cannot be downloaded \(ConnectionError: reset by peer\); run it again"):
            resolve_model(NAME, ["transformer"])
    assert len(weights(hub.got)) < 13
    resolve_model(NAME, ["transformer"])
    assert len(weights(hub.got)) == 13


@pytest.mark.bits
@pytest.mark.slow
def test_a_prequantized_copy_from_the_hub(hub, pairs, tmp_path):
    root = pairs()
    a, b = (trainer(root, tmp_path, n, m).save_prequantized(tmp_path/f"from {n}") for n, m in (("hub", NAME), ("folder", hub.served)))
    a, b = ({n: data for n, data in contents(d).items() if n != "prequantized.json"} for d in (a, b))
    assert a == b
    assert sorted(hub.deleted) == large(hub.got) and len(hub.deleted) == 26
    assert hub.peak < sum(bytes_of(hub.served/n) for n in ("transformer", "text_encoder"))


def test_rows_have_the_dtype_of_the_files_before_they_are_downloaded(hub, narrow): # noqa: F811
    assert nf4().row_dtype() == torch.float32
    hub.served = narrow
    hubs._hub_model.cache_clear()
    assert nf4().row_dtype() == nf4(dtype=torch.bfloat16).row_dtype() == torch.bfloat16 and not large(hub.got)


def test_the_planned_size_of_a_copy_in_float32_of_a_narrow_checkpoint(hub, narrow): # noqa: F811
    hub.served = narrow
    hubs._hub_model.cache_clear()
    parts = nf4(release=True)
    planned, made = parts.copy_bytes("transformer"), parts.folder_of("transformer")/"transformer"
    kept = {n: t for f in made.glob("part-*.safetensors") for n, t in load_file(f).items() if ".weight." not in n} # scales weigh more in a tiny model
    packed = {n.removesuffix(".weight") for n, t in kept.items() if t.dtype == torch.uint8}
    biases = [t for n, t in kept.items() if n.removesuffix(".bias") in packed] # of quantized layers: in the run's dtype
    plain = [t for n, t in kept.items() if n.rpartition(".")[0] not in packed]
    assert parts.dtype == torch.float32 and {t.dtype for t in plain} == {torch.bfloat16}, "plain weights are written as they are"
    size = sum(t.nbytes for t in kept.values()) - sum(t.nbytes for t in biases) / 2
    assert 0.96 < size / planned < 1.01


def test_other_variants_of_the_weights_are_not_downloaded(hub, tmp_path):
    hub.served = shutil.copytree(hub.served, tmp_path/"served")
    for n in ("vae/diffusion_pytorch_model.fp16.safetensors", "vae/diffusion_pytorch_model.bin", "transformer/extra.safetensors"):
        (hub.served/n).write_bytes(b"x" * 100)
    resolve_model(NAME, ["vae", "transformer"])
    assert not [n for n in hub.got if "fp16" in n or n.endswith(".bin") or "extra" in n]


def test_names_of_no_model(hub, tmp_path):
    for name in ("~/there", "one", "a/b/c"): # an absolute path: in the notebook
        with pytest.raises(FileNotFoundError, match="is not a folder; give a diffusers folder, a hub id like"): resolve_model(name)
    hub.files = mock.Mock(side_effect=ConnectionError)
    with pytest.raises(FileNotFoundError, match=r"'no/model' is not a local folder and cannot be downloaded \(ConnectionError\): huggingface.co cannot be reached "): resolve_model("no/model")
    with pytest.raises(ValueError, match="has no model_index.json"): EditModel(str(tmp_path))


def test_a_change_at_the_end_of_a_large_file_changes_its_digest(tmp_path):
    "Of 16 MB and more only blocks are read, the last one among them."
    file = tmp_path/"large.safetensors"
    file.write_bytes(bytes(8)) # a header of no bytes
    os.truncate(file, 17 * 2**20)
    before = sampled_digest(file)
    with open(file, "r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(b"x")
    assert sampled_digest(file) != before


def test_the_layout_of_the_hubs_cache(tmp_path, monkeypatch):
    commit, root = "d" * 40, tmp_path/"models--someone--model"
    snapshot, names = root/"snapshots"/commit, ("model_index.json", "vae/config.json", vae := "vae/diffusion_pytorch_model.safetensors")
    for name, value in dict(HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE=True).items(): monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    for folder in (root/"blobs", root/"refs", snapshot/"vae"): folder.mkdir(parents=True)
    (root/"refs"/"main").write_text(commit)
    for n, name in enumerate(names):
        (root/"blobs"/str(n)).write_text("{}")
        (snapshot/name).symlink_to(root/"blobs"/str(n))
    hub = HubClient()
    assert hub.folder == tmp_path and hub.files(NAME) == (commit, {n: 2 for n in names})
    file = hub.get(NAME, vae, commit)
    assert file == snapshot/vae and hub.has(NAME, "vae/config.json", commit)
    hub.release(file)
    assert not file.is_symlink() and {p.name for p in (root/"blobs").iterdir()} == {"0", "1"} and not hub.has(NAME, vae, commit)
