"""Where the exponentials of a first chunk are: the first classes in a workspace, the others in the memory of d_weight.

d_weight is not written yet when the first chunk is computed, so its memory is free. A first chunk may have as many rows
as fit there beside each other, more than the budget allows for the other chunks. The exponentials of its first `piece`
classes are in the workspace, (rows, piece). Those of the next `group` classes are in the first `rows` rows of d_weight
(V, D), and so on: d_weight[g * rows + r, i] is the exponential of row r and class piece + g * group + i.

d_input of the chunk is computed first, from all exponentials. Then d_weight is written from the last class to the first
(`FirstChunk.pieces`), each piece over exponentials that no kernel reads again. A group is no longer than a row of
d_weight and hardly shorter than a column of the chunk, so classes need few more rows for their exponentials than for
their gradients. Those in the workspace need none.

A float32 d_weight (V, D) has the memory of (V, 2D) exponentials of 16 bits: `memory_of`, `float32_of`. XLA copies
nothing for these.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jax_pallas.tile_config import CLASS_BLOCK, ROW_BLOCK, cdiv, first_chunk_pieces


class FirstChunk(NamedTuple):
    """The static sizes of this layout.

    Args:
        piece: classes in the workspace, a multiple of CLASS_BLOCK.
        rows: rows of d_weight of a group, those of the chunk to whole row blocks. Those past the chunk are zeros.
        group: classes of a group, whole class blocks, so that each tile of logits is in one group.
    """

    piece: int
    rows: int
    group: int

    @classmethod
    def of(cls, piece: int, rows: int, columns: int) -> "FirstChunk":
        """Returns the layout of a chunk of so many rows where the memory of d_weight has so many columns of 16 bits."""
        return cls(piece, cdiv(rows, ROW_BLOCK) * ROW_BLOCK, columns // CLASS_BLOCK * CLASS_BLOCK)

    def place(self, column: Any) -> tuple[Any, Any]:
        """Returns, for a class past the piece, the row of d_weight of the chunk's first row, and the column."""
        later = column - self.piece
        number = lax.div(later, jnp.int32(self.group))
        return number * self.rows, later - number * self.group

    def pieces(self, classes: int) -> list[tuple[int, int]]:
        """Returns the pieces of d_weight, (first class, end), in the order in which they are written."""
        found = first_chunk_pieces(*self, classes)
        assert found is not None, "the piece in the workspace is too narrow"
        return found

    def class_sums(self, e: Array, d_weight: Array, rho: Array, classes: int) -> Array:
        """Returns (classes,) float32, the sums over the rows of rho (n,) times the exponentials."""
        n, groups = len(rho), cdiv(classes - self.piece, self.group)
        first = (e[:n].astype(jnp.float32) * rho[:, None]).sum(0)
        later = d_weight[: groups * self.rows, : self.group].reshape(groups, self.rows, self.group)[:, :n]
        later = (later.astype(jnp.float32) * rho[:, None]).sum(1)
        return jnp.concatenate([first, later.reshape(-1)])[:classes]


def memory_of(d_weight: Array, dtype: Any) -> Array:
    """Returns the memory of d_weight (V, D) as numbers of 16 bits: (V, D), or (V, 2D) of a float32 d_weight."""
    if d_weight.dtype == dtype:
        return d_weight
    return lax.bitcast_convert_type(d_weight, dtype).reshape(len(d_weight), -1)


def float32_of(memory: Array) -> Array:
    """Returns what `memory_of` a float32 d_weight (V, D) is of."""
    return lax.bitcast_convert_type(memory.reshape(len(memory), -1, 2), jnp.float32)
