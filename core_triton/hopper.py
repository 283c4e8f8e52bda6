"""What the Hopper kernels share: a ring of loaded tiles, the product from it, and the way out to memory.

In Triton's Gluon dialect, for sm_90. One warp loads, and two warpgroups multiply, each half of a tile; the kernels are
in `hopper_logits.py` and `hopper_gradients.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Registers of a thread: setmaxnreg gives the loading warp's to those that multiply.
MULTIPLY_REGISTERS = gl.constexpr(232)

LOAD_REGISTERS = gl.constexpr(40)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def tile_of(tile, row_blocks, class_blocks, GROUP: gl.constexpr):
    """Returns the row block and class block of a tile: GROUP row blocks first, then the next class block."""
    group = tile // (GROUP * class_blocks)
    first = group * GROUP
    size = gl.minimum(row_blocks - first, GROUP)
    within = tile - first * class_blocks
    return first + within % size, within // size


@gluon.jit
def load_tiles(x_desc, w_desc, x_ring, w_ring, full, empty, rows, hidden, classes, switches):
    """The loading warp: streams the steps of all tiles of this program through the ring."""
    W_BY_CLASS: gl.constexpr = switches[0]
    GROUP: gl.constexpr = switches[1]
    BLOCK_V: gl.constexpr = switches[2]
    STAGES: gl.constexpr = w_ring.shape[0]
    HALF: gl.constexpr = x_ring.shape[1]
    BLOCK_D: gl.constexpr = x_ring.shape[2]
    row_blocks, class_blocks = gl.cdiv(rows, 2 * HALF), gl.cdiv(classes, BLOCK_V)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), row_blocks * class_blocks, gl.num_programs(0)):
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, GROUP)
        row, column = row_block * (2 * HALF), class_block * BLOCK_V
        for k in range(0, hidden, BLOCK_D):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (2 * HALF + BLOCK_V) * BLOCK_D * 2)
            tma.async_copy_global_to_shared(x_desc, [row, k], bar, x_ring.index(2 * stage))
            tma.async_copy_global_to_shared(x_desc, [row + HALF, k], bar, x_ring.index(2 * stage + 1))
            if W_BY_CLASS:
                tma.async_copy_global_to_shared(w_desc, [column, k], bar, w_ring.index(stage))
            else:
                tma.async_copy_global_to_shared(w_desc, [k, column], bar, w_ring.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def multiply(x_ring, w_ring, full, empty, stage, phase, hidden, layout: gl.constexpr, WHICH: gl.constexpr, switches):
    """Returns x @ w of the warpgroup's half of a tile, (HALF, BLOCK_V) float32, and the ring's position after it."""
    W_BY_CLASS: gl.constexpr = switches[0]
    BLOCK_V: gl.constexpr = switches[2]
    STAGES: gl.constexpr = w_ring.shape[0]
    HALF: gl.constexpr = x_ring.shape[1]
    BLOCK_D: gl.constexpr = x_ring.shape[2]
    acc = gl.zeros([HALF, BLOCK_V], gl.float32, layout)
    for k in range(0, hidden, BLOCK_D):
        mbarrier.wait(full.index(stage), phase)
        w = w_ring.index(stage)
        if W_BY_CLASS:
            w = w.permute((1, 0))
        acc = warpgroup_mma(x_ring.index(2 * stage + WHICH), w, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # this product stays in flight; the one before is done with its stage
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
        stage, phase = next_stage(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), count=1)
    return acc, stage, phase


@gluon.jit
def halves(t):
    pair = t.reshape([t.shape[0], 2, t.shape[1] // 2]).permute(0, 2, 1)
    return pair.split()


@gluon.jit
def quarters(tile, layout: gl.constexpr):
    """Returns the four quarters of a tile's columns, in the layout of a product as wide: the registers stay as they
    are. What an epilogue does to one at a time leaves it registers that the whole tile would not."""
    left, right = halves(tile)
    first, second = halves(left)
    third, fourth = halves(right)
    return (
        gl.convert_layout(first, layout, assert_trivial=True),
        gl.convert_layout(second, layout, assert_trivial=True),
        gl.convert_layout(third, layout, assert_trivial=True),
        gl.convert_layout(fourth, layout, assert_trivial=True),
    )


@gluon.jit
def store_quarter(desc, buffers, quarter, row, column, WHICH: gl.constexpr, i: gl.constexpr):
    """Stores the quarter `i` of a tile through one of the warpgroup's two buffers; whatever lies outside `desc` is
    dropped."""
    buffer = buffers.index(2 * WHICH + i % 2)
    tma.store_wait(1)  # the store before the last has read this buffer
    gl.thread_barrier()
    buffer.store(quarter.to(desc.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(desc, [row, column], buffer)


@gluon.jit
def rings(x_desc, w_desc, STAGES: gl.constexpr):
    """Returns the ring of loaded tiles, one x tile for each warpgroup, and its barriers."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES] + x_desc.block_type.shape, x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return x_ring, w_ring, full, empty


@gluon.jit
def active_rows(count_ptr, start, least, rows):
    """Returns how many of a chunk's `rows` rows, which begin at row `start` of the call, are among the first `count`
    of the call, a number that only the device knows; at least `least`."""
    return gl.maximum(gl.minimum(gl.load(count_ptr) - start, rows), least)


SIZES = ["start", "least", "first_class", "rows", "hidden", "classes"]  # nothing is gained by a compilation for each
