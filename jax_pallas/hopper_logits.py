"""Kernels for Hopper (sm_90) whose epilogues take tiles of logits: exponentials, statistics and d_logits.

They are in Pallas' Mosaic dialect. core_triton/hopper_logits.py has the same kernels in Triton's Gluon dialect. A tile
is 128 rows x 192 classes (`hopper_tiles.Tiles`). Its exponentials take 1536 cycles for any hidden size, and its matmul
takes 12 cycles per hidden unit. All three are one kernel, `logits_kernel`, with different epilogues. Each epilogue is
above its launcher. The functions that the kernel calls on the device are in `hopper_tiles.py`.

A kernel writes the sums of a row as one number for each class block, (class blocks, rows). `row_kernels.join_blocks`
and XLA add the blocks in a fixed order. Equations: linear_ce/MATH.md.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas.first_chunk import FirstChunk
from jax_pallas.hopper_common import (
    BLOCK_N,
    BLOCK_V,
    PIECE,
    PIECES,
    ROW,
    STAGES,
    as_roles,
    make_ring,
    pauses,
    ring_barriers,
    run_kernel,
    transforms,
    two_views,
    views,
    when,
)
from jax_pallas.hopper_tiles import (
    Epilogue,
    Half,
    LogitsKernel,
    Program,
    Tiles,
    load_tiles,
    logits_warpgroup,
    walk_of,
)
from jax_pallas.problem import Problem, plan_of
from jax_pallas.row_kernels import IN_A_NUMBER, LN_2, LOG2_E, Exponentials, shift_of
from jax_pallas.row_math import NO_PROBABILITY, first_of_largest
from jax_pallas.slicing import Slice, over_slices
from jax_pallas.tile_config import HALF, STEP, cdiv, padded
from jax_pallas.triton_launch import run
from linear_ce.statistics import ARGMAX, ENTROPY, LOGIT_SUM, MAX, OF_BLOCKS, OF_LOGITS, SHIFTS, SQUARES

if TYPE_CHECKING:
    from jax_pallas.hopper_split_logits import Block

STATIC = ("rows", "classes", "vocab_axis", "logit_scale", "softcap", "interpret")

OF_TARGETS = ("target_exps", "target_logits")


def logits_kernel(kernel: LogitsKernel, x_ref: Any, w_ref: Any, scalar_ref: Any, *rest: Any) -> None:
    """Runs an epilogue on every tile of x @ w.

    Each multiprocessor runs one program, which computes one tile after the other. One warpgroup loads, and two
    multiply, each half of a tile's rows and all of its columns. The float32 sums stay in registers. The epilogue
    processes them in pieces during the matmul of the next tile, because the two warpgroups end their tiles at the same
    time and the tensor cores would otherwise be idle during the epilogue.
    """
    tiles, interpret = kernel.tiles, kernel.interpret
    refs = dict(zip(kernel.names, rest, strict=False))
    x_all, w_all, full, empty, *buffers = rest[len(refs) :]
    w_views = views(w_all, interpret=interpret or tiles.vocab_axis == 1)
    ring = make_ring(views(x_all, interpret=interpret), w_views, full, empty)
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    walk = walk_of(tiles, program)
    buffer = views(buffers[0], interpret=interpret) if buffers else None
    own = Program(kernel, walk, warpgroup, scalar_ref, refs, ring, buffer)
    as_roles(warpgroup, partial(load_tiles, own, x_ref, w_ref), partial(logits_warpgroup, own))


def launch_tiles(
    name: str,
    epilogue: Epilogue,
    tiles: Tiles,
    x: Array,
    w: Array,
    offsets: tuple[Array | int, ...],
    by_row: dict[str, Array | None],
    operands: dict[str, Array | None],
    results: dict[str, jax.ShapeDtypeStruct],
    *,
    stored: Any = None,
    into: dict[str, Array] | None = None,
    first: FirstChunk | None = None,
    interpret: bool,
) -> dict[str, Array]:
    """Launches `logits_kernel` on x (N, D) and w (V, D), or (D, V), and returns its results by name.

    Args:
        offsets, stored, first: of `LogitsKernel`.
        by_row, operands: `LogitsKernel.names`; None where there is none.
        into: arrays whose places these results take, and which keep what the kernel does not write.
    """
    traced = [jnp.asarray(number, jnp.int32) for number in offsets if not isinstance(number, int)]
    scalars = jnp.concatenate([pauses(tiles.steps), *(number[None] for number in traced)])
    present = {key: value for key, value in {**by_row, **operands}.items() if value is not None}
    refs = {key: jax.new_ref(array) for key, array in (into or {}).items()}
    made = {key: result for key, result in results.items() if key not in refs}
    kernel = LogitsKernel(
        tiles,
        tuple(number if isinstance(number, int) else None for number in offsets),
        (*present, *refs, *made),
        tuple(key for key in by_row if key in present),
        epilogue,
        stored,
        interpret,
        first,
    )
    if tiles.vocab_axis:
        w_type = plgpu.SMEM((STAGES, STEP, BLOCK_V), x.dtype, transforms=transforms(STEP))
    else:
        w_type = two_views((STAGES, BLOCK_V, STEP), x.dtype, interpret=interpret)
    scratch = [two_views((STAGES, BLOCK_N, STEP), x.dtype, interpret=interpret), w_type, *ring_barriers(2)]
    if stored is not None:
        scratch.append(two_views((2, 2, HALF, PIECE), stored, interpret=interpret))
    arrays, body, grid = (
        (x, w, scalars, *present.values(), *refs.values()),
        partial(logits_kernel, kernel),
        (tiles.programs,),
    )
    found = run_kernel(body, name, arrays, list(made.values()), scratch, grid, interpret, approximate=True)
    return dict(zip(made, found or (), strict=True)) | {key: jax.freeze(ref) for key, ref in refs.items()}


def to_logits(
    half: "Half | Block", raw: Array, piece: int, logit_scale: float, softcap: float | None
) -> tuple[Array, Array | None]:
    """Returns logits of raw logits, and their ratio to the cap: MATH.md (1), (2)."""
    if "bias" in half.refs:
        raw = raw + half.of_columns("bias", piece)
    logits = raw * logit_scale if logit_scale != 1.0 else raw
    if softcap is None:
        return logits, None
    ratio = logits * (1.0 / softcap)
    small = jnp.exp2(-2.0 * LOG2_E * jnp.abs(ratio))
    magnitude = (1.0 - small) * jnp.square(lax.rsqrt(1.0 + small))  # a division takes ten instructions
    ratio = jnp.where(ratio < 0.0, -magnitude, magnitude)
    return softcap * ratio, ratio


def places_of(target: Array, classes: int, class_block: int = BLOCK_V) -> Array:
    """Returns (half row blocks, class blocks) int32: which of HALF places stores the values of the targets of a half
    row block in a class block, -1 if there is no target. `target` is (half row blocks * HALF,) int32, -1 for none."""
    block = jnp.where(target < 0, -1, target // class_block).reshape(-1, HALF, 1)
    here = block == jnp.arange(cdiv(classes, class_block), dtype=jnp.int32)
    return jnp.where(here, jnp.arange(HALF, dtype=jnp.int32)[:, None], -1).max(
        1
    )  # the last of the rows that share the class block


def chunk_places(target: Array, classes: int, rows: int, chunks: int, class_block: int = BLOCK_V) -> Array:
    """Returns `places_of` the targets of each chunk of so many rows, (chunks, ...), of target (P,).

    If a chunk does not end with a half row block, that half also has places for rows past the chunk. The values written
    there are never read.
    """
    halves = 2 * cdiv(rows, BLOCK_N)
    row = jnp.arange(chunks)[:, None] * rows + jnp.arange(halves * HALF)
    found = places_of(jnp.take(target, row.reshape(-1), mode="fill", fill_value=-1), classes, class_block)
    return found.reshape(chunks, halves, -1)


def target_logits_of(half: Half, piece: int, capped: Array, carried: Any) -> Array:
    """Returns (HALF,) logits of the rows' targets in this piece or an earlier one, 0 for those elsewhere, of `capped`
    (HALF, PIECE). Most half tiles hold no target, and return zeros."""
    if half.place is None:
        zeros = plgpu.layout_cast(jnp.zeros((HALF,), jnp.float32), ROW)
        return zeros if carried is None else carried["target_logits"]
    target = plgpu.load(half.refs["target"].at[pl.ds(half.row, HALF)], layout=ROW, optimized=False)
    here = half.columns(piece) == lax.broadcast_in_dim(target, (HALF, PIECE), (0,))
    found = jnp.where(here, capped, 0.0).sum(1)
    return found if carried is None else carried["target_logits"] + found


def store_targets(half: Half, piece: int, exponentials: Callable[[], Array], target_logits: Array) -> None:
    """Writes, with the last piece, the targets' logits and summands of a half tile to its place. The same instructions
    compute these summands and all others."""
    if half.place is None or piece < PIECES - 1:
        return
    place = half.place

    @when(place >= 0)
    def _put() -> None:
        for name, value in zip(OF_TARGETS, (exponentials(), target_logits), strict=True):
            half.refs[name][place, pl.ds(half.row, HALF)] = value


def by_target(tiles: Tiles, places: Array, target: Array, values: Array) -> Array:
    """Returns the values (rows,) that `store_targets` wrote, (HALF, rows of the tiles); 0 where there is no target."""
    row = jnp.arange(tiles.rows, dtype=jnp.int32)
    place = places[row // HALF, target.clip(0) // BLOCK_V].clip(0)
    return jnp.where(target >= 0, values[place, row], 0.0)


class ExponentialsSwitches(NamedTuple):
    """The options of `exponentials_epilogue`.

    Args:
        logit_scale, softcap: of the logits.
        stores: the exponentials.
        statistics: of `linear_ce.statistics`, which are computed.
    """

    logit_scale: float
    softcap: float | None
    stores: bool
    statistics: int


def largest_of(half: Half, piece: int, logits: Array, carried: Any, statistics: int) -> dict[str, Array]:
    """Returns the largest logits of this piece and the earlier ones and, with ARGMAX, their columns in the tile."""
    top = logits.max(1)
    found = {"tops": top if carried is None else jnp.maximum(carried["tops"], top)}
    if statistics & ARGMAX:
        ids = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
        here = logits == lax.broadcast_in_dim(top, logits.shape, (0,))
        # Of the negative columns the largest is the first.
        column = piece * PIECE - jnp.where(here, -ids.astype(jnp.float32), -jnp.inf).max(1)
        if carried is not None:
            column = jnp.where(top > carried["tops"], column, carried["columns"])
        found["columns"] = column
    return found


def exponentials_epilogue(
    switches: ExponentialsSwitches, half: Half, piece: int, raw: Array, carried: Any
) -> tuple[Any, Array | None]:
    """Returns scaled exponentials of a piece, and writes their sums: (29), (31)."""
    capped, ratio = to_logits(half, raw, piece, switches.logit_scale, switches.softcap)
    statistics, ref_exponent = switches.statistics, half.by_row["ref_exponent"]
    found, logits, of_logits = {}, None, {}
    # With many statistics those of the logits come first, and the references are loaded in each piece. Otherwise 68
    # bytes of registers spill.
    crowded = statistics & OF_LOGITS not in (0, MAX, ENTROPY)
    if crowded:
        if statistics & MAX:
            of_logits = largest_of(half, piece, half.masked(capped, piece, -jnp.inf), carried, statistics)
        if statistics & LOGIT_SUM:
            found["logit_sums"] = half.masked(capped, piece, 0.0).sum(1)
        logits = target_logits_of(half, piece, capped, carried)
        ref_exponent = plgpu.load(half.refs["ref_exponent"].at[pl.ds(half.row, HALF)], layout=ROW, optimized=False)
    # Masked afterwards, so that full and partial tiles round alike: each logit and its reference exponent once.
    exponents = capped * LOG2_E - lax.broadcast_in_dim(ref_exponent, capped.shape, (0,))
    values = half.masked(jnp.exp2(exponents), piece, 0.0)
    if statistics & ENTROPY:
        # 0 times it is 0. Past the last class it may be NaN.
        if crowded:
            terms = jnp.where(values == 0.0, 0.0, values * exponents)
        else:
            terms = values * half.masked(jnp.maximum(exponents, NO_PROBABILITY), piece, 0.0)
        found["exp_logs"] = terms.sum(1)
    found["sums"] = values.sum(1)
    if statistics & SQUARES:
        found["squares"] = (values * values).sum(1)
    if carried is not None:
        found = {name: carried[name] + value for name, value in found.items()}
    if statistics & MAX and not crowded:
        of_logits = largest_of(half, piece, half.masked(capped, piece, -jnp.inf), carried, statistics)
    found |= of_logits
    if statistics & SHIFTS:
        shift = shift_of(found["sums"])
        values = values * lax.broadcast_in_dim(jnp.exp2(-shift), values.shape, (0,))
        packed = shift * 256.0 ** (piece % IN_A_NUMBER)
        for first, name in ((0, "shifts"), (IN_A_NUMBER, "shifts_high")):
            own = packed if first <= piece < first + IN_A_NUMBER else jnp.zeros_like(packed)
            found[name] = own if carried is None else carried[name] + own
    half.put_last(piece, found)
    if logits is None:
        logits = target_logits_of(half, piece, capped, carried)
    found["target_logits"] = logits
    store_targets(half, piece, lambda: jnp.exp2(logits * LOG2_E - ref_exponent), logits)
    if not switches.stores:
        return found, None
    return found, values if ratio is None else half.masked(values * (1.0 - jnp.square(ratio)), piece, 0.0)


BITS = {"tops": MAX, "columns": ARGMAX, "exp_logs": ENTROPY, "logit_sums": LOGIT_SUM, "squares": SQUARES}
BITS |= {"shifts": SHIFTS, "shifts_high": SHIFTS}


def exponentials_types(
    tiles: Tiles, dtype: Any, *, stores: bool, statistics: int, piece: int | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the types of the results of the kernel of `exponentials`, by name. `dtype` is that of x, and `piece` of
    `FirstChunk`."""
    names = ["sums", *(name for name, bit in BITS.items() if statistics & bit)]
    types = dict.fromkeys(names, tiles.by_block) | dict.fromkeys(OF_TARGETS, tiles.by_place)
    if stores:
        types["out"] = jax.ShapeDtypeStruct((cdiv(tiles.rows, 8) * 8, piece or padded(tiles.classes)), dtype)
    return types


