"""The same numbers as diffusers' edit pipelines: embeddings, latents, schedule, velocity, image; tiny random models, CPU float32.

With the flat VAE, the shared prefix and the windows together switched off they are the pipelines' bit for bit, with all on to the rounding of
float32.
"""
import json, math, shutil
from collections import namedtuple
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from PIL import Image

from qie_nb.cache import EmbeddingCacheManager
from qie_nb.config import LoraSection
from qie_nb.data.dataset import Geometry, ImageDataset
from qie_nb.encoding.prompts import encode_prompt, vl_images
from qie_nb.encoding.vae import decode_latents, encode_image, vae_factor
from qie_nb.encoding.encoder import Encoder
from qie_nb.encoding.precompute import precompute
from qie_nb.models.flow_matching import calculate_mu, img_shapes, pack_latents, unpack_latents, velocity
from qie_nb.data.batches import pad_prompts
from qie_nb.lora.adapters import add_lora, load_lora, save_lora
from qie_nb.models.components import VARIANTS, Components, find_variant, load_component
from qie_nb.predict import edit, sampling_schedule, start_noise
from qie_nb.tiny.random_models import tiny_folder
from helpers import small_areas

CONTROL, VL = 128 * 128, 112 * 112                # pixels; the pipelines' own are 1024*1024 and 384*384
SIZES = (50, 75), (180, 90), (40, 100)            # (w, h) of the control images: portrait, landscape, tall
SEEN = (96, 160), (192, 96), (96, 192)            # (w, h) that the VAE gets of them at CONTROL, worked out by hand
TARGET = 144, 80                                  # (w, h): no control's aspect, no multiple of 32, not square
PROMPT, OTHER, SEED, STEPS = "make the sky green", "remove the second boat from the left, keep its shadow", 5, 3

class Case(namedtuple("Case", "variant n stages native", defaults=(3, False))):
    def __str__(self): return "-".join([self.variant, str(self.n)] + ["factor4"] * (self.stages == 2) + ["1MP"] * self.native)

CASES = [Case("v1", 1), Case("2509", 1), Case("2509", 2), Case("2509", 3), Case("2511", 1), Case("2511", 2)]
FACTOR4 = [Case("v1", 1, 2), Case("2511", 2, 2)]
MEGAPIXEL = [Case("v1", 1, 3, True), Case("2509", 3, 3, True), Case("2511", 2, 3, True)]
each_variant = pytest.mark.parametrize("variant", VARIANTS)
each = lambda cases: pytest.mark.parametrize("case", cases, ids=str)
both_ways = pytest.mark.parametrize("on", [False, True], ids=["plain", "shared+flat+windows"])

@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield

@lru_cache
def rig(variant, stages=3, native=False):
    "One model folder read twice: by diffusers alone, and by our components."
    folder = tiny_folder(variant, None if native else (CONTROL, VL), 0, stages)
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    areas = (1024 * 1024, 384 * 384) if native else (CONTROL, VL)
    geometry = Geometry(control_area=areas[0], vl_area=None if variant == "v1" else areas[1])
    parts = Components(str(folder))
    return SimpleNamespace(folder=folder, pipe=pipe, parts=parts, transformer=parts.get("transformer"), geometry=geometry)

def rig_of(case): return rig(case.variant, case.stages, case.native)

def picture(size, seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))

def pictures(n): return [picture(s, i) for i, s in enumerate(SIZES[:n])]

def small(variant): return small_areas(variant, CONTROL, VL)

@contextmanager
def watch(transformer):
    "(keyword arguments, output) of every call of a transformer."
    calls = []
    hook = transformer.register_forward_hook(lambda _, args, kw, out: calls.append((kw, out[0])), with_kwargs=True)
    try: yield calls
    finally: hook.remove()

def keep(mp, obj, name, into):
    real = getattr(obj, name)
    def wrapped(*args, **kw):
        into.append((kw, real(*args, **kw)))
        return into[-1][1]
    mp.setattr(obj, name, wrapped)

def given(variant, images): return images[0] if variant == "v1" else images

def pipe_call(r, variant, images, scale=1.0, size=TARGET, steps=STEPS, **kw):
    return r.pipe(image=given(variant, images), prompt=PROMPT, negative_prompt=" " if scale > 1 else None, true_cfg_scale=scale,
                  width=size[0], height=size[1], num_inference_steps=steps, generator=torch.Generator().manual_seed(SEED), **kw).images[0]

