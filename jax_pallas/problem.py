"""What one call is: its arrays and options (`Problem`), which gradients it needs (`NeedsGrad`), and the accumulators
that chunks of rows add those gradients to.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_pallas.devices import ONE_DEVICE, Devices
from jax_pallas.plan import ExecutionPlan, MatrixLayout
from jax_pallas.slicing import SYMBOLIC_TOKENS, Slice, is_symbolic
from linear_ce.spec import LossSpec


@dataclass(frozen=True)
class Problem:
    """The arrays of one call and its options.

    Args:
        input: (N, D), or the rows of this device, (N / `devices.token_parts`, D).
        linear_weight: (V, D), or (D, V) where `vocab_axis` is 1, or the shard of it that starts at class
            `vocab_offset`; float32 or input's dtype.
        linear_bias: (V,), of the same rows, or None.
        target: (N,) int32, class indices of the whole vocabulary.
        row_weight: (N,) float32 of `row_math.row_weights`; rows of weight 0 are excluded.
        class_weight: (K,) float32 of the whole vocabulary, or None. With `devices` that divide the vocabulary, the rows
            past the classes have 0.
        spec: the options.
        classes: K of the whole vocabulary.
        vocab_offset: class index of linear_weight's first row; an array where `devices` divide the vocabulary.
        vocab_axis: which axis of linear_weight is the vocabulary.
        plan: how the call runs; None in tests that call the functions of `chunked` directly.
        grad_into: linear_weight's shape, float32: d_weight is this plus the gradient; or None.
        sends_head: grad_into is zeros, and d_weight, float32, may have the rows of this device only of the sum over the
            devices that gathered linear_weight.
        devices: among which the call is divided.
        class_count: () int32, how many of the first `classes` rows of linear_weight are classes, where that is known
            only when the program runs: in `shard_rows.py`; None: all.
    """

    input: Array
    linear_weight: Array
    linear_bias: Array | None
    target: Array
    row_weight: Array
    class_weight: Array | None
    spec: LossSpec
    classes: int
    vocab_offset: Array | int = 0
    vocab_axis: int = 0
    plan: ExecutionPlan | None = None
    grad_into: Array | None = None
    sends_head: bool = False
    devices: Devices = ONE_DEVICE
    class_count: Array | None = None

    @property
    def tokens(self) -> int:
        return self.target.shape[0]

    @property
    def casts_head(self) -> bool:
        """Whether the head is float32 and the input is not: it is split, or rounded."""
        return self.linear_weight.dtype != self.input.dtype

    @property
    def float32_programs(self) -> int:
        return 0 if self.plan is None else self.plan.float32_programs

    @property
    def local_classes(self) -> int:
        """How many rows of linear_weight are classes. The other rows are padding. Where devices divide the vocabulary,
        all rows: `classes_of` masks the padding."""
        rows = self.linear_weight.shape[self.vocab_axis]
        if isinstance(self.vocab_offset, int):
            return min(max(self.classes - self.vocab_offset, 0), rows)
        return rows

    @property
    def most_classes(self) -> int:
        """K, or where devices divide the vocabulary the rows of a shard."""
        return self.linear_weight.shape[self.vocab_axis] if self.devices.vocab_axes else self.classes

    @property
    def masks_classes(self) -> bool:
        """Whether which rows of linear_weight are padding is known only when the program runs."""
        rows = self.devices.shards * self.linear_weight.shape[self.vocab_axis]
        return bool(self.devices.vocab_axes) and self.classes < rows

    def classes_of(self, vocab_chunk: Slice) -> Slice:
        """Returns a vocabulary chunk whose rows past the classes are not fresh."""
        if not self.masks_classes:
            return vocab_chunk
        is_class = self.vocab_offset + vocab_chunk.start + jnp.arange(vocab_chunk.size) < self.classes
        return vocab_chunk._replace(fresh=is_class if vocab_chunk.fresh is None else is_class & vocab_chunk.fresh)

    def class_weight_of(self, vocab_chunk: Slice) -> Array | None:
        if self.class_weight is None:
            return None
        return lax.dynamic_slice_in_dim(self.class_weight, self.vocab_offset + vocab_chunk.start, vocab_chunk.size)

    def weight_of(self, vocab_chunk: Slice) -> Array:
        """Returns the vocabulary chunk of the head, (v, D) or (D, v), in input's dtype; (v, 2D) or (2D, v) if the head
        is split."""
        w, dtype = vocab_chunk.of(self.linear_weight, self.vocab_axis), self.input.dtype
        if self.masks_classes and vocab_chunk.fresh is not None:  # the padding may hold NaN
            w = jnp.where(jnp.expand_dims(vocab_chunk.fresh, 1 - self.vocab_axis), w, 0)
        return halves(w, dtype, 1 - self.vocab_axis) if self.spec.splits_head else w.astype(dtype)

    def as_multiplied(self, w: Array) -> Array:
        """Returns rows of the head with the numbers that the matmuls take: those of a float32 head are rounded unless
        it is split."""
        return rounded(w, self.input.dtype) if self.casts_head and not self.spec.splits_head else w

    def beside_head(self, x: Array) -> Array:
        """Returns rows (n, D) as an operand of the logits' matmul with `weight_of`: (n, 2D) if the head is split."""
        return jnp.concatenate([x, x], 1) if self.spec.splits_head else x

    def target_column(self, target: Array, vocab_chunk: Slice) -> tuple[Array, Array]:
        """Returns each target's column within a vocabulary chunk, (n,), some column where it has none, and whether it
        has one."""
        column = target - (self.vocab_offset + vocab_chunk.start)
        hit = (column >= 0) & (column < vocab_chunk.size)
        column = column.clip(0, vocab_chunk.size - 1)
        return column, hit if vocab_chunk.fresh is None else hit & vocab_chunk.fresh[column]

    def chunk_row_weight(self, chunk: Slice) -> Array:
        """Returns (n,) row weights, 0 for rows that an earlier chunk has seen."""
        row_weight = chunk.of(self.row_weight)
        return row_weight if chunk.fresh is None else jnp.where(chunk.fresh, row_weight, 0.0)

    def rows(self, chunk: Slice) -> Array:
        """Returns the chunk's input, (n, D), with zeros in rows that do not contribute, because those may hold NaN."""
        return jnp.where((self.chunk_row_weight(chunk) != 0)[:, None], chunk.of(self.input), 0)


