"""Mosaic kernels that add the targets' terms to the head's gradient: sums of runs of equal targets.

No atomics: each row of d_weight takes its terms from one program, in one fixed order. `target_windows_kernel` sums what
is in a window of positions, `target_runs_kernel` what goes on beyond one. Equations: linear_ce/MATH.md.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from jax_pallas.hopper import ROW, cdiv

WINDOW = 32  # positions of a program: a run that goes on beyond them is summed in as many parts

TOGETHER = 8  # rows that are fetched at a time

Ref = Any


@dataclass(frozen=True)
class TargetKernel:
    """Both kernels as they are known when the call is traced.

    Args:
        width: columns of D of a program.
        windows: of WINDOW positions each.
        classes: K.
        vocab_axis: of d_weight.
    """

    width: int
    windows: int
    classes: int
    vocab_axis: int

    @property
    def layout(self) -> Any:
        """Returns the layout of (width,) numbers in a warpgroup's registers."""
        if self.width == 64:
            return ROW
        return plgpu.Layout.WG_STRIDED((self.width,), self.width // 128 if self.vocab_axis == 0 else 1)

    def row_of(self, weight_ref: Ref, column: Any, y: Any) -> Ref:
        """Returns a program's columns of a class's row of d_weight."""
        columns = pl.ds(column, self.width)
        return weight_ref.at[(y, columns) if self.vocab_axis == 0 else (columns, y)]

    def load(self, ref: Ref) -> Array:
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def is_class(self, y: Any) -> Any:
        return y < self.classes


def store(ref: Ref, values: Array) -> None:
    by_name = getattr(plgpu, "store", None)  # from JAX 0.12 on, which wants stores of two bytes a thread so
    if by_name is None:
        ref[...] = values
    else:
        by_name(ref, values, optimized=False)


def target_windows_kernel(
    kernel: TargetKernel, target_ref: Ref, row_ref: Ref, theta_ref: Ref, x_ref: Ref, weight_ref: Ref, part_ref: Ref
) -> None:
    """Sums the runs within a window, and the parts of those that begin before it or go on after it.

    Adds the former to their rows of d_weight, and writes the latter to part (windows, 2, D) float32: of a run that
    began before, and of one that goes on.
    """
    window, column = lax.axis_index("window"), lax.axis_index("column") * kernel.width
    own = (window + 1) * WINDOW  # in target
    before, last = target_ref[own - 1], target_ref[own + WINDOW - 1]
    goes_on = last == target_ref[own + WINDOW]

    def add(i: Any, total: Array) -> Array:
        ys = [target_ref[own + i * TOGETHER + j] for j in range(TOGETHER + 1)]
        positions = [window * WINDOW + i * TOGETHER + j for j in range(TOGETHER)]
        rows = [kernel.load(x_ref.at[row_ref[p], pl.ds(column, kernel.width)]) for p in positions]
        factors = [theta_ref[p] for p in positions]
        places = [kernel.row_of(weight_ref, column, jnp.clip(y, 0, kernel.classes - 1)) for y in ys]
        olds = [kernel.load(place) for place in places[:TOGETHER]]
        for j in range(TOGETHER):
            y, following = ys[j], ys[j + 1]
            factor = jnp.full(total.shape, factors[j])
            total += jnp.where(factor == 0, 0.0, factor * rows[j].astype(jnp.float32))
            ends = (y != following) | (i * TOGETHER + j == WINDOW - 1)
            part = jnp.where(y == before, 0, 1)  # of a run that began before, or of one that goes on
            whole = (part == 1) & ~(goes_on & (y == last))

            @pl.when(kernel.is_class(y) & ends & whole)
            def _store(place: Ref = places[j], old: Array = olds[j], total: Array = total) -> None:
                store(place, (old.astype(jnp.float32) + total).astype(jnp.bfloat16))

            @pl.when(kernel.is_class(y) & ends & ~whole)
            def _part(part: Any = part, total: Array = total) -> None:
                part_ref[window, part, pl.ds(column, kernel.width)] = total

            total = jnp.where(jnp.full(total.shape, ends), 0.0, total)
        return total

    @pl.when(kernel.is_class(target_ref[own]))
    def _sum() -> None:
        zeros = plgpu.layout_cast(jnp.zeros((kernel.width,), jnp.float32), kernel.layout)
        lax.fori_loop(0, WINDOW // TOGETHER, add, zeros)


def target_runs_kernel(kernel: TargetKernel, target_ref: Ref, part_ref: Ref, weight_ref: Ref) -> None:
    """Adds up the parts of a run that begins in a window and goes on after it."""
    window, column = lax.axis_index("window"), lax.axis_index("column") * kernel.width
    own = (window + 1) * WINDOW
    y = target_ref[own + WINDOW - 1]

    def more(carry: tuple[Any, Array]) -> Any:
        return target_ref[(carry[0] + 1) * WINDOW] == y

    def add(carry: tuple[Any, Array]) -> tuple[Any, Array]:
        first, total = carry
        others = [jnp.minimum(first + j, kernel.windows - 1) for j in range(TOGETHER)]
        parts = [kernel.load(part_ref.at[other, 0, pl.ds(column, kernel.width)]) for other in others]
        for j in range(TOGETHER):
            inside = jnp.full(total.shape, target_ref[(first + j + 1) * WINDOW] == y)
            total = jnp.where(inside, total + parts[j], total)
        return first + TOGETHER, total

    @pl.when(kernel.is_class(y) & (y == target_ref[own + WINDOW]) & (y != target_ref[own - 1]))
    def _sum() -> None:
        place = kernel.row_of(weight_ref, column, y)
        begun = kernel.load(part_ref.at[window, 1, pl.ds(column, kernel.width)])
        _, total = lax.while_loop(more, add, (window + 1, begun))
        store(place, (kernel.load(place).astype(jnp.float32) + total).astype(jnp.bfloat16))


def add_targets(
    d_weight: Array,
    x: Array,
    target: Array,
    row: Array,
    theta: Array,
    *,
    vocab_axis: int,
    classes: int | None = None,
) -> Array:
    """Adds theta * x to the targets' rows of d_weight, in place: (33).

    Each run of equal targets is summed in float32, window after window of its positions, and rounded once.

    Args:
        d_weight: (V, D) bfloat16 for vocab_axis 0, (D, V) for 1.
        x: (N, D) bfloat16.
        target: (N,) int32, ascending, not negative; those past the last class are left out.
        row: (N,) int32: of x.
        theta: (N,) float32. Where it is 0 the row of x is left out, whatever it holds.
        vocab_axis: of d_weight.
        classes: K; None: V.
    """
    hidden = x.shape[1]
    # Columns of (D, V), each in a place of its own, take registers for their addresses: half as many at a time.
    width = next(width for width in (1024, 512, 256, 128, 64)[vocab_axis:] if hidden % width == 0)
    windows = cdiv(len(target), WINDOW)
    kernel = TargetKernel(width, windows, d_weight.shape[vocab_axis] if classes is None else classes, vocab_axis)
    # Past the last position there is no class, for more than the positions that are looked at together.
    after = windows * WINDOW - len(target)
    target = jnp.pad(target, (WINDOW, after + TOGETHER * WINDOW), constant_values=jnp.iinfo(jnp.int32).max)
    row, theta = jnp.pad(row, (0, after)), jnp.pad(theta, (0, after))
    grid = {
        "grid": (hidden // width, windows),
        "grid_names": ("column", "window"),
        "num_threads": 1,
        "thread_name": "wg",
        "compiler_params": plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    }
    ref = jax.new_ref(d_weight)
    parts = plgpu.kernel(
        partial(target_windows_kernel, kernel),
        out_type=(jax.ShapeDtypeStruct((windows, 2, hidden), jnp.float32),),
        kernel_name="target_windows_kernel",
        **grid,
    )(target, row, theta, x, ref)
    runs = plgpu.kernel(partial(target_runs_kernel, kernel), out_type=(), kernel_name="target_runs_kernel", **grid)
    runs(target, parts[0], ref)
    return jax.freeze(ref)
