"""Packed caches at URLs: what is fetched, how often, what is kept, and what each failure says."""
import json, os, socket, sys
from pathlib import Path

import fsspec, pytest, torch

from qie_nb.cache import EmbeddingCacheManager
from qie_nb.cli import main
from qie_nb.config import make_config
from qie_nb.extras import remote_shards
from qie_nb.core.cache_entries import CacheEntryError
from qie_nb.core.cache_layers import INDEX, is_url, layer_place, url_text, without_secrets
from qie_nb.core.packed_index import DATABASE
from qie_nb.extras.remote_shards import LocalCopy, RemoteCacheError
from qie_nb.core.environment import Environment
from qie_nb.planning.disk_space import disk_plan
from qie_nb.planning.doctor import MachineInfo, cache_findings, disk_findings
from helpers import make_older, settings

URL, N = "memory://packs/a", 8
KEYS = [f"{i}a" for i in range(N)]


class Storage:
    "Eight latents of 4 kB in four shards at memory://packs/a, and the ranges that are read."
    def __init__(self, folder):
        self.fs, self.requests, self.fail = fsspec.filesystem("memory"), [], lambda path, start: None
        self.loose, self.folder = EmbeddingCacheManager(folder/"loose"), folder
        self.pack("packed")

    def pack(self, name, add=0.):
        for i, k in enumerate(KEYS): self.loose.save_cache("pixel_latent", k, torch.full((1000,), i + add))
        self.loose.save_cache("prompt_prefix", "aa", torch.ones(3))
        self.loose.save_cache("prompt_embed", "bb", torch.ones(3), prefix="aa")
        self.loose.add_identity(dict(model="tiny", vae="v", text_encoder="t", dtype="float32"))
        self.files = self.loose.pack(self.folder/name, shard_bytes=9000)
        self.upload()

    def upload(self):
        for f in self.files: self.fs.pipe(f"/packs/a/{f.name}", f.read_bytes())

    @property
    def shards(self): return [f.name for f in self.files if f.name not in (INDEX, DATABASE)]
    def fetched(self): return [name for name, start in self.requests if start == 0]
    def flip(self, name, at=-3):
        data = bytearray(self.fs.cat_file(f"/packs/a/{name}"))
        data[at] ^= 1
        self.fs.pipe(f"/packs/a/{name}", bytes(data))


@pytest.fixture
def storage(tmp_path, monkeypatch):
    monkeypatch.setenv("QIE_NB_REMOTE_COPY", str(tmp_path/"copies"))
    monkeypatch.setattr(remote_shards, "PAUSE", 0)
    monkeypatch.setattr(remote_shards, "_noted", set())
    s = Storage(tmp_path)
    cls, real = type(s.fs), type(s.fs).cat_file
    def cat_file(self, path, start=None, end=None, **kw):
        s.requests.append((path.rsplit("/", 1)[-1], start))
        s.fail(path, start)
        return real(self, path, start=start, end=end, **kw)
    monkeypatch.setattr(cls, "cat_file", cat_file)
    yield s
    s.fs.store.clear(), s.fs.pseudo_dirs.clear()


def read_all(url=URL, **kw):
    m = EmbeddingCacheManager(url, **kw)
    assert [m.load_cache("pixel_latent", k)[0].item() for k in KEYS] == list(range(N))
    return m


def copies(): # of shards, and unfinished files
    found = [p.name for p in remote_shards.copy_folder().rglob("*") if p.is_file() and not p.name.endswith((".used", ".lock"))]
    return sorted(p for p in found if not p.endswith((".json", DATABASE)))


def database_copy(): return next(remote_shards.copy_folder().rglob(DATABASE))


def test_each_file_is_fetched_once_and_a_second_run_fetches_nothing(storage):
    assert len(storage.shards) == 4
    m = EmbeddingCacheManager(URL)
    assert m.cache_exists("prompt_embed", "bb") and m.get_cache_stats()["total"]["count"] == N + 2 and not m.writable
    assert storage.fetched() == [INDEX, DATABASE], "a look fetches no shard"
    read_all()
    assert torch.equal(m.load_cache("prompt_embed", "bb"), torch.ones(6))
    everything = sorted([INDEX, DATABASE, *storage.shards])
    assert sorted(storage.fetched()) == everything == sorted([INDEX, DATABASE, *copies()])
    storage.requests.clear()
    assert not read_all().verify() and torch.equal(m.map_cache("pixel_latent", "3a"), torch.full((1000,), 3.))
    assert not storage.requests


