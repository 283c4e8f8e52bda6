"""Functions that torch.compile does not trace: it takes their results as constants, or calls them between two graphs.

Importing this module loads torch._dynamo, which takes two seconds, so only compiled calls import it.
"""

from collections.abc import Callable
from typing import Any

import torch

from core_triton import device as devices


@torch.compiler.assume_constant_result
def triton_obstacle(device: torch.device) -> str | None:
    """Returns what `device.py`'s function returns, which looks at packages and devices: a trace cannot."""
    return devices.triton_obstacle(device)


REASON = (
    "the call is not one operator, because the token_loss of linear_token_loss is not one of "
    "core_triton.token_losses, because grad_into is given, because of DTensors, gather or sequence_parallel, or "
    "because it is the backward pass of an eager call for losses or log-probabilities of tokens"
)


@torch.compiler.disable(reason=REASON)
def call_between_graphs(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Returns function(*arguments, **options), run in eager mode. With fullgraph=True that is an error.

    Raises:
        RuntimeError: it is exported with strict=False, where no eager code runs.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"torch.export cannot export this call: {REASON}. Use a loss of core_triton.token_losses, and plain "
            "tensors without grad_into"
        )
    return function(*arguments, **options)
