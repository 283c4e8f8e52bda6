"""Ctrl-C and SIGTERM: the first signal stops the loop after the current step, the second kills the process.

If a run has several processes and one of them receives a signal, all stop after the same step. JAX's coordination
service handles SIGTERM for them, and Ctrl-C becomes SIGTERM.
"""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides the cursor; a second signal would leave it hidden


class StopRequest:
    """Records the first of SIGNALS that is received inside a `with` statement.

    After the first signal, both signals have the default action of the operating system, which kills the process even
    while it waits in a library. Outside the main thread, where Python allows no signal handlers, nothing is recorded.
    With several processes, `signal` is set by `after` only.

    Example:
        >>> with StopRequest() as stop:
        ...     stop.signal is None
        True
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if jax.process_count() > 1:
            handler = signal.getsignal(signal.SIGTERM)  # of Python, which is restored; until then JAX has another
            self._before = {signal.SIGINT: signal.signal(signal.SIGINT, self._forward), signal.SIGTERM: handler}
        elif threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def after(self, step: int) -> signal.Signals | None:
        """Returns the signal after which to stop at this step, None to continue; all processes call it in each step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signal = signal.SIGTERM
        return self.signal

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        # os.write instead of print: the signal may interrupt a print, whose buffer must not be changed.
        if sys.stdout.isatty():
            os.write(1, SHOW_CURSOR)
        os.write(2, f"{self.signal.name}: stopping after this step; repeat it to stop without saving\n".encode())
