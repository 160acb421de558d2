"""The cache as a user meets it: lazy or precomputed, in layers, moved, batched, shared between data sets and processes."""
import hashlib, json, shutil

import numpy as np
import pytest
import torch
from PIL import Image

from qie_nb.cache import EmbeddingCacheManager, check_cache_exists
from qie_nb.data.dataset import ImageDataset, loader
from qie_nb.core.cache_entries import ALL_KINDS, read_header
from qie_nb.data.samples import ImageChanged
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from helpers import adapters_equal, settings

THREE = ((48, 32), (32, 48), (48, 32))


def files(folder):
    "{name: digest} of every entry."
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*.safetensors"))}


def two_captions_a_image(root):
    "Sample 0002 gets 0000's control image."
    shutil.copy(root/"control_images"/"0000.png", root/"control_images"/"0002.png")
    return root


@pytest.mark.parametrize("variant, controls", [("v1", 1), ("2511", 2)])
@pytest.mark.parametrize("shared", [True, False])
def test_first_touch_writes_the_bytes_that_precompute_writes(variant, controls, shared, pairs, tmp_path):
    root = two_captions_a_image(pairs(THREE, controls=controls, caption=["invert", "invert it all", "x"]))
    make = lambda name: QwenImageEditTrainer(settings(root, tmp_path, variant, cache=dict(cache_dir=str(tmp_path/name), share_prompt_prefix=shared), train=dict(num_epochs=1)))
    make("pre").cache_embeddings()
    make("lazy").fit()
    half = make("half")
    half.cache_embeddings(None, 1, 2)
    assert 0 < len(files(tmp_path/"half")) < len(files(tmp_path/"pre"))
    half.fit()
    assert files(tmp_path/"pre") == files(tmp_path/"lazy") == files(tmp_path/"half")
    assert any(n.startswith("prompt_prefix") for n in files(tmp_path/"pre")) == shared


@pytest.mark.parametrize("variant, controls", [("v1", 1), ("2509", 2)])
def test_a_larger_encode_batch_rounds_differently_and_no_more(variant, controls, pairs, tmp_path):
    root = two_captions_a_image(pairs(((48, 32),) * 5, controls=controls, caption=["invert", "invert the colours of everything", "x", "yy", "a b c"]))
    caches = []
    for n in (1, 3):
        t = QwenImageEditTrainer(settings(root, tmp_path, variant, cache=dict(cache_dir=str(tmp_path/str(n)), batch_size=n)))
        assert t.cache_embeddings().encoded == 5
        caches.append(EmbeddingCacheManager(tmp_path/str(n)))
    names = [[(kind, key) for _, kind, key, _ in c.entries()] for c in caches]
    assert names[0] == names[1] and len(names[0]) > 20
    for kind, key in names[0]:
        a, b = (c.load_cache(kind, key) for c in caches)
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a.float() - b.float()).abs().max() <= 1e-5 * max(1, a.float().abs().max()), kind


def test_whole_and_shared_embeddings_are_the_same_to_rounding_and_know_each_other(pairs, tmp_path):
    root = pairs(THREE)
    make = lambda **kw: QwenImageEditTrainer(settings(root, tmp_path, cache=dict(cache_dir=str(tmp_path/"cache"), **kw)))
    make(share_prompt_prefix=False, vae_2d=False).cache_embeddings()
    whole = EmbeddingCacheManager(tmp_path/"cache")
    held = {key: whole.load_cache("prompt_embed", key) for _, _, key, _ in whole.entries(["prompt_embed"])}
    assert make().cache_embeddings().tensors == 0, "a switch of the computation is no other tensor"
    whole.clear_cache()
    make().cache_embeddings()
    assert all(torch.allclose(whole.load_cache("prompt_embed", key), t, rtol=1e-5, atol=1e-5) for key, t in held.items()) and len(held) == 3


def test_keys_are_readable_in_the_header_and_hold_no_path(pairs, tmp_path):
    root = pairs(THREE, caption="make it ünïcode")
    QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings()
    said = [json.loads(read_header(p.read_bytes())["__metadata__"]["parts"]) for p in (tmp_path/"cache").rglob("*.safetensors")]
    assert {p.get("prompt") for p in said} == {None, " ", "make it ünïcode"} and all(str(tmp_path) not in json.dumps(p) for p in said)
    target = hashlib.sha256((root/"training_images"/"0000.png").read_bytes()).hexdigest()
    assert sum(p.get("image") == target for p in said) == 1


