"""The kernels of each implementation under one set of names, and which of them a device runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

NAMES = ("mosaic", "pallas_triton")


class Kernels(NamedTuple):
    """What an implementation has; None where XLA's own product does the work.

    Args:
        limits: (dtype, hidden, vocab, vocab_axis) -> what keeps the kernels from such a call, or None.
        gradient_limits: the same of `d_weight` and `d_input`.
        exponentials: e (n, padded(K)), their sums and the largest logits of a chunk.
        statistics: of a chunk's rows over a stretch of the vocabulary.
        d_logits: of the same.
        add_target_rows: adds the targets' terms to d_weight.
        d_weight: e^T x, added to what is there.
        d_input: rho (e w) + theta w_target.
        d_input_scratch: (rows, hidden, classes, most) -> bytes that d_input takes besides its result, `most` at most.
    """

    limits: Callable[..., str | None]
    gradient_limits: Callable[..., str | None] | None
    exponentials: Callable[..., tuple[Array | None, Array, Array | None]]
    statistics: Callable[..., tuple[Any, ...]]
    d_logits: Callable[..., Array]
    add_target_rows: Callable[..., Array]
    d_weight: Callable[..., Array] | None
    d_input: Callable[..., Array] | None
    d_input_scratch: Callable[..., int] | None


def load(implementation: str) -> Kernels:
    """Returns the kernels of an implementation; nothing of its backend is imported before."""
    if implementation == "mosaic":
        from jax_pallas import hopper_d_input, hopper_gradients, hopper_logits, target_kernels

        return Kernels(
            limits=hopper_logits.limits,
            gradient_limits=hopper_gradients.limits,
            exponentials=hopper_logits.exponentials,
            statistics=hopper_logits.statistics,
            d_logits=hopper_logits.d_logits,
            add_target_rows=target_kernels.add_target_rows,
            d_weight=hopper_gradients.d_weight,
            d_input=hopper_d_input.d_input,
            d_input_scratch=hopper_d_input.d_input_scratch,
        )
    from jax_pallas import kernels

    return Kernels(
        limits=kernels.limits,
        gradient_limits=None,
        exponentials=kernels.exponentials,
        statistics=kernels.statistics,
        d_logits=kernels.d_logits,
        add_target_rows=kernels.add_target_rows,
        d_weight=None,
        d_input=None,
        d_input_scratch=None,
    )


def limits(implementation: str, dtype: Any, hidden: int, vocab: int, vocab_axis: int) -> str | None:
    """Returns what keeps an implementation from arrays of these shapes and dtypes, or None."""
    return load(implementation).limits(dtype, hidden, vocab, vocab_axis) if implementation in NAMES else None


def choose() -> tuple[str, str]:
    """Returns the implementation that a call takes without a name, and why it is that.

    The kernels have not yet passed every case on a GPU: until they have, they are asked for by name.
    """
    platform = jax.default_backend()
    return (
        "chunked",
        f"no kernel for {platform} devices" if platform == "cpu" else "the kernels are on trial: name them",
    )