class HeadPart(NamedTuple):
    """Class blocks that are next to each other, in place of the whole head.

    Args:
        first_block: () int32, the first of them.
        first_class: () int32, the row of w that has its first class; where `vocab_axis` is 1 a multiple of 64.
        into: the results of the kernel of `exponentials` for the whole head, by name, among them `others` if it is not
            None. Those of the part are written.
    """

    first_block: Array
    first_class: Array
    into: dict[str, Array]


@partial(jax.jit, static_argnames=(*STATIC, "stores", "statistics", "piece"))  # chunks of one size are lowered once
def exponentials(
    x: Array,
    w: Array,
    bias: Array | None,
    ref_exponent: Array,
    target: Array,
    places: Array,
    start: Array | int,
    others: Array | None = None,
    count: Array | None = None,
    *,
    rows: int,
    classes: int,
    vocab_axis: int,
    logit_scale: float,
    softcap: float | None,
    stores: bool,
    statistics: int,
    piece: int = 0,
    interpret: bool = False,
) -> Exponentials:
    """Returns scaled exponentials of rows' logits, by block of classes: (29), (31).

    Args:
        x: (N, D), of which rows `start` to `start` + `rows` count.
        w: (V, D), or (D, V) where `vocab_axis` is 1; its first `classes` are classes.
        bias: at least (classes,), or None.
        ref_exponent: (rows,) float32 integers.
        target: (rows,) int32 classes, -1 for none. Each target's summand and logit are returned.
        places: of `places_of` for these rows.
        start: a number of rows, or such a scalar on the device.
        others: d_weight (V, D) of x's dtype, or the memory (V, 2D) of one in float32, whose place the exponentials past
            the first `piece` classes take, as `FirstChunk` says; or None.
        count: () int32, how many of the first `classes` rows of w are classes; None: all.
        rows, classes, vocab_axis, logit_scale, softcap: static arguments.
        stores: whether the exponentials are stored.
        statistics: of `linear_ce.statistics`, which are computed.
        piece: of `FirstChunk`, with `others`.
        interpret: whether the kernel runs in Pallas' interpreter, on a CPU.
    """
    tiles = Tiles(rows, x.shape[1], classes, vocab_axis)
    switches = ExponentialsSwitches(logit_scale, softcap, stores, statistics & OF_BLOCKS)
    values, into, first = (bias, ref_exponent, target, places), None, None
    if others is not None:
        into, first = {"others": others}, FirstChunk.of(piece, rows, others.shape[1])
    offsets = (start, 0, 0) if count is None else (start, 0, 0, 0, count)
    found = _exponentials(tiles, switches, x, w, *values, offsets, into, first, interpret=interpret)
    return to_exponentials(found)


