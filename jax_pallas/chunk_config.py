"""How a call of the `chunked` implementation is divided into chunks: a pure function of shapes, dtypes and the memory
budget.

It determines speed and memory. It changes results only by rounding.
"""

from dataclasses import replace
from typing import Any

from linear_ce.chunking import LEAST_FLOAT32_ROWS, ChunkConfig, WorkspaceModel, choose_chunks, choose_plan_a

# Bytes that cuBLAS takes for a GEMM, at most. The programs of `float32_matmuls.py` that share a tile take less.
GEMM_WORKSPACE = 32 * 2**20

# Rows whose three float32 matmuls take about as long as reading and writing d_weight once more does. Independent of D
# and V. By the arithmetic and the bandwidth of an H100 and an H200.
D_WEIGHT_ROWS = 14


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
    grad_into: bool = False,
    splits_head: bool = False,
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
        grad_into: d_weight is added to a float32 array of the caller.
        splits_head: the head is the sum of two matrices of the input's dtype.
    """
    cast = itemsize * (weight_itemsize != itemsize)  # vocabulary chunk of the head in the input's dtype
    parts = 1 + splits_head
    # Rows with the ignored ones zeroed, and again for each half of the head; statistics and coefficients.
    per_row = hidden * itemsize * (1 + 2 * splits_head) + 128
    if keeps_logits:
        per_row += 4 * classes
    if d_input:
        per_row += 8 * hidden * parts  # float32 sum and one vocabulary chunk's matmul
    if d_weight and float16:
        per_row += hidden * itemsize  # rows of x multiplied by powers of two
    # The head's vocabulary chunk; its matmul and their sum.
    per_class = hidden * ((itemsize + cast) * parts + (8 if d_weight else 0)) + 32
    # Logits; d_logits and what is not fused with it; the shifted logits.
    per_logit = 4 + (4 if itemsize == 4 or entropy or softcap else itemsize) + 4 * entropy
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
        counted = workspace_model(
            tokens=tokens, classes=classes, itemsize=itemsize, keeps_logits=keeps_logits, **others
        )
        of_chunk = itemsize * classes * saves  # d_logits of a chunk's rows, before they are among those of all rows
        return replace(counted, per_row=counted.per_row + of_chunk)

    recomputing = model(keeps_logits=False)
    if gradients_in_forward:
        few = itemsize == 4 or saves
        return choose_plan_a(model(keeps_logits=True), recomputing, tokens, classes, budget, float32=few)
    return choose_chunks(recomputing, tokens, classes, budget)


def choose_stored(
    *, tokens: int, hidden: int, classes: int, stores: bool, d_input: bool, budget: int
) -> ChunkConfig | None:
    """Returns the chunks of a float32 call on a GPU, whose logits are stored for all classes; None if the budget holds
    fewer than LEAST_FLOAT32_ROWS rows.

    XLA then reads the head where it is and adds to d_weight where it is. With vocabulary chunks it copies a chunk of
    the head for each matmul and adds to d_weight in another pass.

    Args:
        tokens: N.
        hidden: D.
        classes: K.
        stores: plan A: the logits of a chunk stay until its gradients are done.
        d_input: d_input is computed.
        budget: bytes.
    """
    tokens = max(tokens, 1)
    # The rows with zeros in the ignored ones; d_input before it is in its place, in two parts at most; the logits.
    per_row = 4 * hidden * (1 + 2 * d_input) + 128 + 4 * classes
    model = WorkspaceModel(64 * tokens + 8 * classes + 4096 + GEMM_WORKSPACE, per_row, 0, 0)
    most = min(tokens, model.rows_within(budget, classes))
    if most < min(tokens, LEAST_FLOAT32_ROWS):
        return None

    def cost(rows: int) -> int:
        """In rows. All chunks have as many: the last one starts earlier, and computes some rows again."""
        chunks = -(-tokens // rows)
        return chunks * (rows + D_WEIGHT_ROWS)

    step = LEAST_FLOAT32_ROWS
    rows = tokens if most == tokens else min(range(step, most + 1, step), key=cost)
    return ChunkConfig(rows, classes, float32_sum=False, keeps_logits=stores, bytes=model.bytes(rows, classes))
