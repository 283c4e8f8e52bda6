"""Best-fit packing: packs examples of different lengths into rows of one length, without splitting an example.

Each example goes into the row, of BINS rows that are filled at the same time, in which it leaves the least room. The
rest of a row is padding. Attention and positions use `Batch.lengths`, so the examples of a row do not attend to each
other. An example of n tokens takes n - 1 positions: its last token is only a target.

Source: Ding et al., "Fewer truncations improve language modeling", 2024 (best-fit packing); implemented by grain.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_models.data.batches import IGNORED, Batch
from flax_models.data.examples import Example
from flax_models.errors import RunError

BINS = 256  # rows filled at the same time; for lengths of mean T/4, 8 rows leave 5.6% padding, 64 2.0%, 256 1.3%
ROOM = 32  # maximum number of examples in a packed row; see `room_for`
PREFETCHED = 64  # rows that a thread prepares in advance
SAMPLED = 4096  # number of examples that `room_for` packs
SLACK = 0.01  # additional padding that a smaller room may cost
NAMED = 4  # number of examples of a batch that `describe_examples` lists


class _Rows:
    """The examples as a data source for grain: tokens, targets and the index of the example at each position."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        _, tokens, counted = self._examples[index]
        targets = np.where(counted[1:], tokens[1:], IGNORED)
        return {"tokens": tokens[:-1], "targets": targets, "example": np.full(len(targets), index, np.int32)}


def _packed(examples: Sequence[Example], length: int, *, bins: int, room: int, seed: int | None) -> Any:
    """Returns grain's dataset of packed rows with each example once; without a seed, the examples are not shuffled."""
    import grain

    dataset = grain.MapDataset.source(_Rows(examples))
    if seed is not None:
        dataset = dataset.shuffle(seed)
    return grain.experimental.BestFitPackIterDataset(
        dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct=dict.fromkeys(("tokens", "targets", "example"), length),
        num_packing_bins=bins,
        seed=seed or 0,
        shuffle_bins=seed is not None,
        padding_struct={"tokens": 0, "targets": IGNORED, "example": -1},
        max_sequences_per_bin=room,
    )


def _batch_of(rows: Sequence[dict[str, np.ndarray]], room: int) -> Batch:
    tokens, targets, segments = (
        np.stack([row[name] for row in rows]) for name in ("tokens", "targets", "tokens_segment_ids")
    )
    return Batch(tokens, targets, _lengths(segments, room))


def _lengths(segments: np.ndarray, room: int) -> np.ndarray:
    """Returns the lengths (B, room + 1) of the sequences in rows with segment ids (B, T), which are 0 for padding."""
    counts = np.stack([np.bincount(row, minlength=room + 1) for row in segments])
    lengths = np.zeros((len(segments), room + 1), np.int32)
    for row, (padding, *others) in zip(lengths, counts, strict=True):
        nonzero = [count for count in (*others, padding) if count]
        row[: len(nonzero)] = nonzero
    return lengths


