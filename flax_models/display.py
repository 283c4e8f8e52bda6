"""Output of a run: a progress bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LABEL_WIDTH = 11
SECONDS_BETWEEN_LINES = 5.0  # between progress lines when there is no bar; keeps the log of a two-minute run short


class Display:
    """Prints the facts, progress and messages of one run.

    Args:
        console: the console to print to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._last_line = -SECONDS_BETWEEN_LINES

    def line(self, text: str = "") -> None:
        """Prints one line, above the progress bar if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def fact(self, label: str, text: str) -> None:
        """Prints a labelled line."""
        self.line(f"{label:<{LABEL_WIDTH}}{text}")

    @contextmanager
    def counting(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Shows the progress of work done before the first step, inside a `with` statement.

        Args:
            label: what is counted.
            total: the number of items.

        Yields:
            A function to call with the number of items done so far.
        """
        if self._console.is_terminal:
            columns = TextColumn(label), MofNCompleteColumn(), BarColumn(bar_width=None), TimeRemainingColumn()
            with Progress(*columns, console=self._console, expand=True, transient=True) as bar:
                task = bar.add_task("", total=total)
                yield lambda done: bar.update(task, completed=done)
            return
        last = time.monotonic()  # work shorter than SECONDS_BETWEEN_LINES prints nothing

        def update(done: int) -> None:
            nonlocal last
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                self.line(f"{label} {done:>6,}/{total:,}")

        yield update

    def start(self, done: int, steps: int) -> Self:
        """Prepares the progress bar; use the result in a `with` statement.

        Args:
            done: steps already done.
            steps: total number of steps.
        """
        self._steps = steps
        self.start_clock(done)
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
                expand=True,
            )
            self._task = self._bar.add_task("", total=steps, completed=done, numbers="")
        return self

    def start_clock(self, step: int) -> None:
        """Starts the clock for the estimate of the remaining time; `step` is the number of steps done."""
        self._first, self._began = step, time.monotonic()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def progress(self, step: int, numbers: str) -> None:
        """Shows the current step and the metrics of the latest steps."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
            return
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES or step == self._steps:
            self._last_line = now
            left = (now - self._began) / max(step - self._first, 1) * (self._steps - step)
            self.line(f"step {step:>6,}/{self._steps:,}  {numbers}  {duration(left)} left")


def duration(seconds: float) -> str:
    """Formats seconds as m:ss, or as h:mm:ss from one hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
