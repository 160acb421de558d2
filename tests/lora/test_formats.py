"""LoRA files: formats, ComfyUI's rules, round trips, the hub, refusals."""
import pytest
import torch
from safetensors.torch import save_file

from qie_nb.lora import adapters as lora
from qie_nb.lora.formats import COMFY_NAME, WEIGHT_NAME, convert_lora, find_lora, lora_info, parse_key, read_lora, write_lora
from loras import B0, bare, file_of, http_error, output, pair, same, same_file, tensors_file, trained, written

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


# ComfyUI: its rules as of comfy/lora.py (model_lora_keys_unet for QwenImage, load_lora) and comfy/weight_adapter/lora.py (LoRAAdapter):
# a weight `diffusion_model.X.weight` has these names; a name's pair is one of these; the scale is alpha / rank, or 1 without alpha.

def comfy_names(weight):
    x = weight.removeprefix("diffusion_model.").removesuffix(".weight")
    flat = x.replace(".", "_")
    return [f"lora_unet_{flat}", f"diffusion_model.{x}", x, f"transformer.{x}", f"lycoris_{flat}"]


def comfy_reads(tensors, weights):
    "({weight: what is added to it}, unread keys)"
    deltas, read = {}, set()
    for weight in weights:
        for name in comfy_names(weight):
            for up, down in (("lora_up.weight", "lora_down.weight"), ("lora_B.weight", "lora_A.weight"), ("lora_B.default.weight", "lora_A.default.weight")):
                up, down = f"{name}.{up}", f"{name}.{down}"
                if up not in tensors: continue
                alpha = tensors.get(f"{name}.alpha")
                deltas[weight] = (alpha.item() / tensors[down].shape[0] if alpha is not None else 1.0) * (tensors[up] @ tensors[down])
                read |= {up, down, f"{name}.alpha"}
                break
    return deltas, tensors.keys() - read


@pytest.mark.parametrize("settings", [dict(target_modules="all_linear", lora_alpha=0.3), dict(use_rslora=True, r=16, lora_alpha=8)], ids=["alpha", "rslora"])
def test_comfyui_adds_what_peft_adds(settings, tmp_path):
    tr, weights = trained(**settings), [f"diffusion_model.{n}" for n in bare().state_dict()]
    deltas = {f"diffusion_model.{n}.weight": m.get_delta_weight("default").detach() for n, m in tr.named_modules() if hasattr(m, "get_delta_weight")}
    found, unread = comfy_reads(file_of(lora.save_lora(tr, tmp_path, format="comfyui"))[0], weights)
    assert not unread and found.keys() == deltas.keys()
    for k, d in deltas.items(): same(found[k], d)


# round trips

CONFIGS = dict(
    patterns=dict(r=4, lora_alpha=7, rank_pattern={"to_k": 2}, alpha_pattern={r"^transformer_blocks.1.attn.to_q": 0.3, "to_k": 5}),
    rs_patterns=dict(r=4, lora_alpha=7, rank_pattern={"to_k": 3}, alpha_pattern={"to_k": 0.7}, use_rslora=True))
each_config = pytest.mark.parametrize("config", [c | dict(target_modules=["to_k", "to_q"]) for c in CONFIGS.values()], ids=CONFIGS)


def random_state(config, layers=("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_q", "transformer_blocks.1.attn.to_k"), dtype=torch.float32):
    rank = lambda n: config.get("rank_pattern", {}).get(n.rsplit(".", 1)[1], config["r"])
    g = torch.Generator().manual_seed(3)
    return {f"{n}.lora_{s}.weight": torch.randn(*((rank(n), 96) if s == "A" else (96, rank(n))), generator=g).to(dtype) for n in layers for s in "AB"}


@each_config
def test_converting_there_and_back_is_exact(config, tmp_path):
    first = write_lora(tmp_path/"first", random_state(config, dtype=torch.bfloat16), config, dict(base="tiny", steps=3))
    comfy = convert_lora(first, tmp_path/"comfy")
    back = convert_lora(comfy, tmp_path/"back", "diffusers")
    assert same_file(first, back) and same_file(comfy, convert_lora(back, tmp_path/"again")) and not same_file(first, comfy)
    assert (comfy.name, back.name) == (COMFY_NAME, WEIGHT_NAME) and lora_info(comfy) == lora_info(first) == dict(base="tiny", steps=3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each_config
def test_settings_are_inferred_without_a_header(config, tmp_path):
    "As other tools write files: `.alpha` tensors and no header."
    state = random_state(config)
    write_lora(tmp_path/"ours", state, config, {}), write_lora(tmp_path/"theirs.safetensors", state, config, {}, "comfyui")
    save_file(file_of(tmp_path/"theirs.safetensors")[0], tmp_path/"bare.safetensors")
    ours, theirs = bare(), bare()
    lora.load_lora(ours, tmp_path/"ours"), lora.load_lora(theirs, tmp_path/"bare.safetensors")
    for (n, a), b in zip(ours.named_modules(), theirs.modules()):
        if hasattr(a, "scaling"): assert b.scaling["default"] == pytest.approx(a.scaling["default"], rel=1e-6) and b.r == a.r, n
    for (k, a), b in zip(lora.lora_state(ours).items(), lora.lora_state(theirs).values(), strict=True): assert torch.equal(a, b) and torch.equal(a, state[k.removeprefix("transformer.")])


@pytest.mark.parametrize("name, sides", [(lambda n: f"lora_unet_{n.replace('.', '_')}", ("lora_down", "lora_up")), (lambda n: f"base_model.model.{n}", ("lora_A", "lora_B"))], ids=["kohya", "peft"])
def test_every_key_format_gives_the_same_adapter(name, sides, tmp_path):
    tr, tensors, other = trained(target_modules="all_linear"), {}, bare()
    for key, t in lora.lora_state(tr).items():
        layer, side = parse_key(key)
        tensors[f"{name(layer)}.{sides[side == 'B']}.weight"], tensors[f"{name(layer)}.alpha"] = t, torch.tensor(6.0)
    save_file(tensors, tmp_path/"some.safetensors")
    lora.load_lora(other, tmp_path)
    same(output(other), output(tr))


def test_alpha_tensors_override_the_header(tmp_path):
    tensors, header = file_of(lora.save_lora(trained(), tmp_path/"a", format="comfyui"))
    save_file({k: t / 2 if k.endswith("alpha") else t for k, t in tensors.items()}, tmp_path/"half.safetensors", metadata=header)
    other = bare()
    lora.load_lora(other, tmp_path/"half.safetensors")
    assert other.transformer_blocks[0].attn.to_q.scaling["default"] == 0.75


# the hub, without a network

class Hub:
    "Replaces huggingface_hub by a folder's files, or an error."
    def __init__(self, monkeypatch, folder=None, error=None, cached=None):
        import huggingface_hub
        self.asked = []
        def answer(value):
            if error: raise error
            return value
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda api, repo: answer([p.name for p in folder.iterdir()] if folder else []))
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file: (self.asked.append((repo, file)), answer(str((folder or cached or "")/file if folder else file)))[1])
        def snapshot(repo, **kw):
            assert kw["local_files_only"]
            if not cached: raise huggingface_hub.errors.LocalEntryNotFoundError("nothing here")
            return str(cached)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)


