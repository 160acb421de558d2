"""The Kaggle and Colab notebooks in imitations of both: read-only inputs, a small working folder, no internet, batch runs.
With the platforms' own library versions where QIE_NB_KAGGLE_PYTHON and QIE_NB_COLAB_PYTHON name such a Python and QIE_NB_WHEELS a folder of wheels (`make places` does)."""
import ast, importlib, itertools, json, os, re, shutil, subprocess, sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import nbformat, pytest, torch
from diffusers import QwenImageTransformer2DModel
from nbformat import v4
from packaging.requirements import Requirement
from packaging.version import Version
from safetensors.torch import load_file

import places as script
from fake_kaggle import colab, files_of, kaggle, may_install, run_notebook, session
from qie_nb.config import make_config
from qie_nb.data.dataset import ImageDataset
from qie_nb.data.samples import find_samples
from qie_nb.planning.doctor import TRIED
from qie_nb.tiny.photos import answers, demo_config, errors, make_pairs, truths, write_pairs
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from helpers import divided
from helpers import write_pairs as random_pairs
from test_project import settings

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT/"kaggle").rglob("*.ipynb"))
TRAIN, COLAB, PRECOMPUTE, PREQUANTIZE = (ROOT/"kaggle"/f"{name}.ipynb" for name in ("train/train", "colab", "precompute/precompute", "prequantize/prequantize"))
METADATA = {p.parent: json.loads(p.read_text()) for p in sorted((ROOT/"kaggle").glob("*/kernel-metadata.json"))}
PLATFORMS = "kaggle", "colab"
MB = 1 << 20


def notebook(folder, *cells):
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(c) for c in cells]), folder/"notebook.ipynb")
    return folder/"notebook.ipynb"


def code_of(cell):
    "Without lines of magics."
    return "\n".join(line for line in cell.splitlines() if not line.startswith("%"))


def settings_cell(path):
    (found,) = [c for c in cells_of(path) if c.startswith("TRIAL = True  # False: ")]
    return found


def offline(wheels="/kaggle/input/datasets/user/wheels") -> dict:
    "The change of the install cell that docs/kaggle.md has for a session without internet."
    page = (ROOT/"docs"/"kaggle.md").read_text()
    line = re.search(r"^%pip install .*--no-index.*$", page, re.M)[0]
    assert line.count("/kaggle/input/my-wheels") == 1
    return {cells_of(TRAIN)[0].splitlines()[0]: line.replace("/kaggle/input/my-wheels", wheels)}


def asked_of_pip() -> tuple:
    "What the install cell asks of pip."
    return tuple(line.removeprefix("%pip ") for line in cells_of(TRAIN)[0].splitlines())


def cells_of(path): return ["".join(c["source"]) for c in json.loads(Path(path).read_text())["cells"] if c["cell_type"] == "code"]


def needs_root():
    if not may_install(): pytest.skip("sessions that install packages need their own mounts (unshare, as root)")


def python_of(platform):
    "The Python with a platform's versions; skips the test without one."
    name = f"QIE_NB_{platform.upper()}_PYTHON"
    if not os.environ.get(name): pytest.skip(f"{name} does not name a Python with the versions of constraints/{platform}.txt; `make places` makes one")
    needs_root()
    return os.environ[name]


def versions(platform):
    lines = [line.split("==") for line in (ROOT/"constraints"/f"{platform}.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {name.lower(): version for name, version in lines}


def minor(version): return Version(".".join(map(str, Version(version).release[:2])))


# ---- the notebooks' cells (everyday) ----

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


@each_notebook
def test_cells_only_call_the_library(path):
    cells = cells_of(path)
    lines = [[line for line in c.splitlines() if line] for c in cells]
    assert len(cells) <= 8 and all(len(found) <= 20 for found in lines)
    assert max(map(len, sum(lines, []))) <= 95, "cut off in a cell of 1280 pixels"
    for node in (n for c in cells for n in ast.walk(ast.parse(code_of(c)))):
        assert not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.Try, ast.Lambda)), ast.unparse(node)


@each_notebook
def test_names_in_cells_exist(path):
    text = code_of("\n".join(cells_of(path)))
    objects = {a.name: getattr(importlib.import_module(node.module), a.name) for node in ast.walk(ast.parse(text))
               if isinstance(node, ast.ImportFrom) and node.module.startswith("qie_nb") for a in node.names}
    owners = dict(env=objects["detect_environment"](), trainer=objects["QwenImageEditTrainer"])
    used = set(re.findall(r"\b(env|trainer)\.(\w+)", text)) - {("trainer", "cache_dir")}
    assert not [f"{owner}.{name}" for owner, name in used if not hasattr(owners[owner], name)]


