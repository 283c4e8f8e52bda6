"""The loss with the Triton kernels: plans A, B and C of `chunked.py` in fewer products and passes.

    plan A  `loss_and_gradients`  3 products: the logits' own stores exponentials instead of logits (MATH.md section 8),
                                  and the gradients are products of those. Serves bfloat16 without label smoothing;
                                  other calls compute logits twice, 4 products
    plan B  `statistics`          1 product, whose tiles of logits never leave the multiprocessor
    plan C  `gradients`           1 + 3 products: d_logits come from logits computed again, slab by slab

Plans B and C walk chunks and slabs as `chunked` does, with tiles made by kernels. Products whose result is a matrix are
the library's (cuBLAS).
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gluon
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from core_triton import chunked, hopper, hopper_gradients, kernels, rows, tiles
from core_triton.chunked import Gradients, Problem, RowGradient, Tiles, Wanted
from core_triton.rows import Coefficients, Partial, RowStatistics
from core_triton.tiles import AnchoredConfig, ChunkConfig, TileConfig

SMALL_BLOCK = 16  # rows of a program that sums over class blocks: enough programs to fill a card
BLOCKS_AT_ONCE = 64  # class blocks that such a program reads at a time
_GLUON_DTYPES = {torch.bfloat16: gluon.bfloat16, torch.float16: gluon.float16}


def check_budget(problem: Problem, memory_budget: int, wanted: Wanted, *, entropy: bool = False) -> None:
    """Raises ValueError where `gradients` could not keep within the budget: known before the forward pass runs."""
    _recomputed_config(problem, memory_budget, wanted, entropy=entropy)


def statistics(problem: Problem, memory_budget: int, *, entropy: bool = False) -> RowStatistics:
    """Plan B: statistics of every row, no gradient."""
    config = _recomputed_config(problem, memory_budget, chunked.NOTHING, entropy=entropy)
    with _on_device(problem):
        return chunked.statistics_by(KERNEL_TILES, problem, config, entropy)


def loss_and_gradients(
    problem: Problem,
    memory_budget: int,
    wanted: Wanted,
    scales: tuple[Tensor, Tensor] | None,
    *,
    statistics: bool,
) -> tuple[Tensor, RowStatistics, Gradients]:
    """Plan A: each row's weighted loss (N,), its statistics, and the gradients of their sum, times `scales`.

    Without `statistics` the largest logits are NaN.
    """
    with _on_device(problem):
        if problem.input.dtype == torch.bfloat16 and not problem.spec.label_smoothing:
            return _anchored(problem, memory_budget, wanted, statistics=statistics)
        config = _recomputed_config(problem, memory_budget, wanted, entropy=False)
        return chunked.loss_and_gradients_by(KERNEL_TILES, problem, config, wanted, scales)


def gradients(
    problem: Problem, memory_budget: int, lse: Tensor, coefficients: Coefficients, wanted: Wanted
) -> Gradients:
    """Plan C's backward pass: the gradients under any upstream gradient, from lse alone."""
    config = _recomputed_config(problem, memory_budget, wanted, entropy=coefficients.beta is not None)
    with _on_device(problem):
        return chunked.gradients_by(KERNEL_TILES, problem, config, lse, coefficients, wanted)


# Plans B and C: tiles of `chunked` made by kernels.


