"""`python -m parity train`: one training run in PyTorch and in JAX, with the fused loss and with the logits.

The same weights and batches, the same AdamW: the four loss curves must agree at every step. Each framework runs in a
separate process. Exits with status 1 if two curves disagree, a run fails, or a fused loss ran another
implementation than it should on this machine.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parity import report
from parity.backends import installed
from parity.train import compare, picture
from parity.train.problem import Setup, make_problem
from parity.train.process import run_all
from parity.train.run import Run

NEEDED = {"torch": "PyTorch", "jax": "JAX", "flax": "Flax", "optax": "Optax"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    options = _parse(arguments)
    wrong = _obstacle(options)
    if wrong:
        print(wrong, file=sys.stderr)
        return 1
    start = time.perf_counter()
    setup = _setup(options)
    problem = make_problem(setup)
    parameters = sum(weight.size for weight in problem.weights.values())
    title = f"{setup.steps} steps of AdamW, {parameters:,} parameters, float32, seed {setup.seed}"
    print(f"{title}\n\n{compare.header()}", flush=True)
    outcomes: dict[str, Run | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, outcome in run_all(problem, Path(folder)):
            outcomes[name] = outcome
            print(compare.line(name, outcome), flush=True)
    runs = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Run)}
    if len(runs) > 1:
        print("\nLosses, and the largest relative difference of any two\n")
        print("\n".join(compare.table(outcomes)))
        print("\nLargest relative difference of each pair\n")
        print("\n".join(compare.pair_lines(outcomes)))
    failures = compare.failures(outcomes)
    print(f"\n{time.perf_counter() - start:.0f} s")
    for failure in failures:
        print(f"FAIL {failure}")
    if not failures:
        print(f"all four curves agree within {compare.BOUND:.0e} at each step; fused: {compare.fused_losses(outcomes)}")
    if options.json:
        packages = ("torch", "triton", "jax", "jaxlib", "flax", "optax", "numpy")
        report.write(options.json, _document(setup, outcomes, failures), packages)
    if options.plot and runs:
        picture.draw(options.plot, runs, title)
    return 1 if failures else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m parity train",
        description="Trains a small decoder in PyTorch and in JAX, each with the fused loss and with materialized "
        "logits, from the same weights on the same batches in float32, and compares the four losses of every step: "
        f"they must agree within {compare.BOUND:.0e}. On a GPU the fused losses run the kernels, by name.",
    )
    parser.add_argument("--steps", type=int, default=Setup.steps, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches; default: %(default)s")
    parser.add_argument("--tied", action="store_true", help="the embedding's rows are the head's, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all losses and differences there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curves and their differences there")
    return parser.parse_args(arguments)


def _setup(options: argparse.Namespace) -> Setup:
    return Setup(steps=options.steps, seed=options.seed, tie_embeddings=options.tied)


def _obstacle(options: argparse.Namespace) -> str:
    """Returns what stands against the run, naming the option; empty if nothing does."""
    try:
        _setup(options)
    except ValueError as error:
        return f"--{error}"  # fields have the options' names
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if wrong := report.file_obstacle(option, path):
            return wrong
    if options.plot and options.plot.suffix != ".png":
        return f"--plot must end in .png, got {options.plot}"
    if options.plot and not installed("matplotlib"):
        return "--plot needs Matplotlib, which is not installed"
    missing = [title for package, title in NEEDED.items() if not installed(package)]
    return f"training needs {', '.join(NEEDED.values())}; not installed: {', '.join(missing)}" if missing else ""


def _document(setup: Setup, outcomes: dict[str, Run | str], failures: list[str]) -> dict[str, Any]:
    runs = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Run)}
    return {
        "setup": asdict(setup),
        "bound": compare.BOUND,
        "curves": {
            name: run._asdict() | {"losses": [_finite(loss) for loss in run.losses]} for name, run in runs.items()
        },
        "pairs": [
            {"pair": difference.pair, "largest": _finite(difference.largest), "step": difference.step}
            for difference in compare.differences(runs)
        ],
        "failures": failures,
    }


def _finite(value: float) -> float | None:
    """Returns what JSON has a number for."""
    return value if math.isfinite(value) else None
