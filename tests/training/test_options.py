"""Masks of a data set, from the file to the loss."""
import json, shutil

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import Scaled, settings
from qie_nb.data import samples
from qie_nb.data.dataset import ImageDataset
from qie_nb.data.samples import Sample, find_samples, load_mask
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.step import flow_matching_loss, pad_batch


# masks in the data

def paint(root, masks, folder="mask_images", ending=""):
    "Write masks {stem: array} beside a data set."
    (root/folder).mkdir(exist_ok=True)
    for stem, a in masks.items(): Image.fromarray(np.asarray(a, np.uint8)).save(root/folder/f"{stem}{ending}.png")
    return root


def halves(w, h):
    a = np.zeros((h, w), np.uint8); a[:, w // 2:] = 255
    return a


@pytest.mark.parametrize("folder, ending", [("mask_images", ""), ("masks", ""), ("masks", "_mask"), ("training_images", "_mask"), ("training_images", "-Mask")])
def test_masks_are_found_beside_and_in_folders(folder, ending, pairs):
    root = paint(pairs(((48, 32),) * 3), {"0000": halves(48, 32), "0002": halves(48, 32)}, folder, ending)
    found = find_samples(root)
    assert [s.mask and s.mask.name for s in found] == [f"0000{ending}.png", None, f"0002{ending}.png"]
    assert not found.ignored and repr(found).endswith("1 control each, masks for 2 of 3")
    both = find_samples([str(root), str(root)])
    assert [bool(s.mask) for s in both] == [True, False, True] * 2, "in several sets too"


def test_masks_of_pairs_told_by_their_endings(tmp_path):
    for name in ("a_start", "a_end", "a_mask", "b_start", "b_end", "c_mask"): Image.new("L", (8, 8), 255).save(tmp_path/f"{name}.png")
    for name in "ab": (tmp_path/f"{name}.txt").write_text("x")
    found = find_samples(tmp_path)
    assert [s.mask and s.mask.name for s in found] == ["a_mask.png", None] and dict(found.ignored) == {"c_mask.png": "neither target nor control by its name"}
    (tmp_path/"masks").mkdir(); shutil.move(tmp_path/"a_mask.png", tmp_path/"masks"/"a.png")
    assert [s.mask and s.mask.name for s in find_samples(tmp_path)] == ["a.png", None]


def test_orphan_masks_are_listed(pairs):
    root = paint(pairs(((48, 32),)), {"0000": halves(48, 32), "other": halves(48, 32)})
    assert dict(find_samples(root).ignored) == {"mask_images/other.png": "a mask without a target"}


@pytest.mark.parametrize("column", ["mask", "mask_image", "mask_path", "Mask File"])
def test_masks_of_a_table(column, pairs):
    root = paint(pairs(((48, 32),) * 2), {"0000": halves(48, 32)}, "painted")
    rows = [dict(image=f"training_images/000{i}.png", edit_image=f"control_images/000{i}.png", prompt="x") | ({column: "painted/0000.png"} if i == 0 else {column: ""}) for i in range(2)]
    (root/"metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = find_samples(root)
    assert [s.mask and s.mask.name for s in found] == ["0000.png", None] and f"mask `{column}`" in found.layout
    (root/"metadata.jsonl").write_text("\n".join(json.dumps(r | {column: "../../x.png"}) for r in rows))
    with pytest.raises(ValueError, match="row 1 of 'metadata.jsonl' names '../../x.png' outside the data set"): find_samples(root)


def test_masks_of_a_data_set_of_the_hub():
    datasets = pytest.importorskip("datasets")
    pictures, mask = [Image.new("RGB", (48, 32), c) for c in ("red", "green")], Image.fromarray(halves(48, 32))
    features = datasets.Features(target_image=datasets.Image(), control_image=datasets.Image(), prompt=datasets.Value("string"), mask=datasets.Image())
    data = datasets.Dataset.from_dict(dict(target_image=pictures, control_image=pictures, prompt=["x", "y"], mask=[None, mask]), features=features)
    found = find_samples(data)
    assert found[0].mask is None and found[1].mask.name == "mask[1]"
    dataset = ImageDataset(dict(image_size=[64, 64]), samples=found)
    assert dataset.mask(1).shape == (8, 8) and dataset[0].get("mask") is None and dataset[1]["mask"][0].tolist() == [0] * 4 + [255] * 4


def test_a_sample_is_made_as_before():
    assert Sample("a", "a.png", ("b.png",), "x").mask is None


def test_a_mask_is_cut_turned_and_averaged_as_its_target(pairs, tmp_path):
    upright = np.zeros((64, 96), np.uint8); upright[:, 32:] = 255 # white on the right, and not up to the middle
    target = Image.fromarray(upright).convert("RGB").transpose(Image.Transpose.ROTATE_90) # stored turned, marked 6: turn it back
    exif = Image.Exif(); exif[0x0112] = 6
    for d in ("training_images", "control_images", "masks"): (tmp_path/d).mkdir()
    for d in ("training_images", "control_images"): target.save(tmp_path/d/"a.jpg", exif=exif, quality=100)
    (tmp_path/"training_images"/"a.txt").write_text("x")
    Image.fromarray(upright).save(tmp_path/"masks"/"a.png")
    for kw, size in (dict(image_size=[96, 64]), (96, 64)), (dict(image_size=[64, 64], crop=True), (64, 64)), (dict(image_size=[48, 64], crop=True), (48, 64)):
        dataset = ImageDataset(dict(dataset_path=str(tmp_path), **kw))
        w, h = size
        seen = dataset.images(0)["image"].mean(2).reshape(h // 8, 8, w // 8, 8).mean((1, 3))
        assert dataset.mask(0).shape == (h // 8, w // 8)
        assert np.abs(dataset.mask(0).astype(float) - seen).max() < 16, "the mask lies on the image it was painted on"


def test_the_average_over_latent_pixels_by_hand(tmp_path):
    a = np.random.default_rng(0).integers(0, 256, (32, 48)).astype(np.uint8)
    Image.fromarray(a).save(tmp_path/"m.png")
    want = [[a[8 * i:8 * i + 8, 8 * j:8 * j + 8].astype(float).mean() for j in range(6)] for i in range(4)]
    assert np.abs(load_mask(tmp_path/"m.png", (48, 32)) - np.array(want)).max() <= 0.5


@pytest.mark.parametrize("write, sentence", [
    (lambda p: p.write_text("no image"), "cannot be read"),
    (lambda p: Image.new("L", (32, 48), 255).save(p), "is 32x48, another shape than its target of 48x32; cut it alike or take it out"),
    (lambda p: Image.new("L", (48, 32), 0).save(p), "is black everywhere; paint white what counts, or take it out"),
    (lambda p: Image.new("L", (48, 32), 1).save(p), "is black everywhere")])
def test_a_mask_that_cannot_be_used_leaves_its_sample_out(write, sentence, pairs, tmp_path, capsys):
    root = paint(pairs(((48, 32),) * 2), {"0000": halves(48, 32)})
    write(root/"mask_images"/"0001.png")
    kw = dict(data=dict(caption_dropout_rate=0.))
    made = QwenImageEditTrainer(settings(root, tmp_path, **kw)).make_loader()
    assert [s.id for s in made.dataset.samples] == ["0000"] and sentence in capsys.readouterr().out
    assert len(list(made)) == 1
    with pytest.raises(ValueError, match=sentence): QwenImageEditTrainer(settings(root, tmp_path, data=dict(strict=True))).make_loader()


def test_a_black_mask_is_noticed_where_all_tensors_are_cached_too(pairs, tmp_path, capsys):
    root = pairs(((48, 32),) * 2)
    QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings()
    paint(root, {"0001": np.zeros((32, 48))})
    made = QwenImageEditTrainer(settings(root, tmp_path)).make_loader()
    assert [s.id for s in made.dataset.samples] == ["0000"] and "0001.png' is black everywhere" in capsys.readouterr().out


def test_a_smaller_mask_of_the_same_shape_will_do(pairs):
    root = paint(pairs(((48, 32),)), {"0000": halves(24, 16)})
    assert ImageDataset(dict(dataset_path=str(root), image_size=[48, 32], crop=True)).mask(0).tolist() == [[0, 0, 0, 255, 255, 255]] * 4


def test_masks_change_no_key_and_run_no_encoder(pairs, tmp_path, built):
    root = pairs(((48, 32),) * 2)
    trainer = QwenImageEditTrainer(settings(root, tmp_path))
    trainer.cache_embeddings()
    before = [trainer.make_loader().dataset.keys(i) for i in range(2)]
    paint(root, {"0000": halves(48, 32)})
    built.clear()
    again = QwenImageEditTrainer(settings(root, tmp_path))
    report = again.cache_embeddings()
    assert (report.encoded, report.reused) == (0, 2)
    made = again.make_loader()
    assert [made.dataset.keys(i) for i in range(2)] == before and all(b["cached"] for b in made) and not built


def test_a_mask_is_decoded_once(pairs, tmp_path, monkeypatch):
    root = paint(pairs(((48, 32),) * 2), {"0000": halves(48, 32), "0001": halves(48, 32)})
    trainer, opened, real = QwenImageEditTrainer(settings(root, tmp_path)), [], samples.load_mask
    trainer.cache_embeddings()
    monkeypatch.setattr("qie_nb.data.dataset.load_mask", lambda mask, *a: opened.append(mask) or real(mask, *a))
    made = trainer.make_loader()
    for _ in range(3): assert all(b["mask"] is not None for b in made)
    assert len(opened) == 2


@pytest.mark.parametrize("controls", [1, 2])
def test_cached_and_uncached_batches_carry_the_same_masks(controls, pairs, tmp_path):
    root = paint(pairs(((64, 32),) * 3 + ((32, 64),), controls=controls), {"0000": halves(64, 32), "0001": 255 - halves(64, 32)})
    def batches(use):
        trainer = QwenImageEditTrainer(settings(root, tmp_path, data=dict(batch_size=3, shuffle=False, caption_dropout_rate=0.), cache=dict(use_cache=use)))
        if use: trainer.cache_embeddings()
        return trainer, list(trainer.make_loader())
    (a, cached), (b, plain) = batches(True), batches(False)
    assert [x["cached"] for x in cached] == [True] * 2 and [x["cached"] for x in plain] == [False] * 2
    for x, y in zip(cached, plain):
        if x["mask"] is None: assert y["mask"] is None and x["sample_id"] == ["0003"]
        else:
            h, w = x["pixel_latent"].shape[-2:]
            assert torch.equal(x["mask"], y["mask"]) and x["mask"].shape == (3, 1, h, w) and x["mask"].dtype == torch.float32
            assert (x["mask"][2] == 1).all() and (x["mask"][0] + x["mask"][1] == 1).all() and x["mask"][0, 0, 0, 0] == 0
            encoded = {**y, **b.encode_batch(y)}
            eps, sigmas = torch.randn(x["pixel_latent"].shape), torch.tensor([0.2, 0.5, 0.8])
            assert torch.equal(*(flow_matching_loss(Scaled(), pad_batch(z), eps, sigmas, mask_min_weight=0.1) for z in (x, encoded)))
        assert set(x.get_images_for_tensorboard()) == {"training_images", "control_images", "source", "problems"}


@pytest.mark.parametrize("controls", [1, 2])
def test_masked_samples_accumulate_exactly(controls, pairs, tmp_path):
    root = paint(pairs(((64, 32),) * 4, controls=controls), {"0000": halves(64, 32), "0001": np.pad(np.full((4, 4), 255), ((0, 28), (0, 60)))})
    def gradient(batch_size, **train):
        t = QwenImageEditTrainer(settings(root, tmp_path, data=dict(batch_size=batch_size, caption_dropout_rate=0.), train=dict(num_epochs=1, mask_min_weight=0.05, loss_weighting="cosmap", timestep_sampling="logit_normal", **train)))
        seen = []
        t.callbacks.append(type("N", (), dict(on_train_begin=lambda s, t: None, on_epoch_end=lambda s, t: None, on_train_end=lambda s, t: None,
                                              on_step_end=lambda s, t: seen.append([p.grad.clone() for g in t.optimizer.param_groups for p in g["params"] if p.grad is not None]))))
        t.callbacks[-1] = t.callbacks[-1]()
        t.fit()
        return seen
    one, four, plain = gradient(4), gradient(1, gradient_accumulation_steps=4), gradient(4)
    assert len(one) == len(four) == 1
    for a, b in zip(one[0], four[0], strict=True): torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
    shutil.rmtree(root/"mask_images")
    assert any(not torch.allclose(a, b, rtol=1e-2) for a, b in zip(one[0], gradient(4)[0])), "the masks were used at all"
