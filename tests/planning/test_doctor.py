"""The doctor finds each known fault of a machine, names its remedy, and stops a notebook only for errors."""
import json, os, re, subprocess, sys, time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as NS

import pytest
import torch
import yaml

from qie_nb import cli
from qie_nb.cache import EmbeddingCacheManager
from qie_nb.config import make_config
from qie_nb.core.environment import Environment
from qie_nb.data import alignment_check
from qie_nb.data.alignment_check import check_pair
from qie_nb.data.samples import find_samples
from qie_nb.devices.edit_model import EditModel
from qie_nb.planning import doctor as doctor_module, facts as planned
from qie_nb.planning.cards import plan
from qie_nb.planning.decisions import room_of
from qie_nb.planning.facts import OLDER_WHEELS
from qie_nb.planning.facts import Machine, nvidia_driver
from qie_nb.planning.doctor import DoctorReport, Finding, GpuInfo, LEVELS, MachineInfo, TRIED, doctor, installed_gpus, runs_on, this_machine

from helpers import merged, write_pairs

GB = 10**9
GOOD = {name: f"{oldest}.0+cu128" for name, (oldest, _) in TRIED.items()} | dict(torchvision="0.25.0", bitsandbytes="0.50.2", torchao=None)
L4, T4, P100 = GpuInfo("NVIDIA L4", 23.6 * GB, (8, 9)), GpuInfo("Tesla T4", 15.8 * GB, (7, 5), False, True), GpuInfo("Tesla P100-PCIE-16GB", 17 * GB, (6, 0), False, True)
NF4 = dict(quantize="nf4", text_encoder_quantize="auto") # of the T4's preset
BUILT = ("sm_75", "sm_80", "sm_86", "sm_90", "compute_90")


@pytest.fixture
def machine(tmp_path):
    "A machine without a fault: Kaggle's memory and an L4."
    e = Environment("kaggle", "Interactive", is_interactive=True, working=tmp_path/"working", keep=tmp_path/"working", temp=tmp_path, quota=20 * GB, memory=31 * GB, env=dict(HOME=str(tmp_path)))
    e.working.mkdir()
    return MachineInfo(e, GOOD, (L4,), BUILT, "12.8", 31 * GB, lambda folder: 200 * GB, True, True)


def having(**versions): return dict(versions=GOOD | versions)


@pytest.fixture
def real(tmp_path):
    "A run of the real model, by its hub id."
    return run_of(tmp_path/"working", model=dict(pretrained_model_name_or_path="Qwen/Qwen-Image-Edit-2511", quantize="nf4"), data=dict(image_size=[512, 512]))


def run_of(folder, **sections): return sections | dict(train=dict(output_dir=str(folder)), cache=dict(cache_dir=str(folder/"cache")), logging=dict(log_dir=str(folder/"runs")))


@pytest.fixture
def check(machine, real):
    "The report without plans for the machine and its run, or for changed ones."
    return lambda config=real, **changes: doctor(config, replace(machine, **changes), plans=False)


def findings(report, *levels): return {f.what: f for f in report.findings if f.level in (levels or LEVELS[:3])}


def test_a_good_machine_has_no_findings(check):
    assert not findings(check()) and not findings(check(None)) and not findings(check().stop())


@pytest.mark.parametrize("version, level", [
    ("2.9.1", "warning"), ("2.10.0", "ok"), ("2.15.3+cu130", "ok"), ("2.100.0", "note"), ("3.0", "note")])
def test_versions_are_compared_as_numbers(version, level, check):
    (found,) = (f for f in check(**having(torch=version)).findings if f.what == "torch")
    assert found.level == level


