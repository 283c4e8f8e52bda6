"""The exceptions that the command line shows as a line instead of a traceback."""

import signal


class RunError(Exception):
    """Something the person who started the run can mend: a path, an option, a name already taken, a diverged loss."""


class Stopped(Exception):
    """A signal asked the run to end, and it has ended where it can go on.

    Args:
        by: the signal.
        saved: what was saved, for people; None where the signal came outside the training loop.
    """

    def __init__(self, by: signal.Signals, saved: str | None = None) -> None:
        super().__init__(f"stopped by {by.name}")
        self.saved = saved
        self.status = 128 + by  # what a shell reports of a process that the signal ended
