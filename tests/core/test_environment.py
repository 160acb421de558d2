"""Places as they are: names, folders, hours and quotas in imitations; what is attached is found and read, what does not fit is refused before it begins."""
import json, os, shutil, subprocess, sys, threading, time
from dataclasses import replace
from pathlib import Path

import pytest

from helpers import settings, write_pairs
from qie_nb.planning import disk_space as disk
from qie_nb.core import environment as places
from qie_nb.training.checkpoint import is_complete
from qie_nb.config import make_config
from qie_nb.core.files import DiskFull
from qie_nb.core.environment import MARGIN, Environment, host_cores, host_memory, online, place_name, session_start, time_limit, used_bytes, detect_environment
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer

KAGGLE = dict(KAGGLE_KERNEL_RUN_TYPE="Interactive", CUDA_VERSION="12.8")
OLD, NEW = "input/first-session", "input/notebooks/somebody/first-session" # where Kaggle mounts a notebook's output


def files(root, content):
    for name, text in content.items():
        (root/name).parent.mkdir(parents=True, exist_ok=True)
        (root/name).write_text(text)
    return root


# --- which place
@pytest.mark.parametrize("env, name", [
    (KAGGLE, "kaggle"), (dict(KAGGLE_URL_BASE="https://www.kaggle.com"), "kaggle"),
    (dict(KAGGLE | {"COLAB_RELEASE_TAG": "release-colab"}), "kaggle"), # its image is built on Colab's
    (dict(COLAB_RELEASE_TAG="release-colab"), "colab"), (dict(JUPYTERHUB_SERVICE_PREFIX="/user/me/"), "jupyterhub"), ({}, "script")])
def test_a_place_is_known_by_its_environment(env, name, tmp_path): assert place_name(env, tmp_path) == name


@pytest.mark.parametrize("looks, name", [(True, "jupyter"), (False, "batch")])
def test_a_kernel_is_a_notebook_or_a_batch(looks, name, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "kernel", lambda: object())
    monkeypatch.setattr(places, "is_interactive", lambda: looks)
    assert place_name({}, tmp_path) == name


def test_kaggle_by_its_folder_alone(tmp_path):
    (tmp_path/"kaggle/working").mkdir(parents=True)
    p = detect_environment(tmp_path, {})
    assert (p.name, p.working, p.quota, p.hours) == ("kaggle", tmp_path/"kaggle/working", 20_000_000_000, 12.)
    (tmp_path/"dev").mkdir()
    (tmp_path/"dev/nvidia0").touch()
    assert detect_environment(tmp_path, {}).hours == 9.


@pytest.mark.parametrize("env, hours", [(KAGGLE, 9.), (KAGGLE | dict(CUDA_VERSION=""), 12.), (KAGGLE | dict(CUDA_VERSION="", TPU_NAME="local"), 9.), (dict(COLAB_GPU="1"), None), ({}, None)])
def test_hours_of_a_session(env, hours, tmp_path): assert detect_environment(tmp_path, env).hours == hours


def test_a_batch_is_not_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "is_interactive", lambda: True)
    assert [detect_environment(tmp_path, KAGGLE | dict(KAGGLE_KERNEL_RUN_TYPE=run)).is_interactive for run in ("Interactive", "Batch")] == [True, False]


def test_the_root_may_come_from_the_environment(tmp_path):
    assert detect_environment(env=KAGGLE | dict(QIE_NB_ROOT=str(tmp_path))).working == tmp_path/"kaggle/working"


def test_colab_keeps_only_what_is_on_drive(tmp_path):
    assert detect_environment(tmp_path, dict(COLAB_GPU="1")).keep is None
    cache = tmp_path/"content/drive/MyDrive/qie_nb/cache"
    files(cache, {"manifest.json": json.dumps(dict(identities=dict(a=dict(model="m", variant="v1"))))})
    p = detect_environment(tmp_path, dict(COLAB_GPU="1"))
    assert p.keep == cache.parent and [f.path for f in p.found("cache")] == [cache] and p.working == tmp_path/"content"


def test_tensorboard_is_told_the_same_place(monkeypatch):
    from qie_nb.widgets import tensorboard as events
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert events.this_place().kaggle == "Batch" and events.choose_view(events.this_place()) == ("figure", "Kaggle serves no TensorBoard")
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE")
    assert events.this_place().kaggle == ""


def test_where_needs_neither_torch_nor_a_network():
    code = "import socket, sys\nsocket.socket.connect = None\nfrom qie_nb.core.environment import detect_environment\nrepr(detect_environment())\nassert not {'torch', 'numpy', 'diffusers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# --- what a process may use
