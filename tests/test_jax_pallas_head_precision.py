"""Tests `head_precision` of jax_pallas: errors against a true float32 head, plans, and JAX's transforms. The cases of
parity compare values with the float64 reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax_problem import FUNCTIONS, gradients, problem, total

import jax_pallas
from jax_pallas.problem import halves

Arrays = dict[str, Any]


def float32_head(n: int = 12, d: int = 8, v: int = 50, vocab_axis: int = 0) -> Arrays:
    arrays = problem(n, d, v, bias=False, vocab_axis=vocab_axis)
    return arrays | {"input": arrays["input"].astype(jnp.bfloat16)}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("jit", [False, True])
def test_the_halves_have_sixteen_bits_of_a_weight(axis: int, jit: bool) -> None:
    """Compiled too: XLA removes conversions to bfloat16 and back, with which the second half would be 0."""
    w = np.random.default_rng(0).standard_normal((300, 40)).astype(np.float32) * 2.0 ** np.arange(-20, 20, dtype="f")

    def split(w: Array) -> Array:
        return halves(w, jnp.bfloat16, axis)

    assert "reduce_precision" in str(jax.make_jaxpr(split)(w))
    both = (jax.jit(split) if jit else split)(jnp.asarray(w))
    high, low = np.split(np.asarray(both.astype(jnp.float32), np.float64), 2, axis)
    assert np.array_equal(high, np.asarray(jnp.asarray(w, jnp.bfloat16).astype(jnp.float32), np.float64))
    assert np.all(abs(high + low - w) <= 2.0**-17 * abs(w))


def test_errors_against_a_true_float32_head() -> None:
    """The figures of docs/options.md."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((512, 1024)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((4096, 1024)) * 2.0 / 32.0, jnp.float32)  # logits of a standard deviation of 2
    target = rng.integers(0, 4096, 512)
    logits = np.asarray(x.astype(jnp.float32), np.float64) @ np.asarray(w, np.float64).T
    probs = np.exp(logits - logits.max(1, keepdims=True))
    d_logits = probs / probs.sum(1, keepdims=True) - np.eye(4096)[target]
    exact = logits[np.arange(512), target], d_logits @ np.asarray(w, np.float64)

    def errors(precision: Any) -> list[float]:
        def loss(x: Array) -> Any:
            options: Arrays = {"reduction": "sum", "head_precision": precision}
            return jax_pallas.linear_cross_entropy_with_stats(x, w, jnp.asarray(target), **options)

        (_, stats), d_input = jax.value_and_grad(loss, has_aux=True)(x)
        found = (np.asarray(a.astype(jnp.float32), np.float64) for a in (stats.target_logit, d_input))
        return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, exact, strict=True)]

    assert errors("input") == pytest.approx([1.7e-3, 2.4e-3], rel=0.1)
    assert errors("float32") == pytest.approx([2.4e-6, 1.7e-3], rel=0.1)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_input_is_the_default(function: str) -> None:
    arrays, names = float32_head(), ("input", "linear_weight")
    plain, same, split = (gradients(function, arrays, names, head_precision=p) for p in (None, "input", "float32"))
    assert all(jnp.array_equal(plain[name], same[name]) for name in names)
    assert not jnp.array_equal(plain["linear_weight"], split["linear_weight"])
    assert split["linear_weight"].dtype == jnp.float32


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_transforms(vocab_axis: int) -> None:
    arrays = float32_head(vocab_axis=vocab_axis)
    options: Arrays = {"vocab_axis": vocab_axis, "head_precision": "float32"}

    def loss(x: Array, w: Array) -> Array:
        return total("mean", arrays | {"input": x, "linear_weight": w}, **options)

    given = arrays["input"], arrays["linear_weight"]
    want = jax.value_and_grad(loss, (0, 1))(*given)
    for transformed in (jax.jit(loss), jax.checkpoint(loss)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-2, atol=1e-4),
            jax.value_and_grad(transformed, (0, 1))(*given),
            want,
        )
    found = jax.vmap(loss, (0, None))(jnp.stack([given[0]] * 2), given[1])
    np.testing.assert_allclose(found, want[0], rtol=1e-5)


def test_explain_names_the_matmuls() -> None:
    x, w = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((128256, 4096), jnp.float32)
    arrays: Any = x, w
    explained = str(jax_pallas.explain(*arrays, head_precision="float32", implementation="chunked"))
    assert "matmuls: logits high, logits low, d_input high, d_input low, d_weight by XLA" in explained
    explained = str(jax_pallas.explain(*arrays, head_precision="float32", device="h200"))
    assert "path: recompute: the gradients compute the logits again" in explained
    assert "matmuls: logits high, logits low by our kernels; d_input high, d_input low, d_weight by XLA" in explained


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": jnp.zeros((12, 8))}, "got a float32 linear_weight and a float32 input"),
        ({"linear_weight": jnp.zeros((50, 8), jnp.bfloat16)}, "got a bfloat16 linear_weight and a bfloat16 input"),
        ({"head_precision": "double"}, "head_precision must be one of 'input', 'float32', got 'double'"),
    ],
)
def test_what_it_does_not_serve_is_refused(changes: Arrays, message: str) -> None:
    call: Arrays = float32_head() | {"head_precision": "float32"} | changes
    with pytest.raises(ValueError, match=message):
        jax_pallas.linear_cross_entropy(**call)
