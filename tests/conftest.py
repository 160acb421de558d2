"""Data sets made on the spot, runs that several tests read, and a count of the components that are built from disk."""
import collections, gc, json, os, sys
from pathlib import Path

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT") # equal bits on every CPU: before torch loads
HERE = Path(__file__).parent
sys.path[:0] = [str(p) for p in sorted(HERE.iterdir()) if p.is_dir() and p.name[0] not in "._" and p.name != "perturb"] # tests may import from each other
sys.path.append(str(HERE.parent/"benchmarks"))

sys.path.append(str(HERE.parent/"tools"))

import pytest


# files that take longest, the longest first, so that no process is left with one at the end
LONG = """run_processes kaggle notebooks demo startup compile pipelines kernel_processes crashes readme training_memory newcomer
reference precompute quantize step_costs evaluate fsdp cache_faults logging eval_schedule first_gpu kaggle_faults remote_training
placement overfit stopping block_swap main_job single_file""".split()


def pytest_collection_modifyitems(items):
    order = {f"test_{name}": k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


_FILE = [""] # of the test that ran last

def pytest_runtest_logstart(nodeid):
    "Before each file, take what is in memory out of the collector's search, which took four of ten seconds."
    file = nodeid.partition("::")[0]
    if file != _FILE[0]:
        _FILE[0] = file
        gc.collect() # what earlier files left goes first
        gc.freeze()


@pytest.fixture
def pairs(tmp_path):
    from helpers import write_pairs
    return lambda sizes=((48, 32), (32, 48), (40, 40)), **kw: write_pairs(tmp_path/"set", sizes, **kw)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    "A finished run of the tiny 2511 model (`helpers.TrainedRun`): read it, change only copies made by `copy`."
    from helpers import make_trained_run
    return make_trained_run(tmp_path_factory.mktemp("trained_run"))


@pytest.fixture(scope="session")
def executed(tmp_path_factory):
    """A function of a chapter's name (`nbs/index`) that returns the notebook as JSON, with the outputs of a run in a kernel of its own.

    Each chapter is run once for all tests and all processes of pytest. Raises nbclient's CellExecutionError in each test if a cell fails."""
    import outputs
    from filelock import FileLock
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own)/"executed"
    shared.mkdir(exist_ok=True)

    def run(name):
        file = shared/f"{name.replace('/', '_')}.ipynb"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_text(json.dumps(outputs.run(name)))
        return json.loads(file.read_text())
    return run


@pytest.fixture
def encoders_with(monkeypatch):
    "A function of `share_prefix` and `vae_2d`, which trainers' encoders then have."
    from qie_nb.training.run_data import RunData
    real = RunData.encoder

    def use(**switches):
        def encoder(self, *a, **kw):
            out = real(self, *a, **kw)
            vars(out).update(switches)
            return out
        monkeypatch.setattr(RunData, "encoder", encoder)
    return use


@pytest.fixture
def built(monkeypatch):
    "How often each real class was built from disk, counted at `from_pretrained` and at our own streamed loading."
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLForConditionalGeneration
    count = collections.Counter()
    for cls in (AutoencoderKLQwenImage, QwenImageTransformer2DModel, Qwen2_5_VLForConditionalGeneration):
        real = cls.from_pretrained.__func__

        def counted(klass, *a, _real=real, **kw):
            count[klass.__name__] += 1
            return _real(klass, *a, **kw)
        monkeypatch.setattr(cls, "from_pretrained", classmethod(counted))
    from qie_nb.models import components as models
    def streamed(cls, *a, _real=models.load_quantized, **kw):
        count[cls.__name__] += 1
        return _real(cls, *a, **kw)
    monkeypatch.setattr(models, "load_quantized", streamed)
    return count


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call": item.failed = report.failed # for fixtures that keep what was to be seen
    return report


def pytest_terminal_summary(terminalreporter):
    "List skipped tests, so that they are not mistaken for passed ones."
    for r in terminalreporter.stats.get("skipped", []):
        why = r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr)
        terminalreporter.write_line(f"not run: {r.nodeid}: {why.removeprefix('Skipped: ')}")
