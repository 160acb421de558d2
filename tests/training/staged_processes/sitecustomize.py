"""Put before the path of processes that `fit` starts: each says which stage it has come to.

It waits a moment in the stage that a trial asks for.

QIE_NB_STAGES is the folder in which a file is made for each stage; QIE_NB_STAGE is the stage to wait in.
"""
import os
import time
from pathlib import Path

LOADING = "loading"
FIRST_EVALUATION = "first evaluation"
STEPS = "steps"
EVALUATION = "evaluation"
SAVING = "saving"
PAUSE = 1.5 # seconds


def come_to(stage: str):
    "Say it once; wait if a trial wants this stage."
    here = Path(os.environ["QIE_NB_STAGES"]) / f"{stage}.{os.environ['RANK']}"
    if here.exists():
        return
    here.touch()
    if os.environ.get("QIE_NB_STAGE") == stage:
        time.sleep(PAUSE)


def watch_stages():
    "Replace the functions with which the stages begin."
    import torch
    from qie_nb.devices import edit_model
    from qie_nb.evaluation import evaluate
    from qie_nb.training import checkpoint, step

    load, held_out_loss = edit_model.load_component, evaluate.held_out_loss
    loss, write_checkpoint = step.flow_matching_loss, checkpoint.write_checkpoint
    trained = []

    def load_component(folder, name, *args, **kw):
        come_to(LOADING)
        return load(folder, name, *args, **kw)

    def evaluated(trainer, *args, **kw):
        come_to(EVALUATION if trainer.global_step else FIRST_EVALUATION)
        return held_out_loss(trainer, *args, **kw)

    def flow_matching_loss(*args, **kw):
        if torch.is_grad_enabled():
            trained.append(True)
        if len(trained) == 5:
            come_to(STEPS)
        return loss(*args, **kw)

    def written(*args, **kw):
        come_to(SAVING)
        return write_checkpoint(*args, **kw)

    edit_model.load_component = load_component
    evaluate.held_out_loss = evaluated
    step.flow_matching_loss = flow_matching_loss
    checkpoint.write_checkpoint = written


if os.environ.get("RANK") is not None and os.environ.get("QIE_NB_STAGES"):
    watch_stages()
