"""The one table of tolerances, and the measure of an error.

    budget = FACTOR * sqrt(1 + extra roundings) * error of the unfused computation in the same dtype + condition * floor

The unfused computation keeps float32 logits and rounds d_logits and the gradients to their dtype (`reference.unfused`).
Its error says what the dtype costs on these very arrays, so no budget is looser than the case demands. Roundings are
independent, so their errors add as squares: hence the root.

The largest rows of a gradient, those of the targets, dominate its error. Cases with targets of one class therefore also
have budgets for the errors of single rows (`row_errors`), by the same formula.
"""

import math
from typing import NamedTuple

import numpy as np

# An equally good computation in another order has other rounding errors. Over the every-day cases two such results
# differ by at most 5%. Over the exhaustive ones they differ by up to 20%, in the bias gradient of a sum over 50 tokens,
# where the norm of a rounding error comes from about fifty numbers and varies by a tenth.
FACTOR = 1.25

# Added to the budget of a gradient: where the unfused error is 0 or small by luck (few elements, powers of two)
# another order still rounds.
GRADIENT_FLOOR = {
    "float32": 1e-6,  # 8 ulp; the every-day cases use 5e-7 of it: two libraries' exp and log, sums of few terms
    "bfloat16": 1e-4,  # 1/40 ulp: one element in 1600 on the other side of a tie
    "float16": 1.2e-5,  # 1/40 ulp: the same
}

# Added to the budget of outputs that are float32 for every input dtype: the loss, lse, log-probabilities, statistics.
FLOAT32_FLOOR = 1e-6  # the every-day cases use 5e-7: a scalar's unfused error can be 0 by luck

# A norm this small is the float64 reference's own rounding of an exact zero: the error is then absolute.
ZERO_NORM = 1e-12

GRADIENTS = ("d_input", "d_weight", "d_bias", "d_advantage", "d_old_log_prob", "d_ref_log_prob")

# What the errors of a gradient's rows are called: a row of d_weight is a class, a row of d_input is a token.
ROW_NAMES = {"d_input": "d_input_row", "d_weight": "d_weight_class"}


class RowErrors(NamedTuple):
    """The median and the 95th percentile of the errors of a gradient's rows."""

    median: float
    p95: float


def budget(
    quantity: str, dtype: str, unfused_error: float, extra_roundings: float = 0, condition: float = 1.0
) -> float:
    """Returns the largest admitted error.

    Args:
        quantity: name of the output, "loss", "d_input", ...; the output's for errors of its rows.
        dtype: the input's dtype, which d_logits are rounded to; that of a gradient by a per-token array.
        unfused_error: `error` of the unfused computation of that output.
        extra_roundings: beyond those of the unfused computation (`Case.extra_roundings`).
        condition: by how much the output amplifies relative errors. Where it is one sum, that is the sum of the terms'
            magnitudes over the magnitude of their sum; for token losses see `token_losses.conditions`.

    Returns:
        The budget, in the units of `error`.
    """
    floor = GRADIENT_FLOOR[dtype] if quantity in GRADIENTS else FLOAT32_FLOOR
    return FACTOR * math.sqrt(1 + extra_roundings) * unfused_error + condition * floor


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
    return distance(got, want, want)


def row_errors(got: np.ndarray, want: np.ndarray) -> RowErrors:
    r"""Returns the median and the 95th percentile of the relative errors of a gradient's rows.

    The error of row i is the norm of what the row is off by, over the norm of the exact float64 row:

    .. math:: e_i = \|g_i - \hat g_i\|_2 / \|g_i\|_2, \qquad \|g_i\|_2 > 0.

    Rows whose exact gradient is zero are left out: padding of the vocabulary, ignored tokens. A row of d_weight is a
    class: e is the per-class error. A row of d_input is a token: e is the per-row error. Each row counts once, whatever
    its size, so the few rows with the targets' part do not hide the others.

    Args:
        got: (..., D), the gradient, :math:`\hat g`.
        want: (..., D), the exact gradient, :math:`g`.

    Returns:
        The two figures; zeros where every exact row is zero, and NaN or inf where a row that counts has NaN or inf.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> row_errors(np.array([[3.0, 4.5], [1.0, 0.0]]), np.array([[3.0, 4.0], [0.0, 0.0]]))
        RowErrors(median=0.1, p95=0.1)
    """
    if got.shape != want.shape:
        raise ValueError(f"array must have shape {want.shape}, got {got.shape}")
    got, want = (np.asarray(side, np.float64).reshape(-1, side.shape[-1]) for side in (got, want))
    norms = np.linalg.norm(want, axis=1)
    counted = norms > 0
    if not counted.any():
        return RowErrors(0.0, 0.0)
    errors = np.linalg.norm(got[counted] - want[counted], axis=1) / norms[counted]
    return RowErrors(float(np.median(errors)), float(np.percentile(errors, 95)))


def distance(left: np.ndarray, right: np.ndarray, truth: np.ndarray) -> float:
    """Returns `||left - right|| / ||truth||` where the truth is finite, inf if either has other NaN or infinities.

    Args:
        left: any shape.
        right: the same shape.
        truth: the same shape.

    Returns:
        The relative distance; the absolute one where `truth` is zero.

    Raises:
        ValueError: the shapes differ.
    """
    truth = np.asarray(truth, np.float64)
    finite = np.isfinite(truth)
    sides = []
    for side in (left, right):
        side = np.asarray(side, np.float64)
        if side.shape != truth.shape:
            raise ValueError(f"array must have shape {truth.shape}, got {side.shape}")
        if not np.array_equal(side[~finite], truth[~finite], equal_nan=True) or not np.isfinite(side[finite]).all():
            return np.inf
        sides.append(side[finite])
    norm = np.linalg.norm(truth[finite])
    apart = np.linalg.norm(sides[0] - sides[1])
    return float(apart / norm if norm > ZERO_NORM else apart)
