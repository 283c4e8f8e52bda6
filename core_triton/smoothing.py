"""Label smoothing in plans A and B with scaled exponentials: terms of rank one beside the negative log-likelihood.

Without a softcap the logits are linear in the input and in the head, and so is what label smoothing adds to a loss
whose class weights are u: MATH.md (37), (38). Its gradients are a vector for each factor:

    loss_i    += eps g_i (mean(w) z_target - m_i)              `add_to_rows`, which also adds the target's term to theta
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

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_triton import row_kernels, vocab_shard
from core_triton.launch import At, cdiv, column_block, launch
from core_triton.problem import ClassSum, Problem, float32_matmul, operand, plan_of
from core_triton.row_math import MAX_EXPONENT

ROWS = 8  # of a program of `smooth_rows_kernel`


@dataclass(frozen=True)
class Smoothing:
    """What label smoothing needs besides the rows.

    Args:
        problem: without label smoothing, with the class weights u of its negative log-likelihood.
        epsilon: the label smoothing.
        mean_row: (D,) float32, the mean of the head's rows, each times its class weight.
        mean_bias: () float32, that of the bias.
        mean_weight: () float32, that of the class weights.
        class_weight: (K,) float32, or None; where ranks have shards of the vocabulary, of this rank's classes.
        scales: (2,) powers of two that d_input and the gradients of the head are multiplied by, or None.
    """

    problem: Problem
    epsilon: float
    mean_row: Tensor
    mean_bias: Tensor
    mean_weight: Tensor
    class_weight: Tensor | None
    scales: Tensor | None

    @staticmethod
    def of(problem: Problem, head_rows: int, scales: Tensor | None) -> "Smoothing | None":
        """Returns the smoothing of a call, None if it has none. Reads the head `head_rows` rows at a time. Where ranks
        have shards of the vocabulary, they exchange the sums of their rows."""
        epsilon, classes, w = problem.spec.label_smoothing, problem.classes, problem.linear_weight
        dtype = problem.input.dtype  # of the operands of the logits
        if not epsilon:
            return None
        class_weight, b, own = problem.class_weight, problem.linear_bias, slice(0, problem.local_classes)
        weights = problem.class_weight_or_ones(own)
        mean_row, vocab_chunks = problem.row_weight.new_zeros(w.shape[1]), problem.vocab_chunks(head_rows)
        if plan_of(problem).splits_in_place:  # as an operand of a matmul in 16 bits the whole head would be copied
            mean_row, vocab_chunks = torch.mv(w[own].T, weights), []
        for vocab_chunk in vocab_chunks:
            parts, power = _in_two(weights[vocab_chunk], dtype)
            sums = float32_matmul(operand(parts, dtype), problem.operand_of(vocab_chunk)).sum(0)
            if power is not None:
                sums = sums.ldexp(power)
            mean_row += sums.view(-1, len(mean_row)).sum(0)  # of both halves of a split head
        mean_bias = mean_row.new_zeros(()) if b is None else (weights * b[own].float()).sum() / classes
        if problem.shard is not None:
            sums = vocab_shard.all_sum(torch.cat([mean_row, mean_bias[None]]), problem.shard.group)
            mean_row, mean_bias = sums[:-1], sums[-1]
        mean_weight = mean_row.new_ones(()) if class_weight is None else class_weight.sum() / classes
        if class_weight is not None:
            class_weight = (1.0 - epsilon) * class_weight + epsilon * mean_weight
        spec = replace(problem.spec, label_smoothing=0.0)
        return Smoothing(
            replace(problem, spec=spec, class_weight=class_weight),
            epsilon,
            mean_row / classes,
            mean_bias,
            mean_weight,
            None if problem.class_weight is None else weights,
            scales,
        )

    def add_to_rows(
        self, n: int, *, order: At, target_logit: At, row_weight: At, theta: At | None, loss_out: Tensor
    ) -> None:
        """Adds the terms of n packed rows to their losses, and to theta if gradients are needed."""
        x, scale = self.problem.input, self.problem.spec.logit_scale
        launch(
            smooth_rows_kernel,
            (cdiv(n, ROWS),),
            x,
            self.mean_row,
            self.mean_bias,
            self.mean_weight,
            order,
            target_logit,
            row_weight,
            theta,
            loss_out,
            n,
            x.shape[1],
            *x.stride(),
            scale,
            self.epsilon,
            BLOCK_N=ROWS,
            BLOCK_D=column_block(x.shape[1]),
            num_warps=4,
        )

    def of_input(self, row_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the terms of d_input for packed rows of these row weights (N,): a factor (N,) of each row, and what
        it is a factor of, (D,)."""
        if self.scales is not None:
            row_weight = row_weight * self.scales[0]  # the largest is then between 1 and 2
        return row_weight * self._factor(), self.mean_row

    def add_to_input(self, d_input: Tensor) -> None:
        """Adds the terms of the rows of the input to d_input, which has its shape."""
        _add_outer(d_input, self.problem.row_weight[self.problem.own_tokens], self.mean_row, self._factor())

    def start_head(self, d_weight: ClassSum) -> None:
        """Writes the terms of all classes to d_weight, or adds them if it has begun."""
        _add_outer(d_weight.sum, self.class_weight, self.row_sum(), self._head_factor(), writes=not d_weight.started)
        d_weight.started = True

    def add_to_head(self, d_weight: ClassSum | None, d_bias: Tensor | None) -> None:
        """Adds the terms of all classes to d_bias (K,), and to d_weight unless `start_head` did."""
        if d_weight is not None and not plan_of(self.problem).fits_float16:
            _add_outer(d_weight.sum, self.class_weight, self.row_sum(), self._head_factor())
        if d_bias is not None:
            row = self._scaled(self.problem.row_weight.sum()[None])
            _add_outer(d_bias[:, None], self.class_weight, row, self._head_factor())

    def add_to_classes(self, d_weight: Tensor, classes: slice, row: Tensor) -> None:
        """Adds the terms of some classes to their rows (k, D) of d_weight, given `row_sum`."""
        weight = None if self.class_weight is None else self.class_weight[classes]
        _add_outer(d_weight, weight, row, self._head_factor())

    def row_sum(self) -> Tensor:
        """Returns the sum of the rows of the input, each times its row weight, (D,) float32, times the scale."""
        x, row_weight, shard = self.problem.input, self.problem.row_weight, self.problem.shard
        if shard is None or not shard.tokens:
            return self._scaled(row_kernels.class_sums(x, row_weight))
        own = row_kernels.class_sums(x, row_weight[self.problem.own_tokens])
        return self._scaled(vocab_shard.all_sum(own, shard.group))

    def _scaled(self, of_head: Tensor) -> Tensor:
        return of_head if self.scales is None else of_head * self.scales[1]

    def _head_factor(self) -> float:
        return self._factor() / self.problem.classes

    def _factor(self) -> float:
        return -self.epsilon * self.problem.spec.logit_scale


