"""Tests batch_invariant of core_triton on an NVIDIA GPU of compute capability 8.x or 9.0. Run with `pytest -m gpu`."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_gpu import DEVICE, ROUNDING, assert_close, assert_same

from core_triton import (
    linear_cross_entropy_with_stats,
    linear_log_probs,
    linear_token_loss_with_stats,
    token_losses,
)

pytestmark = [pytest.mark.gpu, pytest.mark.apart(programs=2, seconds=120)]

MOST = 5000
SIZES = [(64, 1001), (896, 8192)]


class Rows:
    """Rows of a batch: every 50th has logits so far above its target's that it is repaired."""

    def __init__(self, d: int, v: int, **options: Any) -> None:
        generator = torch.Generator().manual_seed(d)
        x, w = (torch.randn(*shape, generator=generator) for shape in ((MOST, d), (v, d)))
        x *= d**-0.5
        x[::50] *= 60
        self.x, self.w = x.bfloat16().to(DEVICE), w.bfloat16().to(DEVICE)
        self.target = torch.randint(0, v, (MOST,), generator=generator).to(DEVICE)
        self.advantage = torch.randn(MOST, generator=generator).to(DEVICE)
        self.options = {"batch_invariant": True, **options}

    def results(self, rows: Tensor, **options: Any) -> list[Tensor]:
        """Returns log-probabilities, lse and d_input of these rows, by each function."""
        options = self.options | options
        x, w = self.x[rows].requires_grad_(), self.w.clone().requires_grad_()
        target, advantage = self.target[rows], self.advantage[rows]
        loss, stats = linear_token_loss_with_stats(
            x, w, target, token_losses.reinforce(), advantage, stats=("log_prob", "lse"), reduction="sum", **options
        )
        (d_token,) = torch.autograd.grad(loss, x)
        found = linear_log_probs(x, w, target, **options)
        (d_log_prob,) = torch.autograd.grad(found.log_prob, x, advantage)
        losses, of_call = linear_cross_entropy_with_stats(x, w, target, reduction="none", **options)
        (d_none,) = torch.autograd.grad(losses, x, advantage)
        frozen, _ = linear_cross_entropy_with_stats(x, self.w, target, reduction="none", **options)
        (d_frozen,) = torch.autograd.grad(frozen, x, advantage)
        assert stats.log_prob is not None
        assert stats.lse is not None
        assert_same([stats.log_prob, stats.lse], [found.log_prob.detach(), found.lse.detach()])
        made = [found.log_prob, found.lse, losses, of_call.lse, frozen, d_token, d_log_prob, d_none, d_frozen]
        return [one.detach() for one in made]


@pytest.mark.parametrize("implementation", ["triton", "triton_sm80"])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "logit_scale": 1.7}], ids=["plain", "softcap"])
@pytest.mark.parametrize(("d", "v"), SIZES)
def test_a_row_has_the_same_bits_among_any_rows(d: int, v: int, options: dict[str, Any], implementation: str) -> None:
    made = Rows(d, v, implementation=implementation, **options)
    want = made.results(torch.arange(MOST, device=DEVICE))
    assert int((want[0] < -35).sum()) > 20, "few rows are repaired"  # 2**48 is 33 nats
    generator = torch.Generator().manual_seed(1)
    sizes: Sequence[int] = (1, 1, 2, 15, 16, 17, 128, 129, *torch.randint(1, MOST, (12,), generator=generator).tolist())
    for size in sizes:
        rows = torch.randperm(MOST, generator=generator)[:size].to(DEVICE)
        assert_same(made.results(rows), [one[rows] for one in want])


@pytest.mark.parametrize("implementation", ["triton", "triton_sm80"])
@pytest.mark.parametrize(("d", "v"), SIZES)
def test_a_row_has_the_same_bits_in_any_chunks_and_beside_ignored_rows(d: int, v: int, implementation: str) -> None:
    made = Rows(d, v, implementation=implementation)
    everything = torch.arange(MOST, device=DEVICE)
    want = made.results(everything)
    for budget in (2**22 + 2**21, 2**25, 2**28):
        assert_same(made.results(everything, memory_budget=budget), want)
    kept = torch.rand(MOST, generator=torch.Generator().manual_seed(2)).to(DEVICE) < 0.5
    made.target[~kept] = -100
    made.x[~kept] = torch.nan
    assert_same([one[kept] for one in made.results(everything)], [one[kept] for one in want])


@pytest.mark.parametrize(("d", "v"), SIZES)
def test_a_repair_changes_no_row_beside_it(d: int, v: int) -> None:
    made = Rows(d, v, softcap=200.0)
    rows = torch.arange(1, 128, device=DEVICE)  # a block with two rows that are repaired
    want = made.results(rows)
    made.x[50], made.x[100] = made.x[1], made.x[2]
    near = (rows % 50) != 0
    assert_same([one[near] for one in made.results(rows)], [one[near] for one in want])


@pytest.mark.parametrize("implementation", ["triton", "triton_sm80"])
@pytest.mark.parametrize(("d", "v"), SIZES)
def test_results_are_those_without_the_option_up_to_rounding(d: int, v: int, implementation: str) -> None:
    made, everything = Rows(d, v, implementation=implementation), torch.arange(MOST, device=DEVICE)
    found, want = made.results(everything), made.results(everything, batch_invariant=False)
    assert_close(found[:5], want[:5], ROUNDING[torch.float32])
    assert_close(found[5:], want[5:], ROUNDING[torch.bfloat16])


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # Inductor's imports
def test_a_graph_of_the_compiler_has_the_same_bits() -> None:
    made = Rows(64, 1001)
    rows = torch.arange(300, device=DEVICE)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return linear_log_probs(x, w, made.target[:300], batch_invariant=True).log_prob

    compiled = torch.compile(call, fullgraph=True)
    want = made.results(rows)
    x, w = made.x[:300].clone().requires_grad_(), made.w.clone().requires_grad_()
    found = compiled(x, w)
    (d_input,) = torch.autograd.grad(found, x, made.advantage[:300])
    assert_same([found.detach(), d_input], [want[0], want[6]])


def test_the_mean_with_a_normalizer_has_the_same_bits() -> None:
    made = Rows(64, 1001)
    found = []
    for rows in (torch.arange(MOST, device=DEVICE), torch.arange(70, 400, device=DEVICE)):
        x, w = made.x[rows].requires_grad_(), made.w.clone().requires_grad_()
        loss, _ = linear_cross_entropy_with_stats(x, w, made.target[rows], normalizer=1234.0, batch_invariant=True)
        found.append(torch.autograd.grad(loss, x)[0])
    assert_same([found[0][70:400]], [found[1]])
