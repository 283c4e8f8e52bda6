"""The options of a call and the checks of its arguments, for both frameworks.

`LossSpec` holds the options that change the value of the loss. Options for speed and memory are elsewhere. They change
results only by rounding. A spec is frozen and hashable, so it can be a static argument of `jax.jit` and a constant of
`torch.compile`. `check_arrays` checks shapes and dtypes for PyTorch, JAX and NumPy. It takes shapes and names of
dtypes, not arrays.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast

Reduction = Literal["mean", "sum", "none"]

REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "none")
HeadPrecision = Literal["input", "float32"]
HEAD_PRECISIONS: tuple[HeadPrecision, ...] = ("input", "float32")
FLOAT_DTYPES = ("float16", "bfloat16", "float32")
DEFAULT_MEMORY_BUDGET = 512 * 2**20  # bytes of workspace besides inputs and gradients
FLOAT32_MAX, FLOAT32_MIN = (2 - 2.0**-23) * 2.0**127, 2.0**-149  # the largest and the smallest positive number


def check_number(name: str, value: Any) -> float:
    """Returns `value` as a float in the range of float32; names the argument otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a Python number, got {type(value).__name__}")
    number = _float(value)
    if not -math.inf < number < math.inf:  # math.isfinite would stop torch.compile with dynamic shapes
        raise ValueError(f"{name} must be finite, got {value}")
    if not -FLOAT32_MAX <= number <= FLOAT32_MAX:
        raise ValueError(f"{name} must fit float32, got {number}")
    return number


def _float(value: Any) -> float:
    """Returns a number as a float, infinity for an int that is larger than all floats."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_flag(name: str, value: Any) -> bool:
    """Returns `value` if it is a bool; names the argument otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return value


def check_not_negative(name: str, value: Any) -> float:
    """Returns `value` as a float in the range of float32 that is not negative; names the argument otherwise."""
    number = check_number(name, value)
    if number < 0.0:
        raise ValueError(f"{name} must not be negative, got {number}")
    return number


