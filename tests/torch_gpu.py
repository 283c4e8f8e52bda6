"""Problems, comparisons and a small model for the tests of core_triton on a GPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_problem import leaves, problem, total

import core_triton

DEVICE = "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gpu_problem(
    n: int = 300, d: int = 64, v: int = 1001, *, dtype: torch.dtype = torch.bfloat16, bias: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Returns `torch_problem.problem` on the GPU, with logits of order 1."""
    arrays = problem(n, d, v, dtype=dtype, bias=bias, seed=seed)
    with torch.no_grad():
        arrays["linear_weight"] *= d**-0.5
    arrays = {name: a.detach().to(DEVICE).requires_grad_(a.requires_grad) for name, a in arrays.items()}
    assert core_triton.explain(arrays["input"], arrays["linear_weight"]).name == "triton"
    return arrays


def results(function: str, arrays: dict[str, Any], **options: Any) -> list[Tensor]:
    """Returns a sum of a function's results, and its gradients."""
    value = total(function, arrays, **options)
    return [value.detach(), *torch.autograd.grad(value, leaves(arrays))]


def assert_close(got: list[Tensor], want: list[Tensor], bound: float) -> None:
    """Fails if the norm of a difference exceeds `bound` times the norm of `want`."""
    for mine, theirs in zip(got, want, strict=True):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert error <= bound, f"error {error:.3g} of {bound:.3g} in {tuple(theirs.shape)}"


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}


class Model(nn.Module):
    """A small language model without attention. Each token predicts the next one."""

    def __init__(self, v: int = 2003, d: int = 128, dtype: torch.dtype = torch.float32, fused: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(v, d, device=DEVICE, dtype=dtype)
        self.body = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d), nn.LayerNorm(d))
        self.body.to(DEVICE, dtype)
        self.head = core_triton.LinearCrossEntropy(d, v, device=DEVICE, dtype=dtype)
        self.fused = fused

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        hidden = self.body(self.embedding(tokens))
        if self.fused:
            weight: Any = self.head.weight
            local = weight.to_local() if hasattr(weight, "to_local") else weight  # FSDP2 has not gathered it yet
            assert core_triton.explain(hidden, local).name == "triton"
            return self.head(hidden, target)
        return F.cross_entropy(F.linear(hidden, self.head.weight).float().flatten(0, -2), target.flatten())


def model_and_tokens(**options: Any) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Model(**options)
    tokens = torch.randint(0, 2003, (4, 33), device=DEVICE)
    return model, tokens[:, :-1], tokens[:, 1:]


def model_results(model: nn.Module, *batch: Tensor) -> list[Tensor]:
    loss = model(*batch)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
