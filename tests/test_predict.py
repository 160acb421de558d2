"""`trainer.predict` against the diffusers pipelines; lists of edits, inputs, refusals, previews, and edits from the cache."""
import math, shutil
from functools import lru_cache
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from qie_nb.data.dataset import ImageDataset
from qie_nb.data.images import Geometry, calculate_dimensions
from qie_nb.devices.edit_model import EditModel
from qie_nb.models.components import restore_image_positions
from qie_nb.sampling import denoising, edits
from qie_nb.models.flow_matching import pack_latents
from qie_nb.models.variants.text_to_image import QwenImage
from qie_nb.sampling.denoising import pick_schedule, start_noise
from qie_nb.sampling.edits import Edit, encode_edits
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.step import EMA
from helpers import TRANSFORMER, VAE, close_images, on_call, random_lora, settings, slow, small_areas
from tiny_rig import random_image

CONTROL, VL = 128 * 128, 112 * 112
SIZES, TARGET = ((50, 75), (180, 90), (40, 100)), (144, 80) # (w, h)
PROMPTS, SEEDS = ["make the sky green", "remove the second boat"], [5, 6]
SMALL = dict(num_inference_steps=2, true_cfg_scale=1, width=64, height=32)


def images(n): return [random_image(s, i) for i, s in enumerate(SIZES[:n])]
def folder(variant): return tiny_folder(variant, (CONTROL, VL))


def trainer_of(variant="2511"):
    return QwenImageEditTrainer(dict(model=dict(pretrained_model_name_or_path=str(folder(variant))),
                                     train=dict(device="cpu", mixed_precision="no"), cache=dict(use_cache=False)))


@lru_cache
def ready(variant="2511"): return trainer_of(variant)


@lru_cache
def pipeline(variant):
    pipe = restore_image_positions(DiffusionPipeline.from_pretrained(folder(variant)))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def asked(scale, steps=3): return dict(negative_prompt="blurry", true_cfg_scale=scale, width=TARGET[0], height=TARGET[1], num_inference_steps=steps)


def piped(variant, images, prompt, seed, scale, steps=3):
    kw = asked(scale, steps) | (dict(negative_prompt=None) if scale == 1 else {})
    with small_areas(variant, CONTROL, VL):
        out = pipeline(variant)(image=images[0] if variant == "v1" else images, prompt=prompt, generator=torch.Generator().manual_seed(seed), **kw).images[0]
    assert np.asarray(out).std() > 5, "no flat image, which would equal any other"
    return np.asarray(out)


@pytest.mark.parametrize("variant, n, scale", [("v1", 1, 1.), ("2511", 2, 2.5), slow("2509", 3, 1.)])
def test_a_list_of_edits_is_the_pipeline_called_for_each(variant, n, scale):
    given = images(n)
    ours = ready(variant).predict(given[0] if n == 1 else [given, given], PROMPTS, seed=SEEDS, **asked(scale))
    for got, prompt, seed in zip(ours, PROMPTS, SEEDS, strict=True): assert close_images(got, piped(variant, given, prompt, seed, scale))
    assert not close_images(*ours)


@pytest.mark.parametrize("steps", [1, 3])
def test_few_steps_are_the_pipelines_with_that_scheduler(steps, monkeypatch): # four: tests/lora/test_mixing.py
    own, pipe = dict(base_shift=math.log(3), max_shift=math.log(3), shift_terminal=None), pipeline("2511")
    monkeypatch.setattr(pipe, "scheduler", type(pipe.scheduler).from_config(pipe.scheduler.config, **own))
    assert close_images(ready().predict(images(1), "x", seed=3, scheduler_overrides=own, **asked(1.0, steps)), piped("2511", images(1), "x", 3, 1.0, steps))


