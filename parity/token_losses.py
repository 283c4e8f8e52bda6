"""The named token losses in NumPy, each with its derivatives, and how far each amplifies errors of log-probabilities.

`FORMS` is the one definition that both frameworks' `token_losses` are compared with. The functions take the
log-probabilities first, then the entropies if the form says so, then the per-token arrays, all (n,), then parameters
with the names of both frameworks. They compute in the dtype of the log-probabilities.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from linear_ce.reference import TokenLossResult, ValueAndDerivatives
from parity.tolerances import ZERO_NORM

Values = tuple[np.ndarray, tuple[np.ndarray, ...]]  # the loss, and its derivatives by log_prob and each per-token array


def weighted_nll(log_prob: np.ndarray, weight: np.ndarray) -> Values:
    return -weight * log_prob, (-weight, -log_prob)


def reinforce(log_prob: np.ndarray, advantage: np.ndarray, *ref: np.ndarray, beta: float, kl: str) -> Values:
    return with_kl(weighted_nll(log_prob, advantage), beta, kl, log_prob, *ref)


def ppo_clip(
    log_prob: np.ndarray, advantage: np.ndarray, old_log_prob: np.ndarray, *, epsilon_low: float, epsilon_high: float
) -> Values:
    ratio = np.exp(log_prob - old_log_prob)
    bound = np.clip(ratio, 1 - epsilon_low, 1 + epsilon_high)
    # With NaN both comparisons are false, and NaN must reach the derivatives.
    clipped = bound * advantage < ratio * advantage
    d_log_prob = np.where(clipped, 0, -ratio * advantage)
    chosen = np.where(clipped, bound, ratio)
    return -chosen * advantage, (d_log_prob, -chosen, -d_log_prob)


def grpo(
    log_prob: np.ndarray,
    advantage: np.ndarray,
    old_log_prob: np.ndarray,
    *ref: np.ndarray,
    epsilon_low: float,
    epsilon_high: float,
    beta: float,
    kl: str,
) -> Values:
    policy_loss = ppo_clip(log_prob, advantage, old_log_prob, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return with_kl(policy_loss, beta, kl, log_prob, *ref)


def cispo(
    log_prob: np.ndarray, advantage: np.ndarray, old_log_prob: np.ndarray, *, epsilon_low: float, epsilon_high: float
) -> Values:
    bound = np.clip(np.exp(log_prob - old_log_prob), 1 - epsilon_low, 1 + epsilon_high)
    return -bound * advantage * log_prob, (-bound * advantage, -bound * log_prob, np.zeros_like(log_prob))


def with_kl(policy_loss: Values, beta: float, kl: str, log_prob: np.ndarray, *ref: np.ndarray) -> Values:
    """Adds beta times the KL divergence from the reference policy, whose log-probabilities are there if beta is not
    0."""
    if not beta:
        return policy_loss
    loss, (d_log_prob, *others) = policy_loss
    (ref_log_prob,) = ref
    d = log_prob - ref_log_prob
    estimate, slope = {
        "k1": (d, np.ones_like(d)),
        "k2": (d * d / 2, d),
        "k3": (np.expm1(-d) + d, 1 - np.exp(-d)),  # exp(-d) - 1 would cancel near 0
    }[kl]
    return loss + beta * estimate, (d_log_prob + beta * slope, *others, -beta * slope)


class Form(NamedTuple):
    """A token loss in NumPy. Call it as `form(log_prob, *per_token)`, or `form(log_prob, entropy, *per_token)`."""

    function: Callable[..., Values]
    per_token: tuple[str, ...]  # what its arguments besides the log-probabilities and the entropies are, in order
    parameters: Mapping[str, Any]  # keyword arguments of `function`
    with_entropy: bool = False

    def __call__(self, log_prob: np.ndarray, *others: np.ndarray) -> Values:
        parameters = dict(self.parameters)
        entropy_weight = parameters.pop("entropy_weight", 0.0)
        if not entropy_weight:
            return self.function(log_prob, *others, **parameters)
        entropy, *per_token = others
        loss, (d_log_prob, *rest) = self.function(log_prob, *per_token, **parameters)
        d_entropy = np.full_like(entropy, -entropy_weight)
        return loss + d_entropy * entropy, (d_log_prob, d_entropy, *rest)

    @property
    def clip_bounds(self) -> tuple[float, ...]:
        """Where the ratio to the old policy is clipped."""
        if "epsilon_low" not in self.parameters:
            return ()
        return 1 - self.parameters["epsilon_low"], 1 + self.parameters["epsilon_high"]

    def named(self, token_losses: Any) -> Any:
        """Returns the same loss of a framework's module `token_losses`."""
        return getattr(token_losses, self.function.__name__)(**self.parameters)


