"""Embeddings, latents, schedule, velocity and image equal those of diffusers' edit pipelines; tiny random models, float32 on a CPU.

`on` is our faster computation: 2-D VAE convolutions, a shared prompt prefix, and patches of images as a matrix product.
Floats are compared to rounding; with `on` False a few cases are also compared bit for bit (marked `bits`).
"""
import json, shutil
from collections import namedtuple
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from PIL import Image

from qie_nb.config import LoraSection
from qie_nb.data.batches import pad_prompts
from qie_nb.data.dataset import Geometry, ImageDataset
from qie_nb.encoding.encoder import Encoder
from qie_nb.encoding.precompute import precompute
from qie_nb.models.encoders import encode_prompt, vl_images, encode_image, vae_factor
from qie_nb.lora.adapters import add_lora, load_lora, save_lora
from qie_nb.devices.edit_model import EditModel
from qie_nb.models.components import VARIANTS, find_variant, load_component, restore_image_positions
from qie_nb.models.flow_matching import img_shapes, pack_latents
from qie_nb.models.variants.text_to_image import QWEN_IMAGE
from qie_nb.predict import edit, sampling_schedule, start_noise
from qie_nb.tiny.random_models import tiny_folder
from helpers import PatchConvolutions, random_lora, small_areas
from tiny_rig import close, random_image

CONTROL, VL = 128 * 128, 112 * 112                # pixels; the pipelines' own are 1024*1024 and 384*384
SIZES = (50, 75), (180, 90), (40, 100)            # (w, h) of the control images: portrait, landscape, tall
RESIZED = (96, 160), (192, 96), (96, 192)         # (w, h) of them at CONTROL pixels, calculated by hand
TARGET = 144, 80                                  # (w, h): another aspect than the controls, not a multiple of 32, not square
PROMPT, OTHER, SEED, STEPS = "make the sky green", "remove the second boat from the left, keep its shadow", 5, 3


# n control images; real sizes? With "3d" the pipeline is corrected, "installed" compares with it as it is
Case = namedtuple("Case", "variant n stages native positions", defaults=(1, 3, False, "3d"))
slow = partial(pytest.param, marks=pytest.mark.slow)
CASES = [Case("v1"), *(Case("2509", n) for n in (1, 2, 3)), Case("2511"), Case("2511", 2), Case("v1", 1, 2), Case("2511", 2, 2),
         Case("v1", positions="installed"), Case("2511", 2, positions="installed")]
MEGAPIXEL = [Case("v1", 1, 3, True), Case("2509", 3, 3, True), Case("2511", 2, 3, True)]
each_variant = pytest.mark.parametrize("variant", VARIANTS)
each = lambda cases: pytest.mark.parametrize("case", cases, ids=lambda case: "-".join(map(str, case)))
both_ways = pytest.mark.parametrize("on", [slow(False), True], ids=["plain", "fast"])


def each_way(cases, rare=()):
    """Each case in the fast way; in the plain way the last of `cases` with each change, and all of them weekly.

    Of the `rare` ones the last runs with each change."""
    def marks(case, on):
        if case in rare and (not on or case is not rare[-1]):
            return [pytest.mark.weekly]
        if on:
            return [pytest.mark.slow] if case in rare else []
        return [pytest.mark.slow if case is cases[-1] else pytest.mark.weekly]
    rows = [pytest.param(case, on, marks=marks(case, on), id="-".join(map(str, [*case, "fast" if on else "plain"])))
            for case in (*cases, *rare) for on in (False, True)]
    return pytest.mark.parametrize("case, on", rows)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield


@lru_cache
def rig(variant, stages=3, native=False, positions="3d"):
    "One model folder read twice: by diffusers alone, and by our components."
    control, vl = (1024 * 1024, 384 * 384) if native else (CONTROL, VL)
    folder = tiny_folder(variant, None if native else (control, vl), 0, stages)
    pipe, parts = DiffusionPipeline.from_pretrained(folder), EditModel(str(folder), image_positions=positions)
    if positions == "3d": restore_image_positions(pipe)
    pipe.set_progress_bar_config(disable=True)
    geometry = Geometry(control_area=control, vl_area=None if variant == "v1" else vl)
    assert geometry == Geometry(**parts.areas)
    return SimpleNamespace(folder=folder, pipe=pipe, parts=parts, transformer=parts.get("transformer"), vae=parts.get("vae"), geometry=geometry)


