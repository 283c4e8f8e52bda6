"""Wrong options of the command lines: one line on stderr and exit status 2, without usage or boxes."""

import argparse
import contextlib
import io
import itertools
import re
import sys
from collections.abc import Iterator
from typing import NoReturn

# What Python says of text that is no number, and the kind of number that was expected.
NUMBERS = {"invalid literal for int() with base 10": "an integer", "could not convert string to float": "a number"}


class OneLineParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Ends the process, saying what is wrong with which option."""
        self.exit(2, f"error: {message}\n")


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Makes the boxes in which tyro says what is wrong one line each, while the `with` statement lasts."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as stopped:
        if stopped.code:
            print(f"error: {_line(said.getvalue())}", file=sys.stderr)
        raise


def _line(box: str) -> str:
    """Returns what a box of tyro's says: the rows up to the first rule, and the option that may have been meant."""
    rows = [row.strip("\u2502 ") for row in box.splitlines()[1:]]  # without the title
    rows = [row for row in rows if not row.startswith("\u2570")]
    parts = [list(part) for is_rule, part in itertools.groupby(rows, _is_rule) if not is_rule]
    line = " ".join(parts[0] if parts else box.split()).rstrip(".")
    # What a group's own check says, tyro puts after the group's name, which is no part of its options' names.
    if found := re.fullmatch(r"Error parsing (?!--)[\w.]*: (.*)", line):
        line = found[1]
        if not line.startswith("--"):
            name, _, rest = line.partition(" ")
            line = f"--{name.replace('_', '-')} {rest}"
    for words, kind in NUMBERS.items():
        line = re.sub(rf"Error parsing (--\S+): {re.escape(words)}: (.*)", rf"\1 must be {kind}, got \2", line)
    if len(parts) > 1 and parts[1][0] == "Perhaps you meant:":
        line += f"; perhaps {parts[1][1].split()[0]} was meant"
    return line


def _is_rule(row: str) -> bool:
    return not row.strip("\u2500-")
