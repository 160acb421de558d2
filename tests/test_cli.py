"""The command line: mistakes get one sentence, before torch is imported; settings, flags, help, and clearing a cache."""
import inspect, json, re, subprocess, sys
from types import SimpleNamespace

import pytest

from helpers import write_pairs
from qie_nb import cli
from qie_nb.cli import main, parser

MISTAKES = { # arguments, sentence
    "train": "`train` needs a configuration: --config run.yaml",
    "train x.yaml": "`config` 'x.yaml' does not exist",
    "train rum": "'rum' is neither a YAML file nor a setting (and no such file exists)",
    "train --place kaggle":
        "`--place` is not an option; see `qie-nb train --help` and `qie-nb options`",
    "train data.dataset_path=/no/such": "`data.dataset_path` '/no/such' does not exist",
    "train preset=tiny train.steps=3": "did you mean `train.max_train_steps`?",
    "train preset=tiny data.dataset_path=/ train.val_path=/no/such":
        "`train.val_path` '/no/such' does not exist",
    "train preset=t4x3": "did you mean `t4x2`?",
    "train a.yaml --config b.yaml": "give one configuration file, got b.yaml, a.yaml",
    "precompute model.pretrained_model_name_or_path=/no/such":
        "'/no/such' does not exist; give a diffusers folder",
    "predict --image a.jpg --prompt x --lora lora/x.safetensors:0.5":
        "LoRA 'lora/x.safetensors' does not exist",
    "predict --image nope.jpg --prompt x": "image 'nope.jpg' does not exist",
    "predict --image a.jpg --prompt x --model x a.yaml":
        "give a configuration or `--model`, not both",
    "predict --image a.jpg --prompt x --model x --config a.yaml":
        "give a configuration or `--model`, not both",
    "train data.dataset_path=meta.json": "`data.dataset_path` 'meta.json' does not exist",
    "check": "give the folder of your pairs, or --config run.yaml",
    "check a b": "give one data set, got a, b",
    "check /no/such": "'/no/such' does not exist",
    "check a run.yaml": "`config` 'run.yaml' does not exist",
    "cache stats": "give the folder of a cache, or --config",
    "cache clear /no/such": "`cache_dir` '/no/such' does not exist",
    "cache clear --yes /no/such": "`cache_dir` '/no/such' does not exist",
    "train --steps 100": "`--steps` is not an option; use `train.max_train_steps=100`",
    "train --learning_rate=1e-4": "use `optimizer.lr=1e-4`",
    "plan --gpuu T4": "did you mean `--gpu`?",
    "train runn.yaml":
        "does not exist; give the path of a YAML file, or let `qie-nb init` write one",
    "doctor runn.yaml": "`config` 'runn.yaml' does not exist",
    "plan runn.yaml": "`config` 'runn.yaml' does not exist",
    "plan --gpu RTX9999": "`gpu` 'RTX9999' is unknown; give its memory in GB, e.g. `12`",
    "plan --gpu RTX4071": "the nearest known one is RTX 4070 (12 GB)",
    "plan --gpu GTX1080": "no kernels for it",
    "plan --resolution large": "`resolution` must be a side or width x height in pixels",
    "plan --pairs 0": "`--pairs` must be 1 or more, got 0",
    "plan --controls 0": "`--controls` must be 1 or more, got 0",
    "plan --quantize nf5": "`model.quantize`",
    "plan --model nofolder": "`--model` 'nofolder' is not a folder; give a diffusers folder",
    "selfcheck --model nofolder": "`--model` 'nofolder' is not a folder; give a diffusers folder",
    "selfcheck --device gpu": "`--device` must be auto, cpu, mps, cuda or cuda:1, got 'gpu'",
    "selfcheck --offload all": "`predict.offload`",
    "selfcheck --quantize nf5": "`model.quantize`",
    "selfcheck --steps 1": "`--steps` must be 2 or more",
    "predict --image a.jpg --prompt x --out /tmp/out.xyz":
        "must end in a suffix of images, got '.xyz'",
    "predict --image a.jpg --prompt x --steps 1": "`--steps` must be 2 or more, got 1",
    "predict --image a.jpg --prompt x --width 500":
        "`--width` must be a multiple of 16, got 500; use 496",
    "cache pack /tmp": "`--out` is not set",
    "cache pack /tmp --out x --shard-gb 0": "`--shard-gb` must be 0.001 or more",
    "check --steps 0 x": "`--steps` must be 1 or more",
    "evaluate runn.yaml": "`config` 'runn.yaml' does not exist",
    "precompute --start-idx -1 preset=tiny": "`--start-idx` must be 0 or more",
    "train model.pretrained_model_name_or_path=nofolder":
        "'nofolder' is not a folder; give a diffusers folder",
    "options nosuch": "`nosuch` is not a known key; the sections are preset, model, data",
    "options trian": "did you mean `train`?",
    "train preset=tiny train.max_train_samples=9 train.max_train_steps=3":
        "both say how long the run is; remove one of them",
    "trian": "'trian' is no command; did you mean `train`?",
    "cache clear x --kind prompt_embeds": "did you mean `prompt_embed`?",
    "predict --image a.jpg": "missing: --prompt",
    "predict --seed x": "--seed must be of type int, got 'x'",
}


