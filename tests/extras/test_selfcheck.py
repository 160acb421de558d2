"""The report of selfcheck on intact and broken tiny models: it names the fault and contains nothing private."""
import json, shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers import TEXT, TRANSFORMER, VAE, close_images, on_call, slow
from qie_nb.cli import main
from qie_nb.extras import selfcheck as module
from qie_nb.extras.selfcheck import EditTrace, PeakMemory, SelfCheck, blocks_of, compare_traces, pipeline_run, selfcheck, selfcheck_config, test_image as make_image
from qie_nb.devices.edit_model import EditModel
from qie_nb.models.loading import device_of
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from test_placement import THREE, pretend, trainer_of # noqa: F401 (a fixture)

AREAS = (64 * 64, 56 * 56)


def check(variant="2511", model=None, steps=2, train=True, **kw):
    return selfcheck(QwenImageEditTrainer(selfcheck_config(model or tiny_folder(variant, AREAS), **kw)), steps, train)


@pytest.mark.parametrize("variant", [slow("v1"), slow("2509"), "2511"])
def test_an_intact_model_passes(variant, built, monkeypatch):
    seen = []
    on_call(monkeypatch, EditModel, "drop", lambda self, *names: seen.extend(self.loaded.values()))
    r = check(variant)
    assert r.ok and r.verdict == "passed", r
    assert built == {VAE: 1, TRANSFORMER: 1, TEXT: 1}, "loaded once for both"
    assert [p["stage"] for p in r.parity] == ["prompt embedding", "control latents", "latents, step 1", "latents, step 2", "image, grey levels"]
    assert all(p["relative"] < 1e-4 for p in r.parity[:-1]) and r.parity[-1]["difference"] <= 1
    found = {m["part"]: m for m in r.memory}
    assert all(found[n]["found"] == pytest.approx(found[n]["planned"], rel=0.01) for n in ("transformer", "vae"))
    assert found["peak, training"]["planned"] > found["training: weights"]["planned"] > 1e6
    assert r.training["moved"] and len(r.training["losses"]) == 2 and np.isfinite(r.training["losses"]).all() and len(r.speed) == 3
    assert {c: d["first_not_finite"] for c, d in r.finite.items()} == dict.fromkeys(["text_encoder", "vae", "transformer", "transformer, training"])
    parts = [p for p in seen if isinstance(p, torch.nn.Module)] # hooks and replaced functions are removed
    assert len(parts) >= 3 and not [b for p in parts for b in blocks_of(p).values() for h in b._forward_hooks.values() if "FiniteCheck" in h.__qualname__]
    assert not [p for p in parts if "decode" in vars(p)]
    monkeypatch.setenv("HOME", "/home/wilhelmina"), monkeypatch.setenv("USER", "wilhelmina") # nothing private is reported
    r.errors["x"] = "No such file: '/home/wilhelmina/ckpt/vae/model.safetensors' for wilhelmina, token hf_" + "s" * 30 + ", C:\\Users\\wilhelmina\\x.txt, 1/2 of Qwen/Qwen-Image"
    for text in (repr(r), json.dumps(r.data()), r._repr_markdown_()):
        assert not any(private in text for private in ("wilhelmina", "sss", "/tmp", str(tiny_folder(variant, AREAS).parent))) and ".../model.safetensors" in text and "1/2 of Qwen/Qwen-Image" in text