_ADVANTAGE, _POLICY = ("advantage",), ("advantage", "old_log_prob")
_REF = ("ref_log_prob",)
_GRPO = {"epsilon_low": 0.1, "epsilon_high": 0.28, "beta": 0.2}

FORMS = {
    "weighted_nll": Form(weighted_nll, _ADVANTAGE, {}),  # `weight` is the class weights in a case
    "reinforce": Form(reinforce, _ADVANTAGE, {"beta": 0.0, "kl": "k3"}),
    "reinforce-k1": Form(reinforce, _ADVANTAGE + _REF, {"beta": 0.3, "kl": "k1"}),
    "ppo_clip": Form(ppo_clip, _POLICY, {"epsilon_low": 0.2, "epsilon_high": 0.28}),
    "grpo-k1": Form(grpo, _POLICY + _REF, {**_GRPO, "kl": "k1"}),
    "grpo-k2-entropy": Form(grpo, _POLICY + _REF, {**_GRPO, "kl": "k2", "entropy_weight": 0.2}, with_entropy=True),
    "grpo-k3": Form(grpo, _POLICY + _REF, {**_GRPO, "kl": "k3"}),
    "cispo": Form(cispo, _POLICY, {"epsilon_low": 1.0, "epsilon_high": 0.28}),
}


class Conditions(NamedTuple):
    """How much larger relative errors are than those of the log-probabilities that cause them; at least 1."""

    rows: float  # the losses of the tokens
    total: float  # their sum, whose terms may cancel
    d_per_token: tuple[float, ...]


def conditions(
    token_loss: ValueAndDerivatives, evaluate: Callable[[ValueAndDerivatives], TokenLossResult]
) -> Conditions:
    """Returns the condition numbers of a call. Ratios of probabilities and KL divergences are functions of differences
    of log-probabilities, which are smaller than these.

    Args:
        token_loss: the loss of the call.
        evaluate: returns the exact results of the call with reduction "none" and another loss.
    """
    step = 1e-7
    low, middle, high = (
        [found.loss, *found.d_per_token]
        for found in (evaluate(_scaled(token_loss, factor)) for factor in (1 - step, 1.0, 1 + step))
    )
    with np.errstate(invalid="ignore"):
        changes = [_finite(above - below) / (2 * step) for above, below in zip(high, low, strict=True)]
    sizes = [_finite(one) for one in middle]
    norms = [[float(np.linalg.norm(one)) for one in arrays] for arrays in (changes, sizes)]
    rows, *d_per_token = (_ratio(change, size) for change, size in zip(*norms, strict=True))
    total = _ratio(max(float(np.abs(terms[0]).sum()) for terms in (changes, sizes)), abs(float(sizes[0].sum())))
    return Conditions(rows, total, tuple(d_per_token))


def _scaled(token_loss: ValueAndDerivatives, factor: float) -> ValueAndDerivatives:
    """Returns the loss and its derivatives at log-probabilities that are larger by a factor."""
    return lambda log_prob, *per_token: token_loss(factor * log_prob, *per_token)


def _finite(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), array, 0)


def _ratio(change: float, size: float) -> float:
    return max(1.0, change / size) if size > ZERO_NORM else 1.0
