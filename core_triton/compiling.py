"""Functions whose results torch.compile takes as constants.

Importing this module loads torch._dynamo, which takes two seconds, so only compiled calls import it.
"""

import torch

from core_triton import ops


@torch.compiler.assume_constant_result
def triton_obstacle(device: torch.device) -> str | None:
    """Returns `ops.triton_obstacle(device)`, which looks at packages and devices: torch.compile cannot trace that."""
    return ops.triton_obstacle(device)