def test_the_command_prints_the_report(capsys):
    flags = ["selfcheck", "--model", str(tiny_folder("2511", AREAS)), "--train", "false", "--device", "cpu", "--steps", "2"]
    assert main(flags) == 0 and "### qie_nb selfcheck: passed" in capsys.readouterr().out
    assert main([*flags, "--json"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out[out.index("{\n"):])
    assert report["ok"] and report["facts"]["variant"].startswith("2511") and report["facts"]["machine"]["versions"]["diffusers"] and not report["training"]


@pytest.mark.parametrize("component, weight, block", [
    ("transformer", "transformer_blocks.1.attn.to_q.weight", "transformer_blocks.1"),
    slow("text_encoder", "model.language_model.layers.1.mlp.up_proj.weight", "model.language_model.layers.1"), slow("vae", "decoder.conv_in.weight", "decoder.conv_in")])
def test_a_nonfinite_weight_is_named_by_its_block(monkeypatch, component, weight, block):
    def get(self, n, real=EditModel.get):
        part = real(self, n)
        if n == component: part.get_parameter(weight).data.view(-1)[0] = torch.nan
        return part
    monkeypatch.setattr(EditModel, "get", get)
    r = check(train=False)
    assert not r.ok and r.verdict == f"not finite in {component}: {block}"
    assert r.finite[component]["first_not_finite"] == block and f"| {block} |" in repr(r)
    assert json.dumps(r.data(), allow_nan=False) and "| image, grey levels |" in repr(r)


@pytest.mark.slow
def test_a_nonfinite_gradient_is_named(monkeypatch):
    monkeypatch.setattr(QwenImageEditTrainer, "loss", lambda self, *a, real=QwenImageEditTrainer.loss, **kw: real(self, *a, **kw) * torch.inf)
    r = check()
    assert not r.ok and r.verdict.startswith("not finite in gradient: ") and "lora_" in r.verdict


@pytest.mark.parametrize("layer, factor, stage", [
    ("transformer.proj_out", 1.01, "latents, step 1"),
    slow("text_encoder.model.language_model.layers.0.mlp.up_proj", 1.5, "prompt embedding"), slow("vae.encoder.conv_in", 1.5, "control latents")])
def test_a_changed_layer_is_located(monkeypatch, layer, factor, stage):
    component, _, name = layer.partition(".")
    on_call(monkeypatch, module, "our_run", lambda t, *a, **kw: t.components.get(component).get_submodule(name).weight.data.mul_(factor))
    r = check(train=False)
    assert not r.ok and r.differs[0] == stage and r.verdict == f"differs from the pipeline, first in: {stage}"


def test_different_shapes_are_a_difference():
    a, b = (EditTrace(dict(x=torch.ones(n)), image=np.zeros((2, 2, 3), np.uint8)) for n in (2, 3))
    assert np.isnan(compare_traces(a, b)[0]["difference"]) and SelfCheck(dict(tolerance=1.), compare_traces(a, b)).differs == ["x"]


def test_a_stage_that_is_missing_is_a_difference():
    theirs, ours = (EditTrace(dict(made), image=np.zeros((2, 2, 3), np.uint8)) for made in (dict(x=torch.ones(2)), {}))
    assert SelfCheck(dict(tolerance=1.), compare_traces(theirs, ours)).differs == ["x"]


ALIKE = dict(stage="prompt embedding", difference=0.5, relative=0.001)
IMAGE = dict(stage="image, grey levels")
DIFFERS = "differs from the pipeline, first in"


@pytest.mark.parametrize("parity, errors, ok, verdict", [
    ([ALIKE], {}, True, "passed"),
    ([ALIKE], dict(training="no memory"), False, "failed in training"),
    ([], dict(pipeline="no memory"), False, "failed in pipeline"),
    ([], {}, False, "nothing was compared"),
    ([ALIKE, dict(IMAGE, difference=1., relative=0.9)], {}, True, "passed"),
    ([ALIKE, dict(IMAGE, difference=2., relative=0.)], {}, False, f"{DIFFERS}: image, grey levels"),
    ([dict(ALIKE, relative=0.02)], {}, False, f"{DIFFERS}: prompt embedding")])
def test_all_is_well_only_if_all_was_compared_and_alike(parity, errors, ok, verdict):
    report = SelfCheck(dict(tolerance=0.01), parity, errors=errors)
    assert (report.ok, report.verdict) == (ok, verdict)


@pytest.mark.slow
def test_an_adapter_that_stays_zero_has_not_moved(monkeypatch):
    def without_steps(trainer, real=QwenImageEditTrainer.configure_optimizers):
        real(trainer)
        trainer.optimizer.step = lambda: None
    monkeypatch.setattr(QwenImageEditTrainer, "configure_optimizers", without_steps)
    assert check().training["moved"] is False


def test_a_failed_stage_is_reported(monkeypatch):
    full = mock.Mock(side_effect=torch.OutOfMemoryError(f"CUDA out of memory in {Path.home()}/models/secret at hf_{'a' * 20}"))
    for stage in ("pipeline_run", "train_steps"): monkeypatch.setattr(module, stage, full)
    r = check()
    assert r.verdict == "failed in pipeline" and r.errors.keys() == {"pipeline", "training"} and not r.parity and not r.ok and r.speed
    assert "CUDA out of memory in .../secret at hf_..." in repr(r) + json.dumps(r.data())


@pytest.mark.parametrize("kw, message", [
    (dict(steps=True), "`steps` must be a whole number from 2 to 100, got True; 2 are enough"), (dict(offload="disk"), "offload"),
    (dict(model="/no/such"), "`model.pretrained_model_name_or_path` '/no/such' is not a folder"), (dict(quantize="nf3"), "got 'nf3'")])
def test_impossible_settings_are_refused_before_loading(kw, message, built):
    with pytest.raises((ValueError, OSError)) as e: check(**kw)
    assert message in str(e.value) and not built


def test_a_missing_component_is_refused_by_the_command_before_loading(tmp_path, built, capsys):
    shutil.copytree(tiny_folder("2511", AREAS), tmp_path/"model", ignore=shutil.ignore_patterns("text_encoder"))
    assert main(["selfcheck", "--model", str(tmp_path/"model")]) == 2 and "lacks text_encoder/; copy the model again" in capsys.readouterr().err and not built


@pytest.mark.slow
def test_the_pipeline_follows_the_placement_over_three_devices(pretend):
    image, size = Image.fromarray(make_image(80, 64)), (64, 64)
    plain, t = trainer_of(), trainer_of(predict=dict(devices=THREE))
    plain.predictor.plan()
    with sdpa_kernel(SDPBackend.MATH): expected = pipeline_run(plain, image, size, 2)
    with pretend(t) as mode:
        t.predictor.plan()
        got = pipeline_run(t, image, size, 2)
        assert {n: str(device_of(t.components.loaded[n])) for n in THREE} == THREE and mode.worked >= set(THREE.values())
    assert close_images(got.image, expected.image)


@pytest.mark.slow
def test_quantized_weights_are_compared_on_the_same_layers():
    size = lambda r: next(m for m in r.memory if m["part"] == "transformer")["found"]
    r = check(quantize="qint8", train=False)
    assert r.ok and r.facts["quantize"] == "qint8" and size(r) < 0.75 * size(check(train=False))


def test_peaks_belong_to_their_stage():
    p = PeakMemory("cpu")
    with p.stage("large"): torch.ones(80_000_000) # 320 MB
    with p.stage("small"): pass
    assert p.peaks["large"]["host"] - p.peaks["small"]["host"] > 1.5e8


def test_blocks_cover_the_model_once():
    part = EditModel(str(tiny_folder("v1", AREAS))).get("vae")
    held = [id(p) for b in blocks_of(part).values() for p in b.parameters()]
    assert len(held) == len(set(held)) and set(held) == {id(p) for p in part.parameters()}
