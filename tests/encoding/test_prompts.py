"""The prefix once and the VAE in two dimensions: the same sums in another order, fewer of them, and no state from one call to the next."""
import copy
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

import qie_nb.encoding.encode, qie_nb.encoding.prompts
from qie_nb.encoding.encode import decode_latents, encode_image, encode_images, encode_prompt
from qie_nb.encoding.vae import vae_2d, vae_flops
from qie_nb.models.components import VARIANTS, load_component, prompt_text
from qie_nb.encoding.prompts import PrefixNotSharable, encode_prefix, encode_suffixes, suffix_ids
from qie_nb.tiny.random_models import tiny_folder

PROMPTS = ["make the sky green", "", "remove the second boat from the left, keep its shadow", "x"]
SIZES = (84, 140), (168, 56), (112, 112)          # (w, h) as the text encoder sees them
CASES = [("v1", 1), ("2509", 1), ("2509", 2), ("2511", 3)]
each_case = pytest.mark.parametrize("variant,n", CASES)

@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield

@pytest.fixture(params=["1d", "3d"])
def positions(request, monkeypatch):
    "Both ways of numbering image tokens, whatever the installed pair of libraries does."
    for module in (qie_nb.encoding.prompts, qie_nb.encoding.encode): monkeypatch.setattr(module, "positions_of", lambda pipeline: request.param)
    return request.param

@lru_cache
def rig(variant):
    folder = tiny_folder(variant)
    return SimpleNamespace(folder=folder, variant=VARIANTS[variant], te=load_component(folder, "text_encoder"),
                           proc=load_component(folder, "processor"))

def picture(size, seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))

def pictures(n, seed=0): return [picture(s, 10 * seed + i) for i, s in enumerate(SIZES[:n])]
@contextmanager
def passes(r):
    "Tokens of every pass of the language model."
    lengths = []
    hook = r.te.model.language_model.layers[0].register_forward_pre_hook(lambda m, a: lengths.append(a[0].shape[1]))
    try: yield lengths
    finally: hook.remove()

def prefix_of(r, *lists): return encode_prefix(r.te, r.proc, r.variant, list(lists))
def suffixes(r, prefix, *prompts): return encode_suffixes(r.te, r.proc, r.variant, prefix, list(prompts))
def joined(r, prompt, images, te=None): return encode_prompt(te or r.te, r.proc, r.variant, prompt, images)[0]
def whole(r, prompt, images, te=None): return encode_prompt(te or r.te, r.proc, r.variant, prompt, images, shared=False)[0]

def close(a, b, within=1e-5):
    assert a.shape == b.shape and a.dtype == b.dtype
    assert (a - b).abs().max() <= within * b.abs().max(), f"{(a - b).abs().max():.3g} apart at a scale of {b.abs().max():.3g}"

# --- the joined embedding is the whole one

@each_case
@pytest.mark.parametrize("prompt", PROMPTS)
def test_prefix_and_suffix_are_the_whole_encoding(variant, n, prompt, positions):
    r = rig(variant)
    close(joined(r, prompt, pictures(n)), whole(r, prompt, pictures(n)))

@each_case
def test_three_dimensional_positions_are_the_models_own(variant, n, monkeypatch):
    r = rig(variant)
    flat = joined(r, PROMPTS[0], pictures(n))
    for module in (qie_nb.encoding.prompts, qie_nb.encoding.encode): monkeypatch.setattr(module, "positions_of", lambda pipeline: "3d")
    inputs = r.proc(text=[prompt_text(r.variant, PROMPTS[0], n)], images=pictures(n), return_tensors="pt")
    expected = r.te.model(**inputs).last_hidden_state[:, 64:]
    close(joined(r, PROMPTS[0], pictures(n)), expected)
    assert (flat - expected).abs().max() > 1e-3 # the two numberings differ, so the test can tell

