"""The two gradient matmuls of plan A with scaled exponentials for Hopper (sm_90), in Triton's Gluon dialect.

    d_weight = E^T (rho x)                      (V, D), summed over rows    `d_weight_kernel`
    d_input  = rho (E W) + theta w_target       (n, D), summed over classes `d_input_kernel`, `d_input_sum_kernel`

Both compute transposed tiles, 128 columns of D by 256 of the other axis: D of real models has multiples of 128 where it
has none of 256. As in `hopper.py` one warp loads and two warpgroups multiply, 64 columns of D each. The rows of a chunk
that take part are counted on the device: what lies past them is skipped.
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
from core_triton.hopper import (
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
from core_triton.kernels import Active, head_blocks
from core_triton.launch import At, Blocks, cdiv, launch
from core_triton.problem import Problem, plan_of
from core_triton.tile_config import ScaledExpConfig, Shares

# A tile's steps are cut in parts: between them a quarter of the tile before leaves, and a quarter of the old one comes.
PARTS = gl.constexpr(5)

# Registers of a thread, as MULTIPLY_REGISTERS and LOAD_REGISTERS: a packed tile is held beside the sums.
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
    share = steps // PARTS
    stage = 0
    phase = 0
    if active > 0:
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            d, v = (tile % d_blocks) * (2 * HALF), (tile // d_blocks) * BLOCK_V
            for part in gl.static_range(PARTS):
                for step in range(part * share, steps if part == PARTS - 1 else (part + 1) * share):
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
    """Stores the quarter `i` of the warpgroup's half of a tile; a tile past the last is dropped."""
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
    share = steps // PARTS
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
                for k in range(part * share, steps if part == PARTS - 1 else (part + 1) * share):
                    mbarrier.wait(ring.full.index(stage), phase)
                    x = ring.a.index(2 * stage + WHICH).permute((1, 0))
                    acc = warpgroup_mma(x, ring.b.index(stage), acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    before = stage - 1
                    if ADDS and part > 0:
                        before = gl.where(k == part * share, stage - 2, before)  # past the old quarter
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

    Reads x (rows, D), already times rho, and e (rows, V), of them the first count - start rows, and `least` at least;
    writes d_weight (V, D), each tile from one program. Rows up to the next multiple of a step must be numbers, and
    those of x zero.

    Only the addition itself stops the tensor cores: the old tile is read into registers, packed, under the matmuls,
    and the finished one waits there, packed, to be stored under those of the next.
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


class Share(NamedTuple):
    """A program's item of work."""

    tile: Any
    first: Any  # step
    last: Any
    slot: Any  # of the partial sums; -1: the whole tile


@gluon.jit
def share_of(item, shares):
    """Returns an item of a program's work.

    Programs first take whole tiles in `rounds` full rounds. The `rest` tiles are cut along the classes: the first
    `head` steps into `cuts` equal parts, so that programs march through the classes together and share what they read;
    the last steps of all of them, end to end, are divided among the `spare` programs. Tiles are numbered with the
    blocks of D first: those that run together share few rows of e, which they then read from memory once, however many
    rows there are.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    tail = shares.steps - shares.head
    tile = program + item * programs
    first, last, slot = 0, shares.steps, -1
    if item >= shares.rounds:
        if program < shares.cuts * shares.rest:
            part = program // shares.rest
            tile = shares.rounds * programs + program % shares.rest
            first, last = shares.head * part // shares.cuts, shares.head * (part + 1) // shares.cuts
            slot = gl.where(last - first == shares.steps, -1, program)
        else:
            turn = program - shares.cuts * shares.rest
            begin, end = tail * shares.rest * turn // shares.spare, tail * shares.rest * (turn + 1) // shares.spare
            piece = begin // tail + item - shares.rounds
            tile = shares.rounds * programs + piece
            first = shares.head + gl.maximum(begin - piece * tail, 0)
            last = shares.head + gl.minimum(end - piece * tail, tail)
            slot = shares.cuts * shares.rest + turn + piece
    return Share(tile, first, last, slot)


@gluon.jit
def items_of(shares):
    """Returns the number of a program's items of work."""
    program = gl.program_id(0)
    tail = shares.steps - shares.head
    items = shares.rounds
    if program < shares.cuts * shares.rest:
        items += 1
    elif (shares.spare > 0) & (program < shares.cuts * shares.rest + shares.spare):
        turn = program - shares.cuts * shares.rest
        begin, end = tail * shares.rest * turn // shares.spare, tail * shares.rest * (turn + 1) // shares.spare
        items += (end - 1) // tail - begin // tail + 1
    return items


@gluon.jit
def load_d_input(w_desc, e_desc, ring, active, d_blocks, shares, W_BY_CLASS: gl.constexpr):
    """The loading warp."""
    STAGES: gl.constexpr = ring.b.shape[0]
    BLOCK_N: gl.constexpr = ring.b.shape[1]
    BLOCK_V: gl.constexpr = ring.b.shape[2]
    stage = 0
    phase = 0
    for item in range(items_of(shares)):
        share = share_of(item, shares)
        row, d = (share.tile // d_blocks) * BLOCK_N, (share.tile % d_blocks) * 128
        if row < active:
            for step in range(share.first, share.last):
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
    ring, io, active, hidden, classes, d_blocks, shares, W_BY_CLASS: gl.constexpr, WHICH: gl.constexpr
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
    for item in range(items_of(shares)):
        share = share_of(item, shares)
        row, d = (share.tile // d_blocks) * BLOCK_N, (share.tile % d_blocks) * 128 + WHICH * 64
        if row < active:
            acc = gl.zeros([64, BLOCK_N], gl.float32, layout)
            for step in range(share.first, share.last):
                mbarrier.wait(ring.full.index(stage), phase)
                w = ring.a.index(2 * stage + WHICH)
                if W_BY_CLASS:
                    w = w.permute((1, 0))
                acc = warpgroup_mma(w, ring.b.index(stage).permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                before = gl.where(stage == 0, STAGES - 1, stage - 1)
                mbarrier.arrive(ring.empty.index(before), count=1, pred=step > share.first)
                stage, phase = next_stage(stage, phase, STAGES)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(ring.empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
            if share.slot >= 0:
                gl.store(io.part_ptr + share.slot.to(gl.int64) * (128 * BLOCK_N) + within, acc)
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


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, *Shares._fields])
def d_input_kernel(
    w_desc, e_desc, part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d,
    d_input_ptr, count_ptr, start, rows, hidden, classes, rounds, rest, cuts, head, steps, spare,
    STAGES: gl.constexpr, W_BY_CLASS: gl.constexpr,
):  # fmt: skip
    """Writes rows of d_input = rho * (e @ w) + theta * w[target], rounded once: (32), where a program sums a whole tile
    of BLOCK_N rows x 128 columns, and its share of the sum, float32, to a slot of part elsewhere (`share_of`).

    Reads e (rows, V) and w (V, D) or (D, V); rho, theta (rows,) float32, target (rows,) int64 and row (rows,) int64:
    which row of d_input (N, D) a row is. Rows past count - start are left alone.
    """
    active = active_rows(count_ptr, start, 0, rows)
    ring = make_ring(w_desc, e_desc, STAGES)
    d_blocks = gl.cdiv(hidden, 128)
    shares = Shares(rounds, rest, cuts, head, steps, spare)
    io = DInputIO(
        part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d, d_input_ptr
    )
    gl.warp_specialize(
        [
            (d_input_warpgroup, (ring, io, active, hidden, classes, d_blocks, shares, W_BY_CLASS, 0)),
            (d_input_warpgroup, (ring, io, active, hidden, classes, d_blocks, shares, W_BY_CLASS, 1)),
            (load_d_input, (w_desc, e_desc, ring, active, d_blocks, shares, W_BY_CLASS)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "first_tile", "rest", "cuts", "tail", "spare"])
def d_input_sum_kernel(
    part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d, d_input_ptr,
    count_ptr, start, rows, hidden, classes, first_tile, rest, cuts, tail, spare,
    TILE_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums the shares of the cut tiles, in order, and finishes them as `d_input_kernel` does the others.

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
        for part in range(cuts):
            slot = part * rest + index
            total += tl.load(part_ptr + slot * (128 * TILE_N) + within)
        # Spare programs divide the tails evenly: those at this tile's place have a part of it, give or take one.
        for turn in range(max(index * spare // rest - 1, 0), min((index + 1) * spare // rest + 2, spare)):
            begin, end = tail * rest * turn // spare, tail * rest * (turn + 1) // spare
            if (begin < (index + 1) * tail) & (end > index * tail):
                slot = cuts * rest + turn + index
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
    """Launches `d_input_kernel`, and `d_input_sum_kernel` where tiles are cut, for the packed rows of a chunk."""
    w, (n, classes), hidden = problem.linear_weight, e.shape, d_input.shape[1]
    step, tile_rows, programs = tile_config.D_INPUT_STEP, config.d_input_rows, plan_of(problem).programs
    w_blocks, by_class = head_blocks(w[:classes], step, tile_config.D_BLOCK // 2, gluon=True)
    tiles = cdiv(n, tile_rows) * cdiv(hidden, tile_config.D_BLOCK)
    shares = tile_config.choose_shares(tiles, cdiv(classes, step), programs, cut=config.cut)
    pointers = partial_sums, rho, theta, target, order, w, *w.stride(), d_input, active.count
    sizes = active.start, n, hidden, classes
    launch(
        d_input_kernel,
        (programs,),
        w_blocks,
        Blocks(e, (tile_rows, step), gluon=True),
        *pointers,
        *sizes,
        *shares,
        STAGES=tile_config.D_INPUT_STAGES,
        W_BY_CLASS=by_class,
        num_warps=4,
    )
    if shares.slots:
        launch(
            d_input_sum_kernel,
            (shares.rest, tile_config.D_BLOCK // 32, tile_rows // 64),
            *pointers,
            *sizes,
            shares.rounds * programs,
            shares.rest,
            shares.cuts,
            shares.steps - shares.head,
            shares.spare,
            TILE_N=tile_rows,
            BLOCK_D=32,
            BLOCK_N=64,
            num_warps=4,
        )
