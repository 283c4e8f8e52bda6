"""What the kernels in Triton's Gluon dialect share, for Hopper and for compute capability 8.x and 12.x."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from core_triton.kernels import (
    ARGMAX,
    ENTROPY,
    LARGEST_EXPONENT,
    LOG2_E,
    LOGIT_SUM,
    MAX,
    MOST_SHIFT,
    SHIFTS,
    SQUARES,
    planes,
)

# Triton 3.7 renamed the barrier, Triton 3.8 the copies, and Triton 3.9 the method.
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

_shared: Any = gl.shared_memory_descriptor
reinterpret = getattr(_shared, "reinterpret", None) or _shared._reinterpret


@gluon.jit
def active_rows(count_ptr, start, least, rows):
    """Returns how many of a chunk's `rows` rows are among the first `count` rows of the call, but at least `least`.

    The chunk begins at row `start` of the call. `count` is in device memory.
    """
    return gl.maximum(gl.minimum(gl.load(count_ptr) - start, rows), least)


@gluon.jit
def chunk_power(count_ptr):
    """Returns the power of two of a chunk of float16, which follows the number of rows: MATH.md (50)."""
    return gl.exp2(gl.load(count_ptr + 1).to(gl.float32))


@gluon.jit
def halves(t):
    pair = t.reshape([t.shape[0], 2, t.shape[1] // 2]).permute(0, 2, 1)
    return pair.split()


@gluon.jit
def quarters(tile, layout: gl.constexpr):
    """Returns the four quarters of a tile's columns, in the layout of a matmul of their width. No registers move. An
    epilogue that processes one quarter at a time needs fewer registers than one for the whole tile."""
    left, right = halves(tile)
    first, second = halves(left)
    third, fourth = halves(right)
    return (
        gl.convert_layout(first, layout, assert_trivial=True),
        gl.convert_layout(second, layout, assert_trivial=True),
        gl.convert_layout(third, layout, assert_trivial=True),
        gl.convert_layout(fourth, layout, assert_trivial=True),
    )


@gluon.jit
def eighths(tile, layout: gl.constexpr):
    """As `quarters`, eight parts."""
    left, right = halves(tile)
    return quarters(left, layout) + quarters(right, layout)  # pyright: ignore[reportCallIssue]


class Statistics(NamedTuple):
    """The `linear_ce.statistics` of the rows of a tile over the quarters so far, (rows,) float32 each."""

    top: Any
    argmax: Any  # the column within the tile
    exp_log: Any  # sum of exponentials times their logarithms
    logit: Any  # sum
    squares: Any
    shifts: Any  # of the four quarters: MATH.md (49)


@gluon.jit
def no_statistics(zeros):
    """Returns the statistics of no classes, in the layout of `zeros` (rows,)."""
    return Statistics(zeros - float("inf"), zeros, zeros, zeros, zeros, zeros)


@gluon.jit
def to_rows(values, found):
    """Returns values of rows in the layout of the statistics."""
    return gl.convert_layout(values, found.top.type.layout)


@gluon.jit
def add_logits(found, logits, logit_sum, columns, column, STATISTICS: gl.constexpr, FIRST: gl.constexpr):
    """Returns the statistics with those of the logits of a quarter of a tile, which are -inf past the last class, and
    their sum without those. The tile begins at `column`, and the quarter FIRST columns later."""
    top, argmax, logit = found.top, found.argmax, found.logit
    if MAX & STATISTICS:
        of_quarter = gl.max(logits, 1)
        if ARGMAX & STATISTICS:
            place = gl.expand_dims(columns - column, 0)
            here = gl.where(logits == gl.expand_dims(of_quarter, 1), place, FIRST + logits.shape[1])
            above = to_rows(of_quarter, found) > top
            argmax = gl.where(above, to_rows(gl.min(here, 1).to(gl.float32), found), argmax)
        top = gl.maximum(top, to_rows(of_quarter, found))
    if LOGIT_SUM & STATISTICS:
        logit += to_rows(logit_sum, found)  # pyright: ignore[reportCallIssue]
    return Statistics(top, argmax, found.exp_log, logit, found.squares, found.shifts)


@gluon.jit
def add_exponentials(found, logits, exponentials, ref_exponent, STATISTICS: gl.constexpr):
    """Returns the statistics with those of the exponentials of a quarter of a tile."""
    exp_log, squares = found.exp_log, found.squares
    if ENTROPY & STATISTICS:
        exponents = gl.maximum(logits * LOG2_E - gl.expand_dims(ref_exponent, 1), -1e4)  # 0 times it is 0
        exp_log += to_rows(gl.sum(exponentials * exponents, 1), found)
    if SQUARES & STATISTICS:
        squares += to_rows(gl.sum(exponentials * exponentials, 1), found)
    return Statistics(found.top, found.argmax, exp_log, found.logit, squares, found.shifts)


@gluon.jit
def fit_in_float16(found, exponentials, total, QUARTER: gl.constexpr):
    """Returns the statistics with the shift of a quarter of a tile, and its exponentials, each row divided by a power
    of two so that float16 holds them: `kernels.fit_in_float16`. `total` is the sum of these and of earlier quarters."""
    shift = gl.minimum(gl.maximum(gl.floor(gl.log2(total)) - LARGEST_EXPONENT, 0.0), MOST_SHIFT)
    shifts = found.shifts + shift * 64.0**QUARTER
    found = Statistics(found.top, found.argmax, found.exp_log, found.logit, found.squares, shifts)
    factor = gl.convert_layout(gl.exp2(-shift), gl.SliceLayout(1, exponentials.type.layout))
    return found, exponentials * gl.expand_dims(factor, 1)


@gluon.jit
def add_stored_statistics(pointer, found, class_block, row_ids, rows, inside, STATISTICS: gl.constexpr):
    """Returns the statistics with those of earlier classes, which `store_statistics` has written where `inside`."""
    top, argmax, exp_log, logit, squares = found.top, found.argmax, found.exp_log, found.logit, found.squares
    at = pointer + class_block.to(gl.int64) * planes(STATISTICS) * rows + row_ids
    if MAX & STATISTICS:
        stored = gl.load(at, mask=inside, other=float("-inf"))
        at += rows
        if ARGMAX & STATISTICS:
            of_stored = gl.load(at, mask=inside, other=0.0)
            at += rows
            argmax = gl.where(top > stored, argmax, of_stored)
        top = gl.maximum(top, stored)
    if ENTROPY & STATISTICS:
        exp_log += gl.load(at, mask=inside, other=0.0)
        at += rows
    if LOGIT_SUM & STATISTICS:
        logit += gl.load(at, mask=inside, other=0.0)
        at += rows
    if SQUARES & STATISTICS:
        squares += gl.load(at, mask=inside, other=0.0)
    return Statistics(top, argmax, exp_log, logit, squares, found.shifts)


@gluon.jit
def store_statistics(pointer, found, class_block, row_ids, rows, inside, STATISTICS: gl.constexpr):
    """Writes the statistics of a tile's rows where `kernels.store_statistics` writes them."""
    at = pointer + class_block.to(gl.int64) * planes(STATISTICS) * rows + row_ids
    if MAX & STATISTICS:
        gl.store(at, found.top, mask=inside)
        at += rows
    if ARGMAX & STATISTICS:
        gl.store(at, found.argmax, mask=inside)
        at += rows
    if ENTROPY & STATISTICS:
        gl.store(at, found.exp_log, mask=inside)
        at += rows
    if LOGIT_SUM & STATISTICS:
        gl.store(at, found.logit, mask=inside)
        at += rows
    if SQUARES & STATISTICS:
        gl.store(at, found.squares, mask=inside)
        at += rows
    if SHIFTS & STATISTICS:
        gl.store(at, found.shifts, mask=inside)
