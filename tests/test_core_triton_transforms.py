"""core_triton refuses transforms that would lose a derivative, also under torch.compile, which stays usable after an
error."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import core_triton
from core_triton import linear_cross_entropy, linear_log_probs, linear_token_loss, token_losses

# PyTorch loads its decompositions for forward mode, and looks at the gradients of all tensors that it compiles for.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

IN_A_TRANSFORM = "torch.func transform, which is not supported: use torch.autograd.grad"
NOT_WITHIN = "is not differentiated within a torch.func transform: use torch.autograd.grad"
NO_TANGENT = "forward-mode tangent, and the loss has no forward-mode derivative: use torch.autograd.grad"

X, W, TARGET = torch.linspace(-1, 1, 48).reshape(6, 8), torch.linspace(1, -2, 80).reshape(10, 8), torch.arange(6)


def loss_of(x: Tensor) -> Tensor:
    return linear_cross_entropy(x, W, TARGET)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", **options)


def tangent_of(function: Callable[[Tensor], Tensor], x: Tensor = X) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_transforms_are_refused(fullgraph: bool) -> None:
    """Within a compiled function no tensor shows its tangent, so that of the loss would be 0."""
    from torch._dynamo.exc import Unsupported  # takes two seconds

    for transformed in (
        lambda x: torch.func.jvp(loss_of, (x,), (x,)),
        torch.func.grad(loss_of),
        torch.func.vmap(lambda x: linear_log_probs(x[None], W, TARGET[:1]).log_prob),
    ):
        with pytest.raises((TypeError, Unsupported), match=IN_A_TRANSFORM):
            compiled(transformed, fullgraph=fullgraph)(X)


def test_a_tangent_is_refused_inside_and_outside_of_a_compiled_function() -> None:
    with pytest.raises(RuntimeError, match=f"input has a {NO_TANGENT}"):
        compiled(tangent_of, fullgraph=False)(loss_of)
    called = compiled(loss_of)
    expected = called(X)
    with pytest.raises(RuntimeError, match=f"input has a {NO_TANGENT}"):
        tangent_of(called)
    assert torch.equal(called(X), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_token_loss_may_not_close_over_what_a_transform_differentiates(reduction: Any) -> None:
    """The derivative with respect to it would be 0."""

    def scaled(factor: Tensor) -> Tensor:
        return linear_token_loss(X, W, TARGET, lambda log_prob: -log_prob * factor, reduction=reduction)

    with pytest.raises(RuntimeError, match=f"the result of token_loss has a {NO_TANGENT}"):
        tangent_of(scaled, torch.tensor(2.0))
    with pytest.raises(TypeError, match=f"the result of token_loss comes from a {IN_A_TRANSFORM}"):
        torch.func.vmap(scaled)(torch.ones(3))
    for transform in (torch.func.grad, torch.func.jacfwd):
        with pytest.raises(TypeError, match=f"token_loss {NOT_WITHIN}"):
            transform(scaled)(torch.tensor(2.0))


def test_a_loss_of_constants_works_within_a_transform() -> None:
    """Such as the log-probabilities of a frozen model. A constant that requires grad could not be differentiated."""
    expected = linear_log_probs(X, W, TARGET).log_prob.sum()

    def of_a_factor(factor: Tensor) -> Tensor:
        return factor * linear_log_probs(X, W, TARGET).log_prob.sum()

    assert torch.equal(torch.func.grad(of_a_factor)(torch.tensor(2.0)), expected)
    assert torch.equal(torch.func.jvp(of_a_factor, (torch.tensor(2.0),), (torch.tensor(1.0),))[1], expected)
    assert torch.equal(torch.func.vmap(lambda factor: loss_of(X) * factor)(torch.ones(3)), loss_of(X).expand(3))
    x = X.clone().requires_grad_()
    with pytest.raises(TypeError, match=f"input {NOT_WITHIN}"):
        torch.func.grad(lambda factor: loss_of(x) * factor)(torch.tensor(2.0))
    without = torch.no_grad()(loss_of)
    assert torch.equal(torch.func.grad(lambda factor: without(x) * factor)(torch.tensor(2.0)), loss_of(X))


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, w: linear_cross_entropy(x, w, TARGET),
    "log_probs": lambda x, w: linear_log_probs(x, w, TARGET, saved_budget=2**20).log_prob,
    "token_loss": lambda x, w: linear_token_loss(x, w, TARGET, token_losses.weighted_nll(), torch.ones(6)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_works_after_one_that_was_wrong(name: str) -> None:
    """PyTorch then compiles the functions that the call consists of one by one."""
    called = compiled(CALLS[name])
    with pytest.raises(ValueError, match="target must have shape"):
        called(X[:5], W)
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    found = torch.autograd.grad(called(x, w).sum(), (x, w))
    torch.testing.assert_close(found, torch.autograd.grad(CALLS[name](x, w).sum(), (x, w)))


def test_a_function_of_ones_own_is_not_exported() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
            return linear_token_loss(x, w, target, lambda log_prob: -log_prob)

    with pytest.raises(RuntimeError, match=r"torch\.export cannot export this call: .* not one of core_triton\."):
        torch.export.export(Model(), (X, W, TARGET), strict=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input": torch.ones(6, 8, dtype=torch.int64)}, "input must be float16 or bfloat16 or float32, got int64"),
        ({"input": torch.complex(X, X)}, "input must be float16 or bfloat16 or float32, got complex64"),
        ({"input": X.double(), "linear_weight": W.double()}, "input must be float16 .*, got float64"),
        ({"linear_weight": W.int()}, "linear_weight must be bfloat16 or float32, got int32"),
        ({"linear_bias": torch.ones(10, dtype=torch.bool)}, "linear_bias must be bfloat16 or float32, got bool"),
    ],
)
def test_autocast_does_not_hide_a_wrong_dtype(arguments: dict[str, Tensor], message: str) -> None:
    given: dict[str, Any] = {"input": X, "linear_weight": W, "target": TARGET} | arguments
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=message):
        linear_cross_entropy(**given)


def test_targets_beyond_int64_are_no_classes_and_not_ignored() -> None:
    target = torch.full((6,), 2**64 - 100, dtype=torch.uint64)  # as int64 it is -100
    assert linear_cross_entropy(X, W, target).isnan()
    for ignore_index in (-100, -1):
        with pytest.raises(ValueError, match=re.escape("target[0] = 18446744073709551516")):
            core_triton.check_targets(target, 10, ignore_index)
    small = TARGET.to(torch.uint64)
    assert torch.equal(linear_cross_entropy(X, W, small), loss_of(X))
