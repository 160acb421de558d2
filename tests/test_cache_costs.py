"""What the cache costs, counted and not timed: files opened, files asked about, rows fetched."""
import collections, os, sys

import pytest

from helpers import settings
from qie_nb.core import files
from qie_nb.cache import EmbeddingCacheManager
from qie_nb.core.cache_entries import KINDS, PREFIX
from qie_nb.data.dataset import ImageDataset, loader
from qie_nb.trainer import QwenImageEditTrainer

N = 8


class Counted:
    "Within, files opened by this process and questions about files, by path."
    on = None

    def __enter__(self):
        self.opened, self.asked, Counted.on, self.real = collections.Counter(), collections.Counter(), self, os.stat
        os.stat = lambda path, *a, **kw: (self.asked.update([path if isinstance(path, int) else os.fsdecode(path)]), self.real(path, *a, **kw))[1]
        return self

    def __exit__(self, *_): Counted.on, os.stat = None, self.real

    @staticmethod
    def hook(event, args):
        if Counted.on and event == "open" and isinstance(args[0], (str, bytes, os.PathLike)): Counted.on.opened[os.fsdecode(args[0])] += 1


sys.addaudithook(Counted.hook)


@pytest.fixture
def filled(pairs, tmp_path, monkeypatch):
    "A function that opens a data set with its cache, loose or packed; facts of files are kept at once."
    monkeypatch.setenv("QIE_NB_HOME", str(tmp_path/"home"))
    monkeypatch.setattr(files, "_MIN_AGE", -10.)
    root = pairs(((48, 32),) * N, caption=[f"make number {i} blue" for i in range(N)])
    data = dict(image_size=[64, 64], caption_dropout_rate=0.)
    QwenImageEditTrainer(settings(root, tmp_path, data=data, cache=dict(cache_dir=str(tmp_path/"loose")))).cache_embeddings()
    cache = EmbeddingCacheManager(tmp_path/"loose")
    cache.clear_cache("modulation")
    cache.pack(tmp_path/"packed", shard_bytes=200_000)
    return lambda layer: ImageDataset(dict(dataset_path=str(root), cache_dir=str(tmp_path/layer), use_cache=True) | data)


def epoch(ready):
    with Counted() as c: assert [b["cached"] for b in ready] == [True] * N
    return c


def test_a_sample_opens_four_files_and_no_image_once_its_digests_are_known(filled):
    ready = loader(filled("loose"))
    for _ in range(2):
        c = epoch(ready)
        entries = {p: n for p, n in c.opened.items() if p.endswith(".safetensors")}
        kinds = collections.Counter(p.split(os.sep)[-3] for p in entries)
        assert kinds == dict.fromkeys((*KINDS[:3], PREFIX), N) and set(entries.values()) == {1}
        assert not [p for p in c.opened if p.endswith(".png")], "an image is asked about, not read"
    assert sum(c.asked.values()) <= 8 * N, "in a later epoch: each of two images twice, each entry once"


def test_a_packed_cache_opens_each_shard_once_a_process(filled, tmp_path):
    ready = loader(filled("packed"))
    shards = {str(p) for p in (tmp_path/"packed").glob("*.safetensors")}
    opened = [p for p in epoch(ready).opened.elements() if p.endswith(".safetensors")]
    assert len(shards) > 1 and sorted(opened) == sorted(shards)
    later = epoch(ready)
    assert not [p for p in later.opened if p.endswith((".safetensors", ".png"))] and sum(later.asked.values()) <= 4 * N


@pytest.mark.parametrize("layer", ["loose", "packed"])
def test_a_look_at_the_status_opens_nothing_and_asks_about_each_image_twice(filled, layer):
    ds = filled(layer)
    ds.status()
    with Counted() as c: assert ds.status()["complete"] == N
    assert [os.path.basename(p) for p in c.opened.elements()] == ["manifest.json"] * (layer == "loose")
    asked = collections.Counter(os.path.splitext(str(p))[1] for p in c.asked.elements())
    assert asked[".png"] <= 4 * N and not asked[".safetensors"], "a folder's listing tells the sizes"


def test_a_new_process_fetches_what_is_known_with_one_question_a_folder(filled, monkeypatch):
    filled("loose").status()
    files._flush() # as at the end of a process
    monkeypatch.setattr(files, "_facts", {}), monkeypatch.setattr(files, "_folders", set()) # what this process knows
    said, real = [], files._execute
    monkeypatch.setattr(files, "_execute", lambda *query: (said.append(query[0]), real(*query))[1])
    assert filled("loose").status()["complete"] == N
    assert len(said) == 2 and all(s.startswith("select") for s in said), said
