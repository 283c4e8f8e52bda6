"""Autograd around the plans: three differentiable functions. Those of token losses are in `token_ops.py`.

In eager mode a function is a `torch.autograd.Function` that runs the plans. Under torch.compile, and under a dispatch
mode, it is an operator of `operators.py`, which is one node of a graph.

    `loss_and_gradients`  plan A: computes the gradients in the forward pass, and scales them in the backward pass
    `losses`              plan B; differentiated, plan C: the backward pass computes the logits again
    `log_probs`           plan C for log-probabilities
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from core_triton import chunked, flops, head_scatter, ranges, row_math
from core_triton.device import library_settings
from core_triton.grad_into import AddsOnce
from core_triton.groups import Arrays, LogProbs, Losses, Options, TokenWeights, grouped, kept
from core_triton.head_scatter import HeadScatter
from core_triton.plan import DeviceInfo, ExecutionPlan, PlanKey, Stage, make_plan
from core_triton.problem import NO_GRADIENTS, Gradients, NeedsGrad, Problem, layout_of, layout_of_input, plan_of
from core_triton.row_math import Coefficients, RowStatistics
from core_triton.scaling import Factors, scaled
from core_triton.token_hook import TokenHook
from linear_ce.chunking import plan_passes
from linear_ce.gpus import known_gpu
from linear_ce.statistics import ARGMAX, BY_ROW, D_ENTROPY, ENTROPY, LOGIT_SUM, LSE, MAX, OF_LOGITS, SQUARES, planes

T = TypeVar("T")

OF_LOG_PROBS = LSE | ENTROPY | BY_ROW  # what `log_probs` computes, of `linear_ce.statistics`


# The functions.


def loss_and_gradients(
    arrays: Arrays,
    weights: TokenWeights,
    options: Options,
    needs_grad: NeedsGrad,
    *,
    statistics: int,
    reduce: bool,
    grad_into: Tensor | None = None,
) -> Losses:
    """Plan A. Returns the loss, () if `reduce` and (N,) otherwise, and computes its gradients in the same pass.

    Without `reduce` only the gradient of input is computed. The backward pass multiplies each of its rows by the
    upstream gradient of the row's loss. With `grad_into`, and `reduce`, d_weight is added to it in this pass.
    """
    if torch.compiler.is_compiling():
        found = torch.ops.linear_ce.loss_and_gradients(*arrays, *weights, *options, statistics, reduce, *needs_grad)
        return grouped(Losses, found, losses_there(statistics=statistics, backward=not reduce))
    call = arrays, weights, options, statistics, reduce, needs_grad, grad_into
    results: Any = LossAndGradients.apply(call, *arrays.differentiated())
    return Losses(*results)


def losses(
    arrays: Arrays,
    weights: TokenWeights,
    options: Options,
    needs_grad: NeedsGrad,
    *,
    statistics: int,
    reduce: bool,
    grad_into: Tensor | None = None,
) -> Losses:
    """Plan B, and plan C's forward pass. Returns each row's weighted loss, or their sum () with `reduce`. With
    `grad_into` the backward pass adds d_weight to it. With D_ENTROPY in `statistics` the entropy has a gradient too, of
    a loss that is only a negative log-likelihood."""
    if torch.compiler.is_compiling():
        found = dispatched_losses(arrays, weights, options, statistics, needs_grad)
    elif not any(needs_grad) and is_eager(arrays):
        return run_losses(arrays, weights, options, statistics, needs_grad, reduce=reduce)
    else:
        call = arrays, weights, options, statistics, needs_grad, grad_into
        results: Any = RowLosses.apply(call, *arrays.differentiated())
        found = Losses(*results)
    # Not `_replace`: torch.compile cannot return its result from a function that it compiles alone.
    return Losses(found.loss.sum(), *found[1:]) if reduce else found


def loss(
    arrays: Arrays,
    weights: TokenWeights,
    options: Options,
    *,
    statistics: int,
    reduce: bool,
    grad_into: Tensor | None = None,
) -> Losses:
    """Runs `loss_and_gradients` if the forward pass can compute the gradients that are needed, and `losses` if not."""
    needs_grad = arrays.needs_grad()
    run = loss_and_gradients if in_forward(needs_grad, statistics, reduce=reduce) else losses
    return run(arrays, weights, options, needs_grad, statistics=statistics, reduce=reduce, grad_into=grad_into)


def in_forward(needs_grad: NeedsGrad, statistics: int, *, reduce: bool) -> bool:
    """Whether the forward pass can compute the gradients that are needed."""
    d_head = needs_grad.d_weight or needs_grad.d_bias
    found = (d_head and reduce) or (needs_grad.d_input and (reduce or not d_head))
    return found and not statistics & D_ENTROPY


def log_probs(arrays: Arrays, options: Options, *, grad_into: Tensor | None = None) -> LogProbs:
    """Plan C's forward pass for log-probabilities."""
    needs_grad = arrays.needs_grad()
    if torch.compiler.is_compiling():
        return dispatched_log_probs(arrays, options, needs_grad)
    if not any(needs_grad) and is_eager(arrays):
        return run_log_probs(arrays, options, needs_grad)
    results: Any = RowLogProbs.apply((arrays, options, needs_grad, grad_into), *arrays.differentiated())
    return LogProbs(*results)


