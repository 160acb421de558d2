"""Samples without a control image: embeddings, latents, velocity and images equal those of QwenImagePipeline on the same tiny models."""
import json, shutil
from collections import Counter

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, QwenImagePipeline

from qie_nb.data.batches import pad_prompts
from qie_nb.data.dataset import ImageDataset, loader
from qie_nb.data.images import Geometry
from qie_nb.data.pair_checks import near_duplicates, look, shared_targets
from qie_nb.data.samples import find_samples, split_held_out
from qie_nb.encoding.encoder import Encoder, encode_prompt
from qie_nb.evaluation.evaluate import evaluate
from qie_nb.extras.diagnostics import swap_test
from qie_nb.models import flow_matching
from qie_nb.devices.edit_model import EditModel
from qie_nb.models.components import VARIANTS
from qie_nb.models.flow_matching import img_shapes, pack_latents
from qie_nb.models.variants.text_to_image import QWEN_IMAGE
from qie_nb.planning.doctor import doctor
from qie_nb.predict import edit
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.widgets.sample_page import pair_grid, pairs_html
from qie_nb.widgets.sample_viewer import sample_viewer
from helpers import adapters_equal, settings, write_pairs
from tiny_rig import close

PROMPTS = ["a boat", "a small red house on a hill, seen from below", " "]
SIZE, LONE = (144, 80), ("0001", "0004") # (w, h), not square; samples without a control
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def text_pipeline(variant):
    parts = DiffusionPipeline.from_pretrained(tiny_folder(variant)).components
    pipe = QwenImagePipeline(**{k: parts[k] for k in ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")})
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def mixed(tmp_path):
    "Five pairs of which two lack the control; the first of them has its prompt from a pair."
    root = write_pairs(tmp_path/"set", [(48, 32), (48, 32), (32, 48), (40, 40), (48, 32)], caption=["a boat", "a boat", "b", "c", "a red house on a hill"])
    for name in LONE: (root/"control_images"/f"{name}.png").unlink()
    return root


def run_settings(root, tmp_path, variant="2511", **sections):
    data = dict(allow_missing_control=True) | sections.pop("data", {})
    return settings(root, tmp_path, variant, data=data, **sections)


# --- parity
@torch.no_grad()
@each_variant
def test_embeddings_latents_and_prediction(variant):
    pipe, parts = text_pipeline(variant), EditModel(str(tiny_folder(variant)))
    encoder, g = Encoder(parts), Geometry(**parts.areas)
    ours = [encode_prompt(encoder, p, [], g) for p in PROMPTS]
    theirs, mask = pipe.encode_prompt(PROMPTS)
    padded, own_mask = pad_prompts(ours)
    close(padded, theirs)
    assert len({len(e) for e in ours}) == 3 and own_mask.equal(mask.bool())
    noise = pipe.prepare_latents(3, 16, SIZE[1], SIZE[0], torch.float32, "cpu", torch.Generator().manual_seed(1))
    latents = torch.randn(3, 16, 1, SIZE[1] // 8, SIZE[0] // 8, generator=torch.Generator().manual_seed(2))
    assert pack_latents(latents).equal(pipe._pack_latents(latents, 3, 16, SIZE[1] // 8, SIZE[0] // 8))
    shapes = img_shapes((SIZE[1] // 8, SIZE[0] // 8), [], 3)
    assert shapes == [[(1, SIZE[1] // 16, SIZE[0] // 16)]] * 3
    right = pipe.transformer(noise, theirs, mask, torch.full((3,), 0.7), shapes, return_dict=False)[0]
    transformer, timesteps = parts.get("transformer"), torch.full((3,), 700.)
    close(QWEN_IMAGE.velocity(transformer, noise, [], timesteps, padded, own_mask, shapes), right)


@torch.no_grad()
def test_long_prompts_end_where_the_pipeline_ends_them():
    parts, long = EditModel(str(tiny_folder("2511"))), "a boat " * 1200
    ours = encode_prompt(Encoder(parts), long, [], Geometry(**parts.areas))
    assert len(ours) == 1024
    close(ours[None], text_pipeline("2511").encode_prompt([long])[0])


@each_variant
def test_images(variant):
    pipe, parts = text_pipeline(variant), EditModel(str(tiny_folder(variant)))
    kw = dict(width=SIZE[0], height=SIZE[1], num_inference_steps=3, true_cfg_scale=4.)
    theirs = pipe(PROMPTS[1], negative_prompt=" ", generator=torch.Generator().manual_seed(5), output_type="np", **kw).images[0]
    ours = edit(Encoder(parts), parts.get("transformer"), None, PROMPTS[1], seed=5, **kw)
    off = np.abs(ours.astype(int) - (theirs * 255).round())
    assert off.max() <= 1 and (off > 0).mean() <= 1e-3 and ours.std() > 5
    assert edit(Encoder(parts), parts.get("transformer"), None, "x", num_inference_steps=2, true_cfg_scale=1).shape == (96, 96, 3)


# --- keys
@each_variant
def test_keys_with_and_without_an_image_differ(variant, mixed, tmp_path):
    data = ImageDataset(run_settings(mixed, tmp_path, variant)["data"] | dict(cache_dir=str(tmp_path/"cache")))
    data.refresh(EditModel(str(tiny_folder(variant))).identity())
    pair, lone = data.keys(0), data.keys(1)
    assert data.samples[0].prompt == data.samples[1].prompt and not [n for n in lone if n.startswith("control")]
    for name in ("prompt_embed", "empty_prompt_embed"): assert pair[name].key != lone[name].key
    assert lone["empty_prompt_embed"] == data.keys(4)["empty_prompt_embed"] and lone["prompt_embed"].key != lone["empty_prompt_embed"].key
    other = EditModel(str(tiny_folder(variant))).identity() | dict(text_template="another")
    data.refresh(other)
    assert data.keys(0) == pair and data.keys(1)["prompt_embed"] != lone["prompt_embed"]


def test_a_cache_of_an_older_version_is_read_whole(mixed, tmp_path, monkeypatch):
    for name in LONE: (mixed/"training_images"/f"{name}.png").unlink()
    with monkeypatch.context() as older:
        real = EditModel.identity
        older.setattr(EditModel, "identity", lambda self: {k: v for k, v in real(self).items() if k != "text_template"})
        QwenImageEditTrainer(settings(mixed, tmp_path)).cache_embeddings()
    assert "text_template" not in (tmp_path/"cache"/"manifest.json").read_text()
    shutil.copy(mixed/"training_images"/"0000.png", mixed/"training_images"/"0001.png")
    report = QwenImageEditTrainer(run_settings(mixed, tmp_path)).cache_embeddings()
    assert (report.reused, report.encoded) == (3, 1)
    (identity,) = json.loads((tmp_path/"cache"/"manifest.json").read_text())["identities"].values()
    assert identity["text_template"] # a place without the encoders finds the new entries
    data = ImageDataset(run_settings(mixed, tmp_path)["data"] | dict(cache_dir=str(tmp_path/"cache")))
    assert not data.incomplete() and data.status()["complete"] == 4


# --- runs
@pytest.mark.bits
@pytest.mark.parametrize("variant", ["2511", *(pytest.param(v, marks=pytest.mark.slow) for v in ("v1", "2509"))])
def test_a_mixed_run_trains_holds_out_and_resumes(variant, mixed, tmp_path, capsys, monkeypatch):
    def trainer(out, **train):
        train = dict(val_fraction=0.4, num_epochs=2, save_steps=2) | train
        return QwenImageEditTrainer(run_settings(mixed, tmp_path/out, variant, train=train, cache=dict(cache_dir=str(tmp_path/"cache"))))
    whole = trainer("whole")
    report = whole.cache_embeddings()
    assert report.encoded == 5 and not report.skipped
    seen, real = [], flow_matching.transformer_inputs
    def counted(*args):
        seen.append(real(*args))
        return seen[-1]
    monkeypatch.setattr(flow_matching, "transformer_inputs", counted)
    whole.fit()
    held = {s.id for s in whole.held_out.samples}
    assert held and not held & {s.id for s in whole.samples} and len(whole.samples) + len(held) == 5
    assert {len(row) for call in seen for row in call["img_shapes"]} == {1, 2} # with and without a control, never in one batch
    for call in seen: assert {sum(np.prod(s) for s in row) for row in call["img_shapes"]} == {call["hidden_states"].shape[1]}
    assert "2 without a control image ('0001', '0004')" in capsys.readouterr().out
    lone = sum(not s.controls for s in whole.samples)
    assert f"without a control | {lone} |" in (whole.save_lora(tmp_path/"lora").parent/"README.md").read_text()
    trainer("cut", max_train_steps=2).fit()
    again = trainer("cut", resume_checkpoint="latest").fit()
    assert again.global_step == whole.global_step and adapters_equal(whole, again)


def test_held_out_samples_without_a_control_have_a_loss_and_images(mixed, tmp_path, capsys):
    val = write_pairs(tmp_path/"val", [(48, 32), (32, 48)], seed=1)
    shutil.rmtree(val/"control_images")
    losses = []
    for table in (False, True):
        train = dict(val_path=str(val), max_train_steps=1, eval_num_inference_steps=2)
        t = QwenImageEditTrainer(run_settings(mixed, tmp_path/str(table), train=train, model=dict(modulation_table=table)))
        t.fit()
        result = evaluate(t)
        losses.append(result["held_out_loss"])
        assert result["held_out_pairs"] == 2 and len(result["pictures"]) == 2 and (t.modulation_table is not None) == table
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    capsys.readouterr()
    image = t.predict(None, "a boat", num_inference_steps=2, height=64, width=48)
    assert "no image is given: text-to-image" in capsys.readouterr().out
    photo = torch.zeros(32, 48, 3, dtype=torch.uint8).numpy()
    both = t.predict([None, photo], ["a boat", "make it red"], num_inference_steps=2, height=64, width=48)
    assert "no image is given for 1 of 2 edits: text-to-image" in capsys.readouterr().out and (both[0] == image).all()
    t.predict(photo, "make it red", num_inference_steps=2)
    assert "text-to-image" not in capsys.readouterr().out
    assert image.shape == (64, 48, 3) and t.predict_cached(1, num_inference_steps=2, true_cfg_scale=1).shape


def test_a_control_costs_no_work_that_is_not_needed(mixed, tmp_path):
    data = ImageDataset(run_settings(mixed, tmp_path, data=dict(caption_dropout_rate=0.5))["data"] | dict(cache_dir=str(tmp_path/"cache")))
    encoder = Encoder(EditModel(str(tiny_folder("2511"))), data.cache)
    data.refresh(encoder.identity)
    encoder.encode_missing(data, {i: data.missing(i) for i in (1, 4)})
    assert encoder.calls == dict(vae=2, prefix=0, text_encoder=3) # two prompts and one empty one
    assert Counter(k for _, k, _, _ in data.cache.entries()) == dict(pixel_latent=2, prompt_embed=2, empty_prompt_embed=1)
    assert not data.missing(1) and data[1]["control_latent"] == []


def test_masks_flow_into_the_loss(mixed, tmp_path):
    from PIL import Image
    (mixed/"mask_images").mkdir()
    Image.fromarray(np.pad(np.full((16, 24), 255, np.uint8), ((0, 16), (0, 24)))).save(mixed/"mask_images"/"0001.png")
    t = QwenImageEditTrainer(run_settings(mixed, tmp_path, train=dict(max_train_steps=2)))
    t.cache_embeddings()
    t.fit()
    (batch,) = [b for b in loader(t.data.subset(t.data.make_loader().dataset, [s for s in t.samples if s.id in LONE]), batch_size=2)]
    assert batch["mask"].shape[0] == 2 and 0 < batch["mask"][:, 0].mean() < 1 and batch["control_latent"] == []


# --- what else reads the data
def test_other_readers_of_a_mixed_set(mixed, tmp_path):
    config = run_settings(mixed, tmp_path)
    data = ImageDataset(config["data"])
    assert "2 without a control image" in repr(data.found) and "no control image" in pair_grid(data, 5).html() + pairs_html(data)
    viewer = sample_viewer(data)
    viewer.scan()
    assert not viewer.sets["swapped"] and not viewer.sets["near"]
    sets = [[look(p) for p in (s.target, *s.controls)] for s in data.samples]
    assert not near_duplicates([sets[0], sets[0][:1]], ["x", "x"]) # a pair and its target alone
    assert not shared_targets([("t", "c"), ("t",), ("u", "d")], ["x", "y", "z"])
    (row,) = [f for f in doctor(config).findings if f.what == "data set"]
    assert "2 without a control image" in row.value and row.level != "error"
    t = QwenImageEditTrainer(config)
    t.cache_embeddings()
    assert swap_test(t, 5).pairs == 3


def test_a_target_alone_is_held_out_with_its_pair(mixed):
    for name in ("0000", "0002"): shutil.copy(mixed/"training_images"/f"{name}.png", mixed/"training_images"/f"{name}_alone.png")
    samples = find_samples(mixed, prompt="x", allow_missing_control=True)
    for seed in range(5):
        train, held = split_held_out(samples, 0.4, seed)
        assert not {s.id.removesuffix("_alone") for s in train} & {s.id.removesuffix("_alone") for s in held}


# --- what is refused
def test_a_forgotten_control_is_never_trained_on_silently(mixed):
    with pytest.raises(ValueError, match="2 of 5 targets have no control image .*'0001.png', '0004.png'.* or set `data.allow_missing_control` to true"): find_samples(mixed)
    controls = mixed/"control_images"
    (controls/"0000.png").rename(controls/"o000.png") # another name
    with pytest.raises(ValueError, match="control_images/ has 'o000.png' without a target; give both images of a pair the same name$"): find_samples(mixed, allow_missing_control=True)
    (controls/"o000.png").rename(controls/"0000.png")
    for name in ("0001.cr2", "ANOTHER.CR2", "0001.mp4"): # cannot be read
        (controls/name).write_bytes(b"x")
        with pytest.raises(ValueError, match="2 of 5 targets .*; add the controls or remove the targets$"): find_samples(mixed, allow_missing_control=True)
        (controls/name).unlink()
    (controls/"0000.psd").write_bytes(b"x") # beside 0000.png
    assert len(find_samples(mixed, allow_missing_control=True)) == 5
    pairs = mixed/"pairs"
    pairs.mkdir()
    for name in ("1_target", "1_control", "2_target"): shutil.copy(controls/"0000.png", pairs/f"{name}.png")
    assert [len(s.controls) for s in find_samples(pairs, prompt="x", allow_missing_control=True)] == [1, 0]
    (pairs/"2_control.nef").write_bytes(b"x")
    with pytest.raises(ValueError, match="1 of 2 targets .*'2_target.png'.*; convert '2_control.nef' to JPEG or PNG$"): find_samples(pairs, prompt="x", allow_missing_control=True)
    (pairs/"2_control.nef").unlink()
    pairs.rename(mixed.parent/"target")
    assert len(find_samples(mixed.parent/"target", prompt="x", allow_missing_control=True)) == 2
    shutil.rmtree(mixed)
    assert len(find_samples(mixed.parent, prompt="x", allow_missing_control=True)) == 2 # in the only folder, target/


def test_tables_and_data_sets(mixed):
    datasets = pytest.importorskip("datasets")
    row = lambda i, **more: dict(image=f"training_images/{i:04}.png", prompt="x") | more
    rows = [row(0, edit_image="control_images/0000.png"), row(1, edit_image=""), row(2, edit_image=None), row(3)]
    (mixed/"t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="row 2 of 't.jsonl' has no control image .*allow_missing_control.* \\(3 of 4 rows are wrong"): find_samples(mixed/"t.jsonl")
    count = lambda samples: [len(s.controls) for s in samples]
    assert count(find_samples(mixed/"t.jsonl", allow_missing_control=True)) == [1, 0, 0, 0]
    (mixed/"other.jsonl").write_text(json.dumps(row(0, befor="control_images/0000.png", source_name="1.png")))
    with pytest.raises(ValueError, match="'other.jsonl' has no column for the control, but 'befor' has images; rename it to control_image"): find_samples(mixed/"other.jsonl", allow_missing_control=True)
    columns = {k: [str(mixed/r[k]) if r.get(k) else None for r in rows] for k in ("image", "edit_image")} | dict(prompt=["x"] * 4)
    data = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image()).cast_column("edit_image", datasets.Image())
    with pytest.raises(ValueError, match="row 1 of the data set has no control image .*allow_missing_control"): find_samples(data)
    assert count(find_samples(data, allow_missing_control=True)) == [1, 0, 0, 0]
    with pytest.raises(ValueError, match="the data set has no column for the control, but 'befor' has images"): find_samples(data.rename_column("edit_image", "befor"), allow_missing_control=True)
    assert count(find_samples(data.remove_columns("edit_image"), allow_missing_control=True)) == [0] * 4
