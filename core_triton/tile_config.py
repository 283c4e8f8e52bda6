"""The tiles and chunks of the kernels: pure functions of shapes, dtypes, GPU and memory budget.

These functions determine speed and memory. They change results only by rounding.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from linear_ce import chunk_cost
from linear_ce.chunk_cost import D_BLOCK, GROUP_BYTES, ROW_BLOCK
from linear_ce.chunking import MIN_ROWS, MIN_VOCAB_CHUNK, BudgetTooSmallError, ChunkConfig, WorkspaceModel


@dataclass(frozen=True)
class TileConfig:
    """A tile of logits on one GPU, and how a program computes it.

    Args:
        block_n: rows.
        block_v: classes.
        block_d: hidden units of a step of the matmul.
        num_warps: warps of a program.
        num_stages: steps that are loaded ahead (software pipelining).
        group: row blocks that are computed with a class block before the next class block.
    """

    block_n: int
    block_v: int
    block_d: int
    num_warps: int
    num_stages: int
    group: int


def kernel_capability(capability: int) -> int:
    """Returns the compute capability whose kernels run on a GPU of compute capability 80, 90, 100, ...

    GPUs of 12.x (GeForce RTX 50, RTX PRO Blackwell, GB10) have the matrix instructions (mma.sync) and the shared memory
    of 8.9, not those of 9.0 (wgmma) or 10.0 (tcgen05). The kernels for any GPU fit them, but spill registers.
    """
    return 89 if capability >= 120 else capability


def choose_tile(capability: int, hidden: int) -> TileConfig:
    """Returns the tile of logits for 16-bit operands for the kernels of compute capability 80, 90, 100, ...

    - Hopper: two warpgroups of 64 x 256. Their accumulators fill the registers. Their three stages and the
      staging buffer of the store fill the shared memory.
    - Ampere and Ada: four warps of 64 x 64, whose accumulators fill half of their registers. A program takes
      at most 64 KiB of shared memory, or 48 KiB on GPUs with 100 KiB (8.6 and 8.9), so that a multiprocessor runs two:
      one computes exponentials while the other multiplies. Programs of eight warps take more, and a multiprocessor runs
      one (`kernels._blocks`).
    - Otherwise the tiles are as large as registers allow without spills.
    """
    block_n = 128
    group = max(1, GROUP_BYTES // (block_n * hidden * 2))
    if capability < 90:
        stages = 4 if capability in (80, 87) else 3
        return TileConfig(block_n, 128, 32, num_warps=4, num_stages=stages, group=group)
    if capability >= 100:
        return TileConfig(block_n, 128, 64, num_warps=8, num_stages=3, group=group)
    return TileConfig(block_n, 256, 64, num_warps=8, num_stages=3, group=group)


def choose_ampere_tile(tile: TileConfig, capability: int) -> TileConfig:
    """Returns the tile of `ampere_logits` on a GPU of compute capability 8.x. It has the rows and classes of `tile`.
    `ampere_gradients` has the same steps and stages.

    Two steps of 64 hidden units take 64 KiB, as four of 32 do, and need half as many barriers. On an H100, with the
    kernel compiled for sm_80, a chunk of Llama takes 5.04 ms (four steps of 32: 5.50 ms), one of Qwen 1.20 (1.35) and
    one of Gemma 3.12 (3.42). Two programs with 64 KiB do not fit on a multiprocessor with 100 KiB (8.6 and 8.9).
    """
    return replace(tile, block_d=64, num_stages=2) if capability in (80, 87) else tile


MAX_STRIDE = 2**24  # elements from row to row: kernels with pointers have int32 offsets within a block of 128 rows


class SplitKSchedule(NamedTuple):
    """How the programs of a GPU divide the tiles of d_input, which are sums over the classes: split-K, in two levels.

    d_input has few tiles, and each is a sum over all classes. With whole tiles only, programs would be idle. Programs
    that run at the same time read the same classes, so that they share what they read from device memory
    (`input_grad.work_unit_of`).

    Args:
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
        tails = self.tail_waves * tail + (-(-tail // self.tail_factor) if self.tail_factor else 0)
        part = max(-(-self.split_iters // max(self.split_factor, 1)), tails)
        return self.full_waves * self.iters_per_tile + (part if self.split_tiles else 0)


MIN_TAIL_PROGRAMS = 16  # fewer idle programs cost less than the many short parts that they would compute


def choose_schedule(tiles: int, iters_per_tile: int, programs: int, *, splits_tiles: bool) -> SplitKSchedule:
    """Returns how `programs` programs divide `tiles` tiles of `iters_per_tile` iterations: in whole tiles unless
    `splits_tiles`."""
    full_waves, split_tiles = divmod(tiles, programs)
    if not (split_tiles and splits_tiles):
        return SplitKSchedule(full_waves, split_tiles, int(split_tiles > 0), iters_per_tile, iters_per_tile, 0)
    split_factor = min(programs // split_tiles, iters_per_tile)
    tail_programs = programs - split_factor * split_tiles
    schedule = SplitKSchedule(full_waves, split_tiles, split_factor, iters_per_tile, iters_per_tile, tail_programs)
    waves = schedule.tail_waves + (1 / schedule.tail_factor if schedule.tail_factor else 0)
    tail = round(iters_per_tile / (1 + split_factor * waves)) if tail_programs >= MIN_TAIL_PROGRAMS else 0
    if tail < max(schedule.tail_factor, 1) or iters_per_tile - tail < split_factor:
        return schedule._replace(tail_programs=0)
    return schedule._replace(split_iters=iters_per_tile - tail)


# Of the Hopper kernels: the inner dimension of a step of a matmul, and how many stages its ring has: 192 KiB beside the
# epilogue's buffers. A step of the logits reads whole lines of 128 bytes of x and the head: half lines are read twice
# where they leave L2 in between, as they do on an H100. For d_weight the inner dimension is the rows, so short steps
# read whole lines too. They let one warpgroup lag behind the other by finer amounts (benchmarks/experiments.md).
LOGITS_STEP, LOGITS_STAGES = 64, 4

D_WEIGHT_STEP, D_WEIGHT_STAGES = 32, 8

D_WEIGHT_FLOAT32_STAGES = 6  # the buffers of a float32 d_weight take 64 KiB

D_INPUT_STEP, D_INPUT_STAGES = 64, 4

D_INPUT_SPLIT_STAGES = 3  # steps of a float32 head

# Of the logits of a float32 head that is split in registers. As many stages as fit: they take 192 KiB, and the buffers
# of the stores 32 KiB.
SPLIT_LOGITS_STEP, SPLIT_LOGITS_STAGES = 64, 3

SPLIT_TILE = 256, 128  # rows and classes of a tile of these logits

SPLIT_CLASS_BLOCK = 128  # classes whose exponentials are summed: those that a warpgroup has in two tiles

CLASS_BLOCK = 256  # classes of a tile of d_weight: the widest that one matrix instruction takes


@dataclass(frozen=True)
class ScaledExpConfig:
    """How plans A and B with scaled exponentials divide a call.

    Args:
        rows: rows of a chunk.
        d_input_rows: rows of d_input computed at a time: a part of the chunk for cuBLAS's GEMM, a tile for our
            kernel.
        splits_tiles: the tiles of our kernel may be split along the classes: `SplitKSchedule`.
        head_rows: rows of the head that a matmul takes at a time: all of them, unless they must be cast.
        blocks: class blocks. Each has partial sums.
        scratch: float32 elements of one buffer, first for partial sums, then for the matmuls of gradients.
        bytes: bytes of workspace.
        first_rows: rows of a larger chunk, the last rows of a call and the first that are computed. Most of its
            exponentials are in the memory of d_weight, which is not written yet (`StoredExponentials`). 0: there is
            none. If it has all rows, the workspace holds the exponentials of `rows` rows still.
        piece: classes of a piece of that chunk.
    """

    rows: int
    d_input_rows: int
    splits_tiles: bool
    head_rows: int
    blocks: int
    scratch: int
    bytes: int
    first_rows: int = 0
    piece: int = 0

    @property
    def most_rows(self) -> int:
        """Rows of the largest chunk."""
        return max(self.rows, self.first_rows)

    def usual_rows(self, tokens: int) -> int:
        """Returns the rows of the only chunk of a call, or of the chunks that add to d_weight."""
        return self.first_rows if self.first_rows == tokens else self.rows

    def chunks(self, tokens: int) -> list[slice]:
        """Returns the chunks of a call. They are computed from the last to the first."""
        others = tokens - self.first_rows
        chunks = [slice(start, min(start + self.rows, others)) for start in range(0, others, self.rows)]
        return [*chunks, slice(others, tokens)] if self.first_rows else chunks


# Rows of a matmul of cuBLAS that computes d_input, where no kernel of ours does. On Hopper 512 are as fast as more,
# because cuBLAS splits the matmul along the classes. Its kernels for sm_80 do not: on an H100 they reach 233 TFLOP/s
# with 512 rows of Qwen and 284 with 512 rows of Gemma, where large matmuls reach 450.
D_INPUT_ROWS = 512


class DInputTiling(NamedTuple):
    """How a kernel of d_input divides its matmul.

    Args:
        programs: of the persistent kernel, on all multiprocessors together.
        per_multiprocessor: programs that a multiprocessor runs at the same time.
        step: classes of a step of the matmul.
        rows: rows of a tile, which has D_BLOCK columns: the fastest first.
    """

    programs: int
    per_multiprocessor: int
    step: int
    rows: tuple[int, ...]

    @property
    def choices(self) -> list[tuple[int, bool]]:
        """Rows of a tile, and whether tiles may be split. A narrower tile takes half the memory where tiles are split.
        Whole tiles take no memory but leave programs idle."""
        return [(rows, splits_tiles) for splits_tiles in (True, False) for rows in self.rows]


def choose_d_input_tiling(
    multiprocessors: int, ampere_tile: TileConfig | None, *, splits_head: bool = False
) -> DInputTiling:
    """Returns how d_input is divided: on Hopper, or with the tile of `ampere_logits`.

    Narrow tiles would split each weight of a float32 head twice as often: on an H200, 35.7 ms of Gemma 2 2B, not 28.

    The kernel of `ampere_gradients` multiplies as that of the exponentials does, so that a multiprocessor runs two
    programs of it, too.
    """
    if ampere_tile is None:
        return DInputTiling(multiprocessors, 1, D_INPUT_STEP, (256,) if splits_head else (256, 128))
    return DInputTiling(2 * multiprocessors, 2, ampere_tile.block_d, (ampere_tile.block_n,))


CAST_BYTES = 2**25

# Of both parts of a vocabulary chunk of a split head, at most. In less memory a chunk has few tiles, so that programs
# are idle, and d_input's sum is read and written for each chunk.
SPLIT_CAST_BYTES = 3 * 2**25

# Of a float32 matmul of d_weight by cuBLAS, times a power of two: float16. Wide matmuls are faster.
D_WEIGHT_BYTES, ROOMY_BUDGET = 2**25, 2**28

PARTIAL_BYTES = 3 * 2**24  # bytes of rows and their sums at a time, where no matmul follows


FIRST_CHUNK_TRIES = 6  # sizes of its pieces that are estimated

# `CostCoefficients.exposed` of the d_weight kernel of `ampere_gradients`, which loads the old tile after its matmul,
# for every GPU of compute capability 8.x. On an H100 it adds 768 rows of Gemma in 2.73 ms. At the rate of cuBLAS's
# sm_80 kernel for 8,192 rows they take 1.98, and d_weight is read and written in 0.70. In the A100's numbers, with
# which such a plan is estimated, these are 2.62 and 1.16 ms, and 0.8 of the latter is exposed. The kernel did not
# prefetch then.
AMPERE_EXPOSED = 0.8

# Between the matmuls of d_weight of two pieces. On an H100, 17 of Qwen3 8B (2,048 rows) take 0.09 ms more than 9.
PIECE_NS = 1e4

# Times its rows, to whole row blocks: the fewest classes of a piece, if such pieces are as fast and fit.
FIRST_CHUNK_PIECE = 4


def choose_scaled_exp(
    *,
    tokens: int,
    hidden: int,
    classes: int,
    itemsize: int,
    block_v: int,
    class_block: int | None = None,
    stores: bool,
    saves: bool = False,
    d_input: bool,
    scales_d_weight: bool = False,
    holds: bool,
    needs_cast: bool,
    statistics: int,
    tiling: DInputTiling | None,
    splits_head: bool = False,
    programs: int = 0,
    copied: int = 0,
    exchanged: int = 0,
    gathering_ranks: int = 0,
    batch_invariant: bool = False,
    room: int = 0,
    call: chunk_cost.Call | None = None,
    budget: int,
) -> ScaledExpConfig:
    """Returns the chunks of plans A and B with scaled exponentials: the fastest that the budget allows, by an estimate.

    Without an estimate they are as few and as equal as the budget allows.

    Args:
        tokens: N.
        hidden: D, or with splits_head 2D, padded to `padded_hidden`.
        classes: K.
        itemsize: of the input's dtype.
        block_v: classes of a tile.
        class_block: classes of a block of sums; None: those of a tile.
        stores: the exponentials are stored, for gradients. Otherwise `PARTIAL_BYTES` are enough.
        saves: they are saved for the backward pass, in memory that is not workspace. It computes d_weight.
        d_input: d_input is computed.
        scales_d_weight: d_weight is a float32 matmul of cuBLAS, a few classes at a time, times a power of two.
        holds: the memory of d_input holds the chunk's rows of the input, but those of a first chunk in d_weight.
        needs_cast: the head is cast to the input's dtype, one vocabulary chunk at a time.
        statistics: how many numbers besides the sums a kernel writes for each row and class block.
        tiling: of the kernel that computes d_input; None if cuBLAS computes it.
        splits_head: the head is the sum of two matrices, side by side in `hidden` columns.
        programs: of the persistent kernel of the logits of a split head, whose vocabulary chunks are whole waves of
            tiles; 0: they are not.
        copied: bytes of the contiguous copies of strided vectors.
        exchanged: bytes of a row of a chunk that the ranks of a vocabulary exchange besides its row of d_input; 0 where
            the head is whole.
        gathering_ranks: ranks that each have a slice of a chunk's rows, as many on each, and gather those of the next
            chunk too; 0: all ranks have the same rows.
        batch_invariant: the order of a row's sums must not depend on the number of rows and the budget. Then tiles of
            d_input have one size and are not split, and class blocks begin at multiples of `block_v`.
        room: most rows of a first chunk with exponentials in the memory of d_weight: bytes of a row of d_weight, over
            those of an exponential, in whole row blocks. 0: d_weight has no such memory.
        call: what the time of a call depends on; None: the fewest chunks win.
        budget: bytes.

    Raises:
        ValueError: `MIN_ROWS` rows do not fit. The message names the smallest budget that can.
    """
    tokens, class_block = max(tokens, 1), class_block or block_v
    least_rows = min(tokens, MIN_ROWS)
    head_rows, cast_bytes, parts = classes, SPLIT_CAST_BYTES if splits_head else CAST_BYTES, 1 + splits_head
    if needs_cast:
        limit = min(cast_bytes, budget // 4) // (itemsize * hidden)
        head_rows = min(classes, limit // block_v * block_v or (block_v if batch_invariant else MIN_VOCAB_CHUNK))

    fixed = 92 * tokens + 4 * classes + 12288 + copied  # rows' numbers, each array from a multiple of 512; d_bias
    # `packed_rows.PackedRows.hit`: the half tiles of all chunks. Those of a chunk of 65 rows, for example, are not
    # full.
    fixed += (3 * -(-tokens // (ROW_BLOCK // 2)) + 2) * -(-classes // class_block)
    in_workspace = stores and not saves
    d_weight_scratch = scales_d_weight * min(classes, MIN_VOCAB_CHUNK) * hidden
    if budget >= ROOMY_BUDGET:
        d_weight_scratch = scales_d_weight * min(classes * hidden, D_WEIGHT_BYTES // 4)
    enough = budget if stores else min(budget, fixed + PARTIAL_BYTES + cast_bytes * needs_cast)

    @cache
    def schedule_of(rows: int, tile_rows: int, splits_tiles: bool) -> SplitKSchedule:
        assert tiling is not None
        d_tiles = -(-rows // tile_rows) * -(-(hidden // parts) // D_BLOCK)
        return choose_schedule(d_tiles, -(-classes // tiling.step), tiling.programs, splits_tiles=splits_tiles)

    def d_input_elements(rows: int, first_rows: int, tile_rows: int, splits_tiles: bool) -> int:
        if tiling is None:
            return hidden // parts * (rows if needs_cast else min(rows, D_INPUT_ROWS))
        sizes = {rows, first_rows} if first_rows else {rows, tokens % rows or rows}
        partial_tiles = max(schedule_of(size, tile_rows, splits_tiles).partial_tiles for size in sizes)
        return partial_tiles * tile_rows * D_BLOCK

    def whole_waves(rows: int, head_rows: int) -> int:
        if head_rows == classes:
            return classes
        row_blocks = -(-rows // ROW_BLOCK)
        waves = programs and head_rows // block_v * row_blocks // programs
        return max(1, waves * programs // row_blocks) * block_v if waves else head_rows

    def config(rows: int, tile_rows: int, splits_tiles: bool, head_rows: int, first_rows: int = 0) -> ScaledExpConfig:
        if gathering_ranks:
            rows = max(rows // gathering_ranks, 1) * gathering_ranks
        most_rows = max(rows, first_rows)
        head_rows = whole_waves(first_rows if first_rows == tokens else rows, head_rows)
        d_input_rows = tile_rows if tiling else rows if needs_cast else min(rows, D_INPUT_ROWS)
        d_input_scratch = d_input_elements(rows, first_rows, tile_rows, splits_tiles) if d_input else 0
        vocab_chunks, tail = divmod(classes, head_rows)
        blocks = vocab_chunks * -(-head_rows // class_block) - (-tail // class_block)
        scratch = max((1 + statistics) * blocks * most_rows, d_input_scratch, d_weight_scratch)
        size = fixed + itemsize * hidden * head_rows * needs_cast
        rows_of_sum = (3 if batch_invariant else 1) * (exchanged > 0 and d_input)  # of `vocab_shard.ordered_sum`
        size += exchanged * rows + rows_of_sum * (4 * hidden // parts + 8) * rows
        if gathering_ranks:  # the rows of two chunks, and a rank's rows of d_input
            size += hidden // parts * (itemsize * min(2 * rows, tokens) + d_input * 4 * rows // gathering_ranks)
        # The backward pass copies the rows of the input, and multiplies them by their upstream gradients.
        copied_rows = most_rows if saves or not holds else first_rows
        size += itemsize * (rows * padded(classes) * in_workspace + copied_rows * hidden) + 4 * scratch
        piece = rows * padded(classes) // first_rows // block_v * block_v if first_rows else 0
        return ScaledExpConfig(rows, d_input_rows, splits_tiles, head_rows, blocks, scratch, size, first_rows, piece)

    def d_input_of(rows: int, found: ScaledExpConfig) -> chunk_cost.DInput | None:
        if call is None or not d_input:
            return None
        if tiling is None:
            return chunk_cost.library_d_input(call, rows)
        schedule = schedule_of(rows, found.d_input_rows, found.splits_tiles)
        share = 1 - schedule.split_iters / schedule.iters_per_tile
        partial_bytes = 4 * schedule.partial_tiles * found.d_input_rows * D_BLOCK
        # Programs of the same multiprocessor share its matrix units.
        longest = schedule.longest * tiling.step * tiling.per_multiprocessor * call.parts
        return chunk_cost.DInput(found.d_input_rows, longest, share, partial_bytes)

    def ms(found: ScaledExpConfig) -> float:
        assert call is not None
        rows = found.first_rows or (tokens - 1) % found.rows + 1
        chunk = chunk_cost.Chunk(found.rows, found.rows, d_input_of(found.rows, found))
        pieces, last = divmod(classes, found.piece) if found.piece else (0, 0)
        sizes = (found.piece,) * pieces + (last,) * (last > 0)
        return chunk_cost.call_ms(call, chunk, chunk_cost.Chunk(rows, rows, d_input_of(rows, found), sizes))

    def with_first(equal: list[ScaledExpConfig]) -> ScaledExpConfig | None:
        """Returns chunks with a first chunk in the memory of d_weight, if they are faster than the best ones without:
        all rows, or as many as d_weight has room for beside other chunks, which have the rows of one of `equal`."""
        rows = {one.rows for one in equal}
        if tokens <= room:  # the workspace may hold fewer rows of exponentials, in more pieces
            step = -(-equal[0].rows // (FIRST_CHUNK_TRIES * ROW_BLOCK)) * ROW_BLOCK
            rows |= {*range(step, equal[0].rows, step)}
        sizes = ((one, tokens - max(0, -(-(tokens - room) // one)) * one) for one in rows)
        made = (config(one, *choice, first) for one, first in sizes if first > one for choice in choices)
        # Narrower pieces are slow: on an H200, 34 of 3,840 classes (8,192 rows of Llama-3 70B) took 79.2 to 82.4 ms,
        # and 8 chunks of 1,024 rows 78.8.
        timed = [(ms(one), one) for one in made if one.piece >= one.first_rows and one.bytes <= enough]
        least = min((time for time, _ in timed), default=math.inf)
        if least >= (1 - chunk_cost.FIRST_CHUNK_GAIN) * ms(equal[0]):
            return None
        fastest = [one for time, one in timed if time <= (1 + chunk_cost.TIE) * least]
        return min(fastest, key=lambda one: (others(one), one.piece < least_piece(one.first_rows), one.bytes))

    def others(found: ScaledExpConfig) -> int:
        return -(-(tokens - found.first_rows) // found.rows)

    def least_piece(first_rows: int) -> int:
        return FIRST_CHUNK_PIECE * -(-first_rows // ROW_BLOCK) * ROW_BLOCK

    def best(*choices: tuple[int, bool, int]) -> list[ScaledExpConfig]:
        """Returns the best chunks that fit with one of `choices`, and their equals; [] if none fit."""
        return chunk_cost.choose_rows(
            lambda rows: (config(rows, *choice) for choice in choices),
            tokens=tokens,
            least_rows=least_rows,
            chunks=max(1, -(-tokens * itemsize * padded(classes) * in_workspace // budget)),
            enough=enough,
            budget=budget,
            call=call,
            ms=ms,
        )

    # A vocabulary chunk narrower than a tile needs less memory for the cast and more for partial sums: each chunk has
    # at least one.
    narrow = [min(classes, vocab_chunk) for vocab_chunk in (MIN_VOCAB_CHUNK, block_v)] if needs_cast else [classes]
    tiles = [(D_INPUT_ROWS, False)] if tiling is None else tiling.choices
    if batch_invariant:
        narrow, tiles = narrow[-1:], tiles[-1:]
    smallest = min(
        ((*tiles[-1], vocab_chunk) for vocab_chunk in narrow), key=lambda choice: config(least_rows, *choice).bytes
    )
    choices = [(*choice, head_rows) for choice in tiles]
    together = [choices] if call is not None else [[choice] for choice in choices]
    fitting = [found for some in together if (found := best(*some))]
    if not fitting:
        last = best(smallest)
        if last:
            return last[0]
        least = config(least_rows, *smallest).bytes
        raise BudgetTooSmallError(least, tokens, classes, budget)
    fitting = [found for found in fitting if found[0].splits_tiles] or fitting
    equal = min(fitting, key=lambda found: -(-tokens // found[0].rows))  # the first, and faster, of equals
    usual = equal[0]
    has_first = room > 0 and call is not None and usual.rows < tokens and (head_rows % block_v == 0 or not needs_cast)
    return (with_first(equal) if has_first else None) or usual


def padded_hidden(hidden: int, itemsize: int) -> int:
    """Returns the least length of a row of the input or the head that is a multiple of 16 bytes."""
    return -(-hidden * itemsize // 16) * 16 // itemsize


def padded(classes: int) -> int:
    """Returns the length of a row of exponentials or d_logits in memory, so that rows start at multiples of 128
    bytes."""
    return -(-classes // 64) * 64


# Each vocabulary chunk costs a pass over d_input's float32 sum. The rows of d_weight are written once in any case.
D_LOGITS_VOCAB_CHUNK = 12288


def choose_recomputed(
    *,
    tokens: int,
    hidden: int,
    classes: int,
    itemsize: int,
    block_v: int,
    statistics: int,
    float16: bool,
    d_input: bool,
    d_weight: bool,
    head_copies: int,
    needs_row_cast: bool,
    splits_head: bool = False,
    copied: int = 0,
    exchanged: int = 0,
    budget: int,
) -> ChunkConfig:
    """Returns the chunks of plans B and C, which recompute the logits: many rows first, then wide vocabulary chunks.

    Args:
        tokens: N.
        hidden: D, or with splits_head 2D, padded to `padded_hidden`.
        classes: K.
        itemsize: of the input's dtype.
        block_v: classes of a tile.
        statistics: how many numbers the first pass writes for each row and class block.
        float16: the input is float16. Its rows are scaled by powers of two for d_weight, and its matmuls are separate.
        d_input: d_input is computed.
        d_weight: d_weight is computed.
        head_copies: copies of a vocabulary chunk of the head: to the input's dtype, and to rows that the kernels can
            read.
        needs_row_cast: the input is copied, one chunk at a time, to rows that the kernels can read.
        splits_head: the head is the sum of two matrices, side by side in `hidden` columns.
        copied: bytes of the contiguous copies of strided vectors.
        exchanged: bytes of a row that the ranks of a vocabulary exchange.
        budget: bytes.

    Raises:
        ValueError: not even `MIN_ROWS` rows and `MIN_VOCAB_CHUNK` classes fit. The message names the smallest budget
        that can.
    """
    tokens = max(tokens, 1)
    second = d_input or d_weight
    per_class = hidden * (itemsize * head_copies + 4 * (d_weight and float16)) + 32 * (second or head_copies > 0)
    copies = second + (second and float16 and d_weight) + needs_row_cast
    per_row = hidden * itemsize * copies + 4 * hidden * d_input + 128 + exchanged
    per_row += splits_head * hidden * (itemsize + 2 * d_input)  # rows twice side by side; the sum of both d_input
    per_logit = itemsize * second
    fixed = 64 * tokens + 8 * classes + 4096 + copied

    def model(vocab_chunk: int) -> WorkspaceModel:
        blocks = -(-(vocab_chunk if head_copies else classes) // block_v)
        return WorkspaceModel(fixed, per_row + 4 * statistics * blocks, per_class, per_logit)

    widest = min(classes, D_LOGITS_VOCAB_CHUNK)
    narrower = (D_LOGITS_VOCAB_CHUNK >> i for i in range(1, 20))
    vocab_chunks = [
        widest,
        *(
            vocab_chunk // MIN_VOCAB_CHUNK * MIN_VOCAB_CHUNK
            for vocab_chunk in narrower
            if MIN_VOCAB_CHUNK <= vocab_chunk < widest
        ),
    ]
    least_rows, least_vocab_chunk = (
        min(tokens, MIN_ROWS),
        min(vocab_chunks[-1], MIN_VOCAB_CHUNK) if second or head_copies else vocab_chunks[-1],
    )
    if least_vocab_chunk < vocab_chunks[-1]:
        vocab_chunks.append(least_vocab_chunk)
    least = model(least_vocab_chunk).bytes(least_rows, least_vocab_chunk)
    if least > budget:
        raise BudgetTooSmallError(least, tokens, classes, budget)
    narrowest = min(tokens, model(least_vocab_chunk).rows_within(budget, least_vocab_chunk))
    enough = max(least_rows, min(narrowest, max(narrowest // 2, 1)))
    vocab_chunk = next(
        vocab_chunk for vocab_chunk in vocab_chunks if model(vocab_chunk).rows_within(budget, vocab_chunk) >= enough
    )
    rows = min(tokens, model(vocab_chunk).rows_within(budget, vocab_chunk))
    if not second:  # no matmul follows, so PARTIAL_BYTES of statistics at a time are enough
        blocks = -(-classes // block_v)
        rows = min(rows, max(ROW_BLOCK, PARTIAL_BYTES // (4 * statistics * blocks) // ROW_BLOCK * ROW_BLOCK))
    chunks = -(-tokens // rows)
    rows = min(rows, -(-tokens // (chunks * ROW_BLOCK)) * ROW_BLOCK, tokens)
    return ChunkConfig(
        rows,
        vocab_chunk,
        float32_sum=False,
        statistics_vocab_chunk=vocab_chunk if head_copies else classes,
        bytes=model(vocab_chunk).bytes(rows, vocab_chunk),
    )
