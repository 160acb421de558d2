"""A newcomer's first hour on imitations of Kaggle and Colab: the notebooks as they are, then with own pairs, in the same folders, to the LoRA.
The pairs are an unpacked zip with one folder, free folder names and one instruction for all. QIE_NB_PAGES names a folder for the executed notebooks as HTML."""
import json, os, re, shutil
from pathlib import Path

import nbformat, pytest
from safetensors.torch import load_file

from fake_kaggle import colab, kaggle
from qie_nb.tiny.photos import EDITS, crops
from qie_nb.tiny.random_models import tiny_folder
from test_kaggle import COLAB, PRECOMPUTE, PREQUANTIZE, TRAIN, images, ran, settings_cell
from test_kaggle import trial_with

pytestmark = pytest.mark.slow
PROMPT = "age it like an old photograph"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    "What unpacking a Mac's zip gives."
    root = tmp_path_factory.mktemp("unpacked")
    for name in ("__MACOSX/my pairs", "my pairs/Before Photos", "my pairs/After Photos"): (root/name).mkdir(parents=True)
    (root/"__MACOSX/my pairs/._IMG_1000.JPG").write_bytes(b"\0\5\26\7")
    for i, im in enumerate(crops(12, (120, 90), seed=3)):
        im.save(root/f"my pairs/Before Photos/IMG_{1000 + i}.JPG", quality=95)
        EDITS["sepia"](im).save(root/f"my pairs/After Photos/IMG_{1000 + i}.JPG", quality=95)
    return root


def changed(path, pairs, where, preset="t4x2", model="tiny", size=96, steps=12) -> dict:
    "The lines that a user changes, here to a small model, few steps and small images."
    text = settings_cell(path)
    own = {
        "TRIAL = True": "TRIAL = False",
        f'preset="{preset}",': 'preset="tiny",',
        '"Qwen/Qwen-Image-Edit-2511"': repr(model),
        re.escape(pairs): where,
        "prompt=None": f"prompt={PROMPT!r}",
        "image_size=512": f"image_size={size}",
        "eval_images=1": f"eval_images=1, max_train_steps={steps}, eval_steps={steps}",
    }
    return {found[0]: new for old, new in own.items() if (found := re.search(old, text))}


def played(name, path, platform, **what):
    run = ran(path, platform, **what)
    if folder := os.environ.get("QIE_NB_PAGES"):
        from nbconvert import HTMLExporter
        page, _ = HTMLExporter().from_notebook_node(nbformat.reads(json.dumps(run.notebook), 4))
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder)/f"{name}.html").write_text(page, encoding="utf-8")
    return run


def trained(lora):
    file = Path(lora)/"pytorch_lora_weights.safetensors"
    return any(t.any() for n, t in load_file(file).items() if "lora_B" in n)


KAGGLE_PAIRS, COLAB_PAIRS = '"/kaggle/input/my-pairs"', '"/content/drive/MyDrive/my_pairs"'


def shown_by(run, begin) -> str:
    "The HTML of a cell, found by its first words."
    (cell,) = [c for c in run.notebook["cells"] if "".join(c["source"]).startswith(begin)]
    return "".join("".join(o.get("data", {}).get("text/html", "")) for o in cell["outputs"])


def check_results(run, working, top):
    "The photograph's edit, and links to files that exist."
    edit = shown_by(run, "from qie_nb.widgets import before_after")
    assert edit.count("<img") == 2 and ">before<" in edit and ">after<" in edit, edit[-500:]
    links = re.findall(r'href="([^"]+)"', shown_by(run, "trainer.save_lora("))
    lora = "pytorch_lora_weights"
    names = f"{lora}.safetensors", f"{lora}_comfyui.safetensors", f"{lora}_comfyui_workflow.json"
    assert links == [f"{top}lora/{name}" for name in (*names, "README.md")]
    assert all((working/link).is_file() for link in links) and trained(working/top/"lora")
    nodes = json.loads((working/links[2]).read_text())["nodes"]
    loaded = [n["widgets_values"][0] for n in nodes if n["type"] == "LoraLoaderModelOnly"]
    assert loaded == [names[1]]


