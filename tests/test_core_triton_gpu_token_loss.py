"""Tests `core_triton.linear_token_loss` on an NVIDIA GPU. Run with `pytest -m gpu`."""

from typing import Any

import pytest
import torch
from token_loss_problem import (
    LOSSES,
    TokenProblem,
    assert_within_budget,
    call,
    counted_chunks,
    make_problem,
    outputs,
    tensors,
)
from torch import Tensor
from torch_gpu import DEVICE, assert_same

from core_triton import linear_log_probs, linear_token_loss_with_stats, token_losses
from linear_ce.spec import FLOAT_DTYPES, LossSpec
from linear_ce.statistics import TOKEN_STATS

pytestmark = [pytest.mark.gpu, pytest.mark.apart(programs=3, seconds=120)]

KERNELS = ("triton", "triton_sm80")
LARGE: dict[str, Any] = {"lead": (3, 1200), "d": 64, "v": 1501}
BUDGET, BUDGET_OF_ENTROPY = 2**21 + 2**20, 2**21  # three chunks or more


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("name", LOSSES)
def test_several_chunks(name: str, dtype: str, implementation: str) -> None:
    made = make_problem(name, dtype, **LARGE, spec=LossSpec("sum"))
    budget = BUDGET_OF_ENTROPY if made.form.with_entropy else BUDGET
    with counted_chunks() as chunks:
        found = outputs(made, DEVICE, memory_budget=budget, implementation=implementation)
    assert chunks.call_count >= 3
    assert_within_budget(made, found, chunks.call_count)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("out_of_range", [False, True])
@pytest.mark.parametrize("name", ["grpo-k3", "custom-entropy"])
def test_options(name: str, reduction: Any, dtype: str, out_of_range: bool, implementation: str) -> None:
    spec = LossSpec(reduction, softcap=3.0, logit_scale=0.6, vocab_size=280)
    normalizer = 7.0 if reduction == "mean" else None
    options: dict[str, Any] = {"spec": spec, "bias": True, "token_weight": True, "normalizer": normalizer}
    made = make_problem(name, dtype, (300,), out_of_range=out_of_range, per_token_dtype="bfloat16", **options)
    assert_within_budget(made, outputs(made, DEVICE, implementation=implementation))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"logit_scale": 1.7}], ids=["plain", "softcap", "scale"])
def test_log_probs_are_those_of_linear_log_probs_bit_for_bit(
    options: dict[str, Any], dtype: str, implementation: str
) -> None:
    """With any budget, beside any rows, with and without statistics, and with rows that are repaired."""
    made = make_problem("weighted_nll", dtype, **LARGE, spec=LossSpec(**options))
    made.arrays["input"].reshape(-1, 64)[::50] *= 40
    named, per_token = tensors(made, DEVICE)
    first = named["input"], named["linear_weight"]
    with torch.no_grad():
        want = linear_log_probs(*first, named["target"], **options, implementation=implementation)
    kept = named["target"].clone()
    kept[torch.rand(kept.shape, device=DEVICE) < 0.5] = -100
    calls: tuple[tuple[Tensor, int | None, tuple[str, ...], Any], ...] = (
        (named["target"], None, ("log_prob", "lse"), "mean"),
        (named["target"], BUDGET, ("log_prob", "lse"), "mean"),
        (named["target"], None, TOKEN_STATS, "sum"),
        (named["target"], None, ("log_prob", "lse"), "none"),
        (kept, BUDGET, ("log_prob", "lse"), "mean"),
    )
    for target, budget, stats, reduction in calls:
        arguments: list[Any] = [*first, target, made.token_loss, *per_token]
        for entropy_weight in (0.0, 0.1):
            arguments[3] = token_losses.weighted_nll(entropy_weight=entropy_weight)
            _, found = linear_token_loss_with_stats(
                *arguments,
                **options,
                stats=stats,
                reduction=reduction,
                memory_budget=budget,
                implementation=implementation,
            )
            assert found.log_prob is not None
            assert found.lse is not None
            counts = target != -100
            assert_same([found.log_prob[counts], found.lse[counts]], [want.log_prob[counts], want.lse[counts]])


def results(made: TokenProblem, named: dict[str, Tensor], per_token: list[Tensor], **options: Any) -> list[Tensor]:
    loss = call(made, named, per_token, **options)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), [named["input"], named["linear_weight"], per_token[0]])]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["ppo_clip", "custom", "grpo-k2-entropy", "custom-entropy"])
def test_a_graph_replays_with_changed_inputs(name: str, reduction: Any, dtype: str) -> None:
    made = make_problem(name, dtype, **LARGE, spec=LossSpec(reduction))
    named, per_token = tensors(made, DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and allocates the workspace of cuBLAS
        results(made, named, per_token, memory_budget=BUDGET)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(made, named, per_token, memory_budget=BUDGET)
    other = make_problem(name, dtype, **LARGE, spec=LossSpec(reduction), seed=1)
    new_named, new_per_token = tensors(other, DEVICE)
    with torch.no_grad():
        for old, new in zip((*named.values(), *per_token), (*new_named.values(), *new_per_token), strict=True):
            old.copy_(new)
    graph.replay()
    replayed = [tensor.clone() for tensor in captured]
    assert_same(replayed, results(made, named, per_token, memory_budget=BUDGET))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["grpo-k3", "grpo-k2-entropy", "custom-entropy"])
def test_nothing_waits_for_the_device(name: str, reduction: Any, dtype: str) -> None:
    made = make_problem(name, dtype, **LARGE, spec=LossSpec(reduction), token_weight=True)
    named, per_token = tensors(made, DEVICE)
    results(made, named, per_token, memory_budget=BUDGET)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(made, named, per_token, memory_budget=BUDGET)
        with torch.no_grad():
            call(made, named, per_token, memory_budget=BUDGET)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # of Inductor's imports
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["ppo_clip", "grpo-k2-entropy"])
def test_a_named_loss_compiles_without_graph_breaks(name: str, dtype: str) -> None:
    made = make_problem(name, dtype, (300,))
    named, per_token = tensors(made, DEVICE)
    compiled = torch.compile(lambda named, per_token: call(made, named, per_token), fullgraph=True)
    leaves = [named["input"], named["linear_weight"], per_token[0]]
    want, found = call(made, named, per_token), compiled(named, per_token)
    assert_same([found, *torch.autograd.grad(found, leaves)], [want, *torch.autograd.grad(want, leaves)])
