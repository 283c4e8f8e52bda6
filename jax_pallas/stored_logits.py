"""The tiles of `chunked.py` for float32 on a GPU: the logits of all classes are stored, and d_logits replace them.

A float32 matmul takes about ten times as long as one in bfloat16, so what counts is the number and the speed of the
matmuls: `float32_matmuls.py` on Hopper, XLA's elsewhere. With all classes at once, XLA reads the head where it is and
adds to d_weight where it is. The passes over the stored logits take little of the time. XLA fuses them, so they need no
kernels.
"""

from collections.abc import Callable

from jax import Array, lax

from jax_pallas.chunked import RowGradient, Tiles, finished_logits, logits_tile, tile_d_logits, tile_partial
from jax_pallas.problem import Problem, add_d_weight, float32_matmul
from jax_pallas.row_math import Partial
from jax_pallas.slicing import Slice, over_slices

PARTS = 8  # of a chunk's rows, in which numbers are replaced


def _replaced(stored: Array, function: Callable[[Array, Slice], Array]) -> Array:
    """Returns `function` of parts of (n, K) numbers and their rows, in the memory of the numbers.

    XLA gives the result of an operation the memory of an operand only if the operand is no result of a GEMM of cuBLAS,
    which returns its workspace too. The carry of a loop stays where it is. Of a part, XLA makes one kernel or two, the
    second of which copies what the first one stored: two at Qwen2.5-0.5B and Gemma 2 2B on an H200.
    """

    def replace(stored: Array, rows: Slice) -> tuple[Array, None]:
        return rows.put_fresh(stored, function(rows.of(stored), rows)), None

    n = stored.shape[0]
    return over_slices(replace, stored, n, -(-n // PARTS))[0]


def _logits(problem: Problem, x: Array, vocab_chunk: Slice) -> Array:
    w, programs = problem.weight_of(vocab_chunk), problem.float32_programs
    scaled, biased = problem.spec.logit_scale != 1.0, problem.linear_bias is not None
    capped = problem.spec.softcap is not None
    if not programs and not capped and not (scaled and biased):
        logits = logits_tile(problem, x, w, vocab_chunk)  # XLA's GEMM multiplies by the scale, or adds the bias
    else:
        logits = float32_matmul(x, w, (1, 1 - problem.vocab_axis), programs=programs)
        if scaled or biased or capped:
            logits = _replaced(logits, lambda logits, rows: finished_logits(problem, logits, vocab_chunk))
    return lax.optimization_barrier(logits) if scaled or capped else logits  # as in `chunked.py`


def _partial(problem: Problem, x: Array, target: Array, vocab_chunk: Slice, statistics: int) -> tuple[Partial, Array]:
    logits = _logits(problem, x, vocab_chunk)
    return tile_partial(problem, logits, target, vocab_chunk, statistics), logits


def _d_logits(
    problem: Problem, x: Array, target: Array, vocab_chunk: Slice, row: RowGradient, logits: Array | None
) -> tuple[Array, Array | None]:
    stored, summed = _logits(problem, x, vocab_chunk) if logits is None else logits, None

    def d_logits_of(logits: Array, rows: Slice) -> Array:
        return tile_d_logits(problem, logits, rows.of(target), row.of(rows), vocab_chunk)

    d_logits = _replaced(stored, d_logits_of)
    if row.bias:
        summed = d_logits.sum(0)  # only float16 has a `bias_scale`
    return d_logits, summed


STORED_TILES = Tiles(_partial, _d_logits, add_d_weight)
