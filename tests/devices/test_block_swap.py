"""Block swap and offloaded inputs against a transformer in memory, with streams that copy as late as possible."""
import gc
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from qie_nb.config import make_config
from qie_nb.devices.strategies import host_memory, offload
from qie_nb.devices.strategies.block_swap import BlockSwapLoader, enable_block_swap
from qie_nb.devices.strategies.host_memory import Streams
from qie_nb.devices.strategies.ways import STRATEGIES, StrategyFacts
from qie_nb.devices.strategies.offload import OffloadedInputs, PinnedPool, offload_checkpoint_inputs
from qie_nb.lora.adapters import lora_state
from qie_nb.models.loading import load_quantized
from qie_nb.models.modulation import ModulationTable, use_modulation_table
from qie_nb.models.quantizations.known import QUANTIZATIONS, held_bytes
from qie_nb.trainer import QwenImageEditTrainer

from helpers import close_images, settings, slow, weekly
from small_transformer import LAYERS, adapted, assert_same, base, call, far, gradients, whole


class Rig(TorchDispatchMode):
    "Fake streams: a copy happens only when something waits for it; one that could overtake a reader of its target is refused."
    def __init__(self):
        super().__init__()
        self.clock, self.used, self.copies, self.streams, self.inside = 0, {}, [], [], None
        rig = self

        class Stream:
            def __init__(self, device=None):
                self.seen, self.queue = -1, []
                rig.streams.append(self)
            def wait_stream(self, other): self.seen = rig.clock # after all work queued so far
            def wait_event(self, event): event.ahead.finish()
            def finish(self):
                while self.queue: self.queue.pop(0)()
            synchronize = finish

        class Event:
            def record(self, stream): self.ahead = stream

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
        if self.inside is not None and func is torch.ops.aten.copy_.default:
            to, of, s = args[0], args[1], self.inside
            assert s.seen >= self.used.get(where(to), -1), "a copy may overwrite what still computes"
            assert s.seen >= self.used.get(where(of), -1), "a copy may read what is not computed yet"
            self.copies.append((where(to), where(of)))

            def late():
                with _disable_current_modes(), torch.no_grad(): to.copy_(of)
            s.queue.append(late)
            return to
        if self.inside is None and not func.is_view:
            self.clock += 1
            for t in tree_leaves((args, kwargs)):
                if type(t) in (torch.Tensor, torch.nn.Parameter): self.used[where(t)] = self.clock
        return func(*args, **kwargs)


def checkpointed(tr, *args, **kw):
    adapted(tr, *args, **kw).enable_gradient_checkpointing()
    return tr


def swapped(rig, tr=None, **kw): return enable_block_swap(base() if tr is None else tr, "cpu", streams=Streams("cpu", rig), **kw)


def copies_made(swap, rig):
    "(block, slot) of each copy, in order."
    blocks = {p.flat.untyped_storage().data_ptr(): n for n, p in enumerate(swap.pinned)}
    slots = {p.data_ptr(): n for n, p in enumerate(swap.slots)}
    return [(blocks[source], slots[to]) for to, source in rig.copies]


def in_backward(): return torch._C._current_graph_task_id() != -1


# --- slots
@pytest.mark.parametrize("zero, slots, kind", [(True, 3, None), slow(False, 1, None), (True, 3, "nf4"), *(slow(True, 3, kind) for kind in ("qfloat8", "qint8", "int8", "float8"))])
def test_outputs_and_gradients_are_the_same(zero, slots, kind):
    plain, rig = checkpointed(base(zero, kind)), Rig()
    ours = checkpointed(swapped(rig, base(zero, kind), slots=slots))
    expected, out = gradients(plain), call(plain).detach()
    with rig:
        torch.testing.assert_close(call(ours).detach(), out, rtol=1e-4, atol=1e-5)
        for _ in range(2): assert_same(gradients(ours), expected)
    assert held_bytes(ours) < held_bytes(plain) - (LAYERS - slots - 0.6) * ours.block_swap.pinned[0].flat.nbytes


