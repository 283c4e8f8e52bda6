"""The fused loss in torchtitan: `LinearCrossEntropyLoss`, a loss that a config names.

torchtitan's trainer gives a `ChunkedLossWrapper` the model's output layer (`set_lm_head`) and makes the model return
its hidden states (`_skip_lm_head`). That loss then computes the logits of a chunk of the sequence at a time.
`LinearCrossEntropyLoss` takes its place and computes the loss from the hidden states, in one call of the output layer.
Hooks of FSDP2 gather the weight of the output layer around this call, and scatter its gradient in the backward pass.

The interfaces are those of torchtitan 0.3.0:

    torchtitan/components/loss.py           `ChunkedLossWrapper`, `BaseLoss`, and `cross_entropy_loss`, the same loss
    torchtitan/trainer.py                   the calls of `set_lm_head` and of the loss
    torchtitan/distributed/utils.py         `get_spmd_backend`
    torchtitan/distributed/spmd_types.py    `current_spmd_mesh` and `spmd_mesh_size`, of tensor parallelism
    torchtitan/models/muse_glimmer/model.py `SoftCappedLinear`, an output layer with a factor and a soft cap

The class is made when it is first used, so that this module can be imported without torchtitan.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from core_triton.dtensors import is_dtensor
from core_triton.hosts.interface import OPTIONS, call_with_forward, check_options, check_version
from core_triton.linear_ce import linear_cross_entropy
from linear_ce.spec import HeadPrecision

__all__ = ["LinearCrossEntropyLoss"]

TESTED_VERSIONS = ("0.3.0",)
BACKENDS = ("spmd_types", "partial_dtensor")  # of parallelism.spmd_backend


if TYPE_CHECKING:  # for editors and the documentation

    class LinearCrossEntropyLoss:
        """The cross-entropy of a model's output layer, as torchtitan's `CrossEntropyLoss`, without the logits.

        It is a `ChunkedLossWrapper`, for which the trainer looks, but has no chunks: `memory_budget` limits
        its memory, and the sequence length need not be a multiple of a number of chunks. torch.compile does not get it.

        Its `Config` has the options implementation, memory_budget, head_precision and batch_invariant of
        `linear_cross_entropy`.

        Raises:
            TypeError, ValueError: the value of an option.
            ValueError: an output layer or a backend of parallelism that is not supported. The message names it.

        Example:
            >>> from core_triton.hosts.torchtitan import LinearCrossEntropyLoss  # doctest: +SKIP
            >>> config.loss = LinearCrossEntropyLoss.Config()  # doctest: +SKIP
        """

        Config: Any


def __getattr__(name: str) -> Any:
    if name == "LinearCrossEntropyLoss":
        return _loss_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _loss_class() -> type:
    """Returns `LinearCrossEntropyLoss`.

    Raises:
        ImportError: torchtitan is not installed.
        RuntimeError: a version of torchtitan that was not tested.
    """
    try:
        import torchtitan  # pyright: ignore[reportMissingImports]
        from torchtitan.components.loss import (  # pyright: ignore[reportMissingImports]
            IGNORE_INDEX,
            BaseLoss,
            ChunkedLossWrapper,
        )
    except ImportError as error:
        raise ImportError(f"{__name__} needs torchtitan: pip install torchtitan==0.3.0") from error
    check_version(__name__, "torchtitan", torchtitan.__version__, TESTED_VERSIONS)

    class LinearCrossEntropyLoss(ChunkedLossWrapper):
        """As declared at the beginning of this module."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseLoss.Config):
            implementation: str | None = None
            memory_budget: int | None = None
            head_precision: HeadPrecision | None = None
            batch_invariant: bool = False

        def __init__(self, config: Any, *, compile_config: Any = None) -> None:
            self.options = {name: getattr(config, name) for name in OPTIONS}
            check_options(self.options)
            self.options["ignore_index"] = IGNORE_INDEX
            self.lm_head: nn.Module | None = None

        def set_lm_head(self, lm_head: nn.Module) -> None:
            """Sets the output layer of the model, before the first call."""
            self.options |= _head_options(lm_head)
            self.lm_head = lm_head

        def __call__(
            self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
        ) -> tuple[Tensor, dict[str, Tensor]]:
            """Returns the loss of hidden states and an empty dictionary of metrics.

            Args:
                pred: (batch, sequence, D) hidden states.
                labels: (batch, sequence), -100 for tokens that do not count.
                global_valid_tokens: () the number of tokens that count on all ranks, or None for the sum.
                loss_inputs: are not used.
            """
            if self.lm_head is None:
                raise ValueError("set_lm_head must be called before the loss: set model._skip_lm_head = True with it")
            return _loss(self.lm_head, pred, labels, global_valid_tokens, self.options), {}

    for made, name in ((LinearCrossEntropyLoss, ""), (LinearCrossEntropyLoss.Config, ".Config")):
        made.__qualname__ = f"LinearCrossEntropyLoss{name}"
    return LinearCrossEntropyLoss


