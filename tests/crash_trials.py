"""Interrupted runs: killed at every moment, ended by signals and by a notebook's stop button. They must end with the bits of an undisturbed run."""
import collections, contextlib, csv, functools, gc, json, os, random, re, shutil, signal, socket, sys, tempfile, threading, time
from pathlib import Path

import torch

from helpers import PATIENCE, settings, write_pairs
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.training.callbacks import Callback
from trials import Shared, Tally, around, child_value, fork, main, quiet, wait, watch_operations

ROOT = Path(__file__).parent.parent
SIZES = ((48, 32),) * 5 + ((32, 48),) * 4 + ((40, 40),) * 2
FILES = ("pytorch_lora_weights.safetensors", "optimizer.safetensors", "ema.safetensors")
A_CHECKPOINT = re.compile(r"(epoch|step)_\d+")
STEPS, BATCHES, SLOW, SETUP = range(4) # places in a `Shared`, of a run that is ended by a signal


# --- what a run does, told while it does it
class Recorder(Callback):
    "Keeps which samples each step is made of: a line per micro-batch, before it is trained on, in a file that only grows."
    def __init__(self, out, tell=lambda what: None, rank=0): self.file, self.tell = Path(out)/f"seen_{rank}.jsonl", tell
    def on_train_begin(self, t):
        self.nth, train, judge = 0, type(t).training_step, type(t).loss
        def training_step(batch):
            said = [t.global_step + 1, self.nth, t.state.epoch, t.state.position, batch["sample_id"], batch["dropped"]]
            with open(self.file, "a") as f: f.write(json.dumps(said) + "\n")
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