def _partial(
    problem: Problem, x: Tensor, w: Tensor, target: Tensor, slab: slice, kept: None, *, entropy: bool
) -> Partial:
    n, blocks = x.shape[0], triton.cdiv(slab.stop - slab.start, _tile(problem).block_v)
    weighted = problem.spec.label_smoothing != 0
    part = x.new_empty((2 + weighted + entropy, blocks, n), dtype=torch.float32)
    top, sum_exp = part[0], part[1]
    weighted_sum = part[2] if weighted else None
    sum_exp_log = part[2 + weighted] if entropy else None
    target_logit = top.new_zeros(n)
    arguments = {
        "class_weight_ptr": _class_weight(problem, slab) if weighted else None,
        "target_ptr": target - (problem.vocab_offset + slab.start),
        "max_ptr": top,
        "sum_ptr": sum_exp,
        "weighted_sum_ptr": weighted_sum,
        "sum_exp_log_ptr": sum_exp_log,
        "target_logit_ptr": target_logit,
    }
    _launch_tiles("statistics_kernel", problem, x, w, slab, arguments, WEIGHTED=weighted, ENTROPY=entropy)
    _merge(top, sum_exp, weighted_sum, sum_exp_log)
    return Partial(
        top[0],
        sum_exp[0],
        target_logit,
        None if weighted_sum is None else weighted_sum[0],
        None if sum_exp_log is None else sum_exp_log[0],
    )


def _merge(top: Tensor, sum_exp: Tensor | None, weighted_sum: Tensor | None, sum_exp_log: Tensor | None) -> None:
    """Merges statistics over class blocks into their first row."""
    blocks, n = top.shape
    _kernel(kernels.merge_kernel)[(triton.cdiv(n, SMALL_BLOCK),)](
        top,
        sum_exp,
        weighted_sum,
        sum_exp_log,
        n,
        blocks,
        SUMS=sum_exp is not None,
        WEIGHTED=weighted_sum is not None,
        ENTROPY=sum_exp_log is not None,
        BLOCK_N=SMALL_BLOCK,
        BLOCK_T=BLOCKS_AT_ONCE,
        num_warps=4,
    )


def _d_logits(
    problem: Problem, x: Tensor, w: Tensor, chunk: slice, slab: slice, row: RowGradient, kept: None
) -> tuple[Tensor, Tensor | None]:
    n, classes, coefficients = x.shape[0], slab.stop - slab.start, row.coefficients
    d_logits = x.new_empty((n, tiles.padded(classes)), dtype=problem.input.dtype)[:, :classes]
    arguments = {
        "class_weight_ptr": None if coefficients.sigma is None else _class_weight(problem, slab),
        "target_ptr": problem.target[chunk] - (problem.vocab_offset + slab.start),
        "row_weight_ptr": problem.row_weight[chunk],
        "lse_ptr": row.lse,
        "alpha_ptr": coefficients.alpha,
        "tau_ptr": coefficients.tau,
        "beta_ptr": coefficients.beta,
        "sigma_ptr": coefficients.sigma,
    }
    switches = {"HAS_BETA": coefficients.beta is not None, "HAS_SIGMA": coefficients.sigma is not None}
    _launch_tiles("d_logits_kernel", problem, x, w, slab, arguments, result=("d_logits_desc", d_logits), **switches)
    summed = None
    if row.bias:
        summed = row.lse.new_empty(classes)
        factor = torch.ones_like(row.lse) if row.bias_scale is None else row.bias_scale
        _add_class_sums(summed, d_logits, factor, first=True)
    return d_logits if d_logits.is_cuda else d_logits.float(), summed


KERNEL_TILES = Tiles(_partial, _d_logits)


def _add_class_sums(total: Tensor, matrix: Tensor, factor: Tensor, *, first: bool) -> None:
    """Adds the sums over rows of factor (n,) * matrix (n, v) to `total` (v,) float32, or overwrites it if `first`."""
    n, classes = matrix.shape
    _kernel(kernels.class_sums_kernel)[(triton.cdiv(classes, 64),)](
        matrix, factor, total, n, classes, matrix.stride(0), ADDS=not first, BLOCK_N=128, BLOCK_V=64, num_warps=4
    )


def _class_weight(problem: Problem, slab: slice) -> Tensor:
    found = problem.slab_class_weight(slab)
    return problem.row_weight.new_ones(slab.stop - slab.start) if found is None else found


# Plan A with anchored exponentials.