def edit_call(r, transformer, images, scale=1.0, size=TARGET, on=False):
    return edit(Encoder(r.parts, share_prefix=on, vae_2d=on), transformer, images, PROMPT, " ", STEPS, scale,
                width=size[0], height=size[1], geometry=r.geometry, seed=SEED)

@lru_cache
def piped(case, scale=1.0, size=TARGET, steps=STEPS, output="pil"):
    "A run of the pipeline and what it computed on the way."
    r, got = rig_of(case), SimpleNamespace(prompts=[], latents=[])
    with pytest.MonkeyPatch.context() as mp, watch(r.pipe.transformer) as got.calls, nullcontext() if case.native else small(case.variant):
        keep(mp, r.pipe, "encode_prompt", got.prompts)
        keep(mp, r.pipe, "prepare_latents", got.latents)
        got.image = pipe_call(r, case.variant, pictures(case.n), scale, size, steps, output_type=output)
    got.noise, got.controls = got.latents[0][1]
    got.sigmas, got.timesteps = r.pipe.scheduler.sigmas.clone(), r.pipe.scheduler.timesteps.clone()
    return got

@lru_cache
def edited(case, scale=1.0, size=TARGET, on=False):
    "The same run by `edit`, and its transformer calls."
    r = rig_of(case)
    with watch(r.transformer) as calls: return edit_call(r, r.transformer, pictures(case.n), scale, size, on), calls

def our_prompt(r, variant, prompt, images, on=False):
    vl = vl_images(images, r.geometry)
    e, m = encode_prompt(r.parts.get("text_encoder"), r.parts.get("processor"), VARIANTS[variant], prompt, vl, share_prefix=on)
    return pad_prompts(list(e), list(m))

def our_controls(r, images, on=False):
    return [encode_image(r.parts.get("vae"), im, r.geometry.control(im.size), use_2d=on) for im in images]

