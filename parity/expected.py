"""The float64 values and error budgets of a case, and the comparison of a backend's outputs with them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from linear_ce.reference import (
    EXACT,
    Arithmetic,
    LogProbsResult,
    LossResult,
    TokenLossResult,
    ValueAndDerivatives,
    reference_log_probs,
    reference_loss,
    reference_token_loss,
    unfused,
)
from linear_ce.rounding import round_to, split_head
from linear_ce.statistics import TOKEN_STATS
from parity.cases import Case
from parity.token_losses import FORMS, conditions
from parity.tolerances import ROW_NAMES, ZERO_NORM, RowErrors, budget, distance, error, row_errors

STATS = ("lse", "target_logit", "z_loss", "accuracy", "n_valid")
GRADIENT_OF = {
    "d_input": "input",
    "d_weight": "linear_weight",
    "d_bias": "linear_bias",
    **{f"d_{name}": name for name in ("advantage", "old_log_prob", "ref_log_prob")},  # of token losses
}

Result = LossResult | LogProbsResult | TokenLossResult


class Expected(NamedTuple):
    """The true value of one output, and the largest admitted error."""

    value: np.ndarray
    budget: float
    row_budgets: RowErrors | None = None  # of the errors of its rows, where the case checks them


class Comparison(NamedTuple):
    """The error of one output and its budget."""

    error: float
    budget: float

    @property
    def percent(self) -> float:
        """The share of the budget used; above 100 is a failure."""
        return 100 * self.error / self.budget


def outputs_of(case: Case) -> tuple[str, ...]:
    """Returns the names of the outputs that a backend must give for a case."""
    forward = ("log_prob", "entropy", "lse") if case.function == "log_probs" else ("loss",)
    statistics = STATS if case.function == "loss" and case.with_stats else TOKEN_STATS if case.token_stats else ()
    arguments = {"input", "linear_weight", *(["linear_bias"] if case.has_bias else []), *case.per_token}
    gradients = (name for name, argument in GRADIENT_OF.items() if argument in arguments - {*case.frozen})
    return (*forward, *gradients, *statistics)


def dtype_of(case: Case, output: str) -> str:
    """Returns the dtype that a floating-point output must have."""
    head = "float32" if case.grad_into else case.weight_dtype
    dtypes = {"is_top1": "bool", "d_input": case.dtype, "d_weight": head, "d_bias": case.weight_dtype}
    return dtypes.get(output, case.per_token_dtype if output in GRADIENT_OF else "float32")


def expected(case: Case, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """Returns the true outputs of a case with their budgets.

    Args:
        case: the description.
        arrays: `make_arrays(case)`.

    Returns:
        A dict with one entry for each of `outputs_of(case)`.
    """
    exact = _evaluate(case, arrays, EXACT)
    same_dtype = _unfused_gradients(case, arrays)
    condition_of = _conditions(case, arrays, exact)

    def entry(name: str) -> Expected:
        want = np.asarray(_named(case, exact)[name], np.float64)
        unfused_error = max(error(np.asarray(outputs[name]), want) for outputs in same_dtype)
        extra = case.extra_roundings if name in ("d_weight", "d_bias") else 0
        dtype = case.per_token_dtype if GRADIENT_OF.get(name) in case.per_token else case.dtype
        limit = budget(name, dtype, unfused_error, extra, condition_of.get(name, 1.0))
        if not case.checks_rows or name not in ROW_NAMES:
            return Expected(want, limit)
        of_rows = [row_errors(np.asarray(outputs[name]), want) for outputs in same_dtype]
        largest = (max(figures) for figures in zip(*of_rows, strict=True))
        return Expected(want, limit, RowErrors(*(budget(name, case.dtype, figure, extra) for figure in largest)))

    return {name: entry(name) for name in outputs_of(case)}


def _unfused_gradients(case: Case, arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Returns the outputs of the unfused computation: with d_loss applied ahead of d_logits' rounding, and after it.

    A scalar loss may store its gradients in the forward pass and multiply them by d_loss in the backward pass. Unless
    d_loss is a power of two, d_logits then lie elsewhere between two powers of two, and the gradient is rounded twice.
    Neither is the better computation, but where most rows share one d_logits, as -1/N at the target, either may round
    by luck with next to no error.
    """
    outputs = [evaluate_unfused(case, arrays)]
    factor, exponent = np.frexp(arrays.get("d_loss", np.ones(1)))
    if factor.ndim == 0 and factor != 0.5:
        after = evaluate_unfused(case, {**arrays, "d_loss": np.ldexp(np.float32(1), exponent)})
        outputs.append(
            {
                n: round_to(factor * value, dtype_of(case, n)) if n in GRADIENT_OF else value
                for n, value in after.items()
            }
        )
    return outputs


