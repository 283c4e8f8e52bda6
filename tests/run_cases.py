"""Runs cases of the contract on a backend and prints one JSON line per case, with the percentage of its budget that
each output used: `python run_cases.py BACKEND NAME...`. Tests on a GPU run several such programs in parallel."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from programs import Command, python

from parity.arrays import make_arrays
from parity.backends import run_case
from parity.cases import Case, cases
from parity.expected import compare, expected


def commands(backend: str, shares: Iterable[Sequence[Case]]) -> dict[str, Command]:
    """Returns a dict from case names to the programs that run them, one program for each share of the cases."""
    found: dict[str, Command] = {}
    for share in shares:
        names = [case.name for case in share]
        found |= dict.fromkeys(names, python("run_cases.py", backend, *names))
    return found


def assert_passed(result: dict[str, Any], ran: tuple[str, str]) -> None:
    """Fails if a case failed, exceeded a budget, or ran on another (implementation, platform) than `ran`."""
    assert "failure" not in result, result["failure"]
    assert result["ran"] == [*ran]
    used = ", ".join(f"{output} {share:.0f}%" for output, share in result["used"].items())
    assert all(share <= 100 for share in result["used"].values()), f"{result['name']} used of its budget: {used}"


def main() -> None:
    backend, *names = sys.argv[1:]
    by_name = {case.name: case for case in cases()}
    for case in map(by_name.__getitem__, names):
        arrays = make_arrays(case)
        result: dict[str, object] = {"name": case.name}
        try:
            outcome = run_case(backend, case, arrays)
        except Exception as failure:  # one failing case must not hide the others
            result["failure"] = f"{type(failure).__name__}: {failure}"
        else:
            comparisons = compare(case, expected(case, arrays), outcome.outputs)
            result["used"] = {name: comparison.percent for name, comparison in comparisons.items()}
            result["ran"] = [outcome.implementation, outcome.platform]
        print(json.dumps(result), flush=True)
    # Without the interpreter's shutdown: a thread of autograd that asks for Python's lock during it aborts the process
    # (pytorch/pytorch#38228).
    os._exit(0)


if __name__ == "__main__":
    main()
