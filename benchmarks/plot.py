"""Makes the pictures of the recorded results: `python -m benchmarks.plot`.

For each shape time against memory, all methods of both frameworks in one picture; for each framework time and memory
against N and against V. Train mode, bfloat16, peaked targets. Points of our methods are the newest of torch.json and
torch-grid.json (jax.json and jax-grid.json), as in the tables of the pages; all others are of torch.json (jax.json).
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from benchmarks.results import MIB, RECORDED, same_measurement, shown
from benchmarks.shapes import NAMED
from parity.backends import FRAMEWORKS

COLORS = {"ours": "#c2410c", "own-baseline": "#f59e0b", "peer": "#475569", "floor": "#16a34a"}
LABELS = {
    "ours": "core_triton, jax_pallas",
    "own-baseline": "their baselines on cuBLAS and XLA matmuls",
    "peer": "other implementations",
}
MARKERS = {"torch": "o", "jax": "^"}
RADIUS = 10  # of a point's mark, in pixels
NEAR = 10  # from its point, in typographic points: a name further away is not seen as that point's
# For the other implementations in a sweep; more lines than these cannot be distinguished.
PEER_COLORS = ("#2563eb", "#7c3aed", "#0891b2", "#db2777", "#64748b", "#65a30d", "#1e293b")

Row = dict[str, Any]


def load(paths: Iterable[Path]) -> tuple[list[Row], str]:
    """Returns the rows that the pictures show, each with its framework, and the device.

    A row of our methods is replaced by that of the grid if the grid's is newer.

    Args:
        paths: of results. A file NAME-grid.json beside NAME.json is read too.

    Raises:
        ValueError: there are none, or the files are of different devices.
    """
    rows, devices = [], set()
    for path in paths:
        content = json.loads(path.read_text())
        devices.add(content["device"])
        framework = "torch" if "torch" in content["versions"] else "jax"
        of_grid: list[Row] = []
        if (grid := path.with_stem(f"{path.stem}-grid")).exists():
            content_of_grid = json.loads(grid.read_text())
            devices.add(content_of_grid["device"])
            of_grid = [row for row in content_of_grid["rows"] if row["ms"]]
        for row in content["rows"]:
            same = [other for other in of_grid if same_measurement(row, other)] if row["kind"] == "ours" else []
            rows.append({**max([row, *same], key=lambda one: one["date"]), "framework": framework})
    if len(devices) > 1:
        raise ValueError(f"results must be of one device, got {', '.join(sorted(devices))}")
    shown = [
        row
        for row in rows
        if row["mode"] == "train" and row["dtype"] == "bfloat16" and row["targets"] == "peaked" and row["ms"]
    ]
    if not shown:
        raise ValueError("results hold no timed train row in bfloat16 with peaked targets")
    return shown, devices.pop()


def time_against_memory(rows: Sequence[Row], device: str, path: Path) -> None:
    """One shape: each method a point, the floors vertical lines, the gradients a horizontal one."""
    first = rows[0]
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    points = [row for row in rows if row["kind"] != "floor" and row["peak_bytes"]]
    for row in points:
        axes.scatter(
            row["ms"],
            row["peak_bytes"] / MIB,
            s=90 if row["kind"] == "ours" else 55,
            color=COLORS[row["kind"]],
            marker=MARKERS[row["framework"]],
            zorder=3,
        )
    floors = [row for row in rows if row["kind"] == "floor"]
    for row in floors:
        axes.axvline(row["ms"], color=COLORS["floor"], linestyle="-" if row["framework"] == "torch" else "--")
    gradients = 2 * first["d"] * (first["n"] + first["v"]) / MIB
    axes.axhline(gradients, color="#94a3b8", linestyle=":")
    axes.set(xscale="log", yscale="log")
    times, peaks = [row["ms"] for row in rows], [gradients, *(row["peak_bytes"] / MIB for row in points)]
    axes.set_xlim(min(times) / 1.12, max(times) * 1.35)
    axes.set_ylim(min(peaks) / 1.5, max(peaks) * 1.6)
    _plain_ticks(axes)
    axes.set_xlabel("forward + backward, ms")
    axes.set_ylabel("peak memory above the inputs, MiB")
    axes.set_title(f"{first['shape']}: N {first['n']:,}, D {first['d']:,}, V {first['v']:,}, bfloat16, {device}")
    frameworks = sorted({row["framework"] for row in rows}, reverse=True)
    handles = [
        *(
            Line2D([], [], linestyle="", marker="s", color=COLORS[kind], label=label)
            for kind, label in LABELS.items()
            if any(row["kind"] == kind for row in points)
        ),
        *(
            Line2D([], [], linestyle="", marker=MARKERS[name], color="black", label=FRAMEWORKS[name])
            for name in frameworks
        ),
        *(
            Line2D(
                [],
                [],
                color=COLORS["floor"],
                linestyle="-" if row["framework"] == "torch" else "--",
                label=f"{FRAMEWORKS[row['framework']]}'s three matmuls",
            )
            for row in floors
        ),
        Line2D([], [], color="#94a3b8", linestyle=":", label="the gradients"),
    ]
    axes.legend(handles=handles, loc="upper right", fontsize=8, framealpha=0.95)
    _label(
        axes,
        [(row["ms"], row["peak_bytes"] / MIB, shown(row["method"]), COLORS[row["kind"]]) for row in points],
        [row["ms"] for row in floors],
        gradients,
    )
    save(figure, path)


def _label(
    axes: Axes, points: Sequence[tuple[float, float, str, str]], floors: Sequence[float], gradients: float
) -> None:
    """Writes each point's name where it covers no point, no line and no name already written.

    A name far from its point gets a line to it. The line passes no other point and no name, or readers would take the
    name for that point's.
    """
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    pixels = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    marks = [(px - RADIUS, py - RADIUS, px + RADIUS, py + RADIUS) for px, py in pixels]  # and names, as they come
    taken = [(px - 7, py - 7, px + 7, py + 7) for px, py in pixels]
    legend, frame = axes.get_legend(), axes.get_window_extent()
    for x in floors:
        at = axes.transData.transform((x, 1))[0]
        taken.append((at - 3, frame.y0, at + 3, frame.y1))
    at = axes.transData.transform((1, gradients))[1]
    taken.append((frame.x0, at - 3, frame.x1, at + 3))
    if legend is not None:
        taken.append(legend.get_window_extent().extents)
    reaches = (9, 16, 26, 38, 52, 70, 92, 120)
    directions = ((1, 0), (1, 1), (1, -1), (0, 1), (0, -1), (-1, 0), (-1, 1), (-1, -1), (0.4, 1), (0.4, -1))
    candidates = [(dx * reach, dy * reach) for reach in reaches for dx, dy in directions]
    for (px, py), (x, y, name, color) in sorted(zip(pixels, points, strict=True), key=lambda entry: -entry[0][1]):
        text = axes.annotate(name, (x, y), (0, 0), textcoords="offset points", fontsize=8.5, color=color, zorder=4)
        box = text.get_window_extent()
        width, height, scale = box.width, box.height, figure.dpi / 72
        best: tuple[float, tuple[float, ...], tuple[float, float]] | None = None
        for dx, dy in candidates:
            left = px + dx * scale - (0 if dx > 0 else width if dx < 0 else width / 2)
            low = py + dy * scale - height / 2
            area = (left - 2, low - 1, left + width + 2, low + height + 1)
            outside = area[0] < frame.x0 or area[2] > frame.x1 or area[1] < frame.y0 or area[3] > frame.y1
            cost = sum(_overlap(area, other) for other in taken) + 1e6 * outside
            if max(abs(dx), abs(dy)) > NEAR:
                end = px + dx * scale, py + dy * scale
                cost += 1e3 * _crosses((px, py), end, marks)
            if best is None or cost < best[0]:
                best = (cost, area, (dx, dy))
            if cost == 0:
                break
        assert best is not None
        _, area, (dx, dy) = best
        taken.append(area)
        marks.append(area)
        text.set_horizontalalignment("left" if dx > 0 else "right" if dx < 0 else "center")
        text.set_verticalalignment("center")
        text.set_position((dx, dy))
        if max(abs(dx), abs(dy)) > NEAR:
            axes.annotate(
                "", (x, y), (dx, dy), textcoords="offset points", arrowprops={"arrowstyle": "-", "color": "#94a3b8"}
            )


def _crosses(start: Sequence[float], end: Sequence[float], areas: Sequence[Sequence[float]]) -> int:
    """Returns how many areas a line passes through, its first pixels left out, where its own point is."""
    way = np.subtract(end, start)
    length = float(np.hypot(*way))
    places = [np.add(start, way * step / length) for step in range(2 * RADIUS, int(length), 3)]
    return sum(any(left <= x <= right and low <= y <= high for x, y in places) for left, low, right, high in areas)


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0


def sweep(rows: Sequence[Row], axis: str, fixed: str, device: str, path: Path) -> None:
    """One framework: time over the floor's, and peak memory, of each method against `axis` ("n" or "v")."""
    figure, (times, peaks) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    values = sorted({row[axis] for row in rows})
    colors = iter(PEER_COLORS)
    strokes = {"ours": cycle(("-", "-.", ":")), "own-baseline": cycle(("--", ":"))}  # of a kind all have one color
    for method in dict.fromkeys(row["method"] for row in sorted(rows, key=_importance)):
        line = sorted((row for row in rows if row["method"] == method), key=lambda row: row[axis])
        kind = line[0]["kind"]
        color = next(colors, None) if kind == "peer" else COLORS[kind]
        if len(line) < 2 or color is None or kind == "floor":
            continue
        style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 4}
        if kind in strokes:
            style["linestyle"] = next(strokes[kind])
        style |= {"ours": {"linewidth": 2.6, "zorder": 4}, "own-baseline": {"linewidth": 2}}.get(
            kind, {"linewidth": 1.4}
        )
        x = [row[axis] for row in line]
        times.plot(x, [row["ratio"] for row in line], label=shown(method), **style)
        peaks.plot(x, [row["peak_bytes"] / MIB for row in line], **style)
    times.axhline(1, color=COLORS["floor"], label="the three matmuls")
    gradients = [2 * rows[0]["d"] * sum(sizes) / MIB for sizes in _sizes(rows, axis, values)]
    peaks.plot(values, gradients, color="#94a3b8", linestyle=":", label="the gradients")
    times.set_ylabel("forward + backward / the three matmuls")
    peaks.set_ylabel("peak memory above the inputs, MiB")
    for panel in (times, peaks):
        panel.set(xscale="log", yscale="log", xlabel={"n": "N, tokens", "v": "V, classes"}[axis])
        _plain_ticks(panel)
        panel.set_xticks(values, [f"{value:,}" for value in values], rotation=30, ha="right", rotation_mode="anchor")
        panel.set_xticks([], minor=True)
    figure.legend(loc="outside right center", fontsize=8)
    figure.suptitle(f"{FRAMEWORKS[rows[0]['framework']]}: {fixed}, bfloat16, {device}")
    save(figure, path)


