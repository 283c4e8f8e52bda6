"""Chunks of rows and vocabulary chunks.

Shapes are static, so a last piece that would stick out starts earlier instead, and what it sees a second time is
masked (`Slice.fresh`).

An axis of symbolic length (`jax.export`) may be shorter than one piece. There a last piece sticks out: `Slice.of`
repeats the last row in place of those past the end, `Slice.fresh` masks them, and `Slice.put` drops them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

SYMBOLIC_TOKENS = 1024  # a symbolic number is cut as so many are


def is_symbolic(size: Any) -> bool:
    """Returns whether a size is known only where a program runs that `jax.export` wrote."""
    return not isinstance(size, int)


class Slice(NamedTuple):
    """A chunk of rows or a vocabulary chunk."""

    start: Array | int
    size: int
    fresh: Array | None  # (size,) bool, what no earlier piece has seen; None: all of it

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

    def put_fresh(self, array: Array | None, values: Array | None) -> Array | None:
        """Writes rows, but for those that an earlier piece has written."""
        if array is None or values is None:
            return None
        values = values.astype(array.dtype)
        if self.fresh is not None and not is_symbolic(array.shape[0]):
            values = jnp.where(self.fresh[:, None], values, self.of(array))
        return self.put(array, values)


def over_slices[T](body: Callable[[T, Slice], tuple[T, Any]], carry: T, length: int, size: int) -> tuple[T, Any]:
    """Runs `body` over the pieces of an axis; what it yields for each comes back joined along axis 0, (length, ...)."""
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
    body: Callable[..., tuple[T, Any]], carry: T, length: int, size: int, *, unrolls: bool
) -> tuple[T, Any]:
    """Runs `body(carry, piece, first=...)` over the pieces of an axis, none of which overlap, the last of them first.

    So the one that may be shorter is the one that needs code of its own: it starts sums, to which the others add.

    Where `unrolls`, a few chunks are not a loop but one after the other: their starts are then constants, and nothing
    is launched to compute, slice or gather by them. Each must take from the carry what it cannot begin without, or
    two would live at a time.
    """
    full = (length - 1) // size * size
    carry, last = body(carry, Slice(full, length - full, None), first=True)
    if not full:
        return carry, last
    if unrolls and full // size < UNROLLED:
        found = []
        for start in range(0, full, size):
            carry, last = lax.optimization_barrier((carry, last))
            carry, one = body(carry, Slice(start, size, None), first=False)
            found.append(one)
        return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *found, last)

    def step(carry: T, index: Array) -> tuple[T, Any]:
        return body(carry, Slice(index * size, size, None), first=False)

    indices, last = lax.optimization_barrier((jnp.arange(full // size), last))  # or two chunks would live at a time
    carry, pieces = lax.scan(step, carry, indices)
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a.reshape(-1, *a.shape[2:]), b]), pieces, last)
    return carry, joined