@pytest.mark.parametrize("content, memory, cores", [
    ({}, 64_000_000_000, 64), ({"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/cpu.max": "max 100000"}, 64_000_000_000, 64),
    ({"sys/fs/cgroup/memory.max": "31000000000", "sys/fs/cgroup/cpu.max": "350000 100000"}, 31_000_000_000, 4),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/memory.max": "13000000000", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 13_000_000_000, 2),
    ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "13000000000", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 13_000_000_000, 2),
    ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 64_000_000_000, 64),
], ids=["no groups", "no limits", "version 2", "an outer group", "version 1", "version 1 without limits"])
def test_limits_of_control_groups_count(content, memory, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    files(tmp_path, {"proc/meminfo": "MemFree: 5 kB\nMemTotal: 62500000 kB\n"} | content)
    assert (host_memory(tmp_path), host_cores(tmp_path)) == (memory, cores)


# --- since when, and how long
def processes(root, **ages): # of processes in seconds
    now, tick = time.time(), os.sysconf("SC_CLK_TCK")
    boot = now - 1e6
    stat = lambda age: "7 (a ) b) S " + " ".join(["0"] * 18) + f" {int((now - age - boot) * tick)} 0"
    return files(root, {"proc/stat": f"cpu 1 2\nbtime {int(boot)}\n"} | {f"proc/{'self' if pid == 'own' else pid[1:]}/stat": stat(age) for pid, age in ages.items()})


@pytest.mark.parametrize("ages, env, hours, age", [
    (dict(p1=7200, own=60), {}, 9., 7200), # the container is the session
    (dict(p1=7200, own=60), {}, None, 7200),
    (dict(p1=40000, p5=3600, own=60), dict(JPY_PARENT_PID="5"), 9., 3600), # older than a session can be
    (dict(p1=40000, own=60), {}, 9., 60), (dict(p1=40000, own=40000), {}, 9., None), ({}, {}, 9., None)])
def test_the_session_began_before_this_process(ages, env, hours, age, tmp_path):
    began = session_start(processes(tmp_path, **ages), env, hours)
    assert began is None if age is None else abs(time.time() - began - age) < 5


def test_time_limit():
    p = Environment("kaggle", hours=9., began=1000.)
    assert time_limit("auto", 5000., p)[0] == 1000. + (9 - MARGIN) * 3600 and "from its start" in time_limit("auto", 5000., p)[1]
    assert time_limit("auto", 5000., replace(p, began=None))[0] == 5000. + (9 - MARGIN) * 3600 and "the call of fit" in time_limit("auto", 5000., replace(p, began=None))[1]
    assert time_limit("auto", 5000., Environment("colab")) == (None, "") == time_limit(None, 5000., p)
    assert time_limit(2, 5000., p) == (5000. + 7200, "max_hours 2")


@pytest.mark.parametrize("hours", [0, -1, True, "soon", [1]])
def test_hours_that_make_no_sense_are_refused(hours):
    with pytest.raises(ValueError, match="`train.max_hours` must be a number of hours above 0, auto or null, got"): make_config(dict(train=dict(max_hours=hours)))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    "A first session: cache, checkpoints at steps 2 and 4, and its configuration."
    tmp = tmp_path_factory.mktemp("places")
    root, out = write_pairs(tmp/"set", ((48, 32),) * 4), tmp/"out"
    config = lambda out, **train: settings(root, out, data=dict(batch_size=1), cache=dict(cache_dir=str(out/"cache")),
                                           train=dict(output_dir=str(out), save_interval=0, save_steps=2, num_epochs=1) | train)
    QwenImageEditTrainer(config(out)).fit()
    return config, out


def at(monkeypatch, place):
    "This place wherever the library asks for one."
    for module in ("planning.disk_space", "training.resume", "encoding.precompute", "core.environment"): monkeypatch.setattr(f"qie_nb.{module}.detect_environment", lambda *a, **kw: place)
    return place


def test_a_run_ends_with_its_session(first, tmp_path, monkeypatch):
    config, _ = first
    at(monkeypatch, Environment("kaggle", working=tmp_path, hours=9., began=time.time() - 8.6 * 3600))
    t = QwenImageEditTrainer(config(tmp_path, num_epochs=50, save_steps=None)).fit()
    assert t.global_step == 1 and t.state.stop == "max_hours auto (8.5 of kaggle's 9 h, from its start) is nearly over"
    assert is_complete(tmp_path/"checkpoints"/(tmp_path/"checkpoints/latest").read_text())


@pytest.mark.parametrize("train, place", [({}, Environment("script")), (dict(max_hours=None), Environment("kaggle", hours=9., began=time.time() - 1e5)), ({}, Environment("kaggle", hours=9., began=time.time()))])
def test_a_run_goes_on_where_its_hours_are_not_over(train, place, first, tmp_path, monkeypatch):
    config, _ = first
    at(monkeypatch, replace(place, working=tmp_path))
    t = QwenImageEditTrainer(config(tmp_path, save_steps=None, **train)).fit()
    assert t.state.stop == "done" and t.global_step == 4
    assert (tmp_path/"checkpoints/latest").is_file() == bool(place.hours and not train), "only hours that count make a save at the end"


# --- the second session
def kaggle(root, mount, source):
    "A place where the first session's output is attached, as it may not be written."
    attached = root/"kaggle"/mount
    shutil.copytree(source, attached, ignore=shutil.ignore_patterns("runs"))
    (root/"kaggle/working").mkdir()
    for p in [*attached.rglob("*"), attached]: p.chmod(0o555 if p.is_dir() else 0o444)
    return detect_environment(root, KAGGLE), attached


def state(folder): return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("mount", [OLD, NEW])
def test_the_second_session_goes_on_from_what_is_attached(mount, first, tmp_path):
    config, out = first
    place, attached = kaggle(tmp_path, mount, out)
    before, work = state(attached), place.working
    assert place.attached() == [attached] and [f.kind for f in place.found()].count("checkpoint") == 2
    again = config(work, resume_checkpoint=place.latest("checkpoint"), num_epochs=2)
    again["cache"] = dict(cache_dir=place.cache_dirs())
    t = QwenImageEditTrainer(again).fit()
    assert t.resumed_from == attached/"checkpoints/epoch_0001" and t.global_step == 8
    assert not {"vae", "text_encoder"} & set(t.components.built), "the attached cache holds all that training reads"
    assert state(attached) == before, "nothing may be written there"
    assert is_complete(work/"checkpoints/epoch_0002") and place.latest("checkpoint") == str(work/"checkpoints/epoch_0002")


def test_a_first_session_finds_nothing(tmp_path):
    (tmp_path/"kaggle/input/pairs").mkdir(parents=True)
    (tmp_path/"kaggle/working").mkdir()
    place = detect_environment(tmp_path, KAGGLE)
    assert place.latest("checkpoint") is None and place.cache_dirs() == [str(tmp_path/"kaggle/working/cache")]


def test_all_kinds_of_mounts_are_listed(tmp_path):
    mounts = ("pairs", "datasets/me/pairs", "notebooks/me/run", "models/q/edit/diffusers/v/1", "competitions/c", "qwen/diffusers/v/1")
    for m in mounts: files(tmp_path/"kaggle/input"/m, {"model_index.json": '{"_class_name": "QwenImageEditPipeline"}'})
    place = detect_environment(tmp_path, KAGGLE)
    assert [str(p.relative_to(tmp_path/"kaggle/input")) for p in place.attached()] == sorted((*mounts[:5], "qwen"), key=lambda m: m.split("/"))
    assert {str(f.path.relative_to(tmp_path/"kaggle/input")) for f in place.found("model")} == set(mounts), "at the new path of a model and at the old one"


def test_a_data_set_called_models_is_one(tmp_path):
    files(tmp_path/"kaggle/input/models", {"a.png": ""})
    assert detect_environment(tmp_path, KAGGLE).attached() == [tmp_path/"kaggle/input/models"]


def test_a_checkpoint_that_lost_a_file_on_its_way_is_none(first, tmp_path):
    place, attached = kaggle(tmp_path, NEW, first[1])
    assert place.latest().endswith("epoch_0001")
    (attached/"checkpoints/epoch_0001").chmod(0o755)
    (attached/"checkpoints/epoch_0001/optimizer.safetensors").unlink()
    assert place.latest().endswith("step_00000002")


def test_the_newest_comes_first_and_the_rest_is_no_cache(tmp_path):
    top = tmp_path/"kaggle/input"
    for name, when in (("a", 5.), ("b", 9.), ("c", 7.)): files(top/name, {"COMPLETE": "{}", "state.json": json.dumps(dict(written=when, global_step=int(when)))})
    files(top/"other", {"manifest.json": '{"name": "a web page"}', "d/manifest.json": "[1]", "e/manifest.json": "{", "f/COMPLETE": "", "g/state.json": "{}"})
    place = detect_environment(tmp_path, KAGGLE)
    assert [f.path.name for f in place.found()] == ["b", "c", "a"] and place.latest() == str(top/"b") and all(f.attached for f in place.found())


def test_a_packed_cache_is_found(first, tmp_path):
    from qie_nb.cache import EmbeddingCacheManager
    EmbeddingCacheManager(first[1]/"cache").pack(tmp_path/"kaggle/input/packed")
    found, = detect_environment(tmp_path, KAGGLE).found("cache")
    assert found.path.name == "packed" and found.said.startswith("packed, of ") and "(2511)" in found.said


def test_the_search_is_bounded(tmp_path, monkeypatch):
    for n in range(60): (tmp_path/f"{n:02}").mkdir()
    files(tmp_path/"99", {"model_index.json": "{}"})
    seen, real = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda p: seen.append(p) or real(p))
    assert not list(places._meet(tmp_path, True, most=20)) and len(seen) == 20
    assert [f.kind for f in places._meet(tmp_path, True)] == ["model"]


