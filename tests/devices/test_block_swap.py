"""Streamed blocks and inputs against the ones that stay, with streams that delay every copy until somebody waits for it and refuse one that comes too early."""
import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from qie_nb.devices import model_parallel as divided
from qie_nb.config import make_config
from qie_nb.lora.adapters import add_lora, lora_state
from qie_nb.models.modulation import use_modulation_table
from qie_nb.models.modulation import ModulationTable
from qie_nb.models.quantize import held_bytes, quantize
from qie_nb.models.loading import load_quantized
from qie_nb.devices.block_swap import BlockSwap, BlockSwapLoader, Streams, check_streaming, offload_checkpoint_inputs, enable_block_swap
from qie_nb.trainer import QwenImageEditTrainer

from helpers import settings

LAYERS = 5


# --- pretended streams
class Rig(TorchDispatchMode):
    "CUDA's streams at their worst: a copy is made when it is waited for and not before; one that could overtake what reads its place is refused."
    def __init__(self):
        super().__init__()
        self.clock, self.used, self.is_interactive, self.copies, self.inside = 0, {}, set(), [], None
        rig = self

        class Stream:
            def __init__(self, device=None): self.seen, self.queue = -1, []
            def wait_stream(self, other): self.seen = rig.clock # all that was asked for so far comes first
            def wait_event(self, event):
                while event.ahead: event.ahead.pop(0)()

        class Event:
            ahead = None
            def record(self, stream): self.ahead = stream.queue

        self.Stream, self.Event, self.now = Stream, Event, Stream()

    def current_stream(self, device=None): return self.now

    @contextmanager
    def stream(self, s):
        self.inside = s
        try: yield
        finally: self.inside = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        where = lambda t: t.untyped_storage().data_ptr()
        tensors = [t for t in tree_leaves((args, kwargs)) if type(t) in (torch.Tensor, torch.nn.Parameter)]
        if self.inside is not None and func is torch.ops.aten.copy_.default:
            to, of, s = args[0], args[1], self.inside
            assert s.seen >= self.used.get(where(to), -1), "a copy may overwrite what still computes"
            assert s.seen >= self.used.get(where(of), -1) or where(of) not in self.used, "a copy may read what is not computed yet"
            self.copies.append((where(to), where(of), of.nbytes))

            def late():
                with _disable_current_modes(), torch.no_grad(): to.copy_(of)
            s.queue.append(late)
            return to
        if self.inside is None and not func.is_view:
            self.clock += 1
            for t in tensors: self.used[where(t)] = self.clock
        return func(*args, **kwargs)


def base(zero=True, kind=None, layers=LAYERS):
    torch.manual_seed(0)
    size = dict(attention_head_dim=16, num_attention_heads=4, joint_attention_dim=64, axes_dims_rope=(4, 6, 6))
    return quantize(QwenImageTransformer2DModel(num_layers=layers, zero_cond_t=zero, **size).requires_grad_(False).eval(), kind)


def adapted(tr, targets="attention", **kw):
    add_lora(tr, make_config(dict(model=dict(lora=dict(r=2, target_modules=targets, **kw)))).model.lora)
    g = torch.Generator().manual_seed(3)
    for n, p in tr.named_parameters():
        if "lora_B" in n: p.data.copy_(torch.randn(p.shape, generator=g) * 0.05)
    tr.enable_gradient_checkpointing()
    return tr


def call(tr, seed=1, time=0.5, size=(4, 6)):
    g = torch.Generator().manual_seed(seed)
    return tr(hidden_states=torch.randn(1, size[0] * size[1] + 16, 64, generator=g), encoder_hidden_states=torch.randn(1, 5, 64, generator=g),
              timestep=torch.tensor([time]), img_shapes=[[(1, *size), (1, 4, 4)]], return_dict=False)[0]


def gradients(tr, *losses):
    for p in tr.parameters(): p.grad = None
    for loss in losses: loss(tr).backward()
    return [p.grad.clone() if p.grad is not None else None for n, p in tr.named_parameters() if "lora_" in n]