# Their autograd. A function takes all arguments of its pass as one tuple, because each argument costs host time. The
# arrays that it differentiates follow as separate arguments, so that autograd sees them.


Backward = Callable[..., tuple[Tensor | None, ...]]


NO_SECOND_DERIVATIVE = (
    "linear_cross_entropy, linear_log_probs and linear_token_loss have no second derivative: use create_graph=False"
)


def no_double_backward(backward: Backward) -> Backward:
    """Raises for create_graph=True: the gradients have no graph, so a second derivative would silently be 0. Raises for
    several upstream gradients at once too: PyTorch's errors for the operations of the plans do not name their cause."""

    @wraps(backward)
    def checked(ctx: Any, *d_outputs: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_DERIVATIVE)
        if not torch.compiler.is_dynamo_compiling() and _batched(d_outputs):
            raise RuntimeError(
                "a backward pass of linear_cross_entropy, linear_log_probs or linear_token_loss takes one upstream "
                "gradient, got a batch of them: use no is_grads_batched=True, vectorize=True or torch.vmap"
            )
        return backward(ctx, *d_outputs)

    return checked


def between_graphs(backward: Backward) -> Backward:
    """Keeps a backward pass that runs plans out of the trace of compiled autograd, which traces the backward passes of
    eager calls. The plans change PyTorch's settings for matmuls, and Dynamo makes their NamedTuples empty."""

    @wraps(backward)
    def called(ctx: Any, *d_outputs: Any) -> tuple[Tensor | None, ...]:
        if not torch.compiler.is_dynamo_compiling():
            return backward(ctx, *d_outputs)
        from core_triton.compiling import call_between_graphs  # loads torch._dynamo

        return call_between_graphs(backward, ctx, *d_outputs)

    return called


def _batched(upstream: tuple[Tensor | None, ...]) -> bool:
    """Whether upstream gradients are those of `torch.vmap`, or of is_grads_batched=True."""
    given = [one for one in upstream if one is not None]
    return any(map(is_batchedtensor, given)) or any(map(is_legacy_batchedtensor, given))


