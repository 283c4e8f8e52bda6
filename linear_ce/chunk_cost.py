"""How long a call of path "scaled_exp" takes on a GPU, as a function of the rows of its chunks.

The memory budget limits the rows of a chunk. The largest chunk is not always the fastest, because tiles of 128 or 256
rows compute their padding too: a chunk of 464 rows costs almost what one of 512 rows does. `call_ms` estimates the time
of a call from its sizes, the tiles of its kernels and a few coefficients of the GPU. `choose_rows` returns the cheapest
chunks that fit. The estimate determines speed and memory. It changes results only by rounding.

The estimate adds up the three matmuls of each chunk of n rows. A tile has 128 rows or columns by up to 256 of another
axis, and P programs compute the tiles in waves.

    logits      ceil(n / 128) ceil(V / block_v) tiles, each a sum over D, and the epilogue of each tile
    d_weight    ceil(V / class_block) ceil(D / 128) tiles, each a sum over n rounded up to steps, and the epilogue of
                each tile; d_weight is written once in each chunk, and read in all but the first, by the program
                that adds to it or in L2 (`gpus.share_added_in_l2`)
    d_input     the iterations of the program that has most of them: `DInput`

A matmul takes at least as long as its bytes take to move. The coefficients are in `cost_coefficients.py`.

A GPU at its power limit has a higher clock while programs are idle, and a tile that multiplies padding takes less power
too. So in long calls idle programs and padded rows cost less than their share of the time: `Counted`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from linear_ce.chunking import MIN_ROWS
from linear_ce.cost_coefficients import CostCoefficients
from linear_ce.gpus import GPUS, most_added_in_l2, share_added_in_l2

ROW_BLOCK = 128  # rows of a tile of logits

D_BLOCK = 128  # columns of a tile of d_weight or d_input

WIDEST = 256  # the other side of a tile at most; coefficients are those of a tile of 128 x 256

# Row blocks that are computed with a class block before the next class block have at most so many bytes, so that they
# stay in L2: an H100 has 50 MB, an A100 40 MB. The head is read once for them.
GROUP_BYTES = 2**24

TIE = 0.005  # estimates so close count as equal. Fewer chunks round d_weight less often, and JAX compiles less

FIRST_CHUNK_GAIN = 0.015  # that a first chunk in the memory of d_weight must save, as a share of the estimate


class Call(NamedTuple):
    """What the time of a call depends on besides its chunks.

    Args:
        tokens: N.
        hidden: D, of all parts of the head side by side.
        classes: K.
        d_input: d_input is computed.
        d_weight: d_weight is computed.
        d_weight_kernel: our kernel computes d_weight, in whole tiles. A library's matmul has no idle programs.
        adds_in_l2: that kernel adds to d_weight as `share_added_in_l2` says.
        block_v: classes of a tile of logits.
        class_block: classes of a tile of d_weight.
        row_step: rows of a step of the matmul of d_weight.
        programs: multiprocessors of the GPU.
        cast_bytes: bytes that a chunk reads and writes to copy the head to another dtype.
        gpu: name in `GPUS`.
        coefficients: of the framework's kernels on the GPU.
        d_weight_itemsize: 4 if our kernel adds to a float32 d_weight.
        parts: matrices that the head is the sum of. d_weight has the columns of one.
        piece_ns: between the matmuls of d_weight of two pieces.
    """

    tokens: int
    hidden: int
    classes: int
    d_input: bool
    d_weight: bool
    d_weight_kernel: bool
    adds_in_l2: bool
    block_v: int
    class_block: int
    row_step: int
    programs: int
    cast_bytes: int
    gpu: str
    coefficients: CostCoefficients
    d_weight_itemsize: int = 2
    parts: int = 1
    piece_ns: float = 0.0

    @property
    def d_weight_hidden(self) -> int:
        return self.hidden // self.parts

    @property
    def d_weight_bytes(self) -> int:
        return self.d_weight_itemsize * self.classes * self.d_weight_hidden

    def share_in_l2(self, rows: int, *, most: bool = False) -> float:
        """Returns the share of a tile of d_weight that is added in L2, all of one in float32; with `most`, the largest
        share of chunks of at most `rows` rows."""
        if not self.adds_in_l2:
            return 0.0
        if self.d_weight_itemsize == 4:
            return 1.0
        return (most_added_in_l2 if most else share_added_in_l2)(rows, self.gpu)

    @property
    def head_bytes(self) -> int:
        return 2 * self.classes * self.hidden

    @property
    def counted(self) -> "Counted":
        """The shares of the time of idle programs and of padded rows that this call pays for."""
        c = self.coefficients
        if not (c.idle or c.padded):
            return Counted(1.0, 1.0)
        at_limit = max(0.0, 1.0 - c.unlimited / least_ms(self, 1))
        return Counted(1.0 - c.idle * at_limit, 1.0 - c.padded * at_limit)

    def memory_ns(self, size: float) -> float:
        """Returns how long device memory takes to move `size` bytes."""
        return size / GPUS[self.gpu].bandwidth * 1e9


class Counted(NamedTuple):
    """The shares, 0 to 1, of the time of idle programs and of padded rows that a call pays for."""

    idle: float
    padded: float

    def of_programs(self, most: float, mean: float) -> float:
        """Returns the work of the program with the most work, less what the idle time of the others does not cost."""
        return most - (1.0 - self.idle) * max(0.0, most - mean)

    def of_rows(self, rows: int, computed: int) -> float:
        """Returns how many rows a call pays for where `computed` are multiplied, padding included."""
        return rows + self.padded * (computed - rows)


class DInput(NamedTuple):
    """How programs compute d_input for one chunk, a split-K schedule.

    Args:
        tile_rows: rows of a tile. It has 128 columns of D.
        classes: that the program with the most work adds up, over all of its tiles.
        tail_share: share of a split tile's iterations that tail programs compute.
        partial_bytes: of partial tiles, which are written and read again.
    """

    tile_rows: int
    classes: float
    tail_share: float
    partial_bytes: int


class Chunk(NamedTuple):
    """A chunk of rows.

    Args:
        rows: of the chunk.
        kernel_rows: rows that the kernels of logits and d_input compute.
        d_input: how d_input is computed; None if it is not.
        pieces: classes of each piece, if its d_weight is computed a piece of the classes at a time; else ().
    """

    rows: int
    kernel_rows: int
    d_input: DInput | None
    pieces: tuple[int, ...] = ()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def library_d_input(call: Call, rows: int) -> DInput:
    """Returns how the matmul of a library computes d_input: tiles of 128 rows, divided evenly among all programs."""
    tiles = cdiv(rows, ROW_BLOCK) * cdiv(call.hidden, WIDEST)
    return DInput(WIDEST, tiles * call.classes / call.programs, 0.0, 0)


def logits_ns(call: Call, rows: int) -> float:
    """Returns how long the exponentials of a chunk take."""
    c, blocks, counted = call.coefficients, cdiv(rows, ROW_BLOCK), call.counted
    tiles = blocks * cdiv(call.classes, call.block_v)
    waves = counted.of_programs(cdiv(tiles, call.programs), tiles / call.programs)
    waves *= counted.of_rows(rows, blocks * ROW_BLOCK) / (blocks * ROW_BLOCK)
    size = cdiv(2 * rows * call.hidden, GROUP_BYTES) * call.head_bytes + 2 * rows * (call.classes + call.hidden)
    matmul = waves * (c.multiply * call.hidden + c.logits_tile) * call.block_v / WIDEST
    return max(matmul, call.memory_ns(size))


def d_weight_ns(call: Call, rows: int, *, adds: bool, classes: int | None = None) -> float:
    """Returns how long the d_weight of a chunk takes, written or added to what is there. With `classes`, it is that of
    a piece with so many classes."""
    counted = call.counted
    if classes is not None:
        call = call._replace(classes=classes)
    c, d_blocks = call.coefficients, cdiv(call.d_weight_hidden, D_BLOCK)
    tiles = cdiv(call.classes, call.class_block) * d_blocks
    waves = cdiv(tiles, call.programs) if call.d_weight_kernel else tiles / call.programs
    # The tiles of a wave need all columns of x, which should stay in L2 for the next wave, and some classes of E.
    x_bytes = 2 * rows * call.d_weight_hidden
    e_bytes = 2 * rows * call.class_block * cdiv(call.programs, d_blocks)
    share = max(0.0, 1 - GPUS[call.gpu].l2_bytes / (x_bytes + e_bytes))
    missed, moved = waves * x_bytes * share, (1 + adds) * call.d_weight_bytes
    size = moved + missed + 2 * rows * call.classes
    # L2 reads what it adds to from device memory too, so `size` includes it. But no program waits for it.
    in_l2 = call.share_in_l2(rows) * call.d_weight_bytes if adds else 0.0
    inner = counted.of_rows(rows, cdiv(rows, call.row_step) * call.row_step)
    counted_waves = counted.of_programs(waves, tiles / call.programs)
    matmul = counted_waves * (c.multiply * inner + c.d_weight_tile) * call.class_block / WIDEST
    matmul += c.exposed * call.memory_ns(moved - in_l2) + c.missed * call.memory_ns(missed)
    return max(matmul, call.memory_ns(size))


def d_input_ns(call: Call, rows: int, found: DInput) -> float:
    """Returns how long the d_input of a chunk takes."""
    c = call.coefficients
    width = (found.tile_rows + c.narrow) / (WIDEST + c.narrow)
    blocks, counted = cdiv(rows, found.tile_rows), call.counted
    mean = blocks * cdiv(call.hidden, D_BLOCK) * call.classes / call.programs
    classes = counted.of_programs(found.classes, mean)
    classes *= counted.of_rows(rows, blocks * found.tile_rows) / (blocks * found.tile_rows)
    matmul = c.multiply * classes * width * (1 + c.tail * found.tail_share)
    return max(matmul, call.memory_ns(call.head_bytes + 2 * rows * call.classes)) + call.memory_ns(
        2 * found.partial_bytes
    )


def chunk_ns(call: Call, chunk: Chunk, *, adds: bool) -> float:
    """Returns how long a chunk takes, one that adds to d_weight or the first."""
    total = 1e3 * call.coefficients.chunk + call.memory_ns(call.cast_bytes) + logits_ns(call, chunk.kernel_rows)
    if call.d_weight:
        pieces = Counter(chunk.pieces or (call.classes,))
        times = {size: d_weight_ns(call, chunk.rows, adds=adds, classes=size) for size in pieces}
        total += sum(number * times[size] for size, number in pieces.items()) + call.piece_ns * (pieces.total() - 1)
    if chunk.d_input is not None:
        total += d_input_ns(call, chunk.kernel_rows, chunk.d_input)
    return total


def call_ms(call: Call, chunk: Chunk, last: Chunk) -> float:
    """Returns an estimate of the milliseconds of a call with equal chunks. The last rows are the first chunk that is
    computed. It may be smaller than the others, or, in pieces, larger."""
    more = cdiv(call.tokens - last.rows, chunk.rows)
    total = 1e3 * call.coefficients.call + chunk_ns(call, last, adds=False)
    if more:
        total += more * chunk_ns(call, chunk, adds=True)
    return total / 1e6


def least_ms(call: Call, chunks: int) -> float:
    """Returns a time that no call of so many chunks, or more, falls below: no row is padded and no program is idle."""
    c, moved = call.coefficients, chunks * call.cast_bytes
    tiles = call.classes / WIDEST / call.programs  # for each 128 rows, or columns of D
    total = 1e3 * (c.call + chunks * c.chunk)
    total += call.tokens / ROW_BLOCK * tiles * (c.multiply * call.hidden + c.logits_tile)
    d_blocks = call.hidden / D_BLOCK
    if call.d_input:
        total += call.tokens * d_blocks * tiles * c.multiply
    if call.d_weight:
        total += d_blocks / call.parts * tiles * (c.multiply * call.tokens + chunks * c.d_weight_tile)
        total += c.exposed * call.memory_ns(_least_moves(call, chunks) * call.d_weight_bytes)
    return (total + call.memory_ns(moved)) / 1e6


def _least_moves(call: Call, chunks: int) -> float:
    """Returns how many times d_weight is stored or loaded, at least, by a call of so many chunks or more."""
    rows = (call.tokens - 1) // max(chunks - 1, 1)  # a chunk has no more, or there would be fewer chunks
    return chunks + (1 - call.share_in_l2(rows, most=True)) * (chunks - 1)


DENSELY = 16  # numbers of chunks that are all tried while none fits


class Config(Protocol):
    """The chunks of a call: the `ScaledExpConfig` of a framework."""

    @property
    def rows(self) -> int: ...

    @property
    def bytes(self) -> int: ...


Found = TypeVar("Found", bound=Config)


def choose_rows(
    configs: Callable[[int], Iterable[Found]],
    *,
    tokens: int,
    least_rows: int,
    chunks: int,
    enough: int,
    budget: int,
    call: Call | None,
    ms: Callable[[Found], float],
) -> list[Found]:
    """Returns the cheapest chunks that fit, or, without `call`, the fewest. Returns [] if none fit.

    Row counts are those of equal chunks, rounded up to whole tiles of logits (128 rows), to whole tiles of d_input (256
    rows) or to MIN_ROWS. From the fewest chunks that fit, more are tried until no larger number can be cheaper
    (`least_ms`). While none fits, the first numbers are all tried, then ever larger steps: the memory of split tiles
    does not grow with rows. Choices that cost the same within `TIE` are all returned, those with the fewest chunks
    first.

    Args:
        configs: from rows to the ways to compute chunks of that many rows.
        tokens: N.
        least_rows: the fewest rows of a chunk. They may take `budget` bytes.
        chunks: no fewer chunks fit.
        enough: bytes that other chunks may take.
        budget: bytes.
        call: what the time depends on; None: the fewest chunks win.
        ms: the estimate of a choice, `call_ms`.
    """
    multiples = (ROW_BLOCK, MIN_ROWS) if call is None else (ROW_BLOCK, 2 * ROW_BLOCK, MIN_ROWS)
    densely, tried = chunks + DENSELY, set[int]()
    found, best_ms = list[tuple[float, Found]](), math.inf
    while not found or (call is not None and least_ms(call, chunks) < best_ms):
        rows = tokens
        for multiple in multiples:
            rows = min(tokens, cdiv(tokens, chunks * multiple) * multiple)
            if rows in tried:
                continue
            tried.add(rows)
            most = budget if rows == least_rows else enough
            for config in configs(rows):
                if config.bytes > most:
                    continue
                if call is None:
                    return [config]
                found.append((ms(config), config))
                best_ms = min(best_ms, found[-1][0])
        if rows <= least_rows:
            break
        if call is None:
            chunks += 1 if chunks < densely else max(1, chunks // 4)
        else:  # up to the next number whose chunks are smaller by MIN_ROWS, in their equal rows rounded up
            step = 1 if found or chunks < densely else max(1, chunks // 32)
            chunks = max(chunks + step, cdiv(tokens, max(rows - MIN_ROWS, 1)))
    equal = [(cdiv(tokens, config.rows), time, config) for time, config in found if time <= (1 + TIE) * best_ms]
    return [config for _, _, config in sorted(equal, key=lambda choice: choice[:2])]