def _anchored(
    problem: Problem, memory_budget: int, wanted: Wanted, *, statistics: bool
) -> tuple[Tensor, RowStatistics, Gradients]:
    """Plan A: the logits' product stores exponentials, and the gradients are products of those; (29)-(33).

    Rows that contribute come first, packed, so that kernels can stop where they end, which the host does not know. A
    packed row never comes from an earlier place than it has, so chunks are taken from the last to the first: then
    d_input's own memory can hold a chunk's rows of the input until the chunk's gradient replaces them.
    """
    config = _anchored_config(problem, memory_budget, wanted, statistics=statistics)
    spec, x, w, b = problem.spec, problem.input, problem.linear_weight, problem.linear_bias
    (tokens, hidden), classes = x.shape, problem.classes
    packed, rows_ = _pack(problem, config)
    d_input = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted.d_input else None
    d_weight = chunked.ClassSum(w, classes, float32_sum=False) if wanted.d_weight else None
    d_bias = problem.row_weight.new_zeros(classes) if wanted.d_bias else None

    exponentials = x.new_empty((config.rows, tiles.padded(classes)))
    held = d_input  # the input's rows of a chunk, zeros in those that do not contribute; later times rho
    if d_input is None or not _describable(d_input):
        held = x.new_zeros((config.rows, _padded_hidden(hidden, x.itemsize)))
    scratch = problem.row_weight.new_empty(config.scratch)
    chunks = list(problem.chunks(config.rows))
    for chunk in reversed(chunks):
        n, first = chunk.stop - chunk.start, chunk is chunks[-1]
        chunk_x = held[chunk] if held is d_input else held[:n]
        e = exponentials[:n, :classes]
        parts = scratch[: (1 + statistics) * config.blocks * n].view(-1, config.blocks, n)
        _scale_rows(x, packed.row_weight[chunk], chunk_x[:, :hidden], picks=rows_.order[chunk])
        library = d_weight is not None and not _own_d_weight(problem, d_weight)
        _store_exponentials(packed, config, chunk, chunk_x, e, rows_, parts, least=n if library else int(first))
        if statistics:
            _merge(parts[1], None, None, None)
            rows_.top_out.index_copy_(0, rows_.order[chunk], parts[1, 0])
        _row_factors(packed, chunk, parts[0], rows_, e)
        if d_weight is not None:
            _scale_rows(chunk_x, rows_.rho[chunk], chunk_x)
            _add_d_weight(problem, chunk, e, chunk_x, rows_, d_weight, first=first)
        if d_bias is not None:
            _add_class_sums(d_bias, e, rows_.rho[chunk], first=first)
        if d_input is not None:
            _store_d_input(packed, config, chunk, e, rows_, scratch, d_input)
        del chunk_x, e, parts
    del exponentials, held, scratch
    if tokens:
        if d_input is not None:
            block = _column_block(d_input)
            _kernel(kernels.zero_rows_kernel)[(tokens, triton.cdiv(hidden, block))](
                problem.row_weight, d_input, hidden, BLOCK_D=block
            )
        _add_target_rows(problem, rows_.theta_out, None if d_weight is None else d_weight.sum, d_bias)
    found = RowStatistics(rows_.lse_out, rows_.target_logit_out, rows_.top_out, None, None)
    loss = rows.row_loss(spec, found, problem.target, problem.row_weight, problem.class_weight, classes)
    if d_bias is not None:
        assert b is not None
        d_bias = torch.cat([d_bias.to(b.dtype), b.new_zeros(len(b) - classes)])
    return loss, found, Gradients(d_input, None if d_weight is None else d_weight.result(empty=not tokens), d_bias)


class _PackedRows(NamedTuple):
    """What plan A knows and finds of the rows, (N,) float32 where nothing else is said: packed, or in the call's order
    where the name ends in _out."""

    order: Tensor  # int64, the row of the call that a packed row is
    count: Tensor  # () int32, how many contribute
    flag: Tensor  # (chunks, row blocks) int32: a block's anchors are too low
    target_logit: Tensor
    anchor: Tensor
    rho: Tensor
    theta: Tensor
    lse_out: Tensor
    target_logit_out: Tensor
    theta_out: Tensor
    top_out: Tensor  # the largest logit, NaN if not wanted


