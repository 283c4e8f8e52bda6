"""Tests how the programs of core_triton's d_input kernels divide its tiles, in Python.

test_jax_pallas_hopper_gradients.py tests the same of jax_pallas.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core_triton import input_grad
from core_triton.launch import cdiv
from core_triton.tile_config import SplitKSchedule, choose_schedule


def work_units(program: int, programs: int, schedule: SplitKSchedule) -> list[input_grad.WorkUnit]:
    """Runs the kernel's functions that divide the work, in Python, for one program."""
    language = SimpleNamespace(
        program_id=lambda axis: program,
        num_programs=lambda axis: programs,
        maximum=max,
        where=lambda condition, yes, no: yes if condition else no,
    )
    in_python = SimpleNamespace(last_tails_of=input_grad.last_tails_of.fn, gl=language)
    with mock.patch.multiple(input_grad, **vars(in_python)):
        count = input_grad.num_work_units.fn(schedule)
        return [input_grad.work_unit_of.fn(index, schedule) for index in range(count)]


def summed(schedule: SplitKSchedule, index: int) -> list[int]:
    """Returns the slots that `d_input_sum_kernel` adds up for the index-th split tile."""
    slots = [part * schedule.split_tiles + index for part in range(schedule.split_factor)]
    if schedule.tail_programs:
        first = schedule.split_factor * schedule.split_tiles + index
        split = index >= schedule.split_tiles - schedule.last_tails
        slots += [first + k * schedule.last_tails for k in range(schedule.tail_factor if split else 1)]
    return slots


@settings(max_examples=200, deadline=None)
@given(
    tiles=st.integers(1, 600),
    iters=st.integers(1, 4000),
    programs=st.sampled_from((4, 78, 108, 114, 132, 148, 216, 264)),
    splits_tiles=st.booleans(),
)
# 1,024 rows of gpt-oss-20b: two waves of 40 tails, then 12 in three parts. Of Gemma-2 2B: 60, then 12 in five parts.
@example(tiles=92, iters=3143, programs=132, splits_tiles=True)
@example(tiles=72, iters=4000, programs=132, splits_tiles=True)
# 1,664 rows of Qwen with two programs for each multiprocessor of an H100.
@example(tiles=91, iters=2374, programs=264, splits_tiles=True)
def test_each_iteration_is_computed_once(tiles: int, iters: int, programs: int, splits_tiles: bool) -> None:
    schedule = choose_schedule(tiles, iters, programs, splits_tiles=splits_tiles)
    of_tile: dict[int, list[tuple[int, int, int]]] = {tile: [] for tile in range(tiles)}
    longest = 0
    for program in range(programs):
        units = work_units(program, programs, schedule)
        longest = max(longest, sum(unit.last - unit.first for unit in units))
        for unit in units:
            assert 0 <= unit.first < unit.last <= iters
            assert unit.slot < schedule.partial_tiles
            of_tile[unit.tile].append((unit.first, unit.last, unit.slot))
    assert longest == schedule.longest
    whole = schedule.full_waves * programs
    for tile, units in of_tile.items():
        edges = [0, *(edge for first, last, _ in sorted(units) for edge in (first, last)), iters]
        assert edges[::2] == edges[1::2], f"{schedule}: tile {tile} takes {sorted(units)}"
        slots = sorted(slot for _, _, slot in units if slot >= 0)
        split = tile >= whole and schedule.partial_tiles
        assert slots == (sorted(summed(schedule, tile - whole)) if split else []), f"{schedule}: tile {tile}"


@pytest.mark.parametrize(("tiles", "iters"), [(92, 3143), (72, 4000), (36, 4096), (52, 2020)])
def test_programs_of_a_wave_of_tails_read_the_same_classes(tiles: int, iters: int) -> None:
    programs = 132
    schedule = choose_schedule(tiles, iters, programs, splits_tiles=True)
    assert schedule.tail_programs
    first_tail = schedule.split_factor * schedule.split_tiles
    workers = [work_units(program, programs, schedule) for program in range(first_tail, programs)]
    for wave in range(schedule.tail_waves):
        assert {(units[wave].first, units[wave].last) for units in workers} == {(schedule.split_iters, iters)}
    assert schedule.longest <= 1.03 * cdiv(tiles * iters, programs)
