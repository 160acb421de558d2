"""The notebooks for Kaggle as Kaggle runs them: read-only inputs, a small working folder, no internet, nobody who watches; with its library versions, and with
Colab's, where QIE_NB_KAGGLE_PYTHON and QIE_NB_COLAB_PYTHON name such a Python and QIE_NB_WHEELS a folder of wheels (`make places` does)."""
import functools, json, os, re, shutil, subprocess, sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from fake_kaggle import colab, kaggle, may_install, run_notebook, session, unsharing
from qie_nb.planning.doctor import TRIED
from test_project import settings

ROOT = Path(__file__).parents[2]
PLACES = dict(kaggle=kaggle, colab=colab)
MB = 1 << 20


def notebook(folder, *cells, name="notebook.ipynb"):
    made = [dict(cell_type="code", id=f"cell{n}", metadata={}, source=c, outputs=[], execution_count=None) for n, c in enumerate(cells)]
    (folder/name).write_text(json.dumps(dict(cells=made, metadata={}, nbformat=4, nbformat_minor=5)))
    return folder/name


def own_packages():
    if not may_install(): pytest.skip("a session that installs takes mounts of its own (unshare, as root)")


def python_of(place):
    "The Python with a place's versions; a test that needs it is skipped by name where there is none."
    name = f"QIE_NB_{place.upper()}_PYTHON"
    if not os.environ.get(name): pytest.skip(f"{name} does not name a Python with the versions of constraints/{place}.txt; `make places` makes one")
    own_packages()
    return os.environ[name]