@pytest.mark.parametrize("change, what, level, remedy", [
    (dict(gpus=(P100,)), "GPU", "error", "no kernels for sm 6.0 .*choose a newer accelerator"),
    (dict(gpus=(T4, T4)), "GPU 1 bfloat16", "warning", "leave `train.mixed_precision` auto"),
    (dict(gpus=()), "GPU", "error", "Accelerator > GPU T4 x2"),
    (dict(gpus=(), cuda=None), "GPU", "error", "built without CUDA"),
    (dict(free=lambda folder: 2 * GB), "disk: working folder", "warning", "remove files, or attach a filled cache"),
    (dict(memory=8 * GB), "host memory", "warning", "needs 12 GB; offload nothing"),
    (dict(online=False), "internet", "error", "switch Internet on .*or attach the model as an input"),
    (dict(token=False), "secret HF_TOKEN", "warning", r'Add-ons > Secrets.*os.environ\["HF_TOKEN"\]'),
    (having(torchvision=None), "torchvision", "error", "pip install torchvision"),
    (having(bitsandbytes=None), "bitsandbytes", "error", "pip install bitsandbytes"),
    (having(ipywidgets=None), "ipywidgets", "note", "pip install ipywidgets"),
    (having(diffusers="0.35.2"), "diffusers", "warning", "pip install 'diffusers>=0.37'"),
    (having(torch="3.0.0"), "torch", "note", "install 2.15")])
def test_each_fault_is_found_with_its_remedy(change, what, level, remedy, check):
    report = check(**change)
    found = findings(report)
    assert found[what].level == level and not [w for w, f in found.items() if f.level != level], "only this fault"
    assert re.search(remedy, found[what].remedy) and found[what].remedy in repr(report) and what in report._repr_html_()
    assert all((f.level == "ok") != bool(f.remedy) for f in report.findings)
    with pytest.raises(ValueError, match=rf"^(No )?{what} .*{remedy}") if level == "error" else nullcontext(): assert report.stop() is report


def test_emulated_bf16_that_was_requested(check, real):
    real["train"] |= dict(mixed_precision="bf16")
    bf16 = lambda gpu: findings(check(gpus=(gpu,)))["GPU bfloat16"]
    assert (bf16(T4).value, bf16(T4).level) == ("emulated, so slow", "warning") and bf16(T4).remedy.startswith("set `train.mixed_precision` auto")
    assert bf16(replace(T4, emulated=False)).value == "none"
    real["model"]["quantize"] = "none"
    assert "quantize the base" in bf16(T4).remedy


def test_a_run_that_does_not_fit_the_disk_is_an_error(machine, real, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_module, "_plan", lambda c, m: None)
    small = replace(machine, free=lambda folder: 2 * GB)
    report = doctor(real, small)
    assert "attach the model as an input" in findings(report, "error")["disk"].remedy and report.disk.problems()
    assert not findings(doctor(run_of(tmp_path), small), "error")
    at_home = replace(small, environment=replace(machine.environment, name="script"))
    remedy = findings(doctor(real, at_home), "error")["disk"].remedy
    assert "attach" not in remedy and "give the folder of a copy" in remedy, "only Kaggle attaches folders"


@pytest.mark.parametrize("section, key", [("model", "text_encoder_offload"), ("train", "blocks_to_swap")])
def test_offloading_more_than_the_host_has_is_an_error(section, key, check, real):
    real["model"]["quantize"] = "none"
    real[section][key] = True
    assert re.search(f"`{section}.{key}` keeps.*set it to false", findings(check(memory=8 * GB), "error")["host memory"].remedy)
    assert not findings(check(memory=64 * GB))


def test_the_tiny_model_needs_no_gpu_and_no_network(check, tmp_path):
    report = check(run_of(tmp_path), gpus=(), online=False, token=False)
    assert {f.what: f.level for f in report.findings if f.level != "ok"} == {"GPU": "note", "internet": "note"} and report.stop()


# --- a cache of another model
def cache_of(folder, **changes):
    "A configuration with a cache of the tiny model, or of one that differs from it."
    EmbeddingCacheManager(folder).add_identity(EditModel("tiny").identity() | changes)
    return dict(cache=dict(cache_dir=str(folder)), train=dict(mixed_precision="no"))


