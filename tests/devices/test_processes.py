"""The launcher: the environment of each process, and that none is left when one dies. They are stubs without torch."""

import os

import psutil
import pytest

from qie_nb.devices import processes
from qie_nb.devices.processes import Processes, ProcessEnded, environment_of, local_device

STUB = """
import json, os, sys, time
from qie_nb.devices.processes import run_started

def work(job, notebook):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "QIE_NB_TURNS")
    notebook.send(environment={name: os.environ[name] for name in names})
    if notebook.rank == job.get("dies"):
        os._exit(3)
    time.sleep(job.get("sleeps", 0))

def main():
    run_started(work)
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    "Its folder is on the path of the started processes."
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return "stub.main"


@pytest.mark.slow
def test_each_process_has_a_rank_and_a_gpu_of_its_own(stub):
    with Processes(stub, {}, 2) as both:
        told = {event[0]: event[1]["environment"] for event in both.events() if event}
    assert [told[rank]["RANK"] for rank in (0, 1)] == ["0", "1"]
    assert [told[rank]["LOCAL_RANK"] for rank in (0, 1)] == ["0", "1"], "both would train on one GPU"
    assert {env["WORLD_SIZE"] for env in told.values()} == {env["LOCAL_WORLD_SIZE"] for env in told.values()} == {"2"}
    assert told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"] and told[0]["QIE_NB_TURNS"] == told[1]["QIE_NB_TURNS"]


def test_a_worker_of_a_cluster_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = []
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        found.append(str(local_device("auto")))
    assert found == ["cuda:0", "cuda:1"]


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_one_dead_process_ends_the_others_although_they_only_wait(dies, stub, monkeypatch):
    "On a GPU the others would wait in a collective for ever."
    monkeypatch.setattr(processes, "WAIT", 0.5)
    started = []
    with pytest.raises(ProcessEnded, match=f"process {dies + 1} of 2 ended with 3"):
        with Processes(stub, dict(dies=dies, sleeps=3600), 2) as both:
            started = [psutil.Process(p.pid) for p in both.all]
            for heard, _ in enumerate(both.events()): # None ten times a second
                assert heard < 300, "the others are still waited for"
    gone, alive = psutil.wait_procs(started, timeout=10)
    assert not alive


@pytest.mark.parametrize("supported", [True, False])
def test_old_drivers_of_two_rtx_40_get_what_accelerate_asks_for(supported, monkeypatch):
    "accelerate raises NotImplementedError in a process that lacks the variables."
    monkeypatch.setattr("accelerate.utils.check_cuda_p2p_ib_support", lambda: supported)
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    env = environment_of(0, 2, 29500)
    assert [env.get("NCCL_P2P_DISABLE"), env.get("NCCL_IB_DISABLE")] == [None if supported else "1"] * 2
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert environment_of(0, 2, 29500)["NCCL_P2P_DISABLE"] == "0", "the user's own value wins"


def test_a_process_waits_as_long_for_a_message_as_for_a_gradient(monkeypatch):
    "torch's default for another group is half an hour; a process may load that long while the others wait."
    from types import SimpleNamespace

    made = []
    monkeypatch.setattr("torch.distributed.new_group", lambda **kw: made.append(kw))
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, group=None: None)
    monkeypatch.setattr(
        "torch.distributed.all_gather_object", lambda found, text, group=None: found.__setitem__(0, text)
    )
    accelerator = SimpleNamespace(num_processes=2)
    assert processes.broadcast_stop(accelerator, "interrupted") == "interrupted"
    assert made == [dict(backend="gloo", timeout=processes.PATIENCE)]
