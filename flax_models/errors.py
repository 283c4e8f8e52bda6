"""The exceptions that the command line reports as one line instead of a traceback.

Also the message of another exception, and a check that several commands make.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RunError(Exception):
    """An error that the user can fix: a missing file, a name already in use, a diverged loss."""


class UsageError(RunError):
    """A wrong command line, whatever the files that it names contain."""


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Puts the name of an option before the message of a RunError."""
    try:
        yield
    except RunError as error:
        raise RunError(f"{option}: {error}") from None


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


def check_writable(folder: Path) -> None:
    """Raises RunError unless files can be written to a folder, which is created later if it does not exist."""
    # os.path.exists is False below a folder that may not be searched, where Path.exists raises an error.
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise RunError(f"cannot write {folder}: {existing} is not a folder to which you may write")


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, which may be long; the name of its type if there is no message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
