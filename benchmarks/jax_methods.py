"""JAX methods: the floor, ours, our baseline, what XLA makes of the loss, and tokamax where it is installed."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.methods import Method, UnavailableError, by_name, load
from benchmarks.shapes import Mode

LossFn = Callable[[Array, Array, Array], Array]

SCAN_ROWS, GRADIENT_SCAN_ROWS = 1024, 2048


def _floor(mode: Mode) -> LossFn:
    raise UnavailableError("the floor computes no loss")


def _jax_pallas(implementation: str) -> Callable[[Mode], LossFn]:
    def build(mode: Mode) -> LossFn:
        module = load("jax_pallas.linear_ce")
        if implementation not in module.IMPLEMENTATIONS:
            raise UnavailableError(f"jax_pallas has no implementation {implementation!r} yet")

        def loss(x: Array, w: Array, y: Array) -> Array:
            return module.linear_cross_entropy(
                x, w, y, reduction=mode.reduction, memory_budget=mode.memory_budget, implementation=implementation
            )

        return loss

    return build


def _token_losses(logits: Array, y: Array) -> Array:
    """Losses (N,) float32 of logits (N, V), 0 where y is -100."""
    logits = logits.astype(jnp.float32)
    target_logit = jnp.take_along_axis(logits, jnp.maximum(y, 0)[:, None], axis=1)[:, 0]
    return jnp.where(y == -100, 0.0, jax.nn.logsumexp(logits, axis=1) - target_logit)


def _reduce(losses: Array, y: Array, mode: Mode) -> Array:
    return losses if mode.reduction == "none" else losses.sum() / (y != -100).sum()


def _materialized(matmul: Callable[[Array, Array], Array]) -> Callable[[Mode], LossFn]:
    def build(mode: Mode) -> LossFn:
        return lambda x, w, y: _reduce(_token_losses(matmul(x, w), y), y, mode)

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
    def loss(x: Array, w: Array, y: Array) -> Array:
        rows = math.gcd(len(x), SCAN_ROWS)

        @jax.checkpoint
        def chunk(x: Array, w: Array, y: Array) -> Array:
            return _token_losses(_float32_logits(x, w), y)

        parts = (x.reshape(-1, rows, x.shape[1]), y.reshape(-1, rows))
        _, losses = lax.scan(lambda _, part: (None, chunk(part[0], w, part[1])), None, parts)
        return _reduce(losses.reshape(-1), y, mode)

    return loss


def _gradient_scan(mode: Mode) -> LossFn:
    """Plan A with XLA only: chunks that compute gradients with their loss, d_weight in the weight's dtype."""
    if mode.reduction == "none":
        raise UnavailableError("gradients of a forward pass are those of one scalar")

    def forward(x: Array, w: Array, y: Array, *, gradients: bool) -> tuple[Array, tuple[Array, Array] | None]:
        rows, valid = math.gcd(len(x), GRADIENT_SCAN_ROWS), y != -100
        weight = valid / valid.sum()

        def chunk(d_w: Array | None, part: tuple[Array, Array, Array]) -> tuple[Array | None, tuple[Array, ...]]:
            x, y, weight = part
            logits = _rounded_logits(x, w)
            losses = weight * _token_losses(logits, y)
            if d_w is None:
                return None, (losses,)
            p = jax.nn.softmax(logits.astype(jnp.float32), axis=1)
            hit = jnp.arange(logits.shape[1]) == y[:, None]
            d_logits = (weight[:, None] * (p - hit)).astype(x.dtype)
            return d_w + jnp.dot(d_logits.T, x), (losses, jnp.dot(d_logits, w))

        parts = (x.reshape(-1, rows, x.shape[1]), y.reshape(-1, rows), weight.reshape(-1, rows))
        d_w, (losses, *d_x) = lax.scan(chunk, jnp.zeros_like(w) if gradients else None, parts)
        return losses.sum(), None if d_w is None else (d_x[0].reshape(x.shape), d_w)

    @jax.custom_vjp
    def loss(x: Array, w: Array, y: Array) -> Array:
        return forward(x, w, y, gradients=False)[0]

    def backward(saved: tuple[Array, Array], d_loss: Array) -> tuple[Array, Array, None]:
        d_x, d_w = ((d_loss * gradient).astype(gradient.dtype) for gradient in saved)
        return d_x, d_w, None

    loss.defvjp(lambda x, w, y: forward(x, w, y, gradients=True), backward)  # pyright: ignore[reportArgumentType]
    return loss


def _tokamax(mode: Mode) -> LossFn:
    if mode.ignored:
        raise UnavailableError("tokamax's loss has no ignore_index")
    tokamax = load("tokamax")

    def loss(x: Array, w: Array, y: Array) -> Array:
        return tokamax.linear_softmax_cross_entropy_loss(
            x, y, w, reduction=mode.reduction, implementation="chunked_xla"
        )

    return loss


# In the order of measurement: our methods and the floor first.
METHODS = by_name(
    [
        Method("floor", "floor", _floor, takes_budget=True),
        Method("mosaic", "ours", _jax_pallas("mosaic"), takes_budget=True, host=True, grid=True, ahead=True),
        Method("pallas_triton", "ours", _jax_pallas("pallas_triton"), takes_budget=True),
        Method("chunked", "own-baseline", _jax_pallas("chunked"), takes_budget=True),
        Method("bf16-logits", "peer", _materialized(_rounded_logits), host=True, grid=True),
        Method("float32-logits", "peer", _materialized(_float32_logits)),
        Method("float32-logits-rounded-gradient", "peer", _materialized(_float32_logits_rounded)),
        Method("gradient-scan", "own-baseline", _gradient_scan, grid=True),
        Method("checkpointed-scan", "peer", _scan),
        Method("tokamax-chunked_xla", "peer", _tokamax, "tokamax", vocab_axis=1),
    ]
)