@pytest.mark.parametrize("slots", [3, slow(2)])
def test_each_block_is_copied_once_per_pass_and_early_enough(slots):
    rig = Rig()
    ours = checkpointed(swapped(rig, slots=slots))
    swap, seen = ours.block_swap, []
    for n, block in enumerate(ours.transformer_blocks):
        block.register_forward_pre_hook(lambda m, a, n=n: seen.append((n, len(rig.copies))))
    flats = [p.flat.clone() for p in swap.pinned]
    with rig:
        gradients(ours)
        rig.copies.clear(), seen.clear()
        gradients(ours)
    copied, ahead = copies_made(swap, rig), range(LAYERS - slots)
    assert [n for n, _ in copied] == [n + slots for n in ahead] + list(reversed(ahead)), "blocks that are still loaded are not copied again"
    assert all(slot == n % slots for n, slot in copied)
    order = [n for n, _ in seen]
    assert order == [*range(LAYERS), *reversed(range(LAYERS))]
    for (n, made), then in zip(seen, order[1:]): # the next block's copy was queued before this block began
        loaded = {k % slots: k for k in range(slots)} | {slot: k for k, slot in copied[:made]}
        assert loaded[then % slots] == then, (n, then)
    assert sum(p.nbytes for p in swap.slots) == slots * flats[0].nbytes
    on_device = {t.untyped_storage().data_ptr() for b in ours.transformer_blocks for n, t in b.named_parameters() if "lora_" not in n}
    assert on_device == {p.data_ptr() for p in swap.slots}, "the slots hold all frozen weights of the blocks"
    assert all(torch.equal(a, p.flat) for a, p in zip(flats, swap.pinned))


def test_passes_in_any_order_give_the_same_gradients():
    rig = Rig()
    def abandoned(tr): # a forward pass without a backward one, then predictions
        call(tr, 4)
        with torch.no_grad(): call(tr, 5), call(tr, 6)
        return call(tr, 3).square().mean()
    both = lambda tr: call(tr, 1).square().mean() + call(tr, 2, 0.75).square().mean() # two forward passes before the backward ones
    expected, ours = gradients(checkpointed(base()), abandoned, both), checkpointed(swapped(rig))
    with rig: assert_same(gradients(ours, abandoned, both), expected)


@pytest.mark.parametrize("layers", [6, slow(2)])
def test_predictions_are_the_same_and_load_the_next_calls_first_blocks_early(layers):
    rig = Rig()
    ours = swapped(rig, base(layers=layers))
    with torch.no_grad():
        expected = call(base(layers=layers))
        with rig:
            for _ in range(2):
                rig.copies.clear()
                torch.testing.assert_close(call(ours), expected, rtol=1e-4, atol=1e-5)
    if layers == 6: assert [n for n, _ in copies_made(ours.block_swap, rig)] == [2, 3, 4, 5, 0, 1]


@pytest.mark.parametrize("how", ["table", slow("dropout"), slow("bfloat16")])
def test_with_other_settings(how, tmp_path):
    rig, dtype = Rig(), torch.bfloat16 if how == "bfloat16" else torch.float32

    def make(swap):
        tr = base().to(dtype)
        if how == "table": with_table(tr, tmp_path/"tr")
        if swap: swapped(rig, tr)
        return checkpointed(tr, "all_linear", lora_dropout=0.3 * (how == "dropout"))

    def loss(tr):
        torch.manual_seed(5)
        return call(tr.train(how == "dropout")).square().mean()
    expected, ours = gradients(make(False), loss), make(True)
    with rig: assert far(whole(gradients(ours, loss)), whole(expected)) < (2e-2 if how == "bfloat16" else 1e-4)


def with_table(tr, folder):
    base(layers=len(tr.transformer_blocks)).save_pretrained(folder)
    table = ModulationTable("a digest", torch.float32, len(tr.transformer_blocks), folder)
    table.make((0., 0.5))
    return use_modulation_table(tr, table)