@partial(jax.jit, static_argnames=(*STATIC, "stores", "statistics", "blocks", "piece"))
def exponentials_of_part(
    x: Array,
    w: Array,
    bias: Array | None,
    ref_exponent: Array,
    target: Array,
    places: Array,
    start: Array | int,
    part: HeadPart,
    count: Array | None = None,
    *,
    rows: int,
    classes: int,
    blocks: int,
    vocab_axis: int,
    logit_scale: float,
    softcap: float | None,
    stores: bool,
    statistics: int,
    piece: int = 0,
    interpret: bool = False,
) -> dict[str, Array]:
    """Writes the results of `exponentials` for some class blocks of a float32 head, in place, and returns all results.

    Args:
        x: (N, D), of which D is a multiple of 64.
        w: (v, 2D), or (2D, v) where `vocab_axis` is 1: both halves of rows of the head, among them those of the part;
            or (v, D), or (D, v), these rows rounded.
        part: which class blocks, and where the results are: first `nothing_yet`.
        classes, blocks: of the whole head, and of the part.
        bias, ref_exponent, target, places, start, count, rows, vocab_axis, logit_scale, softcap, stores, statistics,
            piece, interpret: of `exponentials`, for the whole head.
    """
    tiles = Tiles(rows, w.shape[1 - vocab_axis], classes, vocab_axis, blocks)
    switches = ExponentialsSwitches(logit_scale, softcap, stores, statistics & OF_BLOCKS)
    offsets = start, part.first_class, 0, part.first_block, *([] if count is None else [count])
    values, others = (bias, ref_exponent, target, places), part.into.get("others")
    first = None if others is None else FirstChunk.of(piece, rows, others.shape[1])
    return _exponentials(tiles, switches, x, w, *values, offsets, part.into, first, interpret=interpret)