def test_a_moved_data_set_and_a_renamed_model_cost_nothing(pairs, tmp_path, built):
    root, model = pairs(THREE), tmp_path/"model"
    shutil.copytree(tiny_folder("2511"), model)
    first = settings(root, tmp_path, model=dict(pretrained_model_name_or_path=str(model)))
    assert QwenImageEditTrainer(first).cache_embeddings().encoded == 3
    shutil.move(root, tmp_path/"elsewhere")
    for p in (tmp_path/"elsewhere").rglob("*.png"): p.touch()
    (tmp_path/"elsewhere"/"training_images"/"0000.png").rename(tmp_path/"elsewhere"/"training_images"/"zz.png")
    (tmp_path/"elsewhere"/"training_images"/"0000.txt").rename(tmp_path/"elsewhere"/"training_images"/"zz.txt")
    (tmp_path/"elsewhere"/"control_images"/"0000.png").rename(tmp_path/"elsewhere"/"control_images"/"zz.png")
    model.rename(tmp_path/"renamed")
    built.clear()
    again = settings(tmp_path/"elsewhere", tmp_path, model=dict(pretrained_model_name_or_path=str(tmp_path/"renamed")))
    report = QwenImageEditTrainer(again).cache_embeddings()
    assert (report.tensors, report.reused) == (0, 3) and not built


def test_a_image_replaced_between_its_key_and_its_pixels_is_noticed(pairs, tmp_path):
    root = pairs(THREE)
    dataset = ImageDataset(dict(dataset_path=str(root), image_size=[64, 64], cache_dir=str(tmp_path/"cache")))
    dataset.refresh(dict(vae="v", text_encoder="t", template="p", dtype="float32", control_area=4096, vl_area=4096))
    dataset.keys(0)
    Image.new("RGB", (48, 32)).save(root/"training_images"/"0000.png")
    with pytest.raises(ImageChanged, match="0000.png.* has changed"): dataset.images(0)


def test_packing_again_replaces_a_pack_and_nothing_else(tmp_path, monkeypatch):
    manager, out = EmbeddingCacheManager(tmp_path/"cache"), tmp_path/"packed"
    for n in range(3): manager.save_cache("pixel_latent", f"{n:02}ab", torch.full((4, 4), float(n)))
    manager.pack(out, shard_bytes=300)
    with pytest.raises(ValueError, match=r"`out` '.*packed' is not empty; name a new folder to pack into, or set `replace`"): manager.pack(out)
    manager.save_cache("pixel_latent", "03ab", torch.ones(2))
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with monkeypatch.context() as m:
        m.setattr("qie_nb.cache.write_packed", lambda out, *a: (out.mkdir(), 1 / 0))
        with pytest.raises(ZeroDivisionError): manager.pack(out, replace=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before, "until the new one is whole the old one stays"
    files = manager.pack(out, replace=True)
    assert EmbeddingCacheManager(out).get_cache_stats()["total"]["count"] == 4 and all(f.is_file() and f.parent == out for f in files)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "packed"]
    (out/"notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"): manager.pack(out, replace=True)
    assert (out/"notes.txt").read_text() == "mine"


def test_the_machine_without_encoders_trains_from_a_packed_cache(pairs, tmp_path, built):
    root, bare = pairs(THREE), tmp_path/"bare"
    loose = QwenImageEditTrainer(settings(root, tmp_path, train=dict(output_dir=str(tmp_path/"a"))))
    loose.cache_embeddings()
    EmbeddingCacheManager(tmp_path/"cache").pack(tmp_path/"packed", shard_bytes=100_000)
    shutil.copytree(tiny_folder("2511"), bare, ignore=shutil.ignore_patterns("vae", "text_encoder", "tokenizer", "processor"))
    assert not any(p.is_dir() for p in (tmp_path/"packed").iterdir())
    built.clear()
    for cache_dir in (str(tmp_path/"packed"), [str(tmp_path/"packed"), str(tmp_path/"empty")]):
        there = settings(root, tmp_path, model=dict(pretrained_model_name_or_path=str(bare)), cache=dict(cache_dir=cache_dir), train=dict(output_dir=str(tmp_path/"b")))
        there["train"]["num_epochs"] = 1
        packed = QwenImageEditTrainer(there).fit()
    loose.config.train.num_epochs = 1
    assert adapters_equal(loose.fit(), packed) and "AutoencoderKLQwenImage" not in built
    assert not (tmp_path/"empty").exists() or not files(tmp_path/"empty")


