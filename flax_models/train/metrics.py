"""The metrics of a run: metrics.jsonl and TensorBoard event files.

Each step has a row `{"step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "flops_per_s", "seconds"}`, with
"mfu" if the device's peak is known. Each evaluation has a row `{"step", "held_out_loss"}`. Time is measured when
metrics are fetched, so rows that were fetched together have the same times and speeds (CLOCKED). Rows whose time is
excluded, such as the first step, have no speed. Values that are not finite are written as strings, because JSON has no
such numbers.
"""

import contextlib
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from flax_models.data.atomic_file import atomic_file
from flax_models.errors import RunError

Row = dict[str, Any]
CLOCKED = frozenset({"tokens_per_s", "flops_per_s", "mfu", "seconds"})  # all other fields repeat bit for bit


def read_rows(folder: Path) -> list[Row]:
    """Returns the rows of a run in order; an incomplete last line, left by a crash, is ignored.

    Raises:
        RunError: another line is not a valid row, and the message names it, or the file cannot be read.
    """
    path, rows = folder / "metrics.jsonl", []
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:  # not taken as absent: `MetricsLog` would write the file without its rows
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    for number, line in enumerate(lines[:-1], start=1):  # the part after the last "\n" is empty or incomplete
        try:
            row = json.loads(line)
            row["step"] += 0
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path}, line {number} is not a row of metrics: {error}") from None
        rows.append(row)
    return rows


class MetricsLog:
    """Appends rows to metrics.jsonl and to TensorBoard event files.

    Events are written synchronously. The thread of tensorboardX's `SummaryWriter` dies if the disk is full, and the
    writer then waits for it forever.

    Args:
        folder: folder of the run.
        after: step of the checkpoint that the run continues from; later rows are removed, because the run repeats these
            steps.

    Raises:
        RunError: the files cannot be written, or metrics.jsonl is invalid.
    """

    def __init__(self, folder: Path, after: int) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import scalar

        kept = [row for row in read_rows(folder) if row["step"] <= after]
        self._path = folder / "metrics.jsonl"
        self._event, self._scalar = Event, scalar
        try:
            with atomic_file(self._path) as part:
                part.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            self._file = self._path.open("a", encoding="utf-8")
            # With the process id, because two starts within one second would otherwise use the same file.
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            self._events = RecordWriter(str(folder / name))
            self._add_event(file_version="brain.Event:2")
            if after:  # makes TensorBoard drop the events of later steps
                self._add_event(step=after + 1, session_log=SessionLog(status=SessionLog.START))
        except OSError as error:
            raise self._cannot_write(error) from None

    def _add_event(self, **fields: Any) -> None:
        self._events.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def _cannot_write(self, error: OSError) -> RunError:
        return RunError(
            f"cannot write {self._path}: {error.strerror}; --resume continues from the last checkpoint, or from the "
            f"beginning if there is none"
        )

    def write(self, step: int, **values: float) -> None:
        """Appends one row; raises RunError if it cannot be written."""
        row = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps({"step": step, **row}) + "\n")
            for name, value in values.items():
                if name != "seconds":
                    self._add_event(step=step, summary=self._scalar(name, value))
        except OSError as error:
            raise self._cannot_write(error) from None

    def flush(self) -> None:
        """Makes the rows visible to readers of the files; raises RunError if they cannot be written."""
        try:
            self._file.flush()
            self._events.flush()
        except OSError as error:
            raise self._cannot_write(error) from None

    def close(self) -> None:
        """Closes the files; ignores write errors, which `flush` reports."""
        for file in (self._file, self._events):
            with contextlib.suppress(OSError):
                file.close()


class NoMetrics(MetricsLog):
    """Writes nothing: process 0 writes the metrics of all processes."""

    def __init__(self) -> None:
        pass

    def write(self, step: int, **values: float) -> None:
        """Does nothing."""

    def flush(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
