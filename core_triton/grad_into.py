"""`grad_into`: the float32 tensor of the caller that the gradient of the head is added to.

Megatron-LM's linear layers add weight gradients to `weight.main_grad` in the backward pass, where the upstream gradient
is known. A loss that computes its gradients in the forward pass (plan A, `ops.py`) adds them there. To add them in the
backward pass it would keep a second (V, D) buffer, which grad_into is to save, or compute the logits again, a fourth
matmul. So plan A assumes an upstream gradient of 1, as in `loss.backward()`, and the backward pass checks it.
"""

import torch
from torch import Tensor

_OTHER_WAY = 'scale the loss by normalizer or token_weight, or use reduction "none" and reduce its result'


def check_grad_into(
    grad_into: Tensor | None, input: Tensor, linear_weight: Tensor, *, explains: bool = False
) -> Tensor | None:
    """Checks what `check_arrays` does not; returns a grad_into, or None where no gradient is computed. `explains`: the
    head need not require grad, because there is no call."""
    if grad_into is None:
        return None
    for name, tensor in (("grad_into", grad_into), ("input", input), ("linear_weight", linear_weight)):
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"grad_into needs plain tensors, and {name} is a {type(tensor).__name__}")
    for name, tensor in (("input", input), ("linear_weight", linear_weight)):
        if not torch.compiler.is_compiling() and _overlap(grad_into, tensor):
            raise ValueError(f"grad_into must have memory of its own, and shares it with {name}")
    if not grad_into.is_contiguous():
        raise ValueError(f"grad_into must be contiguous, got strides {grad_into.stride()}")
    if explains or not torch.is_grad_enabled():
        return None
    if not torch.compiler.is_compiling() and grad_into.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError("grad_into must be made outside of torch.inference_mode, got an inference tensor")
    if not linear_weight.requires_grad:
        raise ValueError("grad_into must be None for a linear_weight that does not require grad")
    return grad_into


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory of two tensors, from the first to the last element, has bytes in common."""
    if not (a.numel() and b.numel() and torch._C._is_alias_of(a, b)):  # pyright: ignore[reportAttributeAccessIssue]
        return False
    starts = [one.storage_offset() * one.itemsize for one in (a, b)]
    lengths = [
        (1 + sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))) * one.itemsize
        for one in (a, b)
    ]
    return starts[0] < starts[1] + lengths[1] and starts[1] < starts[0] + lengths[0]


class AddsOnce:
    """The addition of d_weight to `grad_into` in the forward pass of one call, where that computes the gradients.

    A forward pass adds once, whatever follows, so it assumes one backward pass with an upstream gradient of 1. `check`
    finds out without waiting for the device. Where the backward pass computes the gradients, it adds them, as autograd
    does, and nothing needs a check.
    """

    def __init__(self, grad_into: Tensor | None) -> None:
        self.grad_into, self.done = grad_into, False
        # Activation checkpointing computes the forward pass again where autograd reads saved tensors.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
        if grad_into is not None and hooks(True):
            raise RuntimeError(
                "grad_into cannot be added to in the forward pass under hooks of saved tensors, such as those of "
                f"activation checkpointing, which may run that pass again: {_OTHER_WAY}"
            )

    def check(self, d_loss: Tensor | None) -> None:
        """Raises, with a `grad_into`, if this is not the first backward pass, or if the upstream gradient is not 1. On
        a GPU the latter is a device-side assertion."""
        if self.grad_into is None:
            return
        if self.done:
            raise RuntimeError("grad_into allows one backward pass for each call, got a second one")
        self.done = True
        one = torch.zeros(()) if d_loss is None else d_loss
        torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
            one == 1,
            "grad_into was added to in the forward pass, for an upstream gradient of 1, and the gradient of the "
            f"loss is another number: {_OTHER_WAY}",
        )
