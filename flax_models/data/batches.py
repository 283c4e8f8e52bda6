"""Windows of a token stream: drawn at random to train on, evenly spaced to be judged by."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from flax_models.errors import RunError

IGNORED = -100  # target of positions that stand for nothing: linear_cross_entropy's own default


class Batch(NamedTuple):
    """Tokens and, at each position, the token that follows: both (B, T) int32.

    `lengths` (B, M) int32 are those of the sequences that lie one after another in a row and do not see each other,
    zeros after the last; a row's sum to T, for padding is a sequence too. None: each row is one sequence.
    """

    tokens: np.ndarray
    targets: np.ndarray
    lengths: np.ndarray | None = None

    @property
    def counted(self) -> int:
        """Targets that are not IGNORED."""
        return int(np.count_nonzero(self.targets != IGNORED))


class Sampler(Protocol):
    """What batches come from: `BatchSampler` below and `packing.PackedSampler`."""

    starts: np.ndarray  # where the latest batch came from
    tokens: int  # positions of the latest batch that are not padding

    def next(self) -> Batch:
        """Returns the next batch."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns the place in the order, as plain JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to the place that `state()` gave."""
        ...

    def close(self) -> None:
        """Ends what makes batches ahead."""
        ...


def _windows(stream: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    rows = stream[starts[:, None] + np.arange(length + 1)]  # (B, T + 1)
    return Batch(rows[:, :-1], rows[:, 1:])


class BatchSampler:
    """Draws windows without replacement until the stream is used up, then shuffles it anew.

    Each pass cuts the stream at another random offset. `state()` after any batch, given to `restore`, makes the
    following batches come out the same; it is plain JSON.

    Args:
        stream: (n,) int32 tokens.
        batch_size: windows a batch.
        length: tokens a window (T); one more is read, since the last position has a target too.
        seed: of the order.

    Attributes:
        starts: (B,) where in the stream the windows of the latest batch begin.
        tokens: of a batch.
        passes: through the whole stream, finished ones.

    Raises:
        RunError: the stream is too short for one batch.

    Example:
        >>> sampler = BatchSampler(np.arange(1000, dtype=np.int32), batch_size=2, length=8, seed=0)
        >>> sampler.next().tokens.shape
        (2, 8)
    """

    def __init__(self, stream: np.ndarray, batch_size: int, length: int, seed: int) -> None:
        # An offset may cost one window, and targets reach one token further.
        self._count = (len(stream) - 1) // length - 1
        if self._count < batch_size:
            needed = (batch_size + 1) * length + 1
            raise RunError(
                f"too little text to train on: {len(stream):,} tokens, "
                f"and a batch of {batch_size} x {length} needs {needed:,}; "
                f"a smaller --max-seq-len or --batch-size needs less"
            )
        self._stream, self._batch_size, self._length = stream, batch_size, length
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self.passes = 0
        self.tokens = batch_size * length
        self.starts = np.zeros(0, np.int64)
        self._shuffle()

    def _shuffle(self) -> None:
        self._before = self._generator.bit_generator.state  # enough to draw this pass again
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
        """Returns the place in the order, as plain JSON."""
        return {"generator": self._before, "cursor": self._cursor, "passes": self.passes}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to the place that `state()` gave."""
        self._generator.bit_generator.state = state["generator"]
        self.passes = state["passes"]
        self._shuffle()
        self._cursor = state["cursor"]

    def close(self) -> None:
        """Does nothing: batches are made when they are asked for."""


class Places:
    """Says in which document of a stream a position lies.

    Args:
        stream: (n,) integer tokens.
        end: the token that ends each document.
        names: of the documents, in the stream's order.

    Example:
        >>> places = Places(np.array([5, 6, 0, 7, 8, 9, 0]), end=0, names=["a.txt", "b.txt"])
        >>> places.describe(np.array([4]), length=2)
        'tokens 4 to 5 (b.txt, from its token 1)'
    """

    MOST = 4  # windows that are named one by one

    def __init__(self, stream: np.ndarray, end: int, names: Sequence[str]) -> None:
        self._starts = np.concatenate(([0], np.flatnonzero(stream == end) + 1))
        self._names = names

    def describe(self, starts: np.ndarray, length: int) -> str:
        """Returns the places of windows in words: (B,) where they begin, and the tokens of each."""
        words = []
        for start in starts[: self.MOST].tolist():
            document = int(np.searchsorted(self._starts, start, side="right")) - 1
            inside = start - int(self._starts[document])
            words.append(
                f"tokens {start:,} to {start + length - 1:,} ({self._names[document]}, from its token {inside:,})"
            )
        if len(starts) > self.MOST:
            words.append(f"and {len(starts) - self.MOST} windows more")
        return ", ".join(words)


def held_out_windows(stream: np.ndarray, length: int, most: int) -> Batch:
    """Returns at most `most` windows (T = `length`) of a stream, evenly spaced and without overlap.

    Args:
        stream: (n,) int32 tokens.
        length: tokens a window.
        most: most windows.

    Returns:
        A batch of all of them.

    Raises:
        RunError: the stream is shorter than one window.
    """
    count = (len(stream) - 1) // length
    if count < 1:
        raise RunError(
            f"too little text to hold out: {len(stream):,} tokens, and one window needs {length + 1:,}; "
            f"a smaller --max-seq-len needs less"
        )
    chosen = np.linspace(0, count - 1, min(most, count)).round().astype(np.int64)
    return _windows(stream, chosen * length, length)


def padded(batch: Batch, batch_size: int) -> list[Batch]:
    """Cuts a batch into batches of one size, the last filled up with rows whose targets are IGNORED."""
    missing = -len(batch.tokens) % batch_size
    width = batch.tokens.shape[1]
    tokens = np.concatenate((batch.tokens, np.zeros((missing, width), np.int32)))
    targets = np.concatenate((batch.targets, np.full((missing, width), IGNORED, np.int32)))
    lengths = batch.lengths
    if lengths is not None:
        filling = np.zeros((missing, lengths.shape[1]), np.int32)
        filling[:, 0] = width
        lengths = np.concatenate((lengths, filling))
    batches = []
    for i in range(0, len(tokens), batch_size):
        rows = slice(i, i + batch_size)
        batches.append(Batch(tokens[rows], targets[rows], None if lengths is None else lengths[rows]))
    return batches
