"""One run writes to an output folder at a time, and a wrong clock loses no checkpoint."""
import json, multiprocessing, os, shutil, signal, subprocess, sys, threading, time
from pathlib import Path

import pytest

from crash_trials import complete
from helpers import OnStep, StopAt, merged, settings, wait_for, write_pairs
from qie_nb.core import folder_owner
from qie_nb.core.environment import Artifact, Environment, newest_first
from qie_nb.core.folder_owner import OWNER_FILE, FolderInUse, Owner, own_folder, owned_folders, read_owner, this_machine
from qie_nb.tiny.random_models import tiny_folder
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training import checkpoint
from qie_nb.training.checkpoint import complete_checkpoints, find_checkpoint, keep_newest, save_order

ROOT = Path(__file__).parents[2]
def at_step(n, act):
    "A callback that does something after step `n`."
    def acting(t):
        if t.global_step == n: act(t)
    return OnStep(acting)


ELSEWHERE = Owner("another-host boot namespace", 4711, "99", "2026-11-25 20:00:00", "their token", 0, 3)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    "The configuration of a short run whose cache is filled."
    tmp = tmp_path_factory.mktemp("folders")
    root = write_pairs(tmp/"set", ((48, 32),) * 4, caption="invert")
    model = dict(pretrained_model_name_or_path=str(tiny_folder("2511", (64*64, 64*64))), lora=dict(r=2))
    train = dict(max_train_steps=4, save_steps=1, keep_checkpoints=2, gradient_checkpointing=False, val_fraction=0, eval_at_start=False)
    def make(out, **sections):
        own = dict(model=model, data=dict(batch_size=1), train=train | dict(output_dir=str(out)), logging=dict(log_dir=str(out/"runs")))
        return settings(root, tmp, **merged(own, sections))
    QwenImageEditTrainer(make(tmp)).cache_embeddings()
    return make


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(folder_owner, "STANDSTILL", 0.6)
    monkeypatch.setattr(folder_owner, "COPIED", 0.2)
    monkeypatch.setattr(folder_owner, "HEARTBEAT", 0.1)


def held_by(folder, owner) -> Path:
    "The file of an owner, with its inode unless it should be a copy."
    folder.mkdir(parents=True, exist_ok=True)
    path = folder/OWNER_FILE
    path.write_text("x")
    path.write_text(owner._replace(inode=owner.inode or path.stat().st_ino).text())
    return path


# who holds a folder

def test_two_trainers_of_one_process(config, tmp_path):
    first, second = (QwenImageEditTrainer(config(tmp_path)) for _ in range(2))
    refused = []
    def try_second(t):
        with pytest.raises(FolderInUse, match="`train.output_dir` .* in use by another run .*this machine.*shut its kernel down.*choose another"): second.fit()
        refused.append(t.global_step)
    first.callbacks = [at_step(2, try_second)]
    first.fit()
    assert refused == [2] and first.global_step == 4 and not (tmp_path/OWNER_FILE).exists()
    assert steps_of(tmp_path) == [3, 4]


def test_a_folder_of_logs_is_held_too(config, tmp_path):
    with owned_folders({"logging.log_dir": tmp_path/"runs"}), pytest.raises(FolderInUse, match="`logging.log_dir`"):
        QwenImageEditTrainer(config(tmp_path/"other", logging=dict(log_dir=str(tmp_path/"runs")))).fit()


KERNEL = """
import json, sys, time
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.callbacks import Callback
class Slow(Callback):
    def on_step_end(self, t): time.sleep(0.2)
QwenImageEditTrainer(json.loads(sys.argv[1]), [Slow()]).fit()
"""


@pytest.mark.slow
def test_a_second_shell_is_refused_and_goes_on_when_the_first_was_killed(config, tmp_path, capsys):
    made = config(tmp_path, train=dict(max_train_steps=4000))
    first = subprocess.Popen([sys.executable, "-c", KERNEL, json.dumps(made)], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(complete(tmp_path)) > 1, "a checkpoint", process=first)
        second = QwenImageEditTrainer(config(tmp_path, train=dict(resume_checkpoint="latest")))
        with pytest.raises(FolderInUse, match=f"process {first.pid} on this machine"): second.fit()
        assert first.poll() is None and read_owner(tmp_path).pid == first.pid
    finally:
        first.kill()
        first.wait()
    done = json.loads((complete_checkpoints(tmp_path/"checkpoints")[-1]/"state.json").read_text())["global_step"]
    second = QwenImageEditTrainer(config(tmp_path, train=dict(resume_checkpoint="latest", max_train_steps=done + 2))).fit()
    assert second.global_step == done + 2
    assert f"has ended without a word (process {first.pid}" in capsys.readouterr().out


