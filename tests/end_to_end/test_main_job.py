"""The main job from a YAML file, for each variant: precompute, train, save, predict; what is loaded, what is refused."""
import json, re

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from helpers import TEXT, TRANSFORMER, VAE, StopAt, adapters_equal, settings
from qie_nb.config import load_config_from_yaml
from qie_nb.data.dataset import ImageDataset, loader
from qie_nb.lora.adapters import lora_state
from qie_nb.tiny.random_models import tiny_folder, tiny_pipeline
from qie_nb.trainer import QwenImageEditTrainer


@pytest.mark.parametrize("variant, controls", [("v1", 1), ("2509", 1), ("2509", 3), ("2511", 2)])
def test_the_original_example_runs_as_it_stands(variant, controls, pairs, tmp_path, built):
    file = tmp_path/"run.yaml"
    root = pairs(controls=controls)
    file.write_text(yaml.safe_dump(settings(root, tmp_path, variant)))
    config = load_config_from_yaml(file)
    trainer = QwenImageEditTrainer(config)
    train_dataloader = loader(ImageDataset(config), batch_size=2)

    assert trainer.cache_embeddings(train_dataloader).encoded == 3
    assert built == {VAE: 1, TEXT: 1}
    trainer.set_lora()
    trainer.fit(train_dataloader)
    assert built == {VAE: 1, TEXT: 1, TRANSFORMER: 1}, "cached training must build no encoder"
    path = trainer.save_lora(tmp_path/"lora")
    trainer.setup_predict()
    images = [str(root/"control_images"/"0000.png")] + [str(root/f"control_images_{n}"/"0000.png") for n in range(2, controls + 1)]
    image = trainer.predict(images if controls > 1 else images[0], "invert the colours", num_inference_steps=2)
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
    assert path.name == "pytorch_lora_weights.safetensors" and trainer.global_step == 6


def test_a_second_precompute_builds_nothing(pairs, tmp_path, built):
    root = pairs()
    QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings()
    built.clear()
    report = QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings()
    assert (report.encoded, report.reused) == (0, 3) and not built


def test_fit_works_straight_after_the_constructor_and_fills_the_cache(pairs, tmp_path, built):
    root = pairs()
    lazy = QwenImageEditTrainer(settings(root, tmp_path)).fit()
    assert built[VAE] == built[TEXT] == 1
    assert lazy.vae is None and lazy.qwen_vl is None, "once all is cached the encoders have left memory"
    built.clear()
    again = QwenImageEditTrainer(settings(root, tmp_path)).fit()
    assert built == {TRANSFORMER: 1}
    assert adapters_equal(lazy, again)


@pytest.mark.parametrize("variant", ["v1", "2509", "2511"])
def test_cached_and_uncached_training_are_the_same(variant, pairs, tmp_path):
    root = pairs(((48, 32), (48, 32), (48, 32)), caption=["invert", "invert the colours of everything", "x"])
    cached = QwenImageEditTrainer(settings(root, tmp_path, variant))
    cached.cache_embeddings()
    cached.fit()
    plain = QwenImageEditTrainer(settings(root, tmp_path, variant, cache=dict(use_cache=False))).fit()
    assert adapters_equal(cached, plain)


def test_gradient_checkpointing_changes_nothing(pairs, tmp_path):
    root = pairs()
    with_, without = (QwenImageEditTrainer(settings(root, tmp_path, train=dict(gradient_checkpointing=g))).fit() for g in (True, False))
    for a, b in zip(lora_state(with_.transformer).values(), lora_state(without.transformer).values()): torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_bfloat16_base_keeps_a_float32_adapter(pairs, tmp_path):
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path, train=dict(mixed_precision="bf16", max_train_steps=2)))
    trainer.cache_embeddings()
    trainer.fit()
    assert trainer.transformer.proj_out.weight.dtype == torch.bfloat16
    assert {p.dtype for p in trainer.transformer.parameters() if p.requires_grad} == {torch.float32}
    assert torch.isfinite(torch.as_tensor(trainer.state.loss)) and trainer.predict(Image.new("RGB", (40, 30)), "x", num_inference_steps=2).ndim == 3


