"""Tables in which every pair of values of any two factors occurs together at least once."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

_CANDIDATES = 24  # drafts per row, of which the one with most new pairs is kept; more shortens the tables by under 3%


def pairs(factors: Mapping[str, Sequence[Any]]) -> Iterator[frozenset[tuple[str, int]]]:
    """Yields every pair of (factor, index of its value) of two different factors."""
    for left, right in combinations(factors, 2):
        for i, j in product(range(len(factors[left])), range(len(factors[right]))):
            yield frozenset(((left, i), (right, j)))


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Returns rows of one value per factor that hold every pair of values, by greedy choice; the same for a seed.

    Args:
        factors: two or more factors with the values each may take.
        seed: of the drafts that the greedy choice is made from.

    Returns:
        The rows, the first of them made of every factor's first value.

    Example:
        >>> len(pairwise({"a": [0, 1], "b": [0, 1], "c": [0, 1]})) < 8
        True
    """
    rng = np.random.default_rng(seed)
    names = list(factors)
    missing = dict.fromkeys(pairs(factors))  # a dict keeps its order: sets of strings would vary from run to run
    rows = [dict.fromkeys(names, 0)]
    _strike(missing, rows[0])
    while missing:
        drafts = [_draft(factors, names, missing, rng) for _ in range(_CANDIDATES)]
        rows.append(max(drafts, key=lambda row: sum(pair in missing for pair in _pairs_of(row))))
        _strike(missing, rows[-1])
    return [{name: factors[name][index] for name, index in row.items()} for row in rows]


def _pairs_of(row: Mapping[str, int]) -> Iterator[frozenset[tuple[str, int]]]:
    return (frozenset(pair) for pair in combinations(row.items(), 2))


def _strike(missing: dict[frozenset[tuple[str, int]], None], row: Mapping[str, int]) -> None:
    for pair in _pairs_of(row):
        missing.pop(pair, None)


def _draft(
    factors: Mapping[str, Sequence[Any]],
    names: list[str],
    missing: Mapping[frozenset[tuple[str, int]], None],
    rng: np.random.Generator,
) -> dict[str, int]:
    """Returns a row that holds the first missing pair; its other factors follow in random order, each greedily."""
    fixed = dict(next(iter(missing)))
    for name in (names[i] for i in rng.permutation(len(names))):
        if name in fixed:
            continue
        gains = [
            sum(frozenset(((name, value), other)) in missing for other in fixed.items())
            for value in range(len(factors[name]))
        ]
        best = [value for value, gain in enumerate(gains) if gain == max(gains)]
        fixed[name] = best[rng.integers(len(best))]
    return {name: fixed[name] for name in names}
