"""The tiles and chunks of the kernels: pure functions of shapes, dtypes and memory budget.

These functions determine speed and memory. They change results only by rounding.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

from linear_ce import chunk_cost
from linear_ce.chunk_cost import D_BLOCK, ROW_BLOCK
from linear_ce.chunking import MIN_ROWS, MIN_VOCAB_CHUNK, BudgetTooSmallError, ChunkConfig, WorkspaceModel


@dataclass(frozen=True)
class TileConfig:
    """A tile of logits.

    Args:
        block_n: rows.
        block_v: classes.
    """

    block_n: int
    block_v: int


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


# Classes of a tile of the Hopper kernels. A thread holds 96 sums of this tile, 96 of the tile before, and temporaries.
# With 256 classes, the most that wgmma takes, the registers would not be enough.
CLASS_BLOCK = 192

HALF = D_BLOCK // 2  # rows of a warpgroup: 64, the least that wgmma takes

SPLIT_ROWS, SPLIT_CLASSES = 256, 2 * HALF  # of a tile of logits whose float32 head is split in registers

STEP = 64  # hidden units, or classes, of a step of a matmul in the Hopper kernels


TRITON_CLASS_BLOCK = 128  # classes of a tile of logits of Pallas' Triton kernels


class TritonTile(NamedTuple):
    """ROW_BLOCK rows x block_v classes of logits, summed over block_d columns of x at a time."""

    block_v: int
    block_d: int
    num_warps: int = 8


def triton_tile(itemsize: int, *, crowded: bool) -> TritonTile:
    """Returns the tile of Pallas' Triton kernels.

    A thread has 255 registers and holds 128 float32 sums. It holds 64 if `crowded`: the registers then also hold a
    slope, a weight or a gradient for each logit, or operands of an `unaligned` head. It holds 64 for float32 too: no
    matrix unit multiplies float32, so operands take registers. All tiles fit the shared memory of an A100, which runs
    two programs of four warps on a multiprocessor: one multiplies while the other computes exponentials. On an H100, as
    a proxy, machine code for an A100 with this tile takes a tenth less time than with a tile of 256 classes and eight
    warps, of which one program fits. GPUs of compute capability 8.6 and 8.9 have memory for one of four warps. No
    kernel spills on an A100 or a Hopper.
    """
    if itemsize == 4:
        return TritonTile(TRITON_CLASS_BLOCK, 32)
    return TritonTile(TRITON_CLASS_BLOCK, 64, 8 if crowded else 4)


def unaligned(vocab: int, vocab_axis: int) -> bool:
    """Returns whether threads load the classes of a head one by one, because rows of (D, V) do not start at multiples
    of 16 bytes."""
    return vocab_axis == 1 and vocab % 8 != 0


# The tile of the repair kernel, which rarely has work. It compiles in a seventh of the time that `triton_tile`'s takes.
REPAIR_TILE, REPAIR_STAGES = TritonTile(TRITON_CLASS_BLOCK, 32), 2


def choose_tile(*, hopper: bool) -> TileConfig:
    """Returns the tile of logits of the Hopper kernels or of `triton_tile`."""
    return TileConfig(ROW_BLOCK, CLASS_BLOCK if hopper else TRITON_CLASS_BLOCK)


# The tile of the Hopper kernel that splits a float32 head in registers. Its sums are those of each warpgroup's classes.
SPLIT_TILE, SPLIT_CLASS_BLOCK = TileConfig(SPLIT_ROWS, SPLIT_CLASSES), SPLIT_CLASSES // 2


@dataclass(frozen=True)
class SplitKSchedule:
    """How the programs of a GPU divide the tiles of d_input, which are sums over the classes: split-K, in two levels.

    d_input has few tiles, and each is a sum over all classes. With whole tiles only, programs would be idle. Programs
    that run at the same time read the same classes, so that they share what they read from device memory
    (`input_grad.work_unit_of`).

    Args:
        tile_rows: rows of a tile. It has 128 columns of D.
        full_waves: whole tiles that each program computes first, data-parallel.
        split_tiles: tiles that are left. They are split along the classes.
        split_factor: programs that compute an equal part of the first iterations of each split tile.
        split_iters: iterations of each split tile that those parts cover.
        iters_per_tile: iterations of a whole tile.
        tail_programs: programs that are left. They compute the tails of all split tiles, the other iterations. In each
            wave but the last they compute whole tails. In the last wave each tail is split into equal parts.

    An iteration is one step of a matmul's inner loop. A stream-K schedule (Osama et al., "Stream-K: Work-centric
    Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU", 2023) lays the tails end to end. It
    divides them evenly, but each of its programs reads other classes.
    """

    tile_rows: int
    full_waves: int
    split_tiles: int
    split_factor: int
    split_iters: int
    iters_per_tile: int
    tail_programs: int

    @property
    def tail_waves(self) -> int:
        """Waves in which each of the tail programs computes the whole tail of a tile."""
        return self.split_tiles // self.tail_programs if self.tail_programs else 0

    @property
    def last_tails(self) -> int:
        """Tails of the last wave, which are split."""
        return self.split_tiles % self.tail_programs if self.tail_programs else 0

    @property
    def tail_factor(self) -> int:
        """Programs that compute an equal part of each tail of the last wave; 0: there is no such wave."""
        return self.tail_programs // self.last_tails if self.last_tails else 0

    @property
    def partial_tiles(self) -> int:
        """Partial tiles that are stored for the fix-up: 0 where no tile is split."""
        parts = self.split_factor * self.split_tiles
        if parts == self.split_tiles and not self.tail_programs:
            return 0
        return parts + self.tail_waves * self.tail_programs + self.tail_factor * self.last_tails

    @property
    def longest(self) -> int:
        """Iterations of the program that computes most."""
        tail = self.iters_per_tile - self.split_iters
        tails = self.tail_waves * tail + (cdiv(tail, self.tail_factor) if self.tail_factor else 0)
        part = max(cdiv(self.split_iters, max(self.split_factor, 1)), tails)
        return self.full_waves * self.iters_per_tile + (part if self.split_tiles else 0)

    @property
    def bytes(self) -> int:
        return 4 * self.partial_tiles * D_BLOCK * self.tile_rows

    @property
    def cost(self) -> float:
        """An estimate of the time, in iterations of one row of a tile. It orders schedules.

        An iteration costs 16 rows more than its own, because narrow tiles read more for each matmul. The tail programs
        read other classes than the others do at the time. Partial tiles are written and read. The numbers were measured
        on an H200 with tails laid end to end (stream-K), of which each program read other classes.
        """
        tail = self.iters_per_tile - self.split_iters
        longest = (self.tile_rows + 16) * self.longest
        return longest * (1 + 0.1 * tail / self.iters_per_tile) + self.bytes / 6000


MIN_TAIL_PROGRAMS = 16  # fewer idle programs cost less than the many short parts that they would compute

TILE_ROWS = range(256, 120, -8)


def schedule_of(
    rows: int, hidden: int, classes: int, tile_rows: int, splits_tiles: bool, programs: int
) -> SplitKSchedule:
    """Returns how `programs` programs divide tiles of `tile_rows` rows: in whole tiles unless `splits_tiles`."""
    iters_per_tile = cdiv(classes, STEP)
    full_waves, split_tiles = divmod(cdiv(rows, tile_rows) * cdiv(hidden, D_BLOCK), programs)
    if not (split_tiles and splits_tiles):
        return SplitKSchedule(
            tile_rows, full_waves, split_tiles, int(split_tiles > 0), iters_per_tile, iters_per_tile, 0
        )
    split_factor = min(programs // split_tiles, iters_per_tile)
    tail_programs = programs - split_factor * split_tiles
    schedule = SplitKSchedule(
        tile_rows, full_waves, split_tiles, split_factor, iters_per_tile, iters_per_tile, tail_programs
    )
    waves = schedule.tail_waves + (1 / schedule.tail_factor if schedule.tail_factor else 0)
    tail = round(iters_per_tile / (1 + split_factor * waves)) if tail_programs >= MIN_TAIL_PROGRAMS else 0
    if tail < max(schedule.tail_factor, 1) or iters_per_tile - tail < split_factor:
        return replace(schedule, tail_programs=0)
    return replace(schedule, split_iters=iters_per_tile - tail)


FIXED_ROWS = 128  # of a tile of d_input with batch_invariant: the fewest, so that there are many tiles


def choose_schedule(
    rows: int, hidden: int, classes: int, most: int | None, programs: int, *, batch_invariant: bool = False
) -> SplitKSchedule:
    """Returns the fastest schedule of `programs` programs for d_input with at most `most` bytes of partial tiles.

    With `batch_invariant` it has whole tiles of one size, so that the order of a row's sum does not depend on the
    number of rows.
    """
    if batch_invariant:
        return schedule_of(rows, hidden, classes, FIXED_ROWS, False, programs)
    choices = _schedules(rows, hidden, classes, programs)
    return next(schedule for schedule, size in choices if most is None or size <= most)


@lru_cache(maxsize=1024)
def _schedules(rows: int, hidden: int, classes: int, programs: int) -> list[tuple[SplitKSchedule, int]]:
    """Returns schedules and their bytes, the fastest first.

    Of the tiles that divide the rows in the same number, only the shortest are tried: they are faster and smaller.
    """
    shortest = {cdiv(rows, tile_rows): tile_rows for tile_rows in TILE_ROWS}
    choices = (
        schedule_of(rows, hidden, classes, *choice, programs)
        for choice in itertools.product(shortest.values(), (False, True))
    )
    return [(schedule, schedule.bytes) for schedule in sorted(choices, key=lambda schedule: schedule.cost)]


def d_input_sizes(rows: int, hidden: int, classes: int, programs: int) -> list[int]:
    """Returns the bytes of partial tiles that a faster schedule of d_input takes than all with fewer, most first."""
    found: list[int] = []
    for _, size in _schedules(rows, hidden, classes, programs):
        if not found or size < found[-1]:
            found.append(size)
    return found


def d_input_scratch(rows: int, hidden: int, classes: int, most: int | None, programs: int) -> int:
    """Returns the bytes that `d_input` takes in addition to its arguments, with `programs` programs and its argument
    `most`."""
    return choose_schedule(rows, hidden, classes, most, programs).bytes


# Places of a row for its target's logit and summand. Each of `TARGET_PLACES` tiles that hold a target has a place for
# the two numbers of all its rows.
TARGET_PLACES = 64
TARGET_BYTES = 2 * 4 * TARGET_PLACES

CALL_PLACES = 8  # chunks whose targets' places are computed at once: more places would take memory from the chunks


@dataclass(frozen=True)
class ScaledExpConfig:
    """How plans A and B with scaled exponentials divide a call.

    Args:
        rows: rows of a chunk.
        last_rows: rows that the kernels compute for the last chunk, which may have fewer.
        head_rows: rows of the head that a matmul takes at a time: all of them, unless the head is split, or d_weight is
            scaled.
        d_input_bytes: bytes that the partial tiles of d_input may take.
        bytes: bytes of workspace.
        first_rows: rows of the last chunk, which is computed first, if its exponentials are in the memory of d_weight
            (`first_chunk.py`): more than `rows`. 0: it is as the others, or smaller.
        piece: classes whose exponentials are in the workspace then.
    """

    rows: int
    last_rows: int
    head_rows: int
    d_input_bytes: int
    bytes: int
    first_rows: int = 0
    piece: int = 0

    def usual_rows(self, tokens: int) -> int:
        """Returns the rows of the only chunk of a call, or of the chunks that add to d_weight."""
        return self.first_rows if self.first_rows == tokens else self.rows

    def last_start(self, tokens: int) -> int:
        """Returns the first row of the last chunk, a multiple of `rows`."""
        return tokens - self.first_rows if self.first_rows else (tokens - 1) // self.rows * self.rows

    def kernel_rows(self, size: int) -> int:
        """Returns the rows that the kernels of a chunk of `size` rows compute."""
        return size if size == self.rows else self.last_rows


# The kernels compute as many rows for the last chunk as for the others if the additional rows are at most 1/50 of the
# call. Then they are compiled once. Two matmuls compute the additional rows; the one of d_weight skips them.
COMPILED_FRACTION = 50

D_INPUT_FRACTION = 16  # 1/16 of the budget: partial tiles of d_input without an estimate, a part of a scaled d_weight

LIBRARY_BYTES = 2**25  # workspace of cuBLAS on a Hopper

# Of both halves of a vocabulary chunk of a split head, at most. On an H200 two waves of tiles of 1,408 rows take 72 MiB
# with D = 4,096. In less memory the launches of a vocabulary chunk would cost more time than fewer rows do.
CAST_BYTES = 3 * 2**25

VOCAB_CHUNK_HIDDEN = 1024  # columns of D that the two launches of one take as long as, by an estimate

D_WEIGHT_BYTES = 2**25  # of a float32 matmul of d_weight by XLA, times a power of two: float16

COUNTED_CLASSES = 2048  # that XLA copies at a time where it may not multiply the padding of a shard

D_LOGITS_VOCAB_CHUNK = 12288  # classes of a vocabulary chunk at most

PARTIAL_BYTES = 3 * 2**24  # bytes of rows and their sums at a time, where no matmul follows

FIRST_CHUNK_TRIES = 6  # sizes of its piece that are estimated

FIRST_CHUNK_PIECE = 4  # times its rows, to whole row blocks: the fewest classes of its piece. Others are little shorter

# Pieces of a float32 d_weight at most. Its chunks are larger, and would need more memory for so wide a piece. Each is a
# launch, whose last wave leaves programs idle.
FIRST_CHUNK_PIECES = 24


def first_chunk_room(hidden: int, itemsize: int) -> int:
    """Returns the most rows of a first chunk with exponentials in the memory of d_weight: `first_chunk.py`.

    Args:
        hidden: D.
        itemsize: of d_weight. In two bytes a group of classes is no shorter than a column. The groups of a float32
            d_weight may be, because such chunks are more often all rows of a call.
    """
    if itemsize == 4 and 2 * hidden >= CLASS_BLOCK:
        return 2 * hidden // ROW_BLOCK * ROW_BLOCK
    return hidden // CLASS_BLOCK * CLASS_BLOCK // ROW_BLOCK * ROW_BLOCK


def first_chunk_pieces(piece: int, rows: int, group: int, classes: int) -> list[tuple[int, int]] | None:
    """Returns the pieces of d_weight of a `FirstChunk`, (first class, end), in the order in which they are written.

    A piece starts at the first class block whose rows hold no exponentials of the piece or of classes before it. None:
    there is no such block, because the piece in the workspace is too narrow.
    """
    found, end = list[tuple[int, int]](), classes
    while end > 0:
        groups = cdiv(max(0, end - piece), group)
        first = cdiv(groups * rows, CLASS_BLOCK) * CLASS_BLOCK
        if first >= end:
            return None
        found.append((first, end))
        end = first
    return found


def choose_scaled_exp(
    *,
    tokens: int,
    hidden: int,
    classes: int,
    itemsize: int,
    stores: bool,
    saves: bool = False,
    holds: bool,
    d_bias: bool,
    statistics: int,
    shifts: int = 0,
    block_v: int,
    hopper: bool,
    scratch: Callable[[int, int], int],
    head_parts: int = 0,
    splits_in_place: bool = False,
    programs: int = 1,
    second_d_weight: int,
    scales_d_weight: bool = False,
    copied: int = 0,
    exchanged: int = 0,
    token_parts: int = 1,
    batch_invariant: bool = False,
    room: int = 0,
    call: chunk_cost.Call | None = None,
    budget: int,
) -> ScaledExpConfig:
    """Returns the chunks of plans A and B with scaled exponentials: the fastest that the budget allows, by an estimate.

    Without an estimate they are as few and as equal as the budget allows.

    Args:
        tokens: N.
        hidden: D.
        classes: K.
        itemsize: of the input's dtype.
        stores: the exponentials are stored, for gradients. Otherwise `PARTIAL_BYTES` are enough.
        saves: they are saved for the backward pass, in memory that is not workspace. It computes d_weight.
        holds: the chunk's rows of the input are in the memory of d_input or of the input.
        d_bias: d_bias is computed.
        statistics: how many numbers besides the sums and `shifts` a kernel writes for each row and class block.
        shifts: the same for the shifts of exponentials: float16.
        block_v: classes of a tile of logits.
        hopper: the matmul kernels are those for sm_90. TMA reads zeros past the last row and ignores stores there.
        scratch: (rows, most) -> bytes that the gradient matmuls of a chunk take in addition to the exponentials.
        head_parts: matrices that a float32 head is cast to, side by side, one vocabulary chunk at a time. 0: it is not.
        splits_in_place: the kernels split the head in registers, and nothing is cast. The tile is `SPLIT_TILE`.
        programs: multiprocessors, where `hopper`.
        second_d_weight: bytes of the second d_weight that a call of two chunks takes. XLA's GEMM adds to d_weight in
            place only inside a loop, and XLA inlines a loop of one step.
        scales_d_weight: d_weight is a float32 matmul of XLA, a few classes at a time, times a power of two.
        copied: bytes of copies and of other numbers of the rows.
        exchanged: bytes of a row of a chunk for what devices exchange that divide the vocabulary.
        token_parts: devices that each have as many rows of a chunk, and gather those of the next chunk beside it.
        batch_invariant: of `choose_schedule`.
        room: most rows of a first chunk with exponentials in the memory of d_weight: `first_chunk_room`. 0: d_weight
            has no such memory.
        call: what the time of a call depends on; None: the fewest chunks win.
        budget: bytes.

    Raises:
        ValueError: `MIN_ROWS` rows do not fit. The message names the smallest budget that can.
    """
    tokens = max(tokens, 1)
    # Two chunks of at most MIN_ROWS would take more than one chunk of all rows.
    least_rows = tokens if second_d_weight and tokens <= 2 * MIN_ROWS else min(tokens, MIN_ROWS)
    # Rows' numbers but for the sorted ones, which come when the exponentials are gone; d_bias, in float32 and as it is
    # returned.
    fixed = (32 + 4 * statistics) * tokens + 8 * classes * d_bias + 4096 + copied
    in_workspace = stores and not saves
    copied_parts = 0 if splits_in_place else head_parts
    enough = budget if stores else min(budget, fixed + PARTIAL_BYTES + CAST_BYTES * (copied_parts > 0))
    blocks, again = cdiv(classes, SPLIT_CLASS_BLOCK if splits_in_place else block_v), cdiv(classes, REPAIR_TILE.block_v)
    row_block = SPLIT_ROWS if splits_in_place else ROW_BLOCK

    @cache
    def head_rows_of(rows: int, last_rows: int, most: int) -> int:
        """Returns the classes of a vocabulary chunk of at most `most` bytes, or of one tile: on a Hopper those with the
        fewest waves of tiles of logits, in chunks of `rows` rows and the last one. The last vocabulary chunk is as
        large as the others, and may overlap the one before. So they are as equal as possible."""
        if not (copied_parts or scales_d_weight):
            return classes
        row = 4 * hidden if scales_d_weight else head_parts * itemsize * hidden
        fitting = most // row if scales_d_weight else min(most // row, D_LOGITS_VOCAB_CHUNK)
        part = max(1, fitting // block_v)
        if hopper:
            many = cdiv(tokens - last_rows, rows), 1
            row_blocks = cdiv(rows, ROW_BLOCK), cdiv(last_rows, ROW_BLOCK)

            def time(part: int) -> int:
                waves = sum(n * cdiv(part * size, programs) for n, size in zip(many, row_blocks, strict=True))
                return cdiv(blocks, part) * (waves * head_parts * hidden + sum(many) * VOCAB_CHUNK_HIDDEN)

            part = min(range(part, 0, -1), key=time)
        return min(classes, cdiv(blocks, cdiv(blocks, part)) * block_v)

    def config(rows: int, cast_bytes: int, first_rows: int = 0, most: int | None = None) -> ScaledExpConfig:
        rows = cdiv(rows, token_parts) * token_parts
        head_rows = head_rows_of(rows, first_rows or (tokens - 1) % rows + 1, cast_bytes)
        most_rows, head_bytes = max(rows, first_rows), copied_parts * itemsize * hidden * head_rows
        padded_rows = -(-most_rows // row_block) * row_block
        # Sums of blocks, and largest logits; then, in their place, those of the blocks that are done again. Other
        # statistics and shifts are read when these are there, and XLA keeps a difference of them.
        partial = (1 + statistics) * blocks + 4 * again if statistics > 1 else max((1 + statistics) * blocks, again)
        partial += shifts * blocks
        sums = (4 * partial + TARGET_BYTES * hopper + 32 + exchanged) * padded_rows
        chunks = cdiv(tokens, rows)
        at_once = chunks if chunks <= CALL_PLACES and not first_rows else 1
        places = 4 * blocks * 2 * cdiv(most_rows, ROW_BLOCK) * at_once * hopper
        size = fixed + places + second_d_weight * (chunks == 2)
        if hopper:  # whose d_input reads the head itself
            sums += head_bytes
        else:
            size += head_bytes
        # The backward pass copies the rows of the input, and multiplies them by their upstream gradients.
        copied_rows = most_rows if saves or not holds else first_rows
        if token_parts > 1:  # the rows of two chunks, and this device's rows of one, of the input and of d_input
            copied_rows = 2 * most_rows + 3 * most_rows // token_parts
        if batch_invariant and exchanged:  # of `vocab_shard.ordered_sum`
            size += 2 * 4 * hidden * most_rows
        stored = -(-rows // 8) * 8 * padded(classes)
        size += itemsize * (stored * in_workspace + copied_rows * hidden)
        most = max(0, min(budget // D_INPUT_FRACTION if most is None else most, budget - size))
        last = (tokens - 1) % rows + 1
        last_rows = rows if hopper and not saves and (rows - last) * COMPILED_FRACTION <= tokens else last
        piece = 0
        if first_rows:
            last_rows, piece = first_rows, stored // (-(-first_rows // 8) * 8) // block_v * block_v
        of_d_input = max(scratch(size, most) for size in {rows, first_rows or rows})
        if head_parts and of_d_input and not hopper:  # the sum and a term of XLA's GEMM, and columns of exponentials
            of_d_input += of_d_input + itemsize * rows * head_rows
        # A part of the sum, the exponentials of its classes, and the rows of the input.
        parts_of_d_weight = head_rows * (4 * hidden + itemsize * rows) + itemsize * rows * hidden
        of_d_weight = scales_d_weight * parts_of_d_weight
        size += max(sums, of_d_input, of_d_weight)
        return ScaledExpConfig(rows, last_rows, head_rows, most, size, first_rows, min(piece, classes))

    def configs(rows: int, cast_bytes: int, first_rows: int = 0) -> Iterator[ScaledExpConfig]:
        """Returns chunks of so many rows with all sizes of the partial tiles of d_input that the estimate compares."""
        compares = hopper and call is not None and call.d_input and not batch_invariant
        if not compares:
            return iter([config(rows, cast_bytes, first_rows)])
        sizes = {size for n in {rows, first_rows or rows} for size in d_input_sizes(n, hidden, classes, programs)}
        return (config(rows, cast_bytes, first_rows, most) for most in sorted(sizes, reverse=True))

    def pieces_of(found: ScaledExpConfig) -> list[tuple[int, int]] | None:
        """Returns the pieces of d_weight of a first chunk; None if there is none, or its piece is too narrow."""
        if not found.piece:
            return None
        rows = cdiv(found.first_rows, ROW_BLOCK) * ROW_BLOCK
        if not head_parts and found.piece < FIRST_CHUNK_PIECE * rows:
            return None
        columns = hidden * (1 + (head_parts > 0))
        pieces = first_chunk_pieces(found.piece, rows, columns // CLASS_BLOCK * CLASS_BLOCK, classes)
        return None if pieces is None or (head_parts and len(pieces) > FIRST_CHUNK_PIECES) else pieces

    def d_input_of(rows: int, found: ScaledExpConfig) -> chunk_cost.DInput | None:
        if call is None or not call.d_input:
            return None
        if not hopper:
            return chunk_cost.library_d_input(call, rows)
        sizes = rows, hidden, classes, found.d_input_bytes, call.programs
        schedule = choose_schedule(*sizes, batch_invariant=batch_invariant)
        share = 1 - schedule.split_iters / schedule.iters_per_tile
        classes_of_both = schedule.longest * STEP * max(1, head_parts)
        return chunk_cost.DInput(schedule.tile_rows, classes_of_both, share, schedule.bytes)

    @cache
    def ms(found: ScaledExpConfig) -> float:
        assert call is not None
        last_rows, multiple = tokens - found.last_start(tokens), SPLIT_ROWS if splits_in_place else 1
        pieces = tuple(end - first for first, end in pieces_of(found) or ())
        chunk, last = (
            chunk_cost.Chunk(rows, cdiv(kernel_rows, multiple) * multiple, d_input_of(kernel_rows, found), sizes)
            for rows, kernel_rows, sizes in ((found.rows, found.rows, ()), (last_rows, found.last_rows, pieces))
        )
        return chunk_cost.call_ms(call, chunk, last)

    def with_first(equal: list[ScaledExpConfig], cast_bytes: int) -> ScaledExpConfig | None:
        """Returns chunks with a first chunk in the memory of d_weight, if they are faster than the best ones without:
        all rows, or as many as d_weight has room for beside other chunks, which have the rows of one of `equal`."""
        rows = {one.rows for one in equal}
        if tokens <= room or head_parts:  # the workspace may hold fewer rows of exponentials, in more pieces
            step = -(-equal[0].rows // (FIRST_CHUNK_TRIES * ROW_BLOCK)) * ROW_BLOCK
            rows |= {*range(step, equal[0].rows, step)}
        sizes = ((one, tokens - max(0, cdiv(tokens - room, one)) * one) for one in rows)
        made = (
            found for one, first_rows in sizes if first_rows > one for found in configs(one, cast_bytes, first_rows)
        )
        fitting = (one for one in made if one.bytes <= enough and pieces_of(one) is not None)
        timed = [(ms(one), one) for one in fitting]
        least = min((time for time, _ in timed), default=math.inf)
        if least >= (1 - chunk_cost.FIRST_CHUNK_GAIN) * ms(equal[0]):
            return None
        fastest = [one for time, one in timed if time <= (1 + chunk_cost.TIE) * least]
        return min(fastest, key=lambda one: (cdiv(tokens - one.first_rows, one.rows), one.bytes))

    # First what is fast.
    fast = min(CAST_BYTES, budget // 4) if head_parts else min(D_WEIGHT_BYTES, budget // D_INPUT_FRACTION)
    for cast_bytes in [fast, 0] if copied_parts or scales_d_weight else [0]:
        equal = chunk_cost.choose_rows(
            lambda rows, cast_bytes=cast_bytes: configs(rows, cast_bytes),
            tokens=tokens,
            least_rows=least_rows,
            chunks=1
            if tokens == least_rows
            else max(1, -(-tokens * itemsize * padded(classes) * in_workspace // budget)),
            enough=enough,
            budget=budget,
            call=call,
            ms=ms,
        )
        if equal:
            has_first = room > 0 and call is not None and equal[0].rows < tokens
            return (with_first(equal, cast_bytes) if has_first else None) or equal[0]
    raise BudgetTooSmallError(config(least_rows, 0).bytes, tokens, classes, budget)


def padded(classes: int) -> int:
    """Returns the length of a row of exponentials or d_logits in memory, so that rows start at multiples of 128
    bytes."""
    return -(-classes // 64) * 64


def choose_recomputed(
    *,
    tokens: int,
    hidden: int,
    classes: int,
    itemsize: int,
    statistics: int,
    float16: bool,
    d_input: bool,
    d_weight: bool,
    needs_cast: bool,
    splits_head: bool = False,
    in_place: bool,
    budget: int,
) -> ChunkConfig:
    """Returns the chunks of plans B and C, which recompute the logits: those with the fewest passes over memory.

    Args:
        tokens: N.
        hidden: D.
        classes: K.
        itemsize: of the input's dtype.
        statistics: how many numbers the first pass writes for each row and class block.
        float16: rows are scaled by powers of two for d_weight.
        d_input: d_input is computed.
        d_weight: d_weight is computed.
        needs_cast: the head is cast to the input's dtype, one vocabulary chunk at a time.
        splits_head: the head is cast to two matrices, side by side.
        in_place: matmuls are added to their sums in place, to d_weight by a kernel and to d_input by cuBLAS. Otherwise
            a float32 result of each matmul is counted.
        budget: bytes.

    Raises:
        ValueError: not even `MIN_ROWS` rows and `MIN_VOCAB_CHUNK` classes fit. The message names the smallest budget
        that can.
    """
    tokens = max(tokens, 1)
    second = d_input or d_weight
    # The head's vocabulary chunk, and d_weight's matmul; rows of the input.
    parts = 1 + splits_head
    per_class = hidden * (itemsize * parts * (second or needs_cast) + 4 * (d_weight and not in_place)) + 32
    per_row = hidden * itemsize * (1 + (float16 and d_weight) + 2 * splits_head) + 128
    fixed = 64 * tokens + 8 * classes + 4096

    def model(vocab_chunk: int) -> WorkspaceModel:
        blocks = -(-(vocab_chunk if needs_cast else classes) // CLASS_BLOCK)  # of the first pass
        partial = 4 * statistics * blocks + TARGET_BYTES + 4 * -(-blocks // TARGET_PLACES)
        sums = (
            hidden * parts * 4 * (1 + (not in_place)) * d_input + itemsize * vocab_chunk * second
        )  # d_input's, and d_logits
        return WorkspaceModel(fixed, per_row + max(partial, sums), per_class, 0)

    def even(vocab_chunk: int) -> int:
        """Returns the smallest vocabulary chunk of whole tiles that does not need more chunks: such chunks overlap
        least."""
        multiple = min(vocab_chunk, CLASS_BLOCK)
        return min(classes, -(-classes // (-(-classes // vocab_chunk) * multiple)) * multiple)

    vocab_chunks = [*(even(D_LOGITS_VOCAB_CHUNK >> i) for i in range(7)), even(MIN_VOCAB_CHUNK)]
    least_rows, least_vocab_chunk = min(tokens, MIN_ROWS), vocab_chunks[-1]
    least = model(least_vocab_chunk).bytes(least_rows, least_vocab_chunk)
    if least > budget:
        raise BudgetTooSmallError(least, tokens, classes, budget)
    budget = max(least, budget - min(LIBRARY_BYTES, budget // D_INPUT_FRACTION) * in_place)
    fitting = {
        vocab_chunk: min(tokens, model(vocab_chunk).rows_within(budget, vocab_chunk)) for vocab_chunk in vocab_chunks
    }
    # Each chunk passes over the head and d_weight, each vocabulary chunk over the chunks' float32 sums of d_input.
    passes = {
        vocab_chunk: -(-tokens // rows) * classes + -(-classes // vocab_chunk) * tokens
        for vocab_chunk, rows in fitting.items()
        if rows >= least_rows
    }
    vocab_chunk = min(passes, key=lambda vocab_chunk: passes[vocab_chunk])
    rows = fitting[vocab_chunk]
    if not second:  # no matmul follows, so PARTIAL_BYTES of statistics at a time are enough
        blocks = -(-classes // CLASS_BLOCK)
        rows = min(rows, max(ROW_BLOCK, PARTIAL_BYTES // (4 * statistics * blocks) // ROW_BLOCK * ROW_BLOCK))
    chunks = -(-tokens // rows)
    rows = min(rows, -(-tokens // (chunks * ROW_BLOCK)) * ROW_BLOCK, tokens)
    return ChunkConfig(
        rows,
        vocab_chunk,
        float32_sum=False,
        statistics_vocab_chunk=vocab_chunk if needs_cast else classes,
        bytes=model(vocab_chunk).bytes(rows, vocab_chunk),
    )