def latent_sizes(r, images, target): # target (w, h) -> ((h, w), [(h, w), ...])
    f = vae_factor(r.parts.get("vae"))
    return (target[1] // f, target[0] // f), [tuple(s // f for s in r.geometry.control(im.size)[::-1]) for im in images]

def our_noise(r, target):
    f = vae_factor(r.parts.get("vae"))
    return start_noise((1, 1, 16, target[1] // f, target[0] // f), SEED, None, "cpu", torch.float32)

def rows(shapes): return [[tuple(s) for s in row] for row in shapes]

def same(a, b):
    "Bit equality, with a message that says how far off."
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    assert a.dtype == b.dtype, f"dtypes {a.dtype} and {b.dtype}"
    assert torch.equal(a, b), f"largest difference {(a.double() - b.double()).abs().max():.3g}"

def apart(a, b): return (a - b).abs().max().item()

def broadcast_stop(a, b, on, within=1e-5):
    "Bit equality in the plain way; with less work, to `within` of the largest value."
    if not on: return same(a, b)
    assert a.shape == b.shape and a.dtype == b.dtype
    assert apart(a, b) <= within * b.abs().max(), f"{apart(a, b):.3g} apart at a scale of {b.abs().max():.3g}"

def looks(ours, theirs, on):
    "The same grey levels; with less work, one level at most where a value is on the edge (1e-5 of the range: one in a thousand)."
    off = np.abs(ours.astype(int) - theirs)
    assert off.max() <= on and (off > 0).mean() <= 1e-3 * on, f"{off.max()} grey levels, {(off > 0).mean():.2g} of the values"

# --- prompts

@each(CASES)
@pytest.mark.parametrize("prompt", [PROMPT, OTHER, " "])
@both_ways
def test_prompt_embeddings_are_the_pipelines(case, prompt, on):
    r, images = rig_of(case), pictures(case.n)
    seen = [r.pipe.image_processor.resize(im, *r.geometry.vl(im.size)[::-1]) for im in images]
    theirs, mask = r.pipe.encode_prompt(prompt, given(case.variant, seen))
    ours, our_mask = our_prompt(r, case.variant, prompt, images, on)
    broadcast_stop(ours, theirs, on)
    assert our_mask is None and mask is None

@each_variant
@both_ways
def test_an_empty_prompt_is_encoded_as_one_space(variant, on):
    r = rig(variant)
    same(our_prompt(r, variant, "", pictures(1), on)[0], our_prompt(r, variant, " ", pictures(1), on)[0])

@each(CASES + FACTOR4)
@both_ways
def test_embeddings_of_a_run_are_the_pipelines_for_prompt_and_negative_prompt(case, on):
    r, run = rig_of(case), piped(case, 4.0)
    for prompt, (_, (theirs, mask)) in zip((PROMPT, " "), run.prompts, strict=True):
        ours, our_mask = our_prompt(r, case.variant, prompt, pictures(case.n), on)
        broadcast_stop(ours, theirs, on)
        assert our_mask is None and mask is None

@both_ways
def test_v1_pads_a_batch_of_two_as_the_pipeline(on):
    r, images = rig("v1"), [picture(SIZES[0], 1), picture(SIZES[0], 2)]
    theirs, mask = r.pipe.encode_prompt([PROMPT, OTHER], vl_images(images, r.geometry))
    alone = [our_prompt(r, "v1", p, [im], on)[0][0] for p, im in zip((PROMPT, OTHER), images)]
    ours, our_mask = pad_prompts(alone)
    assert len(alone[0]) != len(alone[1])
    assert torch.equal(our_mask, mask.bool())
    assert ours.shape == theirs.shape and apart(ours, theirs) < 1e-5 # the encoder's products round differently in a batch of two

@each_variant
def test_padding_changes_nothing_with_its_mask_and_something_without(variant):
    r, images = rig(variant), pictures(1)
    alone = [our_prompt(r, variant, p, images)[0] for p in (PROMPT, OTHER)]
    padded, mask = pad_prompts([e[0] for e in alone])
    noise, controls = pack_latents(our_noise(r, TARGET)), [pack_latents(c) for c in our_controls(r, images)]
    shapes = img_shapes(*latent_sizes(r, images, TARGET))
    call = lambda n, e, m: velocity(r.transformer, noise.expand(n, -1, -1), [c.expand(n, -1, -1) for c in controls], torch.full((n,), 700.),
                                    e, m, shapes * n)
    expected = torch.cat([call(1, e, None) for e in alone])
    assert mask is not None and mask.sum(1).tolist() == [e.shape[1] for e in alone]
    assert apart(call(2, padded, mask), expected) < 1e-5
    assert apart(call(2, padded, None)[0], expected[0]) > 1e-3

# --- latents, shapes, schedule

@each(CASES + FACTOR4)
@both_ways
def test_control_latents_are_the_pipelines(case, on):
    r = rig_of(case)
    broadcast_stop(torch.cat([pack_latents(c) for c in our_controls(r, pictures(case.n), on)], dim=1), piped(case).controls, on)

@each(CASES + FACTOR4)
@both_ways
def test_decoded_latents_are_the_pipelines(case, on):
    r = rig_of(case)
    z = our_noise(r, TARGET)
    with pytest.MonkeyPatch.context() as mp: # whatever the model says, the pipeline ends at these latents
        mp.setattr(r.pipe.scheduler, "step", lambda *a, **kw: (pack_latents(z),))
        with small(case.variant): theirs = pipe_call(r, case.variant, pictures(case.n), steps=2)
    looks(decode_latents(r.parts.get("vae"), z, use_2d=on)[0], np.asarray(theirs), on)

@each(CASES + FACTOR4)
def test_packed_noise_is_the_pipelines(case):
    same(pack_latents(our_noise(rig_of(case), TARGET)), piped(case).noise)

@each(CASES + FACTOR4)
def test_img_shapes_are_the_pipelines(case):
    r = rig_of(case)
    assert rows(img_shapes(*latent_sizes(r, pictures(case.n), TARGET))) == rows(piped(case).calls[0][0]["img_shapes"])

@each(CASES + FACTOR4)
def test_control_sides_are_not_swapped(case):
    r, f = rig_of(case), 2 ** case.stages
    shapes = piped(case).calls[0][0]["img_shapes"][0][1:]
    for im, (w, h), latent, shape in zip(pictures(case.n), SEEN[:case.n], our_controls(r, pictures(case.n)), shapes, strict=True):
        assert (w > h) == (im.width > im.height)
        assert r.geometry.control(im.size) == (w, h)
        assert tuple(latent.shape) == (1, 16, 1, h // f, w // f)
        assert tuple(shape) == (1, h // f // 2, w // f // 2)

@each_variant
@pytest.mark.parametrize("channels,h,w", [(16, 6, 10), (4, 2, 8), (16, 20, 12)])
def test_packing_is_the_pipelines(variant, channels, h, w):
    pipe = type(rig(variant).pipe)
    z = torch.randn(2, channels, 1, h, w, generator=torch.Generator().manual_seed(0))
    tokens = pipe._pack_latents(z, 2, channels, h, w)
    same(pack_latents(z), tokens)
    same(unpack_latents(tokens, h, w), pipe._unpack_latents(tokens, h * 8, w * 8, 8)) # theirs takes pixels
    same(unpack_latents(tokens, h, w), z)

@pytest.mark.parametrize("variant", ["v1", "2509"])
@pytest.mark.parametrize("width,height,steps",
    [(1024, 1024, 20), (1024, 1024, 4), (1328, 800, 8), (512, 768, 50), (144, 80, 2), (64, 32, 7)]) # one step is nan in diffusers itself
def test_schedule_is_the_pipelines(variant, width, height, steps, monkeypatch):
    r = rig(variant)
    monkeypatch.setattr(r.pipe.transformer, "forward", lambda hidden_states, **kw: (torch.zeros_like(hidden_states),))
    with small(variant): pipe_call(r, variant, pictures(1), size=(width, height), steps=steps, output_type="latent")
    own = sampling_schedule(r.parts.get("scheduler"), steps, (height // 16) * (width // 16))
    same(own.timesteps, r.pipe.scheduler.timesteps)
    same(own.sigmas, r.pipe.scheduler.sigmas)
    assert own.begin_index == r.pipe.scheduler.begin_index == 0 and len(own.timesteps) == steps

@each(CASES + FACTOR4)
def test_schedule_of_a_run_is_the_pipelines(case):
    run = piped(case)
    own = sampling_schedule(rig_of(case).parts.get("scheduler"), STEPS, run.noise.shape[1])
    same(own.timesteps, run.timesteps)
    same(own.sigmas, run.sigmas)

def test_shift_at_one_megapixel_is_two():
    assert math.exp(calculate_mu(64 * 64, rig("2511").parts.get("scheduler").config)) == pytest.approx(2.0, abs=0.01)

# --- the transformer and the image

def our_arguments(case, on=False):
    "What `velocity` takes beside the timestep, computed by us: (noise, controls, embeds, mask, shapes)."
    r, images = rig_of(case), pictures(case.n)
    controls = [pack_latents(c) for c in our_controls(r, images, on)]
    text, shapes = our_prompt(r, case.variant, PROMPT, images, on), img_shapes(*latent_sizes(r, images, TARGET))
    return pack_latents(our_noise(r, TARGET)), controls, *text, shapes

@each(CASES + FACTOR4)
@both_ways
def test_velocity_is_the_pipelines(case, on):
    run, (noise, controls, *text) = piped(case), our_arguments(case, on)
    broadcast_stop(velocity(rig_of(case).transformer, noise, controls, run.timesteps[:1], *text), run.calls[0][1][:, :noise.shape[1]], on)

@each(CASES + FACTOR4)
@pytest.mark.parametrize("scale", [1.0, 4.0])
@both_ways
def test_every_transformer_call_of_a_run_gets_the_pipelines_arguments(case, scale, on):
    theirs, ours = piped(case, scale).calls, edited(case, scale, on=on)[1]
    assert len(ours) == len(theirs) == STEPS * (2 if scale > 1 else 1)
    for (a, _), (b, _) in zip(ours, theirs):
        same(a["timestep"], b["timestep"])
        for name in ("hidden_states", "encoder_hidden_states"): broadcast_stop(a[name], b[name], on)
        assert a["guidance"] is b["guidance"] is a["encoder_hidden_states_mask"] is b["encoder_hidden_states_mask"] is None
        assert rows(a["img_shapes"]) == rows(b["img_shapes"])

@each(CASES + FACTOR4)
@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["no-cfg", "cfg"])
@both_ways
def test_image_is_the_pipelines(case, scale, on):
    theirs, ours = np.asarray(piped(case, scale).image), edited(case, scale, on=on)[0]
    assert ours.dtype == theirs.dtype == np.uint8 and ours.shape == theirs.shape == (TARGET[1], TARGET[0], 3)
    assert theirs.std() > 5 # no flat image, which would equal any other
    looks(ours, theirs, on)

@each([c for c in CASES + FACTOR4 if c.n == 1])
@both_ways
def test_image_at_the_default_size_is_the_pipelines(case, on):
    theirs, ours = np.asarray(piped(case, 4.0, (None, None)).image), edited(case, 4.0, (None, None), on)[0]
    assert ours.shape == theirs.shape == (SEEN[0][1], SEEN[0][0], 3)
    looks(ours, theirs, on)

def test_guidance_changes_the_image():
    assert not np.array_equal(edited(Case("2511", 2), 4.0)[0], edited(Case("2511", 2), 1.0)[0])

@pytest.mark.slow
@each(MEGAPIXEL)
@both_ways
def test_conditioning_is_the_pipelines_at_one_megapixel(case, on):
    r, run, (noise, controls, embeds, mask, shapes) = rig_of(case), piped(case, steps=2, output="latent"), our_arguments(case, on)
    assert r.geometry == Geometry(**r.parts.areas)
    broadcast_stop(embeds, run.prompts[0][1][0], on)
    assert mask is None and run.prompts[0][1][1] is None
    broadcast_stop(torch.cat(controls, dim=1), run.controls, on)
    assert rows(shapes) == rows(run.calls[0][0]["img_shapes"])
    broadcast_stop(velocity(r.transformer, noise, controls, run.timesteps[:1], embeds, mask, shapes), run.calls[0][1][:, :noise.shape[1]], on)

# --- adapters

def adapted(folder, r, alpha):
    "Our transformer with an adapter whose B is not zero."
    settings = LoraSection(r=r, lora_alpha=alpha, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    tr = add_lora(load_component(folder, "transformer"), settings)
    g = torch.Generator().manual_seed(1)
    for n, p in tr.named_parameters():
        if ".lora_B." in n: p.copy_(torch.randn(p.shape, generator=g) * 0.3)
    return tr

@each_variant
def test_lora_gives_the_same_image_in_the_pipeline(variant, tmp_path):
    r, case = rig(variant), Case(variant, 1)
    tr = adapted(r.folder, 4, 12)
    save_lora(tr, tmp_path)
    r.pipe.load_lora_weights(str(tmp_path))
    try:
        scalings = {m.scaling[a] for m in r.pipe.transformer.modules() if hasattr(m, "lora_A") for a in m.lora_A}
        with small(variant): theirs = np.asarray(pipe_call(r, variant, pictures(1), 4.0))
    finally: r.pipe.unload_lora_weights()
    assert scalings == {3.0} # alpha / r
    again = load_component(r.folder, "transformer")
    load_lora(again, tmp_path)
    for ours in (tr, again): assert np.array_equal(edit_call(r, ours, pictures(1), 4.0), theirs)
    assert np.abs(theirs.astype(int) - edited(case, 4.0)[0]).mean() > 1 # the adapter does something

# --- training reads what inference computes

def write_pairs(root, n, count=1):
    "`count` samples of one prompt and `n` control images each; sample 0 has the images of `images(n)`."
    folders = [root/"control_images"] + [root/f"control_images_{k}" for k in range(2, n + 1)]
    for f in (root/"training_images", *folders): f.mkdir(parents=True)
    for i in range(count):
        picture((70, 44), 50 + i).save(root/"training_images"/f"s{i}.png")
        (root/"training_images"/f"s{i}.txt").write_text(PROMPT)
        for k, f in enumerate(folders): picture(SIZES[k], k if i == 0 else 100 + 10 * i + k).save(f/f"s{i}.png")

def filled(tmp_path, r, n, count=1, on=True):
    write_pairs(tmp_path/"pairs", n, count)
    data = ImageDataset(dict(dataset_path=str(tmp_path/"pairs"), image_size=[128, 96], cache_dir=str(tmp_path/"cache"),
                             caption_dropout_rate=0.5)) # with dropout, so that empty prompts are made too
    precompute(data, Encoder(r.parts, EmbeddingCacheManager(tmp_path/"cache"), share_prefix=on, vae_2d=on))
    return data

def read(data, i):
    "A sample's tensors by their cache keys."
    return {name: data.cache.load_cache(kind, key) for name, (kind, key, _) in data.keys(i).items()}

@each(CASES + FACTOR4)
@both_ways
def test_training_conditioning_is_the_pipelines(case, tmp_path, on):
    r, run = rig_of(case), piped(case, 4.0)
    data = filled(tmp_path, r, case.n, on=on)
    got = read(data, 0)
    controls = [got[f"control_latent.{k}"] for k in range(case.n)]
    broadcast_stop(torch.cat([pack_latents(c[None]) for c in controls], dim=1), run.controls, on)
    for prefix, (_, (theirs, _)) in zip(("", "empty_"), run.prompts, strict=True):
        broadcast_stop(got[f"{prefix}prompt_embed"][None], theirs, on)
        assert got[f"{prefix}prompt_embeds_mask"].all()
    item = data[0]
    assert item["cached"] and torch.equal(item["pixel_latent"], got["pixel_latent"])
    target, *sizes = data.bucket(0)
    f = 2 ** case.stages
    shapes = img_shapes(tuple(s // f for s in target[::-1]), [c.shape[-2:] for c in controls])
    assert rows(shapes)[0][1:] == rows(run.calls[0][0]["img_shapes"])[0][1:] and tuple(sizes) == SEEN[:case.n]

@each([Case("v1", 1), Case("2511", 1), Case("2511", 2, 2)])
@both_ways
def test_target_latent_is_the_pipelines_encoding_of_the_resized_target(case, tmp_path, on):
    r = rig_of(case)
    data = filled(tmp_path, r, case.n, on=on)
    w, h = data.bucket(0)[0]
    assert (w, h) == edit_plus.calculate_dimensions(128 * 96, 70 / 44) == (128, 96)
    with Image.open(tmp_path/"pairs/training_images/s0.png") as im: resized = im.convert("RGB").resize((w, h), Image.Resampling.LANCZOS)
    theirs = r.pipe._encode_vae_image(r.pipe.image_processor.preprocess(resized, h, w).unsqueeze(2), None)
    broadcast_stop(read(data, 0)["pixel_latent"][None], theirs, on)
    assert theirs.shape == (1, 16, 1, h // 2 ** case.stages, w // 2 ** case.stages)

@each_variant
def test_same_prompt_with_another_image_has_another_embedding_and_key(variant, tmp_path):
    data = filled(tmp_path, rig(variant), 1, count=2)
    for name in ("prompt_embed", "empty_prompt_embed"):
        assert data.keys(0)[name].key != data.keys(1)[name].key
        a, b = read(data, 0)[name], read(data, 1)[name]
        assert a.shape == b.shape and apart(a, b) > 1e-3

@pytest.mark.parametrize("variant", ["2509", "2511"])
def test_the_order_of_control_images_counts(variant):
    r, (a, b) = rig(variant), [picture(SIZES[0], 1), picture(SIZES[0], 2)]
    assert apart(our_prompt(r, variant, PROMPT, [a, b])[0], our_prompt(r, variant, PROMPT, [b, a])[0]) > 1e-3

# --- zero_cond_t

def test_zero_cond_t_changes_the_output_of_the_same_weights():
    old, new = load_component(rig("2509").folder, "transformer"), load_component(rig("2511").folder, "transformer")
    assert (old.config.zero_cond_t, new.config.zero_cond_t) == (False, True)
    new.load_state_dict(old.state_dict()) # strict: no weight tells them apart
    noise, controls, *text = our_arguments(Case("2509", 2))
    assert apart(*(velocity(t, noise, controls, torch.tensor([700.]), *text) for t in (old, new))) > 1e-3

@pytest.mark.parametrize("how", ["false", "absent"])
def test_a_2511_that_lost_its_flag_is_refused(how, tmp_path):
    folder = tmp_path/"model"
    shutil.copytree(rig("2511").folder, folder)
    path = folder/"transformer/config.json"
    config = json.loads(path.read_text())
    assert config.pop("zero_cond_t") is True
    path.write_text(json.dumps(config | ({"zero_cond_t": False} if how == "false" else {})))
    with pytest.raises(ValueError, match="`model.variant` is 2511, but .* is 2509 .*zero_cond_t=false"): find_variant(folder, "2511")
    assert find_variant(folder).name == "2509"
    assert find_variant(rig("2511").folder, "2511").zero_cond_t