def test_the_entries_are_those_of_the_folder(storage):
    local, remote = EmbeddingCacheManager(storage.folder/"packed"), EmbeddingCacheManager([URL, storage.folder/"own"])
    ids = [(e.kind, e.key, e.bytes) for e in local.entries()]
    assert ids == [(e.kind, e.key, e.bytes) for e in remote.entries()] and local.identities() == remote.identities()
    for kind, key, _ in ids: assert local.layers[0].read(kind, key) == remote.layers[0].read(kind, key)
    remote.save_cache("pixel_latent", "ff", torch.ones(2))
    assert (storage.folder/"own"/"pixel_latent").is_dir(), "the last layer is written"


@pytest.mark.parametrize("chunk", [1000, 16_000_000])
def test_cut_connections_are_tried_again_from_where_they_were_cut(storage, monkeypatch, chunk):
    monkeypatch.setattr(remote_shards, "CHUNK", chunk)
    left = [remote_shards.TRIES - 1]
    def fail(path, start):
        if path.endswith(storage.shards[1]) and start == (2000 if chunk == 1000 else 0) and left[0]:
            left[0] -= 1
            raise ConnectionResetError("connection reset")
    storage.fail = fail
    read_all()
    starts = [start for name, start in storage.requests if name == storage.shards[1]]
    assert sum(s == (2000 if chunk == 1000 else 0) for s in starts) == remote_shards.TRIES and (chunk > 1000 or starts.count(1000) == 1)


def test_a_connection_that_stays_cut_is_one_sentence_and_leaves_what_was_fetched(storage):
    def fail(path, start):
        if path.endswith(storage.shards[1]): raise TimeoutError("https://me:secret@host?key=12 timed out")
    storage.fail = fail
    with pytest.raises(RemoteCacheError, match=rf"^{URL}/{storage.shards[1]} cannot be fetched: 4 attempts failed, the last with TimeoutError: https://host timed out; check"): read_all()
    assert copies() == storage.shards[:1] and len(storage.requests) == 3 + remote_shards.TRIES
    storage.fail = lambda *a: None
    storage.requests.clear()
    read_all()
    assert storage.shards[0] not in storage.fetched() and storage.shards[1] in storage.fetched()


def test_an_answer_that_is_cut_short_is_asked_for_again(storage, monkeypatch):
    cls, short = type(storage.fs), [2]
    real = cls.cat_file
    def cat_file(self, path, **kw):
        data = real(self, path, **kw)
        if path.endswith(storage.shards[0]) and short[0]: short[0] -= 1; return data[:-10] if short[0] else b""
        return data
    monkeypatch.setattr(cls, "cat_file", cat_file)
    read_all()
    assert not short[0]
    monkeypatch.setattr(cls, "cat_file", lambda self, path, **kw: real(self, path, **kw) + b"more")
    for p in remote_shards.copy_folder().rglob(storage.shards[0]): p.unlink()
    with pytest.raises(RemoteCacheError, match=r"the last with ConnectionError: \d+ bytes arrived instead of"): read_all()


def test_one_wrong_byte_of_a_shard_is_visible_at_once_and_nothing_of_it_is_kept(storage):
    storage.flip(storage.shards[2], at=20) # in the shard's own header, which no entry covers
    with pytest.raises(RemoteCacheError, match=rf"{URL}/{storage.shards[2]} is damaged there: .*; upload it again"): read_all()
    assert storage.fetched().count(storage.shards[2]) == 2 and copies() == storage.shards[:2]
    storage.upload()
    read_all()
    once = [True]
    def fail(path, start):
        if path.endswith(storage.shards[3]) and once: once.clear(); storage.flip(storage.shards[3])
        elif path.endswith(storage.shards[3]): storage.upload()
    storage.fail = fail
    for p in remote_shards.copy_folder().rglob(storage.shards[3]): p.unlink()
    read_all()


