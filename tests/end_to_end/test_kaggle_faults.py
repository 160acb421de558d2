"""Each fault put into an imitation of Kaggle, where the notebook kaggle/train runs as it is but for the lines that a user changes.

| put there | `doctor` | the notebook |
|---|---|---|
| torchao 0.10 beside peft 0.21, with the install cell | finds nothing: the cell took it away | goes on, to the LoRA |
| torchao 0.10 beside peft 0.21, without it | error: pip uninstall | stops |
| a GPU of sm 6.0 | error: no kernels, choose another | stops |
| a GPU of sm 7.5 (no bfloat16) | warning: leave the precision auto | goes on |
| bfloat16 asked for where it is emulated | warning: set the precision auto | goes on |
| 2 GB of disk, the published model | error: what does not fit, and what to set | stops |
| 2 GB of disk, the tiny model | finds nothing | goes on |
| 8 GB of host memory, the published model | warning: keep nothing more there | goes on |
| 8 GB of host memory, and weights that are to wait there | error: set it to false, quantize | stops |
| no internet, a hub id | error: switch it on, or attach | stops |
| no internet, the tiny model | a note | goes on |
| a cache of another model, attached | error: attach this one's, or precompute | stops |
| no secret HF_TOKEN, a hub id | warning: where to add it | goes on |
"""
import json, re

import pytest
from safetensors import safe_open

from helpers import settings, write_pairs
from fake_kaggle import kaggle, run_notebook, unsharing
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from test_kaggle import ANOTHER_PLACE, ROOT, notebook, own_packages

TRAIN = ROOT/"kaggle"/"train"/"train.ipynb"
TINY = 'MODEL, SIZE, PRECISION = "tiny", [96, 96], "no"'
PUBLISHED = 'MODEL, SIZE, PRECISION = "Qwen/Qwen-Image-Edit-2511", [512, 512], "auto"'
OURS = {TINY: PUBLISHED, "lora=dict(r=16)": 'lora=dict(r=16), quantize="nf4"'}

# in the notebook's kernel before its first cell: a GPU as torch tells of it, a server that is reached, a large disk for downloads
KERNEL = """
import sys
if any("ipykernel" in a for a in sys.orig_argv):
    import collections, os, shutil, socket, types
    import torch
    gpu, online = {gpu!r}, {online!r}
    if gpu:
        if {plans!r}: from diffusers import QwenImageTransformer2DModel # what a plan counts with; its import would ask such a GPU for more than is told here
        name, size, sm, own = gpu
        class Device:
            def __init__(self, i): pass
            def __enter__(self): pass
            def __exit__(self, *error): pass
        fake = dict(is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0, device=Device, get_arch_list=lambda: ["sm_75", "sm_80", "sm_86", "sm_90"],
                    get_device_properties=lambda i: types.SimpleNamespace(name=name, total_memory=size, major=sm[0], minor=sm[1]),
                    is_bf16_supported=lambda including_emulation=True: own or including_emulation)
        for n, fn in fake.items(): setattr(torch.cuda, n, fn)
        torch.version.cuda = "12.8"
    if online:
        server = socket.create_server(("127.0.0.1", 0)) # answers as a proxy would
        os.environ["https_proxy"] = "http://127.0.0.1:%d" % server.getsockname()[1]
    usage, large = shutil.disk_usage, collections.namedtuple("usage", "total used free")(300 * 10**9, 10**11, 200 * 10**9)
    shutil.disk_usage = lambda path: usage(path) if "/kaggle/working" in str(path) else large
"""

# host memory as the system tells of it: 31 GB, of which the session's control group may use so much
MEMORY = """
import os, subprocess
root = os.environ.get("QIE_NB_ROOT", "")
for folder in ("/proc", "/sys/fs/cgroup"): os.makedirs(root + folder, exist_ok=True)
told = root + "/proc/meminfo" if root else "/tmp/meminfo"
open(told, "w").write("MemTotal: %d kB\\nMemFree: %d kB\\n" % (31 * 10**6, 31 * 10**6))
if not root: subprocess.run(["mount", "--bind", told, "/proc/meminfo"], check=True), subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/sys/fs/cgroup"], check=True)
open(root + "/sys/fs/cgroup/memory.max", "w").write("{memory}")
"""

# with the package itself, at which peft looks; pip knows its files
OLD_TORCHAO = ANOTHER_PLACE + """
package = os.path.join(sysconfig.get_path("purelib"), "torchao")
os.makedirs(package, exist_ok=True)
open(f"{package}/__init__.py", "w").write('__version__ = "0.10.0"')
open(f"{old}/RECORD", "a").write("torchao/__init__.py,,\\n")
"""

L4, T4, P100 = ("NVIDIA L4", 23_600_000_000, (8, 9), True), ("Tesla T4", 15_800_000_000, (7, 5), False), ("Tesla P100-PCIE-16GB", 17_000_000_000, (6, 0), False)


