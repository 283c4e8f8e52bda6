"""What the rows that are saved for the backward pass need besides the kernels of plan A: zeros in place of NaN.
Equations: linear_ce/MATH.md.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_pallas.row_kernels import FINISHED_ROWS
from jax_pallas.triton_launch import arange, load, run, store

CLEARED_COLUMNS = 512  # at a time


def clear_kernel(_options: None, rho_ref: Any, _: Any, e_ref: Any) -> None:
    """Sets the rows of e (rows or more, padded) to 0 whose rho (rows,) is NaN: such a row must have a zero gradient if
    its upstream gradient is 0. One program owns FINISHED_ROWS rows."""
    row = arange(pl.program_id(0) * FINISHED_ROWS, FINISHED_ROWS)
    rho = load(rho_ref, row, mask=row < rho_ref.shape[0])
    lost = rho != rho

    @pl.when(lost.astype(jnp.int32).max() != 0)
    def _clear() -> None:
        def step(index: Any, _: None) -> None:
            column = arange(index * CLEARED_COLUMNS, CLEARED_COLUMNS)[None, :]
            zeros = jnp.zeros((FINISHED_ROWS, CLEARED_COLUMNS), jnp.float32)
            store(e_ref, row[:, None], column, values=zeros, mask=lost[:, None] & (column < e_ref.shape[1]))

        lax.fori_loop(0, pl.cdiv(e_ref.shape[1], CLEARED_COLUMNS), step, None)


def clear(e: Array, rho: Array) -> Array:
    """Launches `clear_kernel`; returns e, in its place."""
    result = jax.ShapeDtypeStruct(e.shape, e.dtype)
    grid = (pl.cdiv(len(rho), FINISHED_ROWS),)
    return run(clear_kernel, None, (rho, e), (result,), grid, in_place=1, warps=4, stages=1)[0]