@pytest.mark.parametrize("changes, wrong", [(dict(variant="v1", dtype="bfloat16"), "dtype float32, variant 2511\\."), (dict(text_encoder="0123-plain"), "text_encoder"), (dict(control_area=1024), "control_area 9216")])
def test_a_cache_of_another_model_is_an_error(changes, wrong, check, tmp_path):
    report = check(cache_of(tmp_path/"cache", **changes))
    assert re.search(f"{wrong}.*Use a new `cache.cache_dir`, which will be filled again, or attach this model's cache", findings(report, "error")["cache"].remedy)
    with pytest.raises(ValueError, match="cache .*it was made with another model"): report.stop()


def test_caches_of_this_model_and_broken_ones(check, real, tmp_path):
    named_otherwise = check(cache_of(tmp_path/"cache", model="1"))
    assert not findings(named_otherwise) and any(f.what == "cache" for f in named_otherwise.findings)
    both = cache_of(tmp_path/"cache", variant="v1")
    assert not findings(check(both)), "one of its two identities fits"
    cache_of(tmp_path/"working/cache", dtype="bfloat16", model="1")
    assert not findings(check()), "a hub model's cache is compared by variant"
    real["model"]["pretrained_model_name_or_path"] = "Qwen/Qwen-Image-Edit-2509"
    assert "variant 2509" in findings(check(), "error")["cache"].remedy
    (tmp_path/"cache/manifest.json").write_text("{")
    assert "delete it and precompute again" in findings(check(both), "error")["cache"].remedy


# --- environment, data, plan
def test_a_session_that_is_nearly_over(check, machine):
    at = lambda start: check(environment=replace(machine.environment, hours=9., session_start=start))
    late, early = findings(at(time.time() - 8 * 3600))["time to train"], at(time.time())
    assert late.level == "warning" and late.value.startswith("0.5 h, max_hours auto (8.5 of kaggle's 9 h") and "start a new session" in late.remedy
    assert not findings(early) and any(f.what == "time to train" and f.value.startswith("8.5 h") for f in early.findings)


def test_colab_keeps_nothing(check, machine):
    assert "mount Drive" in findings(check(None, environment=replace(machine.environment, name="colab", hours=None)))["session"].remedy


def test_a_missing_data_set_is_an_error(check, machine, real, pairs, tmp_path, monkeypatch):
    real["data"] = dict(dataset_path=str(pairs()))
    assert not findings(check())
    real["data"] = dict(dataset_path=str(tmp_path/"nowhere"))
    assert "does not exist" in findings(check(), "error")["data set"].remedy
    monkeypatch.setattr(doctor_module, "_plan", lambda c, m: None)
    assert findings(doctor(real, machine), "error"), "although the disk cannot be planned"
    real["data"] = dict(dataset_path=str(pairs()))
    real["train"] = real.get("train", {}) | dict(val_path=str(tmp_path/"none"), samples=[dict(image=str(tmp_path/"no.png"), prompt="x")])
    whole = write_pairs(tmp_path/"whole", ((32, 32),) * 2)
    (whole/"training_images"/"0001.png").write_bytes(b"")
    assert "1 of 2 cannot be used" in findings(doctor(dict(data=dict(dataset_path=str(whole))), machine), "warning")["data set"].value
    (whole/"training_images"/"0000.png").write_bytes(b"")
    assert "none of 2 samples can be used" in findings(doctor(dict(data=dict(dataset_path=str(whole))), machine), "error")["data set"].remedy
    errors = findings(doctor(real, machine), "error")
    assert "does not exist" in errors["validation pairs"].remedy and "no.png" in errors["samples"].remedy


@pytest.mark.slow
def test_the_plan_is_part_of_the_report(machine, real):
    report = doctor(real, replace(machine, gpus=(T4, T4)))
    data = json.loads(json.dumps(report.data()))
    assert data["plan"]["gpu"] == "Tesla T4" and data["disk"]["items"] and report.plan.gpu.count == 2 and not report.plan.gpu.bf16
    assert re.search(r"^<div[^>]*>fits: yes, [\d.]+ of [\d.]+ GB GPU memory, about [\d.]+ (h|min) for 800 samples\. ", report._repr_html_())
    assert "<details><summary>disk</summary>" in report._repr_html_() and repr(report.disk) in repr(report)
    assert "GPU 0 bfloat16" in findings(report, "warning")
    none = doctor(real, replace(machine, gpus=(replace(T4, bytes=3 * GB),)))
    assert "no settings fit this GPU" in findings(none, "error")["GPU memory"].remedy
    real["model"].pop("quantize")
    assert re.search("would run out of memory: set .*`model.quantize`", findings(doctor(real, machine), "warning")["GPU memory"].remedy)


