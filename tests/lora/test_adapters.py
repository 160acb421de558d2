"""LoRA files and what is done with them: formats, parity with diffusers, ComfyUI's rules, merging, dropout by sample, cards, refusals."""
import copy, json, math, re, warnings
from functools import lru_cache
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from qie_nb.data.batches import pad_prompts
from qie_nb.models import flow_matching as flow

from qie_nb.lora import adapters as lora
from qie_nb.config import LoraSection, make_config
from qie_nb.lora.dropout import SampleDropout, install_sample_dropout, keep_mask, sample_seeds, set_sample_seeds
from qie_nb.lora.formats import COMFY_NAME, WEIGHT_NAME, convert_lora, find_lora, lora_info, kohya_alpha, read_lora, parse_key, write_lora
from qie_nb.lora.model_card import card_settings, model_card, published, push_to_hub, write_model_card
from qie_nb.training.step import loss_at
from qie_nb.tiny.random_models import tiny_folder, tiny_pipeline

Q, MLP = "attn.to_q", "img_mlp.net.0.proj"
IMAGE = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
TEXT = ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"]
IDLE = ["attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2"] # of the last block: nothing uses what they feed
MLPS = [f"{s}_mlp.net.{n}" for s in ("img", "txt") for n in ("0.proj", "2")]


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@lru_cache
def _pipeline(variant): return tiny_pipeline(variant)


def bare(variant="2511", dtype=torch.float32): return copy.deepcopy(_pipeline(variant).transformer).to(dtype)


def trained(variant="2511", dtype=torch.float32, seed=1, **settings):
    "A transformer with an adapter as training leaves it."
    tr, g = lora.add_lora(bare(variant, dtype), LoraSection(**dict(r=4, lora_alpha=6) | settings)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n, p in tr.named_parameters():
            if ".lora_" in n: p.copy_(p * (1 + 0.2 * torch.rand(p.shape, generator=g)) if "magnitude" in n else torch.randn(p.shape, generator=g) * 0.1)
    return tr


def sample(n, seed, controls=1):
    g = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=g)
    return dict(pixel_latent=randn(1, 16, 1, 4, 6), control_latent=[randn(1, 16, 1, 6, 4) for _ in range(controls)],
                prompt_embed=randn(1, n, 64), prompt_embeds_mask=torch.ones(1, n, dtype=torch.bool))


def batch_of(samples):
    embeds, mask = pad_prompts([s["prompt_embed"][0] for s in samples])
    return dict(pixel_latent=torch.cat([s["pixel_latent"] for s in samples]), prompt_embed=embeds, prompt_embeds_mask=mask,
                control_latent=[torch.cat(c) for c in zip(*(s["control_latent"] for s in samples))])


def losses(tr, samples):
    batch = batch_of(samples)
    eps = torch.cat([torch.full_like(s["pixel_latent"], 0.3) for s in samples])
    return loss_at(tr, batch, eps, torch.full((len(samples),), 0.6), dtype=tr.dtype, whole=True) # as the trainer calls it for dropout


@torch.no_grad()
def output(tr): return losses(tr, [sample(7, 1), sample(5, 2)])


def adapted(tr): return {re.sub(r"\.lora_.*", "", k.removeprefix("transformer.")) for k in lora.lora_tensors(tr)}


def file_of(path):
    with safe_open(path, "pt") as f: return {k: f.get_tensor(k) for k in f.keys()}, f.metadata()


def same_file(a, b):
    (ta, ma), (tb, mb) = file_of(a), file_of(b)
    return ma == mb and ta.keys() == tb.keys() and all(torch.equal(ta[k], tb[k]) and ta[k].dtype == tb[k].dtype for k in ta)


# which layers

@pytest.mark.parametrize("wanted, leaves", [
    ("attention", IMAGE), ("attention_text", IMAGE + TEXT), ("all_linear", IMAGE + TEXT + MLPS), (["attention", "img_mlp.net.2"], [*IMAGE, "img_mlp.net.2"]),
    (["to_q"], ["attn.to_q"]), (r".*\.attn\.to_[kv]", ["attn.to_k", "attn.to_v"])])
def test_presets_name_exactly_these_layers(wanted, leaves):
    tr = lora.add_lora(bare(), LoraSection(r=2, target_modules=wanted))
    assert adapted(tr) == {f"transformer_blocks.{i}.{leaf}" for i in (0, 1) for leaf in leaves}


def test_all_linear_is_every_linear_layer_of_the_blocks_but_modulation():
    linear = {n for n, m in bare().named_modules() if isinstance(m, torch.nn.Linear) and n.startswith("transformer_blocks.")}
    tr = lora.add_lora(bare(), LoraSection(r=2, target_modules="all_linear"))
    assert linear - adapted(tr) == {n for n in linear if n.endswith(("img_mod.1", "txt_mod.1"))} and len(adapted(tr)) == 24


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("wanted", ["attention", "all_linear", ["to_q"]])
def test_the_plan_counts_what_is_trained(wanted, use_dora):
    from qie_nb.planning.memory_query import adapter_shapes, memory_query, numbers
    section = dict(r=3, target_modules=wanted, use_dora=use_dora)
    tr = lora.add_lora(bare(), LoraSection(**section))
    job = memory_query(make_config(dict(model=dict(lora=section))), dict(bare().config))
    assert numbers(adapter_shapes(job, trained=False)) == sum(p.numel() for p in lora.lora_tensors(tr).values())


def test_rslora_scales_by_the_root_of_the_rank():
    scale = lambda tr: tr.transformer_blocks[0].attn.to_q.scaling["default"]
    assert scale(trained(r=16, lora_alpha=8, use_rslora=True)) == 2.0 and scale(trained(r=16, lora_alpha=8)) == 0.5


