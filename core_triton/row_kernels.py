"""Triton kernels without matmuls: the work on rows and classes between the matmuls.

They read and write each number once or a few times, and sum in a fixed order. Equations: linear_ce/MATH.md.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_triton import row_math
from core_triton.kernels import LOG2_E, slope, tanh
from core_triton.launch import At, cdiv, column_block, device_info, launch, on_device
from core_triton.problem import Gradients, Problem

LN_2 = tl.constexpr(0.6931471805599453)

SMALL_BLOCK = 16  # rows of a program that sums over class blocks: enough programs to fill a GPU

BLOCKS_AT_ONCE = 64  # class blocks that such a program reads at a time

LEAST_SUMMAND = tl.constexpr(row_math.LEAST_SUMMAND)


# With specialization the alignment of a vector would decide how threads divide a block, and so the order of the sum.
@triton.jit(do_not_specialize=["ignore_index"], do_not_specialize_on_alignment=["target_ptr", "class_weight_ptr"])
def row_weights_kernel(
    target_ptr,
    class_weight_ptr,
    token_weight_ptr,
    normalizer_ptr,
    row_weight_ptr,
    tokens,
    classes,
    ignore_index,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes row_weight (N,) float32, the factor of each row's loss: (5), (8), (9).

    Reads target (N,), and class_weight (K,) float32, token_weight (N,) and normalizer () if they are not None. One
    program owns BLOCK_N rows. Every program sums the denominator of all rows, in a fixed order.
    """
    valid_rows = tl.zeros((), tl.int64)
    denominator = tl.zeros((), tl.float32)
    for start in range(0, tokens, BLOCK):
        row = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + row, mask=row < tokens, other=ignore_index)
        valid = target != ignore_index
        valid_rows += tl.sum(valid.to(tl.int64), 0)
        if class_weight_ptr is not None:
            is_class = (target >= 0) & (target < classes)
            weight = tl.load(class_weight_ptr + target, mask=valid & is_class, other=float("nan"))
            denominator += tl.sum(tl.where(valid, weight, 0.0), 0)
    if MEAN:
        if normalizer_ptr is not None:
            denominator = tl.load(normalizer_ptr).to(tl.float32)
            denominator = tl.where((denominator >= 0) & (denominator < float("inf")), denominator, float("nan"))
        elif class_weight_ptr is None:
            denominator = valid_rows.to(tl.float32)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < tokens
    valid = tl.load(target_ptr + row, mask=inside, other=ignore_index) != ignore_index
    zeros = tl.zeros((BLOCK_N,), tl.float32)
    if token_weight_ptr is not None:
        weight = tl.load(token_weight_ptr + row, mask=inside & valid, other=0.0).to(tl.float32)
    else:
        weight = valid.to(tl.float32)
    if MEAN:
        weight = tl.where((weight == 0) | (zeros + denominator == 0), 0.0, tl.div_rn(weight, zeros + denominator))
    tl.store(row_weight_ptr + row, weight, mask=inside)


PASSED_ROWS, PACKED_ROWS = 4096, 1024  # that a program reads at a time of all rows, and that it owns


def row_weights(
    target: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | None,
    classes: int,
    ignore_index: int,
    *,
    mean: bool,
) -> Tensor:
    """Launches `row_weights_kernel` on contiguous vectors; returns row_weight (N,)."""
    row_weight = torch.empty(len(target), dtype=torch.float32, device=target.device)
    arrays = target, class_weight if mean else None, token_weight, normalizer, row_weight
    sizes = len(target), classes, ignore_index
    with on_device(target.device):
        grid, blocks = (cdiv(len(target), PACKED_ROWS),), {"BLOCK": PASSED_ROWS, "BLOCK_N": PACKED_ROWS}
        if len(target):
            launch(row_weights_kernel, grid, *arrays, *sizes, MEAN=mean, **blocks, num_warps=8)
    return row_weight


