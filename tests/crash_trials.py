"""Runs cut off on purpose: killed at every moment, asked to end by signals and by a notebook's stop button. What they end with must be, bit for bit,
what an undisturbed run ends with. Every case counts its trials and says the worst that it saw."""
import argparse, collections, contextlib, csv, gc, io, json, os, queue, random, re, shutil, signal, socket, subprocess, sys, tempfile, time, traceback
from pathlib import Path

import torch

from helpers import write_pairs
from cache_fault_trials import Shared, Tally, about, fork, wait, watch_operations

ROOT = Path(__file__).parent.parent
SIZES = ((48, 32),) * 5 + ((32, 48),) * 4 + ((40, 40),) * 2
FILES = ("pytorch_lora_weights.safetensors", "optimizer.safetensors", "ema.safetensors")
A_CHECKPOINT = re.compile(r"(epoch|step)_\d+")


# --- what a run does, told while it does it
class Recorder:
    "A callback that keeps which samples each step is made of: a line a micro-batch, before it is trained on, in a file that only grows."
    def __init__(self, out, tell=lambda what: None, rank=0): self.out, self.tell, self.rank, self.nth = Path(out), tell, rank, 0
    def on_train_begin(self, t):
        self.nth = 0
        train, judge = type(t).training_step, type(t).loss
        def training_step(batch):
            line = json.dumps([t.global_step + 1, self.nth, t.state.epoch, t.state.position, batch["sample_id"], batch["dropped"]]) + "\n"
            f = os.open(self.out/f"seen_{self.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(f, line.encode()), os.close(f)
            self.nth += 1
            self.tell("micro-batch" if self.nth == 1 else "in mid-accumulation")
            return train(t, batch)
        def loss_at(*a, **kw):
            if not torch.is_grad_enabled(): self.tell("in evaluation")
            return judge(t, *a, **kw)
        t.training_step, t.loss = training_step, loss_at
        self.tell("train begin")
    def on_step_end(self, t): self.nth = 0; self.tell("step end")
    def on_epoch_end(self, t): self.tell("epoch end")
    def on_train_end(self, t): self.tell("train end")
    def __getattr__(self, name): # events that came later
        if name.startswith("on_"): return lambda *a, **kw: None
        raise AttributeError(name)


def watch_files(below, tell):
    "In a child: tell(what, path) around everything that changes a folder's content."
    real, below = {n: getattr(os, n) for n in ("unlink", "rmdir", "mkdir")}, str(below)
    watch_operations(below, lambda what, path: tell(what, path.split("\t")[-1])) # a rename is known by where it leads
    def one(what):
        def changed(path, *a, dir_fd=None, **kw):
            full = str(path) if dir_fd is None else f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{path}"
            if full.startswith(below): tell(what, full)
            return real[what](path, *a, dir_fd=dir_fd, **kw)
        return changed
    os.unlink = os.remove = one("unlink")
    os.rmdir, os.mkdir = one("rmdir"), one("mkdir")


def watch_steps(tell):
    "In a child: what happens between the files."
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from qie_nb.trainer import QwenImageEditTrainer as T
    register_optimizer_step_pre_hook(lambda *a: tell("before the optimizer's step"))
    register_optimizer_step_post_hook(lambda *a: tell("after the optimizer's step"))
    backward = torch.Tensor.backward
    def backward_(self, *a, **kw):
        tell("before backward")
        backward(self, *a, **kw)
        tell("after backward")
    torch.Tensor.backward = backward_
    def around(name):
        real = getattr(T, name)
        def method(self, *a, **kw):
            tell(f"before {name}")
            out = real(self, *a, **kw)
            tell(f"after {name}")
            return out
        setattr(T, name, method)
    for name in ("setup_run", "set_lora", "configure_optimizers", "resume", "save_checkpoint"): around(name)


def label(what, path="") -> str:
    "Of one kind of moment: temporary names and numbers left out."
    name = path.rpartition("/checkpoints")[2].lstrip("/") or "checkpoints" if path else ""
    name = re.sub(r"[^/]*\.tmp", "a temporary file", name)
    return f"{what} {re.sub('[0-9]+', '#', name)}".strip()


def blame(t, why):
    "A run that went wrong after trials that passed."
    t.failed.append(why)
    t.trials = max(t.trials, 1)
    t.passed = max(min(t.passed, t.trials) - 1, 0)


# --- a run that can be cut off
class Course:
    "Data, cache and model are made once; every process forks from here."
    def __init__(self, tmp, world=1, lazy=False, **sections):
        from qie_nb.tiny.random_models import tiny_folder
        from qie_nb.trainer import QwenImageEditTrainer
        self.tmp, self.world, self.n = Path(tmp), world, 0
        self.root = write_pairs(self.tmp/"set", SIZES, caption=[" ".join(["invert the colours"] * (1 + i % 3)) + f" {i}" for i in range(len(SIZES))])
        self.base = dict(
            model=dict(pretrained_model_name_or_path=str(tiny_folder("2511", (64*64, 64*64))), lora=dict(r=2, lora_alpha=4, lora_dropout=0.1)),
            data=dict(dataset_path=str(self.root), image_size=[64, 64], batch_size=2, caption_dropout_rate=0.3),
            train=dict(device="cpu", mixed_precision="no", num_epochs=5, gradient_accumulation_steps=3, gradient_checkpointing=False, ema_decay=0.9, val_fraction=0.15,
                       save_steps=2, save_interval=2, keep_checkpoints=2, eval_interval=0, eval_steps=3, eval_noise_samples=1, eval_images=0),
            cache=dict(cache_dir=str(self.tmp/"cache")), optimizer=dict(lr=0.01), lr_scheduler=dict(scheduler_type="cosine", warmup_steps=2),
            logging=dict(log_dir=str(self.tmp/"runs"), report_to="none"))
        for k, v in sections.items(): self.base[k] = self.base[k] | v
        with contextlib.redirect_stdout(io.StringIO()): QwenImageEditTrainer(self.config(self.tmp)).cache_embeddings()
        self.reference = self.folder("reference")
        self.moments = self.listen(self.reference)
        self.want = outcome(self.reference, bool(self.base["train"].get("ema_decay")))
        self.want_names = names(self.reference)

    def config(self, out, resume=None, **sections):
        config = {k: dict(v) for k, v in self.base.items()}
        for k, v in sections.items(): config[k] |= v
        config["train"] |= dict(output_dir=str(out)) | (dict(resume_checkpoint=resume) if resume else {})
        return config

    def folder(self, name=None):
        self.n += 1
        out = self.tmp/(name or f"run_{self.n}")
        if out.exists(): shutil.rmtree(out)
        out.mkdir()
        return out

    def job(self, out, tell=lambda *what: None, rank=0):
        "In a child process: train with `--resume latest`."
        from qie_nb.trainer import QwenImageEditTrainer
        watch_files(out/"checkpoints", tell), watch_steps(tell)
        make = lambda resume: QwenImageEditTrainer(self.config(out, resume), [Recorder(out, tell, rank)])
        tell("the very beginning")
        try: make("latest").fit()
        except FileNotFoundError:
            if complete(out): raise
            make(None).fit()

    def start(self, out, tell=lambda rank: lambda *what: None) -> list: # pids, one a rank
        if self.world == 1: return [fork(lambda: self.job(out, tell(0)), self.tmp/"log")]
        with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
        def ranked(rank):
            os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(self.world), LOCAL_WORLD_SIZE=str(self.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                               ACCELERATE_USE_CPU="true", ACCELERATE_MIXED_PRECISION="no", ACCELERATE_DYNAMO_BACKEND="no")
            self.job(out, tell(rank), rank)
        return [fork(lambda: ranked(rank), self.tmp/f"log_{rank}" if rank else self.tmp/"log") for rank in range(self.world)]

    def wait(self, pids, seconds=180) -> dict: # {pid: status}; where one of several dies, the others are ended, as torchrun does
        done, end = {}, time.time() + seconds
        while len(done) < len(pids) and time.time() < end:
            for p in set(pids) - done.keys():
                if (got := os.waitpid(p, os.WNOHANG))[0]: done[p] = got[1]; end = min(end, time.time() + 1) if got[1] else end
            time.sleep(0.002)
        return done | wait([p for p in pids if p not in done], 0)

    def log(self): return "".join(f.read_text(errors="replace")[-1500:] for f in sorted(self.tmp.glob("log*")) if f.is_file())
    def quiet(self): [f.write_text("") for f in self.tmp.glob("log*") if f.is_file()]

    def listen(self, out) -> list: # labels, in order
        "All moments of a run that is let be."
        said = self.tmp/"moments.json"
        def job():
            heard, write = [], io.open
            def tell(*what): heard.append(label(*what))
            self.job(out, tell)
            with write(said, "w") as f: json.dump(heard, f)
        self.quiet()
        pids = [fork(job, self.tmp/"log")] if self.world == 1 else self.start(out)
        assert self.wait(pids) == dict.fromkeys(pids, 0), self.log()
        return json.loads(said.read_text()) if self.world == 1 else []

    def cut(self, out, at=None, after=None, ranks=(0,), shared=None) -> bool: # was it?
        "A run is killed: at a moment (label, how manieth), or after seconds."
        shared = shared or Shared()
        def tell(rank):
            heard = collections.Counter()
            def tell(what, path=""):
                heard[label(what, path)] += 1
                done = Path(path) if A_CHECKPOINT.fullmatch(Path(path).name) else Path(path).parent if Path(path).name == "COMPLETE" else None
                if what == "renamed" and done and A_CHECKPOINT.fullmatch(done.name) and done.is_dir() and (done/"COMPLETE").is_file():
                    shared[1] = json.loads((done/"state.json").read_text())["global_step"]
                    shared[2] += 1
                if what == "step end": shared[3] += 1
                if at and rank in ranks and label(what, path) == at[0] and heard[at[0]] == at[1]: os.kill(os.getpid(), signal.SIGKILL)
            return tell
        self.quiet()
        pids = self.start(out, tell)
        if after is not None:
            time.sleep(after)
            for r in ranks: os.kill(pids[r], signal.SIGKILL) # a child that is done waits for us: its id is still its own
        states = self.wait(pids)
        assert all(os.WIFSIGNALED(s) or s == 0 for s in states.values()) or self.world > 1 and any(os.WIFSIGNALED(s) for s in states.values()), self.log()
        return any(os.WIFSIGNALED(s) for s in states.values())

    def finish(self, out):
        self.quiet()
        pids = self.start(out)
        assert self.wait(pids) == dict.fromkeys(pids, 0), f"did not go on: {self.log()}"

    def sound(self, out, shared):
        "What a kill leaves: as many whole checkpoints as were promised, the newest the last that was finished."
        there = complete(out)
        keep = min(shared[2], self.base["train"]["keep_checkpoints"])
        assert len(there) >= keep, f"{len(there)} whole checkpoints, {keep} were promised"
        if shared[2]:
            newest = max(json.loads((d/"state.json").read_text())["global_step"] for d in there)
            assert newest >= shared[1], f"step {shared[1]} was saved, the newest checkpoint has {newest}"

    def compare(self, out, same_names=True, samples=True): # samples: was a `Recorder` there all the time?
        got = outcome(out, bool(self.base["train"].get("ema_decay")))
        if not samples: got["seen"] = []
        differ(got, self.want)
        if same_names: assert names(out) == self.want_names, f"left: {names(out)}, undisturbed: {self.want_names}"


# --- what a run ends with
def complete(out) -> list:
    from qie_nb.training.checkpoint import is_complete
    return sorted(d for d in (Path(out)/"checkpoints").glob("*") if d.is_dir() and A_CHECKPOINT.fullmatch(d.name) and is_complete(d))


def names(out) -> list: # of all that lies in checkpoints/
    return sorted(p.name for p in (Path(out)/"checkpoints").iterdir() if not p.name.startswith("inference"))


def log_rows(out) -> list: # rows of all logs, in the order of their files, without their time
    return [{k: v for k, v in row.items() if k != "time"} for f in sorted((Path(out)/"checkpoints"/"logs").glob("training_*.csv")) for row in csv.DictReader(f.open())]


def seen(out) -> list: # of each rank, {step: its micro-batches} as the final history has them
    ranks = []
    for f in sorted(Path(out).glob("seen_*.jsonl")):
        ranks.append({})
        for step, nth, *what in map(json.loads, f.read_text().splitlines()):
            if nth == 0: ranks[-1][step] = [] # begun, perhaps again
            ranks[-1][step].append(what)
    return ranks


def begun(out) -> int: # the step that a run is in
    return json.loads((Path(out)/"seen_0.jsonl").read_text().splitlines()[-1])[0] if (Path(out)/"seen_0.jsonl").exists() else 0


def outcome(out, ema) -> dict:
    from safetensors.torch import load_file
    last = max(complete(out), key=lambda d: json.loads((d/"state.json").read_text())["global_step"])
    state = json.loads((last/"state.json").read_text())
    found = dict(state={k: state[k] for k in ("global_step", "epoch", "position")}, log=log_rows(out), seen=seen(out), last=last.name, latest=(last.parent/"latest").read_text().strip())
    for name in FILES if ema else FILES[:2]:
        assert (last/name).is_file(), f"{last.name} has no {name}"
        found[name] = {k: (str(v.dtype), tuple(v.shape), v.contiguous().view(torch.uint8).numpy().tobytes() if v.ndim else v.item()) for k, v in load_file(last/name).items() if k != "rng"}
    return found


def differ(got, want):
    "Says the first thing in which a run's outcome is not the undisturbed one's."
    for name in FILES:
        if name not in want: continue
        a, b = got[name], want[name]
        assert a.keys() == b.keys(), f"{name}: tensors {sorted(a.keys() ^ b.keys())[:3]}"
        wrong = [k for k in a if a[k] != b[k]]
        assert not wrong, f"{name}: {len(wrong)} of {len(a)} tensors differ, {wrong[0]}"
    assert got["state"] == want["state"] and got["last"] == want["last"] == got["latest"], f"{got['state']} {got['last']} {got['latest']}, undisturbed {want['state']} {want['last']}"
    steps, wanted = [r["step"] for r in got["log"]], [r["step"] for r in want["log"]]
    assert steps == wanted, f"the log has steps {' '.join(steps)}, undisturbed {' '.join(wanted)}"
    for a, b in zip(got["log"], want["log"]): assert a == b, f"row {a}, undisturbed {b}"
    if want["seen"] and got["seen"]: assert got["seen"] == want["seen"], "samples were repeated or missed"


def chosen(labels, each, rng, only=lambda l: True) -> list: # [(label, how manieth)]
    "Some occurrences of every kind of moment: the first, the last, then any."
    count = collections.Counter(l for l in labels if only(l))
    return [(l, k) for l, n in count.items() for k in list(dict.fromkeys([1, n, *rng.sample(range(1, n + 1), min(n, each))]))[:each]]


IN_FILES = re.compile(r"(open|write|half of a write|fsync|rename|renamed|unlink|rmdir|mkdir)\b.*")


# --- kills
def kills_at(course, places, what) -> dict:
    "A kill, and the run goes on to its end."
    t, kinds = Tally(what, len(places)), collections.Counter()
    for place in places:
        out, shared = course.folder(), Shared()
        with t.trial(f"killed at {place[0]!r}, time {place[1]}"):
            assert course.cut(out, place, shared=shared), "was not killed"
            kinds[place[0].split()[0]] += 1
            course.sound(out, shared)
            course.finish(out)
            course.compare(out)
        shutil.rmtree(out)
    return t.result(f"{t.trials} kills at {len({p[0] for p in places})} kinds of moments, each run bit-equal to the undisturbed one of {len(course.want['log'])} steps")


def kills_in_files(course, each=None, seed=0) -> dict:
    rng = random.Random(seed)
    places = chosen(course.moments, each or 1, rng, IN_FILES.fullmatch)
    return kills_at(course, places if each else rng.sample(places, 4), "killed at every open, write, sync, rename and removal of saving and logging")


def kills_in_steps(course, each=None, seed=0) -> dict:
    rng = random.Random(seed)
    places = chosen(course.moments, each or 1, rng, lambda l: not IN_FILES.fullmatch(l))
    missing = {"in mid-accumulation", "in evaluation", "epoch end", "before the optimizer's step"} - {p[0] for p in places}
    assert not missing, f"the undisturbed run has no moment {missing}"
    return kills_at(course, places if each else [p for p in places if p[0] in ("in mid-accumulation", "in evaluation", "epoch end", "after the optimizer's step")],
                    "killed in mid-epoch, in mid-accumulation, at epoch ends, in evaluation")


def kills_in_resume(course, few=None, seed=0) -> dict:
    "Killed in the middle; the resumed process is killed before its first step, and again; then the run goes on."
    rng, half = random.Random(seed), course.folder("half")
    assert course.cut(half, ("step end", len(course.want["log"]) // 2 + 1))
    shutil.copytree(half, listened := course.folder("listened"), dirs_exist_ok=True)
    moments = course.listen(listened)
    moments = moments[:moments.index("micro-batch") + 1]
    places = chosen(moments, 1, rng)
    if few: places = rng.sample(places, few)
    t = Tally("killed while it resumes, twice in a row", len(places))
    for place in places:
        out = course.folder()
        shutil.copytree(half, out, dirs_exist_ok=True)
        with t.trial(f"killed at {place[0]!r}, time {place[1]}, twice"):
            before = {d.name for d in complete(out)}
            for _ in range(2):
                if course.cut(out, place): assert {d.name for d in complete(out)} >= before, "a whole checkpoint is gone"
                else: break # the second time the moment is gone: what it was about is done
            course.finish(out)
            course.compare(out)
        shutil.rmtree(out)
    return t.result(f"at {len(places)} kinds of moments before the first step")


def kills_at_random(course, trials, in_a_row=6, seed=0) -> dict:
    "Several kills a run, each at a random time."
    t, rng, runs, gained = Tally("killed at random times, several in a row", trials), random.Random(seed), 0, []
    began = time.time()
    course.finish(out := course.folder())
    whole = time.time() - began
    shutil.rmtree(out)
    while t.trials < trials and runs < 2 * trials:
        out, shared, kills, runs = course.folder(), Shared(), 0, runs + 1
        ok = True
        while ok and kills < in_a_row and t.trials < trials:
            moment, was = rng.uniform(0, whole * rng.choice((0.15, 0.5, 1))), shared[3]
            shared[1] = shared[2] = 0
            if not course.cut(out, after=moment, shared=shared): break # it was done already
            kills += 1
            gained.append(shared[3] - was)
            with t.trial(f"run {runs}, kill {kills} after {moment:.3f} s") as _: course.sound(out, shared)
            ok = not t.failed or "kill" not in t.failed[-1]
        try: course.finish(out); course.compare(out)
        except Exception as e: blame(t, f"run {runs}, after {kills} kills: {type(e).__name__}: {e}")
        shutil.rmtree(out)
    return t.result(f"{t.trials} kills over {runs} runs, up to {in_a_row} in a row, after 0 to {max(gained)} steps each; all runs bit-equal to the undisturbed one")


def kills_of_processes(course, trials, seed=0) -> dict:
    "Two processes that train together: one of them killed, or both."
    t, rng = Tally("two processes (gloo), one or both killed", trials), random.Random(seed)
    began = time.time()
    course.finish(out := course.folder())
    whole = time.time() - began
    shutil.rmtree(out)
    moments = ["in mid-accumulation", "step end", "epoch end", "after the optimizer's step", "before backward", "before save_checkpoint"]
    while t.trials < trials:
        out, ranks = course.folder(), rng.choice(((0,), (1,), (0, 1)))
        with t.trial(f"ranks {ranks}"):
            for _ in range(rng.choice((1, 1, 2))):
                if rng.random() < 0.5: course.cut(out, at=(rng.choice(moments), rng.randint(1, 3)), ranks=ranks)
                else: course.cut(out, after=rng.uniform(0, whole), ranks=ranks)
            course.finish(out)
            course.compare(out)
        shutil.rmtree(out)
    return t.result(f"each run of {len(course.want['log'])} steps bit-equal to the undisturbed one of two processes")


def children(pid) -> list: # of a process, and theirs
    own = [int(c) for f in Path(f"/proc/{pid}/task").glob("*/children") for c in f.read_text().split()]
    return [d for c in own for d in (c, *children(c))]


def kills_of_a_launch(course, trials, seed=0) -> dict:
    "The same through torchrun, all its processes killed. (On a CPU `accelerate launch --num_processes 2` starts one process without a word.)"
    import yaml
    t, rng = Tally("torchrun of two processes, killed with all of them", trials), random.Random(seed)
    def launch(out):
        (out/"run.yaml").write_text(yaml.safe_dump(course.config(out)))
        resume = ["--resume", "latest"] if complete(out) else []
        with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
        with (course.tmp/"log").open("w") as log:
            return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port), "-m", "qie_nb.cli", "train", "--config", str(out/"run.yaml"), *resume],
                                    stdout=log, stderr=log, start_new_session=True, env=os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"))
    for n in range(trials):
        out = course.folder()
        with t.trial(f"launch {n}"):
            p, want = launch(out), rng.randint(1, 3)
            while p.poll() is None and len(complete(out)) < min(want, 2): time.sleep(0.1)
            time.sleep(rng.uniform(0, 0.5))
            for pid in (p.pid, *children(p.pid)):
                with contextlib.suppress(ProcessLookupError): os.kill(pid, signal.SIGKILL)
            p.wait()
            assert complete(out), f"nothing was saved: {course.log()}"
            assert launch(out).wait(timeout=300) == 0, course.log()
            course.compare(out, samples=False)
        shutil.rmtree(out)
    return t.result(f"each run of {len(course.want['log'])} steps bit-equal to the undisturbed one of two processes")


# --- signals
def by_command(course, out, shared, resume=False, slow_at=None):
    "In a child: `qie-nb train`; its micro-batches, steps and whether a slow one was ended are seen from outside."
    import yaml
    from qie_nb.cli import main
    from qie_nb.trainer import QwenImageEditTrainer as T
    from torch.optim.optimizer import register_optimizer_step_post_hook
    signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    real, begin = T.training_step, T.setup_run
    def training_step(self, batch):
        shared[4] += 1
        if shared[4] == slow_at:
            shared[5] = 1
            for _ in range(3000): time.sleep(0.01)
            shared[5] = 2
        return real(self, batch)
    def begin_(self, *a):
        shared[6] = 1
        out = begin(self, *a)
        shared[6] = 2
        return out
    T.training_step, T.setup_run = training_step, begin_
    def stepped(*a): shared[3] += 1
    register_optimizer_step_post_hook(stepped)
    (out/"run.yaml").write_text(yaml.safe_dump(course.config(out)))
    code = main(["train", "--config", str(out/"run.yaml"), *(["--resume", "latest"] if resume else [])])
    sys.stdout.flush()
    os._exit(code or 0)


def until(condition, pid, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "never came"
        time.sleep(0.001)


def signals(course, trials, seed=0) -> dict:
    "SIGTERM and Ctrl-C at random moments of `qie-nb train`, to its end."
    t, rng, late = Tally("qie-nb train gets SIGTERM or Ctrl-C", trials), random.Random(seed), []
    for runs in range(trials + 2):
        if t.trials >= trials: break
        out, n = course.folder(), 0
        try:
            while True:
                shared, kind, at = Shared(), rng.choice((signal.SIGTERM, signal.SIGINT)), rng.randint(1, 14)
                if t.trials >= trials: at = 10**6
                pid = fork(lambda: by_command(course, out, shared, bool(complete(out))), course.tmp/"log")
                until(lambda: shared[4] >= at or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), pid)
                time.sleep(rng.uniform(0, 0.05))
                steps = shared[3]
                os.kill(pid, kind)
                states = wait([pid], 60)
                if shared[4] < at or states.get(pid) == 0: # done before it was asked
                    assert states.get(pid) == 0, course.log()
                    break
                n += 1
                with t.trial(f"{kind.name} after {at} micro-batches"):
                    assert pid in states, "did not end by itself"
                    code, want = os.waitstatus_to_exitcode(states[pid]), 143 if kind == signal.SIGTERM else 130
                    assert code == want, f"exit code {code}, not {want}: {course.log()[-600:]}"
                    late.append(shared[3] - steps)
                    assert late[-1] <= 2, f"{late[-1]} steps were made after it was asked to end"
                    root = out/"checkpoints"
                    assert complete(out), "no checkpoint"
                    named = root/(root/"latest").read_text().strip()
                    assert named in complete(out), f"latest names {named.name}"
                    newest = max(json.loads((d/"state.json").read_text())["global_step"] for d in complete(out))
                    assert json.loads((named/"state.json").read_text())["global_step"] == newest, f"latest names {named.name}, step {newest} is there"
            course.compare(out, same_names=False, samples=False)
        except Exception as e: blame(t, f"run {runs} after {n} signals: {type(e).__name__}: {e}")
        shutil.rmtree(out)
    return t.result(f"exit codes 143 and 130, at most {max(late, default=0)} steps made after it was asked; resumed to the end, bit-equal to the undisturbed run")


def signals_in_odd_places(course) -> dict:
    "A second Ctrl-C does not wait for the step; a signal before the first step ends the run as well."
    t = Tally("a second Ctrl-C, and signals before the first step")
    def ended(pid, seconds=20):
        states = wait([pid], seconds)
        assert pid in states, "did not end by itself"
        return os.waitstatus_to_exitcode(states[pid])
    for before in (0, 5): # steps
        with t.trial(f"two Ctrl-C in a step after {before} steps"):
            out, shared = course.folder(), Shared()
            pid = fork(lambda: by_command(course, out, shared, slow_at=3 * before + 2), course.tmp/"log")
            until(lambda: shared[5] == 1, pid)
            os.kill(pid, signal.SIGINT)
            time.sleep(0.5)
            os.kill(pid, signal.SIGINT)
            assert (code := ended(pid)) == 130, f"exit code {code}"
            assert shared[5] == 1, "it waited for the step"
            course.finish(out)
            course.compare(out, same_names=False, samples=False)
    for kind, want in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        with t.trial(f"{kind.name} while loading"):
            out, shared = course.folder(), Shared()
            pid = fork(lambda: by_command(course, out, shared), course.tmp/"log")
            until(lambda: shared[6] == 1, pid)
            os.kill(pid, kind)
            assert (code := ended(pid)) == want, f"exit code {code}, not {want}"
            assert shared[3] <= 1, f"{shared[3]} steps were made"
            course.finish(out)
            course.compare(out, same_names=False, samples=False)
    return t.result("ended at once; the next run bit-equal to the undisturbed one")


# --- the notebook's stop button
class Kernel:
    "A real Jupyter kernel."
    def __init__(self, cwd):
        from jupyter_client import KernelManager
        self.km = KernelManager(kernel_name="python3")
        self.km.start_kernel(cwd=str(cwd), env=os.environ | dict(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT/"tests")]), OMP_NUM_THREADS="1"))
        self.kc = self.km.blocking_client()
        self.kc.start_channels(), self.kc.wait_for_ready(timeout=120)

    def __enter__(self): return self
    def __exit__(self, *a): self.kc.stop_channels(), self.km.shutdown_kernel(now=True)

    def start(self, code, **expressions): # the next cell may be on its way while one fails: it is not to be aborted for that
        self.id = self.kc.execute(code, user_expressions=expressions, stop_on_error=False)

    def reply(self, seconds): # content of the reply, or None where the cell still runs
        end = time.time() + seconds
        while True:
            try: got = self.kc.get_shell_msg(timeout=max(0., end - time.time()))
            except queue.Empty: return None
            with contextlib.suppress(queue.Empty):
                while True: self.kc.get_iopub_msg(timeout=0)
            if got["parent_header"].get("msg_id") == self.id: return got["content"]

    def run(self, code, seconds=180, **expressions):
        self.start(code, **expressions)
        got = self.reply(seconds)
        assert got and got["status"] == "ok", f"{code}: {got and (got.get('ename'), got.get('evalue'))}"
        return {k: eval(v["data"]["text/plain"]) for k, v in got.get("user_expressions", {}).items()}


