"""Kernels of `kernels.py` for Hopper (sm_90), in Triton's Gluon dialect: the same outputs, with epilogues that overlap.

A tile of BLOCK_N rows x BLOCK_V classes takes 16 cycles per hidden unit on the tensor cores. The exponentials of its
epilogue take 2048 cycles for any hidden size: a seventh of the time at 896. With Triton's pipelining the tensor cores
are idle during the epilogue. Here one warp loads (`load_tiles`), and two warpgroups multiply, each half of a tile's
rows and all of its columns. The ring of loaded tiles lets one warpgroup run ahead of the other. They end up
alternating: one uses the tensor cores while the other is in its epilogue. (Starting one of them late makes no
measurable difference.) The exponentials of a tile stay packed in registers and are stored under the matmul of the next
tile.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from core_triton import tile_config
from core_triton.first_chunk import Stores
from core_triton.gluon_common import (
    active_rows,
    add_exponentials,
    add_logits,
    fit_in_float16,
    no_statistics,
    quarters,
    store_statistics,
    tma_store,
)
from core_triton.hopper_common import (
    LOAD_REGISTERS,
    MULTIPLY_REGISTERS,
    NOT_SPECIALIZED,
    Sizes,
    Tiling,
    fill_buffer,
    finish,
    load_tiles,
    make_buffers,
    make_ring,
    multiply_first,
    multiply_rest,
    multiply_step,
    next_stage,
    store_quarter,
)
from core_triton.kernels import (
    ARGMAX,
    ENTROPY,
    LOG2_E,
    LOGIT_SUM,
    MAX,
    NO_PROBABILITY,
    OF_MAX,
    SHIFTS,
    SQUARES,
    SUM_LIMIT,
    Active,
    TileBlocks,
    launch_tiles,
    planes,
    slope,
    tile_of,
)
from core_triton.launch import At
from core_triton.problem import Problem, plan_of
from linear_ce.statistics import BY_ROW

# A tile's steps are in parts. Between parts a quarter of the exponentials of the tile before is stored.
PARTS = gl.constexpr(5)

OUTSIDE = gl.constexpr(2**30)  # a row of no matrix


class Head(NamedTuple):
    """The parameters that turn x @ w into logits: MATH.md (1), (2)."""

    bias_ptr: Any
    scale: Any  # None for 1
    softcap: Any


@gluon.jit
def to_logits(raw, columns, head, sizes, switches):
    """Returns the logits of x @ w."""
    if switches.has_bias:
        bias = gl.load(head.bias_ptr + columns, mask=columns < sizes.classes, other=0.0).to(gl.float32)
        raw += gl.expand_dims(bias, 0)
    logits = raw
    if head.scale is not None:
        logits = raw * head.scale
    if switches.has_softcap:
        ratio = logits * (1.0 / head.softcap)
        small = gl.exp2(-2.0 * LOG2_E * gl.abs(ratio))
        magnitude = (1.0 - small) * reciprocal(1.0 + small)
        logits = head.softcap * gl.where(ratio < 0, -magnitude, magnitude)
    return logits


@gluon.jit
def reciprocal(t):
    """Returns 1 / t within 1 ulp, in one instruction where a division takes ten and their registers."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def targets_of(target_ptr, row_ids, first, sizes, WIDTH: gl.constexpr):
    """Returns each row's target as a column, and whether it is among the WIDTH columns from `first` on."""
    target = gl.load(target_ptr + row_ids, mask=row_ids < sizes.rows, other=-1) - sizes.first_class
    owns = (row_ids < sizes.rows) & (target >= first) & (target < gl.minimum(first + WIDTH, sizes.classes))
    return target.to(gl.int32), owns  # 64 bits decide, 32 are compared


@gluon.jit
def store_target_logits(target_logit_ptr, logits, row_ids, columns, target, owns):
    """Writes target_logit (rows,) for the rows whose target is among these columns. These are the same logits that are
    summed, so the loss is the logarithm of a ratio that is never below 1."""
    here = gl.expand_dims(columns, 0) == gl.expand_dims(target, 1)
    gl.store(target_logit_ptr + row_ids, gl.sum(gl.where(here, logits, 0.0), 1), mask=owns)


