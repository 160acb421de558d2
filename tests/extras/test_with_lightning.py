"""With and without Lightning: columns equal `predict`, planted grid lines are found, refusals."""
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from qie_nb.evaluation.compare import BASE, Column
from qie_nb.extras.with_lightning import (
    FOUND, LEAST_SIDE, PERIOD, Measured, advice, effect_of, grid_lines, made_for, measured,
    next_strength, with_lightning)
from qie_nb.lora.formats import read_lora
from qie_nb.lora.adapters import write_lora
from qie_nb.tiny.photos import EDITS, PHOTOS, crops, make_pairs, photos
from qie_nb.trainer import QwenImageEditTrainer
from helpers import close_images, settings
from test_mixing import IMAGE, files, same_state, state_of, trainer, write # noqa: F401 (fixtures)

OTHERS = (8, 12, 15, 17, 24)
SIZE = dict(height=48, width=64)
FEW = SIZE | dict(num_inference_steps=2, progress=False)
SPLITS = ("train", "held_out") # the package's own photographs


def planted(image, period, height, axes=(0, 1), start=0):
    "Bright lines of one pixel; grey levels."
    lines = np.zeros(image.shape[:2])
    for axis in axes:
        np.moveaxis(lines, axis, 0)[start::period] = height
    return (image + lines[..., None]).clip(0, 255).round().astype(np.uint8)


# --- grid lines
@pytest.fixture(scope="module")
def whole():
    "The package's photographs; no side of two of them is a multiple of 16."
    found = {}
    for split in SPLITS:
        found |= {name: np.asarray(im) for name, im in zip(PHOTOS[split], photos(split))}
    assert any(size % PERIOD for im in found.values() for size in im.shape[:2])
    return found


def test_photographs_have_no_grid_lines(whole):
    ratios = {name: grid_lines(im).ratio for name, im in whole.items()}
    assert max(ratios.values()) < FOUND / 2, ratios
    many = [*crops(60, (160, 144), seed=1), *crops(60, (160, 144), seed=1, split="held_out")]
    assert not any(grid_lines(np.asarray(im)).found for im in many)


@pytest.mark.parametrize("start", [0, 5])
def test_planted_lines_are_found_and_grow(whole, start):
    for name, im in whole.items():
        got = [grid_lines(planted(im, PERIOD, height, start=start)) for height in (0, 1, 2, 4, 8)]
        strengths = [one.strength for one in got]
        assert all(one.found for one in got[2:]) and not got[0].found, (name, got)
        assert strengths == sorted(strengths), (name, strengths)
        assert 0.7 < strengths[4] / 8 < 1.2, (name, strengths)
    faint = [grid_lines(planted(im, PERIOD, 1, start=start)).found for im in whole.values()]
    assert sum(faint) >= 5, "a single grey level: most photographs"


@pytest.mark.parametrize("period", OTHERS)
def test_other_periods_are_not_found(whole, period):
    for name, im in whole.items():
        for height in (1, 2, 4, 8):
            assert not grid_lines(planted(im, period, height)).found, (name, height)


def test_directions_are_told_apart(whole):
    im = whole["astronaut.jpg"]
    across = grid_lines(planted(im, PERIOD, 4, axes=[0]))
    down = grid_lines(planted(im, PERIOD, 4, axes=[1]))
    assert across.rows > 3 and across.columns < 1.5
    assert down.columns > 3 and down.rows < 1.5


def test_flat_small_and_odd_images():
    for grey in (0, 128, 255):
        assert grid_lines(np.full((200, 120, 3), grey, np.uint8)) == (0, 0, 0)
    flat = np.full((203, 117, 3), 100, np.uint8)
    assert grid_lines(planted(flat, PERIOD, 1)).found
    assert abs(grid_lines(planted(flat, PERIOD, 2)).strength - 2) < 0.3
    small = planted(np.full((LEAST_SIDE - 1, 40, 3), 100, np.uint8), PERIOD, 8)
    assert grid_lines(small) == (0, 0, 0), "too few periods"
    thin = np.full((1, 300, 3), 100, np.uint8)
    assert not grid_lines(thin).found


