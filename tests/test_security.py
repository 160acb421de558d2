"""Hostile files: what they cannot do. docs/security.md names these tests and those of other files."""
import ast, io, json, os, pickle, re, shutil, signal
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save, save_file

from qie_nb.cache import EmbeddingCacheManager
from qie_nb.config import load_config_from_yaml, make_config
from qie_nb.core import display
from qie_nb.core.cache_entries import CacheEntryError, pack_entry, unpack_entry
from qie_nb.core.cache_layers import INDEX
from qie_nb.core.packed_index import DATABASE, index_checksum as _index_checksum, index_text, write_database
from qie_nb.core.files import file_digest
from qie_nb.lora import adapters as lora
from qie_nb.lora.formats import read_lora
from qie_nb.lora.model_card import model_card
from qie_nb.models.components import load_component
from qie_nb.models.loading import weight_files
from qie_nb.planning.doctor import doctor
from qie_nb.tiny.random_models import tiny_folder, tiny_pipeline
from qie_nb.training.checkpoint import complete_checkpoints, find_checkpoint, keep_newest, named_checkpoint, read_checkpoint, write_checkpoint

ROOT = Path(__file__).parent.parent
LAYER = "transformer_blocks.0.attn.to_q"
HOSTILE = "<img src=x onerror=alert(1)>"
LIBRARY = (ValueError, OSError)


@contextmanager
def seconds(n):
    "Fails if the block takes longer."
    def late(*_): raise AssertionError(f"took more than {n} seconds")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(n)
    try: yield
    finally: signal.alarm(0), signal.signal(signal.SIGALRM, before)


def refused(act, sentence=None, error=ValueError):
    "It raises an error of one short line."
    with seconds(10), pytest.raises(error, match=sentence) as e: act()
    if error is LIBRARY: return # in diffusers' words
    assert "\n" not in str(e.value) and "\x1b" not in str(e.value) and len(str(e.value)) < 1500
    return str(e.value)


def change(file, **values):
    data = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(data | values))


@pytest.fixture
def model(tmp_path): return Path(shutil.copytree(tiny_folder("2511"), tmp_path/"model"))


@pytest.fixture
def checkpoint(tmp_path):
    def adapter(folder): save_file({"w": torch.ones(2)}, folder/"pytorch_lora_weights.safetensors")
    return write_checkpoint(tmp_path/"checkpoints"/"step_00000002", adapter, dict(state={}, param_groups=[]), dict(format=2, global_step=2))


def listed(checkpoint): # by an attacker, who can compute digests
    (checkpoint/"COMPLETE").write_text(json.dumps({p.name: file_digest(p) for p in checkpoint.iterdir() if p.name != "COMPLETE"}))


def lora_file(folder, name="x.safetensors", layer=LAYER, more=(), **settings):
    tensors = {f"transformer.{layer}.lora_A.weight": torch.ones(4, 96), f"transformer.{layer}.lora_B.weight": torch.ones(96, 4)}
    config = {f"transformer.{k}": v for k, v in (dict(r=4, lora_alpha=4, target_modules=["to_q"]) | settings).items()}
    save_file(tensors, folder/name, dict(lora_adapter_metadata=json.dumps(config)) | dict(more))
    return folder/name


# --- pickles
class Payload:
    def __init__(self, marker): self.marker = marker
    def __reduce__(self): return open, (str(self.marker), "w")


def pickled(marker, with_torch):
    if not with_torch: return pickle.dumps(Payload(marker))
    torch.save(dict(weight=Payload(marker)), data := io.BytesIO())
    return data.getvalue()


def read_entry(file): return unpack_entry(file.read_bytes(), "prompt_embed", "ab")
def part(name): return lambda file: load_component(file.parents[1], name)
def resumed(file):
    listed(file.parent)
    return read_checkpoint(file.parent)


def packed_with(database): # its author can compute digests
    facts = dict(name=DATABASE, size=database.stat().st_size, sha256=file_digest(database))
    (database.parent/INDEX).write_bytes(index_text(facts, [], [], [], {}))
    return EmbeddingCacheManager(database.parent)


READERS = {
    "lora.safetensors": read_lora, "lora.bin": read_lora, "lora.pt": read_lora, "entry.safetensors": read_entry,
    "checkpoints/step_00000002/optimizer.safetensors": resumed, "checkpoints/step_00000002/state.json": resumed,
    "model/vae/diffusion_pytorch_model.safetensors": part("vae"), "model/text_encoder/model.safetensors": part("text_encoder"),
    "model/transformer/diffusion_pytorch_model.safetensors": part("transformer"),
    "cache/cache-index.json": lambda file: EmbeddingCacheManager(file.parent),
    "cache/cache-index.sqlite": lambda file: packed_with(file)}


