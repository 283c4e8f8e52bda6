"""How a kernel is launched: descriptors of its operands, the tile, the card, and the switches of a call."""

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gluon
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from core_triton import fused_tiles, hopper_logits, kernels, row_kernels
from core_triton.fused_tiles import TileConfig
from core_triton.problem import Problem

SMALL_BLOCK = 16  # rows of a program that sums over class blocks: enough programs to fill a card

BLOCKS_AT_ONCE = 64  # class blocks that such a program reads at a time

GLUON_DTYPES = {torch.bfloat16: gluon.bfloat16, torch.float16: gluon.float16}


def cdiv(a: int, b: int) -> int:
    """Returns a / b rounded up."""
    return -(-a // b)


def merge(top: Tensor, sum_exp: Tensor | None, weighted_sum: Tensor | None, sum_exp_log: Tensor | None) -> None:
    """Merges statistics over class blocks into their first row."""
    blocks, n = top.shape
    untyped(row_kernels.merge_kernel)[(cdiv(n, SMALL_BLOCK),)](
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


def add_class_sums(total: Tensor, matrix: Tensor, factor: Tensor, *, first: bool) -> None:
    """Adds the sums over rows of factor (n,) * matrix (n, v) to `total` (v,) float32, or overwrites it if `first`."""
    n, classes = matrix.shape
    untyped(row_kernels.class_sums_kernel)[(cdiv(classes, 64),)](
        matrix, factor, total, n, classes, matrix.stride(0), ADDS=not first, BLOCK_N=128, BLOCK_V=64, num_warps=4
    )


def class_weight(problem: Problem, slab: slice) -> Tensor:
    """Returns the class weights of a slab, (v,) float32, ones where there are none."""
    found = problem.slab_class_weight(slab)
    return problem.row_weight.new_ones(slab.stop - slab.start) if found is None else found


def head_slab(problem: Problem, slab: slice) -> Tensor:
    """Returns the slab of the head in the input's dtype."""
    return problem.linear_weight[slab].to(problem.input.dtype)


def column_block(matrix: Tensor) -> int:
    """Columns of a program that owns part of a row: up to eight elements a thread of four warps."""
    return min(1024, max(16, 1 << (matrix.shape[1] - 1).bit_length()))


def untyped(function: Any) -> Any:
    """Triton's launcher has no types."""
    return function


def launch_tiles(
    name: str,
    problem: Problem,
    x: Tensor,
    w: Tensor,
    slab: slice,
    arguments: dict[str, Any],
    result: tuple[str, Tensor | None] | None = None,
    *,
    repair: bool = False,
    **switches: bool,
) -> None:
    """Launches one of the kernels that multiply, on the rows x (n, D) and the slab w (v, D) of the head.

    Hopper's own kernels, unless the operands are float32 or it is a `repair`: only flagged blocks of rows are done
    then, which is seldom and need not be fast.
    """
    tile = tile_of_call(problem)
    x, w = for_descriptor(x, by_row=True), for_descriptor(w)
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
    if on_hopper(problem) and not repair:
        kernel = getattr(hopper_logits, name)
        describe, half, step = gluon_descriptor, tile.block_n // 2, fused_tiles.LOGITS_STEP
        blocks, result_block = [(half, step), (tile.block_v, step)], [half, tile.block_v // 4]
        common |= {"STAGES": fused_tiles.LOGITS_STAGES, "num_warps": 4}
    else:
        kernel = getattr(kernels, name)
        describe = TensorDescriptor.from_tensor
        block_n = tile.block_n // 2 if repair else tile.block_n
        blocks = [(block_n, tile.block_d), (tile.block_v, tile.block_d)]
        result_block = [block_n, tile.block_v]
        common |= {"PRECISION": precision(x), "BLOCK_N": block_n, "BLOCK_D": tile.block_d}
        common |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if name != "d_logits_kernel":
            arguments = {"flag_ptr": None, **arguments}
            common["REPAIR"] = repair
        for packed in ("count_ptr", "start", "least"):  # all rows are done here
            arguments.pop(packed, None)
    descriptors: dict[str, Any] = {
        "x_desc": describe(x, list(blocks[0])),
        "w_desc": describe(w, list(blocks[1])) if by_class else describe(w.T, list(reversed(blocks[1]))),
    }
    if result is not None:
        name_, matrix = result
        descriptors[name_] = None if matrix is None else describe(matrix, result_block)
    programs = min(cdiv(n, tile.block_n) * cdiv(classes, tile.block_v), card(x.device)[1])
    kernel[(programs,)](**descriptors, **arguments, **common, **switches)


def gluon_descriptor(matrix: Tensor, block: list[int]) -> GluonDescriptor:
    """Returns a descriptor of a 16-bit matrix for the Hopper kernels."""
    layout: Any = gluon.NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[matrix.dtype])
    return GluonDescriptor.from_tensor(matrix, block, layout)


def on_hopper(problem: Problem) -> bool:
    """Whether the Hopper kernels serve a call: 16-bit operands on sm_90."""
    return problem.input.is_cuda and problem.input.itemsize == 2 and card(problem.input.device)[0] == 90


def for_descriptor(matrix: Tensor, *, by_row: bool = False) -> Tensor:
    """Returns a matrix that a tensor descriptor can describe: itself, or a copy with rows of zero-padded length."""
    if describable(matrix, by_row=by_row):
        return matrix
    rows_, columns = matrix.shape
    copy = matrix.new_zeros((rows_, padded_hidden(columns, matrix.itemsize)))
    copy[:, :columns] = matrix
    return copy


def describable(matrix: Tensor, *, by_row: bool = False) -> bool:
    """Whether one stride is 1, with `by_row` that of columns, and the other a multiple of 16 bytes, from an address
    that is one too."""
    if matrix.data_ptr() % 16:
        return False
    (row, column), itemsize = matrix.stride(), matrix.itemsize
    return (column == 1 and row * itemsize % 16 == 0) or (not by_row and row == 1 and column * itemsize % 16 == 0)


def padded_hidden(hidden: int, itemsize: int) -> int:
    """Returns the least length of a row of the input or the head that is a multiple of 16 bytes."""
    return -(-hidden * itemsize // 16) * 16 // itemsize


def precision(x: Tensor) -> str:
    """Float32 products are float32's unless PyTorch's own switch allows TF32."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def on_device(problem: Problem) -> Any:
    """Triton launches on the current device: that of the arrays, here."""
    return torch.cuda.device(problem.input.device) if problem.input.is_cuda else nullcontext()


@cache
def card(device: torch.device) -> tuple[int, int]:
    """Returns compute capability (80, 90, ...) and number of multiprocessors; in the interpreter, a Hopper's."""
    if device.type != "cuda":
        return 90, 2
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def tile_of_call(problem: Problem) -> TileConfig:
    """Returns the tile of logits for a call's dtype and card."""
    return fused_tiles.choose_tile(problem.input.itemsize, card(problem.input.device)[0])


def converts(problem: Problem) -> bool:
    """Whether the head is converted slab by slab before it is multiplied."""
    w = problem.linear_weight
    return w.dtype != problem.input.dtype or not describable(w)
