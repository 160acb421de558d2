"""`qie-nb init`: the preset of a GPU, the pairs that it finds, and a file that is a configuration."""
import subprocess, sys

import pytest

from helpers import write_pairs
from qie_nb.config import load_config_from_yaml
from qie_nb.core.presets import preset_of
from qie_nb.data.samples import find_samples
from qie_nb.planning import first_config
from qie_nb.planning.first_config import driver_gpus, init


@pytest.mark.parametrize("name, gib, count, preset", [
    ("Tesla T4", 15., 1, "t4"), ("Tesla T4", 15., 2, "t4x2"), ("NVIDIA L4", 22.5, 1, "l4"), ("NVIDIA A10G", 22.5, 1, "l4"), ("NVIDIA GeForce RTX 3060", 12., 1, "rtx3060"), ("NVIDIA GeForce RTX 3090", 24., 1, "rtx3090"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16., 1, "rtx4080"), ("NVIDIA L40S", 45., 1, "a100"), ("NVIDIA A100-SXM4-80GB", 80., 1, "a100-80"), ("NVIDIA H200", 140., 1, "h100"),
    ("Tesla V100-SXM2-16GB", 16., 1, "t4"), ("NVIDIA GeForce RTX 2080 Ti", 11., 1, None), ("NVIDIA GeForce RTX 3070", 8., 1, None)])
def test_a_gpu_gets_the_preset_that_fits(name, gib, count, preset):
    assert preset_of(name, gib, count) == preset


@pytest.mark.parametrize("gpus", [[], [("Tesla T4", 15.)] * 2, [("NVIDIA GeForce RTX 4090", 24.)], [("NVIDIA GeForce RTX 3070", 8.)]])
@pytest.mark.parametrize("pairs", [0, 3, 12])
def test_the_file_is_a_configuration(gpus, pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if pairs: write_pairs(tmp_path/"here"/"deep"/"set", ((32, 32),) * pairs)
    (tmp_path/"here"/"other").mkdir(parents=True)
    said = init("here", gpus=gpus)
    c, large = load_config_from_yaml("run.yaml"), bool(gpus) and gpus[0][1] > 14
    assert (c.preset != "tiny") == large == c.model.pretrained_model_name_or_path.startswith("Qwen/") and "qie-nb train run.yaml" in said
    assert (len(find_samples(c.data.dataset_path)) == pairs if pairs else c.data.dataset_path == "here") and c.data.image_size == ([512, 512] if large else [96, 96])
    if large:
        rate, samples = 1e-4, 500
    else:
        rate, samples = 5e-3, 600
    assert c.optimizer.lr == rate
    assert c.train.val_fraction == "auto"
    assert c.train.output_dir == "output"
    assert c.train.max_train_samples == samples
    assert c.train.max_train_steps is None
    with pytest.raises(FileExistsError, match="--force"): init("here")


def test_a_folder_may_have_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_pairs(tmp_path/'my "🐈" é: #1', ((32, 32),))
    init(folder, gpus=[])
    assert load_config_from_yaml("run.yaml").data.dataset_path == str(folder) and "🐈" in (tmp_path/"run.yaml").read_text(encoding="utf-8")


def test_the_driver_names_the_gpus(monkeypatch):
    monkeypatch.setattr(first_config.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, "Tesla T4, 15360\nTesla T4, 15360\n[N/A], [N/A]\n"))
    assert driver_gpus() == [("Tesla T4", 15.), ("Tesla T4", 15.)]


def test_torch_is_not_imported():
    code = "import sys, qie_nb.planning.first_config, qie_nb.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_pairs_without_captions_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in write_pairs(tmp_path/"set", ((32, 32),) * 2).rglob("*.txt"): text.unlink()
    said = init("set", gpus=[])
    assert "2 pairs" in said and "have no caption" in said and load_config_from_yaml("run.yaml").data.prompt is None


def test_a_named_folder_is_kept_whatever_is_wrong_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    def said(folder, **kw):
        out = init(folder, force=True, gpus=[], **kw)
        return out, load_config_from_yaml("run.yaml").data.dataset_path
    out, path = said(".")
    assert path == "my_pairs" and "No pairs found" in out
    root = write_pairs(tmp_path/"mix", ((32, 32),) * 2)
    write_pairs(root/"old_backup", ((32, 32),) * 2)
    (root/"control_images"/"0001.png").unlink()
    out, path = said("mix") # not the pairs of another folder
    assert path == "mix" and "0001" in out and "Correct this" in out
    for name in ("cats", "dogs"): write_pairs(tmp_path/"two"/name, ((32, 32),))
    out, path = said("two")
    assert path == "two" and "2 data sets lie below it: 'two/cats', 'two/dogs'; name one" in out
    (tmp_path/"mix"/"t.jsonl").write_text('{"target": "training_images/0000.png", "control": "control_images/0000.png", "prompt": "x"}\n')
    out, path = said("mix/t.jsonl")
    assert path == "mix/t.jsonl" and "found in 'mix/t.jsonl': 1 sample" in out
    (tmp_path/"z.zip").write_text("x")
    for name in ("z.zip", "~nosuchuser/x", "~nosuchuser/run.jsonl"):
        with pytest.raises((ValueError, FileNotFoundError), match=name): init(name, force=True, gpus=[])
    monkeypatch.setenv("HERE", str(tmp_path))
    assert said("$HERE/mix/t.jsonl")[1] == str(tmp_path/"mix"/"t.jsonl")
