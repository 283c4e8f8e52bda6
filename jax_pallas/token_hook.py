"""The token loss between the two passes over the logits: O(N) work, the same for every implementation.

A token loss is a function of each token's log-probability and of values that the caller gives for each token. Its
gradient with respect to the logits is that of the negative log-likelihood, with another row weight, MATH.md (35), (36):

    g_i = -row_weight_i * d token_loss_i / d log_prob_i

So plan A calls the token loss once the first pass over a chunk has computed its log-probabilities, differentiates it,
and continues with these in place of the row weights.

Each token's loss is differentiated separately. Rows that do not contribute are then excluded by selection from every
result, from the sums over tokens too. If a log-probability is NaN, because the target is not a class or the logits
are NaN, then the loss and this weight are NaN, even if the token loss does not propagate NaN.

A loss of the entropies takes them as its second argument, and has a second row weight: MATH.md (45), (46). They are the
first of the per-token values here.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_pallas.slicing import Slice
from jax_pallas.token_losses import Named
from linear_ce.spec import check_flag

OptionalArrays = tuple[Array | None, ...]  # arrays, or their gradients; None for those that are not differentiated


@dataclass(frozen=True)
class TokenFunction:
    """A token loss, traced for one token. It is equal to another trace of the same function with the same text, so that
    calls outside of `jax.jit` compile it once.

    Args:
        function: the token loss, or what stands for it.
        text: the jaxpr as text.
        jaxpr: from the values of the closure that tokens meet, and log_prob and the per-token values, (1,) float32
            each, to the loss, (1,) float32.
    """

    function: Hashable
    text: str
    jaxpr: ClosedJaxpr = field(compare=False)

    def of_token(self, log_prob: Array, per_token: Sequence[Array], closure: Sequence[Array]) -> Array:
        """Returns the loss of one token; all but the closure are ()."""
        (loss,) = jaxpr_as_fun(self.jaxpr)(*closure, log_prob[None], *(value[None] for value in per_token))
        return loss[0]


class TokenNeedsGrad(NamedTuple):
    """Which per-token arrays and which arrays of the closure are differentiated."""

    per_token: tuple[bool, ...]
    closure: tuple[bool, ...]


class TokenRows(NamedTuple):
    """The results of n rows; None for gradients that are not needed."""

    loss: Array  # (n,) row_weight * token_loss, 0 for rows that do not contribute
    gradient_weight: Array  # (n,) the row weight that replaces row_weight in the gradients of the logits
    d_per_token: OptionalArrays  # (n,) float32 each
    d_closure: OptionalArrays  # the sum over the rows, in the shape of the array, float32
    d_entropy: Array | None = None  # (n,) the row weight of the entropy in the gradients of the logits


class TokenHook(NamedTuple):
    """The token loss of one call, for plan A."""

    function: TokenFunction
    needs_grad: TokenNeedsGrad
    per_token: tuple[Array, ...]  # (N,) each, of any float dtype
    closure: tuple[Array, ...]

    def zeros_of_closure(self) -> OptionalArrays:
        """Returns what the gradients of the closure are added to."""
        needed = _chosen(self.needs_grad.closure, self.closure)
        return jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), needed)

    def of_chunk(self, chunk: Slice, log_prob: Array, row_weight: Array, entropy: Array | None = None) -> TokenRows:
        """Returns the results of a chunk's rows, given their log-probabilities, row weights and, if the function takes
        them, entropies, (n,) each."""
        per_token = tuple(chunk.of(values) for values in self.per_token)
        if entropy is None:
            return row_token_gradients(self.function, self.needs_grad, log_prob, row_weight, per_token, self.closure)
        needs_grad = self.needs_grad._replace(per_token=(True, *self.needs_grad.per_token))
        per_token = entropy, *per_token
        found = row_token_gradients(self.function, needs_grad, log_prob, row_weight, per_token, self.closure)
        d_entropy, *d_per_token = found.d_per_token
        return found._replace(d_per_token=tuple(d_per_token), d_entropy=d_entropy)


def takes_entropy(token_loss: Callable[..., Array], with_entropy: bool) -> bool:
    """Returns whether a token loss takes the entropies. Named losses do if they have an entropy weight."""
    check_flag("with_entropy", with_entropy)
    if not isinstance(token_loss, Named):
        return with_entropy
    if with_entropy and not token_loss.entropy_weight:
        raise ValueError(
            f"with_entropy must be False for token_losses.{token_loss.name} without entropy_weight, got True"
        )
    return token_loss.entropy_weight != 0


def row_token_losses(
    function: TokenFunction, log_prob: Array, row_weight: Array, per_token: Sequence[Array], closure: Sequence[Array]
) -> Array:
    """Returns row_weight * token_loss of each row, (n,), without gradients."""
    contributes, log_prob, per_token = _selected(log_prob, row_weight, per_token)
    loss = jax.vmap(lambda log_prob, per_token: function.of_token(log_prob, per_token, closure))(log_prob, per_token)
    return _weighted(loss, log_prob, row_weight, contributes)


def row_token_gradients(
    function: TokenFunction,
    needs_grad: TokenNeedsGrad,
    log_prob: Array,
    row_weight: Array,
    per_token: Sequence[Array],
    closure: Sequence[Array],
) -> TokenRows:
    """Returns the losses of the rows and the gradients of their sum."""
    contributes, log_prob, per_token = _selected(log_prob, row_weight, per_token)
    closure = tuple(closure)

    def of_token(log_prob: Array, per_token: tuple[Array, ...]) -> tuple[Array, Any]:
        def value(log_prob: Array, of_token: OptionalArrays, shared: OptionalArrays) -> Array:
            return function.of_token(log_prob, _completed(of_token, per_token), _completed(shared, closure))

        chosen = _chosen(needs_grad.per_token, per_token), _chosen(needs_grad.closure, closure)
        loss, pull_back = jax.vjp(value, log_prob, *chosen)
        return loss, pull_back(jnp.ones_like(loss))

    loss, (d_log_prob, d_per_token, d_closure) = jax.vmap(of_token)(log_prob, per_token)

    def weighted(derivative: Array) -> Array:
        rows = row_weight.shape + (1,) * (derivative.ndim - 1)
        product = row_weight.reshape(rows) * derivative.astype(jnp.float32)
        return jnp.where(contributes.reshape(rows), product, 0.0)

    gradient_weight = jnp.where(contributes & jnp.isnan(log_prob), jnp.nan, -weighted(d_log_prob))
    return TokenRows(
        loss=_weighted(loss, log_prob, row_weight, contributes),
        gradient_weight=gradient_weight,
        d_per_token=jax.tree.map(weighted, d_per_token),
        d_closure=jax.tree.map(lambda derivative: weighted(derivative).sum(0), d_closure),
    )


def _selected(log_prob: Array, row_weight: Array, per_token: Sequence[Array]) -> tuple[Array, Array, tuple[Array, ...]]:
    """Returns which rows contribute, and the arguments of the token loss, zeros in the other rows."""
    contributes = row_weight != 0
    arguments = (jnp.where(contributes, values.astype(jnp.float32), 0.0) for values in (log_prob, *per_token))
    log_prob, *per_token = arguments
    return contributes, log_prob, tuple(per_token)


def _weighted(loss: Array, log_prob: Array, row_weight: Array, contributes: Array) -> Array:
    """Returns row_weight * loss, NaN where log_prob is NaN, 0 in rows that do not contribute."""
    loss = jnp.where(jnp.isnan(log_prob), jnp.nan, row_weight * loss)
    return jnp.where(contributes, loss, 0.0)


def _chosen(needed: Sequence[bool], arrays: Sequence[Array]) -> OptionalArrays:
    """Returns the arrays that are differentiated."""
    return tuple(array if need else None for array, need in zip(arrays, needed, strict=True))


def _completed(chosen: OptionalArrays, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Returns `chosen` with the other arrays."""
    return tuple(other if array is None else array for array, other in zip(chosen, arrays, strict=True))
