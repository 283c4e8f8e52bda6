"""Tests the sign and the accuracy of the loss of confident tokens: it is never below 0, and as close to float64 as the
loss of materialized float32 logits."""

import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax_problem import planned, replaced
from programs import Printed, python, run_checks

from jax_pallas import chunked, hopper_common, hopper_logits, recompute, row_math
from jax_pallas.linear_ce import linear_cross_entropy, linear_log_probs
from jax_pallas.problem import Problem
from jax_pallas.slicing import Slice
from linear_ce.spec import LossSpec

IMPLEMENTATIONS = ("chunked", "pallas_triton")
DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "scaled": {"logit_scale": 1.7}, "capped": {"softcap": 100.0}}
EPSILON = 2.0**-23


def drawn(n: int, d: int, v: int, dtype: Any = jnp.bfloat16, seed: int = 0) -> tuple[Array, Array, Array]:
    """Returns inputs that are 40 times as large as usual, a head, and each row's most likely class."""
    random = np.random.default_rng(seed)
    x = jnp.asarray(random.standard_normal((n, d)) * 40, dtype)
    w = jnp.asarray(random.standard_normal((v, d)) / d**0.5, dtype)
    return x, w, jnp.asarray(logits_of(x, w).argmax(1), jnp.int32)


def exact(n: int, v: int, dtype: Any = jnp.bfloat16, largest: float = 8192.0) -> tuple[Array, Array, Array]:
    """Returns inputs and a head whose logits, near `largest`, are exact in float32 for any order of summation."""
    random = np.random.default_rng(1)
    x, w = random.integers(-2, 3, (n, 64)) / 2, random.integers(-2, 3, (v, 64)).astype(np.float64)
    x[:, :32], w[:, :32] = 16, largest / 512
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    return x, w, jnp.asarray(logits_of(x, w).argmax(1), jnp.int32)


def logits_of(x: Array, w: Array, logit_scale: float = 1.0, softcap: float | None = None) -> np.ndarray:
    """Returns float64 logits."""
    x_, w_ = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, w))
    logits = x_ @ w_.T * logit_scale
    return logits if softcap is None else softcap * np.tanh(logits / softcap)


def nll_of(logits: np.ndarray, target: Array) -> np.ndarray:
    """Returns the negative log-likelihood in float64, without subtracting large numbers."""
    at = np.arange(len(logits)), np.asarray(target)
    shifted = logits - logits[at][:, None]
    shifted[at] = -np.inf
    top = np.maximum(shifted.max(1), 0)
    rest = np.exp(shifted - top[:, None]).sum(1)
    return np.where(top > 0, top + np.log(np.exp(-top) + rest), np.log1p(rest))


def unfused(logits: np.ndarray, target: Array) -> np.ndarray:
    """Returns the negative log-likelihood from materialized float32 logits."""
    log_probs = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    return -np.asarray(log_probs, np.float64)[np.arange(len(target)), np.asarray(target)]


def assert_accurate(found: Any, logits: np.ndarray, target: Array, below: float = np.inf) -> None:
    """Fails if a loss is below 0, or if the largest error is above 3 times that of the unfused loss.

    Only losses below `below` count for the error.
    """
    found, expected = np.asarray(found, np.float64), nll_of(logits, target)
    assert (found >= 0).all(), f"{(found < 0).sum()} losses are below 0, the least is {found.min()}"
    counted = expected < below
    assert counted.any()
    error = np.abs(found - expected)[counted].max()
    budget = 3 * np.abs(unfused(logits, target) - expected)[counted].max() + EPSILON
    assert error <= budget, f"error {error:.1e} is {error / budget:.0%} of its budget"


def every_loss(dtype: str, options: str, function: str, implementation: str) -> np.ndarray:
    """Returns a function's losses on random arrays, per token or for a training step."""
    x, w, y = drawn(160, 64, 700, DTYPES[dtype])
    static_args: dict[str, Any] = {**OPTIONS[options], "implementation": implementation}
    if function == "none":
        return np.asarray(linear_cross_entropy(x, w, y, reduction="none", **static_args))
    if function == "log_probs":
        return -np.asarray(linear_log_probs(x, w, y, **static_args).log_prob)
    return np.asarray(jax.value_and_grad(linear_cross_entropy, argnums=(0, 1))(x, w, y, **static_args)[0])


