"""The grid of published heads: its plan, its methods and its warm-up."""

import pytest

from benchmarks import jax_methods, linear_ce, torch_methods
from benchmarks.shapes import GRID, HEADS, MODES, SHAPES, SWEEP_N, plan, shape_named


def test_the_grid_has_every_head_once_and_the_most_important_rows_first() -> None:
    assert len({(head.d, head.v) for head in HEADS}) == len(HEADS) >= 30
    items = [(shape, mode.name) for shape, mode, _ in plan([GRID])]
    assert len({(shape.n, shape.d, shape.v, mode) for shape, mode in items}) == len(items)
    sizes = [(shape.n, mode) for shape, mode in items]
    heads = len(HEADS)
    assert sizes[: 2 * heads] == [(8192, "train")] * heads + [(8192, "tight")] * heads
    assert sizes[2 * heads : 4 * heads] == [(2048, "train"), (2048, "tight")] * heads
    swept = {(shape.d, shape.v): set() for shape, _ in items[4 * heads :]}
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


def test_methods_and_warm_up_of_the_grid() -> None:
    chosen = [[name for name, method in each.METHODS.items() if method.grid] for each in (torch_methods, jax_methods)]
    assert chosen == [["floor", "triton", "torch.compile"], ["floor", "mosaic", "bf16-logits", "gradient-scan"]]
    common = ["--framework", "torch", "--shapes"]
    assert linear_ce.parse([*common, GRID]).timing.warmup == 2
    assert linear_ce.parse([*common, GRID, "--warmup", "7"]).timing.warmup == 7
    assert linear_ce.parse([*common, "llama3-8b"]).timing.warmup == 5
    assert linear_ce.parse([*common, GRID, "--device", "cpu"]).timing.warmup == 0
