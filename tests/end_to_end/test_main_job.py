"""The main job from a YAML file, for each variant: precompute, train, save, predict; what is loaded, what is refused."""
import json, shutil

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from helpers import TEXT, TRANSFORMER, VAE, StopAt, adapters_equal, settings
from qie_nb.config import load_config_from_yaml
from qie_nb.data.dataset import ImageDataset, loader
from qie_nb.lora.adapters import lora_state
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer


def slow(*values): return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("variant, controls", [slow("v1", 1), slow("2509", 1), slow("2509", 3), ("2511", 2)])
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


def test_fit_works_straight_after_the_constructor_and_fills_the_cache(pairs, tmp_path, built):
    root = pairs()
    lazy = QwenImageEditTrainer(settings(root, tmp_path, train=dict(save_interval=5))).fit()
    assert built[VAE] == built[TEXT] == 1
    assert lazy.vae is None and lazy.qwen_vl is None, "once all is cached the encoders have left memory"
    assert [p.name for p in (tmp_path/"checkpoints").glob("epoch_*")] == ["epoch_0002"], "the last step is saved"
    built.clear()
    again = QwenImageEditTrainer(settings(root, tmp_path, train=dict(output_dir=str(tmp_path/"again"))))
    report = again.cache_embeddings()
    assert (report.encoded, report.reused) == (0, 3) and not built, "a second precompute builds nothing"
    assert adapters_equal(lazy, again.fit()) and built == {TRANSFORMER: 1}


@pytest.mark.parametrize("variant", [slow("v1"), slow("2509"), "2511"])
def test_cached_and_uncached_training_are_the_same(variant, pairs, tmp_path):
    root = pairs(((48, 32), (48, 32), (48, 32)), caption=["invert the colours of everything", "x", "x"])
    cached = QwenImageEditTrainer(settings(root, tmp_path, variant))
    cached.cache_embeddings()
    cached.fit()
    plain = QwenImageEditTrainer(settings(root, tmp_path, variant, cache=dict(use_cache=False))).fit()
    assert adapters_equal(cached, plain)


def test_gradient_checkpointing_changes_nothing(pairs, tmp_path):
    root = pairs()
    with_, without = (QwenImageEditTrainer(settings(root, tmp_path, train=dict(gradient_checkpointing=g, max_train_steps=2))).fit() for g in (True, False))
    for a, b in zip(lora_state(with_.transformer).values(), lora_state(without.transformer).values()): torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_bfloat16_base_keeps_a_float32_adapter(pairs, tmp_path):
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path, train=dict(mixed_precision="bf16", max_train_steps=1)))
    trainer.cache_embeddings()
    trainer.fit()
    assert trainer.transformer.proj_out.weight.dtype == torch.bfloat16
    assert {p.dtype for p in trainer.transformer.parameters() if p.requires_grad} == {torch.float32}
    assert torch.isfinite(torch.as_tensor(trainer.state.loss)) and trainer.predict(Image.new("RGB", (40, 30)), "x", num_inference_steps=2).ndim == 3


@pytest.mark.parametrize("by", ["another trainer", slow("another fit")])
def test_a_stopped_run_goes_on_exactly(by, pairs, tmp_path):
    root = pairs(((48, 32),) * 4)
    def run(out, *callbacks, **train):
        return QwenImageEditTrainer(settings(root, tmp_path, data=dict(batch_size=1), model=dict(lora=dict(r=4, lora_dropout=0.4)), train=dict(output_dir=str(tmp_path/out)) | train)
                                    | dict(lr_scheduler=dict(scheduler_type="cosine")), callbacks)
    whole, cut = run("whole").fit(), run("cut", StopAt(3)).fit()
    assert cut.global_step == 3
    torch.manual_seed(99)
    cut.callbacks.clear()
    if by == "another trainer": cut = run("cut", resume_checkpoint="checkpoints/latest.pt")
    assert cut.fit().global_step == 8 and adapters_equal(whole, cut)
    rows = [line for f in (tmp_path/"cut"/"checkpoints"/"logs").glob("*.csv") for line in f.read_text().splitlines()[1:]]
    assert sorted(int(r.split(",")[1]) for r in rows) == list(range(1, 9))


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
    trainer = QwenImageEditTrainer(settings(pairs(((48, 32),) * 6), tmp_path, train=dict(val_fraction=0.4, num_epochs=1, eval_interval=1, eval_images=0)))
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
def not_a_image(root): (root/"control_images"/"0001.png").write_text("no image")
def truncated(root): (root/"training_images"/"0002.png").write_bytes((root/"training_images"/"0002.png").read_bytes()[:-40])


