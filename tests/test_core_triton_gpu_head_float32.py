"""Tests `grad_into` and `head_precision` of core_triton on an NVIDIA GPU: sums, memory, CUDA graphs, and the assertion
on the device. test_core_triton_gpu.py runs the cases of parity. Run with `pytest -m gpu`.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_gpu import DEVICE, DTYPES, ROUNDING, assert_close, assert_same, gpu_problem
from torch_problem import FUNCTIONS, total

import core_triton

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[1]
KERNELS = ("triton", "triton_sm80")


def in_float32(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: a.detach().float().requires_grad_() if a.requires_grad else a for name, a in arrays.items()}


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_gradient_is_added(function: str, dtype: torch.dtype, implementation: str) -> None:
    arrays = gpu_problem(3000, 128, 2003, dtype=dtype, bias=True)
    start = torch.randn(2003, 128, device=DEVICE) * 2**-12  # adding to large numbers would round the small gradients
    into = start.clone()
    options: dict[str, Any] = {"memory_budget": 2**22, "implementation": implementation}
    for _ in range(2):
        total(function, arrays, grad_into=into, **options).backward()
    exact = in_float32(arrays)
    total(function, exact, implementation="chunked").backward()
    assert arrays["linear_weight"].grad is None
    assert_close([into - start], [2 * exact["linear_weight"].grad], ROUNDING[dtype])


@pytest.mark.usefixtures("no_other_programs")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("precision", ["input", "float32"])
def test_the_workspace_is_within_the_budget(precision: Any, reduction: Any) -> None:
    """With grad_into there is no other (V, D) tensor."""
    d, v, budget = 4096, 128256, 2**29
    head = torch.float32 if precision == "float32" else torch.bfloat16
    x = torch.randn(8192, d, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(v, d, device=DEVICE) * d**-0.5).to(head).requires_grad_()
    y, into = torch.randint(0, v, (8192,), device=DEVICE), torch.zeros(v, d, device=DEVICE)

    def call() -> None:
        options: dict[str, Any] = {"reduction": reduction, "head_precision": precision, "memory_budget": budget}
        core_triton.linear_cross_entropy(x, w, y, grad_into=into, **options).sum().backward()
        x.grad = None

    call()  # cuBLAS allocates its workspace once and keeps it
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    assert torch.cuda.max_memory_allocated() - before - x.nbytes <= budget


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_graph_adds_at_each_replay(function: str) -> None:
    arrays, into = gpu_problem(bias=True), torch.zeros(1001, 64, device=DEVICE)

    def call() -> None:
        total(function, arrays, grad_into=into).backward()
        arrays["input"].grad = arrays["linear_bias"].grad = None

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    once = into.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    into.zero_()
    for _ in range(2):
        graph.replay()
    torch.testing.assert_close(into, 2 * once, rtol=1e-6, atol=1e-6)


def test_a_repeated_call_adds_to_the_buffer_that_it_gets() -> None:
    """Recorded launches hold no address."""
    arrays, found = gpu_problem(dtype=torch.float32), []
    for _ in range(3):
        into = torch.zeros(1001, 64, device=DEVICE)
        core_triton.linear_cross_entropy(**arrays, grad_into=into).backward()
        found.append(into)
    assert_same(found[1:], [found[0]] * 2)


WRONG = """
import torch, core_triton
x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
w = torch.randn(320, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
into = torch.zeros(320, 64, device="cuda")
loss = core_triton.linear_cross_entropy(x, w, torch.arange(64, device="cuda"), grad_into=into)
(loss * {factor}).backward()
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_another_upstream_gradient_is_an_assertion_on_the_device(factor: float) -> None:
    command = [sys.executable, "-c", WRONG.format(factor=factor)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (factor == 1.0), done.stderr[-2000:]
    if factor != 1.0:
        assert "assert" in done.stderr.lower()


@pytest.mark.parametrize("implementation", KERNELS)
def test_logits_of_a_split_head_have_sixteen_bits(implementation: str) -> None:
    arrays = gpu_problem(3000, 1024, 5003, dtype=torch.float32)
    arrays["input"] = arrays["input"].detach().bfloat16()
    options: dict[str, Any] = {"head_precision": "float32", "implementation": implementation}
    stats = core_triton.linear_cross_entropy_with_stats(**arrays, **options)[1]
    rows = arrays["linear_weight"].detach().double()[arrays["target"]]
    exact = (arrays["input"].double() * rows).sum(1)
    assert_close([stats.target_logit], [exact], 5e-6)  # 2e-3 with a head rounded to bfloat16


@pytest.mark.parametrize("transposed", [False, True])
def test_a_split_head_of_several_chunks_repeats_bit_for_bit(transposed: bool) -> None:
    """D and V are no multiples of a tile, and the last chunk of rows is not full."""
    arrays = gpu_problem(3001, 900, 5004, dtype=torch.float32)
    arrays["input"] = arrays["input"].detach().bfloat16().requires_grad_()
    w = arrays["linear_weight"].detach()
    arrays["linear_weight"] = (w.T.contiguous().T if transposed else w).requires_grad_()
    options: dict[str, Any] = {"head_precision": "float32", "memory_budget": 2**24}
    plan = core_triton.explain(arrays["input"], arrays["linear_weight"], **options).plan
    assert plan.chunks.rows < 3001
    if plan.hopper:
        assert plan.d_weight_kernel
        assert plan.d_input_tiling is not None

    def gradients() -> list[Tensor]:
        loss = core_triton.linear_cross_entropy(**arrays, **options)
        return list(torch.autograd.grad(loss, [arrays["input"], arrays["linear_weight"]]))

    first = gradients()
    for _ in range(3):
        assert_same(gradients(), first)
    exact = in_float32(arrays)
    total("mean", exact, implementation="chunked").backward()
    assert_close(first, [exact["input"].grad, exact["linear_weight"].grad], ROUNDING[torch.bfloat16])


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_split_head_is_near_a_float32_head(function: str, implementation: str) -> None:
    arrays = gpu_problem(3000, 1024, 5003, dtype=torch.float32)
    arrays["input"] = arrays["input"].detach().bfloat16().requires_grad_()

    def value_and_gradients(given: dict[str, Any], **options: Any) -> list[Tensor]:
        value = total(function, given, **options)
        return [value.detach(), *torch.autograd.grad(value, [given["input"], given["linear_weight"]])]

    options: dict[str, Any] = {"memory_budget": 2**25, "implementation": implementation}
    found = value_and_gradients(arrays, head_precision="float32", **options)
    want = value_and_gradients(in_float32(arrays), implementation="chunked")
    assert_close(found[:1], want[:1], 2e-6 if function in ("mean", "sum") else 1e-4)  # the others are sums that cancel
    assert_close(found[1:], want[1:], ROUNDING[torch.bfloat16])
