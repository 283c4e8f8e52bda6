"""Label smoothing in plans A and B with scaled exponentials: terms of rank one beside the negative log-likelihood.

Without a softcap the logits are linear in the input and in the head, and so is what label smoothing adds to a loss
whose class weights are u: MATH.md (37), (38). Its gradients are a vector for each factor:

    loss_i    += eps g_i (mean(w) z_target - m_i)              `losses`; `add_to_theta` adds the target's term
    d_input_i -= eps g_i s mean_v(w_v weight_v)                `add_to_input`, or `of_input`
    d_weight_v -= eps s w_v / K sum_i(g_i input_i)             `add_to_head`, or `start_head`

m_i is the mean over the classes of w times the logits of row i, which takes one dot product, with the mean row of the
head. So smoothing takes no fourth matmul.

Gradients of float16 may be multiplied by powers of two (MATH.md section 16), and so are these terms. In float16 they
cost no rounding of the gradients: those of d_input are added before its only rounding, and d_weight begins with its
own, which are small beside most of it. In bfloat16 they are added at the end, because the memory of d_weight may hold
exponentials until the first chunk is added.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jax_pallas import vocab_shard
from jax_pallas.gathering import own_rows
from jax_pallas.problem import Problem, plan_of
from jax_pallas.slicing import Slice


class _Exchanged(NamedTuple):
    """What devices exchange of the rows of the input that each has, float32."""

    dots: Array  # (N,), the sum of each row of the input times the mean row of the head
    row_sum: Array  # (D,), the sum of these rows, each times its row weight


@dataclass(frozen=True)
class Smoothing:
    """What label smoothing needs besides the rows.

    Args:
        problem: without label smoothing, with the class weights u of its negative log-likelihood.
        epsilon: the label smoothing.
        mean_row: (D,) float32, the mean of the head's rows, each times its class weight.
        mean_bias: () float32, that of the bias.
        mean_weight: () float32, that of the class weights.
        class_weight: (K,) float32, or None; where devices have shards of the vocabulary, of the rows of this device's
            shard, 0 in those that are no classes.
        scales: powers of two that d_input and the gradients of the head are multiplied by, or None.
        of_tokens: where tokens are gathered, what devices exchange for all of them; None: computed when needed.
    """

    problem: Problem
    epsilon: float
    mean_row: Array
    mean_bias: Array
    mean_weight: Array
    class_weight: Array | None
    scales: tuple[Array, Array] | None
    of_tokens: "_Exchanged | None" = None

    @staticmethod
    def of(problem: Problem, scales: tuple[Array, Array] | None) -> "Smoothing | None":
        """Returns the smoothing of a call, None if it has none. Where devices have shards of the vocabulary, they
        exchange the sums of their rows."""
        if scales is not None and problem.grad_into is not None:  # of d_bias, `scaled_exp` scales the whole sum
            scales = scales[0], jnp.float32(1.0)
        epsilon, classes, axis = problem.spec.label_smoothing, problem.classes, problem.vocab_axis
        if not epsilon:
            return None
        w, b, class_weight = problem.linear_weight, problem.linear_bias, problem.class_weight
        own = row_sum = None
        weights = jnp.ones(classes, jnp.float32) if class_weight is None else class_weight
        if problem.devices.vocab_axes:
            own = _of_shard(problem)
            mean_row, mean_bias, row_sum = _means_of_shards(problem, own)
        else:
            # Not a matmul, which would copy a head with padding. Padding may hold NaN.
            factor = jnp.expand_dims(jnp.pad(weights, (0, w.shape[axis] - classes)), 1 - axis)
            real = jnp.expand_dims(jnp.arange(w.shape[axis]) < classes, 1 - axis)
            mean_row = jnp.where(real, factor * w.astype(jnp.float32), 0.0).sum(axis) / classes
            mean_bias = jnp.float32(0) if b is None else (weights * b[:classes].astype(jnp.float32)).sum() / classes
        mean_weight = weights.sum() / classes
        if class_weight is not None:
            class_weight = (1.0 - epsilon) * class_weight + epsilon * mean_weight
        spec = replace(problem.spec, label_smoothing=0.0)
        whole = replace(problem, spec=spec, class_weight=class_weight)
        own = problem.class_weight if own is None else own
        made = Smoothing(whole, epsilon, mean_row, mean_bias, mean_weight, own, scales)
        return made if row_sum is None else made._exchange(row_sum)

    def _exchange(self, row_sum: Array) -> "Smoothing":
        """Returns the smoothing with what devices exchange of the rows that each has, before the first chunk. At the
        end it would run beside the last matmul in place of the sum of d_input."""
        of_rows = (_rows(self.problem) * self.mean_row).sum(1)
        dots = vocab_shard.rows_of_all(self.problem.devices, of_rows[:, None])[:, 0]
        x, dots, row_sum = lax.optimization_barrier((self.problem.input, dots, row_sum))
        return replace(self, problem=replace(self.problem, input=x), of_tokens=_Exchanged(dots, row_sum))

    def add_to_theta(self, theta: Array, row_weight: Array) -> Array:
        """Returns theta (n,) with the target's terms of rows of these row weights (n,)."""
        term = self.problem.spec.logit_scale * self.epsilon * self.mean_weight * row_weight
        return jnp.where(row_weight != 0, theta + term, theta)

    def losses(self, loss: Array, target_logit: Array) -> Array:
        """Returns the losses (N,) of all rows with the terms of label smoothing."""
        row_weight, scale = self.problem.row_weight, self.problem.spec.logit_scale
        dots = (_rows(self.problem) * self.mean_row).sum(1) if self.of_tokens is None else self.of_tokens.dots
        mean_logit = scale * (dots + self.mean_bias)
        term = self.epsilon * row_weight * (self.mean_weight * target_logit - mean_logit)
        return jnp.where(row_weight != 0, loss + term, loss)

    def of_input(self, row_weight: Array) -> tuple[Array, Array]:
        """Returns the terms of d_input for rows of these row weights (n,): a factor (n,) of each row, and what it is a
        factor of, (D,)."""
        if self.scales is not None:
            row_weight = row_weight * self.scales[0]  # the largest is then between 1 and 2
        return row_weight * self._factor(), self.mean_row

    def add_to_input(self, d_input: Array) -> Array:
        """Returns d_input, of the rows of the input, with their terms."""
        row_weight = _row_weight(self.problem)[:, None]
        summed = d_input.astype(jnp.float32) + self._factor() * row_weight * self.mean_row
        return jnp.where(row_weight != 0, summed, d_input).astype(d_input.dtype)

    def start_head(self, grad_into: Array | None) -> Array:
        """Returns the terms of all classes in d_weight, (V, D) or (D, V), of the input's dtype, or added to
        `grad_into`."""
        terms = self._of_weight()
        return terms.astype(self.problem.input.dtype) if grad_into is None else grad_into + terms

    def add_to_head(self, d_weight: Array | None, d_bias: Array | None) -> tuple[Array | None, Array | None]:
        """Returns d_weight, (V, D) or (D, V), with the terms of all classes, unless `start_head` added them, and d_bias
        (K,) with its terms."""
        if d_weight is not None and not plan_of(self.problem).fits_float16:
            d_weight = (d_weight.astype(jnp.float32) + self._of_weight()).astype(d_weight.dtype)
        if d_bias is not None:
            d_bias = d_bias + self._class_factors() * self._scaled(self.problem.row_weight.sum())
        return d_weight, d_bias

    def add_to_classes(self, d_weight: Array, classes: Array) -> Array:
        """Returns d_weight (n, D) float32 of some classes (n,) int32, perhaps past the last, with their terms."""
        factors = self._class_factors().at[classes].get(mode="fill", fill_value=0)
        return d_weight + factors[:, None] * self._row_sum()

    def _row_sum(self) -> Array:
        return self._scaled(_sum_of_rows(self.problem) if self.of_tokens is None else self.of_tokens.row_sum)

    def _of_weight(self) -> Array:
        axis, vocab = self.problem.vocab_axis, self.problem.linear_weight.shape
        row_sum = self._row_sum()
        factors = self._class_factors()
        factors = jnp.expand_dims(jnp.pad(factors, (0, vocab[axis] - len(factors))), 1 - axis)
        return factors * jnp.expand_dims(row_sum, axis)

    def _class_factors(self) -> Array:
        classes = self.problem.classes
        weights = jnp.ones(classes, jnp.float32) if self.class_weight is None else self.class_weight
        return self._factor() / classes * weights

    def _scaled(self, of_head: Array) -> Array:
        return of_head if self.scales is None else of_head * self.scales[1]

    def _factor(self) -> float:
        return -self.epsilon * self.problem.spec.logit_scale


