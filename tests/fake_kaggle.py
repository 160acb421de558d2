"""Imitations of Kaggle and Colab: notebooks run under their paths, limits and environment variables.

    platform = kaggle(tmp_path, {"datasets/user/pairs": folder}) # /kaggle/input/datasets/user/pairs, read-only
    run = run_notebook("kaggle/train/train.ipynb", platform)

A session that has the library installs nothing: pip only keeps its arguments (`Run.asked`).
One without the library has the real pip.
A session sees the whole machine without internet; its changes are lost (so an install cell may install and uninstall), except its working folder.
This needs Linux with `unshare`, as root or with user namespaces (then without installing).
"""
import contextlib, functools, json, os, shutil, subprocess, sys, tempfile
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent

# sources of the names: Kaggle/docker-python 78aaa43 (`test`, patches/), kagglehub 1.0 (env.py, clients.py), googlecolab/colabtools
KAGGLE = dict(KAGGLE_KERNEL_RUN_TYPE="Batch", KAGGLE_URL_BASE="https://www.kaggle.com", KAGGLE_DATA_PROXY_URL="https://dp.kaggle.net",
              KAGGLE_DATA_PROXY_TOKEN="none", KAGGLE_USER_SECRETS_TOKEN="none", KAGGLE_KERNEL_INTEGRATIONS="", MKL_THREADING_LAYER="GNU")
COLAB = dict(COLAB_RELEASE_TAG="release-colab-external_20260819-060000_RC00", COLAB_GPU="1", COLAB_BACKEND_VERSION="next", COLAB_NOTEBOOK_ID="1")

# modules that exist only there; a missing secret raises
KAGGLE_MODULES = {"kaggle_secrets.py": "class UserSecretsClient: get_secret = lambda self, label: SECRETS[label]"}
COLAB_MODULES = {"google/colab/__init__.py": "", "google/colab/userdata.py": "get = SECRETS.__getitem__", "google/colab/drive.py": '''
import os
def mount(mountpoint):
    if not os.path.isdir(os.path.join(mountpoint, "MyDrive")): raise ValueError("mount failed")
'''}


# instead of pip, where the library is there already
PIP = """
import sys
with open(ASKED, "a") as f: f.write(" ".join(sys.argv[1:]) + "\\n")
"""


@dataclass
class Platform:
    "Kaggle or Colab; paths are as a notebook sees them."
    name: str          # kaggle or colab
    root: Path         # folder for the sessions' outputs
    working: str       # a notebook's working folder
    inputs: dict       # attached path: folder on this machine; read-only
    env: dict
    modules: dict      # file: text
    kept: dict = field(default_factory=dict) # path kept between sessions: folder on this machine
    quota: int = 256 << 20 # of `working`, bytes
    secrets: dict = field(default_factory=dict)


def attached(inputs): return {f"/kaggle/input/{name}": Path(folder).resolve() for name, folder in inputs.items()}


def kaggle(root, inputs={}, env={}, **options) -> Platform:
    "`inputs`: path below /kaggle/input (a slug, or datasets/owner/slug as in newer sessions) to a folder."
    return Platform("kaggle", Path(root), "/kaggle/working", attached(inputs), KAGGLE | env, KAGGLE_MODULES, **options)


def colab(root, inputs={}, drive=None, **options) -> Platform: # kagglehub attaches inputs at the same paths
    "`drive`: folder mounted as Google Drive, the only one that is kept."
    return Platform("colab", Path(root), "/content", attached(inputs), COLAB, COLAB_MODULES, {"/content/drive/MyDrive": Path(drive).resolve()} if drive else {}, **options)


@dataclass
class Run:
    "The result of a session."
    notebook: dict       # executed, as JSON
    error: str           # traceback of the failed cell, or why none was run; "" without an error
    output: Path         # copy of the working folder at the end
    written: int         # bytes of its files
    inputs_written: list # changed files of inputs
    asked: tuple = ()    # lines of arguments that pip got, if the library was there already

    def text(self) -> str:
        "Everything that the cells print and show, as text."
        outs = [o for c in self.notebook["cells"] for o in c.get("outputs", [])]
        # one `print` may arrive as two stream outputs
        return "".join("".join(o["text"] if "text" in o else [*o.get("data", {}).get("text/plain", ""), "\n"]) for o in outs)


def files_of(folder) -> dict: # relative path: (bytes, mtime in ns)
    return {str(p.relative_to(folder)): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in sorted(Path(folder).rglob("*"))}


def bytes_of(folder) -> int: return sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file() and not p.is_symlink())


@functools.lru_cache
def unsharing() -> tuple: # command that isolates a session; () if it is not permitted
    common = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
    for command in ([*common], [*common, "--map-root-user"]) if shutil.which("unshare") else ():
        if subprocess.run([*command, sys.executable, __file__, "may-mount", mounts_of()], capture_output=True).returncode == 0: return tuple(command)
    return ()


