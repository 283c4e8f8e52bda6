"""The fused loss in levanter: `register()`.

levanter computes the loss of its language models with `fused_cross_entropy_loss_and_logsumexp_penalty` of
`levanter/kernels/pallas/fused_cross_entropy_loss/api.py`, which chooses among the functions of its registry
`IMPLEMENTATIONS`. `register` adds `linear_softmax_cross_entropy_loss` of this module to it, and makes it the default.

The interfaces are those of marin-levanter 0.2.20.dev202606180959 and 0.2.227.dev40316220070, and of
commit 01666fdb55b7b8d246970916f576c3fa6b845a1d of github.com/marin-community/marin (lib/levanter).
"""

from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jax_pallas.hosts.interface import check_interface, check_options
from jax_pallas.linear_ce import linear_log_probs, linear_token_loss_with_stats

try:
    from levanter.kernels.pallas.fused_cross_entropy_loss import api  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError("jax_pallas.hosts.levanter needs levanter: pip install marin-levanter") from error

__all__ = ["register", "unregister"]

TESTED = "marin-levanter 0.2.20.dev202606180959 and 0.2.227.dev40316220070, and commit 01666fd of marin"
NAMES = ("x", "labels", "w", "reduction", "weight", "logsumexp_weight", "block_size", "block_sizes", "dtype")
NAMES += ("logit_soft_cap", "precision", "implementation", "return_argmax")

_replaced: dict[str, Any] = {}  # the choice of the default implementation that `register` replaced, and the name


def linear_softmax_cross_entropy_loss(
    x: Array,
    labels: Array,
    w: Array,
    *,
    block_sizes: Any = None,
    dtype: DTypeLike | None = jnp.float32,
    logit_soft_cap: float | None = None,
    precision: Any = None,
    return_argmax: bool = False,
    **options: Any,
) -> tuple[Array, Array] | tuple[Array, Array, Array]:
    """An implementation for levanter's registry, or for `implementation=[linear_softmax_cross_entropy_loss]`.

    The gradients take four matmuls, or three with enough saved_budget.

    Args:
        x: (B, H) float16, bfloat16 or float32.
        labels: (B,) integers. A label that is not a class gives NaN, and -100 gives 0.
        w: (H, V) of x's dtype or float32.
        block_sizes: is not used. memory_budget limits the memory.
        dtype: of logits in levanter. Here they are float32, and results have that dtype.
        logit_soft_cap: bound on the absolute value of the logits, or None.
        precision: is not used. The matmuls of 16 bits add in float32, and those of float32 do not round.
        return_argmax: whether to return the class of the largest logit too, for one more matmul.
        **options: of `jax_pallas.linear_log_probs`: implementation, memory_budget, saved_budget and others.

    Returns:
        (B,) float32 losses and log-sum-exps, both differentiable, and with return_argmax (B,) int32.

    Raises:
        TypeError, ValueError: as `jax_pallas.linear_log_probs`; dtype is wider than float32.

    Example:
        >>> from jax_pallas.hosts.levanter import linear_softmax_cross_entropy_loss
        >>> fused_cross_entropy_loss_and_logsumexp_penalty(
        ...     x, labels, w, implementation=[linear_softmax_cross_entropy_loss]
        ... )
    """
    if dtype is not None and jnp.dtype(dtype).itemsize > 4:
        raise ValueError(f"dtype must be at most float32, got {jnp.dtype(dtype)}")
    found = linear_log_probs(x, w, labels, vocab_axis=1, softcap=logit_soft_cap, **options)
    if not return_argmax:
        return -found.log_prob, found.lse
    options.pop("saved_budget", None)
    arguments = lax.stop_gradient(x), lax.stop_gradient(w), labels, jnp.negative
    options |= {"vocab_axis": 1, "softcap": logit_soft_cap, "reduction": "none"}
    _, stats = linear_token_loss_with_stats(*arguments, stats=("argmax",), **options)
    assert stats.argmax is not None
    return -found.log_prob, found.lse, stats.argmax


def register(name: str = "linear_ce", *, default: bool = True, **options: Any) -> None:
    """Adds the loss to levanter's registry. Call it before the first step of a trainer, which keeps its compiled
    programs. Another call replaces the options.

    Args:
        name: for `implementation=name`.
        default: whether calls without an implementation use it, such as those of levanter's language models. If it
            raises an error, levanter raises an `ExceptionGroup` that contains it, and uses no other implementation.
        **options: of `linear_softmax_cross_entropy_loss`.

    Raises:
        ImportError: levanter's function has other arguments.
        TypeError: the type of an option.
        ValueError: name is that of another implementation, or the value of an option.

    Example:
        >>> from jax_pallas.hosts import levanter
        >>> levanter.register()
    """
    host = api.fused_cross_entropy_loss_and_logsumexp_penalty
    check_interface("jax_pallas.hosts.levanter", TESTED, _version(), host, NAMES)
    check_options(options)
    if name in api.IMPLEMENTATIONS and name != _replaced.get("name"):
        raise ValueError(
            f"name must not be one of levanter's implementations, {sorted(api.IMPLEMENTATIONS)}, got {name!r}"
        )
    unregister()
    _replaced.update(name=name, choice=api._default_implementations)
    api.IMPLEMENTATIONS[name] = partial(linear_softmax_cross_entropy_loss, **options)
    if default:
        api._default_implementations = lambda: (name,)


def unregister() -> None:
    """Undoes `register`, if it was called."""
    if _replaced:
        del api.IMPLEMENTATIONS[_replaced.pop("name")]
        api._default_implementations = _replaced.pop("choice")


def _version() -> str:
    try:
        return f"marin-levanter {version('marin-levanter')}"
    except PackageNotFoundError:
        return "levanter of no version"
