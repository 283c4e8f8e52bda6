"""Tests the float32 matmuls of jax_pallas in NumPy. test_jax_pallas_gpu_float32_matmuls.py tests them on a GPU."""

import itertools
from unittest import mock

import jax
import numpy as np
import pytest

from jax_pallas import float32_matmuls

SHAPES = [(5, 100, 3), (5, 80, 3), (64, 96, 64), (33, 50, 1)]  # rows, inner and columns; programs share the second


@pytest.mark.parametrize("axes", [*itertools.product((0, 1), repeat=2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_matmuls_are_those_of_float64(shape: tuple[int, int, int], axes: tuple[int, int]) -> None:
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
    want = np.tensordot(a.astype(np.float64), b.astype(np.float64), ((axes[0],), (axes[1],)))
    with (
        mock.patch.object(float32_matmuls, "FLOAT32_BLOCK", 32),
        mock.patch.object(float32_matmuls, "BLOCK_K", 16),
        mock.patch.object(float32_matmuls, "LEAST_INNER", 32),
    ):
        parts = float32_matmuls.parts_of(rows, columns, inner, 3, float32_matmuls.FLOAT32_WAVES)
        assert (parts > 1) == (inner in (100, 80, 96))
        for given in (None, total):
            call = jax.jit(lambda a, b, given: float32_matmuls.add_matmul(given, a, b, axes, programs=3))
            found = call(a, b, given)
            assert found is not None
            np.testing.assert_allclose(found, want if given is None else want + given, rtol=0, atol=1e-5)


def test_parts_are_about_whole_waves() -> None:
    sizes = {(768, 896, 151936): 3, (384, 2304, 256000): 7, (768, 4096, 128256): 2, (896, 4096, 128256): 1}
    assert {size: float32_matmuls.parts_of(*size, 132, 3) for size in sizes} == sizes
    assert float32_matmuls.parts_of(768, 151936, 896, 132, 3) == 1
    assert float32_matmuls.parts_of(128, 896, 151936, 132, 0) == 0, "seven programs: XLA's GEMM is faster"