def rig_of(case): return rig(case.variant, case.stages, case.native, case.positions)
def control_images(n=1): return [random_image(s, i) for i, s in enumerate(SIZES[:n])]
small = partial(small_areas, control=CONTROL, vl=VL)


@contextmanager
def watch(transformer):
    "(keyword arguments, output) of every call of a transformer."
    calls = []
    hook = transformer.register_forward_hook(lambda _, args, kw, out: calls.append((kw, out[0])), with_kwargs=True)
    try: yield calls
    finally: hook.remove()


def pipe_call(r, variant, images, scale=1.0, size=TARGET, steps=STEPS, **kw):
    return r.pipe(image=images[0] if variant == "v1" else images, prompt=PROMPT, negative_prompt=" " if scale > 1 else None, true_cfg_scale=scale,
                  width=size[0], height=size[1], num_inference_steps=steps, generator=torch.Generator().manual_seed(SEED), **kw).images[0]


def edit_call(r, transformer, images, scale=1.0, size=TARGET, on=False):
    return edit(Encoder(r.parts, share_prefix=on, vae_2d=on), transformer, images, PROMPT, " ", STEPS, scale,
                width=size[0], height=size[1], geometry=r.geometry, seed=SEED)


@lru_cache
def piped(case, scale=1.0, size=TARGET, steps=STEPS, output="pil"):
    "A run of the pipeline and its intermediate results."
    r, got = rig_of(case), SimpleNamespace(encode_prompt=[], prepare_latents=[])
    with pytest.MonkeyPatch.context() as mp, watch(r.pipe.transformer) as got.calls, nullcontext() if case.native else small(case.variant):
        for name in ("encode_prompt", "prepare_latents"):
            def kept(*args, into=getattr(got, name), real=getattr(r.pipe, name), **kw):
                into.append(real(*args, **kw))
                return into[-1]
            mp.setattr(r.pipe, name, kept)
        got.image = pipe_call(r, case.variant, control_images(case.n), scale, size, steps, output_type=output)
    got.noise, got.controls = got.prepare_latents[0]
    got.sigmas, got.timesteps = r.pipe.scheduler.sigmas.clone(), r.pipe.scheduler.timesteps.clone()
    return got


@lru_cache
def edited(case, scale=1.0, size=TARGET, on=False):
    "The same run by `edit`, and its transformer calls."
    r = rig_of(case)
    with watch(r.transformer) as calls: return edit_call(r, r.transformer, control_images(case.n), scale, size, on), calls


def our_prompt(r, prompt, images, on=False): # embedding, mask
    te, processor = r.parts.get("text_encoder"), r.parts.get("processor")
    embeds, masks = encode_prompt(te, processor, r.parts.variant, prompt, vl_images(images, r.geometry), share_prefix=on)
    return pad_prompts(list(embeds), list(masks))