def _sizes(rows: Sequence[Row], axis: str, values: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (N, V) along a sweep."""
    return [(value, rows[0]["v"]) if axis == "n" else (rows[0]["n"], value) for value in values]


def _importance(row: Row) -> tuple[int, float]:
    """Our methods first, then the fastest of the others."""
    return ("floor", "ours", "own-baseline", "peer").index(row["kind"]), row["ratio"]


def _plain_ticks(axes: Axes) -> None:
    """Writes 2,000 instead of 2 x 10^3, and as many marks as the axis has room for."""
    for side in (axes.xaxis, axes.yaxis):
        low, high = side.get_view_interval()
        span = high / low
        marks = (1, 2, 5) if span > 12 else (1, 1.5, 2, 3, 4, 5, 6, 8) if span > 2 else tuple(range(10, 100)[::2])
        ticks = {mark * 10.0**power for power in range(-3, 8) for mark in marks}
        side.set_ticks(sorted(tick for tick in ticks if low <= tick <= high))
        side.set_ticks([], minor=True)
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.grid(which="major", color="#e2e8f0", zorder=0)


def save(figure: Any, path: Path) -> None:
    """Writes a figure to a PNG file, whose folder is made if it does not exist, and prints the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("--json", nargs="+", type=Path, metavar="FILE", help="results; default: those recorded")
    parser.add_argument("--out", type=Path, default=RECORDED, metavar="FOLDER")
    options = parser.parse_args(arguments)
    paths = options.json or [path for path in sorted(RECORDED.glob("*.json")) if path.stem in FRAMEWORKS]
    try:
        rows, device = load(paths)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--json {' '.join(map(str, paths))}: {error}") from error
    for shape in NAMED:
        of_shape = [row for row in rows if row["shape"] == shape]
        if of_shape:
            time_against_memory(of_shape, device, options.out / f"time-memory-{shape}.png")
    for framework in FRAMEWORKS:
        own = [row for row in rows if row["framework"] == framework]
        for axis, other, size in (("n", "v", 128256), ("v", "n", 8192)):
            line = [row for row in own if row["d"] == 4096 and row[other] == size]
            if len({row[axis] for row in line}) > 1:
                fixed = f"D 4,096, {other.upper()} {size:,}"
                sweep(line, axis, fixed, device, options.out / f"{framework}-against-{axis}.png")


if __name__ == "__main__":
    main()
