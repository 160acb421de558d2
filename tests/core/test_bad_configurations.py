"""Configurations that people write by mistake: each is read as meant, or refused in one sentence with a remedy."""
import math, os
from pathlib import Path

import pytest

from qie_nb.config import Config, load_config_from_yaml, make_config
from qie_nb.core.section import all_settings
from qie_nb.core.settings import value_of

TWICE = "has '{}' twice .*keep one of them"


def refused(act, sentence):
    "One line, with this sentence in it."
    with pytest.raises((ValueError, OSError), match=sentence) as e: act()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name, text, sentence", [
    ("run.yaml", "train: {seed: 1}\ndata: {batch_size: 2}\ntrain: {num_epochs: 2}", TWICE.format("train") .replace(" .*", r" \(lines 1 and 3\); ")),
    ("run.yaml", "optimizer:\n  lr: 1e-3\n  lr: 1e-4", TWICE.format("lr")),
    ("run.yaml", "train: {samples: [{image: a.png, prompt: x, prompt: y}]}", TWICE.format("prompt")),
    ("run.yaml", "train: {style_prompts: {anime: a, anime: b}}", TWICE.format("anime")),
    ("run.json", '{"train": {"seed": 1},\n "train": {}}', TWICE.format("train")),
    ("run.json", '{"train": {"seed": 1, "seed": 2}}', TWICE.format("seed")),
    ("run.yaml", "train: {max_train_steps: 0500}", "0500 .* octal; write 500"),
    ("run.yaml", "data: {target_dir: 0123}", "octal; write 123, or '0123' in quotes"),
    ("run.yaml", "train:\n\u00a0\u00a0seed: 3", r"no-break space \(U\+00A0\) in line 2"),
    ("run.yaml", "train:\n\u200bseed: 3", "zero width space"),
    ("run.yaml", "data: {prompt: no}", "`data.prompt` must be text, got a switch .*put it in quotes"),
    ("run.yaml", "data: {target_dir: 2024}", "`data.target_dir` must be text, got the number 2024; put it in quotes"),
    ("run.yaml", "version https://git-lfs.github.com/spec/v1\noid sha256:1", "is a Git LFS pointer; run `git lfs pull`"),
    ("run.yaml", "<!DOCTYPE html><html>", "is a web page"),
    ("run.yaml", "PK\x03\x04\0\0", "is a ZIP archive"),
    ("run.json", '{"optimizer": {"lr": NaN}}', "has the value NaN; write a finite number"),
])
def test_a_file_that_cannot_be_meant_is_refused(name, text, sentence, tmp_path):
    (tmp_path/name).write_text(text, encoding="utf-8")
    refused(lambda: load_config_from_yaml(tmp_path/name), sentence)


def test_a_file_is_read_by_its_content(tmp_path):
    (tmp_path/"run.json").write_text("train:\n  seed: 3\n")
    assert load_config_from_yaml(tmp_path/"run.json").train.seed == 3
    (tmp_path/"run.txt").write_bytes(b'\xef\xbb\xbf\xef\xbb\xbf{"train": {"seed": 4}}')
    assert load_config_from_yaml(f" '{tmp_path/'run.txt'}' ").train.seed == 4


def test_a_pipe_and_a_device_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path/"run.yaml")
    refused(lambda: load_config_from_yaml(tmp_path/"run.yaml"), "is a pipe")
    (tmp_path/"zero.yaml").symlink_to("/dev/zero")
    refused(lambda: load_config_from_yaml(tmp_path/"zero.yaml"), "links to a device")


NUMBERS = [s.name for s in all_settings() if isinstance(s.default, (int, float)) and not isinstance(s.default, bool)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 10**30, -1e30, True, "nan", "inf"])
@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_is_taken_that_no_run_can_use(name, value):
    section, _, key = name.rpartition(".")
    inner = {key: value}
    for part in reversed(section.split(".")):
        inner = {part: inner}
    refused(lambda: make_config(inner), f"`{name.removeprefix('train.') if 'max_hours' in name else name}` must be")