# --- the configuration for this machine
@pytest.mark.parametrize("gpus, side, area, expected", [
    ((T4,), 1024, None, dict(model=NF4, train=dict(offload_activations=True))),
    ((T4, T4), 512, 512 * 512, dict(model=NF4, train=dict(gradient_checkpointing="selective")))], ids=["T4", "2xT4"])
def test_config_changes_only_what_the_plan_sets(gpus, side, area, expected, machine, real, capsys):
    real |= dict(model=real["model"] | dict(quantize="none"), data=dict(image_size=[side, side], control_area=area), optimizer=dict(lr=3e-4))
    report = doctor(real, replace(machine, gpus=gpus))
    assert report.stop() is report and report.plan.changes == expected
    assert report.config().model_dump() == merged(make_config(real).model_dump(), expected)
    printed = capsys.readouterr().out
    assert all(f"{s}.{k} {v}" in printed for s, keys in expected.items() for k, v in keys.items())


def test_config_of_a_tiny_model_is_unchanged_and_needs_a_configuration(machine, tmp_path, capsys):
    tiny = run_of(tmp_path)
    tiny["train"] |= dict(gradient_checkpointing=False, compile=False)
    for gpus in ((), (T4,)): assert doctor(tiny, replace(machine, gpus=gpus)).config() == make_config(tiny) and not capsys.readouterr().out
    with pytest.raises(ValueError, match=r"^the doctor checked only the machine; call doctor\(config\) to plan a run$"): doctor(machine=machine).config()


def test_no_plan_after_an_error(machine, real, monkeypatch):
    "Planning imports peft, which may be what is broken."
    def broken(c, m): raise RuntimeError("peft found an incompatible version of torchao")
    monkeypatch.setattr(doctor_module, "_plan", broken)
    report = doctor(real, replace(machine, **having(torchao="0.10.0")))
    assert report.of("error")[0].what == "torchao" and report.plan is None and report.disk is not None and report.config() == make_config(real)
    with pytest.raises(RuntimeError): doctor(real, machine)


# --- the report
def test_a_report_counts_what_is_less_than_an_error():
    warning, note, fine = (Finding("a", "b", level, "c") for level in ("warning", "note", "ok"))
    first = repr(DoctorReport([warning, note, note, fine])).splitlines()[0]
    assert first == "Ready to run. 1 warning, 2 notes"
    assert repr(DoctorReport([Finding("GPU", "b", "error"), note])).splitlines()[0] == "Cannot run: GPU. 1 note"
    assert repr(DoctorReport([fine])).splitlines()[0] == "Ready to run"


def test_a_report_says_what_the_smallest_strategy_needs_if_none_fits():
    fits, too_large = (repr(DoctorReport([], plan=plan("2511", gpu, 1024))).splitlines()[0] for gpu in ("H100", 4))
    assert re.match(r"fits: yes, [\d.]+ of 84.9 GB GPU memory, about .* samples", fits), fits
    assert re.fullmatch(r"fits: no, [\d.]+ of 4.0 GB GPU memory at least", too_large), too_large


def test_report_is_escaped():
    report = DoctorReport([Finding("<i>", "<b>", "error", "<u>"), Finding("a", "b")])
    page = report._repr_html_()
    assert not any(tag in page for tag in ("<i>", "<b>", "<u>")) and "&lt;u&gt;" in page and repr(report).splitlines()[0] == "Cannot run: <i>"
    assert report.data()["findings"][0] == dict(what="<i>", value="<b>", level="error", remedy="<u>")