def test_a_batch_is_what_its_samples_are_alone(positions):
    r, lists = rig("2511"), [pictures(2, seed) for seed in range(3)]
    prefix = prefix_of(r, *lists)
    got = suffixes(r, prefix, *PROMPTS[:3])
    assert len({len(s) for s in got}) == 3 and len(prefix) == 3 # three lengths, so two are padded
    for i, (s, p, images) in enumerate(zip(got, PROMPTS, lists)):
        close(torch.cat([prefix.hidden[i], s])[None], whole(r, p, images))

def rms(errors): return torch.cat([e.flatten() for e in errors]).pow(2).mean().sqrt().item()

@each_case
def test_bfloat16_is_as_near_to_float32_as_in_one_pass(variant, n):
    r = rig(variant)
    bf16, fp32 = load_component(r.folder, "text_encoder", torch.bfloat16), copy.deepcopy(r.te)
    fp32.load_state_dict(bf16.state_dict()) # the same rounded weights: what is left is the rounding on the way
    shared, plain = [], []
    for seed in range(6):
        images = pictures(n, seed)
        for prompt in PROMPTS:
            exact = whole(r, prompt, images, fp32)
            shared.append(joined(r, prompt, images, bf16).float() - exact)
            plain.append(whole(r, prompt, images, bf16).float() - exact)
    assert joined(r, "x", pictures(n), bf16).dtype == torch.bfloat16 and rms(plain) > 1e-3
    assert rms(shared) <= 1.1 * rms(plain), f"{rms(shared):.3g} against {rms(plain):.3g}"

# --- the cut

ODD = ["\n two lines\n\n", "   three blanks in front", "été 画 🙂",
       "<|im_end|>\n<|im_start|>assistant\n", "{braces} %s", "'s", " ", "\u0301 on its own"]

@each_case
@pytest.mark.parametrize("prompt", ODD + PROMPTS)
def test_tokens_of_prefix_and_suffix_are_the_processors(variant, n, prompt):
    r = rig(variant)
    prefix = prefix_of(r, pictures(n))
    theirs = r.proc(text=[prompt_text(r.variant, prompt, n)], images=pictures(n))["input_ids"][0]
    assert [*prefix.ids, *suffix_ids(r.proc, r.variant, prefix, prompt)] == list(theirs)
    assert r.proc.tokenizer.decode(prefix.ids[-1:]) == "<|vision_end|>" and len(prefix.counts) == n
    assert prefix.hidden.shape[1] == prefix.count - 64

@pytest.mark.parametrize("token", ["vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"])
def test_a_prompt_with_vision_tokens_is_refused(token):
    r = rig("2511")
    prompt = f"like <|{token}|> here"
    for call in (lambda: prompt_text(r.variant, prompt, 2), lambda: joined(r, prompt, pictures(1)), lambda: whole(r, prompt, pictures(1)),
                 lambda: suffixes(r, prefix_of(r, pictures(1)), prompt)):
        with pytest.raises(ValueError, match=rf"`prompt` must not contain the token <\|{token}\|>, got 'like .* here'; remove it"): call()

class Odd:
    "A tokenizer whose first tokens depend on the last ones."
    def __init__(self, real): self.real = real
    def __getattr__(self, name): return getattr(self.real, name)
    def __call__(self, text, **kw):
        out = self.real(text, **kw)
        for row in out["input_ids"] if isinstance(text, list) else [out["input_ids"]]:
            if "green" in (text[0] if isinstance(text, list) else text): row[0] += 1
        return out

def test_a_tokenizer_without_a_cut_gets_the_whole_encoding():
    r = rig("2511")
    odd = SimpleNamespace(**vars(r))
    odd.proc = copy.copy(r.proc)
    odd.proc.tokenizer = Odd(r.proc.tokenizer)
    odd.proc.__class__ = type("OddProcessor", (type(r.proc),), {}) # the copy's own, so that nothing of the real one is touched
    prefix = prefix_of(odd, pictures(1))
    with pytest.raises(PrefixNotSharable, match="do not begin with the prefix's; encode it whole"): suffixes(odd, prefix, "make it green")
    assert torch.equal(joined(odd, "make it green", pictures(1)), whole(odd, "make it green", pictures(1)))
    with passes(r) as lengths: joined(odd, "make it blue", pictures(1))
    assert len(lengths) == 2 # this one could be shared

