"""The backward pass of gradients that the forward pass computed: they are multiplied by the upstream gradient."""

from typing import NamedTuple

import torch
from torch import Tensor

from core_triton.device import triton_obstacle
from core_triton.groups import grouped
from core_triton.problem import Gradients

PIECE_BYTES = 2**24  # near the size of an L2 cache, and few launches for a large gradient


class Factors(NamedTuple):
    """The factors of the saved gradients, () or (N, 1) float32 on their device."""

    input: Tensor
    head: Tensor

    def of(self, gradients: Gradients) -> list[tuple[Tensor | None, Tensor]]:
        """Returns each gradient with its factor."""
        return list(zip(gradients, (self.input, self.head, self.head), strict=True))


def scaled(saved: Gradients, factors: Factors, memory_budget: int) -> Gradients:
    """Returns saved * factors: in place if no second backward pass can follow, otherwise in new tensors."""
    traced = any(one is not None and type(one) is not Tensor for one in saved) or torch.compiler.is_compiling()
    if traced or torch._C._autograd._get_current_graph_task_keep_graph():  # pyright: ignore[reportAttributeAccessIssue]
        found = torch.ops.linear_ce.scaled(*factors, *saved, memory_budget)
        return grouped(Gradients, found, [one is not None for one in saved])
    scale(saved, factors, saved, memory_budget)
    return saved


def scale(saved: Gradients, factors: Factors, results: Gradients, memory_budget: int) -> None:
    """Writes saved * factors, rounded once, to results, which may be the saved ones."""
    if _scaled_by_kernel(saved, factors):
        from core_triton import launch, replay, row_kernels  # Triton is not on every machine that has PyTorch

        def run() -> tuple[None, ...]:
            row_kernels.scale(saved, factors.input, factors.head, results)
            return ()

        device = factors.input.device
        if torch._C._len_torch_dispatch_stack():
            with launch.on_device(device):
                run()
        else:
            new = () if results is saved else results
            head = None if factors.head is factors.input else factors.head
            replay.call("scale", device, (*saved, factors.input, head, *new), run)
        return
    for (one, factor), result in zip(factors.of(saved), results, strict=True):
        if one is not None and result is not None:
            _scale_one(one, factor, result, memory_budget)


def _scaled_by_kernel(saved: Gradients, factors: Factors) -> bool:
    """Whether `row_kernels.scale` can scale the gradients, which are on their factors' device."""
    factor = factors.input
    if factor.ndim or not factor.is_cuda or triton_obstacle(factor.device) is not None:
        return False
    return all(one is None or one.is_contiguous() for one in saved)


def _scale_one(gradient: Tensor, factor: Tensor, result: Tensor, memory_budget: int) -> None:
    if factor.ndim == 0 and factor.device.type == "cpu" and factor.item() == 1.0:  # a plain loss.backward()
        if result is not gradient:
            result.copy_(gradient)
        return
    if gradient.dtype == torch.float32:
        torch.mul(gradient, factor, out=result)
        if factor.ndim:
            result.masked_fill_(factor == 0, 0.0)
        return
    # PyTorch would round a 16-bit tensor's factor first: multiply float32 pieces.
    pieces = max(1, -(-4 * gradient.numel() // min(PIECE_BYTES, max(memory_budget // 2, 1))))
    factors = [factor] * pieces if factor.ndim == 0 else factor.tensor_split(pieces)
    split = gradient.tensor_split(pieces), factors, result.tensor_split(pieces)
    for piece, piece_factor, result_piece in zip(*split, strict=True):
        scaled_piece = piece.float().mul_(piece_factor)
        # A row of NaN whose upstream gradient is 0 has a zero gradient, as where it is computed in the backward pass.
        result_piece.copy_(scaled_piece.masked_fill_(piece_factor == 0, 0.0) if factor.ndim else scaled_piece)
