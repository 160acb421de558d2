"""The Kaggle and Colab notebooks in imitations of both: read-only inputs, a small working folder, no internet, batch runs.
With the platforms' own library versions where QIE_NB_KAGGLE_PYTHON and QIE_NB_COLAB_PYTHON name such a Python and QIE_NB_WHEELS a folder of wheels (`make places` does)."""
import ast, functools, importlib, json, os, re, shutil, subprocess, sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from fake_kaggle import colab, kaggle, may_install, run_notebook, session
from qie_nb.planning.doctor import TRIED
from test_project import settings

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT/"kaggle").rglob("*.ipynb"))
FOLDERS = sorted(p.parent for p in (ROOT/"kaggle").glob("*/kernel-metadata.json"))
TRAIN = ROOT/"kaggle"/"train"/"train.ipynb"
PLATFORMS = dict(kaggle=kaggle, colab=colab)
MB = 1 << 20


def notebook(folder, *cells, name="notebook.ipynb"):
    cells = [dict(cell_type="code", id=f"cell{n}", metadata={}, source=c, outputs=[], execution_count=None) for n, c in enumerate(cells)]
    (folder/name).write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)))
    return folder/name


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

@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_only_call_the_library(path):
    cells = cells_of(path)
    assert len(cells) <= 5 and all(len(c.splitlines()) <= 20 for c in cells)
    for cell in cells:
        for node in ast.walk(ast.parse(cell)): assert not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.Try, ast.Lambda)), cell


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_names_in_cells_exist(path):
    objects = {}
    for node in ast.walk(ast.parse("\n".join(cells_of(path)))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("qie_nb"):
            for a in node.names: objects[a.name] = getattr(importlib.import_module(node.module), a.name)
    owners = {"env": objects["detect_environment"](), "trainer": objects["QwenImageEditTrainer"]}
    for owner, name in re.findall(r"\b(env|trainer)\.(\w+)", "\n".join(cells_of(path))):
        assert hasattr(owners[owner], name) or (owner, name) == ("trainer", "cache_dir"), f"{owner}.{name}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_settings_in_cells_are_known(path, monkeypatch, tmp_path):
    "The second cell, with a doctor that only checks the configuration."
    import qie_nb.planning.doctor, qie_nb.tiny.photos
    from qie_nb.config import make_config
    checked = []

    class Report:
        def __init__(self, config, **_): checked.append(make_config(config))
        def stop(self): return self
        def config(self): return checked[-1]
    monkeypatch.setenv("QIE_NB_ROOT", str(tmp_path))
    monkeypatch.setattr(qie_nb.planning.doctor, "doctor", Report)
    monkeypatch.setattr(qie_nb.tiny.photos, "make_pairs", lambda path, *_: str(path))
    exec(cells_of(path)[1], {})
    assert checked[0].model.pretrained_model_name_or_path == "tiny"


def test_the_install_cell_is_the_same_everywhere():
    first, colabs = {cells_of(p)[0] for p in (ROOT/"kaggle").glob("*/*.ipynb")}, cells_of(ROOT/"kaggle"/"colab.ipynb")[0]
    assert len(first) == 1 and not re.search(r"\btorch\b", colabs + next(iter(first)))
    assert colabs.splitlines()[-2] == next(iter(first)).splitlines()[-2] and "bitsandbytes" in colabs


# ---- versions (everyday) ----

def test_lower_bounds_are_the_older_platforms_versions():
    sets = [versions(p) for p in PLATFORMS]
    for text in settings()["requirements"].split():
        r = Requirement(text)
        if not r.specifier: continue
        (bound,), oldest = [Version(s.version) for s in r.specifier], min(Version(s[r.name.lower()]) for s in sets)
        assert bound == Version(".".join(str(n) for n in oldest.release[:len(bound.release)])), f"{r} and {oldest} of the older platform"


def test_versions_that_the_doctor_accepts_include_the_platforms():
    for name, (oldest, newest) in TRIED.items():
        of = [minor(versions(p)[name]) for p in PLATFORMS]
        assert Version(oldest) == min(of) and Version(newest) >= max(of), f"{name}: {TRIED[name]}, but the platforms have {of}"


def test_platforms_have_all_requirements_but_attached_wheels():
    "Otherwise they could not be installed without internet."
    for platform in PLATFORMS:
        missing = {Requirement(t).name.lower() for t in settings()["requirements"].split()} - versions(platform).keys() - {"optimum-quanto"}
        assert not missing, f"{platform} has no {missing}"


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
    own = {f.name: json.loads((f/"kernel-metadata.json").read_text()) for f in FOLDERS}
    for folder in FOLDERS: assert own[folder.name].keys() == keys and (folder/own[folder.name]["code_file"]).is_file(), folder.name
    assert own["train"]["kernel_sources"] == [own["precompute"]["id"]]


class Server:
    "Replaces Kaggle's server: keeps what the client sends."
    def __init__(self): self.kernels = self.kernels_api_client = self
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def save_kernel(self, request): self.request = request


def pushed(folder, monkeypatch):
    "What `kaggle kernels push` sends for a folder, after the published client's own checks."
    monkeypatch.setenv("KAGGLE_USERNAME", "user"), monkeypatch.setenv("KAGGLE_KEY", "0" * 32)
    api = pytest.importorskip("kaggle.api.kaggle_api_extended", reason="pip install kaggle").KaggleApi()
    server = Server()
    monkeypatch.setattr(api, "build_kaggle_client", lambda: server)
    api.kernels_push(str(folder))
    return server.request


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_the_published_client_accepts_the_metadata(folder, monkeypatch, capsys):
    own = json.loads((folder/"kernel-metadata.json").read_text())
    sent = pushed(folder, monkeypatch)
    assert "does not resolve to the specified" not in capsys.readouterr().out
    assert sent.slug == own["id"] and sent.kernel_type == "notebook" and sent.machine_shape == "NvidiaTeslaT4" and sent.is_private and sent.enable_gpu
    assert sent.kernel_data_sources == own["kernel_sources"] and sent.dataset_data_sources == own["dataset_sources"] and sent.model_data_sources == own["model_sources"]
    assert len(json.loads(sent.text)["cells"]) == len(json.loads((folder/own["code_file"]).read_text())["cells"])


# ---- the imitation itself ----

LOOK = '''import os, shutil, socket
seen = dict(cwd=os.getcwd(), run=os.environ.get("KAGGLE_KERNEL_RUN_TYPE"), attached=open("/kaggle/input/datasets/user/words/a.txt").read(), old=os.listdir("/kaggle/input/words"))
print(sorted(seen.items()))'''
WRITES = '''for path in ("/kaggle/input/words/new.txt", "/kaggle/input/datasets/user/words/a.txt"):
    try: open(path, "w").write("x"); print("written")
    except OSError as e: print("refused", e.errno)'''
NET = '''try: socket.create_connection(("93.184.215.14", 80), timeout=2); print("online")
except OSError as e: print("offline")'''
FULL = '''open("kept.bin", "wb").write(bytes(1 << 20))
try: open("much.bin", "wb").write(bytes(9 << 20)); print("room")
except OSError as e: os.remove("much.bin"); print("full", e.errno)'''


@pytest.mark.slow
def test_a_session_has_read_only_inputs_a_quota_and_no_internet(tmp_path):
    (tmp_path/"words").mkdir()
    (tmp_path/"words"/"a.txt").write_text("hello")
    platform = kaggle(tmp_path, {"datasets/user/words": tmp_path/"words", "words": tmp_path/"words"}, quota=8 * MB)
    run = run_notebook(notebook(tmp_path, LOOK, WRITES, NET, FULL), platform)
    text = run.text()
    assert "('attached', 'hello')" in text and run.inputs_written == []
    assert not run.error, run.error
    assert "'/kaggle/working'" in text and "('run', 'Batch')" in text and "('old', ['a.txt'])" in text
    assert text.count("refused 30") == 2 and "offline" in text and "full 28" in text
    assert run.written == MB and [p.name for p in run.output.iterdir()] == ["kept.bin"]


# ---- the install cell ----

@functools.lru_cache
def library_wheel(folder) -> Path:
    "This library as a wheel, built without internet."
    copy = Path(folder)/"source"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv*", ".git", "demo_out", "*.egg-info", "__pycache__", "tests", "benchmarks", "docs"))
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, str(copy)], check=True, capture_output=True)
    return next(Path(folder).glob("qie_nb-*.whl"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    "A folder to attach: this library, and the wheels of `make places`."
    folder = tmp_path_factory.mktemp("wheels")
    built, out = library_wheel(str(folder)), tmp_path_factory.mktemp("attached")
    downloaded = os.environ.get("QIE_NB_WHEELS")
    for w in [built, *(Path(downloaded).glob("*.whl") if downloaded else [])]:
        if not (out/w.name).exists(): shutil.copy(w, out)
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


@pytest.mark.slow
@pytest.mark.parametrize("slug", ["datasets/user/wheels", "wheels"])
def test_the_install_cell_uses_attached_wheels_without_internet(slug, wheels, tmp_path):
    "With this Python, without the library and with an old torchao, in its own session."
    needs_root()
    after = 'import qie_nb, importlib.metadata as m\nprint(qie_nb.__file__, m.version("torch"), [d.name for d in m.distributions() if d.name == "torchao"])'
    run = run_notebook(notebook(tmp_path, cells_of(TRAIN)[0], after), kaggle(tmp_path, {slug: wheels}), library=False, before=OLD_TORCHAO)
    assert not run.error, run.error
    assert re.search(rf"site-packages/qie_nb/__init__.py {re.escape(metadata.version('torch'))} \[\]", run.text()), run.text()
    assert "Successfully uninstalled torchao-0.10.0" in run.text() and run.inputs_written == []


# ---- the notebooks run ----

def error_ratio(lora, tmp_path):
    "Error on photographs outside the training set, with the LoRA over without, as `make demo` measures it."
    from qie_nb.config import make_config
    from qie_nb.data.dataset import ImageDataset
    from qie_nb.tiny.demo import answers, demo_config, errors, truths, write_pairs
    from qie_nb.data.samples import find_samples
    from qie_nb.trainer import QwenImageEditTrainer
    write_pairs(tmp_path/"judge", 2, 6)
    config = make_config(demo_config(tmp_path/"judge"))
    judge = QwenImageEditTrainer(config).setup_predict()
    held = ImageDataset(config, samples=find_samples(config.train.val_path))
    held.set_areas(judge.components.areas)
    error = lambda: errors(answers(judge, held, (0,)), true)[0]
    true = truths(judge, held)
    before = error()
    judge.load_lora(lora)
    return error() / before


def check(run, platform):
    "A notebook ends without error within its quota, leaves its inputs unchanged, and shows everything without live widgets."
    assert not run.error, run.error
    assert run.inputs_written == [] and run.written < platform.quota
    for c in run.notebook["cells"]:
        forms = [o.get("data", {}) for o in c.get("outputs", [])]
        live = [n for n, d in enumerate(forms) if any("widget-view" in kind for kind in d)]
        assert not live or platform.name == "colab", "a batch run shows a live widget"
        for n in live: assert "text/plain" in forms[n] or "text/plain" in forms[n + 1], "a live widget without a static form"
    red = [o["text"] for c in run.notebook["cells"] for o in c.get("outputs", []) if o.get("name") == "stderr" and " left" in "".join(o["text"])]
    assert not red or platform.name == "colab", "saved notebooks show stderr on red, and progress is not an error"
    return run


def images(run): return [o for c in run.notebook["cells"] for o in c.get("outputs", []) if "image/png" in o.get("data", {}) or "<img" in str(o.get("data", {}).get("text/html"))]


def both(platform, **what):
    "Precompute in one session, then train from its attached output in the next."
    first = check(run_notebook(ROOT/"kaggle"/"precompute"/"precompute.ipynb", platform, **what), platform)
    packed = next(first.output.rglob("packed"))
    assert {p.suffix for p in packed.iterdir()} == {".safetensors", ".json"} and len(images(first)) == 1
    platform.inputs["/kaggle/input/notebooks/user/qie-nb-precompute"] = first.output
    second = check(run_notebook(TRAIN, platform, **what), platform)
    assert "0 encoded" in second.text() and not list(second.output.rglob("cache/pixel_latent/*/*")), "the attached cache was not used"
    assert len(images(second)) >= 2
    return first, second


def steps(n): return {"STEPS, RATE, BATCH = 150": f"STEPS, RATE, BATCH = {n}"}


def resume(platform, run, before, after, **what):
    "The next session, with the last output attached; only the number of steps is changed."
    platform.inputs["/kaggle/input/notebooks/user/qie-nb-train"] = run.output
    third = check(run_notebook(TRAIN, platform, changes=steps(after), **what), platform)
    assert re.search(rf"trained {after - before} steps in .*, {after} in total: done", third.text()), third.text()[-3000:]


def attached(places, platform, request):
    "Options of a session: this Python, or a platform's own versions with the attached wheels."
    if not places: return {}, {}
    wheels = request.getfixturevalue("all_wheels")
    return dict(python=python_of(platform), library=False), {"datasets/user/wheels": wheels}


OWN = pytest.mark.parametrize("places", [False, True], ids=["this Python", "the platform's versions"])

@pytest.mark.slow
@OWN
def test_kaggle_notebooks_hand_the_cache_over_train_and_resume(places, tmp_path, request):
    what, wheels = attached(places, "kaggle", request)
    platform = kaggle(tmp_path, wheels, quota=64 * MB)
    first, second = both(platform, **what)
    if places: assert "Successfully uninstalled torchao" in first.text()
    assert error_ratio(next(second.output.rglob("lora")), tmp_path) < 0.4
    resume(platform, second, 150, 152, **what)


@pytest.mark.slow
@OWN
def test_colab_keeps_everything_on_drive_and_resumes(places, tmp_path, request):
    what, wheels = attached(places, "colab", request)
    (tmp_path/"drive").mkdir()
    for folder in wheels.values(): shutil.copytree(folder, tmp_path/"drive"/"wheels")
    platform = colab(tmp_path, drive=tmp_path/"drive", quota=64 * MB)
    first = check(run_notebook(ROOT/"kaggle"/"colab.ipynb", platform, **what), platform)
    assert len(images(first)) >= 2 and error_ratio(tmp_path/"drive"/"qie_nb"/"lora", tmp_path) < 0.4
    text = check(run_notebook(ROOT/"kaggle"/"colab.ipynb", platform, changes=steps(152), **what), platform).text()
    assert "0 encoded" in text and "training panel: step 152 of 152" in text and not re.search("step 50: (held-out|validation)", text), text[-3000:]


@pytest.mark.slow
def test_training_from_a_prequantized_copy(tmp_path):
    "The copy is attached instead of the model and contains its modulation table."
    platform = kaggle(tmp_path, quota=64 * MB)
    first = check(run_notebook(ROOT/"kaggle"/"prequantize"/"prequantize.ipynb", platform), platform)
    platform.inputs["/kaggle/input/datasets/user/copy"] = next(first.output.rglob("model"))
    changes = steps(6) | {'MODEL, SIZE, PRECISION = "tiny",': 'MODEL, SIZE, PRECISION = env.latest("model"),', '"duotone", 48)': '"duotone", 6)',
                          'num_inference_steps=8 if MODEL == "tiny" else 20': "num_inference_steps=8"}
    second = check(run_notebook(TRAIN, platform, changes=changes), platform)
    assert "6 in total: done" in second.text() and not list(second.output.rglob("cache/modulation/*")), "the copy's own table was not used"


TESTS = ["end_to_end/test_main_job", "parity/test_pipelines", "models/test_modulation", "lora/test_adapters", "test_cache"]

@pytest.mark.slow
@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_everyday_tests_with_the_platforms_versions(platform, name, all_wheels, tmp_path):
    "After the install cell, on the checkout. No session end is known there, because it would add checkpoints to every run."
    python = python_of(platform)
    assert (ROOT/"tests"/f"{name}.py").is_file()
    steps = f"""{python} -m pip install -q --no-index --find-links {all_wheels} qie_nb bitsandbytes && {python} -m pip uninstall -y torchao &&
        cd {ROOT} && PYTHONPATH={ROOT} {python} -m pytest -m 'not slow' --tb=short tests/{name}.py"""
    home, done, changed = session(colab(tmp_path, {"wheels": all_wheels}, quota=2048 * MB), ["bash", "-c", steps], python, library=False, timeout=3600)
    assert done.returncode == 0 and changed == [], done.stdout[-6000:] + done.stderr[-2000:]
