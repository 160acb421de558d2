"""Training from a packed cache at a URL gives the LoRA of the local folder, also through an S3 server that fails."""
import os, random, socket, subprocess, sys, threading, traceback
from contextlib import suppress
from pathlib import Path

import fsspec, pytest, torch

from qie_nb.cache import EmbeddingCacheManager
from qie_nb.extras import remote_shards
from qie_nb.core.cache_layers import INDEX
from qie_nb.extras.remote_shards import RemoteCacheError
from qie_nb.data.dataset import ImageDataset, loader
from qie_nb.lora.adapters import lora_state
from qie_nb.trainer import QwenImageEditTrainer
from helpers import PATIENCE, settings, write_pairs

SIZES, STEPS = ((48, 32), (32, 48), (48, 32), (40, 40)), 4


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    "A data set, its packed cache, and the LoRA of a run from the cache's own folder."
    folder = tmp_path_factory.mktemp("known")
    write_pairs(folder/"set", SIZES)
    lora = run(folder, folder/"run", [folder/"cache"])
    EmbeddingCacheManager(folder/"cache").pack(folder/"packed", shard_bytes=20_000) # most without a part of the modulation table, which the main process reads
    return folder, lora


@pytest.fixture(autouse=True)
def copies(tmp_path, monkeypatch):
    monkeypatch.setenv("QIE_NB_REMOTE_COPY", str(tmp_path/"copies"))
    monkeypatch.setattr(remote_shards, "PAUSE", 0)
    return tmp_path/"copies"


def run(known, out, cache, workers=0):
    c = settings(known/"set", out, train=dict(max_train_steps=STEPS), cache=dict(cache_dir=[str(d) for d in cache]))
    t = QwenImageEditTrainer(c)
    d, given = t.config.data, None
    if workers: given = loader(ImageDataset(t.config), batch_size=d.batch_size, seed=t.config.train.seed, shuffle=d.shuffle, num_workers=workers)
    return lora_state(t.fit(given).transformer)


def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
def parts(copies): return [p.name for p in copies.rglob("*") if p.is_file() and p.name.endswith(".tmp")]


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("protocol, workers", [("memory", 0), ("file", 2)])
def test_the_lora_is_that_of_the_folder_and_each_shard_is_fetched_once(known, tmp_path, monkeypatch, protocol, workers):
    folder, lora = known
    url, log = dict(memory="memory://known/packed", file=f"file://{folder}/packed")[protocol], tmp_path/"log"
    fs, names = fsspec.filesystem(protocol), [p.name for p in (folder/"packed").iterdir()]
    if protocol == "memory":
        for n in names: fs.pipe(f"/known/packed/{n}", (folder/"packed"/n).read_bytes())
    real = type(fs).cat_file
    def cat_file(self, path, **kw): # also in loader processes
        with open(log, "a") as f: print(Path(path).name, os.getpid(), file=f)
        return real(self, path, **kw)
    monkeypatch.setattr(type(fs), "cat_file", cat_file)
    for again in (False, True):
        log.write_text("")
        got = run(folder, tmp_path/f"run{again}", [url, tmp_path/"empty"], workers)
        assert same(got, lora) and any(v.abs().sum() > 0 for v in got.values())
        fetched, processes = zip(*map(str.split, log.read_text().splitlines())) if not again else ((), ())
        assert sorted(fetched) == ([] if again else sorted(names)) and len(names) > 8, "each once, in a second run none"
        assert again or (len(set(processes)) > 1) == bool(workers)
        assert again is bool(not log.read_text())
    assert not any(EmbeddingCacheManager(tmp_path/"empty").entries()), "nothing was encoded again"
    if protocol == "memory": fs.rm("/known", recursive=True)


@pytest.mark.slow
def test_a_failure_in_a_loader_process_is_one_sentence(known, tmp_path, monkeypatch):
    fs, main = fsspec.filesystem("file"), os.getpid()
    real = type(fs).cat_file
    def cat_file(self, *a, **kw):
        if os.getpid() != main: raise ConnectionResetError("reset by peer")
        return real(self, *a, **kw)
    monkeypatch.setattr(type(fs), "cat_file", cat_file)
    with pytest.raises(RemoteCacheError, match=r"^file:///.*safetensors cannot be fetched: 4 attempts failed, the last with ConnectionResetError: reset by peer; check[^\n]+$"):
        run(known[0], tmp_path/"run", [f"file://{known[0]}/packed", tmp_path/"empty"], workers=2)


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


class CuttingProxy:
    "Passes bytes on to a port of this machine, and cuts the first `cuts` answers after 100 kB."
    def __init__(self, port, cuts):
        self.target, self.cuts, self.done = port, cuts, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with suppress(OSError):
            while True:
                near, far = self.listener.accept()[0], socket.create_connection(("127.0.0.1", self.target))
                for a, b, answers in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self.pass_on, args=(a, b, answers), daemon=True).start()

    def pass_on(self, a, b, answers):
        passed = 0
        with suppress(OSError):
            while data := a.recv(20_000):
                b.sendall(data)
                passed += len(data)
                if answers and passed > 100_000 and self.done < self.cuts: self.done += 1; break
        for s in (a, b):
            with suppress(OSError): s.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def s3(known, monkeypatch):
    for package in ("moto", "flask", "flask_cors", "s3fs"): pytest.importorskip(package, reason="pip install 'moto[s3]' flask flask-cors s3fs")
    for k in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"): monkeypatch.setenv(k, "test")
    for k, v in dict(AWS_DEFAULT_REGION="us-east-1", AWS_MAX_ATTEMPTS="1").items(): monkeypatch.setenv(k, v)
    server = Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fs = fsspec.filesystem("s3")
    if not fs.exists("bucket"): fs.mkdir("bucket")
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
    entry = next(opened.entries())
    with pytest.raises(RemoteCacheError, match=f"^{url}/cache-.* cannot be fetched"): opened.load_cache(entry.kind, entry.key)
    assert not parts(copies)
    server.start(server.port)
    assert same(run(folder, tmp_path/"run", [url, own], workers=2), lora) and not any(EmbeddingCacheManager(own).entries())
    assert sorted(p.name for p in copies.rglob("cache-0*.safetensors")) == shards and not parts(copies)


