"""A prequantized copy on Kaggle: what is sent, what is refused before anything is, what failures say."""
import ast, inspect, json, os, re, shutil, subprocess, sys, zipfile
from types import ModuleType

import pytest

from qie_nb.core.environment import Environment
from qie_nb.devices.edit_model import EditModel
from qie_nb.extras import kaggle_upload
from qie_nb.extras.kaggle_upload import MOST_FILES, check_handle, read_copy, upload_copy, without_paths
from qie_nb.models.modulation import training_times
from qie_nb.models.prequantize import save_prequantized
from qie_nb.tiny.random_models import tiny_folder

HANDLE = "jane/tiny-2511-nf4"
VERSION = "1.0.3" # of kagglehub, whose signatures the stand-in has


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    "A prequantized copy of a tiny model in a folder with a private name."
    model = shutil.copytree(tiny_folder("2511"), tmp_path_factory.mktemp("home")/"jane-secret-model")
    config = model/"vae"/"config.json"
    values = json.loads(config.read_text()) | dict(_name_or_path=str(model/"vae"))
    config.write_text(json.dumps(values))
    parts = EditModel(str(model), quantize=dict(transformer="nf4", text_encoder="nf4"))

    def sets(dtype):
        return {(0.,): "timestep 0", training_times(dtype): "training"}
    return save_prequantized(parts, tmp_path_factory.mktemp("made")/"copy", sets)


@pytest.fixture
def copy(original, tmp_path):
    return shutil.copytree(original, tmp_path/"copy")


class Kaggle(ModuleType):
    "Stands for the package kagglehub: keeps what it would send, as Kaggle mounts it."
    def __init__(self, mounted):
        super().__init__("kagglehub")
        self.mounted = mounted
        self.notes = []
        self.error = None
        self.unknown = None

    def dataset_upload(
        self, handle: str, local_dataset_dir: str, version_notes: str = "",
        ignore_patterns: list[str] | str | None = None,
    ) -> None:
        self.notes.append(version_notes)
        self.folder = local_dataset_dir
        if self.error: raise self.error
        shutil.copytree(local_dataset_dir, self.mounted/handle.split("/")[1])

    def whoami(self, *, verbose: bool = True) -> dict:
        if self.unknown: raise PermissionError("User is not authenticated") from self.unknown
        return {"username": "jane"}

    def sent(self): return sorted(str(p.relative_to(self.mounted)) for p in self.mounted.rglob("*") if p.is_file())


@pytest.fixture
def kaggle(tmp_path, monkeypatch):
    (tmp_path/"input").mkdir()
    monkeypatch.setitem(sys.modules, "kagglehub", Kaggle(tmp_path/"input"))
    return sys.modules["kagglehub"]


def test_a_copy_is_sent_found_and_the_same_model(copy, original, kaggle, capsys, monkeypatch):
    assert upload_copy(copy, HANDLE) == f"https://www.kaggle.com/datasets/{HANDLE}"
    said = capsys.readouterr().out
    assert kaggle.notes == ["Qwen-Image-Edit-2511, transformer nf4, text_encoder nf4, qie_nb 0.1.0"]
    assert f"uploading {len(kaggle.sent())} files (" in said and kaggle.notes[0] in said
    assert said.index("uploading") < said.index("uploaded: https://www.kaggle.com/datasets/jane/tiny-2511-nf4")
    # the lines to paste, run where Kaggle has mounted it
    session = Environment("kaggle", inputs=(kaggle.mounted,), working=copy.parent/"none")
    monkeypatch.setattr("qie_nb.core.environment.detect_environment", lambda: session)
    pasted, names = [line.strip() for line in said.splitlines() if line.startswith("    ")], {}
    exec("\n".join(pasted), names)
    own = names["own"]
    found = own["model"]["pretrained_model_name_or_path"]
    assert found == str(kaggle.mounted/"tiny-2511-nf4")
    quantize = dict(transformer="nf4", text_encoder="nf4")
    ours, theirs = (EditModel(str(f), quantize=quantize).identity() for f in (original, found))
    assert {k: v for k, v in ours.items() if k != "model"} == {k: v for k, v in theirs.items() if k != "model"}


