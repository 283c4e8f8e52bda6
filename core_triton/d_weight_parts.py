"""The last chunk of rows of scaled exponentials whose gradient of the head is sent in parts: `head_scatter.py`.

A part has some classes of each rank's shard. For each part in turn:

    sums of the other chunks + E^T (rho x)    by a kernel that reads these sums in 16 bits and writes float32, on
                                              Hopper for all ranks at once. cuBLAS, and Hopper's kernel for a float32
                                              head, add to a copy of them
    the terms of label smoothing              `Smoothing.add_to_classes`
    the targets' terms, of all rows           `target_grad.add_targets_of_part`
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from core_triton import ampere_gradients, hopper_gradients, target_grad
from core_triton.head_scatter import HeadScatter
from core_triton.kernels import Active
from core_triton.launch import At
from core_triton.packed_rows import PackedRows
from core_triton.problem import ClassSum, Problem, plan_of
from core_triton.smoothing import Smoothing


def can_send(scatter: HeadScatter | None, problem: Problem, tokens: int) -> bool:
    """Whether the last chunk of a call of `tokens` rows can write the parts of d_weight."""
    plan = plan_of(problem)
    if scatter is None or not tokens or plan.fits_float16:
        return False
    if plan.scaled_exp_config.first_rows == tokens:  # its exponentials are in the memory of d_weight
        return False
    # Our kernels read slices of the exponentials from multiples of 16 bytes on. TMA ends in an illegal instruction
    # elsewhere.
    return not plan.d_weight_kernel or scatter.rank_rows % 8 == 0


def _by_hopper(problem: Problem) -> bool:
    plan = plan_of(problem)
    return plan.hopper and plan.d_weight_kernel and problem.linear_weight.itemsize == 2


class LastChunk(NamedTuple):
    """The last chunk of rows of a call.

    Args:
        e: (n, K), the exponentials.
        x: (n, >= D), the rows of the input, already multiplied by rho.
        active: with `least` 1, so that sums are written where no row contributes.
        old: (K, D), the sums of the other chunks, or None if there are none.
        add: `scaled_exp._add_d_weight`, without e, d_weight and vocab_chunk.
    """

    e: Tensor
    x: Tensor
    active: Active
    old: Tensor | None
    add: Callable[..., None]

    def write(self, problem: Problem, piece: slice, sums: Tensor) -> None:
        """Writes the sums of all chunks for some classes of one shard, (k, D) float32."""
        plan, e = plan_of(problem), self.e[:, piece]
        old = None if self.old is None else self.old[piece]
        if old is not None and plan.d_weight_kernel and plan.ampere_tile is not None:
            ampere_gradients.add_d_weight(problem, e, self.x, self.active, sums, first=False, old=old)
            return
        if old is not None:
            sums.copy_(old)
        total = ClassSum(sums, len(sums), float32_sum=False, total=sums)
        self.add(e=e, d_weight=total, vocab_chunk=slice(0, len(sums)))


def send(
    scatter: HeadScatter, problem: Problem, rows: PackedRows, chunk: LastChunk, smoothing: Smoothing | None
) -> None:
    """Sends d_weight: the sums of all chunks, with the terms of the targets and of label smoothing. Overwrites the
    head."""
    targets, by_hopper = PartTargets(scatter, problem, rows), _by_hopper(problem)
    of_smoothing = None if smoothing is None else smoothing.row_sum()

    def write(part: slice, sums: Tensor) -> None:
        if by_hopper:
            options = {
                "rank_rows": scatter.rank_rows,
                "first": part.start,
                "beside": part.start > 0 and scatter.ranks > 1,
            }
            hopper_gradients.write_part(problem, *chunk[:4], sums, **options)
        for piece, place in zip(scatter.pieces(part, problem.classes), sums, strict=True):
            n = max(piece.stop - piece.start, 0)
            if n and not by_hopper:
                chunk.write(problem, piece, place[:n])
            if n and smoothing is not None and of_smoothing is not None:
                smoothing.add_to_classes(place[:n], piece, of_smoothing)
            if not by_hopper:
                place[n:].zero_()
        targets.add(part, sums)

    scatter.send_parts(write, problem.linear_weight)


class PartTargets:
    """The targets' terms of d_weight of all rows, sorted by the place of the target in the parts of a head."""

    def __init__(self, scatter: HeadScatter, problem: Problem, rows: PackedRows) -> None:
        parts, ranks, count, target = scatter.parts(), scatter.ranks, rows.count, rows.target
        self.x = problem.input
        sizes = [part.stop - part.start for part in parts]
        self.first = {part.start: ranks * part.start for part in parts}  # place of the first class of a part
        rank, within = target // scatter.rank_rows, target % scatter.rank_rows
        part_start = within // scatter.step * scatter.step
        part_size = torch.where(part_start == parts[-1].start, sizes[-1], scatter.step)
        place = ranks * part_start + rank * part_size + within - part_start
        self.classes = ranks * parts[-1].stop  # places
        self.rows = target_grad.sort_by_target(place, rows.order, rows.theta, count, self.classes)
        # How many rows have a place before each part, and before the end.
        starts = (torch.arange(len(parts) + 1, device=place.device) * ranks * scatter.step).clamp_(max=self.classes)
        counted = torch.arange(len(place), device=place.device) < count
        self.bounds = ((place < starts[:, None]) & counted).sum(1, dtype=torch.int32)
        self.number = {part.start: number for number, part in enumerate(parts)}

    def add(self, part: slice, sums: Tensor) -> None:
        """Adds the terms of a part to its sums (ranks, n, D)."""
        bounds = At(self.bounds, self.number[part.start])
        target_grad.add_targets_of_part(sums, self.x, *self.rows, bounds, first=self.first[part.start])
