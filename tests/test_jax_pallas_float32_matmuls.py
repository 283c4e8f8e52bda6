"""Tests the float32 matmuls of jax_pallas in NumPy. test_jax_pallas_gpu_float32_matmuls.py tests them on a GPU."""

import itertools

import jax
import numpy as np
import pytest

from jax_pallas import float32_matmuls
from linear_ce import float32_tiles

SHAPES = [(5, 100, 3), (5, 80, 3), (64, 96, 64), (33, 50, 1)]  # rows, inner and columns; programs share the second


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_tiles, "BLOCK", 32)
    monkeypatch.setattr(float32_tiles, "BLOCK_K", 16)
    monkeypatch.setattr(float32_tiles, "LEAST_INNER", 32)


def multiplied(a: np.ndarray, b: np.ndarray, total: np.ndarray | None, axes: tuple[int, int]) -> np.ndarray:
    call = jax.jit(lambda a, b, total: float32_matmuls.add_matmul(total, a, b, axes, programs=3))
    found = call(a, b, total)
    assert found is not None
    assert found.dtype == np.float32
    return np.asarray(found)


@pytest.mark.parametrize("axes", [*itertools.product((0, 1), repeat=2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_are_those_of_float32(shape: tuple[int, int, int], axes: tuple[int, int]) -> None:
    rows, inner, columns = shape
    generator = np.random.default_rng(0)
    a, b, total = (
        generator.standard_normal(shape, np.float32)
        for shape in (
            (rows, inner) if axes[0] else (inner, rows),
            (columns, inner) if axes[1] else (inner, columns),
            (rows, columns),
        )
    )
    parts = float32_tiles.parts_of(rows, columns, inner, 3, float32_tiles.WAVES)
    assert (parts > 1) == (inner in (100, 80, 96))
    exact, magnitude = (
        np.tensordot(change(a.astype(np.float64)), change(b.astype(np.float64)), ((axes[0],), (axes[1],)))
        for change in (np.asarray, np.abs)
    )
    for given in (None, total):
        start = 0.0 if given is None else given.astype(np.float64)
        error = np.abs(multiplied(a, b, given, axes) - (exact + start)) / (magnitude + np.abs(start))
        assert error.max() <= 2.0**-22, f"{error.max() * 2**22:.0%} of the allowed error"


def test_infinite_numbers_and_nan_are_where_those_of_numpy_are() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((40, 50), np.float32), generator.standard_normal((50, 35), np.float32)
    a[3, 5], a[39, 49], b[7, 11], b[8, 12] = np.inf, -np.inf, np.nan, 0.0
    b[5, 20] = 0.0
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(multiplied(a, b, None, (1, 0)), a @ b, rtol=1e-4, atol=1e-4)
