"""Shift, zoom and rotation are found under any edit, and None where the images do not tell; aligned copies agree, and every result is kept."""
import json, math

import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps

from qie_nb.data import alignment, alignment_check
from qie_nb.data.alignment import Alignment, displacement, measure_alignment, resampled
from qie_nb.data.alignment_check import CheckedPair, align_pairs, aligned_images, alignment_mark, check_alignment, check_pair, sampled_alignment
from qie_nb.data.samples import Sample, Samples, find_samples
from qie_nb.tiny.photos import EDITS, crops, photos
from qie_nb.widgets.sample_viewer import SampleViewer

AFFINE, BICUBIC = Image.Transform.AFFINE, Image.Resampling.BICUBIC


def photo(n=0, size=(232, 192)): return photos("held_out")[n].resize(size, Image.Resampling.LANCZOS)


def pair(dx=0., dy=0., sx=1., sy=1., degrees=0., n=0, margin=16): # control and target, cut from a larger photograph
    im = photo(n)
    a = math.radians(degrees)
    back = np.linalg.inv(np.diag([sx, sy]) @ [[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]])
    c = np.array(im.size) / 2
    moved = im.transform(im.size, AFFINE, np.c_[back, c - back @ (c + (dx, dy))].ravel(), BICUBIC)
    box = (margin, margin, im.width - margin, im.height - margin)
    return im.crop(box), moved.crop(box)


def near(found, dx=0., dy=0., sx=1., sy=1., degrees=0.):
    truth = (dx, dy, sx, sy, degrees)
    return found.known and all(abs(f - t) <= limit for f, t, limit in zip(found, truth, (0.5, 0.5, 0.003, 0.003, 0.3)))


def style(im):
    noise = np.random.default_rng(0).normal(0, 20, (im.height, im.width, 1))
    return Image.fromarray((np.asarray(im.filter(ImageFilter.MedianFilter(3))) + noise).clip(0, 255).astype(np.uint8))


def inpainted(im):
    im = im.copy()
    im.paste(photo(1).crop((40, 40, 120, 120)), (20, 30))
    return im


