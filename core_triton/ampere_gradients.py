"""The gradient matmuls of plan A with scaled exponentials for compute capability 8.x and 12.x, in Gluon.

    d_weight = E^T (rho x)                      (V, D), summed over rows    `d_weight_kernel`, `d_weight_of_old_kernel`
    d_input  = rho (E W) + theta w_target       (n, D), summed over classes `d_input_kernel`

Both use the matmul of `ampere_common.py`. cuBLAS's kernels for sm_80 wait for the old tile of d_weight: on an H100 they
add chunks of 512 to 1,024 rows at 365 TFLOP/s, where one matmul of all rows reaches 458. Here the second program of a
multiprocessor multiplies meanwhile. cuBLAS's kernels do not split d_input's sum over the classes either, so they leave
multiprocessors idle: E W of 512 rows has few tiles. Here persistent programs divide the tiles as on Hopper
(`input_grad.py`).
"""

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from core_triton import tile_config
from core_triton.ampere_common import MMA, UNIT, Steps, multiply_tile, store_tile, tile_pointers
from core_triton.first_chunk import StoredExponentials
from core_triton.gluon_common import active_rows, chunk_power, eighths, quarters
from core_triton.input_grad import DInputIO, DInputLaunch, finish_rows, num_work_units, work_unit_of
from core_triton.kernels import NOT_SPECIALIZED, Active, head_with_contiguous_rows, piece_start
from core_triton.launch import cdiv, launch
from core_triton.problem import Problem, plan_of
from core_triton.tile_config import ScaledExpConfig, SplitKSchedule


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "start", "least"])
def d_weight_kernel(
    e_matrix, e_stride, x_matrix, x_stride, d_weight_ptr, count_ptr, start, least, rows, hidden, classes,
    ADDS: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HAS_POWER: gl.constexpr = False, old_ptr=None,
):  # fmt: skip
    """Writes a tile of d_weight = e^T x, or with ADDS adds it, rounded once: (33). With HAS_POWER e^T x is multiplied
    by `chunk_power`: (50). With old_ptr it is added to old (V, D), and d_weight is overwritten.

    Reads the first count - start rows, but at least `least`, of x (rows, D), already multiplied by rho, and of e (rows,
    V), with steps of BLOCK_N rows. The other rows may be NaN, and so may e from its last class on. D is a multiple of
    UNIT. A program writes one tile of d_weight (V, D). The blocks of D come first: e is read from memory once, and x
    stays in L2.
    """
    active = active_rows(count_ptr, start, least, rows)
    added_ptr = d_weight_ptr
    if old_ptr is not None:
        added_ptr = old_ptr
    d_blocks = gl.cdiv(hidden, BLOCK_D)
    v, d = (gl.program_id(0) // d_blocks) * BLOCK_V, (gl.program_id(0) % d_blocks) * BLOCK_D
    WIDTH: gl.constexpr = BLOCK_D // 4
    by_quarter: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    if active > 0:
        read_later = ()
        if ADDS:  # All programs of a wave load their old tiles at the same time, and wait: `AMPERE_EXPOSED`.
            read_later = (added_ptr, hidden, v, d, classes, hidden)
        acc = multiply_tile(
            e_matrix, e_stride, (), v, classes, x_matrix, x_stride, d, hidden, Steps(0, active), read_later,
            BLOCK_V, BLOCK_D, BLOCK_N, STAGES, False, True,
        )  # fmt: skip
        old = ()
        if ADDS:  # All quarters are loaded at once, to the registers that the operands of the matmul had.
            for i in gl.static_range(4):
                pointers, inside = tile_pointers(
                    added_ptr, hidden, v, d + i * WIDTH, classes, hidden, BLOCK_V, WIDTH, by_quarter
                )
                old = old + (gl.load(pointers, mask=inside, other=0.0),)
        if HAS_POWER:
            acc *= chunk_power(count_ptr)
        pieces = quarters(acc, MMA)
        for i in gl.static_range(4):
            total = gl.convert_layout(pieces[i], by_quarter)
            if ADDS:
                total += old[i].to(gl.float32)
            sums = total.to(d_weight_ptr.dtype.element_ty)
            store_tile(d_weight_ptr, hidden, sums, v, d + i * WIDTH, classes, hidden)


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "start", "least"])
def d_weight_of_old_kernel(
    e_matrix, e_stride, x_matrix, x_stride, old_ptr, d_weight_ptr, count_ptr, start, least, rows, hidden, classes,
    ADDS: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Writes a tile of d_weight = old + e^T x, for an old (V, D) that may have another dtype."""
    d_weight_kernel(
        e_matrix, e_stride, x_matrix, x_stride, d_weight_ptr, count_ptr, start, least, rows, hidden, classes,
        ADDS, BLOCK_V, BLOCK_D, BLOCK_N, STAGES, False, old_ptr,
    )  # fmt: skip


def add_d_weight(
    problem: Problem,
    e: Tensor,
    x: Tensor,
    active: Active,
    d_weight: Tensor,
    *,
    first: bool,
    old: Tensor | None = None,
) -> None:
    """Launches `d_weight_kernel`: adds e^T x to d_weight (K, D), or overwrites it if `first`. With `old` (K, D) writes
    the sum of that and e^T x to d_weight."""
    (n, classes), hidden, plan = e.shape, problem.input.shape[1], plan_of(problem)
    tile = plan.ampere_tile
    assert tile is not None
    launch(
        d_weight_kernel if old is None else d_weight_of_old_kernel,
        (cdiv(hidden, tile_config.D_BLOCK) * cdiv(classes, tile.block_v),),
        e,
        e.stride(0),
        x,
        x.stride(0),
        *([] if old is None else [old]),
        d_weight,
        *active,
        n,
        hidden,
        classes,
        ADDS=not first,
        **({"HAS_POWER": True} if plan.fits_float16 else {}),
        BLOCK_V=tile.block_v,
        BLOCK_D=tile_config.D_BLOCK,
        BLOCK_N=tile.block_d,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **({"arch": plan.arch} if plan.arch else {}),
    )


@gluon.jit
def add_last_classes(acc, w_matrix, w_stride, e_matrix, e_stride, pieces, row_ids, columns, rows, hidden, steps):
    """Adds the classes of `steps` to a tile, one at a time. The head is stored as (D, V). With `pieces`, of
    `ampere_common.rows_of`, the classes are all in one piece."""
    if len(pieces) > 0:
        others, piece, piece_rows = pieces
        e_matrix = piece_start(e_matrix, others, e_stride, piece, piece_rows, steps.first)
    e_pointers = e_matrix + row_ids.to(gl.int64) * e_stride
    w_pointers = w_matrix + columns.to(gl.int64) * w_stride
    for k in range(steps.first, steps.last):
        e = gl.load(e_pointers + k, mask=row_ids < rows, other=0.0).to(gl.float32)
        w = gl.load(w_pointers + k, mask=columns < hidden, other=0.0).to(gl.float32)
        acc += gl.expand_dims(e, 1) * gl.expand_dims(w, 0)
    return acc


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "start", *SplitKSchedule._fields])
def d_input_kernel(
    w_matrix, w_stride, e_matrix, e_stride, part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr,
    weight_stride, weight_stride_d, d_input_ptr, count_ptr, start, rows, hidden, classes,
    full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs,
    W_BY_CLASS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr, STAGES: gl.constexpr,
    others_matrix=None, piece=None, piece_rows=None, factor_ptr=None, mean_row_ptr=None,
):  # fmt: skip
    """`hopper_gradients.d_input_kernel`, with steps of BLOCK_V classes.

    e must be 0 from its last class to the next multiple of UNIT. With others_matrix, e has the first `piece` classes,
    and others_matrix ((pieces - 1) * piece_rows, piece) the others.
    """
    active = active_rows(count_ptr, start, 0, rows)
    d_blocks = gl.cdiv(hidden, BLOCK_D)
    schedule = SplitKSchedule(full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs)
    smooth = ()
    if mean_row_ptr is not None:
        smooth = (factor_ptr, mean_row_ptr)
    io = DInputIO(
        part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d, d_input_ptr,
        smooth,
    )  # fmt: skip
    e_pieces = ()
    if others_matrix is not None:
        e_pieces = (others_matrix, piece, piece_rows)
    # With smoothing, quarters would spill 8 bytes of registers on sm_80. Of a (D, V) head eighths would, 16 bytes.
    PARTS: gl.constexpr = 8 if mean_row_ptr is not None and W_BY_CLASS else 4
    WIDTH: gl.constexpr = BLOCK_D // PARTS
    by_part: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    # Values that do not depend on the unit would be computed before the loop, and their registers make others spill.
    for index in tl.range(0, num_work_units(schedule), disable_licm=True):
        unit = work_unit_of(index, schedule)
        row, d = (unit.tile // d_blocks) * BLOCK_N, (unit.tile % d_blocks) * BLOCK_D
        if row < active:
            first, last = unit.first * BLOCK_V, gl.minimum(unit.last * BLOCK_V, classes)
            whole = last
            if not W_BY_CLASS:
                # Rows of the head are read 16 bytes at a time. What follows the last class there may be NaN, so the
                # classes of the last, incomplete 16 bytes are added apart.
                whole = gl.minimum(last, classes // UNIT * UNIT)
            acc = multiply_tile(
                e_matrix, e_stride, e_pieces, row, rows, w_matrix, w_stride, d, hidden, Steps(first, whole), (),
                BLOCK_N, BLOCK_D, BLOCK_V, STAGES, not W_BY_CLASS,
            )  # fmt: skip
            row_ids = gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))
            columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, MMA))
            if not W_BY_CLASS:
                acc = add_last_classes(
                    acc, w_matrix, w_stride, e_matrix, e_stride, e_pieces, row + row_ids, d + columns, rows, hidden,
                    Steps(whole, last),
                )  # fmt: skip
            if unit.slot >= 0:  # transposed, as a partial tile is on Hopper
                within = gl.expand_dims(columns * BLOCK_N, 0) + gl.expand_dims(row_ids, 1)
                gl.store(io.part_ptr + unit.slot.to(gl.int64) * (BLOCK_D * BLOCK_N) + within, acc)
            else:
                if PARTS == 8:
                    pieces = eighths(acc, MMA)
                else:
                    pieces = quarters(acc, MMA)
                for i in gl.static_range(PARTS):
                    total = gl.convert_layout(pieces[i], by_part)
                    part_rows = row + gl.arange(0, BLOCK_N, gl.SliceLayout(1, by_part))
                    part_columns = d + i * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, by_part))
                    finish_rows(total, part_rows, part_columns, io, active, hidden, classes)


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "start", *SplitKSchedule._fields])
def d_input_of_pieces_kernel(
    w_matrix, w_stride, e_matrix, e_stride, others_matrix, part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr,
    weight_ptr, weight_stride, weight_stride_d, d_input_ptr, count_ptr, start, rows, hidden, classes,
    full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs, piece, piece_rows,
    W_BY_CLASS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`hopper_gradients.d_input_of_pieces_kernel`."""
    d_input_kernel(
        w_matrix, w_stride, e_matrix, e_stride, part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr,
        weight_stride, weight_stride_d, d_input_ptr, count_ptr, start, rows, hidden, classes,
        full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs,
        W_BY_CLASS, BLOCK_N, BLOCK_D, BLOCK_V, STAGES, others_matrix, piece, piece_rows,
    )  # fmt: skip


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "start", *SplitKSchedule._fields])
def smooth_d_input_kernel(
    w_matrix, w_stride, e_matrix, e_stride, part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr,
    weight_stride, weight_stride_d, d_input_ptr, count_ptr, start, rows, hidden, classes,
    full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs, factor_ptr, mean_row_ptr,
    W_BY_CLASS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`hopper_gradients.smooth_d_input_kernel`."""
    d_input_kernel(
        w_matrix, w_stride, e_matrix, e_stride, part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr,
        weight_stride, weight_stride_d, d_input_ptr, count_ptr, start, rows, hidden, classes,
        full_waves, split_tiles, split_factor, split_iters, iters_per_tile, tail_programs,
        W_BY_CLASS, BLOCK_N, BLOCK_D, BLOCK_V, STAGES, None, None, None, factor_ptr, mean_row_ptr,
    )  # fmt: skip


def d_input_launch(
    problem: Problem, config: ScaledExpConfig, stored: StoredExponentials, *, smooth: bool = False
) -> DInputLaunch:
    """Returns what `input_grad.store_d_input` launches. `stored` is not in pieces with `smooth`."""
    plan = plan_of(problem)
    tile = plan.ampere_tile
    assert tile is not None
    w = problem.linear_weight[: problem.classes]
    e, others, piece, piece_rows = stored.stores(slice(0, problem.classes))
    assert e is not None
    head, _, by_class = head_with_contiguous_rows(w, (tile.block_d, tile_config.D_BLOCK))
    constexprs = {
        "W_BY_CLASS": by_class,
        "BLOCK_N": config.d_input_rows,
        "BLOCK_D": tile_config.D_BLOCK,
        "BLOCK_V": tile.block_d,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
        **({"arch": plan.arch} if plan.arch else {}),
    }
    matrices = head, head.stride(0), e, e.stride(0)
    if others is None:
        return DInputLaunch(smooth_d_input_kernel if smooth else d_input_kernel, matrices, (), constexprs)
    return DInputLaunch(d_input_of_pieces_kernel, (*matrices, others), (piece, piece_rows), constexprs)
