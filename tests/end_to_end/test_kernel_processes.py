"""`fit()` with two started processes in a real Jupyter kernel and under nbclient: what the notebook shows, its interrupt, a process's error, and resume."""
import json, os, re, time
from pathlib import Path
from queue import Empty

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

from helpers import PATIENCE, settings, write_pairs

pytestmark = pytest.mark.slow
SITE, ROOT = Path(__file__).parents[1]/"training"/"started_processes", Path(__file__).parents[2]


def words(html): return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)) # images are attributes


class Notebook:
    "A kernel; `run` executes a cell and returns what it printed or displayed, and its error."
    def __init__(self, **env):
        self.manager, self.client = start_new_kernel(PATIENCE, cwd=str(ROOT), env=os.environ | dict(PYTHONPATH=os.pathsep.join([str(SITE), str(ROOT)])) | env)

    def run(self, code, until=None, timeout=PATIENCE):
        "Interrupts the kernel, as the notebook's stop button does, when `until` has been printed."
        asked, text, error, end = self.client.execute(code), "", None, time.time() + timeout
        while time.time() < end:
            try: message = self.client.get_iopub_msg(timeout=1)
            except Empty: continue
            if message["parent_header"].get("msg_id") != asked: continue
            c = message["content"]
            if message["msg_type"] == "stream": text += c["text"]
            elif message["msg_type"] in ("display_data", "update_display_data", "execute_result"): text += "\n".join(map(str, c["data"].values()))
            elif message["msg_type"] == "error": error = "\n".join([c["ename"], c["evalue"], *c["traceback"]])
            elif message["msg_type"] == "status" and c["execution_state"] == "idle": return text, error
            if until and re.search(until, text): until = self.manager.interrupt_kernel()
        raise TimeoutError(words(text)[-2000:])

    def started(self): return [p for p in psutil.Process(self.manager.provisioner.pid).children(recursive=True) if "started_process" in " ".join(p.cmdline())]

    def close(self): self.client.stop_channels(), self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(tmp_path):
    (tmp_path/"watched").mkdir()
    made = Notebook(QIE_NB_WATCHED=str(tmp_path/"watched"))
    yield made
    made.close()


def begun(notebook, tmp_path):
    "Makes a trainer `t` for two processes in the notebook, and its `config`."
    write_pairs(tmp_path/"set", ((48, 32),) * 6)
    config = settings(tmp_path/"set", tmp_path, data=dict(batch_size=1), train=dict(num_processes=2, num_epochs=1000, max_train_steps=3000, save_steps=2, resume_checkpoint="auto"))
    (tmp_path/"config.json").write_text(json.dumps(config))
    begin = f"""
import json, os
from qie_nb.trainer import QwenImageEditTrainer
config = json.load(open({str(tmp_path/'config.json')!r}))
t = QwenImageEditTrainer(config)
"""
    assert notebook.run(begin)[1] is None


def interrupted(notebook) -> int: # the step at which it ended
    "Runs `fit` and interrupts the kernel after the first steps."
    text, error = notebook.run("t.fit()", until=r"step [1-9]\d* of 3000")
    assert error is None and "training in 2 processes" in text and "training panel: step" in text and not notebook.started(), words(text)[-2000:]
    text, error = notebook.run("print('at', t.global_step, t.state.running, t.state.processes)")
    at = int(re.search(r"at (\d+) False", text)[1])
    assert error is None and at > 0
    return at


def saves_its_adapter(notebook, lora):
    "The notebook's trainer has the adapter of the run and writes its file."
    code = f"print(sorted(t.transformer.peft_config), t.save_lora({str(lora)!r}))"
    text, error = notebook.run(code)
    assert error is None and "['default']" in text
    assert (lora/"pytorch_lora_weights.safetensors").is_file()


def test_interrupt_saves_and_the_adapter_is_there_afterwards(notebook, tmp_path):
    begun(notebook, tmp_path)
    alone = 'QwenImageEditTrainer(config | dict(train=config["train"] | dict(num_processes=1)))'
    text, error = notebook.run(f"{alone}.cache_embeddings()") # else `fit` starts processes for it
    assert error is None, error
    interrupted(notebook)
    saves_its_adapter(notebook, tmp_path/"lora")


@pytest.mark.weekly
def test_interrupt_error_resume_and_the_adapter_afterwards(notebook, tmp_path):
    "The first `fit` also fills the cache, with processes of its own."
    begun(notebook, tmp_path)
    at = interrupted(notebook)
    text, error = notebook.run("t.config.train.max_train_steps = t.global_step + 6\n"
                               "os.environ['QIE_NB_FAULT'] = '1 3'")
    assert error is None
    text, error = notebook.run("t.fit()")
    assert "process 2 of 2 stopped with ZeroDivisionError: a fault of the test. The checkpoints are intact; fit() continues from step_" in error and not notebook.started()
    text, error = notebook.run("del os.environ['QIE_NB_FAULT']; t.fit(); print('at', t.global_step, t.state.stop)")
    assert error is None and f"at {at + 6} done" in text, (at, error, words(text)[-2000:])
    saves_its_adapter(notebook, tmp_path/"lora")

    text, error = notebook.run("t = QwenImageEditTrainer(config); t.config.train.max_train_steps = %d; t.fit(); print('at', t.global_step, t.state.stop)" % (at + 8))
    assert error is None and f"at {at + 8} done" in text and not notebook.started(), (error, words(text)[-2000:])


@pytest.mark.weekly
def test_nbclient_runs_the_notebook(tmp_path):
    "As Kaggle's batch runs and `jupyter nbconvert --execute` do; the second notebook continues."
    import nbformat
    from nbclient import NotebookClient
    write_pairs(tmp_path/"set", ((48, 32),) * 6)
    config = settings(tmp_path/"set", tmp_path, data=dict(batch_size=1), train=dict(num_processes=2, num_epochs=100, max_train_steps=4, save_steps=2, resume_checkpoint="auto"))
    def shown(steps):
        config["train"]["max_train_steps"] = steps
        cells = [f"from qie_nb.trainer import QwenImageEditTrainer\nt = QwenImageEditTrainer({config!r})", "t.fit();", f"t.save_lora({str(tmp_path/'lora')!r})",
                 "print('at', t.global_step, t.state.stop, t.optimizer is None, sorted(t.transformer.peft_config))"]
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        NotebookClient(notebook, timeout=PATIENCE, startup_timeout=PATIENCE, kernel_name="python3", resources=dict(metadata=dict(path=str(ROOT)))).execute()
        return "\n".join(words("".join(o["text"] if "text" in o else o["data"].get("text/html", ""))) for c in notebook.cells for o in c.outputs)
    text = shown(4)
    assert "training in 2 processes, 2 samples a step" in text and "train 4/4" in text and "at 4 done True ['default']" in text, text[-2000:]
    text = shown(7)
    assert "trained 3 steps" in text and "7 in total: done" in text and "at 7 done" in text, text[-2000:]
    assert (tmp_path/"lora"/"pytorch_lora_weights.safetensors").is_file()
