"""Fits the estimate that chooses chunks to measured rows: `python -m benchmarks.fit_chunk_cost results/*/sweep.json`.

The rows are those of `benchmarks.sweep`, of any GPUs and both frameworks. For each GPU and framework the command prints
the line for `chunk_cost.COEFFICIENTS`, how far the estimate is from the times, and, for each shape and budget, how much
slower the choice of the estimate is than the best row that was measured. No GPU is needed.

The clock of a GPU changes between rows, so the time of a row is its ratio to the floor, times the median floor of its
shape and budget. Within a shape and budget the estimate must order the rows, while the matmuls of a whole shape may be
faster or slower than those of another, because the power limit lowers the clock. So differences within a shape and
budget count in units of `WITHIN`, and the mean of a shape and budget in units of `BETWEEN`. Coefficients that the rows
do not determine stay near the present ones (`PRIOR`).
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.chunk_rows import Choice, considered, fewest_rows
from benchmarks.shapes import MODES
from benchmarks.sweep import METHODS, budget_of, explain
from linear_ce import chunk_cost
from linear_ce.chunk_cost import CostCoefficients
from linear_ce.gpus import known_gpu

WITHIN = 0.005  # relative: what two rows of one shape and budget may differ by without a reason
BETWEEN = 0.05  # relative, of shapes
PRIOR = 1.0  # relative, of a coefficient

# Of a coefficient that is zero now, for `PRIOR`.
SCALES = CostCoefficients(1, 100, 100, 10, 0.1, 0.1, 0.05, 10, 10)

Group = tuple[str, int, int, int, int]  # shape, N, D, V, budget


class Sample(NamedTuple):
    """A measured row."""

    group: Group
    choice: Choice
    ms: float


def arrays(framework: str, n: int, d: int, v: int) -> tuple[Any, Any]:
    """Returns input and weight without memory."""
    if framework == "torch":
        import torch

        return tuple(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((n, d), (v, d)))  # pyright: ignore[reportReturnType]
    import jax

    return jax.ShapeDtypeStruct((n, d), "bfloat16"), jax.ShapeDtypeStruct((v, d), "bfloat16")


def made_plan(framework: str, gpu: str, n: int, d: int, v: int, budget: int) -> Any:
    """Returns the plan of a training call."""
    x, w = arrays(framework, n, d, v)
    return explain(framework, x, w, budget, METHODS[framework], gpu).plan


@cache
def choices(framework: str, gpu: str, n: int, d: int, v: int, budget: int, rows: int) -> list[Choice]:
    """Returns what a plan considers that prefers chunks of `rows` rows, as `chunk_rows.considered`."""
    return considered(lambda: made_plan(framework, gpu, n, d, v, budget), rows)


def samples(paths: Sequence[Path], *, fewest: bool) -> dict[tuple[str, str], list[Sample]]:
    """Returns the measured rows of each GPU and framework.

    Args:
        paths: files of `benchmarks.sweep`.
        fewest: rows without a row count, those of `benchmarks.linear_ce` at commits that chose the fewest chunks, count
            too.
    """
    found: dict[tuple[str, str], list[tuple[Group, Choice, dict[str, Any]]]] = defaultdict(list)
    for path in paths:
        content = json.loads(path.read_text())
        gpu = known_gpu(content["device"], 90)
        for row in content["rows"]:
            framework = next((name for name, method in METHODS.items() if row["method"] == method), None)
            ours = row["dtype"] == "bfloat16" and row["status"] == "ok"
            mode = MODES.get(row["mode"])
            if (
                framework is None
                or not ours
                or mode is None
                or (row.get("chunk_rows") is None and not (fewest and trains(row)))
            ):
                continue
            group = (row["shape"], row["n"], row["d"], row["v"], row.get("budget") or budget_of(mode))
            wanted = row.get("chunk_rows") or fewest_rows(lambda made=(framework, gpu, *group[1:]): made_plan(*made))
            options = choices(framework, gpu, *group[1:], wanted)
            choice = next((choice for choice in options if choice.rows == wanted), None)
            if choice is None:
                print(f"{path}: {row['shape']} has no plan with {wanted} rows any more: left out")
            else:
                found[gpu, framework].append((group, choice, row))
    return {key: _at_one_clock(rows) for key, rows in found.items()}


def trains(row: dict[str, Any]) -> bool:
    """Returns whether a row of `benchmarks.linear_ce` is of a training call with all of its rows."""
    return row["mode"] in ("train", "tight", "lean", "roomy") and row["targets"] == "peaked"


def _at_one_clock(rows: Sequence[tuple[Group, Choice, dict[str, Any]]]) -> list[Sample]:
    floors = defaultdict(list)
    for group, _, row in rows:
        floors[group].append(row["floor_ms"])
    return [Sample(group, choice, row["ratio"] * float(np.median(floors[group]))) for group, choice, row in rows]


def residuals(rows: Sequence[Sample], coefficients: CostCoefficients) -> np.ndarray:
    """Returns log(measured / estimated) of each row."""
    return np.log([row.ms / row.choice.ms(coefficients) for row in rows])


def weighted(rows: Sequence[Sample], found: np.ndarray) -> np.ndarray:
    """Returns the residuals within each shape and budget and their means, in units of `WITHIN` and `BETWEEN`."""
    places: dict[Group, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        places[row.group].append(index)
    parts = []
    for of_group in places.values():
        mean = found[of_group].mean()
        parts += [(found[of_group] - mean) / WITHIN, [mean / BETWEEN]]
    return np.concatenate(parts)


def fit(rows: Sequence[Sample], start: CostCoefficients, steps: int = 30) -> CostCoefficients:
    """Returns the coefficients of least squares, none negative, by Gauss-Newton steps that are halved until they help.

    Args:
        rows: measured rows of one GPU and framework.
        start: the present coefficients.
        steps: at most.
    """
    scale = np.array([value or usual for value, usual in zip(start, SCALES, strict=True)])
    origin = np.array(start) / scale

    def objective(u: np.ndarray) -> np.ndarray:
        measured = weighted(rows, residuals(rows, CostCoefficients(*(u * scale).tolist())))
        return np.concatenate([measured, (u - origin) / PRIOR])

    u, now = origin, objective(origin)
    for _ in range(steps):
        width = 1e-4
        slopes = np.stack([(objective(u + width * axis) - now) / width for axis in np.eye(len(u))], axis=1)
        step = np.linalg.lstsq(slopes, -now, rcond=None)[0]
        for _ in range(12):
            trial = np.maximum(u + step, 0)
            then = objective(trial)
            if then @ then < now @ now:
                break
            step = step / 2
        else:
            break
        done = now @ now - then @ then < 1e-9 * (now @ now)
        u, now = trial, then
        if done:
            break
    return CostCoefficients(*(u * scale).tolist())


def choice_of(rows: Sequence[Sample], coefficients: CostCoefficients) -> Sample:
    """Returns which of the measured rows of one shape and budget the estimate chooses, as `chunk_cost.choose_rows`."""
    times = [row.choice.ms(coefficients) for row in rows]
    least = (1 + chunk_cost.TIE) * min(times)
    equal = [(row.choice.chunks, ms, index) for index, (row, ms) in enumerate(zip(rows, times, strict=True))]
    return rows[min(choice for choice in equal if choice[1] <= least)[2]]


def report(key: tuple[str, str], rows: Sequence[Sample], coefficients: CostCoefficients) -> float:
    """Prints the coefficients and what they lead to. Returns how much slower the worst choice is, in percent."""
    numbers = ", ".join(f"{value:.4g}" for value in coefficients)
    print(f"\n{key[0]}, {key[1]}: {len(rows)} rows\n    {key!r}: CostCoefficients({numbers}),")
    groups: dict[Group, list[Sample]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    found = residuals(rows, coefficients)
    print(f"estimate beside time, root mean square: {100 * np.sqrt(np.mean(found**2)):.2f}% of all rows")
    if len(rows) > len(groups):
        squares = sum(len(each) * float(residuals(each, coefficients).var()) for each in groups.values())
        print(f"within a shape and budget: {100 * np.sqrt(squares / (len(rows) - len(groups))):.2f}%")
    print(
        "| shape | MiB | measured | chosen | best | slower by | estimated / measured |\n|---|---|---|---|---|---|---|"
    )
    worst = 0.0
    for group, of_group in sorted(groups.items()):
        chosen, best = choice_of(of_group, coefficients), min(of_group, key=lambda row: row.ms)
        slower = 100 * (chosen.ms / best.ms - 1)
        worst = max(worst, slower)
        ratio = np.exp(-residuals(of_group, coefficients).mean())
        print(
            f"| {group[0]} | {group[4] / 2**20:.0f} | {len(of_group)} | {chosen.choice.rows} | {best.choice.rows} "
            f"| {slower:.1f}% | {ratio:.3f} |"
        )
    print(f"worst choice: {worst:.1f}% slower than the best row measured")
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if there is no row to fit to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_chunk_cost", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="results of benchmarks.sweep")
    parser.add_argument(
        "--fewest",
        action="store_true",
        help="also take rows of linear_ce, which have no row count, from commits that chose the fewest chunks",
    )
    parser.add_argument("--check", action="store_true", help="do not fit: report on the present coefficients")
    options = parser.parse_args(arguments)
    found = samples(options.files, fewest=options.fewest)
    if not found:
        print("no rows to fit to: benchmarks.sweep measures them")
        return 1
    for key, rows in sorted(found.items()):
        start = chunk_cost.COEFFICIENTS[key]
        report(key, rows, start if options.check else fit(rows, start))
    return 0


if __name__ == "__main__":
    sys.exit(main())
