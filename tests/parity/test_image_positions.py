"""Positions of image tokens: those of Qwen2.5-VL's training by default, those of the installed pipeline on demand."""
import pytest
import torch
from diffusers import DiffusionPipeline

from qie_nb.data.images import Geometry
from qie_nb.models.encoders import encode_prompt, prefix_positions, vl_images
from qie_nb.extras.selfcheck import selfcheck, selfcheck_config
from qie_nb.lora.adapters import lora_info
from qie_nb.devices.edit_model import EditModel
from qie_nb.models.components import VARIANTS, restore_image_positions
from qie_nb.models.variants import text_to_image
from qie_nb.models.variants.text_to_image import installed_positions
from qie_nb.planning.doctor import doctor
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from helpers import settings
from tiny_rig import close, random_image

SIZES = (50, 75), (180, 90), (40, 100) # (w, h), none square
AREAS = 128 * 128, 112 * 112
CASES = [("v1", 1), ("2509", 1), ("2509", 2), ("2509", 3), ("2511", 2)]
affected = pytest.mark.skipif(installed_positions("QwenImageEditPlusPipeline") == "3d", reason="the installed pipeline computes 3d positions")


def folder(variant): return tiny_folder(variant, AREAS)
def geometry(parts): return Geometry(**parts.areas)
def images(n): return [random_image(s, i) for i, s in enumerate(SIZES[:n])]


def reference(ids, grids, image_token, merge=2): # Qwen2.5-VL's paper, section 2.1.3, written out token by token
    "[3, L] positions: words count on; an image starts after the words, at (0, row, column), and its largest ends it."
    out, next_, grids, i = [], 0, iter(grids), 0
    while i < len(ids):
        if ids[i] != image_token:
            out.append((next_,) * 3)
            next_, i = next_ + 1, i + 1
            continue
        _, h, w = next(grids)
        h, w = h // merge, w // merge
        out += [(next_, next_ + y, next_ + x) for y in range(h) for x in range(w)]
        next_, i = next_ + max(h, w), i + h * w
    return torch.tensor(out).T


