"""Tests batch_invariant of jax_pallas on an NVIDIA Hopper GPU. Run with `pytest -m gpu`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jax_pallas import token_losses
from jax_pallas.linear_ce import (
    linear_cross_entropy_with_stats,
    linear_log_probs,
    linear_token_loss_with_stats,
)

pytestmark = [pytest.mark.gpu, pytest.mark.apart(programs=4, seconds=90)]

MOST = 5000
FUNCTIONS = ("token_loss", "log_probs", "none")
CALLS = [*((64, 1024, function) for function in FUNCTIONS), (896, 8192, "token_loss")]  # each size is compiled


def drawn(d: int, v: int) -> tuple[np.ndarray, ...]:
    """Returns input, head, target and upstream gradients. Every 50th row has logits so far above its target's that it
    is repaired."""
    rng = np.random.default_rng(d)
    x, w = rng.standard_normal((MOST, d)) * d**-0.5, rng.standard_normal((v, d))
    x[::50] *= 60
    return x, w, rng.integers(0, v, MOST).astype(np.int32), rng.standard_normal(MOST).astype(np.float32)


@partial(jax.jit, static_argnames=("function", "options"))
def results(x: Array, w: Array, target: Array, upstream: Array, *, function: str, options: Any) -> tuple[Array, ...]:
    """Returns log-probabilities or losses, lse and d_input of the rows."""

    def call(x: Array, w: Array) -> Any:
        named: dict[str, Any] = {"batch_invariant": True, **dict(options)}
        if function == "token_loss":
            loss, stats = linear_token_loss_with_stats(
                x, w, target, token_losses.reinforce(), upstream, stats=("log_prob", "lse"), reduction="sum", **named
            )
            return loss, (stats.log_prob, stats.lse)
        if function == "log_probs":
            found = linear_log_probs(x, w, target, **named)
            return (found.log_prob * upstream).sum(), (found.log_prob, found.lse)
        losses, stats = linear_cross_entropy_with_stats(x, w, target, reduction="none", **named)
        return (losses * upstream).sum(), (losses, stats.lse)

    (_, of_rows), (d_input, _) = jax.value_and_grad(call, argnums=(0, 1), has_aux=True)(x, w)
    return *of_rows, d_input


def of_rows(
    arrays: tuple[np.ndarray, ...], rows: np.ndarray, function: str, options: tuple[Any, ...]
) -> list[np.ndarray]:
    x, w, target, upstream = arrays
    given = jnp.asarray(x[rows], jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), target[rows], upstream[rows]
    return [np.asarray(one) for one in results(*given, function=function, options=options)]


def assert_same(found: list[np.ndarray], want: list[np.ndarray], what: str) -> None:
    for name, one, other in zip(("log_prob or loss", "lse", "d_input"), found, want, strict=False):
        assert np.array_equal(one, other), f"{name} of {what}"


@pytest.mark.parametrize(
    ("d", "v", "function", "options"),
    [*((*call, ()) for call in CALLS), (64, 1024, "log_probs", (("softcap", 30.0), ("logit_scale", 1.7)))],
)
def test_a_row_has_the_same_bits_among_any_rows(d: int, v: int, function: str, options: Any) -> None:
    arrays, rng = drawn(d, v), np.random.default_rng(1)
    want = of_rows(arrays, np.arange(MOST), function, options)
    assert (np.abs(want[0]) > 35).sum() > 20, "few rows are repaired"  # 2**48 is 33 nats
    for size in (1, 17, 129, *rng.integers(1, MOST, 2)):
        rows = rng.permutation(MOST)[:size]
        assert_same(of_rows(arrays, rows, function, options), [one[rows] for one in want], f"{size} rows")


@pytest.mark.parametrize(("d", "v", "function"), CALLS)
def test_a_row_has_the_same_bits_in_any_chunks_and_beside_ignored_rows(d: int, v: int, function: str) -> None:
    arrays, everything = drawn(d, v), np.arange(MOST)
    want = of_rows(arrays, everything, function, ())
    for budget in (2**24, 2**26):
        found = of_rows(arrays, everything, function, (("memory_budget", budget),))
        assert_same(found, want, f"{budget} bytes")
    kept = np.random.default_rng(2).random(MOST) < 0.5
    arrays[2][~kept], arrays[0][~kept] = -100, np.nan
    found = of_rows(arrays, everything, function, ())
    assert_same([one[kept] for one in found], [one[kept] for one in want], "half of the rows")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_those_without_the_option_up_to_rounding(function: str) -> None:
    arrays, everything = drawn(896, 8192), np.arange(MOST)
    found = of_rows(arrays, everything, function, ())
    want = of_rows(arrays, everything, function, (("batch_invariant", False),))
    for one, other, bound in zip(found, want, (1e-5, 1e-5, 4e-3), strict=True):
        one, other = one.astype(np.float32), other.astype(np.float32)
        assert np.linalg.norm(one - other) <= bound * np.linalg.norm(other)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_repair_changes_no_row_beside_it(function: str) -> None:
    arrays, rows, options = drawn(64, 1024), np.arange(1, 128), (("softcap", 200.0),)
    want = of_rows(arrays, rows, function, options)
    arrays[0][[50, 100]] = arrays[0][[1, 2]]  # which are not repaired
    near = rows % 50 != 0
    found = of_rows(arrays, rows, function, options)
    assert_same([one[near] for one in found], [one[near] for one in want], "a block without a repair")


def test_pallas_triton_gives_a_row_the_same_bits_among_any_rows() -> None:
    """Without a gradient of input, which is XLA's there."""
    x, w, target, _ = drawn(64, 1024)
    everything, want = np.arange(MOST), None
    for rows in (everything, everything[7:8], everything[3:20], everything[100:1133]):
        given = jnp.asarray(x[rows], jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), jnp.asarray(target[rows])
        found = linear_log_probs(*given, implementation="pallas_triton", batch_invariant=True)
        made = [np.asarray(found.log_prob), np.asarray(found.lse)]
        want = made if want is None else want
        assert_same(made, [one[rows] for one in want], f"{len(rows)} rows")
