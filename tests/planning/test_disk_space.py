"""The plan of disk use: agrees with what is written, and refuses a run or a cache that would not fit."""
import os
from dataclasses import replace

import pytest
import torch

from qie_nb.config import make_config
from qie_nb.core.environment import SESSION_QUOTA, Environment, used_bytes
from qie_nb.core.files import DiskFull
from qie_nb.planning import disk_space as disk
from qie_nb.planning.memory import memory_query, model_facts
from qie_nb.trainer import QwenImageEditTrainer

from helpers import settings

REAL = dict(model=dict(pretrained_model_name_or_path="Qwen/Qwen-Image-Edit-2511"))


@pytest.fixture
def quota(monkeypatch, tmp_path):
    "Sets the quota of the folder that a run writes to."
    def at(size):
        for module in ("planning.disk_space", "training.resume", "encoding.precompute"):
            monkeypatch.setattr(f"qie_nb.{module}.detect_environment", lambda *a, **kw: Environment("kaggle", working=tmp_path, quota=size))
    return at


def test_fit_refuses_checkpoints_that_do_not_fit(trained_run, tmp_path, quota, built):
    quota(3_000_000)
    make = lambda keep: QwenImageEditTrainer(trained_run.settings(tmp_path, train=dict(keep_checkpoints=keep, num_epochs=keep, eval_steps=None, val_fraction=0)))
    with pytest.raises(DiskFull, match=r"quota 0\.003 GB: .*set `train.keep_checkpoints` 1 .*Nothing was written"):
        make(100).fit()
    assert not (tmp_path/"checkpoints/latest").exists() and "QwenImageTransformer2DModel" not in built
    assert make(1).fit().global_step == 5


def test_precompute_refuses_a_cache_beyond_the_quota(trained_run, tmp_path, quota):
    quota(100_000)
    config = trained_run.settings(tmp_path, cache=dict(cache_dir=str(tmp_path/"cache")))
    with pytest.raises(DiskFull, match="Nothing was written"): QwenImageEditTrainer(config).cache_embeddings()
    assert used_bytes(tmp_path) < 50_000


def test_plan_agrees_with_what_is_written(trained_run, tmp_path):
    c = make_config(trained_run.settings(tmp_path, cache=dict(cache_dir=str(tmp_path/"cache"))))
    plan = disk.disk_plan(c, Environment("script", working=tmp_path))
    entries = sum(i.bytes for i in plan.items if i.what in ("latents", "prompts"))
    table, = (i.bytes for i in plan.items if i.what == "modulation table")
    sizes = {kind: sum(f.stat().st_blocks * 512 for f in (trained_run.cache/kind).rglob("*.safetensors")) for kind in os.listdir(trained_run.cache)}
    modulation = sizes.pop("modulation")
    assert 0.8 < table / modulation < 1.25 and 0.8 < entries / sum(sizes.values()) < 1.3, (table, modulation, entries, sizes)
    query = memory_query(c, model_facts(c.model.pretrained_model_name_or_path)[0])
    extra = disk.checkpoint_bytes(query) - used_bytes(trained_run.output/"checkpoints/step_00000002")
    assert 0 <= extra < 110_000, "names and digests are counted as at least 60 kB"
    assert plan.bytes("downloads") == 0 and plan.fits()


def test_existing_files_are_not_counted_again(trained_run, tmp_path):
    def planned(output, *cache):
        config = trained_run.settings(output, cache=dict(cache_dir=[str(c) for c in cache]))
        return {i.what: i.bytes for i in disk.disk_plan(config, Environment("script", working=tmp_path)).items}
    done, anew = planned(trained_run.output, trained_run.cache), planned(tmp_path, tmp_path/"cache")
    assert all(done[what] < 0.3 * anew[what] for what in ("latents", "prompts", "modulation table")) and done["checkpoints"] < anew["checkpoints"]
    assert planned(tmp_path, trained_run.cache, tmp_path/"cache")["modulation table"] == done["modulation table"]
    with pytest.MonkeyPatch.context() as mp: # float32 rows of an older version
        mp.setattr(disk, "row_dtype", lambda *_: torch.bfloat16)
        bf16 = [planned(tmp_path, *c, tmp_path/"cache")["modulation table"] for c in ([], [trained_run.cache])]
    assert 0.9 * bf16[0] < bf16[1] < 0.3 * anew["modulation table"]


