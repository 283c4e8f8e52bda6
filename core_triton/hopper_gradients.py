"""The two gradient matmuls of plan A with scaled exponentials for Hopper (sm_90), in Triton's Gluon dialect.

    d_weight = E^T (rho x)                      (V, D), summed over rows    `d_weight_kernel`, `d_weight_part_kernel`
    d_input  = rho (E W) + theta w_target       (n, D), summed over classes `d_input_kernel`

Both compute transposed tiles, 128 columns of D by 256 of the other axis, because D of some models is a multiple of 128
and not of 256. As in `hopper_common.py` one warp loads and two warpgroups multiply, 64 columns of D each. The number of
active rows of a chunk is in device memory. The kernels skip the rows after them.
"""

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from core_triton import tile_config
from core_triton.first_chunk import StoredExponentials
from core_triton.gluon_common import (
    active_rows,
    chunk_power,
    halves,
    quarters,
    reinterpret,
    thread_barrier,
    tma_load,
    tma_store,
)
from core_triton.hopper_common import (
    CROWDED_LOAD_REGISTERS,
    CROWDED_REGISTERS,
    LOAD_REGISTERS,
    MULTIPLY_REGISTERS,
    NOT_SPECIALIZED,
    make_buffers,
    make_ring,
    next_stage,
)
from core_triton.hopper_split_head import multiply_split
from core_triton.input_grad import DInputIO, DInputLaunch, finish_rows, num_work_units, work_unit_of
from core_triton.kernels import Active, head_with_contiguous_rows
from core_triton.launch import Blocks, cdiv, launch
from core_triton.problem import Problem, plan_of
from core_triton.tile_config import ScaledExpConfig, SplitKSchedule
from linear_ce.collectives import BLOCKS, late_start
from linear_ce.cost_coefficients import COEFFICIENTS
from linear_ce.gpus import share_added_in_l2

# A tile's steps are in parts. Between parts a quarter of the previous tile is stored, and a quarter of the old d_weight
# may be loaded.
PARTS = gl.constexpr(5)


@builtin
def async_add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Adds a block in shared memory to memory: TMA's reduction, in L2, which Gluon of Triton 3.6 lacks."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def first_number(LATE: gl.constexpr, ROUNDS: gl.constexpr):
    """Returns the first number of this program, for `tile_of`: a late one, of the last LATE, begins ROUNDS later."""
    first = gl.program_id(0)
    if ROUNDS > 0:
        first += gl.where(first < gl.num_programs(0) - LATE, 0, ROUNDS * gl.num_programs(0))
    return first