def test_noise_and_steps_are_no_grid():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 255, (160, 160, 3), dtype=np.uint8)
    assert not grid_lines(noise).found
    edge = np.zeros((160, 160, 3), np.uint8)
    edge[:, 81:] = 255
    assert not grid_lines(edge).found


def test_a_pattern_of_the_photograph_is_not_blamed_on_the_model(whole):
    blind = planted(whole["rocket.jpg"], PERIOD, 12, axes=[0])
    edits = dict(kept=blind, darker=np.asarray(EDITS["darker"](Image.fromarray(blind))),
                 contrast=np.asarray(EDITS["contrast"](Image.fromarray(blind))))
    for name, edit in edits.items():
        assert grid_lines(edit).found, name
        assert not grid_lines(edit, [blind]).found, name
    added = planted(blind, PERIOD, 4, axes=[1])
    assert grid_lines(added, [blind]).found, "lines in the other direction are the model's"
    plain = whole["rocket.jpg"]
    assert grid_lines(planted(plain, PERIOD, 4), [plain]).found


# --- other measures
def test_effect_is_the_share_of_the_way():
    without, reference = (np.asarray(im).astype(float) for im in crops(2, (96, 96), seed=2))
    for share in (0, 0.5, 1):
        image = (without + share * (reference - without)).round().astype(np.uint8)
        got = effect_of(image, without.astype(np.uint8), reference.astype(np.uint8))
        assert math.isclose(got, share, abs_tol=0.02)
    same = without.astype(np.uint8)
    assert effect_of(same, same, same) is None
    nearly = same.copy()
    nearly[:12] ^= 1 # one grey level in an eighth of the image
    assert effect_of(nearly, same, nearly) is None, "of less than half a grey level no share can be told"
    assert effect_of(same ^ 1, same, same ^ 1) == 1


@pytest.mark.parametrize("given", [True, False], ids=["images after", "your LoRA alone"])
def test_effects_are_counted_from_the_column_without_lora(given):
    without, after = (np.asarray(im).astype(float) for im in crops(2, (96, 96), seed=2))
    shares = (0., 0.8, 0.4) # of the way to the image after: without, yours alone, with Lightning
    row = [(without + share * (after - without)).round().astype(np.uint8) for share in shares]
    columns = [Column("x", BASE), Column("y", "latest"), Column("z", "latest", few_steps="fast")]
    comparison = SimpleNamespace(
        columns=columns, images=[row], targets=[after.astype(np.uint8)] if given else [],
        edits=[SimpleNamespace(images=[Image.fromarray(row[0])])], drift=[[{}] * 3])
    effects = [m.effect for m in measured(comparison)]
    assert np.allclose(effects, shares if given else [0, 1, 0.5], atol=0.02)


def column(**changes):
    usual = dict(title="x", steps=8, strength=1., few_steps_strength=1., error=10., colour=1.,
                 effect=1., place="", grid=0., gridded=0.)
    return Measured(**usual | changes)


ALONE = column(steps=20, few_steps_strength=0., error=9.)


