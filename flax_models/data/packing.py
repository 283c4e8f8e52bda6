"""Examples of different lengths, packed into rows of one length: best fit, without cutting or mixing any.

Each example goes into the row that it leaves the least room in, of BINS rows that are filled at the same time; what is
left of a row is padding. A row's examples do not see each other: `Batch.lengths` says where each ends, attention and
positions follow it. An example of n tokens takes n - 1 positions: its last token is a target alone.

Source: Ding et al., "Fewer truncations improve language modeling", 2024 (best-fit packing); the packing is grain's.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_models.data.batches import IGNORED, Batch
from flax_models.data.examples import Example
from flax_models.errors import RunError

BINS = 256  # rows filled at the same time: of lengths of mean T/4, 8 rows leave 5.6% padding, 64 2.0%, 256 1.3%
ROOM = 32  # most examples in a row of packed ones: `room_for`
PREFETCHED = 64  # rows made ahead, by a thread
SAMPLED = 4096  # examples that are packed to find a room
SLACK = 0.01  # of padding that a smaller room may cost
NAMED = 4  # examples of a batch that are named one by one


class _Rows:
    """The examples as grain reads them: tokens, targets and the example's number at each position."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        _, tokens, counted = self._examples[index]
        targets = np.where(counted[1:], tokens[1:], IGNORED)
        return {"tokens": tokens[:-1], "targets": targets, "example": np.full(len(targets), index, np.int32)}


def _packed(examples: Sequence[Example], length: int, *, bins: int, room: int, seed: int | None) -> Any:
    """Returns grain's dataset of packed rows, each example once; the order is kept without a seed."""
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
    """Returns (B, room + 1) lengths of rows whose positions are numbered (B, T) from 1, padding 0."""
    counts = np.stack([np.bincount(row, minlength=room + 1) for row in segments])
    lengths = np.zeros((len(segments), room + 1), np.int32)
    for row, (padding, *others) in zip(lengths, counts, strict=True):
        there = [count for count in (*others, padding) if count]
        row[: len(there)] = there
    return lengths


def room_for(lengths: np.ndarray, length: int) -> int:
    """Returns the most examples that a packed row of `length` positions should have, for examples of these lengths.

    What cuDNN's attention takes in its backward pass grows with it (18 GB for 32 in 8 rows of 4,096, 32 heads). Twice
    as many as fill a row on average leave no more padding than ROOM does (1.2%, of a mean of 0.24 of the row), unless
    most examples are much shorter than the mean: then it is more, until that costs less than SLACK.
    """
    room = min(ROOM, 2 * math.ceil(length / float(np.mean(lengths))))
    if len(lengths) > SAMPLED:
        lengths = np.random.default_rng(0).choice(lengths, SAMPLED, replace=False)
    most = len(best_fit(lengths, length, ROOM)) / (1 - SLACK)
    while room < ROOM and len(best_fit(lengths, length, room)) > most:
        room = min(ROOM, room + room // 2)
    return room


def best_fit(lengths: np.ndarray, length: int, room: int) -> np.ndarray:
    """Returns (rows, room) lengths of the examples in each packed row, zeros after the last, if all rows are open until
    the end; `_packed` closes the fullest of more than BINS."""
    packed, count, free = (np.zeros((len(lengths), *shape), np.int64) for shape in ((room,), (), ()))
    free[:] = length
    for one in lengths:
        fits = (free >= one) & (count < room)  # an empty row always does
        at = int(np.argmin(np.where(fits, free, length + 1)))
        packed[at, count[at]] = one
        count[at] += 1
        free[at] -= one
    return packed[count > 0]


def _room(room: int, length: int) -> int:
    """Returns how many examples a row may have: no more than two positions each leave."""
    return min(room, max(length // 2, 1))


def _check(examples: Sequence[Example], length: int) -> None:
    for name, tokens, counted in examples:
        if not 2 <= len(tokens) <= length + 1:
            raise ValueError(f"examples must have 2 to {length + 1} tokens (length + 1), got {len(tokens)} in {name}")
        if len(counted) != len(tokens):
            raise ValueError(f"counted must have {len(tokens)} entries (tokens'), got {len(counted)} in {name}")


class PackedSampler:
    """Draws batches of packed examples: every example once in each pass, packed anew and in another order each time.

    `state()` after any batch, given to `restore`, makes the following batches come out the same; it is plain JSON.
    Rows are made ahead by a thread: `close` ends it.

    Args:
        examples: of 2 to `length` + 1 tokens each.
        batch_size: rows a batch (B).
        length: tokens a row (T).
        seed: of the order.
        room: most examples in a row; 1 packs nothing, and pads each example by itself.

    Attributes:
        starts: numbers of the examples in the latest batch.
        tokens: positions of the latest batch that are not padding.
        passes: through all examples, finished ones.

    Raises:
        RunError: there is no example.
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
        # No more than one pass fills, or the last rows of a pass would be left half empty.
        self._bins = (
            min(BINS, max(sum(len(example.tokens) - 1 for example in examples) // length, 1)) if room > 1 else 1
        )
        self.starts = np.zeros(0, np.int64)
        self.tokens = self.passes = 0
        self._rows = self._begin()

    @property
    def columns(self) -> int:
        """M, the columns of each batch's `lengths`."""
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
        numbers = np.concatenate([row["example"] for row in rows])
        there = numbers[numbers >= 0]
        self.starts, self.tokens = np.unique(there), len(there)
        return _batch_of(rows, self._room)

    def state(self) -> dict[str, Any]:
        """Returns the place in the order, as plain JSON."""
        return {"passes": self.passes, "rows": self._rows.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to the place that `state()` gave."""
        self.close()
        self.passes = state["passes"]
        self._rows = self._begin()
        self._rows.set_state(state["rows"])

    def close(self) -> None:
        """Ends the thread that makes rows ahead."""
        self._rows.close()


def pack_rows(examples: Sequence[Example], length: int, most: int, *, room: int = ROOM) -> Batch:
    """Returns packed rows of examples, each once, in an order that does not change.

    Args:
        examples: of 2 to `length` + 1 tokens each, at least one.
        length: T.
        most: rows; more are left out.
        room: as `PackedSampler` has it.

    Raises:
        RunError: there is no example.
        ValueError: an example is too short or too long.
    """
    if not examples:
        raise RunError("no example to be judged by: too few were held out")
    _check(examples, length)
    room = _room(room, length)
    return _batch_of(list(itertools.islice(_packed(examples, length, bins=most, room=room, seed=None), most)), room)


def describe_examples(examples: Sequence[Example], numbers: np.ndarray) -> str:
    """Returns which examples a batch has in words, of their `PackedSampler.starts`."""
    named = [examples[number].name for number in numbers[:NAMED].tolist()]
    more = [f"and {len(numbers) - NAMED} more"] if len(numbers) > NAMED else []
    return ", ".join(named + more)
