"""The cache in use: filled lazily or by precompute, in layers, moved, batched, packed, damaged."""
import json, shutil

import pytest, torch, yaml
from PIL import Image

from qie_nb.cache import EmbeddingCacheManager
from qie_nb.cli import main
from qie_nb.data.dataset import ImageDataset, loader
from qie_nb.core.cache_entries import read_header
from qie_nb.core.cache_layers import open_layer
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from helpers import adapters_close, entries_of, settings, write_pairs

THREE = ((48, 32), (32, 48), (48, 32))


def files(folder): return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))}
def spoil(path): path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


def trainer(root, tmp_path, variant="2511", model=None, cache=(), data={}, **train):
    "A trainer for one step; `cache`: folders, default `tmp_path/cache`."
    sections = dict(cache=dict(cache_dir=[str(c) for c in cache])) if cache else {}
    if model: sections["model"] = dict(pretrained_model_name_or_path=str(model))
    return QwenImageEditTrainer(settings(root, tmp_path, variant, train=dict(max_train_steps=1) | train, data=data, **sections))


@pytest.fixture(scope="module")
def bare(tmp_path_factory): # a model folder without encoders
    without = shutil.ignore_patterns("vae", "text_encoder", "tokenizer", "processor")
    return shutil.copytree(tiny_folder("2511"), tmp_path_factory.mktemp("bare")/"model", ignore=without)


@pytest.fixture(scope="module")
def precomputed(tmp_path_factory): # a folder with a data set and its cache
    folder = tmp_path_factory.mktemp("precomputed")
    trainer(write_pairs(folder/"set", THREE, caption="make it ünïcode"), folder).cache_embeddings()
    return folder


@pytest.fixture
def filled(precomputed, tmp_path): # a copy for one test: the root of the data set, and the cache in `tmp_path/cache`
    shutil.copytree(precomputed/"cache", tmp_path/"cache")
    return shutil.copytree(precomputed/"set", tmp_path/"set")


def two_captions_per_image(root): # sample 0002 gets the control image of 0000
    shutil.copy(root/"control_images"/"0000.png", root/"control_images"/"0002.png")
    return root


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("shared, variant, controls", [(True, "v1", 1), (True, "2511", 2), (False, "v1", 1)])
def test_lazy_filling_writes_the_files_of_precompute(variant, controls, shared, pairs, tmp_path, encoders_with):
    encoders_with(share_prefix=shared)
    root = two_captions_per_image(pairs(THREE, controls=controls, caption=["invert", "invert it all", "x"]))
    make = lambda name: trainer(root, tmp_path, variant, cache=[tmp_path/name], num_epochs=1, max_train_steps=None)
    make("pre").cache_embeddings()
    make("lazy").fit()
    half = make("half")
    half.cache_embeddings(None, 1, 2)
    assert 0 < len(files(tmp_path/"half")) < len(files(tmp_path/"pre"))
    half.fit()
    assert files(tmp_path/"pre") == files(tmp_path/"lazy") == files(tmp_path/"half")
    assert any(n.startswith("prompt_prefix") for n in files(tmp_path/"pre")) == shared


def test_whole_and_shared_embeddings_have_the_same_keys(filled, tmp_path, encoders_with):
    encoders_with(share_prefix=False, vae_2d=False)
    cache = EmbeddingCacheManager(tmp_path/"cache")
    shared = {e.key: cache.load_cache("prompt_embed", e.key) for e in cache.entries(["prompt_embed"])}
    make = lambda: QwenImageEditTrainer(settings(filled, tmp_path, ))
    assert make().cache_embeddings().tensors == 0 and len(shared) == 3
    min((tmp_path/"cache"/"prompt_prefix").rglob("*.safetensors")).unlink()
    assert len(cache.verify()) == 2 and "precompute again" in cache.verify()[0][1]
    assert sum(cache.load_cache("prompt_embed", key) is None for key in shared) == 1, "not usable without its prefix"
    with pytest.raises(ValueError, match="prompt prefixes are missing"): cache.pack(tmp_path/"packed")
    assert make().cache_embeddings().tensors == 1 and not cache.verify(), "a lost prefix is encoded again, for the others' sake"
    for kind in {e.kind for e in cache.entries() if "prompt" in e.kind}: cache.clear_cache(kind)
    make().cache_embeddings()
    assert "prompt_prefix" not in {e.kind for e in cache.entries()}
    for key, tensor in shared.items(): torch.testing.assert_close(cache.load_cache("prompt_embed", key), tensor, rtol=1e-5, atol=1e-5)