def test_mistakes_are_found_before_torch_is_imported():
    code = f"""import contextlib, io, json, sys
from qie_nb.cli import main
for line in {list(MISTAKES)!r}:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try: code = main(line.split())
        except SystemExit as e: code = e.code
    print(json.dumps([line, code, said.getvalue(), [m for m in ("torch", "diffusers") if m in sys.modules]]))"""
    rows = [json.loads(r) for r in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout.splitlines()]
    assert len(rows) == len(MISTAKES)
    for line, code, said, heavy in rows: assert code == 2 and MISTAKES[line] in said and said.count("\n") == 1 and not heavy, (line, said, heavy)


def test_each_command_has_an_example_that_parses(capsys):
    for name, sub in next(x for x in parser()._actions if x.dest == "command").choices.items():
        example = sub.epilog.removeprefix("example: qie-nb ")
        assert parser().parse_args(__import__("shlex").split(example)).run.__name__ == name.replace("ise", "ize"), example
        for action in sub._actions: assert action.help, (name, action.dest)
    assert main([]) == 0 and "COMMAND" in capsys.readouterr().out
    with pytest.raises(SystemExit): main(["--version"])
    assert re.fullmatch(r"qie-nb \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_settings_may_stand_anywhere():
    a = parser().parse_args(["train", "train.seed=1", "--preset", "tiny", "train.max_train_steps=3"])
    c = cli._config(a)
    assert (c.preset, c.train.seed, c.train.max_train_steps) == ("tiny", 1, 3)
    assert parser().parse_args(["cache", "gc", "x", "--dry_run"]).dry_run and parser().parse_args(["precompute", "--start_idx=3"]).start_idx == 3


def test_clear_asks(tmp_path, monkeypatch, capsys):
    import torch
    from qie_nb.cache import EmbeddingCacheManager
    m, folder = EmbeddingCacheManager(tmp_path/"cache"), str(tmp_path/"cache")
    def fill():
        for kind in ("pixel_latent", "prompt_embed"): m.save_cache(kind, "ab" * 16, torch.zeros(4))
    count = lambda: m.get_cache_stats()["total"]["count"]
    fill()
    assert main(["cache", "clear", folder]) == 2 and "would remove 2 entries" in capsys.readouterr().err, "in batch"
    assert main(["cache", "clear", folder, "--kind", "pixel_latent", "--dry-run"]) == 0 and "would remove 1 entries" in capsys.readouterr().out and count() == 2
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, left in (("", 2), ("n", 2), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda question: answer)
        assert main(["cache", "clear", folder]) == 0 and count() == left
    fill()
    assert main(["cache", "clear", folder, "--kind", "prompt_embed", "--yes"]) == 0 and count() == 1


def test_check_prints_json_alone_and_aligns(tmp_path, capsys, monkeypatch):
    from PIL import Image
    from qie_nb.tiny.photos import photos
    monkeypatch.setenv("QIE_NB_HOME", str(tmp_path/"home"))
    im = photos("held_out")[0].resize((200, 160))
    for side, x in (("training_images", 0), ("control_images", 4)): # the target's content is 4 px to the right
        (tmp_path/"my pairs"/side).mkdir(parents=True)
        im.crop((x, 0, x + 180, 160)).save(tmp_path/"my pairs"/side/"a.png")
    folder = str(tmp_path/"my pairs") # without captions
    assert main(["check", folder, "--json"]) == 0
    row, = json.loads(capsys.readouterr().out)["pairs"]
    assert list(row) == ["id", "dx", "dy", "sx", "sy", "rotation", "changed"] and row["id"] == "a" and abs(row["dx"] - 4) < 0.2 and abs(row["sx"] - 1) < 0.003
    assert main(["check", f"data.dataset_path={folder}", "--align", str(tmp_path/"out")]) == 0
    said = capsys.readouterr().out
    assert "1 of 1 pairs is shifted by more than 2 px" in said and "1 pairs aligned, 0 copied as they are" in said
    assert main(["check", str(tmp_path/"out")]) == 0 and "1 of 1 pairs fit" in capsys.readouterr().out
    assert main(["check", folder, "--align", folder]) == 2 and "already exists and is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["cache", "pack", "--out", "gs://bucket/packed", "cache"], ["demo", "--out", "hf://me/demo"], ["init", "pairs", "--out", "s3:/b/run.yaml"],
                                     ["prequantize", "--out", "gs://bucket/model"]])