def versions(place):
    lines = [line.split("==") for line in (ROOT/"constraints"/f"{place}.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {name.lower(): version for name, version in lines}


def minor(version): return Version(".".join(map(str, Version(version).release[:2])))


# ---- the place itself ------------------------------------------------------------------------------------------------------------------

LOOK = '''import os, shutil, socket
seen = dict(cwd=os.getcwd(), run=os.environ.get("KAGGLE_KERNEL_RUN_TYPE"), attached=open("/kaggle/input/datasets/somebody/words/a.txt").read(), old=os.listdir("/kaggle/input/words"))
print(sorted(seen.items()))'''
WRITES = '''for path in ("/kaggle/input/words/new.txt", "/kaggle/input/datasets/somebody/words/a.txt"):
    try: open(path, "w").write("x"); print("written")
    except OSError as e: print("refused", e.errno)'''
NET = '''try: socket.create_connection(("93.184.215.14", 80), timeout=2); print("online")
except OSError as e: print("offline")'''
FULL = '''open("kept.bin", "wb").write(bytes(1 << 20))
try: open("much.bin", "wb").write(bytes(9 << 20)); print("room")
except OSError as e: os.remove("much.bin"); print("full", e.errno)'''


def pretended(run): # without mounts the folder's size is known at the end alone
    assert "No space left on device" in run.error and "('attached', 'hello')" in run.text() and run.inputs_written == []


def test_a_session_reads_its_inputs_fills_its_folder_and_reaches_nobody(tmp_path):
    (tmp_path/"words").mkdir()
    (tmp_path/"words"/"a.txt").write_text("hello")
    place = kaggle(tmp_path, {"datasets/somebody/words": tmp_path/"words", "words": tmp_path/"words"}, quota=8 * MB)
    run = run_notebook(notebook(tmp_path, LOOK, WRITES, NET, FULL), place)
    if not unsharing(): return pretended(run)
    assert not run.error, run.error
    text = run.text()
    assert "'/kaggle/working'" in text and "('run', 'Batch')" in text and "('attached', 'hello')" in text and "('old', ['a.txt'])" in text
    assert text.count("refused 30") == 2 and "offline" in text and "full 28" in text
    assert run.written == MB and [p.name for p in run.output.iterdir()] == ["kept.bin"] and run.inputs_written == []


def test_a_session_leaves_no_trace_but_its_output(tmp_path):
    own_packages()
    cells = ['import importlib.metadata as m, sys\nprint(m.version("six"))', 'get_ipython().run_line_magic("pip", "uninstall -y six")', 'print(__import__("importlib").util.find_spec("six"))',
             'open("/etc/qie_nb_trace", "w").write("x"); open("/tmp/qie_nb_trace", "w").write("x")']
    run = run_notebook(notebook(tmp_path, *cells), kaggle(tmp_path))
    assert not run.error and "Successfully uninstalled six" in run.text() and "None" in run.text()
    assert not any(Path(f).exists() for f in ("/etc/qie_nb_trace", "/tmp/qie_nb_trace"))
    subprocess.run([sys.executable, "-c", "import six"], check=True)


def test_a_cell_that_fails_ends_the_session_and_says_why(tmp_path):
    run = run_notebook(notebook(tmp_path, 'print("first")', 'raise ValueError("wrong `folder`")', 'print("third")'), kaggle(tmp_path))
    assert "wrong `folder`" in run.error and "first" in run.text() and "third" not in run.text()


def test_drive_stays_on_colab_and_the_rest_does_not(tmp_path):
    (tmp_path/"drive").mkdir()
    place = colab(tmp_path, drive=tmp_path/"drive", quota=8 * MB, secrets=dict(HF_TOKEN="abc"))
    first = run_notebook(notebook(tmp_path, 'from google.colab import drive, userdata\ndrive.mount("/content/drive")\nprint(userdata.get("HF_TOKEN"))',
                                  'open("/content/drive/MyDrive/kept.txt", "w").write("1"); open("/content/lost.txt", "w").write("2")'), place)
    assert not first.error and "abc" in first.text() and [p.name for p in first.output.rglob("*.txt")] == ["lost.txt"]
    second = run_notebook(notebook(tmp_path, 'import os; print(os.path.exists("/content/lost.txt"), open("/content/drive/MyDrive/kept.txt").read())'), place)
    assert "False 1" in second.text(), second.error


def test_a_secret_that_is_missing_is_missing(tmp_path):
    cell = 'from kaggle_secrets import UserSecretsClient, BackendError\nprint(UserSecretsClient().get_secret("A"))\ntry: UserSecretsClient().get_secret("B")\nexcept BackendError as e: print(e)'
    run = run_notebook(notebook(tmp_path, cell), kaggle(tmp_path, secrets=dict(A="one")))
    assert "one" in run.text() and "No user secrets exist" in run.text(), run.error


# ---- versions --------------------------------------------------------------------------------------------------------------------------

def test_lower_bounds_are_what_is_tested():
    "A bound is the older of the two places' versions: with less nobody has tried it, and with more a place would have to upgrade."
    sets = [versions(p) for p in PLACES]
    for text in settings()["requirements"].split():
        r = Requirement(text)
        if not r.specifier: continue
        (bound,), oldest = [Version(s.version) for s in r.specifier], min(Version(s[r.name.lower()]) for s in sets)
        assert bound == Version(".".join(str(n) for n in oldest.release[:len(bound.release)])), f"{r} and {oldest} of the older place"


def test_what_the_doctor_calls_tried_begins_with_the_older_place():
    for name, (oldest, newest) in TRIED.items():
        of = [minor(versions(p)[name]) for p in PLACES]
        assert Version(oldest) == min(of) and Version(newest) >= max(of), f"{name}: {TRIED[name]} is called tried, and the places have {of}"


def test_the_places_have_all_but_what_the_wheels_bring():
    "What is neither there nor attached could not be installed without internet."
    wheels = {"optimum-quanto"}
    for place in PLACES:
        lacking = {Requirement(t).name.lower() for t in settings()["requirements"].split()} - versions(place).keys() - wheels
        assert not lacking, f"{place} has no {lacking}"


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_the_environment_is_the_places(place):
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n).split('+')[0] for n in json.loads(sys.argv[1])}))"
    there = json.loads(subprocess.run([python_of(place), "-c", code, json.dumps(list(versions(place)))], capture_output=True, text=True, check=True).stdout)
    assert there == versions(place)


# ---- the install cell ------------------------------------------------------------------------------------------------------------------

def cells_of(path): return ["".join(c["source"]) for c in json.loads(Path(path).read_text())["cells"] if c["cell_type"] == "code"]