@gluon.jit
def masked(logits, columns, column, classes, BLOCK_V: gl.constexpr, BRANCHES: gl.constexpr = False):
    """Returns a quarter's logits, with -inf past the last class. The tile begins at `column`.

    The compiler turns the branch into a selection in every tile, 200 cycles of an epilogue. With BRANCHES the selection
    is an assembly instruction that it may not move out of the branch. Where the epilogue has more to compute, that
    spills registers.
    """
    if column + BLOCK_V > classes:
        inside = gl.expand_dims(columns < classes, 0)
        if BRANCHES:
            logits = minus_infinity_outside(logits, inside.to(gl.int32))
        else:
            logits = gl.where(inside, logits, float("-inf"))
    return logits


@gluon.jit
def minus_infinity_outside(t, inside):
    """Returns t, or -inf where inside is 0, by an instruction that stays where it is."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; selp.f32 $0, $1, 0fFF800000, p; }", "=f,f,r", [t, inside],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def rounded_here(t, dtype: gl.constexpr):
    """Returns t rounded to a dtype of 16 bits, by an instruction that stays where it is."""
    if dtype == gl.bfloat16:
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [t], dtype=gl.bfloat16, is_pure=False, pack=2
        )
    else:
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [t], dtype=gl.float16, is_pure=False, pack=2
        )
    return rounded


class ExponentialsIO(NamedTuple):
    """What `exponentials_kernel` reads and writes besides matrices."""

    target_ptr: Any
    ref_exponent_ptr: Any
    flag_ptr: Any
    sum_ptr: Any
    max_ptr: Any
    target_logit_ptr: Any
    hit_ptr: Any


class ExponentialsSwitches(NamedTuple):
    has_bias: Any
    has_softcap: Any
    stores: Any
    statistics: Any


class Done(NamedTuple):
    """A tile's exponentials that are not stored yet, in quarters, and where they go."""

    quarters: Any
    row: Any
    column: Any


@gluon.jit
def store_done(e_desc, others, buffers, done, WHICH: gl.constexpr, i: gl.constexpr):
    """Stores the quarter `i` of a tile."""
    column = done.column + i * e_desc.block_type.shape[1]
    store_exponentials(e_desc, others, buffers, done.quarters[i], done.row, column, WHICH, i)


@gluon.jit
def store_exponentials(e_desc, others, buffers, quarter, row, column, WHICH: gl.constexpr, i: gl.constexpr):
    """Stores the quarter `i` of a tile. With `others`, e has the first piece, and these the other pieces: `Stores`."""
    if len(others) == 0:
        store_quarter(e_desc, buffers, quarter, row, column, WHICH, i)
    else:
        # Of these two stores, one is outside and has no effect. A branch spills up to 112 bytes of registers. A row or
        # column less than 0 is no place outside: a GPU calls such a store an illegal instruction.
        others_desc, piece, piece_rows = others
        number = column // piece
        buffer = fill_buffer(buffers, quarter, WHICH, i, 2)
        tma_store(e_desc, [row, column], buffer)
        row = gl.where(number == 0, OUTSIDE, row + (number - 1) * piece_rows)
        tma_store(others_desc, [row, column - number * piece], buffer)


@gluon.jit
def multiply_and_store(acc, ring, stage, phase, hidden, WHICH: gl.constexpr, tiling, e_desc, others, buffers, done):
    """As `multiply_rest`. The tile before is stored meanwhile, a quarter after each part of the steps but the last."""
    STAGES: gl.constexpr = ring.b.shape[0]
    BLOCK_D: gl.constexpr = ring.a.shape[2]
    steps = gl.cdiv(hidden, BLOCK_D)
    part_steps = steps // PARTS
    for part in gl.static_range(PARTS):
        last = steps if part == PARTS - 1 else (part + 1) * part_steps
        for _ in range(gl.maximum(part * part_steps, 1), last):
            acc = multiply_step(acc, ring, stage, phase, WHICH, tiling)
            stage, phase = next_stage(stage, phase, STAGES)
        if part < PARTS - 1:
            store_done(e_desc, others, buffers, done, WHICH, part)
    return finish(acc, ring, stage), stage, phase


