"""Where a model comes from: only what a job needs, file by file, announced and refused before the first; what was downloaded here goes when it is quantized, and nothing else ever does."""
import json, shutil
from pathlib import Path

import pytest
import torch

from qie_nb.models import components as models

from qie_nb.models import prequantize as prequantized

from qie_nb.models import hub as source
from qie_nb.models.components import Components, resolve_model
from qie_nb.models.hub import HubClient, HubModel, find_model_folder, hub_model
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from helpers import adapters_equal, settings
from test_prequantize import sharded # noqa: F401, a fixture

NAME = "someone/model"


class Pretended:
    "A folder that serves files, and a cache; a disk of `size` bytes for all that is downloaded and made."
    def __init__(self, served, root, size=None):
        self.served, self.root, self.folder, self.size, self.got, self.gone, self.peak = Path(served), Path(root), Path(root)/"hub", size, [], [], 0
    def used(self): return sum(p.stat().st_size for p in self.root.rglob("*") if p.is_file())
    def look(self): self.peak = max(self.peak, self.used())
    def free(self, path=None): return 10**15 if self.size is None else self.size - self.used()
    def files(self, name, revision=None): return "c" * 40, {p.relative_to(self.served).as_posix(): p.stat().st_size for p in self.served.rglob("*") if p.is_file()}
    def has(self, name, path, commit): return (self.folder/path).is_file()
    def get(self, name, path, commit):
        if not self.has(name, path, commit):
            self.got.append(path)
            (self.folder/path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.served/path, self.folder/path)
            self.look()
        return self.folder/path
    def release(self, path): self.gone.append(str(path.relative_to(self.folder))), path.unlink()


@pytest.fixture
def hub(sharded, tmp_path, monkeypatch): # noqa: F811
    monkeypatch.setenv("QIE_NB_HOME", str(tmp_path/"disk"/"home"))
    hub = Pretended(sharded, tmp_path/"disk")
    hub.root.mkdir()
    monkeypatch.setattr(source, "HUB", hub)
    for module in (source, models): monkeypatch.setattr(module, "free_bytes", hub.free)
    real = prequantized.write_atomic
    def is_interactive(*a):
        real(*a)
        hub.look()
    monkeypatch.setattr(prequantized, "write_atomic", is_interactive)
    return hub


def weights(names): return [n for n in names if n.endswith(".safetensors")]
def parts(names): return {n.split("/")[0] for n in names if "/" in n}
def bytes_of(folder): return sum(p.stat().st_size for p in Path(folder).glob("*.safetensors"))


def configured(root, tmp_path, name, model=NAME, **train):
    c = settings(root, tmp_path/name, cache=dict(cache_dir=str(tmp_path/name/"cache")), train=dict(output_dir=str(tmp_path/name), max_train_steps=2) | train)
    c["model"] |= dict(pretrained_model_name_or_path=str(model))
    return c


def test_each_job_fetches_its_own_components_only(hub, pairs, tmp_path):
    root = pairs()
    trainer = QwenImageEditTrainer(configured(root, tmp_path, "out"))
    assert hub.got == ["model_index.json", "qie_nb.json", "transformer/config.json"], "to know the variant"
    trainer.cache_embeddings()
    assert parts(hub.got) == {"transformer", "vae", "text_encoder", "tokenizer", "processor"} and not any(n.startswith("transformer/") for n in weights(hub.got))
    precomputed = len(hub.got)
    shutil.rmtree(hub.folder) # another machine, which has the cache alone
    source._cached_hub_model.cache_clear()
    second = QwenImageEditTrainer(configured(root, tmp_path, "out"))
    second.fit()
    got = hub.got[precomputed:]
    assert parts(got) == {"transformer", "scheduler"} and len(weights(got)) == 13 and second.components.built == ["transformer", "scheduler"]
    assert not hub.gone, "nothing is deleted where the disk holds it"
    assert adapters_equal(second, QwenImageEditTrainer(configured(root, tmp_path, "local", hub.served)).fit())


def test_shards_go_when_they_are_quantized_and_it_is_the_same_run(hub, pairs, tmp_path, capsys):
    root = pairs()
    quantized = dict(quantize="nf4", text_encoder_quantize="qint8")
    own = [configured(root, tmp_path, n, m) for n, m in (("hub", NAME), ("local", hub.served))]
    for c in own: c["model"] |= quantized | dict(delete_downloaded_shards=True)
    far, near = (QwenImageEditTrainer(c) for c in own)
    for t in (far, near): t.cache_embeddings(), t.fit()
    assert adapters_equal(far, near) and far.facts == near.facts, "data, encoders and base are told apart by what they are"
    big = [n for n in weights(hub.got) if n.split("/")[0] in ("transformer", "text_encoder")]
    assert sorted(big) == sorted(hub.gone) and len(big) == 26, "each is fetched once and goes"
    kept = sum(p.stat().st_size for p in (hub.root/"home"/"models").rglob("*") if p.is_file())
    largest = max((hub.served/n).stat().st_size for n in big)
    whole = sum(bytes_of(hub.served/n) for n in ("transformer", "text_encoder"))
    small = sum((hub.folder/n).stat().st_size for n in hub.got if n not in big)
    rows = sum(p.stat().st_size for p in (hub.root/"home"/"models").rglob("modulation/*"))
    assert hub.peak <= kept + small + largest + rows, (hub.peak, kept, small, largest)
    out = capsys.readouterr().out
    assert f"{NAME}: transformer is " in out and "in 13 files, the largest is model-000" in out and "each is deleted after it is quantized" in out
    got = len(hub.got)
    again = QwenImageEditTrainer(own[0] | dict(train=own[0]["train"] | dict(output_dir=str(tmp_path/"again"))))
    assert adapters_equal(again.fit(), near) and len(hub.got) == got, "the next process begins from what was made"


