"""Images and masks that people bring: read as their bytes say, marked if the model sees little of them, or refused with the reason."""
import io, json, shutil, struct, subprocess, sys, zlib
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from qie_nb.core.display import counted_reasons
from qie_nb.data.alignment_check import align_pairs, check_alignment
from qie_nb.data.dataset import ImageDataset
from qie_nb.data.images import image_format, open_image, read_image_size
from qie_nb.data.pair_checks import DARK, MASK, NEGATIVE, ONE_COLOUR, look, mask_marks, pair_warnings, read_mask
from qie_nb.data.samples import find_samples, load_mask, usable
from qie_nb.sampling.edits import as_image
from qie_nb.widgets.sample_viewer import ODD, sample_viewer
from test_images import png, refused, saved

RNG = np.random.default_rng(5)
COLOURS = RNG.integers(0, 255, (20, 30, 3), dtype=np.uint8)
PHOTO = Image.fromarray(COLOURS)
XMP = b"XML:com.adobe.xmp\0"


def png_of(*before, after=()):
    "PHOTO as PNG, with chunks before its pixels and after them; a chunk of three parts has a wrong checksum."
    def chunk(kind, data, *wrong): return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) ^ len(wrong))
    rows = b"".join(b"\0" + row.tobytes() for row in COLOURS)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 30, 20, 8, 2, 0, 0, 0)), *before, (b"IDAT", zlib.compress(rows)), *after, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*c) for c in chunks)


def jpeg_of(*segments):
    "PHOTO as JPEG, with segments (marker, data) at its beginning."
    out = io.BytesIO()
    PHOTO.save(out, "JPEG", quality=95)
    return b"\xff\xd8" + b"".join(struct.pack(">BBH", 0xff, marker, len(data) + 2) + data for marker, data in segments) + out.getvalue()[2:]


# --- metadata
@pytest.mark.parametrize("before, after", [
    ([(b"zTXt", b"workflow\0\0" + zlib.compress(b"x" * 3_000_000))], ()),
    ([], [(b"zTXt", b"workflow\0\0" + zlib.compress(b"x" * 3_000_000))]),
    ([(b"iTXt", XMP + b"\1\0\0\0" + zlib.compress(b"x" * 3_000_000))], ()),
    ([(b"zTXt", b"a%d\0\0" % n + zlib.compress(b"x" * 1_000_000)) for n in range(70)], ()),
    ([(b"iCCP", b"profile\0\0" + zlib.compress(bytes(3_000_000)))], ()),
    ([(b"iCCP", b"profile\0\7")], ()), ([(b"gAMA", b"\0")], ()), ([(b"pHYs", b"\0")], ()), ([(b"cHRM", b"\0")], ()),
    ([(b"tIME", b"\0\0\0", "wrong")], ()), ([], [(b"tEXt", b"a\0b", "wrong")]), ([(b"zTXt", b"a\0\5b")], ())],
    ids=["text", "text after the pixels", "XMP", "64 MB of text", "profile", "broken profile", "gAMA", "pHYs", "cHRM", "checksum", "checksum after", "unknown compression"])
def test_metadata_stop_no_png(before, after):
    data = png_of(*before, after=after)
    assert (np.asarray(open_image(data)) == COLOURS).all() and read_image_size(data) == (30, 20)