def nothing_yet(
    rows: int,
    classes: int,
    others: Array | None = None,
    after: Array | None = None,
    *,
    stores: bool,
    statistics: int,
    piece: int = 0,
) -> dict[str, Array]:
    """Returns memory for the results of `exponentials_of_part`; others, piece: of `exponentials`. after: the memory of
    the exponentials is taken when this array is there, or with None at any time."""
    options = {"stores": stores, "statistics": statistics, "piece": piece}
    types = exponentials_types(Tiles(rows, 0, classes, 0), jnp.bfloat16, **options)
    memory = {
        name: lax.empty(made.shape, made.dtype) if after is None or name != "out" else memory_after(after, made)
        for name, made in types.items()
    }
    return memory if others is None else {**memory, "others": others}


def memory_kernel(_: None, _operand_ref: Any, _result_ref: Any) -> None:
    """Does nothing."""


def memory_after(operand: Array, kind: jax.ShapeDtypeStruct) -> Array:
    """Returns memory like `lax.empty`, which is taken when an operand is there.

    `lax.empty` has no operand. In a program with collectives XLA may take its memory for a chunk of rows while the
    chunk before still has its own: 250 MiB more on each of 8 H200s, for the shape of Gemma 2 2B.
    """
    return run(memory_kernel, None, (operand,), (kind,), (1,), warps=1, stages=1)[0]


