"""Tests the rows that core_triton saves for the backward pass: gradients, matmuls, memory, errors and torch.compile."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from allocations import Meter, bytes_of
from torch import Tensor
from torch_problem import leaves, problem

import core_triton
from core_triton import ops, saved_ops
from core_triton.problem import NeedsGrad
from linear_ce.chunking import SAVED_FIXED_BYTES, SAVED_ROW_BYTES
from parity.arrays import make_arrays
from parity.backends import run_case
from parity.cases import Case, cases
from parity.expected import compare, expected

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FUNCTIONS = ("none", "log_probs")
ALL = 2**24  # bytes: more than the rows of these problems


def results(function: str, arrays: dict[str, Any], **options: Any) -> Tensor:
    """Returns the losses, or minus the log-probabilities, of all rows."""
    if function == "log_probs":
        return -core_triton.linear_log_probs(**arrays, **options).log_prob
    return core_triton.linear_cross_entropy(**arrays, reduction="none", **options)


def gradients(function: str, arrays: dict[str, Any], upstream: Tensor | None = None, **options: Any) -> list[Tensor]:
    losses = results(function, arrays, **options)
    upstream = torch.linspace(-1.0, 2.0, len(losses)) if upstream is None else upstream
    return list(torch.autograd.grad(losses, leaves(arrays), upstream))


def budget_of(rows: int, arrays: dict[str, Any]) -> int:
    """Returns the bytes that so many rows take."""
    x, w = arrays["input"], arrays["linear_weight"]
    return SAVED_FIXED_BYTES + -(-rows // 8) * 8 * (SAVED_ROW_BYTES + x.itemsize * (x.shape[1] + -(-len(w) // 64) * 64))


FLOAT32 = [
    case
    for case in cases()
    if case.dtype == "float32"
    and not case.grad_into
    and (case.function == "log_probs" or (case.function, case.spec.reduction) == ("loss", "none"))
]


def saved(case: Case) -> Case:
    unused = ("entropy", "lse") if case.function == "log_probs" else ()
    return replace(case, saved_budget=ALL, unused=unused)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=pytest.mark.slow if i % 6 else ()) for i, c in enumerate(FLOAT32)]
)
def test_float32_cases_are_within_their_budgets(case: Case) -> None:
    case = saved(case)
    arrays = make_arrays(case)
    found = compare(case, expected(case, arrays), run_case("torch-chunked", case, arrays).outputs)
    over = {name: one.percent for name, one in found.items() if not one.percent <= 100}
    assert not over


@pytest.mark.parametrize("name", ["edge-log_probs-logits80-fp16", "edge-unscaled-none-fp16", "edge-tight-none-fp16"])
def test_float16_cases_are_within_their_budgets(name: str) -> None:
    test_float32_cases_are_within_their_budgets(next(case for case in cases() if case.name == name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 4.0, "logit_scale": 0.5, "vocab_size": 45, "memory_budget": 2**18}]
)
def test_a_part_of_the_rows_is_saved(function: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    arrays = problem(700, dtype=dtype)
    arrays["target"] %= 45
    arrays["target"][::7] = -100
    if function == "none":
        options = options | {"token_weight": torch.linspace(-0.5, 2.0, 700)}
    budget = budget_of(600, arrays)
    assert core_triton.explain(
        arrays["input"], arrays["linear_weight"], reduction="none", saved_budget=budget
    ).plan.saved
    want, got = (gradients(function, arrays, **options, saved_budget=saved_budget) for saved_budget in (0, budget))
    step = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for one, other in zip(got, want, strict=True):
        assert (one.float() - other.float()).norm() <= step * other.float().norm()


# The matmuls of the forward and of the backward pass, of calls with one chunk of rows and one vocabulary chunk.
MATMULS = {
    (): {"none": (2, 1), "log_probs": (2, 1)},
    ("input",): {"none": (1, 1), "log_probs": (1, 1)},
    ("linear_weight",): {"none": (2, 0), "log_probs": (2, 0)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("frozen", MATMULS)
def test_saved_rows_take_three_matmuls(function: str, frozen: tuple[str, ...], dtype: torch.dtype) -> None:
    arrays = problem(bias=False, dtype=dtype)
    want = dict(zip(arrays, gradients(function, arrays), strict=False))
    arrays = {name: one.detach() if name in frozen else one for name, one in arrays.items()}
    with Meter() as forward:
        losses = results(function, arrays, saved_budget=ALL)
    with Meter() as backward:
        found = torch.autograd.grad(losses, leaves(arrays), torch.linspace(-1.0, 2.0, 12))
    assert (len(forward.matmuls), len(backward.matmuls)) == MATMULS[frozen][function]
    step = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(list(found), [want[n] for n in want if n not in frozen], rtol=step, atol=step)


@pytest.mark.parametrize("n", [12, 700])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("wanted", ["input", "linear_weight", "linear_bias"])
def test_one_gradient_of_several(function: str, wanted: str, n: int) -> None:
    arrays = problem(n)
    want = dict(zip(arrays, gradients(function, arrays), strict=False))[wanted]
    losses = results(function, arrays, saved_budget=budget_of(min(n, 600), arrays))
    (found,) = torch.autograd.grad(losses, arrays[wanted], torch.linspace(-1.0, 2.0, n))
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_is_saved_without_gradients(function: str) -> None:
    arrays = problem()
    with torch.no_grad(), Meter() as meter, mock.patch.object(saved_ops, "run_saved_losses") as run:
        results(function, arrays, saved_budget=ALL)
    assert len(meter.matmuls) == 1
    assert not run.called


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [50, 700])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_is_within_both_budgets(function: str, n: int, dtype: torch.dtype) -> None:
    arrays = problem(n, 64, 500, dtype=dtype)
    saved_budget, memory_budget = budget_of(min(n, 600), arrays), 2**21
    with Meter() as meter:
        losses = results(function, arrays, saved_budget=saved_budget, memory_budget=memory_budget)
        kept = sum(meter.live.values())
        assert kept <= saved_budget + 6 * 4 * n  # the results, and the row weights
        assert kept > 0.8 * saved_budget
        found = torch.autograd.grad(losses, leaves(arrays), torch.linspace(-1.0, 2.0, n))
    assert meter.peak - bytes_of(*found) - saved_budget <= memory_budget


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [12, 700])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_second_backward_repeats_the_first(function: str, n: int, dtype: torch.dtype) -> None:
    arrays = problem(n, dtype=dtype)
    losses, upstream = (
        results(function, arrays, saved_budget=budget_of(min(n, 520), arrays)),
        torch.linspace(-1.0, 2.0, n),
    )
    first = [g.clone() for g in torch.autograd.grad(losses, leaves(arrays), upstream, retain_graph=True)]
    for gradient in torch.autograd.grad(losses, leaves(arrays), upstream, retain_graph=True):
        gradient.zero_()  # a caller's change to a gradient must not affect the next one
    third = torch.autograd.grad(losses, leaves(arrays), upstream)
    torch.testing.assert_close(list(third), first, rtol=0, atol=0)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_that_do_not_count_change_nothing(function: str) -> None:
    """An ignored row under an upstream gradient of NaN, and a row of NaN and one without a class under one of 0."""
    arrays = problem(13, bias=True)
    upstream = torch.linspace(0.5, 2.0, 13)
    kept = [row for row in range(13) if row not in (1, 4, 7)]
    only = {
        name: one[kept].detach().requires_grad_(name == "input") if name in ("input", "target") else one
        for name, one in arrays.items()
    }
    want = gradients(function, only, upstream[kept], saved_budget=ALL)
    with torch.no_grad():
        arrays["input"][1] = torch.nan
        arrays["input"][4] = torch.nan
        arrays["target"][1], arrays["target"][7] = -100, 99
        upstream[1], upstream[4], upstream[7] = torch.nan, 0.0, 0.0
    d_input, *d_head = gradients(function, arrays, upstream, saved_budget=ALL)
    torch.testing.assert_close([d_input[kept], *d_head], want)
    assert not d_input[[1, 4, 7]].any()
    upstream[4] = 1.0  # then it counts
    _, d_weight, d_bias = gradients(function, arrays, upstream, saved_budget=ALL)
    assert d_weight.isnan().all()
    assert d_bias.isnan().all()


@pytest.mark.parametrize("wanted", [("entropy",), ("lse", "log_prob"), ("entropy", "lse")])
def test_a_gradient_of_entropy_or_lse_uses_the_other_backward_pass(wanted: tuple[str, ...]) -> None:
    arrays, upstream = problem(), torch.linspace(-1.0, 2.0, 12)

    def call(saved_budget: int) -> tuple[Tensor, ...]:
        found = core_triton.linear_log_probs(**arrays, saved_budget=saved_budget)
        value = torch.stack([getattr(found, name) * upstream for name in wanted]).sum()
        return torch.autograd.grad(value, leaves(arrays))

    with mock.patch.object(saved_ops, "run_saved_gradients") as run:
        got = call(ALL)
    assert not run.called
    torch.testing.assert_close(got, call(0), rtol=0, atol=0)


def test_statistics_of_saved_rows() -> None:
    arrays = problem(700)
    saved_budget, token_weight = budget_of(600, arrays), torch.linspace(-1.0, 1.0, 700)
    options: dict[str, Any] = {"reduction": "none", "token_weight": token_weight, "z_loss_weight": 0.1}
    want, got = (
        core_triton.linear_cross_entropy_with_stats(**arrays, **options, saved_budget=budget)
        for budget in (0, saved_budget)
    )
    torch.testing.assert_close(got, want)
    assert [one.requires_grad for one in got[1]] == [False] * 5


def test_bad_saved_budgets_are_named() -> None:
    arrays = problem()
    for value, kind, message in (
        (-1, ValueError, r"saved_budget must not be negative \(bytes\), got -1"),
        (1.5, TypeError, "saved_budget must be a Python int, got float"),
        (True, TypeError, "saved_budget must be a Python int, got bool"),
    ):
        for function in FUNCTIONS:
            with pytest.raises(kind, match=message):
                results(function, arrays, saved_budget=value)
    with pytest.raises(ValueError, match="saved_budget needs reduction \"none\", got reduction 'mean'"):
        core_triton.linear_cross_entropy(**arrays, saved_budget=1)
    with pytest.raises(ValueError, match="saved_budget needs reduction \"none\", got reduction 'sum'"):
        core_triton.explain(arrays["input"], arrays["linear_weight"], reduction="sum", saved_budget=1)


@pytest.mark.parametrize(
    ("dtype", "options", "matmuls"),
    [
        (torch.bfloat16, {}, "3 matmuls"),
        (torch.float16, {"softcap": 30.0}, "3 matmuls"),
        (torch.bfloat16, {"saved_budget": 2**30}, "3.75 matmuls"),
        (torch.bfloat16, {"saved_budget": 2**26}, "fewer than 512: 4 matmuls"),
        (torch.float32, {"label_smoothing": 0.1}, "3 matmuls"),
    ],
)
def test_explain_says_what_is_saved(dtype: torch.dtype, options: dict[str, Any], matmuls: str) -> None:
    x, w = torch.empty(16384, 2048, dtype=dtype, device="meta"), torch.empty(128256, 2048, dtype=dtype, device="meta")
    explained = core_triton.explain(x, w, reduction="none", device="h100", **{"saved_budget": 2**35, **options})
    line = dict(line.split(": ", 1) for line in str(explained).splitlines())["saved"]
    assert matmuls in line
    assert "of 16384 rows" in line
    part = options.get("saved_budget") == 2**30
    assert ("log-probabilities take 4.25 if" if part else "log-probabilities take 5 if") in line or "none" in line
    assert ("other rows: scaled_exp: " in str(explained)) == part
    if explained.plan.others is not None:
        most = max(explained.plan.chunks.bytes, explained.plan.others.chunks.bytes)
        assert f"workspace: {most / 2**20:.1f} MiB" in str(explained)
    assert explained.plan.saved is not None
    assert explained.plan.saved.bytes <= options.get("saved_budget", 2**35)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_refuse_the_budget_with_label_smoothing(dtype: torch.dtype) -> None:
    x, w = torch.empty(8, 64, dtype=dtype, device="meta"), torch.empty(1000, 64, dtype=dtype, device="meta")
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": 0.1, "device": "h100"}
    what = f"label_smoothing 0.1 and a {str(dtype).removeprefix('torch.')} input"
    message = f"saved_budget must be 0 with {what}, of which .*: use implementation='chunked'"
    for saved_budget in (ALL, 1):  # an error even where no row would be saved
        with pytest.raises(ValueError, match=message):
            core_triton.explain(x, w, saved_budget=saved_budget, **options)
        with pytest.raises(ValueError, match=message):
            saved_ops.check_saves("triton", dtype, 0.1)
    assert core_triton.explain(x, w, saved_budget=ALL, implementation="chunked", **options).plan.saved


def test_kernels_with_pointers_refuse_rows_that_are_too_long() -> None:
    x, w = (torch.empty(rows, 64, dtype=torch.bfloat16, device="meta") for rows in (8, 2**24))
    with pytest.raises(ValueError, match="saved_budget must be 0 for 16777216 classes, whose rows are too long"):
        core_triton.explain(x, w, reduction="none", saved_budget=2**34, device="a100")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("n", [12, 700])
def test_saved_rows_compile_without_graph_breaks(function: str, n: int) -> None:
    arrays, upstream = problem(n), torch.linspace(-1.0, 2.0, n)
    saved_budget = budget_of(min(n, 600), arrays)

    def call(arrays: dict[str, Any]) -> Tensor:
        return (results(function, arrays, saved_budget=saved_budget) * upstream).sum()

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    want, got = call(arrays), compiled(arrays)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves(arrays)), torch.autograd.grad(want, leaves(arrays)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("statistics", [0, ops.OF_LOG_PROBS])
@pytest.mark.parametrize("needs_grad", [(True, True, True), (True, False, False), (False, True, False)])
def test_opcheck(statistics: int, needs_grad: tuple[bool, bool, bool]) -> None:
    arrays = problem()
    tensors = ops.Arrays(**arrays, class_weight=None)
    options = ops.Options(False, -100, 0.0, 0.0, None, 1.0, 50, 2**20, "chunked", False, ALL)
    call = (*tensors, None, None, *options, statistics, *needs_grad)
    torch.library.opcheck(torch.ops.linear_ce.saved_losses.default, call)
    plain = ops.Arrays(**{name: one.detach() for name, one in arrays.items()}, class_weight=None)
    weights = ops.TokenWeights(None, None)
    found = saved_ops.run_saved_losses(plain, weights, options, statistics, NeedsGrad(*needs_grad))
    assert found.losses.row_weight is not None
    assert found.losses.lse is not None
    rows = torch.linspace(-1.0, 1.0, 12), found.losses.row_weight, found.losses.lse
    torch.library.opcheck(
        torch.ops.linear_ce.saved_gradients.default, (*plain, *options, *rows, *found.saved, *needs_grad)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_where_rows_are_longer_than_the_vocabulary(dtype: torch.dtype) -> None:
    arrays, memory_budget = problem(3000, 512, 50, dtype=dtype), 2**22
    with Meter() as meter:
        losses = results("none", arrays, saved_budget=ALL, memory_budget=memory_budget)
        kept = sum(meter.live.values())
        found = torch.autograd.grad(losses, leaves(arrays), torch.linspace(-1.0, 2.0, 3000))
    assert meter.peak - bytes_of(*found) - kept <= memory_budget


def test_the_module_saves_rows() -> None:
    head = core_triton.LinearCrossEntropy(8, 50, reduction="none", saved_budget=ALL)
    with mock.patch.object(saved_ops, "run_saved_losses", wraps=saved_ops.run_saved_losses) as run:
        head(torch.randn(12, 8), torch.arange(12)).sum().backward()
    assert run.called
    with pytest.raises(ValueError, match='saved_budget needs reduction "none"'):
        core_triton.LinearCrossEntropy(8, 50, saved_budget=1)
