"""d_weight of scaled exponentials where devices gathered the head: `head_scatter.py`.

The chunks of rows add to the parts of d_weight, float32 arrays. The last one also sends them. For each part in turn:

    += E^T (rho x)                     `hopper_gradients.add_d_weight`
    the terms of label smoothing       `Smoothing.add_to_classes`
    the targets' terms, of all rows    `target_grad.add_targets_of_part`
    the sum over the devices           `HeadScatter.send`, beside the matmul of the next part

The sum of the last part runs beside the matmul of d_input of the chunk.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jax_pallas import target_grad, vocab_shard
from jax_pallas.devices import Devices
from jax_pallas.exchange import Chunk
from jax_pallas.head_scatter import HeadScatter
from jax_pallas.problem import Problem, plan_of
from jax_pallas.row_kernels import CallRows
from jax_pallas.slicing import Slice
from jax_pallas.smoothing import Smoothing
from linear_ce.gpus import gpu_named

Sums = tuple[Array, ...]  # of each part, (devices * n, D) float32; once they are sent (n, D)


class DWeightParts(NamedTuple):
    """The parts of d_weight of a call.

    Args:
        last_start: the first row of the last chunk that is computed.
        theta_scale: what theta is multiplied by for d_weight, or None.
    """

    problem: Problem
    scatter: HeadScatter
    last_start: int
    smoothing: Smoothing | None
    theta_scale: Array | None

    @staticmethod
    def of(
        problem: Problem,
        devices: Devices,
        smoothing: Smoothing | None,
        scales: tuple[Array, Array] | None,
        *,
        chunks: int,
    ) -> "DWeightParts | None":
        """Returns the parts of d_weight of a call of so many chunks, or None if it is not sent in parts.

        Args:
            problem: of the classes of this device and of those with which it gathered the head.
        """
        plan = plan_of(problem)
        if not problem.sends_head or not plan.d_weight_kernel:
            return None
        vocab, programs = problem.linear_weight.shape[problem.vocab_axis], gpu_named(plan.gpu).multiprocessors
        hidden = problem.input.shape[1]
        scatter = HeadScatter.of(devices, vocab, hidden, chunks=chunks, programs=programs)
        last_start = max(chunks - 2, 0) * plan.scaled_exp_config.rows
        theta_scale = None if scales is None else scales[1] / scales[0]
        return DWeightParts(problem, scatter, last_start, smoothing, theta_scale)

    def empty(self) -> Sums:
        """Returns what the first chunk replaces."""
        hidden = self.problem.input.shape[1]
        return tuple(lax.empty((self.scatter.devices * size, hidden), jnp.float32) for size in self.scatter.sizes)

    def is_last(self, chunk: Slice) -> bool:
        return isinstance(chunk.start, int) and chunk.start == self.last_start

    def add(self, chunk: Chunk, sums: Sums, *, sent: float) -> Sums:
        """Returns the parts with e^T x of a chunk added, of rows of x already times rho. The last chunk returns the
        rows of this device of their sums over the devices. e and x of the chunk wait for this.

        Args:
            sent: of `add_d_weight`, for the first part.
        """
        last, found = self.is_last(chunk.slice), list[Array]()
        targets = self._targets(chunk.rows) if last else None
        for part, old in enumerate(sums):
            total = self._multiply(part, chunk, None if chunk.first else old, sent)
            if targets is not None:
                total = self._finish(part, total, *targets)
                # Before the next part, beside which it is sent, and after the sum of the part before: XLA would start
                # one sum at a time, and all of them behind the last part.
                operands = found[-1:], total, chunk.e, chunk.x
                found[-1:], total, chunk.e, chunk.x = lax.optimization_barrier(operands)
                sent = vocab_shard.sent_by_sum(self.scatter.devices, total.nbytes, of_own=True)
                total = self.scatter.send(total)
                chunk.e = vocab_shard.after_begin(chunk.e)
            found.append(total)
        if not last:  # what comes after that may overwrite x
            found, chunk.e, chunk.x = lax.optimization_barrier((found, chunk.e, chunk.x))
        return tuple(found)

    def _multiply(self, part: int, chunk: Chunk, old: Array | None, sent: float) -> Array:
        """Returns e^T x of the classes of a part, added to `old` if not None: (33) without the targets' terms."""
        from jax_pallas import hopper_gradients

        scatter = self.scatter
        return hopper_gradients.add_d_weight(
            chunk.e,
            chunk.x,
            chunk.start,
            vocab=scatter.devices * scatter.sizes[part],
            classes=self.problem.classes,
            vocab_axis=0,
            in_l2=1.0,
            rows=chunk.slice.size,
            old=old,
            first_class=jnp.int32(scatter.starts[part]),
            power=chunk.power,
            float32=True,
            of_shards=hopper_gradients.OfShards(scatter.shard_rows, scatter.sizes[part]),
            sent=sent,
            gpu=plan_of(self.problem).gpu,
        )

    def _targets(self, rows: CallRows) -> tuple[Array, Array, Array, Array]:
        """Returns the places of the targets of all rows in the parts, in ascending order, their rows and theta, and how
        many places come before each part and before the end."""
        assert rows.theta is not None
        theta = rows.theta if self.theta_scale is None else rows.theta * self.theta_scale
        devices, places = self.scatter.devices, self.scatter.places(rows.target)
        ends = [devices * start for start in (*self.scatter.starts, sum(self.scatter.sizes))]
        sorted_rows = target_grad.sort_by_target(places, rows.row_weight, theta, self.problem.tokens, ends[-1])
        bounds = (sorted_rows[0] < jnp.array(ends, jnp.int32)[:, None]).sum(1, dtype=jnp.int32)
        return *sorted_rows, bounds

    def _finish(self, part: int, total: Array, *targets: Array) -> Array:
        """Returns the sums of a part with the terms of label smoothing and of the targets."""
        if self.smoothing is not None:
            total = self.smoothing.add_to_classes(total, self.scatter.classes(part))
        first = self.scatter.devices * self.scatter.starts[part]
        return target_grad.add_targets_of_part(total, self.problem.input, *targets, part=part, first=first)

    def own_rows(self, sums: Sums) -> Array:
        """Returns d_weight of this device's shard, float32, of what the last chunk returned."""
        own = self.scatter.own_rows(sums)
        return own if self.problem.vocab_axis == 0 else own.T