@gluon.jit
def tile_of(number, LATE: gl.constexpr, ROUNDS: gl.constexpr):
    """Returns the tile of a number. A round has as many numbers as there are programs, and each of the first ROUNDS
    has a tile for all but the last LATE of them."""
    if ROUNDS > 0:
        number -= LATE * gl.minimum(number // gl.num_programs(0), ROUNDS)
    return number


@gluon.jit
def load_d_weight(
    x_desc, e_desc, old_desc, ring, active, hidden, classes, of_shards, LOADED: gl.constexpr, OLD_LAST: gl.constexpr,
    LATE: gl.constexpr, ROUNDS: gl.constexpr,
):  # fmt: skip
    """The loading warp. The blocks of D come first: e is read from memory once, and x stays in L2.

    A stage after each of the first LOADED parts, or with OLD_LAST each of LOADED stages after the last part, holds a
    quarter of the old tile, where e would be. `of_shards`: `class_of`.
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
        for number in range(first_number(LATE, ROUNDS), tiles + LATE * ROUNDS, gl.num_programs(0)):
            tile = tile_of(number, LATE, ROUNDS)
            d, v = (tile % d_blocks) * (2 * HALF), class_of((tile // d_blocks) * BLOCK_V, of_shards)
            for part in gl.static_range(PARTS):
                for step in range(part * part_steps, steps if part == PARTS - 1 else (part + 1) * part_steps):
                    k = step * BLOCK_N
                    mbarrier.wait(ring.empty.index(stage), phase ^ 1)
                    bar = ring.full.index(stage)
                    mbarrier.expect(bar, (2 * HALF + BLOCK_V) * BLOCK_N * 2)
                    tma_load(x_desc, [k, d], bar, ring.a.index(2 * stage))
                    tma_load(x_desc, [k, d + HALF], bar, ring.a.index(2 * stage + 1))
                    tma_load(e_desc, [k, v], bar, ring.b.index(stage))
                    stage, phase = next_stage(stage, phase, STAGES)
                for i in gl.static_range(LOADED):
                    if part == (PARTS - 1 if OLD_LAST else i):
                        mbarrier.wait(ring.empty.index(stage), phase ^ 1)
                        bar = ring.full.index(stage)
                        mbarrier.expect(bar, 2 * HALF * WIDTH * 2)
                        old = old_quarters(ring.b, stage, old_desc)
                        tma_load(old_desc, [v + i * WIDTH, d], bar, old.index(0))
                        tma_load(old_desc, [v + i * WIDTH, d + HALF], bar, old.index(1))
                        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def class_of(row, of_shards):
    """Returns the class of a row of d_weight, or of a part of it with classes of several shards:
    `d_weight_part_kernel`."""
    if len(of_shards) > 0:
        rank_rows, first, part_rows = of_shards
        row = row // part_rows * rank_rows + first + row % part_rows
    return row


@gluon.jit
def old_quarters(e_ring, stage, old_desc):
    """Returns a stage of e's ring as a quarter of the old tile of each warpgroup."""
    shape: gl.constexpr = [2] + old_desc.block_type.shape
    return reinterpret(e_ring.index(stage), e_ring.dtype, shape, old_desc.layout)


@gluon.jit
def read_old_quarter(old_desc, ring, stage, phase, layout: gl.constexpr, WHICH: gl.constexpr):
    """Waits for a quarter of the old tile, and returns it; its stage is free then."""
    mbarrier.wait(ring.full.index(stage), phase)
    old_quarter = old_quarters(ring.b, stage, old_desc).index(WHICH).permute((1, 0)).load(layout)
    thread_barrier()
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return old_quarter


@gluon.jit
def add_old_quarter(sums, old_desc, ring, stage, phase, layout: gl.constexpr, WHICH: gl.constexpr):
    """Returns the sums of a quarter with those of the old tile, and the stage and the phase after that."""
    STAGES: gl.constexpr = ring.b.shape[0]
    sums += read_old_quarter(old_desc, ring, stage, phase, layout, WHICH).to(gl.float32)
    stage, phase = next_stage(stage, phase, STAGES)
    return sums, stage, phase


@gluon.jit
def store_d_weight(
    d_weight_desc, buffers, quarter, tile, d_blocks, WHICH: gl.constexpr, i: gl.constexpr, ADDS: gl.constexpr
):
    """Stores the quarter `i` of the warpgroup's half of a tile, or with ADDS adds it. A tile past the last is not
    stored."""
    WIDTH: gl.constexpr = d_weight_desc.block_type.shape[0]
    HALF: gl.constexpr = d_weight_desc.block_type.shape[1]
    d, v = (tile % d_blocks) * (2 * HALF) + WHICH * HALF, (tile // d_blocks) * (4 * WIDTH)
    buffer = buffers.index(2 * WHICH + i % 2)
    tma.store_wait(1)  # the store before the last has read this buffer
    thread_barrier()
    buffer.permute((1, 0)).store(quarter)
    fence_async_shared()
    thread_barrier()
    if ADDS:
        async_add_shared_to_global(d_weight_desc, [v + i * WIDTH, d], buffer)
    else:
        tma_store(d_weight_desc, [v + i * WIDTH, d], buffer)


@gluon.jit
def d_weight_warpgroup(
    old_desc, d_weight_desc, ring, buffers, active, hidden, classes, power, ADDS: gl.constexpr, LOADED: gl.constexpr,
    OLD_LAST: gl.constexpr, LATE: gl.constexpr, ROUNDS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
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
    # A thread has registers for a whole tile of 16 bits beside the sums, or for the last half of one in float32.
    FIRST: gl.constexpr = 2 if d_weight_desc.dtype == gl.float32 else 0
    done = (zeros, zeros) if FIRST > 0 else (zeros, zeros, zeros, zeros)
    if active > 0:
        for number in range(first_number(LATE, ROUNDS), tiles + LATE * ROUNDS, gl.num_programs(0)):
            tile = tile_of(number, LATE, ROUNDS)
            acc = gl.zeros([HALF, BLOCK_V], gl.float32, layout)
            old = ()
            for part in gl.static_range(PARTS):
                for k in range(part * part_steps, steps if part == PARTS - 1 else (part + 1) * part_steps):
                    mbarrier.wait(ring.full.index(stage), phase)
                    x = ring.a.index(2 * stage + WHICH).permute((1, 0))
                    acc = warpgroup_mma(x, ring.b.index(stage), acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    before = stage - 1
                    if part > 0 and part <= LOADED and not OLD_LAST:
                        before = gl.where(k == part * part_steps, stage - 2, before)  # past the old quarter
                    before = gl.where(before < 0, before + STAGES, before)
                    mbarrier.arrive(ring.empty.index(before), count=1, pred=k > 0)
                    stage, phase = next_stage(stage, phase, STAGES)
                if FIRST > 0:
                    # The buffers had the first half until now, and must be free again at the end of this tile.
                    if part > 0 and part <= 2:
                        store_d_weight(
                            d_weight_desc, buffers, done[part - 1], done_tile, d_blocks, WHICH, FIRST + part - 1, ADDS
                        )
                elif part < PARTS - 1:
                    store_d_weight(
                        d_weight_desc, buffers, done[part], done_tile, d_blocks, WHICH, part, ADDS and part >= LOADED
                    )
                if part < LOADED and not OLD_LAST:
                    old = old + (read_old_quarter(old_desc, ring, stage, phase, quarter, WHICH),)
                    stage, phase = next_stage(stage, phase, STAGES)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(ring.empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
            if len(power) > 0:
                acc *= chunk_power(power[0])
            first, second, third, fourth = quarters(acc, quarter)
            dtype: gl.constexpr = d_weight_desc.dtype
            if FIRST > 0:
                if OLD_LAST:  # each quarter is read when its sums are stored: there are no registers for all of them
                    first, stage, phase = add_old_quarter(first, old_desc, ring, stage, phase, quarter, WHICH)
                store_d_weight(d_weight_desc, buffers, first, tile, d_blocks, WHICH, 0, ADDS)
                if OLD_LAST:
                    second, stage, phase = add_old_quarter(second, old_desc, ring, stage, phase, quarter, WHICH)
                store_d_weight(d_weight_desc, buffers, second, tile, d_blocks, WHICH, 1, ADDS)
                if OLD_LAST:
                    third, stage, phase = add_old_quarter(third, old_desc, ring, stage, phase, quarter, WHICH)
                    fourth, stage, phase = add_old_quarter(fourth, old_desc, ring, stage, phase, quarter, WHICH)
                done = (third, fourth)
            else:
                if LOADED > 0:
                    first += old[0].to(gl.float32)
                if LOADED > 1:
                    second += old[1].to(gl.float32)
                if LOADED > 2:
                    third += old[2].to(gl.float32)
                if LOADED > 3:
                    fourth += old[3].to(gl.float32)
                done = (first.to(dtype), second.to(dtype), third.to(dtype), fourth.to(dtype))
            done_tile = tile
        for i in gl.static_range(FIRST, 4):
            store_d_weight(d_weight_desc, buffers, done[i - FIRST], done_tile, d_blocks, WHICH, i, ADDS and i >= LOADED)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def d_weight_kernel(
    x_desc, e_desc, d_weight_desc, count_ptr, start, least, rows, hidden, classes, STAGES: gl.constexpr,
    ADDS: gl.constexpr, LOADED: gl.constexpr, HAS_POWER: gl.constexpr = False, LATE: gl.constexpr = 0,
    ROUNDS: gl.constexpr = 0,
):  # fmt: skip
    """Writes d_weight = e^T x, or with ADDS adds it: (33). With HAS_POWER e^T x is multiplied by `chunk_power`: (50).

    Reads the first count - start rows, but at least `least`, of x (rows, D), already multiplied by rho, and of e (rows,
    V). Writes d_weight (V, D), each tile from one program. Up to the next multiple of a step the rows of e must be
    finite and those of x must be 0.

    The finished tile stays in registers, packed, and is stored during the matmuls of the next tile. With ADDS the first
    LOADED quarters of the old tile are loaded into registers, packed, during the matmuls. They are added to the sums,
    and the totals are rounded once. TMA adds the other quarters in L2, so the chunk's sums are rounded, and then the
    totals. Each element is added to once in a launch, by one program, so results repeat bit for bit. The tensor cores
    wait only for the additions in registers.

    A float32 d_weight, of either dtype of x, is all added to in L2: LOADED is 0. A thread has registers for half of the
    finished tile. The other half goes to shared memory at once, while the other warpgroup multiplies.

    LATE and ROUNDS are those of a `collectives.LateStart`.
    """
    active = active_rows(count_ptr, start, least, rows)
    ring = make_ring(x_desc, e_desc, STAGES)
    buffers = make_buffers(d_weight_desc)
    power = ()  # nothing that the warpgroups would get where there is none
    if HAS_POWER:
        power = (count_ptr,)
    gl.warp_specialize(
        [
            (d_weight_warpgroup, (
                d_weight_desc, d_weight_desc, ring, buffers, active, hidden, classes, power, ADDS, LOADED, False, LATE,
                ROUNDS, 0,
            )),
            (d_weight_warpgroup, (
                d_weight_desc, d_weight_desc, ring, buffers, active, hidden, classes, power, ADDS, LOADED, False, LATE,
                ROUNDS, 1,
            )),
            (load_d_weight, (
                x_desc, e_desc, d_weight_desc, ring, active, hidden, classes, (), LOADED, False, LATE, ROUNDS
            )),
        ],
        [4, 1],
        [CROWDED_REGISTERS, CROWDED_LOAD_REGISTERS],
    )  # fmt: skip


def add_d_weight(
    problem: Problem,
    e: Tensor,
    x: Tensor,
    active: Active,
    d_weight: Tensor,
    *,
    first: bool,
    in_l2: bool,
    sent: float = 0,
) -> None:
    """Launches `d_weight_kernel`: adds e^T x to d_weight (K, D), or overwrites it if `first`. x (n, D or more). Without
    `in_l2` all of a d_weight of 16 bits is added to in registers, so that totals are rounded once. `sent`: bytes that
    this GPU sends meanwhile."""
    (n, classes), hidden, float32 = e.shape, problem.input.shape[1], d_weight.dtype == torch.float32
    loaded = 1 - share_added_in_l2(n, plan_of(problem).gpu) if in_l2 else 1
    step, half, block_v = tile_config.D_WEIGHT_STEP, tile_config.D_BLOCK // 2, tile_config.CLASS_BLOCK
    tiles = cdiv(hidden, tile_config.D_BLOCK) * cdiv(classes, block_v)
    programs = min(tiles, plan_of(problem).programs)
    of_gpu = {"programs": programs, "coefficients": COEFFICIENTS[plan_of(problem).gpu, "torch"]}
    late = late_start(sent, n, tiles, classes=block_v, **of_gpu)
    launch(
        d_weight_kernel,
        (programs,),
        Blocks(x if x.shape[1] == hidden else x[:, :hidden], (step, half), gluon=True),
        Blocks(e, (step, block_v), gluon=True),
        Blocks(d_weight, (block_v // 4, half), gluon=True),
        *active,
        n,
        hidden,
        classes,
        STAGES=tile_config.D_WEIGHT_FLOAT32_STAGES if float32 else tile_config.D_WEIGHT_STAGES,
        ADDS=not first,
        LOADED=0 if first or float32 else round(4 * loaded),
        **({"HAS_POWER": True} if plan_of(problem).fits_float16 else {}),
        **({"LATE": late.programs, "ROUNDS": late.rounds} if late.rounds else {}),
        num_warps=4,
    )


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "rank_rows", "first", "part_rows"])
def d_weight_part_kernel(
    x_desc, e_desc, old_desc, sum_desc, count_ptr, start, least, rows, hidden, sum_rows, rank_rows, first, part_rows,
    STAGES: gl.constexpr, LOADED: gl.constexpr,
):  # fmt: skip
    """Writes old + e^T x of some classes of each of several shards of `rank_rows` classes: `first` and part_rows - 1
    more. As `d_weight_kernel`, but sum (sum_rows, D) is float32 and has part_rows rows of each shard, a multiple of the
    classes of a tile, and old (V, D) has 16 bits, or LOADED is 0 and there is none.

    Classes past the last one have zeros. Rows past those of a shard have classes of the next one.

    All quarters of the old tile are loaded, behind the last matmul of their tile. They wait in shared memory: a thread
    has no registers for them beside the sums and half of the finished tile in float32.
    """
    active = active_rows(count_ptr, start, least, rows)
    ring = make_ring(x_desc, e_desc, STAGES)
    buffers = make_buffers(sum_desc)
    of_shards = (rank_rows, first, part_rows)
    gl.warp_specialize(
        [
            (d_weight_warpgroup, (
                old_desc, sum_desc, ring, buffers, active, hidden, sum_rows, (), False, LOADED, LOADED > 0, 0, 0, 0
            )),
            (d_weight_warpgroup, (
                old_desc, sum_desc, ring, buffers, active, hidden, sum_rows, (), False, LOADED, LOADED > 0, 0, 0, 1
            )),
            (load_d_weight, (
                x_desc, e_desc, old_desc, ring, active, hidden, sum_rows, of_shards, LOADED, LOADED > 0, 0, 0
            )),
        ],
        [4, 1],
        [CROWDED_REGISTERS, CROWDED_LOAD_REGISTERS],
    )  # fmt: skip


def write_part(
    problem: Problem,
    e: Tensor,
    x: Tensor,
    active: Active,
    old: Tensor | None,
    sums: Tensor,
    *,
    rank_rows: int,
    first: int,
    beside: bool,
) -> None:
    """Launches `d_weight_part_kernel`: writes sums (shards, part_rows, D) float32. e (n, K), x (n, D or more), old
    (K, D) or None. `beside`: a collective that takes as long holds some multiprocessors."""
    (shards, part_rows, hidden), block_v, half = sums.shape, tile_config.CLASS_BLOCK, tile_config.D_BLOCK // 2
    step, block = tile_config.D_WEIGHT_STEP, (block_v // 4, half)
    assert part_rows % block_v == 0
    programs = plan_of(problem).programs - BLOCKS * beside
    launch(
        d_weight_part_kernel,
        (max(1, min(cdiv(hidden, tile_config.D_BLOCK) * shards * part_rows // block_v, programs)),),
        Blocks(x if x.shape[1] == hidden else x[:, :hidden], (step, half), gluon=True),
        Blocks(e, (step, block_v), gluon=True),
        Blocks(sums.flatten(0, 1) if old is None else old, block, gluon=True),
        Blocks(sums.flatten(0, 1), block, gluon=True),
        *active,
        len(x),
        hidden,
        shards * part_rows,
        rank_rows,
        first,
        part_rows,
        STAGES=tile_config.D_WEIGHT_FLOAT32_STAGES,
        LOADED=0 if old is None else 4,
        num_warps=4,
    )


@gluon.jit
def load_e(e_desc, others, row, k, bar, stage):
    """Loads a step of the exponentials, whose classes begin at `k`."""
    if len(others) == 0:
        tma_load(e_desc, [row, k], bar, stage)
    else:
        others_desc, piece, piece_rows = others
        if k < piece:
            tma_load(e_desc, [row, k], bar, stage)
        else:
            first = (k // piece - 1) * piece_rows
            tma_load(others_desc, [first + row, k % piece], bar, stage)


@gluon.jit
def load_d_input(w_desc, e_desc, others, ring, active, d_blocks, schedule, W_BY_CLASS: gl.constexpr):
    """The loading warp. With `others`, e has the classes of the first piece."""
    STAGES: gl.constexpr = ring.b.shape[0]
    BLOCK_N: gl.constexpr = ring.b.shape[1]
    BLOCK_V: gl.constexpr = ring.b.shape[2]
    ITEMSIZE: gl.constexpr = w_desc.dtype.primitive_bitwidth // 8
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
                mbarrier.expect(bar, (128 * ITEMSIZE + BLOCK_N * 2) * BLOCK_V)
                if W_BY_CLASS:
                    tma_load(w_desc, [k, d], bar, ring.a.index(2 * stage))
                    tma_load(w_desc, [k, d + 64], bar, ring.a.index(2 * stage + 1))
                else:
                    tma_load(w_desc, [d, k], bar, ring.a.index(2 * stage))
                    tma_load(w_desc, [d + 64, k], bar, ring.a.index(2 * stage + 1))
                load_e(e_desc, others, row, k, bar, ring.b.index(stage))
                stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def d_input_warpgroup(
    ring, io, active, hidden, classes, d_blocks, schedule, W_BY_CLASS: gl.constexpr, WHICH: gl.constexpr
):
    STAGES: gl.constexpr = ring.b.shape[0]
    BLOCK_N: gl.constexpr = ring.b.shape[1]
    SPLITS: gl.constexpr = ring.a.dtype == gl.float32
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
                if SPLITS:
                    acc = multiply_split(acc, w, ring.b.index(stage), W_BY_CLASS)
                    mbarrier.arrive(ring.empty.index(stage), count=1)
                else:
                    if W_BY_CLASS:
                        w = w.permute((1, 0))
                    acc = warpgroup_mma(w, ring.b.index(stage).permute((1, 0)), acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    before = gl.where(stage == 0, STAGES - 1, stage - 1)
                    mbarrier.arrive(ring.empty.index(before), count=1, pred=step > unit.first)
                stage, phase = next_stage(stage, phase, STAGES)
            if not SPLITS:
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(ring.empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
            if unit.slot >= 0:
                gl.store(io.part_ptr + unit.slot.to(gl.int64) * (128 * BLOCK_N) + within, acc)
            else:
                # An eighth of the rows at a time, because with quarters the kernel of a (D, V) head spills 8 bytes of
                # registers. It is turned so that a thread holds eight columns of D of a row.
                left, right = halves(acc)
                first, second = halves(left)
                third, fourth = halves(right)
                pieces = halves(first) + halves(second) + halves(third) + halves(fourth)
                columns = d + gl.arange(0, 64, gl.SliceLayout(0, by_row))
                for i in gl.static_range(8):
                    total = gl.convert_layout(pieces[i].permute((1, 0)), by_row)
                    row_ids = row + i * (BLOCK_N // 8) + gl.arange(0, BLOCK_N // 8, gl.SliceLayout(1, by_row))
                    finish_rows(total, row_ids, columns, io, active, hidden, classes)


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, *SplitKSchedule._fields])
def d_input_kernel(
    w_desc, e_desc, part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d,
    d_input_ptr, count_ptr, start, rows, hidden, classes,
    full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs,
    STAGES: gl.constexpr, W_BY_CLASS: gl.constexpr, others_desc=None, piece=None, piece_rows=None, factor_ptr=None,
    mean_row_ptr=None,
):  # fmt: skip
    """Writes rows of d_input = rho * (e @ w) + theta * w[target], rounded once: (32), where a work unit is a
    whole tile of BLOCK_N rows x 128 columns. Other units write a partial tile, float32, to their slot of part
    (`input_grad.work_unit_of`).

    Reads e (rows, V) and w (V, D) or (D, V); rho, theta (rows,) float32, target (rows,) int64 and row (rows,) int64:
    which row of d_input (N, D) a row is. Rows past count - start are not written. A float32 w is the sum of two
    matrices of e's dtype (`multiply_split`).

    With others_desc, e has the first `piece` classes, and others_desc ((pieces - 1) * piece_rows, piece) the others:
    the rows from p * piece_rows on are of piece p + 1. Past the last class they are 0 up to the next multiple of a
    step.

    With mean_row (D,) float32, factor * mean_row is added, with factor (rows,) float32.
    """
    active = active_rows(count_ptr, start, 0, rows)
    ring = make_ring(w_desc, e_desc, STAGES)
    d_blocks = gl.cdiv(hidden, 128)
    schedule = SplitKSchedule(full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs)
    smooth = ()
    if mean_row_ptr is not None:
        smooth = (factor_ptr, mean_row_ptr)
    io = DInputIO(
        part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d, d_input_ptr,
        smooth,
    )  # fmt: skip
    others = ()
    if others_desc is not None:
        others = (others_desc, piece, piece_rows)
    gl.warp_specialize(
        [
            (d_input_warpgroup, (ring, io, active, hidden, classes, d_blocks, schedule, W_BY_CLASS, 0)),
            (d_input_warpgroup, (ring, io, active, hidden, classes, d_blocks, schedule, W_BY_CLASS, 1)),
            (load_d_input, (w_desc, e_desc, others, ring, active, d_blocks, schedule, W_BY_CLASS)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, *SplitKSchedule._fields])
def d_input_of_pieces_kernel(
    w_desc, e_desc, others_desc, part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride,
    weight_stride_d, d_input_ptr, count_ptr, start, rows, hidden, classes,
    full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs, piece, piece_rows,
    STAGES: gl.constexpr, W_BY_CLASS: gl.constexpr,
):  # fmt: skip
    """`d_input_kernel` where the exponentials are in pieces of the classes, another kernel for the reasons of
    `row_kernels.finish_rows_of_pieces_kernel`."""
    d_input_kernel(
        w_desc, e_desc, part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d,
        d_input_ptr, count_ptr, start, rows, hidden, classes,
        full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs,
        STAGES, W_BY_CLASS, others_desc, piece, piece_rows,
    )  # fmt: skip


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, *SplitKSchedule._fields])
def smooth_d_input_kernel(
    w_desc, e_desc, part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d,
    d_input_ptr, count_ptr, start, rows, hidden, classes,
    full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs, factor_ptr, mean_row_ptr,
    STAGES: gl.constexpr, W_BY_CLASS: gl.constexpr,
):  # fmt: skip
    """`d_input_kernel` with label smoothing, another kernel for the reasons of
    `row_kernels.finish_rows_of_pieces_kernel`."""
    d_input_kernel(
        w_desc, e_desc, part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d,
        d_input_ptr, count_ptr, start, rows, hidden, classes,
        full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs,
        STAGES, W_BY_CLASS, None, None, None, factor_ptr, mean_row_ptr,
    )  # fmt: skip


def d_input_launch(
    problem: Problem, config: ScaledExpConfig, stored: StoredExponentials, *, smooth: bool = False
) -> DInputLaunch:
    """Returns what `input_grad.store_d_input` launches. `stored` is not in pieces with `smooth`."""
    step, w = tile_config.D_INPUT_STEP, problem.linear_weight[: problem.classes]
    head, block, by_class = head_with_contiguous_rows(w, (step, tile_config.D_BLOCK // 2))
    of_e, (e, others, piece, piece_rows) = (config.d_input_rows, step), stored.stores(slice(0, problem.classes))
    matrices = Blocks(head, block, gluon=True), Blocks(e, of_e, gluon=True)
    stages = tile_config.D_INPUT_SPLIT_STAGES if problem.spec.splits_head else tile_config.D_INPUT_STAGES
    constexprs = {"STAGES": stages, "W_BY_CLASS": by_class, "num_warps": 4}
    if others is None:
        return DInputLaunch(smooth_d_input_kernel if smooth else d_input_kernel, matrices, (), constexprs)
    matrices = *matrices, Blocks(others, of_e, gluon=True)
    return DInputLaunch(d_input_of_pieces_kernel, matrices, (piece, piece_rows), constexprs)
