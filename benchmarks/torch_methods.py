"""PyTorch methods: the floor, ours, our baseline, and other libraries, which are imported only when measured."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.methods import Method, UnavailableError, by_name, load
from benchmarks.shapes import Mode

LossFn = Callable[[Tensor, Tensor, Tensor], Tensor]


def _floor(mode: Mode) -> LossFn:
    raise UnavailableError("the floor computes no loss")


def _core_triton(implementation: str) -> Callable[[Mode], LossFn]:
    def build(mode: Mode) -> LossFn:
        import core_triton
        from core_triton.linear_ce import IMPLEMENTATIONS

        if implementation not in IMPLEMENTATIONS:
            raise UnavailableError(f"core_triton has no implementation {implementation!r} yet")

        def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            return core_triton.linear_cross_entropy(
                x,
                w,
                y,
                reduction=mode.reduction,  # pyright: ignore[reportArgumentType]
                memory_budget=mode.memory_budget,
                implementation=implementation,
            )

        return loss

    return build


def _eager(mode: Mode) -> LossFn:
    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), y, reduction=mode.reduction)

    return loss


class _Float32Logits(torch.autograd.Function):
    """x @ w.T in float32 from 16-bit operands; the backward pass rounds d_logits to the dtype of the operands."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        if x.device.type == "cuda" and x.dtype != torch.float32:
            return torch.mm(x, w.T, out_dtype=torch.float32)  # pyright: ignore[reportCallIssue]
        return x.float() @ w.float().T

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        d_logits = grad_outputs[0].to(x.dtype)
        d_input = d_logits @ w if ctx.needs_input_grad[0] else None
        d_weight = d_logits.T @ x if ctx.needs_input_grad[1] else None
        return d_input, d_weight


def _eager_float32_logits(mode: Mode) -> LossFn:
    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        logits = _Float32Logits.apply(x, w)
        assert isinstance(logits, Tensor)
        return F.cross_entropy(logits, y, reduction=mode.reduction)

    return loss


def _compiled(mode: Mode) -> LossFn:
    torch._dynamo.reset()  # every shape compiles as if it were the first
    return torch.compile(_eager(mode), dynamic=False)


def _torch_linear_cross_entropy(mode: Mode) -> LossFn:
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise UnavailableError(f"torch {torch.__version__} has no F.linear_cross_entropy")

    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return function(x, w, y, reduction=mode.reduction)

    return loss


def _liger(chunk_mem_const: int) -> Callable[[Mode], LossFn]:
    def build(mode: Mode) -> LossFn:
        liger = load("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy

        def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            return liger(x, w, y, reduction=mode.reduction, chunk_mem_const=chunk_mem_const)

        return loss

    return build


def _cut_cross_entropy(mode: Mode) -> LossFn:
    cut = load("cut_cross_entropy").linear_cross_entropy

    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return cut(x, w, y, reduction=mode.reduction, impl="cce")

    return loss


def _quack(chunk_size: int) -> Callable[[Mode], LossFn]:
    def build(mode: Mode) -> LossFn:
        if mode.reduction == "none":
            raise UnavailableError('quack\'s chunked loss has no reduction="none"')
        chunked = load("quack.linear_cross_entropy").chunked_linear_cross_entropy

        def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            return chunked(x, w, y, chunk_size=chunk_size, reduction=mode.reduction)

        return loss

    return build


# In the order of measurement: our methods and the floor first, methods that may crash last.
METHODS = by_name(
    [
        Method("floor", "floor", _floor, takes_budget=True, host=True),
        Method("triton", "ours", _core_triton("triton"), takes_budget=True, host=True, grid=True),
        Method("triton_sm80", "own-baseline", _core_triton("triton_sm80"), takes_budget=True),
        Method("chunked", "own-baseline", _core_triton("chunked"), takes_budget=True),
        Method("eager", "peer", _eager),
        Method("eager-float32-logits", "peer", _eager_float32_logits),
        Method("torch.compile", "peer", _compiled, host=True, grid=True),
        Method("F.linear_cross_entropy", "peer", _torch_linear_cross_entropy),
        Method("liger", "peer", _liger(1), "liger-kernel"),
        Method("liger-8", "peer", _liger(8), "liger-kernel"),
        Method("liger-16", "peer", _liger(16), "liger-kernel"),
        Method("cut-cross-entropy", "peer", _cut_cross_entropy, "cut-cross-entropy"),
        Method("quack-2048", "peer", _quack(2048), "quack-kernels"),
        Method("quack-4096", "peer", _quack(4096), "quack-kernels"),
    ]
)
