"""Prints recorded results as Markdown tables: `python -m benchmarks.tables [--json FILE ...] [--modes NAME ...]`.

Every ratio has its milliseconds. The time of the floor depends on what runs between its calls, so ratios to two
floors cannot be compared without them.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.results import MIB, RECORDED, shown

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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument(
        "--json", nargs="+", type=Path, default=[RECORDED / "torch.json", RECORDED / "jax.json"], metavar="FILE"
    )
    parser.add_argument("--modes", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="only these")
    options = parser.parse_args(arguments)
    for path in options.json:
        content = json.loads(path.read_text())
        rows = [
            row
            for row in content["rows"]
            if (not options.modes or row["mode"] in options.modes)
            and (not options.shapes or row["shape"] in options.shapes)
        ]
        versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
        print(f"{content['device']}, {versions}\n")
        print("\n".join(tables(rows)))


if __name__ == "__main__":
    main()
