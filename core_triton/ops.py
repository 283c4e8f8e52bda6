"""The custom operators behind the public functions, with their fake implementations and backward formulas.

As operators of `torch.library` they are opaque to torch.compile, which therefore traces a model around them without a
graph break. Each is functional. Gradients that are not asked for come back as empty tensors: an operator's schema has
no optional results.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from core_triton import chunked, rows
from core_triton.problem import Gradients, NeedsGrad, Problem
from core_triton.rows import Coefficients
from linear_ce.spec import LossSpec

Backward = Callable[..., tuple[Tensor | None, ...]]

ARRAYS = 6  # input, linear_weight, linear_bias, target, row_weight, class_weight lead every operator's arguments
OPTIONS = 7
PIECE_BYTES = 2**24  # near the size of an L2 cache, and few launches for a large gradient


def _once(backward: Backward) -> Backward:
    """Refuses create_graph=True: the gradients are made without a graph, and a second derivative would be 0, unsaid."""

    @wraps(backward)
    def checked(ctx: Any, *d_outputs: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy and linear_log_probs have no second derivative: use create_graph=False"
            )
        return backward(ctx, *d_outputs)

    return checked


@torch.library.custom_op("linear_ce::loss_and_gradients", mutates_args=())
def loss_and_gradients(
    input: Tensor,  # (N, D)
    linear_weight: Tensor,  # (V, D)
    linear_bias: Tensor | None,  # (V,)
    target: Tensor,  # (N,) int64
    row_weight: Tensor,  # (N,) float32
    class_weight: Tensor | None,  # (K,) float32
    label_smoothing: float,
    z_loss_weight: float,
    softcap: float | None,
    logit_scale: float,
    vocab_size: int,
    memory_budget: int,
    implementation: str,
    statistics: bool,
    reduce: bool,
    d_input: bool,
    d_weight: bool,
    d_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Plan A. Returns loss (() if `reduce`, else (N,)), lse, target_logit, max (N,), d_input, d_weight, d_bias,
    scales (2,).

    Without `statistics` max may be inf. The gradients are those of the sum of the rows' losses times a power of two,
    scales[0] for d_input and scales[1] for the head's, which is 1 unless input is float16. Without `reduce` only
    d_input may be asked for.
    """
    problem, needs_grad = _problem(locals()), NeedsGrad(d_input, d_weight, d_bias)
    with _plain(input):
        scales = _saved_scales(problem)
        loss, found, gradients = _plans(implementation).loss_and_gradients(
            problem, memory_budget, needs_grad, (scales[0], scales[1]), statistics=statistics
        )
        return (
            loss.sum() if reduce else loss,
            found.lse,
            found.target_logit,
            found.max,
            *_or_empty(gradients, input),
            scales,
        )


@loss_and_gradients.register_fake
def _(input, linear_weight, linear_bias, target, row_weight, *options):
    *_, reduce, d_input, d_weight, d_bias = options
    row = torch.empty_like(row_weight)
    return (
        row.new_empty(()) if reduce else row,
        torch.empty_like(row),
        torch.empty_like(row),
        torch.empty_like(row),
        *_fake_gradients(input, linear_weight, linear_bias, NeedsGrad(d_input, d_weight, d_bias)),
        row.new_empty(2),
    )


def _loss_and_gradients_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs_grad = inputs[-3:]
    ctx.scaled = inputs[0].dtype == torch.float16
    ctx.reduce = inputs[-4]
    ctx.memory_budget = inputs[ARRAYS + 5]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[4], *output[4:])


