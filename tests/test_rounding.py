"""Tests rounding to the 16-bit dtypes in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as numpy_arrays

from linear_ce.rounding import round_to


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@given(values=numpy_arrays(np.uint32, 64, elements=st.integers(0, 2**32 - 1)))
def test_rounding_is_that_of_pytorch(dtype: str, values: np.ndarray) -> None:
    single = values.view(np.float32)
    want = torch.tensor(single).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(round_to(single, dtype), want)


def test_ties_round_to_even() -> None:
    ulp = 2.0**-7
    np.testing.assert_array_equal(
        round_to(np.array([1 + ulp / 2, 1 + 3 * ulp / 2]), "bfloat16"), [1.0, np.float32(1 + 2 * ulp)]
    )


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype must be .* got 'float8'"):
        round_to(np.zeros(1), "float8")
