"""Ctrl-C and SIGTERM: the first asks the loop to stop after its step, the second ends the process at once."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it, and a second signal leaves no time to show it


class StopRequest:
    """Notes the first of SIGNALS that comes within a `with` statement, and leaves later ones to the system.

    After the first, both signals have the system's own handling, which ends the process even while it waits inside
    a library. Outside the main thread, where Python takes no handlers, nothing is noted.

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
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        # os.write: a handler may run in the middle of a print, whose buffer it must not touch.
        if sys.stdout.isatty():
            os.write(1, SHOW_CURSOR)
        os.write(2, f"{self.signal.name}: saving after this step; a second one ends at once\n".encode())