def test_the_adapter_gives_diffusers_the_same_image(pairs, tmp_path, monkeypatch):
    import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus as plus
    root = pairs()
    trainer = QwenImageEditTrainer(settings(root, tmp_path, optimizer=dict(lr=0.05), model=dict(modulation_table=False))).fit() # diffusers has no table
    trainer.save_lora(tmp_path/"lora")
    areas = trainer.components.areas
    monkeypatch.setattr(plus, "VAE_IMAGE_SIZE", areas["control_area"])
    monkeypatch.setattr(plus, "CONDITION_IMAGE_SIZE", areas["vl_area"])
    picture = Image.open(root/"control_images"/"0000.png")

    def by_diffusers(lora):
        pipe = diffusers.QwenImageEditPlusPipeline.from_pretrained(tiny_folder("2511"))
        pipe.set_progress_bar_config(disable=True)
        if lora: pipe.load_lora_weights(str(tmp_path/"lora"))
        return np.asarray(pipe(picture, "invert", negative_prompt=" ", true_cfg_scale=4.0, num_inference_steps=2, height=64, width=96, generator=torch.Generator().manual_seed(5)).images[0])
    import diffusers
    ours = trainer.predict(picture, "invert", num_inference_steps=2, height=64, width=96, seed=5)
    distance = lambda lora: np.abs(ours.astype(int) - by_diffusers(lora)).max()
    assert distance(True) <= 1 < distance(False)


def test_a_cut_run_resumes_exactly(pairs, tmp_path):
    root = pairs(((48, 32),) * 5)
    def run(out, **train): return QwenImageEditTrainer(settings(root, tmp_path/out, data=dict(batch_size=1), train=dict(output_dir=str(tmp_path/out)) | train))
    whole = run("whole").fit()
    first = run("cut", save_steps=7)
    first.callbacks.append(StopAt(7))
    first.fit()
    second = run("cut", resume_checkpoint="checkpoints/latest.pt").fit()
    assert second.global_step == 10 and adapters_equal(whole, second)
    rows = [line for f in (tmp_path/"cut"/"checkpoints"/"logs").glob("*.csv") for line in f.read_text().splitlines()[1:]]
    assert sorted(int(r.split(",")[1]) for r in rows) == list(range(1, 11))


def test_the_steps_may_be_called_by_hand(pairs, tmp_path):
    root, cosine = pairs(((48, 32),) * 3), dict(scheduler_type="cosine", warmup_steps=1)
    def make(): return QwenImageEditTrainer(settings(root, tmp_path, data=dict(batch_size=1)) | dict(lr_scheduler=cosine))
    by_hand = make()
    by_hand.load_model()
    by_hand.setup_accelerator()
    by_hand.set_lora()
    by_hand.configure_optimizers()
    rates = []
    class Rates(StopAt):
        def on_step_end(self, t): rates.append(t.state.lr)
    by_hand.callbacks.append(Rates(None))
    by_hand.fit()
    assert adapters_equal(by_hand, make().fit()), "the same run as fit() alone"
    assert rates[0] == 0 and rates[1] == 1e-3 and rates[1] > rates[-1] > 0, "warm-up, then the cosine over the whole run"


def test_a_second_fit_goes_on_where_the_first_was_stopped(pairs, tmp_path):
    root = pairs(((48, 32),) * 4)
    def make(*callbacks): return QwenImageEditTrainer(settings(root, tmp_path, data=dict(batch_size=1)) | dict(lr_scheduler=dict(scheduler_type="cosine")), callbacks)
    stopped = make(StopAt(3)).fit()
    assert stopped.global_step == 3
    stopped.callbacks.clear()
    assert stopped.fit().global_step == 8
    assert adapters_equal(stopped, make_clean(make, tmp_path))


def make_clean(make, tmp_path):
    import shutil
    shutil.rmtree(tmp_path/"checkpoints")
    return make().fit()


def test_images_reach_tensorboard_although_latents_are_cached(pairs, tmp_path):
    from qie_nb.logging import read_events
    root = pairs(((64, 64),) * 2)
    trainer = QwenImageEditTrainer(settings(root, tmp_path, logging=dict(report_to="tensorboard", log_images_every=1)))
    trainer.cache_embeddings()
    trainer.fit()
    scalars, images = read_events(tmp_path/"runs")
    assert {"loss", "lr", "grad_norm"} <= set(scalars) and {"training/training_images", "training/control_images", "individual/training_image_0"} <= set(images)
    on_disk = [np.asarray(Image.open(p)) for p in sorted((root/"training_images").glob("*.png"))]
    assert any((images["individual/training_image_0"][0][1] == d).all() for d in on_disk)


