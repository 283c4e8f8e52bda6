"""Every invalid input of the contract raises an error that names the argument and the value it got."""

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from allocations import Meter
from assertions import least_budget
from torch.utils.flop_counter import FlopCounterMode
from torch_problem import problem

import core_triton

BAD_ARRAYS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "input no tensor": ({"input": np.zeros((12, 8))}, TypeError, "input must be a Tensor, got ndarray"),
    "weight none": ({"linear_weight": None}, TypeError, "linear_weight must be a Tensor, got NoneType"),
    "target list": ({"target": [0] * 12}, TypeError, "target must be a Tensor, got list"),
    "bias list": ({"linear_bias": [0.0] * 50}, TypeError, "linear_bias must be a Tensor or None, got list"),
    "input float64": (
        {"input": torch.zeros(12, 8, dtype=torch.float64)},
        TypeError,
        "input must be float16 or bfloat16 or float32, got float64",
    ),
    "input integer": ({"input": torch.zeros(12, 8, dtype=torch.int32)}, TypeError, "input must be .* got int32"),
    "input scalar": ({"input": torch.zeros(())}, ValueError, r"input must have shape \(\.\.\., D\), got \(\)"),
    "weight one axis": (
        {"linear_weight": torch.zeros(50)},
        ValueError,
        r"linear_weight must have shape \(V, D\), got \(50,\)",
    ),
    "weight three axes": ({"linear_weight": torch.zeros(50, 8, 1)}, ValueError, r"linear_weight .* got \(50, 8, 1\)"),
    "weight other D": (
        {"linear_weight": torch.zeros(50, 9)},
        ValueError,
        r"linear_weight must have shape \(V, D\) with D = 8 as in input \(12, 8\), got \(50, 9\)$",
    ),
    "weight without rows": ({"linear_weight": torch.zeros(0, 8)}, ValueError, r"linear_weight must .* got \(0, 8\)"),
    "weight bfloat16": (
        {"linear_weight": torch.zeros(50, 8, dtype=torch.bfloat16)},
        TypeError,
        "linear_weight must be float32, got bfloat16",
    ),
    "target float": ({"target": torch.zeros(12)}, TypeError, "target must have an integer dtype, got float32"),
    "target bool": ({"target": torch.zeros(12, dtype=torch.bool)}, TypeError, "target must .* integer dtype, got bool"),
    "target shape": (
        {"target": torch.zeros(11, dtype=torch.long)},
        ValueError,
        r"target must have shape \(12,\) \(input without its last axis\), got \(11,\)",
    ),
    "bias shape": ({"linear_bias": torch.zeros(49)}, ValueError, r"linear_bias must have shape \(50,\).* got \(49,\)"),
    "bias dtype": (
        {"linear_bias": torch.zeros(50, dtype=torch.float16)},
        TypeError,
        "linear_bias must be float32, got float16",
    ),
    "target device": (
        {"target": torch.zeros(12, dtype=torch.long, device="meta")},
        ValueError,
        "target must be on input's device cpu, got meta",
    ),
    "weight device": (
        {"linear_weight": torch.zeros(50, 8, device="meta")},
        ValueError,
        "linear_weight must be on input's device cpu, got meta",
    ),
}

BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "softcap zero": ({"softcap": 0.0}, ValueError, "softcap must be positive or None, got 0.0"),
    "softcap text": ({"softcap": "big"}, TypeError, "softcap must be a Python number, got str"),
    "softcap tensor": ({"softcap": torch.tensor(3.0)}, TypeError, "softcap must be a Python number, got Tensor"),
    "scale infinite": ({"logit_scale": float("inf")}, ValueError, "logit_scale must be finite, got inf"),
    "scale bool": ({"logit_scale": True}, TypeError, "logit_scale must be a Python number, got bool"),
    "vocab_size too large": (
        {"vocab_size": 51},
        ValueError,
        "vocab_size must not exceed linear_weight's 50 rows, got 51",
    ),
    "vocab_size zero": ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1, got 0"),
    "vocab_size float": ({"vocab_size": 50.0}, TypeError, "vocab_size must be a Python int, got float"),
    "ignore_index float": ({"ignore_index": 0.5}, TypeError, "ignore_index must be a Python int, got float"),
    "ignore_index none": (
        {"ignore_index": None},
        TypeError,
        "ignore_index must be a Python int, got NoneType: to ignore no token, pass an int that is no target$",
    ),
    "check_agreement": ({"check_agreement": "yes"}, TypeError, "check_agreement must be a bool, got str$"),
    "memory_budget zero": ({"memory_budget": 0}, ValueError, r"memory_budget must be positive \(bytes\), got 0"),
    "memory_budget float": ({"memory_budget": 1e9}, TypeError, "memory_budget must be a Python int, got float"),
    "memory_budget list": ({"memory_budget": [1]}, TypeError, "memory_budget must be a Python int, got list"),
    "saved_budget list": ({"saved_budget": [1]}, TypeError, "saved_budget must be a Python int, got list"),
    "batch_invariant list": ({"batch_invariant": [True]}, TypeError, "batch_invariant must be a bool, got list"),
    "softcap list": ({"softcap": [3.0]}, TypeError, "softcap must be a Python number, got list"),
    "implementation list": (
        {"implementation": ["chunked"]},
        ValueError,
        r"implementation must be one of 'triton', 'triton_sm80', 'chunked', got \['chunked'\]",
    ),
    "memory_budget small": (
        {"memory_budget": 1000},
        ValueError,
        r"memory_budget must be at least \d+ bytes for 12 tokens and 50 classes, got 1000",
    ),
    "implementation": (
        {"implementation": "fastest"},
        ValueError,
        "implementation must be one of 'triton', 'triton_sm80', 'chunked', got 'fastest'",
    ),
}

BAD_LOSS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "reduction": ({"reduction": "max"}, ValueError, "reduction must be one of 'mean', 'sum', 'none', got 'max'"),
    "smoothing large": ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must lie in \[0, 1\], got 1.5"),
    "smoothing negative": ({"label_smoothing": -0.1}, ValueError, r"label_smoothing must lie in \[0, 1\], got -0.1"),
    "smoothing NaN": ({"label_smoothing": float("nan")}, ValueError, "label_smoothing must be finite, got nan"),
    "z_loss_weight": ({"z_loss_weight": -1e-4}, ValueError, "z_loss_weight must not be negative, got -0.0001"),
    "class weight shape": ({"weight": torch.ones(49)}, ValueError, r"weight must have shape \(50,\).* got \(49,\)"),
    "class weight dtype": ({"weight": torch.ones(50, dtype=torch.long)}, TypeError, "weight must be .* got int64"),
    "class weight list": ({"weight": [1.0] * 50}, TypeError, "weight must be a Tensor or None, got list"),
    "class weight grad": (
        {"weight": torch.ones(50, requires_grad=True)},
        ValueError,
        "weight is not differentiated and must not require grad",
    ),
    "token_weight shape": (
        {"token_weight": torch.ones(12, 1)},
        ValueError,
        r"token_weight must have shape \(12,\) \(target's shape\), got \(12, 1\)",
    ),
    "token_weight dtype": (
        {"token_weight": torch.ones(12, dtype=torch.bool)},
        TypeError,
        "token_weight must be .* got bool",
    ),
    "token_weight grad": ({"token_weight": torch.ones(12, requires_grad=True)}, ValueError, "token_weight is not diff"),
    "token_weight device": (
        {"token_weight": torch.ones(12, device="meta")},
        ValueError,
        "token_weight must be on input's device cpu, got meta",
    ),
    "normalizer negative": ({"normalizer": -1}, ValueError, "normalizer must be finite and not negative, got -1"),
    "normalizer nan": ({"normalizer": float("nan")}, ValueError, "normalizer must be finite and not negative, got nan"),
    "normalizer array": (
        {"normalizer": np.array(-3.0)},
        ValueError,
        "normalizer must be finite and not negative, got -3.0",
    ),
    "normalizer scalar": ({"normalizer": np.float32("nan")}, ValueError, "normalizer must be finite .* got nan"),
    "normalizer array of axes": ({"normalizer": np.ones(1)}, TypeError, "normalizer must be a number, .* got ndarray"),
    "normalizer large": ({"normalizer": 1e39}, ValueError, r"normalizer must fit float32, got 1e\+39$"),
    "normalizer of many digits": ({"normalizer": 10**400}, ValueError, "normalizer must be finite .* got 10000"),
    "normalizer small": ({"normalizer": 1e-50}, ValueError, "normalizer must fit float32, got 1e-50$"),
    "normalizer inf": ({"normalizer": float("inf")}, ValueError, "normalizer must be finite and not negative, got inf"),
    "normalizer text": ({"normalizer": "all"}, TypeError, "normalizer must be a number, a scalar Tensor .* got str"),
    "normalizer bool": ({"normalizer": True}, TypeError, "normalizer must be a number, a scalar Tensor .* got bool"),
    "normalizer shape": (
        {"normalizer": torch.ones(1)},
        ValueError,
        r"normalizer must have shape \(\) \(a scalar\), got \(1,\)",
    ),
    "normalizer of a sum": (
        {"normalizer": 3.0, "reduction": "sum"},
        ValueError,
        "normalizer needs reduction \"mean\", got reduction 'sum'",
    ),
    "normalizer sparse": (
        {"normalizer": torch.zeros((), layout=torch.sparse_coo)},
        TypeError,
        "normalizer must be a dense Tensor, got layout torch.sparse_coo$",
    ),
    "normalizer grad": ({"normalizer": torch.ones((), requires_grad=True)}, ValueError, "normalizer is not diff"),
}


