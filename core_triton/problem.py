"""What one call is: its arrays and options (`Problem`), which gradients it needs (`NeedsGrad`), and the accumulators
that chunks of rows add those gradients to.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from core_triton.plan import ExecutionPlan, MatrixLayout
from core_triton.vocab_shard import VocabShard, own_tokens
from linear_ce.spec import LossSpec


@dataclass(frozen=True)
class Problem:
    """The arrays of one call and its options.

    Args:
        input: (N, D), or this rank's rows of it, at most `shard.tokens`.
        linear_weight: (V, D), or the shard of it that starts at class `vocab_offset`; float32 or input's dtype.
        linear_bias: (V,), of the same rows, or None.
        target: (N,) int64, class indices of the whole vocabulary.
        row_weight: (N,) float32 of `row_math.row_weights`; rows of weight 0 are excluded.
        class_weight: (K,) float32 of the whole vocabulary, or None.
        spec: the options.
        classes: K of the whole vocabulary.
        vocab_offset: class index of linear_weight's first row.
        shard: how the ranks of a process group have shards of the head; None if linear_weight is the whole head, or in
            tests that merge shards themselves.
        plan: how the call runs; None in tests that call the functions of `chunked` directly.
        grad_into: (V, D) float32, contiguous: d_weight is added to it, in place of a result; or None.
    """

    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    target: Tensor
    row_weight: Tensor
    class_weight: Tensor | None
    spec: LossSpec
    classes: int
    vocab_offset: int = 0
    shard: VocabShard | None = None
    plan: ExecutionPlan | None = None
    grad_into: Tensor | None = None

    @property
    def local_classes(self) -> int:
        """How many rows of linear_weight are classes. The other rows are padding."""
        return min(max(self.classes - self.vocab_offset, 0), self.linear_weight.shape[0])

    @property
    def most_classes(self) -> int:
        """K, or the rows of the largest shard: the same on all ranks."""
        return self.classes if self.shard is None else self.shard.rows

    @property
    def own_tokens(self) -> slice:
        """Which tokens of the call the rows of input are."""
        return own_tokens(self.shard, len(self.input))

    def operand_of(self, vocab_chunk: slice) -> Tensor:
        """Returns a vocabulary chunk of the head as an operand of matmuls: (v, D), or (v, 2D) if the head is split."""
        w, dtype = self.linear_weight[vocab_chunk], self.input.dtype
        return operand(halves(w, dtype) if self.spec.splits_head else w, dtype)

    def beside_head(self, x: Tensor) -> Tensor:
        """Returns rows (n, D) as an operand of the logits' matmul with `operand_of`: (n, 2D) if the head is split."""
        return torch.cat([x, x], 1) if self.spec.splits_head else x

    def chunks(self, size: int) -> Iterator[slice]:
        tokens = self.input.shape[0]
        return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))

    def vocab_chunks(self, size: int) -> list[slice]:
        return [slice(start, min(start + size, self.local_classes)) for start in range(0, self.local_classes, size)]

    def class_weight_of(self, vocab_chunk: slice) -> Tensor | None:
        if self.class_weight is None:
            return None
        return self.class_weight[self.vocab_offset + vocab_chunk.start : self.vocab_offset + vocab_chunk.stop]

    def class_weight_or_ones(self, vocab_chunk: slice) -> Tensor:
        """Returns the class weights of a vocabulary chunk, (v,) float32, or ones if the call has no class weights."""
        found = self.class_weight_of(vocab_chunk)
        return self.row_weight.new_ones(vocab_chunk.stop - vocab_chunk.start) if found is None else found

    def contributes(self, chunk: slice) -> Tensor:
        return self.row_weight[chunk] != 0

    def rows(self, chunk: slice) -> Tensor:
        """Returns the chunk's input, (n, D), with zeros in rows that do not contribute, because those may hold NaN.

        The result is contiguous for all strides of the input, so that the same GEMMs run.
        """
        rows = torch.empty_like(self.input[chunk], memory_format=torch.contiguous_format)
        return rows.copy_(self.input[chunk]).masked_fill_((self.row_weight[chunk] == 0)[:, None], 0.0)


def plan_of(problem: Problem) -> ExecutionPlan:
    """Returns the problem's plan. Every call of a public function has one."""
    assert problem.plan is not None
    return problem.plan


def layout_of_input(problem: Problem) -> MatrixLayout:
    """Returns the properties of the input of a problem. Rows that are gathered are contiguous."""
    layout = layout_of(problem.input)
    if problem.shard is None or not problem.shard.tokens:
        return layout
    hidden = layout.shape[1]
    return layout._replace(shape=(len(problem.target), hidden), strides=(hidden, 1), aligned=True)


def layout_of(matrix: Tensor) -> MatrixLayout:
    """Returns the properties of a matrix that a plan depends on."""
    aligned = matrix.device.type == "meta" or matrix.data_ptr() % 16 == 0
    rows, columns = matrix.shape
    return MatrixLayout((rows, columns), matrix.stride(), matrix.itemsize, DTYPE_NAMES[matrix.dtype], aligned)  # pyright: ignore[reportArgumentType]


DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


class Gradients(NamedTuple):
    """The gradients of a call; None for those that are not computed."""

    d_input: Tensor | None  # (N, D), input's dtype
    d_weight: Tensor | None  # (V, D), linear_weight's dtype; None if it was added to `Problem.grad_into`
    d_bias: Tensor | None  # (V,), linear_bias's dtype


NOTHING_COMPUTED = Gradients(None, None, None)


class NeedsGrad(NamedTuple):
    """Which gradients a call computes. The others take no time and no memory."""

    d_input: bool
    d_weight: bool
    d_bias: bool


NO_GRADIENTS = NeedsGrad(False, False, False)


