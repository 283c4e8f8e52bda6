"""What plan A with scaled exponentials needs for float16, whose range is 40 powers of two: MATH.md section 16.

bfloat16 has the range of float32, so the target's logit is a good enough reference. For float16:

    reference exponents from an estimate of lse       `place`: a sample of the classes, and the target
    exponentials that are too large are shifted       `kernels.fit_in_float16`, in the kernels of the exponentials
    a row with a shift gets one shift for all classes `finish`
    rho x in float16                                  `finish`: one power of two for a chunk, a factor of E^T x
    gradients for an unknown upstream gradient        `scales_of`, `finish` and `scale_head`: (34)
    the same of saved rows                            `saved_kernels.scale_units`: (52)

A row that is shifted is read and written once more. Nothing is multiplied again. The kernels here have no matmul.
Equations: linear_ce/MATH.md.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_triton import hopper_logits, kernels
from core_triton.first_chunk import StoredExponentials
from core_triton.kernels import LOG2_E
from core_triton.launch import At, cdiv, column_block, launch
from core_triton.problem import Problem, plan_of
from core_triton.recompute import tma_compatible
from core_triton.row_kernels import BLOCKS_AT_ONCE, SMALL_BLOCK

# Where the estimate of a row's lse is placed. A probability of 2**-26 is a normal float16 number there, and one of
# 2**-36 the smallest. The estimate may be 3 powers of two too low before a row is shifted.
PLACE = tl.constexpr(12.0)

# A chunk's largest |rho x| is placed here: below the largest float16 number, and most numbers of other rows are normal.
LARGEST_X = tl.constexpr(14)

LEAST_POWER, MOST_POWER = tl.constexpr(-110), tl.constexpr(126)  # so that the factors are normal float32 numbers

NO_CLASS_HERE = 2**62  # the first class of the sample, so that no target is among its classes


class Float16Rows(NamedTuple):
    """The numbers of `packed_rows.PackedRows` that only float16 has."""

    largest_x: Tensor  # (N,) float32, the largest magnitude in a row of the input
    shift: Tensor  # (N,) float32, the exponent by which a row of exponentials is divided
    largest: Tensor  # (chunks,) int32, the bits of the largest |rho x| of a chunk, a float32
    active: Tensor  # (chunks, 2) int32, how many rows contribute, and the chunk's power of two
    scales: Tensor | None  # (2,) float32, powers of two of d_input and of the head's gradients


def make_rows(row_weight: Tensor, largest: Tensor, scales: Tensor | None) -> Float16Rows:
    """Returns the numbers for a call with row_weight (N,). `largest` (chunks,) is 0."""
    return Float16Rows(
        torch.empty_like(row_weight),
        torch.empty_like(row_weight),
        largest,
        largest.new_empty((len(largest), 2)),
        scales,
    )


@triton.jit
def power_of_two(exponent):
    """Returns 2**exponent, float32, for exponents of normal numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(t):
    """Returns floor(log2(t)), int32, for positive normal numbers, and -127 for 0."""
    return (t.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def scales_kernel(row_weight_ptr, scale_ptr, tokens, BLOCK: tl.constexpr):
    """Writes the two powers of two of `row_math.saved_scales` to scale (2,) float32. One program reads row_weight
    (tokens,)."""
    largest = tl.zeros((BLOCK,), tl.float32)
    unusable = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, tokens, BLOCK):
        row = start + tl.arange(0, BLOCK)
        weight = tl.abs(tl.load(row_weight_ptr + row, mask=row < tokens, other=0.0))
        unusable |= (~(weight < float("inf"))).to(tl.int32)
        largest = tl.maximum(largest, weight)
    top = tl.max(largest, 0)
    usable = (tl.max(unusable, 0) == 0) & (top > 0)
    exponent = tl.where(usable, tl.maximum(exponent_of(top), -126), 0)
    exponent = tl.minimum(exponent, 126)
    half = tl.where(exponent < 0, -(-exponent // 2), exponent // 2)
    tl.store(scale_ptr, power_of_two(-exponent))
    tl.store(scale_ptr + 1, power_of_two(-half))


def scales_of(row_weight: Tensor) -> Tensor:
    """Launches `scales_kernel`: returns (2,) powers of two, of d_input and of the head's gradients, by which gradients
    are multiplied that are computed before the upstream gradient is known."""
    scales = row_weight.new_empty(2)
    launch(scales_kernel, (1,), row_weight, scales, len(row_weight), BLOCK=4096, num_warps=8)
    return scales


@triton.jit
def place_kernel(
    x_ptr, top_ptr, sum_ptr, target_logit_ptr, ref_exponent_ptr, largest_x_ptr, hidden, x_stride, share,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes the reference exponent of a row, PLACE below an estimate of its lse in powers of two: (48); 0 if neither
    its target nor the sample has a finite logit. Writes the largest magnitude in the row of x (rows, D).

    Reads the sample's largest logit and its sum of exponentials relative to that logit, and target_logit, (rows,)
    float32 each. `share` is how many classes a class of the sample stands for. One program owns a row.
    """
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, hidden, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < hidden, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    tl.store(largest_x_ptr + row, tl.max(largest, 0))
    none = float("-inf")
    top, target = tl.load(top_ptr + row), tl.load(target_logit_ptr + row)
    top = tl.where(tl.abs(top) < float("inf"), top, none)
    target = tl.where(tl.abs(target) < float("inf"), target, none)
    shift = tl.maximum(top, target)
    exists = shift > none
    shift = tl.where(exists, shift, 0.0)
    others = 1.0 + share * (tl.load(sum_ptr + row) - 1.0)
    total = tl.exp2((target - shift) * LOG2_E)
    total += tl.where(top > none, tl.exp2((top - shift) * LOG2_E) * others, 0.0)
    lse = shift * LOG2_E + tl.log2(total)
    tl.store(ref_exponent_ptr + row, tl.where(exists, tl.floor(lse + 0.5) - PLACE, 0.0))


def place(
    problem: Problem,
    found: Float16Rows,
    x: Tensor,
    start: int,
    *,
    target: Tensor,
    target_logit: Tensor,
    ref_exponent: Tensor,
) -> None:
    """Writes the reference exponents of packed rows x (n, >= D), the first of which is row `start`.

    The sample has the classes of a class block, at equal distances. The logits of its classes are a small matmul. The
    vectors are those of all packed rows.
    """
    plan, n, classes = plan_of(problem), len(x), problem.classes
    assert plan.tile is not None
    if not n:
        return
    size = min(classes, plan.tile.block_v)
    step = classes // size
    sampled, bias = problem.linear_weight[: step * size : step], problem.linear_bias
    if bias is not None:
        bias = bias[: step * size : step].contiguous()
    sample = replace(problem, linear_bias=bias, vocab_offset=NO_CLASS_HERE)
    w = tma_compatible(sampled if sampled.dtype == x.dtype else sampled.to(x.dtype), pointers=plan.pointers)
    top, total = problem.row_weight.new_empty(n), problem.row_weight.new_empty(n)
    (hopper_logits if plan.hopper else kernels).statistics(
        sample,
        x,
        w,
        slice(0, size),
        statistics=0,
        class_weight=None,
        target=target[start:],
        tops=top,
        sums=total,
        weighted_sums=None,
        sums_exp_log=None,
        target_logit=target_logit[start:],
    )
    hidden = problem.input.shape[1]
    launch(
        place_kernel,
        (n,),
        x,
        top,
        total,
        At(target_logit, start),
        At(ref_exponent, start),
        At(found.largest_x, start),
        hidden,
        x.stride(0),
        classes / size,
        BLOCK_D=column_block(hidden),
        num_warps=4,
    )


@triton.jit
def measure_kernel(
    shift_ptr, rho_ptr, theta_ptr, largest_x_ptr, scale_ptr, row_shift_ptr, largest_ptr, rows, stride, class_blocks,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Writes the largest shift of each row to row_shift (rows,), 0 where rho is 0, and multiplies rho (rows,) by 2**it.
    Multiplies rho and theta (rows,) by the first scale if that is not None. Raises largest (), int32, to the bits of
    the largest |rho| largest_x that is finite.

    Reads shift, the last statistic of each class block, of which one follows `stride` elements after the other. One
    program owns BLOCK_N rows.
    """
    row_ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row_ids < rows
    rho = tl.load(rho_ptr + row_ids, mask=inside, other=0.0)
    most = tl.zeros((BLOCK_T, BLOCK_N), tl.int32)
    for start in range(0, class_blocks, BLOCK_T):
        blocks = start + tl.arange(0, BLOCK_T)
        # Shifts of rows that do not contribute may not have been written.
        mask = (blocks < class_blocks)[:, None] & (rho != 0)[None, :]
        place = shift_ptr + blocks.to(tl.int64)[:, None] * stride + row_ids[None, :]
        packed = tl.load(place, mask=mask, other=0.0).to(tl.int32)
        most = tl.maximum(most, tl.maximum(packed & 63, packed >> 6 & 63))
        most = tl.maximum(most, tl.maximum(packed >> 12 & 63, packed >> 18 & 63))
    shift = tl.max(most, 0)
    rho *= power_of_two(shift)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
        rho *= scale
        tl.store(theta_ptr + row_ids, tl.load(theta_ptr + row_ids, mask=inside, other=0.0) * scale, mask=inside)
    tl.store(rho_ptr + row_ids, rho, mask=inside)
    tl.store(row_shift_ptr + row_ids, shift.to(tl.float32), mask=inside)
    largest = tl.abs(rho) * tl.load(largest_x_ptr + row_ids, mask=inside, other=0.0)
    largest = tl.max(tl.where(largest < float("inf"), largest, 0.0), 0)
    tl.atomic_max(largest_ptr, largest.to(tl.int32, bitcast=True), sem="relaxed")  # in any order the result is the same


@triton.jit
def align_kernel(
    e_ptr, x_ptr, shift_ptr, rho_ptr, row_shift_ptr, largest_ptr, scale_ptr, count_ptr, active_ptr, classes, hidden,
    e_stride, x_stride, stride, block_width, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
    other_e_ptr=None, piece=None, piece_stride=None,
):  # fmt: skip
    """Divides a row of e (rows, V) by powers of two, so that its shift is row_shift for all classes, and multiplies a
    row of x (rows, D) by rho and by the chunk's power of two: (49), (50). x may be None. With other_e, e has the first
    `piece` classes, and other_e (pieces - 1, piece_stride) the rows of each later piece.

    A row of e without a shift is not read. Rows of x whose rho is 0 become 0. Class blocks have block_width classes,
    which are in tiles of BLOCK_V. Writes to active (2,) int32 count () and the exponent of the factor of e^T x. One
    program owns a row.
    """
    row = tl.program_id(0).to(tl.int64)
    rho, row_shift = tl.load(rho_ptr + row), tl.load(row_shift_ptr + row)
    largest = tl.load(largest_ptr).to(tl.float32, bitcast=True)
    power = tl.where(largest > 0, exponent_of(largest) - LARGEST_X, 0)
    power = tl.minimum(tl.maximum(power, LEAST_POWER), MOST_POWER)
    if row == 0:
        of_head = power
        if scale_ptr is not None:
            of_head += exponent_of(tl.load(scale_ptr + 1)) - exponent_of(tl.load(scale_ptr))
        tl.store(active_ptr, tl.load(count_ptr))
        tl.store(active_ptr + 1, tl.minimum(tl.maximum(of_head, -MOST_POWER), MOST_POWER))
    if row_shift > 0:
        for start in range(0, classes, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < classes
            packed = tl.load(shift_ptr + (columns // block_width).to(tl.int64) * stride + row, mask=inside, other=0.0)
            quarter = columns % block_width // (BLOCK_V // 4)
            shift = (packed.to(tl.int32) >> (6 * quarter)) & 63
            place = e_ptr + row * e_stride + columns
            if other_e_ptr is not None:
                later = other_e_ptr + (columns // piece - 1).to(tl.int64) * piece_stride + row * piece + columns % piece
                place = tl.where(columns < piece, place, later)
            e = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            e *= tl.exp2(shift.to(tl.float32) - row_shift)
            tl.store(place, e.to(e_ptr.dtype.element_ty), mask=inside)
    if x_ptr is not None:
        factor = rho * power_of_two(-power)
        for start in range(0, hidden, BLOCK_D):
            columns = start + tl.arange(0, BLOCK_D)
            place = x_ptr + row * x_stride + columns
            x = tl.load(place, mask=columns < hidden, other=0.0).to(tl.float32)
            x = tl.where(rho == 0, 0.0, x * factor)
            tl.store(place, x.to(x_ptr.dtype.element_ty), mask=columns < hidden)


@triton.jit
def align_of_pieces_kernel(
    e_ptr, x_ptr, shift_ptr, rho_ptr, row_shift_ptr, largest_ptr, scale_ptr, count_ptr, active_ptr, classes, hidden,
    e_stride, x_stride, stride, block_width, other_e_ptr, piece, piece_stride,
    BLOCK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`align_kernel` where the exponentials are in pieces of the classes, another kernel for the reasons of
    `row_kernels.finish_rows_of_pieces_kernel`."""
    align_kernel(
        e_ptr, x_ptr, shift_ptr, rho_ptr, row_shift_ptr, largest_ptr, scale_ptr, count_ptr, active_ptr, classes, hidden,
        e_stride, x_stride, stride, block_width, BLOCK, BLOCK_V, BLOCK_D, other_e_ptr, piece, piece_stride,
    )  # fmt: skip


def finish(
    problem: Problem,
    found: Float16Rows,
    number: int,
    start: int,
    n: int,
    class_blocks: int,
    block_width: int,
    planes: int,
    *,
    of_logits: At,
    rho: Tensor,
    theta: Tensor,
    count: Tensor,
    e: StoredExponentials,
    x: Tensor | None,
) -> At:
    """Prepares the exponentials e of n rows and x (n, >= D) of chunk `number` for the matmuls of the gradients, after
    `row_kernels.finish_rows`, and rho and theta of its rows.

    Args:
        class_blocks: of e, with block_width classes each. 0: e is left as it is, as that of saved rows.
        planes: how many statistics each class block has.
        of_logits: these statistics; the last of them are shifts.

    Returns:
        The number of rows that contribute and the chunk's exponent, which `chunk_power` reads.
    """
    tile = plan_of(problem).tile
    assert tile is not None
    shifts = At(of_logits.tensor, of_logits.start + (planes - 1) * n)
    rows = At(rho, start), At(found.shift, start), At(found.largest, number)
    launch(
        measure_kernel,
        (cdiv(n, SMALL_BLOCK),),
        shifts,
        rows[0],
        At(theta, start),
        At(found.largest_x, start),
        found.scales,
        *rows[1:],
        n,
        planes * n,
        class_blocks,
        BLOCK_N=SMALL_BLOCK,
        BLOCK_T=BLOCKS_AT_ONCE,
        num_warps=4,
    )
    active, kernel, pieces = At(found.active, number), align_kernel, ()
    if e.others is not None:
        kernel, pieces = align_of_pieces_kernel, (e.others, e.others.shape[2], e.others.stride(0))
    launch(
        kernel,
        (n,),
        e.first,
        x,
        shifts,
        *rows,
        found.scales,
        count,
        active,
        problem.classes,
        problem.input.shape[1],
        e.first.stride(0),
        0 if x is None else x.stride(0),
        planes * n,
        block_width,
        *pieces,
        BLOCK=2048,
        BLOCK_V=tile.block_v,
        BLOCK_D=column_block(problem.input.shape[1]),
        num_warps=4,
    )
    return active


@triton.jit
def scale_head_kernel(theta_ptr, d_bias_ptr, scale_ptr, rows, classes, BLOCK: tl.constexpr):
    """Multiplies theta (rows,) and d_bias (classes,), if not None, by the second scale over the first."""
    factor = tl.load(scale_ptr + 1) / tl.load(scale_ptr)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(theta_ptr + place, tl.load(theta_ptr + place, mask=place < rows, other=0.0) * factor, mask=place < rows)
    if d_bias_ptr is not None:
        inside = place < classes
        tl.store(d_bias_ptr + place, tl.load(d_bias_ptr + place, mask=inside, other=0.0) * factor, mask=inside)


def scale_head(found: Float16Rows, theta: Tensor, d_bias: Tensor | None) -> None:
    """Launches `scale_head_kernel` after the last chunk, before the targets' terms are added."""
    if found.scales is None:
        return
    classes = 0 if d_bias is None else len(d_bias)
    programs = (cdiv(max(len(theta), classes), 1024),)
    launch(scale_head_kernel, programs, theta, d_bias, found.scales, len(theta), classes, BLOCK=1024, num_warps=4)
