"""Comparisons: each column equals `predict`, inputs are encoded once, and the trainer is unchanged afterwards."""
import json, re, shutil

import numpy as np
import pytest
import torch
from PIL import Image

from qie_nb.core import display as shown
from qie_nb.core.display import VIEW
from qie_nb.encoding.encoder import Encoder
from qie_nb.evaluation import compare as comparison
from qie_nb.evaluation.compare import Comparison, compare_edits, find_adapter
from qie_nb.lora import adapters as lora
from qie_nb.trainer import QwenImageEditTrainer
from test_mixing import IMAGE, same_state, state_of, trainer, write

OTHER = Image.fromarray(np.random.default_rng(2).integers(0, 255, (56, 40, 3), dtype=np.uint8))
SMALL = dict(num_inference_steps=2, height=48, width=64)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    d = tmp_path_factory.mktemp("loras")
    return dict(style=write(d/"style.safetensors", 1), other=write(d/"other.safetensors", 2, r=8, lora_alpha=3, target_modules="attention_text"),
                fast=write(d/"Qwen-Image-Edit-Lightning-4steps-V1.0.safetensors", 9, lora_alpha=8))


@pytest.fixture
def encoded(monkeypatch):
    "Calls of the encoders."
    calls = []
    for name in ("image", "prompt"):
        def counted(self, what, *a, _real=getattr(Encoder, name), _name=name, **kw):
            calls.append((_name, what if isinstance(what, str) else np.asarray(what).tobytes()))
            return _real(self, what, *a, **kw)
        monkeypatch.setattr(Encoder, name, counted)
    return calls


def alone(files, name, image=IMAGE, prompt="make it blue", weight=1.0, seed=0, **kw):
    t = trainer()
    if name: t.load_lora(files[name], weight=weight)
    return t.predict(image, prompt, seed=seed, **SMALL | kw)


def same(a, b): return np.abs(a.astype(int) - b).max() <= 2


def test_columns_equal_predict_and_inputs_are_encoded_once(files, encoded):
    t = trainer()
    c = compare_edits(t, [IMAGE, OTHER, IMAGE], ["make it blue", "make it blue", "remove it"], [None, files["style"]], **SMALL)
    images, prompts = ([w for n, w in encoded if n == kind] for kind in ("image", "prompt"))
    assert len(images) == len(set(images)) == 2, "once for each distinct image"
    assert sorted(prompts) == [" ", " ", "make it blue", "make it blue", "remove it"], "once for each prompt on its image"
    want = [[alone(files, n, p, q) for n in (None, "style")] for p, q in ((IMAGE, "make it blue"), (OTHER, "make it blue"), (IMAGE, "remove it"))]
    for row, expected in zip(c.images, want, strict=True):
        assert all(map(same, row, expected)) and not same(row[0], row[1])
    assert [k.title for k in c.columns] == ["base", "style"]
    assert t.active_adapters() == {} and not any(hasattr(m, "lora_A") for m in t.transformer.modules()), "removed again"


def test_scales_and_seeds(files):
    t = trainer().load_lora(files["style"])
    c = compare_edits(t, IMAGE, "make it blue", scales=[0, 0.5], seeds=[3], **SMALL)
    zero, half = c.images[0]
    assert same(zero, alone(files, None, seed=3)) and same(half, alone(files, "style", weight=0.5, seed=3)) and [k["weight"] for k in c.data()["columns"]] == [0, 0.5]
    dora = write(files["style"].parent/"dora.safetensors", 5, use_dora=True)
    assert same(compare_edits(t, IMAGE, "make it blue", [dora], scales=[0], seeds=[3], **SMALL).images[0][0], zero), "a DoRA at 0 would not be the base"
    assert t.active_adapters() == dict(default=1.0)


@pytest.mark.slow
def test_scales_of_several_adapters(files):
    t = trainer().load_loras({files["style"]: 0.8, files["other"]: -0.5})
    c = compare_edits(t, IMAGE, "make it blue", scales=[0.5, 1], **SMALL)
    assert same(c.images[0][1], t.predict(IMAGE, "make it blue", **SMALL)) and t.active_adapters() == dict(style=0.8, other=-0.5)
    t.set_adapters(["style", "other"], [0.4, -0.25])
    assert same(c.images[0][0], t.predict(IMAGE, "make it blue", **SMALL)) and [k.title for k in c.columns] == ["style + other x 0.5", "style + other x 1"]


