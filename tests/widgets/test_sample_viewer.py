"""The sample viewer, the cache status, and the checks of pairs that they show."""
import base64, builtins, gc, io, json, os, re, shutil, subprocess, sys, weakref
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from helpers import on_call, write_pairs
from qie_nb.cache import EmbeddingCacheManager
from qie_nb.config import make_config
from qie_nb.core.cache_layers import FolderStore
from qie_nb.core.display import VIEW
from qie_nb.data.dataset import ImageDataset, loader
from qie_nb.data.batches import as_list
from qie_nb.data.images import open_image
from qie_nb.data.pair_checks import AGAIN, SWAPPED, UNCHANGED, alike, distance, look
from qie_nb.data.samples import Sample
from qie_nb.encoding.encoder import Encoder
from qie_nb.encoding.precompute import precompute
from qie_nb.devices.edit_model import EditModel
from qie_nb.models.components import VARIANTS
from qie_nb.tiny.photos import crops, EDITS, make_pairs, photo_folder, PHOTOS
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.widgets.cache_status import StatusText, cache_status
from qie_nb.widgets.sample_page import masked_image, sample_info
from qie_nb.widgets.sample_viewer import SampleViewer, pair_grid, sample_html, sample_viewer
from test_masks import halves, paint

HOSTILE = "<img src=x onerror=alert(1)>"
VIEWER = "qie_nb.widgets.sample_viewer"
PAGE = "qie_nb.widgets.sample_page"


def dataset(root, cache=None, **kw):
    cache = dict(cache_dir=cache if isinstance(cache, list) else str(cache)) if cache else {}
    return ImageDataset(dict(dataset_path=str(root), image_size=[64, 64], **cache, **kw))


def fill(ds, variant="2511", **which):
    precompute(ds, Encoder(EditModel(str(tiny_folder(variant))), ds.cache), **which)
    return ds


def spoil(path): # a cache file keeps its size
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def opened(view): # the view and its controls
    view.box
    return view, view.controls


def widgets_in(box): return [box, *(w for child in getattr(box, "children", ()) for w in widgets_in(child))]


def tame(*pages): return not any("<img src=x" in p or "<script" in p.lower() or "onerror=alert(1)>" in p for p in pages)


def assert_tame(box):
    "HTML is escaped; other texts hold nothing of the data."
    for w in widgets_in(box):
        assert type(w).__name__ != "HTML" or tame(w.value)
        assert not any("onerror" in str(getattr(w, name, "")) for name in ("description", "placeholder", "tooltip", "options", "_options_labels"))


# --- escaping

@pytest.fixture
def hostile(tmp_path):
    "Sample ids, captions, folder and model names that contain a tag; pairs 2 and 3 repeat 0 and 1."
    root, cache = tmp_path/f"set {HOSTILE}", tmp_path/f"cache {HOSTILE}"
    write_pairs(root, [(96, 64)] * 2, caption=[f"{HOSTILE} {n}" for n in range(2)])
    for path in sorted(root.rglob("000?.*")):
        shutil.copy(path, path.with_name(f"{int(path.stem) + 2} {HOSTILE}{path.suffix}"))
        path.rename(path.with_name(f"{int(path.stem)} {HOSTILE}{path.suffix}"))
    ds = fill(dataset(root, cache, caption_dropout_rate=0.5))
    (cache/"manifest.json").write_text(json.dumps(dict(version=1, identities=dict(a=ds.identity | dict(model=HOSTILE)))))
    ds.refresh()
    return ds


def test_viewer_escapes_everything(hostile):
    view, c = opened(sample_viewer(hostile, str(tiny_folder("2511")), whole=True))
    pages = [pair_grid(hostile).html(), view.html(), *(sample_html(hostile, i) for i in range(4))]
    assert any("trains this pair without its caption" in p for p in pages)
    hostile.samples[3].target.write_bytes(b"broken")
    seen = lambda: pages.extend((c.page.value, c.message.value))
    for name in list(view.filters()):
        c.filter.value = name
        for i in range(1, c.slider.max + 1): c.slider.value = i; seen()
    c.filter.value = "all"
    for text in (HOSTILE, f"nowhere {HOSTILE}"): c.goto.value = text; seen()
    assert "no id contains" in pages[-1] and view.filters()["near"] == 2 and view.filters()["bad"] == 1
    assert tame(*pages) and sum("&lt;img src=x" in p for p in pages) > 10
    assert_tame(view.box)


