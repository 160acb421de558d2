"""The index of a packed cache: what reaches SQLite, what a hostile one can do, who may read it."""
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import fsspec
import pytest
import torch

from helpers import entries_of, make_older, signed_again, slow
from qie_nb.cache import EmbeddingCacheManager, key_of
from qie_nb.core import packed_index
from qie_nb.core.cache_entries import CacheEntryError
from qie_nb.core.cache_layers import INDEX, open_layer, open_place
from qie_nb.core.environment import Environment
from qie_nb.core.files import DiskFull
from qie_nb.core.packed_index import DATABASE, EntryDict, EntryTable, PackedEntry, TextTable

OLDER = Path(__file__).parents[1]/"reference"/"packed_before_sqlite.zip"
NAMES = ("packed", "packed_in_one_line")
N = 5 # entries
NOT_OURS = f"{DATABASE} was not written by qie_nb"
AGAIN = "; upload it again, whole$"
LEFT_ALONE = "it was not written by qie_nb"


def keys() -> list:
    "The keys of the entries, sorted."
    return sorted(key_of("pixel_latent", number=n) for n in range(N))


def made(folder:Path, add:float=0.) -> Path:
    "A packed cache of a few latents in two shards; each is filled with its number."
    cache = EmbeddingCacheManager(folder/"loose")
    cache.add_identity(dict(model="tiny", vae="v", text_encoder="t", dtype="float32"))
    for n, key in enumerate(keys()):
        cache.save_cache("pixel_latent", key, torch.full((200,), n + add))
    cache.pack(folder/"packed", shard_bytes=4000, replace=True)
    return folder/"packed"


@pytest.fixture
def packed(tmp_path):
    "A packed cache."
    return made(tmp_path)


def numbers(folder:Path) -> list:
    "What the entries of `made` hold, in a cache at this place."
    cache = EmbeddingCacheManager(folder)
    return [cache.load_cache("pixel_latent", key)[0].item() for key in keys()]


def refused(folder:Path, why:str):
    "Opening is refused with one clear sentence."
    with pytest.raises(CacheEntryError) as e:
        EmbeddingCacheManager(folder)
    name = re.escape(repr(str(folder/INDEX)))
    sentence = f"packed cache {name} cannot be used: {why}; upload it again, whole"
    assert re.fullmatch(sentence, str(e.value)), str(e.value)


@contextmanager
def seconds(limit:int):
    "Fails if the block takes longer."
    def late(*_):
        raise AssertionError(f"took more than {limit} seconds")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def opened(monkeypatch) -> list:
    "The names of the packed databases that SQLite opens."
    found, real = [], sqlite3.connect

    def connect(database, *args, **kw):
        "Note it and open it."
        if DATABASE in str(database):
            found.append(str(database))
        return real(database, *args, **kw)
    monkeypatch.setattr(sqlite3, "connect", connect)
    return found


# --- an older index
@pytest.fixture
def older(tmp_path):
    "The packed caches in the archive, and the sha256 of their entries."
    shutil.unpack_archive(OLDER, tmp_path/"older")
    return tmp_path/"older"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["folder", "URL"])
def test_an_older_packed_cache_is_read(name, place, older, opened, tmp_path, monkeypatch):
    "Every entry has the bytes it had; SQLite has no part in it."
    monkeypatch.setenv("QIE_NB_REMOTE_COPY", str(tmp_path/"copies"))
    expected = json.loads((older/"expected.json").read_text())
    if name == "packed":
        expected = {k: v for k, v in expected.items() if "edit_mask" not in k}
    cache = EmbeddingCacheManager(older/name if place == "folder" else f"file://{older/name}")
    layer, = cache.layers
    found = {f"{e.kind}/{e.key}": layer.read(e.kind, e.key) for e in cache.entries()}
    assert {k: hashlib.sha256(data).hexdigest() for k, data in found.items()} == expected
    sizes = {f"{e.kind}/{e.key}": e.bytes for e in cache.entries()}
    assert sizes == {k: len(data) for k, data in found.items()}
    table = TextTable if name == "packed" else EntryDict
    assert {type(t) for t in layer.index.values()} == {table} and len(layer.shards) == 3
    assert cache.verify() == [] and cache.identity()["model"] == "é" and not opened


