"""How a call whose matmuls are PyTorch's is divided into chunks: pure functions of shapes, dtypes and the memory
budget.

They determine speed and memory. They change results only by rounding.
"""

from dataclasses import replace
from typing import Any

from core_triton.tile_config import padded
from linear_ce import float32_tiles
from linear_ce.chunking import (
    MIN_ROWS,
    MIN_VOCAB_CHUNK,
    ChunkConfig,
    WorkspaceModel,
    choose_chunks,
    choose_plan_a,
)


def workspace_model(
    *,
    tokens: int,
    hidden: int,
    classes: int,
    itemsize: int,
    weight_itemsize: int,
    keeps_logits: bool,
    float16: bool,
    softcap: bool,
    entropy: bool,
    d_input: bool,
    d_weight: bool,
    upcasts: bool,
    grad_into: bool = False,
    splits_head: bool = False,
    exchanged: int = 0,
) -> WorkspaceModel:
    """Counts what `chunked` allocates above inputs and gradients.

    Args:
        tokens: N.
        hidden: D.
        classes: K, rows of linear_weight that are classes.
        itemsize: bytes of input's dtype.
        weight_itemsize: bytes of linear_weight's dtype.
        keeps_logits: plan A: a chunk's float32 logits stay until its gradients are done.
        float16: input is float16, whose rows are scaled by powers of two for d_weight.
        softcap: the logits are capped.
        entropy: the entropy is computed, or differentiated.
        d_input: d_input is computed.
        d_weight: d_weight is computed.
        upcasts: matmuls run on float32 copies (16-bit input on a device without float32-output matmuls).
        grad_into: d_weight is added to a float32 tensor of the caller.
        splits_head: the head is the sum of two matrices of the input's dtype.
        exchanged: bytes of a row that the ranks of a vocabulary exchange.
    """
    half = itemsize == 2
    copy = 4 * upcasts  # float32 copy of an operand
    parts = 1 + splits_head
    cast = itemsize * (weight_itemsize != itemsize)  # vocabulary chunk of the head in the input's dtype
    # Rows with the ignored ones zeroed, and again for each half of the head; statistics and coefficients.
    per_row = hidden * (itemsize + copy) * (1 + 2 * splits_head) + 128 + exchanged
    if keeps_logits:
        per_row += 4 * classes
    if d_input:
        per_row += 8 * hidden * parts  # float32 sum and one vocabulary chunk's matmul
    if d_weight and float16:
        per_row += hidden * (4 + itemsize + copy)  # rows of x multiplied by powers of two
    per_class = hidden * ((cast + copy) * parts + copy * splits_head + (4 if d_weight else 0)) + 32
    first_pass = 4 + 4 * entropy  # exponentials; shifted logits
    rounded = itemsize + copy if half else 0
    second_pass = 4 * softcap + 4 * entropy + rounded  # the cap's slope; a factor; d_logits in input's dtype
    per_logit = 4 * (not keeps_logits) + max(first_pass, second_pass)
    needs_sum = d_weight and weight_itemsize < 4 and not grad_into
    return WorkspaceModel(
        fixed=64 * tokens + 8 * classes + 4096,
        per_row=per_row,
        per_class=per_class,
        per_logit=per_logit,
        float32_sum=4 * classes * hidden if needs_sum else 0,
    )


def choose_chunked(
    *,
    tokens: int,
    classes: int,
    itemsize: int,
    gradients_in_forward: bool,
    saves: bool,
    budget: int,
    **others: Any,
) -> ChunkConfig:
    """Returns the chunks of a call.

    Args:
        gradients_in_forward: plan A: the gradients are computed with the loss, from kept logits if they fit.
        saves: d_logits are saved for the backward pass. d_weight then has no time in common with the logits, so chunks
            may have few rows.
        budget: bytes.
        tokens, classes, itemsize, others: of `workspace_model`.

    Raises:
        ValueError: as `choose_chunks`.
    """

    def model(*, keeps_logits: bool) -> WorkspaceModel:
        return workspace_model(tokens=tokens, classes=classes, itemsize=itemsize, keeps_logits=keeps_logits, **others)

    recomputing = model(keeps_logits=False)
    if gradients_in_forward:
        few = itemsize == 4 or saves
        return choose_plan_a(model(keeps_logits=True), recomputing, tokens, classes, budget, float32=few)
    return choose_chunks(recomputing, tokens, classes, budget)


def choose_stored(
    *,
    tokens: int,
    hidden: int,
    classes: int,
    stores: bool,
    d_input: bool,
    second: bool,
    copies_head: bool,
    copies_rows: bool,
    copied: int = 0,
    exchanged: int = 0,
    programs: int = 0,
    budget: int,
) -> tuple[ChunkConfig, int, int]:
    """Returns the chunks of a call of `stored_logits.py`, and for `float32_matmuls.py` the number of programs, 0 if the
    chunks have too few rows, and in how many waves they may share the inner dimension of tiles.

    The sums of waves take up to a sixteenth of the budget, and less where logits would be computed twice otherwise.

    Args:
        tokens: N.
        hidden: D.
        classes: K.
        stores: plan A: the logits of a chunk stay until its gradients are done, if they fit.
        d_input: d_input is computed.
        second: gradients are computed.
        copies_head: PyTorch copies a vocabulary chunk of the head for a matmul.
        copies_rows: PyTorch copies a chunk of the input for a matmul.
        copied: bytes of the contiguous copies of strided vectors.
        exchanged: bytes of a row that the ranks of a vocabulary exchange.
        programs: of `float32_matmuls.py` that run at a time; 0 where PyTorch multiplies.
        budget: bytes.

    Raises:
        ValueError: as `choose_chunks`.
    """
    per_row = 4 * hidden * (second + copies_rows + d_input) + 128 + exchanged
    per_class = 4 * hidden * copies_head + 32
    of_wave = 4 * float32_tiles.BLOCK**2 * programs

    def choose(waves: int) -> tuple[ChunkConfig, WorkspaceModel]:
        fixed = 64 * tokens + 8 * classes + 4096 + copied + waves * of_wave
        recomputing = WorkspaceModel(fixed, per_row + 4 * padded(1), per_class, 4)
        if not stores:
            return choose_chunks(recomputing, tokens, classes, budget), recomputing
        keeping = WorkspaceModel(fixed, per_row + 4 * (classes + padded(1)), per_class, 0)
        chunks = choose_plan_a(keeping, recomputing, tokens, classes, budget, float32=True)
        return chunks, keeping if chunks.keeps_logits else recomputing

    chunks, model = choose(0)
    if not programs or chunks.rows < float32_tiles.BLOCK:  # most of a tile of fewer rows would be empty
        return chunks, 0, 0
    least, keeps = model.bytes(MIN_ROWS, min(classes, MIN_VOCAB_CHUNK)), chunks.keeps_logits
    for waves in range(min(float32_tiles.WAVES, min(budget // 16, budget - least) // of_wave), -1, -1):
        chunks, model = choose(waves)
        if chunks.keeps_logits == keeps and chunks.rows >= float32_tiles.BLOCK:
            break
    if not float32_tiles.BLOCK < chunks.rows < tokens:
        return chunks, programs, waves
    # Whole tiles, in chunks of about equal rows.
    most = model.rows_within(budget, chunks.vocab_chunk) // float32_tiles.BLOCK
    tiles = -(-tokens // float32_tiles.BLOCK)
    rows = -(-tiles // -(-tiles // most)) * float32_tiles.BLOCK
    return replace(chunks, rows=rows, bytes=model.bytes(rows, chunks.vocab_chunk)), programs, waves
