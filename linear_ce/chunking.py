"""How a call is divided into chunks: pure functions of shapes, dtypes and the memory budget.

These functions determine speed and memory. They change results only by rounding.

The chunked implementation processes the rows in chunks and, within a chunk of rows, the vocabulary in vocabulary
chunks. `WorkspaceModel` counts the peak bytes of one chunk of `rows` rows and one vocabulary chunk of `vocab_chunk`
classes. `choose_chunks` returns the largest chunk that fits the budget.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")

MIN_ROWS = 16  # matmuls of fewer rows waste the matrix units; a budget that cannot hold 16 rows raises an error

MIN_VOCAB_CHUNK = 64

ROW_MULTIPLE = 16

# Rows of a chunk whose logits are stored, if there are several chunks. With fewer, reading and writing d_weight for
# each chunk takes longer than computing the logits of more rows twice. By estimates, not by measurements.
LEAST_FLOAT32_ROWS = 128  # of float32 matmuls without TF32
LEAST_ROW_GRADIENTS = 512  # of 16-bit matmuls


# Rows that are saved for the backward pass, if not all of them. With fewer, adding them to d_weight takes longer than
# the matmul that they save.
LEAST_SAVED_ROWS = 512
SAVED_ROWS_MULTIPLE = 128  # rows of a tile of logits
SAVED_ROW_BYTES, SAVED_FIXED_BYTES = 32, 4096  # the factors, the targets and the order of the rows; what aligns arrays


class BudgetTooSmallError(ValueError):
    """A memory budget does not hold the smallest chunk of a call.

    Args:
        least: bytes of the smallest budget that does.
        tokens: N.
        classes: K.
        budget: bytes that were given.
    """

    def __init__(self, least: int, tokens: int, classes: int, budget: int) -> None:
        super().__init__(
            f"memory_budget must be at least {least} bytes for {tokens} tokens and {classes} classes, got {budget}"
        )
        self.least = least


def plan_passes(plan: Callable[[], T], *others: Callable[[], object]) -> T:
    """Plans all passes of a call, and returns the result of the first function.

    Args:
        plan: plans one pass.
        others: plan the other passes. Their results are dropped.

    Raises:
        BudgetTooSmallError: memory_budget is too small for some of the passes. This is the error that names the
            largest budget, so the whole call runs with that budget.
    """
    refusals = list[BudgetTooSmallError]()

    def collected(function: Callable[[], R]) -> R | None:
        try:
            return function()
        except BudgetTooSmallError as refusal:
            refusals.append(refusal)
            return None

    for other in others:
        collected(other)
    found = collected(plan)
    if refusals:
        raise max(refusals, key=lambda refusal: refusal.least)
    return cast(T, found)


@dataclass(frozen=True)
class ChunkConfig:
    """How a call is divided into chunks.

    Args:
        rows: rows of a chunk.
        vocab_chunk: classes of a vocabulary chunk.
        float32_sum: whether d_weight is summed over chunks in a separate float32 buffer.
        keeps_logits: whether plan A keeps a chunk's logits from its first pass to its second.
        statistics_vocab_chunk: classes of a vocabulary chunk in the first pass, if not `vocab_chunk`.
        bytes: bytes of workspace. It is not part of the division, so it is not compared.
    """

    rows: int
    vocab_chunk: int
    float32_sum: bool
    keeps_logits: bool = False
    statistics_vocab_chunk: int | None = None
    bytes: int = field(default=0, compare=False)

    @property
    def first_vocab_chunk(self) -> int:
        """Classes of a vocabulary chunk in the first pass."""
        return self.statistics_vocab_chunk or self.vocab_chunk


@dataclass(frozen=True)
class WorkspaceModel:
    """Bytes of workspace as a function of the rows n of a chunk and the classes v of a vocabulary chunk:

        fixed + per_row * n + per_class * v + per_logit * n * v

    The function `workspace_model` of each framework returns one.

    Args:
        fixed: bytes that do not depend on the chunk.
        per_row: bytes for each row.
        per_class: bytes for each class.
        per_logit: bytes for each logit.
        float32_sum: bytes of a float32 d_weight of all classes. It is needed only if several chunks add to a 16-bit
            d_weight.
    """

    fixed: int
    per_row: int
    per_class: int
    per_logit: int
    float32_sum: int = 0

    def bytes(self, rows: int, vocab_chunk: int) -> int:
        return self.fixed + rows * self.per_row + vocab_chunk * self.per_class + rows * vocab_chunk * self.per_logit

    def rows_within(self, budget: int, vocab_chunk: int) -> int:
        """Returns the largest number of rows that fits with `vocab_chunk`; zero or negative if none fits."""
        return (budget - self.fixed - vocab_chunk * self.per_class) // (self.per_row + vocab_chunk * self.per_logit)


def choose_chunks(model: WorkspaceModel, tokens: int, classes: int, budget: int) -> ChunkConfig:
    """Returns the largest chunk whose workspace fits `budget` bytes.

    One chunk of all rows is best, because d_weight is then written once. With several chunks d_weight is summed in
    float32 if that buffer takes at most half of the budget. Otherwise it is summed in the weight's dtype and rounded
    once for each chunk.

    Raises:
        ValueError: the smallest chunk does not fit. The message names the smallest budget that can.
    """
    tokens = max(tokens, 1)
    least_rows, least_vocab_chunk = min(tokens, MIN_ROWS), min(classes, MIN_VOCAB_CHUNK)
    least = model.bytes(least_rows, least_vocab_chunk)
    if least > budget:
        raise BudgetTooSmallError(least, tokens, classes, budget)
    whole = _largest(model, tokens, classes, budget)
    if whole.rows >= tokens or not 0 < model.float32_sum <= budget // 2:
        return whole
    rest = budget - model.float32_sum
    if model.bytes(least_rows, least_vocab_chunk) > rest:
        return whole
    summed = _largest(model, tokens, classes, rest)
    return ChunkConfig(summed.rows, summed.vocab_chunk, float32_sum=True, bytes=summed.bytes + model.float32_sum)


def choose_plan_a(
    keeping: WorkspaceModel, recomputing: WorkspaceModel, tokens: int, classes: int, budget: int, *, float32: bool
) -> ChunkConfig:
    """Returns the chunks of plan A. It keeps the logits from the first pass to the second if those of enough rows fit.

    Kept logits save a matmul. But at a large vocabulary the budget holds the logits of few rows only, and 16-bit
    matmuls of few rows lose more time than the saved matmul takes (benchmarks/experiments.md). So with 16-bit operands
    the logits are kept only if those of all rows fit. Otherwise they are computed twice, in chunks whose size does not
    depend on V. For float32 operands LEAST_FLOAT32_ROWS are enough.

    Args:
        keeping, recomputing: the workspace with kept logits, and without them.
        tokens, classes, budget: as in `choose_chunks`.
        float32: the operands of matmuls are float32.

    Raises:
        ValueError: as `choose_chunks`.
    """
    tokens = max(tokens, 1)
    if keeping.bytes(min(tokens, MIN_ROWS), min(classes, MIN_VOCAB_CHUNK)) <= budget:
        kept = choose_chunks(keeping, tokens, classes, budget)
        if kept.rows >= min(tokens, LEAST_FLOAT32_ROWS if float32 else tokens):
            return replace(kept, keeps_logits=True)
    return choose_chunks(recomputing, tokens, classes, budget)


def _largest(model: WorkspaceModel, tokens: int, classes: int, budget: int) -> ChunkConfig:
    """Returns the widest vocabulary chunk that still fits half of the rows that the narrowest one fits: matmuls and
    passes over memory are fast where both sides are long."""
    narrowest = min(classes, MIN_VOCAB_CHUNK)
    vocab_chunks = [narrowest]
    while vocab_chunks[-1] < classes:
        vocab_chunks.append(min(2 * vocab_chunks[-1], classes))
    most = min(tokens, model.rows_within(budget, narrowest))
    enough = max(min(tokens, MIN_ROWS), most // 2)
    vocab_chunk = max(
        vocab_chunk
        for vocab_chunk in vocab_chunks
        if vocab_chunk == narrowest or model.rows_within(budget, vocab_chunk) >= enough
    )
    rows = min(tokens, model.rows_within(budget, vocab_chunk))
    if ROW_MULTIPLE <= rows < tokens:
        chunks = -(-tokens // (rows - rows % ROW_MULTIPLE))  # as equal as the multiple allows
        rows = min(tokens, -(-tokens // (chunks * ROW_MULTIPLE)) * ROW_MULTIPLE)
    return ChunkConfig(rows, vocab_chunk, float32_sum=False, bytes=model.bytes(rows, vocab_chunk))


class SavedRowCount(NamedTuple):
    """How many of a call's rows are saved for the backward pass, and the bytes that they take."""

    rows: int
    tokens: int
    bytes: int