def _exponentials(
    tiles: Tiles, switches: ExponentialsSwitches, x: Array, w: Array, bias: Array | None, ref_exponent: Array,
    target: Array, places: Array, offsets: tuple[Array | int, ...], into: dict[str, Array] | None,
    first: FirstChunk | None, *, interpret: bool,
) -> dict[str, Array]:  # fmt: skip
    by_row = {"ref_exponent": tiles.by_row(ref_exponent, jnp.inf)}  # no row: zeros
    operands = {"bias": tiles.by_column(bias, 0), "places": places, "target": tiles.by_row(target, -1)}
    options = {"stores": switches.stores, "statistics": switches.statistics, "piece": first and first.piece}
    return launch_tiles(
        "exponentials",
        partial(exponentials_epilogue, switches),
        tiles,
        x,
        w,
        offsets,
        by_row,
        operands,
        exponentials_types(tiles, x.dtype, **options),
        stored=x.dtype if switches.stores else None,
        into=into,
        first=first,
        interpret=interpret,
    )


def to_exponentials(found: dict[str, Array]) -> Exponentials:
    """Returns the results of the kernel of `exponentials`, which has the sums of binary logarithms."""
    if "exp_logs" in found:
        found = {**found, "exp_logs": found["exp_logs"] * LN_2}
    others = {name: found.get(name) for name in BITS if name != "tops"}
    of_targets = (found[name] for name in OF_TARGETS)
    return Exponentials(
        found.get("out"), found["sums"], found.get("tops"), *of_targets, **others, others=found.get("others")
    )


