"""The planner's parts against counted bytes: what the real classes hold, keep and take, at tiny sizes."""
import gc, json, weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from qie_nb.planning import training_memory as memory

from qie_nb.planning import plan as planner
from qie_nb.cli import main
from qie_nb.config import Config, make_config
from qie_nb.planning.counting import LiveBytes, count_step, empty_step, empty_transformer, memory_of, rough_working_set, peak_activations
from qie_nb.lora.adapters import add_lora, lora_parameters
from qie_nb.planning.training_memory import MemoryQuery, adapter_shapes, block_bytes, saved_by_block, job_of, kept, model_facts, numbers, optimizer_bytes, other_bytes, parameters
from qie_nb.training.optimizer import make_optimizer
from qie_nb.devices.placement import component_bytes
from qie_nb.planning.plan import CARDS, Card, card_of, encoder_settings, plan, step_work, way_name, ways
from qie_nb.models.quantize import plain_tensors, held_bytes, quantize
from qie_nb.training.stopping import training_advice
from qie_nb.devices.block_swap import SLOTS
from qie_nb.tiny.random_models import tiny_folder

TINY = MemoryQuery(layers=3, dim=96, heads=3, text_dim=64, target=64, control=80, text=24, r=4, kernel="cpu", checkpointing=False, table=False, wide=4)
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
ALL = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", *(f"{s}_mlp.net.{n}" for s in ("img", "txt") for n in ("0.proj", "2")))
BF16 = dict(wide=2)
close = lambda ours, counted, within=0.03: abs(ours / counted - 1) <= within


class Box: # what autograd is handed in place of a tensor that it keeps
    def __init__(self, tensor): self.tensor = tensor


def saved_bytes(loss, there):
    "Bytes of the storages that autograd still keeps when the forward pass is over."
    held, boxes = [t.untyped_storage() for t in there], weakref.WeakSet() # held, so that nothing new gets their place
    def pack(t):
        boxes.add(box := Box(t))
        return box
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor): out = loss()
    gc.collect()
    kept = {s._cdata: s.nbytes() for s in (t.untyped_storage() for b in boxes for t in plain_tensors(b.tensor))}
    assert out.requires_grad
    return sum(n for key, n in kept.items() if key not in {s._cdata for s in held})


def counted_kept(job, change=lambda tr: None):
    device = "meta" if job.kernel in ("flash", "efficient", "cudnn") else "cpu"
    tr = empty_transformer(job, device)
    change(tr)
    loss, batch = empty_step(job, tr, device)
    loss() # what it keeps between steps, such as the rotation's angles
    with sdpa_kernel(SDPBackend.MATH) if job.kernel == "math" else torch.enable_grad():
        return saved_bytes(loss, [*tr.parameters(), *tr.buffers(), *batch])


KEPT = dict(
    float32={}, bfloat16=BF16, adapter_in_bfloat16=dict(wide=2, adapter=2), every_layer=dict(targets=ALL), every_layer_bf16=dict(targets=ALL) | BF16,
    every_layer_adapter_bf16=dict(targets=ALL, wide=2, adapter=2), text_too=dict(targets=ALL[:8]) | BF16, out_only=dict(targets=("to_out.0",)),
    mlp_only=dict(targets=("img_mlp.net.2",)) | BF16, text_only=dict(targets=("add_k_proj",)) | BF16, one_layer=dict(targets=r"transformer_blocks\.1\.attn\.to_q"),
    zero_cond=dict(zero_cond=True), zero_cond_table=dict(zero_cond=True, table=True) | BF16, table=dict(table=True), batch=dict(batch=2, wide=2, adapter=2),
    batch_all=dict(batch=3, zero_cond=True, table=True, targets=ALL) | BF16, wider=dict(layers=5, dim=128, heads=2, text_dim=96), rank=dict(r=64, targets=ALL),
    modulation=dict(targets=("img_mod.1",)), modulation_too=dict(targets=("img_mod.1", "txt_mod.1", "to_q"), zero_cond=True) | BF16, first=dict(targets=("img_in", "to_q")),
    dora=dict(dora=True) | BF16, dora_all=dict(dora=True, targets=ALL), dropout=dict(dropout=0.1) | BF16, dropout_all=dict(dropout=0.1, targets=ALL),
    checkpointing=dict(checkpointing=True), checkpointing_batch=dict(checkpointing=True, table=True, batch=2, zero_cond=True) | BF16,
    math=dict(kernel="math"), math_bf16=dict(kernel="math") | BF16, flash=dict(kernel="flash") | BF16, cudnn=dict(kernel="cudnn") | BF16, efficient=dict(kernel="efficient"))


