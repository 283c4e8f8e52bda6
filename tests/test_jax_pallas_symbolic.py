"""Tests jax.export with a symbolic number of tokens: "chunked" supports it, and the kernels refuse it by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, export
from jax_problem import problem, replaced

from jax_pallas.linear_ce import explain, linear_cross_entropy, linear_cross_entropy_with_stats, linear_log_probs

SYMBOLIC = "input has a symbolic number of tokens"


def everything(function: str, arrays: dict[str, Any], **options: Any) -> Any:
    """Returns the results of a function and the gradients of their sum."""

    def total(x: Array, w: Array, bias: Array) -> tuple[Array, Any]:
        others = {"linear_bias": bias, "target": arrays["target"], **options}
        if function == "log_probs":
            found = tuple(linear_log_probs(x, w, **others))
        elif function == "stats":
            found = linear_cross_entropy_with_stats(x, w, **others)
        else:
            found = linear_cross_entropy(x, w, reduction=function, **others)  # pyright: ignore[reportArgumentType]
        counted = found[0] if function == "stats" else found
        return sum(leaf.sum() for leaf in jax.tree.leaves(counted)), found  # pyright: ignore[reportReturnType]

    given = arrays["input"], arrays["linear_weight"], arrays["linear_bias"]
    return jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*given)


def exported(function: Any, arrays: dict[str, Any], leading: str) -> export.Exported:
    dims = export.symbolic_shape(leading)
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    shapes["input"] = jax.ShapeDtypeStruct((*dims, arrays["input"].shape[-1]), arrays["input"].dtype)
    shapes["target"] = jax.ShapeDtypeStruct(dims, arrays["target"].dtype)
    return export.export(jax.jit(function), platforms=["cpu"])(shapes)


FEW, MANY = (1037,), (1, 15, 40)  # numbers of tokens: many chunks, and one chunk


@pytest.mark.parametrize(
    ("function", "numbers"),
    [
        ("log_probs", FEW),
        ("stats", FEW),
        *(pytest.param(function, FEW + MANY, marks=pytest.mark.slow) for function in ("mean", "none")),
        *(pytest.param(function, MANY, marks=pytest.mark.slow) for function in ("log_probs", "stats")),
    ],
)
def test_any_number_of_tokens(function: str, numbers: tuple[int, ...]) -> None:
    arrays = problem(40, 64, 1000)
    options: dict[str, Any] = {"memory_budget": 2**18, "ignore_index": 7}  # several chunks of both axes

    def call(arrays: dict[str, Any]) -> Any:
        return everything(function, arrays, **options)

    program = exported(call, arrays, "n")
    for tokens in numbers:
        some = problem(tokens, 64, 1000)
        some["target"] = replaced(some["target"], tokens // 2, 7)
        got, want = program.call(some), jax.jit(call)(some)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_symbolic_batch_in_float16() -> None:
    arrays = problem(12, 8, 50, dtype=jnp.float16)
    batch = {**arrays, "input": arrays["input"].reshape(3, 4, 8), "target": arrays["target"].reshape(3, 4)}
    program = exported(lambda arrays: everything("mean", arrays, label_smoothing=0.1), batch, "b, t")
    for one, other in zip(
        jax.tree.leaves(program.call(batch)),
        jax.tree.leaves(everything("mean", batch, label_smoothing=0.1)),
        strict=True,
    ):
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("implementation", ["mosaic", "pallas_triton"])
def test_kernels_refuse_it_by_name(implementation: str) -> None:
    arrays = problem(40, 64, 128, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=f"{implementation}.*{SYMBOLIC}"):
        exported(lambda arrays: linear_cross_entropy(**arrays, implementation=implementation), arrays, "n")


def test_explain_says_why() -> None:
    found: list[Any] = []

    def call(arrays: dict[str, Any]) -> Array:
        found.append(explain(arrays["input"], arrays["linear_weight"]))
        return linear_cross_entropy(**arrays)

    exported(call, problem(), "n")
    assert found[0].name == "chunked"
    assert found[0].reason.startswith(SYMBOLIC)


def test_a_symbolic_vocabulary_is_refused() -> None:
    arrays = problem(bias=False)
    (vocab,) = export.symbolic_shape("v")
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    shapes["linear_weight"] = jax.ShapeDtypeStruct((vocab, 8), jnp.float32)
    with pytest.raises(ValueError, match="linear_weight must have a known hidden size and vocabulary"):
        export.export(jax.jit(lambda arrays: linear_cross_entropy(**arrays)))(shapes)