class LossAndGradients(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, call: tuple[Arrays, TokenWeights, Options, int, bool, NeedsGrad, Tensor | None], *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        arrays, weights, options, statistics, reduce, needs_grad, grad_into = call
        given = arrays, weights, options, statistics, reduce, needs_grad
        ctx.adds = AddsOnce(grad_into)
        run = partial(run_loss_and_gradients, grad_into=grad_into, scatter=head_scatter.offered())
        found, gradients, scales = below_autograd(run, dispatched_loss_and_gradients, *given, grad_into=grad_into)
        ctx.reduce, ctx.options = reduce, options
        ctx.save_for_backward(None if reduce else found.row_weight, *gradients, scales)
        _only_first_differentiable(ctx, found)
        return found

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, d_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        ctx.adds.check(d_loss)
        if d_loss is None:
            return None, None, None, None
        row_weight, d_input, d_weight, d_bias, scales = ctx.saved_tensors
        if not ctx.reduce:  # rows that do not contribute ignore the upstream gradient, which may be NaN
            d_loss = torch.where(row_weight != 0, d_loss, 0.0)[ctx.options.own_tokens(len(d_input)), None]
        factors = Factors(d_loss, d_loss) if scales is None else Factors(d_loss / scales[0], d_loss / scales[1])
        return None, *scaled(Gradients(d_input, d_weight, d_bias), factors, ctx.options.memory_budget)


class RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, call: tuple[Arrays, TokenWeights, Options, int, NeedsGrad, Tensor | None], *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        arrays, weights, options, statistics, needs_grad, ctx.grad_into = call
        given = arrays, weights, options, statistics, needs_grad
        found = below_autograd(run_losses, dispatched_losses, *given, grad_into=ctx.grad_into)
        ctx.options, entropy = options, found.entropy if statistics & D_ENTROPY else None
        ctx.save_for_backward(*arrays, found.row_weight, found.lse, entropy)
        _only_first_differentiable(ctx, found if entropy is None else found._replace(entropy=None))
        return found

    @staticmethod
    @no_double_backward
    @between_graphs
    def backward(ctx: Any, d_loss: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        d_entropy = Losses(d_loss, *others).entropy  # pyright: ignore[reportArgumentType]
        if d_loss is None and d_entropy is None:
            return None, None, None, None
        *saved, row_weight, lse, entropy = ctx.saved_tensors
        arrays, needs_grad, into = Arrays(*saved), NeedsGrad(*ctx.needs_input_grad[1:]), ctx.grad_into
        upstream = None if d_loss is None else torch.where(row_weight != 0, d_loss * row_weight, 0.0)
        if d_entropy is None and upstream is not None:
            return None, *_row_gradients(arrays, ctx.options, upstream, lse, needs_grad, into)
        cotangents = None if upstream is None else -upstream, d_entropy, None
        return None, *log_prob_gradients(arrays, ctx.options, entropy, lse, row_weight, cotangents, needs_grad, into)


class RowLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, call: tuple[Arrays, Options, NeedsGrad, Tensor | None], *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        arrays, ctx.options, needs_grad, ctx.grad_into = call
        given = arrays, ctx.options, needs_grad
        found = below_autograd(run_log_probs, dispatched_log_probs, *given, grad_into=ctx.grad_into)
        ctx.save_for_backward(*arrays, found.entropy, found.lse, found.row_weight)
        if found.row_weight is not None:
            ctx.mark_non_differentiable(found.row_weight)
        ctx.set_materialize_grads(False)  # an unused result's gradient is None
        return found

    @staticmethod
    @no_double_backward
    @between_graphs
    def backward(
        ctx: Any, d_log_prob: Tensor | None, d_entropy: Tensor | None, d_lse: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        *saved, entropy, lse, row_weight = ctx.saved_tensors
        arrays, options, needs_grad = Arrays(*saved), ctx.options, NeedsGrad(*ctx.needs_input_grad[1:])
        into = ctx.grad_into
        if d_entropy is None and d_lse is None:
            if d_log_prob is None:
                return None, None, None, None
            upstream = torch.where(row_weight != 0, -d_log_prob, 0.0)  # of the negative log-likelihood
            return None, *_row_gradients(arrays, options, upstream, lse, needs_grad, into)
        cotangents = d_log_prob, d_entropy, d_lse
        return None, *log_prob_gradients(arrays, options, entropy, lse, row_weight, cotangents, needs_grad, into)


def _only_first_differentiable(ctx: Any, found: Losses) -> None:
    """Tells autograd that of these results only the loss has a gradient, and that an unused one's gradient is None."""
    rest = [result for result in found[1:] if result is not None]
    if rest:
        ctx.mark_non_differentiable(*rest)
    ctx.set_materialize_grads(False)


def _row_gradients(
    arrays: Arrays, options: Options, upstream: Tensor, lse: Tensor, needs_grad: NeedsGrad, grad_into: Tensor | None
) -> Gradients:
    """Plan C's backward pass for losses of rows: the gradients of their sum, each multiplied by `upstream`."""
    if is_eager(arrays) or grad_into is not None:
        return run_row_gradients(arrays, options, upstream, lse, needs_grad, grad_into)
    flops.offer()
    found = torch.ops.linear_ce.row_gradients(*arrays, *options, upstream, lse, *needs_grad)
    return grouped(Gradients, found, needs_grad)


def _gradients(
    arrays: Arrays,
    options: Options,
    row_weight: Tensor,
    lse: Tensor,
    coefficients: Coefficients,
    needs_grad: NeedsGrad,
    grad_into: Tensor | None,
) -> Gradients:
    """Plan C's backward pass for any coefficients: the gradients for the rows' `row_math.Coefficients`."""
    if is_eager(arrays) or grad_into is not None:
        return run_gradients(arrays, options, row_weight, lse, coefficients, needs_grad, grad_into)
    flops.offer()
    found = torch.ops.linear_ce.gradients(*arrays, *options, row_weight, lse, *coefficients, *needs_grad)
    return grouped(Gradients, found, needs_grad)


def log_prob_gradients(
    arrays: Arrays,
    options: Options,
    entropy: Tensor,
    lse: Tensor,
    row_weight: Tensor,
    cotangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    needs_grad: NeedsGrad,
    grad_into: Tensor | None = None,
) -> Gradients:
    """Plan C's backward pass for the cotangents of log_prob, entropy and lse, (N,) each."""
    d_log_prob, d_entropy, d_lse = (torch.zeros_like(lse) if one is None else one for one in cotangents)
    row_weight = torch.where((d_log_prob != 0) | (d_entropy != 0) | (d_lse != 0), row_weight, 0.0)
    coefficients = row_math.log_prob_coefficients(
        entropy, arrays.target, d_log_prob, d_entropy, d_lse, options.vocab_size
    )
    return _gradients(arrays, options, row_weight, lse, coefficients, needs_grad, grad_into)


# The plans.


def run_loss_and_gradients(
    arrays: Arrays,
    weights: TokenWeights,
    options: Options,
    statistics: int,
    reduce: bool,
    needs_grad: NeedsGrad,
    grad_into: Tensor | None = None,
    scatter: HeadScatter | None = None,
) -> tuple[Losses, Gradients, Tensor | None]:
    """Plan A. Returns the losses, the gradients of the sum of the rows' losses, and the scales of the gradients.

    With `scatter` d_weight is None if it was sent. For float16 the gradients are multiplied by powers of two. The
    scales (2,) are those of d_input and of the head's gradients. They are None for other dtypes, and with `grad_into`,
    whose gradients are final.
    """

    def run() -> tuple[Any, ...]:
        row_weight = compute_row_weights(arrays, weights, options)
        given: dict[str, Any] = {"statistics": statistics, "reduce": reduce, "grad_into": grad_into, "scatter": scatter}
        loss, found, gradients, scales = plan_a(arrays, options, row_weight, needs_grad, **given)
        losses = kept_losses(loss, row_weight, found, statistics=statistics, backward=not reduce)
        return *losses, *gradients, scales

    key = "loss_and_gradients", needs_grad, statistics, reduce
    results = run() if scatter is not None else recorded(key, arrays, weights, options, run, [grad_into])
    return Losses(*results[:-4]), Gradients(*results[-4:-1]), results[-1]


def plan_a(
    arrays: Arrays,
    options: Options,
    row_weight: Tensor,
    needs_grad: NeedsGrad,
    *,
    statistics: int,
    reduce: bool,
    hook: TokenHook | None = None,
    grad_into: Tensor | None = None,
    scatter: HeadScatter | None = None,
) -> tuple[Tensor, RowStatistics, Gradients, Tensor | None]:
    """Runs plan A. Returns the loss, () with `reduce`, the statistics, the gradients and their scales.

    A hook that takes the entropies, where kernels store exponentials of 16 bits or nothing between the passes, is
    called between plan B and the backward pass of plan C.
    """
    problem = make_problem(
        "entropy_loss_and_gradients" if statistics & D_ENTROPY else "loss_and_gradients",
        arrays,
        options,
        row_weight,
        needs_grad,
        statistics=statistics,
        vectors=0 if hook is None else hook.bytes,
        grad_into=grad_into,
    )
    plan, pair, scales = plan_of(problem), None, None
    needs_scales = arrays.input.dtype == torch.float16 and grad_into is None
    if needs_scales and plan.path == "scaled_exp":
        from core_triton.float16 import scales_of  # Triton is not on every machine that has PyTorch

        scales = scales_of(problem.row_weight)
    elif needs_scales:
        pair = row_math.saved_scales(row_weight)
        scales = torch.stack(pair)
    if hook is not None and statistics & D_ENTROPY and plan.path == "recompute":
        ones = (row_weight != 0).float()  # the weighted loss of a row is then its negative log-likelihood
        nll, found = plan_b(arrays, options, ones, statistics=statistics, reduce=False, vectors=hook.bytes)
        hook.process(slice(None), nll, found.entropy)
        assert hook.contributes is not None
        coefficients = chunked.token_coefficients(problem, hook, slice(None), found.lse, found.entropy)
        of_rows = replace(problem, row_weight=hook.contributes)
        with library_settings(plan, arrays.input):
            gradients = chunked.gradients(
                tiles_of(plan), of_rows, plan.chunk_config, found.lse, coefficients, needs_grad, scales=pair
            )
        loss = hook.loss.sum() if reduce else hook.loss
        return loss, found, gradients, scales
    with library_settings(plan, arrays.input):
        if plan.path == "scaled_exp":
            loss, found, gradients = _scaled_exp(
                problem, needs_grad, statistics=statistics, reduce=reduce, hook=hook, scales=scales, scatter=scatter
            )
        else:
            loss, found, gradients = chunked.loss_and_gradients(
                tiles_of(plan), problem, plan.chunk_config, needs_grad, pair, statistics, hook
            )
            loss = loss.sum() if reduce else loss
    return loss, found, gradients, scales


def run_losses(
    arrays: Arrays,
    weights: TokenWeights,
    options: Options,
    statistics: int,
    needs_grad: NeedsGrad,
    *,
    reduce: bool = False,
) -> Losses:
    """Plan B. The loss is () with `reduce`. `needs_grad` says which gradients a backward pass will compute: this raises
    if the memory budget cannot hold both passes."""

    def run() -> Losses:
        row_weight = compute_row_weights(arrays, weights, options)
        backward = _backward_pass(arrays, options, row_weight, needs_grad, entropy=statistics & D_ENTROPY != 0)
        loss, found = plan_b(arrays, options, row_weight, statistics=statistics, reduce=reduce, other_passes=backward)
        return kept_losses(loss, row_weight, found, statistics=statistics, backward=any(needs_grad))

    return Losses(*recorded(("losses", needs_grad, statistics, reduce), arrays, weights, options, run))


def plan_b(
    arrays: Arrays,
    options: Options,
    row_weight: Tensor,
    *,
    statistics: int,
    reduce: bool,
    vectors: int = 0,
    other_passes: Sequence[Callable[[], Problem]] = (),
) -> tuple[Tensor, RowStatistics]:
    """Runs plan B. Returns the loss, () with `reduce`, and the statistics. `other_passes` plan the other passes of the
    call, which are not run."""
    stage = stage_of_plan_b(statistics)
    problem = plan_passes(
        lambda: make_problem(stage, arrays, options, row_weight, NO_GRADIENTS, statistics=statistics, vectors=vectors),
        *other_passes,
    )
    plan = plan_of(problem)
    with library_settings(plan, arrays.input):
        if plan.path == "scaled_exp":
            loss, found, _ = _scaled_exp(problem, NO_GRADIENTS, statistics=statistics, reduce=reduce)
        else:
            loss, found = chunked.losses(tiles_of(plan), problem, plan.chunk_config, statistics)
            loss = loss.sum() if reduce else loss
    return loss, found


def stage_of_plan_b(statistics: int) -> Stage:
    return "statistics" if statistics & BY_ROW else "losses"


def _backward_pass(
    arrays: Arrays, options: Options, row_weight: Tensor, needs_grad: NeedsGrad, *, entropy: bool
) -> list[Callable[[], Problem]]:
    """Returns what plans the backward pass of losses of rows, which may differentiate the entropy too; nothing if there
    is no backward pass."""
    if not any(needs_grad):
        return []
    return [partial(make_problem, "row_gradients", arrays, options, row_weight, needs_grad, entropy=entropy)]


def compute_row_weights(arrays: Arrays, weights: TokenWeights, options: Options) -> Tensor:
    """Returns `row_math.row_weights`, computed by one kernel unless the implementation is "chunked"."""
    if options.implementation == "chunked":
        return row_math.row_weights(options.spec(), arrays.target, arrays.class_weight, *weights, options.vocab_size)
    from core_triton import row_kernels  # Triton is not on every machine that has PyTorch

    given = arrays.target, arrays.class_weight, *weights
    target, *rest = (None if vector is None else vector.contiguous() for vector in given)
    assert target is not None
    class_weight, token_weight, normalizer = rest
    return row_kernels.row_weights(
        target,
        class_weight,
        token_weight,
        normalizer,
        options.vocab_size,
        options.ignore_index,
        mean=options.mean,
    )


def kept_losses(loss: Tensor, row_weight: Tensor, found: RowStatistics, *, statistics: int, backward: bool) -> Losses:
    """Returns the results of a pass that are kept. The others are freed."""
    made = loss, row_weight, *(getattr(found, field) for field in Losses._fields[2:])
    return kept(Losses, made, losses_there(statistics=statistics, backward=backward))


def losses_there(*, statistics: int, backward: bool) -> tuple[bool, ...]:
    """Returns which of the `Losses` are not None. `backward`: the backward pass needs those of each row."""
    rows, top = bool(statistics & ~BY_ROW) or backward, bool(statistics & MAX)
    return True, rows, rows, top, top, *(bool(statistics & one) for one in (ARGMAX, ENTROPY, LOGIT_SUM, SQUARES))


def _scaled_exp(problem: Problem, needs_grad: NeedsGrad, **options: Any) -> tuple[Tensor, RowStatistics, Gradients]:
    from core_triton.scaled_exp import scaled_exp  # Triton is not on every machine that has PyTorch

    return scaled_exp(problem, needs_grad, **options)


def recorded(
    key: tuple[Any, ...],
    arrays: Arrays,
    weights: TokenWeights,
    options: Options,
    run: Callable[[], tuple[Any, ...]],
    others: Sequence[Tensor | None] = (),
) -> tuple[Any, ...]:
    """Returns the results of `run`. On a GPU, a call that only launches kernels is recorded and replayed.

    Args:
        key, run: of `replay.call`.
        arrays, weights, others: its inputs.
        options: of the call, a part of its key.
    """
    if (
        options.vocab_group
        or options.implementation == "chunked"
        or not arrays.input.is_cuda
        or _modes()
        or ranges.current()
    ):
        return run()
    from core_triton import replay  # Triton is not on every machine that has PyTorch

    return replay.call((key, options), arrays.input.device, (*arrays, *weights, *others), run)


def run_log_probs(arrays: Arrays, options: Options, needs_grad: NeedsGrad) -> LogProbs:
    """Plan B with the entropy. `needs_grad` as for `run_losses`."""
    row_weight = compute_row_weights(arrays, TokenWeights(None, None), options)
    # batch_invariant differentiates log_prob only.
    backward = _backward_pass(arrays, options, row_weight, needs_grad, entropy=not options.batch_invariant)
    # The row weights are 1, so the losses are negative log-likelihoods.
    nll, found = plan_b(arrays, options, row_weight, statistics=OF_LOG_PROBS, reduce=False, other_passes=backward)
    assert found.entropy is not None
    log_prob = 0.0 - nll  # never -0.0
    return LogProbs(log_prob, found.entropy, found.lse, row_weight if any(needs_grad) else None)


def run_row_gradients(
    arrays: Arrays,
    options: Options,
    upstream: Tensor,
    lse: Tensor,
    needs_grad: NeedsGrad,
    grad_into: Tensor | None = None,
) -> Gradients:
    """Plan C's backward pass for losses of rows. Where plan A with scaled exponentials can run, it runs again, with
    `upstream` as the row weights: it computes the logits once and stores exponentials in place of d_logits."""

    def run() -> Gradients:
        return plan_c(arrays, options, upstream, lse, needs_grad, None, grad_into)

    weights = TokenWeights(upstream, lse)
    return Gradients(*recorded(("row_gradients", needs_grad), arrays, weights, options, run, [grad_into]))


def plan_c(
    arrays: Arrays,
    options: Options,
    upstream: Tensor,
    lse: Tensor,
    needs_grad: NeedsGrad,
    d_input: Tensor | None,
    grad_into: Tensor | None = None,
) -> Gradients:
    """Runs plan C's backward pass for losses of rows. Writes d_input to `d_input` if that is not None."""
    problem = make_problem("row_gradients", arrays, options, upstream, needs_grad, grad_into=grad_into)
    plan = plan_of(problem)
    with library_settings(plan, arrays.input):
        if plan.path == "scaled_exp":
            by_row = BY_ROW if options.batch_invariant else 0
            return _scaled_exp(problem, needs_grad, statistics=by_row, reduce=False, d_input=d_input)[2]
        coefficients = row_math.loss_coefficients(
            problem.spec, lse, arrays.target, upstream, arrays.class_weight, problem.classes
        )
        return chunked.gradients(tiles_of(plan), problem, plan.chunk_config, lse, coefficients, needs_grad, d_input)


def run_gradients(
    arrays: Arrays,
    options: Options,
    row_weight: Tensor,
    lse: Tensor,
    coefficients: Coefficients,
    needs_grad: NeedsGrad,
    grad_into: Tensor | None = None,
) -> Gradients:
    """Plan C's backward pass."""
    entropy = coefficients.beta is not None
    problem = make_problem("gradients", arrays, options, row_weight, needs_grad, entropy=entropy, grad_into=grad_into)
    plan = plan_of(problem)
    with library_settings(plan, arrays.input):
        coefficients = coefficients.map(Tensor.contiguous)
        return chunked.gradients(tiles_of(plan), problem, plan.chunk_config, lse.contiguous(), coefficients, needs_grad)


def make_problem(
    stage: Stage,
    arrays: Arrays,
    options: Options,
    row_weight: Tensor,
    needs_grad: NeedsGrad,
    *,
    statistics: int = 0,
    entropy: bool = False,
    vectors: int = 0,
    grad_into: Tensor | None = None,
) -> Problem:
    """Returns the problem of a call with its plan. Kernels need contiguous vectors, so strided ones are copied.

    `vectors`: bytes of other vectors of the call, which are part of its workspace.
    """
    copied, named = vectors, {**arrays._asdict(), "row_weight": row_weight}
    if options.implementation != "chunked":
        for name in ("linear_bias", "target", "row_weight", "class_weight"):
            vector = named[name]
            if vector is not None and not vector.is_contiguous():
                named[name] = vector.contiguous()
                copied += named[name].nbytes
    problem = Problem(**named, **options.of_problem(), grad_into=grad_into)
    plan = plan_for(
        problem,
        stage,
        options.memory_budget,
        options.implementation,
        needs_grad,
        statistics=statistics,
        entropy=entropy,
        copied=copied,
        batch_invariant=options.batch_invariant,
    )
    return replace(problem, plan=plan)


def plan_for(
    problem: Problem,
    stage: Stage,
    memory_budget: int,
    implementation: str,
    needs_grad: NeedsGrad,
    *,
    statistics: int = 0,
    entropy: bool = False,
    copied: int = 0,
    batch_invariant: bool = False,
    device: DeviceInfo | None = None,
) -> ExecutionPlan:
    """Returns the plan of a problem: `plan.make_plan` of the properties of its arrays and of a device, or theirs."""
    device = device_of(problem.input.device, implementation) if device is None else device
    # Both passes over saved rows have the same chunks, and the second does not know what the first computed.
    counted, x = ENTROPY if stage == "saved_rows" else statistics, layout_of_input(problem)
    if counted & OF_LOGITS & ~MAX:
        copied += 8 * x.shape[0] * (1 + planes(counted))
    key = PlanKey(
        stage=stage,
        input=x,
        linear_weight=layout_of(problem.linear_weight),
        classes=problem.most_classes,
        copied_bytes=copied,
        label_smoothing=problem.spec.label_smoothing,
        softcap=problem.spec.softcap is not None,
        entropy=entropy or statistics & ENTROPY != 0,
        d_input=needs_grad.d_input,
        d_weight=needs_grad.d_weight,
        d_bias=needs_grad.d_bias,
        statistics=planes(statistics),
        memory_budget=memory_budget,
        implementation=implementation,
        device=device,
        grad_into=problem.grad_into is not None,
        into_aligned=problem.grad_into is None or layout_of(problem.grad_into).aligned,
        splits_head=problem.spec.splits_head,
        batch_invariant=batch_invariant,
        ranks=0 if problem.shard is None else problem.shard.ranks,
        gathers=problem.shard is not None and problem.shard.tokens > 0,
        float32_kernel=x.dtype == "float32" and torch.backends.cuda.matmul.fp32_precision != "tf32",
    )
    return make_plan(key)


def device_of(device: torch.device, implementation: str) -> DeviceInfo:
    """Returns the properties of a device that the plan of a call depends on."""
    if implementation == "chunked":
        return DeviceInfo(device.type, 0, 0, known_gpu("", 0))
    from core_triton.launch import device_info  # Triton is not on every machine that has PyTorch

    return DeviceInfo(device.type, *device_info(device))


def tiles_of(plan: ExecutionPlan) -> chunked.Tiles:
    """Returns the functions that compute the tiles of a plan of `chunked`."""
    if plan.path == "chunked":
        return chunked.TORCH_TILES
    if plan.path == "stored_logits":
        from core_triton.stored_logits import STORED_TILES

        return STORED_TILES
    from core_triton.recompute import KERNEL_TILES

    return KERNEL_TILES


def is_eager(arrays: Arrays) -> bool:
    """Whether the arrays are plain tensors and no dispatch mode is active."""
    plain = (Tensor, torch.nn.Parameter)
    return type(arrays.input) in plain and type(arrays.linear_weight) in plain and not _modes()


def _modes() -> int:
    return torch._C._len_torch_dispatch_stack()


# Calls of operators, which return a list of the results that are not None.


def below_autograd(
    run: Callable[..., T], dispatched: Callable[..., T], *call: Any, grad_into: Tensor | None = None
) -> T:
    """Returns run(*call) for plain tensors or with grad_into, and otherwise dispatched(*call), which calls the operator
    and takes more host time."""
    if is_eager(call[0]) or grad_into is not None:
        return run(*call)
    flops.offer()
    with torch._C._AutoDispatchBelowAutograd():
        return dispatched(*call)


def dispatched_loss_and_gradients(
    arrays: Arrays, weights: TokenWeights, options: Options, statistics: int, reduce: bool, needs_grad: NeedsGrad
) -> tuple[Losses, Gradients, Tensor | None]:
    flat = *arrays, *weights, *options, statistics, reduce, *needs_grad
    rest = iter(torch.ops.linear_ce.loss_and_gradients(*flat))
    losses = grouped(Losses, rest, losses_there(statistics=statistics, backward=not reduce))
    return losses, grouped(Gradients, rest, needs_grad), next(rest, None)


def dispatched_losses(
    arrays: Arrays, weights: TokenWeights, options: Options, statistics: int, needs_grad: NeedsGrad
) -> Losses:
    found = torch.ops.linear_ce.losses(*arrays, *weights, *options, statistics, *needs_grad)
    return grouped(Losses, found, losses_there(statistics=statistics, backward=any(needs_grad)))


def dispatched_log_probs(arrays: Arrays, options: Options, needs_grad: NeedsGrad) -> LogProbs:
    found = torch.ops.linear_ce.log_probs(*arrays, *options, *needs_grad)
    return grouped(LogProbs, found, (True, True, True, any(needs_grad)))
