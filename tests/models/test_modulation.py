"""The modulation table against the layers that it stands in for: outputs, gradients, runs, memory."""
import gc

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from qie_nb.cache import EmbeddingCacheManager
from qie_nb.training.checkpoint import complete_checkpoints
from qie_nb.config import make_config
from qie_nb.lora.adapters import add_lora, lora_parameters, lora_state
from qie_nb.models.modulation import ModulationTable, model_timesteps, training_times
from qie_nb.models.modulation import use_modulation_table
from qie_nb.models.loading import load_quantized
from qie_nb.tiny.random_models import tiny_folder, tiny_pipeline
from qie_nb.trainer import QwenImageEditTrainer

from helpers import settings, small_areas

VARIANTS = ["v1", "2509", "2511"]


def table_for(folder, times, dtype=torch.float32, cache=None, blocks=2):
    table = ModulationTable("a digest", dtype, blocks, folder, cache)
    table.make(tuple(sorted(set(times))))
    return table


def transformers(variant, times, dtype=torch.float32):
    "One with its modulation layers, one on a table, both with the same adapter that has learnt something."
    folder = tiny_folder(variant)/"transformer"
    out = []
    for on in (False, True):
        tr = QwenImageTransformer2DModel.from_pretrained(folder, torch_dtype=dtype)
        if on: use_modulation_table(tr, table_for(folder, model_timesteps([0., *times], dtype), dtype))
        add_lora(tr, make_config(dict(model=dict(lora=dict(r=4, target_modules="all_linear")))).model.lora)
        rng = torch.Generator().manual_seed(3)
        for n, p in tr.named_parameters():
            if "lora_B" in n: p.data.copy_(torch.randn(p.shape, generator=rng) * 0.05)
        out.append(tr)
    return out


def call(tr, timesteps, dtype=torch.float32, size=(4, 6), controls=((4, 4), (2, 6)), mask=None):
    rng, n = torch.Generator().manual_seed(1), len(timesteps)
    tokens = sum(a * b for a, b in (size, *controls))
    shapes = [[(1, *s) for s in (size, *controls)]] * n
    x, text = (torch.randn(n, k, 64, generator=rng).to(dtype) for k in (tokens, 5))
    return tr(hidden_states=x, encoder_hidden_states=text, encoder_hidden_states_mask=mask, timestep=torch.tensor(timesteps).to(dtype) / 1000, img_shapes=shapes, return_dict=False)[0]


def gradients(tr, loss):
    for p in tr.parameters(): p.grad = None
    loss.backward()
    return {n: p.grad.clone() for n, p in tr.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients_are_those_of_the_layers(variant, checkpointing):
    times = [20., 731., 1000.]
    plain, ours = transformers(variant, times)
    if checkpointing: plain.enable_gradient_checkpointing(), ours.enable_gradient_checkpointing()
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] * 4 + [False]])
    a, b = (call(tr, times, mask=mask) for tr in (plain, ours))
    assert (a - b).abs().max() <= 1e-6 * a.abs().max()
    ga, gb = gradients(plain, a.square().mean()), gradients(ours, b.square().mean())
    assert ga.keys() == gb.keys() and len(ga) > 20
    whole = lambda g: torch.cat([x.flatten() for x in g.values()])
    assert (whole(ga) - whole(gb)).norm() <= 1e-6 * whole(ga).norm()
    for n in ga: assert (ga[n] - gb[n]).norm() <= 3e-6 * ga[n].norm(), n


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_bfloat16_the_rows_are_the_layers_own_to_one_rounding(variant):
    times = [20., 731., 1000.]
    plain, ours = transformers(variant, times, torch.bfloat16)
    a, b = (call(tr, times, torch.bfloat16).float() for tr in (plain, ours))
    assert (a - b).abs().max() <= 2**-7 * a.abs().max()
    temb = plain.time_text_embed(torch.tensor(model_timesteps(times, torch.bfloat16)).bfloat16(), torch.empty(0, dtype=torch.bfloat16))
    rows = ours.lookup.table.rows(model_timesteps(times, torch.bfloat16)).float()
    for n, block in enumerate(plain.transformer_blocks):
        own = torch.cat([block.img_mod(temb), block.txt_mod(temb)], 1).float().view(3, 12, -1)
        mine = rows[:, 12 * n:12 * n + 12]
        assert ((own - mine).abs() <= 2**-7 * own.abs() + 1e-30).all()


def test_two_forwards_before_a_backward_keep_their_own_rows():
    plain, ours = transformers("2511", [20., 731.])
    for tr in (plain, ours): tr.enable_gradient_checkpointing()
    ga, gb = (gradients(tr, call(tr, [20.]).square().mean() + call(tr, [731.]).square().mean()) for tr in (plain, ours))
    for n in ga: torch.testing.assert_close(gb[n], ga[n], rtol=1e-4, atol=1e-6)


