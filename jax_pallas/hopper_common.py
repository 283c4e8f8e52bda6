"""The common parts of the Hopper kernels: tile sizes, memory layouts, a ring of loaded tiles, roles of warpgroups.

They are in Pallas' Mosaic dialect, for sm_90. One warpgroup loads, and two multiply, each half of a tile. The kernels
are in `hopper_logits.py` and `hopper_gradients.py`. Functions pass related values as NamedTuples and frozen
dataclasses.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas.tile_config import CLASS_BLOCK, HALF, ROW_BLOCK, STEP

ROW = plgpu.Layout.WGMMA.reduce(1)  # one value for each row of a matmul's accumulator
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one for each column

MULTIPROCESSORS = 132  # of an H100 SXM and an H200: the default for a compilation without a GPU


def transforms(columns: int, itemsize: int = 2) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Returns the shared-memory layout that TMA and wgmma require for an array whose minor axis has so many columns."""
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def two_views(shape: tuple[int, ...], dtype: Any, *, interpret: bool) -> Any:
    """Returns shared memory (..., columns), rows of up to 128 bytes, as TMA copies it and wgmma reads it.

    The same bytes, one swizzled row after the other; but TMA refuses to cut an array into the tiles of 8 rows that
    wgmma names where they do not divide it, or where a copy starts elsewhere than at a multiple of 8. So there are two
    views of them, which `views` returns. The interpreter knows neither such a limit nor two views of the same memory.
    """
    tiling, swizzle = transforms(shape[-1], jnp.dtype(dtype).itemsize)
    tiled = plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))
    return tiled if interpret else plgpu.RefUnion(plgpu.SMEM(shape, dtype, transforms=(swizzle,)), tiled)


def views(ref: Any, *, interpret: bool) -> tuple[Any, Any]:
    """Returns what TMA and what wgmma and registers take of `two_views`."""
    return (ref, ref) if interpret else tuple(ref)


def programs() -> int:
    """Returns how many persistent programs fill the GPU."""
    try:
        return jax.local_devices(backend="gpu")[0].core_count
    except RuntimeError:
        return MULTIPROCESSORS


# Otherwise Mosaic infers layouts: the machine code is the same, and lowering takes more than twice the time.
COMPILER = plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane)

BLOCK_N, BLOCK_V = ROW_BLOCK, CLASS_BLOCK  # of a tile of logits

# Classes that an epilogue processes at a time. With more of them the tensor cores would run out of work.
PIECE = 32

PIECES = BLOCK_V // PIECE

# Registers of a thread, of 65,536 for all three warpgroups.
LOAD_REGISTERS, MULTIPLY_REGISTERS = 24, 240

STAGES = 4  # steps that are loaded ahead: 163,840 bytes. A stage's number is a mask, so a power of two


def slot_of(number: Any) -> Any:
    return number & (STAGES - 1)


class Ring(NamedTuple):
    """The stages of loaded tiles in shared memory: two operands of a matmul as wgmma reads them, the same memory as TMA
    writes it, and two barriers for each stage."""

    a: Any  # (STAGES, ...)
    b: Any  # (STAGES, ...)
    a_moved: Any
    b_moved: Any
    full: Any  # (STAGES,): the stage is loaded
    empty: Any  # (STAGES,): both warpgroups are done with it


class PairRing(NamedTuple):
    """Loaded pieces in shared memory, as `Ring`: (stages, 2, ...), one for each warpgroup."""

    moved: Any
    pieces: Any
    full: Any
    empty: Any


def make_ring(a: tuple[Any, Any], b: tuple[Any, Any], full: Any, empty: Any) -> Ring:
    """Returns a ring of what `views` returns of each operand, and of `ring_barriers`."""
    return Ring(a[1], b[1], a[0], b[0], full, empty)


def ring_barriers(copies: int) -> list[Any]:
    """Returns the types of the ring's barriers: a stage is full after so many copies, empty after two warpgroups."""
    return [plgpu.Barrier(num_arrivals=count, num_barriers=STAGES) for count in (copies, 2)]


def wait_for_all(barriers: Any, count: int) -> None:
    for slot in range(count):
        plgpu.barrier_wait(barriers.at[slot])