def mirrored(im):
    im, box = im.copy(), (0, 0, im.width // 2, im.height)
    im.paste(ImageOps.mirror(im.crop(box)), box)
    return im


EDITED = dict(invert=EDITS["invert"], sepia=EDITS["sepia"], blur=lambda im: im.filter(ImageFilter.GaussianBlur(1.5)), posterize=lambda im: ImageOps.posterize(im, 2), inpainted=inpainted, style=style,
              mirrored=mirrored, nothing=lambda im: im)


# --- one pair
@pytest.mark.parametrize("edit", EDITED)
def test_a_known_motion_is_found_under_every_edit(edit):
    truth = (4.5, -3., 1.015, 0.99, 0.8)
    control, target = pair(*truth)
    found = measure_alignment(control, EDITED[edit](target))
    assert near(found, *truth), found
    same = measure_alignment(control, EDITED[edit](control))
    assert near(same), same
    assert edit not in ("invert", "sepia") or same.changed > 0.2
    assert edit != "nothing" or same.changed == 0 and found.changed < 0.02
    assert edit != "inpainted" or abs(same.changed - 6400 / math.prod(control.size)) < 0.06 and abs(found.changed - same.changed) < 0.05


def test_the_convention_of_signs():
    control = photo()
    assert near(measure_alignment(control, control.rotate(2, BICUBIC)), degrees=2.), "as PIL's rotate"
    right = control.transform(control.size, AFFINE, (1, 0, -5, 0, 1, 2), BICUBIC) # content 5 to the right, 2 up
    assert near(measure_alignment(control, right), 5, -2)
    wider = control.transform(control.size, AFFINE, (1 / 1.03, 0, control.width / 2 * (1 - 1 / 1.03), 0, 1, 0), BICUBIC)
    assert near(measure_alignment(np.asarray(control), np.asarray(wider)), sx=1.03), "arrays too"
    back, valid = resampled(right, Alignment(5., -2., 1., 1., 0.).t, right.size)
    assert np.array_equal(np.asarray(back)[2:, :-5], np.asarray(control)[2:, :-5]) and valid.sum() == (control.height - 2) * (control.width - 5)


def test_a_control_of_another_size_is_resized_first():
    control, target = pair(3., 2.)
    large = control.resize((control.width * 2, control.height * 2), Image.Resampling.LANCZOS)
    assert near(measure_alignment(large, target), 3, 2), "in target pixels"
    assert near(measure_alignment(control, target.resize((300, 240), BICUBIC)), 3 * 300 / target.width, 2 * 240 / target.height)
    a, b = aligned_images(large, target)
    assert b.size == (target.width - 3, target.height - 2) and a.size == (2 * b.width, 2 * b.height) and near(measure_alignment(a, b))


def test_it_says_nothing_where_images_do_not_tell():
    flat, rng = Image.new("RGB", (128, 96), "teal"), np.random.default_rng(1)
    ramp = Image.fromarray(np.tile(np.linspace(0, 255, 128), (96, 1)).astype(np.uint8)).convert("RGB")
    assert measure_alignment(flat, flat) == Alignment(changed=0.) and measure_alignment(flat, Image.new("RGB", (128, 96), "red")) == Alignment(changed=1.)
    noise = lambda: Image.fromarray(rng.integers(0, 255, (96, 128, 3), dtype=np.uint8))
    for control, target in ((ramp, ramp), (noise(), noise()), (photo(0), photo(1)), (photo(0), ImageOps.flip(photo(0)))):
        assert measure_alignment(control, target)[:5] == (None,) * 5
    assert measure_alignment(noise(), noise()).changed is None
    mast = np.full((160, 160, 3), 90, np.uint8) # all evidence near one place
    mast[20:140, 74:86] = np.asarray(photo(1))[20:140, 74:86]
    found = measure_alignment(Image.fromarray(mast), Image.fromarray(mast))
    assert (found.dx, found.sx) == (None, None)


@pytest.mark.parametrize("side, errors, told", [
    (64, (0.05, 0.05, 5e-4, 5e-4, 9e-4), "dx dy sx sy rotation"),
    (64, (0.1, 0.05, 5e-4, 5e-4, 9e-4), ""), # nothing is sure where one number is shaky
    (2048, (0.1, 0.05, 5e-4, 5e-4, 9e-4), "dx dy sx sy rotation"), # of smaller pixels
    (64, (0.05, 0.05, 5e-4, 5e-4, 2e-3), ""),
    (64, (math.inf, 0.05, math.inf, 5e-4, 9e-4), "dy sy rotation"), # no evidence along x
])
def test_a_number_is_told_only_if_its_error_is_small(side, errors, told, monkeypatch):
    measured = np.array([5., -3., 1.01, 1.02, 0.01]), np.array(errors)
    monkeypatch.setattr(alignment, "_located", lambda control, target: measured)
    monkeypatch.setattr(alignment, "_changed", lambda *images: 0.)
    image = Image.new("RGB", (side, side))
    found = measure_alignment(image, image)._asdict()
    known = [name for name, value in found.items() if value is not None]
    assert known == [*told.split(), "changed"]


def test_alpha_and_other_modes_are_opened_as_the_model_sees_them():
    control, target = pair(3.)
    see_through = target.copy()
    see_through.putalpha(255)
    assert near(measure_alignment(control.convert("L"), see_through), 3.)


def test_a_tiny_image_and_a_long_one():
    assert measure_alignment(Image.new("RGB", (5, 4)), Image.new("RGB", (5, 4)))[:5] == (None,) * 5
    long = photo().crop((0, 60, 232, 92))
    assert measure_alignment(long, long).changed == 0


# --- a data set
@pytest.fixture
def folder(tmp_path): # 0000: fits, 0001: 4 px to the right, 0002: flat, 0003: fits
    for name in ("training_images", "control_images"): (tmp_path/"pairs"/name).mkdir(parents=True)
    for n in range(4):
        control, target = pair(4. * (n == 1), n=n % 2)
        if n == 2: control = target = Image.new("RGB", control.size, "white")
        control.save(tmp_path/"pairs"/"control_images"/f"{n:04}.png")
        EDITS["sepia"](target).save(tmp_path/"pairs"/"training_images"/f"{n:04}.png")
        (tmp_path/"pairs"/"training_images"/f"{n:04}.txt").write_text(f"make it old {n}")
    return tmp_path/"pairs"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch): monkeypatch.setenv("QIE_NB_HOME", str(tmp_path/"home"))