def plan_of(problem: Problem) -> ExecutionPlan:
    """Returns the problem's plan. Every call of a public function has one."""
    assert problem.plan is not None
    return problem.plan


def is_one_chunk(problem: Problem) -> bool:
    """Whether the call has no kernels and no loops, so that XLA can divide it among devices."""
    plan = plan_of(problem)
    if plan.path != "chunked" or is_symbolic(problem.tokens):
        return False
    chunks, classes = plan.chunk_config, problem.local_classes
    return chunks.rows >= problem.tokens and min(chunks.vocab_chunk, chunks.first_vocab_chunk) >= classes


def layout_of(matrix: Array) -> MatrixLayout:
    """Returns the properties of a matrix that a plan depends on."""
    rows, columns = matrix.shape
    # As many rows as a symbolic number stands for: at most one chunk of rows is computed without need.
    return MatrixLayout(
        (SYMBOLIC_TOKENS if is_symbolic(rows) else rows, columns), matrix.dtype.itemsize, matrix.dtype.name
    )


class Gradients(NamedTuple):
    """The gradients of a call; None for those that are not computed."""

    d_input: Array | None  # (N, D), input's dtype
    d_weight: Array | None  # linear_weight's shape and dtype; with `Problem.grad_into` float32, and includes it
    d_bias: Array | None  # (V,), linear_bias's dtype


NOTHING_COMPUTED = Gradients(None, None, None)


class NeedsGrad(NamedTuple):
    """Which gradients a call computes. The others take no time and no memory."""

    d_input: bool
    d_weight: bool
    d_bias: bool


NO_GRADIENTS = NeedsGrad(False, False, False)