def test_training_without_checkpointing_raises_and_is_not_silently_wrong():
    "The backward pass would use other weights: torch notices, because they share the slot's version counter."
    ours = adapted(enable_block_swap(base(), "cpu"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"): gradients(ours)


@pytest.mark.parametrize("kind", ["nf4", slow(None), slow("qint8")])
def test_blocks_are_pinned_one_by_one_while_loading(kind, tmp_path, monkeypatch):
    base().save_pretrained(tmp_path/"tr", max_shard_size="200KB")
    loader, settle = BlockSwapLoader("cpu", kind), BlockSwapLoader.settle

    def settled(self, model, name):
        settle(self, model, name)
        assert all(any(p.is_meta for p in b.parameters()) or n in self.pinned for n, b in enumerate(model.transformer_blocks))
    monkeypatch.setattr(BlockSwapLoader, "settle", settled)
    plain, ours = (load_quantized(QwenImageTransformer2DModel, tmp_path/"tr", kind, placement=p) for p in (None, loader))
    assert len(ours.block_swap.pinned) == LAYERS and not loader.pinned
    with torch.no_grad(): torch.testing.assert_close(call(ours), call(plain), rtol=1e-4, atol=1e-5)


# --- inputs
@pytest.mark.parametrize("swap", [True, slow(False)])
def test_offloaded_inputs_give_the_same_gradients(swap):
    losses, rig = [lambda tr, seed=seed: call(tr, seed).square().mean() for seed in (1, 2)], Rig()
    expected = gradients(checkpointed(base()), *losses)
    ours = offload_checkpoint_inputs(checkpointed(swapped(rig) if swap else base()), "cpu", cuda=rig)
    with rig:
        for _ in range(2): assert_same(gradients(ours, *losses), expected)


def test_no_input_stays_on_the_device_and_each_is_copied_once():
    plain, ours, rig = checkpointed(base()), checkpointed(base()), Rig()
    offload_checkpoint_inputs(ours, "cpu", cuda=rig)

    def inputs(tr):
        "Of all blocks but the first: inputs, those alive after the forward pass, copies by then, copies in all."
        refs = []
        def note(m, args, kw):
            if not in_backward(): refs.extend(StorageWeakRef(t.untyped_storage()) for t in [*args, *kw.values()][:2])
        for block in tr.transformer_blocks[1:]: block.register_forward_pre_hook(note, with_kwargs=True)
        with rig:
            rig.copies.clear()
            loss = call(tr).square().mean()
            for s in rig.streams: s.finish()
            gc.collect()
            alive, made = sum(not r.expired() for r in refs), len(rig.copies)
            loss.backward()
        return len(refs), alive, made, len(rig.copies)
    total = 2 * (LAYERS - 1)
    assert inputs(plain) == (total, total, 0, 0)
    count, alive, out, both = inputs(ours)
    assert (count, out, both) == (total, total, 2 * total) and alive <= 1


def test_the_previous_blocks_inputs_are_prefetched():
    rig, order = Rig(), []
    ours = offload_checkpoint_inputs(checkpointed(base()), "cpu", cuda=rig)
    for n, block in enumerate(ours.transformer_blocks):
        block.register_forward_pre_hook(lambda m, a, n=n: order.append((n, len(rig.copies))) if in_backward() else None)
    with rig: gradients(ours)
    sent = 2 * (LAYERS - 1)
    assert order == [(n, sent + 2 * min(LAYERS - n + 1, LAYERS - 1)) for n in reversed(range(LAYERS))]


def test_pinned_buffers_of_inputs_are_used_again_and_give_way_to_larger_ones(monkeypatch):
    "One buffer for each input, of its exact size. Larger images later replace them, smaller ones use them."
    made, rig = [], Rig()
    monkeypatch.setattr(offload, "pinned", lambda size, *where: made.append((size, *where)) or torch.empty(size, dtype=torch.uint8))
    ours, plain = offload_checkpoint_inputs(checkpointed(base()), "cpu", cuda=rig), checkpointed(base())
    sizes, want = [], {}
    for height in (4, 4, 9, 4):
        loss = lambda tr: call(tr, 1, size=(height, 6)).square().mean()
        want = gradients(plain, loss)
        made.clear()
        with rig: assert_same(gradients(ours, loss), want)
        gc.collect()
        sizes.append(sorted(size for size, *_ in made))
    text, image = min(sizes[0]), max(sizes[0])
    assert sizes[0] == [text] * (LAYERS - 1) + [image] * (LAYERS - 1) and sizes[1] == sizes[3] == []
    assert sizes[2] == [image * (9 * 6 + 16) // (4 * 6 + 16)] * (LAYERS - 1)


def cudart(monkeypatch, code=0):
    "A CUDA runtime that notes what is registered."
    held = {}
    def register(at, size, flags): held[at] = size; return code
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=held.pop, cudaError=int, cudaGetErrorString=lambda c: f"text of {c}"))
    return held


def test_pinned_memory_has_pages_of_its_own(monkeypatch):
    "CUDA refuses to register two buffers that share a page, with error 712."
    held = cudart(monkeypatch)
    buffers = [host_memory.pinned(n, "cuda:0") for n in (100, 5000, 1, 4096)]
    pages = [set(range(at // 4096, (at + size - 1) // 4096 + 1)) for at, size in held.items()]
    assert all(at % 4096 == 0 for at in held) and sum(map(len, pages)) == len(set.union(*pages)) == 5
    for b in buffers: b.fill_(7)
    assert [b.nbytes for b in buffers] == [100, 5000, 1, 4096] and all((b == 7).all() for b in buffers) and host_memory.pinned(0, "cuda:0").nbytes == 0
    del buffers, b
    gc.collect()
    assert not held, "registered no longer than it lives"


@pytest.mark.parametrize("code, key, less, remedy", [
    (2, "train.blocks_to_swap", "quantize the base", "quantize the base or set it to false"),
    (2, "train.offload_activations", "use smaller images", "use smaller images or set it to false"),
    (712, "train.blocks_to_swap", "quantize the base", "set it to false")])
def test_memory_that_cannot_be_pinned(code, key, less, remedy, monkeypatch):
    cudart(monkeypatch, code)
    with pytest.raises(ValueError) as e: host_memory.pinned(2 * 10**7, "cuda:0", key, less)
    assert str(e.value) == f"`{key}` could not pin 0.02 GB of host memory (CUDA error {code}, text of {code}); {remedy}"


class OnGpu(torch.Tensor):
    "A CPU tensor that passes for one of a GPU and notes the streams that use its memory."
    is_cuda, noted = property(lambda self: True), []
    def record_stream(self, stream): self.noted.append((self.data_ptr(), stream))


def test_memory_of_a_copy_is_not_reused_before_the_copy():
    "Both directions: the allocator must know that the second stream uses the tensor."
    class Side:
        device, side = torch.device("cpu"), "side"
        def copy(self, to, source): to.copy_(source)
        def wait(self, event): pass
    OnGpu.noted.clear()
    t = torch.randn(3, 4).as_subclass(OnGpu)
    kept = OffloadedInputs(PinnedPool(Side()), lambda: None)
    where = kept.put(t)
    kept.host = [h.as_subclass(OnGpu) for h in kept.host] # so that its copy back passes for a GPU tensor too
    assert OnGpu.noted == [(t.data_ptr(), "side")]
    back = kept.get(where[1])
    assert torch.equal(back, t) and OnGpu.noted[1:] == [(back.data_ptr(), "side")]


# --- runs
@pytest.fixture
def allowed_on_cpu(monkeypatch):
    "Trainers refuse block swap on the CPU; here they do not."
    for strategy in STRATEGIES.values():
        def problem(self, facts, real=type(strategy).problem):
            return real(self, replace(facts, device="cuda:0"))
        monkeypatch.setattr(type(strategy), "problem", problem)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [False, weekly("nf4")])
def test_a_run_is_the_same_with_evaluation_and_across_a_resume(quantize, pairs, tmp_path, allowed_on_cpu):
    root, found = pairs(((48, 32),) * 4), {}
    def make(name, on, **train):
        both = dict(blocks_to_swap=on, offload_activations=on, output_dir=str(tmp_path/name), save_interval=1, val_fraction=0.5, eval_interval=2, eval_images=1, eval_num_inference_steps=2)
        return QwenImageEditTrainer(settings(root, tmp_path, train=both | train, model=dict(quantize=quantize), data=dict(image_size=[48, 48])))
    make("across", bool(quantize), max_train_steps=1).fit()
    for name, swap in (("off", False), ("across", True)):
        t = make(name, swap, resume_checkpoint="latest" if swap else None).fit()
        assert hasattr(t.transformer, "block_swap") == swap
        image = t.predict(str(next((root/"control_images").glob("*.png"))), "blue", num_inference_steps=2, height=48, width=48)
        found[name] = lora_state(t.transformer), t.state.metrics.get("held_out_loss"), image, t.save_lora(tmp_path/"lora").stat().st_size
        if swap:
            with pytest.raises(ValueError, match="`train.blocks_to_swap`"): t.merge_lora()
            with pytest.raises(ValueError, match="cannot be quantized"): t.quantize_model(t.transformer, "cpu")
            t.transformer.to("cpu")
    (off, off_loss, off_image, off_size), (on, on_loss, image, size) = found.values()
    assert_same(on, off, rtol=1e-3, atol=1e-5)
    assert on_loss == pytest.approx(off_loss, rel=1e-4) and close_images(image, off_image, 2) and size == off_size


@pytest.mark.parametrize("name, change, kind, text", [
    ("blocks_to_swap", {}, "sharded", "fsdp"),
    ("blocks_to_swap", {}, "qint4", "`model.quantize` qint4"),
    ("blocks_to_swap", {}, "dora", "`model.lora.use_dora`"),
    ("offload_activations", dict(compile=True), None, "`train.compile` true; set it to auto"),
    ("offload_activations", dict(model_parallel_devices=["cuda:0", "cuda:1"]), None, "`train.model_parallel_devices`")])
def test_incompatible_settings_raise(name, change, kind, text):
    train = make_config(dict(train={name: True} | change)).train
    strategy = next(s for s in STRATEGIES.values() if s.setting == name)
    facts = StrategyFacts(train, "cuda:0", kind if kind in QUANTIZATIONS else None, kind == "dora", kind == "sharded")
    assert strategy.asked(train) and strategy.problem(facts).startswith(f"`train.{name}` is incompatible with {text}")


def test_a_trainer_raises_before_anything_is_loaded(pairs, tmp_path, built):
    with pytest.raises(ValueError, match="needs a CUDA GPU"): QwenImageEditTrainer(settings(pairs(), tmp_path, train=dict(blocks_to_swap=True)))
    assert not built
