"""The fused log-probabilities in verl: `patch()`.

verl computes the log-probabilities and entropies of a policy with `linear_cross_entropy` of
`verl/utils/kernel/linear_cross_entropy.py` (verl 0.9.1) where `use_fused_kernels=True` and
`fused_kernel_options.impl_backend=triton`. `patch` replaces this name there, and in the modules that have imported it.
The models in `verl/models/transformers` import it in each forward call, and
`verl/models/mcore/model_forward_fused.py` and `model_forward_1f1b_overlap.py` when they are imported.
"""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor

try:
    import verl
except ImportError as error:
    raise ImportError("core_triton.hosts.verl needs verl: pip install verl==0.9.1") from error
from verl.utils.kernel import linear_cross_entropy as kernel  # pyright: ignore[reportMissingImports]

from core_triton.hosts.interface import OPTIONS, Patch, check_options, check_version
from core_triton.linear_ce import linear_log_probs

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["patch", "unpatch"]

TESTED_VERSIONS = ("0.9.1",)
NAME = "linear_cross_entropy"

_options: dict[str, Any] = {}
_replaced: list[Any] = []  # verl's function, while it is replaced


def patch(**options: Any) -> Patch:
    """Makes verl compute log-probabilities and entropies with `linear_log_probs` of core_triton, in this process.

    Args:
        options: implementation, memory_budget, saved_budget, head_precision and batch_invariant of `linear_log_probs`.

    Returns:
        A context manager that calls `unpatch()` at the end of its block.

    Raises:
        RuntimeError: a version of verl that was not tested, or verl is patched already.
        TypeError, ValueError: an unknown option, or the value of one.

    Example:
        >>> from core_triton.hosts.verl import patch
        >>> _ = patch(saved_budget=2**30)
    """
    found = verl.__version__  # pyright: ignore[reportAttributeAccessIssue]
    check_version(__name__, "verl", found, TESTED_VERSIONS)
    check_options(options, (*OPTIONS, "saved_budget"))
    if _replaced:
        raise RuntimeError("verl is patched already")
    function = getattr(kernel, NAME)
    _options.update(options)
    _replaced.append(function)
    for module in _modules_with(function):
        setattr(module, NAME, linear_cross_entropy)
    return Patch(unpatch)


def unpatch() -> None:
    """Undoes `patch()`.

    Raises:
        RuntimeError: verl is not patched.
    """
    if not _replaced:
        raise RuntimeError("verl is not patched")
    function = _replaced.pop()
    _options.clear()
    for module in _modules_with(linear_cross_entropy):
        setattr(module, NAME, function)


def _modules_with(function: Any) -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "verl" and vars(module).get(NAME) is function:
            yield module


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: "dist.ProcessGroup | None" = None,
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` of verl: log-probabilities of labels, and entropies.

    The gradients take four matmuls, or three with enough saved_budget.

    Args:
        hidden: (..., H) float16, bfloat16 or float32.
        weight: (V, H), hidden's dtype or float32. With dist_process_group, this rank's part of the classes.
        labels: (...) integers, classes of the whole vocabulary. -100 gives 0, others that are not classes NaN.
        temperature: the logits are divided by it. A number, as in verl.
        reduction: "none".
        dist_process_group: of the ranks that divide the classes. As in verl, the gradient of hidden is then a part that
            has to be added over the ranks, as the gradient of Megatron's sequence-parallel gather does: here each rank
            has the whole gradient divided by the number of ranks.

    Returns:
        (N,) float32 log-probabilities and entropies of all N labels, both differentiable.

    Raises:
        TypeError, ValueError: as `core_triton.linear_log_probs`, another reduction, or a temperature that is not a
            positive number.
    """
    if reduction != "none":
        raise ValueError(f'reduction must be "none", got {reduction!r}')
    if not isinstance(temperature, float | int) or not temperature > 0:
        raise ValueError(f"temperature must be a positive number, got {temperature!r}")
    hidden = hidden.reshape(-1, hidden.shape[-1])
    group = None if dist_process_group is None or dist_process_group.size() == 1 else dist_process_group
    if group is not None and hidden.requires_grad:
        hidden, ranks = hidden.view_as(hidden), group.size()
        hidden.register_hook(lambda gradient: gradient / ranks)
    found = linear_log_probs(
        hidden, weight, labels.reshape(-1), logit_scale=1 / temperature, vocab_group=group, **_options
    )
    return found.log_prob, found.entropy
