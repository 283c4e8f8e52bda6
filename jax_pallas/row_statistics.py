"""The statistics of rows with scaled exponentials, from numbers of class blocks: MATH.md section 14."""

import jax.numpy as jnp
from jax import Array

from jax_pallas import row_kernels
from jax_pallas.row_kernels import CallRows, ChunkNumbers
from jax_pallas.row_math import RowStatistics, first_of_largest
from jax_pallas.slicing import Slice


def finish_statistics(numbers: ChunkNumbers, rows: CallRows, chunk: Slice) -> RowStatistics:
    """Returns the statistics of a chunk's rows, whose losses are their negative log-likelihoods: (43), (44)."""
    problem, found, _, joined, repaired, block_width, _ = numbers
    n, contributes = chunk.size, chunk.of(rows.row_weight) != 0
    total = joined.total[:n]
    again = None if repaired is None else row_kernels.leaves_range(total)

    def summed(values: Array | None, values_again: Array | None) -> Array | None:
        if values is None:
            return None
        total = values[:, :n].sum(0)
        return total if again is None or values_again is None else jnp.where(again, values_again[:, :n].sum(0), total)

    if again is not None and repaired is not None:
        total = jnp.where(again, repaired.sums[:, :n].sum(0), total)
    total = jnp.where(total == jnp.inf, jnp.nan, total)

    def selected(values: Array | None) -> Array | None:
        return None if values is None else jnp.where(contributes, values, jnp.zeros((), values.dtype))

    entropy, logit_sum = None, summed(found.logit_sums, None)
    if found.exp_logs is not None:
        # A number near log(total) is subtracted first. Otherwise both terms are as large as the negative log-likelihood
        # of the target.
        shift = jnp.clip(jnp.floor(jnp.log(total)), -40.0, 40.0)
        pairs = [(found.exp_logs, found.sums)]
        if repaired is not None and repaired.exp_logs is not None:
            pairs.append((repaired.exp_logs, repaired.sums))
        terms = [exp_logs[:, :n] - shift * sums[:, :n] for exp_logs, sums in pairs]
        exp_log = summed(terms[0], terms[1] if len(terms) > 1 else None)
        assert exp_log is not None
        entropy = jnp.log(total * jnp.exp(-shift)) - exp_log / total
    squares, argmax = summed(found.squares, None if repaired is None else repaired.squares), None
    if found.columns is not None:
        assert found.tops is not None
        assert joined.largest is not None
        argmax = first_of_largest(found.tops[:, :n], found.columns[:, :n], joined.largest[:n], block_width)
        argmax = jnp.where((total > 0) & (total < jnp.inf), argmax, -1)
    return RowStatistics(
        lse=chunk.of(rows.lse),
        target_logit=chunk.of(rows.target_logit),
        nll=chunk.of(rows.loss),
        max=jnp.full(n, jnp.inf, jnp.float32) if rows.largest is None else chunk.of(rows.largest),
        weighted_sum=None,
        entropy=selected(entropy),
        argmax=selected(argmax),
        mean_logit=selected(None if logit_sum is None else logit_sum / problem.classes),
        sum_squared_probs=selected(None if squares is None else squares / total / total),
    )
