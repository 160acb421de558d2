"""One function decides a run without a length.

README, `init`, `plan`, recipes and the notebooks all follow it."""
import ast, json, math, re
from pathlib import Path

import pytest

import session_table
from helpers import write_pairs
from qie_nb.config import load_config_from_yaml, make_config
from qie_nb.core.choice import RunLength
from qie_nb.core.display import duration
from qie_nb.core.presets import first_run, held_out_images, with_preset
from qie_nb.data.dataset import loader
from qie_nb.data.samples import config_samples, split_held_out
from qie_nb.planning import plan as run_plan
from qie_nb.planning.cards import plan, run_of_plan
from qie_nb.planning.first_config import init
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.callbacks import RunState
from qie_nb.training.run_data import keep_older_length
from test_machines import MACHINES

REPO = Path(__file__).parents[2]
PAIRS = 30
LENGTHS = ("max_train_steps", "max_train_samples", "num_epochs")
CARDS = { # {preset: (machine, GPU of `plan`, GPUs of the driver, steps)}
    "rtx4090": ("RTX 4090 with a screen", "RTX 4090", [("NVIDIA GeForce RTX 4090", 23.6)], 500),
    "t4x2": ("2 x T4", "2xT4", [("Tesla T4", 14.6)] * 2, 250),
}


def summary(config, machine, monkeypatch):
    "What the first line of `fit` would say on a machine, from the calls that `fit` makes."
    monkeypatch.setattr(run_plan, "this_machine_facts", lambda: MACHINES[machine])
    config = make_config(config)
    planner = run_plan.Planner(config)
    samples = config_samples(config.data)
    planner.see_pairs(samples)
    training, held = split_held_out(samples, planner.plan.held_out.value, config.train.seed)
    batches = math.ceil(len(training) / config.data.batch_size)
    length = planner.length(batches * config.data.batch_size)
    return run_of_plan(planner.plan, planner.facts, length, batches, len(samples), len(held))


def readme_config(preset, pairs) -> dict:
    "The configuration of README's first cell with the commented line for one's own pairs."
    cells = re.findall("```python\n(.*?)```", (REPO/"README.md").read_text(), re.S)
    cell = next(c for c in cells if "preset=preset" in c)
    line = re.search(r"^# (run, preset, pairs = .*)$", cell, re.M)[1]
    code = re.sub(r"^(from|run,).*\n", "", cell, flags=re.M)
    code = code.replace("trainer = QwenImageEditTrainer(", "config = (")
    names = {}
    exec(line, names)
    assert names["preset"] == "rtx4090"
    names |= dict(preset=preset, pairs=str(pairs))
    exec(code, names)
    return names["config"]


