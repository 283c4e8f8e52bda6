"""Tests `head_precision` of core_triton: errors against a true float32 head, plans, and PyTorch's features. The cases
of parity compare values with the float64 reference."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch_problem import FUNCTIONS, leaves, problem, total

import core_triton
from core_triton.problem import Problem, halves
from core_triton.smoothing import Smoothing
from core_triton.tile_config import SPLIT_CLASS_BLOCK
from linear_ce.spec import DEFAULT_MEMORY_BUDGET, LossSpec

Arrays = dict[str, Any]


def float32_head(n: int = 12, d: int = 8, v: int = 50) -> Arrays:
    arrays = problem(n, d, v, bias=False)
    return arrays | {"input": arrays["input"].detach().bfloat16().requires_grad_()}


def test_the_halves_have_sixteen_bits_of_a_weight() -> None:
    w = torch.randn(300, 40, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-20, 20)
    high, low = halves(w, torch.bfloat16).double().chunk(2, 1)
    assert torch.equal(high, w.bfloat16().double())
    assert ((high + low - w).abs() <= 2.0**-17 * w.abs()).all()


def test_errors_against_a_true_float32_head() -> None:
    """The figures of docs/options.md."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 1024, generator=generator).bfloat16()
    w = torch.randn(4096, 1024, generator=generator) * 2.0 / 32.0  # logits of a standard deviation of 2
    target = torch.randint(4096, (512,), generator=generator)

    def target_logit_and_d_input(precision: Any) -> tuple[Tensor, Tensor]:
        inputs = x.clone().requires_grad_()
        options: Any = {"reduction": "sum", "head_precision": precision}
        loss, stats = core_triton.linear_cross_entropy_with_stats(inputs, w, target, **options)
        loss.backward()
        assert inputs.grad is not None
        return stats.target_logit, inputs.grad

    logits = x.double() @ w.double().T
    d_logits = logits.softmax(1)
    d_logits[torch.arange(512), target] -= 1.0
    exact = logits[torch.arange(512), target], d_logits @ w.double()
    errors = {
        precision: [
            float((a - b).norm() / b.norm()) for a, b in zip(target_logit_and_d_input(precision), exact, strict=True)
        ]
        for precision in ("input", "float32")
    }
    assert errors["input"][0] == pytest.approx(1.7e-3, rel=0.1)
    assert errors["float32"][0] == pytest.approx(2.4e-6, rel=0.1)
    assert errors["input"][1] == pytest.approx(2.4e-3, rel=0.1)
    assert errors["float32"][1] == pytest.approx(1.7e-3, rel=0.1)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_input_is_the_default(function: str) -> None:
    arrays = float32_head()
    found = [
        [value, *torch.autograd.grad(value, leaves(arrays))]
        for value in (total(function, arrays, head_precision=precision) for precision in (None, "input", "float32"))
    ]
    for a, b in zip(*found[:2], strict=True):
        assert torch.equal(a, b)
    assert found[2][0] != found[0][0]
    assert found[2][2].dtype == torch.float32


def test_explain_names_five_matmuls() -> None:
    arrays = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(128256, 4096, device="meta")
    explained = str(core_triton.explain(*arrays, head_precision="float32", device="h200"))
    assert "matmuls: logits high, logits low, d_input high, d_input low, d_weight by our kernels\n" in explained
    assert "path: scaled_exp" in explained
    of_rows = core_triton.explain(*arrays, reduction="none", head_precision="float32", device="h200").plan.matmuls
    assert len(of_rows) == 7
    assert of_rows[:2] == ("logits high of the losses", "logits low of the losses")
    plan = core_triton.explain(*arrays, head_precision="float32", device="h200").plan
    assert plan.chunks.bytes <= 2**29
    assert len(core_triton.explain(*arrays, device="h200").plan.matmuls) == 3


@pytest.mark.parametrize(
    ("device", "d", "transposed", "ours"),
    [
        ("h100", 900, False, ["d_input high", "d_input low", "d_weight"]),
        ("h100", 900, True, ["d_weight"]),  # rows of 50,257 float32 do not start at multiples of 16 bytes
        ("h100", 904, True, ["d_weight"]),
        ("h100", 902, False, []),
        ("a100", 904, False, []),
    ],
)
def test_explain_names_the_matmuls_that_our_kernels_cannot_compute(
    device: str, d: int, transposed: bool, ours: list[str]
) -> None:
    x, v = torch.empty(2048, d, dtype=torch.bfloat16, device="meta"), 50257
    w = torch.empty(d, v, device="meta").T if transposed else torch.empty(v, d, device="meta")
    explained = str(core_triton.explain(x, w, head_precision="float32", device=device))
    library = [name for name in ("d_input high", "d_input low", "d_weight") if name not in ours]
    parts = [", ".join(["logits high", "logits low", *ours]) + " by our kernels"]
    parts += [", ".join(library) + " by cuBLAS"] * bool(library)
    assert f"matmuls: {'; '.join(parts)}\n" in explained


