"""`import qie_nb`: lazy names, nothing on stderr, errors as sentences in notebooks."""
import copy, inspect, json, os, pickle, pydoc, subprocess, sys, textwrap

import pytest

import qie_nb
from helpers import settings
from qie_nb.core.startup import PROVIDED, errors_as_sentences

STAR = "from qie_nb import *; import sys; print(sorted(n for n in globals() if n[0] != '_'), {'torch', 'numpy'} & {*sys.modules})"


def test_star_import_gives_ten_names_without_torch():
    done = subprocess.run([sys.executable, "-c", STAR], capture_output=True, text=True, check=True)
    ten = "QwenImageEditTrainer ImageDataset sample_viewer cache_status before_after compare_edits compare_validation show_tensorboard plan doctor"
    assert done.stdout.strip() == f"{sorted([*ten.split(), 'sys'])} set()" and not done.stderr
    assert isinstance(qie_nb.__version__, str)


@pytest.mark.parametrize("name", qie_nb.__all__)
def test_lazy_name_is_like_its_object(name):
    lazy = getattr(qie_nb, name)
    real = lazy.__wrapped__
    from IPython.core.oinspect import getdoc
    assert inspect.signature(lazy) == inspect.signature(real) and pydoc.render_doc(lazy).split("\n", 1)[1] == pydoc.render_doc(real).split("\n", 1)[1]
    assert getdoc(lazy) == getdoc(real) == inspect.getdoc(real)


@pytest.mark.parametrize("what", PROVIDED)
def test_what_rooms_to_the_right_provide_is_there(what):
    assert callable(PROVIDED[what].__wrapped__) and str(PROVIDED[what]) == f"{PROVIDED[what].__wrapped__.__module__}.{PROVIDED[what].__name__}"


def test_lazy_class(pairs, tmp_path):
    from qie_nb.data.dataset import ImageDataset
    made = qie_nb.ImageDataset(settings(pairs(), tmp_path)["data"])
    assert type(made) is ImageDataset and isinstance(made, qie_nb.ImageDataset) and not isinstance(1, qie_nb.ImageDataset)
    assert issubclass(ImageDataset, qie_nb.ImageDataset) and qie_nb.ImageDataset.__getitem__ is ImageDataset.__getitem__
    assert not hasattr(qie_nb.ImageDataset, "_repr_html_")


def test_lazy_name_can_be_copied_and_pickled():
    for made in (pickle.loads(pickle.dumps(qie_nb.plan)), copy.copy(qie_nb.plan), copy.deepcopy(qie_nb.plan)): assert made.__wrapped__ is qie_nb.plan.__wrapped__


@pytest.mark.parametrize("code, theirs, full", [("import no_such_module", 1, 0), ("{}[0]", 1, 0), ("int('x')", 0, 1), ("[][0]", 0, 1), ("from qie_nb.config import make_config; make_config(dict(train=dict(stepz=1)))", 0, 0)])
def test_another_handler_keeps_its_errors(code, theirs, full, capsys): # Colab's
    from IPython.core.interactiveshell import InteractiveShell
    shell, calls = InteractiveShell(), []
    shell.set_custom_exc((ImportError, KeyError), lambda shell, etype, value, tb, tb_offset=None: calls.append(etype))
    for _ in range(2): errors_as_sentences(shell)
    shell.run_cell(code)
    out = capsys.readouterr().out
    assert len(calls) == theirs and ("Traceback" in out) == bool(full) and ("did you mean `train" in out) == ("stepz" in code)


FIRST = """
from qie_nb import *
t = QwenImageEditTrainer({config!r})
t.cache_embeddings(); t.fit(); t.save_lora("lora"); t.predict({image!r}, "invert the colours", num_inference_steps=2)
plan("2511", "T4", 512); doctor({config!r})
"""


def command(*arguments) -> list: return ["-m", "qie_nb.cli", *arguments]


@pytest.mark.slow
@pytest.mark.parametrize("started", [
    pytest.param([command("train", "--config", "run.yaml")], id="train"),
    pytest.param([command(name, "--config", "run.yaml") for name in ("precompute", "plan", "doctor")] + [command("--help")],
                 id="the other commands", marks=pytest.mark.weekly)])
def test_commands_write_nothing_to_stderr(started, pairs, tmp_path):
    config = settings(pairs(((96, 64),) * 4), tmp_path, train=dict(max_train_steps=2))
    (tmp_path/"run.yaml").write_text(json.dumps(config))
    for arguments in started:
        writes_nothing_to_stderr(arguments, tmp_path)