def check_integer(name: str, value: Any) -> int:
    """Returns `value` as an int; names the argument otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a Python int, got {type(value).__name__}")
    return int(value)


def check_vocab_size(value: Any) -> int:
    """Returns a number of classes as an int of at least 1; raises TypeError or ValueError otherwise."""
    vocab_size = check_integer("vocab_size", value)
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
    return vocab_size


def check_ignore_index(value: Any) -> int:
    """Returns an ignore_index as a Python int that fits int64; raises TypeError or ValueError otherwise.

    None would say that no token is ignored.
    """
    if value is None:
        raise TypeError(
            "ignore_index must be a Python int, got NoneType: to ignore no token, pass an int that is no target"
        )
    ignore_index = check_integer("ignore_index", value)
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must fit int64, got {ignore_index}")
    return ignore_index


def check_normalizer(value: float) -> float:
    """Returns a normalizer that is a number of the host. Raises ValueError if it is negative or not finite, or if it
    would be infinite or 0 in float32."""
    number = _float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"normalizer must be finite and not negative, got {value}")
    if number > FLOAT32_MAX or 0 < number < FLOAT32_MIN:
        raise ValueError(f"normalizer must fit float32, got {value}")
    return number


@dataclass(frozen=True)
class LossSpec:
    """The options of one loss, validated.

    Args:
        reduction: "mean", "sum" or "none".
        ignore_index: target value of rows that do not contribute.
        label_smoothing: in [0, 1]; `torch.nn.functional.cross_entropy`'s meaning.
        z_loss_weight: >= 0; adds `z_loss_weight * lse**2` to each token's loss.
        softcap: > 0 or None; `logits = softcap * tanh(raw / softcap)`.
        logit_scale: factor on `input @ linear_weight.T + linear_bias`, before the cap.
        vocab_size: number of classes; rows of linear_weight past it are padding. None: all rows are classes.
        head_precision: "input" rounds a float32 linear_weight to input's dtype. "float32" takes it as the sum of two
            bfloat16 numbers. None is "input".

    Raises:
        TypeError: an option is not of its type.
        ValueError: an option is outside its range.
    """

    reduction: Reduction = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss_weight: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    vocab_size: int | None = None
    head_precision: HeadPrecision | None = "input"

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {self.reduction!r}")
        smoothing = check_number("label_smoothing", self.label_smoothing)
        if not 0.0 <= smoothing <= 1.0:
            raise ValueError(f"label_smoothing must lie in [0, 1], got {smoothing}")
        z_loss_weight = check_not_negative("z_loss_weight", self.z_loss_weight)
        softcap = None if self.softcap is None else check_number("softcap", self.softcap)
        if softcap is not None and softcap <= 0.0:
            raise ValueError(f"softcap must be positive or None, got {softcap}")
        if softcap is not None and softcap < FLOAT32_MIN:  # raw logits are divided by it
            raise ValueError(f"softcap must fit float32, got {softcap}")
        vocab_size = None if self.vocab_size is None else check_vocab_size(self.vocab_size)
        head_precision = "input" if self.head_precision is None else self.head_precision
        head_precision = check_choice("head_precision", head_precision, HEAD_PRECISIONS)
        ignore_index = check_ignore_index(self.ignore_index)
        # Plain Python values, so that equal calls hash and compare equal for all number types.
        object.__setattr__(self, "ignore_index", ignore_index)
        object.__setattr__(self, "label_smoothing", smoothing)
        object.__setattr__(self, "z_loss_weight", z_loss_weight)
        object.__setattr__(self, "softcap", softcap)
        object.__setattr__(self, "logit_scale", check_number("logit_scale", self.logit_scale))
        object.__setattr__(self, "vocab_size", vocab_size)
        object.__setattr__(self, "head_precision", head_precision)

    @property
    def splits_head(self) -> bool:
        """Whether a float32 head is the sum of two matrices of input's dtype."""
        return self.head_precision == "float32"

    def classes(self, rows: int) -> int:
        """Returns the number of classes of a head with `rows` rows (V); raises ValueError if vocab_size exceeds it."""
        if self.vocab_size is None:
            return rows
        if self.vocab_size > rows:
            raise ValueError(f"vocab_size must not exceed linear_weight's {rows} rows, got {self.vocab_size}")
        return self.vocab_size


class ArrayInfo(NamedTuple):
    """The properties of an array that `check_arrays` checks."""

    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", "int64", ...