@pytest.mark.parametrize("damage, changes, sentence", [
    (break_nothing, dict(data=dict(dataset_path="EMPTY")), r"holds no images; expected training_images/"),
    (remove_control, {}, r"target '0001.png' has no control image; expected .*control_images/0001"),
    (not_a_image, dict(data=dict(strict=True)), r"image .*control_images/0001.png' cannot be read \(not an image or broken\); replace it"),
    (break_nothing, dict(model=dict(pretrained_model_name_or_path="OTHER")), r"contains a StableDiffusionPipeline; this library needs QwenImageEditPipeline"),
    (break_nothing, dict(cache=dict(vae_encoder_device="tpu")), r"device 'tpu' does not exist here; this machine has"),
    (break_nothing, dict(predict=dict(devices=dict(vae="cuda:9"))), r"device 'cuda:9' does not exist here"),
    (break_nothing, dict(model=dict(variant="v1")), r"`model.variant` is v1, but .* is 2511"),
    (break_nothing, dict(model=dict(lora=dict(target_modules=["to_quit"]))), r"`model.lora.target_modules` \['to_quit'\] matches no layer"),
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


@pytest.mark.parametrize("damage, id", [slow(not_a_image, "0001"), (truncated, "0002")])
def test_a_bad_image_is_skipped_and_the_rest_trained_on(damage, id, pairs, tmp_path, capsys):
    root = pairs()
    damage(root)
    trainer = QwenImageEditTrainer(settings(root, tmp_path))
    report = trainer.cache_embeddings()
    assert (report.encoded, [i for i, _ in report.skipped]) == (2, [id])
    trainer.fit()
    said = capsys.readouterr().out
    assert trainer.global_step == 4 and f"{id}: image " in said and "1 of 3 samples are skipped" in said # two buckets, two epochs


def rename_to_pickle(folder): (folder/"transformer"/"diffusion_pytorch_model.safetensors").rename(folder/"transformer"/"diffusion_pytorch_model.bin")
def from_elsewhere(folder): (folder/"model_index.json").write_text((folder/"model_index.json").read_text().replace('"diffusers",\n    "QwenImageTransformer2DModel"', '"os",\n    "QwenImageTransformer2DModel"'))


@pytest.mark.parametrize("change, sentence", [(rename_to_pickle, "has no safetensors weights in transformer/; pickles are not read"),
                                              (from_elsewhere, "needs .os. for transformer; only diffusers and transformers are imported")])
def test_a_model_folder_is_not_trusted(change, sentence, pairs, tmp_path):
    folder = tmp_path/"model"
    shutil.copytree(tiny_folder("2511"), folder)
    change(folder)
    with pytest.raises(ValueError, match=sentence): QwenImageEditTrainer(settings(pairs(), tmp_path, model=dict(pretrained_model_name_or_path=str(folder)))).set_lora()


def test_quantized_prediction(tmp_path, pairs):
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path)).set_lora()
    plain = trainer.predict(Image.new("RGB", (40, 30), "red"), "x", num_inference_steps=2).astype(int)
    trainer.quantize = True
    trainer.setup_predict()
    assert type(trainer.transformer.transformer_blocks[0].attn.to_q.base_layer).__name__ == "QLinear"
    quantized = trainer.predict(Image.new("RGB", (40, 30), "red"), "x", num_inference_steps=2).astype(int)
    assert 0 < abs(plain - quantized).mean() < 12