@pytest.mark.slow
def test_first_calls_write_nothing_to_stderr(pairs, tmp_path):
    root = pairs(((96, 64),) * 4)
    config = settings(root, tmp_path, train=dict(max_train_steps=2))
    code = FIRST.format(config=config, image=str(root/"control_images"/"0000.png"))
    writes_nothing_to_stderr(["-c", code], tmp_path)


def writes_nothing_to_stderr(arguments, folder):
    "A Python that is started with these arguments in a folder."
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0 and done.stderr == "", (arguments, done.stderr[-3000:])


@pytest.mark.slow
def test_notebook_shows_the_sentence_and_no_stderr(pairs, tmp_path):
    import nbformat
    from nbclient import NotebookClient
    config = settings(pairs(), tmp_path, train=dict(max_train_steps=2))
    cells = [FIRST.split("t.cache")[0].format(config=config), "t.cache_embeddings()", "QwenImageEditTrainer(dict(train=dict(stepz=1)))", "%tb", "1/0"]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(c).strip()) for c in cells])
    NotebookClient(nb, kernel_name="python3", allow_errors=True, resources=dict(metadata=dict(path=str(tmp_path)))).execute()
    outputs = [c.outputs for c in nb.cells]
    assert not [o for out in outputs for o in out if o.get("name") == "stderr"]
    mistake, full, bug = ("\n".join(out[-1].traceback) for out in outputs[2:])
    assert "stepz" in mistake and mistake.count("\n") < 4 and "Traceback" not in mistake
    assert "Traceback" in full and "Traceback" in bug


ALLOCATED = """
import os, torch
import qie_nb
print(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), torch._C._cuda_memorySnapshot(None)["allocator_settings"]["expandable_segments"])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not hasattr(__import__("torch")._C, "_cuda_memorySnapshot"), reason="a build of torch without CUDA")
@pytest.mark.parametrize("given, want", [({}, "expandable_segments:True True"), (dict(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False"), "expandable_segments:False False"),
                                         (dict(PYTORCH_ALLOC_CONF="max_split_size_mb:64"), "None False")])
def test_the_allocator_of_gpu_memory_has_expandable_segments_unless_the_user_chose(given, want):
    "torch itself says so, although it was imported before; no GPU is needed."
    env = {k: v for k, v in os.environ.items() if not k.endswith("ALLOC_CONF")} | given
    done = subprocess.run([sys.executable, "-c", ALLOCATED], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == want


@pytest.mark.parametrize("release, given, want", [
    ("5.15.167.4-microsoft-standard-WSL2", {}, None), ("6.8.0-45-generic", {}, "expandable_segments:True"),
    ("5.15.167.4-microsoft-standard-WSL2", dict(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
     "expandable_segments:True")])
def test_nothing_is_set_under_windows_where_the_first_allocation_would_fail(release, given, want, monkeypatch):
    from qie_nb.core import startup
    for name in startup.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(startup.platform, "release", lambda: release)
    monkeypatch.setattr(startup.sys, "platform", "linux")
    startup.set_allocator()
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == want


@pytest.mark.parametrize("given, expected", [
    (dict(KAGGLE_KERNEL_RUN_TYPE="Batch"), "0"), (dict(KAGGLE_URL_BASE="https://www.kaggle.com"), "0"), ({}, None),
    (dict(KAGGLE_KERNEL_RUN_TYPE="Batch", HF_XET_CHUNK_CACHE_SIZE_BYTES="7"), "7")])
def test_hf_xet_keeps_no_pieces_on_kaggle(given, expected):
    "Before huggingface_hub is loaded; the user's own value wins."
    code = ("import os, sys, qie_nb; loaded = {'huggingface_hub', 'hf_xet'} & {*sys.modules}; "
            "print(os.environ.get('HF_XET_CHUNK_CACHE_SIZE_BYTES'), loaded)")
    ours = ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE", "HF_XET_CHUNK_CACHE_SIZE_BYTES")
    env = {name: value for name, value in os.environ.items() if name not in ours} | given
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected} set()\n"


@pytest.mark.parametrize("given, size", [
    (dict(KAGGLE_KERNEL_RUN_TYPE="Batch"), "0"),
    (dict(KAGGLE_URL_BASE="https://www.kaggle.com"), "0"),
    (dict(COLAB_GPU="1"), None)])
def test_downloads_are_kept_in_pieces_except_on_kaggle(given, size, monkeypatch):
    from qie_nb.core import startup
    for name in ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE", startup.XET_CACHE):
        monkeypatch.setenv(name, "") # so that it is taken back afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    startup.set_download_cache()
    assert os.environ.get(startup.XET_CACHE) == size
    monkeypatch.setenv(startup.XET_CACHE, "7")
    startup.set_download_cache()
    assert os.environ[startup.XET_CACHE] == "7", "what the user chose stays"
