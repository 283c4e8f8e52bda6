"""Trainers of trl on two processes, with and without the adapter: prints what both computed, as JSON.

torchrun --nproc-per-node 2 trl_ranks.py FOLDER
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import trl_trainers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def with_ddp(trainer: Any) -> list[dict[str, float]]:
    """Returns what 20 steps logged, and the norm of the head. Trainer wraps its model in DistributedDataParallel."""
    found = trl_trainers.train(trainer)
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    return [*found, {"head": float(trainer.model.lm_head.weight.norm())}]


def with_fsdp2(trainer: Any, head: bool = False) -> list[dict[str, float]]:
    """Returns the loss and the norms of the gradients of a step. Its Trainer does not shard models on CPUs."""
    model, batch = trainer.model.train(), next(iter(trainer.get_train_dataloader()))
    for module in (*model.model.layers, *([model.lm_head] if head else []), model):
        fully_shard(module)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(isinstance(gradient, DTensor) for gradient in gradients.values())
    return [{"loss": float(loss)} | {name: float(one.full_tensor().norm()) for name, one in gradients.items()}]


def with_sharded_head(trainer: Any) -> list[dict[str, float]]:
    """The same, where the head is a group: trl then gathers its weight."""
    return with_fsdp2(trainer, head=True)


CASES = [("SFT", with_ddp), ("GRPO", with_ddp), ("DPO", with_ddp)]
CASES += [(name, run) for name in ("SFT", "DPO") for run in (with_fsdp2, with_sharded_head)]

if __name__ == "__main__":
    from core_triton.hosts.trl import patch

    warnings.simplefilter("ignore")
    logging.disable()
    results: dict[str, list[Any]] = {}
    for name, run in CASES:
        for patched in (False, True):
            trainer = trl_trainers.make(name, Path(sys.argv[1]))
            if patched:
                patch(trainer, implementation="chunked")
            results.setdefault(f"{name} {run.__name__}", []).append(run(trainer))
    if os.environ["RANK"] == "0":
        print("\n" + json.dumps(results))
    torch.distributed.destroy_process_group()