@pytest.mark.parametrize("variant, n", [("v1", 1), ("2511", 2)])
def test_the_size_is_the_first_images_aspect_in_every_variant(variant, n):
    t, given = ready(variant), images(n)
    out = t.predict(given, "x", num_inference_steps=2, true_cfg_scale=1)
    w, h = calculate_dimensions(CONTROL, SIZES[0][0] / SIZES[0][1])
    assert out.shape == (h, w, 3) and h > w
    assert t.predicted == [dict(size=(w, h), why=f"the first image's aspect at {CONTROL} pixels", seed=0,
                                controls=[calculate_dimensions(CONTROL, im.width / im.height) for im in given])]


def test_all_is_encoded_before_the_transformer_runs_and_decoded_afterwards(monkeypatch):
    t, order = trainer_of().setup_predict(), []
    p = t.predictor
    calls = (QwenImage, "decode_latents"), (edits, "denoise_encoded"), (p.encoder, "encode_prompts"), (p.encoder, "encode_images")
    for owner, name in calls:
        on_call(monkeypatch, owner, name, lambda *a, name=name, **kw: order.append(name))
    on_call(monkeypatch, p, "at", lambda component: order.append(f"at {component}"))
    t.predict(images(1)[0], PROMPTS, **SMALL | dict(true_cfg_scale=4))
    encoded = ["at text_encoder"] + ["encode_prompts"] * 3 + ["at vae", "encode_images", "at transformer"]
    assert order == encoded + ["denoise_encoded"] * 2 + ["at vae"] + ["decode_latents"] * 2


def test_without_guidance_no_negative_prompt_is_encoded(monkeypatch):
    encoded = []
    t = trainer_of().setup_predict()
    on_call(monkeypatch, t.predictor.encoder, "encode_prompts", lambda prompts, *a, **kw: encoded.extend(prompts))
    for scale in (1, 1.5):
        t.predict(images(1), "make it blue", negative_prompt="blurry", **SMALL | dict(true_cfg_scale=scale))
    assert encoded == ["make it blue", "make it blue", "blurry"]


def test_seeds_are_those_that_torch_takes_in_63_bits():
    assert edits.seeds_of([0, 2**63 - 1], 2) == [0, 2**63 - 1]
    for wrong in (-1, 2**63):
        with pytest.raises(ValueError, match="`seed` must be a whole number, 0 or more and below 2\\*\\*63"):
            edits.seeds_of(wrong, 1)


def test_the_schedule_in_a_header_counts_more_than_the_files_name():
    own = dict(name="mine", steps=6)
    adapters = [("my-Lightning-8steps.safetensors", {}), ("style.safetensors", dict(schedule=own))]
    for order in (adapters, adapters[::-1]):
        schedule, why = pick_schedule("auto", order)
        assert schedule.steps == 6 and why == "in the header of style.safetensors"
    schedule, why = pick_schedule("auto", adapters[:1])
    assert schedule.steps == 8 and why.startswith("in the name of")


def test_an_image_in_every_form_is_the_same(tmp_path):
    im, exif = images(2)[1], Image.Exif()
    exif[0x0112] = 6 # to be turned back
    im.transpose(Image.Transpose.ROTATE_90).save(tmp_path/"turned.png", exif=exif)
    grey = im.convert("L")
    with Image.open(tmp_path/"turned.png") as opened:
        colour = np.asarray(im), str(tmp_path/"turned.png"), tmp_path/"turned.png", opened.copy(), opened, np.asarray(im.convert("RGBA"))
        for forms, want in ((colour, im), ((grey, np.asarray(grey), np.asarray(grey)[:, :, None]), grey.convert("RGB"))):
            for form in forms: assert np.array_equal(np.asarray(edits.as_image(form)), np.asarray(want))


