"""Matmuls of float32 operands on tensor cores, with the precision of float32.

Each number is split into parts of fewer bits, and products of parts are added up. float32 rounds to 2**-24.

- BF16_BF16_F32_X6: three bfloat16 numbers of 8 bits each, but for numbers below 2**-110. Of the nine products the six
  largest are added up. The others are less than 2**-25 of the product of the numbers.
- TF32_TF32_F32_X3: two TF32 numbers of 11 bits each. With the sign of the second one they hold 23 of 24 bits. Of the
  four products the three largest are added up. The other one is at most 2**-24 of the product. The GPU reads such
  operands only if they are contiguous along the inner dimension.

Tensor cores add up the products of one step of the inner dimension. The steps are added in float32.

Methods: Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations (2019); Ootomo and Yokota, Recovering single precision accuracy from Tensor Cores while surpassing the FP32
theoretical peak performance (2022). Pallas' Triton backend splits the operands.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_pallas.tile_config import FLOAT32_BLOCK, FLOAT32_WAVES, cdiv
from jax_pallas.triton_launch import arange, load, run, store

BLOCK_K = 64  # inner numbers of a step
GROUP = 8  # row blocks that are computed with a column block before the next one
LEAST_INNER = 1024  # of a program, if several share the inner dimension


class Float32Matmul(NamedTuple):
    """The matmul of a kernel: of operands that are contracted over these axes."""

    rows: int
    columns: int
    inner: int
    contract: tuple[int, int]
    parts: int  # programs that share the inner dimension of a tile
    block: int
    block_k: int

    @property
    def steps(self) -> int:
        return cdiv(cdiv(self.inner, self.block_k), self.parts)


def float32_matmul_kernel(matmul: Float32Matmul, a_ref: Any, b_ref: Any, *total_refs: Any) -> None:
    """Writes a tile of a @ b, (rows, columns) float32, or adds it to the first of two total_refs.

    Programs of axis 1 have other parts of the inner dimension, and write matrices below each other.
    """
    rows, columns, inner, (a_axis, b_axis), _, block, block_k = matmul
    row_blocks, column_blocks = cdiv(rows, block), cdiv(columns, block)
    group = lax.div(pl.program_id(0), GROUP * column_blocks)
    within = pl.program_id(0) - group * (GROUP * column_blocks)
    height = lax.min(row_blocks - group * GROUP, jnp.int32(GROUP))
    m = arange((group * GROUP + lax.rem(within, height)) * block, block)[:, None]
    n = arange(lax.div(within, height) * block, block)[None, :]
    m_inside, n_inside = (None if size % block == 0 else at < size for at, size in ((m, rows), (n, columns)))
    first = pl.program_id(1) * matmul.steps

    def step(index: Any, total: Array) -> Array:
        k = arange((first + index) * block_k, block_k)
        k_inside = None if inner % block_k == 0 else k < inner
        a_index, b_index = (m, k[None, :]), (k[:, None], n)
        a_mask = _both(m_inside, None if k_inside is None else k_inside[None, :])
        b_mask = _both(None if k_inside is None else k_inside[:, None], n_inside)
        a = load(a_ref, *(a_index if a_axis == 1 else a_index[::-1]), mask=a_mask)
        b = load(b_ref, *(b_index if b_axis == 0 else b_index[::-1]), mask=b_mask)
        contract = (((1,), (0,)), ((), ()))
        return total + lax.dot_general(a, b, contract, products_of(a_axis, b_axis), preferred_element_type=jnp.float32)

    steps = matmul.steps
    if matmul.parts > 1:
        steps = lax.min(cdiv(inner, block_k) - first, jnp.int32(steps))
    total = lax.fori_loop(0, steps, step, jnp.zeros((block, block), jnp.float32))
    inside = _both(m_inside, n_inside)
    inside = jnp.full((block, block), True) if inside is None else jnp.broadcast_to(inside, (block, block))
    if len(total_refs) > 1:
        total = total + load(total_refs[0], m, n, mask=inside)
    store(total_refs[-1], pl.program_id(1) * rows + m, n, values=total, mask=inside)


def _both(a: Array | None, b: Array | None) -> Array | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def products_of(a_axis: int, b_axis: int) -> lax.DotAlgorithmPreset:
    """Returns into which parts operands that are contracted over these axes are split."""
    presets = lax.DotAlgorithmPreset
    return presets.TF32_TF32_F32_X3 if a_axis == b_axis == 1 else presets.BF16_BF16_F32_X6


def _tiles(rows: int, columns: int) -> int:
    return cdiv(rows, FLOAT32_BLOCK) * cdiv(columns, FLOAT32_BLOCK)


def parts_of(rows: int, columns: int, inner: int, programs: int) -> int:
    """Returns the number of programs that share the inner dimension of a tile, so that they are about whole waves."""
    tiles = _tiles(rows, columns)
    most = max(1, min(FLOAT32_WAVES * programs // tiles, inner // LEAST_INNER))
    return min(range(1, most + 1), key=lambda parts: cdiv(tiles * parts, programs) / parts)


def add_matmul(total: Array | None, a: Array, b: Array, contract: tuple[int, int], *, programs: int) -> Array:
    """Returns total + the matmul of a and b, contracted over one axis of each: `problem.float32_matmul` on Hopper.

    Args:
        total: float32, or None for 0.
        programs: that the GPU runs at a time.
    """
    rows, columns = a.shape[1 - contract[0]], b.shape[1 - contract[1]]
    inner = a.shape[contract[0]]
    if 0 in (rows, columns, inner):
        return jnp.zeros((rows, columns), jnp.float32) if total is None else total
    parts = parts_of(rows, columns, inner, programs)
    matmul = Float32Matmul(rows, columns, inner, contract, parts, FLOAT32_BLOCK, BLOCK_K)
    result = jax.ShapeDtypeStruct((parts * rows, columns), jnp.float32)
    adds = parts == 1 and total is not None
    operands = (a, b, total) if adds else (a, b)
    grid = (_tiles(rows, columns), parts)
    written = run(float32_matmul_kernel, matmul, operands, result, grid, in_place=int(adds))
    if parts > 1:
        written = written.reshape(parts, rows, columns).sum(0)
    return written if adds or total is None else total + written
