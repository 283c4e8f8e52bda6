r"""The distributions that the benchmark's arrays are drawn from, the same in both frameworks.

The weight's entries are normal with variance 1/D and the input's noise has variance 1, so logits of
unrelated rows are standard normal. "random" targets are uniform and the input is only noise: the loss is about
:math:`\log V + 1/2`. "peaked" resembles a trained model: targets follow a Zipf distribution, and each input leans on
the weight row of its target,

.. math:: x_i = \epsilon_i + \lambda_i w_{y_i}, \qquad \lambda_i \sim U(0, \lambda_{\max}),

with :math:`\lambda_{\max}` such that the mean loss is 5. The leans differ from row to row because a trained model is
nearly certain of some tokens and far off on others, and rounding affects the two in different places.

"sharp" resembles the end of fine-tuning: few classes of a row have all the probability. Each input leans on its target
and, less, on one other class c drawn from the same Zipf distribution,

.. math:: x_i = \epsilon_i + \lambda_i (w_{y_i} + s_i w_{c_i}), \qquad
    \lambda_i \sim U(\lambda_{\max} / 2, \lambda_{\max}), \quad s_i \sim U(0, 1),

with a mean loss of 0.7. The softmax part of the gradients is then as large as the target's part, so an error in the
stored probabilities changes a relative norm. With the other two distributions it is below 5% of the gradients.

"sharp3.5" and "sharp8" have only noise as the input, with standard deviation :math:`\sigma` = 3.5 or 8, and one class
as the target of all tokens. Logits are normal with deviation :math:`\sigma`. The gradient of every other class is only
its softmax part, so the per-class errors of d_weight show what rounding does to the probabilities. The mean loss is the
mean of the lse,

.. math:: E \log \sum_{v=1}^V e^{\sigma g_v}
    = \int_{-\infty}^{\infty} \bigl(e^{-e^u} - (E e^{-e^{u + \sigma g}})^V\bigr) \, du,
    \qquad g, g_v \sim N(0, 1).

The arrays of the token loss are drawn relative to the log-probabilities p of the targets, so that it is known which
tokens are clipped:

.. math:: p_\mathrm{old} = p - r, \qquad p_\mathrm{ref} = p - d, \qquad d \sim N(0, 0.3^2), \qquad A \sim N(0, 1)

The log-ratio r is above the upper bound of GRPO for a tenth of the tokens and below the lower bound for another tenth.
Everywhere it is at least 0.1 from a bound. Logits that are rounded to bfloat16 change r by less, so rounding does not
change which tokens are clipped. That would remove or add whole gradients.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np

PEAKED_LOSS = 5.0
SHARP_LOSS = 0.7
LOSS_DEVIATION = 3.0  # of one row's loss, about
DEVIATIONS = {"sharp3.5": 3.5, "sharp8": 8.0}  # of logits, where all targets are one class
EPSILON_LOW, EPSILON_HIGH, BETA = 0.2, 0.28, 0.04  # of GRPO; its KL divergence is the estimate k3
CLIP_SHARE = 0.1  # of the tokens, for each bound
CLIP_MARGIN = 0.1  # least distance of a log-ratio from a bound
REF_DEVIATION = 0.3  # of the difference from the reference policy's log-probability
LOW_BITS = 2**-8  # width of the relative differences that a number in bfloat16 rounds away
ZIPF_SHIFT = 2.7  # of Mandelbrot's form of the distribution, which fits the most frequent words of English


def zipf_cdf(v: int) -> np.ndarray:
    """Returns the cumulative probabilities (V,) float64 of p(rank r) proportional to 1 / (r + 2.7), r from 1."""
    p = 1.0 / (np.arange(1, v + 1) + ZIPF_SHIFT)
    return np.cumsum(p) / p.sum()


def input_deviation(targets: str) -> float:
    """Returns the standard deviation of the input's noise, which is that of the logits."""
    return DEVIATIONS.get(targets, 1.0)


def one_class(v: int, targets: str) -> int | None:
    """Returns the class that is the target of all tokens; None where targets are drawn."""
    return v // 2 if targets in DEVIATIONS else None


class PerToken(NamedTuple):
    """The arrays of the token loss, each (n,) float32, in the order of its arguments."""

    advantage: np.ndarray
    old_log_prob: np.ndarray
    ref_log_prob: np.ndarray


