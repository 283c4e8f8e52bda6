"""Tables of results that are written into the pages, each between two marks."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WIDTH = 120  # of the lines of a page
NOT_YET = "Not measured yet."


class Place(NamedTuple):
    """Where a table is.

    Args:
        page: the file.
        name: of the table, in the first mark.
    """

    page: Path
    name: str

    @property
    def begin(self) -> str:
        return f"<!-- table: {self.name} -->"

    @property
    def end(self) -> str:
        return "<!-- end of the table -->"

    def filled(self, text: str, lines: Sequence[str]) -> str:
        """Returns the text of the page with these lines between the marks."""
        before, rest = text.split(self.begin)
        after = rest.split(self.end, 1)[1]
        return "\n".join([f"{before}{self.begin}", "", *lines, "", f"{self.end}{after}"])

    def write(self, lines: Sequence[str]) -> None:
        """Writes the table into the page."""
        self.page.write_text(self.filled(self.page.read_text(), lines))


def source(content: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the lines that say where rows of a file of results were measured."""
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    commits = ", ".join(sorted({row["commit"][:7] for row in rows}))
    return wrapped(f"{content['device']}, {versions}, at {commits}:")


def wrapped(text: str, indent: str = "") -> list[str]:
    """Returns the lines of a paragraph."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
