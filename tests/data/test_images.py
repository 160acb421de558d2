"""Every image mode has a defined result, and an unusable image raises one sentence with its name."""
import io, os, struct, zlib
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin, features

from qie_nb.data.images import Geometry, RowImage, crop_to, open_image, read_bytes, read_image_size, source_digest
from helpers import noise_image

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 255, (20, 30, 3), dtype=np.uint8)
PHOTO, PLAIN, NOISE = Image.fromarray(COLOURS), Image.new("RGB", (30, 20), "red"), Image.fromarray(RNG.integers(0, 255, (64, 64, 3), dtype=np.uint8))


def saved(path, im, **kw):
    im.save(path, **kw)
    return path


def refused(path, sentence): # by the size and by the reading alike, in one sentence
    for f in (read_image_size, open_image):
        with pytest.raises(ValueError, match=sentence) as e: f(path)
        assert "\n" not in str(e.value) and len(str(e.value)) < 700


def needs_avif(name):
    if name.endswith("avif") and not features.check("avif"): pytest.skip("this Pillow has no AVIF")


# --- orientation
@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("mark", range(1, 9))
def test_exif_orientation_is_applied(mark, kind, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = mark
    path = saved(tmp_path/f"a.{kind}", PHOTO, exif=exif if kind == "tiff" else exif.tobytes())
    got = open_image(path)
    assert np.array_equal(got, ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
    assert read_image_size(path) == got.size == ((30, 20) if mark < 5 else (20, 30))


def test_exif_in_png_text(tmp_path):
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    path = saved(tmp_path/"a.png", PLAIN, pnginfo=info)
    assert open_image(path).size == read_image_size(path) == (20, 30)


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x63\0\0"])
def test_unreadable_exif_is_ignored(exif, tmp_path):
    path = saved(tmp_path/"a.jpg", PLAIN, exif=exif)
    assert open_image(path).size == read_image_size(path) == (30, 20)


def test_a_photograph_is_turned_although_pillow_cannot_write_its_exif_data(tmp_path):
    "The resolution is text. `ImageOps.exif_transpose` writes the rest of the data again and fails, so `open_image` only reads the orientation."
    entries = bytes.fromhex("1201 0300 01000000 06000000" "1a01 0200 04000000 61626300") # orientation 6, resolution "abc"
    path = saved(tmp_path/"a.jpg", PLAIN, exif=b"Exif\0\0II*\0\x08\0\0\0\x02\0" + entries + bytes(4))
    with Image.open(path) as im, pytest.raises(TypeError): ImageOps.exif_transpose(im)
    assert open_image(path).size == read_image_size(path) == (20, 30)


# --- depth
@pytest.mark.parametrize("name, mode", [("a.png", "I;16"), ("a.tiff", "I;16"), ("b.tiff", "I;16B"), ("i.tiff", "I")])
def test_16_bit_grey(name, mode, tmp_path):
    ramp = np.arange(65536).reshape(256, 256)
    im = Image.frombytes("I;16B", (256, 256), ramp.astype(">u2").tobytes()) if mode == "I;16B" else Image.fromarray(ramp.astype(np.uint16 if mode == "I;16" else np.int32))
    path = saved(tmp_path/name, im)
    with Image.open(path) as again: assert again.mode == mode or name == "a.png"
    got = np.asarray(open_image(path))
    assert len(np.unique(got)) >= 250 and got[0, 0, 0] == 0 and got[-1, -1, 0] == 255
    assert abs(got[128, 0, 0] - 128) <= 1 and read_image_size(path) == (256, 256)


def png(width, height, depth, colour, rows, *chunks):
    def chunk(kind, data): return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)) + b"".join(chunk(*c) for c in chunks) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_16_bit_colour():
    a = np.linspace(0, 65535, 256 * 3, dtype=np.uint16).reshape(256, 3)
    data = png(256, 16, 16, 2, (b"\0" + a.astype(">u2").tobytes()) * 16)
    assert (np.asarray(open_image(data)) == a >> 8).all() and read_image_size(data) == (256, 16)