def test_a_disk_that_does_not_hold_the_component_decides(hub, tmp_path):
    big, table = bytes_of(hub.served/"transformer"), 0
    far = Components(NAME, quantize=dict(transformer="nf4"))
    assert not far.deletes_shards("transformer")
    hub.size = hub.used() + big - 1
    assert far.deletes_shards("transformer") and not Components(NAME).deletes_shards("transformer"), "without a quantization the weights are needed as they are"
    made = far.folder_of("transformer")
    assert hub.peak <= hub.size and not weights(p.name for p in (hub.folder/"transformer").iterdir())
    near = Components(str(hub.served), quantize=dict(transformer="nf4"))
    from test_quantize import run, same_tensors
    assert same_tensors(far.get("transformer"), near.get("transformer")) and made.is_relative_to(hub.root/"home")
    off = Components(NAME, quantize=dict(transformer="nf4"), release=False)
    assert not off.deletes_shards("transformer")


@pytest.mark.parametrize("kind, sentence", [
    (None, r"someone/model: transformer is \d+\.\d MB in 13 files, the largest is model-000\d\d-of-00013.safetensors with 0\.[1-9] MB; it needs \d+\.\d MB at a time, but "
           r"'.*hub' has 0\.0 MB free; set `model.quantize` \(`model.text_encoder_quantize`\) and leave `model.delete_downloaded_shards` at auto, or attach the model as a folder"),
    ("nf4", r"someone/model: transformer .* MB at a time, but '.*' has 0\.0 MB free; free some space, or use fewer bits, or attach the model as a folder")])
def test_too_small_a_disk_is_refused_before_the_first_shard(kind, sentence, hub, pairs, tmp_path):
    config = configured(pairs(), tmp_path, "out")
    config["model"]["quantize"] = kind or False
    trainer = QwenImageEditTrainer(config)
    hub.size = hub.used() + 20_000
    with pytest.raises(OSError, match=sentence): trainer.components.quantize.update(transformer=kind); trainer.components.folder_of("transformer")
    assert not weights(hub.got)


def test_what_was_there_before_is_nobodys_to_delete(hub, tmp_path):
    before = [f"transformer/{n.name}" for n in sorted((hub.served/"transformer").glob("*.safetensors"))[:4]]
    for n in before: (hub.folder/n).parent.mkdir(parents=True, exist_ok=True), shutil.copy(hub.served/n, hub.folder/n)
    Components(NAME, quantize=dict(transformer="nf4"), release=True).folder_of("transformer")
    assert sorted(p.relative_to(hub.folder).as_posix() for p in (hub.folder/"transformer").glob("*.safetensors")) == before
    assert len(hub.gone) == 9 and all((hub.served/n).is_file() for n in hub.files(NAME)[1]), "nor what serves"


@pytest.mark.parametrize("after", [1, 6, 13])
def test_a_killed_download_goes_on_and_fetches_nothing_twice(after, hub, tmp_path, monkeypatch):
    real, n = hub.release, 0
    def killed(path): # between noting a shard and deleting it
        nonlocal n
        n += 1
        if n == after: raise KeyboardInterrupt
        real(path)
    hub.release = killed
    ask = lambda: Components(NAME, quantize=dict(transformer="nf4"), release=True).folder_of("transformer")
    with pytest.raises(KeyboardInterrupt): ask()
    hub.release = real
    source._cached_hub_model.cache_clear() # another process
    folder = ask()
    assert len(weights(hub.got)) == len(set(weights(hub.got))) == 13
    assert not list((hub.folder/"transformer").glob("*.safetensors")), "the one that the kill left goes as well"
    from qie_nb.models.hub import base_digest
    assert base_digest(folder) == base_digest(hub.served)


def test_a_download_that_fails_is_told_and_called_again(hub):
    real = hub.get
    def broken(name, path, commit):
        if path.endswith("00005-of-00013.safetensors"): raise ConnectionError("reset by peer")
        return real(name, path, commit)
    hub.get = broken
    with pytest.raises(OSError, match=r"someone/model: transformer/model-00005-of-00013.safetensors cannot be downloaded \(ConnectionError: reset by peer\); run it again, finished files are kept"):
        resolve_model(NAME, ["transformer"])
    hub.get, got = real, len(hub.got)
    resolve_model(NAME, ["transformer"])
    assert len(weights(hub.got)) == 13 and len(hub.got) > got


