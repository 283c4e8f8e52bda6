"""The floating-point operations that PyTorch's counter finds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import core_triton
from core_triton import token_losses

N, D, V = 24, 16, 96
MATMUL = 2 * N * D * V


def counted(call: Callable[[Tensor, Tensor, Tensor], Tensor], *frozen: str) -> float:
    """Returns the operations of a call and its backward pass, in matmuls."""
    torch.manual_seed(0)
    x, w = torch.randn(N, D), torch.randn(V, D)
    for name, array in (("x", x), ("w", w)):
        array.requires_grad_(name not in frozen)
    target = torch.randint(0, V, (N,))
    with FlopCounterMode(display=False) as counter:
        loss = call(x, w, target)
        if loss.requires_grad:
            loss.backward()
    return counter.get_total_flops() / MATMUL


def plain(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(x @ w.T, target)


@pytest.mark.parametrize("frozen", [(), ("x",), ("w",), ("x", "w")], ids=["none", "input", "weight", "both"])
def test_the_mean_counts_as_that_of_logits(frozen: tuple[str, ...]) -> None:
    assert counted(core_triton.linear_cross_entropy, *frozen) == counted(plain, *frozen)


LATER: dict[str, tuple[Callable[..., Any], float]] = {
    "log-probs": (lambda x, w, y: core_triton.linear_log_probs(x, w, y).log_prob.sum(), 4),
    "entropy": (lambda x, w, y: core_triton.linear_log_probs(x, w, y).entropy.sum(), 4),
    "none": (lambda x, w, y: core_triton.linear_cross_entropy(x, w, y, reduction="none").sum(), 4),
    "saved": (
        lambda x, w, y: core_triton.linear_cross_entropy(x, w, y, reduction="none", saved_budget=2**30).sum(),
        3,
    ),
    "token loss": (lambda x, w, y: core_triton.linear_token_loss(x, w, y, token_losses.reinforce(), torch.ones(N)), 3),
}


@pytest.mark.parametrize("name", LATER)
def test_other_losses(name: str) -> None:
    call, matmuls = LATER[name]
    assert counted(call) == matmuls


def test_a_part_of_the_rows_is_saved() -> None:
    def call(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        x, target = x.repeat(32, 1), target.repeat(32)
        return core_triton.linear_cross_entropy(x, w, target, reduction="none", saved_budget=400_000).sum()

    assert counted(call) / 32 == pytest.approx(4 - 640 / 768)


def test_a_counter_of_the_backward_pass_only() -> None:
    x, w = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    loss = core_triton.linear_log_probs(x, w, torch.zeros(N, dtype=torch.long)).log_prob.sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == 3 * MATMUL
