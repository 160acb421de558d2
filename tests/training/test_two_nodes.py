"""Two nodes on loopback with the line of docs/speed.md, one process each, on a CPU with gloo."""
import json, os, re, shlex, socket, subprocess, sys
from pathlib import Path

import pytest
import yaml

from qie_nb.trainer import QwenImageEditTrainer

from helpers import finish, settings
from test_run_processes import same_lora

SITE, ROOT = Path(__file__).parent/"started_processes", Path(__file__).parents[2]


def docs_line() -> str:
    [line] = re.findall(r"^accelerate launch .*--num_machines 2.*$", (ROOT/"docs"/"speed.md").read_text(), re.M)
    return line


@pytest.fixture
def config(pairs, tmp_path):
    "Of 9 pairs in two buckets. eps: with the usual 1e-8 Adam turns the rounding of a tiny gradient into a step."
    root = pairs(((48, 32),) * 7 + ((32, 48),) * 2, caption=[f"make it {'very ' * i}dark" for i in range(9)])
    def made(out, **train):
        return settings(root, tmp_path, data=dict(batch_size=1), optimizer=dict(eps=1e-5), train=dict(output_dir=str(tmp_path/out), save_steps=2) | train)
    return made


def order(folder) -> list: # of each optimizer step: the samples that count in it, of all processes
    ranks = [[json.loads(line)["step"] for line in f.read_text().splitlines() if "step" in line] for f in sorted(folder.glob("*.jsonl"))]
    return [sorted(sum(step, [])) for step in zip(*ranks, strict=True)]


def environment(watched):
    watched.mkdir()
    return os.environ | dict(QIE_NB_WATCHED=str(watched), OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]))


def on_two_nodes(configs, tmp_path, name):
    "Run the line of the docs on each node; a node has its own configuration file."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port, runs = s.getsockname()[1], []
    for rank, c in enumerate(configs):
        (tmp_path/f"{name}_{rank}.yaml").write_text(yaml.safe_dump(c))
    env = environment(tmp_path/name)
    for rank in range(2):
        line = docs_line().replace("--machine_rank 0", f"--machine_rank {rank}").replace("10.0.0.1", "127.0.0.1").replace("29500", str(port))
        words = shlex.split(line.replace("run.yaml", str(tmp_path/f"{name}_{rank}.yaml")))
        assert words[:2] == ["accelerate", "launch"] and words[words.index("--num_processes") + 1] == "2"
        runs.append(subprocess.Popen([sys.executable, "-m", "accelerate.commands.launch", *words[2:]], env=env, cwd=tmp_path, text=True,
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    for r in runs: finish(r)
    return order(tmp_path/name)


def on_one_node(c, tmp_path, name, processes):
    (tmp_path/f"{name}.yaml").write_text(yaml.safe_dump(c))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *torchrun, "-m", "qie_nb.cli", "train", "--config", str(tmp_path/f"{name}.yaml")]
    finish(subprocess.Popen(command, text=True, env=environment(tmp_path/name), cwd=tmp_path,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    return order(tmp_path/name)


@pytest.mark.weekly
@pytest.mark.slow
def test_two_nodes_train_what_one_process_trains_in_the_same_order(config, tmp_path):
    "Only the first node writes, and a run of two nodes continues on one."
    QwenImageEditTrainer(config("cache")).cache_embeddings()
    nodes = on_two_nodes([config("nodes"), config("elsewhere")], tmp_path, "two_nodes")
    here = on_one_node(config("here", gradient_accumulation_steps=2), tmp_path, "one", 1)
    both = on_one_node(config("both"), tmp_path, "one_node", 2)
    assert nodes == here == both and len(nodes) == 10
    assert sorted(sum(nodes[:5], [])) == sorted(sum(nodes[5:], [])) and len({*sum(nodes[:5], [])}) == 9, "each epoch has each sample once"
    same_lora(tmp_path/"nodes"/"lora", tmp_path/"here"/"lora")
    same_lora(tmp_path/"nodes"/"lora", tmp_path/"both"/"lora")
    assert not list((tmp_path/"elsewhere").rglob("*.safetensors")) and not list((tmp_path/"elsewhere").rglob("*.csv")), "only the first node writes"
    cut = on_two_nodes([config("cut", max_train_steps=6)] * 2, tmp_path, "cut_nodes")
    on_one_node(config("cut", gradient_accumulation_steps=2, resume_checkpoint="latest"), tmp_path, "continued", 1)
    assert cut == nodes[:6] and order(tmp_path/"continued") == nodes[6:]
    same_lora(tmp_path/"cut"/"lora", tmp_path/"here"/"lora")
