"""Compares the loss with PyTorch's `linear_cross_entropy`, if this version has it: same names, same meaning."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from core_triton import linear_cross_entropy

pytestmark = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason=f"torch {torch.__version__} has no F.linear_cross_entropy"
)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("extras", [False, True])
def test_equals_the_builtin(reduction: str, label_smoothing: float, extras: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    arrays = [draw(50, 32), draw(203, 32)]
    target = torch.randint(0, 203, (50,), generator=generator)
    target[::7] = -100
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing, "ignore_index": -100}
    if extras:
        arrays.append(draw(203))
        options |= {"linear_bias": arrays[2], "weight": torch.rand(203, generator=generator)}
    upstream = torch.randn(50, generator=generator) if reduction == "none" else torch.tensor(1.5)
    builtin: Any = F.linear_cross_entropy  # pyright: ignore[reportAttributeAccessIssue]
    got, expected = (f(arrays[0], arrays[1], target, **options) for f in (linear_cross_entropy, builtin))
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad(loss, arrays, upstream) for loss in (got, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)