# --- room
def test_room_is_the_least_of_disk_and_quota(tmp_path):
    p = Environment("kaggle", working=tmp_path, quota=10_000_000)
    files(tmp_path/"a", {"b": "x" * 4_000_000})
    assert 5_900_000 < p.free_space() <= 6_000_000 == p.free_space() + used_bytes(tmp_path) - 4_000_000
    assert p.free_space(tmp_path/"not/there/yet") == p.free_space() and p.free_space(tmp_path.parent, lambda folder: 77) == 77 == p.free_space(free=lambda folder: 77)
    assert replace(p, quota=1).free_space() == 0 and replace(p, quota=None).free_space() > 10_000_000


def test_fit_refuses_what_would_not_fit(first, tmp_path, monkeypatch, built):
    config, _ = first
    at(monkeypatch, Environment("kaggle", working=tmp_path, quota=100_000_000))
    with pytest.raises(DiskFull, match=r"quota 0\.1 GB: \d+\.\d MB are to be written \(checkpoints .*set `train.keep_checkpoints` 1, or `train.checkpoint_budget_gb`.*Nothing was written"):
        QwenImageEditTrainer(config(tmp_path, keep_checkpoints=100)).fit()
    assert not (tmp_path/"checkpoints/latest").exists() and "QwenImageTransformer2DModel" not in built
    assert QwenImageEditTrainer(config(tmp_path, keep_checkpoints=1)).fit().global_step == 4