def watch(below, tell):
    "In a child: tell(what, path) around everything that changes a folder's content, and what happens between the files."
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from qie_nb.trainer import QwenImageEditTrainer
    watch_operations(below, lambda what, path: tell(what, path.split("\t")[-1])) # a rename is known by where it leads
    def one(what):
        def changes(path, *a, dir_fd=None, **kw):
            full = str(path) if dir_fd is None else f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{path}"
            if full.startswith(str(below)): tell(what, full)
        around(os, what, changes)
    for what in ("unlink", "rmdir", "mkdir"): one(what)
    os.remove = os.unlink
    register_optimizer_step_pre_hook(lambda *a: tell("before the optimizer's step"))
    register_optimizer_step_post_hook(lambda *a: tell("after the optimizer's step"))
    def both(holder, name): around(holder, name, lambda *a, **kw: tell(f"before {name}"), lambda *a, **kw: tell(f"after {name}"))
    both(torch.Tensor, "backward")
    for name in ("setup_run", "set_lora", "configure_optimizers", "resume", "save_checkpoint"): both(QwenImageEditTrainer, name)


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
    except Exception as e: t.fail(name, e)
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
        captions = [" ".join(["invert the colours"] * (1 + i % 3)) + f" {i}" for i in range(len(SIZES))]
        train = dict(num_epochs=5, gradient_accumulation_steps=3, gradient_checkpointing=False, ema_decay=0.9, val_fraction=0.15,
                     save_steps=2, save_interval=2, keep_checkpoints=2, eval_steps=3, eval_images=0)
        root = write_pairs(self.tmp/"set", SIZES, caption=captions)
        self.base = settings(root, self.tmp, train=train | sections.get("train", {}), data=sections.get("data", {}), optimizer=dict(lr=0.01),
                             lr_scheduler=dict(scheduler_type="cosine", warmup_steps=2),
                             model=dict(pretrained_model_name_or_path=str(tiny_folder("2511", (64*64, 64*64))),
                                        lora=dict(r=2, lora_alpha=4, lora_dropout=0.1)))
        with quiet(): QwenImageEditTrainer(self.config(self.tmp)).cache_embeddings()
        self.moments = self.listen(reference := self.folder())
        self.want, self.want_names = outcome(reference, True), names(reference)

    def config(self, out, resume=None, **sections):
        return self.base | sections | dict(train=self.base["train"] | dict(output_dir=str(out)) | (dict(resume_checkpoint=resume) if resume else {}))

    def folder(self, like=None): # a new one, or a copy
        self.n += 1
        out = self.tmp/f"run_{self.n}"
        if like: shutil.copytree(like, out)
        else: out.mkdir()
        return out

    def job(self, out, tell=lambda *what: None, rank=0):
        "In a child process: train with `--resume latest`."
        from qie_nb.trainer import QwenImageEditTrainer
        watch(out/"checkpoints", tell)
        make = lambda resume: QwenImageEditTrainer(self.config(out, resume), [Recorder(out, tell, rank)])
        tell("the very beginning")
        try: make("latest").fit()
        except FileNotFoundError:
            if complete(out): raise
            make(None).fit()

    def start(self, out, tell=lambda rank: lambda *what: None) -> list: # pids, one a rank
        for f in self.tmp.glob("log*"): f.unlink()
        if self.world == 1: return [fork(lambda: self.job(out, tell(0)), self.tmp/"log")]
        with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
        def ranked(rank):
            of_both = dict(WORLD_SIZE=self.world, LOCAL_WORLD_SIZE=self.world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                           ACCELERATE_USE_CPU="true", ACCELERATE_MIXED_PRECISION="no", ACCELERATE_DYNAMO_BACKEND="no")
            os.environ |= {k: str(v) for k, v in dict(of_both, RANK=rank, LOCAL_RANK=rank).items()}
            self.job(out, tell(rank), rank)
        return [fork(lambda: ranked(rank), self.tmp/f"log_{rank}") for rank in range(self.world)]

    def wait(self, pids): return wait(pids, PATIENCE, grace=1) # as torchrun does
    def log(self): return "".join(f.read_text(errors="replace")[-1500:] for f in sorted(self.tmp.glob("log*")))

    def listen(self, out) -> list: # labels, in order
        "All moments of an undisturbed run."
        if self.world > 1: return self.finish(out)
        def job():
            heard = []
            self.job(out, lambda *what: heard.append(label(*what)))
            return heard
        return child_value(job, self.tmp/"log")

    def cut(self, out, at=None, after=None, ranks=(0,), saved=None) -> bool: # was it?
        "A run is killed: at a moment (label, how manieth), or after seconds. `saved`: its last step on disk, and how many checkpoints."
        saved = saved or Shared()
        def tell(rank):
            heard = collections.Counter()
            def tell(what, path=""):
                here = label(what, path)
                heard[here] += 1
                done = Path(path).parent if path.endswith("/COMPLETE") else Path(path)
                if what == "renamed" and A_CHECKPOINT.fullmatch(done.name) and (done/"COMPLETE").is_file():
                    saved[0] = step_of(done)
                    saved[1] += 1
                if rank in ranks and (here, heard[here]) == at: os.kill(os.getpid(), signal.SIGKILL)
            return tell
        pids = self.start(out, tell)
        if after is not None:
            time.sleep(after)
            for r in ranks: os.kill(pids[r], signal.SIGKILL) # a child that is done waits for us: its id is still its own
        states = self.wait(pids).values()
        killed = any(map(os.WIFSIGNALED, states))
        assert all(os.WIFSIGNALED(s) or s == 0 for s in states) or self.world > 1 and killed, self.log()
        return killed

    def finish(self, out):
        pids = self.start(out)
        assert self.wait(pids) == dict.fromkeys(pids, 0), f"did not go on: {self.log()}"

    def compare(self, out, same_names=True, samples=True): # samples: was a `Recorder` there all the time?
        got = outcome(out, True)
        if not samples: got["seen"] = []
        differ(got, self.want)
        if same_names: assert names(out) == self.want_names, f"left: {names(out)}, undisturbed: {self.want_names}"


# --- what a run ends with
def complete(out) -> list:
    from qie_nb.training.checkpoint import is_complete
    return sorted(d for d in (Path(out)/"checkpoints").glob("*") if d.is_dir() and A_CHECKPOINT.fullmatch(d.name) and is_complete(d))


def step_of(checkpoint): return json.loads((checkpoint/"state.json").read_text())["global_step"]
def names(out): return sorted(p.name for p in (Path(out)/"checkpoints").iterdir() if not p.name.startswith("inference"))


def log_rows(out) -> list: # rows of all logs, in the order of their files, without their time
    files = sorted((Path(out)/"checkpoints"/"logs").glob("training_*.csv"))
    return [{k: v for k, v in row.items() if k != "time"} for f in files for row in csv.DictReader(f.open())]


