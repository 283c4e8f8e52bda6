"""Rows that contribute, packed before those that do not, and what the anchored exponentials tell of them."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from core_triton import row_kernels
from core_triton.launch import cdiv, column_block, tile_of_call, untyped
from core_triton.problem import Problem


class PackedRows(NamedTuple):
    """What is known and found of the rows, (N,) float32 where nothing else is said: packed, or in the call's order
    where the name ends in _out."""

    order: Tensor  # int64, the row of the call that a packed row is
    count: Tensor  # () int32, how many contribute
    flag: Tensor  # (chunks, row blocks) int32: a block's anchors are too low
    target_logit: Tensor
    anchor: Tensor
    rho: Tensor
    theta: Tensor
    loss_out: Tensor
    lse_out: Tensor
    target_logit_out: Tensor
    top_out: Tensor  # the largest logit, inf if not wanted


def pack(problem: Problem, rows: int) -> tuple[Problem, PackedRows]:
    """Returns the problem with targets and row weights packed, its input as it was, and the rows' arrays, for chunks of
    so many rows."""
    row_weight, tokens = problem.row_weight, len(problem.input)
    order, target, packed_weight = (torch.empty_like(t) for t in (problem.target, problem.target, row_weight))
    count = torch.empty((), dtype=torch.int32, device=row_weight.device)
    flag = count.new_empty((cdiv(tokens, rows), cdiv(rows, tile_of_call(problem).block_n)))
    untyped(row_kernels.pack_kernel)[(1,)](
        problem.target,
        row_weight,
        order,
        target,
        packed_weight,
        count,
        flag,
        tokens,
        flag.numel(),
        BLOCK=4096,
        num_warps=8,
    )
    target_logit, anchor, rho, theta, loss_out, lse_out, target_logit_out = (
        torch.empty_like(row_weight) for _ in range(7)
    )
    rows_ = PackedRows(
        order=order,
        count=count,
        flag=flag,
        target_logit=target_logit,
        anchor=anchor,
        rho=rho,
        theta=theta,
        loss_out=loss_out,
        lse_out=lse_out,
        target_logit_out=target_logit_out,
        top_out=torch.full_like(row_weight, torch.inf),
    )
    return replace(problem, target=target, row_weight=packed_weight), rows_


def pick_rows(packed: Problem, chunk: slice, rows_: PackedRows, result: Tensor) -> None:
    """Writes a chunk's rows of the input to result (n, D), zeros where they do not contribute, and their target logits,
    NaN where the target is no class, and anchors."""
    x, w, spec = packed.input, packed.linear_weight, packed.spec
    untyped(row_kernels.pick_kernel)[(len(result),)](
        x,
        w,
        packed.linear_bias,
        packed.target[chunk],
        packed.row_weight[chunk],
        rows_.order[chunk],
        result,
        rows_.target_logit[chunk],
        rows_.anchor[chunk],
        x.shape[1],
        packed.classes,
        *x.stride(),
        *w.stride(),
        result.stride(0),
        spec.logit_scale,
        spec.softcap or 1.0,
        HAS_BIAS=packed.linear_bias is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        BLOCK_D=column_block(x),
        num_warps=4,
    )
