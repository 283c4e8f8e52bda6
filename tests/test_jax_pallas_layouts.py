"""Every array argument gives bitwise the same result in every layout as its contiguous copy."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding
from jax_problem import replaced
from programs import Printed, each, python, run_checks

from jax_pallas.linear_ce import linear_cross_entropy, linear_cross_entropy_with_stats, linear_log_probs

NAMES = ("input", "linear_weight", "target", "linear_bias", "weight", "token_weight")


def drawn(dtype: Any, vocab_axis: int, n: int = 24, d: int = 64, v: int = 128) -> dict[str, Any]:
    random = np.random.default_rng(0)
    arrays = {
        "input": jnp.asarray(random.standard_normal((n, d)), dtype),
        "linear_weight": jnp.asarray(random.standard_normal((v, d) if vocab_axis == 0 else (d, v)), dtype),
        "target": replaced(random.integers(0, v, n), 3, -100),
        "linear_bias": jnp.asarray(random.standard_normal(v), jnp.float32),
        "weight": jnp.asarray(random.uniform(0.5, 2, v), jnp.float32),
        "token_weight": jnp.asarray(random.uniform(0.5, 2, n), jnp.float32),
    }
    return {**arrays, "vocab_axis": vocab_axis}


def call(function: str, arrays: dict[str, Any], implementation: str) -> Any:
    """Returns the results of a function and its gradients."""
    rest = {**arrays, "implementation": implementation}
    if function == "log_probs":
        del rest["weight"], rest["token_weight"]
    given = {name: rest.pop(name) for name in ("input", "linear_weight", "linear_bias")}

    def total(given: dict[str, Array]) -> tuple[Array, Any]:
        if function == "log_probs":
            found = linear_log_probs(**given, **rest)
            return found.log_prob.sum() + found.entropy.sum(), found
        if function == "mean":
            return linear_cross_entropy_with_stats(**given, **rest)
        found = linear_cross_entropy(**given, **rest, reduction="none")
        return found.sum(), found

    return jax.value_and_grad(total, has_aux=True)(given)


# Layouts made within a program: the same values in other memory.

FILLER = 7


def sliced(a: Array) -> Array:
    return jnp.concatenate([jnp.full_like(a, FILLER), a, jnp.full_like(a, FILLER)])[len(a) : 2 * len(a)]


def strided(a: Array) -> Array:
    return jnp.stack([a, jnp.full_like(a, FILLER)], 1).reshape(-1, *a.shape[1:])[::2]


def dynamically_sliced(a: Array) -> Array:
    around = jnp.concatenate([jnp.full_like(a[:3], FILLER), a, jnp.full_like(a[:5], FILLER)])
    return lax.dynamic_slice_in_dim(around, jnp.int32(3), len(a))


def reversed_(a: Array) -> Array:
    return jnp.flip(lax.optimization_barrier(jnp.flip(a, 0)), 0)


def transposed(a: Array) -> Array:
    return lax.optimization_barrier(a.T).T


INSIDE = {f.__name__: f for f in (sliced, strided, dynamically_sliced, reversed_, transposed)}


# Layouts of a program's arguments.


def numpy_strided(a: Array) -> Any:
    return np.stack([np.asarray(a), np.full_like(np.asarray(a), FILLER)], -1)[..., 0]


def numpy_reversed(a: Array) -> Any:
    return np.ascontiguousarray(np.asarray(a)[::-1])[::-1]


def numpy_fortran(a: Array) -> Any:
    return np.asfortranarray(np.asarray(a))


def numpy_at_an_odd_offset(a: Array) -> Any:
    own = np.asarray(a)
    memory = np.zeros(own.nbytes + 1, np.uint8)
    found = memory[1:].view(own.dtype).reshape(own.shape) if own.nbytes else own
    found[...] = own
    return found


def column_major(a: Array) -> Any:
    layout = Layout(major_to_minor=tuple(reversed(range(a.ndim))))
    return jax.device_put(a, Format(layout, SingleDeviceSharding(next(iter(a.devices())))))


OUTSIDE = {f.__name__: f for f in (numpy_strided, numpy_reversed, numpy_fortran, numpy_at_an_odd_offset, column_major)}


def check(
    function: str,
    implementation: str,
    dtype: Any,
    vocab_axis: int,
    layouts: dict[str, Callable[[Array], Any]],
    *,
    eager: bool = True,
) -> None:
    """Compares each argument in each layout with its contiguous copy, made within a program or passed to it.

    Without `eager`, the tests of single arguments also call the compiled program, which saves compilations.
    """
    arrays = drawn(dtype, vocab_axis)
    others = {"vocab_axis": arrays.pop("vocab_axis")}
    run = jax.jit(lambda arrays: call(function, {**arrays, **others}, implementation))
    expected = run(arrays)
    expected_eager = call(function, {**arrays, **others}, implementation) if eager else expected
    for layout, made in layouts.items():
        every = {name: made(array) for name, array in arrays.items()}
        if layout in OUTSIDE:
            same(run(every), expected, layout)
        else:
            same(jax.jit(partial(within, made, run))(arrays), expected, layout)
        for name in arrays:
            one = {**arrays, name: every[name]}
            found = call(function, {**one, **others}, implementation) if eager else run(one)
            same(found, expected_eager, f"{layout} {name}")


def within(made: Callable[[Array], Any], run: Any, arrays: dict[str, Array]) -> Any:
    """Makes the arrays and calls a function in one program, with a barrier that keeps XLA from fusing the two."""
    return run(lax.optimization_barrier({name: made(array) for name, array in arrays.items()}))


def same(found: Any, expected: Any, what: str) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True), f"{what}: differs in {one.shape}"


LAYOUTS = {**INSIDE, **OUTSIDE}


SLOW = pytest.mark.slow


@SLOW
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize(
    ("function", "implementation"), [("mean", "chunked"), ("log_probs", "chunked"), ("none", "pallas_triton")]
)
def test_layouts(function: str, implementation: str, vocab_axis: int) -> None:
    check(function, implementation, jnp.bfloat16, vocab_axis, LAYOUTS)


def test_a_few_layouts_of_a_compiled_program() -> None:
    few = {f.__name__: f for f in (strided, numpy_strided, numpy_fortran)}
    check("mean", "chunked", jnp.bfloat16, 1, few, eager=False)


@pytest.mark.parametrize("implementation", ["chunked", "pallas_triton"])
def test_a_bias_that_is_broadcast(implementation: str) -> None:
    arrays = drawn(jnp.bfloat16, 0)
    one = jnp.float32(0.5)
    for expanded in (jnp.broadcast_to(one, (128,)), np.broadcast_to(np.float32(0.5), (128,))):
        found, expected = (
            call("mean", {**arrays, "linear_bias": bias}, implementation) for bias in (expanded, jnp.full(128, one))
        )
        same(found, expected, "broadcast")


ON_A_GPU = {
    f"{function} {implementation} {vocab_axis}": partial(
        check, function, implementation, jnp.bfloat16, vocab_axis, LAYOUTS, eager=False
    )
    for function, implementation, vocab_axis in (
        ("mean", "mosaic", 0),
        ("mean", "mosaic", 1),
        ("none", "mosaic", 0),
        ("log_probs", "mosaic", 1),
        ("mean", "pallas_triton", 0),
        ("mean", "chunked", 1),
    )
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", each({name: python(Path(__file__).name, name) for name in ON_A_GPU}, seconds=90))
def test_layouts_on_a_gpu(name: str, printed: Printed) -> None:
    assert not printed[name]["failure"], printed[name]["failure"]


if __name__ == "__main__":
    run_checks(ON_A_GPU, sys.argv[1:])
