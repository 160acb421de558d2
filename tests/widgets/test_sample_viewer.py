"""The sample viewer and the cache status: data, static and live forms, escaping, filters, warnings and memory."""
import base64, gc, io, json, os, re, shutil, sys, weakref
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from qie_nb.cache import EmbeddingCacheManager
from qie_nb.data.dataset import ImageDataset, loader
from qie_nb.core.cache_layers import FolderStore
from qie_nb.models.components import Components, prompt_text
from qie_nb.data.pair_checks import AGAIN, SWAPPED, UNCHANGED, alike, distance, look
from qie_nb.tiny.photos import EDITS, crops, make_pairs
from qie_nb.data.samples import Sample
from qie_nb.core.display import VIEW
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.widgets.cache_status import cache_status
from qie_nb.widgets.sample_info import sample_info
from qie_nb.widgets.sample_viewer import SampleViewer, pair_grid, sample_html, sample_viewer

HOSTILE = "<img src=x onerror=alert(1)>"

_sample_info, _sample_viewer, _cache_status = (import_module(f"qie_nb.widgets.{m}") for m in ("sample_info", "sample_viewer", "cache_status")) # functions of these names hide the modules


def dataset(root, cache=None, **kw):
    cache = dict(cache_dir=cache if isinstance(cache, list) else str(cache)) if cache else {}
    return ImageDataset(dict(dataset_path=str(root), image_size=[64, 64], **cache, **kw))


def fill(ds, model=None, start=0, end=None):
    from qie_nb.encoding.encoder import Encoder
    from qie_nb.encoding.precompute import precompute
    parts = Components(str(model or tiny_folder("2511")))
    precompute(ds, Encoder(parts, ds.cache), start, end)
    return parts


def opened(view):
    view.box
    return view.controls


def widgets_in(box): return [box, *(w for child in getattr(box, "children", ()) for w in widgets_in(child))]


def texts_of(box):
    "(texts that are rendered as HTML, texts that must hold nothing of the data)"
    html, plain = [], []
    for w in widgets_in(box):
        if type(w).__name__ == "HTML": html.append(w.value)
        plain += [str(getattr(w, name, "")) for name in ("description", "placeholder", "tooltip", "options", "_options_labels")]
    return html, plain


def tame(page): return "<img src=x" not in page and "<script" not in page.lower() and "onerror=alert(1)>" not in page


# --- escaping

def hostile_set(tmp_path):
    "Sample ids, captions, folder and model names that contain a tag; pairs 2 and 3 repeat 0 and 1."
    root = tmp_path/f"set {HOSTILE}"
    for d in ("training_images", "control_images"): (root/d).mkdir(parents=True)
    for i, im in enumerate(crops(2, (96, 64), seed=5)):
        for n in (i, i + 2):
            im.save(root/"control_images"/f"{n} {HOSTILE}.png")
            EDITS["duotone"](im).save(root/"training_images"/f"{n} {HOSTILE}.png")
            (root/"training_images"/f"{n} {HOSTILE}.txt").write_text(f"{HOSTILE} {i}")
    ds = dataset(root, tmp_path/f"cache {HOSTILE}", caption_dropout_rate=0.5)
    who = fill(ds).identity()
    (tmp_path/f"cache {HOSTILE}"/"manifest.json").write_text(json.dumps(dict(version=1, identities=dict(a=who | dict(model=HOSTILE)))))
    ds.refresh()
    return ds


def test_viewer_escapes_everything(tmp_path):
    ds = hostile_set(tmp_path)
    view = sample_viewer(ds, str(tiny_folder("2511")), whole=True)
    c, pages = opened(view), [pair_grid(ds).html(), view.html(), *(sample_html(ds, i) for i in range(4))]
    assert any("is dropped; text for the model" in p for p in pages)
    (tmp_path/f"set {HOSTILE}"/"training_images"/f"3 {HOSTILE}.png").write_bytes(b"broken")
    seen = lambda: pages.extend((c.page.value, c.message.value))
    for name in list(view.filters()):
        c.filter.value = name
        for i in range(1, c.slider.max + 1): c.slider.value = i; seen()
    c.filter.value = "all"
    for text in (HOSTILE, f"nowhere {HOSTILE}"): c.goto.value = text; seen()
    assert "no id contains" in pages[-1] and view.filters()["near"] == 2 and view.filters()["bad"] == 1
    assert all(tame(p) for p in pages) and sum("&lt;img src=x" in p for p in pages) > 10
    html, plain = texts_of(view.box)
    assert all(map(tame, html)) and not any("onerror" in t for t in plain)