@pytest.mark.parametrize("settings", [dict(use_rslora=True), dict(use_dora=True), dict(use_dora=True, target_modules="all_linear")])
def test_options_train(settings):
    tr = lora.add_lora(bare(dtype=torch.bfloat16), LoraSection(r=4, **settings))
    lora.assert_float32(tr)
    first = lora.lora_state(tr)
    optimizer = torch.optim.AdamW(lora.lora_parameters(tr), lr=1e-2)
    seen = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = losses(tr, [sample(5, 3)]).mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    still = {k.split(".lora_")[0] for k, v in lora.lora_state(tr).items() if torch.equal(first[k], v)}
    assert seen[-1] < 0.6 * seen[0] and still == {f"transformer.transformer_blocks.1.{n}" for n in IDLE if settings.get("target_modules") == "all_linear"}


def test_what_never_gets_a_gradient_does_not_learn_and_all_the_rest_does():
    tr = trained(target_modules="all_linear")
    idle = {k.split(".lora_")[0] for k, p in lora.lora_tensors(tr).items() if not p.requires_grad}
    assert idle == {f"transformer.transformer_blocks.1.{n}" for n in IDLE}
    for p in lora.lora_tensors(tr).values(): p.requires_grad_(True)
    losses(tr, [sample(5, 3)]).sum().backward()
    assert {k.split(".lora_")[0] for k, p in lora.lora_tensors(tr).items() if p.grad is None or not p.grad.any()} == idle


# diffusers

@pytest.mark.parametrize("settings", [dict(), dict(target_modules="all_linear", lora_alpha=0.3), dict(use_rslora=True, target_modules="attention_text"), dict(use_dora=True)],
                         ids=["alpha", "all_linear", "rslora", "dora"])
@pytest.mark.parametrize("variant", ["v1", "2509", "2511"])
def test_diffusers_pipeline_reads_the_same_adapter(variant, settings, tmp_path):
    tr, pipe = trained(variant, **settings), copy.copy(_pipeline(variant))
    pipe.transformer = bare(variant)
    plain = output(pipe.transformer)
    pipe.load_lora_weights(str(lora.save_lora(tr, tmp_path).parent))
    ours = output(tr)
    assert torch.equal(output(pipe.transformer), ours) and not torch.allclose(plain, ours, rtol=1e-3)


@pytest.mark.parametrize("settings", [dict(), dict(use_rslora=True, r=16, lora_alpha=8)], ids=["alpha", "rslora"])
def test_diffusers_pipeline_reads_the_comfyui_form(settings, tmp_path):
    tr, pipe = trained(target_modules="all_linear", **settings), copy.copy(_pipeline("2511"))
    pipe.transformer = bare()
    pipe.load_lora_weights(str(tmp_path), weight_name=lora.save_lora(tr, tmp_path, format="comfyui").name)
    torch.testing.assert_close(output(pipe.transformer), output(tr), rtol=1e-5, atol=1e-6)


def test_the_header_holds_only_what_a_reader_needs(tmp_path):
    config = json.loads(file_of(lora.save_lora(trained(), tmp_path))[1]["lora_adapter_metadata"])
    assert config == {"transformer.r": 4, "transformer.lora_alpha": 6, "transformer.target_modules": ["to_k", "to_out.0", "to_q", "to_v"],
                      "transformer.rank_pattern": {}}, "diffusers 0.37, which Kaggle has, takes rank_pattern from every file's settings, whether it is there or not"


# ComfyUI: its rules as of comfy/lora.py (model_lora_keys_unet for QwenImage, load_lora) and comfy/weight_adapter/lora.py (LoRAAdapter), in our words:
# a weight `diffusion_model.X.weight` answers to these names; a name's pair is one of these; the scale is alpha / rank, or 1 where there is no alpha.

def comfy_names(weight):
    x = weight.removeprefix("diffusion_model.").removesuffix(".weight")
    flat = x.replace(".", "_")
    return [f"lora_unet_{flat}", f"diffusion_model.{x}", x, f"transformer.{x}", f"lycoris_{flat}"]


def comfy_reads(tensors, weights):
    "({weight: what is added to it}, keys that nothing reads)"
    deltas, read = {}, set()
    for weight in weights:
        for name in comfy_names(weight):
            for up, down in (("lora_up.weight", "lora_down.weight"), ("lora_B.weight", "lora_A.weight"), ("lora_B.default.weight", "lora_A.default.weight")):
                up, down = f"{name}.{up}", f"{name}.{down}"
                if up not in tensors: continue
                alpha = tensors.get(f"{name}.alpha")
                deltas[weight] = (alpha.item() / tensors[down].shape[0] if alpha is not None else 1.0) * (tensors[up] @ tensors[down])
                read |= {up, down, f"{name}.alpha"}
                break
    return deltas, tensors.keys() - read


def deltas_of(tr):
    return {f"diffusion_model.{n}.weight": m.get_delta_weight("default").detach() for n, m in tr.named_modules() if hasattr(m, "get_delta_weight")}


@pytest.mark.parametrize("settings", [dict(), dict(target_modules="all_linear", lora_alpha=0.3), dict(use_rslora=True, r=16, lora_alpha=8)], ids=["alpha", "all_linear", "rslora"])
def test_comfyui_adds_what_peft_adds(settings, tmp_path):
    tr, weights = trained(**settings), [f"diffusion_model.{n}" for n in bare().state_dict()]
    found, unread = comfy_reads(file_of(lora.save_lora(tr, tmp_path, format="comfyui"))[0], weights)
    want = deltas_of(tr)
    assert not unread and found.keys() == want.keys()
    for k, d in want.items(): torch.testing.assert_close(found[k], d, rtol=1e-5, atol=1e-7)
    lost, _ = comfy_reads(file_of(lora.save_lora(tr, tmp_path))[0], weights)
    assert not torch.allclose(lost[k], want[k], rtol=0.01), "the diffusers form loses alpha there, which is why there are two"