IM, IMAGE = Image.new("RGB", (60, 40)), "`prompt_image` must be a path, a PIL image or a uint8 array [H, W], [H, W, 3] or [H, W, 4], got "
REFUSED = [ # more in nbs/sampling/01_edits.ipynb
    ((IM, []), {}, "`prompt` is an empty list; give at least one instruction"),
    ((IM, ["a", " "]), {}, "`prompt` is empty; say what to change"),
    ((IM, 3), {}, "`prompt` must be a string, or a list of strings for several edits, got 3"),
    ((IM, "a <|image_pad|>"), {}, "`prompt` must not contain the token <|image_pad|>"),
    ((IM, ["a", "b"]), dict(seed=[1]), "`seed` has 1 entries for 2 prompts"),
    ((IM, "a"), dict(generator=3), "`generator` must be a torch.Generator, got 3"),
    ((IM, "a"), dict(width=500), "`width` must be a multiple of 16"),
    ((IM, "a"), dict(num_inference_steps=1), "`num_inference_steps` must be at least 2"),
    ((IM, "a"), dict(true_cfg_scale=float("inf")), "`true_cfg_scale` must be a finite number, got inf"),
    ((IM, "a"), dict(preview=True, preview_every=0), "`preview_every` must be a whole number of 1 or more, got 0"),
    ((IM, "a"), dict(scheduler_overrides=dict(sift=1)), "`scheduler_overrides` has 'sift'"),
    ((torch.zeros(3, 4, 4), "a"), {}, IMAGE + "torch.float32 [3, 4, 4]"),
    (([[IM, IM]], "a"), {}, IMAGE + "list"),
    (("nowhere.png", "a"), {}, "image 'nowhere.png' does not exist; check the path"),
    (([IM, IM], "a"), "v1", "variant v1 takes one control image, got 2; use a 2509 or 2511 model"),
]


@pytest.mark.parametrize("args, kw, sentence", REFUSED, ids=range(len(REFUSED)))
def test_a_mistake_is_one_sentence_before_anything_is_loaded(args, kw, sentence, built):
    t, kw = (trainer_of(kw), {}) if kw == "v1" else (trainer_of(), kw)
    with pytest.raises((ValueError, FileNotFoundError)) as e: t.predict(*args, **kw)
    assert str(e.value).startswith(sentence) and "\n" not in str(e.value) and not built and t.placement is None


def test_an_image_is_never_cropped():
    "`data.crop` is for training pairs."
    t, (given,) = trainer_of(), images(1)
    plain = t.predict(given, "x", **SMALL)
    t.config.data.image_size, t.config.data.crop = [64, 64], True
    assert t.predictor.geometry().crop and close_images(t.predict(given, "x", **SMALL), plain)