# --- what an outside tester broke
def test_another_models_latents_are_never_trained_on(pairs, tmp_path, built):
    root, other = pairs(), dict(pretrained_model_name_or_path=str(tiny_folder("2511", seed=5)))
    def make(**sections): return QwenImageEditTrainer(settings(root, tmp_path, train=dict(num_epochs=1), **sections))
    make().cache_embeddings()
    built.clear()
    mixed = make(model=other).fit()
    assert built[VAE] == built[TEXT] == 1, "the other model's entries are misses"
    assert adapters_equal(mixed, make(model=other, cache=dict(cache_dir=str(tmp_path/"alone"))).fit())
    built.clear()
    make().fit()
    assert built == {TRANSFORMER: 1}, "and the first model still finds its own"


def test_without_encoders_at_hand_the_manifest_must_name_one_model(pairs, tmp_path):
    root, bare = pairs(), tmp_path/"bare"
    shutil.copytree(tiny_folder("2511"), bare, ignore=shutil.ignore_patterns("vae", "text_encoder"))
    def make(): return QwenImageEditTrainer(settings(root, tmp_path, model=dict(pretrained_model_name_or_path=str(bare))))
    QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings()
    bf16 = settings(root, tmp_path, model=dict(pretrained_model_name_or_path=str(bare)), train=dict(mixed_precision="bf16"))
    with pytest.raises(ValueError, match="filled by tiny-2511 with dtype float32, but this run has bfloat16; precompute for it"): QwenImageEditTrainer(bf16).fit()
    QwenImageEditTrainer(settings(root, tmp_path, model=dict(pretrained_model_name_or_path=str(tiny_folder("2511", seed=5))))).cache_embeddings()
    with pytest.raises(ValueError, match="was filled by 2 encoders: .*; set `cache.encoder_id` to one of them"): make().fit()


def test_a_run_resumed_from_far_back_keeps_its_own_checkpoints(pairs, tmp_path):
    root, keep = pairs(((48, 32),) * 2), tmp_path/"backup"
    def make(**train): return QwenImageEditTrainer(settings(root, tmp_path, train=dict(save_interval=1) | train))
    make(num_epochs=1).fit()
    (tmp_path/"checkpoints"/"epoch_0001").rename(keep)
    make(num_epochs=4).fit()
    make(num_epochs=3, resume_checkpoint=str(keep)).fit()
    assert {"epoch_0002", "epoch_0003"} == {p.name for p in (tmp_path/"checkpoints").glob("epoch_*")}
    assert (tmp_path/"checkpoints"/"latest").read_text() == "epoch_0003"


def test_an_adapter_that_does_not_fit_leaves_the_one_in_memory(pairs, tmp_path):
    from safetensors.torch import save_file
    trainer = QwenImageEditTrainer(settings(pairs(), tmp_path)).set_lora()
    before = lora_state(trainer.transformer)
    save_file({k: torch.zeros(v.shape[0] + 1, v.shape[1] + 1) for k, v in before.items()}, tmp_path/"wrong.safetensors")
    with pytest.raises(ValueError, match="does not fit this transformer: .*transformer_blocks.0.attn.to_.* use the base model"): trainer.load_lora(tmp_path/"wrong.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(before.values(), lora_state(trainer.transformer).values(), strict=True))


def test_a_gpu_that_only_emulates_bfloat16_is_not_believed(monkeypatch):
    from contextlib import nullcontext
    from qie_nb.models.quantize import pick_dtype
    for name, fn in dict(is_bf16_supported=lambda including_emulation=True: including_emulation, get_device_name=lambda d=None: "Tesla T4", device=lambda d: nullcontext()).items(): monkeypatch.setattr(torch.cuda, name, fn)
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
