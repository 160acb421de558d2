"""Every way a run can end by itself: the clock, memory that runs out, a loss that is no number; and what is kept of it."""
import gc, json, linecache, os, re, shutil, sys, time, weakref

import pytest
import torch

from helpers import write_pairs
from crash_trials import complete, differ, log_rows, outcome
from qie_nb.training.callbacks import Callback
from qie_nb.training.checkpoint import is_complete
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "Data, a filled cache, and what makes trainers over them."
    import diffusers, peft, transformers
    gc.freeze() # what was imported is no garbage: collections pass it by
    tmp = tmp_path_factory.mktemp("stops")
    root = write_pairs(tmp/"set", ((48, 32),) * 5 + ((32, 48),) * 3, caption=[f"invert {'well ' * (i % 3)}{i}" for i in range(8)])
    class World:
        cache = tmp/"cache"
        def config(self, out, **sections):
            base = dict(model=dict(pretrained_model_name_or_path=str(tiny_folder("2511", (64*64, 64*64))), lora=dict(r=2, lora_alpha=4, lora_dropout=0.1)),
                        data=dict(dataset_path=str(root), image_size=[64, 64], batch_size=1, caption_dropout_rate=0.3),
                        train=dict(output_dir=str(out), device="cpu", mixed_precision="no", max_train_steps=8, gradient_accumulation_steps=2, gradient_checkpointing=False, ema_decay=0.9,
                                   save_interval=0, eval_interval=0, save_steps=1, keep_checkpoints=100),
                        cache=dict(cache_dir=str(tmp/"cache")), optimizer=dict(lr=0.01), logging=dict(log_dir=str(tmp/"runs"), report_to="none"))
            for k, v in sections.items(): base[k] = base[k] | v
            return base
        def trainer(self, out, *callbacks, **sections): return QwenImageEditTrainer(self.config(out, **sections), callbacks)
    w = World()
    w.trainer(tmp).cache_embeddings()
    w.trainer(tmp/"whole").fit()
    w.want = outcome(tmp/"whole", True)
    yield w
    gc.unfreeze()


def state_of(folder): return json.loads((folder/"state.json").read_text())
def latest(out): return out/"checkpoints"/(out/"checkpoints"/"latest").read_text().strip()


def of_step(out, step):
    "The checkpoint of a step: its adapter's, optimizer's and EMA's tensors as bytes, but for the optimizer's generator state."
    from safetensors.torch import load_file
    folder = next(d for d in complete(out) if state_of(d)["global_step"] == step)
    return {(f, k): v.numpy().tobytes() for f in ("pytorch_lora_weights", "optimizer", "ema") for k, v in load_file(folder/f"{f}.safetensors").items() if k != "rng"}


def files_of(out):
    root = out/"checkpoints"
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file() and "logs" not in p.parts}


# --- max_hours
class Clock:
    "A fake clock: each step and each save takes a given time."
    def __init__(self, monkeypatch, step, save, evaluation=0., real=False):
        self.now, self.start, self.step, self.save, self.saves = 1e9, 1e9, step, save, 0
        replace, optimizer_step, loss_at = os.replace, QwenImageEditTrainer.optimizer_step, QwenImageEditTrainer.loss
        def replace_(src, dst, *a, **kw):
            replace(src, dst, *a, **kw)
            if os.path.basename(dst) == "COMPLETE": self.now += self.save(self.saves) if callable(self.save) else self.save; self.saves += 1
        def optimizer_step_(t, group):
            self.now += self.step(self.passed) if callable(self.step) else self.step
            return optimizer_step(t, group)
        def loss_at_(t, *a, **kw):
            if not torch.is_grad_enabled(): self.now += evaluation
            return loss_at(t, *a, **kw)
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(os, "replace", replace_)
        monkeypatch.setattr(QwenImageEditTrainer, "optimizer_step", optimizer_step_)
        monkeypatch.setattr(QwenImageEditTrainer, "loss", loss_at_)
        if not real: monkeypatch.setattr(QwenImageEditTrainer, "training_step", lambda t, batch: t.optimizer.param_groups[0]["params"][0].square().sum())
    @property
    def passed(self): return self.now - self.start


