"""Triton kernels that multiply: bodies and nothing else. `launch.py` launches them; the kernels that multiply nothing
are in `row_kernels.py` and `target_kernels.py`.

These share `logits_tile`. Each owns tiles of BLOCK_N rows x BLOCK_V classes, walked by a grid of programs that stay
(`tile_of`), reads its operands through tensor descriptors (TMA where the card has it), which return zeros outside
their bounds, and writes each of its outputs from one program: no atomics, so results repeat bit for bit. Equations:
linear_ce/MATH.md.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

NO_PROBABILITY = tl.constexpr(-1e4)  # a log-probability whose exp is 0 in float32, finite so that 0 times it is 0

# A tile's sum of exponentials past this has lost touch with its anchor: (30). 2**48 is 33 nats above the target logit;
# the sum of all tiles then stays below 2**64, whose reciprocal times a row weight times an input bfloat16 holds.
SUM_LIMIT = tl.constexpr(2.0**48)

SIZES = ("rows", "hidden", "classes")  # nothing is gained by a compilation for each

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # there, products of bfloat16 come out wrong: upcast them


@triton.jit
def tile_of(tile, row_blocks, class_blocks, GROUP: tl.constexpr):
    """Returns the row block and class block of a tile: GROUP row blocks first, then the next class block.

    The programs that run together so share few class blocks, whose rows of the head they read from L2.
    """
    group = tile // (GROUP * class_blocks)
    first = group * GROUP
    size = min(row_blocks - first, GROUP)
    within = tile - first * class_blocks
    return first + within % size, within // size


@triton.jit
def logits_tile(
    x_desc,
    w_desc,
    bias_ptr,
    row,
    column,
    hidden,
    classes,
    scale,
    softcap,
    W_BY_CLASS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Returns the logits from (row, column) on, (BLOCK_N, BLOCK_V) float32: (1), (2); 0 in columns past `classes`,
    unless x is not finite."""
    raw = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for k in range(0, hidden, BLOCK_D):
        x = x_desc.load([row, k])  # (BLOCK_N, BLOCK_D)
        if W_BY_CLASS:
            w = w_desc.load([column, k]).T  # (BLOCK_D, BLOCK_V)
        else:
            w = w_desc.load([k, column])
        if INTERPRETED:
            x, w = x.to(tl.float32), w.to(tl.float32)
        raw = tl.dot(x, w, raw, input_precision=PRECISION)
    if HAS_BIAS:
        columns = column + tl.arange(0, BLOCK_V)
        raw += tl.load(bias_ptr + columns, mask=columns < classes, other=0.0).to(tl.float32)[None, :]
    logits = raw * scale
    if HAS_SOFTCAP:
        logits = softcap * tanh(logits * (1.0 / softcap))
    return logits


@triton.jit
def tanh(t):
    small = tl.exp2(-2.0 * LOG2_E * tl.abs(t))
    magnitude = (1.0 - small) / (1.0 + small)
    return tl.where(t < 0, -magnitude, magnitude)


@triton.jit
def slope(logits, softcap):
    """Returns the derivative of the cap at capped logits: (15)."""
    ratio = logits * (1.0 / softcap)
    return 1.0 - ratio * ratio


@triton.jit
def store_target_logit(target_logit_ptr, target_ptr, logits, row_ids, column, inside, classes, BLOCK_V: tl.constexpr):
    """Writes target_logit (rows,) for the rows whose target is among the classes of this tile."""
    target = tl.load(target_ptr + row_ids, mask=inside, other=-1)
    here = (column + tl.arange(0, BLOCK_V))[None, :] == target[:, None]
    owns = inside & (target >= column) & (target < min(column + BLOCK_V, classes))
    tl.store(target_logit_ptr + row_ids, tl.sum(tl.where(here, logits, 0.0), 1), mask=owns)


