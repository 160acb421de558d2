"""Pairs from finished images: what is kept and rejected, names, sizes, sessions that end."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageFilter

from qie_nb.config import DataSection
from qie_nb.data.images import Geometry
from qie_nb.data.samples import config_samples
from qie_nb.extras import backward_pairs
from qie_nb.extras.backward_pairs import RECORD, REJECTED, judge, pairs_from_results, read_record
from qie_nb.tiny.photos import EDITS, crops
from qie_nb.trainer import QwenImageEditTrainer

SIDE = 256
UNDO, DO = "invert the colors", "show it as a negative"
judge_direction = backward_pairs._direction


@pytest.fixture(autouse=True)
def without_direction(monkeypatch):
    "Stand-ins for a trainer have no model that could judge."
    monkeypatch.setattr(backward_pairs, "_direction", lambda *a: None)


@pytest.fixture(scope="module")
def photographs():
    "Twenty crops of photographs."
    return crops(20, (SIDE, SIDE), seed=3)


def zoomed(im, factor):
    side = round(SIDE * factor)
    left = (side - SIDE) // 2
    return im.resize((side, side), Image.Resampling.BICUBIC).crop((left, left, left + SIDE, left + SIDE))


def shifted(im, pixels):
    return Image.fromarray(np.roll(np.asarray(im), pixels, 1))


GOOD = dict( # {effect that was undone: function of the true image before}
    invert=EDITS["invert"], duotone=EDITS["duotone"], brighter=EDITS["brighter"],
    soft=lambda im: im.filter(ImageFilter.GaussianBlur(3)))
BAD = dict( # {fault: (function of the true image before, the reason's first word)}
    shifted=(lambda im: shifted(EDITS["invert"](im), 8), "shift"),
    zoomed=(lambda im: zoomed(EDITS["invert"](im), 1.03), "scale"),
    unchanged=(lambda im: im, "unchanged"),
    other=(None, "of something else")) # of the next photograph


@pytest.mark.slow
def test_twenty_good_results_are_kept(photographs):
    for n, im in enumerate(photographs):
        effect = list(GOOD.values())[n % len(GOOD)]
        verdict = judge(np.asarray(effect(im)), np.asarray(im))
        assert verdict.kept, (n, verdict)


@pytest.mark.slow
def test_twenty_bad_results_are_rejected_for_the_right_reason(photographs):
    for n, im in enumerate(photographs):
        spoil, word = list(BAD.values())[n % len(BAD)]
        result = spoil(im) if spoil else EDITS["invert"](photographs[(n + 1) % 20])
        verdict = judge(np.asarray(result), np.asarray(im))
        assert not verdict.kept, (n, verdict)
        # what is shifted or zoomed a lot may also look like another thing
        assert verdict.why.startswith((word, "of something else")), (n, verdict)


def model(effect=EDITS["invert"], area=96 * 96):
    "A stand-in for a trainer: `asked` has the instructions."
    asked = []
    geometry = Geometry(control_area=area)

    def predict(image, prompt, width, height, progress, **sampling):
        asked.append((prompt, sampling))
        return np.asarray(effect(image.resize((width, height), Image.Resampling.LANCZOS)))
    return SimpleNamespace(geometry=lambda: geometry, predict=predict, asked=asked)


@pytest.fixture
def finished(tmp_path, photographs):
    "A folder with five finished images of several shapes."
    folder = tmp_path/"finished"
    folder.mkdir()
    for n, im in enumerate(photographs[:5]):
        im.crop((0, 0, SIDE, SIDE - 30 * n)).save(folder/f"{n}.png")
    return folder


def test_the_pairs_are_a_data_set_with_the_forward_instruction(finished, tmp_path):
    t = model()
    made = pairs_from_results(t, finished, UNDO, DO, tmp_path/"pairs", num_inference_steps=4, seed=3)
    assert t.asked == [(UNDO, dict(num_inference_steps=4, seed=3))] * 5
    samples = config_samples(DataSection(dataset_path=str(tmp_path/"pairs")))
    assert [s.prompt for s in samples] == [DO] * 5 and all(len(s.controls) == 1 for s in samples)
    assert made.summary() == "5 of 5 results are pairs now"


def test_both_sides_show_exactly_the_same(finished, tmp_path):
    pairs_from_results(model(), finished, UNDO, DO, tmp_path/"pairs")
    for sample in config_samples(DataSection(dataset_path=str(tmp_path/"pairs"))):
        before, after = Image.open(sample.controls[0]), Image.open(sample.target)
        assert before.width / before.height == pytest.approx(after.width / after.height, rel=0.02)
        true = EDITS["invert"](after.resize(before.size, Image.Resampling.LANCZOS))
        assert np.abs(np.asarray(before, int) - np.asarray(true, int)).mean() < 3


def test_what_is_rejected_is_no_pair_and_is_shown_with_its_reason(finished, tmp_path):
    made = pairs_from_results(model(effect=lambda im: im), finished, UNDO, DO, tmp_path/"pairs")
    assert made.summary() == "0 of 5 results are pairs now, 5 unchanged"
    assert not list((tmp_path/"pairs").rglob("training_images/*"))
    assert len(list((tmp_path/"pairs"/REJECTED).iterdir())) == 10
    page = made.html()
    assert page.count("unchanged: ") == 5 and page.count("<img") == 10
    assert "unchanged" in repr(made)


def test_a_session_that_ended_goes_on_where_it_was(finished, tmp_path):
    t = model()
    whole = t.predict

    def dies(*args, **kw):
        if len(t.asked) == 2:
            raise KeyboardInterrupt
        return whole(*args, **kw)
    t.predict = dies
    with pytest.raises(KeyboardInterrupt):
        pairs_from_results(t, finished, UNDO, DO, tmp_path/"pairs")
    with open(tmp_path/"pairs"/RECORD, "a") as record:
        record.write('{"name": "2", "sou') # as a kill leaves it
    t.predict = whole
    made = pairs_from_results(t, finished, UNDO, DO, tmp_path/"pairs")
    assert len(t.asked) == 5 and len(made.pairs) == 5 and len(read_record(tmp_path/"pairs")) == 5
    again = pairs_from_results(t, finished, UNDO, DO, tmp_path/"pairs")
    assert len(t.asked) == 5 and again.summary() == made.summary()


def test_another_undo_or_another_image_is_made_again(finished, tmp_path):
    t = model()
    pairs_from_results(t, finished, UNDO, DO, tmp_path/"pairs")
    Image.open(finished/"0.png").transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(finished/"0.png")
    pairs_from_results(t, finished, UNDO, DO, tmp_path/"pairs")
    assert len(t.asked) == 6
    pairs_from_results(t, finished, "take the effect away", DO, tmp_path/"pairs")
    assert len(t.asked) == 11


def test_another_instruction_is_written_and_a_worse_result_is_no_pair_any_more(finished, tmp_path):
    t = model()
    pairs_from_results(t, finished, UNDO, DO, tmp_path/"pairs")
    pairs_from_results(t, finished, UNDO, "turn it over", tmp_path/"pairs")
    data = DataSection(dataset_path=str(tmp_path/"pairs"))
    assert {s.prompt for s in config_samples(data)} == {"turn it over"}
    worse = pairs_from_results(model(effect=lambda im: im), finished, "take it away", DO, tmp_path/"pairs")
    assert worse.summary().startswith("0 of 5")
    assert not [p for p in (tmp_path/"pairs").glob("*_images/*")]


def test_a_home_folder_is_understood_in_every_session(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    t = model()
    for _ in range(2):
        pairs_from_results(t, "~/finished", UNDO, DO, "~/pairs")
    assert len(t.asked) == 5 and (tmp_path/"pairs"/RECORD).is_file()


def test_what_the_user_has_removed_is_not_shown(finished, tmp_path):
    pairs_from_results(model(), finished, UNDO, DO, tmp_path/"pairs")
    (tmp_path/"pairs"/"control_images"/"0.png").unlink()
    page = pairs_from_results(model(), finished, UNDO, DO, tmp_path/"pairs").html()
    assert page.count("<img") == 8


def test_equal_stems_become_two_pairs(photographs, tmp_path):
    folder = tmp_path/"finished"
    folder.mkdir()
    photographs[0].save(folder/"a.png")
    photographs[1].save(folder/"a.jpg")
    pairs_from_results(model(), folder, UNDO, DO, tmp_path/"pairs")
    samples = config_samples(DataSection(dataset_path=str(tmp_path/"pairs")))
    assert [s.id for s in samples] == ["a_jpg", "a_png"]


def test_hostile_names_and_reasons_are_escaped(photographs, tmp_path):
    folder = tmp_path/"finished"
    folder.mkdir()
    photographs[0].save(folder/"<img src=x onerror=alert(1)>.png")
    page = pairs_from_results(model(), folder, UNDO, DO, tmp_path/"pairs").html()
    assert "<img src=x" not in page and "&lt;img src=x" in page


@pytest.mark.parametrize("change, message", [
    (dict(undo=" "), "`undo` is empty"), (dict(instruction=""), "`instruction` is empty"),
    (dict(folder="nowhere"), "'nowhere' is no folder"), (dict(folder="empty"), "contains no image"),
    (dict(out="full"), "already exists and is not empty"),
])
def test_mistakes_are_refused_before_anything_is_made(change, message, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"empty").mkdir()
    (tmp_path/"full").mkdir()
    (tmp_path/"full"/"mine.txt").write_text("x")
    t = model()
    given = dict(folder=str(finished), undo=UNDO, instruction=DO, out="pairs") | change
    with pytest.raises(ValueError, match=message):
        pairs_from_results(t, **given)
    assert not t.asked and (tmp_path/"full"/"mine.txt").read_text() == "x"


def test_the_record_is_plain_json(finished, tmp_path):
    pairs_from_results(model(), finished, UNDO, DO, tmp_path/"pairs")
    lines = [line for line in (tmp_path/"pairs"/RECORD).read_text().splitlines() if line]
    assert all(set(json.loads(line)) >= {"name", "kept", "why"} for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("undo, instruction, verdict, words", [
    ("make it darker", "make it brighter", "right", "the pairs are in the right direction"),
    ("make it darker", "make it darker", "swapped", "the pairs are swapped")])
def test_the_model_judges_the_direction(undo, instruction, verdict, words, tmp_path, monkeypatch):
    "An instruction that leads back is named; the size is that of the trainer's settings."
    monkeypatch.setattr(backward_pairs, "_direction", judge_direction)
    (tmp_path/"finished").mkdir()
    for n, im in enumerate(crops(4, (96, 96), seed=5)):
        EDITS["brighter"](im).save(tmp_path/"finished"/f"{n}.png")
    trainer = QwenImageEditTrainer(dict(preset="tiny", train=dict(output_dir=str(tmp_path/"run")),
                                        cache=dict(cache_dir=str(tmp_path/"cache"))))
    made = pairs_from_results(trainer, tmp_path/"finished", undo, instruction, tmp_path/"pairs", num_inference_steps=8)
    assert made.direction.verdict == verdict and made.data()["direction"] == verdict
    assert words in repr(made) and words in made.html()


@pytest.mark.parametrize("direction, kept, asked", [(4, 5, [4]), (0, 5, []), (4, 2, []), (10, 5, [5])])
def test_few_pairs_are_not_judged(direction, kept, asked, finished, tmp_path, monkeypatch):
    counts = []
    monkeypatch.setattr(backward_pairs, "_direction", lambda trainer, out, n: counts.append(n))
    for image in sorted(finished.iterdir())[kept:]:
        image.unlink()
    pairs_from_results(model(), finished, UNDO, DO, tmp_path/"pairs", direction)
    assert counts == asked