def test_control_latents_come_from_the_cache_in_the_order_of_their_images(pairs, tmp_path):
    job = trainer(pairs(THREE, controls=3), tmp_path)
    job.cache_embeddings()
    data, cache = (loading := job.make_loader()).dataset, EmbeddingCacheManager(tmp_path/"cache")
    want = lambda i: [cache.load_cache(*data.keys(i)[f"control_latent.{n}"].id) for n in range(3)]
    for i in range(3):
        assert not torch.equal(want(i)[1], want(i)[2])
        for got, z in zip(data[i]["control_latent"], want(i), strict=True): assert torch.equal(got, z)
    batch = next(iter(loading))
    for n, got in enumerate(batch["control_latent"]): assert torch.equal(got, torch.stack([want(i)[n] for i in batch["index"]]))


def test_key_parts_are_in_the_header_without_paths(precomputed):
    said = [read_header(p.read_bytes())["__metadata__"]["parts"] for p in (precomputed/"cache").rglob("*.safetensors")]
    assert sum('"prompt"' in p for p in said) == 6 and not any(str(precomputed) in p for p in said) # all parts: cache_fault_trials.py


def test_moved_data_and_renamed_model_reuse_the_cache(filled, tmp_path, built):
    shutil.copytree(tiny_folder("2511"), tmp_path/"renamed")
    root = tmp_path/"elsewhere"
    shutil.move(filled, root)
    for p in root.rglob("*.png"): p.touch()
    for p in root.glob("*/0000.*"): p.rename(p.with_name("zz" + p.suffix))
    report = trainer(root, tmp_path, model=tmp_path/"renamed").cache_embeddings()
    assert (report.tensors, report.reused) == (0, 3) and not built


def test_pack_replaces_only_a_packed_cache(tmp_path, monkeypatch):
    manager, out = EmbeddingCacheManager(tmp_path/"cache"), tmp_path/"packed"
    for n in range(3): manager.save_cache("pixel_latent", f"{n:02}ab", torch.full((4, 4), float(n)))
    manager.pack(out, shard_bytes=300)
    manager.save_cache("pixel_latent", "03ab", torch.ones(2))
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with monkeypatch.context() as m:
        m.setattr("qie_nb.cache.write_packed", lambda out, *a: (out.mkdir(), 1 / 0))
        with pytest.raises(ZeroDivisionError): manager.pack(out, replace=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before, "the old one stays until the new one is complete"
    written = manager.pack(out, replace=True)
    assert len([*EmbeddingCacheManager(out).entries()]) == 4 and all(f.is_file() and f.parent == out for f in written)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "packed"]
    (out/"notes.txt").write_text("mine")
    for replace in (False, True):
        with pytest.raises(ValueError, match=r"`out` '.*packed' is not empty; .*new folder"): manager.pack(out, replace=replace)
    assert (out/"notes.txt").read_text() == "mine"


def test_another_encoder_writes_nothing_into_a_packed_cache(filled, tmp_path):
    EmbeddingCacheManager(tmp_path/"cache").pack(packed := tmp_path/"packed")
    before, cache = sorted(packed.rglob("*")), EmbeddingCacheManager(packed)
    cache.add_identity(cache.identity() | dict(vae="another"))
    assert sorted(packed.rglob("*")) == before


@pytest.mark.parametrize("packed", [False, True])
def test_bad_entries_are_all_named_without_encoders(packed, filled, bare, tmp_path):
    folder, bad, kinds = tmp_path/"cache", [], ("pixel_latent", "prompt_prefix")
    if packed:
        shard, *_ = EmbeddingCacheManager(folder).pack(folder := tmp_path/"packed")
        data = bytearray(shard.read_bytes())
        for kind in kinds:
            key, (_, begin, *_) = min(entries_of(open_layer(folder))[kind].items())
            data[begin] ^= 1
            bad.append(f"{kind} {key}")
        shard.write_bytes(data)
    else:
        bad = [min((folder/kind).rglob("*.safetensors")) for kind in kinds]
        for path in bad: spoil(path)
    t = trainer(filled, tmp_path, model=bare, cache=[folder])
    with pytest.raises(ValueError, match="2 entries.*cannot be used and cannot be computed here") as e: t.fit()
    assert all(str(b) in str(e.value) for b in bad) and "\n" not in str(e.value)