def test_results_go_to_this_machine(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    assert "is an address; give a place on this machine, and copy it afterwards" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line, said", [
    ("train --steps 100", "use `train.max_train_steps=100`"),
    ("train --place kaggle", "see `qie-nb train --help` and `qie-nb options`"),
    ("plan --gpuu T4", "did you mean `--gpu`?"),
])
def test_an_option_that_does_not_exist_leads_to_a_setting_only_if_one_is_near(line, said, capsys):
    with pytest.raises(SystemExit):
        main(line.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("stop, suspect, code", [
    ("done", False, 0), ("done", True, 1), ("interrupted", False, 130), ("SIGTERM", True, 143)])
def test_the_exit_code_of_a_run_says_how_it_ended(stop, suspect, code, tmp_path, monkeypatch):
    saved = []
    t = SimpleNamespace(
        state=SimpleNamespace(stop=stop, suspect=suspect), accelerator=None, save_lora=saved.append,
        config=SimpleNamespace(train=SimpleNamespace(output_dir=str(tmp_path))))

    def fit():
        return t
    t.fit = fit
    monkeypatch.setattr(cli, "_trainer", lambda a: t)
    assert main(["train", "preset=tiny"]) == code and saved == [tmp_path/"lora"]


@pytest.mark.parametrize("skipped, code", [(0, 0), (2, 0), (3, 1)])
def test_precompute_fails_if_no_sample_could_be_used(skipped, code, monkeypatch):
    report = SimpleNamespace(samples=3, skipped=["x"] * skipped)
    t = SimpleNamespace(cache_embeddings=lambda *a: report)
    monkeypatch.setattr(cli, "_trainer", lambda a: t)
    assert main(["precompute", "preset=tiny"]) == code


@pytest.mark.parametrize("level, code", [("ok", 0), ("warning", 0), ("error", 1)])
def test_the_exit_code_of_the_doctor_is_that_of_errors(level, code, monkeypatch, capsys):
    report = SimpleNamespace(of=lambda asked: ["a finding"] * (asked == level))
    monkeypatch.setattr("qie_nb.planning.doctor.doctor", lambda config: report)
    assert main(["doctor"]) == code


def test_an_edit_has_the_size_and_the_numbers_that_were_typed(tmp_path, monkeypatch, capsys):
    import numpy as np
    from PIL import Image
    from qie_nb.trainer import QwenImageEditTrainer
    given = []
    def predict(*a, **kw):
        given.append(inspect.signature(QwenImageEditTrainer.predict).bind(None, *a, **kw).arguments)
        return np.zeros((64, 96, 3), np.uint8)
    monkeypatch.setattr(cli, "_trainer", lambda a: SimpleNamespace(predict=predict))
    out = tmp_path/"edited.png"
    line = f"predict --image {tmp_path}/a.png --out {out} --width 96 --height 64"
    numbers = "--steps 8 --cfg 3 --seed 5"
    assert main([*line.split(), *numbers.split(), "--prompt", "make it old",
                 "--negative-prompt", "blur"]) == 0
    expected = dict(width=96, height=64, num_inference_steps=8, true_cfg_scale=3., seed=5,
                    prompt="make it old", negative_prompt="blur")
    assert expected.items() <= given[0].items()
    assert Image.open(out).size == (96, 64)
    assert capsys.readouterr().out == f"{out}: 96x64\n"