RARE = {"math", "efficient", "text_too", "every_layer", "every_layer_bf16", "out_only", "mlp_only", "text_only", "first", "wider", "rank", "dora_all", "dropout_all", "math_bf16", "cudnn", "modulation", "short", "text_heavy"}
some = lambda cases: [pytest.param(c, marks=pytest.mark.slow) if c in RARE else c for c in cases]


@pytest.mark.parametrize("case", some(KEPT))
def test_what_autograd_keeps_is_what_the_list_says(case):
    job = replace(TINY, **KEPT[case])
    assert close(kept(job).bytes, counted_kept(job), 0.01)


@pytest.mark.parametrize("kind", ["qfloat8", "qint8", "nf4", "int8", "fp8_storage"])
def test_a_quantized_base_keeps_what_its_library_keeps(kind):
    job = replace(TINY, kind=kind, dim=128, heads=4, wide=2, targets=ATTENTION)
    tr = empty_transformer(job, "cpu")
    for m in list(tr.modules()): # its adapters have replaced the linear layers that a quantizer looks for
        if hasattr(m, "base_layer"): m.base_layer = quantize(torch.nn.Sequential(m.base_layer), kind)[0]
    quantize(tr, kind)
    loss, batch = empty_step(job, tr, "cpu")
    there = [t for p in (*tr.parameters(), *tr.buffers()) for t in plain_tensors(p)]
    loss()
    assert close(kept(job).bytes, saved_bytes(loss, [*there, *batch]))


@pytest.mark.parametrize("zero_cond", [False, True])
@pytest.mark.parametrize("table", [False, True])
def test_every_parameter_is_counted(table, zero_cond):
    for job in (replace(TINY, table=table, zero_cond=zero_cond), MemoryQuery(layers=2, dim=256, heads=2, text_dim=96, channels=16, table=table)):
        tr = empty_transformer(replace(job, targets=("to_q",)))
        assert parameters(job) == sum(p.numel() for n, p in tr.named_parameters() if "lora_" not in n)
    assert round(parameters(MemoryQuery()) / 1e9, 3) == 13.633 and round(parameters(MemoryQuery(table=False)) / 1e9, 3) == 20.430


@pytest.mark.parametrize("wide", [2, 4])
@pytest.mark.parametrize("kind", [None, "qfloat8", "qint8", "nf4", "int8", "float8", "fp8_storage"])
def test_weights_by_kind_are_what_is_held(kind, wide):
    job = MemoryQuery(layers=2, dim=256, heads=2, text_dim=96, kind=kind, wide=wide, table=False, targets=("to_q",))
    tr = empty_transformer(job, "cpu")
    plain = type(tr)(**tr.config).to(torch.bfloat16 if wide == 2 else torch.float32).requires_grad_(False)
    assert close(2 * block_bytes(job) + other_bytes(job), held_bytes(quantize(plain, kind)), 0.01)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adafactor", "prodigy"])
@pytest.mark.parametrize("targets", [ATTENTION, ALL, ("add_q_proj", "to_k")])
def test_adapter_gradients_and_optimizer(name, targets):
    job = replace(TINY, targets=targets, optimizer=name, dim=192, r=24)
    tr = empty_transformer(job, "cpu")
    loss, _ = empty_step(job, tr, "cpu")
    loss().backward()
    params = lora_parameters(tr)
    assert numbers(adapter_shapes(job, trained=False)) == sum(p.numel() for n, p in tr.named_parameters() if "lora_" in n)
    assert 4 * numbers(adapter_shapes(job)) == sum(p.grad.nbytes for p in params)
    optimizer = make_optimizer(params, make_config(dict(optimizer=dict(name=name, lr=1.))).optimizer)
    optimizer.step()
    state = {t.untyped_storage().data_ptr(): t.nbytes for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)}
    assert close(optimizer_bytes(job), sum(state.values()))