def may_install() -> bool: # may sessions (un)install? Without root an overlay cannot record removals
    return bool(unsharing()) and "--map-root-user" not in unsharing()


def mounts_of(): return os.readlink("/proc/self/ns/mnt") # identifies a process's mounts


def session(
    platform,
    command,      # words; {home} is replaced by the session's own folder
    python=None,  # default: this one
    library=None, # is qie_nb importable? default: only with this Python
    files={},     # file in that folder: text
    before="",    # Python code to run first
    timeout=3600, # seconds for the whole session
) -> tuple: # the folder, CompletedProcess, changed files of inputs
    "Run a command in a platform's working folder. Skips the test if isolation is not permitted here."
    import pytest
    if not unsharing(): pytest.skip("sessions need mounts and a network of their own (Linux with unshare)")
    python = str(python or sys.executable)
    if library is None: library = python == sys.executable
    home = Path(tempfile.mkdtemp(prefix="session_", dir=platform.root))
    texts = files | {f"modules/{name}": f"SECRETS = {platform.secrets!r}\n{text}" for name, text in platform.modules.items()}
    for name, text in texts.items():
        (home/name).parent.mkdir(parents=True, exist_ok=True)
        (home/name).write_text(text, encoding="utf-8")
    if library:
        stub = home/"without_pip"/"pip"
        stub.mkdir(parents=True)
        (stub/"__init__.py").write_text("")
        (stub/"__main__.py").write_text(f"ASKED = {str(home/'asked.txt')!r}\n{PIP}")
        (home/"asked.txt").write_text("")
    (home/"output").mkdir()
    variables = dict(PATH=f"{Path(python).parent}:/usr/local/bin:/usr/bin:/bin", LANG="C.UTF-8", PYTHONPATH=":".join([str(home/"modules")] + [str(REPO)] * library),
                     PIP_CONFIG_FILE=os.devnull, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore", IPYTHONDIR="/tmp/.ipython",
                     **{k: v for k, v in os.environ.items() if k.startswith("OMP_")}, **platform.env)
    first = f"{home/'without_pip'}:" if library else ""
    command = [str(word).format(home=home) for word in command]
    spec = vars(platform) | dict(home=home, python=python, env=variables, first=first,
                                 before=before, command=command)
    (home/"spec.json").write_text(json.dumps(spec, default=str))
    before = {at: files_of(folder) for at, folder in platform.inputs.items()}
    done = subprocess.run([*unsharing(), sys.executable, __file__, "enter", mounts_of(), str(home/"spec.json")], capture_output=True, text=True, timeout=timeout)
    changed = [f"{at}/{f}" for at, folder in platform.inputs.items() for f in sorted(dict(before[at].items() ^ files_of(folder).items()))]
    return home, done, changed


def run_notebook(
    path,         # of the notebook, which is not changed
    platform,
    python=None,
    changes={},   # text in a cell: its replacement
    files={},
    **options,    # of `session`
) -> Run:
    source = Path(path).read_text(encoding="utf-8")
    for old, new in changes.items():
        old, new = (json.dumps(t)[1:-1] for t in (old, new))
        assert source.count(old) == 1, f"{old} occurs {source.count(old)} times in {path}"
        source = source.replace(old, new)
    command = [python or sys.executable, "{home}/driver.py", "{home}", platform.working]
    home, done, changed = session(platform, command, python, files=files | {"notebook.ipynb": source, "executed.ipynb": source, "error.txt": "", "driver.py": DRIVER}, **options)
    error = (home/"error.txt").read_text() or f"exit code {done.returncode}: {done.stderr[-3000:]}" * bool(done.returncode)
    kept = home/"asked.txt"
    asked = tuple(kept.read_text().splitlines()) if kept.exists() else ()
    executed, output = json.loads((home/"executed.ipynb").read_text()), home/"output"
    return Run(executed, error, output, bytes_of(output), changed, asked)


DRIVER = """
import sys, traceback
import nbformat
from nbclient import NotebookClient
home, working = sys.argv[1:]
nb = nbformat.read(f"{home}/notebook.ipynb", as_version=4)
try: NotebookClient(nb, timeout=None, startup_timeout=900, kernel_name="python3", resources=dict(metadata=dict(path=working))).execute()
except Exception as e: open(f"{home}/error.txt", "w").write(str(e) or traceback.format_exc())
nbformat.write(nb, f"{home}/executed.ipynb")
"""


# ---- inside the session's process

def mount(*args):
    done = subprocess.run(["mount", *map(str, args)], capture_output=True, text=True)
    if done.returncode: raise OSError(f"mount {' '.join(map(str, args))}: {done.stderr.strip()}")


