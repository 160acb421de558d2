"""Files that version 1 wrote are read: its YAML, cache, checkpoint and LoRA. tests/version_1.zip was written by the last commit before the renames."""
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qie_nb import config
from qie_nb.cache import EmbeddingCacheManager
from qie_nb.config import load_config_from_yaml
from qie_nb.trainer import QwenImageEditTrainer


@pytest.fixture
def run(tmp_path, monkeypatch):
    "Version 1's folder, as the working directory."
    shutil.unpack_archive(Path(__file__).parents[1]/"version_1.zip", tmp_path/"v1")
    monkeypatch.chdir(tmp_path/"v1")
    return tmp_path/"v1"


@pytest.fixture
def encoded(monkeypatch):
    "Counts calls of the two encoders."
    from diffusers import AutoencoderKLQwenImage
    from transformers import Qwen2_5_VLForConditionalGeneration
    count = Counter()
    for cls, method in ((AutoencoderKLQwenImage, "encode"), (Qwen2_5_VLForConditionalGeneration, "__init__")):
        real = getattr(cls, method)
        monkeypatch.setattr(cls, method, lambda *a, _real=real, _name=cls.__name__, **kw: (count.update([_name]), _real(*a, **kw))[1])
    return count


def test_old_keys_give_todays_configuration(run, capsys, monkeypatch):
    monkeypatch.setattr(config, "_reported", set()) # each translation is printed once per process
    c = load_config_from_yaml("run.yaml")
    assert (c.model.modulation_table_steps, c.model.delete_downloaded_shards) == ([6], True)
    t = c.train
    assert (t.blocks_to_swap, t.model_parallel_devices, t.eval_images, t.mask_min_weight) == (False, [], 0, 0.25)
    printed = capsys.readouterr().out
    for key in ("model.table_steps", "train.mask_background"): assert f"{key} -> " in printed
    for key in ("train.eval_noises", "train.stop_after_nonfinite", "cache.decode_ahead"): assert f"{key} has no effect any more (" in printed
    for key in ("cache.prompt_prefix", "cache.vision_windows"): assert key not in printed, "removed, with its default"


def old_config():
    "Version 1 followed the installed pipeline."
    c = load_config_from_yaml("run.yaml")
    c.model.image_positions = "installed"
    return c


def test_old_cache_is_used_entry_for_entry(run, encoded):
    files = sorted(p.relative_to(run) for p in (run/"cache").rglob("*.safetensors"))
    report = QwenImageEditTrainer(old_config()).cache_embeddings()
    assert not encoded and report.encoded == 0 and report.reused == 3
    assert sorted(p.relative_to(run) for p in (run/"cache").rglob("*.safetensors")) == files
    assert EmbeddingCacheManager(run/"cache").verify() == []


def test_old_checkpoint_resumes(run, encoded):
    "Version 1 trained steps 1 and 2; step 3 gives what version 1 itself got from there."
    config = old_config()
    config.train.max_train_steps, config.train.resume_checkpoint = 3, "latest"
    t = QwenImageEditTrainer(config).fit()
    assert t.global_step == 3 and not encoded
    ours, theirs = load_file(t.save_lora("new")), load_file(run/"lora_step3"/"pytorch_lora_weights.safetensors")
    before = load_file(run/"lora"/"pytorch_lora_weights.safetensors")
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-5)
        assert not torch.equal(before[key], value)


def test_old_prompts_are_encoded_again_with_3d_positions_and_latents_are_used(run, encoded):
    report = QwenImageEditTrainer(load_config_from_yaml("run.yaml")).cache_embeddings()
    assert encoded == dict(Qwen2_5_VLForConditionalGeneration=1) and report.encoded == 3
    config = load_config_from_yaml("run.yaml")
    config.train.max_train_steps, config.train.resume_checkpoint = 3, "latest"
    with pytest.raises(ValueError, match=r"`model.image_positions`\): running in the checkpoint, 3d now"): QwenImageEditTrainer(config).fit()


def test_old_lora_loads(run):
    t = QwenImageEditTrainer(load_config_from_yaml("run.yaml")).load_lora(run/"lora")
    assert t.active_adapters() == dict(default=1.0)
    saved, old = load_file(t.save_lora("again")), load_file(run/"lora"/"pytorch_lora_weights.safetensors")
    assert saved.keys() == old.keys() and all(torch.equal(saved[k], old[k]) for k in old)
