"""Tests unusual arguments: 64-bit integers that do not fit into 32 bits, and unsupported dtypes."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_pallas.linear_ce import linear_cross_entropy

RANDOM = np.random.default_rng(0)
X, W = RANDOM.standard_normal((12, 8), np.float32), RANDOM.standard_normal((50, 8), np.float32)
Y = RANDOM.integers(0, 50, 12)


def loss(target: Any, **options: Any) -> np.ndarray:
    return np.asarray(linear_cross_entropy(X, W, target, reduction="none", **options))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32, np.int16, np.uint8])
def test_integers_of_every_width(dtype: Any) -> None:
    assert np.array_equal(loss(Y.astype(dtype)), loss(Y.astype(np.int32)))


@pytest.mark.parametrize(
    "bad", [np.int64(2**32), np.int64(-(2**40)), np.uint64(2**32), np.uint64(2**63), np.uint32(2**31)], ids=repr
)
def test_a_target_outside_int32_is_not_a_class(bad: np.integer[Any]) -> None:
    """JAX keeps the lowest 32 bits of NumPy's 64-bit integers, which would make 2**32 class 0."""
    target = Y.astype(bad.dtype)
    target[3] = bad
    found = loss(target)
    assert np.isnan(found[3])
    assert np.array_equal(np.delete(found, 3), np.delete(loss(Y), 3))


def test_a_target_that_wraps_to_ignore_index_is_not_ignored() -> None:
    target = Y.copy()
    target[3] = 2**32 - 100
    assert np.isnan(loss(target)[3])


def test_an_ignore_index_that_no_target_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match=f"ignore_index must fit int32.* got {2**40}"):
        loss(Y, ignore_index=2**40)


@pytest.mark.parametrize("order", [">", "<"])
def test_byte_orders(order: str) -> None:
    if np.dtype(f"{order}f4").isnative:
        assert np.array_equal(linear_cross_entropy(X.astype(f"{order}f4"), W, Y), linear_cross_entropy(X, W, Y))  # pyright: ignore[reportArgumentType]
        return
    with pytest.raises(TypeError, match="input must be float16 or bfloat16 or float32, got >f4"):
        linear_cross_entropy(X.astype(">f4"), W, Y)  # pyright: ignore[reportArgumentType]


def test_four_bits() -> None:
    assert np.array_equal(loss(jnp.asarray(Y % 8, jnp.int4)), loss(Y % 8))
