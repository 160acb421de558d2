"""Precompute on a Ray cluster: the bytes of one process, each entry once, also if processes are killed.

Only the slow tests need Ray: one runs at every change, two every week."""
import json, os, subprocess, sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import cluster as bench # benchmarks/cluster.py
from helpers import PATIENCE, finish, write_pairs
from qie_nb.cache import EmbeddingCacheManager
from qie_nb.cli import main
from qie_nb.core.display import Progress
from qie_nb.data.dataset import ImageDataset
from qie_nb.extras import ray_cluster as cluster
from qie_nb.extras.ray_cluster import RayCluster, Worker, describe_job, share_machines
from qie_nb.encoding.encoder import Encoder
from qie_nb.encoding.jobs import WorkItem, tasks_of
from qie_nb.encoding.precompute import precompute
from qie_nb.devices.edit_model import EditModel


def data_set(root, cache, **kw): return ImageDataset(dict(dataset_path=str(root), cache_dir=str(cache), image_size=[64, 64], caption_dropout_rate=0.1) | kw)


def files(folder): return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*.safetensors")}


def job_of(root, cache, **kw):
    "What the driver describes, with its data set and its encoder."
    dataset = data_set(root, cache)
    encoder = Encoder(EditModel("tiny"), dataset.cache)
    dataset.refresh(encoder.identity), encoder.add_identity()
    return describe_job(dataset, encoder, **kw), dataset, encoder