def over(folder, at, room): # `folder` mounted at `at`; writes go to `room`
    for name in ("upper", "work"): (room/name).mkdir(parents=True)
    for more in ("", ",userxattr"):
        with contextlib.suppress(OSError): return mount("-t", "overlay", "overlay", "-o", f"lowerdir={folder},upperdir={room/'upper'},workdir={room/'work'}{more}", at)
    mount("--rbind", folder, at) # it contains disks that were mounted with other rights


def other_disks(paths): # mount points above these paths
    above = {d for w in paths for p in (Path(w), Path(w).resolve()) for d in (p, *p.parents)}
    return sorted(d for d in above if d.is_dir() and len(d.parts) > 2 and d.stat().st_dev != d.parent.stat().st_dev)


def new_root(spec) -> Path:
    "The whole machine under an overlay, with the platform's own folders."
    home = Path(spec["home"])
    mount("--make-rprivate", "/")
    scratch = home/"scratch"
    scratch.mkdir()
    mount("-t", "tmpfs", "-o", "size=4g,mode=755", "tmpfs", scratch)
    new = scratch/"root"
    new.mkdir()
    for top in sorted(Path("/").iterdir()): # one by one: without root / cannot be an overlay's lower folder
        if top.is_symlink(): (new/top.name).symlink_to(os.readlink(top))
        elif top.is_dir():
            (new/top.name).mkdir()
            if top.name in ("dev", "sys"): mount("--rbind", top, new/top.name)
            elif top.name != "proc": over(top, new/top.name, scratch/"layers"/top.name)
    needed = [spec["python"], sys.base_prefix, REPO, home, subprocess.run([spec["python"], "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True).stdout.strip()]
    for n, disk in enumerate(other_disks(needed)): over(disk, new/str(disk)[1:], scratch/"layers"/f"disk{n}")
    mount("-t", "proc", "proc", new/"proc")
    inside = lambda at: new/str(at).lstrip("/")
    temporary = ["/kaggle/temp"] if spec["name"] == "kaggle" else []
    for at in (spec["working"], spec["env"]["HOME"], "/kaggle/input", *temporary, *spec["inputs"]):
        inside(at).mkdir(parents=True, exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={spec['quota']},mode=755", "tmpfs", inside(spec["working"]))
    for at, folder in spec["kept"].items():
        inside(at).mkdir(parents=True, exist_ok=True)
        mount("--bind", folder, inside(at))
    for at, folder in spec["inputs"].items():
        mount("--bind", folder, inside(at))
        mount("-o", "remount,ro,bind", inside(at))
    return new


def loopback_up(): # kernels use it
    import fcntl, socket, struct
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("16sH14s", b"lo", 0x1 | 0x40, b"") # IFF_UP, IFF_RUNNING
        with contextlib.suppress(OSError): fcntl.ioctl(s, 0x8914, request) # SIOCSIFFLAGS; already up in the machine's own network


def enter(spec) -> int:
    "Run an isolated session, and copy its output out of it."
    spec["env"]["HOME"] = "/tmp/home"
    loopback_up()
    new, home = new_root(spec), Path(spec["home"])
    run = functools.partial(subprocess.run, env=spec["env"], preexec_fn=lambda: (os.chroot(new), os.chdir(spec["working"])))
    run([spec["python"], "-c", spec["before"]], check=True)
    spec["env"]["PYTHONPATH"] = spec["first"] + spec["env"]["PYTHONPATH"]
    code, session, working = run(spec["command"]).returncode, new/spec["home"][1:], new/spec["working"][1:]
    kept = [working/Path(at).relative_to(spec["working"]) for at in spec["kept"] if Path(at).is_relative_to(spec["working"])]
    for name in {"executed.ipynb", "error.txt", "asked.txt"} & {*os.listdir(session)}:
        shutil.copyfile(session/name, home/name)
    shutil.copytree(working, home/"output", ignore=lambda folder, names: [n for n in names if Path(folder)/n in kept], symlinks=True, dirs_exist_ok=True)
    return code


def may_mount(): # tried in a temporary folder
    with tempfile.TemporaryDirectory() as tmp:
        mount("--make-rprivate", "/")
        mount("-t", "tmpfs", "tmpfs", tmp)
        over(Path("/usr"), tmp, Path(tmp)/"room")
        for _ in range(2): subprocess.run(["umount", tmp])


if __name__ == "__main__":
    job, others, *spec = sys.argv[1:]
    if others == mounts_of(): sys.exit("this mounts file systems and must be started by run_notebook")
    sys.exit(may_mount() if job == "may-mount" else enter(json.loads(Path(spec[0]).read_text())))
