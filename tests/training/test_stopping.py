"""Every way a run can end by itself, and what is kept of it."""
import gc, json, os, re, shutil, time, weakref
from types import SimpleNamespace

import pytest
import torch

from helpers import OnStep, StopAt, merged, on_call, settings, slow, write_pairs
from crash_trials import complete, differ, log_rows, outcome
from qie_nb.planning.plan import Planner
from qie_nb.training import checkpoint, stopping
from qie_nb.training.callbacks import RunState
from qie_nb.training.checkpoint import complete_checkpoints, is_complete, keep_newest
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer

EVALUATED = dict(val_fraction=0.2, eval_images=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "A data set with its cache, `trainer(folder, *callbacks, **sections)`, and an undisturbed run in the folder `whole`."
    tmp = tmp_path_factory.mktemp("stops")
    root = write_pairs(tmp/"set", ((48, 32),) * 5 + ((32, 48),) * 3, caption=[f"invert {'well ' * (i % 3)}{i}" for i in range(8)])
    model = dict(pretrained_model_name_or_path=str(tiny_folder("2511", (64*64, 64*64))), lora=dict(r=2, lora_alpha=4, lora_dropout=0.1))
    train = dict(max_train_steps=8, gradient_accumulation_steps=2, gradient_checkpointing=False, ema_decay=0.9, save_steps=1, keep_checkpoints=100)
    def trainer(out, *callbacks, **sections):
        base = merged(dict(model=model, data=dict(batch_size=1), train=train | dict(output_dir=str(out)), optimizer=dict(lr=0.01)), sections)
        return QwenImageEditTrainer(settings(root, tmp, **base), callbacks)
    trainer(tmp).cache_embeddings()
    trainer(tmp/"whole").fit()
    return SimpleNamespace(whole=tmp/"whole", trainer=trainer, want=outcome(tmp/"whole", True))


def state_of(folder): return json.loads((folder/"state.json").read_text())
def latest(out): return out/"checkpoints"/(out/"checkpoints"/"latest").read_text().strip()
def kept(out): return {state_of(d)["global_step"] for d in complete(out)}


def of_step(out, step):
    "The tensors of a step's checkpoint as bytes, except the generator's state."
    from safetensors.torch import load_file
    folder = next(d for d in complete(out) if state_of(d)["global_step"] == step)
    return {(f, k): v.numpy().tobytes() for f in ("pytorch_lora_weights", "optimizer", "ema") for k, v in load_file(folder/f"{f}.safetensors").items() if k != "rng"}


def close(got, want):
    "The outcome is the undisturbed one's up to rounding."
    name = "pytorch_lora_weights.safetensors"
    assert got["state"] == want["state"] and [r["step"] for r in got["log"]] == [r["step"] for r in want["log"]] and got[name].keys() == want[name].keys()
    for k, (_, _, data) in got[name].items():
        a, b = (torch.frombuffer(bytearray(x), dtype=torch.float32) for x in (data, want[name][k][2]))
        assert (a - b).norm() < 0.01 * b.norm(), k # a step less would be a tenth


def all_finite(tensors): return all(torch.isfinite(torch.frombuffer(bytearray(v), dtype=torch.float32)).all() for (f, _), v in tensors.items() if f != "optimizer")


def files_of(out): return {p: p.read_bytes() for p in (out/"checkpoints").rglob("*") if p.is_file() and "logs" not in p.parts}


# max_hours

class Clock:
    "Each step, save and evaluation takes a given time; `step` and `save` may be functions of the time and of the number of saves."
    def __init__(self, monkeypatch, step, save, evaluation=0., real=False):
        self.passed, self.saves = 0., 0
        def take(given, at=0): self.passed += given(at) if callable(given) else given
        def replaced(src, dst, *a, **kw):
            if os.path.basename(dst) == "COMPLETE": take(save, self.saves); self.saves += 1
        monkeypatch.setattr(time, "time", lambda: 1e9 + self.passed)
        monkeypatch.setattr(time, "monotonic", lambda: self.passed)
        on_call(monkeypatch, os, "replace", replaced)
        on_call(monkeypatch, QwenImageEditTrainer, "optimizer_step", lambda *a: take(step, self.passed))
        on_call(monkeypatch, QwenImageEditTrainer, "loss", lambda *a, **kw: take(0. if torch.is_grad_enabled() else evaluation))
        if not real: monkeypatch.setattr(QwenImageEditTrainer, "training_step", lambda t, batch: t.optimizer.param_groups[0]["params"][0].square().sum())


@pytest.mark.slow
@pytest.mark.parametrize("step, save, evaluation, train, least", [
    (60, lambda n: 500 if n == 0 else 60, 0, dict(save_steps=10), 0.6),
    (lambda now: 40 if now < 1500 else 160, lambda n: 30 + 25 * n, 0, dict(save_steps=10), 0.8), # both become slower
    (60, 60, 0, dict(save_steps=None), 0.8), (300, 20, 0, dict(save_steps=1), 0.8), (120, 60, 30., dict(save_steps=10, eval_steps=7, **EVALUATED), 0)])
def test_max_hours_leaves_time_to_save_and_wastes_little(step, save, evaluation, train, least, world, tmp_path, monkeypatch):
    clock = Clock(monkeypatch, step, save, evaluation)
    t = world.trainer(tmp_path, train=dict(max_train_steps=200, max_hours=1., keep_checkpoints=2, **train)).fit()
    assert t.global_step < 200 and "max_hours" in t.state.stop
    assert least * 3600 <= clock.passed <= 3600
    assert is_complete(latest(tmp_path)) and state_of(latest(tmp_path))["global_step"] == t.global_step


def test_the_last_step_leaves_time_for_another_step_and_a_slow_save(monkeypatch):
    now, state = [0.], SimpleNamespace(began=0., save_seconds=200., stop="")
    monkeypatch.setattr(stopping, "time", SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0]))
    limit, t = stopping.TimeLimitCallback(), SimpleNamespace(plan=Planner(dict(train=dict(max_hours=1.))).plan, state=state)
    limit.on_train_begin(t)
    while not state.stop:
        now[0] += 100
        limit.on_step_end(t)
    assert now[0] == 3600 - 100 - 1.5 * 200