def _pack(problem: Problem, config: AnchoredConfig) -> tuple[Problem, _PackedRows]:
    """Returns the problem with targets and row weights packed, its input as it was, and the rows' arrays."""
    row_weight, tokens = problem.row_weight, len(problem.input)
    order, target, packed_weight, count = _packed_order(problem.target, row_weight)
    packed = replace(problem, target=target, row_weight=packed_weight)
    blocks = triton.cdiv(config.rows, _tile(problem).block_n)
    flag = torch.zeros((triton.cdiv(tokens, config.rows), blocks), dtype=torch.int32, device=row_weight.device)
    numbers = [torch.empty_like(row_weight) for _ in range(7)]
    rows_ = _PackedRows(order, count, flag, *numbers, torch.full_like(row_weight, torch.nan))
    if tokens:
        _store_target_logits(packed, rows_)
    return packed, rows_


def _anchored_config(problem: Problem, memory_budget: int, wanted: Wanted, *, statistics: bool) -> AnchoredConfig:
    tokens, hidden = problem.input.shape
    return tiles.choose_anchored(
        tokens=tokens,
        hidden=_padded_hidden(hidden, problem.input.itemsize),
        classes=problem.classes,
        block_v=_tile(problem).block_v,
        d_input=wanted.d_input,
        holds=wanted.d_input and _padded_hidden(hidden, problem.input.itemsize) == hidden,
        converts=_converts(problem),
        statistics=statistics,
        programs=_card(problem.input.device)[1] if _own_d_input(problem) else 0,
        budget=memory_budget,
    )