def test_the_report_and_kept_results(folder, tmp_path, monkeypatch):
    report = check_alignment(folder)
    assert [p.misfits for p in report.pairs] == [[], ["shifted"], [], []] and [p.id for p in report.untold] == ["0002"]
    assert report.summary() == "1 of 4 pairs is shifted by more than 2 px, 1 cannot be told ('0002')"
    lines = report.lines()
    assert lines[1].startswith("  0001: +4.0 px right,") and [l.split(":")[0].strip() for l in lines[2:]] == ["align", "drop", "keep", "one colour"] and "0001" in report._repr_html_()
    rows = report.data()["pairs"]
    assert [set(r) for r in rows] == [{"id", "dx", "dy", "sx", "sy", "rotation", "changed"}] * 4 and rows[2]["dx"] is None and abs(rows[1]["dx"] - 4) < 0.2 and json.dumps(rows)
    monkeypatch.setattr(alignment_check, "measure_alignment", None) # known by content, also elsewhere
    folder.rename(tmp_path/"moved")
    assert check_alignment(tmp_path/"moved").data() == report.data()


def test_an_interrupted_check_continues(folder, monkeypatch):
    measured, real = [], measure_alignment
    def stopped(control, target):
        if len(measured) == 2: raise KeyboardInterrupt
        measured.append(1)
        return real(control, target)
    monkeypatch.setattr(alignment_check, "measure_alignment", stopped)
    with pytest.raises(KeyboardInterrupt): check_alignment(folder, workers=1)
    monkeypatch.setattr(alignment_check, "measure_alignment", lambda *a: measured.append(1) or real(*a))
    assert len(check_alignment(folder, workers=1).pairs) == 4 == len(measured)


def test_unreadable_images_and_samples_without_a_control(folder):
    (folder/"training_images"/"0000.png").write_bytes(b"\x89PNG broken")
    (folder/"control_images"/"0003.png").unlink()
    report = check_alignment(folder)
    assert len(report.pairs) == 3 and report.alone == 1 and [p.id for p in report.broken] == ["0000"] and report.pairs[0].data()["dx"] is None
    assert report.summary().endswith("1 cannot be told ('0002'), 1 cannot be read ('0000'), 1 without a control")
    alone = Samples([Sample("a", folder/"training_images"/"0001.png", (), "a cat")])
    assert check_alignment(alone).summary() == "no pairs: no sample has a control" and alignment_mark(alone[0], measure=True) == [] and sampled_alignment(alone).pairs == []
    done = align_pairs(folder, folder.parent/"out")
    assert done == dict(aligned=["0001"], copied=["0003"], untold=["0002"], left_out=["0000"])
    out = find_samples(folder.parent/"out", allow_missing_control=True)
    assert {s.id: len(s.controls) for s in out} == {"0001": 1, "0002": 1, "0003": 0}


def test_aligned_copies_load_and_fit_and_originals_stay(folder, tmp_path):
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    (folder/"masks").mkdir()
    mask = Image.new("L", (200, 160))
    mask.paste(255, (104, 40, 124, 60)) # in the target's frame
    mask.save(folder/"masks"/"0001.png")
    out = tmp_path/"out"
    assert align_pairs(folder, out)["aligned"] == ["0001"]
    assert {p: p.read_bytes() for p in before} == before
    samples = find_samples(out)
    assert [s.prompt for s in samples] == [f"make it old {n}" for n in range(4)]
    assert check_alignment(out).misfits == [] and near(measure_alignment(Image.open(samples[1].controls[0]), Image.open(samples[1].target)))
    assert Image.open(samples[1].target).size == Image.open(samples[1].controls[0]).size == (196, 160), "cropped to what both have"
    assert Image.open(samples[1].mask).convert("L").getbbox() == (100, 40, 120, 60), "moved with its target"
    assert samples[0].target.read_bytes() == (folder/"training_images"/"0000.png").read_bytes(), "a pair that fits is copied"
    with pytest.raises(ValueError, match="already exists and is not empty; name a new folder"): align_pairs(folder, out)
    with pytest.raises(ValueError, match="already exists"): align_pairs(folder, folder)