@pytest.mark.parametrize("packed", [False, True])
def test_bad_entries_are_all_named_where_nothing_can_make_them_again(packed, pairs, tmp_path):
    root, bare = pairs(THREE), tmp_path/"bare"
    QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings()
    shutil.copytree(tiny_folder("2511"), bare, ignore=shutil.ignore_patterns("vae", "text_encoder"))
    folder, wrong = tmp_path/"cache", []
    if packed:
        EmbeddingCacheManager(folder).pack(tmp_path/"packed")
        folder = tmp_path/"packed"
        shard = bytearray((folder/"cache-00001-00001.safetensors").read_bytes())
        index = json.loads((folder/"cache-index.json").read_text())["entries"]
        for kind in ("pixel_latent", "prompt_prefix"):
            key, (_, begin, _, _) = sorted(index[kind].items())[0]
            shard[begin] ^= 1
            wrong.append(f"{kind} {key}")
        (folder/"cache-00001-00001.safetensors").write_bytes(shard)
    else:
        for kind in ("pixel_latent", "prompt_prefix"):
            path = sorted((folder/kind).rglob("*.safetensors"))[0]
            path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
            wrong.append(str(path))
    trainer = QwenImageEditTrainer(settings(root, tmp_path, model=dict(pretrained_model_name_or_path=str(bare)), cache=dict(cache_dir=str(folder))))
    with pytest.raises(ValueError, match="cannot be used and cannot be computed here") as e: trainer.fit()
    assert all(w in str(e.value) for w in wrong) and "2 entries" in str(e.value) and "\n" not in str(e.value)


def test_bad_entries_in_a_layer_that_is_only_read_are_made_again_behind_it(pairs, tmp_path):
    root = pairs(THREE)
    QwenImageEditTrainer(settings(root, tmp_path, cache=dict(cache_dir=str(tmp_path/"front")))).cache_embeddings()
    good = files(tmp_path/"front")
    name = next(n for n in good if n.startswith("control_latent"))
    path = tmp_path/"front"/name
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    broken, both = files(tmp_path/"front"), dict(cache_dir=[str(tmp_path/"front"), str(tmp_path/"back")])
    report = QwenImageEditTrainer(settings(root, tmp_path, cache=both)).cache_embeddings()
    assert report.tensors == 1 and files(tmp_path/"back") == {name: good[name]} and files(tmp_path/"front") == broken
    assert QwenImageEditTrainer(settings(root, tmp_path, cache=both)).cache_embeddings().tensors == 0
    with pytest.raises(PermissionError, match="cannot be written.*add a writable folder"):
        shutil.rmtree(tmp_path/"back")
        manager = EmbeddingCacheManager(tmp_path/"front")
        manager.pack(tmp_path/"packed", keep={(k, key) for _, k, key, _ in manager.entries() if k != "control_latent"})
        QwenImageEditTrainer(settings(root, tmp_path, cache=dict(cache_dir=str(tmp_path/"packed")))).cache_embeddings()


def test_ranks_share_the_work(pairs, tmp_path, monkeypatch):
    root, done = pairs(((48, 32),) * 5), []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        done.append(QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings().encoded)
    assert sorted(done) == [2, 3]