def adapter_moved(folder):
    with safe_open(folder/"pytorch_lora_weights.safetensors", "pt") as f: return any(f.get_tensor(k).abs().max() > 0 for k in f.keys() if "lora_B" in k)


def place_of(tmp_path, token="hf_given", **what): return kaggle(tmp_path, env=dict(HF_TOKEN=token) if token else {}, quota=what.pop("quota", 20 * 10**9), **what)


def first_cells(folder, of=slice(2)):
    "The notebook's cells as far as the doctor's report, and one that tells it as data."
    nb = json.loads(TRAIN.read_text())
    code = [c for c in nb["cells"] if c["cell_type"] == "code"][of]
    nb["cells"] = [*code, dict(code[-1], id="told", source='import json\nprint("told", json.dumps(report.data()["findings"]))')]
    (folder/"first.ipynb").write_text(json.dumps(nb))
    return folder/"first.ipynb"


def visit(place, path=None, gpu=L4, online=True, memory=31 * 10**9, before="", plans=False, **what):
    "A session of a place whose machine is so."
    return run_notebook(path or first_cells(place.root), place, files={"modules/sitecustomize.py": KERNEL.format(gpu=gpu, online=online, plans=plans)}, before=before or MEMORY.format(memory=memory), **what)


def went_on(run) -> dict:
    "What the doctor says of a place in which the notebook goes on: {what: (level, remedy)}."
    assert not run.error, run.error
    found = json.loads(re.search(r"^told (.*)$", run.text(), re.M)[1])
    return {f["what"]: (f["level"], f["remedy"]) for f in found if f["level"] != "ok"}


def stopped(run) -> dict:
    "The same where it stops: by one sentence that holds every reason, with all findings in the cell's output."
    *_, last = re.sub(r"\x1b\[[\d;]*m", "", run.error).strip().splitlines() # as a terminal without colours shows it
    assert last.startswith("ValueError: this cannot run here: "), run.error
    assert "another exception occurred" not in run.error and not re.search(r"^told", run.text(), re.M)
    rows = re.findall(r"^(error|warning|note) +(disk: (?:working|temporary) folder|disk: cache|[^:]+): .*?; (.*)$", run.text(), re.M)
    for level, what, remedy in rows: assert (level == "error") == (f"{what} " in last and remedy in last), last
    return {what: (level, remedy) for level, what, remedy in rows}


def only(found, wanted): # {what: (level, pattern of the remedy)}; what is but to know depends on the versions
    assert {w: level for w, (level, _) in found.items() if level != "note"} == {w: level for w, (level, _) in wanted.items()}, found
    for what, (_, pattern) in wanted.items(): assert re.search(pattern, found[what][1]), found[what]


# ---- what stops ------------------------------------------------------------------------------------------------------------------------

def test_an_old_torchao_stops_where_nobody_took_it_away(tmp_path):
    own_packages()
    run = visit(place_of(tmp_path), first_cells(tmp_path, slice(1, 2)), gpu=None, before=OLD_TORCHAO)
    only({w: f for w, f in stopped(run).items() if f[0] == "error"}, {"torchao": ("error", r"^peft 0\.\d+\.\d+ raises on every LoRA with torchao < 0.16: pip uninstall -y torchao")})


def test_a_gpu_without_kernels_stops(tmp_path):
    found = stopped(visit(place_of(tmp_path), gpu=P100))
    only(found, {"GPU": ("error", r"no kernels for sm 6\.0 \(it has sm_75, .*\); choose a newer accelerator \(Kaggle: GPU T4 x2\)")})


def test_a_hub_id_without_internet_stops(tmp_path):
    found = stopped(visit(place_of(tmp_path), online=False, changes=OURS))
    only(found, {"internet": ("error", "^Qwen/Qwen-Image-Edit-2511 cannot be downloaded: switch Internet on in the notebook's settings, or attach the model as an input and give its folder")})


def test_2_gb_of_disk_stop_what_does_not_fit(tmp_path):
    if not unsharing(): pytest.skip("a folder that holds so much takes mounts of its own (unshare)")
    found = stopped(visit(place_of(tmp_path, quota=2 * 10**9), changes=OURS))
    only({w: f for w, f in found.items() if f[0] == "error"}, {"disk": ("error", r"disk of /kaggle/working: the run writes [\d.]+ GB .*, but 2\.00 GB are free; .*attach a filled cache")})


def test_a_cache_of_another_model_stops(tmp_path):
    model, root, out = tiny_folder("v1"), write_pairs(tmp_path/"set", ((48, 32),) * 2), tmp_path/"other"
    QwenImageEditTrainer(settings(root, out, model=dict(pretrained_model_name_or_path=str(model)), cache=dict(cache_dir=str(out/"cache")))).cache_embeddings()
    run = visit(place_of(tmp_path, inputs={"notebooks/somebody/other": out}))
    only(stopped(run), {"cache": ("error", "^it belongs to another model; this run has .*variant 2511.*: attach the cache of this model, or set `cache.cache_dir` to a new folder and precompute")})
    assert run.inputs_written == []