def bad_inputs(tables: list[dict[str, tuple[dict[str, Any], type[Exception], str]]]) -> list[Any]:
    return [pytest.param(*row, id=name) for table in tables for name, row in table.items()]


@pytest.mark.parametrize(("change", "kind", "message"), bad_inputs([BAD_ARRAYS, BAD_OPTIONS, BAD_LOSS]))
def test_loss_refuses(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = problem() | change
    for function in (core_triton.linear_cross_entropy, core_triton.linear_cross_entropy_with_stats):
        with pytest.raises(kind, match=message):
            function(**arguments)


@pytest.mark.parametrize(("change", "kind", "message"), bad_inputs([BAD_ARRAYS, BAD_OPTIONS]))
def test_log_probs_refuse(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = problem() | change
    with pytest.raises(kind, match=message):
        core_triton.linear_log_probs(**arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_of_another_16_bit_dtype_is_refused(dtype: torch.dtype) -> None:
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    arrays = problem(dtype=dtype)
    arrays["linear_weight"] = arrays["linear_weight"].to(other)
    name, got = str(dtype).removeprefix("torch."), str(other).removeprefix("torch.")
    with pytest.raises(TypeError, match=rf"linear_weight must be {name} or float32, got {got} \(input is {name}\)"):
        core_triton.linear_cross_entropy(**arrays)


def test_check_targets_names_the_first_bad_positions() -> None:
    core_triton.check_targets(torch.tensor([[0, 9], [-100, 3]]), 10)
    core_triton.check_targets(torch.tensor([0, -1]), 10, ignore_index=-1)
    core_triton.check_targets(torch.zeros(0, dtype=torch.long), 10)
    with pytest.raises(ValueError, match=r"target must lie in \[0, 10\) or be ignore_index -100, got 2 others") as bad:
        core_triton.check_targets(torch.tensor([[0, 10], [-1, 3]]), 10)
    assert "target[0, 1] = 10, target[1, 0] = -1" in str(bad.value)
    with pytest.raises(ValueError, match=r"got 1 others: target = 10$"):
        core_triton.check_targets(torch.tensor(10), 10)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_check_targets_takes_unsigned_integers(dtype: torch.dtype) -> None:
    target = torch.tensor([0, 9]).to(dtype)
    core_triton.check_targets(target, 10)
    with pytest.raises(ValueError, match=r"got 1 others: target\[1\] = 9$"):
        core_triton.check_targets(target, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ignore_index": 2**70}, "ignore_index must fit int64, got 1180591620717411303424"),
        ({"vocab_size": None}, "vocab_size must be a Python int, got NoneType"),
        ({"vocab_size": 2.5}, "vocab_size must be a Python int, got float"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"vocab_size": torch.Size((10, 8))}, "vocab_size must be a Python int, got Size"),
        ({"ignore_index": None}, "ignore_index must be a Python int, got NoneType"),
    ],
)
def test_check_targets_names_a_wrong_option(change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"vocab_size": 10} | change
    with pytest.raises((TypeError, ValueError), match=message):
        core_triton.check_targets(torch.tensor([0]), **options)


@pytest.mark.parametrize("target", [np.arange(4), [0, 1]])
def test_check_targets_takes_a_tensor(target: Any) -> None:
    with pytest.raises(TypeError, match=f"target must be a Tensor, got {type(target).__name__}"):
        core_triton.check_targets(target, 2)


def test_check_targets_takes_integers() -> None:
    with pytest.raises(TypeError, match="target must have an integer dtype, got float32"):
        core_triton.check_targets(torch.zeros(3), 2)


def test_check_token_loss_takes_tensors() -> None:
    with pytest.raises(TypeError, match=r"per_token\[0\] must be a Tensor, got list"):
        core_triton.check_token_loss(core_triton.token_losses.weighted_nll(), [1.0, 2.0])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["input", "linear_weight"])