@pytest.mark.slow
def test_seeds_and_checkpoints(files):
    c = compare_edits(trainer(), IMAGE, "make it blue", ["base", files["style"]], seeds=[3, 4], **SMALL)
    assert [k.title for k in c.columns] == ["base, seed 3", "base, seed 4", "style, seed 3", "style, seed 4"]
    for p, (name, seed) in zip(c.images[0], ((None, 3), (None, 4), ("style", 3), ("style", 4))): assert same(p, alone(files, name, seed=seed))


def test_default_columns_and_progress(files, capsys):
    c = compare_edits(trainer().load_lora(files["style"], weight=0.7), IMAGE, "make it blue", seed=9, **SMALL)
    assert [k.checkpoint for k in c.columns] == ["base", "now"] and same(c.images[0][0], alone(files, None, seed=9, progress=False))
    assert same(c.images[0][1], alone(files, "style", weight=0.7, seed=9, progress=False)) and c.distances[0][0] == 0 < c.distances[0][1]
    assert re.search(r"compare 4/4, [\d.]+/s, 0 s left adapter", capsys.readouterr().err)
    compare_edits(trainer(), IMAGE, "x", ["base"], progress=False, **SMALL)
    assert "compare" not in capsys.readouterr().err


@pytest.mark.slow
def test_each_column_has_its_adapters_schedule(files, monkeypatch):
    sampled, real = [], comparison.denoise_encoded
    monkeypatch.setattr(comparison, "denoise_encoded", lambda *a, **kw: (sampled.append(a[3:5]), real(*a, **kw))[1])
    c = compare_edits(trainer(), IMAGE, "make it blue", [files["fast"], "base"], height=48, width=64)
    assert sampled == [(4, 1.0), (20, 4.0)] and same(c.images[0][0], alone(files, "fast", num_inference_steps=None)) and same(c.images[0][1], alone(files, None, num_inference_steps=20))
    compare_edits(trainer(), IMAGE, "x", [files["fast"], "base"], schedule="lightning", true_cfg_scale=2.0, height=48, width=64)
    assert sampled[2:] == [(4, 2.0), (4, 2.0)]


# names

def test_names_of_checkpoints(trained_run, files, monkeypatch, tmp_path):
    t = QwenImageEditTrainer(trained_run.settings(trained_run.copy(tmp_path/"out"))).set_lora()
    root = t.checkpoint_root()
    latest = (root/"latest").read_text().strip()
    (root/"best").write_text("epoch_0001")
    for name, folder in (("latest", latest), ("best", "epoch_0001"), (root/"epoch_0001", "epoch_0001"), ("epoch_0001", "epoch_0001"), (f"checkpoints/{latest}", latest)):
        found, info, title = find_adapter(t, name)
        assert found == root/folder/lora.WEIGHT_NAME and info["steps"] == (8 if folder == latest else 4) and title == (name if name in ("best", "latest") else folder)
    assert find_adapter(t, files["style"])[2] == "style" and find_adapter(t, root/latest/lora.WEIGHT_NAME)[::2] == (root/latest/lora.WEIGHT_NAME, latest)
    monkeypatch.setattr("qie_nb.lora.formats.from_hub", lambda path: files["other"])
    assert find_adapter(t, "owner/style")[::2] == (files["other"], "owner/style")
    # and a trainer that trains is unchanged
    before, learns = state_of(t), {n for n, p in t.transformer.named_parameters() if p.requires_grad}
    c = compare_edits(t, IMAGE, "x", ["base", "best", "now"], **SMALL)
    assert same_state(before, state_of(t)) and learns == {n for n, p in t.transformer.named_parameters() if p.requires_grad} and learns
    assert np.array_equal(c.images[0][0], c.images[0][2]) and not np.array_equal(c.images[0][0], c.images[0][1]), "now: a new adapter, which is zero"
    shutil.copy(root/latest/lora.WEIGHT_NAME, root/latest/"ema.safetensors")
    assert find_adapter(t, root/latest)[::2] == (root/latest/"ema.safetensors", f"{latest} (mean)")


