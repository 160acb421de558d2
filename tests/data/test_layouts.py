"""Data as people have it: each row of a table builds a folder and expects what is found, or the sentence that says what is wrong."""
import pytest

from qie_nb.config import DataSection
from qie_nb.data.dataset import ImageDataset
from qie_nb.data.samples import config_samples, find_samples
from test_samples import tree


def names(samples): return [(s.target.name, *(c.name for c in s.controls)) for s in samples]


def make(root, files):
    "`1/a.png,b.png` makes two files in a folder."
    for group in files.split():
        *folder, held = group.rsplit("/", 1)
        tree(root, ["/".join([*folder, name]).replace("~", " ") for name in held.split(",")])
    return root


# files | settings | pairs (target control ...; ...) | a part of the layout or of a note
FOUND = """my~pairs/training_images/a.png,a.txt my~pairs/control_images/a.png __MACOSX/._a.png | | a.png a.png | data: in 'my pairs/', the only folder with images in
x/y/after/a.png,a.txt x/y/before/a.png x/readme.txt | | a.png a.png | in x/: in y/: folders after/ + before/
After~Photos/a.jpg,a.txt Before~Photos/a.jpg | | a.jpg a.jpg | pairs: targets in 'After Photos', controls in 'Before Photos' (guessed from the names; set `data.target_dir` and `data.control_dir` to choose)
my_dataset/a.png,a.txt my_dataset_control/a.png | | a.png a.png | targets in 'my_dataset', controls in 'my_dataset_control' (guessed
dataset/a.png,a.txt control_2/a.jpg control_1/a.png | | a.png a.png a.jpg | controls in 'control_1', 'control_2' (guessed
image_dir/a.png,a.txt control_dir/a.png | | a.png a.png | targets in 'image_dir', controls in 'control_dir' (guessed
A/a.png,a.txt B/a.png | target_dir=A control_dir=B | a.png a.png | folders A/ + B/
zip/A/a.png zip/B/a.png zip/C/a.jpg | target_dir=B control_dir=C,A prompt=x | a.png a.jpg a.png | in zip/: folders B/ + C/, A/, `data.prompt` for 1 of 1
A/a.png,a.txt B/a.png | target_dir=a | a.png a.png | targets in 'A', controls in 'B' (guessed
after/a.png before/a.png prompt.txt | | a.png a.png | prompt.txt of the data set for 1 of 1
after/a.png,b.png,b.txt before/a.png,b.png | prompt=x | a.png a.png;b.png b.png | , `data.prompt` for 1 of 2
after/IMG_1.JPG,IMG_1.TXT before/img_1.jpeg | prompt=x | IMG_1.JPG img_1.jpeg | folders after/ + before/
after/IMG_1_after.jpg before/IMG_1_before.jpg | prompt=x | IMG_1_after.jpg IMG_1_before.jpg | folders after/ + before/
after/a.png before/a.png,a.txt | | a.png a.png | captions: beside the controls, because no target has one
a_before.png a_after.png prompt.txt | | a_after.png a_before.png | one folder, pairs by their names: targets _after, controls _before, prompt.txt
photo-out.png photo-in.png photo.txt | | photo-out.png photo-in.png | targets -out, controls -in
before_01.png after_01.png | prompt=x | after_01.png before_01.png | targets after_, controls before_
IMG_1.jpg IMG_1_edited.jpg | prompt=x | IMG_1_edited.jpg IMG_1.jpg | pairs: 'IMG_1_edited.jpg' is the target of 'IMG_1.jpg', and so on (guessed from the names)
a.png a.txt control/a.png | | a.png a.png | controls in 'control' (guessed
original/a.png edit/a.png | prompt=x | a.png a.png | targets in 'edit', controls in 'original' (guessed"""


@pytest.mark.parametrize("row", FOUND.splitlines())
def test_layouts_that_are_found(row, tmp_path):
    files, settings, pairs, said = (part.strip() for part in row.split("|"))
    settings = dict(part.split("=") for part in settings.split())
    if "," in settings.get("control_dir", ""): settings["control_dir"] = settings["control_dir"].split(",")
    samples = config_samples(DataSection(dataset_path=str(make(tmp_path, files)), **settings))
    assert names(samples) == [tuple(pair.split()) for pair in pairs.split(";")]
    assert said in "\n".join([samples.layout, *samples.notes])
