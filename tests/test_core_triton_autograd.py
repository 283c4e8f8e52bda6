"""Tests core_triton under autograd: which gradients are computed, how often, and with checkpointing, autocast and
hooks."""

import gc
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from allocations import Meter
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch_problem import FUNCTIONS, leaves, problem, total

import core_triton
from core_triton import ops, scaling
from core_triton.problem import Gradients

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ARGUMENTS: tuple[str, ...] = ("input", "linear_weight", "linear_bias")

# The number of matmuls of a call with one chunk of rows and one vocabulary chunk: logits, d_input, d_weight, and the
# logits again.
MATMULS = {
    "mean": {(True, True): 3, (True, False): 2, (False, True): 2, (False, False): 1},
    "sum": {(True, True): 3, (True, False): 2, (False, True): 2, (False, False): 1},
    "none": {(True, True): 4, (True, False): 2, (False, True): 3, (False, False): 2},
    "log_probs": {(True, True): 4, (True, False): 3, (False, True): 3, (False, False): 2},
}


def gradients(function: str, arrays: dict[str, Any], **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(total(function, arrays, **options), leaves(arrays)))


def freeze(arrays: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: tensor.detach() if name in names else tensor for name, tensor in arrays.items()}


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("frozen", [f for k in range(1, 4) for f in itertools.combinations(ARGUMENTS, k)])
def test_frozen_arguments_need_no_matmul(function: str, frozen: tuple[str, ...], dtype: torch.dtype) -> None:
    arrays = problem(dtype=dtype)
    needed = [name for name in ARGUMENTS if name not in frozen]
    everything = dict(zip(ARGUMENTS, gradients(function, arrays), strict=True))
    arrays = freeze(arrays, *frozen)
    with Meter() as meter:
        value = total(function, arrays)
        found = torch.autograd.grad(value, leaves(arrays)) if needed else ()
    assert value.requires_grad == bool(needed)
    # How a gradient is computed, and so its rounding, can depend on which other gradients are needed.
    step = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(list(found), [everything[name] for name in needed], rtol=step, atol=step)
    expected = MATMULS[function]["input" in needed, "linear_weight" in needed] if needed else 1
    # Scaling the rows by an upstream gradient avoids the second logits matmul only if the whole head is frozen.
    expected += function == "none" and needed == ["input", "linear_bias"]
    # float16 computes the bias gradient as a vector-matrix multiplication.
    expected += dtype == torch.float16 and "linear_bias" in needed
    assert len(meter.matmuls) == expected


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("frozen", "n", "v"), [("linear_weight", 17, 600), ("input", 600, 70)])
def test_no_buffer_for_a_frozen_argument(function: str, frozen: str, n: int, v: int) -> None:
    arrays = freeze(problem(n, 64, v), frozen)
    # With this budget, only chunks of rows and vocabulary chunks fit in memory.
    with Meter() as meter:
        gradients(function, arrays, memory_budget=arrays[frozen].nbytes // 2 + 40000)
    other = arrays["input" if frozen == "linear_weight" else "linear_weight"]
    assert meter.largest < arrays[frozen].nbytes
    assert meter.largest >= other.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_second_backward_repeats_the_first(function: str, dtype: torch.dtype) -> None:
    arrays = problem(dtype=dtype)
    value = total(function, arrays)
    upstream = torch.tensor(3.0)
    first = torch.autograd.grad(value, leaves(arrays), upstream, retain_graph=True)
    first = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(value, leaves(arrays), upstream, retain_graph=True)
    for gradient in second:
        gradient.zero_()  # a caller's change to a gradient must not affect the next one
    third = torch.autograd.grad(value, leaves(arrays), upstream)
    assert_same(list(third), first)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("factor", [0.0, 1.0, -2.0, 4.0])
def test_upstream_gradient_multiplies(function: str, factor: float) -> None:
    arrays = problem()
    plain = gradients(function, arrays)
    scaled = torch.autograd.grad(total(function, arrays), leaves(arrays), torch.tensor(factor))
    assert_same(list(scaled), [factor * gradient for gradient in plain])  # powers of two: exact


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("retain_graph", [False, True])
def test_grad_accumulates(function: str, retain_graph: bool) -> None:
    arrays = problem()
    single = [gradient.clone() for gradient in gradients(function, arrays)]
    for _ in range(2):
        total(function, arrays).backward(retain_graph=retain_graph)
    assert_same([leaf.grad for leaf in leaves(arrays) if leaf.grad is not None], [2 * g for g in single])


def test_two_losses_of_one_head_add() -> None:
    first, second = problem(seed=1), problem(seed=2)
    second["linear_weight"], second["linear_bias"] = first["linear_weight"], first["linear_bias"]
    apart = [a + b for a, b in zip(gradients("mean", first), gradients("sum", second), strict=True)]
    together = torch.autograd.grad(total("mean", first) + total("sum", second), leaves(first))
    assert_same(list(together)[1:], apart[1:])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_backward_after_the_arrays_changed_is_refused(function: str) -> None:
    arrays = problem()
    value = total(function, arrays)
    with torch.no_grad():
        arrays["linear_weight"].add_(1.0)
    if function in ("mean", "sum"):  # the forward pass computed the gradients, from the old values
        assert_same(list(torch.autograd.grad(value, leaves(arrays))), gradients(function, problem()))
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_second_derivative_is_refused(function: str) -> None:
    arrays = problem()
    with pytest.raises(RuntimeError, match="no second derivative: use create_graph=False"):
        torch.autograd.grad(total(function, arrays), leaves(arrays), create_graph=True)


@pytest.mark.parametrize("saved_budget", [0, 10**6])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_several_upstream_gradients_at_once_are_refused(function: str, saved_budget: int) -> None:
    arrays = problem()
    options = {"saved_budget": saved_budget} if function in ("none", "log_probs") else {}
    value, x = total(function, arrays, **options), arrays["input"]
    upstream = torch.ones(3)
    with pytest.raises(RuntimeError, match="takes one upstream gradient, got a batch of them: use no is_grads_batched"):
        torch.autograd.grad(value, x, upstream, retain_graph=True, is_grads_batched=True)
    with pytest.raises(RuntimeError, match="takes one upstream gradient"):
        torch.vmap(lambda one: torch.autograd.grad(value, x, one, retain_graph=True)[0])(upstream)
    torch.autograd.grad(value, x)


def test_function_transforms_are_refused() -> None:
    arrays = problem()
    others = {name: tensor.detach() for name, tensor in arrays.items() if name != "input"}

    def loss(x: Tensor) -> Tensor:
        return core_triton.linear_cross_entropy(x, **others)

    with pytest.raises(TypeError, match=r"input comes from a torch\.func transform, which is not supported"):
        torch.func.grad(loss)(arrays["input"].detach())
    with pytest.raises(TypeError, match=r"input comes from a torch\.func transform, which is not supported"):
        torch.func.vmap(loss)(arrays["input"].detach()[None])


# PyTorch's first dual level compiles decompositions with torch.jit.script.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_normalizer_of_a_transform_is_refused() -> None:
    """Its derivative would be left out."""
    arrays = problem()

    def loss(normalizer: Tensor) -> Tensor:
        return core_triton.linear_cross_entropy(**arrays, normalizer=normalizer)

    with pytest.raises(TypeError, match=r"normalizer comes from a torch\.func transform, which is not supported"):
        torch.func.vmap(loss)(torch.ones(2))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="normalizer has a forward-mode tangent"):
        loss(forward_ad.make_dual(torch.ones(()), torch.ones(())))


