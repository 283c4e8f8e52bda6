"""The fused loss in Megatron-core: `output_processor()`, for `GPTModel.forward(output_processor=...)`.

`GPTModel` gives its output processor the hidden states, the output layer and the labels, and returns what that returns:
here the losses of the tokens, as `compute_language_model_loss` of the logits. The output layer is called with the loss
in place of its matmul, so hooks run, such as those that wait for a parameter of the distributed optimizer.

The interfaces are those of megatron-core 0.19.2:

    megatron/core/models/gpt/gpt_model.py                          `GPTModel.forward` and `_postprocess`
    megatron/core/models/common/language_module/language_module.py `compute_language_model_loss`, `_scale_logits`
    megatron/core/tensor_parallel/layers.py                        `ColumnParallelLinear`, and what its backward pass
                                                                   does for `gradient_accumulation_fusion`
    megatron/core/distributed/distributed_data_parallel.py         what `DistributedDataParallel` does with main_grad
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core_triton.gathered_tokens import gathered_tokens
from core_triton.hosts.interface import OPTIONS, call_with_forward, check_options, check_version
from core_triton.linear_ce import linear_cross_entropy

__all__ = ["output_processor"]

TESTED_VERSIONS = ("0.19.2",)
IGNORED = -100


def output_processor(**options: Any) -> Callable[..., Tensor]:
    """Returns an output processor of `GPTModel` that computes the loss of its tokens with `linear_cross_entropy`.

    The logits are neither stored nor gathered. With tensor parallelism each rank has its classes (`vocab_group`), and
    with sequence parallelism the hidden states of all ranks are gathered once. With `gradient_accumulation_fusion` the
    gradient of the output layer is added to `weight.main_grad` (`grad_into`). The gradients take four matmuls, because
    Megatron multiplies the loss of each token later. With enough `saved_budget` they take three.

    Args:
        options: implementation, memory_budget, head_precision, batch_invariant, saved_budget and reduce_dtype of
            `linear_cross_entropy`.

    Returns:
        A function for the argument `output_processor` of `GPTModel.forward` and `build_schedule_plan`. It returns the
        losses (batch, sequence), float32. Where loss_mask is 0, the loss is 0, and so it is for the label -100.

    Raises:
        ImportError: megatron-core is not installed.
        RuntimeError: a version of megatron-core that was not tested.
        TypeError: an unknown option.
        ValueError: the value of an option; when it is called, for a model that is not supported. The message names the
            option.

    Example:
        >>> from core_triton.hosts.megatron import output_processor  # doctest: +SKIP
        >>> processor = output_processor()  # doctest: +SKIP
        >>> losses = model(tokens, position_ids, mask, labels=labels, output_processor=processor)  # doctest: +SKIP
    """
    try:
        from megatron.core import __version__  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{__name__} needs megatron-core: pip install megatron-core==0.19.2") from error
    check_version(__name__, "megatron-core", __version__, TESTED_VERSIONS)
    check_options(options, (*OPTIONS, "saved_budget", "reduce_dtype"))

    def processor(
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        config: Any,
        **unused: Any,
    ) -> Tensor:
        """Returns the losses (b, s) of hidden_states (s, b, h), or (s / ranks, b, h) with sequence parallelism."""
        if labels is None:
            raise ValueError("labels must be given with this output_processor: call the model without it for logits")
        weight = output_layer.weight if output_weight is None else output_weight
        _check_supported(output_layer, weight, config)
        target = labels if loss_mask is None else torch.where(loss_mask == 0, IGNORED, labels)

        def forward(hidden: Tensor) -> Tensor:
            given = {**options, **_parallelism(output_layer), "logit_scale": _logit_scale(config)}
            if output_layer.sequence_parallel:
                sequence, batch = hidden.shape[:2]
                gathered = gathered_tokens(hidden, output_layer.tp_group, sequence * batch, 2, 0.0)
                hidden = gathered.view(-1, batch, gathered.shape[-1])
            needs_grad = weight.requires_grad and torch.is_grad_enabled()
            if output_layer.gradient_accumulation_fusion and needs_grad:
                given["grad_into"] = _main_grad(weight)
                hidden = _InMainGrad.apply(hidden, weight)
            bias = None if output_layer.skip_bias_add else output_layer.bias
            order = target.transpose(0, 1)  # as hidden states
            return linear_cross_entropy(hidden, weight, order, linear_bias=bias, reduction="none", **given)

        losses: Tensor = call_with_forward(output_layer, forward, hidden_states)
        return losses.transpose(0, 1).contiguous()

    return processor


def _check_supported(output_layer: Any, weight: Tensor, config: Any) -> None:
    """Checks that the output layer is a matmul, and that no option changes how its gradients are computed."""
    from megatron.core.tensor_parallel import ColumnParallelLinear  # pyright: ignore[reportMissingImports]

    layer = type(output_layer)
    if not isinstance(output_layer, ColumnParallelLinear) or layer.forward is not ColumnParallelLinear.forward:
        raise ValueError(f"the output layer must be a ColumnParallelLinear, got {layer.__name__}")
    if hasattr(weight, "__fsdp_param__"):
        raise ValueError("use_megatron_fsdp must be False for this output_processor, got True")
    for name, found, needed in (
        ("config.defer_embedding_wgrad_compute", config.defer_embedding_wgrad_compute, False),
        ("output_layer.disable_grad_reduce", output_layer.disable_grad_reduce, False),
        ("output_layer.is_expert", output_layer.is_expert, False),
        ("output_layer.gtp_remat_size", output_layer.gtp_remat_size, 1),
    ):
        if found != needed:
            raise ValueError(f"{name} must be {needed} for this output_processor, got {found}")


def _parallelism(output_layer: Any) -> dict[str, Any]:
    """Returns the arguments of a loss whose classes are divided over the ranks of tensor parallelism."""
    group = output_layer.tp_group
    return {} if group is None or group.size() == 1 else {"vocab_group": group}


def _logit_scale(config: Any) -> float:
    """Returns the factor on the logits: `LanguageModule._scale_logits`."""
    return config.mup_output_mult if config.use_mup else 1.0


def _main_grad(weight: Any) -> Tensor:
    """Returns the buffer to which Megatron's layers add the gradient of a weight."""
    buffer = getattr(weight, "main_grad", None)
    if buffer is None or buffer.dtype != torch.float32:
        found = "no main_grad" if buffer is None else f"one of {buffer.dtype}"
        raise ValueError(
            "gradient_accumulation_fusion needs a float32 main_grad of the output layer's weight, from "
            f"DistributedDataParallel with grad_reduce_in_fp32=True, got {found}"
        )
    return buffer


class _InMainGrad(torch.autograd.Function):
    """Hidden states as they are. Its backward pass follows that of the loss, which has added the gradient of the weight
    to main_grad. It gives autograd a gradient of the weight that is not used, as Megatron's layers do, so that hooks of
    DistributedDataParallel run, which send the gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.weight = weight
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight = ctx.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return gradient, None
        weight.grad_added_to_main_grad = True
        # A tied embedding adds its own gradient to this one, and hooks then add the sum to main_grad.
        unused = torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
        return gradient, unused