@gluon.jit
def references_of(io, row, rows, HALF: gl.constexpr, layout: gl.constexpr):
    """Returns the rows from `row` on, which of them exist, and their reference exponents."""
    row_ids = row + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    inside = row_ids < rows
    return row_ids, inside, gl.load(io.ref_exponent_ptr + row_ids, mask=inside, other=0.0)


@gluon.jit
def exponentials_warpgroup(ring, e_desc, others, buffers, io, head, sizes, tiling, switches, WHICH: gl.constexpr):
    HALF: gl.constexpr = ring.a.shape[1]
    WIDTH: gl.constexpr = tiling.block_v // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiling.block_v, 16])
    quarter: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    row_blocks, class_blocks = gl.cdiv(sizes.active, 2 * HALF), gl.cdiv(sizes.classes, tiling.block_v)
    # Whether the epilogue leaves registers for loads before the rest of the matmul, and for the branch of `masked`.
    ROOMY: gl.constexpr = not switches.has_softcap and (switches.statistics & ~SHIFTS) == 0
    # With a softcap and more than one statistic, the compiler would round three quarters after the last one, and their
    # float32 values would spill 88 bytes of registers.
    CROWDED: gl.constexpr = switches.has_softcap and (switches.statistics & (switches.statistics - 1)) != 0
    stage = 0
    phase = 0
    if switches.stores:
        zeros = gl.zeros([HALF, WIDTH], e_desc.dtype, quarter)
        # Outside: the first stores are dropped.
        first_row = row_blocks * 0
        if len(others) != 0:
            first_row += OUTSIDE
        done = Done((zeros, zeros, zeros, zeros), first_row, class_blocks * tiling.block_v)
    for tile in range(gl.program_id(0), row_blocks * class_blocks, gl.num_programs(0)):
        raw, stage, phase = multiply_first(ring, stage, phase, layout, WHICH, tiling)
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, sizes.group)
        row, column = row_block * (2 * HALF) + WHICH * HALF, class_block * tiling.block_v
        hits = 15
        if io.hit_ptr is not None:
            hits = gl.load(io.hit_ptr + (2 * row_block + WHICH).to(gl.int64) * class_blocks + class_block)
        if ROOMY:
            row_ids, inside, ref_exponent = references_of(io, row, sizes.rows, HALF, quarter)
        if switches.stores:
            raw, stage, phase = multiply_and_store(
                raw, ring, stage, phase, sizes.hidden, WHICH, tiling, e_desc, others, buffers, done
            )
        else:
            raw, stage, phase = multiply_rest(raw, ring, stage, phase, sizes.hidden, WHICH, tiling)
        if not ROOMY:
            row_ids, inside, ref_exponent = references_of(io, row, sizes.rows, HALF, quarter)
        packed = ()
        total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, quarter))
        found = no_statistics(total)
        pieces = quarters(raw, quarter)
        for i in gl.static_range(4):
            first = column + i * WIDTH
            columns = first + gl.arange(0, WIDTH, gl.SliceLayout(0, quarter))
            logits = to_logits(pieces[i], columns, head, sizes, switches)
            logit_sum = total
            if LOGIT_SUM & switches.statistics:  # past the last class logits are 0 still
                logit_sum = gl.sum(logits, 1)
            logits = masked(logits, columns, column, sizes.classes, tiling.block_v, ROOMY)
            if ((hits >> i) & 1) != 0:  # few quarters have any
                target, owns = targets_of(io.target_ptr, row_ids, first, sizes, WIDTH)
                store_target_logits(io.target_logit_ptr, logits, row_ids, columns, target, owns)
            found = add_logits(found, logits, logit_sum, columns, column, switches.statistics, i * WIDTH)
            exponentials = gl.exp2(logits * LOG2_E - gl.expand_dims(ref_exponent, 1))
            total += gl.sum(exponentials, 1)
            found = add_exponentials(found, logits, exponentials, ref_exponent, switches.statistics)
            if switches.stores:
                if switches.has_softcap:
                    exponentials = gl.where(exponentials == 0, 0.0, exponentials * slope(logits, head.softcap))
                if SHIFTS & switches.statistics:
                    found, exponentials = fit_in_float16(found, exponentials, total, i)
                if CROWDED:
                    packed = packed + (rounded_here(exponentials, e_desc.dtype),)
                else:
                    packed = packed + (exponentials.to(e_desc.dtype),)
        if switches.stores:
            if len(others) != 0 and io.hit_ptr is None:  # else these are all classes, and the sum would spill registers
                column += sizes.first_class
            done = Done(packed, row, column)
        out = class_block.to(gl.int64) * sizes.rows + row_ids
        gl.store(io.sum_ptr + out, total, mask=inside)
        lost = inside & ~(total < SUM_LIMIT)
        gl.store(io.flag_ptr + row_block + gl.zeros_like(row_ids), 1, mask=lost)
        if switches.statistics:
            store_statistics(io.max_ptr, found, class_block, row_ids, sizes.rows, inside, switches.statistics)
    if switches.stores:
        for i in gl.static_range(4):
            store_done(e_desc, others, buffers, done, WHICH, i)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def exponentials_kernel(
    x_desc, w_desc, e_desc, others_desc, bias_ptr, target_ptr, ref_exponent_ptr, flag_ptr, sum_ptr, max_ptr,
    target_logit_ptr, hit_ptr, count_ptr, start, least, piece, piece_rows,
    first_class, rows, hidden, classes, group, scale, softcap,
    STORES: gl.constexpr, STATISTICS: gl.constexpr, W_BY_CLASS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, BLOCK_V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`kernels.exponentials_kernel` for the row blocks that hold one of the first count - start rows, but at least
    `least` rows."""
    head = Head(bias_ptr, scale, softcap)
    sizes = Sizes(first_class, rows, active_rows(count_ptr, start, least, rows), hidden, classes, group)
    tiling: gl.constexpr = Tiling(W_BY_CLASS, BLOCK_V)
    switches: gl.constexpr = ExponentialsSwitches(HAS_BIAS, HAS_SOFTCAP, STORES, STATISTICS)
    io = ExponentialsIO(target_ptr, ref_exponent_ptr, flag_ptr, sum_ptr, max_ptr, target_logit_ptr, hit_ptr)
    ring = make_ring(x_desc, w_desc, STAGES)
    buffers = ring.a  # never used where nothing is stored
    if STORES:
        buffers = make_buffers(e_desc)
    others = ()
    if others_desc is not None:
        others = (others_desc, piece, piece_rows)
    gl.warp_specialize(
        [
            (exponentials_warpgroup, (ring, e_desc, others, buffers, io, head, sizes, tiling, switches, 0)),
            (exponentials_warpgroup, (ring, e_desc, others, buffers, io, head, sizes, tiling, switches, 1)),
            (load_tiles, (x_desc, w_desc, ring, sizes, tiling)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


def exponentials(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    vocab_chunk: slice,
    active: Active,
    *,
    target: At,
    ref_exponent: At,
    flag: At,
    sums: At,
    statistics: int,
    of_logits: At | None,
    target_logit: At,
    e: Stores,
    hit: At | None,
    of_kernel: tuple[Any, TileBlocks] | None = None,
) -> None:
    """Launches `exponentials_kernel`, or `of_kernel`: a kernel with the same arguments, and its blocks."""
    first, others, *place = e
    pointers = target, ref_exponent, flag, sums, of_logits, target_logit, hit, *active, *place
    switches = {"STORES": first is not None, "STATISTICS": statistics}
    kernel, blocks = of_kernel or (exponentials_kernel, _blocks(problem))
    launch_tiles(kernel, problem, x, w, vocab_chunk, (first, others), pointers, switches, blocks)


class StatisticsIO(NamedTuple):
    """What `statistics_kernel` reads and writes besides matrices."""

    class_weight_ptr: Any
    target_ptr: Any
    max_ptr: Any
    sum_ptr: Any
    weighted_sum_ptr: Any
    sum_exp_log_ptr: Any
    target_logit_ptr: Any


class StatisticsSwitches(NamedTuple):
    has_bias: Any
    has_softcap: Any
    weighted: Any
    statistics: Any


@gluon.jit
def statistics_warpgroup(ring, io, head, sizes, tiling, switches, WHICH: gl.constexpr):
    HALF: gl.constexpr = ring.a.shape[1]
    WIDTH: gl.constexpr = tiling.block_v // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiling.block_v, 16])
    quarter: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    row_blocks, class_blocks = gl.cdiv(sizes.active, 2 * HALF), gl.cdiv(sizes.classes, tiling.block_v)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), row_blocks * class_blocks, gl.num_programs(0)):
        raw, stage, phase = multiply_first(ring, stage, phase, layout, WHICH, tiling)
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, sizes.group)
        row, column = row_block * (2 * HALF) + WHICH * HALF, class_block * tiling.block_v
        row_ids = row + gl.arange(0, HALF, gl.SliceLayout(1, quarter))
        _, owns = targets_of(io.target_ptr, row_ids, column, sizes, tiling.block_v)
        any_target = gl.max(owns.to(gl.int32), 0) != 0
        raw, stage, phase = multiply_rest(raw, ring, stage, phase, sizes.hidden, WHICH, tiling)
        inside = row_ids < sizes.rows
        top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, quarter))
        total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, quarter))
        weighted_sum = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, quarter))
        sum_exp_log = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, quarter))
        argmax = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, quarter))
        squares = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, quarter))
        pieces = quarters(raw, quarter)
        for i in gl.static_range(4):
            first = column + i * WIDTH
            columns = first + gl.arange(0, WIDTH, gl.SliceLayout(0, quarter))
            logits = to_logits(pieces[i], columns, head, sizes, switches)
            if switches.weighted:  # past the last class logits are 0 still
                class_weight = gl.load(io.class_weight_ptr + columns, mask=columns < sizes.classes, other=0.0)
                weighted_sum += gl.sum(logits * gl.expand_dims(class_weight, 0), 1)
            logits = masked(logits, columns, column, sizes.classes, tiling.block_v)
            if any_target:  # few tiles have any
                target, owns = targets_of(io.target_ptr, row_ids, first, sizes, WIDTH)
                store_target_logits(io.target_logit_ptr, logits, row_ids, columns, target, owns)
            before = top  # quarters are merged as vocabulary chunks are: (26)
            top = gl.maximum(top, gl.max(logits, 1))
            shift = gl.where(top == float("-inf"), 0.0, top)
            moved = gl.where(before == float("-inf"), 0.0, before - shift)
            factor = gl.exp2(moved * LOG2_E)
            exponentials = gl.exp2((logits - gl.expand_dims(shift, 1)) * LOG2_E)  # exact where the logit is the largest
            if ARGMAX & switches.statistics:
                place = gl.expand_dims((columns - column).to(gl.float32), 0)
                here = gl.where(logits == gl.expand_dims(top, 1), place, tiling.block_v)
                argmax = gl.where(top > before, gl.min(here, 1), argmax)
            if SQUARES & switches.statistics:
                squares = factor * factor * squares + gl.sum(exponentials * exponentials, 1)
            if ENTROPY & switches.statistics:
                shifted = gl.where(exponentials == 0, 0.0, logits - gl.expand_dims(shift, 1))
                sum_exp_log = factor * (sum_exp_log + moved * total) + gl.sum(exponentials * shifted, 1)
            total = factor * total + gl.sum(exponentials, 1)
        at = io.max_ptr + class_block.to(gl.int64) * planes(MAX | OF_MAX & switches.statistics) * sizes.rows + row_ids
        gl.store(at, top, mask=inside)
        if ARGMAX & switches.statistics:
            at += sizes.rows
            gl.store(at, argmax, mask=inside)
        if SQUARES & switches.statistics:
            gl.store(at + sizes.rows, squares, mask=inside)
        out = class_block.to(gl.int64) * sizes.rows + row_ids
        gl.store(io.sum_ptr + out, total, mask=inside)
        if ENTROPY & switches.statistics:
            gl.store(io.sum_exp_log_ptr + out, sum_exp_log, mask=inside)
        if switches.weighted:
            gl.store(io.weighted_sum_ptr + out, weighted_sum, mask=inside)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def statistics_kernel(
    x_desc, w_desc, bias_ptr, class_weight_ptr, target_ptr, max_ptr, sum_ptr, weighted_sum_ptr, sum_exp_log_ptr,
    target_logit_ptr, first_class, rows, hidden, classes, group, scale, softcap,
    WEIGHTED: gl.constexpr, STATISTICS: gl.constexpr, W_BY_CLASS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, BLOCK_V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`kernels.statistics_kernel`."""
    head = Head(bias_ptr, scale, softcap)
    sizes = Sizes(first_class, rows, rows, hidden, classes, group)
    tiling: gl.constexpr = Tiling(W_BY_CLASS, BLOCK_V)
    switches: gl.constexpr = StatisticsSwitches(HAS_BIAS, HAS_SOFTCAP, WEIGHTED, STATISTICS)
    io = StatisticsIO(
        class_weight_ptr, target_ptr, max_ptr, sum_ptr, weighted_sum_ptr, sum_exp_log_ptr, target_logit_ptr
    )
    ring = make_ring(x_desc, w_desc, STAGES)
    gl.warp_specialize(
        [
            (statistics_warpgroup, (ring, io, head, sizes, tiling, switches, 0)),
            (statistics_warpgroup, (ring, io, head, sizes, tiling, switches, 1)),
            (load_tiles, (x_desc, w_desc, ring, sizes, tiling)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


def statistics(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    vocab_chunk: slice,
    *,
    statistics: int,
    class_weight: Tensor | None,
    target: Tensor,
    tops: Tensor,
    sums: Tensor,
    weighted_sums: Tensor | None,
    sums_exp_log: Tensor | None,
    target_logit: Tensor,
) -> None:
    """Launches `statistics_kernel`."""
    pointers = class_weight, target, tops, sums, weighted_sums, sums_exp_log, target_logit
    switches = {"WEIGHTED": weighted_sums is not None, "STATISTICS": statistics & ~BY_ROW}
    launch_tiles(statistics_kernel, problem, x, w, vocab_chunk, (), pointers, switches, _blocks(problem))


class DLogitsIO(NamedTuple):
    """What `d_logits_kernel` reads besides matrices."""

    class_weight_ptr: Any
    target_ptr: Any
    row_weight_ptr: Any
    lse_ptr: Any
    alpha_ptr: Any
    tau_ptr: Any
    beta_ptr: Any
    sigma_ptr: Any


class DLogitsSwitches(NamedTuple):
    has_bias: Any
    has_softcap: Any
    has_beta: Any
    has_sigma: Any


@gluon.jit
def d_logits_warpgroup(ring, d_logits_desc, buffers, io, head, sizes, tiling, switches, WHICH: gl.constexpr):
    HALF: gl.constexpr = ring.a.shape[1]
    WIDTH: gl.constexpr = tiling.block_v // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiling.block_v, 16])
    quarter: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    row_blocks, class_blocks = gl.cdiv(sizes.active, 2 * HALF), gl.cdiv(sizes.classes, tiling.block_v)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), row_blocks * class_blocks, gl.num_programs(0)):
        raw, stage, phase = multiply_first(ring, stage, phase, layout, WHICH, tiling)
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, sizes.group)
        row, column = row_block * (2 * HALF) + WHICH * HALF, class_block * tiling.block_v
        row_ids = row + gl.arange(0, HALF, gl.SliceLayout(1, quarter))
        inside = row_ids < sizes.rows
        lse = gl.load(io.lse_ptr + row_ids, mask=inside, other=0.0)
        alpha = gl.load(io.alpha_ptr + row_ids, mask=inside, other=0.0)
        tau = gl.load(io.tau_ptr + row_ids, mask=inside, other=0.0)
        target = gl.load(io.target_ptr + row_ids, mask=inside, other=-1) - sizes.first_class
        contributes = gl.load(io.row_weight_ptr + row_ids, mask=inside, other=0.0) != 0
        if switches.has_beta:
            beta = gl.load(io.beta_ptr + row_ids, mask=inside, other=0.0)
        if switches.has_sigma:
            sigma = gl.load(io.sigma_ptr + row_ids, mask=inside, other=0.0)
        raw, stage, phase = multiply_rest(raw, ring, stage, phase, sizes.hidden, WHICH, tiling)
        pieces = quarters(raw, quarter)
        for i in gl.static_range(4):
            first = column + i * WIDTH
            columns = first + gl.arange(0, WIDTH, gl.SliceLayout(0, quarter))
            logits = to_logits(pieces[i], columns, head, sizes, switches)
            log_prob = logits - gl.expand_dims(lse, 1)
            d_logits = gl.exp2(log_prob * LOG2_E)
            if switches.has_beta:
                log_prob = gl.where(log_prob < NO_PROBABILITY, NO_PROBABILITY, log_prob)
                d_logits *= gl.expand_dims(alpha, 1) + gl.expand_dims(beta, 1) * log_prob
            else:
                d_logits *= gl.expand_dims(alpha, 1)
            if switches.has_sigma:
                class_weight = gl.load(io.class_weight_ptr + columns, mask=columns < sizes.classes, other=0.0)
                d_logits -= gl.expand_dims(sigma, 1) * gl.expand_dims(class_weight, 0)
            here = gl.expand_dims(columns, 0) == gl.expand_dims(target, 1)
            d_logits = gl.where(here, d_logits - gl.expand_dims(tau, 1), d_logits)
            if switches.has_softcap:
                d_logits *= slope(logits, head.softcap)
            d_logits = gl.where(gl.expand_dims(contributes, 1), d_logits, 0.0)
            store_quarter(d_logits_desc, buffers, d_logits, row, first, WHICH, i)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def d_logits_kernel(
    x_desc, w_desc, d_logits_desc, bias_ptr, class_weight_ptr, target_ptr, row_weight_ptr, lse_ptr, alpha_ptr, tau_ptr,
    beta_ptr, sigma_ptr, first_class, rows, hidden, classes, group, scale, softcap,
    HAS_BETA: gl.constexpr, HAS_SIGMA: gl.constexpr, W_BY_CLASS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, BLOCK_V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`kernels.d_logits_kernel`."""
    head = Head(bias_ptr, scale, softcap)
    sizes = Sizes(first_class, rows, rows, hidden, classes, group)
    tiling: gl.constexpr = Tiling(W_BY_CLASS, BLOCK_V)
    switches: gl.constexpr = DLogitsSwitches(HAS_BIAS, HAS_SOFTCAP, HAS_BETA, HAS_SIGMA)
    io = DLogitsIO(class_weight_ptr, target_ptr, row_weight_ptr, lse_ptr, alpha_ptr, tau_ptr, beta_ptr, sigma_ptr)
    ring = make_ring(x_desc, w_desc, STAGES)
    buffers = make_buffers(d_logits_desc)
    gl.warp_specialize(
        [
            (d_logits_warpgroup, (ring, d_logits_desc, buffers, io, head, sizes, tiling, switches, 0)),
            (d_logits_warpgroup, (ring, d_logits_desc, buffers, io, head, sizes, tiling, switches, 1)),
            (load_tiles, (x_desc, w_desc, ring, sizes, tiling)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


def d_logits(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    vocab_chunk: slice,
    *,
    result: Tensor,
    class_weight: Tensor | None,
    target: At,
    row_weight: At,
    lse: Tensor,
    alpha: Tensor,
    tau: Tensor,
    beta: Tensor | None,
    sigma: Tensor | None,
) -> None:
    """Launches `d_logits_kernel`."""
    pointers = class_weight, target, row_weight, lse, alpha, tau, beta, sigma
    switches = {"HAS_BETA": beta is not None, "HAS_SIGMA": sigma is not None}
    launch_tiles(d_logits_kernel, problem, x, w, vocab_chunk, (result,), pointers, switches, _blocks(problem))


def _blocks(problem: Problem) -> TileBlocks:
    """Returns the blocks and constexprs of the kernels of this file. They load halves of a tile's rows and store
    quarters of a half."""
    tile = plan_of(problem).tile
    assert tile is not None
    half, step = tile.block_n // 2, tile_config.LOGITS_STEP
    constexprs = {"BLOCK_V": tile.block_v, "STAGES": tile_config.LOGITS_STAGES, "num_warps": 4}
    return TileBlocks((half, step), (tile.block_v, step), (half, tile.block_v // 4), constexprs, gluon=True)
