"""What precompute costs, counted, and what happens if something fails."""
import collections, json, random, shutil, threading, time
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from PIL import Image

import qie_nb.data.samples
import qie_nb.encoding.encoder
import qie_nb.encoding.precompute
from qie_nb.cache import EmbeddingCacheManager
from qie_nb.core.files import DiskFull
from qie_nb.data.dataset import ImageDataset
from qie_nb.data.images import Geometry
from qie_nb.data.samples import ImageChanged
from qie_nb.encoding.encoder import Encoder, encode_prompt, encode_sample
from qie_nb.encoding.precompute import check_space, precompute
from qie_nb.models.encoders import pixels_of
from qie_nb.devices.edit_model import EditModel
from qie_nb.tiny.random_models import tiny_folder
import precompute as bench # benchmarks/precompute.py
from helpers import interrupted, on_call, slow_except, wait_for, weekly, write_pairs
from test_cache_costs import Counted
from tiny_rig import random_image


# --- operations
@pytest.mark.slow
@pytest.mark.skipif(version("transformers").startswith("5.0."), reason="its vision tower does not run on the meta device")
@pytest.mark.parametrize("variant, naive, ours, most", [weekly("v1", 72.6, 33.2, 0.5), ("2511", 25.4, 10.8, 0.45)])
def test_a_sample_needs_less_than_half_of_the_naive_operations(variant, naive, ours, most):
    o = bench.operations(variant)
    assert o["ratio"] <= most and o["total"] == dict(naive=pytest.approx(naive * 1e12, rel=0.03), ours=pytest.approx(ours * 1e12, rel=0.04))


@pytest.mark.parametrize("variant", slow_except(["2511"], ["2511", "v1"]))
def test_precompute_runs_what_the_benchmark_counts(variant, tmp_path):
    "Per sample: vision tower once, VAE once per image, one pass for the prefix, the caption and the empty prompt each; no language head."
    dataset = data_set(write_pairs(tmp_path/"set", ((64, 48),)), tmp_path/"cache")
    encoder = encoder_of(dataset, variant)
    te, vae, seen, passes = encoder.components.get("text_encoder"), encoder.components.get("vae"), [], []
    for name, m in dict(vae=vae.encoder, vision=te.model.visual, head=te.lm_head).items(): m.register_forward_pre_hook(lambda *a, name=name: seen.append(name))
    te.model.language_model.layers[0].register_forward_pre_hook(lambda m, a: passes.append(a[0].shape[1]))
    precompute(dataset, encoder)
    assert collections.Counter(seen) == dict(vae=2, vision=1) and len(passes) == 3 and max(passes[1:]) < passes[0]


# --- prompts on their own
@pytest.mark.parametrize("variant", slow_except(["2511"], ["2511", "2509", "v1"]))
def test_one_encoder_gives_what_a_fresh_one_gives(variant):
    "In any order of images and prompts: also white images with as many pixels in other shapes, and in other numbers."
    white = [Image.new("RGB", size, "white") for size in ((128, 128), (256, 64), (64, 256))]
    geometry, most = Geometry(vl_area=128 * 128, control_area=128 * 128), 1 if variant == "v1" else 2
    parts, draw = EditModel(str(tiny_folder(variant))), random.Random(0)
    sets = [white[:1], white[1:2], white[2:], white[:1], *([draw.choice([*white, random_image((96, 64), draw.randrange(2))]) for _ in range(draw.randint(1, most))] for _ in range(8))]
    one = Encoder(parts)
    for images in sets:
        prompt = draw.choice(["", "make it red"])
        a, b = (encode_prompt(e, prompt, images, geometry) for e in (one, Encoder(parts)))
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    before = one.calls["prefix"]
    encode_prompt(one, "make it blue", images, geometry)
    assert one.calls["prefix"] == before, "equal images in a row share a prefix"


