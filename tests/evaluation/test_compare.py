"""Comparisons: each column equals `predict`, inputs are encoded once, and the trainer is unchanged afterwards."""
import json, re, shutil
from functools import partial

import numpy as np
import pytest
from PIL import Image

from qie_nb.encoding.encoder import Encoder
from qie_nb.evaluation import compare as comparison
from qie_nb.evaluation.compare import adapter_of, Column, Comparison, columns_of, compare_edits, find_adapter
from qie_nb.lora import adapters as lora
from qie_nb.trainer import QwenImageEditTrainer
from helpers import close_images, interrupted, on_call, slow
from loras import B0, pair, tensors_file
from test_mixing import IMAGE, fast, files, same_state, state_of, trainable, trainer, write # noqa: F401 (fixtures)

OTHER = Image.fromarray(np.random.default_rng(2).integers(0, 255, (56, 40, 3), dtype=np.uint8))
SMALL = dict(num_inference_steps=2, height=48, width=64)
same = partial(close_images, levels=2)


@pytest.fixture
def encoded(monkeypatch):
    calls = dict(image=[], prompt=[])
    on_call(monkeypatch, Encoder, "encode_images", lambda self, images, *a: calls["image"].extend(np.asarray(im).tobytes() for im in images))
    on_call(monkeypatch, Encoder, "encode_prompts", lambda self, prompts, *a: calls["prompt"].extend(prompts))
    return calls


def alone(files, name, image=IMAGE, prompt="make it blue", weight=1.0, seed=0, **kw):
    t = trainer().load_lora(files[name], weight=weight) if name else trainer()
    return t.predict(image, prompt, seed=seed, progress=False, **SMALL | kw)


def test_a_column_may_have_guidance_where_the_first_has_none(encoded):
    t = trainer()
    steps = SMALL["num_inference_steps"]
    columns = [Column(f"{scale:g}", "base", steps=steps, true_cfg_scale=scale) for scale in (1., 4.)]
    row, = compare_edits(t, IMAGE, "make it blue", columns=columns, height=48, width=64).images
    assert sorted(encoded["prompt"]) == [" ", "make it blue"]
    for image, column in zip(row, columns):
        assert same(image, t.predict(IMAGE, "make it blue", progress=False, true_cfg_scale=column.true_cfg_scale, **SMALL))
    assert not same(*row)


def test_results_of_a_run_are_those_of_its_own_evaluations(tmp_path):
    for name, steps in (("step_00000002", 2), ("epoch_0002", 4), ("base", 0), ("now", 4), ("step_00000004_now", 4)):
        folder = tmp_path/"inference"/name
        folder.mkdir(parents=True)
        (folder/"held_out.json").write_text(json.dumps(dict(steps=steps, losses=dict(a=[1.]), name=name)))
    found = comparison.results_of(tmp_path)
    assert {step: result["name"] for step, result in found.items()} == {2: "step_00000002", 4: "epoch_0002"}


@pytest.mark.slow
def test_columns_equal_predict_and_inputs_are_encoded_once(files, encoded):
    t, images, prompts = trainer(), [IMAGE, [IMAGE, OTHER], IMAGE.copy()], ["make it blue", "make it blue", "remove it"]
    c = compare_edits(t, images, prompts, [None, files["style"]], seeds=[3, 4], **SMALL)
    assert len(encoded["image"]) == len(set(encoded["image"])) == 2, "once for each distinct image; a copy has the same pixels"
    assert sorted(encoded["prompt"]) == [" ", " ", "make it blue", "make it blue", "remove it"], "once for each prompt on its images"
    columns = {"without LoRA, seed 3": (None, 3), "without LoRA, seed 4": (None, 4), "style, seed 3": ("style", 3), "style, seed 4": ("style", 4)}
    assert [k.title for k in c.columns] == list(columns)
    for row, image, prompt in zip(c.images, images, prompts, strict=True):
        for got, (name, seed) in zip(row, columns.values(), strict=True): assert same(got, alone(files, name, image, prompt, seed=seed))
        assert not same(row[0], row[1]) and not same(row[0], row[2])
    assert t.active_adapters() == {} and not any(hasattr(m, "lora_A") for m in t.transformer.modules()), "removed again"


