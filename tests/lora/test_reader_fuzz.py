"""Mutated LoRA files: the reader gives what a simple reader gives, or refuses them in one sentence."""
import json
import resource

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save

from qie_nb.lora.formats import check_lora, kohya_alpha, read_lora

LAYERS = [f"transformer_blocks.{i}.attn.{n}" for i in (0, 1) for n in ("to_q", "to_k")]
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I8": 1}
MOST_MEMORY = 300_000  # kilobytes that all examples together may add


# --- the simple reader
def numbers(raw, dtype):
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I64": "<i8", "I8": "i1"}[dtype])


def simple_reader(data):
    """{layer: (A, B, alpha)} of a file that is known to be right."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    meta = header.pop("__metadata__", {})
    tensors = {}
    for key, record in header.items():
        begin, stop = record["data_offsets"]
        tensors[key] = numbers(data[end + begin:end + stop], record["dtype"]).reshape(record["shape"])
    layers = {}
    for key, tensor in tensors.items():
        name = key[key.index("transformer_blocks"):].replace("_orig_mod.", "")
        for part, marks in dict(A=(".lora_A", ".lora_down"), B=(".lora_B", ".lora_up"), alpha=(".alpha",)).items():
            for mark in marks:
                if mark in name:
                    layers.setdefault(name[:name.index(mark)], {})[part] = tensor
    told = [json.loads(meta.get("lora_adapter_metadata") or "{}").get("transformer.lora_alpha")]
    told += [meta.get(name) for name in ("lora_alpha", "network_alpha", "ss_network_alpha", "alpha")]
    told = [float(t) for t in told if t not in (None, "", "None", "null")]
    out = {}
    for layer, parts in layers.items():
        alpha = float(parts["alpha"].reshape(-1)[0]) if "alpha" in parts else (told or [len(parts["A"])])[0]
        out[layer] = parts["A"], parts["B"], alpha
    return out


# --- the files
@st.composite
def files(draw):
    """A LoRA file with up to three mutations."""
    prefix = draw(st.sampled_from(["transformer.", "diffusion_model.", "base_model.model.", "", "model.diffusion_model."]))
    down, up = draw(st.sampled_from([("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight")]))
    rank, seed = draw(st.integers(1, 5)), draw(st.integers(0, 9))
    g = torch.Generator().manual_seed(seed)
    tensors, meta = {}, {}
    for layer in LAYERS[:draw(st.integers(1, 4))]:
        tensors[f"{prefix}{layer}.{down}"] = torch.randn(rank, 8, generator=g)
        tensors[f"{prefix}{layer}.{up}"] = torch.randn(8, rank, generator=g)
    for mutate in draw(st.lists(st.sampled_from([value, key, dtype, alpha, told, shape]), max_size=2)):
        mutate(draw, tensors, meta)
    return draw(st.sampled_from([same, same, flipped, cut, longer]))(draw, save(tensors, metadata=meta))


def one(draw, tensors): return draw(st.sampled_from(sorted(tensors)))


def value(draw, tensors, meta):
    k = one(draw, tensors)
    number = draw(st.sampled_from([float("nan"), float("inf"), 1e30, -1e30, 70000., 60000., 0., -1.]))
    if tensors[k].is_floating_point() and tensors[k].numel():
        tensors[k] = tensors[k].clone()
        tensors[k].view(-1)[0] = number


def key(draw, tensors, meta):
    k = one(draw, tensors)
    layer = k[k.index("transformer_blocks"):]
    new = draw(st.sampled_from([
        "transformer." + layer, "foo." + layer, "module._orig_mod." + layer, k.replace(".attn.", "._orig_mod.attn."),
        k.replace("lora_", "lokr_"), k.replace("to_q", "to_v"), k.replace(".weight", ""), "é" + k, "lora_te_" + k, ""]))
    kept = draw(st.booleans())
    tensors[new if "transformer_blocks" in new else "foo.transformer_blocks"] = tensors[k].clone() if kept else tensors.pop(k)


def dtype(draw, tensors, meta):
    k = one(draw, tensors)
    tensors[k] = tensors[k].to(draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])))


def alpha(draw, tensors, meta):
    k = one(draw, tensors)
    if ".lora_" in k:
        number = draw(st.sampled_from([[4.], [0.5], [float("nan")], [1e30], [1., 2.], [], [-3.]]))
        tensors[k[:k.index(".lora_")] + ".alpha"] = torch.tensor(number)


def told(draw, tensors, meta):
    name = draw(st.sampled_from(["lora_alpha", "network_alpha", "ss_network_alpha", "alpha", "lora_adapter_metadata"]))
    text = draw(st.sampled_from(["8", "8.0", "None", "", "x", "nan", "1e30", "[]", "{}", '{"transformer.lora_alpha": 6}', '{"transformer.lora_alpha": "6"}', '{"a": 1, "a": 2}', "{"]))
    meta[name] = text


def shape(draw, tensors, meta):
    k = one(draw, tensors)
    tensors[k] = draw(st.sampled_from([tensors[k][:0], tensors[k][:1], tensors[k][None], tensors[k].flatten(), tensors[k].t() if tensors[k].dim() == 2 else tensors[k]])).contiguous().clone()


def same(draw, data): return data
def cut(draw, data): return data[:draw(st.integers(0, len(data)))]
def longer(draw, data): return data + b"\0" * draw(st.integers(1, 9))


def flipped(draw, data):
    end = 8 + int.from_bytes(data[:8], "little")
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        out[draw(st.integers(0, end - 1))] = draw(st.integers(0, 255))
    return bytes(out)


def check(data, file):
    file.write_bytes(data)
    try:
        got = read_lora(file)
    except (ValueError, FileNotFoundError) as e:
        assert "\n" not in str(e) and str(file) in str(e) and len(str(e)) < 1200, e
        with pytest.raises(type(e)): check_lora(file)
        return "refused"
    want = simple_reader(data)
    assert got.state.keys() == {f"{layer}.lora_{side}.weight" for layer in want for side in "AB"}
    for layer, (a, b, number) in want.items():
        for side, numbers in (("A", a), ("B", b)):
            ours = got.state[f"{layer}.lora_{side}.weight"].double().numpy()
            assert np.array_equal(ours, numbers.astype("float64"))
        assert kohya_alpha(got.config, layer) == pytest.approx(number)
    return "read"


def fuzz(folder, examples, derandomize):
    seen = {"read": 0, "refused": 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(max_examples=examples, derandomize=derandomize, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(files())
    def run(data): seen[check(data, folder/"x.safetensors")] += 1
    run()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY
    assert min(seen.values()) > examples / 10, f"both kinds are tried: {seen}"


def test_mutated_files(tmp_path): fuzz(tmp_path, 60, True)


@pytest.mark.weekly
def test_many_mutated_files(tmp_path): fuzz(tmp_path, 2000, False)


def test_the_fuzz_test_sees_a_wrong_number(tmp_path, monkeypatch):
    monkeypatch.setattr("qie_nb.lora.formats._PLAIN_ALPHA", ("lora_alpha",))
    data = save({f"{LAYERS[0]}.lora_A.weight": torch.ones(4, 8), f"{LAYERS[0]}.lora_B.weight": torch.ones(8, 4)}, metadata=dict(network_alpha="8"))
    with pytest.raises(AssertionError): check(data, tmp_path/"x.safetensors")
