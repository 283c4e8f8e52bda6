"""The numbers of a run, written as they come: metrics.jsonl for programs, TensorBoard events for eyes.

A train row is `{"step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "flops_per_s", "seconds"}`, one for every
step, with "mfu" where the device's peak is known; a held-out row is `{"step", "held_out_loss"}`. Rows of the same block
of steps share what the clock says (CLOCKED), for time is read where the numbers are fetched; a block of the first step
alone, whose time is left out, has no speed. Numbers that are not finite are written as strings, since JSON has none.
"""

import contextlib
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from flax_models.errors import RunError

Row = dict[str, Any]
CLOCKED = frozenset({"tokens_per_s", "flops_per_s", "mfu", "seconds"})  # all else repeats bit for bit


def read_rows(folder: Path) -> list[Row]:
    """Returns the rows of a run, in order; a last line cut off by a crash is left out.

    Raises:
        RunError: another line is no row; names it.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line's end is empty or cut off
        try:
            row = json.loads(line)
            row["step"] += 0
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path}, line {number} is no row of metrics: {error}") from None
        rows.append(row)
    return rows


class MetricsLog:
    """Appends rows to metrics.jsonl and to TensorBoard's events.

    Events are written where they arise: tensorboardX's `SummaryWriter` has a thread that dies of a full disk, and
    waits for it for ever.

    Args:
        folder: of the run.
        after: step of the checkpoint that the run continues from; later rows are dropped, for they come again.

    Raises:
        RunError: the files cannot be written, or metrics.jsonl holds something else.
    """

    def __init__(self, folder: Path, after: int) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import scalar

        kept = [row for row in read_rows(folder) if row["step"] <= after]
        self._path = folder / "metrics.jsonl"
        part = self._path.with_suffix(".part")
        self._event, self._scalar = Event, scalar
        try:
            part.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            part.replace(self._path)
            self._file = self._path.open("a", encoding="utf-8")
            # The process in the name: two starts within one second would write one file.
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            self._events = RecordWriter(str(folder / name))
            self._add_event(file_version="brain.Event:2")
            if after:  # TensorBoard then forgets what it has read of later steps
                self._add_event(step=after + 1, session_log=SessionLog(status=SessionLog.START))
        except OSError as error:
            raise self._cannot_write(error) from None

    def _add_event(self, **fields: Any) -> None:
        self._events.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def _cannot_write(self, error: OSError) -> RunError:
        return RunError(
            f"cannot write {self._path}: {error.strerror}; --resume continues from the last checkpoint, "
            f"without one from the beginning"
        )

    def write(self, step: int, **values: float) -> None:
        """Appends one row; raises RunError if the disk takes no more."""
        row = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps({"step": step, **row}) + "\n")
            for name, value in values.items():
                if name != "seconds":
                    self._add_event(step=step, summary=self._scalar(name, value))
        except OSError as error:
            raise self._cannot_write(error) from None

    def flush(self) -> None:
        """Makes the rows visible to readers of the files; raises RunError if the disk takes no more."""
        try:
            self._file.flush()
            self._events.flush()
        except OSError as error:
            raise self._cannot_write(error) from None

    def close(self) -> None:
        """Writes what is left and closes the files; what a full disk did not take was told by `flush`."""
        for file in (self._file, self._events):
            with contextlib.suppress(OSError):
                file.close()
