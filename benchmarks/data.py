r"""The law that the benchmark's arrays are drawn from, the same in both frameworks.

The weight's entries are normal with variance 1/D and the input's noise has variance 1, so logits of rows that have
nothing to do with each other are standard normal. "random" targets are uniform and the input is noise alone: the loss
is about :math:`\log V + 1/2`. "peaked" is a trained model's situation: targets follow a Zipf law, and each input leans
on its target's weight row,

.. math:: x_i = \epsilon_i + \lambda_i w_{y_i}, \qquad \lambda_i \sim U(0, \lambda_{\max}),

with :math:`\lambda_{\max}` such that the mean loss is 5. Leans that differ from row to row matter: a trained model is
nearly sure of some tokens and far off on others, and rounding hurts the two in different places.
"""

import math

import numpy as np

PEAKED_LOSS = 5.0
LOSS_DEVIATION = 3.0  # of one row's loss, about
ZIPF_SHIFT = 2.7  # of Mandelbrot's form of the law, which fits the most frequent words of English


def zipf_cdf(v: int) -> np.ndarray:
    """Returns the cumulative probabilities (V,) float64 of p(rank r) proportional to 1 / (r + 2.7), r from 1."""
    p = 1.0 / (np.arange(1, v + 1) + ZIPF_SHIFT)
    return np.cumsum(p) / p.sum()


def expected_loss(lean_max: float, d: int, v: int) -> float:
    """Returns the mean loss of leans uniform in [0, lean_max].

    A row of lean l has V - 1 logits of variance 1 + l**2 / D, and its target's logit is normal about l.
    """
    lean = np.linspace(0.0, lean_max, 101)[:, None]
    noise, mass = np.polynomial.hermite_e.hermegauss(15)
    log_others = math.log(max(v - 1, 1)) + (1 + lean**2 / d) / 2
    loss = np.logaddexp(0.0, log_others - (lean + noise))
    return float((loss @ (mass / mass.sum())).mean())


def lean_max(d: int, v: int, targets: str) -> float:
    """Returns the largest lean: 0 for "random" targets; for "peaked" the one whose mean loss is `PEAKED_LOSS`.

    A vocabulary so small that its loss lies below that without any lean gets none.
    """
    if targets == "random" or expected_loss(0.0, d, v) <= PEAKED_LOSS:
        return 0.0
    low, high = 0.0, 4 * math.log(v)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_loss(middle, d, v) > PEAKED_LOSS else (low, middle)
    return high


def check_loss(loss: float, rows: int, d: int, v: int, targets: str) -> None:
    """Raises ValueError if arrays that claim this law have another mean loss over `rows` sampled rows."""
    expected = expected_loss(lean_max(d, v, targets), d, v)
    tolerance = 0.2 + 3 * LOSS_DEVIATION / math.sqrt(rows)
    if not abs(loss - expected) <= tolerance:
        raise ValueError(
            f'loss of the "{targets}" arrays must be {expected:.2f} +- {tolerance:.2f} over {rows} rows, got {loss:.2f}'
        )