@pytest.mark.slow
def test_another_machine_is_heard_by_its_heartbeat_alone(tmp_path, impatient, monkeypatch, capsys):
    path, stop = held_by(tmp_path, ELSEWHERE), threading.Event()
    def beat():
        for n in range(4, 1000):
            if stop.wait(0.05):
                return
            with open(path, "r+") as f: # as `FolderOwner.beat` does: the file is never empty
                f.write(ELSEWHERE._replace(inode=path.stat().st_ino, beats=n).text())
    monkeypatch.setattr(folder_owner, "STANDSTILL", 60.) # a busy machine may beat late
    other = threading.Thread(target=beat)
    other.start()
    try:
        with pytest.raises(FolderInUse, match="process 4711 on 'another-host'"): own_folder(tmp_path, "train.output_dir")
    finally:
        stop.set()
        other.join()
    assert "waiting up to" in capsys.readouterr().out
    monkeypatch.setattr(folder_owner, "STANDSTILL", 0.6)
    mine = own_folder(tmp_path, "train.output_dir") # it stands still now
    assert read_owner(tmp_path).pid == os.getpid()
    mine.release()
    assert "going on" in capsys.readouterr().out


def test_a_file_in_the_middle_of_a_write_is_no_sign_of_death(tmp_path, monkeypatch):
    path, slept = held_by(tmp_path, ELSEWHERE), []
    owner = read_owner(tmp_path)
    def sleep(seconds):
        slept.append(seconds)
        path.write_text("" if len(slept) < 3 else owner._replace(beats=owner.beats + 1).text())
    monkeypatch.setattr(folder_owner.time, "sleep", sleep)
    assert folder_owner.is_alive(tmp_path, owner)
    assert len(slept) == 3


def test_no_clock_is_compared(tmp_path, impatient, monkeypatch):
    "Two minutes are counted by the reader's own sleeps: a clock that jumps a day neither ends nor prolongs them."
    slept = []
    def sleep(seconds):
        slept.append(seconds)
        now[0] += 86400
    now = [1e9]
    monkeypatch.setattr(folder_owner.time, "time", lambda: now[0])
    monkeypatch.setattr(folder_owner.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(folder_owner.time, "sleep", sleep)
    monkeypatch.setattr(folder_owner, "STANDSTILL", 120.)
    held_by(tmp_path, ELSEWHERE)
    assert not folder_owner.is_alive(tmp_path, read_owner(tmp_path))
    assert sum(slept) == 120


def test_a_copied_folder_waits_only_a_moment(tmp_path, impatient, monkeypatch):
    monkeypatch.setattr(folder_owner, "STANDSTILL", 1e9)
    held_by(tmp_path/"kaggle", ELSEWHERE)
    shutil.copytree(tmp_path/"kaggle", tmp_path/"copy")
    own_folder(tmp_path/"copy", "train.output_dir").release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"machine": 1}', b'{"pid": "x"}', b"[" * 100_000])
def test_a_file_that_is_not_ours_holds_nothing(content, tmp_path):
    (tmp_path/OWNER_FILE).write_bytes(content)
    mine = own_folder(tmp_path, "train.output_dir")
    assert read_owner(tmp_path).pid == os.getpid()
    mine.release()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_not_held(tmp_path, monkeypatch):
    def refuse(*a, **kw): raise PermissionError(13, "Permission denied")
    held_by(tmp_path, ELSEWHERE)
    monkeypatch.setattr("builtins.open", refuse)
    assert own_folder(tmp_path, "train.output_dir") is None


def test_a_process_id_that_was_given_again_is_another_process(tmp_path, impatient):
    held_by(tmp_path, Owner(this_machine(), os.getppid(), "1", "then", "old", 0, 0))
    own_folder(tmp_path, "train.output_dir").release()


