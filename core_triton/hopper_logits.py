"""Kernels of `kernels.py` for Hopper (sm_90), in Triton's Gluon dialect: the same outputs, with epilogues that overlap.

A tile of BLOCK_N rows x BLOCK_V classes takes 16 cycles per unit of hidden size on the tensor cores, and 2048 for the
exponentials of its epilogue, whatever the hidden size: a seventh of the time at 896. Triton's own pipelining leaves the
tensor cores idle meanwhile. Here one warp loads (`load_tiles`), and two warpgroups multiply, each half of a tile's rows
and all of its columns. The ring of loaded tiles lets one run ahead of the other, and so they settle: while one is in
its epilogue the other has the tensor cores to itself. (To start one late changes nothing measurable.)
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from core_triton import tile_config
from core_triton.hopper import (
    LOAD_REGISTERS,
    MULTIPLY_REGISTERS,
    SIZES,
    active_rows,
    load_tiles,
    multiply,
    quarters,
    rings,
    store_quarter,
    tile_of,
)
from core_triton.kernels import LOG2_E, NO_PROBABILITY, SUM_LIMIT, Active, bias_at, head_blocks
from core_triton.launch import At, Blocks, cdiv, launch
from core_triton.problem import Problem, plan_of


def _launch_tiles(
    kernel: Any,
    problem: Problem,
    x: Tensor,
    w: Tensor,
    slab: slice,
    result: tuple[Tensor | None, ...],
    pointers: tuple[Any, ...],
    switches: dict[str, bool],
) -> None:
    """Launches one of the kernels of this file on the rows x (n, D) and the slab w (v, D) of the head."""
    plan, spec = plan_of(problem), problem.spec
    tile = plan.tile
    assert tile is not None
    n, hidden, classes = x.shape[0], x.shape[1], slab.stop - slab.start
    half, step = tile.block_n // 2, tile_config.LOGITS_STEP
    w_blocks, by_class = head_blocks(w, tile.block_v, step, gluon=True)
    launch(
        kernel,
        (min(cdiv(n, tile.block_n) * cdiv(classes, tile.block_v), plan.programs),),
        Blocks(x, (half, step), gluon=True),
        w_blocks,
        *(None if matrix is None else Blocks(matrix, (half, tile.block_v // 4), gluon=True) for matrix in result),
        bias_at(problem, slab),
        *pointers,
        problem.vocab_offset + slab.start,
        n,
        hidden,
        classes,
        spec.logit_scale,
        spec.softcap or 1.0,
        **switches,
        W_BY_CLASS=by_class,
        HAS_BIAS=problem.linear_bias is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        BLOCK_V=tile.block_v,
        GROUP=tile.group,
        STAGES=tile_config.LOGITS_STAGES,
        num_warps=4,
    )


@gluon.jit
def cap(raw, bias_ptr, columns, classes, scale, softcap, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr):
    """Returns logits of raw products: MATH.md (1), (2)."""
    if HAS_BIAS:
        bias = gl.load(bias_ptr + columns, mask=columns < classes, other=0.0).to(gl.float32)
        raw += gl.expand_dims(bias, 0)
    logits = raw * scale
    if HAS_SOFTCAP:
        ratio = logits * (1.0 / softcap)
        small = gl.exp2(-2.0 * LOG2_E * gl.abs(ratio))
        magnitude = (1.0 - small) * reciprocal(1.0 + small)
        logits = softcap * gl.where(ratio < 0, -magnitude, magnitude)
    return logits


@gluon.jit
def reciprocal(t):
    """Returns 1 / t within 1 ulp, in one instruction where a division takes ten and their registers."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def slope(logits, softcap):
    """Returns the derivative of the cap at capped logits: (15)."""
    ratio = logits * (1.0 / softcap)
    return 1.0 - ratio * ratio


@gluon.jit
def targets_of(target_ptr, first_class, row_ids, first, rows, classes, WIDTH: gl.constexpr):
    """Returns each row's target as a column, and whether it is among the WIDTH columns from `first` on."""
    target = gl.load(target_ptr + row_ids, mask=row_ids < rows, other=-1) - first_class
    owns = (row_ids < rows) & (target >= first) & (target < gl.minimum(first + WIDTH, classes))
    return target.to(gl.int32), owns  # 64 bits decide, 32 are compared