def test_every_name_that_comfyui_knows_is_understood():
    linear = [n for n, m in bare().named_modules() if isinstance(m, torch.nn.Linear)]
    for layer in linear:
        for name in comfy_names(f"diffusion_model.{layer}.weight"):
            for part, side in (("lora_up.weight", "B"), ("lora_A.weight", "A"), ("lora_B.default.weight", "B"), ("alpha", "alpha")): assert parse_key(f"{name}.{part}") == (layer, side)
    assert len(linear) == 34


# round trips

CONFIGS = dict(
    plain=dict(r=4, lora_alpha=4), alpha=dict(r=4, lora_alpha=7), fraction=dict(r=4, lora_alpha=0.1), rslora=dict(r=4, lora_alpha=3, use_rslora=True),
    patterns=dict(r=4, lora_alpha=7, rank_pattern={"to_k": 2}, alpha_pattern={r"^transformer_blocks.1.attn.to_q": 0.3, "to_k": 5}),
    rs_patterns=dict(r=4, lora_alpha=7, rank_pattern={"to_k": 3}, alpha_pattern={"to_k": 0.7}, use_rslora=True))


def made_up(config, layers=("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_q", "transformer_blocks.1.attn.to_k"), dtype=torch.float32):
    rank = lambda n: config.get("rank_pattern", {}).get(n.rsplit(".", 1)[1], config["r"])
    g = torch.Generator().manual_seed(3)
    return {f"{n}.lora_{s}.weight": torch.randn(*((rank(n), 96) if s == "A" else (96, rank(n))), generator=g).to(dtype) for n in layers for s in "AB"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_there_and_back_is_exact(config, dtype, tmp_path):
    config = config | dict(target_modules=["to_k", "to_q"])
    first = write_lora(tmp_path/"first", made_up(config, dtype=dtype), config, dict(base="tiny", steps=3))
    comfy = convert_lora(first, tmp_path/"comfy")
    back = convert_lora(comfy, tmp_path/"back", "diffusers")
    assert same_file(first, back) and same_file(comfy, convert_lora(back, tmp_path/"again")) and not same_file(first, comfy)
    assert (comfy.name, back.name) == (COMFY_NAME, WEIGHT_NAME) and lora_info(comfy) == lora_info(first) == dict(base="tiny", steps=3)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_without_a_header_the_tensors_say_it_all(config, tmp_path):
    "As another tool would write it: `.alpha` tensors and nothing else."
    config = config | dict(target_modules=["to_k", "to_q"])
    state = made_up(config)
    write_lora(tmp_path/"ours", state, config, {}), write_lora(tmp_path/"theirs.safetensors", state, config, {}, "comfyui")
    save_file(file_of(tmp_path/"theirs.safetensors")[0], tmp_path/"bare.safetensors")
    ours, theirs = bare(), bare()
    lora.load_lora(ours, tmp_path/"ours"), lora.load_lora(theirs, tmp_path/"bare.safetensors")
    for (n, a), b in zip(ours.named_modules(), theirs.modules()):
        if hasattr(a, "scaling"): assert b.scaling["default"] == pytest.approx(a.scaling["default"], rel=1e-6) and b.r == a.r, n
    for (k, a), b in zip(lora.lora_state(ours).items(), lora.lora_state(theirs).values(), strict=True): assert torch.equal(a, b) and torch.equal(a, state[k.removeprefix("transformer.")])
    torch.testing.assert_close(output(ours), output(theirs), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rename_keys", [lambda n: f"lora_unet_{n.replace('.', '_')}", lambda n: n, lambda n: f"base_model.model.{n}", lambda n: f"lycoris_{n.replace('.', '_')}",
                                   lambda n: f"diffusion_model.{n}", lambda n: f"transformer.{n}"], ids=["kohya", "bare", "peft", "lycoris", "comfyui", "diffusers"])
@pytest.mark.parametrize("sides", [("lora_down", "lora_up"), ("lora_A", "lora_B")], ids=["down_up", "A_B"])
def test_any_spelling_is_the_same_adapter(rename_keys, sides, tmp_path):
    tr = trained(target_modules="all_linear")
    tensors = {}
    for key, t in lora.lora_state(tr).items():
        layer, side = parse_key(key)
        tensors[f"{rename_keys(layer)}.{sides[side == 'B']}.weight"], tensors[f"{rename_keys(layer)}.alpha"] = t, torch.tensor(6.0)
    save_file(tensors, tmp_path/"some.safetensors")
    other = bare()
    lora.load_lora(other, tmp_path)
    assert torch.equal(output(other), output(tr))


def test_a_header_without_a_rank_pattern_is_read_as_one_with_an_empty_one(tmp_path):
    config = dict(r=4, lora_alpha=4, target_modules=["to_k", "to_q"])
    tr, file = bare(), write_lora(tmp_path/"first", made_up(config), config, {})
    assert lora.read_fitting(tr, file).config["transformer.rank_pattern"] == {}


def test_alpha_that_was_scaled_since_is_believed(tmp_path):
    tr = trained()
    tensors, header = file_of(lora.save_lora(tr, tmp_path/"a", format="comfyui"))
    halved = {k: t / 2 if k.endswith("alpha") else t for k, t in tensors.items()}
    save_file(halved, tmp_path/"half.safetensors", metadata=header)
    other = bare()
    lora.load_lora(other, tmp_path/"half.safetensors")
    assert other.transformer_blocks[0].attn.to_q.scaling["default"] == 0.75 == tr.transformer_blocks[0].attn.to_q.scaling["default"] / 2


def test_dora_magnitudes_survive_our_own_load(tmp_path):
    tr, other = trained(use_dora=True), bare()
    lora.load_lora(other, lora.save_lora(tr, tmp_path))
    assert torch.equal(output(other), output(tr)) and sum(k.endswith("magnitude_vector") for k in lora.lora_state(other)) == 8


