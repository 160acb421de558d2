"""The modulation table compared with the layers that it replaces."""
import itertools, shutil

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image
from torch.testing import assert_close

from qie_nb.cache import EmbeddingCacheManager
from qie_nb.config import LoraSection
from qie_nb.lora.adapters import add_lora
from qie_nb.models import loading, modulation
from qie_nb.models.flow_matching import sample_sigmas
from qie_nb.models.modulation import ModulationTable, model_timesteps, training_times, use_modulation_table
from qie_nb.planning.memory import memory_query, model_facts
from qie_nb.sampling.denoising import sampling_schedule
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from helpers import adapters_close, close_images, interrupted, modulation_reads, on_call, random_lora, settings, slow_except, weekly

FOLDER, TIMES = tiny_folder("v1")/"transformer", (0.1, 0.5)


def trainer(root, tmp_path, name, variant="2511", train={}, **sections):
    return QwenImageEditTrainer(settings(root, tmp_path, variant, train=dict(output_dir=str(tmp_path/name)) | train, **sections))


def predicted(t, steps=2): return t.predict(Image.new("RGB", (64, 48), "red"), "make it blue", num_inference_steps=steps, height=48, width=64)


def table_for(folder, times, dtype=torch.float32, cache=None):
    table = ModulationTable("a digest", dtype, 2, folder, cache)
    table.make(tuple(sorted(set(times))))
    return table


def transformers(variant, times):
    "One with its modulation layers, one on a table, with the same adapter."
    folder, out = tiny_folder(variant)/"transformer", []
    for on in (False, True):
        tr = QwenImageTransformer2DModel.from_pretrained(folder)
        if on: use_modulation_table(tr, table_for(folder, model_timesteps([0., *times], torch.float32)))
        out.append(random_lora(add_lora(tr, LoraSection(r=4, target_modules="all_linear")), 0.05))
    return out


def call(tr, timesteps, mask):
    rng, n = torch.Generator().manual_seed(1), len(timesteps)
    x, text = (torch.randn(n, k, 64, generator=rng) for k in (24 + 16 + 12, 5))
    return tr(x, text, mask, torch.tensor(timesteps) / 1000, [[(1, 4, 6), (1, 4, 4), (1, 2, 6)]] * n, return_dict=False)[0]


def gradients(tr, loss):
    for p in tr.parameters(): p.grad = None
    loss.backward()
    return {n: p.grad.clone() for n, p in tr.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("variant, checkpointing", slow_except([("v1", True), ("2511", False)], [*itertools.product(("v1", "2509", "2511"), (True, False))]))
def test_outputs_and_gradients_are_those_of_the_layers(variant, checkpointing):
    times = [20., 731., 1000.]
    plain, ours = transformers(variant, times)
    if checkpointing: plain.enable_gradient_checkpointing(), ours.enable_gradient_checkpointing()
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] * 4 + [False]])
    a, b = (call(tr, times, mask) for tr in (plain, ours))
    assert (a - b).abs().max() <= 1e-5 * a.abs().max()
    ga, gb = gradients(plain, a.square().mean()), gradients(ours, b.square().mean())
    assert ga.keys() == gb.keys() and len(ga) > 20
    for n in ga: assert (ga[n] - gb[n]).norm() <= 3e-5 * ga[n].norm(), n


@pytest.mark.parametrize("variant", slow_except(["2511"], ["2511", "v1"]))
def test_bfloat16_rows_differ_from_the_layers_by_one_rounding(variant): # training in bfloat16: test_main_job.py
    folder, times = tiny_folder(variant)/"transformer", model_timesteps([20., 731., 1000.], torch.bfloat16)
    layers = QwenImageTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    rows = table_for(folder, times, torch.bfloat16).rows(times).float()
    temb = layers.time_text_embed(torch.tensor(times).bfloat16(), torch.empty(0, dtype=torch.bfloat16))
    for n, block in enumerate(layers.transformer_blocks):
        own = torch.cat([block.img_mod(temb), block.txt_mod(temb)], 1).float().view(3, 12, -1)
        assert ((own - rows[:, 12 * n:12 * n + 12]).abs() <= 2**-7 * own.abs() + 1e-30).all()


def test_every_timestep_of_training_has_a_row():
    for dtype in (torch.float32, torch.bfloat16):
        times = {t for how in ("uniform", "logit_normal", "shift") for t in model_timesteps(sample_sigmas(range(400), how, 0.9) * 1000, dtype)}
        assert times <= set(training_times(dtype))


