"""Where an evaluation's images are decoded: by the memory beside the training, and after out-of-memory."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qie_nb.evaluation import eval_images
from qie_nb.evaluation.eval_images import EvalCase, ImageDecoder
from qie_nb.planning import facts as planned
from qie_nb.planning.facts import DecodingFacts
from qie_nb.planning.plan import Planner
from qie_nb.training.callbacks import RunState

GB = 10**9
T4 = 15.6 * GB
CONTEXT = 0.7 * GB # and libraries


class Vae(torch.nn.Module):
    "Notes where it is put, and stays on the CPU."
    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        self.places = []

    def to(self, *args):
        "Only the dtype changes."
        if isinstance(args[0], torch.dtype):
            return super().to(*args)
        self.places.append(str(args[0]))
        return self


class Parts:
    "The components of a model whose VAE takes half a gigabyte in float32."
    def __init__(self, dtype, errors):
        self.dtype = dtype
        self.loaded = {}
        self.offload = ()
        self.vae = Vae(dtype)
        self.errors = list(errors)
        self.decoded = [] # (device, dtype) of each attempt
        self.variant = SimpleNamespace(decode_latents=self.decode)

    def bytes_of(self, name):
        "As of the published VAE."
        return 0.25 * GB * self.dtype.itemsize / 2

    def move(self, name, device):
        "The VAE."
        return self.vae.to(device)

    def decode(self, vae, latent):
        "A black image, or the next error."
        self.decoded.append((vae.places[-1], vae.weight.dtype))
        if self.errors:
            raise self.errors.pop(0)
        return np.zeros((1, 8, 8, 3), np.uint8)


def decoder_at(monkeypatch, side, free, dtype=torch.float32, device="cuda:0", errors=(), **predict):
    "A decoder of images of this side, with so many bytes free, and its trainer."
    monkeypatch.setattr(planned, "free_device_bytes", lambda device: free)
    monkeypatch.setattr(eval_images, "factor_of", lambda components: 8)
    planner = Planner(dict(predict=dict(devices=predict)), device=device)
    planner.components = parts = Parts(dtype, errors)
    planner._model = planned.ModelFacts({}, table=False)
    trainer = SimpleNamespace(components=parts, planner=planner, state=RunState(), predict_devices=dict(vae=device))
    case = EvalCase("a", "", (16, 1, side // 8, side // 8), [], None, None)
    return ImageDecoder(trainer, [case]), trainer


@pytest.mark.parametrize("side, held, dtype, device", [
    (1024, 8 * GB, torch.float32, "cpu"), (512, 8 * GB, torch.float32, "cuda:0"),
    (1024, 4 * GB, torch.float32, "cuda:0"),
    (1024, 8 * GB, torch.bfloat16, "cuda:0"), (1024, 10 * GB, torch.bfloat16, "cpu")])
def test_a_decoder_that_does_not_fit_beside_the_training_leaves_the_gpu(side, held, dtype, device, monkeypatch, capsys):
    decode, trainer = decoder_at(monkeypatch, side, T4 - CONTEXT - held, dtype)
    assert decode(torch.zeros(1)).shape == (8, 8, 3)
    (place, used), = trainer.components.decoded
    assert place == device and used == (torch.float32 if device == "cpu" else dtype)
    assert trainer.components.vae.weight.dtype == dtype, "as it was"
    decoder_at(monkeypatch, side, T4 - CONTEXT - held, dtype)
    said = capsys.readouterr().out
    moved = "evaluation images are decoded on the CPU, because the VAE does not fit cuda:0" in said
    assert moved == (device == "cpu")
    choice = trainer.planner.plan.decoder
    assert choice.value == device and choice.why.startswith("too large: " if device == "cpu" else "fits: ")


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), RuntimeError("CUDA out of memory.")])
def test_after_out_of_memory_the_cpu_decodes(error, monkeypatch, capsys):
    decode, trainer = decoder_at(monkeypatch, 512, T4, torch.bfloat16, errors=[error])
    for _ in range(2):
        assert decode(torch.zeros(1)).shape == (8, 8, 3)
    assert trainer.components.decoded == [("cuda:0", torch.bfloat16), ("cpu", torch.float32), ("cpu", torch.float32)]
    assert capsys.readouterr().out.count("\n") == 1, "one line, at the first image"
    again = ImageDecoder(trainer, [])
    again(torch.zeros(1))
    assert trainer.components.decoded[-1] == ("cpu", torch.float32), "the next evaluation does not try again"
    assert trainer.planner.plan.decoder.why == "it ran out of memory on cuda:0"


def test_other_errors_and_those_of_the_cpu_are_raised(monkeypatch):
    decode, _ = decoder_at(monkeypatch, 512, T4, errors=[RuntimeError("mat1 and mat2")])
    with pytest.raises(RuntimeError, match="mat1"):
        decode(torch.zeros(1))
    decode, trainer = decoder_at(monkeypatch, 512, T4, device="cpu", errors=[MemoryError()])
    with pytest.raises(MemoryError):
        decode(torch.zeros(1))
    assert trainer.components.decoded == [("cpu", torch.float32)]


def test_a_device_that_is_asked_for_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(
        name="Tesla T4", total_memory=int(T4), major=7, minor=5))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda n: (int(T4), int(T4)))
    decode, _ = decoder_at(monkeypatch, 1024, 0., vae="cuda:0")
    assert decode.device == "cuda:0"


def test_what_the_vae_holds_there_already_is_not_counted_twice(monkeypatch):
    monkeypatch.setattr(planned, "free_device_bytes", lambda device: GB)
    parts = Parts(torch.float32, ())
    first = planned.decoding_facts(parts, "cuda", 100)
    monkeypatch.setattr(planned, "devices_of_loaded", lambda components: dict(vae="cuda:0"))
    assert planned.decoding_facts(parts, "cuda:0", 100) == DecodingFacts("cuda:0", first.needed - 0.5 * GB, GB)
    assert first.needed == 0.5 * GB + 800_000 and planned.decoding_facts(parts, "cpu", 100).device == "cpu"