def test_hub_files_are_found_by_default_name_or_by_name(monkeypatch, tmp_path):
    for name in (WEIGHT_NAME, "b.safetensors"): written(tmp_path/name)
    hub = Hub(monkeypatch, tmp_path)
    assert find_lora("owner/name") == tmp_path/WEIGHT_NAME and find_lora("owner/name:b.safetensors") == tmp_path/"b.safetensors"
    assert hub.asked == [("owner/name", WEIGHT_NAME), ("owner/name", "b.safetensors")]


def test_downloaded_files_need_no_connection(monkeypatch, tmp_path):
    written(tmp_path/WEIGHT_NAME)
    Hub(monkeypatch, error=ConnectionError("no route"), cached=tmp_path)
    assert find_lora("owner/name") == tmp_path/WEIGHT_NAME
    with pytest.raises(FileNotFoundError, match="cannot be reached"): find_lora("owner/name:other.safetensors")


@pytest.mark.parametrize("error, sentence", [
    (lambda: http_error("RepositoryNotFoundError", 404), "does not exist on the hub, or is private; check the id"),
    (lambda: http_error("GatedRepoError", 403), "cannot be read without a token that allows it; log in with `hf auth login`"),
    (lambda: http_error("HfHubHTTPError", 503), "the hub cannot be reached .HfHubHTTPError.")])
def test_hub_errors_name_the_remedy(error, sentence, monkeypatch):
    Hub(monkeypatch, error=error())
    with pytest.raises(FileNotFoundError, match=f"LoRA 'owner/name' is not a local path, and .*{sentence}"): find_lora("owner/name")


# refusals

def noted(t, **header):
    save_file(pair(B0), t/"odd.safetensors", metadata=header)
    return t/"odd.safetensors"


REFUSALS = {
    "a folder with a pickle": (lambda t: find_lora(written(t/"d"/"pytorch_lora_weights.bin").parent), "does not exist; give a .safetensors file"),
    "a pickle": (lambda t: read_lora(written(t/"x.pt")), "cannot be read .*give a LoRA in safetensors format"),
    "saving a pickle": (lambda t: lora.save_lora(trained(), t/"x.ckpt"), "x.ckpt' would be a pickle; give a folder or a .safetensors file"),
    "a note that is no JSON": (lambda t: lora_info(noted(t, qie_nb="{base")), "odd.safetensors' cannot be read .JSONDecodeError"),
    "settings that are no JSON": (lambda t: read_lora(noted(t, lora_adapter_metadata="r=4")), "odd.safetensors' cannot be read .JSONDecodeError"),
    "no LoRA": (lambda t: read_lora(tensors_file(t, w=torch.ones(2))), "has no adapter for a Qwen-Image transformer"),
    "an incomplete pair": (lambda t: read_lora(tensors_file(t, **{k: v for k, v in pair(B0).items() if "lora_A" in k})), "which is not a pair of LoRA weights"),
    "a LoKr": (lambda t: read_lora(tensors_file(t, **pair(B0), **{f"transformer.{B0}.lokr_w1": torch.ones(2)})), "'transformer.*lokr_w1', which is not a pair"),
    "ComfyUI's DoRA": (lambda t: read_lora(tensors_file(t, **pair(B0), **{f"transformer.{B0}.dora_scale": torch.ones(96, 1)})), "`dora_scale`, which is ComfyUI's DoRA"),
    "DoRA for ComfyUI": (lambda t: lora.save_lora(trained(use_dora=True), t, format="comfyui"), "`format` comfyui cannot store a DoRA"),
}


@pytest.mark.parametrize("act, sentence", REFUSALS.values(), ids=REFUSALS)
def test_refusals(act, sentence, tmp_path):
    kind = FileNotFoundError if "does not exist" in sentence else ValueError
    with pytest.raises(kind, match=sentence) as e: act(tmp_path)
    assert "\n" not in str(e.value)
