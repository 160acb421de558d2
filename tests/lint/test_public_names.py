"""An editor completes the public names of the trainer, the cache and the data set, finds where they are defined, and `help` explains them."""
import ast
import inspect
import pydoc
import re
import sys
from pathlib import Path

import jedi
import pytest

from qie_nb.cache import EmbeddingCacheManager
from qie_nb.data.dataset import ImageDataset
from qie_nb.trainer import QwenImageEditTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_style import is_class, name_of

ROOT = Path(__file__).parents[2]
TRAINER = """vae qwen_vl transformer tokenizer processor scheduler accelerator optimizer lr_scheduler global_step use_cache
cache_exist cache_dir quantize weight_dtype load_model setup_accelerator set_lora configure_optimizers fit training_step
save_checkpoint cache_embeddings cache_step setup_predict predict encode_image_embedding encode_prompt_image_embedding
decode_vae_latent load_lora save_lora merge_lora quantize_model""".split()
HIDDEN = """_training_step_cached _training_step_compute _compute_loss _encode_empty_prompt _pack_latents
_unpack_latents""".split() # names of the version before that others call
CACHE = "save_cache load_cache cache_exists get_cache_stats clear_cache verify".split()
DATASET = ["get_cache_stats"]
OF_OTHERS = { # where classes of other libraries are changed
    "extras/selfcheck.py": "a pipeline of diffusers computes on our devices"}
SET_IN_INIT = {"accelerator", "lr_scheduler", "weight_dtype"}
CELL = re.compile(r"#[0-9a-f]{8}\b") # a notebook's cell, as in the comment before exported code


def own_classes(cls) -> list:
    "A class and those that it inherits from, of this library alone."
    return [c for c in cls.__mro__ if c.__module__.startswith("qie_nb.")]


def methods_of(cls) -> list:
    "The public methods and properties that a class defines or inherits from another one of this library."
    return [n for c in own_classes(cls) for n in vars(c) if not n.startswith("_")]


def definer(cls, name) -> type:
    "The class that defines a name; the class itself for what `__init__` sets."
    return next((c for c in own_classes(cls) if name in vars(c)), cls)


CASES = [(QwenImageEditTrainer, TRAINER), (EmbeddingCacheManager, CACHE), (ImageDataset, DATASET)]
each_class = pytest.mark.parametrize("cls, names", CASES, ids=[cls.__name__ for cls, _ in CASES])


def script(cls, rest) -> jedi.Script:
    "A file that makes an object of a class and then has a line on it."
    text = f"from {cls.__module__} import {cls.__name__}\nmade = {cls.__name__}()\nmade.{rest}"
    return jedi.Script(text, project=jedi.Project(ROOT), environment=jedi.InterpreterEnvironment())


@each_class
def test_an_editor_completes_each_name_and_finds_its_definition(cls, names):
    names = {*names, *methods_of(cls)}
    assert names <= {c.name for c in script(cls, "").complete()}
    for name in names:
        found = script(cls, name).goto(3, len("made.") + 1)
        owner = definer(cls, name)
        assert {f.module_path for f in found} == {Path(inspect.getfile(owner))}, name
        where = f"{owner.__module__}.{owner.__name__}.{'__init__.' if name in SET_IN_INIT else ''}{name}"
        assert where in {f.full_name for f in found}, f"{name} is found in {found}"


def test_an_editor_completes_the_names_of_the_version_before():
    assert set(HIDDEN) <= {c.name for c in script(QwenImageEditTrainer, "_").complete()}


@each_class
def test_help_has_a_sentence_for_each_name_and_no_hash_of_a_cell(cls, names):
    text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    assert not CELL.search(text), CELL.search(text)
    for name in {*names, *methods_of(cls)}:
        if name in SET_IN_INIT:
            assert f"`{name}` is " in cls.__doc__, name
            continue
        sentence = inspect.getdoc(inspect.getattr_static(cls, name))
        assert sentence and sentence.split("\n")[0] in text, name


def test_the_hash_of_a_cell_is_seen():
    assert CELL.search("# %% ../nbs/01_trainer.ipynb #0c1e9303") and not CELL.search("# 12345678 bytes of #abc")


def hidden_attributes(tree) -> list:
    "Lines that set an attribute of a class by its name, or make a property with a call."
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call): continue
        on_class = name_of(node.func) == "setattr" and node.args and is_class(node.args[0])
        if on_class or isinstance(node.func, ast.Name) and node.func.id == "property": found.append(node.lineno)
    return found


def test_no_attribute_of_a_class_is_hidden():
    found = {}
    for path in (ROOT/"qie_nb").rglob("*.py"):
        lines = hidden_attributes(ast.parse(path.read_text()))
        if lines: found[path.relative_to(ROOT/"qie_nb").as_posix()] = lines
    assert found.keys() == OF_OTHERS.keys(), f"write methods and properties out: {found}"
    assert hidden_attributes(ast.parse("setattr(Trainer, 'x', 1)\nx = property(get, put)\nsetattr(trainer, 'x', 1)")) == [1, 2]