PEAK = dict(plain={}, bfloat16=BF16, adapter_in_bfloat16=dict(wide=2, adapter=2), every_layer=dict(targets=ALL, table=True) | BF16, zero_cond=dict(zero_cond=True, table=True),
            batch=dict(batch=2, table=True) | BF16, wider=dict(dim=128, heads=2, r=8), short=dict(layers=2), text_heavy=dict(text=200))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", some(PEAK))
def test_the_peak_of_a_step_is_the_sum_of_the_parts(case, checkpointing):
    job = replace(TINY, **dict(layers=5) | PEAK[case], checkpointing=checkpointing)
    m = memory_of(job, gpu=False)
    assert close(m.part("kept activations") + m.part("working set") + m.parts[1][1], count_step(job, "cpu")[0])
    assert m.total == sum(b for _, b, _ in m.parts)


def test_the_count_of_live_bytes_is_the_profilers():
    job = replace(TINY, table=True)
    tr = empty_transformer(job, "cpu")
    loss, batch = empty_step(job, tr, "cpu")
    loss()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as p: loss().backward()
    now = peak = 0
    for e in sorted((e for e in p.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += e.nbytes()
        peak = max(peak, now)
    for q in tr.parameters(): q.grad = None
    with LiveBytes([*tr.parameters(), *tr.buffers(), *batch]) as live: loss().backward()
    assert close(live.peak, peak)


def test_selective_checkpointing_keeps_inputs_and_attention():
    job = replace(TINY, layers=4, table=True)
    tr, held = empty_transformer(replace(job, checkpointing=True), "cpu"), {}
    must = lambda ctx, op, *a, **kw: CheckpointPolicy.MUST_SAVE if "scaled_dot_product" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE
    ways = dict(full=None, selective=partial(create_selective_checkpoint_contexts, must))
    for name, contexts in ways.items():
        tr.enable_gradient_checkpointing(lambda block, *a: checkpoint(block, *a, use_reentrant=False, **(dict(context_fn=contexts) if contexts else {})))
        loss, batch = empty_step(job, tr, "cpu")
        loss()
        with LiveBytes([*tr.parameters(), *tr.buffers(), *batch]) as live:
            out = loss()
            gc.collect()
            held[name] = live.now
            out.backward()
        del out
    more = kept(replace(job, checkpointing="selective")).bytes - kept(replace(job, checkpointing=True)).bytes
    assert close(more, held["selective"] - held["full"])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bfloat16", "adapter_in_bfloat16", "zero_cond_table", "text_too"])
def test_what_compiled_code_keeps_is_near_the_list(case):
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    job, found = replace(TINY, **KEPT[case], target=256, control=256), {}
    def forward(gm, example):
        out = next(n for n in gm.graph.nodes if n.op == "output").args[0]
        given = {n for n in gm.graph.nodes if n.op == "placeholder"}
        shared = ("view", "permute", "alias", "unsqueeze", "_conj", "expand", "slice")
        def source(n): # the node whose storage it is
            while any(f"aten.{s}." in str(n.target) for s in shared): n = n.args[0]
            return n
        size = lambda v: v.numel() * v.element_size()
        found.update({s: size(s.meta["val"]) for s in map(source, [n for n in out if isinstance(n, torch.fx.Node)][2:]) if s not in given and hasattr(s.meta.get("val"), "numel")})
        return gm.forward
    backend = aot_autograd(fw_compiler=forward, bw_compiler=lambda gm, example: gm.forward, partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table())
    tr = empty_transformer(job, "cpu")
    block = tr.transformer_blocks[1]
    block.forward = torch.compile(block.forward, backend=backend)
    empty_step(job, tr, "cpu")[0]()
    inputs = (job.target + job.control + job.text) * job.dim * job.wide # of the graph, which a block in the middle keeps
    k, _ = saved_by_block(replace(job, compiled=True), 1, dict(img=True, txt=True))
    assert close(k.bytes, sum(found.values()) + inputs)


def test_the_working_set_of_other_ways_follows_from_the_list():
    job = replace(TINY, table=True, checkpointing=True, wide=2)
    plain = peak_activations(job)
    assert peak_activations(replace(job, compiled=True)) < plain < peak_activations(replace(job, kind="int8")) # copies of a block's weights
    assert peak_activations(replace(job, layers=1)) < plain == peak_activations(replace(job, layers=9))
    assert peak_activations(replace(job, checkpointing="selective")) < plain and peak_activations(replace(job, streaming=True, devices=1)) == plain
    assert 0.8 < rough_working_set(MemoryQuery()) / peak_activations(MemoryQuery()) < 1.05


def test_streaming_offloading_and_two_devices():
    job = MemoryQuery(text=250)
    base, part = memory_of(job), lambda name, **kw: memory_of(replace(job, **kw)).part(name)
    assert part("weights", streaming=True) == SLOTS * block_bytes(job) + other_bytes(job)
    assert memory_of(replace(job, streaming=True)).host == 60 * block_bytes(job)
    inputs = 8442 * 3072 * 2
    assert base.part("kept activations") - part("kept activations", offload=True) == 58 * inputs and memory_of(replace(job, offload=True)).host == 60 * inputs
    assert part("weights", devices=2) == 30 * block_bytes(job) + other_bytes(job) and close(part("optimizer", devices=2), base.part("optimizer") / 2)
    assert part("working set", devices=2) == base.part("working set")


def test_the_figures_of_the_real_model():
    gb = lambda **kw: memory_of(replace(MemoryQuery(text=1420), **kw), gpu=False).total / 1e9
    fast, plus = dict(checkpointing=False, compiled=True, adapter=2), dict(text=250, kind="nf4")
    by_hand = {75.5: fast, 89.0: fast | dict(table=False), 84.6: fast | dict(adapter=4), 12.5: plus, 9.5: plus | dict(target=1024, control=1024), 7.0: dict(streaming=True)}
    for figure, kw in by_hand.items(): assert close(gb(**kw), figure, 0.07), (figure, gb(**kw))
    work = lambda **kw: step_work(replace(MemoryQuery(text=1420), **kw))
    assert close(work(checkpointing=False), 501, 0.005) and close(work(), 700, 0.005) and work(checkpointing=False) < work(checkpointing="selective") < work()


def test_a_job_follows_the_configuration():
    c = make_config(dict(model=dict(quantize="nf4", lora=dict(r=8, target_modules="all_linear", use_dora=True)), data=dict(image_size=[832, 576], batch_size=2, control_area=512 * 512),
                         train=dict(gradient_checkpointing=False, ema_decay=0.9, gradient_accumulation_steps=3, mixed_precision="no"), optimizer=dict(name="prodigy", lr=1)))
    j = job_of(c, model_facts("2511")[0])
    assert (j.target, j.control, j.batch, j.kind, j.r, j.dora, j.checkpointing, j.ema, j.wide) == (1872, 1024, 2, "nf4", 8, True, False, True, 4)
    assert j.zero_cond and j.table and j.optimizer == "prodigy" and j.accumulate == 3 and len(j.targets) == 12 and j.kernel == "efficient"
    changed = make_config(dict(model=dict(lora=dict(target_modules=["img_mod.1", "to_q"]))))
    assert not job_of(changed).table and not job_of(make_config(dict(model=dict(modulation_table=False)))).table


def test_cards_by_name():
    assert card_of("T4") == card_of("Tesla T4") == card_of("nvidia t4") == CARDS["t4"] and card_of("2xT4").count == card_of("T4 x2").count == 2
    assert card_of("A100") == card_of("A100 40GB") == CARDS["a100_40"] and card_of("a100-80") == CARDS["a100_80"] and card_of("H100 80GB") == CARDS["h100"]
    assert card_of(24).bytes == card_of("24 GB").bytes == 24e9 and not CARDS["t4"].bf16 and card_of("5090").name == "RTX 5090"
    assert card_of("NVIDIA H100 80GB HBM3") == CARDS["h100"] and card_of("NVIDIA A100-SXM4-40GB") == CARDS["a100_40"] and card_of("2 x NVIDIA A100-SXM4-80GB") == replace(CARDS["a100_80"], count=2)
    assert card_of("Tesla P100-PCIE-16GB") == Card("Tesla P100-PCIE-16GB", 16 * 10**9, False) and card_of("V100 32GB x4") == Card("V100 32GB x4", 32 * 10**9, False, 4)
    assert card_of("NVIDIA L40S 48 GB").bf16 and not card_of("RTX 2080 Ti 11GB").bf16 and card_of("RTX 3060 12GB").bytes == 12e9
    with pytest.raises(ValueError, match="`gpu` 'GTX' is not known; name one of T4, L4"): card_of("GTX")
    with pytest.raises(ValueError, match="`resolution` must be a side or width x height in pixels, got 'big'"): plan(gpu="T4", resolution="big")
    with pytest.raises(ValueError, match="`image_size` must be a multiple of 16, got 1000"): plan(gpu="T4", resolution=1000)


def test_the_choice_for_known_cards():
    chosen = {gpu: plan("2511", gpu, 1024).chosen for gpu in ("RTX 4090", "A100-80", "H200")}
    assert {g: m.job.kind for g, m in chosen.items()} == {"RTX 4090": "qfloat8", "A100-80": None, "H200": None}
    for gpu, m in chosen.items(): assert m.total <= 0.93 * card_of(gpu).bytes
    p = plan("2511", "T4", 512)
    assert p.chosen.job.kind == "nf4" and p.chosen.job.wide == 4 and any("no bfloat16" in n for n in p.notes) and any("control_area" in n for n in p.notes)
    assert plan("2511", "A100-80", 1024, quantize="nf4").chosen.job.kind == "nf4"


def test_seven_per_cent_stay_free():
    small = dict(num_layers=3, num_attention_heads=2, attention_head_dim=64, joint_attention_dim=128, in_channels=64)
    need = plan("v1", 80, 512, transformer=small).tried[0].total
    assert plan("v1", Card("just", int(need / 0.929)), 512, transformer=small).chosen.total == need
    wide = {how: plan("v1", "H100", 512, config=dict(train=dict(mixed_precision=how)), transformer=small).asked.job.wide for how in ("no", "auto", "bf16")}
    assert wide == dict(no=4, auto=2, bf16=2)
    tight = plan("v1", Card("not", int(need / 0.931)), 512, transformer=small)
    assert tight.chosen is None or tight.chosen is not tight.tried[0]


def test_what_is_chosen_is_the_first_that_fits():
    p = plan("v1", "RTX 5090", 512)
    fits = [p.fits(m) for m in p.tried]
    assert p.chosen is p.tried[fits.index(True)] and [planner.cost(m.job) for m in p.tried] == sorted(planner.cost(m.job) for m in p.tried)
    assert p.data()["ways"][fits.index(True)]["chosen"] and json.dumps(p.data())


@pytest.mark.parametrize("gpu", ["T4", "H200"])
def test_the_changes_make_the_configuration_that_was_chosen(gpu):
    p = plan("2511", gpu, 512, config=dict(model=dict(quantize="qint8"), data=dict(control_area=512 * 512)))
    raw = dict(model=dict(quantize="qint8"), data=dict(control_area=512 * 512))
    for section, keys in yaml.safe_load(yaml.safe_dump(p.changes)).items(): raw[section] = raw.get(section, {}) | keys
    again = plan("2511", gpu, config=raw)
    assert replace(again.asked.job, compiled=False) == replace(p.chosen.job, compiled=False) and not again.changes


CPU, SECOND, NF4 = dict(cache=dict(vae_encoder_device="cpu")), dict(cache=dict(vae_encoder_device="cuda:1")), dict(model=dict(text_encoder_quantize="nf4"))

@pytest.mark.parametrize("gpu, side, area, wanted", [
    ("T4", 512, 1024, NF4 | CPU), ("T4", 512, 512, NF4), ("T4", 1024, 1024, NF4 | CPU), ("2xT4", 512, 1024, NF4 | SECOND), ("2xT4", 512, 512, NF4), ("2xT4", 1024, 1024, NF4 | SECOND),
    ("L4", 512, 1024, NF4), ("L4", 512, 512, {}), ("L4", 1024, 1024, NF4), ("H100", 512, 512, {}), ("H100", 1024, 1024, {})])
def test_the_encoders_are_made_to_fit(gpu, side, area, wanted):
    "Text encoder, VAE and the larger working set have to fit one card together, or the VAE goes to the second one, or to the CPU."
    c = make_config(dict(data=dict(image_size=[side, side], control_area=area**2)))
    job = job_of(c, model_facts("2511")[0], 2 if gpu in ("L4", "H100") else 4)
    assert encoder_settings(job, card_of(gpu), c) == wanted


def test_what_was_said_of_the_encoders_stands():
    job, t4 = job_of(make_config(None), model_facts("2511")[0], 4), card_of("T4")
    said = lambda **sections: encoder_settings(job, t4, make_config(sections))
    assert said() == NF4 | CPU and said(model=dict(text_encoder_quantize="qint8")) == CPU, "another kind is kept"
    assert said(cache=dict(vae_encoder_device="cuda:0")) == NF4 and said(model=dict(text_encoder_offload=True)).get("model") is None
    assert encoder_settings(job, None, make_config(None)) == {} == encoder_settings(job_of(make_config(None), model_facts("tiny")[0], 4), t4, make_config(None)), "no card, and a tiny model"


def test_a_way_that_needs_compiled_blocks_asks_for_them():
    p = plan("2511", "H100", 1024)
    assert p.chosen.job.compiled and p.changes["train"] == dict(gradient_checkpointing=False, compile=True) and any("no compiler" in n for n in p.notes)
    plain = plan("2511", "H100", 1024, config=dict(train=dict(compile=False)))
    assert plain.chosen.job.checkpointing == "selective" and not plain.chosen.job.compiled and not any("no compiler" in n for n in plain.notes)


def test_ways_to_choose_from():
    jobs = ways(MemoryQuery(compiled=True), replace(CARDS["t4"], count=2))
    two = [way_name(j) for j in jobs]
    assert "bfloat16, blocks recomputed, blocks streamed" in two and "nf4, blocks recomputed, inputs in host memory" in two and "qint8, blocks recomputed, on 2 GPUs" in two
    assert two.index("nf4, blocks recomputed") < two.index("bfloat16, blocks recomputed, blocks streamed") and "bfloat16, all but attention recomputed" in two
    assert any(j.compiled for j in jobs) and not any(j.compiled for j in jobs if j.streaming or j.offload or j.devices > 1 or j.kind), "what does not go together"
    assert not any(j.devices > 1 and (j.streaming or j.offload) for j in jobs)


def test_without_a_card_the_plan_shows_the_configuration():
    if torch.cuda.is_available(): pytest.skip("there is a card")
    p = plan(make_config(dict(data=dict(image_size=[512, 512]))))
    assert p.card is None and p.chosen is None and not p.changes and "kept activations" in repr(p) and "<table" in p._repr_html_()
    assert plan(config=dict(data=dict(image_size=[512, 512]))).asked.job == p.asked.job


def test_out_of_memory_names_true_savings():
    c = make_config(dict(model=dict(pretrained_model_name_or_path="2511", quantize=False), train=dict(gradient_checkpointing=False)))
    t, plus = model_facts("2511")
    advice = training_advice(c)
    job = job_of(c, t, text=memory.prompt_tokens(plus))
    assert advice[0][0].startswith("`train.gradient_checkpointing`") and len(advice) == 3
    if "true" in advice[0][0]:
        size = lambda j: memory_of(j, work=rough_working_set).total
        assert close(advice[0][1], (size(job) - size(replace(job, checkpointing=True))) / 1e9, 0.01) and advice[0][1] > 70
    assert close(advice[1][1], 13.6, 0.03) or advice[1][1] > 13 # eight bits in place of sixteen


def test_the_command(capsys, tmp_path):
    assert main(["plan", "--gpu", "L4", "--resolution", "512", "--model", "tiny"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("L4: 23.6 GB: ") and "chosen" in out and "to set:" in out and "precompute" in out
    (tmp_path/"c.yaml").write_text("model: {quantize: nf4}")
    assert main(["plan", "--config", str(tmp_path/"c.yaml"), "--gpu", "24"]) == 0 and main(["plan", "--gpu", "voodoo"]) == 2


def test_component_sizes_know_the_table():
    folder = tiny_folder("2511")/"transformer"
    whole, small = (component_bytes(folder, torch.float32, table=t) for t in (False, True))
    facts = job_of(make_config(), model_facts(str(tiny_folder("2511")))[0])
    assert whole == 4 * parameters(replace(facts, table=False)) and small == 4 * parameters(facts)
