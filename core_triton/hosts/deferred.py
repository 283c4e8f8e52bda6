"""A stand-in for the logits of a linear head, which computes the loss and not the logits.

A patched head (`FusedHead`) returns `DeferredLogits` while its model computes a loss. The stand-in accepts what models
do with logits before their loss: casts, a factor, a soft cap, a slice of the classes or of the tokens, and a flattening
of the tokens. `torch.nn.functional.cross_entropy` of it calls the head again, now for the loss. Hooks of the head, such
as those of FSDP2 and ZeRO-3 that gather its weight, therefore run once, around `linear_cross_entropy`. Any other use
raises `LogitsError`.
"""

import builtins
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from core_triton.dtensors import is_dtensor
from core_triton.hosts.interface import check_hooks
from core_triton.linear_ce import linear_cross_entropy


class LogitsError(RuntimeError, AttributeError):
    """Raised for a use of logits that were not computed. An AttributeError, so that `hasattr` is False."""


class ForwardCall:
    """One forward call of a patched model: which options its losses have, and whether it has ended.

    Args:
        patch: whose forward method is called.
        model_name: for messages.
        options: of `linear_cross_entropy`, for all its losses.
        how_to_get_logits: for the message of a use after the call.
    """

    def __init__(self, patch: object, model_name: str, options: dict[str, Any], how_to_get_logits: str) -> None:
        self.patch = patch
        self.model_name = model_name
        self.options = options
        self.how_to_get_logits = how_to_get_logits
        self.losses = 0
        self.computed: Tensor | None = None  # the last loss, as it was before hooks of the head
        self.sources: list[Source] = []
        self.ended = False

    def end(self) -> None:
        """Ends the call: its stand-ins release the hidden states, and raise an error for any use."""
        self.ended = True
        for source in self.sources:
            source.hidden = None


class Source:
    """Hidden states, the head that gets them, and the number of its classes."""

    def __init__(self, call: ForwardCall, head: "FusedHead", hidden: Tensor, classes: int) -> None:
        self.call = call
        self.head = head
        self.hidden: Tensor | None = hidden
        self.classes = classes
        call.sources.append(self)


class HeadLoss(NamedTuple):
    """The loss that a head computes."""

    target: Tensor
    options: dict[str, Any]  # of `linear_cross_entropy`


class FusedHead(nn.Linear):
    """A linear head that defers its logits during a `ForwardCall` of its model, and is `nn.Linear` otherwise."""

    forward_call: ForwardCall | None

    def __call__(self, input: Tensor, *args: Any, loss: HeadLoss | None = None, **kwargs: Any) -> Any:
        call = self.forward_call
        if call is None or loss is not None:
            kwargs = kwargs if loss is None else {**kwargs, "loss": loss}
            output = super().__call__(input, *args, **kwargs)
            if call is not None and call.computed is not None:
                check_hooks(self, f"the head of {call.model_name}", call.computed, output)
                call.computed = None
            return output
        # Not out_features: peft's copy of a tied head (`ensure_weight_tying`) has the sizes in the other order. Outside
        # of the call of the head, ZeRO-3 leaves a weight of shape (0,), and a parametrization would compute it.
        weight = self._parameters.get("weight")
        classes = self.out_features if weight is None or weight.ndim != 2 else weight.shape[0]
        return DeferredLogits(Source(call, self, input, classes), classes)

    def forward(self, input: Tensor, loss: HeadLoss | None = None) -> Tensor:
        if loss is None:
            return super().forward(input)
        weight = self.weight  # once, because spectral_norm changes with each use
        if is_dtensor(weight):
            raise ValueError(
                "the head's weight is a DTensor in its forward call: tensor parallelism of the head is not supported"
            )
        computed = linear_cross_entropy(input, weight, loss.target, linear_bias=self.bias, **loss.options)
        if self.forward_call is not None:
            self.forward_call.computed = computed
        return computed


def _refused(name: str) -> Callable[..., Any]:
    def method(self: "DeferredLogits", *args: Any) -> NoReturn:
        self._refuse(name)

    return method


