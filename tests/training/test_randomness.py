"""What is drawn at random in a run: new in every epoch and for every sample, the same again from the same seed, and taken up again by a resumed run."""
import pytest
import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_shift

from qie_nb import trainer as trainer_module
from qie_nb.lora.adapters import lora_parameters
from qie_nb.models import flow_matching as flow
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.step import sample_noise_and_sigmas

from helpers import OnStep, StopAt, merged, settings

FIVE = ((48, 32),) * 4 + ((32, 48),)


def drawn(root, tmp_path, epochs=3, loader=None, **sections) -> list:
    "A run's draws: (epoch, sample, prompt, noise, level) of each sample, in the order of the steps."
    out, real = [], trainer_module.sample_noise_and_sigmas
    train = dict(num_epochs=epochs, continuous_timesteps=True, max_train_steps=None)
    trainer = QwenImageEditTrainer(settings(root, tmp_path, **merged(dict(train=train, model=dict(modulation_table=False)), sections)))
    def note(batch, *args):
        got = real(batch, *args)
        ids, prompts = batch.get("sample_id", range(len(got.eps))), batch.get("prompt", "?" * len(got.eps))
        out.extend((trainer.state.epoch, i, p, e, s.item()) for i, p, e, s in zip(ids, prompts, got.eps, got.sigmas))
        return got
    with pytest.MonkeyPatch.context() as mp:
        mp.setattr(trainer_module, "sample_noise_and_sigmas", note)
        trainer.fit(loader)
    return out


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "A data set, and a folder with its filled cache."
    from helpers import write_pairs
    captions = [f"make it look {how}" for how in ("old", "new", "wet", "dry", "odd")]
    root = write_pairs(tmp_path_factory.mktemp("random")/"set", FIVE, caption=captions)
    run = tmp_path_factory.mktemp("run")
    QwenImageEditTrainer(settings(root, run, cache=dict(cache_dir=str(run/"cache")))).cache_embeddings()
    return root, run


def distinct(tensors): return len({t.numpy().tobytes() for t in tensors}) == len(tensors)


@pytest.mark.slow
def test_every_epoch_and_sample_has_its_own_noise_and_level(world, tmp_path):
    root, cache = world
    cache = dict(cache_dir=str(cache/"cache"))
    rows = drawn(root, tmp_path/"a", data=dict(batch_size=2), cache=cache)
    assert len(rows) == 15 and distinct([e[:, :, :4, :4] for *_, e, _ in rows]) and len({s for *_, s in rows}) == 15
    assert abs(sum(s for *_, s in rows) / 15 - 0.5) < 0.25 and abs(torch.cat([e.flatten() for *_, e, _ in rows]).std() - 1) < 0.02
    assert abs(torch.corrcoef(torch.tensor([[e.mean(), s] for *_, e, s in rows]).T)[0, 1]) < 0.9, "noise and level come from different numbers"
    alone = drawn(root, tmp_path/"b", data=dict(batch_size=1), cache=cache)
    key = lambda rows: {(epoch, i): (e.numpy().tobytes(), s) for epoch, i, _, e, s in rows}
    assert key(rows) == key(alone), "a sample's draws do not depend on its batch"
    other = drawn(root, tmp_path/"c", 1, cache=cache, train=dict(seed=1))
    assert not {s for *_, s in other} & {s for *_, s in rows}


@pytest.mark.slow
def test_captions_are_dropped_anew_in_every_epoch(world, tmp_path):
    root, cache = world
    rows = drawn(root, tmp_path, 12, data=dict(batch_size=1, caption_dropout_rate=0.5), cache=dict(cache_dir=str(cache/"cache")))
    kept = {(epoch, i) for epoch, i, prompt, *_ in rows if prompt}
    assert len(rows) == 60 and 15 <= len(kept) <= 45
    patterns = {frozenset(i for e, i in kept if e == epoch) for epoch in range(12)}
    assert len(patterns) > 6 and len({frozenset(e for e, i in kept if i == n) for n in {i for _, i, *_ in rows}}) == 5
    orders = {tuple(i for e, i, *_ in rows if e == epoch) for epoch in range(12)}
    assert len(orders) > 6, "the order is new in every epoch, too"


def test_another_loaders_batches_get_new_noise_in_every_step(world, tmp_path):
    root, cache = world
    own = QwenImageEditTrainer(settings(root, tmp_path/"a", cache=dict(cache_dir=str(cache/"cache")), data=dict(batch_size=2))).make_loader()
    batches = [{k: b[k] for k in ("pixel_latent", "control_latent", "prompt_embed", "prompt_embeds_mask")} for b in own]
    rows = drawn(root, tmp_path/"b", 2, batches, cache=dict(cache_dir=str(cache/"cache")))
    assert len(rows) == 10 and distinct([e[:, :, :4, :4] for *_, e, _ in rows]) and len({s for *_, s in rows}) == 10