@pytest.mark.parametrize("step, save, settings, least", [
    (60, 100, dict(save_steps=10), 0.8),
    (60, lambda n: 500 if n == 0 else 60, dict(save_steps=10), 0.6), # the first save is slow, so the next may be
    (lambda now: 40 if now < 1500 else 160, 60, dict(save_steps=10), 0.8), # steps become slower
    (60, lambda n: 30 + 25 * n, dict(save_steps=10), 0.8), # saves do
    (60, 60, dict(save_steps=None), 0.8), # nothing was saved before the end
    (300, 20, dict(save_steps=1), 0.8),
], ids=["usual", "first save slow", "slower steps", "slower saves", "no save before the end", "few steps"])
def test_max_hours_leaves_time_to_save_and_wastes_little(step, save, settings, least, world, tmp_path, monkeypatch):
    clock = Clock(monkeypatch, step, save)
    t = world.trainer(tmp_path, train=dict(max_train_steps=200, max_hours=1., keep_checkpoints=2, **settings)).fit()
    assert t.global_step < 200 and "max_hours" in t.state.stop
    assert clock.passed <= 3600, f"it ended {clock.passed - 3600:.0f} s too late"
    assert clock.passed >= least * 3600, f"only {clock.passed:.0f} of 3600 s were used"
    assert is_complete(latest(tmp_path)) and state_of(latest(tmp_path))["global_step"] == t.global_step


def test_max_hours_counts_what_comes_before_the_first_step(world, tmp_path, monkeypatch):
    clock, set_lora = Clock(monkeypatch, 60, 30), QwenImageEditTrainer.set_lora
    def slowly(t): clock.now += 1200; return set_lora(t)
    monkeypatch.setattr(QwenImageEditTrainer, "set_lora", slowly)
    t = world.trainer(tmp_path, train=dict(max_train_steps=200, max_hours=1., keep_checkpoints=2, save_steps=10)).fit()
    assert clock.passed <= 3600, f"it ended {clock.passed - 3600:.0f} s too late"


def test_max_hours_counts_evaluations(world, tmp_path, monkeypatch):
    clock = Clock(monkeypatch, 120, 60, evaluation=30.)
    t = world.trainer(tmp_path, train=dict(max_train_steps=200, max_hours=1., keep_checkpoints=2, save_steps=10, val_fraction=0.2, eval_steps=7, eval_noise_samples=1, eval_images=0)).fit()
    assert t.global_step < 200 and clock.passed <= 3600, clock.passed
    assert state_of(latest(tmp_path))["global_step"] == t.global_step


def test_max_hours_shorter_than_a_step(world, tmp_path, monkeypatch):
    Clock(monkeypatch, 3600, 10)
    t = world.trainer(tmp_path, train=dict(max_hours=0.1, save_steps=None)).fit()
    assert t.global_step == 1 and state_of(latest(tmp_path))["global_step"] == 1


def test_sessions_of_max_hours_make_the_undisturbed_run(world, tmp_path, monkeypatch):
    clock, sessions = Clock(monkeypatch, 60, 10, real=True), 0
    while True:
        sessions += 1
        t = world.trainer(tmp_path, train=dict(max_hours=0.075, resume_checkpoint="latest" if sessions > 1 else None)).fit()
        if t.state.stop == "done": break
        assert sessions < 9
    assert sessions > 1
    differ(outcome(tmp_path, True), world.want)


def test_a_second_fit_has_its_own_hours(world, tmp_path, monkeypatch):
    Clock(monkeypatch, 60, 10)
    t = world.trainer(tmp_path, train=dict(max_hours=0.075)).fit()
    first = t.global_step
    assert 0 < first < 8 and t.fit().global_step > first


# --- out of memory
class Boom:
    "Raises at the nth call (from 0) of something, once."
    def __init__(self, n, error): self.n, self.error, self.calls = n, error, 0
    def __call__(self, *a, **kw):
        self.calls += 1
        if self.calls == self.n + 1: raise self.error

ERRORS = dict(new=lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), cuda=lambda: torch.cuda.OutOfMemoryError("CUDA out of memory."),
              old=lambda: RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 14.76 GiB total capacity)"),
              cpu=lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes. Error code 12 (Cannot allocate memory)"))