def test_a_pipeline_of_diffusers_runs_on_it(tmp_path):
    from PIL import Image
    import numpy as np
    for variant in ("v1", "2511"):
        folder, pipe = tiny_folder(variant)/"transformer", tiny_pipeline(variant)
        run = lambda: pipe(Image.new("RGB", (64, 48), "red"), "make it blue", num_inference_steps=3, height=48, width=64, true_cfg_scale=4., negative_prompt=" ", generator=torch.Generator().manual_seed(0), output_type="np").images[0]
        with small_areas(variant, 64 * 64, 56 * 56):
            seen = []
            hook = pipe.transformer.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["timestep"][0].item()), with_kwargs=True)
            plain = run()
            hook.remove()
            use_modulation_table(pipe.transformer, table_for(folder, [0., *seen]))
            assert np.abs(run() - plain).max() < 1e-5


def test_every_timestep_of_training_has_its_row(pairs, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        table = table_for(tiny_folder("v1")/"transformer", training_times(dtype), dtype)
        for how in ("uniform", "logit_normal", "shift"):
            from qie_nb.models.flow_matching import sample_sigmas
            assert not table.missing(model_timesteps(sample_sigmas(range(400), how, 0.9) * 1000, dtype))


def test_another_schedule_snaps_to_the_nearest_row_and_says_so_once(capsys):
    folder = tiny_folder("v1")/"transformer"
    table = table_for(folder, [0.1, 0.5])
    a, b = table.rows([0.44]), table.rows([0.44])
    assert torch.equal(a, table.rows([0.5])) and torch.equal(a, b) and torch.equal(table.rows([0.2]), table.rows([0.1]))
    out = capsys.readouterr().out
    assert out == "timestep 440 is not in the modulation table; the nearest, 500, is used, and so for every timestep that is not among its 2\n"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_is_the_same_with_and_without_and_across_a_resume(variant, pairs, tmp_path):
    root, states = pairs(), {}
    def make(name, on, **train):
        c = settings(root, tmp_path, variant, train=dict(output_dir=str(tmp_path/name), num_epochs=2, save_interval=1, **train), optimizer=dict(eps=1e-5))
        c["model"] = c["model"] | dict(modulation_table=on)
        return QwenImageEditTrainer(c)
    for name, first, second in (("on", True, True), ("off", False, False), ("across", True, False), ("back", False, True)):
        make(name, first, max_train_steps=2).fit()
        t = make(name, second, resume_checkpoint="latest").fit()
        assert (t.modulation_table is not None) == second
        states[name] = lora_state(t.transformer)
    for name in ("on", "across", "back"):
        for k, v in states["off"].items(): torch.testing.assert_close(states[name][k], v, rtol=1e-4, atol=1e-6)


def real_proportions(folder):
    "A transformer of one million parameters in which modulation has the published model's share."
    torch.manual_seed(0)
    tr = QwenImageTransformer2DModel(num_layers=12, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=64, axes_dims_rope=(4, 6, 6))
    tr.save_pretrained(folder, max_shard_size="500KB")
    return tr


class Alive:
    "Bytes of tensors that are in memory at once, looked at after every n-th call of some functions; tensors over mapped files and positions (complex, the same for a model of any width) are not counted."
    def __init__(self, monkeypatch):
        self.peak, self.calls, self.mapped, self.mp = 0, 0, set(), monkeypatch
        self.before = self.look()
        from qie_nb import cache
        real = cache.mapped
        def mapped(*a):
            out = real(*a)
            self.mapped.add(out.untyped_storage().data_ptr())
            return out
        monkeypatch.setattr(cache, "mapped", mapped)

    def look(self):
        storages = {s.data_ptr(): s.nbytes() for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter) and not o.is_meta and not o.is_complex() for s in [o.untyped_storage()]}
        return sum(n for p, n in storages.items() if p not in self.mapped)

    def watch(self, module, name, every):
        real = getattr(module, name)
        def fn(*a, **kw):
            out = real(*a, **kw)
            self.calls += 1
            if self.calls % every == 0: self.peak = max(self.peak, self.look() - self.before)
            return out
        self.mp.setattr(module, name, fn)


