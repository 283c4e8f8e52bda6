"""Starts commands, and reports errors in their options: one line on stderr and exit status 2, without usage text."""

import argparse
import contextlib
import io
import itertools
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

# Python's messages for text that is not a number, and the kind of number that is expected.
NUMBERS = {"invalid literal for int() with base 10": "an integer", "could not convert string to float": "a number"}
OPTIONAL = {"INT": "an integer", "FLOAT": "a number"}  # tyro's names of the types of an option that may also be None


@contextlib.contextmanager
def silent_interrupts() -> Iterator[None]:
    """Ctrl-C inside the `with` statement ends the process with status 130 and prints nothing: for imports, which take
    seconds.

    No KeyboardInterrupt is raised, because extension modules such as NumPy's replace it by an ImportError.
    """
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in the background of a shell
    if interruptible:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    try:
        yield
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class OneLineParser(argparse.ArgumentParser):
    """An `ArgumentParser` that reports an error on one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2."""
        self.exit(2, f"error: {message}\n")


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Replaces each multi-line error box of tyro with one line, inside a `with` statement."""
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            yield
    except SystemExit as exit_request:
        if exit_request.code:
            print(f"error: {_line(captured.getvalue())}", file=sys.stderr)
        raise


def _line(box: str) -> str:
    """Returns the text of a tyro error box: the rows up to the first rule, and the option that tyro suggests."""
    rows = [row.strip("\u2502 ") for row in box.splitlines()[1:]]  # skip the title
    rows = [row for row in rows if not row.startswith("\u2570")]
    parts = [list(part) for is_rule, part in itertools.groupby(rows, _is_rule) if not is_rule]
    line = " ".join(parts[0] if parts else box.split()).rstrip(".")
    # For an error raised in __post_init__, tyro prepends the group's name, which is not part of the option's name.
    if found := re.fullmatch(r"Error parsing (?!--)[\w.]*: (.*)", line):
        line = found[1]
        if not line.startswith("--"):
            name, _, rest = line.partition(" ")
            line = f"--{name.replace('_', '-')} {rest}"
    for words, kind in NUMBERS.items():
        line = re.sub(rf"Error parsing (--\S+): {re.escape(words)}: (.*)", rf"\1 must be {kind}, got \2", line)
    for kind, words in OPTIONAL.items():
        line = re.sub(
            rf"Error parsing (--\S+): no type matching \{{None\}}\|{kind} could be instantiated from \[(.*)\]",
            rf"\1 must be {words} or None, got \2",
            line,
        )
    if len(parts) > 1 and parts[1][0] == "Perhaps you meant:":
        line += f"; did you mean {parts[1][1].split()[0]}?"
    return line


def _is_rule(row: str) -> bool:
    return not row.strip("\u2500-")
