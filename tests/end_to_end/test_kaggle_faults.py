"""The notebook kaggle/train in an imitation of Kaggle with one fault each: the doctor names the fault and its remedy, and errors stop the notebook."""
import json, re

import pytest
from safetensors.torch import load_file

from helpers import settings, write_pairs
from fake_kaggle import kaggle, run_notebook
from qie_nb.trainer import QwenImageEditTrainer
from test_kaggle import OLD_TORCHAO as TORCHAO_INFO, TRAIN, needs_root, notebook, trial_with, wheels

pytestmark = pytest.mark.slow
# the published model with generated pairs, without a preset
OURS = {"TRIAL = True": "TRIAL = False", 'preset="t4x2",': "", '2511")': '2511", quantize="nf4")', '"/kaggle/input/my-pairs"': 'make_pairs(env.temp/"pairs", "duotone", 48)',
        "image_size=512": "image_size=[512, 512], control_area=512 * 512, batch_size=4"}
WAITS = OURS | {'2511")': '2511", text_encoder_offload=True)', "train=dict(max": "train=dict(blocks_to_swap=True, max"}

# run in the kernel before the first cell: a fake GPU, a reachable server, a large disk for downloads
KERNEL = """
import sys
if any("ipykernel" in a for a in sys.orig_argv):
    import collections, contextlib, os, shutil, socket, types
    import torch, torchvision # torchvision compares CUDA versions when it is imported
    gpu, online = {gpu!r}, {online!r}
    if gpu:
        if {plans!r}: from diffusers import QwenImageTransformer2DModel # imported before torch.cuda is faked
        name, size, sm, own = gpu
        fake = dict(is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0, device=contextlib.nullcontext, get_arch_list=lambda: ["sm_75", "sm_80", "sm_86", "sm_90"],
                    get_device_properties=lambda i: types.SimpleNamespace(name=name, total_memory=size, major=sm[0], minor=sm[1]),
                    is_bf16_supported=lambda including_emulation=True: own or including_emulation)
        for n, fn in fake.items(): setattr(torch.cuda, n, fn)
        torch.version.cuda = "12.8"
    if online:
        server = socket.create_server(("127.0.0.1", 0)) # a proxy
        os.environ["https_proxy"] = "http://127.0.0.1:%d" % server.getsockname()[1]
    usage, large = shutil.disk_usage, collections.namedtuple("usage", "total used free")(300 * 10**9, 10**11, 200 * 10**9)
    shutil.disk_usage = lambda path: usage(path) if "/kaggle/working" in str(path) else large
"""

# host memory: 31 GB, limited by the session's control group
MEMORY = """
import subprocess
open("/tmp/meminfo", "w").write("MemTotal: 31000000 kB\\nMemFree: 31000000 kB\\n")
subprocess.run(["mount", "--bind", "/tmp/meminfo", "/proc/meminfo"], check=True), subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/sys/fs/cgroup"], check=True)
open("/sys/fs/cgroup/memory.max", "w").write("{memory}")
"""

# with the package itself, which peft imports
OLD_TORCHAO = TORCHAO_INFO + """
package = os.path.join(sysconfig.get_path("purelib"), "torchao")
os.makedirs(package, exist_ok=True)
open(f"{package}/__init__.py", "w").write('__version__ = "0.10.0"')
open(f"{old}/RECORD", "a").write("torchao/__init__.py,,\\n")
"""

L4, T4, P100 = ("NVIDIA L4", 23_600_000_000, (8, 9), True), ("Tesla T4", 15_800_000_000, (7, 5), False), ("Tesla P100-PCIE-16GB", 17_000_000_000, (6, 0), False)


def platform_of(tmp_path, token="hf_given", quota=20 * 10**9, **options): return kaggle(tmp_path, env=dict(HF_TOKEN=token) if token else {}, quota=quota, **options)


def first_cells(folder, of=slice(2)):
    "The notebook's cells up to the doctor's report, and one that prints it as JSON."
    cells = [c for c in json.loads(TRAIN.read_text())["cells"] if c["cell_type"] == "code"][of]
    return notebook(folder, *("".join(c["source"]) for c in cells), 'import json\nprint("report", json.dumps(report.data()["findings"]))')


def run_with(platform, path=None, gpu=L4, online=True, memory=31 * 10**9, before="", plans=False, **options):
    "A session on a machine with these properties."
    kernel = KERNEL.format(gpu=gpu, online=online, plans=plans)
    return run_notebook(path or first_cells(platform.root), platform, files={"modules/sitecustomize.py": kernel}, before=before or MEMORY.format(memory=memory), **options)


def continued(run) -> dict:
    "The doctor's findings when the notebook continues: {what: (level, remedy)}."
    assert not run.error, run.error
    found = json.loads(re.search(r"^report (.*)$", run.text(), re.M)[1])
    return {f["what"]: (f["level"], f["remedy"]) for f in found if f["level"] != "ok"}


def stopped(run) -> dict:
    "The same when it stops, with one message that contains every reason."
    sentence = re.sub(r"\x1b\[[\d;]*m", "", run.error).rpartition("------------------")[2] # without colours
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