class SavedRows(NamedTuple):
    """What a forward pass keeps of the first S rows of a call, whose upstream gradients it does not know: MATH.md (41).

    Fields are None if not needed.
    """

    # (S, K or more), input's dtype: d_logits for an upstream gradient of 1, or the exponentials F of each chunk.
    e: Any
    unit_d_input: Array | None  # (S, D), input's dtype, for an upstream gradient of 1
    rho: Array | None  # (S,) float32, factors of the rows of e; NaN where a row of e has zeros in place of NaN
    theta: Array | None  # (S,) float32, the targets' terms, for an upstream gradient of 1; None where e has them
    # (S,) float32, of float16 exponentials: unit_d_input, rho and theta are divided by it; None if they are not.
    unit_scale: Array | None = None


def float32_matmul(
    a: Array, b: Array, contract: tuple[int, int], *, total: Array | None = None, programs: int = 0
) -> Array:
    """Returns the matmul of a and b, contracted over one axis of each, in float32 with float32 accumulation.

    float32 operands mean float32 matmuls, not TF32, unless `jax.default_matmul_precision` is set.

    Args:
        a, b: matrices of one dtype.
        contract: the axis of each.
        total: a matrix that the result is added to, or None.
        programs: `ExecutionPlan.float32_programs`, of float32 operands.
    """
    if programs:
        from jax_pallas import float32_matmuls  # Pallas is imported only for its kernels

        added = float32_matmuls.add_matmul(total, a, b, contract, programs=programs)
        if added is not None:
            return added
    exact = a.dtype == jnp.float32 and jax.config.jax_default_matmul_precision is None
    result = lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )
    return result if total is None else total + result


def rounded(w: Array, dtype: Any) -> Array:
    """Returns a float32 array, float32, with the numbers of another dtype. XLA would remove a conversion to the dtype
    and back."""
    finfo = jnp.finfo(dtype)
    return lax.reduce_precision(w, finfo.nexp, finfo.nmant)


def halves(w: Array, dtype: Any, axis: int) -> Array:
    """Returns a float32 matrix as the sum of two of another dtype, joined along an axis: the matrix rounded, and what
    is left rounded: MATH.md (39)."""
    high = rounded(w, dtype)
    return jnp.concatenate([high.astype(dtype), (w - high).astype(dtype)], axis)


def add_d_weight(
    problem: Problem, d_logits: Array, x: Array, vocab_chunk: Slice, scale: Array | None, d_weight: Array
) -> Array:
    """Returns d_weight with scale * d_logits^T x added to its vocabulary chunk, of d_logits (n, v) and x (n, D); None
    is 1."""
    axis, old = problem.vocab_axis, vocab_chunk.of(d_weight, problem.vocab_axis)
    a, b = (d_logits, x) if axis == 0 else (x, d_logits)
    if scale is None:
        added = float32_matmul(a, b, (0, 0), total=old, programs=problem.float32_programs)
    else:
        added = old + float32_matmul(a, b, (0, 0)) * scale
    return vocab_chunk.put(d_weight, added, axis)


class HeadSums(NamedTuple):
    """The gradients of the head while chunks add to them; None if not computed."""

    d_weight: Array | None  # float32, or linear_weight's dtype where a float32 sum would not fit the budget
    d_bias: Array | None  # (V,) float32

    @staticmethod
    def zeros(problem: Problem, needs_grad: NeedsGrad, *, float32_sum: bool) -> "HeadSums":
        w, b = problem.linear_weight, problem.linear_bias
        d_bias = jnp.zeros(b.shape, jnp.float32) if needs_grad.d_bias and b is not None else None
        if not needs_grad.d_weight:
            return HeadSums(None, d_bias)
        if problem.grad_into is not None:
            return HeadSums(problem.grad_into, d_bias)
        return HeadSums(jnp.zeros(w.shape, jnp.float32 if float32_sum else w.dtype), d_bias)

    def result(self, problem: Problem) -> tuple[Array | None, Array | None]:
        d_weight = self.d_weight
        if d_weight is not None and problem.grad_into is None:
            d_weight = d_weight.astype(problem.linear_weight.dtype)
        if self.d_bias is None or problem.linear_bias is None:
            return d_weight, None
        return d_weight, self.d_bias.astype(problem.linear_bias.dtype)