def same(a, b): return len(a) == len(b) > 0 and any(x is not None for x in a) and all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in zip(a, b))


def one(seed=1): return lambda tr: call(tr, seed).square().mean()


def numbers(ring, rig):
    "Which blocks were copied where, in order."
    blocks = {p.flat.untyped_storage().data_ptr(): n for n, p in enumerate(ring.packed)}
    places = {p.data_ptr(): n for n, p in enumerate(ring.places)}
    return [(blocks[of], places[to]) for to, of, _ in rig.copies]


# --- the ring
@pytest.mark.parametrize("places", [1, 2, 3])
@pytest.mark.parametrize("zero", [False, True])
def test_outputs_and_gradients_are_the_same_to_the_last_bit(zero, places):
    plain, rig = adapted(base(zero)), Rig()
    ours = adapted(enable_block_swap(base(zero), "cpu", places=places, streams=Streams("cpu", rig)))
    expected, picture = gradients(plain, one()), call(plain).detach()
    with rig:
        assert torch.equal(call(ours).detach(), picture)
        for _ in range(2): assert same(gradients(ours, one()), expected)


@pytest.mark.parametrize("places", [2, 3])
def test_each_block_is_copied_once_forward_and_once_backward_and_ahead_of_its_need(places):
    rig = Rig()
    ours = adapted(enable_block_swap(base(), "cpu", places=places, streams=Streams("cpu", rig)))
    ring, seen = ours.ring, []
    for n, block in enumerate(ours.transformer_blocks):
        block.register_forward_pre_hook(lambda m, a, n=n: seen.append((n, len(rig.copies))))
    flats = [p.flat.clone() for p in ring.packed]
    with rig:
        gradients(ours, one())
        rig.copies.clear(), seen.clear()
        gradients(ours, one())
    copied, ahead = numbers(ring, rig), range(LAYERS - places)
    assert [n for n, _ in copied] == [n + places for n in ahead] + list(reversed(ahead)), "those that are still there are not copied again"
    assert all(place == n % places for n, place in copied)
    order = [n for n, _ in seen]
    assert order == [*range(LAYERS), *reversed(range(LAYERS))]
    for (n, made), then in zip(seen, order[1:]): # what the next block needs was asked for before this one began
        there = {k % places: k for k in range(places)} | {place: k for k, place in copied[:made]}
        assert there[then % places] == then, (n, then)
    assert sum(p.nbytes for p in ring.places) == ring.bytes == places * flats[0].nbytes
    on_device = {t.untyped_storage().data_ptr() for b in ours.transformer_blocks for n, t in b.named_parameters() if "lora_" not in n}
    assert on_device == {p.data_ptr() for p in ring.places}, "nothing of a block is anywhere else"
    assert all(torch.equal(a, p.flat) for a, p in zip(flats, ring.packed)) and all(p.flat._version == ring.packed[0].flat._version for p in ring.packed)


def test_a_wait_that_is_left_out_is_noticed(monkeypatch):
    plain, rig = gradients(adapted(base()), one()), Rig()
    make = lambda: adapted(enable_block_swap(base(), "cpu", streams=Streams("cpu", rig)))
    monkeypatch.setattr(Streams, "wait", lambda self, event: None)
    with rig: assert not same(gradients(make(), one()), plain), "computing does not wait for the copy"
    monkeypatch.undo()
    rig = Rig()
    ours = make()
    monkeypatch.setattr(rig.Stream, "wait_stream", lambda self, other: None)
    with rig, pytest.raises(AssertionError, match="may overwrite what still computes"): gradients(ours, one())


