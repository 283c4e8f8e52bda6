"""Label smoothing in plans A and B with scaled exponentials: terms of rank one beside the negative log-likelihood.

Without a softcap the logits are linear in the input and in the head, and so is what label smoothing adds to a loss
whose class weights are u: MATH.md (37), (38). Its gradients are a vector for each factor:

    loss_i    += eps g_i (mean(w) z_target - m_i)              `losses`; `add_to_theta` adds the target's term
    d_input_i -= eps g_i s mean_v(w_v weight_v)                `add_to_input`
    d_weight_v -= eps s w_v / K sum_i(g_i input_i)             `add_to_head`

m_i is the mean over the classes of w times the logits of row i, which takes one dot product, with the mean row of the
head. So smoothing takes no fourth matmul.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array

from jax_pallas.problem import Problem


@dataclass(frozen=True)
class Smoothing:
    """What label smoothing needs besides the rows.

    Args:
        problem: without label smoothing, with the class weights u of its negative log-likelihood.
        epsilon: the label smoothing.
        mean_row: (D,) float32, the mean of the head's rows, each times its class weight.
        mean_bias: () float32, that of the bias.
        mean_weight: () float32, that of the class weights.
        class_weight: (K,) float32, or None.
    """

    problem: Problem
    epsilon: float
    mean_row: Array
    mean_bias: Array
    mean_weight: Array
    class_weight: Array | None

    @staticmethod
    def of(problem: Problem) -> "Smoothing | None":
        """Returns the smoothing of a call, None if it has none."""
        epsilon, classes, axis = problem.spec.label_smoothing, problem.classes, problem.vocab_axis
        if not epsilon:
            return None
        w, b, class_weight = problem.linear_weight, problem.linear_bias, problem.class_weight
        weights = jnp.ones(classes, jnp.float32) if class_weight is None else class_weight
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
        return Smoothing(whole, epsilon, mean_row, mean_bias, mean_weight, problem.class_weight)

    def add_to_theta(self, theta: Array, row_weight: Array) -> Array:
        """Returns theta (n,) with the target's terms of rows of these row weights (n,)."""
        term = self.problem.spec.logit_scale * self.epsilon * self.mean_weight * row_weight
        return jnp.where(row_weight != 0, theta + term, theta)

    def losses(self, loss: Array, target_logit: Array) -> Array:
        """Returns the losses (N,) of all rows with the terms of label smoothing."""
        row_weight, scale = self.problem.row_weight, self.problem.spec.logit_scale
        mean_logit = scale * ((self._rows() * self.mean_row).sum(1) + self.mean_bias)
        term = self.epsilon * row_weight * (self.mean_weight * target_logit - mean_logit)
        return jnp.where(row_weight != 0, loss + term, loss)

    def add_to_input(self, d_input: Array) -> Array:
        """Returns d_input (N, D) with the terms of all rows."""
        row_weight = self.problem.row_weight[:, None]
        summed = d_input.astype(jnp.float32) + self._factor() * row_weight * self.mean_row
        return jnp.where(row_weight != 0, summed, d_input).astype(d_input.dtype)

    def add_to_head(self, d_weight: Array | None, d_bias: Array | None) -> tuple[Array | None, Array | None]:
        """Returns d_weight, (V, D) or (D, V), and d_bias (K,) with the terms of all classes."""
        classes, axis, row_weight = self.problem.classes, self.problem.vocab_axis, self.problem.row_weight
        weights = jnp.ones(classes, jnp.float32) if self.class_weight is None else self.class_weight
        factor = self._factor() / classes * weights
        if d_weight is not None:
            row_sum = (row_weight[:, None] * self._rows()).sum(0)
            factors = jnp.expand_dims(jnp.pad(factor, (0, d_weight.shape[axis] - classes)), 1 - axis)
            summed = d_weight.astype(jnp.float32) + factors * jnp.expand_dims(row_sum, axis)
            d_weight = summed.astype(d_weight.dtype)
        if d_bias is not None:
            d_bias = d_bias + factor * row_weight.sum()
        return d_weight, d_bias

    def _factor(self) -> float:
        return -self.epsilon * self.problem.spec.logit_scale

    def _rows(self) -> Array:
        """Returns the input (N, D) float32, with zeros in rows that do not contribute, which may hold any values."""
        x = self.problem.input.astype(jnp.float32)
        return jnp.where(self.problem.row_weight[:, None] != 0, x, 0.0)
