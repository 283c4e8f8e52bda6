"""How a call is cut for the kernels: pure functions of shapes, dtypes and memory budget. Nothing here changes a result
beyond rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass

from linear_ce.chunking import MIN_ROWS, MIN_SLAB, ChunkConfig, WorkspaceModel


@dataclass(frozen=True)
class TileConfig:
    """A tile of logits.

    Args:
        block_n: rows.
        block_v: classes.
    """

    block_n: int
    block_v: int


ROW_BLOCK = 128  # rows of a tile of logits

CLASS_BLOCK = 192  # and its classes at least: partial sums for each

# Of a row, for its target's logit and summand: each of `TARGET_PLACES` tiles that hold a target has a place for all of
# its rows' two numbers.
TARGET_PLACES = 64
TARGET_BYTES = 2 * 4 * TARGET_PLACES


@dataclass(frozen=True)
class ScaledExpConfig:
    """How plans A and B with scaled exponentials cut a call.

    Args:
        rows: of a chunk.
        product_bytes: that d_input's partial sums may take.
        bytes: of workspace.
    """

    rows: int
    product_bytes: int
    bytes: int

    def kernel_rows(self, size: int, tokens: int) -> int:
        """Returns the rows that the kernels of a chunk of `size` of `tokens` rows compute.

        A shorter chunk takes as many as the others, whose kernels then serve it too and are compiled once, where that
        costs less than a `COMPILED_SHARE`-th of the call.
        """
        return self.rows if (self.rows - size) * COMPILED_SHARE <= tokens else size


COMPILED_SHARE = 50  # of two products: d_weight's, which starts the sum there, is a kernel of its own anyway

PRODUCT_SHARE = 16  # of the budget: what partial sums of d_input gain is lost again where chunks get smaller for them

PARTIAL_BYTES = 3 * 2**24  # of rows and their sums at a time, where no product waits for them


def choose_scaled_exp(
    *,
    tokens: int,
    hidden: int,
    classes: int,
    itemsize: int,
    stores: bool,
    holds: bool,
    statistics: bool,
    scratch: Callable[[int, int], int],
    budget: int,
) -> ScaledExpConfig:
    """Returns the chunks of plans A and B with scaled exponentials, as few and as equal as the budget allows.

    Args:
        tokens: N.
        hidden: D.
        classes: K.
        itemsize: of the input's dtype.
        stores: the exponentials are stored, for gradients; else `PARTIAL_BYTES` do for the rest.
        holds: the chunk's rows of the input are in d_input's own memory, or in the input's.
        statistics: the largest logits are wanted.
        scratch: (rows, most) -> bytes that the gradients' products of a chunk take beside the exponentials.
        budget: bytes.

    Raises:
        ValueError: not even `MIN_ROWS` rows fit; the message names the least budget that would do.
    """
    tokens = max(tokens, 1)
    least_rows = min(tokens, MIN_ROWS)
    fixed = 56 * tokens + 8 * classes + 4096  # rows' numbers, d_bias: XLA keeps within it at 65,536 tokens too
    enough = budget if stores else min(budget, fixed + PARTIAL_BYTES)
    blocks = -(-classes // CLASS_BLOCK)

    def config(rows: int) -> ScaledExpConfig:
        padded_rows = -(-rows // ROW_BLOCK) * ROW_BLOCK
        sums = (4 * (1 + statistics) * blocks + TARGET_BYTES + 4 * -(-blocks // TARGET_PLACES)) * padded_rows
        size = fixed + itemsize * (-(-rows // 8) * 8 * padded(classes) * stores + rows * hidden * (not holds))
        most = max(0, min(budget // PRODUCT_SHARE, budget - size))
        return ScaledExpConfig(rows, most, size + max(sums, scratch(rows, most)))

    chunks = max(1, -(-tokens * itemsize * padded(classes) * stores // budget))
    densely = chunks + 16
    while True:
        for multiple in (ROW_BLOCK, MIN_ROWS):
            rows = min(tokens, -(-tokens // (chunks * multiple)) * multiple)
            found = config(rows)
            if found.bytes <= (budget if rows == least_rows else enough):
                return found
        if rows == least_rows:
            raise ValueError(
                f"memory_budget must be at least {found.bytes} bytes for {tokens} tokens and {classes} classes, "
                f"got {budget}"
            )
        chunks += 1 if chunks < densely else max(1, chunks // 4)


def padded(classes: int) -> int:
    """Returns the length of a row of exponentials or d_logits in memory: rows start at multiples of 128 bytes."""
    return -(-classes // 64) * 64


D_LOGITS_SLAB = 12288  # classes of a slab at most

LIBRARY_BYTES = 2**25  # that cuBLAS takes on a Hopper, beyond what is counted


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
    converts: bool,
    in_place: bool,
    budget: int,
) -> ChunkConfig:
    """Returns the chunks and slabs of plans B and C, whose kernels compute logits again: the fewest passes over memory.

    Args:
        tokens: N.
        hidden: D.
        classes: K.
        itemsize: of the input's dtype.
        statistics: numbers that the first pass writes for each row and class block.
        float16: rows are scaled by powers of two for d_weight.
        d_input: d_input is wanted.
        d_weight: d_weight is wanted.
        converts: the head is converted slab by slab.
        in_place: products are added to sums where these are, d_weight's by a kernel, d_input's by cuBLAS; else they are
            counted in float32.
        budget: bytes.

    Raises:
        ValueError: not even `MIN_ROWS` rows and `MIN_SLAB` classes fit; the message names the least that would.
    """
    tokens = max(tokens, 1)
    second = d_input or d_weight
    # The head's slab, and d_weight's product; rows of the input.
    per_slab = hidden * (itemsize * (second or converts) + 4 * (d_weight and not in_place)) + 32
    per_row = hidden * itemsize * (1 + (float16 and d_weight)) + 128
    fixed = 64 * tokens + 8 * classes + 4096

    def model(slab: int) -> WorkspaceModel:
        blocks = -(-(slab if converts else classes) // CLASS_BLOCK)  # of the first pass
        partial = 4 * statistics * blocks + TARGET_BYTES + 4 * -(-blocks // TARGET_PLACES)
        sums = hidden * 4 * (1 + (not in_place)) * d_input + itemsize * slab * second  # d_input's, and d_logits
        return WorkspaceModel(fixed, per_row + max(partial, sums), per_slab, 0)

    def even(slab: int) -> int:
        """Returns the smallest slab, of whole tiles, of which no more are needed: they overlap least."""
        multiple = min(slab, CLASS_BLOCK)
        return min(classes, -(-classes // (-(-classes // slab) * multiple)) * multiple)

    slabs = [*(even(D_LOGITS_SLAB >> i) for i in range(7)), even(MIN_SLAB)]
    least_rows, least_slab = min(tokens, MIN_ROWS), slabs[-1]
    least = model(least_slab).bytes(least_rows, least_slab)
    if least > budget:
        raise ValueError(
            f"memory_budget must be at least {least} bytes for {tokens} tokens and {classes} classes, got {budget}"
        )
    budget = max(least, budget - min(LIBRARY_BYTES, budget // PRODUCT_SHARE) * in_place)
    fitting = {slab: min(tokens, model(slab).rows_within(budget, slab)) for slab in slabs}
    # Each chunk passes over the head and d_weight, each slab over the chunks' float32 sums of d_input.
    passes = {
        slab: -(-tokens // rows) * classes + -(-classes // slab) * tokens
        for slab, rows in fitting.items()
        if rows >= least_rows
    }
    slab = min(passes, key=lambda slab: passes[slab])
    rows = fitting[slab]
    if not second:  # no product waits for its rows: PARTIAL_BYTES of statistics are enough at a time
        blocks = -(-classes // CLASS_BLOCK)
        rows = min(rows, max(ROW_BLOCK, PARTIAL_BYTES // (4 * statistics * blocks) // ROW_BLOCK * ROW_BLOCK))
    chunks = -(-tokens // rows)
    rows = min(rows, -(-tokens // (chunks * ROW_BLOCK)) * ROW_BLOCK, tokens)
    return ChunkConfig(
        rows,
        slab,
        float32_sum=False,
        statistics_slab=slab if converts else classes,
        bytes=model(slab).bytes(rows, slab),
    )
