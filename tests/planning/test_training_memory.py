"""Compares the planner's figures with the bytes that the real classes hold and save, at tiny sizes."""
import gc
from dataclasses import fields, replace
from weakref import WeakSet

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from counted_step import LiveBytes, count_step, empty_step, empty_transformer
from qie_nb.config import make_config
from qie_nb.devices.strategies.block_swap import SLOTS
from qie_nb.devices.compile import set_up
from qie_nb.devices.fp16 import enable_fp16
from qie_nb.models.loading import component_bytes
from qie_nb.lora.adapters import PRESETS, lora_parameters
from qie_nb.models.quantizations.known import held_bytes, plain_tensors, quantize
from qie_nb.planning.memory import (
    MemoryQuery, adapter_shapes, block_bytes, memory_query, model_facts, numbers, optimizer_bytes, other_bytes,
    parameters)
from qie_nb.planning import memory
from qie_nb.planning.memory import memory_of, peak_activations, saved_activations, saved_by_block
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.training.optimizers.known import make_optimizer
from qie_nb.planning.plan import Planner

from helpers import slow

TINY = MemoryQuery(layers=3, dim=96, heads=3, text_dim=64, target=64, control=80, text=24, r=4, kernel="cpu", checkpointing=False, table=False, base_bytes=4)
ATTENTION, TEXT, ALL = (tuple(PRESETS[name]) for name in ("attention", "attention_text", "all_linear"))
BF16, EVERYTHING = dict(base_bytes=2), dict(batch=3, zero_cond=True, table=True, targets=ALL)
close = lambda planned, counted, within=0.03: abs(planned / counted - 1) <= within


def saved_bytes(q, tr, device="cpu"):
    "Bytes of the storages that autograd still holds after the forward pass."
    loss, batch = empty_step(q, tr, device)
    loss() # fills what is kept between steps, such as the rotary angles
    known = [*batch, *(t for p in (*tr.parameters(), *tr.buffers()) for t in plain_tensors(p))]
    held, boxes = {s._cdata: s for s in (t.untyped_storage() for t in known)}, WeakSet()
    def pack(t):
        boxes.add(held := lambda: t) # by autograd, instead of the tensor
        return held
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held()): out = loss()
    gc.collect()
    saved = {s._cdata: s.nbytes() for s in (t.untyped_storage() for b in boxes for t in plain_tensors(b()))}
    assert out.requires_grad
    return sum(n for key, n in saved.items() if key not in held)


SAVED = dict(
    float32={}, bfloat16=BF16, all_layers_adapter_bf16=dict(targets=ALL, base_bytes=2, adapter_bytes=2), one_layer=dict(targets=r"transformer_blocks\.1\.attn\.to_q"),
    everything=EVERYTHING | BF16, modulation_too=dict(targets=("img_mod.1", "txt_mod.1", "to_q"), zero_cond=True) | BF16, dora=dict(dora=True) | BF16, dropout=dict(dropout=0.1) | BF16,
    checkpointing=dict(checkpointing=True, table=True, batch=2, zero_cond=True) | BF16, flash=dict(kernel="flash") | BF16, fp16_everything=dict(fp16=True) | EVERYTHING)
RARE = dict(
    adapter_bf16=dict(base_bytes=2, adapter_bytes=2), zero_cond_table=dict(zero_cond=True, table=True) | BF16, text_too=dict(targets=TEXT) | BF16, mlp_only=dict(targets=("img_mlp.net.2",)) | BF16,
    wider=dict(layers=5, dim=128, heads=2, text_dim=96, r=64), first=dict(targets=("img_in", "to_q")), dora_all=dict(dora=True, targets=ALL), dropout_all=dict(dropout=0.1, targets=ALL),
    efficient=dict(kernel="efficient"), fp16=dict(fp16=True), fp16_out=dict(fp16=True, targets=("to_out.0",)), fp16_dropout=dict(fp16=True, dropout=0.1), fp16_dora=dict(fp16=True, dora=True),
    fp16_checkpointing=dict(fp16=True, checkpointing=True, table=True))