def test_samples_of_other_sizes_are_not_put_together():
    r = rig("2511")
    for other in ([picture((140, 84), 1)], pictures(2), []): # turned round (as many tokens), one more, none
        with pytest.raises(ValueError, match="must have images of the same sizes in each sample"): prefix_of(r, pictures(1), other)
    prefix = prefix_of(r, pictures(1))
    with pytest.raises(ValueError, match="`prompts` must be one for each of 1 samples, got 2"): suffixes(r, prefix, "a", "b")

# --- no state, no work twice

@each_case
def test_a_suffix_does_not_know_what_ran_before_it(variant, n, positions):
    r = rig(variant)
    alone = suffixes(r, prefix_of(r, pictures(n)), PROMPTS[0])[0]
    prefix = prefix_of(r, pictures(n))
    before = [(layer.keys.clone(), layer.values.clone()) for layer in prefix.cache.layers]
    for other in (*PROMPTS[1:], PROMPTS[2] * 5): suffixes(r, prefix, other)
    assert torch.equal(suffixes(r, prefix, PROMPTS[0])[0], alone)
    assert all(torch.equal(k, l.keys) and torch.equal(v, l.values) for (k, v), l in zip(before, prefix.cache.layers, strict=True))
    assert torch.equal(joined(r, PROMPTS[0], pictures(n))[0], torch.cat([prefix.hidden[0], alone])) # nor do one caption's bytes

def test_a_run_that_fails_half_way_leaves_the_prefix_alone(monkeypatch):
    r = rig("2511")
    prefix = prefix_of(r, pictures(1))
    alone = suffixes(r, prefix, PROMPTS[0])[0]
    hook = r.te.model.language_model.layers[1].register_forward_pre_hook(lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError): suffixes(r, prefix, PROMPTS[2])
    hook.remove()
    assert torch.equal(suffixes(r, prefix, PROMPTS[0])[0], alone)

def test_positions_left_in_the_model_by_another_call_do_no_harm():
    r = rig("2511")
    alone = joined(r, PROMPTS[0], pictures(1))
    r.te.model(**r.proc(text=[prompt_text(r.variant, "x", 3)], images=pictures(3), return_tensors="pt")) # notes its own rope_deltas
    assert r.te.model.rope_deltas is not None
    assert torch.equal(joined(r, PROMPTS[0], pictures(1)), alone)
    r.te.model.rope_deltas = None

@each_case
def test_images_are_seen_once_and_the_language_head_never(variant, n):
    r, seen = rig(variant), []
    parts = dict(vision=r.te.model.visual, head=r.te.lm_head)
    hooks = [m.register_forward_hook(lambda *a, name=name: seen.append(name)) for name, m in parts.items()]
    with passes(r) as lengths:
        prefix = prefix_of(r, pictures(n))
        for p in PROMPTS: suffixes(r, prefix, p)
        assert seen == ["vision"]
        joined(r, "x", pictures(n)), whole(r, "x", pictures(n)) # each on images that are new to it
    for h in hooks: h.remove()
    assert seen == ["vision"] * 3
    suffix = lambda p: len(suffix_ids(r.proc, r.variant, prefix, p))
    assert lengths == [prefix.count, *map(suffix, PROMPTS), prefix.count, suffix("x"), prefix.count + suffix("x")]

# --- the VAE

@lru_cache
def vae(stages, dtype=torch.float32): return load_component(tiny_folder("2511", vae_stages=stages), "vae", dtype)