def test_a_resume_brings_back_every_fact_of_the_run_and_takes_the_optimizers_new_settings(world, tmp_path):
    facts = dict(epoch=1, position=3, global_step=7, skipped=2, pending="held-out loss", best=(0.25, "step_00000005"), spent=900.)
    first = world.trainer(tmp_path, train=dict(max_train_steps=2))
    first.fit()
    for k, v in facts.items(): setattr(first.state, k, v)
    first.state.began = first.state.ended = None
    first.adapters.ema.n = 40
    for m in first.adapters.ema.mean: m.add_(1.)
    first.checkpoints.save(1, 7, by_epoch=False, skipped=2)
    new = dict(weight_decay=0.3, betas=(0.5, 0.6), eps=1e-5)
    again = world.trainer(tmp_path, optimizer=new | dict(lr=0.02)).resume("latest")
    assert {k: getattr(again.state, k) for k in facts} == facts
    assert again.adapters.ema.n == 40
    torch.testing.assert_close(again.adapters.ema.mean, first.adapters.ema.mean)
    for a, b in zip(again.adapters.ema.params, first.adapters.ema.params, strict=True): assert torch.equal(a, b)
    (group,) = again.optimizer.param_groups
    assert {k: group[k] for k in new} == new and group["initial_lr"] == 0.02, "settings that may change on a resume"
    assert {int(v["step"]) for v in again.optimizer.state_dict()["state"].values()} == {2}, "the moments are the saved ones"