def room_for(lengths: np.ndarray, length: int) -> int:
    """Returns the maximum number of examples per packed row of `length` positions, for examples of these lengths.

    The workspace of cuDNN attention in the backward pass grows with this number (18 GB for 32 examples in 8 rows of
    4,096 positions, with 32 heads). Twice the number of examples that fill a row on average leaves no more padding than
    ROOM (1.2%, for a mean of 0.24 of the row), unless most examples are much shorter than the mean. In that case, the
    number is increased until the additional padding is below SLACK.
    """
    room = min(ROOM, 2 * math.ceil(length / float(np.mean(lengths))))
    if len(lengths) > SAMPLED:
        lengths = np.random.default_rng(0).choice(lengths, SAMPLED, replace=False)
    most = len(best_fit(lengths, length, ROOM)) / (1 - SLACK)
    while room < ROOM and len(best_fit(lengths, length, room)) > most:
        room = min(ROOM, room + room // 2)
    return room


def best_fit(lengths: np.ndarray, length: int, room: int) -> np.ndarray:
    """Returns the lengths (rows, room) of the examples in each packed row, zeros after the last one.

    All rows stay open until the end, unlike in `_packed`, which closes the fullest row when BINS rows are open.
    """
    packed, count, free = (np.zeros((len(lengths), *shape), np.int64) for shape in ((room,), (), ()))
    free[:] = length
    for one in lengths:
        fits = (free >= one) & (count < room)  # always true for an empty row
        row = int(np.argmin(np.where(fits, free, length + 1)))
        packed[row, count[row]] = one
        count[row] += 1
        free[row] -= one
    return packed[count > 0]


def _room(room: int, length: int) -> int:
    """Returns the maximum number of examples in a row, limited so that each has at least two positions."""
    return min(room, max(length // 2, 1))


def _check(examples: Sequence[Example], length: int) -> None:
    for name, tokens, counted in examples:
        if not 2 <= len(tokens) <= length + 1:
            raise ValueError(f"examples must have 2 to {length + 1} tokens (length + 1), got {len(tokens)} in {name}")
        if len(counted) != len(tokens):
            raise ValueError(f"counted must have {len(tokens)} entries, as tokens, got {len(counted)} in {name}")


class PackedSampler:
    """Samples batches of packed examples: each pass has every example once, shuffled and packed differently.

    After `restore(state)` with the result of `state()`, the sampler returns the same batches again. A thread prepares
    rows in advance; `close` stops it.

    Args:
        examples: examples of 2 to `length` + 1 tokens.
        batch_size: rows per batch (B).
        length: tokens per row (T).
        seed: random seed of the order.
        room: maximum number of examples in a row; 1: no packing, each example has one padded row.

    Attributes:
        starts: indices of the examples in the latest batch.
        tokens: positions of the latest batch that are not padding.
        passes: number of completed passes through all examples.

    Raises:
        RunError: there are no examples.
        ValueError: an example is too short or too long.

    Example:
        >>> examples = [Example(str(n), np.arange(n, dtype=np.int32), np.ones(n, bool)) for n in (4, 6, 3, 5)]
        >>> sampler = PackedSampler(examples, batch_size=1, length=8, seed=0)
        >>> sampler.next().lengths.sum(), sampler.close()
        (np.int32(8), None)
    """

    def __init__(
        self, examples: Sequence[Example], batch_size: int, length: int, seed: int, *, room: int = ROOM
    ) -> None:
        if not examples:
            raise RunError("no example to train on")
        _check(examples, length)
        self._examples, self._batch_size, self._length, self._seed = examples, batch_size, length, seed
        self._room = _room(room, length)
        # At most the number of rows that one pass fills. With more, the last rows of a pass would be half empty.
        self._bins = (
            min(BINS, max(sum(len(example.tokens) - 1 for example in examples) // length, 1)) if room > 1 else 1
        )
        self.starts = np.zeros(0, np.int64)
        self.tokens = self.passes = 0
        self._rows = self._begin()

    @property
    def columns(self) -> int:
        """M, the number of columns of `lengths` in each batch."""
        return self._room + 1

    def _begin(self) -> Any:
        """Returns an iterator over the rows of a pass."""
        import grain

        seed = int(np.random.SeedSequence([self._seed, self.passes]).generate_state(1)[0])
        rows = _packed(self._examples, self._length, bins=self._bins, room=self._room, seed=seed)
        return iter(grain.experimental.ThreadPrefetchIterDataset(rows, prefetch_buffer_size=PREFETCHED))

    def next(self) -> Batch:
        """Returns the next batch."""
        rows: list[dict[str, np.ndarray]] = []
        while len(rows) < self._batch_size:
            try:
                rows.append(next(self._rows))
            except StopIteration:
                self.close()
                self.passes += 1
                self._rows = self._begin()
        indices = np.concatenate([row["example"] for row in rows])
        indices = indices[indices >= 0]
        self.starts, self.tokens = np.unique(indices), len(indices)
        return _batch_of(rows, self._room)

    def state(self) -> dict[str, Any]:
        """Returns the position in the order, as a JSON object."""
        return {"passes": self.passes, "rows": self._rows.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a position that `state()` returned."""
        self.close()
        self.passes = state["passes"]
        self._rows = self._begin()
        self._rows.set_state(state["rows"])

    def close(self) -> None:
        """Stops the thread that prepares rows."""
        self._rows.close()


def pack_rows(examples: Sequence[Example], length: int, most: int, *, room: int = ROOM) -> Batch:
    """Packs each example once, in a deterministic order.

    Args:
        examples: at least one example, each of 2 to `length` + 1 tokens.
        length: tokens per row (T).
        most: maximum number of rows; further rows are dropped.
        room: as in `PackedSampler`.

    Raises:
        RunError: there are no examples.
        ValueError: an example is too short or too long.
    """
    if not examples:
        raise RunError("no held-out example for evaluation")
    _check(examples, length)
    room = _room(room, length)
    return _batch_of(list(itertools.islice(_packed(examples, length, bins=most, room=room, seed=None), most)), room)


def describe_examples(examples: Sequence[Example], indices: np.ndarray) -> str:
    """Lists the names of a batch's examples; `indices` is `PackedSampler.starts`."""
    named = [examples[index].name for index in indices[:NAMED].tolist()]
    more = [f"and {len(indices) - NAMED} more"] if len(indices) > NAMED else []
    return ", ".join(named + more)