def test_dora_is_warned_of_once(monkeypatch, tmp_path):
    monkeypatch.setattr(lora, "_told", set())
    with pytest.warns(UserWarning, match="ComfyUI drops them"): tr = trained(use_dora=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lora.save_lora(tr, tmp_path)
    monkeypatch.setattr(lora, "_told", set())
    with pytest.warns(UserWarning, match="read a DoRA file's magnitudes"): lora.save_lora(tr, tmp_path)


# other weights in place of the adapter's

def test_a_running_mean_is_saved_in_place_of_the_weights(tmp_path):
    tr = trained()
    mean = {k: torch.full_like(p, 0.25) for k, p in lora.lora_tensors(tr).items()}
    file = lora.save_lora(tr, tmp_path/"ema", state=mean)
    assert lora_info(file)["weights"] == "ema" and all((t == 0.25).all() for t in file_of(file)[0].values())
    plain = lora.save_lora(tr, tmp_path/"raw", dict(base="x"))
    assert lora_info(plain) == dict(base="x", weights="raw") and not any((t == 0.25).all() for t in file_of(plain)[0].values())
    assert lora_info(lora.save_lora(tr, tmp_path/"said", dict(weights="mine"), state=mean))["weights"] == "mine"


def test_names_are_pefts_whatever_wraps_the_model():
    from peft import get_peft_model_state_dict
    tr = trained(use_dora=True)
    want = {f"transformer.{k}": t for k, t in get_peft_model_state_dict(tr, adapter_name="default").items()}
    assert list(lora.lora_state(tr)) == list(want) and all(torch.equal(t, want[k]) for k, t in lora.lora_state(tr).items())
    tr.transformer_blocks[0] = torch.compile(tr.transformer_blocks[0]) # puts _orig_mod into every name
    assert "transformer_blocks.0._orig_mod.attn.to_q.lora_A.default.weight" in dict(tr.named_parameters()) and lora.lora_state(tr).keys() == want.keys()


def shard_and_compare(rank, world, store):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        tr, mesh = trained(), init_device_mesh("cpu", (world,))
        want = lora.lora_state(tr)
        for block in tr.transformer_blocks: fully_shard(block, mesh=mesh)
        fully_shard(tr, mesh=mesh)
        assert all(isinstance(p, DTensor) for p in lora.lora_tensors(tr).values())
        got = lora.lora_state(tr)
        assert list(got) == list(want) and all(torch.equal(got[k], t) and not isinstance(got[k], DTensor) for k, t in want.items())
    finally: dist.destroy_process_group()


def _shard(rank, world, path):
    import torch.distributed as dist
    shard_and_compare(rank, world, dist.FileStore(path, world))


def test_a_divided_adapter_is_put_together():
    import torch.distributed as dist
    shard_and_compare(0, 1, dist.HashStore())


@pytest.mark.slow
def test_an_adapter_divided_over_two_processes_is_put_together(tmp_path):
    torch.multiprocessing.spawn(_shard, (2, str(tmp_path/"store")), nprocs=2)


# merging

@pytest.mark.parametrize("settings", [dict(), dict(use_dora=True), dict(use_rslora=True, target_modules="all_linear")], ids=["plain", "dora", "rslora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_is_undone_to_the_bit(dtype, settings, tmp_path):
    tr = trained(dtype=dtype, **settings)
    before, beside, alone = {k: t.clone() for k, t in tr.state_dict().items()}, output(tr), output(bare(dtype=dtype))
    first = lora.save_lora(tr, tmp_path/"first")
    lora.merge_lora(tr), lora.merge_lora(tr)
    merged = output(tr)
    close = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.1, atol=0.02)
    torch.testing.assert_close(merged, beside, **close)
    assert (merged - alone).abs().max() > 3 * (merged - beside).abs().max(), "merged once: twice would be as far again from the base"
    assert sum(not torch.equal(t, before[k]) for k, t in tr.state_dict().items()) == len(adapted(tr)) and same_file(first, lora.save_lora(tr, tmp_path/"merged"))
    lora.unmerge_lora(tr), lora.unmerge_lora(tr)
    assert all(torch.equal(t, before[k]) for k, t in tr.state_dict().items()) and torch.equal(output(tr), beside)


def test_subtracting_would_not_do():
    tr = trained(dtype=torch.bfloat16)
    w = tr.transformer_blocks[0].attn.to_q.base_layer.weight
    before = w.clone()
    tr.fuse_lora(), tr.unfuse_lora()
    assert not torch.equal(w, before), "if this fails, the copies in host memory are no longer needed"


def test_a_merged_adapter_never_acts_twice(tmp_path):
    tr = trained()
    want, file = output(tr), lora.save_lora(tr, tmp_path)
    lora.merge_lora(tr)
    again = lora.save_lora(tr, tmp_path/"again")
    lora.load_lora(tr, again)
    assert torch.equal(output(tr), want) and not lora.is_merged(tr)
    lora.merge_lora(tr)
    lora.load_lora(tr, file, "second") # under another name it stands beside the first, and only it is in use
    assert torch.equal(output(tr), want) and not lora.is_merged(tr)


def test_merging_takes_the_adapters_in_use_with_their_weights(tmp_path):
    tr = trained()
    other = lora.save_lora(trained(seed=2), tmp_path)
    lora.load_lora(tr, other, "second")
    lora.use_loras(tr, {"default": 1.0, "second": 0.5})
    want = output(tr)
    lora.merge_lora(tr)
    torch.testing.assert_close(output(tr), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="neither trained nor weighted"): lora.use_loras(tr, {"default": 1.0})


def test_adapters_in_use_are_those_that_are_named(tmp_path):
    tr = trained()
    one = output(tr)
    lora.load_lora(tr, lora.save_lora(trained(seed=2), tmp_path), "second")
    two = output(tr)
    lora.use_loras(tr, {"default": 1.0})
    assert torch.equal(output(tr), one) and not lora.lora_parameters(tr)
    lora.use_loras(tr, {"second": 1.0})
    assert torch.equal(output(tr), two)
    lora.use_loras(tr, {"default": 0.0, "second": 1.0})
    torch.testing.assert_close(output(tr), two)
    lora.use_loras(tr, {})
    assert torch.equal(output(tr), output(bare()))
    lora.load_lora(tr, tmp_path, "second")
    assert torch.equal(output(tr), two), "a loaded adapter is in use although all were put out of it"
    lora.train_only(tr, "default")
    assert torch.equal(output(tr), one) and len(lora.lora_parameters(tr)) == 16


# starting from a LoRA

def test_training_starts_from_a_file(tmp_path, capsys):
    file, tr = lora.save_lora(trained(r=8, lora_alpha=3, target_modules="all_linear"), tmp_path), bare()
    info = lora.start_lora(tr, LoraSection(r=4, pretrained_weight=str(file)))
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "rank 8, alpha 3; the file's values stand for `model.lora.r`, `model.lora.lora_alpha`, `model.lora.target_modules`" in said
    assert info["weights"] == "raw" and len(lora.lora_parameters(tr)) == 40 and len(lora.lora_tensors(tr)) == 48 and torch.equal(output(tr), output(trained(r=8, lora_alpha=3, target_modules="all_linear")))
    lora.assert_float32(tr)
    lora.start_lora(bare(), LoraSection(r=8, lora_alpha=3, target_modules="all_linear", pretrained_weight=str(file)))
    assert "stand for" not in capsys.readouterr().out


def test_without_a_file_a_new_adapter_or_the_loaded_one(tmp_path):
    tr = bare()
    assert lora.start_lora(tr, LoraSection(r=4), seed=5) == {} and torch.equal(output(tr), output(bare()))
    again = bare()
    lora.start_lora(again, LoraSection(r=4), seed=5)
    assert all(torch.equal(a, b) for a, b in zip(lora.lora_state(tr).values(), lora.lora_state(again).values(), strict=True))
    loaded = bare()
    lora.load_lora(loaded, lora.save_lora(trained(), tmp_path))
    assert not lora.lora_parameters(loaded)
    lora.start_lora(loaded, LoraSection(r=4))
    assert len(lora.lora_parameters(loaded)) == 16 and torch.equal(output(loaded), output(trained()))


# the hub, without one

class Hub:
    "Stands in for huggingface_hub: files of a folder, or an error."
    def __init__(self, monkeypatch, folder=None, error=None, cached=None):
        import huggingface_hub
        self.asked = []
        def answer(value):
            if error: raise error
            return value
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda api, repo: answer([p.name for p in folder.iterdir()] if folder else []))
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file: (self.asked.append((repo, file)), answer(str((folder or cached or "")/file if folder else file)))[1])
        def snapshot(repo, **kw):
            assert kw["local_files_only"]
            if not cached: raise huggingface_hub.errors.LocalEntryNotFoundError("nothing here")
            return str(cached)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)