def test_of_two_controls_the_one_that_was_measured_is_corrected(folder, tmp_path):
    "The other one is copied byte by byte."
    pair_of = find_samples(folder)[1]
    flat = folder/"training_images"/"0002.png"
    controls = flat, *pair_of.controls
    samples = Samples([Sample("x", pair_of.target, controls, "make it old")])
    assert align_pairs(samples, tmp_path/"out")["aligned"] == ["x"]
    made, = find_samples(tmp_path/"out")
    first, second = made.controls
    assert first.read_bytes() == flat.read_bytes()
    target = Image.open(made.target)
    assert Image.open(second).size == target.size == (196, 160)
    assert near(measure_alignment(Image.open(second), target))


def test_zoomed_and_turned_pairs_agree_after_alignment():
    control, target = pair(1.5, 0.5, 1.02, 1.01, 1.)
    a, b = aligned_images(control, target)
    found = measure_alignment(a, b)
    assert near(found) and found.changed < 0.01 and a.size == b.size and min(a.size) > 140
    assert aligned_images(control, control) is None and aligned_images(photo(0), photo(1)) is None


def test_shift_without_scale_is_aligned_and_odd_ids_get_names(folder, tmp_path):
    control, target = pair(3.)
    part = aligned_images(control, target, Alignment(3., 0., None, None, None))
    assert part[0].size == (control.width - 3, control.height) and near(measure_alignment(*part))
    s = find_samples(folder)[0]
    align_pairs(Samples([Sample("0/a b", s.target, s.controls, "x"), Sample("0_a_b", s.target, (*s.controls, s.target), "y")]), tmp_path/"out")
    assert {p.relative_to(tmp_path/"out").as_posix() for p in (tmp_path/"out").rglob("*.png")} == {f"{side}/{name}.png" for side in ("training_images", "control_images") for name in ("0_a_b", "0_a_b-2")} | {
        "control_images_2/0_a_b-2.png"}


def test_the_control_that_fits_counts(folder):
    one, two = find_samples(folder)[:2]
    s = Sample("x", two.target, (folder/"training_images"/"0002.png", *two.controls), "")
    assert abs(check_pair(s).alignment.dx - 4) < 0.2 and check_pair(s, known_only=True) == check_pair(s)
    assert check_pair(one, known_only=True) is None, "not measured yet"


def test_words_of_the_report():
    pairs = [CheckedPair("a", Alignment(0, 0, 1.015, 1, 0, 0)), CheckedPair("b", Alignment(2.5, 0, 0.985, None, 0.5, 0)), CheckedPair("c", Alignment(0.1, 0, 1, 1, 0, 0))]
    report = alignment_check.AlignmentReport(pairs)
    assert report.summary() == "1 of 3 pairs is shifted by more than 2 px, 2 are zoomed by about 1.5 %, 1 is turned by more than 0.3 degrees"
    assert str(pairs[1]) == "+2.5 px right, +0.0 px down, zoom -1.5% x ?, turned by +0.5 degrees"
    assert str(CheckedPair("d", Alignment(6, -0.02, 1, 1, 0, 0))) == "+6.0 px right, +0.0 px down", "never -0.0"
    assert alignment_check.AlignmentReport(pairs[2:]).summary() == "1 of 1 pairs fit" and displacement(Alignment(3, 4, 1, 1, 0), (9, 9)) == pytest.approx(5)


def test_a_small_image_may_be_zoomed_by_half_a_pixel_at_its_edge():
    zoomed = Alignment(0, 0, 1.015, 1.015, 0, 0)
    assert CheckedPair("small", zoomed, size=(60, 50)).misfits == []
    assert CheckedPair("large", zoomed, size=(600, 500)).misfits == ["zoomed"]