def _row_weight(problem: Problem) -> Array:
    """Returns the weights of the rows of the input, which are those of all tokens or of this device's."""
    return own_rows(problem.devices, problem.row_weight)


def _rows(problem: Problem) -> Array:
    """Returns the rows of the input, float32, with zeros in those that do not contribute, which may hold any values."""
    x = problem.input.astype(jnp.float32)
    return jnp.where(_row_weight(problem)[:, None] != 0, x, 0.0)


def _sum_of_rows(problem: Problem) -> Array:
    """Returns the sum of the rows of the input, each times its weight, (D,) float32."""
    return (_row_weight(problem)[:, None] * _rows(problem)).sum(0)


def _of_shard(problem: Problem) -> Array:
    """Returns the class weights of the rows of this device's shard, 0 in those that are no classes, (rows,) float32."""
    own = Slice(0, problem.linear_weight.shape[problem.vocab_axis], None)
    weights = problem.class_weight_of(own)
    if weights is None:
        is_class = problem.classes_of(own).fresh
        weights = jnp.ones(own.size, jnp.float32) if is_class is None else is_class.astype(jnp.float32)
    return weights


def _means_of_shards(problem: Problem, weights: Array) -> tuple[Array, Array, Array | None]:
    """Returns the means over all classes of the head's rows (D,) and of the bias (), each times its class weight, and
    `_Exchanged.row_sum` where tokens are gathered. weights: of `_of_shard`."""
    w, b, axis = problem.as_multiplied(problem.linear_weight), problem.linear_bias, problem.vocab_axis
    own = jnp.where(jnp.expand_dims(weights != 0, 1 - axis), jnp.expand_dims(weights, 1 - axis) * w, 0.0).sum(axis)
    of_bias = jnp.zeros(1) if b is None else jnp.where(weights != 0, weights * b, 0.0).sum()[None]
    devices, hidden, of_rows = problem.devices, len(own), []
    if devices.token_parts > 1:  # so many devices have the same rows
        of_rows = [_sum_of_rows(problem) * (devices.token_parts / devices.shards)]
    sums = vocab_shard.all_sum(devices, jnp.concatenate([own, of_bias, *of_rows]))
    means = sums[: hidden + 1] / problem.classes
    return means[:hidden], means[hidden], sums[hidden + 1 :] if of_rows else None