@each_notebook
def test_settings_in_cells_are_known(path, monkeypatch, tmp_path):
    "With a doctor that only checks the configuration."
    checked = []
    def report(config, **_):
        checked.append(make_config(config))
        report = SimpleNamespace(config=lambda: checked[-1])
        report.stop = lambda: report
        return report
    monkeypatch.setenv("QIE_NB_ROOT", str(tmp_path))
    monkeypatch.setattr("qie_nb.planning.doctor.doctor", report)
    monkeypatch.setattr("qie_nb.tiny.photos.make_pairs", lambda path, *_: str(path))
    text = settings_cell(path)
    exec(text, {})
    assert checked[0].model.pretrained_model_name_or_path == "tiny"
    exec(text.replace("TRIAL = True", "TRIAL = False"), {})
    assert checked[1].model.pretrained_model_name_or_path == "Qwen/Qwen-Image-Edit-2511" and checked[1].data.control_area == 512 * 512


def test_the_install_cell_is_the_same_everywhere():
    "Two lines; without internet docs/kaggle.md replaces the first by one with a folder of wheels."
    found = {cells_of(path)[0] for path in NOTEBOOKS}
    assert len(found) == 1
    install, remove = found.pop().splitlines()
    source = "git+https://github.com/qie-nb/qie_nb"
    assert install == f"%pip install -q --root-user-action=ignore {source} bitsandbytes"
    assert remove == "%pip uninstall -y --root-user-action=ignore torchao"
    with_wheels = "--no-index --find-links /kaggle/input/datasets/user/wheels qie_nb"
    assert offline() == {install: install.replace(source, with_wheels)}
    page = (ROOT/"docs"/"kaggle.md").read_text()
    assert f"`!pip wheel --no-deps -w wheels {source} optimum-quanto ninja bitsandbytes`" in page
    link = "https://github.com/qie-nb/qie_nb/blob/main/docs/kaggle.md#without-internet"
    assert "\n## Without internet\n" in page
    for path in (TRAIN, PRECOMPUTE, PREQUANTIZE):
        assert link in path.read_text(), path.name
    for path in NOTEBOOKS:
        text = path.read_text()
        assert "cell 2" not in text and "part 2" not in text, path.name
        assert "## 2. Configure and check" in text, "the headings that the first lines name"


# ---- versions (everyday) ----

def test_tested_versions_include_the_platforms():
    "The oldest tested version is the older platform's, as far as it is written."
    for name, (oldest, newest) in TRIED.items():
        older, newer = sorted(Version(versions(platform)[name]) for platform in PLATFORMS)
        begin = ".".join(str(n) for n in older.release[:len(Version(oldest).release)])
        assert oldest == begin and Version(newest) >= minor(str(newer)), f"{name}: {TRIED[name]}, but the platforms have {older} and {newer}"


def test_platforms_have_all_requirements_but_attached_wheels():
    "Otherwise they could not be installed without internet."
    for platform in PLATFORMS:
        missing = {Requirement(t).name.lower() for t in settings()["requirements"].split()} - versions(platform).keys() - {"optimum-quanto"}
        assert not missing, f"{platform} has no {missing}"


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_python_has_the_platforms_versions(platform):
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n).split('+')[0] for n in json.loads(sys.argv[1])}))"
    installed = json.loads(subprocess.run([python_of(platform), "-c", code, json.dumps(list(versions(platform)))], capture_output=True, text=True, check=True).stdout)
    assert installed == versions(platform)


# ---- metadata (everyday) ----

def test_metadata_has_every_setting():
    "Without them the client uses defaults, and a notebook without its GPU or inputs fails late."
    keys = {"id", "title", "code_file", "language", "kernel_type", "is_private", "enable_gpu", "enable_internet", "machine_shape",
            "dataset_sources", "competition_sources", "kernel_sources", "model_sources"}
    for folder, own in METADATA.items(): assert own.keys() == keys and (folder/own["code_file"]).is_file(), folder.name
    assert METADATA[TRAIN.parent]["kernel_sources"] == [METADATA[PRECOMPUTE.parent]["id"]]


