"""The configuration: version 1's spellings give the same settings, and each is reported once per process."""
import json, re

import pytest, yaml

from qie_nb import config
from qie_nb.config import (
    check_plan_arguments, describe, load_config_from_yaml, make_config, older_names, sides_of)

V1 = dict(model=dict(release_shards=False, table_steps=[8]), cache=dict(decode_ahead=2, prompt_prefix=False, identity="ab12", vision_windows=False),
          train=dict(block_streaming=True, transformer_devices=["cuda:0", "cuda:1"], eval_noises=3, eval_pictures=1, mask_background=0.5, stop_after_nonfinite=7))
TODAY = dict(model=dict(delete_downloaded_shards=False, modulation_table_steps=[8]), cache=dict(encoder_id="ab12"),
             train=dict(blocks_to_swap=True, model_parallel_devices=["cuda:0", "cuda:1"], eval_images=1, mask_min_weight=0.5))


def test_version_1_yaml_gives_the_same_configuration(tmp_path):
    (tmp_path/"v1.yaml").write_text(yaml.safe_dump(V1))
    (tmp_path/"v1.json").write_text(json.dumps(V1))
    today = make_config(TODAY)
    assert load_config_from_yaml(tmp_path/"v1.yaml") == load_config_from_yaml(tmp_path/"v1.json") == make_config(V1) == today != make_config()
    renamed = {f"{s}.{k}" for s, keys in V1.items() for k in keys}
    assert {k for k in older_names() if k.split(".")[0] not in ("data", "training")} - renamed == {"train.ode_integration_steps"}


def test_aliases_lead_to_known_settings():
    known = {name for name, *_ in describe()}
    assert older_names() and not older_names().keys() & known and all(new in known for new in older_names().values())


def test_todays_spelling_wins_over_an_older_one():
    c = make_config(dict(train=dict(eval_pictures=1, eval_images=2), training=dict(mask_background=0.5, batch_size=3), data=dict(batch_size=2)))
    assert (c.train.eval_images, c.train.mask_min_weight, c.data.batch_size) == (2, 0.5, 2)


def test_translations_are_reported_once(capsys, monkeypatch):
    monkeypatch.setattr(config, "_reported", set())
    for _ in range(2): make_config(V1)
    out = capsys.readouterr().out
    assert out.count("train.block_streaming -> train.blocks_to_swap") == out.count("cache.vision_windows has no effect any more") == 1 and out.count("\n") == 1


def test_wrong_values_name_the_setting():
    with pytest.raises(ValueError, match="`train.eval_images` must be at least 0, got -1"): make_config(dict(train=dict(eval_pictures=-1)))


def test_a_preset_lies_under_explicit_settings(tmp_path):
    c = make_config(dict(preset="Tiny", train=dict(max_train_steps=7, val_path="x")))
    assert (c.preset, c.train.max_train_steps, c.train.val_fraction, c.data.image_size) == ("tiny", 7, "auto", [96, 96])
    assert config.Config(preset="tiny", train=config.TrainSection(seed=3)).train.seed == 3
    config.save_config(c, tmp_path/"c.yaml")
    assert load_config_from_yaml(tmp_path/"c.yaml").model_dump() == c.model_dump(), "a saved configuration has all values"
    c = make_config(dict(preset="rtx4080", data=dict(image_size=[1024, 1024]), model=None))
    assert c.data.control_area == 2**20 and c.train.gradient_checkpointing is True and c.model.quantize == "nf4"


def test_a_misspelt_preset_is_refused():
    with pytest.raises(ValueError, match="`preset` 't4x3' does not exist; did you mean `t4x2`"): make_config(dict(preset="t4x3"))
    with pytest.raises(ValueError, match="data.image_size"): make_config(dict(preset="t4", data=dict(image_size=["a"])))


@pytest.mark.parametrize("raw, sentence", [
    (dict(train=dict(steps=3)), "`train.steps` is not a known key; did you mean `train.max_train_steps`?"), (dict(learning_rate=1), "did you mean `optimizer.lr`"),
    (dict(train=dict(compile="x")), "`train.compile` must be true, false or 'auto', got 'x'"), (dict(train=dict(num_epochs=1.5)), "must be an integer, got 1.5"),
    (dict(model=dict(lora=3)), "`model.lora` must be a mapping of settings, got 3"), (dict(train=dict(val_fraction="often")), "`train.val_fraction` must be a number or 'auto', got 'often'"),
    (dict(train=dict(val_fraction=1.5)), "`train.val_fraction` must be less than 1 or 'auto', got 1.5"), (dict(train=dict(eval_interval="x")), "`train.eval_interval` must be an integer or 'auto', got 'x'"),
    (dict(cache=dict(batch_size=0)), "`cache.batch_size` must be at least 1 or 'auto', got 0"), (dict(model=dict(quantize=3)), "must be true, false, 'none', 'qfloat8'"), ({3: dict(seed=1)}, "`3` is not a known key; use preset, model, data,")])
