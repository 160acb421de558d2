"""Each setting declares its whole role: what a resume does with it, who needs it, its other names."""
import json

import pytest

from qie_nb.config import (
    BATCHES_PER_STEP, Config, Section, add_setting, all_settings, describe, make_config, older_names, other_names, remove_setting)
from qie_nb.core.settings import NEEDED_BY, ON_RESUME, parse_settings, role_of, setting
from qie_nb.lora.model_card import card_settings
from qie_nb.training.resume import changed_settings, diff_runs, settings_metadata

FACTS = {"base", "data", "encoders", "dtype of the base", "model.quantize", "data.batch_size", BATCHES_PER_STEP}
EVERYBODY = {
    "preset",
    "model.pretrained_model_name_or_path",
    "data.dataset_path",
    "data.prompt",
    "data.trigger_word",
    "data.image_size",
    "model.lora.r",
    "optimizer.lr",
    "train.output_dir",
    "cache.cache_dir",
    "train.resume_checkpoint",
}


@pytest.fixture
def focus():
    "A setting from outside, which a resume must match."
    add_setting("train", "focus", setting(2., "exponent of the weight", on_resume="must match", on_card=True, also_called=("gamma",)))
    yield "train.focus"
    remove_setting("train", "focus")


def stored(**sections) -> dict:
    return dict(settings=settings_metadata(make_config(sections), "float32", None, 1))


def test_the_batches_of_a_step_count_over_all_processes_and_alpha_is_the_rank_if_it_is_not_set():
    config = make_config(dict(train=dict(gradient_accumulation_steps=3), model=dict(lora=dict(r=6))))
    one, two = (settings_metadata(config, "float32", None, 1, processes) for processes in (1, 2))
    assert (one[BATCHES_PER_STEP], two[BATCHES_PER_STEP]) == (3, 6)
    given = make_config(dict(model=dict(lora=dict(r=6, lora_alpha=12))))
    alphas = [found["model.lora.lora_alpha"] for found in (one, settings_metadata(given, "float32", None, 1))]
    assert alphas == [6, 12]


@pytest.mark.parametrize("text, value", [
    ("0.5", 0.5), ("3", 3), ("true", True), ("[1, 2]", [1, 2]), ("", None),
    ("'2511'", "2511"), ("yes: it is", "yes: it is"), ("a # b", "a # b")])
def test_a_value_on_a_command_line_is_what_yaml_has_or_text(text, value):
    found = parse_settings([f"train.focus={text}"])["train"]["focus"]
    assert found == value and type(found) is type(value)


def test_a_setting_without_its_role_cannot_be_declared():
    with pytest.raises(TypeError, match="on_resume"):
        class Forgotten(Section):
            focus: float = setting(2., "exponent of the weight")
    with pytest.raises(TypeError, match="on_resume"):
        class Plain(Section):
            focus: float = 2.
    with pytest.raises(ValueError, match="`needed_by` must be one of everybody, many, few, got 'some'"):
        setting(2., "exponent of the weight", on_resume="must match", needed_by="some")


def test_roles_are_of_known_kinds():
    for s in all_settings():
        assert s.role.on_resume in ON_RESUME and s.role.needed_by in NEEDED_BY and s.help, s.name
        if s.role.compared_as: assert s.role.compared_as in FACTS and s.role.on_resume == "must match", s.name
        for other in s.role.only_with: assert other in {o.name for o in all_settings()}, s.name


def test_names_lead_to_one_setting():
    names = [n for s in all_settings() for n in (s.name, *s.role.older)]
    assert len(names) == len(set(names)) and older_names()["train.mask_background"] == "train.mask_min_weight"
    others = [n for s in all_settings() for n in s.role.also_called]
    assert len(others) == len(set(others)) and other_names()["rank"] == "model.lora.r"


