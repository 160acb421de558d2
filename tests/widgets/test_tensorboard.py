"The view that show_tensorboard chooses in each environment, and the content of figures and event files."
import importlib.util, os, shlex, sys
from types import SimpleNamespace

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

import qie_nb.widgets.tensorboard as events
from qie_nb.widgets.tensorboard import plot_events, read_run, run_folders, running_mean
from qie_nb.logging import read_events, show_tensorboard

@pytest.fixture
def simulated(monkeypatch):
    "Makes this process look like a notebook in the named environment."
    def make(name):
        import IPython
        # IPython replaces what looks like a variable in a line, and calls a magic that was found with the line as it is
        shell = SimpleNamespace(ran=[], kernel=SimpleNamespace(_allow_stdin=name != "nbconvert"), find_line_magic=lambda name: lambda line: shell.ran.append((name, line)),
                                run_line_magic=lambda name, line: shell.ran.append((name, line.replace("$HOME", "/home/me"))))
        for k in ("KAGGLE_KERNEL_RUN_TYPE", "JUPYTERHUB_SERVICE_PREFIX", "TENSORBOARD_PROXY_URL", "JPY_PARENT_PID"): monkeypatch.delenv(k, raising=False)
        monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
        monkeypatch.setattr(IPython, "get_ipython", lambda: None if name == "script" else shell)
        monkeypatch.setattr(events, "has_server_proxy", lambda: "with a proxy" in name)
        monkeypatch.setattr(events, "tensorboard_program", lambda: "" if "without the program" in name else "tensorboard")
        if "Kaggle" in name: monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
        if "Colab" in name: monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
        if "JupyterHub" in name: monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/me/")
        if "by hand" in name: monkeypatch.setenv("TENSORBOARD_PROXY_URL", "https://h/p/%PORT%/")
        return shell
    return make


@pytest.fixture
def runs(tmp_path):
    "Two runs; `a` was resumed at step 31, after it had gone to 40."
    def write(name, steps, value, purge=None):
        with SummaryWriter(tmp_path/"runs"/name, purge_step=purge) as w:
            for s in steps: w.add_scalar("loss", value(s), s)
            w.add_image("training/training_images", np.full((8, 12, 3), s, np.uint8), s, dataformats="HWC")
            w.add_text("samples/00_x", "make it &#36;5&#36; &#60;b&#62;", s)
            w.add_image("samples/00_x", np.full((8, 12, 3), 7, np.uint8), s, dataformats="HWC")
    write("b", range(1, 31), lambda s: 2.)
    write("a", range(1, 41), lambda s: 1.)
    first, = (tmp_path/"runs"/"a").iterdir() # files of one second are named by a counter, and 10 sorts before 9
    first.rename(first.with_name(first.name.replace("tfevents.", "tfevents.0")))
    write("a", range(31, 61), lambda s: 3., purge=31)
    return tmp_path/"runs"


@pytest.mark.parametrize("place, view, why", [
    ("Jupyter", "magic", ""), ("Jupyter with a proxy", "magic", ""), ("Jupyter without the program", "figure", "TensorBoard is not installed (pip install tensorboard)"),
    ("Colab", "magic", ""), ("Colab, an address by hand", "magic", ""), ("an address by hand", "proxy", "at https://h/p/%PORT%/"),
    ("Kaggle", "figure", "Kaggle serves no TensorBoard"), ("JupyterHub", "figure", "install jupyter-server-proxy beside"),
    ("JupyterHub with a proxy", "proxy", "at /user/me/proxy/%PORT%/"), ("nbconvert", "figure", "A batch run keeps images"), ("script", "figure", "This is not a notebook")])
def test_view_of_each_environment(place, view, why, simulated, tmp_path, monkeypatch, capsys):
    shell = simulated(place)
    monkeypatch.setattr(events, "plot_events", lambda logdir: "drawn")
    shown, said = show_tensorboard(tmp_path), capsys.readouterr().out
    assert why in said and ("; drawn with matplotlib instead" if view == "figure" else f"If it stays blank, run show_tensorboard({str(tmp_path)!r}, 'figure')") in said
    magics = [("load_ext", "tensorboard"), ("tensorboard", f"--logdir {tmp_path.resolve()}")]
    assert (shown, shell.ran) == (("drawn", []) if view == "figure" else (None, magics))
    if view == "proxy": assert os.environ["TENSORBOARD_PROXY_URL"] == why[3:]


def test_special_characters_reach_the_magic(simulated, tmp_path):
    shell = simulated("Jupyter")
    show_tensorboard(tmp_path/"a {b} $HOME it's")
    assert shlex.split(shell.ran[-1][1]) == ["--logdir", str((tmp_path/"a {b} $HOME it's").resolve())]


