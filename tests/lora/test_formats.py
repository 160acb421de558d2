"""LoRA files: formats, ComfyUI's rules, round trips, the hub, refusals."""
from unittest import mock

import huggingface_hub, huggingface_hub.errors
import pytest
import torch

from qie_nb.lora import adapters as lora
from qie_nb.lora.adapters import convert_lora, write_lora
from qie_nb.lora.formats import COMFY_NAME, WEIGHT_NAME, find_lora, lora_info, parse_key, read_lora
from loras import B0, file_of, http_error, loaded, output, pair, same, same_file, tensors_file, trained, written

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")


@pytest.mark.parametrize("settings", [dict(target_modules="all_linear", lora_alpha=0.3), dict(use_rslora=True, r=16, lora_alpha=8)], ids=["alpha", "rslora"])
def test_comfyui_adds_what_peft_adds(settings, tmp_path):
    "By ComfyUI's rules: comfy/lora.py reads X.lora_up, X.lora_down and X.alpha of a weight diffusion_model.X; comfy/weight_adapter/lora.py scales by alpha / rank."
    tr = trained(**settings)
    tensors, _ = file_of(lora.save_lora(tr, tmp_path, format="comfyui"))
    for name, m in tr.named_modules():
        if not hasattr(m, "get_delta_weight"): continue
        up, down, alpha = (tensors.pop(f"diffusion_model.{name}.{part}") for part in ("lora_up.weight", "lora_down.weight", "alpha"))
        same(alpha / down.shape[0] * (up @ down), m.get_delta_weight("default").detach())
    assert not tensors, "ComfyUI does not read these"


CONFIG = dict(r=4, lora_alpha=7, rank_pattern={"to_k": 3}, alpha_pattern={r"^transformer_blocks.1.attn.to_q": 0.3, "to_k": 0.7},
              use_rslora=True, target_modules=["to_k", "to_q"])


def random_state(dtype=torch.float32):
    g, ranks = torch.Generator().manual_seed(3), {"0.attn.to_q": 4, "1.attn.to_q": 4, "1.attn.to_k": 3}
    return {f"transformer_blocks.{n}.lora_{s}.weight": torch.randn(*((r, 96) if s == "A" else (96, r)), generator=g).to(dtype) for n, r in ranks.items() for s in "AB"}


def test_converting_there_and_back_is_exact(tmp_path):
    first = write_lora(tmp_path/"first", random_state(torch.bfloat16), CONFIG, dict(base="tiny", steps=3))
    comfy = convert_lora(first, tmp_path/"comfy")
    back = convert_lora(comfy, tmp_path/"back", "diffusers")
    assert same_file(first, back) and same_file(comfy, convert_lora(back, tmp_path/"again")) and not same_file(first, comfy)
    assert (comfy.name, back.name) == (COMFY_NAME, WEIGHT_NAME) and lora_info(comfy) == lora_info(first) == dict(base="tiny", steps=3)


def test_settings_are_inferred_without_a_header(tmp_path):
    "As other tools write files: `.alpha` tensors and no header."
    state = random_state()
    tensors, _ = file_of(write_lora(tmp_path/"theirs.safetensors", state, CONFIG, {}, "comfyui"))
    ours, theirs = loaded(write_lora(tmp_path/"ours", state, CONFIG, {})), loaded(tensors_file(tmp_path, **tensors))
    for (n, a), b in zip(ours.named_modules(), theirs.modules()):
        if hasattr(a, "scaling"): assert b.scaling["default"] == pytest.approx(a.scaling["default"], rel=1e-6) and b.r == a.r, n
    for tr in (ours, theirs): same(lora.lora_state(tr), {f"transformer.{k}": t for k, t in state.items()}, 0, 0)


@pytest.mark.parametrize("name, sides", [(lambda n: f"lora_unet_{n.replace('.', '_')}", ("lora_down", "lora_up")), (lambda n: f"base_model.model.{n}", ("lora_A", "lora_B"))], ids=["kohya", "peft"])
def test_every_key_format_gives_the_same_adapter(name, sides, tmp_path):
    tr, tensors = trained(target_modules="all_linear"), {}
    for key, t in lora.lora_state(tr).items():
        layer, side = parse_key(key)
        tensors |= {f"{name(layer)}.{sides[side == 'B']}.weight": t, f"{name(layer)}.alpha": torch.tensor(6.0)}
    same(output(loaded(tensors_file(tmp_path, **tensors).parent)), output(tr))


