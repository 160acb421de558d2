"""Batches share sizes, have similar prompt lengths, and depend on (seed, epoch) alone."""
import random

import pytest

from qie_nb.data.batches import BucketBatchSampler, collate, is_cached, prefetch
from qie_nb.data.dataset import ImageDataset


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


def test_without_shuffling_samples_come_in_their_own_order():
    for size in (1, 4):
        for epoch in (0, 1):
            sampler = BucketBatchSampler(Made(), size, seed=3, shuffle=False)
            sampler.set_epoch(epoch)
            for wide in (True, False): assert [i for b in sampler.batches() for i in b if (i % 3 == 0) == wide] == [i for i in range(101) if (i % 3 == 0) == wide]


def test_a_batch_is_cached_only_if_all_its_samples_are():
    "A sample whose entry was damaged after the last look brings its images; then the others' are read too."
    def sample(cached): return dict(cached=cached, sample_id="a", prompt="x", dropped=False, sample=None, index=0) | ({} if cached else dict(image=1, control=[2]))
    mixed = collate([sample(True), sample(False)])
    assert mixed["cached"] is False and mixed["image"] == [None, 1] and mixed["control"] == [None, [2]] and not is_cached(mixed)


def test_batch_size_one_is_not_sorted():
    assert BucketBatchSampler(Lengths(), 1, seed=3).batches() == BucketBatchSampler(Made(), 1, seed=3).batches()


def test_processes_take_turns_from_the_same_batch_on():
    sampler = BucketBatchSampler(Made(), 4, seed=3)
    left = sampler.batches()[6:]
    sampler.start, sampler.world = 6, 3
    for sampler.rank in range(3):
        mine = list(sampler)
        assert mine[:len(left) // 3] == left[sampler.rank::3][:len(left) // 3] and sampler.sizes() == [[len(b) for b in left[k:k + 3]] for k in range(0, len(left), 3)]
    assert len(left) % 3 and mine[-1] == left[len(left) // 3 * 3][:1], "the last process has no batch in the last round: it repeats one sample, which counts nowhere"


def test_what_a_loader_raises_in_advance_is_raised_in_its_place():
    def batches(): yield 1; yield 2; raise KeyError("broken")
    got = []
    with pytest.raises(KeyError, match="broken"): got.extend(b for b in prefetch(batches()) if got.append(b))
    assert got == [1, 2] and list(prefetch(iter("abc"))) == ["a", "b", "c"]


def test_a_dropped_caption_is_the_empty_prompt(pairs):
    dataset = ImageDataset(dict(dataset_path=str(pairs()), image_size=[64, 64], caption_dropout_rate=0.5, use_cache=False))
    seen = set()
    for epoch in range(8):
        dataset.set_epoch(epoch)
        for i, sample in enumerate(dataset.samples):
            got = dataset[i]
            seen.add(got["dropped"])
            assert got["prompt"] == ("" if got["dropped"] else sample.prompt)
    assert seen == {True, False}