def test_only_the_copys_own_files_are_sent(copy, kaggle, capsys, monkeypatch):
    (copy/".git").mkdir()
    strange = [".git/config", ".cache", "kaggle.json", "notes.md", "transformer/.token", "vae/photo.png",
               "vae/diffusion_pytorch_model.fp16.safetensors", "transformer/modulation/.lock"]
    for name in strange: (copy/name).write_text("private")
    (copy/"link").symlink_to(copy.parent)
    upload_copy(copy, HANDLE)
    for name in kaggle.sent():
        assert not re.search(r"private|secret|\.token|link", name), name
        assert name.removeprefix("tiny-2511-nf4/") not in strange, name
    assert "'.cache' and 7 more" in capsys.readouterr().out
    for file in kaggle.mounted.rglob("*"):
        assert not file.is_file() or b"secret" not in file.read_bytes(), "a path of the model's folder"
    about = json.loads((kaggle.mounted/"tiny-2511-nf4"/"prequantized.json").read_text())
    assert about["model"] == "Qwen-Image-Edit-2511" and about["components"]["vae"] is None
    for file in (copy/"prequantized.json", copy/"vae"/"config.json"):
        assert "secret" in file.read_text(), "the folder itself is not changed"


def test_files_without_a_path_are_not_written_again(copy):
    changed = [str(f) for f in read_copy(copy).files if without_paths(read_copy(copy), f)]
    assert changed == ["prequantized.json", "vae/config.json"]


def edited(copy, **changes):
    file = copy/"prequantized.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut(file): file.write_bytes(file.read_bytes()[:-100])


def first(copy, pattern): return next(copy.glob(pattern))