def test_foreign_batches_train(tmp_path, pairs):
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path, cache=dict(use_cache=False))).set_lora()
    picture = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    pictures = dict(image=[picture], control=[Image.fromarray(255 - picture)], prompt=["invert"])
    loss = trainer.training_step(pictures)
    loss.backward()
    cached = trainer.encode_batch(pictures)
    assert torch.equal(loss, trainer._training_step_cached(cached))
    assert torch.equal(loss, trainer._training_step_compute(pictures))


def test_held_out_pairs_are_never_trained_on(tmp_path, pairs):
    trainer = QwenImageEditTrainer(settings(pairs(((48, 32),) * 6), tmp_path, train=dict(val_fraction=0.4, num_epochs=3, eval_interval=1)))
    seen = set()
    class Watch(StopAt):
        def on_step_end(self, t): seen.update(t.batch["sample_id"])
    trainer.callbacks.append(Watch(None))
    trainer.fit()
    held = {s.id for s in trainer.held_out.samples}
    assert len(held) == 2 and not seen & held and len(seen) == 4
    assert trainer.state.metrics["held_out_loss"] > 0


# --- bad input: one sentence, with name, value and remedy, before any long work
def break_nothing(root): pass
def remove_control(root): (root/"control_images"/"0001.png").unlink()
def empty_caption(root): (root/"training_images"/"0001.txt").write_text(" ")
def two_of_a_name(root): Image.new("RGB", (8, 8)).save(root/"training_images"/"0001.jpg")
def not_a_image(root): (root/"control_images"/"0001.png").write_text("no image")
def truncated(root): (root/"training_images"/"0002.png").write_bytes((root/"training_images"/"0002.png").read_bytes()[:-40])


@pytest.mark.parametrize("damage, changes, sentence", [
    (break_nothing, dict(data=dict(dataset_path="/no/such/folder")), r"`data.dataset_path` '/no/such/folder' does not exist; set"),
    (break_nothing, dict(data=dict(dataset_path="EMPTY")), r"holds no images; expected training_images/"),
    (remove_control, {}, r"target '0001.png' has no control image; expected .*control_images/0001"),
    (not_a_image, dict(data=dict(strict=True)), r"image .*control_images/0001.png' cannot be read \(not an image or broken\); replace it"),
    (truncated, dict(data=dict(strict=True)), r"image .*0002.png' cannot be read .*; replace it"),
    (empty_caption, {}, r"caption of sample '0001' is empty; write the instruction into .*0001.txt"),
    (two_of_a_name, {}, r"two samples have the name '0001': 0001.jpg and 0001.png in .*; rename or remove one"),
    (break_nothing, dict(data=dict(image_size=[64, 500])), r"`image_size` must be a multiple of 16, got 500; use 496 or 512"),
    (break_nothing, dict(train=dict(max_steps=3)), r"`train.max_steps` is not a known key; did you mean `train.max_train_steps`\?"),
    (break_nothing, dict(model=dict(pretrained_model_name_or_path="OTHER")), r"contains a StableDiffusionPipeline; this library needs QwenImageEditPipeline"),
    (break_nothing, dict(model=dict(pretrained_model_name_or_path="/no/model")), r"`model.pretrained_model_name_or_path` '/no/model' is not a folder; give"),
    (break_nothing, dict(train=dict(device="cuda:9")), r"device 'cuda:9' does not exist here; this machine has"),
    (break_nothing, dict(cache=dict(vae_encoder_device="tpu")), r"device 'tpu' does not exist here; this machine has"),
    (break_nothing, dict(predict=dict(devices=dict(vae="cuda:9"))), r"device 'cuda:9' does not exist here"),
    (break_nothing, dict(model=dict(variant="v1")), r"`model.variant` is v1, but .* is 2511"),
    (break_nothing, dict(train=dict(resume_checkpoint="checkpoints/epoch_0050.pt")), r"`resume_checkpoint` 'checkpoints/epoch_0050.pt' does not exist"),
    (break_nothing, dict(model=dict(lora=dict(target_modules=["to_quit"]))), r"`model.lora.target_modules` \['to_quit'\] matches no layer"),
    (break_nothing, dict(logging=dict(report_to="tensorbored")), r"`logging.report_to` 'tensorbored' is not supported; use tensorboard or none"),
])
def test_bad_input_is_one_sentence_and_no_encoder_runs(damage, changes, sentence, pairs, tmp_path, built):
    root = pairs()
    damage(root)
    (tmp_path/"EMPTY").mkdir()
    (tmp_path/"OTHER").mkdir()
    (tmp_path/"OTHER"/"model_index.json").write_text(json.dumps(dict(_class_name="StableDiffusionPipeline")))
    changes = json.loads(json.dumps(changes).replace("EMPTY", str(tmp_path/"EMPTY")).replace("OTHER", str(tmp_path/"OTHER")))
    raw = dict(settings(root, tmp_path))
    for section, values in changes.items(): raw[section] = raw.get(section, {}) | values
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as e: QwenImageEditTrainer(raw).fit()
    assert "\n" not in str(e.value)
    assert not built[VAE] and not built[TEXT] and not (tmp_path/"cache").exists()


