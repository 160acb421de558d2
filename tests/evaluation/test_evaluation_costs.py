"""What an evaluation does not do: import matplotlib, or search the whole process for garbage."""
import json, subprocess, sys

import pytest

from helpers import PATIENCE, settings, write_pairs

pytestmark = pytest.mark.slow

RUN = """
import gc, json, sys
from qie_nb.trainer import QwenImageEditTrainer
searches, real = [], gc.collect
def collect(*generation):
    searches.append(trainer.global_step)
    return real(*generation)
trainer = QwenImageEditTrainer(json.loads(sys.argv[1]))
trainer.cache_embeddings()
gc.collect = collect
trainer.fit()
print(json.dumps(dict(searches=searches, matplotlib="matplotlib" in sys.modules)))
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict:
    "A run with six evaluations, each with images."
    folder = tmp_path_factory.mktemp("costs")
    pairs = write_pairs(folder/"set", [(64, 64)] * 6)
    config = settings(pairs, folder, data=dict(batch_size=1), train=dict(
        output_dir=str(folder/"out"), max_train_steps=5, val_fraction=0.3, eval_interval=0,
        eval_steps=1, eval_at_start=True, eval_images=2, eval_num_inference_steps=2))
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(config)], text=True,
                          capture_output=True, timeout=PATIENCE, check=True)
    assert len(list((folder/"out").rglob("grid.jpg"))) == 6, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def test_an_evaluation_does_not_import_matplotlib(counted):
    assert not counted["matplotlib"]


def test_evaluations_do_not_search_for_garbage_again_and_again(counted):
    "The first component that is loaded may leave frames of imports, which is one search."
    assert len(counted["searches"]) <= 2, counted["searches"]