def seen(out) -> list: # of each rank, {step: its micro-batches} as the final history has them
    ranks = []
    for f in sorted(Path(out).glob("seen_*.jsonl")):
        ranks.append({})
        for step, nth, *what in map(json.loads, f.read_text().splitlines()):
            if nth == 0: ranks[-1][step] = [] # begun, perhaps again
            ranks[-1][step].append(what)
    return ranks


def outcome(out, ema) -> dict:
    from safetensors.torch import load_file
    last = max(complete(out), key=step_of)
    state = json.loads((last/"state.json").read_text())
    found = dict(state={k: state[k] for k in ("global_step", "epoch", "position")}, last=last.name,
                 latest=(last.parent/"latest").read_text().strip(), log=log_rows(out), seen=seen(out))
    for name in FILES if ema else FILES[:2]:
        tensors = load_file(last/name)
        found[name] = {k: (str(v.dtype), v.shape, v.reshape(-1).view(torch.uint8).tolist()) for k, v in tensors.items() if k != "rng"}
    return found


def differ(got, want):
    "Says in what a run's outcome is not the undisturbed one's."
    assert got["latest"] == got["last"]
    for name, value in want.items():
        mine = got[name]
        if name == "seen" and not (mine and value): continue
        if isinstance(value, list): mine, value = (dict(enumerate(x)) for x in (mine, value))
        wrong = [(k, mine.get(k), value.get(k)) for k in mine | value if mine.get(k) != value.get(k)] if isinstance(value, dict) else (mine, value)
        assert mine == value, f"{name}: {str(wrong)[:400]}, undisturbed last"


# --- kills
def chosen(labels, each, only=lambda l: True) -> list: # [(label, how manieth)]
    "Some occurrences of every kind of moment: the first, the last, then any."
    count, rng = collections.Counter(filter(only, labels)), random.Random(0)
    return [(l, k) for l, n in count.items() for k in list(dict.fromkeys([1, n, *rng.sample(range(1, n + 1), min(n, each))]))[:each]]


def in_files(moment): return re.fullmatch(r"(open|write|half of a write|fsync|rename|renamed|unlink|rmdir|mkdir)\b.*", moment)


def kills_at(course, places, what, half=None) -> dict:
    "A kill, and the run goes on to its end; a run that begins as a copy of `half` is killed twice in a row."
    t = Tally(what, len(places))
    for place in places:
        out, saved = course.folder(half), Shared()
        with t.trial(f"killed at {place[0]!r}, time {place[1]}"):
            before = complete(out)
            killed = course.cut(out, place, saved=saved)
            assert killed or half # there, what the moment was about may be done
            if half and killed: course.cut(out, place, saved=saved)
            there = complete(out)
            assert set(there) >= set(before) and len(there) >= min(saved[1], course.base["train"]["keep_checkpoints"]), "a whole checkpoint is gone"
            assert not saved[1] or max(map(step_of, there)) >= saved[0], f"step {saved[0]} was saved"
            course.finish(out)
            course.compare(out)
        shutil.rmtree(out)
    return t.result(f"{len({p[0] for p in places})} kinds of moments in runs of {len(course.want['log'])} steps")


def kills_in_files(course, each=None) -> dict:
    places = chosen(course.moments, each or 1, in_files)
    places = places if each else random.Random(0).sample(places, 4)
    return kills_at(course, places, "killed at every open, write, sync, rename and removal of saving and logging")


def kills_in_steps(course, each=None) -> dict:
    few = {"in mid-accumulation", "in evaluation", "epoch end", "after the optimizer's step"}
    places = chosen(course.moments, each or 1, lambda l: not in_files(l))
    assert few <= {p[0] for p in places}
    return kills_at(course, [p for p in places if each or p[0] in few], "killed in mid-epoch, in mid-accumulation, at epoch ends, in evaluation")