def test_bad_entries_of_the_first_layer_are_encoded_into_the_last(filled, tmp_path):
    front, back = (tmp_path/"cache").rename(tmp_path/"front"), tmp_path/"back"
    path = min((front/"control_latent").rglob("*.safetensors"))
    id = "control_latent", path.stem
    good = EmbeddingCacheManager(front).load_cache(*id)
    spoil(path)
    broken = files(front)
    assert trainer(filled, tmp_path, cache=[front, back]).cache_embeddings().tensors == 1
    assert [e[1:3] for e in EmbeddingCacheManager(back).entries()] == [id] and files(front) == broken
    torch.testing.assert_close(EmbeddingCacheManager(back).load_cache(*id), good, rtol=1e-5, atol=1e-5)
    assert trainer(filled, tmp_path, cache=[front, back]).cache_embeddings().tensors == 0
    manager = EmbeddingCacheManager(front)
    manager.pack(tmp_path/"packed", keep={(e.kind, e.key) for e in manager.entries() if e.kind != "control_latent"})
    t = trainer(filled, tmp_path, cache=[tmp_path/"packed"])
    with pytest.raises(PermissionError, match="cannot be written.*add a writable folder"): t.cache_embeddings()


@pytest.mark.parametrize("fault", ["gone", "spoiled"])
@pytest.mark.parametrize("packed", [True, False])
def test_an_entry_that_one_layer_lost_is_read_from_the_next(packed, fault, filled, tmp_path):
    back = EmbeddingCacheManager(tmp_path/"cache")
    front = tmp_path/"front"
    if packed:
        back.pack(front)
    else:
        shutil.copytree(back.cache_dir, front)
    id = "control_latent", min((back.cache_dir/"control_latent").rglob("*.safetensors")).stem
    both = EmbeddingCacheManager([front, back.cache_dir])
    file = both.layers[0].file(*id)
    if fault == "gone":
        file.unlink()
    else: # all of its entries
        file.write_bytes(file.read_bytes()[:8] + b"\x7f" * (file.stat().st_size - 8))
    good = back.load_cache(*id)
    assert torch.equal(both.load_cache(*id), good)
    if fault == "spoiled":
        assert both.find(*id) is both.layers[1] and both.cache_exists(*id)
    assert torch.equal(both.map_cache(*id), good)


@pytest.mark.slow
def test_ranks_share_the_work(pairs, tmp_path, monkeypatch):
    root, done = pairs(((48, 32),) * 5), []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        done.append(trainer(root, tmp_path).cache_embeddings().encoded)
    assert sorted(done) == [2, 3]


@pytest.mark.slow
def test_hub_data_set_is_cached_and_trained_on(filled, tmp_path):
    datasets = pytest.importorskip("datasets")
    columns = dict(image="training_images", edit_image="control_images")
    rows = [{c: str(filled/d/f"000{i}.png") for c, d in columns.items()} | dict(prompt="make it ünïcode") for i in range(3)]
    held = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image()).cast_column("edit_image", datasets.Image())
    t = trainer(filled, tmp_path)
    batches = loader(held, cache_dir=str(tmp_path/"cache"), image_size=[64, 64], caption_dropout_rate=0.3)
    assert t.cache_embeddings(batches).tensors == 0, "equal images have equal entries"
    EmbeddingCacheManager(tmp_path/"cache").clear_cache("pixel_latent")
    assert t.cache_embeddings(batches).tensors == 3 and t.fit(batches).global_step == 1


def test_dropped_captions_use_the_samples_own_empty_prompt(filled, tmp_path): # which are dropped: in nbs/data/06_dataset
    dataset = trainer(filled, tmp_path, data=dict(caption_dropout_rate=1.)).make_loader().dataset
    empty = [dataset[i]["prompt_embed"] for i in range(3)]
    for i, got in enumerate(empty): assert torch.equal(got, dataset.cache.load_cache(*dataset.keys(i)["empty_prompt_embed"].id))
    assert empty[0].shape == empty[2].shape and not torch.equal(empty[0], empty[2]), "other images, another empty prompt"


@pytest.mark.slow
def test_lazy_filling_uses_the_settings_of_the_loader(pairs, tmp_path):
    root = pairs(THREE)
    t = trainer(root, tmp_path, cache=[tmp_path/"other"], data=dict(image_size=[96, 96], caption_dropout_rate=0.), num_epochs=1, max_train_steps=None)
    batches = loader(str(root), cache_dir=str(tmp_path/"lazy"), image_size=[64, 64], caption_dropout_rate=0.9)
    t.fit(batches)
    assert t.cache_embeddings(batches).tensors == 0 and not files(tmp_path/"other")