class DeferredLogits:
    """Logits that are not computed: `(scale * head(hidden))[..., :classes]`, or with a soft cap
    `(softcap * tanh(scale * head(hidden)))[..., :classes]`.

    Args:
        source: the hidden states, (..., D), and the head.
        classes: the number of classes, the first of the head.
        scale: the factor on what the head returns.
        softcap: the factor on tanh, None without tanh.
    """

    def __init__(self, source: Source, classes: int, scale: float = 1.0, softcap: float | None = None) -> None:
        self._source = source
        self._classes = classes
        self._scale = scale
        self._softcap = softcap

    def _hidden(self, what: str) -> Tensor:
        hidden = self._source.hidden
        if hidden is None:
            self._refuse(what)
        return hidden

    def _refuse(self, what: str) -> NoReturn:
        call = self._source.call
        if call.ended:
            raise LogitsError(
                f"{what} of the logits of {call.model_name}, which were not computed: its loss was computed from the "
                f"hidden states. {call.how_to_get_logits}"
            )
        raise LogitsError(
            f"{call.model_name} is not supported by core_triton: it uses {what} of its logits. "
            "Supported are casts, factors that are numbers, tanh, slices, view(-1, vocab_size) and cross_entropy"
        )

    def _with(self, hidden: Tensor | None = None, classes: int | None = None) -> "DeferredLogits":
        source = self._source
        if hidden is not None:
            source = Source(source.call, source.head, hidden, source.classes)
        return DeferredLogits(source, self._classes if classes is None else classes, self._scale, self._softcap)

    # What a tensor has

    @property
    def device(self) -> torch.device:
        return self._hidden("device").device

    @property
    def dtype(self) -> torch.dtype:
        return self._hidden("dtype").dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden("shape").shape[:-1], self._classes))

    @property
    def ndim(self) -> int:
        return self._hidden("ndim").ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    # Casts: the loss is that of float32 logits

    def float(self) -> "DeferredLogits":
        self._hidden("float()")
        return self

    def contiguous(self) -> "DeferredLogits":
        self._hidden("contiguous()")
        return self

    def to(self, *args: Any, **kwargs: Any) -> "DeferredLogits":
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype) and not value.is_floating_point:
                self._refuse(f"to({value})")
            if isinstance(value, torch.device | str) and torch.device(value) != self.device:
                self._refuse(f"to({value!r})")
        self._hidden("to()")
        return self

    # A factor and the soft cap

    def mul(self, other: Any) -> "DeferredLogits":
        self._hidden("a factor")
        if isinstance(other, bool) or not isinstance(other, int | float):
            self._refuse(f"a factor of type {type(other).__name__}")
        if self._softcap is None:
            return DeferredLogits(self._source, self._classes, self._scale * other)
        if not other > 0 or not math.isfinite(other):
            self._refuse(f"the factor {other} after tanh")
        return DeferredLogits(self._source, self._classes, self._scale, self._softcap * other)

    def div(self, other: Any) -> "DeferredLogits":
        self._hidden("a divisor")
        if isinstance(other, bool) or not isinstance(other, int | float) or other == 0:
            self._refuse(f"a divisor of type {type(other).__name__}")
        return self.mul(1.0 / other)

    def tanh(self) -> "DeferredLogits":
        self._hidden("tanh")
        if self._softcap is not None:
            self._refuse("a second tanh")
        return DeferredLogits(self._source, self._classes, self._scale, 1.0)

    __mul__ = __rmul__ = mul
    __truediv__ = div

    # Slices and shapes

    def __getitem__(self, index: Any) -> "DeferredLogits":
        hidden = self._hidden("a slice")
        parts = list(index) if isinstance(index, tuple) else [index]
        for part in parts:
            if not (part is Ellipsis or isinstance(part, int | slice | Tensor)):
                self._refuse(f"an index of type {type(part).__name__}")
        # A mask is an index of all its axes.
        axes = [part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1 for part in parts]
        place = next((place for place, part in enumerate(parts) if part is Ellipsis), None)
        if place is not None:
            axes[place] = hidden.ndim - sum(axes) + 1
            parts[place : place + 1] = [slice(None)] * axes[place]
        if sum(axes) < hidden.ndim:
            return self._with(hidden[tuple(parts)])
        *of_tokens, of_classes = parts
        if not isinstance(of_classes, slice):
            self._refuse("an index of its classes")
        kept = range(self._classes)[of_classes]  # torch.compile cannot trace slice.indices
        if kept.start != 0 or kept.step != 1 or kept.stop < 1:
            self._refuse(f"the classes {kept.start}:{kept.stop}:{kept.step}")
        return self._with(hidden[tuple(of_tokens)] if of_tokens else None, kept.stop)

    def view(self, *shape: Any) -> "DeferredLogits":
        hidden = self._hidden("view")
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if not sizes or not all(isinstance(size, int | torch.SymInt) for size in sizes):
            self._refuse(f"view{sizes}")
        if sizes[-1] == -1:
            if math.prod(sizes[:-1]) != hidden.shape[:-1].numel():
                self._refuse(f"view{sizes}")
            sizes = *sizes[:-1], self._classes
        if sizes[-1] != self._classes:
            raise ValueError(
                f"{self._source.call.model_name} has {self._classes} classes in its head, but its loss has vocab_size "
                f"{sizes[-1]}. config.vocab_size must be the number of rows of the head"
            )
        return self._with(hidden.reshape(*sizes[:-1], hidden.shape[-1]))

    reshape = view

    # The loss

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: builtins.float = 0.0,
    ) -> Tensor:
        hidden = self._hidden("cross_entropy")
        if hidden.ndim != 2:
            self._refuse(f"cross_entropy of {hidden.ndim} dimensions, which")
        if size_average is not None or reduce is not None:
            self._refuse("cross_entropy's size_average or reduce")
        if target.is_floating_point() and target.ndim == hidden.ndim:
            self._refuse("cross_entropy with probabilities as target")
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            name = self._source.call.model_name
            raise TypeError(f"labels of {name} must have an integer dtype, got {str(target.dtype)[6:]}")
        if target.shape != hidden.shape[:1]:
            raise ValueError(
                f"{self._source.call.model_name} has {hidden.shape[0]} rows of logits and {target.numel()} labels. "
                "labels must have one entry for each row of logits: with logits_to_keep, only those of the tokens kept"
            )
        call, head = self._source.call, self._source.head
        softcap = self._softcap
        if weight is not None and weight.shape == (self._classes,):  # the rows after a slice of the classes are padding
            weight = functional.pad(weight, (0, self._source.classes - self._classes))
        options = {
            "weight": weight,
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            # softcap * tanh(scale * t) = softcap * tanh(logit_scale * t / softcap)
            "logit_scale": self._scale if softcap is None else self._scale * softcap,
            "softcap": softcap,
            "vocab_size": None if self._classes == self._source.classes else self._classes,
            **call.options,
        }
        call.losses += 1
        return head(hidden, loss=HeadLoss(target, options))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = FUNCTIONS.get(func)
        if name is not None and isinstance(args[0] if args else None, DeferredLogits):
            return getattr(args[0], name)(*args[1:], **(kwargs or {}))
        if name is not None and kwargs and isinstance(kwargs.get("input"), DeferredLogits):
            kwargs = dict(kwargs)
            return getattr(kwargs.pop("input"), name)(*args, **kwargs)
        values = (*args, *(kwargs or {}).values())
        found = next((value for value in values if isinstance(value, DeferredLogits)), None)
        what = getattr(func, "__name__", str(func))
        if found is None:
            raise LogitsError(f"{what} got a list with logits that were not computed")
        found._refuse(what)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_source" not in self.__dict__:  # looked up by copy and pickle
            raise AttributeError(name)
        self._refuse(name)

    def __repr__(self) -> str:
        return f"DeferredLogits(of {self._source.call.model_name}, not computed)"

    # Python looks these up on the class, not by __getattr__
    __add__ = __radd__ = __iadd__ = _refused("+")
    __sub__ = __rsub__ = __neg__ = _refused("-")
    __matmul__ = __rmatmul__ = _refused("@")
    __pow__ = _refused("**")
    __rtruediv__ = _refused("division of a number")
    __setitem__ = _refused("assignment to a slice")
    __len__ = _refused("len")
    __iter__ = _refused("iteration")
    __bool__ = _refused("bool")
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refused("comparison")
    __hash__ = object.__hash__
    __array__ = _refused("conversion to NumPy")


FUNCTIONS: dict[Any, str] = {
    functional.cross_entropy: "_cross_entropy",
    torch.tanh: "tanh",
    torch.mul: "mul",
    torch.div: "div",
}
