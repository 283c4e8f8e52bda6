"""Which cases of the table the quick suite runs where a case costs half a second or more.

`python -m parity`, `make test-slow` and the tests of the cheap backend (torch-chunked) run every case.
"""

from collections.abc import Mapping
from functools import cache
from itertools import combinations
from typing import Any, Literal

import pytest

from parity.cases import DTYPE_LABELS, STRATA, Case, cases, stratum_table


def quick_parameters(names: frozenset[str]) -> list[Any]:
    """Returns every case as a parameter of a test, with the mark `slow` unless its name is among `names`."""
    return [pytest.param(case, id=case.name, marks=() if case.name in names else pytest.mark.slow) for case in cases()]


@cache
def quick_names(implementation: Literal["jax-chunked", "torch-triton"]) -> frozenset[str]:
    """Returns the names of `pairwise_names` and of one case of each edge, in the dtype that suits a backend.

    The edges of hidden size 64 are for the kernels of Hopper, which run on a GPU only: two stand for all of them.
    """
    dtype_of = {"jax-chunked": shared_dtype, "torch-triton": interpreted_dtype}[implementation]
    names = set(pairwise_names())
    for edge, variants in edges().items():
        # jax_pallas' own edges (test_jax_pallas_edges.py) are those where nothing in the arrays is special.
        plain = implementation == "jax-chunked" and not (variants[0].poison or variants[0].frozen or "tight" in edge)
        if not plain and ("hidden64" not in edge or edge.endswith(("hidden64", "hidden64-tight"))):
            dtypes = {case.dtype: case.name for case in variants}
            names.add(dtypes.get(dtype_of(variants[0]), variants[0].name))
    return frozenset(names)


def shared_dtype(edge: Case) -> str:
    """One dtype for each reduction: edges that differ only in their arrays' contents share a compiled program."""
    return {"mean": "bfloat16", "sum": "float16", "none": "float32"}[edge.spec.reduction]


def interpreted_dtype(edge: Case) -> str:
    """bfloat16, which has the most kernels, where contents are special; elsewhere the dtype that takes least time."""
    special = edge.poison or edge.logit_std > 2
    return "bfloat16" if special and edge.spec.reduction != "sum" else "float16"


def table_rows() -> list[dict[str, Any]]:
    """Returns the rows of all pairwise tables, in the order of `cases()`, with function, dtype and reduction."""
    rows = []
    for stratum, (function, dtype, reduction) in enumerate(STRATA):
        for row in stratum_table(stratum)[1]:
            rows.append({"function": function, "dtype": dtype, "reduction": reduction, **row})
    return rows


def pairs_of(row: Mapping[str, Any]) -> frozenset[Any]:
    return frozenset(combinations(row.items(), 2))


@cache
def pairwise_names() -> frozenset[str]:
    """Returns the names of few cases that together hold every pair of options that the pairwise tables hold.

    The tables hold every pair for each dtype and reduction. Here function, dtype and reduction are options like others.
    """
    candidates = {case.name: pairs_of(row) for case, row in zip(cases(), table_rows(), strict=False)}
    missing = set().union(*candidates.values())
    chosen = []
    while missing:
        name = max(candidates, key=lambda name: len(candidates[name] & missing))
        chosen.append(name)
        missing -= candidates[name]
    return frozenset(chosen)


def edges() -> dict[str, list[Case]]:
    """Returns the cases of each edge, one for each of its dtypes."""
    found: dict[str, list[Case]] = {}
    for case in cases():
        if case.name.startswith("edge"):
            found.setdefault(case.name.removesuffix(f"-{DTYPE_LABELS[case.dtype]}"), []).append(case)
    return found
