"""Read-only mounts: a run resumes from one and writes elsewhere; a run that must write to one is refused at once."""
import json, os, subprocess, sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers import PATIENCE, StopAt, adapters_equal, settings
from qie_nb.trainer import QwenImageEditTrainer
from trials import NotRun, mount_read_only, own_mounts

pytestmark = [pytest.mark.mounts, pytest.mark.slow]
REFUSED = 77 # exit code of a child that may not mount


def job(name, folder, *args):
    "Run a function of this file in another process, in which `folder` is read-only."
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run([sys.executable, __file__, name, str(folder), json.dumps(args)], env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=paths),
                         capture_output=True, text=True, timeout=PATIENCE)
    if run.returncode == REFUSED: pytest.skip(f"mounting is not permitted here ({run.stderr.strip()[-200:]})")
    assert run.returncode == 0, run.stderr[-2000:]


def goes_on(config):
    trainer = QwenImageEditTrainer(config).fit()
    assert trainer.global_step == 8
    trainer.save_lora(Path(config["train"]["output_dir"])/"lora")


def is_refused(config):
    trainer = QwenImageEditTrainer(config)
    with pytest.raises(ValueError, match=r"`train.output_dir` '.*out' cannot be written \(Read-only file system\); set it to a writable"): trainer.fit()
    assert not trainer.components.built


@pytest.fixture
def runs(pairs, tmp_path): # a function that makes configurations, and a whole run; another stopped in the folder `input`
    root = pairs(((48, 32),) * 4)
    def config(out, **train):
        return settings(root, tmp_path, data=dict(batch_size=1), train=dict(output_dir=str(tmp_path/out), save_interval=50, ema_decay=0.9) | train)
    whole = QwenImageEditTrainer(config("whole")).fit()
    QwenImageEditTrainer(config("input"), [StopAt(5)]).fit()
    return config, whole


def test_a_run_goes_on_from_a_folder_that_cannot_be_written(runs, tmp_path):
    config, whole = runs
    contents = lambda: {p: p.read_bytes() for p in (tmp_path/"input").rglob("*") if p.is_file()}
    before = contents()
    job("goes_on", tmp_path/"input", config("work", resume_checkpoint=str(tmp_path/"input"/"checkpoints"/"latest")))
    whole.save_lora(tmp_path/"whole"/"lora")
    a, b = (load_file(tmp_path/d/"lora"/"pytorch_lora_weights.safetensors") for d in ("whole", "work"))
    assert a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a) and (tmp_path/"work"/"checkpoints"/"latest").is_file()
    rows = [[line.split(",")[1:6] for f in (tmp_path/d/"checkpoints"/"logs").glob("*.csv") for line in f.read_text().splitlines()] for d in ("whole", "work")]
    assert rows[0] == rows[1] and len(rows[0]) == 9, "the log has come along"
    assert before == contents()


def test_an_output_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(pairs, tmp_path):
    config = settings(pairs(((48, 32),) * 2), tmp_path, train=dict(output_dir=str(tmp_path/"out")))
    QwenImageEditTrainer(config).cache_embeddings()
    (tmp_path/"out").mkdir()
    job("is_refused", tmp_path/"out", config)


def test_a_torn_step_goes_back_to_the_folder_the_run_came_from(runs, tmp_path, monkeypatch):
    config, whole = runs
    again, real = QwenImageEditTrainer(config("work", resume_checkpoint=str(tmp_path/"input"/"checkpoints"/"latest"))), QwenImageEditTrainer.apply_update
    def torn(self, ok):
        real(self, ok)
        if self.global_step == 6: raise KeyboardInterrupt # as a second Ctrl-C does
    monkeypatch.setattr(QwenImageEditTrainer, "apply_update", torn)
    assert again.fit().global_step == 6 and not again.state.whole
    monkeypatch.undo()
    assert again.fit().global_step == 8 and adapters_equal(whole, again)


if __name__ == "__main__":
    try: own_mounts(), mount_read_only(sys.argv[2], sys.argv[2])
    except NotRun as e: print(e, file=sys.stderr); sys.exit(REFUSED)
    globals()[sys.argv[1]](*json.loads(sys.argv[3]))
