"""Tests the float32 matmuls of core_triton on an NVIDIA GPU. Run with `pytest -m gpu`."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from core_triton import float32_matmuls, linear_cross_entropy, problem

pytestmark = pytest.mark.gpu

SHAPES = [(257, 896, 1000), (300, 20011, 130), (1000, 384, 515)]  # rows, inner and columns; programs share the second
SHARED = {"programs": 132, "waves": 3}


def matrix(rows: int, columns: int, *, by_columns: bool, exponents: int) -> Tensor:
    """Returns normal numbers, times powers of two of up to so many binary digits."""
    numbers = torch.randn(columns, rows, device="cuda").T if by_columns else torch.randn(rows, columns, device="cuda")
    return torch.ldexp(numbers, torch.randint(-exponents, exponents + 1, numbers.shape, device="cuda"))


def error(found: Tensor, a: Tensor, b: Tensor) -> float:
    """Returns the largest error of a sum, relative to the sum of the magnitudes of its products."""
    exact, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    return ((found.double() - exact).abs() / magnitude).max().item()


@pytest.mark.parametrize("exponents", [0, 12])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("a_by_columns", "b_by_columns"), [(False, True), (False, False), (True, False)])
def test_errors_are_not_larger_than_those_of_cublas(
    shape: tuple[int, int, int], a_by_columns: bool, b_by_columns: bool, exponents: int
) -> None:
    rows, inner, columns = shape
    a = matrix(rows, inner, by_columns=a_by_columns, exponents=exponents)
    b = matrix(inner, columns, by_columns=b_by_columns, exponents=exponents)
    ours, cublas = (torch.empty(rows, columns, device="cuda") for _ in range(2))
    float32_matmuls.add_matmul(ours, a, b, first=True, **SHARED)
    problem.add_matmul(cublas, a, b, first=True)
    allowed = max(2 * error(cublas, a, b), 2.0**-22)
    assert error(ours, a, b) <= allowed
    float32_matmuls.add_matmul(ours, a, b, first=False, **SHARED)
    assert error(ours / 2, a, b) <= allowed


def test_infinite_numbers_and_nan_are_where_those_of_cublas_are() -> None:
    a, b = torch.randn(130, 200, device="cuda"), torch.randn(200, 140, device="cuda")
    a[3, 5], a[129, 199], b[7, 11], b[8, 12] = torch.inf, -torch.inf, torch.nan, 0.0
    b[5, 20] = 0.0
    ours, cublas = (torch.empty(130, 140, device="cuda") for _ in range(2))
    float32_matmuls.add_matmul(ours, a, b, first=True, **SHARED)
    problem.add_matmul(cublas, a, b, first=True)
    torch.testing.assert_close(ours, cublas, rtol=1e-4, atol=1e-4, equal_nan=True)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"linear_bias": True, "logit_scale": 0.7, "softcap": 5.0},
    {"logit_scale": 0.7},
    {"reduction": "none"},
    {"reduction": "none", "saved_budget": 2**27},
    {"grad_into": True},
]


@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_several_chunks_are_those_of_float64(options: dict[str, Any], vocab_axis: int) -> None:
    """The kernel adds to d_weight in the loop over chunks. The reference is PyTorch's, in float64."""
    torch.manual_seed(0)
    n, hidden, vocab = 4000, 192, 20011
    x = torch.randn(n, hidden, device="cuda").requires_grad_()
    w = torch.randn((vocab, hidden) if vocab_axis == 0 else (hidden, vocab), device="cuda").requires_grad_()
    bias, into = torch.randn(vocab, device="cuda"), torch.randn(vocab, hidden, device="cuda")
    target, upstream = torch.randint(0, vocab, (n,), device="cuda"), torch.randn(n, device="cuda")
    head = w if vocab_axis == 0 else w.T
    given = {name: value for name, value in options.items() if value is not True}
    if "linear_bias" in options:
        given["linear_bias"] = bias
    if "grad_into" in options:
        given["grad_into"] = into.clone()
    each = options.get("reduction") == "none"
    with mock.patch.object(float32_matmuls, "_launch", wraps=float32_matmuls._launch) as launches:
        loss = linear_cross_entropy(x, head, target, memory_budget=2**28, **given)
        forward = launches.call_count
        loss = (loss * upstream).sum() if each else loss
        loss.backward()
    assert launches.call_count >= 6, "the kernel computes the three matmuls of two chunks"
    if each:
        assert launches.call_count > forward
    found = loss, x.grad, given.get("grad_into", w.grad)

    exact_x, exact_w = (tensor.detach().double().requires_grad_() for tensor in (x, head))
    logits = exact_x @ exact_w.T + (bias.double() if "linear_bias" in options else 0)
    logits = logits * options.get("logit_scale", 1.0)
    softcap = options.get("softcap")
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    exact = cross_entropy(logits, target, reduction="none")
    exact = (exact * upstream).sum() if each else exact.mean()
    exact.backward()
    d_weight = exact_w.grad
    assert d_weight is not None
    d_weight = d_weight + into if "grad_into" in options else d_weight if vocab_axis == 0 else d_weight.T
    for name, one, want in zip(("loss", "d_input", "d_weight"), found, (exact, exact_x.grad, d_weight), strict=True):
        assert one is not None
        assert want is not None
        error = ((one.double() - want).norm() / want.norm()).item()
        assert error <= 1e-5, f"{name}: {error / 1e-5:.0%} of the allowed error"