@triton.jit(do_not_specialize=SIZES)
def exponentials_kernel(
    x_desc,
    w_desc,
    e_desc,
    bias_ptr,
    target_ptr,
    anchor_ptr,
    flag_ptr,
    sum_ptr,
    max_ptr,
    target_logit_ptr,
    rows,
    hidden,
    classes,
    scale,
    softcap,
    REPAIR: tl.constexpr,
    STORES: tl.constexpr,
    STATISTICS: tl.constexpr,
    W_BY_CLASS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Writes anchored exponentials and the float32 sums of them over each tile's classes: (29).

    Reads x (rows, D), w (V, D) or (D, V), anchor (rows,) float32; writes sum (class blocks, rows) and, with STORES,
    e (rows, V), times the cap's slope: (31). With STATISTICS also max (class blocks, rows), and target_logit (rows,) of
    the rows whose target (int64) is among these classes. Sets flag (row blocks,) int32 where a sum is not below
    SUM_LIMIT: the anchor is too low. With REPAIR, only tiles of flagged row blocks, in halves of them.
    """
    row_blocks, class_blocks = tl.cdiv(rows, BLOCK_N), tl.cdiv(classes, BLOCK_V)
    tiles = row_blocks * class_blocks
    if REPAIR:
        tiles = tl.where(any_flag(flag_ptr, (row_blocks + 1) // 2), tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not REPAIR):
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, GROUP)
        wanted = True
        if REPAIR:
            wanted = tl.load(flag_ptr + row_block // 2) != 0
        if wanted:
            row, column = row_block * BLOCK_N, class_block * BLOCK_V
            logits = logits_tile(
                x_desc, w_desc, bias_ptr, row, column, hidden, classes, scale, softcap,
                W_BY_CLASS, HAS_BIAS, HAS_SOFTCAP, PRECISION, BLOCK_N, BLOCK_V, BLOCK_D,
            )  # fmt: skip
            row_ids = row + tl.arange(0, BLOCK_N)
            columns = column + tl.arange(0, BLOCK_V)
            inside = row_ids < rows
            anchor = tl.load(anchor_ptr + row_ids, mask=inside, other=0.0)
            if column + BLOCK_V > classes:
                logits = tl.where((columns < classes)[None, :], logits, float("-inf"))
            exponentials = tl.exp2(logits * LOG2_E - anchor[:, None])
            out = class_block.to(tl.int64) * rows + row_ids
            total = tl.sum(exponentials, 1)
            tl.store(sum_ptr + out, total, mask=inside)
            if not REPAIR:
                tl.store(flag_ptr + row_block + tl.zeros_like(row_ids), 1, mask=inside & ~(total < SUM_LIMIT))
            if STATISTICS:
                tl.store(max_ptr + out, tl.max(logits, 1), mask=inside)
                store_target_logit(target_logit_ptr, target_ptr, logits, row_ids, column, inside, classes, BLOCK_V)
            if STORES:
                if HAS_SOFTCAP:
                    exponentials = tl.where(exponentials == 0, 0.0, exponentials * slope(logits, softcap))
                e_desc.store([row, column], exponentials.to(e_desc.dtype))


@triton.jit
def any_flag(flag_ptr, row_blocks):
    """Whether one of flag (row_blocks,) is set."""
    found = tl.zeros((128,), tl.int32)
    for start in range(0, row_blocks, 128):
        blocks = start + tl.arange(0, 128)
        found |= tl.load(flag_ptr + blocks, mask=blocks < row_blocks, other=0)
    return tl.max(found, 0) != 0


@triton.jit(do_not_specialize=SIZES)
def statistics_kernel(
    x_desc,
    w_desc,
    bias_ptr,
    class_weight_ptr,
    target_ptr,
    flag_ptr,
    max_ptr,
    sum_ptr,
    weighted_sum_ptr,
    sum_exp_log_ptr,
    target_logit_ptr,
    rows,
    hidden,
    classes,
    scale,
    softcap,
    REPAIR: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ENTROPY: tl.constexpr,
    W_BY_CLASS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Writes the statistics of each tile's rows over its classes, (class blocks, rows) float32 each: (25).

    Reads x (rows, D), w (V, D) or (D, V); target (rows,) int64, class indices of this stretch, and writes the target
    logit (rows,) of those among its classes. No logit leaves the program. With REPAIR only max, of flagged row
    blocks, in halves of them.
    """
    row_blocks, class_blocks = tl.cdiv(rows, BLOCK_N), tl.cdiv(classes, BLOCK_V)
    tiles = row_blocks * class_blocks
    if REPAIR:
        tiles = tl.where(any_flag(flag_ptr, (row_blocks + 1) // 2), tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not REPAIR):
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, GROUP)
        wanted = True
        if REPAIR:
            wanted = tl.load(flag_ptr + row_block // 2) != 0
        if wanted:
            row, column = row_block * BLOCK_N, class_block * BLOCK_V
            logits = logits_tile(
                x_desc, w_desc, bias_ptr, row, column, hidden, classes, scale, softcap,
                W_BY_CLASS, HAS_BIAS, HAS_SOFTCAP, PRECISION, BLOCK_N, BLOCK_V, BLOCK_D,
            )  # fmt: skip
            row_ids = row + tl.arange(0, BLOCK_N)
            columns = column + tl.arange(0, BLOCK_V)
            inside = row_ids < rows
            out = class_block.to(tl.int64) * rows + row_ids
            if WEIGHTED:  # past the last class logits are 0 still
                class_weight = tl.load(class_weight_ptr + columns, mask=columns < classes, other=0.0)
                tl.store(weighted_sum_ptr + out, tl.sum(logits * class_weight[None, :], 1), mask=inside)
            if column + BLOCK_V > classes:
                logits = tl.where((columns < classes)[None, :], logits, float("-inf"))
            top = tl.max(logits, 1)
            tl.store(max_ptr + out, top, mask=inside)
            if not REPAIR:
                shift = tl.where(top == float("-inf"), 0.0, top)
                exponentials = tl.exp2((logits - shift[:, None]) * LOG2_E)
                tl.store(sum_ptr + out, tl.sum(exponentials, 1), mask=inside)
                if ENTROPY:
                    shifted = tl.where(exponentials == 0, 0.0, logits - shift[:, None])
                    tl.store(sum_exp_log_ptr + out, tl.sum(exponentials * shifted, 1), mask=inside)
                store_target_logit(target_logit_ptr, target_ptr, logits, row_ids, column, inside, classes, BLOCK_V)


@triton.jit(do_not_specialize=SIZES)
def d_logits_kernel(
    x_desc,
    w_desc,
    d_logits_desc,
    bias_ptr,
    class_weight_ptr,
    target_ptr,
    row_weight_ptr,
    lse_ptr,
    alpha_ptr,
    tau_ptr,
    beta_ptr,
    sigma_ptr,
    rows,
    hidden,
    classes,
    scale,
    softcap,
    HAS_BETA: tl.constexpr,
    HAS_SIGMA: tl.constexpr,
    W_BY_CLASS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Writes d_logits of a slab of classes from logits computed again: (23), (15); zeros in rows of row_weight 0.

    Reads x (rows, D), w (V, D) or (D, V) of the slab, target (rows,) int64 within it, lse and the coefficients
    (rows,) float32, class_weight (V,); writes d_logits (rows, V), rounded once.
    """
    row_blocks, class_blocks = tl.cdiv(rows, BLOCK_N), tl.cdiv(classes, BLOCK_V)
    for tile in tl.range(tl.program_id(0), row_blocks * class_blocks, tl.num_programs(0), flatten=True):
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, GROUP)
        row, column = row_block * BLOCK_N, class_block * BLOCK_V
        logits = logits_tile(
            x_desc, w_desc, bias_ptr, row, column, hidden, classes, scale, softcap,
            W_BY_CLASS, HAS_BIAS, HAS_SOFTCAP, PRECISION, BLOCK_N, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        row_ids = row + tl.arange(0, BLOCK_N)
        columns = column + tl.arange(0, BLOCK_V)
        inside = row_ids < rows
        lse = tl.load(lse_ptr + row_ids, mask=inside, other=0.0)
        alpha = tl.load(alpha_ptr + row_ids, mask=inside, other=0.0)
        tau = tl.load(tau_ptr + row_ids, mask=inside, other=0.0)
        target = tl.load(target_ptr + row_ids, mask=inside, other=-1)
        contributes = tl.load(row_weight_ptr + row_ids, mask=inside, other=0.0) != 0
        log_prob = logits - lse[:, None]
        factor = alpha[:, None]
        if HAS_BETA:
            beta = tl.load(beta_ptr + row_ids, mask=inside, other=0.0)
            factor += beta[:, None] * tl.where(log_prob < NO_PROBABILITY, NO_PROBABILITY, log_prob)
        d_logits = tl.exp2(log_prob * LOG2_E) * factor
        if HAS_SIGMA:
            sigma = tl.load(sigma_ptr + row_ids, mask=inside, other=0.0)
            class_weight = tl.load(class_weight_ptr + columns, mask=columns < classes, other=0.0)
            d_logits -= sigma[:, None] * class_weight[None, :]
        d_logits = tl.where(columns[None, :] == target[:, None], d_logits - tau[:, None], d_logits)
        if HAS_SOFTCAP:
            d_logits *= slope(logits, softcap)
        d_logits = tl.where(contributes[:, None], d_logits, 0.0)
        d_logits_desc.store([row, column], d_logits.to(d_logits_desc.dtype))
