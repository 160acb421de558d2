"""What is defined here, outside of the library, works like its own.

A quantization, an optimizer, a variant, another family of models, a setting with a loss weighting, a sink."""
import json

import pytest
import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from PIL import Image
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from qie_nb.config import add_setting, describe, make_config, remove_setting
from qie_nb.core import settings as declared
from qie_nb.core.settings import registered, setting
from qie_nb.models.flow_matching import LOSS_WEIGHTINGS, add_loss_weighting
from qie_nb.data.dataset import ImageDataset
from qie_nb.devices.edit_model import EditModel
from qie_nb.models.quantizations.base import QUANTIZATIONS, Quantization, frozen, quantization_of
from qie_nb.models.quantizations.known import held_bytes, quantize_linear
from qie_nb.models.loading import device_of
from qie_nb.models.variants.base import VARIANTS, PromptTemplate, VAEShape, Variant
from qie_nb.models.variants.v2509 import V2509
from qie_nb.planning.memory import MemoryQuery, adapter_shapes, layer_bytes, numbers, optimizer_bytes
from qie_nb.planning.cards import plan
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.optimizers.base import OPTIMIZERS, Optimizer, rates
from qie_nb.training.sinks.base import SINKS, Sink
from qie_nb.tiny.random_models import _scheduler, tiny_folder, tiny_tokenizer
from helpers import adapters_equal, close_images, noise_image

IMAGE = noise_image((48, 40), 80)


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


class Other(V2509):
    "2509 with another template, of which fewer tokens are dropped."
    name = "other"
    image_words = 9

    def edit_template(self):
        theirs = super().edit_template()
        text = theirs.text.replace("Describe the key features", "Describe key the features")
        assert text != theirs.text
        return PromptTemplate(text, theirs.dropped - 3)

    def prompt_tokens(self, controls=1, area=None): return super().prompt_tokens(controls, area) + 1000


