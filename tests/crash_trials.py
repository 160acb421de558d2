"""Interrupted runs: killed at every moment, ended by signals and by a notebook's stop button. They must end with the bits of an undisturbed run."""
import collections, contextlib, csv, functools, gc, json, os, queue, random, re, shutil, signal, socket, sys, tempfile, time
from pathlib import Path

import torch

from helpers import settings, write_pairs
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.training.callbacks import Callback
from trials import Shared, Tally, child_value, fork, main, quiet, wait, watch_operations

ROOT = Path(__file__).parent.parent
SIZES = ((48, 32),) * 5 + ((32, 48),) * 4 + ((40, 40),) * 2
FILES = ("pytorch_lora_weights.safetensors", "optimizer.safetensors", "ema.safetensors")
A_CHECKPOINT = re.compile(r"(epoch|step)_\d+")


# --- what a run does, told while it does it
class Recorder(Callback):
    "Keeps which samples each step is made of: a line per micro-batch, before it is trained on, in a file that only grows."
    def __init__(self, out, tell=lambda what: None, rank=0): self.out, self.tell, self.rank, self.nth = Path(out), tell, rank, 0
    def on_train_begin(self, t):
        self.nth, train, judge = 0, type(t).training_step, type(t).loss
        def training_step(batch):
            with open(self.out/f"seen_{self.rank}.jsonl", "a") as f: f.write(json.dumps([t.global_step + 1, self.nth, t.state.epoch, t.state.position, batch["sample_id"], batch["dropped"]]) + "\n")
            self.nth += 1
            self.tell("micro-batch" if self.nth == 1 else "in mid-accumulation")
            return train(t, batch)
        def loss(*a, **kw):
            if not torch.is_grad_enabled(): self.tell("in evaluation")
            return judge(t, *a, **kw)
        t.training_step, t.loss = training_step, loss
        self.tell("train begin")
    def on_step_end(self, t): self.nth = 0; self.tell("step end")
    def on_epoch_end(self, t): self.tell("epoch end")
    def on_train_end(self, t): self.tell("train end")


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
    def around(cls, name):
        real = getattr(cls, name)
        def method(self, *a, **kw):
            tell(f"before {name}")
            out = real(self, *a, **kw)
            tell(f"after {name}")
            return out
        setattr(cls, name, method)
    around(torch.Tensor, "backward")
    for name in ("setup_run", "set_lora", "configure_optimizers", "resume", "save_checkpoint"): around(T, name)


def label(what, path="") -> str:
    "Of one kind of moment: temporary names and numbers left out."
    name = path.rpartition("/checkpoints")[2].lstrip("/") or "checkpoints" if path else ""
    name = re.sub(r"[^/]*\.tmp", "a temporary file", name)
    return f"{what} {re.sub('[0-9]+', '#', name)}".strip()


@contextlib.contextmanager
def whole_run(t, name):
    "An error after trials that passed takes one of them back."
    before = len(t.failed)
    try: yield
    except Exception as e: t.failed.append(f"{name}: {type(e).__name__}: {e}")
    if len(t.failed) > before: t.trials = max(t.trials, 1); t.passed = min(t.passed, t.trials - 1)


# --- a run that can be cut off
class Course:
    "Data, cache and model are made once; every process forks from here."
    def __init__(self, tmp, world=1, **sections):
        import accelerate, diffusers, peft, transformers # once, for all processes forked from here
        import qie_nb.evaluation.evaluate, qie_nb.logging
        from qie_nb.trainer import QwenImageEditTrainer
        gc.freeze() # the children's garbage collections skip what was imported
        self.tmp, self.world, self.n = Path(tmp), world, 0
        root = write_pairs(self.tmp/"set", SIZES, caption=[" ".join(["invert the colours"] * (1 + i % 3)) + f" {i}" for i in range(len(SIZES))])
        train = dict(num_epochs=5, gradient_accumulation_steps=3, gradient_checkpointing=False, ema_decay=0.9, val_fraction=0.15,
                     save_steps=2, save_interval=2, keep_checkpoints=2, eval_steps=3, eval_noise_samples=1, eval_images=0)
        self.base = settings(root, self.tmp, train=train | sections.get("train", {}), data=sections.get("data", {}), optimizer=dict(lr=0.01), lr_scheduler=dict(scheduler_type="cosine", warmup_steps=2),
                             model=dict(pretrained_model_name_or_path=str(tiny_folder("2511", (64*64, 64*64))), lora=dict(r=2, lora_alpha=4, lora_dropout=0.1)))
        with quiet(): QwenImageEditTrainer(self.config(self.tmp)).cache_embeddings()
        self.reference = self.folder("reference")
        self.moments = self.listen(self.reference)
        self.want, self.want_names = outcome(self.reference, True), names(self.reference)

    def config(self, out, resume=None, **sections):
        return self.base | sections | dict(train=self.base["train"] | dict(output_dir=str(out)) | (dict(resume_checkpoint=resume) if resume else {}))

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
        "All moments of an undisturbed run."
        self.quiet()
        if self.world > 1: return self.finish(out)
        def job():
            heard = []
            self.job(out, lambda *what: heard.append(label(*what)))
            return heard
        return child_value(job, self.tmp/"log")

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
        got = outcome(out, True)
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