def three_settings(e):
    "An out-of-memory error for people: one message, three settings that exist, each with what it saves."
    from qie_nb.config import describe
    assert isinstance(e, torch.OutOfMemoryError), f"{type(e).__name__}: {e}"
    known = [n for n, *_ in describe()]
    named = list(dict.fromkeys(n for n in re.findall(r"`([a-z_.]+)[^`]*`", str(e)) if n in known))
    assert len(named) >= 3, f"{named} in: {e}"
    assert len(re.findall(r"\d(?:\.\d+)? ?[GM]B", str(e))) >= 3, f"what is saved is not said: {e}"
    return named


def boom_in(where, step, error, monkeypatch, t):
    "Arrange that memory runs out in a step (from 1), in its second micro-batch; gives weak references to what the transformer made in it."
    made, at = [], 2 * (step - 1) + 1
    t.set_lora()
    def keep(module, args, out):
        made.append(weakref.ref(out[0] if isinstance(out, tuple) else out.sample if hasattr(out, "sample") else out))
    t.transformer.register_forward_hook(keep)
    last = t.transformer.transformer_blocks[-1]
    last.register_forward_hook(lambda m, a, out: [made.append(weakref.ref(x)) for x in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(x)] and None)
    if where == "forward": last.register_forward_pre_hook(boom := Boom(at, error))
    elif where == "backward":
        real, boom = torch.Tensor.backward, Boom(at, error)
        monkeypatch.setattr(torch.Tensor, "backward", lambda self, *a, **kw: (boom(), real(self, *a, **kw)))
    else:
        boom = Boom(step - 1, error)
        real = torch.optim.AdamW.step
        monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a, **kw: (boom(), real(self, *a, **kw))[1])
    return made


@pytest.mark.parametrize("where, step, kind", [("forward", 1, "new"), ("forward", 4, "old"), ("backward", 4, "new"), ("optimizer", 4, "cuda"), ("optimizer", 1, "new"), ("forward", 5, "cpu")])
def test_memory_runs_out_in_a_step(where, step, kind, world, tmp_path, monkeypatch):
    t = world.trainer(tmp_path)
    made = boom_in(where, step, ERRORS[kind](), monkeypatch, t)
    snapshots = []
    class Snapshot(Callback):
        def on_step_end(self, t):
            if t.global_step == step - 1: snapshots.append(files_of(tmp_path)) # the user's callbacks come after the checkpoint
    t.callbacks.append(Snapshot())
    with pytest.raises(BaseException) as e: t.fit()
    named = three_settings(e.value)
    if step > 1:
        assert files_of(tmp_path) == snapshots[0], "checkpoints were touched"
        assert is_complete(latest(tmp_path)) and state_of(latest(tmp_path))["global_step"] == step - 1
    else: assert not complete(tmp_path)
    # the error is still held, as a notebook holds it
    gc.collect()
    assert all(p.grad is None for p in t.transformer.parameters()), "gradients were left"
    assert made and not [r for r in made if r() is not None], "activations are held"
    assert t.global_step == step - 1
    t.fit() # the same again, now that there is room
    differ(outcome(tmp_path, True), world.want)
    assert len({n.split(".")[0] for n in named}) >= 1


def test_memory_runs_out_and_a_smaller_setting_goes_on_exactly(world, tmp_path, monkeypatch):
    t = world.trainer(tmp_path)
    boom_in("forward", 4, ERRORS["new"](), monkeypatch, t)
    with pytest.raises(torch.OutOfMemoryError): t.fit()
    again = world.trainer(tmp_path, train=dict(gradient_checkpointing=True, resume_checkpoint="latest")).fit()
    got = outcome(tmp_path, True)
    assert again.global_step == 8 and got["state"] == world.want["state"] and [r["step"] for r in got["log"]] == [str(n) for n in range(1, 9)]
    for name in ("pytorch_lora_weights.safetensors",):
        for k, (_, _, data) in got[name].items():
            a, b = (torch.frombuffer(bytearray(x), dtype=torch.float32) for x in (data, world.want[name][k][2]))
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5) # recomputed, so equal to rounding