@pytest.mark.parametrize("variant, n", CASES)
def test_positions_are_time_row_and_column(variant, n):
    parts = EditModel(str(folder(variant)))
    te, processor = parts.get("text_encoder"), parts.get("processor")
    found = processor.image_processor(images=vl_images(images(n), geometry(parts)), return_tensors="pt")["image_grid_thw"]
    token, start, counts = te.config.image_token_id, te.config.vision_start_token_id, (found.prod(-1) // 4).tolist()
    ids = torch.tensor([[5, 6, *(x for c in counts for x in (start, *[token] * c, 8)), 9, 9]])
    expected = reference(ids[0].tolist(), found.tolist(), token)
    assert prefix_positions(te, parts.variant, ids, found)[:, 0].equal(expected)


@torch.no_grad()
@pytest.mark.parametrize("share", [True, False], ids=["shared", "whole"])
@pytest.mark.parametrize("variant, n", CASES)
def test_embeddings_equal_a_corrected_pipelines(variant, n, share):
    parts = EditModel(str(folder(variant)))
    pipe = DiffusionPipeline.from_pretrained(folder(variant))
    seen = vl_images(images(n), geometry(parts))
    theirs = lambda: pipe.encode_prompt(["make the sky green"], list(seen))[0]
    wrong = theirs()
    right = restore_image_positions(pipe) and theirs()
    ours = encode_prompt(parts.get("text_encoder"), parts.get("processor"), parts.variant, "make the sky green", seen, share)[0]
    close(ours, right)
    if parts.variant.installed_positions() == "1d": assert (ours - wrong).abs().max() > 1e-3
    same = EditModel(str(folder(variant)), image_positions="installed").variant
    close(encode_prompt(parts.get("text_encoder"), parts.get("processor"), same, "make the sky green", seen, share)[0], wrong)


@affected
@torch.no_grad()
@pytest.mark.parametrize("name", ["QwenImageEditInpaintPipeline", "QwenImageEditPlusPipeline", "QwenImageEditPipeline"])
def test_the_hook_corrects_each_pipeline_of_the_family_once(name):
    import diffusers
    variant = "2511" if "Plus" in name else "v1"
    pipe = getattr(diffusers, name)(**{k: v for k, v in DiffusionPipeline.from_pretrained(folder(variant)).components.items()})
    for _ in range(2): assert restore_image_positions(pipe) is pipe
    assert len(pipe.text_encoder._forward_pre_hooks) == 1
    given = []
    pipe.text_encoder.model.register_forward_pre_hook(lambda m, a, kw: given.append(kw), with_kwargs=True)
    parts = EditModel(str(folder(variant)))
    seen = vl_images(images(1), geometry(parts))
    pipe.encode_prompt(image=list(seen), prompt=["x"])
    kinds, ids = given[0]["mm_token_type_ids"], given[0]["input_ids"]
    assert kinds.equal((ids == pipe.text_encoder.config.image_token_id).int()) and kinds.sum() > 0
    pipe.text_encoder(input_ids=ids[:, :3]) # a text alone stays as it is
    assert given[1].get("mm_token_type_ids") is None


@affected
@pytest.mark.parametrize("variant, step, image", [("v1", "QwenImageEditTextEncoderStep", "resized_image"), ("2511", "QwenImageEditPlusTextEncoderStep", "resized_cond_image")])
def test_the_hook_corrects_modular_pipelines(variant, step, image):
    from diffusers.modular_pipelines.qwenimage import encoders
    parts = EditModel(str(folder(variant)))
    seen = vl_images(images(2 if parts.variant.multi_image else 1), geometry(parts))
    pipe = getattr(encoders, step)().init_pipeline()
    pipe.update_components(text_encoder=parts.get("text_encoder"), processor=parts.get("processor"))
    embeds = lambda: pipe(prompt="make the sky green", output="prompt_embeds", **{image: list(seen)})
    wrong, ours = embeds(), encode_prompt(parts.get("text_encoder"), parts.get("processor"), parts.variant, "make the sky green", seen, True)[0]
    close(ours, restore_image_positions(pipe) and embeds())
    assert (ours - wrong).abs().max() > 1e-3


def test_older_versions_need_no_hook(monkeypatch):
    class Older(torch.nn.Module):
        def forward(self, input_ids=None, image_grid_thw=None): return input_ids
    pipe = type("Pipe", (), dict(text_encoder=Older()))()
    assert restore_image_positions(pipe) is pipe and not pipe.text_encoder._forward_pre_hooks


@affected
def test_each_mode_has_its_own_cache_entries():
    a, b = (EditModel(str(folder("2511")), image_positions=mode) for mode in ("3d", "installed"))
    assert (a.variant.positions, b.variant.positions) == ("3d", "1d")
    assert {k for k, v in a.identity().items() if b.identity()[k] != v} == {"template"}


@pytest.mark.parametrize("mode, installed, told", [("3d", "1d", "3d"), ("installed", "1d", "1d"), ("installed", "3d", "3d")])
def test_the_note_of_a_lora_follows_the_setting(mode, installed, told, monkeypatch):
    monkeypatch.setattr(text_to_image, "installed_positions", lambda pipeline: installed)
    for v in VARIANTS.values():
        if v.positions: assert v.with_positions(mode).note()["image_positions"] == told, v


@pytest.mark.slow
@affected
def test_a_lora_names_its_positions_and_the_other_mode_is_named_once(pairs, tmp_path, capsys):
    root = pairs()
    trained = QwenImageEditTrainer(settings(root, tmp_path/"a", train=dict(max_train_steps=1)))
    trained.fit()
    file = trained.save_lora(tmp_path/"lora")
    assert lora_info(file)["image_positions"] == "3d"
    card = (tmp_path/"lora"/"README.md").read_text()
    assert "| positions of image tokens | 3d |" in card and "mm_token_type_ids" in card
    capsys.readouterr()
    other = QwenImageEditTrainer(settings(root, tmp_path/"b", model=dict(image_positions="installed")))
    for _ in range(2): other.load_lora(file), other.predict(str(root/"control_images"/"0000.png"), "x", num_inference_steps=2, true_cfg_scale=1)
    said = capsys.readouterr().out
    assert said.count("was trained with three-dimensional positions of image tokens, and here they are running") == 1
    assert "set `model.image_positions` to 3d" in said
    mine = QwenImageEditTrainer(settings(root, tmp_path/"c"))
    mine.load_lora(file), mine.predict(str(root/"control_images"/"0000.png"), "x", num_inference_steps=2, true_cfg_scale=1)
    assert "positions" not in capsys.readouterr().out
    lora = dict(r=4, pretrained_weight=str(file))
    for mode in ("installed", "3d"): QwenImageEditTrainer(settings(root, tmp_path/mode, model=dict(image_positions=mode, lora=lora))).set_lora()
    assert capsys.readouterr().out.count("`model.lora.pretrained_weight` was trained with three-dimensional positions") == 1


@affected
def test_a_run_in_the_other_mode_is_not_continued(pairs, tmp_path):
    root, run = pairs(), dict(train=dict(max_train_steps=1, save_steps=1))
    QwenImageEditTrainer(settings(root, tmp_path, **run)).fit()
    other = settings(root, tmp_path, model=dict(image_positions="installed"), train=dict(max_train_steps=2, resume_checkpoint="latest"))
    with pytest.raises(ValueError, match=r"positions of image tokens \(`model.image_positions`\): 3d in the checkpoint, running now"):
        QwenImageEditTrainer(other).fit()


@affected
def test_the_doctor_warns_of_the_installed_positions(pairs):
    rows = lambda mode: [f for f in doctor(dict(model=dict(image_positions=mode), data=dict(dataset_path=str(pairs())))).findings if "positions" in f.what]
    assert not rows("3d")
    (row,) = rows("installed")
    assert row.level == "warning" and "14194" in row.remedy and "3d" in row.remedy


@pytest.mark.parametrize("mode", ["3d", "installed"])
def test_selfcheck_compares_with_the_pipeline_of_the_mode(mode):
    config = selfcheck_config(str(folder("2511")))
    config["model"]["image_positions"] = mode
    report = selfcheck(QwenImageEditTrainer(config), train=False)
    assert [p["stage"] for p in report.parity] and not report.differs and not report.errors
