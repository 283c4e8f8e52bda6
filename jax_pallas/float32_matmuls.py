"""Matmuls of float32 operands on tensor cores, with the precision of float32.

A float32 number has 24 bits. It is the sum of three bfloat16 numbers of 8 bits each, its parts. There are two
exceptions: numbers below 2**-110 lose bits, and numbers of 3.39e38 or more become infinite. So a matmul of two float32
matrices is the sum of nine matmuls of parts. The kernel computes six. The numbers of the other three are less than
2**-25 of the result, and float32 rounds to 2**-24. Tensor cores add up one step of the inner dimension. The steps are
added in float32.

Method: Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations (2019).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_pallas.tile_config import cdiv
from jax_pallas.triton_launch import arange, load, run, store
from linear_ce import float32_tiles


class Float32Matmul(NamedTuple):
    """The sizes of a matmul, the axes over which its operands are contracted, and how the kernel divides it."""

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


def float32_matmul_kernel(matmul: Float32Matmul, a_ref: Any, b_ref: Any, added_ref: Any, total_ref: Any) -> None:
    """Writes a tile of a @ b, (rows, columns) float32, plus that of `added_ref` if this is not None.

    Programs of axis 1 have other parts of the inner dimension, and write matrices below each other.
    """
    rows, columns, inner, (a_axis, b_axis), _, block, block_k = matmul
    row_blocks, column_blocks = cdiv(rows, block), cdiv(columns, block)
    group = lax.div(pl.program_id(0), jnp.int32(float32_tiles.GROUP * column_blocks))
    within = pl.program_id(0) - group * (float32_tiles.GROUP * column_blocks)
    height = lax.min(row_blocks - group * float32_tiles.GROUP, jnp.int32(float32_tiles.GROUP))
    m = arange((group * float32_tiles.GROUP + lax.rem(within, height)) * block, block)[:, None]
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
        return total + split_matmul(a, b)

    steps = matmul.steps
    if matmul.parts > 1:
        steps = lax.min(cdiv(inner, block_k) - first, jnp.int32(steps))
    total = lax.fori_loop(0, steps, step, jnp.zeros((block, block), jnp.float32))
    inside = _both(m_inside, n_inside)
    inside = jnp.full((block, block), True) if inside is None else jnp.broadcast_to(inside, (block, block))
    if added_ref is not None:
        total = total + load(added_ref, m, n, mask=inside)
    store(total_ref, pl.program_id(1) * rows + m, n, values=total, mask=inside)


def _both(a: Array | None, b: Array | None) -> Array | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def split_matmul(a: Array, b: Array) -> Array:
    """Returns a @ b of float32 tiles, as six matmuls of their parts.

    The compiler keeps the parts of `a` in registers only if each has a single use. Otherwise they go through shared
    memory, and the kernel takes a fifth longer. So `a` is split again for each matmul. The comment in the assembly
    keeps the compiler from merging equal parts.
    """

    def split(x: Array) -> tuple[Array, ...]:
        high = x.astype(jnp.bfloat16)
        rest = x - high.astype(jnp.float32)
        middle = rest.astype(jnp.bfloat16)
        return high, middle, (rest - middle.astype(jnp.float32)).astype(jnp.bfloat16)

    b_parts, total = split(b), jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
    for number, (of_a, of_b) in enumerate(((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))):  # the smallest first
        if (of_a, of_b) == (0, 0):  # of infinite numbers, the other matmuls are NaN
            total = jnp.where(total == total, total, 0.0)
        (copy,) = plgpu.elementwise_inline_asm(
            f"mov.b32 $0, $1;  // {number}",
            args=[a],
            constraints="=r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, a.dtype)],
        )
        contract = (((1,), (0,)), ((), ()))
        part = split(copy)[of_a]
        total = total + lax.dot_general(part, b_parts[of_b], contract, preferred_element_type=jnp.float32)
    return total


def add_matmul(total: Array | None, a: Array, b: Array, contract: tuple[int, int], *, programs: int) -> Array | None:
    """Returns total + the matmul of a and b, contracted over one axis of each, or None if XLA should multiply.

    Args:
        total: float32, or None for 0.
        contract: an axis of each operand.
        programs: number of programs that the GPU runs at a time.
    """
    rows, columns, inner = a.shape[1 - contract[0]], b.shape[1 - contract[1]], a.shape[contract[0]]
    parts = float32_tiles.parts_of(rows, columns, inner, programs, float32_tiles.WAVES) if rows * columns * inner else 0
    if not parts:
        return None
    matmul = Float32Matmul(rows, columns, inner, contract, parts, float32_tiles.BLOCK, float32_tiles.BLOCK_K)
    added, grid = total if parts == 1 else None, (float32_tiles.tiles_of(rows, columns), parts)
    results = (jax.ShapeDtypeStruct((parts * rows, columns), jnp.float32),)
    (written,) = run(float32_matmul_kernel, matmul, (a, b, added), results, grid, in_place=int(added is not None))
    if parts > 1:
        written = written.reshape(parts, rows, columns).sum(0)
    return written if added is not None or total is None else total + written