def test_statistics_carry_no_gradient() -> None:
    loss, stats = core_triton.linear_cross_entropy_with_stats(**problem(), z_loss_weight=0.1)
    assert loss.requires_grad
    assert not any(tensor.requires_grad for tensor in stats)
    assert stats.n_valid.dtype == torch.int64


def test_no_grad_and_inference_mode_run_one_matmul() -> None:
    arrays = problem()
    want = total("mean", arrays).detach()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, Meter() as meter:
            value = total("mean", arrays)
        assert len(meter.matmuls) == 1
        assert not value.requires_grad
        torch.testing.assert_close(value.clone(), want)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(function: str, use_reentrant: bool) -> None:
    arrays = problem()
    names = [*ARGUMENTS, "target"]

    def body(*tensors: Tensor) -> Tensor:
        return total(function, dict(zip(names, tensors, strict=True)))

    value = checkpoint(body, *(arrays[name] for name in names), use_reentrant=use_reentrant)
    assert isinstance(value, Tensor)
    value.backward()
    assert_same([leaf.grad for leaf in leaves(arrays) if leaf.grad is not None], gradients(function, arrays))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_the_matmuls_in_its_dtype(function: str, dtype: torch.dtype) -> None:
    arrays = problem()
    rounded = {n: t.detach().to(dtype).float().requires_grad_() if t.requires_grad else t for n, t in arrays.items()}
    rounded["linear_bias"] = arrays["linear_bias"]  # float32 stays float32, and is added in float32
    with torch.autocast("cpu", dtype=dtype):
        value = total(function, arrays)
    value.backward()
    exact = total(function, rounded)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, exact, rtol=1e-5, atol=1e-5)
    for leaf, want in zip(leaves(arrays), gradients(function, rounded), strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        scale = want.abs().max().item()
        torch.testing.assert_close(leaf.grad, want, rtol=0, atol=scale * (1e-2 if dtype == torch.bfloat16 else 2e-3))


def test_nothing_is_kept_after_the_backward_pass() -> None:
    arrays = problem()
    with Meter() as meter:
        for function in FUNCTIONS:
            found = gradients(function, arrays)
            del found
        gc.collect()
        assert sum(meter.live.values()) == 0


@pytest.mark.parametrize("obstacle", [None, "Triton is not installed"])
def test_a_gpu_without_the_kernels_scales_gradients_by_pytorch(obstacle: str | None) -> None:
    with FakeTensorMode(), mock.patch.object(scaling, "triton_obstacle", return_value=obstacle):
        gradient, factor = torch.empty(4, 8, device="cuda"), torch.empty((), device="cuda")
        factors = scaling.Factors(factor, factor)
        assert scaling._scaled_by_kernel(Gradients(gradient, None, None), factors) == (obstacle is None)
        assert not scaling._scaled_by_kernel(Gradients(gradient.T, None, None), factors)


@pytest.mark.parametrize("results", [("log_prob",), ("entropy",), ("lse",), ("log_prob", "entropy")])
def test_log_probabilities_alone_take_the_gradients_of_losses_of_rows(results: tuple[str, ...]) -> None:
    arrays = problem()
    found = core_triton.linear_log_probs(arrays["input"], arrays["linear_weight"], arrays["target"])
    loss = torch.stack([getattr(found, name).sum() for name in results]).sum()
    with (
        mock.patch.object(ops, "run_row_gradients", wraps=ops.run_row_gradients) as of_rows,
        mock.patch.object(ops, "run_gradients", wraps=ops.run_gradients) as of_coefficients,
    ):
        loss.backward()
    assert of_rows.called == (results == ("log_prob",))
    assert of_coefficients.called == (results != ("log_prob",))