def arrive_at_all(barriers: Any, count: int) -> None:
    for slot in range(count):
        plgpu.barrier_arrive(barriers.at[slot])


def either[T](condition: Array, where_true: Callable[[], T], where_false: Callable[[], T]) -> T:
    """Returns the result of one of two functions, as `lax.cond` does.

    `lax.cond` and `pl.when` convert the condition to a branch's number. For each conversion from bool Mosaic runs
    `ptxas --version`, 11 ms.
    """
    return lax.switch(jnp.where(condition, 1, 0), (where_false, where_true))


def when(condition: Array) -> Callable[[Callable[[], None]], None]:
    """Does what `pl.when` does, by `either`."""
    return lambda function: either(condition, function, lambda: None)


def as_roles(warpgroup: Array, load: Callable[[], None], multiply: Callable[[], None]) -> None:
    """Has the last warpgroup load and the first two multiply."""

    @when(warpgroup == 2)
    def _load() -> None:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        load()

    @when(warpgroup < 2)
    def _multiply() -> None:
        plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
        multiply()


def pauses(steps: int) -> Array:
    """Returns (2 * PIECES,) int32: after which steps of a tile each warpgroup turns to the pieces of the one before.

    The pauses are spaced evenly, and those of the two warpgroups alternate. Kernels read them from memory
    (`own_pauses`), because the compiler would unroll loops of static length and spill registers.
    """
    parts = 2 * PIECES + 1
    return jnp.array([1 + (steps - 1) * (2 * i + j) // parts for j in (1, 2) for i in range(PIECES)], jnp.int32)


def own_pauses(scalar_ref: Any, warpgroup: Any) -> list[Any]:
    """Returns a warpgroup's pauses, the first that a kernel's scalars have."""
    return [scalar_ref[warpgroup * PIECES + i] for i in range(PIECES)]


def over_steps(steps: int, pauses: list[Any], step: Callable[[Any], None], *, begin: int = 1) -> Iterator[int]:
    """Takes the steps of a tile from `begin` on, and yields a piece of the one before at each of the pauses."""
    at: Any = begin
    for piece, pause in enumerate(pauses):
        pl.loop(at, pause)(step)
        yield piece
        at = pause
    pl.loop(at, steps)(step)


def in_pieces(acc: Any) -> tuple[Array, ...]:
    """Returns an accumulator (HALF, BLOCK_V) as PIECES of (HALF, PIECE)."""
    sums = acc[...]
    return tuple(sums[:, i : i + PIECE] for i in range(0, BLOCK_V, PIECE))


def clear_after(w: Any, kept: Any, layout: plgpu.Layout = plgpu.Layout.WGMMA) -> None:
    """Sets the classes after the first `kept` of a step, (HALF, STEP), to 0."""
    value = plgpu.load(w, layout=layout)
    index = plgpu.broadcasted_iota(jnp.int32, (HALF, STEP), 1, layout=layout)
    w[...] = jnp.where(index < kept, value, jnp.zeros_like(value))
    plgpu.commit_smem()


def store_part_lines(place: Any, values: Array) -> None:
    """Stores values in device memory. Their rows need not fill whole cache lines.

    From JAX 0.12 on, `ref[...] = values` refuses that. Earlier versions do not, and have no `plgpu.store`.
    """
    store = getattr(plgpu, "store", None)
    if store is None:
        place[...] = values
    else:
        store(place, values, optimized=False)


def zero_piece() -> Array:
    return plgpu.layout_cast(jnp.zeros((HALF, PIECE), jnp.float32), plgpu.Layout.WGMMA)


def run_kernel(
    body: Callable[..., None], name: str, operands: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any], grid: tuple[int, ...], interpret: bool, *, threads: int = 3, approximate: bool = False,
) -> Any:  # fmt: skip
    """Runs a kernel of so many warpgroups; references among the operands are updated in place."""
    return plgpu.kernel(
        body,
        out_type=tuple(results),
        scratch_types=list(scratch),
        grid=grid,
        grid_names=("program", "piece")[: len(grid)],
        num_threads=threads,
        thread_name="warpgroup",
        compiler_params=replace(COMPILER, approx_math=approximate),
        kernel_name=name,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(*operands)