def exponentials_of_float32_head(
    problem: Problem, arrays: tuple[Any, ...], in_d_weight: Array | None, options: dict[str, Any], *, of_shard: bool
) -> Exponentials:
    """Returns `exponentials` of these arguments for a float32 head that is split or rounded in copies of it, one part
    at a time: a shard, or a head that `hopper_split_logits.split_exponentials` does not take.

    If the last part would end past the last class block, it starts earlier. It then writes the same numbers again.
    """
    (x, w, *others), plan, axis = arrays, plan_of(problem), problem.vocab_axis
    assert plan.tile is not None
    block_v, blocks = plan.tile.block_v, cdiv(problem.classes, plan.tile.block_v)
    part_blocks = min(blocks, cdiv(plan.scaled_exp_config.head_rows, block_v))
    size = min(part_blocks * block_v, w.shape[axis])

    def body(found: dict[str, Array], part: Slice) -> tuple[dict[str, Array], None]:
        first = part.start * block_v
        start = jnp.minimum(first, w.shape[axis] - size)
        of_part = HeadPart(jnp.asarray(part.start, jnp.int32), first - start, found)
        both = problem.weight_of(Slice(start, size, None))
        return exponentials_of_part(x, both, *others, of_part, blocks=part_blocks, **options), None

    kinds = {name: options[name] for name in ("rows", "classes", "stores", "statistics", "piece") if name in options}
    nothing = nothing_yet(others=in_d_weight, after=x if of_shard else None, **kinds)
    found, _ = over_slices(body, nothing, blocks, part_blocks)
    return to_exponentials(found)


class StatisticsSwitches(NamedTuple):
    """The options of `statistics_epilogue`: the sum of class_weight * logits, `linear_ce.statistics`, and what the
    targets have."""

    logit_scale: float
    softcap: float | None
    weighted: bool
    has_class_weight: bool  # otherwise they are ones
    statistics: int
    has_target: bool


def statistics_epilogue(
    switches: StatisticsSwitches, half: Half, piece: int, raw: Array, carried: Any
) -> tuple[Any, None]:
    """Writes the statistics of a half tile's rows over its classes: (25)."""
    capped, _ = to_logits(half, raw, piece, switches.logit_scale, switches.softcap)
    if switches.logit_scale != 1.0 or switches.softcap is not None:
        # Keeps the multiplication apart from the subtraction of the maximum: rounded together, the exponential
        # of that logit is not 1, and a confident target's is not its summand.
        capped = jnp.where(capped == capped, capped, raw)
    logits = half.masked(capped, piece, -jnp.inf)
    of_top = largest_of(half, piece, logits, carried, switches.statistics)
    top = of_top["tops"]
    shift = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)  # all -inf: sums of 0, not NaN
    shifted = logits - lax.broadcast_in_dim(shift, logits.shape, (0,))
    exponentials = jnp.exp2(shifted * LOG2_E)
    found = {**of_top, "sums": exponentials.sum(1)}
    if switches.statistics & SQUARES:
        found["squares"] = (exponentials * exponentials).sum(1)
    if switches.statistics & ENTROPY:
        found["sums_exp_log"] = (exponentials * jnp.maximum(shifted, NO_PROBABILITY)).sum(1)
    if switches.weighted:
        terms = capped * half.of_columns("class_weight", piece) if switches.has_class_weight else capped
        found["weighted_sums"] = half.masked(terms, piece, 0.0).sum(1)
    if carried is not None:  # pieces are merged as vocabulary chunks are: (26)
        moved = jnp.maximum(carried["tops"] - shift, NO_PROBABILITY)
        factor = jnp.exp2(moved * LOG2_E)
        found["sums"] += factor * carried["sums"]
        if switches.statistics & SQUARES:
            found["squares"] += factor * factor * carried["squares"]
        if switches.statistics & ENTROPY:
            found["sums_exp_log"] += factor * (carried["sums_exp_log"] + moved * carried["sums"])
        if switches.weighted:
            found["weighted_sums"] += carried["weighted_sums"]
    half.put_last(piece, found)
    if switches.has_target:
        target_logits = found["target_logits"] = target_logits_of(half, piece, capped, carried)
        store_targets(half, piece, lambda: jnp.exp2((target_logits - shift) * LOG2_E), target_logits)
    return found, None


