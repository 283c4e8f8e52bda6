"""Rows of results: their keys, the file they are kept in, and the table that is printed."""

import ast
import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.methods import ROW_ERRORS
from benchmarks.shapes import GRID, plan

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "benchmarks" / "results" / "h200"  # the results that the pages show
MIB = 2**20
LAST_LINES = 30  # of the output of a failed process that are printed
CODE = ("benchmarks/*.py", "core_triton", "jax_pallas", "linear_ce", "parity")  # what a result depends on
# What makes two rows the same measurement. Only rows of `benchmarks.sweep` and `benchmarks.sm80_pallas` have
# "chunk_rows", and of these only rows with a first chunk in the memory of d_weight have "first_rows". Only rows beside
# matmuls for another GPU (`benchmarks.sm80`) or the choice of the plan have "floor". Elsewhere all three count as None.
KEY = ("shape", "dtype", "targets", "mode", "method", "chunk_rows", "first_rows", "floor")


def git(*arguments: str, root: Path = ROOT) -> str:
    """Returns what a git command prints.

    Raises:
        OSError: there is no git.
        subprocess.CalledProcessError: the command fails.
    """
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def commit(*more: str, root: Path = ROOT) -> str:
    """Returns the checkout's commit, with "-dirty" if measured code differs from it; "unknown" if git cannot tell.

    Args:
        more: paths of measured code besides CODE.
        root: of the checkout.
    """

    try:
        changed = git("status", "--porcelain", "--", *CODE, *more, root=root)
        return git("rev-parse", "HEAD", root=root) + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# What computes the methods of a framework's package: the files that the paths with kernels import, themselves included,
# and the choice of chunks. The public functions and their autograd launch none of their kernels.
KERNELS = {"torch": "core_triton", "jax": "jax_pallas"}
PATHS = ("scaled_exp", "recompute", "stored_logits")
NO_KERNELS = ("token_hook",)  # imported by the paths, but it launches none of their kernels
CHOICES = ("chunk_cost.py", "chunking.py", "float32_tiles.py", "gpus.py")


def source_hash(framework: str, root: Path = ROOT, choices: Sequence[str] = CHOICES) -> str:
    """Returns a hash of the code that decides what a framework's package launches, without comments and docstrings.

    If `choices` contains chunk_cost.py, the hash also covers this framework's coefficients, those of the imported
    package and not of `root`.

    Args:
        framework: torch or jax.
        root: of the checkout.
        choices: files of linear_ce that count.
    """
    files = [*kernel_files(framework, root), *(root / "linear_ce" / name for name in choices)]
    code = file_hash(*files, root=root)
    if "chunk_cost.py" not in choices:
        return code
    # Not at the top: `benchmarks.compare` loads this module together with the linear_ce of an older checkout.
    from linear_ce.cost_coefficients import COEFFICIENTS

    own = {gpu: tuple(found) for (gpu, name), found in COEFFICIENTS.items() if name == framework}
    return short_hash(code, str(sorted(own.items())))


def token_loss_hash(framework: str, sources: str, root: Path = ROOT) -> str:
    """Returns the hash of rows with a token loss: `sources`, and the code of token losses."""
    package = root / KERNELS[framework]
    return short_hash(sources, file_hash(*package.glob("token_*.py"), root=root))


def kernel_files(framework: str, root: Path = ROOT) -> set[Path]:
    """Returns the files of a framework's package that its `PATHS` import, directly or not, and these paths.

    `NO_KERNELS` are left out.
    """
    name = KERNELS[framework]
    found, waiting = set[Path](), {root / name / f"{path}.py" for path in PATHS}
    while waiting:
        file = waiting.pop()
        found.add(file)
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            # `from package import a, b`, or `from package.a import f`
            modules = [one.name for one in node.names] if node.module == name else [_below(name, node.module)]
            paths = {root / name / f"{module}.py" for module in modules if module not in NO_KERNELS}
            waiting |= {path for path in paths if path.exists()} - found
    return found


def _below(package: str, module: str | None) -> str:
    """Returns the name of a module within a package, or "" for another package's."""
    return module.removeprefix(f"{package}.") if module and module.startswith(f"{package}.") else ""


def file_hash(*files: Path, root: Path = ROOT) -> str:
    """Returns a hash of the code of files below `root`, without comments and docstrings."""
    return short_hash(*(part for file in sorted(files) for part in (str(file.relative_to(root)), _code(file))))


