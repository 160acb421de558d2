"""Compiled blocks, adapters in the base's dtype and batches without masks give the same results; how many graphs are compiled."""
from unittest.mock import Mock

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from functorch.compile import min_cut_rematerialization_partition
from safetensors.torch import load_file
from torch._dynamo.backends.common import aot_autograd

from qie_nb.config import LoraSection
from qie_nb.core.choice import Choice
from qie_nb.devices import compile as compiled
from qie_nb.devices.compile import attention_kernel, obstacle, set_up, watch_attention
from qie_nb.devices.fp16 import enable_fp16
from qie_nb.lora.adapters import CastLinear, adapters_in_base_dtype, assert_float32, computes_in_base, load_lora, lora_state, save_lora, start_lora
from qie_nb.planning import plan as planning
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training import step

from helpers import adapters_close, close_images, settings, slow, weekly
from small_transformer import OnOperation, adapted, assert_same, base, call, far, gradients, whole


def compiled_graphs(): return torch._dynamo.utils.counters["stats"]["unique_graphs"]
def keep(graphs): return lambda graph, inputs: graphs.append(graph) or graph # a compiler that notes each graph and changes nothing


@pytest.fixture
def traced(monkeypatch):
    "Blocks are traced, and the graphs run eagerly instead of through a compiler."
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def small(layers=3, dtype=torch.float32, zero=False, targets="attention", **lora): return adapted(base(zero, layers=layers).to(dtype), targets, **lora)


# --- recomputation
def test_selective_checkpointing_runs_attention_once_a_step():
    attention, products, tr = [], [], small()
    for mode in (False, "selective", True):
        set_up(tr, mode)
        seen = []
        with OnOperation(lambda name, *_: seen.append(name)): gradients(tr)
        attention.append(sum("scaled_dot_product" in name and "backward" not in name for name in seen))
        products.append(sum(name in ("aten::mm", "aten::addmm") for name in seen))
    kept, selective, recomputed = products
    assert attention == [3, 3, 6] and selective == recomputed > kept, "only attention is kept"


def operations_in_mode(tr, monkeypatch) -> list:
    "The operations of a step that pass through the mode that keeps attention."
    seen, real = [], compiled.create_selective_checkpoint_contexts

    def watched(kept):
        def policy(context, operation, *args, **kw):
            seen.append(operation)
            return operation in kept
        return real(policy)
    monkeypatch.setattr(compiled, "create_selective_checkpoint_contexts", watched)
    gradients(tr)
    return seen


@pytest.mark.parametrize("fp16", [False, True])
def test_only_attention_passes_through_the_mode_that_keeps_it(fp16, monkeypatch):
    "Each operation that passes costs the CPU some microseconds, and a GPU waits for it."
    tr = enable_fp16(small()) if fp16 else small()
    want = gradients(tr)
    set_up(tr, "selective")
    assert_same(gradients(tr), want)
    seen = operations_in_mode(tr, monkeypatch)
    attention = [o for o in seen if "scaled_dot_product" in str(o)]
    assert len(attention) == 3 and len(seen) <= 3 * (35 if fp16 else 8)


@pytest.mark.slow
def test_processors_are_as_before_after_each_way(traced):
    tr = small(2)
    classes = lambda: {type(block.attn.processor) for block in tr.transformer_blocks}
    plain = classes()
    set_up(tr, "selective")
    assert classes() != plain
    set_up(tr, "selective")
    want = gradients(tr)
    code = set_up(tr, "selective", True)
    assert_same(gradients(tr), want)
    assert not code.failed and compiled_graphs() == 1
    set_up(tr, True)
    assert classes() == plain


# --- compiled
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", weekly(False)])
def test_one_graph_serves_all_sizes_and_prompts(mode, traced):
    tr = small(2)
    asked = [dict(size=s, words=w) for s, w in (((4, 6), 5), ((6, 4), 9), ((8, 6), 2))]
    want = [gradients(tr, **kw) for kw in asked]
    code = set_up(tr, mode, True)
    for kw, w in zip(asked, want): assert_same(gradients(tr, **kw), w)
    assert compiled_graphs() == 1 and not code.failed
    made = set()
    for kw in asked:
        with torch.no_grad(): call(tr, **kw)
        made.add(compiled_graphs())
    assert made == ({1} if mode else {2}), "evaluation adds one graph, and none if only the checkpointing function is compiled"


@pytest.mark.slow
def test_text_adapters_batches_and_masks_need_one_graph_each(traced):
    tr = small(targets="attention_text")
    want, code = gradients(tr), set_up(tr, False, True)
    assert_same(gradients(tr), want)
    assert compiled_graphs() == 2
    for batch in (2, 4): gradients(tr, batch=batch, words=4 + batch)
    assert compiled_graphs() == 4, "one more graph pair for any batch above one"
    for words in (5, 7): gradients(tr, batch=2, words=words, mask=torch.arange(words) < torch.tensor([[words], [words - 1]]))
    assert compiled_graphs() == 6 and not code.failed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qfloat8", "nf4", "int8", *map(weekly, ("qint8", "float8", "qint4"))])