def check_arrays(
    *,
    input: ArrayInfo,
    linear_weight: ArrayInfo,
    target: ArrayInfo,
    spec: LossSpec,
    linear_bias: ArrayInfo | None = None,
    weight: ArrayInfo | None = None,
    token_weight: ArrayInfo | None = None,
    normalizer: ArrayInfo | None = None,
    grad_into: ArrayInfo | None = None,
    vocab_axis: int = 0,
    classes: int | None = None,
) -> None:
    """Raises an error if a shape or dtype is not supported. The message names the argument and its shape or dtype.

    Args:
        input: (..., D), float16, bfloat16 or float32.
        linear_weight: (V, D), or (D, V) where `vocab_axis` is 1; input's dtype or float32.
        target: (...), any integer dtype.
        spec: the options; `vocab_size` is checked against V, `normalizer` against the reduction, `head_precision`
            against the dtypes.
        linear_bias: (V,), input's dtype or float32.
        weight: (V,), any of the three float dtypes.
        token_weight: (...), target's shape, any of the three float dtypes.
        normalizer: (), any of the three float dtypes or an integer dtype.
        grad_into: linear_weight's shape, float32.
        vocab_axis: which axis of linear_weight is the vocabulary.
        classes: K, where linear_weight and linear_bias are a shard of the vocabulary. `weight` is then (K,).

    Raises:
        TypeError: a dtype, or `vocab_axis` is not an int.
        ValueError: a shape, `vocab_axis`, or an option that does not fit the arrays: `vocab_size`, a `normalizer`
            without reduction "mean", or a `head_precision` that does not support the dtypes.
    """
    if check_integer("vocab_axis", vocab_axis) not in (0, 1):
        raise ValueError(f"vocab_axis must be 0 or 1, got {vocab_axis!r}")
    _check_dtype("input", input, FLOAT_DTYPES)
    if len(input.shape) < 1:
        raise ValueError("input must have shape (..., D), got ()")
    layout = "(V, D)" if vocab_axis == 0 else "(D, V)"
    head_dtypes = tuple(dict.fromkeys((input.dtype, "float32")))
    if len(linear_weight.shape) != 2:
        raise ValueError(f"linear_weight must have shape {layout}, got {linear_weight.shape}")
    _check_dtype("linear_weight", linear_weight, head_dtypes, f" (input is {input.dtype})")
    if spec.splits_head and (linear_weight.dtype, input.dtype) != ("float32", "bfloat16"):
        raise ValueError(
            'head_precision "float32" needs a float32 linear_weight and a bfloat16 input, '
            f"got a {linear_weight.dtype} linear_weight and a {input.dtype} input"
        )
    vocab, hidden = linear_weight.shape[vocab_axis], linear_weight.shape[1 - vocab_axis]
    if hidden != input.shape[-1]:
        other = f", whose transpose is {layout}" if vocab == input.shape[-1] else ""
        raise ValueError(
            f"linear_weight must have shape {layout} with D = {input.shape[-1]} as in input {input.shape}, "
            f"got {linear_weight.shape}{other}"
        )
    if (vocab < 1 and not classes) or hidden < 1:  # a shard may have no rows
        raise ValueError(f"linear_weight must have at least one row and one column, got {linear_weight.shape}")
    check_integer_dtype("target", target.dtype)
    _check_shape("target", target, input.shape[:-1], "input without its last axis")
    if linear_bias is not None:
        _check_dtype("linear_bias", linear_bias, head_dtypes, f" (input is {input.dtype})")
        _check_shape("linear_bias", linear_bias, (vocab,), "a number for each class of linear_weight, padding included")
    if weight is not None:
        _check_dtype("weight", weight, FLOAT_DTYPES)
        if classes is None:
            _check_shape("weight", weight, (vocab,), "a number for each class of linear_weight, padding included")
        else:
            _check_shape("weight", weight, (classes,), "all classes, on every rank")
    if token_weight is not None:
        _check_dtype("token_weight", token_weight, FLOAT_DTYPES)
        _check_shape("token_weight", token_weight, target.shape, "target's shape")
    if normalizer is not None:
        if spec.reduction != "mean":
            raise ValueError(f'normalizer needs reduction "mean", got reduction {spec.reduction!r}')
        if not normalizer.dtype.startswith(("int", "uint")):
            _check_dtype("normalizer", normalizer, (*FLOAT_DTYPES, "float64"))
        _check_shape("normalizer", normalizer, (), "a scalar")
    if grad_into is not None:
        _check_dtype("grad_into", grad_into, ("float32",))
        _check_shape("grad_into", grad_into, linear_weight.shape, "linear_weight's shape")
    if classes is None:
        spec.classes(vocab)


def _check_dtype(name: str, array: ArrayInfo, allowed: Sequence[str], why: str = "") -> None:
    if array.dtype not in allowed:
        raise TypeError(f"{name} must be {' or '.join(allowed)}, got {array.dtype}{why}")


def check_integer_dtype(name: str, dtype: str) -> None:
    """Raises TypeError unless a dtype, such as "int32", is one of integers."""
    if not dtype.startswith(("int", "uint")):
        raise TypeError(f"{name} must have an integer dtype, got {dtype}")