def test_cache_and_checkpoints_share_the_quota(tmp_path):
    real = settings(tmp_path, tmp_path, data=dict(image_size=[512, 512]), train=dict(keep_checkpoints=50)) | REAL
    place = Environment("kaggle", working=tmp_path, quota=20_000_000_000, env=dict(HOME=str(tmp_path.parent)))
    roomy = replace(disk.disk_plan(real, place, pairs=1000), free=lambda folder: 10**12)
    cache, kept = roomy.bytes("cache"), roomy.bytes("checkpoints")
    assert max(cache, kept) < 20e9 < cache + kept or roomy.fits()
    tight = replace(roomy, environment=replace(place, quota=max(cache, kept) + 10_000_000))
    assert not tight.fits() and "`train.keep_checkpoints` 1" in tight.problems()[0] and repr(tight).endswith(tight.problems()[0]) and "does not fit" in tight._repr_html_()


def test_what_is_planned_for_checkpoints(tmp_path):
    "One more than are kept, because the new one is complete before an old one is removed; one more if the best is kept."
    def planned(**train):
        c = make_config(settings(tmp_path, tmp_path, train=train) | REAL)
        query = memory_query(c, model_facts("2511")[0])
        return disk.run_items(c, query)[0].bytes / disk.checkpoint_bytes(query)
    assert planned(keep_checkpoints=2, val_fraction=0) == 3 and planned(keep_checkpoints=5, val_fraction=0.1) == 7 and planned(keep_checkpoints=1, val_path="x", val_fraction=0) == 3


def test_a_disk_that_is_small_but_large_enough_is_not_refused(trained_run, tmp_path, quota, capsys):
    "Images are only estimated, so they are a note; checkpoints are counted by what a run of this length saves."
    def trainer(folder, **train):
        return QwenImageEditTrainer(trained_run.settings(folder, train=dict(num_epochs=1, max_train_steps=2, eval_steps=None, val_fraction=0) | train))
    trainer(tmp_path/"roomy", save_interval=0, save_steps=None).fit()
    used = used_bytes(tmp_path/"roomy"/"checkpoints")
    quota(used_bytes(tmp_path) + 2 * used + 200_000)
    run = trainer(tmp_path/"small", save_interval=0, save_steps=None)
    assert run.fit().global_step == 2
    assert "logs and images may take" in capsys.readouterr().out
    with pytest.raises(DiskFull, match="checkpoints .* are free"): trainer(tmp_path/"large", save_steps=1, max_train_steps=900, keep_checkpoints=40).fit()


def test_validation_pairs_need_room_too(trained_run, tmp_path):
    def planned(**train):
        c = make_config(trained_run.settings(tmp_path, cache=dict(cache_dir=str(tmp_path/"cache")), train=train))
        return {i.what: i.bytes for i in disk.disk_plan(c, Environment("script", working=tmp_path)).items}
    alone, both = planned(), planned(val_path=make_config(trained_run.settings(tmp_path)).data.dataset_path, val_fraction=0)
    assert both["latents"] == 2 * alone["latents"] and both["prompts"] == 2 * alone["prompts"], "as many pairs again, counted without looking for equal ones"


def test_a_quota_is_partly_used(tmp_path):
    plan = disk.DiskPlan([disk.Item("a", 60_000, tmp_path/"a", "")], Environment("kaggle", working=tmp_path, quota=100_000), free=lambda folder: 10**9)
    for name, size, fits in (("output.bin", 20_000, True), ("more.bin", 30_000, False)):
        (tmp_path/name).write_bytes(bytes(size))
        assert min(room for _, _, room, _ in plan.limits()) == 100_000 - used_bytes(tmp_path) and plan.fits() == fits


def test_folders_on_one_disk_share_it(tmp_path):
    item = lambda what, size: disk.Item(what, size, tmp_path/what, "")
    plan = disk.DiskPlan([item("a", 60), item("b", 60)], Environment("script", working=tmp_path), free=lambda folder: 100)
    (what, need, room, _), = plan.limits()
    assert (need, room) == (120, 100) and not plan.fits() and replace(plan, free=lambda folder: 120).fits()


def test_only_missing_files_are_downloaded(tmp_path):
    bytes_of = lambda: {i.what: i.bytes for i in disk.disk_plan(REAL, Environment("script", env=dict(HF_HOME=str(tmp_path))), pairs=1).items if i.group == "downloads"}
    before = bytes_of()
    assert set(before) == {"download transformer", "download text_encoder", "download vae"} and before["download transformer"] == pytest.approx(40.86e9, rel=1e-3)
    vae = tmp_path/"hub/models--Qwen--Qwen-Image-Edit-2511/snapshots/abc/vae"
    vae.mkdir(parents=True)
    (vae/"m.safetensors").write_bytes(bytes(1000))
    assert before["download vae"] - bytes_of()["download vae"] == 1000