class SavedRows(NamedTuple):
    """What a forward pass keeps of the first S rows of a call, whose upstream gradients it does not know: MATH.md (41).

    Fields are None if not needed. The last six are None if the rows are not packed. If they are, all fields but
    unit_d_input and unit_scale are in the order of the packed rows (`packed_rows.PackedRows`).
    """

    e: Tensor | None  # (S, K or more), input's dtype: the exponentials F, or d_logits for an upstream gradient of 1
    unit_d_input: Tensor | None  # (S, D), input's dtype, for an upstream gradient of 1
    rho: Tensor | None  # (S,) float32, factors of the rows of e; NaN where a row of e has zeros in place of NaN
    theta: Tensor | None  # (S,) float32, the targets' terms, for an upstream gradient of 1
    packed_target: Tensor | None  # (S,) int64
    order: Tensor | None  # (S,) int64
    count: Tensor | None  # () int32
    unit_scale: Tensor | None  # (S,) float32, of packed float16: unit_d_input, rho and theta are divided by it
    largest_x: Tensor | None  # (S,) float32, of packed float16: the largest magnitude in a row of the input


NOTHING_SAVED = SavedRows(*[None] * 9)


def float32_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b in float32 with float32 accumulation, for two results of `operand`."""
    return a @ b if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


def add_matmul(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Adds a @ b to `total`, or overwrites it if `first`, with float32 accumulation and one rounding."""
    if not a.is_cuda:
        result = float32_matmul(a, b)
        total.copy_(result if first else result.add_(total))
    elif total.dtype != a.dtype:  # float32 under 16-bit operands
        if first:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif first:
        torch.mm(a, b, out=total)
    else:
        torch.addmm(total, a, b, out=total)


def halves(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a float32 matrix (v, D) as the sum of two of another dtype, (v, 2D): the matrix rounded, and what is left
    rounded: MATH.md (39). `head_copy.head_of` does the same for the kernels."""
    hidden = w.shape[1]
    both = w.new_empty((len(w), 2 * hidden), dtype=dtype)
    both[:, :hidden] = w
    torch.sub(w, both[:, :hidden], out=both[:, hidden:])
    return both


def operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `tensor` rounded to `dtype`, as an operand of matmuls. On devices other than CUDA the operand is
    float32."""
    tensor = tensor.to(dtype)
    return tensor if tensor.is_cuda else tensor.float()


class ClassSum:
    """A gradient of the head, summed over chunks: in a separate float32 buffer if `float32_sum`, else in the result.
    With `into` it is added to that float32 tensor, and there is no result. What the first chunk adds overwrites the sum
    unless it is `started`. Its memory is allocated when it is first used: a chunk that sends all of the gradient
    (`d_weight_parts.py`) does not use it."""

    def __init__(
        self,
        like: Tensor,
        classes: int,
        *,
        float32_sum: bool,
        into: Tensor | None = None,
        total: Tensor | None = None,
    ) -> None:
        """With `total`, a gradient of other rows, the sum begins with it."""
        self.adds = self.started = into is not None
        self.like, self.classes, self.float32_sum = like, classes, float32_sum and into is None
        self.given = into if total is None else total

    @cached_property
    def total(self) -> Tensor:
        if self.given is not None:
            return self.given
        return torch.empty_like(self.like, memory_format=torch.contiguous_format)

    @cached_property
    def sum(self) -> Tensor:
        return self.total[: self.classes].float() if self.float32_sum else self.total[: self.classes]

    def put(self, vocab_chunk: slice, summand: Tensor, *, first: bool) -> None:
        if self.started or not first:
            summand += self.sum[vocab_chunk]
        self.sum[vocab_chunk] = summand

    def put_matmul(
        self,
        vocab_chunk: slice,
        a: Tensor,
        b: Tensor,
        scale: Tensor | None,
        *,
        first: bool,
        add: Callable[..., None] | None = None,
    ) -> None:
        """Adds scale * a @ b, by `add` in place of `add_matmul` if scale is None."""
        if scale is None:
            (add or add_matmul)(self.sum[vocab_chunk], a, b, first=first and not self.started)
        else:
            self.put(vocab_chunk, float32_matmul(a, b).mul_(scale), first=first)

    def result(self, *, empty: bool) -> Tensor | None:
        if self.adds:
            return None
        if empty:
            return self.total.zero_()
        if self.sum.dtype != self.total.dtype:
            self.total[: len(self.sum)] = self.sum
        if len(self.sum) < len(self.total):
            self.total[len(self.sum) :] = 0  # padding
        return self.total


class GradientSums:
    """The gradients of a call while its chunks add to them."""

    def __init__(
        self,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        classes: int,
        needs_grad: NeedsGrad,
        *,
        float32_sum: bool,
        d_input: Tensor | None = None,
        others: Gradients = NOTHING_COMPUTED,
        grad_into: Tensor | None = None,
    ) -> None:
        """`d_input`: where d_input is written, if not to a new tensor. `others`: gradients of the head by other rows,
        to which those of these rows are added."""
        self.d_input = d_input
        if needs_grad.d_input and d_input is None:
            self.d_input = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.d_weight = None
        if needs_grad.d_weight:
            self.d_weight = ClassSum(w, classes, float32_sum=float32_sum, into=grad_into, total=others.d_weight)
        self.d_bias = None
        if needs_grad.d_bias:
            assert b is not None
            self.d_bias = ClassSum(b, classes, float32_sum=b.dtype != torch.float32, total=others.d_bias)

    def result(self, *, empty: bool) -> Gradients:
        return Gradients(
            d_input=self.d_input,
            d_weight=None if self.d_weight is None else self.d_weight.result(empty=empty),
            d_bias=None if self.d_bias is None else self.d_bias.result(empty=empty),
        )
