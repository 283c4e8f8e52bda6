r"""Common token losses for `linear_token_loss`, by name.

Each function returns a `Named` loss: a callable that can be hashed, compared and pickled. Calls with equal losses are
compiled once. In all equations :math:`p = \log p_{y}` is the log-probability of the target, and

.. math:: r = e^{\,p - p_\mathrm{old}}, \qquad d = p - p_\mathrm{ref}

Each function takes an `entropy_weight`, a finite number. If it is not 0, `entropy_weight * entropy` is subtracted from
the loss of each token, with the entropy of the distribution that the model gives there. So a positive weight is a bonus
for a high entropy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from linear_ce.spec import check_choice, check_not_negative, check_number
from linear_ce.token_losses import KLS, PER_TOKEN, check_epsilons


@jax.tree_util.register_static
@dataclass(frozen=True)
class Named:
    """A token loss of this module. Call it as `loss(log_prob, *per_token)`, all (n,) float32, or as
    `loss(log_prob, entropy, *per_token)` if `entropy_weight` is not 0.

    As an argument of a function under `jax.jit` or `jax.checkpoint` it is static.

    Args:
        name: of the function that returned it.
        parameters: numbers of the function, in order.
        kl: the estimate of the KL divergence, or "" for losses without one.
        entropy_weight: what multiplies the entropy that is subtracted.
    """

    name: str
    parameters: Sequence[float] = ()
    kl: str = ""
    entropy_weight: float = 0.0

    def __call__(self, log_prob: Array, *others: Array) -> Array:
        if not self.entropy_weight:
            return _FORMULAS[self.name](self, log_prob, *others)
        entropy, *per_token = others
        return _FORMULAS[self.name](self, log_prob, *per_token) - self.entropy_weight * entropy

    @property
    def per_token(self) -> tuple[str, ...]:
        """What the arguments besides log_prob and the entropy are, in order."""
        names = PER_TOKEN[self.name]
        return (*names, "ref_log_prob") if self.kl and self.parameters[-1] else names


def weighted_nll(*, entropy_weight: float = 0.0) -> Named:
    r"""The negative log-likelihood of each token times a weight: :math:`-w\,p`.

    The weights may be of any sign, and they can be differentiated.

    per_token: weight.

    Example:
        >>> import jax.numpy as jnp
        >>> weighted_nll()(jnp.array([-1.0, -2.0]), jnp.array([1.0, 0.5])).tolist()
        [1.0, 1.0]
    """
    return Named("weighted_nll", entropy_weight=check_number("entropy_weight", entropy_weight))


def reinforce(beta: float = 0.0, kl: str = "k3", *, entropy_weight: float = 0.0) -> Named:
    r"""Policy gradient: :math:`-A\,p + \beta\,\mathrm{KL}`.

    .. math:: \mathrm{KL}_{k1} = d, \qquad \mathrm{KL}_{k2} = d^2 / 2, \qquad \mathrm{KL}_{k3} = e^{-d} - 1 + d

    per_token: advantage, and ref_log_prob if beta is not 0.

    Args:
        beta: factor of the KL divergence from the reference policy, not negative.
        kl: its estimate from one sample: "k1", "k2" or "k3".
        entropy_weight: factor on the entropy, which is subtracted from the loss; 0: no entropy.

    Raises:
        TypeError, ValueError: an argument is not a number or is out of range, or kl is unknown.

    Source:
        Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", 1992.
        KL: Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html.
    """
    entropy_weight = check_number("entropy_weight", entropy_weight)
    return Named("reinforce", (check_not_negative("beta", beta),), check_choice("kl", kl, KLS), entropy_weight)


def ppo_clip(epsilon_low: float = 0.2, epsilon_high: float = 0.2, *, entropy_weight: float = 0.0) -> Named:
    r"""Proximal policy optimization with a clipped ratio.

    .. math:: -\min\big( r A,\ \mathrm{clip}(r,\, 1 - \epsilon_\mathrm{low},\, 1 + \epsilon_\mathrm{high})\, A \big)

    per_token: advantage, old_log_prob.

    Args:
        epsilon_low: how far below 1 the ratio is clipped, not negative.
        epsilon_high: how far above 1. DAPO uses 0.28.
        entropy_weight: factor on the entropy, which is subtracted from the loss, as in the paper's equation (9); 0: no
            entropy.

    Raises:
        TypeError, ValueError: an argument is not a number or is out of range.

    Source:
        Schulman et al., "Proximal policy optimization algorithms", 2017, arXiv:1707.06347, equation (7). Two bounds:
        Yu et al., "DAPO", 2025, arXiv:2503.14476, section 3.1.
    """
    bounds = check_epsilons(epsilon_low, epsilon_high)
    return Named("ppo_clip", bounds, entropy_weight=check_number("entropy_weight", entropy_weight))


def grpo(
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    beta: float = 0.0,
    kl: str = "k3",
    *,
    entropy_weight: float = 0.0,
) -> Named:
    r"""Group relative policy optimization: `ppo_clip` plus :math:`\beta\,\mathrm{KL}`, with the KL of `reinforce`.

    The advantages are those of a group of answers to one prompt. They are computed before the call.

    per_token: advantage, old_log_prob, and ref_log_prob if beta is not 0.

    Args:
        epsilon_low, epsilon_high: see `ppo_clip`.
        beta, kl: see `reinforce`.
        entropy_weight: factor on the entropy, which is subtracted from the loss; 0: no entropy.

    Raises:
        TypeError, ValueError: an argument is not a number or is out of range, or kl is unknown.

    Source:
        Shao et al., "DeepSeekMath", 2024, arXiv:2402.03300, section 4.1.
    """
    parameters = *check_epsilons(epsilon_low, epsilon_high), check_not_negative("beta", beta)
    return Named("grpo", parameters, check_choice("kl", kl, KLS), check_number("entropy_weight", entropy_weight))


def cispo(epsilon_low: float = 1.0, epsilon_high: float = 0.28, *, entropy_weight: float = 0.0) -> Named:
    r"""Policy gradient with a clipped importance weight, which is not differentiated.

    .. math:: -\mathrm{sg}\big(\mathrm{clip}(r,\, 1 - \epsilon_\mathrm{low},\, 1 + \epsilon_\mathrm{high})\big)\, A\, p

    Here sg is the identity, with the derivative 0. A clipped token keeps its gradient, unlike in `ppo_clip`.

    per_token: advantage, old_log_prob.

    Args:
        epsilon_low: how far below 1 the weight is clipped, not negative. The default, 1, is no lower bound, as in the
            paper.
        epsilon_high: how far above 1. The paper tunes it and gives no value; the default is DAPO's.
        entropy_weight: factor on the entropy, which is subtracted from the loss; 0: no entropy.

    Raises:
        TypeError, ValueError: an argument is not a number or is out of range.

    Source:
        MiniMax, "MiniMax-M1", 2025, arXiv:2506.13585, section 3.1.
    """
    bounds = check_epsilons(epsilon_low, epsilon_high)
    return Named("cispo", bounds, entropy_weight=check_number("entropy_weight", entropy_weight))


def _weighted_nll(_: Named, log_prob: Array, weight: Array) -> Array:
    return -weight * log_prob


def _reinforce(loss: Named, log_prob: Array, advantage: Array, *ref: Array) -> Array:
    return _with_kl(loss, -advantage * log_prob, log_prob, *ref)


def _ppo_clip(loss: Named, log_prob: Array, advantage: Array, old_log_prob: Array) -> Array:
    ratio = jnp.exp(log_prob - old_log_prob)
    bound = jax.lax.stop_gradient(_clipped(loss, ratio))
    # Not jnp.minimum and the derivative of jnp.clip: where both are equal, JAX divides the gradient between them.
    return -jnp.where(bound * advantage < ratio * advantage, bound, ratio) * advantage


def _grpo(loss: Named, log_prob: Array, advantage: Array, old_log_prob: Array, *ref: Array) -> Array:
    return _with_kl(loss, _ppo_clip(loss, log_prob, advantage, old_log_prob), log_prob, *ref)


def _cispo(loss: Named, log_prob: Array, advantage: Array, old_log_prob: Array) -> Array:
    ratio = jnp.exp(log_prob - old_log_prob)
    return -jax.lax.stop_gradient(_clipped(loss, ratio)) * advantage * log_prob


def _clipped(loss: Named, ratio: Array) -> Array:
    epsilon_low, epsilon_high, *_ = loss.parameters
    return jnp.clip(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)


def _with_kl(loss: Named, policy_loss: Array, log_prob: Array, *ref: Array) -> Array:
    """Adds beta times the KL divergence from the reference policy, whose log-probabilities are there if beta is not
    0."""
    beta = loss.parameters[-1]
    if not beta:
        return policy_loss
    (ref_log_prob,) = ref
    difference = log_prob - ref_log_prob
    if loss.kl == "k1":
        kl = difference
    elif loss.kl == "k2":
        kl = 0.5 * difference * difference
    else:
        kl = jnp.expm1(-difference) + difference  # exp(-d) - 1 would cancel near 0
    return policy_loss + beta * kl


_FORMULAS: dict[str, Callable[..., Array]] = {
    "weighted_nll": _weighted_nll,
    "reinforce": _reinforce,
    "ppo_clip": _ppo_clip,
    "grpo": _grpo,
    "cispo": _cispo,
}