def test_stop_raises_the_errors_and_prints_the_rest(check, capsys):
    report = check(gpus=(P100,), online=False, token=False)
    with pytest.raises(ValueError) as e: report.stop()
    levels = [f.level for f in report.findings]
    assert levels == sorted(levels, key=LEVELS.index) and levels[0] == "error"
    head, *faults = str(e.value).splitlines()
    assert head == "2 faults:" and [f.startswith("- ") for f in faults] == [True, True], "a line for each"
    assert "GPU Tesla P100" in faults[0] and "internet no" in faults[1] and "secret" not in str(e.value)
    assert "warning secret HF_TOKEN: missing" in capsys.readouterr().out


# --- what torch and the packages report
@pytest.mark.parametrize("capability, built, ok", [((7, 0), BUILT, False), ((8, 9), BUILT, True), ((10, 0), BUILT, True), ((9, 0), ["sm_90a"], True), ((12, 0), ["sm_100"], False)])
def test_binaries_run_on_later_minor_versions_and_ptx_on_later_gpus(capability, built, ok): assert runs_on(capability, built) == ok


@pytest.mark.parametrize("capability, own, levels", [((6, 0), False, ["error"]), ((7, 5), False, ["ok", "warning"]), ((8, 0), True, ["ok"])])
def test_a_gpu_as_torch_reports_it(capability, own, levels, monkeypatch, machine):
    fake = dict(is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda i: NS(name="X", total_memory=16 * GB, major=capability[0], minor=capability[1]),
                is_bf16_supported=lambda including_emulation=True: own or including_emulation,
                get_arch_list=lambda: list(BUILT), device=nullcontext,
                mem_get_info=lambda n: (14 * GB, 16 * GB), memory_reserved=lambda n: GB)
    for name, fn in fake.items(): monkeypatch.setattr(torch.cuda, name, fn)
    m = this_machine(machine.environment, internet=False)
    assert m.gpus == installed_gpus(True) == (GpuInfo("X", 16 * GB, capability, own, not own, free=15 * GB),)
    assert m.built_for == BUILT and [f.level for f in doctor_module.gpu_findings(m)] == levels


def busy_gpus(monkeypatch, count=2, free=22 * GB, held=2 * GB):
    "Cards of 25 GB, of which so much is free, and so much is held by torch; returns which were asked."
    about = NS(name="NVIDIA GeForce RTX 4090", total_memory=25 * GB, major=8, minor=9)
    asked = []

    def mem_get_info(n):
        "As torch reports it; the question makes a context on that card."
        asked.append(n)
        return free, 25 * GB
    fakes = dict(is_available=lambda: True, device_count=lambda: count, get_device_properties=lambda n: about,
                 get_device_name=lambda n: about.name, mem_get_info=mem_get_info, memory_reserved=lambda n: held)
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return asked


def test_free_memory_counts_with_what_torch_holds(monkeypatch, machine, real):
    busy_gpus(monkeypatch)
    gpu = installed_gpus()[0]
    assert (gpu.bytes, gpu.free) == (25 * GB, 24 * GB) and room_of(gpu) == pytest.approx(0.95 * 24 * GB)
    assert room_of(replace(gpu, free=25 * GB)) == room_of(replace(gpu, free=None)) == pytest.approx(0.93 * 25 * GB)
    finding = doctor_module.gpu_findings(replace(machine, gpus=(gpu,), built_for=("sm_89",)))[0]
    assert finding.value == "NVIDIA GeForce RTX 4090, 24.0 of 25.0 GB free, sm 8.9"
    p = plan("2511", resolution=512)
    assert p.gpu.free == 24 * GB and " GB each (24.0 of 25.0 GB free)" in repr(p) and p.data()["free_gb"] == 24
    assert plan("2511", "RTX 4090", 512).gpu.free is None, "a card that is named counts in whole"


