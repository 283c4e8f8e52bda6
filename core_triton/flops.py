"""The floating-point operations of the operators, for `torch.utils.flop_counter.FlopCounterMode`.

A matmul counts as 2 N D V operations: that of the logits in each pass that computes them, and that of each gradient
(`operators.py`). A float32 head, whose kernels multiply more often, does not count more. Calls that run no operator,
those with `grad_into` or with a token loss that is not one of `token_losses`, count only the operations of PyTorch.
"""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

FORMULAS: dict[str, Callable[..., int]] = {}  # by the names of the operators


def offer() -> None:
    """Gives the formulas to the counters that are active.

    Registered with `torch.utils.flop_counter`, which imports Triton, they would make the import of this package slower.
    """
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(registry, dict):
            for name, formula in FORMULAS.items():
                registry.setdefault(getattr(torch.ops.linear_ce, name), formula)
