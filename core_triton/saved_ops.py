"""Losses of rows and log-probabilities that keep something for the backward pass: 3 matmuls in place of 4.

The upstream gradients of the rows are unknown in the forward pass, so `ops.losses` and `ops.log_probs` compute the
logits again in the backward pass. But an upstream gradient is a factor of its row: MATH.md (41), (42). So the forward
pass can compute the gradients for upstream gradients of 1 up to this factor, for as many rows as `saved_budget` holds:

    forward pass    loss and d_input of the first S rows; keeps their exponentials  2 matmuls  `run_saved_losses`
                    loss of the other rows                                          1 matmul
    backward pass   d_input times the upstream gradients; d_weight of these S rows  1 matmul   `run_saved_gradients`
                    d_input and d_weight of the other rows, from logits again       3 matmuls

If a gradient of the entropy or of lse arrives, what was kept is not used. The backward pass is then that of
`ops.log_probs`.

Where the ranks of a process group have shards of the vocabulary, a rank keeps the exponentials of its own classes and
the whole d_input, whose parts the ranks add in the forward pass. In the backward pass of the saved rows they exchange
nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from core_triton import chunked, flops, ops
from core_triton.device import library_settings
from core_triton.groups import grouped, kept
from core_triton.ops import Arrays, LogProbs, Losses, Options, TokenWeights
from core_triton.plan import DeviceInfo, ExecutionPlan, Stage, why_unsaved
from core_triton.problem import (
    DTYPE_NAMES,
    NO_GRADIENTS,
    NOTHING_COMPUTED,
    Gradients,
    NeedsGrad,
    Problem,
    SavedRows,
    plan_of,
)
from core_triton.row_math import RowStatistics
from core_triton.scaling import Factors, scale
from linear_ce.chunking import SavedRowCount, choose_saved_rows, plan_passes
from linear_ce.statistics import BY_ROW, ENTROPY

T = TypeVar("T")


class SavedCall(NamedTuple):
    """One call."""

    arrays: Arrays
    weights: TokenWeights
    options: Options
    statistics: int  # of `linear_ce.statistics`; with ENTROPY, it and lse are differentiated: log-probabilities
    needs_grad: NeedsGrad


class SavedLosses(NamedTuple):
    """What `run_saved_losses` returns."""

    losses: Losses
    saved: SavedRows


def losses(arrays: Arrays, weights: TokenWeights, options: Options, *, statistics: int) -> Losses:
    """Returns the weighted loss of each row (N,), as `ops.loss` does."""
    needs_grad = arrays.needs_grad()
    if any(needs_grad):
        check_saves(options.implementation, arrays.input.dtype, options.label_smoothing)
    d_head = needs_grad.d_weight or needs_grad.d_bias
    if not (d_head and saved_rows(arrays, options, needs_grad).rows):
        return ops.loss(arrays, weights, options, statistics=statistics, reduce=False)
    return _apply(SavedCall(arrays, weights, options, statistics, needs_grad))


def log_probs(arrays: Arrays, options: Options) -> LogProbs:
    """Returns what `ops.log_probs` returns."""
    needs_grad = arrays.needs_grad()
    if any(needs_grad):
        check_saves(options.implementation, arrays.input.dtype, options.label_smoothing)
    if not saved_rows(arrays, options, needs_grad).rows:
        return ops.log_probs(arrays, options)
    found = _apply(SavedCall(arrays, TokenWeights(None, None), options, ops.OF_LOG_PROBS, needs_grad))
    assert found.entropy is not None
    assert found.lse is not None
    return LogProbs(0.0 - found.loss, found.entropy, found.lse, found.row_weight)  # -loss could be -0.0


def saved_rows(arrays: Arrays, options: Options, needs_grad: NeedsGrad) -> SavedRowCount:
    """Returns which rows of a call are saved: the first ones."""
    return _count(arrays.input, options.most_classes(), needs_grad, options.saved_budget)


def _count(x: Tensor, classes: int, needs_grad: NeedsGrad, budget: int) -> SavedRowCount:
    tokens, hidden = x.shape
    return choose_saved_rows(
        tokens=tokens,
        hidden=hidden,
        classes=classes,
        itemsize=x.itemsize,
        d_input=needs_grad.d_input,
        d_head=needs_grad.d_weight or needs_grad.d_bias,
        budget=budget if any(needs_grad) else 0,
    )


def explained_plan(
    problem: Problem,
    memory_budget: int,
    saved_budget: int,
    implementation: str,
    needs_grad: NeedsGrad,
    device: DeviceInfo | None,
    *,
    entropy: bool,
    batch_invariant: bool,
) -> ExecutionPlan:
    """Returns the plan of losses of rows with gradients: that of the rows that are saved, with that of the other rows,
    or that of the backward pass if no row is saved. Raises as the call if memory_budget cannot hold all its passes."""
    x, saved = problem.input, None

    def plan_rows(rows: slice, stage: Stage, needs_grad: NeedsGrad, **of_pass: Any) -> ExecutionPlan:
        of_rows, how = replace(problem, input=x[rows]), (memory_budget, implementation)
        of_pass["batch_invariant"] = batch_invariant
        return ops.plan_for(of_rows, stage, *how, needs_grad, device=device, **of_pass)

    if saved_budget:
        check_saves(implementation, x.dtype, problem.spec.label_smoothing)
        saved = _count(x, problem.most_classes, needs_grad, saved_budget)
    if saved is None or not saved.rows:
        statistics = (BY_ROW if batch_invariant or entropy else 0) | (ENTROPY if entropy else 0)
        plan = plan_passes(
            lambda: plan_rows(slice(None), "row_gradients", needs_grad, entropy=entropy),
            lambda: plan_rows(slice(None), ops.stage_of_plan_b(statistics), NO_GRADIENTS, statistics=statistics),
        )
        return replace(plan, saved=saved)
    packed, others = _packs(implementation, x.dtype), None
    plan = _plan_passes(plan_rows, saved, needs_grad, statistics=0, packed=packed)
    if saved.rows < saved.tokens:
        others = plan_rows(slice(saved.rows, None), "row_gradients", needs_grad)
    return replace(plan, saved=saved, others=others)


def _plan_passes(
    plan_rows: Callable[..., T], saved: SavedRowCount, needs_grad: NeedsGrad, *, statistics: int, packed: bool
) -> T:
    """Plans all passes of a call: `chunking.plan_passes`. Returns what plans the rows that are saved.

    Args:
        plan_rows: a function (rows, stage, needs_grad, *, statistics=0, entropy=False) that plans a pass over rows.
        saved: the rows that are saved, at least one.
        packed: whether the rows that are saved are packed.
        needs_grad, statistics: of the call.
    """
    first, others, passes = slice(0, saved.rows), slice(saved.rows, saved.tokens), list[Callable[[], T]]()
    if statistics & ENTROPY:  # a gradient of the entropy may arrive
        passes.append(partial(plan_rows, slice(0, saved.tokens), "gradients", needs_grad, entropy=True))
    if not packed:  # for d_weight
        passes.append(partial(plan_rows, first, "gradients", needs_grad._replace(d_input=False)))
    if saved.rows < saved.tokens:
        forward = ops.stage_of_plan_b(statistics)
        passes.append(partial(plan_rows, others, forward, NO_GRADIENTS, statistics=statistics))
        passes.append(partial(plan_rows, others, "row_gradients", needs_grad))
    return plan_passes(partial(plan_rows, first, "saved_rows", _made(needs_grad), statistics=statistics), *passes)


def _made(needs_grad: NeedsGrad) -> NeedsGrad:
    """Returns what the plan of saved rows depends on. The two passes have the same chunks, whether or not the second
    needs all gradients."""
    return NeedsGrad(needs_grad.d_input, needs_grad.d_weight or needs_grad.d_bias, False)


def _packs(implementation: str, dtype: torch.dtype) -> bool:
    """Whether the rows that are saved are packed: `packed_rows.PackedRows`."""
    return implementation != "chunked" and dtype != torch.float32


def check_saves(implementation: str, dtype: torch.dtype, label_smoothing: float) -> None:
    """Raises ValueError for options with which kernels save no rows, however many rows there are."""
    why = why_unsaved(implementation, DTYPE_NAMES[dtype], label_smoothing)
    if why is not None:
        raise ValueError(why)


class SavedRowLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: SavedCall, *_: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = ops.below_autograd(run_saved_losses, dispatched_saved_losses, *call)
        ctx.options, ctx.needs_grad = call.options, call.needs_grad
        row_weight, lse, entropy = found.losses.row_weight, found.losses.lse, found.losses.entropy
        ctx.save_for_backward(*call.arrays, row_weight, lse, entropy, *found.saved)
        constant = found.losses._replace(loss=None, entropy=None, lse=lse if entropy is None else None)
        ctx.mark_non_differentiable(*(one for one in constant if one is not None))
        ctx.set_materialize_grads(False)  # an unused result's gradient is None
        return found.losses

    @staticmethod
    @ops.no_double_backward
    @ops.between_graphs
    def backward(ctx: Any, d_loss: Tensor | None, *d_results: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        arrays, (row_weight, lse, entropy) = Arrays(*saved[:5]), saved[5:8]
        options, of_results = ctx.options, dict(zip(Losses._fields[1:], d_results, strict=True))
        d_entropy, d_lse = of_results["entropy"], of_results["lse"]
        # A backward pass may need fewer gradients than the forward pass prepared.
        pairs = zip(ctx.needs_grad, ctx.needs_input_grad[1:], strict=True)
        needs_grad = NeedsGrad(*(prepared and needed for prepared, needed in pairs))
        if d_entropy is not None or d_lse is not None:
            d_log_prob = None if d_loss is None else -d_loss
            cotangents = d_log_prob, d_entropy, d_lse
            return None, *ops.log_prob_gradients(arrays, options, entropy, lse, row_weight, cotangents, needs_grad)
        if d_loss is None:
            return None, None, None, None
        factor = torch.where(row_weight != 0, d_loss, 0.0)
        return None, *_gradients(arrays, options, factor, row_weight, lse, SavedRows(*saved[8:]), needs_grad)


def _apply(call: SavedCall) -> Losses:
    if torch.compiler.is_compiling():
        return dispatched_saved_losses(*call).losses
    results: Any = SavedRowLosses.apply(call, *call.arrays.differentiated())
    return Losses(*results)


def run_saved_losses(
    arrays: Arrays,
    weights: TokenWeights,
    options: Options,
    statistics: int,
    needs_grad: NeedsGrad,
) -> SavedLosses:
    """The forward pass. This raises if the memory budget cannot hold all passes of the call, or if there is nothing to
    save."""

    def run() -> tuple[Tensor | None, ...]:
        row_weight = ops.compute_row_weights(arrays, weights, options)
        loss, found, saved = _save(arrays, options, row_weight, needs_grad, statistics)
        return *ops.kept_losses(loss, row_weight, found, statistics=statistics, backward=True), *saved

    results = ops.recorded(("saved_losses", needs_grad, statistics), arrays, weights, options, run)
    of_losses = len(Losses._fields)
    return SavedLosses(Losses(*results[:of_losses]), SavedRows(*results[of_losses:]))


def _save(
    arrays: Arrays, options: Options, row_weight: Tensor, needs_grad: NeedsGrad, statistics: int
) -> tuple[Tensor, RowStatistics, SavedRows]:
    """Returns the weighted loss of each row, the statistics, and what is kept of the first rows."""

    def plan_rows(rows: slice, stage: Stage, needs_grad: NeedsGrad, **of_pass: Any) -> Problem:
        return ops.make_problem(stage, arrays.of_rows(rows), options, row_weight[rows], needs_grad, **of_pass)

    count, packed = saved_rows(arrays, options, needs_grad), _packs(options.implementation, arrays.input.dtype)
    problem = _plan_passes(plan_rows, count, needs_grad, statistics=statistics, packed=packed)
    plan, rows, others = plan_of(problem), count.rows, slice(count.rows, count.tokens)
    with library_settings(plan, arrays.input):
        if plan.path == "scaled_exp":
            from core_triton.scaled_exp import save_rows  # Triton is not on every machine that has PyTorch

            loss, found, saved = save_rows(problem, needs_grad, statistics=statistics)
        else:
            loss, found, saved = chunked.save_rows(
                ops.tiles_of(plan), problem, plan.chunk_config, needs_grad, statistics
            )
    if rows < len(row_weight):
        other_loss, other = ops.plan_b(
            arrays.of_rows(others), options, row_weight[others], statistics=statistics, reduce=False
        )
        loss, found = torch.cat([loss, other_loss]), _joined(found, other)
    return loss, found, saved


def _joined(first: RowStatistics, others: RowStatistics) -> RowStatistics:
    """Returns the statistics of the first rows and of the others that both have."""
    pairs = zip(first, others, strict=True)
    return RowStatistics(*(None if a is None or b is None else torch.cat([a, b]) for a, b in pairs))  # pyright: ignore[reportArgumentType]


def _gradients(
    arrays: Arrays,
    options: Options,
    factor: Tensor,
    row_weight: Tensor,
    lse: Tensor,
    saved: SavedRows,
    needs_grad: NeedsGrad,
) -> Gradients:
    if ops.is_eager(arrays):
        in_place = not torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
        return run_saved_gradients(arrays, options, factor, row_weight, lse, saved, needs_grad, in_place=in_place)
    flops.offer()
    found = torch.ops.linear_ce.saved_gradients(*arrays, *options, factor, row_weight, lse, *saved, *needs_grad)
    return grouped(Gradients, found, needs_grad)


def run_saved_gradients(
    arrays: Arrays,
    options: Options,
    factor: Tensor,
    row_weight: Tensor,
    lse: Tensor,
    saved: SavedRows,
    needs_grad: NeedsGrad,
    *,
    in_place: bool = False,
) -> Gradients:
    """The backward pass: the gradients of the sum of the rows' losses, each multiplied by `factor` (N,).

    The gradients of the head by the rows that were not saved come first. Those by the saved rows are added to them.

    Args:
        factor: the upstream gradients, 0 in rows that do not contribute.
        row_weight: those of the forward pass, which are part of what was saved.
        in_place: whether the saved d_input may be overwritten.
    """
    rows, tokens = next(len(one) for one in (saved.unit_d_input, saved.rho) if one is not None), len(factor)
    first, others = slice(0, rows), slice(rows, tokens)
    d_input, d_head = saved.unit_d_input if needs_grad.d_input else None, NOTHING_COMPUTED
    if needs_grad.d_input and not (in_place and rows == tokens):
        d_input = torch.empty_like(arrays.input, memory_format=torch.contiguous_format)
    if rows < tokens:
        upstream = torch.where(factor != 0, factor * row_weight, 0.0)[others]
        rest = None if d_input is None else d_input[others]
        d_head = ops.plan_c(arrays.of_rows(others), options, upstream, lse[others], needs_grad, rest)
    of_first, factor = arrays.of_rows(first), factor[first]
    made = NeedsGrad(saved.unit_d_input is not None, saved.e is not None, False)
    problem = ops.make_problem("saved_rows", of_first, options, row_weight[first], made)
    plan = plan_of(problem)
    with library_settings(plan, arrays.input):
        if plan.path == "scaled_exp":
            from core_triton.scaled_exp import saved_gradients

            input_factor = factor if saved.unit_scale is None else factor * saved.unit_scale
            d_head = saved_gradients(problem, saved, input_factor, needs_grad, d_head)
        else:
            assert saved.rho is not None
            input_factor = torch.where(factor == 0, 0.0, factor * saved.rho)
            head = needs_grad._replace(d_input=False)
            problem = ops.make_problem("gradients", of_first, options, input_factor, head)
            plan = plan_of(problem)
            tiles = ops.tiles_of(plan)
            d_head = chunked.saved_gradients(tiles, problem, plan.chunk_config, saved, needs_grad, d_head)
    if d_input is not None:
        of_saved = Gradients(saved.unit_d_input, None, None)
        results = Gradients(d_input[first], None, None)
        scale(of_saved, Factors(input_factor[:, None], input_factor), results, options.memory_budget)
    return d_head._replace(d_input=d_input)


# Calls of operators, which return a list of the results that are not None.


def dispatched_saved_losses(
    arrays: Arrays, weights: TokenWeights, options: Options, statistics: int, needs_grad: NeedsGrad
) -> SavedLosses:
    found = torch.ops.linear_ce.saved_losses(*arrays, *weights, *options, statistics, *needs_grad)
    there = ops.losses_there(statistics=statistics, backward=True)
    losses, rest = grouped(Losses, found, there), found[sum(there) :]
    # Above autograd, which has saved them, the operator does not return the rows.
    there = _saved_there(arrays, options, needs_grad) if rest else [False] * len(SavedRows._fields)
    return SavedLosses(losses, grouped(SavedRows, rest, there))


def _saved_there(arrays: Arrays, options: Options, needs_grad: NeedsGrad) -> list[bool]:
    """Returns which of the `SavedRows` are not None."""
    packed, float16 = _packs(options.implementation, arrays.input.dtype), arrays.input.dtype == torch.float16
    d_input, head = needs_grad.d_input, needs_grad.d_weight or needs_grad.d_bias
    of_float16 = [packed and float16 and needed for needed in (d_input, head)]
    return [head, d_input, head or not packed, *[packed and head] * 4, *of_float16]


def fake_saved_rows(arrays: Arrays, options: Options, needs_grad: NeedsGrad) -> SavedRows:
    """Returns tensors like those of `SavedRows`."""
    x, rows, classes = arrays.input, saved_rows(arrays, options, needs_grad).rows, options.most_classes()
    there = _saved_there(arrays, options, needs_grad)
    packed, vector = there[3], x.new_empty(rows, dtype=torch.float32)
    made = (
        x.new_empty((rows, -(-classes // 64) * 64 if packed else classes)),
        x.new_empty((rows, x.shape[1])),
        vector,
        torch.empty_like(vector),
        arrays.target.new_empty(rows),
        arrays.target.new_empty(rows),
        x.new_empty((), dtype=torch.int32),
        torch.empty_like(vector),
        torch.empty_like(vector),
    )
    return kept(SavedRows, made, there)
