"""Selects the cases of the table that the quick suite runs where a case takes half a second or more.

`python -m parity`, `make test-slow` and the tests of the cheap backend (torch-chunked) run every case.
"""

from collections.abc import Mapping
from functools import cache
from itertools import combinations
from typing import Any, Literal

import pytest

from parity.cases import DTYPE_LABELS, STRATA, Case, cases, stratum_table

FEW_OF_NONE = ("target_range-none", "nan_masked-none", "tight-none")

# The edge cases that jax_pallas runs: each is compiled separately. test_jax_pallas_edges.py tests the other edges that
# are about values, test_jax_pallas_transforms.py tests frozen arguments, and tight budgets are an option of the tables.
OF_JAX = (
    "log_probs-frozen_input",
    "log_probs-masked_target",
    "log_probs-nan_ignored",
    "log_probs-nan_input",
    "log_probs-target_range",
    "masked_target-mean",
    "masked_vocabulary-tight",
    "nan_ignored-mean",
    "nan_masked-none",
    "nan_padding-mean",
    "no_gradient-mean",
    "target_range-weight",
)


# Of the cases of sharp logits: gradients made in the forward pass and in the backward pass, one for each deviation.
QUICK_SHARP = frozenset({"sharp8-mean-bf16-n123", "sharp3.5-none-bf16-padded-bias-axis1-tight-nostats-n123"})


def quick_parameters(names: frozenset[str]) -> list[Any]:
    """Returns every case as a parameter of a test, with the mark `slow` unless its name is among `names`."""
    return [pytest.param(case, id=case.name, marks=() if case.name in names else pytest.mark.slow) for case in cases()]


@cache
def quick_names(implementation: Literal["jax-chunked", "torch-triton"]) -> frozenset[str]:
    """Returns the names of `pairwise_names`, QUICK_SHARP, one case of each edge in the dtype that suits a backend."""
    dtype_of = {"jax-chunked": shared_dtype, "torch-triton": interpreted_dtype}[implementation]
    names = {*pairwise_names("all" if implementation == "torch-triton" else "strata"), *QUICK_SHARP}
    for edge, variants in edges().items():
        if not is_left_out(implementation, edge):
            dtypes = {case.dtype: case.name for case in variants}
            names.add(dtypes.get(dtype_of(variants[0]), variants[0].name))
    return frozenset(names)


def is_left_out(implementation: str, edge: str) -> bool:
    """Returns whether the quick suite has no case of an edge, for another has what is special about it."""
    if "hidden64" in edge:  # for the kernels of Hopper, which run on a GPU only
        return implementation == "jax-chunked" or not edge.endswith("hidden64")
    if implementation == "jax-chunked":
        return edge.removeprefix("edge-") not in OF_JAX
    # Where a mean has the same contents, a few of its losses not reduced stand for all.
    mean = edge.removesuffix("none") + "mean"
    return edge.endswith("-none") and mean in edges() and not edge.endswith(FEW_OF_NONE)


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


STRATUM = {"function", "dtype", "reduction"}


@cache
def pairwise_names(among: Literal["all", "strata"] = "all") -> frozenset[str]:
    """Returns the names of few cases that together hold every pair of options that the pairwise tables hold.

    The tables hold every pair for each dtype and reduction. Here function, dtype and reduction are options like others;
    among the strata only pairs count that have one of these three.
    """
    candidates = {case.name: pairs_of(row) for case, row in zip(cases(), table_rows(), strict=False)}
    if among == "strata":
        candidates = {
            name: frozenset(pair for pair in pairs if STRATUM & {option for option, _ in pair})
            for name, pairs in candidates.items()
        }
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
