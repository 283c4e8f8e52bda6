"""The two gradient matmuls of plan A with scaled exponentials for Hopper (sm_90), in Triton's Gluon dialect.

    d_weight = E^T (rho x)                      (V, D), summed over rows    `d_weight_kernel`
    d_input  = rho (E W) + theta w_target       (n, D), summed over classes `d_input_kernel`, `d_input_sum_kernel`

Both compute transposed tiles, 128 columns of D by 256 of the other axis, because D of some models is a multiple of 128
and not of 256. As in `hopper_common.py` one warp loads and two warpgroups multiply, 64 columns of D each. The number of
active rows of a chunk is in device memory. The kernels skip the rows after them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from core_triton import tile_config
from core_triton.hopper_common import (
    LOAD_REGISTERS,
    MULTIPLY_REGISTERS,
    NOT_SPECIALIZED,
    active_rows,
    halves,
    make_buffers,
    make_ring,
    next_stage,
    quarters,
)
from core_triton.kernels import Active, head_with_contiguous_rows
from core_triton.launch import At, Blocks, cdiv, launch
from core_triton.problem import Problem, plan_of
from core_triton.tile_config import ScaledExpConfig, SplitKSchedule

# A tile's steps are in parts. Between parts a quarter of the previous tile is stored and a quarter of the old d_weight
# is loaded.
PARTS = gl.constexpr(5)

# Registers of a thread, as MULTIPLY_REGISTERS and LOAD_REGISTERS: a packed tile is held together with the sums.
D_WEIGHT_REGISTERS = gl.constexpr(240)

D_WEIGHT_LOAD_REGISTERS = gl.constexpr(24)


@gluon.jit
def load_d_weight(x_desc, e_desc, d_weight_desc, ring, active, hidden, classes, ADDS: gl.constexpr):
    """The loading warp. The blocks of D come first: e is read from memory once, and x stays in L2.

    With ADDS a stage after each part but the last holds a quarter of the old tile, where e would be.
    """
    STAGES: gl.constexpr = ring.b.shape[0]
    BLOCK_N: gl.constexpr = ring.b.shape[1]
    BLOCK_V: gl.constexpr = ring.b.shape[2]
    HALF: gl.constexpr = ring.a.shape[2]
    WIDTH: gl.constexpr = BLOCK_V // 4
    d_blocks = gl.cdiv(hidden, 2 * HALF)
    tiles = d_blocks * gl.cdiv(classes, BLOCK_V)
    steps = gl.cdiv(active, BLOCK_N)
    part_steps = steps // PARTS
    stage = 0
    phase = 0
    if active > 0:
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            d, v = (tile % d_blocks) * (2 * HALF), (tile // d_blocks) * BLOCK_V
            for part in gl.static_range(PARTS):
                for step in range(part * part_steps, steps if part == PARTS - 1 else (part + 1) * part_steps):
                    k = step * BLOCK_N
                    mbarrier.wait(ring.empty.index(stage), phase ^ 1)
                    bar = ring.full.index(stage)
                    mbarrier.expect(bar, (2 * HALF + BLOCK_V) * BLOCK_N * 2)
                    tma.async_copy_global_to_shared(x_desc, [k, d], bar, ring.a.index(2 * stage))
                    tma.async_copy_global_to_shared(x_desc, [k, d + HALF], bar, ring.a.index(2 * stage + 1))
                    tma.async_copy_global_to_shared(e_desc, [k, v], bar, ring.b.index(stage))
                    stage, phase = next_stage(stage, phase, STAGES)
                if ADDS and part < PARTS - 1:
                    mbarrier.wait(ring.empty.index(stage), phase ^ 1)
                    bar = ring.full.index(stage)
                    mbarrier.expect(bar, 2 * HALF * WIDTH * 2)
                    old = old_quarters(ring.b, stage, d_weight_desc)
                    tma.async_copy_global_to_shared(d_weight_desc, [v + part * WIDTH, d], bar, old.index(0))
                    tma.async_copy_global_to_shared(d_weight_desc, [v + part * WIDTH, d + HALF], bar, old.index(1))
                    stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def old_quarters(e_ring, stage, d_weight_desc):
    """Returns a stage of e's ring as a quarter of the old tile of each warpgroup."""
    shape: gl.constexpr = [2] + d_weight_desc.block_type.shape
    return e_ring.index(stage)._reinterpret(e_ring.dtype, shape, d_weight_desc.layout)


