"""A tree carried by clients that skip sub-folders: nothing is lost, nothing copied, nothing written to the mount, and it reads as before."""
import errno, fnmatch, json, os, shutil, subprocess, sys
from pathlib import Path

import pytest

from qie_nb.core import files

from qie_nb.core import flat
from qie_nb.cache import EmbeddingCacheManager, check_cache_exists
from qie_nb.training.checkpoint import find_checkpoint
from qie_nb.core.flat import FLAT, flatten, read_flat, tree_of
from qie_nb.models.components import Components
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from helpers import adapters_equal, settings


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("QIE_NB_HOME", str(tmp_path/"home"))
    monkeypatch.setattr(flat, "_trees", {})


def contents(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}
def state_of(folder): return {p: (p.stat().st_ino, p.stat().st_mtime_ns, p.stat().st_size) for p in [Path(folder), *Path(folder).rglob("*")]}


NAMES = ["model_index.json", "transformer/config.json", "a/b/c/d.bin", "a--b/c.txt", "a/b--c.txt", "A/config.json", "a/Config.json", "logs/größe 1.txt", "logs/with space.txt",
         "dataset-metadata.json", "kernel-metadata.json", "dataset-cover-image.png", "old/data.zip", "old/data.tar.gz", "x/" + "long" * 55 + ".safetensors", "empty/nothing.txt", "-dash/-x", FLAT.replace("index", "plan") + ".txt"]

def awkward(root):
    for n, name in enumerate(NAMES):
        (root/name).parent.mkdir(parents=True, exist_ok=True)
        (root/name).write_bytes(b"" if "empty" in name else f"{n} {name}".encode() * (n + 1))
    (root/".locks").mkdir(), (root/".locks"/"00.lock").write_text("x")
    return root


def imitated(folder):
    "What `KaggleApi.upload_files` (kaggle 2.2.5) sends of a folder with --dir-mode skip."
    own = ["dataset-metadata.json", "datapackage.json", "kernel-metadata.json", "model-metadata.json", "model-instance-metadata.json", *(f"dataset-cover-image{e}" for e in (".png", ".jpg", ".jpeg", ".webp"))]
    ignored = lambda n, is_dir: any(fnmatch.fnmatch(n + "/" * is_dir, p) for p in (".git/", "*/.git/", ".cache/", ".huggingface/") if is_dir or not p.endswith("/"))
    return [n for n in os.listdir(folder) if n not in own and not ignored(n, os.path.isdir(os.path.join(folder, n))) and os.path.isfile(os.path.join(folder, n))]


_REAL = """
import json, sys
from kaggle.api.kaggle_api_extended import KaggleApi, ResumableUploadContext
class Request: files = []
api, sent = KaggleApi(), []
api._upload_file = lambda name, path, *a, **kw: sent.append(name)
with ResumableUploadContext() as c:
    for n in __import__("os").listdir(sys.argv[1]): assert len(__import__("os").path.basename(c.get_upload_info_file_path(n)).encode()) < 255
    api.upload_files(Request(), None, sys.argv[1], None, c, True)
print(json.dumps(sent))
"""

def real(folder):
    "The same by the client's own code, where it is installed, or in the folder that QIE_NB_KAGGLE_CLIENT names (pip install --target)."
    paths = os.pathsep.join(filter(None, [os.environ.get("QIE_NB_KAGGLE_CLIENT"), os.environ.get("PYTHONPATH")]))
    env = os.environ | dict(PYTHONPATH=paths, KAGGLE_USERNAME="nobody", KAGGLE_KEY="0" * 32)
    run = subprocess.run([sys.executable, "-c", _REAL, str(folder)], capture_output=True, text=True, env=env)
    if "No module named 'kaggle'" in run.stderr: pytest.skip("the kaggle client is not installed")
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("walk", [imitated, real])
def test_the_client_takes_everything(walk, tmp_path):
    tree = awkward(tmp_path/"tree")
    assert len(walk(tree)) < 3, "and of the tree itself it leaves out nearly all"
    flatten(tree, tmp_path/"flat")
    shutil.copytree(tmp_path/"flat", tmp_path/"with metadata"), (tmp_path/"with metadata"/"dataset-metadata.json").write_text("{}")
    sent = walk(tmp_path/"with metadata")
    assert len({n.lower() for n in sent}) == len(sent) and not any(n.endswith((".zip", ".gz")) or not n.isascii() or " " in n for n in sent)
    arrived = tmp_path/"mount"
    arrived.mkdir()
    for n in sent: shutil.copy(tmp_path/"with metadata"/n, arrived/n)
    wanted = {k: v for k, v in contents(tree).items() if not k.startswith(".locks")}
    assert wanted.keys() == {*NAMES} and contents(tree_of(arrived)) == wanted


def test_nothing_is_copied_where_it_can_be_linked_and_nothing_twice_elsewhere(tmp_path, monkeypatch):
    tree, copies = awkward(tmp_path/"tree"), []
    monkeypatch.setattr(flat.shutil, "copy2", lambda a, b, real=shutil.copy2: (copies.append(a), real(a, b))[1])
    made = flatten(tree, tmp_path/"flat")
    inodes = {p.stat().st_ino for p in tree.rglob("*") if p.is_file()}
    assert not copies and all(p.stat().st_ino in inodes for p in made[:-1])
    def no_links(*a): raise OSError(errno.EXDEV, "another file system")
    monkeypatch.setattr(flat.os, "link", no_links)
    flatten(tree, tmp_path/"other")
    assert len(copies) == len(NAMES) - 1 and contents(tree_of(tmp_path/"other")) == contents(tree_of(tmp_path/"flat"))


