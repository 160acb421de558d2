"""What a run takes from its data beside the tensors: masks of single samples, what was held out, subsets."""
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from qie_nb.config import make_config
from qie_nb.data.dataset import ImageDataset
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.run_data import edit_masked, used_fraction, with_edit_masks

from helpers import settings


def sample(mask=None, controls=("a.png",)):
    return SimpleNamespace(mask=mask, controls=controls)


def test_a_mask_image_counts_more_than_the_pair():
    batch = dict(prompt=["x"] * 3, sample=[sample(), sample(mask="m.png"), sample(controls=())])
    data = make_config(dict(data=dict(edit_mask="auto"))).data
    assert edit_masked(batch, data) == [True, False, False]
    assert edit_masked(batch, make_config().data) == [False] * 3, "the default is no mask of pairs"


def test_masks_of_images_and_of_pairs_are_the_weights_of_their_own_samples():
    given = torch.full((2, 1, 2, 3), 0.25)
    of_pair = torch.full((2, 3), 51, dtype=torch.uint8)
    weights = with_edit_masks(given, [None, of_pair])
    assert weights[0].equal(given[0]) and weights[1].allclose(torch.tensor(0.2))
    assert given.eq(0.25).all(), "the batch keeps its own"
    alone = with_edit_masks(None, [of_pair, None])
    assert alone[0].allclose(torch.tensor(0.2)) and alone[1].eq(1).all()
    assert with_edit_masks(given, [None, None]) is given


@pytest.mark.parametrize("state, share", [
    ({}, 0),
    (dict(config=dict(train={})), 0), # of a version without held-out pairs
    (dict(config=dict(train=dict(val_fraction=0.1))), 0.1),
    (dict(config=dict(train=dict(val_fraction="auto")), run=dict(settings={"train.val_fraction": 0.2})), 0.2)])
def test_what_a_checkpoint_held_out(state, share):
    assert used_fraction(state) == share


def test_a_subset_drops_the_captions_that_the_data_set_drops(pairs, tmp_path):
    config = settings(pairs(((48, 32),) * 12), tmp_path, data=dict(caption_dropout_rate=0.5), train=dict(seed=7))
    data = QwenImageEditTrainer(config).data
    whole = ImageDataset(make_config(config))
    whole.seed = 23 # of a data set that was made by hand
    part = data.subset(whole, whole.samples[::2])
    dropped = [whole.dropped(i) for i in range(0, 12, 2)]
    assert [part.dropped(i) for i in range(6)] == dropped and len(set(dropped)) == 2


@pytest.mark.parametrize("given, size", [(None, 1), (2, 2)])
def test_a_loader_of_yours_keeps_its_batch_size(given, size, pairs, tmp_path):
    trainer = QwenImageEditTrainer(settings(pairs(((48, 32),) * 4), tmp_path, data=dict(batch_size=1)))
    yours = None if given is None else DataLoader(ImageDataset(trainer.config), batch_size=given)
    assert trainer.make_loader(yours).batch_sampler.batch_size == size
