"""Where the exponentials of a first chunk are: the first classes in a workspace, the others in the memory of d_weight.

d_weight is not written yet when the first chunk is computed, so its memory is free. A first chunk may have as many rows
as fit there beside each other, more than the budget allows for the other chunks. The exponentials of its first `piece`
classes are in the workspace, (rows, piece). Those of the next `group` classes are in the first `rows` rows of d_weight
(V, D), and so on: d_weight[g * rows + r, i] is the exponential of row r and class piece + g * group + i.

d_input of the chunk is computed first, from all exponentials. Then d_weight is written from the last class to the first
(`FirstChunk.pieces`), each piece over exponentials that no kernel reads again. A group is no longer than a row of
d_weight and no shorter than a column of the chunk, so classes need at most as many rows for their exponentials as for
their gradients.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jax_pallas.tile_config import CLASS_BLOCK, ROW_BLOCK, cdiv


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
    def of(cls, piece: int, rows: int, hidden: int) -> "FirstChunk":
        """Returns the layout of a chunk of so many rows where d_weight has so many columns."""
        return cls(piece, cdiv(rows, ROW_BLOCK) * ROW_BLOCK, hidden // CLASS_BLOCK * CLASS_BLOCK)

    def place(self, column: Any) -> tuple[Any, Any]:
        """Returns, for a class past the piece, the row of d_weight of the chunk's first row, and the column."""
        later = column - self.piece
        number = lax.div(later, jnp.int32(self.group))
        return number * self.rows, later - number * self.group

    def pieces(self, classes: int) -> list[tuple[int, int]]:
        """Returns the pieces of d_weight, (first class, end), in the order in which they are written.

        A piece starts at the first class block whose rows hold no exponentials of the piece or of classes before it.
        """
        found, end = list[tuple[int, int]](), classes
        while end > 0:
            groups = cdiv(max(0, end - self.piece), self.group)
            first = cdiv(groups * self.rows, CLASS_BLOCK) * CLASS_BLOCK
            assert first < end, "the piece in the workspace is too narrow: FIRST_CHUNK_PIECE"
            found.append((first, end))
            end = first
        return found

    def class_sums(self, e: Array, d_weight: Array, rho: Array, classes: int) -> Array:
        """Returns (classes,) float32, the sums over the rows of rho (n,) times the exponentials."""
        n, groups = len(rho), cdiv(classes - self.piece, self.group)
        first = (e[:n].astype(jnp.float32) * rho[:, None]).sum(0)
        later = d_weight[: groups * self.rows, : self.group].reshape(groups, self.rows, self.group)[:, :n]
        later = (later.astype(jnp.float32) * rho[:, None]).sum(1)
        return jnp.concatenate([first, later.reshape(-1)])[:classes]