def test_proxy_of_another_environment_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jupyter_server_proxy", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not events.has_server_proxy()
    (tmp_path/"jupyter_server_config.d").mkdir()
    (tmp_path/"jupyter_server_config.d"/"jupyter-server-proxy.json").write_text("{}")
    assert events.has_server_proxy()


def test_wrong_folder_and_view(tmp_path):
    (tmp_path/"file").write_text("x")
    with pytest.raises(ValueError, match="is a file; give the folder of `logging.log_dir`"): show_tensorboard(tmp_path/"file")
    with pytest.raises(ValueError, match="`view` must be magic, proxy or figure, got 'html'"): show_tensorboard(tmp_path, "html")


def test_each_run_is_one_curve(runs):
    assert set(run_folders(runs)) == {"a", "b"}
    a = read_run(runs/"a")
    assert a.scalars["loss"] == [(s, 1.) for s in range(1, 31)] + [(s, 3.) for s in range(31, 61)]
    scalars, images = read_events(runs)
    assert set(scalars) == {"a/loss", "b/loss"} and len(scalars["b/loss"]) == 30 and "a/samples/00_x" in images
    assert read_events(runs/"a")[0] == a.scalars
    fig = plot_events(runs)
    lines = {line.get_label(): line for line in fig.axes[0].lines if not line.get_label().startswith("_")}
    assert {n: len(line.get_xdata()) for n, line in lines.items()} == dict(a=60, b=30) and lines["a"].get_color() != lines["b"].get_color()
    assert [t.get_text() for t in fig.axes[0].get_legend().get_texts()] == ["b", "a"]
    titles = [ax.get_title(loc="left") for ax in fig.axes]
    assert "a training/training_images, step 60" in titles and "a samples/00_x, step 60" in titles, "the newest run's last images, with their step"


def test_captions_are_plain_text(runs):
    fig = plot_events(runs)
    below = [ax.xaxis.label for ax in fig.axes if "$5$" in ax.get_xlabel()]
    assert below[0].get_text() == "make it $5$ <b>" and not below[0].get_parse_math()
    assert fig._repr_mimebundle_()["image/jpeg"][:3] == b"\xff\xd8\xff", "small in a saved notebook"


def test_partial_records_are_skipped(runs):
    file = sorted((runs/"a").iterdir())[0] # before `a` was resumed; the notebook cuts a run that was not
    file.write_bytes(file.read_bytes()[:-5])
    assert [s for s, _ in read_run(runs/"a").scalars["loss"]] == list(range(1, 61)) and plot_events(runs).axes


def test_log_scale_and_running_mean(tmp_path):
    with SummaryWriter(tmp_path) as w:
        for s in range(1, 101):
            w.add_scalar("loss", float("nan") if s == 50 else 1 + s % 2, s)
            w.add_scalar("grad_norm", 10. ** (s % 4), s)
            for k, v in dict(held_out_loss=1., held_out_loss_low=.5, held_out_loss_high=2.).items(): w.add_scalar(k, v, s) if s % 25 == 0 else None
    loss, held, grad = plot_events(tmp_path).axes
    assert (loss.get_yscale(), grad.get_yscale()) == ("linear", "log") and len(loss.lines) == 2 and loss.lines[0].get_alpha() < 0.5
    assert abs(loss.lines[1].get_ydata()[60:] - 1.5).max() < 0.2 and held.collections, "the interval is a band"
    assert np.allclose(running_mean([3., 3., float("nan"), 3.]), 3)


def test_newest_runs_are_drawn(tmp_path):
    for n in range(9):
        with SummaryWriter(tmp_path/f"run {n}") as w: w.add_scalar("loss", n, 1)
    fig = plot_events(tmp_path)
    assert len(fig.axes[0].lines) == 6 and fig.get_suptitle() == "the 6 newest of 9 runs"
    assert [line.get_ydata()[0] for line in fig.axes[0].lines] == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("tag, value, drawn", [
    ("drift_shift_px", 1.9, False), ("drift_shift_px", -2.1, True),
    ("drift_scale_percent", 0.9, False), ("drift_scale_percent", 1.1, True), ("loss", 0., True)])
def test_small_drift_is_not_drawn(tag, value, drawn):
    run = events.EventRun({tag: [(1, 0.), (2, value)]})
    assert events.worth_a_curve(tag, {"a": run}) == drawn
    assert not events.worth_a_curve("lr", {"a": run}), "there is none"


def test_program_beside_the_kernels_python(monkeypatch, tmp_path):
    monkeypatch.delenv("TENSORBOARD_BINARY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path/"nothing"))
    monkeypatch.setattr(sys, "executable", str(tmp_path/"python"))
    assert events.tensorboard_program() == ""
    (tmp_path/"tensorboard").write_text("")
    assert events.tensorboard_program() == str(tmp_path/"tensorboard")
    monkeypatch.setenv("TENSORBOARD_BINARY", "mine")
    assert events.tensorboard_program() == "mine"
