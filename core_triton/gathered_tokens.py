"""Tokens that are divided over the ranks of a vocabulary, which each has its shard of the head.

Targets and other numbers of tokens are those of all ranks, (ranks M,) for at most M tokens of each. The input stays
that of a rank's own tokens until it is known how the call runs (`with_tokens`):

    three matmuls of scaled exponentials    each rank gathers a chunk at a time: `token_slices.py`
    all other calls                         it gathers them all, (ranks M, D), and the rest is an ordinary call
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from core_triton import ops, vocab_shard
from core_triton.arguments import Call
from core_triton.plan import ExecutionPlan
from core_triton.problem import Problem


def with_tokens(call: Call, *, statistics: int, reduce: bool, vectors: int = 0) -> Call:
    """Returns a call of a rank's tokens as it is if its passes gather them chunk by chunk, and otherwise a call of the
    tokens of all ranks. The other arguments are those of `ops.loss` and `ops.plan_a`."""
    arrays, options = call.arrays, call.options
    if not options.rank_tokens:
        return call
    needs_grad = arrays.needs_grad()
    if ops.in_forward(needs_grad, statistics, reduce=reduce):
        row_weight = arrays.target  # in place of the row weights, which decide nothing
        given = arrays, options, row_weight, needs_grad
        with suppress(ValueError):  # other matmuls, or memory_budget is less than a chunk takes
            ops.make_problem("loss_and_gradients", *given, statistics=statistics, vectors=vectors)
            return call
    return of_all_tokens(call)


def of_all_tokens(call: Call) -> Call:
    """Returns a call of the tokens of all ranks, which are gathered, if each has its own."""
    if not call.options.rank_tokens:
        return call
    most, group = call.options.rank_tokens, vocab_shard.group_of(call.options.vocab_group)
    x = gathered_tokens(call.arrays.input, group, most, 1, 0.0)
    return call._replace(arrays=call.arrays._replace(input=x), options=call.options._replace(rank_tokens=0))


def explained(problem: Problem, plan: Callable[[Problem], ExecutionPlan]) -> ExecutionPlan:
    """Returns the plan of a call of a rank's tokens, or of those of all ranks, as `with_tokens` does."""
    x, shard = problem.input, problem.shard
    if shard is None or not shard.tokens:
        return plan(problem)
    with suppress(ValueError):
        return plan(problem)
    every = torch.empty((len(problem.target), x.shape[1]), dtype=x.dtype, device="meta")
    return plan(replace(problem, input=every, shard=replace(shard, tokens=0)))


def gathered_tokens(value: Tensor, group: "dist.ProcessGroup", most: int, axes: int, fill: float) -> Tensor:
    """Returns an array of tokens, whose first `axes` axes are those of tokens, of all ranks, (ranks * most, ...). Ranks
    with fewer tokens have `fill`."""
    return cast(Tensor, _GatheredTokens.apply(value.reshape(-1, *value.shape[axes:]), group, most, fill))


class _GatheredTokens(torch.autograd.Function):
    """The backward pass takes this rank's rows of a gradient that is whole on each rank."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any, most: int, fill: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.place = slice(group.rank() * most, group.rank() * most + len(value))
        if len(value) < most:
            rest = value.new_full((most - len(value), *value.shape[1:]), fill)
            value = torch.cat([value, rest])
        return vocab_shard.gather(value.contiguous(), group.size(), group.group_name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient[ctx.place], None, None, None


def own_tokens(value: Tensor, group: "dist.ProcessGroup", most: int, tokens: int) -> Tensor:
    """Returns this rank's results (tokens,) of those of all ranks (ranks * most,)."""
    return cast(Tensor, _OwnTokens.apply(value, group, most, tokens))


class _OwnTokens(torch.autograd.Function):
    """This rank's results of those of all tokens. The backward pass gathers the upstream gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any, most: int, tokens: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.most = group, most
        return value[group.rank() * most :][:tokens].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        whole = gradient.new_zeros(ctx.most)
        whole[: len(gradient)] = gradient
        return vocab_shard.gather(whole, ctx.group.size(), ctx.group.group_name), None, None, None
