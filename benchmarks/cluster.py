"""Precompute on a Ray cluster of two workers on this machine: one worker killed at a quarter and at three quarters of the work, the driver killed in the
middle and started again. Counts what was encoded twice, and compares every file with those of one process.

`python benchmarks/cluster.py` takes 2,000 samples of the tiny model and writes results/cluster.json; `--samples 60 --out FILE` for a short one. Needs `ray[data]`.
"""
import argparse, collections, json, os, platform, signal, subprocess, sys, tempfile, time
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

ROOT = Path(__file__).parents[1]
OUT = ROOT/"benchmarks"/"results"/"cluster.json"

# Runs first in every process: each entry is noted when its encoding begins and when it is stored. A prompt with POISON kills its process.
HOOK = '''
import importlib.abc, importlib.util, os, signal, sys, time

def note(*what):
    fd = os.open(os.environ["ENCODINGS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (" ".join(map(str, (os.getpid(), *what))) + "\\n").encode())
    os.close(fd)

def watch(module):
    encode, save = module.encode_job, module.Encoder.save
    def noted(encoder, job, read):
        for m in (m for unit in job.units for m in unit):
            note("begins", *m.entry.id)
            if "POISON" in m.prompt: os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(os.environ.get("SECONDS_PER_JOB", 0)))
        return encode(encoder, job, read)
    def stored(self, encoded):
        before = self.stored
        save(self, encoded)
        if self.stored > before: note("stored", *encoded.entry.id)
    module.encode_job, module.Encoder.save = noted, stored

class AfterEncoder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "qie_nb.encoding.encoder": return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module): load(module); watch(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, AfterEncoder())
'''


def write_set(root, n, seed=0):
    "Pairs of 32 x 32 pixels; every fifth has the control image of the one before it."
    rng = np.random.default_rng(seed)
    for d in ("training_images", "control_images"): (root/d).mkdir(parents=True)
    for i in range(n):
        if i % 5 != 4: control = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(control).save(root/"control_images"/f"{i:05}.png")
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(root/"training_images"/f"{i:05}.png")
        (root/"training_images"/f"{i:05}.txt").write_text(f"make number {i} blue")
    return root


class Job:
    "Runs of `qie-nb precompute` on one data set, each entry noted."
    def __init__(self, folder, n, seconds_per_job=0.):
        self.folder, self.set, self.notes = Path(folder), write_set(Path(folder)/"set", n), Path(folder)/"encodings.txt"
        (self.folder/"hook").mkdir()
        (self.folder/"hook"/"sitecustomize.py").write_text(HOOK)
        path = os.pathsep.join(filter(None, [str(self.folder/"hook"), str(ROOT), os.environ.get("PYTHONPATH")]))
        self.env = os.environ | dict(PYTHONPATH=path, ENCODINGS=str(self.notes), SECONDS_PER_JOB=str(seconds_per_job), OMP_NUM_THREADS="1", MKL_CBWR="AUTO,STRICT")

    def start(self, cache, *options):
        self.log = open(self.folder/"driver.txt", "ab")
        command = [sys.executable, "-m", "qie_nb.cli", "precompute", "model.pretrained_model_name_or_path=tiny", f"data.dataset_path={self.set}", "data.image_size=[32,32]",
                   f"cache.cache_dir={self.folder/cache}", "train.device=cpu", "train.mixed_precision=no", "model.modulation_table=false", *options]
        return subprocess.Popen(command, env=self.env, stdout=self.log, stderr=self.log, cwd=self.folder, start_new_session=True)

    def noted(self) -> list: # (pid, begins or stored, kind, key)
        if not self.notes.exists(): return []
        return [(int(pid), what, (kind, key)) for pid, what, kind, key in map(str.split, self.notes.read_text().splitlines())]

    def stored(self) -> int: return sum(what == "stored" for _, what, _ in self.noted())

    def wait_for(self, stored:int, driver, seconds=900): # raises if the driver ends before
        end = time.time() + seconds
        while self.stored() < stored:
            if driver.poll() is not None or time.time() > end: raise RuntimeError(f"{self.stored()} of {stored} entries: " + (self.folder/"driver.txt").read_text()[-3000:])
            time.sleep(0.02)

    def workers(self) -> list: # living processes that encode, the last one first
        return [p for p in dict.fromkeys(pid for pid, *_ in reversed(self.noted())) if psutil.pid_exists(p) and psutil.Process(p).status() != "zombie"]

    def kill_a_worker(self) -> int:
        os.kill(pid := self.workers()[0], signal.SIGKILL)
        return pid

    def pack(self, cache) -> dict: # {name: bytes} of the packed cache
        command = [sys.executable, "-m", "qie_nb.cli", "cache", "pack", cache, "--out", f"{cache}_packed", "--shard-gb", "0.002"]
        subprocess.run(command, env=self.env, cwd=self.folder, check=True, capture_output=True)
        return {p.name: p.read_bytes() for p in (self.folder/f"{cache}_packed").iterdir()}

    def files(self, cache) -> dict: return {str(p.relative_to(self.folder/cache)): p.read_bytes() for p in sorted((self.folder/cache).rglob("*.safetensors"))}


