"""Small random problems as JAX arrays, for the tests of jax_pallas that do not use the table of cases."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_pallas.launch import DeviceInfo
from jax_pallas.linear_ce import linear_cross_entropy, linear_log_probs
from jax_pallas.ops import plan_for
from jax_pallas.plan import Stage
from jax_pallas.problem import NO_GRADIENTS, NeedsGrad, Problem
from linear_ce.spec import DEFAULT_MEMORY_BUDGET

FUNCTIONS = ("mean", "sum", "none", "log_probs")
ARGUMENTS: tuple[str, ...] = ("input", "linear_weight", "linear_bias")


def problem(
    n: int = 12, d: int = 8, v: int = 50, *, dtype: Any = jnp.float32, bias: bool = True, vocab_axis: int = 0
) -> dict[str, Any]:
    """Returns input (N, D), linear_weight (V, D) or (D, V), linear_bias (V,) and target (N,)."""
    rng = np.random.default_rng(0)
    head = rng.standard_normal((v, d))
    arrays = {
        "input": cast(rng.standard_normal((n, d)), dtype),
        "linear_weight": cast(head if vocab_axis == 0 else head.T, dtype),
        "linear_bias": cast(rng.standard_normal(v), dtype),
        "target": cast(rng.integers(0, v, n), jnp.int32),
    }
    if not bias:
        del arrays["linear_bias"]
    return arrays


def cast(values: Any, dtype: Any) -> Array:
    """Returns `jnp.asarray(values, dtype)`, for which JAX would compile a program for each shape."""
    return jax.device_put(np.asarray(values).astype(dtype))


def zeros(shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
    """Returns `jnp.zeros(shape, dtype)` without a program for it."""
    return cast(np.zeros(shape), dtype)


def ones(shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
    """Returns `jnp.ones(shape, dtype)` without a program for it."""
    return cast(np.ones(shape), dtype)


def normal(seed: int, shape: tuple[int, ...]) -> Array:
    """Returns numbers of the standard normal distribution, which `jax.random` would compile for each shape in 0.3 s."""
    return cast(np.random.default_rng(seed).standard_normal(shape), np.float32)


def integers(seed: int, shape: tuple[int, ...], low: int, high: int) -> Array:
    """Returns integers from `low` to `high` - 1."""
    return cast(np.random.default_rng(seed).integers(low, high, shape), np.int32)


def replaced(array: Any, index: Any, value: Any) -> Any:
    """Returns `array.at[index].set(value)`, for which JAX would compile several programs for each shape."""
    changed = np.array(array)
    changed[index] = value
    return jax.device_put(changed)


def planned(
    problem: Problem,
    stage: Stage,
    implementation: str,
    needs_grad: NeedsGrad = NO_GRADIENTS,
    *,
    budget: int = DEFAULT_MEMORY_BUDGET,
    **options: Any,
) -> Problem:
    """Returns a problem with its plan for this machine, or for a Hopper GPU with "mosaic"."""
    device = DeviceInfo("cuda", 90, 132, "h200") if implementation == "mosaic" else DeviceInfo("cpu", 0, 0, "a100")
    plan = plan_for(problem, stage, budget, implementation, needs_grad, device, **options)
    return replace(problem, plan=plan)


def total(function: Any, arrays: dict[str, Any], **options: Any) -> Array:
    """Returns a sum of the results of `function`, one of FUNCTIONS, with a different factor for each element."""
    if function == "log_probs":
        results = tuple(linear_log_probs(**arrays, **options))
    else:
        results = (linear_cross_entropy(**arrays, reduction=function, **options),)
    if function in ("mean", "sum"):
        return results[0]
    return weighted_sum(results)


@jax.jit
def weighted_sum(results: tuple[Array, ...]) -> Array:
    terms = [result.reshape(-1) * (jnp.arange(result.size) / 8 - k) for k, result in enumerate(results)]
    return jnp.stack(terms).sum()


def gradients(function: Any, arrays: dict[str, Any], names: tuple[str, ...] = ARGUMENTS, **options: Any) -> Any:
    """Returns the gradients of `total` by the named arguments as a dict."""

    def value(differentiated: dict[str, Any], others: dict[str, Any]) -> Array:
        return total(function, differentiated | others, **options)

    chosen = {name: arrays[name] for name in names if name in arrays}
    return jax.grad(value)(chosen, {name: array for name, array in arrays.items() if name not in chosen})


@partial(jax.jit, static_argnums=1)
def materialized(arrays: dict[str, Any], vocab_axis: int = 0) -> Array:
    """Returns the (N, V) logits in float32."""
    w = arrays["linear_weight"] if vocab_axis == 1 else arrays["linear_weight"].T
    with jax.default_matmul_precision("float32"):
        return arrays["input"].astype(jnp.float32) @ w.astype(jnp.float32) + arrays.get("linear_bias", 0.0)