def test_a_place_that_is_given_away_too_early_is_noticed(monkeypatch):
    expected, rig = gradients(adapted(base()), one()), Rig()
    ours = adapted(enable_block_swap(base(), "cpu", streams=Streams("cpu", rig)))
    monkeypatch.setattr(BlockSwap, "following", lambda self, n: [n, *(k for k in (n - 3, n + 3) if 0 <= k < LAYERS)]) # into the place of the block itself
    real = BlockSwap.visit
    def greedy(self, n): # ... and without a look at who is there
        real(self, n)
        if n + 3 < LAYERS: self.streams.wait(self.streams.copy(self.places[n % 3], self.packed[n + 3].flat)); self.holds[n % 3] = n + 3
    monkeypatch.setattr(BlockSwap, "visit", greedy)
    with rig: assert not same(gradients(ours, one()), expected)


def test_passes_of_any_order_are_the_same():
    plain, rig = adapted(base()), Rig()
    ours = adapted(enable_block_swap(base(), "cpu", streams=Streams("cpu", rig)))
    both = lambda tr: call(tr, 1).square().mean() + call(tr, 2, 0.7).square().mean() # two forward passes before the backward ones

    def broken_off(tr): # a forward pass without a backward one, and predicting in between
        call(tr, 4)
        with torch.no_grad(): call(tr, 5), call(tr, 6)
        return call(tr, 3).square().mean()
    for losses in ([one(), both], [broken_off, both]):
        expected = gradients(plain, *losses)
        with rig: assert same(gradients(ours, *losses), expected)


@pytest.mark.parametrize("layers", [2, 4, 5])
def test_predicting_is_the_same_where_places_and_blocks_do_not_come_out_even(layers):
    rig = Rig()
    ours = enable_block_swap(base(layers=layers), "cpu", streams=Streams("cpu", rig))
    with torch.no_grad():
        picture = call(base(layers=layers))
        with rig: assert all(torch.equal(call(ours), picture) for _ in range(3))


def test_predicting_goes_round():
    rig = Rig()
    ours = enable_block_swap(base(layers=6), "cpu", streams=Streams("cpu", rig))
    with rig, torch.no_grad():
        call(ours)
        rig.copies.clear()
        call(ours)
    assert [n for n, _ in numbers(ours.ring, rig)] == [2, 3, 4, 5, 0, 1], "the next call's first blocks are brought while the last ones compute"


@pytest.mark.parametrize("kind", ["qfloat8", "nf4", *(pytest.param(k, marks=pytest.mark.slow) for k in ("qint8", "int8", "float8"))])
def test_quantized_blocks(kind):
    plain, rig = adapted(base(kind=kind)), Rig()
    ours = adapted(enable_block_swap(base(kind=kind), "cpu", streams=Streams("cpu", rig)))
    expected = gradients(plain, one())
    with rig:
        for _ in range(2): assert same(gradients(ours, one()), expected)
    whole, places = held_bytes(plain), held_bytes(ours)
    assert places < whole - (LAYERS - 3.6) * ours.ring.packed[0].flat.nbytes


@pytest.mark.parametrize("how", ["table", "all_linear", "dropout", "bfloat16"])
def test_with_what_else_there_is(how, tmp_path):
    def make(ring):
        tr = base().to(torch.bfloat16 if how == "bfloat16" else torch.float32)
        if how == "table":
            base().save_pretrained(tmp_path/"tr")
            table = ModulationTable("a digest", torch.float32, LAYERS, tmp_path/"tr")
            table.make((0., 0.5))
            use_modulation_table(tr, table)
        if ring: enable_block_swap(tr, "cpu", streams=Streams("cpu", rig))
        return adapted(tr, "all_linear" if how == "all_linear" else "attention", lora_dropout=0.3 * (how == "dropout"))
    rig, dtype = Rig(), torch.bfloat16 if how == "bfloat16" else torch.float32
    def loss(tr):
        torch.manual_seed(5)
        if how == "dropout": tr.train()
        g = torch.Generator().manual_seed(1)
        return tr(hidden_states=torch.randn(1, 40, 64, generator=g).to(dtype), encoder_hidden_states=torch.randn(1, 5, 64, generator=g).to(dtype),
                  timestep=torch.tensor([0.5]), img_shapes=[[(1, 4, 6), (1, 4, 4)]], return_dict=False)[0].float().square().mean()
    expected = gradients(make(False), loss)
    ours = make(True)
    with rig: assert same(gradients(ours, loss), expected)