@pytest.mark.slow
def test_scales(files):
    t = trainer().load_loras({files["style"]: 0.8, files["root"]: -0.5})
    c = compare_edits(t, IMAGE, "make it blue", scales=[0, 0.5], seeds=[3], **SMALL)
    assert t.active_adapters() == dict(style=0.8, root=-0.5) and [(k.title, k.weight) for k in c.columns] == [("without LoRA", 0), ("style + root, half strength", 0.5)]
    zero, half = c.images[0]
    assert same(half, t.set_adapters(["style", "root"], [0.4, -0.25]).predict(IMAGE, "make it blue", seed=3, **SMALL)) and same(zero, alone(files, None, seed=3))
    assert same(compare_edits(t, IMAGE, "make it blue", [files["dora"]], scales=[0], seeds=[3], **SMALL).images[0][0], zero), "a DoRA at 0 would not be the base"


@pytest.mark.slow
def test_a_slider_from_the_opposite_to_more_than_trained(files, encoded):
    t, scales = trainer().load_loras({files["style"]: 1.0}), [-1, -0.5, 0, 0.5, 1, 1.5]
    c = compare_edits(t, IMAGE, "make it blue", scales=scales, seeds=[3], **SMALL)
    assert len(encoded["image"]) == 1 and sorted(encoded["prompt"]) == [" ", "make it blue"], "one encode for all columns"
    assert [k.title for k in c.columns] == ["style, -1 x strength", "style, -0.5 x strength", "without LoRA", "style, half strength", "style, full strength", "style, 1.5 x strength"]
    assert [k.weight for k in c.columns] == scales and t.active_adapters() == dict(style=1.0)
    for at in (0, 5): assert same(c.images[0][at], alone(files, "style", weight=scales[at], seed=3))
    assert not same(c.images[0][0], c.images[0][4]) and not same(c.images[0][0], c.images[0][2])
    assert c.distances[0][2] == 0 < min(c.distances[0][:2] + c.distances[0][3:]), "changes are those of the model's own image, which is not the first column"


@pytest.mark.slow
def test_default_columns_and_progress(files, capsys):
    c = compare_edits(trainer().load_lora(files["style"], weight=0.7), IMAGE, "make it blue", seed=9, **SMALL)
    assert [k.checkpoint for k in c.columns] == ["base", "now"] and c.distances[0][0] == 0 < c.distances[0][1]
    assert same(c.images[0][0], alone(files, None, seed=9)) and same(c.images[0][1], alone(files, "style", weight=0.7, seed=9))
    assert re.search(r"compare 4/4, [\d.]+/s, 0 s left with LoRA", capsys.readouterr().out)
    compare_edits(trainer(), IMAGE, "x", ["base"], progress=False, **SMALL)
    assert "compare" not in capsys.readouterr().out


def test_each_column_has_its_adapters_schedule(fast):
    chosen = lambda *args: [(c.steps, c.true_cfg_scale, bool(c.scheduler)) for c in columns_of(trainer(), [fast[4], "base"], None, [0], *args)]
    assert chosen() == [(4, 1.0, True), (20, 4.0, False)] and chosen("lightning", None, 2.0) == [(4, 2.0, True)] * 2
    assert same(compare_edits(trainer(), IMAGE, "make it blue", [fast[4]], height=48, width=64).images[0][0], alone(fast, 4, num_inference_steps=None))