def test_of_many_that_find_a_dead_owner_one_takes_the_folder(tmp_path):
    held_by(tmp_path, Owner(this_machine(), 999_999_999, "1", "then", "old", 0, 0))
    taken, refused, start = [], [], threading.Barrier(8)
    def take():
        start.wait()
        try: taken.append(own_folder(tmp_path, "train.output_dir"))
        except FolderInUse: refused.append(1)
    threads = [threading.Thread(target=take) for _ in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(taken) == 1 and len(refused) == 7
    assert read_owner(tmp_path).token == taken[0].owner.token
    taken[0].release()
    assert not list(tmp_path.iterdir())


def test_a_thread_that_reads_the_file_at_once_finds_its_owner_alive(tmp_path, monkeypatch):
    link, found = os.link, []
    def link_and_read(draft, path):
        link(draft, path)
        found.append(folder_owner.is_alive(tmp_path, read_owner(tmp_path)))
    monkeypatch.setattr(folder_owner.os, "link", link_and_read)
    own_folder(tmp_path, "train.output_dir").release()
    assert found == [True]


def test_the_file_of_one_who_came_meanwhile_stays(tmp_path):
    "Two found the same dead owner; the slower one must not remove the faster one's file."
    dead = Owner(this_machine(), 999_999_999, "1", "then", "old", 0, 0)
    held_by(tmp_path, dead)
    with folder_owner._alone_in(tmp_path):
        slower = threading.Thread(target=folder_owner._remove_dead, args=(tmp_path, dead))
        slower.start()
        slower.join(0.2)
        assert slower.is_alive() and read_owner(tmp_path).token == "old" # it waits for its turn
        held_by(tmp_path, dead._replace(token="new"))
    slower.join()
    assert read_owner(tmp_path).token == "new"


@pytest.mark.parametrize("missing", ["links", "locks", "both"])
def test_file_systems_without_links_or_locks(missing, tmp_path, monkeypatch):
    def refuse(*a): raise OSError(95, "Operation not supported")
    if missing in ("links", "both"): monkeypatch.setattr(folder_owner.os, "link", refuse)
    if missing in ("locks", "both"): monkeypatch.setattr(folder_owner.fcntl, "flock", refuse)
    held_by(tmp_path, Owner(this_machine(), 999_999_999, "1", "then", "old", 0, 0))
    mine = own_folder(tmp_path, "train.output_dir")
    with pytest.raises(FolderInUse): own_folder(tmp_path, "train.output_dir")
    mine.release()
    assert not list(tmp_path.iterdir())


def test_a_run_whose_folder_was_taken_writes_no_more(config, tmp_path, impatient):
    def taken(t):
        held_by(tmp_path, ELSEWHERE)
        wait_for(lambda: t.checkpoints.owners[0].lost, "the next heartbeat")
    t = QwenImageEditTrainer(config(tmp_path), [at_step(2, taken)])
    with pytest.raises(ValueError, match="another run has taken .* while this one stood still"): t.fit()
    assert read_owner(tmp_path).token == ELSEWHERE.token, "it is not ours to remove"
    assert "step_00000003" not in {d.name for d in complete(tmp_path)}


def test_a_run_that_stops_leaves_the_folder(config, tmp_path):
    t = QwenImageEditTrainer(config(tmp_path), [StopAt(2)]).fit()
    assert not list(tmp_path.rglob(f"{OWNER_FILE}*"))
    with owned_folders({"train.output_dir": tmp_path}), pytest.raises(FolderInUse): t.fit()
    assert t.fit().global_step == 4


# clocks

DAY = 86400.


def steps_of(out): return [json.loads((d/"state.json").read_text())["global_step"] for d in complete_checkpoints(out/"checkpoints")]


@pytest.mark.slow
@pytest.mark.parametrize("jump", [-DAY, DAY, -40 * 365 * DAY], ids=["a day behind", "a day ahead", "1986"])
def test_a_second_session_with_another_clock_keeps_its_checkpoints(jump, config, tmp_path, monkeypatch):
    QwenImageEditTrainer(config(tmp_path)).fit()
    real = time.time
    with monkeypatch.context() as m:
        m.setattr(time, "time", lambda: real() + jump)
        QwenImageEditTrainer(config(tmp_path, train=dict(max_train_steps=7, resume_checkpoint="latest"))).fit()
    assert steps_of(tmp_path) == [6, 7]
    third = QwenImageEditTrainer(config(tmp_path, train=dict(max_train_steps=9, resume_checkpoint="latest")))
    begun = []
    third.callbacks = [at_step(8, lambda t: begun.append(t.global_step))]
    third.fit()
    assert begun == [8] and steps_of(tmp_path) == [8, 9]


def test_a_clock_that_jumps_during_a_run_loses_nothing(config, tmp_path, monkeypatch):
    real, offset = time.time, [0.]
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])
    def jump(t): offset[0] -= DAY
    t = QwenImageEditTrainer(config(tmp_path, train=dict(max_train_steps=6, max_hours=1.)), [at_step(3, jump)]).fit()
    assert t.global_step == 6 and steps_of(tmp_path) == [5, 6]
    def ahead(t): offset[0] += 2 * DAY
    t = QwenImageEditTrainer(config(tmp_path, train=dict(max_train_steps=9, max_hours=1., resume_checkpoint="latest")), [at_step(7, ahead)]).fit()
    assert t.global_step == 9 and steps_of(tmp_path) == [8, 9], "max_hours counts hours of work, not of the clock"