def test_a_block_kept_by_its_weights_raises_and_is_not_corrupt():
    "Without checkpointing the weights are needed in the backward pass, where others lie: torch notices, for they share the place's version."
    ours = adapted(enable_block_swap(base(), "cpu"))
    ours.disable_gradient_checkpointing()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"): call(ours).square().mean().backward()


@pytest.mark.parametrize("kind", [None, "qint8", "nf4"])
def test_loaded_from_disk_block_by_block(kind, tmp_path, monkeypatch):
    base().save_pretrained(tmp_path/"tr", max_shard_size="200KB")
    plain, waiting, most = load_quantized(QwenImageTransformer2DModel, tmp_path/"tr", kind), [], []
    placement, settle = BlockSwapLoader("cpu", kind), BlockSwapLoader.settle

    def counted(self, model, name):
        settle(self, model, name)
        most.append(sum(not any(p.is_meta for p in b.parameters()) and n not in self.packed for n, b in enumerate(model.transformer_blocks)))
    monkeypatch.setattr(BlockSwapLoader, "settle", counted)
    ours = load_quantized(QwenImageTransformer2DModel, tmp_path/"tr", kind, placement=placement)
    assert max(most) == 0 and len(ours.ring.packed) == LAYERS and not placement.packed
    with torch.no_grad(): assert torch.equal(call(ours), call(plain))


def test_a_streamed_transformer_is_not_moved_or_merged_or_quantized(pairs, tmp_path, streamed_on_cpu):
    t = QwenImageEditTrainer(settings(pairs(), tmp_path, train=dict(blocks_to_swap=True)))
    t.set_lora()
    for act, text in ((lambda: t.transformer.to("meta"), "cannot be moved; set `train.blocks_to_swap` to its default"),
                      (t.merge_lora, "so nothing can be merged into it"), (lambda: t.quantize_model(t.transformer, "cpu"), "cannot be quantized any more")):
        with pytest.raises(ValueError, match=text): act()
    t.transformer.to("cpu")


# --- inputs
@pytest.mark.parametrize("ring", [False, True])
def test_inputs_wait_in_host_memory_and_gradients_are_the_same(ring):
    expected, rig = gradients(adapted(base()), one(), one(2)), Rig()
    make = lambda: adapted(enable_block_swap(base(), "cpu", streams=Streams("cpu", rig)) if ring else base())
    ours = offload_checkpoint_inputs(make(), "cpu", cuda=rig)
    with rig:
        for _ in range(2): assert same(gradients(ours, one(), one(2)), expected)


def inputs_alive(tr, rig):
    "Of the inputs of all blocks but the first, how many are there after the forward pass; and how many were copied."
    refs, ready, copies = [], [], rig.copies
    for n, block in enumerate(tr.transformer_blocks):
        block.register_forward_pre_hook(lambda m, args, kw, n=n: refs.extend(StorageWeakRef(t.untyped_storage()) for t in [*args, *kw.values()][:2] if n) if torch._C._current_graph_task_id() == -1 else None, with_kwargs=True)
    with rig:
        loss = call(tr).square().mean()
        for event in [e for e in rig.now_waiting()]: event()
        gc.collect()
        alive = sum(not r.expired() for r in refs)
        made = len(copies)
        loss.backward()
    return len(refs), alive, made, len(copies)


def test_no_input_stays_on_the_device_and_each_travels_once(monkeypatch):
    plain, ours = adapted(base()), adapted(base())
    rig = Rig()
    streams = []
    real = rig.Stream.__init__
    def kept(self, device=None): real(self, device); streams.append(self)
    monkeypatch.setattr(rig.Stream, "__init__", kept)
    def now_waiting(): # what the side streams have to do, made now
        for s in streams:
            while s.queue: yield s.queue.pop(0)
    rig.now_waiting = now_waiting
    offload_checkpoint_inputs(ours, "cpu", cuda=rig)
    assert inputs_alive(plain, rig)[:3] == (2 * (LAYERS - 1), 2 * (LAYERS - 1), 0)
    rig.copies.clear()
    total, alive, out, both = inputs_alive(ours, rig)
    assert (total, alive) == (2 * (LAYERS - 1), 1), "one is the last block's text, which nobody needs any more: it is the caller's"
    assert out == total and both == 2 * total, "each goes out once and comes back once, and nothing else does"


