"""Runs a case of the contract on a backend and holds every output to its budget."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from parity.arrays import make_arrays
from parity.backends import run_case
from parity.cases import Case
from parity.expected import expected, judge


def check(backend: str, case: Case) -> None:
    """Fails if an output of `backend` is over its budget."""
    arrays = make_arrays(case)
    assert_within_budget(case, arrays, run_case(backend, case, arrays).outputs)


def assert_within_budget(
    case: Case, arrays: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], *, floor: float = 0.0
) -> None:
    """Fails with the percentage of its budget that each output used, if one used more than all and exceeds `floor`."""
    judgements = judge(case, expected(case, arrays), outputs)
    used = ", ".join(f"{name} {judgement.percent:.0f}%" for name, judgement in judgements.items())
    within = (judgement.percent <= 100 or judgement.error <= floor for judgement in judgements.values())
    assert all(within), f"{case.name} used of its budget: {used}"


def least_budget(call: Callable[[int], Any]) -> int:
    """Returns the least memory budget of a call, as the refusal of a budget of one byte names it."""
    with pytest.raises(ValueError, match=r"memory_budget must be at least \d+ bytes") as refusal:
        call(1)
    named = re.search(r"at least (\d+) bytes", str(refusal.value))
    assert named is not None
    return int(named[1])
