"""Folders that really cannot be written, as attached ones cannot: a run is resumed from one and writes elsewhere; one that must be written is refused at once."""
import pytest

from faults import NotRun, Tally, in_own_mounts, mount
from qie_nb.trainer import QwenImageEditTrainer
from test_main_job import StopAt, adapters_equal, settings


def read_only(folder):
    mount("--bind", folder, folder)
    mount("-o", "remount,ro,bind", folder)


def in_mounts(tmp_path, job):
    "Runs `job` where it may mount; the test fails with what it failed with."
    tally = Tally("read-only")
    def once(trial):
        with trial("once"): job()
    try: in_own_mounts(tmp_path, once, tally)
    except NotRun as e: pytest.skip(str(e))
    assert not tally.failed and tally.passed == 1, tally.failed


def test_a_run_goes_on_from_a_folder_that_cannot_be_written(pairs, tmp_path):
    root = pairs(((48, 32),) * 4)

    def make(out, *callbacks, **train): return QwenImageEditTrainer(settings(root, tmp_path, data=dict(batch_size=1), train=dict(output_dir=str(tmp_path/out), save_steps=3, ema_decay=0.9) | train), callbacks)
    whole = make("whole").fit()
    make("input", StopAt(5)).fit()
    before = {p: p.read_bytes() for p in (tmp_path/"input").rglob("*") if p.is_file()}

    def job():
        read_only(tmp_path/"input")
        with pytest.raises(OSError): (tmp_path/"input"/"x").write_text("")
        again = make("work", resume_checkpoint=str(tmp_path/"input"/"checkpoints"/"latest")).fit()
        assert again.global_step == 8 and adapters_equal(whole, again)
        assert (tmp_path/"work"/"checkpoints"/"latest").is_file()
        rows = [line.split(",")[1:6] for d in ("work", "whole") for f in (tmp_path/d/"checkpoints"/"logs").glob("*.csv") for line in f.read_text().splitlines()]
        assert rows[:len(rows) // 2] == rows[len(rows) // 2:] and len(rows) == 18, "the log has come along"
    in_mounts(tmp_path, job)
    assert before == {p: p.read_bytes() for p in (tmp_path/"input").rglob("*") if p.is_file()}


def test_an_output_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(pairs, tmp_path, built):
    root = pairs(((48, 32),) * 2)
    QwenImageEditTrainer(settings(root, tmp_path)).cache_embeddings()
    (tmp_path/"out").mkdir()
    built.clear()

    def job():
        read_only(tmp_path/"out")
        with pytest.raises(ValueError, match=r"`train.output_dir` '.*out' cannot be written \(Read-only file system\); set it to a folder that can"):
            QwenImageEditTrainer(settings(root, tmp_path, train=dict(output_dir=str(tmp_path/"out")))).fit()
        assert not built
    in_mounts(tmp_path, job)


def test_a_torn_step_goes_back_to_the_folder_the_run_came_from(pairs, tmp_path, monkeypatch):
    root = pairs(((48, 32),) * 4)

    def make(out, *callbacks, **train): return QwenImageEditTrainer(settings(root, tmp_path, data=dict(batch_size=1), train=dict(output_dir=str(tmp_path/out), save_interval=50) | train), callbacks)
    whole = make("whole").fit()
    make("input", StopAt(5)).fit()
    again, real = make("work", resume_checkpoint=str(tmp_path/"input"/"checkpoints"/"latest")), QwenImageEditTrainer.change

    def torn(self, ok):
        real(self, ok)
        if self.global_step == 6: raise KeyboardInterrupt # as a second Ctrl-C does
    monkeypatch.setattr(QwenImageEditTrainer, "change", torn)
    assert again.fit().global_step == 6 and not again.state.whole
    monkeypatch.undo()
    assert again.fit().global_step == 8 and adapters_equal(whole, again)