# --- the job
def data_set(root, cache, **kw):
    strict = kw.pop("strict", False)
    return ImageDataset(dict(dataset_path=str(root), cache_dir=str(cache), image_size=[64, 64], use_cache=True, caption_dropout_rate=0.1) | kw, strict=strict)
def encoder_of(dataset, variant="2511", **kw): return Encoder(EditModel(str(tiny_folder(variant))), dataset.cache, **kw)
def run(root, cache, prefetch=4, strict=False, **kw):
    dataset = data_set(root, cache, strict=strict)
    return precompute(dataset, encoder_of(dataset, **kw), prefetch=prefetch)
def files(folder): return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*.safetensors")}
def assert_same_entries(*folders):
    caches = [EmbeddingCacheManager(folder) for folder in folders]
    a, b = ({(kind, key): cache.load_cache(kind, key) for _, kind, key, _ in cache.entries()} for cache in caches)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
def wait_until(condition):
    "Waits, and goes on after a quarter of an hour: the test then sees what is missing."
    with suppress(TimeoutError):
        wait_for(condition, "another thread")


def six_pairs(folder, controls=1): # of three sizes
    return write_pairs(folder, ((48, 32), (32, 48), (40, 40)) * 2, controls, caption=[f"make number {i}{' very' * i} blue" for i in range(6)])


@pytest.fixture
def root(tmp_path): return six_pairs(tmp_path/"set")


@pytest.fixture
def decoded(monkeypatch):
    "How often each image was decoded, and how many in the main thread (`here`)."
    count = collections.Counter()
    on_call(monkeypatch, qie_nb.data.samples, "open_image",
            lambda source, name=None: count.update({name: 1, "here": threading.current_thread() is threading.main_thread()}))
    return count


@pytest.fixture
def stored(monkeypatch):
    "Entries as they are stored, in order."
    order = []
    on_call(monkeypatch, EmbeddingCacheManager, "save_cache", lambda self, kind, key, *a: order.append((kind, key)))
    return order


@pytest.mark.slow
@pytest.mark.parametrize("controls", [1, 2]) # the second one has another size
def test_entries_do_not_depend_on_prefetch_and_batch(controls, tmp_path, stored):
    root = six_pairs(tmp_path/"set", controls)
    shutil.copy(root/"control_images"/"0000.png", root/"control_images"/"0003.png") # two edits of one image in a batch
    for prefetch, batch in (0, 2), (4, 2), (0, 1):
        report = run(root, tmp_path/f"{prefetch} {batch}", prefetch, batch_size=batch)
        assert (report.encoded, report.skipped) == (6, [])
    n = report.tensors
    assert len(stored) == 3 * n and stored[:n] == stored[n:2 * n]
    for other in ("4 2", "0 1"): assert_same_entries(tmp_path/"0 2", tmp_path/other)


def test_the_work_is_planned_once(root, tmp_path, monkeypatch):
    planned = []
    on_call(monkeypatch, qie_nb.encoding.precompute, "plan_encoding", lambda dataset, missing, batch_size: planned.append(sorted(missing)))
    assert run(root, tmp_path/"cache").encoded == 6 and planned == [list(range(6))]


def test_encode_sample_stores_what_precompute_stores(root, tmp_path):
    run(root, tmp_path/"cache")
    lazy = data_set(root, tmp_path/"lazy")
    encoder = encoder_of(lazy)
    lazy.cache.add_identity(encoder.identity), lazy.refresh()
    for i in range(6): encode_sample(encoder, lazy, i) # again: in the notebook
    assert_same_entries(tmp_path/"lazy", tmp_path/"cache")