def test_a_quantized_base_compiles_with_the_same_gradients(kind, traced):
    tr = adapted(base(False, kind, 2))
    want, code = gradients(tr), set_up(tr, "selective", True)
    assert far(whole(gradients(tr)), whole(want)) <= 1e-5 and not code.failed and compiled_graphs() == 1


def failing(tr, mode, error):
    "Makes the compiled code raise. Returns it and the sentences that it reports."
    said = []
    code = set_up(tr, mode, True, said.append)
    code.code = Mock(side_effect=error)
    return code, said


@pytest.mark.parametrize("mode", [True, False])
def test_a_failing_compiler_is_reported_once_and_blocks_run_eagerly(mode):
    tr = small(1)
    want = gradients(tr)
    code, said = failing(tr, mode, RuntimeError("no such instruction"))
    broken = code.code
    assert_same(gradients(tr), want)
    gradients(tr, words=8)
    assert broken.call_count == 1 and len(said) == 1 and "no such instruction" in said[0] and code.failed


def test_out_of_memory_is_not_a_compiler_failure():
    code, said = failing(tr := small(1), False, torch.cuda.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(Exception, match="out of memory"): call(tr)
    assert not code.failed and not said


@pytest.mark.slow
def test_a_failing_backward_compiler_is_caught(traced, monkeypatch):
    def fails(graph, inputs): raise RuntimeError("no backward")
    monkeypatch.setattr(compiled, "BACKEND", aot_autograd(fw_compiler=lambda g, i: g, bw_compiler=fails))
    tr, said = small(1), []
    want, code = gradients(tr), set_up(tr, False, True, said.append)
    assert_same(gradients(tr), want)
    assert code.failed and len(said) == 1


def broken(graph, inputs):
    "A backend that fails."
    raise RuntimeError("no such instruction")


def operations(tr) -> list:
    "Names of the operations of a step, and its gradients."
    seen = []
    with OnOperation(lambda name, *_: seen.append(name)): found = gradients(tr)
    return seen, found


def counted(seen) -> tuple:
    "How often a step runs attention, and products."
    return (sum("scaled_dot_product" in name and "backward" not in name for name in seen),
            sum(name in ("aten::mm", "aten::addmm") for name in seen))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", True])
def test_blocks_recompute_from_the_first_step_on_when_their_compiler_fails(mode, traced, monkeypatch):
    "Without recomputation, uncompiled blocks may need more memory than there is."
    monkeypatch.setattr(compiled, "BACKEND", broken)
    tr, said, asked = small(), [], []
    set_up(tr, mode)
    seen, want = operations(tr)
    recomputed = counted(seen)

    def uncompiled(failure):
        "What the plan says after a failure."
        asked.append(failure)
        return mode
    code = set_up(tr, False, True, said.append, uncompiled)
    assert far(whole(gradients(tr)), whole(want)) <= 1e-5
    seen, found = operations(tr)
    assert counted(seen) == recomputed and far(whole(found), whole(want)) <= 1e-5
    assert len(said) == 1 and asked == [f"compiling failed ({code.failed})"] and "no such instruction" in asked[0]


@pytest.mark.slow
def test_a_run_whose_compiler_fails_is_planned_again(pairs, tmp_path, traced, monkeypatch, capsys):
    monkeypatch.setattr(compiled, "BACKEND", broken)
    real = planning.choose_checkpointing

    def without_memory(train, *args):
        "The decision on a GPU that is too small once compiling has failed."
        return real(train, *args) if not failed else Choice("selective", warning="recomputed: 94 of 85 GB")
    failed = []
    learn = planning.Planner.learn

    def learned(self, **facts):
        "Note a failure of the compiler."
        failed.extend(why for why in (facts.get("obstacle"),) if why)
        learn(self, **facts)
    monkeypatch.setattr(planning, "choose_checkpointing", without_memory)
    monkeypatch.setattr(planning.Planner, "learn", learned)
    root = pairs(((48, 32),) * 2)
    plain = run(root, tmp_path, "plain", compile=False, gradient_checkpointing=False).fit()
    capsys.readouterr()
    t = run(root, tmp_path, compile=True, gradient_checkpointing=False).fit()
    out = capsys.readouterr().out
    assert out.count("recomputed: 94 of 85 GB") == out.count("because compiling failed") == 1
    assert len(failed) == 1 and failed[0].startswith("compiling failed (")
    assert t.plan.checkpointing.value == "selective" and not t.plan.compile.value
    adapters_close(t, plain)


def test_obstacles_to_compiling(): # what else decides: tests/planning/test_machines.py
    tr = small()
    assert obstacle(tr) == "" and "lora_dropout" in obstacle(small(lora_dropout=0.3))
    tr.transformer_blocks[1].attn.to_q.register_forward_pre_hook(lambda m, a: None)
    assert obstacle(tr) == "hooks inside the blocks cast or move weights (Linear)"


def run(root, tmp_path, name="out", lora={}, data={}, **train):
    return QwenImageEditTrainer(settings(root, tmp_path, model=dict(lora=dict(r=4, lora_alpha=8) | lora), data=data, optimizer=dict(eps=1e-5),
                                         train=dict(output_dir=str(tmp_path/name), num_epochs=1) | train))


@pytest.mark.slow
def test_a_compiled_run_saves_resumes_predicts_and_merges(pairs, tmp_path, traced, capsys):
    root = pairs(((48, 32), (32, 48), (64, 64)), caption=["invert", "invert the colours of everything", "x"])
    more = dict(gradient_checkpointing="selective", ema_decay=0.5, save_interval=1)
    plain = run(root, tmp_path, "plain", compile=False, **more).fit()
    run(root, tmp_path, "ours", compile=True, max_train_steps=1, **more).fit()
    assert "blocks are compiled" in capsys.readouterr().out
    warm, again = compiled_graphs(), run(root, tmp_path, "ours", compile=True, resume_checkpoint="latest", **more).fit()
    assert again.global_step == plain.global_step > 1
    adapters_close(again, plain)
    assert 0 < warm <= 2 and compiled_graphs() <= 2 * warm
    assert load_file(again.save_lora(tmp_path/"a")).keys() == load_file(plain.save_lora(tmp_path/"b")).keys()
    image = lambda t: t.predict(str(root/"control_images"/"0000.png"), "invert", num_inference_steps=2, seed=1)
    before = image(again)
    again.merge_lora()
    assert close_images(image(again), before, 2)


@pytest.mark.parametrize("mode", ["selective", slow(True)])
def test_recomputation_draws_the_same_dropout(mode):
    tr = small(lora_dropout=0.5).train()
    def seeded(checkpointing):
        set_up(tr, checkpointing)
        torch.manual_seed(3)
        return gradients(tr)
    assert_same(seeded(mode), seeded(False), atol=1e-5)


@pytest.mark.slow
def test_ddp_does_not_split_compiled_blocks(tmp_path, traced, monkeypatch):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    tr, made = small(1, r=1024, targets="attention_text"), [] # more than the megabyte after which DDP would cut
    monkeypatch.setattr(compiled, "BACKEND", keep(made))
    monkeypatch.setattr(torch._dynamo.config, "optimize_ddp", True) # torch's default
    want = gradients(tr)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path/'store'}", rank=0, world_size=1)
    try:
        code = set_up(tr, False, True)
        wrapped = DistributedDataParallel(tr)
        wrapped.dtype, wrapped.config = tr.dtype, tr.config
        assert_same(gradients(tr, lambda tr: call(wrapped).square().mean()), want)
        assert not code.failed and len(made) == compiled_graphs() == 1
    finally: dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [weekly(False), True, weekly("selective")])
