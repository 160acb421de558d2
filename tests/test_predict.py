"""`trainer.predict` against the diffusers pipelines; lists of edits, inputs, refusals, previews, and edits from the cache."""
import math, shutil
from functools import lru_cache

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from qie_nb.config import LoraSection
from qie_nb.data.dataset import ImageDataset
from qie_nb.lora.adapters import add_lora, save_lora
from qie_nb.models.components import load_component
from qie_nb.data.images import calculate_dimensions
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from helpers import small_areas

CONTROL, VL = 128 * 128, 112 * 112
SIZES, TARGET = ((50, 75), (180, 90), (40, 100)), (144, 80) # (w, h)
PROMPTS, SEEDS = ["make the sky green", "remove the second boat"], [5, 6]
CASES = [("v1", 1), ("2509", 1), ("2509", 2), ("2509", 3), ("2511", 1), ("2511", 2), ("2511", 3)]
VAE, TEXT, TRANSFORMER = "AutoencoderKLQwenImage", "Qwen2_5_VLForConditionalGeneration", "QwenImageTransformer2DModel"


def pictures(n): return [Image.fromarray(np.random.default_rng(i).integers(0, 256, (h, w, 3), dtype=np.uint8)) for i, (w, h) in enumerate(SIZES[:n])]
def folder(variant): return tiny_folder(variant, (CONTROL, VL))


def trainer_of(variant, **sections):
    return QwenImageEditTrainer(dict(model=dict(pretrained_model_name_or_path=str(folder(variant))),
                                     train=dict(device="cpu", mixed_precision="no"), cache=dict(use_cache=False)) | sections)


@lru_cache
def ready(variant): return trainer_of(variant)


@lru_cache
def pipeline(variant):
    pipe = DiffusionPipeline.from_pretrained(folder(variant))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def small(variant): return small_areas(variant, CONTROL, VL)


def piped(variant, images, prompt, seed, scale, size=TARGET, steps=3):
    with small(variant):
        out = pipeline(variant)(image=images[0] if variant == "v1" else images, prompt=prompt, negative_prompt="blurry" if scale > 1 else None,
                                true_cfg_scale=scale, width=size[0], height=size[1], num_inference_steps=steps,
                                generator=torch.Generator().manual_seed(seed)).images[0]
    assert np.asarray(out).std() > 5, "no flat image, which would equal any other"
    return np.asarray(out)


def asked(scale, size=TARGET, steps=3): return dict(negative_prompt="blurry", true_cfg_scale=scale, width=size[0], height=size[1], num_inference_steps=steps)


# --- the pipelines' own images
@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["no-cfg", "cfg"])
@pytest.mark.parametrize("variant, n", CASES)
def test_a_list_of_edits_is_the_pipeline_called_for_each(variant, n, scale):
    images, t = pictures(n), ready(variant)
    ours = t.predict(images[0] if n == 1 else [images, images], PROMPTS, seed=SEEDS, **asked(scale))
    for got, prompt, seed in zip(ours, PROMPTS, SEEDS, strict=True):
        assert np.array_equal(got, piped(variant, images, prompt, seed, scale))
    assert not np.array_equal(*ours)