def test_max_hours_counts_what_comes_before_the_first_step(world, tmp_path, monkeypatch):
    clock = Clock(monkeypatch, 300, 30)
    def slowly(t): clock.passed += 1200
    on_call(monkeypatch, QwenImageEditTrainer, "set_lora", slowly)
    world.trainer(tmp_path, train=dict(max_train_steps=200, max_hours=1., save_steps=10)).fit()
    assert clock.passed <= 3600


def test_max_hours_shorter_than_a_step(world, tmp_path, monkeypatch):
    Clock(monkeypatch, 3600, 10)
    t = world.trainer(tmp_path, train=dict(max_hours=0.1, save_steps=None)).fit()
    assert t.global_step == 1 and state_of(latest(tmp_path))["global_step"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("again", [pytest.param("resumed", marks=pytest.mark.bits), "same trainer"])
def test_sessions_of_max_hours_make_the_undisturbed_run(again, world, tmp_path, monkeypatch):
    Clock(monkeypatch, 60, 10, real=True)
    train, sessions = dict(max_hours=0.075), 1
    t = world.trainer(tmp_path, train=train).fit()
    while t.state.stop != "done":
        sessions, before = sessions + 1, t.global_step
        t = t.fit() if again == "same trainer" else world.trainer(tmp_path, train=train | dict(resume_checkpoint="latest")).fit()
        assert t.global_step > before
    assert sessions > 1
    if again == "resumed": differ(outcome(tmp_path, True), world.want)


# out of memory

ERRORS = dict(new=lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), old=lambda: RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0)"),
              cpu=lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes."))


class Boom:
    "Raises at call n, from 0."
    def __init__(self, n, error): self.n, self.error, self.calls = n, error, 0
    def __call__(self, *a, **kw):
        self.calls += 1
        if self.calls == self.n + 1: raise self.error


def three_settings(e):
    from qie_nb.config import describe
    assert isinstance(e, torch.OutOfMemoryError), e
    known = [n for n, *_ in describe()]
    named = list(dict.fromkeys(n for n in re.findall(r"`([a-z_.]+)[^`]*`", str(e)) if n in known))
    assert len(named) >= 3 and len(re.findall(r"\d(?:\.\d+)? ?[GM]B", str(e))) >= 3, str(e)
    return named


def boom_in(where, step, error, monkeypatch, t):
    "Memory runs out in a step's second micro-batch; returns weak references to the transformer's outputs."
    made, boom = [], Boom(step - 1 if where == "optimizer" else 2 * step - 1, error)
    last = t.set_lora().transformer.transformer_blocks[-1]
    last.register_forward_hook(lambda m, a, out: made.extend(weakref.ref(x) for x in out if torch.is_tensor(x)))
    if where == "forward": last.register_forward_pre_hook(boom)
    elif where == "backward": on_call(monkeypatch, torch.Tensor, "backward", boom)
    else:
        step_ = torch.optim.AdamW.step
        monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a, **kw: (step_(self, *a, **kw), boom())[0])
    return made


@pytest.mark.parametrize("where, step, kind", [slow("forward", 1, "cpu"), slow("forward", 4, "old"), slow("backward", 4, "new"), ("optimizer", 4, "new"), slow("optimizer", 1, "new")])
def test_memory_runs_out_in_a_step(where, step, kind, world, tmp_path, monkeypatch):
    t, snapshots = world.trainer(tmp_path), {}
    made = boom_in(where, step, ERRORS[kind](), monkeypatch, t)
    t.callbacks.append(OnStep(lambda t: snapshots.update({t.global_step: files_of(tmp_path)}))) # after the checkpoint
    with pytest.raises(BaseException) as e: t.fit()
    three_settings(e.value)
    if step > 1: assert files_of(tmp_path) == snapshots[step - 1]
    assert kept(tmp_path) == set(range(1, step)) and t.global_step == step - 1
    gc.collect() # the error is still held, as in a notebook
    assert all(p.grad is None for p in t.transformer.parameters())
    assert made and not [r for r in made if r() is not None]
    t.fit()
    close(outcome(tmp_path, True), world.want)


