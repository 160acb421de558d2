"""Run by each process of test_fsdp.py: `fit` as accelerate itself shards it; prints what was wrapped."""

import json
import os
import sys

os.environ |= dict(
    FSDP_VERSION="2", ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true"
) # as the launcher sets them

from accelerate import Accelerator # noqa: E402
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin # noqa: E402
from torch.distributed.fsdp import FSDPModule # noqa: E402

from qie_nb import trainer as module # noqa: E402


def make_accelerator(device):
    "On a CPU accelerate replaces FSDP by DDP; here it may not."
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    accelerator.state.__dict__ |= dict(
        distributed_type=DistributedType.FSDP, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)
    )
    return accelerator


module.make_accelerator = make_accelerator
trainer = module.QwenImageEditTrainer(json.loads(sys.argv[1]))
trainer.fit()
wrapped = [name for name, part in trainer.transformer.named_modules() if isinstance(part, FSDPModule)]
trainer.save_lora(sys.argv[2])
if trainer.is_main:
    print(
        "RESULT",
        json.dumps(dict(wrapped=wrapped, loss=float(trainer.state.loss), step=trainer.global_step)),
        flush=True,
    )
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