@pytest.mark.slow
def test_8_gb_of_host_memory_stop_what_would_wait_there(tmp_path):
    waits = OURS | {"lora=dict(r=16)": "lora=dict(r=16), text_encoder_offload=True", "train=dict(": "train=dict(blocks_to_swap=True, "}
    found = stopped(visit(place_of(tmp_path), memory=8 * 10**9, changes=waits))
    only(found, {"host memory": ("error", "^`model.text_encoder_offload` keeps 16.6 GB there; set it to false and quantize instead")})


# ---- what hinders ----------------------------------------------------------------------------------------------------------------------

EMULATED = ("warning", "^set `train.mixed_precision` auto, which chooses a safe precision")
FEW = ("warning", "^loading the real model needs 12 GB; close other notebooks, keep `data.num_workers` 0 and `cache.prefetch` 0, and offload nothing")
SECRET = ("warning", r'^the hub limits downloads without it .*Kaggle: Add-ons > Secrets.*os.environ\["HF_TOKEN"\] = where\(\).secret\("HF_TOKEN", ask=True\)')

RUNS_OUT = ("warning", r"^it will probably run out of memory: set .*`model.text_encoder_quantize` nf4.*, as config\(\) of this report does")
IN_BF16 = {TINY: PUBLISHED.replace('"auto"', '"bf16"')}

def test_a_place_with_all_that_hinders_goes_on(tmp_path):
    found = went_on(visit(place_of(tmp_path, token=None), plans=True, gpu=T4, memory=8 * 10**9, changes=OURS | IN_BF16))
    only(found, {"GPU bfloat16": EMULATED, "host memory": FEW, "secret HF_TOKEN": SECRET})


@pytest.mark.slow
@pytest.mark.parametrize("fault, wanted", [
    (dict(gpu=T4), {"GPU bfloat16": ("warning", "^leave `train.mixed_precision` auto"), "GPU memory": RUNS_OUT}), (dict(gpu=T4, changes=OURS | IN_BF16), {"GPU bfloat16": EMULATED}),
    (dict(memory=8 * 10**9), {"host memory": FEW}), (dict(token=None), {"secret HF_TOKEN": SECRET}), ({}, {})], ids=["sm 7.5", "emulated bf16", "8 GB of host memory", "missing secret", "no fault"])
def test_a_fault_that_hinders_is_told_and_no_other(fault, wanted, tmp_path):
    found = went_on(visit(place_of(tmp_path, token=fault.get("token", "hf_given")), **dict(changes=OURS, plans=True) | {k: v for k, v in fault.items() if k != "token"}))
    only(found, wanted)


@pytest.mark.slow
def test_the_remedy_of_a_missing_secret_is_a_line_that_works(tmp_path):
    missing = went_on(visit(place_of(tmp_path, token=None), plans=True, changes=OURS))
    line = re.search(r'os.environ\["HF_TOKEN"\] = .*', missing["secret HF_TOKEN"][1])[0]
    place = place_of(tmp_path, token=None, secrets=dict(HF_TOKEN="hf_added"))
    only(went_on(visit(place, plans=True, changes=OURS | {"place = where()": f"import os\n{line}\nplace = where()"})), {})


# ---- what the notebook mends, and goes on to the end -----------------------------------------------------------------------------------

SHORT = {"STEPS, RATE, BATCH = 150, 5e-3, 4": "STEPS, RATE, BATCH = 4, 5e-3, 1", "eval_steps=50": "eval_steps=4", "compare_validation(trainer, 3, num_inference_steps=8": "compare_validation(trainer, 1, num_inference_steps=2"}

def test_the_install_cell_takes_an_old_torchao_away_and_the_tiny_model_needs_no_more_than_2_gb(tmp_path):
    "Nor the internet, nor a GPU, nor a secret."
    own_packages()
    run = run_notebook(TRAIN, place_of(tmp_path, token=None, quota=2 * 10**9), changes=SHORT, before=OLD_TORCHAO)
    assert not run.error, run.error
    assert re.search(r"torchao +uninstalled: peft 0\.\d+\.\d+ fails on every LoRA beside torchao 0\.10\.0", run.text())
    assert "no errors" in run.text() and adapter_moved(run.output/"lora")


@pytest.mark.slow
def test_the_old_torchao_is_one_at_which_peft_raises(tmp_path):
    own_packages()
    asks = notebook(tmp_path, "from peft.import_utils import is_torchao_available\nis_torchao_available()")
    run = run_notebook(asks, place_of(tmp_path), before=OLD_TORCHAO)
    assert re.search(r"ImportError.*: Found an incompatible version of torchao. Found version 0\.10\.0", run.error), run.error