@pytest.mark.parametrize("part", ["vae", "text_encoder"])
@pytest.mark.parametrize("lazily", [False, True])
def test_memory_runs_out_in_an_encoder(part, lazily, world, tmp_path, monkeypatch):
    from qie_nb.models.components import Components
    booms, get = [], Components.get
    def get_(self, name, *a, **kw):
        new, module = name not in self.loaded, get(self, name, *a, **kw)
        if name == part and new and not booms:
            booms.append(Boom(40, ERRORS["new"]()))
            for m in module.modules(): m.register_forward_pre_hook(booms[0])
        return module
    monkeypatch.setattr(Components, "get", get_)
    t = world.trainer(tmp_path, cache=dict(cache_dir=str(tmp_path/"cache")))
    with pytest.raises(BaseException) as e: t.fit() if lazily else t.cache_embeddings()
    assert booms and booms[0].calls > 40
    named = three_settings(e.value)
    assert any("encoder" in n or n.startswith("data.") or n.startswith("cache.") for n in named), f"nothing of {named} makes an encoder smaller"
    assert not any(n.startswith("train.gradient") for n in named), f"{named}: encoding keeps no activations"
    if not lazily: t.cache_embeddings()
    t.fit()
    differ(outcome(tmp_path, True), world.want)


def test_other_errors_stay_what_they_are(world, tmp_path, monkeypatch):
    t = world.trainer(tmp_path)
    boom_in("forward", 3, RuntimeError("mat1 and mat2 shapes cannot be multiplied"), monkeypatch, t)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as e: t.fit()
    assert not isinstance(e.value, torch.OutOfMemoryError)
    assert is_complete(latest(tmp_path))


# --- a loss that is no number
def poison(t, steps, value=float("nan")):
    "The loss of these steps (from 1) is `value`, gradients and all."
    real = type(t).loss
    def loss_at(*a, **kw):
        loss = real(t, *a, **kw)
        return loss * value if torch.is_grad_enabled() and t.global_step + 1 in steps else loss
    t.loss = loss_at
    return t


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_without_a_number_changes_nothing(value, world, tmp_path):
    t = poison(world.trainer(tmp_path), {1, 4}, value).fit()
    assert t.global_step == 8 and int(t.state.skipped) == 2
    assert of_step(tmp_path, 4) == of_step(tmp_path, 3) != of_step(tmp_path, 5)
    for s in range(1, 9): # what a step skipped is saved like any other: nothing in it is bad
        assert all(torch.isfinite(torch.frombuffer(bytearray(v), dtype=torch.float32)).all() for (f, _), v in of_step(tmp_path, s).items() if f != "optimizer" and len(v) % 4 == 0 and v), s
    rows = log_rows(tmp_path)
    assert [r["step"] for r in rows] == [str(n) for n in range(1, 9)]
    assert [float(r["skipped"]) for r in rows] == [1, 1, 1, 2, 2, 2, 2, 2] or [float(r["skipped"] or 0) for r in rows] == [1, 0, 0, 1, 0, 0, 0, 0], [r["skipped"] for r in rows]


def test_a_run_that_ends_at_a_skipped_step_is_saved(world, tmp_path):
    class Stop(Callback):
        def on_step_end(self, t):
            if t.global_step == 5: t.state.stop = "interrupted"
    t = poison(world.trainer(tmp_path, Stop(), train=dict(save_steps=None)), {5}).fit()
    assert complete(tmp_path), "five steps are lost"
    assert state_of(latest(tmp_path))["global_step"] == t.global_step == 5


def test_a_skipped_step_survives_a_resume(world, tmp_path):
    whole = poison(world.trainer(tmp_path/"whole"), {3}).fit()
    class Stop(Callback):
        def on_step_end(self, t):
            if t.global_step == 4: t.state.stop = "test"
    poison(world.trainer(tmp_path/"cut", Stop()), {3}).fit()
    again = world.trainer(tmp_path/"cut", train=dict(resume_checkpoint="latest")).fit()
    assert int(again.state.skipped) == int(whole.state.skipped) == 1
    differ(outcome(tmp_path/"cut", True), outcome(tmp_path/"whole", True))


@pytest.mark.parametrize("every", [1, 5])
def test_it_stops_after_several_in_a_row_with_the_last_good_state(every, world, tmp_path, capsys):
    bad_from, in_a_row = 7, 3
    t = poison(world.trainer(tmp_path, train=dict(max_train_steps=40, max_nonfinite_steps=in_a_row, save_steps=6), logging=dict(log_every=every)), set(range(bad_from, 99))).fit()
    seen_at = next(n for n in range(bad_from + in_a_row - 1, 99) if n % every == 0)
    assert t.global_step == seen_at and "finite" in t.state.stop, (t.global_step, t.state.stop)
    last = state_of(latest(tmp_path))["global_step"]
    now, good = of_step(tmp_path, last), of_step(tmp_path, bad_from - 1)
    assert now == good
    assert all(torch.isfinite(torch.frombuffer(bytearray(v), dtype=torch.float32)).all() for (f, _), v in now.items() if f in ("pytorch_lora_weights", "ema"))


