"""Environments in imitations: names, folders, limits, attached files, hours, network and secrets."""
import json, os, re, shutil, subprocess, sys, threading, time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil, pytest

from fake_kaggle import files_of
from helpers import write_pairs
from qie_nb.cache import EmbeddingCacheManager
from qie_nb.config import make_config
from qie_nb.core import environment
from qie_nb.core.environment import Environment, detect_environment, environment_name, find_session_start, host_cores, host_memory, online, used_bytes
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.checkpoint import is_complete

KAGGLE = dict(KAGGLE_KERNEL_RUN_TYPE="Interactive", CUDA_VERSION="12.8")
MODEL = {"model_index.json": '{"_class_name": "QwenImageEditPipeline"}'}


def on_kaggle(root): return detect_environment(root, KAGGLE)


def files(root, content):
    for name, text in content.items():
        (root/name).parent.mkdir(parents=True, exist_ok=True)
        (root/name).write_text(text)


# --- which environment
@pytest.mark.parametrize("env, name, hours", [
    (KAGGLE, "kaggle", 9.), (dict(KAGGLE_URL_BASE="https://www.kaggle.com"), "kaggle", 12.), (KAGGLE | dict(CUDA_VERSION="", TPU_NAME="local"), "kaggle", 9.),
    (dict(COLAB_RELEASE_TAG="release-colab"), "colab", None), (dict(JUPYTERHUB_SERVICE_PREFIX="/user/me/"), "jupyterhub", None), ({}, "script", None)])
def test_name_and_hours(env, name, hours, tmp_path):
    e = detect_environment(tmp_path, env)
    assert (e.name, e.hours) == (name, hours)


@pytest.mark.parametrize("interactive, name", [(True, "jupyter"), (False, "batch")])
def test_kernel_is_a_notebook_or_a_batch(interactive, name, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "kernel", lambda: object())
    monkeypatch.setattr(environment, "is_interactive", lambda: interactive)
    assert environment_name({}, tmp_path) == name
    assert [detect_environment(tmp_path, KAGGLE | dict(KAGGLE_KERNEL_RUN_TYPE=r)).is_interactive for r in ("Interactive", "Batch")] == [interactive, False]


def test_kaggle_is_recognised_by_its_folder(tmp_path):
    (tmp_path/"kaggle/working").mkdir(parents=True)
    e = detect_environment(env=dict(QIE_NB_ROOT=str(tmp_path)))
    assert (e.name, e.working, e.quota, e.hours) == ("kaggle", tmp_path/"kaggle/working", 20_000_000_000, 12.)
    files(tmp_path, {"dev/nvidia0": ""})
    assert detect_environment(tmp_path, {}).hours == 9.


def test_colab_keeps_only_files_on_drive(tmp_path):
    assert detect_environment(tmp_path, dict(COLAB_GPU="1")).keep is None
    cache = tmp_path/"content/drive/MyDrive/qie_nb/cache"
    files(cache, {"manifest.json": json.dumps(dict(identities=dict(a=dict(model="m", variant="v1"))))})
    e = detect_environment(tmp_path, dict(COLAB_GPU="1"))
    assert e.cache_dirs() == [str(cache)], "once, although Drive is an input and the output"
    assert e.keep == cache.parent and [f.path for f in e.found("cache")] == [cache] and e.working == tmp_path/"content"


@pytest.mark.slow
def test_detection_needs_neither_torch_nor_network():
    code = "import socket, sys; socket.socket.connect = None; from qie_nb.core.environment import detect_environment as d; repr(d()); assert not {'torch', 'numpy', 'diffusers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# --- memory and cores
