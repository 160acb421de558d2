"""Every image mode has a defined result, and an unusable image raises one sentence with its name."""
import io, os, struct, zlib

import numpy as np
import pytest
from PIL import Image, features

from qie_nb.data.images import Geometry, RowImage, open_image, read_image_size, read_bytes, source_digest

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 255, (20, 30, 3), dtype=np.uint8)
CORNERS = {(0, 0): (255, 0, 0), (29, 0): (0, 255, 0), (0, 19): (0, 0, 255), (29, 19): (255, 255, 0)}  # upright, 30x20


def corners(size=(30, 20)):
    im = Image.new("RGB", size, (128, 128, 128))
    for (x, y), c in CORNERS.items(): im.paste(c, (x // 20 * 20, y // 12 * 12, x // 20 * 20 + 10, y // 12 * 12 + 8))
    return im


def saved(path, im, **kw):
    im.save(path, **kw)
    return path


def grey_png(levels):
    return Image.fromarray(np.asarray(levels, dtype=np.uint16))


# --- orientation
BACK = {1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_270}


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("mark", range(1, 9))
def test_exif_orientation_is_applied(mark, kind, tmp_path):
    im = corners()
    stored = im if BACK[mark] is None else im.transpose(BACK[mark])
    exif = Image.Exif()
    exif[0x0112] = mark
    how = dict(jpg=dict(quality=95, subsampling=0), webp=dict(lossless=True)).get(kind, {})
    path = saved(tmp_path/f"a.{kind}", stored, exif=exif if kind == "tiff" else exif.tobytes(), **how)
    got = open_image(path)
    assert got.size == read_image_size(path) == (30, 20)
    for at, colour in CORNERS.items(): assert np.abs(np.subtract(got.getpixel(at), colour)).max() < 12, (at, got.getpixel(at))


def test_exif_in_png_text(tmp_path):
    from PIL.PngImagePlugin import PngInfo
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    path = saved(tmp_path/"a.png", Image.new("RGB", (30, 20)), pnginfo=info)
    assert open_image(path).size == read_image_size(path) == (20, 30)


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x63\0\0"])
def test_unreadable_exif_is_ignored(exif, tmp_path):
    path = saved(tmp_path/"a.jpg", Image.new("RGB", (30, 20)), exif=exif)
    assert open_image(path).size == read_image_size(path) == (30, 20)


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


def test_16_bit_colour(tmp_path):
    a = np.arange(256 * 3, dtype=np.uint32).reshape(1, 256, 3) * 65535 // (256 * 3 - 1)
    rows = b"".join(b"\0" + a.astype(">u2").tobytes() for _ in range(16))
    (tmp_path/"a.png").write_bytes(png(256, 16, 16, 2, rows))
    assert (np.asarray(open_image(tmp_path/"a.png"))[0] == a[0] >> 8).all() and read_image_size(tmp_path/"a.png") == (256, 16)


def test_16_bit_grey_with_a_transparent_level(tmp_path):
    rows = b"\0" + np.uint16([0, 1000]).astype(">u2").tobytes()
    (tmp_path/"a.png").write_bytes(png(2, 1, 16, 0, rows, (b"tRNS", struct.pack(">H", 1000))))
    assert np.asarray(open_image(tmp_path/"a.png"))[0, :, 0].tolist() == [0, 255]


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
def test_cmyk_and_inverted_cmyk(tmp_path):
    im = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    for name in ("a.jpg", "a.tiff"):  # Pillow writes CMYK JPEGs as Adobe does, inverted and marked so
        path = saved(tmp_path/name, im, **(dict(quality=100) if "jpg" in name else {}))
        if name == "a.jpg": assert b"Adobe" in path.read_bytes()
        r, g, b = open_image(path).getpixel((4, 4))
        assert r < 10 and g > 240 and b > 240, name


def palette_with_transparency(tmp_path):
    im = Image.new("P", (8, 8), 0)
    im.putpalette([255, 0, 0, 0, 0, 255])
    im.putpixel((4, 4), 1)
    return saved(tmp_path/"p.png", im, transparency=0)


def test_transparency_becomes_white(tmp_path):
    made = dict(rgba=saved(tmp_path/"rgba.png", Image.new("RGBA", (8, 8), (255, 0, 0, 0))), la=saved(tmp_path/"la.png", Image.new("LA", (8, 8), (0, 0))),
                p=palette_with_transparency(tmp_path), webp=saved(tmp_path/"a.webp", Image.new("RGBA", (8, 8), (255, 0, 0, 0)), lossless=True),
                l=saved(tmp_path/"l.png", Image.new("L", (8, 8), 7), transparency=7), rgb=saved(tmp_path/"rgb.png", Image.new("RGB", (8, 8), (1, 2, 3)), transparency=(1, 2, 3)),
                gif=saved(tmp_path/"a.gif", Image.new("P", (8, 8), 0), transparency=0))
    for kind, path in made.items(): assert open_image(path).getpixel((0, 0)) == (255, 255, 255), kind
    assert open_image(made["p"]).getpixel((4, 4)) == (0, 0, 255)
    assert open_image(Image.new("PA", (8, 8))).mode == "RGB"
    half = open_image(Image.new("RGBA", (2, 2), (255, 0, 0, 128))).getpixel((0, 0))
    assert half[0] == 255 and abs(half[1] - 127) <= 1


@pytest.mark.parametrize("mode, value, pixel", [("1", 1, (255, 255, 255)), ("P", 0, (0, 0, 0)), ("YCbCr", (128, 128, 128), (128, 128, 128))])
def test_plain_modes(mode, value, pixel, tmp_path):
    path = saved(tmp_path/("a.tiff" if mode == "YCbCr" else "a.png"), Image.new(mode, (8, 8), value))
    assert open_image(path).getpixel((3, 3)) == pixel and read_image_size(path) == (8, 8)


# --- what is refused: by the size and by the reading alike, in one sentence
def refused(path, sentence):
    for f in (read_image_size, open_image):
        with pytest.raises(ValueError, match=sentence) as e: f(path)
        assert "\n" not in str(e.value) and len(str(e.value)) < 700


@pytest.mark.parametrize("name", ["a.gif", "a.png", "a.webp", "a.tiff", "a.avif"])
def test_several_frames_are_refused(name, tmp_path):
    if name == "a.avif" and not features.check("avif"): pytest.skip("this Pillow has no AVIF")
    frames = [Image.fromarray(a) for a in (COLOURS, 255 - COLOURS, COLOURS // 2)]
    refused(saved(tmp_path/name, frames[0], save_all=True, append_images=frames[1:]), rf"{name}' has 3 frames; save one of them$")
    one = saved(tmp_path/f"one{name}", frames[0])
    assert read_image_size(one) == open_image(one).size == (30, 20)


def test_mpo_uses_the_first_image(tmp_path):
    path = saved(tmp_path/"a.jpg", Image.new("RGB", (30, 20), "red"), format="MPO", save_all=True, append_images=[Image.new("RGB", (30, 20), "blue")])
    with Image.open(path) as im: assert im.n_frames == 2
    assert read_image_size(path) == (30, 20) and open_image(path).getpixel((0, 0))[0] > 240


FULL = [(f"a.{k}", dict(lossless=True) if k == "webp" else {}) for k in ("png", "jpg", "webp", "bmp", "tiff", "gif", "avif")] + [("lzw.tiff", dict(compression="tiff_lzw")), ("deep.png", {})]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, how", FULL)
@pytest.mark.parametrize("left", [0.97, 0.5, 0])
def test_truncated_and_empty_files_are_refused(name, how, left, tmp_path):
    if name == "a.avif" and not features.check("avif"): pytest.skip("this Pillow has no AVIF")
    noise = Image.fromarray(RNG.integers(0, 255, (64, 64, 3), dtype=np.uint8))
    path = saved(tmp_path/name, grey_png(RNG.integers(0, 65535, (64, 64))) if "deep" in name else noise, **how)
    data = path.read_bytes()
    assert read_image_size(path) == (64, 64)
    path.write_bytes(data[:int(len(data) * left)])
    refused(path, f"image '.*{name}' cannot be read " + (r"\(it is empty\)" if not left else r"\(.+\)") + "; replace it or remove the pair$")


def test_data_after_a_jpeg_and_a_truncated_jpeg(tmp_path):
    noise = Image.fromarray(RNG.integers(0, 255, (64, 64, 3), dtype=np.uint8))
    small = io.BytesIO()
    noise.resize((8, 8)).save(small, "JPEG")
    data = saved(tmp_path/"a.jpg", noise, comment=small.getvalue()).read_bytes()
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
    for name in ("a.png", "a.jpg", "a.webp", "a.bmp", "a.tiff", "a.gif"):
        data = saved(tmp_path/name, Image.fromarray(COLOURS), **(dict(exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0") if name in ("a.jpg", "a.webp") else {})).read_bytes()
        for _ in range(60):
            broken = bytearray(data)
            for at in RNG.integers(0, min(len(data), 300), 3): broken[at] = RNG.integers(0, 256)
            for f in (read_image_size, open_image):
                try: f(bytes(broken))
                except ValueError as e: assert str(e).startswith("image bytes "), e


def test_decompression_bomb(tmp_path):
    (tmp_path/"bomb.png").write_bytes(png(20000, 20000, 1, 0, b"\0" * 100))
    refused(tmp_path/"bomb.png", r"bomb.png' cannot be read \(Image size \(400000000 pixels\) exceeds limit of \d+ pixels.*\); replace it")
    (tmp_path/"text.png").write_bytes(png(2, 2, 8, 0, b"\0\1\2" * 2, (b"zTXt", b"a\0\0" + zlib.compress(b"x" * 2_000_000))))
    refused(tmp_path/"text.png", r"text.png' cannot be read \(Decompressed data too large")


@pytest.mark.parametrize("size, ok", [((1, 1), True), ((16, 1), True), ((17, 1), False), ((1, 17), False)])
def test_sizes(size, ok, tmp_path):
    path = saved(tmp_path/"a.png", Image.new("RGB", size))
    if not ok: refused(path, f"a.png' is {size[0]}x{size[1]}, more than 16 times as long as wide; crop it or remove the pair$")
    else: assert read_image_size(path) == size and min(Geometry((64, 64)).target(size)) >= 32


def test_image_without_pixels():
    with pytest.raises(ValueError, match="image Image is 0x5, without a pixel; replace it"): open_image(Image.new("RGB", (0, 5)))
    with pytest.raises(ValueError, match="image bytes cannot be read"): read_image_size(png(0, 5, 8, 0, b""))


# --- files that are no images
def test_paths_that_are_no_files(tmp_path):
    (tmp_path/"dir.png").mkdir()
    (tmp_path/"lost.png").symlink_to(tmp_path/"nowhere")
    (tmp_path/"loop.png").symlink_to(tmp_path/"loop.png")
    os.mkfifo(tmp_path/"pipe.png")
    for name, why in {"dir.png": "it is a folder", "lost.png": "its link leads nowhere", "loop.png": "its link leads nowhere", "pipe.png": "it is no regular file", "gone.png": "it does not exist", "a\0b.png": "it does not exist", "x" * 300 + ".png": "File name too long"}.items():
        sentence = rf"image '.*' cannot be read \({why}\); replace it or remove the pair$"
        refused(tmp_path/name, sentence)
        for read in (read_bytes, source_digest):
            with pytest.raises(ValueError, match=sentence): read(tmp_path/name)


def test_file_without_permission(tmp_path, monkeypatch):
    from pathlib import Path
    path = saved(tmp_path/"a.png", Image.new("RGB", (8, 8)))
    def denied(self, *a, **kw): raise PermissionError(13, "Permission denied", str(self))
    monkeypatch.setattr(Path, "open", denied)
    refused(path, r"a.png' cannot be read \(Permission denied\); replace it")


# --- sources in memory
def test_all_sources_give_the_same_image(tmp_path):
    path = saved(tmp_path/"a.png", Image.fromarray(COLOURS))
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
    path = saved(tmp_path/"a.png", Image.fromarray(COLOURS))
    data = datasets.Dataset.from_dict(dict(image=[str(path)] * 4)).cast_column("image", datasets.Image())
    class Sizes:
        pictures = [RowImage(data.with_format("arrow"), "image", i) for i in range(4)]
        def __len__(self): return 4
        def __getitem__(self, i): return np.array(read_image_size(self.pictures[i]))
    assert np.concatenate([b.numpy() for b in DataLoader(Sizes(), num_workers=1)]).tolist() == [[30, 20]] * 4
