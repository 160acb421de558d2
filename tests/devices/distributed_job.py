"""Run by each process of test_distributed.py: trains with DDP or FSDP2 and saves the LoRA, one run after the other."""
import json, sys
from pathlib import Path

from qie_nb.trainer import QwenImageEditTrainer


def shard(trainer):
    "FSDP2 by hand, because accelerate's plugin replaces it by DDP on a CPU."
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (trainer.setup_accelerator().num_processes,))
    trainer.set_lora()
    for block in trainer.transformer.transformer_blocks: fully_shard(block, mesh=mesh)
    fully_shard(trainer.transformer, mesh=mesh)
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in trainer.transformer.parameters())


def train(config, out, kind):
    "One training, as its own process would do it."
    trainer = QwenImageEditTrainer(config)
    if kind == "fsdp": shard(trainer)
    trainer.fit()
    trainer.save_lora(out)
    if trainer.is_main:
        last = [trainer.global_step, float(trainer.state.loss), trainer.accelerator.num_processes]
        (out/"loss.json").write_text(json.dumps(last))
    trainer.accelerator.wait_for_everyone() # a process that ends too early can crash the others
    return trainer


if __name__ == "__main__":
    for config, out, kind in json.loads(sys.argv[1]): trainer = train(config, Path(out), kind)
    trainer.accelerator.end_training()
