"""The notebook kaggle/train in an imitation of Kaggle with one fault each.

The doctor names the fault and its remedy, and errors stop the notebook. All faults are set in one
kernel: its notebook has the cell with the settings once for each fault, after a cell that fakes the machine.
Only what needs another installation has a session of its own."""
import json, re

import pytest
from safetensors.torch import load_file

from helpers import settings, write_pairs
from fake_kaggle import Run, kaggle, run_notebook
from qie_nb.trainer import QwenImageEditTrainer
from test_kaggle import OLD_TORCHAO as TORCHAO_INFO
from test_kaggle import TRAIN, cells_of, needs_root, notebook, offline, settings_cell
from test_kaggle import trial_with, wheels

pytestmark = pytest.mark.slow
# the published model with generated pairs, without a preset
OURS = {"TRIAL = True": "TRIAL = False", 'preset="t4x2",': "", '2511")': '2511", quantize="nf4")', '"/kaggle/input/my-pairs"': 'make_pairs(env.temp/"pairs", "duotone", 48)',
        "image_size=512": "image_size=[512, 512], control_area=512 * 512, batch_size=4"}
WAITS = OURS | {
    '2511")': '2511", text_encoder_offload=True)',
    "train=dict(eval": "train=dict(blocks_to_swap=True, eval",
}

# fakes.py in the kernel: `machine` sets everything, so it takes back what the last fault had set
FAKES = r'''
import collections, contextlib, os, shutil, socket, subprocess, sys, types
from pathlib import Path
import kaggle_secrets, torch, torchvision # torchvision compares CUDA versions when it is imported
from diffusers import QwenImageTransformer2DModel # before torch.cuda is faked

real_usage = shutil.disk_usage
large = collections.namedtuple("usage", "total used free")(300 * 10**9, 10**11, 200 * 10**9)
def disk_usage(path): # a large disk for downloads
    return real_usage(path) if "/kaggle/working" in str(path) else large
shutil.disk_usage = disk_usage
server = socket.create_server(("127.0.0.1", 0)) # a proxy
old_torchao = Path("/tmp/old_torchao")
info = old_torchao/"torchao-0.10.0.dist-info"
info.mkdir(parents=True)
(info/"METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 0.10.0\n")
L4 = ("NVIDIA L4", 23_600_000_000, (8, 9), True)

proxy = "http://127.0.0.1:%d" % server.getsockname()[1]

def set_variable(name, value): # None removes it
    os.environ.pop(name, None)
    if value: os.environ[name] = value

def machine(gpu=L4, online=True, memory=31 * 10**9, quota=20 * 10**9, token="hf_given", secrets={}, torchao=False):
    name, size, sm, own = gpu
    properties = types.SimpleNamespace(name=name, total_memory=size, major=sm[0], minor=sm[1])
    fake = dict(is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
                device=contextlib.nullcontext, get_device_properties=lambda i: properties,
                get_arch_list=lambda: ["sm_75", "sm_80", "sm_86", "sm_90"],
                mem_get_info=lambda n: (size, size), memory_reserved=lambda n: 0,
                is_bf16_supported=lambda including_emulation=True: own or including_emulation)
    for n, fn in fake.items(): setattr(torch.cuda, n, fn)
    torch.version.cuda = "12.8"
    set_variable("https_proxy", proxy if online else None)
    set_variable("HF_TOKEN", token)
    open("/sys/fs/cgroup/memory.max", "w").write(str(memory))
    subprocess.run(["mount", "-o", f"remount,size={quota}", "/kaggle/working"], check=True)
    kaggle_secrets.SECRETS = secrets
    sys.path[:] = [str(old_torchao)] * torchao + [p for p in sys.path if p != str(old_torchao)]
'''

# before the session: host memory as the control group and /proc say
MEMORY = """
import subprocess
open("/tmp/meminfo", "w").write("MemTotal: 31000000 kB\\nMemFree: 31000000 kB\\n")
subprocess.run(["mount", "--bind", "/tmp/meminfo", "/proc/meminfo"], check=True), subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/sys/fs/cgroup"], check=True)
"""

# with the package itself, which peft imports
OLD_TORCHAO = TORCHAO_INFO + """
package = os.path.join(sysconfig.get_path("purelib"), "torchao")
os.makedirs(package, exist_ok=True)
open(f"{package}/__init__.py", "w").write('__version__ = "0.10.0"')
open(f"{old}/RECORD", "a").write("torchao/__init__.py,,\\n")
"""

T4 = ("Tesla T4", 15_800_000_000, (7, 5), False) # name, bytes, sm, has it bfloat16?
P100 = ("Tesla P100-PCIE-16GB", 17_000_000_000, (6, 0), False)
IN_BF16 = OURS | {"train=dict(eval": 'train=dict(mixed_precision="bf16", eval'}
REMEDY = OURS | {"env = detect_environment()": "import os\nexec(line)\nenv = detect_environment()"}

