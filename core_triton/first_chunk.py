"""Where the exponentials of a first chunk are: by pieces of the classes, most of them in the memory of d_weight.

d_weight is not written yet when the first chunk is computed, so its memory is free. A first chunk may have as many rows
as the exponentials of a class have room in a row of d_weight, more than the budget allows for the other chunks. Its
d_input is computed first, from all exponentials, and then d_weight, a piece at a time.
"""

from typing import NamedTuple

from torch import Tensor

from core_triton.launch import cdiv


class Stores(NamedTuple):
    """Where kernels store the exponentials of a vocabulary chunk. All but `first` are None if there is one piece.

    Args:
        first: (n, v) of the chunk, or (n, P) of the first piece; None if nothing is stored.
        others: ((pieces - 1) M, P) of the other pieces, one below the other.
        piece: P.
        piece_rows: M.
    """

    first: Tensor | None
    others: Tensor | None = None
    piece: int | None = None
    piece_rows: int | None = None


class StoredExponentials(NamedTuple):
    """The exponentials of a chunk of n rows: (n, K), or by pieces of the classes for the first chunk that is computed.

    Its pieces are in the memory of d_weight, which is not written yet, but for the first piece. Those of piece p are
    where the rows of d_weight of piece p - 1 will be. The gradients of the last piece are computed first, so each piece
    of d_weight replaces exponentials that no kernel reads again.

    Args:
        first: (n, P), the first piece, or (n, K).
        others: (pieces - 1, M, P), of which the first n rows of M are used; None if there is one piece. M P is the size
            of a piece of d_weight. Hopper's kernels write whole row blocks, so M is at least n rounded up to these. P
            is a multiple of the classes of a tile, so each tile is in one piece.
    """

    first: Tensor
    others: Tensor | None = None

    @classmethod
    def in_d_weight(cls, stored: Tensor, d_weight: Tensor, n: int, piece: int, classes: int) -> "StoredExponentials":
        """Returns room for the exponentials of n rows, in pieces of `piece` classes, in stored (rows, K or more) and
        the memory of d_weight (V, D)."""
        pieces, memory = cdiv(classes, piece), d_weight.view(-1).view(stored.dtype)
        others = memory[: (pieces - 1) * piece * (memory.numel() // len(d_weight))].view(pieces - 1, -1, piece)
        return cls(stored.view(-1)[: n * piece].view(n, piece), others)

    def pieces(self, classes: int, most: int | None = None) -> list[slice]:
        """Returns the classes of each piece, or of its parts of at most `most` classes."""
        piece = self.first.shape[1]
        step = min(most or piece, piece)
        ends = {first: min(first + piece, classes) for first in range(0, classes, piece)}
        starts = [(start, end) for first, end in ends.items() for start in range(first, end, step)]
        return [slice(start, min(start + step, end)) for start, end in starts]

    def stores(self, vocab_chunk: slice) -> "Stores":
        """Returns where kernels store the exponentials of any classes."""
        if self.others is None:
            return Stores(self.first[:, vocab_chunk])
        _, piece_rows, piece = self.others.shape
        return Stores(self.first, self.others.view(-1, piece), piece, piece_rows)

    def of(self, vocab_chunk: slice) -> Tensor:
        """Returns the exponentials (n, v) of classes of one piece."""
        n, piece = self.first.shape
        place = vocab_chunk.start // piece
        first = vocab_chunk.start - place * piece
        within = slice(first, first + vocab_chunk.stop - vocab_chunk.start)
        if place == 0:
            return self.first[:, within]
        assert self.others is not None
        return self.others[place - 1, :n, within]