# The quick suite runs each dtype, option and function once per implementation. The rest takes two minutes to compile.
EVERY_DAY = {("bfloat16", "plain", "none"), ("float16", "capped", "log_probs"), ("float32", "scaled", "mean")}
LOSSES = [
    pytest.param(*chosen, marks=() if chosen in EVERY_DAY else pytest.mark.slow)
    for chosen in itertools.product(DTYPES, OPTIONS, ("none", "log_probs", "mean"))
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "options", "function"), LOSSES)
def test_the_loss_is_never_below_zero(dtype: str, options: str, function: str, implementation: str) -> None:
    loss = every_loss(dtype, options, function, implementation)
    assert (loss >= 0).all(), f"{(loss < 0).sum()} losses are below 0, the least is {loss.min()}"
    if function == "log_probs":
        assert not np.signbit(-loss[loss == 0]).any(), "-0 instead of 0"


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        *(("chunked", options) for options in OPTIONS),
        ("pallas_triton", "plain"),
        *(pytest.param("pallas_triton", options, marks=pytest.mark.slow) for options in ("scaled", "capped")),
    ],
)
def test_confident_tokens_are_as_accurate_as_from_float32_logits(implementation: str, options: str) -> None:
    for largest in (64.0,) if options == "capped" else (64.0, 8192.0):
        static_args: dict[str, Any] = {**OPTIONS[options], "implementation": implementation}
        x, w, y = exact(160, 700, largest=largest)
        shape = {key: value for key, value in static_args.items() if key != "implementation"}
        logits = logits_of(x, w, **shape)
        assert_accurate(linear_cross_entropy(x, w, y, reduction="none", **static_args), logits, y)


