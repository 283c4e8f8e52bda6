"""What the rows that are saved for the backward pass need besides the kernels of plan A: their entropies, and zeros in
place of NaN. Equations: linear_ce/MATH.md.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_pallas import kernels
from jax_pallas.problem import Problem, plan_of
from jax_pallas.row_kernels import (
    FINISHED_ROWS,
    FIRST_FLAG,
    FIRST_ROW,
    LN_2,
    CallRows,
    Exponentials,
    Repaired,
    repaired_ref_exponent,
)
from jax_pallas.tile_config import ROW_BLOCK
from jax_pallas.triton_launch import arange, load, run, store

CLEARED_COLUMNS = 512  # at a time

# ln 2 as a number whose product with a reference exponent is exact, and the rest.
LN_2_HIGH, LN_2_LOW = 0.693145751953125, 1.4286068202862268e-06


def entropies(
    problem: Problem, rows: CallRows, place: Array, size: int, found: Exponentials, repaired: Repaired
) -> Array:
    """Returns the entropies of a chunk of `size` rows at place (4,) of `row_kernels.join_blocks`, 0 for rows of
    row_weight 0: (43)."""
    assert found.tops is not None
    assert found.sums_exp_log is not None
    row = jnp.arange(size, dtype=jnp.int32)
    row_weight, ref_exponent, new_top = (
        lax.dynamic_slice_in_dim(array, place[FIRST_ROW], size)
        for array in (rows.row_weight, rows.ref_exponent, rows.top)
    )
    flagged = rows.flag[place[FIRST_FLAG] + 1 + row // ROW_BLOCK] != 0
    top = found.tops[:, :size].max(0)

    def joined(sums: Array, sums_exp_log: Array, tops: Array) -> tuple[Array, Array]:
        moved = jnp.where(tops == -jnp.inf, 0.0, tops - top)
        return sums.sum(0), (sums_exp_log + moved * sums).sum(0)

    total, exp_log = joined(*(array[:, :size] for array in (found.sums, found.sums_exp_log, found.tops)))
    new_total, new_exp_log = joined(repaired.sums, repaired.sums_exp_log, repaired.tops)
    total, exp_log = jnp.where(flagged, new_total, total), jnp.where(flagged, new_exp_log, exp_log)
    ref_exponent = jnp.where(flagged, repaired_ref_exponent(new_top), ref_exponent)
    # The summand of the largest logit, to which the sum is relative here: neither term is of the size of the logits.
    if plan_of(problem).hopper:
        summand = jnp.exp(top - ref_exponent * LN_2_HIGH - ref_exponent * LN_2_LOW)
    else:
        summand = kernels.exponential(top, lax.optimization_barrier(ref_exponent * LN_2))  # rounded, as in the kernels
    total = jnp.where(total == jnp.inf, jnp.nan, total)  # an infinite logit: no probability is a number
    return jnp.where(row_weight != 0, jnp.log(total / summand) - exp_log / total, 0.0)


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
