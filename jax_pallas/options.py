"""The static arguments of an operator, and the order of its arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import Array

from jax_pallas.devices import ONE_DEVICE, Devices
from jax_pallas.problem import Gradients, NeedsGrad
from jax_pallas.token_hook import TokenFunction
from linear_ce.spec import LossSpec

# input (N, D), linear_weight, target (N,), row_weight (N,), then those of linear_bias, class_weight and grad_into that
# the call has.
Arrays = tuple[Array, ...]


@dataclass(frozen=True)
class Options:
    """The static arguments of a call."""

    spec: LossSpec
    classes: int
    vocab_axis: int
    memory_budget: int
    implementation: str | None  # None: chosen where the call is lowered
    has_bias: bool
    has_class_weight: bool
    statistics: int  # of `linear_ce.statistics`; without the largest logits these may be inf
    saved_budget: int = 0  # 0 but for losses of rows and log-probabilities: `saved_ops.py`
    # With `saved_budget`: the implementation that was chosen where the call was traced. What is saved depends on it.
    saved_as: str | None = None
    has_grad_into: bool = False
    batch_invariant: bool = False
    devices: Devices = ONE_DEVICE

    @property
    def count(self) -> int:
        """The number of arrays."""
        return 4 + self.has_bias + self.has_class_weight + self.has_grad_into

    @property
    def adds_in_backward(self) -> bool:
        """Whether the gradient of grad_into is the sum. With other reductions the forward pass returns the sum."""
        return self.has_grad_into and self.spec.reduction == "none"

    def arrays(
        self,
        *,
        input: Any,
        linear_weight: Any,
        target: Any,
        row_weight: Any,
        linear_bias: Any,
        class_weight: Any,
        grad_into: Any,
    ) -> Any:
        optional = (
            (linear_bias, self.has_bias),
            (class_weight, self.has_class_weight),
            (grad_into, self.has_grad_into),
        )
        return (input, linear_weight, target, row_weight, *(array for array, present in optional if present))

    def named(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """The inverse of `arrays`."""
        rest = list(arrays[4:])
        linear_bias = rest.pop(0) if self.has_bias else None
        class_weight = rest.pop(0) if self.has_class_weight else None
        grad_into = rest.pop(0) if self.has_grad_into else None
        names = ("input", "linear_weight", "target", "row_weight")
        optional = {"linear_bias": linear_bias, "class_weight": class_weight, "grad_into": grad_into}
        return dict(zip(names, arrays[:4], strict=True)) | optional

    def row_weight(self, arrays: Sequence[Any]) -> Any:
        """Returns the row weights of `arrays`."""
        return self.named(arrays)["row_weight"]

    def replaced(self, arrays: Sequence[Any], **others: Any) -> Any:
        """Returns `arrays` with others in place of those of these names."""
        return self.arrays(**self.named(arrays) | others)

    def of_problem(self) -> dict[str, Any]:
        """Returns the options by the names that `Problem` has for them."""
        return {"spec": self.spec, "classes": self.classes, "vocab_axis": self.vocab_axis, "devices": self.devices}

    def needs_grad(self, primals: Sequence[Any]) -> NeedsGrad:
        """Returns which gradients are computed, from the primals of a forward rule."""
        named = self.named(primals)
        bias = named["linear_bias"]
        if self.adds_in_backward and not named["grad_into"].perturbed:
            raise ValueError(
                'grad_into must be differentiated where input, linear_weight or linear_bias is, with reduction "none" '
                "and in linear_log_probs: its gradient is the new sum, for example of jax.grad(loss, argnums=(0, 1))"
                "(input, grad_into)"
            )
        d_weight = self.has_grad_into or named["linear_weight"].perturbed
        return NeedsGrad(named["input"].perturbed, d_weight, bias is not None and bias.perturbed)

    def cotangents(self, gradients: Gradients) -> Any:
        """Returns the results of a backward rule. None means zero."""
        d_weight = gradients.d_weight
        return self.arrays(
            input=gradients.d_input,
            linear_weight=None if self.has_grad_into else d_weight,
            target=None,
            row_weight=None,
            linear_bias=gradients.d_bias,
            class_weight=None,
            grad_into=d_weight,
        )


@dataclass(frozen=True)
class TokenOptions:
    """The static arguments of a call with a token loss. Its arrays are those of `options`, then the per-token arrays
    (N,), then those that the function closes over."""

    options: Options
    function: TokenFunction
    per_token: int  # the number of per-token arrays
    stats: tuple[bool, ...]  # which fields of `TokenStats` are computed
    with_entropy: bool  # whether the function takes the entropies

    @property
    def devices(self) -> Devices:
        return self.options.devices

    def values(self, per_token: Sequence[Any], entropy: Array | None) -> tuple[Any, ...]:
        """Returns the arguments of the function besides the log-probabilities and the closure."""
        return (entropy, *per_token) if self.with_entropy else tuple(per_token)

    def split(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Returns the arrays of `options`, the per-token arrays and those of the closure."""
        first = self.options.count
        last = first + self.per_token
        return tuple(arrays[:first]), tuple(arrays[first:last]), tuple(arrays[last:])
