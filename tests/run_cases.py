"""Runs cases of the contract through the Triton kernels and prints, one JSON line a case, the percentage of its budget
that each output used.

Run by test_core_triton_gpu.py, several processes at a time, for the kernels' compilation is what takes long:
`python run_cases.py FIRST STEP [TEXT]` runs every STEP-th case from FIRST on, of those whose name holds TEXT.
"""

import json
import sys

from parity.arrays import make_arrays
from parity.backends import run_case
from parity.cases import select
from parity.expected import expected, judge


def main() -> None:
    first, step, text = (*sys.argv[1:], "")[:3]
    for case in list(select(text))[int(first) :: int(step)]:
        arrays = make_arrays(case)
        result: dict[str, object] = {"name": case.name}
        try:
            outcome = run_case("torch-triton", case, arrays)
        except Exception as failure:  # one failing case must not hide the others
            result["failure"] = f"{type(failure).__name__}: {failure}"
        else:
            judgements = judge(case, expected(case, arrays), outcome.outputs)
            result["used"] = {name: judgement.percent for name, judgement in judgements.items()}
            result["ran"] = [outcome.implementation, outcome.platform]
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