# --- a made-up family: other encoders, other latents, other positions
class Klein(Variant):
    "A text encoder that reads the prompt alone, latents by the VAE's own statistics, positions as coordinates."
    name = "klein"
    title = "Made-up"
    pipeline = "Flux2KleinPipeline"
    hub_mark = "klein"
    multi_image = True
    control_area = 64 * 64
    encoders = ("vae", "text_encoder", "tokenizer")
    processor = "tokenizer"
    patch = 1
    sees_images = False
    length = 24        # tokens of each prompt, padded
    layers = (1, 2, 3) # of the text encoder, side by side

    def template_for(self, images):
        return PromptTemplate("<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", 0)

    def prompt_identity(self):
        text = repr((tuple(self.template_for(0)), self.length, self.layers))
        return dict(template=text, text_template=text)

    def encode_whole(self, text_encoder, processor, prompt, images):
        ids = processor([self.prompt_text(prompt)], padding="max_length", max_length=self.length,
                        truncation=True, return_tensors="pt").to(device_of(text_encoder))
        with torch.no_grad():
            out = text_encoder.model(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"],
                                     output_hidden_states=True)
        return torch.cat([out.hidden_states[k][0] for k in self.layers], -1).to(text_encoder.dtype)

    def prompt_lengths(self, processor, prefix, prompt, share): return 0, self.length
    def embedding_width(self, config): return config["hidden_size"] * len(self.layers)

    def vae_shape(self, config):
        return VAEShape(4 * config["latent_channels"], 2 ** len(config["block_out_channels"]))

    def encoding_parts(self, vae): return vae.encoder, vae.quant_conv, vae.bn

    def pixels(self, vae, image, size):
        if isinstance(image, torch.Tensor):
            return image
        return VaeImageProcessor(vae_scale_factor=16).preprocess([image], size[1], size[0])

    def statistics(self, vae):
        mean = vae.bn.running_mean
        std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
        return mean.view(1, -1, 1, 1), std.view(1, -1, 1, 1)

    @torch.no_grad()
    def encode_images(self, vae, images, size, use_2d=True):
        x = torch.cat([self.pixels(vae, image, size) for image in images])
        mean, std = self.statistics(vae)
        z = Flux2KleinPipeline._patchify_latents(vae.encode(x.to(vae.device, vae.dtype)).latent_dist.mode())
        return ((z - mean) / std)[:, :, None]

    @torch.no_grad()
    def decode_latents(self, vae, latents, use_2d=True):
        mean, std = self.statistics(vae)
        z = Flux2KleinPipeline._unpatchify_latents(latents[:, :, 0].to(vae.dtype) * std + mean)
        decoded = vae.decode(z, return_dict=False)[0]
        images = VaeImageProcessor().postprocess(decoded, output_type="np")
        return (images * 255).round().astype("uint8")

    def pack(self, latents): return latents.flatten(2).transpose(1, 2)
    def unpack(self, tokens, h, w): return tokens.transpose(1, 2).unflatten(2, (1, h, w))

    def token_positions(self, target, controls, batch_size=1):
        "Coordinates (t, h, w, l) of each token: the target at t = 0, controls at 10, 20, ..."
        ids = []
        for n, (h, w) in enumerate([target, *controls]):
            t = torch.tensor([10 * n])
            ids.append(torch.cartesian_prod(t, torch.arange(h), torch.arange(w), torch.arange(1)))
        return torch.cat(ids).expand(batch_size, -1, -1)

    def transformer_inputs(self, transformer, x_t, controls, timesteps, embeds, mask, positions):
        words = torch.cartesian_prod(*[torch.arange(n) for n in (1, 1, 1, embeds.shape[1])])
        return dict(hidden_states=torch.cat([x_t, *controls], 1), timestep=(timesteps / 1000).to(x_t),
                    guidance=None, encoder_hidden_states=embeds, img_ids=positions,
                    txt_ids=words.expand(len(embeds), -1, -1), return_dict=False)

    def shift_mu(self, tokens, config, steps=None): return compute_empirical_mu(tokens, steps or 50)


SETTINGS = dict(model=dict(quantize="six"), optimizer=dict(name="momentum", lr=0.1))
TABLES = [("quantization", Six, QUANTIZATIONS), ("optimizer", Momentum, OPTIMIZERS), ("sink", Lines, SINKS),
          ("variant", Other, VARIANTS), ("variant", Klein, VARIANTS)]


def withdraw():
    "Take the names back: other files compare the library's own list."
    for kind, cls, table in TABLES:
        name = getattr(cls, "key", cls.name)
        table.pop(name)
        if name in declared._NAMES[kind]: # else the tests say so
            declared._NAMES[kind].remove(name)


withdraw() # this file is read by every process that collects tests


def test_a_sink_without_a_key_of_its_own_replaces_none():
    "Such a class is given by its name, or as an object."
    before = dict(SINKS)
    class Quiet(Lines):
        "As another, with its key inherited."
    assert SINKS == before and Quiet not in SINKS.values()


@pytest.fixture(scope="module", autouse=True)
def registered_again():
    for _, cls, _ in TABLES: cls.__init_subclass__()
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
    declared._NAMES["loss_weighting"].remove("focused")


def test_names_are_registered_and_valid():
    assert QUANTIZATIONS["six"].label == "6-bit (six)" and OPTIMIZERS["momentum"].package == ""
    assert "six" in registered("quantization")
    assert "momentum" in registered("optimizer")
    assert Lines.key in registered("sink")
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# --- a variant
@pytest.fixture(scope="module")
def other(trained_run, registered_again):
    "Settings of a run with the variant, whose model folder is the library's 2509."
    def settings(folder, **train):
        model = dict(pretrained_model_name_or_path=str(tiny_folder("2509")), variant="other")
        cache = dict(cache_dir=str(folder.parent/"cache")) # the fixture's belongs to another model
        train = dict(max_train_steps=2, save_steps=2, eval_images=0) | train
        return trained_run.settings(folder, model=model, cache=cache, train=train)
    return settings