def test_a_third_of_the_model_is_never_in_memory(pairs, tmp_path, monkeypatch):
    import shutil
    from qie_nb.models import modulation
    from qie_nb.models import loading as streaming
    model = tmp_path/"model"
    shutil.copytree(tiny_folder("2511"), model)
    shutil.rmtree(model/"transformer")
    total = 4 * sum(p.numel() for p in real_proportions(model/"transformer").parameters())
    QwenImageEditTrainer(config := settings(pairs(), tmp_path, model=dict(pretrained_model_name_or_path=str(model)))).cache_embeddings()
    gc.collect()
    alive = Alive(monkeypatch)
    alive.watch(modulation, "block_rows", 1), alive.watch(streaming, "place_tensor", 9)
    trainer = QwenImageEditTrainer(config)
    trainer.pick_modulation(), trainer._transformer()
    assert alive.calls > 100 and 0.6 * total < alive.peak <= (2 / 3 + 0.01) * total
    assert sum(p.numel() * p.element_size() for p in trainer.transformer.parameters()) <= (2 / 3 + 0.01) * total
    trainer.fit()
    assert trainer.modulation_table is not None and trainer.global_step == 6


# --- in the cache
@pytest.fixture
def computed(monkeypatch):
    "Blocks whose rows were computed."
    from qie_nb.models import modulation
    real, blocks = modulation.block_rows, []
    def rows(shards, block, *a):
        blocks.append(block)
        return real(shards, block, *a)
    monkeypatch.setattr(modulation, "block_rows", rows)
    return blocks


def test_a_table_is_computed_once(pairs, tmp_path, computed):
    def run(**cache): return QwenImageEditTrainer(settings(pairs(), tmp_path, train=dict(output_dir=str(tmp_path/f"out{len(computed)}{len(cache)}"), max_train_steps=1), cache=cache or dict(cache_dir=str(tmp_path/"cache")))).fit()
    run()
    assert computed == [0, 1] * 2 # timestep 0 of 2511, and training's own
    run()
    assert computed == [0, 1] * 2
    EmbeddingCacheManager(tmp_path/"cache").pack(tmp_path/"packed")
    t = run(cache_dir=[str(tmp_path/"packed"), str(tmp_path/"fresh")])
    assert computed == [0, 1] * 2 and len(t.modulation_table.index) == 1001
    run(use_cache=False)
    assert computed == [0, 1] * 4, "kept in memory alone"


