"""The chunk row counts that the loss can use, and how a measurement makes it use one of them.

The packages have no argument for it. They choose the chunks for which `chunk_cost.call_ms` is least, so a measurement
replaces that function while plans are made, and forgets the plans before and after.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from linear_ce import chunk_cost
from linear_ce.chunk_cost import Call, Chunk
from linear_ce.cost_coefficients import CostCoefficients

FAR = 1e6  # ms for each row that a choice is away from the wanted one: more than any estimate

Estimate = Callable[[Call, Chunk, Chunk], float]


class Division(NamedTuple):
    """Rows of the chunks of a call, and of its first chunk if that is in the memory of d_weight, else 0."""

    rows: int
    first_rows: int = 0

    def __str__(self) -> str:
        return f"{self.first_rows} rows, then {self.rows}" if self.first_rows else f"{self.rows} rows"

    @staticmethod
    def of_plan(plan: Any) -> "Division":
        return Division(plan.chunks.rows, plan.chunks.first_rows)

    @staticmethod
    def of_row(row: Mapping[str, Any]) -> "Division":
        """Returns the division of a row of results, which has "first_rows" only for such a first chunk."""
        return Division(row["chunk_rows"], row.get("first_rows") or 0)


class Choice(NamedTuple):
    """One way to divide a call: what `chunk_cost.call_ms` estimates the time of."""

    call: Call
    chunk: Chunk
    last: Chunk

    @property
    def rows(self) -> int:
        return self.chunk.rows

    @property
    def division(self) -> Division:
        return Division(self.rows, self.last.rows if self.last.pieces else 0)

    @property
    def chunks(self) -> int:
        first = self.division.first_rows
        return (first > 0) + chunk_cost.cdiv(self.call.tokens - first, self.rows)

    def ms(self, coefficients: CostCoefficients | None = None) -> float:
        """Returns the estimate, with other coefficients than those of the plan if given."""
        call = self.call if coefficients is None else self.call._replace(coefficients=coefficients)
        return chunk_cost.call_ms(call, self.chunk, self.last)


def forget_plans() -> None:
    """Forgets all plans, and what core_triton recorded with them."""
    for name in ("core_triton.plan", "jax_pallas.plan"):
        if name in sys.modules:
            sys.modules[name].make_plan.cache_clear()
    if "core_triton.replay" in sys.modules:
        sys.modules["core_triton.replay"]._recordings.clear()


def forget_traces() -> None:
    """Forgets what JAX traced, and so the plans that are in it."""
    if "jax_pallas.plan" in sys.modules:
        sys.modules["jax"].clear_caches()


@contextmanager
def estimating(estimate: Estimate) -> Iterator[None]:
    """Makes plans with another estimate."""
    usual = chunk_cost.call_ms
    forget_plans()
    chunk_cost.call_ms = estimate
    try:
        yield
    finally:
        chunk_cost.call_ms = usual
        forget_plans()


@contextmanager
def preferring(rows: int, *, traces: bool = True) -> Iterator[None]:
    """Makes plans with equal chunks of `rows` rows, or, where none of that many fit, of as many as come nearest.

    Args:
        rows: of a chunk.
        traces: JAX traces all programs again, inside and afterwards. Without it, only plans are made again.
    """
    usual = chunk_cost.call_ms

    def estimate(call: Call, chunk: Chunk, last: Chunk) -> float:
        return FAR * (abs(chunk.rows - rows) + bool(last.pieces)) + usual(call, chunk, last)

    with estimating(estimate):
        if traces:
            forget_traces()
        try:
            yield
        finally:
            if traces:
                forget_traces()


def fewest_rows(make: Callable[[], Any]) -> int:
    """Returns the rows of the chunks that a plan has if the fewest chunks win, not the cheapest.

    Args:
        make: makes one plan, whose package is imported, and returns it.
    """
    configs: list[Any] = [
        sys.modules[name] for name in ("core_triton.tile_config", "jax_pallas.tile_config") if name in sys.modules
    ]
    usual = [module.choose_scaled_exp for module in configs]
    forget_plans()
    try:
        for module, choose in zip(configs, usual, strict=True):
            module.choose_scaled_exp = partial(_without_estimate, choose)
        return make().chunks.rows
    finally:
        for module, choose in zip(configs, usual, strict=True):
            module.choose_scaled_exp = choose
        forget_plans()


def _without_estimate(choose: Callable[..., Any], **options: Any) -> Any:
    return choose(**options | {"call": None})


def considered(make: Callable[[], Any], rows: int | None = None) -> list[Choice]:
    """Returns the equal chunks that `make` considers while it makes a plan: the cheapest of each row count, cheapest
    first.

    It is empty if the plan does not store exponentials, so that the estimate was not asked.

    Args:
        make: makes one plan.
        rows: the plan prefers chunks of so many rows; None: the cheapest.
    """
    return sorted((choice for choice in _estimated(make, rows) if not choice.last.pieces), key=Choice.ms)


def first_chunk(make: Callable[[], Any]) -> Choice | None:
    """Returns the choice of a plan with a first chunk in the memory of d_weight; None if its chunks are equal.

    Args:
        make: makes the plan.
    """
    choices, made = _estimated(make), make()
    if not choices or not made.chunks.first_rows:
        return None
    return next(choice for choice in choices if choice.division == Division.of_plan(made))


def _estimated(make: Callable[[], Any], rows: int | None = None) -> list[Choice]:
    """Returns the cheapest choice of each division that `make` estimates, as `considered`."""
    found: dict[Division, tuple[float, Choice]] = {}

    def note(call: Call, chunk: Chunk, last: Chunk) -> float:
        choice, ms = Choice(call, chunk, last), usual(call, chunk, last)
        if choice.division not in found or ms < found[choice.division][0]:
            found[choice.division] = ms, choice
        return ms + (0 if rows is None else FAR * (abs(chunk.rows - rows) + bool(last.pieces)))

    usual = chunk_cost.call_ms
    with estimating(note):
        make()
    return [choice for _, choice in found.values()]
