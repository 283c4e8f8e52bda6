"""Tests of core_triton on an NVIDIA GPU that take long to compile: the operators under torch.library.opcheck, a model
with the loss in torch.compile, and two runs that are bitwise equal.

Run with `pytest -m gpu`. As a program, this file runs the checks that its arguments name. The tests run several such
programs in parallel.
"""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Command, Printed, each, python, run_checks
from torch import Tensor
from torch_gpu import DEVICE, DTYPES, assert_close, assert_same, gpu_problem, model_and_tokens, model_results, results
from torch_problem import FUNCTIONS

from core_triton.groups import Options
from linear_ce.statistics import LSE, MAX

pytestmark = pytest.mark.gpu


def two_runs_are_bitwise_equal(function: str, dtype: torch.dtype) -> None:
    arrays = gpu_problem(1500, 256, 5003, dtype=dtype, bias=True)
    arrays["target"][::3] = 7  # many rows add to the same row of d_weight
    first = results(function, arrays, memory_budget=2**23)
    for _ in range(3):
        assert_same(results(function, arrays, memory_budget=2**23), first)


def a_model_around_the_loss_compiles_whole(dtype: torch.dtype) -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # from imports of PyTorch's compiler
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores.*available but not enabled", UserWarning)
    torch.compiler.reset()
    model, *batch = model_and_tokens(dtype=dtype)
    want = model_results(model, *batch)
    compiled: Any = torch.compile(model, fullgraph=True)
    # The compiled body rounds to bfloat16 in different places.
    assert_close(model_results(compiled, *batch), want, 1e-4 if dtype == torch.float32 else 3e-2)


def opcheck(dtype: torch.dtype, smoothing: float, softcap: float | None, bias: bool) -> None:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    arrays = gpu_problem(12, 8, 50, dtype=dtype, bias=bias)
    arguments: tuple[Any, ...] = (
        arrays["input"],
        arrays["linear_weight"],
        arrays.get("linear_bias"),
        arrays["target"].clamp(max=44),
        torch.linspace(0.5, 2.0, 45, device=DEVICE) if smoothing else None,
    )
    weights = torch.linspace(0.0, 1.0, 12, device=DEVICE), torch.tensor(7.5, device=DEVICE) if bias else None
    settings = Options(
        bias, -100, smoothing, 0.01, softcap, 0.5, 45, 2**20, "triton", splits_head=False, saved_budget=0
    )
    close: dict[str, Any] = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for needs_grad in ((True, True, bias), (False, True, False), (True, False, False)):
        for statistics in (LSE | MAX, 0):
            torch.library.opcheck(
                torch.ops.linear_ce.loss_and_gradients.default,
                (*arguments, *weights, *settings, statistics, True, *needs_grad),
                **close,
            )
    torch.library.opcheck(
        torch.ops.linear_ce.loss_and_gradients.default,
        (*arguments, *weights, *settings, LSE | MAX, False, True, False, False),
        **close,
    )
    for statistics in (LSE | MAX, 0):
        torch.library.opcheck(
            torch.ops.linear_ce.losses.default, (*arguments, *weights, *settings, statistics, True, True, bias), **close
        )
    torch.library.opcheck(torch.ops.linear_ce.log_probs.default, (*arguments, *settings, True, True, bias), **close)
    rows = torch.linspace(-1.0, 1.0, 12, device=DEVICE)
    plain = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
    sigma = rows if smoothing else None
    recomputed = (*plain, *settings, weights[0], rows + 5.0, rows, rows, None, sigma, True, True, bias)
    torch.library.opcheck(torch.ops.linear_ce.gradients.default, recomputed, **close)
    of_rows = (*plain, *settings, rows, rows + 5.0, True, True, bias)
    torch.library.opcheck(torch.ops.linear_ce.row_gradients.default, of_rows, **close)


# A process runs several checks of the same kind.


OPTIONS = ((0.0, None, True), (0.1, 4.0, False))  # smoothing, softcap, bias
OPERATORS = ([(opcheck, dtype, *options) for options in OPTIONS] for dtype in DTYPES)
REPEATED = [(two_runs_are_bitwise_equal, *which) for which in product(FUNCTIONS, DTYPES)]
COMPILED = [(a_model_around_the_loss_compiles_whole, dtype) for dtype in DTYPES[:2]]
CHECKS: dict[str, Callable[[], None]] = {}
CHECK_COMMANDS: dict[str, Command] = {}


def strictly(check: Callable[..., None], *arguments: Any) -> None:
    """Runs a check with warnings as errors, like pytest."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(*arguments)


for group in (*OPERATORS, REPEATED, COMPILED):
    calls = {" ".join([call[0].__name__, *map(str, call[1:])]): partial(strictly, *call) for call in group}
    CHECKS |= calls
    CHECK_COMMANDS |= dict.fromkeys(calls, python(Path(__file__).name, *calls))


@pytest.mark.parametrize("name", each(CHECK_COMMANDS, seconds=60))
def test_check(name: str, printed: Printed) -> None:
    assert not printed[name]["failure"], printed[name]["failure"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [False, True])
def test_opcheck_of_the_scaling(dtype: torch.dtype, rows: bool) -> None:
    gradient = torch.linspace(-1.0, 1.0, 96, device=DEVICE).reshape(12, 8).to(dtype)
    factor = torch.linspace(0.0, 3.0, 12, device=DEVICE)[:, None] if rows else torch.tensor(2.0, device=DEVICE)
    head = torch.linspace(-1.0, 1.0, 80, device=DEVICE).reshape(10, 8).to(dtype)
    given = (factor, torch.tensor(0.5, device=DEVICE), gradient, head, None, 100)
    torch.library.opcheck(torch.ops.linear_ce.scaled.default, given)


if __name__ == "__main__":
    import torch._inductor.compile_fx  # imported here, because its imports may warn

    run_checks(CHECKS, sys.argv[1:])