def test_who_goes_back_keeps_his_new_steps(config, tmp_path):
    QwenImageEditTrainer(config(tmp_path, train=dict(keep_checkpoints=10))).fit()
    back = str(tmp_path/"checkpoints"/"step_00000001")
    QwenImageEditTrainer(config(tmp_path, train=dict(max_train_steps=2, keep_checkpoints=1, resume_checkpoint=back))).fit()
    assert steps_of(tmp_path) == [2] and find_checkpoint("latest", tmp_path/"checkpoints").name == "step_00000002"


def made(root, name, **state):
    folder = root/name
    checkpoint.write_checkpoint(folder, lambda to: (to/"w").write_bytes(b"w"), dict(state={}, param_groups=[]), state)
    return folder


def older(folder, written):
    "As an older version wrote it: without a number."
    state = json.loads((folder/"state.json").read_text())
    del state["saves"]
    (folder/"state.json").write_text(json.dumps(state | dict(written=written)))
    names = [p.name for p in folder.iterdir() if p.name != "COMPLETE"]
    (folder/"COMPLETE").write_text(json.dumps({n: checkpoint.file_digest(folder/n) for n in names}))


def test_checkpoints_without_a_number_come_first_by_time(tmp_path):
    for n, when in ((1, 300.), (2, 100.), (3, 200.)): older(made(tmp_path, f"step_{n}", global_step=n), when)
    made(tmp_path, "step_4", global_step=4)
    assert [d.name for d in complete_checkpoints(tmp_path)] == ["step_2", "step_3", "step_1", "step_4"]
    assert save_order(tmp_path/"step_4").saves == 1
    assert keep_newest(tmp_path, 2) and {d.name for d in complete_checkpoints(tmp_path)} == {"step_1", "step_4"}


def test_a_run_that_continues_in_another_folder_goes_on_counting(config, tmp_path):
    QwenImageEditTrainer(config(tmp_path/"a")).fit()
    last = str(complete_checkpoints(tmp_path/"a"/"checkpoints")[-1])
    QwenImageEditTrainer(config(tmp_path/"b", train=dict(max_train_steps=5, resume_checkpoint=last))).fit()
    first, second = (json.loads((complete_checkpoints(tmp_path/f/"checkpoints")[-1]/"state.json").read_text()) for f in "ab")
    assert first["run_id"] == second["run_id"] and (first["saves"], second["saves"]) == (4, 5)


def test_attached_checkpoints_of_one_run_are_ordered_by_their_numbers():
    def point(name, written, run, saves): return Artifact("checkpoint", Path(name), written, "", True, run, saves)
    behind = [point("first", 1000., "r", 1), point("second, a day behind", 10., "r", 2), point("third", 2000., "r", 3)]
    assert [a.path.name for a in newest_first(behind)] == ["third", "second, a day behind", "first"]
    other = [point("long ago", 500., "s", 99), point("version 1", 1500., "", 0)]
    assert [a.path.name for a in newest_first(behind + other)] == ["third", "second, a day behind", "first", "version 1", "long ago"]
