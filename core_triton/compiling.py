"""What torch.compile takes as it is, without looking into it."""

import torch

from core_triton import ops


@torch.compiler.assume_constant_result
def triton_obstacle(device: torch.device) -> str | None:
    """Returns `ops.triton_obstacle(device)`: torch.compile can trace neither packages nor devices."""
    return ops.triton_obstacle(device)
