"""The operators that torch.compile sees in place of the functions of `ops.py`.

An operator has the arguments of its function that have no default. Its fake implementation takes those that the shapes
of the results depend on. The autograd of a forward operator is the `torch.autograd.Function` of eager mode. Operators
are registered through `torch.library.Library`: `torch.library.custom_op` checks every result for aliasing, which takes
0.85 ms of host time for each call.
"""

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from inspect import Parameter, Signature, signature
from itertools import islice
from typing import Any, get_type_hints

import torch
from torch import Tensor

from core_triton.flops import FORMULAS
from core_triton.ops import (
    NO_SECOND_DERIVATIVE,
    Arrays,
    LogProbs,
    LossAndGradients,
    Losses,
    Options,
    RowLogProbs,
    RowLosses,
    TokenWeights,
    below_autograd,
    dispatched_log_probs,
    dispatched_loss_and_gradients,
    dispatched_losses,
    kept_losses,
    run_gradients,
    run_log_probs,
    run_loss_and_gradients,
    run_losses,
    run_row_gradients,
)
from core_triton.problem import NOTHING_COMPUTED, NOTHING_SAVED, Gradients, NeedsGrad
from core_triton.row_math import RowStatistics
from core_triton.saved_ops import (
    SavedCall,
    SavedLosses,
    SavedRowLosses,
    dispatched_saved_losses,
    fake_saved_rows,
    run_saved_gradients,
    run_saved_losses,
    saved_rows,
)
from core_triton.scaling import Factors, scale
from core_triton.token_hook import takes_entropy
from core_triton.token_losses import Named
from core_triton.token_ops import (
    TokenCall,
    TokenLossAndGradients,
    TokenLossResults,
    run_token_loss,
    token_loss_below_autograd,
    token_stats,
    which_need_grad,
)
from linear_ce.statistics import statistics_for


def _scaled_op(factors: Factors, saved: Gradients, memory_budget: int) -> Gradients:
    # torch.compile raises for a second derivative only if an argument of its backward pass requires grad. Gradients
    # that the forward pass computed do not. Outside of a backward pass the number of the graph task is -1.
    task: int = torch._C._current_graph_task_id()  # pyright: ignore[reportAttributeAccessIssue]
    if torch.is_grad_enabled() and task != -1:
        raise RuntimeError(NO_SECOND_DERIVATIVE)
    results = _scaled_fake(saved)
    scale(saved, factors, results, memory_budget)
    return results


def _loss_and_gradients_fake(
    arrays: Arrays, statistics: int, reduce: bool, needs_grad: NeedsGrad, **_: Any
) -> tuple[Losses, Gradients, Tensor | None]:
    found = _fake_losses(arrays, statistics=statistics, backward=not reduce)
    if reduce:
        found = found._replace(loss=_fake_rows(arrays).new_empty(()))
    scales = _fake_rows(arrays).new_empty(2) if arrays.input.dtype == torch.float16 else None
    return found, _gradients_fake(arrays, needs_grad), scales


def _losses_fake(arrays: Arrays, statistics: int, needs_grad: NeedsGrad, **_: Any) -> Losses:
    return _fake_losses(arrays, statistics=statistics, backward=any(needs_grad))


def _log_probs_fake(arrays: Arrays, needs_grad: NeedsGrad, **_: Any) -> LogProbs:
    log_prob, entropy, lse, row_weight = (_fake_rows(arrays) for _ in LogProbs._fields)
    return LogProbs(log_prob, entropy, lse, row_weight if any(needs_grad) else None)


def _scaled_fake(saved: Gradients, **_: Any) -> Gradients:
    return Gradients(*(None if one is None else torch.empty_like(one) for one in saved))


def _token_loss_op(
    arrays: Arrays,
    weights: TokenWeights,
    options: Options,
    function: Named,
    per_token: list[Tensor],
    needs_grad: NeedsGrad,
    d_per_token: list[bool],
    stats: list[bool],
) -> TokenLossResults:
    of_tokens = function, per_token, needs_grad, d_per_token, stats, takes_entropy(function)
    return run_token_loss(TokenCall(arrays, weights, options, *of_tokens))


def _token_loss_fake(
    arrays: Arrays, needs_grad: NeedsGrad, d_per_token: list[bool], stats: list[bool], **_: Any
) -> TokenLossResults:
    float16 = arrays.input.dtype == torch.float16 and any(needs_grad)
    found = _fake_losses(arrays, statistics=statistics_for(stats), backward=True)
    return TokenLossResults(
        _fake_rows(arrays).new_empty(()),
        token_stats(stats, _fake_rows(arrays), _fake_rows(arrays), found),
        _gradients_fake(arrays, needs_grad),
        _fake_rows(arrays).new_empty(2) if float16 else None,
        tuple(_fake_rows(arrays) if needed else None for needed in d_per_token),
    )


