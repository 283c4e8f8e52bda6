"""Plans A and B with anchored exponentials (MATH.md section 8).

Plan A is three products, whose operands are the exponentials that the logits' own product stores. It serves bfloat16
without label smoothing. A chunk of rows goes through, in this order,

    rows of the input that contribute, packed         `packed.pick_rows`
    exponentials and their sums                       `_store_exponentials`
    loss, and the factors of rows; x becomes rho x    `_finish_rows`
    d_weight += E^T (rho x)                           `_add_d_weight`
    d_input = rho (E W) + theta w_target              `_store_d_input`

and the targets' terms of d_weight come last, for all rows (`_add_target_rows`). Plan B is the first three, with nothing
stored but the sums, in any dtype.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from core_triton import fused_tiles, hopper_gradients, row_kernels, target_kernels
from core_triton.fused_tiles import AnchoredConfig
from core_triton.launch import (
    BLOCKS_AT_ONCE,
    SMALL_BLOCK,
    add_class_sums,
    card,
    cdiv,
    column_block,
    converts,
    describable,
    gluon_descriptor,
    head_slab,
    launch_tiles,
    merge,
    on_hopper,
    padded_hidden,
    tile_of_call,
    untyped,
)
from core_triton.packed import PackedRows, pack, pick_rows
from core_triton.problem import ClassSum, Gradients, NeedsGrad, Problem, add_product, operand
from core_triton.rows import RowStatistics


def anchored(
    problem: Problem, memory_budget: int, needs_grad: NeedsGrad, *, statistics: bool
) -> tuple[Tensor, RowStatistics, Gradients]:
    """Plan A, or plan B where no gradient is needed: each row's weighted loss (N,), its statistics, and the gradients
    of their sum; (29)-(33). Without `statistics` the largest logits are inf.

    Rows that contribute come first, packed, so that kernels can stop where they end, which the host does not know. A
    packed row never comes from an earlier place than it has, so chunks are taken from the last to the first: then
    d_input's own memory can hold a chunk's rows of the input until the chunk's gradient replaces them.
    """
    config = _config(problem, memory_budget, needs_grad, statistics=statistics)
    x, w, b = problem.input, problem.linear_weight, problem.linear_bias
    (tokens, hidden), classes = x.shape, problem.classes
    packed, rows_ = pack(problem, config.rows)
    d_input = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_grad.d_input else None
    d_weight = ClassSum(w, classes, float32_sum=False) if needs_grad.d_weight else None
    d_bias = problem.row_weight.new_zeros(classes) if needs_grad.d_bias else None

    stored = x.new_empty((config.rows, fused_tiles.padded(classes))) if any(needs_grad) else None
    # The input's rows of a chunk, zeros in those that do not contribute, and later times rho: in d_input's own memory,
    # or in one chunk's.
    holds = d_input is not None and describable(d_input)
    held = d_input if d_input is not None and holds else x.new_zeros((config.rows, padded_hidden(hidden, x.itemsize)))
    scratch = problem.row_weight.new_empty(config.scratch)
    chunks = list(problem.chunks(config.rows))
    for chunk in reversed(chunks):
        n, first = chunk.stop - chunk.start, chunk is chunks[-1]
        chunk_x = held[chunk] if holds else held[:n]
        e = None if stored is None else stored[:n, :classes]
        parts = scratch[: (1 + statistics) * config.blocks * n].view(-1, config.blocks, n)
        pick_rows(packed, chunk, rows_, chunk_x[:, :hidden])
        library = d_weight is not None and not _own_d_weight(problem, d_weight)
        _store_exponentials(packed, config, chunk, chunk_x, e, rows_, parts, least=n if library else int(first))
        if statistics:
            merge(parts[1], None, None, None)
            rows_.top_out.index_copy_(0, rows_.order[chunk], parts[1, 0])
        _finish_rows(packed, chunk, parts[0], rows_, e, None if d_weight is None else chunk_x)
        if e is not None and d_weight is not None:
            _add_d_weight(problem, chunk, e, chunk_x, rows_, d_weight, first=first)
        if e is not None and d_bias is not None:
            add_class_sums(d_bias, e, rows_.rho[chunk], first=first)
        if e is not None and d_input is not None:
            _store_d_input(packed, config, chunk, e, rows_, scratch, d_input)
        del chunk_x, e, parts
    del stored, held, scratch
    if d_input is not None and tokens:
        _zero_rows(problem.row_weight, d_input)
    if d_weight is not None or d_bias is not None:
        _add_target_rows(packed, rows_, None if d_weight is None else d_weight.sum, d_bias)
    found = RowStatistics(rows_.lse_out, rows_.target_logit_out, rows_.top_out, None, None)
    if d_bias is not None:
        assert b is not None
        d_bias = torch.cat([d_bias.to(b.dtype), b.new_zeros(len(b) - classes)])
    gradients = Gradients(d_input, None if d_weight is None else d_weight.result(empty=not tokens), d_bias)
    return rows_.loss_out, found, gradients


def _config(problem: Problem, memory_budget: int, needs_grad: NeedsGrad, *, statistics: bool) -> AnchoredConfig:
    tokens, hidden = problem.input.shape
    return fused_tiles.choose_anchored(
        tokens=tokens,
        hidden=padded_hidden(hidden, problem.input.itemsize),
        classes=problem.classes,
        itemsize=problem.input.itemsize,
        block_v=tile_of_call(problem).block_v,
        stores=any(needs_grad),
        d_input=needs_grad.d_input,
        holds=needs_grad.d_input and padded_hidden(hidden, problem.input.itemsize) == hidden,
        converts=converts(problem),
        statistics=statistics,
        programs=card(problem.input.device)[1] if _own_d_input(problem) else 0,
        budget=memory_budget,
    )


def _store_exponentials(
    problem: Problem,
    config: AnchoredConfig,
    chunk: slice,
    x: Tensor,
    e: Tensor | None,
    rows_: PackedRows,
    parts: Tensor,
    *,
    least: int,
) -> None:
    """Writes a chunk's exponentials e (n, K), if there, and their sums over class blocks, parts[0] (blocks, n).

    Where there is a parts[1] it takes the largest logits of class blocks, and rows_.target_logit the targets' logits.

    Row blocks whose logits leave the range of their anchor are done again under one made of their largest logit. The
    host does not know which: the launches that see to it find nothing to do where none is. Rows past those that
    contribute may be left as they are, but for the first `least`.
    """
    tile, n = tile_of_call(problem), len(x)
    row_blocks = cdiv(n, tile.block_n)
    flag = rows_.flag[chunk.start // config.rows]
    sums, tops = parts[0], parts[1] if len(parts) > 1 else None

    def each_slab(launch: Callable[[slice, Tensor, slice], None]) -> None:
        first_block = 0
        for slab in problem.slabs(config.head_rows):
            blocks = slice(first_block, first_block + cdiv(slab.stop - slab.start, tile.block_v))
            launch(slab, head_slab(problem, slab), blocks)
            first_block = blocks.stop

    def store(*, repair: bool) -> Callable[[slice, Tensor, slice], None]:
        def launch(slab: slice, w: Tensor, blocks: slice) -> None:
            arguments = {
                "target_ptr": None if tops is None else problem.target[chunk] - slab.start,
                "anchor_ptr": rows_.anchor[chunk],
                "flag_ptr": flag,
                "sum_ptr": sums[blocks],
                "max_ptr": None if tops is None else tops[blocks],
                "target_logit_ptr": rows_.target_logit[chunk],
                "count_ptr": rows_.count,
                "start": chunk.start,
                "least": least,
            }
            result = ("e_desc", None if e is None else e[:, slab])
            switches = {"STORES": e is not None, "STATISTICS": tops is not None}
            launch_tiles("exponentials_kernel", problem, x, w, slab, arguments, result, repair=repair, **switches)

        return launch

    def largest(slab: slice, w: Tensor, blocks: slice) -> None:
        names = ("class_weight_ptr", "target_ptr", "sum_ptr", "weighted_sum_ptr", "sum_exp_log_ptr", "target_logit_ptr")
        arguments = dict.fromkeys(names) | {"max_ptr": sums[blocks], "flag_ptr": flag}
        launch_tiles("statistics_kernel", problem, x, w, slab, arguments, repair=True, WEIGHTED=False, ENTROPY=False)

    each_slab(store(repair=False))
    each_slab(largest)
    untyped(row_kernels.anchor_kernel)[(row_blocks,)](
        sums,
        rows_.anchor[chunk],
        flag,
        n,
        len(sums),
        BLOCK_N=tile.block_n,
        BLOCK_T=BLOCKS_AT_ONCE,
        num_warps=8,
    )
    each_slab(store(repair=True))


FINISHED_ROWS = 8  # of a program of `_finish_rows`: enough programs to fill a card

FINISHED_COLUMNS = 512  # of the input that it scales at a time


def _finish_rows(
    problem: Problem, chunk: slice, parts: Tensor, rows_: PackedRows, e: Tensor | None, x: Tensor | None
) -> None:
    """Writes a chunk's loss, lse and target logit; with e also rho and theta, and zeroes the targets' exponentials;
    multiplies x (n, >= D), if there, by rho."""
    n, spec = chunk.stop - chunk.start, problem.spec
    untyped(row_kernels.finish_rows_kernel)[(cdiv(n, FINISHED_ROWS),)](
        parts,
        rows_.anchor[chunk],
        rows_.target_logit[chunk],
        problem.target[chunk],
        problem.row_weight[chunk],
        rows_.order[chunk],
        problem.class_weight,
        e,
        x,
        rows_.rho[chunk],
        rows_.theta[chunk],
        rows_.loss_out,
        rows_.lse_out,
        rows_.target_logit_out,
        n,
        len(parts),
        problem.classes,
        problem.input.shape[1],
        0 if e is None else e.stride(0),
        0 if x is None else x.stride(0),
        spec.z_loss_weight,
        spec.logit_scale,
        spec.softcap or 1.0,
        HAS_CLASS_WEIGHT=problem.class_weight is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        GRADIENTS=e is not None,
        SCALES=x is not None,
        BLOCK_N=FINISHED_ROWS,
        BLOCK_T=BLOCKS_AT_ONCE,
        BLOCK_D=FINISHED_COLUMNS,
        num_warps=4,
    )


def _add_d_weight(
    problem: Problem,
    chunk: slice,
    e: Tensor,
    x: Tensor,
    rows_: PackedRows,
    d_weight: ClassSum,
    *,
    first: bool,
) -> None:
    """Adds e^T @ x to d_weight, x (n, >= D) already times rho: (33) without the targets' terms."""
    classes, hidden = e.shape[1], problem.input.shape[1]
    if not _own_d_weight(problem, d_weight):
        d_weight.put_product(
            slice(0, classes), operand(e, e.dtype).T, operand(x[:, :hidden], x.dtype), None, first=first
        )
        return
    step, half, block_v = fused_tiles.D_WEIGHT_STEP, fused_tiles.D_BLOCK // 2, fused_tiles.CLASS_BLOCK
    programs = min(cdiv(hidden, fused_tiles.D_BLOCK) * cdiv(classes, block_v), card(x.device)[1])
    untyped(hopper_gradients.d_weight_kernel)[(programs,)](
        gluon_descriptor(x, [step, half]),
        gluon_descriptor(e, [step, block_v]),
        gluon_descriptor(d_weight.sum, [block_v // 4, half]),
        rows_.count,
        chunk.start,
        int(first),
        len(x),
        hidden,
        classes,
        STAGES=fused_tiles.D_WEIGHT_STAGES,
        ADDS=not first,
        num_warps=4,
    )


def _own_d_weight(problem: Problem, d_weight: ClassSum) -> bool:
    """Whether d_weight comes from the kernel, not from the library's product."""
    return on_hopper(problem) and d_weight.sum.dtype == problem.input.dtype and describable(d_weight.sum)


def _own_d_input(problem: Problem) -> bool:
    """Whether d_input comes from the kernel, not from the library's product and a pass over it."""
    return on_hopper(problem) and not converts(problem)


def _store_d_input(
    problem: Problem,
    config: AnchoredConfig,
    chunk: slice,
    e: Tensor,
    rows_: PackedRows,
    scratch: Tensor,
    d_input: Tensor,
) -> None:
    """Writes the rows of d_input of a chunk: (32)."""
    w, classes, hidden = problem.linear_weight, problem.classes, d_input.shape[1]
    if _own_d_input(problem):
        _launch_d_input(problem, config, chunk, e, rows_, scratch, d_input)
        return
    block = column_block(d_input)
    for start in range(chunk.start, chunk.stop, config.product_rows):
        piece = slice(start, min(start + config.product_rows, chunk.stop))
        rows_of_e = e[piece.start - chunk.start : piece.stop - chunk.start]
        product = scratch[: len(rows_of_e) * hidden].view(len(rows_of_e), hidden)
        for slab in problem.slabs(config.head_rows):
            # No name for the converted slab: it would live until the next one is there.
            slab_e = operand(rows_of_e[:, slab], e.dtype)
            add_product(product, slab_e, operand(problem.linear_weight[slab], e.dtype), first=slab.start == 0)
        untyped(row_kernels.d_input_kernel)[(len(product), cdiv(hidden, block))](
            product,
            rows_.rho[piece],
            rows_.theta[piece],
            problem.target[piece],
            problem.row_weight[piece],
            rows_.order[piece],
            w,
            d_input,
            hidden,
            classes,
            *w.stride(),
            BLOCK_D=block,
            num_warps=4,
        )


def _launch_d_input(
    problem: Problem,
    config: AnchoredConfig,
    chunk: slice,
    e: Tensor,
    rows_: PackedRows,
    scratch: Tensor,
    d_input: Tensor,
) -> None:
    """Launches the kernels that make the rows of d_input of a chunk."""
    w, (n, classes), hidden = problem.linear_weight, e.shape, d_input.shape[1]
    by_class, step, programs = w.stride(1) == 1, fused_tiles.D_INPUT_STEP, card(e.device)[1]
    w, tile_rows, half = w[:classes], config.product_rows, fused_tiles.D_BLOCK // 2
    blocks = cdiv(n, tile_rows) * cdiv(hidden, fused_tiles.D_BLOCK)
    shares = fused_tiles.choose_shares(blocks, cdiv(classes, step), programs, cut=config.cut)
    arguments = {
        "part_ptr": scratch,
        "rho_ptr": rows_.rho[chunk],
        "theta_ptr": rows_.theta[chunk],
        "target_ptr": problem.target[chunk],
        "row_ptr": rows_.order[chunk],
        "weight_ptr": w,
        "weight_stride": w.stride(0),
        "weight_stride_d": w.stride(1),
        "d_input_ptr": d_input,
        "count_ptr": rows_.count,
        "start": chunk.start,
        "rows": n,
        "hidden": hidden,
        "classes": classes,
        "rest": shares.rest,
        "cuts": shares.cuts,
        "spare": shares.spare,
    }
    untyped(hopper_gradients.d_input_kernel)[(programs,)](
        w_desc=gluon_descriptor(w if by_class else w.T, [step, half] if by_class else [half, step]),
        e_desc=gluon_descriptor(e, [tile_rows, step]),
        **arguments,
        rounds=shares.rounds,
        head=shares.head,
        steps=shares.steps,
        STAGES=fused_tiles.D_INPUT_STAGES,
        W_BY_CLASS=by_class,
        num_warps=4,
    )
    if shares.slots:
        untyped(hopper_gradients.d_input_sum_kernel)[(shares.rest, fused_tiles.D_BLOCK // 32, tile_rows // 64)](
            **arguments,
            first_tile=shares.rounds * programs,
            tail=shares.steps - shares.head,
            TILE_N=tile_rows,
            BLOCK_D=32,
            BLOCK_N=64,
            num_warps=4,
        )


def _zero_rows(row_weight: Tensor, result: Tensor) -> None:
    """Zeroes the rows of result (N, D) whose row_weight is 0."""
    tokens, hidden = result.shape
    untyped(row_kernels.zero_rows_kernel)[(cdiv(tokens, SMALL_BLOCK),)](
        row_weight, result, tokens, hidden, BLOCK_N=SMALL_BLOCK, BLOCK_D=column_block(result), num_warps=4
    )


STRETCH = 2**13  # rows whose targets are compared each with each; of two stretches only by bisection


def _add_target_rows(problem: Problem, rows_: PackedRows, d_weight: Tensor | None, d_bias: Tensor | None) -> None:
    """Adds theta * input to the targets' rows of d_weight, theta to d_bias: (33)."""
    x, (tokens, hidden) = problem.input, problem.input.shape
    if not tokens:
        return
    target, row, theta = _sorted_by_target(problem, rows_)
    block = column_block(x)
    untyped(target_kernels.target_rows_kernel)[(tokens, cdiv(hidden, block) if d_weight is not None else 1)](
        target,
        row,
        theta,
        rows_.count,
        x,
        d_weight,
        d_bias,
        hidden,
        problem.classes,
        *x.stride(),
        HAS_WEIGHT=d_weight is not None,
        HAS_BIAS=d_bias is not None,
        FEW=2,
        MANY=32,
        SPLIT=8,
        BLOCK_D=block,
        num_warps=4,
    )


def _sorted_by_target(problem: Problem, rows_: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
    """Returns target (N,) int32, row (N,) int64 and theta (N,) of the packed rows in the order of their targets."""

    def arrays() -> tuple[Tensor, Tensor, Tensor]:
        return rows_.count.new_empty(len(rows_.order)), torch.empty_like(rows_.order), torch.empty_like(rows_.theta)

    tokens, found = len(rows_.order), arrays()
    untyped(target_kernels.sort_kernel)[(cdiv(tokens, 32),)](
        problem.target,
        rows_.order,
        rows_.theta,
        rows_.count,
        *found,
        problem.classes,
        STRETCH=STRETCH,
        BLOCK_N=32,
        BLOCK_OTHER=256,
        num_warps=8,
    )
    if tokens > STRETCH:
        merged = arrays()
        untyped(target_kernels.merge_stretches_kernel)[(cdiv(tokens, 128),)](
            *found, rows_.count, *merged, STRETCH=STRETCH, BISECTIONS=STRETCH.bit_length(), BLOCK_N=128, num_warps=4
        )
        return merged
    return found