def in_flight(noted, pids) -> set: # entries that these processes had begun and not stored
    begun, done = ({(pid, entry) for pid, what, entry in noted if pid in pids and what == verb} for verb in ("begins", "stored"))
    return {entry for _, entry in begun - done}


def kills(job, total:int, options=("--ray", "--workers", "2")) -> dict:
    "The run with kills; `total` entries."
    began, killed = time.time(), []
    driver = job.start("shared", *options)
    job.wait_for(total // 4, driver)
    killed.append(job.kill_a_worker())
    job.wait_for(total // 2, driver)
    before, at_kill = set(job.workers()), time.time()
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    while before & set(job.workers()): time.sleep(0.05)
    ended, stored = time.time() - at_kill, job.stored()
    killed += before
    driver = job.start("shared", *options)
    job.wait_for(3 * total // 4, driver)
    killed.append(job.kill_a_worker())
    if code := driver.wait(): raise RuntimeError(f"exit code {code}: " + (job.folder/"driver.txt").read_text()[-3000:])
    noted = job.noted()
    begun, kept = (collections.Counter(entry for _, what, entry in noted if what == verb) for verb in ("begins", "stored"))
    again = {entry for entry, n in begun.items() if n > 1}
    return dict(seconds=round(time.time() - began, 1), workers_killed=2, drivers_killed=1, stored_when_the_driver_was_killed=stored, seconds_until_its_workers_ended=round(ended, 2),
                entries=len(kept), stored_twice=sum(n > 1 for n in kept.values()), begun_again=len(again), in_flight_at_the_kills=len(in_flight(noted, killed)),
                begun_again_but_not_in_flight=len(again - in_flight(noted, killed)), processes_that_encoded=len({pid for pid, *_ in noted}))


def measure(folder, n, seconds_per_job=0.) -> dict:
    job = Job(folder, n, seconds_per_job)
    t0 = time.time()
    if job.start("alone").wait(): raise RuntimeError((job.folder/"driver.txt").read_text()[-3000:])
    alone, entries = round(time.time() - t0, 1), job.stored()
    job.notes.unlink()
    out = dict(samples=n, entries=entries, seconds_of_one_process=alone, with_kills=kills(job, entries))
    for what, look in dict(files=job.files, packed_files=job.pack).items():
        a, b = look("alone"), look("shared")
        out |= {what: len(a), f"{what}_that_differ": len(a.keys() ^ b.keys()) + sum(a[k] != b[k] for k in a.keys() & b.keys())}
    return out | dict(log=(job.folder/"driver.txt").read_text().splitlines())


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--samples", type=int, default=2000)
    p.add_argument("--out", default=str(OUT))
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as tmp: out = measure(tmp, a.samples)
    log = [line for line in out.pop("log") if line.startswith(("a worker", "Ray:", "precompute:"))]
    import torch
    machine = dict(cpu=platform.processor() or platform.machine(), cores=os.cpu_count(), load=os.getloadavg()[0], device="cpu", runs=1,
                   **{name: version(name) for name in ("ray", "torch", "diffusers", "transformers")}, date=datetime.now(timezone.utc).isoformat(timespec="minutes"))
    with suppress(OSError): machine["cpu"] = next(l.split(":")[1].strip() for l in Path("/proc/cpuinfo").read_text().splitlines() if l.startswith("model name"))
    Path(a.out).write_text(json.dumps(dict(machine=machine, **out, printed=log), indent=1) + "\n")
    print(Path(a.out).read_text())


if __name__ == "__main__": main()
