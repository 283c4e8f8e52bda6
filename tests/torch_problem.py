"""Small random problems as tensors, for the tests of core_triton that do not use the table of cases."""

from typing import Any

import torch
from torch import Tensor

import core_triton


def problem(
    n: int = 12, d: int = 8, v: int = 50, *, dtype: torch.dtype = torch.float32, bias: bool = True, seed: int = 0
) -> dict[str, Any]:
    """Returns input (N, D), linear_weight (V, D) and linear_bias (V,), which require grad, and target (N,)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    arrays = {"input": normal(n, d), "linear_weight": normal(v, d), "linear_bias": normal(v)}
    if not bias:
        del arrays["linear_bias"]
    return arrays | {"target": torch.randint(0, v, (n,), generator=generator)}


def leaves(arrays: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that require grad."""
    return [tensor for tensor in arrays.values() if tensor.requires_grad]


def total(function: Any, arrays: dict[str, Any], **options: Any) -> Tensor:
    """Returns a sum of the results of `function`, one of FUNCTIONS, with a different factor for each element."""
    if function == "log_probs":
        results = core_triton.linear_log_probs(**arrays, **options)
    else:
        results = (core_triton.linear_cross_entropy(**arrays, reduction=function, **options),)
    if function in ("mean", "sum"):
        return results[0]
    factors = torch.arange(results[0].numel(), device=results[0].device) / 8
    terms = [result.reshape(-1) * (factors - k) for k, result in enumerate(results)]
    return torch.stack(terms).sum()


FUNCTIONS = ("mean", "sum", "none", "log_probs")