def test_compiled_graphs_have_no_complex_numbers_and_the_same_gradients(mode, traced, monkeypatch):
    tr, forward, backward = small(2, zero=True), [], []
    monkeypatch.setattr(compiled, "BACKEND", aot_autograd(fw_compiler=keep(forward), bw_compiler=keep(backward), partition_fn=min_cut_rematerialization_partition))
    want, code = gradients(tr), set_up(tr, mode, True)
    assert far(whole(gradients(tr)), whole(want)) <= 1e-5 and not code.failed
    ops = [[n for n in graph.graph.nodes if n.op == "call_function"] for graph, in (forward, backward)]
    assert not any(n.meta["val"].is_complex() for n in sum(ops, []) if isinstance(n.meta.get("val"), torch.Tensor))
    assert [sum("scaled_dot_product" in str(n.target) and "_backward" not in str(n.target) for n in of) for of in ops] == [1, mode is True]


@pytest.mark.weekly
def test_the_real_compiler_gives_the_same_gradients(monkeypatch):
    torch.compiler.reset()
    tr = small(1, torch.bfloat16)
    adapters_in_base_dtype(tr)
    want, code = gradients(tr), set_up(tr, "selective", True)
    assert far(whole(gradients(tr)), whole(want)) <= 2e-2 and not code.failed