def test_a_pack_without_digests_is_checked_entry_by_entry(storage):
    storage.files = [*storage.files[:-2], make_older(storage.folder/"packed", digests=False)]
    storage.fs.rm(f"/packs/a/{DATABASE}")
    storage.upload()
    read_all()
    assert DATABASE not in storage.fetched()
    assert len(EmbeddingCacheManager(storage.folder/"packed").verify()) == 0
    for p in remote_shards.copy_folder().rglob("cache-0*"): p.unlink()
    storage.flip(storage.shards[0])
    m = EmbeddingCacheManager(URL)
    bad = [k for k in KEYS if m.load_cache("pixel_latent", k) is None]
    assert len(bad) == 1 and m.quarantined == [(f"{URL}/{storage.shards[0]}: pixel_latent {bad[0]}", "checksum differs")]
    assert storage.fetched().count(storage.shards[0]) == 3, "fetched again once"


def test_a_database_that_was_damaged_there_is_never_opened(storage, monkeypatch):
    storage.flip(DATABASE)
    opened = []
    monkeypatch.setattr("qie_nb.core.packed_index._Opened", opened.append)
    with pytest.raises(RemoteCacheError, match=f"{URL}/{DATABASE} is damaged there: .*; upload it again"):
        EmbeddingCacheManager(URL)
    assert storage.fetched() == [INDEX, DATABASE, DATABASE] and not opened
    assert not list(remote_shards.copy_folder().rglob(DATABASE))


def test_a_database_that_was_deleted_here_is_closed_and_fetched_again(storage):
    "Another run may need the space; while it is open, a deleted file still uses it."
    m = EmbeddingCacheManager(URL)
    database_copy().unlink()
    assert m.cache_exists("pixel_latent", "3a") and storage.fetched().count(DATABASE) == 1, "it is still open"
    assert m.load_cache("pixel_latent", "3a")[0] == 3
    if os.path.isdir("/proc/self/fd"):
        held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert not [file for file in held if f"{DATABASE} (deleted)" in file]
    assert m.load_cache("pixel_latent", "4a")[0] == 4
    assert storage.fetched().count(DATABASE) == 2 and database_copy().is_file()


