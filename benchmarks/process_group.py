"""The process group of a benchmark on several GPUs of one host: NCCL on GPUs, gloo on CPUs."""

import os
from datetime import timedelta
from importlib import import_module
from typing import Any, Literal

import torch
from torch import distributed as dist

TIMEOUT = timedelta(seconds=120)


def start_method(*, cuda: bool) -> Literal["spawn", "fork"]:
    """Returns how the processes of a group are started."""
    if cuda:
        return "spawn"
    import_module("torch._dynamo")
    return "fork"  # ranks share what this process has imported, and each resets Dynamo


def join(rank: int, ranks: int, store: str, *, cuda: bool) -> None:
    """Makes this process a rank of the group, and gives it its GPU.

    Args:
        rank: number of this process, and of its GPU.
        ranks: processes of the group.
        store: path of the file by which they find each other; it must not exist yet.
        cuda: whether the ranks have GPUs.
    """
    if cuda:
        torch.cuda.set_device(rank)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast needs what not every container has
    else:
        torch.set_num_threads(1)
    where: dict[str, Any] = {"device_id": torch.device("cuda", rank)} if cuda else {}
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if cuda else None
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
        pg_options=options,
        **where,
    )


def leave(*, cuda: bool) -> None:
    """Waits for the other ranks, and ends the group; on CPUs it ends the process."""
    dist.barrier()
    if not cuda:  # gloo may abort a process that ends after collectives
        os._exit(0)
    dist.destroy_process_group()
