"""A memory_budget that is too small: the error names the least budget with which all passes of a call run, and
`explain` names the same. test_core_triton_memory.py measures the memory.

The calls run on a GPU that is not present, until all their passes are planned.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from assertions import least_budget
from torch_problem import problem, total

import core_triton
from benchmarks.launch_recorder import fake_gpu
from core_triton import explain, ops, saved_ops, token_ops
from core_triton.groups import Arrays, Options, TokenWeights
from core_triton.problem import NeedsGrad
from linear_ce.chunking import BudgetTooSmallError
from linear_ce.statistics import NO_STATS, TOKEN_STATS

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
ALL, PART = 2**24, 2**20  # bytes that save all rows, or 512 rows or more of 2000
EVERY_STAT = (True,) * len(TOKEN_STATS)
WITH_GRADIENTS = NeedsGrad(True, True, False)

Call = Callable[[int], None]


class PlannedError(Exception):
    """All passes of a call are planned, and the first would run."""


def arrays_of(n: int, d: int, v: int, dtype: torch.dtype) -> Arrays:
    x, w = (torch.empty(rows, d, dtype=dtype, device="cuda") for rows in (n, v))
    return Arrays(x, w, None, torch.empty(n, dtype=torch.int64, device="cuda"), None)


def call_of(function: str, arrays: Arrays, implementation: str = "triton") -> Call:
    """Returns a call with a memory budget. It ends where all passes are planned."""
    weights, classes = TokenWeights(None, None), len(arrays.linear_weight)
    saved = {"saved": ALL, "saved_part": PART, "saved_log_probs": ALL}.get(function, 0)

    def call(budget: int) -> None:
        options = Options(
            False, -100, 0.0, 0.0, None, 1.0, classes, budget, implementation, False, saved, batch_invariant=False
        )
        statistics = {
            "token_stats": token_ops.statistics_of(EVERY_STAT, False),
            "entropy": token_ops.statistics_of(NO_STATS, True),
            "saved_log_probs": ops.OF_LOG_PROBS,
        }.get(function, 0)
        planned = mock.patch.object(ops, "library_settings", side_effect=PlannedError)
        with planned, mock.patch.object(saved_ops, "library_settings", side_effect=PlannedError):
            if function == "log_probs":
                ops.run_log_probs(arrays, options, WITH_GRADIENTS)
            elif saved:
                saved_ops.run_saved_losses(arrays, weights, options, statistics, WITH_GRADIENTS)
            else:
                ops.run_losses(arrays, weights, options, statistics, WITH_GRADIENTS)

    return call


CASES: list[tuple[str, tuple[int, int, int], torch.dtype]] = [
    ("log_probs", (130, 8, 300), BFLOAT16),
    ("log_probs", (130, 8, 300), FLOAT32),
    ("none", (40, 64, 300), BFLOAT16),
    ("token_stats", (40, 64, 300), BFLOAT16),
    ("token_stats", (700, 64, 300), FLOAT32),
    ("entropy", (130, 8, 300), BFLOAT16),
    ("saved", (40, 64, 300), BFLOAT16),
    ("saved", (40, 64, 300), FLOAT32),
    ("saved_part", (2000, 64, 300), torch.float16),
    ("saved_part", (2000, 64, 300), FLOAT32),
    ("saved_log_probs", (40, 64, 300), BFLOAT16),
]


@pytest.mark.parametrize(("function", "shape", "dtype"), CASES)
def test_the_error_names_a_budget_that_all_passes_accept(
    function: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    with fake_gpu(80):
        call = call_of(function, arrays_of(*shape, dtype))
        least = least_budget(call)
        with pytest.raises(PlannedError):
            call(least)
        with pytest.raises(BudgetTooSmallError, match=f"at least {least} bytes"):
            call(least - 1)


# What `explain` is asked for each function. It knows no statistics.
ASKED: dict[str, dict[str, Any]] = {
    "none": {},
    "log_probs": {"with_entropy": True},
    "entropy": {"with_entropy": True},
    "saved": {"saved_budget": ALL},
    "saved_part": {"saved_budget": PART},
}


@pytest.mark.parametrize(("function", "shape", "dtype"), [case for case in CASES if case[0] in ASKED])
@pytest.mark.parametrize("implementation", ["triton", "chunked"])
def test_explain_names_the_budget_of_the_call(
    function: str, shape: tuple[int, int, int], dtype: torch.dtype, implementation: str
) -> None:
    with fake_gpu(80):
        least = least_budget(call_of(function, arrays_of(*shape, dtype), implementation))
    x, w = (torch.empty(rows, shape[1], dtype=dtype, device="meta") for rows in (shape[0], shape[2]))
    options: dict[str, Any] = {**ASKED[function], "reduction": "none", "implementation": implementation}
    assert least_budget(lambda budget: explain(x, w, memory_budget=budget, device="a100", **options)) == least
    explained = explain(x, w, memory_budget=least, device="a100", **options)
    assert explained.plan.memory_budget == least
    if function in ("saved", "saved_part"):
        assert (explained.plan.others is not None) == (function == "saved_part")


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_no_budget_is_needed_for_a_pass_that_cannot_run(dtype: torch.dtype) -> None:
    """Where all rows are saved, nothing computes their logits again, unless a gradient of the entropy arrives."""
    planned: list[str] = []
    with fake_gpu(80), mock.patch.object(ops, "plan_for", wraps=ops.plan_for) as plan_for:
        arrays = arrays_of(700, 64, 300, dtype)
        for function in ("saved", "saved_log_probs", "saved_part"):
            plan_for.reset_mock()
            with pytest.raises(PlannedError):
                call_of(function, arrays_of(2000, 64, 300, dtype) if function == "saved_part" else arrays)(2**29)
            planned.append(" ".join(sorted({call.args[1] for call in plan_for.call_args_list} - {"gradients"})))
            of_all = [call for call in plan_for.call_args_list if call.kwargs.get("entropy")]
            assert len(of_all) == (function == "saved_log_probs")
    assert planned == ["saved_rows", "saved_rows", "losses row_gradients saved_rows"]


@pytest.mark.parametrize("frozen", ["", "input", "linear_weight"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, torch.float16])
@pytest.mark.parametrize("function", ["none", "log_probs"])
def test_the_backward_pass_of_saved_rows_needs_no_more(function: str, dtype: torch.dtype, frozen: str) -> None:
    arrays = problem(40, 64, 300, dtype=dtype, bias=False)
    if frozen:
        arrays[frozen] = arrays[frozen].detach()
    least = least_budget(lambda budget: total(function, arrays, memory_budget=budget, saved_budget=ALL))
    total(function, arrays, memory_budget=least, saved_budget=ALL).backward()
    if function == "log_probs":  # without a gradient of the entropy, the saved rows are used
        core_triton.linear_log_probs(**arrays, memory_budget=least, saved_budget=ALL).log_prob.sum().backward()