def _packed_order(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the order (N,) int64 that takes the entries of `weight` other than 0 to the front, values and weight in
    it, and their count () int32."""
    order = torch.empty_like(values, dtype=torch.int64)
    packed, packed_weight = torch.empty_like(values), torch.empty_like(weight)
    count = torch.empty((), dtype=torch.int32, device=weight.device)
    _kernel(kernels.pack_kernel)[(1,)](
        values, weight, order, packed, packed_weight, count, len(values), BLOCK=4096, num_warps=8
    )
    return order, packed, packed_weight, count


def _store_target_logits(packed: Problem, rows_: _PackedRows) -> None:
    """Writes each packed row's target logit, NaN where the target is no class, and anchor."""
    x, w, spec = packed.input, packed.linear_weight, packed.spec
    _kernel(kernels.target_logit_kernel)[(len(x),)](
        x,
        w,
        packed.linear_bias,
        packed.target,
        packed.row_weight,
        rows_.order,
        rows_.target_logit,
        rows_.anchor,
        x.shape[1],
        packed.classes,
        *x.stride(),
        *w.stride(),
        spec.logit_scale,
        spec.softcap or 1.0,
        HAS_BIAS=packed.linear_bias is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        BLOCK_D=_column_block(x),
        num_warps=4,
    )


def _store_exponentials(
    problem: Problem,
    config: AnchoredConfig,
    chunk: slice,
    x: Tensor,
    e: Tensor,
    rows_: _PackedRows,
    parts: Tensor,
    *,
    least: int,
) -> None:
    """Writes a chunk's exponentials e (n, K) and their sums over class blocks, parts[0] (blocks, n).

    Where there is a parts[1] it takes the largest logits of class blocks, and rows_.target_logit the targets' logits.

    Row blocks whose logits leave the range of their anchor are done again under one made of their largest logit. The
    host does not know which: the launches that see to it find nothing to do where none is. Rows past those that
    contribute may be left as they are, but for the first `least`.
    """
    tile, n = _tile(problem), len(x)
    row_blocks = triton.cdiv(n, tile.block_n)
    flag = rows_.flag[chunk.start // config.rows]
    sums, tops = parts[0], parts[1] if len(parts) > 1 else None

    def each_slab(launch: Callable[[slice, Tensor, slice], None]) -> None:
        first_block = 0
        for slab in problem.slabs(config.head_rows):
            blocks = slice(first_block, first_block + triton.cdiv(slab.stop - slab.start, tile.block_v))
            launch(slab, _slab(problem, slab), blocks)
            first_block = blocks.stop

    def store(*, repair: bool) -> Callable[[slice, Tensor, slice], None]:
        def launch(slab: slice, w: Tensor, blocks: slice) -> None:
            arguments = {
                "target_ptr": problem.target[chunk] - slab.start,
                "anchor_ptr": rows_.anchor[chunk],
                "flag_ptr": flag,
                "sum_ptr": sums[blocks],
                "max_ptr": None if tops is None else tops[blocks],
                "target_logit_ptr": rows_.target_logit[chunk],
                "count_ptr": rows_.count,
                "start": chunk.start,
                "least": least,
            }
            result = ("e_desc", e[:, slab])
            switches = {"STATISTICS": tops is not None}
            _launch_tiles("exponentials_kernel", problem, x, w, slab, arguments, result, repair=repair, **switches)

        return launch

    def largest(slab: slice, w: Tensor, blocks: slice) -> None:
        names = ("class_weight_ptr", "target_ptr", "sum_ptr", "weighted_sum_ptr", "sum_exp_log_ptr", "target_logit_ptr")
        arguments = dict.fromkeys(names) | {"max_ptr": sums[blocks], "flag_ptr": flag}
        _launch_tiles("statistics_kernel", problem, x, w, slab, arguments, repair=True, WEIGHTED=False, ENTROPY=False)

    each_slab(store(repair=False))
    each_slab(largest)
    _kernel(kernels.anchor_kernel)[(row_blocks,)](
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


def _row_factors(problem: Problem, chunk: slice, parts: Tensor, rows_: _PackedRows, e: Tensor) -> None:
    """Writes a chunk's rho and theta, and zeroes the targets' exponentials; lse, target logit and theta go out."""
    n, spec = chunk.stop - chunk.start, problem.spec
    _kernel(kernels.row_factors_kernel)[(triton.cdiv(n, SMALL_BLOCK),)](
        parts,
        rows_.anchor[chunk],
        rows_.target_logit[chunk],
        problem.target[chunk],
        problem.row_weight[chunk],
        rows_.order[chunk],
        problem.class_weight,
        e,
        rows_.rho[chunk],
        rows_.theta[chunk],
        rows_.lse_out,
        rows_.target_logit_out,
        rows_.theta_out,
        n,
        len(parts),
        problem.classes,
        e.stride(0),
        spec.z_loss_weight,
        spec.logit_scale,
        spec.softcap or 1.0,
        HAS_CLASS_WEIGHT=problem.class_weight is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        BLOCK_N=SMALL_BLOCK,
        BLOCK_T=BLOCKS_AT_ONCE,
        num_warps=4,
    )


def _scale_rows(source: Tensor, factor: Tensor, result: Tensor, *, picks: Tensor | None = None) -> None:
    """Writes factor (n,) * source (n, D) to result (n, D), or rows `picks` (n,) of it as they are; zeros where factor
    is 0."""
    n, hidden = result.shape
    block = _column_block(source)
    _kernel(kernels.rows_kernel)[(n, triton.cdiv(hidden, block))](
        source,
        picks,
        factor,
        result,
        hidden,
        *source.stride(),
        result.stride(0),
        PICKS=picks is not None,
        BLOCK_D=block,
        num_warps=4,
    )


def _add_d_weight(
    problem: Problem,
    chunk: slice,
    e: Tensor,
    x: Tensor,
    rows_: _PackedRows,
    d_weight: chunked.ClassSum,
    *,
    first: bool,
) -> None:
    """Adds e^T @ x to d_weight, x (n, >= D) already times rho: (33) without the targets' terms."""
    classes, hidden = e.shape[1], problem.input.shape[1]
    if not _own_d_weight(problem, d_weight):
        d_weight.put_product(slice(0, classes), _operand(e).T, _operand(x[:, :hidden]), None, first=first)
        return
    step, half, block_v = tiles.D_WEIGHT_STEP, tiles.D_BLOCK // 2, 256
    programs = min(triton.cdiv(hidden, tiles.D_BLOCK) * triton.cdiv(classes, block_v), _card(x.device)[1])
    _kernel(hopper_gradients.d_weight_kernel)[(programs,)](
        _gluon_descriptor(x, [step, half]),
        _gluon_descriptor(e, [step, block_v]),
        _gluon_descriptor(d_weight.sum, [block_v, half]),
        rows_.count,
        chunk.start,
        int(first),
        len(x),
        hidden,
        classes,
        STAGES=tiles.D_WEIGHT_STAGES,
        ADDS=not first,
        num_warps=4,
    )


def _own_d_weight(problem: Problem, d_weight: chunked.ClassSum) -> bool:
    """Whether d_weight comes from the kernel, not from the library's product."""
    return _hopper(problem) and d_weight.sum.dtype == problem.input.dtype and _describable(d_weight.sum)


def _own_d_input(problem: Problem) -> bool:
    """Whether d_input comes from the kernel, not from the library's product and a pass over it."""
    return _hopper(problem) and not _converts(problem)


def _store_d_input(
    problem: Problem,
    config: AnchoredConfig,
    chunk: slice,
    e: Tensor,
    rows_: _PackedRows,
    scratch: Tensor,
    d_input: Tensor,
) -> None:
    """Writes the rows of d_input of a chunk: (32)."""
    w, classes, hidden = problem.linear_weight, problem.classes, d_input.shape[1]
    if _own_d_input(problem):
        _launch_d_input(problem, config, chunk, e, rows_, scratch, d_input)
        return
    block = _column_block(d_input)
    for start in range(chunk.start, chunk.stop, config.product_rows):
        piece = slice(start, min(start + config.product_rows, chunk.stop))
        rows_of_e = e[piece.start - chunk.start : piece.stop - chunk.start]
        product = scratch[: len(rows_of_e) * hidden].view(len(rows_of_e), hidden)
        for slab in problem.slabs(config.head_rows):
            chunked.add_product(
                product, _operand(rows_of_e[:, slab]), _operand(_slab(problem, slab)), first=slab.start == 0
            )
        _kernel(kernels.d_input_kernel)[(len(product), triton.cdiv(hidden, block))](
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
    rows_: _PackedRows,
    scratch: Tensor,
    d_input: Tensor,
) -> None:
    w, (n, classes), hidden = problem.linear_weight, e.shape, d_input.shape[1]
    by_class, step, programs = w.stride(1) == 1, tiles.D_INPUT_STEP, _card(e.device)[1]
    w, tile_rows = w[:classes], config.product_rows
    blocks = triton.cdiv(n, tile_rows) * triton.cdiv(hidden, tiles.D_BLOCK)
    shares = tiles.choose_shares(blocks, triton.cdiv(classes, step), programs, cut=config.cut)
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
    _kernel(hopper_gradients.d_input_kernel)[(programs,)](
        w_desc=_gluon_descriptor(w if by_class else w.T, [step, 64] if by_class else [64, step]),
        e_desc=_gluon_descriptor(e, [tile_rows, step]),
        **arguments,
        rounds=shares.rounds,
        head=shares.head,
        steps=shares.steps,
        STAGES=tiles.D_INPUT_STAGES,
        W_BY_CLASS=by_class,
        num_warps=4,
    )
    if shares.slots:
        _kernel(hopper_gradients.d_input_sum_kernel)[(shares.rest, tiles.D_BLOCK // 32, tile_rows // 64)](
            **arguments,
            first_tile=shares.rounds * programs,
            tail=shares.steps - shares.head,
            TILE_N=tile_rows,
            BLOCK_D=32,
            BLOCK_N=64,
            num_warps=4,
        )


def _add_target_rows(problem: Problem, theta: Tensor, d_weight: Tensor | None, d_bias: Tensor | None) -> None:
    """Adds theta * input to the targets' rows of d_weight, theta to d_bias: (33)."""
    if d_weight is None and d_bias is None:
        return
    x, target = problem.input, problem.target
    is_class = (problem.row_weight != 0) & (target >= 0) & (target < problem.classes)
    keys = torch.where(is_class, target, -1).int()  # a radix sort of half the passes
    ordered, order = torch.sort(keys, stable=True)
    end = torch.searchsorted(ordered, ordered, right=True, out_int32=True)
    starts = torch.cat([ordered[:1] >= 0, ordered[1:] != ordered[:-1]]).float()
    first, found, _, count = _packed_order(ordered, starts)
    block = _column_block(x)
    programs = min(len(x), 8 * _card(x.device)[1])
    _kernel(kernels.target_rows_kernel)[(programs, triton.cdiv(x.shape[1], block) if d_weight is not None else 1)](
        order,
        found,
        first,
        end,
        count,
        theta,
        x,
        d_weight,
        d_bias,
        x.shape[1],
        problem.classes,
        *x.stride(),
        HAS_WEIGHT=d_weight is not None,
        HAS_BIAS=d_bias is not None,
        BLOCK_R=4,  # most runs are short, and what is masked costs as much as what is not
        BLOCK_D=block,
        num_warps=4,
    )


def _slab(problem: Problem, slab: slice) -> Tensor:
    """Returns the slab of the head in the input's dtype."""
    return problem.linear_weight[slab].to(problem.input.dtype)


def _operand(matrix: Tensor) -> Tensor:
    return matrix if matrix.is_cuda else matrix.float()


def _column_block(matrix: Tensor) -> int:
    """Columns of a program that owns part of a row: up to eight elements a thread of four warps."""
    return min(1024, max(16, triton.next_power_of_2(matrix.shape[1])))


# Launching.


def _kernel(function: Any) -> Any:
    """Triton's launcher has no types."""
    return function


def _launch_tiles(
    name: str,
    problem: Problem,
    x: Tensor,
    w: Tensor,
    slab: slice,
    arguments: dict[str, Any],
    result: tuple[str, Tensor] | None = None,
    *,
    repair: bool = False,
    **switches: bool,
) -> None:
    """Launches one of the kernels that multiply, on the rows x (n, D) and the slab w (v, D) of the head.

    Hopper's own kernels, unless the operands are float32 or it is a `repair`: only flagged blocks of rows are done
    then, which is seldom and need not be fast.
    """
    tile = _tile(problem)
    x, w = _for_descriptor(x), _for_descriptor(w)
    by_class = w.stride(1) == 1
    n, hidden, classes = x.shape[0], x.shape[1], slab.stop - slab.start
    bias = None if problem.linear_bias is None else problem.linear_bias[slab]
    common = {
        "bias_ptr": bias,
        "rows": n,
        "hidden": hidden,
        "classes": classes,
        "scale": problem.spec.logit_scale,
        "softcap": problem.spec.softcap or 1.0,
        "W_BY_CLASS": by_class,
        "HAS_BIAS": bias is not None,
        "HAS_SOFTCAP": problem.spec.softcap is not None,
        "BLOCK_V": tile.block_v,
        "GROUP": tile.group,
    }
    if _hopper(problem) and not repair:
        kernel = getattr(hopper, name)
        describe, half, step = _gluon_descriptor, tile.block_n // 2, tiles.LOGITS_STEP
        blocks, result_block = [(half, step), (tile.block_v, step)], [half, tile.block_v // 4]
        common |= {"STAGES": tiles.LOGITS_STAGES, "num_warps": 4}
    else:
        kernel = getattr(kernels, name)
        describe = TensorDescriptor.from_tensor
        blocks = [(tile.block_n, tile.block_d), (tile.block_v, tile.block_d)]
        result_block = [tile.block_n, tile.block_v]
        common |= {"PRECISION": _precision(x), "BLOCK_N": tile.block_n, "BLOCK_D": tile.block_d}
        common |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if name != "d_logits_kernel":
            arguments = {"flag_ptr": None, **arguments}
            common["REPAIR"] = repair
        for packed in ("count_ptr", "start", "least"):  # all rows are done here
            arguments.pop(packed, None)
    descriptors = {
        "x_desc": describe(x, list(blocks[0])),
        "w_desc": describe(w, list(blocks[1])) if by_class else describe(w.T, list(reversed(blocks[1]))),
    }
    if result is not None:
        descriptors[result[0]] = describe(result[1], result_block)
    programs = min(triton.cdiv(n, tile.block_n) * triton.cdiv(classes, tile.block_v), _card(x.device)[1])
    kernel[(programs,)](**descriptors, **arguments, **common, **switches)


def _gluon_descriptor(matrix: Tensor, block: list[int]) -> GluonDescriptor:
    layout = gluon.NVMMASharedLayout.get_default_for(block, _GLUON_DTYPES[matrix.dtype])
    return GluonDescriptor.from_tensor(matrix, block, layout)


def _hopper(problem: Problem) -> bool:
    """Whether the Hopper kernels serve a call: 16-bit operands on sm_90."""
    return problem.input.is_cuda and problem.input.itemsize == 2 and _card(problem.input.device)[0] == 90


def _for_descriptor(matrix: Tensor) -> Tensor:
    """Returns a matrix that a tensor descriptor can describe: itself, or a copy with rows of zeros-padded length."""
    if _describable(matrix):
        return matrix
    rows_, columns = matrix.shape
    copy = matrix.new_zeros((rows_, _padded_hidden(columns, matrix.itemsize)))
    copy[:, :columns] = matrix
    return copy


def _describable(matrix: Tensor) -> bool:
    """Whether one stride is 1 and the other a multiple of 16 bytes, from an address that is one too."""
    aligned = [stride * matrix.itemsize % 16 == 0 for stride in matrix.stride()]
    by_row = matrix.stride(1) == 1 and aligned[0]
    by_column = matrix.stride(0) == 1 and aligned[1]
    return (by_row or by_column) and matrix.data_ptr() % 16 == 0


def _padded_hidden(hidden: int, itemsize: int) -> int:
    return -(-hidden * itemsize // 16) * 16 // itemsize


def _precision(x: Tensor) -> str:
    """Float32 products are float32's unless PyTorch's own switch allows TF32."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _on_device(problem: Problem) -> Any:
    """Triton launches on the current device: that of the arrays, here."""
    return torch.cuda.device(problem.input.device) if problem.input.is_cuda else nullcontext()


@cache
def _card(device: torch.device) -> tuple[int, int]:
    """Returns compute capability (80, 90, ...) and number of multiprocessors; in the interpreter, a Hopper's."""
    if device.type != "cuda":
        return 90, 2
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def _tile(problem: Problem) -> TileConfig:
    return tiles.choose_tile(problem.input.itemsize, _card(problem.input.device)[0])


def _converts(problem: Problem) -> bool:
    """Whether the head is converted slab by slab before it is multiplied."""
    w = problem.linear_weight
    return w.dtype != problem.input.dtype or not _describable(w)


def _recomputed_config(problem: Problem, memory_budget: int, wanted: Wanted, *, entropy: bool) -> ChunkConfig:
    tokens, hidden = problem.input.shape
    return tiles.choose_recomputed(
        tokens=tokens,
        hidden=_padded_hidden(hidden, problem.input.itemsize),
        classes=problem.classes,
        itemsize=problem.input.itemsize,
        block_v=_tile(problem).block_v,
        statistics=2 + (problem.spec.label_smoothing != 0) + entropy,
        float16=problem.input.dtype == torch.float16,
        d_input=wanted.d_input,
        d_weight=wanted.d_weight,
        converts=_converts(problem),
        converts_rows=not _describable(problem.input),
        budget=memory_budget,
    )
