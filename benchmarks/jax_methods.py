"""JAX methods: the floor, ours, our baseline, what XLA makes of the loss, and tokamax where it is installed."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.data import BETA, EPSILON_HIGH, EPSILON_LOW
from benchmarks.methods import Method, UnavailableError, by_name, load, our_loss
from benchmarks.shapes import OBJECTIVES, Mode, Objective

LossFn = Callable[..., Array]  # (input, linear_weight, target, *per_token)

SCAN_ROWS, GRADIENT_SCAN_ROWS = 1024, 2048


def _floor(mode: Mode) -> LossFn:
    raise UnavailableError("the floor computes no loss")


def _jax_pallas(implementation: str) -> Callable[[Mode], LossFn]:
    return partial(our_loss, "jax_pallas", implementation)


def grpo(log_prob: Array, advantage: Array, old_log_prob: Array, ref_log_prob: Array) -> Array:
    """Returns the GRPO loss (N,) of each token, as `torch_methods.grpo` does."""
    ratio = jnp.exp(log_prob - old_log_prob)
    clipped = jnp.clip(ratio, 1 - EPSILON_LOW, 1 + EPSILON_HIGH)
    kl = jnp.exp(ref_log_prob - log_prob) - (ref_log_prob - log_prob) - 1
    return BETA * kl - jnp.minimum(ratio * advantage, clipped * advantage)


def scaled(logits: Array, objective: Objective) -> Array:
    """Returns logits in float32, divided by the temperature."""
    logits = logits.astype(jnp.float32)
    return logits if objective.temperature == 1 else logits / objective.temperature


def values(logits: Array, y: Array, objective: Objective, *per_token: Array) -> Array:
    """Returns the objective (N,) float32 of each token from logits (N, V), 0 where y is -100."""
    logits = scaled(logits, objective)
    target_logit = jnp.take_along_axis(logits, jnp.maximum(y, 0)[:, None], axis=1)[:, 0]
    lse = jax.nn.logsumexp(logits, axis=1)
    if objective.name == "token-loss":
        value = grpo(target_logit - lse, *per_token)
    elif objective.name == "log-probs":
        value = target_logit - lse
    else:
        value, smoothing = lse - target_logit, objective.label_smoothing
        if smoothing:
            value = (1 - smoothing) * value + smoothing * (lse - logits.mean(axis=1))
    return jnp.where(y == -100, 0.0, value)


def row_factors(logits: Array, y: Array, weight: Array, objective: Objective, *per_token: Array) -> Array:
    """Returns what multiplies the rows (N,) of p - onehot in d_logits, where weight (N,) multiplies the objective."""
    factors = weight
    if objective.name != "cross-entropy":
        log_prob = values(logits, y, replace(objective, name="log-probs"))
        value, vjp = jax.vjp(lambda p: grpo(p, *per_token) if objective.name == "token-loss" else p, log_prob)
        (slope,) = vjp(jnp.ones_like(value))
        factors = -weight * slope
    return factors if objective.temperature == 1 else factors / objective.temperature


def _reduce(losses: Array, y: Array, mode: Mode) -> Array:
    return losses if mode.reduction == "none" else losses.sum() / (y != -100).sum()


def _materialized(matmul: Callable[[Array, Array], Array]) -> Callable[[Mode], LossFn]:
    def build(mode: Mode) -> LossFn:
        return lambda x, w, y, *per_token: _reduce(values(matmul(x, w), y, mode.objective, *per_token), y, mode)

    return build


def _rounded_logits(x: Array, w: Array) -> Array:
    return jnp.dot(x, w.T)


def _float32_logits(x: Array, w: Array) -> Array:
    """Logits (N, V) float32; in the backward pass float32 d_logits are multiplied with a 16-bit operand in TF32."""
    return jnp.dot(x, w.T, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _float32_logits_rounded(x: Array, w: Array) -> Array:
    """The same logits; d_logits are rounded to the operands' dtype before the gradient matmuls."""
    return _float32_logits(x, w)


def _rounded_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _float32_logits(x, w), (x, w)


def _rounded_backward(operands: tuple[Array, Array], d_logits: Array) -> tuple[Array, Array]:
    x, w = operands
    d_logits = d_logits.astype(x.dtype)
    return jnp.dot(d_logits, w), jnp.dot(d_logits.T, x)


_float32_logits_rounded.defvjp(_rounded_forward, _rounded_backward)


