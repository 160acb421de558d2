"""What grows with the number of samples, counted and not timed: questions about files, files opened, calls of a step, bytes of memory."""
import hashlib, json, os, shutil, sys
from pathlib import Path

import pytest

from qie_nb.cache import EmbeddingCacheManager, key_of
from qie_nb.core import files
from qie_nb.core.cache_layers import INDEX, FolderStore, open_layer, write_packed
from qie_nb.core.packed_index import EntryDict, TextTable, scan_older_index
from qie_nb.core.packed_index import DATABASE, EntryTable, PackedEntry, index_checksum, index_text, write_database
from qie_nb.data.dataset import loader
from helpers import entries_of, make_older, older_index

sys.path.insert(0, str(Path(__file__).parents[1]/"benchmarks"))
import growth


@pytest.fixture
def made(tmp_path, monkeypatch):
    "A function that makes a data set with its cache; facts of files are kept at once."
    monkeypatch.setenv("QIE_NB_HOME", str(tmp_path/"home"))
    monkeypatch.setattr(files, "_MIN_AGE", -10.)
    def make(n, cached=True):
        growth.make_pairs(root := tmp_path/str(n), n)
        if cached: growth.fill(root)
        return root
    return make


@pytest.fixture(scope="module")
def hooked(): sys.addaudithook(growth.Counted.hook)


def test_opening_asks_about_each_image_once_and_opens_each_caption(made, hooked):
    for n in (50, 200):
        root = made(n, cached=False)
        growth.data_set(root, "cache")
        with growth.Counted() as c: growth.data_set(root, "cache")
        assert c.opened <= n + 20 and c.asked <= 2 * n + 30, (n, c.opened, c.asked)


def test_a_changed_image_is_noticed_when_the_set_is_opened_again(made):
    root = made(3)
    before = growth.data_set(root, "cache")
    path = root/"set"/"control_images"/"0000001.png"
    stat = path.stat()
    path.write_bytes(growth.png(200)) # as many bytes
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = growth.data_set(root, "cache")
    assert path.stat().st_size == stat.st_size
    for ds in (before, after): assert [bool(ds.missing(i)) for i in range(3)] == [False, True, False]


def test_a_step_does_the_same_with_more_samples(made, hooked):
    counted = []
    for n in (50, 500):
        ready = loader(growth.data_set(made(n), "cache"))
        ds, chosen = ready.dataset, list(ready.batch_sampler)[:20]
        sample = lambda: [ready.collate_fn([ds[i] for i in b]) for b in chosen]
        sample()
        with growth.Counted() as c: assert all(b["cached"] for b in sample())
        counted.append((c.opened / 20, c.asked / 20, growth.calls(sample) / 20))
    (few_opened, few_asked, few_calls), (opened, asked, calls) = counted
    assert (opened, asked) == (few_opened, few_asked) and opened <= 6 and asked <= 12 and calls <= 1.1 * few_calls


@pytest.mark.slow
def test_memory_of_a_sample(made, tmp_path):
    "In a process of its own: threads and caches of other tests allocate, too."
    got = growth.child("allocated", made(1000), "cache", tmp_path/"home")
    assert got["opened"] < 3000 and got["known"] < 800, got


def test_facts_are_written_in_groups_and_all_before_the_process_ends(made, monkeypatch):
    said, real = [], files._execute
    monkeypatch.setattr(files, "_execute", lambda *query: (said.append(query[0]), real(*query))[1])
    ds = growth.data_set(made(100, cached=False), "cache")
    ds.refresh(growth.WHO)
    for i in range(100): ds.keys(i)
    assert said.count("begin immediate") < 100
    files._flush()
    assert real("select count(*) from facts where name in ('size', 'sha256')") == [(400,)]


# --- a packed cache
@pytest.mark.slow
def test_memory_of_an_entry_of_a_packed_cache(made, tmp_path):
    root = made(300)
    EmbeddingCacheManager(root/"cache").pack(root/"packed")
    got = growth.child("allocated_packed", root, "packed", tmp_path/"home")
    assert got["entries"] == 1500 and got["tables"] == ["EntryTable"] and got["kept"] < 20, got
    assert got["most"] * 1500 < 2.5e6, got # blocks of a MB are hashed
    make_older(root/"packed")
    got = growth.child("allocated_packed", root, "packed", tmp_path/"home")
    assert got["entries"] == 1500 and got["tables"] == ["TextTable"] and got["kept"] < 80 and got["most"] < 250, got


