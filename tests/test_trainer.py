"""The trainer is made of parts that work without it, and only `trainer` and the loop change it."""
import ast, inspect, json
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from PIL import Image

import make
from helpers import OnStep, settings
from qie_nb import cli
from qie_nb.config import make_config
from qie_nb.core import choice
from qie_nb.devices.edit_model import EditModel
from qie_nb.planning import plan as planning
from qie_nb.planning.facts import Machine
from qie_nb.planning.plan import make_plan
from qie_nb.predict import Predictor
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.attributes import RunAttributes
from qie_nb.training.resume import RunResume
from qie_nb.training.run_adapters import RunAdapters
from qie_nb.training.run_data import RunData
from qie_nb.training.run_table import RunTable

ROOT = Path(__file__).parent.parent
PUBLIC = """vae qwen_vl transformer tokenizer processor scheduler accelerator optimizer lr_scheduler global_step use_cache cache_exist cache_dir
quantize weight_dtype load_model setup_accelerator set_lora configure_optimizers fit training_step save_checkpoint cache_embeddings cache_step
setup_predict predict predict_cached encode_image_embedding encode_prompt_image_embedding decode_vae_latent load_lora load_loras save_lora
merge_lora unmerge_lora set_adapters active_adapters delete_adapters quantize_model push_to_hub publish save_prequantized resume
_training_step_cached _training_step_compute _compute_loss _encode_empty_prompt _pack_latents _unpack_latents""".split()


def changes_a_trainer(tree):
    "Places where code sets an attribute of something called trainer or t, or patches the trainer's class."
    names = {"trainer", "t", "QwenImageEditTrainer"}
    is_trainer = lambda n: isinstance(n, ast.Name) and n.id in names or isinstance(n, ast.Attribute) and n.attr == "trainer"
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []
        for target in (n for t in targets for n in ast.walk(t)):
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store) and is_trainer(target.value): yield ast.unparse(target)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and is_trainer(node.args[0]): yield ast.unparse(node)
        if isinstance(node, ast.arg) and node.arg == "self" and node.annotation is not None and "QwenImageEditTrainer" in ast.unparse(node.annotation): yield ast.unparse(node)
        if isinstance(node, ast.ClassDef) and node.name != "QwenImageEditTrainer" and "QwenImageEditTrainer" in map(ast.unparse, node.bases): yield node.name


def test_only_the_trainer_and_its_loop_change_a_trainer():
    found = {p.name: what for p in (ROOT/"qie_nb").rglob("*.py") if p.name != "_modidx.py" and (what := list(changes_a_trainer(ast.parse(p.read_text()))))}
    assert found.keys() == {"loop.py"}, found # the loop is the trainer's own: its step, its preparation and its start in processes
    assert list(changes_a_trainer(ast.parse("self.trainer.x, y = 1, 2\nsetattr(t, 'x', 1)"))) == ["self.trainer.x", "setattr(t, 'x', 1)"]


def test_public_names():
    trainer = QwenImageEditTrainer()
    assert not [n for n in PUBLIC if not hasattr(trainer, n)]
    assert QwenImageEditTrainer.__mro__ == (QwenImageEditTrainer, RunAttributes, object) # attributes of the parts have a page of their own
    assert list(inspect.signature(trainer.predict).parameters)[:5] == ["prompt_image", "prompt", "negative_prompt", "num_inference_steps", "true_cfg_scale"]


@pytest.mark.parametrize("make, use", [
    (RunData, lambda part: part.make_loader() and next(iter(part.make_loader()))),
    (RunTable, lambda part: (part.decide(), part.components.transformer)),
    (RunAdapters, lambda part: (part.start(), part.metadata())),
    (RunResume, lambda part: (part.check_new_run(), part.check_output())),
    (lambda components, config: Predictor(components, config.predict), lambda part: part.predict(torch.zeros(32, 48, 3, dtype=torch.uint8).numpy(), "x", num_inference_steps=2))],
    ids=["data", "table", "adapters", "resume", "predictor"])
def test_each_part_works_without_a_trainer(make, use, pairs, tmp_path):
    part = make(EditModel(str(tiny_folder("2511"))), make_config(settings(pairs(), tmp_path)))
    assert use(part) is not None