def test_a_variant_is_named_in_the_settings_and_not_found_by_itself(tmp_path):
    assert make_config(dict(model=dict(variant="other"))).model.variant == "other"
    assert {n: text for n, _, text in describe()}["model.variant"].endswith("also other, klein")
    with pytest.raises(ValueError, match="`model.variant` must be 'auto'"):
        make_config(dict(model=dict(variant="another")))
    assert EditModel(str(tiny_folder("2509"))).variant.name == "2509"
    assert EditModel(str(tiny_folder("2509")), variant="other").variant.name == "other"
    with pytest.raises(ValueError, match="`model.variant` is other, but .* is v1"):
        EditModel(str(tiny_folder("v1")), variant="other")


def test_a_template_changes_embeddings_and_their_keys_only():
    own, plus = (EditModel(str(tiny_folder("2509")), variant=v).identity() for v in ("other", "2509"))
    assert {k for k in own if own[k] != plus[k]} == {"variant", "template"}


def test_the_plan_counts_its_prompts():
    shown = [plan("Qwen/Qwen-Image-Edit-2509", "RTX 4090", 512, dict(model=dict(variant=v))) for v in ("other", "auto")]
    assert shown[0].asked.query.text == shown[1].asked.query.text + 1000 and shown[0].asked.total > shown[1].asked.total


@pytest.mark.slow
@pytest.mark.bits
def test_a_variant_trains_resumes_and_predicts(other, tmp_path):
    whole = QwenImageEditTrainer(other(tmp_path/"whole", max_train_steps=4))
    report = whole.cache_embeddings()
    assert report.encoded and not report.skipped
    whole.fit()
    QwenImageEditTrainer(other(tmp_path/"parts")).fit()
    resumed = QwenImageEditTrainer(other(tmp_path/"parts", max_train_steps=4, resume_checkpoint="latest")).fit()
    assert resumed.global_step == 4 and adapters_equal(whole, resumed)
    state = json.loads(next(tmp_path.rglob("parts/**/state.json")).read_text())
    assert state["run"]["base"].startswith("other ") and state["model"]["variant"] == "other"
    resumed.save_lora(tmp_path/"lora")
    assert "(other), made with qie_nb" in (tmp_path/"lora"/"README.md").read_text()
    kw = dict(num_inference_steps=2, height=32, width=32, seed=0)
    image, theirs = (t.predict(IMAGE, "make it blue", **kw) for t in (resumed, reloaded(other, tmp_path)))
    assert close_images(image, theirs, 3)
    embed = resumed.encode_prompt_image_embedding("make it blue", IMAGE)[0]
    plus = QwenImageEditTrainer(trained_like(other, tmp_path)).encode_prompt_image_embedding("make it blue", IMAGE)[0]
    assert embed.shape[1] == plus.shape[1] + 3


def reloaded(other, folder):
    "A new trainer that loads the saved LoRA."
    return QwenImageEditTrainer(other(folder/"again")).load_lora(folder/"lora")


def trained_like(other, folder):
    "The same settings with the library's variant."
    config = make_config(other(folder/"plus"))
    config.model.variant = "2509"
    return config


@pytest.fixture(scope="module")
def klein(tmp_path_factory):
    "A model folder of random parts."
    folder = tmp_path_factory.mktemp("klein")/"model"
    tok = tiny_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKLFlux2(block_out_channels=(16,) * 4, latent_channels=8, layers_per_block=1, norm_num_groups=4)
        vae.bn.running_mean.normal_()
        vae.bn.running_var.uniform_(0.5, 2)
        text_encoder = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=len(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False))
        transformer = Flux2Transformer2DModel(
            in_channels=32, num_layers=2, num_single_layers=1, attention_head_dim=32, num_attention_heads=2,
            joint_attention_dim=96, axes_dims_rope=(8,) * 4, guidance_embeds=False)
    Flux2KleinPipeline(_scheduler(), vae, text_encoder, tok, transformer).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.bits