def test_explain_takes_tensors(name: str) -> None:
    arrays: dict[str, Any] = {"input": torch.ones(4, 8), "linear_weight": torch.ones(16, 8)} | {name: [1.0]}
    with pytest.raises(TypeError, match=f"{name} must be a Tensor, got list"):
        core_triton.explain(**arrays)
    with pytest.raises(TypeError, match=f"{name} must be a dense Tensor, got layout torch.sparse_coo"):
        core_triton.explain(**{**arrays, name: torch.ones(4, 8).to_sparse()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradients": "yes"}, "gradients must be a bool, got str"),
        ({"sequence_parallel": "yes"}, "sequence_parallel must be a bool, got str"),
        ({"grad_into": True}, "grad_into must be a Tensor or None, got bool"),
    ],
)
def test_explain_names_a_wrong_option(change: dict[str, Any], message: str) -> None:
    arrays: dict[str, Any] = {"input": torch.ones(4, 8), "linear_weight": torch.ones(16, 8)}
    with pytest.raises(TypeError, match=message):
        core_triton.explain(**arrays, **change)


@pytest.mark.parametrize("name", ["input", "linear_weight", "target"])
def test_a_tensor_that_is_not_dense_is_named(name: str) -> None:
    arrays = problem()
    message = f"{name} must be a dense Tensor, got "
    with pytest.raises(TypeError, match=f"{message}layout torch.sparse_coo"):
        core_triton.linear_cross_entropy(**{**arrays, name: arrays[name].to_sparse()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        nested = torch.nested.nested_tensor([arrays[name], arrays[name]])
    with pytest.raises(TypeError, match=f"{message}a nested one"):
        core_triton.linear_cross_entropy(**{**arrays, name: nested})


def test_a_layer_in_place_of_its_weight_is_named() -> None:
    arrays = problem()
    arrays["linear_weight"] = torch.nn.Linear(8, 100)
    message = "linear_weight must be a Tensor, got Linear: pass its weight, and a bias as linear_bias$"
    with pytest.raises(TypeError, match=message):
        core_triton.linear_cross_entropy(**arrays)


def test_check_targets_names_no_more_than_a_few() -> None:
    with pytest.raises(ValueError, match="got 1000 others") as bad:
        core_triton.check_targets(torch.full((1000,), 7), 7)
    assert len(str(bad.value)) < 300


def test_explain_says_why() -> None:
    arrays = problem()
    name, reason = core_triton.explain(arrays["input"], arrays["linear_weight"])
    assert name == "chunked"
    assert reason == "no kernel for cpu devices"
    assert core_triton.explain(arrays["input"], arrays["linear_weight"], implementation="chunked").name == "chunked"
    with pytest.raises(ValueError, match=r"implementation must be one of .* got 'cuda'"):
        core_triton.explain(arrays["input"], arrays["linear_weight"], implementation="cuda")


def test_explain_prints_the_plan() -> None:
    arrays = problem()
    x, w = arrays["input"], arrays["linear_weight"]
    explained = core_triton.explain(x.half(), w, memory_budget=2**20, reduction="none")
    assert explained.plan.path == "chunked"
    assert explained.plan.memory_budget == 2**20
    lines = dict(line.split(": ", 1) for line in str(explained).splitlines())
    assert lines["implementation"] == "chunked, no kernel for cpu devices"
    assert lines["chunks"] == f"1 of up to {len(x)} rows"
    assert lines["weight"] == "copied one vocabulary chunk at a time"
    assert lines["matmuls"] == "logits of the losses, logits, d_input, d_weight by PyTorch"
    assert lines["workspace"].endswith("of a budget of 1.0 MiB")
    assert "d_input" not in str(core_triton.explain(x, w, gradients=False))
    with pytest.raises(ValueError, match="memory_budget must be at least"):
        core_triton.explain(x, w, memory_budget=100)
    with pytest.raises(ValueError, match="linear_weight must have shape"):
        core_triton.explain(x, w.T)


AMPERE = "Triton's, for compute capability 8.x and 12.x, tiles of 128 rows x 128 classes"


@pytest.mark.parametrize(
    ("device", "implementation", "kernels", "matmuls"),
    [
        ("a100", None, AMPERE, "logits, d_input, d_weight by our kernels"),
        ("rtx4090", "triton", AMPERE, "logits, d_input, d_weight by our kernels"),
        ("rtx5090", None, AMPERE, "logits, d_input, d_weight by our kernels"),
        (
            "b200",
            None,
            "Triton's, for any GPU, tiles of 128 rows x 128 classes",
            "logits by our kernels; d_input, d_weight by cuBLAS",
        ),
        ("l40s", "triton_sm80", AMPERE, "logits, d_input, d_weight by our kernels"),
        ("h200", "triton_sm80", AMPERE, "logits, d_input, d_weight by our kernels"),
        (
            "h100",
            None,
            "Hopper's, in Gluon, tiles of 128 rows x 256 classes",
            "logits, d_input, d_weight by our kernels",
        ),
    ],
)
def test_explain_of_a_gpu_that_is_not_present(
    device: str, implementation: str | None, kernels: str, matmuls: str
) -> None:
    x, w = (torch.empty(*shape, device="meta", dtype=torch.bfloat16) for shape in ((4, 2048, 896), (151936, 896)))
    explained = core_triton.explain(x, w, device=device, implementation=implementation)
    lines = dict(line.split(": ", 1) for line in str(explained).splitlines())
    assert explained.name == (implementation or "triton")
    assert lines["path"] == "scaled_exp: the gradients are matmuls of stored exponentials"
    assert lines["kernels"] == kernels
    assert lines["matmuls"] == matmuls
    assert core_triton.explain(x, w, device=device, implementation="chunked").name == "chunked"


@pytest.mark.parametrize("device", ["a100", "rtx4090", "h100"])
@pytest.mark.parametrize(("d", "head"), [(900, torch.bfloat16), (896, torch.float32)])
def test_cublas_computes_d_weight_where_our_kernels_cannot_write_it(device: str, d: int, head: torch.dtype) -> None:
    """Rows that do not start at multiples of 16 bytes, and a head of another dtype."""
    x, w = (torch.empty(*shape, device="meta", dtype=torch.bfloat16) for shape in ((4, 2048, d), (151936, d)))
    lines = dict(line.split(": ", 1) for line in str(core_triton.explain(x, w.to(head), device=device)).splitlines())
    assert lines["matmuls"] == "logits by our kernels; d_input, d_weight by cuBLAS"


@pytest.mark.parametrize(
    ("dtype", "options", "path"),
    [
        (torch.bfloat16, {}, "scaled_exp"),
        (torch.bfloat16, {"label_smoothing": 0.1}, "scaled_exp"),
        (torch.bfloat16, {"label_smoothing": 0.1, "softcap": 30.0}, "recompute"),
        (torch.bfloat16, {"label_smoothing": 0.5}, "recompute"),
        (torch.bfloat16, {"memory_budget": 2**26}, "recompute"),  # chunks of few rows
        (torch.bfloat16, {"memory_budget": 2**22}, "recompute"),  # no chunk of exponentials fits
        (torch.bfloat16, {"memory_budget": 2**26, "tokens": 100}, "scaled_exp"),  # all rows
        (torch.float16, {}, "scaled_exp"),
        (torch.float16, {"label_smoothing": 0.1}, "scaled_exp"),
        (torch.float16, {"label_smoothing": 0.1, "softcap": 30.0}, "recompute"),
        (torch.float32, {}, "stored_logits"),
        (torch.bfloat16, {"implementation": "chunked"}, "chunked"),
    ],
)
def test_the_path_of_losses_of_rows(dtype: torch.dtype, options: dict[str, Any], path: str) -> None:
    tokens = options.pop("tokens", 8192)
    x, w = (torch.empty(rows, 896, dtype=dtype, device="meta") for rows in (tokens, 151936))
    plan = core_triton.explain(x, w, reduction="none", device="h100", **options).plan
    assert plan.path == path
    assert plan.chunks.bytes <= plan.memory_budget


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("dtype", "device", "path", "matmuls"),
    [
        (torch.bfloat16, "h100", "recompute", 4),
        (torch.bfloat16, "a100", "recompute", 4),
        (torch.float16, "h100", "recompute", 4),
        (torch.float32, "h100", "stored_logits", 3),
        (torch.bfloat16, None, "chunked", 3),
    ],
)
def test_the_matmuls_of_a_loss_of_the_entropy(
    dtype: torch.dtype, device: str | None, path: str, matmuls: int, reduction: Any
) -> None:
    x, w = (torch.empty(rows, 896, dtype=dtype) for rows in (256, 1536))
    explained = core_triton.explain(x, w, reduction=reduction, device=device, with_entropy=True)
    assert explained.plan.path == path
    assert len(explained.plan.matmuls) == (4 if reduction == "none" else matmuls)
    assert ("logits of the losses" in str(explained)) == (reduction == "none" or matmuls == 4)
    with pytest.raises(ValueError, match="saved_budget must be 0 with with_entropy"):
        core_triton.explain(x, w, reduction="none", saved_budget=2**20, with_entropy=True)
    with pytest.raises(TypeError, match="with_entropy must be a bool, got float"):
        core_triton.explain(x, w, with_entropy=0.1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("memory_budget", "keeps"), [(2**29, True), (2**27, True), (2**26, False)])
def test_float32_logits_are_kept_where_enough_rows_fit(memory_budget: int, keeps: bool) -> None:
    x, w = (torch.empty(rows, 896, device="meta") for rows in (8192, 151936))
    explained = core_triton.explain(x, w, device="h100", memory_budget=memory_budget)
    assert explained.plan.path == "stored_logits"
    assert explained.plan.chunk_config.keeps_logits == keeps
    assert "kernels: Triton's, for rows of stored logits" in str(explained)
    again = "" if keeps else "logits again, "
    assert f"matmuls: logits, {again}d_input, d_weight by our kernels" in str(explained)


def test_float32_matmuls_are_those_of_cublas_where_tensor_cores_are_not_faster() -> None:
    x, w = (torch.empty(rows, 896, device="meta") for rows in (8192, 151936))
    rows = {}
    for device in ("h100", "a100"):
        explained = core_triton.explain(x, w, device=device)
        maker = "our kernels" if explained.plan.float32_programs else "cuBLAS"
        assert f"matmuls: logits, d_input, d_weight by {maker}" in str(explained)
        rows[maker] = explained.plan.chunk_config.rows
    assert rows == {"our kernels": 768, "cuBLAS": 832}  # whole tiles; equal chunks
    torch.set_float32_matmul_precision("high")
    try:
        explained = core_triton.explain(x, w, device="h100")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "matmuls: logits, d_input, d_weight by cuBLAS" in str(explained)
    assert explained.plan.chunk_config.rows == rows["cuBLAS"]


def test_explain_names_logits_that_are_computed_again() -> None:
    arrays = problem(70, 24, 300)
    x, w = arrays["input"], arrays["linear_weight"]
    least = least_budget(lambda budget: core_triton.explain(x, w, memory_budget=budget, with_entropy=True))
    for memory_budget, matmuls in ((2**20, 3), (least, 4)):
        with FlopCounterMode(display=False) as counter, Meter():
            core_triton.linear_cross_entropy(**arrays, memory_budget=memory_budget).backward()
        for with_entropy in (False, True):
            explained = core_triton.explain(x, w, memory_budget=memory_budget, with_entropy=with_entropy)
            assert ("logits again" in explained.plan.matmuls) == (matmuls == 4)
            assert counter.get_total_flops() == len(explained.plan.matmuls) * 2 * 70 * 24 * 300
    x, w = x.bfloat16(), torch.empty(1536, 24, dtype=torch.bfloat16)
    again = core_triton.explain(x, w, label_smoothing=0.1, softcap=30.0, device="h200").plan
    assert (again.path, again.matmuls[:2], len(again.matmuls)) == ("recompute", ("logits", "logits again"), 4)


def test_explain_of_a_gpu_without_a_name() -> None:
    x, w = torch.empty(4, 8), torch.empty(10, 8)
    known = "'a100', 'b200', 'h100', 'h200', 'l40s', 'rtx4090', 'rtx5090'"
    with pytest.raises(ValueError, match=f"^device must be one of {known}, got 'v100'$"):
        core_triton.explain(x, w, device="v100")


@pytest.mark.parametrize("implementation", ["triton", "triton_sm80"])
def test_kernels_requested_by_name_are_refused_where_they_cannot_run(implementation: str) -> None:
    arrays = problem()
    message = f"implementation '{implementation}' cannot serve this call: no kernel for cpu devices"
    for call in (core_triton.linear_cross_entropy, core_triton.linear_log_probs):
        with pytest.raises(ValueError, match=message):
            call(**arrays, implementation=implementation)
    with pytest.raises(ValueError, match=message):
        core_triton.explain(arrays["input"], arrays["linear_weight"], implementation=implementation)


@pytest.mark.parametrize(
    ("sizes", "kind", "message"),
    [
        ((0, 100), ValueError, "hidden_size must be at least 1, got 0"),
        ((8, -1), ValueError, "num_classes must be at least 1, got -1"),
        ((8.0, 100), TypeError, "hidden_size must be a Python int, got float"),
        ((8, "100"), TypeError, "num_classes must be a Python int, got str"),
    ],
)
def test_module_refuses_sizes(sizes: tuple[Any, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        core_triton.LinearCrossEntropy(*sizes)


def test_sequence_parallel_is_a_bool() -> None:
    arguments: dict[str, Any] = problem() | {"sequence_parallel": 2}
    with pytest.raises(TypeError, match="sequence_parallel must be a bool, got int"):
        core_triton.linear_cross_entropy(**arguments)
    arguments |= {"sequence_parallel": True, "check_agreement": "yes"}
    with pytest.raises(TypeError, match="check_agreement must be a bool, got str"):
        core_triton.linear_cross_entropy(**arguments)


@pytest.mark.parametrize("given", ["bfloat16", [torch.float32]])
def test_a_reduce_dtype_must_be_a_dtype(given: Any) -> None:
    message = f"reduce_dtype must be torch.float32 or torch.bfloat16, got {given!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        core_triton.linear_cross_entropy(**problem(), reduce_dtype=given)


@pytest.mark.parametrize(
    "change", [{"vocab_size": 101}, {"memory_budget": -1}, {"reduction": "all"}, {"implementation": "cuda"}]
)
def test_module_refuses_at_construction(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        core_triton.LinearCrossEntropy(8, 100, **change)
