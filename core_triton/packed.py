"""Rows that contribute, packed before those that do not, and what plan A with anchored exponentials knows of them."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from core_triton import row_kernels
from core_triton.chunked import Problem
from core_triton.fused_tiles import AnchoredConfig
from core_triton.launch import cdiv, column_block, tile_of_call, untyped


class PackedRows(NamedTuple):
    """What plan A knows and finds of the rows, (N,) float32 where nothing else is said: packed, or in the call's order
    where the name ends in _out."""

    order: Tensor  # int64, the row of the call that a packed row is
    count: Tensor  # () int32, how many contribute
    flag: Tensor  # (chunks, row blocks) int32: a block's anchors are too low
    target_logit: Tensor
    anchor: Tensor
    rho: Tensor
    theta: Tensor
    lse_out: Tensor
    target_logit_out: Tensor
    theta_out: Tensor
    top_out: Tensor  # the largest logit, inf if not wanted


def pack(problem: Problem, config: AnchoredConfig) -> tuple[Problem, PackedRows]:
    """Returns the problem with targets and row weights packed, its input as it was, and the rows' arrays."""
    row_weight, tokens = problem.row_weight, len(problem.input)
    order, target, packed_weight, count = packed_order(problem.target, row_weight)
    packed = replace(problem, target=target, row_weight=packed_weight)
    blocks = cdiv(config.rows, tile_of_call(problem).block_n)
    flag = torch.zeros((cdiv(tokens, config.rows), blocks), dtype=torch.int32, device=row_weight.device)
    target_logit, anchor, rho, theta, lse_out, target_logit_out, theta_out = (
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
        lse_out=lse_out,
        target_logit_out=target_logit_out,
        theta_out=theta_out,
        top_out=torch.full_like(row_weight, torch.inf),
    )
    if tokens:
        _store_target_logits(packed, rows_)
    return packed, rows_


def packed_order(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the order (N,) int64 that takes the entries of `weight` other than 0 to the front, values and weight in
    it, and their count () int32."""
    order = torch.empty_like(values, dtype=torch.int64)
    packed, packed_weight = torch.empty_like(values), torch.empty_like(weight)
    count = torch.empty((), dtype=torch.int32, device=weight.device)
    untyped(row_kernels.pack_kernel)[(1,)](
        values, weight, order, packed, packed_weight, count, len(values), BLOCK=4096, num_warps=8
    )
    return order, packed, packed_weight, count


def _store_target_logits(packed: Problem, rows_: PackedRows) -> None:
    """Writes each packed row's target logit, NaN where the target is no class, and anchor."""
    x, w, spec = packed.input, packed.linear_weight, packed.spec
    untyped(row_kernels.target_logit_kernel)[(len(x),)](
        x,
        w,
        packed.linear_bias,
        packed.target,
        packed.row_weight,
        rows_.order,
        rows_.target_logit,
        rows_.anchor,
        x.shape[1],
        packed.classes,
        *x.stride(),
        *w.stride(),
        spec.logit_scale,
        spec.softcap or 1.0,
        HAS_BIAS=packed.linear_bias is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        BLOCK_D=column_block(x),
        num_warps=4,
    )