def test_modules_autocast_and_compiled_functions_take_it() -> None:
    arrays = float32_head()
    head = core_triton.LinearCrossEntropy(8, 50, head_precision="float32")
    with torch.no_grad():
        head.weight.copy_(arrays["linear_weight"])
    want = core_triton.linear_cross_entropy(**arrays, head_precision="float32")
    assert torch.equal(head(arrays["input"], arrays["target"]), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(arrays["input"].float(), arrays["target"]), want)

    def function(arrays: Arrays) -> Tensor:
        return core_triton.linear_cross_entropy(**arrays, head_precision="float32")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(arrays)
    assert torch.equal(compiled, want)
    torch.testing.assert_close(
        torch.autograd.grad(compiled, leaves(arrays)), torch.autograd.grad(want, leaves(arrays)), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": torch.zeros(12, 8)}, "got a float32 linear_weight and a float32 input"),
        ({"linear_weight": torch.zeros(50, 8).bfloat16()}, "got a bfloat16 linear_weight and a bfloat16 input"),
        ({"head_precision": "double"}, "head_precision must be one of 'input', 'float32', got 'double'"),
    ],
)
def test_what_it_does_not_serve_is_refused(changes: Arrays, message: str) -> None:
    call: Arrays = float32_head() | {"head_precision": "float32"} | changes
    with pytest.raises(ValueError, match=message):
        core_triton.linear_cross_entropy(**call)


def test_the_most_columns_of_a_split_head_are_named() -> None:
    x, w = torch.empty(8, 2**23, dtype=torch.bfloat16, device="meta"), torch.empty(64, 2**23, device="meta")
    message = 'input must have fewer than 8388608 columns on this GPU with head_precision "float32", got 8388608'
    with pytest.raises(ValueError, match=message):
        core_triton.explain(x, w, head_precision="float32", device="a100", memory_budget=2**40)
    assert core_triton.explain(x, w, device="a100", memory_budget=2**40).plan.pointers


@pytest.mark.parametrize(("d", "v"), [(4096, 128256), (2304, 256000), (896, 151936)])
def test_kernels_read_the_whole_head_in_place(d: int, v: int) -> None:
    x, w = torch.empty(8192, d, dtype=torch.bfloat16, device="meta"), torch.empty(v, d, device="meta")
    explained = core_triton.explain(x, w, head_precision="float32", device="h100")
    assert "tiles of 256 rows x 128 classes\n" in str(explained)
    assert "weight: read where it is\n" in str(explained)
    config = explained.plan.scaled_exp_config
    assert config.head_rows == v
    assert config.blocks == -(-v // SPLIT_CLASS_BLOCK)
    assert config.bytes <= DEFAULT_MEMORY_BUDGET


def test_label_smoothing_copies_no_head() -> None:
    """The mean row of a head that kernels read in place."""
    x, w, weights = torch.randn(12, 64).bfloat16(), torch.randn(512, 64), torch.rand(512)
    on_meta, options = (x.to("meta"), w.to("meta")), {"label_smoothing": 0.1, "head_precision": "float32"}
    plan = core_triton.explain(*on_meta, device="h200", **options).plan
    assert plan.splits_in_place
    target, row_weight = torch.zeros(12, dtype=torch.int64), torch.ones(12)
    problem = Problem(x, w, None, target, row_weight, weights, LossSpec("sum", **options), 512, plan=plan)
    with mock.patch.object(Problem, "operand_of", side_effect=AssertionError("a copy")):
        smoothing = Smoothing.of(problem, 512, None)
    assert smoothing is not None
    torch.testing.assert_close(smoothing.mean_row, weights @ w / 512)


@pytest.mark.parametrize(
    ("n", "d", "v", "whole"),
    [(8192, 4096, 128257, False), (8192, 2304, 256001, False), (8192, 896, 151937, False), (1024, 768, 32001, True)],
)
def test_vocabulary_chunks_are_whole_waves_of_tiles_or_the_whole_head(n: int, d: int, v: int, whole: bool) -> None:
    """Of a (D, V) head, whose rows do not start at multiples of 16 bytes."""
    x, w = torch.empty(n, d, dtype=torch.bfloat16, device="meta"), torch.empty(d, v, device="meta").T
    explained = core_triton.explain(x, w, head_precision="float32", device="h100")
    assert "weight: copied one vocabulary chunk at a time\n" in str(explained)
    config, tile, programs = explained.plan.scaled_exp_config, explained.plan.tile, explained.plan.programs
    assert tile is not None
    assert config.bytes <= DEFAULT_MEMORY_BUDGET
    assert (config.head_rows == v) == whole
    if not whole:
        tiles = config.head_rows // tile.block_v * -(-config.usual_rows(n) // tile.block_n)
        waves = -(-tiles // programs)
        assert tiles / programs / waves > 0.95