@pytest.mark.parametrize("where, changed", [pytest.param("backward", {}, marks=pytest.mark.bits), slow("forward", dict(gradient_checkpointing=True))])
def test_a_run_goes_on_after_memory_ran_out(where, changed, world, tmp_path, monkeypatch):
    t = world.trainer(tmp_path)
    boom_in(where, 4, ERRORS["new"](), monkeypatch, t)
    with pytest.raises(torch.OutOfMemoryError): t.fit()
    (world.trainer(tmp_path, train=changed | dict(resume_checkpoint="latest")) if changed else t).fit()
    (close if changed else differ)(outcome(tmp_path, True), world.want)


@pytest.mark.slow
@pytest.mark.parametrize("part, lazily", [("vae", False), ("text_encoder", False), ("text_encoder", True)])
def test_memory_runs_out_in_an_encoder(part, lazily, world, tmp_path, monkeypatch):
    from qie_nb.devices.edit_model import EditModel
    booms, get = [], EditModel.get
    def get_(self, name, *a, **kw):
        new, module = name not in self.loaded, get(self, name, *a, **kw)
        if name == part and new and not booms:
            booms.append(Boom(40, ERRORS["new"]()))
            for m in module.modules(): m.register_forward_pre_hook(booms[0])
        return module
    monkeypatch.setattr(EditModel, "get", get_)
    t = world.trainer(tmp_path, cache=dict(cache_dir=str(tmp_path/"cache")))
    with pytest.raises(BaseException) as e: t.fit() if lazily else t.cache_embeddings()
    named = three_settings(e.value)
    assert booms[0].calls > 40 and any("encoder" in n or n.startswith(("data.", "cache.")) for n in named) and not any(n.startswith("train.gradient") for n in named), named
    if not lazily: t.cache_embeddings()
    t.fit()
    close(outcome(tmp_path, True), world.want)


def test_other_errors_stay_what_they_are(world, tmp_path, monkeypatch):
    t = world.trainer(tmp_path)
    boom_in("forward", 2, RuntimeError("mat1 and mat2 shapes cannot be multiplied"), monkeypatch, t)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as e: t.fit()
    assert not isinstance(e.value, torch.OutOfMemoryError) and is_complete(latest(tmp_path))


# a loss that is not finite

def poison(t, steps, value=float("nan")):
    real = type(t).loss
    def loss(*a, **kw):
        loss = real(t, *a, **kw)
        return loss * value if torch.is_grad_enabled() and t.global_step + 1 in steps else loss
    t.loss = loss
    return t


def test_only_skipped_steps_that_follow_each_other_make_a_row():
    counter, rows = stopping.NonFiniteCounter(), []
    for group in ((1, 0, 1, 0), (1, 0, 0, 1), (0, 1, 1, 1), (0, 1, 0, 0), (1,)): # between two readings; 0 is a skipped step
        for ok in group: counter.note(torch.tensor(bool(ok)))
        rows.append(counter.read()[:2])
    assert rows == [(2, 1), (4, 2), (5, 1), (8, 2), (8, 2)], "a row goes on over a reading"


@pytest.mark.parametrize("how", ["button", "file"])
def test_images_are_made_once_for_each_request(how, tmp_path):
    state = RunState(sample_now=how == "button")
    if how == "file": (tmp_path/"sample_now").touch()
    t = SimpleNamespace(state=state, checkpoint_root=lambda: tmp_path)
    assert [stopping.asked_for_images(t) for _ in range(2)] == [True, False]


