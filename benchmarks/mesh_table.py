"""The table of `benchmarks.train --rows mesh mesh-8b mesh-hf` in docs/scale.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.page_tables import NOT_YET, Place, source
from benchmarks.results import MIB, ROOT

PLACE = Place(ROOT / "docs" / "scale.md", "mesh")
FILE = "train_mesh.json"  # in the folders of results
USUAL = {"optimizer": "adamw", "remat": "none"}  # not named
TRAINERS = {"fused": "", "hf": "transformers", "hf+liger": "transformers with Liger's kernels"}
HEADINGS = (
    *("model, sequences x tokens", "mesh", "GPUs", "tokens/s"),
    *("relative to as many single GPUs", "MFU", "peak memory of a GPU"),
)


def mesh_table(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a table for each file of results, or a line that says that nothing was measured.

    Args:
        contents: of files of `benchmarks.train`.
    """
    lines: list[str] = []
    for content in contents:
        rows = [row for row in content["rows"] if row.get("kind", "speed") == "speed" and row["config"] != "smoke"]
        if rows:
            lines += [*source(content, rows), "", f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
            lines += [*map(_line, sorted(rows, key=_order)), ""]
    return lines[:-1] or [NOT_YET]


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        row["config"],
        -row["seq"],
        list(TRAINERS).index(row["loss"]),
        row["batch"],
        row["mesh"] or "",
        row["optimizer"],
    )


def _line(row: Mapping[str, Any]) -> str:
    options = [TRAINERS[row["loss"]]] if TRAINERS[row["loss"]] else []
    options += [f"{name} {row[name]}" for name, usual in USUAL.items() if row.get(name, usual) != usual]
    cells = [", ".join([row["config"], *options, f"{row['batch']} x {row['seq']:,}"]), row["mesh"] or "-"]
    if (status := row.get("status", "ok")) != "ok":
        status = "out of memory" if status == "oom" else status
        return f"| {' | '.join([*cells, str(row['gpus']), status, '-', '-', '-'])} |"
    shares = ["-" if row.get(name) is None else f"{row[name]:.1%}" for name in ("efficiency", "mfu")]
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB / 1024:.1f} GiB"
    return f"| {' | '.join([*cells, str(row['gpus']), format(row['tokens_per_s'], ',.0f'), *shares, peak])} |"