def kills_in_resume(course, few=None) -> dict:
    "Killed in the middle; the resumed process is killed before its first step, and again."
    half = course.folder()
    assert course.cut(half, ("step end", len(course.want["log"]) // 2 + 1))
    moments = course.listen(course.folder(half))
    places = chosen(moments[:moments.index("micro-batch") + 1], 1)
    return kills_at(course, random.Random(0).sample(places, few) if few else places, "killed while it resumes, twice in a row", half)


def kills_of_processes(course, trials) -> dict:
    "Two processes that train together: one of them killed, or both."
    t, rng, began = Tally("two processes (gloo), one or both killed", trials), random.Random(0), time.time()
    course.finish(course.folder())
    whole = time.time() - began
    moments = ["in mid-accumulation", "step end", "epoch end", "after the optimizer's step", "before backward", "before save_checkpoint"]
    while t.trials < trials:
        out, ranks = course.folder(), rng.choice(((0,), (1,), (0, 1)))
        with t.trial(f"ranks {ranks}"):
            for _ in range(rng.choice((1, 1, 2))):
                course.cut(out, ranks=ranks, **rng.choice((dict(at=(rng.choice(moments), rng.randint(1, 3))), dict(after=rng.uniform(0, whole)))))
            course.finish(out)
            course.compare(out)
        shutil.rmtree(out)
    return t.result()


# --- processes that `fit` starts
class Started(Course):
    "Runs in which the notebook's process starts two others."
    def job(self, out, *_):
        from qie_nb.trainer import QwenImageEditTrainer
        QwenImageEditTrainer(self.config(out, "auto")).fit()

    def listen(self, out): return self.finish(out)

    def kill(self, out, who, after) -> str: # what was killed, or "": the run had ended
        "A rank or the notebook is killed after some seconds, and all processes end."
        import psutil
        (pid,) = self.start(out)
        time.sleep(after)
        ranks, victim = psutil.Process(pid).children(recursive=True), pid
        for p in ranks:
            with contextlib.suppress(psutil.Error): # it may end now
                if "started_process" in " ".join(p.cmdline()) and p.environ().get("RANK") == who[-1]: victim = p.pid
        if victim == pid: who = "the notebook"
        with contextlib.suppress(ProcessLookupError): os.kill(victim, signal.SIGKILL)
        states = wait([pid], PATIENCE)
        assert pid in states, f"the notebook did not end: {self.log()}"
        left = psutil.wait_procs(ranks, timeout=PATIENCE)[1]
        assert not left, f"{len(left)} processes are left"
        return who if states[pid] else ""


def kills_of_started(course, trials) -> dict:
    "Each run is killed up to ten times, wherever it is, and then finished."
    t, rng, killed, began = Tally("fit() with two started processes: one of them or the notebook killed", trials), random.Random(0), collections.Counter(), time.time()
    course.finish(course.folder())
    whole = time.time() - began
    while t.trials < trials and len(t.failed) < 9:
        out = course.folder()
        with whole_run(t, "a run"):
            for _ in range(min(10, trials - t.trials)):
                newest = lambda: max(map(step_of, complete(out)), default=0)
                before, who, hit = newest(), rng.choice(("rank 0", "rank 1", "the notebook")), None
                with t.trial(who):
                    hit = course.kill(out, who, rng.uniform(0.1, 1.0) * whole)
                    assert newest() >= before, "a checkpoint is gone"
                    if complete(out): newest_is_named(out)
                if hit: killed[hit] += 1
                if hit == "": t.trials, t.passed = t.trials - 1, t.passed - 1; break # the run had ended
            course.finish(out)
            course.compare(out, same_names=False, samples=False)
        shutil.rmtree(out)
    return t.result(", ".join(f"{who} {n}" for who, n in sorted(killed.items())))


# --- two processes that are ended at each stage of a run
STAGES = ("loading", "first evaluation", "steps", "evaluation", "saving")
KILLED = ("the notebook", "rank 0", "rank 1", "both ranks")
ASKED = ("click", "SIGINT", "SIGTERM") # of the notebook
SOON = 10 # seconds until no process is alive


class Staged(Started):
    "Runs of two started processes, each ended at a stage that its processes tell of."
    def job(self, out, *_):
        "In a child, the notebook: a click on stop comes as a file."
        from qie_nb.trainer import QwenImageEditTrainer
        trainer = QwenImageEditTrainer(self.config(out, "auto"))
        threading.Thread(target=click_when_asked, args=(trainer, self.stages/"click"), daemon=True).start()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(KeyboardInterrupt):
            trainer.fit()

    @property
    def stages(self) -> Path:
        "The folder in which the processes say how far they are."
        return self.tmp/"stages"

    @contextlib.contextmanager
    def stopping_in(self, stage):
        "Within, started processes tell their stages and wait a moment in this one."
        shutil.rmtree(self.stages, ignore_errors=True)
        self.stages.mkdir()
        before = os.environ.get("PYTHONPATH", "")
        site = ROOT/"tests"/"training"/"staged_processes"
        os.environ |= dict(QIE_NB_STAGES=str(self.stages), QIE_NB_STAGE=stage, PYTHONPATH=f"{site}:{before}")
        try:
            yield
        finally:
            os.environ["PYTHONPATH"] = before
            del os.environ["QIE_NB_STAGES"], os.environ["QIE_NB_STAGE"]

    def end_at(self, out, stage, how) -> float: # seconds until all had ended
        "Start a run, end it at a stage, and see that nothing of it lives on."
        import psutil
        with self.stopping_in(stage):
            (pid,) = self.start(out)
            until(lambda: any(self.stages.glob(f"{stage}.*")) or ended(pid))
        assert not ended(pid), f"the run ended before its {stage}: {self.log()}"
        time.sleep(0.3) # into the stage
        processes = psutil.Process(pid).children(recursive=True)
        for victim in self.victims(processes, pid, how):
            os.kill(victim, signal.SIGKILL)
        if how == "click":
            (self.stages/"click").touch()
        elif how in ASKED:
            os.kill(pid, getattr(signal, how))
        began = time.time()
        states = wait([pid], SOON)
        assert pid in states, f"the notebook is alive after {SOON} s"
        left = psutil.wait_procs(processes, timeout=max(0, SOON - (time.time() - began)))[1]
        assert not left, f"{len(left)} processes are alive after {SOON} s"
        return time.time() - began

    def victims(self, processes, notebook, how) -> list: # of process ids
        "What is killed."
        if how not in KILLED:
            return []
        if how == "the notebook":
            return [notebook]
        ranks = {p.environ()["RANK"]: p.pid for p in processes if "started_process" in " ".join(p.cmdline())}
        return list(ranks.values()) if how == "both ranks" else [ranks[how[-1]]]


def click_when_asked(trainer, file):
    "Press the stop button once the file is there."
    while not file.exists():
        time.sleep(0.01)
    trainer.state.stop = "the stop button"


def ended(pid) -> bool:
    "Has a child ended? It is not waited for."
    return bool(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))


def stops_at_stages(course, trials) -> dict:
    "Each stage with each way to end a run, then the run is finished and compared."
    t = Tally("two started processes, ended at each stage", trials)
    longest = 0.
    every = [(stage, how) for how in (*KILLED, *ASKED) for stage in STAGES]
    chosen_ways = every if trials >= len(every) else random.Random(0).sample(every, trials)
    for stage, how in chosen_ways:
        out = course.folder()
        with t.trial(f"{how} in {stage}"):
            longest = max(longest, course.end_at(out, stage, how))
            course.finish(out)
            course.compare(out, same_names=False, samples=False)
        shutil.rmtree(out)
    return t.result(f"no process was alive {longest:.1f} s later")


# --- signals
def by_command(course, out, shared, resume=False, slow_at=None):
    "In a child: `qie-nb train`; its micro-batches, steps and whether a slow one was ended are seen from outside."
    import yaml
    from qie_nb.cli import main
    from qie_nb.trainer import QwenImageEditTrainer as T
    from torch.optim.optimizer import register_optimizer_step_post_hook
    signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    def begin_batch(*a):
        shared[BATCHES] += 1
        if shared[BATCHES] != slow_at: return
        shared[SLOW] = 1
        for _ in range(100 * PATIENCE): time.sleep(0.01)
        shared[SLOW] = 2
    def put(place, value): shared[place] = value
    around(T, "training_step", begin_batch)
    around(T, "setup_run", lambda *a: put(SETUP, 1))
    register_optimizer_step_post_hook(lambda *a: put(STEPS, shared[STEPS] + 1))
    (out/"run.yaml").write_text(yaml.safe_dump(course.config(out)))
    code = main(["train", "--config", str(out/"run.yaml"), *(["--resume", "latest"] if resume else [])])
    sys.stdout.flush()
    os._exit(code or 0)


def until(condition, seconds=PATIENCE):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "never came"
        time.sleep(0.001)


def newest_is_named(out):
    named = out/"checkpoints"/(out/"checkpoints"/"latest").read_text().strip()
    assert named in complete(out) and step_of(named) == max(map(step_of, complete(out)))


def ends_with(course, states, pid, kind):
    assert pid in states, "did not end by itself"
    code, want = os.waitstatus_to_exitcode(states[pid]), 128 + kind
    assert code == want, f"exit code {code}, not {want}: {course.log()[-600:]}"


def signals(course, trials) -> dict:
    "SIGTERM and Ctrl-C at random moments of `qie-nb train`, to its end."
    t, rng, late = Tally("qie-nb train gets SIGTERM or Ctrl-C", trials), random.Random(0), [0]
    for runs in range(trials + 2):
        if t.trials >= trials: break
        out = course.folder()
        with whole_run(t, f"run {runs}"):
            while True:
                shared, kind = Shared(), rng.choice((signal.SIGTERM, signal.SIGINT))
                at = rng.randint(1, 14) if t.trials < trials else 10**6
                pid = fork(lambda: by_command(course, out, shared, bool(complete(out))), course.tmp/"log")
                until(lambda: shared[BATCHES] >= at or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
                time.sleep(rng.uniform(0, 0.05))
                steps = shared[STEPS]
                os.kill(pid, kind)
                states = wait([pid], PATIENCE)
                if shared[BATCHES] < at or states.get(pid) == 0: # done before it was asked
                    assert states.get(pid) == 0, course.log()
                    break
                with t.trial(f"{kind.name} after {at} micro-batches"):
                    ends_with(course, states, pid, kind)
                    late.append(shared[STEPS] - steps)
                    assert late[-1] <= 2, f"{late[-1]} steps were made after it was asked to end"
                    newest_is_named(out)
            course.compare(out, same_names=False, samples=False)
        shutil.rmtree(out)
    return t.result(f"at most {max(late)} steps made after it was asked")


def signals_in_odd_places(course) -> dict:
    "A second Ctrl-C does not wait for the step; a signal before the first step ends the run as well."
    t, interrupt, ended = Tally("a second Ctrl-C, and signals before the first step"), signal.SIGINT, signal.SIGTERM
    for slow_at, *kinds in ((2, interrupt, interrupt), (17, interrupt, interrupt), (None, ended), (None, interrupt)):
        with t.trial(f"{kinds} {f'in micro-batch {slow_at}' if slow_at else 'while loading'}"):
            out, shared = course.folder(), Shared()
            pid = fork(lambda: by_command(course, out, shared, slow_at=slow_at), course.tmp/"log")
            until(lambda: shared[SLOW if slow_at else SETUP])
            for n, kind in enumerate(kinds): time.sleep(0.5 * n), os.kill(pid, kind)
            ends_with(course, wait([pid], PATIENCE), pid, kinds[0])
            assert shared[SLOW] == 1 if slow_at else shared[STEPS] <= 1, f"it waited for the step; {shared[STEPS]} steps were made"
            course.finish(out)
            course.compare(out, same_names=False, samples=False)
    return t.result()


# --- the notebook's stop button
@contextlib.contextmanager
def kernel(cwd):
    "A real Jupyter kernel: its manager, and run(code, seconds) -> (content of the reply, {name: value})."
    from jupyter_client.manager import start_new_kernel
    paths = os.pathsep.join([str(ROOT), str(ROOT/"tests")])
    manager, client = start_new_kernel(PATIENCE, "python3", cwd=str(cwd), env=os.environ | dict(PYTHONPATH=paths, OMP_NUM_THREADS="1"))
    def run(code, seconds=PATIENCE, may_fail=False, **expressions):
        # the next cell may be on its way while one fails: it is not to be aborted for that
        got = client.execute_interactive(code, user_expressions=expressions, stop_on_error=False, timeout=seconds, output_hook=lambda m: None)["content"]
        assert got["status"] == "ok" or may_fail and got["ename"] == "KeyboardInterrupt", f"{code}: {got.get('ename')}: {got.get('evalue')}"
        return got["status"] == "ok", {k: eval(v["data"]["text/plain"]) for k, v in got.get("user_expressions", {}).items()}
    try: yield manager, run
    finally: client.stop_channels(), manager.shutdown_kernel(now=True)


def begun(out) -> int: # the step that a run is in
    lines = (out/"seen_0.jsonl").read_text().splitlines() if (out/"seen_0.jsonl").exists() else ["[0]"]
    return json.loads(lines[-1])[0]


def interrupts(course, trials) -> dict:
    "The stop button at random moments of `trainer.fit()`; the next cell calls it again."
    t, rng, runs, late, raised = Tally("the notebook's stop button", trials), random.Random(0), 0, [0], 0
    with kernel(course.tmp) as (manager, run):
        run("import torch; torch.set_num_threads(1)\nfrom crash_trials import Recorder\nfrom qie_nb.trainer import QwenImageEditTrainer\n"
            "import diffusers, transformers, peft, accelerate")
        began = time.time()
        run(f"QwenImageEditTrainer({course.config(course.folder())!r}).fit()")
        whole = time.time() - began
        while t.trials < trials and len(t.failed) < 9:
            out, runs = course.folder(), runs + 1
            cache = dict(cache=dict(cache_dir=str(out/"cache"))) if runs % 2 == 0 else {} # every other run fills its cache as it goes
            make = lambda resume=None: run(f"trainer = QwenImageEditTrainer({course.config(out, resume, **cache)!r}, [Recorder({str(out)!r})])")
            with whole_run(t, f"run {runs}"):
                make()
                while True:
                    at = []
                    def stop(): at.append(begun(out)), manager.interrupt_kernel()
                    press = threading.Timer(rng.uniform(0, whole * rng.choice((0.1, 0.3, 0.6))), stop)
                    if t.trials < trials: press.start()
                    ok, _ = run("trainer.fit()", may_fail=True)
                    press.cancel()
                    if press.ident: press.join()
                    now = run("pass", step="trainer.global_step", end="trainer.state.max_steps")[1]
                    step = now["step"]
                    assert ok or at
                    with t.trial(f"run {runs}") if at else contextlib.nullcontext():
                        raised += not ok
                        late.append(step - at[0] if at else 0)
                        assert late[-1] <= 1, f"it came in step {at}, {step} were made"
                        assert not step or step in map(step_of, complete(out)), f"{step} steps were made, and no checkpoint has them"
                        if step: newest_is_named(out)
                    if now["end"] and step >= now["end"] and complete(out): break
                    if rng.random() < 0.2 and complete(out): make("latest") # by another trainer
                run("trainer.fit()") # nothing is left to do
                course.compare(out, same_names=False)
            shutil.rmtree(out)
    return t.result(f"over {runs} runs, {raised} raised KeyboardInterrupt; at most {max(late)} further steps begun after one")


# --- all of them
def cases(full): # {name: function of a folder}
    def course(kind=Course, **sections): return functools.lru_cache(lambda: kind(tempfile.mkdtemp(prefix="kills-"), **sections))
    one, two = course(), course(world=2, data=dict(batch_size=1), train=dict(num_epochs=3))
    three = course(Started, data=dict(batch_size=1), train=dict(num_processes=2, num_epochs=15))
    staged = course(Staged, data=dict(batch_size=1), train=dict(num_processes=2, num_epochs=4, eval_at_start=True))
    n = lambda much, little: much if full else little
    on = lambda f, *a, of=one: lambda tmp: f(of(), *a)
    return dict(files=on(kills_in_files, n(2, None)), steps=on(kills_in_steps, n(2, None)), resume=on(kills_in_resume, n(None, 2)),
                signals=on(signals, n(40, 3)), odd_signals=on(signals_in_odd_places), interrupts=on(interrupts, n(100, 8)),
                processes=on(kills_of_processes, n(18, 1), of=two), started=on(kills_of_started, n(40, 2), of=three),
                stages=on(stops_at_stages, n(35, 2), of=staged))


if __name__ == "__main__": main("Interrupted runs", cases)