@pytest.mark.parametrize("name", NAMES)
def test_packing_an_older_packed_cache_again_makes_a_database(name, older, tmp_path):
    "Also in its own place."
    before = EmbeddingCacheManager(older/name)
    ids = [(e.kind, e.key, e.bytes) for e in before.entries()]
    read = {(kind, key): before.layers[0].read(kind, key) for kind, key, _ in ids}
    before.pack(older/name, replace=True)
    after = EmbeddingCacheManager(older/name)
    assert {type(t) for t in after.layers[0].index.values()} == {EntryTable}
    assert [(e.kind, e.key, e.bytes) for e in after.entries()] == ids
    assert {id: after.layers[0].read(*id) for id in read} == read


def test_the_helper_writes_what_older_versions_wrote(older):
    "Byte for byte, so that tests of the older reader read the real thing."
    text = (older/"packed"/INDEX).read_bytes()
    EmbeddingCacheManager(older/"packed").pack(older/"again", shard_bytes=3000)
    assert make_older(older/"again").read_bytes() == text


# --- what never reaches SQLite
def other_bytes(data:bytes) -> bytes:
    "As many, one of them changed, so that SQLite would notice nothing."
    at = data.index(b"shape")
    return data[:at] + b"X" + data[at + 1:]


DAMAGES = {
    "one byte": (other_bytes, f"{DATABASE} differs from its sha256"),
    "cut short": (lambda data: data[:-8192], rf"{DATABASE} beside it has \d+ bytes, not \d+"),
    "empty": (lambda data: b"", rf"{DATABASE} beside it has 0 bytes, not \d+"),
    "longer": (lambda data: data + b"\0", rf"{DATABASE} beside it has \d+ bytes, not \d+"),
    "a pickle": (lambda data: pickle.dumps(data)[:len(data)],
                 f"{DATABASE} differs from its sha256")}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_database_never_reaches_sqlite(name, packed, opened):
    "The digest is compared first."
    damage, why = DAMAGES[name]
    path = packed/DATABASE
    good = path.read_bytes()
    path.write_bytes(damage(good))
    refused(packed, why)
    assert not opened
    path.write_bytes(good)
    assert numbers(packed) == list(range(N)) and opened


def test_a_missing_or_exchanged_database_never_reaches_sqlite(packed, opened, tmp_path):
    "Neither does another packed cache's, nor one that is replaced after opening."
    cache = EmbeddingCacheManager(packed)
    other = made(tmp_path/"other", add=100.)
    before = len(opened)
    shutil.copy(other/DATABASE, packed/DATABASE)
    refused(packed, f"{DATABASE} differs from its sha256")
    fresh = pickle.loads(pickle.dumps(cache))
    with pytest.raises(CacheEntryError, match=f"{DATABASE} differs from its sha256{AGAIN}"):
        fresh.cache_exists("pixel_latent", keys()[0])
    (packed/DATABASE).unlink()
    refused(packed, f"{DATABASE} beside it is missing")
    fresh = pickle.loads(pickle.dumps(cache))
    with pytest.raises(CacheEntryError, match=f"{DATABASE} beside it is missing{AGAIN}"):
        fresh.cache_exists("pixel_latent", keys()[0])
    assert len(opened) == before
    shutil.copy(other/INDEX, packed/INDEX), shutil.copy(other/DATABASE, packed/DATABASE)
    cache = EmbeddingCacheManager(packed)
    assert cache.load_cache("pixel_latent", keys()[0]) is None, "these are not its shards"