def test_a_data_set_of_the_hubs_library_is_cached_and_trained_on(pairs, tmp_path):
    datasets = pytest.importorskip("datasets")
    root = pairs(THREE)
    rows = [dict(image=str(root/"training_images"/f"000{i}.png"), edit_image=str(root/"control_images"/f"000{i}.png"), prompt="invert the colours") for i in range(3)]
    held = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image()).cast_column("edit_image", datasets.Image())
    trainer = QwenImageEditTrainer(settings(root, tmp_path))
    batches = loader(held, cache_dir=str(tmp_path/"cache"), image_size=[64, 64], caption_dropout_rate=0.3)
    assert trainer.cache_embeddings(batches).encoded == 3
    assert QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings().tensors == 0, "the same images in files are the same entries"
    trainer.fit(batches)
    assert trainer.global_step == 6 and check_cache_exists(tmp_path/"cache")


def test_status_counts_what_is_there_and_what_is_not(pairs, tmp_path):
    root = pairs(THREE)
    trainer = QwenImageEditTrainer(settings(root, tmp_path))
    trainer.cache_embeddings(None, 0, 2)
    dataset = trainer.make_loader().dataset
    status = dataset.status()
    assert (status["samples"], status["complete"]) == (3, 2)
    assert status["kinds"]["pixel_latent"] | dict(bytes=0) == dict(needed=3, present=2, missing=1, bytes=0)
    assert {k: v["present"] for k, v in status["kinds"].items()} == dict.fromkeys(ALL_KINDS, 2)
    assert "2 complete" in dataset._repr_html_()


@pytest.mark.parametrize("room", ["", "0.5"])
def test_the_bytes_are_said_before_and_refused_where_they_do_not_fit(room, pairs, tmp_path, capsys, monkeypatch):
    root = pairs(THREE)
    trainer = QwenImageEditTrainer(settings(root, tmp_path))
    if room:
        monkeypatch.setattr("qie_nb.core.environment.free_bytes", lambda folder: 1000)
        with pytest.raises(OSError, match=r"needs \d\.\d MB more, but .*cache' has 0.0 MB free: \d\.\d MB are missing"): trainer.cache_embeddings()
        assert not list((tmp_path/"cache").rglob("*.safetensors"))
        return
    report = trainer.cache_embeddings()
    assert report.bytes == sum(p.stat().st_size for p in (tmp_path/"cache").rglob("*.safetensors"))
    assert f"precompute: {report.bytes/1e6:.1f} MB to write" in capsys.readouterr().out


def test_a_dropped_caption_is_its_own_empty_prompt(pairs, tmp_path):
    root = pairs(THREE)
    trainer = QwenImageEditTrainer(settings(root, tmp_path, data=dict(caption_dropout_rate=0.5)))
    trainer.cache_embeddings()
    dataset = trainer.make_loader().dataset
    seen = set()
    for epoch in range(6):
        dataset.set_epoch(epoch)
        for i in range(3):
            kind = "empty_prompt_embed" if dataset.dropped(i) else "prompt_embed"
            seen.add((i, kind))
            assert torch.equal(dataset[i]["prompt_embed"], dataset.cache.load_cache(*dataset.keys(i)[kind].id))
    assert len(seen) == 6
    empty = [dataset.cache.load_cache(*dataset.keys(i)["empty_prompt_embed"].id) for i in (0, 2)]
    assert empty[0].shape == empty[1].shape and not torch.equal(*empty), "other images, another empty prompt"


def test_lazy_filling_goes_by_the_loaders_own_settings(pairs, tmp_path):
    root = pairs(THREE)
    mine = dict(image_size=[64, 64], caption_dropout_rate=0.9)
    def train(name, first):
        trainer = QwenImageEditTrainer(settings(root, tmp_path, data=dict(image_size=[96, 96], caption_dropout_rate=0.), cache=dict(cache_dir=str(tmp_path/"other")), train=dict(num_epochs=1)))
        batches = loader(str(root), cache_dir=str(tmp_path/name), **mine)
        if first: trainer.cache_embeddings(batches)
        return trainer.fit(batches)
    assert adapters_equal(train("lazy", False), train("pre", True)) and files(tmp_path/"lazy") == files(tmp_path/"pre") and not files(tmp_path/"other")


