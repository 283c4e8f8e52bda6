"""Tests the options and arrays that a call refuses, and the error messages."""

import re
from typing import Any

import numpy as np
import pytest

from linear_ce.spec import DEFAULT_MEMORY_BUDGET, ArrayInfo, LossSpec, check_arrays, check_choice, check_memory_budget

BAD_OPTIONS = [
    ({"reduction": "average"}, ValueError, "reduction must be one of 'mean', 'sum', 'none', got 'average'"),
    ({"reduction": None}, ValueError, "reduction must be one of 'mean', 'sum', 'none', got None"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing must lie in [0, 1], got 1.5"),
    ({"label_smoothing": -0.1}, ValueError, "label_smoothing must lie in [0, 1], got -0.1"),
    ({"label_smoothing": "0.1"}, TypeError, "label_smoothing must be a Python number, got str"),
    ({"label_smoothing": True}, TypeError, "label_smoothing must be a Python number, got bool"),
    ({"label_smoothing": float("nan")}, ValueError, "label_smoothing must be finite, got nan"),
    ({"z_loss_weight": -1e-4}, ValueError, "z_loss_weight must not be negative, got -0.0001"),
    ({"z_loss_weight": np.zeros(2)}, TypeError, "z_loss_weight must be a Python number, got ndarray"),
    ({"z_loss_weight": float("inf")}, ValueError, "z_loss_weight must be finite, got inf"),
    ({"z_loss_weight": 1e39}, ValueError, "z_loss_weight must fit float32, got 1e+39"),
    ({"softcap": 1e300}, ValueError, "softcap must fit float32, got 1e+300"),
    ({"softcap": 1e-50}, ValueError, "softcap must fit float32, got 1e-50"),
    ({"logit_scale": -1e300}, ValueError, "logit_scale must fit float32, got -1e+300"),
    ({"logit_scale": 10**400}, ValueError, f"logit_scale must be finite, got {10**400}"),
    ({"softcap": 0.0}, ValueError, "softcap must be positive or None, got 0.0"),
    ({"softcap": -30}, ValueError, "softcap must be positive or None, got -30.0"),
    ({"softcap": "30"}, TypeError, "softcap must be a Python number, got str"),
    ({"logit_scale": None}, TypeError, "logit_scale must be a Python number, got NoneType"),
    ({"logit_scale": float("-inf")}, ValueError, "logit_scale must be finite, got -inf"),
    ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1, got 0"),
    ({"vocab_size": 7.0}, TypeError, "vocab_size must be a Python int, got float"),
    *(
        ({"head_precision": value}, ValueError, f"head_precision must be one of 'input', 'float32', got {value!r}")
        for value in ("", False, 0)
    ),
    ({"head_precision": "high"}, ValueError, "head_precision must be one of 'input', 'float32', got 'high'"),
    ({"ignore_index": 2**63}, ValueError, "ignore_index must fit int64, got 9223372036854775808"),
    (
        {"ignore_index": None},
        TypeError,
        "ignore_index must be a Python int, got NoneType: to ignore no token, pass an int that is no target",
    ),
    ({"ignore_index": False}, TypeError, "ignore_index must be a Python int, got bool"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD_OPTIONS, ids=[str(bad[0]) for bad in BAD_OPTIONS])
def test_bad_option_is_named(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        LossSpec(**options)


def test_equal_options_are_equal_specs() -> None:
    plain = LossSpec("mean", -1, 0.5, 1.0, 30.0, 2.0, 9)
    others: dict[str, Any] = {"ignore_index": np.int64(-1), "label_smoothing": np.float32(0.5), "z_loss_weight": 1}
    other = LossSpec("mean", softcap=30, logit_scale=2, vocab_size=np.int32(9), **others)  # pyright: ignore[reportArgumentType]
    assert other == plain
    assert hash(other) == hash(plain)
    assert type(other.vocab_size) is int
    assert type(other.label_smoothing) is float
    assert LossSpec(head_precision=None) == LossSpec(head_precision="input") == LossSpec()


def test_spec_is_frozen() -> None:
    with pytest.raises(AttributeError):
        LossSpec().softcap = 3.0  # pyright: ignore[reportAttributeAccessIssue]


def test_classes() -> None:
    assert LossSpec().classes(11) == 11
    assert LossSpec(vocab_size=11).classes(11) == 11
    assert LossSpec(vocab_size=9).classes(11) == 9
    with pytest.raises(ValueError, match=r"vocab_size must not exceed linear_weight's 11 rows, got 12"):
        LossSpec(vocab_size=12).classes(11)


def arguments(**changes: Any) -> dict[str, Any]:
    """Returns valid arguments of `check_arrays`, with changes."""
    good = {
        "input": ArrayInfo((2, 3, 5), "bfloat16"),
        "linear_weight": ArrayInfo((11, 5), "bfloat16"),
        "target": ArrayInfo((2, 3), "int32"),
        "spec": LossSpec(),
    }
    return good | changes


GOOD_ARRAYS = [
    {},
    {"linear_weight": ArrayInfo((11, 5), "float32")},
    {"linear_weight": ArrayInfo((5, 11), "bfloat16"), "vocab_axis": 1},
    {"linear_weight": ArrayInfo((11, 5), "float32"), "spec": LossSpec(head_precision="float32")},
    {"grad_into": ArrayInfo((11, 5), "float32")},
    {"linear_bias": ArrayInfo((11,), "float32"), "weight": ArrayInfo((11,), "float16")},
    {"token_weight": ArrayInfo((2, 3), "bfloat16"), "normalizer": ArrayInfo((), "int32")},
    {"normalizer": ArrayInfo((), "float64"), "target": ArrayInfo((2, 3), "uint8")},
    {
        "input": ArrayInfo((5,), "float16"),
        "linear_weight": ArrayInfo((11, 5), "float16"),
        "target": ArrayInfo((), "int64"),
    },
    {
        "input": ArrayInfo((0, 5), "float32"),
        "linear_weight": ArrayInfo((1, 5), "float32"),
        "target": ArrayInfo((0,), "int64"),
    },
]


@pytest.mark.parametrize("changes", GOOD_ARRAYS, ids=range(len(GOOD_ARRAYS)))
def test_admitted_arrays_pass(changes: dict[str, Any]) -> None:
    check_arrays(**arguments(**changes))


BAD_ARRAYS = [
    ({"input": ArrayInfo((), "bfloat16")}, ValueError, "input must have shape (..., D), got ()"),
    (
        {"input": ArrayInfo((2, 3, 5), "float64")},
        TypeError,
        "input must be float16 or bfloat16 or float32, got float64",
    ),
    ({"input": ArrayInfo((2, 3, 5), "int32")}, TypeError, "input must be float16 or bfloat16 or float32, got int32"),
    (
        {"linear_weight": ArrayInfo((11, 5, 1), "bfloat16")},
        ValueError,
        "linear_weight must have shape (V, D), got (11, 5, 1)",
    ),
    (
        {"linear_weight": ArrayInfo((11, 5), "float16")},
        TypeError,
        "linear_weight must be bfloat16 or float32, got float16 (input is bfloat16)",
    ),
    (
        {"input": ArrayInfo((2, 3, 5), "float32")},
        TypeError,
        "linear_weight must be float32, got bfloat16 (input is float32)",
    ),
    (
        {"linear_weight": ArrayInfo((5, 11), "bfloat16")},
        ValueError,
        "linear_weight must have shape (V, D) with D = 5 as in input (2, 3, 5), got (5, 11), whose transpose is (V, D)",
    ),
    (
        {"vocab_axis": 1},
        ValueError,
        "linear_weight must have shape (D, V) with D = 5 as in input (2, 3, 5), got (11, 5), whose transpose is (D, V)",
    ),
    (
        {"spec": LossSpec(head_precision="float32")},
        ValueError,
        'head_precision "float32" needs a float32 linear_weight and a bfloat16 input, '
        "got a bfloat16 linear_weight and a bfloat16 input",
    ),
    (
        {"spec": LossSpec(head_precision="float32"), "input": ArrayInfo((2, 3, 5), "float16")}
        | {"linear_weight": ArrayInfo((11, 5), "float32")},
        ValueError,
        'head_precision "float32" needs a float32 linear_weight and a bfloat16 input, '
        "got a float32 linear_weight and a float16 input",
    ),
    ({"grad_into": ArrayInfo((11, 5), "bfloat16")}, TypeError, "grad_into must be float32, got bfloat16"),
    (
        {"grad_into": ArrayInfo((5, 11), "float32")},
        ValueError,
        "grad_into must have shape (11, 5) (linear_weight's shape), got (5, 11)",
    ),
    ({"vocab_axis": 2}, ValueError, "vocab_axis must be 0 or 1, got 2"),
    ({"vocab_axis": True}, TypeError, "vocab_axis must be a Python int, got bool"),
    ({"vocab_axis": np.array([0, 1])}, TypeError, "vocab_axis must be a Python int, got ndarray"),
    (
        {"linear_weight": ArrayInfo((0, 5), "bfloat16")},
        ValueError,
        "linear_weight must have at least one row and one column, got (0, 5)",
    ),
    (
        {"input": ArrayInfo((2, 3, 0), "bfloat16"), "linear_weight": ArrayInfo((11, 0), "bfloat16")},
        ValueError,
        "linear_weight must have at least one row and one column, got (11, 0)",
    ),
    ({"target": ArrayInfo((2, 3), "float32")}, TypeError, "target must have an integer dtype, got float32"),
    ({"target": ArrayInfo((2, 3), "bool")}, TypeError, "target must have an integer dtype, got bool"),
    (
        {"target": ArrayInfo((6,), "int32")},
        ValueError,
        "target must have shape (2, 3) (input without its last axis), got (6,)",
    ),
    (
        {"linear_bias": ArrayInfo((10,), "bfloat16")},
        ValueError,
        "linear_bias must have shape (11,) (a number for each class of linear_weight, padding included), got (10,)",
    ),
    (
        {"linear_bias": ArrayInfo((11,), "float16")},
        TypeError,
        "linear_bias must be bfloat16 or float32, got float16 (input is bfloat16)",
    ),
    (
        {"weight": ArrayInfo((11, 1), "float32")},
        ValueError,
        "weight must have shape (11,) (a number for each class of linear_weight, padding included), got (11, 1)",
    ),
    (
        {"weight": ArrayInfo((11,), "int64")},
        TypeError,
        "weight must be float16 or bfloat16 or float32, got int64",
    ),
    (
        {"token_weight": ArrayInfo((3, 2), "float32")},
        ValueError,
        "token_weight must have shape (2, 3) (target's shape), got (3, 2)",
    ),
    (
        {"token_weight": ArrayInfo((2, 3), "bool")},
        TypeError,
        "token_weight must be float16 or bfloat16 or float32, got bool",
    ),
    (
        {"normalizer": ArrayInfo((1,), "float32")},
        ValueError,
        "normalizer must have shape () (a scalar), got (1,)",
    ),
    (
        {"normalizer": ArrayInfo((), "complex64")},
        TypeError,
        "normalizer must be float16 or bfloat16 or float32 or float64, got complex64",
    ),
    (
        {"normalizer": ArrayInfo((), "float32"), "spec": LossSpec("sum")},
        ValueError,
        "normalizer needs reduction \"mean\", got reduction 'sum'",
    ),
    (
        {"spec": LossSpec(vocab_size=12)},
        ValueError,
        "vocab_size must not exceed linear_weight's 11 rows, got 12",
    ),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD_ARRAYS, ids=[bad[2] for bad in BAD_ARRAYS])
def test_bad_array_is_named(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        check_arrays(**arguments(**changes))


def test_memory_budget() -> None:
    assert check_memory_budget(None) == DEFAULT_MEMORY_BUDGET == 2**29
    assert check_memory_budget(1) == 1
    for bad, kind, message in (
        (0, ValueError, "memory_budget must be positive (bytes), got 0"),
        (-5, ValueError, "memory_budget must be positive (bytes), got -5"),
        (1e9, TypeError, "memory_budget must be a Python int, got float"),
        (True, TypeError, "memory_budget must be a Python int, got bool"),
    ):
        with pytest.raises(kind, match=f"^{re.escape(message)}$"):
            check_memory_budget(bad)  # pyright: ignore[reportArgumentType]


def test_choice() -> None:
    assert check_choice("implementation", "chunked", ("chunked", "triton")) == "chunked"
    with pytest.raises(ValueError, match=r"^implementation must be one of 'chunked', 'triton', got 'fast'$"):
        check_choice("implementation", "fast", ("chunked", "triton"))


def test_bounds_are_admitted() -> None:
    assert LossSpec(vocab_size=5).classes(5) == 5
    assert [LossSpec(label_smoothing=bound).label_smoothing for bound in (0, 1)] == [0.0, 1.0]
    assert LossSpec(z_loss_weight=0.0, vocab_size=1).classes(1) == 1