def test_16_bit_grey_with_a_transparent_level():
    rows = struct.pack(">bHH", 0, 0, 1000)
    assert np.asarray(open_image(png(2, 1, 16, 0, rows, (b"tRNS", struct.pack(">H", 1000)))))[0, :, 0].tolist() == [0, 255]


@pytest.mark.parametrize("top", [1.5, 255.0, 65535.0])
def test_float_white_levels(top, tmp_path):
    white = 1 if top <= 1.5 else top
    path = saved(tmp_path/"a.tiff", Image.fromarray(np.float32([[-1, 0], [white / 2, top]])))
    got = np.asarray(open_image(path))[..., 0]
    assert got[0].tolist() == [0, 0] and abs(int(got[1, 0]) - 128) <= 1 and got[1, 1] == 255 and read_image_size(path) == (2, 2)


@pytest.mark.parametrize("value, sentence", [(np.float32(np.nan), "holds values that are not finite; save it"), (np.float32(1e9), r"holds values up to 1e\+09, more than 16 bits; save it"),
                                             (np.int32(70000), "holds values up to 70000, more than 16 bits")])
def test_unusable_values(value, sentence, tmp_path):
    refused(saved(tmp_path/"a.tiff", Image.fromarray(np.array([[0, value]], value.dtype))), sentence)


# --- modes
@pytest.mark.parametrize("name", ["a.jpg", "a.tiff"])
def test_cmyk_and_inverted_cmyk(name, tmp_path):
    path = saved(tmp_path/name, Image.new("CMYK", (8, 8), (255, 0, 0, 0)), quality=100)
    if name == "a.jpg": assert b"Adobe" in path.read_bytes() # Pillow writes CMYK JPEGs as Adobe does, inverted and marked so
    r, g, b = open_image(path).getpixel((4, 4))
    assert r < 10 and g > 240 and b > 240


@pytest.mark.parametrize("name, mode, hidden, how", [
    ("a.png", "RGBA", (255, 0, 0, 0), {}), ("a.png", "LA", (0, 0), {}), ("a.webp", "RGBA", (255, 0, 0, 0), dict(lossless=True)), ("a.png", "L", 7, dict(transparency=7)),
    ("a.png", "RGB", (1, 2, 3), dict(transparency=(1, 2, 3))), ("a.gif", "P", 0, dict(transparency=0)), ("a.png", "P", 0, dict(transparency=0))])
def test_transparency_becomes_white(name, mode, hidden, how, tmp_path):
    im = Image.new(mode, (8, 8), hidden)
    if mode == "P":
        im.putpalette([255, 0, 0, 0, 0, 255])
        im.putpixel((4, 4), 1)
    got = open_image(saved(tmp_path/name, im, **how))
    assert got.getpixel((0, 0)) == (255, 255, 255) and (mode != "P" or got.getpixel((4, 4)) == (0, 0, 255))


def test_half_transparent_pixels_are_mixed_with_white():
    assert open_image(Image.new("PA", (8, 8))).mode == "RGB"
    half = open_image(Image.new("RGBA", (2, 2), (255, 0, 0, 128))).getpixel((0, 0))
    assert half[0] == 255 and abs(half[1] - 127) <= 1


@pytest.mark.parametrize("mode, value, pixel", [("1", 1, (255, 255, 255)), ("P", 0, (0, 0, 0)), ("YCbCr", (128, 128, 128), (128, 128, 128))])
def test_plain_modes(mode, value, pixel, tmp_path):
    path = saved(tmp_path/("a.tiff" if mode == "YCbCr" else "a.png"), Image.new(mode, (8, 8), value))
    assert open_image(path).getpixel((3, 3)) == pixel and read_image_size(path) == (8, 8)


