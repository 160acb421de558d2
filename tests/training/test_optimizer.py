"""The optimizers: steps that are skipped change nothing, states survive a checkpoint; schedule and running mean."""
import json

import pytest
import torch
from diffusers.optimization import get_scheduler

from qie_nb.config import OptimizerSection, SchedulerSection
from qie_nb.training.checkpoint import join_state, split_state
from qie_nb.training.optimizers import base
from qie_nb.training.optimizers.adamw8bit import AdamW8bit
from qie_nb.training.step import EMA, guarded_step, make_schedule
from qie_nb.training.optimizers.known import check_optimizer, make_optimizer

NAMES = ("adamw", "adamw8bit", "adafactor", "prodigy")


def optimizer_of(name, seed=0, **kw):
    g = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(*size, generator=g)) for size in ((64, 128), (8, 4), (4100,))] # two of them large enough for 8 bits
    return params, make_optimizer(params, OptimizerSection(name=name, lr=1. if name == "prodigy" else 1e-2, **kw))


def steps(params, opt, kinds): # a whole number is a step; nan is a bad gradient
    for k in kinds:
        ok = isinstance(k, int)
        g = torch.Generator().manual_seed(100 + k if ok else 100)
        for p in params: p.grad = torch.randn(p.shape, generator=g)
        if not ok: params[0].grad[0, 0] = k
        guarded_step(opt, torch.tensor(ok))