def interrupts(course, trials, seed=0) -> dict:
    "The stop button at random moments of `trainer.fit()`; the next cell calls it again."
    t, rng, runs, late, where, raised = Tally("the notebook's stop button", trials), random.Random(seed), 0, [], collections.Counter(), 0
    with Kernel(course.tmp) as k:
        k.run("import torch; torch.set_num_threads(1)\nfrom kills import Recorder\nfrom qie_nb.trainer import QwenImageEditTrainer\nimport diffusers, transformers, peft, accelerate")
        began = time.time()
        k.run(f"QwenImageEditTrainer({course.config(course.folder())!r}).fit()")
        whole = time.time() - began
        while t.trials < trials:
            out, runs, n, hung = course.folder(), runs + 1, 0, False
            cache = dict(cache_dir=str(out/"cache")) if runs % 2 == 0 else {} # every other run fills its cache as it goes
            make = lambda resume=None: k.run(f"trainer = QwenImageEditTrainer({course.config(out, resume, cache=cache)!r}, [Recorder({str(out)!r})])")
            try:
                make()
                while True:
                    k.start("trainer.fit()")
                    reply = k.reply(rng.uniform(0, whole * rng.choice((0.1, 0.3, 0.6))) if t.trials < trials else 300)
                    if reply is None:
                        at = begun(out)
                        k.km.interrupt_kernel()
                        n += 1
                        with t.trial(f"run {runs}, interrupt {n}"):
                            hung, reply = True, k.reply(60)
                            assert reply is not None, "the cell did not come back"
                            hung = False
                            assert reply["status"] == "ok" or reply["ename"] == "KeyboardInterrupt", f"{reply['ename']}: {reply['evalue']}"
                            raised += reply["status"] != "ok"
                            now = k.run("pass", step="trainer.global_step", done="trainer.state.max_steps")
                            late.append(now["step"] - at)
                            assert late[-1] <= 1, f"it came in step {at}, {now['step']} were made"
                            where["before the first step" if not now["step"] else "later"] += 1
                            steps = [json.loads((d/"state.json").read_text())["global_step"] for d in complete(out)]
                            assert not now["step"] or now["step"] in steps, f"{now['step']} steps were made, checkpoints have {steps}"
                            if now["step"]: assert json.loads((out/"checkpoints"/(out/"checkpoints"/"latest").read_text().strip()/"state.json").read_text())["global_step"] == max(steps)
                        assert not hung
                    else: assert reply["status"] == "ok", f"{reply['ename']}: {reply['evalue']}"
                    now = k.run("pass", step="trainer.global_step", done="trainer.state.max_steps")
                    if now["done"] and now["step"] >= now["done"] and complete(out): break
                    if rng.random() < 0.2 and complete(out): make("latest") # by another trainer
                k.run("trainer.fit()") # nothing is left to do
                course.compare(out, same_names=False)
            except Exception as e:
                blame(t, f"run {runs}, after {n} interrupts: {type(e).__name__}: {e}")
                if os.environ.get("FAULTS_TRACE"): traceback.print_exc(file=sys.__stderr__)
                if hung or not n: break
            shutil.rmtree(out)
    return t.result(f"{t.trials} interrupts over {runs} runs ({where['before the first step']} before the first step, {raised} raised KeyboardInterrupt); at most {max(late, default=0)} further steps "
                    "begun after one; every run bit-equal to the undisturbed one")


