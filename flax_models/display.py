"""What a person sees while a run goes: a progress bar on a terminal, plain lines anywhere else."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LABEL_WIDTH = 11
SECONDS_BETWEEN_LINES = 5.0  # of progress where there is no bar: a log of a two-minute run stays readable


class Display:
    """Prints facts, progress and messages of one run.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._last_line = -SECONDS_BETWEEN_LINES

    def say(self, text: str = "") -> None:
        """Prints one line, above the bar if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def fact(self, label: str, text: str) -> None:
        """Prints a labelled line."""
        self.say(f"{label:<{LABEL_WIDTH}}{text}")

    @contextmanager
    def counting(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Shows how much of some work before the first step is done, for as long as the `with` statement lasts.

        Args:
            label: of what is counted.
            total: how many there are.

        Yields:
            A function to call with the number that is done.
        """
        if self._console.is_terminal:
            columns = TextColumn(label), MofNCompleteColumn(), BarColumn(bar_width=None), TimeRemainingColumn()
            with Progress(*columns, console=self._console, expand=True, transient=True) as bar:
                task = bar.add_task("", total=total)
                yield lambda done: bar.update(task, completed=done)
            return
        last = time.monotonic()  # nothing is said of what takes less than the time between lines

        def say(done: int) -> None:
            nonlocal last
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                self.say(f"{label} {done:>6,}/{total:,}")

        yield say

    def start(self, done: int, steps: int) -> Self:
        """Readies the bar for steps of which some are done; use the result in a `with` statement."""
        self._steps = steps
        self.compiled(done)
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

    def compiled(self, step: int) -> None:
        """Takes this moment, after this step, as the one from which the time left is reckoned."""
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
        """Shows how far the run is, and the numbers of its latest steps."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
            return
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES or step == self._steps:
            self._last_line = now
            left = (now - self._began) / max(step - self._first, 1) * (self._steps - step)
            self.say(f"step {step:>6,}/{self._steps:,}  {numbers}  {duration(left)} left")


def duration(seconds: float) -> str:
    """Returns seconds as m:ss, or h:mm:ss past an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