def _conditions(case: Case, arrays: Mapping[str, np.ndarray], exact: Result) -> dict[str, float]:
    """Returns the condition numbers of outputs by name: `tolerances.budget`. Token weights of both signs let the terms
    of a scalar cancel."""
    if isinstance(exact, TokenLossResult):
        rows = replace(case, spec=replace(case.spec, reduction="none"))

        def evaluate(token_loss: ValueAndDerivatives) -> TokenLossResult:
            result = _evaluate(rows, arrays, EXACT, token_loss)
            assert isinstance(result, TokenLossResult)
            return result

        found = conditions(FORMS[case.token_loss], evaluate)
        of_tokens = dict(zip((f"d_{name}" for name in case.per_token), found.d_per_token, strict=True))
        sizes = (np.linalg.norm(one[np.isfinite(one)]) for one in (exact.stats.mean_abs_logit, exact.stats.mean_logit))
        mean_logit = next(sizes) / max(next(sizes), ZERO_NORM)
        return of_tokens | {"loss": found.rows if exact.loss.ndim else found.total, "mean_logit": max(1.0, mean_logit)}
    if not isinstance(exact, LossResult) or exact.loss.ndim or "token_weight" not in arrays:
        return {}
    terms = _evaluate(case, {**arrays, "token_weight": np.abs(arrays["token_weight"])}, EXACT)
    assert isinstance(terms, LossResult)
    sums = {"loss": (terms.loss, exact.loss), "z_loss": (terms.z_loss, exact.z_loss)}
    return {name: float(size / abs(total)) for name, (size, total) in sums.items() if abs(total) > ZERO_NORM}


def compare(case: Case, want: Mapping[str, Expected], outputs: Mapping[str, np.ndarray]) -> dict[str, Comparison]:
    """Returns the error of every output of a backend, with its budget.

    Args:
        case: the description.
        want: `expected(case, arrays)`.
        outputs: what a backend gave.

    Returns:
        A dict with one entry for each of `outputs_of(case)`. Where the case checks rows, also d_weight_class_median,
        d_weight_class_p95, d_input_row_median and d_input_row_p95: the figures of `tolerances.row_errors`.

    Raises:
        ValueError: an output is missing, unexpected, or of the wrong shape.
    """
    if set(outputs) != set(want):
        raise ValueError(f"outputs of {case.name} must be {', '.join(want)}, got {', '.join(outputs) or 'nothing'}")
    comparisons = {name: Comparison(error(outputs[name], one.value), one.budget) for name, one in want.items()}
    for name, one in want.items():
        if one.row_budgets is not None:
            figures = row_errors(outputs[name], one.value)._asdict()
            for figure, limit in one.row_budgets._asdict().items():
                comparisons[f"{ROW_NAMES[name]}_{figure}"] = Comparison(figures[figure], limit)
    return comparisons


def compare_pair(
    want: Mapping[str, Expected], left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]
) -> dict[str, Comparison]:
    """Returns how far two backends are from each other, in the units of `error`, with twice the budget.

    Figures of rows are left out: medians and percentiles have no triangle inequality.
    """
    # Both within their budget means, by the triangle inequality, within twice the budget of each other.
    return {
        name: Comparison(distance(left[name], right[name], want[name].value), 2 * want[name].budget) for name in want
    }


def evaluate_unfused(case: Case, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the outputs of the unfused computation in the case's dtype, as a backend would give them."""
    found = _named(case, _evaluate(case, arrays, unfused(case.dtype, case.weight_dtype)))
    if case.grad_into:
        found["d_weight"] = _named(case, _evaluate(case, arrays, unfused(case.dtype, "float32")))["d_weight"]
    for name in case.per_token:
        found[f"d_{name}"] = round_to(found[f"d_{name}"], case.per_token_dtype)
    return {name: found[name] for name in outputs_of(case)}


def _named(case: Case, result: Result) -> dict[str, np.ndarray]:
    """Returns the outputs by name."""
    found = {n: np.asarray(value) for n, value in result._asdict().items() if n not in ("d_per_token", "stats")}
    if isinstance(result, TokenLossResult):
        found |= result.stats._asdict()
        found |= {f"d_{name}": value for name, value in zip(case.per_token, result.d_per_token, strict=True)}
    return found


def _evaluate(
    case: Case, arrays: Mapping[str, np.ndarray], arithmetic: Arithmetic, token_loss: ValueAndDerivatives | None = None
) -> Result:
    arguments: dict[str, Any] = {**arrays, "spec": case.spec, "arithmetic": arithmetic}
    # A float32 head is used in the input's dtype: that rounding belongs to the meaning, not to the error.
    arguments["linear_weight"] = (split_head if case.spec.splits_head else round_to)(
        arguments["linear_weight"], case.dtype
    )
    if case.function == "token_loss":
        arguments["token_loss"] = token_loss or FORMS[case.token_loss]
        arguments["with_entropy"] = FORMS[case.token_loss].with_entropy
        named = [arguments.pop(name) for name in ("input", "linear_weight", "target", "token_loss", *case.per_token)]
        return reference_token_loss(*named, **arguments)
    function = reference_loss if case.function == "loss" else reference_log_probs
    return function(**arguments)
