"""Adapters: layers, training, parity with diffusers, saving, merging, starting from a file, refusals."""
import copy, json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from qie_nb.config import LoraSection
from qie_nb.lora import adapters as lora
from qie_nb.lora.formats import lora_info
from loras import B0, adapted, bare, file_of, forward, loaded, output, pair, pipeline, same, same_file, tensors_file, trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
IMAGE = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
TEXT = ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"]
UNUSED = {f"transformer.transformer_blocks.1.{n}" for n in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")}


def differ(a, b): return not torch.allclose(a, b, rtol=1e-2)


@pytest.mark.parametrize("setting, leaves", [
    ("attention_text", IMAGE + TEXT), (["attention", "img_mlp.net.2"], [*IMAGE, "img_mlp.net.2"]), # all_linear: in the notebook
    (r".*\.attn\.to_[kv]", ["attn.to_k", "attn.to_v"])])
def test_presets_select_exactly_these_layers(setting, leaves):
    tr = lora.add_lora(bare(), LoraSection(r=2, target_modules=setting))
    assert adapted(tr) == {f"transformer_blocks.{i}.{leaf}" for i in (0, 1) for leaf in leaves}


@pytest.mark.parametrize("settings, fixed", [(dict(use_rslora=True), set()), (dict(use_dora=True, target_modules="all_linear"), UNUSED)], ids=["rslora", "dora"])
def test_options_train(settings, fixed):
    tr = lora.add_lora(bare(dtype=torch.bfloat16), LoraSection(r=4, **settings))
    lora.assert_float32(tr)
    first, goal, losses = lora.lora_state(tr), output(tr) + torch.linspace(-1, 1, 64), []
    optimizer = torch.optim.AdamW(lora.lora_parameters(tr), lr=1e-2)
    for _ in range(8):
        optimizer.zero_grad()
        losses.append((forward(tr) - goal).square().mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0] and {k.split(".lora_")[0] for k, v in lora.lora_state(tr).items() if torch.equal(first[k], v)} == fixed


def test_alpha_is_the_rank_by_default():
    for settings, scale in ((dict(r=4), 1), (dict(r=4, lora_alpha=8), 2)):
        tr = lora.add_lora(bare(), LoraSection(**settings))
        assert tr.transformer_blocks[0].attn.to_q.scaling["default"] == scale


def test_dropout_follows_the_configuration(tmp_path):
    tr = trained(lora_dropout=0.5)
    file, kept = lora.save_lora(tr, tmp_path), output(tr.eval())
    rates = lambda tr: {getattr(m.lora_dropout["default"], "p", 0) for m in tr.modules() if hasattr(m, "lora_dropout")}
    assert differ(output(tr.train()), output(tr)) and rates(tr) == {0.5}
    lora.set_dropout(tr, 0)
    same(output(tr), kept)
    for rate in (0, 0.2):
        lora.start_lora(other := bare(), LoraSection(r=4, lora_dropout=rate, pretrained_weight=str(file)))
        assert rates(other) == {rate}, "the file has 0.5"


@pytest.mark.parametrize("variant, format, settings", [
    ("2511", "diffusers", dict(target_modules="all_linear", lora_alpha=0.3)),
    ("2509", "diffusers", dict(use_dora=True)), ("2511", "comfyui", dict(target_modules="all_linear", use_rslora=True, r=16, lora_alpha=8))], ids=["alpha", "dora", "comfyui"]) # more in test_mixing.py
def test_the_diffusers_pipeline_and_we_read_the_same_adapter(variant, format, settings, tmp_path):
    tr, pipe = trained(variant, **settings), copy.copy(pipeline(variant))
    file, want, pipe.transformer = lora.save_lora(tr, tmp_path, format=format), output(tr), bare(variant)
    assert differ(output(pipe.transformer), want)
    pipe.load_lora_weights(str(tmp_path), weight_name=file.name)
    same(output(pipe.transformer), want)
    same(output(loaded(file, variant)), want)


def test_header_has_only_what_a_reader_needs(tmp_path):
    config = json.loads(file_of(lora.save_lora(trained(), tmp_path))[1]["lora_adapter_metadata"])
    assert config == {"transformer.r": 4, "transformer.lora_alpha": 6, "transformer.target_modules": ["to_k", "to_out.0", "to_q", "to_v"],
                      "transformer.rank_pattern": {}}, "diffusers 0.37 (Kaggle) requires rank_pattern"


def test_ema_is_saved_instead_of_the_weights(tmp_path):
    tr = trained()
    mean = {k: torch.full_like(p, 0.25) for k, p in lora.lora_tensors(tr).items()}
    file = lora.save_lora(tr, tmp_path/"ema", state=mean)
    assert lora_info(file)["weights"] == "ema" and all((t == 0.25).all() for t in file_of(file)[0].values())
    assert lora_info(lora.save_lora(tr, tmp_path/"own", dict(weights="mine"), state=mean))["weights"] == "mine"


def test_a_dora_warns_and_keys_are_the_same_inside_wrappers(): # the notebook asserts that they are peft's
    with pytest.warns(UserWarning, match="ComfyUI ignores the magnitudes"): tr = trained(use_dora=True)
    want = lora.lora_state(tr).keys()
    tr.transformer_blocks[0] = torch.compile(tr.transformer_blocks[0]) # adds _orig_mod to every name
    assert "transformer_blocks.0._orig_mod.attn.to_q.lora_A.default.weight" in dict(tr.named_parameters())
    assert lora.lora_state(tr).keys() == want and f"transformer.{B0}.lora_magnitude_vector" in want


def test_a_sharded_adapter_is_gathered(tmp_path): # tests/devices/test_distributed.py saves one of two processes
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path/"store"), 1), rank=0, world_size=1)
    try:
        tr, mesh = trained(), dist.device_mesh.init_device_mesh("cpu", (1,))
        want = lora.lora_state(tr)
        for part in (*tr.transformer_blocks, tr): fully_shard(part, mesh=mesh)
        assert all(isinstance(p, DTensor) for p in lora.lora_tensors(tr).values())
        got = lora.lora_state(tr)
        assert not any(isinstance(t, DTensor) for t in got.values())
        same(got, want, 0, 0)
    finally: dist.destroy_process_group()


