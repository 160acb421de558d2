"The view that show_tensorboard chooses in each environment, and the content of figures and event files."
import io, sys
from types import SimpleNamespace

import numpy as np
import pytest

import qie_nb.widgets.tensorboard as events
from qie_nb.widgets.tensorboard import ViewerEnv, choose_view, plot_events, read_run, run_folders, running_mean
from qie_nb.logging import read_events, show_tensorboard

LIVE = dict(kernel=True, interactive=True)
ENVIRONMENTS = {
    "Jupyter": (ViewerEnv(**LIVE), "magic", "a live notebook"),
    "Colab": (ViewerEnv(**LIVE, colab=True), "magic", "Colab shows it below the cell"),
    "Colab with a proxy's address": (ViewerEnv(**LIVE, colab=True, proxy_url="/x/"), "magic", "Colab"),
    "Kaggle": (ViewerEnv(**LIVE, kaggle="Interactive"), "figure", "Kaggle serves no TensorBoard"),
    "JupyterHub with jupyter-server-proxy": (ViewerEnv(**LIVE, hub="/user/me/", server_proxy=True), "proxy", "jupyter-server-proxy serves it at /user/me/proxy/%PORT%/"),
    "JupyterHub without": (ViewerEnv(**LIVE, hub="/user/me/"), "figure", "install jupyter-server-proxy beside"),
    "an address by hand": (ViewerEnv(**LIVE, proxy_url="https://h/p/%PORT%/"), "proxy", "TENSORBOARD_PROXY_URL is https://h/p/%PORT%/"),
    "a proxy whose server cannot be told": (ViewerEnv(**LIVE, server_proxy=True), "magic", "a live notebook"),
    "nbconvert": (ViewerEnv(kernel=True), "figure", "batch job"),
    "a script": (ViewerEnv(), "figure", "this is not a notebook"),
    "Jupyter without the program": (ViewerEnv(**LIVE, program=False), "figure", "there is no tensorboard program"),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_view_of_each_environment(name):
    env, view, why = ENVIRONMENTS[name]
    got = choose_view(env)
    assert got[0] == view and why in got[1], got


class Shell:
    "The parts of IPython's shell that are used; records the magics."
    def __init__(self): self.ran, self.kernel = [], SimpleNamespace(_allow_stdin=True)
    def run_line_magic(self, name, line): self.ran.append((name, line.replace("$HOME", "/home/me"))) # it replaces what looks like a variable
    def find_line_magic(self, name): return lambda line: self.ran.append((name, line))


@pytest.fixture
def simulated(monkeypatch, tmp_path):
    "Makes this process look like a notebook in the named environment."
    def make(name):
        import IPython
        shell = Shell()
        for k in ("KAGGLE_KERNEL_RUN_TYPE", "JUPYTERHUB_SERVICE_PREFIX", "TENSORBOARD_PROXY_URL", "JPY_PARENT_PID"): monkeypatch.delenv(k, raising=False)
        monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
        monkeypatch.setattr(IPython, "get_ipython", lambda: None if name == "script" else shell)
        monkeypatch.setattr(events, "has_server_proxy", lambda: name == "JupyterHub")
        if name == "Kaggle": monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
        if name == "Colab": monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
        if name == "JupyterHub": monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/me/")
        if name == "nbconvert": shell.kernel._allow_stdin = False
        return shell
    return make


@pytest.fixture
def runs(tmp_path):
    "Two runs; `a` was resumed at step 31, after it had gone to 40."
    from torch.utils.tensorboard import SummaryWriter
    def write(name, steps, value, purge=None):
        with SummaryWriter(tmp_path/"runs"/name, purge_step=purge) as w:
            for s in steps: w.add_scalar("loss", value(s), s)
            w.add_image("training/training_images", np.full((8, 12, 3), s, np.uint8), s, dataformats="HWC")
            w.add_text("samples/00_x", "make it &#36;5&#36; &#60;b&#62;", s)
            w.add_image("samples/00_x", np.full((8, 12, 3), 7, np.uint8), s, dataformats="HWC")
    write("b", range(1, 31), lambda s: 2.)
    write("a", range(1, 41), lambda s: 1.)
    write("a", range(31, 61), lambda s: 3., purge=31)
    return tmp_path/"runs"


@pytest.mark.parametrize("place, view", [("Jupyter", "magic"), ("Colab", "magic"), ("Kaggle", "figure"), ("JupyterHub", "proxy"), ("nbconvert", "figure"), ("script", "figure")])
def test_views_in_simulated_environments(place, view, simulated, runs, capsys):
    import os
    shell = simulated(place)
    shown = show_tensorboard(runs)
    assert capsys.readouterr().out.startswith(f"TensorBoard as {view}: ")
    if view == "figure": assert len(shown.axes) >= 2 and shell.ran == [] and shown._repr_png_()[:4] == b"\x89PNG"
    else: assert shown is None and shell.ran == [("load_ext", "tensorboard"), ("tensorboard", f"--logdir {runs.resolve()}")]
    assert (os.environ.get("TENSORBOARD_PROXY_URL") == "/user/me/proxy/%PORT%/") == (view == "proxy")


def test_special_characters_reach_the_magic(simulated, tmp_path):
    import shlex
    shell = simulated("Jupyter")
    show_tensorboard(tmp_path/"a {b} $HOME it's")
    assert shlex.split(shell.ran[-1][1]) == ["--logdir", str((tmp_path/"a {b} $HOME it's").resolve())]


def test_proxy_of_another_environment_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jupyter_server_proxy", None)
    import importlib.util
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not events.has_server_proxy()
    (tmp_path/"jupyter_server_config.d").mkdir()
    (tmp_path/"jupyter_server_config.d"/"jupyter-server-proxy.json").write_text("{}")
    assert events.has_server_proxy()


@pytest.mark.parametrize("make, error, words", [
    (lambda p: p/"none", FileNotFoundError, "does not exist; give the folder of `logging.log_dir`"),
    (lambda p: (p/"file").write_text("x") and p/"file", ValueError, "is a file; give the folder of `logging.log_dir`"),
    (lambda p: (p/"empty").mkdir() or p/"empty", ValueError, "holds no event files; train with `logging.report_to` tensorboard first")])
def test_wrong_folder(make, error, words, tmp_path):
    with pytest.raises(error, match=words) as e: show_tensorboard(make(tmp_path), "figure")
    assert "\n" not in str(e.value)


def test_wrong_view(tmp_path):
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
    assert set(lines) == {"a", "b"} and lines["a"].get_color() != lines["b"].get_color()
    assert [len(lines[n].get_xdata()) for n in ("a", "b")] == [60, 30]
    assert [t.get_text() for t in fig.axes[0].get_legend().get_texts()] == ["b", "a"]
    titles = [ax.get_title(loc="left") for ax in fig.axes]
    assert "a training/training_images, step 60" in titles and "a samples/00_x, step 60" in titles, "the newest run's last images, with their step"


def test_captions_are_plain_text(runs):
    fig = plot_events(runs)
    below = [ax.xaxis.label for ax in fig.axes if "$5$" in ax.get_xlabel()]
    assert below[0].get_text() == "make it $5$ <b>" and not below[0].get_parse_math()
    fig.savefig(io.BytesIO(), format="png")


@pytest.mark.parametrize("lost", [1, 200])
def test_partial_records_are_skipped(lost, runs):
    file = sorted((runs/"b").iterdir())[0]
    file.write_bytes(file.read_bytes()[:-lost])
    cut = read_run(runs/"b")
    assert cut.scalars["loss"] == [(s, 2.) for s in range(1, 31)] and "samples/00_x" not in cut.images
    assert plot_events(runs).axes


def test_killed_and_resumed_run(runs):
    first = sorted((runs/"a").iterdir())[0]
    first.write_bytes(first.read_bytes()[:-5])
    assert [s for s, _ in read_run(runs/"a").scalars["loss"]] == list(range(1, 61))


def test_log_scale_and_running_mean(tmp_path):
    from torch.utils.tensorboard import SummaryWriter
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
    from torch.utils.tensorboard import SummaryWriter
    for n in range(9):
        with SummaryWriter(tmp_path/f"run {n}") as w: w.add_scalar("loss", n, 1)
    fig = plot_events(tmp_path)
    assert len(fig.axes[0].lines) == 6 and fig.get_suptitle() == "the 6 newest of 9 runs"


def test_program_beside_the_kernels_python(monkeypatch, tmp_path):
    monkeypatch.delenv("TENSORBOARD_BINARY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path/"nothing"))
    monkeypatch.setattr(sys, "executable", str(tmp_path/"python"))
    assert events.tensorboard_program() == "" and not events.viewer_env().program
    (tmp_path/"tensorboard").write_text("")
    assert events.tensorboard_program() == str(tmp_path/"tensorboard") and events.viewer_env().program
    monkeypatch.setenv("TENSORBOARD_BINARY", "mine")
    assert events.tensorboard_program() == "mine"
