"""Tests batch_invariant of core_triton without a GPU: what decides the bits of a row does not depend on the others.

test_core_triton_interpreted.py compares results of the kernels, and test_core_triton_gpu_batch_invariant.py on a GPU.
test_jax_pallas_batch_invariant.py tests the same of jax_pallas.
"""

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import core_triton
from benchmarks.launch_recorder import Launch, launches_of
from core_triton import explain, linear_cross_entropy, linear_log_probs, ops, token_losses
from core_triton.groups import Arrays, Options, TokenWeights
from core_triton.plan import ExecutionPlan
from core_triton.problem import NeedsGrad
from core_triton.row_math import Coefficients
from core_triton.token_ops import TokenCall, run_token_loss
from linear_ce.statistics import check_stats

GPUS = ("a100", "h100", "h200", "l40s", "rtx4090", "rtx5090")
TOKENS = (1, 2, 15, 16, 17, 127, 128, 129, 1000, 4999, 8192, 100_003)


def arrays(n: int, d: int, v: int, head: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    x = torch.empty((n, d), dtype=torch.bfloat16, device="meta")
    return x, torch.empty((v, d), dtype=head, device="meta")


def order_of_sums(plan: ExecutionPlan, classes: int) -> tuple[Any, ...]:
    """Returns what decides the order of the sums of a row: of its exponentials, and of d_input."""
    config = plan.scaled_exp_config
    assert plan.tile is not None
    blocks = {
        (start + first, min(start + config.head_rows, classes, start + first + plan.class_block))
        for start in range(0, classes, config.head_rows)
        for first in range(0, min(config.head_rows, classes - start), plan.class_block)
    }
    d_input = plan.d_input_tiling, config.d_input_rows, config.splits_tiles
    computes = any(name.startswith("d_input") for name in plan.matmuls)
    kernels = plan.path, plan.hopper, plan.pointers, plan.arch, plan.tile.block_n, plan.tile.block_d, plan.ampere_tile
    return *kernels, tuple(sorted(blocks)), d_input if computes else None


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "none"}, {"gradients": False}, {"gradients": False, "head": torch.float32}],
    ids=["sum", "none", "forward", "float32 head"],
)
def test_the_order_of_sums_depends_on_neither_the_rows_nor_the_budget(gpu: str, options: dict[str, Any]) -> None:
    options = dict(options)
    head = options.pop("head", torch.bfloat16)

    def orders(d: int, v: int, tokens: Iterable[int], budgets: Iterable[int]) -> set[tuple[Any, ...]]:
        found = set()
        for n, budget in itertools.product(tokens, budgets):
            call = partial(explain, *arrays(n, d, v, head), batch_invariant=True, device=gpu, **options)
            try:
                found.add(order_of_sums(call(memory_budget=budget).plan, v))
            except ValueError as error:
                if "memory_budget must be at least" not in str(error):  # the budget holds no chunk
                    raise
        return found

    assert len(orders(896, 151_936, TOKENS, (4 * 10**7, 2**26, 2**29, 2**33))) == 1
    assert (
        len(orders(64, 1001, TOKENS, (4 * 10**5, 2**26)) | orders(64, 1001, (1, 16), range(10**4, 15 * 10**4, 5000)))
        == 1
    )


EVERYTHING = True, True, False
DECISIVE = ("exponentials_kernel", "repair_kernel", "finish_rows_kernel", "d_input_kernel")


def specialized(launch: Launch) -> tuple[Any, ...]:
    """Returns what a kernel is compiled for, but for the alignment of arrays that decides no order of a sum."""
    numbers = tuple(name for name in launch.divisible if name == "sum_ptr" or not name.endswith("_ptr"))
    return launch.kernel.__module__, launch.signature, launch.constexprs, numbers, launch.options


def launched_by(function: str, arch: int, n: int) -> list[Launch]:
    """Returns the launches of a call with n rows, forward and backward pass."""

    def call() -> None:
        x, w = (torch.empty(size, 64, dtype=torch.bfloat16, device="cuda") for size in (n, 1001))
        target, row = torch.empty(n, dtype=torch.int64, device="cuda"), torch.empty(n, device="cuda")
        arrays, weights, needs_grad = Arrays(x, w, None, target, None), TokenWeights(None, None), NeedsGrad(*EVERYTHING)
        options = Options(False, -100, 0.0, 0.0, 30.0, 1.0, 1001, 600_000, "triton", False, 0, batch_invariant=True)
        if function == "token_loss":
            stats = check_stats(("log_prob", "lse"))
            run_token_loss(
                TokenCall(arrays, weights, options, token_losses.reinforce(), [row], needs_grad, [False], stats, False)
            )
        else:
            ops.run_log_probs(arrays, options, needs_grad)
            ops.run_row_gradients(arrays, options, row, row, needs_grad)

    return launches_of(arch, call)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("function", ["token_loss", "log_probs"])
