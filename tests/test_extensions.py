"""What is defined here, outside of the library, works like its own: a quantization, an optimizer, a setting with a loss weighting, a sink."""
import pytest
import torch
from torch import nn

from qie_nb.config import add_setting, describe, make_config, remove_setting
from qie_nb.core import registry
from qie_nb.core.registry import registered
from qie_nb.core.settings import setting
from qie_nb.models.flow_matching import LOSS_WEIGHTINGS, add_loss_weighting
from qie_nb.models.quantizations.base import QUANTIZATIONS, Quantization, frozen, quantization_of
from qie_nb.models.quantize import held_bytes, quantize_linear
from qie_nb.planning.memory_query import MemoryQuery, adapter_shapes, layer_bytes, numbers, optimizer_bytes
from qie_nb.planning.plan import plan
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.optimizers.base import OPTIMIZERS, Optimizer, rates
from qie_nb.training.sinks.base import SINKS, Sink
from helpers import adapters_equal


class SixLinear(nn.Linear):
    "A linear layer whose weight is three bytes for four numbers, and one scale a row."

    def forward(self, x):
        return nn.functional.linear(x, self.numbers().to(x.dtype), self.bias)

    def numbers(self):
        a, b, c = self.weight.view(self.out_features, -1, 3).to(torch.int32).unbind(-1)
        packed = a | b << 8 | c << 16
        whole = torch.stack([packed >> shift & 63 for shift in (0, 6, 12, 18)], dim=-1)
        return (whole.flatten(1)[:, :self.in_features] - 32) * self.scale


