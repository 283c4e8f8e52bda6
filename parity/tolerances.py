"""The one table of tolerances, and the measure of an error.

    budget = FACTOR * error of the unfused computation in the same dtype + floor

The unfused computation keeps float32 logits and rounds d_logits and the gradients to their dtype (`reference.unfused`).
Its error says what the dtype costs on these very arrays, so no budget is looser than the case demands.
"""

import numpy as np

# An equally good computation in another order of summation draws its roundings anew: over the every-day cases two
# such orders differ by at most 15% where rounding to 16 bits rules the error. Below 1.25 luck decides.
FACTOR = 1.25

# Added to the budget of a gradient: where the unfused error is 0 or tiny by luck (few elements, all of them
# powers of two), another order still rounds. In units of the dtype's last place at 1: 2**-23, 2**-8, 2**-11.
GRADIENT_FLOOR = {
    "float32": 3e-6,  # 25 ulp: sums of a thousand float32 terms, exp and log of two different libraries
    "bfloat16": 2e-4,  # 1/20 ulp: one element in four hundred on the other side of a tie
    "float16": 3e-5,  # 1/16 ulp: the same
}

# Added to the budget of what is float32 whatever the input is: the loss, lse, log-probabilities, statistics.
FLOAT32_FLOOR = 3e-6

# A norm this small is the float64 reference's own rounding of an exact zero: the error is then absolute.
ZERO_NORM = 1e-12

GRADIENTS = ("d_input", "d_weight", "d_bias")


def budget(quantity: str, dtype: str, unfused_error: float) -> float:
    """Returns the largest admitted error.

    Args:
        quantity: name of the output, "loss", "d_input", ...
        dtype: the input's dtype, which d_logits are rounded to.
        unfused_error: `error` of the unfused computation of that output.

    Returns:
        The budget, in the units of `error`.
    """
    floor = GRADIENT_FLOOR[dtype] if quantity in GRADIENTS else FLOAT32_FLOOR
    return FACTOR * unfused_error + floor


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Returns `||got - want|| / ||want||` over the finite elements, or inf where NaN or an infinity is out of place.

    Args:
        got: any shape.
        want: the same shape.

    Returns:
        The relative error; the absolute one where `want` is zero.

    Raises:
        ValueError: the shapes differ.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"got must have shape {want.shape}, got {got.shape}")
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True) or not np.all(np.isfinite(got[finite])):
        return np.inf
    distance, norm = np.linalg.norm(got[finite] - want[finite]), np.linalg.norm(want[finite])
    return float(distance / norm if norm > ZERO_NORM else distance)