def test_messages_say_what_a_value_must_be(raw, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)): make_config(raw)


def test_empty_sections_have_their_defaults():
    assert make_config(dict.fromkeys(("model", "data", "train", "cache", "predict", "optimizer", "lr_scheduler", "logging"))) == make_config() == make_config(dict(model=dict(lora=None), predict=dict(devices=None)))
    assert make_config(dict(data=None, training=dict(batch_size=3))).data.batch_size == 3


@pytest.mark.parametrize("text, value", [("paint the number #42 on it", "paint the number #42 on it"), ("#x", "#x"), ("- x", "- x"), (" > Note: *a ", "> Note: *a"), ("a, [trigger] b", "a, [trigger] b"),
                                         ("'a #b'", "a #b"), ("", None), ("Null", None)])
def test_text_on_a_command_line_is_taken_as_it_is(text, value):
    assert load_config_from_yaml(None, [f"data.prompt={text}"]).data.prompt == value


def test_a_misspelt_attribute_is_one_sentence():
    with pytest.raises(ValueError, match="^`steps` is not a known key; did you mean `train.max_train_steps`.$"): make_config().train.steps = 3
    with pytest.raises(ValueError, match="^`preset` cannot be changed afterwards"): make_config().preset = "t4"


def test_settings_of_a_command_line_override_a_file(tmp_path):
    (tmp_path/"run.yaml").write_text("train: {eval_pictures: 1, mixed_precision: no}\nmodel: {lora: {r: 4}}")
    c = load_config_from_yaml(tmp_path/"run.yaml", ["train.eval_images=3", "model.lora.lora_alpha=2", "optimizer.lr=1e-4", "train.style_prompts={a: b}"])
    assert (c.train.eval_images, c.train.mixed_precision, c.model.lora.r, c.model.lora.lora_alpha, c.optimizer.lr, c.train.style_prompts) == (3, "no", 4, 2, 1e-4, dict(a="b"))
    with pytest.raises(ValueError, match="did you mean `model.lora.r`"): load_config_from_yaml(tmp_path/"run.yaml", ["model.lora.rank=3"])
    with pytest.raises(ValueError, match="`lora.r` and `lora` are both set"): load_config_from_yaml(None, ["lora=1", "lora.r=3"])


@pytest.mark.parametrize("text, sentence", [("train:\n\tseed: 1", "has a tab in line 2; use spaces"), ('data: {dataset_path: "C:\\pairs"}', "use single quotes"),
                                            ("train:\n  seed 1\n  a: 2", "line 3: mapping values are not allowed here")])
def test_yaml_errors_name_the_line(text, sentence, tmp_path):
    (tmp_path/"run.yaml").write_text(text)
    with pytest.raises(ValueError, match=sentence): load_config_from_yaml(tmp_path/"run.yaml")


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path/"run.yaml").write_text("data: {prompt: café}", encoding="latin-1")
    with pytest.raises(ValueError, match="run.yaml' is not UTF-8; save it as UTF-8$"): load_config_from_yaml(tmp_path/"run.yaml")


def test_a_file_is_a_configuration(tmp_path):
    (tmp_path/"run.yaml").write_text("train: {seed: 3}")
    assert make_config(tmp_path/"run.yaml") == make_config(str(tmp_path/"run.yaml")) == make_config(dict(train=dict(seed=3)))
    with pytest.raises(ValueError, match="must have sections like `train:` with settings below, got \\['train'\\]"): make_config(["train"])


def test_a_refused_assignment_changes_nothing():
    c = make_config(dict(train=dict(max_train_samples=9)))
    with pytest.raises(ValueError, match="both say how long the run is"):
        c.train.max_train_steps = 3
    assert (c.train.max_train_steps, c.train.max_train_samples) == (None, 9)


@pytest.mark.parametrize("typed, sides", [
    ("832x576", [832, 576]), (1024, [1024, 1024]), ((832, 576), [832, 576]),
    ("832 * 576", [832, 576])])
def test_a_typed_resolution_is_width_and_height(typed, sides):
    assert sides_of(typed) == sides


def test_what_no_plan_can_be_made_of_names_the_option():
    with pytest.raises(FileNotFoundError, match="^`--model` 'nofolder' is not a folder"):
        check_plan_arguments(model="nofolder")
    with pytest.raises(ValueError, match="^`resolution` must be a side or width x height"):
        check_plan_arguments(resolution="large")
    with pytest.raises(ValueError, match="`model.quantize` must be "):
        check_plan_arguments(quantize="nf5")
    check_plan_arguments("2511", "T4", "832x576", "nf4")