def test_the_inputs_of_the_block_before_are_asked_for_ahead(monkeypatch):
    rig, order = Rig(), []
    ours = offload_checkpoint_inputs(adapted(base()), "cpu", cuda=rig)
    for n, block in enumerate(ours.transformer_blocks):
        block.register_forward_pre_hook(lambda m, a, n=n: order.append((n, len(rig.copies))) if torch._C._current_graph_task_id() != -1 else None)
    with rig: gradients(ours, one())
    sent = 2 * (LAYERS - 1)
    assert order == [(n, sent + 2 * min(LAYERS - n + 1, LAYERS - 1)) for n in reversed(range(LAYERS))]


def test_inputs_that_are_not_waited_for_are_noticed(monkeypatch):
    expected, rig = gradients(adapted(base()), one()), Rig()
    ours = offload_checkpoint_inputs(adapted(base()), "cpu", cuda=rig)
    monkeypatch.setattr(Streams, "wait", lambda self, event: None)
    with rig: assert not same(gradients(ours, one()), expected)
    monkeypatch.undo()
    monkeypatch.setattr(rig.Stream, "wait_stream", lambda self, other: None)
    with rig, pytest.raises(AssertionError, match="a copy may"): gradients(ours, one())


# --- runs
@pytest.fixture
def streamed_on_cpu(monkeypatch):
    "Let trainers stream on the CPU, which they refuse otherwise."
    real = check_streaming
    monkeypatch.setattr(divided, "check_streaming", lambda train, device, *more: real(train, "cuda:0", *more))


@pytest.mark.parametrize("quantize", [False, pytest.param("nf4", marks=pytest.mark.slow)])
def test_a_run_is_the_same_with_evaluation_and_across_a_resume(quantize, pairs, tmp_path, streamed_on_cpu):
    root, states, pictures = pairs(((48, 32),) * 4), {}, {}
    def make(name, on, **train):
        both = dict(blocks_to_swap=on, offload_activations=on, output_dir=str(tmp_path/name), save_interval=1, val_fraction=0.25, eval_interval=1, eval_images=1, eval_num_inference_steps=2)
        return QwenImageEditTrainer(settings(root, tmp_path, train=both | train, model=dict(quantize=quantize), data=dict(image_size=[48, 48])))
    for name, first, second in (("off", False, False), ("on", True, True), ("across", True, False)):
        make(name, first, max_train_steps=2).fit()
        t = make(name, second, resume_checkpoint="latest", num_epochs=2).fit()
        assert hasattr(t.transformer, "ring") == second
        t.save_lora(tmp_path/f"{name}.safetensors")
        states[name] = lora_state(t.transformer), t.state.metrics.get("held_out_loss")
        pictures[name] = t.predict(str(next((root/"control_images").glob("*.png"))), "blue", num_inference_steps=2, height=48, width=48)
    assert (tmp_path/"on.safetensors").stat().st_size == (tmp_path/"off.safetensors").stat().st_size
    for name in ("on", "across"):
        for k, v in states["off"][0].items(): assert torch.equal(states[name][0][k], v), k
        assert states[name][1] == states["off"][1] and (pictures[name] == pictures["off"]).all()