def test_what_every_run_needs_comes_first():
    groups = describe().groups()
    assert list(groups)[:2] == ["Every run", "Many runs"] and {row[0] for row in groups["Every run"]} == EVERYBODY
    assert sorted(row[0] for rows in groups.values() for row in rows) == sorted(s.name for s in all_settings())
    text = repr(describe())
    assert text.startswith("# Every run\npreset") and text.index("model.lora.r (") < text.index("model.revision (")


@pytest.mark.parametrize("section, key, value", [
    ("lr_scheduler", "power", 2.), ("lr_scheduler", "num_cycles", 0.5), ("train", "val_path", "/pairs"), ("train", "eval_images", 1)])
def test_what_changes_the_rate_or_an_evaluation_is_printed(section, key, value):
    was, now = (make_config(raw).model_dump(mode="json") for raw in ({}, {section: {key: value}}))
    assert changed_settings(was, now) == f"`{section}.{key}` {was[section][key]} -> {value}"
    del was[section][key] # a checkpoint older than the setting ran with its default
    assert changed_settings(was, now).startswith(f"`{section}.{key}`") and changed_settings(was, make_config().model_dump(mode="json")) == ""


def test_a_checkpoint_older_than_a_setting_ran_with_its_default(focus):
    was = stored()
    assert was["settings"].pop(focus) == 2.
    assert diff_runs(was, stored()) == []
    assert diff_runs(was, stored(train=dict(focus=3.))) == ["`train.focus`: 2.0 in the checkpoint, 3.0 now"]


def test_a_setting_from_outside_is_like_the_librarys(focus):
    c = make_config(dict(train=dict(focus=1)))
    assert c.train.focus == 1. and json.loads(c.model_dump_json())["train"]["focus"] == 1.
    assert ("train.focus", 2., "exponent of the weight") in describe("train") and card_settings(c)["train.focus"] == 1.
    with pytest.raises(ValueError, match="`train.focus` must be a number.*got 'much'"): make_config(dict(train=dict(focus="much")))
    with pytest.raises(ValueError, match="did you mean `train.focus`"): make_config(dict(train=dict(gamma=1)))
    with pytest.raises(ValueError, match="`train.focus` exists already"):
        add_setting("train", "focus", setting(1., "again", on_resume="may change"))


def test_a_setting_that_is_taken_back_is_unknown(focus):
    remove_setting("train", "focus")
    try:
        with pytest.raises(ValueError, match="`train.focus` is not a known key"): make_config(dict(train=dict(focus=1)))
        assert "focus" not in Config().model_dump()["train"]
    finally: add_setting("train", "focus", setting(2., "exponent of the weight", on_resume="must match"))
    assert role_of(Config.model_fields["train"].annotation.model_fields["focus"]).on_resume == "must match"


def test_the_defaults_are_those_of_the_recipes():
    "A run without settings learns the same in each version."
    c = make_config()
    assert (c.model.lora.r, c.model.lora.lora_alpha, c.model.lora.lora_dropout) == (16, None, 0.)
    assert c.model.lora.target_modules == ["to_q", "to_k", "to_v", "to_out.0"]
    assert (c.optimizer.name, c.optimizer.lr, c.optimizer.betas) == ("adamw", 1e-4, (0.9, 0.999))
    assert (c.optimizer.weight_decay, c.optimizer.eps) == (0.01, 1e-8)
    assert c.lr_scheduler.scheduler_type == "constant_with_warmup"
    assert c.lr_scheduler.warmup_steps == 0
    assert (c.data.image_size, c.data.batch_size, c.data.crop) == ([1024, 1024], 1, False)
    assert (c.data.caption_dropout_rate, c.data.identity_share) == (0.1, 0.)
    assert (c.train.timestep_sampling, c.train.timestep_shift) == ("uniform", 3.)
    assert (c.train.loss_weighting, c.train.mask_min_weight) == ("none", 0.1)
    assert (c.train.max_grad_norm, c.train.ema_decay, c.train.seed) == (1., None, 0)
    assert (c.train.val_fraction, c.train.keep_checkpoints) == ("auto", 2)
