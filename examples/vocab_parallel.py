"""Trains a small model on several ranks in PyTorch: its body with FSDP2, its head split over the vocabulary.

    torchrun --nproc-per-node 4 examples/vocab_parallel.py --tensor 2

This runs on four CPU processes, or on four GPUs with NCCL. The ranks are a grid of data x tensor. Ranks of one row
(tensor) have the same tokens and each a shard of the vocabulary (`vocab_group`). Ranks of one column (data) have other
tokens (`token_group`). FSDP2 shards the parameters of both the body and the head over data and averages their
gradients, which are those of the mean over all tokens, however many count on each rank.
"""

import argparse
import os
import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from core_triton import LinearCrossEntropy

VOCABULARY, HIDDEN, LENGTH, BATCH = 512, 64, 32, 8


def tokens_of(step: int, share: int, device: str) -> torch.Tensor:
    """Returns the tokens (BATCH, LENGTH + 1) of a data rank: each is the one before plus a step of its sequence."""
    drawn = torch.Generator().manual_seed(1000 * step + share)
    start, stride = torch.randint(VOCABULARY, (BATCH, 1), generator=drawn), torch.tensor([[1, 2, 3, 5] * (BATCH // 4)])
    return ((start + stride.T * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Train a small model with a vocabulary-parallel head.")
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share a vocabulary (2)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (60)")
    options = parser.parse_args()
    if options.tensor < 1 or VOCABULARY % options.tensor:
        parser.error(f"--tensor must divide the vocabulary of {VOCABULARY}, got {options.tensor}")
    if "RANK" not in os.environ:
        parser.error(f"start it with torchrun: torchrun --nproc-per-node 4 {sys.argv[0]}")
    if int(os.environ["WORLD_SIZE"]) % options.tensor:
        parser.error(f"--tensor must divide the {os.environ['WORLD_SIZE']} ranks, got {options.tensor}")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    data = dist.get_world_size() // options.tensor
    mesh = init_device_mesh(device, (data, options.tensor), mesh_dim_names=("data", "tensor"))
    share, part = mesh.get_local_rank("data"), mesh.get_local_rank("tensor")

    torch.manual_seed(0)  # the same body on all ranks
    wide = 4 * HIDDEN
    body = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, wide), nn.GELU(), nn.Linear(wide, HIDDEN))
    torch.manual_seed(1 + part)  # the same shard of the head on the ranks of a column
    head = LinearCrossEntropy(
        HIDDEN,
        VOCABULARY // options.tensor,
        vocab_group=mesh.get_group("tensor"),
        token_group=mesh.get_group("data"),
    )
    fully_shard(body.to(device), mesh=mesh["data"])
    # The backward pass of the head only multiplies its gradients, so it need not gather the head again.
    fully_shard(head.to(device), mesh=mesh["data"], reshard_after_forward=False)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-2)

    for step in range(options.steps + 1):
        tokens = tokens_of(step, share, device)
        targets = tokens[:, 1:].clone()
        targets[:, : 4 * (1 + share)] = -100  # not the same number of tokens on every rank
        loss = head(body(tokens[:, :-1]), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step:3d}  loss {mean.item() / dist.get_world_size():.3f}")
    dist.barrier()
    dist.destroy_process_group()
    if device == "cpu":  # threads of gloo may abort the process while the interpreter ends (PyTorch 2.11)
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
