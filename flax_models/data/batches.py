"""Windows of a token stream: sampled at random for training, evenly spaced for evaluation."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from flax_models.errors import RunError

IGNORED = -100  # target of positions that do not count in the loss: the default ignore_index of linear_cross_entropy


class Batch(NamedTuple):
    """Tokens, and the next token at each position as target: both (B, T) int32.

    `lengths` (B, M) int32 has the lengths of the sequences packed into each row, zeros after the last one. Attention
    does not cross sequences. The lengths of a row sum to T, because padding counts as a sequence. None: each row is
    one sequence.
    """

    tokens: np.ndarray
    targets: np.ndarray
    lengths: np.ndarray | None = None

    @property
    def counted(self) -> int:
        """Number of targets that are not IGNORED."""
        return int(np.count_nonzero(self.targets != IGNORED))


class Sampler(Protocol):
    """The interface of `BatchSampler` and `packing.PackedSampler`."""

    starts: np.ndarray  # location of the latest batch in the data
    tokens: int  # positions of the latest batch that are not padding

    def next(self) -> Batch:
        """Returns the next batch."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns the position in the order, as a JSON object."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a position that `state()` returned."""
        ...

    def close(self) -> None:
        """Stops the thread that prepares batches, if there is one."""
        ...


def _windows(stream: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    rows = stream[starts[:, None] + np.arange(length + 1)]  # (B, T + 1)
    return Batch(rows[:, :-1], rows[:, 1:])


class BatchSampler:
    """Samples windows of a token stream without replacement, and reshuffles after each pass.

    Each pass cuts the stream at another random offset. After `restore(state)` with the result of `state()`, the
    sampler returns the same batches again.

    Args:
        stream: (n,) int32 tokens.
        batch_size: windows per batch (B).
        length: tokens per window (T); one more token is read as the target of the last position.
        seed: random seed of the order.

    Attributes:
        starts: (B,) start of each window of the latest batch in the stream.
        tokens: tokens per batch.
        passes: number of completed passes through the stream.

    Raises:
        RunError: the stream is too short for one batch.

    Example:
        >>> sampler = BatchSampler(np.arange(1000, dtype=np.int32), batch_size=2, length=8, seed=0)
        >>> sampler.next().tokens.shape
        (2, 8)
    """

    def __init__(self, stream: np.ndarray, batch_size: int, length: int, seed: int) -> None:
        # The offset may cost one window, and the last target needs one more token.
        self._count = (len(stream) - 1) // length - 1
        if self._count < batch_size:
            needed = (batch_size + 1) * length + 1
            raise RunError(
                f"too little text to train on: got {len(stream):,} tokens, "
                f"a batch of {batch_size} x {length} needs {needed:,}; "
                f"reduce --max-seq-len or --batch-size"
            )
        self._stream, self._batch_size, self._length = stream, batch_size, length
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self.passes = 0
        self.tokens = batch_size * length
        self.starts = np.zeros(0, np.int64)
        self._shuffle()

    def _shuffle(self) -> None:
        self._before = self._generator.bit_generator.state  # to repeat this pass after `restore`
        offset = int(self._generator.integers(self._length))
        self._starts = offset + self._length * self._generator.permutation(self._count)
        self._cursor = 0

    def next(self) -> Batch:
        """Returns the next batch."""
        if self._cursor + self._batch_size > self._count:
            self.passes += 1
            self._shuffle()
        self.starts = self._starts[self._cursor : self._cursor + self._batch_size]
        self._cursor += self._batch_size
        return _windows(self._stream, self.starts, self._length)

    def state(self) -> dict[str, Any]:
        """Returns the position in the order, as a JSON object."""
        return {"generator": self._before, "cursor": self._cursor, "passes": self.passes}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a position that `state()` returned."""
        self._generator.bit_generator.state = state["generator"]
        self.passes = state["passes"]
        self._shuffle()
        self._cursor = state["cursor"]

    def close(self) -> None:
        """Does nothing: there is no prefetching thread."""


class DocumentIndex:
    """Finds the documents that windows of a stream come from.

    Args:
        stream: (n,) integer tokens.
        end: the token that ends each document.
        names: names of the documents, in the order of the stream.

    Example:
        >>> index = DocumentIndex(np.array([5, 6, 0, 7, 8, 9, 0]), end=0, names=["a.txt", "b.txt"])
        >>> index.describe(np.array([4]), length=2)
        'tokens 4 to 5 (b.txt, from its token 1)'
    """

    MOST = 4  # windows that are listed

    def __init__(self, stream: np.ndarray, end: int, names: Sequence[str]) -> None:
        self._starts = np.concatenate(([0], np.flatnonzero(stream == end) + 1))
        self._names = names

    def describe(self, starts: np.ndarray, length: int) -> str:
        """Describes the locations of windows.

        Args:
            starts: (B,) start of each window in the stream.
            length: tokens per window.
        """
        parts = []
        for start in starts[: self.MOST].tolist():
            document = int(np.searchsorted(self._starts, start, side="right")) - 1
            inside = start - int(self._starts[document])
            parts.append(
                f"tokens {start:,} to {start + length - 1:,} ({self._names[document]}, from its token {inside:,})"
            )
        if len(starts) > self.MOST:
            parts.append(f"and {len(starts) - self.MOST} more windows")
        return ", ".join(parts)


def held_out_windows(stream: np.ndarray, length: int, most: int) -> Batch:
    """Returns at most `most` windows of a stream, evenly spaced and without overlap.

    Args:
        stream: (n,) int32 tokens.
        length: tokens per window (T).
        most: maximum number of windows.

    Returns:
        One batch with all windows.

    Raises:
        RunError: the stream is shorter than one window.
    """
    count = (len(stream) - 1) // length
    if count < 1:
        raise RunError(
            f"too little text to hold out: got {len(stream):,} tokens, one window needs {length + 1:,}; "
            f"reduce --max-seq-len"
        )
    chosen = np.linspace(0, count - 1, min(most, count)).round().astype(np.int64)
    return _windows(stream, chosen * length, length)


def padded(batch: Batch, batch_size: int) -> list[Batch]:
    """Splits a batch into batches of one size; the last one is padded with rows whose targets are IGNORED."""
    missing = -len(batch.tokens) % batch_size
    width = batch.tokens.shape[1]
    tokens = np.concatenate((batch.tokens, np.zeros((missing, width), np.int32)))
    targets = np.concatenate((batch.targets, np.full((missing, width), IGNORED, np.int32)))
    lengths = batch.lengths
    if lengths is not None:
        padding = np.zeros((missing, lengths.shape[1]), np.int32)
        padding[:, 0] = width
        lengths = np.concatenate((lengths, padding))
    batches = []
    for i in range(0, len(tokens), batch_size):
        rows = slice(i, i + batch_size)
        batches.append(Batch(tokens[rows], targets[rows], None if lengths is None else lengths[rows]))
    return batches