def per_token(log_prob: np.ndarray) -> PerToken:
    """Draws the arrays of the token loss, with a fixed seed.

    Args:
        log_prob: (n,) of the targets.
    """
    rng, n = np.random.default_rng(0), len(log_prob)
    low, high = math.log(1 - EPSILON_LOW), math.log(1 + EPSILON_HIGH)
    inside = rng.uniform(low + CLIP_MARGIN, high - CLIP_MARGIN, n)
    beyond, side = rng.uniform(CLIP_MARGIN, 3 * CLIP_MARGIN, n), rng.random(n)
    log_ratio = np.select([side < CLIP_SHARE, side >= 1 - CLIP_SHARE], [low - beyond, high + beyond], inside)
    arrays = rng.standard_normal(n), log_prob - log_ratio, log_prob - REF_DEVIATION * rng.standard_normal(n)
    return PerToken(*(array.astype(np.float32) for array in arrays))


@cache
def mean_lse(deviation: float, v: int) -> float:
    """Returns the mean lse of `v` independent normal logits of a deviation."""
    u = np.linspace(-80.0, 20.0, 2001)  # the integrand is 0 outside for deviations up to 8 and any vocabulary
    g = np.linspace(-9.0, 9.0, 1801)
    density = np.exp(-(g**2) / 2) / math.sqrt(2 * math.pi)
    # 1 - E exp(-exp(u + sigma g)): by its complement, which keeps its digits where it is tiny
    missing = -np.expm1(-np.exp(u[:, None] + deviation * g)) @ density * (g[1] - g[0])
    integrand = np.exp(-np.exp(u)) - np.exp(v * np.log1p(-np.minimum(missing, 1 - 1e-12)))
    return float(integrand.sum() * (u[1] - u[0]))


def expected_loss(lean_max: float, d: int, v: int, targets: str = "peaked") -> float:
    """Returns the mean loss of arrays whose largest lean is `lean_max`.

    A row of lean l has V - 1 logits of variance 1 + l**2 / D, and its target's logit is normal about l. In "sharp"
    arrays one of the others is normal about s * l. Of targets of one class it is the mean lse: their logits average 0.
    """
    if targets in DEVIATIONS:
        return mean_lse(DEVIATIONS[targets], v)
    noise, mass = np.polynomial.hermite_e.hermegauss(15)
    mass = mass / mass.sum()
    if targets == "sharp":
        lean = np.linspace(lean_max / 2, lean_max, 21)[:, None, None, None]
        share = np.linspace(0.0, 1.0, 21)[:, None, None]
        log_others = math.log(max(v - 2, 1)) + (1 + lean**2 * (1 + share**2) / d) / 2
        target, other = lean + noise, share * lean + noise[:, None]
        loss = np.logaddexp(0.0, np.logaddexp(log_others, other) - target)
        return float((loss @ mass @ mass).mean())
    lean = np.linspace(0.0, lean_max, 101)[:, None]
    log_others = math.log(max(v - 1, 1)) + (1 + lean**2 / d) / 2
    loss = np.logaddexp(0.0, log_others - (lean + noise))
    return float((loss @ mass).mean())


@cache
def lean_max(d: int, v: int, targets: str) -> float:
    """Returns the largest lean: 0 if the input is only noise, else the one with the mean loss of the distribution.

    If a small vocabulary has a lower loss without any lean, the lean is 0. If no lean gives "sharp" arrays such a low
    loss, because the hidden size is small, the result is the lean with the lowest loss.
    """
    expected = SHARP_LOSS if targets == "sharp" else PEAKED_LOSS
    if targets == "random" or targets in DEVIATIONS or expected_loss(0.0, d, v, targets) <= expected:
        return 0.0
    low, high = 0.0, 4 * math.log(v)
    if targets == "sharp":  # the loss rises again where leans are so large that they make the other logits vary
        leans = np.linspace(0.0, 2 * high, 65)
        losses = [expected_loss(float(lean), d, v, targets) for lean in leans]
        at = next((index for index, loss in enumerate(losses) if loss <= expected), None)
        if at is None:
            return float(leans[int(np.argmin(losses))])
        low, high = float(leans[at - 1]), float(leans[at])
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_loss(middle, d, v, targets) > expected else (low, middle)
    return high


def check_loss(loss: float, rows: int, d: int, v: int, targets: str) -> None:
    """Raises ValueError if arrays that claim this distribution have another mean loss over `rows` sampled rows."""
    expected = expected_loss(lean_max(d, v, targets), d, v, targets)
    # The loss of one class's targets varies with the target's logit and, less, with the lse.
    deviation = max(LOSS_DEVIATION, 1.2 * input_deviation(targets))
    tolerance = 0.2 + 3 * deviation / math.sqrt(rows)
    if not abs(loss - expected) <= tolerance:
        raise ValueError(
            f'loss of the "{targets}" arrays must be {expected:.2f} +- {tolerance:.2f} over {rows} rows, got {loss:.2f}'
        )
