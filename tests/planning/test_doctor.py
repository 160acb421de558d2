"""What the doctor says of a machine: each fault that people meet, put into the facts it judges by, is told with its remedy, and stops a notebook or lets it go on as stated."""
import json, re, subprocess, sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as NS

import pytest
import torch
import yaml

from qie_nb import cli

from qie_nb.planning import doctor as rooms
from qie_nb.cache import EmbeddingCacheManager
from qie_nb.config import make_config
from qie_nb.planning.doctor import DoctorReport, Finding, Gpu, LEVELS, Machine, doctor, gpus_here, runs_on, this_machine
from qie_nb.models.components import Components
from qie_nb.core.environment import Environment

GOOD = dict(torch="2.10.0+cu128", torchvision="0.25.0", diffusers="0.37.1", transformers="5.0.0", accelerate="1.13.0", peft="0.19.1", safetensors="0.7.0", huggingface_hub="1.11.0",
            bitsandbytes="0.50.2", torchao=None, fastcore="1.14.5", ipywidgets="8.1.5", tensorboard="2.20.0")
L4, T4, P100 = Gpu("NVIDIA L4", 23_600_000_000, (8, 9)), Gpu("Tesla T4", 15_800_000_000, (7, 5), False, True), Gpu("Tesla P100-PCIE-16GB", 17_000_000_000, (6, 0), False, True)
BUILT = ("sm_75", "sm_80", "sm_86", "sm_90", "compute_90")


@pytest.fixture
def machine(tmp_path):
    "One without a fault: what a place with 31 GB and an L4 would be."
    place = Environment("kaggle", "Interactive", is_interactive=True, working=tmp_path/"working", keep=tmp_path/"working", temp=tmp_path, quota=20_000_000_000, memory=31_000_000_000, env=dict(HOME=str(tmp_path)))
    place.working.mkdir()
    return Machine(place, GOOD, (L4,), BUILT, "12.8", 31_000_000_000, lambda folder: 200_000_000_000, True, True)


@pytest.fixture
def real(tmp_path):
    "A run of the real model, by its hub id."
    out = str(tmp_path/"working")
    return dict(model=dict(pretrained_model_name_or_path="Qwen/Qwen-Image-Edit-2511", quantize="nf4"), data=dict(image_size=[512, 512]),
                train=dict(output_dir=out), cache=dict(cache_dir=out + "/cache"), logging=dict(log_dir=out + "/runs"))


def look(m, config=None): return doctor(config, m, plans=False)
def lines(report, level=None): return {f.what: f for f in report.findings if f.level and level in (None, f.level)}


def test_a_machine_without_a_fault_is_told_nothing(machine, real):
    assert not lines(look(machine, real)) and not lines(look(machine)) and not lines(look(machine, real).stop())


