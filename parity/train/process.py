"""The process of one framework: `python -m parity.train.process FRAMEWORK --folder FOLDER`.

It reads the problem from FOLDER/problem.npz, runs that framework's curves, writes the losses of each as .npz, and says
so in one line of JSON each on standard output.
"""

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from linear_ce.children import started_without_interrupts
from parity.train import jax_run, torch_run
from parity.train.problem import Problem, load, save
from parity.train.run import CURVES, Run

RUNNERS = {"torch": torch_run.train, "jax": jax_run.train}


def run_all(problem: Problem, folder: Path) -> Iterator[tuple[str, Run | str]]:
    """Runs all curves, each framework in a separate process, both at once.

    Args:
        problem: what is trained.
        folder: where the .npz files may go.

    Yields:
        (name of the curve, its run or why there is none), in the order of `CURVES`.
    """
    save(problem, folder / "problem.npz")
    # Both frameworks may share one GPU: JAX must not take its memory ahead of need.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
    with started_without_interrupts():
        processes = {
            framework: subprocess.Popen(
                [sys.executable, "-m", "parity.train.process", framework, "--folder", str(folder)],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for framework in RUNNERS
        }
    try:
        for name, curve in CURVES.items():
            process = processes[curve.framework]
            assert process.stdout is not None
            text = process.stdout.readline()
            if not text:
                yield name, f"its process ended with status {process.wait()}"
                continue
            outcome = json.loads(text)
            assert outcome.pop("curve") == name
            if "failure" in outcome:
                yield name, outcome["failure"]
                continue
            with np.load(folder / f"{name}.npz") as file:
                yield name, Run(losses=file["losses"].tolist(), **outcome)
    finally:
        for process in processes.values():
            assert process.stdout is not None
            process.stdout.close()
            process.terminate()
            process.wait()


def main(arguments: list[str] | None = None) -> None:
    """Runs the curves of one framework; one line of JSON for each."""
    parser = argparse.ArgumentParser(prog="python -m parity.train.process", description=main.__doc__)
    parser.add_argument("framework", choices=RUNNERS)
    parser.add_argument("--folder", type=Path, required=True, help="where problem.npz is and the losses go")
    options = parser.parse_args(arguments)
    problem = load(options.folder / "problem.npz")
    for name, curve in CURVES.items():
        if curve.framework != options.framework:
            continue
        try:
            run = RUNNERS[curve.framework](problem, fused=curve.fused)
        except Exception as failure:  # one failing curve must not hide the other
            traceback.print_exc(file=sys.stderr)
            line = {"failure": f"{type(failure).__name__}: {failure}".splitlines()[0]}
        else:
            np.savez(options.folder / f"{name}.npz", losses=np.asarray(run.losses))
            line = {field: value for field, value in run._asdict().items() if field != "losses"}
        print(json.dumps({"curve": name} | line), flush=True)


if __name__ == "__main__":
    main()
