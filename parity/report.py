"""The table of `python -m parity`: rows of percentages of a budget, and what they come to; and what is written."""

import json
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, NamedTuple

from parity.cases import DTYPE_LABELS, Case
from parity.expected import Comparison
from parity.tolerances import ROW_NAMES, RowErrors

# Outputs that have a column; the figures of rows share one, as the worst of them, and so does the rest.
ROW_FIGURES = tuple(f"{name}_{figure}" for name in ROW_NAMES.values() for figure in RowErrors._fields)
COLUMNS = ("loss", "log_prob", "entropy", "lse", "d_input", "d_weight", "d_bias")
ROWS = "rows"
REST = "others"


class Row(NamedTuple):
    """One case on one backend, or on a pair of them."""

    case: Case
    backend: str
    implementation: str
    outputs: Mapping[str, Comparison]
    failure: str = ""  # why there are no outputs, or why they do not count
    device: str = ""  # its name, where there are outputs of one

    @property
    def failures(self) -> list[str]:
        """What fails in this row, one sentence each."""
        where = f"{self.backend} on {self.case.name}"
        found = [
            f"{where}: {name} has error {error:.3g}, over its budget of {budget:.3g} ({percent(name, self)})"
            for name, (error, budget) in self.outputs.items()
            if not error <= budget
        ]
        return [f"{where}: {self.failure}", *found] if self.failure else found


def percent(name: str, row: Row) -> str:
    """Returns an output's share of its budget as text; empty if the row has no such output."""
    if name == REST:
        named = (*COLUMNS, *ROW_FIGURES)
        shares = [comparison.percent for output, comparison in row.outputs.items() if output not in named]
    elif name == ROWS:
        shares = [row.outputs[figure].percent for figure in ROW_FIGURES if figure in row.outputs]
    else:
        shares = [row.outputs[name].percent] if name in row.outputs else []
    return f"{max(shares):.0f}%" if shares else ""


def header() -> str:
    """Returns the line above the table's rows."""
    return _line("backend", "dtype", "ran", (*COLUMNS, ROWS, REST), "case")


def line(row: Row) -> str:
    """Returns a row as text."""
    shares = [percent(name, row) for name in (*COLUMNS, ROWS, REST)]
    mark = "   <-- FAILS" if row.failures else ""
    return _line(row.backend, DTYPE_LABELS[row.case.dtype], row.implementation, shares, row.case.name) + mark


def _line(backend: str, dtype: str, implementation: str, shares: Iterable[str], case: str) -> str:
    # The name comes last: it is the one entry of no certain width.
    return f"{backend:<14} {dtype:<5} {implementation:<21}{''.join(f'{share:>9}' for share in shares)}  {case}"


def summary(rows: Iterable[Row]) -> list[str]:
    """Returns, for each backend and dtype, how many cases ran and which used most of its budget."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.backend, row.case.dtype), []).append(row)
    lines = []
    for (backend, dtype), group in sorted(groups.items()):
        failed = sum(bool(row.failures) for row in group)
        text = f"{backend:<14} {dtype:<9} {len(group):>5} cases, {failed} failed"
        shares = [
            (comparison.percent, name, row.case.name) for row in group for name, comparison in row.outputs.items()
        ]
        if shares:
            worst, name, case = max(shares)
            text += f"; worst {worst:.0f}% of a budget ({name} of {case})"
        lines.append(text)
    return lines


def as_json(row: Row) -> dict[str, Any]:
    """Returns a row as a JSON object; an error that is infinite (NaN or inf out of place) is null."""
    return {
        "case": row.case.name,
        "backend": row.backend,
        "dtype": row.case.dtype,
        "implementation": row.implementation,
        "outputs": {
            name: {"error": error if error < float("inf") else None, "budget": budget}
            for name, (error, budget) in row.outputs.items()
        },
        "failures": row.failures,
    }


def file_obstacle(option: str, path: Path | None) -> str:
    """Returns why the file of an option cannot be written, before anything runs; empty if it can."""
    if path is None or (path.parent.is_dir() and not path.is_dir()):
        return ""
    return f"{option} must be a file in a folder that exists, got {path}"


def write(path: Path, document: Mapping[str, Any], packages: Iterable[str]) -> None:
    """Writes a JSON document, with the versions of those of the packages that are installed."""
    present = {found.name for found in distributions()}.intersection(packages)
    versions = {name: version(name) for name in sorted(present)}
    path.write_text(to_json({"versions": versions, **document}))


def to_json(document: Mapping[str, Any], *, allow_nan: bool = True) -> str:
    """Returns a document as JSON text with one line for each row of each of its lists of objects.

    Two versions of a file of results then differ in the lines of the rows that were measured again. Entries that are
    not lists of objects take one line each.

    Args:
        document: the entries by name.
        allow_nan: write NaN and infinities, which plain JSON does not have, instead of raising ValueError.

    Example:
        >>> print(to_json({"device": "cpu", "rows": [{"ms": 1.5}, {"ms": 2.0}]}), end="")
        {
         "device": "cpu",
         "rows": [
          {"ms": 1.5},
          {"ms": 2.0}
         ]
        }
    """

    def text(value: Any) -> str:
        if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            lines = ",\n".join(f"  {json.dumps(row, allow_nan=allow_nan)}" for row in value)
            return f"[\n{lines}\n ]"
        return json.dumps(value, allow_nan=allow_nan)

    entries = ",\n".join(f" {json.dumps(name)}: {text(value)}" for name, value in document.items())
    return f"{{\n{entries}\n}}\n"