def test_a_second_adapter_raises_no_false_alarm(capfd, recwarn, tmp_path):
    "diffusers searches the name `lora` in every adapter's keys."
    lora.save_lora(trained(), tmp_path)
    tr = loaded(tmp_path)
    lora.load_lora(tr, tmp_path, "lora")
    assert "missing keys" not in capfd.readouterr().err and not [w for w in recwarn if "peft_config" in str(w.message)]
    assert set(tr.peft_config) == {"default", "lora"}


@pytest.mark.parametrize("dtype, settings", [(torch.float32, dict(use_dora=True)), (torch.bfloat16, dict(use_rslora=True, target_modules="all_linear"))], ids=["dora", "rslora"])
def test_unmerging_restores_every_bit(dtype, settings, tmp_path):
    tr = trained(dtype=dtype, **settings)
    before, beside, alone = {k: t.clone() for k, t in tr.state_dict().items()}, output(tr), output(bare(dtype=dtype))
    first = lora.save_lora(tr, tmp_path/"first")
    lora.merge_lora(tr), lora.merge_lora(tr)
    merged = output(tr)
    same(merged, beside, *((1e-4, 1e-5) if dtype == torch.float32 else (0.1, 0.1)))
    assert (merged - alone).abs().max() > 3 * (merged - beside).abs().max(), "the second call merged again"
    assert sum(not torch.equal(t, before[k]) for k, t in tr.state_dict().items()) == len(adapted(tr)) and same_file(first, lora.save_lora(tr, tmp_path/"merged"))
    lora.unmerge_lora(tr), lora.unmerge_lora(tr)
    assert all(torch.equal(t, before[k]) for k, t in tr.state_dict().items())


def test_a_merged_adapter_is_never_applied_twice(tmp_path):
    tr = trained()
    want, file = output(tr), lora.save_lora(tr, tmp_path)
    lora.merge_lora(tr)
    for act, sentence in ((lambda: lora.load_lora(tr, tensors_file(tmp_path, **pair(B0, n=128))), "does not fit"), (lambda: lora.start_lora(tr, LoraSection()), "call unmerge_lora"),
                          (lambda: lora.add_lora(tr, LoraSection(), "second"), "call unmerge_lora")):
        with pytest.raises(ValueError, match=sentence): act()
        assert lora.is_merged(tr), "a refusal changes nothing"
    lora.load_lora(tr, file, "second") # only the second is active
    same(output(tr), want)


