"""What a case should give: the float64 values, the budget of each, and the judgement of a backend's outputs."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from parity.cases import Case
from parity.reference import (
    EXACT,
    Arithmetic,
    LogProbsResult,
    LossResult,
    reference_log_probs,
    reference_loss,
    unfused,
)
from parity.rounding import round_to
from parity.tolerances import budget, distance, error

STATS = ("lse", "target_logit", "z_loss", "accuracy", "n_valid")
GRADIENT_OF = {"d_input": "input", "d_weight": "linear_weight", "d_bias": "linear_bias"}


class Expected(NamedTuple):
    """The true value of one output, and the largest admitted error."""

    value: np.ndarray
    budget: float


class Judgement(NamedTuple):
    """The error of one output beside its budget."""

    error: float
    budget: float

    @property
    def percent(self) -> float:
        """The share of the budget used; above 100 is a failure."""
        return 100 * self.error / self.budget


def outputs_of(case: Case) -> tuple[str, ...]:
    """Returns the names of the outputs that a backend must give for a case."""
    if case.function == "loss":
        names = ("loss", *GRADIENT_OF, *(STATS if case.with_stats else ()))
    else:
        names = ("log_prob", "entropy", "lse", *GRADIENT_OF)
    absent = {name for name, argument in GRADIENT_OF.items() if argument in case.frozen}
    return tuple(name for name in names if name not in absent and (name != "d_bias" or case.has_bias))


def expected(case: Case, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """Returns the true outputs of a case with their budgets.

    Args:
        case: the description.
        arrays: `make_arrays(case)`.

    Returns:
        A dict with one entry for each of `outputs_of(case)`.
    """
    exact = _evaluate(case, arrays, EXACT)
    same_dtype = _evaluate(case, arrays, unfused(case.dtype, case.weight_dtype))

    def entry(name: str) -> Expected:
        want = np.asarray(getattr(exact, name), np.float64)
        unfused_error = error(np.asarray(getattr(same_dtype, name)), want)
        return Expected(want, budget(name, case.dtype, unfused_error, case.extra_roundings))

    return {name: entry(name) for name in outputs_of(case)}


def judge(case: Case, want: Mapping[str, Expected], outputs: Mapping[str, np.ndarray]) -> dict[str, Judgement]:
    """Returns the error of every output of a backend beside its budget.

    Args:
        case: the description.
        want: `expected(case, arrays)`.
        outputs: what a backend gave.

    Returns:
        A dict with one entry for each of `outputs_of(case)`.

    Raises:
        ValueError: an output is missing, not asked for, or of the wrong shape.
    """
    if set(outputs) != set(want):
        raise ValueError(f"outputs of {case.name} must be {', '.join(want)}, got {', '.join(outputs) or 'nothing'}")
    return {name: Judgement(error(outputs[name], value), limit) for name, (value, limit) in want.items()}


def judge_pair(
    want: Mapping[str, Expected], left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]
) -> dict[str, Judgement]:
    """Returns how far two backends are from each other, in the units of `error`, beside twice the budget."""
    # Both within their budget means, by the triangle inequality, within twice the budget of each other.
    return {
        name: Judgement(distance(left[name], right[name], want[name].value), 2 * want[name].budget) for name in want
    }


def evaluate_unfused(case: Case, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the outputs of the unfused computation in the case's dtype, as a backend would give them."""
    result = _evaluate(case, arrays, unfused(case.dtype, case.weight_dtype))
    return {name: np.asarray(getattr(result, name)) for name in outputs_of(case)}


def _evaluate(case: Case, arrays: Mapping[str, np.ndarray], arithmetic: Arithmetic) -> LossResult | LogProbsResult:
    arguments = dict(arrays)
    # A float32 head is used in the input's dtype: that rounding belongs to the meaning, not to the error.
    arguments["linear_weight"] = round_to(arguments["linear_weight"], case.dtype)
    function = reference_loss if case.function == "loss" else reference_log_probs
    return function(**arguments, spec=case.spec, arithmetic=arithmetic)