# afterwards

@pytest.mark.parametrize("error, at", [(KeyboardInterrupt(), 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((KeyboardInterrupt(), 1), (torch.OutOfMemoryError("full"), 2)))])
def test_adapters_are_restored_after_an_error(error, at, files, monkeypatch):
    t = trainer().load_loras({files["style"]: 1 / 3}).load_lora(files["other"], "other", weight=0.2)
    t.set_adapters(["other", "style"], [0.2, 1 / 3])
    t.transformer.train()
    before, calls, real = state_of(t), [], comparison.denoise_encoded

    def failing(*a, **kw):
        calls.append(1)
        if len(calls) > at: raise error
        return real(*a, **kw)
    monkeypatch.setattr(comparison, "denoise_encoded", failing)
    with pytest.raises(type(error)): compare_edits(t, IMAGE, "x", ["base", files["other"], "now"], **SMALL)
    assert len(calls) == at + 1 and same_state(before, state_of(t)) and list(t.active_adapters()) == ["other", "style"] and t.transformer.training


@pytest.mark.parametrize("ask, sentence", [
    (lambda t, f: compare_edits(t, IMAGE, "x", [f["style"], "none.safetensors"]), "none.safetensors' does not exist"),
    (lambda t, f: compare_edits(t, IMAGE, "x", ["best"]), "`checkpoints` 'best' does not exist in"),
    (lambda t, f: compare_edits(t, IMAGE, "x", ["epoch_0009"]), "`checkpoints` 'epoch_0009' does not exist"),
    (lambda t, f: compare_edits(t, IMAGE, "x", "latest"), "`checkpoints` must be a list"),
    (lambda t, f: compare_edits(t, IMAGE, "x", []), "`checkpoints` must be a list with an entry or more"),
    (lambda t, f: compare_edits(t, IMAGE, "x", scales=[0, float("nan")]), "must be a finite number, got nan"),
    (lambda t, f: compare_edits(t, IMAGE, "x", seeds=[-1]), "`seed` must be a whole number"),
    (lambda t, f: compare_edits(t, [IMAGE, OTHER], ["x"]), "`images` has 2 entries for 1 rows"),
    (lambda t, f: compare_edits(t, IMAGE, ["x", "y"], targets=[IMAGE]), "`targets` has 1 entries for 2 rows"),
    (lambda t, f: compare_edits(t, IMAGE, " "), "`prompt` is empty"),
    (lambda t, f: compare_edits(t, IMAGE, "x", height=50), "`height` must be a multiple of 16"),
    (lambda t, f: compare_edits(t, IMAGE, "x", num_inference_steps=0), "`num_inference_steps` must be at least"),
    (lambda t, f: compare_edits(t, IMAGE, "x", schedule="turbo"), "must be one of none, lightning"),
    (lambda t, f: compare_edits(t, IMAGE, "x", [narrow(f)]), "does not fit this transformer"),
    (lambda t, f: compare_edits(t.merge_lora(), IMAGE, "x"), "call unmerge_lora")])
