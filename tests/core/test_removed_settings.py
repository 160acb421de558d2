"""Settings that do not exist any more: their defaults are dropped without a word, other values with a note, and those that changed results are refused."""
import functools, json, re
from pathlib import Path

import pytest, yaml

from helpers import OnStep
from qie_nb import config
from qie_nb.config import all_settings, describe, load_config_from_yaml, make_config, save_config
from qie_nb.core import settings as removed_settings
from qie_nb.core.files import _sha256
from qie_nb.core.settings import (
    ON_RESUME, REMOVED, Removed, removed, removed_names, without_removed)
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.checkpoint import complete_checkpoints
from qie_nb.training.resume import changed_settings, checkpoint_misfit, diff_runs, settings_metadata

OTHER = { # values that a run could have; accepted before
    "model.lora.init_lora_weights": True, "data.num_workers": 2, "data.strict": True, "train.adapter_dtype": "float32", "train.max_nonfinite_steps": 7,
    "train.checkpoint_budget_gb": 1.5, "train.eval_noise_samples": 3, "cache.prefetch": 0, "cache.share_prompt_prefix": False, "cache.vae_2d": False,
    "cache.verify": False, "cache.vision_windows": False}
REFUSED = {"model.lora.init_lora_weights", "data.strict", "train.adapter_dtype"}
SAVED = Path(__file__).with_name("saved_with_removed_settings.yaml")


def nested(name, value) -> dict:
    for part in reversed(name.split(".")): value = {part: value}
    return value


def as_yaml(name, value, folder):
    (folder/"run.yaml").write_text(yaml.safe_dump(nested(name, value)))
    return load_config_from_yaml(folder/"run.yaml")


def as_json(name, value, folder):
    (folder/"run.json").write_text(json.dumps(nested(name, value)))
    return load_config_from_yaml(folder/"run.json")


def as_argument(name, value, folder): return load_config_from_yaml(None, [f"{name}={json.dumps(value)}".replace('"', "")])


def as_dict(name, value, folder): return make_config(nested(name, value))


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch): monkeypatch.setattr(config, "_reported", set())


def test_each_is_declared_whole_and_under_one_name():
    assert OTHER.keys() == REMOVED.keys() and REFUSED == {n for n, r in REMOVED.items() if r.changes_results}
    today = {n for s in all_settings() for n in (s.name, *s.role.older)}
    assert not today & removed_names().keys() and len(removed_names()) == sum(1 + len(r.older) for r in REMOVED.values())
    assert all(r.on_resume in ON_RESUME and r.instead and OTHER[n] != r.default for n, r in REMOVED.items())
    with pytest.raises(ValueError, match="`on_resume` must be one of .*, got 'never'"): removed(1, on_resume="never", changes_results=False, instead="")


@pytest.mark.parametrize("read", [as_yaml, as_json, as_argument, as_dict])
@pytest.mark.parametrize("written", removed_names())
def test_a_default_is_silent_and_another_value_is_reported_or_refused(written, read, tmp_path, capsys):
    name = removed_names()[written]
    gone = REMOVED[name]
    assert read(written, gone.default, tmp_path) == make_config() and capsys.readouterr().out == ""
    if gone.changes_results:
        said = f"`{written}` is no longer a setting, got {OTHER[name]!r}; {gone.instead}"
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"): read(written, OTHER[name], tmp_path)
        assert capsys.readouterr().out == ""
        return
    for _ in range(2): assert read(written, OTHER[name], tmp_path) == make_config()
    assert capsys.readouterr().out == f"older names of settings were translated: {written} has no effect any more ({gone.instead})\n"


def test_a_value_that_trained_the_same_is_not_refused(capsys):
    assert make_config(nested("train.adapter_dtype", "base")) == make_config()
    assert "train.adapter_dtype has no effect any more" in capsys.readouterr().out


def test_a_saved_configuration_with_all_keys_loads_without_a_word(tmp_path, capsys):
    keys = set(re.findall(r"^ *(\w+):", SAVED.read_text(), re.M))
    assert {n.rsplit(".", 1)[1] for n in REMOVED} - keys == {"vision_windows"}, "which had gone before"
    c = load_config_from_yaml(SAVED)
    then = dict(num_epochs=10, save_interval=5) # the defaults of that version, which it wrote
    assert c == make_config(dict(train=then)) and capsys.readouterr().out == ""
    save_config(c, tmp_path/"again.yaml")
    assert c == load_config_from_yaml(tmp_path/"again.yaml") and keys - set(re.findall(r"^ *(\w+):", (tmp_path/"again.yaml").read_text(), re.M)) == {
        n.rsplit(".", 1)[1] for n in REMOVED if n != "cache.vision_windows"}, "not written any more"