@pytest.mark.parametrize("damage, id", [(not_a_image, "0001"), (truncated, "0002")])
def test_a_bad_image_is_skipped_and_the_rest_trained_on(damage, id, pairs, tmp_path, capsys):
    root = pairs()
    damage(root)
    trainer = QwenImageEditTrainer(settings(root, tmp_path))
    report = trainer.cache_embeddings()
    assert (report.encoded, [i for i, _ in report.skipped]) == (2, [id])
    trainer.fit()
    said = capsys.readouterr().out
    assert trainer.global_step == 4 and f"{id}: image " in said and "1 of 3 samples are skipped" in said # two buckets, two epochs


def test_predict_refuses_a_size_the_model_cannot_have(tmp_path, pairs):
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path))
    with pytest.raises(ValueError, match="`width` must be a multiple of 16, got 500; use 496 or 512"): trainer.predict(Image.new("RGB", (40, 30)), "x", width=500, height=64)


def test_predict_refuses_a_schedule_without_a_noise_level(tmp_path, pairs):
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path))
    with pytest.raises(ValueError, match="`num_inference_steps` must be at least 2 with this scheduler, got 1"): trainer.predict(Image.new("RGB", (40, 30)), "x", num_inference_steps=1)


def damaged_model(tmp_path, change):
    import shutil
    folder = tmp_path/"model"
    shutil.copytree(tiny_folder("2511"), folder)
    change(folder)
    return folder


def rename_to_pickle(folder): (folder/"transformer"/"diffusion_pytorch_model.safetensors").rename(folder/"transformer"/"diffusion_pytorch_model.bin")
def from_elsewhere(folder): (folder/"model_index.json").write_text((folder/"model_index.json").read_text().replace('"diffusers",\n    "QwenImageTransformer2DModel"', '"os",\n    "QwenImageTransformer2DModel"'))


@pytest.mark.parametrize("change, sentence", [(rename_to_pickle, "has no safetensors weights in transformer/; pickles are not read"),
                                              (from_elsewhere, "needs 'os' for transformer; only diffusers and transformers are imported")])
def test_a_model_folder_is_not_trusted(change, sentence, pairs, tmp_path):
    folder = damaged_model(tmp_path, change)
    with pytest.raises(ValueError, match=sentence): QwenImageEditTrainer(settings(pairs(), tmp_path, model=dict(pretrained_model_name_or_path=str(folder)))).set_lora()


def test_names_of_the_facade_exist():
    names = """vae qwen_vl transformer tokenizer processor scheduler accelerator optimizer lr_scheduler global_step use_cache cache_exist cache_dir quantize weight_dtype
        load_model setup_accelerator set_lora configure_optimizers fit training_step save_checkpoint cache_embeddings cache_step setup_predict predict encode_image_embedding
        encode_prompt_image_embedding decode_vae_latent load_lora save_lora merge_lora quantize_model _training_step_cached _training_step_compute _compute_loss _encode_empty_prompt
        _pack_latents _unpack_latents"""
    trainer = QwenImageEditTrainer(dict(model=dict(pretrained_model_name_or_path=str(tiny_folder("2511"))), train=dict(device="cpu")))
    for name in names.split(): assert hasattr(trainer, name), name
    assert trainer.load_model().processor is not None and trainer.vae is not None and trainer.setup_accelerator() is trainer.accelerator