class Six(Quantization):
    "Six bits, symmetric, in plain torch."
    name = "six"
    bits = 6.
    parts = ("", ".scale")

    def layer(self, inputs, outputs, packed, scale, bias):
        out = SixLinear(inputs, outputs, bias is not None, device="meta")
        out.weight = frozen(packed)
        out.bias = bias
        out.register_buffer("scale", scale)
        return out

    def quantize(self, linear):
        w = linear.weight
        scale = w.abs().amax(1, keepdim=True).clamp_min(1e-12) / 31
        whole = ((w / scale).round() + 32).to(torch.int32)
        whole = nn.functional.pad(whole, (0, -w.shape[1] % 4)).view(len(w), -1, 4)
        packed = sum(whole[..., k] << 6 * k for k in range(4))
        three = torch.stack([packed >> shift & 255 for shift in (0, 8, 16)], dim=-1).to(torch.uint8)
        return self.layer(linear.in_features, linear.out_features, three.flatten(1), scale, linear.bias)

    def bytes(self, inputs, outputs, base_bytes=2):
        return outputs * (-(-inputs // 4) * 3 + 2 * base_bytes)

    def to_tensors(self, linear):
        return super().to_tensors(linear) | {"weight.scale": linear.scale}

    def from_tensors(self, linear, tensors, dtype):
        bias = tensors.get("bias")
        bias = None if bias is None else frozen(bias.to(dtype))
        return self.layer(linear.in_features, linear.out_features, tensors["weight"], tensors["weight.scale"].to(dtype), bias)


class Momentum(Optimizer):
    "SGD with momentum."
    name = "momentum"
    from_settings = ("weight_decay", "momentum")

    def make(self, params, settings):
        return torch.optim.SGD(params, **rates(settings), momentum=settings.betas[0])

    def state_bytes(self, shape, zero=False):
        return 4 * torch.Size(shape).numel()


class Lines(Sink):
    "Keeps what it was told."
    key, name = "lines", "the list of lines"
    got = []

    def open(self, t): self.got.append(("open", t.global_step))
    def scalars(self, values, step): self.got.append(("loss", step, values["loss"]))
    def image(self, tag, image, step): self.got.append(("image", step, tag, image.shape[-1]))
    def close(self): self.got.append(("close",))


def focused(sigmas, settings):
    "More weight on high noise; the mean over all levels is 1."
    return (settings.focus + 1) * sigmas ** settings.focus


SETTINGS = dict(model=dict(quantize="six"), optimizer=dict(name="momentum", lr=0.1))
TABLES = [("quantization", "six", QUANTIZATIONS), ("optimizer", "momentum", OPTIMIZERS), ("sink", "lines", SINKS)]


def withdraw():
    "Take the names back: other files compare the library's own list."
    for kind, name, table in TABLES:
        table.pop(name)
        registry._NAMES[kind].remove(name)


withdraw() # this file is read by every process that collects tests


@pytest.fixture(scope="module", autouse=True)
def registered_again():
    for cls in (Six, Momentum, Lines): cls.__init_subclass__()
    yield
    withdraw()


@pytest.fixture
def focus():
    "A setting of `train` and a loss weighting that reads it."
    add_setting("train", "focus", setting(2., "exponent of the weight of noise", on_resume="must match", on_card=True))
    add_loss_weighting("focused", focused)
    yield dict(loss_weighting="focused")
    remove_setting("train", "focus")
    del LOSS_WEIGHTINGS["focused"]
    registry._NAMES["loss_weighting"].remove("focused")


def test_names_are_registered_and_valid():
    assert QUANTIZATIONS["six"].label == "6-bit (six)" and OPTIMIZERS["momentum"].package == ""
    assert "six" in registered("quantization") and "momentum" in registered("optimizer")
    c = make_config(SETTINGS)
    assert (c.model.quantize, c.optimizer.name) == ("six", "momentum")
    about = {name: text for name, _, text in describe()}
    assert about["model.quantize"].endswith("also six") and about["optimizer.name"].endswith("also momentum") # as `qie-nb options`
    with pytest.raises(ValueError, match="`model.quantize` must be true, false, 'none'"): make_config(dict(model=dict(quantize="seven")))
    with pytest.raises(ValueError, match="`optimizer.name` must be 'adamw'"): make_config(dict(optimizer=dict(name="moment")))


@pytest.mark.parametrize("inputs, dtype", [(128, torch.bfloat16), (128, torch.float32), (30, torch.float32)])
def test_a_layer_is_close_and_survives_its_file(inputs, dtype):
    plain = nn.Linear(inputs, 64).to(dtype).requires_grad_(False)
    x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = plain(x)
    layer = quantize_linear(plain, "six")
    assert 1e-4 < (layer(x) - y).norm() / y.norm() < 0.05
    assert held_bytes(layer) == layer_bytes(inputs, 64, dtype.itemsize, "six")
    six = QUANTIZATIONS["six"]
    tensors = six.to_tensors(layer)
    assert tensors.keys() == six.part_names(bias=True)
    again = six.from_tensors(nn.Linear(inputs, 64, device="meta"), tensors, dtype)
    assert torch.equal(again(x), layer(x)) and not quantization_of(layer.weight).name


def test_the_plan_counts_them():
    q = MemoryQuery(quantization="six", optimizer="momentum")
    assert optimizer_bytes(q) == 4 * numbers(adapter_shapes(q))
    shown = plan("2511", "RTX 4090", 512, dict(optimizer=dict(name="momentum")), quantize="six")
    assert "6-bit (six) weights" in repr(shown)
    eight = plan("2511", "RTX 4090", 512, dict(optimizer=dict(name="momentum")), quantize="qfloat8")
    assert shown.shown.total < eight.shown.total
    with pytest.raises(KeyError): optimizer_bytes(MemoryQuery(optimizer="unknown")) # no formula of another optimizer


@pytest.mark.bits
def test_a_run_resumes_exactly(trained_run, tmp_path):
    def run(name, steps, **train):
        values = SETTINGS | dict(train=dict(max_train_steps=steps, save_steps=2, eval_images=0, **train))
        return QwenImageEditTrainer(trained_run.settings(tmp_path/name, **values)).fit()
    whole = run("whole", 4)
    assert {type(m).__name__ for n, m in whole.transformer.named_modules() if n.endswith("to_q.base_layer")} == {"SixLinear"}
    run("parts", 2)
    resumed = run("parts", 4, resume_checkpoint="latest")
    assert resumed.global_step == 4 and adapters_equal(whole, resumed)
    momenta = [s["momentum_buffer"] for s in resumed.optimizer.state_dict()["state"].values()]
    assert momenta and any(m.abs().sum() > 0 for m in momenta)


def test_a_resume_takes_the_settings_of_its_group_from_the_configuration(trained_run, tmp_path):
    def run(steps, momentum, **train):
        values = dict(optimizer=dict(name="momentum", lr=0.1, betas=(momentum, 0.9)), train=dict(max_train_steps=steps, save_steps=2, eval_images=0, **train))
        return QwenImageEditTrainer(trained_run.settings(tmp_path, **values)).fit().optimizer.param_groups[0]["momentum"]
    assert run(2, 0.5) == 0.5 and run(4, 0.75, resume_checkpoint="latest") == 0.75


def test_a_checkpoint_and_its_card_name_them(trained_run, tmp_path):
    values = SETTINGS | dict(train=dict(max_train_steps=2, save_steps=2, eval_images=0))
    trainer = QwenImageEditTrainer(trained_run.settings(tmp_path, **values)).fit()
    folders = {p.parent for p in tmp_path.rglob("state.json")}
    assert folders
    for folder in folders:
        state = (folder/"state.json").read_text()
        assert "six" in state and "momentum" in state
    trainer.save_lora(tmp_path/"lora")
    text = (tmp_path/"lora"/"README.md").read_text()
    assert "| model.quantize | six |" in text and "| optimizer.name | momentum |" in text


@pytest.mark.bits
def test_a_loss_weighting_with_its_setting_trains_and_resumes_exactly(focus, trained_run, tmp_path):
    def run(name, steps, **train):
        values = dict(train=focus | dict(max_train_steps=steps, save_steps=2, eval_images=0, **train))
        return QwenImageEditTrainer(trained_run.settings(tmp_path/name, **values)).fit()
    whole = run("whole", 4)
    run("parts", 2)
    assert adapters_equal(whole, run("parts", 4, resume_checkpoint="latest"))
    assert not adapters_equal(whole, run("flat", 4, focus=0.)), "focus 0 weights all levels alike"
    with pytest.raises(ValueError, match="`train.focus`: 2.0 in the checkpoint, 3.0 now"):
        run("parts", 6, focus=3., resume_checkpoint="latest")
    with pytest.raises(ValueError, match="`train.loss_weighting`: focused in the checkpoint, none now"):
        run("parts", 6, loss_weighting="none", resume_checkpoint="latest")
    whole.save_lora(tmp_path/"lora")
    text = (tmp_path/"lora"/"README.md").read_text()
    assert "| train.focus | 2.0 |" in text and r"| train.loss\_weighting | focused |" in text
    about = {name: help for name, _, help in describe("train")}
    assert about["train.loss_weighting"].endswith("also focused") and "train.focus" in about


def test_the_weight_is_that_of_the_function(focus, trained_run, tmp_path):
    def losses(**train):
        t = QwenImageEditTrainer(trained_run.settings(tmp_path, train=dict(max_train_steps=1, eval_images=0, eval_at_start=False, **train)))
        seen = []
        own = t.loss
        t.loss = lambda batch, eps, sigmas, *a: seen.append((sigmas, own(batch, eps, sigmas, *a))) or seen[-1][1]
        t.config.train.output_dir = str(tmp_path/str(train))
        t.fit()
        return seen[0]
    sigmas, plain = losses()
    _, weighted = losses(**focus)
    torch.testing.assert_close(weighted, plain * 3 * sigmas ** 2)


def test_a_sink_gets_rows_and_images(trained_run, tmp_path):
    assert {name: help for name, _, help in describe("logging")}["logging.report_to"].endswith("also lines")
    values = dict(train=dict(max_train_steps=2, eval_images=0, eval_at_start=False),
                  logging=dict(report_to=["lines", "tensorboard"], log_images_every=2, log_dir=str(tmp_path/"runs")))
    Lines.got.clear()
    QwenImageEditTrainer(trained_run.settings(tmp_path, **values)).fit()
    assert Lines.got[0] == ("open", 0) and Lines.got[-1] == ("close",)
    assert [g[1] for g in Lines.got if g[0] == "loss"] == [1, 2] and any(g[0] == "image" for g in Lines.got)
    assert list((tmp_path/"runs").glob("events*")), "the other sink works beside it"
    with pytest.raises(ValueError, match="`logging.report_to` 'linse' is not supported; use .*lines.* or none, or one of accelerate's trackers"):
        QwenImageEditTrainer(trained_run.settings(tmp_path/"b", logging=dict(report_to="linse"))).fit()