@pytest.mark.parametrize("fast, alone, sentence", [
    ([column(error=12.)], ALONE, "Use 8 steps, your LoRA at 1 and Lightning at 1: error 12.0"),
    ([column(error=12.), column(steps=4, error=11.)], ALONE, "Use 4 steps"),
    ([column(gridded=0.4), column(steps=4, error=9., gridded=1.)], ALONE, "Use 8 steps"),
    ([column(gridded=1., grid=2.)], ALONE, "Every column with Lightning has grid lines (2.0"),
    ([column(gridded=1.)], ALONE._replace(gridded=1.), "Your LoRA makes grid lines without"),
    ([column(effect=0.8)], ALONE, "lora_strengths=[1.25]"),
    ([column(effect=0.8, strength=1.25)], ALONE, "lora_strengths=[1.5]"),
    ([column(effect=1.25)], ALONE,
     "stronger (effect 125 % with 8 steps, your LoRA at 1 and Lightning at 1; 100 % without): try "
     "lora_strengths=[0.8]"),
    ([column(effect=0.6)], ALONE._replace(effect=0.75), "lora_strengths=[1.25]"),
    ([column(effect=0.6)], ALONE._replace(effect=1.4), "lora_strengths=[1.5]"),
    ([column(effect=1.)], ALONE._replace(effect=1.4), "Use 8 steps"),
    ([column(effect=0.7, error=8.)], ALONE, "Use 8 steps"),
    ([column(effect=0.7)], ALONE._replace(effect=-0.2),
     "hardly anything without Lightning, too (effect -20 %)"),
    ([column(effect=None)], ALONE, "Use 8 steps"),
    ([column(colour=8.)], ALONE, "colours are off by 8.0")], ids=str)
def test_the_advice_follows_from_the_numbers(fast, alone, sentence):
    said = advice([ALONE, alone, *fast])
    assert sentence in said and said.endswith(".") and "\n" not in said


def test_strengths_to_try_have_limits():
    assert next_strength(column(effect=0.01)) == 1.5 and next_strength(column(effect=9.)) == 0.5
    assert next_strength(column(effect=0.95, strength=1.1)) == 1.1
    assert next_strength(column(effect=0.5), 0.4) == 0.8