def test_room_is_asked_for_before_the_first_copy(tmp_path, monkeypatch):
    tree = awkward(tmp_path/"tree")
    monkeypatch.setattr(flat, "free_bytes", lambda p: 100)
    monkeypatch.setattr(files, "free_bytes", lambda p: 100)
    flatten(tree, tmp_path/"linked") # links need none
    monkeypatch.setattr(flat, "_device", lambda p: p == tmp_path/"flat")
    with pytest.raises(OSError, match="is full: .* MB are needed and 0.0 MB are free"): flatten(tree, tmp_path/"flat")
    monkeypatch.undo()
    assert os.listdir(tmp_path/"flat") == []


@pytest.mark.parametrize("in_place", [False, True])
def test_interrupted_anywhere_and_called_again(in_place, tmp_path, monkeypatch):
    whole, n = contents(awkward(tmp_path/"model")), 0
    wanted = {k: v for k, v in whole.items() if not k.startswith(".locks")}
    real = os.replace
    for stop in range(1, 99):
        tree = shutil.copytree(tmp_path/"model", tmp_path/f"tree{stop}")
        out, calls = tree if in_place else tmp_path/f"flat{stop}", []
        def killed(a, b):
            calls.append(b)
            if len(calls) == stop: raise KeyboardInterrupt
            real(a, b)
        monkeypatch.setattr(os, "replace", killed)
        try: flatten(tree, None if in_place else out); done = True
        except KeyboardInterrupt: done = False
        monkeypatch.setattr(os, "replace", real)
        if not done:
            assert not (out/FLAT).is_file() and tree_of(out) == out, "half of it is no flat folder"
            flatten(tree, None if in_place else out)
        assert contents(tree_of(out)) == wanted
        if in_place: assert not [d for d in tree.iterdir() if d.is_dir() and d.name != ".locks"]
        if done: break
    assert stop > len(NAMES) - 3


def test_a_damaged_upload_and_a_foreign_index(tmp_path):
    flatten(awkward(tmp_path/"tree"), tmp_path/"flat")
    (tmp_path/"flat"/"a--b--c--d.bin").write_text("cut")
    with pytest.raises(ValueError, match=r"is not whole: a--b--c--d.bin has 3 bytes instead of \d+; upload it again"): tree_of(tmp_path/"flat")
    for files, why in (({"../../x": ["a--b--c--d.bin", 3]}, "none of ours"), ({"x": ["../model_index.json", 3]}, "none of ours"), ({"/etc/x": ["a--b--c--d.bin", 3]}, "none of ours"), ([], "cannot be used")):
        (tmp_path/"flat"/FLAT).write_text(json.dumps(dict(format="qie_nb-flat-1", files=files)))
        with pytest.raises(ValueError, match=why): tree_of(tmp_path/"flat")


def test_a_model_checkpoints_and_cache_in_one_flat_folder(pairs, tmp_path):
    "A session's whole output is uploaded flat; the next one names the paths that it would have in a tree, and writes nothing there."
    root, out = pairs(), tmp_path/"working"
    config = settings(root, out, cache=dict(cache_dir=str(out/"cache")), train=dict(output_dir=str(out), max_train_steps=4, save_steps=2))
    first = QwenImageEditTrainer(config)
    first.cache_embeddings()
    first.fit()
    first.save_lora(out/"lora")
    shutil.copytree(tiny_folder("2511"), out/"model")
    mount = tmp_path/"input"/"session-1"
    flatten(out, mount)
    before = state_of(mount)
    assert check_cache_exists(str(mount/"cache")) and not EmbeddingCacheManager(str(mount/"cache")).writable
    assert find_checkpoint(str(mount/"checkpoints"/"latest")).name == find_checkpoint(str(mount/"checkpoints"/"step_00000004")).name == "step_00000004"
    again = settings(root, tmp_path/"next", cache=dict(cache_dir=[str(mount/"cache"), str(tmp_path/"next"/"cache")]), train=dict(output_dir=str(tmp_path/"next"), max_train_steps=6))
    again["model"]["pretrained_model_name_or_path"] = str(mount/"model")
    again["train"]["resume_checkpoint"] = str(mount/"checkpoints"/"latest")
    second = QwenImageEditTrainer(again)
    assert second.cache_embeddings().encoded == 0, "the model is the same, and the cache is its own"
    second.fit()
    config["train"] |= dict(output_dir=str(tmp_path/"straight"), max_train_steps=6)
    assert second.global_step == 6 and adapters_equal(second, QwenImageEditTrainer(config).fit())
    loaded = QwenImageEditTrainer(again)
    loaded.load_lora(str(mount/"lora"))
    assert adapters_equal(loaded, first) and state_of(mount) == before


def test_a_flat_model_is_read_through_links_and_known_again(tmp_path, monkeypatch):
    flatten(tiny_folder("2511"), tmp_path/"flat")
    parts = Components(str(tmp_path/"flat"))
    whole = Components(str(tiny_folder("2511")))
    assert parts.identity()["text_encoder"] == whole.identity()["text_encoder"] and parts.has_encoders()
    tree = tree_of(tmp_path/"flat")
    assert all(p.is_symlink() for p in tree.rglob("*") if p.is_file()) and str(tree).startswith(str(tmp_path/"home"))
    monkeypatch.setattr(flat, "_trees", {}) # the next process
    assert tree_of(tmp_path/"flat") == tree, "so that digests are found again"
    shutil.rmtree(tree)
    assert contents(tree_of(tmp_path/"flat")) == contents(tiny_folder("2511"))
    monkeypatch.setenv("QIE_NB_HOME", "/proc/nowhere"), monkeypatch.setattr(flat, "_trees", {})
    assert contents(tree_of(tmp_path/"flat")) == contents(tiny_folder("2511")), "where the cache folder cannot be written"
    assert read_flat(tmp_path/"flat").keys() == contents(tiny_folder("2511")).keys()