@partial(jax.jit, static_argnames=(*STATIC, "weighted", "statistics"))
def statistics(
    x: Array,
    w: Array,
    bias: Array | None,
    class_weight: Array | None,
    start: Array | int,
    first_class: Array | int,
    skip: Array | int,
    *,
    rows: int,
    classes: int,
    vocab_axis: int,
    logit_scale: float,
    softcap: float | None,
    weighted: bool,
    statistics: int,
    target: Array | None = None,
    interpret: bool = False,
) -> tuple[Array | None, ...]:
    """Returns statistics of rows over a chunk of classes, (rows,) float32 each: (25).

    Args:
        x, w, bias, start, rows, vocab_axis, logit_scale, softcap, interpret: of `exponentials`; bias is indexed as w.
        class_weight: (V,) float32, indexed as w is; None means ones.
        first_class, classes: the chunk is `first_class` to `first_class` + `classes` of w. Scalars, as `skip` is;
            where `vocab_axis` is 1 `first_class` is a multiple of 64.
        skip: how many classes at the chunk's start are left out.
        weighted: whether the sum of class_weight * logits is computed.
        statistics: of `linear_ce.statistics`: whether the sum of exp(logits - max) * (logits - max), the column of the
            largest logit and the sum of exp(logits - max) ** 2 are computed.
        target: (rows,) int32, columns of the chunk, none of which is left out, -1 for none; or None.

    Returns:
        The largest logit, the sum of exp(logits - max), those of class_weight * logits and exp(logits - max) * (logits
        - max); the target's summand of the former, and its logit, 0 where there is none; the column of the largest
        logit, int32, and the sum of the squares. Results that are not computed are None.
    """
    tiles = Tiles(rows, x.shape[1], classes, vocab_axis)
    weights = class_weight if weighted else None
    target = tiles.by_row(target, -1)
    places = None if target is None else places_of(target, classes)
    operands = {
        "bias": tiles.by_column(bias, first_class),
        "class_weight": tiles.by_column(weights, first_class),
        "places": places,
        "target": target,
    }
    bits = {"sums_exp_log": ENTROPY, "columns": ARGMAX, "squares": SQUARES}
    statistics &= ENTROPY | ARGMAX | SQUARES
    names = ["tops", "sums", *["weighted_sums"] * weighted, *(name for name, bit in bits.items() if statistics & bit)]

    results = dict.fromkeys(names, tiles.by_block)
    if target is not None:
        results |= dict.fromkeys(OF_TARGETS, tiles.by_place)
    switches = StatisticsSwitches(logit_scale, softcap, weighted, weights is not None, statistics, target is not None)
    epilogue, offsets = partial(statistics_epilogue, switches), (start, first_class, skip)
    found = launch_tiles("statistics", epilogue, tiles, x, w, offsets, {}, operands, results, interpret=interpret)
    targets = None
    if target is not None and places is not None:
        target = target[:rows]
        target_exp, target_logit = (by_target(tiles, places, target, found[name]) for name in OF_TARGETS)
        targets = target, target_exp, target_logit
    return _merged({key: found[key][:, :rows] for key in names}, targets)