def test_other_timesteps_get_the_nearest_row_with_one_message(capsys):
    table = table_for(FOLDER, TIMES)
    assert torch.equal(table.rows([0.5 + 1e-8]), table.rows([0.5])) and "is not in the modulation table" not in capsys.readouterr().out, "rounding is not reported"
    assert torch.equal(table.rows([0.44]), table.rows([0.5])) and torch.equal(table.rows([0.2]), table.rows([0.1]))
    said, = (line for line in capsys.readouterr().out.splitlines() if line.startswith("timestep "))
    assert said.startswith("timestep 440 is not in the modulation table; the nearest, 500, is used")


@pytest.mark.slow
@pytest.mark.parametrize("variant, first", [("2511", True), ("v1", False), ("2509", True), weekly("2511", False)])
def test_a_run_may_change_to_the_table_and_back(variant, first, pairs, tmp_path):
    root = pairs()
    def run(name, on, **train):
        return trainer(root, tmp_path, name, variant, train, optimizer=dict(eps=1e-5), model=dict(modulation_table=on)).fit()
    run("across", first, max_train_steps=1, save_steps=1)
    t = run("across", not first, resume_checkpoint="latest", max_train_steps=2)
    assert (t.modulation_table is None) == first
    adapters_close(run("off", False, max_train_steps=2), t, rtol=1e-4)


def test_modulation_weights_are_never_placed(monkeypatch):
    placed = []
    on_call(monkeypatch, loading, "place_tensor", lambda model, name, *a: placed.append(name))
    loading.load_quantized(QwenImageTransformer2DModel, FOLDER, prepare=lambda model: use_modulation_table(model, ModulationTable("", torch.float32, 2)))
    assert placed and not [n for n in placed if "_mod." in n]


# --- in the cache
@pytest.fixture
def computed(monkeypatch):
    "Blocks whose rows were computed."
    blocks = []
    on_call(monkeypatch, modulation, "block_rows", lambda weights, block, *a: blocks.append(block))
    return blocks


@pytest.mark.slow
def test_a_table_is_computed_once(pairs, tmp_path, computed):
    root = pairs()
    run = lambda name, **cache: trainer(root, tmp_path, name, train=dict(max_train_steps=1), cache=cache).fit()
    run("first")
    assert computed == [0, 1] # for timestep 0 of 2511 and for training's own at once
    run("second")
    EmbeddingCacheManager(tmp_path/"cache").pack(tmp_path/"packed")
    t = run("packed cache", cache_dir=[str(tmp_path/"packed"), str(tmp_path/"fresh")])
    assert computed == [0, 1] and len(t.modulation_table.index) == 1001


def test_each_modulation_weight_is_read_once_for_all_sets(pairs, tmp_path, monkeypatch):
    reads, t = modulation_reads(monkeypatch), trainer(pairs(), tmp_path, "run", model=dict(modulation_table_steps=[4]), train=dict(max_train_steps=1))
    t.cache_embeddings()
    assert reads and len(set(reads)) == len(reads)
    tables = [table_for(FOLDER, times) for times in ((0.,), TIMES)] # each alone gives the same rows
    both = ModulationTable("", torch.float32, 2, FOLDER)
    both.make_sets([(0.,), TIMES])
    for alone, times in zip(tables, ((0.,), TIMES)): assert_close(both.rows(times), alone.rows(times))


@pytest.fixture
def again(tmp_path): return lambda: table_for(FOLDER, TIMES, cache=EmbeddingCacheManager(tmp_path))


@pytest.mark.parametrize("damage", [lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:], lambda data: data[:-5], None], ids=["flipped", "truncated", "deleted"])
def test_only_a_damaged_entry_is_computed_again(damage, tmp_path, computed, again):
    good = again().rows(TIMES)
    file = next(tmp_path.glob("modulation/*/*.safetensors"))
    file.write_bytes(damage(file.read_bytes())) if damage else file.unlink()
    computed.clear()
    assert_close(again().rows(TIMES), good, rtol=1e-4, atol=1e-5)
    assert len(computed) == 1 and len([*tmp_path.glob("quarantine/*.safetensors")]) == bool(damage)
    computed.clear()
    again()
    assert not computed


def test_an_interrupted_table_continues(computed, again):
    with interrupted(modulation, "block_rows", 2): again()
    assert computed == [0]
    again()
    assert computed == [0, 1]


def test_weights_dtype_block_and_times_are_part_of_the_key():
    tables = [ModulationTable(base, dtype, 2) for base, dtype in (("a", torch.float32), ("b", torch.float32), ("a", torch.bfloat16))]
    assert len({e.key for t in tables for times in ((0.1,), (0.1, 0.2)) for e in t.entries(times)}) == 12


def test_the_cache_is_enough_without_weights(tmp_path, again):
    made, bare = again(), ModulationTable("a digest", torch.float32, 2, None, EmbeddingCacheManager(tmp_path))
    assert bare.make(TIMES) == 0 and torch.equal(bare.rows(TIMES), made.rows(TIMES))
    bare.ensure((0.3,)) # cannot be computed: the nearest row will be used
    with pytest.raises(ValueError, match="no rows for 1 timesteps and no weights to compute them; attach the whole transformer"): bare.make((0.3,))