# --- the adapters' dtype
@pytest.mark.parametrize("targets", ["attention", slow("all_linear")])
def test_gradients_in_the_base_dtype_match_float32_to_rounding(targets):
    tr = small(3, torch.bfloat16, targets=targets)
    exact, want = small(3, torch.float32, targets=targets), gradients(tr)
    for p, q in zip(exact.parameters(), tr.parameters(), strict=True): p.data.copy_(q.data)
    truth = gradients(exact)
    adapters_in_base_dtype(tr)
    got = gradients(tr)
    assert got.keys() == want.keys() and all(g.dtype == torch.float32 for g in got.values())
    assert far(whole(got), whole(truth)) <= 1.25 * far(whole(want), whole(truth))
    assert_float32(tr)


def test_float32_bases_and_dora_do_not_change():
    tr = small(1)
    want = gradients(tr)
    adapters_in_base_dtype(tr)
    assert_same(gradients(tr), want)
    dora = small(1, torch.bfloat16, use_dora=True)
    assert adapters_in_base_dtype(dora) == 0 and not computes_in_base(dora)


def test_files_and_second_adapters_have_float32_weights(tmp_path):
    tr = small(1, torch.bfloat16)
    before, want = lora_state(tr), call(tr)
    adapters_in_base_dtype(tr)
    file = save_lora(tr, tmp_path/"lora")
    load_lora(tr, file, "second")
    start_lora(tr, LoraSection(pretrained_weight=str(file)))
    assert all(type(l) is CastLinear for m in tr.modules() if hasattr(m, "lora_A") for l in (*m.lora_A.values(), *m.lora_B.values()))
    for k, v in lora_state(tr).items(): assert torch.equal(v, before[k])
    assert gradients(tr)
    adapters_in_base_dtype(tr, False)
    assert not computes_in_base(tr)
    torch.testing.assert_close(call(tr), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype, on", [("bf16", True), slow("no", False)])
def test_adapters_compute_in_the_dtype_of_the_base(dtype, on, tmp_path):
    t = QwenImageEditTrainer(settings(tmp_path, tmp_path, train=dict(mixed_precision=dtype)))
    t.set_lora()
    assert computes_in_base(t.transformer) == on
    assert_float32(t.transformer)


# --- masks
@pytest.mark.parametrize("lora", [{}, slow(dict(lora_dropout=0.1))])
def test_no_mask_reaches_the_transformer(lora, pairs, tmp_path, monkeypatch):
    root = pairs(((32, 32),) * 4, caption=["invert", "invert the colours of everything", "x", "x"])
    calls, real = [], QwenImageTransformer2DModel.forward
    def forward(self, *a, **kw):
        calls.append((kw["encoder_hidden_states_mask"], len(kw["encoder_hidden_states"])))
        return real(self, *a, **kw)
    monkeypatch.setattr(QwenImageTransformer2DModel, "forward", forward)
    run(root, tmp_path, lora=lora, data=dict(batch_size=4, caption_dropout_rate=0.), gradient_checkpointing=False).fit()
    assert sorted(b for _, b in calls) == [1, 1, 2] and all(m is None for m, _ in calls)


def test_a_mask_on_the_device_is_not_read():
    "Reading a mask on the meta device would raise."
    def parts(mask):
        n, length = mask.shape
        return step.split_by_prompt_length(dict(pixel_latent=torch.zeros(n, 16, 1, 2, 2), control_latent=[], prompt_embed=torch.zeros(n, length, 4), prompt_embeds_mask=mask))
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert parts(mask.to("meta"))[0].batch["prompt_embeds_mask"].device.type == "meta"
    assert [p.batch["prompt_embeds_mask"] for p in parts(mask)] == [None]
    for odd in (torch.tensor([[True, False, True]]), torch.zeros(1, 3, dtype=torch.bool)): # hides more than padding
        assert parts(odd)[0].batch["prompt_embeds_mask"] is odd


# --- the attention kernel
def test_the_reported_attention_kernel_is_the_one_that_runs(monkeypatch):
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
    from torch.profiler import profile
    monkeypatch.setattr(Registry, "_active_backend", Registry._active_backend) # set_attention_backend sets it for every model
    tr, said = small(1, torch.bfloat16), []
    watch_attention(tr, said.append), watch_attention(tr, said.append)
    def ran(**kw):
        with profile() as p, torch.no_grad(): call(tr, **kw)
        return any("scaled_dot_product" in e.key and "flash" in e.key for e in p.key_averages())
    for words in (5, 8): assert ran(words=words) == ("flash" in tr.attention_kernel)
    assert said == [f"attention: {tr.attention_kernel} (bfloat16, no mask)"]
    ran(batch=2, mask=torch.tensor([[True] * 5, [True] * 4 + [False]]))
    assert len(said) == 2 and said[1].endswith("a mask)")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_kernel(tr) == "math" and not ran()
    other = small(1)
    tr.set_attention_backend("_native_math")
    assert attention_kernel(tr) == attention_kernel(other) == "_native_math", "models without a choice use the last one set"