def _saved_losses_fake(
    arrays: Arrays, options: Options, statistics: int, needs_grad: NeedsGrad, **_: Any
) -> SavedLosses:
    found = _fake_losses(arrays, statistics=statistics, backward=True)
    return SavedLosses(found, fake_saved_rows(arrays, options, needs_grad))


def _fake_rows(arrays: Arrays) -> Tensor:
    return torch.empty_like(arrays.target, dtype=torch.float32)


def _fake_losses(arrays: Arrays, *, statistics: int, backward: bool) -> Losses:
    loss, row_weight, lse, target_logit, top, entropy, mean, squares = (_fake_rows(arrays) for _ in range(8))
    argmax = torch.empty_like(arrays.target)
    found = RowStatistics(lse, target_logit, None, top, None, entropy, argmax, mean, squares)
    return kept_losses(loss, row_weight, found, statistics=statistics, backward=backward)


def _gradients_fake(arrays: Arrays, needs_grad: NeedsGrad, **_: Any) -> Gradients:
    likes = arrays.input, arrays.linear_weight, arrays.linear_bias
    return Gradients(
        *(
            torch.empty_like(like, memory_format=torch.contiguous_format) if needed and like is not None else None
            for like, needed in zip(likes, needs_grad, strict=True)
        )
    )


def _logits_flops(arrays: Arrays, **_: Any) -> int:
    return _matmul_flops(arrays, len(arrays.target))


def _gradients_flops(arrays: Arrays, needs_grad: NeedsGrad, **_: Any) -> int:
    return _logits_flops(arrays) * (1 + needs_grad.d_input + needs_grad.d_weight)


def _saved_losses_flops(arrays: Arrays, options: Options, needs_grad: NeedsGrad, **_: Any) -> int:
    """With d_input of the rows that are saved."""
    rows = saved_rows(arrays, options, needs_grad).rows
    return _logits_flops(arrays) + needs_grad.d_input * _matmul_flops(arrays, rows)


def _saved_gradients_flops(arrays: Arrays, options: Options, needs_grad: NeedsGrad, **_: Any) -> int:
    """With the logits and d_input of the rows that are not saved."""
    rows = len(arrays.target) - saved_rows(arrays, options, needs_grad).rows
    return _matmul_flops(arrays, rows) * (1 + needs_grad.d_input) + needs_grad.d_weight * _logits_flops(arrays)


def _matmul_flops(arrays: Arrays, rows: int) -> int:
    return 2 * rows * arrays.linear_weight.numel()


def _loss_and_gradients_autograd(
    arrays: Arrays, weights: TokenWeights, options: Options, statistics: int, reduce: bool, needs_grad: NeedsGrad
) -> tuple[Losses, Gradients, Tensor | None]:
    call = arrays, weights, options, statistics, reduce, needs_grad
    if any(arrays.needs_grad()):
        results: Any = LossAndGradients.apply((*call, None), *arrays.differentiated())
        return Losses(*results), NOTHING_COMPUTED, None  # autograd has saved the gradients
    return below_autograd(run_loss_and_gradients, dispatched_loss_and_gradients, *call)


def _losses_autograd(
    arrays: Arrays, weights: TokenWeights, options: Options, statistics: int, needs_grad: NeedsGrad
) -> Losses:
    call = arrays, weights, options, statistics, needs_grad
    if any(arrays.needs_grad()):
        results: Any = RowLosses.apply((*call, None), *arrays.differentiated())
        return Losses(*results)
    return below_autograd(run_losses, dispatched_losses, *call)


def _log_probs_autograd(arrays: Arrays, options: Options, needs_grad: NeedsGrad) -> LogProbs:
    call = arrays, options, needs_grad
    if any(arrays.needs_grad()):
        results: Any = RowLogProbs.apply((*call, None), *arrays.differentiated())
        return LogProbs(*results)
    return below_autograd(run_log_probs, dispatched_log_probs, *call)


def _saved_losses_autograd(
    arrays: Arrays, weights: TokenWeights, options: Options, statistics: int, needs_grad: NeedsGrad
) -> SavedLosses:
    call = SavedCall(arrays, weights, options, statistics, needs_grad)
    if any(arrays.needs_grad()):
        results: Any = SavedRowLosses.apply(call, *arrays.differentiated())
        return SavedLosses(Losses(*results), NOTHING_SAVED)  # autograd has saved them
    return below_autograd(run_saved_losses, dispatched_saved_losses, *call)


