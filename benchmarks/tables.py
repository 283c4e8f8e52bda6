"""Prints recorded results as Markdown tables: `python -m benchmarks.tables [--json FILE ...] [--modes NAME ...]`.

With `--grid` it prints the grid of published heads instead, a line for each head. With `--hosts` it prints rows of
`benchmarks.hosts`, and with `--mesh` those of `benchmarks.train --rows mesh mesh-8b`; without `--json` these are all in
results/, and it also writes them into docs/hosts.md and docs/scale.md. With `--objectives` it prints the ratios of
recorded losses other than the mean loss and the bars that they miss, and writes them into docs/performance.md and
experiments.md.

Every ratio has its milliseconds. The time of the floor depends on what runs between its calls, so ratios to two
floors cannot be compared without them.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

from benchmarks import hosts_table, mesh_table, objectives_table
from benchmarks.methods import out_of_memory
from benchmarks.results import MIB, RECORDED, shown
from benchmarks.shapes import GRID_MODES, GRID_N, HEADS, SMALL_N, SWEEP_N, Head

Column = tuple[str, str, str, float]  # heading, key, format, what a value is divided by

TIMED: tuple[Column, ...] = (
    ("ms", "ms", ".2f", 1),
    ("floor, ms", "floor_ms", ".2f", 1),
    ("x floor", "ratio", ".3f", 1),
    ("forward, ms", "forward_ms", ".2f", 1),
    ("J", "joules", ".1f", 1),
    ("workspace, MiB", "workspace_bytes", ",.0f", MIB),
    ("error of d_input", "err_d_input", ".1e", 1),
    ("error of d_weight", "err_d_weight", ".1e", 1),
    ("per-row error of d_input, median", "err_d_input_row_median", ".1e", 1),
    ("per-row error of d_input, 95th percentile", "err_d_input_row_p95", ".1e", 1),
    ("per-class error of d_weight, median", "err_d_weight_class_median", ".1e", 1),
    ("per-class error of d_weight, 95th percentile", "err_d_weight_class_p95", ".1e", 1),
)
HOST: tuple[Column, ...] = (
    ("host, ms", "host_ms", ".3f", 1),
    ("total, ms", "total_ms", ".3f", 1),
    ("host in one thread, ms", "one_thread_host_ms", ".3f", 1),
    ("total in one thread, ms", "one_thread_total_ms", ".3f", 1),
    ("host by autograd.grad, ms", "grad_host_ms", ".3f", 1),
    ("total by autograd.grad, ms", "grad_total_ms", ".3f", 1),
    ("in a CUDA graph, ms", "graph_ms", ".3f", 1),
    ("device, ms", "device_ms", ".3f", 1),
    ("gaps, ms", "gap_ms", ".3f", 1),
    ("kernels", "kernels", ".0f", 1),
    ("a further chunk, ms", "chunk_ms", ".3f", 1),
    ("a further chunk in one thread, ms", "one_thread_chunk_ms", ".3f", 1),
    ("above the identity, ms", "above_identity_ms", ".3f", 1),
    ("above the identity in one thread, ms", "one_thread_above_identity_ms", ".3f", 1),
    ("above a busy identity, ms", "above_busy_identity_ms", ".3f", 1),
    ("above a busy identity in one thread, ms", "one_thread_above_busy_identity_ms", ".3f", 1),
    ("lowering, s", "lower_s", ".1f", 1),
    ("compiling, s", "compile_s", ".1f", 1),
)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a table of rows that all have a ratio to the floor, or all have host times.

    Columns in which no row has a value are left out.
    """
    host = "host_ms" in rows[0]
    columns = [column for column in (HOST if host else TIMED) if any(row.get(column[1]) is not None for row in rows)]
    lines = [
        f"| method | {' | '.join(heading for heading, *_ in columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for row in rows:
        values = [(row.get(key), style, scale) for _, key, style, scale in columns]
        cells = ["-" if value is None else format(value / scale, style) for value, style, scale in values]
        lines.append(f"| {shown(row['method'])} | {' | '.join(cells)} |")
    return lines


def tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a table for each shape, mode, dtype and kind of targets; rows without a time are left out."""

    def key(row: Mapping[str, Any]) -> tuple[str, ...]:
        return row["mode"], row["shape"], row["dtype"], row["targets"]

    timed = [row for row in rows if row["status"] == "ok"]
    first = {key(row): index for index, row in reversed([*enumerate(timed)])}
    lines: list[str] = []
    for (mode, shape, dtype, targets), group in groupby(sorted(timed, key=lambda row: first[key(row)]), key):
        of = list(group)
        sizes = f"N {of[0]['n']:,}, D {of[0]['d']:,}, V {of[0]['v']:,}"
        lines += [f"{shape}: {sizes}, {dtype}, {targets} targets, {mode}", "", *table(of), ""]
    return lines


OTHERS = {"torch": ("torch.compile", ("torch.compile",)), "jax": ("XLA", ("bf16-logits", "gradient-scan"))}


class Grid:
    """The rows of the grid by head, N and column.

    The columns are our fastest method in each mode, and the fastest of OTHERS in train mode.

    Args:
        rows: of one framework. Those of other shapes, modes and methods are left out.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.other, others = OTHERS[rows[0]["framework"] if rows else "torch"]
        self.columns = (*GRID_MODES, self.other)
        self._rows: dict[tuple[int, int, int, str], Mapping[str, Any]] = {}
        for row in rows:
            if row["kind"] == "ours" and row["mode"] in GRID_MODES:
                column = row["mode"]
            elif row["method"] in others and row["mode"] == GRID_MODES[0]:
                column = self.other
            else:
                continue
            key = (row["d"], row["v"], row["n"], column)
            if key not in self._rows or _time(row) < _time(self._rows[key]):
                self._rows[key] = row

    def row(self, head: Head, n: int, column: str) -> Mapping[str, Any] | None:
        return self._rows.get((head.d, head.v, n, column))

    def ratio(self, head: Head, n: int, mode: str) -> float:
        """Returns our ratio to the floor; 0 if there is none."""
        row = self.row(head, n, mode)
        return row["ratio"] if row is not None and row["status"] == "ok" else 0.0

    def worst(self, n: int, mode: str) -> Head:
        return max(HEADS, key=lambda head: self.ratio(head, n, mode))

    def cell(self, head: Head, n: int, column: str) -> str:
        """Returns the ratio to the floor and the milliseconds, the worst ratio of a mode in bold."""
        row = self.row(head, n, column)
        if row is None:
            return "-"
        if row["status"] != "ok":
            return "out of memory" if out_of_memory(RuntimeError(row["note"])) else row["status"]
        text = f"{row['ratio']:.3f} ({row['ms']:.2f})"
        return f"**{text}**" if column in GRID_MODES and head == self.worst(n, column) else text

    def heads(self) -> list[str]:
        """Returns the table of all heads, that with the worst ratio at GRID_N first, and the worst ratios."""
        sizes = (GRID_N, SMALL_N)
        names = ["head", "D", "V", *(f"{column}, N {n:,}" for n in sizes for column in self.columns)]
        lines = _header(names)

        def worst(head: Head) -> float:
            return max(self.ratio(head, GRID_N, mode) for mode in GRID_MODES)

        for head in sorted(HEADS, key=worst, reverse=True):
            cells = [self.cell(head, n, column) for n in sizes for column in self.columns]
            if any(cell != "-" for cell in cells):
                row = self.row(head, GRID_N, GRID_MODES[0])
                padding = row["floor_padding"] if row is not None else None
                v = f"{head.v:,} + {padding}" if padding else f"{head.v:,}"
                lines.append(f"| {head.name} | {head.d:,} | {v} | {' | '.join(cells)} |")
        for n in sizes:
            worst_of = {mode: self.worst(n, mode) for mode in GRID_MODES}
            ratios = {mode: self.ratio(head, n, mode) for mode, head in worst_of.items()}
            text = [f"{mode} {ratio:.3f} ({worst_of[mode].name})" for mode, ratio in ratios.items() if ratio]
            lines += ["", f"worst ratio at N {n:,}: {', '.join(text) or 'no rows'}"]
        return [*lines, "", f"slower than {self.other}: {', '.join(self.slower()) or 'none'}"]

    def slower(self) -> list[str]:
        """Returns the heads and N at which our train rows take more milliseconds than the other column."""
        found = []
        for head, n in product(HEADS, (GRID_N, SMALL_N, *SWEEP_N)):
            ours, other = self.row(head, n, GRID_MODES[0]), self.row(head, n, self.other)
            if ours is not None and other is not None and math.inf > _time(ours) > _time(other):
                found.append(f"{head.name} at N {n:,} ({ours['ms']:.2f} and {other['ms']:.2f} ms)")
        return found

    def sweep(self) -> list[str]:
        """Returns the table of the heads that are measured from few to many tokens."""
        sizes = sorted((GRID_N, SMALL_N, *SWEEP_N))
        lines = _header(["head", "mode", *(f"N {n:,}" for n in sizes)])
        for head, column in product((head for head in HEADS if head.sweep), self.columns):
            cells = [self.cell(head, n, column) for n in sizes]
            lines.append(f"| {head.name} | {column} | {' | '.join(cells)} |")
        return lines


def _header(names: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def _time(row: Mapping[str, Any]) -> float:
    """Returns the ms of a row, infinite if it has none."""
    return row["ms"] if row["status"] == "ok" else math.inf


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument(
        "--json", nargs="+", type=Path, metavar="FILE", help="default: the files of both frameworks in results/h200"
    )
    parser.add_argument("--modes", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--grid", action="store_true", help="a line for each head of the grid")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--hosts", action="store_true", help="rows of benchmarks.hosts")
    other.add_argument("--mesh", action="store_true", help="rows of benchmarks.train on a mesh")
    other.add_argument("--objectives", action="store_true", help="recorded losses other than the mean loss")
    options = parser.parse_args(arguments)
    if options.objectives:
        if options.json:
            parser.error(f"--objectives prints recorded rows, so --json must be absent, got {options.json[0]}")
        for place, lines in objectives_table.objective_tables(RECORDED.parent).items():
            print("\n".join([*lines, ""]))
            place.write(lines)
        return
    for path in options.json or ():
        if not path.is_file():
            parser.error(f"--json must name files of results, got {path}")
    for chosen, place, file, lines_of in (
        (options.hosts, hosts_table.PLACE, hosts_table.FILE, hosts_table.hosts_tables),
        (options.mesh, mesh_table.PLACE, mesh_table.FILE, mesh_table.mesh_table),
    ):
        if not chosen:
            continue
        files = options.json or sorted(RECORDED.parent.glob(f"*/{file}"))
        lines = lines_of([json.loads(path.read_text()) for path in files])
        print("\n".join(lines))
        if not options.json:
            place.write(lines)
        return
    recorded = [RECORDED / f"{framework}{'-grid' * options.grid}.json" for framework in ("torch", "jax")]
    for path in options.json or recorded:
        content = json.loads(path.read_text())
        rows = [
            row
            for row in content["rows"]
            if (not options.modes or row["mode"] in options.modes)
            and (not options.shapes or row["shape"] in options.shapes)
        ]
        versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
        print(f"{content['device']}, {versions}\n")
        if options.grid:
            grid = Grid([row for row in rows if (row["dtype"], row["targets"]) == ("bfloat16", "peaked")])
            print("\n".join([*grid.heads(), "", *grid.sweep(), ""]))
        else:
            print("\n".join(tables(rows)))


if __name__ == "__main__":
    main()