@functools.lru_cache
def library_wheel(folder) -> Path:
    "This library as a wheel, made once a session without asking the internet."
    copy = Path(folder)/"source"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv*", ".git", "demo_out", "*.egg-info", "__pycache__", "tests", "benchmarks", "docs"))
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, str(copy)], check=True, capture_output=True)
    return next(Path(folder).glob("qie_nb-*.whl"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    "A folder to attach: this library, and what `make places` has downloaded for the places."
    folder = tmp_path_factory.mktemp("wheels")
    made, out = library_wheel(str(folder)), tmp_path_factory.mktemp("attached")
    downloaded = os.environ.get("QIE_NB_WHEELS")
    for w in [made, *(Path(downloaded).glob("*.whl") if downloaded else [])]:
        if not (out/w.name).exists(): shutil.copy(w, out)
    return out


def test_the_notebooks_begin_with_the_same_install_cell():
    first, colabs = {cells_of(p)[0] for p in (ROOT/"kaggle").glob("*/*.ipynb")}, cells_of(ROOT/"kaggle"/"colab.ipynb")[0]
    assert len(first) == 1 and not re.search(r"\btorch\b", colabs + next(iter(first)))
    assert colabs.splitlines()[-2] == next(iter(first)).splitlines()[-2] and "bitsandbytes" in colabs


ANOTHER_PLACE = """
import os, subprocess, sys, sysconfig
subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", "qie_nb", "torchao"], check=True)
old = os.path.join(sysconfig.get_path("purelib"), "torchao-0.10.0.dist-info")
os.makedirs(old)
files = dict(METADATA="Metadata-Version: 2.1\\nName: torchao\\nVersion: 0.10.0\\n", INSTALLER="pip")
files["RECORD"] = "".join(f"torchao-0.10.0.dist-info/{name},,\\n" for name in [*files, "RECORD"])
for name, text in files.items(): open(f"{old}/{name}", "w").write(text)
"""


@pytest.mark.parametrize("slug", ["datasets/somebody/wheels", pytest.param("wheels", marks=pytest.mark.slow)])
def test_the_install_cell_installs_from_attached_wheels_without_internet(slug, wheels, tmp_path):
    "With the present Python, from which the library is taken away first and which gets an old torchao; all of it in a session of its own."
    own_packages()
    after = 'import qie_nb, importlib.metadata as m\nprint(qie_nb.__file__, m.version("torch"), [d.name for d in m.distributions() if d.name == "torchao"])'
    run = run_notebook(notebook(tmp_path, cells_of(ROOT/"kaggle"/"train"/"train.ipynb")[0], after), kaggle(tmp_path, {slug: wheels}), library=False, before=ANOTHER_PLACE)
    assert not run.error, run.error
    assert re.search(rf"site-packages/qie_nb/__init__.py {re.escape(metadata.version('torch'))} \[\]", run.text()), run.text()
    assert "Successfully uninstalled torchao-0.10.0" in run.text() and run.inputs_written == []


# ---- what is pushed --------------------------------------------------------------------------------------------------------------------

class Recorded:
    "Stands for Kaggle's server: keeps what the client would have sent."
    def __init__(self): self.kernels = self.kernels_api_client = self
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def save_kernel(self, request): self.request = request


def pushed(folder, monkeypatch):
    "What `kaggle kernels push` sends of a folder, after the published client's own checks."
    monkeypatch.setenv("KAGGLE_USERNAME", "nobody"), monkeypatch.setenv("KAGGLE_KEY", "0" * 32)
    api = pytest.importorskip("kaggle.api.kaggle_api_extended", reason="pip install kaggle").KaggleApi()
    server = Recorded()
    monkeypatch.setattr(api, "build_kaggle_client", lambda: server)
    api.kernels_push(str(folder))
    return server.request


FOLDERS = sorted(p.parent for p in (ROOT/"kaggle").glob("*/kernel-metadata.json"))

@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_the_published_client_accepts_the_metadata(folder, monkeypatch, tmp_path, capsys):
    own = json.loads((folder/"kernel-metadata.json").read_text())
    sent = pushed(folder, monkeypatch)
    assert "does not resolve to the specified" not in capsys.readouterr().out
    assert sent.slug == own["id"] and sent.kernel_type == "notebook" and sent.machine_shape == "NvidiaTeslaT4" and sent.is_private and sent.enable_gpu
    assert sent.kernel_data_sources == own["kernel_sources"] and sent.dataset_data_sources == own["dataset_sources"] and sent.model_data_sources == own["model_sources"]
    assert len(json.loads(sent.text)["cells"]) == len(json.loads((folder/own["code_file"]).read_text())["cells"])
    for wrong in (dict(title="qie"), dict(code_file="none.ipynb"), dict(kernel_type="book"), dict(kernel_sources=["nobody"]), dict(dataset_sources=["nobody"]), dict(model_sources=["a/b"])):
        shutil.copytree(folder, tmp_path/"wrong", dirs_exist_ok=True)
        (tmp_path/"wrong"/"kernel-metadata.json").write_text(json.dumps(own | wrong))
        with pytest.raises(ValueError): pushed(tmp_path/"wrong", monkeypatch)


def test_metadata_names_each_setting_that_the_client_reads():
    "Those it would otherwise take a default for: a notebook without its GPU or its sources runs, and fails late."
    wanted = {"id", "title", "code_file", "language", "kernel_type", "is_private", "enable_gpu", "enable_internet", "machine_shape",
              "dataset_sources", "competition_sources", "kernel_sources", "model_sources"}
    for folder in FOLDERS: assert json.loads((folder/"kernel-metadata.json").read_text()).keys() == wanted, folder.name


def test_what_comes_after_names_what_comes_before():
    ids = {f.name: json.loads((f/"kernel-metadata.json").read_text()) for f in FOLDERS}
    assert ids["train"]["kernel_sources"] == [ids["precompute"]["id"]]


# ---- the notebooks ---------------------------------------------------------------------------------------------------------------------

def ratio(lora, tmp_path):
    "Error on photographs that nothing was trained on, with the LoRA over without, as `make demo` measures it."
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


def check(run, place):
    "What holds for every notebook: it ends, within the room, leaving its inputs as they were; all is told without a live widget."
    assert not run.error, run.error
    assert run.inputs_written == [] and run.written < place.quota
    for c in run.notebook["cells"]:
        forms = [o.get("data", {}) for o in c.get("outputs", [])]
        live = [n for n, d in enumerate(forms) if any("widget-view" in kind for kind in d)]
        assert not live or place.name == "colab", "nobody watches a batch run"
        for n in live: assert "text/plain" in forms[n] or "text/plain" in forms[n + 1], "a live widget has its still form with it"
    red = [o["text"] for c in run.notebook["cells"] for o in c.get("outputs", []) if o.get("name") == "stderr" and " left" in "".join(o["text"])]
    assert not red or place.name == "colab", "progress is no error: saved notebooks show stderr on red"
    return run


def pictures(run): return [o for c in run.notebook["cells"] for o in c.get("outputs", []) if "image/png" in o.get("data", {}) or "<img" in str(o.get("data", {}).get("text/html"))]


def both(place, changes={}, **what):
    "Precompute in one session, train in the next one from its output, which is attached as the output of a notebook."
    first = check(run_notebook(ROOT/"kaggle"/"precompute"/"precompute.ipynb", place, **what), place)
    packed = next(first.output.rglob("packed"))
    assert {p.suffix for p in packed.iterdir()} == {".safetensors", ".json"} and len(pictures(first)) == 1
    place.inputs["/kaggle/input/notebooks/somebody/qie-nb-precompute"] = first.output
    second = check(run_notebook(ROOT/"kaggle"/"train"/"train.ipynb", place, changes=changes, **what), place)
    assert "0 encoded" in second.text() and not list(second.output.rglob("cache/pixel_latent/*/*")), "what was precomputed is not made again"
    assert len(pictures(second)) >= 2, "the result and the curves can be looked at in the saved notebook"
    return first, second


def once_more(place, run, path, steps, **what):
    "The next session, with the last one's output attached: no line is changed but the number of steps."
    place.inputs["/kaggle/input/notebooks/somebody/qie-nb-train"] = run.output
    third = check(run_notebook(ROOT/"kaggle"/path, place, changes={f"STEPS, RATE, BATCH = {steps[0]}": f"STEPS, RATE, BATCH = {steps[1]}"}, **what), place)
    assert re.search(rf"trained {steps[1] - steps[2]} steps in .*, {steps[1]} in all: done", third.text()), third.text()[-3000:]
    return third


FEW = {"STEPS, RATE, BATCH = 150": "STEPS, RATE, BATCH = 6"}

def test_the_notebooks_run_on_kaggle_without_internet_hand_the_cache_over_and_go_on(tmp_path):
    place = kaggle(tmp_path, quota=64 * MB)
    _, second = both(place, FEW)
    once_more(place, second, "train/train.ipynb", (150, 8, 6))


@pytest.mark.slow
def test_as_they_stand_the_lora_does_what_the_demos_does(tmp_path):
    place = kaggle(tmp_path, quota=64 * MB)
    _, second = both(place)
    assert ratio(next(second.output.rglob("lora")), tmp_path) < 0.4
    once_more(place, second, "train/train.ipynb", (150, 152, 150))


def went_on(run, steps): # what a live panel says of it
    said = run.text()
    assert "0 encoded" in said and f"training panel: step {steps} of {steps}" in said and "step 50: held-out" not in said, said[-3000:]


@pytest.mark.slow
def test_colab_keeps_all_on_drive_and_goes_on_from_there(tmp_path):
    (tmp_path/"drive").mkdir()
    place, few = colab(tmp_path, drive=tmp_path/"drive", quota=64 * MB), "STEPS, RATE, BATCH = {}".format
    first = check(run_notebook(ROOT/"kaggle"/"colab.ipynb", place), place)
    assert len(pictures(first)) >= 2 and ratio(tmp_path/"drive"/"qie_nb"/"lora", tmp_path) < 0.4
    second = check(run_notebook(ROOT/"kaggle"/"colab.ipynb", place, changes={few(150): few(152)}), place)
    went_on(second, 152)


def test_a_copy_is_made_once_and_trained_from(tmp_path):
    "The prequantized copy is attached instead of the model, and brings its modulation table."
    place = kaggle(tmp_path, quota=64 * MB)
    first = check(run_notebook(ROOT/"kaggle"/"prequantise"/"prequantise.ipynb", place), place)
    copy = next(first.output.rglob("model"))
    place.inputs["/kaggle/input/datasets/somebody/copy"] = copy
    changes = FEW | {'MODEL, SIZE, PRECISION = "tiny",': 'MODEL, SIZE, PRECISION = place.latest("model"),', 'DATA = make_pairs(place.temp/"pairs", "duotone", 48)': 'DATA = make_pairs(place.temp/"pairs", "duotone", 6)',
                     'num_inference_steps=8 if MODEL == "tiny" else 20': "num_inference_steps=8"}
    second = check(run_notebook(ROOT/"kaggle"/"train"/"train.ipynb", place, changes=changes), place)
    assert "6 in all: done" in second.text() and not list(second.output.rglob("cache/modulation/*")), "the copy's own table is used"


@pytest.mark.slow
def test_the_notebooks_run_with_kaggles_own_versions(wheels, tmp_path):
    python = python_of("kaggle")
    if not any(wheels.glob("optimum_quanto-*.whl")): pytest.skip("QIE_NB_WHEELS does not name a folder with optimum-quanto's wheel; `make places` fills one")
    place = kaggle(tmp_path, {"datasets/somebody/wheels": wheels}, quota=64 * MB)
    first, second = both(place, python=python, library=False)
    assert "Successfully uninstalled torchao" in first.text()
    assert ratio(next(second.output.rglob("lora")), tmp_path) < 0.4
    once_more(place, second, "train/train.ipynb", (150, 152, 150), python=python, library=False)


@pytest.mark.slow
def test_the_notebook_runs_with_colabs_own_versions(wheels, tmp_path):
    python = python_of("colab")
    if not any(wheels.glob("optimum_quanto-*.whl")): pytest.skip("QIE_NB_WHEELS does not name a folder with optimum-quanto's wheel; `make places` fills one")
    shutil.copytree(wheels, tmp_path/"drive"/"wheels")
    place = colab(tmp_path, drive=tmp_path/"drive", quota=64 * MB)
    check(run_notebook(ROOT/"kaggle"/"colab.ipynb", place, python=python, library=False), place)
    assert ratio(tmp_path/"drive"/"qie_nb"/"lora", tmp_path) < 0.4
    steps = {"STEPS, RATE, BATCH = 150": "STEPS, RATE, BATCH = 152"}
    went_on(check(run_notebook(ROOT/"kaggle"/"colab.ipynb", place, changes=steps, python=python, library=False), place), 152)


TESTS = ["main_job", "parity", "modulation", "lora", "cache"]

@pytest.mark.slow
@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize("place", PLACES)
def test_the_everyday_tests_pass_with_the_places_own_versions(place, name, wheels, tmp_path):
    "After the install cell's work; the checkout is tested, not the wheel. No session's end is known there: where one is, every run leaves a checkpoint, which tests do not expect."
    python = python_of(place)
    if not any(wheels.glob("optimum_quanto-*.whl")): pytest.skip("QIE_NB_WHEELS does not name a folder with optimum-quanto's wheel; `make places` fills one")
    wheel = next(wheels.glob("qie_nb-*.whl"))
    steps = f"""{python} -m pip install -q --no-index --find-links {wheel.parent} qie_nb bitsandbytes && {python} -m pip uninstall -y torchao &&
        cd {ROOT} && PYTHONPATH={ROOT} {python} -m pytest -m 'not slow' --tb=short tests/test_{name}.py"""
    home, done, changed, _ = session(colab(tmp_path, {"wheels": wheels}, quota=2048 * MB), ["bash", "-c", steps], python, library=False, timeout=3600)
    assert done.returncode == 0 and changed == [], done.stdout[-6000:] + done.stderr[-2000:]