def test_quantized_prediction(tmp_path, pairs):
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path, train=dict(max_train_steps=1))).fit()
    plain = trainer.predict(Image.new("RGB", (40, 30), "red"), "x", num_inference_steps=2).astype(int)
    trainer.quantize = True
    trainer.setup_predict()
    assert type(trainer.transformer.transformer_blocks[0].attn.to_q.base_layer).__name__ == "QLinear"
    quantized = trainer.predict(Image.new("RGB", (40, 30), "red"), "x", num_inference_steps=2).astype(int)
    assert 0 < abs(plain - quantized).mean() < 12


# --- what an outside tester broke
def test_another_models_latents_are_never_trained_on(pairs, tmp_path, built):
    root, other = pairs(), tiny_folder("2511", seed=5)
    QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings()
    built.clear()
    mixed = QwenImageEditTrainer(settings(root, tmp_path, model=dict(pretrained_model_name_or_path=str(other)))).fit()
    assert built[VAE] == built[TEXT] == 1, "the other model's entries are misses"
    alone = QwenImageEditTrainer(settings(root, tmp_path, model=dict(pretrained_model_name_or_path=str(other)), cache=dict(cache_dir=str(tmp_path/"alone")))).fit()
    assert adapters_equal(mixed, alone)
    built.clear()
    QwenImageEditTrainer(settings(root, tmp_path)).fit()
    assert built == {TRANSFORMER: 1}, "and the first model still finds its own"


def test_without_encoders_at_hand_the_manifest_must_name_one_model(pairs, tmp_path):
    import shutil
    root, bare = pairs(), tmp_path/"bare"
    shutil.copytree(tiny_folder("2511"), bare, ignore=shutil.ignore_patterns("vae", "text_encoder"))
    def make(): return QwenImageEditTrainer(settings(root, tmp_path, model=dict(pretrained_model_name_or_path=str(bare))))
    QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings()
    assert make().fit().global_step == 6
    bf16 = settings(root, tmp_path, model=dict(pretrained_model_name_or_path=str(bare)), train=dict(mixed_precision="bf16"))
    with pytest.raises(ValueError, match="filled by tiny-2511 with dtype float32, but this run has bfloat16; precompute for it"): QwenImageEditTrainer(bf16).fit()
    QwenImageEditTrainer(settings(root, tmp_path, model=dict(pretrained_model_name_or_path=str(tiny_folder("2511", seed=5))))).cache_embeddings()
    with pytest.raises(ValueError, match="was filled by 2 encoders: .*; set `cache.encoder_id` to one of them"): make().fit()


def test_a_run_resumed_from_far_back_keeps_its_own_checkpoints(pairs, tmp_path):
    root, keep = pairs(((48, 32),) * 2), tmp_path/"backup"
    def make(**train): return QwenImageEditTrainer(settings(root, tmp_path, data=dict(batch_size=2), train=dict(save_interval=1) | train))
    first = make(num_epochs=1).fit()
    (tmp_path/"checkpoints"/"epoch_0001").rename(keep)
    make(num_epochs=5).fit()
    make(num_epochs=3, resume_checkpoint=str(keep)).fit()
    assert {"epoch_0002", "epoch_0003"} == {p.name for p in (tmp_path/"checkpoints").glob("epoch_*")}
    assert (tmp_path/"checkpoints"/"latest").read_text() == "epoch_0003" and first.global_step == 1


def test_a_finished_run_leaves_its_last_step(pairs, tmp_path):
    QwenImageEditTrainer(settings(pairs(), tmp_path, train=dict(save_interval=5))).fit()
    assert [p.name for p in (tmp_path/"checkpoints").glob("epoch_*")] == ["epoch_0002"]


def test_dropout_resumes_exactly_too(pairs, tmp_path):
    root = pairs(((48, 32),) * 4)
    def run(out, *callbacks, **train):
        return QwenImageEditTrainer(settings(root, tmp_path, data=dict(batch_size=1), model=dict(lora=dict(r=4, lora_dropout=0.4)), train=dict(output_dir=str(tmp_path/out)) | train), callbacks).fit()
    whole = run("whole")
    run("cut", StopAt(3))
    torch.manual_seed(99)
    assert adapters_equal(whole, run("cut", resume_checkpoint="latest"))


