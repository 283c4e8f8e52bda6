"""Tests `grad_into` of core_triton: where d_weight is added, when, and what is refused."""

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from allocations import Meter
from assertions import check
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_problem import FUNCTIONS, problem, total

import core_triton
from core_triton import chunked, token_losses
from linear_ce.spec import FLOAT_DTYPES, LossSpec
from parity.cases import Case

Arrays = dict[str, Any]

pytestmark = pytest.mark.usefixtures("torch_poisons_buffers")


class Other(Tensor):
    pass


def buffer(arrays: Arrays) -> Tensor:
    return torch.randn(arrays["linear_weight"].shape, generator=torch.Generator().manual_seed(7))


def in_float64(arrays: Arrays, weights: Tensor | None = None) -> Tensor:
    """Returns the gradient of the head in float64, of the sum of the losses times `weights`."""
    exact = {name: t.detach().double() if t.is_floating_point() else t for name, t in arrays.items()}
    w = exact["linear_weight"].requires_grad_()
    logits = exact["input"] @ w.T + exact.get("linear_bias", 0.0)
    rows = torch.nn.functional.cross_entropy(logits, exact["target"], reduction="none")
    return torch.autograd.grad((rows if weights is None else rows * weights).sum(), w)[0]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize(("dtype", "budget"), [*product(FLOAT_DTYPES, [None]), ("bfloat16", 60_000)])
def test_micro_batches_add_up_in_float32(dtype: str, budget: int | None) -> None:
    parts = [problem(70, v=90, dtype=getattr(torch, dtype), seed=seed) for seed in range(2)]
    parts[1]["linear_weight"] = w = parts[0]["linear_weight"]
    into = buffer(parts[0])
    start = into.clone()
    with mock.patch.object(chunked, "chunk_gradients", wraps=chunked.chunk_gradients) as chunks:
        for arrays in parts:
            loss = core_triton.linear_cross_entropy(**arrays, normalizer=140, memory_budget=budget, grad_into=into)
            loss.backward()
    assert w.grad is None
    assert budget is None or chunks.call_count >= 4
    want = start.double() + torch.stack([in_float64(arrays, torch.full((70,), 1 / 140)) for arrays in parts]).sum(0)
    rounding = {"float32": 3e-7, "float16": 3e-5, "bfloat16": 2e-4}[dtype]  # of d_logits, whose sum is small here
    assert relative(into, want) < rounding


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_sum_of_float32_is_rounded_once(function: str) -> None:
    """A gradient in 16 bits would round each call."""
    arrays = problem(dtype=torch.bfloat16)
    plain = problem(dtype=torch.bfloat16)
    plain["linear_weight"] = plain["linear_weight"].detach().float().requires_grad_()
    total(function, plain).backward()
    into = torch.zeros(50, 8)
    for _ in range(3):
        total(function, arrays, grad_into=into).backward()
    torch.testing.assert_close(into, 3 * plain["linear_weight"].grad, rtol=1e-6, atol=1e-6)


