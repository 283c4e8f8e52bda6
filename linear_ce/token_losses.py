"""What the named token losses of both frameworks share: the arrays that they take, and checks of their parameters."""

from typing import Any

from linear_ce.spec import check_not_negative

KLS = ("k1", "k2", "k3")  # estimates of the KL divergence

# The arrays of each loss besides log_prob, in order. A loss with a KL divergence also takes ref_log_prob.
PER_TOKEN: dict[str, tuple[str, ...]] = {
    "weighted_nll": ("weight",),
    "reinforce": ("advantage",),
    "ppo_clip": ("advantage", "old_log_prob"),
    "grpo": ("advantage", "old_log_prob"),
    "cispo": ("advantage", "old_log_prob"),
}


def check_epsilons(epsilon_low: Any, epsilon_high: Any) -> tuple[float, float]:
    """Returns how far a ratio may be below and above 1, as floats in the range of float32 that are not negative."""
    return check_not_negative("epsilon_low", epsilon_low), check_not_negative("epsilon_high", epsilon_high)
