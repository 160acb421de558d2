"""Batches share sizes, have similar prompt lengths, and depend on (seed, epoch) alone."""
import random

import pytest

from qie_nb.data.batches import BucketBatchSampler


class Made:
    "Sizes of two buckets (the second differs in a control only) and lengths that change with the epoch."
    epoch = 0
    def __len__(self): return 101
    def bucket(self, i): return ((64, 64), (64, 64 + 32 * (i % 3 == 0)))
    def set_epoch(self, epoch): self.epoch = epoch
    def true_length(self, i): return 0 if random.Random(f"{self.epoch} {i}").random() < .2 else random.Random(i).randint(5, 300)


class Lengths(Made):
    def length(self, i): return self.true_length(i)


def padding(data, batches): return sum(max(map(data.true_length, b)) * len(b) - sum(map(data.true_length, b)) for b in batches)


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_have_similar_lengths(shuffle):
    for epoch in range(3):
        got = {}
        for data in (Made(), Lengths()):
            sampler = BucketBatchSampler(data, 4, seed=3, shuffle=shuffle)
            sampler.set_epoch(epoch)
            got[type(data)] = batches = sampler.batches()
            assert sorted(i for b in batches for i in b) == list(range(101)) and batches == sampler.batches()
            assert all(len({data.bucket(i) for i in b}) == 1 for b in batches) and len(sampler) == len(batches)
            sampler.start = 5
            assert list(sampler) == batches[5:]
        assert padding(data, got[Lengths]) < padding(data, got[Made]) / 3


def test_order_depends_on_seed_and_epoch():
    class Same(Made):
        def length(self, i): return 7
    def order(seed, epoch, kind):
        sampler = BucketBatchSampler(kind(), 4, seed)
        sampler.set_epoch(epoch)
        return sampler.batches()
    for kind in (Same, Lengths):
        assert order(1, 2, kind) == order(1, 2, kind) and len({str(order(s, e, kind)) for s in (1, 2) for e in (1, 2)}) == 4
    assert {frozenset(b) for b in order(1, 1, Same)} != {frozenset(b) for b in order(1, 2, Same)}, "composition changes"
    wide = [max(map(Lengths().true_length, b)) for b in order(1, 0, Lengths) if b[0] % 3]
    assert wide != sorted(wide), "batches are not in the order of their lengths"


def test_batch_size_one_is_not_sorted():
    assert BucketBatchSampler(Lengths(), 1, seed=3).batches() == BucketBatchSampler(Made(), 1, seed=3).batches()