def test_an_adapter_that_does_not_fit_leaves_the_one_in_memory(pairs, tmp_path):
    from qie_nb.lora.adapters import lora_state
    from safetensors.torch import save_file
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path, train=dict(max_train_steps=1))).fit()
    before = lora_state(trainer.transformer)
    save_file({k: torch.zeros(v.shape[0] + 1, v.shape[1] + 1) for k, v in before.items()}, tmp_path/"wrong.safetensors")
    with pytest.raises(ValueError, match="does not fit this transformer: transformer.transformer_blocks.0.attn.to_.* use the base model"): trainer.load_lora(tmp_path/"wrong.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(before.values(), lora_state(trainer.transformer).values(), strict=True))


def test_a_loss_that_is_not_finite_stops_the_run(pairs, tmp_path, capsys):
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path, optimizer=dict(lr=1e30), train=dict(save_interval=1, num_epochs=20))).fit()
    assert "the loss was not finite in 5 steps in a row (step 6)" in trainer.state.stop and trainer.state.skipped == 5
    assert "5 steps without a finite loss were skipped" in capsys.readouterr().out
    assert all(torch.isfinite(p).all() for p in lora_state(trainer.transformer).values())


def test_two_data_sets_of_the_older_spelling_are_both_read(tmp_path):
    from conftest import write_pairs
    folders = [str(write_pairs(tmp_path/n, ((48, 32),) * 2)) for n in "ab"]
    trainer = QwenImageEditTrainer(dict(model=dict(pretrained_model_name_or_path=str(tiny_folder("2511"))), datasets=[dict(folder_path=f) for f in folders]))
    assert len(ImageDataset(trainer.config)) == 4


def test_lazy_filling_goes_to_the_loaders_own_cache(pairs, tmp_path):
    own = loader(pairs(), cache_dir=tmp_path/"own", image_size=[64, 64])
    QwenImageEditTrainer(settings(tmp_path/"set", tmp_path, train=dict(num_epochs=1))).fit(own)
    assert own.dataset.get_cache_stats()["pixel_latent"]["count"] == 3 and not (tmp_path/"cache").exists()


def test_a_gpu_that_only_emulates_bfloat16_is_not_believed(monkeypatch):
    from contextlib import nullcontext
    from qie_nb.models.quantize import pick_dtype
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation) # a T4 as torch tells it
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d=None: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "device", lambda d: nullcontext())
    dtype, why = pick_dtype("auto", "cuda")
    assert dtype == torch.float32 and why.startswith("Tesla T4 has no bfloat16 of its own, and float16 overflows")
    dtype, why = pick_dtype("bf16", "cuda")
    assert dtype == torch.bfloat16 and "it is emulated" in why
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert pick_dtype("auto", "cuda")[0] == pick_dtype("auto", "cpu")[0] == torch.bfloat16


def test_only_half_of_the_vae_goes_where_it_encodes(pairs, tmp_path):
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path, cache=dict(use_cache=False)))
    encoder = trainer.encoder()
    encoder.devices["vae"] = torch.device("meta") # stands for the GPU
    vae = encoder._vae()
    assert {p.device.type for half in (vae.encoder, vae.quant_conv) for p in half.parameters()} == {"meta"}
    assert {p.device.type for half in (vae.decoder, vae.post_quant_conv) for p in half.parameters()} == {"cpu"}


def test_publishing_uploads_the_lora_its_card_and_nothing_else(pairs, tmp_path, monkeypatch):
    import huggingface_hub
    sent = {}
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda self, repo_id, **kw: f"https://hub/{repo_id}")
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda self, **kw: sent.update(kw))
    root = pairs(caption="make it <b>blue</b> | now")
    trainer = QwenImageEditTrainer(settings(root, tmp_path, train=dict(val_fraction=0.4, eval_interval=1, eval_num_inference_steps=2, num_epochs=1))).fit()
    assert trainer.push_to_hub("me/blue") == "https://hub/me/blue"
    card = (tmp_path/"lora"/"README.md").read_text()
    assert "make it <b>blue</b> | now" in card and "| pairs | 2 |" in card and str(tmp_path) not in card
    assert "validation loss" in card.lower() and "model.lora.r" in card.replace("\\", "") and "<b>" not in re.sub("```.*?```", "", card, flags=re.S), "captions are in fences only"
    assert "pytorch_lora_weights.safetensors" in sent["allow_patterns"] and "README.md" in sent["allow_patterns"]
    assert all(n.split("/")[0] in ("pytorch_lora_weights.safetensors", "README.md", "samples") for n in sent["allow_patterns"]) and len(sent["allow_patterns"]) > 2