@pytest.mark.slow
@pytest.mark.parametrize("folder", METADATA, ids=lambda f: f.name)
def test_the_published_client_accepts_the_metadata(folder, monkeypatch, capsys):
    "What `kaggle kernels push` sends, after the client's own checks."
    monkeypatch.setenv("KAGGLE_USERNAME", "user"), monkeypatch.setenv("KAGGLE_KEY", "0" * 32)
    api, server = pytest.importorskip("kaggle.api.kaggle_api_extended", reason="pip install kaggle").KaggleApi(), MagicMock()
    monkeypatch.setattr(api, "build_kaggle_client", lambda: server)
    api.kernels_push(str(folder))
    own, (sent,) = METADATA[folder], server.__enter__().kernels.kernels_api_client.save_kernel.call_args.args
    assert "does not resolve to the specified" not in capsys.readouterr().out
    assert sent.slug == own["id"] and sent.kernel_type == "notebook" and sent.machine_shape == "NvidiaTeslaT4" and sent.is_private and sent.enable_gpu
    assert sent.kernel_data_sources == own["kernel_sources"] and sent.dataset_data_sources == own["dataset_sources"] and sent.model_data_sources == own["model_sources"]
    assert len(json.loads(sent.text)["cells"]) == len(json.loads((folder/own["code_file"]).read_text())["cells"])


# ---- the imitation itself ----

LOOK = '''
import os, socket
def attempt(what, fn):
    try: fn(); print(what, "worked")
    except OSError as e: print(what, type(e).__name__, e.errno)
print(os.getcwd(), os.environ["KAGGLE_KERNEL_RUN_TYPE"], open("/kaggle/input/datasets/user/words/a.txt").read(), os.listdir("/kaggle/input/words"))
attempt("new", lambda: open("/kaggle/input/words/new.txt", "w"))
attempt("old", lambda: open("/kaggle/input/datasets/user/words/a.txt", "w"))
attempt("net", lambda: socket.create_connection(("93.184.215.14", 80), timeout=2))
open("kept.bin", "wb").write(bytes(1 << 20))
attempt("much", lambda: open("much.bin", "wb").write(bytes(9 << 20)))
os.remove("much.bin")'''


@pytest.mark.slow
def test_a_session_has_read_only_inputs_a_quota_and_no_internet(tmp_path):
    (tmp_path/"words").mkdir()
    (tmp_path/"words"/"a.txt").write_text("hello")
    run = run_notebook(notebook(tmp_path, LOOK), kaggle(tmp_path, {name: tmp_path/"words" for name in ("datasets/user/words", "words")}, quota=8 * MB))
    assert not run.error and run.inputs_written == [], run.error
    seen, *attempts = run.text().splitlines()
    assert seen == "/kaggle/working Batch hello ['a.txt']"
    assert attempts[:2] == ["new OSError 30", "old OSError 30"] and attempts[2].startswith("net") and "worked" not in attempts[2] and attempts[3:] == ["much OSError 28"]
    assert run.written == MB and [p.name for p in run.output.iterdir()] == ["kept.bin"]


# ---- the install cell ----

@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    "A folder to attach: this library, built without internet, and the wheels of `make places`."
    out, source = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("source")/"qie_nb"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".venv*", ".git", "demo_out", "*.egg-info", "__pycache__", "tests", "benchmarks", "docs"))
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, source], check=True, capture_output=True)
    if downloaded := os.environ.get("QIE_NB_WHEELS"): shutil.copytree(downloaded, out, ignore=lambda folder, names: [n for n in names if not n.endswith(".whl")], dirs_exist_ok=True)
    return out


@pytest.fixture
def all_wheels(wheels):
    if not any(wheels.glob("optimum_quanto-*.whl")): pytest.skip("QIE_NB_WHEELS does not name a folder with optimum-quanto's wheel; `make places` fills one")
    return wheels


OLD_TORCHAO = """
import os, subprocess, sys, sysconfig
subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", "qie_nb", "torchao"], check=True)
old = os.path.join(sysconfig.get_path("purelib"), "torchao-0.10.0.dist-info")
os.makedirs(old)
files = dict(METADATA="Metadata-Version: 2.1\\nName: torchao\\nVersion: 0.10.0\\n", INSTALLER="pip")
files["RECORD"] = "".join(f"torchao-0.10.0.dist-info/{name},,\\n" for name in [*files, "RECORD"])
for name, text in files.items(): open(f"{old}/{name}", "w").write(text)
"""


