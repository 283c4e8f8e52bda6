"""The one table of named cases: the cases of every backend, every day (`cases`) or by command (`exhaustive_cases`).

A case is a frozen description; `arrays.make_arrays` turns it into arrays. Every-day cases are pairwise over the options
for each dtype and reduction, plus sharp logits (`SHARP_FACTORS`), plus the edges of the contract, one by one. Shapes
are small, few and awkward: a compile costs more than the work, and no size is a multiple of anything.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal

from linear_ce.spec import FLOAT_DTYPES, REDUCTIONS, LossSpec
from parity.pairwise import pairwise
from parity.token_losses import FORMS

Function = Literal["loss", "log_probs", "token_loss"]

DTYPE_LABELS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

# fp16 gradients are computed under a loss scale, as in training. A mean allows a larger one than a sum.
FP16_LOSS_SCALE = {"mean": 1024.0, "sum": 8.0, "none": 8.0}

SHAPES = (((123,), 32, 507), ((4, 63), 64, 123), ((50,), 128, 1001))  # (leading axes, D, V)

# What a row of `Case.poison` puts where (arrays.py).
POISONS = (
    "ignored_rows",  # NaN and inf in the input (and NaN in per-token arrays) of rows whose target is ignore_index
    "masked_rows",  # NaN and inf in the input (and NaN in other per-token arrays) of rows of token_weight 0
    "padding",  # NaN and inf in the head's rows past vocab_size
    "bias_neg_inf",  # a masked vocabulary: -inf in a third of the bias, never at a target
    "bias_neg_inf_target",  # the same, with two targets inside the mask
    "bias_pos_inf",  # +inf at one class
    "input_nan",  # NaN in one counted row
    "input_inf",  # +inf in one counted row
    "target_range",  # targets past the classes, past the head's rows, and negative
)


GRAD_INTO_START = 2.0**-12  # not 0, so that what overwrites it shows, and small, so that adding to it rounds little

_MEAN, _SUM, _NONE = LossSpec("mean"), LossSpec("sum"), LossSpec("none")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: its options, and how its arrays are made."""

    name: str
    function: Function = "loss"
    token_loss: str = ""  # of `token_losses.FORMS`, where the function is "token_loss"
    per_token_dtype: str = "float32"  # of its per-token arrays
    lead: tuple[int, ...] = (123,)  # target's shape
    hidden: int = 32  # D
    vocab: int = 507  # V, rows of the head
    dtype: str = "float32"
    head_dtype: str = ""  # "" is dtype
    grad_into: bool = False  # the gradient of the head is added to a float32 array of `GRAD_INTO_START`
    spec: LossSpec = _MEAN
    has_bias: bool = False
    has_class_weight: bool | Literal["zero"] = False
    token_weight: Literal["", "mask", "signed", "zero"] = ""
    normalizer: float | None = None
    target: Literal["uniform", "skewed", "one_class"] = "uniform"
    target_dtype: str = "int64"
    ignored: Literal["", "some", "all"] = ""
    poison: tuple[str, ...] = ()
    logit_std: float = 2.0
    vocab_axis: int = 0  # 1: the head reaches JAX as (D, V), and PyTorch as a transposed view
    tight_memory: bool = False
    saved_budget: int = 0  # bytes
    upstream: Literal["one", "random", "wide"] = "one"  # "wide": from 1e-6 to 1e3
    unused: tuple[str, ...] = ()  # results of log_probs that nothing is computed from: their upstream gradients are 0
    with_stats: bool = True
    token_stats: bool = False  # a token loss also returns all its statistics
    frozen: tuple[str, ...] = ()  # arguments whose gradient is not computed
    strided: bool = False  # PyTorch: non-contiguous input
    loss_scale: float = 1.0

    @property
    def n(self) -> int:
        """Number of tokens, N."""
        return math.prod(self.lead)

    @property
    def classes(self) -> int:
        """Number of classes, K."""
        return self.spec.classes(self.vocab)

    @property
    def per_token(self) -> tuple[str, ...]:
        """The names of the arrays that a token loss takes, in order."""
        return FORMS[self.token_loss].per_token if self.token_loss else ()

    @property
    def checks_rows(self) -> bool:
        """Whether the gradients of single classes and tokens have separate budgets (`tolerances.row_errors`)."""
        return self.target == "one_class"

    @property
    def extra_roundings(self) -> float:
        """How many roundings of the head's gradient an implementation may add to those of the unfused computation.

        Under a tight budget a 16-bit d_weight may be summed over the chunks in its own dtype. The k-th of n chunks
        rounds a sum of variance k / n of the whole: together (n + 1) / 2, of which the unfused computation has 1.
        """
        in_16_bits = self.weight_dtype != "float32" and not self.grad_into
        chunks = self.fractions if self.tight_memory and in_16_bits else 1
        return (chunks + 1) / 2 - 1

    @property
    def fractions(self) -> int:
        """For which part of the tokens a tight budget has room. A token loss must be called for three chunks."""
        return 8 if self.function == "token_loss" else 4

    @property
    def memory_budget(self) -> int | None:
        """Bytes of workspace: the default, or as much as a part of the tokens needs, so that work comes in pieces.

        A float32 row of logits, a few rows of hidden size, one narrow tile of the vocabulary, and what is per token.
        """
        if not self.tight_memory:
            return None
        rows = max(16, self.n // self.fractions)
        per_token = 64 + (16 * (3 + len(self.per_token)) if self.function == "token_loss" else 0)
        return 16384 + per_token * self.n + 8 * self.classes + rows * (4 * self.classes + 64 * self.hidden + 2048)

    @property
    def weight_dtype(self) -> str:
        """The dtype of linear_weight and linear_bias."""
        return self.head_dtype or self.dtype


# The factors of the pairwise tables; the first value of each is the plain one and goes unnamed.
LOSS_FACTORS: dict[str, tuple[Any, ...]] = {
    "shape": SHAPES,
    "label_smoothing": (0.0, 0.1),
    "z_loss_weight": (0.0, 0.01),
    "softcap": (None, 5.0),
    "logit_scale": (1.0, 0.5),
    "padded": (False, True),
    "has_bias": (False, True),
    "has_class_weight": (False, True),
    "token_weight": ("", "mask", "signed"),
    "normalizer": (None, 41.5),
    "target": ("uniform", "skewed"),
    "ignored": ("", "some"),
    "vocab_axis": (0, 1),
    "tight_memory": (False, True),
    "upstream": ("one", "random"),
    "with_stats": (True, False),
    "head_dtype": ("", "float32"),
    "strided": (False, True),
}

# Logits of a standard deviation at which few classes of a row have most of the probability, and one class as the target
# of all tokens. The gradient of every other class is then only its softmax part. In other cases the targets' part hides
# it. One table serves all dtypes and reductions. Exhaustive runs have the same cases.
SHARP_FACTORS: dict[str, tuple[Any, ...]] = {
    # float16 at 8 is left out: a scalar loss stores its gradients before the loss scale is applied, where those of the
    # least likely classes are below float16's range. Range would decide their error, not rounding.
    "dtype_and_std": (("bfloat16", 8.0), ("bfloat16", 3.5), ("float32", 8.0), ("float32", 3.5), ("float16", 3.5)),
    "reduction": ("mean", "sum", "none"),
    **{name: LOSS_FACTORS[name] for name in ("shape", "padded", "has_bias", "token_weight", "vocab_axis")},
    **{name: LOSS_FACTORS[name] for name in ("tight_memory", "upstream", "with_stats")},
}

LOG_PROBS_FACTORS: dict[str, tuple[Any, ...]] = {
    name: LOSS_FACTORS[name]
    for name in (
        *("shape", "softcap", "logit_scale", "padded", "has_bias", "target", "ignored"),
        *("vocab_axis", "tight_memory", "head_dtype", "strided"),
    )
}

# One table serves all token losses, dtypes and reductions. Plain "reinforce" is left out: it is "weighted_nll".
TOKEN_LOSS_FACTORS: dict[str, tuple[Any, ...]] = {
    "token_loss": tuple(name for name in FORMS if name != "reinforce"),
    "dtype": FLOAT_DTYPES,
    "reduction": REDUCTIONS,
    **{name: LOSS_FACTORS[name] for name in LOG_PROBS_FACTORS if name not in ("head_dtype", "strided", "target")},
    "token_weight": LOSS_FACTORS["token_weight"],
    "upstream": LOSS_FACTORS["upstream"],
    "per_token_dtype": ("float32", "bfloat16"),
}

# Factors that change the meaning; exhaustive cases combine all of these, while the others rotate.
MEANING = (
    *("token_loss", "dtype", "reduction"),  # of token losses; the others have a table for each dtype and reduction
    *("label_smoothing", "z_loss_weight", "softcap", "logit_scale", "padded", "has_bias", "has_class_weight"),
    *("token_weight", "normalizer", "ignored"),
)

_LABELS: dict[str, dict[Any, str]] = {
    "shape": {shape: "n" + "x".join(map(str, shape[0])) for shape in SHAPES},
    "label_smoothing": {0.1: "smoothing"},
    "z_loss_weight": {0.01: "zloss"},
    "softcap": {5.0: "softcap"},
    "logit_scale": {0.5: "scale"},
    "padded": {True: "padded"},
    "has_bias": {True: "bias"},
    "has_class_weight": {True: "weight"},
    "token_weight": {"mask": "mask", "signed": "signed"},
    "normalizer": {41.5: "normalizer"},
    "target": {"skewed": "skewed"},
    "ignored": {"some": "ignored"},
    "vocab_axis": {1: "axis1"},
    "tight_memory": {True: "tight"},
    "upstream": {"random": "upstream"},
    "with_stats": {False: "nostats"},
    "head_dtype": {"float32": "head32"},
    "strided": {True: "strided"},
    "per_token_dtype": {"bfloat16": "tokens16"},
}

_SPEC_FIELDS = ("label_smoothing", "z_loss_weight", "softcap", "logit_scale")


def _factors(function: str, dtype: str, reduction: str) -> dict[str, tuple[Any, ...]]:
    """Returns the factors that may vary for a function, dtype and reduction."""
    factors = dict(LOSS_FACTORS if function == "loss" else LOG_PROBS_FACTORS)
    if reduction != "mean":
        factors.pop("normalizer", None)
    if dtype == "float32":
        factors.pop("head_dtype")
    return factors


def _case(function: Function, dtype: str, reduction: Any, row: Mapping[str, Any]) -> Case:
    """Returns the case of one row of a table, named for what it has."""
    first = function if function == "log_probs" else reduction
    labels = [_LABELS[name].get(value, "") for name, value in row.items() if name != "shape"]
    name = "-".join([first, DTYPE_LABELS[dtype], *filter(None, labels), _LABELS["shape"][row["shape"]]])
    lead, hidden, vocab = row["shape"]
    # A vocabulary is padded by a few rows, to a number that is still no multiple of anything.
    vocab_size = vocab - 7 if row["padded"] else None
    spec = LossSpec(reduction, vocab_size=vocab_size, **{field: row[field] for field in _SPEC_FIELDS if field in row})
    rest = {k: v for k, v in row.items() if k not in ("shape", "padded", *_SPEC_FIELDS)}
    loss_scale = FP16_LOSS_SCALE[reduction] if dtype == "float16" else 1.0
    return Case(
        name=name,
        function=function,
        lead=lead,
        hidden=hidden,
        vocab=vocab,
        dtype=dtype,
        spec=spec,
        loss_scale=loss_scale,
        **rest,
    )


STRATA: tuple[tuple[Function, str, str], ...] = (
    *(("loss", dtype, reduction) for dtype, reduction in product(FLOAT_DTYPES, REDUCTIONS)),
    *(("log_probs", dtype, "none") for dtype in FLOAT_DTYPES),
)  # every (function, dtype, reduction) that has a pairwise table; log-probs are per token


@cache
def stratum_table(stratum: int) -> tuple[dict[str, tuple[Any, ...]], list[dict[str, Any]]]:
    """Returns the factors of `STRATA[stratum]` and its pairwise rows."""
    factors = _factors(*STRATA[stratum])
    # Each stratum has its own seed, so that the tables cover more triples together than one would.
    return factors, pairwise(factors, seed=stratum)


@cache
def sharp_cases() -> tuple[Case, ...]:
    """Returns the cases of sharp logits: pairwise over `SHARP_FACTORS`."""
    found = []
    for row in pairwise(SHARP_FACTORS):
        options = dict(row)
        (dtype, std), reduction = options.pop("dtype_and_std"), options.pop("reduction")
        if (dtype, reduction) == ("float16", "none"):  # elsewhere it would hide errors of the softmax part
            options["label_smoothing"] = 0.1
        case = _case("loss", dtype, reduction, options)
        found.append(replace(case, name=f"sharp{std:g}-{case.name}", logit_std=std, target="one_class"))
    return tuple(found)


def _token_loss_case(row: Mapping[str, Any]) -> Case:
    options = dict(row)
    token_loss, dtype, reduction = (options.pop(name) for name in ("token_loss", "dtype", "reduction"))
    case = _case("token_loss", dtype, reduction, options)
    return replace(case, name=f"token_loss-{token_loss}-{case.name}", token_loss=token_loss)


@cache
def token_loss_table() -> list[dict[str, Any]]:
    """Returns the pairwise rows of token losses."""
    return pairwise(TOKEN_LOSS_FACTORS)


@cache
def cases() -> tuple[Case, ...]:
    """Returns the every-day cases, over 400: pairwise tables, sharp logits, token losses, then the edges."""
    table = [
        _case(function, dtype, reduction, row)
        for stratum, (function, dtype, reduction) in enumerate(STRATA)
        for row in stratum_table(stratum)[1]
    ]
    return (*table, *sharp_cases(), *map(_token_loss_case, token_loss_table()), *_edges())


def exhaustive_cases() -> Iterator[Case]:
    """Yields all combinations of the options that change the meaning, sharp logits, the edges: thousands of cases."""
    for function, dtype, reduction in STRATA:
        for row in _combinations(_factors(function, dtype, reduction)):
            yield _case(function, dtype, reduction, row)
    yield from sharp_cases()
    yield from map(_token_loss_case, _combinations(TOKEN_LOSS_FACTORS))
    yield from _edges()


def _combinations(factors: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yields rows with all combinations of the factors that change the meaning, while the others rotate."""
    meaning = [name for name in factors if name in MEANING]
    turns = [name for name in factors if name not in MEANING]
    for index, values in enumerate(product(*(factors[name] for name in meaning))):
        # A mixed radix on a scrambled counter, or the rotation would be in step with that of the combinations.
        counter, row = index * 7919, dict(zip(meaning, values, strict=True))
        for name in turns:
            counter, digit = divmod(counter, len(factors[name]))
            row[name] = factors[name][digit]
        yield {name: row[name] for name in factors}


def select(only: str = "", exhaustive: bool = False) -> Iterator[Case]:
    """Yields the every-day cases, or the exhaustive ones, whose name holds the text `only`."""
    table = exhaustive_cases() if exhaustive else cases()
    return (case for case in table if only in case.name)


_PADDED = LossSpec(vocab_size=500, label_smoothing=0.1, z_loss_weight=0.01)

_INTO: dict[str, Any] = {"grad_into": True, "loss_scale": 1.0}  # the upstream gradient of "mean" and "sum" must be 1

_SPLIT_SPEC = LossSpec(head_precision="float32")
_SPLIT: dict[str, Any] = {"head_dtype": "float32", "spec": _SPLIT_SPEC}
_SPLIT_64 = {**_SPLIT, "hidden": 64, "vocab": 320}  # sizes for which all kernels store exponentials

# Edges of the contract: name, fields, dtypes. Reduction "mean" where no spec is given.
_ALL = FLOAT_DTYPES
_TWO = ("float32", "bfloat16")
_ONE = ("float32",)
_BF16 = ("bfloat16",)
_16_BITS = ("float16", "bfloat16")
_CAPPED = LossSpec("sum", softcap=3.0, logit_scale=0.7, z_loss_weight=0.1)
# A shape whose exponentials the kernels of both frameworks store, and a budget that holds all rows. One for 512 rows.
_SAVED: dict[str, Any] = {"hidden": 64, "vocab": 640, "upstream": "random", "saved_budget": 2**24}
_PART: dict[str, Any] = {**_SAVED, "lead": (640,), "saved_budget": 2**12 + 512 * (32 + 2 * (64 + 640))}
_LOSS_EDGES: tuple[tuple[str, dict[str, Any], Sequence[str]], ...] = (
    ("empty-mean", {"lead": (0,), "has_bias": True}, _TWO),
    ("empty-sum", {"lead": (0,), "spec": _SUM}, _ONE),
    ("empty-none", {"lead": (2, 0), "spec": _NONE, "has_bias": True}, _TWO),
    ("one_token", {"lead": (1,)}, _ALL),
    ("scalar_target", {"lead": (), "spec": _NONE}, _ONE),
    ("one_class", {"vocab": 1, "has_bias": True, "spec": LossSpec(z_loss_weight=0.01)}, _ALL),
    ("one_class_of_many", {"spec": LossSpec("sum", vocab_size=1, label_smoothing=0.1)}, _TWO),
    ("one_hidden", {"hidden": 1, "has_bias": True}, _ONE),
    ("ignored_all-mean", {"ignored": "all", "has_bias": True}, _ALL),
    ("ignored_all-sum", {"ignored": "all", "spec": _SUM, "poison": ("ignored_rows",)}, _TWO),
    ("ignored_all-none", {"ignored": "all", "spec": _NONE, "upstream": "random"}, _TWO),
    ("zero_normalizer", {"normalizer": 0.0, "has_bias": True}, _TWO),
    ("zero_class_weight", {"has_class_weight": "zero", "has_bias": True}, _TWO),
    ("zero_token_weight-mean", {"token_weight": "zero"}, _TWO),
    ("zero_token_weight-none", {"token_weight": "zero", "spec": _NONE, "poison": ("masked_rows",)}, _ONE),
    ("normalizer-large", {"normalizer": 1e6, "ignored": "some", "loss_scale": 65536.0}, _ALL),
    ("target_range-mean", {"poison": ("target_range",), "has_bias": True}, _TWO),
    ("target_range-sum", {"poison": ("target_range",), "spec": LossSpec("sum", vocab_size=500)}, _ALL),
    ("target_range-none", {"poison": ("target_range",), "spec": _NONE, "has_bias": True, "ignored": "some"}, _ALL),
    ("target_range-weight", {"poison": ("target_range",), "has_class_weight": True}, _TWO),
    ("target_range-weight-none", {"poison": ("target_range",), "has_class_weight": True, "spec": _NONE}, _ONE),
    ("target_range-smoothing", {"poison": ("target_range",), "spec": LossSpec("none", label_smoothing=0.1)}, _ONE),
    ("nan_ignored-mean", {"poison": ("ignored_rows",), "ignored": "some", "has_bias": True}, _ALL),
    (
        "nan_ignored-none",
        {"poison": ("ignored_rows",), "ignored": "some", "spec": _NONE, "token_weight": "signed"},
        _ALL,
    ),
    ("nan_masked-mean", {"poison": ("masked_rows",), "token_weight": "mask", "spec": _PADDED}, _ALL),
    ("nan_masked-sum", {"poison": ("masked_rows",), "token_weight": "mask", "spec": _SUM, "has_bias": True}, _TWO),
    ("nan_masked-none", {"poison": ("masked_rows",), "token_weight": "mask", "spec": _NONE}, _TWO),
    ("nan_padding-mean", {"poison": ("padding",), "spec": _PADDED, "has_bias": True, "has_class_weight": True}, _ALL),
    ("nan_padding-none", {"poison": ("padding",), "spec": LossSpec("none", vocab_size=501), "has_bias": True}, _TWO),
    ("masked_vocabulary-mean", {"poison": ("bias_neg_inf",), "has_bias": True}, _ALL),
    ("masked_vocabulary-none", {"poison": ("bias_neg_inf",), "has_bias": True, "spec": _NONE}, _TWO),
    ("masked_vocabulary-tight", {"poison": ("bias_neg_inf",), "has_bias": True, "tight_memory": True}, _ONE),
    ("masked_target-mean", {"poison": ("bias_neg_inf_target",), "has_bias": True}, _TWO),
    ("masked_target-none", {"poison": ("bias_neg_inf_target",), "has_bias": True, "spec": _NONE}, _TWO),
    ("inf_bias", {"poison": ("bias_pos_inf",), "has_bias": True, "spec": _NONE}, _TWO),
    ("inf_input", {"poison": ("input_inf",), "spec": _NONE}, _TWO),
    ("nan_input-mean", {"poison": ("input_nan",), "has_bias": True}, _TWO),
    ("nan_input-none", {"poison": ("input_nan",), "spec": _NONE, "has_bias": True}, _TWO),
    ("logits80-mean", {"logit_std": 40.0, "has_bias": True, "spec": LossSpec(z_loss_weight=0.001)}, _ALL),
    ("logits80-none", {"logit_std": 40.0, "spec": LossSpec("none", label_smoothing=0.1)}, _ALL),
    ("logits80-softcap", {"logit_std": 40.0, "spec": LossSpec(softcap=30.0)}, _ALL),
    ("logits_negative", {"spec": LossSpec("none", logit_scale=-1.5), "logit_std": 5.0}, _TWO),
    ("smoothing1", {"spec": LossSpec(label_smoothing=1.0), "has_class_weight": True}, _TWO),
    ("scale0", {"spec": LossSpec(logit_scale=0.0), "has_bias": True}, _ONE),
    ("ignore_index-class", {"spec": LossSpec("mean", ignore_index=7), "target": "skewed", "ignored": "some"}, _TWO),
    ("ignore_index-minus1", {"spec": LossSpec("none", ignore_index=-1), "ignored": "some"}, _ONE),
    ("target-int32", {"target_dtype": "int32", "ignored": "some"}, _ONE),
    ("target-uint8", {"target_dtype": "uint8", "vocab": 123}, _ONE),
    ("target-int8", {"target_dtype": "int8", "vocab": 123, "ignored": "some", "spec": _NONE}, _ONE),
    ("frozen_weight", {"frozen": ("linear_weight", "linear_bias"), "has_bias": True}, _ALL),
    ("frozen_weight-none", {"frozen": ("linear_weight", "linear_bias"), "has_bias": True, "spec": _NONE}, _TWO),
    ("frozen_input", {"frozen": ("input",), "has_bias": True}, _ALL),
    ("frozen_input-none", {"frozen": ("input",), "has_bias": True, "spec": _NONE}, _TWO),
    ("frozen_bias", {"frozen": ("linear_bias",), "has_bias": True, "spec": _SUM}, _ONE),
    ("only_bias", {"frozen": ("input", "linear_weight"), "has_bias": True}, _TWO),
    ("only_bias-none", {"frozen": ("input", "linear_weight"), "has_bias": True, "spec": _NONE}, _ONE),
    (
        "no_gradient-mean",
        {"frozen": ("input", "linear_weight", "linear_bias"), "has_bias": True, "spec": _PADDED},
        _ALL,
    ),
    (
        "no_gradient-none",
        {"frozen": ("input", "linear_weight"), "spec": LossSpec("none", softcap=5.0), "with_stats": False},
        _ALL,
    ),
    ("head32-mean", {"head_dtype": "float32", "has_bias": True}, ("bfloat16", "float16")),
    ("head32-none", {"head_dtype": "float32", "has_bias": True, "spec": _NONE}, ("bfloat16", "float16")),
    ("unscaled-none", {"spec": _NONE, "loss_scale": 1.0, "upstream": "random"}, ("float16",)),
    # Hidden sizes that matrix units want: kernels may serve others by other ways.
    ("hidden64", {"hidden": 64, "vocab": 320, "has_bias": True, "ignored": "some"}, _16_BITS),
    (
        "hidden64-odd",
        {"hidden": 192, "vocab": 1001, "has_bias": True, "poison": ("ignored_rows",), "ignored": "some"},
        _BF16,
    ),
    ("hidden64-sum", {"hidden": 320, "vocab": 640, "vocab_axis": 1, "spec": _CAPPED, "has_class_weight": True}, _BF16),
    ("hidden100-axis1", {"hidden": 100, "vocab": 640, "vocab_axis": 1}, _BF16),
    ("hidden64-none", {"hidden": 64, "vocab": 501, "spec": _NONE, "has_bias": True, "upstream": "random"}, _16_BITS),
    ("hidden64-tight", {"hidden": 64, "lead": (252,), "vocab": 320, "tight_memory": True, "has_bias": True}, _BF16),
    (  # vocabulary chunks of a (D, V) head that begin at no multiple of 64
        "hidden64-vocab-chunks",
        {"hidden": 64, "lead": (252,), "vocab": 640, "vocab_axis": 1, "tight_memory": True, "upstream": "random"}
        | {"has_bias": True, "spec": LossSpec("none", vocab_size=610)},
        _BF16,
    ),
    (  # terms of rank one, in several chunks
        "hidden64-smoothing",
        {"hidden": 64, "lead": (600,), "vocab": 1600, "tight_memory": True, "has_bias": True, "has_class_weight": True}
        | {"ignored": "some", "spec": LossSpec("sum", label_smoothing=0.1, vocab_size=1590)},
        _16_BITS,
    ),
    ("hidden64-padding", {"hidden": 64, "poison": ("padding",), "spec": LossSpec(vocab_size=500)}, _BF16),
    ("hidden64-nan", {"hidden": 64, "poison": ("input_nan",), "has_bias": True}, _BF16),
    ("hidden64-range", {"hidden": 64, "poison": ("target_range",), "has_bias": True}, _BF16),
    ("hidden64-masked", {"hidden": 64, "poison": ("bias_neg_inf",), "has_bias": True}, _BF16),
    ("hidden64-logits80", {"hidden": 64, "logit_std": 40.0, "spec": LossSpec(z_loss_weight=0.001)}, _BF16),
    ("hidden64-frozen", {"hidden": 64, "frozen": ("input",), "has_bias": True}, _BF16),
    ("tight-mean", {"tight_memory": True, "lead": (252,), "vocab": 123}, _ALL),
    ("tight-none", {"tight_memory": True, "lead": (252,), "vocab": 123, "spec": _NONE, "has_bias": True}, _ALL),
    (
        "grad_into-mean",
        {**_INTO, "has_bias": True, "ignored": "some", "poison": ("ignored_rows", "target_range")},
        _TWO,
    ),
    ("grad_into-tight", {**_INTO, "tight_memory": True, "lead": (252,), "vocab": 123, "spec": _NONE}, _BF16),
    (
        "grad_into-options",
        {**_INTO, "head_dtype": "float32", "vocab_axis": 1, "has_class_weight": True, "token_weight": "signed"}
        | {"spec": LossSpec("sum", label_smoothing=0.1, softcap=5.0, vocab_size=500), "tight_memory": True}
        | {"has_bias": True, "strided": True},
        _BF16,
    ),
    (
        "grad_into-none",
        {"grad_into": True, "hidden": 64, "vocab": 320, "lead": (252,), "tight_memory": True, "vocab_axis": 1}
        | {"has_bias": True, "has_class_weight": True, "token_weight": "signed", "ignored": "some", "strided": True}
        | {"poison": ("ignored_rows",), "upstream": "random"}
        | {"spec": LossSpec("none", softcap=5.0, z_loss_weight=0.01, vocab_size=310)},
        ("float16",),
    ),
    ("grad_into-empty", {**_INTO, "lead": (0,), "spec": _NONE}, _ONE),
    ("hidden64-grad_into", {**_INTO, "hidden": 64, "vocab": 320, "has_bias": True, "ignored": "some"}, _BF16),
    (
        "hidden64-grad_into-tight",
        {**_INTO, "hidden": 64, "lead": (252,), "vocab": 1024, "tight_memory": True, "vocab_axis": 1}
        | {"spec": LossSpec("sum", vocab_size=960, label_smoothing=0.1)},
        _BF16,
    ),
    (
        "head_split-mean",
        {**_SPLIT_64, "has_bias": True, "ignored": "some", "poison": ("ignored_rows", "target_range")},
        _BF16,
    ),
    ("head_split-none", {**_SPLIT, "spec": replace(_SPLIT_SPEC, reduction="none", softcap=5.0)}, _BF16),
    (
        "head_split-options",
        {**_SPLIT, "vocab_axis": 1, "hidden": 21, "has_class_weight": True, "token_weight": "signed", "strided": True}
        | {"spec": replace(_SPLIT_SPEC, label_smoothing=0.1, z_loss_weight=0.01, logit_scale=0.5, vocab_size=500)},
        _BF16,
    ),
    (
        "head_split-tight",
        {**_SPLIT, **_INTO, "tight_memory": True, "lead": (252,), "hidden": 64, "vocab": 1001},
        _BF16,
    ),
    # d_input is near the target's row of the head, so rounding that row too would show.
    ("head_split-few", {**_SPLIT, "lead": (1,), "hidden": 256, "vocab": 192, "logit_std": 0.01}, _BF16),
    ("head_split-frozen", {**_SPLIT, "frozen": ("linear_weight",)}, _BF16),
    ("hidden64-head_split-logits80", {**_SPLIT, "hidden": 64, "vocab": 640, "logit_std": 40.0}, _BF16),
    (
        "saved",
        {**_SAVED, "has_bias": True, "ignored": "some", "token_weight": "signed"}
        | {"spec": LossSpec("none", z_loss_weight=0.01), "poison": ("ignored_rows",)},
        _BF16,
    ),
    (
        "saved-softcap",
        {**_SAVED, "vocab_axis": 1, "has_class_weight": True, "spec": LossSpec("none", softcap=5.0, logit_scale=0.7)},
        _BF16,
    ),
    ("saved-nan", {**_SAVED, "spec": _NONE, "has_bias": True, "poison": ("input_nan", "target_range")}, _BF16),
    (
        "saved-tight",
        {**_SAVED, "spec": _NONE, "lead": (600,), "tight_memory": True, "upstream": "wide", "loss_scale": 1.0}
        | {"logit_std": 3.5},
        ("float16",),
    ),
    ("saved-part", {**_PART, "spec": _NONE, "has_bias": True, "ignored": "some", "tight_memory": True}, _BF16),
    ("saved-frozen_input", {**_SAVED, "spec": _NONE, "has_bias": True, "frozen": ("input",)}, _BF16),
)
_LOG_PROB: dict[str, Any] = {"unused": ("entropy", "lse")}
_LOG_PROBS_EDGES: tuple[tuple[str, dict[str, Any], Sequence[str]], ...] = (
    ("empty", {"lead": (0,)}, _TWO),
    ("one_token", {"lead": (1,), "tight_memory": True}, _ONE),
    ("one_class", {"vocab": 1, "has_bias": True}, _TWO),
    ("ignored_all", {"ignored": "all", "poison": ("ignored_rows",)}, _TWO),
    ("nan_ignored", {"ignored": "some", "poison": ("ignored_rows",), "has_bias": True}, _ALL),
    (
        "nan_padding",
        {"hidden": 64, "poison": ("padding",), "spec": LossSpec(vocab_size=500), "has_bias": True},
        _TWO,
    ),
    ("target_range", {"poison": ("target_range",), "has_bias": True, "ignored": "some"}, _TWO),
    ("masked_vocabulary", {"poison": ("bias_neg_inf",), "has_bias": True}, _ALL),
    ("masked_target", {"poison": ("bias_neg_inf_target",), "has_bias": True}, _TWO),
    ("nan_input", {"poison": ("input_nan",)}, _ONE),
    ("logits80", {"logit_std": 40.0}, _ALL),
    ("frozen_weight", {"frozen": ("linear_weight",)}, _TWO),
    (
        "frozen_input",
        {**_LOG_PROB, "frozen": ("input",), "grad_into": True, "hidden": 64, "vocab": 320, "has_bias": True},
        _BF16,
    ),
    ("no_gradient", {"frozen": ("input", "linear_weight"), "spec": LossSpec(softcap=5.0)}, _TWO),
    ("tight", {"tight_memory": True, "lead": (252,), "vocab": 123, "has_bias": True}, _ALL),
    # As in losses of whole sequences.
    ("log_prob", {**_LOG_PROB, "hidden": 64, "vocab": 501, "has_bias": True, "ignored": "some"}, _ALL),
    (
        "log_prob-axis1",
        {**_LOG_PROB, "hidden": 128, "vocab": 640, "vocab_axis": 1, "spec": LossSpec(softcap=5.0)},
        _BF16,
    ),
    ("log_prob-tight", {**_LOG_PROB, "hidden": 64, "lead": (600,), "vocab": 1600, "tight_memory": True}, _BF16),
    ("log_prob-range", {**_LOG_PROB, "hidden": 64, "poison": ("target_range",), "has_bias": True}, _BF16),
    ("log_prob-logits80", {**_LOG_PROB, "hidden": 64, "logit_std": 40.0}, _BF16),
    ("log_prob-frozen_weight", {**_LOG_PROB, "hidden": 64, "frozen": ("linear_weight",)}, _BF16),
    ("entropy", {"unused": ("log_prob", "lse"), "grad_into": True, "hidden": 64, "vocab": 320}, _TWO),
    ("head_split", {**_SPLIT_64, "has_bias": True, "ignored": "some"}, _BF16),
    ("saved", {**_SAVED, **_LOG_PROB, "has_bias": True, "ignored": "some", "poison": ("ignored_rows",)}, _BF16),
    ("saved-logits80", {**_SAVED, **_LOG_PROB, "logit_std": 40.0}, _BF16),
    ("saved-range", {**_SAVED, **_LOG_PROB, "poison": ("target_range",)}, _BF16),
    ("saved-part", {**_PART, **_LOG_PROB}, ("float16",)),
    ("saved-entropy", {**_SAVED}, _BF16),  # a gradient of the entropy: what was saved is not used
    ("saved-frozen_weight", {**_SAVED, **_LOG_PROB, "frozen": ("linear_weight",)}, ("float16",)),
)
_CLIP = {"token_loss": "ppo_clip"}
_KL = {"token_loss": "grpo-k3"}
_BONUS = {"token_loss": "grpo-k2-entropy"}
_STATS = {"token_stats": True}
_TOKEN_LOSS_EDGES: tuple[tuple[str, dict[str, Any], Sequence[str]], ...] = (
    ("empty-mean", {**_CLIP, "lead": (0,), "has_bias": True}, _ONE),
    ("empty-none", {**_CLIP, **_STATS, "lead": (2, 0), "spec": _NONE}, _BF16),
    ("one_token", {"token_loss": "weighted_nll", "lead": (1,)}, _ONE),
    ("ignored_all", {**_KL, "ignored": "all", "poison": ("ignored_rows",), "has_bias": True}, _BF16),
    ("normalizer", {**_KL, "normalizer": 41.5, "ignored": "some", "has_bias": True}, _TWO),
    ("zero_normalizer", {**_CLIP, "normalizer": 0.0}, _ONE),
    ("nan_ignored-mean", {**_BONUS, "poison": ("ignored_rows",), "ignored": "some", "has_bias": True}, _BF16),
    ("nan_masked-none", {**_KL, "poison": ("masked_rows",), "token_weight": "mask", "spec": _NONE}, _ONE),
    (
        "nan_padding",
        {**_BONUS, **_STATS, "hidden": 64, "poison": ("padding",), "spec": LossSpec("sum", vocab_size=500)}
        | {"has_bias": True},
        _BF16,
    ),
    ("target_range-mean", {**_KL, "poison": ("target_range",), "has_bias": True}, _16_BITS),
    ("target_range-none", {**_BONUS, "poison": ("target_range",), "spec": LossSpec("none", vocab_size=500)}, _ONE),
    ("masked_target", {**_BONUS, "poison": ("bias_neg_inf_target",), "has_bias": True, "spec": _NONE}, _ONE),
    ("ignore_index", {**_CLIP, "spec": LossSpec("sum", ignore_index=7), "target": "skewed", "ignored": "some"}, _ONE),
    ("head32", {**_CLIP, "head_dtype": "float32", "has_bias": True}, _BF16),
    ("head_split", {**_CLIP, **_SPLIT_64, "has_bias": True}, _BF16),
    ("frozen_weight", {**_BONUS, "frozen": ("linear_weight",)}, _BF16),
    ("frozen_tokens", {**_KL, "frozen": ("advantage", "old_log_prob", "ref_log_prob"), "spec": _SUM}, _BF16),
    ("only_tokens", {**_CLIP, "frozen": ("input", "linear_weight")}, _ONE),
    ("no_gradient", {**_CLIP, "frozen": ("input", "linear_weight", "advantage", "old_log_prob")}, _BF16),
    ("hidden64", {**_KL, "hidden": 64, "vocab": 320, "has_bias": True, "ignored": "some"}, _16_BITS),
    ("hidden64-tight", {**_KL, "hidden": 64, "lead": (600,), "vocab": 1600, "tight_memory": True}, _BF16),
    ("grad_into", {**_KL, **_INTO, "tight_memory": True, "lead": (252,), "vocab": 123, "has_bias": True}, _BF16),
    ("tight-mean", {**_KL, "tight_memory": True, "lead": (252,), "vocab": 123}, _ALL),
    ("tight-none", {**_KL, "grad_into": True, "tight_memory": True, "lead": (252,), "vocab": 123, "spec": _NONE}, _ONE),
    ("stats-mean", {**_KL, **_STATS, "hidden": 64, "has_bias": True, "spec": LossSpec(vocab_size=500)}, _16_BITS),
    ("stats-none", {**_BONUS, **_STATS, "vocab": 123, "spec": LossSpec("none", softcap=5.0, logit_scale=0.5)}, _ONE),
    (
        "stats-tight",
        {**_KL, **_STATS, "tight_memory": True, "lead": (252,), "hidden": 64, "vocab": 640, "ignored": "some"}
        | {"poison": ("ignored_rows",)},
        _BF16,
    ),
    ("stats-no_gradient", {**_STATS, "token_loss": "reinforce-k1", "frozen": ("input", "linear_weight")}, _BF16),
    (
        "stats-poisons",
        {**_STATS, "token_loss": "weighted_nll", "has_bias": True, "ignored": "some"}
        | {"poison": ("bias_neg_inf_target", "input_nan", "target_range")},
        _TWO,
    ),
    ("stats-logits80", {**_CLIP, **_STATS, "logit_std": 40.0, "hidden": 64, "vocab": 640}, _BF16),
    ("stats-grad_into", {**_BONUS, **_STATS, **_INTO, **_SPLIT_64, "has_bias": True, "ignored": "some"}, _BF16),
)


def _edges() -> Iterator[Case]:
    tables: tuple[tuple[Function, Any], ...] = (
        ("loss", _LOSS_EDGES),
        ("log_probs", _LOG_PROBS_EDGES),
        ("token_loss", _TOKEN_LOSS_EDGES),
    )
    for function, edges in tables:
        for label, fields, dtypes in edges:
            for dtype in dtypes:
                reduction = "none" if function == "log_probs" else fields.get("spec", _MEAN).reduction
                scale = FP16_LOSS_SCALE[reduction] if dtype == "float16" else 1.0
                upstream = "random" if function == "log_probs" else "one"
                prefix = "edge" if function == "loss" else f"edge-{function}"
                settings = {"loss_scale": scale, "upstream": upstream, **fields}
                name = f"{prefix}-{label}-{DTYPE_LABELS[dtype]}"
                yield Case(name=name, function=function, dtype=dtype, **settings)
