"""Damaged image files: the pixels that plain Pillow reads, or one sentence; never another error, a hang or much memory."""
import io, resource, signal, struct, warnings, zlib
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image, PngImagePlugin, features

from qie_nb.data.images import open_image, read_image_size
from qie_nb.data.pair_checks import open_with_content, read_mask

RNG = np.random.default_rng(7)
COLOURS = Image.fromarray(RNG.integers(0, 255, (4, 6, 3), dtype=np.uint8)).resize((24, 16))
STROKE = Image.new("L", (24, 16)); STROKE.paste(255, (4, 2, 15, 11))
EXIF = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"


def encoded(im, kind, **kw):
    out = io.BytesIO()
    im.save(out, kind, **kw)
    return out.getvalue()


def with_text():
    info = PngImagePlugin.PngInfo()
    info.add_text("workflow", "x" * 500, zip=True)
    info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="3"/>')
    return encoded(COLOURS, "PNG", pnginfo=info, icc_profile=b"p" * 200)


DEEP = Image.fromarray(RNG.integers(0, 65535, (16, 24)).astype(np.uint16))
FILES = {
    "PNG": encoded(COLOURS, "PNG"), "PNG with text": with_text(), "palette": encoded(COLOURS.quantize(9), "PNG", transparency=3), "16 bits": encoded(DEEP, "PNG"),
    "alpha": encoded(COLOURS.convert("RGBA").rotate(20), "PNG"), "JPEG": encoded(COLOURS, "JPEG", exif=EXIF), "CMYK": encoded(COLOURS.convert("CMYK"), "JPEG"), "progressive": encoded(COLOURS, "JPEG", progressive=True, comment=b"c" * 99),
    "WebP": encoded(COLOURS, "WEBP", exif=EXIF), "lossless WebP": encoded(COLOURS.convert("RGBA").rotate(20), "WEBP", lossless=True), "GIF": encoded(COLOURS, "GIF"), "BMP": encoded(COLOURS, "BMP"), "PPM": encoded(COLOURS, "PPM"),
    "TIFF": encoded(COLOURS, "TIFF"), "LZW": encoded(COLOURS, "TIFF", compression="tiff_lzw"), "float": encoded(Image.fromarray(np.linspace(0, 1, 384, dtype=np.float32).reshape(16, 24)), "TIFF"),
    "animation": encoded(COLOURS, "GIF", save_all=True, append_images=[COLOURS.rotate(90)])}
if features.check("avif"): FILES["AVIF"] = encoded(COLOURS, "AVIF")
MASKS = {"PNG": encoded(STROKE, "PNG"), "1 bit": encoded(STROKE.convert("1"), "PNG"), "JPEG": encoded(STROKE, "JPEG"), "GIF": encoded(STROKE, "GIF"), "BMP": encoded(STROKE, "BMP"), "TIFF": encoded(STROKE, "TIFF"), "WebP": encoded(STROKE.convert("RGB"), "WEBP", lossless=True),
         "layer": encoded(Image.merge("RGBA", [STROKE] * 4), "PNG"), "palette": encoded(STROKE.convert("P"), "PNG"), "16 bits": encoded(Image.fromarray(np.asarray(STROKE).astype(np.uint16) * 257), "PNG")}


def png_with_right_checksums(data):
    "So that a change reaches the decoder."
    out, at = data[:8], 8
    while at + 12 <= len(data):
        length = struct.unpack(">I", data[at:at + 4])[0]
        body = data[at + 4:at + 8 + length]
        out += struct.pack(">I", length) + body + struct.pack(">I", zlib.crc32(body))
        at += length + 12
    return out + data[at:]


@st.composite
def damaged(draw, files):
    "A file of `files` with some bytes changed, left out, doubled or cut off, or as it is."
    data = bytearray(files[draw(st.sampled_from(sorted(files)))])
    rng = draw(st.randoms(use_true_random=False)) # any place as likely as another
    for _ in range(draw(st.integers(0, 3))):
        at, n = rng.randrange(len(data) + 1), rng.randrange(1, 30)
        how = rng.choice("change change change zero cut leave double".split())
        if how == "change": data[at:at + 1] = bytes([rng.randrange(256)])
        if how == "zero": data[at:at + n] = bytes(len(data[at:at + n]))
        if how == "cut": del data[at:]
        if how == "leave": del data[at:at + n]
        if how == "double": data[at:at] = data[at:at + n]
    data = bytes(data)
    return png_with_right_checksums(data) if draw(st.booleans()) and data[:4] == b"\x89PNG" else data