@pytest.mark.weekly
def test_the_install_cell_uses_attached_wheels_without_internet(wheels, tmp_path):
    "In the old layout; test_kaggle_faults attaches them in the new one."
    needs_root()
    after = 'import qie_nb, importlib.metadata as m\nprint(qie_nb.__file__, m.version("torch"), [d.name for d in m.distributions() if d.name == "torchao"])'
    install = cells_of(TRAIN)[0]
    for online, line in offline("/kaggle/input/wheels").items():
        install = install.replace(online, line)
    path = notebook(tmp_path, install, after, install) # a second run changes nothing
    run = run_notebook(path, kaggle(tmp_path, dict(wheels=wheels)), library=False, before=OLD_TORCHAO)
    assert not run.error, run.error
    assert run.text().count("Successfully") == 1 and run.asked == ()
    assert re.search(rf"site-packages/qie_nb/__init__.py {re.escape(metadata.version('torch'))} \[\]", run.text()), run.text()
    assert "Successfully uninstalled torchao-0.10.0" in run.text() and run.inputs_written == []


# ---- the notebooks run ----

def error_ratio(lora, tmp_path):
    "Error on photographs outside the training set, with the LoRA over without, as `make demo` measures it."
    write_pairs(tmp_path/"judge", 2, 6)
    config = make_config(demo_config(tmp_path/"judge"))
    judge = QwenImageEditTrainer(config).setup_predict()
    held = ImageDataset(config, samples=find_samples(config.train.val_path))
    held.set_areas(judge.components.areas)
    true = truths(judge, held)
    before = errors(answers(judge, held, (0,)), true)[0]
    return errors(answers(judge.load_lora(lora), held, (0,)), true)[0] / before


def outputs(run): return [o for c in run.notebook["cells"] for o in c.get("outputs", [])]
def images(run): return [o for o in outputs(run) if {"image/png", "image/jpeg"} & {*o.get("data", {})} or "<img" in str(o.get("data", {}).get("text/html"))]


def ran(path, platform, changes={}, install={}, **what):
    "A notebook's run: without error, within its quota, its inputs unchanged, and with everything shown without live widgets."
    run = run_notebook(path, platform, changes=install | changes, **what)
    assert not run.error, run.error
    assert run.asked == (() if install else asked_of_pip())
    assert run.inputs_written == [] and run.written < platform.quota
    forms = [[o.get("data", {}) for o in c.get("outputs", [])] + [{}] for c in run.notebook["cells"]]
    live = [form | cell[n + 1] for cell in forms for n, form in enumerate(cell) if any("widget-view" in kind for kind in form)]
    assert all("text/plain" in shown for shown in live), "a live widget without a static form"
    assert platform.name == "colab" or not live, "a batch run shows a live widget"
    red = ["".join(o["text"]) for o in outputs(run) if o.get("name") == "stderr"]
    assert not red, f"notebooks show this on red: {red}"
    return run


def trial_with(train): return {'trial = dict(preset="tiny", ': f'trial = dict(preset="tiny", train=dict({train}), '}


def own_versions(places, platform, request):
    "Options of a session: this Python, or a platform's own versions with the attached wheels."
    if not places: return {}, {}
    attached = "/kaggle/input/datasets/user/wheels" if platform == "kaggle" else "/content/drive/MyDrive/wheels"
    what = dict(python=python_of(platform), library=False, install=offline(attached))
    return what, {"datasets/user/wheels": request.getfixturevalue("all_wheels")}


each_python = pytest.mark.parametrize("places", [False, pytest.param(True, marks=pytest.mark.weekly)], ids=["this Python", "the platform's versions"])


@pytest.mark.slow
def test_the_optional_notebook_packs_a_cache_that_training_uses(tmp_path, capsys):
    run = ran(PRECOMPUTE, kaggle(tmp_path, quota=64 * MB), changes={'"duotone", 48)': '"duotone", 6)'})
    packed = next(run.output.rglob("packed"))
    assert {p.suffix for p in packed.iterdir()} == {".safetensors", ".json", ".sqlite"}
    pairs = make_pairs(tmp_path/"pairs", "duotone", 6)
    caches = [str(packed), str(tmp_path/"cache")]
    config = dict(preset="tiny", data=dict(dataset_path=str(pairs)), cache=dict(cache_dir=caches))
    QwenImageEditTrainer(config | dict(train=dict(output_dir=str(tmp_path/"out")))).cache_embeddings()
    assert "0 encoded" in capsys.readouterr().out