def test_a_step_reaches_the_transformer_in_four_functions(trained_run, tmp_path):
    trainer = QwenImageEditTrainer(trained_run.settings(tmp_path)).set_lora()
    stack = []
    trainer.transformer.register_forward_pre_hook(lambda *_: stack.extend(inspect.stack()))
    trainer.training_step(next(iter(trainer.make_loader())))
    frames = [f for f in stack if "qie_nb" in f.filename]
    assert [f.function for f in frames[:4]] == ["flow_matching_loss", "loss", "_compute_loss", "training_step"]
    assert {Path(f.filename).name for f in frames[:4]} == {"trainer.py", "step.py"}


def test_results_at_the_end_of_a_cell_are_one_line_and_a_lora_has_a_card(pairs, tmp_path, monkeypatch, capsys):
    for module in ("training.run_data", "training.run_adapters", "logging"): monkeypatch.setattr(f"qie_nb.{module}.kernel", lambda: object())
    t = QwenImageEditTrainer(settings(pairs(), tmp_path, train=dict(max_train_steps=1)))
    results = [t.cache_embeddings(), t.fit(), t.save_lora(tmp_path/"lora")]
    assert [repr(r).count("\n") for r in results] == [0, 0, 0] and repr(results[0]).startswith("3 samples in ") and "step 1" in repr(t)
    assert results[2] == tmp_path/"lora"/"pytorch_lora_weights.safetensors" == type(tmp_path)(repr(results[2]))
    assert "invert the colours" in (tmp_path/"lora"/"README.md").read_text(encoding="utf-8")
    out = capsys.readouterr().out
    assert out.count("data set: 3 samples") == 1, "both cache_embeddings and fit look at the data set"
    said = []
    for line in out.splitlines():
        if "next: " in line:
            said.append(line.rpartition("next: ")[2])
    # that of `fit` is in its summary
    for call in ("trainer.fit()", "trainer.save_lora('lora')", "README.md"):
        assert any(call in line for line in said), call
    (tmp_path/"own").mkdir(), (tmp_path/"own"/"README.md").write_text("mine")
    t.save_lora(tmp_path/"few", schedule="lightning")
    card = (tmp_path/"few"/"README.md").read_text(encoding="utf-8")
    assert "num_inference_steps=4)" in card, "the schedule that is stored with the LoRA"
    t.save_lora(tmp_path/"own"), t.save_lora(tmp_path/"file.safetensors")
    assert (tmp_path/"own"/"README.md").read_text() == "mine" and not (tmp_path/"README.md").exists()


def test_fit_shows_its_plan_once(trained_run, tmp_path, capsys, monkeypatch):
    t = QwenImageEditTrainer(trained_run.settings(tmp_path, train=dict(max_train_steps=1, eval_steps=None, save_steps=None)))
    t.fit()
    said = capsys.readouterr().out
    assert said.count("plan: device cpu, dtype float32, ") == 1 and "\n      held out " in said
    t.config.train.max_train_steps = 2
    t.fit()
    assert t.global_step == 2 and "plan: " not in capsys.readouterr().out
    shown = []
    monkeypatch.setattr(choice, "kernel", lambda: True)
    monkeypatch.setattr(choice, "is_interactive", lambda: True)
    monkeypatch.setattr("IPython.display.display", shown.append)
    choice.show_plan(t.plan)
    assert shown[0].data.startswith("<details><summary>the plan of this run</summary><table") and not capsys.readouterr().out


