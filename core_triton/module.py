"""The loss as a module that contains the head."""

import copy
import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.utils.parametrize import is_parametrized

from core_triton.arguments import IMPLEMENTATIONS, check_are_tensors
from core_triton.linear_ce import linear_cross_entropy
from linear_ce.spec import (
    ArrayInfo,
    HeadPrecision,
    LossSpec,
    Reduction,
    check_arrays,
    check_batch_invariant,
    check_choice,
    check_integer,
    check_memory_budget,
    check_saved_budget,
)

OPTIONS = tuple(field.name for field in dataclasses.fields(LossSpec))


class LinearCrossEntropy(nn.Module):
    """A linear head and its cross-entropy, `linear_cross_entropy(input, self.weight, target, linear_bias=self.bias,
    ...)`.

    The parameters have the names and the initialization of `torch.nn.Linear(hidden_size, num_classes, bias=bias)`, so
    the state dict of a head can be loaded unchanged, with `strict=False` if there are class weights, which are in the
    state dict too. To tie the head, set `module.weight = embedding.weight`. The options are attributes, as in
    `torch.nn.CrossEntropyLoss`: after `module.label_smoothing = 0.0`, for example, calls have no label smoothing.

    Args:
        hidden_size: D.
        num_classes: V. With vocab_group, the rows of this rank's shard.
        bias: whether the head has a bias.
        weight: (V,) class weights, kept as a buffer. With vocab_group, of all classes.
        reduction, ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale, vocab_size: as for
            `linear_cross_entropy`.
        memory_budget, saved_budget, implementation, head_precision, batch_invariant: as for `linear_cross_entropy`.
        vocab_group, token_group, reduce_dtype: as for `linear_cross_entropy`. For a module in
            `DistributedDataParallel` or FSDP2 (`fully_shard`), token_group is the group of its ranks: then the averaged
            gradients are those of the mean over all tokens.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: a size, or an option that `linear_cross_entropy` rejects.

    Example:
        >>> import torch, core_triton
        >>> head = core_triton.LinearCrossEntropy(16, 100)
        >>> head(torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.long)).backward()
    """

    class_weight: Tensor | None
    reduction: Reduction
    ignore_index: int
    label_smoothing: float
    z_loss_weight: float
    softcap: float | None
    logit_scale: float
    vocab_size: int | None
    head_precision: HeadPrecision | None

    def __init__(
        self,
        hidden_size: int,
        num_classes: int,
        *,
        bias: bool = False,
        weight: Tensor | None = None,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss_weight: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        vocab_size: int | None = None,
        memory_budget: int | None = None,
        saved_budget: int = 0,
        implementation: str | None = None,
        head_precision: HeadPrecision | None = None,
        batch_invariant: bool = False,
        vocab_group: "dist.ProcessGroup | None" = None,
        token_group: "dist.ProcessGroup | None" = None,
        reduce_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("num_classes", num_classes)):
            if check_integer(name, size) < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        options = ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale, vocab_size, head_precision
        spec = LossSpec(reduction, *options)
        if vocab_group is None:
            spec.classes(num_classes)
        for name in OPTIONS:
            setattr(self, name, getattr(spec, name))
        self.vocab_group, self.token_group, self.reduce_dtype = vocab_group, token_group, reduce_dtype
        check_memory_budget(memory_budget)
        self.memory_budget = memory_budget
        self.saved_budget = check_saved_budget(
            saved_budget, reduction, grad_into=False, head_precision=spec.head_precision
        )
        if implementation is not None:
            check_choice("implementation", implementation, IMPLEMENTATIONS)
        self.implementation = implementation
        self.batch_invariant = check_batch_invariant(
            batch_invariant,
            label_smoothing=label_smoothing,
            saved_budget=saved_budget,
            implementation=implementation,
        )
        self.weight = nn.Parameter(torch.empty(num_classes, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        if weight is not None:
            self._check_class_weight(weight)
        self.register_buffer("class_weight", weight)
        self.reset_parameters()

    def _check_class_weight(self, weight: Tensor) -> None:
        """Checks class weights as a call does; the number of all classes of a vocab_group only there."""
        check_are_tensors({"weight": weight})
        if weight.requires_grad:
            raise ValueError("weight is not differentiated and must not require grad; pass weight.detach()")
        classes, hidden = self.weight.shape
        check_arrays(
            input=ArrayInfo((0, hidden), "float32"),
            linear_weight=ArrayInfo((classes, hidden), "float32"),
            target=ArrayInfo((0,), "int64"),
            spec=LossSpec(),
            weight=ArrayInfo(tuple(weight.shape), str(weight.dtype).removeprefix("torch.")),
            classes=None if self.vocab_group is None else weight.numel(),
        )

    def reset_parameters(self) -> None:
        """Draws weight and bias uniformly within 1/sqrt(hidden_size), as `torch.nn.Linear` does."""
        bound = 1.0 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        normalizer: Tensor | float | None = None,
        grad_into: Tensor | None = None,
    ) -> Tensor:
        """Returns the float32 loss of input (..., D) and target (...,). The other arguments are those of
        `linear_cross_entropy`."""
        options: dict[str, Any] = {name: getattr(self, name) for name in OPTIONS}
        return linear_cross_entropy(
            input,
            self.weight,
            target,
            linear_bias=self.bias,
            weight=self.class_weight,
            token_weight=token_weight,
            normalizer=normalizer,
            memory_budget=self.memory_budget,
            saved_budget=self.saved_budget,
            implementation=self.implementation,
            grad_into=grad_into,
            batch_invariant=self.batch_invariant,
            vocab_group=self.vocab_group,
            token_group=self.token_group,
            reduce_dtype=self.reduce_dtype,
            **options,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "LinearCrossEntropy":
        """Returns a copy that has the process groups of this module, which cannot be copied."""
        memo |= {id(group): group for group in (self.vocab_group, self.token_group) if group is not None}
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        # The class that parametrize makes of a module's class has a __getstate__ that raises. Its base has the state.
        whose: Any = super(type(self), self) if is_parametrized(self) else self
        state = whose.__getstate__() if hasattr(whose, "__getstate__") else self.__dict__  # not in Python 3.10
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    def extra_repr(self) -> str:
        num_classes, hidden_size = self.weight.shape
        options = {name: getattr(self, name) for name in OPTIONS}
        changed = {name: value for name, value in options.items() if value != getattr(LossSpec, name)}
        shown = "".join(f", {name}={value!r}" for name, value in changed.items())
        return f"{hidden_size}, {num_classes}, bias={self.bias is not None}{shown}"