@pytest.mark.weekly # test_newcomer.py has the one notebook alone, every day
@pytest.mark.slow
@each_python
def test_kaggle_notebooks_hand_the_cache_over_train_and_resume(places, tmp_path, request):
    what, wheels = own_versions(places, "kaggle", request)
    platform = kaggle(tmp_path, wheels, quota=64 * MB)
    first = ran(PRECOMPUTE, platform, **what)
    packed = next(first.output.rglob("packed"))
    assert {p.suffix for p in packed.iterdir()} == {".safetensors", ".json", ".sqlite"}
    assert len(images(first)) == 1
    if places: assert "Successfully uninstalled torchao" in first.text()

    platform.inputs["/kaggle/input/notebooks/user/qie-nb-precompute"] = first.output
    second = ran(TRAIN, platform, **what)
    assert "0 encoded" in second.text() and not list(second.output.rglob("cache/pixel_latent/*/*")), "the attached cache was not used"
    assert len(images(second)) >= 2 and error_ratio(next(second.output.rglob("lora")), tmp_path) < 0.4

    platform.inputs["/kaggle/input/notebooks/user/qie-nb-train"] = second.output
    text = ran(TRAIN, platform, changes=trial_with("max_train_steps=152"), **what).text()
    assert re.search("trained 2 steps in .*, 152 in total: done", text), text[-3000:]


@pytest.mark.slow
@each_python
def test_colab_keeps_everything_on_drive_and_resumes(places, tmp_path, request):
    """In this Python a short run; with Colab's versions the whole trial, which learns the edit.

    Only the latter is resumed here: test_newcomer.py resumes Kaggle's notebook with each change, and weekly this one."""
    what, wheels = own_versions(places, "colab", request)
    (tmp_path/"drive").mkdir()
    for folder in wheels.values(): shutil.copytree(folder, tmp_path/"drive"/"wheels")
    platform = colab(tmp_path, drive=tmp_path/"drive", quota=64 * MB)
    few, steps = ({}, 150) if places else ({'"duotone", 48)': '"duotone", 12)'}, 20)
    def evaluated(text): return re.search(rf"^step {steps}: ", text, re.M) # at the end of the first session
    def there(name): return list((tmp_path/"drive"/"qie_nb"/"trial").rglob(name))
    first = ran(COLAB, platform, changes=few | trial_with(f"max_train_steps={steps}"), **what)
    assert len(images(first)) >= 2 and evaluated(first.text())
    assert there("pixel_latent") and there(f"step_{steps:08}") + there("epoch_*") and there("pytorch_lora_weights.safetensors")
    if not places: return
    assert error_ratio(tmp_path/"drive"/"qie_nb"/"trial"/"lora", tmp_path) < 0.4
    text = ran(COLAB, platform, changes=few | trial_with(f"max_train_steps={steps + 2}"), **what).text()
    assert "0 encoded" in text and f"training panel: step {steps + 2} of {steps + 2}" in text, text[-3000:]
    assert not evaluated(text), text[-3000:]


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize("name,places", [("kaggle", False), ("kaggle", True), ("colab", True)], ids=["this Python", "kaggle's versions", "colab's versions"])
def test_notebooks_start_two_processes_and_continue(name, places, tmp_path, request):
    what, wheels = own_versions(places, name, request)
    (tmp_path/"drive").mkdir()
    for folder in wheels.values() if name == "colab" else (): shutil.copytree(folder, tmp_path/"drive"/"wheels")
    platform = kaggle(tmp_path, wheels, quota=64 * MB) if name == "kaggle" else colab(tmp_path, drive=tmp_path/"drive", quota=64 * MB)
    path = TRAIN if name == "kaggle" else COLAB
    few = {'"duotone", 48)': '"duotone", 12)'}
    first = ran(path, platform, changes=few | trial_with("num_processes=2, max_train_steps=4"), **what)
    text = first.text()
    assert "precomputing in 2 processes" in text and "training in 2 processes, 8 samples a step" in text and re.search("4 in total: done|step 4 of 4", text), text[-3000:]
    if name == "kaggle": platform.inputs["/kaggle/input/notebooks/user/qie-nb-train"] = first.output
    text = ran(path, platform, changes=few | trial_with("num_processes=2, max_train_steps=6"), **what).text()
    assert "training in 2 processes" in text and re.search("trained 2 steps in .*, 6 in total: done|step 6 of 6", text), text[-3000:]