def test_names_of_checkpoints(trained_run, files, monkeypatch, tmp_path):
    t = QwenImageEditTrainer(trained_run.settings(trained_run.copy(tmp_path/"out"))).set_lora()
    root = t.checkpoint_root()
    latest = (root/"latest").read_text().strip()
    (root/"best").write_text("epoch_0001")
    for name, folder in (("latest", latest), ("best", "epoch_0001"), (root/"epoch_0001", "epoch_0001"), ("epoch_0001", "epoch_0001"), (f"checkpoints/{latest}", latest)):
        found, info, title = find_adapter(t, name)
        assert found == root/folder/lora.WEIGHT_NAME and info["steps"] == (8 if folder == latest else 4) and title == (name if name in ("best", "latest") else folder)
    assert adapter_of(t, "best") == (root/"epoch_0001"/lora.WEIGHT_NAME, "raw", "epoch_0001"), "as `qie-nb evaluate` names it"
    assert find_adapter(t, files["style"])[2] == "style" and find_adapter(t, root/latest/lora.WEIGHT_NAME)[::2] == (root/latest/lora.WEIGHT_NAME, latest)
    monkeypatch.setattr("qie_nb.lora.formats.from_hub", lambda path: files["root"])
    assert find_adapter(t, "owner/style")[::2] == (files["root"], "owner/style")
    # and a trainer that trains is unchanged
    before, learns = state_of(t), trainable(t)
    base, best, now = compare_edits(t, IMAGE, "x", ["base", "best", "now"], **SMALL).images[0]
    assert same_state(before, state_of(t)) and learns == trainable(t) != set()
    assert close_images(base, now) and not close_images(base, best), "now: a new adapter, which is zero"
    shutil.copy(root/latest/lora.WEIGHT_NAME, root/latest/"ema.safetensors")
    assert find_adapter(t, root/latest)[::2] == (root/latest/"ema.safetensors", f"{latest} (mean)")


@pytest.mark.parametrize("at", [3, slow(2)])
def test_adapters_are_restored_after_an_interruption(at, files):
    t = trainer().load_loras({files["style"]: 1, files["root"]: 1}).set_adapters(["root", "style"], [0.2, 1 / 3])
    t.transformer.train()
    before = state_of(t)
    with interrupted(comparison, "denoise_encoded", at): compare_edits(t, IMAGE, "x", ["base", files["root"], "now"], **SMALL)
    assert same_state(before, state_of(t)) and list(t.active_adapters()) == ["root", "style"] and t.transformer.training


@pytest.mark.parametrize("wrong, sentence", [ # more in the notebook
    (dict(checkpoints=["epoch_0009"]), "`checkpoints` 'epoch_0009' does not exist"),
    (dict(checkpoints="latest"), "`checkpoints` must be a list with an entry or more"),
    (dict(checkpoints=["x.safetensors"]), "does not fit this transformer"),
    (dict(scales=[0, float("nan")]), "must be a finite number, got nan"),
    (dict(seeds=[-1]), "`seed` must be a whole number"),
    (dict(images=[IMAGE, OTHER], prompts=["x"]), "`images` has 2 entries for 1 rows"),
    (dict(prompts=["x", "y"], targets=[IMAGE]), "`targets` has 1 entries for 2 rows"),
    (dict(num_inference_steps=0), "`num_inference_steps` must be at least"),
    (None, "call unmerge_lora")], ids=lambda v: v if isinstance(v, str) else "")
