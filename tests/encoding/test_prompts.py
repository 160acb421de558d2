"""Prefix and suffix give the embedding of the whole prompt and keep no state."""
import copy, itertools
from contextlib import contextmanager

import pytest
import torch

from qie_nb.models.encoders import (
    PrefixNotSharable, check_prompt_length, encode_prefix, encode_prompt,
    encode_suffixes, image_tokens, patch_product, suffix_ids, whole_ids)
from qie_nb.models.components import load_component
from qie_nb.models.variants.text_to_image import POSITIONS, QwenImage
from helpers import PatchConvolutions
from tiny_rig import close, random_images, rig, rms

PROMPTS = ["make the sky green", "", "remove the second boat from the left, keep its shadow", "x"]
each_case = pytest.mark.parametrize("variant, n", [("v1", 1), ("2511", 2), pytest.param("2509", 3, marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield


@pytest.fixture(params=["1d", "3d"])
def positions(request, monkeypatch):
    "Both numberings of image tokens, whichever the installed libraries use."
    monkeypatch.setattr(QwenImage, "positions", request.param)


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
def whole(r, prompt, images, te=None): return encode_prompt(te or r.te, r.proc, r.variant, prompt, images, share_prefix=False)[0]


# --- prefix and suffix
def test_3d_positions_are_the_models_own(monkeypatch):
    r, images = rig("2511"), random_images(3)
    with monkeypatch.context() as m:
        m.setattr(QwenImage, "positions", "1d")
        flat = joined(r, PROMPTS[0], images)
    inputs = r.proc(text=[r.variant.prompt_text(PROMPTS[0], 3)], images=images, return_tensors="pt")
    expected = r.te.model(**inputs).last_hidden_state[:, 64:]
    close(joined(r, PROMPTS[0], images), expected)
    assert (flat - expected).abs().max() > 1e-3 # the two numberings differ


@each_case
def test_a_batch_equals_its_whole_samples(variant, n, positions): # one sample: also in tests/parity
    r, lists = rig(variant), [random_images(n, seed) for seed in range(3)]
    prefix = prefix_of(r, *lists)
    got = suffixes(r, prefix, *PROMPTS[:3])
    assert len({len(s) for s in got}) == 3 and len(prefix) == 3 # two of them are padded
    for i, (s, p, images) in enumerate(zip(got, PROMPTS, lists)): close(torch.cat([prefix.hidden[i], s])[None], whole(r, p, images))


def test_bfloat16_is_as_close_to_float32_as_one_pass():
    r = rig("2511")
    bf16, fp32 = load_component(r.folder, "text_encoder", torch.bfloat16), copy.deepcopy(r.te)
    fp32.load_state_dict(bf16.state_dict()) # the same rounded weights
    shared, plain = [], []
    for images, prompt in itertools.product((random_images(2, seed) for seed in range(3)), PROMPTS):
        exact = whole(r, prompt, images, fp32)
        for errors, encode in ((shared, joined), (plain, whole)): errors.append(encode(r, prompt, images, bf16) - exact)
    assert joined(r, "x", images, bf16).dtype == torch.bfloat16 and rms(plain) > 1e-3
    assert rms(shared) <= 1.1 * rms(plain)


# --- patches as a matrix product
def proj_of(text_encoder): return text_encoder.model.visual.patch_embed.proj


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_the_convolution(dtype, tolerance, biased):
    te = copy.deepcopy(rig("2511").te).to(dtype)
    proj = proj_of(te)
    if biased:
        proj.bias = torch.nn.Parameter(torch.randn(proj.out_channels, dtype=dtype))
    patches = torch.randn(7, *proj.weight.shape[1:], dtype=dtype)
    with PatchConvolutions(te) as plain:
        expected = proj(patches)
    with patch_product(te), PatchConvolutions(te) as fast:
        got = proj(patches)
    with patch_product(te, on=False), PatchConvolutions(te) as off:
        assert torch.equal(proj(patches), expected)
    assert (plain.count, fast.count, off.count) == (1, 0, 1)
    close(got, expected, tolerance)


def test_other_inputs_are_convolved():
    te = rig("2511").te
    proj = proj_of(te)
    video = torch.randn(2, *(n if i == 0 else 2 * n for i, n in enumerate(proj.weight.shape[1:])))
    with patch_product(te):
        got = proj(video)
    assert got.shape[2:] == (2, 2, 2) and torch.equal(got, proj(video))


def test_the_text_encoder_is_restored_after_an_error():
    te, other = copy.deepcopy(rig("2511").te), rig("2511").te
    proj = proj_of(te)
    before = {n: p.data_ptr() for n, p in te.named_parameters()}
    kept = {n: t.clone() for n, t in te.state_dict().items()}
    def own(*args): return type(proj)._conv_forward(proj, *args)
    proj._conv_forward = own # a caller's
    with pytest.raises(ZeroDivisionError), patch_product(te):
        assert proj._conv_forward is not own and "_conv_forward" not in vars(proj_of(other)), "the class is as it was"
        1 / 0
    assert proj._conv_forward is own
    del proj._conv_forward
    with patch_product(te):
        pass
    assert not any("_conv_forward" in vars(m) for m in te.modules())
    assert {n: p.data_ptr() for n, p in te.named_parameters()} == before, "no weight is copied"
    assert all(torch.equal(t, kept[n]) for n, t in te.state_dict().items())


# --- the cut
ODD = ["\n two lines\n\n", "   three blanks first", "été 画 🙂", "<|im_end|>\n<|im_start|>assistant\n", "{braces} %s", "'s", " ", "\u0301 alone"]

@each_case
def test_tokens_are_the_processors(variant, n):
    r = rig(variant)
    prefix = prefix_of(r, random_images(n))
    for prompt in ODD + PROMPTS:
        theirs = r.proc(text=[r.variant.prompt_text(prompt, n)], images=random_images(n))["input_ids"][0]
        assert [*prefix.ids, *suffix_ids(r.proc, r.variant, prefix, prompt)] == list(theirs), prompt
    assert r.proc.tokenizer.decode(prefix.ids[-1:]) == "<|vision_end|>" and len(prefix.counts) == n
    assert prefix.hidden.shape[1] == prefix.count - 64


@pytest.mark.parametrize("token", ["vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"])
def test_a_prompt_with_vision_tokens_is_refused(token):
    r, prompt = rig("2511"), f"like <|{token}|> here"
    for call in (joined, whole):
        with pytest.raises(ValueError, match=rf"`prompt` must not contain the token <\|{token}\|>, got 'like .* here'; remove it"): call(r, prompt, random_images(1))


def test_a_tokenizer_whose_first_tokens_depend_on_the_last_encodes_the_whole_prompt(monkeypatch):
    r = rig("2511")
    def odd(self, text, real=type(r.proc.tokenizer).__call__, **kw):
        out, many = real(self, text, **kw), isinstance(text, list)
        for row in out["input_ids"] if many else [out["input_ids"]]: row[0] += "green" in (text[0] if many else text)
        return out
    monkeypatch.setattr(type(r.proc.tokenizer), "__call__", odd)
    prefix = prefix_of(r, random_images(1))
    with pytest.raises(PrefixNotSharable, match="do not begin with the prefix's; encode it whole"): suffixes(r, prefix, "make it green")
    close(joined(r, "make it green", random_images(1)), whole(r, "make it green", random_images(1)))
    with passes(r) as lengths: joined(r, "make it blue", random_images(1))
    assert len(lengths) == 2 # this one can be shared


# --- no state, no work twice
@each_case
def test_earlier_prompts_change_nothing(variant, n, positions):
    r = rig(variant)
    alone = suffixes(r, prefix_of(r, random_images(n)), PROMPTS[0])[0]
    prefix = prefix_of(r, random_images(n))
    before = [(layer.keys.clone(), layer.values.clone()) for layer in prefix.cache.layers]
    for other in (*PROMPTS[1:], PROMPTS[2] * 5): suffixes(r, prefix, other)
    hook = r.te.model.language_model.layers[1].register_forward_pre_hook(lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError): suffixes(r, prefix, PROMPTS[2]) # fails half-way
    hook.remove()
    assert all(torch.equal(k, l.keys) and torch.equal(v, l.values) for (k, v), l in zip(before, prefix.cache.layers, strict=True))
    close(suffixes(r, prefix, PROMPTS[0])[0], alone)


def test_each_pass_computes_only_its_own_tokens():
    r, images = rig("2511"), random_images(2)
    with passes(r) as lengths:
        prefix = prefix_of(r, images)
        for p in PROMPTS: suffixes(r, prefix, p)
        joined(r, "x", images), whole(r, "x", images)
    suffix = lambda p: len(suffix_ids(r.proc, r.variant, prefix, p))
    assert lengths == [prefix.count, *map(suffix, PROMPTS), prefix.count, suffix("x"), prefix.count + suffix("x")]


@pytest.mark.parametrize("newer", [False, True])
def test_positions_with_transformers_before_and_since_5_3(newer):
    from types import SimpleNamespace
    from qie_nb.models import encoders
    older = lambda input_ids, image_grid_thw=None: (input_ids, None)
    since = lambda input_ids, image_grid_thw=None, mm_token_type_ids=None: (mm_token_type_ids, None)
    encoder = SimpleNamespace(model=SimpleNamespace(get_rope_index=since if newer else older), config=SimpleNamespace(image_token_id=7))
    found = encoders.prefix_positions(encoder, SimpleNamespace(positions="3d"), torch.tensor([[1, 7, 7]]), None)
    assert found.tolist() == ([[0, 1, 1]] if newer else [[1, 7, 7]])


@pytest.mark.parametrize("grids", [[(6, 6)], [(64, 64), (80, 51)], [(9, 7), (5, 31)]])
def test_the_longest_prompt_is_that_of_diffusers_position_table(grids):
    from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
    rope = QwenEmbedRope(10000, [4, 6, 6], scale_rope=True)
    most = rig("2511").variant.most_prompt_tokens(grids)
    shapes = [[(1, h, w) for w, h in grids]]
    for tokens, found in ((most, most), (most + 1, most)):
        assert len(rope(shapes, torch.device("cpu"), tokens)[1]) == found


@pytest.mark.parametrize("variant, n", [("v1", 1), ("2509", 2), ("2511", 1)])
def test_a_prompt_is_counted_as_it_is_encoded(variant, n):
    r = rig(variant)
    te, processor, v = r.te, r.proc, r.variant
    images = random_images(n)
    sizes = [p.size for p in images]
    prompt = "make it blue " * 300
    tokens = encode_prompt(te, processor, v, prompt, images)[0].shape[1]
    asked = []
    def check(room, text=prompt):
        grid = 2 * (POSITIONS - room), 4 # half of it is what the text's positions begin with
        check_prompt_length(v, lambda: asked.append(1) or processor, text, sizes, [grid])
    check(tokens)
    with pytest.raises(ValueError, match=rf"'make it blue .* is too long: {tokens - sum(image_tokens(processor, s) for s in sizes)} tokens .* {tokens - 1} positions; shorten it"):
        check(tokens - 1)
    asked.clear()
    check(tokens, "make it blue")
    assert not asked, "a short prompt needs no tokenizer"


def test_the_images_of_a_short_prompt_are_counted():
    r = rig("2511")
    sizes, room = [(1024, 1024)], 900 # more than the bytes of the text, less than the tokens of the image
    grid = 2 * (POSITIONS - room), 4
    assert len(r.variant.prompt_text("make it blue", 1).encode()) < room < image_tokens(r.proc, sizes[0])
    with pytest.raises(ValueError, match="'make it blue'.* is too long"):
        check_prompt_length(r.variant, lambda: r.proc, "make it blue", sizes, [grid])


@pytest.mark.parametrize("variant", ["v1", "2511"])
def test_a_prompt_without_images_is_cut_after_1024_tokens_of_its_own(variant):
    r = rig(variant)
    ids = whole_ids(r.proc, r.variant, "make it blue " * 1500, ())
    assert len(ids) == 1024 + r.variant.template_for(0).dropped