@pytest.mark.weekly
def test_training_from_a_prequantized_copy(tmp_path):
    "The copy is attached instead of the model and contains its modulation table."
    platform = kaggle(tmp_path, quota=64 * MB)
    platform.inputs["/kaggle/input/datasets/user/copy"] = next(ran(PREQUANTIZE, platform).output.rglob("model"))
    own_model = 'model=dict(pretrained_model_name_or_path=env.latest("model")), train=dict(max_train_steps=6), '
    changes = {'trial = dict(preset="tiny", ': f'trial = dict(preset="tiny", {own_model}', '"duotone", 48)': '"duotone", 6)'}
    run = ran(TRAIN, platform, changes=changes)
    assert "6 in total: done" in run.text() and not list(run.output.rglob("cache/modulation/*")), "the copy's own table was not used"


# small_disk.py in the kernel: a disk that shows 1.9 TB, a quota, and a hub that serves an attached folder and, as
# hf_xet does, keeps up to 10 GB of pieces beside the files unless a variable says otherwise
SMALL_DISK = """
import collections, os, shutil, threading
from pathlib import Path
from qie_nb.core import environment
from qie_nb.models import hub
from qie_nb.planning import disk_space

SERVED = Path("/kaggle/input/served")
WRITTEN = "/kaggle/working", "/kaggle/temp", os.environ["HOME"]
deleted, most, over = [], 0, threading.Event()

def shown(path):
    return collections.namedtuple("usage", "total used free")(8 * 10**12, 61 * 10**11, 19 * 10**11)

def used():
    total = 0
    for top in WRITTEN:
        for folder, _, names in os.walk(top):
            for name in names:
                try: total += os.lstat(os.path.join(folder, name)).st_size
                except OSError: pass # removed meanwhile
    return total

def look():
    global most
    most = max(most, used())

def watch():
    while not over.wait(0.02): look()

class Hub:
    folder = environment.hub_downloads(os.environ)
    def files(self, name, revision=None):
        found = [p for p in SERVED.rglob("*") if p.is_file()]
        return "c" * 40, {p.relative_to(SERVED).as_posix(): p.stat().st_size for p in found}
    def has(self, name, path, commit): return (self.folder/path).is_file()
    def get(self, name, path, commit):
        if not self.has(name, path, commit):
            (self.folder/path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(SERVED/path, self.folder/path)
            self.keep_pieces((SERVED/path).read_bytes())
            look()
        return self.folder/path
    def keep_pieces(self, data):
        limit = int(os.environ.get("HF_XET_CHUNK_CACHE_SIZE_BYTES", 10**10 * SCALE))
        pieces = self.folder.parent/"xet"
        pieces.mkdir(parents=True, exist_ok=True)
        with open(pieces/"pieces", "ab") as f: f.write(data[:max(0, limit - f.tell())])
    def release(self, path):
        deleted.append(path.relative_to(self.folder).as_posix())
        path.unlink()

shutil.disk_usage = shown
environment.SESSION_QUOTA = QUOTA

hub.HUB = Hub()
threading.Thread(target=watch, daemon=True).start()
"""
REAL_MODEL, REAL_QUOTA = 57.8e9, 57.6 * 2**30 # bytes of the published model, and of a session


def served_model(folder):
    "A model of 60 narrow blocks in bfloat16; the large components have five files."
    shutil.copytree(ROOT/"qie_nb"/"assets"/"tiny-edit", folder)
    config = json.loads((folder/"transformer"/"config.json").read_text()) | dict(num_layers=60)
    shutil.rmtree(folder/"transformer")
    QwenImageTransformer2DModel.from_config(config).bfloat16().save_pretrained(folder/"transformer")
    for name in ("text_encoder", "transformer"): divided(folder/name, 5)
    return folder