def test_the_same_machine_code_runs_for_any_number_of_rows(function: str, arch: int) -> None:
    found: dict[str, set[tuple[Any, ...]]] = {}
    for n in (1, 16, 17, 300, 512):
        launched = launched_by(function, arch, n)
        names = {launch.kernel.__name__ for launch in launched}
        assert {*DECISIVE} <= names
        assert "d_input_sum_kernel" not in names
        for launch in launched:
            switches = dict(launch.constexprs)
            assert switches.get("BY_ROW") in (None, True)
            if (name := launch.kernel.__name__) in DECISIVE:
                found.setdefault(name, set()).add(specialized(launch))
    passes = 1 if function == "token_loss" else 2
    assert {name: len(kinds) for name, kinds in found.items()} == {
        "exponentials_kernel": passes,
        "repair_kernel": passes,
        "finish_rows_kernel": 2,  # with gradients, and without
        "d_input_kernel": 1,
    }


def test_explain_says_what_it_costs() -> None:
    text = str(explain(*arrays(300, 896, 151_936), batch_invariant=True, device="h100"))
    assert "batch-invariant: a token's results do not depend on the other tokens" in text
    assert "d_input has whole tiles of 128 rows" in text
    assert "batch-invariant" not in str(explain(*arrays(300, 896, 151_936), device="h100"))
    forward = str(explain(*arrays(300, 896, 151_936), batch_invariant=True, gradients=False, device="h100"))
    assert "whole tiles" not in forward


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batch_invariant": 1}, TypeError, r"batch_invariant must be a bool, got int"),
    ({"implementation": "chunked"}, ValueError, r"needs the kernels, got implementation 'chunked'"),
    ({"label_smoothing": 0.1}, ValueError, r"needs label_smoothing 0, got 0\.1"),
    ({"saved_budget": 2**20, "reduction": "none"}, ValueError, r"needs saved_budget 0, got 1048576"),
    ({"dtypes": (torch.float16, torch.float16)}, ValueError, r"needs a bfloat16 input, got float16"),
    ({"dtypes": (torch.float32, torch.float32)}, ValueError, r"needs a bfloat16 input, got float32"),
    (
        {"dtypes": (torch.bfloat16, torch.float32)},
        ValueError,
        r"needs a bfloat16 linear_weight for the gradient of input, got float32",
    ),
    (
        {"dtypes": (torch.bfloat16, torch.float32), "head_precision": "float32"},
        ValueError,
        r"needs a bfloat16 linear_weight for the gradient of input, got float32",
    ),
    ({"with_entropy": True}, ValueError, r"has no gradient of the entropy \(with_entropy, or an entropy_weight\): its"),
    ({"with_entropy": True, "reduction": "none"}, ValueError, r"has no gradient of the entropy \(with_entropy"),
    ({"d": 20}, ValueError, r"rows start at multiples of 16 bytes for the gradient of input, got shape \(100, 20\)"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[message for *_, message in BAD])
def test_what_cannot_hold_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"batch_invariant": True, "device": "h100", **options}
    d, (first, second) = options.pop("d", 64), options.pop("dtypes", (torch.bfloat16, torch.bfloat16))
    x, w = torch.zeros(6, d, dtype=first), torch.zeros(100, d, dtype=second)
    with pytest.raises(error, match=message):
        explain(x, w, **options)


def test_a_call_without_kernels_is_refused() -> None:
    x, w, y = torch.zeros(6, 16).bfloat16(), torch.zeros(100, 16).bfloat16(), torch.arange(6)
    options: dict[str, Any] = {"batch_invariant": True}
    head = core_triton.LinearCrossEntropy(16, 100, dtype=torch.bfloat16, **options)
    for call in (
        lambda: linear_cross_entropy(x, w, y, **options),
        lambda: core_triton.linear_cross_entropy_with_stats(x, w, y, **options),
        lambda: linear_log_probs(x, w, y, **options),
        lambda: core_triton.linear_token_loss(x, w, y, torch.neg, **options),
        lambda: core_triton.linear_token_loss_with_stats(x, w, y, torch.neg, **options),
        lambda: head(x, y),
    ):
        with pytest.raises(ValueError, match="needs the kernels, got implementation 'chunked' \\(no kernel for cpu"):
            call()
    with pytest.raises(ValueError, match="needs label_smoothing 0"):
        core_triton.LinearCrossEntropy(16, 100, label_smoothing=0.1, **options)


def test_a_gradient_of_the_entropy_is_refused() -> None:
    def call() -> None:
        x, w = (torch.empty(size, 64, dtype=torch.bfloat16, device="cuda") for size in (30, 100))
        row = torch.empty(30, device="cuda")
        arrays = Arrays(x, w, None, row.long(), None)
        options = Options(False, -100, 0.0, 0.0, None, 1.0, 100, 2**29, "triton", False, 0, batch_invariant=True)
        ops.run_gradients(arrays, options, row, row, Coefficients(row, row, row, None), NeedsGrad(*EVERYTHING))

    with pytest.raises(ValueError, match="no gradients of entropy and lse"):
        launches_of(90, call)