def test_a_prequantized_copy_straight_from_the_hub(hub, pairs, tmp_path):
    config = configured(pairs(), tmp_path, "out")
    config["model"] |= dict(quantize="nf4", text_encoder_quantize="nf4")
    local = configured(tmp_path/"set", tmp_path, "local", hub.served)
    local["model"] |= dict(quantize="nf4", text_encoder_quantize="nf4")
    a, b = (QwenImageEditTrainer(c).save_prequantized(tmp_path/n) for c, n in ((config, "from hub"), (local, "from folder")))
    contents = lambda d: {str(p.relative_to(d)): p.read_bytes() for p in d.rglob("*") if p.is_file() and p.name != "prequantized.json"}
    assert contents(a) == contents(b)
    big = [n for n in weights(hub.got) if n.split("/")[0] in ("transformer", "text_encoder")]
    assert sorted(hub.gone) == sorted(big) and len(big) == 26
    assert hub.peak < sum(bytes_of(hub.served/n) for n in ("transformer", "text_encoder"))


def test_variants_of_the_weights_and_pickles_are_left_on_the_hub(hub, tmp_path):
    served = shutil.copytree(hub.served, tmp_path/"served")
    hub.served = served
    for n in ("vae/diffusion_pytorch_model.fp16.safetensors", "vae/diffusion_pytorch_model.bin", "transformer/extra.safetensors"): (served/n).write_bytes(b"x" * 100)
    resolve_model(NAME, ["vae", "transformer"])
    assert not [n for n in hub.got if "fp16" in n or n.endswith(".bin") or "extra" in n]


def test_what_is_no_model_is_told(hub, monkeypatch):
    for name in ("/no/such/folder", "./here", "~/there", "one", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="is not a folder; give a diffusers folder, a hub id like"): resolve_model(name)
    def nothing(*a): raise ConnectionError
    monkeypatch.setattr(hub, "files", nothing)
    with pytest.raises(FileNotFoundError, match=r"'no/body' is not a local folder and cannot be downloaded \(ConnectionError\); attach the model as a folder and give its path"): resolve_model("no/body")


def test_the_model_in_what_was_attached(tmp_path):
    at = tmp_path/"input"/"qwen"/"transformers"/"default"/"1"
    shutil.copytree(tiny_folder("2511"), at)
    assert resolve_model(str(tmp_path/"input"/"qwen")) == at
    shutil.copytree(tiny_folder("2509"), tmp_path/"input"/"other"/"2")
    assert Components(str(tmp_path/"input"/"other")).variant.name == "2509"
    with pytest.raises(ValueError, match="contains 2 models .*; give the folder of one of them"): find_model_folder(tmp_path/"input")
    (tmp_path/"empty").mkdir()
    with pytest.raises(ValueError, match="has no model_index.json"): Components(str(tmp_path/"empty"))


def test_the_real_hubs_cache(tmp_path, monkeypatch):
    "Its layout by hand: blobs, and a snapshot of links; offline, what is there is found, and a release takes both."
    from huggingface_hub import constants
    commit, root = "d" * 40, tmp_path/"models--someone--model"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path)), monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for folder in ("blobs", "refs", f"snapshots/{commit}/vae"): (root/folder).mkdir(parents=True)
    (root/"refs"/"main").write_text(commit)
    for n, name in enumerate(("model_index.json", "vae/config.json", "vae/diffusion_pytorch_model.safetensors")):
        (root/"blobs"/str(n)).write_text("{}")
        (root/"snapshots"/commit/name).symlink_to(root/"blobs"/str(n))
    import huggingface_hub
    real = {n: getattr(huggingface_hub, n) for n in ("snapshot_download", "try_to_load_from_cache", "hf_hub_download")}
    for n, f in real.items(): monkeypatch.setattr(huggingface_hub, n, lambda *a, f=f, **kw: f(*a, cache_dir=tmp_path, **kw))
    hub = HubClient()
    assert hub.folder == tmp_path
    assert hub.files("someone/model") == (commit, {"model_index.json": 2, "vae/config.json": 2, "vae/diffusion_pytorch_model.safetensors": 2})
    file = hub.get("someone/model", "vae/diffusion_pytorch_model.safetensors", commit)
    assert file == root/"snapshots"/commit/"vae"/"diffusion_pytorch_model.safetensors" and hub.has("someone/model", "vae/config.json", commit)
    hub.release(file)
    assert not file.is_symlink() and not (root/"blobs"/"2").exists() and (root/"blobs"/"1").exists()
    assert not hub.has("someone/model", "vae/diffusion_pytorch_model.safetensors", commit)
    monkeypatch.setenv("QIE_NB_HOME", str(tmp_path/"home"))
    own = HubModel("someone/model", hub=hub)
    own.release("vae/config.json")
    assert hub.has("someone/model", "vae/config.json", commit), "it was here before"