@pytest.mark.parametrize("with_torch", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_pickles(name, with_torch, model, checkpoint, tmp_path):
    file, marker = tmp_path/name, tmp_path/"ran"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(pickled(marker, with_torch))
    refused(lambda: READERS[name](file), error=LIBRARY if "model/" in name else ValueError)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["text_encoder", "transformer", "vae"])
def test_model_with_pickles_only(name, model, tmp_path):
    for p in (model/name).glob("*.safetensors"): p.unlink()
    for file in ("pytorch_model.bin", "diffusion_pytorch_model.bin"): (model/name/file).write_bytes(pickled(tmp_path/"ran", True))
    refused(lambda: load_component(model, name), f"has no safetensors weights in {name}/; pickles are not read")
    assert not (tmp_path/"ran").exists()


# --- sizes
def with_header(header, length=None):
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(data) if length is None else length).to_bytes(8, "little") + data + b"x" * 8


def record(shape, begin, end): return with_header({f"transformer.{LAYER}.lora_A.weight": dict(dtype="F32", shape=shape, data_offsets=[begin, end])})


LIES = [with_header({}, 2**60), with_header({}, 2**64 - 1), with_header({}, 50), record([2], 0, 2**40), record([2], 8, 16), record([2], -8, 0),
        record([2**40, 2**40], 0, 8), with_header(b"[" * 100_000), with_header(b'{"a":' * 100_000)]


@pytest.mark.parametrize("name", [n for n in READERS if n.endswith(".safetensors")])
def test_headers_that_lie(name, model, checkpoint, tmp_path):
    for lie in LIES:
        (tmp_path/name).write_bytes(lie)
        refused(lambda: READERS[name](tmp_path/name), error=LIBRARY if "model/" in name else ValueError)


DEEP = "[" * 100_000


def test_deep_json(checkpoint, tmp_path):
    for name in ("run.yaml", "run.json"):
        (tmp_path/name).write_text(DEEP)
        refused(lambda: load_config_from_yaml(tmp_path/name), "nested too deeply")
    refused(lambda: read_lora(lora_file(tmp_path, more=dict(qie_nb=DEEP).items())), "cannot be read")
    for name in ("COMPLETE", "state.json"):
        old = (checkpoint/name).read_text()
        (checkpoint/name).write_text(DEEP)
        if name != "COMPLETE": listed(checkpoint)
        assert find_checkpoint("auto", checkpoint.parent) in (None, checkpoint), "the others are still found"
        refused(lambda: read_checkpoint(find_checkpoint(checkpoint)))
        (checkpoint/name).write_text(old)


def test_aliases_in_yaml(tmp_path):
    letters = "abcdefgp"
    text = "a: &a [x, x]\n" + "".join(f"{c}: &{c} [{', '.join([f'*{p}'] * 9)}]\n" for p, c in zip(letters, letters[1:]))
    for place in ("data: {prompt: *p}", "logging: {tracker_options: {wandb: {mode: *p}}}"):
        (tmp_path/"run.yaml").write_text(text + place)
        refused(lambda: load_config_from_yaml(tmp_path/"run.yaml"), "is nested too deeply or too large")
    (tmp_path/"run.yaml").write_text("data: {prompt: &p make it dusk}\nlogging: {project: *p}")
    assert load_config_from_yaml(tmp_path/"run.yaml").logging.project == "make it dusk", "plain aliases are allowed"


# --- code
@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system ['touch MARK']", "!!python/name:os.system ''", "!!python/object/new:os.system ['touch MARK']"])
def test_yaml_tags(tag, tmp_path):
    (tmp_path/"run.yaml").write_text("data: {prompt: " + tag.replace("MARK", str(tmp_path/"ran")) + " }")
    refused(lambda: load_config_from_yaml(tmp_path/"run.yaml"), "could not determine a constructor for the tag")
    assert not (tmp_path/"ran").exists()


EVIL = "open(MARK, 'w')\nclass Evil:\n    from_pretrained = classmethod(lambda cls, *a, **kw: cls())\n"
AUTO = dict(AutoTokenizer=["evil.Evil", "evil.Evil"], **dict.fromkeys(["AutoConfig", "AutoModel", "AutoProcessor", "AutoImageProcessor", "AutoVideoProcessor"], "evil.Evil"))
PARTS = ["tokenizer", "processor", "text_encoder", "vae", "transformer", "scheduler"]


