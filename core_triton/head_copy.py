"""Copies of vocabulary chunks of a head that the matmuls cannot read as it is: rounded to the input's dtype, split into
two matrices of it (MATH.md (39)), or only in rows that start at multiples of 16 bytes."""

import triton
import triton.language as tl
from torch import Tensor

from core_triton import tile_config
from core_triton.launch import At, cdiv, device_info, launch
from core_triton.problem import Problem, plan_of
from core_triton.repairs import flagged


@triton.jit
def copy_head_kernel(
    w_ptr, copy_ptr, flag_ptr, row_stride, column_stride, row_blocks, classes, hidden, width, SPLITS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes w (classes, hidden), rounded, to the first columns of copy (classes, width). With SPLITS what rounding
    leaves of w, rounded, follows it: columns `hidden` to 2 `hidden`. With flags, only if a row block has one.

    Programs take turns at blocks. They read each element once.
    """
    columns_of_blocks = tl.cdiv(hidden, BLOCK_D)
    tiles = tl.cdiv(classes, BLOCK_V) * columns_of_blocks
    if flag_ptr is not None:
        tiles = tl.where(flagged(flag_ptr, row_blocks) != 0, tiles, 0)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // columns_of_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
        column = tile % columns_of_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = (row < classes)[:, None] & (column < hidden)[None, :]
        source = w_ptr + row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
        w = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        high = w.to(copy_ptr.dtype.element_ty)
        place = copy_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(place, high, mask=inside)
        if SPLITS:
            low = (w - high.to(tl.float32)).to(copy_ptr.dtype.element_ty)
            tl.store(place + hidden, low, mask=inside)


def head_of(problem: Problem, vocab_chunk: slice, flag: At | None = None) -> Tensor:
    """Returns a vocabulary chunk of the head (v, D or more) in the input's dtype, with rows that the kernels can read;
    both parts of a split head side by side (v, 2D or more).

    Args:
        problem: the call.
        vocab_chunk: its classes.
        flag: of a chunk of rows: if no row block is flagged, a copy may be left undefined. `kernels.repair` does not
            read it then.
    """
    plan, w, x = plan_of(problem), problem.linear_weight, problem.input
    classes, (_, hidden), splits = vocab_chunk.stop - vocab_chunk.start, w.shape, problem.spec.splits_head
    if not plan.casts_head:
        return w if classes == len(w) else w[vocab_chunk]
    columns = hidden * (1 + splits)
    width = tile_config.padded_hidden(columns, x.itemsize)
    # The kernel does not write the columns past those of the head.
    copy = (x.new_empty if width == columns else x.new_zeros)((classes, width))
    block_v, block_d = 16, 256  # 16 elements a thread
    tiles = cdiv(classes, block_v) * cdiv(hidden, block_d)
    row_blocks = 0 if flag is None else 2 * flag.tensor.shape[1]
    launch(
        copy_head_kernel,
        (min(tiles, 16 * device_info(x.device)[1]),),
        w[vocab_chunk],
        copy,
        flag,
        *w.stride(),
        row_blocks,
        classes,
        hidden,
        width,
        SPLITS=splits,
        BLOCK_V=block_v,
        BLOCK_D=block_d,
        num_warps=8,
    )
    return copy