def test_vocab_chunks() -> None:
    x, w, y = exact(160, 3000)
    budget = 2**21
    found = linear_cross_entropy(x, w, y, reduction="none", memory_budget=budget, implementation="chunked")
    assert_accurate(found, logits_of(x, w), y)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shards_of_the_vocabulary(implementation: str) -> None:
    """`row_math.merge` joins the results of the shards' first passes, and the target's term remains part of the sum."""
    x, w, y = exact(160, 700)
    spec = LossSpec("none")

    def partial_of(first: int, last: int) -> row_math.Partial:
        problem = Problem(x, w[first:last], None, y, jnp.ones(160), None, spec, 700, first)
        problem = planned(problem, "statistics", implementation)
        tiles = chunked.XLA_TILES if implementation == "chunked" else recompute.KERNEL_TILES
        return chunked.chunk_statistics(problem, Slice(0, 160, None), 120, tiles=tiles)[0]

    @jax.jit
    def merged() -> row_math.RowStatistics:
        parts = [partial_of(first, last) for first, last in ((0, 256), (256, 512), (512, 700))]
        return row_math.finish(row_math.merge(row_math.merge(parts[0], parts[1]), parts[2]), y, jnp.ones(160), 700)

    found = merged()
    assert_accurate(found.nll, logits_of(x, w), y)
    np.testing.assert_allclose(found.lse, logits_of(x, w).max(1), rtol=1e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_repaired_rows(implementation: str) -> None:
    """Repairing a row whose target is far below the largest logit does not change the confident rows beside it."""
    x, w, _ = exact(160, 700)
    w = w.at[0, :32].add(-0.25)  # 128 below the others
    logits = logits_of(x, w)
    y = replaced(logits.argmax(1).astype(np.int32), np.s_[::7], 0)
    confident = np.setdiff1d(np.arange(160), np.arange(0, 160, 7))
    found = np.asarray(linear_cross_entropy(x, w, y, reduction="none", implementation=implementation))
    assert_accurate(found[confident], logits[confident], y[confident])
    expected = nll_of(logits, y)
    assert (expected[::7] > 40).all(), "these rows must leave the range of the scaled exponentials"
    np.testing.assert_allclose(found[::7], expected[::7], rtol=1e-5)


@pytest.mark.slow  # test_jax_pallas_hopper_logits.py tests random arrays
def test_mosaic_returns_what_a_target_adds_to_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in Pallas' interpreter, with targets in whole and partial tiles, no target, and several in one tile."""
    monkeypatch.setattr(hopper_common, "programs", lambda: 3)
    x, w, y = exact(160, 700)
    logits = logits_of(x, w)
    y = replaced(replaced(replaced(y, np.s_[::5], -1), np.s_[1::5], 699), np.s_[64:100], 7)
    ref_exponent = jnp.asarray(np.floor(logits.max(1) * np.log2(np.e)), jnp.float32)
    static_args: dict[str, Any] = {"classes": 700, "vocab_axis": 0, "logit_scale": 1.0, "softcap": None, "rows": 160}
    static_args |= {"interpret": True}
    places = hopper_logits.chunk_places(y, 700, 160, 1)[0]
    found = hopper_logits.exponentials(
        x, w, None, ref_exponent, y, places, 0, stores=False, statistics=0, **static_args
    )
    at, has = (np.arange(160), np.maximum(y, 0)), np.asarray(y) >= 0
    row = jnp.arange(160)
    place = places[row // 64, y.clip(0) // 192].clip(0)
    sums = found.sums.sum(0)[:160]
    target_exp, target_logit = (
        jnp.where(has, value[place, row], 0.0) for value in (found.target_exp, found.target_logit)
    )
    assert (target_logit == np.where(has, logits[at], 0)).all()
    expected = np.where(has, np.exp2(logits[at] * np.log2(np.e) - np.asarray(ref_exponent)), 0)
    np.testing.assert_allclose(target_exp, expected, rtol=1e-3, atol=1e-30)
    assert (sums >= target_exp).all()
    found = hopper_logits.statistics(x, w, None, None, 0, 0, 0, weighted=False, statistics=0, target=y, **static_args)
    top, sum_exp, _, _, target_exp, target_logit, *_ = found
    assert top is not None
    assert target_exp is not None
    assert target_logit is not None
    assert sum_exp is not None
    assert (top == logits.max(1)).all()
    assert (target_logit == np.where(has, logits[at], 0)).all()
    np.testing.assert_allclose(target_exp, np.where(has, np.exp(logits[at] - logits.max(1)), 0), rtol=2e-6, atol=1e-30)
    assert (sum_exp >= target_exp).all()
    confident = np.asarray(y) == logits.argmax(1)
    nll, _ = row_math.nll_and_lse(sum_exp, target_exp, target_logit, top, jnp.log(sum_exp))
    assert_accurate(np.asarray(nll)[confident], logits[confident], y[confident])


def test_the_gradient_of_a_confident_token_is_accurate() -> None:
    """theta of the scaled exponentials is p - 1, which the difference of two float32 numbers near 1 would lose."""
    x, w, y = exact(160, 704)
    bias = jnp.zeros(704, jnp.float32)

    def loss(bias: Array) -> Array:
        return linear_cross_entropy(x, w, y, linear_bias=bias, reduction="sum", implementation="pallas_triton")

    nll = nll_of(logits_of(x, w), y)
    row = int(nll.argmin())
    x, y = x[row : row + 1], y[row : row + 1]
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(bias)[y[0]], np.expm1(-nll[row]), rtol=1e-3)


# Sizes at which an earlier version gave a loss below 0.


def check_at_size(implementation: str, dtype: str) -> None:
    x, w, y = drawn(512, 256, 4096, DTYPES[dtype])
    logits = logits_of(x, w)
    static_args: dict[str, Any] = {"implementation": implementation}
    budget = float(np.abs(nll_of(logits, y) - unfused_in_float32(x, w, y)).max())

    def close(name: str, found: Any, expected: Any) -> None:
        error = np.abs(np.asarray(found, np.float64) - expected).max()
        assert error <= 3 * budget + EPSILON, f"{name}: error {error:.1e} is {error / (3 * budget):.0%} of its budget"

    losses = linear_cross_entropy(x, w, y, reduction="none", **static_args)
    found = linear_log_probs(x, w, y, **static_args)
    mean, _ = jax.jit(jax.value_and_grad(lambda x, w: linear_cross_entropy(x, w, y, **static_args), argnums=(0, 1)))(
        x, w
    )
    for name, values in (("none", losses), ("log_probs", -found.log_prob), ("mean", mean)):
        assert (values >= 0).all(), f"{name}: {(values < 0).sum()} are below 0, the least is {values.min()}"
    expected = nll_of(logits, y)
    close("none", losses, expected)
    close("log_probs", -found.log_prob, expected)
    close("mean", mean, expected.mean())
    for size in (64.0, 8192.0):
        x, w, y = exact(512, 4096, DTYPES[dtype], size)
        confident = nll_of(logits_of(x, w), y) < 1.0
        losses = linear_cross_entropy(x, w, y, reduction="none", **static_args)
        assert_accurate(np.asarray(losses)[confident], logits_of(x, w)[confident], y[confident])
        log_prob = linear_log_probs(x, w, y, **static_args).log_prob
        assert_accurate(-np.asarray(log_prob)[confident], logits_of(x, w)[confident], y[confident])


def unfused_in_float32(x: Array, w: Array, y: Array) -> np.ndarray:
    """Returns the loss of each row from float32 logits that float32 matmuls compute."""
    with jax.default_matmul_precision("float32"):
        logits = x.astype(jnp.float32) @ w.astype(jnp.float32).T
    return unfused(np.asarray(logits, np.float64), y)


ON_A_GPU = {
    f"{implementation} {dtype}": partial(check_at_size, implementation, dtype)
    for implementation in ("mosaic", "pallas_triton", "chunked")
    for dtype in ("bfloat16", "float16")
}


@pytest.mark.gpu
@pytest.mark.programs(python(Path(__file__).name, *ON_A_GPU), seconds=60)
@pytest.mark.parametrize("name", ON_A_GPU)
def test_large_logits_on_a_gpu(name: str, printed: Printed) -> None:
    assert not printed[name]["failure"], printed[name]["failure"]


if __name__ == "__main__":
    run_checks(ON_A_GPU, sys.argv[1:])