@gluon.jit
def store_d_weight(d_weight_desc, buffers, quarter, tile, d_blocks, WHICH: gl.constexpr, i: gl.constexpr):
    """Stores the quarter `i` of the warpgroup's half of a tile. A tile past the last is not stored."""
    WIDTH: gl.constexpr = d_weight_desc.block_type.shape[0]
    HALF: gl.constexpr = d_weight_desc.block_type.shape[1]
    d, v = (tile % d_blocks) * (2 * HALF) + WHICH * HALF, (tile // d_blocks) * (4 * WIDTH)
    buffer = buffers.index(2 * WHICH + i % 2)
    tma.store_wait(1)  # the store before the last has read this buffer
    gl.thread_barrier()
    buffer.permute((1, 0)).store(quarter)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(d_weight_desc, [v + i * WIDTH, d], buffer)


@gluon.jit
def d_weight_warpgroup(d_weight_desc, ring, buffers, active, hidden, classes, ADDS: gl.constexpr, WHICH: gl.constexpr):
    STAGES: gl.constexpr = ring.b.shape[0]
    BLOCK_N: gl.constexpr = ring.b.shape[1]
    BLOCK_V: gl.constexpr = ring.b.shape[2]
    HALF: gl.constexpr = ring.a.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    quarter: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V // 4, 16])
    d_blocks = gl.cdiv(hidden, 2 * HALF)
    tiles = d_blocks * gl.cdiv(classes, BLOCK_V)
    steps = gl.cdiv(active, BLOCK_N)
    part_steps = steps // PARTS
    stage = 0
    phase = 0
    done_tile = tiles  # outside: the first stores are dropped
    zeros = gl.zeros([HALF, BLOCK_V // 4], d_weight_desc.dtype, quarter)
    done = (zeros, zeros, zeros, zeros)
    if active > 0:
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            acc = gl.zeros([HALF, BLOCK_V], gl.float32, layout)
            old = ()
            for part in gl.static_range(PARTS):
                for k in range(part * part_steps, steps if part == PARTS - 1 else (part + 1) * part_steps):
                    mbarrier.wait(ring.full.index(stage), phase)
                    x = ring.a.index(2 * stage + WHICH).permute((1, 0))
                    acc = warpgroup_mma(x, ring.b.index(stage), acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    before = stage - 1
                    if ADDS and part > 0:
                        before = gl.where(k == part * part_steps, stage - 2, before)  # past the old quarter
                    before = gl.where(before < 0, before + STAGES, before)
                    mbarrier.arrive(ring.empty.index(before), count=1, pred=k > 0)
                    stage, phase = next_stage(stage, phase, STAGES)
                if part < PARTS - 1:
                    store_d_weight(d_weight_desc, buffers, done[part], done_tile, d_blocks, WHICH, part)
                    if ADDS:
                        mbarrier.wait(ring.full.index(stage), phase)
                        old_quarter = old_quarters(ring.b, stage, d_weight_desc).index(WHICH)
                        old = old + (old_quarter.permute((1, 0)).load(quarter),)
                        gl.thread_barrier()
                        mbarrier.arrive(ring.empty.index(stage), count=1)
                        stage, phase = next_stage(stage, phase, STAGES)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(ring.empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
            first, second, third, fourth = quarters(acc, quarter)
            if ADDS:
                first += old[0].to(gl.float32)
                second += old[1].to(gl.float32)
                third += old[2].to(gl.float32)
                fourth += old[3].to(gl.float32)
            dtype: gl.constexpr = d_weight_desc.dtype
            done = (first.to(dtype), second.to(dtype), third.to(dtype), fourth.to(dtype))
            done_tile = tile
        for i in gl.static_range(4):
            store_d_weight(d_weight_desc, buffers, done[i], done_tile, d_blocks, WHICH, i)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def d_weight_kernel(
    x_desc, e_desc, d_weight_desc, count_ptr, start, least, rows, hidden, classes, STAGES: gl.constexpr,
    ADDS: gl.constexpr,
):  # fmt: skip
    """Writes d_weight = e^T x, or with ADDS adds it, rounded once: (33).

    Reads the first count - start rows, but at least `least`, of x (rows, D), already multiplied by rho, and of e (rows,
    V). Writes d_weight (V, D), each tile from one program. Up to the next multiple of a step the rows of e must be
    finite and those of x must be 0.

    The tensor cores wait only for the addition. The old tile is loaded into registers, packed, during the matmuls. The
    finished tile stays in registers, packed, and is stored during the matmuls of the next tile.
    """
    active = active_rows(count_ptr, start, least, rows)
    ring = make_ring(x_desc, e_desc, STAGES)
    buffers = make_buffers(d_weight_desc)
    gl.warp_specialize(
        [
            (d_weight_warpgroup, (d_weight_desc, ring, buffers, active, hidden, classes, ADDS, 0)),
            (d_weight_warpgroup, (d_weight_desc, ring, buffers, active, hidden, classes, ADDS, 1)),
            (load_d_weight, (x_desc, e_desc, d_weight_desc, ring, active, hidden, classes, ADDS)),
        ],
        [4, 1],
        [D_WEIGHT_REGISTERS, D_WEIGHT_LOAD_REGISTERS],
    )


def add_d_weight(problem: Problem, e: Tensor, x: Tensor, active: Active, d_weight: Tensor, *, first: bool) -> None:
    """Launches `d_weight_kernel`: adds e^T x to d_weight (K, D), or overwrites it if `first`."""
    (n, classes), hidden = e.shape, problem.input.shape[1]
    step, half, block_v = tile_config.D_WEIGHT_STEP, tile_config.D_BLOCK // 2, tile_config.CLASS_BLOCK
    launch(
        d_weight_kernel,
        (min(cdiv(hidden, tile_config.D_BLOCK) * cdiv(classes, block_v), plan_of(problem).programs),),
        Blocks(x, (step, half), gluon=True),
        Blocks(e, (step, block_v), gluon=True),
        Blocks(d_weight, (block_v // 4, half), gluon=True),
        *active,
        n,
        hidden,
        classes,
        STAGES=tile_config.D_WEIGHT_STAGES,
        ADDS=not first,
        num_warps=4,
    )


class WorkUnit(NamedTuple):
    """The iterations of one tile that a program computes."""

    tile: Any
    first: Any  # iteration
    last: Any  # the iteration after the last
    slot: Any  # of the partial tiles; -1: the unit is a whole tile


@gluon.jit
def last_tails_of(schedule):
    """Returns how many tails the last wave of the tail programs has, and how many programs compute parts of each: 0
    where all tails are computed whole."""
    last_tails = schedule.split_tiles % schedule.tail_programs
    return last_tails, gl.where(last_tails > 0, schedule.tail_programs // gl.maximum(last_tails, 1), 0)


@gluon.jit
def work_unit_of(index, schedule):
    """Returns a program's work unit number `index` of a `SplitKSchedule`.

    Programs first compute whole tiles in `full_waves` waves. The other `split_tiles` tiles are split along the classes.
    Their first `split_iters` iterations are split into `split_factor` equal parts. The other iterations of each are its
    tail. The `tail_programs` programs that have no part compute whole tails in waves, and an equal part of one of the
    last tails. Programs of the same part or wave read the same classes at the same time and share what they read. Tiles
    are numbered with the blocks of D first: tiles that run together then have few rows of e, which are read from memory
    once.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    tile = program + index * programs
    first, last, slot = 0, schedule.iters_per_tile, -1
    if index >= schedule.full_waves:
        parts = schedule.split_factor * schedule.split_tiles
        if program < parts:
            piece = program % schedule.split_tiles
            part = program // schedule.split_tiles
            first = schedule.split_iters * part // schedule.split_factor
            last = schedule.split_iters * (part + 1) // schedule.split_factor
            slot = gl.where(last - first == schedule.iters_per_tile, -1, program)
        else:
            last_tails, tail_factor = last_tails_of(schedule)
            worker = program - parts
            piece = worker + (index - schedule.full_waves) * schedule.tail_programs
            first = schedule.split_iters
            slot = parts + piece
            if piece >= schedule.split_tiles - last_tails:
                tail_iters = schedule.iters_per_tile - schedule.split_iters
                part = worker // last_tails
                piece = schedule.split_tiles - last_tails + worker % last_tails
                last = first + tail_iters * (part + 1) // tail_factor
                first += tail_iters * part // tail_factor
        tile = schedule.full_waves * programs + piece
    return WorkUnit(tile, first, last, slot)


@gluon.jit
def num_work_units(schedule):
    """Returns how many work units a program has."""
    worker = gl.program_id(0) - schedule.split_factor * schedule.split_tiles
    units = schedule.full_waves
    if worker < 0:
        units += 1
    elif worker < schedule.tail_programs:
        last_tails, tail_factor = last_tails_of(schedule)
        units += schedule.split_tiles // schedule.tail_programs
        units += gl.where(worker < tail_factor * last_tails, 1, 0)
    return units


@gluon.jit
def load_d_input(w_desc, e_desc, ring, active, d_blocks, schedule, W_BY_CLASS: gl.constexpr):
    """The loading warp."""
    STAGES: gl.constexpr = ring.b.shape[0]
    BLOCK_N: gl.constexpr = ring.b.shape[1]
    BLOCK_V: gl.constexpr = ring.b.shape[2]
    stage = 0
    phase = 0
    for index in range(num_work_units(schedule)):
        unit = work_unit_of(index, schedule)
        row, d = (unit.tile // d_blocks) * BLOCK_N, (unit.tile % d_blocks) * 128
        if row < active:
            for step in range(unit.first, unit.last):
                k = step * BLOCK_V
                mbarrier.wait(ring.empty.index(stage), phase ^ 1)
                bar = ring.full.index(stage)
                mbarrier.expect(bar, (128 + BLOCK_N) * BLOCK_V * 2)
                if W_BY_CLASS:
                    tma.async_copy_global_to_shared(w_desc, [k, d], bar, ring.a.index(2 * stage))
                    tma.async_copy_global_to_shared(w_desc, [k, d + 64], bar, ring.a.index(2 * stage + 1))
                else:
                    tma.async_copy_global_to_shared(w_desc, [d, k], bar, ring.a.index(2 * stage))
                    tma.async_copy_global_to_shared(w_desc, [d + 64, k], bar, ring.a.index(2 * stage + 1))
                tma.async_copy_global_to_shared(e_desc, [row, k], bar, ring.b.index(stage))
                stage, phase = next_stage(stage, phase, STAGES)


class DInputIO(NamedTuple):
    """What `d_input_kernel` reads and writes besides the matrices that it multiplies."""

    part_ptr: Any
    rho_ptr: Any
    theta_ptr: Any
    target_ptr: Any
    row_ptr: Any
    weight_ptr: Any
    weight_stride: Any
    weight_stride_d: Any
    d_input_ptr: Any


@gluon.jit
def d_input_warpgroup(
    ring, io, active, hidden, classes, d_blocks, schedule, W_BY_CLASS: gl.constexpr, WHICH: gl.constexpr
):
    STAGES: gl.constexpr = ring.b.shape[0]
    BLOCK_N: gl.constexpr = ring.b.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    d_within = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    n_within = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    within = gl.expand_dims(d_within, 1) * BLOCK_N + gl.expand_dims(n_within, 0)
    stage = 0
    phase = 0
    for index in range(num_work_units(schedule)):
        unit = work_unit_of(index, schedule)
        row, d = (unit.tile // d_blocks) * BLOCK_N, (unit.tile % d_blocks) * 128 + WHICH * 64
        if row < active:
            acc = gl.zeros([64, BLOCK_N], gl.float32, layout)
            for step in range(unit.first, unit.last):
                mbarrier.wait(ring.full.index(stage), phase)
                w = ring.a.index(2 * stage + WHICH)
                if W_BY_CLASS:
                    w = w.permute((1, 0))
                acc = warpgroup_mma(w, ring.b.index(stage).permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                before = gl.where(stage == 0, STAGES - 1, stage - 1)
                mbarrier.arrive(ring.empty.index(before), count=1, pred=step > unit.first)
                stage, phase = next_stage(stage, phase, STAGES)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(ring.empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
            if unit.slot >= 0:
                gl.store(io.part_ptr + unit.slot.to(gl.int64) * (128 * BLOCK_N) + within, acc)
            else:
                # A quarter of the rows at a time, turned so that a thread holds eight columns of D of a row.
                left, right = halves(acc)
                pieces = halves(left) + halves(right)
                columns = d + gl.arange(0, 64, gl.SliceLayout(0, by_row))
                for i in gl.static_range(4):
                    total = gl.convert_layout(pieces[i].permute((1, 0)), by_row)
                    row_ids = row + i * (BLOCK_N // 4) + gl.arange(0, BLOCK_N // 4, gl.SliceLayout(1, by_row))
                    inside = row_ids < active
                    rho = gl.load(io.rho_ptr + row_ids, mask=inside, other=0.0)
                    theta = gl.load(io.theta_ptr + row_ids, mask=inside, other=0.0)
                    target = gl.load(io.target_ptr + row_ids, mask=inside, other=-1)
                    out = gl.load(io.row_ptr + row_ids, mask=inside, other=0)
                    is_class = (target >= 0) & (target < classes)
                    keeps = gl.expand_dims(inside, 1) & gl.expand_dims(columns < hidden, 0)
                    places = gl.expand_dims(target * io.weight_stride, 1)
                    places += gl.expand_dims(columns * io.weight_stride_d, 0)
                    own = gl.load(io.weight_ptr + places, mask=keeps & gl.expand_dims(is_class, 1), other=0.0)
                    theta = gl.where(is_class, theta, 0.0)
                    result = total * gl.expand_dims(rho, 1) + own.to(gl.float32) * gl.expand_dims(theta, 1)
                    places = gl.expand_dims(out * hidden, 1) + gl.expand_dims(columns, 0)
                    gl.store(io.d_input_ptr + places, result.to(io.d_input_ptr.dtype.element_ty), mask=keeps)


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, *SplitKSchedule._fields])
def d_input_kernel(
    w_desc, e_desc, part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d,
    d_input_ptr, count_ptr, start, rows, hidden, classes,
    full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs,
    STAGES: gl.constexpr, W_BY_CLASS: gl.constexpr,
):  # fmt: skip
    """Writes rows of d_input = rho * (e @ w) + theta * w[target], rounded once: (32), where a work unit is a
    whole tile of BLOCK_N rows x 128 columns. Other units write a partial tile, float32, to their slot of part
    (`work_unit_of`).

    Reads e (rows, V) and w (V, D) or (D, V); rho, theta (rows,) float32, target (rows,) int64 and row (rows,) int64:
    which row of d_input (N, D) a row is. Rows past count - start are not written.
    """
    active = active_rows(count_ptr, start, 0, rows)
    ring = make_ring(w_desc, e_desc, STAGES)
    d_blocks = gl.cdiv(hidden, 128)
    schedule = SplitKSchedule(full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs)
    io = DInputIO(
        part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d, d_input_ptr
    )
    gl.warp_specialize(
        [
            (d_input_warpgroup, (ring, io, active, hidden, classes, d_blocks, schedule, W_BY_CLASS, 0)),
            (d_input_warpgroup, (ring, io, active, hidden, classes, d_blocks, schedule, W_BY_CLASS, 1)),
            (load_d_input, (w_desc, e_desc, ring, active, d_blocks, schedule, W_BY_CLASS)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


@triton.jit(
    do_not_specialize=[
        *NOT_SPECIALIZED,
        "first_tile",
        "split_tiles",
        "split_factor",
        "tail_programs",
    ]
)
def d_input_sum_kernel(
    part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d, d_input_ptr,
    count_ptr, start, rows, hidden, classes,
    first_tile, split_tiles, split_factor, tail_programs,
    TILE_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The fix-up of the split tiles: sums their partial tiles in order and finishes them as `d_input_kernel` does whole
    tiles.

    One program owns BLOCK_N rows x BLOCK_D columns of one tile.
    """
    index = tl.program_id(0)
    tile, d_blocks = first_tile + index, tl.cdiv(hidden, 128)
    active = tl.minimum(tl.load(count_ptr) - start, rows)
    d_within = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n_within = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ids = (tile // d_blocks) * TILE_N + n_within
    if (tile // d_blocks) * TILE_N < active:
        within = d_within[:, None] * TILE_N + n_within[None, :]
        total = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
        for part in range(split_factor):
            slot = part * split_tiles + index
            total += tl.load(part_ptr + slot * (128 * TILE_N) + within)
        if tail_programs > 0:
            last_tails = split_tiles % tail_programs
            tail_factor = tl.where(index < split_tiles - last_tails, 1, tail_programs // tl.maximum(last_tails, 1))
            for part in range(tail_factor):
                slot = split_factor * split_tiles + part * last_tails + index
                total += tl.load(part_ptr + slot * (128 * TILE_N) + within)
        columns = (tile % d_blocks) * 128 + d_within
        inside = row_ids < active
        rho = tl.load(rho_ptr + row_ids, mask=inside, other=0.0)
        theta = tl.load(theta_ptr + row_ids, mask=inside, other=0.0)
        target = tl.load(target_ptr + row_ids, mask=inside, other=-1)
        is_class = (target >= 0) & (target < classes)
        keeps = inside[:, None] & (columns < hidden)[None, :]
        w_places = (target * weight_stride)[:, None] + columns[None, :] * weight_stride_d
        own = tl.load(weight_ptr + w_places, mask=keeps & is_class[:, None], other=0.0).to(tl.float32)
        result = tl.trans(total) * rho[:, None] + own * tl.where(is_class, theta, 0.0)[:, None]
        out = tl.load(row_ptr + row_ids, mask=inside, other=0)
        places = (out * hidden)[:, None] + columns[None, :]
        tl.store(d_input_ptr + places, result.to(d_input_ptr.dtype.element_ty), mask=keeps)


def store_d_input(
    problem: Problem,
    config: ScaledExpConfig,
    e: Tensor,
    active: Active,
    *,
    partial_sums: Tensor,
    rho: At,
    theta: At,
    target: At,
    order: At,
    d_input: Tensor,
) -> None:
    """Launches `d_input_kernel`, and `d_input_sum_kernel` where tiles are split, for the packed rows of a chunk."""
    w, (n, classes), hidden = problem.linear_weight, e.shape, d_input.shape[1]
    step, tile_rows, programs = tile_config.D_INPUT_STEP, config.d_input_rows, plan_of(problem).programs
    head, block, by_class = head_with_contiguous_rows(w[:classes], (step, tile_config.D_BLOCK // 2))
    tiles = cdiv(n, tile_rows) * cdiv(hidden, tile_config.D_BLOCK)
    schedule = tile_config.choose_schedule(tiles, cdiv(classes, step), programs, splits_tiles=config.splits_tiles)
    pointers = partial_sums, rho, theta, target, order, w, *w.stride(), d_input, active.count
    sizes = active.start, n, hidden, classes
    launch(
        d_input_kernel,
        (programs,),
        Blocks(head, block, gluon=True),
        Blocks(e, (tile_rows, step), gluon=True),
        *pointers,
        *sizes,
        *schedule,
        STAGES=tile_config.D_INPUT_STAGES,
        W_BY_CLASS=by_class,
        num_warps=4,
    )
    if schedule.partial_tiles:
        launch(
            d_input_sum_kernel,
            (schedule.split_tiles, tile_config.D_BLOCK // 32, tile_rows // 64),
            *pointers,
            *sizes,
            schedule.full_waves * programs,
            schedule.split_tiles,
            schedule.split_factor,
            schedule.tail_programs,
            TILE_N=tile_rows,
            BLOCK_D=32,
            BLOCK_N=64,
            num_warps=4,
        )