@pytest.mark.parametrize("case", [*SAVED, *map(slow, RARE)])
def test_saved_activations_match_autograd(case):
    q = replace(TINY, **(SAVED | RARE)[case])
    device = "cpu" if q.kernel == "cpu" else "meta"
    assert close(saved_activations(q).bytes, saved_bytes(q, empty_transformer(q, device), device), 0.01)


@pytest.mark.parametrize("kind, fp16", [("qfloat8", False), ("nf4", True), slow("qint8", True), *(slow(k, False) for k in ("nf4", "qint8", "int8", "fp8_storage"))])
def test_saved_activations_of_a_quantized_base(kind, fp16):
    q = replace(TINY, quantization=kind, dim=128, heads=4, base_bytes=4 if fp16 else 2, fp16=fp16)
    tr = empty_transformer(replace(q, fp16=False), "cpu")
    for m in list(tr.modules()): # adapters have replaced the linear layers that the quantizer looks for
        if hasattr(m, "base_layer"): m.base_layer = quantize(torch.nn.Sequential(m.base_layer), kind)[0]
    quantize(tr, kind)
    if fp16: enable_fp16(tr)
    assert close(saved_activations(q).bytes, saved_bytes(q, tr))


@pytest.mark.parametrize("table, zero_cond", [(False, True), (True, False)])
def test_parameters(table, zero_cond):
    for q in (replace(TINY, table=table, zero_cond=zero_cond), MemoryQuery(layers=2, dim=256, heads=2, text_dim=96, channels=16, table=table)):
        tr = empty_transformer(replace(q, targets=("to_q",)))
        assert parameters(q) == sum(p.numel() for n, p in tr.named_parameters() if "lora_" not in n)


@pytest.mark.parametrize("kind, base_bytes", [(None, 2), ("qfloat8", 2), ("nf4", 4), *(slow(kind, 2) for kind in ("qint8", "int8", "float8", "fp8_storage"))])
def test_weight_bytes_of_each_quantization(kind, base_bytes):
    q = MemoryQuery(layers=2, dim=256, heads=2, text_dim=96, quantization=kind, base_bytes=base_bytes, table=False, targets=("to_q",))
    tr = empty_transformer(q, "cpu")
    plain = type(tr)(**tr.config).to(torch.bfloat16 if base_bytes == 2 else torch.float32).requires_grad_(False)
    assert close(2 * block_bytes(q) + other_bytes(q), held_bytes(quantize(plain, kind)), 0.01)


def test_the_adapters_shapes_depend_on_the_fields_that_are_named_and_are_found_once():
    whole = MemoryQuery(dora=True, targets=("to_q", "img_mod.1"))
    for field in fields(MemoryQuery):
        value = getattr(whole, field.name)
        changed = {bool: not value, int: 48, float: 0.3, tuple: ("to_k", "txt_in")}.get(type(value), "other")
        q = replace(whole, **{field.name: changed})
        assert adapter_shapes(q) == list(memory._shapes_of.__wrapped__(q, True)), field.name
    memory._shapes_of.cache_clear()
    for quantization in (None, "nf4", "qfloat8"):
        adapter_shapes(replace(whole, quantization=quantization, batch=2))
    assert memory._shapes_of.cache_info().misses == 1


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adafactor", "prodigy"])
@pytest.mark.parametrize("targets, more", [(ALL, {}), (ALL, dict(r=4)), (ALL, dict(dora=True)), slow(ATTENTION, {}), slow(("add_q_proj", "to_k"), {})])
def test_adapter_gradient_and_optimizer_bytes(name, targets, more): # of rank 4: tensors that an 8-bit optimizer keeps in float32
    q = replace(TINY, **dict(targets=targets, optimizer=name, dim=192, r=24) | more)
    tr = empty_transformer(q, "cpu")
    loss, _ = empty_step(q, tr, "cpu")
    loss().backward()
    params = lora_parameters(tr)
    assert numbers(adapter_shapes(q, trained=False)) == sum(p.numel() for n, p in tr.named_parameters() if "lora_" in n)
    gradients = sum(p.grad.nbytes for p in params)
    assert 4 * numbers(adapter_shapes(q)) == gradients
    planned = memory_of(q, gpu=False)
    assert planned.part("gradients") == gradients
    assert planned.part("adapter") == 4 * numbers(adapter_shapes(q, trained=False))
    assert planned.part("optimizer") == int(optimizer_bytes(q))
    optimizer = make_optimizer(params, make_config(dict(optimizer=dict(name=name, lr=1.))).optimizer)
    optimizer.step()
    state = {t.untyped_storage().data_ptr(): t.nbytes for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)}
    assert close(optimizer_bytes(q), sum(state.values()))