def kills_of_processes(course, trials) -> dict:
    "Two processes that train together: one of them killed, or both."
    t, rng, whole = Tally("two processes (gloo), one or both killed", trials), random.Random(0), time.time()
    course.finish(course.folder())
    whole = time.time() - whole
    moments = ["in mid-accumulation", "step end", "epoch end", "after the optimizer's step", "before backward", "before save_checkpoint"]
    while t.trials < trials:
        out, ranks = course.folder(), rng.choice(((0,), (1,), (0, 1)))
        with t.trial(f"ranks {ranks}"):
            for _ in range(rng.choice((1, 1, 2))):
                course.cut(out, ranks=ranks, **rng.choice((dict(at=(rng.choice(moments), rng.randint(1, 3))), dict(after=rng.uniform(0, whole)))))
            course.finish(out)
            course.compare(out)
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


def until(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "never came"
        time.sleep(0.001)


def step_of(checkpoint): return json.loads((checkpoint/"state.json").read_text())["global_step"]
def newest_is_named(out):
    assert complete(out), "no checkpoint"
    named, newest = out/"checkpoints"/(out/"checkpoints"/"latest").read_text().strip(), max(map(step_of, complete(out)))
    assert named in complete(out) and step_of(named) == newest, f"latest names {named.name}, step {newest} is there"


def signals(course, trials) -> dict:
    "SIGTERM and Ctrl-C at random moments of `qie-nb train`, to its end."
    t, rng, late = Tally("qie-nb train gets SIGTERM or Ctrl-C", trials), random.Random(0), [0]
    for runs in range(trials + 2):
        if t.trials >= trials: break
        out = course.folder()
        with whole_run(t, f"run {runs}"):
            while True:
                shared, kind, at = Shared(), rng.choice((signal.SIGTERM, signal.SIGINT)), rng.randint(1, 14) if t.trials < trials else 10**6
                pid = fork(lambda: by_command(course, out, shared, bool(complete(out))), course.tmp/"log")
                until(lambda: shared[4] >= at or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
                time.sleep(rng.uniform(0, 0.05))
                steps = shared[3]
                os.kill(pid, kind)
                states = wait([pid], 60)
                if shared[4] < at or states.get(pid) == 0: # done before it was asked
                    assert states.get(pid) == 0, course.log()
                    break
                with t.trial(f"{kind.name} after {at} micro-batches"):
                    assert pid in states, "did not end by itself"
                    code, want = os.waitstatus_to_exitcode(states[pid]), 143 if kind == signal.SIGTERM else 130
                    assert code == want, f"exit code {code}, not {want}: {course.log()[-600:]}"
                    late.append(shared[3] - steps)
                    assert late[-1] <= 2, f"{late[-1]} steps were made after it was asked to end"
                    newest_is_named(out)
            course.compare(out, same_names=False, samples=False)
        shutil.rmtree(out)
    return t.result(f"exit codes 143 and 130, at most {max(late)} steps made after it was asked; resumed to the end, bit-equal to the undisturbed run")


def signals_in_odd_places(course) -> dict:
    "A second Ctrl-C does not wait for the step; a signal before the first step ends the run as well."
    t = Tally("a second Ctrl-C, and signals before the first step")
    for name, steps, kinds, want in (("two Ctrl-C in the first step", 0, [signal.SIGINT] * 2, 130), ("two Ctrl-C after 5 steps", 5, [signal.SIGINT] * 2, 130),
                                     ("SIGTERM while loading", None, [signal.SIGTERM], 143), ("Ctrl-C while loading", None, [signal.SIGINT], 130)):
        with t.trial(name):
            out, shared = course.folder(), Shared()
            slow = steps is not None
            pid = fork(lambda: by_command(course, out, shared, slow_at=3 * steps + 2 if slow else None), course.tmp/"log")
            until(lambda: shared[5 if slow else 6] == 1)
            for n, kind in enumerate(kinds): time.sleep(0.5 * n), os.kill(pid, kind)
            states = wait([pid], 20)
            assert pid in states, "did not end by itself"
            assert (code := os.waitstatus_to_exitcode(states[pid])) == want, f"exit code {code}, not {want}"
            assert shared[5] == 1 if slow else shared[3] <= 1, f"it waited for the step; {shared[3]} steps were made"
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


def interrupts(course, trials) -> dict:
    "The stop button at random moments of `trainer.fit()`; the next cell calls it again."
    t, rng, runs, late, raised = Tally("the notebook's stop button", trials), random.Random(0), 0, [0], 0
    with Kernel(course.tmp) as k:
        k.run("import torch; torch.set_num_threads(1)\nfrom crash_trials import Recorder\nfrom qie_nb.trainer import QwenImageEditTrainer\nimport diffusers, transformers, peft, accelerate")
        began = time.time()
        k.run(f"QwenImageEditTrainer({course.config(course.folder())!r}).fit()")
        whole = time.time() - began
        while t.trials < trials and len(t.failed) < 9:
            out, runs = course.folder(), runs + 1
            cache = dict(cache=dict(cache_dir=str(out/"cache"))) if runs % 2 == 0 else {} # every other run fills its cache as it goes
            make = lambda resume=None: k.run(f"trainer = QwenImageEditTrainer({course.config(out, resume, **cache)!r}, [Recorder({str(out)!r})])")
            now = lambda: k.run("pass", step="trainer.global_step", done="trainer.state.max_steps")
            with whole_run(t, f"run {runs}"):
                make()
                while True:
                    k.start("trainer.fit()")
                    reply = k.reply(rng.uniform(0, whole * rng.choice((0.1, 0.3, 0.6))) if t.trials < trials else 300)
                    if reply: assert reply["status"] == "ok", f"{reply['ename']}: {reply['evalue']}"
                    else:
                        at = begun(out)
                        k.km.interrupt_kernel()
                        with t.trial(f"run {runs}"):
                            reply = k.reply(60)
                            assert reply, "the cell did not come back"
                            assert reply["status"] == "ok" or reply["ename"] == "KeyboardInterrupt", f"{reply['ename']}: {reply['evalue']}"
                            raised += reply["status"] != "ok"
                            step = now()["step"]
                            late.append(step - at)
                            assert late[-1] <= 1, f"it came in step {at}, {step} were made"
                            assert not step or step in map(step_of, complete(out)), f"{step} steps were made, and no checkpoint has them"
                            if step: newest_is_named(out)
                        assert reply
                    if (n := now())["done"] and n["step"] >= n["done"] and complete(out): break
                    if rng.random() < 0.2 and complete(out): make("latest") # by another trainer
                k.run("trainer.fit()") # nothing is left to do
                course.compare(out, same_names=False)
            shutil.rmtree(out)
    return t.result(f"{t.trials} interrupts over {runs} runs ({raised} raised KeyboardInterrupt); at most {max(late)} further steps begun after one; every run bit-equal to the undisturbed one")


# --- all of them
def cases(full): # {name: function of a folder}
    course = functools.lru_cache(lambda two=False: Course(tempfile.mkdtemp(prefix="kills-"), **dict(world=2, data=dict(batch_size=1), train=dict(num_epochs=3)) if two else {}))
    n = lambda much, little: much if full else little
    return dict(files=lambda tmp: kills_in_files(course(), n(2, None)), steps=lambda tmp: kills_in_steps(course(), n(2, None)), resume=lambda tmp: kills_in_resume(course(), n(None, 2)),
                signals=lambda tmp: signals(course(), n(40, 3)), odd_signals=lambda tmp: signals_in_odd_places(course()),
                interrupts=lambda tmp: interrupts(course(), n(100, 8)), processes=lambda tmp: kills_of_processes(course(True), n(18, 1)))


if __name__ == "__main__": main("Interrupted runs", cases)
