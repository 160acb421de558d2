"""`train.eval_schedule`: images in few steps with a LoRA that is added to the adapter in evaluations only."""
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qie_nb.models.variants.text_to_image import QwenImage
from helpers import OnStep, adapters_close, close_images, on_call, settings, write_pairs
from qie_nb.config import make_config
from qie_nb.devices import compile as compiled
from qie_nb.evaluation import eval_images
from qie_nb.evaluation.eval_images import EvalSampling, added_lora, eval_sampling
from qie_nb.evaluation.evaluate import EvaluationCallback, evaluate, results_of
from qie_nb.lora import adapters as lora
from qie_nb.trainer import QwenImageEditTrainer as Trainer
from test_mixing import LIGHTNING_NAME, write

NAME = LIGHTNING_NAME
EVERY = dict(eval_steps=1, eval_images=1, eval_at_start=True, max_train_steps=2, val_fraction=0.3)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    "A LoRA for four steps, the same under a name without steps, and one on modulation layers."
    d = tmp_path_factory.mktemp("loras")
    return dict(fast=write(d/NAME, 9, format="comfyui", lora_alpha=8), unnamed=write(d/"few.safetensors", 9),
                modulation=write(d/("modulation_" + NAME), 9, target_modules=["img_mod.1", "to_q"]))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    d = tmp_path_factory.mktemp("world")
    write_pairs(d/"set", ((48, 32),) * 5)
    return d


@pytest.fixture
def made(world, tmp_path):
    def made(out="out", schedule="none", train={}, **sections):
        c = settings(world/"set", tmp_path/out, train=EVERY | dict(eval_schedule=str(schedule)) | train, optimizer=dict(lr=1e-2), data=dict(batch_size=1), **sections)
        return c | dict(cache=dict(cache_dir=str(world/"cache")))
    return made


def opened(file): return np.asarray(Image.open(file))


def shown(image, folder): # as an evaluation stores it
    eval_images.save_image(folder/"shown.jpg", np.asarray(image))
    return opened(folder/"shown.jpg")


def size_of(t): return dict(zip(("width", "height"), t.held_out.bucket(0)[0]))


def adapters_in(t): return {n: tuple(p.requires_grad for k, p in t.transformer.named_parameters() if f".{n}." in k) for n in t.transformer.peft_config}, lora.active_loras(t.transformer)


@pytest.mark.slow
@pytest.mark.parametrize("model, train", [({}, {}), (dict(quantize="qint8", modulation_table=True), {}), ({}, dict(ema_decay=0.5))], ids=str)
def test_images_are_those_of_predict_with_both_loras(made, files, model, train, tmp_path, world):
    seen = []
    t = Trainer(made("out", files["fast"], train, model=dict(quantize="none") | model), [OnStep(lambda t: seen.append(adapters_in(t)))]).fit()
    assert len(seen) == 2 and seen[0] == seen[1] and set(seen[0][0]) == {"default"} and all(seen[0][0]["default"]) and seen[0][1] == {"default": 1.0}
    other = Trainer(made("other", model=dict(quantize="none") | model))
    other.load_loras({str(t.save_lora(tmp_path/"own.safetensors")): 1.0, str(files["fast"]): 1.0})
    assert other.sampling()[:2] == (4, 1.0)
    case, s = t.data.eval_cases[1][0], t.held_out.samples[0]
    want = other.predict(s.controls[0], s.prompt, **size_of(t), seed=0)
    alone = other.set_adapters(["own"]).predict(s.controls[0], s.prompt, **size_of(t), seed=0, num_inference_steps=4, true_cfg_scale=1.0, schedule="lightning")
    got = opened(t.checkpoint_root()/"inference"/"step_00000002"/f"{case.name}.jpg")
    assert case.uncond is None and close_images(got, shown(want, tmp_path), 6) and not close_images(got, shown(alone, tmp_path), 6)


@pytest.mark.slow
def test_training_and_its_files_are_the_same(made, files):
    plain, few = (Trainer(made(n, s, model=dict(lora=dict(r=4, lora_dropout=0.3)))).fit() for n, s in (("plain", "none"), ("few", files["fast"])))
    adapters_close(plain, few)
    a, b = (results_of(t.checkpoint_root()) for t in (plain, few))
    assert all(a[2]["losses"][i] == pytest.approx(v) for i, v in b[2]["losses"].items()) and a[2]["image_errors"] != b[2]["image_errors"]
    assert (a[2]["image_sampling"], b[2]["image_sampling"]) == ([12, 4.0, None], [4, 1.0, NAME])
    names = [sorted(p.name for p in t.checkpoint_root().rglob("*") if p.is_file() and p.suffix not in (".csv", ".jsonl")) for t in (plain, few)]
    assert names[0] == names[1] and not any("few_steps" in n for n in names[1])