LARGEST_WEIGHT = 15  # exponent of a number below the largest one of float16


def _in_two(weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Returns float32 weights (n,) as two rows of another dtype (2, n), and the exponent () of a factor, None for 1.

    The factor times the sum of both rows has the weights' precision. float16 has the range for it only if the largest
    weight is near its largest number. The sum is then off by 2**-22 of a weight, or 2**-39 of the largest.
    """
    power = None
    if dtype == torch.float16:
        power = torch.frexp(weights.abs().amax()).exponent - LARGEST_WEIGHT
        power = power.clamp(min=-MAX_EXPONENT)
        weights = weights.ldexp(-power)
    high = weights.to(dtype)
    return torch.stack([high, (weights - high.float()).to(dtype)]), power


@triton.jit
def smooth_rows_kernel(
    input_ptr,
    mean_row_ptr,
    mean_bias_ptr,
    mean_weight_ptr,
    row_ptr,
    target_logit_ptr,
    row_weight_ptr,
    theta_ptr,
    loss_out_ptr,
    rows,
    hidden,
    input_stride,
    input_stride_d,
    scale,
    epsilon,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Adds the terms of label smoothing to loss_out (N,) at the rows row (rows,) int64 of the call and, if not None, to
    theta (rows,): (37), (38). Reads input (N, D), and target_logit and row_weight (rows,) float32. Rows of row_weight 0
    stay as they are. One program owns BLOCK_N rows."""
    row_ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row_ids < rows
    row_weight = tl.load(row_weight_ptr + row_ids, mask=inside, other=0.0)
    contributes = row_weight != 0
    picked = tl.load(row_ptr + row_ids, mask=inside, other=0)
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, hidden, BLOCK_D):
        columns = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        place = picked[:, None] * input_stride + columns[None, :] * input_stride_d
        mask = contributes[:, None] & (columns < hidden)[None, :]
        x = tl.load(input_ptr + place, mask=mask, other=0.0).to(tl.float32)
        acc += x * tl.load(mean_row_ptr + columns, mask=columns < hidden, other=0.0)[None, :]
    mean_weight = tl.load(mean_weight_ptr)
    mean_logit = scale * (tl.sum(acc, 1) + tl.load(mean_bias_ptr))
    target_logit = tl.load(target_logit_ptr + row_ids, mask=inside, other=0.0)
    factor = epsilon * row_weight
    loss = tl.load(loss_out_ptr + picked, mask=contributes, other=0.0)
    loss += factor * (mean_weight * target_logit - mean_logit)
    tl.store(loss_out_ptr + picked, loss, mask=contributes)
    if theta_ptr is not None:
        theta = tl.load(theta_ptr + row_ids, mask=contributes, other=0.0)
        tl.store(theta_ptr + row_ids, theta + scale * factor * mean_weight, mask=contributes)


