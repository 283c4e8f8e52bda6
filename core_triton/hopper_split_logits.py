"""The exponentials of a float32 head that is the sum of two matrices of 16 bits (MATH.md (39)), for Hopper (sm_90), in
Triton's Gluon dialect.

The kernel reads the head where it is and splits it in registers (`hopper_split_head.multiply_split`): copies in 16 bits
would be made again for each chunk of rows. Only the first operand of a matmul may be in registers. So the tiles are
transposed, 128 classes x 256 rows, and the sums over classes go across the warps of a warpgroup.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from core_triton import hopper_logits, tile_config
from core_triton.gluon_common import (
    active_rows,
    add_exponentials,
    add_logits,
    add_stored_statistics,
    no_statistics,
    quarters,
    store_statistics,
    tma_load,
)
from core_triton.hopper_common import (
    CROWDED_LOAD_REGISTERS,
    CROWDED_REGISTERS,
    NOT_SPECIALIZED,
    Sizes,
    make_buffers,
    make_ring,
    next_stage,
)
from core_triton.hopper_logits import (
    OUTSIDE,
    ExponentialsIO,
    ExponentialsSwitches,
    Head,
    masked,
    store_exponentials,
    targets_of,
    to_logits,
)
from core_triton.hopper_split_head import multiply_split
from core_triton.kernels import LOG2_E, LOGIT_SUM, SUM_LIMIT, TileBlocks, slope, tile_of
from core_triton.problem import Problem

# The layout of a number for each row and warp, where a thread has all numbers of a row. In the layout of a transposed
# tile a thread has parts of 16 rows, and 32 threads have parts of the same rows: their numbers would take 16 times as
# many registers.
OF_WARPS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))

ROW_BLOCK = gl.constexpr(tile_config.ROW_BLOCK)  # rows that share a flag


@gluon.jit
def load_split_tiles(x_desc, w_desc, ring, sizes, W_BY_CLASS: gl.constexpr):
    """The loading warp: loads the steps of all tiles of this program into the ring."""
    STAGES: gl.constexpr = ring.b.shape[0]
    BLOCK_N: gl.constexpr = ring.b.shape[1]
    BLOCK_D: gl.constexpr = ring.b.shape[2]
    HALF: gl.constexpr = ring.a.shape[1] if W_BY_CLASS else ring.a.shape[2]
    row_blocks, class_blocks = gl.cdiv(sizes.active, BLOCK_N), gl.cdiv(sizes.classes, 4 * HALF)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), row_blocks * class_blocks, gl.num_programs(0)):
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, sizes.group)
        row = row_block * BLOCK_N
        for half in range(2):
            column = class_block * (4 * HALF) + half * HALF
            for k in range(0, sizes.hidden, BLOCK_D):
                mbarrier.wait(ring.empty.index(stage), phase ^ 1)
                bar = ring.full.index(stage)
                mbarrier.expect(bar, (2 * HALF * 4 + BLOCK_N * 2) * BLOCK_D)
                for which in gl.static_range(2):
                    if W_BY_CLASS:
                        tma_load(w_desc, [column + which * 2 * HALF, k], bar, ring.a.index(2 * stage + which))
                    else:
                        tma_load(w_desc, [k, column + which * 2 * HALF], bar, ring.a.index(2 * stage + which))
                tma_load(x_desc, [row, k], bar, ring.b.index(stage))
                stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def sums_of_rows(t):
    """Returns the sums over the classes of t (rows, classes). Each warp adds its classes, and then a thread adds the
    sums of the four warps: one exchange through shared memory."""
    of_warps = gl.sum(t.reshape([t.shape[0], 4, t.shape[1] // 4]), 2)
    return gl.sum(gl.convert_layout(of_warps, OF_WARPS), 1)


@gluon.jit
def load_numbers(io, row, block, half, sizes, ROWS: gl.constexpr, CLASS_BLOCK: gl.constexpr):
    """Returns what an epilogue reads of the rows of a quarter of a tile, from `row` on: the reference exponents, the
    sums of the first half of the class block, or 0 before it, and whether there may be targets among the classes."""
    row_ids = row + gl.arange(0, ROWS, gl.SliceLayout(1, OF_WARPS))
    inside = (row_ids < sizes.rows) & (block * CLASS_BLOCK < sizes.classes)
    ref_exponent = gl.load(io.ref_exponent_ptr + row_ids, mask=inside, other=0.0)
    total = gl.load(sums_of(io, row_ids, block, sizes), mask=inside & (half > 0), other=0.0)
    hits = half * 0 + 1
    if io.hit_ptr is not None:
        place = (row // ROWS).to(gl.int64) * gl.cdiv(sizes.classes, CLASS_BLOCK) + block
        exists = (row < sizes.rows) & (block * CLASS_BLOCK < sizes.classes)
        hits = (gl.load(io.hit_ptr + place, mask=exists, other=0).to(gl.int32) >> (2 * half)) & 3
    return ref_exponent, total, hits


@gluon.jit
def sums_of(io, row_ids, block, sizes):
    """Returns the pointers to the sums of a class block."""
    return io.sum_ptr + block.to(gl.int64) * sizes.rows + row_ids


@gluon.jit
def finish_quarter(
    raw, row, block, half, numbers, e_desc, others, buffers, io, head, sizes, switches, WHICH: gl.constexpr,
    i: gl.constexpr,
):  # fmt: skip
    """Writes what `hopper_logits.exponentials_kernel` writes, of x @ w (rows, classes) from `row` on and of half of the
    classes of a class block. The second half adds to the sums that the first has written."""
    ROWS: gl.constexpr = raw.shape[0]
    CLASSES: gl.constexpr = raw.shape[1]
    layout: gl.constexpr = raw.type.layout
    column = (2 * block + half) * CLASSES
    columns = column + gl.arange(0, CLASSES, gl.SliceLayout(0, layout))
    row_ids = row + gl.arange(0, ROWS, gl.SliceLayout(1, OF_WARPS))
    inside = (row_ids < sizes.rows) & (2 * block * CLASSES < sizes.classes)
    ref_exponent, total, hits = numbers
    logits = to_logits(raw, columns, head, sizes, switches)
    found = no_statistics(gl.zeros_like(total))
    logit_sum = total
    if LOGIT_SUM & switches.statistics:  # past the last class logits are 0 still
        logit_sum = sums_of_rows(logits)
    logits = masked(logits, columns, column, sizes.classes, CLASSES)
    if hits != 0:  # few quarters have a target
        target, owns = targets_of(io.target_ptr, row_ids, column, sizes, CLASSES)
        here = gl.expand_dims(columns, 0) == gl.expand_dims(gl.convert_layout(target, gl.SliceLayout(1, layout)), 1)
        gl.store(io.target_logit_ptr + row_ids, sums_of_rows(gl.where(here, logits, 0.0)), mask=owns)
    found = add_logits(found, logits, logit_sum, columns, column - half * CLASSES, switches.statistics, CLASSES)
    ref_exponent = gl.convert_layout(ref_exponent, gl.SliceLayout(1, layout))
    exponentials = gl.exp2(logits * LOG2_E - gl.expand_dims(ref_exponent, 1))
    if switches.stores:
        stored = exponentials
        if switches.has_softcap:
            stored = gl.where(exponentials == 0, 0.0, exponentials * slope(logits, head.softcap))
        place = row
        if len(others) != 0:  # a row of the next piece of the classes may follow the last row block of 128
            place = gl.where(row < sizes.rows, row, OUTSIDE)
        store_exponentials(e_desc, others, buffers, stored, place, column, WHICH, i)
    total += sums_of_rows(exponentials)
    found = add_exponentials(found, logits, exponentials, ref_exponent, switches.statistics)
    gl.store(sums_of(io, row_ids, block, sizes), total, mask=inside)
    lost = inside & ~(total < SUM_LIMIT)
    gl.store(io.flag_ptr + row // ROW_BLOCK + gl.zeros_like(row_ids), 1, mask=lost)
    if switches.statistics:
        added = inside & (half > 0)
        found = add_stored_statistics(io.max_ptr, found, block, row_ids, sizes.rows, added, switches.statistics)
        store_statistics(io.max_ptr, found, block, row_ids, sizes.rows, inside, switches.statistics)


@gluon.jit
def split_exponentials_warpgroup(
    ring, e_desc, others, buffers, io, head, sizes, switches, W_BY_CLASS: gl.constexpr, WHICH: gl.constexpr
):
    STAGES: gl.constexpr = ring.b.shape[0]
    BLOCK_N: gl.constexpr = ring.b.shape[1]
    BLOCK_D: gl.constexpr = ring.b.shape[2]
    HALF: gl.constexpr = ring.a.shape[1] if W_BY_CLASS else ring.a.shape[2]
    ROWS: gl.constexpr = BLOCK_N // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    quarter: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    row_blocks, class_blocks = gl.cdiv(sizes.active, BLOCK_N), gl.cdiv(sizes.classes, 4 * HALF)
    # Whether the epilogue leaves registers for loads before the matmul, which it need not wait for then.
    ROOMY: gl.constexpr = not switches.has_softcap and switches.statistics == 0
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), row_blocks * class_blocks, gl.num_programs(0)):
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, sizes.group)
        row, block = row_block * BLOCK_N, 2 * class_block + WHICH
        for half in range(2):
            # Loads that the epilogue need not wait for.
            numbers = ()
            if ROOMY:
                for i in gl.static_range(4):
                    numbers = numbers + (load_numbers(io, row + i * ROWS, block, half, sizes, ROWS, 2 * HALF),)
            raw = gl.zeros([HALF, BLOCK_N], gl.float32, layout)
            for _ in range(0, sizes.hidden, BLOCK_D):
                mbarrier.wait(ring.full.index(stage), phase)
                raw = multiply_split(raw, ring.a.index(2 * stage + WHICH), ring.b.index(stage), not W_BY_CLASS)
                mbarrier.arrive(ring.empty.index(stage), count=1)
                stage, phase = next_stage(stage, phase, STAGES)
            parts = quarters(raw, quarter)
            for i in gl.static_range(4):
                if ROOMY:
                    of_quarter = numbers[i]
                else:
                    of_quarter = load_numbers(io, row + i * ROWS, block, half, sizes, ROWS, 2 * HALF)
                finish_quarter(
                    parts[i].permute((1, 0)), row + i * ROWS, block, half, of_quarter, e_desc, others, buffers, io,
                    head, sizes, switches, WHICH, i,
                )  # fmt: skip
    if switches.stores:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def split_exponentials_kernel(
    x_desc, w_desc, e_desc, others_desc, bias_ptr, target_ptr, ref_exponent_ptr, flag_ptr, sum_ptr, max_ptr,
    target_logit_ptr, hit_ptr, count_ptr, start, least, piece, piece_rows,
    first_class, rows, hidden, classes, group, scale, softcap,
    STORES: gl.constexpr, STATISTICS: gl.constexpr, W_BY_CLASS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`hopper_logits.exponentials_kernel` with a float32 head w, which is the sum of two matrices of x's dtype.

    A program computes two tiles of 256 rows x 128 classes one after the other. The first has the first half of each of
    two class blocks, and the second the other half. Each warpgroup has one class block.
    """
    head = Head(bias_ptr, scale, softcap)
    sizes = Sizes(first_class, rows, active_rows(count_ptr, start, least, rows), hidden, classes, group)
    switches: gl.constexpr = ExponentialsSwitches(HAS_BIAS, HAS_SOFTCAP, STORES, STATISTICS)
    io = ExponentialsIO(target_ptr, ref_exponent_ptr, flag_ptr, sum_ptr, max_ptr, target_logit_ptr, hit_ptr)
    ring = make_ring(w_desc, x_desc, STAGES)
    buffers = ring.a  # never used where nothing is stored
    if STORES:
        buffers = make_buffers(e_desc)
    others = ()
    if others_desc is not None:
        others = (others_desc, piece, piece_rows)
    gl.warp_specialize(
        [
            (split_exponentials_warpgroup, (ring, e_desc, others, buffers, io, head, sizes, switches, W_BY_CLASS, 0)),
            (split_exponentials_warpgroup, (ring, e_desc, others, buffers, io, head, sizes, switches, W_BY_CLASS, 1)),
            (load_split_tiles, (x_desc, w_desc, ring, sizes, W_BY_CLASS)),
        ],
        [4, 1],
        [CROWDED_REGISTERS, CROWDED_LOAD_REGISTERS],
    )


def split_exponentials(problem: Problem, *arguments: Any, **options: Any) -> None:
    """Launches `split_exponentials_kernel`. The arguments are those of `hopper_logits.exponentials`."""
    step, (rows, classes) = tile_config.SPLIT_LOGITS_STEP, tile_config.SPLIT_TILE
    constexprs = {"STAGES": tile_config.SPLIT_LOGITS_STAGES, "num_warps": 4}
    blocks = TileBlocks((rows, step), (classes // 2, step), (rows // 4, classes // 2), constexprs, gluon=True)
    hopper_logits.exponentials(problem, *arguments, **options, of_kernel=(split_exponentials_kernel, blocks))