def facts_of(name:str=DATABASE, size:object=1, sha256:str="0" * 64) -> dict:
    "A change of the index: what it says about the database."
    return dict(database=dict(name=name, size=size, sha256=sha256))


LIES = {
    "another format": (dict(format="qie_nb-pack-9"),
                       "its format is 'qie_nb-pack-9', not qie_nb-pack-2"),
    "another file": (facts_of(name="../x.sqlite"), LEFT_ALONE),
    "an absolute path": (facts_of(name="/etc/passwd"), LEFT_ALONE),
    "no sha256": (facts_of(sha256=""), LEFT_ALONE),
    "a size that is text": (facts_of(size="9"), LEFT_ALONE),
    "no sizes": (dict(sizes=[]), LEFT_ALONE),
    "no facts": (dict(database=None), ".*"),
    "a list": (dict(database=[1]), ".*"),
    "other identities": (dict(identities=[1]), ".*")}


@pytest.mark.parametrize("name", LIES)
def test_an_index_that_lies_about_its_database(name, packed, opened):
    "Its checksum is right, as a hostile author can make it."
    changes, why = LIES[name]
    index = json.loads((packed/INDEX).read_text()) | changes
    index["checksum"] = packed_index.index_checksum(index)
    (packed/INDEX).write_text(json.dumps(index))
    refused(packed, why)
    assert not opened