def test_a_lost_prefix_is_made_again_whatever_the_switch_says(pairs, tmp_path):
    root = pairs(THREE)
    make = lambda **kw: QwenImageEditTrainer(settings(root, tmp_path, cache=dict(cache_dir=str(tmp_path/"cache"), **kw)))
    make().cache_embeddings()
    good = files(tmp_path/"cache")
    next((tmp_path/"cache"/"prompt_prefix").rglob("*.safetensors")).unlink()
    manager = EmbeddingCacheManager(tmp_path/"cache")
    assert len(manager.verify()) == 2 and "precompute again" in manager.verify()[0][1]
    with pytest.raises(ValueError, match="prompt prefixes are missing"): manager.pack(tmp_path/"packed")
    assert make(share_prompt_prefix=False).cache_embeddings().tensors == 1
    assert files(tmp_path/"cache") == good and make(share_prompt_prefix=False).cache_embeddings().encoded == 0


def test_a_image_that_cannot_be_decoded_is_left_out_where_there_are_no_encoders_too(pairs, tmp_path):
    import struct, zlib
    root, bare = pairs(THREE), tmp_path/"bare"
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    broken = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 48, 32, 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(b"\0" * 4647)[:9]) + chunk(b"IEND", b"")
    (root/"training_images"/"0001.png").write_bytes(broken)
    report = QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings()
    assert (report.encoded, [i for i, _ in report.skipped]) == (2, ["0001"])
    shutil.copytree(tiny_folder("2511"), bare, ignore=shutil.ignore_patterns("vae", "text_encoder"))
    there = settings(root, tmp_path, model=dict(pretrained_model_name_or_path=str(bare)))
    assert QwenImageEditTrainer(there).fit().global_step == 2
    with pytest.raises(ValueError, match="0001.png' cannot be read"): QwenImageEditTrainer(settings(root, tmp_path, data=dict(strict=True))).cache_embeddings()


def test_held_out_pairs_of_their_own_are_kept_shipped_and_asked_for(pairs, tmp_path):
    import yaml
    from qie_nb.cli import main
    root, bare = pairs(THREE), tmp_path/"bare"
    shutil.copytree(root, tmp_path/"val")
    Image.new("RGB", (48, 32), "red").save(tmp_path/"val"/"control_images"/"0000.png")
    raw = settings(root, tmp_path, train=dict(val_path=str(tmp_path/"val"), eval_interval=1))
    QwenImageEditTrainer(raw).cache_embeddings()
    before, config = files(tmp_path/"cache"), tmp_path/"c.yaml"
    config.write_text(yaml.safe_dump(raw))
    assert main(["cache", "gc", str(tmp_path/"cache"), "--config", str(config)]) == 0 and files(tmp_path/"cache") == before
    assert main(["cache", "pack", str(tmp_path/"cache"), "--config", str(config), "--out", str(tmp_path/"packed")]) == 0
    shutil.copytree(tiny_folder("2511"), bare, ignore=shutil.ignore_patterns("vae", "text_encoder"))
    raw = settings(root, tmp_path, model=dict(pretrained_model_name_or_path=str(bare)), cache=dict(cache_dir=str(tmp_path/"packed")), train=raw["train"])
    QwenImageEditTrainer(raw).fit()
    shutil.rmtree(tmp_path/"checkpoints", ignore_errors=True)
    (tmp_path/"val"/"training_images"/"0001.txt").write_text("another instruction")
    with pytest.raises(ValueError, match="prompt_embed of sample '0001' is missing"): QwenImageEditTrainer(raw).fit()


def test_a_prompt_with_a_images_tokens_is_skipped(pairs, tmp_path):
    root = pairs(THREE, caption=["invert", "like <|image_pad|> here", "x"])
    trainer = QwenImageEditTrainer(settings(root, tmp_path))
    assert [i for i, _ in trainer.cache_embeddings().skipped] == ["0001"] and trainer.fit().global_step == 2


def test_held_out_pairs_of_their_own_are_skipped_like_others(pairs, tmp_path):
    root = pairs(THREE)
    shutil.copytree(root, tmp_path/"val")
    (tmp_path/"val"/"training_images"/"0001.txt").write_text("like <|image_pad|> here")
    trainer = QwenImageEditTrainer(settings(root, tmp_path, train=dict(val_path=str(tmp_path/"val"), eval_interval=1)))
    assert [i for i, _ in trainer.cache_embeddings().skipped] == ["0001"]
    trainer.fit()
    assert len(trainer.held_out) == 2 and trainer.global_step == 4