# --- what is refused
@pytest.mark.parametrize("name", ["a.gif", "a.png", "a.webp", "a.tiff", "a.avif"])
def test_several_frames_are_refused(name, tmp_path):
    needs_avif(name)
    refused(saved(tmp_path/name, PHOTO, save_all=True, append_images=[Image.fromarray(255 - COLOURS), Image.fromarray(COLOURS // 2)]), rf"{name}' has 3 frames; save one of them$")
    one = saved(tmp_path/f"one{name}", PHOTO)
    assert read_image_size(one) == open_image(one).size == (30, 20)


def test_mpo_uses_the_first_image(tmp_path):
    path = saved(tmp_path/"a.jpg", PLAIN, format="MPO", save_all=True, append_images=[Image.new("RGB", (30, 20), "blue")])
    with Image.open(path) as im: assert im.n_frames == 2
    assert read_image_size(path) == (30, 20) and open_image(path).getpixel((0, 0))[0] > 240


FULL = [(f"a.{k}", dict(lossless=True) if k == "webp" else {}) for k in ("png", "jpg", "webp", "bmp", "tiff", "gif", "avif")] + [("lzw.tiff", dict(compression="tiff_lzw")), ("deep.png", {})]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, how", FULL)
@pytest.mark.parametrize("left", [0.97, 0.5, 0])
def test_truncated_and_empty_files_are_refused(name, how, left, tmp_path):
    needs_avif(name)
    path = saved(tmp_path/name, Image.fromarray(RNG.integers(0, 65535, (64, 64)).astype(np.uint16)) if "deep" in name else NOISE, **how)
    data = path.read_bytes()
    assert read_image_size(path) == (64, 64)
    path.write_bytes(data[:int(len(data) * left)])
    refused(path, f"image '.*{name}' cannot be read " + (r"\(it is empty\)" if not left else r"\(.+\)") + "; replace it or remove the pair$")


def test_data_after_a_jpeg_and_a_truncated_jpeg(tmp_path):
    small = io.BytesIO()
    NOISE.resize((8, 8)).save(small, "JPEG")
    data = saved(tmp_path/"a.jpg", NOISE, comment=small.getvalue()).read_bytes()
    (tmp_path/"film.jpg").write_bytes(data + b"\0\0ftyp a film")
    assert read_image_size(tmp_path/"film.jpg") == open_image(tmp_path/"film.jpg").size == (64, 64)
    (tmp_path/"cut.jpg").write_bytes(data[:len(data) - 500])  # the thumbnail's end mark is near the end
    refused(tmp_path/"cut.jpg", "cut.jpg' cannot be read")


@pytest.mark.parametrize("content", [b"\0" * 5000, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xd9", b"GIF89a\0\0\0\0\0\0\0", b"RIFF\xff\xff\xff\xffWEBPVP8 "])
def test_files_without_an_image_are_refused(content, tmp_path):
    (tmp_path/"a.png").write_bytes(content)
    refused(tmp_path/"a.png", "image '.*a.png' ")


@pytest.mark.filterwarnings("ignore")
def test_flipped_bytes_raise_only_value_errors(tmp_path):
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    for name in ("a.png", "a.jpg", "a.webp", "a.bmp", "a.tiff", "a.gif"):
        data = saved(tmp_path/name, PHOTO, **dict(exif=exif) if name in ("a.jpg", "a.webp") else {}).read_bytes()
        for _ in range(60):
            broken = bytearray(data)
            for at in RNG.integers(0, min(len(data), 300), 3): broken[at] = RNG.integers(0, 256)
            for f in (read_image_size, open_image):
                try: f(bytes(broken))
                except ValueError as e: assert str(e).startswith("image bytes "), e


def test_decompression_bomb(tmp_path):
    (tmp_path/"bomb.png").write_bytes(png(20000, 20000, 1, 0, b"\0" * 100))
    refused(tmp_path/"bomb.png", r"bomb.png' has 400 megapixels, more than the 178 that we open; make it smaller or remove the pair$")
    (tmp_path/"text.png").write_bytes(png(2, 2, 8, 0, b"\0\1\2" * 2, (b"zTXt", b"a\0\0" + zlib.compress(b"x" * 2_000_000))))
    assert read_image_size(tmp_path/"text.png") == (2, 2) and np.asarray(open_image(tmp_path/"text.png"))[..., 0].tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize("size, ok", [((1, 1), True), ((16, 1), True), ((17, 1), False), ((1, 17), False)])
def test_sizes(size, ok, tmp_path):
    path = saved(tmp_path/"a.png", Image.new("RGB", size))
    if not ok: refused(path, f"a.png' is {size[0]}x{size[1]}, more than 16 times as long as wide; crop it or remove the pair$")
    else: assert read_image_size(path) == size and min(Geometry((64, 64)).target(size)) >= 32


def test_image_without_pixels():
    with pytest.raises(ValueError, match="image Image is empty \\(0x5\\); replace it"): open_image(Image.new("RGB", (0, 5)))
    with pytest.raises(ValueError, match="image bytes cannot be read"): read_image_size(png(0, 5, 8, 0, b""))


# --- files that are no images
def test_paths_that_are_no_files(tmp_path):
    (tmp_path/"dir.png").mkdir()
    for name, target in (("lost.png", "nowhere"), ("loop.png", "loop.png")): (tmp_path/name).symlink_to(tmp_path/target)
    os.mkfifo(tmp_path/"pipe.png")
    for name, why in {"dir.png": "it is a folder", "lost.png": "its link leads nowhere", "loop.png": "its link leads nowhere", "pipe.png": "it is no regular file",
                      "gone.png": "it does not exist", "a\0b.png": "it does not exist", "x" * 300 + ".png": "File name too long"}.items():
        sentence = rf"image '.*' cannot be read \({why}\); replace it or remove the pair$"
        refused(tmp_path/name, sentence)
        for read in (read_bytes, source_digest):
            with pytest.raises(ValueError, match=sentence): read(tmp_path/name)


def test_file_without_permission(tmp_path):
    path = saved(tmp_path/"a.png", PLAIN)
    with patch.object(Path, "open", side_effect=PermissionError(13, "Permission denied")): refused(path, r"a.png' cannot be read \(Permission denied\); replace it")


# --- sources in memory
def test_all_sources_give_the_same_image(tmp_path):
    path = saved(tmp_path/"a.png", PHOTO)
    class Held: name = "held"; read_bytes = staticmethod(path.read_bytes)
    for source in (path, str(path), path.read_bytes(), Held):
        assert (np.asarray(open_image(source)) == COLOURS).all() and read_image_size(source) == (30, 20)
        assert source_digest(source) == source_digest(path) and len(source_digest(source)) == 64
        if not isinstance(source, bytes): assert read_bytes(source) == path.read_bytes()
    for source in (io.BytesIO(path.read_bytes()), Image.open(path), COLOURS): assert (np.asarray(open_image(source)) == COLOURS).all()
    with pytest.raises(ValueError, match="image 'mine' cannot be read"): open_image(b"no", name="'mine'")
    with pytest.raises(ValueError, match="image int cannot be read"): open_image(5)


@pytest.mark.slow
def test_row_image_in_loader_workers(tmp_path):
    import datasets
    from torch.utils.data import DataLoader
    path = saved(tmp_path/"a.png", PHOTO)
    data = datasets.Dataset.from_dict(dict(image=[str(path)] * 4)).cast_column("image", datasets.Image())
    class Sizes:
        images = [RowImage(data.with_format("arrow"), "image", i) for i in range(4)]
        def __len__(self): return 4
        def __getitem__(self, i): return np.array(read_image_size(self.images[i]))
    assert np.concatenate([b.numpy() for b in DataLoader(Sizes(), num_workers=1)]).tolist() == [[30, 20]] * 4


@pytest.mark.parametrize("aspect, box", [((1, 1), (20, 0, 80, 60)), ((2, 1), (0, 5, 100, 55))])
def test_a_crop_keeps_the_centre(aspect, box):
    image = noise_image((100, 60), 50)
    assert crop_to(image, aspect) == image.crop(box)
