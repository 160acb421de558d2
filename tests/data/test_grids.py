"""Token grids of target and control: equal by default at equal areas, reported with a remedy where they are not, and matched on request."""
import itertools, math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from qie_nb.config import make_config
from qie_nb.data.dataset import ImageDataset
from qie_nb.data.alignment import grid_difference, grid_remedies, grid_warning
from qie_nb.data.images import Geometry, calculate_dimensions
from qie_nb.data.pair_checks import GRIDS, STRETCHED, grid_summary, size_warnings
from qie_nb.lora import adapters as lora
from qie_nb.planning.doctor import grid_findings
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer

SIZES = [s for s in itertools.product(range(600, 2000, 61), repeat=2) if max(s) < 3 * min(s)]
HALF = Geometry((512, 512))


@pytest.mark.parametrize("area", [512, 768, 1024])
def test_grids_are_equal_at_equal_areas(area):
    g = Geometry((area, area), control_area=area**2)
    assert not [s for s in SIZES if g.target(s) != g.control(s) or grid_warning(g, s, s)]


def test_sizes_without_the_setting_are_the_pipelines_rule():
    assert [HALF.target(s) for s in ((1600, 1200), (1920, 1080), (640, 427))] == [(576, 448), (672, 384), (640, 416)]
    for s in SIZES:
        assert HALF.target(s) == calculate_dimensions(512**2, s[0] / s[1])
        assert HALF.control(s) == replace(HALF, match_grids=True).control(s) == calculate_dimensions(1024**2, s[0] / s[1])


def test_matched_grids_have_equal_proportions():
    matched, plain = replace(HALF, match_grids=True), [abs(grid_difference(HALF.target(s), HALF.control(s))) for s in SIZES]
    assert sum(d > 0.005 for d in plain) > len(SIZES) / 2, "without it most differ"
    for s in SIZES:
        t, c = matched.target(s), matched.control(s)
        assert (2 * t[0], 2 * t[1]) == c and t[0] % 16 == t[1] % 16 == 0 and math.prod(t) == pytest.approx(512**2, rel=0.1)
    for area in (640, 768): # no whole factor: nearer, not equal
        off = [[abs(grid_difference(g.target(s), g.control(s))) for s in SIZES] for g in (Geometry((area, area)), Geometry((area, area), match_grids=True))]
        assert np.mean(off[1]) < 0.7 * np.mean(off[0])


@pytest.mark.parametrize("g, text", [
    (HALF, "the control has 74 x 56 tokens beside a target of 36 x 28: 2.8 % wider; with `data.control_area` 262144 or `data.match_grids` true they agree"),
    (Geometry((1184, 880), crop=True), "the control has 74 x 56 tokens beside a target of 74 x 55: 1.8 % narrower; with `data.image_size` [1184, 896] they agree"),
    (Geometry((512, 384), crop=True), "the control has 74 x 56 tokens beside a target of 32 x 24: 0.9 % narrower; with `data.image_size` [592, 448] or `data.control_area` 196608 they agree")])
def test_a_difference_is_said_with_settings_that_remove_it(g, text):
    photo = 1600, 1200
    assert grid_warning(g, photo, photo) == text
    for remedy in grid_remedies(g, photo, photo):
        name, value = remedy.removeprefix("`data.").split("` ")
        value = True if value == "true" else tuple(map(int, value.strip("[]").split(","))) if "[" in value else int(value)
        assert grid_warning(replace(g, **{name: value}), photo, photo) == ""


def test_only_controls_of_the_targets_shape_are_compared():
    marks = lambda *sizes, g=HALF: [m for m, _ in size_warnings(sizes, g)]
    assert marks((1600, 1200), (1600, 1200)) == marks((1600, 1200), (900, 1600), (800, 600)) == [GRIDS]
    assert GRIDS not in marks((1600, 1200), (1000, 1000)) + marks((1600, 1200)), "another shape, or no control"
    assert marks((48, 32), (48, 32), g=Geometry((64, 64), control_area=96 * 96)) == [STRETCHED] * 2, "one of both says enough"
    assert grid_summary([[(1024, 1024)] * 2], HALF) == "" and grid_summary([[(1024, 1024)] * 2, [(1600, 1200)] * 2], HALF).startswith("1 of 2 pairs differ, e.g. the control has 74")


def photos(root, sizes):
    for folder in ("training_images", "control_images"):
        (root/folder).mkdir(parents=True)
        for i, size in enumerate(sizes): Image.new("RGB", size, (i, 9, 9)).save(root/folder/f"{i}.png")
    return str(root)


def test_a_data_set_and_the_doctor_say_so(tmp_path):
    root, why = photos(tmp_path/"set", [(320, 240), (300, 300)]), "the control has 74 x 56 tokens beside a target of 36 x 28: 2.8 % wider"
    d = ImageDataset(dict(dataset_path=root, image_size=512, prompt="x"))
    assert f"token grids differ: 1 of 2 pairs ('0'), e.g. {why}" in d.size_marks()
    c = make_config(dict(model=dict(pretrained_model_name_or_path="Qwen/Qwen-Image-Edit-2511"), data=dict(dataset_path=root, image_size=512, prompt="x")))
    [found] = grid_findings(c)
    assert found.level == "warning" and f"token grids 1 of 2 pairs differ, e.g. {why}: with `data.control_area` 262144" in found.sentence
    c.data.match_grids = True
    assert grid_findings(c) == [] and "token grids" not in ImageDataset(c.data).size_marks()


def test_the_setting_changes_only_keys_of_targets_of_another_size(tmp_path):
    root = photos(tmp_path/"set", [(320, 240)])
    identity = dict(text_encoder="t", vae="v", model="m", variant="2511", dtype="float32", processor="p", template="t", quantize="none")
    def keys(**data):
        d = ImageDataset(dict(dataset_path=root, prompt="x", **data))
        d.refresh(identity)
        return {name: e.key for name, e in d.keys(0).items()}
    same, other = ({k for k, v in keys(image_size=side).items() if v != keys(image_size=side, match_grids=True)[k]} for side in (1024, 512))
    assert same == set() and other == {"pixel_latent"}


def test_predict_uses_the_trained_geometry(tmp_path):
    from loras import trained
    file = lora.save_lora(trained(), tmp_path, dict(control_area=128 * 128, vl_area=112 * 112))
    t = QwenImageEditTrainer(dict(model=dict(pretrained_model_name_or_path=str(tiny_folder("2511"))), train=dict(device="cpu", mixed_precision="no")))
    image = Image.new("RGB", (60, 40), "teal")
    g = t.load_lora(file).geometry()
    assert (g.control_area, g.vl_area) == (128 * 128, 112 * 112)
    seen = []
    t.setup_predict()
    t.transformer.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["img_shapes"][0]), with_kwargs=True)
    result = t.predict(image, "x", num_inference_steps=2, true_cfg_scale=1)
    w, h = g.control(image.size)
    assert result.shape[:2] == (h, w) and [tuple(s) for s in seen[0]] == [(1, h // 16, w // 16)] * 2, "the result's grid is its control's"
