"""Loss weights from what changes in a pair (`data.edit_mask: auto`), from the latents to the loss."""
import io, shutil
from collections import Counter
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import settings
from qie_nb.cache import EDIT_MASK, EDIT_MASK_RULE
from qie_nb.data.dataset import ImageDataset
from qie_nb.models.flow_matching import edit_mask
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.step import pad_batch
from qie_nb.widgets.sample_viewer import pair_grid
from test_masks import halves, paint


def latents(h=16, w=24, seed=0): return torch.randn(16, 1, h, w, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("place", [(slice(4, 8), slice(6, 12)), (slice(0, 3), slice(20, 24))])
@pytest.mark.parametrize("size", [0.5, 3.])
def test_a_changed_place_has_full_weight_and_the_rest_none(place, size):
    before, here = latents(), torch.zeros(16, 24, dtype=torch.bool)
    here[place] = True
    after = before + size * here
    weights = edit_mask(after, before).float() / 255
    far = torch.nn.functional.max_pool2d(here[None].float(), 7, 1, 3)[0] == 0 # the Gaussian reaches 3 latent pixels
    assert weights.max() == 1 and weights[here].mean() > 0.8 and weights[far].max() == 0
    torch.testing.assert_close(edit_mask(before, after), edit_mask(after, before))
    noisy = edit_mask(after + 0.02 * latents(seed=1), before).float() / 255
    assert noisy[here].mean() > 0.8 and noisy[far].max() < 0.2, "noise of the VAE's size is no edit"


def test_an_edit_of_everything_and_no_edit_have_equal_weights():
    before = latents()
    assert (edit_mask(before + 0.7, before) == 255).all() and (edit_mask(before, before) == 255).all()
    assert (edit_mask(before.bfloat16(), before) == 255).all(), "rounding is no edit"
    spot = before + 0.7
    spot[..., 3, 3] += 7
    assert edit_mask(spot, before).float().mean() > 0.5 * 255, "a spot takes little from the rest"
    with pytest.raises(ValueError, match=r"`control` must be a latent of the target's size \(16, 1, 16, 24\), got \(16, 1, 8, 12\)"): edit_mask(before, latents(8, 12))


@pytest.fixture
def local(tmp_path): # pairs of which the left half changes, the second one has a mask image, the last does not change
    root, rng = tmp_path/"set", np.random.default_rng(0)
    for d in ("training_images", "control_images"): (root/d).mkdir(parents=True)
    for i in range(3):
        a = rng.integers(0, 255, (64, 128, 3), dtype=np.uint8)
        Image.fromarray(a).save(root/"control_images"/f"{i}.png")
        if i < 2: a[:, :48] = 255 - a[:, :48]
        Image.fromarray(a).save(root/"training_images"/f"{i}.png")
        (root/"training_images"/f"{i}.txt").write_text("invert the left side")
    return paint(root, {"1": halves(128, 64)})


def trainer_of(root, tmp_path, use=True, mask="auto", **sections):
    changes = dict(data=dict(edit_mask=mask, batch_size=3, shuffle=False, image_size=[128, 64], caption_dropout_rate=0.), train=dict(val_fraction=0.), cache=dict(use_cache=use))
    return QwenImageEditTrainer(settings(root, tmp_path, **{k: changes.get(k, {}) | sections.get(k, {}) for k in changes | sections}))


def cached_kinds(trainer): return [e.kind for e in trainer.data.open_cache().entries()]


@pytest.mark.slow
@pytest.mark.parametrize("area", [8192, 2048]) # of the controls: that of the targets, and another
def test_cached_and_uncached_batches_have_the_same_weights(local, tmp_path, area):
    t = trainer_of(local, tmp_path, data=dict(control_area=area))
    t.cache_embeddings()
    assert cached_kinds(t).count(EDIT_MASK) == 2, "not for the sample with a mask image"
    (x,), u = t.make_loader(), trainer_of(local, tmp_path, use=False, data=dict(control_area=area))
    (y,) = u.make_loader()
    assert x["cached"] and not y["cached"]
    weights = u.encode_batch(y)["mask"]
    torch.testing.assert_close(x["mask"], weights, atol=2 / 255, rtol=0)
    first, painted, same = x["mask"][:, 0]
    assert first[:, :5].mean() > 0.7 and first[:, 10:].mean() < 0.3, "the left side was changed"
    assert painted[:, 8:].min() == 1 and painted[:, :8].max() == 0
    assert same.min() == 1, "compared at the target's size, whatever the control's is in training"
    own = dict(image=y["image"], control=[c[0] for c in y["control"]], prompt=y["prompt"]) # of a user's own loader
    torch.testing.assert_close(u.encode_batch(own)["mask"][[0, 2]], weights[[0, 2]])
    assert "mask" not in u.encode_batch(own | dict(mask=torch.ones_like(weights)))
    eps, sigmas = torch.randn(x["pixel_latent"].shape), torch.tensor([0.3, 0.5, 0.7])
    t.set_lora(); u.set_lora()
    losses = [r.loss(pad_batch(b), eps, sigmas, mask_min_weight=0.1) for r, b in ((t, x), (u, {**y, **u.encode_batch(y)}))]
    torch.testing.assert_close(*losses, rtol=2e-2, atol=1e-4)
    plain = t.loss(pad_batch({**x, "mask": None}), eps, sigmas, mask_min_weight=0.1)
    assert not torch.allclose(plain[:2], losses[0][:2], rtol=1e-3) and torch.allclose(plain[2], losses[0][2], rtol=1e-4)


def test_weights_are_entries_of_their_own(local, tmp_path, monkeypatch, built):
    t = trainer_of(local, tmp_path, mask="none")
    t.cache_embeddings()
    before = cached_kinds(t)
    assert EDIT_MASK not in before and all("mask" not in n for i in range(3) for n in t.make_loader().dataset.needed(i))
    built.clear()
    t = trainer_of(local, tmp_path)
    report = t.cache_embeddings()
    assert (report.encoded, report.tensors) == (2, 2) and not built, "made of the cached latents"
    files = sorted((tmp_path/"cache"/EDIT_MASK).rglob("*.safetensors"))
    assert report.bytes == sum(f.stat().st_size for f in files) and Counter(cached_kinds(t)) == Counter(before) + Counter({EDIT_MASK: 2})
    status = (data := t.make_loader().dataset).status()["kinds"][EDIT_MASK]
    assert (status["needed"], status["present"], status["missing"]) == (2, 2, 0) and t.cache_embeddings().tensors == 0
    monkeypatch.setitem(EDIT_MASK_RULE, "smooth", 2.) # a changed rule never reads what an older one made
    data.refresh(data.identity)
    assert [data.missing(i) for i in range(3)] == [[EDIT_MASK], [], [EDIT_MASK]]
    monkeypatch.undo()
    keep = trainer_of(local, tmp_path, mask="none").make_loader().dataset.entries_needed()
    assert t.data.open_cache().gc(keep, dry_run=True)["entries"]["count"] == 2 and t.data.open_cache().verify() == []
    data.refresh(data.identity)
    assert data.cache.gc(data.entries_needed())["entries"]["count"] == 0
    packed = data.cache.pack(tmp_path/"packed", data.entries_needed())
    monkeypatch.setattr(data, "cache", type(data.cache)(tmp_path/"packed"))
    data.refresh(data.identity)
    assert packed and np.array_equal(data[0]["mask"], t.make_loader().dataset[0]["mask"])


def test_the_key_covers_both_images_and_their_size(local):
    who = dict(vae="v", dtype="float32", text_encoder="t", template="p")
    def key(root=local, **kw):
        data = ImageDataset(dict(dataset_path=str(root), edit_mask="auto", image_size=kw.pop("image_size", [128, 64])) | kw)
        data.refresh(who)
        return data.keys(0)[EDIT_MASK].key
    first = key()
    assert first == key(control_area=2048) == key(prompt="x"), "the training size of the control is no part of it"
    changed = []
    for side in ("training_images", "control_images"):
        copy = shutil.copytree(local, local.with_name(side))
        a = np.array(Image.open(copy/side/"0.png")); a[0, 0] ^= 1
        Image.fromarray(a).save(copy/side/"0.png")
        changed.append(key(copy))
    assert len({first, *changed, key(image_size=[64, 32]), key(image_size=[64, 64], crop=True)}) == 5


def test_held_out_pairs_have_no_weights(local, tmp_path):
    t = trainer_of(local, tmp_path, train=dict(val_path=str(local)))
    t.cache_embeddings()
    t.make_loader()
    assert EDIT_MASK not in t.held_out.needed(0) and t.held_out.config.edit_mask == "none"


def test_no_control_has_no_weights(local, tmp_path):
    (local/"control_images"/"2.png").unlink()
    t = trainer_of(local, tmp_path, data=dict(allow_missing_control=True, batch_size=1))
    t.cache_embeddings()
    assert [b["mask"] is None for b in t.make_loader()] == [False, False, True]


def test_another_setting_is_another_run(local, tmp_path):
    from qie_nb.training.resume import diff_runs, settings_metadata
    def facts(mask, **kw): return dict(settings=settings_metadata(trainer_of(local, tmp_path, mask=mask).config, "float32", None, 1))
    old = facts("none")
    del old["settings"]["data.edit_mask"] # a checkpoint from before the setting
    assert diff_runs(old, facts("none")) == [] and diff_runs(facts("auto"), facts("auto")) == []
    for was in (old, facts("none")): assert diff_runs(was, facts("auto")) == ["`data.edit_mask`: none in the checkpoint, auto now"]


def test_the_viewer_shows_them_when_they_are_encoded(local, tmp_path):
    t = trainer_of(local, tmp_path)
    def pages(): return pair_grid(ImageDataset(t.config), 3).html()
    assert "edit mask" not in pages() and "% counts" in pages(), "one mask image"
    with redirect_stdout(io.StringIO()): t.cache_embeddings()
    assert pages().count("edit mask: ") == 2 and pages().count("% counts, red does not") == 3
    assert "edit mask: 100 % counts" in pages()