@pytest.fixture
def evil(model, tmp_path):
    "A model whose folders have code, which `_class_name` and `auto_map` name; a question to the user fails the test."
    for name in PARTS:
        (model/name/"evil.py").write_text(EVIL.replace("MARK", repr(str(tmp_path/"ran"))))
        for p in (model/name).glob("*config.json"): change(p, auto_map=AUTO, _class_name="Evil", architectures=["Evil"])
    with mock.patch("builtins.input", side_effect=AssertionError("asked whether to run it")) as asked:
        yield model
    assert not (tmp_path/"ran").exists() and not asked.called


@pytest.mark.parametrize("name", PARTS)
def test_code_in_a_model_folder(name, evil):
    assert type(load_component(evil, name)).__module__.startswith(("diffusers.", "transformers."))


def test_a_processor_cannot_name_code(evil):
    for p in (evil/"processor").glob("*config.json"): change(p, tokenizer_class="Evil", processor_class="Evil", image_processor_type="Evil", video_processor_type="Evil")
    with pytest.raises(ValueError): load_component(evil, "processor")


@pytest.mark.parametrize("entry", [["diffusers", "DiffusionPipeline"], ["transformers", "AutoTokenizer"], ["transformers", "AutoModel"], ["transformers", "pipeline"],
                                   ["diffusers", "os"], ["transformers", "utils"], ["transformers", "__builtins__"], ["os", "system"], ["diffusers", ["a"]], ["evil", "Evil"],
                                   ["diffusers"], "os.system", 5], ids=str)
def test_classes_of_a_model(entry, evil):
    change(evil/"model_index.json", tokenizer=entry, vae=entry, scheduler=entry)
    for name in ("tokenizer", "vae", "scheduler"): refused(lambda: load_component(evil, name), "needs .* for ")


def test_kernels_are_not_downloaded(model):
    change(model/"text_encoder"/"config.json", attn_implementation="evil/kernel", _attn_implementation="evil/kernel")
    with mock.patch("transformers.modeling_utils.lazy_import_flash_attention") as get:
        assert load_component(model, "text_encoder").config._attn_implementation == "sdpa" and not get.called


FORBIDDEN = {"trust_remote_code", "pickle", "dill", "joblib", "marshal", "shelve", "extractall", "unpack_archive", "zipfile", "tarfile", "weights_only", "allow_pickle"}
CALLS = {"eval", "exec", "compile", "torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen"}


def dangers(code):
    "Names and calls that can run code from a file."
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.Import, ast.ImportFrom)): yield from {n.name.split(".")[0] for n in node.names} & FORBIDDEN
        if isinstance(node, ast.Attribute): yield from {node.attr} & FORBIDDEN
        if isinstance(node, ast.Call):
            if (name := ast.unparse(node.func)) in CALLS: yield name
            for k in node.keywords:
                value = getattr(k.value, "value", None)
                if k.arg == "shell" or k.arg in FORBIDDEN and value is not False: yield f"{name}({k.arg})"
                if name == "dict" and k.arg in FORBIDDEN and value is not False: yield f"{k.arg}"
        if isinstance(node, ast.Constant): yield from {node.value} & FORBIDDEN if isinstance(node.value, str) else ()


def test_no_code_from_files():
    found = {f"{p.name}: {d}" for p in (ROOT/"qie_nb").rglob("*.py") for d in dangers(p.read_text())}
    # it lists the names in a zip of images, and extracts nothing
    assert found == {"no_pairs.py: zipfile"}, found
    for bad in ("torch.load(f)", "eval(x)", "yaml.load(t)", "f(trust_remote_code=True)", "f(**{'trust_remote_code': True})", "run(c, shell=True)", "import zipfile", "z.extractall()"):
        assert list(dangers(bad)), bad
    assert not list(dangers("model.eval()\nf(trust_remote_code=False)\nyaml.safe_load(t)"))


# --- settings of a LoRA file
@pytest.mark.parametrize("settings, sentence", [
    (dict(r=10**9), "has rank 4 in .*, but rank 1000000000 in its header"), (dict(rank_pattern={"to_q": 10**9}), "has rank 4 in .*, but rank 1000000000"),
    (dict(r="4"), "impossible `r` in its header, '4'"), (dict(lora_alpha="x"), "impossible `lora_alpha`"), (dict(lora_alpha=float("nan")), "impossible `lora_alpha`"),
    (dict(rank_pattern={"([a-z0-9_.]+)+!": 3}), "impossible `rank_pattern`"), (dict(alpha_pattern={"(": 3}), "impossible `alpha_pattern`"), (dict(rank_pattern=5), "impossible `rank_pattern`"),
    (dict(init_lora_weights="pissa"), "was trained on changed base weights"), (dict(modules_to_save=["proj_out"]), "has `modules_to_save` in its header")])
