"""Training from a packed cache at a URL gives the LoRA of the local folder, also through an S3 server that fails."""
import os, shutil
from pathlib import Path

import fsspec, pytest, torch

from qie_nb.cache import EmbeddingCacheManager
from qie_nb.core import remote_shards
from qie_nb.core.cache_layers import INDEX
from qie_nb.core.remote_shards import RemoteCacheError
from qie_nb.lora.adapters import lora_state
from qie_nb.trainer import QwenImageEditTrainer
from helpers import settings, slow, write_pairs

SIZES, STEPS = ((48, 32), (32, 48), (48, 32), (40, 40)), 4


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    "A data set, its packed cache, and the LoRA of a run from the cache's own folder."
    folder = tmp_path_factory.mktemp("known")
    write_pairs(folder/"set", SIZES)
    lora = run(folder, folder/"run", [folder/"cache"])
    EmbeddingCacheManager(folder/"cache").pack(folder/"packed", shard_bytes=300_000)
    return folder, lora


@pytest.fixture(autouse=True)
def copies(tmp_path, monkeypatch):
    monkeypatch.setenv("QIE_NB_REMOTE_COPY", str(tmp_path/"copies"))
    monkeypatch.setattr(remote_shards, "PAUSE", 0)
    return tmp_path/"copies"


def run(known, out, cache, workers=0):
    c = settings(known/"set", out, train=dict(max_train_steps=STEPS), data=dict(num_workers=workers), cache=dict(cache_dir=[str(d) for d in cache]))
    return lora_state(QwenImageEditTrainer(c).fit().transformer)


def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
def parts(copies): return [p.name for p in copies.rglob("*") if p.is_file() and p.name.endswith(".tmp")]


@pytest.mark.bits
@pytest.mark.parametrize("protocol, workers", [("memory", 0), slow("file", 2)])
def test_the_lora_is_that_of_the_folder_and_each_shard_is_fetched_once(known, tmp_path, monkeypatch, protocol, workers):
    folder, lora = known
    url, log = dict(memory="memory://known/packed", file=f"file://{folder}/packed")[protocol], tmp_path/"log"
    fs, names = fsspec.filesystem(protocol), [p.name for p in (folder/"packed").iterdir()]
    if protocol == "memory":
        for n in names: fs.pipe(f"/known/packed/{n}", (folder/"packed"/n).read_bytes())
    real = type(fs).cat_file
    def cat_file(self, path, **kw): # also in loader processes
        with open(log, "a") as f: print(Path(path).name, file=f)
        return real(self, path, **kw)
    monkeypatch.setattr(type(fs), "cat_file", cat_file)
    for again in (False, True):
        log.write_text("")
        got = run(folder, tmp_path/f"run{again}", [url, tmp_path/"empty"], workers)
        assert same(got, lora) and any(v.abs().sum() > 0 for v in got.values())
        assert sorted(log.read_text().split()) == ([] if again else sorted(names)) and len(names) > 3
    assert not any(EmbeddingCacheManager(tmp_path/"empty").entries()), "nothing was encoded again"
    if protocol == "memory": fs.rm("/known", recursive=True)


class Server:
    "S3 on loopback: moto, which can be stopped and started again with what it stored."
    def __init__(self):
        from moto.server import ThreadedMotoServer
        self.make = lambda port=0: ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
        self.start()

    def start(self, port=0):
        self.server = self.make(port)
        self.server.start()
        self.host, self.port = self.server.get_host_and_port()

    def stop(self): self.server.stop()


@pytest.fixture
def s3(known, monkeypatch):
    for package in ("moto", "flask", "flask_cors", "s3fs"): pytest.importorskip(package, reason="pip install 'moto[s3]' flask flask-cors s3fs")
    for k in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"): monkeypatch.setenv(k, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fs = fsspec.filesystem("s3")
    fs.mkdir("bucket")
    for p in (known[0]/"packed").iterdir(): fs.pipe(f"bucket/packs/a/{p.name}", p.read_bytes())
    yield server, fs
    server.stop()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.slow
@pytest.mark.bits
def test_s3_gives_the_same_lora_and_its_failures_are_clear(known, s3, tmp_path, copies):
    (folder, lora), (server, fs) = known, s3
    url, own = "s3://bucket/packs/a", tmp_path/"empty"
    shards = sorted(p.name for p in (folder/"packed").glob("*.safetensors"))
    with pytest.raises(FileNotFoundError, match="`cache_dir` 's3://nobucket/a' does not exist: there is no such folder, repository or bucket"): EmbeddingCacheManager("s3://nobucket/a")
    with pytest.raises(FileNotFoundError, match="`cache_dir` 's3://bucket/packs/b' does not exist"): EmbeddingCacheManager("s3://bucket/packs/b")

    good = (folder/"packed"/shards[0]).read_bytes()
    fs.pipe(f"bucket/packs/a/{shards[0]}", good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
    with pytest.raises(RemoteCacheError, match=f"{url}/{shards[0]} is damaged there"): run(folder, tmp_path/"run", [url, own])
    fs.rm(f"bucket/packs/a/{shards[0]}")
    with pytest.raises(ValueError, match=f"{shards[0]} beside it is missing; upload it again"): run(folder, tmp_path/"run", [url, own])
    fs.pipe(f"bucket/packs/a/{shards[0]}", good)

    opened = EmbeddingCacheManager([url, own])
    server.stop()
    with pytest.raises(RemoteCacheError, match=f"^{url} cannot be fetched: 4 attempts failed, the last with .*; check the connection"): EmbeddingCacheManager(url)
    entry = next(e for e in opened.entries() if e.layer.file.__self__ is opened.layers[0])
    with pytest.raises(RemoteCacheError, match=f"^{url}/cache-.* cannot be fetched"): opened.load_cache(entry.kind, entry.key)
    assert not parts(copies)
    server.start(server.port)
    assert same(run(folder, tmp_path/"run", [url, own]), lora) and not any(EmbeddingCacheManager(own).entries())
    assert sorted(p.name for p in copies.rglob("cache-0*.safetensors")) == shards and not parts(copies)
