"""Gradients while chunks of rows add to them, and the products that they are made of."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_pallas.pieces import Piece

if TYPE_CHECKING:
    from jax_pallas.chunked import Problem


class Gradients(NamedTuple):
    """None where not asked for."""

    d_input: Array | None  # (N, D), input's dtype
    d_weight: Array | None  # linear_weight's shape and dtype
    d_bias: Array | None  # (V,), linear_bias's dtype


class Wanted(NamedTuple):
    """Which gradients a call computes; the others cost nothing."""

    d_input: bool
    d_weight: bool
    d_bias: bool


NOTHING = Wanted(False, False, False)


def product_of(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Returns the product of a and b over one axis of each, in float32 with float32 accumulation.

    float32 operands mean float32 products, not TF32, unless `jax.default_matmul_precision` asks for less.
    """
    exact = a.dtype == jnp.float32 and jax.config.jax_default_matmul_precision is None
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def add_d_weight(
    problem: "Problem", d_logits: Array, x: Array, slab: Piece, scale: Array | None, d_weight: Array
) -> Array:
    """Returns d_weight with scale * d_logits^T x added to its slab, of d_logits (n, v) and x (n, D); None is 1."""
    axis = problem.vocab_axis
    product = product_of(d_logits, x, (0, 0)) if axis == 0 else product_of(x, d_logits, (0, 0))
    if scale is not None:
        product = product * scale
    return slab.put(d_weight, slab.of(d_weight, axis) + product, axis)


class HeadSums(NamedTuple):
    """The gradients of the head while chunks add to them; None where not asked for."""

    d_weight: Array | None  # float32, or linear_weight's dtype where a float32 sum would not fit the budget
    d_bias: Array | None  # (V,) float32

    @staticmethod
    def zeros(problem: "Problem", wanted: Wanted, *, float32_sum: bool) -> "HeadSums":
        w, b = problem.linear_weight, problem.linear_bias
        d_bias = jnp.zeros(b.shape, jnp.float32) if wanted.d_bias and b is not None else None
        if not wanted.d_weight:
            return HeadSums(None, d_bias)
        return HeadSums(jnp.zeros(w.shape, jnp.float32 if float32_sum else w.dtype), d_bias)

    def result(self, problem: "Problem") -> tuple[Array | None, Array | None]:
        d_weight = None if self.d_weight is None else self.d_weight.astype(problem.linear_weight.dtype)
        if self.d_bias is None or problem.linear_bias is None:
            return d_weight, None
        return d_weight, self.d_bias.astype(problem.linear_bias.dtype)
