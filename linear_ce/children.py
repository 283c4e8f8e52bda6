"""How commands start the processes that they end themselves."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def started_without_interrupts() -> Iterator[None]:
    """Processes that are started here ignore Ctrl-C, which a terminal sends to them too. Other signals reach them.

    Use it in the main thread, as Python's signal module requires.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