def our_controls(r, images, on=False): return [encode_image(r.vae, im, r.geometry.control(im.size), use_2d=on) for im in images]
def our_noise(r): return start_noise((1, 1, 16, *(s // vae_factor(r.vae) for s in TARGET[::-1])), SEED, None, "cpu", torch.float32)


def our_arguments(r, images, on=False):
    "Our arguments of `velocity`: (noise, controls, embedding, mask, shapes)."
    noise, controls = our_noise(r), our_controls(r, images, on)
    shapes = img_shapes(noise.shape[-2:], [c.shape[-2:] for c in controls])
    return pack_latents(noise), [pack_latents(c) for c in controls], *our_prompt(r, PROMPT, images, on), shapes


def rows(shapes): return [[tuple(s) for s in row] for row in shapes]
def apart(a, b): return (a - b).abs().max().item()
same = partial(torch.testing.assert_close, rtol=0, atol=0) # copies and random numbers


def looks(ours, theirs):
    "The same grey levels, except values on the edge between two (1e-5 of the range: one in a thousand)."
    off = np.abs(ours.astype(int) - theirs)
    assert ours.shape == theirs.shape and off.max() <= 1 and (off > 0).mean() <= 1e-3, f"{off.max()} grey levels, {(off > 0).mean():.2g} of the values"


# --- prompts
@each_variant
def test_an_empty_prompt_is_encoded_as_one_space(variant):
    close(*(our_prompt(rig(variant), prompt, control_images(), True)[0] for prompt in ("", " ")))


@both_ways
def test_v1_pads_a_batch_of_two(on):
    r, images = rig("v1"), [random_image(SIZES[0], 1), random_image(SIZES[0], 2)]
    theirs, mask = r.pipe.encode_prompt([PROMPT, OTHER], vl_images(images, r.geometry))
    alone = [our_prompt(r, p, [im], on)[0][0] for p, im in zip((PROMPT, OTHER), images)]
    ours, our_mask = pad_prompts(alone)
    assert len(alone[0]) != len(alone[1]) and torch.equal(our_mask, mask.bool())
    assert ours.shape == theirs.shape and apart(ours, theirs) < 1e-5 # a batch of two rounds differently


@each_variant
def test_padding_needs_its_mask(variant):
    r, images = rig(variant), control_images()
    noise, controls, *_, shapes = our_arguments(r, images)
    alone = [our_prompt(r, p, images)[0] for p in (PROMPT, OTHER)]
    padded, mask = pad_prompts([e[0] for e in alone])
    def call(n, embeds, mask):
        noises, several = noise.expand(n, -1, -1), [c.expand(n, -1, -1) for c in controls]
        return QWEN_IMAGE.velocity(r.transformer, noises, several, torch.full((n,), 700.), embeds, mask, shapes * n)
    expected = torch.cat([call(1, e, None) for e in alone])
    assert mask.sum(1).tolist() == [e.shape[1] for e in alone]
    assert apart(call(2, padded, mask), expected) < 1e-5
    assert apart(call(2, padded, None)[0], expected[0]) > 1e-3


def test_the_order_of_control_images_matters():
    r, (a, b) = rig("2509"), [random_image(SIZES[0], 1), random_image(SIZES[0], 2)]
    assert apart(our_prompt(r, PROMPT, [a, b])[0], our_prompt(r, PROMPT, [b, a])[0]) > 1e-3


# --- latents, shapes, schedule, velocity
@each_way(CASES, MEGAPIXEL)
def test_conditioning_and_velocity(case, on):
    r, run, images = rig_of(case), piped(case, steps=2, output="latent") if case.native else piped(case), control_images(case.n)
    noise, controls, embeds, mask, shapes = our_arguments(r, images, on)
    assert case.native or [r.geometry.control(im.size) for im in images] == list(RESIZED[:case.n])
    close(embeds, run.encode_prompt[0][0])
    assert mask is None and run.encode_prompt[0][1] is None
    same(noise, run.noise)
    close(torch.cat(controls, dim=1), run.controls)
    assert rows(shapes) == rows(run.calls[0][0]["img_shapes"])
    own = sampling_schedule(r.parts.get("scheduler"), len(run.timesteps), noise.shape[1])
    close(own.timesteps, run.timesteps, 1e-6), close(own.sigmas, run.sigmas, 1e-6)
    ours = QWEN_IMAGE.velocity(r.transformer, noise, controls, run.timesteps[:1], embeds, mask, shapes)
    close(ours, run.calls[0][1][:, :noise.shape[1]])


@pytest.mark.parametrize("variant", ["v1", "2509"])
@pytest.mark.parametrize("width,height,steps", [(1328, 800, 8), (512, 768, 50), (144, 80, 2)]) # one step gives nan in diffusers
def test_schedule(variant, width, height, steps, monkeypatch):
    r = rig(variant)
    monkeypatch.setattr(r.pipe.transformer, "forward", lambda hidden_states, **kw: (torch.zeros_like(hidden_states),))
    with small(variant): pipe_call(r, variant, control_images(), size=(width, height), steps=steps, output_type="latent")
    own = sampling_schedule(r.parts.get("scheduler"), steps, (height // 16) * (width // 16))
    close(own.timesteps, r.pipe.scheduler.timesteps, 1e-6), close(own.sigmas, r.pipe.scheduler.sigmas, 1e-6)
    assert own.begin_index == r.pipe.scheduler.begin_index == 0 and len(own.timesteps) == steps


# --- whole runs
@each_way(CASES)
@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["no-cfg", "cfg"])
def test_every_transformer_call_and_the_image(case, scale, on):
    run, (ours, calls) = piped(case, scale), edited(case, scale, on=on)
    theirs = np.asarray(run.image)
    assert len(calls) == len(run.calls) == STEPS * (2 if scale > 1 else 1)
    for (a, _), (b, _) in zip(calls, run.calls):
        close(a["timestep"], b["timestep"], 1e-6)
        for name in ("hidden_states", "encoder_hidden_states"): close(a[name], b[name])
        assert a["guidance"] is b["guidance"] is a["encoder_hidden_states_mask"] is b["encoder_hidden_states_mask"] is None
        assert rows(a["img_shapes"]) == rows(b["img_shapes"])
    assert ours.dtype == theirs.dtype == np.uint8 and theirs.shape == (TARGET[1], TARGET[0], 3) and theirs.std() > 5 # not a uniform image
    looks(ours, theirs)


@each_way([c for c in CASES if c.n == 1])
def test_image_at_the_default_size(case, on):
    theirs = np.asarray(piped(case, 4.0, (None, None)).image)
    assert theirs.shape == (RESIZED[0][1], RESIZED[0][0], 3)
    looks(edited(case, 4.0, (None, None), on)[0], theirs)


@pytest.mark.bits
@each([Case("v1"), Case("2509", 3), Case("2511", 2)])
def test_plain_computation_gives_equal_bits(case):
    (ours, calls), run = edited(case, 4.0), piped(case, 4.0)
    for (a, mine), (b, theirs) in zip(calls, run.calls, strict=True):
        for name in ("timestep", "hidden_states", "encoder_hidden_states"): same(a[name], b[name])
        same(mine, theirs)
    assert np.array_equal(ours, np.asarray(run.image))


@each_variant
def test_image_with_a_lora(variant, tmp_path):
    r = rig(variant)
    settings = LoraSection(r=4, lora_alpha=12, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    tr = random_lora(add_lora(load_component(r.folder, "transformer"), settings), 0.3)
    save_lora(tr, tmp_path)
    r.pipe.load_lora_weights(str(tmp_path))
    try:
        with small(variant): theirs = np.asarray(pipe_call(r, variant, control_images(), 4.0))
    finally: r.pipe.unload_lora_weights()
    again = load_component(r.folder, "transformer")
    load_lora(again, tmp_path)
    for ours in (tr, again): looks(edit_call(r, ours, control_images(), 4.0), theirs)
    assert np.abs(theirs.astype(int) - edited(Case(variant), 4.0)[0]).mean() > 1 # the adapter has an effect


# --- training reads what inference computes
def filled(root, r, n=1, count=1, on=True):
    "A precomputed data set of one prompt, and its samples' tensors; sample 0 has the images of `control_images(n)`."
    folders = [root/"training_images", root/"control_images", *(root/f"control_images_{k}" for k in range(2, n + 1))]
    for f in folders: f.mkdir()
    for i in range(count):
        (root/"training_images"/f"s{i}.txt").write_text(PROMPT)
        images = [random_image((70, 44), 50 + i), *control_images(n)] if i == 0 else [random_image(s, 99 + i) for s in ((70, 44), *SIZES[:n])]
        for f, im in zip(folders, images): im.save(f/f"s{i}.png")
    data = ImageDataset(dict(dataset_path=str(root), image_size=[128, 96], cache_dir=str(root/"cache"), caption_dropout_rate=0.5)) # caches empty prompts too
    precompute(data, Encoder(r.parts, data.cache, share_prefix=on, vae_2d=on))
    return data, [{name: data.cache.load_cache(kind, key) for name, (kind, key, _) in data.keys(i).items()} for i in range(count)]


@each_way(CASES)
def test_training_conditioning_and_target(case, tmp_path, on):
    r, run = rig_of(case), piped(case, 4.0)
    data, [got] = filled(tmp_path, r, case.n, on=on)
    controls = [got[f"control_latent.{k}"] for k in range(case.n)]
    close(torch.cat([pack_latents(c[None]) for c in controls], dim=1), run.controls)
    for prefix, (theirs, _) in zip(("", "empty_"), run.encode_prompt, strict=True):
        close(got[f"{prefix}prompt_embed"][None], theirs)
    (w, h), *sizes = data.bucket(0)
    assert (w, h) == edit_plus.calculate_dimensions(128 * 96, 70 / 44) == (128, 96) and tuple(sizes) == RESIZED[:case.n]
    target = random_image((70, 44), 50).resize((w, h), Image.Resampling.LANCZOS)
    close(got["pixel_latent"][None], r.pipe._encode_vae_image(r.pipe.image_processor.preprocess(target, h, w).unsqueeze(2), None))
    assert data[0]["cached"] and torch.equal(data[0]["pixel_latent"], got["pixel_latent"])
    shapes = img_shapes(got["pixel_latent"].shape[-2:], [c.shape[-2:] for c in controls])
    assert rows(shapes)[0][1:] == rows(run.calls[0][0]["img_shapes"])[0][1:]


@each([Case("v1"), Case("2509", 3), Case("2511", 2)])
@both_ways
def test_only_the_plain_way_convolves_patches_in_3d(case, on, tmp_path):
    r = rig_of(case)
    text_encoder = r.parts.get("text_encoder")
    weight = text_encoder.model.visual.patch_embed.proj.weight.clone()
    with PatchConvolutions(text_encoder) as encoding:
        filled(tmp_path, r, case.n, on=on)
    with PatchConvolutions(text_encoder) as editing:
        edit_call(r, r.transformer, control_images(case.n), 4.0, on=on)
    expected = 0 if on else 2 # prompt and empty prompt, or prompt and negative prompt
    assert (encoding.count, editing.count) == (expected, expected)
    same(text_encoder.model.visual.patch_embed.proj.weight, weight)


@each_variant
def test_another_image_gives_another_embedding_and_key(variant, tmp_path):
    data, (a, b) = filled(tmp_path, rig(variant), count=2)
    for name in ("prompt_embed", "empty_prompt_embed"):
        assert data.keys(0)[name].key != data.keys(1)[name].key
        assert a[name].shape == b[name].shape and apart(a[name], b[name]) > 1e-3


# --- zero_cond_t
def test_zero_cond_t_changes_the_output_of_the_same_weights():
    old, new = (load_component(rig(v).folder, "transformer") for v in ("2509", "2511"))
    assert (old.config.zero_cond_t, new.config.zero_cond_t) == (False, True)
    new.load_state_dict(old.state_dict()) # strict: no weight differs
    noise, controls, *text = our_arguments(rig("2509"), control_images(2))
    assert apart(*(QWEN_IMAGE.velocity(t, noise, controls, torch.tensor([700.]), *text) for t in (old, new))) > 1e-3


def test_a_2511_without_its_flag_is_refused(tmp_path):
    folder = shutil.copytree(rig("2511").folder, tmp_path/"model")
    path = folder/"transformer/config.json"
    config = json.loads(path.read_text())
    assert config.pop("zero_cond_t") is True
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="`model.variant` is 2511, but .* is 2509 .*zero_cond_t=false"): find_variant(folder, "2511")
    assert find_variant(folder).name == "2509"


def test_firered_image_edit_is_read_as_2509(tmp_path):
    "FireRed-Image-Edit 1.0 and 1.1 have 2509's classes, and no zero_cond_t in their config (sgl-project/sglang#20862)."
    folder = shutil.copytree(rig("2509").folder, tmp_path/"FireRed-Image-Edit-1.1")
    path = folder/"transformer/config.json"
    config = json.loads(path.read_text())
    del config["zero_cond_t"]
    path.write_text(json.dumps(config))
    parts, image = EditModel(str(folder), variant="2509"), control_images()
    assert parts.variant.name == "2509" and "FireRed" in parts.identity()["model"]
    ours, theirs = (edit(Encoder(p), p.get("transformer"), image, PROMPT, " ", 2, 1., width=96, height=64, geometry=rig("2509").geometry) for p in (parts, rig("2509").parts))
    looks(ours, theirs)
