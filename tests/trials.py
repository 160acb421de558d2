"""What the trials of the cache and of interrupted runs share: counting, child processes, watched files and the command line."""
import argparse, builtins, contextlib, ctypes, datetime, errno, io, json, mmap
import os, platform, re, shutil, signal, subprocess, sys, tempfile, time, traceback
from pathlib import Path

import torch


class Tally:
    "Trials of one case: how many passed, and the failures with the line that failed."
    def __init__(self, case, of=0):
        self.case, self.of, self.trials, self.passed, self.failed = case, of, 0, 0, []
        self.began = self.told = time.time()

    @contextlib.contextmanager
    def trial(self, name):
        self.trials += 1
        try:
            yield
            self.passed += 1
        except Exception as e: self.fail(name, e)
        if time.time() - self.told > 20:
            self.told = time.time()
            print(f"  {self.case}: {self.trials}{f' of {self.of}' if self.of else ''}, {len(self.failed)} failed", flush=True)

    def fail(self, name, e):
        self.failed.append(f"{name}: {type(e).__name__}: {e} ({traceback.extract_tb(e.__traceback__)[-1].line})")
        print(f"  failed: {self.failed[-1]}"[:600], flush=True)

    def result(self, worst="") -> dict:
        return dict(case=self.case, trials=self.trials, passed=self.passed, worst=self.failed[0][:600] if self.failed else worst,
                    seconds=round(time.time() - self.began, 1))


@contextlib.contextmanager
def quiet():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()): yield


# --- child processes
def Shared(): return memoryview(mmap.mmap(-1, 64 * 8)).cast("q") # 64 integers that processes share; each process writes its own


def fork(job, log) -> int:
    "Run a job in a forked child; its output is appended to `log`."
    sys.stdout.flush(), sys.stderr.flush()
    if pid := os.fork(): return pid
    code = 1
    try:
        torch.set_num_threads(1) # one thread makes torch's new pool: threads that make it together get none
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = open(1, "w", closefd=False)
        job()
        code = 0
    except BaseException: traceback.print_exc()
    finally:
        with contextlib.suppress(Exception): sys.stdout.flush()
        os._exit(code)


def child_value(job, log): # what a job returns in a child, as JSON
    out, write = log.with_suffix(".json"), io.open
    def run():
        data = json.dumps(job())
        with write(out, "w") as f: f.write(data)
    assert os.waitpid(fork(run, log), 0)[1] == 0, log.read_text()[-2000:]
    return json.loads(out.read_text())


def wait(pids, seconds, grace=None) -> dict: # {pid: status}; children that hang are killed and missing
    "Where one fails, the others have `grace` more seconds."
    done, end = {}, time.time() + seconds
    while len(done) < len(pids) and time.time() < end:
        for p in set(pids) - done.keys():
            if (got := os.waitpid(p, os.WNOHANG))[0]: done[p] = got[1]
        if grace is not None and any(done.values()): end, grace = min(end, time.time() + grace), None
        time.sleep(0.002)
    for p in set(pids) - done.keys(): os.kill(p, signal.SIGKILL), os.waitpid(p, 0)
    return done


class Written:
    "An open file that reports each write before it and at its middle."
    def __init__(self, f, path, tell): self._f, self._path, self._tell = f, path, tell
    def __getattr__(self, name): return getattr(self._f, name)
    def __enter__(self): return self
    def __exit__(self, *a): self._f.close()
    def write(self, data):
        self._tell("write", self._path)
        half = len(data) // 2
        self._f.write(data[:half]), self._f.flush()
        self._tell("half of a write", self._path)
        self._f.write(data[half:])
        return len(data)


def around(holder, name, before, after=lambda *a, **kw: None):
    "In a child: a method or function also calls these."
    real = getattr(holder, name)
    def called(*a, **kw):
        before(*a, **kw)
        out = real(*a, **kw)
        after(*a, **kw)
        return out
    setattr(holder, name, called)


def watch_operations(below, tell):
    "In a child: tell(what, path) before each write, in its middle, and before and after each fsync and rename below a folder."
    real_open, mine = io.open, lambda path: str(path).startswith(str(below))
    def open_(file, mode="r", *a, **kw):
        writes = set(mode) & set("wxa+") and mine(file)
        if writes: tell("open", str(file))
        f = real_open(file, mode, *a, **kw)
        return Written(f, str(file), tell) if writes else f
    def renames(what): return lambda src, dst, *a, **kw: mine(dst) and tell(what, f"{src}\t{dst}")
    builtins.open = io.open = open_
    path_of = lambda fd: os.readlink(f"/proc/self/fd/{fd}")
    around(os, "fsync", lambda fd: mine(path_of(fd)) and tell("fsync", path_of(fd)))
    for name in ("replace", "rename"): around(os, name, renames("rename"), renames("renamed"))


# --- mounts
class NotRun(Exception): "A case that this machine does not allow."


def mount(*args):
    done = subprocess.run(["mount", *map(str, args)], capture_output=True, text=True)
    if done.returncode: raise NotRun(done.stderr.strip())


def own_mounts():
    "In a child: what it mounts vanishes with it."
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000): raise NotRun(os.strerror(ctypes.get_errno())) # CLONE_NEWNS
    mount("--make-rprivate", "/")


def mount_read_only(source, folder):
    mount("--bind", source, folder), mount("-o", "remount,ro,bind", folder)
    try: (Path(folder)/"x").write_text("")
    except OSError as e: assert e.errno == errno.EROFS, e
    else: raise NotRun("the mount takes writes")


# --- command line
def about() -> dict:
    import diffusers, safetensors, transformers
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    versions = {m.__name__: m.__version__ for m in (torch, safetensors, diffusers, transformers)}
    return dict(device=f"{cpu[1] if cpu else platform.processor()}, one thread", system=f"{platform.system()} {platform.release()}",
                date=datetime.date.today().isoformat(), versions=dict(python=platform.python_version()) | versions)


def main(description, cases): # cases(full) -> {name: function of a folder}
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--full", action="store_true", help="the full counts")
    p.add_argument("--only", nargs="*", help="names of cases")
    p.add_argument("--out", help="JSON file for the results")
    a = p.parse_args()
    torch.set_num_threads(1)
    chosen, results, began = cases(a.full), [], time.time()
    with tempfile.TemporaryDirectory(prefix="trials-") as home:
        tempfile.tempdir = home
        os.environ["QIE_NB_HOME"] = str(Path(home)/"home")
        for name in a.only or chosen:
            tmp = Path(home)/name
            tmp.mkdir()
            try: got = chosen[name](tmp)
            except Exception as e:
                traceback.print_exc()
                got = dict(case=name, trials=1, passed=0, worst=f"broke off: {type(e).__name__}: {e}"[:900], seconds=0.)
            results.append(dict(name=name) | got)
            verdict = "FAIL" if got["passed"] != got["trials"] else "ok  " if got["trials"] else "none"
            print(f"{verdict} {got['case']}: {got['passed']} of {got['trials']} in {got['seconds']:.0f} s; {got['worst']}", flush=True)
            shutil.rmtree(tmp, ignore_errors=True)
    said = about() | dict(counts="full" if a.full else "few", seconds=round(time.time() - began), cases=results)
    if a.out: Path(a.out).parent.mkdir(parents=True, exist_ok=True); Path(a.out).write_text(json.dumps(said, indent=1) + "\n")
    sys.exit(any(r["passed"] != r["trials"] for r in results))