def plain(data):
    "An image as Pillow reads it, in our colours; None if it has several frames."
    with Image.open(io.BytesIO(data)) as im:
        if getattr(im, "n_frames", 1) > 1: return None
        im.load()
        turn = im.getexif().get(0x0112, 1)
        if im.mode == "F" or im.mode.startswith("I"):
            values = np.asarray(im).astype(float)
            white = 65535 if im.mode != "F" else 1 if values.max() <= 1.5 else 255 if values.max() <= 255 else 65535
            key = im.info.get("transparency")
            if key is not None: values = np.where(values == key, white, values)
            im = Image.fromarray(np.clip(np.round(values * 255 / white), 0, 255).astype(np.uint8))
        elif im.has_transparency_data:
            im = im.convert("RGBA")
            white = Image.new("RGBA", im.size, (255, 255, 255, 255))
            white.alpha_composite(im)
            im = white
        im = im.convert("RGB")
    ways = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_90}
    return im.transpose(ways[turn]) if turn in ways else im


def without_text(data):
    "A PNG's header, palette, pixels and end."
    out, at = data[:8], 8
    while at + 12 <= len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"): out += data[at:at + length + 12]
        at += length + 12
    return out


@contextmanager
def guarded():
    "A hang ends with an error."
    def late(*_): raise AssertionError("reading takes more than a minute")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore") # a test of its own says that none is printed
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def one_sentence(e, begins):
    text = str(e)
    assert text.startswith(begins) and "\n" not in text and len(text) < 400 and "; " in text, text


def check_image(data):
    with guarded():
        sizes = []
        for read in (read_image_size, open_image, open_with_content):
            try: found = read(data)
            except ValueError as e: one_sentence(e, "image bytes ")
            else: sizes.append((read, found))
        found = dict(sizes)
        if open_image not in found: return
        got = found[open_image]
        assert got.mode == "RGB" and found[open_with_content][0].tobytes() == got.tobytes()
        if read_image_size in found: assert found[read_image_size] == got.size
        try: want = plain(data)
        except Exception: # its text is damaged; a PNG is compared without it
            if data[:4] != b"\x89PNG": return
            try: want = plain(without_text(data))
            except Exception: return
            if want.size != got.size: want = want.transpose(Image.Transpose.ROTATE_90) # turned by text that is left out
            assert sorted(want.tobytes()) == sorted(got.tobytes())
            return
        if want is None: return # Ultra HDR
        assert want.size == got.size and np.abs(np.asarray(want, int) - np.asarray(got, int)).max() <= 1


def check_mask(data):
    with guarded():
        try: got = np.asarray(read_mask(data).image)
        except ValueError as e: return one_sentence(e, "mask bytes ")
        try: want = plain(data)
        except Exception: return # its text is damaged
        with Image.open(io.BytesIO(data)) as im: simple = im.mode in ("1", "L") and not im.has_transparency_data
        if simple: assert (np.asarray(want.convert("L")) == got).all()


def fuzzed(check, files, examples, **kw):
    "Run a check on damaged files. Raises AssertionError if it needs much memory."
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    usual = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck), **kw)
    usual(given(damaged(files))(check))()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 4_000_000, "kB"


READERS = [(check_image, FILES), (check_mask, MASKS)]


@pytest.mark.parametrize("check, files", READERS)
def test_undamaged_files(check, files):
    for data in files.values(): check(data)


@pytest.mark.parametrize("check, files", READERS)
def test_damaged_files(check, files): fuzzed(check, files, 50, derandomize=True)


@pytest.mark.weekly
@pytest.mark.parametrize("check, files", READERS)
def test_two_thousand_damaged_files(check, files): fuzzed(check, files, 2000)