def test_each_unit_of_work_counts_once_over_all_processes():
    "The last process has nothing left for the last round, and takes part without being counted."
    for units, processes in ((3, 2), (4, 2), (1, 3), (7, 3)):
        parts = [stopping.shares(units, SimpleNamespace(accelerator=SimpleNamespace(process_index=k, num_processes=processes)))
                 for k in range(processes)]
        assert len({len(part) for part in parts}) == 1, "all processes are called equally often"
        assert sorted(unit for part in parts for unit, counts in part if counts) == list(range(units))


@pytest.mark.parametrize("value", [float("nan"), slow(float("inf"))])
def test_a_step_that_is_not_finite_changes_nothing(value, world, tmp_path):
    t = poison(world.trainer(tmp_path), {1, 4}, value).fit()
    assert t.global_step == 8 and int(t.state.skipped) == 2
    assert of_step(tmp_path, 4) == of_step(tmp_path, 3) != of_step(tmp_path, 5)
    assert all(all_finite(of_step(tmp_path, s)) for s in range(1, 9))
    rows = log_rows(tmp_path)
    assert [r["step"] for r in rows] == [str(n) for n in range(1, 9)] and [float(r["skipped"]) for r in rows] == [1, 1, 1, 2, 2, 2, 2, 2]


@pytest.mark.slow
def test_a_run_that_ends_at_a_skipped_step_is_saved(world, tmp_path):
    poison(world.trainer(tmp_path, StopAt(5), train=dict(save_steps=None)), {5}).fit()
    assert kept(tmp_path) == {5}


@pytest.mark.slow
@pytest.mark.bits
def test_a_skipped_step_survives_a_resume(world, tmp_path):
    whole = poison(world.trainer(tmp_path/"whole"), {3}).fit()
    poison(world.trainer(tmp_path/"cut", StopAt(4)), {3}).fit()
    again = world.trainer(tmp_path/"cut", train=dict(resume_checkpoint="latest")).fit()
    assert int(again.state.skipped) == int(whole.state.skipped) == 1
    differ(outcome(tmp_path/"cut", True), outcome(tmp_path/"whole", True))


@pytest.mark.parametrize("every, ends", [(1, 5), slow(4, 8)])
def test_it_stops_after_several_in_a_row_with_the_last_good_state(every, ends, world, tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "MAX_NONFINITE_STEPS", 3)
    train = dict(max_train_steps=40, save_steps=None)
    t = poison(world.trainer(tmp_path, StopAt(2), train=train, logging=dict(log_every=every)), set(range(3, 99))).fit()
    good = of_step(tmp_path, 2)
    with pytest.raises(stopping.TrainingFailed, match="finite in . steps in a row"): t.fit()
    assert t.global_step == ends and "finite" in t.state.stop
    assert of_step(tmp_path, state_of(latest(tmp_path))["global_step"]) == good and all_finite(good)


# which checkpoints are kept

@pytest.mark.slow
def test_the_last_two_and_the_best_are_kept(world, tmp_path):
    t = world.trainer(tmp_path, train=dict(eval_steps=1, keep_checkpoints=2, ema_decay=None, **EVALUATED))
    def loss(batch, *a, _real=t.loss, **kw):
        loss = _real(batch, *a, **kw)
        return loss if torch.is_grad_enabled() else torch.full_like(loss, (5., 4., 1., 3., 4., 5., 6., 7.)[t.global_step - 1])
    t.loss = loss
    t.fit()
    assert kept(tmp_path) == {3, 7, 8}


@pytest.mark.parametrize("best, n, left", [(None, 2, {7, 8}), (3, 2, {3, 7, 8}), (8, 1, {8}), (1, 1, {1, 8})])
def test_the_newest_and_the_best_are_kept(best, n, left, world, tmp_path):
    root = shutil.copytree(world.whole/"checkpoints", tmp_path/"checkpoints")
    if best: (root/"best").write_text(f"step_{best:08d}")
    gone = keep_newest(root, n)
    assert kept(tmp_path) == left and len(gone) == 8 - len(left)