def choose_saved_rows(
    *, tokens: int, hidden: int, classes: int, itemsize: int, d_input: bool, d_head: bool, budget: int
) -> SavedRowCount:
    """Returns how many rows of a call fit `budget` bytes between its forward and its backward pass: all, or the first
    ones.

    A row takes one number for each class, in the input's dtype, if a gradient of the head is needed, and its row of
    d_input. The budget does not count what autograd keeps of every row: its lse and its weight, 8 bytes.

    Args:
        tokens: N.
        hidden: D.
        classes: K.
        itemsize: bytes of input's dtype.
        d_input: d_input is computed.
        d_head: d_weight or d_bias is computed.
        budget: bytes. 0 saves no row.
    """
    # Not times the booleans: torch.compile may have symbols in place of the numbers.
    per_row = SAVED_ROW_BYTES + itemsize * ((hidden if d_input else 0) + (-(-classes // 64) * 64 if d_head else 0))
    rows = max(budget - SAVED_FIXED_BYTES, 0) // per_row // 8 * 8  # some kernels write rows in blocks of 8
    if rows >= tokens:
        rows = tokens
    else:
        rows -= rows % SAVED_ROWS_MULTIPLE
        if rows < LEAST_SAVED_ROWS:
            rows = 0
    return SavedRowCount(rows, tokens, SAVED_FIXED_BYTES + per_row * (-(-rows // 8) * 8) if rows else 0)


PATHS = {
    "scaled_exp": "the gradients are matmuls of stored exponentials",
    "recompute": "the gradients compute the logits again",
    "stored_logits": "float32 logits are stored, one chunk of rows at a time",
    "chunked": "no kernels",
}


def logits_again(matmuls: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the matmuls of a loss with its logits twice, if a gradient follows and they are listed once."""
    logits = [name for name in matmuls if name.startswith("logits")]
    if len(matmuls) == len(logits) or any(name.endswith("of the losses") for name in logits):
        return matmuls
    again = [f"{name} again" for name in logits]
    return (*logits, *again, *matmuls[len(logits) :])


def describe_chunks(tokens: int, rows: int, first_rows: int = 0) -> str:
    """Returns the chunks of a call in words.

    Args:
        tokens: N.
        rows: rows of a chunk.
        first_rows: rows of a first chunk with exponentials in the memory of d_weight; 0 without one.
    """
    if not first_rows:
        return f"{max(1, -(-tokens // rows))} of up to {rows} rows"
    first = f"1 of {first_rows} rows, whose exponentials are in the memory of d_weight until it is written"
    return first if first_rows == tokens else f"{first}, and {-(-(tokens - first_rows) // rows)} of {rows} rows"


def describe_plan(
    *,
    path: str,
    kernels: str | None,
    tile: tuple[int, int] | None,
    chunks: str,
    tokens: int,
    casts_head: bool,
    matmuls: dict[str, bool],
    library: str,
    workspace: int,
    budget: int,
    saved: SavedRowCount | None,
    saves_logits: bool,
    others: tuple[str, str] | None = None,
    fixed_rows: int | None = None,
) -> str:
    """Returns the description of a plan, a few lines in the same words for both frameworks.

    Args:
        path: a key of `PATHS`.
        kernels: which kernels run, or None.
        tile: rows and classes of a tile of logits, or None.
        chunks: of `describe_chunks`.
        tokens: N.
        casts_head: whether the head is copied, to the input's dtype or to rows that kernels can read.
        matmuls: the matmuls that run, and whether our kernels compute them.
        library: the library that computes the others.
        workspace: bytes of workspace.
        budget: bytes of the memory budget.
        saved: which rows are saved for the backward pass; None if no row. `tokens` is their number then.
        saves_logits: whether that saves a matmul of the saved rows.
        others: the path of the rows that are not saved, and their chunks; None if all rows have a plan.
        fixed_rows: rows of a tile of d_input, with batch_invariant; None without.
    """
    family, why = "none", f": {PATHS[path]}"
    if kernels is not None:
        family = kernels if tile is None else f"{kernels}, tiles of {tile[0]} rows x {tile[1]} classes"
    if path != "chunked" and len(matmuls) == 1:
        why = ", no gradients"
    makers = {
        "our kernels": [name for name, ours in matmuls.items() if ours],
        library: [name for name, ours in matmuls.items() if not ours],
    }
    lines = {
        "path": f"{path}{why}",
        "kernels": family,
        "chunks": chunks,
        "weight": "copied one vocabulary chunk at a time" if casts_head else "read where it is",
        "matmuls": "; ".join(f"{', '.join(names)} by {maker}" for maker, names in makers.items() if names),
        "workspace": f"{workspace / 2**20:.1f} MiB of a budget of {budget / 2**20:.1f} MiB",
    }
    if saved is not None:
        share = saved.rows / max(saved.tokens, 1)
        unused = 4 + (2 - saves_logits) * share  # of log-probabilities: the backward pass computes all gradients
        lines["saved"] = (
            f"{saved.rows} of {saved.tokens} rows in {saved.bytes / 2**20:.1f} MiB: {4 - saves_logits * share:.3g} "
            f"matmuls; log-probabilities take {unused:.3g} if a gradient of entropy or lse arrives"
        )
        if saved.tokens and not saved.rows:
            lines["saved"] = (
                f"none of {saved.tokens} rows, because the budget holds fewer than {LEAST_SAVED_ROWS}: 4 matmuls"
            )
    if fixed_rows is not None:
        lines["batch-invariant"] = "a token's results do not depend on the other tokens"
        if "d_input" in matmuls:
            lines["batch-invariant"] += (
                f"; for it, d_input has whole tiles of {fixed_rows} rows, which may leave multiprocessors idle"
            )
    if others is not None:
        other_path, other_chunks = others
        lines["other rows"] = f"{other_path}: {PATHS[other_path]}; chunks: {other_chunks}"
    return "\n".join(f"{name}: {value}" for name, value in lines.items())
