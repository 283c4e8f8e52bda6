"""The comparison of the four curves, and the lines that report it."""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from parity.train.run import CHUNKED, CURVES, KERNELS, Run

# Relative, at each step. Rounding causes 4e-7 to 5e-7 in 50 steps (two cores, eight seeds), and to 2e-6 where
# every gradient is off by a random 3e-6 of its root mean square. Operands rounded to TF32 come to 5e-5.
BOUND = 1e-5


class Difference(NamedTuple):
    """How far two curves are apart."""

    pair: tuple[str, str]
    relative: np.ndarray  # (steps,); inf where a loss is not finite

    @property
    def largest(self) -> float:
        return float(self.relative.max())

    @property
    def step(self) -> int:
        """Where they are furthest apart, counted from 1."""
        return int(self.relative.argmax()) + 1


def differences(runs: Mapping[str, Run]) -> list[Difference]:
    """Returns |a - b| / max(|a|, |b|) at each step of each pair of curves."""
    found = []
    for left, right in itertools.combinations(runs, 2):
        a, b = np.asarray(runs[left].losses), np.asarray(runs[right].losses)
        finite = np.isfinite(a) & np.isfinite(b)
        a, b = np.where(finite, a, 1.0), np.where(finite, b, 1.0)
        apart = np.abs(a - b) / np.maximum(np.maximum(np.abs(a), np.abs(b)), np.finfo(np.float32).tiny)
        found.append(Difference((left, right), np.where(finite, apart, np.inf)))
    return found


def wrong_implementation(name: str, run: Run) -> str:
    """Returns what ran where something else should have; empty if the right thing ran."""
    curve = CURVES[name]
    if not curve.fused:
        return ""
    should = KERNELS.get((curve.framework, run.platform), CHUNKED)
    return "" if run.implementation == should else f"ran {run.implementation!r} on {run.platform} instead of {should!r}"


def failures(outcomes: Mapping[str, Run | str]) -> list[str]:
    """Returns what is wrong with the curves, one sentence each.

    Args:
        outcomes: for each curve its run, or why there is none.
    """
    found = []
    for name, outcome in outcomes.items():
        wrong = outcome if isinstance(outcome, str) else wrong_implementation(name, outcome)
        found += [f"{name}: {wrong}"] * bool(wrong)
    for difference in differences(_ran(outcomes)):
        if not difference.largest <= BOUND:
            first = int(np.argmax(~(difference.relative <= BOUND))) + 1
            found.append(
                f"{' and '.join(difference.pair)} differ by {difference.largest:.1e} at step {difference.step}, "
                f"over {BOUND:.0e} from step {first} on"
            )
    return found


def _ran(outcomes: Mapping[str, Run | str]) -> dict[str, Run]:
    return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Run)}


def fused_losses(outcomes: Mapping[str, Run | str]) -> str:
    """Returns what computed the fused losses, and where, as text."""
    runs = {CURVES[name].framework: run for name, run in _ran(outcomes).items() if CURVES[name].fused}
    return ", ".join(f"{framework} by {run.implementation} on {run.device}" for framework, run in runs.items())


def header() -> str:
    """Returns the line above those of `line`."""
    return f"{'curve':<14} {'loss by':<14} {'platform':<9} {'seconds':>7}  device"


def line(name: str, outcome: Run | str) -> str:
    """Returns one curve's outcome as text."""
    if isinstance(outcome, str):
        return f"{name:<14} {'-':<14} {'-':<9} {'-':>7}  {outcome}   <-- FAILS"
    mark = "   <-- FAILS" if wrong_implementation(name, outcome) else ""
    run = outcome
    return f"{name:<14} {run.implementation:<14} {run.platform:<9} {run.seconds:>7.1f}  {run.device}{mark}"


def table(outcomes: Mapping[str, Run | str]) -> list[str]:
    """Returns a table of the losses of every step, with the largest relative difference of any two."""
    runs = _ran(outcomes)
    columns = np.asarray([run.losses for run in runs.values()])  # (curves, steps)
    apart = np.max([difference.relative for difference in differences(runs)], axis=0)  # (steps,)
    lines = [f"{'step':>5}{''.join(f'{name:>15}' for name in runs)}{'difference':>13}"]
    for step, losses in enumerate(columns.T):
        mark = "" if apart[step] <= BOUND else "   <-- FAILS"
        lines.append(f"{step + 1:>5}{''.join(f'{loss:>15.7f}' for loss in losses)}{apart[step]:>13.1e}{mark}")
    return lines


def pair_lines(outcomes: Mapping[str, Run | str]) -> list[str]:
    """Returns the largest difference of each pair."""
    return [f"{' and '.join(d.pair):<31} {d.largest:>8.1e} at step {d.step}" for d in differences(_ran(outcomes))]