@pytest.mark.parametrize("prefetch", slow_except([4], [4, 0]))
def test_each_image_is_decoded_once(prefetch, tmp_path, decoded, monkeypatch):
    monkeypatch.setenv("QIE_NB_HOME", str(tmp_path/"home")), monkeypatch.setattr("qie_nb.core.files._MIN_AGE", -10.) # file facts are kept at once
    root = write_pairs(tmp_path/"set", ((48, 32),) * 7)
    for i in range(1, 6): (root/"control_images"/f"{i:04}.png").write_bytes((root/"control_images"/"0000.png").read_bytes()) # six edits of one image
    with Counted() as c: assert run(root, tmp_path/"cache", prefetch).encoded == 7
    here = decoded.pop("here", 0)
    assert set(decoded.values()) == {1} and len(decoded) == 7 + 2 and here == (0 if prefetch else 9)
    opened = {p: n for p, n in c.opened.items() if p.endswith(".png")}
    assert len(opened) == 14 and max(opened.values()) <= 3, "its size, its digest, itself"


def test_images_are_read_while_the_encoders_work(root, tmp_path, monkeypatch, decoded):
    came = []
    def wait(*a):
        wait_until(lambda: len(decoded) >= 8 or came)
        came.append(len(decoded))
    on_call(monkeypatch, qie_nb.encoding.encoder, "encode_latents", wait)
    assert run(root, tmp_path/"cache", prefetch=4).encoded == 6 and 8 <= came[0] <= 2 * 5 + 1, "four samples in advance and no more"


def test_an_image_replaced_after_prefetch_is_read_again(root, tmp_path, monkeypatch, decoded):
    done, path = [], root/"control_images"/"0003.png"
    def replace(*a):
        wait_until(lambda: done or decoded[repr(str(path))])
        if done: return
        time.sleep(0.05)
        done.append(decoded[repr(str(path))])
        random_image(Image.open(path).size, 99).save(path)
    with monkeypatch.context() as mp:
        on_call(mp, qie_nb.encoding.encoder, "encode_latents", replace)
        assert run(root, tmp_path/"cache").encoded == 6 and done == [1]
    run(root, tmp_path/"fresh")
    assert_same_entries(tmp_path/"cache", tmp_path/"fresh")


def test_a_broken_image_skips_its_own_sample(root, tmp_path, monkeypatch):
    def broken(source, name=None):
        if name.endswith("control_images/0003.png'"): raise ValueError(f"image {name} cannot be read")
    on_call(monkeypatch, qie_nb.data.samples, "open_image", broken)
    report = run(root, tmp_path/"cache")
    assert report.encoded == 5 and [i for i, _ in report.skipped] == ["0003"] and "0003.png" in report.skipped[0][1]
    assert len(files(tmp_path/"cache")) == 5 * 5


@pytest.mark.parametrize("strict", [False, True])
def test_a_nan_skips_its_own_sample(strict, root, tmp_path, monkeypatch):
    real, dataset = Encoder.encode_images, data_set(root, tmp_path/"other")
    vae = EditModel(str(tiny_folder("2511"))).get("vae")
    bad = pixels_of(vae, Image.fromarray(dataset.images(2)["image"]), (64, 64))
    def images(self, pixels, size):
        out = real(self, pixels, size)
        for z, p in zip(out, pixels):
            if size == (64, 64) and torch.equal(p, bad): z[0, 0, 0, 0] = float("nan")
        return out
    monkeypatch.setattr(Encoder, "encode_images", images)
    if strict:
        with pytest.raises(ValueError, match="pixel_latent.*holds NaN or inf and is not stored"): run(root, tmp_path/"cache", strict=True)
        return
    report = run(root, tmp_path/"cache", batch_size=2)
    assert report.encoded == 5 and [i for i, _ in report.skipped] == ["0002"] and "NaN" in report.skipped[0][1]
    kinds = collections.Counter(kind for _, kind, _, _ in EmbeddingCacheManager(tmp_path/"cache").entries())
    assert kinds["prompt_embed"] == 5 and kinds["pixel_latent"] == 5


