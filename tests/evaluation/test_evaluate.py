"""Evaluation tells the truth and changes nothing: fixed noise, images from what is encoded once, the same adapter with it and without."""
import contextlib, csv, importlib.util, json, random, shutil
from pathlib import Path
from types import SimpleNamespace as NS

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import adapters_equal, settings, write_pairs
from qie_nb.evaluation import evaluate as evaluation
from qie_nb.evaluation import validation_loss as rooms
from qie_nb.training.callbacks import Callback
from qie_nb.cli import main
from qie_nb.encoding.encoder import Encoder
from qie_nb.evaluation.eval_images import EvalCase, edit_cached, find_styles, overview, eval_cases, render_eval_images
from qie_nb.evaluation.evaluate import EvaluationCallback, evaluate, table
from qie_nb.evaluation.validation_loss import COLUMNS, ValidationLoss, compare_losses as compare, fixed_sigmas, held_out_loss, confidence_interval
from qie_nb.lora.adapters import lora_state
from qie_nb.trainer import QwenImageEditTrainer

SIZES = ((96, 32), (96, 32), (32, 48), (48, 32), (40, 40)) # the first two make a bucket of their own


@pytest.fixture
def made(tmp_path):
    "A function that makes configurations: training pairs, held-out pairs of their own and two styles."
    write_pairs(tmp_path/"set", ((48, 32), (32, 48), (40, 40), (48, 32)))
    write_pairs(tmp_path/"val", SIZES, caption=["x", "invert", "invert the colours", "invert all of the colours, please", "y z"], seed=1)
    for style, size in (("monet", (64, 40)), ("photo", (40, 64))):
        (tmp_path/"test"/style).mkdir(parents=True)
        Image.fromarray(np.random.default_rng(size[0]).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)).save(tmp_path/"test"/style/"1.png")
        (tmp_path/"test"/style/"prompt.txt").write_text(f"make it a {style}")

    def config(out="out", styles=False, lora=None, **sections):
        train = dict(output_dir=str(tmp_path/out), val_path=str(tmp_path/"val"), eval_num_inference_steps=2, eval_images=2, eval_noise_samples=1,
                     max_train_steps=4)
        if styles: train["test_image_dir"] = str(tmp_path/"test")
        sections["train"] = train | sections.get("train", {})
        base = settings(tmp_path/"set", tmp_path, **sections)
        base["model"]["lora"] |= lora or {}
        return base
    return config


@pytest.fixture
def trainer(made):
    "Ready to be asked for losses: an adapter, an encoded cache, held-out pairs."
    t = QwenImageEditTrainer(made(train=dict(eval_noise_samples=2)))
    t.cache_embeddings()
    t.make_loader()
    t.set_lora()
    torch.manual_seed(5)
    for p in t.transformer.parameters():
        if p.requires_grad: p.data += 0.1 * torch.randn_like(p)
    return t


def seen_by(trainer, dataset, monkeypatch, **kw):
    "What the transformer is asked for: {sample id: set of (noise level, noise's sum)}."
    asked, real = {}, trainer.loss_at

    def loss_at(batch, eps, sigmas):
        for i, e, s in zip(batch["sample_id"], eps, sigmas): asked.setdefault(i, []).append((float(s), float(e.double().sum())))
        return real(batch, eps, sigmas)
    monkeypatch.setattr(trainer, "loss_at", loss_at)
    held_out_loss(trainer, dataset, **kw)
    monkeypatch.setattr(trainer, "loss_at", real)
    return {i: sorted(v) for i, v in asked.items()}


