"""The rows of a call with scaled exponentials, packed: first those that contribute, then the others.

Kernels stop after the last row that contributes, because the host does not know how many these are.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from core_triton import float16, row_kernels, row_statistics
from core_triton.first_chunk import StoredExponentials
from core_triton.float16 import Float16Rows
from core_triton.launch import At, cdiv
from core_triton.problem import Problem, plan_of
from core_triton.row_statistics import LogitStatistics
from linear_ce.statistics import ARGMAX, ENTROPY, LOGIT_SUM, MAX, OF_BLOCKS, OF_LOGITS, SQUARES


class PackedRows(NamedTuple):
    """The rows of a call, with those that contribute first, and their results: (N,) float32 unless noted.

    Fields that end in _out are in the order of the call, all others in packed order.
    """

    order: Tensor  # int64, the row of the call for each packed row
    target: Tensor  # int64
    row_weight: Tensor
    count: Tensor  # () int32, how many contribute
    flag: Tensor  # (chunks, row blocks) int32: 1 if a reference exponent of the block is too low
    ticket: Tensor  # (chunks, 2) int32, of `kernels.repair_kernel`
    # A byte for each (chunk, half row block, class block), packed into int32. Bit i says that quarter i of the class
    # block holds the target of one of these rows.
    hit: Tensor | None
    target_logit: Tensor
    ref_exponent: Tensor
    top: Tensor  # the largest logit of rows whose reference exponent is too low
    rho: Tensor
    theta: Tensor
    loss_out: Tensor
    lse_out: Tensor
    target_logit_out: Tensor
    top_out: Tensor | None  # the largest logit, if it is the only one of the statistics
    statistics_out: LogitStatistics | None  # if there are others
    float16: Float16Rows | None  # if `plan.fits_float16`


class ChunkNumbers(NamedTuple):
    """What the results of a chunk's n packed rows are made from. Where ranks have shards of the vocabulary, a shard
    takes the place of a class block."""

    problem: Problem  # of all classes
    class_blocks: int
    block_width: int  # classes of a class block
    statistics: int  # those of the logits, of `linear_ce.statistics`
    sums: At  # (class_blocks, n), of exponentials relative to 2**ref_exponent
    of_logits: At  # (class_blocks, statistics, n), `kernels.store_statistics`
    ref_exponent: At
    target_logit: At
    target: At  # a class of `problem`
    # The place of the target in this rank's shard, or -1, and what the exponentials that it stores are relative to.
    of_shard: tuple[At, At] | None = None


def pack_rows(problem: Problem, *, statistics: int, scales: Tensor | None) -> PackedRows:
    """Packs the rows of a call. The results of the rows are not yet computed."""
    plan, target, row_weight = plan_of(problem), problem.target, problem.row_weight
    assert plan.tile is not None
    config, rows = plan.scaled_exp_config, plan.scaled_exp_config.rows
    count = torch.empty((), dtype=torch.int32, device=row_weight.device)
    chunks, row_blocks, hit = len(config.chunks(len(target))), cdiv(config.most_rows, plan.tile.block_n), None
    zeros = count.new_empty(chunks * (row_blocks + 2 + plan.fits_float16))
    flags = zeros[2 * chunks :][: chunks * row_blocks]
    half = plan.tile.block_n // 2
    if plan.hopper and not plan.casts_head and rows >= min(half, len(target)):
        # The second warpgroup of the last row block reads a half's bytes, even where there is none.
        class_blocks = cdiv(problem.classes, plan.class_block)
        hit = count.new_empty(cdiv(cdiv(len(target), rows) * half_tiles(problem, rows) + class_blocks, 4))
    found = PackedRows(
        torch.empty_like(target),
        torch.empty_like(target),
        torch.empty_like(row_weight),
        count,
        flags.view(chunks, row_blocks),
        zeros[: 2 * chunks].view(chunks, 2),
        hit,
        *(torch.empty_like(row_weight) for _ in range(8)),
        top_out=torch.empty_like(row_weight) if statistics & OF_BLOCKS == MAX else None,
        statistics_out=None,
        float16=None,
    )
    if plan.fits_float16:
        found = found._replace(float16=float16.make_rows(row_weight, zeros[chunks * (row_blocks + 2) :], scales))
    if statistics & OF_LOGITS and found.top_out is None:
        kinds = (
            (MAX, torch.float32),
            (ARGMAX, torch.int64),
            *((one, torch.float32) for one in (ENTROPY, LOGIT_SUM, SQUARES)),
        )
        made = (torch.empty_like(row_weight, dtype=dtype) if statistics & one else None for one, dtype in kinds)
        found = found._replace(statistics_out=LogitStatistics(*made))
    row_kernels.pack(
        target,
        row_weight,
        order=found.order,
        packed_target=found.target,
        packed_weight=found.row_weight,
        count=count,
        zeros=zeros,
        hit=hit,
    )
    return found


def half_tiles(problem: Problem, rows: int) -> int:
    """Returns how many half tiles of logits a chunk of rows has, on a Hopper."""
    plan = plan_of(problem)
    assert plan.tile is not None
    return cdiv(rows, plan.tile.block_n // 2) * cdiv(problem.classes, plan.class_block)


def pick(problem: Problem, rows: PackedRows, start: int, n: int, result: Tensor | None, *, places: bool = True) -> None:
    """Writes n packed rows of the input, from `start` on, to result (n, D) if that is not None. Writes their target
    logits and reference exponents too, unless those of all rows are already there (`shard_rows.py`)."""
    plan = plan_of(problem)
    config = plan.scaled_exp_config
    assert plan.tile is not None
    row_kernels.pick(
        problem,
        n,
        target=At(rows.target, start),
        row_weight=At(rows.row_weight, start),
        order=At(rows.order, start),
        rows=result,
        target_logit=At(rows.target_logit, start) if places else None,
        ref_exponent=At(rows.ref_exponent, start),
        top=At(rows.top, start),
        hit=rows.hit if places else None,
        hit_first=start // config.rows * half_tiles(problem, config.rows),
        chunk_rows=config.rows if start < len(rows.order) - config.first_rows else config.first_rows,
        half=plan.tile.block_n // 2,
        class_block=plan.class_block,
    )
    if rows.float16 is not None and result is not None:
        float16.place(
            problem,
            rows.float16,
            result,
            start,
            target=rows.target,
            target_logit=rows.target_logit,
            ref_exponent=rows.ref_exponent,
        )


def finish(
    numbers: ChunkNumbers,
    rows: PackedRows,
    chunk: slice,
    *,
    row_weight: At,
    e: StoredExponentials | None,
    x: Tensor | None,
    by_row: bool,
) -> None:
    """Writes the results of a chunk's packed rows for the row weights that are given (n,). With e and x (n, D),
    prepares both for the matmuls of the gradients."""
    n, start = chunk.stop - chunk.start, chunk.start
    row_kernels.finish_rows(
        numbers.problem,
        n,
        numbers.class_blocks,
        sums=numbers.sums,
        tops=None if rows.top_out is None else numbers.of_logits,
        ref_exponent=numbers.ref_exponent,
        target_logit=numbers.target_logit,
        target=numbers.target,
        row_weight=row_weight,
        order=At(rows.order, start),
        e=None if e is None else e.first,
        other_e=None if e is None else e.others,
        x=x,
        rho=At(rows.rho, start),
        theta=At(rows.theta, start),
        loss_out=rows.loss_out,
        lse_out=rows.lse_out,
        target_logit_out=rows.target_logit_out,
        top_out=rows.top_out,
        by_row=by_row,
        of_shard=numbers.of_shard,
    )


def finish_statistics(numbers: ChunkNumbers, rows: PackedRows, chunk: slice) -> None:
    """Writes the statistics of a chunk's packed rows, if there are others than the largest logit."""
    if rows.statistics_out is None:
        return
    row_statistics.finish_statistics(
        numbers.problem,
        chunk.stop - chunk.start,
        numbers.class_blocks,
        numbers.block_width,
        numbers.statistics,
        sums=numbers.sums,
        of_logits=numbers.of_logits,
        row_weight=At(rows.row_weight, chunk.start),
        order=At(rows.order, chunk.start),
        results=rows.statistics_out,
    )