def _code(file: Path) -> str:
    if file.suffix != ".py":
        return file.read_text()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def short_hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


SAME_LAUNCHES = ROOT / "benchmarks" / "results" / "same-launches.json"
# What `benchmarks.same_launches` compares: on these GPUs, these methods on bfloat16 inputs of the grid.
COMPARED_GPUS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
COMPARED_METHODS = {"torch": "triton", "jax": "mosaic"}


@cache
def _compared_calls() -> set[tuple[str, str]]:
    return {(shape.name, mode.name) for shape, mode, _ in plan([GRID])}


def compared_call(row: Mapping[str, Any], device: str) -> str | None:
    """Returns the name that `benchmarks.same_launches` has for the call of a row; None if it compares no such call."""
    compared = row.get("method") == COMPARED_METHODS.get(row.get("framework", "")) and row.get("dtype") == "bfloat16"
    if not compared or device not in COMPARED_GPUS or (row.get("shape"), row.get("mode")) not in _compared_calls():
        return None
    return f"{row['shape']}, {row['mode']}, {device}"


def same_code(framework: str, code: str, versions: Mapping[str, str], call: str) -> set[str]:
    """Returns the code hashes that `SAME_LAUNCHES` connects with one for a call, over any number of pairs, and this
    one.

    Another version of a compiler can make different kernels of equal launches, so only pairs of `versions` count.
    """
    pairs = json.loads(SAME_LAUNCHES.read_text()).get(framework, []) if SAME_LAUNCHES.exists() else []
    pairs = [
        pair for pair in pairs if pair["versions"].items() <= versions.items() and call in pair.get("only", [call])
    ]
    sets, found = [{pair["old"], pair["new"]} for pair in pairs], {code}
    for _ in sets:  # a chain has at most as many links as there are pairs
        found = found.union(*(both for both in sets if both & found))
    return found


def recorded_calls(framework: str, code: str, versions: Mapping[str, str]) -> list[str]:
    """Returns the calls that can be compared and have a recorded row of code that launches the same as `code`."""
    calls = set()
    for file in RECORDED.parent.glob(f"*/{framework}-grid.json"):
        content = json.loads(file.read_text())
        for row in content["rows"]:
            call = compared_call(row, content["device"])
            if call and row.get("code_hash") in same_code(framework, code, versions, call):
                calls.add(call)
    return sorted(calls)


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


# Where a method's key in the files is not the name of the package that a reader knows.
SHOWN = {"triton": "core_triton", "mosaic": "jax_pallas", "pallas_triton": "jax_pallas (Triton)"}


def shown(method: str) -> str:
    """Returns the name of a method in tables and pictures."""
    return SHOWN.get(method, method)


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row with None for NaN and infinities, which JSON does not have."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def same_measurement(old: Mapping[str, Any], new: Mapping[str, Any], key: Sequence[str] = KEY) -> bool:
    """Returns whether two rows have the same values of a key. A value that is absent counts as None."""
    return all(old.get(part) == new.get(part) for part in key)


