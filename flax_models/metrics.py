"""The numbers of a run, written as they come: metrics.jsonl for programs, TensorBoard events for eyes.

A train row is `{"step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "seconds"}`, one for every step; a
held-out row is `{"step", "held_out_loss"}`. Rows of the same block of steps share `tokens_per_s` and `seconds`, for
time is read where the numbers are fetched. Numbers that are not finite are written as strings, since JSON has none.
"""

import json
import math
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(folder: Path) -> list[Row]:
    """Returns the rows of a run, in order; a last line cut off by a crash is left out."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last line's end is empty or cut off


class MetricsLog:
    """Appends rows to metrics.jsonl and to TensorBoard's events.

    Args:
        folder: of the run.
        after: step of the checkpoint that the run continues from; later rows are dropped, for they come again.
    """

    def __init__(self, folder: Path, after: int) -> None:
        from tensorboardX import SummaryWriter

        kept = [row for row in read_rows(folder) if row["step"] <= after]
        path = folder / "metrics.jsonl"
        part = path.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        part.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder), purge_step=after + 1 if after else None)

    def write(self, step: int, **values: float) -> None:
        """Appends one row."""
        row = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        for name, value in values.items():
            if name != "seconds":
                self._events.add_scalar(name, value, step)

    def flush(self) -> None:
        """Makes the rows visible to readers of the files."""
        self._file.flush()
        self._events.flush()

    def close(self) -> None:
        """Writes what is left and closes the files."""
        self._file.close()
        self._events.close()
