"""Runs cases of the contract on a backend and prints, one JSON line a case, the percentage of its budget that each
output used.

Run by the tests on a GPU, several processes at a time, for the kernels' compilation is what takes long:
`python run_cases.py BACKEND FIRST STEP [TEXT]` runs every STEP-th case from FIRST on, of those whose name holds TEXT.
`judged_in_processes` does so for all.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from os import environ
from pathlib import Path
from typing import Any

from parity.arrays import make_arrays
from parity.backends import run_case
from parity.cases import select
from parity.expected import expected, judge

PROCESSES = 12  # that compile kernels side by side


def judged_in_processes(backend: str) -> dict[str, dict[str, Any]]:
    """Runs every case, in several processes; returns what each came to by its name."""

    def share(first: int) -> list[dict[str, Any]]:
        command = [sys.executable, __file__, backend, str(first), str(PROCESSES)]
        variables = {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        variables = {**environ, **variables, "PYTHONPATH": str(Path(__file__).parent.parent)}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(PROCESSES) as pool:
        return {result["name"]: result for results in pool.map(share, range(PROCESSES)) for result in results}


def main() -> None:
    backend, first, step, text = (*sys.argv[1:], "")[:4]
    for case in list(select(text))[int(first) :: int(step)]:
        arrays = make_arrays(case)
        result: dict[str, object] = {"name": case.name}
        try:
            outcome = run_case(backend, case, arrays)
        except Exception as failure:  # one failing case must not hide the others
            result["failure"] = f"{type(failure).__name__}: {failure}"
        else:
            judgements = judge(case, expected(case, arrays), outcome.outputs)
            result["used"] = {name: judgement.percent for name, judgement in judgements.items()}
            result["ran"] = [outcome.implementation, outcome.platform]
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