@triton.jit
def add_outer_kernel(
    matrix_ptr, row_factor_ptr, row_ptr, rows, hidden, stride, factor, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WRITES: tl.constexpr = False,  # pyright: ignore[reportArgumentType]
):  # fmt: skip
    """Adds factor * row_factor_i * row_j to matrix (rows, D), rounded once, or with WRITES writes it. row_factor
    (rows,) and row (D,) are float32. row_factor may be None, which is 1. Without WRITES rows of factor 0 stay as they
    are."""
    row_ids = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row_factor = tl.full((BLOCK_N,), 1.0, tl.float32)
    if row_factor_ptr is not None:
        row_factor = tl.load(row_factor_ptr + row_ids, mask=row_ids < rows, other=0.0)
    mask = (row_ids < rows)[:, None] & (row_factor != 0)[:, None] & (columns < hidden)[None, :]
    if WRITES:
        mask = (row_ids < rows)[:, None] & (columns < hidden)[None, :]
    place = matrix_ptr + row_ids[:, None] * stride + columns[None, :]
    row = tl.load(row_ptr + columns, mask=columns < hidden, other=0.0)
    total = (factor * row_factor)[:, None] * row[None, :]
    if not WRITES:
        total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, total.to(matrix_ptr.dtype.element_ty), mask=mask)


def _add_outer(matrix: Tensor, row_factor: Tensor | None, row: Tensor, factor: float, *, writes: bool = False) -> None:
    """Launches `add_outer_kernel` on a matrix whose rows are contiguous."""
    rows, hidden = matrix.shape
    block = min(256, column_block(hidden))
    launch(
        add_outer_kernel,
        (cdiv(rows, 16), cdiv(hidden, block)),
        matrix,
        row_factor,
        row,
        rows,
        hidden,
        matrix.stride(0),
        factor,
        BLOCK_N=16,
        BLOCK_D=block,
        **({"WRITES": True} if writes else {}),
        num_warps=4,
    )