def test_flat_convolutions_save_what_they_promise():
    with torch.device("meta"): real = AutoencoderKLQwenImage()
    plain, flat = vae_flops(real, flat=False), vae_flops(real)
    assert plain["encode"] / 1e12 == pytest.approx(7.39, abs=0.01) and flat["encode"] / 1e12 == pytest.approx(2.85, abs=0.01)
    assert plain["encode"] / flat["encode"] >= 2.5 and plain["decode"] / flat["decode"] >= 2.4
    for stages in (2, 3):
        plain, flat = (vae_flops(vae(stages), (96, 64), on) for on in (False, True))
        assert all(plain[k] / flat[k] >= 2.5 for k in plain)

@pytest.mark.parametrize("stages", [2, 3])
def test_flat_latents_and_images_are_the_same(stages):
    v, images = vae(stages), [picture((96, 64), i) for i in range(3)]
    flat, plain = (encode_images(v, images, (96, 64), flat=on) for on in (True, False))
    close(flat, plain)
    assert flat.shape == (3, 16, 1, 64 // 2 ** stages, 96 // 2 ** stages)
    for i, im in enumerate(images): close(flat[i:i + 1], encode_image(v, im, (96, 64)))
    assert torch.equal(encode_image(v, images[0], (96, 64)), encode_images(v, images[:1], (96, 64)))
    a, b = (decode_latents(v, plain, flat=on).astype(int) for on in (True, False))
    assert np.abs(a - b).max() <= 1 and (a != b).mean() <= 1e-3 and b.std() > 5

@pytest.mark.parametrize("call", [lambda v, **kw: encode_image(v, picture((96, 64), 0), (96, 64), **kw),
                                  lambda v, **kw: decode_latents(v, torch.zeros(1, 16, 1, 8, 12), **kw)], ids=["encode", "decode"])
def test_flat_is_the_default_and_can_be_switched_off(call):
    count = {}
    for name, kw in dict(default={}, on=dict(flat=True), off=dict(flat=False)).items():
        with FlopCounterMode(display=False) as counter: call(vae(3), **kw)
        count[name] = counter.get_total_flops()
    assert count["default"] == count["on"] and count["off"] / count["on"] >= 2.5

@pytest.mark.parametrize("stages", [2, 3])
def test_flat_bfloat16_is_as_near_to_float32(stages):
    half, full = vae(stages, torch.bfloat16), copy.deepcopy(vae(stages))
    full.load_state_dict(half.state_dict())
    error = {True: [], False: []}
    for im in (picture((96, 64), i) for i in range(4)):
        exact = encode_image(full, im, (96, 64), flat=False)
        for on in error: error[on].append(encode_image(half, im, (96, 64), flat=on).float() - exact)
    assert rms(error[False]) > 1e-3 and rms(error[True]) <= 1.1 * rms(error[False]), {on: rms(e) for on, e in error.items()}

def test_several_frames_are_left_to_the_real_convolutions():
    v = vae(3)
    film = torch.randn(1, 3, 5, 64, 64, generator=torch.Generator().manual_seed(0))
    z = v.encode(film).latent_dist.mode()
    with vae_2d(v): close(v.encode(film).latent_dist.mode(), z)
    with vae_2d(v): close(v.decode(z).sample, v.decode(z).sample)
    assert z.shape[2] == 2

def test_the_vae_is_as_before_whatever_happens():
    v, other = copy.deepcopy(vae(3)), vae(3)
    im, plain = picture((96, 64), 0), encode_image(other, picture((96, 64), 0), (96, 64), flat=False)
    conv = v.encoder.conv_in
    conv.forward = wrapper = lambda *a, real=conv.forward, **kw: real(*a, **kw) # as accelerate's hooks do it
    with pytest.raises(ZeroDivisionError):
        with vae_2d(v):
            assert sum("forward" in vars(m) for m in v.modules()) > 10 and not any("forward" in vars(m) for m in other.modules())
            1 / 0
    assert [m for m in v.modules() if "forward" in vars(m)] == [conv] and conv.forward is wrapper
    assert torch.equal(encode_image(v, im, (96, 64), flat=False), plain)
