"""Tests JAX's debugging modes: `jax.debug_nans` reports only real NaN, and `jax.disable_jit` works.

Each check runs in a separate program or with separate compiled functions, because JAX stops checking the results of
compiled functions after it has differentiated a jitted function with a custom rule.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import quick_compilation
from jax import Array
from jax_problem import ones, problem, replaced
from kernels_in_numpy import kernels_in_numpy
from programs import Printed, each, python, run_checks

from jax_pallas.linear_ce import linear_cross_entropy, linear_cross_entropy_with_stats, linear_log_probs


def drawn(bad: int) -> tuple[dict[str, Any], Array]:
    """Returns arrays with an ignored row and with NaN in row `bad` of the input, created before JAX checks for NaN."""
    arrays = problem()
    arrays["target"] = replaced(arrays["target"], 3, -100)
    return arrays, replaced(arrays["input"], bad, np.nan)


def results(function: str, x: Array, arrays: dict[str, Any], **options: Any) -> Any:
    """Returns a function's results and their gradients, without jit."""
    others = {name: array for name, array in arrays.items() if name not in ("input", "linear_weight")}
    tokens = len(x)

    def call(x: Array, w: Array) -> Any:
        if function == "log_probs":
            return tuple(linear_log_probs(x, w, **others, **options))
        if function == "stats":
            return linear_cross_entropy_with_stats(x, w, **others, **options)[0]
        return linear_cross_entropy(x, w, **others, reduction=function, **options)  # pyright: ignore[reportArgumentType]

    found, vjp = jax.vjp(call, x, arrays["linear_weight"])
    ones = {"log_probs": (jnp.ones(tokens),) * 3, "none": jnp.ones(tokens)}
    return found, vjp(ones.get(function, jnp.float32(1)))


OPTIONS: dict[str, Any] = {
    "plain": {},
    "weighted": {"weight": ones(50), "token_weight": ones(12)},
    "smoothed": {"weight": ones(50), "label_smoothing": 0.1, "z_loss_weight": 0.1},
}


def ignored_rows_raise_nothing(function: str, options: str, implementation: str) -> None:
    """Neither the targets of ignored rows, which are not classes, nor NaN in these rows raise an error."""
    arrays, with_nan = drawn(3)
    raises_nothing(function, with_nan, arrays, options, implementation)


def ignored_rows_of_numbers_raise_nothing(function: str, options: str, implementation: str) -> None:
    arrays, _ = drawn(3)
    raises_nothing(function, arrays["input"], arrays, options, implementation)


def raises_nothing(function: str, x: Array, arrays: dict[str, Any], options: str, implementation: str) -> None:
    jax.clear_caches()
    with jax.debug_nans(True):
        results(function, x, arrays, implementation=implementation, **OPTIONS[options])


def real_nan_raises(function: str, implementation: str) -> None:
    arrays, with_nan = drawn(5)
    jax.clear_caches()
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        results(function, with_nan, arrays, implementation=implementation)


def nothing_is_compiled(function: str, implementation: str) -> None:
    arrays, _ = drawn(5)
    expected = results(function, arrays["input"], arrays, implementation=implementation)
    with jax.disable_jit():
        found = results(function, arrays["input"], arrays, implementation=implementation)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


CHECKS = {
    " ".join([check.__name__, *arguments]): partial(check, *arguments)
    for check, *arguments in (
        (ignored_rows_raise_nothing, "none", "plain", "pallas_triton"),
        (ignored_rows_raise_nothing, "none", "smoothed", "chunked"),
        (ignored_rows_raise_nothing, "stats", "weighted", "chunked"),
        (ignored_rows_raise_nothing, "log_probs", "plain", "chunked"),
        (ignored_rows_of_numbers_raise_nothing, "none", "plain", "pallas_triton"),
        (ignored_rows_of_numbers_raise_nothing, "none", "smoothed", "chunked"),
        (ignored_rows_of_numbers_raise_nothing, "stats", "weighted", "chunked"),
        (ignored_rows_of_numbers_raise_nothing, "log_probs", "plain", "chunked"),
        (real_nan_raises, "mean", "chunked"),
        (real_nan_raises, "none", "pallas_triton"),
        (real_nan_raises, "log_probs", "chunked"),
        (nothing_is_compiled, "mean", "pallas_triton"),
        (nothing_is_compiled, "log_probs", "chunked"),
    )
}
# The quick suite runs each check and implementation, and each function's gradients. Every further case compiles again.
EVERY_DAY = (
    "ignored_rows_raise_nothing none plain pallas_triton",
    "ignored_rows_raise_nothing stats weighted chunked",
    "real_nan_raises log_probs chunked",
    "nothing_is_compiled log_probs chunked",
)
MORE = tuple(name for name in CHECKS if name not in EVERY_DAY)


def assert_passed(result: dict[str, Any]) -> None:
    assert not result["failure"], result["failure"]


@pytest.mark.parametrize("name", each(dict.fromkeys(EVERY_DAY, python(Path(__file__).name, *EVERY_DAY)), seconds=30))
def test_check(name: str, printed: Printed) -> None:
    assert_passed(printed[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", each(dict.fromkeys(MORE, python(Path(__file__).name, *MORE)), seconds=60))
def test_more_checks(name: str, printed: Printed) -> None:
    assert_passed(printed[name])


if __name__ == "__main__":
    with quick_compilation(), kernels_in_numpy():
        run_checks(CHECKS, sys.argv[1:])