# --- columns
@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A LoRA for few steps as others publish it.

    Its ranks and layers are others, the modulation among them; its name alone says what it is."""
    folder = tmp_path_factory.mktemp("published")
    layers = ["to_q", "to_out.0", "img_mod.1", "img_mlp.net.2"]
    made = write(folder/"made.safetensors", 9, r=6, lora_alpha=3, target_modules=layers)
    state, config = read_lora(made)[:2]
    name = "Qwen-Image-Edit-2511-Lightning-4steps-V1.0-bf16.safetensors"
    return write_lora(folder/name, state, config, {})


def predicted(files, published, steps, strength=1., speed=1., **more):
    "What `predict` makes with the same files."
    t = trainer()
    loras = {files["style"]: strength, published: speed}
    t.load_loras({path: weight for path, weight in loras.items() if weight})
    how = SIZE | dict(num_inference_steps=steps, seed=3, progress=False)
    return t.predict(IMAGE, "make it blue", **how | more)


@pytest.mark.slow
def test_columns_equal_predict(files, published):
    t = trainer()
    before = t.active_adapters()
    got = with_lightning(t, published, IMAGE, "make it blue", lora=files["style"],
                         lora_strengths=[1, 1.25], lightning_strengths=[0.8], seed=3, **FEW)
    assert got.columns[0].effect == 0 and got.columns[1].effect == pytest.approx(1)
    made = got.comparison.images[0]
    assert close_images(made[0], predicted(files, published, 2, strength=0, speed=0), 2)
    assert close_images(made[1], predicted(files, published, 2, speed=0), 2)
    shown = [(c.steps, c.strength, c.few_steps_strength) for c in got.columns[2:]]
    assert shown == [(8, 1, 0.8), (8, 1.25, 0.8), (4, 1, 0.8), (4, 1.25, 0.8)]
    for image, (steps, strength, speed) in zip(made[2:], shown, strict=True):
        assert close_images(image, predicted(files, published, steps, strength, speed), 2)
        assert not close_images(image, predicted(files, published, steps, strength, 0), 2)
    assert t.active_adapters() == before == {}
    columns = got.comparison.columns
    how = [(c.true_cfg_scale, dict(c.scheduler).get("shift_terminal", "own")) for c in columns]
    assert how == [(4, "own")] * 2 + [(1, None)] * 4, "Lightning's own sampling"


def test_four_steps_are_what_predict_does_by_itself(files, published):
    "`predict` finds the schedule by itself when both are loaded."
    t = trainer().load_loras({files["style"]: 1., published: 1.})
    own = t.predict(IMAGE, "make it blue", seed=3, progress=False, **SIZE)
    got = with_lightning(trainer(), {4: published}, IMAGE, "make it blue", lora=files["style"],
                         seed=3, **FEW)
    assert len(got.columns) == 3 and close_images(got.comparison.images[0][2], own, 2)


def test_the_active_lora_is_compared_and_kept(files, published):
    t = trainer().load_loras([dict(path=files["style"], weight=0.7, name="mine")])
    got = with_lightning(t, published, IMAGE, "make it blue", steps=[4], seed=3, **FEW)
    assert t.active_adapters() == dict(mine=0.7)
    made = got.comparison.images[0][2]
    assert close_images(made, predicted(files, published, 4, strength=0.7), 2)


def test_a_trainer_is_unchanged_after_an_error(files, published, monkeypatch):
    t = trainer(model=dict(modulation_table=False)).load_loras({files["style"]: 1.})
    before = state_of(t)

    def fails(*_, **__):
        raise KeyboardInterrupt
    monkeypatch.setattr("qie_nb.evaluation.compare.denoise_encoded", fails)
    with pytest.raises(KeyboardInterrupt):
        with_lightning(t, published, IMAGE, "x", progress=False, **SIZE)
    assert same_state(before, state_of(t))


@pytest.mark.slow
def test_held_out_pairs_are_the_default(files, published, tmp_path):
    data = make_pairs(tmp_path/"pairs", "duotone", 6, size=(48, 48))
    t = trainer(data=dict(dataset_path=str(data), image_size=[48, 48]),
                train=dict(val_fraction=0.4, output_dir=str(tmp_path/"out")),
                cache=dict(cache_dir=str(tmp_path/"cache")))
    few = dict(num_inference_steps=2, progress=False)
    got = with_lightning(t, {2: published}, lora=files["style"], **few)
    assert [e.prompt for e in got.comparison.edits] == [EDITS["duotone"].instruction] * 2
    assert got.comparison.targets and "error" in got.table()[0] and got.columns[1].error > 1
    assert got.columns[1].effect != pytest.approx(1), "against the images after"


@pytest.mark.slow
def test_after_a_run_its_own_lora_is_compared(tmp_path):
    data = make_pairs(tmp_path/"pairs", "duotone", 6)
    config = dict(
        preset="tiny", data=dict(dataset_path=str(data)), cache=dict(cache_dir=str(tmp_path/"cache")),
        train=dict(output_dir=str(tmp_path/"out"), max_train_steps=2, val_fraction=0.3, eval_steps=None),
        logging=dict(report_to="none", panel=False))
    fast = QwenImageEditTrainer(dict(preset="tiny")).set_lora().save_lora(tmp_path/"made.safetensors")
    fast = fast.rename(tmp_path/"tiny-Lightning-4steps.safetensors")
    t = QwenImageEditTrainer(config).fit()
    before = state_of(t)
    got = with_lightning(t, fast, steps=[2], pairs=2, num_inference_steps=2, progress=False)
    assert len(got.columns) == 3 and len(got.comparison.edits) == 2
    assert same_state(before, state_of(t)) and t.active_adapters() == dict(default=1.0)


@pytest.mark.parametrize("data, why", [
    (False, "`data.dataset_path` is not set"),
    (True, "none are held out; set `train.val_fraction`")])
def test_without_images_both_remedies_are_named(data, why, files, published, tmp_path):
    folder = make_pairs(tmp_path/"pairs", "duotone", 2, size=(48, 48))
    t = trainer(data=dict(dataset_path=str(folder)) if data else {},
                train=dict(val_fraction=0., output_dir=str(tmp_path/"out")),
                cache=dict(cache_dir=str(tmp_path/"cache")))
    sentence = f"give `images` and `prompts`, because there are no held-out pairs: {why}"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        with_lightning(t, {2: published}, lora=files["style"])


def test_texts_of_data_are_escaped_and_numbers_are_plain(files, published, tmp_path):
    named = tmp_path/"<i>mine.safetensors"
    named.write_bytes(files["style"].read_bytes())
    got = with_lightning(trainer(), published, IMAGE, "make it <b>blue</b>", [IMAGE], lora=named,
                         steps=[2], **FEW)
    page = got.html()
    assert "<b>blue" not in page and "<i>mine" not in page and "&lt;i&gt;mine + Lightning" in page
    assert got.advice in repr(got) and "2 steps, no guidance" in repr(got)
    data = got.data()
    again = json.loads(json.dumps(dict(columns=data["columns"], advice=data["advice"])))
    assert set(again["columns"][0]) == set(Measured._fields)
    assert data["comparison"]["columns"][2]["few_steps"] == str(published)


# --- refusals
@pytest.mark.parametrize("name, variant", [
    ("Qwen-Image-Edit-2511-Lightning-4steps-V1.0-bf16.safetensors", "2511"),
    ("Qwen-Image-Edit-2509-Lightning-8steps-V1.0-fp32.safetensors", "2509"),
    ("Qwen-Image-Edit-Lightning-4steps-V1.0.safetensors", "v1"),
    ("qwen-image-edit-2511-lightning-4steps.safetensors", "2511"),
    ("Qwen-Image-Lightning-4steps-V2.0.safetensors", ""),
    ("my-Qwen-Image-Edit-2509-dusk.safetensors", "")])
def test_published_files_say_their_model_by_their_names(tmp_path, name, variant):
    assert made_for(tmp_path/name, {}) == variant
    assert made_for(tmp_path/name, dict(variant="v1")) == "v1", "a header is better than a name"


def renamed(published, folder, name):
    "A copy of the file under another name."
    file = folder/f"{name}.safetensors"
    file.write_bytes(published.read_bytes())
    return file


@pytest.mark.parametrize("make, sentence", [
    (lambda f, p, d: dict(lightning=d/"none.safetensors"), "`lightning`: .*does not exist"),
    (lambda f, p, d: dict(lightning=renamed(p, d, "Qwen-Image-Edit-2509-Lightning-4steps")),
     "`lightning` .* made for Qwen/Qwen-Image-Edit-2509, and this model is .*-2511, so"),
    (lambda f, p, d: dict(lightning=write(d/"Lightning-4steps.safetensors", 1, dict(variant="v1"))),
     "was made for Qwen/Qwen-Image-Edit, and"),
    (lambda f, p, d: dict(lightning=f["wide"]), "does not say that it is a LoRA for few steps"),
    (lambda f, p, d: dict(lightning={0: p}), "`steps` must be whole numbers of 1 or more, got 0"),
    (lambda f, p, d: dict(steps=[]), "`steps` is empty"),
    (lambda f, p, d: dict(lora=write(d/"mine.safetensors", 1, dict(variant="2509"))),
     "`lora` .* was made for Qwen/Qwen-Image-Edit-2509"),
    (lambda f, p, d: dict(lora=d/"none.safetensors"), "`checkpoints`|does not exist"),
    (lambda f, p, d: dict(lora=p), "is sampled in 4 steps already"),
    (lambda f, p, d: dict(lora="now"), "no LoRA is active; give `lora`"),
    (lambda f, p, d: dict(lora_strengths=1.2), "`lora_strengths` must be a list .* got 1.2"),
    (lambda f, p, d: dict(lightning_strengths=[math.nan]), "must be a finite number, got nan")])
def test_refused_before_a_model_is_built(make, sentence, files, published, tmp_path, built):
    t = trainer()
    asked = dict(lightning=published, lora=files["style"]) | make(files, published, tmp_path)
    built.clear()
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as error:
        with_lightning(t, images=IMAGE, prompts="x", **asked)
    assert "\n" not in str(error.value) and not built