def test_from_the_hub(monkeypatch, tmp_path):
    tr, other = trained(), bare()
    lora.save_lora(tr, tmp_path/"repo"), lora.save_lora(tr, tmp_path/"repo"/"b.safetensors")
    hub = Hub(monkeypatch, tmp_path/"repo")
    lora.load_lora(other, "owner/name")
    assert hub.asked == [("owner/name", WEIGHT_NAME)] and torch.equal(output(other), output(tr))
    find_lora("owner/name:b.safetensors")
    assert hub.asked[1] == ("owner/name", "b.safetensors")


def test_what_was_downloaded_before_needs_no_connection(monkeypatch, tmp_path):
    lora.save_lora(trained(), tmp_path)
    Hub(monkeypatch, error=ConnectionError("no route"), cached=tmp_path)
    assert find_lora("owner/name") == tmp_path/WEIGHT_NAME


def http_error(name, status):
    from huggingface_hub import errors
    response = mock.Mock(status_code=status, headers={}, request=mock.Mock())
    try: return getattr(errors, name)("no", response=response)
    except TypeError: return getattr(errors, name)("no")


@pytest.mark.parametrize("error, sentence", [
    (lambda: ConnectionError("no route"), "'owner/name' cannot be read: the hub is out of reach .ConnectionError.; connect, or use files at hand"),
    (lambda: http_error("OfflineModeIsEnabled", 0), "the hub is out of reach .OfflineModeIsEnabled."),
    (lambda: http_error("RepositoryNotFoundError", 404), "does not exist on the hub, or is private; check the id"),
    (lambda: http_error("GatedRepoError", 403), "cannot be read without a token that allows it; log in with `hf auth login`"),
    (lambda: http_error("HfHubHTTPError", 503), "the hub is out of reach .HfHubHTTPError.")])
def test_the_hub_says_no(error, sentence, monkeypatch):
    Hub(monkeypatch, error=error())
    with pytest.raises(FileNotFoundError, match=f"LoRA 'owner/name' is no path here, and .*{sentence}"): find_lora("owner/name")


# refusals

def tensors_file(tmp_path, **tensors):
    save_file({k: t for k, t in tensors.items()}, tmp_path/"x.safetensors")
    return tmp_path/"x.safetensors"


def pair(layer, r=4, n=96, m=96): return {f"transformer.{layer}.lora_A.weight": torch.ones(r, n), f"transformer.{layer}.lora_B.weight": torch.ones(m, r)}


def written(path, text=b"x"):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text)
    return path


def merged_for_good(tmp_path):
    tr = trained()
    file = lora.save_lora(tr, tmp_path)
    lora.merge_lora(tr, undo=False)
    lora.load_lora(tr, file)


def quantized(kind):
    from qie_nb.models.quantize import quantize
    return lora.add_lora(quantize(bare(), kind), LoraSection(r=2))


