"""Autograd around plans A and B with a token loss, a function of the log-probabilities in place of the cross-entropy.

    `token_loss`       the sum of the rows: gradients in the forward pass, scaled in the backward pass; 3 matmuls
    `token_loss_rows`  the loss of each row: through `ops.loss` of each row; 4 matmuls, 2 with a frozen head

A loss of the entropies takes 4 matmuls where the kernels are those of 16 bits, and, for each row, 3 with a frozen head.

As in `ops.py`, a call is a `torch.autograd.Function` in eager mode, and an operator of `operators.py` under
torch.compile. An operator takes named losses only (`token_losses.py`), because its arguments cannot hold a function.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core_triton import flops, ops, row_math, token_hook
from core_triton.grad_into import AddsOnce
from core_triton.groups import grouped, kept
from core_triton.ops import Arrays, Losses, Options, TokenWeights
from core_triton.problem import NOTHING_COMPUTED, Gradients, NeedsGrad
from core_triton.row_math import RowStatistics, TokenStats
from core_triton.scaling import Factors, scaled
from core_triton.token_hook import TokenHook, TokenLoss
from core_triton.token_losses import Named
from linear_ce.statistics import BY_ROW, D_ENTROPY, ENTROPY, statistics_for


class TokenCall(NamedTuple):
    """One call."""

    arrays: Arrays
    weights: TokenWeights
    options: Options
    token_loss: TokenLoss
    per_token: Sequence[Tensor]  # (N,) each
    needs_grad: NeedsGrad
    d_per_token: Sequence[bool]  # which of per_token are differentiated
    stats: Sequence[bool]  # which fields of `TokenStats` are computed
    with_entropy: bool  # whether token_loss takes the entropies
    grad_into: Tensor | None = None  # (V, D) float32 that d_weight is added to


class TokenLossResults(NamedTuple):
    """What `run_token_loss` returns."""

    loss: Tensor  # () float32
    stats: TokenStats  # (N,) each
    gradients: Gradients
    scales: Tensor | None  # (2,), of the gradients of float16: see `ops.run_loss_and_gradients`
    d_per_token: tuple[Tensor | None, ...]  # (N,) float32 each


def token_loss(
    arrays: Arrays,
    weights: TokenWeights,
    options: Options,
    function: TokenLoss,
    per_token: Sequence[Tensor],
    stats: Sequence[bool],
    *,
    with_entropy: bool,
    grad_into: Tensor | None = None,
) -> tuple[Tensor, TokenStats]:
    """Returns the sum () of the weighted token losses: plan A, or plan B if no gradient of the logits is needed; and
    these fields of the statistics, (N,) each."""
    needs_grad, d_per_token = arrays.needs_grad(), which_need_grad(per_token)
    of_tokens = function, per_token, needs_grad, d_per_token, stats, with_entropy
    call = TokenCall(arrays, weights, options, *of_tokens, grad_into)
    if torch.compiler.is_compiling():
        loss, *rest = _dispatched(call)
        return loss, grouped(TokenStats, rest, stats)
    if any(call.needs_grad) or any(call.d_per_token):
        found: Any = TokenLossAndGradients.apply(call, *arrays.differentiated(), *per_token)
        return found[0], TokenStats(*found[1:])
    results = token_loss_below_autograd(call)
    return results.loss, results.stats


def token_loss_rows(
    arrays: Arrays,
    weights: TokenWeights,
    options: Options,
    function: TokenLoss,
    per_token: Sequence[Tensor],
    stats: Sequence[bool],
    *,
    with_entropy: bool,
    grad_into: Tensor | None = None,
) -> tuple[Tensor, TokenStats]:
    """Returns the weighted token loss of each row (N,), through its negative log-likelihood and perhaps its entropy,
    and the statistics (N,) with these names."""
    row_weight = row_math.row_weights(options.spec(), arrays.target, None, *weights, options.vocab_size)
    contributes = row_weight != 0
    ones = TokenWeights(contributes.float(), None)  # the weighted loss of a row is then its negative log-likelihood
    options, statistics = options._replace(mean=False), statistics_of(stats, with_entropy)
    found = ops.loss(arrays, ones, options, statistics=statistics, reduce=False, grad_into=grad_into)
    log_prob = token_hook.log_prob_of(found.loss, contributes)
    if found.entropy is not None and with_entropy:
        per_token, found = [found.entropy, *per_token], found._replace(entropy=found.entropy.detach())
    # Selected before the function, because its derivative may be NaN in other rows, and after it.
    values = [torch.where(contributes, one.float(), 0.0) for one in per_token]
    loss = token_hook.call(function, log_prob, values)
    loss = torch.where(contributes, token_hook.factors(log_prob, row_weight) * loss, 0.0)
    return loss, token_stats(stats, log_prob.detach(), row_weight, found)


def statistics_of(stats: Sequence[bool], with_entropy: bool) -> int:
    """Returns the statistics, of `linear_ce.statistics`, of a pass over the logits for a token loss."""
    return statistics_for(stats) | BY_ROW | (ENTROPY | D_ENTROPY) * with_entropy


def token_stats(
    stats: Sequence[bool], log_prob: Tensor | None, row_weight: Tensor, found: Losses | RowStatistics
) -> TokenStats:
    """Returns these fields of the statistics, made from what a pass over the logits found."""
    top1, wanted = None, dict(zip(TokenStats._fields, stats, strict=True))
    if wanted["is_top1"]:
        assert found.target_logit is not None
        assert found.max is not None
        top1 = row_math.is_top1(row_weight, found.target_logit, found.max)
    made = log_prob, found.entropy, found.lse, found.argmax, top1, found.mean_logit, found.sum_squared_probs
    return kept(TokenStats, made, stats)


def which_need_grad(per_token: Sequence[Tensor]) -> list[bool]:
    """Returns which of the tensors a backward pass may need a gradient of."""
    return [torch.is_grad_enabled() and one.requires_grad for one in per_token]


class TokenLossAndGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: TokenCall, *_: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.adds = AddsOnce(call.grad_into)
        found = token_loss_below_autograd(call)
        ctx.memory_budget, ctx.dtypes = call.options.memory_budget, [one.dtype for one in call.per_token]
        ctx.save_for_backward(*found.gradients, found.scales, *found.d_per_token)
        ctx.mark_non_differentiable(*(one for one in found.stats if one is not None))
        ctx.set_materialize_grads(False)  # zeros for the statistics would be allocated
        return found.loss, *found.stats

    @staticmethod
    @ops.no_double_backward
    def backward(ctx: Any, d_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        ctx.adds.check(d_loss)
        if d_loss is None:
            return None, None, None, None, *(None for _ in ctx.dtypes)
        d_input, d_weight, d_bias, scales, *d_per_token = ctx.saved_tensors
        factors = Factors(d_loss, d_loss) if scales is None else Factors(d_loss / scales[0], d_loss / scales[1])
        of_tokens = zip(d_per_token, ctx.dtypes, strict=True)
        gradients = Gradients(d_input, d_weight, d_bias)
        if any(one is not None for one in gradients):
            gradients = scaled(gradients, factors, ctx.memory_budget)
        return None, *gradients, *(None if one is None else (one * d_loss).to(dtype) for one, dtype in of_tokens)


def run_token_loss(call: TokenCall) -> TokenLossResults:
    """Runs the plan. The launches of a named loss are recorded and replayed. Any other loss may do more than launch.

    The parameters of the loss are in the recording, so calls with a parameter that changes are recorded again.
    """
    if not isinstance(call.token_loss, Named):
        return _run_plan(call)

    def run() -> tuple[Tensor | None, ...]:
        loss, found, gradients, scales, d_per_token = _run_plan(call)
        return loss, *found, *gradients, scales, *d_per_token

    kind = "token_loss", call.token_loss, call.needs_grad, *call.d_per_token, *call.stats, call.with_entropy
    loss, *rest = ops.recorded(
        kind, call.arrays, call.weights, call.options, run, others=(call.grad_into, *call.per_token)
    )
    assert loss is not None
    results = iter(rest)
    stats = TokenStats(*(next(results) for _ in TokenStats._fields))
    gradients = Gradients(*(next(results) for _ in Gradients._fields))
    return TokenLossResults(loss, stats, gradients, next(results), tuple(results))


def _run_plan(call: TokenCall) -> TokenLossResults:
    arrays, weights, options, function, per_token, needs_grad, d_per_token, stats, with_entropy, grad_into = call
    statistics = statistics_of(stats, with_entropy)
    row_weight = ops.compute_row_weights(arrays, weights, options)
    hook = TokenHook(
        function,
        per_token,
        row_weight,
        d_logits=any(needs_grad),
        d_per_token=d_per_token,
        log_prob=stats[0],
        with_entropy=with_entropy,
        kernels=options.implementation != "chunked",
    )
    gradients, scales = NOTHING_COMPUTED, None
    if any(needs_grad):
        loss, found, gradients, scales = ops.plan_a(
            arrays, options, row_weight, needs_grad, statistics=statistics, reduce=True, hook=hook, grad_into=grad_into
        )
    else:
        ones = (row_weight != 0).float()  # the weighted loss of a row is then its negative log-likelihood
        nll, found = ops.plan_b(arrays, options, ones, statistics=statistics, reduce=False, vectors=hook.bytes)
        hook.process(slice(None), nll, found.entropy if with_entropy else None)
        loss = hook.loss.sum()
    made = token_stats(stats, hook.log_prob, row_weight, found)
    return TokenLossResults(loss, made, gradients, scales, tuple(hook.d_per_token))


def _dispatched(call: TokenCall) -> list[Tensor]:
    """Calls the operator. It returns the results that are not None, or above autograd the loss and the statistics."""
    arrays, weights, options, function, per_token, needs_grad, d_per_token, stats, *_ = call
    assert isinstance(function, Named), "an operator takes named losses only"
    named = function.name, function.parameters, function.kl, function.entropy_weight
    return torch.ops.linear_ce.token_loss(
        *arrays, *weights, *options, *named, per_token, *needs_grad, d_per_token, stats
    )


def token_loss_below_autograd(call: TokenCall) -> TokenLossResults:
    """Runs `run_token_loss` as `ops.below_autograd` does. An operator takes named losses only."""
    if ops.is_eager(call.arrays) or call.grad_into is not None or not isinstance(call.token_loss, Named):
        return run_token_loss(call)
    flops.offer()
    with torch._C._AutoDispatchBelowAutograd():
        loss, *rest = _dispatched(call)
    saved = iter(rest)
    stats, gradients = grouped(TokenStats, saved, call.stats), grouped(Gradients, saved, call.needs_grad)
    scales = next(saved) if any(call.needs_grad) and call.arrays.input.dtype == torch.float16 else None
    d_per_token = tuple(next(saved) if needed else None for needed in call.d_per_token)
    return TokenLossResults(loss, stats, gradients, scales, d_per_token)
