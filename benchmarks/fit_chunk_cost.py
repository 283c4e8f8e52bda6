"""Fits the estimate that chooses chunks to measured rows: `python -m benchmarks.fit_chunk_cost FILE...`.

The files are those of `benchmarks.sweep`, such as benchmarks/results/*/*-sweep.json, of any GPUs and both frameworks.
For each GPU and framework the command prints the line for `cost_coefficients.COEFFICIENTS`, how far the estimate is
from the times, and, for each shape and budget, how much slower the choice of the estimate is than the best row that was
measured. No GPU is needed.

The clock of a GPU changes between rows, so the time of a row is its ratio to the floor (the bare matmuls, or the choice
of the plan), times the median floor of its shape and budget. Rows beside different floors count as different shapes.
Within a shape and budget the estimate must order the rows, while the matmuls of a whole shape may be faster or slower
than those of another, because the power limit lowers the clock. So differences within a shape and budget count in units
of `WITHIN`, and the mean of a shape and budget in units of `BETWEEN`. Coefficients that the rows do not determine stay
near the present ones (`PRIOR`).
"""

import argparse
import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import results
from benchmarks.chunk_rows import Choice, Division, considered, fewest_rows, first_chunk
from benchmarks.sweep import METHODS, PLAN, SWEPT, arrays, budget_of, explain, of_d_input, with_plans
from linear_ce import chunk_cost
from linear_ce.cost_coefficients import COEFFICIENTS, CostCoefficients
from linear_ce.gpus import known_gpu

WITHIN = 0.005  # relative: what two rows of one shape and budget may differ by without a reason
BETWEEN = 0.02  # relative, of shapes
PRIOR = 0.7  # relative, of a coefficient
INSIDE = 1e-3  # of a coefficient's scale: least squares start above zero, which is the bound
MOST_SLOWER = 2.0  # percent that a choice may be slower than the best row measured

# Of a coefficient that is zero now, for `PRIOR`.
SCALES = CostCoefficients(1, 100, 100, 10, 0.1, 0.1, 0.05, 10, 10, 0.1, 0.1, 10)
SHARES = ("idle", "padded")  # coefficients that are at most 1
UNLIMITED = "unlimited"
# The rows of a few shapes do not determine what the power limit changes. These coefficients are fitted if named.
FITTED = tuple(name for name in CostCoefficients._fields if name not in (*SHARES, UNLIMITED))

Group = tuple[str, int, int, int, int]  # shape, and the choice of the plan if that is the floor; N, D, V, budget


class Sample(NamedTuple):
    """A measured row."""

    group: Group
    choice: Choice
    ms: float


def made_plan(framework: str, gpu: str, n: int, d: int, v: int, budget: int) -> Any:
    """Returns the plan of a training call."""
    x, w = arrays(framework, n, d, v)
    return explain(framework, x, w, budget, METHODS[framework], gpu).plan


@cache
def choices(framework: str, gpu: str, n: int, d: int, v: int, budget: int, rows: int) -> list[Choice]:
    """Returns what a plan considers that prefers chunks of `rows` rows, as `chunk_rows.considered`, and before it what
    it chooses without this preference, if that has a first chunk in the memory of d_weight."""

    def make() -> Any:
        return made_plan(framework, gpu, n, d, v, budget)

    planned = first_chunk(make)
    return ([] if planned is None else [planned]) + considered(make, rows)


