"""Makes the package's photographs from scikit-image's: `python tools/photographs.py`. Needs `pip install scikit-image`.

Each is at most 512 pixels on its longer side. The folder's SOURCES.txt names where each photograph comes from and why it may be redistributed."""
from pathlib import Path

from PIL import Image

from qie_nb.tiny.photos import PHOTOS, photo_folder

SIDE, QUALITY = 512, 90
ORIGINALS = ["astronaut.png", "motorcycle_left.png", "rocket.jpg", "retina.jpg", "ihc.png", "coffee.png", "chelsea.png"]


def reduced(photo) -> Image.Image:
    "An RGB copy of a PIL image; a small one keeps its size."
    scale = min(1, SIDE / max(photo.size))
    size = tuple(round(side * scale) for side in photo.size)
    return photo.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def write_photographs(source, target):
    "Writes a JPEG to the folder `target` for each of `ORIGINALS` in the folder `source`."
    for name in ORIGINALS:
        file = (Path(target)/name).with_suffix(".jpg")
        reduced(Image.open(Path(source)/name)).save(file, quality=QUALITY, subsampling=0, optimize=True)


if __name__ == "__main__":
    write_photographs(photo_folder("more"), photo_folder("train"))
    written = {f.name for f in photo_folder("train").glob("*.jpg")}
    assert written == {*PHOTOS["train"], *PHOTOS["held_out"]}, f"`PHOTOS` does not list {written}"