# --- the peak of a step
STEP = MemoryQuery(layers=5, text=250)
FP16 = dict(base_bytes=4, fp16=True, kernel="efficient")
PEAK = dict(recomputed={}, fp16=FP16, fp16_nothing_recomputed=FP16 | dict(checkpointing=False), nf4=dict(quantization="nf4"))
RARE_PEAK = dict(adapter_bf16=dict(adapter_bytes=2), float32=dict(base_bytes=4, kernel="efficient"), zero_cond=dict(zero_cond=True), small=dict(target=1024, control=1024), all_layers=dict(targets=ALL),
                 fp16_nf4=FP16 | dict(quantization="nf4"), batch=dict(batch=2), dora=dict(dora=True), dropout=dict(dropout=0.1, kernel="cpu"), edit_nf4=dict(text=1420, quantization="nf4"), layers=dict(table=False))


def test_a_gpu_needs_memory_for_its_runtime_too():
    assert memory_of(STEP).part("runtime") == memory.RUNTIME > 1e8 and memory_of(STEP, gpu=False).part("runtime") == 0
    assert memory_of(STEP).total == memory_of(STEP, gpu=False).total + memory.RUNTIME


@pytest.mark.slow
@pytest.mark.parametrize("case", [*PEAK, *RARE_PEAK])
def test_peak_of_a_step_at_real_size(case):
    "The parts of a step on 5 of the 60 blocks, on the meta device; the error is relative to the whole model."
    q = replace(STEP, **(PEAK | RARE_PEAK)[case])
    m = memory_of(q, gpu=False)
    planned = m.part("saved activations") + m.part("working memory") + m.parts[1][1]
    counted = count_step(q)[bool(q.quantization)]
    assert abs(planned - counted) < 0.015 * memory_of(replace(q, layers=60)).total
    assert close(planned, counted, 0.12) and m.total == sum(b for _, b, _ in m.parts)


@pytest.mark.slow
def test_selective_checkpointing_saves_attention_too():
    q = replace(TINY, layers=4, table=True)
    tr, held = empty_transformer(q, "cpu"), {}
    for mode in (True, "selective"):
        set_up(tr, mode)
        loss, batch = empty_step(q, tr, "cpu")
        loss()
        with LiveBytes([*tr.parameters(), *tr.buffers(), *batch]) as live:
            out = loss()
            gc.collect()
            held[mode] = live.now
            out.backward()
        del out
    planned = {mode: saved_activations(replace(q, checkpointing=mode)).bytes for mode in held}
    assert close(planned["selective"] - planned[True], held["selective"] - held[True])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bfloat16", "adapter_bf16", "zero_cond_table", "text_too"])
def test_saved_activations_of_compiled_blocks(case):
    q, found = replace(TINY, **(SAVED | RARE)[case], target=256, control=256), {}
    def forward(gm, example):
        out = next(n for n in gm.graph.nodes if n.op == "output").args[0]
        given = {n for n in gm.graph.nodes if n.op == "placeholder"}
        views = ("view", "permute", "alias", "unsqueeze", "_conj", "expand", "slice")
        def source(n): # the node that owns the storage
            while any(f"aten.{s}." in str(n.target) for s in views): n = n.args[0]
            return n
        saved = {source(n) for n in [n for n in out if isinstance(n, torch.fx.Node)][2:]} - given
        found.update({n: n.meta["val"].numel() * n.meta["val"].element_size() for n in saved if hasattr(n.meta.get("val"), "numel")})
        return gm.forward
    backend = aot_autograd(fw_compiler=forward, bw_compiler=lambda gm, example: gm.forward, partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table())
    tr = empty_transformer(q, "cpu")
    block = tr.transformer_blocks[1]
    block.forward = torch.compile(block.forward, backend=backend)
    empty_step(q, tr, "cpu")[0]()
    inputs = (q.target + q.control + q.text) * q.dim * q.base_bytes # inputs of the graph that a block in the middle saves
    k, _ = saved_by_block(replace(q, compiled=True), 1, dict(img=True, txt=True))
    assert close(k.bytes, sum(found.values()) + inputs)