def wide(folder, n) -> list: # keys
    "A packed cache of n entries with full headers, without tensors."
    folder.mkdir()
    keys = sorted(hashlib.sha1(b"%d" % i).hexdigest() for i in range(n))
    parts = dict(image="0" * 64, vae="1" * 64, size=[1024, 1024], dtype="bfloat16", padding="x" * 300)
    data = growth.entry_file("pixel_latent", keys[0], parts, None)
    length = int.from_bytes(data[:8], "little")
    entries = [PackedEntry("pixel_latent", key, 0, 0, 64, length) for key in keys]
    facts = write_database(folder/DATABASE, entries, [data[8:8 + length].decode()] * n)
    (folder/"cache-00001-00001.safetensors").write_bytes(bytes(64))
    (folder/INDEX).write_bytes(index_text(facts, ["cache-00001-00001.safetensors"], [64], ["0" * 64], {}))
    return keys


@pytest.mark.slow
def test_a_packed_cache_of_many_entries_takes_no_memory_and_a_look_up_does_the_same(tmp_path):
    "SQLite keeps at most 2 MB of pages; all headers are 70 MB."
    few, many = wide(tmp_path/"small", 1000), wide(tmp_path/"large", 100_000)
    assert (tmp_path/"large"/DATABASE).stat().st_size > 60_000_000
    if os.path.isfile("/proc/self/status"):
        got = growth.child("opened_packed", tmp_path, "large", tmp_path/"home")
        assert got["entries"] == 100_000 and got["opened"] < 4e6 and got["used"] < 12e6, got
    counted = []
    for name, keys in (("small", few), ("large", many)):
        layer = open_layer(tmp_path/name)
        def look():
            for key in keys[::len(keys) // 100]: layer.has("pixel_latent", key), layer.payload("pixel_latent", key)
        look()
        counted.append(growth.calls(look) / 100)
    assert counted[0] == counted[1] < 60, counted


def test_both_older_forms_are_still_read(tmp_path):
    loose = FolderStore(tmp_path/"loose")
    for i in range(40):
        for kind in ("pixel_latent", "prompt_embed"):
            parts = dict(prompt=f'é "x"]}}, \\ \u4e2d {i}')
            path = loose.path(kind, key := key_of(kind, **parts))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(growth.entry_file(kind, key, parts, None))
    entries = [(loose, kind, key) for kind in ("pixel_latent", "prompt_embed") for key, _ in loose.entries(kind)]
    write_packed(tmp_path/"packed", entries, {"a": dict(model="é")}, shard_bytes=5000)
    newest = open_layer(tmp_path/"packed")
    rows = entries_of(newest)
    index = make_older(tmp_path/"packed")
    whole = json.loads(index.read_text())
    assert whole["entries"] == rows and {type(t) for t in newest.index.values()} == {EntryTable}
    signed = {k: v for k, v in whole.items() if k != "checksum"}
    assert whole["checksum"] == index_checksum(signed) and sorted(whole) == ["checksum", "entries", "format", "identities", "sha256", "shards"]
    new = open_layer(tmp_path/"packed")
    shutil.copytree(tmp_path/"packed", tmp_path/"first")
    (tmp_path/"first"/INDEX).write_text(json.dumps(whole, ensure_ascii=False)) # as versions up to 1 wrote it
    old = open_layer(tmp_path/"first")
    assert type(new.index["pixel_latent"]) is TextTable and type(old.index["pixel_latent"]) is EntryDict
    for layer in (newest, new, old):
        for kind in ("pixel_latent", "prompt_embed"): assert list(layer.entries(kind)) == list(loose.entries(kind))
        assert all(layer.read(kind, key) == loose.read(kind, key) for _, kind, key in entries)
        assert layer.shards == new.shards


def test_a_line_of_an_older_index_that_was_changed_is_noticed(tmp_path):
    rows = {"pixel_latent": {f"{i:040x}": [0, 16 * i, 16, "{}"] for i in range(3)}}
    text = older_index(rows, dict(shards=["cache-1.safetensors"], identities={}))
    (tmp_path/"cache-index.json").write_bytes(text)
    (tmp_path/"cache-1.safetensors").write_bytes(bytes(64))
    assert len(scan_older_index(tmp_path/"cache-index.json")["entries"]["pixel_latent"]) == 3
    assert open_layer(tmp_path).has("pixel_latent", f"{2:040x}")
    for old, new in ((b"[0, 32, 16", b"[0, 33, 16"), (b"[0, 32, 16", b"[7, 32, 16"), (b'"{}"', b'"{ }"'), (b'"shards"', b'"shardz"'), (b"\n", b" ")):
        (tmp_path/"cache-index.json").write_bytes(text.replace(old, new, 1))
        if new == b" ": assert type(open_layer(tmp_path).index["pixel_latent"]) in (EntryDict, TextTable); continue
        with pytest.raises(ValueError, match="its checksum differs"): open_layer(tmp_path)