def test_alpha_tensors_override_the_header(tmp_path):
    tensors, header = file_of(lora.save_lora(trained(), tmp_path/"a", format="comfyui"))
    half = loaded(tensors_file(tmp_path, header, **{k: t / 2 if k.endswith("alpha") else t for k, t in tensors.items()}))
    assert half.transformer_blocks[0].attn.to_q.scaling["default"] == 0.75


@pytest.fixture
def hub(monkeypatch):
    "Its three functions: the files of a repository, one file, and what was downloaded before (nothing)."
    hub = mock.Mock(snapshot=mock.Mock(side_effect=huggingface_hub.errors.LocalEntryNotFoundError("nothing here")))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", hub.list)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot)
    return hub


def test_hub_files_are_found_by_default_name_or_by_name(hub, tmp_path):
    hub.list.return_value.siblings, hub.download.side_effect = [mock.Mock(rfilename=n) for n in (WEIGHT_NAME, "b.safetensors")], lambda repo, file: str(tmp_path/repo/file)
    assert find_lora("owner/name") == tmp_path/"owner/name"/WEIGHT_NAME and find_lora("owner/name:b.safetensors") == tmp_path/"owner/name/b.safetensors"


def test_downloaded_files_need_no_connection(hub, tmp_path):
    written(tmp_path/WEIGHT_NAME)
    hub.list.side_effect = hub.download.side_effect = ConnectionError("no route")
    hub.snapshot.configure_mock(side_effect=None, return_value=str(tmp_path))
    assert find_lora("owner/name") == tmp_path/WEIGHT_NAME and hub.snapshot.call_args.kwargs["local_files_only"]
    with pytest.raises(FileNotFoundError, match="cannot be reached"): find_lora("owner/name:other.safetensors")


@pytest.mark.parametrize("error, status, sentence", [
    ("RepositoryNotFoundError", 404, "does not exist on the hub, or is private; check the id"),
    ("GatedRepoError", 403, "cannot be read without a token that allows it; log in with `hf auth login`")])
def test_hub_errors_name_the_remedy(error, status, sentence, hub):
    hub.list.side_effect = http_error(error, status)
    with pytest.raises(FileNotFoundError, match=f"no LoRA file at 'owner/name', and .*{sentence}"): find_lora("owner/name")


def test_local_paths_never_ask_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path), (tmp_path/"lora").mkdir()
    for path in ("out/misspelt.safetensors", "./out/x", "/out/x", "lora/x", "x"):
        with pytest.raises(FileNotFoundError, match="does not exist; give a .safetensors file"): find_lora(path)
    assert not hub.list.called and not hub.download.called


REFUSALS = {
    "a folder with a pickle": (lambda t: find_lora(written(t/"d"/"pytorch_lora_weights.bin").parent), "does not exist .it has pytorch_lora_weights.bin, which we do not read.; give"),
    "a pickle": (lambda t: read_lora(written(t/"x.pt")), "cannot be read: it is no safetensors file; give the file in safetensors format"),
    "a note that is no JSON": (lambda t: lora_info(tensors_file(t, dict(qie_nb="{base"), **pair(B0))), "x.safetensors' cannot be read: `qie_nb` in its header is not valid JSON"),
    "settings that are no JSON": (lambda t: read_lora(tensors_file(t, dict(lora_adapter_metadata="r=4"), **pair(B0))), "cannot be read: `lora_adapter_metadata` in its header is not valid JSON"),
    "no LoRA": (lambda t: read_lora(tensors_file(t, w=torch.ones(2))), "has no adapter for a Qwen-Image transformer"),
    "an incomplete pair": (lambda t: read_lora(tensors_file(t, **{k: v for k, v in pair(B0).items() if "lora_A" in k})), "which is not a pair of LoRA weights"),
    "a LoKr": (lambda t: read_lora(tensors_file(t, **pair(B0), **{f"transformer.{B0}.lokr_w1": torch.ones(2)})), "is a LoKr, which we cannot read .'transformer.*lokr_w1'"),
    "ComfyUI's DoRA": (lambda t: read_lora(tensors_file(t, **pair(B0), **{f"transformer.{B0}.dora_scale": torch.ones(96, 1)})), "`dora_scale`, which is ComfyUI's DoRA"),
    "DoRA for ComfyUI": (lambda t: lora.save_lora(trained(use_dora=True), t, format="comfyui"), "`format` comfyui cannot store a DoRA"),
}


@pytest.mark.parametrize("act, sentence", REFUSALS.values(), ids=REFUSALS)
def test_refusals(act, sentence, tmp_path):
    kind = FileNotFoundError if "does not exist" in sentence else ValueError
    with pytest.raises(kind, match=sentence) as e: act(tmp_path)
    assert "\n" not in str(e.value)