class ResultFile:
    """A file of rows that is rewritten after each row, so that an interrupted run keeps what it has measured.

    Rows of one device under one set of versions belong together: rows of other versions of what they depend on are left
    out, a file of another device is refused. A file may have rows of both frameworks. Every row says which commit it
    was measured on.
    A new row replaces the old one of the same measurement of any commit, except that a method which could not be tried
    replaces no row with a time. A key that a row does not have counts as None.

    Args:
        path: of the JSON file; None keeps the rows in memory only.
        device: name of the device.
        versions: of the framework and of what it stands on.
        commit: of the code that is measured.
        key: the keys of a row that say which measurement it is.

    Raises:
        ValueError: the file's rows are of another device.
    """

    def __init__(
        self,
        path: Path | None,
        device: str,
        versions: Mapping[str, str],
        commit: str,
        key: Sequence[str] = KEY,
    ) -> None:
        self.path, self.key = path, key
        self.head = {"device": device, "versions": dict(versions), "commit": commit, "date": now()}
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            old = json.loads(path.read_text())
            if old["device"] != device:
                raise ValueError(f"--json must name a file of {device}, got {path} of {old['device']}")
            self.rows = [row for row in old["rows"] if same_versions(row, old["versions"], versions)]
            if self.rows:
                self.head["versions"] = old["versions"] | dict(versions)
            if len(self.rows) < len(old["rows"]):
                left_out = len(old["rows"]) - len(self.rows)
                print(f"{path} was of {old['versions']}: {left_out} rows are left out", file=sys.stderr)

    def holds(self, row: Mapping[str, Any], *more: str) -> bool:
        """Returns whether the file has this measurement, with a result, of the same code or of code that launches the
        same.

        Args:
            row: the measurement.
            more: other keys that must be the same.
        """
        codes, call = {row.get("code_hash")}, compared_call(row, self.head["device"])
        if call is not None:
            codes |= same_code(row["framework"], row["code_hash"], self.head["versions"], call)
        key = (*self.key, *more)
        return any(
            old["status"] == "ok" and old.get("code_hash") in codes and same_measurement(old, row, key)
            for old in self.rows
        )

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row, with the commit and date of the run, and writes the file."""
        new = finite({**row, "commit": self.head["commit"], "date": now()})
        same = [old for old in self.rows if same_measurement(old, new, self.key)]
        if new["status"] == "skipped" and any(old["status"] == "ok" for old in same):
            return
        self.rows = [old for old in self.rows if old not in same] + [new]
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.path.with_suffix(".part")
            # Not at the top: `benchmarks.compare` loads this module together with the parity of an older checkout.
            from parity.report import to_json

            scratch.write_text(to_json({**self.head, "rows": self.rows}, allow_nan=False))
            scratch.replace(self.path)


# Packages that only the rows of one host depend on.
HOST_PACKAGES = {"trl": "trl", "tunix": "google-tunix", "maxtext": "maxtext"}


def same_versions(row: Mapping[str, Any], versions: Mapping[str, str], others: Mapping[str, str]) -> bool:
    """Returns whether two sets of versions have the same version of everything that both name and a row depends on."""
    unused = {package for host, package in HOST_PACKAGES.items() if "host" in row and row["host"] != host}
    return all(others.get(name, version) == version for name, version in versions.items() if name not in unused)


def merge(path: Path, others: Sequence[Path], key: Sequence[str] = KEY) -> list[dict[str, Any]]:
    """Merges files of results, such as those of two GPUs of one kind, into one, and returns its rows.

    Of each measurement the newest row stays, with the commit and date that it has; one that failed, or could not be
    tried, replaces none with a time. If the version of one host's package differs, the rows of that host are left out
    that are not of the newest file with this package, and their number is printed.

    Args:
        path: of the file, which need not be there yet.
        others: files to take rows from.
        key: the keys of a row that say which measurement it is.

    Raises:
        ValueError: the files are not of the same device, or their versions of other packages do not agree.
    """
    contents = {file: json.loads(file.read_text()) for file in [*([path] if path.exists() else []), *others]}
    newest = max(contents.values(), key=lambda content: content["date"])
    versions: dict[str, str] = {}
    for content in sorted(contents.values(), key=lambda content: content["date"], reverse=True):
        versions = content["versions"] | versions
    merged = ResultFile(None, newest["device"], versions, newest["commit"], key)
    merged.path, merged.head = path, {**merged.head, "date": newest["date"]}
    for name, content in contents.items():
        others_of = {one: version for one, version in content["versions"].items() if versions[one] != version}
        if content["device"] != newest["device"] or not others_of.keys() <= set(HOST_PACKAGES.values()):
            raise ValueError(f"{name} is of {content['device']}, {content['versions']}, and another is not")
        rows = [row for row in content["rows"] if same_versions(row, content["versions"], versions)]
        if len(rows) < len(content["rows"]):
            print(f"{len(content['rows']) - len(rows)} rows of {others_of} in {name} are left out", file=sys.stderr)
        for row in rows:
            same = [old for old in merged.rows if same_measurement(old, row, key)]
            if any((old["status"] == "ok", old["date"]) > (row["status"] == "ok", row["date"]) for old in same):
                continue
            merged.rows = [old for old in merged.rows if old not in same] + [row]
    merged._write()
    return merged.rows


HEADINGS = (
    *("method", "ms", "p20-p80", "floor ms", "x floor", "p20-p80", "forward", "J"),
    *("peak MiB", "work MiB", "loss", "d_input", "d_weight", "row med", "row p95", "class med", "class p95", ""),
)
WIDTHS = (31, 9, 17, 9, 8, 13, 9, 7, 9, 9, 9, 9, 9, 9, 9, 9, 9, 0)


HOST_HEADINGS = (
    *("method", "host ms", "p20-p80", "total ms", "grad: host", "total", "graph ms", "device ms", "gap ms", "kernels"),
    *("ms/chunk", "above id.", "compile s", ""),
)
HOST_WIDTHS = (31, 9, 17, 9, 10, 9, 9, 9, 9, 8, 9, 9, 9, 0)


def heading(*, host: bool = False) -> str:
    """Returns the heading of the printed table; of host times, or of times and ratios to the floor."""
    return _line(HOST_HEADINGS, HOST_WIDTHS) if host else _line(HEADINGS, WIDTHS)


def line(row: Mapping[str, Any]) -> str:
    """Returns a row of the printed table; a method without a time shows why."""

    def number(key: str, style: str, scale: float = 1.0) -> str:
        value = row.get(key)
        return "-" if value is None else format(value / scale, style)

    if row["status"] != "ok":
        return f"{row['method']:{WIDTHS[0]}} {row['status']}: {row['note']}"
    notable = "not repeatable" if row.get("repeats") is False else ""
    if "host_ms" in row:
        keys = ("total_ms", "grad_host_ms", "grad_total_ms", "graph_ms", "device_ms", "gap_ms")
        compiled = [row[key] for key in ("lower_s", "compile_s") if row.get(key) is not None]
        return _line(
            (
                row["method"],
                number("host_ms", ".3f"),
                f"{number('host_ms_p20', '.3f')}-{number('host_ms_p80', '.3f')}",
                *(number(key, ".3f") for key in keys),
                number("kernels", ".0f"),
                number("chunk_ms", ".3f"),
                number("above_identity_ms", ".3f"),
                f"{sum(compiled):.1f}" if compiled else "-",
                "; ".join(note for note in (notable, row.get("graph_note"), row.get("trace_note")) if note),
            ),
            HOST_WIDTHS,
        )
    return _line(
        (
            row["method"],
            number("ms", ".3f"),
            f"{number('ms_p20', '.3f')}-{number('ms_p80', '.3f')}",
            number("floor_ms", ".3f"),
            number("ratio", ".3f"),
            f"{number('ratio_p20', '.3f')}-{number('ratio_p80', '.3f')}",
            number("forward_ms", ".3f"),
            number("joules", ".2f"),
            number("peak_bytes", ",.0f", 2**20),
            number("workspace_bytes", ",.0f", 2**20),
            number("err_loss", ".1e"),
            number("err_d_input", ".1e"),
            number("err_d_weight", ".1e"),
            *(number(key, ".1e") for key in ROW_ERRORS),
            notable,
        ),
        WIDTHS,
    )


LEAST_MS = 0.005  # of a kernel that is printed


def kernels(row: Mapping[str, Any]) -> str:
    """Returns a table of what a call launches: ms of one call, launches, name."""
    lines = [
        f"  {kernel['ms']:9.3f} ms {kernel['launches']:6.1f} x  {kernel['name'][:80]}"
        for kernel in row["by_kernel"]
        if kernel["ms"] >= LEAST_MS
    ]
    rest = [kernel for kernel in row["by_kernel"] if kernel["ms"] < LEAST_MS]
    total = sum(kernel["ms"] for kernel in row["by_kernel"])
    launches = sum(kernel["launches"] for kernel in row["by_kernel"])
    if rest:
        sums = (sum(kernel[key] for kernel in rest) for key in ("ms", "launches"))
        lines.append("  {:9.3f} ms {:6.1f} x  shorter ones".format(*sums))
    return "\n".join([*lines, f"  {total:9.3f} ms {launches:6.1f} x  all"])


def gaps(row: Mapping[str, Any]) -> str:
    """Returns a table of the longest gaps in which the device does nothing: ms of one call, times, work before and
    after."""
    lines = [
        f"  {gap['ms']:9.3f} ms {gap['times']:6.1f} x  between {gap['after'][:40]} and {gap['before'][:40]}"
        for gap in row["by_gap"]
    ]
    return "\n".join([*lines, f"  {row['gap_ms']:9.3f} ms in all gaps, {row['device_ms']:.3f} ms of work"])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if at == 0 else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return " ".join([first, *rest]).rstrip()