def test_mistakes_are_refused_before_encoding(ask, sentence, files, encoded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    t = trainer(train=dict(output_dir=str(tmp_path))).load_lora(files["style"])
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as e: ask(t, files)
    assert "\n" not in str(e.value) and not encoded and t.active_adapters() == dict(default=1.0)


def narrow(files):
    from qie_nb.lora.formats import read_lora, write_lora
    state, config, info = read_lora(files["style"])[:3]
    return write_lora(files["style"].parent/"narrow.safetensors", {k: v.repeat(1, 2) if "lora_A" in k else v for k, v in state.items()}, config, info)


def test_no_active_adapter():
    for kw in (dict(), dict(scales=[0, 1]), dict(checkpoints=["base", "now"])):
        with pytest.raises(ValueError, match="no adapter is active, so there is nothing to compare with"): compare_edits(trainer(), IMAGE, "x", **kw)


def test_adapters_of_different_sizes(files, tmp_path, capsys, encoded):
    small, large = (write(tmp_path/f"{n}.safetensors", 1, dict(control_area=a)) for n, a in (("small", 64 * 64), ("large", 96 * 96)))
    c = compare_edits(trainer(), IMAGE, "make it blue", ["base", small, large], **SMALL)
    assert "all columns use the first" in capsys.readouterr().out and len([w for n, w in encoded if n == "image"]) == 1
    assert same(c.images[0][1], trainer().load_lora(small).predict(IMAGE, "make it blue", **SMALL)) and same(c.images[0][1], c.images[0][2]) # one and the same adapter
    fixed = compare_edits(trainer(data=dict(control_area=80 * 80)), IMAGE, "make it blue", [small], **SMALL)
    assert same(fixed.images[0][0], trainer(data=dict(control_area=80 * 80)).load_lora(small).predict(IMAGE, "make it blue", **SMALL))


# display

@pytest.fixture(scope="module")
def seen(files):
    with pytest.MonkeyPatch.context() as mp:
        mp.setattr(shown, "is_interactive", lambda: False)
        yield compare_edits(trainer().load_lora(files["style"]), [[IMAGE, OTHER], [OTHER]], ["<img src=x onerror=alert(1)> & $x_$", "two"], scales=[0, 1], targets=[OTHER, IMAGE], **SMALL)


def test_data(seen):
    d = seen.data()
    assert [(c["checkpoint"], c["weight"], c["seed"], c["steps"], c["true_cfg_scale"]) for c in d["columns"]] == [("now", 0, 0, 2, 4.0), ("now", 1, 0, 2, 4.0)]
    assert [r["prompt"] for r in d["rows"]] == ["<img src=x onerror=alert(1)> & $x_$", "two"] and [r["size"] for r in d["rows"]] == [(64, 48), (64, 48)]
    assert all(p.shape == (48, 64, 3) and p.dtype == np.uint8 for row in d["images"] for p in row)
    want = [[np.abs(p.astype(float) - np.asarray(t.resize((64, 48), Image.LANCZOS))).mean() for p in row] for row, t in zip(d["images"], (OTHER, IMAGE))]
    assert np.allclose(d["error"], want) and "change" not in d
    json.dumps(d["columns"]) # plain values


def test_html_is_escaped(seen):
    html = seen._repr_mimebundle_()["text/html"]
    assert html.count("data:image/jpeg;base64,") == 2 * 4 and "<img src=x" not in html and "&lt;img src=x onerror=alert(1)&gt; &amp; $x_$" in html
    title = Comparison([comparison.Column("<b>a</b>", "x")], seen.edits, [[row[0]] for row in seen.images]).html()
    assert "<b>a</b>" not in title and "&lt;b&gt;a&lt;/b&gt;" in title and title.count("change 0.0") == 2
    assert [m for m in re.findall(r"error \d+\.\d", html)] == [f"error {d:.1f}" for row in seen.distances for d in row]


def test_widget_in_live_notebooks_only(seen, monkeypatch):
    out = []
    monkeypatch.setattr("IPython.display.display", lambda data, **kw: out.append(data))
    monkeypatch.setattr(shown, "kernel", lambda: object())
    for watches in (False, True):
        monkeypatch.setattr(shown, "is_interactive", lambda: watches)
        seen._ipython_display_()
    assert [VIEW in data for data in out] == [False, True, False] and "&lt;img src=x" in seen.box.children[0].value


def test_figure(seen, tmp_path):
    fig = seen.figure()
    assert len(fig.axes) == 2 * 4 and [a.get_title() for a in fig.axes[:4]] == ["control", "adapter x 0", "adapter x 1", "target"]
    assert np.array_equal(fig.axes[1].images[0].get_array(), seen.images[0][0]) and any("$x_$" in t.get_text() for t in fig.axes[0].texts)
    bad = Comparison([comparison.Column("$\\frac{$", "x")], seen.edits, [[row[0]] for row in seen.images])
    bad.figure().savefig(tmp_path/"bad.png") # as a formula it would raise
    assert Image.open(tmp_path/"bad.png").size[0] > 100