def assert_same_state(a, b):
    (ta, ra), (tb, rb) = split_state(a), split_state(b)
    assert ra == rb
    torch.testing.assert_close(ta, tb, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_skipped_step_leaves_no_trace(name, bad=float("nan")):
    (p, a), (q, b) = optimizer_of(name), optimizer_of(name)
    steps(q, b, [bad])
    assert all(torch.equal(x, y) for x, y in zip(p, q)) and all((t == 0).all() for t in split_state(b.state_dict())[0].values())
    steps(p, a, [0, 1, 2]); steps(q, b, [bad, 0, 1, bad, 2, bad])
    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert_same_state(a.state_dict(), b.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_a_state_survives_safetensors_and_json(name, tmp_path):
    from safetensors.torch import load_file, save_file
    (p, a), (q, b) = optimizer_of(name), optimizer_of(name)
    steps(p, a, [0, 1, 2]); steps(q, b, [0, 1, 2])
    tensors, rest = split_state(b.state_dict())
    save_file(tensors, tmp_path/"state.safetensors")
    joined = join_state(load_file(tmp_path/"state.safetensors"), json.loads(json.dumps(rest)))
    assert_same_state(joined, a.state_dict())
    r, c = optimizer_of(name, seed=9) # as in another process
    with torch.no_grad():
        for x, y in zip(r, q): x.copy_(y)
    c.load_state_dict(joined)
    steps(p, a, [3, 4, 5]); steps(r, c, [3, float("nan"), 4, 5])
    torch.testing.assert_close(p, r, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_an_optimizer_wrapped_by_accelerate_is_guarded_too(name):
    from accelerate import Accelerator
    params, opt = optimizer_of(name)
    wrapped, was = Accelerator(cpu=True).prepare(opt), [p.detach().clone() for p in params]
    assert wrapped is not opt
    steps(params, wrapped, [float("nan")])
    assert all(torch.equal(p, w) for p, w in zip(params, was))
    steps(params, wrapped, [0])
    assert not any(torch.equal(p, w) for p, w in zip(params, was))


def test_unavailable_optimizers_are_refused(monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(base, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match="prodigy needs prodigyopt.*pip install prodigyopt"): check_optimizer(OptimizerSection(name="prodigy", lr=1.))
    def broken(*a, **kw): raise NotImplementedError("no kernel for this device")
    monkeypatch.setattr(AdamW8bit, "build", broken)
    with pytest.raises(ValueError, match="adamw8bit does not run on cpu .*no kernel.*or use adamw"): check_optimizer(OptimizerSection(name="adamw8bit"))


@pytest.mark.parametrize("lr", [1e-4, 0.05])
def test_prodigy_refuses_the_rate_of_another_optimizer(lr):
    for fits in (0.1, 1., 10.):
        check_optimizer(OptimizerSection(name="prodigy", lr=fits))
    with pytest.raises(ValueError, match=f"must be about 1, got {lr:g}; set it to 1"):
        check_optimizer(OptimizerSection(name="prodigy", lr=lr))


@pytest.mark.parametrize("name", NAMES)
def test_each_optimizer_lowers_the_loss(name):
    (params, opt), losses = optimizer_of(name), []
    for _ in range(30):
        loss = sum(p.square().mean() for p in params)
        opt.zero_grad()
        loss.backward()
        guarded_step(opt, torch.isfinite(loss))
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("section, steps, message", [
    (dict(warmup_steps=10), 10, "is 10, but the run has 10"), (dict(scheduler_type="constant", warmup_steps=1), 100, "constant has no warm-up"),
    (dict(scheduler_type="polynomial", num_cycles=2), 100, "has no cycles"), (dict(scheduler_type="cosine_with_restarts", num_cycles=0.5), 100, "got 0.5; use 1")])
def test_a_schedule_that_ignores_a_setting_is_refused(section, steps, message):
    _, opt = optimizer_of("adamw")
    with pytest.raises(ValueError, match=message): make_schedule(opt, SchedulerSection(**section), steps)
    make_schedule(opt, SchedulerSection(warmup_steps=10), 11), make_schedule(opt, SchedulerSection(warmup_steps=10), 0) # 0: length not known yet


@pytest.mark.parametrize("name", NAMES)
def test_each_setting_reaches_the_optimizer(name):
    section = OptimizerSection(name=name, lr=0.5, betas=(0.5, 0.75), weight_decay=0.25, eps=1e-3)
    group, = make_optimizer([torch.nn.Parameter(torch.ones(8))], section).param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    if name == "adafactor": assert not group["relative_step"] and not group["scale_parameter"]
    else: assert (tuple(group["betas"]), group["eps"]) == ((0.5, 0.75), 1e-3)


@pytest.mark.parametrize("section, more", [
    (dict(scheduler_type="constant_with_warmup", warmup_steps=4), {}), (dict(scheduler_type="linear", warmup_steps=4), {}), (dict(scheduler_type="cosine", num_cycles=1.5), dict(num_cycles=1.5)),
    (dict(scheduler_type="cosine_with_restarts", num_cycles=3), dict(num_cycles=3)), (dict(scheduler_type="polynomial", power=2.), dict(power=2.))])
def test_a_schedule_is_that_of_diffusers_from_any_step_on(section, more):
    settings, of = SchedulerSection(**section), lambda: optimizer_of("adamw")[1]
    def rates(schedule, opt, n): return [(opt.param_groups[0]["lr"], opt.step(), schedule.step())[0] for _ in range(n)]
    a, b, c = of(), of(), of()
    want = rates(get_scheduler(settings.scheduler_type, a, num_warmup_steps=settings.warmup_steps, num_training_steps=20, **more), a, 20)
    assert rates(make_schedule(b, settings, 20), b, 20) == pytest.approx(want) and len({round(r, 8) for r in want}) > 3
    assert rates(make_schedule(c, settings, 20, done=7), c, 13) == pytest.approx(want[7:])


# the running mean

def walk(ema, params, n):
    g, seen = torch.Generator().manual_seed(0), []
    for _ in range(n):
        with torch.no_grad():
            for p in params: p.add_(torch.randn(p.shape, generator=g))
        seen.append([p.detach().clone() for p in params])
        ema.update(torch.tensor(True))
    return seen


def test_the_mean_follows_the_formula():
    params = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.ones(4))]
    ema, want = EMA(params, 0.7), [p.detach().double() for p in params]
    for n, seen in enumerate(walk(ema, params, 30)): # 0.7 is reached at step 20
        decay = min(0.7, (1 + n) / (10 + n))
        want = [decay * w + (1 - decay) * s.double() for w, s in zip(want, seen)]
    for m, w in zip(ema.mean, want): torch.testing.assert_close(m, w.float(), rtol=1e-4, atol=1e-5)


def test_a_skipped_step_does_not_reach_the_mean():
    params = [torch.nn.Parameter(torch.randn(3))]
    ema = EMA(params, 0.9)
    walk(ema, params, 3)
    ema.mean[0][0] = -0.
    bits = ema.mean[0].view(torch.int32).clone()
    with torch.no_grad(): params[0][1] = float("nan")
    ema.update(torch.tensor(False))
    assert torch.equal(ema.mean[0].view(torch.int32), bits)


def test_apply_restores_the_adapter_after_an_error():
    p = torch.nn.Parameter(torch.randn(5, 3))
    ema = EMA([p], 0.9)
    walk(ema, [p], 5)
    was, address = p.detach().clone(), p.data_ptr()
    with pytest.raises(KeyError), ema.apply():
        assert torch.equal(p, ema.mean[0]) and p.requires_grad
        raise KeyError
    assert torch.equal(p, was) and p.data_ptr() == address, "the optimizer holds the same tensor"


def test_sharded_parameters_are_averaged_and_stepped_too(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    dist.init_process_group("gloo", init_method=f"file://{tmp_path/'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain = torch.nn.Parameter(torch.randn(6, 4))
        sharded = torch.nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
        held = []
        for p in (plain, sharded):
            opt, ema = make_optimizer([p], OptimizerSection(lr=1e-2)), EMA([p], 0.9)
            for k, ok in enumerate((True, False, True)):
                g = torch.full((6, 4), 0.1 * k + 0.1 if ok else float("nan"))
                p.grad = g if p is plain else distribute_tensor(g, mesh, [Shard(0)])
                guarded_step(opt, torch.tensor(ok))
                ema.update(torch.tensor(ok))
            with ema.apply(): inside = p.detach().clone()
            held.append([t.full_tensor() if isinstance(t, DTensor) else t for t in (p.detach(), inside, ema.mean[0])])
        assert isinstance(ema.mean[0], DTensor)
        for a, b in zip(*held): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    finally: dist.destroy_process_group()