# --- the sum
def test_peak_follows_the_settings():
    q = replace(TINY, table=True, checkpointing=True, base_bytes=2)
    plain = peak_activations(q)
    assert peak_activations(replace(q, compiled=True)) < plain < peak_activations(replace(q, quantization="int8")), "a copy of the weight"
    assert plain == peak_activations(replace(q, layers=9)) == peak_activations(replace(q, block_swap=True))
    assert peak_activations(replace(q, checkpointing="selective")) < plain


def test_block_swap_offloading_and_two_devices():
    q = MemoryQuery(text=250)
    base, part = memory_of(q), lambda name, **kw: memory_of(replace(q, **kw)).part(name)
    assert part("weights", block_swap=True) == SLOTS * block_bytes(q) + other_bytes(q) and memory_of(replace(q, block_swap=True)).host == 60 * block_bytes(q)
    inputs = 8442 * 3072 * 2
    assert base.part("saved activations") - part("saved activations", offload=True) == 58 * inputs and memory_of(replace(q, offload=True)).host == 60 * inputs
    assert part("weights", devices=2) == 30 * block_bytes(q) + other_bytes(q) and close(part("optimizer", devices=2), base.part("optimizer") / 2)
    assert part("weights", devices=7) == 9 * block_bytes(q) + other_bytes(q), "60 blocks on 7 devices"
    assert part("working memory", devices=2) == base.part("working memory")


def test_a_running_mean_takes_as_much_as_the_adapter():
    q = MemoryQuery(text=250)
    assert memory_of(replace(q, ema=True)).total - memory_of(q).total == memory_of(replace(q, ema=True)).part("EMA") == 4 * numbers(adapter_shapes(q))


def test_query_follows_the_configuration():
    c = make_config(dict(model=dict(quantize="nf4", lora=dict(r=8, target_modules="all_linear", use_dora=True)), data=dict(image_size=[832, 576], batch_size=2, control_area=512 * 512),
                         train=dict(gradient_checkpointing=False, ema_decay=0.9, mixed_precision="no"), optimizer=dict(name="prodigy", lr=1)))
    q = memory_query(c, model_facts("2511")[0])
    assert (q.target, q.control, q.batch, q.quantization, q.r, q.dora, q.checkpointing, q.ema, q.base_bytes) == (1872, 1024, 2, "nf4", 8, True, False, True, 4)
    assert q.zero_cond and q.table and q.optimizer == "prodigy" and len(q.targets) == 12 and q.kernel == "efficient"
    for model in (dict(lora=dict(target_modules=["img_mod.1", "to_q"])), dict(modulation_table=False)): assert not memory_query(make_config(dict(model=model))).table


def test_component_bytes_with_and_without_the_table():
    folder = tiny_folder("2511")
    whole, small = (component_bytes(folder/"transformer", torch.float32, table=t) for t in (False, True))
    q = memory_query(make_config(), model_facts(str(folder))[0])
    assert whole == 4 * parameters(replace(q, table=False)) and small == 4 * parameters(q)


def test_out_of_memory_advice_names_real_savings():
    c = make_config(dict(model=dict(pretrained_model_name_or_path="2511", quantize=False), train=dict(gradient_checkpointing=False)))
    t, variant = model_facts("2511")
    first, other, _ = Planner(c, "cpu").ways_to_train()
    setting, saved, second = str(first), first.saved, other.saved
    size = lambda q: memory_of(q).total / 1e9
    q = memory_query(c, t, text=variant.prompt_tokens())
    assert setting.startswith("`train.gradient_checkpointing`") and second > 13 # 8 bits instead of 16 save 13.6 GB
    if "true" in setting: assert close(saved, size(q) - size(replace(q, checkpointing=True)), 0.01) and saved > 70