def _head_options(lm_head: Any) -> dict[str, Any]:
    """Returns the options of a loss that the output layer determines."""
    # fully_shard makes a subclass, and a config's sharding replaces the forward method of the instance.
    cls = next((one for one in type(lm_head).__mro__ if "forward" in vars(one)), type(lm_head))
    if cls is nn.Linear:
        return {}
    if (cls.__module__, cls.__name__) == ("torchtitan.models.muse_glimmer.model", "SoftCappedLinear"):
        return {"logit_scale": lm_head.output_multiplier, "softcap": lm_head.output_soft_cap_temp}
    raise ValueError(
        "lm_head must be a torch.nn.Linear or the SoftCappedLinear of muse_glimmer, and not a subclass with another "
        f"forward method, as for quantization or LoRA, got {cls.__name__}"
    )


def _loss(
    lm_head: Any, hidden: Tensor, labels: Tensor, global_valid_tokens: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Returns the loss of this rank's tokens, in a call of the output layer."""
    import spmd_types as spmd  # pyright: ignore[reportMissingImports]
    from torchtitan.distributed.spmd_types import (  # pyright: ignore[reportMissingImports]
        current_spmd_mesh,
        spmd_mesh_size,
    )
    from torchtitan.distributed.utils import get_spmd_backend  # pyright: ignore[reportMissingImports]

    backend = get_spmd_backend()
    if backend not in BACKENDS:
        raise ValueError(f"parallelism.spmd_backend must be one of {', '.join(BACKENDS)}, got {backend}")

    def forward(hidden: Any) -> Tensor:
        weight, more = lm_head.weight, dict[str, Any]()
        if is_dtensor(weight) != is_dtensor(hidden):
            raise ValueError(
                "the hidden states and lm_head.weight must both be DTensors, as in partial_dtensor with tensor "
                f"parallelism, or both plain Tensors, got {type(hidden).__name__} and {type(weight).__name__}"
            )
        if backend == "spmd_types" and spmd_mesh_size("tp") > 1:
            # Each rank has a shard of the classes. The loss gives each the whole gradient of the hidden states, and
            # torchtitan adds those of the ranks, so one rank must keep its own, and the others have 0: from R to I.
            group = current_spmd_mesh().get_group("tp")
            hidden = spmd.redistribute(hidden, group, src=spmd.R, dst=spmd.I)
            more = {"vocab_group": group, "vocab_size": lm_head.out_features}
        loss: Any = linear_cross_entropy(
            hidden,
            weight,
            labels,
            linear_bias=lm_head.bias,
            reduction="sum" if global_valid_tokens is None else "mean",
            normalizer=global_valid_tokens,
            **more,
            **options,
        )
        return loss.to_local() if is_dtensor(loss) else loss

    checks_types = spmd.is_type_checking()
    with spmd.no_typecheck():
        loss = call_with_forward(lm_head, forward, hidden)
        if checks_types:
            spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})  # as the type of torchtitan's losses
    return loss
