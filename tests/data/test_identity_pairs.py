"""Pairs whose image before is also the image after (`data.identity_share`), from the choice to a resumed run."""
import shutil

import pytest
import torch
from PIL import Image

from helpers import settings, write_pairs
from qie_nb.cache import EmbeddingCacheManager
from qie_nb.cli import main
from qie_nb.config import save_config
from qie_nb.data.identity_pairs import KEEP, identity_count, identity_pairs
from qie_nb.data.images import source_digest
from qie_nb.data.samples import find_samples
from qie_nb.planning.disk_space import disk_plan
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.resume import checkpoint_misfit

SIZES = [(48, 32), (32, 48), (64, 32), (48, 48)] * 3 # twelve pairs, few of them square


def trainer_of(root, tmp_path, share=0.25, model=None, **sections):
    "A trainer of a run of a few steps."
    data = dict(identity_share=share, caption_dropout_rate=0., image_size=[48, 48]) | sections.pop("data", {})
    train = dict(max_train_steps=2, val_fraction=0.) | sections.pop("train", {})
    if model is not None:
        sections["model"] = dict(pretrained_model_name_or_path=str(model))
    return QwenImageEditTrainer(settings(root, tmp_path, data=data, train=train, **sections))


def identities(dataset) -> list: # numbers of the samples
    return [i for i, s in enumerate(dataset.samples) if s.id.endswith("/identity")]


@pytest.mark.parametrize("share, pairs, count", [
    (0, 12, 0), (0.25, 12, 4), (0.5, 12, 12), (0.1, 27, 3), (0.01, 12, 1), (0.3, 0, 0)])
def test_a_share_is_of_all_samples(share, pairs, count):
    assert identity_count(pairs, share) == count


def test_equal_images_count_once_and_pairs_without_a_control_not_at_all(tmp_path):
    root = write_pairs(tmp_path/"set", SIZES[:4])
    for name in ("0001.png", "0002.png"):
        shutil.copy(root/"control_images"/"0000.png", root/"control_images"/name)
    (root/"control_images"/"0003.png").unlink()
    samples = find_samples(root, allow_missing_control=True)
    made = identity_pairs(samples, 0.5, seed=0)
    assert [s.id for s in made] == ["0000/identity"]
    assert not identity_pairs(samples, 0.5, seed=0, held_out=[samples[2]]), "its image is held out with another pair"


@pytest.mark.slow
@pytest.mark.parametrize("variant, controls", [("v1", 1), ("2509", 1), ("2509", 2), ("2511", 2)])
def test_the_tensors_are_those_of_such_a_pair_on_disk(variant, controls, tmp_path):
    "The target is the first control, the instruction sees all controls; non-square, too."
    root = write_pairs(tmp_path/"set", SIZES[:3], controls=controls)
    model = tiny_folder(variant, (48*48, 48*48))
    written = shutil.copytree(root, tmp_path/"written")
    for target in (written/"training_images").glob("*.png"):
        shutil.copy(written/"control_images"/target.name, target)
        target.with_suffix(".txt").write_text(KEEP)
    data = {}
    for folder, share in ((root, 0.5), (written, 0.)):
        trainer = trainer_of(folder, tmp_path/folder.name, share, model)
        trainer.cache_embeddings()
        data[share] = trainer.make_loader().dataset
    true = {s.id: data[0.][i] for i, s in enumerate(data[0.].samples)}
    found = identities(data[0.5])
    assert len(found) == 3
    for i in found:
        made = data[0.5][i]
        want = true[made["sample_id"].removesuffix("/identity")]
        assert made["cached"] and want["cached"] and made["prompt"] == KEEP
        for name in ("pixel_latent", "prompt_embed", "control_latent"):
            torch.testing.assert_close(made[name], want[name])


def test_no_trigger_word_and_no_mask(tmp_path):
    root = write_pairs(tmp_path/"set", SIZES[:4])
    (root/"masks").mkdir()
    for i in range(4):
        Image.new("L", SIZES[i], 255).save(root/"masks"/f"{i:04}.png")
    dataset = trainer_of(root, tmp_path, 0.5, data=dict(trigger_word="ohwx", edit_mask="auto")).make_loader().dataset
    for i in identities(dataset):
        assert dataset[i]["prompt"] == KEEP and dataset.samples[i].mask is None
    assert all(s.prompt.startswith("ohwx") for s in dataset.samples if not s.id.endswith("/identity"))


def test_a_held_out_image_is_never_trained_on(tmp_path):
    root = write_pairs(tmp_path/"set", SIZES)
    for share in (0.1, 0.25, 0.5):
        trainer = trainer_of(root, tmp_path, share, train=dict(val_fraction=0.3))
        dataset = trainer.make_loader().dataset
        held = {source_digest(s.controls[0]) for s in trainer.data.validation.samples}
        assert len(held) == 4 and identities(dataset)
        assert not held & {source_digest(s.target) for s in dataset.samples}
        assert not any(s.id.endswith("/identity") for s in trainer.data.validation.samples)
        assert len(trainer.data.samples) == 8, "counted as pairs"