@_once
def _loss_and_gradients_backward(ctx: Any, d_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    row_weight, d_input, d_weight, d_bias, scales = ctx.saved_tensors
    results: list[Tensor | None] = [None] * (ARRAYS + OPTIONS + 5)
    if d_loss is None:
        return tuple(results)
    if not ctx.reduce:  # only d_input was made; a row that does not contribute takes nothing from any upstream gradient
        d_loss = torch.where(row_weight != 0, d_loss, 0.0)[:, None]
    for index, (needs_grad, saved, scale) in enumerate(
        zip(ctx.needs_grad, (d_input, d_weight, d_bias), (scales[0], scales[1], scales[1]), strict=True)
    ):
        if needs_grad:
            results[index] = _scaled(saved, d_loss / scale if ctx.scaled else d_loss, ctx.memory_budget)
    return tuple(results)


loss_and_gradients.register_autograd(_loss_and_gradients_backward, setup_context=_loss_and_gradients_context)


def _scaled(saved: Tensor, factor: Tensor, memory_budget: int) -> Tensor:
    """Returns saved * factor: in place where no second backward pass can come, else in a new tensor."""
    traced = type(saved) is not Tensor or torch.compiler.is_compiling()
    if traced or torch._C._autograd._get_current_graph_task_keep_graph():  # pyright: ignore[reportAttributeAccessIssue]
        return scaled(saved, factor, memory_budget)
    scale_(saved, factor, memory_budget)
    return saved


@torch.library.custom_op("linear_ce::scaled", mutates_args=())
def scaled(gradient: Tensor, factor: Tensor, memory_budget: int) -> Tensor:
    """Returns gradient * factor, rounded once; `factor` is () or (N, 1) float32 on the device."""
    result = gradient.clone()
    _scale_in_place(result, factor, memory_budget)
    return result


@scaled.register_fake
def _(gradient, factor, memory_budget):
    return torch.empty_like(gradient)


@torch.library.custom_op("linear_ce::scale_", mutates_args=("gradient",))
def scale_(gradient: Tensor, factor: Tensor, memory_budget: int) -> None:
    """Multiplies gradient by factor, rounded once."""
    _scale_in_place(gradient, factor, memory_budget)


def _scale_in_place(gradient: Tensor, factor: Tensor, memory_budget: int) -> None:
    if factor.ndim == 0 and factor.device.type == "cpu" and factor.item() == 1.0:
        return  # a plain loss.backward(); on a GPU the kernel sees it: reading it here would wait for the device
    if factor.ndim == 0 and gradient.is_cuda and gradient.is_contiguous():
        _launch_scale(gradient, factor)
        return
    if gradient.dtype == torch.float32:
        gradient *= factor
        return
    # PyTorch would round a 16-bit tensor's factor first: multiply float32 pieces.
    pieces = max(1, -(-4 * gradient.numel() // min(PIECE_BYTES, max(memory_budget // 2, 1))))
    factors = [factor] * pieces if factor.ndim == 0 else factor.tensor_split(pieces)
    for piece, piece_factor in zip(gradient.tensor_split(pieces), factors, strict=True):
        piece.copy_(piece.float().mul_(piece_factor))


def _launch_scale(gradient: Tensor, factor: Tensor) -> None:
    from core_triton import row_kernels  # Triton is not on every machine that has PyTorch

    block = 4096  # 16 elements a thread: 16-byte accesses
    if gradient.numel():
        programs = 16 * torch.cuda.get_device_properties(gradient.device).multi_processor_count
        launch: Any = row_kernels.scale_kernel[(min(programs, -(-gradient.numel() // block)),)]
        with torch.cuda.device(gradient.device):
            launch(gradient, factor, gradient.numel(), BLOCK=block, num_warps=8)


@torch.library.custom_op("linear_ce::row_losses", mutates_args=())
def row_losses(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    row_weight: Tensor,
    class_weight: Tensor | None,
    label_smoothing: float,
    z_loss_weight: float,
    softcap: float | None,
    logit_scale: float,
    vocab_size: int,
    memory_budget: int,
    implementation: str,
    statistics: bool,
    d_input: bool,
    d_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plan B, and plan C's forward pass. Returns weighted loss, lse, target_logit and max of each row, (N,) float32.

    Without `statistics` max may be inf. `d_input` and `d_weight` say which gradients a backward pass will make: the
    budget must hold it too.
    """
    problem = _problem(locals())
    with _plain(input):
        plans = _plans(implementation)
        plans.check_budget(problem, memory_budget, NeedsGrad(d_input, d_weight, False))
        loss, found = plans.losses(problem, memory_budget, statistics=statistics)
        return loss, found.lse, found.target_logit, found.max


@row_losses.register_fake
def _(input, linear_weight, linear_bias, target, row_weight, *options):
    return tuple(torch.empty_like(row_weight) for _ in range(4))


def _row_losses_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.options = inputs[ARRAYS : ARRAYS + OPTIONS]
    ctx.save_for_backward(*inputs[:ARRAYS], output[1])


@_once
def _row_losses_backward(ctx: Any, d_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if d_loss is None:
        return (None,) * (ARRAYS + OPTIONS + 3)
    *arrays, lse = ctx.saved_tensors
    target, row_weight, class_weight = arrays[3:]
    label_smoothing, z_loss_weight, softcap, logit_scale, vocab_size, *_rest = ctx.options
    spec = LossSpec("sum", 0, label_smoothing, z_loss_weight, softcap, logit_scale)
    upstream = torch.where(row_weight != 0, d_loss * row_weight, 0.0)
    coefficients = rows.loss_coefficients(spec, lse, target, upstream, class_weight, vocab_size)
    return (*_recomputed(ctx, arrays, lse, coefficients), None)


row_losses.register_autograd(_row_losses_backward, setup_context=_row_losses_context)


@torch.library.custom_op("linear_ce::log_probs", mutates_args=())
def log_probs(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    row_weight: Tensor,
    class_weight: Tensor | None,
    label_smoothing: float,
    z_loss_weight: float,
    softcap: float | None,
    logit_scale: float,
    vocab_size: int,
    memory_budget: int,
    implementation: str,
    d_input: bool,
    d_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plan C's forward pass for log-probabilities. Returns log_prob, entropy and lse of each row, (N,) float32.

    `d_input` and `d_weight` as in `row_losses`.
    """
    problem = _problem(locals())
    with _plain(input):
        plans = _plans(implementation)
        plans.check_budget(problem, memory_budget, NeedsGrad(d_input, d_weight, False), entropy=True)
        statistics = plans.statistics(problem, memory_budget, entropy=True)
        assert statistics.entropy is not None
        return statistics.target_logit - statistics.lse, statistics.entropy, statistics.lse


@log_probs.register_fake
def _(input, linear_weight, linear_bias, target, row_weight, *options):
    return tuple(torch.empty_like(row_weight) for _ in range(3))


def _log_probs_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options = inputs[ARRAYS : ARRAYS + OPTIONS]
    ctx.save_for_backward(*inputs[:ARRAYS], *output[1:])


@_once
def _log_probs_backward(ctx: Any, d_log_prob: Tensor, d_entropy: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    *arrays, entropy, lse = ctx.saved_tensors
    target, vocab_size = arrays[3], ctx.options[4]
    coefficients = rows.log_prob_coefficients(entropy, target, d_log_prob, d_entropy, d_lse, vocab_size)
    return _recomputed(ctx, arrays, lse, coefficients)


log_probs.register_autograd(_log_probs_backward, setup_context=_log_probs_context)


def _recomputed(ctx: Any, arrays: list[Any], lse: Tensor, coefficients: Coefficients) -> tuple[Tensor | None, ...]:
    """Plan C's backward pass: the gradients of the arguments of an operator with `ctx.options`."""
    needs_grad = ctx.needs_input_grad[:3]
    found = recomputed_gradients(*arrays, lse, *coefficients, *ctx.options, *needs_grad)
    given = tuple(gradient if want else None for gradient, want in zip(found, needs_grad, strict=True))
    return given + (None,) * (ARRAYS - 3 + OPTIONS + 2)


@torch.library.custom_op("linear_ce::recomputed_gradients", mutates_args=())
def recomputed_gradients(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    row_weight: Tensor,
    class_weight: Tensor | None,
    lse: Tensor,
    alpha: Tensor,
    tau: Tensor,
    beta: Tensor | None,
    sigma: Tensor | None,
    label_smoothing: float,
    z_loss_weight: float,
    softcap: float | None,
    logit_scale: float,
    vocab_size: int,
    memory_budget: int,
    implementation: str,
    d_input: bool,
    d_weight: bool,
    d_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plan C's backward pass. Returns d_input, d_weight, d_bias for the rows' `rows.Coefficients`."""
    problem, needs_grad = _problem(locals()), NeedsGrad(d_input, d_weight, d_bias)
    with _plain(input):
        coefficients = Coefficients(alpha, tau, beta, sigma)
        found = _plans(implementation).gradients(problem, memory_budget, lse, coefficients, needs_grad)
        return _or_empty(found, input)


@recomputed_gradients.register_fake
def _(input, linear_weight, linear_bias, *others):
    return _fake_gradients(input, linear_weight, linear_bias, NeedsGrad(*others[-3:]))


@contextmanager
def _plain(input: Tensor) -> Iterator[None]:
    """Inside an operator products run in the dtypes that it chose, whatever autocast surrounds the call, and sum in
    float32 throughout: PyTorch lets cuBLAS add up the parts of a split product in 16 bits unless told otherwise."""
    switches = torch.backends.cuda.matmul
    before = switches.allow_bf16_reduced_precision_reduction, switches.allow_fp16_reduced_precision_reduction
    try:
        switches.allow_bf16_reduced_precision_reduction = switches.allow_fp16_reduced_precision_reduction = False
        with torch.autocast(input.device.type, enabled=False):
            yield
    finally:
        switches.allow_bf16_reduced_precision_reduction, switches.allow_fp16_reduced_precision_reduction = before


def _plans(implementation: str) -> ModuleType:
    """Returns the module that carries out an implementation's plans: A `loss_and_gradients`, B `losses` and
    `statistics`, C `gradients`, and `check_budget`."""
    if implementation == "chunked":
        return chunked
    from core_triton import fused  # Triton is not on every machine that has PyTorch

    return fused


def _problem(arguments: dict[str, Any]) -> Problem:
    options = {name: arguments[name] for name in ("label_smoothing", "z_loss_weight", "softcap", "logit_scale")}
    arrays = {
        name: arguments[name]
        for name in ("input", "linear_weight", "linear_bias", "target", "row_weight", "class_weight")
    }
    return Problem(**arrays, spec=LossSpec("sum", **options), classes=arguments["vocab_size"])


def _saved_scales(problem: Problem) -> Tensor:
    """Returns (2,) float32: what float16 gradients are multiplied by until the upstream gradient is known."""
    if problem.input.dtype != torch.float16:
        return problem.row_weight.new_ones(2)
    return torch.stack(rows.saved_scales(problem.row_weight))


def _or_empty(found: Gradients, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d_input, d_weight, d_bias = (input.new_empty(0) if gradient is None else gradient for gradient in found)
    return d_input, d_weight, d_bias


def _fake_gradients(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, needs_grad: NeedsGrad
) -> tuple[Tensor, Tensor, Tensor]:
    d_input, d_weight, d_bias = (
        torch.empty_like(like, memory_format=torch.contiguous_format)
        if want and like is not None
        else input.new_empty(0)
        for like, want in zip((input, linear_weight, linear_bias), needs_grad, strict=True)
    )
    return d_input, d_weight, d_bias
