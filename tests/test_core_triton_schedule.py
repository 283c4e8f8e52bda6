"""Tests how the programs of core_triton's d_input kernels divide its tiles, in Python.

test_jax_pallas_hopper_gradients.py tests the same of jax_pallas.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core_triton import input_grad
from core_triton.launch import cdiv
from core_triton.tile_config import SplitKSchedule, choose_schedule


@contextmanager
def in_python(program_id: int, programs: int) -> Iterator[None]:
    """Lets the kernel's functions that divide the work run in Python, for one program."""
    language = SimpleNamespace(
        program_id=lambda axis: program_id,
        num_programs=lambda axis: programs,
        minimum=min,
        maximum=max,
        where=lambda condition, yes, no: yes if condition else no,
    )
    functions = {name: getattr(input_grad, name).fn for name in ("own_program", "last_tails_of")}
    with mock.patch.multiple(input_grad, gl=language, **functions):
        yield


def work_units(program_id: int, programs: int, schedule: SplitKSchedule) -> list[input_grad.WorkUnit]:
    with in_python(program_id, programs):
        count = input_grad.num_work_units.fn(schedule)
        return [input_grad.work_unit_of.fn(index, schedule) for index in range(count)]


def added_slots(unit: input_grad.WorkUnit, schedule: SplitKSchedule) -> list[int]:
    """Returns the slots of the partial tiles that the program that finishes a tile adds to its own, in order."""
    with in_python(0, 1):
        return [input_grad.slot_of.fn(other, unit.split, schedule) for other in range(unit.others)]


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
    of_tile: dict[int, list[tuple[input_grad.WorkUnit, int]]] = {tile: [] for tile in range(tiles)}
    longest, slots = 0, []
    for program_id in range(programs):
        units = work_units(program_id, programs, schedule)
        longest = max(longest, sum(unit.last - unit.first for unit in units))
        for unit in units:
            assert 0 <= unit.first < unit.last <= iters
            of_tile[unit.tile].append((unit, program_id))
            slots += [unit.slot] if unit.slot >= 0 else []
    assert longest == schedule.longest
    assert sorted(slots) == list(range(schedule.partial_tiles))
    for tile, found in of_tile.items():
        parts = sorted((unit.first, unit.last, unit.slot) for unit, _ in found)
        edges = [0, *(edge for first, last, _ in parts for edge in (first, last)), iters]
        assert edges[::2] == edges[1::2], f"{schedule}: tile {tile} takes {parts}"
        [(finishing, waits)] = [(unit, program_id) for unit, program_id in found if unit.slot < 0]
        assert finishing.first == 0
        assert added_slots(finishing, schedule) == [slot for _, _, slot in parts[1:]], f"{schedule}: tile {tile}"
        if len(found) > 1:
            assert len({unit.split for unit, _ in found}) == 1
            assert waits == max(program_id for _, program_id in found), "a program waits for one that starts later"


@pytest.mark.parametrize(("tiles", "iters"), [(92, 3143), (72, 4000), (36, 4096), (52, 2020)])
def test_programs_of_a_wave_of_tails_read_the_same_classes(tiles: int, iters: int) -> None:
    programs = 132
    schedule = choose_schedule(tiles, iters, programs, splits_tiles=True)
    assert schedule.tail_programs
    first_tail = schedule.split_factor * schedule.split_tiles
    workers = [work_units(programs - 1 - program, programs, schedule) for program in range(first_tail, programs)]
    for wave in range(schedule.tail_waves):
        assert {(units[wave].first, units[wave].last) for units in workers} == {(schedule.split_iters, iters)}
    assert schedule.longest <= 1.03 * cdiv(tiles * iters, programs)