# --- with and without
@pytest.mark.slow
def test_an_adapter_on_the_modulation_needs_the_layers(pairs, tmp_path, capsys):
    root = pairs()
    make = lambda name, **model: trainer(root, tmp_path, name, train=dict(max_train_steps=1), model=model)
    for target in (["linear_2"], r".*_mod\.1"):
        t = make("refused", lora=dict(r=2, target_modules=target)).set_lora()
        assert t.modulation_table is None and "no modulation table: `model.lora.target_modules` names " in capsys.readouterr().out
    lora = make("save", lora=dict(r=2, target_modules=["to_q", "img_mod.1"])).fit().save_lora(tmp_path/"lora")
    training = make("plain").fit()
    plain = training.save_lora(tmp_path/"plain_lora")
    with pytest.raises(ValueError, match="the adapter has .*img_mod.*has only the table"): training.load_lora(lora, "second")
    assert list(training.active_adapters()) == ["default"]
    on, alone = (make(name, modulation_table=True) for name in ("on", "alone"))
    on.load_loras([dict(path=str(plain), name="first")])
    assert on.modulation_table is not None
    without = make("without", modulation_table=False)
    for t in (on, alone, without): t.load_lora(lora, "second")
    assert on.modulation_table is alone.modulation_table is None
    assert set(on.transformer.peft_config) == {"first", "second"} and list(on.active_adapters()) == ["second"]
    assert close_images(predicted(on), predicted(without))
    assert make("start", lora=dict(r=2, pretrained_weight=str(lora))).set_lora().modulation_table is None


def wider(tmp_path): # 256 channels and 4 blocks: a float32 table takes 37 MB more than the layers
    shutil.copytree(tiny_folder("2511"), tmp_path/"wider")
    shutil.rmtree(tmp_path/"wider/transformer")
    QwenImageTransformer2DModel(num_layers=4, attention_head_dim=64, num_attention_heads=4, joint_attention_dim=64, axes_dims_rope=(4, 30, 30),
                                zero_cond_t=True).save_pretrained(tmp_path/"wider/transformer")
    return str(tmp_path/"wider")


@pytest.mark.slow
@pytest.mark.parametrize("setting, precision, table", [("auto", "no", False), (True, "no", True), ("auto", "bf16", True)])
def test_auto_keeps_the_layers_where_a_table_is_larger(pairs, tmp_path, setting, precision, table):
    t = trainer(pairs(), tmp_path, "run", model=dict(pretrained_model_name_or_path=wider(tmp_path), modulation_table=setting), train=dict(mixed_precision=precision))
    query = memory_query(t.config, model_facts(t.config.model.pretrained_model_name_or_path)[0])
    t.cache_embeddings()
    cached = any((tmp_path/"cache"/"modulation").rglob("*.safetensors"))
    t.set_lora()
    assert (query.table, cached, t.modulation_table is not None) == (table,) * 3


@pytest.mark.slow
def test_predict_computes_the_rows_of_its_schedule(pairs, tmp_path, capsys, computed):
    root = pairs()
    t, off = trainer(root, tmp_path, "on", train=dict(max_train_steps=2)).fit(), trainer(root, tmp_path, "off")
    off.load_lora(t.save_lora(tmp_path/"lora"))
    want, computed[:] = predicted(off, 3), []
    assert close_images(predicted(t, 3), want) and computed == [0, 1]
    predicted(t, 3)
    assert computed == [0, 1] and "nearest" not in capsys.readouterr().out # a copy without modulation layers: test_prequantize.py


def test_precompute_makes_the_table_and_the_configured_schedules(pairs, tmp_path, computed):
    root = pairs()
    make = lambda: trainer(root, tmp_path, "out", model=dict(modulation_table_steps=[3, 5]))
    table = (t := make()).cache_modulation()
    for steps in (3, 5):
        schedule = sampling_schedule(t.components.get("scheduler"), steps, 4 * 4)
        assert not table.missing(model_timesteps(schedule.timesteps, torch.float32))
    assert computed and "transformer" not in t.components.built
    computed.clear()
    make().cache_modulation()
    assert not computed


def test_continuous_timesteps_use_the_nearest_row_with_one_message(pairs, tmp_path, capsys):
    trainer(pairs(), tmp_path, "out", train=dict(continuous_timesteps=True, max_train_steps=2)).fit()
    out = capsys.readouterr().out
    assert out.count("nearest of the modulation table's 1001 timesteps") == 1 and "is not in the modulation table" not in out
    assert any(not (s * 1000).is_integer() for s in sample_sigmas(range(9), steps=None).tolist())
