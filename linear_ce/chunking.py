"""How a call is cut into pieces: pure functions of shapes, dtypes and the memory budget. Nothing here changes a
result beyond rounding.

The chunked version walks rows in chunks and, within a chunk, the vocabulary in slabs. `WorkspaceModel` counts the
bytes that one chunk of `rows` x one slab of `slab` keeps alive at the worst moment; `choose_chunks` finds the largest
chunk within the budget.
"""

from dataclasses import dataclass, field, replace

MIN_ROWS = 16  # fewer rows a product waste the matrix units; a budget that cannot hold them is refused

MIN_SLAB = 64

ROW_MULTIPLE = 16


@dataclass(frozen=True)
class ChunkConfig:
    """How a call is cut.

    Args:
        rows: of a chunk.
        slab: classes of a slab.
        float32_sum: d_weight is summed over chunks in a float32 buffer of its own.
        keeps_logits: plan A keeps a chunk's logits from its first pass to its second.
        statistics_slab: classes of a slab in the first pass, where that is not `slab`.
        bytes: of workspace; says nothing of how the call is cut.
    """

    rows: int
    slab: int
    float32_sum: bool
    keeps_logits: bool = False
    statistics_slab: int | None = None
    bytes: int = field(default=0, compare=False)

    @property
    def first_slab(self) -> int:
        return self.statistics_slab or self.slab


@dataclass(frozen=True)
class WorkspaceModel:
    """Bytes of workspace as a polynomial in the chunk's `rows` (n) and `slab` (v); each framework's `workspace_model`
    makes one.

    Args:
        fixed: whatever the chunk, in bytes.
        per_row: times n.
        per_slab: times v.
        per_tile: times n * v.
        float32_sum: a float32 d_weight of all classes, needed only where several chunks add to a 16-bit one.
    """

    fixed: int
    per_row: int
    per_slab: int
    per_tile: int
    float32_sum: int = 0

    def bytes(self, rows: int, slab: int) -> int:
        return self.fixed + rows * self.per_row + slab * self.per_slab + rows * slab * self.per_tile

    def rows_within(self, budget: int, slab: int) -> int:
        """Returns the most rows that fit beside `slab`; negative or zero if none does."""
        return (budget - self.fixed - slab * self.per_slab) // (self.per_row + slab * self.per_tile)


def choose_chunks(model: WorkspaceModel, tokens: int, classes: int, budget: int) -> ChunkConfig:
    """Returns the largest chunk whose workspace stays within `budget` bytes.

    One chunk of all rows is best: d_weight is then written once. Otherwise d_weight is summed in float32 if that buffer
    takes no more than half the budget, and in the weight's own dtype if it takes more (rounded once a chunk).

    Raises:
        ValueError: not even the smallest chunk fits; the message names the least budget that would do.
    """
    tokens = max(tokens, 1)
    least_rows, least_slab = min(tokens, MIN_ROWS), min(classes, MIN_SLAB)
    least = model.bytes(least_rows, least_slab)
    if least > budget:
        raise ValueError(
            f"memory_budget must be at least {least} bytes for {tokens} tokens and {classes} classes, got {budget}"
        )
    whole = _largest(model, tokens, classes, budget)
    if whole.rows >= tokens or not 0 < model.float32_sum <= budget // 2:
        return whole
    rest = budget - model.float32_sum
    if model.bytes(least_rows, least_slab) > rest:
        return whole
    summed = _largest(model, tokens, classes, rest)
    return ChunkConfig(summed.rows, summed.slab, float32_sum=True, bytes=summed.bytes + model.float32_sum)


def choose_plan_a(
    keeping: WorkspaceModel, recomputing: WorkspaceModel, tokens: int, classes: int, budget: int
) -> ChunkConfig:
    """Returns the chunks of plan A, which keeps the logits from the first pass to the second if all rows fit so.

    Kept logits spare a product, but at a large vocabulary the budget holds them for few rows at a time, and products of
    few rows waste more than that (benchmarks/NOTES.md). Then they are computed twice, in chunks that V does not limit.

    Raises:
        ValueError: as `choose_chunks`.
    """
    if keeping.bytes(min(max(tokens, 1), MIN_ROWS), min(classes, MIN_SLAB)) <= budget:
        kept = choose_chunks(keeping, tokens, classes, budget)
        if kept.rows >= tokens:
            return replace(kept, keeps_logits=True)
    return choose_chunks(recomputing, tokens, classes, budget)


def _largest(model: WorkspaceModel, tokens: int, classes: int, budget: int) -> ChunkConfig:
    """Widest slab that leaves half of the rows that the narrowest would: products and passes want both sides long."""
    narrowest = min(classes, MIN_SLAB)
    slabs = [narrowest]
    while slabs[-1] < classes:
        slabs.append(min(2 * slabs[-1], classes))
    most = min(tokens, model.rows_within(budget, narrowest))
    enough = max(min(tokens, MIN_ROWS), most // 2)
    slab = max(slab for slab in slabs if slab == narrowest or model.rows_within(budget, slab) >= enough)
    rows = min(tokens, model.rows_within(budget, slab))
    if ROW_MULTIPLE <= rows < tokens:
        chunks = -(-tokens // (rows - rows % ROW_MULTIPLE))  # then as even as the multiple allows
        rows = min(tokens, -(-tokens // (chunks * ROW_MULTIPLE)) * ROW_MULTIPLE)
    return ChunkConfig(rows, slab, float32_sum=False, bytes=model.bytes(rows, slab))


PATHS = {
    "scaled_exp": "the gradients are matmuls of stored exponentials",
    "recompute": "the gradients compute the logits again",
    "chunked": "no kernels",
}


def describe_plan(
    *,
    path: str,
    kernels: str | None,
    tile: tuple[int, int] | None,
    rows: int,
    tokens: int,
    casts_head: bool,
    matmuls: dict[str, bool],
    library: str,
    workspace: int,
    budget: int,
) -> str:
    """Returns a plan in a few lines, in the words that both frameworks use.

    Args:
        path: "scaled_exp", "recompute" or "chunked".
        kernels: whose kernels run, or None.
        tile: rows and classes of a tile of logits, or None.
        rows: of a chunk.
        tokens: N.
        casts_head: whether the head is copied, to the input's dtype or to rows that kernels can read.
        matmuls: those that run, and whether our kernels do.
        library: whose matmuls run otherwise.
        workspace: bytes.
        budget: bytes.
    """
    family, why = "none", f": {PATHS[path]}"
    if kernels is not None and tile is not None:
        family = f"{kernels}, tiles of {tile[0]} rows x {tile[1]} classes"
    if path != "chunked" and len(matmuls) == 1:
        why = ", no gradients"
    makers = {
        "our kernels": [name for name, ours in matmuls.items() if ours],
        library: [name for name, ours in matmuls.items() if not ours],
    }
    lines = {
        "path": f"{path}{why}",
        "kernels": family,
        "chunks": f"{max(1, -(-tokens // rows))} of up to {rows} rows",
        "weight": "copied a piece at a time" if casts_head else "read where it is",
        "matmuls": "; ".join(f"{', '.join(names)} by {maker}" for maker, names in makers.items() if names),
        "workspace": f"{workspace / 2**20:.1f} MiB of a budget of {budget / 2**20:.1f} MiB",
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())