def _merged(out: dict[str, Array], targets: tuple[Array, Array, Array] | None) -> tuple[Array | None, ...]:
    """Returns what `statistics` does, of its numbers by block, (class blocks, rows); targets, their summands and their
    logits, (rows,): (26), all blocks at once."""
    tops = out["tops"]
    top = tops.max(0)
    masked = tops == -jnp.inf
    shift = jnp.where(masked, 0.0, tops - top)
    scale = jnp.where(masked, 0.0, jnp.exp(shift))
    target_exp = target_logit = None
    if targets is not None:
        target, target_exp, target_logit = targets
        target_exp *= scale[target.clip(0) // BLOCK_V, jnp.arange(len(target))]
    return (
        top,
        (scale * out["sums"]).sum(0),
        out["weighted_sums"].sum(0) if "weighted_sums" in out else None,
        (scale * (out["sums_exp_log"] + shift * out["sums"])).sum(0) if "sums_exp_log" in out else None,
        target_exp,
        target_logit,
        first_of_largest(tops, out["columns"], top, BLOCK_V) if "columns" in out else None,
        (jnp.square(scale) * out["squares"]).sum(0) if "squares" in out else None,
    )


class DLogitsSwitches(NamedTuple):
    """What `d_logits_epilogue` computes with: `beta` and `sigma` are not 0 everywhere, and class weights not 1."""

    logit_scale: float
    softcap: float | None
    has_beta: bool
    has_sigma: bool
    has_class_weight: bool


def d_logits_epilogue(switches: DLogitsSwitches, half: Half, piece: int, raw: Array, _: None) -> tuple[None, Array]:
    """Returns a piece of d_logits: (23), (15)."""
    row = {key: half.of_rows(key) for key in half.by_row}
    logits, ratio = to_logits(half, raw, piece, switches.logit_scale, switches.softcap)
    log_prob = logits - row["lse"]
    factor = row["alpha"]
    if switches.has_beta:
        log_prob = jnp.maximum(log_prob, NO_PROBABILITY)
        factor = factor + row["beta"] * log_prob
    values = jnp.exp2(log_prob * LOG2_E) * factor
    if switches.has_sigma:
        sigma = row["sigma"]
        values = values - (sigma * half.of_columns("class_weight", piece) if switches.has_class_weight else sigma)
    values = jnp.where(half.columns(piece) == row["target"], values - row["tau"], values)
    if ratio is not None:
        values = values * (1.0 - jnp.square(ratio))
    values = jnp.where(row["contributes"] != 0, values, 0.0)
    return None, half.masked(values, piece, 0.0)


@partial(jax.jit, static_argnames=STATIC)
def d_logits(
    x: Array,
    w: Array,
    bias: Array | None,
    class_weight: Array | None,
    target: Array,
    lse: Array,
    alpha: Array,
    tau: Array,
    beta: Array | None,
    sigma: Array | None,
    contributes: Array,
    start: Array | int,
    first_class: Array | int,
    skip: Array | int,
    *,
    rows: int,
    classes: int,
    vocab_axis: int,
    logit_scale: float,
    softcap: float | None,
    interpret: bool = False,
) -> Array:
    """Returns d_logits of rows and a chunk of classes, (rows or up to 7 more, padded) of x's dtype, 0 past the last
    row and class: (23), (15).

    Args:
        x, w, bias, class_weight, start, first_class, skip, rows, classes, vocab_axis, logit_scale, softcap,
            interpret: of `statistics`.
        target: (rows,) int32, the class as w counts them.
        lse, alpha, tau, beta, sigma: (rows,) float32, the last two None where they are 0.
        contributes: (rows,) bool; the other rows are 0.
    """
    tiles = Tiles(rows, x.shape[1], classes, vocab_axis)
    weights = None if sigma is None else class_weight
    values = {
        "target": target.astype(jnp.int32) - first_class,  # its column
        "lse": lse,
        "alpha": alpha,
        "tau": tau,
        "beta": beta,
        "sigma": sigma,
        "contributes": contributes.astype(jnp.int32),
    }
    by_row = {key: tiles.by_row(value) for key, value in values.items()}
    operands = {"bias": tiles.by_column(bias, first_class), "class_weight": tiles.by_column(weights, first_class)}

    switches = DLogitsSwitches(logit_scale, softcap, beta is not None, sigma is not None, weights is not None)
    found = launch_tiles(
        "d_logits",
        partial(d_logits_epilogue, switches),
        tiles,
        x,
        w,
        (start, first_class, skip),
        by_row,
        operands,
        {"out": jax.ShapeDtypeStruct((cdiv(rows, 8) * 8, padded(classes)), x.dtype)},
        stored=x.dtype,
        interpret=interpret,
    )
    return found["out"]