def _token_loss_autograd(
    arrays: Arrays,
    weights: TokenWeights,
    options: Options,
    function: Named,
    per_token: list[Tensor],
    needs_grad: NeedsGrad,
    d_per_token: list[bool],
    stats: list[bool],
) -> tuple[Any, ...]:
    of_tokens = function, per_token, needs_grad, d_per_token, stats, takes_entropy(function)
    call = TokenCall(arrays, weights, options, *of_tokens)
    if any(arrays.needs_grad()) or any(which_need_grad(per_token)):
        results: Any = TokenLossAndGradients.apply(call, *arrays.differentiated(), *per_token)
        return results
    return token_loss_below_autograd(call)


def _flattened(function: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `made` in the form of an operator with those arguments of `function` that have no default. `made` takes
    them by name. The schema of an operator supports neither NamedTuples and dataclasses nor optional results, so the
    operator takes the fields of each group as separate arguments and returns a list of tensors."""
    kinds = _kinds(function)
    fields: dict[str, Any] = {}
    for name, kind in kinds.items():
        fields |= get_type_hints(kind) if _is_group(kind) else {name: kind}
    named = _grouping(kinds)

    def operator(*arguments: Any) -> list[Tensor]:
        return _tensors(made(**named(arguments)))

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind) for name, kind in fields.items()]
    operator.__signature__ = Signature(parameters, return_annotation=list[Tensor])  # pyright: ignore[reportFunctionMemberAccess]
    return operator


def _kinds(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the types of the arguments of a function that have no default."""
    hints, given = get_type_hints(function), signature(function).parameters
    return {name: hints[name] for name, one in given.items() if one.default is Parameter.empty}


def _grouping(kinds: dict[str, Any]) -> Callable[[Iterable[Any]], dict[str, Any]]:
    """Returns a function from the arguments of an operator to those of its function, by name."""
    groups = [(name, kind, len(get_type_hints(kind)) if _is_group(kind) else 0) for name, kind in kinds.items()]

    def named(arguments: Iterable[Any]) -> dict[str, Any]:
        flat = iter(arguments)
        return {name: _group(make, islice(flat, size)) if size else next(flat) for name, make, size in groups}

    return named


def _group(make: Callable[..., Any], fields: Iterable[Any]) -> Any:
    """Returns a group of these fields. An operator gets lists, and the keys of recorded calls need what is hashable."""
    return make(*[tuple(field) if isinstance(field, list) else field for field in fields])


def _is_group(kind: Any) -> bool:
    return hasattr(kind, "_fields") or is_dataclass(kind)


def _tensors(results: Any) -> list[Tensor]:
    """Returns the tensors of a tuple of results and of groups of them."""
    found = []
    for result in results:
        if isinstance(result, tuple):
            found += _tensors(result)
        elif result is not None:
            found.append(result)
    return found


def _register(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> None:
    operator = IMPLEMENTATIONS[f"linear_ce::{name}"] = _flattened(function, function)
    schema = torch.library.infer_schema(operator, mutates_args=())
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"linear_ce::{name}", _flattened(function, fake), lib=_library)
    if autograd is not None:
        _library.impl(name, _flattened(function, autograd), "Autograd")
    if flops is not None:
        named, count = _grouping(_kinds(function)), flops
        FORMULAS[name] = lambda *arguments, out_val: count(**named(arguments))


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}  # of the operators, by their names

_library = torch.library.Library("linear_ce", "DEF")
_register(
    "loss_and_gradients",
    run_loss_and_gradients,
    _loss_and_gradients_fake,
    _loss_and_gradients_autograd,
    flops=_gradients_flops,
)
_register("losses", run_losses, _losses_fake, _losses_autograd, flops=_logits_flops)
_register("log_probs", run_log_probs, _log_probs_fake, _log_probs_autograd, flops=_logits_flops)
_register("gradients", run_gradients, _gradients_fake, flops=_gradients_flops)
_register("row_gradients", run_row_gradients, _gradients_fake, flops=_gradients_flops)
_register("token_loss", _token_loss_op, _token_loss_fake, _token_loss_autograd, flops=_gradients_flops)
_register("saved_losses", run_saved_losses, _saved_losses_fake, _saved_losses_autograd, flops=_saved_losses_flops)
_register("saved_gradients", run_saved_gradients, _gradients_fake, flops=_saved_gradients_flops)
_register("scaled", _scaled_op, _scaled_fake)
