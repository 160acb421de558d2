"""The plan's figures, the trainer's decisions and old files are as before the refactoring.

`tests/reference/make.py` computes the cases and says when its files may be written anew."""
import json, math
from collections import Counter
from pathlib import Path

import make
import pytest

from helpers import weekly
from qie_nb.cache import EmbeddingCacheManager
from qie_nb.config import make_config
from qie_nb.trainer import QwenImageEditTrainer


def difference(expected, found, place="") -> str:
    "The first value that differs, or an empty text."
    if isinstance(expected, dict) and isinstance(found, dict):
        odd = sorted(expected.keys() ^ found.keys())
        if odd:
            where = "in the reference only" if odd[0] in expected else "new"
            return f"{place}.{odd[0]} is {where}"
        pairs = [(f"{place}.{key}", expected[key], found[key]) for key in sorted(expected)]
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return f"{place}: {len(expected)} values in the reference, {len(found)} now"
        pairs = [(f"{place}[{n}]", *both) for n, both in enumerate(zip(expected, found))]
    elif same(expected, found):
        return ""
    else:
        return f"{place}: {expected!r} in the reference, {found!r} now"
    return next(filter(None, (difference(*both, where) for where, *both in pairs)), "")


def same(expected, found) -> bool:
    "Are two plain values equal, numbers to 9 digits?"
    numbers = [type(v) in (int, float) for v in (expected, found)]
    if all(numbers):
        return math.isclose(expected, found, rel_tol=1e-9)
    return type(expected) is type(found) and expected == found


def compare(file, group, cases):
    "The cases of a group are those of the file, and equal."
    found = make.named({group: cases})
    expected = {k: v for k, v in make.read_cases(file).items() if k.startswith(f"{group}: ")}
    assert expected, f"{file} has no cases of {group}"
    wrong = {case: difference(expected.get(case), found.get(case)) for case in expected | found}
    wrong = {case: why for case, why in wrong.items() if why}
    first = "\n".join(f"{case}: {why}" for case, why in list(wrong.items())[:5])
    assert not wrong, f"{len(wrong)} of {len(expected)} cases of {file} differ:\n{first}"


# --- figures and decisions
@pytest.mark.slow
@pytest.mark.parametrize("group", [
    "gpus_2511", "presets_2511", "choices", "adapters", "files", "texts", "settings", "gpus_v1",
    "presets_2509", weekly("gpus_2509"), weekly("presets_v1")])
def test_plans_are_as_before(group):
    compare("plans.json", group, make.plan_cases([group])[group])


@pytest.mark.slow
@pytest.mark.parametrize("group", make.DECISIONS)
def test_decisions_are_as_before(group, monkeypatch):
    for name in ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    compare("decisions.json", group, make.decision_cases([group])[group])


def test_each_group_of_the_files_is_compared():
    groups = {case.split(": ")[0] for case in make.read_cases("plans.json")}
    assert groups == set(make.PLANS)
    groups = {case.split(": ")[0] for case in make.read_cases("decisions.json")}
    assert groups == set(make.DECISIONS)


def test_each_setting_has_a_case_of_its_own_on_resume():
    cases = make.read_cases("decisions.json")
    assert not [n for n, _ in make.setting_names() if f"resumed: resume {n}" not in cases]


# --- the archive
@pytest.fixture
def before(tmp_path, monkeypatch):
    "The archive's folder, as the working directory."
    folder = make.unpacked(tmp_path/"before")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def encoded(monkeypatch):
    "Counts the calls of the two encoders."
    from diffusers import AutoencoderKLQwenImage
    from transformers import Qwen2_5_VLForConditionalGeneration
    count = Counter()

    def watch(owner, method):
        "Count the calls of a method."
        real = getattr(owner, method)

        def counted(*args, **kw):
            "The method."
            count[owner.__name__] += 1
            return real(*args, **kw)
        monkeypatch.setattr(owner, method, counted)

    watch(AutoencoderKLQwenImage, "encode")
    watch(Qwen2_5_VLForConditionalGeneration, "__init__")
    return count


def entries(folder) -> set:
    "(kind, key) of a cache's entries."
    return {(e.kind, e.key) for e in EmbeddingCacheManager(folder).entries()}


def test_each_entry_of_the_old_cache_is_found_by_its_key(before, encoded):
    "Also in the packed layout; nothing is encoded, and no entry is left over."
    old = entries("cache")
    report = QwenImageEditTrainer(make.raw_run(before)).cache_embeddings()
    assert not encoded and (report.encoded, report.reused) == (0, 10)
    assert entries("cache") == old == entries("packed") and len(old) == 50
    for folder in ("cache", "packed"):
        assert EmbeddingCacheManager(folder).verify() == []
        changes = dict(cache=dict(cache_dir=folder), train=dict(val_fraction=0))
        raw = make.merged(make.raw_run(before), changes)
        data = QwenImageEditTrainer(make_config(raw)).make_loader().dataset
        assert len(data) == 10 and not any(data.missing(n) for n in range(10)), folder


@pytest.mark.parametrize("layout", ["cache", "packed"])
def test_the_old_checkpoint_continues_to_the_same_losses(layout, before, encoded):
    expected = json.loads(Path("expected.json").read_text())["losses"]
    assert make.continued(layout) == pytest.approx(expected, rel=1e-3) and len(expected) == 4
    assert not encoded