@pytest.mark.parametrize("train, device, kind, text", [
    (dict(blocks_to_swap=True), "cpu", None, "`train.blocks_to_swap` needs a CUDA GPU to copy to, and the transformer trains on cpu"),
    (dict(offload_activations=True), "mps", None, "`train.offload_activations` needs a CUDA GPU"),
    (dict(blocks_to_swap=True, gradient_checkpointing=False), "cuda:0", None, "needs `train.gradient_checkpointing`, which is false"),
    (dict(offload_activations=True, gradient_checkpointing=False), "cuda:0", None, "needs `train.gradient_checkpointing`, which is false"),
    (dict(blocks_to_swap=True, distributed="fsdp"), "cuda:0", None, "does not go with fsdp"),
    (dict(blocks_to_swap=True), "cuda:0", "fp8_storage", "does not go with `model.quantize` fp8_storage"),
    (dict(blocks_to_swap=True), "cuda:0", "qint4", "does not go with `model.quantize` qint4"),
    (dict(blocks_to_swap=True), "cuda:0", "dora", "does not go with `model.lora.use_dora`"),
    (dict(blocks_to_swap=True, compile=True), "cuda:0", None, "`train.blocks_to_swap` does not go with `train.compile` true, .*; set it to auto"),
    (dict(offload_activations=True, compile=True), "cuda:0", None, "`train.offload_activations` does not go with `train.compile` true, .*; set it to auto"),
    (dict(blocks_to_swap=True, model_parallel_devices=["cuda:0", "cuda:1"]), "cuda:0", None, "does not go with `train.model_parallel_devices`")])
def test_what_cannot_be_is_refused_in_one_sentence(train, device, kind, text):
    with pytest.raises(ValueError, match=text) as e: check_streaming(make_config(dict(train=train)).train, device, *((None, True) if kind == "dora" else (kind,)))
    assert "\n" not in str(e.value)


def test_a_trainer_refuses_before_anything_is_loaded(pairs, tmp_path, built):
    with pytest.raises(ValueError, match="needs a CUDA GPU"): QwenImageEditTrainer(settings(pairs(), tmp_path, train=dict(blocks_to_swap=True)))
    assert not built


# --- what the libraries' own hooks do in training: why they are not used. A test that fails here means that they have changed: look again.
def test_theirs_accelerate_gives_the_trained_parameters_no_gradient():
    from accelerate import cpu_offload
    tr = adapted(base(layers=3))
    trained = [p for p in tr.parameters() if p.requires_grad]
    cpu_offload(tr, torch.device("cpu"))
    call(tr).square().mean().backward()
    assert trained and all(p.grad is None for p in trained)


def test_theirs_diffusers_leaves_every_block_on_the_device_after_a_backward_pass(monkeypatch):
    from diffusers.hooks import group_offloading as go
    tr, on, brought = adapted(base(layers=6)), set(), []

    class Stream:
        def synchronize(self): pass

    class Backend:
        def __init__(self, device): pass
        def stream(self, s): return nullcontext()
        def current_stream(self): return Stream()
    blocks = list(tr.transformer_blocks)
    number = lambda group: next((n for n, b in enumerate(blocks) if group.modules and group.modules[0] is b), None)
    bring, leave = go.ModuleGroup.onload_, go.ModuleGroup.offload_
    def onload(g): on.add(number(g)), brought.append(number(g)); return bring(g)
    def offload(g): on.discard(number(g)); return leave(g)
    for owner, name, value in ((go, "TorchDeviceBackend", Backend), (torch.Tensor, "pin_memory", torch.Tensor.clone), (torch.Tensor, "is_pinned", lambda t: False),
                               (go.ModuleGroup, "onload_", onload), (go.ModuleGroup, "offload_", offload)): monkeypatch.setattr(owner, name, value)
    cpu = torch.device("cpu")
    go._apply_group_offloading(tr, go.GroupOffloadingConfig(cpu, cpu, go.GroupOffloadingType.BLOCK_LEVEL, True, False, False, 1, None, Stream()))
    for _ in range(2):
        on.clear()
        loss = call(tr).square().mean()
        assert not on - {None}
        brought.clear()
        loss.backward()
        assert on - {None} == set(range(6)) and brought == [5, 4, 5, 3, 4, 2, 3, 1, 2, 0, 1]
