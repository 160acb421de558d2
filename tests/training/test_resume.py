"""What a checkpoint says of its run, compared with the run that would go on."""
import json

import pytest
import torch

from qie_nb.config import make_config
from qie_nb.core.section import all_settings
from qie_nb.lora.adapters import lora_state
from qie_nb.training.resume import changed_settings, checkpoint_misfit, put_back, recorded
from qie_nb.training.run_data import OLDER_EPOCHS

from loras import trained


def epochs(n) -> dict:
    "A configuration with a number of epochs, as a checkpoint has it."
    return json.loads(make_config(dict(train=dict(num_epochs=n))).model_dump_json())


def test_the_epochs_that_an_older_version_wrote_by_itself_are_no_change():
    written = epochs(1)
    written["train"]["num_epochs"] = OLDER_EPOCHS
    assert changed_settings(written, epochs(None)) == ""
    assert changed_settings(epochs(3), epochs(None)) == "`train.num_epochs` 3 -> None"
    assert changed_settings(epochs(3), epochs(4)) == "`train.num_epochs` 3 -> 4"


@pytest.mark.parametrize("train, value", [
    (dict(mask_min_weight=0.25), 0.25), (dict(mask_background=0.5), 0.5),
    (dict(mask_min_weight=0.25, mask_background=0.5), 0.25)])
def test_a_setting_is_found_by_its_older_name(train, value):
    (setting,) = (s for s in all_settings() if s.name == "train.mask_min_weight")
    assert recorded(dict(train=train), setting) == value
    assert recorded({}, setting) == setting.default


@pytest.mark.parametrize("change", ["one more", "one less"])
def test_an_adapter_with_other_layers_is_not_put_back(change):
    tr = trained()
    state = {name: torch.ones_like(tensor) for name, tensor in lora_state(tr).items()}
    before = lora_state(tr)
    if change == "one more":
        state["another_layer.lora_A.weight"] = torch.ones(4, 8)
    else:
        state.pop(next(iter(state)))
    with pytest.raises(ValueError, match="the checkpoint's adapter has other layers than this one, e.g. "):
        put_back(tr, state)
    assert all(torch.equal(before[name], tensor) for name, tensor in lora_state(tr).items()), "nothing was copied"


@pytest.fixture
def checkpoint(tmp_path):
    "A function of a model's name that writes the state of its run's checkpoint."
    def write(name):
        state = dict(config=dict(model=dict(pretrained_model_name_or_path=name)))
        (tmp_path/"state.json").write_text(json.dumps(state))
        return tmp_path
    return write


MINE = dict(model=dict(pretrained_model_name_or_path="me/model", variant="2511"))


@pytest.mark.parametrize("trained_on, why", [
    ("me/model", ""),
    ("you/other", "which belongs to a run with another model (other)"),
    ("/kaggle/input/model", "")]) # a folder may hold the same model
def test_a_checkpoint_of_another_model_is_named_before_anything_is_downloaded(trained_on, why, checkpoint):
    assert checkpoint_misfit(checkpoint(trained_on), MINE) == why


def test_a_forced_resume_takes_any_checkpoint_that_can_be_read(checkpoint):
    folder = checkpoint("you/other")
    forced = MINE | dict(train=dict(force_resume=True))
    assert checkpoint_misfit(folder, forced) == ""
    (folder/"state.json").write_text("{")
    assert checkpoint_misfit(folder, forced) == "whose state.json is damaged"