def test_a_lock_is_held_until_its_entries_are_stored(root, tmp_path, monkeypatch):
    held, names, dataset = [], [], data_set(root, tmp_path/"cache")
    encoder = encoder_of(dataset)
    @contextmanager
    def file_lock(folder, name, wait=0):
        held.append(name)
        try: yield True
        finally: held.remove(name)
    def save(self, kind, *a): assert held[-1] == dataset.keys(names[-1])["prompt_prefix"].key if kind == "prompt_prefix" else held
    monkeypatch.setattr("qie_nb.encoding.precompute.file_lock", file_lock)
    on_call(monkeypatch, encoder, "fill", lambda tensors, read: names.extend(dict.fromkeys(t.sample for t in tensors)))
    on_call(monkeypatch, EmbeddingCacheManager, "save_cache", save)
    assert precompute(dataset, encoder).encoded == 6 and not held


def test_items_locked_elsewhere_come_back(root, tmp_path, monkeypatch):
    tries = collections.Counter()
    @contextmanager
    def file_lock(folder, name, wait=0):
        tries[name] += 1
        yield tries[name] > 2
    monkeypatch.setattr("qie_nb.encoding.precompute.file_lock", file_lock)
    assert run(root, tmp_path/"cache").encoded == 6 and set(tries.values()) == {3}


def test_an_interrupt_leaves_whole_entries_and_no_threads(root, tmp_path):
    before = set(threading.enumerate())
    with interrupted(Encoder, "encode_images", 6): run(root, tmp_path/"cache")
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("prefetch")]
    there = files(tmp_path/"cache")
    assert 2 * 5 <= len(there) < 6 * 5 and not EmbeddingCacheManager(tmp_path/"cache").verify()
    report, now = run(root, tmp_path/"cache"), files(tmp_path/"cache")
    assert report.tensors == 6 * 5 - len(there) and len(now) == 6 * 5 and all(now[k] == v for k, v in there.items())


def test_a_second_caption_of_a_known_image_costs_its_own_tokens_only(root, tmp_path):
    shutil.copy(root/"control_images"/"0000.png", root/"control_images"/"0003.png")
    dataset = data_set(root, tmp_path/"cache")
    first = precompute(dataset, encoder_of(dataset), 0, 3)
    before = files(tmp_path/"cache")
    assert first.bytes == sum(map(len, before.values()))
    second, after = run(root, tmp_path/"cache", batch_size=2), files(tmp_path/"cache")
    assert second.bytes == sum(len(v) for k, v in after.items() if k not in before), "the prefix is there"
    assert (second.encoded, second.reused, second.elsewhere) == (3, 3, 0)


def test_the_report_counts_its_own_entries_without_the_modulation_table(root, tmp_path):
    dataset = data_set(root, tmp_path/"cache")
    report = precompute(dataset, encoder_of(dataset), table=[1000, 2000])
    assert report.bytes == sum(map(len, files(tmp_path/"cache").values()))