@pytest.mark.slow
def test_an_image_takes_a_tenth_of_the_forward_passes(made, files, monkeypatch):
    "Four, where twenty steps with guidance are forty; the progress counts the same."
    passes = {}
    for name, schedule in (("few", files["fast"]), ("usual", "none")):
        t = Trainer(made(name, schedule, dict(max_train_steps=1, eval_num_inference_steps=20, eval_at_start=False)))
        calls, works, edit = [], [], eval_images.edit_cached
        t.components.get("transformer").register_forward_pre_hook(lambda *_: calls.append(1))
        def edited(*args, **kw):
            before = len(calls)
            out = edit(*args, **kw)
            passes.setdefault(name, []).append(len(calls) - before)
            return out
        with monkeypatch.context() as m:
            m.setattr(eval_images, "edit_cached", edited)
            on_call(m, EvaluationCallback, "account", lambda self, t, work: works.append(work))
            t.fit()
        assert works and all(w.done == w.passes for w in works)
    assert passes == dict(few=[4], usual=[40])


@pytest.mark.slow
def test_no_file_is_needed_if_the_base_is_distilled(made):
    assert eval_sampling(Trainer(made("out", "lightning")).config)[:2] == (4, 1.0)
    t = Trainer(made("out", "lightning")).fit()
    assert results_of(t.checkpoint_root())[2]["image_sampling"] == [4, 1.0, None]


def test_schedules_that_cannot_be_used_are_refused_before_anything_is_loaded(made, files, tmp_path):
    def refused(schedule, match, kind=ValueError, **sections):
        t = Trainer(made("out", schedule, **sections))
        with pytest.raises(kind, match=match): t.fit()
        assert "transformer" not in t.components.loaded and not t.checkpoint_root().exists()
    refused(tmp_path/"none.safetensors", "^`train.eval_schedule` must be none, lightning, or a LoRA for few steps: .*none.safetensors", FileNotFoundError)
    refused(files["unnamed"], "few.safetensors' does not say for how many steps it was made; name the file")
    refused(files["modulation"], r"has transformer_blocks.0.img_mod.1, which the modulation table replaces; .* set `model.modulation_table` to false")
    with pytest.raises(ValueError, match="cannot be added to a sharded model; set it to none"): eval_sampling(make_config(made("out", files["fast"])), sharded=True)


@pytest.mark.slow
def test_modulation_layers_of_the_file_count_without_a_table(made, files):
    t = Trainer(made("out", files["modulation"], model=dict(modulation_table=False))).fit()
    case = t.data.eval_cases[1][0]
    with added_lora(t.transformer, files["modulation"]): assert any("img_mod" in n and "few_steps" in n for n, _ in t.transformer.named_parameters())
    assert case.uncond is None and set(t.transformer.peft_config) == {"default"}


@pytest.mark.slow
def test_a_failed_evaluation_leaves_the_trained_adapter_alone(made, files, monkeypatch):
    t, real = Trainer(made("out", files["fast"])), QwenImage.decode_latents
    with monkeypatch.context() as m, pytest.raises(ZeroDivisionError):
        m.setattr(QwenImage, "decode_latents", lambda *a: real(*a) if t.global_step == 0 else 1 / 0)
        t.fit()
    assert adapters_in(t)[1] == {"default": 1.0} and all(adapters_in(t)[0]["default"]) and set(t.transformer.peft_config) == {"default"}
    with pytest.raises(ZeroDivisionError), added_lora(t.transformer, files["fast"]): 1 / 0
    assert set(t.transformer.peft_config) == {"default"} and t.fit().global_step == 2


@pytest.mark.slow
def test_the_base_is_evaluated_with_the_file_alone(made, files, tmp_path):
    t = Trainer(made("out", files["fast"])).fit()
    before = adapters_in(t)
    found = evaluate(t, "base")
    assert found["image_sampling"] == [4, 1.0, NAME] and adapters_in(t) == before
    other, s = Trainer(made("other")).load_lora(files["fast"]), t.held_out.samples[0]
    want = other.predict(s.controls[0], s.prompt, **size_of(t), seed=0)
    assert close_images(opened(found["pictures"][0]), shown(want, tmp_path), 6)


# without LoRA and now
IMAGES = r"images (worse, )?[\d.]+ to [\d.]+ grey levels|grey levels as before"


@pytest.mark.slow
def test_images_of_another_schedule_are_not_compared(made, files, capsys):
    Trainer(made("out")).fit()
    assert re.search(IMAGES, capsys.readouterr().out)
    checkpoints = Path(made("out")["train"]["output_dir"])/"checkpoints"
    more = dict(max_train_steps=3, resume_checkpoint=str(checkpoints/"step_00000002"))
    for schedule, compared in (("none", True), (files["fast"], False)):
        Trainer(made("out", schedule, more)).fit()
        printed = capsys.readouterr().out
        [line] = [l for l in printed.splitlines() if l.startswith("step 3: ")]
        assert "grey levels" in line and bool(re.search(IMAGES, line)) == compared, line
        shutil.rmtree(checkpoints/"epoch_0001")


@pytest.mark.slow
def test_compiled_blocks_are_not_compiled_again(made, files, monkeypatch):
    "Evaluations run eagerly; training goes on in the code that it had."
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch.compiler.reset(), torch._dynamo.utils.counters.clear()
    graphs, count = [], lambda t: graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    t = Trainer(made("out", files["fast"], dict(compile=True, max_train_steps=4, eval_steps=1)), [OnStep(count)]).fit()
    assert graphs[0] > 0 and len(set(graphs)) == 1, graphs
    adapters_close(Trainer(made("plain", train=dict(max_train_steps=4))).fit(), t)
    torch.compiler.reset()