def test_bad_steps_that_do_not_follow_each_other_do_not_stop_it(world, tmp_path):
    t = poison(world.trainer(tmp_path, train=dict(max_train_steps=12, max_nonfinite_steps=3)), {1, 2, 4, 5, 7, 8, 10, 11}).fit()
    assert t.global_step == 12 and t.state.stop == "done" and int(t.state.skipped) == 8


def test_steps_that_are_not_logged_do_not_wait_for_the_device(world, tmp_path, monkeypatch):
    "Reading a number from a tensor is what waits; batches of one have no mask to look at. Numbers of the CPU's own are the optimizer's affair."
    reads = []
    def spy(name):
        real = getattr(torch.Tensor, name)
        def method(self, *a, **kw):
            f = sys._getframe(1)
            if f"{os.sep}qie_nb{os.sep}" in f.f_code.co_filename:
                reads.append((trainer.global_step, f"{os.path.basename(f.f_code.co_filename)}:{f.f_lineno} {linecache.getline(f.f_code.co_filename, f.f_lineno).strip()} ({name})"))
            return real(self, *a, **kw)
        monkeypatch.setattr(torch.Tensor, name, method)
    for name in ("item", "__bool__", "__float__", "__int__", "tolist", "numpy", "cpu", "nonzero"): spy(name)
    trainer = poison(world.trainer(tmp_path, train=dict(max_train_steps=12, save_steps=None), logging=dict(log_every=5)), {2, 7})
    inside = []
    real = QwenImageEditTrainer.optimizer_step
    class Around(Callback):
        def on_step_end(self, t):
            if t.global_step % 5 and t.global_step not in (1, 12): inside.extend(what for _, what in reads)
            reads.clear()
    trainer.callbacks.append(Around())
    trainer.fit()
    assert not (found := [w for w in inside if "mask" not in w]), sorted(set(found))


# --- which checkpoints are kept
def test_the_last_two_and_the_best_are_kept(world, tmp_path):
    t = world.trainer(tmp_path, train=dict(val_fraction=0.2, eval_steps=1, eval_noise_samples=1, eval_images=0, keep_checkpoints=2, ema_decay=None))
    real = type(t).loss
    def loss_at(batch, *a, **kw):
        loss = real(t, batch, *a, **kw)
        return loss if torch.is_grad_enabled() else torch.full_like(loss, (5., 4., 1., 3., 4., 5., 6., 7.)[t.global_step - 1])
    t.loss = loss_at
    t.fit()
    assert {state_of(d)["global_step"] for d in complete(tmp_path)} == {3, 7, 8}


def test_a_budget_of_bytes_is_kept_and_the_newest_stays(world, tmp_path):
    size = lambda d: sum(p.stat().st_size for p in d.rglob("*") if p.is_file())
    one = world.trainer(tmp_path/"one", train=dict(max_train_steps=1)).fit()
    bytes_ = size(complete(tmp_path/"one")[0])
    del one
    for budget, kept in ((bytes_ * 3.5, 3), (bytes_ * 1.5, 1), (bytes_ * 0.5, 1)):
        out = tmp_path/f"{kept}_{budget:.0f}"
        world.trainer(out, train=dict(checkpoint_budget_gb=budget / 1e9)).fit()
        there = complete(out)
        assert len(there) == kept and max(state_of(d)["global_step"] for d in there) == 8, (budget, [d.name for d in there])


def test_nothing_is_removed_before_the_newer_one_is_complete(world, tmp_path, monkeypatch):
    removed = []
    for name in ("unlink", "rmdir", "remove", "replace", "rename"):
        def is_interactive(*a, _real=getattr(os, name), **kw):
            n = len(complete(tmp_path))
            out = _real(*a, **kw)
            if (now := len(complete(tmp_path))) < n: removed.append((n, now))
            return out
        monkeypatch.setattr(os, name, is_interactive)
    world.trainer(tmp_path, train=dict(keep_checkpoints=2)).fit()
    assert removed and all(n == 3 for n, _ in removed), removed