def test_the_plan_is_made_again_after_load_lora_and_in_the_middle_of_a_run(trained_run, tmp_path):
    seen = []

    def look(t):
        "Predict in the middle of the run, and keep the plans and placements around it."
        before, plan = t.placement, t.plan
        t.predict(Image.new("RGB", (32, 32)), "invert", num_inference_steps=2)
        first = t.placement
        t.predict(Image.new("RGB", (32, 32)), "invert", num_inference_steps=2)
        seen.append((before, first, t.placement, plan, repr(plan), t.plan))
    t = QwenImageEditTrainer(trained_run.settings(tmp_path, train=dict(max_train_steps=1, eval_steps=None, save_steps=None)), callbacks=[OnStep(look)])
    early = t.plan
    shown = repr(early)
    t.fit()
    (before, first, second, plan, text, after), = seen
    assert before is None and first is not second and repr(first) == repr(second), "each prediction in a run is planned with the memory of that moment"
    assert repr(plan) == text and after is not plan and after == plan == make_plan(*t.planner.facts)
    assert plan != early and repr(early) == shown, "the run has learned its steps and what its blocks are like"
    file = t.save_lora(tmp_path/"lora")
    other = QwenImageEditTrainer(trained_run.settings(tmp_path/"other", train=dict(max_train_steps=1)))
    fresh = other.plan
    other.load_lora(file)
    assert other.plan is not fresh and other.plan == make_plan(*other.planner.facts)
    with pytest.raises(FrozenInstanceError): fresh.device = other.plan.device


@pytest.mark.parametrize("configured, value, want", [("nf4", False, None), ("none", "qint8", "qint8"), ("none", True, "qfloat8")])
def test_the_plan_follows_a_quantization_that_is_set_on_the_trainer(configured, value, want):
    t = QwenImageEditTrainer(dict(model=dict(quantize=configured), train=dict(device="cpu", mixed_precision="no")))
    assert t.plan.quantize.value == (None if configured == "none" else configured)
    t.quantize = value
    assert t.plan.quantize.value == want


# --- a GPU that torch cannot use
def test_a_large_model_is_refused_on_the_cpu_beside_a_gpu_with_an_old_driver(tmp_path, pairs, monkeypatch, capsys):
    "Before anything is read or encoded; an explicit `cpu` and small models train as before."
    rented = Machine(driver="550.54.15", cuda="13.0", memory=10**11)
    monkeypatch.setattr(planning, "this_machine_facts", lambda: rented)
    words = "^driver 550.54.15 is too old for torch built with CUDA 13.0, .*; or set `train.device` to cpu$"
    large = make.large_model(tmp_path)

    def made(model=large, **sections):
        "A trainer."
        raw = settings(pairs(), tmp_path, model=dict(pretrained_model_name_or_path=model))
        return QwenImageEditTrainer(make.merged(raw, sections))
    t = made(train=dict(device="auto"))
    assert str(t.device) == "cpu" and "too old" in repr(t.plan)
    for job in (t.fit, t.cache_embeddings):
        with pytest.raises(ValueError, match=words): job()
    assert not t.components.loaded and not (tmp_path/"cache").exists()
    encoders = dict(vae_encoder_device="cpu", text_encoder_device="cpu")
    for allowed in (made(train=dict(device="cpu")), made("tiny", train=dict(device="auto"))):
        allowed.planner.check_device()
        allowed.planner.check_encoders()
    made(train=dict(device="auto"), cache=encoders).planner.check_encoders()
    raw = make.merged(settings(pairs(), tmp_path), dict(
        model=dict(pretrained_model_name_or_path=large), train=dict(device="auto")))
    (tmp_path/"run.json").write_text(json.dumps(raw, default=str))
    (tmp_path/"run.yaml").write_text((tmp_path/"run.json").read_text())
    capsys.readouterr()
    for command in ("train", "precompute"):
        assert cli.main([command, "--config", str(tmp_path/"run.yaml")]) == 2
        assert "driver 550.54.15 is too old" in "".join(capsys.readouterr())


def test_a_cache_folder_that_is_set_on_the_trainer_is_its_caches(tmp_path):
    trainer = QwenImageEditTrainer(dict(preset="tiny"))
    trainer.cache_dir = str(tmp_path/"elsewhere")
    assert trainer.cache_dir == trainer.data.cache_dir == str(tmp_path/"elsewhere")
    assert str(tmp_path/"elsewhere") in str(trainer.data.open_cache().cache_dir)


def test_the_last_good_checkpoint_is_kept_while_steps_are_skipped(monkeypatch):
    trainer = QwenImageEditTrainer(dict(preset="tiny"))
    pruned = []
    monkeypatch.setattr(type(trainer.checkpoints), "prune", lambda self: pruned.append(trainer.finite.row))
    for skipped in (0, 2):
        trainer.finite = SimpleNamespace(row=skipped) # steps in a row
        trainer.prune_checkpoints()
    assert pruned == [0]