def test_precompute_refuses_what_would_pass_the_quota(first, tmp_path, monkeypatch):
    config, _ = first
    at(monkeypatch, Environment("kaggle", working=tmp_path, quota=100_000))
    with pytest.raises(DiskFull, match="Nothing was written"): QwenImageEditTrainer(config(tmp_path)).cache_embeddings()
    assert used_bytes(tmp_path) < 50_000


# --- the plan of disk use
def test_the_plan_agrees_with_what_is_written(first, tmp_path):
    config, out = first
    c, place = make_config(config(tmp_path)), Environment("script", working=tmp_path)
    plan = disk.disk_plan(c, place)
    entries = sum(i.bytes for i in plan.items if i.what in ("latents", "prompts"))
    table, = (i.bytes for i in plan.items if i.what == "modulation table")
    real = {kind: used_bytes(out/"cache"/kind) for kind in os.listdir(out/"cache")}
    modulation = real.pop("modulation")
    files_there = sum(f.stat().st_blocks * 512 for kind in real for f in (out/"cache"/kind).rglob("*.safetensors"))
    assert 0.8 < table / modulation < 1.25 and 0.8 < entries / files_there < 1.3, (table, modulation, entries, files_there)
    one = used_bytes(out/"checkpoints/epoch_0001")
    from qie_nb.planning.memory_query import memory_query, model_facts
    job = memory_query(c, model_facts(c.model.pretrained_model_name_or_path)[0])
    assert 0 <= disk.checkpoint_bytes(job) - one < 1_100_000, "names and digests are counted as 1 MB"
    assert plan.bytes("downloads") == 0 and plan.fits()


def test_what_is_there_is_not_counted_again(first, tmp_path):
    config, out = first
    done = {i.what: i.bytes for i in disk.disk_plan(config(out), Environment("script", working=tmp_path)).items}
    anew = {i.what: i.bytes for i in disk.disk_plan(config(tmp_path), Environment("script", working=tmp_path)).items}
    assert all(done[what] < 0.3 * anew[what] for what in ("latents", "prompts", "modulation table")) and done["checkpoints"] < anew["checkpoints"]
    attached = config(tmp_path) | dict(cache=dict(cache_dir=[str(out/"cache"), str(tmp_path/"cache")]))
    assert {i.what: i.bytes for i in disk.disk_plan(attached, Environment("script", working=tmp_path)).items}["modulation table"] == done["modulation table"]