def test_a_step_that_fits_the_card_but_not_what_is_free(monkeypatch):
    busy_gpus(monkeypatch, count=1)
    config = dict(model=dict(quantize="qfloat8"), data=dict(image_size=[1024, 1024], control_area=1024**2),
                  train=dict(gradient_checkpointing="selective"))
    free = plan("2511", config=config)
    busy_gpus(monkeypatch, count=1, free=20 * GB)
    busy = plan("2511", config=config)
    assert free.asked.total == busy.asked.total == pytest.approx(22.9 * GB, rel=0.01)
    assert not busy.fits(busy.asked) and "chosen" in repr(busy) and busy.chosen.query != busy.asked.query


def test_a_started_process_asks_its_own_gpu_alone(monkeypatch):
    asked = busy_gpus(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [gpu.free for gpu in installed_gpus()] == [None, 24 * GB] and asked == [1]


def test_a_gpu_that_does_not_answer_counts_in_whole(monkeypatch):
    busy_gpus(monkeypatch, count=1)

    def full(n):
        "Not even a context fits."
        raise RuntimeError("CUDA error: out of memory")
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    assert installed_gpus()[0].free is None


# --- no GPU, and why
NO_GPU = [
    ({}, "13.0", "No GPU found. The 20 B model needs one with 12 GB or more", ""),
    ({}, None, "built without CUDA: install another build", "driver"),
    (dict(driver="550.54.15"), "13.0",
     "GPU not seen by torch: driver 550.54.15 is too old for torch built with CUDA 13.0, "
     f"which needs 580 or later; update it, or install the wheels of CUDA 12.6: {OLDER_WHEELS}", "Kaggle"),
    (dict(driver="580.95.05"), "13.0",
     "is new enough for torch built with CUDA 13.0, but no GPU is visible; start the container", "too old"),
    (dict(driver="550.54.15"), None,
     "torch was built without CUDA, but this machine has an NVIDIA driver; install the wheels with CUDA: pip",
     "too old"),
    (dict(driver="unknown", wsl2=True), "13.0",
     "driver is missing or too old for .* current driver in Windows", "update it")]
WHY_NOT = ["none", "wheels without CUDA", "old driver", "container", "wheels for CPUs beside a GPU", "WSL2"]


@pytest.mark.parametrize("facts, cuda, words, never", NO_GPU, ids=WHY_NOT)
def test_why_there_is_no_gpu(facts, cuda, words, never, check, tmp_path):
    where = dict(gpus=(), cuda=cuda, machine=Machine(headers=True, **facts))
    found = findings(check(**where))["GPU"]
    assert found.level == "error" and re.search(words, found.sentence.replace("(", "").replace(")", ""))
    assert not never or never not in found.sentence
    assert findings(check(run_of(tmp_path), **where))["GPU"].level == "note", "the tiny model trains on the CPU"


def test_gpus_that_a_variable_hides(check, machine):
    hidden = replace(machine.environment, env=machine.environment.env | dict(CUDA_VISIBLE_DEVICES=""))
    found = findings(check(gpus=(), environment=hidden))["GPU"]
    assert found.value == "none found" and found.remedy.endswith("; CUDA_VISIBLE_DEVICES hides all GPUs here")


VERSION_FILES = {
    "535.183.01": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
                  "GCC version:  gcc version 12.2.0\n",
    "570.86.15": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  "
                 "(dvs-builder@U22)\n",
    "unknown": "something else\n"}


@pytest.mark.parametrize("version", VERSION_FILES)
def test_the_driver_as_its_kernel_module_says_it(version, tmp_path):
    file = tmp_path/"proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text(VERSION_FILES[version])
    assert nvidia_driver(tmp_path) == version


def test_signs_of_a_driver_without_a_version(tmp_path, monkeypatch):
    assert nvidia_driver(tmp_path) == ""
    for name in ("nvidia0", "dxg"):
        (tmp_path/name/"dev").mkdir(parents=True)
        (tmp_path/name/"dev"/name).touch()
        assert nvidia_driver(tmp_path/name) == "unknown"
    monkeypatch.setattr(planned, "driver_of_smi", lambda: "550.54.15")
    assert [nvidia_driver(tmp_path/"dxg", ask) for ask in (True, False)] == ["550.54.15", "unknown"]


def test_nvidia_smi_is_asked_and_may_fail(tmp_path, monkeypatch):
    smi = tmp_path/"nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for script, version in (("echo 550.54.15", "550.54.15"), ("echo NVIDIA-SMI has failed; exit 9", "")):
        smi.write_text(f"#!/bin/sh\n{script}\n")
        smi.chmod(0o755)
        planned.driver_of_smi.cache_clear()
        assert planned.driver_of_smi() == version
    planned.driver_of_smi.cache_clear()


def test_this_machine_with_an_old_driver(monkeypatch, machine):
    "torch sees no GPU; hidden ones are no fault of the driver."
    monkeypatch.setattr(planned, "installed_gpus", lambda *a: ())
    monkeypatch.setattr(planned, "nvidia_driver", lambda **kw: "550.54.15" if kw["ask"] else "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    m = this_machine(machine.environment, internet=False)
    assert "driver 550.54.15 is too old" in doctor_module.gpu_findings(replace(m, gpus=()))[0].remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert planned.this_machine_facts().driver == ""


# --- what the text encoder compiles with some pairs of versions
@pytest.mark.parametrize("torch_version, encoder, headers, warned", [
    ("2.14.1+cu130", "5.17.0", False, True), ("2.14.1+cu130", "5.0.0", False, True), ("2.15.0", "5.9.1", False, True),
    ("2.14.1+cu130", "5.18.0", False, False), ("2.13.2", "5.17.0", False, False),
    ("2.14.1+cu130", "5.17.0", True, False)])
def test_a_text_encoder_that_cannot_compile_its_kernel(torch_version, encoder, headers, warned, check):
    report = check(**having(torch=torch_version, transformers=encoder), machine=Machine(headers=headers))
    assert [f.what for f in report.of("warning")] == ["transformers"] * warned
    if warned:
        remedy = findings(report)["transformers"].remedy
        assert remedy.startswith(
            f"with torch {torch_version} its text encoder compiles a kernel, which fails without Python.h")
        assert remedy.endswith("pip install 'transformers>=5.18', or install python3-dev")
    without = check(**having(torch=torch_version, transformers=encoder), machine=Machine(headers=headers), gpus=())
    assert "transformers" not in findings(without, "warning"), "only a GPU has such kernels"


def test_a_machine_without_python_h(monkeypatch, tmp_path):
    "Patched paths: the plan of a real run reads them."
    monkeypatch.setattr(planned.sysconfig, "get_paths", lambda: dict(include=str(tmp_path)))
    assert not planned.this_machine_facts().headers
    (tmp_path/"Python.h").touch()
    assert planned.this_machine_facts().headers


@pytest.mark.slow
def test_checks_import_neither_diffusers_nor_transformers():
    code = "import sys\nfrom qie_nb.planning.doctor import doctor\ndoctor({}, internet=False, plans=False)\nassert not {'diffusers', 'transformers', 'peft'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_command(machine, real, tmp_path, monkeypatch, capsys):
    file = tmp_path/"run.yaml"
    file.write_text(yaml.safe_dump(real))
    monkeypatch.setattr(doctor_module, "this_machine", lambda internet=True: replace(machine, gpus=(P100,)))
    assert cli.main(["doctor", "--config", str(file)]) == 1 and "no kernels for sm 6.0" in capsys.readouterr().out
    monkeypatch.setattr(doctor_module, "this_machine", lambda internet=True: machine)
    assert cli.main(["doctor"]) == 0 and "Ready to run" in capsys.readouterr().out


def test_alignment_is_judged_by_pairs_of_the_whole_data_set(tmp_path):
    "The last ones of twelve, too."
    root = write_pairs(tmp_path/"set", ((32, 32),) * 12)
    samples = find_samples(root)
    seen = []
    def check(sample):
        seen.append(sample.id)
        return check_pair(sample)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(alignment_check, "check_pair", check)
        found = doctor_module.alignment_findings(samples)
    assert len(seen) == 8 and seen[0] == samples[0].id and seen[-1] == samples[-1].id
    assert "8 of 12 pairs looked at" in found[0].value
