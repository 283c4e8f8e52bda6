"""Lets processes prepare their measurements side by side on one device, and each have it alone while it is timed.

Compiling takes most of a row's time and hardly any of the device's. With a folder of turns each process says that it is
there, waits for the memory that it is going to take, and stops the others while it times something.
"""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "LINEAR_CE_TURNS"  # names the folder, of a file for each group, with the bytes that it holds
POLL = 0.1  # seconds


def enter(group: int) -> None:
    """Says that a process group takes part."""
    folder = _folder()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(group)).touch()


def join() -> None:
    """Says that this process's group takes part, and waits until nothing is being timed."""
    folder = _folder()
    if folder is not None:
        enter(os.getpgrp())
        with _lock(folder / "timing"):
            pass


def reserve(size: int, limit: int) -> None:
    """Waits until others leave enough of the device's memory, in the order of asking.

    Args:
        size: bytes that this process is going to hold; more than there are waits for all others to leave.
        limit: bytes of the device.
    """
    folder = _folder()
    if folder is None or _bytes(own := folder / str(os.getpgrp())) >= size:
        return
    with _lock(folder / "waiting"):
        while 0 < _held(folder) > limit - size:
            time.sleep(POLL)
        own.write_text(str(size))


def _held(folder: Path) -> int:
    return sum(_bytes(path) for path in _others(folder))


def _bytes(path: Path) -> int:
    return int(path.read_text() or 0)


def leave(group: int) -> None:
    """Takes out a group that has ended, and lets the others go on if it had stopped them."""
    folder = _folder()
    if folder is None or not folder.is_dir():
        return
    (folder / str(group)).unlink(missing_ok=True)
    with contextlib.suppress(BlockingIOError), _lock(folder / "timing", fcntl.LOCK_NB):
        _signal(folder, signal.SIGCONT)


def end() -> None:
    """Ends all other groups."""
    folder = _folder()
    if folder is not None:
        _signal(folder, signal.SIGKILL)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Stops all other groups of the folder meanwhile; does nothing without a folder."""
    folder = _folder()
    if folder is None:
        yield
        return
    with _lock(folder / "timing"):
        _signal(folder, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(folder, signal.SIGCONT)


def _folder() -> Path | None:
    name = os.environ.get(VARIABLE)
    return Path(name) if name else None


@contextlib.contextmanager
def _lock(path: Path, how: int = 0) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | how)  # released when the file is closed, or its process ends
        yield


def _others(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.isdigit() and int(path.name) != os.getpgrp()]


def _signal(folder: Path, number: int) -> None:
    for path in _others(folder):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(path.name), number)