def cast(tmp_path):
    tr = trained()
    tr.transformer_blocks[0].attn.to_q.base_layer.weight.data = tr.transformer_blocks[0].attn.to_q.base_layer.weight.data.to(torch.float8_e4m3fn)
    lora.merge_lora(tr)


def not_finite(tmp_path):
    tr = trained()
    tr.transformer_blocks[1].attn.to_k.lora_B["default"].weight.data[0, 0] = float("nan")
    lora.merge_lora(tr)


def merged_then(act):
    def run(tmp_path):
        tr = trained()
        lora.merge_lora(tr)
        act(tr)
    return run


def two_files(tmp_path): written(tmp_path/"d"/"a.safetensors"), written(tmp_path/"d"/"b.safetensors"); find_lora(tmp_path/"d")


B0 = "transformer_blocks.0.attn.to_q"
REFUSALS = [
    ("nothing there", lambda t: find_lora(t/"none"), FileNotFoundError, "does not exist; give a .safetensors file or a folder"),
    ("an empty folder", lambda t: find_lora(t), FileNotFoundError, "does not exist"),
    ("a pickle", lambda t: lora.load_lora(bare(), written(t/"x.pt")), ValueError, "is a pickle, which can run code"),
    ("a pickle not yet there", lambda t: find_lora(t/"x.ckpt"), ValueError, "is a pickle"),
    ("a folder of a pickle", lambda t: find_lora(written(t/"d"/"pytorch_lora_weights.bin").parent), ValueError, "is a pickle"),
    ("saving a pickle", lambda t: lora.save_lora(trained(), t/"x.bin"), ValueError, "is a pickle"),
    ("two files", two_files, ValueError, "holds 2 .safetensors files and none is called .*name one, e.g. .*/a.safetensors"),
    ("no safetensors", lambda t: read_lora(written(t/"x.safetensors", b"no")), ValueError, "cannot be read .*give a safetensors LoRA"),
    ("no LoRA", lambda t: read_lora(tensors_file(t, w=torch.ones(2))), ValueError, "holds no adapter of a Qwen-Image transformer"),
    ("half a pair", lambda t: read_lora(tensors_file(t, **{k: v for k, v in pair(B0).items() if "lora_A" in k})), ValueError, "which is no pair of LoRA weights"),
    ("a LoKr among them", lambda t: read_lora(tensors_file(t, **pair(B0), **{f"transformer.{B0}.lokr_w1": torch.ones(2)})), ValueError, "'transformer.*lokr_w1', which is no pair"),
    ("an unknown flat name", lambda t: read_lora(tensors_file(t, **pair(B0), **{"lora_unet_single_blocks_0.lora_up.weight": torch.ones(2)})), ValueError, "lora_unet_single_blocks_0"),
    ("ComfyUI's DoRA", lambda t: read_lora(tensors_file(t, **pair(B0), **{f"transformer.{B0}.dora_scale": torch.ones(96, 1)})), ValueError, "`dora_scale`, which is ComfyUI's DoRA"),
    ("another size", lambda t: lora.load_lora(bare(), tensors_file(t, **pair(B0, n=128))), ValueError, "is for 128 features, the layer has 96"),
    ("another model", lambda t: lora.load_lora(bare(), tensors_file(t, **pair("transformer_blocks.77.attn.to_q"))), ValueError, "the layer has no place"),
    ("an unknown format", lambda t: lora.save_lora(trained(), t, format="kohya"), ValueError, "`format` must be diffusers or comfyui, got 'kohya'"),
    ("DoRA for ComfyUI", lambda t: lora.save_lora(trained(use_dora=True), t, format="comfyui"), ValueError, "`format` comfyui cannot hold a DoRA"),
    ("nothing to save", lambda t: lora.save_lora(bare(), t), ValueError, "there is no adapter 'default' to save"),
    ("a mean of others", lambda t: lora.save_lora(trained(), t, state={"a": torch.ones(1)}), ValueError, "`state` has 'a', which the adapter has not"),
    ("a mean of other sizes", lambda t: lora.save_lora(trained(), t, state={f"transformer.{B0}.lora_A.weight": torch.ones(1)}), ValueError, "or in another size"),
    ("a misspelt preset", lambda t: lora.add_lora(bare(), LoraSection(target_modules="attention_all")), ValueError, "matches no layer .*try attention, attention_text, all_linear"),
    ("nothing to merge", lambda t: lora.merge_lora(bare()), ValueError, "there is no adapter to merge"),
    ("merging into 8 bits", lambda t: lora.merge_lora(quantized("qint8")), ValueError, "the base is quantized or divided .*load the base with `model.quantize` none"),
    ("merging into float8", lambda t: lora.merge_lora(quantized("qfloat8")), ValueError, "the base is quantized or divided"),
    ("merging into stored fp8", cast, ValueError, "the base is quantized or divided .*float8_e4m3fn"),
    ("merging NaN", not_finite, ValueError, "adapter 'default' has values in transformer_blocks.1.attn.to_k that are not finite"),
    ("training while merged", merged_then(lambda tr: lora.train_only(tr, "default")), ValueError, "merged into the base, so it can be neither trained .*call unmerge_lora"),
    ("starting while merged", merged_then(lambda tr: lora.start_lora(tr, LoraSection())), ValueError, "call unmerge_lora"),
    ("adding while merged", merged_then(lambda tr: lora.add_lora(tr, LoraSection(), "second")), ValueError, "call unmerge_lora"),
    ("loading on what was merged for good", merged_for_good, ValueError, "merged for good"),
    ("an adapter that is not there", lambda t: lora.use_loras(trained(), {"other": 1.0}), ValueError, "there is no adapter 'other'; loaded are"),
    ("dropout without seeds", lambda t: (lambda tr: (install_sample_dropout(tr, 0.1), losses(tr.train(), [sample(3, 1)])))(trained()), ValueError, "call set_sample_seeds"),
    ("uploading nothing", lambda t: push_to_hub(t, "me/lora"), ValueError, "holds no pytorch_lora_weights.safetensors"),
    ("uploading without a card", lambda t: push_to_hub(written(t/"d"/WEIGHT_NAME).parent, "me/lora"), ValueError, "write the model card there first"),
]