# fault, (what is found, level, what the remedy says) beside a run of the real model
FAULTS = {
    "torchao 0.10 with peft 0.21": (dict(versions=GOOD | dict(torchao="0.10.0", peft="0.21.2")), "torchao", "stops", "pip uninstall -y torchao"),
    "a GPU of sm 6.0": (dict(gpus=(P100,)), "GPU", "stops", "no kernels for sm 6.0 .*choose a newer accelerator"),
    "a GPU of sm 7.5": (dict(gpus=(T4,)), "GPU bfloat16", "hinders", "leave `train.mixed_precision` auto"),
    "a GPU of sm 7.5, and another": (dict(gpus=(T4, T4)), "GPU 1 bfloat16", "hinders", "leave `train.mixed_precision` auto"),
    "torch without kernels for it": (dict(built_for=("sm_90",)), "GPU", "stops", "no kernels for sm 8.9"),
    "no GPU": (dict(gpus=()), "GPU", "stops", "Accelerator > GPU T4 x2"),
    "torch without CUDA": (dict(gpus=(), cuda=None), "GPU", "stops", "built without CUDA"),
    "2 GB of disk": (dict(free=lambda folder: 2_000_000_000), "disk: working folder", "hinders", "remove files, or attach a filled cache"),
    "8 GB of host memory": (dict(memory=8_000_000_000), "host memory", "hinders", "keep `data.num_workers` 0 .* and offload nothing"),
    "no internet": (dict(online=False), "internet", "stops", "switch Internet on .*or attach the model as an input"),
    "a missing secret": (dict(token=False), "secret HF_TOKEN", "hinders", r'Add-ons > Secrets.*os.environ\["HF_TOKEN"\]'),
    "no torchvision": (dict(versions=GOOD | dict(torchvision=None)), "torchvision", "stops", "pip install torchvision"),
    "no bitsandbytes for nf4": (dict(versions=GOOD | dict(bitsandbytes=None)), "bitsandbytes", "stops", "pip install bitsandbytes"),
    "no ipywidgets": (dict(versions=GOOD | dict(ipywidgets=None)), "ipywidgets", "note", "pip install ipywidgets"),
    "an old diffusers": (dict(versions=GOOD | dict(diffusers="0.35.2")), "diffusers", "hinders", "pip install 'diffusers>=0.37'"),
    "a newer torch": (dict(versions=GOOD | dict(torch="3.0.0")), "torch", "note", "try 2.15"),
    "plain positions": (dict(positions="1d"), "transformers", "note", "14194"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_told_with_its_remedy(fault, machine, real):
    change, what, level, remedy = FAULTS[fault]
    report = look(replace(machine, **change), real)
    found = lines(report)
    assert found[what].level == level and not [w for w, f in found.items() if f.level != level], "this fault and no other"
    assert re.search(remedy, found[what].remedy)
    assert found[what].remedy in repr(report) and what in report._repr_html_()
    if level != "stops": assert report.stop() is report
    else:
        with pytest.raises(ValueError, match=f"^this cannot run here: {what} .*{remedy}") as e: report.stop()
        assert "\n" not in str(e.value)


def test_emulated_bf16_that_was_asked_for(machine, real):
    real["train"] |= dict(mixed_precision="bf16")
    found = lines(look(replace(machine, gpus=(T4,)), real))["GPU bfloat16"]
    assert (found.value, found.level) == ("emulated, so slow", "hinders") and found.remedy.startswith("set `train.mixed_precision` auto")
    assert lines(look(replace(machine, gpus=(replace(T4, emulated=False),)), real))["GPU bfloat16"].value == "none"
    assert "quantize the base" in lines(look(replace(machine, gpus=(T4,)), real | dict(model=real["model"] | dict(quantize="none"))))["GPU bfloat16"].remedy


def test_2_gb_of_disk_stop_what_does_not_fit(machine, real, tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "_plan", lambda c, m: None) # takes seconds
    small = replace(machine, free=lambda folder: 2_000_000_000)
    report = doctor(real, small)
    assert "attach the model as an input" in lines(report, "stops")["disk"].remedy and report.disk.problems()
    tiny = dict(train=dict(output_dir=str(tmp_path)), cache=dict(cache_dir=str(tmp_path/"cache")), logging=dict(log_dir=str(tmp_path/"runs")))
    assert not lines(doctor(tiny, small), "stops"), "the tiny model has room enough"


def test_8_gb_of_host_memory_stop_what_would_be_kept_there(machine, real):
    real["model"]["quantize"] = "none"
    for section, key in (("model", "text_encoder_offload"), ("train", "blocks_to_swap")):
        asks = real | {section: real[section] | {key: True}}
        found = lines(look(replace(machine, memory=8_000_000_000), asks), "stops")["host memory"]
        assert f"`{section}.{key}` keeps" in found.remedy and "set it to false" in found.remedy
    assert not lines(look(replace(machine, memory=64_000_000_000), real | dict(train=real["train"] | dict(blocks_to_swap=True))))


@pytest.mark.parametrize("level, config", [("note", {}), ("note", dict(model=dict(pretrained_model_name_or_path="tiny")))])
def test_without_the_real_model_nothing_of_it_is_asked(level, config, machine, tmp_path):
    config = config | dict(cache=dict(cache_dir=str(tmp_path/"cache")))
    report = look(replace(machine, gpus=(), online=False, token=False), config)
    assert {f.what: f.level for f in report.findings if f.level} == {"GPU": "note", "internet": "note"} and report.stop()


# --- a cache of another model
def cache_of(folder, **changes):
    who = Components("tiny").identity() | changes
    EmbeddingCacheManager(folder).add_identity(who)
    return dict(cache=dict(cache_dir=str(folder)), train=dict(mixed_precision="no"))


@pytest.mark.parametrize("changes, wrong", [(dict(variant="v1"), "variant 2511"), (dict(dtype="bfloat16"), "dtype float32"), (dict(text_encoder="0123-plain"), "text_encoder"), (dict(vae="0123"), "vae"),
                                            (dict(control_area=1024), "control_area 9216")])
def test_a_cache_of_another_model(changes, wrong, machine, tmp_path):
    config = cache_of(tmp_path/"cache", **changes)
    report = look(machine, config)
    found = lines(report, "stops")["cache"]
    assert wrong in found.remedy and "attach the cache of this model, or set `cache.cache_dir` to a new folder and precompute" in found.remedy
    with pytest.raises(ValueError, match="cache .*it is another model's"): report.stop()


def test_a_cache_of_this_model_by_another_name(machine, tmp_path):
    config = cache_of(tmp_path/"cache", model="1")
    assert not lines(look(machine, config)) and any(f.what == "cache" for f in look(machine, config).findings)
    other = cache_of(tmp_path/"cache", variant="v1")
    assert not lines(look(machine, other)), "of two, one is this model's, and its encoders are here to tell which"


def test_a_hub_models_cache_is_judged_by_its_variant(machine, real, tmp_path):
    cache_of(tmp_path/"working/cache", dtype="bfloat16")
    assert not lines(look(machine, real))
    real["model"]["pretrained_model_name_or_path"] = "Qwen/Qwen-Image-Edit-2509"
    assert "variant 2509" in lines(look(machine, real), "stops")["cache"].remedy


def test_a_broken_manifest_is_told(machine, tmp_path):
    (tmp_path/"cache").mkdir()
    (tmp_path/"cache/manifest.json").write_text("{")
    assert "delete it and precompute again" in lines(look(machine, dict(cache=dict(cache_dir=str(tmp_path/"cache")))), "stops")["cache"].remedy


# --- place, data, plan
def test_a_session_that_is_nearly_over(machine, real):
    import time
    late = replace(machine, place=replace(machine.place, hours=9., began=time.time() - 8 * 3600))
    found = lines(look(late, real))["time to train"]
    assert found.level == "hinders" and found.value.startswith("0.5 h, max_hours auto (8.5 of kaggle's 9 h") and "start a new session" in found.remedy
    early = look(replace(late, place=replace(late.place, began=time.time())), real)
    assert not lines(early) and any(f.what == "time to train" and f.value.startswith("8.5 h") for f in early.findings)


def test_colab_keeps_nothing(machine): assert "mount Drive" in lines(look(replace(machine, place=replace(machine.place, name="colab", hours=None))))["session"].remedy


def test_a_data_set_that_is_not_there(machine, real, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "_plan", lambda c, m: None)
    gone = real | dict(data=dict(dataset_path=str(tmp_path/"nowhere")))
    assert "does not exist" in lines(look(machine, gone), "stops")["data set"].remedy
    assert "stops" in {f.level for f in doctor(gone, machine).findings}, "and the plan of disk use does not hide it"
    assert not lines(look(machine, real | dict(data=dict(dataset_path=str(pairs())))))


def test_the_plan_for_this_machine_comes_with_it(machine, real):
    report = doctor(real, replace(machine, gpus=(T4, T4)))
    data = report.data()
    assert data["plan"]["gpu"] == "Tesla T4" and data["disk"]["items"] and report.plan.gpu.count == 2 and not report.plan.gpu.bf16
    assert json.loads(json.dumps(data)) and "what is written" in report._repr_html_() and repr(report.disk) in repr(report)
    assert {f.what for f in report.of("hinders")} >= {"GPU 0 bfloat16"}
    none = doctor(real, replace(machine, gpus=(replace(T4, bytes=3_000_000_000),)))
    assert "no way to train fits" in lines(none, "stops")["GPU memory"].remedy
    large = doctor(real | dict(model=dict(pretrained_model_name_or_path="Qwen/Qwen-Image-Edit-2511")), machine)
    assert "it will probably run out: set" in lines(large, "hinders")["GPU memory"].remedy and "`model.quantize`" in lines(large)["GPU memory"].remedy


# --- the configuration for this machine
H100 = Gpu("NVIDIA H100 80GB HBM3", 84_900_000_000, (9, 0))
T4_HALF = dict(model=dict(quantize="nf4", text_encoder_quantize="nf4"))
TWO = dict(model=dict(quantize="qint8", text_encoder_quantize="nf4"))
BOTH = dict(model_parallel_devices=["cuda:0", "cuda:1"])
WIDE = dict(train=dict(gradient_checkpointing=False, compile=True))

@pytest.mark.parametrize("gpus, side, area, expected", [
    ((T4,), 512, None, T4_HALF | dict(cache=dict(vae_encoder_device="cpu"))), ((T4,), 512, 512 * 512, T4_HALF | dict(train=dict(gradient_checkpointing="selective"))),
    ((T4,), 1024, None, T4_HALF | dict(train=dict(offload_activations=True), cache=dict(vae_encoder_device="cpu"))),
    ((T4, T4), 512, 512 * 512, TWO | dict(train=BOTH | dict(gradient_checkpointing="selective"))), ((T4, T4), 1024, None, TWO | dict(train=BOTH, cache=dict(vae_encoder_device="cuda:1"))),
    ((L4,), 512, 512 * 512, dict(model=dict(quantize="qfloat8"), train=dict(gradient_checkpointing="selective"))), ((L4,), 1024, None, dict(model=dict(quantize="qfloat8", text_encoder_quantize="nf4"))),
    ((H100,), 512, None, WIDE), ((H100,), 1024, None, WIDE)], ids=lambda v: "x".join(g.name.split()[1] for g in v) if isinstance(v, tuple) else None)
def test_the_configuration_for_a_machine_is_what_was_asked_with_what_the_plan_sets(gpus, side, area, expected, machine, real, capsys):
    real |= dict(model=dict(pretrained_model_name_or_path="Qwen/Qwen-Image-Edit-2511", quantize="none"), data=dict(image_size=[side, side], control_area=area), optimizer=dict(lr=3e-4))
    report = doctor(real, replace(machine, gpus=gpus))
    c, asked = report.config(), make_config(real)
    assert report.stop() is report and report.plan.changes == expected
    differs = {s: {k: v for k, v in getattr(c, s).model_dump().items() if v != getattr(asked, s).model_dump()[k]} for s in type(c).model_fields}
    assert {s: keys for s, keys in differs.items() if keys} == expected, "and nothing else is changed"
    said = capsys.readouterr().out
    assert all(f"{s}.{k} {v}" in said for s, keys in expected.items() for k, v in keys.items())


def test_a_tiny_model_runs_as_it_was_asked(machine, tmp_path, capsys):
    tiny = dict(train=dict(output_dir=str(tmp_path), gradient_checkpointing=False, compile=False), cache=dict(cache_dir=str(tmp_path/"cache")), logging=dict(log_dir=str(tmp_path/"runs")))
    for gpus in ((), (T4,), (H100,)):
        report = doctor(tiny, replace(machine, gpus=gpus))
        assert report.config() == make_config(tiny) and not capsys.readouterr().out


def test_without_a_configuration_there_is_none_to_plan(machine):
    with pytest.raises(ValueError, match=r"^the doctor looked at the machine alone; call doctor\(config\) to plan a run$"): doctor(machine=machine).config()


def test_where_something_stops_nothing_is_planned(machine, real, monkeypatch):
    "What a plan counts with may be what is broken: beside an old torchao its import raises."
    def broken(c, m): raise RuntimeError("peft found an incompatible version of torchao")
    monkeypatch.setattr(rooms, "_plan", broken)
    report = doctor(real, replace(machine, versions=GOOD | dict(torchao="0.10.0")))
    assert report.of("stops")[0].what == "torchao" and report.plan is None and report.disk is not None and report.config() == make_config(real)
    with pytest.raises(RuntimeError): doctor(real, machine)


# --- the report
def test_it_shows_itself_escaped_and_the_worst_first():
    report = DoctorReport(sorted([Finding("a", "b"), Finding("<i>", "<b>", "stops", "<u>")], key=lambda f: LEVELS.index(f.level)))
    page = report._repr_html_()
    assert not any(tag in page for tag in ("<i>", "<b>", "<u>")) and "&lt;u&gt;" in page and repr(report).splitlines()[0] == "this cannot run here: <i> (0 hinder, 0 to know)"
    assert report.data()["findings"][0] == dict(what="<i>", value="<b>", level="stops", remedy="<u>") and list(report)[0] == ("<i>", "<b>", "<u>")


def test_what_stops_is_one_sentence_and_the_rest_is_printed(machine, real, capsys):
    report = look(replace(machine, gpus=(P100,), online=False, token=False), real)
    with pytest.raises(ValueError) as e: report.stop()
    assert [f.level for f in report.findings] == sorted((f.level for f in report.findings), key=LEVELS.index) and report.findings[0].level == "stops"
    assert "GPU Tesla P100" in str(e.value) and "internet no" in str(e.value) and "secret" not in str(e.value)
    assert "hinders secret HF_TOKEN: missing" in capsys.readouterr().out


def test_a_remedy_for_every_level(machine, real):
    "What is not as it should be says what to do."
    for change, *_ in FAULTS.values():
        for f in look(replace(machine, **change), real).findings: assert bool(f.level) == bool(f.remedy), f


# --- as torch and the packages tell it
@pytest.mark.parametrize("sm, ok", [((6, 0), False), ((7, 5), True), ((7, 0), False), ((8, 0), True), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_binaries_serve_later_minor_versions_and_ptx_every_later_gpu(sm, ok): assert runs_on(sm, BUILT) == ok


def test_accelerated_names_are_read(): assert runs_on((9, 0), ["sm_90a"]) and runs_on((12, 0), ["sm_120"]) and not runs_on((12, 0), ["sm_100"]) and not runs_on((9, 0), [])


@pytest.mark.parametrize("sm, own, kernels", [((6, 0), False, False), ((7, 5), False, True), ((8, 0), True, True)])
def test_a_gpu_as_torch_tells_of_it(sm, own, kernels, monkeypatch, machine):
    "torch says yes to emulated bfloat16."
    fake = dict(is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda i: NS(name="X", total_memory=16_000_000_000, major=sm[0], minor=sm[1]),
                is_bf16_supported=lambda including_emulation=True: own or including_emulation, get_arch_list=lambda: list(BUILT))
    for name, fn in fake.items(): monkeypatch.setattr(torch.cuda, name, fn)
    class Device:
        def __init__(self, i): pass
        def __enter__(self): pass
        def __exit__(self, *a): pass
    monkeypatch.setattr(torch.cuda, "device", Device)
    assert gpus_here() == (Gpu("X", 16_000_000_000, sm, own, not own),)
    m = this_machine(machine.place, internet=False)
    assert m.gpus == gpus_here() and m.built_for == BUILT
    assert [f.level for f in rooms.gpu_findings(m)] == (["stops"] if not kernels else [""] if own else ["", "hinders"])


def test_looking_imports_neither_diffusers_nor_transformers():
    code = "import sys\nfrom qie_nb.planning.doctor import doctor\nd = doctor(dict(model=dict(pretrained_model_name_or_path='tiny')), internet=False, plans=False)\nassert len(d.findings) > 15\nprint([m for m in ('diffusers', 'transformers', 'peft') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]"


def test_positions_are_read_as_the_models_tell_them():
    from qie_nb.models.components import positions_of
    assert rooms._positions() == positions_of("QwenImageEditPlusPipeline")


def test_the_command_says_so_too(machine, real, tmp_path, monkeypatch, capsys):
    file = tmp_path/"run.yaml"
    file.write_text(yaml.safe_dump(real))
    monkeypatch.setattr(rooms, "this_machine", lambda internet=True: replace(machine, gpus=(P100,)))
    assert cli.main(["doctor", "--config", str(file)]) == 1 and "no kernels for sm 6.0" in capsys.readouterr().out
    monkeypatch.setattr(rooms, "this_machine", lambda internet=True: machine)
    assert cli.main(["doctor"]) == 0 and "nothing stops a run here" in capsys.readouterr().out
