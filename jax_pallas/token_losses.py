r"""Common token losses for `linear_token_loss`, by name.

Each function here returns a callable of log_prob and the per-token arrays that it names, in their order. In the
equations, :math:`\ell` is log_prob, :math:`A` the advantage, and :math:`r = \exp(\ell - \ell_\mathrm{old})` the
probability of a token relative to that under the policy that drew it. Calls with equal parameters return equal
callables, so that they are compiled once.
"""

from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from linear_ce.spec import check_choice

KL = Literal["k1", "k2", "k3"]

KLS: tuple[KL, ...] = ("k1", "k2", "k3")


class Named(NamedTuple):
    """A token loss, with its parameters."""

    name: str
    parameters: tuple[tuple[str, Any], ...]

    def __call__(self, log_prob: Array, *per_token: Array) -> Array:
        return FUNCTIONS[self.name](log_prob, *per_token, **dict(self.parameters))


def weighted_nll() -> Named:
    r"""Negative log-likelihood times a weight that may be differentiated.

    .. math:: -\mathrm{weight} \cdot \ell

    Returns:
        A token loss with the per-token array `weight`.
    """
    return Named("weighted_nll", ())


def reinforce(beta: float = 0.0, kl: KL = "k3") -> Named:
    r"""The policy gradient, with an optional penalty on the divergence from a reference policy.

    .. math:: -A \ell + \beta \, \mathrm{KL}, \qquad d = \ell - \ell_\mathrm{ref}, \qquad
        \mathrm{KL} = d \ (\text{k1}), \quad d^2 / 2 \ (\text{k2}), \quad e^{-d} - 1 + d \ (\text{k3})

    Args:
        beta: factor of the penalty.
        kl: the estimate of the divergence.

    Returns:
        A token loss with the per-token arrays `advantage` and, unless beta is 0, `ref_log_prob`.

    Raises:
        ValueError: kl is no estimate.

    Source:
        Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning", 1992.
        The estimates: Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.
    """
    return Named("reinforce", (("beta", float(beta)), ("kl", check_choice("kl", kl, KLS))))


def ppo_clip(epsilon_low: float = 0.2, epsilon_high: float = 0.2) -> Named:
    r"""The clipped surrogate of PPO.

    .. math:: -\min(r A,\ \mathrm{clip}(r,\ 1 - \epsilon_\mathrm{low},\ 1 + \epsilon_\mathrm{high})\, A)

    Args:
        epsilon_low, epsilon_high: how far the ratio may leave 1. PPO uses the same for both.

    Returns:
        A token loss with the per-token arrays `advantage` and `old_log_prob`.

    Source:
        Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347, (7). Separate bounds: Yu et al.,
        "DAPO", arXiv:2503.14476, (10).
    """
    return Named("ppo_clip", (("epsilon_low", float(epsilon_low)), ("epsilon_high", float(epsilon_high))))


def grpo(epsilon_low: float = 0.2, epsilon_high: float = 0.2, beta: float = 0.0, kl: KL = "k3") -> Named:
    r"""The token loss of GRPO: `ppo_clip` plus a penalty on the divergence from a reference policy.

    .. math:: -\min(r A,\ \mathrm{clip}(r,\ 1 - \epsilon_\mathrm{low},\ 1 + \epsilon_\mathrm{high})\, A)
        + \beta \, \mathrm{KL}

    The mean over each answer that GRPO takes is a token_weight of 1 / (length of the token's answer).

    Args:
        epsilon_low, epsilon_high: how far the ratio may leave 1.
        beta, kl: as in `reinforce`.

    Returns:
        A token loss with the per-token arrays `advantage`, `old_log_prob` and, unless beta is 0, `ref_log_prob`.

    Raises:
        ValueError: kl is no estimate.

    Source:
        Shao et al., "DeepSeekMath", arXiv:2402.03300, (3), (4). Separate bounds: Yu et al., "DAPO", arXiv:2503.14476.
    """
    bounds = ("epsilon_low", float(epsilon_low)), ("epsilon_high", float(epsilon_high))
    return Named("grpo", (*bounds, ("beta", float(beta)), ("kl", check_choice("kl", kl, KLS))))


def cispo(epsilon_low: float = 1.0, epsilon_high: float = 0.2) -> Named:
    r"""The policy gradient with clipped importance weights, CISPO. No token loses its gradient.

    .. math:: -\mathrm{sg}\big(\mathrm{clip}(r,\ 1 - \epsilon_\mathrm{low},\ 1 + \epsilon_\mathrm{high})\big)\, A\, \ell

    where :math:`\mathrm{sg}` has no gradient.

    Args:
        epsilon_low: how far below 1 a weight may be. With 1 there is no lower bound, as in the paper's experiments.
        epsilon_high: how far above 1 a weight may be. The paper tunes it and names no value.

    Returns:
        A token loss with the per-token arrays `advantage` and `old_log_prob`.

    Source:
        MiniMax, "MiniMax-M1", arXiv:2506.13585, (4), (5).
    """
    return Named("cispo", (("epsilon_low", float(epsilon_low)), ("epsilon_high", float(epsilon_high))))


def _weighted_nll(log_prob: Array, weight: Array) -> Array:
    return -weight * log_prob


def _reinforce(log_prob: Array, advantage: Array, *ref_log_prob: Array, beta: float, kl: KL) -> Array:
    return _with_kl(-advantage * log_prob, log_prob, ref_log_prob, beta, kl)


def _ppo_clip(
    log_prob: Array, advantage: Array, old_log_prob: Array, *, epsilon_low: float, epsilon_high: float
) -> Array:
    ratio = jnp.exp(log_prob - old_log_prob)
    clipped = jnp.clip(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def _grpo(
    log_prob: Array,
    advantage: Array,
    old_log_prob: Array,
    *ref_log_prob: Array,
    epsilon_low: float,
    epsilon_high: float,
    beta: float,
    kl: KL,
) -> Array:
    loss = _ppo_clip(log_prob, advantage, old_log_prob, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return _with_kl(loss, log_prob, ref_log_prob, beta, kl)


def _cispo(log_prob: Array, advantage: Array, old_log_prob: Array, *, epsilon_low: float, epsilon_high: float) -> Array:
    ratio = jnp.exp(log_prob - old_log_prob)
    return -jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)) * advantage * log_prob


def _with_kl(loss: Array, log_prob: Array, ref_log_prob: tuple[Array, ...], beta: float, kl: KL) -> Array:
    """Returns the loss plus beta times an estimate of the divergence, for which there is one reference."""
    if len(ref_log_prob) != (beta != 0.0):
        wanted = "ref_log_prob after the other per-token arrays" if beta else "no ref_log_prob, because beta is 0"
        raise TypeError(f"this token loss takes {wanted}, got {len(ref_log_prob)} arrays there")
    if not ref_log_prob:
        return loss
    difference = log_prob - ref_log_prob[0]
    if kl == "k1":
        return loss + beta * difference
    if kl == "k2":
        return loss + beta * (0.5 * jnp.square(difference))
    return loss + beta * (jnp.expm1(-difference) + difference)


FUNCTIONS = cast(
    "dict[str, Any]",
    {
        "weighted_nll": _weighted_nll,
        "reinforce": _reinforce,
        "ppo_clip": _ppo_clip,
        "grpo": _grpo,
        "cispo": _cispo,
    },
)
