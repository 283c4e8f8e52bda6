"""Tests unusual arguments: 64-bit integers that do not fit into 32 bits, and unsupported dtypes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jax_pallas.linear_ce import linear_cross_entropy

RANDOM = np.random.default_rng(0)
X, W = RANDOM.standard_normal((12, 8), np.float32), RANDOM.standard_normal((50, 8), np.float32)
Y = RANDOM.integers(0, 50, 12)


def loss_of(target: Any, **options: Any) -> Array:
    return linear_cross_entropy(X, W, target, reduction="none", **options)  # pyright: ignore[reportArgumentType]


def loss(target: Any, **options: Any) -> np.ndarray:
    return np.asarray(loss_of(target, **options))


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


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint8])
def test_an_ignore_index_that_no_target_can_have_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=f"ignore_index must fit {np.dtype(dtype)}, which targets have, got {2**40}"):
        loss(Y.astype(dtype), ignore_index=2**40)


BEYOND_INT32 = [
    *(np.uint32(2**31 - 1), np.uint32(2**31), np.uint32(2**32 - 2), np.uint32(2**32 - 1)),
    *(np.uint64(2**31 - 1), np.uint64(2**32), np.uint64(2**63 - 1), np.uint64(2**64 - 1)),
    *(np.int64(2**31 - 1), np.int64(2**40), np.int64(-(2**31)), np.int64(-(2**40)), np.int64(-1), np.int64(-2)),
]


@pytest.mark.parametrize("held", BEYOND_INT32, ids=repr)
@pytest.mark.parametrize("on_device", [False, True], ids=["numpy", "jax"])
def test_only_targets_equal_to_ignore_index_are_ignored(held: np.integer[Any], on_device: bool) -> None:
    """Targets that int32 cannot represent, and that are not classes, are not equal after a conversion."""
    values = [int(one) for one in BEYOND_INT32 if one.dtype == held.dtype and one < 2**63]
    with jax.enable_x64(on_device and held.dtype.itemsize == 8):
        for ignore_index in {*values, -100, 7}:
            target = np.where(Y == 7, 8, Y).astype(held.dtype)
            target[3], target[4] = held, 7
            given: Any = jnp.asarray(target) if on_device else target
            found = loss(given, ignore_index=ignore_index)
            assert np.isnan(found).tolist() == [row == 3 and ignore_index != held for row in range(12)]
            assert (found == 0).tolist() == [one == ignore_index for one in target.tolist()]


def test_an_ignored_target_beyond_int32_within_a_trace() -> None:
    target = Y.astype(np.uint32)
    target[:2] = 2**32 - 1, 2**31 - 1
    for ignore_index, first in ((2**32 - 1, [0.0, np.nan]), (2**31 - 1, [np.nan, 0.0])):
        found = jax.jit(partial(loss_of, ignore_index=ignore_index))(jnp.asarray(target))
        np.testing.assert_allclose(found, [*first, *loss(Y)[2:]], rtol=1e-6)


@pytest.mark.parametrize("order", [">", "<"])
def test_byte_orders(order: str) -> None:
    if np.dtype(f"{order}f4").isnative:
        assert np.array_equal(linear_cross_entropy(X.astype(f"{order}f4"), W, Y), linear_cross_entropy(X, W, Y))  # pyright: ignore[reportArgumentType]
        return
    with pytest.raises(TypeError, match="input must be float16 or bfloat16 or float32, got >f4"):
        linear_cross_entropy(X.astype(">f4"), W, Y)  # pyright: ignore[reportArgumentType]


def test_four_bits() -> None:
    assert np.array_equal(loss(jnp.asarray(Y % 8, jnp.int4)), loss(Y % 8))
