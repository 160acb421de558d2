"""Two ranks as two threads come to the same collectives, whatever one of them alone knows (a signal, a click)."""

import threading

import pytest
import torch

from helpers import settings, slow_except, write_pairs
from qie_nb.trainer import QwenImageEditTrainer
from qie_nb.training.callbacks import Callback

PATIENCE = 120 # seconds until a rank that waits alone gives up
SIZES = [(96, 64)] * 6


class Meeting:
    "Where two ranks exchange values; notes what each of them came for."

    def __init__(self):
        self.calls = [[], []] # of each rank: names of its collectives
        self.values = [None, None]
        self.barrier = threading.Barrier(2, timeout=PATIENCE)
        self.ranks = {} # {thread: rank}
        self.turn = (
            threading.Lock()
        ) # torch's and transformers' contexts are not made for threads: one runs at a time

    @property
    def rank(self) -> int:
        "The rank of the thread that asks."
        return self.ranks[threading.get_ident()]

    def exchange(self, name, value=None) -> list: # of both ranks
        "Wait for the other rank. Raises if it comes for something else, or not at all."
        rank = self.rank
        self.calls[rank].append(name)
        self.values[rank] = name, value
        self.turn.release()
        try:
            self.barrier.wait()
            names, values = zip(*self.values)
            self.barrier.wait() # both have read
        finally:
            self.turn.acquire()
        assert len(set(names)) == 1, f"the ranks met for {' and '.join(names)}"
        return list(values)


class FakeAccelerator:
    "What the library uses of accelerate's, for one of two threads."

    num_processes = 2
    device = torch.device("cpu")
    distributed_type = type("Kind", (), {"value": "MULTI_CPU"})

    def __init__(self, meeting):
        self.meeting = meeting
        self.process_index = meeting.rank
        self.is_main_process = self.process_index == 0

    def reduce(self, tensor, how):
        total = sum(self.meeting.exchange("reduce", tensor.detach().clone()))
        return total / 2 if how == "mean" else total

    def no_sync(self, model):
        from contextlib import nullcontext

        return nullcontext()

    def prepare(self, model):
        return model

    def wait_for_everyone(self):
        self.meeting.exchange("wait")


@pytest.fixture
def meeting(monkeypatch):
    here = Meeting()
    monkeypatch.setattr("torch.distributed.new_group", lambda **kw: None)

    def all_reduce(tensor, group=None):
        tensor.copy_(sum(here.exchange("share?", tensor.clone())))

    def all_gather_object(found, value, group=None):
        found[:] = here.exchange("share", value)

    def setup(trainer):
        trainer.accelerator = trainer.accelerator or FakeAccelerator(here)
        trainer.state.process, trainer.state.processes = here.rank, 2
        return trainer.accelerator

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    monkeypatch.setattr("torch.distributed.all_gather_object", all_gather_object)
    monkeypatch.setattr(QwenImageEditTrainer, "setup_accelerator", setup)
    return here


class AskAt(Callback):
    "Asks its own rank alone to stop, or for images, at one moment."

    def __init__(self, moment, rank, ask):
        self.moment, self.rank, self.ask = moment, rank, ask

    def act(self, t, moment):
        if moment == self.moment and t.accelerator.process_index == self.rank:
            self.ask(t.state)

    def prepare(self, t):
        self.act(t, "loading")

    def watch(self, t):
        "Ask in the middle of a step, before the callbacks hear of it, as a signal does."
        real = t.optimizer_step

        def step(group):
            real(group)
            self.act(t, t.global_step + 1)

        t.optimizer_step = step


def stop(state):
    state.stop = "interrupted"


def images(state):
    state.sample_now = True


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    "A data set, with its cache filled."
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder / "set", SIZES)
    trainer_of(folder).cache_embeddings()
    return folder


def trainer_of(root, out="out", **train) -> QwenImageEditTrainer:
    "Evaluates before the first step and every second one."
    train = (
        dict(
            output_dir=str(root / out),
            max_train_steps=4,
            eval_at_start=True,
            eval_steps=2,
            eval_interval=0,
            val_fraction=0.2,
            eval_num_inference_steps=2,
            save_steps=2,
            num_processes=1,
        )
        | train
    )
    return QwenImageEditTrainer(settings(root / "set", root, train=train, cache=dict(cache_dir=str(root / "cache"))))


def fit_both(meeting, make) -> list: # trainers of both ranks
    "Run `fit` in two threads; raises the first error of either."
    trainers, errors = [None, None], []

    def work(rank):
        meeting.ranks[threading.get_ident()] = rank
        try:
            with meeting.turn:
                trainers[rank] = make(rank)
                trainers[rank].fit()
        except BaseException as e:
            errors.append(e)
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return trainers


MOMENTS = [("loading", stop), (1, stop), (2, stop), (3, stop), (4, stop), (1, images), (2, images)]
EVERYDAY = [("loading", stop, 0), (2, stop, 1), (1, images, 1)]
CASES = slow_except(EVERYDAY, [(*moment, rank) for moment in MOMENTS for rank in (0, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("moment, ask, rank", CASES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_both_ranks_come_to_the_same_collectives(moment, ask, rank, root, meeting, tmp_path):
    def make(own):
        t = trainer_of(root, str(tmp_path / f"rank{own}"))
        asks = AskAt(moment, rank, ask)
        asks.watch(t)
        t.callbacks.append(asks)
        return t

    trainers = fit_both(meeting, make)
    assert meeting.calls[0] == meeting.calls[1] and meeting.calls[0]
    assert len({t.global_step for t in trainers}) == 1
    assert all(t.state.stop for t in trainers)
    if ask is stop and moment != 4:
        assert all(t.state.stop == "interrupted" for t in trainers)
