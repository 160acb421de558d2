"""Data sets made on the spot, and a count of the components that are built from disk."""
import collections, json, os, subprocess, sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def write_pairs(root, sizes, controls=1, caption="invert the colours", seed=0):
    "Random pairs of the given (width, height); the target inverts the first control."
    folders = [root/"training_images", root/"control_images", *(root/f"control_images_{n + 1}" for n in range(1, controls))]
    for f in folders: f.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for i, (w, h) in enumerate(sizes):
        pictures = [rng.integers(0, 255, (h, w, 3), dtype=np.uint8) for _ in range(controls)]
        Image.fromarray(255 - pictures[0]).save(root/"training_images"/f"{i:04}.png")
        (root/"training_images"/f"{i:04}.txt").write_text(caption if isinstance(caption, str) else caption[i])
        for f, p in zip(folders[1:], pictures): Image.fromarray(p if f.name == "control_images" else np.ascontiguousarray(p.transpose(1, 0, 2))).save(f/f"{i:04}.png")
    return root


@contextmanager
def small_areas(variant, control, vl):
    "The areas that the edit pipelines hard-code made small; all in pixels."
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit_v1, pipeline_qwenimage_edit_plus as edit_plus
    module = edit_v1 if variant == "v1" else edit_plus
    real = module.calculate_dimensions
    with pytest.MonkeyPatch.context() as mp:
        mp.setattr(module, "calculate_dimensions", lambda area, ratio: real(control if area == 1024 * 1024 else area, ratio))
        if variant != "v1":
            mp.setattr(edit_plus, "CONDITION_IMAGE_SIZE", vl)
            mp.setattr(edit_plus, "VAE_IMAGE_SIZE", control)
        yield


@pytest.fixture
def pairs(tmp_path):
    return lambda sizes=((48, 32), (32, 48), (40, 40)), **kw: write_pairs(tmp_path/"set", sizes, **kw)


@pytest.fixture
def built(monkeypatch):
    "How often each real class was built from disk, counted at `from_pretrained` and at our own streamed loading."
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLForConditionalGeneration
    count = collections.Counter()
    for cls in (AutoencoderKLQwenImage, QwenImageTransformer2DModel, Qwen2_5_VLForConditionalGeneration):
        real = cls.from_pretrained.__func__

        def counted(klass, *a, _real=real, **kw):
            count[klass.__name__] += 1
            return _real(klass, *a, **kw)
        monkeypatch.setattr(cls, "from_pretrained", classmethod(counted))
    from qie_nb.models import components as models
    def streamed(cls, *a, _real=models.stream, **kw):
        count[cls.__name__] += 1
        return _real(cls, *a, **kw)
    monkeypatch.setattr(models, "stream", streamed)
    return count


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call": item.failed = report.failed # for fixtures that keep what was to be seen
    return report


def pytest_terminal_summary(terminalreporter):
    "What was skipped is named, so that nobody takes it for passed."
    for r in terminalreporter.stats.get("skipped", []):
        why = r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr)
        terminalreporter.write_line(f"not run: {r.nodeid}: {why.removeprefix('Skipped: ')}")


def few_trials(script, request, tmp_path_factory):
    "The cases of faults.py or kills.py that this session selected, in a process of its own that forks freely: {name: result}."
    chosen = [item.callspec.params["case"] for item in request.session.items if item.fspath == request.node.fspath and hasattr(item, "callspec")]
    here, out = Path(__file__).parent, tmp_path_factory.mktemp(script)/"results.json"
    paths = os.pathsep.join(filter(None, [str(here.parent), os.environ.get("PYTHONPATH")]))
    run = subprocess.run([sys.executable, here/f"{script}.py", "--only", *chosen, "--out", out], capture_output=True, text=True, env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=paths))
    assert out.is_file(), run.stdout[-2000:] + run.stderr[-2000:]
    return {r["name"]: r for r in json.loads(out.read_text())["cases"]}