@pytest.mark.parametrize("variant, n", [("v1", 1), ("2509", 3), ("2511", 2)])
def test_with_a_lora(variant, n, tmp_path):
    tr, g = add_lora(load_component(folder(variant), "transformer"), LoraSection(r=4, lora_alpha=12)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in tr.named_parameters():
            if ".lora_B." in name: p.copy_(torch.randn(p.shape, generator=g) * 0.3)
    save_lora(tr, tmp_path)
    images, t, pipe = pictures(n), trainer_of(variant).load_lora(tmp_path), pipeline(variant)
    pipe.load_lora_weights(str(tmp_path))
    try: theirs = piped(variant, images, PROMPTS[0], 5, 4.0)
    finally: pipe.unload_lora_weights()
    assert np.array_equal(t.predict(images, PROMPTS[0], seed=5, **asked(4.0)), theirs)
    assert np.abs(theirs.astype(int) - piped(variant, images, PROMPTS[0], 5, 4.0)).mean() > 1, "the adapter does something"


def test_a_schedule_of_four_steps_is_the_pipelines_with_that_scheduler():
    own, pipe = dict(base_shift=math.log(3), max_shift=math.log(3), shift_terminal=None), pipeline("2511")
    was = pipe.scheduler
    pipe.scheduler = type(was).from_config(was.config, **own)
    try: theirs = piped("2511", pictures(1), "x", 3, 1.0, steps=4)
    finally: pipe.scheduler = was
    call = lambda **kw: ready("2511").predict(pictures(1), "x", seed=3, **asked(1.0, steps=4), **kw)
    assert np.array_equal(call(scheduler_overrides=own), theirs) and not np.array_equal(call(), theirs)


@pytest.mark.parametrize("variant, n", [("v1", 1), ("2509", 3), ("2511", 2)])
def test_the_size_is_the_first_images_aspect_in_every_variant(variant, n):
    t, images = ready(variant), pictures(n)
    out = t.predict(images, "x", num_inference_steps=2, true_cfg_scale=1)
    w, h = calculate_dimensions(CONTROL, SIZES[0][0] / SIZES[0][1])
    assert out.shape == (h, w, 3) and h > w
    assert t.predicted == [dict(size=(w, h), why=f"the first image's aspect at {CONTROL} pixels", seed=0,
                                controls=[calculate_dimensions(CONTROL, im.width / im.height) for im in images])]


def test_sizes_are_the_adapters_own(tmp_path):
    save_lora(add_lora(load_component(folder("2511"), "transformer"), LoraSection(r=2)), tmp_path, dict(control_area=64 * 64, vl_area=VL))
    t = trainer_of("2511").load_lora(tmp_path)
    assert t.predict(pictures(1), "x", num_inference_steps=2, true_cfg_scale=1).shape[:2] == calculate_dimensions(64 * 64, 50 / 75)[::-1]
    assert t.predicted[0]["controls"] == [calculate_dimensions(64 * 64, 50 / 75)]


# --- what is encoded, and how often
@pytest.mark.parametrize("scale, texts", [(1.0, 3), (4.0, 5)])
def test_the_encoders_run_once_for_each_distinct_thing(scale, texts):
    t, (a, b) = trainer_of("2511").setup_predict(), pictures(2)
    sets, prompts = [a, [a, b], a.copy(), a, [a, b]], ["one", "one", "one", "two", "one"] # a copy holds the same pixels
    t.predict(sets, prompts, seed=list(range(5)), true_cfg_scale=scale, num_inference_steps=2, width=64, height=32)
    assert t.predictor.encoder.calls == dict(vae=2, prefix=0, text_encoder=texts), "two images; (a, one), (a, two), (ab, one) and with guidance an empty one each"


def test_all_is_encoded_before_the_transformer_runs_and_decoded_afterwards(monkeypatch):
    from qie_nb.sampling import edits
    t, order = trainer_of("2511").setup_predict(), []
    for name in ("decode_latents", "denoise_encoded"):
        monkeypatch.setattr(edits, name, lambda *a, _n=name, _f=getattr(edits, name), **kw: (order.append(_n), _f(*a, **kw))[1])
    enc, at = t.predictor.encoder, t.predictor.at
    for name in ("prompt", "image"): monkeypatch.setattr(enc, name, lambda *a, _n=name, _f=getattr(enc, name): (order.append(_n), _f(*a))[1])
    monkeypatch.setattr(t.predictor, "at", lambda name: (order.append(f"at {name}"), at(name))[1], raising=False)
    t.predict(pictures(1)[0], PROMPTS, num_inference_steps=2, width=64, height=32)
    assert order == ["at text_encoder"] + ["prompt"] * 3 + ["at vae", "image", "at transformer"] + ["denoise_encoded"] * 2 + ["at vae"] + ["decode_latents"] * 2


def test_a_list_gives_a_list_and_one_generator_draws_on():
    t, kw = ready("2511"), dict(num_inference_steps=2, true_cfg_scale=1, width=64, height=32)
    assert isinstance(one := t.predict(pictures(1)[0], ["x"], **kw), list) and len(one) == 1
    g = torch.Generator().manual_seed(3)
    both = t.predict(pictures(1)[0], ["x", "x"], generator=g, **kw)
    g.manual_seed(3)
    assert all(np.array_equal(b, t.predict(pictures(1), "x", generator=g, **kw)) for b in both) and not np.array_equal(*both)


# --- inputs
def test_a_image_in_every_form_is_the_same(tmp_path):
    t, im = ready("2511"), pictures(2)[1]
    turned = im.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6 # to be turned back
    turned.save(tmp_path/"turned.png", exif=exif)
    with Image.open(tmp_path/"turned.png") as opened:
        forms = im, np.asarray(im), str(tmp_path/"turned.png"), tmp_path/"turned.png", opened.copy(), [im], np.dstack([np.asarray(im), np.full(im.size[::-1], 255, np.uint8)])
        opened.load()
        outs = [t.predict(f, "x", num_inference_steps=2, true_cfg_scale=1) for f in (*forms, opened)]
    assert outs[0].shape[1] > outs[0].shape[0] and all(np.array_equal(o, outs[0]) for o in outs)


def test_grey_images_and_pil_output():
    t, grey = ready("2511"), pictures(1)[0].convert("L")
    outs = [t.predict(f, "x", num_inference_steps=2, true_cfg_scale=1) for f in (grey, np.asarray(grey), np.asarray(grey)[:, :, None], grey.convert("RGB"))]
    assert all(np.array_equal(o, outs[0]) for o in outs)
    pil = t.predict(grey, ["x"], num_inference_steps=2, true_cfg_scale=1, output_type="pil")[0]
    assert isinstance(pil, Image.Image) and np.array_equal(np.asarray(pil), outs[0])


IM = Image.new("RGB", (60, 40))
REFUSED = [
    (([], "x"), {}, "`prompt_image` is an empty list; give at least one image"),
    (([[], IM], ["x", "y"]), {}, "`prompt_image` is an empty list; give at least one image"),
    ((IM, []), {}, "`prompt` is an empty list; give at least one instruction"),
    ((IM, "  "), {}, "`prompt` is empty; say what to change"),
    ((IM, ["a", ""]), {}, "`prompt` is empty; say what to change"),
    ((IM, 3), {}, "`prompt` must be a string, or a list of strings for several edits, got 3"),
    ((IM, "a <|image_pad|>"), {}, "`prompt` must not contain the token <|image_pad|>, got 'a <|image_pad|>'; remove it, the template adds the images"),
    ((IM, "x", "<|vision_end|>"), {}, "`prompt` must not contain the token <|vision_end|>, got '<|vision_end|>'; remove it, the template adds the images"),
    (([IM], ["a", "b"]), {}, "`prompt_image` has 1 entries for 2 prompts; give one image for all or an entry each, where an entry may be a list of images"),
    ((IM, ["a", "b"]), dict(seed=[1]), "`seed` has 1 entries for 2 prompts; give one for all or one each"),
    ((IM, ["a", "b"], ["x", "y", "z"]), {}, "`negative_prompt` has 3 entries for 2 prompts; give one for all or one each"),
    ((IM, "a"), dict(seed=-1), "`seed` must be a whole number, 0 or more and below 2**63, got -1"),
    ((IM, "a"), dict(seed=True), "`seed` must be a whole number, 0 or more, got True"),
    ((IM, "a"), dict(generator=3), "`generator` must be a torch.Generator, got 3"),
    ((IM, "a"), dict(width=500), "`width` must be a multiple of 16, got 500; use 496 or 512"),
    ((IM, "a"), dict(height=0), "`height` must be a multiple of 16, got 0; use 16 or 32"),
    ((IM, "a"), dict(num_inference_steps=1), "`num_inference_steps` must be at least 2 with this scheduler, got 1; 20 is usual"),
    ((IM, "a"), dict(num_inference_steps=2.5), "`num_inference_steps` must be at least 2 with this scheduler, got 2.5; 20 is usual"),
    ((IM, "a"), dict(true_cfg_scale=float("inf")), "`true_cfg_scale` must be a finite number, got inf; 4 is usual, 1 means no guidance"),
    ((IM, "a"), dict(true_cfg_scale="4"), "`true_cfg_scale` must be a finite number, got '4'; 4 is usual, 1 means no guidance"),
    ((IM, "a"), dict(output_type="latent"), "`output_type` must be np (a uint8 array) or pil, got 'latent'"),
    ((IM, "a"), dict(preview="yes"), "`preview` must be true, a number of steps or a function of (step, steps, image), got 'yes'"),
    ((IM, "a"), dict(preview=True, preview_every=0), "`preview_every` must be a whole number of 1 or more, got 0"),
    ((None, "a"), {}, "`prompt_image` must be a path, a PIL image or a uint8 array [H, W], [H, W, 3] or [H, W, 4], got NoneType"),
    ((np.zeros((4, 4, 3)), "a"), {}, "`prompt_image` must be a path, a PIL image or a uint8 array [H, W], [H, W, 3] or [H, W, 4], got float64; scale it to 0..255 and use .astype('uint8')"),
    ((np.zeros((2, 4, 4, 3), np.uint8), "a"), {}, "`prompt_image` must be a path, a PIL image or a uint8 array [H, W], [H, W, 3] or [H, W, 4], got shape [2, 4, 4, 3]; one array is one image"),
    ((torch.zeros(3, 4, 4), "a"), {}, "`prompt_image` must be a path, a PIL image or a uint8 array [H, W], [H, W, 3] or [H, W, 4], got a tensor; give it as a numpy array, channels last"),
    (([[IM, IM]], "a"), {}, "`prompt_image` must be a path, a PIL image or a uint8 array [H, W], [H, W, 3] or [H, W, 4], got list"),
    (("nowhere.png", "a"), {}, "image 'nowhere.png' cannot be read (it does not exist); replace it or remove the pair"),
]


@pytest.mark.parametrize("args, kw, sentence", REFUSED, ids=range(len(REFUSED)))
def test_a_mistake_is_one_sentence_before_anything_is_loaded(args, kw, sentence, built):
    t = trainer_of("2511")
    with pytest.raises(ValueError) as e: t.predict(*args, **kw)
    assert str(e.value) == sentence and not built and t.placement is None


def test_an_unknown_override_is_refused_with_the_known_names(built):
    with pytest.raises(ValueError, match=r"`scheduler_overrides` has 'shift', which|`scheduler_overrides` has 'sift', which .* base_shift"):
        trainer_of("2511").predict(IM, "a", scheduler_overrides=dict(sift=1))
    assert not built


def test_v1_takes_one_image(built):
    with pytest.raises(ValueError, match="variant v1 takes one control image, got 2; use a 2509 or 2511 model"): trainer_of("v1").predict([IM, IM], "a")
    assert not built


# --- progress and previews
def test_a_preview_shows_the_image_and_changes_no_bit(capsys):
    t, seen, told = ready("2511"), [], []
    plain = t.predict(pictures(1)[0], PROMPTS, num_inference_steps=5)
    with_it = t.predict(pictures(1)[0], PROMPTS, num_inference_steps=5, preview=lambda n, steps, im: seen.append((n, steps, im)), preview_every=2,
                        on_step=lambda n, steps, z: told.append((n, steps, tuple(z.shape))))
    assert all(np.array_equal(a, b) for a, b in zip(plain, with_it))
    assert [s[:2] for s in seen] == [(2, 5), (4, 5), (5, 5)] * 2 and [s[:2] for s in told] == [(n, 5) for n in range(1, 6)] * 2
    close = lambda a, b: np.abs(a.astype(int) - b).mean()
    assert close(seen[2][2], plain[0]) < 1 and close(seen[5][2], plain[1]) < 1, "the last preview is the image"
    assert told[0][2] == (1, 16, 1, plain[0].shape[0] // 8, plain[0].shape[1] // 8)
    assert np.array_equal(t.predict(pictures(1), PROMPTS[0], num_inference_steps=5, preview=2), plain[0]), "not interactive"
    assert capsys.readouterr() == ("", ""), "short work prints nothing in a batch run"


def test_a_watched_notebook_gets_one_image_that_changes(monkeypatch):
    from qie_nb.sampling import preview
    shown = []

    class Handle:
        def __init__(self, im, display_id): shown.append([im])
        def update(self, im): shown[-1].append(im)
    monkeypatch.setattr(preview, "kernel", lambda: 1)
    monkeypatch.setattr(preview, "is_interactive", lambda: True)
    monkeypatch.setattr("IPython.display.display", Handle)
    ready("2511").predict(pictures(1)[0], PROMPTS, num_inference_steps=4, preview=2, progress=False)
    assert [len(s) for s in shown] == [4], "one place on the page, for both edits"


def test_long_work_says_lines_where_nobody_watches(monkeypatch, capsys):
    from qie_nb.sampling import preview
    clock = [0.]
    monkeypatch.setattr(preview.time, "time", lambda: clock.__setitem__(0, clock[0] + 6) or clock[0])
    ready("2511").predict(pictures(1)[0], ["x", "y"], num_inference_steps=2, width=64, height=32)
    lines = capsys.readouterr().err.splitlines()
    assert lines and lines[0].startswith("2 edits at 64x32 ") and lines[-1].startswith("2 edits at 64x32 4/4, ") and "left" in lines[-1]
    clock[0] = 0
    ready("2511").predict(pictures(1)[0], ["x", "y"], num_inference_steps=2, width=64, height=32, progress=False)
    assert capsys.readouterr().err == ""


# --- from the cache
def cached_trainer(pairs, tmp_path, variant="2511", controls=1, **changes):
    base = dict(model=dict(pretrained_model_name_or_path=str(folder(variant))), train=dict(device="cpu", mixed_precision="no", output_dir=str(tmp_path)),
                data=dict(dataset_path=str(pairs(((48, 32), (32, 48), (40, 40)), controls=controls, caption=["red", "green", "blue"])), image_size=[64, 64], caption_dropout_rate=0.3),
                cache=dict(cache_dir=str(tmp_path/"cache"), share_prompt_prefix=False, vae_2d=False))
    for name, values in changes.items(): base[name] = base[name] | values
    return lambda **kw: QwenImageEditTrainer(base | kw)


@pytest.mark.parametrize("variant, controls", [("v1", 1), ("2511", 2)])
def test_a_cached_sample_is_edited_as_its_images_would_be_and_no_text_encoder_is_built(variant, controls, pairs, tmp_path, built):
    make = cached_trainer(pairs, tmp_path, variant, controls)
    make().cache_embeddings()
    built.clear()
    t = make()
    outs = t.predict_cached([0, 1], num_inference_steps=3, seed=[3, 4])
    assert built == {VAE: 1, TRANSFORMER: 1} and t.qwen_vl is None
    data = ImageDataset(t.config)
    for i, (out, seed) in enumerate(zip(outs, (3, 4))):
        s, (w, h) = data.samples[i], data.geometry.target(data.sizes[i][0])
        assert np.array_equal(out, make().predict(list(s.controls), s.prompt, seed=seed, num_inference_steps=3, width=w, height=h))
        assert t.predicted[i] == dict(size=(w, h), why="the target's", sample=s.id, seed=seed)
    one = t.predict_cached(1, data, num_inference_steps=3, seed=4, output_type="pil")
    assert np.array_equal(np.asarray(one), outs[1])
    assert not np.array_equal(t.predict_cached(1, num_inference_steps=3, seed=4, true_cfg_scale=1), outs[1]), "guidance by the cached empty prompt"


def test_a_cached_edit_needs_no_encoder_in_the_folder_and_says_what_it_lacks(pairs, tmp_path):
    make = cached_trainer(pairs, tmp_path, data=dict(caption_dropout_rate=0))
    make().cache_embeddings()
    shutil.copytree(folder("2511"), tmp_path/"model", ignore=shutil.ignore_patterns("text_encoder"))
    t = make(model=dict(pretrained_model_name_or_path=str(tmp_path/"model")))
    assert t.predict_cached(0, num_inference_steps=2, true_cfg_scale=1).ndim == 3
    with pytest.raises(ValueError, match="`true_cfg_scale` 4.0 needs the empty prompt, which the cache lacks for sample '0000'"): t.predict_cached(0, num_inference_steps=2)
    with pytest.raises(ValueError, match="`i` must be a sample's number from 0 to 2, got 3"): t.predict_cached([0, 3])
    with pytest.raises(ValueError, match="`data` has no cache to predict from"): trainer_of("2511").predict_cached(0, t.config.data.dataset_path)