def test_mistakes_are_refused_before_encoding(wrong, sentence, files, encoded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors_file(tmp_path, **pair(B0, n=128))
    t = trainer(train=dict(output_dir=str(tmp_path))).load_lora(files["style"])
    if wrong is None: t.merge_lora()
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as e: compare_edits(t, **dict(images=IMAGE, prompts="x") | (wrong or {}))
    assert "\n" not in str(e.value) and not any(encoded.values()) and t.active_adapters() == dict(default=1.0)


def test_no_active_adapter():
    for kw in (dict(), dict(scales=[0, 1])):
        with pytest.raises(ValueError, match="no adapter is active, so there is nothing to compare with"): compare_edits(trainer(), IMAGE, "x", **kw)


@pytest.mark.slow
def test_adapters_of_different_sizes(tmp_path, capsys, encoded):
    small, large = (write(tmp_path/f"{n}.safetensors", 1, dict(control_area=a)) for n, a in (("small", 64 * 64), ("large", 96 * 96)))
    _, first, second = compare_edits(trainer(), IMAGE, "make it blue", ["base", small, large], **SMALL).images[0]
    assert "all columns use the first" in capsys.readouterr().out and len(encoded["image"]) == 1 and same(first, second) # one and the same adapter
    fixed = dict(data=dict(control_area=80 * 80))
    for sections, image in (({}, first), (fixed, compare_edits(trainer(**fixed), IMAGE, "make it blue", [small], **SMALL).images[0][0])):
        assert same(image, trainer(**sections).load_lora(small).predict(IMAGE, "make it blue", **SMALL))


NASTY = "<img src=x onerror=alert(1)> & $x_$"


@pytest.fixture(scope="module")
def seen(files): return compare_edits(trainer().load_lora(files["style"]), [[IMAGE, OTHER], [OTHER]], [NASTY, "two"], scales=[0, 1], targets=[OTHER, IMAGE], **SMALL)


def titled(seen, title):
    "Its first column without targets, with another title."
    return Comparison([Column(title, "x")], seen.edits, [row[:1] for row in seen.images])


def test_data(seen):
    d = seen.data()
    assert [(c["checkpoint"], c["weight"], c["seed"], c["steps"], c["true_cfg_scale"]) for c in d["columns"]] == [("now", 0, 0, 2, 4.0), ("now", 1, 0, 2, 4.0)]
    assert [(r["prompt"], r["size"]) for r in d["rows"]] == [(NASTY, (64, 48)), ("two", (64, 48))]
    for row, errors, target in zip(d["images"], d["error"], (OTHER, IMAGE), strict=True):
        small = np.asarray(target.resize((64, 48), Image.LANCZOS))
        want = [np.sqrt(((image.astype(float) - small)**2).mean()) for image in row]
        assert np.allclose(errors, want)
    assert "change" not in d
    json.dumps(d["columns"]) # plain values


def test_html_is_escaped(seen):
    html = seen.html()
    assert html.count("data:image/jpeg;base64,") == 2 * 4 and "<img src=x" not in html and "&lt;img src=x onerror=alert(1)&gt; &amp; $x_$" in html
    assert seen.build().children[0].value == html
    title = titled(seen, "<b>a</b>").html()
    assert "<b>a</b>" not in title and "&lt;b&gt;a&lt;/b&gt;" in title and title.count("change 0.0") == 2
    assert re.findall(r"error \d+\.\d", html) == [f"error {d:.1f}" for row in seen.distances for d in row]


def test_figure(seen, tmp_path):
    fig = seen.figure()
    assert len(fig.axes) == 2 * 4
    titles = [a.get_title() for a in fig.axes[:4]]
    assert titles == ["before", "without LoRA", "with LoRA, full strength", "after"]
    assert np.array_equal(fig.axes[1].images[0].get_array(), seen.images[0][0]) and any("$x_$" in t.get_text() for t in fig.axes[0].texts)
    titled(seen, "$\\frac{$").figure().savefig(tmp_path/"bad.png") # as a formula it would raise
    assert Image.open(tmp_path/"bad.png").size[0] > 100


def test_equal_columns_are_computed_once(trained_run, tmp_path, monkeypatch):
    t = QwenImageEditTrainer(trained_run.settings(trained_run.copy(tmp_path/"out"))).set_lora()
    (t.checkpoint_root()/"best").write_text((t.checkpoint_root()/"latest").read_text().strip())
    called = []
    on_call(monkeypatch, comparison, "denoise_encoded", lambda *a: called.append(1))
    c = compare_edits(t, IMAGE, "x", ["base", "latest", "best"], scales=[0, 0.5, 1, 0.8], **SMALL)
    assert [k.title for k in c.columns] == ["without LoRA", "latest = best, half strength", "latest = best, full strength", "latest = best, 0.8 x strength"]
    assert len(called) == 4 and len(set(c.distances[0])) == 4
