"""The grid of published heads: its plan, its methods, its warm-up and its table."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import jax_methods, linear_ce, tables, torch_methods
from benchmarks.shapes import FIRST_HEADS, FIRST_N, GRID, GRID_MODES, HEADS, MODES, SHAPES, SWEEP_N, plan, shape_named


def test_the_grid_has_every_head_once_and_the_most_important_rows_first() -> None:
    assert len({(head.d, head.v) for head in HEADS}) == len(HEADS) >= 30
    items = [(shape, mode.name) for shape, mode, _ in plan([GRID])]
    assert len({(shape.n, shape.d, shape.v, mode) for shape, mode in items}) == len(items)
    sizes = [(shape.n, mode) for shape, mode in items]
    heads, modes = len(HEADS), ("train", "tight")
    first = [(n, mode) for n in (8192, 2048) for _ in range(FIRST_HEADS) for mode in modes]
    first += [(n, mode) for n in SWEEP_N[:FIRST_N] for _ in range(6) for mode in modes]
    assert sizes[: len(first)] == first
    assert FIRST_HEADS >= 30
    assert {256, 65536} <= {*SWEEP_N[:FIRST_N]}
    swept: dict[tuple[int, int], set[int]] = {
        (shape.d, shape.v): set() for shape, _ in items if shape.n not in (8192, 2048)
    }
    assert len(swept) == 6
    for shape, _ in items:
        assert shape_named(shape.name) == shape
        if (shape.d, shape.v) in swept:
            swept[shape.d, shape.v].add(shape.n)
    assert all(of_head == {2**power for power in range(8, 17)} for of_head in swept.values())
    assert len({shape.name for shape, _ in items}) == len(items) / 2
    known = {(shape.n, shape.d, shape.v): shape.name for shape in SHAPES.values()}
    for shape, _ in items:  # a shape that has a name keeps it
        assert known.get((shape.n, shape.d, shape.v), shape.name) == shape.name
    assert MODES["tight"].memory_budget == 256 * 2**20
    assert [mode.name for _, mode, _ in plan([GRID], ["tight"])] == ["tight"] * (2 * heads + 6 * len(SWEEP_N))
    with pytest.raises(ValueError, match="grid alone"):
        plan([GRID, "llama3-8b"])


def test_methods_and_times_of_the_grid() -> None:
    chosen = [[name for name, method in each.METHODS.items() if method.grid] for each in (torch_methods, jax_methods)]
    assert chosen == [["triton", "torch.compile"], ["mosaic", "bf16-logits", "gradient-scan"]]
    common = ["--framework", "torch", "--shapes"]
    assert linear_ce.parse([*common, GRID]).timing.warmup == 2
    assert linear_ce.parse([*common, GRID, "--warmup", "7"]).timing.warmup == 7
    assert linear_ce.parse([*common, "llama3-8b"]).timing.warmup == 5
    assert linear_ce.parse([*common, GRID, "--device", "cpu"]).timing.warmup == 0
    assert linear_ce.parse([*common, GRID]).timing.energy_seconds == 0
    assert linear_ce.parse([*common, GRID, "--energy-seconds", "1"]).timing.energy_seconds == 1
    assert linear_ce.parse([*common, "llama3-8b"]).timing.energy_seconds == 2


def test_the_table_of_the_grid_marks_the_worst_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(name: str, n: int, mode: str, method: str, ratio: float | None, **more: Any) -> dict[str, Any]:
        head = next(head for head in HEADS if head.name == name)
        kind = {"triton": "ours", "floor": "floor"}.get(method, "peer")
        found = {**head.shape(n).of_row(), "mode": mode, "method": method, "kind": kind, "framework": "torch"}
        found |= {"dtype": "bfloat16", "targets": "peaked", "floor_padding": 0, "ratio": ratio}
        return {**found, "status": "ok", "ms": None if ratio is None else 10 * ratio, "note": None, **more}

    rows = [
        row("llama3-8b", 8192, "train", "triton", 1.01),
        row("llama3-8b", 8192, "tight", "triton", 1.09),
        row("llama3-8b", 8192, "train", "torch.compile", 1.08),
        row("llama3-8b", 8192, "train", "floor", 1.5),
        row("llama3-8b", 2048, "train", "triton", 0.99),
        row("gpt2", 8192, "train", "triton", 1.12, floor_padding=47),
        row("gpt2", 8192, "train", "torch.compile", 1.1),
        row(
            "gpt2", 65536, "train", "torch.compile", None, status="failed", note="OutOfMemoryError: CUDA out of memory"
        ),
        row("gpt2", 65536, "train", "liger", 1.0),
        row("qwen3-8b", 2048, "train", "triton", None, status="failed", note="ValueError: no"),
    ]
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"device": "H200", "versions": {"torch": "1"}, "rows": rows}))
    tables.main(["--grid", "--json", str(path)])
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    table = ["".join(line.split()) for line in lines if line.startswith("| ")]
    assert table[1:4] == [
        "|gpt2|768|50,257+47|**1.120(11.20)**|-|1.100(11.00)|-|-|-|",
        "|llama3-8b|4,096|128,256|1.010(10.10)|**1.090(10.90)**|1.080(10.80)|**0.990(9.90)**|-|-|",
        "|qwen3-8b|4,096|151,936|-|-|-|failed|-|-|",
    ]
    assert "worst ratio at N 8,192: train 1.120 (gpt2), tight 1.090 (llama3-8b)" in lines
    assert "worst ratio at N 2,048: train 0.990 (llama3-8b)" in lines
    assert "slower than torch.compile: gpt2 at N 8,192 (11.20 and 11.00 ms)" in lines
    assert "| gpt2 | torch.compile | - | - | - | - | - | 1.100 (11.00) | - | - | out of memory |" in lines
    assert GRID_MODES == ("train", "tight")