def _check_shape(name: str, array: ArrayInfo, expected: tuple[int, ...], what: str) -> None:
    if array.shape != expected:
        raise ValueError(f"{name} must have shape {expected} ({what}), got {array.shape}")


def check_memory_budget(memory_budget: int | None) -> int:
    """Returns the budget in bytes, 512 MiB for None; raises TypeError or ValueError if it is not a positive int."""
    if memory_budget is None:
        return DEFAULT_MEMORY_BUDGET
    budget = check_integer("memory_budget", memory_budget)
    if budget < 1:
        raise ValueError(f"memory_budget must be positive (bytes), got {budget}")
    return budget


def check_saved_budget(
    saved_budget: int,
    reduction: Reduction,
    *,
    grad_into: bool,
    head_precision: HeadPrecision | None,
    with_entropy: bool = False,
) -> int:
    """Returns the bytes that may be kept for the backward pass; raises TypeError or ValueError if it is not an int of 0
    or more, or not 0 where the reduction or another option allows no saved rows. `grad_into` is whether it is given."""
    budget = check_integer("saved_budget", saved_budget)
    if budget < 0:
        raise ValueError(f"saved_budget must not be negative (bytes), got {budget}")
    if budget and grad_into:
        raise ValueError(f"saved_budget must be 0 with grad_into: saved rows are not added to it, got {budget}")
    if budget and with_entropy:
        raise ValueError(
            f"saved_budget must be 0 with with_entropy: saved rows have no gradient of the entropy, got {budget}"
        )
    if budget and head_precision == "float32":
        raise ValueError(
            f'saved_budget must be 0 with head_precision "float32": rows of a split head are not saved, got {budget}'
        )
    if budget and reduction != "none":
        raise ValueError(
            f'saved_budget needs reduction "none", got reduction {reduction!r}: the other reductions save no rows'
        )
    return budget


def check_batch_invariant(
    batch_invariant: bool,
    *,
    label_smoothing: float = 0.0,
    saved_budget: int = 0,
    implementation: str | None = None,
    reason: str | None = None,
) -> bool:
    """Returns `batch_invariant`; raises TypeError if it is not a bool, or ValueError if it is True and another option
    makes the results of a row depend on other rows. `implementation`: the one that is asked for, or that runs, and
    why."""
    check_flag("batch_invariant", batch_invariant)
    if batch_invariant and implementation == "chunked":
        why = "" if reason is None else f" ({reason})"
        raise ValueError(f"batch_invariant=True needs the kernels, got implementation 'chunked'{why}")
    if batch_invariant and label_smoothing:
        raise ValueError(f"batch_invariant=True needs label_smoothing 0, got {label_smoothing}")
    if batch_invariant and saved_budget:
        raise ValueError(
            f"batch_invariant=True needs saved_budget 0, got {saved_budget}: which rows are saved depends on how many "
            "there are, and saving rounds their gradients once more"
        )
    return batch_invariant


def check_later_options(options: Mapping[str, Any], implementations: Sequence[str]) -> None:
    """Checks options of `linear_log_probs` or of a loss that calls get later, as far as they do not depend on a call;
    raises TypeError or ValueError as the call would."""
    implementation, head_precision = options.get("implementation"), options.get("head_precision")
    if implementation is not None:
        check_choice("implementation", implementation, implementations)
    if head_precision is not None:
        check_choice("head_precision", head_precision, HEAD_PRECISIONS)
    check_memory_budget(options.get("memory_budget"))
    saved_budget = check_saved_budget(
        options.get("saved_budget", 0), "none", grad_into=False, head_precision=head_precision
    )
    check_batch_invariant(
        options.get("batch_invariant", False), saved_budget=saved_budget, implementation=implementation
    )


Choice = TypeVar("Choice", bound=str)


def check_choice(name: str, value: object, choices: Sequence[Choice]) -> Choice:
    """Returns `value` if it is one of `choices`; raises ValueError naming the argument, the choices and the value."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return cast(Choice, value)