def test_pairs_that_cannot_be_read_do_not_fit():
    fits = CheckedPair("a", Alignment(0.1, 0, 1, 1, 0, 0))
    report = alignment_check.AlignmentReport([fits, CheckedPair("b", problem="it is no image")])
    assert report.summary() == "1 of 2 pairs fit, 1 cannot be read ('b')"


def test_odd_values_are_counted_among_the_images_that_were_read(tmp_path):
    flat, whole = tmp_path/"flat.png", tmp_path/"whole.png"
    Image.new("RGB", (64, 48), "white").save(flat)
    photo(0, (64, 48)).save(whole)
    samples = [Sample(f"{n}", flat, (whole,), "x") for n in range(9)]
    few, = alignment_check.sampled_contents(samples, most=3)
    assert few.startswith("one colour: 3 of 3 pairs (")
    two_images = 2 * 64 * 48 / 1e6
    fewer, = alignment_check.sampled_contents(samples, most=3, megapixels=1.5 * two_images)
    assert fewer.startswith("one colour: 2 of 2 pairs ("), "fewer are read if they are large"


def test_less_than_a_pixel_is_left_as_it_is():
    control, target = pair(0.6)
    assert aligned_images(control, target, Alignment(0.6, 0., 1., 1., 0.)) is None
    assert aligned_images(control, target, Alignment(0.9, 0., 1., 1., 0.)) is not None


def test_a_control_of_another_size_is_cut_where_the_target_is():
    control, target = pair(4.)
    twice = control.resize((2 * control.width, 2 * control.height), BICUBIC)
    cut, moved = aligned_images(twice, target, Alignment(4., 0., 1., 1., 0.))
    assert moved.size == (control.width - 4, control.height) and cut.size == (2 * moved.width, 2 * moved.height)
    assert near(measure_alignment(cut, moved))
    back, other = aligned_images(target.resize(twice.size, BICUBIC), control, Alignment(-4., 0., 1., 1., 0.))
    assert near(measure_alignment(back, other)), "the left edge is cut off the control as well"


def test_names_of_copies_differ_where_case_does_not_count(folder, tmp_path):
    s = find_samples(folder)[0]
    align_pairs(Samples([Sample(id, s.target, s.controls, "x") for id in ("img", "IMG")]), tmp_path/"out")
    assert sorted(p.stem for p in (tmp_path/"out"/"training_images").glob("*.png")) == ["IMG-2", "img"]


def test_pairs_without_captions_are_copied_without_them(folder, tmp_path):
    for caption in (folder/"training_images").glob("*.txt"):
        caption.unlink()
    assert align_pairs(folder, tmp_path/"out")["aligned"] == ["0001"]
    assert not list((tmp_path/"out").rglob("*.txt"))


# --- where it is shown
def test_the_viewer_marks_known_misfits_and_measures_on_demand(folder, monkeypatch):
    viewer = SampleViewer(str(folder))
    viewer.find("0001")
    monkeypatch.setattr(alignment_check, "measure_alignment", None)
    assert viewer.data()["marks"] == [], "opening measures nothing"
    monkeypatch.undo()
    viewer.select("misaligned")
    assert viewer.filters()["misaligned"] == 1 and viewer.data()["id"] == "0001"
    (mark, why), = viewer.data()["marks"]
    assert mark == alignment_check.MISALIGNED and why.startswith("target against control: +4.0 px right") and mark in viewer.page()


def test_the_doctor_looks_at_a_few_pairs(folder):
    from qie_nb.config import make_config
    from qie_nb.planning.doctor import data_findings
    config = make_config(dict(data=dict(dataset_path=str(folder))))
    found, = [f for f in data_findings(config) if f.what == "alignment"]
    assert found.level == "warning" and found.value.startswith("1 of ") and "qie-nb check FOLDER" in found.remedy
    (folder/"control_images"/"0001.png").write_bytes((folder/"training_images"/"0001.png").read_bytes())
    found, = [f for f in data_findings(config) if f.what == "alignment"]
    assert found.level == "ok" and "no misfit found" in found.value