def test_a_command_line_can_take_back_what_a_file_has(tmp_path, capsys):
    (tmp_path/"run.yaml").write_text("data: {strict: true}\ntrain: {eval_pictures: 1}")
    assert load_config_from_yaml(tmp_path/"run.yaml", ["data.strict=false"]).train.eval_images == 1
    assert capsys.readouterr().out == "older names of settings were translated: train.eval_pictures -> train.eval_images\n"
    with pytest.raises(ValueError, match="`data.strict` is no longer"): load_config_from_yaml(tmp_path/"run.yaml", ["train.seed=1"])


def test_the_newest_name_counts_and_what_is_given_stays_as_it_is():
    given = dict(train=dict(max_nonfinite_steps=5, stop_after_nonfinite=9, seed=3), cache=None)
    assert without_removed(given) == (dict(train=dict(seed=3), cache=None), []) and given["train"]["stop_after_nonfinite"] == 9


@pytest.mark.parametrize("raw", [dict(training=dict(eval_noises=2, adapter_dtype="auto")), dict(datasets=[dict(folder_path="/a", num_workers=0)]),
                                 dict(data=dict(init_args=dict(strict=False), class_path="a.ImageDataset"))])
def test_sections_of_older_projects(raw, capsys):
    make_config(raw)
    out = capsys.readouterr().out
    assert not any(n.rsplit(".", 1)[1] in out for n in removed_names())


@pytest.mark.parametrize("name", REMOVED)
def test_an_unknown_key_is_answered_with_what_replaced_it(name):
    *sections, key = name.split(".")
    said = f"^{re.escape(f'`{name}` is no longer a setting; {REMOVED[name].instead}')}$"
    section = make_config()
    for s in sections: section = getattr(section, s)
    for value in (REMOVED[name].default, OTHER[name]):
        with pytest.raises(ValueError, match=said): setattr(section, key, value)
    with pytest.raises(ValueError, match=said): make_config(dict(logging={key: 1})) # in another section
    with pytest.raises(ValueError, match=said): describe(name)
    with pytest.raises(ValueError, match="`train.verifies` is not a known key; did you mean"): make_config(dict(train=dict(verifies=1)))


# --- checkpoints
def test_changes_of_removed_settings_are_not_printed():
    was = make_config().model_dump(mode="json")
    for name, value in OTHER.items():
        *sections, key = name.split(".")
        inner = was
        for s in sections: inner = inner[s]
        inner[key] = value
    assert changed_settings(was, make_config().model_dump(mode="json")) == ""


def test_a_removed_setting_that_had_to_match_is_still_compared(monkeypatch):
    def facts(**more): return dict(settings=settings_metadata(make_config(), "float32", None, 1) | more)
    before = facts()
    monkeypatch.setitem(removed_settings.REMOVED, "train.focus", Removed(2., "must match", True, "all pairs count alike", ("train.gamma",)))
    assert facts()["settings"]["train.focus"] == 2.
    assert diff_runs(before, facts()) == [] == diff_runs(before | dict(settings=before["settings"] | {"train.gamma": 2.}), facts())
    for name in ("train.focus", "train.gamma"):
        assert diff_runs(dict(settings=before["settings"] | {name: 3.}), facts()) == ["`train.focus`: 3.0 in the checkpoint, 2.0 now"]


def test_a_checkpoint_with_other_values_resumes(trained_run, tmp_path, capsys):
    checkpoint = complete_checkpoints(trained_run.copy(tmp_path/"run")/"checkpoints")[1]
    state, listed = checkpoint/"state.json", checkpoint/"COMPLETE"
    facts = json.loads(state.read_text())
    for name, value in OTHER.items():
        *sections, key = name.split(".")
        functools.reduce(lambda inner, s: inner[s], sections, facts["config"])[key] = value
    state.write_text(json.dumps(facts))
    listed.write_text(json.dumps(json.loads(listed.read_text()) | {"state.json": _sha256(state)}))
    assert facts["global_step"] == 4
    train = dict(resume_checkpoint=str(checkpoint), max_train_steps=5, save_steps=None, eval_steps=None)
    raw = trained_run.settings(tmp_path/"again", train=train)
    assert checkpoint_misfit(checkpoint, raw) == ""
    losses = []
    QwenImageEditTrainer(raw, [OnStep(lambda t: losses.append(float(t.state.loss)))]).fit()
    assert losses == pytest.approx(trained_run.losses[4:5], rel=1e-4)
    line, = [l for l in capsys.readouterr().out.splitlines() if l.startswith("resumed from")]
    assert not any(n in line for n in removed_names())