@pytest.mark.parametrize("harm", ["flip", "truncate", "lose"])
def test_a_bad_entry_is_made_again_and_no_other(harm, tmp_path, computed):
    folder, times = tiny_folder("v1")/"transformer", (0.1, 0.5)
    cache = lambda: EmbeddingCacheManager(tmp_path)
    good = table_for(folder, times, cache=cache()).rows(times)
    file = sorted(tmp_path.glob("modulation/*/*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    if harm == "flip": data[-5] ^= 1
    if harm == "truncate": data = data[:-100]
    file.unlink() if harm == "lose" else file.write_bytes(data)
    computed.clear()
    again = table_for(folder, times, cache=cache())
    assert len(computed) == 1 and torch.equal(again.rows(times), good)
    assert len([*tmp_path.glob("quarantine/*.safetensors")]) == (harm != "lose")
    computed.clear()
    table_for(folder, times, cache=cache())
    assert not computed


def test_an_interrupted_table_goes_on_where_it_was(tmp_path, monkeypatch, computed):
    from qie_nb.models import modulation
    folder, times, real = tiny_folder("v1")/"transformer", (0.1, 0.5), modulation.block_rows
    def stop(shards, block, *a):
        if block: raise KeyboardInterrupt
        return real(shards, block, *a)
    with monkeypatch.context() as mp:
        mp.setattr(modulation, "block_rows", stop)
        with pytest.raises(KeyboardInterrupt): table_for(folder, times, cache=EmbeddingCacheManager(tmp_path))
    assert computed == [0]
    table_for(folder, times, cache=EmbeddingCacheManager(tmp_path))
    assert computed == [0, 1]


def test_other_weights_dtypes_and_times_are_other_entries():
    table = ModulationTable("a", torch.float32, 2)
    keys = {t.entries(times)[b].key for t in (table, ModulationTable("b", torch.float32, 2), ModulationTable("a", torch.bfloat16, 2)) for b in (0, 1) for times in ((0.1,), (0.1, 0.2))}
    assert len(keys) == 12


def test_without_weights_what_is_in_the_cache_is_enough(tmp_path):
    folder, times = tiny_folder("v1")/"transformer", (0.1, 0.5)
    made = table_for(folder, times, cache=EmbeddingCacheManager(tmp_path))
    bare = ModulationTable("a digest", torch.float32, 2, None, EmbeddingCacheManager(tmp_path))
    assert bare.make(times) == 0 and torch.equal(bare.rows(times), made.rows(times))
    bare.ensure((0.3,)) # nothing to make it from: the nearest will be taken
    with pytest.raises(ValueError, match="has no rows for 1 timesteps, and the weights to compute them are not here; attach the whole transformer"): bare.make((0.3,))


# --- when there is none
def test_an_adapter_of_the_modulation_has_its_layers(pairs, tmp_path, capsys):
    def trainer(name, **model):
        c = settings(pairs(), tmp_path, train=dict(output_dir=str(tmp_path/name), max_train_steps=1))
        return QwenImageEditTrainer(c | dict(model=c["model"] | model))
    for n, target in enumerate((["img_mod.1"], ["to_q", "txt_mod.1"], ["linear_2"], r".*_mod\.1")):
        t = trainer(str(n), lora=dict(r=2, target_modules=target)).fit()
        assert t.modulation_table is None and "no modulation table: `model.lora.target_modules` names " in capsys.readouterr().out
    lora = trainer("save", lora=dict(r=2, target_modules=["to_q", "img_mod.1"])).fit().save_lora(tmp_path/"lora")
    plain = trainer("plain").fit().save_lora(tmp_path/"plain_lora")
    on = trainer("on", modulation_table=True)
    on.load_loras([dict(path=str(plain), name="first")])
    assert on.modulation_table is not None
    on.load_lora(lora, "second")
    assert on.modulation_table is None and set(on.transformer.peft_config) == {"first", "second"} and list(on.active_adapters()) == ["second"]
    alone = trainer("alone", modulation_table=True)
    alone.load_lora(lora, "second")
    assert alone.modulation_table is None
    from PIL import Image
    ask = lambda t: t.predict(Image.new("RGB", (64, 48), "red"), "make it blue", num_inference_steps=2)
    fresh = trainer("fresh", modulation_table=False)
    fresh.load_lora(lora, "second")
    assert (ask(on) == ask(fresh)).all()
    training = trainer("busy").fit()
    with pytest.raises(ValueError, match="the adapter has .*img_mod.*runs on the modulation table; load the adapter in another trainer"): training.load_lora(lora, "second")
    assert list(training.active_adapters()) == ["default"]
    start = trainer("start", lora=dict(r=2, pretrained_weight=str(lora))).fit()
    assert start.modulation_table is None


def test_predicting_makes_the_rows_of_its_schedule_or_takes_the_nearest(pairs, tmp_path, capsys, computed):
    from PIL import Image
    t = QwenImageEditTrainer(settings(pairs(), tmp_path, train=dict(max_train_steps=2))).fit()
    ask = lambda t, steps=3: t.predict(Image.new("RGB", (64, 48), "red"), "make it blue", num_inference_steps=steps, height=48, width=64)
    off = QwenImageEditTrainer(settings(pairs(), tmp_path))
    off.load_lora(t.save_lora(tmp_path/"lora"))
    want, computed[:] = ask(off).astype(int), []
    assert abs(ask(t).astype(int) - want).max() <= 1 and computed == [0, 1]
    ask(t)
    assert computed == [0, 1] and "nearest" not in capsys.readouterr().out
    t.modulation_table.folder = None # as with a copy that has no modulation layers
    t.modulation_table.cache = None
    ask(t, 4)
    assert "is not in the modulation table" in capsys.readouterr().out


def test_precompute_makes_the_table_and_the_schedules_named(pairs, tmp_path, computed):
    from qie_nb.sampling.denoising import sampling_schedule
    c = settings(pairs(), tmp_path)
    t = QwenImageEditTrainer(c | dict(model=c["model"] | dict(modulation_table_steps=[3, 5])))
    table = t.cache_modulation()
    for tokens in t._target_tokens():
        for steps in (3, 5): assert not table.missing(model_timesteps(sampling_schedule(t.components.get("scheduler"), steps, tokens).timesteps, torch.float32))
    assert "transformer" not in t.components.built
    computed.clear()
    QwenImageEditTrainer(c | dict(model=c["model"] | dict(modulation_table_steps=[3, 5]))).cache_modulation()
    assert not computed


def test_continuous_noise_levels_take_the_nearest_row_and_say_so_once(pairs, tmp_path, capsys):
    t = QwenImageEditTrainer(settings(pairs(), tmp_path, train=dict(continuous_timesteps=True))).fit()
    out = capsys.readouterr().out
    assert out.count("the transformer is told the nearest of the modulation table's 1001 timesteps") == 1 and "is not in the modulation table" not in out
    batch = next(iter(t.make_loader()))
    from qie_nb.training.step import draw
    sigmas = draw(batch, [1, 2], t.config.train, t.components.get("scheduler").config)[1]
    assert (sigmas * 1000 != (sigmas * 1000).round()).any()


@pytest.mark.parametrize("kind", ["qint8", "fp8_storage"])
def test_a_quantized_base_runs_on_it(kind, pairs, tmp_path):
    c = settings(pairs(), tmp_path, train=dict(max_train_steps=2))
    t = QwenImageEditTrainer(c | dict(model=c["model"] | dict(quantize=kind))).fit()
    assert t.modulation_table is not None and torch.isfinite(t.state.loss) and not [n for n, _ in t.transformer.named_parameters() if "_mod." in n]