def test_status_escapes_everything(tmp_path):
    ds = hostile_set(tmp_path)
    cache = ds.cache
    path = next(Path(cache.cache_dir, "pixel_latent").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    cache.quarantine(cache.layers[-1], "pixel_latent", path.stem, f"is {HOSTILE}")
    (tmp_path/f"set {HOSTILE}"/"training_images"/f"3 {HOSTILE}.png").unlink()
    for what in (ds, cache, str(cache.cache_dir), tmp_path/f"gone {HOSTILE}", [tmp_path/f"gone {HOSTILE}", tmp_path/"b"]):
        status = cache_status(what)
        opened(status).verify.click()
        html, plain = texts_of(status.box)
        assert all(map(tame, [*html, status.html(), status.page(status.data())])) and not any("onerror" in t for t in plain)
        assert "&lt;img src=x" in html[0]
    assert tame(ds._repr_html_()) and tame(cache._repr_html_())


# --- sample_info

@pytest.mark.parametrize("variant, controls", [("v1", 1), ("2511", 2)])
def test_tokens_agree_with_encoded_tensors(variant, controls, pairs, tmp_path):
    ds = dataset(pairs(controls=controls), tmp_path/"cache", caption_dropout_rate=0.5)
    parts = Components(str(tiny_folder(variant)))
    before = [sample_info(ds, i, parts, whole=True) for i in range(3)]
    fill(ds, tiny_folder(variant))
    for i, b in enumerate(before):
        f, tensors = sample_info(ds, i), ds[i]
        latents = [tensors["pixel_latent"], *(tensors["control_latent"] if controls > 1 else [tensors["control_latent"]])]
        tokens = [t.shape[-1] * t.shape[-2] // 4 for t in latents]
        assert [f["tokens"]["target"], *f["tokens"]["controls"]] == tokens and f["tokens"]["embedding"] == len(tensors["prompt_embed"])
        assert f["tokens"]["sequence"] == sum(tokens) + len(tensors["prompt_embed"]) and f["cached"] and not f["missing"]
        assert b["tokens"] == f["tokens"] | dict(counted_by="tokenizer") and f["tokens"]["counted_by"] == "cache" and b["missing"] == ["everything"]
        assert b["text"] == prompt_text(parts.variant, "" if ds.dropped(i) else "invert the colours", controls)
        assert f["text"] in b["text"] and f["variant"] == variant and f["dropped"] == ds.dropped(i)


def test_impossible_caption_is_a_problem(pairs):
    ds = dataset(pairs(caption="a <|image_pad|> here"))
    f = sample_info(ds, 0, str(tiny_folder("2511")), whole=True)
    assert "must not contain the token" in f["problems"][0] and f["tokens"]["target"] == 16 and f["tokens"]["text"] is None
    assert "must not contain" in sample_html(ds, 0, facts=f)


@pytest.mark.slow
def test_no_heavy_imports_without_a_model(pairs):
    import subprocess
    root = pairs()
    code = ("import sys; from qie_nb.widgets.sample_viewer import sample_viewer; v = sample_viewer({'dataset_path': sys.argv[1]}); v.box; v.html(); d = v.data(); "
            "assert d['text'] == 'invert the colours' and d['variant'] is None; print([m for m in ('diffusers', 'transformers', 'matplotlib') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1] == "[]"
    code = "import sys, qie_nb.widgets.cache_status; print('ipywidgets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_types_of_model_and_data_set(trained_run):
    trainer, root = trained_run.trainer, trained_run.root
    assert {sample_viewer(d, m).data()["variant"] for d in (root, loader(root), dict(dataset_path=str(root))) for m in (trainer, trainer.components, tiny_folder("2511"))} == {"2511"}
    with pytest.raises(ValueError, match="`model` must be a trainer"): sample_viewer(root, 3)


# --- browsing

def test_clicks(pairs):
    view = sample_viewer(dataset(pairs(sizes=[(48, 32)] * 5, caption=[f"caption {i}" for i in range(5)])))
    c = opened(view)
    shown = lambda: (view.data()["id"], c.slider.value, f"caption {view.index}" in c.page.value, f"({view.index + 1} of 5)" in c.page.value)
    assert shown() == ("0000", 1, True, True) and (c.back.disabled, c.on.disabled) == (True, False)
    c.on.click(); c.on.click()
    assert shown() == ("0002", 3, True, True)
    c.back.click()
    assert shown() == ("0001", 2, True, True) and not c.back.disabled
    c.slider.value = 5
    assert shown() == ("0004", 5, True, True) and c.on.disabled
    c.on.click()
    assert shown()[0] == "0004"
    c.goto.value = " 0003 "
    assert shown() == ("0003", 4, True, True) and c.goto.value == ""
    for expected in ("0004", "0000", "0001"): c.goto.value = "00"; assert view.data()["id"] == expected
    c.goto.value = "elsewhere"
    assert "no id contains" in c.message.value and shown()[0] == "0001"
    c.on.click()
    assert c.message.value == ""


def test_exact_id_wins(pairs):
    s = dataset(pairs()).samples[0]
    view = SampleViewer(ImageDataset(dict(dataset_path=".", image_size=[64, 64]), samples=[Sample(i, s.target, s.controls, s.prompt) for i in ("a", "ab", "b")]))
    for name in ("b", "a"): assert view.find(name) and view.data()["id"] == name


def test_filters(tmp_path):
    root = make_pairs(tmp_path/"set", "duotone", 6)
    ds = dataset(root, tmp_path/"cache")
    fill(ds, end=4)
    for what in ("training_images", "control_images"): shutil.copy(root/what/"0001.png", root/what/"0005.png")
    (root/"control_images"/"0002.png").write_bytes(b"broken")
    (root/"training_images"/"0003.png").unlink()
    path = Path(ds.cache.layers[-1].path(*ds.keys(0)["pixel_latent"].id))
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    view = sample_viewer(ds)
    c, names = opened(view), ("missing", "bad", "near", "swapped", "unchanged")
    assert [k for k, v in view.filters().items() if v is None] == list(names)
    chosen = {}
    for name in names:
        c.filter.value = name
        chosen[name] = [ds.samples[i].id for i in view.chosen]
        n = len(chosen[name])
        assert (c.slider.max, c.slider.disabled, c.filter.value, view.filter, view.filters()[name]) == (max(1, n), not n, name, name, n)
        assert f"({n})" in dict((k, label) for label, k in c.filter.options)[name]
    # the entries of 0003 are good, its image is missing
    assert chosen == dict(missing=["0002", "0004"], bad=["0000", "0002", "0003"], near=["0001", "0005"], swapped=[], unchanged=[])
    assert "no sample" in c.page.value and view.data()["id"] is None
    c.filter.value = "bad"
    assert "pixel_latent is bad: checksum differs" in c.page.value
    for why in ("not an image or broken", "it does not exist"):
        c.on.click()
        assert f"cannot be read ({why})" in c.page.value
    assert c.on.disabled and path.is_file(), "nothing is quarantined"
    c.filter.value = "near"
    assert view.data()["near"] == [dict(id="0005", what=AGAIN)] and AGAIN in c.page.value


def test_bucket_filters(pairs):
    root = pairs(sizes=[(48, 32), (48, 32), (32, 48), (40, 40)])
    ds = ImageDataset(dict(dataset_path=str(root), image_size=[128, 128], control_area=64*64))
    view = sample_viewer(ds)
    names = {k: v for k, v in view.filters().items() if k.startswith("bucket")}
    assert names == {"bucket 160x96 + 64x64": 2, "bucket 96x160 + 64x64": 1, "bucket 128x128 + 64x64": 1} and next(iter(names.values())) == 2
    for name in names:
        opened(view).filter.value = name
        assert len(view.chosen) == names[name] and {"bucket " + " + ".join(f"{w}x{h}" for w, h in ds.bucket(i)) for i in view.chosen} == {name}
    assert {k: len(v) for k, v in view.buckets(most=1).items()} == {"bucket 160x96 + 64x64": 2, "other buckets": 2}
    with pytest.raises(ValueError, match="`name` must be one of all, missing"): view.select("bucket 1x1")


def test_failing_click_shows_a_message(pairs):
    view = sample_viewer(dataset(pairs()))
    c = opened(view)
    with patch.object(_sample_viewer, "near_duplicates", side_effect=RuntimeError(f"no {HOSTILE}")): c.scan.click()
    assert "RuntimeError" in c.message.value and tame(c.message.value) and not c.scan.disabled and view.filters()["near"] is None
    with patch.object(_sample_viewer, "look", side_effect=KeyboardInterrupt): c.filter.value = "near"
    assert "stopped" in c.message.value and c.filter.value == view.filter == "all"
    with patch.object(_sample_viewer, "sample_info", side_effect=RuntimeError("no facts")): c.on.click()
    assert "no facts" in c.page.value and c.slider.value == 2
    c.on.click()
    assert "(3 of 3)" in c.page.value
    c.scan.click()
    assert c.message.value.count("0 near duplicates") == 1 and view.filters()["near"] == 0


def test_samples_removed_while_browsing(pairs):
    ds = dataset(pairs(sizes=[(48, 32)] * 4))
    view = sample_viewer(ds)
    c = opened(view)
    c.scan.click(); c.slider.value = 4
    ds.drop({2: "gone", 3: "gone"})
    assert view.data()["id"] == "0001" and "(2 of 2)" in view.page()
    c.on.click()
    assert view.data()["id"] == "0001" and "(2 of 2)" in c.page.value and c.slider.max == 2


def test_empty_data_set(pairs):
    view = sample_viewer(ImageDataset(dict(dataset_path=str(pairs()), image_size=[64, 64]), samples=[]))
    c = opened(view)
    for b in (c.on, c.back, c.scan): b.click()
    assert "there are no samples" in c.page.value and "there are no samples" in view.html() and c.slider.disabled


# --- images

def test_unreadable_image_shows_a_message(pairs):
    root = pairs(sizes=[(48, 32)] * 3, controls=2)
    view = sample_viewer(dataset(root))
    c = opened(view)
    (root/"control_images"/"0001.png").write_bytes(b"broken")
    (root/"control_images_2"/"0001.png").unlink()
    c.on.click()
    assert "control 1: image" in c.page.value and "control 2: image" in c.page.value and c.page.value.count("<figure") == 1
    assert len(view.data()["problems"]) == 1 and "cannot be read" in pair_grid(view.dataset, 2).html()
    c.on.click()
    assert c.page.value.count("<figure") == 3 and view.data()["problems"] == []
    assert "control 1:" in c.page.value and "control 2:" in c.page.value


def test_exif_rotated_image_is_upright(pairs):
    root, exif = pairs(sizes=[(48, 32)]), Image.Exif()
    exif[274] = 6 # shown turned clockwise
    Image.new("RGB", (32, 48)).save(root/"training_images"/"0000.png", exif=exif)
    page = sample_html(dataset(root), 0)
    assert "target: 48x32" in page and [Image.open(io.BytesIO(base64.b64decode(d))).size for d in re.findall('base64,([^"]+)', page)] == [(48, 32)] * 2


def test_mask_is_drawn(pairs):
    root = pairs(sizes=[(96, 64)] * 3)
    (root/"mask_images").mkdir()
    for name in ("0000", "0001"): Image.fromarray(np.repeat(np.repeat(np.uint8([[0, 255]]), 48, 1), 64, 0)).save(root/"mask_images"/f"{name}.png")
    ds = dataset(root)
    assert "mask: 50 % counts" in sample_html(ds, 0) and sample_info(ds, 0)["mask"] and not sample_info(ds, 2)["mask"] and "mask" not in sample_html(ds, 2)
    Image.fromarray(np.zeros((64, 96), np.uint8)).save(root/"mask_images"/"0001.png")
    assert "is black everywhere" in sample_html(ds, 1)


@pytest.fixture(scope="module")
def trained_set(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    folder = make_pairs(root/"set", "duotone", 2, split="held_out")
    ds = ImageDataset(dict(dataset_path=str(folder), image_size=[96, 96], cache_dir=str(root/"cache")))
    return ds, fill(ds, "tiny", end=1)


def test_cached_latent_decodes_to_its_image(trained_set):
    ds, parts = trained_set
    view = sample_viewer(ds, Components("tiny"))
    c = opened(view)
    assert "decoded" not in c.page.value and not view.components.loaded, "nothing is loaded yet"
    c.decode.value = True
    assert c.page.value.count("latent decoded") == 2 and list(view.components.loaded) == ["vae"]
    for name, (picture, db) in _sample_info.decoded(ds, 0, parts).items(): assert db > 25 and picture.shape == (96, 96, 3), name
    c.on.click()
    assert "the cache has no latent" in c.page.value and c.page.value.count("<figure") == 2
    c.decode.value = False
    assert "not decoded" not in c.page.value


def test_reasons_for_not_decoding(trained_set, tmp_path, pairs):
    ds, _ = trained_set
    for viewer, why in ((sample_viewer(ds), "decoding needs a VAE"), (sample_viewer(ds, str(tiny_folder("2511"))), "filled by another VAE"),
                        (sample_viewer(dataset(pairs()), "tiny"), "no cache is set"), (sample_viewer(dataset(pairs(), tmp_path/"empty"), "tiny"), "cache is empty")):
        c = opened(viewer)
        c.decode.value = True
        assert "not decoded: " in c.page.value and why in c.page.value and "<figure" in c.page.value


# --- warnings

def as_looks(ims, tmp_path, **kw):
    out = []
    for n, im in enumerate(ims):
        path = tmp_path/f"{len(os.listdir(tmp_path))}.{kw.get('format', 'png')}"
        im.save(path, **{k: v for k, v in kw.items() if k != "format"})
        out.append(look(path))
    return out


@pytest.mark.slow
def test_near_duplicates(tmp_path):
    ims = crops(30, (192, 128), seed=3) + crops(18, (192, 128), seed=4, split="more")
    base = as_looks(ims, tmp_path)
    close = {(i, j) for i, j, _ in alike(base)}
    assert len(close) <= 12, "of 1,128 pairs"
    for i, j in close: assert np.abs(np.asarray(ims[i], float) - np.asarray(ims[j], float)).mean() < 20, "only crops of the same place are alike"
    found = lambda other, base=base: sum(distance(a, b) is not None for a, b in zip(base, other)) / len(base)
    assert found(as_looks(ims, tmp_path, format="jpg", quality=60)) > 0.95 and found(as_looks([im.resize((96, 64)) for im in ims], tmp_path)) > 0.9
    left, right = (as_looks([im.crop((x, 0, x + 188, 128)) for im in ims], tmp_path) for x in (0, 4))
    assert found(left, right) < 0.12, "shifted crops are different images"
    for edit in ("invert", "brighter", "duotone"): assert found(as_looks([EDITS[edit](im) for im in ims], tmp_path)) < 0.05, edit


def test_plain_images_are_not_duplicates(tmp_path):
    skies = []
    for x in (10, 30, 50, 70):
        skies.append(Image.new("RGB", (96, 64), (60, 80, 120)))
        skies[-1].paste((255, 255, 255), (x, 20, x + 4, 40))
    looks = as_looks(skies, tmp_path)
    assert all(sum(x != y for x, y in zip(f"{int(a['hash'], 16):0256b}", f"{int(b['hash'], 16):0256b}")) <= 20 for a in looks for b in looks), "few bits differ"
    assert list(alike(looks)) == [] and len(list(alike(as_looks([skies[0]] * 2, tmp_path)))) == 1


def test_blocked_search_finds_the_same(tmp_path):
    looks = as_looks(crops(9, (96, 64), seed=1), tmp_path) * 3
    assert list(alike(looks, block=4)) == list(alike(looks, block=100)) and len(list(alike(looks, 4))) >= 27


def test_swapped_and_unchanged_pairs(tmp_path):
    one, two = (EDITS[k](crops(1, (96, 64), seed=7)[0]) for k in ("keep", "duotone"))
    for folder, images in dict(before=(one, one, one), after=(one, two, one)).items():
        (tmp_path/folder).mkdir()
        for n, im in enumerate(images): im.save(tmp_path/folder/f"{n}.png", compress_level=n)
    samples = [Sample(str(n), tmp_path/"before"/f"{n}.png", (tmp_path/"after"/f"{n}.png",), "make it blue") for n in range(3)]
    ds = ImageDataset(dict(dataset_path=".", image_size=[64, 64]), samples=samples)
    view = sample_viewer(ds)
    c = opened(view)
    c.scan.click()
    assert (view.sets["unchanged"], view.sets["swapped"]) == ([0, 2], [1]) and "2 " + UNCHANGED in c.message.value
    c.filter.value = "swapped"
    assert [m for m, why in view.data()["marks"] if why] == [SWAPPED] and SWAPPED in c.page.value and SWAPPED in pair_grid(ds, 2).html()


# --- thousands of samples

@pytest.fixture
def many(tmp_path):
    "1,000 samples on ten pairs of real files, and a cache with an identity and no entries."
    root = make_pairs(tmp_path/"set", "duotone", 10)
    base = dataset(root).samples
    cache = EmbeddingCacheManager(tmp_path/"cache")
    cache.add_identity(dict(model="m", variant="2511", vae="v", text_encoder="t", template="e", dtype="float32", control_area=64*64, vl_area=64*64))
    samples = [Sample(f"{i:05}", base[i % 10].target, base[i % 10].controls, f"caption {i}") for i in range(1000)]
    return ImageDataset(dict(dataset_path=str(root), image_size=[64, 64], cache_dir=str(tmp_path/"cache")), samples=samples)


_opens, _hooked = [], []


@pytest.fixture
def opens():
    "Images opened since."
    if not _hooked: sys.addaudithook(lambda event, args: _opens.append(str(args[0])) if event == "open" and _hooked[-1] else None)
    _hooked.append(True)
    _opens.clear()
    yield lambda: {Path(p).stem for p in _opens if p.endswith(".png")}
    _hooked.append(False)


def test_browsing_reads_only_displayed_images(many, opens):
    opens_of = lambda work: (_opens.clear(), work(), opens())[2]
    view = sample_viewer(many)
    with patch.object(ImageDataset, "incomplete", side_effect=AssertionError), patch.object(SampleViewer, "scan", side_effect=AssertionError), \
         patch.object(ImageDataset, "status", side_effect=AssertionError):
        assert opens_of(lambda: view.box) == {"0000"}
        c = view.controls
        assert opens_of(c.on.click) == {"0001"} and len(_opens) < 20
        assert opens_of(lambda: setattr(c.slider, "value", 728)) == {"0007"} and view.data()["id"] == "00727"
        assert opens_of(lambda: setattr(c.goto, "value", "00003")) == {"0003"}
        assert len(opens_of(view.html)) == 4


def test_missing_filter_lists_the_cache_once(many):
    view = sample_viewer(many)
    c = opened(view)
    asked = []
    with patch.object(FolderStore, "has", lambda self, kind, key: asked.append(key) or False), patch.object(FolderStore, "entries", autospec=True, side_effect=FolderStore.entries) as listed:
        c.filter.value = "missing"
    assert view.filters()["missing"] == 1000 and len(asked) < 20 and listed.call_count < 20


@pytest.mark.slow
def test_browsing_releases_memory(many):
    import ipywidgets
    alive, sizes, real = [], [], _sample_viewer.open_image
    registry = lambda: len(ipywidgets.Widget.widgets if ipywidgets.__version__ < "8" else ipywidgets.widgets.widget._instances)

    def counted(source, *a):
        im = real(source, *a)
        alive.append(weakref.ref(im))
        return im
    view = sample_viewer(many)
    c = opened(view)
    n = registry()
    with patch.object(_sample_viewer, "open_image", counted):
        for i in range(1, 300, 3):
            c.slider.value = i
            sizes.append(sum(len(getattr(w, "value", "")) for w in widgets_in(view.box) if isinstance(getattr(w, "value", None), str)))
    gc.collect()
    assert len(alive) >= 190 and not any(r() is not None for r in alive) and registry() == n
    assert max(sizes[50:]) <= max(sizes[:50]) * 1.1 and len(view.sets) < 40 and not many._keys.keys() - set(range(300))
    assert sum(sys.getsizeof(v) for v in vars(view).values()) < 20_000


# --- cache status

@pytest.fixture
def layered(pairs, tmp_path):
    "A data set on a packed layer, a read-only folder and an empty folder."
    ds = dataset(pairs(sizes=[(48, 32), (32, 48), (40, 40), (64, 32)]), tmp_path/"one", caption_dropout_rate=0.3)
    fill(ds, end=2)
    ds.cache.pack(tmp_path/"packed")
    shutil.rmtree(tmp_path/"one")
    two = dataset(ds.config.dataset_path, [str(tmp_path/"packed"), str(tmp_path/"two")], caption_dropout_rate=0.3)
    fill(two, start=2, end=3)
    return dataset(ds.config.dataset_path, [str(tmp_path/d) for d in ("packed", "two", "three")], caption_dropout_rate=0.3)


def test_status_of_several_layers(layered, tmp_path):
    s = cache_status(layered).data()
    assert (s["samples"], s["complete"], s["quarantined"], s["problem"]) == (4, 3, 0, "")
    assert [(Path(d["folder"]).name, d["exists"], d["packed"], d["writable"], d["count"]) for d in s["layers"]] == \
        [("packed", True, True, False, 14), ("two", True, False, False, 7), ("three", False, False, True, 0)]
    assert all((k["needed"], k["present"], k["missing"]) == (4, 3, 1) and k["bytes"] > 0 for k in s["kinds"].values())
    assert [v["variant"] for v in s["models"].values()] == ["2511"] and "three does not exist yet" in s["why"] and not (tmp_path/"three").exists()
    plain = cache_status([d["folder"] for d in s["layers"]]).data()
    assert "samples" not in plain and plain["kinds"]["pixel_latent"] == {k: s["kinds"]["pixel_latent"][k] for k in ("present", "bytes")}
    page = cache_status(layered).html()
    for text in ("packed, only read", "only read", "not there yet", "3 complete in the cache", "prompt_prefix"): assert text in page, text


def test_verify_finds_corrupt_entries_of_every_layer(layered, tmp_path):
    status, seen = cache_status(layered), []
    c = opened(status)
    c.message.observe(lambda ch: seen.append(ch["new"]), "value")
    with patch.object(_cache_status.StatusText.__init__, "__defaults__", (0,)): c.verify.click()
    assert status.data()["verified"] | dict(seconds=0) == dict(entries=21, bad=[], seconds=0) and "all 21 entries are intact" in c.table.value
    assert sum("verify" in t and "of 21" in t for t in seen) == 21 and c.message.value == "" and not c.verify.disabled
    shard = next((tmp_path/"packed").glob("*.safetensors"))
    data = bytearray(shard.read_bytes()); data[-1] ^= 1
    shard.write_bytes(data)
    loose = sorted((tmp_path/"two").rglob("pixel_latent/*/*.safetensors"))[0]
    loose.write_bytes(loose.read_bytes()[:-9])
    c.verify.click()
    bad = status.data()["verified"]["bad"]
    assert len(bad) == 2 and {Path(p.split(": ")[0]).name for p, _ in bad} == {shard.name, loose.name}
    assert "2 of 21 entries are bad" in c.table.value and "checksum differs" in c.table.value and loose.exists(), "nothing is moved"
    loose.unlink()
    c.again.click()
    assert ">6</td>" in c.table.value


def test_status_of_missing_and_empty_caches(pairs, tmp_path):
    root, nowhere, empty, nothing = pairs(), tmp_path/"nowhere", tmp_path/"empty", "there is nothing to verify"
    (tmp_path/"file").write_text("x")
    empty.mkdir()
    (tmp_path/"broken").mkdir(); (tmp_path/"broken"/"manifest.json").write_text("{")
    for what, said, verdict in (
            (nowhere, "does not exist yet", nothing), (empty, "0 entries", nothing), (dataset(root), "no cache is set", "there is no cache to verify"),
            (dataset(root, nowhere), "does not exist yet", nothing), (dataset(root, empty), "the cache is empty", nothing),
            (tmp_path/"file", "is a file; name a folder", "is a file"), ([nowhere, empty], "which does not exist", "which does not exist"),
            (tmp_path/"broken", "is unreadable", nothing), ([], "is an empty list", "is an empty list")):
        status = cache_status(what)
        c = opened(status)
        assert said in status.html() and said in c.table.value, said
        c.verify.click()
        assert verdict in c.table.value + c.message.value, (said, c.table.value, c.message.value)
        assert not c.verify.disabled and (status.data()["verified"] or dict(entries=0))["entries"] == 0
    assert not nowhere.exists() and os.listdir(empty) == []


def test_failed_or_stopped_verify(layered):
    status = cache_status(layered)
    c = opened(status)
    for error, said in ((OSError(f"disk {HOSTILE}"), "OSError"), (KeyboardInterrupt(), "stopped")):
        with patch.object(EmbeddingCacheManager, "verify", side_effect=error): c.verify.click()
        assert said in c.message.value and tame(c.message.value) and "verification is incomplete" in c.table.value and not c.verify.disabled
    assert status.data()["verified"] is None


def test_two_identities_and_quarantine(pairs, tmp_path):
    ds = dataset(pairs(), tmp_path/"cache")
    fill(ds)
    entry = ds.keys(0)["pixel_latent"][:2]
    path = ds.cache.layers[-1].path(*entry)
    path.write_bytes(b"nothing")
    ds._whole.clear()
    assert ds.cache.load_cache(*entry) is None
    s = cache_status(ds).data()
    assert s["quarantined"] == 1 and len(s["bad"]) == 1 and s["kinds"]["pixel_latent"]["missing"] == 1 and entry[1] in s["aside"][0][0]
    ds.cache.add_identity(ds.identity | dict(model="another", vae="other"))
    both = cache_status(dataset(ds.config.dataset_path, tmp_path/"cache")).data()
    assert len(both["models"]) == 2 and "was filled by 2 encoders" in both["why"] and both["kinds"]["control_latent"]["present"] == 3


def test_status_with_a_missing_image(pairs, tmp_path):
    root = pairs()
    ds = dataset(root, tmp_path/"cache")
    fill(ds)
    ds.refresh() # keys are not known yet
    (root/"training_images"/"0001.png").unlink()
    s = cache_status(ds).data()
    assert (s["samples"], s["complete"], [i for i, _ in s["unreadable"]], s["problem"]) == (3, 2, ["0001"], "") and ds.incomplete() == {1: None}
    assert "1 without a readable image" in cache_status(ds).html()


# --- forms

def test_live_and_static_forms(pairs, tmp_path):
    ds = dataset(pairs(sizes=[(48, 32)] * 6), tmp_path/"cache")

    def displayed(shown, seen):
        out = []
        with patch("qie_nb.core.display.is_interactive", lambda: seen), patch("qie_nb.core.display.kernel", lambda: object()), patch("IPython.display.display", lambda data, **kw: out.append(data)):
            shown._ipython_display_()
        assert out[-1]["text/html"].strip() and json.dumps(shown.data(), default=str)
        return [d[VIEW]["model_id"] for d in out if VIEW in d]
    for make in (lambda: sample_viewer(ds), lambda: cache_status(ds)):
        shown = make()
        assert displayed(shown, seen=False) == [] and shown._box is None
        assert displayed(shown, seen=True) == [shown._page.model_id] and shown.box in shown._page.children
    assert displayed(pair_grid(ds), seen=True) == [], "a grid has no controls"
    static = sample_viewer(ds).html()
    assert static.count("<figure") == 8 and "and 2 more" in static and "pair_grid(dataset" in static
    assert len(pair_grid(ds, 2).data()["samples"]) == 2 and pair_grid(ds, 99).html().count("<figure") == 12


def test_controls_exist_in_both_versions_of_ipywidgets(pairs):
    names = {type(w).__name__ for shown in (sample_viewer(dataset(pairs())), cache_status("nowhere")) for w in widgets_in(shown.box)}
    assert names <= {"HTML", "Button", "IntSlider", "Text", "Dropdown", "Checkbox", "VBox", "HBox"}


