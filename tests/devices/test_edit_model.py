"""The one door to the model, and what the ways to fit a transformer say of themselves."""

from dataclasses import replace

import pytest
import torch

from qie_nb.config import make_config
from qie_nb.core.choice import Choice, Plan
from qie_nb.devices import edit_model
from qie_nb.devices.edit_model import EditModel
from qie_nb.devices.strategies.base import forbid_move
from qie_nb.devices.strategies.ways import STRATEGIES, Strategy, asked_for, in_order, used_by
from qie_nb.planning.memory import block_bytes, memory_query, stream_tokens
from qie_nb.planning.memory import memory_of
from qie_nb.tiny.random_models import tiny_folder

WAYS = {
    "property": lambda model: model.transformer,
    "get": lambda model: model.get("transformer"),
    "move": lambda model: model.move("transformer", "cpu"),
    "gathered": lambda model: model.gathered(),
}


class Asked:
    "A run that keeps the modulation layers and counts how often it is asked."

    def __init__(self):
        self.seen = []

    def decide(self, training):
        "Note the question and whether the transformer was loaded."
        self.seen.append(training)

    def copy_sets(self, dtype):
        "No table."
        return {}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_the_transformer_is_the_same_door(way):
    model, run = EditModel(str(tiny_folder("2511")), fp16=True), Asked()
    model.ask_for_table(run)
    model.postpone(lambda: run.seen.append("postponed"))
    first = WAYS[way](model)
    assert hasattr(first, "fp16_stats") and run.seen == ["postponed", False] and model.built == ["transformer"]
    assert all(again(model) is first for again in WAYS.values()) and len(run.seen) == 2


def test_the_run_that_is_asked_may_load_the_transformer_itself():
    model = EditModel(str(tiny_folder("2511")))

    class Layers(Asked):
        "A run whose adapter needs the layers."

        def decide(self, training):
            "Load the layers, and nothing asks again."
            super().decide(training)
            model.load_with_layers()

    run = Layers()
    model.ask_for_table(run)
    assert model.transformer is model.loaded["transformer"] and run.seen == [False] and model.built == ["transformer"]


@pytest.mark.parametrize("view", ["loaded", "quantize", "devices"])
def test_the_dictionaries_can_be_read_alone(view):
    model = EditModel(str(tiny_folder("2511")), devices=dict(vae="cpu"), quantize=dict(vae=None))
    with pytest.raises(TypeError):
        getattr(model, view)["vae"] = "x"
    model.areas["control_area"] = 1
    assert model.areas["control_area"] != 1, "a copy"


def test_an_offloaded_component_is_never_whole_on_its_device(monkeypatch):
    asked = []

    def load(folder, name, dtype, device, *rest):
        asked.append(str(device))
        return torch.nn.Linear(1, 1)

    monkeypatch.setattr(edit_model, "load_component", load)
    monkeypatch.setattr(edit_model, "offload", lambda part, device: part)
    devices = dict(text_encoder="meta")
    model = EditModel(str(tiny_folder("2511")), devices=devices, offload=["text_encoder"])
    model.get("text_encoder")
    assert asked == ["cpu"], "the device has no room for it"


def test_what_is_dropped_is_given_back_to_the_gpu(monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(list(model.loaded)))
    model = EditModel(str(tiny_folder("2511")))
    model.adopt("vae", torch.nn.Linear(1, 1))
    model.adopt("tokenizer", object())
    model.drop("vae")
    assert given == [["tokenizer"]]


def test_each_component_is_offloaded_or_not_by_itself():
    model = EditModel(str(tiny_folder("2511")), offload=["text_encoder", "vae"])
    model.set_offload("vae", False)
    assert model.offload == ("text_encoder",)
    model.set_offload("vae", True)
    model.set_offload("vae", True)
    assert model.offload == ("text_encoder", "vae")


def test_a_component_is_quantized_or_offloaded():
    model = EditModel(str(tiny_folder("2511")), quantize=dict(text_encoder="nf4", transformer="nf4"))
    model.check()
    model.set_offload("text_encoder", True)
    model.check("transformer")
    both = "`model.text_encoder_quantize` nf4 is incompatible with `model.text_encoder_offload`"
    with pytest.raises(ValueError, match=both):
        model.check()


# --- ways to fit a model
JOB = memory_query(make_config())


@pytest.mark.parametrize(
    "name, job, blocks, host",
    [
        ("block swap", dict(block_swap=True), 3, lambda q: q.layers * block_bytes(q)),
        (
            "offloaded inputs",
            dict(offload=True, checkpointing=True),
            60,
            lambda q: q.layers * sum(stream_tokens(q).values()) * q.dim * q.base_bytes,
        ),
        ("split blocks", dict(devices=2), 30, lambda q: 0),
    ],
)
def test_a_way_saves_on_the_device_and_costs_what_it_says(name, job, blocks, host):
    plain, q = replace(JOB, checkpointing=True), replace(JOB, **dict(checkpointing=True) | job)
    assert [s.name for s in used_by(q)] == [name] and not used_by(plain)
    assert STRATEGIES[name].blocks_held(q) == blocks and memory_of(q).host == host(q)
    assert memory_of(q).total < memory_of(plain).total and STRATEGIES[name].slowdown > 1


def test_a_configuration_asks_for_ways_in_an_order_of_their_own():
    train = make_config(
        dict(train=dict(blocks_to_swap=True, offload_activations=True, model_parallel_devices=["cuda:0", "cuda:1"]))
    ).train
    assert [s.name for s in asked_for(train)] == ["split blocks", "offloaded inputs", "block swap"]
    assert not asked_for(make_config().train)


def test_a_way_of_yours_is_asked_last():
    class Mine(Strategy):
        "Does nothing."

        name, setting = "mine", "compile"

    try:
        assert in_order()[-1] is STRATEGIES["mine"] and Mine().problem(None) == ""
    finally:
        del STRATEGIES["mine"]


def test_a_split_transformer_cannot_be_moved_to_one_of_its_devices():
    model = torch.nn.Module()
    model.transformer_blocks = torch.nn.ModuleList([torch.nn.Linear(1, 1, device=d) for d in ("cpu", "meta")])
    forbid_move(model, "on several GPUs", "train.model_parallel_devices")
    with pytest.raises(ValueError, match="on several GPUs cannot be moved; set `train.model_parallel_devices` to"):
        model.to("meta")


def test_without_a_gpu_a_warning_comes_before_the_hub_is_asked(monkeypatch, capsys):
    said = []

    def ask(self, *args, **kw):
        said.append(capsys.readouterr().out)
        raise ConnectionError

    monkeypatch.setattr(EditModel, "__init__", ask)
    config = make_config(dict(model=dict(pretrained_model_name_or_path="someone/model")))
    plan = Plan(
        device=Choice("cpu", "there is no GPU"), dtype=Choice("float32"),
        delete_shards=Choice(False))
    with pytest.raises(ConnectionError):
        EditModel.as_planned(config, plan)
    assert said[0].startswith("there is no GPU: someone/model needs one with 12 GB or more")
    with pytest.raises(ConnectionError):
        EditModel.as_planned(config, replace(plan, device=Choice("cpu", asked=True)))
    assert said[1] == "", "the user asked for the CPU"
