"""Reports how many rows left the range that the scaled exponentials were placed in: `range_report`.

A call does not know these numbers, because they stay on the device. The report keeps the tensors that hold them, and
reads them when it is asked.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


class RangeReport:
    """What `range_report` found so far. Reading a number waits for the device."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []  # (chunks, row blocks) int32 of each call
        self._shifts: list[Tensor] = []  # (N,) float32 of each call of float16 with gradients
        self._counts: list[Tensor] = []  # () int32 of each of these, how many rows contribute

    def add(self, flag: Tensor, shift: Tensor | None, count: Tensor) -> None:
        """Adds a call."""
        self._flags.append(flag)
        if shift is not None:
            self._shifts.append(shift)
            self._counts.append(count)

    def add_all(self, other: "RangeReport") -> None:
        """Adds the calls of another report."""
        self._flags += other._flags
        self._shifts += other._shifts
        self._counts += other._counts

    @property
    def blocks(self) -> int:
        """How many blocks of rows the calls had."""
        return sum(flag.numel() for flag in self._flags)

    @property
    def repaired_blocks(self) -> int:
        """How many of them had a row whose logits were computed twice more, because they are far above the row's
        reference."""
        return sum(int(flag.sum()) for flag in self._flags)

    @property
    def rows(self) -> int:
        """How many rows of float16 contributed to a gradient."""
        return sum(map(int, self._counts))

    @property
    def shifted_rows(self) -> int:
        """How many of them had exponentials that were stored divided by a power of two, and were read and written once
        more: MATH.md (49)."""
        pairs = zip(self._shifts, self._counts, strict=True)
        return sum(int((shift[: int(count)] > 0).sum()) for shift, count in pairs)

    def __str__(self) -> str:
        shifted = f", {self.shifted_rows} of {self.rows} rows shifted" if self._shifts else ""
        return f"{self.repaired_blocks} of {self.blocks} row blocks repaired{shifted}"


_current: RangeReport | None = None  # not for each thread: autograd runs backward passes in threads of its own


def current() -> RangeReport | None:
    """Returns the report that is being made."""
    return _current


@contextmanager
def range_report() -> Iterator[RangeReport]:
    """Counts the rows whose scaled exponentials left their range, in the calls of a `with` block.

    The kernels of 16-bit inputs store the exponentials of each row relative to a reference, which they estimate. Rows
    far from it take more time, and results are the same. The share of such rows is a property of the data, so it tells
    whether the time of a call was typical. A call in the block is not replayed (`replay.py`), so it takes more host
    time, but it does not wait for the device. Calls with another plan ("recompute", "chunked") add nothing. With
    reduction "none" and for log-probabilities, a block is counted in the forward pass and again in the backward pass,
    if both store or sum scaled exponentials. Calls in a nested block are counted in both reports.

    Example:
        >>> import torch
        >>> from core_triton import linear_cross_entropy, range_report
        >>> x, w, target = torch.randn(8, 16), torch.randn(50, 16), torch.arange(8)
        >>> with range_report() as report:
        ...     loss = linear_cross_entropy(x, w, target)
        >>> print(report)
        0 of 0 row blocks repaired
    """
    global _current
    before, report = _current, RangeReport()
    _current = report
    try:
        yield report
    finally:
        _current = before
        if before is not None:
            before.add_all(report)