# --- all of them
def cases(full): # {name: function of a folder}
    made = {}
    def course(name, **kw):
        if name not in made: made[name] = Course(tempfile.mkdtemp(prefix="kills-"), **kw)
        return made[name]
    usual = lambda: course("usual")
    two = lambda: course("two", world=2, data=dict(batch_size=1), train=dict(num_epochs=3))
    n = lambda much, little: much if full else little
    out = dict(files=lambda tmp: kills_in_files(usual(), n(2, None)), steps=lambda tmp: kills_in_steps(usual(), n(2, None)), resume=lambda tmp: kills_in_resume(usual(), n(None, 2)),
               random=lambda tmp: kills_at_random(usual(), n(60, 3)), signals=lambda tmp: signals(usual(), n(40, 3)), odd_signals=lambda tmp: signals_in_odd_places(usual()),
               interrupts=lambda tmp: interrupts(usual(), n(100, 8)))
    return out | dict(processes=lambda tmp: kills_of_processes(two(), n(18, 1)), launch=lambda tmp: kills_of_a_launch(two(), n(2, 1)))


SLOW = ("files", "steps", "resume", "random", "odd_signals", "interrupts", "processes", "launch") # all but "signals"


def main(argv=None):
    p = argparse.ArgumentParser(description="Runs cut off on purpose")
    p.add_argument("--full", action="store_true", help="the full counts")
    p.add_argument("--only", nargs="*", help="names of cases")
    p.add_argument("--out", help="JSON file for the results")
    a = p.parse_args(argv)
    torch.set_num_threads(1)
    import accelerate, diffusers, peft, transformers # once, for all processes forked from here
    import qie_nb.evaluation.evaluate, qie_nb.logging, qie_nb.trainer
    gc.freeze() # what was imported is no garbage: collections in the children pass it by
    chosen, results, began = cases(a.full), [], time.time()
    with tempfile.TemporaryDirectory(prefix="kills-") as home:
        tempfile.tempdir = home
        os.environ["QIE_NB_HOME"] = str(Path(home)/"home")
        for name in a.only or chosen:
            try: got = chosen[name](Path(home))
            except Exception as e:
                traceback.print_exc()
                got = dict(case=name, trials=1, passed=0, worst=f"broke off: {type(e).__name__}: {e}"[:900], seconds=0.)
            results.append(dict(name=name) | got)
            print(f"{'FAIL' if got['passed'] != got['trials'] else 'ok  '} {got['case']}: {got['passed']} of {got['trials']} in {got['seconds']:.0f} s; {got['worst']}", flush=True)
    said = about() | dict(counts="full" if a.full else "few", seconds=round(time.time() - began), cases=results)
    if a.out: Path(a.out).parent.mkdir(parents=True, exist_ok=True); Path(a.out).write_text(json.dumps(said, indent=1) + "\n")
    return any(r["passed"] != r["trials"] for r in results)


if __name__ == "__main__": sys.exit(main())
