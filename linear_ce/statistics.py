"""Which statistics of the logits a call computes besides its loss, for both frameworks.

A set of them is an int with one bit for each statistic, so that it can be a static argument of any kernel. The first
five bits are numbers that a pass over the logits must compute for each row. Whether a call returns lse costs nothing
but memory.
"""

from collections.abc import Sequence
from typing import Any

from linear_ce.spec import check_choice

MAX = 1  # the largest logit
ARGMAX = 2  # its class, the lowest of equals
ENTROPY = 4
LOGIT_SUM = 8
SQUARES = 16  # the sum of the squared probabilities
LSE = 32

# Not a statistic: the exponentials of a row are computed again only if that row needs it, not because a row in the same
# block does, and sums over class blocks have an order that does not depend on the number of rows. Then the
# log-probability of a row is the same, bit for bit, however a call is divided.
BY_ROW = 64
# Not a statistic: the exponents by which stored exponentials of float16 were divided to fit, four in a number: (49).
SHIFTS = 128
# Not a statistic: the entropy, which is then one of the statistics, is differentiated.
D_ENTROPY = 256

OF_LOGITS = MAX | ARGMAX | ENTROPY | LOGIT_SUM | SQUARES
OF_BLOCKS = OF_LOGITS | SHIFTS  # what kernels write for each row and class block

# What each field of `TokenStats` is made from. log_prob is an argument of the token loss in any case.
NEEDED = {
    "log_prob": 0,
    "entropy": ENTROPY,
    "lse": 0,
    "argmax": MAX | ARGMAX,
    "is_top1": MAX,
    "mean_logit": LOGIT_SUM,
    "sum_squared_probs": SQUARES,
}

TOKEN_STATS = tuple(NEEDED)


def check_stats(stats: Any) -> tuple[bool, ...]:
    """Returns which fields of `TokenStats` a call returns, in the order of `TOKEN_STATS`.

    Raises:
        TypeError: `stats` is not a list or a tuple of strings.
        ValueError: a name is not in `TOKEN_STATS`.
    """
    if isinstance(stats, str) or not isinstance(stats, Sequence):
        raise TypeError(f"stats must be a tuple of names, got {type(stats).__name__}")
    for name in stats:
        check_choice("stats", name, TOKEN_STATS)
    return tuple(name in stats for name in TOKEN_STATS)


NO_STATS = (False,) * len(TOKEN_STATS)


def statistics_for(stats: Sequence[bool]) -> int:
    """Returns the statistics that these fields of `TokenStats` are made from; 0 for no fields."""
    found = LSE if any(stats) else 0
    for needed, wanted in zip(NEEDED.values(), stats, strict=True):
        found |= needed * wanted
    return found


def planes(statistics: int) -> int:
    """Returns how many numbers a kernel writes for them for each row and class block."""
    return (statistics & OF_BLOCKS).bit_count()