@gluon.jit
def store_target_logits(target_logit_ptr, logits, row_ids, columns, target, owns):
    """Writes target_logit (rows,) for the rows whose target is among these columns: the very logits that are summed, so
    that the loss is the logarithm of a ratio that is never below 1."""
    here = gl.expand_dims(columns, 0) == gl.expand_dims(target, 1)
    gl.store(target_logit_ptr + row_ids, gl.sum(gl.where(here, logits, 0.0), 1), mask=owns)


@gluon.jit
def masked(logits, columns, column, classes, BLOCK_V: gl.constexpr):
    """Returns a quarter's logits with -inf past the last class, where the tile that begins at `column` has such."""
    if column + BLOCK_V > classes:
        logits = gl.where(gl.expand_dims(columns < classes, 0), logits, float("-inf"))
    return logits


@gluon.jit
def exponentials_warpgroup(
    x_ring, w_ring, full, empty, e_desc, buffers, arguments, rows, hidden, classes, scale, softcap, switches,
    WHICH: gl.constexpr,
):  # fmt: skip
    (
        bias_ptr,
        target_ptr,
        anchor_ptr,
        flag_ptr,
        sum_ptr,
        max_ptr,
        target_logit_ptr,
        hit_ptr,
        first_class,
        active,
    ) = arguments
    GROUP: gl.constexpr = switches[1]
    BLOCK_V: gl.constexpr = switches[2]
    HAS_BIAS: gl.constexpr = switches[3]
    HAS_SOFTCAP: gl.constexpr = switches[4]
    STORES: gl.constexpr = switches[5]
    STATISTICS: gl.constexpr = switches[6]
    HALF: gl.constexpr = x_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    quarter: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V // 4, 16])
    row_blocks, class_blocks = gl.cdiv(active, 2 * HALF), gl.cdiv(classes, BLOCK_V)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), row_blocks * class_blocks, gl.num_programs(0)):
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, GROUP)
        row, column = row_block * (2 * HALF) + WHICH * HALF, class_block * BLOCK_V
        any_target = True
        if hit_ptr is not None:  # read before the matmul, under which it arrives
            any_target = gl.load(hit_ptr + (2 * row_block + WHICH).to(gl.int64) * class_blocks + class_block) != 0
        raw, stage, phase = multiply(x_ring, w_ring, full, empty, stage, phase, hidden, layout, WHICH, switches)
        row_ids = row + gl.arange(0, HALF, gl.SliceLayout(1, quarter))
        inside = row_ids < rows
        anchor = gl.load(anchor_ptr + row_ids, mask=inside, other=0.0)
        total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, quarter))
        top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, quarter))
        pieces = quarters(raw, quarter)
        for i in gl.static_range(4):
            first = column + i * (BLOCK_V // 4)
            columns = first + gl.arange(0, BLOCK_V // 4, gl.SliceLayout(0, quarter))
            logits = cap(pieces[i], bias_ptr, columns, classes, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
            logits = masked(logits, columns, column, classes, BLOCK_V)
            if any_target:
                target, owns = targets_of(target_ptr, first_class, row_ids, first, rows, classes, BLOCK_V // 4)
                store_target_logits(target_logit_ptr, logits, row_ids, columns, target, owns)
            exponentials = gl.exp2(logits * LOG2_E - gl.expand_dims(anchor, 1))
            total += gl.sum(exponentials, 1)
            if STATISTICS:
                top = gl.maximum(top, gl.max(logits, 1))
            if STORES:
                if HAS_SOFTCAP:
                    exponentials = gl.where(exponentials == 0, 0.0, exponentials * slope(logits, softcap))
                store_quarter(e_desc, buffers, exponentials, row, first, WHICH, i)
        out = class_block.to(gl.int64) * rows + row_ids
        gl.store(sum_ptr + out, total, mask=inside)
        lost = inside & ~(total < SUM_LIMIT)
        gl.store(flag_ptr + row_block + gl.zeros_like(row_ids), 1, mask=lost)
        if STATISTICS:
            gl.store(max_ptr + out, top, mask=inside)
    if STORES:
        tma.store_wait(0)


@gluon.jit
def statistics_warpgroup(
    x_ring, w_ring, full, empty, arguments, rows, hidden, classes, scale, softcap, switches, WHICH: gl.constexpr
):
    (
        bias_ptr,
        class_weight_ptr,
        target_ptr,
        max_ptr,
        sum_ptr,
        weighted_sum_ptr,
        sum_exp_log_ptr,
        target_logit_ptr,
        first_class,
    ) = arguments
    GROUP: gl.constexpr = switches[1]
    BLOCK_V: gl.constexpr = switches[2]
    HAS_BIAS: gl.constexpr = switches[3]
    HAS_SOFTCAP: gl.constexpr = switches[4]
    WEIGHTED: gl.constexpr = switches[5]
    ENTROPY: gl.constexpr = switches[6]
    HALF: gl.constexpr = x_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    quarter: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V // 4, 16])
    row_blocks, class_blocks = gl.cdiv(rows, 2 * HALF), gl.cdiv(classes, BLOCK_V)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), row_blocks * class_blocks, gl.num_programs(0)):
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, GROUP)
        row, column = row_block * (2 * HALF) + WHICH * HALF, class_block * BLOCK_V
        raw, stage, phase = multiply(x_ring, w_ring, full, empty, stage, phase, hidden, layout, WHICH, switches)
        row_ids = row + gl.arange(0, HALF, gl.SliceLayout(1, quarter))
        inside = row_ids < rows
        out = class_block.to(gl.int64) * rows + row_ids
        top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, quarter))
        total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, quarter))
        weighted_sum = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, quarter))
        sum_exp_log = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, quarter))
        pieces = quarters(raw, quarter)
        _, owns = targets_of(target_ptr, first_class, row_ids, column, rows, classes, BLOCK_V)
        any_target = gl.max(owns.to(gl.int32), 0) != 0
        for i in gl.static_range(4):
            first = column + i * (BLOCK_V // 4)
            columns = first + gl.arange(0, BLOCK_V // 4, gl.SliceLayout(0, quarter))
            logits = cap(pieces[i], bias_ptr, columns, classes, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
            if WEIGHTED:  # past the last class logits are 0 still
                class_weight = gl.load(class_weight_ptr + columns, mask=columns < classes, other=0.0)
                weighted_sum += gl.sum(logits * gl.expand_dims(class_weight, 0), 1)
            logits = masked(logits, columns, column, classes, BLOCK_V)
            if any_target:  # few tiles have any
                target, owns = targets_of(target_ptr, first_class, row_ids, first, rows, classes, BLOCK_V // 4)
                store_target_logits(target_logit_ptr, logits, row_ids, columns, target, owns)
            before = top  # quarters are merged as stretches of the vocabulary are: (26)
            top = gl.maximum(top, gl.max(logits, 1))
            shift = gl.where(top == float("-inf"), 0.0, top)
            moved = gl.where(before == float("-inf"), 0.0, before - shift)
            factor = gl.exp2(moved * LOG2_E)
            exponentials = gl.exp2((logits - gl.expand_dims(shift, 1)) * LOG2_E)  # exact where the logit is the largest
            if ENTROPY:
                shifted = gl.where(exponentials == 0, 0.0, logits - gl.expand_dims(shift, 1))
                sum_exp_log = factor * (sum_exp_log + moved * total) + gl.sum(exponentials * shifted, 1)
            total = factor * total + gl.sum(exponentials, 1)
        gl.store(max_ptr + out, top, mask=inside)
        gl.store(sum_ptr + out, total, mask=inside)
        if ENTROPY:
            gl.store(sum_exp_log_ptr + out, sum_exp_log, mask=inside)
        if WEIGHTED:
            gl.store(weighted_sum_ptr + out, weighted_sum, mask=inside)


@gluon.jit
def d_logits_warpgroup(
    x_ring, w_ring, full, empty, d_logits_desc, buffers, arguments, rows, hidden, classes, scale, softcap, switches,
    WHICH: gl.constexpr,
):  # fmt: skip
    (
        bias_ptr,
        class_weight_ptr,
        target_ptr,
        row_weight_ptr,
        lse_ptr,
        alpha_ptr,
        tau_ptr,
        beta_ptr,
        sigma_ptr,
        first_class,
    ) = arguments
    GROUP: gl.constexpr = switches[1]
    BLOCK_V: gl.constexpr = switches[2]
    HAS_BIAS: gl.constexpr = switches[3]
    HAS_SOFTCAP: gl.constexpr = switches[4]
    HAS_BETA: gl.constexpr = switches[5]
    HAS_SIGMA: gl.constexpr = switches[6]
    HALF: gl.constexpr = x_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    quarter: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V // 4, 16])
    row_blocks, class_blocks = gl.cdiv(rows, 2 * HALF), gl.cdiv(classes, BLOCK_V)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), row_blocks * class_blocks, gl.num_programs(0)):
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, GROUP)
        row, column = row_block * (2 * HALF) + WHICH * HALF, class_block * BLOCK_V
        raw, stage, phase = multiply(x_ring, w_ring, full, empty, stage, phase, hidden, layout, WHICH, switches)
        row_ids = row + gl.arange(0, HALF, gl.SliceLayout(1, quarter))
        inside = row_ids < rows
        lse = gl.load(lse_ptr + row_ids, mask=inside, other=0.0)
        alpha = gl.load(alpha_ptr + row_ids, mask=inside, other=0.0)
        tau = gl.load(tau_ptr + row_ids, mask=inside, other=0.0)
        target = gl.load(target_ptr + row_ids, mask=inside, other=-1) - first_class
        contributes = gl.load(row_weight_ptr + row_ids, mask=inside, other=0.0) != 0
        if HAS_BETA:
            beta = gl.load(beta_ptr + row_ids, mask=inside, other=0.0)
        if HAS_SIGMA:
            sigma = gl.load(sigma_ptr + row_ids, mask=inside, other=0.0)
        pieces = quarters(raw, quarter)
        for i in gl.static_range(4):
            first = column + i * (BLOCK_V // 4)
            columns = first + gl.arange(0, BLOCK_V // 4, gl.SliceLayout(0, quarter))
            logits = cap(pieces[i], bias_ptr, columns, classes, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
            log_prob = logits - gl.expand_dims(lse, 1)
            d_logits = gl.exp2(log_prob * LOG2_E)
            if HAS_BETA:
                log_prob = gl.where(log_prob < NO_PROBABILITY, NO_PROBABILITY, log_prob)
                d_logits *= gl.expand_dims(alpha, 1) + gl.expand_dims(beta, 1) * log_prob
            else:
                d_logits *= gl.expand_dims(alpha, 1)
            if HAS_SIGMA:
                class_weight = gl.load(class_weight_ptr + columns, mask=columns < classes, other=0.0)
                d_logits -= gl.expand_dims(sigma, 1) * gl.expand_dims(class_weight, 0)
            here = gl.expand_dims(columns, 0) == gl.expand_dims(target, 1)
            d_logits = gl.where(here, d_logits - gl.expand_dims(tau, 1), d_logits)
            if HAS_SOFTCAP:
                d_logits *= slope(logits, softcap)
            d_logits = gl.where(gl.expand_dims(contributes, 1), d_logits, 0.0)
            store_quarter(d_logits_desc, buffers, d_logits, row, first, WHICH, i)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def exponentials_kernel(
    x_desc, w_desc, e_desc, bias_ptr, target_ptr, anchor_ptr, flag_ptr, sum_ptr, max_ptr, target_logit_ptr, hit_ptr,
    count_ptr, start, least, first_class, rows, hidden, classes, scale, softcap,
    STORES: gl.constexpr, STATISTICS: gl.constexpr, W_BY_CLASS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, BLOCK_V: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`kernels.exponentials_kernel` without repair, for the row blocks that hold one of the first count - start rows,
    and for `least` of them at least."""
    active = active_rows(count_ptr, start, least, rows)
    x_ring, w_ring, full, empty = rings(x_desc, w_desc, STAGES)
    buffers = x_ring  # never used where nothing is stored
    if STORES:
        buffers = gl.allocate_shared_memory(e_desc.dtype, [4] + e_desc.block_type.shape, e_desc.layout)
    switches: gl.constexpr = (W_BY_CLASS, GROUP, BLOCK_V, HAS_BIAS, HAS_SOFTCAP, STORES, STATISTICS)
    arguments = (
        bias_ptr,
        target_ptr,
        anchor_ptr,
        flag_ptr,
        sum_ptr,
        max_ptr,
        target_logit_ptr,
        hit_ptr,
        first_class,
        active,
    )
    gl.warp_specialize(
        [
            (
                exponentials_warpgroup,
                (
                    x_ring,
                    w_ring,
                    full,
                    empty,
                    e_desc,
                    buffers,
                    arguments,
                    rows,
                    hidden,
                    classes,
                    scale,
                    softcap,
                    switches,
                    0,
                ),
            ),
            (
                exponentials_warpgroup,
                (
                    x_ring,
                    w_ring,
                    full,
                    empty,
                    e_desc,
                    buffers,
                    arguments,
                    rows,
                    hidden,
                    classes,
                    scale,
                    softcap,
                    switches,
                    1,
                ),
            ),
            (load_tiles, (x_desc, w_desc, x_ring, w_ring, full, empty, active, hidden, classes, switches)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


def exponentials(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    slab: slice,
    active: Active,
    *,
    target: At,
    anchor: At,
    flag: At,
    sums: At,
    tops: At | None,
    target_logit: At,
    e: Tensor | None,
    hit: At | None,
) -> None:
    """Launches `exponentials_kernel`."""
    pointers = target, anchor, flag, sums, tops, target_logit, hit, *active
    switches = {"STORES": e is not None, "STATISTICS": tops is not None}
    _launch_tiles(exponentials_kernel, problem, x, w, slab, (e,), pointers, switches)


@gluon.jit(do_not_specialize=SIZES)
def statistics_kernel(
    x_desc, w_desc, bias_ptr, class_weight_ptr, target_ptr, max_ptr, sum_ptr, weighted_sum_ptr, sum_exp_log_ptr,
    target_logit_ptr, first_class, rows, hidden, classes, scale, softcap,
    WEIGHTED: gl.constexpr, ENTROPY: gl.constexpr, W_BY_CLASS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, BLOCK_V: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`kernels.statistics_kernel` without repair."""
    x_ring, w_ring, full, empty = rings(x_desc, w_desc, STAGES)
    switches: gl.constexpr = (W_BY_CLASS, GROUP, BLOCK_V, HAS_BIAS, HAS_SOFTCAP, WEIGHTED, ENTROPY)
    arguments = (
        bias_ptr, class_weight_ptr, target_ptr, max_ptr, sum_ptr, weighted_sum_ptr, sum_exp_log_ptr, target_logit_ptr,
        first_class,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                statistics_warpgroup,
                (x_ring, w_ring, full, empty, arguments, rows, hidden, classes, scale, softcap, switches, 0),
            ),
            (
                statistics_warpgroup,
                (x_ring, w_ring, full, empty, arguments, rows, hidden, classes, scale, softcap, switches, 1),
            ),
            (load_tiles, (x_desc, w_desc, x_ring, w_ring, full, empty, rows, hidden, classes, switches)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


def statistics(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    slab: slice,
    *,
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
    switches = {"WEIGHTED": weighted_sums is not None, "ENTROPY": sums_exp_log is not None}
    _launch_tiles(statistics_kernel, problem, x, w, slab, (), pointers, switches)


@gluon.jit(do_not_specialize=SIZES)
def d_logits_kernel(
    x_desc, w_desc, d_logits_desc, bias_ptr, class_weight_ptr, target_ptr, row_weight_ptr, lse_ptr, alpha_ptr, tau_ptr,
    beta_ptr, sigma_ptr, first_class, rows, hidden, classes, scale, softcap,
    HAS_BETA: gl.constexpr, HAS_SIGMA: gl.constexpr, W_BY_CLASS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, BLOCK_V: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`kernels.d_logits_kernel`."""
    x_ring, w_ring, full, empty = rings(x_desc, w_desc, STAGES)
    buffers = gl.allocate_shared_memory(d_logits_desc.dtype, [4] + d_logits_desc.block_type.shape, d_logits_desc.layout)
    switches: gl.constexpr = (W_BY_CLASS, GROUP, BLOCK_V, HAS_BIAS, HAS_SOFTCAP, HAS_BETA, HAS_SIGMA)
    arguments = (
        bias_ptr, class_weight_ptr, target_ptr, row_weight_ptr, lse_ptr, alpha_ptr, tau_ptr, beta_ptr, sigma_ptr,
        first_class,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                d_logits_warpgroup,
                (
                    x_ring,
                    w_ring,
                    full,
                    empty,
                    d_logits_desc,
                    buffers,
                    arguments,
                    rows,
                    hidden,
                    classes,
                    scale,
                    softcap,
                    switches,
                    0,
                ),
            ),
            (
                d_logits_warpgroup,
                (
                    x_ring,
                    w_ring,
                    full,
                    empty,
                    d_logits_desc,
                    buffers,
                    arguments,
                    rows,
                    hidden,
                    classes,
                    scale,
                    softcap,
                    switches,
                    1,
                ),
            ),
            (load_tiles, (x_desc, w_desc, x_ring, w_ring, full, empty, rows, hidden, classes, switches)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


def d_logits(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    slab: slice,
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
    _launch_tiles(d_logits_kernel, problem, x, w, slab, (result,), pointers, switches)
