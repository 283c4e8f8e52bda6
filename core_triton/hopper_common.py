"""The common parts of the Hopper kernels: a ring of loaded tiles, the matmul from it, and the stores of results.

They are in Triton's Gluon dialect, for sm_90. One warp loads, and two warpgroups multiply, each half of a tile. The
kernels are in `hopper_logits.py` and `hopper_gradients.py`. Functions pass related values as NamedTuples, either of
tensors or of constexprs: an assignment in a kernel turns the numbers in a tuple into tensors unless the whole tuple is
a constexpr.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from core_triton.gluon_common import thread_barrier, tma_load, tma_store
from core_triton.kernels import tile_of

# Registers of a thread: setmaxnreg gives the loading warp's to those that multiply.
MULTIPLY_REGISTERS = gl.constexpr(232)

LOAD_REGISTERS = gl.constexpr(40)

# The same where threads hold more than the sums: a packed tile (d_weight), or parts of the head (a split head).
CROWDED_REGISTERS = gl.constexpr(240)

CROWDED_LOAD_REGISTERS = gl.constexpr(24)

# Nothing is gained by a compilation for each.
NOT_SPECIALIZED = [
    *("start", "least", "first_class", "rows", "hidden", "classes", "group"),
    *("piece", "piece_rows"),
]


class Ring(NamedTuple):
    """The stages of loaded tiles in shared memory, and their barriers. A stage holds two operands of a matmul. The
    first is in two tiles, one for each warpgroup."""

    a: Any  # (2 * stages, ...)
    b: Any  # (stages, ...)
    full: Any  # (stages, 1): the stage is loaded
    empty: Any  # (stages, 1): both warpgroups are done with it


@gluon.jit
def make_ring(a_desc, b_desc, STAGES: gl.constexpr):
    a = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES] + a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return Ring(a, b, full, empty)


class Sizes(NamedTuple):
    """The sizes of a launch of a kernel of logits."""

    first_class: Any  # which of the call's classes is the first of w
    rows: Any
    active: Any  # rows whose tiles are computed
    hidden: Any
    classes: Any
    group: Any  # row blocks that are computed with a class block before the next class block


class Tiling(NamedTuple):
    """How a kernel iterates over the tiles of the logits: constexprs."""

    w_by_class: Any  # w is stored as (V, D), not (D, V)
    block_v: Any


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def load_tiles(x_desc, w_desc, ring, sizes, tiling):
    """The loading warp: loads the steps of all tiles of this program into the ring."""
    STAGES: gl.constexpr = ring.b.shape[0]
    HALF: gl.constexpr = ring.a.shape[1]
    BLOCK_D: gl.constexpr = ring.a.shape[2]
    row_blocks, class_blocks = gl.cdiv(sizes.active, 2 * HALF), gl.cdiv(sizes.classes, tiling.block_v)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), row_blocks * class_blocks, gl.num_programs(0)):
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, sizes.group)
        row, column = row_block * (2 * HALF), class_block * tiling.block_v
        for k in range(0, sizes.hidden, BLOCK_D):
            mbarrier.wait(ring.empty.index(stage), phase ^ 1)
            bar = ring.full.index(stage)
            mbarrier.expect(bar, (2 * HALF + tiling.block_v) * BLOCK_D * 2)
            tma_load(x_desc, [row, k], bar, ring.a.index(2 * stage))
            tma_load(x_desc, [row + HALF, k], bar, ring.a.index(2 * stage + 1))
            if tiling.w_by_class:
                tma_load(w_desc, [column, k], bar, ring.b.index(stage))
            else:
                tma_load(w_desc, [k, column], bar, ring.b.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def multiply_first(ring, stage, phase, layout: gl.constexpr, WHICH: gl.constexpr, tiling):
    """Starts the matmul of the first stage of a tile, and returns its result and the ring's position after it.

    The matrix units may be idle from the last matmul of a tile to this one. So it comes before everything else: what
    the epilogue needs besides the result is computed after it, and the result is not added to zeros, which would take
    260 cycles to set.
    """
    STAGES: gl.constexpr = ring.b.shape[0]
    HALF: gl.constexpr = ring.a.shape[1]
    acc = gl.zeros([HALF, tiling.block_v], gl.float32, layout)  # for its type
    acc = start_step(acc, ring, stage, phase, WHICH, tiling, False)
    acc = warpgroup_mma_wait(1, deps=[acc])  # does not wait: makes a tensor of the result that is in flight
    stage, phase = next_stage(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def multiply_rest(acc, ring, stage, phase, hidden, WHICH: gl.constexpr, tiling):
    """Returns x @ w of the warpgroup's half of a tile, (HALF, block_v) float32, and the ring's position after it."""
    STAGES: gl.constexpr = ring.b.shape[0]
    BLOCK_D: gl.constexpr = ring.a.shape[2]
    for _ in range(BLOCK_D, hidden, BLOCK_D):
        acc = multiply_step(acc, ring, stage, phase, WHICH, tiling)
        stage, phase = next_stage(stage, phase, STAGES)
    return finish(acc, ring, stage), stage, phase


@gluon.jit
def start_step(acc, ring, stage, phase, WHICH: gl.constexpr, tiling, ADDS: gl.constexpr):
    """Starts the matmul of a stage, which is added to acc if ADDS."""
    mbarrier.wait(ring.full.index(stage), phase)
    w = ring.b.index(stage)
    if tiling.w_by_class:
        w = w.permute((1, 0))
    return warpgroup_mma(ring.a.index(2 * stage + WHICH), w, acc, use_acc=ADDS, is_async=True)


@gluon.jit
def multiply_step(acc, ring, stage, phase, WHICH: gl.constexpr, tiling):
    """Adds the matmul of a stage to acc, and marks the stage before as free."""
    STAGES: gl.constexpr = ring.b.shape[0]
    acc = start_step(acc, ring, stage, phase, WHICH, tiling, True)
    acc = warpgroup_mma_wait(1, deps=[acc])  # this matmul stays in flight; the one before is done with its stage
    mbarrier.arrive(ring.empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
    return acc


@gluon.jit
def finish(acc, ring, stage):
    """Waits for the matmuls of a tile; `stage` is the one after its last."""
    STAGES: gl.constexpr = ring.b.shape[0]
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(ring.empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
    return acc


@gluon.jit
def make_buffers(desc):
    """Returns the staging buffers of the stores of quarters, two for each warpgroup."""
    return gl.allocate_shared_memory(desc.dtype, [4] + desc.block_type.shape, desc.layout)


@gluon.jit
def store_quarter(desc, buffers, quarter, row, column, WHICH: gl.constexpr, i: gl.constexpr):
    """Stores the quarter `i` of a tile through one of the warpgroup's two buffers. Values outside of `desc` are not
    stored."""
    buffer = fill_buffer(buffers, quarter, WHICH, i, 1)
    tma_store(desc, [row, column], buffer)


@gluon.jit
def fill_buffer(buffers, quarter, WHICH: gl.constexpr, i: gl.constexpr, STORES: gl.constexpr):
    """Writes the quarter `i` of a tile to one of the warpgroup's two buffers, and returns it. Each quarter is stored
    STORES times."""
    buffer = buffers.index(2 * WHICH + i % 2)
    tma.store_wait(STORES)  # the stores of the quarter before the last have read this buffer
    thread_barrier()
    buffer.store(quarter.to(buffers.dtype))
    fence_async_shared()
    thread_barrier()
    return buffer
