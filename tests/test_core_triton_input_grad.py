"""Runs the kernels of d_weight and d_input for compute capability 8.x and for Hopper, and the fix-up of split tiles, in
NumPy (`gluon_in_numpy`, `hopper_in_numpy`)."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import gluon_in_numpy
import hopper_in_numpy
import numpy as np
import pytest
import torch
from gluon_in_numpy import Pointer, Value
from torch import Tensor

from core_triton import (
    ampere_common,
    ampere_gradients,
    gluon_common,
    hopper_common,
    hopper_gradients,
    hopper_split_head,
    input_grad,
    kernels,
    tile_config,
)
from core_triton.ampere_common import UNIT
from core_triton.first_chunk import StoredExponentials
from core_triton.kernels import Active
from core_triton.launch import At
from core_triton.plan import DeviceInfo, ExecutionPlan, PlanKey, make_plan
from core_triton.problem import Problem, layout_of
from core_triton.tile_config import CLASS_BLOCK, D_BLOCK, choose_d_input_tiling, choose_schedule, padded
from linear_ce.spec import LossSpec

MODULES = (ampere_common, ampere_gradients, gluon_common, input_grad, kernels)
HOPPER_MODULES = (hopper_common, hopper_gradients, hopper_split_head, gluon_common, input_grad)
START = 3  # of the chunk: rows of the call before it


def runner(capability: int, *, late: bool) -> Any:
    """Returns what replaces `launch`."""
    if capability == 90:
        return partial(hopper_in_numpy.run, HOPPER_MODULES, late=late)
    return partial(gluon_in_numpy.run, MODULES, late=late)


def plan_for(x: Tensor, w: Tensor, classes: int, capability: int, *, grad_into: bool = False) -> ExecutionPlan:
    plan = make_plan(
        PlanKey(
            "loss_and_gradients", layout_of(x), layout_of(w), classes, copied_bytes=0, label_smoothing=False,
            softcap=False, entropy=False, d_input=True, d_weight=True, d_bias=False, statistics=False,
            memory_budget=2**28, implementation="triton",
            device=DeviceInfo("cuda", capability, 108, "h100" if capability == 90 else "a100"), grad_into=grad_into,
            splits_head=w.dtype == torch.float32,
        )
    )  # fmt: skip
    assert plan.hopper == (capability == 90)
    assert (plan.ampere_tile is None) == plan.hopper
    return plan


def head(
    classes: int, d: int, *, transposed: bool, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Returns a head with three rows of padding. What is not of the head, in its memory and in these rows, is NaN."""
    rows, columns = (d, classes + 3) if transposed else (classes + 3, d)
    whole = torch.full((rows, -(-columns // 8) * 8 + 16), torch.nan, dtype=dtype)
    whole[:, :columns] = torch.randn(rows, columns, generator=generator)
    w = whole[:, :columns].T if transposed else whole[:, :columns]
    w[classes:] = torch.nan
    return w


def in_pieces(e: Tensor, piece: int, more: int, step: int) -> StoredExponentials:
    """Returns exponentials in pieces. `more` rows of each later piece are NaN, and what is past the last class but for
    zeros up to the next multiple of `step`."""
    rows, classes = e.shape
    pieces = -(-classes // piece)
    others = torch.full((pieces - 1, rows + more, piece), torch.nan, dtype=e.dtype)
    for index in range(1, pieces):
        of_piece = e[:, index * piece : (index + 1) * piece]
        others[index - 1, :rows, : -(-of_piece.shape[1] // step) * step] = 0
        others[index - 1, :rows, : of_piece.shape[1]] = of_piece
    return StoredExponentials(e[:, :piece].contiguous(), others)


def close(found: Tensor, wanted: Tensor) -> None:
    error = (found.double() - wanted).norm() / wanted.norm()
    bound = 1e-6 if found.dtype == torch.float32 else 3e-3  # rounding to bfloat16 makes 1.7e-3
    assert error < bound, f"the relative error is {error:.1e}"


# Rows and D that are no multiples of a tile, classes that are no multiples of a step or of 8, and fewer than 8.
CASES: list[dict[str, Any]] = [
    {"rows": 300, "d": 200, "classes": 520, "multiprocessors": 2},
    {"rows": 300, "d": 200, "classes": 523, "multiprocessors": 2, "active": 250},
    {"rows": 300, "d": 200, "classes": 523, "multiprocessors": 2, "transposed": True},
    {"rows": 140, "d": 131, "classes": 523, "multiprocessors": 9, "transposed": True, "active": 17},
    {"rows": 300, "d": 264, "classes": 517, "multiprocessors": 7, "transposed": True, "tails": True},
    {"rows": 300, "d": 264, "classes": 517, "multiprocessors": 8, "capability": 89, "tails": True, "smooth": True},
    {"rows": 20, "d": 128, "classes": 5, "multiprocessors": 1, "transposed": True},
    {"rows": 20, "d": 128, "classes": 5, "multiprocessors": 1, "capability": 89},
    {"rows": 130, "d": 136, "classes": 65, "multiprocessors": 5, "transposed": True},
    {"rows": 130, "d": 136, "classes": 129, "multiprocessors": 5, "splits_tiles": False},
    {"rows": 130, "d": 136, "classes": 64, "multiprocessors": 5, "active": 0},
    {"rows": 300, "d": 200, "classes": 523, "multiprocessors": 2, "active": 250, "piece": 128},
    {"rows": 140, "d": 136, "classes": 517, "multiprocessors": 7, "transposed": True, "tails": True, "piece": 256},
    {"rows": 140, "d": 136, "classes": 389, "multiprocessors": 2, "capability": 89, "transposed": True, "piece": 384},
    {"rows": 300, "d": 200, "classes": 523, "multiprocessors": 3, "capability": 90, "active": 270, "smooth": True},
    {"rows": 140, "d": 200, "classes": 777, "multiprocessors": 3, "capability": 90, "active": 130, "piece": 256},
    {"rows": 300, "d": 264, "classes": 517, "multiprocessors": 8, "capability": 90, "transposed": True, "tails": True},
    {
        "rows": 300, "d": 132, "classes": 523, "multiprocessors": 3, "capability": 90, "head": torch.float32,
        "piece": 256,
    },
    {
        "rows": 140, "d": 131, "classes": 517, "multiprocessors": 7, "capability": 90, "head": torch.float32,
        "transposed": True, "active": 17, "tails": True, "tile_rows": 128,
    },
    {"rows": 20, "d": 200, "classes": 5, "multiprocessors": 1, "capability": 90, "head": torch.float32},
    {"rows": 130, "d": 136, "classes": 64, "multiprocessors": 5, "capability": 90, "head": torch.float32, "active": 0},
    {"rows": 130, "d": 136, "classes": 65, "multiprocessors": 5, "splits_tiles": False, "smooth": True},
]  # fmt: skip


def once_quick(cases: list[dict[str, Any]]) -> list[Any]:
    """Returns each case with copies that are done as late and as early as possible. One of them is quick, in turn."""
    return [
        pytest.param(case, late, id="-".join(map(str, (*case.values(), late))), marks=mark)
        for number, case in enumerate(cases)
        for late, mark in ((number % 2 == 0, ()), (number % 2 == 1, pytest.mark.slow))
    ]


@pytest.mark.parametrize(("case", "late"), once_quick(CASES))
def test_d_input(case: dict[str, Any], late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, d, classes, transposed = case["rows"], case["d"], case["classes"], case.get("transposed", False)
    active, splits_tiles = case.get("active", rows), case.get("splits_tiles", True)
    capability, dtype = case.get("capability", 80), case.get("head", torch.bfloat16)
    tile_rows = case.get("tile_rows", 256 if capability == 90 else 128)
    if "tails" in case:
        monkeypatch.setattr(tile_config, "MIN_TAIL_PROGRAMS", 1)
    generator = torch.Generator().manual_seed(0)
    tokens = START + rows
    x = torch.empty(tokens, d, dtype=torch.bfloat16)
    w = head(classes, d, transposed=transposed, generator=generator, dtype=dtype)
    plan = plan_for(x, w, classes, capability)
    assert plan.d_input_tiling is not None
    tiling = choose_d_input_tiling(case["multiprocessors"], plan.ampere_tile)
    tiles = -(-rows // tile_rows) * -(-d // D_BLOCK)
    schedule = choose_schedule(tiles, -(-classes // tiling.step), tiling.programs, splits_tiles=splits_tiles)
    assert (schedule.tail_programs > 0) == ("tails" in case)
    plan = replace(
        plan,
        d_input_tiling=tiling,
        chunks=replace(plan.scaled_exp_config, rows=rows, d_input_rows=tile_rows, splits_tiles=splits_tiles),
    )
    # As the exponentials are stored: zeros up to the next multiple of 8, then what was there before.
    stored = torch.full((rows, padded(classes)), torch.nan, dtype=torch.bfloat16)
    stored[:, : -(-classes // 8) * 8] = 0
    stored[:, :classes] = torch.rand(rows, classes, generator=generator)
    rho, theta = (torch.randn(tokens, generator=generator) for _ in range(2))
    target = torch.randint(0, classes, (tokens,), generator=generator)
    target[START + 1] = classes + 1  # not a class: its row is NaN, as rho is
    rho[START + 1] = torch.nan
    order = torch.randperm(tokens, generator=generator)
    w_or_zero = w[:classes].double()
    spec = LossSpec("sum", head_precision="float32" if dtype == torch.float32 else "input")
    problem = Problem(x, w, None, target, torch.ones(tokens), None, spec, classes, plan=plan)
    d_input = torch.full((tokens, d), 7.0, dtype=dtype)  # float32 shows both parts of a split head
    partial_sums = torch.full((max(schedule.partial_tiles, 1) * tile_rows * D_BLOCK,), torch.nan)
    e = stored[:, :classes]
    of_rows = StoredExponentials(e)
    if "piece" in case:  # a whole tile is stored on Hopper
        of_rows = in_pieces(e, case["piece"], 16, CLASS_BLOCK if capability == 90 else UNIT.value)
    module = hopper_gradients if capability == 90 else ampere_gradients
    made = module.d_input_launch(problem, plan.scaled_exp_config, of_rows, smooth="smooth" in case)
    factor, mean_row = torch.randn(tokens, generator=generator), torch.randn(d, generator=generator)
    with mock.patch.object(input_grad, "launch", runner(capability, late=late)):
        input_grad.store_d_input(
            made,
            problem,
            plan.scaled_exp_config,
            rows,
            Active(torch.tensor(START + active, dtype=torch.int32), START, 0),
            partial_sums=partial_sums,
            rho=At(rho, START),
            theta=At(theta, START),
            target=At(target, START),
            order=At(order, START),
            d_input=d_input,
            smooth=(At(factor, START), mean_row) if "smooth" in case else None,
        )
    chunk = slice(START, START + active)
    halves = w_or_zero
    if dtype == torch.float32:  # the sum of both parts of a split head
        high = w_or_zero.bfloat16().double()
        halves = high + (w_or_zero - high).bfloat16().double()
    wanted = rho[chunk, None].double() * (e[:active].double() @ halves)
    wanted += theta[chunk, None].double() * w_or_zero[target[chunk].clamp(max=classes - 1)]
    if "smooth" in case:
        wanted += factor[chunk, None].double() * mean_row.double()
    written = order[chunk]
    found = d_input[written]
    if active > 1:
        assert found[1].isnan().all()
        keeps = torch.arange(active) != 1
        close(found[keeps], wanted[keeps])
    others = torch.ones(tokens, dtype=torch.bool)
    others[written] = False
    assert (d_input[others] == 7).all(), "rows that are not active are written"


# Classes and D that are no multiples of a tile, and rows that are no multiples of a step.
D_WEIGHT_CASES: list[dict[str, Any]] = [
    {"rows": 160, "d": 128, "classes": 256, "first": True},
    {"rows": 300, "d": 200, "classes": 523, "first": True, "active": 250},
    {"rows": 300, "d": 264, "classes": 523, "first": False, "active": 129},
    {"rows": 300, "d": 264, "classes": 520, "first": False, "capability": 89},
    {"rows": 77, "d": 136, "classes": 389, "first": True, "capability": 89, "active": 33},
    {"rows": 20, "d": 8, "classes": 5, "first": False, "active": 1},
    {"rows": 20, "d": 8, "classes": 5, "first": True, "dtype": torch.float16},
    {"rows": 77, "d": 136, "classes": 130, "first": False, "dtype": torch.float16},
    {"rows": 70, "d": 136, "classes": 130, "first": True, "active": 0},
    {"rows": 70, "d": 136, "classes": 130, "first": False, "active": 0},
    {"rows": 70, "d": 136, "classes": 130, "first": False, "active": -2, "capability": 89},
    {"rows": 300, "d": 200, "classes": 523, "first": True, "capability": 90, "active": 250},
    {"rows": 300, "d": 264, "classes": 523, "first": False, "capability": 90, "active": 129},
    {"rows": 600, "d": 136, "classes": 300, "first": False, "capability": 90, "gpu": "h200"},
    {"rows": 600, "d": 8, "classes": 300, "first": False, "capability": 90, "gpu": "h200", "in_l2": False},
    {"rows": 300, "d": 196, "classes": 523, "first": True, "capability": 90, "active": 250, "sum": torch.float32},
    {"rows": 300, "d": 260, "classes": 523, "first": False, "capability": 90, "active": 129, "sum": torch.float32},
    {"rows": 20, "d": 4, "classes": 5, "first": False, "capability": 90, "sum": torch.float32, "dtype": torch.float16},
    {"rows": 70, "d": 136, "classes": 130, "first": False, "capability": 90, "active": 0, "sum": torch.float32},
    # Two of four programs begin 3 or 5 rounds late, and one of three with 11 tiles after 5 rounds has one tile or none.
    {"rows": 500, "d": 200, "classes": 1300, "first": False, "capability": 90, "programs": 4, "sent": 1.0},
    {"rows": 300, "d": 200, "classes": 1300, "first": True, "capability": 90, "programs": 4, "sent": 1.0},
    {"rows": 300, "d": 104, "classes": 2800, "first": True, "capability": 90, "programs": 3, "sent": 1.0},
]


@pytest.mark.parametrize(("case", "late"), once_quick(D_WEIGHT_CASES))
def test_d_weight(case: dict[str, Any], late: bool) -> None:
    rows, d, classes, first = case["rows"], case["d"], case["classes"], case["first"]
    active, dtype, capability = case.get("active", rows), case.get("dtype", torch.bfloat16), case.get("capability", 80)
    sum_dtype = case.get("sum", dtype)
    power = -3 if dtype == torch.float16 else 0
    generator = torch.Generator().manual_seed(0)
    w = head(classes, d, transposed=False, generator=generator).to(dtype)
    inputs = torch.empty(START + rows, d, dtype=dtype)
    plan = plan_for(inputs, w, classes, capability, grad_into=sum_dtype != dtype)
    if capability == 90:  # a program of the persistent kernel has several tiles
        plan = replace(plan, gpu=case.get("gpu", plan.gpu), programs=case.get("programs", 2))
    assert plan.d_weight_kernel
    assert plan.fits_float16 == (power != 0)
    # NaN is in rows that are not active and from the last class on. In a first chunk without active rows one is
    # computed. It is zero.
    computed = max(active, int(first))
    stored = torch.full((rows, padded(classes)), torch.nan, dtype=dtype)
    stored[:computed, :classes] = torch.rand(computed, classes, generator=generator)
    # A float32 sum may have rows of x that are longer: those of a split head, for example.
    held = torch.full((rows, d if sum_dtype == dtype else -(-d // 8) * 16), torch.nan, dtype=dtype)
    x = held[:, :d]
    x[:computed] = torch.randn(computed, d, generator=generator) if active > 0 else 0
    if capability == 90:  # up to the next multiple of a step
        stored[computed : -(-computed // tile_config.D_WEIGHT_STEP) * tile_config.D_WEIGHT_STEP, :classes] = 3
        x[computed : -(-computed // tile_config.D_WEIGHT_STEP) * tile_config.D_WEIGHT_STEP] = 0
    target, row_weight = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    problem = Problem(inputs, w, None, target, row_weight, None, LossSpec("sum"), classes, plan=plan)
    total = torch.full((classes + 3, d), torch.nan if first else 7.0, dtype=sum_dtype)
    total[classes:] = 7
    if not first:
        total[:classes] = 10 * torch.randn(classes, d, generator=generator)
    wanted = stored[:computed, :classes].double().T @ x[:computed].double() * 2.0**power
    wanted += 0 if first else total[:classes].double()
    module = hopper_gradients if capability == 90 else ampere_gradients
    adds = {"in_l2": case.get("in_l2", True), "sent": case.get("sent", 0.0)} if capability == 90 else {}
    with mock.patch.object(module, "launch", runner(capability, late=late)):
        numbers = torch.tensor([[0, 0], [START + active, power]], dtype=torch.int32)
        count = Active(At(numbers, 1) if power else numbers[1, 0], START, int(first))
        module.add_d_weight(problem, stored[:, :classes], held, count, total[:classes], first=first, **adds)
    if sum_dtype == torch.float32:
        torch.testing.assert_close(total[:classes].double(), wanted, rtol=1e-5, atol=1e-4)
    elif "gpu" in case and case.get("in_l2", True):  # rounded twice
        close(total[:classes], wanted)
    else:
        # Rounded once: the float32 sums differ from those of float64 where they are close to the middle of two numbers.
        assert (total[:classes] != wanted.to(dtype)).double().mean() < 0.01
    assert (total[classes:] == 7).all(), "rows of padding are written"


@pytest.mark.parametrize("late", [False, True])
def test_ampere_adds_a_sum_of_16_bits_to_float32(late: bool) -> None:
    rows, d, classes = 70, 136, 130
    generator = torch.Generator().manual_seed(0)
    sizes = (classes, d), (rows, padded(classes)), (rows, d)
    old, e, x = (torch.randn(*size, generator=generator).bfloat16() for size in sizes)
    plan, unused = plan_for(x, old, classes, 80), x[:, 0]
    problem = Problem(x, old, None, unused, unused, None, LossSpec("sum"), classes, plan=plan)
    sums = torch.full((classes, d), torch.nan)
    with mock.patch.object(ampere_gradients, "launch", runner(80, late=late)):
        count = Active(torch.tensor(rows, dtype=torch.int32), 0, 1)
        ampere_gradients.add_d_weight(problem, e[:, :classes], x, count, sums, first=False, old=old)
    wanted = old.double() + e[:, :classes].double().T @ x.double()
    torch.testing.assert_close(sums.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("rows", "first", "active"), [(200, False, 193), (70, True, 70), (70, False, 0), (20, False, 20)]
)
def test_part_of_d_weight(rows: int, first: bool, active: int, late: bool) -> None:
    """A part has the last classes of two shards of 304, of which 590 are classes. Old sums past them are NaN."""
    d, classes, rank_rows, begin, part_rows = 136, 590, 304, 40, 512
    generator = torch.Generator().manual_seed(0)
    w = head(classes, d, transposed=False, generator=generator).to(torch.bfloat16)
    inputs = torch.empty(START + rows, d, dtype=torch.bfloat16)
    plan = replace(plan_for(inputs, w, classes, 90), programs=3)
    computed = max(active, 1)
    stored = torch.full((rows, padded(classes)), torch.nan, dtype=torch.bfloat16)
    stored[:computed, :classes] = torch.rand(computed, classes, generator=generator)
    x = torch.full((rows, d), torch.nan, dtype=torch.bfloat16)
    x[:computed] = torch.randn(computed, d, generator=generator) if active > 0 else 0
    stored[computed : -(-computed // tile_config.D_WEIGHT_STEP) * tile_config.D_WEIGHT_STEP, :classes] = 3
    x[computed : -(-computed // tile_config.D_WEIGHT_STEP) * tile_config.D_WEIGHT_STEP] = 0
    problem = Problem(inputs, w, None, w[:, 0], w[:, 0], None, LossSpec("sum"), classes, plan=plan)
    old = torch.full((2 * rank_rows, d), torch.nan, dtype=torch.bfloat16)
    old[:classes] = 10 * torch.randn(classes, d, generator=generator)
    total = stored[:computed, :classes].double().T @ x[:computed].double() + (0 if first else old[:classes].double())
    total = torch.cat([total, total.new_zeros(2 * part_rows, d)])
    sums = torch.full((2, part_rows, d), torch.nan)
    with mock.patch.object(hopper_gradients, "launch", runner(90, late=late)):
        count = Active(torch.tensor(START + active, dtype=torch.int32), START, 1)
        options: dict[str, Any] = {"rank_rows": rank_rows, "first": begin, "beside": False}
        given = stored[:, :classes], x, count, None if first else old[:classes], sums
        hopper_gradients.write_part(problem, *given, **options)
    wanted = torch.stack([total[rank * rank_rows + begin :][:part_rows] for rank in range(2)])
    torch.testing.assert_close(sums.double(), wanted, rtol=1e-5, atol=1e-4)


def test_pointers_to_a_tile_of_a_large_matrix() -> None:
    """The offset of its first element exceeds int32."""
    pointer = Pointer(gluon_in_numpy.Memory(torch.zeros(1)), Value(0, "i64"))
    rows, columns, row, column = (Value(size, "i32") for size in (2**20 + 5, 4096, 2**20, 128))
    with gluon_in_numpy.in_python(MODULES, gluon_in_numpy.Language(0, (1,)), gluon_in_numpy.AsyncCopy(late=False)):
        tile_pointers: Any = ampere_common.tile_pointers
        found, inside = tile_pointers(pointer, columns, row, column, rows, columns, 128, 32, None)
    assert np.array_equal(found.offset.data, (2**20 + np.arange(128)[:, None]) * 4096 + 128 + np.arange(32))
    assert np.array_equal(inside.data, np.broadcast_to(np.arange(128)[:, None] < 5, (128, 32)))


def test_the_steps_of_a_part_leave_the_rest_of_the_classes_to_others() -> None:
    """Half of the classes are NaN, and only the programs of the other half are run."""
    rows, d, classes = 128, 128, 256
    x, w = torch.empty(rows, d, dtype=torch.bfloat16), torch.ones(classes, d, dtype=torch.bfloat16)
    plan = plan_for(x, w, classes, 80)
    e = torch.ones(rows, classes, dtype=torch.bfloat16)
    e[:, 128:], w[128:] = torch.nan, torch.nan
    problem = Problem(
        x, w, None, torch.zeros(rows, dtype=torch.int64), x[:, 0], None, LossSpec("sum"), classes, plan=plan
    )
    config = replace(plan.scaled_exp_config, d_input_rows=128)
    kernel, matrices, _, constexprs = ampere_gradients.d_input_launch(problem, config, StoredExponentials(e))
    part, count = torch.zeros(2 * 128 * 128), torch.tensor(rows, dtype=torch.int32)
    factors, places, d_input = torch.ones(rows), torch.arange(rows), torch.zeros(rows, d, dtype=torch.bfloat16)
    schedule = choose_schedule(1, 4, 2, splits_tiles=True)
    pointers = part, factors, factors, places, places, w, *w.stride(), d_input, count
    gluon_in_numpy.run(
        MODULES, kernel, (2,), *matrices, *pointers, 0, rows, d, classes, *schedule, late=True, **constexprs
    )
    assert (part[: 128 * 128] == 128).all()
    assert part[128 * 128 :].isnan().all()
