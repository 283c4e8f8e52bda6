"""Tables in which every pair of values of any two factors occurs together at least once."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

Value = tuple[str, int]  # a factor and the index of its value

_CANDIDATES = 24  # drafts per row, of which the one with most new pairs is kept; more shortens the tables by under 3%


def pairs(factors: Mapping[str, Sequence[Any]]) -> Iterator[frozenset[Value]]:
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
    values = [(name, index) for name in factors for index in range(len(factors[name]))]
    bit = {value: 1 << place for place, value in enumerate(values)}
    missing = dict.fromkeys(values, 0)  # of each value, the bits of those that it has yet to meet
    for one, other in pairs(factors):
        missing[one] |= bit[other]
        missing[other] |= bit[one]
    rows = [dict.fromkeys(factors, 0)]
    _strike(missing, bit, rows[0])
    for one, other in pairs(factors):
        if missing[one] & bit[other]:
            drafts = [_draft(factors, dict((one, other)), missing, bit, rng) for _ in range(_CANDIDATES)]
            rows.append(max(drafts, key=lambda row: _new_pairs(missing, bit, row)))
            _strike(missing, bit, rows[-1])
    return [{name: factors[name][index] for name, index in row.items()} for row in rows]


def _bits(bit: Mapping[Value, int], row: Mapping[str, int]) -> int:
    """Returns a row as a set of bits, one for each of its values."""
    return sum(map(bit.__getitem__, row.items()))


def _new_pairs(missing: Mapping[Value, int], bit: Mapping[Value, int], row: Mapping[str, int]) -> int:
    """Returns twice the number of pairs in a row that no row has yet."""
    bits = _bits(bit, row)
    return sum((missing[value] & bits).bit_count() for value in row.items())


def _strike(missing: dict[Value, int], bit: Mapping[Value, int], row: Mapping[str, int]) -> None:
    """Takes a row's pairs from those that are missing."""
    bits = _bits(bit, row)
    for value in row.items():
        missing[value] &= ~bits


def _draft(
    factors: Mapping[str, Sequence[Any]],
    required: Mapping[str, int],
    missing: Mapping[Value, int],
    bit: Mapping[Value, int],
    rng: np.random.Generator,
) -> dict[str, int]:
    """Returns a row with the required levels. The other factors are chosen greedily, in random order."""
    names, fixed, bits = list(factors), dict(required), _bits(bit, required)
    for name in (names[i] for i in rng.permutation(len(names))):
        if name in fixed:
            continue
        gains = [(missing[name, index] & bits).bit_count() for index in range(len(factors[name]))]
        best = [index for index, gain in enumerate(gains) if gain == max(gains)]
        fixed[name] = best[rng.integers(len(best))]
        bits |= bit[name, fixed[name]]
    return {name: fixed[name] for name in names}
