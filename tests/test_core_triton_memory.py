"""The memory that a call of core_triton allocates, without arguments and gradients, is within memory_budget in every
plan."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from allocations import Meter, bytes_of
from assertions import least_budget
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_problem import FUNCTIONS, leaves, problem, total

from linear_ce.spec import DEFAULT_MEMORY_BUDGET

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 8, 50), (3, 64, 501), (50, 16, 1001), (257, 32, 150))  # N, D, V


def workspace(
    function: str,
    arrays: dict[str, Any],
    budget: int | None,
    *,
    upstream: float = 1.0,
    frozen: tuple[str, ...] = (),
    **options: Any,
) -> int:
    """Returns the peak bytes of a call and its backward pass, minus the gradients."""
    arrays = {name: tensor.detach() if name in frozen else tensor for name, tensor in arrays.items()}
    found = ()
    with Meter() as meter:
        value = total(function, arrays, memory_budget=budget, **options)
        if value.requires_grad:
            found = torch.autograd.grad(value, leaves(arrays), torch.tensor(upstream))
    return meter.peak - bytes_of(*found)


def in_turn(every: int, *factors: Sequence[Any]) -> list[Any]:
    """Returns all combinations of factors as test parameters. The quick suite runs one in `every`, so that each value
    of a factor meets different values of the others."""
    combinations = itertools.product(*(enumerate(factor) for factor in factors))
    return [
        pytest.param(
            *(value for _, value in chosen),
            id="-".join(str(value).removeprefix("torch.") for _, value in chosen),
            marks=pytest.mark.slow if sum(index for index, _ in chosen) % every else (),
        )
        for chosen in combinations
    ]


def assert_within(budget: int, used: int) -> None:
    assert used <= budget, f"{used} bytes of workspace are {used / budget:.0%} of the budget of {budget}"


@pytest.mark.parametrize(("function", "dtype", "shape", "softcap"), in_turn(12, FUNCTIONS, DTYPES, SHAPES, (None, 5.0)))
def test_workspace_within_budget(function: str, dtype: torch.dtype, shape: Any, softcap: float | None) -> None:
    arrays = problem(*shape, dtype=dtype)
    least = least_budget(lambda budget: workspace(function, arrays, budget, softcap=softcap))
    for budget in (least, 3 * least, 10 * least):
        assert_within(budget, workspace(function, arrays, budget, softcap=softcap, upstream=3.0))


FROZEN = (("input", "linear_weight", "linear_bias"), ("input",), ("linear_weight",))


@pytest.mark.parametrize(("function", "dtype", "frozen"), in_turn(6, FUNCTIONS, DTYPES, FROZEN))
def test_frozen_arguments_within_budget(function: str, dtype: torch.dtype, frozen: tuple[str, ...]) -> None:
    arrays = problem(50, 16, 501, dtype=dtype)
    least = least_budget(lambda budget: workspace(function, arrays, budget, frozen=frozen))
    for budget in (least, 3 * least):
        assert_within(budget, workspace(function, arrays, budget, frozen=frozen))


@pytest.mark.parametrize(("function", "dtype"), in_turn(2, FUNCTIONS, (torch.float32, torch.bfloat16)))
def test_many_tokens_within_budget(function: str, dtype: torch.dtype) -> None:
    arrays = problem(65536, 4, 70, dtype=dtype)
    least = least_budget(lambda budget: workspace(function, arrays, budget))
    for budget in (2 * least, 2**23):
        assert_within(budget, workspace(function, arrays, budget))


def test_options_of_the_loss_within_budget() -> None:
    arrays = problem(257, 32, 300, dtype=torch.float16)
    extra = {"weight": torch.ones(300), "token_weight": torch.ones(257), "normalizer": 5.0}
    options: dict[str, Any] = {**extra, "label_smoothing": 0.1, "z_loss_weight": 0.1, "softcap": 3.0}
    least = least_budget(lambda budget: workspace("mean", arrays, budget, **options))
    assert_within(least, workspace("mean", arrays, least, **options))


@pytest.mark.parametrize(("function", "d"), in_turn(4, FUNCTIONS, (16, 64)))
def test_a_split_head_within_budget(function: str, d: int) -> None:
    arrays = problem(40, d, 150, bias=False)
    arrays["input"] = arrays["input"].detach().bfloat16().requires_grad_()
    options: dict[str, Any] = {"head_precision": "float32"}
    least = least_budget(lambda budget: workspace(function, arrays, budget, **options))
    for budget in (least, 3 * least):
        assert_within(budget, workspace(function, arrays, budget, **options))


@pytest.mark.parametrize(("function", "dtype"), in_turn(4, ("mean", "none"), DTYPES))
def test_grad_into_within_budget(function: str, dtype: torch.dtype) -> None:
    arrays, into = problem(40, 16, 150, dtype=dtype), torch.zeros(150, 16)

    def used(budget: int) -> int:
        with Meter() as meter:
            total(function, arrays, memory_budget=budget, grad_into=into).backward()
        return meter.peak - bytes_of(arrays["input"], arrays["linear_bias"])

    least = least_budget(used)
    for budget in (least, 3 * least):
        for name in ("input", "linear_bias"):
            arrays[name].grad = None
        assert_within(budget, used(budget))


def test_small_workspace_is_within_the_default_budget() -> None:
    arrays = problem(20, 8, 50)
    assert workspace("mean", arrays, None) <= 2**20 < DEFAULT_MEMORY_BUDGET


@pytest.mark.parametrize(("function", "dtype"), in_turn(2, FUNCTIONS, DTYPES))
def test_the_error_names_the_smallest_budget(function: str, dtype: torch.dtype) -> None:
    arrays = problem(40, 8, 120, dtype=dtype)
    least = least_budget(lambda budget: total(function, arrays, memory_budget=budget))
    total(function, arrays, memory_budget=least).backward()  # neither pass raises
    with pytest.raises(ValueError, match=f"at least {least} bytes for 40 tokens and 120 classes, got {least - 1}"):
        total(function, arrays, memory_budget=least - 1)
    # A larger problem does not need less, and evaluation does not need more than training.
    larger = problem(40, 16, 240, dtype=dtype)
    assert least_budget(lambda budget: total(function, larger, memory_budget=budget)) >= least
    with torch.no_grad():
        assert least_budget(lambda budget: total(function, arrays, memory_budget=budget)) <= least


DRAWN = {
    "n": st.integers(1, 150),
    "d": st.integers(1, 40),
    "v": st.integers(1, 400),
    "dtype": st.sampled_from(DTYPES),
    "function": st.sampled_from(FUNCTIONS),
    "softcap": st.sampled_from((None, 4.0)),
    "factor": st.floats(1.0, 8.0),
    "bias": st.booleans(),
}


@pytest.mark.parametrize("examples", [25, pytest.param(100, marks=pytest.mark.slow)])
def test_drawn_problems_within_budget(examples: int) -> None:
    settings(max_examples=examples)(given(**DRAWN)(check_drawn_problem))()


def check_drawn_problem(
    n: int, d: int, v: int, dtype: torch.dtype, function: str, softcap: float | None, factor: float, bias: bool
) -> None:
    arrays = problem(n, d, v, dtype=dtype, bias=bias)
    least = least_budget(lambda budget: workspace(function, arrays, budget, softcap=softcap))
    budget = int(least * factor)
    assert_within(budget, workspace(function, arrays, budget, softcap=softcap, upstream=3.0))