BROKEN = { # {what was done to a copy: (how, the message)}
    "begun": (lambda c: (c/"prequantized.json").unlink(), "no complete prequantized copy.*save_prequantized"),
    "record": (lambda c: (c/"prequantized.json").write_text("{"), "does not name a model"),
    "list": (lambda c: (c/"prequantized.json").write_text("[]"), "does not name a model"),
    "outside": (lambda c: edited(c, components={"../copy/vae": None}), "does not name a model"),
    "model": (lambda c: edited(c, model=3), "does not name a model"),
    "part": (lambda c: first(c, "transformer/part*").unlink(), "transformer/part-00000-01.safetensors is missing"),
    "cut": (lambda c: cut(first(c, "text_encoder/part*")), "not complete: .*cannot be read"),
    "vae": (lambda c: cut(first(c, "vae/*.safetensors")), "not complete: .*cannot be read"),
    "no vae": (lambda c: shutil.rmtree(c/"vae"), "lacks vae/"),
    "no weights": (lambda c: first(c, "vae/*.safetensors").unlink(), "no safetensors weights in vae/"),
    "table": (lambda c: first(c, "transformer/modulation/*.safetensors").unlink(),
              "not complete: .*cache-00001-00001.safetensors beside it is missing; make it again"),
    "cut table": (lambda c: cut(first(c, "transformer/modulation/*.safetensors")), "not complete: "),
    "index": (lambda c: first(c, "transformer/modulation/*.sqlite").unlink(), "not complete: .*cache-index"),
    "no index": (lambda c: first(c, "transformer/modulation/*.json").unlink(), "not complete: "),
    "not quantized": (lambda c: (c/"transformer"/"origin.json").unlink(),
                      "transformer is not quantized, but prequantized.json says nf4"),
    "other": (lambda c: edited(c, components=dict(transformer="qint8")),
              "not complete: transformer is nf4, but prequantized.json says qint8"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_copy_is_refused_before_kaggle_is_asked(case, copy, kaggle, monkeypatch):
    spoil, message = BROKEN[case]
    spoil(copy)
    monkeypatch.setattr(kaggle, "whoami", None)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as e: upload_copy(copy, HANDLE)
    assert not kaggle.notes and "\n" not in str(e.value)


@pytest.mark.parametrize("folder, message", [
    ("", "`folder` is empty"), ("https://kaggle.com/x", "give the folder"), (tiny_folder("2511"), "save_prequantized"),
    ("/nowhere", "save_prequantized"), (3, "must be a path")])
def test_other_folders_are_refused(folder, message, kaggle):
    with pytest.raises(ValueError, match=message): upload_copy(folder, HANDLE)
    assert not kaggle.notes


@pytest.mark.parametrize("handle", [
    "", "jane", "jane/a/b", "jane/short", "jane/" + 51 * "a", "jane/with blank", "jane/copy-nf4/versions/2",
    "../copy-nf4", "jane/copy-nf4\n", None])
def test_a_handle_is_owner_and_name(handle, copy, kaggle):
    with pytest.raises(ValueError, match="`handle` must be owner/name"): upload_copy(copy, handle)
    assert not kaggle.notes and check_handle(HANDLE) == HANDLE


def test_a_copy_above_kaggles_limit_is_refused(copy, kaggle, monkeypatch):
    monkeypatch.setattr(kaggle_upload, "MOST_BYTES", 10**6)
    why = r"the copy has 12\.\d+ MB, but a data set on Kaggle at most 1.00 MB; make one with `model.quantize`"
    with pytest.raises(ValueError, match=why): upload_copy(copy, HANDLE)
    assert not kaggle.notes


def test_many_files_need_room_for_a_zip_file(copy, kaggle, monkeypatch, capsys):
    monkeypatch.setattr(kaggle_upload, "MOST_FILES", 5)
    monkeypatch.setattr(kaggle_upload, "free_bytes", lambda folder: 10**6)
    with pytest.raises(OSError, match="1.00 MB free and needs 12.*TMPDIR.*part_bytes"): upload_copy(copy, HANDLE)
    assert not kaggle.notes
    monkeypatch.setattr(kaggle_upload, "free_bytes", lambda folder: 10**9)
    upload_copy(copy, HANDLE)
    assert "packs more than 5 files into one zip file" in capsys.readouterr().out


def test_without_package_or_account_nothing_is_sent(copy, kaggle, monkeypatch):
    kaggle.unknown = RuntimeError("no credentials")
    with pytest.raises(ValueError, match="kagglehub.login()"): upload_copy(copy, HANDLE)
    kaggle.unknown = OSError("no route")
    with pytest.raises(ConnectionError, match="cannot be reached"): upload_copy(copy, HANDLE)
    assert not kaggle.notes
    for package in (None, ModuleType("kagglehub")): # missing; too old
        monkeypatch.setitem(sys.modules, "kagglehub", package)
        with pytest.raises(ValueError, match="pip install -U kagglehub"): upload_copy(copy, HANDLE)


def test_another_owner_is_named(copy, kaggle, capsys):
    upload_copy(copy, "acme/tiny-2511-nf4")
    assert "you are jane on Kaggle, so acme must be an organization of yours" in capsys.readouterr().out


class Answered(OSError):
    "As kagglehub's KaggleApiHTTPError."
    def __init__(self, code):
        super().__init__(f"{code} Client Error.\n\nsee there")
        self.response = type("Response", (), dict(status_code=code))()


@pytest.mark.parametrize("error, kind, message", [
    (Answered(403), ValueError, "does not let you write to 'jane/tiny-2511-nf4' .403 Client Error. see there."),
    (Answered(500), ValueError, "did not take"),
    (RuntimeError("The title is taken"), ValueError, "did not take 'jane/tiny-2511-nf4' .The title is taken."),
    (TimeoutError("read"), ConnectionError, "broke off .*nothing was published"),
    (KeyboardInterrupt(), KeyboardInterrupt, None)])
def test_a_failed_upload_is_one_sentence_and_leaves_nothing(error, kind, message, copy, kaggle, capsys):
    kaggle.error = error
    with pytest.raises(kind, match=message) as e: upload_copy(copy, HANDLE)
    assert "\n" not in str(e.value) and "uploaded:" not in capsys.readouterr().out
    assert not os.path.exists(kaggle.folder), "the folder of links"
    assert read_copy(copy).files, "the copy is still there"


def signatures(source, names):
    "Arguments of functions in a Python file: {name: text}."
    tree = ast.parse(source)
    return {n.name: ast.unparse(n.args) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in names}


@pytest.mark.slow
@pytest.mark.weekly
def test_the_stand_in_has_kagglehubs_signatures(tmp_path):
    "Reads the published package without installing it."
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp_path, f"kagglehub=={VERSION}"]
    got = subprocess.run(command, capture_output=True, text=True)
    if got.returncode: pytest.skip(f"needs a package index: {got.stderr.strip().splitlines()[-1:]}")
    names = {"dataset_upload", "whoami"}
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        theirs = {}
        for module in ("datasets", "auth"):
            theirs |= signatures(wheel.read(f"kagglehub/{module}.py").decode(), names)
        uploads = wheel.read("kagglehub/gcs_upload.py").decode()
        helpers = wheel.read("kagglehub/datasets_helpers.py").decode()
        assert "r.is_private = True" in helpers, "a new data set is private"
    ours = signatures(inspect.getsource(sys.modules[__name__]), names)
    assert {name: args.removeprefix("self, ") for name, args in ours.items()} == theirs
    assert f"MAX_FILES_TO_UPLOAD = {MOST_FILES}" in uploads