def test_a_made_up_family_precomputes_trains_resumes_and_predicts(klein, trained_run, tmp_path):
    def trainer(name, **train):
        return QwenImageEditTrainer(trained_run.settings(
            tmp_path/name, model=dict(pretrained_model_name_or_path=str(klein)),
            cache=dict(cache_dir=str(tmp_path/"cache")), data=dict(caption_dropout_rate=0.5),
            train=dict(max_train_steps=2, save_steps=2, eval_images=0) | train))
    whole = trainer("whole", max_train_steps=4)
    assert whole.components.variant.name == "klein" and "Made-up klein (Flux2KleinPipeline)" in repr(whole.components)
    report = whole.cache_embeddings()
    def stored(kind): return len(list((tmp_path/"cache"/kind).rglob("*.safetensors")))
    captions = {s.prompt for s in whole.data.samples or ImageDataset(whole.config).samples}
    assert not report.skipped
    assert stored("prompt_embed") == len(captions) and stored("empty_prompt_embed") == 1, "one for all images"
    assert stored("prompt_prefix") == 0
    whole.fit()
    assert whole.modulation_table is None and whole.components.built.count("text_encoder") == 1
    assert {n for n, p in whole.transformer.named_parameters() if p.requires_grad and ".1.attn.to_q" in n}
    trainer("parts").fit()
    resumed = trainer("parts", max_train_steps=4, resume_checkpoint="latest").fit()
    assert resumed.global_step == 4 and adapters_equal(whole, resumed)
    resumed.save_lora(tmp_path/"lora")
    card = (tmp_path/"lora"/"README.md").read_text()
    assert "(klein), made with qie_nb" in card and "from diffusers import Flux2KleinPipeline" in card
    kw = dict(num_inference_steps=2, height=64, width=48, seed=0)
    trainers = resumed, trainer("again").load_lora(tmp_path/"lora"), trainer("base")
    trained, loaded, without = (t.predict(IMAGE, "make it blue", **kw) for t in trainers)
    assert trained.shape == (64, 48, 3) and (trained == loaded).all() and (trained != without).any()
    with pytest.raises(ValueError, match="no nodes of ComfyUI for variant klein"):
        resumed.save_lora(tmp_path/"comfy", format="comfyui", workflow=True)


def test_its_latents_survive_and_its_velocity_is_the_pipelines(klein):
    v, parts = VARIANTS["klein"], EditModel(str(klein))
    vae, transformer = parts.get("vae"), parts.get("transformer")
    z = v.encode_images(vae, [IMAGE], (64, 48))
    assert z.shape == (1, 32, 1, 3, 4) == (1, v.vae_shape(vae.config).channels, 1, 48 // 16, 64 // 16)
    assert torch.equal(v.unpack(v.pack(z), 3, 4), z) and v.token_count(3, 4) == 12
    assert v.decode_latents(vae, z).shape == (1, 48, 64, 3)
    theirs = Flux2KleinPipeline._prepare_image_ids([torch.zeros(1, 32, 2, 3), torch.zeros(1, 32, 4, 1)])
    assert torch.equal(v.token_positions((3, 4), [(2, 3), (4, 1)])[:, 12:], theirs)
    embed = v.encode_whole(parts.get("text_encoder"), parts.get("tokenizer"), "make it blue", [])[None]
    assert embed.shape == (1, 24, 96)
    tokens, at = v.pack(z), v.token_positions((3, 4), [(3, 4)])
    with torch.no_grad():
        ours = v.velocity(transformer, tokens, [tokens], torch.tensor([500.]), embed, None, at)
    assert ours.shape == (1, 12, 32) and ours.isfinite().all()