@pytest.mark.slow
def test_s3_answers_that_are_cut_are_asked_for_again(known, s3, tmp_path, copies, monkeypatch):
    proxy = CuttingProxy(s3[0].port, cuts=3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    packed, remote = EmbeddingCacheManager(known[0]/"packed"), EmbeddingCacheManager("s3://bucket/packs/a")
    for e in packed.entries(): assert e.layer.read(e.kind, e.key) == remote.layers[0].read(e.kind, e.key)
    assert proxy.done == 3 and not parts(copies)
    proxy.listener.close()


HUB = r"""
import http.server, json, os, re, sys, threading
from pathlib import Path
from urllib.parse import urlparse
folder, sent = Path(sys.argv[1]), {}

class Hub(http.server.BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def send(self, data, status=200, **headers):
        self.send_response(status)
        for k, v in (headers | {"Content-Length": str(len(data))}).items(): self.send_header(k.replace("_", "-"), v)
        self.end_headers()
        if self.command != "HEAD": self.wfile.write(data)

    def do_GET(self):
        path = urlparse(self.path).path
        if path == "/api/datasets/me/packs": return self.send(json.dumps(dict(id="me/packs", sha="c" * 40, private=False, downloads=0, likes=0, tags=[], siblings=[])).encode())
        if "/tree/main/a" in path:
            return self.send(json.dumps([dict(type="file", oid=p.name, size=p.stat().st_size, path=f"a/{p.name}") for p in folder.iterdir()]).encode())
        if "/resolve/main/a/" in path:
            name, found = Path(path).name, re.match(r"bytes=(\d+)-(\d+)", self.headers["Range"])
            data = (folder/name).read_bytes()[int(found[1]):int(found[2]) + 1]
            sent[name] = sent.get(name, 0) + len(data)
            return self.send(data, 206)
        self.send(b"{}", 404, X_Error_Code="RepoNotFound")

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
from qie_nb.cache import EmbeddingCacheManager
remote, local = EmbeddingCacheManager("hf://datasets/me/packs/a"), EmbeddingCacheManager(folder)
for e in local.entries(): assert e.layer.read(e.kind, e.key) == remote.layers[0].read(e.kind, e.key)
assert sent == {p.name: p.stat().st_size for p in folder.iterdir()}, sent
try: EmbeddingCacheManager("hf://datasets/me/nothing/a")
except FileNotFoundError as e: print(e)
"""


@pytest.mark.slow
def test_the_hub_sends_each_byte_once(known, copies):
    r = subprocess.run([sys.executable, "-c", HUB, str(known[0]/"packed")], capture_output=True, text=True, env=os.environ | dict(no_proxy="127.0.0.1"))
    assert r.returncode == 0 and "`cache_dir` 'hf://datasets/me/nothing/a' does not exist" in r.stdout, r.stdout + r.stderr


@pytest.mark.slow
def test_processes_share_a_copy_that_holds_less_than_they_read(known, copies):
    "Four processes read all entries in different orders; a limit of one shard and a half."
    import multiprocessing
    packed = EmbeddingCacheManager(known[0]/"packed")
    sizes = [p.stat().st_size for p in (known[0]/"packed").iterdir()]
    limit, ids = 1.5 * max(sizes), [(e.kind, e.key) for e in packed.entries()]
    context = multiprocessing.get_context("fork")
    bad, most = context.Queue(), context.Value("q", 0)

    def read(n):
        try:
            m = EmbeddingCacheManager(f"file://{known[0]}/packed", limit / 1e9)
            for kind, key in random.Random(n).sample(ids * 2, 2 * len(ids)):
                if m.layers[0].read(kind, key) != packed.layers[0].read(kind, key): bad.put(f"{kind} {key} differs")
                if n % 2 and m.map_cache(kind, key) is None: bad.put(f"{kind} {key}: {m.quarantined}")
                most.value = max(most.value, m.layers[0].copy.bytes())
        except Exception: bad.put(traceback.format_exc())
        bad.put(None)

    workers = [context.Process(target=read, args=(n,)) for n in range(4)]
    for w in workers: w.start()
    found = []
    while found.count(None) < 4: found.append(bad.get(timeout=PATIENCE))
    for w in workers: w.join()
    assert found == [None] * 4 and max(sizes) <= most.value <= limit and not parts(copies)


@pytest.mark.slow
def test_a_process_killed_while_it_fetches_leaves_nothing_that_counts(known, copies):
    script = f"""
import os, signal
from qie_nb.extras import remote_shards
from qie_nb.cache import EmbeddingCacheManager
remote_shards.CHUNK = 50_000
m, real = EmbeddingCacheManager({str(known[0]/"packed")!r}.join(("file://", ""))), remote_shards.patiently
def patiently(call, name):
    if sum(p.stat().st_size for p in m.layers[0].copy.root.glob(".tmp/*")) > 60_000: os.kill(os.getpid(), signal.SIGKILL)
    return real(call, name)
remote_shards.patiently = patiently
for e in m.entries(): m.layers[0].read(e.kind, e.key)
"""
    r = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert r.returncode == -9 and len(parts(copies)) == 1, r.stderr
    assert not EmbeddingCacheManager(f"file://{known[0]}/packed").verify() and not parts(copies)
