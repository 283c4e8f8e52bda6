"""Chunks of rows and vocabulary chunks.

Shapes are static, so all slices of an axis have the same size. If the last slice would end past the axis, it starts
earlier and overlaps the one before. `Slice.fresh` masks the overlap.

An axis of symbolic length (`jax.export`) may be shorter than one slice. There the last slice may end past the axis:
`Slice.of` repeats the last row in place of those past the end, `Slice.fresh` masks them, and `Slice.put` drops them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import Array, lax

SYMBOLIC_TOKENS = 1024  # plans assume this many tokens where the number is symbolic


def is_symbolic(size: Any) -> bool:
    """Returns whether a size is symbolic (`jax.export`), so that it has a value only when the program runs."""
    return not isinstance(size, int)


class Slice(NamedTuple):
    """A chunk of rows or a vocabulary chunk."""

    start: Array | int
    size: int
    fresh: Array | None  # (size,) bool, False where an earlier slice overlaps; None: no overlap

    def of(self, array: Array, axis: int = 0) -> Array:
        if is_symbolic(array.shape[axis]):
            return jnp.take(array, self.start + jnp.arange(self.size), axis, mode="clip")
        return array if self.size == array.shape[axis] else lax.dynamic_slice_in_dim(array, self.start, self.size, axis)

    def put(self, array: Array, values: Array, axis: int = 0) -> Array:
        values = values.astype(array.dtype)
        if is_symbolic(array.shape[axis]):
            places = (slice(None),) * axis + (self.start + jnp.arange(self.size),)
            return array.at[places].set(values, mode="drop", unique_indices=True)
        if self.size == array.shape[axis]:
            return values
        return lax.dynamic_update_slice_in_dim(array, values, self.start, axis)

    @overload
    def put_fresh(self, array: Array, values: Array) -> Array: ...

    @overload
    def put_fresh(self, array: Array | None, values: Array | None) -> Array | None: ...

    def put_fresh(self, array: Array | None, values: Array | None) -> Array | None:
        """Writes rows, except those that an earlier slice has written."""
        if array is None or values is None:
            return None
        values = values.astype(array.dtype)
        if self.fresh is not None and not is_symbolic(array.shape[0]):
            values = jnp.where(self.fresh[:, None], values, self.of(array))
        return self.put(array, values)


def over_slices[T](body: Callable[[T, Slice], tuple[T, Any]], carry: T, length: int, size: int) -> tuple[T, Any]:
    """Runs `body` over the slices of an axis. Returns the carry and the results of all slices, joined along axis 0."""
    if is_symbolic(length):

        def sticking_out(carry: T, index: Array) -> tuple[T, Any]:
            start = index * size
            return body(carry, Slice(start, size, start + jnp.arange(size) < length))

        carry, pieces = lax.scan(sticking_out, carry, jnp.arange(-(-length // size)))
        return carry, jax.tree.map(lambda piece: piece.reshape(-1, *piece.shape[2:])[:length], pieces)
    if size == length:
        return body(carry, Slice(0, size, None))
    count = -(-length // size)

    def step(carry: T, index: Array) -> tuple[T, Any]:
        if length % size == 0:
            return body(carry, Slice(index * size, size, None))
        start = jnp.minimum(index * size, length - size)
        return body(carry, Slice(start, size, start + jnp.arange(size) >= index * size))

    carry, pieces = lax.scan(step, carry, jnp.arange(count))
    full = (count - 1) * size

    def joined(piece: Array) -> Array:
        flat = piece.reshape(-1, *piece.shape[2:])
        return jnp.concatenate([flat[:full], flat[count * size - (length - full) :]])

    return carry, jax.tree.map(joined, pieces)


UNROLLED = 8  # chunks at most


def over_chunks[T](
    body: Callable[..., tuple[T, Any]],
    carry: T,
    length: int,
    size: int,
    *,
    full: int,
    unrolls: bool,
    separate_end: bool = False,
) -> tuple[T, Any]:
    """Runs `body(carry, chunk, first=...)` over chunks of an axis that do not overlap, the last chunk first.

    The last chunk starts at `full`, after whole chunks. It may be shorter or longer, and it starts the sums that the
    others add to. So only one chunk needs separate code, or with `separate_end` the one that is computed last, too: the
    start of this one is an integer.

    If `unrolls`, a few chunks are unrolled. Their starts are then constants, and no kernels are launched to compute
    starts, to slice or to gather. Each chunk must take an input from the carry, and waits for the results of the one
    before, or two chunks would be in memory at the same time.
    """
    carry, last = body(carry, Slice(full, length - full, None), first=True)
    if not full:
        return carry, last
    if unrolls and full // size < UNROLLED:
        found = [last]
        for start in range(0, full, size):
            carry, found[-1] = lax.optimization_barrier((carry, found[-1]))
            carry, one = body(carry, Slice(start, size, None), first=False)
            found.append(one)
        return carry, jax.tree.map(lambda last, *parts: jnp.concatenate([*parts, last]), *found)

    def step(carry: T, index: Array) -> tuple[T, Any]:
        return body(carry, Slice(index * size, size, None), first=False)

    found = [last]
    if full > size * separate_end:
        indices, last = lax.optimization_barrier(
            (jnp.arange(full // size - separate_end), last)
        )  # else two chunks would be in memory at the same time
        carry, pieces = lax.scan(step, carry, indices)
        found = [jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), pieces), last]
    if separate_end:
        carry, found[-1] = lax.optimization_barrier((carry, found[-1]))
        carry, end = body(carry, Slice(full - size, size, None), first=False)
        found.insert(-1, end)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)