# --- held-out loss
def test_noise_depends_on_the_pair_and_the_draw_alone(trainer, monkeypatch):
    first = seen_by(trainer, trainer.held_out, monkeypatch)
    trainer.config.data.batch_size, trainer.config.train.seed, trainer.state.global_step, trainer.state.epoch = 5, 99, 7, 3
    fewer = trainer._subset(trainer.held_out, trainer.held_out.samples[::-1][:3])
    for i, v in seen_by(trainer, fewer, monkeypatch).items(): assert v == first[i]
    more = seen_by(trainer, trainer.held_out, monkeypatch, noises=3)
    for i, v in first.items():
        assert set(v) < set(more[i]) and len({noise for _, noise in v}) == 2
        for k, part in enumerate(zip(v[::2], v[1::2])):
            for level, _ in part: assert k / 5 < level <= (k + 1) / 5 and abs(level * 1000 - round(level * 1000)) < 1e-3
    assert len({str(v) for v in first.values()}) == len(SIZES), "every pair has noise of its own"


def test_levels_fill_their_parts():
    levels = np.array([fixed_sigmas(f"{i}", d) for i in range(1000) for d in range(2)])
    assert levels.min() == 0.001 and levels.max() == 1
    assert (levels[::2] != levels[1::2]).mean() > 0.98, "another draw of a pair has other levels"
    np.testing.assert_allclose(levels.mean(0), [0.1, 0.3, 0.5, 0.7, 0.9], atol=0.006)


def test_the_size_of_a_batch_changes_nothing_but_rounding(trainer):
    results = []
    for n in (1, 2, 5):
        trainer.config.data.batch_size = n
        results.append(held_out_loss(trainer, trainer.held_out))
    for r in results[1:]:
        for i, v in results[0].losses.items(): np.testing.assert_allclose(r.losses[i], v, rtol=2e-5)
    alone = held_out_loss(trainer, trainer._subset(trainer.held_out, trainer.held_out.samples[2:3]))
    np.testing.assert_allclose(alone.losses["0002"], results[0].losses["0002"], rtol=2e-5)


def test_the_number_is_the_plain_loss_whatever_training_weighs(trainer):
    before = held_out_loss(trainer, trainer.held_out)
    trainer.config.train.loss_weighting, trainer.config.train.timestep_sampling = "sigma_sqrt", "shift"
    assert held_out_loss(trainer, trainer.held_out) == before
    row = before.row()
    assert tuple(row) == COLUMNS and all(isinstance(v, (int, float)) for v in row.values()) and row["held_out_pairs"] == len(SIZES)
    assert row["held_out_loss"] == pytest.approx(np.mean([v[0] for v in before.losses.values()]))
    assert row["held_out_loss_plain"] == pytest.approx(np.mean([v[1:] for v in before.losses.values()]))
    assert row["held_out_loss_low"] < row["held_out_loss"] < row["held_out_loss_high"]


