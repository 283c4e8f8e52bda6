"""Atomic replacement of files."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def part_path(path: Path) -> Path:
    """Returns the path of a temporary file or folder, which this process renames to `path` when it is complete."""
    # With the host's name, because containers on several hosts may have the same process ids.
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.part")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path, which replaces `path` if the `with` statement ends without an exception.

    Readers see either the old file or the complete new one. Raises OSError if the file cannot be replaced.
    """
    part = part_path(path)
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