@pytest.mark.parametrize("damage", ["a flipped bit", "cut short", "deleted"])
def test_a_local_copy_that_changed_is_fetched_again(storage, damage):
    read_all()
    path, = remote_shards.copy_folder().rglob(storage.shards[0])
    data = path.read_bytes()
    if damage == "deleted": path.unlink()
    else: path.write_bytes(data[:-100] if damage == "cut short" else data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    storage.requests.clear()
    if damage != "a flipped bit": assert EmbeddingCacheManager(URL).layers[0].file("pixel_latent", "0a").read_bytes() == data
    m = read_all()
    assert storage.fetched() == [storage.shards[0]] and not m.quarantined and path.read_bytes() == data
    for p in remote_shards.copy_folder().glob("indexes/*.json"): p.write_bytes(p.read_bytes()[:-5] + b"12345")
    read_all()
    assert storage.fetched() == [storage.shards[0], INDEX]
    copy, good = database_copy(), database_copy().read_bytes()
    for bad in (good[:-1] + b"x", good[:5000], None):
        if bad is None: copy.unlink()
        else: copy.write_bytes(bad)
        storage.requests.clear()
        read_all()
        assert storage.fetched() == [DATABASE] and copy.read_bytes() == good


def test_what_is_missing_is_named_before_work_begins(storage):
    name, rm = storage.shards[1], lambda n: storage.fs.rm(f"/packs/a/{n}")
    opened = EmbeddingCacheManager(URL)
    rm(name)
    with pytest.raises(CacheEntryError, match=rf"packed cache '{URL}/{INDEX}' cannot be used: {name} beside it is missing; upload it again, whole"): EmbeddingCacheManager(URL)
    with pytest.raises(RemoteCacheError, match=f"{URL}/{name} is gone; upload the packed cache again, whole"):
        for k in KEYS: opened.load_cache("pixel_latent", k)
    storage.upload()
    storage.fs.pipe(f"/packs/a/{name}", b"short")
    with pytest.raises(CacheEntryError, match=f"{name} beside it has 5 bytes, not [0-9]+; upload it again, whole"):
        EmbeddingCacheManager(URL)
    storage.upload()
    rm(DATABASE)
    with pytest.raises(CacheEntryError, match=f"{DATABASE} beside it is missing; upload it again, whole"):
        EmbeddingCacheManager(URL)
    rm(INDEX)
    with pytest.raises(FileNotFoundError, match=rf"`cache_dir` '{URL}' holds no {INDEX}; give the folder that `qie-nb cache pack` wrote"): EmbeddingCacheManager(URL)
    with pytest.raises(FileNotFoundError, match="`cache_dir` 'memory://nowhere' does not exist: there is no such folder, repository or bucket"): EmbeddingCacheManager("memory://nowhere")
    with pytest.raises(FileNotFoundError, match="does not exist"): EmbeddingCacheManager(f"file://{storage.folder}/nowhere")
    storage.upload()
    assert read_all()


def test_a_missing_package_and_an_unknown_protocol(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match="^gs://bucket/a needs the package gcsfs: pip install gcsfs$"): EmbeddingCacheManager(["gs://bucket/a?token=1", "cache"])
    with pytest.raises(ValueError, match="`cache_dir` 'what://a' cannot be opened .*; use a URL like hf://"): EmbeddingCacheManager("what://a")


def test_credentials_are_asked_for_at_once(storage, monkeypatch):
    class NoCredentialsError(Exception): pass
    asked = []
    def ls(*a, **kw): asked.append(a); raise NoCredentialsError("Unable to locate credentials")
    monkeypatch.setattr(type(storage.fs), "ls", ls)
    with pytest.raises(RemoteCacheError, match="may not be read .*Unable to locate credentials.*; set the credentials of its storage in the environment"): EmbeddingCacheManager(URL)
    assert len(asked) == 1


def test_the_local_copy_stays_below_its_limit(storage, monkeypatch):
    sizes = {f.name: f.stat().st_size for f in storage.files}
    limit = (sizes[INDEX] + sizes[DATABASE] + 2 * max(sizes[s] for s in storage.shards)) / 1e9
    most, real = [0], LocalCopy.make_room
    def make_room(self, size):
        real(self, size)
        most[0] = max(most[0], self.bytes() + size)
    monkeypatch.setattr(LocalCopy, "make_room", make_room)
    m = read_all(remote_copy_gb=limit)
    assert max(sizes.values()) < most[0] <= limit * 1e9 and 0 < len(copies()) <= 2
    deleted = [p for fd in os.listdir("/proc/self/fd") if "copies" in (p := os.path.realpath(f"/proc/self/fd/{fd}")) and "(deleted)" in p] if os.path.isdir("/proc/self/fd") else []
    assert not deleted, "a deleted file that is open still uses the disk"
    first, second, third = ([k for k in KEYS if m.layers[0].index["pixel_latent"][k][0] == n][0] for n in range(3))
    for k in (first, second, first, third): m.load_cache("pixel_latent", k)
    assert copies() == [storage.shards[0], storage.shards[2]], "the least recently used is deleted"
    assert storage.fetched().count(DATABASE) == 1, "every shard needs the database"


def test_a_limit_below_a_shard_or_a_whole_cache(storage, capsys):
    least = ("^`cache.remote_copy_gb` must be at least 0.01, the size of the index and the largest shard of "
             "memory://packs/a, got")
    with pytest.raises(ValueError, match=f"{least} 1e-06; raise it, or pack with a smaller `--shard_gb`"):
        EmbeddingCacheManager(URL, 1e-6)
    assert storage.fetched() in ([], [INDEX]) and not copies()
    with pytest.raises(ValueError, match=f"{least} 2.5e-05"):
        EmbeddingCacheManager(URL, 25e-6)
    assert not copies() and DATABASE not in storage.fetched()
    read_all(remote_copy_gb=45e-6), read_all(remote_copy_gb=45e-6)
    said = "more than `cache.remote_copy_gb` 4.5e-05: every epoch fetches shards again; raise it if the disk allows"
    assert capsys.readouterr().out.count(said) == 1


def test_a_full_or_unwritable_disk_is_one_sentence(storage, monkeypatch):
    m = EmbeddingCacheManager(URL)
    monkeypatch.setattr(remote_shards, "free_bytes", lambda path: 100)
    with pytest.raises(RemoteCacheError, match=f"{storage.shards[0]} cannot be copied to .*copies.*is full.*; set QIE_NB_REMOTE_COPY to a folder"): m.load_cache("pixel_latent", "0a")
    assert not copies()


def test_an_unfinished_file_of_a_dead_process_never_counts(storage):
    m, tmp = EmbeddingCacheManager(URL), remote_shards.copy_folder()/".tmp"
    (tmp/f".{socket.gethostname()[:40]}-{2**22 + 1}-abcd.tmp").write_bytes(b"half")
    m.load_cache("pixel_latent", "0a")
    assert not list(tmp.iterdir()) and copies() == storage.shards[:1]


def test_a_new_version_at_the_same_url_is_read(storage):
    opened = read_all()
    storage.pack("second", add=100.)
    assert EmbeddingCacheManager(URL).load_cache("pixel_latent", "3a")[0] == 103
    assert opened.load_cache("pixel_latent", "3a")[0] == 3, "what is open keeps its own copy"


def test_urls_stay_urls():
    for url in ("s3://bucket/a", "hf://datasets/me/packs@main/a", "memory://a", "file:///data/a", "s3://a"):
        assert url_text(Path(url)) == layer_place(Path(url)) == url and is_url(url)
        for v in (url, Path(url)): assert make_config(dict(cache=dict(cache_dir=[v, "cache"]))).cache.cache_dir == [url, "cache"]
    assert [is_url(p) for p in ("cache", "/a/b", "C:/a", "C:\\a", "a:b", ".", Path("/"))] == [False] * 7
    assert make_config(dict(cache=dict(cache_dir=Path("/")))).cache.cache_dir == "/"
    assert without_secrets("s3://key:secret@bucket/a") == "s3://bucket/a" and without_secrets("abfs://box@account/a") == "abfs://box@account/a"


SECRETS = {
    "s3://user:pa@ss/word@host/a": "s3://host/a", "s3:/key:sec/ret@bucket/a": "s3:/bucket/a", "https://k/e@y@host:9000/a": "https://host:9000/a",
    "https://user:pa?ss@host/a": "https://...", "https://me:secret@host/a?token=12 is gone": "https://host/a is gone",
    "https://h/a b?token=12 x": "https://h/a b x", "https://b/a?X-Amz-Signature=abc&x=1 and s3://k:s@b/c": "https://b/a and s3://b/c",
    "X-Amz-Credential=AKIA/1&sig=12": "X-Amz-Credential=...&sig=...", "hf://user:tok@x/p": "hf://x/p", "Bearer abc.def": "Bearer ...",
    "https://h/a?email=tok@def": "https://...", "the token hf_abcdefghijkl": "the token ...", "memory://me:secret@packs/a": "memory://packs/a",
    "hf://datasets/me/packs@main/a": "hf://datasets/me/packs@main/a", "abfs://box@account/a": "abfs://box@account/a",
    "file:///data/a@b/c": "file:///data/a@b/c", "no address; a=b, C:/x/y": "no address; a=b, C:/x/y"}


@pytest.mark.parametrize("text", SECRETS, ids=ascii)
def test_what_may_be_secret_is_left_out(text): assert without_secrets(text) == SECRETS[text]


def test_commands_accept_a_url_and_hide_its_credentials(storage, capsys, tmp_path, pairs):
    storage.fs.cp("/packs", "/me:secret@packs", recursive=True)
    url = "memory://me:secret@packs/a"
    assert main(["cache", "stats", url]) == 0 and main(["cache", "verify", url]) == 0
    assert main(["cache", "clear", url, "--yes"]) != 0
    out = "".join(capsys.readouterr())
    assert f"cache {URL} (packed) cannot be written, so nothing is cleared" in out and "secret" not in out
    with pytest.raises(PermissionError, match=rf"cache {URL} \(packed\) cannot be written; add a writable folder behind it"): EmbeddingCacheManager(url).save_cache("pixel_latent", "cc", torch.ones(1))
    assert EmbeddingCacheManager(url).layers[0].where("pixel_latent", "0a").startswith(f"{URL}/cache-00001")
    with pytest.raises(ValueError, match=f"is not in {URL}; it holds"): EmbeddingCacheManager(url).identity("nothing")
    c = settings(pairs(), tmp_path, cache=dict(cache_dir=[url, str(tmp_path/"cache")]))
    machine, c = MachineInfo(Environment("script", working=tmp_path), {}), make_config(c)
    plan, report = disk_plan(c), [*cache_findings(machine, c), *disk_findings(machine, c)]
    item, = (i for i in plan.items if i.what.startswith("copy of"))
    assert item.what == f"copy of {URL}" and item.bytes == 0, "verify has fetched all"
    assert "made with another model" in str(report) and "secret" not in f"{plan!r}{report}"
    c.cache.cache_dir = url
    assert [f.what for f in disk_findings(machine, c)] == ["disk: working folder"]
    storage.fs.rm("/me:secret@packs", recursive=True)
    missing = str(cache_findings(machine, c))
    assert f"'{URL}' does not exist" in missing and "secret" not in missing