# --- shares
@pytest.mark.parametrize("workers", [1, 3, 40])
def test_tasks_hold_each_sample_once_and_keep_images_together(workers):
    sizes, work, n = [1, 4, 9, 1, 1, 30, 2], [], 0
    for lock, size in enumerate(sizes): # items of up to four samples, as `plan_encoding` makes
        samples = list(range(n, n + size))
        work += [[WorkItem(str(lock), samples[k:k + 4], [])] for k in range(0, size, 4)]
        n += size
    tasks = tasks_of(work, workers)
    assert sum(tasks, []) == list(range(n)) and all(tasks)
    most = max(1, min(16, n // (4 * workers)))
    assert all(len(t) < most + 4 for t in tasks) and len(tasks) >= n // (most + 3)
    for group in work: assert sum(set(group[0].samples) <= set(t) for t in tasks) == 1, "a group is whole"
    if workers == 1: assert any(set(range(5, 14)) <= set(t) for t in tasks), "nine samples on the same images are one task's"


@pytest.mark.parametrize("machines, asked, share", [
    ([dict(CPU=16, GPU=4)] * 2, {}, (8, 4, 1)), ([dict(CPU=8)] * 3, {}, (3, 8, 0)), ([dict(CPU=8, GPU=1)], dict(gpus=0.25), (4, 2, 0.25)),
    ([dict(CPU=2)], dict(workers=5), (5, 0.4, 0)), ([dict(CPU=8, GPU=2)], dict(workers=5), (2, 4, 1)), ([dict(CPU=0), dict(CPU=4, GPU=2), {}], {}, (2, 2, 1)), ([dict(CPU=4, GPU=1)] * 2, dict(gpus=0), (2, 4, 0)),
    ([dict(CPU=4, GPU=1), dict(CPU=4)], {}, (1, 4, 1))])
def test_workers_share_the_machines(machines, asked, share): assert share_machines(machines, **asked) == share


@pytest.mark.parametrize("machines, asked, text", [([dict(CPU=4, GPU=1)] * 2, dict(gpus=2), "`gpus` must be at most 1, the GPUs of the largest machine"),
                                                   ([dict(CPU=4)], dict(gpus=0.5), "at most 0"), ([dict(CPU=0)], {}, "no machine with a CPU")])
def test_what_no_machine_has_is_refused(machines, asked, text):
    with pytest.raises(ValueError, match=text): share_machines(machines, **asked)


# --- without Ray
def test_without_ray_one_sentence_says_what_to_install(pairs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    arguments = ["precompute", "model.pretrained_model_name_or_path=tiny", f"data.dataset_path={pairs()}", f"cache.cache_dir={tmp_path/'cache'}"]
    assert main([*arguments, "--ray"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "a cluster needs Ray and its data library; pip install 'qie_nb[ray]'" in said and not (tmp_path/"cache").exists()
    assert main([*arguments, "--workers", "2"]) == 2 and "add `--ray`" in capsys.readouterr().err
    with pytest.raises(ValueError, match="pip install"): RayCluster()
    for wrong, text in (dict(workers=0), "`workers` must be 1 or more, got 0"), (dict(gpus=-1), "`gpus` must be 0 or more"):
        with pytest.raises(ValueError, match=text): RayCluster(**wrong)


def test_ray_reports_nothing_and_a_cluster_of_our_own_has_a_secret(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"): monkeypatch.setenv(name, "x"), monkeypatch.delenv(name)
    with pytest.raises(ValueError): cluster.import_ray(own=True)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0" and "RAY_AUTH_MODE" not in os.environ, "Ray is imported: too late"
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.setitem(sys.modules, "ray.data", None)
    monkeypatch.setattr("builtins.__import__", lambda name, *a, _real=__import__, **kw: _real("no_such_module" if name.startswith("ray") else name, *a, **kw))
    with pytest.raises(ValueError): cluster.import_ray(own=False)
    assert "RAY_AUTH_MODE" not in os.environ, "a running cluster has its own"
    with pytest.raises(ValueError): cluster.import_ray(own=True)
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64


# --- a worker, in this process
@pytest.mark.bits
def test_a_worker_writes_the_files_of_precompute(pairs, tmp_path):
    root = pairs(((48, 32), (32, 48), (40, 40)))
    other = data_set(root, tmp_path/"alone")
    precompute(other, Encoder(EditModel("tiny"), other.cache))
    job, dataset, encoder = job_of(root, tmp_path/"shared")
    worker, before = Worker(job), Progress.tell
    first, second = (worker.do(n, [0, 1, 2]) for n in range(2))
    assert (first["report"]["encoded"], first["samples"], first["died"]) == (3, 3, []) and first["report"]["tensors"] == len(files(tmp_path/"shared"))
    assert (second["report"]["encoded"], second["report"]["elsewhere"], second["report"]["tensors"]) == (0, 3, 0)
    assert files(tmp_path/"shared") == files(tmp_path/"alone") and Progress.tell is before
    assert not encoder.components.loaded and not list(dataset.cache.temp_dir.glob(".*")), "neither encoders in the driver nor marks are left"


def test_a_worker_skips_what_cannot_be_used(pairs, tmp_path):
    root = pairs(((48, 32), (32, 48), (40, 40)))
    job, dataset, _ = job_of(root, tmp_path/"cache")
    (root/"control_images"/"0001.png").write_bytes(b"no image")
    done = Worker(job).do(0, [0, 1, 2])
    (name, why), = done["report"]["skipped"]
    assert name == dataset.samples[1].id and "0001.png" in why and done["report"]["encoded"] == 2
    for p in root.rglob("*.png"): p.unlink()
    job, *_ = job | dict(dataset=job["dataset"]), 0
    job["dataset"].refresh()
    done = Worker(job).do(0, [0, 1, 2])
    assert done["error"] == "OSError" and "none of 3 samples can be read: " in done["text"], "its machine lacks the images"


def test_a_worker_refuses_other_encoders_and_another_cache(pairs, tmp_path):
    job, *_ = job_of(pairs(), tmp_path/"cache")
    done = Worker(job | dict(identity=job["identity"] | dict(vae="0123"))).do(0, [0])
    assert done["error"] == "ValueError" and "the encoders differ from those where the job was started (vae " in done["text"] and ", not 0123)" in done["text"]
    (tmp_path/"cache"/"manifest.json").unlink()
    done = Worker(job).do(0, [0])
    assert done["error"] == "OSError" and "is not the one that the job fills; mount the same folder" in done["text"] and not files(tmp_path/"cache")


def test_a_task_that_kills_its_workers_ends_the_job(pairs, tmp_path):
    job, dataset, _ = job_of(pairs(), tmp_path/"cache")
    mark = Path(job["mark"] + "t0.tmp")
    mark.write_text("a\nb\n") # two workers began it and died
    assert Worker(job).do(0, [0])["died"] == ["a", "b"] and not mark.exists()
    mark.write_text("a\nb\na\n")
    done = Worker(job).do(0, [1, 2])
    assert done["error"] == "OSError" and f"3 workers died while they encoded '{dataset.samples[1].id}', '{dataset.samples[2].id}' (on a, b, a)" in done["text"]
    assert not mark.exists()
    dead = mark.with_name(mark.name.replace(f"-{os.getpid()}-", "-999999999-")) # of a driver that was killed
    for p in (mark, dead): p.write_text("a\n")
    dataset.cache.clean()
    assert mark.exists() and not dead.exists()


# --- the driver, with workers in this process
@pytest.fixture
def here(monkeypatch):
    "Instead of Ray: two workers take turns; `here.change(done)` changes what one of them returns."
    class Here:
        def change(self, done): return done
        def nodes(self): return [dict(Alive=True, Resources=dict(CPU=2)), dict(Alive=False, Resources=dict(CPU=2))]
    ray, turns = Here(), []
    def run_tasks(ray, Worker, job, tasks, workers, **resources):
        pool = [Worker(job) for _ in range(workers)]
        for n, task in enumerate(tasks):
            turns.append(n % workers)
            yield ray.change(json.loads(pool[n % workers](dict(task=[task]))["done"][0]))
    @contextmanager
    def connected(address): yield ray
    monkeypatch.setattr(cluster, "import_ray", lambda own=False: None)
    monkeypatch.setattr(cluster, "connected", connected)
    monkeypatch.setattr(cluster, "run_tasks", run_tasks)
    ray.turns = turns
    return ray


@pytest.mark.bits
def test_the_report_is_that_of_precompute(pairs, tmp_path, here, capsys):
    root = pairs(((48, 32), (32, 48), (40, 40), (48, 32)))
    broken = root/"training_images"/"0002.png"
    broken.write_bytes(b"no image")
    reports, encoders = [], []
    for cache, share in ("alone", None), ("shared", RayCluster(workers=2).encode_all):
        dataset = data_set(root, tmp_path/cache, allow_missing_control=False)
        encoders.append(Encoder(EditModel("tiny"), dataset.cache))
        reports.append(precompute(dataset, encoders[-1], share=share))
    a, b = (dict(vars(r), seconds=0) for r in reports)
    assert a == b and b["encoded"] == 3 and len(b["skipped"]) == 1 and {*here.turns} == {0, 1}
    assert not {"vae", "text_encoder"} & encoders[1].components.loaded.keys(), "the driver needs no memory for encoders"
    assert "Ray: 2 workers on 1 machines, 1 CPUs and 0 GPUs each" in capsys.readouterr().out
    assert files(tmp_path/"alone") == files(tmp_path/"shared")


def test_what_workers_tell_is_told_in_our_words(pairs, tmp_path, here, capsys):
    dataset = data_set(pairs(), tmp_path/"cache")
    run = lambda: precompute(dataset, Encoder(EditModel("tiny"), dataset.cache), share=RayCluster(workers=1).encode_all)
    def fail(done):
        if len(here.turns) < 2: return done | dict(died=["green"])
        return dict(host="blue", samples=1, error="OSError", text="'/shared' is full")
    here.change = fail
    with pytest.raises(OSError, match="^on blue: '/shared' is full. What is encoded is kept; run it again to continue$"): run()
    assert "a worker died on green; another one did its samples" in capsys.readouterr().out
    here.change = lambda done: done | dict(report=done["report"] | dict(skipped=[["0003", "why"]]))
    report = run()
    assert report.skipped == [("0003", "why")] and (report.reused, report.encoded, report.elsewhere) == (2, 1, 0), "one sample before the error, one whose report was lost with it"


@pytest.mark.slow
def test_configuration_and_command_line_use_the_cluster(pairs, tmp_path, here, capsys):
    root = write_pairs(tmp_path/"set", ((48, 32), (32, 48)))
    val = write_pairs(tmp_path/"val", ((40, 40),), seed=5)
    arguments = ["model.pretrained_model_name_or_path=tiny", f"data.dataset_path={root}", f"train.val_path={val}", "train.device=cpu", "data.image_size=[64,64]", f"cache.cache_dir={tmp_path/'cache'}"]
    assert main(["precompute", *arguments, "--ray", "auto", "--workers", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("Ray: ") == 2 and "3 samples" in said and "3 encoded" in said, "training pairs, then validation pairs"
    assert main(["precompute", *arguments]) == 0 and "3 reused" in capsys.readouterr().out


# --- with Ray
def needs_ray(): pytest.importorskip("ray.data", reason="Ray is not installed: pip install 'ray[data]'")


@pytest.mark.weekly
@pytest.mark.slow
def test_killed_workers_and_drivers_lose_and_repeat_nothing(tmp_path):
    needs_ray()
    out = bench.measure(tmp_path, 60, seconds_per_job=0.05)
    run = out["with_kills"]
    assert out["files_that_differ"] == 0 and out["packed_files_that_differ"] == 0 and out["files"] == out["entries"] > 200 and out["packed_files"] > 1
    assert run["stored_twice"] == 0 and run["begun_again_but_not_in_flight"] == 0 and run["begun_again"] <= run["in_flight_at_the_kills"] <= 20
    assert 0 <= out["entries"] - run["entries"] <= 4, "a process may be killed after it has stored an entry and before it notes that"
    assert run["processes_that_encoded"] >= 5, "two, one instead of the killed one, two of the second driver"
    said = "\n".join(out["log"])
    assert "a worker died on " in said and " 0 skipped" in said and "Traceback" not in said, said


@pytest.mark.weekly
@pytest.mark.slow
def test_a_sample_that_kills_every_worker_is_named(tmp_path):
    needs_ray()
    job = bench.Job(tmp_path, 24)
    (job.set/"training_images"/"00007.txt").write_text("POISON")
    finish(job.start("cache", "--ray", "--workers", "2"), code=2)
    said = (tmp_path/"driver.txt").read_text()
    assert "3 workers died while they encoded " in said and "'00007'" in said.rpartition("3 workers died")[2] and "run it again to continue" in said, said
    assert "Traceback" not in said and not list((tmp_path/"cache"/".tmp").glob(".*t*.tmp"))
    (job.set/"training_images"/"00007.txt").write_text("make it blue")
    finish(job.start("cache", "--ray", "--workers", "2"))


@pytest.mark.weekly
def test_a_running_cluster_of_two_machines_is_used_and_left_running(tmp_path):
    "Two nodes of Ray on this machine; one leaves in the middle. A job that fails leaves no worker behind."
    needs_ray()
    script = tmp_path/"two_nodes.py"
    script.write_text(TWO_NODES)
    job = bench.Job(tmp_path, 60, seconds_per_job=0.02)
    command = [sys.executable, script, str(job.set), str(tmp_path/"cache"), str(PATIENCE)]
    run = subprocess.Popen(command, env=job.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = finish(run, seconds=2 * PATIENCE)
    assert "all is well" in said and "Ray: 2 workers on 2 machines" in said, said[-3000:]


TWO_NODES = '''
import os, sys, threading, time
import ray
from ray.cluster_utils import Cluster
from qie_nb.data.dataset import ImageDataset
from qie_nb.extras.ray_cluster import RayCluster
from qie_nb.encoding.encoder import Encoder
from qie_nb.encoding.precompute import precompute
from qie_nb.devices.edit_model import EditModel

root, cache, patience = sys.argv[1:]
nodes = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1, include_dashboard=False))
second = nodes.add_node(num_cpus=1)
dataset = ImageDataset(dict(dataset_path=root, cache_dir=cache, image_size=[32, 32], caption_dropout_rate=0.1))
stored = lambda: sum(" stored " in line for line in open(os.environ["ENCODINGS"])) if os.path.exists(os.environ["ENCODINGS"]) else 0
def leave():
    while stored() < 100: time.sleep(0.05)
    nodes.remove_node(second, allow_graceful=False)
threading.Thread(target=leave, daemon=True).start()
run = lambda: precompute(dataset, Encoder(EditModel("tiny"), dataset.cache), share=RayCluster(nodes.address).encode_all)
report = run()
assert report.encoded + report.elsewhere == 60 and not report.skipped, report
assert not ray.is_initialized()
ray.init(address=nodes.address, log_to_driver=False) # a cluster that the user is connected to stays so
before, ray.shutdown_seen = ray.cluster_resources()["CPU"], False
os.remove(os.path.join(root, "training_images", "00003.txt")); open(os.path.join(root, "training_images", "00003.txt"), "w").write("another caption")
dataset = ImageDataset(dict(dataset_path=root, cache_dir=cache, image_size=[32, 32], caption_dropout_rate=0.1))
assert run().encoded == 1 and ray.is_initialized()
end = time.time() + float(patience)
while ray.available_resources().get("CPU", 0) < before and time.time() < end: time.sleep(0.2)
assert ray.available_resources().get("CPU", 0) == before, "a worker was left behind"
print("all is well", flush=True)
os._exit(0)
'''
