"""PyTorch methods: the floor, ours, our baseline, and other libraries, which are imported only when measured."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.data import BETA, EPSILON_HIGH, EPSILON_LOW
from benchmarks.methods import Method, UnavailableError, by_name, load, our_loss
from benchmarks.shapes import OBJECTIVES, Mode

LossFn = Callable[..., Tensor]  # (input, linear_weight, target, *per_token)

LIGER_ROWS = 1024  # of a chunk of Liger's token loss


def grpo(log_prob: Tensor, advantage: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Returns the GRPO loss (N,) of each token, with the formula of trl 1.16."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = torch.clamp(ratio, 1 - EPSILON_LOW, 1 + EPSILON_HIGH)
    kl = torch.exp(ref_log_prob - log_prob) - (ref_log_prob - log_prob) - 1
    return BETA * kl - torch.min(ratio * advantage, clipped * advantage)


def _of_log_probs(log_prob: Tensor, mode: Mode, *per_token: Tensor) -> Tensor:
    """Returns the mean token loss, or the log-probabilities (N,) themselves."""
    return grpo(log_prob, *per_token).mean() if mode.objective.name == "token-loss" else log_prob


def _of_logits(logits: Tensor, y: Tensor, mode: Mode, *per_token: Tensor) -> Tensor:
    """Returns what a mode computes of logits (N, V), in float32."""
    logits, objective = logits.float(), mode.objective
    if objective.temperature != 1:
        logits = logits / objective.temperature
    if objective.name == "cross-entropy":
        return F.cross_entropy(logits, y, reduction=mode.reduction, label_smoothing=objective.label_smoothing)
    return _of_log_probs(-F.cross_entropy(logits, y, reduction="none"), mode, *per_token)


def _floor(mode: Mode) -> LossFn:
    raise UnavailableError("the floor computes no loss")


def _core_triton(implementation: str) -> Callable[[Mode], LossFn]:
    return partial(our_loss, "core_triton", implementation)


def _eager(mode: Mode) -> LossFn:
    def loss(x: Tensor, w: Tensor, y: Tensor, *per_token: Tensor) -> Tensor:
        return _of_logits(F.linear(x, w), y, mode, *per_token)

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
    def loss(x: Tensor, w: Tensor, y: Tensor, *per_token: Tensor) -> Tensor:
        logits = _Float32Logits.apply(x, w)
        assert isinstance(logits, Tensor)
        return _of_logits(logits, y, mode, *per_token)

    return loss


def _compiled(mode: Mode) -> LossFn:
    torch._dynamo.reset()  # every shape compiles as if it were the first
    return torch.compile(_eager(mode), dynamic=False)


def _torch_linear_cross_entropy(mode: Mode) -> LossFn:
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise UnavailableError(f"torch {torch.__version__} has no F.linear_cross_entropy")

    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return function(x, w, y, reduction=mode.reduction, label_smoothing=mode.objective.label_smoothing)

    return loss


def _liger(chunk_mem_const: int) -> Callable[[Mode], LossFn]:
    def build(mode: Mode) -> LossFn:
        liger = load("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy

        def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            smoothing = mode.objective.label_smoothing
            return liger(x, w, y, label_smoothing=smoothing, reduction=mode.reduction, chunk_mem_const=chunk_mem_const)

        return loss

    return build


def _liger_grpo(mode: Mode) -> LossFn:
    """Liger's advantages are those of sequences. Here every token is a sequence, so that it has its own advantage."""
    fused = load("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(
        beta=BETA,
        epsilon_low=EPSILON_LOW,
        epsilon_high=EPSILON_HIGH,
        temperature=mode.objective.temperature,
        chunk_size=LIGER_ROWS,
    )

    def loss(x: Tensor, w: Tensor, y: Tensor, advantage: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
        of_tokens = {"ref_per_token_logps": ref_log_prob[:, None], "old_per_token_logps": old_log_prob[:, None]}
        found, _ = fused(x[:, None], w, y[:, None], torch.ones_like(y)[:, None], advantage, **of_tokens)
        return found

    return loss


def _trl(mode: Mode) -> LossFn:
    """trl's log-probabilities in chunks, with its chunk size."""
    chunk_size = load("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE
    log_probs, temperature = load("trl.kernels").ChunkedLogProbFunction, mode.objective.temperature

    def loss(x: Tensor, w: Tensor, y: Tensor, *per_token: Tensor) -> Tensor:
        # No bias, no softcap, logit_scale 1, and no entropy
        log_prob, *_ = log_probs.apply(x, w, None, y, temperature, chunk_size, None, 1.0, ())
        return _of_log_probs(log_prob, mode, *per_token)

    return loss


def _verl(mode: Mode) -> LossFn:
    """verl's fused kernels, which compute the entropy too."""
    fused = load("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def loss(x: Tensor, w: Tensor, y: Tensor, *per_token: Tensor) -> Tensor:
        log_prob, _ = fused(x, w, y, mode.objective.temperature, "none")
        return _of_log_probs(log_prob, mode, *per_token)

    return loss


def _cut_cross_entropy(mode: Mode) -> LossFn:
    if mode.objective.label_smoothing:
        raise UnavailableError("cut-cross-entropy has no label smoothing")
    cut = load("cut_cross_entropy").linear_cross_entropy

    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return cut(x, w, y, reduction=mode.reduction, impl="cce")

    return loss


def _quack(chunk_size: int) -> Callable[[Mode], LossFn]:
    def build(mode: Mode) -> LossFn:
        if mode.reduction == "none":
            raise UnavailableError('quack\'s chunked loss has no reduction="none"')
        if mode.objective.label_smoothing:
            raise UnavailableError("quack's chunked loss has no label smoothing")
        chunked = load("quack.linear_cross_entropy").chunked_linear_cross_entropy

        def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            return chunked(x, w, y, chunk_size=chunk_size, reduction=mode.reduction)

        return loss

    return build


_ALL: dict[str, Any] = {"objectives": OBJECTIVES}
_LOG_PROBS: dict[str, Any] = {"objectives": ("log-probs", "token-loss")}

# In the order of measurement: our methods and the floor first, methods that may crash last.
METHODS = by_name(
    [
        Method("floor", "floor", _floor, takes_budget=True, host=True, **_ALL),
        Method("triton", "ours", _core_triton("triton"), takes_budget=True, host=True, grid=True, **_ALL),
        Method("triton_sm80", "own-baseline", _core_triton("triton_sm80"), takes_budget=True, only_named=True, **_ALL),
        Method("chunked", "own-baseline", _core_triton("chunked"), takes_budget=True, **_ALL),
        Method("eager", "peer", _eager, **_ALL),
        Method("eager-float32-logits", "peer", _eager_float32_logits, **_ALL),
        Method("torch.compile", "peer", _compiled, host=True, grid=True, **_ALL),
        Method("F.linear_cross_entropy", "peer", _torch_linear_cross_entropy),
        Method("liger", "peer", _liger(1), "liger-kernel"),
        Method("liger-8", "peer", _liger(8), "liger-kernel"),
        Method("liger-16", "peer", _liger(16), "liger-kernel"),
        Method("trl", "peer", _trl, "trl", **_LOG_PROBS),
        Method("liger-grpo", "peer", _liger_grpo, "liger-kernel", objectives=("token-loss",)),
        Method("verl", "peer", _verl, "verl", **_LOG_PROBS),
        Method("cut-cross-entropy", "peer", _cut_cross_entropy, "cut-cross-entropy"),
        Method("quack-2048", "peer", _quack(2048), "quack-kernels"),
        Method("quack-4096", "peer", _quack(4096), "quack-kernels"),
    ]
)