def test_an_undecodable_image_is_skipped_without_encoders(filled, bare, tmp_path): # and with them: test_main_job.py
    image = filled/"training_images"/"0001.png"
    image.write_bytes(image.read_bytes()[:2000])
    assert trainer(filled, tmp_path, model=bare).fit().global_step == 1
    t = trainer(filled, tmp_path)
    with pytest.raises(ValueError, match="0001.png' cannot be read"): t.cache_embeddings(loader(ImageDataset(t.config, strict=True)))


@pytest.mark.slow
def test_training_from_a_packed_cache_without_encoders_needs_the_validation_pairs(filled, bare, tmp_path, built):
    val, config = shutil.copytree(filled, tmp_path/"val"), tmp_path/"c.yaml"
    Image.new("RGB", (48, 32), "red").save(val/"control_images"/"0000.png")
    train, folder = dict(val_path=str(val), eval_interval=1), str(tmp_path/"cache")
    whole = trainer(filled, tmp_path, output_dir=str(tmp_path/"whole"), **train).fit()
    EmbeddingCacheManager(folder).clear_cache("modulation")
    before = files(tmp_path/"cache")
    config.write_text(yaml.safe_dump(settings(filled, tmp_path, train=train)))
    assert main(["cache", "gc", folder, "--config", str(config)]) == 0 and files(tmp_path/"cache") == before
    assert main(["cache", "pack", folder, "--config", str(config), "--out", str(tmp_path/"packed")]) == 0
    assert not any(p.is_dir() for p in (tmp_path/"packed").iterdir())
    make = lambda: trainer(filled, tmp_path, model=bare, cache=[tmp_path/"packed", tmp_path/"empty"], **train)
    built.clear()
    adapters_close(whole, make().fit())
    assert "AutoencoderKLQwenImage" not in built and {e.kind for e in EmbeddingCacheManager(tmp_path/"empty").entries()} <= {"modulation"}
    trainer(filled, tmp_path, cache=[tmp_path/"both"], **train).cache_embeddings()
    red = trainer(val, tmp_path, cache=[tmp_path/"both"], data=dict(caption_dropout_rate=0.))
    assert red.cache_embeddings().tensors == 0, "precompute encoded the validation pairs too"
    (val/"training_images"/"0001.txt").write_text("another instruction")
    with pytest.raises(ValueError, match="prompt_embed of sample '0001' is missing"): make().fit()


def test_gc_and_pack_keep_what_the_samples_need(filled, tmp_path):
    samples, config = [dict(image=str(filled/"control_images"/"0000.png"), prompt="an instruction of its own")], tmp_path/"c.yaml"
    trainer(filled, tmp_path, samples=samples).cache_embeddings()
    EmbeddingCacheManager(tmp_path/"cache").clear_cache("modulation")
    config.write_text(yaml.safe_dump(settings(filled, tmp_path, train=dict(samples=samples))))
    before = files(tmp_path/"cache")
    for folder in ([str(tmp_path/"cache")], []): assert main(["cache", "gc", "--config", str(config), *folder]) == 0 and files(tmp_path/"cache") == before
    assert main(["cache", "pack", "--config", str(config), "--out", str(tmp_path/"packed")]) == 0
    packed, whole = ({(e.kind, e.key) for e in EmbeddingCacheManager(tmp_path/name).entries()} for name in ("packed", "cache"))
    assert packed == whole


def test_masks_of_an_older_cache_are_listed_and_removed(filled, tmp_path):
    cache, before = EmbeddingCacheManager(tmp_path/"cache"), files(tmp_path/"cache")
    prompt = next(e for e in cache.entries(["prompt_embed"]))
    cache.save_cache("prompt_embeds_mask", prompt.key, torch.ones(9, dtype=torch.bool))
    assert cache.status()["kinds"]["prompt_embeds_mask"]["present"] == 1 and cache.get_cache_stats()["total"]["count"] == len(before) + 1
    assert trainer(filled, tmp_path).cache_embeddings().tensors == 0
    config = tmp_path/"c.yaml"
    config.write_text(yaml.safe_dump(settings(filled, tmp_path)))
    assert main(["cache", "gc", "--config", str(config)]) == 0 and files(tmp_path/"cache") == before


@pytest.mark.slow
def test_prompt_with_image_tokens_is_skipped(filled, tmp_path):
    val = shutil.copytree(filled, tmp_path/"val")
    for root in (filled, val): (root/"training_images"/"0001.txt").write_text("like <|image_pad|> here")
    t = trainer(filled, tmp_path, val_path=str(val), eval_interval=1)
    assert [i for i, _ in t.cache_embeddings().skipped] == ["0001", "0001"]
    assert t.fit().global_step == 1 and len(t.held_out) == 2
