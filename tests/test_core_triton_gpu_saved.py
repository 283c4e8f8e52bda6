"""Tests the rows that core_triton saves for the backward pass on an NVIDIA GPU. Run with `pytest -m gpu`.

test_core_triton_gpu.py runs the cases of the contract that save rows.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_gpu import DEVICE, ROUNDING, assert_close, assert_same, gpu_problem
from torch_problem import leaves

import core_triton

pytestmark = [pytest.mark.gpu, pytest.mark.apart(programs=2, seconds=120)]

KERNELS = ("triton", "triton_sm80")
FUNCTIONS = ("none", "log_probs")
ALL = 2**34  # bytes: more than the rows of these problems


def results(function: str, arrays: dict[str, Any], **options: Any) -> list[Tensor]:
    """Returns the results of all rows, and the gradients for upstream gradients of the losses or log-probabilities."""
    if function == "log_probs":
        found = core_triton.linear_log_probs(**arrays, **options)
        value, forward = found.log_prob, list(found)
    else:
        value = core_triton.linear_cross_entropy(**arrays, reduction="none", **options)
        forward = [value]
    upstream = torch.linspace(-1.0, 2.0, len(value), device=DEVICE)
    return [one.detach() for one in forward] + list(torch.autograd.grad(value, leaves(arrays), upstream))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("budget", ["all", "part"])
def test_several_chunks(function: str, dtype: torch.dtype, implementation: str, budget: str) -> None:
    n, d, v = 3000, 192, 1001
    arrays = gpu_problem(n, d, v, dtype=dtype, bias=True)
    arrays["target"][::5] = -100
    saved_budget = ALL if budget == "all" else 1500 * arrays["input"].itemsize * (d + v + 64)
    options: dict[str, Any] = {"implementation": implementation, "memory_budget": 2**22, "logit_scale": 0.7}
    found = [results(function, arrays, saved_budget=saved_budget, **options) for _ in range(3)]
    for other in found[1:]:  # the second call is recorded, and the third is a replay
        assert_same(other, found[0])
    exact = {name: a.detach().float().requires_grad_() if a.requires_grad else a for name, a in arrays.items()}
    want = results(function, exact, implementation="chunked", logit_scale=0.7)
    forward = len(want) - 3
    assert_close(found[0][:forward], want[:forward], 1e-5)
    assert_close(found[0][forward:], want[forward:], 1.5 * ROUNDING[dtype])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_graph_replays_with_changed_inputs(function: str) -> None:
    arrays = gpu_problem(600)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and allocates the workspace of cuBLAS
        results(function, arrays, saved_budget=ALL)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(function, arrays, saved_budget=ALL)
    with torch.no_grad():
        for name, tensor in gpu_problem(600, seed=1).items():
            arrays[name].copy_(tensor)
        arrays["target"][:50] = -100
    graph.replay()
    replayed = [tensor.clone() for tensor in captured]
    assert_same(replayed, results(function, arrays, saved_budget=ALL))


@pytest.mark.usefixtures("no_other_programs")
@pytest.mark.parametrize(("d", "v"), [(4096, 128256), (896, 151936)])
@pytest.mark.parametrize("saved_budget", [2**30, 2**32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_memory_is_within_both_budgets(d: int, v: int, saved_budget: int, dtype: torch.dtype) -> None:
    n, memory_budget = 4096, 2**29
    x = torch.randn(n, d, device=DEVICE, dtype=dtype, requires_grad=True)
    w = (torch.randn(v, d, device=DEVICE, dtype=dtype) * d**-0.5).requires_grad_()
    y, upstream = torch.randint(0, v, (n,), device=DEVICE), torch.rand(n, device=DEVICE)
    for _ in range(2):  # cuBLAS allocates its workspace once and keeps it
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        log_prob = core_triton.linear_log_probs(x, w, y, saved_budget=saved_budget).log_prob
        kept = torch.cuda.memory_allocated() - before
        forward = torch.cuda.max_memory_allocated() - before
        gradients = torch.autograd.grad(log_prob, (x, w), upstream)
        used = torch.cuda.max_memory_allocated() - before - sum(one.nbytes for one in gradients)
        del log_prob, gradients
    assert kept <= saved_budget + 2**16 * 8
    assert forward <= saved_budget + memory_budget
    assert used <= saved_budget + memory_budget


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nothing_waits_for_the_device(function: str, dtype: torch.dtype) -> None:
    arrays = gpu_problem(700, dtype=dtype)
    saved_budget = 600 * arrays["input"].itemsize * 1200
    results(function, arrays, saved_budget=saved_budget)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(function, arrays, saved_budget=saved_budget)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # Inductor's imports
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_compiled_function(dtype: torch.dtype) -> None:
    arrays, upstream = gpu_problem(600, dtype=dtype), torch.linspace(-1.0, 2.0, 600, device=DEVICE)

    def log_prob(arrays: dict[str, Any]) -> Tensor:
        return core_triton.linear_log_probs(**arrays, saved_budget=ALL).log_prob

    found = torch.compile(log_prob, fullgraph=True)(arrays)
    gradients = torch.autograd.grad(found, leaves(arrays), upstream)
    assert_same(list(gradients), results("log_probs", arrays, saved_budget=ALL)[3:])


@pytest.mark.parametrize("implementation", KERNELS)
def test_upstream_gradients_of_very_different_sizes(implementation: str) -> None:
    """Rows of float16 with upstream gradients from 1e-6 to 1e3, whose targets have up to 1 - 1e-6 of the probability,
    in several chunks: the gradient of each row is that of a call that saves nothing, and those of all are exact."""
    n, d, v = 1000, 128, 1001
    arrays, rows = gpu_problem(n, d, v, dtype=torch.float16), torch.arange(n, device=DEVICE)
    x, of_target = arrays["input"].detach().float(), arrays["linear_weight"].detach()[arrays["target"]].float()
    more = (5.0 + rows % 4 * 6.0 - (of_target * x).sum(1)) / of_target.square().sum(1)
    arrays["input"] = (x + more[:, None] * of_target).half().requires_grad_()
    upstream = 10.0 ** torch.linspace(-6.0, 3.0, n, device=DEVICE)[torch.randperm(n, device=DEVICE)]
    exact = {name: one.detach().float().requires_grad_() if one.requires_grad else one for name, one in arrays.items()}
    options: dict[str, Any] = {"saved_budget": ALL, "memory_budget": 2**20, "implementation": implementation}

    def pulled_back(arrays: dict[str, Any], **options: Any) -> list[Tensor]:
        return list(
            torch.autograd.grad(core_triton.linear_log_probs(**arrays, **options).log_prob, leaves(arrays), upstream)
        )

    found, (unsaved, _) = pulled_back(arrays, **options), pulled_back(arrays, implementation=implementation)
    wrong = (found[0].float() - unsaved.float()).norm(dim=1)
    assert (wrong <= 1e-3 * unsaved.float().norm(dim=1) + 2.0**-25 * d**0.5).all()
    assert_close(found, pulled_back(exact, implementation="chunked"), 2 * ROUNDING[torch.float16])