def test_the_orientation_survives(tmp_path):
    large = b"<x>" + b" " * 3_000_000 + b'<y tiff:Orientation="6"/>'
    for data in (png_of((b"iTXt", XMP + b"\1\0\0\0" + zlib.compress(large))), png_of((b"zTXt", b"a\0\0" + zlib.compress(bytes(3_000_000))), (b"eXIf", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"))):
        assert open_image(data).size == read_image_size(data) == (20, 30)
        assert (np.asarray(open_image(data)) == np.rot90(COLOURS, -1)).all()


@pytest.mark.parametrize("segments", [[(0xed, b"Photoshop 3.0\0" + b"8BIM\3\xed")], [(0xe0, b"JFIF\0")], [(0xe2, b"ICC_PROFILE\0")], [(0xe1, b"Exif\0\0" + bytes(65000))] * 3,
                                      [(0xe1, b"http://ns.adobe.com/xap/1.0/\0" + bytes(65000))] * 9, [(0xfe, b"x" * 65000)] * 9])
def test_metadata_stop_no_jpeg(segments):
    data = jpeg_of(*segments)
    assert (np.asarray(open_image(data)) == np.asarray(Image.open(io.BytesIO(jpeg_of())))).all() and read_image_size(data) == (30, 20)


def test_pixels_keep_their_checks():
    with pytest.raises(ValueError, match="cannot be read"): read_image_size(png_of()[:-30])
    broken = bytearray(png_of((b"tIME", b"\0\0\0", "wrong")))
    broken[broken.index(b"IDAT") + 8] ^= 255
    for f in (read_image_size, open_image):
        with pytest.raises(ValueError, match="image bytes cannot be read"): f(bytes(broken))
    bomb = png(20000, 20000, 1, 0, b"\0" * 100, (b"zTXt", b"a\0\0" + zlib.compress(bytes(3_000_000))))
    refused(bomb, "has 400 megapixels, more than the 178 that we open")
    assert PngImagePlugin.MAX_TEXT_CHUNK == 1 << 20, "Pillow's settings are the user's"


def test_broken_metadata_prints_nothing(tmp_path):
    corrupt = saved(tmp_path/"a.jpg", PHOTO, exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff")
    out = io.BytesIO()
    PHOTO.save(out, "TIFF")
    (tmp_path/"b.tif").write_bytes(out.getvalue().replace(struct.pack("<HHII", 277, 3, 1, 3), struct.pack("<HHII", 277, 3, 1, 7)))
    code = f"from qie_nb.data.images import open_image; print(open_image({str(corrupt)!r}).size)\ntry: open_image({str(tmp_path/'b.tif')!r})\nexcept ValueError: print('refused')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["(30, 20)", "refused", ""] and not done.stderr


# --- what is no image, or another one than Pillow shows
def tiff(*tags, strip=b""):
    "A small TIFF: (tag, kind, values)."
    out, data = [], b""
    start = 8 + 2 + 12 * (len(tags) + 2) + 4
    def entry(tag, kind, values):
        nonlocal data
        raw = struct.pack("<" + {3: "H", 4: "I"}[kind] * len(values), *values)
        if len(raw) > 4:
            at, data = start + len(data), data + raw
            raw = struct.pack("<I", at)
        return struct.pack("<HHI", tag, kind, len(values)) + raw.ljust(4, b"\0")
    rows = [entry(*t) for t in tags]
    rows += [entry(273, 4, (start + len(data),)), entry(279, 4, (len(strip),))]
    rows.sort(key=lambda r: struct.unpack("<H", r[:2]))
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(rows)) + b"".join(rows) + bytes(4) + data + strip


def grey_tiff(bits, kind, strip, *more, samples=1, photometric=1):
    return tiff((256, 4, (4,)), (257, 4, (4,)), (258, 3, (bits,) * samples), (259, 3, (1,)), (262, 3, (photometric,)), (277, 3, (samples,)), (278, 4, (4,)), (339, 3, (kind,) * samples), *more, strip=strip)


@pytest.mark.parametrize("data, sentence", [
    (grey_tiff(32, 3, bytes(192), samples=3, photometric=2), "is a TIFF of 32-bit float colour; save it in 8 or 16 bits, as grey, RGB or RGBA$"),
    (grey_tiff(16, 3, bytes(32)), "is a TIFF of 16-bit float grey; save it in 8 or 16 bits"),
    (grey_tiff(16, 1, bytes(96), (284, 3, (2,)), samples=3, photometric=2), "has 16-bit colours in separate planes; save it in 8 bits$"),
    (grey_tiff(8, 1, bytes(16), (50706, 3, (1, 4, 0, 0))), "is a camera's raw file; develop it and save it as PNG or JPEG$"),
    (grey_tiff(8, 1, bytes(16), (254, 4, (1,)), (330, 4, (8,))), "is a camera's raw file"),
    (b"II*\0\x10\0\0\0CR\2\0" + bytes(99), "is a camera's raw file|cannot be read"),
    (jpeg_of().replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"), "is a JPEG of 12 bits; save it in 8 bits$"),
    (jpeg_of().replace(b"\xff\xc0\0\x11\x08", b"\xff\xc1\0\x11\x0c"), "is a JPEG of 12 bits"), # extended, as scanners write it
    (jpeg_of().replace(b"\xff\xc0\0\x11\x08", b"\xff\xcf\0\x11\x0c"), "is a JPEG of 12 bits"),
    (b"\0\0\0 ftypisom" + bytes(99), "is a video; save one frame of it"), (b"\x1aE\xdf\xa3" + bytes(99), "is a video"), (b"RIFF\0\0\0\0AVI LIST" + bytes(99), "is a .*video"),
    (b"\0\0\0\x18ftypcrx " + bytes(99), "is a camera's raw file"), (b"FUJIFILMCCD-RAW 0201", "is a camera's raw file"),
    (b"8BPS\0\1" + bytes(99), "is a Photoshop image; save it as PNG or JPEG$"), (b"%PDF-1.7\n" + bytes(99), "is a PDF; save it as PNG"),
    (b"v/1\1" + bytes(99), "is an OpenEXR image; save it"), (b"#?RADIANCE\nFORMAT", "is a Radiance HDR image"), (b"PF\n4 4\n-1\n" + bytes(192), "PFM image of 32-bit float colour"),
    (b"PK\3\4" + bytes(99), "is a ZIP archive; unpack it, or save"), (b"Rar!\x1a\7" + bytes(99), "is a RAR archive; unpack it"),
    (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer; run `git lfs pull`$"), (b"\n<!DOCTYPE html><title>Log in", "is a web page; download the image again"),
    (b"<?xml version='1.0'?>\n<svg xmlns='a'/>", "is in SVG format; save it as PNG"), (b"https://example.org/a.png\n", "is text with an address; download the image$"),
    (b"data:image/png;base64,iVBORw0KGgo", "is an image written as text"), (b'{"error": "rate limit"}', "it is text that begins '{\"error"), ("не найдено".encode(), "it is text that begins 'не найдено'"),
    (bytes(5000), "holds only zeros, as after a failed copy; copy it again"), (b"\0\5\x16\7" + bytes(99), "is a side file of macOS"),
    (jpeg_of()[:60], "cannot be read \\(JPEG, damaged or cut off\\); replace it or remove the pair$"), (png_of()[:20], "cannot be read"), (b"", "it is empty"), (b"\x93NUMPY\1\0", "is a NumPy array")])
def test_each_file_is_named_by_its_bytes(data, sentence, tmp_path):
    (tmp_path/"a.png").write_bytes(data)
    refused(tmp_path/"a.png", sentence)


def test_16_bit_grey_in_which_zero_is_white():
    ramp = np.linspace(0, 65535, 16).astype("<u2").reshape(4, 4)
    got = {k: np.asarray(open_image(grey_tiff(16, 1, ramp.tobytes(), photometric=k)))[..., 0] for k in (0, 1)}
    assert got[1][0, 0] == 0 and got[1][-1, -1] == 255 and (got[0] == 255 - got[1]).all()


@pytest.mark.parametrize("kind, name", [("JPEG", "a.png"), ("PNG", "a.jpg"), ("WEBP", "a.tif"), ("GIF", "a.bmp"), ("BMP", "a.webp"), ("TIFF", "a.gif")])
def test_a_wrong_suffix_changes_nothing(kind, name, tmp_path):
    path = saved(tmp_path/name, PHOTO, format=kind)
    assert open_image(path).size == read_image_size(path) == (30, 20) and image_format(path.read_bytes()[:64]) == ("WebP" if kind == "WEBP" else kind)


# --- names
def encoded(kind="JPEG"):
    out = io.BytesIO()
    PHOTO.save(out, kind)
    return out.getvalue()


def pairs_named(root, names, kind="JPEG"):
    for d in ("before", "after"):
        (root/d).mkdir()
        for name in names: (root/d/name).write_bytes(encoded(kind))
    return root


def test_names_of_browsers_and_image_servers_are_used(tmp_path):
    names = ["0.jpg", "1.jpe", "2.jpg_large", "3.jpg!d", "4.jpg?width=600", "5.jpeg:orig", "6.JPG@w=90.webp?x", "7.png&size=l"]
    found = find_samples(pairs_named(tmp_path, names), prompt="x")
    assert [s.target.name for s in found] == names and [s.id for s in found] == list("01234567") and not found.notes
    assert len(usable(found)[0]) == 8


def test_images_without_an_images_suffix_are_counted(tmp_path):
    found = find_samples(pairs_named(tmp_path, ["0.jpg", *map(str, range(1, 8)), "8.dat"]), prompt="x")
    assert [s.id for s in found] == ["0"]
    assert [n for n in found.notes if "under another name" in n] == ["not used: '1', '2', '3' and 5 more (JPEG under another name; rename it to end in .jpg)"]
    assert dict(found.ignored)["after/8.dat"] == "JPEG under another name; rename it to end in .jpg"


def test_a_png_that_ends_as_a_text_is_named(tmp_path):
    pairs_named(tmp_path, ["0.png"], "PNG")
    for d in ("before", "after"): shutil.copy(tmp_path/d/"0.png", tmp_path/d/"1.png.txt")
    found = find_samples(tmp_path, prompt="x")
    assert "not used: '1.png.txt' (PNG under another name; rename it to end in .png)" in found.notes


def test_a_folder_of_images_without_suffixes_says_what_to_do(tmp_path):
    pairs_named(tmp_path, ["0", "1"])
    with pytest.raises(ValueError, match="Rename the images, e.g. 0 .JPEG under another name; rename it to end in .jpg"): find_samples(tmp_path, prompt="x")


def test_a_backup_beside_its_image_is_no_second_sample(tmp_path):
    found = find_samples(pairs_named(tmp_path, ["0.jpg", "0.jpg_original", "0.jpg~", "0.jpg.bak"]), prompt="x")
    assert [s.target.name for s in found] == ["0.jpg"] and dict(found.ignored)["after/0.jpg_original"] == "0.jpg is used"


# --- values
def values_of(path): return dict(pair_warnings(SimpleNamespace(target="t", controls=("c",), prompt="x", id="x"), (look(path), look(path))))


@pytest.mark.parametrize("values, mark, reason", [
    (np.arange(600).reshape(20, 30) % 60, DARK, "has values 0 to 59 of 65535 for white, so it is nearly black; multiply them by 1110 or less, by the same number in all images"),
    (np.arange(600).reshape(20, 30) % 60 * 60, DARK, "has values 0 to 3540 of 65535 for white, so it is nearly black; multiply them by 18 or less"),
    (np.arange(600).reshape(20, 30) * 27, DARK, "has values 0 to 16173 of 65535 for white, so it is dark; multiply them by 4"),
    (np.arange(600).reshape(20, 30) * 100, None, ""), (np.zeros((20, 30), int), ONE_COLOUR, "is black everywhere"), (np.full((20, 30), 65535), ONE_COLOUR, "is white everywhere")])
def test_small_numbers_in_16_bits_are_marked(values, mark, reason, tmp_path):
    path = saved(tmp_path/"a.png", Image.fromarray(values.astype(np.uint16)))
    marks = values_of(path)
    assert {k for k in marks if k in (DARK, ONE_COLOUR)} == ({mark} if mark else set()) and reason in marks.get(mark, "")


def test_other_kinds_of_small_numbers(tmp_path):
    assert "values 0 to 12 of 255" in values_of(saved(tmp_path/"labels.png", Image.fromarray((np.arange(600).reshape(20, 30) % 13).astype(np.uint8))))[DARK]
    assert "values 0 to 236 of 65535" in values_of(saved(tmp_path/"int.tif", Image.fromarray((np.arange(600).reshape(20, 30) % 237).astype(np.int32))))[DARK]
    assert "values 0 to 10 of 255" in values_of(saved(tmp_path/"metres.tif", Image.fromarray(np.linspace(0, 10, 600, dtype=np.float32).reshape(20, 30))))[DARK]
    assert "has values from -1; those below 0" in values_of(saved(tmp_path/"normals.tif", Image.fromarray(np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30))))[NEGATIVE]
    (tmp_path/"deep.png").write_bytes(png(30, 20, 16, 2, (b"\0" + np.full(90, 59, ">u2").tobytes()) * 20))
    assert "of 65535 for white, so it is nearly black" in values_of(tmp_path/"deep.png")[DARK]
    assert "is transparent everywhere, so it is read as white" in values_of(saved(tmp_path/"clear.png", Image.new("RGBA", (30, 20), (9, 9, 9, 0))))[ONE_COLOUR]
    assert "is the colour (200, 30, 30) everywhere" in values_of(saved(tmp_path/"red.png", Image.new("RGB", (30, 20), (200, 30, 30))))[ONE_COLOUR]


def test_reading_stretches_no_image(tmp_path):
    small, large = (saved(tmp_path/f"{top}.png", Image.fromarray(np.array([[0, 2570, top]], np.uint16))) for top in (3540, 65535))
    assert [np.asarray(open_image(p))[0, 1, 0] for p in (small, large)] == [10, 10]


# --- masks
STROKE = np.zeros((32, 48), np.uint8); STROKE[8:20, 10:30] = 255
WANT = STROKE > 0


def layered(colour, under=(0, 0, 0)):
    out = np.zeros((32, 48, 4), np.uint8)
    out[..., :3], out[WANT, :3], out[..., 3] = under, colour, STROKE
    return Image.fromarray(out)


def palette(*colours, transparent=None):
    im = Image.fromarray(WANT.astype(np.uint8)).convert("P")
    im.putpalette([v for c in colours for v in c])
    if transparent is not None: im.info["transparency"] = transparent
    return im


WHITE, BLACK = (255, 255, 255), (0, 0, 0)
GREY = Image.fromarray(STROKE)
RIGHT = {
    "grey": GREY, "1 bit": GREY.convert("1"), "RGB": GREY.convert("RGB"), "opaque RGBA": GREY.convert("RGBA"), "16 bits": Image.fromarray(WANT.astype(np.uint16) * 65535), "float": Image.fromarray(WANT.astype(np.float32)),
    "white on a layer": layered(WHITE), "white on a white layer": layered(WHITE, WHITE), "black on a layer": layered(BLACK), "red on a layer": layered((255, 0, 0)), "grey and alpha": layered(WHITE).convert("LA"),
    "red on black": Image.fromarray(np.stack([STROKE, 0 * STROKE, 0 * STROKE], -1)), "palette": palette(BLACK, WHITE), "palette of VOC": palette(BLACK, (128, 0, 0)), "green palette": palette(BLACK, (0, 255, 0)),
    "palette with a transparent index": palette(BLACK, WHITE, transparent=0), "colour under constant alpha": Image.merge("RGBA", [GREY] * 3 + [Image.new("L", GREY.size, 0)]), "half alpha": Image.merge("RGBA", [GREY] * 3 + [Image.new("L", GREY.size, 128)])}


@pytest.mark.parametrize("name", RIGHT)
def test_masks_are_read_right(name, tmp_path):
    path = saved(tmp_path/("a.tif" if name == "float" else "a.png"), RIGHT[name])
    got = np.asarray(read_mask(path).image)
    assert (got[WANT] >= 254).all() and not got[~WANT].any()
    weights = load_mask(path, (48, 32))
    assert weights.max() == 255 and weights.min() == 0
    odd = [why for m, why in mask_marks(path)]
    assert any("layer" in name and "its transparency" in why for why in odd) == ("layer" in name)


@pytest.mark.parametrize("values, sentence", [
    (WANT.astype(np.uint8), r"mask '.*a.png' has values 0 and 1 of 255, so it is black; multiply them by 255, so that what counts is white, or remove it$"),
    (WANT.astype(np.uint8) * 12, "has values 0 and 12 of 255, so it is black; multiply them by 21"), (np.arange(32 * 48, dtype=np.uint16).reshape(32, 48) % 3, "has values 0 to 2 of 65535"),
    (WANT.astype(np.uint16) * 255, "has values 0 and 255 of 65535, so it is black; multiply them by 257"), (WANT.astype(np.uint16), "has values 0 and 1 of 65535"),
    (np.full((32, 48), 2, np.uint8), "has the value 2 everywhere, of 255 for white; paint what counts white"), (np.full((32, 48), 128, np.uint8), "has the value 128 everywhere"),
    (np.zeros((32, 48), np.uint8), "is black everywhere; paint what counts white, or remove it"), (np.zeros((32, 48), np.uint16), "is black everywhere")])
def test_masks_that_mean_something_else_are_refused(values, sentence, tmp_path):
    path = saved(tmp_path/"a.png", Image.fromarray(values))
    for read in (read_mask, lambda p: load_mask(p, (48, 32))):
        with pytest.raises(ValueError, match=sentence) as e: read(path)
        assert "\n" not in str(e.value) and str(e.value).startswith("mask ")
    assert [m for m, _ in mask_marks(path)] == [MASK]


def test_a_jpeg_mask_of_one_dark_value_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has the value 2 everywhere"): load_mask(saved(tmp_path/"a.jpg", Image.new("L", (48, 32), 2)), (48, 32))
    assert load_mask(saved(tmp_path/"b.jpg", Image.new("L", (48, 32), 255)), (48, 32)).min() >= 250


def test_odd_masks_are_marked(tmp_path):
    def marks(im, looks=()): return " | ".join(why for _, why in mask_marks(saved(tmp_path/f"{len(list(tmp_path.iterdir()))}.png", im), looks))
    assert marks(GREY) == ""
    assert "is white everywhere, so it changes nothing" in marks(Image.new("L", (48, 32), 255))
    assert "largest value is 100 of 255" in marks(GREY.point(lambda v: v * 100 // 255))
    both = Image.merge("RGBA", [GREY.rotate(180)] * 3 + [GREY])
    assert "its colours, on white where it is transparent" in marks(both) or "its transparency" in marks(both)
    before = Image.fromarray(RNG.integers(90, 160, (32, 48, 3), dtype=np.uint8))
    after = before.copy(); after.paste((0, 0, 255), (0, 0, 24, 32))
    looks = [look(saved(tmp_path/name, im)) for name, im in (("after.png", after), ("before.png", before))]
    half = np.zeros((32, 48), np.uint8); half[:, 24:] = 255
    assert "painted the wrong way round?" in marks(Image.fromarray(half), looks) and marks(Image.fromarray(255 - half), looks) == ""


# --- the same facts at every door
@pytest.fixture
def odd_set(pairs):
    root = pairs(((48, 32),) * 6)
    (root/"masks").mkdir()
    Image.fromarray((np.arange(32 * 48).reshape(32, 48) % 60).astype(np.uint16)).save(root/"control_images"/"0001.png")
    Image.new("RGB", (48, 32), "white").save(root/"training_images"/"0002.png")
    layered(WHITE).save(root/"masks"/"0003.png")
    Image.fromarray(WANT.astype(np.uint8)).save(root/"masks"/"0004.png")
    return root


def test_check_names_odd_images_and_masks(odd_set, capsys):
    report = check_alignment(odd_set)
    assert set(report.marks) >= {"0001", "0002", "0003", "0004"} and report.data()["marks"] == report.marks
    text = str(report)
    assert "small values: 1 of 6 pairs ('0001'), e.g. the control has values 0 to 59 of 65535" in text and "one colour: 1 of 6 pairs ('0002'), e.g. the target is white everywhere" in text
    assert "mask: 2 of 6 pairs ('0003', '0004'), e.g. the mask is read from its transparency" in text
    assert "small values" in report._repr_html_()
    json.dumps(report.data())


def test_check_command(odd_set, capsys):
    from qie_nb.cli import main
    main(["check", str(odd_set)])
    assert "small values: 1 of 6 pairs" in capsys.readouterr().out


def test_viewer_marks_odd_images_and_masks(odd_set):
    view = sample_viewer(ImageDataset(dict(dataset_path=str(odd_set), image_size=[64, 64])))
    view.select("contents")
    assert [view.dataset.samples[i].id for i in view.chosen] == ["0001", "0002", "0003", "0004"]
    assert "has values 0 to 59 of 65535" in view.page() and f"{ODD} (4)" in dict(view.options())


def test_doctor_names_odd_images(odd_set):
    from qie_nb.planning.doctor import data_findings
    from qie_nb.config import make_config
    found = {f.value.split(":")[0]: f for f in data_findings(make_config(dict(data=dict(dataset_path=str(odd_set), prompt="x")))) if f.what == "images"}
    assert set(found) == {DARK, ONE_COLOUR, MASK} and all(f.level == "warning" for f in found.values())


def test_a_run_says_it_before_it_starts(odd_set, capsys):
    dataset = ImageDataset(dict(dataset_path=str(odd_set), image_size=[64, 64]))
    capsys.readouterr()
    dataset.drop_unreadable()
    said = capsys.readouterr().out
    assert "look at these pairs with sample_viewer: " in said and "small values: 1 of 6 pairs ('0001')" in said
    assert "0004: mask " in said and "has values 0 and 1 of 255" in said and [s.id for s in dataset.samples] == ["0000", "0001", "0002", "0003", "0005"]


def test_a_prediction_says_it(odd_set, capsys):
    assert as_image(odd_set/"control_images"/"0001.png").getextrema()[0] == (0, 0)
    assert capsys.readouterr().out.startswith("the image has values 0 to 59 of 65535 for white, so it is nearly black; multiply them by 1110")
    as_image(Image.new("RGB", (48, 32), "white"))
    assert not capsys.readouterr().out


def test_aligned_copies_read_masks_alike(odd_set, tmp_path):
    align_pairs(odd_set, tmp_path/"out")
    assert np.asarray(read_mask(tmp_path/"out"/"masks"/"0003.png").image)[WANT].min() == 255


def test_marks_escape_what_a_file_says(pairs, tmp_path):
    root = pairs(((48, 32),) * 2)
    (root/"masks").mkdir()
    (root/"masks"/"0000.png").write_text("<script>alert(1)</script>" + "x" * 90)
    report = check_alignment(root)
    assert "<script>" not in report._repr_html_() and "it is text that begins" in report._repr_html_()


# --- counting
def test_nine_broken_images_are_one_sentence(pairs, capsys):
    root = pairs(((48, 32),) * 12)
    for n in range(9): (root/"control_images"/f"{n:04}.png").write_bytes(b"no image")
    (root/"control_images"/"0009.png").write_bytes(b"")
    dataset = ImageDataset(dict(dataset_path=str(root), image_size=[64, 64]))
    rows = dataset.skipped_text().splitlines()
    assert len(rows) == 3 and "9 alike (0000, 0001, 0002, ...), the first: image " in rows[1] and rows[2].startswith("  0009: image ")
    with pytest.raises(ValueError, match=r"10 of 12 cannot be used; 9 alike \(0000, 0001, 0002, ...\), the first: image .*; 0009: image") as e: usable(find_samples(root), strict=True)
    assert "\n" not in str(e.value)
    lines = str(check_alignment(root)).splitlines()
    assert sum("cannot be read (" in line for line in lines[1:]) == 2
    from qie_nb.encoding.precompute import Report
    assert str(Report(skipped=dataset.skipped)).count("skipped 9 alike") == 1


def test_reasons_of_one_kind_differ_only_in_their_names():
    assert counted_reasons([]) == [] and len(counted_reasons([(str(n), f"reason {chr(97 + n)}") for n in range(9)])) == 6
    assert counted_reasons([("a", "image '/x/a.png' is 9x999, more than"), ("b", "image \"/x/b's.png\" is 1x99, more than")]) == ["2 alike (a, b), the first: image '/x/a.png' is 9x999, more than"]