def test_one_kaggle_notebook_does_the_whole_job(photos, tmp_path):
    "The trial, own pairs and an own photograph in the same session, and the next one that resumes."
    inputs = {"datasets/me/my-pairs": photos}
    working = tmp_path/"working"
    working.mkdir()
    interactive = dict(KAGGLE_KERNEL_RUN_TYPE="Interactive")
    live = kaggle(tmp_path, inputs, interactive, kept={"/kaggle/working": working})
    short = trial_with("max_train_steps=4, eval_steps=4") | {'"duotone", 48)': '"duotone", 12)'}
    run = played("kaggle one 1 trial", TRAIN, live, changes=short)
    check_results(run, working, "trial/")

    where = "/kaggle/input/datasets/me/my-pairs"
    photo = {"squares(512)[0]": f'"{where}/my pairs/Before Photos/IMG_1003.JPG"'}
    values = dict(pairs=KAGGLE_PAIRS, where=repr(where))
    run = played("kaggle one 2 own", TRAIN, live, changes=photo | changed(TRAIN, **values))
    check_results(run, working, "")
    text = run.text()
    assert "12 samples (in my pairs" in text and "12 in total: done" in text, text[-3000:]
    assert "not used: checkpoint in /kaggle/working/trial/checkpoints" in text, text[:3000]
    assert len(images(run)) == 4, "pairs, comparison, photograph, curves"

    batch = kaggle(tmp_path, inputs | {"notebooks/me/qie-nb-train": working})
    longer = changed(TRAIN, **values, steps=16)
    run = played("kaggle one 3 next session", TRAIN, batch, changes=photo | longer)
    check_results(run, run.output, "")
    assert "0 encoded" in run.text() and "16 in total: done" in run.text(), run.text()[-3000:]


@pytest.mark.weekly
@pytest.mark.parametrize("model", ["tiny", "another model"])
def test_trial_then_own_pairs_on_kaggle(model, photos, tmp_path):
    "An interactive session, with one working folder; then batch runs with attached outputs."
    inputs = {"datasets/me/my-pairs": photos}
    if model != "tiny": inputs["models/me/tiny/diffusers/2509/1"] = tiny_folder("2509")
    kept = {at: tmp_path/Path(at).name for at in ("/kaggle/working", "/kaggle/temp")}
    for folder in kept.values(): folder.mkdir()
    live = kaggle(tmp_path, inputs, dict(KAGGLE_KERNEL_RUN_TYPE="Interactive"), kept=kept)
    values = dict(pairs=KAGGLE_PAIRS, where='"/kaggle/input/datasets/me/my-pairs"', model="tiny" if model == "tiny" else "/kaggle/input/models/me/tiny/diffusers/2509/1")
    for path in (PRECOMPUTE, TRAIN): played(f"kaggle {path.stem} 1 trial", path, live)
    for path in (PRECOMPUTE, TRAIN):
        run = played(f"kaggle {path.stem} 2 own", path, live, changes=changed(path, **values))
    working = kept["/kaggle/working"]
    assert trained(working/"lora") and trained(working/"trial"/"lora") and len(images(run)) >= 1
    assert "12 samples (in my pairs" in run.text() and "not used: checkpoint in /kaggle/working/trial/checkpoints" in run.text(), run.text()[:3000]

    batch = kaggle(tmp_path, inputs | {"notebooks/me/qie-nb-precompute": working, "notebooks/me/qie-nb-train": working})
    text = (run := played("kaggle train 3 next session", TRAIN, batch, changes=changed(TRAIN, **values, steps=16))).text()
    assert "0 encoded" in text and re.search("16 in total", text) and trained(run.output/"lora"), text[-3000:]


@pytest.mark.weekly
def test_trial_then_own_pairs_on_colab(photos, tmp_path):
    "Also beside a trial that was run before trials had a folder of their own."
    drive = tmp_path/"drive"
    shutil.copytree(photos, drive/"my_pairs")
    platform = colab(tmp_path, drive=drive)
    played("colab 1 trial", COLAB, platform)
    for name in ("cache", "checkpoints"): shutil.copytree(drive/"qie_nb/trial"/name, drive/"qie_nb"/name)
    values = changed(COLAB, COLAB_PAIRS, COLAB_PAIRS, "t4")
    text = played("colab 2 own", COLAB, platform, changes=values).text()
    assert "not used: checkpoint in /content/drive/MyDrive/qie_nb/checkpoints" in text and trained(drive/"qie_nb/run/lora"), text[-3000:]
    text = played("colab 3 next session", COLAB, platform, changes=changed(COLAB, COLAB_PAIRS, COLAB_PAIRS, "t4", steps=16)).text()
    assert "0 encoded" in text and "step 16 of 16" in text and sorted(p.name for p in (drive/"qie_nb").glob("run*")) == ["run"], text[-3000:]


@pytest.mark.weekly
def test_trial_then_own_copy_of_the_model(tmp_path):
    kept = {"/kaggle/working": tmp_path/"working"}
    (tmp_path/"working").mkdir()
    platform = kaggle(tmp_path, env=dict(KAGGLE_KERNEL_RUN_TYPE="Interactive"), kept=kept)
    played("kaggle prequantize 1 trial", PREQUANTIZE, platform)
    own = {"TRIAL = True": "TRIAL = False", 'preset="t4"': 'preset="tiny"', '"Qwen/Qwen-Image-Edit-2511"': '"tiny"', "image_size=512": "image_size=96", 'quantize="nf4", text_encoder_quantize="nf4"': 'quantize="qint8", text_encoder_quantize="qint8"'}
    played("kaggle prequantize 2 own", PREQUANTIZE, platform, changes=own)
    assert all((tmp_path/"working"/name/"model_index.json").is_file() for name in ("model", "trial/model"))