@pytest.mark.weekly
@each_python
def test_a_session_that_downloads_the_model_keeps_to_its_quota(places, tmp_path, request):
    "Precompute, training and edits in one session; the disk shows far more than a session may write."
    what, wheels = own_versions(places, "kaggle", request)
    served = served_model(tmp_path/"served")
    size = sum(n for n, _ in files_of(served).values())
    quota = int(REAL_QUOTA / REAL_MODEL * size)
    platform = kaggle(tmp_path, wheels | {"served": served}, quota=64 * MB)
    model = ( # without a table, which is larger than such a narrow model
        'model=dict(pretrained_model_name_or_path="someone/model", quantize="nf4", text_encoder_quantize="nf4", '
        "modulation_table=False, lora=dict(r=1, lora_alpha=1)), train=dict(max_train_steps=4, keep_checkpoints=1), ")
    changes = { # the doctor counts the published sizes of a model on the hub
        'trial = dict(preset="tiny", ': f'import small_disk\ntrial = dict(preset="tiny", {model}',
        '"duotone", 48)': '"duotone", 6)',
        "report = doctor(config).stop()": "from qie_nb.config import make_config",
        "config = report.config()": "report = config = make_config(config)",
        "compare_validation(trainer, 3).figure()":
            "compare_validation(trainer, 1, num_inference_steps=2).figure()",
        "show_tensorboard(config.logging.log_dir)":
            'print("most", small_disk.most, "deleted", *sorted(small_disk.deleted))'}
    disk = SMALL_DISK.replace("QUOTA\n", f"{quota}\n").replace("SCALE", str(size / REAL_MODEL))
    text = ran(TRAIN, platform, changes=changes, files={"modules/small_disk.py": disk}, **what).text()
    most, deleted = re.search(r"^most (\d+) deleted(.*)$", text, re.M).groups()
    shards = [f"{name}/model-{n:05}-of-00005.safetensors"
              for name in ("text_encoder", "transformer") for n in range(1, 6)]
    assert int(most) < quota, f"{int(most) / MB:.1f} of {quota / MB:.1f} MB"
    assert deleted.split() == shards, "each downloaded file is deleted once it is quantized"


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize("name", ["end_to_end/test_main_job", "parity/test_pipelines", "parity/test_image_positions", "encoding/test_prompts", "models/test_modulation", "lora/test_adapters", "test_cache"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_everyday_tests_with_the_platforms_versions(platform, name, all_wheels, tmp_path):
    "After the install cell, on the checkout. No session end is known there, because it would add checkpoints to every run."
    python = python_of(platform)
    assert (ROOT/"tests"/f"{name}.py").is_file()
    steps = f"""{python} -m pip install -q --no-index --find-links {all_wheels} qie_nb bitsandbytes && {python} -m pip uninstall -y torchao &&
        cd {ROOT} && PYTHONPATH={ROOT} {python} -m pytest -m 'not slow' --tb=short tests/{name}.py"""
    home, done, changed = session(colab(tmp_path, {"wheels": all_wheels}, quota=2048 * MB), ["bash", "-c", steps], python, library=False, timeout=3600)
    assert done.returncode == 0 and changed == [], done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.weekly
@pytest.mark.slow
def test_places_share_caches_and_compute_the_same_prompt_embeddings(tmp_path):
    pythons = dict(here=sys.executable) | {p: python_of(p) for p in PLATFORMS}
    for variant, n in script.CASES: shutil.copytree(tiny_folder(variant), tmp_path/variant, dirs_exist_ok=True)
    for name, n in (("one", 1), ("three", 3)): random_pairs(tmp_path/name, [(50, 75), (180, 90)], n)
    caches = {p: tmp_path/f"cache of {p}" for p in pythons}
    def run(place, *args):
        done = subprocess.run([pythons[place], script.__file__, tmp_path, *args], capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=str(ROOT)))
        assert done.returncode == 0, f"{place}: {done.stderr[-3000:]}"
        return done.stdout
    entries = lambda: {p: {f for f in files_of(c) if ".locks" not in f} for p, c in caches.items()}
    for place in pythons: assert run(place, tmp_path/place, caches[place]).count("encoded") == 2
    made, found = entries(), {p: load_file(tmp_path/p) for p in pythons}
    assert all(made[p] == made["here"] and len(made[p]) > 30 for p in pythons)
    for place in pythons:
        said = run(place, "-", *(c for p, c in caches.items() if p != place))
        assert said.count(" 0 encoded") == 4 and "preparing" not in said, said
    assert entries() == made, "something was added to a cache"
    for variant, n in script.CASES:
        expected = found["here"][f"{variant} {n} pipeline"]
        for place, name in itertools.product(pythons, ("ours, shared", "ours, whole", "pipeline")):
            torch.testing.assert_close(found[place][f"{variant} {n} {name}"], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