@pytest.mark.slow
def test_precompute_has_all_that_training_reads_and_one_pass_is_taken(tmp_path):
    "Without the encoders nothing could be encoded later; a step takes one forward pass for each sample."
    root = write_pairs(tmp_path/"set", SIZES)
    model = tiny_folder("2511", (48*48, 48*48))
    report = trainer_of(root, tmp_path, 0.25, model).cache_embeddings()
    assert report.samples == 16 and not report.skipped
    bare = tmp_path/"bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("vae", "text_encoder"))
    once = dict(max_train_steps=None, num_epochs=1)
    trainer = trainer_of(root, tmp_path, 0.25, bare, data=dict(batch_size=1), train=once)
    rows = []

    def count(module, given, named, out):
        rows.append(len(named["hidden_states"]))
    trainer._transformer().register_forward_hook(count, with_kwargs=True)
    trainer.fit()
    assert sum(rows) == 16 == trainer.global_step


@pytest.mark.slow
def test_a_broken_image_is_left_out_of_the_choice(tmp_path):
    root = write_pairs(tmp_path/"set", SIZES)
    chosen = identity_pairs(find_samples(root), 0.1, 42)[0]
    content = chosen.target.read_bytes()
    chosen.target.write_bytes(content[:len(content) // 2])
    model = tiny_folder("2511", (48*48, 48*48))
    report = trainer_of(root, tmp_path, 0.1, model, train=dict(seed=42)).cache_embeddings()
    assert [name for name, _ in report.skipped] == [chosen.id.removesuffix("/identity")] and report.encoded == 12
    bare = tmp_path/"bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("vae", "text_encoder"))
    trainer = trainer_of(root, tmp_path, 0.1, bare, train=dict(seed=42))
    dataset = trainer.make_loader().dataset
    assert len(identities(dataset)) == 1 and all(dataset[i]["cached"] for i in range(len(dataset)))


@pytest.mark.slow
def test_cleaning_and_packing_keep_their_entries(tmp_path):
    root = write_pairs(tmp_path/"set", SIZES)
    trainer = trainer_of(root, tmp_path)
    trainer.cache_embeddings()
    trainer.data.open_cache().clear_cache("modulation")
    file = tmp_path/"run.yaml"
    cache = str(tmp_path/"cache")
    save_config(trainer.config, file)
    def entries(folder):
        return {(e.kind, e.key) for e in EmbeddingCacheManager(folder).entries()}
    before = entries(cache)
    assert main(["cache", "gc", cache, "--config", str(file)]) == 0 and entries(cache) == before
    packed = tmp_path/"packed"
    assert main(["cache", "pack", cache, "--config", str(file), "--out", str(packed)]) == 0
    assert entries(packed) == before
    assert main(["cache", "gc", cache, "--config", str(file), "data.identity_share=0"]) == 0
    assert entries(cache) < before


@pytest.mark.slow
def test_the_first_line_and_the_plan_count_the_steps_of_whole_passes(tmp_path, capsys):
    from qie_nb.planning.cards import plan
    root = write_pairs(tmp_path/"set", SIZES)
    trainer = trainer_of(root, tmp_path, data=dict(batch_size=1), train=dict(max_train_steps=None, num_epochs=3))
    trainer.fit()
    said = capsys.readouterr().out
    assert "4 identity pairs ('keep it as it is') beside 12 pairs" in said
    assert trainer.global_step == 48 and "48 steps" in said
    assert plan(config=trainer.config, gpu="T4", pairs=12).summary.steps == 48


@pytest.mark.slow
def test_a_resumed_run_keeps_the_share(tmp_path):
    root = write_pairs(tmp_path/"set", SIZES)
    trainer_of(root, tmp_path, train=dict(save_steps=1)).fit()
    (checkpoint,) = (tmp_path/"checkpoints").glob("step_*2")
    known = checkpoint_misfit(checkpoint, trainer_of(root, tmp_path).config)
    assert not known, "before a model is loaded"
    with pytest.raises(ValueError, match=r"run \(`data.identity_share`: 0.25 in the checkpoint, 0.0 now\)"):
        trainer_of(root, tmp_path, 0., train=dict(max_train_steps=4, resume_checkpoint="auto")).fit()
    resumed = trainer_of(root, tmp_path, train=dict(max_train_steps=4, resume_checkpoint="auto"))
    resumed.fit()
    assert resumed.global_step == 4


def test_the_disk_plan_counts_them(tmp_path):
    root = write_pairs(tmp_path/"set", SIZES)
    sizes = {}
    for share in (0., 0.5):
        items = disk_plan(trainer_of(root, tmp_path/str(share), share).config).items
        sizes[share] = {i.what: i.bytes for i in items}
    assert sizes[0.5]["latents"] == 2 * sizes[0.]["latents"] and sizes[0.5]["prompts"] == 2 * sizes[0.]["prompts"]


@pytest.mark.parametrize("wrong", [0.6, -0.1, 1, True, "much", float("nan")])
def test_a_wrong_share_is_refused_by_name(wrong, tmp_path):
    with pytest.raises(ValueError, match="data.identity_share"):
        trainer_of(write_pairs(tmp_path/"set", SIZES[:2]), tmp_path, wrong)


@pytest.mark.parametrize("call", ["cache_embeddings", "make_loader"])
def test_an_edit_with_the_same_instruction_is_refused_first(call, tmp_path):
    "A slider's pairs often say so; the two would teach the opposite."
    root = write_pairs(tmp_path/"set", SIZES[:4], caption=["dusk", "Keep it as it is.", "dusk", KEEP])
    trainer = trainer_of(root, tmp_path)
    why = r"2 of your pairs change with it: '0001', '0003'; .* or set `data.identity_share` to 0"
    with pytest.raises(ValueError, match=why):
        getattr(trainer, call)()
    assert not trainer.components.loaded
    assert len(trainer_of(root, tmp_path, 0.).make_loader().dataset) == 4