def test_an_old_torchao_stops(tmp_path):
    needs_root()
    run = run_with(platform_of(tmp_path), first_cells(tmp_path, slice(1, 2)), gpu=None, before=OLD_TORCHAO)
    only_error(run, "torchao", r"^peft 0\.\d+\.\d+ raises .* torchao < 0.16.*pip uninstall -y torchao", ["error"])


@pytest.mark.parametrize("quota, fault, what, pattern", [
    (20, dict(gpu=P100), "GPU", r"no kernels for sm 6\.0 .*sm_75.*GPU T4 x2"),
    (20, dict(online=False, changes=OURS), "internet", "Qwen/Qwen-Image-Edit-2511 cannot be downloaded.*[Ii]nternet.*attach the model"),
    (2, dict(changes=OURS), "disk", r"/kaggle/working: .*[\d.]+ GB .* 2\.00 GB .*attach a .*cache"),
    (20, dict(memory=8 * 10**9, changes=WAITS), "host memory", "`model.text_encoder_offload` .*15.5 GB.*; set it to false and quantize")],
    ids=["a GPU without kernels", "no internet", "2 GB of disk", "8 GB of host memory"])
def test_it_stops(quota, fault, what, pattern, tmp_path):
    only_error(run_with(platform_of(tmp_path, quota=quota * 10**9), **fault), what, pattern, ["error"] if quota == 2 else ("error", "warning"))


def test_a_cache_of_another_model_is_not_used(tmp_path):
    out = tmp_path/"other"
    QwenImageEditTrainer(settings(write_pairs(tmp_path/"set", ((48, 32),) * 2), out, "v1")).cache_embeddings()
    run = run_with(platform_of(tmp_path, inputs={"notebooks/user/other": out}))
    assert not run.error and run.inputs_written == [], run.error
    assert re.search(r"^not used: cache in /kaggle/input/notebooks/user/other/cache, which was made with another model \(tiny-v1, float32\)$", run.text(), re.M), run.text()


# ---- warnings ----

EMULATED = ("warning", "^set `train.mixed_precision` auto")
FEW = ("warning", "12 GB.*`data.num_workers` 0 and `cache.prefetch` 0")
SECRET = ("warning", r'hub limits downloads without .*Kaggle: Add-ons > Secrets.*os.environ\["HF_TOKEN"\] = \w+\(\).secret\("HF_TOKEN", ask=True\)')

RUNS_OUT = ("warning", r"set .*`model.text_encoder_quantize` nf4.*config\(\)")
IN_BF16 = OURS | {"train=dict(max": 'train=dict(mixed_precision="bf16", max'}


@pytest.mark.parametrize("fault, wanted", [
    ({}, {}), (dict(gpu=T4), {"GPU bfloat16": ("warning", "^leave `train.mixed_precision` auto"), "GPU memory": RUNS_OUT}),
    (dict(gpu=T4, changes=IN_BF16, memory=8 * 10**9, token=None), {"GPU bfloat16": EMULATED, "host memory": FEW, "secret HF_TOKEN": SECRET})],
    ids=["no fault", "sm 7.5", "several together"])
def test_exactly_these_warnings_are_given(fault, wanted, tmp_path):
    options = dict(changes=OURS, plans=True, token="hf_given") | fault
    only(continued(run_with(platform_of(tmp_path, options.pop("token")), **options)), wanted)


def test_the_remedy_for_a_missing_secret_works(tmp_path):
    missing = continued(run_with(platform_of(tmp_path, token=None), plans=True, changes=OURS))
    only(missing, {"secret HF_TOKEN": SECRET})
    line = re.search(r'os.environ\["HF_TOKEN"\] = .*', missing["secret HF_TOKEN"][1])[0]
    platform = platform_of(tmp_path, token=None, secrets=dict(HF_TOKEN="hf_added"))
    only(continued(run_with(platform, plans=True, changes=OURS | {"env = detect_environment()": f"import os\n{line}\nenv = detect_environment()"})), {})


# ---- faults that the notebook removes ----

SHORT = trial_with("max_train_steps=4, eval_steps=4") | {"compare_validation(trainer, 3)": "compare_validation(trainer, 1, num_inference_steps=2)"}


def test_the_install_cell_removes_an_old_torchao(wheels, tmp_path):
    "Training needs no internet, GPU or secret, and less than 2 GB of disk."
    needs_root()
    platform = platform_of(tmp_path, token=None, quota=2 * 10**9, inputs={"datasets/user/wheels": wheels})
    run = run_notebook(TRAIN, platform, changes=SHORT, before=OLD_TORCHAO, library=False)
    assert not run.error, run.error
    lora = load_file(run.output/"trial"/"lora"/"pytorch_lora_weights.safetensors")
    assert "Successfully uninstalled torchao-0.10.0" in run.text() and any(t.any() for name, t in lora.items() if "lora_B" in name)


def test_peft_raises_beside_the_old_torchao(tmp_path):
    needs_root()
    asks = notebook(tmp_path, "from peft.import_utils import is_torchao_available\nis_torchao_available()")
    run = run_notebook(asks, platform_of(tmp_path), before=OLD_TORCHAO)
    assert re.search(r"ImportError.*: Found an incompatible version of torchao. Found version 0\.10\.0", run.error), run.error