def test_a_preview_is_where_the_velocity_leads(monkeypatch):
    "With the velocity of a straight line from the noise to an image it is that image in each step."
    from qie_nb.sampling import denoising
    scheduler, seen = ready().components.get("scheduler"), []
    noise, goal = (torch.randn(1, 4, 1, 4, 6, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    line = pack_latents(noise) - pack_latents(goal)
    monkeypatch.setattr(QwenImage, "velocity", lambda *a: line)
    own = denoising.sampling_schedule(scheduler, 5, 6)
    denoising.denoise(None, own, noise, [], (None, None), None, 1.0, on_estimate=lambda n, steps, at: seen.append(at()))
    assert len(seen) == 5
    for z in seen: torch.testing.assert_close(z, goal, rtol=0, atol=1e-5)


def test_a_preview_shows_the_image_and_changes_nothing(capsys):
    t, seen, told, kw = ready(), [], [], SMALL | dict(num_inference_steps=5)
    plain = t.predict(images(1)[0], PROMPTS, **kw)
    with_it = t.predict(images(1)[0], PROMPTS, preview=lambda *args: seen.append(args), preview_every=2,
                        on_step=lambda n, steps, z: told.append((n, steps, tuple(z.shape))), **kw)
    assert all(map(close_images, plain, with_it))
    assert [s[:2] for s in seen] == [(2, 5), (4, 5), (5, 5)] * 2 and told == [(n, 5, (1, 16, 1, 4, 8)) for n in range(1, 6)] * 2
    for last, image in zip(seen[2::3], plain): assert np.abs(last[2].astype(int) - image).mean() < 1, "the last preview is the image"
    assert close_images(t.predict(images(1), PROMPTS[0], preview=2, **kw), plain[0]), "not interactive"
    assert capsys.readouterr() == ("", ""), "short work prints nothing in a batch run"


def test_a_live_notebook_gets_one_image_that_changes(monkeypatch):
    monkeypatch.setattr(denoising, "kernel", lambda: 1)
    monkeypatch.setattr(denoising, "is_interactive", lambda: True)
    monkeypatch.setattr("IPython.display.display", display := mock.Mock())
    ready().predict(images(1)[0], PROMPTS, preview=1, progress=False, **SMALL)
    assert display.call_count == 1 and display.return_value.update.call_count == 3, "one output for both edits of two steps"


def test_long_work_prints_lines_in_batch_runs(monkeypatch, capsys):
    monkeypatch.setattr(denoising.time, "time", mock.Mock(side_effect=range(0, 9999, 6)))
    ready().predict(images(1)[0], ["x", "y"], **SMALL)
    first, *_, last = [line for line in capsys.readouterr().out.splitlines() if "edits" in line]
    assert first.startswith("2 edits at 64x32 ") and last.startswith("2 edits at 64x32 4/4, ") and "left" in last
    ready().predict(images(1)[0], ["x", "y"], progress=False, **SMALL)
    assert "edits" not in capsys.readouterr().out


def cached_trainer(pairs, tmp_path, encoders_with, variant="2511", controls=1, **data):
    encoders_with(share_prefix=False, vae_2d=False) # the pipelines' bits
    root = pairs(((48, 32), (32, 48)), controls=controls, caption=["red", "green"])
    control = root/"control_images"/"0000.png"
    Image.open(control).resize((40, 56)).save(control) # another shape than its target
    return lambda model=folder(variant): QwenImageEditTrainer(settings(
        root, tmp_path, model=dict(pretrained_model_name_or_path=str(model)), data=dict(image_size=[96, 96]) | data))


@pytest.mark.slow
@pytest.mark.parametrize("variant, controls", [("v1", 1), ("2511", 2)])
def test_a_cached_sample_is_edited_as_its_images_would_be_and_no_text_encoder_is_built(variant, controls, pairs, tmp_path, encoders_with, built):
    make, steps = cached_trainer(pairs, tmp_path, encoders_with, variant, controls), dict(num_inference_steps=2)
    make().cache_embeddings()
    built.clear()
    t = make()
    outs = t.predict_cached([0, 1], seed=[3, 4], **steps)
    assert built == {VAE: 1, TRANSFORMER: 1} and t.qwen_vl is None
    data, other = ImageDataset(t.config), make()
    for i, (out, seed) in enumerate(zip(outs, (3, 4))):
        s, (w, h) = data.samples[i], data.geometry.target(data.sizes[i][0])
        assert close_images(out, other.predict(list(s.controls), s.prompt, seed=seed, width=w, height=h, **steps))
        assert t.predicted[i] == dict(size=(w, h), why="the target's", sample=s.id, seed=seed)
    one = t.predict_cached(1, data, seed=4, output_type="pil", **steps)
    assert close_images(np.asarray(one), outs[1])
    assert not close_images(t.predict_cached(1, seed=4, true_cfg_scale=1, **steps), outs[1]), "guidance by the cached empty prompt"


def test_a_cached_edit_needs_no_encoder_in_the_folder_and_names_what_it_lacks(pairs, tmp_path, encoders_with):
    make = cached_trainer(pairs, tmp_path, encoders_with, caption_dropout_rate=0)
    make().cache_embeddings()
    shutil.copytree(folder("2511"), tmp_path/"model", ignore=shutil.ignore_patterns("text_encoder"))
    t = make(tmp_path/"model")
    assert t.predict_cached(0, num_inference_steps=2, true_cfg_scale=1).ndim == 3
    with pytest.raises(ValueError, match="`true_cfg_scale` 4.0 needs the empty prompt, which the cache lacks for sample '0000'"): t.predict_cached(0, num_inference_steps=2)
    with pytest.raises(ValueError, match="`data` has no cache to predict from"): trainer_of().predict_cached(0, t.config.data.dataset_path)


@pytest.mark.parametrize("several", [False, True])
def test_a_result_is_shown_as_an_image(several):
    from IPython.core.interactiveshell import InteractiveShell
    out = ready().predict(images(1)[0], ["x", "y"] if several else "x", **SMALL)
    shown, _ = InteractiveShell().display_formatter.format(out)
    one = out[0] if several else out
    assert isinstance(one, np.ndarray) and one.dtype == np.uint8 and len(shown["text/plain"]) < 99
    assert shown["text/html"].count("<img") == 2 if several else shown["image/jpeg"]


def test_a_generator_of_the_caller_draws_the_noise():
    def noise(seed, generator=None):
        return start_noise((1, 1, 16, 4, 4), seed, generator, "cpu", torch.float32)
    given = noise(0, torch.Generator().manual_seed(5))
    assert torch.equal(given, noise(5)) and not torch.equal(given, noise(0))


class PromptLengths:
    "An encoder whose embedding of a prompt is the prompt's length."
    components = EditModel("tiny")

    def encode_prompts(self, prompts, image_sets):
        return [SimpleNamespace(whole=torch.tensor([[float(len(text))]])) for text in prompts]

    def encode_images(self, images, size):
        return torch.zeros(len(images), 16, 1, 2, 2)


def test_each_edit_of_a_list_has_its_own_negative_prompt():
    image = Image.new("RGB", (32, 32))
    given = [Edit([image], "make it blue", negative, (32, 32)) for negative in ("x", "xx", "xxx")]
    encoded = encode_edits(PromptLengths(), given, Geometry())
    assert [float(e.uncond) for e in encoded] == [1, 2, 3] and {float(e.cond) for e in encoded} == {12}


def test_a_change_of_the_scheduler_wins_over_the_schedule():
    "The schedule sets the shift; what a user asks for on top is the last word."
    trainer = ready()
    schedule = dict(steps=3, true_cfg_scale=1, scheduler=dict(shift=2., use_dynamic_shifting=False))
    def edit(**changes):
        return trainer.predict(images(1), PROMPTS[0], seed=1, width=64, height=32, progress=False,
                               schedule=schedule, **changes)
    usual, same = edit(), edit(scheduler_overrides=dict(shift=2.))
    other = edit(scheduler_overrides=dict(shift=9.))
    assert close_images(usual, same) and not close_images(usual, other)


def test_an_edit_uses_the_mean_of_the_adapter_if_there_is_one():
    "As `save_lora` writes it."
    trainer = trainer_of()
    trainer.set_lora()
    random_lora(trainer.transformer, std=4.)
    def edit():
        return trainer.predict(images(1), PROMPTS[0], seed=1, progress=False, **SMALL)
    last = edit()
    weights = [p for p in trainer.transformer.parameters() if p.requires_grad]
    trainer.adapters.ema = EMA(weights, 0.9)
    for mean in trainer.adapters.ema.mean:
        mean.zero_()
    with_mean = edit()
    trainer.adapters.ema = None
    assert close_images(edit(), last) and not close_images(with_mean, last)


def test_an_edit_has_the_sizes_that_its_adapter_was_trained_at():
    trainer = trainer_of()
    with mock.patch.object(type(trainer.adapters), "origin", dict(control_area=32 * 32)):
        assert trainer.geometry().control_area == 32 * 32
    assert trainer.geometry().control_area == trainer.components.areas["control_area"] != 32 * 32
