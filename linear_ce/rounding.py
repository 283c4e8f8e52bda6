"""Rounding to the storage dtypes in NumPy. It has no bfloat16, so the rounded values are kept in float32 arrays."""

import numpy as np


def round_to(array: np.ndarray, dtype: str) -> np.ndarray:
    """Returns `array` rounded to the nearest value of `dtype`, ties to even.

    Args:
        array: any shape, float32 or float64.
        dtype: "float16", "bfloat16", "float32" or "float64".

    Returns:
        The rounded values, in a float64 array for "float64" and in a float32 array otherwise.

    Raises:
        ValueError: `dtype` is not one of the four.
    """
    if dtype == "float64":
        return np.asarray(array, np.float64)
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"dtype must be 'float16', 'bfloat16', 'float32' or 'float64', got {dtype!r}")
    with np.errstate(over="ignore", under="ignore"):
        if dtype == "float16":
            return np.asarray(array).astype(np.float16).astype(np.float32)
        single = np.asarray(array, np.float32)
    if dtype == "float32":
        return single
    bits = single.view(np.uint32)
    to_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + to_even) & np.uint32(0xFFFF0000)).view(np.float32)
    # The carry would turn some NaNs into infinities or zeros.
    return np.where(np.isnan(single), np.float32(np.nan), rounded)


def split_head(array: np.ndarray, dtype: str) -> np.ndarray:
    """Returns float32 numbers rounded to the sum of two numbers of `dtype`, float32: MATH.md (39)."""
    high = round_to(array, dtype)
    with np.errstate(invalid="ignore"):  # infinities in padding
        return high + round_to(np.asarray(array, np.float32) - high, dtype)