def test_cache_and_checkpoints_together_are_refused_by_the_quota(tmp_path):
    real = dict(model=dict(pretrained_model_name_or_path="Qwen/Qwen-Image-Edit-2511"), data=dict(image_size=[512, 512]), logging=dict(log_dir=str(tmp_path/"runs")),
                cache=dict(cache_dir=str(tmp_path/"cache")), train=dict(output_dir=str(tmp_path), keep_checkpoints=50))
    place = Environment("kaggle", working=tmp_path, quota=20_000_000_000, env=dict(HOME=str(tmp_path.parent)))
    roomy = replace(disk.disk_plan(real, place, pairs=1000), free=lambda folder: 10**12)
    cache, kept = roomy.bytes("cache"), roomy.bytes("checkpoints")
    assert max(cache, kept) < 20e9 < cache + kept or roomy.fits()
    tight = replace(roomy, place=replace(place, quota=max(cache, kept) + 10_000_000))
    assert not tight.fits() and "`train.keep_checkpoints` 1" in tight.problems()[0] and repr(tight).endswith(tight.problems()[0]) and "too much" in tight._repr_html_()
    with pytest.raises(DiskFull): tight.check()


def test_folders_on_one_disk_share_it(tmp_path):
    item = lambda what, size: disk.Item(what, size, tmp_path/what, "")
    plan = disk.DiskPlan([item("a", 60), item("b", 60)], Environment("script", working=tmp_path), free=lambda folder: 100)
    (what, need, room, _), = plan.limits()
    assert (need, room) == (120, 100) and not plan.fits() and replace(plan, free=lambda folder: 120).fits()


def test_only_what_is_missing_is_downloaded(tmp_path):
    config = dict(model=dict(pretrained_model_name_or_path="Qwen/Qwen-Image-Edit-2511"))
    bytes_of = lambda: {i.what: i.bytes for i in disk.disk_plan(config, Environment("script", env=dict(HF_HOME=str(tmp_path))), pairs=1).items if i.group == "downloads"}
    before = bytes_of()
    assert set(before) == {"download transformer", "download text_encoder", "download vae"} and before["download transformer"] == pytest.approx(40.86e9, rel=1e-3)
    files(tmp_path/"hub/models--Qwen--Qwen-Image-Edit-2511/snapshots/abc/vae", {"m.safetensors": "x" * 1000})
    assert before["download vae"] - bytes_of()["download vae"] == 1000


# --- network and secrets
def test_a_network_that_never_answers_is_given_up():
    forever = threading.Event()
    class Late:
        def close(self): pass
    assert online(seconds=0.05, connect=lambda *a, **kw: forever.wait() and Late(), env={}) is False
    forever.set()


def test_online():
    class Line:
        def close(self): pass
    asked = []
    assert online(connect=lambda at, timeout: asked.append(at) or Line(), env={}) and asked == [("huggingface.co", 443)]
    assert online(connect=lambda at, timeout: asked.append(at) or Line(), env=dict(HF_HUB_OFFLINE="1")) is False and len(asked) == 1


def test_secrets_are_found_and_not_shown(tmp_path, monkeypatch):
    place = lambda **env: Environment("kaggle", working=tmp_path, temp=tmp_path, env=dict(HOME=str(tmp_path)) | env)
    assert place().secret() is None and place(HF_TOKEN="hf_1").secret() == "hf_1" and place(OTHER="o").secret("OTHER") == "o"
    files(tmp_path/".cache/huggingface", {"token": "hf_2\n"})
    assert place().secret() == "hf_2" and place().secret("OTHER") is None
    kept = type(sys)("kaggle_secrets")
    kept.UserSecretsClient = lambda: type("Client", (), dict(get_secret=lambda self, name: {"WANDB": "w"}[name]))()
    monkeypatch.setitem(sys.modules, "kaggle_secrets", kept)
    assert place().secret("WANDB") is None and place().secret("WANDB", ask=True) == "w" and place().secret("NONE", ask=True) is None
    shown = place(HF_TOKEN="hf_1")
    assert "hf_1" not in repr(shown) + shown._repr_html_() + str(shown.data())


def test_a_place_shows_itself_escaped(tmp_path):
    files(tmp_path/"kaggle/input/<b>x", {"COMPLETE": "{}", "state.json": '{"global_step": "<i>"}'})
    (tmp_path/"kaggle/working").mkdir()
    page = detect_environment(tmp_path, KAGGLE)._repr_html_()
    assert "<b>" not in page and "<i>" not in page and "&lt;i&gt;" in page
