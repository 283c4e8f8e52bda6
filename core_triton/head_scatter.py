"""The gradient of a head that ranks gathered for a call: each rank gets the sum of its own rows.

A rank sends its gradient in parts. Part j has piece j of each rank's rows, (ranks, n, D) in float32. Parts are written
to a few buffers in turn, and a part is summed over the ranks while the next one is written. All ranks send the same
parts, whatever computed their gradients.

Where scaled exponentials compute the gradient, the last chunk of rows writes the parts (`d_weight_parts.py`): what the
other chunks added up in the head's dtype, and its own terms and those of the targets in float32. So most of the sum
over the ranks runs beside the last matmul, and nothing is rounded before it is sent but the sums of the other chunks.
`HeadScatter.offered` is how this reaches them. The parts are then in the memory of the gathered head, which is not read
any more. Other gradients are cast to float32 when they are complete.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from core_triton import vocab_shard
from core_triton.tile_config import CLASS_BLOCK, D_BLOCK
from linear_ce.collectives import BLOCKS

PARTS = 16  # about; the first part is computed, and the last one sent, while nothing else runs

BUFFERS = 3  # one is written, one is sent, and one waits to be sent; with sixteen parts a head in 16 bits holds them

# The tiles of d_weight of a part fill whole waves on this many multiprocessors, those that a collective leaves of an
# H100 or H200. The ranks may have other GPUs, but must send the same parts.
PROGRAMS, BLOCK_V = 132 - BLOCKS, CLASS_BLOCK


class _Current(threading.local):
    scatter: "HeadScatter | None" = None


_current = _Current()


def offered() -> "HeadScatter | None":
    """Returns what sends the gradient of the head of this thread's call in parts, or None for other calls."""
    return _current.scatter


class HeadScatter:
    """How the gradient of one gathered head, or of its bias, is sent.

    Args:
        group: its ranks have shards of the head, as `torch.chunk` divides it.
        rows: V, of the whole head.
        own: (v, ...) this rank's shard.
        shared, ranks: of `sum_of_copies`.
    """

    def __init__(
        self,
        group: "dist.ProcessGroup",
        rows: int,
        own: Tensor,
        *,
        shared: "Sequence[dist.ProcessGroup]" = (),
        ranks: int = 1,
    ) -> None:
        self.group, self.ranks, self.of_copies = group, group.size(), (shared, ranks)
        self.shape, self.dtype, self.device, self.width = own.shape, own.dtype, own.device, own.shape[1:].numel()
        self.rank_rows = -(-rows // self.ranks)  # of the first rank
        self.step = part_rows(self.rank_rows, self.ranks, self.width)
        self.result: Tensor | None = None  # this rank's rows of the gradient, once it is sent

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Offers the calls of this thread to send their gradient of the head."""
        _current.scatter, before = self, _current.scatter
        try:
            yield
        finally:
            _current.scatter = before

    def parts(self) -> list[slice]:
        """Returns the rows of each rank's shard that a part has. The last part is rounded up to whole tiles, past the
        last row of a shard."""
        last = -(-self.rank_rows // BLOCK_V) * BLOCK_V
        return [slice(start, min(start + self.step, last)) for start in range(0, last, self.step)]

    def pieces(self, part: slice, classes: int) -> list[slice]:
        """Returns which of the first `classes` rows of the head a part has of each rank's shard."""
        starts = range(0, self.ranks * self.rank_rows, self.rank_rows)
        stop = min(part.stop, self.rank_rows)
        ends = [(min(start + part.start, classes), min(start + stop, classes)) for start in starts]
        return [slice(first, last) for first, last in ends]

    def send_parts(self, write: Callable[[slice, Tensor], None], memory: Tensor | None = None) -> Tensor:
        """Sends the gradient, and returns this rank's rows of the sum.

        `write` is called for each of `parts`, in order, and writes it to (ranks, n, ...) float32. What it writes to
        rows past a rank's shard is dropped. `memory`: contiguous, for the buffers, if it is large enough.
        """
        self.result = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        sent: list[tuple[slice, Tensor, Any]] = []
        buffers = self._buffers(memory)
        for number, part in enumerate(self.parts()):
            if len(sent) == BUFFERS:
                self._receive(*sent.pop(0))
            size = (part.stop - part.start) * self.width
            shape = (part.stop - part.start, *self.shape[1:])
            buffer = buffers[number % BUFFERS]
            sums, own = buffer[: self.ranks * size], buffer[self.ranks * size :][:size]
            write(part, sums.view(self.ranks, *shape))
            work = vocab_shard.start_own_sum(own, sums, self.group.group_name)
            sent.append((part, own.view(shape), work))
        for one in sent:
            self._receive(*one)
        return self.result

    def send(self, gradient: Tensor) -> Tensor:
        """`send_parts` of a gradient that is complete, (V, ...)."""

        def write(part: slice, sums: Tensor) -> None:
            for piece, place in zip(self.pieces(part, len(gradient)), sums, strict=True):
                place[: piece.stop - piece.start] = gradient[piece]

        return self.send_parts(write)

    def _receive(self, part: slice, own: Tensor, work: Any) -> None:
        assert self.result is not None
        work.wait()
        place = self.result[part]
        sum_of_copies(own, *self.of_copies, place)

    def _buffers(self, memory: Tensor | None) -> Tensor:
        """Returns the buffers, each for a part and for this rank's rows of the sum, (BUFFERS, size) float32."""
        size = (self.ranks + 1) * self.step * self.width
        if memory is not None and memory.is_contiguous() and memory.nbytes >= 4 * BUFFERS * size:
            flat = memory.detach().view(-1)[: 4 * BUFFERS * size // memory.itemsize]
            return flat.view(torch.float32).view(BUFFERS, size)
        return torch.empty((BUFFERS, size), dtype=torch.float32, device=self.device)


def sum_of_copies(own: Tensor, shared: "Sequence[dist.ProcessGroup]", ranks: int, result: Tensor) -> Tensor:
    """Writes the sum of contiguous float32 tensors, which it may overwrite, divided by `ranks`, to `result`, which may
    lack their last rows.

    Args:
        shared: their ranks have copies of the same rows of the head.
        ranks: all ranks of a mean, as with FSDP2, or 1.
    """
    for group in shared:
        vocab_shard.all_sum(own, group.group_name)
    own = own[: len(result)]
    return result.copy_(own) if ranks == 1 else torch.div(own, ranks, out=result)


def part_rows(rank_rows: int, ranks: int, width: int) -> int:
    """Returns the rows of each rank's shard of `rank_rows` rows of `width` numbers that a part has: whole tiles, which
    fill whole waves."""
    blocks, tiles = -(-rank_rows // BLOCK_V), ranks * -(-width // D_BLOCK)
    waves = max(1, -(-blocks // PARTS) * tiles // PROGRAMS)
    return BLOCK_V * max(1, min(waves * PROGRAMS // tiles, blocks))