@pytest.mark.parametrize("groups, process, memory, cores", [
    ({}, "", 64e9, 64), ({"memory.max": "max", "cpu.max": "max 100000"}, "", 64e9, 64),
    ({"memory.max": "31000000000", "cpu.max": "350000 100000"}, "", 31e9, 4),
    ({"a/b/memory.max": "max", "a/memory.max": "13000000000", "a/cpu.max": "200000 100000"}, "0::/a/b\n", 13e9, 2),
    ({"memory/memory.limit_in_bytes": "13000000000", "cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, "", 13e9, 2),
    ({"memory/memory.limit_in_bytes": "9223372036854771712", "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "", 64e9, 64)])
def test_limits_of_control_groups(groups, process, memory, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64_000_000_000))
    files(tmp_path/"sys/fs/cgroup", groups)
    if process: files(tmp_path, {"proc/self/cgroup": process})
    assert (host_memory(tmp_path), host_cores(tmp_path)) == (memory, cores)


# --- session start and time limit
@pytest.mark.parametrize("ages, env, hours, age", [
    (dict(first=7200, own=60), {}, 9., 7200), (dict(first=7200, own=60), {}, None, 7200),
    (dict(first=40000, server=3600, own=60), dict(JPY_PARENT_PID="5"), 9., 3600), # the first process is older than a session
    (dict(first=40000, own=60), {}, 9., 60), (dict(first=40000, own=40000), {}, 9., None), ({}, {}, 9., None)])
def test_session_start(ages, env, hours, age, monkeypatch):
    def process(pid):
        name = {1: "first", 5: "server"}.get(pid, "own")
        if name not in ages: raise psutil.NoSuchProcess(pid)
        return SimpleNamespace(create_time=lambda: time.time() - ages[name])
    monkeypatch.setattr(psutil, "Process", process)
    start = find_session_start(env, hours)
    assert start is None if age is None else abs(time.time() - start - age) < 5


@pytest.mark.parametrize("hours", [0, True, "soon"])
def test_impossible_hours_are_refused(hours):
    with pytest.raises(ValueError, match="`train.max_hours` must be a number of hours above 0"): make_config(dict(train=dict(max_hours=hours)))


@pytest.mark.parametrize("max_hours, hours_ago, stop", [
    ("auto", 8.6, "max_hours auto (8.5 of kaggle's 9 h, from its start) is nearly over"),
    pytest.param(None, 28, "done", marks=pytest.mark.slow), pytest.param("auto", 0, "done", marks=pytest.mark.slow)])
def test_run_stops_before_its_session_ends(max_hours, hours_ago, stop, trained_run, tmp_path, monkeypatch):
    env = Environment("kaggle", working=tmp_path, hours=9., session_start=time.time() - hours_ago * 3600)
    for module in ("planning.disk_space", "training.resume", "planning.facts"): monkeypatch.setattr(f"qie_nb.{module}.detect_environment", lambda *a, **kw: env)
    t = QwenImageEditTrainer(trained_run.settings(tmp_path, train=dict(max_hours=max_hours, max_train_steps=2, save_steps=None, eval_steps=None, val_fraction=0))).fit()
    assert t.state.stop == stop and t.global_step == (2 if stop == "done" else 1)
    saved = tmp_path/"checkpoints/latest"
    assert saved.is_file() == bool(max_hours), "only a time limit saves at the end"
    if max_hours: assert is_complete(saved.parent/saved.read_text())


# --- attached files
@pytest.fixture(params=["input/notebooks/someone/first-session", pytest.param("input/first-session", marks=pytest.mark.slow)])
def attached(request, trained_run, tmp_path):
    "Kaggle with a finished session attached read-only, in the old and the new layout."
    folder = tmp_path/"kaggle"/request.param
    shutil.copytree(trained_run.output, folder, ignore=shutil.ignore_patterns("runs"))
    shutil.copytree(trained_run.cache, folder/"cache")
    (tmp_path/"kaggle/working").mkdir()
    for p in [*folder.rglob("*"), folder]: p.chmod(0o555 if p.is_dir() else 0o444)
    return folder


def test_next_session_resumes_from_attached_files(attached, trained_run, tmp_path):
    e, before = on_kaggle(tmp_path), files_of(attached)
    assert e.attached() == [attached] and e.latest().endswith("epoch_0002")
    again = trained_run.settings(e.working, train=dict(resume_checkpoint=e.latest("checkpoint"), num_epochs=3, eval_steps=None), cache=dict(cache_dir=e.cache_dirs()))
    t = QwenImageEditTrainer(again).fit()
    assert t.resumed_from == attached/"checkpoints/epoch_0002" and t.global_step == 12
    assert not {"vae", "text_encoder"} & set(t.components.built), "training reads the attached cache"
    assert files_of(attached) == before, "attached files are not written"
    assert e.latest("checkpoint") == str(e.working/"checkpoints/epoch_0003")


def model(c, name="tiny"): c["model"]["pretrained_model_name_or_path"] = name
def rank(c): c["model"]["lora"]["r"] += 1
def other_pairs(c): c["data"]["dataset_path"] = str(write_pairs(Path(c["train"]["output_dir"]).parent/"mine", ((48, 32),) * 3, seed=5))
def one_pair_less(c):
    copy = shutil.copytree(c["data"]["dataset_path"], Path(c["train"]["output_dir"]).parent/"less")
    next((copy/"training_images").glob("*.png")).unlink()
    c["data"]["dataset_path"] = str(copy)


@pytest.mark.parametrize("change, why", [
    (model, "with another model (tiny"), (rank, "`model.lora.r`: "), (other_pairs, "(4 other pairs)"), (one_pair_less, "pairs: 4 in the checkpoint, ")])
def test_latest_takes_only_what_fits(change, why, attached, trained_run, tmp_path, capsys):
    e, c = on_kaggle(tmp_path), trained_run.settings(tmp_path/"new")
    assert e.latest("checkpoint", c).endswith("epoch_0002") and not capsys.readouterr().out
    change(c)
    assert e.latest("checkpoint", c) is None
    (line,) = capsys.readouterr().out.splitlines() # of two checkpoints
    assert line.startswith(f"not used: checkpoint in {attached}/checkpoints, which belongs to ") and why in line, line


def test_a_damaged_state_is_passed_over(attached, trained_run, tmp_path, capsys):
    e, c = on_kaggle(tmp_path), trained_run.settings(tmp_path/"new")
    for f in Path(attached).rglob("state.json"): f.chmod(0o644), f.write_text("{")
    assert e.latest("checkpoint", c) is None and "damaged" in capsys.readouterr().out


@pytest.mark.parametrize("fraction", [0.2, "auto", 0])
def test_a_checkpoint_fits_although_an_image_is_skipped(fraction, trained_run, pairs, tmp_path):
    "A truncated image is skipped by the trainer, so it is not in the checkpoint."
    e, root = on_kaggle(tmp_path), pairs(((48, 32),) * 4)
    image = sorted((root/"training_images").glob("*.png"))[0]
    image.write_bytes(image.read_bytes()[:60])
    c = trained_run.settings(e.working, data=dict(dataset_path=str(root)), cache=dict(cache_dir=str(tmp_path/"cache")), train=dict(num_epochs=1, eval_steps=None, val_fraction=fraction))
    QwenImageEditTrainer(c).fit()
    assert e.latest("checkpoint", c)
    c["train"]["val_fraction"] = 0.5
    assert not e.latest("checkpoint", c)


def test_a_new_run_gets_its_own_folders(trained_run, pairs, tmp_path, capsys):
    "The working folder has the cache and checkpoints of a trial that was run before trials had a folder."
    e = on_kaggle(tmp_path)
    trial = trained_run.settings(e.working, cache=dict(cache_dir=str(e.working/"cache")), train=dict(max_train_steps=2, eval_steps=None))
    model(trial)
    QwenImageEditTrainer(trial).fit()
    c = {name: {k: v for k, v in keys.items() if k not in ("output_dir", "cache_dir", "log_dir")} for name, keys in trial.items()}
    again = e.run_settings(c)
    assert again["train"] == trial["train"] | dict(resume_checkpoint=str(e.working/"checkpoints/step_00000002"))
    assert again["cache"]["cache_dir"] == [str(e.working/"cache")] and again["logging"]["log_dir"] == str(e.working/"runs")
    assert e.run_settings(c, "trial")["train"]["output_dir"] == str(e.working/"trial")
    model(c, "Qwen/Qwen-Image-Edit-2511"), capsys.readouterr()
    mine = e.run_settings(c | dict(predict={}))
    assert mine["train"] == c["train"] | dict(output_dir=str(e.working/"run"), resume_checkpoint=None) and "predict" in mine
    assert mine["cache"]["cache_dir"] == [str(e.working/"cache-2")] and mine["logging"]["log_dir"] == str(e.working/"run/runs")
    said = capsys.readouterr().out
    assert re.sub(r"\S+/kaggle", "/kaggle", said).splitlines() == [
        "not used: checkpoint in /kaggle/working/checkpoints, which belongs to a run with another model (tiny)",
        "not used: cache in /kaggle/working/cache, which was made with another model (tiny, float32)"]


def test_incomplete_checkpoint_is_not_found(attached, tmp_path):
    (attached/"checkpoints/epoch_0002").chmod(0o755)
    (attached/"checkpoints/epoch_0002/optimizer.safetensors").unlink()
    assert on_kaggle(tmp_path).latest().endswith("step_00000006")


def test_all_mount_layouts_are_listed(tmp_path):
    mounts, top = ("pairs", "datasets/me/pairs", "notebooks/me/run", "models/q/edit/diffusers/v/1", "competitions/c", "qwen/diffusers/v/1"), tmp_path/"kaggle/input"
    for m in mounts: files(top/m, MODEL)
    e = on_kaggle(tmp_path)
    assert [str(p.relative_to(top)) for p in e.attached()] == sorted((*mounts[:5], "qwen"), key=lambda m: m.split("/"))
    assert {str(f.path.relative_to(top)) for f in e.found("model")} == set(mounts)
    shutil.rmtree(top)
    files(top/"models", {"a.png": ""}) # a data set of this name
    assert on_kaggle(tmp_path).attached() == [top/"models"]


def test_newest_artifact_comes_first(trained_run, tmp_path):
    top = tmp_path/"kaggle/input"
    for name, when in dict(a=5., b=9., c=7.).items(): files(top/name, {"COMPLETE": "{}", "state.json": json.dumps(dict(written=when, global_step=1))})
    files(top/"other", {"manifest.json": '{"name": "a web page"}', "d/manifest.json": "[1]", "e/manifest.json": "{", "f/COMPLETE": "", "g/state.json": "{}"})
    e = on_kaggle(tmp_path)
    assert [f.path.name for f in e.found()] == ["b", "c", "a"] and e.latest() == str(top/"b") and all(f.attached for f in e.found())
    EmbeddingCacheManager(trained_run.cache).pack(top/"packed")
    found, = e.found("cache")
    assert found.path.name == "packed" and found.description == "packed, of tiny-2511 (2511)"


def test_search_is_bounded(tmp_path, monkeypatch):
    for n in range(60): (tmp_path/f"{n:02}").mkdir()
    files(tmp_path/"99", MODEL)
    seen, real = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda p: seen.append(p) or real(p))
    assert not list(environment._search(tmp_path, True, max_folders=20)) and len(seen) == 20
    assert [f.kind for f in environment._search(tmp_path, True)] == ["model"]


# --- disk space
def test_free_space_is_the_smaller_of_disk_and_quota(tmp_path):
    e = Environment("kaggle", working=tmp_path, quota=10_000_000)
    files(tmp_path/"a", {"b": "x" * 4_000_000})
    assert 5_900_000 < e.free_space() == e.free_space(tmp_path/"not/there/yet") == 10_000_000 - used_bytes(tmp_path)
    assert e.free_space(tmp_path.parent, lambda folder: 77) == 77 == e.free_space(free=lambda folder: 77)
    assert replace(e, quota=1).free_space() == 0 and replace(e, quota=None).free_space() > 10_000_000


def test_a_sessions_quota_counts_what_it_has_written_anywhere(tmp_path):
    home, inputs = tmp_path/"home", tmp_path/"kaggle/input"
    place = dict(root=tmp_path, working=tmp_path/"kaggle/working", temp=tmp_path/"kaggle/temp", inputs=(inputs,))
    e = Environment("kaggle", **place, session_quota=10_000_000, env=dict(HOME=str(home)))
    written = [e.working, e.temp, home/".cache/huggingface/hub", home/".cache/qie_nb"]
    for n, folder in enumerate(written, 1):
        files(folder, {"a": "x" * 2_000_000})
        assert 10_000_000 - n * 2_100_000 < e.session_room() < 10_000_000 - n * 1_900_000
    for folder in (*written, tmp_path/"elsewhere"): assert e.free_space(folder) == e.session_room()
    assert e.free_space(inputs/"a", lambda folder: 77_000_000) == 77_000_000, "an attached disk"
    assert e.free_space(free=lambda folder: 5) == 5, "a smaller disk"
    assert replace(e, session_quota=None).session_room() is None
    inside = replace(e, env=dict(HOME=str(home), HF_HUB_CACHE=str(e.temp/"hub"), QIE_NB_HOME="/nowhere/else"))
    assert inside.written_folders() == sorted([e.temp, e.working]), "each once, and none of another machine"
    assert replace(e, session_quota=1).session_room() == 0


# --- network and secrets
def test_online():
    connect, forever = MagicMock(), threading.Event()
    assert online(seconds=600, connect=connect, env={}) and connect.call_args.args == (("huggingface.co", 443),)
    assert not online(connect=connect, env=dict(HF_HUB_OFFLINE="1")) and connect.call_count == 1
    assert online(seconds=0.05, connect=lambda *a, **kw: forever.wait() and MagicMock(), env={}) is False
    forever.set()


def test_secrets_are_found_and_not_shown(tmp_path, monkeypatch):
    def make(**env): return Environment("kaggle", working=tmp_path, temp=tmp_path, env=dict(HOME=str(tmp_path)) | env)
    e = make(HF_TOKEN="hf_1")
    assert make().secret() is None and e.secret() == "hf_1" and make(OTHER="o").secret("OTHER") == "o"
    assert "hf_1" not in repr(e) + str(e.data())
    files(tmp_path/".cache/huggingface", {"token": "hf_2\n"})
    assert make().secret() == "hf_2" and make().secret("OTHER") is None
    store = SimpleNamespace(UserSecretsClient=lambda: SimpleNamespace(get_secret=lambda name: dict(WANDB="w")[name]))
    monkeypatch.setitem(sys.modules, "kaggle_secrets", store)
    assert make().secret("WANDB") is None and make().secret("WANDB", ask=True) == "w" and make().secret("NONE", ask=True) is None
