"""Refuses the transforms of PyTorch that the loss does not support: those of torch.func, and forward-mode derivatives.

The gradients are computed beside the loss, in an autograd function without a rule for these transforms.
"""

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_functorch_wrapped_tensor
from torch.autograd import forward_ad

USE = "use torch.autograd.grad"
DIFFERENTIATES = TransformType.Grad, TransformType.Jvp


def check_transforms(name: str, tensor: Tensor) -> None:
    """Raises for a tensor of a transform, and for one that requires grad within a torch.func transform.

    The arguments of a compiled call do not show what they come from, so it raises within any torch.func transform and
    any level of forward mode. Where torch.compile then runs the function without compiling it, the tensors are checked.

    Raises:
        TypeError: the tensor is that of a torch.func transform, or cannot be differentiated within one.
        RuntimeError: it has a forward-mode tangent, or a compiled call may have one.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and is_functorch_wrapped_tensor(tensor):
        raise TypeError(f"{name} comes from a torch.func transform, which is not supported: {USE}")
    if torch._C._are_functorch_transforms_active():
        if compiling:
            raise TypeError(f"{name} may come from a torch.func transform, which is not supported: {USE}")
        if tensor.requires_grad and torch.is_grad_enabled():
            check_levels(name)
    if forward_ad._current_level < 0:
        return
    if compiling or forward_ad.unpack_dual(tensor).tangent is not None:
        tangent = "may have" if compiling else "has"
        raise RuntimeError(
            f"{name} {tangent} a forward-mode tangent, and the loss has no forward-mode derivative: {USE}"
        )


def check_levels(name: str) -> None:
    """Raises TypeError within a torch.func transform that differentiates, where autograd cannot run."""
    levels = get_interpreter_stack() if torch._C._are_functorch_transforms_active() else None
    if any(level.key() in DIFFERENTIATES for level in levels or ()):
        raise TypeError(f"{name} is not differentiated within a torch.func transform: {USE}")