@pytest.mark.parametrize("act, kind, sentence", [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_refusals(act, kind, sentence, tmp_path):
    with pytest.raises(kind, match=sentence) as e: act(tmp_path)
    assert "\n" not in str(e.value)


def test_what_does_not_fit_leaves_the_adapter_as_it_was(tmp_path):
    tr = trained()
    before = output(tr)
    lora.merge_lora(tr)
    with pytest.raises(ValueError, match="does not fit"): lora.load_lora(tr, tensors_file(tmp_path, **pair(B0, n=128)))
    assert lora.is_merged(tr)
    lora.unmerge_lora(tr)
    assert torch.equal(output(tr), before)


# dropout by sample

def dropping(rate=0.4, checkpointing=False, variant="2511", **kw):
    tr = trained(variant, lora_dropout=rate, target_modules="all_linear", **kw).train()
    if checkpointing: tr.enable_gradient_checkpointing()
    assert install_sample_dropout(tr, rate) == 24
    return tr


def gradients(tr, samples, seeds):
    for p in lora.lora_parameters(tr): p.grad = None
    with sample_seeds(tr, seeds):
        loss = losses(tr, samples)
        loss.sum().backward()
    return loss.detach(), [p.grad.clone() for p in lora.lora_parameters(tr)]


@pytest.mark.parametrize("variant, settings", [("v1", {}), ("2509", {}), ("2511", {}), ("2511", dict(use_dora=True))])
def test_a_batch_drops_what_its_samples_drop_alone(variant, settings):
    tr, samples, seeds = dropping(variant=variant, **settings), [sample(3, 1), sample(9, 2), sample(6, 3)], [11, 12, 13]
    together, sums = gradients(tr, samples, seeds)
    alone = [gradients(tr, [s], [seed]) for s, seed in zip(samples, seeds)]
    torch.testing.assert_close(together, torch.cat([a[0] for a in alone]), rtol=1e-5, atol=1e-6)
    for n, g in enumerate(sums): torch.testing.assert_close(g, sum(a[1][n] for a in alone), rtol=2e-4, atol=1e-5)
    turned, _ = gradients(tr, samples[::-1], seeds[::-1])
    torch.testing.assert_close(turned.flip(0), together, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(gradients(tr, samples, seeds[::-1])[0], together, rtol=1e-3), "the seeds must matter"


def test_checkpointing_recomputes_the_same_masks():
    samples, seeds = [sample(3, 1), sample(9, 2)], [11, 12]
    (a, ga), (b, gb) = (gradients(dropping(checkpointing=c), samples, seeds) for c in (False, True))
    assert torch.equal(a, b) and all(torch.equal(x, y) for x, y in zip(ga, gb, strict=True))


def test_nothing_is_drawn_and_nothing_is_dropped_in_evaluation():
    tr = dropping()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    gradients(tr, [sample(3, 1)], [5])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(output(tr.eval()), output(trained(target_modules="all_linear")))


def test_layers_and_samples_drop_apart():
    tr = dropping(0.5)
    set_sample_seeds(tr, [1, 2])
    masks = torch.stack([m(torch.ones(2, 64, 96)) > 0 for m in tr.modules() if isinstance(m, SampleDropout) and not m.layer.endswith("net.2")]).flatten(0, 1).flatten(1).float()
    share = masks.mean(1)
    correlation = torch.corrcoef(masks) - torch.eye(len(masks))
    assert (share - 0.5).abs().max() < 0.03 and correlation.abs().max() < 0.06 and len(masks) == 40


def test_rows_and_columns_of_a_mask_are_independent():
    m = keep_mask(1, "x", 300, 300, 0.5)
    odd = m[:-1, :-1] ^ m[1:, :-1] ^ m[:-1, 1:] ^ m[1:, 1:] # always even if an element were row xor column and no more
    assert odd.float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert torch.corrcoef(m.float()).fill_diagonal_(0).abs().max() < 0.35 and torch.corrcoef(m.T.float()).fill_diagonal_(0).abs().max() < 0.35


def test_expected_value_is_kept():
    drop = SampleDropout(0.3, "x").train()
    drop.seeds = list(range(50))
    x = torch.ones(50, 40, 30)
    assert drop(x).mean().item() == pytest.approx(1, abs=0.01) and drop(x).unique().tolist() == [0.0, pytest.approx(1 / 0.7)]


# cards

NASTY = "blue | </td><script>alert(1)</script> ![x](http://evil/p.png) `code` \n---\n# heading\n``` \n````md"
FACTS = dict(base_model="Qwen/Qwen-Image-Edit-2511", license="apache-2.0", variant="2511", samples=40, held_out=4, controls=2, image_size=[1024, 768],
             captions=[NASTY, "```", "# injected", "make it red"], held_out_loss=0.1234, weights="ema", steps=500, title=NASTY, settings={"train.note": NASTY, "optimizer.lr": 1e-4})


def outside_fences(text):
    lines, fence = [], None
    for line in text.splitlines():
        mark = re.match(r"`{3,}", line)
        if fence is None and mark: fence = mark[0]
        elif fence and line == fence: fence = None
        elif fence is None: lines.append(line)
    assert fence is None, "a fence is left open"
    return lines


def test_a_caption_stays_text():
    card = model_card(FACTS, [("samples/00.jpg", NASTY)], "me/lora")
    body = outside_fences(card.split("---\n", 2)[2])
    assert not any("<script" in line or "</td>" in line or "](http" in line for line in body)
    assert [line for line in body if line.startswith("#")][1:] == ["## Images", "## Use", "## Data", "## Captions", "## Held-out loss", "## Weights", "## Settings"]
    for line in body:
        if line.startswith("|"): assert len(re.findall(r"(?<!\\)\|", line)) == 3, line
    assert "make it red" in card and "0.1234" in card and "running mean (EMA) over the steps, after 500 steps" in card


def test_the_top_is_yaml_and_says_only_what_is_known(tmp_path):
    import yaml
    top = lambda facts: yaml.safe_load(model_card(facts).split("---\n")[1])
    assert top(FACTS) == dict(base_model="Qwen/Qwen-Image-Edit-2511", license="apache-2.0", library_name="diffusers", pipeline_tag="image-to-image",
                              tags=["lora", "diffusers", "qwen-image-edit", "image-to-image"])
    assert {"base_model", "license"}.isdisjoint(top(dict(base_model=str(tmp_path)))) and "license" not in top({})
    assert top(dict(license="x\nevil: 1")).get("evil") is None
    assert model_card({}).count("\n## ") == 1, "of what is not known nothing is said"


@pytest.mark.parametrize("variant", ["v1", "2511"])
def test_the_code_of_the_card_runs(variant, tmp_path, monkeypatch):
    import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus as plus
    monkeypatch.setattr(plus, "VAE_IMAGE_SIZE", 96 * 96)
    monkeypatch.setattr(plus, "CONDITION_IMAGE_SIZE", 112 * 112)
    monkeypatch.chdir(tmp_path)
    lora.save_lora(trained(variant), tmp_path/"lora")
    Image.new("RGB", (64, 64), "red").save("input.png")
    card = write_model_card(tmp_path/"lora", FACTS | dict(variant=variant, base_model=str(tiny_folder(variant)), captions=["say \"it's\" blue"]), where=str(tmp_path/"lora")).read_text()
    code = re.search(r"```python\n(.*?)\n```", card, re.S)[1]
    for old, new in (("bfloat16", "float32"), ('"cuda"', '"cpu"'), ("num_inference_steps=20", "num_inference_steps=2, height=32, width=32")):
        assert old in code
        code = code.replace(old, new)
    if variant == "v1": monkeypatch.setattr("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit.calculate_dimensions", lambda area, ratio: (96, 96, None))
    exec(code, {})
    assert np.asarray(Image.open("output.png")).shape == (32, 32, 3)


def test_an_upload_takes_the_lora_the_card_and_its_images(monkeypatch, tmp_path):
    import huggingface_hub
    from fnmatch import fnmatch
    sent = {}
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda api, repo, **kw: sent.update(repo=repo, **kw) or f"https://huggingface.co/{repo}")
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda api, **kw: sent.update(kw))
    picture = tmp_path/"me [1] ](x).png"
    Image.new("RGB", (4, 4)).save(picture)
    folder, tr = tmp_path/"run", trained()
    lora.save_lora(tr, folder), lora.save_lora(tr, folder, format="comfyui")
    for name in ("optimizer.safetensors", "state.json", "samples/99.png", "samples/secret.png", "logs/x.csv", "training_images/0.png"): written_deep(folder/name)
    write_model_card(folder, FACTS, [picture, (picture, "again")], "me/lora")
    assert push_to_hub(folder, "me/lora") == "https://huggingface.co/me/lora"
    assert sent["repo"] == "me/lora" and sent["private"] is True and sent["exist_ok"] and sent["folder_path"] == str(folder)
    files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    taken = {f for f in files if any(fnmatch(f, p) for p in sent["allow_patterns"])}
    assert taken == {WEIGHT_NAME, COMFY_NAME, "README.md", "samples/00.png", "samples/01.png"} == set(published(folder)) and len(files) == 11
    push_to_hub(folder, "me/lora", private=False)
    assert sent["private"] is False


def written_deep(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")


@pytest.mark.parametrize("error, kind, sentence", [
    (lambda: ConnectionError(), ConnectionError, "'me/lora' cannot be written: the hub is out of reach"),
    (lambda: http_error("LocalTokenNotFoundError", 0), ValueError, "'me/lora' cannot be written without a token that allows it; log in with `hf auth login`, or set HF_TOKEN"),
    (lambda: http_error("HfHubHTTPError", 401), ValueError, "without a token that allows it"),
    (lambda: http_error("HfHubHTTPError", 403), ValueError, "without a token that allows it")])
def test_an_upload_that_fails_says_why(error, kind, sentence, monkeypatch, tmp_path):
    import huggingface_hub
    def create(*a, **kw): raise error()
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create)
    lora.save_lora(trained(), tmp_path), write_model_card(tmp_path, {})
    with pytest.raises(kind, match=sentence): push_to_hub(tmp_path, "me/lora")
    with pytest.raises(ValueError, match="`repo_id` must be owner/name, got 'lora'"): push_to_hub(tmp_path, "lora")


def test_settings_of_a_card_hold_no_paths():
    config = make_config(dict(model=dict(pretrained_model_name_or_path="tiny", lora=dict(r=7, pretrained_weight="/home/me/start")), data=dict(dataset_path="/home/me/data"),
                              train=dict(output_dir="/home/me/out", ema_decay=0.9), logging=dict(log_dir="/home/me/runs"), cache=dict(cache_dir="/home/me/cache")))
    told = card_settings(config)
    assert "/home/me" not in json.dumps(told) and (told["model.lora.r"], told["train.ema_decay"], told["optimizer.name"]) == (7, 0.9, "adamw")


def test_alpha_for_plain_readers():
    assert kohya_alpha(dict(r=16, lora_alpha=8, use_rslora=True), "a.to_q") == 32 and math.isclose(kohya_alpha(dict(r=3, lora_alpha=8, use_rslora=True), "a"), 8 * math.sqrt(3))