def test_lora_settings(settings, sentence, tmp_path):
    tr = tiny_pipeline("2511").transformer
    refused(lambda: lora.load_lora(tr, lora_file(tmp_path, **settings)), sentence)
    assert not getattr(tr, "peft_config", {})


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("settings", [dict(target_modules="(.*.*.*.*)*!"), dict(rank_pattern={"img_in": 10**9}, target_modules=["to_q", "img_in"]),
                                      dict(megatron_config=dict(a=1), megatron_core="evil")], ids=lambda s: [*s][0])
def test_lora_settings_that_are_not_used(settings, tmp_path):
    tr = tiny_pipeline("2511").transformer
    before = {k: v.clone() for k, v in tr.state_dict().items()}
    with seconds(10): lora.load_lora(tr, lora_file(tmp_path, **settings))
    assert {k.rpartition(".lora_")[0].removeprefix("transformer.") for k in lora.lora_tensors(tr)} == {LAYER}
    assert all(torch.equal(v, before[k.replace(".base_layer", "")]) for k, v in tr.state_dict().items() if ".lora_" not in k)
    assert not tr.peft_config["default"].megatron_config


@pytest.mark.parametrize("layer", ["../../etc/passwd", "__class__", HOSTILE, "a\x1b[31m", "a\nb", "x." * 50_000 + "x"], ids=lambda s: ascii(s[:12]))
def test_lora_names(layer, tmp_path):
    tr = tiny_pipeline("2511").transformer
    refused(lambda: lora.load_lora(tr, lora_file(tmp_path, layer=layer)), "is not a pair of LoRA weights|there is no such layer|has no adapter")


# --- paths and links
@pytest.mark.parametrize("names", [["../x.safetensors"], ["/etc/passwd"], ["a/x.safetensors"], [5], [["a"]]], ids=str)
def test_weight_files_outside(names, model, tmp_path):
    shutil.copy(next((model/"vae").glob("*.safetensors")), tmp_path/"model"/"x.safetensors")
    index = model/"vae"/"diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps(dict(weight_map={str(k): n for k, n in enumerate(names)})))
    for read in (lambda: weight_files(model/"vae"), lambda: load_component(model, "vae")): refused(read, "which is no file beside it; copy the model again")
    index.unlink()
    (model/"vae"/"origin.json").write_text(json.dumps(dict(format="qie_nb-stored-1", kind="nf4", weights=names, dtype="float32")))
    refused(lambda: weight_files(model/"vae"), "which is no file beside it; copy the model again")


def test_checkpoint_names_outside(checkpoint, tmp_path):
    whole, secret = json.loads((checkpoint/"COMPLETE").read_text()), tmp_path/"secret"
    secret.write_text("x")
    for name in ("../../secret", str(secret), ".."):
        (checkpoint/"COMPLETE").write_text(json.dumps(whole | {name: file_digest(secret)}))
        assert not complete_checkpoints(checkpoint.parent)
    for odd in ({}, [], {"optimizer.safetensors": whole["optimizer.safetensors"]}):
        (checkpoint/"COMPLETE").write_text(json.dumps(odd))
        assert find_checkpoint("auto", checkpoint.parent) is None
    other = shutil.copytree(checkpoint, tmp_path/"other")
    listed(other), listed(checkpoint)
    for text in ("../../other", "../other", str(other)):
        for file in ("latest", "best"): (checkpoint.parent/file).write_text(text)
        assert find_checkpoint("latest", checkpoint.parent) == checkpoint
        assert {named_checkpoint(checkpoint.parent, file) for file in ("latest", "best")} == {checkpoint.parent/"other"}


def test_odd_state_does_not_block_other_checkpoints(checkpoint):
    odd = shutil.copytree(checkpoint, checkpoint.with_name("step_00000001"))
    for text in ("[]", "{", '{"written": "x"}', '{"written": [1]}', DEEP):
        (odd/"state.json").write_text(text)
        listed(odd)
        assert complete_checkpoints(checkpoint.parent) == [odd, checkpoint]
        refused(lambda: read_checkpoint(odd), "cannot be read .*; use another one")