def test_tied_heads_share_one_buffer() -> None:
    arrays, tokens = problem(), torch.arange(12) % 5
    w, into = arrays["linear_weight"], torch.zeros(50, 8)
    w.grad = into  # autograd adds the embedding's gradient to it
    embedded = torch.nn.functional.embedding(tokens, w)
    call: Arrays = arrays | {"input": embedded}
    core_triton.linear_cross_entropy(**call, grad_into=into).backward()
    exact = w.detach().double().requires_grad_()
    logits = exact[tokens] @ exact.T + arrays["linear_bias"].detach().double()
    torch.nn.functional.cross_entropy(logits, arrays["target"]).backward()
    assert w.grad is into
    torch.testing.assert_close(into.double(), exact.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("frozen", [(), ("input",), ("linear_bias",)])
def test_the_other_gradients_are_those_without_it(function: str, frozen: tuple[str, ...]) -> None:
    def call(into: Tensor | None) -> Arrays:
        arrays = problem()
        for name in frozen:
            arrays[name] = arrays[name].detach()
        total(function, arrays, grad_into=into).backward()
        return {name: arrays[name].grad for name in ("input", "linear_weight", "linear_bias")}

    into = torch.zeros(50, 8)
    found, want = call(into), call(None)
    assert found.pop("linear_weight") is None
    torch.testing.assert_close(into, want.pop("linear_weight"), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, want)


def test_options_and_padding_and_rows_that_do_not_contribute() -> None:
    arrays = problem()
    with torch.no_grad():
        arrays["input"][3] = torch.nan
        arrays["target"][5] = 47  # a class of padding: -100 below
        arrays["target"] = torch.where(arrays["target"] >= 45, -100, arrays["target"])
    mask = torch.ones(12)
    mask[3] = 0.0
    options: Arrays = {
        "token_weight": mask,
        "vocab_size": 45,
        "label_smoothing": 0.1,
        "z_loss_weight": 0.1,
        "softcap": 3.0,
    }
    core_triton.linear_cross_entropy(**arrays, **options).backward()
    into = buffer(arrays)
    start = into.clone()
    core_triton.linear_cross_entropy(**arrays, **options, grad_into=into).backward()
    torch.testing.assert_close(into - start, arrays["linear_weight"].grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(into[45:], start[45:])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_token_losses(reduction: Any) -> None:
    arrays, advantage = problem(bias=False), torch.linspace(-1, 2, 12)
    fixed = arrays["input"], arrays["linear_weight"], arrays["target"], token_losses.reinforce(), advantage
    core_triton.linear_token_loss(*fixed, reduction=reduction).sum().backward()
    into = torch.zeros(50, 8)
    arrays["input"].grad = None
    core_triton.linear_token_loss(*fixed, reduction=reduction, grad_into=into).sum().backward()
    torch.testing.assert_close(into, arrays["linear_weight"].grad)


def test_hooks_of_the_head_run_without_a_gradient() -> None:
    arrays, ran = problem(), []
    arrays["linear_weight"].register_post_accumulate_grad_hook(lambda head: ran.append(head.grad))
    core_triton.linear_cross_entropy(**arrays, grad_into=torch.zeros(50, 8)).backward()
    assert ran == [None]


def test_an_empty_batch_adds_nothing() -> None:
    arrays = problem(0)
    into = buffer(arrays)
    start = into.clone()
    core_triton.linear_cross_entropy(**arrays, grad_into=into).backward()
    assert torch.equal(into, start)


def test_the_module_passes_it_on() -> None:
    head, into = core_triton.LinearCrossEntropy(8, 50), torch.zeros(50, 8)
    head(torch.randn(12, 8), torch.arange(12), grad_into=into).backward()
    assert head.weight.grad is None
    assert into.norm() > 0


@pytest.mark.parametrize("function", ["mean", "none"])
def test_a_buffer_of_inference_mode_is_refused(function: str) -> None:
    arrays = problem()
    with torch.inference_mode():
        into = buffer(arrays)
        total(function, arrays, grad_into=into)
    with torch.no_grad():
        total(function, arrays, grad_into=into)  # which adds nothing
    with pytest.raises(ValueError, match=r"grad_into must be made outside of torch\.inference_mode"):
        total(function, arrays, grad_into=into)


@pytest.mark.parametrize("function", ["mean", "none"])
def test_no_second_buffer(function: str) -> None:
    arrays = problem(17, 64, 1000, dtype=torch.bfloat16)
    into = torch.zeros(1000, 64)
    with Meter() as meter:
        total(function, arrays, memory_budget=250_000, grad_into=into).backward()
    assert meter.largest < into.nbytes / 2


def test_the_plan_needs_no_float32_sum() -> None:
    arrays = problem(1000, 8, 500, dtype=torch.bfloat16)["input"], torch.zeros(500, 8).bfloat16()
    options: Arrays = {"implementation": "chunked", "memory_budget": 400_000}
    assert core_triton.explain(*arrays, **options).plan.chunk_config.float32_sum
    assert not core_triton.explain(*arrays, **options, grad_into=torch.zeros(500, 8)).plan.chunk_config.float32_sum


def test_the_kernel_of_hopper_adds_to_a_float32_buffer_that_is_aligned() -> None:
    arrays = problem(1000, 8, 500, dtype=torch.bfloat16)["input"], torch.zeros(500, 8).bfloat16()
    shifted = torch.zeros(4001)[1:].view(500, 8)  # not at a multiple of 16 bytes
    buffers = (None, torch.zeros(500, 8), shifted)
    ours = {
        device: [core_triton.explain(*arrays, device=device, grad_into=into).plan.d_weight_kernel for into in buffers]
        for device in ("h200", "a100")
    }
    assert ours == {"h200": [True, True, False], "a100": [True, False, False]}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_is_added_without_gradients(function: str) -> None:
    arrays, into = problem(), torch.zeros(50, 8)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            total(function, arrays, grad_into=into)
            total(function, problem() | {"linear_weight": torch.zeros(50, 8)}, grad_into=into)  # no error
    assert into.norm() == 0


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_second_backward_pass_is_refused_or_adds_again(function: str) -> None:
    arrays, into = problem(), torch.zeros(50, 8)
    value = total(function, arrays, grad_into=into)
    value.backward(retain_graph=True)
    once = into.clone()
    if function in ("mean", "sum"):
        with pytest.raises(RuntimeError, match="grad_into allows one backward pass for each call, got a second one"):
            value.backward()
        return
    value.backward(retain_graph=True)
    torch.testing.assert_close(into, 2 * once)
    value.backward(inputs=[arrays["input"]])  # adds, too
    torch.testing.assert_close(into, 3 * once)


@pytest.mark.parametrize("name", ["input", "linear_weight"])
def test_memory_of_an_argument_is_refused(name: str) -> None:
    arrays = problem(50)
    into = arrays[name].detach()
    with pytest.raises(ValueError, match=f"grad_into must have memory of its own, and shares it with {name}"):
        core_triton.linear_cross_entropy(**arrays, grad_into=into)
    both = torch.randn(2, 50, 8)  # parts of one buffer
    head = both[0].requires_grad_()
    core_triton.linear_cross_entropy(arrays["input"], head, arrays["target"], grad_into=both[1].detach())
    with pytest.raises(ValueError, match="shares it with linear_weight"):
        core_triton.explain(arrays["input"], head, grad_into=both.view(-1)[8:408].view(50, 8).detach())


@pytest.mark.parametrize(
    ("into", "kind", "message"),
    [
        (torch.zeros(50, 8).bfloat16(), TypeError, "grad_into must be float32, got bfloat16"),
        (torch.zeros(8, 50), ValueError, r"grad_into must have shape \(50, 8\) \(.*\), got \(8, 50\)"),
        (torch.zeros(8, 50).T, ValueError, r"grad_into must be contiguous, got strides \(1, 50\)"),
        ([1.0], TypeError, "grad_into must be a Tensor or None, got list"),
    ],
)
def test_explain_refuses_what_a_call_does(into: Any, kind: type[Exception], message: str) -> None:
    arrays = problem()
    with pytest.raises(kind, match=message):
        core_triton.explain(arrays["input"], arrays["linear_weight"].detach(), grad_into=into)


@pytest.mark.parametrize("factor", [0.5, 0.0, float("nan")])
@pytest.mark.parametrize("token_loss", [False, True])
def test_another_upstream_gradient_is_refused_where_the_forward_pass_adds(factor: float, token_loss: bool) -> None:
    arrays, into = problem(bias=False), torch.zeros(50, 8)
    fixed = arrays["input"], arrays["linear_weight"], arrays["target"]
    if token_loss:
        loss = core_triton.linear_token_loss(*fixed, lambda log_prob: -log_prob, grad_into=into)
    else:
        loss = core_triton.linear_cross_entropy(*fixed, grad_into=into)
    with pytest.raises(RuntimeError, match="grad_into was added to in the forward pass, for an upstream gradient of 1"):
        (factor * loss).backward()


def test_any_upstream_gradient_is_admitted_where_the_backward_pass_adds() -> None:
    arrays, weights = problem(), torch.linspace(-1, 1, 12)
    into = torch.zeros(50, 8)
    losses = core_triton.linear_cross_entropy(**arrays, reduction="none", grad_into=into)
    assert into.norm() == 0
    (3.0 * losses * weights).sum().backward()
    assert relative(into, in_float64(arrays, 3.0 * weights)) < 1e-6


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_activation_checkpointing_adds_once(function: str, use_reentrant: bool) -> None:
    arrays, into = problem(), torch.zeros(50, 8)

    def body(x: Tensor, w: Tensor) -> Tensor:
        return total(function, arrays | {"input": x, "linear_weight": w}, grad_into=into)

    def run() -> None:
        found = checkpoint(body, arrays["input"], arrays["linear_weight"], use_reentrant=use_reentrant)
        assert isinstance(found, Tensor)
        found.backward()

    if function in ("mean", "sum") and not use_reentrant:
        with pytest.raises(RuntimeError, match="grad_into cannot be added to in the forward pass under hooks of saved"):
            run()
        return
    run()
    plain = problem()
    total(function, plain).backward()
    torch.testing.assert_close(into, plain["linear_weight"].grad, rtol=1e-6, atol=1e-6)


def test_a_change_of_the_buffer_is_visible_to_autograd() -> None:
    arrays, into = problem(), torch.zeros(50, 8)
    used = (torch.ones((), requires_grad=True) * into).sum()
    core_triton.linear_cross_entropy(**arrays, grad_into=into)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of dynamo
def test_torch_compile_runs_the_call_between_two_graphs() -> None:
    arrays, into = problem(bias=False), torch.zeros(50, 8)

    def loss(x: Tensor, w: Tensor, y: Tensor, into: Tensor) -> Tensor:
        return core_triton.linear_cross_entropy(2.0 * x, w, y, grad_into=into)

    fixed = arrays["input"], arrays["linear_weight"], arrays["target"]
    torch.compile(loss, backend="eager")(*fixed, into).backward()
    want = torch.zeros(50, 8)
    loss(*fixed, want).backward()
    torch.testing.assert_close(into, want)
    torch.compiler.reset()
    with pytest.raises(Exception, match="because grad_into is given"):
        torch.compile(loss, backend="eager", fullgraph=True)(*fixed, into)


@pytest.mark.parametrize(
    ("into", "kind", "message"),
    [
        ([1.0], TypeError, "grad_into must be a Tensor or None, got list"),
        (torch.zeros(50, 8).bfloat16(), TypeError, "grad_into must be float32, got bfloat16"),
        (torch.zeros(8, 50), ValueError, r"grad_into must have shape \(50, 8\) \(.*\), got \(8, 50\)"),
        (torch.zeros(8, 50).T, ValueError, r"grad_into must be contiguous, got strides \(1, 50\)"),
        (torch.zeros(50, 16)[:, :8], ValueError, r"grad_into must be contiguous, got strides \(16, 1\)"),
        (torch.zeros(50, 8, device="meta"), ValueError, "grad_into must be on input's device cpu, got meta"),
        (torch.zeros(50, 8, requires_grad=True), ValueError, "grad_into is not differentiated and must not require"),
        (torch.zeros(50, 8).as_subclass(Other), TypeError, "grad_into needs plain tensors, and grad_into is a Other"),
    ],
)
def test_a_bad_buffer_is_named(into: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        core_triton.linear_cross_entropy(**problem(), grad_into=into)


def test_a_frozen_head_is_refused() -> None:
    arrays = problem()
    arrays["linear_weight"] = arrays["linear_weight"].detach()
    with pytest.raises(ValueError, match="grad_into must be None for a linear_weight that does not require grad"):
        core_triton.linear_cross_entropy(**arrays, grad_into=torch.zeros(50, 8))


@pytest.mark.parametrize("options", [{}, {"spec": LossSpec("none")}, {"function": "log_probs"}], ids=str)
def test_a_case_that_needs_no_other_gradient_is_compared(options: dict[str, Any]) -> None:
    """The backends of parity run the backward pass, though autograd returns no gradient."""
    unused = {"unused": ("entropy", "lse")} if options.get("function") == "log_probs" else {}
    check("torch-chunked", Case(name="only d_weight", grad_into=True, frozen=("input",), **unused, **options))