def test_a_session_of_kaggle_keeps_quantized_copies_and_one_file_at_a_time(tmp_path):
    "The whole model fits by 0.3 GB; with copies, half of what a session may write stays free."
    place = Environment("kaggle", root=tmp_path, working=tmp_path/"working", temp=tmp_path/"temp",
                        session_quota=SESSION_QUOTA, env=dict(HOME=str(tmp_path/"home")))
    data = dict(image_size=[512, 512], control_area=512 * 512)

    def planned(**model):
        "What is downloaded, and the row of the session."
        four = dict(quantize="nf4", text_encoder_quantize="nf4")
        run = settings(tmp_path, tmp_path/"working", data=data) | dict(model=REAL["model"] | four | model)
        plan = disk.disk_plan(run, place, pairs=50)
        session = next(row for row in plan.limits() if row[0] == "this session, quota 61.8 GB")
        return {i.what: i.bytes for i in plan.items if i.group == "downloads"}, session

    copies, (_, need, room, _) = planned()
    assert set(copies) == {"download vae", "quantized text_encoder", "quantized transformer", "largest file"}
    assert need < room / 2 and copies["largest file"] == 9_990_000_000
    whole, (_, need, room, _) = planned(delete_downloaded_shards=False)
    assert sum(whole.values()) > 57e9 and need > 0.95 * room
    half, _ = planned(text_encoder_quantize="none")
    assert {"download text_encoder", "quantized transformer"} <= set(half)
    copy = tmp_path/"home/.cache/qie_nb/models/Qwen--Qwen-Image-Edit-2511@0123/transformer-nf4-float32-table"
    (copy/"transformer").mkdir(parents=True)
    made, _ = planned()
    assert set(made) == {"download vae", "quantized text_encoder", "largest file"}
    assert made["largest file"] == 4_970_000_000


def test_a_checkpoint_has_the_mean_of_the_adapter_too(tmp_path):
    def planned(**train):
        c = make_config(settings(tmp_path, tmp_path, train=train) | REAL)
        return disk.checkpoint_bytes(memory_query(c, model_facts("2511")[0]))
    adapter = disk.run_items(make_config(settings(tmp_path, tmp_path) | REAL),
                             memory_query(make_config(REAL), model_facts("2511")[0]))[1].bytes
    assert planned(ema_decay=0.9) - planned() == pytest.approx(adapter, rel=0.02)


def test_a_prompts_shared_part_is_stored_once():
    "Numbers of 4 bytes and width 100, so that headers and whole blocks are small beside them."
    query = replace(memory_query(make_config({}), model_facts("tiny")[0]), text_dim=100, base_bytes=4)
    sample = disk.SampleTokens(target=64, controls=(64,), images=1000, text=50)
    prompts = [disk.sample_bytes(sample, query, share_prefix=share)[1] / 400 for share in (True, False)]
    own = (50 + disk.TEMPLATE) + (1 + disk.TEMPLATE) # tokens of the prompt and of the empty one
    assert prompts == pytest.approx([1000 + own, 2 * 1000 + own], abs=4 * disk.BLOCK / 400)
    with_mask, without = (disk.sample_bytes(sample, query, masks=masks)[0] for masks in (True, False))
    assert with_mask - without == disk.BLOCK, "an edit mask is a byte a latent pixel"


def test_images_of_an_evaluation_are_a_part_of_the_logs():
    def log_bytes(**train):
        sections = dict(data=dict(image_size=[96, 96]), train=dict(max_train_steps=80, eval_steps=20) | train)
        return disk.log_bytes(make_config(sections | dict(logging=dict(log_images=False))), pairs=50)
    without, two, own = log_bytes(eval_images=0), log_bytes(eval_images=2), log_bytes(
        eval_images=1, samples=[dict(image="a.png", prompt="x")])
    evaluations, pictures = 2 + 80 // 20, 4 # of each image: in the log and in the folder, with its pair
    assert two - without == own - without == 2 * evaluations * pictures * disk.IMAGE * 96 * 96


def test_identity_pairs_need_room_too():
    def latents(**data):
        config = make_config(dict(model=dict(pretrained_model_name_or_path="tiny"), data=data))
        query = memory_query(config, model_facts("tiny")[0])
        samples = [disk.SampleTokens(target=4096, controls=(4096,), images=100, text=10)] * 40
        return next(item.bytes for item in disk.cache_items(config, query, samples) if item.what == "latents")
    plain = latents()
    assert latents(identity_share=0.5) > 1.2 * plain