def test_the_shift_is_the_samplers_for_the_packed_tokens(world, tmp_path):
    "Levels as the scheduler would shift them for an image of this size, for small and large images."
    trainer = QwenImageEditTrainer(settings(world[0], tmp_path, train=dict(timestep_sampling="shift", continuous_timesteps=True)))
    scheduler = trainer.components.get("scheduler")
    means = []
    for h, w in ((16, 24), (64, 48), (128, 128)):
        batch, seeds = dict(pixel_latent=torch.zeros(2, 16, 1, h, w)), [3, 4]
        got = sample_noise_and_sigmas(batch, seeds, trainer.config.train, scheduler.config)
        plain = flow.sample_sigmas(seeds, "uniform", steps=None)
        c = scheduler.config
        mu = calculate_shift((h // 2) * (w // 2), c["base_image_seq_len"], c["max_image_seq_len"], c["base_shift"], c["max_shift"])
        torch.testing.assert_close(got.sigmas, scheduler._time_shift_exponential(mu, 1.0, plain))
        means.append(got.sigmas.mean().item())
    assert means == sorted(set(means)), "larger images, more noise"


def test_the_settings_of_the_noise_levels_reach_the_draws(world, tmp_path):
    "Mean and deviation of logits, the fixed shift, and 1000 or continuous levels, each as configured."
    def drawn(**train):
        trainer = QwenImageEditTrainer(settings(world[0], tmp_path, train=train))
        return sample_noise_and_sigmas(dict(pixel_latent=torch.zeros(400, 16, 1, 2, 2)), range(400), trainer.config.train, trainer.components.get("scheduler").config).sigmas.double()
    logits = torch.logit(drawn(timestep_sampling="logit_normal", logit_mean=1.5, logit_std=0.3, continuous_timesteps=True))
    assert logits.mean().item() == pytest.approx(1.5, abs=0.06) and logits.std().item() == pytest.approx(0.3, abs=0.04)
    plain = drawn(timestep_sampling="uniform", continuous_timesteps=True)
    for shift in (2., 6.): torch.testing.assert_close(drawn(timestep_sampling="fixed_shift", timestep_shift=shift, continuous_timesteps=True), shift * plain / (1 + (shift - 1) * plain), rtol=1e-5, atol=1e-6)
    rounded = drawn(timestep_sampling="uniform")
    assert torch.equal((rounded * 1000).round() / 1000, (rounded * 1e6).round() / 1e6) and 0 <= (rounded - plain).min() and (rounded - plain).max() <= 1e-3


def test_a_step_does_not_depend_on_how_its_samples_are_divided(pairs, tmp_path):
    "Three samples in one batch, in two batches of different sizes, and one by one."
    root, found = pairs(((48, 32),) * 3, caption=["invert", "invert it all", "x"]), []
    for size, n in ((3, 1), (2, 2), (1, 3)):
        trainer = QwenImageEditTrainer(settings(root, tmp_path/str(n), data=dict(batch_size=size, caption_dropout_rate=0.), cache=dict(cache_dir=str(tmp_path/"cache")),
                                                train=dict(max_train_steps=1, gradient_accumulation_steps=n)))
        trainer.fit()
        found.append([float(trainer.state.loss), float(trainer.state.grad_norm), *(float(p.grad.norm()) for p in lora_parameters(trainer.transformer))])
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-6) and found[2] == pytest.approx(found[0], rel=1e-3, abs=1e-6)


def test_each_step_drops_other_units_and_a_resumed_run_the_same(world, tmp_path):
    "The masks of the adapters' dropout."
    root, cache = world
    def masks(out, **train):
        seen = []
        def look(t):
            found = []
            def note(module, args, result): found.append(result.detach() == 0)
            handle = next(m for m in t.transformer.modules() if isinstance(m, torch.nn.Dropout) and m.p).register_forward_hook(note)
            seen.append((found, handle))
        class Watching(QwenImageEditTrainer):
            def training_step(self, batch):
                look(self)
                try: return super().training_step(batch)
                finally: seen[-1][1].remove()
        Watching(settings(root, out, data=dict(shuffle=False, batch_size=1), model=dict(lora=dict(r=4, lora_dropout=0.5)), cache=dict(cache_dir=str(cache/"cache")),
                          train=dict(max_train_steps=4, save_steps=2, gradient_checkpointing=False) | train)).fit()
        return [found[0] for found, _ in seen]
    whole = masks(tmp_path/"whole")
    masks(tmp_path/"half", max_train_steps=2)
    assert distinct(whole) and all(0.3 < m.float().mean() < 0.7 for m in whole)
    again = masks(tmp_path/"half", resume_checkpoint="latest")
    assert len(again) == 2 and all(torch.equal(a, b) for a, b in zip(again, whole[2:]))


@pytest.mark.parametrize("limit", [0.01, 0])
def test_gradients_are_clipped_at_their_norm(limit, world, tmp_path):
    norms = []
    def look(t):
        params = [p for g in t.optimizer.param_groups for p in g["params"]]
        norms.append((float(t.state.grad_norm), float(torch.nn.utils.get_total_norm([p.grad for p in params]))))
    trainer = QwenImageEditTrainer(settings(world[0], tmp_path, train=dict(max_grad_norm=limit, max_train_steps=2), cache=dict(cache_dir=str(world[1]/"cache"))), callbacks=[OnStep(look)])
    trainer.fit()
    for before, after in norms:
        assert before > 0.02 and after == pytest.approx(limit or before, rel=1e-3), "what is stepped with; the norm reported is that before"


def test_a_resumed_run_continues_torchs_generator(world, tmp_path):
    "A training step of one's own may draw from it."
    root, cache = world
    def run(out, stop=None, **train):
        numbers = []
        class Drawing(QwenImageEditTrainer):
            def training_step(self, batch):
                numbers.append(torch.rand(()).item())
                return super().training_step(batch)
        config = settings(root, out, train=dict(max_train_steps=4, save_steps=1) | train, cache=dict(cache_dir=str(cache/"cache")))
        Drawing(config, callbacks=[StopAt(stop)]).fit()
        return numbers
    torch.manual_seed(5)
    whole = run(tmp_path/"a")
    torch.manual_seed(5)
    first = run(tmp_path/"b", stop=2)
    torch.manual_seed(99)
    assert len(set(whole)) == 4 and [*first, *run(tmp_path/"b", resume_checkpoint="latest")] == whole
