"""A zip, folders with own names and missing captions are refused once.

The message has a line that works when it is pasted.
"""
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import yaml

from qie_nb import ImageDataset, QwenImageEditTrainer
from qie_nb.data import no_pairs
from qie_nb.data.no_pairs import twin_folders
from qie_nb.tiny.photos import make_pairs


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Images before and after the edit, without captions."""
    source = tmp_path_factory.mktemp("photos")/"set"
    make_pairs(source, "invert", 6, size=(48, 32))
    return source


@pytest.fixture
def holiday(pairs, tmp_path, monkeypatch):
    """A folder as people make it, within another one."""
    monkeypatch.chdir(tmp_path)
    top = Path("holiday")/"My Holiday Edits (final)"
    for name, side in (("Vorher (Kamera)", "control_images"), ("fertig_NEU", "training_images")):
        (top/name).mkdir(parents=True)
        for image in (pairs/side).glob("*.png"):
            shutil.copy(image, top/name)
    (Path("holiday")/"__MACOSX").mkdir()
    return Path("holiday")


def refusal(path) -> str:
    """What a data set with this path says."""
    with pytest.raises(ValueError) as e:
        len(ImageDataset(dict(dataset_path=str(path))))
    return str(e.value)


def pasted(message:str) -> dict:
    """The section `data` of the message, as YAML reads it, with an instruction."""
    settings = yaml.safe_load(re.search(r"data: \{.*?\}", message)[0])["data"]
    if "prompt" in settings:
        assert settings["prompt"] == no_pairs.WHAT_TO_DO
        settings["prompt"] = "make it old"
    return settings


def test_own_folders_without_captions_are_one_refusal(holiday):
    message = refusal(holiday)
    assert "have 6 images with equal names and no captions: write data: {" in message
    assert "exchange the two folders if the first one is after the edit" in message
    settings = pasted(message)
    assert (settings["control_dir"], settings["target_dir"]) == ("Vorher (Kamera)", "fertig_NEU")
    assert len(ImageDataset(settings)) == 6
    sentence = "`data.prompt` is 'what the edit does', as a message had it; write your"
    with pytest.raises(ValueError, match=sentence):
        ImageDataset(settings | dict(prompt=no_pairs.WHAT_TO_DO))


def test_with_captions_no_prompt_is_asked_for_and_they_tell_the_side(holiday):
    folder = holiday/"My Holiday Edits (final)"/"Vorher (Kamera)"
    for image in folder.glob("*.png"):
        image.with_suffix(".txt").write_text("make it old")
    settings = pasted(refusal(holiday))
    assert "prompt" not in settings and settings["target_dir"] == "Vorher (Kamera)"
    assert ImageDataset(settings).samples[0].prompt == "make it old"


@pytest.mark.parametrize("unpacked", [True, False])
def test_a_zip_says_the_same(unpacked, holiday):
    shutil.make_archive("holiday", "zip", "holiday")
    if not unpacked:
        shutil.rmtree(holiday)
    message = refusal("holiday.zip")
    assert ("it is unpacked already" in message) == unpacked
    if not unpacked:
        assert "`unzip -q holiday.zip -d holiday`" in message
        zipfile.ZipFile("holiday.zip").extractall("holiday")
    assert len(ImageDataset(pasted(message))) == 6


def test_a_zip_in_a_folder_that_cannot_be_written_is_unpacked_here(holiday, monkeypatch):
    shutil.make_archive("holiday", "zip", "holiday")
    shutil.rmtree(holiday)
    monkeypatch.setattr(no_pairs.os, "access", lambda path, mode: False)
    message = refusal(Path("holiday.zip").absolute())
    assert re.search(r"`unzip -q /\S*holiday\.zip -d holiday`", message)
    assert pasted(message)["dataset_path"] == "holiday/My Holiday Edits (final)"


def test_in_a_notebook_the_line_is_an_argument(holiday, monkeypatch):
    monkeypatch.setattr(no_pairs, "kernel", lambda: "a kernel")
    argument = re.search(r"data=dict\((.*?prompt='.*?')\)", refusal(holiday))[1]
    argument = argument.replace(no_pairs.WHAT_TO_DO, "make it old")
    assert len(ImageDataset(eval(f"dict({argument})"))) == 6


def test_a_trainer_refuses_a_zip_when_it_is_made(holiday):
    shutil.make_archive("holiday", "zip", "holiday")
    with pytest.raises(ValueError, match="is an archive; it is unpacked already.* write data: "):
        QwenImageEditTrainer(dict(preset="tiny", data=dict(dataset_path="holiday.zip")))


@pytest.mark.parametrize("files", [
    ["a/1.png", "b/2.png"], # no equal names
    ["a/1.png", "b/1.png"], # one image is no sign
    [*(f"a/{n}.png" for n in "1234"), *(f"b/{n}.png" for n in "3456")], # half of the names
    [f"{d}/{n}.png" for d in "abc" for n in "123"], # three folders
    [f"__MACOSX/{d}/{n}.png" for d in "ab" for n in "123"]])
def test_what_may_be_chance_is_not_guessed(files):
    assert twin_folders(files) is None