# --- a hostile database, with a right digest
def edited(folder:Path, *statements:str):
    "Change the database of a packed cache, and sign it again."
    with closing(sqlite3.connect(folder/DATABASE, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)
    signed_again(folder)


SCHEMAS = {
    "a view": ["ALTER TABLE headers RENAME TO h", "CREATE VIEW headers AS SELECT * FROM h"],
    "a view without end": [
        "ALTER TABLE entries RENAME TO e",
        "CREATE VIEW entries AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
        "SELECT 'pixel_latent' kind, i key FROM n"],
    "a trigger": ["CREATE TRIGGER t AFTER INSERT ON entries BEGIN SELECT 1; END"],
    "another table": ["CREATE TABLE more (x)"],
    "a virtual table": ["CREATE VIRTUAL TABLE more USING fts5(x)"],
    "an index": ["CREATE INDEX i ON entries (size)"],
    "an index on an expression": ["CREATE INDEX i ON headers (upper(header))"],
    "a generated column": ["ALTER TABLE entries ADD COLUMN x AS (zeroblob(1000000000))"],
    "no headers": ["DROP TABLE headers"],
    "other columns": ["ALTER TABLE entries RENAME COLUMN begin TO start"],
    "a name with a line end": ['CREATE TABLE "a\n\x1b[31m" (x)']}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_database_with_other_tables(name, packed):
    "Its tables must be exactly ours, before any of its rows is asked for."
    edited(packed, *SCHEMAS[name])
    with seconds(10):
        refused(packed, f"{DATABASE} was not written by qie_nb")


@pytest.mark.parametrize("data", [
    b"", b"x" * 20_000, pickle.dumps(list(range(9))), b"SQLite format 3\0" + b"\xff" * 9000])
def test_a_file_that_is_no_database(data, packed):
    "SQLite's own words, in our sentence."
    (packed/DATABASE).write_bytes(data)
    signed_again(packed)
    refused(packed, f"{DATABASE}.*")


def test_a_malformed_schema_is_one_line(packed):
    "SQLite's message contains the name."
    name = "'a' || char(10) || char(27)"
    sql = "'create table x(x x x, constraint constraint' || char(10) || char(27)"
    edited(packed, "PRAGMA writable_schema=ON", f"UPDATE sqlite_master SET sql={sql}, name={name}")
    refused(packed, f"{DATABASE}: malformed database schema[ -~]*")


# SQLite converts text that looks like a number, so these are other values
VALUES = {
    "shard": ["7", "-1", "'zero'", "0.5", "x'00'"],
    "begin": ["-8", "1 << 40", "9223372036854775807", "'a'", "1e300"],
    "size": ["-1", "1 << 50", "9223372036854775807", "'many'"],
    "header": ["-1", "99", "'one'", "x'00'"],
    "header_bytes": ["-9", "'a'", "x'00'"]}


@pytest.mark.parametrize("column, value", [(c, v) for c, some in VALUES.items() for v in some])
def test_a_value_that_is_no_place_in_a_shard(column, value, packed):
    "It costs its entry, or the packed cache with one sentence; never a large buffer."
    bad, good = keys()[1], keys()[2]
    edited(packed, f"UPDATE entries SET {column}={value} WHERE key='{bad}'")
    cache = EmbeddingCacheManager(packed)
    assert cache.cache_exists("pixel_latent", bad)
    if column == "header_bytes":
        with pytest.raises(CacheEntryError, match=NOT_OURS + AGAIN):
            cache.get_cache_stats()
        return
    for read in (cache.load_cache, cache.map_cache):
        assert read("pixel_latent", bad) is None and read("pixel_latent", good)[0] == 2
    (where, why), *_ = cache.quarantined
    assert where.startswith(f"{packed}/") and where.endswith(f"pixel_latent {bad}")
    wanted = "unreadable header" if column == "header" else "is not inside its shard"
    assert why == wanted
    if column == "size" and value in ("-1", "'many'"):
        with pytest.raises(CacheEntryError, match=NOT_OURS):
            cache.verify()
    else:
        assert [w for w, _ in cache.verify()] == [where]


def test_a_header_that_is_no_text_or_gone(packed):
    "It costs its entry."
    edited(packed, "UPDATE headers SET header=x'ff' WHERE number=0",
           "DELETE FROM headers WHERE number=1",
           "UPDATE headers SET header='[]' WHERE number=2",
           "UPDATE headers SET header=CAST(x'ff' AS TEXT) WHERE number=4")
    cache = EmbeddingCacheManager(packed)
    lost = [cache.load_cache("pixel_latent", key) is None for key in keys()[:4]]
    assert lost == [True, True, True, False]
    assert [why for _, why in cache.quarantined][:2] == ["unreadable header"] * 2
    assert cache.load_cache("pixel_latent", keys()[4]) is None
    assert "Could not decode" in cache.quarantined[-1][1]


@pytest.mark.parametrize("key", ["../../x", "a/b", "", "a\nb", "é" * 40])
def test_a_key_that_is_no_key(key, packed, tmp_path):
    "It never becomes the name of a file."
    edited(packed, f"UPDATE entries SET key='{key}' WHERE key='{keys()[3]}'")
    cache = EmbeddingCacheManager([packed, tmp_path/"mine"])
    for act in (cache.get_cache_stats, cache.verify, lambda: cache.pack(tmp_path/"again")):
        if key: # an empty one comes before every key, so it is never listed
            with pytest.raises(CacheEntryError, match=NOT_OURS + AGAIN):
                act()
    assert not list(tmp_path.glob("*x*"))


def test_pages_that_lead_in_a_circle_end(tmp_path):
    "A page that names one page many times would be listed without end."
    path = tmp_path/DATABASE
    entries = [PackedEntry("pixel_latent", f"{n:040x}", 0, 0, 1, 2) for n in range(2000)]
    packed_index.write_database(path, entries, ["{}"] * len(entries))
    data = bytearray(path.read_bytes())
    with closing(sqlite3.connect(path)) as db:
        root, = db.execute("SELECT rootpage FROM sqlite_master WHERE name='entries'").fetchone()
    page = (root - 1) * 8192
    count = int.from_bytes(data[page + 3:page + 5], "big")
    assert data[page] == 2 and count > 5, "an inner page"
    at = range(page + 12, page + 12 + 2 * count, 2)
    cells = [int.from_bytes(data[n:n + 2], "big") for n in at]
    for cell in cells: # every child is the first
        data[page + cell:page + cell + 4] = data[page + cells[0]:page + cells[0] + 4]
    path.write_bytes(data)
    facts = dict(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    database = packed_index.EntryDatabase(path, facts, [10], "here")
    with seconds(20), pytest.raises(CacheEntryError, match=NOT_OURS):
        list(database.kinds()["pixel_latent"].sizes())


def test_files_beside_the_database_are_not_read(packed, tmp_path):
    "SQLite would take rows from a write-ahead log, or change the database as a journal says."
    shutil.copytree(packed, tmp_path/"copy")
    db = sqlite3.connect(tmp_path/"copy"/DATABASE, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    shutil.copy(tmp_path/"copy"/DATABASE, packed/DATABASE) # its header says that it has such a log
    db.execute("UPDATE entries SET begin=begin + 4")
    log = tmp_path/"copy"/f"{DATABASE}-wal"
    assert log.stat().st_size > 1000
    shutil.copy(log, packed)
    db.close()
    signed_again(packed)
    before = {p.name: p.read_bytes() for p in packed.iterdir()}
    assert numbers(packed) == list(range(N))
    assert {p.name: p.read_bytes() for p in packed.iterdir()} == before


# --- where it is and who reads it
ODD = ["with space", "a?mode=rwc", "a#b", "100%41", "a&b;c", "é中", "file:x", "'\"", "-x", "a\\b"]


@pytest.mark.parametrize("name", ODD)
def test_paths_with_odd_characters(name, packed, tmp_path, opened):
    "The path is quoted in SQLite's URI; nothing new appears."
    place = (tmp_path/"x"/name)
    shutil.copytree(packed, place/"packed")
    before = sorted(tmp_path.rglob("*"))
    assert numbers(place/"packed") == list(range(N)) and len(opened) == 1
    assert opened[0].endswith("?mode=ro&immutable=1")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_relative_path(packed, monkeypatch):
    "A folder in the working directory."
    monkeypatch.chdir(packed.parent)
    assert numbers(Path("packed")) == list(range(N))


def test_a_folder_that_cannot_be_written(packed):
    "Nothing is written into it. tests/cache_fault_trials.py has it on a read-only mount."
    for path in packed.iterdir():
        path.chmod(0o444)
    packed.chmod(0o555)
    try:
        before = sorted((p.name, p.stat().st_mtime_ns) for p in packed.iterdir())
        stamp = packed.stat().st_mtime_ns
        assert numbers(packed) == list(range(N))
        assert sorted((p.name, p.stat().st_mtime_ns) for p in packed.iterdir()) == before
        assert packed.stat().st_mtime_ns == stamp
    finally:
        packed.chmod(0o755)


def test_a_connection_refuses_to_write(packed):
    "Whatever it is asked."
    database = EmbeddingCacheManager(packed).layers[0].database
    good = (packed/DATABASE).read_bytes()
    for query in ("DELETE FROM entries", "CREATE TABLE t (x)", "PRAGMA journal_mode=WAL"):
        try:
            database.rows(query)
        except CacheEntryError as e:
            assert "readonly" in str(e)
    assert (packed/DATABASE).read_bytes() == good and numbers(packed) == list(range(N))


def read_in_child(layer, pipe):
    "Read all entries in another process."
    connection = layer.database._opened().connection
    data = [layer.read("pixel_latent", key)[-4:] for key in keys()]
    pipe.send((data, id(connection)))


def last_bytes() -> list:
    "The end of each entry, a float32."
    return [torch.tensor(float(n)).numpy().tobytes() for n in range(N)]


@pytest.mark.parametrize("method", ["fork", slow("spawn")])
def test_each_process_has_its_own_connection(method, packed):
    "Of an object that its parent has used."
    layer = open_layer(packed)
    mine = layer.database._opened().connection
    assert layer.has("pixel_latent", keys()[0])
    context = multiprocessing.get_context(method)
    for _ in range(2):
        here, there = context.Pipe()
        child = context.Process(target=read_in_child, args=(layer, there))
        child.start()
        assert here.poll(120), "no answer"
        data, connection = here.recv()
        child.join(60)
        assert data == last_bytes() and child.exitcode == 0
        assert method == "spawn" or connection != id(mine)
    assert layer.database._opened().connection is mine
    assert [layer.read("pixel_latent", key)[-4:] for key in keys()] == last_bytes()


def test_each_thread_has_its_own_connection(packed):
    "Four threads read at the same time."
    layer, found, together = open_layer(packed), [], threading.Barrier(4)

    def read():
        "All entries, many times."
        together.wait()
        data = [[layer.read("pixel_latent", key)[-4:] for key in keys()] for _ in range(50)]
        listed = [key for key, _ in layer.entries("pixel_latent")]
        right = data == [last_bytes()] * 50 and listed == keys()
        found.append((right, layer.database._opened().connection))
        together.wait()
    threads = [threading.Thread(target=read) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [ok for ok, _ in found] == [True] * 4
    mine = layer.database._opened().connection
    assert len({id(c) for _, c in found} | {id(mine)}) == 5


def test_a_listing_may_go_on_in_another_thread(packed, monkeypatch):
    "A progress bar may run through it."
    monkeypatch.setattr(packed_index, "_AT_ONCE", 2)
    monkeypatch.setattr(packed_index, "_NEXT", packed_index._NEXT.replace("1000", "2"))
    listing, rest = open_layer(packed).entries("pixel_latent"), []
    first, _ = next(listing)
    thread = threading.Thread(target=lambda: rest.extend(key for key, _ in listing))
    thread.start()
    thread.join()
    assert [first, *rest] == keys()


def test_a_connection_is_closed_with_its_layer(packed):
    "Without waiting for the collector: caches are opened often."
    layer = open_layer(packed)
    path = str((packed/DATABASE).resolve())

    def is_open() -> bool:
        "Has this process the file open?"
        files = Path("/proc/self/fd").iterdir()
        return path in [os.path.realpath(file) for file in files]
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    assert is_open()
    del layer
    assert not is_open()


# --- writing it
@pytest.mark.slow
def test_equal_entries_give_equal_bytes(packed, tmp_path):
    "In another process, with another order of entries, and after other work."
    text = f"""
from qie_nb.cache import EmbeddingCacheManager
cache = EmbeddingCacheManager({str(tmp_path/'loose')!r})
cache.pack({str(tmp_path/'two')!r}, shard_bytes=4000)"""
    environment = os.environ | dict(PYTHONHASHSEED="7")
    subprocess.run([sys.executable, "-c", text], check=True, env=environment)
    shards = ["cache-00001-00002.safetensors", "cache-00002-00002.safetensors"]
    assert sorted(p.name for p in packed.iterdir()) == [*shards, INDEX, DATABASE]
    for path in packed.iterdir():
        assert path.read_bytes() == (tmp_path/"two"/path.name).read_bytes(), path.name


def test_the_index_is_small_and_says_what_it_belongs_to(packed):
    "All but the entries is in the JSON file."
    index = json.loads((packed/INDEX).read_text())
    data = (packed/DATABASE).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    assert index["database"] == dict(name=DATABASE, size=len(data), sha256=digest)
    for name, size, digest in zip(index["shards"], index["sizes"], index["sha256"]):
        shard = (packed/name).read_bytes()
        assert (size, digest) == (len(shard), hashlib.sha256(shard).hexdigest())
    assert index.keys() == {"checksum", "database", "format", "identities", "sha256", "shards",
                            "sizes"}
    assert entries_of(open_layer(packed))["pixel_latent"].keys() == set(keys())


def test_a_full_disk_is_one_sentence_and_leaves_nothing(packed, tmp_path, monkeypatch):
    "SQLite has its own words for it."
    real = sqlite3.connect

    def connect(*args, **kw):
        "A database of at most two pages."
        db = real(*args, **kw)
        if str(args[0]).endswith(".tmp"):
            db.execute("PRAGMA max_page_count=2")
        return db
    monkeypatch.setattr(sqlite3, "connect", connect)
    cache = EmbeddingCacheManager(tmp_path/"loose")
    full = r"'.*full' is full: [\d.]+ MB are needed and .* free at least [\d.]+ MB more"
    with pytest.raises(DiskFull, match=full):
        cache.pack(tmp_path/"full")
    assert sorted(p.suffix for p in (tmp_path/"full").iterdir()) == [".safetensors"]
    before = {p.name: p.read_bytes() for p in packed.iterdir()}
    with pytest.raises(DiskFull):
        cache.pack(packed, replace=True)
    assert {p.name: p.read_bytes() for p in packed.iterdir()} == before


def test_what_is_needed_is_never_less_than_what_is_written(tmp_path, monkeypatch):
    "The sentence about a full disk names this size."
    said, real = [], packed_index.atomic_path

    def atomic_path(path, scratch=None, size=None):
        "Note the size."
        said.append(size)
        return real(path, scratch, size)
    monkeypatch.setattr(packed_index, "atomic_path", atomic_path)
    for count, length in ((1, 10), (1, 100_000), (3000, 10), (3000, 700), (300, 2700), (300, 4100),
                          (100, 8200)):
        kind, far = "empty_prompt_embed", 1 << 40
        entries = [PackedEntry(kind, f"{n:040x}", 0, far, far, length) for n in range(count)]
        headers = ["x" * length] * count
        written = packed_index.write_database(tmp_path/DATABASE, entries, headers)["size"]
        assert written <= said[-1] <= 4 * written, (count, length, written, said[-1])


def test_an_unfinished_database_is_not_an_index(packed, tmp_path, monkeypatch):
    "The index is written last."
    monkeypatch.setattr("qie_nb.core.cache_layers.index_text", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        EmbeddingCacheManager(tmp_path/"loose").pack(tmp_path/"two")
    assert (tmp_path/"two"/DATABASE).is_file() and not open_layer(tmp_path/"two").packed


def test_the_output_folder_may_hold_the_files_of_a_packed_cache_only(packed, tmp_path):
    "With `replace`; a file of yours is never deleted."
    cache = EmbeddingCacheManager(tmp_path/"loose")
    (packed/f"{DATABASE}-journal").write_text("mine")
    with pytest.raises(ValueError, match="is not empty; name a new folder to pack into, or set"):
        cache.pack(packed, replace=True)
    (packed/f"{DATABASE}-journal").unlink()
    cache.pack(packed, replace=True)
    assert numbers(packed) == list(range(N))


def test_an_attached_packed_cache_is_recognised(packed):
    "As a Kaggle data set, with all files at the top."
    assert all(p.is_file() for p in packed.iterdir())
    place = Environment("script", working=packed.parent/"empty", inputs=[packed.parent])
    found = {a.path: a.description for a in place.found("cache")}
    assert found[packed] == "packed, of tiny (None)"


def test_a_reader_at_a_url_fetches_again_what_was_deleted(packed, tmp_path, monkeypatch):
    "A loader process may start after another run has made room."
    monkeypatch.setenv("QIE_NB_REMOTE_COPY", str(tmp_path/"copies"))
    fs = fsspec.filesystem("memory")
    for path in packed.iterdir():
        fs.pipe(f"/index/{path.name}", path.read_bytes())
    layer = open_place("memory://index")
    data = pickle.dumps(layer)
    copy, = (tmp_path/"copies").rglob(DATABASE)
    copy.unlink()
    child = pickle.loads(data)
    assert [child.read("pixel_latent", key)[-4:] for key in keys()] == last_bytes()
    assert copy.is_file()
    fs.rm("/index", recursive=True)