def contents(path: Path) -> dict[str, Any]:
    """Returns what a file of results has.

    Raises:
        ValueError: there is no such file, or it has no results.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file; benchmarks.sweep writes it") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or not {"device", "rows"} <= content.keys():
        raise ValueError(f"{path}: no results of benchmarks.sweep, which have a device and rows")
    return content


def samples(paths: Sequence[Path], *, fewest: bool, all_code: bool = False) -> dict[tuple[str, str], list[Sample]]:
    """Returns the measured rows of each GPU and framework.

    Args:
        paths: files of `benchmarks.sweep`.
        fewest: rows without a row count, those of `benchmarks.linear_ce` at commits that chose the fewest chunks, count
            too.
        all_code: rows of all code count. Otherwise only those of the newest code of each GPU and framework do.

    Raises:
        ValueError: a file is not there, or has no results.
    """
    usable: dict[tuple[str, str], list[tuple[Path, dict[str, Any]]]] = defaultdict(list)
    for path in paths:
        content, unknown = contents(path), 0
        gpu = known_gpu(content["device"], 90)
        for row in with_plans(content["rows"]):
            framework = next((name for name, method in METHODS.items() if row.get("method") == method), None)
            if framework is None or row["mode"] not in SWEPT or row.get("floor") not in (None, PLAN):
                continue
            if (row["dtype"], row["status"]) != ("bfloat16", "ok"):
                continue
            if row.get("chunk_rows") is None:
                if not fewest or row["targets"] != "peaked":
                    continue
                if not chose_fewest(row["commit"]):
                    unknown += 1
                    continue
            usable[gpu, framework].append((path, row))
        if unknown:
            print(f"{path}: {unknown} rows are not of a commit known to choose the fewest chunks: left out")
    found = {}
    for key, rows in usable.items():
        matched = [(path, row, *matching(*key, row)) for path, row in (rows if all_code else _newest(key, rows))]
        for path, row, group, choice in matched:
            if choice is None:
                how = "" if row.get("d_input") is None else ", divided as it was"
                print(f"{path}: {group[0]} has no plan with {Division.of_row(row)}{how} any more: left out")
        kept = [(group, choice, row) for _, row, group, choice in matched if choice is not None]
        if kept:
            found[key] = _at_one_clock(kept)
    return found


def _newest(key: tuple[str, str], rows: Sequence[tuple[Path, dict[str, Any]]]) -> Sequence[tuple[Path, dict[str, Any]]]:
    """Returns the rows without those of `benchmarks.sweep` that other code than the newest measured."""
    swept = [row for _, row in rows if row.get("chunk_rows") is not None]
    if not swept:
        return rows
    newest = max(swept, key=lambda row: row["date"])["code_hash"]
    kept = [(path, row) for path, row in rows if row.get("chunk_rows") is None or row["code_hash"] == newest]
    if len(kept) < len(rows):
        print(f"{key[0]}, {key[1]}: {len(rows) - len(kept)} rows of older code dropped")
    return kept


def matching(gpu: str, framework: str, row: dict[str, Any]) -> tuple[Group, Choice | None]:
    """Returns the group of a row, and the choice of a plan that it measured; None if no plan has this choice."""
    name = row["shape"]
    if row.get("floor") == PLAN:  # times beside other floors are of other clocks
        name += f" beside {Division.of_row(row['plan'])}"
    group = (name, row["n"], row["d"], row["v"], row.get("budget") or budget_of(SWEPT[row["mode"]]))
    rows = row.get("chunk_rows") or fewest_rows(lambda: made_plan(framework, gpu, *group[1:]))
    wanted = Division.of_row({**row, "chunk_rows": rows})
    for choice in choices(framework, gpu, *group[1:], rows):
        if choice.division == wanted and row.get("d_input") in (None, of_d_input(choice)):
            return group, choice
    return group, None


@cache
def chose_fewest(commit: str, root: Path = results.ROOT) -> bool:
    """Returns whether git knows a commit, and it has no estimate, so that the fewest chunks won."""
    try:
        return not results.git("ls-tree", "--name-only", commit, "linear_ce/chunk_cost.py", root=root)
    except (OSError, subprocess.CalledProcessError):
        return False


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


def fit(rows: Sequence[Sample], start: CostCoefficients, only: Sequence[str] = FITTED) -> CostCoefficients:
    """Returns the coefficients of least squares, none negative and no share above 1.

    Args:
        rows: measured rows of one GPU and framework.
        start: the present coefficients.
        only: names of the coefficients that are fitted. The others stay.
    """
    from scipy.optimize import least_squares  # takes most of a second, and most uses of this module do not fit

    scale = np.array([getattr(start, name) or getattr(SCALES, name) for name in only])
    origin = np.array([getattr(start, name) for name in only]) / scale

    def coefficients(u: np.ndarray) -> CostCoefficients:
        return start._replace(**dict(zip(only, (u * scale).tolist(), strict=True)))

    def objective(u: np.ndarray) -> np.ndarray:
        return np.concatenate([weighted(rows, residuals(rows, coefficients(u))), (u - origin) / PRIOR])

    most = np.array([1.0 if name in SHARES else np.inf for name in only]) / scale
    return coefficients(least_squares(objective, np.clip(origin, INSIDE, most), bounds=(0, most)).x)


def choice_of(rows: Sequence[Sample], coefficients: CostCoefficients) -> Sample:
    """Returns which of the measured rows of one shape and budget the estimate chooses, as a plan does: the fewest of
    the chunks that cost the same, equal ones or, if it saves enough, with a first chunk in the memory of d_weight."""

    def ms(row: Sample) -> float:
        return row.choice.ms(coefficients)

    def fewest(found: Sequence[Sample]) -> Sample:
        least = (1 + chunk_cost.TIE) * min(map(ms, found))
        return min((row for row in found if ms(row) <= least), key=lambda row: (row.choice.chunks, ms(row)))

    with_first = [row for row in rows if row.choice.last.pieces]
    equal = [row for row in rows if not row.choice.last.pieces]
    if not equal:
        return fewest(with_first)
    usual = fewest(equal)
    saves = min(map(ms, with_first), default=math.inf) < (1 - chunk_cost.FIRST_CHUNK_GAIN) * ms(usual)
    return fewest(with_first) if saves else usual


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
            f"| {group[0]} | {group[4] / 2**20:.0f} | {len(of_group)} | {chosen.choice.division} "
            f"| {best.choice.division} "
            f"| {slower:.1f}% | {ratio:.3f} |"
        )
    print(f"worst choice: {worst:.1f}% slower than the best row measured")
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if there is no row to fit to, or if a choice is too slow."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_chunk_cost", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="of benchmarks.sweep")
    parser.add_argument(
        "--fewest",
        action="store_true",
        help="also take rows of linear_ce, which have no row count, from commits that chose the fewest chunks",
    )
    parser.add_argument("--check", action="store_true", help="do not fit: report on the present coefficients")
    parser.add_argument("--all-code", action="store_true", help="also take the rows of older code")
    parser.add_argument(
        "--only",
        nargs="+",
        default=FITTED,
        choices=CostCoefficients._fields,
        metavar="NAME",
        help=f"coefficients to fit, the others stay (default: all but {' '.join((*SHARES, UNLIMITED))})",
    )
    options = parser.parse_args(arguments)
    try:
        found = samples(options.files, fewest=options.fewest, all_code=options.all_code)
    except ValueError as error:
        parser.error(str(error))
    if not found:
        print("no rows to fit to: benchmarks.sweep measures them")
        return 1
    slowest = 0.0
    for key, rows in sorted(found.items()):
        start = COEFFICIENTS[key]
        slowest = max(slowest, report(key, rows, start if options.check else fit(rows, start, options.only)))
    if slowest > MOST_SLOWER:
        print(f"\na choice is more than {MOST_SLOWER:g}% slower than the best row measured")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