@pytest.mark.parametrize("raw, sentence", [
    (dict(optimizer=dict(betas=[0.9, 1.5])), "`optimizer.betas.1` must be less than 1, got 1.5"),
    (dict(optimizer=dict(lr=1000)), "`optimizer.lr` must be at most 10, got 1000"),
    (dict(optimizer=dict(eps=1e30)), "`optimizer.eps` must be at most 1"),
    (dict(train=dict(seed=10**23)), r"`train.seed` must be below 2\*\*63"),
    (dict(train=dict(logit_mean=math.nan)), "`train.logit_mean` must be a finite number"),
    (dict(model=dict(lora=dict(lora_alpha=math.inf))), "`model.lora.lora_alpha` must be a finite number"),
    (dict(train=dict(max_hours=math.inf)), "`train.max_hours` must be a number of hours"),
    (dict(data=dict(image_size=[10**9, 10**9])), "`image_size` must be"),
    (dict(data=dict(control_area=10**12)), "`data.control_area` must be at most"),
    (dict(train=dict(output_dir="")), "`train.output_dir` must not be empty"),
    (dict(data=dict(dataset_path="  ")), "`data.dataset_path` must not be empty"),
    (dict(data=dict(dataset_path=["set", ""])), "`data.dataset_path.*` must not be empty"),
    (dict(train=dict(output_dir="gs://bucket/run")), "`train.output_dir` must be a folder on this machine"),
    (dict(train=dict(output_dir=Path("s3://b/r"))), "`train.output_dir` must be a folder on this machine"),
    (dict(logging=dict(log_dir="hf://me/run")), "`logging.log_dir` must be a folder on this machine"),
    (dict(data=dict(image_size=[104, 96])),
     "`image_size` must be a multiple of 16, got 104; use 96 or 112"),
    (dict(data=dict(image_size="large")), r"`image_size` must be \[width, height\] or one number, got 'large'"),
])
def test_values_are_refused_when_the_configuration_is_made(raw, sentence):
    refused(lambda: make_config(raw), sentence)


@pytest.mark.parametrize("value, size", [
    ("1024x768", [1024, 768]), ("1024 × 768", [1024, 768]), ("512", [512, 512]), ([1024], [1024, 1024]), (512, [512, 512]),
    ("832, 576", [832, 576])])
def test_sizes_are_read_as_people_write_them(value, size):
    assert make_config(dict(data=dict(image_size=value))).data.image_size == size


def test_a_command_line_takes_text_where_only_text_is_meant(tmp_path):
    c = load_config_from_yaml(None, ["data.target_dir=2024", "data.prompt=no", "train.output_dir=0123", "train.max_train_steps=20"])
    assert (c.data.target_dir, c.data.prompt, c.train.output_dir, c.train.max_train_steps) == ("2024", "no", "0123", 20)
    refused(lambda: load_config_from_yaml(None, ["train.seed=1", "train.seed=2"]), r"`train.seed` is set twice \(1, 2\)")
    refused(lambda: load_config_from_yaml(None, ["train.seed=no"]), "`train.seed` must be a number")


def test_paths_are_those_that_were_meant(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUNS", "/runs")
    c = make_config(dict(
        train=dict(output_dir="~/run"), logging=dict(log_dir='"$RUNS/logs" '), cache=dict(cache_dir=["~/cache", "s3://bucket/~"]),
        data=dict(dataset_path=Path("~/pairs"))))
    assert (c.train.output_dir, c.logging.log_dir) == (f"{tmp_path}/run", "/runs/logs")
    assert (c.cache.cache_dir, c.data.dataset_path) == ([f"{tmp_path}/cache", "s3://bucket/~"], f"{tmp_path}/pairs")
    c.train.output_dir = "~/other" # as notebooks do
    assert c.train.output_dir == f"{tmp_path}/other"


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 13])
def test_a_presets_warm_up_gives_way_to_a_short_run(steps):
    c = make_config(dict(preset="tiny", train=dict(max_train_steps=steps)))
    assert c.lr_scheduler.warmup_steps < steps and c.lr_scheduler.warmup_steps <= 3


def test_a_presets_warm_up_gives_way_to_a_schedule_without_one():
    assert make_config(dict(preset="tiny", lr_scheduler=dict(scheduler_type="constant"))).lr_scheduler.warmup_steps == 0
    own = make_config(dict(preset="tiny", train=dict(max_train_steps=9), lr_scheduler=dict(warmup_steps=8)))
    assert own.lr_scheduler.warmup_steps == 8, "what the user wrote stays"