# name: (changes of the cell with the settings, what `machine` sets)
FAULTS = {
    "as it is": ({}, {}),
    "a GPU without kernels": ({}, dict(gpu=P100)),
    "an old torchao": ({}, dict(torchao=True)),
    "no internet": (OURS, dict(online=False)),
    "2 GB of disk": (OURS, dict(quota=2 * 10**9)),
    "8 GB of host memory": (WAITS, dict(memory=8 * 10**9)),
    "no photograph": (OURS | {"squares(512)[0]": '"/kaggle/input/my-photos/1.jpg"'}, {}),
    "no fault": (OURS, {}),
    "sm 7.5": (OURS, dict(gpu=T4)),
    "several together": (IN_BF16, dict(gpu=T4, memory=8 * 10**9, token=None)),
    "no secret": (OURS, dict(token=None)),
    "the secret's remedy": (REMEDY, dict(token=None, secrets=dict(HF_TOKEN="hf_added")))}
LINE = """
import re
remedies = [f["remedy"] for f in report.data()["findings"]] if report else []
line = re.search(r'os.environ\\["HF_TOKEN"\\] = .*', "\\n".join(remedies))
line = line and line[0]"""
REPORT = 'import json\nif report: print("report", json.dumps(report.data()["findings"]))'


def platform_of(tmp_path, token="hf_given", quota=20 * 10**9, **options): return kaggle(tmp_path, env=dict(HF_TOKEN=token) if token else {}, quota=quota, **options)


def changed(text, changes):
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old} occurs {text.count(old)} times in\n{text}"
        text = text.replace(old, new)
    return text


def error_of(cells) -> str: # "" without one
    errors = [o for c in cells for o in c["outputs"] if o["output_type"] == "error"]
    return "\n".join(line for o in errors for line in o["traceback"])


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    "{fault: Run}, what the cell with the settings and one that prints the report as JSON have shown."
    folder = tmp_path_factory.mktemp("checked")
    install, check = cells_of(TRAIN)[0], settings_cell(TRAIN)
    other, root = folder/"other", write_pairs(folder/"set", ((48, 32),) * 2)
    QwenImageEditTrainer(settings(root, other, "v1")).cache_embeddings()
    cells = ["import fakes\nreport = None", install]
    for changes, fault in FAULTS.values():
        fake = f"{LINE}\nreport = None\nfakes.machine(**{fault!r})"
        cells += [fake, changed(check, changes), REPORT]
    path = notebook(folder, *cells)
    book = json.loads(path.read_text())
    for cell in book["cells"][3::3]: cell["metadata"]["tags"] = ["raises-exception"] # then it goes on
    path.write_text(json.dumps(book))
    platform = platform_of(folder, inputs={"notebooks/user/other": other})
    run = run_notebook(path, platform, files={"modules/fakes.py": FAKES}, before=MEMORY)
    assert not run.error, run.error
    runs = {}
    for name, at in zip(FAULTS, range(3, len(cells), 3), strict=True):
        shown = run.notebook["cells"][at:at + 2]
        runs[name] = Run(dict(cells=shown), error_of(shown), run.output, run.written, run.inputs_written)
    return runs


def continued(run) -> dict:
    "The doctor's findings when the notebook continues: {what: (level, remedy)}."
    assert not run.error, run.error
    found = json.loads(re.search(r"^report (.*)$", run.text(), re.M)[1])
    return {f["what"]: (f["level"], f["remedy"]) for f in found if f["level"] != "ok"}


def stopped(run) -> dict:
    "The same when it stops, with one message that contains every reason."
    # without colours and, in a session of its own, without the cell
    sentence = re.sub(r"\x1b\[[\d;]*m", "", run.error).rpartition("------------------")[2]
    last = " ".join(sentence.split())
    assert last.endswith("(%tb shows the traceback)"), run.error
    assert "another exception occurred" not in run.error and not re.search(r"^report", run.text(), re.M)
    rows = re.findall(r"^(error|warning|note) +(disk: (?:working|temporary) folder|disk: cache|[^:]+): .*?; (.*)$", run.text(), re.M)
    for level, what, remedy in rows: assert (level == "error") == (f"{what} " in last and remedy[1:] in last), last
    return {what: (level, remedy) for level, what, remedy in rows}


def only(found, wanted, levels=("error", "warning")): # {what: (level, pattern of the remedy)}; notes depend on the versions
    assert {w: level for w, (level, _) in found.items() if level in levels} == {w: level for w, (level, _) in wanted.items()}, found
    for what, (_, pattern) in wanted.items(): assert re.search(pattern, found[what][1]), found[what]


def only_error(run, what, pattern, levels=("error", "warning")): only(stopped(run), {what: ("error", pattern)}, levels)