def test_the_number_weighs_levels_as_the_sampler_meets_them(trainer, monkeypatch):
    "The loss is made to be 1 at one part of the levels and 0 elsewhere: what comes out is that part's weight."
    from qie_nb.models.flow_matching import calculate_mu
    shares = []
    for k in range(5):
        monkeypatch.setattr(trainer, "loss_at", lambda batch, eps, sigmas: ((sigmas * 5).ceil() - 1 == k).float())
        got = held_out_loss(trainer, trainer.held_out)
        for v in got.losses.values(): assert v[1:] == [float(j == k) for j in range(5)]
        shares.append([v[0] for v in got.losses.values()])
    np.testing.assert_allclose(np.sum(shares, 0), 1, rtol=1e-6)
    i, h, w = "0000", *(side // 8 for side in trainer.held_out.bucket(0)[0][::-1])
    s = np.exp(calculate_mu(h * w // 4, trainer.components.get("scheduler").config))
    levels = np.array([fixed_sigmas(i, d) for d in range(2)])
    weights = levels**2 * s / (s - (s - 1) * levels)**2
    np.testing.assert_allclose(np.array(shares)[:, list(got.losses).index(i)], weights.sum(0) / weights.sum(), rtol=1e-5)


def test_intervals_and_verdicts():
    assert confidence_interval([1., 2., 3., 4.]) == pytest.approx((2.5, 2.5 - 2.05426, 2.5 + 2.05426), rel=6e-3) # t of 3 degrees, 3.1824, times 0.6455
    rng = np.random.default_rng(0)
    inside = [low <= 0 <= high for _, low, high in (confidence_interval(rng.normal(size=6)) for _ in range(4000))]
    assert abs(np.mean(inside) - 0.95) < 0.012
    pair = lambda *v: ValidationLoss({str(i): [x] * 6 for i, x in enumerate(v)})
    a, b = pair(1., 2., 3.), pair(0.9, 1.91, 2.88)
    assert compare(a, b).verdict == "better" and compare(b, a).verdict == "worse" and compare(a, pair(0.9, 2.1, 3.)).verdict == "no clear change"
    assert compare(pair(1.), pair(0.5)).verdict == "no clear change" and "interval" not in str(pair(1.))
    with pytest.raises(ValueError, match="same `train.eval_noise_samples`"): compare(a, ValidationLoss(b.losses, 3))


# --- the run is not touched
class Look(Callback):
    "Notes what evaluation must leave alone, before and after it."
    def __init__(self): self.notes = []
    def note(self, t):
        s = t.scheduler
        state = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), s.timesteps.tolist(), s.sigmas.tolist(),
                 s.step_index, s.begin_index, dict(s.config), t.transformer.training, [p.requires_grad for p in t.transformer.parameters()],
                 t.vae is None, t.qwen_vl is None)
        self.notes.append(state)


def is_interactive(monkeypatch):
    look, real = Look(), EvaluationCallback.evaluate

    def evaluate(self, t):
        look.note(t), real(self, t), look.note(t)
    monkeypatch.setattr(EvaluationCallback, "evaluate", evaluate)
    return look


def test_evaluation_on_or_off_gives_the_same_adapter_to_the_bit(made, monkeypatch, tmp_path):
    lora, train = dict(lora_dropout=0.3), dict(gradient_checkpointing=True, max_train_steps=4, eval_images=1)
    QwenImageEditTrainer(made()).cache_embeddings()
    plain = QwenImageEditTrainer(made("plain", lora=lora, train=train)).fit()
    look = is_interactive(monkeypatch)
    seen = QwenImageEditTrainer(made("seen", styles=True, lora=lora, train=train | dict(eval_steps=2))).fit()
    assert adapters_equal(plain, seen)
    assert len(look.notes) == 4, "at step 2, in the middle of an epoch, and at the end"
    for before, after in zip(look.notes[::2], look.notes[1::2]): assert before == after
    assert look.notes[0][-4] and look.notes[0][-2:] == (True, True)
    folders = sorted(p.name for p in (tmp_path/"seen"/"checkpoints"/"inference").iterdir())
    assert len(folders) == 2 and set(seen.state.metrics) == set(COLUMNS)


def test_predicting_in_mid_training_leaves_the_training_scheduler_alone(made, tmp_path):
    class Predict(Callback):
        def on_step_end(self, t):
            if t.global_step != 2: return
            look = Look()
            look.note(t)
            t.predict(str(tmp_path/"test"/"photo"/"1.png"), "make it a monet", num_inference_steps=3)
            look.note(t)
            scheduler = slice(3, 8)
            assert look.notes[0][scheduler] == look.notes[1][scheduler] and look.notes[0][:3] == look.notes[1][:3]
            self.ran = True
    callback = Predict()
    with_it = QwenImageEditTrainer(made("a", train=dict(val_path=None)), callbacks=[callback]).fit()
    assert callback.ran and adapters_equal(with_it, QwenImageEditTrainer(made("b", train=dict(val_path=None))).fit())


def test_nothing_frozen_is_encoded_twice_and_encoders_leave_memory(made, monkeypatch, tmp_path):
    QwenImageEditTrainer(made()).cache_embeddings()
    encoders, real = [], Encoder.__init__

    def init(self, *a, **kw): real(self, *a, **kw), encoders.append(self)
    monkeypatch.setattr(Encoder, "__init__", init)
    count = lambda: {k: sum(e.calls[k] for e in encoders) for k in ("vae", "text_encoder")}
    t = QwenImageEditTrainer(made(styles=True, train=dict(eval_steps=2)))
    t.fit()
    first = count()
    assert first == dict(vae=2, text_encoder=2 + 2 + 2), "two test images; two empty prompts of pairs; a prompt and an empty one for each image"
    assert t.vae is None and t.qwen_vl is None
    t.config.train.max_train_steps = 5
    t.fit()
    assert t.global_step == 5 and count() == first
    encoders.clear()
    QwenImageEditTrainer(made("again", styles=True, train=dict(eval_steps=2, max_train_steps=2))).fit()
    assert count() == dict(vae=2, text_encoder=4), "the pairs' empty prompts are in the cache now"


def test_pairs_whose_empty_prompts_are_cached_need_no_encoder(made, built):
    from test_main_job import TEXT, TRANSFORMER, VAE
    config = made(train=dict(val_path=None, val_fraction=0.5, eval_steps=2))
    QwenImageEditTrainer(config).cache_embeddings()
    built.clear()
    QwenImageEditTrainer(config).fit()
    assert built == {TRANSFORMER: 1, VAE: 2}, "the decoder comes for each evaluation, the text encoder never"


def test_encoders_that_training_uses_stay(made):
    t = QwenImageEditTrainer(made(cache=dict(use_cache=False), train=dict(eval_steps=2, max_train_steps=2))).fit()
    assert t.vae is not None and t.qwen_vl is not None and "held_out_loss" in t.state.metrics


def test_pairs_that_nobody_encoded_yet_leave_no_encoder_behind(made):
    QwenImageEditTrainer(made(train=dict(val_path=None))).cache_embeddings()
    t = QwenImageEditTrainer(made(train=dict(eval_steps=2, max_train_steps=2, eval_images=0))).fit() # in mid-epoch
    assert "held_out_loss" in t.state.metrics and t.vae is None and t.qwen_vl is None


# --- stopping
@pytest.mark.parametrize("where", ["loss", "sampling", "last step"])
def test_a_stop_is_obeyed_within_a_step(where, made, monkeypatch, capsys):
    calls = []
    config = made(train=dict(eval_steps=2, max_train_steps=2 if where == "last step" else 9, eval_num_inference_steps=9))
    QwenImageEditTrainer(made()).cache_embeddings()
    t = QwenImageEditTrainer(config)

    def stop(*a):
        calls.append(1)
        if len(calls) == 3: t.state.stop = "SIGTERM"
    if where == "sampling":
        from qie_nb.sampling import cached_edits as cached
        real = cached.denoise_encoded
        monkeypatch.setattr(cached, "denoise_encoded", lambda *a, on_step, **kw: real(*a, on_step=lambda *s: (stop(), on_step(*s)), **kw))
    else:
        real = rooms.losses_at_sigma
        monkeypatch.setattr(rooms, "losses_at_sigma", lambda *a: (stop(), real(*a))[1])
    t.fit()
    assert len(calls) == 3 and t.global_step == 2 and t.state.stop == "SIGTERM"
    assert "held_out_loss" not in t.state.metrics and "given up: SIGTERM" in capsys.readouterr().out
    assert t.transformer.training and t.vae is None


def test_a_run_that_is_stopped_already_is_not_evaluated(made, monkeypatch):
    class Stop(Callback):
        def on_step_end(self, t): t.state.stop = "deadline"
    monkeypatch.setattr(evaluation, "evaluate_now", lambda *a: pytest.fail("evaluated"))
    t = QwenImageEditTrainer(made(train=dict(eval_steps=2)))
    t.state.max_steps, t.state.global_step, t.state.stop = 9, 2, "deadline"
    t.held_out = [1]
    callback = EvaluationCallback(t.config)
    callback.on_step_end(t), callback.on_train_end(t)


def test_an_evaluation_after_a_stopped_run_is_no_stop(trainer):
    trainer.state.stop = "interrupted"
    assert held_out_loss(trainer, trainer.held_out).losses


# --- when
def test_the_last_step_is_evaluated_once(made, monkeypatch):
    at, real = [], EvaluationCallback.evaluate
    monkeypatch.setattr(EvaluationCallback, "evaluate", lambda self, t: (at.append((t.global_step, t.state.epoch_ended)), real(self, t))[1])
    quick = dict(eval_images=0)
    t = QwenImageEditTrainer(made("a", train=quick | dict(eval_steps=3, max_train_steps=4))).fit()
    assert [s for s, _ in at] == [3, 4]
    rows = list(csv.DictReader(next((t.checkpoint_root()/"logs").glob("*.csv")).open()))
    assert [bool(row["held_out_loss"]) for row in rows] == [False, False, True, True], "the last is logged with its step"
    t.fit() # nothing left to do, and nothing to judge again
    assert len(at) == 2
    at.clear()
    QwenImageEditTrainer(made("b", train=quick | dict(eval_interval=1, max_train_steps=6))).fit() # 3 batches an epoch
    assert at == [(3, True), (6, True)]
    at.clear()
    QwenImageEditTrainer(made("c", train=quick)).fit()
    QwenImageEditTrainer(made("d", train=quick | dict(eval_steps=1, val_path=None))).fit()
    assert not at, "not asked for, or nothing to evaluate on"


def test_a_line_says_whether_it_is_more_than_noise_and_a_resumed_run_remembers(made, capsys, tmp_path):
    train = dict(eval_steps=2, eval_images=0, save_steps=2)
    QwenImageEditTrainer(made(train=train | dict(max_train_steps=2), optimizer=dict(lr=0.05))).fit()
    assert "since step" not in (out := capsys.readouterr().out) and "step 2: held-out loss" in out and "5 pairs" in out
    QwenImageEditTrainer(made(train=train | dict(resume_checkpoint="latest"), optimizer=dict(lr=0.05))).fit()
    line = next(l for l in capsys.readouterr().out.splitlines() if l.startswith("step 4: held-out loss"))
    assert "since step 2" in line and line.endswith(("better", "worse", "no clear change"))
    kept = json.loads((tmp_path/"out"/"checkpoints"/"inference"/"step_00000002"/"held_out.json").read_text())
    assert kept["steps"] == 2 and len(kept["losses"]) == len(SIZES) and kept["weights"] == "raw"
    assert evaluation.last_result(tmp_path/"out"/"checkpoints", 1) is None


def test_the_running_mean_is_what_is_judged(trainer, tmp_path):
    raw = held_out_loss(trainer, trainer.held_out)

    from qie_nb.training.optimizer import EMA
    trainer.ema = EMA([p for p in trainer.transformer.parameters() if p.requires_grad], 0.9)
    for m in trainer.ema.mean: m *= 0.5
    trainer.config.train.eval_images = 0
    result = evaluate(trainer)
    assert result["weights"] == "ema" and result["held_out_loss"] != raw.row()["held_out_loss"]
    assert held_out_loss(trainer, trainer.held_out) == raw


# --- images
def test_images_are_what_predict_gives_at_the_pairs_own_size(made, tmp_path):
    t = QwenImageEditTrainer(made(styles=True, train=dict(eval_steps=2, max_train_steps=2))).fit()
    folder = tmp_path/"out"/"checkpoints"/"inference"/"step_00000002"
    assert sorted(p.name for p in folder.glob("*.jpg")) == ["00_0000.jpg", "01_0004.jpg", "grid.jpg", "monet_to_photo.jpg", "photo_to_monet.jpg"]
    for shot, i in zip(eval_cases(t, find_styles(tmp_path/"test"))[:2], (0, 4)):
        w, h = t.held_out.bucket(i)[0]
        s = t.held_out.samples[i]
        assert Image.open(folder/f"{shot.name}.jpg").size == (w, h)
        expected = t.predict(s.controls[0], s.prompt, num_inference_steps=2, width=w, height=h, seed=0)
        got = t.decode_vae_latent(edit_cached(t, shot, 2))[0]
        assert np.abs(got.astype(int) - expected).max() <= 2
    assert Image.open(folder/"00_0000.jpg").size[0] > Image.open(folder/"00_0000.jpg").size[1], "a wide pair comes out wide"


def test_the_style_matrix_is_predict_to_the_bit(made, tmp_path):
    t = QwenImageEditTrainer(made(styles=True))
    shots = {s.name: s for s in eval_cases(t, find_styles(tmp_path/"test"))}
    expected = t.predict(str(tmp_path/"test"/"photo"/"1.png"), "make it a monet", num_inference_steps=2)
    got = t.decode_vae_latent(edit_cached(t, shots["photo_to_monet"], 2))[0]
    assert expected.shape[0] > expected.shape[1] and np.array_equal(got, expected)


def test_a_kill_leaves_no_half_image(trainer, tmp_path, monkeypatch):
    from qie_nb.core import files
    shots = eval_cases(trainer)

    def killed(*a): raise KeyboardInterrupt
    monkeypatch.setattr(files.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt): render_eval_images(trainer, shots, tmp_path/"pictures")
    assert not list((tmp_path/"pictures").glob("*.jpg")) and trainer.vae is None


def test_names_and_captions_may_be_anything(tmp_path):
    from qie_nb.evaluation.eval_images import file_name, save_image
    for bad in ("../../etc/passwd", "a b/c\\d:e", "..", "\n", "x" * 300, "風" * 300):
        name = file_name(bad)
        assert name and not set(name) & set("/\\ :\n") and not name.startswith(".") and len(name.encode()) < 200
    pair = tuple(np.full((40, w, 3), 90, np.uint8) for w in (80, 60))
    captions = ["costs $5^_{ and $6 \\frac{", "two\nlines\x00 and\ta tab", "<b>&amp;", "long " * 200, ""]
    made = [(EvalCase(f"{i}", c, None, [], None, None, pair), pair[1]) for i, c in enumerate(captions)]
    fig = overview(made)
    save_image(tmp_path/"grid.jpg", fig)
    assert Image.open(tmp_path/"grid.jpg").size[1] > 200
    texts = [t.get_text() for a in fig.axes for t in a.texts]
    assert texts[0] == captions[0] and texts[1].split() == "two lines and a tab".split() and len(texts[3]) <= 152


def test_a_model_without_encoders_is_judged_by_its_loss(made, tmp_path, capsys):
    from qie_nb.tiny.random_models import tiny_folder
    QwenImageEditTrainer(made()).cache_embeddings()
    for d in ("bare", "with_vae"):
        shutil.copytree(tiny_folder("2511"), tmp_path/d, ignore=shutil.ignore_patterns("text_encoder", "processor", *(["vae"] if d == "bare" else [])))
    run = lambda d, **kw: made(d, model=dict(pretrained_model_name_or_path=str(tmp_path/d)), train=dict(eval_steps=4), **kw)
    t = QwenImageEditTrainer(run("bare")).fit()
    assert "has no VAE to make images with" in capsys.readouterr().out and "held_out_loss" in t.state.metrics
    shutil.rmtree(tmp_path/"bare"/"checkpoints")
    with pytest.raises(ValueError, match="needs a VAE and a text encoder"): QwenImageEditTrainer(run("bare", styles=True) | {}).fit()
    QwenImageEditTrainer(run("with_vae")).fit() # without guidance, for there is no empty prompt
    assert (tmp_path/"with_vae"/"checkpoints"/"inference"/"step_00000004"/"grid.jpg").is_file()


@pytest.mark.parametrize("break_it, message", [
    (lambda d: shutil.rmtree(d), "does not exist; give a folder"),
    (lambda d: shutil.rmtree(d/"monet"), "holds 1 style folders; it needs at least two"),
    (lambda d: (d/"monet"/"prompt.txt").unlink(), "style 'monet' has no instruction; set `train.style_prompts` monet"),
    (lambda d: (d/"photo"/"1.png").unlink(), "holds no image; put one in"),
    (lambda d: (d/"photo"/"1.png").write_bytes(b"no image"), "cannot be read")])
def test_a_faulty_test_folder_is_told_before_anything_is_loaded(break_it, message, made, tmp_path, built):
    config = made(styles=True, train=dict(eval_steps=1))
    break_it(tmp_path/"test")
    with pytest.raises((ValueError, FileNotFoundError), match=message): QwenImageEditTrainer(config).fit()
    assert not built


# --- several processes, played one after the other
def test_processes_share_the_work_and_take_equally_many_turns(trainer, tmp_path, monkeypatch):
    whole, shots, turns = held_out_loss(trainer, trainer.held_out), eval_cases(trainer), []
    real = rooms.losses_at_sigma
    monkeypatch.setattr(rooms, "losses_at_sigma", lambda *a: (turns.append(1), real(*a))[1])
    losses, counts, taken = [], [], []
    for me in range(3):
        trainer.accelerator = NS(process_index=me, num_processes=3, device="cpu", reduce=lambda t, how: t, wait_for_everyone=lambda: None)
        turns.clear()
        losses.append(held_out_loss(trainer, trainer.held_out).losses)
        counts.append(len(turns))
        if me: # the main process last: it puts the images of all together
            render_eval_images(trainer, shots, tmp_path/"p", 2)
            taken.append({p.name for p in (tmp_path/"p").glob("*.jpg")})
    trainer.accelerator = NS(process_index=0, num_processes=3, device="cpu", reduce=lambda t, how: t, wait_for_everyone=lambda: None)
    render_eval_images(trainer, shots, tmp_path/"p", 2)
    assert len(set(counts)) == 1 and taken == [{"01_0004.jpg"}, {"01_0004.jpg"}]
    assert {p.name for p in (tmp_path/"p").glob("*.jpg")} == {"00_0000.jpg", "01_0004.jpg", "grid.jpg"}
    for i, v in whole.losses.items(): np.testing.assert_allclose(np.sum([l[i] for l in losses], 0), v, rtol=1e-5)


def test_a_stop_in_one_process_stops_all():
    one = NS(state=NS(stop="", poll=None), accelerator=NS(process_index=0, num_processes=2, device="cpu", reduce=lambda t, how: t + 1))
    with pytest.raises(rooms.StopRequested): rooms.StopCheck(one)()


# --- any checkpoint
@pytest.fixture
def run(made, tmp_path):
    "A run with two checkpoints, a running mean in the second, and a LoRA file of its own."
    t = QwenImageEditTrainer(made(train=dict(save_steps=2, eval_images=1), optimizer=dict(lr=0.05))).fit()
    t.save_lora(tmp_path/"elsewhere"/"mine.safetensors")
    root = tmp_path/"out"/"checkpoints"
    shutil.copy(root/"step_00000002"/"pytorch_lora_weights.safetensors", root/"ema.safetensors")
    return t


def test_any_checkpoint_is_evaluated_without_training(run, made, tmp_path):
    judge = QwenImageEditTrainer(made(train=dict(eval_images=1)))
    base, two, last, file = (evaluate(judge, c) for c in ("base", "step_00000002", "latest", tmp_path/"elsewhere"/"mine.safetensors"))
    assert (base["weights"], two["weights"], two["steps"], last["steps"]) == ("none", "raw", 2, 4)
    assert last["losses"] == file["losses"]
    for k, v in held_out_loss(run, run.held_out).losses.items(): assert v == pytest.approx(last["losses"][k], rel=1e-5) # the run looks its modulation up
    assert len({r["held_out_loss"] for r in (base, two, last)}) == 3
    again = evaluate(judge, "base") # after adapters were loaded
    assert again["losses"] == base["losses"] and judge.optimizer is None
    assert evaluate(judge)["losses"] == last["losses"], "as it stands: the last that was loaded is in force again"
    assert all(Path(p).is_file() for r in (base, two, file) for p in r["pictures"]) and "step_00000002" in two["pictures"][0]
    assert json.loads(json.dumps(two)) == two, "plain data"
    shown = table([base, two, last])
    assert shown.count("\n") == 3 and shown.count("*") == 1 and "base" in shown


def test_a_running_mean_beside_the_adapter_is_preferred_and_named(run, made, tmp_path):
    mixed = tmp_path/"mixed"
    shutil.copytree(tmp_path/"elsewhere", mixed)
    (mixed/"mine.safetensors").rename(mixed/"pytorch_lora_weights.safetensors")
    shutil.copy(tmp_path/"out"/"checkpoints"/"ema.safetensors", mixed/"ema.safetensors")
    judge = QwenImageEditTrainer(made(train=dict(eval_images=0)))
    ema, raw, two = (evaluate(judge, c) for c in (mixed, mixed/"pytorch_lora_weights.safetensors", "step_00000002"))
    assert (ema["weights"], raw["weights"]) == ("ema", "raw") and ema["losses"] == two["losses"] != raw["losses"]


def test_mistakes_of_evaluate(run, made, tmp_path):
    with pytest.raises(ValueError, match="would take the place of the adapter that this trainer trains"): evaluate(run, "latest")
    with pytest.raises(ValueError, match="nothing to evaluate on; set `train.val_fraction`"):
        evaluate(QwenImageEditTrainer(made(train=dict(val_path=None))), "latest")
    with pytest.raises(FileNotFoundError, match="does not exist"): evaluate(QwenImageEditTrainer(made()), "step_00000099")
    (tmp_path/"out"/"checkpoints"/"step_00000002"/"state.json").write_text("{}")
    with pytest.raises(ValueError, match="incomplete or damaged"): evaluate(QwenImageEditTrainer(made()), "step_00000002")


def test_the_command_prints_numbers_and_a_table(run, made, tmp_path, capsys):
    file = tmp_path/"run.json"
    file.write_text(json.dumps(made(styles=True, train=dict(eval_images=1))))
    capsys.readouterr()
    assert main(["evaluate", "--config", str(file), "--checkpoint", "base", "--checkpoint", "latest"]) == 0
    out = capsys.readouterr().out
    assert out.count('"held_out_loss":') == 2 and "*" in out.splitlines()[-1] + out.splitlines()[-2]
    assert (tmp_path/"out"/"checkpoints"/"inference"/"base"/"monet_to_photo.jpg").is_file()
    assert main(["evaluate", "--config", str(file), "--checkpoint", "nowhere"]) == 2


@pytest.mark.slow
def test_held_out_loss_ranks_checkpoints_as_their_images_do(tmp_path):
    "A small form of benchmarks/validation_loss.py: good, overfitted and ruined adapters, ranked by loss and by the images' true error."
    spec = importlib.util.spec_from_file_location("held_out_benchmark", Path(__file__).parents[2]/"benchmarks"/"validation_loss.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    runs = dict(good=dict(pairs=48, lr=5e-3, r=16, keep=(10, 40, 80)), overfitted=dict(pairs=2, lr=1e-2, r=64, keep=(20, 60)),
                too_high=dict(pairs=48, lr=5e-2, r=16, keep=(20,)))
    result = benchmark.judge_ranking(benchmark.measure(tmp_path, runs, edit="sepia", seeds=(0, 1, 2)))
    assert len(result["kept"]) >= 6 and {n.split()[0] for n in result["kept"]} == {"base", "good", "overfitted", "too_high"}
    assert result["spearman"]["held_out_loss"] >= 0.9, result


def test_no_process_evaluates_alone(made, monkeypatch):
    "A signal reaches one process before the other: what one of them does not begin, nobody begins."
    said = []
    monkeypatch.setattr(evaluation, "broadcast_stop", lambda accelerator, stop: said.append(stop) or "SIGTERM") # as the other one answers
    monkeypatch.setattr(evaluation, "evaluate_now", lambda *a: pytest.fail("it would wait for the other for ever"))
    t = QwenImageEditTrainer(made(train=dict(eval_steps=2, max_train_steps=3)))
    t.callbacks.append(type("Stop", (evaluation.Callback,), dict(on_step_end=lambda self, t: setattr(t.state, "stop", "test") if t.global_step == 2 else None))())
    t.fit()
    assert said == [""] and t.state.pending == "step_00000002"