def _scan(mode: Mode) -> LossFn:
    def loss(x: Array, w: Array, y: Array, *per_token: Array) -> Array:
        rows = math.gcd(len(x), SCAN_ROWS)

        @jax.checkpoint
        def chunk(w: Array, x: Array, y: Array, *per_token: Array) -> Array:
            return values(_float32_logits(x, w), y, mode.objective, *per_token)

        parts = (x.reshape(-1, rows, x.shape[1]), *(array.reshape(-1, rows) for array in (y, *per_token)))
        _, losses = lax.scan(lambda _, part: (None, chunk(w, *part)), None, parts)
        return _reduce(losses.reshape(-1), y, mode)

    return loss


def _gradient_scan(mode: Mode) -> LossFn:
    """Plan A with XLA only: chunks that compute gradients with their loss, d_weight in the weight's dtype."""
    if mode.reduction == "none":
        raise UnavailableError("gradients of a forward pass are those of one scalar")

    objective, smoothing = mode.objective, mode.objective.label_smoothing

    def forward(
        x: Array, w: Array, y: Array, *per_token: Array, gradients: bool
    ) -> tuple[Array, tuple[Array, Array] | None]:
        rows, valid = math.gcd(len(x), GRADIENT_SCAN_ROWS), y != -100
        weight = valid / valid.sum()

        def chunk(d_w: Array | None, part: tuple[Array, ...]) -> tuple[Array | None, tuple[Array, ...]]:
            x, y, weight, *per_token = part
            logits = _rounded_logits(x, w)
            losses = weight * values(logits, y, objective, *per_token)
            if d_w is None:
                return None, (losses,)
            p = jax.nn.softmax(scaled(logits, objective), axis=1)
            hit = jnp.arange(logits.shape[1]) == y[:, None]
            if smoothing:
                hit = (1 - smoothing) * hit + smoothing / logits.shape[1]
            factors = row_factors(logits, y, weight, objective, *per_token)
            d_logits = (factors[:, None] * (p - hit)).astype(x.dtype)
            return d_w + jnp.dot(d_logits.T, x), (losses, jnp.dot(d_logits, w))

        parts = (x.reshape(-1, rows, x.shape[1]), *(array.reshape(-1, rows) for array in (y, weight, *per_token)))
        d_w, (losses, *d_x) = lax.scan(chunk, jnp.zeros_like(w) if gradients else None, parts)
        return losses.sum(), None if d_w is None else (d_x[0].reshape(x.shape), d_w)

    @jax.custom_vjp
    def loss(x: Array, w: Array, y: Array, *per_token: Array) -> Array:
        return forward(x, w, y, *per_token, gradients=False)[0]

    def backward(saved: tuple[Array, Array], d_loss: Array) -> tuple[Array | None, ...]:
        d_x, d_w = ((d_loss * gradient).astype(gradient.dtype) for gradient in saved)
        return d_x, d_w, None, *(None for _ in objective.per_token)

    loss.defvjp(partial(forward, gradients=True), backward)  # pyright: ignore[reportArgumentType]
    return loss


def _tokamax(mode: Mode) -> LossFn:
    if mode.ignored:
        raise UnavailableError("tokamax's loss has no ignore_index")
    if mode.objective.label_smoothing:
        raise UnavailableError("tokamax's loss has no label smoothing")
    tokamax = load("tokamax")

    def loss(x: Array, w: Array, y: Array) -> Array:
        return tokamax.linear_softmax_cross_entropy_loss(
            x, y, w, reduction=mode.reduction, implementation="chunked_xla"
        )

    return loss


_ALL: dict[str, Any] = {"objectives": OBJECTIVES}

# In the order of measurement: our methods and the floor first.
METHODS = by_name(
    [
        Method("floor", "floor", _floor, takes_budget=True, **_ALL),
        Method("mosaic", "ours", _jax_pallas("mosaic"), takes_budget=True, host=True, grid=True, ahead=True, **_ALL),
        Method("pallas_triton", "ours", _jax_pallas("pallas_triton"), takes_budget=True, **_ALL),
        Method("chunked", "own-baseline", _jax_pallas("chunked"), takes_budget=True, **_ALL),
        Method("bf16-logits", "peer", _materialized(_rounded_logits), host=True, grid=True, **_ALL),
        Method("float32-logits", "peer", _materialized(_float32_logits), **_ALL),
        Method("float32-logits-rounded-gradient", "peer", _materialized(_float32_logits_rounded), **_ALL),
        Method("gradient-scan", "own-baseline", _gradient_scan, grid=True, **_ALL),
        Method("checkpointed-scan", "peer", _scan, **_ALL),
        Method("tokamax-chunked_xla", "peer", _tokamax, "tokamax", vocab_axis=1),
    ]
)