@pytest.mark.parametrize("name", ["step_00000001", ".step_00000001.partial", ".step_00000001.old", ".step_00000003.partial"])
def test_linked_checkpoints(name, checkpoint, tmp_path):
    photos = shutil.copytree(checkpoint, tmp_path/"photos")
    (photos/"a.jpg").write_text("x"), listed(photos)
    (checkpoint.parent/name).symlink_to(photos)
    before = sorted(p.name for p in photos.iterdir())
    keep_newest(checkpoint.parent, 1)
    assert sorted(p.name for p in photos.iterdir()) == before, "only the link is removed"


def test_cache_with_linked_folders(tmp_path):
    mine, cache = tmp_path/"mine", EmbeddingCacheManager(tmp_path/"cache")
    cache.save_cache("pixel_latent", "ab12", torch.ones(2))
    for folder in ("ab", "loras", "old"): (mine/folder).mkdir(parents=True)
    files = [mine/"ab"/"ab34.safetensors", mine/"loras"/"lo99.safetensors", mine/"old"/"photo.jpg", mine/"old"/".host-1-x.tmp"]
    for f in files: f.write_text("x"), os.utime(f, (0, 0))
    (tmp_path/"cache"/"pixel_latent"/"lo").symlink_to(mine/"loras")
    (tmp_path/"cache"/"control_latent").symlink_to(mine)
    for name in ("quarantine", ".tmp"):
        shutil.rmtree(tmp_path/"cache"/name, ignore_errors=True)
        (tmp_path/"cache"/name).symlink_to(mine/"old")
    assert cache.gc(keep=set())["entries"]["count"] == 1
    cache.clean(), cache.clear_cache()
    assert all(f.exists() for f in files) and not cache.cache_exists("pixel_latent", "ab12")


@pytest.mark.parametrize("shard", ["../cache-1.safetensors", "/etc/passwd", "cache-1/../../x.safetensors"])
def test_packed_cache_names_outside(shard, tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path/"cache-1.safetensors")
    (tmp_path/"cache").mkdir()
    index = dict(shards=[shard], entries={}, identities={}) # an older one
    (tmp_path/"cache"/INDEX).write_text(json.dumps(index | dict(checksum=_index_checksum(index))))
    refused(lambda: EmbeddingCacheManager(tmp_path/"cache"), "names other files than shards", CacheEntryError)
    facts = write_database(tmp_path/"cache"/DATABASE, [], [])
    (tmp_path/"cache"/INDEX).write_bytes(index_text(facts, [shard], [72], ["0" * 64], {}))
    refused(lambda: EmbeddingCacheManager(tmp_path/"cache"), "names other files than shards", CacheEntryError)


@pytest.mark.parametrize("key", ["../../x", "/etc/passwd", "a/b", "", "..", "a\0b"])
def test_cache_keys(key, tmp_path):
    cache = EmbeddingCacheManager(tmp_path/"cache")
    for act in (lambda: cache.save_cache("pixel_latent", key, torch.ones(2)), lambda: cache.load_cache("pixel_latent", key)): refused(act)
    assert pack_entry("pixel_latent", "ab", torch.ones(2)) and not list(tmp_path.rglob("*.safetensors"))


# --- what is shown
def test_shown_texts_are_escaped(tmp_path):
    image = torch.zeros(8, 8, 3, dtype=torch.uint8).numpy()
    pages = [display.table_html([[HOSTILE]], [HOSTILE]), display.badge(HOSTILE), display.note(HOSTILE), display.image_html(image, HOSTILE)]
    config = make_config(dict(model=dict(pretrained_model_name_or_path=f"/no/{HOSTILE}"), data=dict(dataset_path=str(tmp_path/HOSTILE)), train=dict(output_dir=str(tmp_path/"out"))))
    pages.append(doctor(config, internet=False)._repr_html_())
    tell = []
    display.report_errors(tell.append, lambda: refused_lora(tmp_path))
    assert all("&lt;img src=x" in p and "<img src=x" not in p for p in [*pages, *tell]) and tell


def refused_lora(folder): read_lora(folder/f"{HOSTILE}.safetensors")


def test_model_card_of_a_hostile_lora_note():
    note = dict(base_model=f"a/b\nlicense: x\n---\n{HOSTILE}", base=HOSTILE, variant=HOSTILE, title=HOSTILE, steps=HOSTILE, weights="raw", captions=[HOSTILE])
    card = model_card(note)
    outside = re.sub(r"^(`{3,})(?!`).*\n(?:.*\n)*?\1$", "", card, flags=re.M)
    assert "<img" not in outside and card.count("\n---\n") == 1
