"""Runs a case on a backend and asserts that every output is within its error budget."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from parity.arrays import make_arrays
from parity.backends import run_case
from parity.cases import Case
from parity.expected import Expected, compare, expected
from parity.tolerances import error


@cache
def expected_of(case: Case) -> dict[str, Expected]:
    """Returns the true outputs of a case with their budgets. Several tests compare with those of one case."""
    return expected(case, make_arrays(case))


def check(backend: str, case: Case) -> None:
    """Fails if an output of `backend` exceeds its budget."""
    assert_all_within(case, expected_of(case), run_case(backend, case, make_arrays(case)).outputs)


def assert_within_budget(
    case: Case, arrays: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], *, floor: float = 0.0
) -> None:
    """Fails if an error exceeds its budget and `floor`, with the percentage of its budget that each output used."""
    assert_all_within(case, expected(case, arrays), outputs, floor=floor)


def assert_all_within(
    case: Case, want: Mapping[str, Expected], outputs: Mapping[str, np.ndarray], *, floor: float = 0.0
) -> None:
    comparisons = compare(case, want, outputs)
    used = ", ".join(f"{name} {comparison.percent:.0f}%" for name, comparison in comparisons.items())
    within = (comparison.percent <= 100 or comparison.error <= floor for comparison in comparisons.values())
    assert all(within), f"{case.name} used of its budget: {used}"


def check_many_logits(backend: str) -> None:
    """Runs more than 2**31 logits. Checks only rows at both ends, because all float64 logits would take 17 GB."""
    case = Case(name="N*V", lead=(2**16,), hidden=1, vocab=2**15 + 3)
    arrays = make_arrays(case)
    outputs = run_case(backend, case, arrays).outputs
    x, w, y = arrays["input"].astype(np.float64), arrays["linear_weight"].astype(np.float64), arrays["target"]
    for rows in (slice(0, 16), slice(2**16 - 16, 2**16)):
        logits = x[rows] @ w.T
        lse = np.log(np.exp(logits).sum(1))
        assert error(outputs["lse"][rows], lse) < 1e-5
        d_logits = np.exp(logits - lse[:, None])
        d_logits[np.arange(16), y[rows]] -= 1
        assert error(outputs["d_input"][rows], d_logits @ w / case.n) < 1e-5


def least_budget(call: Callable[[int], Any]) -> int:
    """Returns the smallest memory budget of a call, from the error message for a budget of one byte."""
    with pytest.raises(ValueError, match=r"memory_budget must be at least \d+ bytes") as refusal:
        call(1)
    named = re.search(r"at least (\d+) bytes", str(refusal.value))
    assert named is not None
    return int(named[1])
