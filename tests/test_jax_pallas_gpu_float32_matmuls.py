"""Tests the float32 matmuls of jax_pallas on an NVIDIA GPU. Run with `pytest -m gpu`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jax_pallas import linear_cross_entropy
from jax_pallas.problem import float32_matmul
from linear_ce import float32_tiles

pytestmark = pytest.mark.gpu

SHAPES = [(257, 896, 1000), (300, 20011, 130), (1000, 384, 515)]  # rows, inner and columns; programs share the second
multiply = jax.jit(float32_matmul, static_argnames=("contract", "programs"))


def matrix(seed: int, shape: tuple[int, int], axis: int, exponents: int = 0) -> Array:
    """Returns normal numbers, times powers of two of up to so many binary digits, contracted over this axis."""
    generator = np.random.default_rng(seed)
    numbers = np.ldexp(
        generator.standard_normal(shape, np.float32), generator.integers(-exponents, exponents, shape, endpoint=True)
    )
    return jnp.asarray(numbers if axis == 1 else numbers.T)


def error(found: Array, a: Array, b: Array, axes: tuple[int, int]) -> float:
    """Returns the largest error of a sum, relative to the sum of the magnitudes of its products."""
    left, right = (np.asarray(array, np.float64) for array in (a, b))
    exact, magnitude = (
        np.tensordot(change(left), change(right), ((axes[0],), (axes[1],))) for change in (np.asarray, np.abs)
    )
    return float((np.abs(np.asarray(found, np.float64) - exact) / magnitude).max())


@pytest.mark.parametrize("exponents", [0, 12])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axes", [(1, 1), (1, 0), (0, 0)])
def test_errors_are_at_most_twice_those_of_xla(
    shape: tuple[int, int, int], axes: tuple[int, int], exponents: int
) -> None:
    rows, inner, columns = shape
    a = matrix(0, (rows, inner), axes[0], exponents)
    b = matrix(1, (columns, inner), axes[1], exponents)
    ours, xla = (multiply(a, b, contract=axes, programs=programs) for programs in (132, 0))
    assert float32_tiles.parts_of(rows, columns, inner, 132, 3) > 0
    allowed = max(2 * error(xla, a, b, axes), 2.0**-22)
    assert error(ours, a, b, axes) <= allowed
    again = multiply(a, b, contract=axes, programs=132, total=ours)
    assert error(again / 2, a, b, axes) <= allowed


def test_infinite_numbers_and_nan_are_where_those_of_xla_are() -> None:
    a, b = np.array(matrix(0, (130, 200), 1)), np.array(matrix(1, (140, 200), 1)).T
    a[3, 5], a[129, 199], b[7, 11], b[8, 12] = np.inf, -np.inf, np.nan, 0.0
    b[5, 20] = 0.0
    ours, xla = (multiply(a, b, contract=(1, 0), programs=programs) for programs in (132, 0))
    np.testing.assert_allclose(ours, xla, rtol=1e-4, atol=1e-4)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"linear_bias": True, "logit_scale": 0.7, "softcap": 5.0},
    {"logit_scale": 0.7},
    {"reduction": "none"},
    {"reduction": "none", "saved_budget": 2**27},
    {"grad_into": True},
]


@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_several_chunks_are_those_of_float64(options: dict[str, Any], vocab_axis: int) -> None:
    """The kernel adds to d_weight in the loop over chunks. The reference is NumPy's, in float64."""
    generator = np.random.default_rng(0)
    n, hidden, vocab = 1000, 192, 20011
    x, w = generator.standard_normal((n, hidden), np.float32), generator.standard_normal((vocab, hidden), np.float32)
    bias, into = generator.standard_normal(vocab, np.float32), generator.standard_normal((vocab, hidden), np.float32)
    target, upstream = generator.integers(0, vocab, n), generator.standard_normal(n, np.float32)
    given = {name: value for name, value in options.items() if value is not True} | {"vocab_axis": vocab_axis}
    turned = (lambda head: head.T) if vocab_axis else (lambda head: head)
    if "linear_bias" in options:
        given["linear_bias"] = jnp.asarray(bias)
    if "grad_into" in options:
        given["grad_into"] = jnp.asarray(turned(into))
    each = options.get("reduction") == "none"

    def loss(x: Array, w: Array) -> Any:
        found = linear_cross_entropy(x, w, jnp.asarray(target), memory_budget=2**26, **given)
        return (found * upstream).sum() if each else found

    has_aux = "grad_into" in options
    call = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=has_aux))
    arrays = jnp.asarray(x), jnp.asarray(turned(w))
    assert "float32_matmul_kernel" in call.lower(*arrays).as_text()
    value, (d_input, d_weight) = call(*arrays)
    if has_aux:
        value, d_weight = value
    scale, softcap = options.get("logit_scale", 1.0), options.get("softcap")
    logits = (x.astype(np.float64) @ w.astype(np.float64).T + bias * ("linear_bias" in options)) * scale
    slope = np.full_like(logits, scale)
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
        slope *= 1 - (logits / softcap) ** 2
    lse = np.logaddexp.reduce(logits, 1)
    weight = upstream.astype(np.float64) if each else np.full(n, 1 / n)
    d_logits = np.exp(logits - lse[:, None])
    d_logits[np.arange(n), target] -= 1
    d_logits *= weight[:, None] * slope
    want = {
        "loss": ((lse - logits[np.arange(n), target]) * weight).sum(),
        "d_input": d_logits @ w,
        "d_weight": d_logits.T @ x + into * has_aux,
    }
    for name, found in zip(want, (value, d_input, turned(np.asarray(d_weight))), strict=True):
        error = np.linalg.norm(np.asarray(found, np.float64) - want[name]) / np.linalg.norm(want[name])
        assert error <= 1e-5, f"{name}: {error / 1e-5:.0%} of the allowed error"


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_a_call_multiplies_by_the_kernel_unless_a_precision_is_set(vocab_axis: int) -> None:
    x, w, target = jnp.ones((4096, 256)), jnp.ones((50304, 256)), jnp.zeros(4096, int)
    w = w if vocab_axis == 0 else w.T
    loss = partial(linear_cross_entropy, vocab_axis=vocab_axis)
    programs = []
    for precision in (None, "highest"):
        with jax.default_matmul_precision(precision):
            programs.append(jax.jit(jax.grad(loss, (0, 1))).lower(x, w, target).as_text())
    assert ["float32_matmul_kernel" in program for program in programs] == [True, False]
