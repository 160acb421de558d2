"""Masks of a data set, from the file to the loss."""
import json, shutil

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import OnStep, settings
from qie_nb.data import samples
from qie_nb.data.dataset import ImageDataset
from qie_nb.data.samples import find_samples, load_mask
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.resume import sample_digest
from qie_nb.training.step import flow_matching_loss, pad_batch
from test_samples import hub


def paint(root, masks, folder="mask_images", ending=""):
    "Write masks {stem: array} beside a data set."
    (root/folder).mkdir(exist_ok=True)
    for stem, a in masks.items(): Image.fromarray(np.asarray(a, np.uint8)).save(root/folder/f"{stem}{ending}.png")
    return root


def halves(w, h):
    a = np.zeros((h, w), np.uint8); a[:, w // 2:] = 255
    return a


def names(found): return [s.mask and s.mask.name for s in found]


@pytest.mark.parametrize("folder, ending", [("mask_images", ""), ("masks", "_mask"), ("training_images", "_mask"), ("training_images", "-Mask")])
def test_masks_are_found_beside_and_in_folders(folder, ending, pairs):
    root = paint(pairs(((48, 32),) * 3), {"0000": halves(48, 32), "0002": halves(48, 32)}, folder, ending)
    found = find_samples(root)
    assert names(found) == [f"0000{ending}.png", None, f"0002{ending}.png"]
    assert not found.ignored and repr(found).endswith("1 control each, masks for 2 of 3")
    assert [bool(s.mask) for s in find_samples([str(root), str(root)])] == [True, False, True] * 2
    if folder == "training_images": return
    paint(root, {"other": halves(48, 32)}, folder, ending)
    assert dict(find_samples(root).ignored) == {f"{folder}/other{ending}.png": "a mask without a target"}


def test_masks_of_pairs_marked_by_their_endings(tmp_path):
    for name in ("a_start", "a_end", "a_mask", "b_start", "b_end", "c_mask"): Image.new("L", (8, 8), 255).save(tmp_path/f"{name}.png")
    for name in "ab": (tmp_path/f"{name}.txt").write_text("x")
    found = find_samples(tmp_path)
    assert names(found) == ["a_mask.png", None] and dict(found.ignored) == {"c_mask.png": "neither target nor control by its name"}
    (tmp_path/"masks").mkdir(); shutil.move(tmp_path/"a_mask.png", tmp_path/"masks"/"a.png")
    assert names(find_samples(tmp_path)) == ["a.png", None]


@pytest.mark.parametrize("column", ["mask_image", "Mask File"])
def test_masks_of_a_table(column, pairs):
    root = paint(pairs(((48, 32),) * 2), {"0000": halves(48, 32)}, "painted")
    rows = [dict(image=f"training_images/000{i}.png", edit_image=f"control_images/000{i}.png", prompt="x") | {column: mask} for i, mask in enumerate(("painted/0000.png", ""))]
    (root/"metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = find_samples(root)
    assert names(found) == ["0000.png", None] and f"mask `{column}`" in found.layout
    (root/"metadata.jsonl").write_text(json.dumps(rows[0] | {column: "../../x.png"}))
    with pytest.raises(ValueError, match="row 1 of 'metadata.jsonl' names '../../x.png' outside"): find_samples(root)


def test_masks_of_a_data_set_of_the_hub():
    images = [Image.new("RGB", (48, 32), c) for c in ("red", "green")]
    found = find_samples(hub(target_image=images, control_image=images, prompt=["x", "y"], mask_image=[None, Image.fromarray(halves(48, 32))]))
    assert found[0].mask is None and found[1].mask.name == "mask_image[1]"
    dataset = ImageDataset(dict(image_size=[64, 64]), samples=found)
    assert dataset.mask(1).shape == (8, 8) and dataset[0].get("mask") is None and dataset[1]["mask"][0].tolist() == [0] * 4 + [255] * 4


def test_a_mask_is_cut_turned_and_averaged_as_its_target(tmp_path):
    upright = np.zeros((64, 96), np.uint8); upright[:, 32:] = 255 # white on the right, and not up to the middle
    target = Image.fromarray(upright).convert("RGB").transpose(Image.Transpose.ROTATE_90) # stored turned, marked 6: turn it back
    exif = Image.Exif(); exif[0x0112] = 6
    for d in ("training_images", "control_images", "masks"): (tmp_path/d).mkdir()
    for d in ("training_images", "control_images"): target.save(tmp_path/d/"a.jpg", exif=exif, quality=100)
    (tmp_path/"training_images"/"a.txt").write_text("x")
    Image.fromarray(upright).save(tmp_path/"masks"/"a.png")
    for kw, (w, h) in (dict(image_size=[96, 64]), (96, 64)), (dict(image_size=[48, 64], crop=True), (48, 64)):
        dataset = ImageDataset(dict(dataset_path=str(tmp_path), **kw))
        seen = dataset.images(0)["image"].mean(2).reshape(h // 8, 8, w // 8, 8).mean((1, 3))
        assert dataset.mask(0).shape == (h // 8, w // 8)
        assert np.abs(dataset.mask(0).astype(float) - seen).max() < 16, "the mask lies on the image it was painted on"


def test_thin_lines_of_a_mask_are_averaged():
    lines = np.zeros((64, 64), np.uint8); lines[:, ::4] = 255
    assert load_mask(Image.fromarray(lines), (32, 32)).tolist() == [[64] * 4] * 4


@pytest.mark.parametrize("write, sentence", [
    (lambda p: p.write_text("no image"), "cannot be read"),
    (lambda p: Image.new("L", (32, 48), 255).save(p), "is 32x48, another shape than its target of 48x32; crop it alike or remove it"),
    (lambda p: Image.new("L", (48, 32), 1).save(p), "is black everywhere; paint what counts white, or remove it")])
def test_an_unusable_mask_skips_its_sample(write, sentence, pairs, capsys):
    root = paint(pairs(((48, 32),) * 2), {"0000": halves(48, 32)})
    write(root/"mask_images"/"0001.png")
    def usable(strict=False):
        dataset = ImageDataset(dict(dataset_path=str(root), image_size=[64, 64]), strict=strict)
        dataset.drop_unreadable()
        return [s.id for s in dataset.samples]
    assert usable() == ["0000"] and sentence in capsys.readouterr().out
    with pytest.raises(ValueError, match=sentence): usable(strict=True)


def test_masks_use_the_cache_of_the_same_images(trained_run, tmp_path, built, monkeypatch, capsys):
    root, opened, real = paint(shutil.copytree(trained_run.root, tmp_path/"set"), {"0000": halves(48, 32), "0001": np.zeros((32, 48))}), [], samples.load_mask
    monkeypatch.setattr("qie_nb.data.dataset.load_mask", lambda mask, *a: opened.append(mask) or real(mask, *a))
    trainer = QwenImageEditTrainer(trained_run.settings(tmp_path/"out", data=dict(dataset_path=str(root)), train=dict(val_fraction=0.)))
    report = trainer.cache_embeddings()
    assert report.encoded == 0 and not built
    opened.clear()
    made = trainer.make_loader()
    assert [s.id for s in made.dataset.samples] == ["0000", "0002", "0003", "0004"] and "0001.png' is black everywhere" in capsys.readouterr().out
    for _ in range(3): assert [b["sample_id"] for b in made if b["cached"] and b["mask"] is not None] == [["0000"]]
    assert len(opened) == 2, "each mask is decoded once"


@pytest.mark.slow
def test_cached_and_uncached_batches_have_the_same_masks(pairs, tmp_path):
    root = paint(pairs(((64, 32),) * 3 + ((32, 64),), controls=2), {"0000": halves(64, 32), "0001": 255 - halves(64, 32)})
    def batches(use):
        trainer = QwenImageEditTrainer(settings(root, tmp_path, data=dict(batch_size=3, shuffle=False, caption_dropout_rate=0.), cache=dict(use_cache=use)))
        if use: trainer.cache_embeddings()
        made = list(trainer.make_loader())
        assert [b["cached"] for b in made] == [use] * 2 and made[1]["mask"] is None
        return trainer, made[0]
    (_, x), (t, y) = batches(True), batches(False)
    assert torch.equal(x["mask"], y["mask"]) and x["mask"].shape == (3, 1, *x["pixel_latent"].shape[-2:]) and x["mask"].dtype == torch.float32
    assert (x["mask"][2] == 1).all() and (x["mask"][0] + x["mask"][1] == 1).all() and x["mask"][0, 0, 0, 0] == 0
    t.set_lora()
    eps, sigmas = torch.randn(x["pixel_latent"].shape), torch.tensor([0.2, 0.5, 0.8])
    losses = [flow_matching_loss(t.transformer, pad_batch(b), eps, sigmas, mask_min_weight=0.1) for b in (x, {**y, **t.encode_batch(y)})]
    torch.testing.assert_close(*losses)


def test_a_changed_mask_makes_another_data_set(pairs):
    root = paint(pairs(), {"0000": halves(48, 32), "0001": halves(32, 48)})
    before = [sample_digest(s) for s in find_samples(root)]
    paint(root, {"0001": 255 - halves(32, 48)})
    assert [sample_digest(s) == old for s, old in zip(find_samples(root), before)] == [True, False, True]


@pytest.mark.slow
def test_masked_samples_accumulate_exactly(pairs, tmp_path):
    root = paint(pairs(((64, 32),) * 4, controls=2), {"0000": halves(64, 32), "0001": np.pad(np.full((4, 4), 255), ((0, 28), (0, 60)))})
    def gradient(batch_size, **train):
        t = QwenImageEditTrainer(settings(root, tmp_path, data=dict(batch_size=batch_size, caption_dropout_rate=0.), train=dict(num_epochs=1, mask_min_weight=0.05, loss_weighting="cosmap", timestep_sampling="logit_normal", **train)))
        seen = []
        t.callbacks.append(OnStep(lambda t: seen.append([p.grad.clone() for g in t.optimizer.param_groups for p in g["params"] if p.grad is not None])))
        t.fit()
        return seen
    one, four = gradient(4), gradient(1, gradient_accumulation_steps=4)
    assert len(one) == len(four) == 1
    for a, b in zip(one[0], four[0], strict=True): torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
    shutil.rmtree(root/"mask_images")
    assert any(not torch.allclose(a, b, rtol=1e-2) for a, b in zip(one[0], gradient(4)[0])), "the masks were used at all"