# ---- errors ----

TORCHAO = r"^peft 0\.\d+\.\d+ raises .* torchao < 0.16.*pip uninstall -y torchao"


STOPS = [
    ("a GPU without kernels", "GPU", r"no kernels for sm 6\.0 .*sm_75.*GPU T4 x2"),
    ("no internet", "internet", "Qwen/Qwen-Image-Edit-2511 cannot be downloaded.*[Ii]nternet.*attach the model"),
    ("2 GB of disk", "disk", r"/kaggle/working: .*[\d.]+ GB .* 2\.00 GB .*attach a .*cache"),
    ("8 GB of host memory", "host memory", "`model.text_encoder_offload` .*15.5 GB.*; set it to false and quantize"),
    ("an old torchao", "torchao", TORCHAO)]


@pytest.mark.parametrize("fault, what, pattern", STOPS, ids=[fault for fault, *_ in STOPS])
def test_it_stops(fault, what, pattern, checked):
    also_warned = fault in ("2 GB of disk", "an old torchao")
    only_error(checked[fault], what, pattern, ["error"] if also_warned else ["error", "warning"])


def test_a_photograph_that_is_missing_stops_before_anything_is_trained(checked):
    said = re.sub(r"\x1b\[[\d;]*m", "", checked["no photograph"].error)
    sentence = "image '/kaggle/input/my-photos/1.jpg' does not exist; check the path"
    assert sentence in said and "Ready to run" not in checked["no photograph"].text()


@pytest.mark.weekly
def test_an_old_torchao_stops(tmp_path):
    "The installed package; the shared kernel has only its metadata."
    needs_root()
    path = notebook(tmp_path, settings_cell(TRAIN), REPORT)
    run = run_notebook(path, platform_of(tmp_path), before=OLD_TORCHAO)
    only_error(run, "torchao", TORCHAO, ["error"])


def test_a_cache_of_another_model_is_not_used(checked):
    run = checked["as it is"]
    assert not run.error and run.inputs_written == [], run.error
    assert re.search(r"^not used: cache in /kaggle/input/notebooks/user/other/cache, which was made with another model \(tiny-v1, float32\)$", run.text(), re.M), run.text()


# ---- warnings ----

EMULATED = ("warning", "^set `train.mixed_precision` auto")
FEW = ("warning", "12 GB; offload nothing")
SECRET = ("warning", r'hub limits downloads without .*Kaggle: Add-ons > Secrets.*os.environ\["HF_TOKEN"\] = \w+\(\).secret\("HF_TOKEN", ask=True\)')

RUNS_OUT = ("warning", r"set .*`model.text_encoder_quantize` auto.*config\(\)")


WARNINGS = [
    ("no fault", {}),
    ("sm 7.5", {"GPU bfloat16": ("warning", "^leave `train.mixed_precision` auto"), "GPU memory": RUNS_OUT}),
    ("several together", {"GPU bfloat16": EMULATED, "host memory": FEW, "secret HF_TOKEN": SECRET})]


@pytest.mark.parametrize("fault, wanted", WARNINGS, ids=[fault for fault, _ in WARNINGS])
def test_exactly_these_warnings_are_given(fault, wanted, checked):
    only(continued(checked[fault]), wanted)


def test_the_remedy_for_a_missing_secret_works(checked):
    only(continued(checked["no secret"]), {"secret HF_TOKEN": SECRET})
    only(continued(checked["the secret's remedy"]), {})


# ---- faults that the notebook removes ----

SHORT = trial_with("max_train_steps=4, eval_steps=4") | {"compare_validation(trainer, 3)": "compare_validation(trainer, 1, num_inference_steps=2)"}


@pytest.mark.weekly
def test_the_install_cell_removes_an_old_torchao(wheels, tmp_path):
    "Training needs no internet, GPU or secret, and less than 2 GB of disk."
    needs_root()
    platform = platform_of(tmp_path, token=None, quota=2 * 10**9, inputs={"datasets/user/wheels": wheels})
    run = run_notebook(TRAIN, platform, changes=SHORT | offline(), before=OLD_TORCHAO,
                       library=False)
    assert not run.error, run.error
    lora = load_file(run.output/"trial"/"lora"/"pytorch_lora_weights.safetensors")
    assert "Successfully uninstalled torchao-0.10.0" in run.text() and any(t.any() for name, t in lora.items() if "lora_B" in name)


@pytest.mark.weekly
def test_peft_raises_beside_the_old_torchao(tmp_path):
    needs_root()
    asks = notebook(tmp_path, "from peft.import_utils import is_torchao_available\nis_torchao_available()")
    run = run_notebook(asks, platform_of(tmp_path), before=OLD_TORCHAO)
    assert re.search(r"ImportError.*: Found an incompatible version of torchao. Found version 0\.10\.0", run.error), run.error