def test_only_named_adapters_are_active(tmp_path):
    tr = trained()
    one = output(tr)
    lora.load_lora(tr, lora.save_lora(trained(seed=2), tmp_path), "second")
    two = output(tr)
    assert differ(one, two)
    for weights, want in (({"default": 1.0}, one), ({"second": 1.0}, two), ({"default": 0.0, "second": 1.0}, two), ({}, output(bare()))):
        lora.use_loras(tr, weights)
        same(output(tr), want)
        assert not lora.lora_parameters(tr)
    lora.load_lora(tr, tmp_path, "second") # active, although none was
    same(output(tr), two)
    lora.train_only(tr, "default")
    same(output(tr), one)


def test_training_starts_from_a_file(tmp_path, capsys):
    source, tr = trained(r=8, lora_alpha=3, target_modules="all_linear"), bare()
    info = lora.start_lora(tr, LoraSection(r=4, pretrained_weight=str(lora.save_lora(source, tmp_path))))
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and "rank 8, alpha 3, 24 layers" in printed
    assert info["weights"] == "raw" and len(lora.lora_parameters(tr)) == 40 and len(lora.lora_tensors(tr)) == 48
    same(output(tr), output(source))
    lora.assert_float32(tr)


def test_training_starts_from_the_file_although_an_adapter_is_loaded(tmp_path):
    file = lora.save_lora(trained(seed=2), tmp_path/"second")
    tr = loaded(lora.save_lora(trained(seed=1), tmp_path/"first"))
    before = output(tr)
    lora.start_lora(tr, LoraSection(r=4, pretrained_weight=str(file)))
    assert differ(output(tr), before)
    same(output(tr), output(trained(seed=2)))


def test_without_a_file_a_new_adapter_or_the_loaded_one(tmp_path):
    one, two = bare(), bare()
    for tr in (one, two): assert lora.start_lora(tr, LoraSection(r=4), seed=5) == {}
    same(output(one), output(bare()))
    same(lora.lora_state(one), lora.lora_state(two), 0, 0)
    tr = loaded(lora.save_lora(trained(), tmp_path))
    assert not lora.lora_parameters(tr)
    lora.start_lora(tr, LoraSection(r=4))
    same(output(tr), output(trained()))
    assert len(lora.lora_parameters(tr)) == 16


def merge_fp8(tmp_path):
    tr = trained()
    layer = tr.transformer_blocks[0].attn.to_q.base_layer
    layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)
    lora.merge_lora(tr)


REFUSALS = {
    "another size": (lambda t: loaded(tensors_file(t, **pair(B0, n=128))), "is for 128 features, the layer has 96"),
    "another model": (lambda t: loaded(tensors_file(t, **pair("transformer_blocks.77.attn.to_q"))), "there is no such layer"),
    "a misspelt preset": (lambda t: trained(target_modules="attention_all"), "matches no layer .*try attention, attention_text, all_linear"),
    "nothing to merge": (lambda t: lora.merge_lora(bare()), "there is no adapter to merge"),
    "merging into stored fp8": (merge_fp8, "the base is quantized or sharded .*float8_e4m3fn"),
}


@pytest.mark.parametrize("act, sentence", REFUSALS.values(), ids=REFUSALS)
def test_refusals(act, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence) as e: act(tmp_path)
    assert "\n" not in str(e.value)


def test_peft_shards_nothing_while_a_lora_is_loaded(monkeypatch, tmp_path):
    "In any process group, peft 0.19 imports names for it that transformers 5.0 lacks."
    from peft.utils import save_and_load
    def fails(*_): raise ImportError("EmbeddingParallel")
    real, name = save_and_load.set_peft_model_state_dict, "_maybe_shard_state_dict_for_tp"
    monkeypatch.setattr(save_and_load, name, fails, raising=False)
    def loads(*a, **kw):
        getattr(save_and_load, name)()
        return real(*a, **kw)
    monkeypatch.setattr("peft.set_peft_model_state_dict", loads)
    monkeypatch.setattr("peft.utils.set_peft_model_state_dict", loads)
    assert lora.load_lora(bare(), lora.save_lora(trained(), tmp_path/"lora")) is not None
    assert getattr(save_and_load, name) is fails
