"""Ctrl-C and SIGTERM: the first signal stops the loop after the current step, the second kills the process."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides the cursor; a second signal would leave it hidden


class StopRequest:
    """Records the first of SIGNALS that is received inside a `with` statement.

    After the first signal, both signals have the default action of the operating system, which kills the process even
    while it waits in a library. Outside the main thread, where Python allows no signal handlers, nothing is recorded.

    Example:
        >>> with StopRequest() as stop:
        ...     stop.signal is None
        True
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        # os.write instead of print: the signal may interrupt a print, whose buffer must not be changed.
        if sys.stdout.isatty():
            os.write(1, SHOW_CURSOR)
        os.write(2, f"{self.signal.name}: stopping after this step; repeat it to stop without saving\n".encode())