def notebook_config(path, preset, pairs) -> dict:
    "The dict `own` of a notebook."
    for cell in json.loads((REPO/path).read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "own = dict(" in source:
            assigned = [n for n in ast.parse(source).body if isinstance(n, ast.Assign)]
            made = next(n for n in assigned if n.targets[0].id == "own")
            own = eval(compile(ast.Expression(made.value), path, "eval"))
    data = own["data"] | dict(dataset_path=str(pairs), prompt="make it dusk")
    return own | dict(preset=preset, data=data)


@pytest.mark.slow
@pytest.mark.parametrize("preset", CARDS)
def test_thirty_pairs_are_the_same_run_everywhere(preset, tmp_path, monkeypatch):
    machine, gpu, driver, steps = CARDS[preset]
    monkeypatch.chdir(tmp_path)
    pairs = write_pairs(tmp_path/"my_pairs", ((32, 32),) * PAIRS)
    init(pairs, gpus=driver)
    asked = load_config_from_yaml("run.yaml")
    assert asked.preset == preset
    short = dict(preset=preset, data=dict(dataset_path=str(pairs)))
    kaggle = notebook_config("kaggle/train/train.ipynb", preset, pairs)
    colab = notebook_config("kaggle/colab.ipynb", preset, pairs)
    said = { # a `PlannedRun` each
        "README": summary(readme_config(preset, pairs), machine, monkeypatch),
        "init": summary(asked, machine, monkeypatch),
        "a configuration without steps": summary(short, machine, monkeypatch),
        "plan --pairs": plan(gpu=gpu, pairs=PAIRS, config=dict(preset=preset)).summary,
        "plan run.yaml": plan(gpu=gpu, config=asked).summary,
        "Kaggle": summary(kaggle, machine, monkeypatch),
        "Colab": summary(colab, machine, monkeypatch),
    }
    expected = said.pop("README")
    assert expected.steps == steps
    assert expected.samples == 500
    assert expected.held_out == 5
    assert expected.pairs == PAIRS
    for where, run in said.items():
        assert run._replace(seconds=0) == expected._replace(seconds=0), where
        assert run.seconds == pytest.approx(expected.seconds), where
    every = first_run(PAIRS, len(driver)).every
    text = Path("run.yaml").read_text()
    assert f"{steps} steps" in text and "5 of 30 pairs" in text and f"save_steps: {every} " in text
    _, samples, held, _, time = session_table.recipe_row(PAIRS)
    assert (samples, held) == (500, 5) and (preset != "t4x2" or time == duration(expected.seconds))
    printed = str(expected)
    length = rf"{steps} steps \(500 samples, batch 1, \d GPUs?\)"
    where = rf"about {duration(expected.seconds)} on (an RTX 4090|2 x T4)"
    assert re.fullmatch(rf"{length}, {where}; 5 of 30 pairs held out", printed), printed


def test_the_pairs_decide_from_five_hundred_to_two_thousand_samples():
    samples = {n: first_run(n).samples for n in (0, 31, 32, 125, 126)}
    assert samples == {0: 500, 31: 500, 32: 512, 125: 2000, 126: 2000}
    held_out = {n: held_out_images(n) for n in (9, 10, 19, 20, 54, 56)}
    assert held_out == {9: 0, 10: 1, 19: 1, 20: 5, 54: 5, 56: 6}
    assert first_run(30, gpus=2, batch=3).steps == 84, "of six samples"
    every = {gpus: first_run(30, gpus).every for gpus in (1, 2, 8)}
    assert every == {1: 125, 2: 63, 8: 20}, "a quarter of the run, and at least 20 steps"


def test_a_step_has_the_accumulated_batches_of_all_processes(tmp_path, monkeypatch):
    state = RunState(processes=2)
    state.set_lengths(RunLength(samples=500), 30, accumulated=4, batch_size=3)
    assert state.max_steps == 21, "of 2 x 4 x 3 samples"
    state.set_lengths(RunLength(epochs=3), 30, accumulated=4, batch_size=3)
    assert state.max_steps == 12, "an epoch has 30 batches, a step 8 of them"
    pairs = write_pairs(tmp_path/"my_pairs", ((32, 32),) * PAIRS)
    config = dict(preset="t4x2", data=dict(dataset_path=str(pairs), batch_size=3),
                  train=dict(gradient_accumulation_steps=4))
    run = summary(config, CARDS["t4x2"][0], monkeypatch)
    assert str(run).startswith("21 steps (500 samples, batch 3, 4 batches a step, 2 GPUs), ")


@pytest.mark.parametrize("train, length", [
    (dict(), (500, None)),
    (dict(max_train_samples=800), (800, None)),
    (dict(max_train_steps=40), (None, 40)),
    (dict(num_epochs=3), (None, 3 * 25)),
])
def test_a_length_of_the_user_decides(train, length, tmp_path, monkeypatch):
    pairs = write_pairs(tmp_path/"my_pairs", ((32, 32),) * PAIRS)
    runs = []
    for preset, (machine, *_) in CARDS.items():
        config = dict(preset=preset, data=dict(dataset_path=str(pairs)), train=train)
        runs.append(summary(config, machine, monkeypatch))
    one, two = runs
    samples, steps = length
    if samples:
        assert (one.samples, two.samples) == (samples, samples)
        assert (one.steps, two.steps) == (samples, samples // 2)
        return
    assert one.steps == steps
    if "num_epochs" in train:
        assert two.steps == math.ceil(25 / 2) * 3
    else:
        assert two.steps == steps


def test_a_length_of_the_user_wins_over_the_preset():
    assert with_preset(dict(preset="tiny"))["train"]["max_train_steps"] == 150
    for own in (dict(num_epochs=2), dict(max_train_samples=40), dict(max_train_steps=7)):
        made = make_config(dict(preset="tiny", train=own)).train
        lengths = {k: getattr(made, k) for k in LENGTHS}
        assert {k: v for k, v in lengths.items() if v} == own


def test_steps_and_samples_are_not_both_given():
    both = dict(max_train_steps=500, max_train_samples=800)
    with pytest.raises(ValueError) as e:
        make_config(dict(train=both))
    assert str(e.value) == (
        "`train.max_train_steps` 500 and `train.max_train_samples` 800 both say how long the "
        "run is; remove one of them")


def tiny(pairs, folder, **train):
    "A trainer of the tiny model on the CPU."
    run = dict(output_dir=str(folder/"run"), device="cpu", eval_at_start=False, eval_images=0)
    return QwenImageEditTrainer(dict(
        preset="tiny",
        data=dict(dataset_path=str(pairs), image_size=[32, 32], batch_size=2),
        train=run | train,
        cache=dict(cache_dir=str(folder/"cache")),
        logging=dict(log_dir=str(folder/"runs"), report_to="none"),
    ))


@pytest.mark.slow
def test_the_first_line_of_fit_says_how_long_and_what_is_held_out(tmp_path, capsys):
    pairs = write_pairs(tmp_path/"my_pairs", ((32, 32),) * 20)
    trainer = tiny(pairs, tmp_path, max_train_samples=8, gradient_accumulation_steps=2)
    trainer.cache_embeddings()
    capsys.readouterr()
    trainer.fit()
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == ("2 steps (8 samples, batch 2, 2 batches a step, no GPU); "
                     "5 of 20 pairs held out")
    assert trainer.global_step == 2
    assert second.startswith("held out of training, for evaluation: '")
    assert second.endswith("(`train.val_fraction: 0` trains on all pairs)")
    asked = tiny(pairs, tmp_path/"asked", max_train_samples=2, val_fraction=0.25)
    asked.cache_embeddings()
    capsys.readouterr()
    asked.fit(loader(asked.make_loader().dataset, batch_size=1))
    said = capsys.readouterr().out
    assert "held out of training" not in said, "the user knows"
    assert asked.global_step == 2, "two samples by a loader of one each"


def test_a_resumed_run_keeps_what_its_checkpoint_held_out(tmp_path, capsys):
    pairs = write_pairs(tmp_path/"my_pairs", ((32, 32),) * 20)
    trainer = tiny(pairs, tmp_path, max_train_steps=None, num_epochs=None)
    trainer.data.continued = tmp_path
    for was, held in (("auto", 1), (0.0, 0), (0.1, 2), (3, 3)): # auto: of an older version
        run = dict(settings={"train.val_fraction": was})
        state = dict(run=run, config=dict(train=dict(num_epochs=10)))
        (tmp_path/"state.json").write_text(json.dumps(state))
        made = trainer.make_loader()
        assert len(trainer.held_out or ()) == held and len(made.dataset) == 20 - held
        recorded = trainer.checkpoints.make_fingerprint(made)["settings"]["train.val_fraction"]
        assert recorded == was, "else the next session would hold out others"
    assert trainer.config.train.num_epochs == 10, "as the older version's run had it"


def test_a_run_resumed_by_a_call_keeps_what_its_checkpoint_held_out(tmp_path):
    "Without `train.resume_checkpoint`, which names it to the data set otherwise."
    pairs = write_pairs(tmp_path/"my_pairs", ((32, 32),) * 20)
    first = tiny(pairs, tmp_path, max_train_steps=1, val_fraction=0.1)
    first.cache_embeddings()
    first.fit()
    second = tiny(pairs, tmp_path, max_train_steps=2).resume("latest")
    second.make_loader()
    assert second.data.held_out_ids == first.data.held_out_ids and len(second.held_out) == 2


@pytest.mark.parametrize("was, now, epochs", [
    (dict(num_epochs=10, max_train_steps=None), dict(), 10),
    (dict(num_epochs=10), dict(max_train_samples=800), None),
    (dict(num_epochs=10), dict(num_epochs=3), 3),
    (dict(num_epochs=10, max_train_steps=40), dict(), None),
    (dict(num_epochs=None, max_train_samples=None), dict(), None),
])
def test_a_run_of_an_older_version_keeps_its_ten_passes(was, now, epochs):
    train = make_config(dict(train=now)).train
    said = keep_older_length(train, dict(config=dict(train=was)))
    assert train.num_epochs == epochs and bool(said) == (epochs == 10)