@triton.jit
def pack_kernel(
    target_ptr,
    row_weight_ptr,
    order_ptr,
    packed_target_ptr,
    packed_weight_ptr,
    count_ptr,
    zeros_ptr,
    hit_ptr,
    tokens,
    zeros,
    hits,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Packs the rows: first those that contribute (row_weight is not 0), then the others, both in order.

    Writes for each packed row its row of the call, order (N,) int64, its target (int64) and its row_weight (float32).
    Writes count (), how many rows contribute. Sets zeros (zeros,) and hit (hits,), int32, to 0. One program owns
    BLOCK_N rows. Every program counts the contributing rows, all of them and those before its own.
    """
    first = tl.program_id(0) * BLOCK_N
    count, before = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for start in range(0, tokens, BLOCK):
        row = start + tl.arange(0, BLOCK)
        counts = (tl.load(row_weight_ptr + row, mask=row < tokens, other=0.0) != 0).to(tl.int32)
        count += tl.sum(counts, 0)
        before += tl.sum(tl.where(row < first, counts, 0), 0)
    if first == 0:
        tl.store(count_ptr, count)
    for start in range(first, zeros, BLOCK_N * tl.num_programs(0)):
        place = start + tl.arange(0, BLOCK_N)
        tl.store(zeros_ptr + place, tl.zeros_like(place), mask=place < zeros)
    if hit_ptr is not None:
        for start in range(4 * first, hits, 4 * BLOCK_N * tl.num_programs(0)):
            hit = start + tl.arange(0, 4 * BLOCK_N)
            tl.store(hit_ptr + hit, tl.zeros_like(hit), mask=hit < hits)
    row = first + tl.arange(0, BLOCK_N)
    inside = row < tokens
    weight = tl.load(row_weight_ptr + row, mask=inside, other=0.0)
    counts = (weight != 0).to(tl.int32)
    rank = before + tl.cumsum(counts, 0) - counts  # contributing rows before this one
    place = tl.where(counts != 0, rank, count + row - rank)
    tl.store(order_ptr + place, row.to(tl.int64), mask=inside)
    tl.store(packed_target_ptr + place, tl.load(target_ptr + row, mask=inside, other=0), mask=inside)
    tl.store(packed_weight_ptr + place, weight, mask=inside)


def pack(
    target: Tensor,
    row_weight: Tensor,
    *,
    order: Tensor,
    packed_target: Tensor,
    packed_weight: Tensor,
    count: Tensor,
    zeros: Tensor,
    hit: Tensor | None,
) -> None:
    """Launches `pack_kernel`."""
    arrays = target, row_weight, order, packed_target, packed_weight, count, zeros, hit
    sizes = len(target), len(zeros), 0 if hit is None else hit.numel()
    programs = max(1, cdiv(len(target), PACKED_ROWS))
    launch(pack_kernel, (programs,), *arrays, *sizes, BLOCK=PASSED_ROWS, BLOCK_N=PACKED_ROWS, num_warps=8)


@triton.jit
def pick_kernel(
    input_ptr,
    weight_ptr,
    bias_ptr,
    target_ptr,
    row_weight_ptr,
    row_ptr,
    result_ptr,
    target_logit_ptr,
    ref_exponent_ptr,
    top_ptr,
    hit_ptr,
    hit_first,
    hidden,
    classes,
    chunk_rows,
    input_stride,
    input_stride_d,
    weight_stride,
    weight_stride_d,
    result_stride,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Copies the rows row (n,) int64 of input (N, D) to result (n, D), with zeros where row_weight (n,) is 0, because
    such a row may hold any values. Not if result is None.

    If target_logit is not None, writes the target logit of each row, NaN where the target (int64) is not a class, the
    reference exponent from that logit, 0 where there is none: (29), and -inf to top (n,). Reads the targets' rows of
    weight (V, D). If hit is not None, it has a byte for each (chunk, half row block, class block), packed into int32.
    The kernel sets the bit of the quarter of the classes that holds the target, in the bytes from hit_first on. One
    program owns a row.
    """
    row = tl.program_id(0).to(tl.int64)
    picked = tl.load(row_ptr + row)
    target = tl.load(target_ptr + row)
    contributes = tl.load(row_weight_ptr + row) + tl.zeros((BLOCK_D,), tl.float32) != 0
    is_class = (target >= 0) & (target < classes)
    target = tl.where(is_class, target, 0)
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for k in range(0, hidden, BLOCK_D):
        columns = (k + tl.arange(0, BLOCK_D)).to(tl.int64)
        inside = (columns < hidden) & contributes
        x = tl.load(input_ptr + picked * input_stride + columns * input_stride_d, mask=inside, other=0.0)
        w = tl.load(weight_ptr + target * weight_stride + columns * weight_stride_d, mask=inside, other=0.0)
        acc += x.to(tl.float32) * w.to(x.dtype).to(tl.float32)
        if result_ptr is not None:
            tl.store(result_ptr + row * result_stride + columns, x, mask=columns < hidden)
    if target_logit_ptr is not None:
        logit = tl.sum(acc, 0)
        if HAS_BIAS:
            logit += tl.load(bias_ptr + target).to(tl.float32)
        logit *= scale
        if HAS_SOFTCAP:
            logit = softcap * tanh(logit * (1.0 / softcap))
        finite = is_class & (tl.abs(logit) < float("inf"))
        tl.store(target_logit_ptr + row, tl.where(is_class, logit, float("nan")))
        tl.store(ref_exponent_ptr + row, tl.where(finite, tl.floor(logit * LOG2_E + 0.5), 0.0))
        tl.store(top_ptr + row, float("-inf"))
    if hit_ptr is not None:
        half = row // chunk_rows * tl.cdiv(chunk_rows, HALF) + row % chunk_rows // HALF
        place = hit_first + half * tl.cdiv(classes, BLOCK_V) + target // BLOCK_V
        bit = place % 4 * 8 + target % BLOCK_V // (BLOCK_V // 4)
        tl.atomic_or(hit_ptr + place // 4, (tl.full((), 1, tl.int32) << bit.to(tl.int32)), mask=is_class)


def pick(
    problem: Problem,
    n: int,
    *,
    target: At,
    row_weight: At,
    order: At,
    rows: Tensor | None,
    target_logit: At | None,
    ref_exponent: At,
    top: At,
    hit: Tensor | None,
    hit_first: int,
    chunk_rows: int,
    half: int,
    class_block: int,
) -> None:
    """Launches `pick_kernel` for n packed rows, which go to rows (n, >= D) if that is not None."""
    x, w, spec = problem.input, problem.linear_weight, problem.spec
    launch(
        pick_kernel,
        (n,),
        x,
        w,
        problem.linear_bias,
        target,
        row_weight,
        order,
        rows,
        target_logit,
        ref_exponent,
        top,
        hit,
        hit_first,
        x.shape[1],
        problem.classes,
        chunk_rows,
        *x.stride(),
        *w.stride(),
        0 if rows is None else rows.stride(0),
        spec.logit_scale,
        spec.softcap or 1.0,
        HAS_BIAS=problem.linear_bias is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        BLOCK_D=column_block(x.shape[1]),
        HALF=half,
        BLOCK_V=class_block,
        num_warps=4,
    )


@triton.jit
def column_sums(sum_ptr, row_ids, rows, stride, class_blocks, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """Returns the sum over class blocks of sum (class_blocks, rows), (BLOCK_N,), in a fixed order. `stride` is from one
    class block to the next."""
    acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for start in range(0, class_blocks, BLOCK_T):
        blocks = start + tl.arange(0, BLOCK_T)
        mask = (blocks < class_blocks)[:, None] & (row_ids < rows)[None, :]
        acc += tl.load(sum_ptr + blocks.to(tl.int64)[:, None] * stride + row_ids[None, :], mask=mask, other=0.0)
    return tl.sum(acc, 0)


@triton.jit
def column_maxima(max_ptr, row_ids, rows, stride, class_blocks, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """Returns the largest over class blocks of max (class_blocks, rows), (BLOCK_N,). `stride` is from one class block
    to the next."""
    top = tl.full((BLOCK_T, BLOCK_N), float("-inf"), tl.float32)
    for start in range(0, class_blocks, BLOCK_T):
        blocks = start + tl.arange(0, BLOCK_T)
        mask = (blocks < class_blocks)[:, None] & (row_ids < rows)[None, :]
        place = blocks.to(tl.int64)[:, None] * stride + row_ids[None, :]
        top = tl.maximum(top, tl.load(max_ptr + place, mask=mask, other=float("-inf")))
    return tl.max(top, 0)


@triton.jit
def log1p(t):
    """Returns log(1 + t) for t >= 0, accurate for small t too."""
    u = 1.0 + t
    return tl.where(u == 1.0, t, tl.log(u) * (t / (u - 1.0)))


@triton.jit
def finish_rows_kernel(
    sum_ptr,
    max_ptr,
    ref_exponent_ptr,
    target_logit_ptr,
    target_ptr,
    row_weight_ptr,
    row_ptr,
    class_weight_ptr,
    e_ptr,
    x_ptr,
    rho_ptr,
    theta_ptr,
    loss_out_ptr,
    lse_out_ptr,
    target_logit_out_ptr,
    top_out_ptr,
    rows,
    class_blocks,
    classes,
    hidden,
    e_stride,
    x_stride,
    z_loss_weight,
    scale,
    softcap,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    GRADIENTS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    other_e_ptr=None,
    piece=None,
    piece_stride=None,
    own_target_ptr=None,
    own_exponent_ptr=None,
):
    """Writes the results of packed rows: (6), (10), (27), (29).

    Writes loss, lse, target_logit and, if not None, the largest logit top (N,) at the rows row (rows,) int64 of the
    call. They are 0 for rows of row_weight 0. With GRADIENTS also writes rho and theta, (rows,) float32, both times the
    scale: (31). It sets the target's column of e (rows, V) to 0, because theta is its term. With other_e, e has the
    first `piece` classes, and other_e (pieces - 1, piece_stride) the rows of each later piece. With SCALES multiplies x
    (rows, D) by rho, rounded once, with zeros where rho is 0. One program owns BLOCK_N rows.

    With own_target (rows,) int64, e has the classes of one shard of the vocabulary, and own_target is -1 where that is
    not the target's shard, where theta counts for nothing. e is relative to 2**own_exponent, (rows,): (53).
    """
    row_ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row_ids < rows
    total = column_sums(sum_ptr, row_ids, rows, rows, class_blocks, BLOCK_N, BLOCK_T)
    total = tl.where(total == float("inf"), float("nan"), total)  # an infinite logit: no probability is a number
    ref_exponent = tl.load(ref_exponent_ptr + row_ids, mask=inside, other=0.0)
    row_weight = tl.load(row_weight_ptr + row_ids, mask=inside, other=0.0)
    target_logit = tl.load(target_logit_ptr + row_ids, mask=inside, other=0.0)
    summand = tl.exp2(target_logit * LOG2_E - ref_exponent)  # the target's summand, one of the summands of `total`
    usable = (summand > LEAST_SUMMAND) & (total == total)  # a maximum would hide NaN
    rest = tl.where(usable, tl.maximum(total - summand, 0.0), 0.0)
    lse = (ref_exponent + tl.log2(total)) * LN_2
    nll = tl.where(usable, log1p(rest / summand), lse - target_logit)
    lse = tl.where(usable, target_logit + nll, lse)
    prob = tl.where(usable, summand / total, tl.exp2((target_logit - lse) * LOG2_E))  # of the target
    other_prob = tl.where(usable, rest / total, 1.0 - prob)
    target = tl.load(target_ptr + row_ids, mask=inside, other=-1)
    contributes = row_weight != 0
    is_class = inside & (target >= 0) & (target < classes)
    kept = tl.where(is_class, row_weight, float("nan"))  # NaN for the whole row of a target that is not a class
    if HAS_CLASS_WEIGHT:
        kept *= tl.load(class_weight_ptr + target, mask=is_class, other=0.0)
    loss = kept * nll + z_loss_weight * row_weight * lse * lse
    out = tl.load(row_ptr + row_ids, mask=inside, other=0)
    tl.store(loss_out_ptr + out, tl.where(contributes, loss, 0.0), mask=inside)
    tl.store(lse_out_ptr + out, tl.where(contributes, lse, 0.0), mask=inside)
    tl.store(target_logit_out_ptr + out, tl.where(contributes, target_logit, 0.0), mask=inside)
    if top_out_ptr is not None:
        top = column_maxima(max_ptr, row_ids, rows, rows, class_blocks, BLOCK_N, BLOCK_T)
        tl.store(top_out_ptr + out, tl.where(contributes, top, 0.0), mask=inside)
    if GRADIENTS:
        upstream = kept + 2.0 * z_loss_weight * row_weight * lse
        theta = (upstream - kept) * prob - kept * other_prob
        if HAS_SOFTCAP:
            theta *= slope(target_logit, softcap)
        rho = tl.where(contributes, scale * upstream / total, 0.0)
        if own_target_ptr is not None:
            target = tl.load(own_target_ptr + row_ids, mask=inside, other=-1)
            is_class = inside & (target >= 0)
            rho *= tl.exp2(tl.load(own_exponent_ptr + row_ids, mask=inside, other=0.0) - ref_exponent)
        tl.store(rho_ptr + row_ids, rho, mask=inside)
        tl.store(theta_ptr + row_ids, tl.where(contributes, scale * theta, 0.0), mask=inside)
        place = e_ptr + row_ids.to(tl.int64) * e_stride + target
        if other_e_ptr is not None:
            later = other_e_ptr + (target // piece - 1) * piece_stride + row_ids.to(tl.int64) * piece + target % piece
            place = tl.where(target < piece, place, later)
        tl.store(place, tl.zeros_like(lse).to(e_ptr.dtype.element_ty), mask=is_class)
        if SCALES:
            x_row = x_ptr + row_ids.to(tl.int64)[:, None] * x_stride
            for start in range(0, hidden, BLOCK_D):
                columns = start + tl.arange(0, BLOCK_D)
                mask = inside[:, None] & (columns < hidden)[None, :]
                x = tl.load(x_row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
                x = tl.where((rho == 0)[:, None], 0.0, x * rho[:, None])
                tl.store(x_row + columns[None, :], x.to(x_ptr.dtype.element_ty), mask=mask)


# With specialization a number of rows that is a multiple of 16 would decide how threads divide a block of sums, and so
# the order in which they are added. Calls whose sums must not depend on the number of rows launch this one.
finish_rows_kernel_by_row = triton.jit(do_not_specialize=["rows"])(finish_rows_kernel.fn)


@triton.jit(do_not_specialize=["rows"])
def finish_rows_of_pieces_kernel(
    sum_ptr, max_ptr, ref_exponent_ptr, target_logit_ptr, target_ptr, row_weight_ptr, row_ptr, class_weight_ptr,
    e_ptr, x_ptr, rho_ptr, theta_ptr, loss_out_ptr, lse_out_ptr, target_logit_out_ptr, top_out_ptr, rows,
    class_blocks, classes, hidden, e_stride, x_stride, z_loss_weight, scale, softcap, other_e_ptr, piece,
    piece_stride, HAS_CLASS_WEIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, GRADIENTS: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`finish_rows_kernel` where the exponentials are in pieces of the classes. It is another kernel because a launch
    has its constexprs last, and so that calls without pieces keep their machine code."""
    finish_rows_kernel(
        sum_ptr, max_ptr, ref_exponent_ptr, target_logit_ptr, target_ptr, row_weight_ptr, row_ptr, class_weight_ptr,
        e_ptr, x_ptr, rho_ptr, theta_ptr, loss_out_ptr, lse_out_ptr, target_logit_out_ptr, top_out_ptr, rows,
        class_blocks, classes, hidden, e_stride, x_stride, z_loss_weight, scale, softcap, HAS_CLASS_WEIGHT,
        HAS_SOFTCAP, GRADIENTS, SCALES, BLOCK_N, BLOCK_T, BLOCK_D, other_e_ptr, piece, piece_stride,
    )  # fmt: skip


@triton.jit
def finish_rows_of_shard_kernel(
    sum_ptr, max_ptr, ref_exponent_ptr, target_logit_ptr, target_ptr, row_weight_ptr, row_ptr, class_weight_ptr,
    e_ptr, x_ptr, rho_ptr, theta_ptr, loss_out_ptr, lse_out_ptr, target_logit_out_ptr, top_out_ptr, rows,
    class_blocks, classes, hidden, e_stride, x_stride, z_loss_weight, scale, softcap, own_target_ptr, own_exponent_ptr,
    HAS_CLASS_WEIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, GRADIENTS: tl.constexpr, SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`finish_rows_kernel` for a shard of the vocabulary, another kernel for the same reasons."""
    finish_rows_kernel(
        sum_ptr, max_ptr, ref_exponent_ptr, target_logit_ptr, target_ptr, row_weight_ptr, row_ptr, class_weight_ptr,
        e_ptr, x_ptr, rho_ptr, theta_ptr, loss_out_ptr, lse_out_ptr, target_logit_out_ptr, top_out_ptr, rows,
        class_blocks, classes, hidden, e_stride, x_stride, z_loss_weight, scale, softcap, HAS_CLASS_WEIGHT,
        HAS_SOFTCAP, GRADIENTS, SCALES, BLOCK_N, BLOCK_T, BLOCK_D, None, None, None, own_target_ptr, own_exponent_ptr,
    )  # fmt: skip


TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

FINISHED_ROWS = 8  # of a program: enough programs to fill a GPU

FINISHED_COLUMNS = 512  # of the input that it scales at a time


def finish_rows(
    problem: Problem,
    n: int,
    class_blocks: int,
    *,
    sums: At,
    tops: At | None,
    ref_exponent: At,
    target_logit: At,
    target: At,
    row_weight: At,
    order: At,
    e: Tensor | None,
    other_e: Tensor | None,
    x: Tensor | None,
    rho: At,
    theta: At,
    loss_out: Tensor,
    lse_out: Tensor,
    target_logit_out: Tensor,
    top_out: Tensor | None,
    by_row: bool,
    of_shard: tuple[At, At] | None = None,
) -> None:
    """Launches `finish_rows_kernel` for n packed rows. `by_row`: no result of a row depends on the other rows.
    `e` and `other_e` are those of `first_chunk.StoredExponentials`. `of_shard`: own_target and own_exponent, if
    linear_weight is a shard of the vocabulary. target is a class of `problem.classes` in any case."""
    spec, others = problem.spec, ()
    kernel = finish_rows_kernel_by_row if by_row else finish_rows_kernel
    if other_e is not None:
        kernel, others = finish_rows_of_pieces_kernel, (other_e, other_e.shape[2], other_e.stride(0))
    elif of_shard is not None:
        kernel, others = finish_rows_of_shard_kernel, of_shard
    launch(
        kernel,
        (cdiv(n, FINISHED_ROWS),),
        sums,
        tops,
        ref_exponent,
        target_logit,
        target,
        row_weight,
        order,
        problem.class_weight,
        e,
        x,
        rho,
        theta,
        loss_out,
        lse_out,
        target_logit_out,
        top_out,
        n,
        class_blocks,
        problem.classes,
        problem.input.shape[1],
        0 if e is None else e.stride(0),
        0 if x is None else x.stride(0),
        spec.z_loss_weight,
        spec.logit_scale,
        spec.softcap or 1.0,
        *others,
        HAS_CLASS_WEIGHT=problem.class_weight is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        GRADIENTS=e is not None,
        SCALES=x is not None,
        BLOCK_N=FINISHED_ROWS,
        BLOCK_T=BLOCKS_AT_ONCE,
        BLOCK_D=FINISHED_COLUMNS,
        num_warps=4,
    )


@triton.jit
def d_input_kernel(
    e_w_ptr,
    rho_ptr,
    theta_ptr,
    target_ptr,
    row_weight_ptr,
    row_ptr,
    weight_ptr,
    d_input_ptr,
    hidden,
    classes,
    weight_stride,
    weight_stride_d,
    BLOCK_D: tl.constexpr,
    SPLITS_HEAD: tl.constexpr = False,
    OF_SHARD: tl.constexpr = None,
    factor_ptr=None,
    mean_row_ptr=None,
):
    """Writes d_input = rho * e_w + theta * weight[target], rounded once, where row_weight is not 0: (32).

    One program owns BLOCK_D columns of a row. Reads e_w = e @ weight (rows, D) float32, rho and theta (rows,), weight
    (V, D), which it rounds to d_input's dtype unless SPLITS_HEAD, and row (rows,) int64: which row of d_input (N, D) a
    row is. With OF_SHARD, the dtype of the input, weight is a shard that may not hold the target, and d_input a part of
    any dtype. With mean_row (D,) float32, factor * mean_row is added, with factor (rows,) float32.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    inside = columns < hidden
    rho, theta, target = tl.load(rho_ptr + row), tl.load(theta_ptr + row), tl.load(target_ptr + row)
    e_w = tl.load(e_w_ptr + row * hidden + columns, mask=inside, other=0.0)
    is_class = (target >= 0) & (target < classes)
    w = tl.load(weight_ptr + target * weight_stride + columns * weight_stride_d, mask=inside & is_class, other=0.0)
    if not SPLITS_HEAD:
        w = w.to(d_input_ptr.dtype.element_ty if OF_SHARD is None else OF_SHARD)
    w = w.to(tl.float32)
    result = rho * e_w + theta * w
    if OF_SHARD is None:
        result = tl.where(is_class, result, rho)  # not a class: rho is NaN
    if mean_row_ptr is not None:
        result += tl.load(factor_ptr + row) * tl.load(mean_row_ptr + columns, mask=inside, other=0.0)
    if tl.load(row_weight_ptr + row) != 0:
        out = tl.load(row_ptr + row)
        tl.store(d_input_ptr + out * hidden + columns, result.to(d_input_ptr.dtype.element_ty), mask=inside)


@triton.jit
def smooth_d_input_kernel(
    e_w_ptr, rho_ptr, theta_ptr, target_ptr, row_weight_ptr, row_ptr, weight_ptr, d_input_ptr, hidden, classes,
    weight_stride, weight_stride_d, factor_ptr, mean_row_ptr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`d_input_kernel` with label smoothing, another kernel for the reasons of `finish_rows_of_pieces_kernel`."""
    d_input_kernel(
        e_w_ptr, rho_ptr, theta_ptr, target_ptr, row_weight_ptr, row_ptr, weight_ptr, d_input_ptr, hidden, classes,
        weight_stride, weight_stride_d, BLOCK_D, False, None, factor_ptr, mean_row_ptr,
    )  # fmt: skip


def finish_d_input(
    problem: Problem,
    e_w: Tensor,
    *,
    rho: At,
    theta: At,
    target: At,
    row_weight: At,
    order: At,
    d_input: Tensor,
    smooth: tuple[At, Tensor] | None,
) -> None:
    """Launches `d_input_kernel` on e_w (n, D), of packed rows. `smooth`: factor and mean_row, never of a split head."""
    w, (n, hidden), splits = problem.linear_weight, e_w.shape, problem.spec.splits_head
    block, options = column_block(hidden), {"SPLITS_HEAD": True} if splits else {}
    if problem.shard is not None:
        # `launch` tells kernels apart by the values only.
        options = {"SPLITS_HEAD": splits, "OF_SHARD": TRITON_DTYPES[problem.input.dtype]}
    launch(
        smooth_d_input_kernel if smooth else d_input_kernel,
        (n, cdiv(hidden, block)),
        e_w,
        rho,
        theta,
        target,
        row_weight,
        order,
        w,
        d_input,
        hidden,
        problem.classes,
        *w.stride(),
        *(smooth or ()),
        BLOCK_D=block,
        **options,
        num_warps=4,
    )


@triton.jit
def finish_call_kernel(
    row_weight_ptr, d_input_ptr, loss_ptr, sum_ptr, tokens, hidden, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sets the rows of d_input (N, D) whose row_weight (N,) is 0 to 0, and writes the sum of loss (N,) to sum (),
    float32, in a fixed order. Either may be None. One program owns BLOCK_N rows, and the first program sums."""
    if d_input_ptr is not None:
        row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        excluded = tl.load(row_weight_ptr + row, mask=row < tokens, other=1.0) == 0
        if tl.max(excluded.to(tl.int32), 0) != 0:
            for start in range(0, hidden, BLOCK_D):
                columns = start + tl.arange(0, BLOCK_D)
                mask = excluded[:, None] & (columns < hidden)[None, :]
                zeros = tl.zeros((BLOCK_N, BLOCK_D), tl.float32).to(d_input_ptr.dtype.element_ty)
                tl.store(d_input_ptr + row.to(tl.int64)[:, None] * hidden + columns[None, :], zeros, mask=mask)
    if sum_ptr is not None and tl.program_id(0) == 0:
        acc = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, tokens, BLOCK):
            place = start + tl.arange(0, BLOCK)
            acc += tl.load(loss_ptr + place, mask=place < tokens, other=0.0)
        tl.store(sum_ptr, tl.sum(acc, 0))


def finish_call(row_weight: Tensor, d_input: Tensor | None, loss: Tensor | None) -> Tensor | None:
    """Launches `finish_call_kernel`: zeroes rows of d_input (N, D) and returns the sum () of loss (N,), if there."""
    tokens, hidden = len(row_weight), 0 if d_input is None else d_input.shape[1]
    total = None if loss is None else row_weight.new_empty(())
    programs = 1 if d_input is None else max(1, cdiv(tokens, SMALL_BLOCK))
    sizes = {"BLOCK_N": SMALL_BLOCK, "BLOCK_D": column_block(max(hidden, 1)), "BLOCK": 2048}
    arrays = row_weight, d_input, loss, total, tokens, hidden
    launch(finish_call_kernel, (programs,), *arrays, **sizes, num_warps=4)
    return total


@triton.jit
def zero_kernel(result_ptr, size, BLOCK: tl.constexpr):
    """Zeroes result (size,). One program owns BLOCK elements."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result_ptr + place, tl.zeros((BLOCK,), tl.float32).to(result_ptr.dtype.element_ty), mask=place < size)


def zero(result: Tensor) -> None:
    """Launches `zero_kernel` on a contiguous tensor that is not empty."""
    size = result.numel()
    launch(zero_kernel, (cdiv(size, 4096),), result, size, BLOCK=4096, num_warps=8)


@triton.jit
def class_sums_kernel(
    matrix_ptr,
    factor_ptr,
    sum_ptr,
    rows,
    classes,
    stride,
    ADDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STRIDE_V: tl.constexpr = 1,
):
    """Writes, or with ADDS adds, the sum over rows of factor * matrix to each class of sum, (V,) float32: (18), (33).

    One program owns BLOCK_V classes. Reads matrix (rows, V) and factor (rows,) float32 once.
    """
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    places = columns
    if STRIDE_V != 1:
        places = columns.to(tl.int64) * STRIDE_V
    acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for start in range(0, rows, BLOCK_N):
        row_ids = start + tl.arange(0, BLOCK_N)
        factor = tl.load(factor_ptr + row_ids, mask=row_ids < rows, other=0.0)
        mask = (row_ids < rows)[:, None] & (columns < classes)[None, :]
        mask = mask & (factor != 0)[:, None]
        source = matrix_ptr + row_ids.to(tl.int64)[:, None] * stride + places[None, :]
        acc += factor[:, None] * tl.load(source, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(acc, 0)
    if ADDS:
        total += tl.load(sum_ptr + columns, mask=columns < classes, other=0.0)
    tl.store(sum_ptr + columns, total, mask=columns < classes)


def add_class_sums(total: Tensor, matrix: Tensor, factor: Tensor | At, *, first: bool) -> None:
    """Adds the sums over rows of factor (n,) * matrix (n, v) to `total` (v,) float32, or overwrites it if `first`."""
    (n, classes), (stride, stride_v) = matrix.shape, matrix.stride()
    arrays = matrix, factor, total, n, classes, stride
    sizes = {"BLOCK_N": 128, "BLOCK_V": 64, **({"STRIDE_V": stride_v} if stride_v != 1 else {})}
    launch(class_sums_kernel, (cdiv(classes, 64),), *arrays, ADDS=not first, **sizes, num_warps=4)


def class_sums(matrix: Tensor, factor: Tensor | None) -> Tensor:
    """Returns the sums over rows of factor (n,) * matrix (n, v), (v,) float32. None is a factor of 1."""
    total = matrix.new_empty(matrix.shape[1], dtype=torch.float32)
    factor = total.new_ones(len(matrix)) if factor is None else factor
    add_class_sums(total, matrix, factor, first=True)
    return total


@triton.jit
def class_gradient_kernel(sum_ptr, result_ptr, summed, classes, BLOCK: tl.constexpr):
    """Writes sum (summed,) float32 to result (classes,), rounded, with zeros past its end. One program owns BLOCK."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(sum_ptr + place, mask=place < summed, other=0.0)
    tl.store(result_ptr + place, values.to(result_ptr.dtype.element_ty), mask=place < classes)


def class_gradient(total: Tensor, like: Tensor) -> Tensor:
    """Launches `class_gradient_kernel`: returns `total` (v,) in the shape and dtype of `like` (V,); 0 past v."""
    result = torch.empty_like(like, memory_format=torch.contiguous_format)
    launch(
        class_gradient_kernel, (cdiv(len(like), 1024),), total, result, len(total), len(like), BLOCK=1024, num_warps=4
    )
    return result


@triton.jit
def scale_array(source_ptr, factor_ptr, result_ptr, numel, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes source * factor to result, (numel,): programs take turns at blocks of BLOCK contiguous elements."""
    factor = tl.load(factor_ptr)
    if (factor != 1.0) | (not IN_PLACE):  # true of NaN as well
        for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
            offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
            inside = offsets < numel
            source = tl.load(source_ptr + offsets, mask=inside).to(tl.float32)
            tl.store(result_ptr + offsets, (source * factor).to(result_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scale_kernel(
    d_input_ptr, d_weight_ptr, d_bias_ptr, input_factor_ptr, head_factor_ptr, new_d_input_ptr, new_d_weight_ptr,
    new_d_bias_ptr, inputs, weights, biases, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiplies gradients by scalars on the device in float32, rounded once. In place it skips a factor of exactly 1.

    Reads d_input (inputs,), d_weight (weights,) and d_bias (biases,), each if not None, and the factor () of d_input
    and that of the other two. Writes the new gradients.
    """
    if d_input_ptr is not None:
        scale_array(d_input_ptr, input_factor_ptr, new_d_input_ptr, inputs, IN_PLACE, BLOCK)
    if d_weight_ptr is not None:
        scale_array(d_weight_ptr, head_factor_ptr, new_d_weight_ptr, weights, IN_PLACE, BLOCK)
    if d_bias_ptr is not None:
        scale_array(d_bias_ptr, head_factor_ptr, new_d_bias_ptr, biases, IN_PLACE, BLOCK)


def scale(gradients: Gradients, input_factor: Tensor, head_factor: Tensor, results: Gradients) -> None:
    """Launches `scale_kernel` on contiguous gradients; `results` may be the same."""
    block = 4096  # 16 elements a thread: 16-byte accesses
    sizes = [0 if gradient is None else gradient.numel() for gradient in gradients]
    if any(sizes):
        programs = 16 * device_info(input_factor.device)[1]
        grid = (min(programs, max(cdiv(size, block) for size in sizes)),)
        arrays = *gradients, input_factor, head_factor, *results, *sizes
        launch(scale_kernel, grid, *arrays, IN_PLACE=results is gradients, BLOCK=block, num_warps=8)