def test_status_escapes_everything(hostile, tmp_path):
    cache, gone = hostile.cache, tmp_path/f"gone {HOSTILE}"
    path = next(Path(cache.cache_dir, "pixel_latent").rglob("*.safetensors"))
    spoil(path)
    cache.quarantine(cache.layers[-1], "pixel_latent", path.stem, f"is {HOSTILE}")
    hostile.samples[3].target.unlink()
    for what in (hostile, cache, str(cache.cache_dir), gone, [gone, tmp_path/"b"]):
        status, c = opened(cache_status(what))
        c.verify.click()
        assert_tame(status.box)
        assert tame(status.html()) and "&lt;img src=x" in status.html()
    assert tame(hostile._repr_html_(), cache._repr_html_())


# --- sample_info

@pytest.mark.parametrize("variant, controls", [("v1", 1), ("2511", 2)])
def test_tokens_agree_with_encoded_tensors(variant, controls, pairs, tmp_path):
    ds = dataset(pairs(controls=controls), tmp_path/"cache", caption_dropout_rate=0.5)
    before = [sample_info(ds, i, str(tiny_folder(variant)), whole=True) for i in range(3)]
    fill(ds, variant)
    for i, b in enumerate(before):
        f, tensors = sample_info(ds, i), ds[i]
        latents = [tensors["pixel_latent"], *as_list(tensors["control_latent"])]
        tokens, text = [t.shape[-1] * t.shape[-2] // 4 for t in latents], len(tensors["prompt_embed"])
        want = dict(target=tokens[0], embedding=text, sequence=sum(tokens) + text, counted_by="cache")
        assert want.items() <= (f["tokens"] | dict(controls=0)).items() and list(f["tokens"]["controls"]) == tokens[1:]
        assert b["tokens"] == f["tokens"] | dict(counted_by="tokenizer") and b["missing"] == ["everything"] and f["cached"] and not f["missing"]
        assert b["text"] == VARIANTS[variant].prompt_text("" if ds.dropped(i) else "invert the colours", controls)
        assert f["tokens"]["text"] + sum(f["tokens"]["vision"]) == text
        assert f["text"] in b["text"] and f["variant"] == variant and f["dropped"] == ds.dropped(i)


def test_impossible_caption_is_a_problem(pairs):
    ds = dataset(pairs(caption="a <|image_pad|> here"))
    f = sample_info(ds, 0, str(tiny_folder("2511")), whole=True)
    assert "must not contain the token" in f["problems"][0] and f["tokens"]["target"] == 16 and f["tokens"]["text"] is None
    assert "must not contain" in sample_html(ds, 0, facts=f)


@pytest.mark.slow
def test_no_heavy_imports_without_a_model(pairs):
    code = ("import sys, qie_nb.widgets.cache_status; assert 'ipywidgets' not in sys.modules; from qie_nb.widgets.sample_viewer import sample_viewer; "
            "v = sample_viewer({'dataset_path': sys.argv[1]}); v.box; v.html(); d = v.data(); assert d['text'] == 'invert the colours' and d['variant'] is None; "
            "assert not {'diffusers', 'transformers', 'matplotlib'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code, pairs()], check=True)


def test_types_of_model_and_data_set(trained_run):
    trainer, root = trained_run.trainer, trained_run.root
    assert {sample_viewer(d, m).data()["variant"] for d in (root, loader(root), dict(dataset_path=str(root))) for m in (trainer, trainer.components, tiny_folder("2511"))} == {"2511"}
    with pytest.raises(ValueError, match="`model` must be a trainer"): sample_viewer(root, 3)


# --- browsing

def test_clicks(pairs):
    view, c = opened(sample_viewer(dataset(pairs(sizes=[(48, 32)] * 5, caption=[f"caption {i}" for i in range(5)]))))

    def shown(n): # the n-th sample, everywhere
        assert (view.data()["id"], c.slider.value) == (f"000{n}", n + 1) and c.caption.value == f"caption {n}" and f"({n + 1} of 5)" in c.page.value
        assert (c.back.disabled, c.on.disabled) == (n == 0, n == 4)
    shown(0)
    c.on.click(); c.on.click(); shown(2)
    c.back.click(); shown(1)
    c.slider.value = 5; shown(4)
    c.on.click(); shown(4)
    c.goto.value = " 0003 "; shown(3)
    assert c.goto.value == ""
    for n in (4, 0, 1): c.goto.value = "00"; shown(n)
    c.goto.value = "elsewhere"; shown(1)
    assert "no id contains" in c.message.value
    c.on.click()
    assert c.message.value == ""


def test_exact_id_wins(pairs):
    ds = dataset(pairs())
    ds.samples = [replace(s, id=name) for s, name in zip(ds.samples, ("a", "ab", "b"))]
    view = SampleViewer(ds)
    for name in ("b", "a"): assert view.find(name) and view.data()["id"] == name


def test_filters(tmp_path):
    root = make_pairs(tmp_path/"set", "grayscale", 6)
    target, control = root/"training_images", root/"control_images"
    Image.open(control/"0000.png").save(target/"0000.png", compress_level=1)
    ds = fill(dataset(root, tmp_path/"cache"), end=4)
    for d in (target, control): shutil.copy(d/"0001.png", d/"0005.png")
    (control/"0002.png").write_bytes(b"broken")
    (target/"0003.png").unlink()
    for old, new in ((target/"0004.png", root/"grey.png"), (control/"0004.png", target/"0004.png"), (root/"grey.png", control/"0004.png")): old.rename(new)
    spoil(path := ds.cache.layers[-1].path(*ds.keys(0)["pixel_latent"].id))
    view, c = opened(sample_viewer(ds))
    # the entries of 0003 are good, its image is missing
    want = dict(unchanged=["0000"], missing=["0002", "0004"], swapped=["0004"], near=["0001", "0005"], bad=["0000", "0002", "0003"])
    said = dict(unchanged=UNCHANGED, swapped=SWAPPED, near=AGAIN, bad="pixel_latent is bad: checksum differs")
    assert {k for k, v in view.filters().items() if v is None} == set(want) | {"sizes", "contents", "misaligned"}
    for name, ids in want.items():
        c.filter.value = name
        assert [ds.samples[i].id for i in view.chosen] == ids and view.filter == name and view.filters()[name] == c.slider.max == len(ids)
        assert said.get(name, "") in c.page.value and f"({len(ids)})" in next(label for label, k in c.filter.options if k == name)
    for why in ("it is text that begins &#x27;broken&#x27;", "it does not exist"):
        c.on.click()
        assert f"cannot be read ({why})" in c.page.value
    assert path.is_file(), "nothing is quarantined"
    assert SWAPPED in pair_grid(ds, 5).html()


def test_bucket_filters(pairs):
    root = pairs(sizes=[(48, 32), (48, 32), (32, 48), (40, 40)])
    ds = ImageDataset(dict(dataset_path=str(root), image_size=[128, 128], control_area=64*64))
    view, c = opened(sample_viewer(ds))
    names = {k: v for k, v in view.filters().items() if k.startswith("bucket")}
    assert next(iter(names)) == "bucket 160x96 + 64x64" and names == {"bucket 160x96 + 64x64": 2, "bucket 96x160 + 64x64": 1, "bucket 128x128 + 64x64": 1}
    for name in names:
        c.filter.value = name
        assert len(view.chosen) == names[name] and {"bucket " + " + ".join(f"{w}x{h}" for w, h in ds.bucket(i)) for i in view.chosen} == {name}
    assert {k: len(v) for k, v in view.buckets(most=1).items()} == {"bucket 160x96 + 64x64": 2, "other buckets": 2}
    with pytest.raises(ValueError, match="`name` must be one of all, missing"): view.select("bucket 1x1")


def test_failing_click_shows_a_message(pairs):
    view, c = opened(sample_viewer(dataset(pairs())))
    with patch(f"{VIEWER}.near_duplicates", side_effect=RuntimeError(f"no {HOSTILE}")): c.scan.click()
    assert "RuntimeError" in c.message.value and tame(c.message.value) and not c.scan.disabled and view.filters()["near"] is None
    with patch(f"{VIEWER}.look", side_effect=KeyboardInterrupt): c.filter.value = "near"
    assert "stopped" in c.message.value and c.filter.value == view.filter == "all"
    with patch(f"{VIEWER}.sample_info", side_effect=RuntimeError("no facts")): c.on.click()
    assert "no facts" in c.page.value and c.slider.value == 2
    c.on.click()
    assert "(3 of 3)" in c.page.value
    c.scan.click()
    said = c.message.value
    assert "found 2 pairs of unusual size or shape: choose them in the list" in said
    assert "cannot be told from the images alone" in said
    assert view.filters()["near"] == 0
    assert c.page.value.count(">before</figcaption>") == 3
    assert c.page.value.count(">after</figcaption>") == 3
    assert c.caption.layout.display == "none"
    assert all(w.layout.display != "none" for w in (c.back, c.on, c.scan, c.whole, c.filter))
    c.filter.value = "near"
    assert "no sample" in c.page.value and view.data()["id"] is None and (c.slider.max, c.slider.disabled) == (1, True)


def test_a_pair_is_excluded_from_the_next_run_and_taken_back(pairs):
    "Through the configuration that viewer and trainer share; nothing changes on disk."
    config = make_config(dict(data=dict(dataset_path=str(pairs(((48, 32),) * 4)))))
    view = sample_viewer(ImageDataset(config))
    c = view.box and view.controls
    c.on.click()
    c.exclude.click()
    assert config.data.exclude == ["0001"]
    assert [s.id for s in ImageDataset(config).samples] == ["0000", "0002", "0003"]
    assert "data.exclude: [&#x27;0001&#x27;]" in c.message.value
    assert c.exclude.description == "include this pair again"
    c.glance.value = True
    assert c.page.value.count("<img") == 8
    assert c.page.value.count("(excluded)") == 1
    assert c.on.disabled
    assert c.exclude.disabled
    assert c.caption.layout.display == "none"
    c.glance.value = False
    c.exclude.click()
    assert config.data.exclude == [] and "no pair is excluded" in c.message.value
    config.data.exclude = ["0001", "nosuch"]
    sentence = "`data.exclude` has 'nosuch', which no pair of the data set is called"
    with pytest.raises(ValueError, match=sentence):
        ImageDataset(config)


def test_at_a_glance_goes_by_thirty(many):
    view = sample_viewer(many)
    view.glance = True
    for first in (1, 31, 61):
        page = view.page()
        assert page.count("<img") == 60
        assert f"<br>{first}: " in page
        assert f"<br>{first + 29}: " in page
        assert f"<br>{first + 30}: " not in page
        view.step()


def test_both_sides_are_swapped_in_the_configuration_and_swapped_back(pairs, tmp_path):
    root = pairs(((48, 32),) * 3)
    config = make_config(dict(data=dict(dataset_path=str(root))))
    view = sample_viewer(ImageDataset(config))
    c = view.box and view.controls
    before, after = view.dataset.samples[0].controls[0], view.dataset.samples[0].target
    c.swap.click()
    found = ImageDataset(config).samples[0]
    assert (found.target, found.controls) == (before, (after,))
    shown = view.dataset.samples[0]
    assert (shown.target, shown.controls) == (before, (after,))
    assert "data.target_dir: control_images" in c.message.value
    c.swap.click()
    assert view.dataset.samples[0].target == after
    assert sorted(p.name for p in root.iterdir()) == ["control_images", "training_images"]
    with_two = write_pairs(tmp_path/"two", ((48, 32),) * 3, controls=2)
    two = sample_viewer(ImageDataset(dict(dataset_path=str(with_two))))
    two.box and two.controls.swap.click()
    assert "one image before and one after" in two.controls.message.value


def test_samples_removed_while_browsing(pairs):
    ds = dataset(pairs(sizes=[(48, 32)] * 4))
    view, c = opened(sample_viewer(ds))
    c.scan.click(); c.slider.value = 4
    ds.drop({2: "gone", 3: "gone"})
    assert view.data()["id"] == "0001" and "(2 of 2)" in view.page()
    c.on.click()
    assert view.data()["id"] == "0001" and "(2 of 2)" in c.page.value and c.slider.max == 2


def test_empty_data_set():
    view, c = opened(sample_viewer(ImageDataset(dict(dataset_path=".", image_size=[64, 64]), samples=[])))
    for b in (c.on, c.back, c.scan): b.click()
    assert "there are no samples" in c.page.value and "there are no samples" in view.html() and c.slider.disabled


# --- captions

def test_a_caption_is_edited_in_its_file_and_undone(pairs, tmp_path):
    root = pairs(sizes=[(48, 32)] * 2)
    file = root/"training_images"/"0000.txt"
    file.write_bytes(old := "\ufeffinvert the colours\r\n".encode())
    ds = fill(dataset(root, tmp_path/"cache", trigger_word="zxy"))
    view, c = opened(sample_viewer(ds))
    assert "encoded</span>" in c.page.value and c.caption.value == "invert the colours" and str(file) in c.where.value and c.undo.disabled
    c.caption.value = f"make it {HOSTILE}"
    c.save.click()
    assert file.read_text() == f"make it {HOSTILE}\n" and view.data()["prompt"] == f"zxy, make it {HOSTILE}" == dataset(root, trigger_word="zxy").samples[0].prompt
    assert view.data()["missing"] and "partly encoded" in c.page.value and tame(c.page.value, c.message.value) and not list(file.parent.glob(".*"))
    c.on.click(); c.undo.click()
    assert file.read_bytes() == old and ds.samples[0].prompt == "zxy, invert the colours" and not ds.missing(0)
    c.back.click(); c.caption.value = " "; c.save.click()
    assert "the caption is empty" in c.message.value and file.read_bytes() == old
    with patch(f"{VIEWER}.write_atomic", side_effect=OSError(30, "Read-only file system")): c.caption.value = "x"; c.save.click()
    assert "Read-only file system" in c.message.value and view.data()["prompt"] == "zxy, invert the colours"


def test_a_caption_that_is_not_saved_is_kept(pairs):
    view, c = opened(sample_viewer(dataset(pairs(sizes=[(48, 32)] * 2, caption=["one", "two"]))))
    c.caption.value = "better"
    c.on.click()
    assert c.caption.value == "two" and "not saved" not in c.where.value
    c.back.click()
    assert c.caption.value == "better" and "(not saved)" in c.where.value
    c.save.click()
    assert c.caption.value == "better" and "not saved" not in c.where.value
    c.undo.click()
    assert c.caption.value == "one" and not view.drafts


def test_a_shared_or_table_caption_says_where_it_is(pairs, tmp_path):
    root = pairs(sizes=[(48, 32)])
    (root/"training_images"/"0000.txt").unlink()
    (root/"prompt.txt").write_text("invert")
    for ds, where in ((dataset(root), "prompt.txt"), (table_set(root), "metadata.jsonl")):
        view, c = opened(sample_viewer(ds))
        assert c.save.layout.display == "none" and where in c.where.value and "edit it there" in c.where.value
        with pytest.raises(ValueError, match="edit it there"): view.save_caption("x")


def table_set(root):
    (root/"metadata.jsonl").write_text(json.dumps(dict(image="training_images/0000.png", control="control_images/0000.png", prompt="invert")))
    return dataset(root)


def test_stretched_images_and_unknown_lengths_are_said_in_words(pairs):
    ds = dataset(pairs(sizes=[(45, 64), (64, 64)]))
    assert "after: 45x64 → 64x64, stretched by 42 %" in sample_html(ds, 0) and "stretched</span>" in sample_html(ds, 0)
    page = sample_html(ds, 1) # no model is known, so the size of its controls is neither
    assert "before: 64x64<" in page and "after: 64x64 → 64x64<" in page
    assert "?" not in re.sub("base64,[^\"]*", "", page).replace("qie", "") and "not encoded yet" in page and "#b3261e" not in page
    assert page.index("<details>") < page.index("tokens: ")


# --- images

def test_unreadable_image_shows_a_message(pairs):
    root = pairs(sizes=[(48, 32)] * 3, controls=2)
    view, c = opened(sample_viewer(dataset(root)))
    (root/"control_images"/"0001.png").write_bytes(b"broken")
    (root/"control_images_2"/"0001.png").unlink()
    c.on.click()
    assert "before 1: image" in c.page.value and "before 2: image" in c.page.value and c.page.value.count("<figure") == 1
    assert len(view.data()["problems"]) == 1 and "cannot be read" in pair_grid(view.dataset, 2).html()
    c.on.click()
    assert c.page.value.count("<figure") == 3 and "before 2:" in c.page.value and view.data()["problems"] == []


def test_exif_rotated_image_is_upright(pairs):
    root, exif = pairs(sizes=[(48, 32)]), Image.Exif()
    exif[274] = 6 # shown turned clockwise
    Image.new("RGB", (32, 48)).save(root/"training_images"/"0000.png", exif=exif)
    page = sample_html(dataset(root), 0)
    assert "after: 48x32" in page and [Image.open(io.BytesIO(base64.b64decode(d))).size for d in re.findall('base64,([^"]+)', page)] == [(48, 32)] * 2


def test_mask_is_drawn(pairs):
    root = paint(pairs(sizes=[(96, 64)] * 3), {"0000": halves(96, 64), "0001": halves(96, 64)})
    ds = dataset(root)
    assert "mask: 50 % counts" in sample_html(ds, 0) and sample_info(ds, 0)["mask"] and not sample_info(ds, 2)["mask"] and "mask" not in sample_html(ds, 2)
    paint(root, {"0001": np.zeros((64, 96))})
    assert "is black everywhere" in sample_html(ds, 1)


def test_a_mask_is_red_where_the_loss_does_not_count():
    counts_right = np.zeros((2, 2), np.uint8)
    counts_right[:, 1] = 255
    shown = masked_image(Image.new("RGB", (32, 16), "white"), counts_right)
    assert shown.getpixel((31, 0)) == (255, 255, 255)
    red, green, blue = shown.getpixel((0, 0))
    assert red > 200 and green == blue < 120


def test_latents_are_decoded_on_demand(trained_run, pairs):
    ds = dataset(trained_run.root, trained_run.cache)
    ds.samples[1:] = dataset(pairs(seed=1)).samples
    view, c = opened(sample_viewer(ds, tiny_folder("2511")))
    assert "decoded" not in c.page.value and not view.components.loaded, "nothing is loaded yet"
    c.decode.value = True
    assert c.page.value.count("latent decoded") == 2 and list(view.components.loaded) == ["vae"]
    c.on.click()
    assert "the cache has no latent" in c.page.value and c.page.value.count("<figure") == 2
    c.decode.value = False
    assert "not decoded" not in c.page.value


def test_reasons_for_not_decoding(trained_run, tmp_path, pairs):
    ds = dataset(trained_run.root, trained_run.cache)
    for viewer, why in ((sample_viewer(ds), "decoding needs a VAE"), (sample_viewer(ds, "tiny"), "filled by another VAE"),
                        (sample_viewer(dataset(pairs()), "tiny"), "no cache is set"), (sample_viewer(dataset(pairs(), tmp_path/"empty"), "tiny"), "cache is empty")):
        _, c = opened(viewer)
        c.decode.value = True
        assert "not decoded: " in c.page.value and why in c.page.value and "<figure" in c.page.value


# --- warnings

def as_looks(images, **how):
    files = [io.BytesIO() for _ in images]
    for im, file in zip(images, files): im.save(file, **dict(format="PNG") | how)
    return [look(file.getvalue()) for file in files]


def originals(split) -> tuple:
    "The photographs of a split as scikit-image has them: twice as detailed as the package's, like a user's."
    as_made = {"train": ["astronaut.png", "motorcycle_left.png", "rocket.jpg", "retina.jpg", "ihc.png"], "more": PHOTOS["more"]}
    return tuple(Image.open(photo_folder("more")/name).convert("RGB") for name in as_made[split])


@pytest.mark.slow
def test_near_duplicates(monkeypatch):
    monkeypatch.setattr("qie_nb.tiny.photos.photos", originals)
    images = crops(30, (192, 128), seed=3) + crops(18, (192, 128), seed=4, split="more")
    base = as_looks(images)
    close = list(alike(base))
    assert len(close) <= 12, "of 1,128 pairs"
    for i, j, _ in close: assert np.abs(np.asarray(images[i], float) - np.asarray(images[j], float)).mean() < 20, "only crops of the same place are alike"
    found = lambda a, b: sum(distance(x, y) is not None for x, y in zip(a, b)) / len(images)
    changed = lambda change: as_looks([change(im) for im in images])
    assert found(base, as_looks(images, format="JPEG", quality=60)) > 0.95 and found(base, changed(lambda im: im.resize((96, 64)))) > 0.9
    assert found(*(changed(lambda im: im.crop((x, 0, x + 188, 128))) for x in (0, 4))) < 0.12, "shifted crops are different images"
    for edit in ("invert", "brighter", "duotone"): assert found(base, changed(EDITS[edit])) < 0.05, edit


def test_plain_images_are_not_duplicates():
    skies = [Image.new("RGB", (96, 64), (60, 80, 120)) for _ in range(4)]
    for n, sky in enumerate(skies): sky.paste((255, 255, 255), (10 + 20 * n, 20, 14 + 20 * n, 40))
    looks = as_looks(skies)
    assert all((int(a["hash"], 16) ^ int(b["hash"], 16)).bit_count() <= 20 for a in looks for b in looks), "few bits differ"
    assert list(alike(looks)) == [] and len(list(alike(looks[:1] * 2))) == 1


def test_blocked_search_finds_the_same():
    looks = as_looks(crops(9, (96, 64), seed=1)) * 3
    assert list(alike(looks, block=4)) == list(alike(looks, block=100)) and len(list(alike(looks, 4))) >= 27


# --- thousands of samples

@pytest.fixture
def many(tmp_path):
    "1,000 samples on ten pairs of real files, and a cache with an identity and no entries."
    root = make_pairs(tmp_path/"set", "duotone", 10)
    base = dataset(root).samples
    EmbeddingCacheManager(tmp_path/"cache").add_identity(EditModel(str(tiny_folder("2511"))).identity())
    samples = [Sample(f"{i:05}", base[i % 10].target, base[i % 10].controls, f"caption {i}") for i in range(1000)]
    return ImageDataset(dict(dataset_path=str(root), image_size=[64, 64], cache_dir=str(tmp_path/"cache")), samples=samples)


def test_browsing_reads_only_displayed_images(many, monkeypatch):
    opens, view = [], sample_viewer(many)
    for owner in (Path, builtins): on_call(monkeypatch, owner, "open", lambda path, *a, **kw: opens.append(Path(str(path))))
    for owner, name in ((ImageDataset, "incomplete"), (ImageDataset, "status"), (SampleViewer, "scan")): monkeypatch.setattr(owner, name, None) # not called

    def opens_of(work):
        opens.clear()
        work()
        return {p.stem for p in opens if p.suffix == ".png"}
    assert opens_of(lambda: view.box) == {"0000"}
    c = view.controls
    assert opens_of(c.on.click) == {"0001"} and len(opens) < 20
    assert opens_of(lambda: setattr(c.slider, "value", 728)) == {"0007"} and view.data()["id"] == "00727"
    assert opens_of(lambda: setattr(c.goto, "value", "00003")) == {"0003"} and len(opens_of(view.html)) == 4


@pytest.mark.slow
def test_missing_filter_lists_the_cache_once(many):
    view, c = opened(sample_viewer(many))
    with patch.object(FolderStore, "has", return_value=False) as asked, patch.object(FolderStore, "entries", autospec=True, side_effect=FolderStore.entries) as listed:
        c.filter.value = "missing"
    assert view.filters()["missing"] == 1000 and asked.call_count < 20 and listed.call_count < 20


@pytest.mark.slow
def test_browsing_releases_memory(many):
    import ipywidgets
    alive, sizes = [], []
    registry = lambda: len(ipywidgets.Widget.widgets if ipywidgets.__version__ < "8" else ipywidgets.widgets.widget._instances)

    def counted(source, *a):
        alive.append(weakref.ref(im := open_image(source, *a)))
        return im
    (view, c), n = opened(sample_viewer(many)), registry()
    with patch(f"{PAGE}.open_image", counted):
        for i in range(1, 300, 3):
            c.slider.value = i
            sizes.append(sum(len(w.value) for w in widgets_in(view.box) if isinstance(getattr(w, "value", None), str)))
    gc.collect()
    assert len(alive) >= 190 and not any(r() is not None for r in alive) and registry() == n
    assert max(sizes[50:]) <= max(sizes[:50]) * 1.1 and len(view.sets) < 40 and not many._keys.keys() - set(range(300))
    assert sum(sys.getsizeof(v) for v in vars(view).values()) < 20_000


# --- cache status

@pytest.fixture
def layered(pairs, tmp_path):
    "A data set on a packed layer, a read-only folder and an empty folder."
    root = pairs(sizes=[(48, 32), (32, 48), (40, 40), (64, 32)])
    on = lambda *names: dataset(root, [str(tmp_path/d) for d in names], caption_dropout_rate=0.3)
    fill(on("one"), end=2).cache.pack(tmp_path/"packed")
    shutil.rmtree(tmp_path/"one")
    fill(on("packed", "two"), start=2, end=3)
    return on("packed", "two", "three")


def test_status_of_several_layers(layered, tmp_path):
    status = cache_status(layered)
    s = status.data()
    assert (s["samples"], s["complete"], s["quarantined"], s["problem"]) == (4, 3, 0, "")
    assert [(Path(d["folder"]).name, d["exists"], d["packed"], d["writable"], d["count"]) for d in s["layers"]] == \
        [("packed", True, True, False, 10), ("two", True, False, False, 5), ("three", False, False, True, 0)]
    assert all((k["needed"], k["present"], k["missing"]) == (4, 3, 1) and k["bytes"] > 0 for k in s["kinds"].values())
    assert [v["variant"] for v in s["models"].values()] == ["2511"] and "three does not exist yet" in s["why"] and not (tmp_path/"three").exists()
    plain = cache_status([d["folder"] for d in s["layers"]]).data()
    assert "samples" not in plain and plain["kinds"]["pixel_latent"] == {k: s["kinds"]["pixel_latent"][k] for k in ("present", "bytes")}
    for text in ("packed, only read", "only read", "not there yet", "3 complete in the cache", "prompt_prefix"): assert text in status.html(), text


def test_verify_finds_corrupt_entries_of_every_layer(layered, tmp_path):
    (status, c), seen = opened(cache_status(layered)), []
    c.message.observe(lambda ch: seen.append(ch["new"]), "value")
    with patch.object(StatusText.__init__, "__defaults__", (0,)): c.verify.click()
    assert status.data()["verified"] | dict(seconds=0) == dict(entries=15, bad=[], seconds=0) and "all 15 entries are intact" in c.table.value
    assert sum("verify" in t and "of 15" in t for t in seen) == 15 and c.message.value == "" and not c.verify.disabled
    shard, loose = next((tmp_path/"packed").glob("*.safetensors")), sorted((tmp_path/"two").rglob("pixel_latent/*/*.safetensors"))[0]
    spoil(shard)
    loose.write_bytes(loose.read_bytes()[:-9])
    c.verify.click()
    bad = status.data()["verified"]["bad"]
    assert sorted(Path(p.split(": ")[0]).name for p, _ in bad) == sorted([shard.name, loose.name])
    assert "2 of 15 entries are bad" in c.table.value and "checksum differs" in c.table.value and loose.exists(), "nothing is moved"
    loose.unlink()
    c.again.click()
    assert ">4</td>" in c.table.value


@pytest.mark.parametrize("folder, remedy", [
    ("packed", "read-only cache: precompute into a second folder"), ("two", "; precompute again")])
def test_the_remedy_for_bad_entries_can_be_followed(folder, remedy, layered, tmp_path):
    spoil(sorted((tmp_path/folder).rglob("*.safetensors"))[0])
    status = cache_status(tmp_path/folder)
    status.verify()
    assert remedy in status.html()


def test_status_of_missing_and_empty_caches(pairs, tmp_path):
    root, nowhere, empty, nothing = pairs(), tmp_path/"nowhere", tmp_path/"empty", "there is nothing to verify"
    for d in (empty, tmp_path/"broken"): d.mkdir()
    for name in ("file", "broken/manifest.json"): (tmp_path/name).write_text("{")
    for what, said, verdict in (
            (nowhere, "does not exist yet", nothing), (empty, "0 entries", nothing), (dataset(root), "no cache is set", "there is no cache to verify"),
            (dataset(root, nowhere), "does not exist yet", nothing), (dataset(root, empty), "the cache is empty", nothing),
            (tmp_path/"file", "is a file; give a folder", "is a file"), ([nowhere, empty], "which does not exist", "which does not exist"),
            (tmp_path/"broken", "is unreadable", nothing), ([], "is an empty list", "is an empty list")):
        status, c = opened(cache_status(what))
        assert said in status.html() and said in c.table.value, said
        c.verify.click()
        assert verdict in c.table.value + c.message.value, said
        assert not c.verify.disabled and (status.data()["verified"] or dict(entries=0))["entries"] == 0
    assert not nowhere.exists() and os.listdir(empty) == []


def test_failed_or_stopped_verify(layered):
    status, c = opened(cache_status(layered))
    for error, said in ((OSError(f"disk {HOSTILE}"), "OSError"), (KeyboardInterrupt(), "stopped")):
        with patch.object(EmbeddingCacheManager, "verify", side_effect=error): c.verify.click()
        assert said in c.message.value and tame(c.message.value) and "verification is incomplete" in c.table.value and not c.verify.disabled
    assert status.data()["verified"] is None


def test_status_of_quarantine_missing_images_and_two_encoders(pairs, tmp_path):
    ds = fill(dataset(pairs(), tmp_path/"cache"))
    entry = ds.keys(0)["pixel_latent"][:2]
    ds.cache.layers[-1].path(*entry).write_bytes(b"nothing")
    ds.refresh() # keys are not known yet
    ds.samples[1].target.unlink()
    assert ds.cache.load_cache(*entry) is None
    status = cache_status(ds)
    s = status.data()
    assert (s["samples"], s["complete"], s["quarantined"], len(s["bad"]), [i for i, _ in s["unreadable"]], s["problem"]) == (3, 1, 1, 1, ["0001"], "")
    assert ds.incomplete()[1] is None and "1 without a readable image" in status.html() and entry[1] in s["aside"][0][0]
    ds.cache.add_identity(ds.identity | dict(model="another", vae="other"))
    both = cache_status(dataset(ds.config.dataset_path, tmp_path/"cache")).data()
    assert len(both["models"]) == 2 and "was filled by 2 encoders" in both["why"] and both["kinds"]["control_latent"]["present"] == 3


# --- forms

def test_live_and_static_forms(pairs):
    ds = dataset(pairs(sizes=[(48, 32)] * 6))

    def live(shown): # the ids of the widgets that a live notebook displays
        with patch.multiple("qie_nb.core.display", is_interactive=lambda: True, kernel=object), patch("IPython.display.display") as display:
            shown._ipython_display_()
        assert json.dumps(shown.data(), default=str)
        return [call.args[0][VIEW]["model_id"] for call in display.call_args_list if VIEW in call.args[0]]
    both = sample_viewer(ds), cache_status(ds)
    for shown in both: assert live(shown) == [shown._page.model_id] and shown.box in shown._page.children
    assert live(pair_grid(ds)) == [], "a grid has no controls"
    both_versions = { # of ipywidgets
        "HTML", "Button", "Textarea", "IntSlider", "Text",
        "Dropdown", "Checkbox", "ToggleButton", "VBox", "HBox",
    }
    assert {type(w).__name__ for shown in both for w in widgets_in(shown.box)} <= both_versions
    static = both[0].html()
    assert static.count("<figure") == 8 and "and 2 more" in static and "pair_grid(dataset" in static
    assert len(pair_grid(ds, 2).data()["samples"]) == 2 and pair_grid(ds, 99).html().count("<figure") == 12