def test_the_time_of_earlier_fits_counts_and_the_pause_between_them_does_not():
    state = RunState(began=time.time() - 3600, ended=time.time() - 3540, spent=5.)
    assert state.seconds == pytest.approx(65, abs=1)
    state.start()
    assert state.seconds == pytest.approx(65, abs=1) and state.ended is None


def test_an_equal_loss_is_no_better_checkpoint():
    saver, seen = checkpoint.CheckpointCallback(), []
    for step, loss in ((0, 3.), (2, 2.), (4, 2.), (6, 1.)):
        state = RunState(global_step=step, best=seen[-1] if seen else None, metrics=dict(held_out_loss=loss))
        saver.better(state)
        seen.append(state.best)
    assert seen == [(3., ""), (2., "step_00000002"), (2., "step_00000002"), (1., "step_00000006")]


def test_latest_is_the_checkpoint_that_its_file_names_while_it_is_complete(world, tmp_path):
    root = shutil.copytree(world.whole/"checkpoints", tmp_path/"checkpoints")
    (root/"latest").write_text("step_00000003")
    assert checkpoint.find_checkpoint("latest", root).name == "step_00000003"
    (root/"step_00000003"/"COMPLETE").unlink()
    assert checkpoint.find_checkpoint("latest", root).name == latest(world.whole).name


def test_a_run_that_is_done_is_not_saved_again(world, tmp_path):
    t = world.trainer(tmp_path, train=dict(max_train_steps=2)).fit()
    before = files_of(tmp_path)
    assert t.fit().global_step == 2 and files_of(tmp_path) == before


def test_nothing_is_removed_before_the_newer_one_is_complete(world, tmp_path, monkeypatch):
    removed = []
    for name in ("unlink", "rmdir", "remove", "replace", "rename"):
        def watched(*a, _real=getattr(os, name), **kw):
            n = len(complete(tmp_path))
            out = _real(*a, **kw)
            if (now := len(complete(tmp_path))) < n: removed.append((n, now))
            return out
        monkeypatch.setattr(os, name, watched)
    world.trainer(tmp_path, train=dict(keep_checkpoints=2, max_train_steps=4)).fit()
    assert removed and all(n == 3 for n, _ in removed), removed


@pytest.mark.parametrize("moment", ["before its digests", "before its state is read"])
def test_a_checkpoint_that_is_moved_away_meanwhile_is_no_error(moment, world, tmp_path, monkeypatch):
    """Another process gives a folder its final name while this one looks at it."""
    root = shutil.copytree(world.whole/"checkpoints", tmp_path/"checkpoints")
    before = complete_checkpoints(root)
    moving = before[-1]
    name = "file_digest" if moment == "before its digests" else "save_order"
    seen = getattr(checkpoint, name)

    def after_a_move(path):
        if moving.is_dir() and moving in (path, path.parent):
            moving.rename(root/"step_00000099")
        return seen(path)

    monkeypatch.setattr(checkpoint, name, after_a_move)
    found = complete_checkpoints(root)
    assert (root/"step_00000099").is_dir()
    assert set(before[:-1]) <= set(found)


# a driver that refuses memory

@pytest.mark.parametrize("text, driver", [
    ("CUDA driver error: unknown error", True), ("CUDA driver error: device not ready", True),
    ("device not ready", True),
    ("CUDA driver error: out of memory", False), ("mat1 and mat2 shapes cannot be multiplied", False)])
def test_an_error_of_the_driver_names_the_allocators_variable(text, driver):
    from qie_nb.training.stopping import memory_advice
    with pytest.raises(RuntimeError) as e, memory_advice("training", list, list):
        raise RuntimeError(text)
    assert text in str(e.value)
    advised = "PYTORCH_CUDA_ALLOC_CONF to expandable_segments:False before torch is imported" in str(e.value)
    assert advised == driver == ("newer NVIDIA driver" in str(e.value))
    assert isinstance(e.value, torch.OutOfMemoryError) == ("out of memory" in text)