def test_each_process_encodes_its_share(root, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, reused in (("0", 0), ("1", 3)):
        monkeypatch.setenv("RANK", rank)
        report = run(root, tmp_path/"cache")
        assert (report.samples, report.encoded, report.reused) == (6, 3, reused)


def test_a_damaged_entry_is_noticed_and_a_sample_that_cannot_be_used_is_named(root, tmp_path):
    run(root, tmp_path/"cache")
    path = min((tmp_path/"cache"/"control_latent").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    (root/"training_images"/"0004.png").write_bytes(b"no image")
    report = run(root, tmp_path/"cache")
    assert [file for file, _ in report.bad] == [str(path)] and report.encoded == 1
    assert [i for i, _ in report.skipped] == ["0004"] and report.samples == 6


@pytest.mark.parametrize("times, encoded", [(1, 6), (2, 6), (3, 5)])
def test_a_sample_whose_image_changes_while_it_is_read_is_tried_three_times(times, encoded, root, tmp_path, monkeypatch):
    left = [times]
    def changed(source, digest):
        if str(source).endswith("control_images/0003.png") and left[0]: left[0] -= 1; raise ImageChanged(f"{source} has changed")
    on_call(monkeypatch, qie_nb.encoding.precompute, "open_unchanged", changed)
    report = run(root, tmp_path/"cache", prefetch=0)
    assert report.encoded == encoded and [i for i, _ in report.skipped] == ["0003"] * (6 - encoded)


def test_a_part_of_the_data_set_may_end_beyond_it(root, tmp_path):
    dataset = data_set(root, tmp_path/"cache")
    report = precompute(dataset, encoder_of(dataset), 4, 99)
    assert (report.samples, report.encoded) == (2, 2)
    for start, end in ((6, 9), (3, 3), (-1, 2)):
        with pytest.raises(ValueError, match="select no sample; the data set has 6"): precompute(dataset, encoder_of(dataset), start, end)


def test_the_disk_is_filled_in_whole_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("qie_nb.core.environment.free_bytes", lambda folder: 5 * 4096)
    monkeypatch.setattr("qie_nb.encoding.precompute.block_size", lambda folder: 4096)
    check_space([100] * 4, [4096], tmp_path)
    with pytest.raises(DiskFull, match="missing"): check_space([100] * 4, [4097], tmp_path)


def test_too_small_a_disk_is_refused_before_encoding(root, tmp_path, monkeypatch, stored):
    monkeypatch.setattr("qie_nb.core.environment.free_bytes", lambda folder: 1000)
    with pytest.raises(OSError, match=r"needs \d\.\d MB more, .* free: \d\.\d MB are missing"): run(root, tmp_path/"cache")
    assert not stored


def test_a_full_disk_ends_the_job(root, tmp_path, monkeypatch, stored, capsys):
    def full(*a):
        if len(stored) == 10: raise DiskFull(28, "'x' is full")
    on_call(monkeypatch, EmbeddingCacheManager, "save_cache", full)
    with pytest.raises(DiskFull, match="is full. The job still has .* MB to write; run it again to continue"): run(root, tmp_path/"cache")
    assert len(stored) == len(files(tmp_path/"cache")) == 10 and " MB will be written, " in capsys.readouterr().out


# --- settings that are in no key
@pytest.mark.slow
def test_settings_that_change_entries_by_rounding_are_reported_on_a_filled_cache(root, tmp_path, monkeypatch, capsys, encoders_with):
    "By precompute and by training, once in a process; not for a cache that an older version filled."
    from helpers import settings
    from qie_nb.encoding import encoder
    from qie_nb.trainer import QwenImageEditTrainer
    def said(again=True, fit=False, folder="cache", vae_2d=True, share_prefix=True, **cache):
        encoders_with(vae_2d=vae_2d, share_prefix=share_prefix)
        if again: encoder._reported.clear() # a new process
        trainer = QwenImageEditTrainer(settings(root, tmp_path, cache=dict(cache_dir=str(tmp_path/folder)) | cache, train=dict(max_train_steps=1)))
        trainer.fit() if fit else trainer.cache_embeddings()
        return [l for l in capsys.readouterr().out.splitlines() if "was first filled with" in l]
    assert said() == said() == []
    line, = said(vae_2d=False)
    assert line == (f"`vae_2d` of the encoder is False, but cache {str(tmp_path/'cache')!r} was first filled with True; its entries are kept (they differ by rounding), "
                    "`qie-nb cache clear` removes them")
    assert len(said(fit=True, share_prefix=False, batch_size=2)) == 2 and said(again=False, vae_2d=False) == [] and said() == []
    assert said(fit=True, folder="lazy") == [] and len(said(folder="lazy", vae_2d=False)) == 1, "filled by training"
    manifest = tmp_path/"cache"/"manifest.json"
    known = json.loads(manifest.read_text())
    for v in known["identities"].values(): del v["switches"]
    manifest.write_text(json.dumps(known))
    assert said(vae_2d=False) == said() == [] and "switches" not in manifest.read_text(), "an older version's"
