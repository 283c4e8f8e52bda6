"""What `kernels.repair_kernel` needs: which row blocks are flagged, and sums of no classes."""

import triton
import triton.language as tl


@triton.jit
def flagged(flag_ptr, row_blocks):
    """Returns how many row blocks are flagged. Two row blocks have one flag."""
    acc = tl.zeros((128,), tl.int32)
    for start in range(0, tl.cdiv(row_blocks, 2), 128):
        pairs = start + tl.arange(0, 128)
        flags = tl.load(flag_ptr + pairs, mask=2 * pairs < row_blocks, other=0)
        acc += flags * tl.minimum(row_blocks - 2 * pairs, 2)
    return tl.sum(acc, 0)


@triton.jit
def store_no_classes(
    sum_ptr, max_ptr, row_ids, rows, stored, column, classes, planes, HAS_MAX: tl.constexpr, BLOCK_V: tl.constexpr,
    CLASS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the sums and the statistics of no classes, for the rows where `stored`, to all class blocks but the first
    of a tile of BLOCK_V classes that begins at `column`. There are `planes` statistics, the first of them the largest
    logit if HAS_MAX."""
    zeros = tl.zeros_like(row_ids).to(tl.float32)
    for i in tl.static_range(1, BLOCK_V // CLASS_BLOCK):
        inside = stored & (column + i * CLASS_BLOCK < classes)
        block = (column // CLASS_BLOCK + i).to(tl.int64)
        tl.store(sum_ptr + block * rows + row_ids, zeros, mask=inside)
        if max_ptr is not None:
            for plane in range(planes):
                value = zeros
                if HAS_MAX:
                    value -= tl.where(plane == 0, float("inf"), 0.0)
                tl.store(max_ptr + (block * planes + plane) * rows + row_ids, value, mask=inside)
