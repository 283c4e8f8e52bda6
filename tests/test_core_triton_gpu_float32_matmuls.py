"""Tests the float32 matmuls of core_triton on an NVIDIA GPU. Run with `pytest -m gpu`."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from core_triton import float32_matmuls, problem

pytestmark = pytest.mark.gpu

SHAPES = [(257, 896, 1000), (300, 20011, 130), (1000, 384, 515)]  # rows, inner and columns; programs share the second
SHARED = {"programs": 132, "waves": 3}


@pytest.fixture(autouse=True)
def float32_precision() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


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


def test_tf32_is_that_of_pytorch() -> None:
    a, b = torch.randn(256, 512, device="cuda"), torch.randn(512, 256, device="cuda")
    ours, cublas = (torch.empty(256, 256, device="cuda") for _ in range(2))
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    float32_matmuls.add_matmul(ours, a, b, first=True, **SHARED)
    problem.add_matmul(cublas, a, b, first=True)
    assert torch.equal(ours, cublas)
