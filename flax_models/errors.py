"""The exceptions that the command line reports as one line instead of a traceback."""

import signal


class RunError(Exception):
    """An error that the user can fix: a wrong path or option, a name already in use, a diverged loss."""


class Stopped(Exception):
    """The run was stopped by a signal, at a point from which it can be resumed.

    Args:
        received: the signal.
        saved: description of what was saved; None if the signal arrived outside the training loop.
    """

    def __init__(self, received: signal.Signals, saved: str | None = None) -> None:
        super().__init__(f"stopped by {received.name}")
        self.saved = saved
        self.status = 128 + received  # the exit status that a shell reports for a process killed by the signal
