"""Selects the cases that the quick suite runs on backends that take half a second or more per case.

`python -m parity` and `make test-slow` run every case. `common_names` are those of what takes milliseconds per case.
"""

from collections.abc import Mapping
from functools import cache
from itertools import combinations
from typing import Any, Literal

import pytest

from parity.cases import DTYPE_LABELS, STRATA, Case, cases, stratum_table, token_loss_table

FEW_OF_NONE = ("target_range-none", "nan_masked-none", "tight-none")

# The edge cases that jax_pallas runs. Each is compiled separately. test_jax_pallas_edges.py tests the other special
# values, test_jax_pallas_transforms.py tests frozen arguments, and tight budgets are an option of the tables.
# test_jax_pallas_grad_into.py has unreduced losses, and test_jax_pallas_head_precision.py has split heads.
OF_JAX = (
    "grad_into-options",
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


# The edge cases of token losses that backends with kernels or compiled programs run. Tests of token losses have more.
OF_TOKEN_LOSSES = (
    *("token_loss-nan_ignored-mean", "token_loss-target_range-mean", "token_loss-tight-mean"),
    *("token_loss-stats-tight", "token_loss-stats-poisons", "token_loss-stats-logits80"),
)

# The edge cases of saved rows that the interpreted kernels run. tests/test_*_saved.py have more.
OF_SAVED_ROWS = ("saved", "saved-nan", "saved-part", "log_probs-saved-logits80")

# test_jax_pallas_token_loss.py has several chunks, rows of NaN that do not count, and targets that are no classes.
TOKEN_LOSSES_OF_JAX = tuple(name for name in OF_TOKEN_LOSSES if name.startswith("token_loss-stats"))

# Cases with sharp logits: one computes gradients in the forward pass, the others in the backward pass. The standard
# deviations of those in bfloat16 differ.
QUICK_SHARP = frozenset(
    {
        "sharp8-mean-bf16-n123",
        "sharp3.5-none-bf16-padded-bias-axis1-tight-nostats-n123",
        "sharp3.5-none-fp16-bias-axis1-tight-nostats-smoothing-n50",
    }
)


def quick_parameters(names: frozenset[str]) -> list[Any]:
    """Returns every case as a test parameter, marked `slow` unless its name is in `names`."""
    return [pytest.param(case, id=case.name, marks=() if case.name in names else pytest.mark.slow) for case in cases()]


@cache
def quick_names(implementation: Literal["jax-chunked", "torch-triton"]) -> frozenset[str]:
    """Returns the quick cases of the tables, and one case of each edge in the dtype that suits the backend."""
    dtype_of = {"jax-chunked": shared_dtype, "torch-triton": interpreted_dtype}[implementation]
    names = {
        *pairwise_names("all" if implementation == "torch-triton" else "strata"),
        *QUICK_SHARP,
        *token_loss_names(),
    }
    for edge, variants in edges().items():
        if not is_left_out(implementation, edge):
            dtypes = {case.dtype: case.name for case in variants}
            names.add(dtypes.get(dtype_of(variants[0]), variants[0].name))
    return frozenset(names)


def is_left_out(implementation: str, edge: str) -> bool:
    """Returns whether the quick suite omits an edge because another case covers it."""
    if "token_loss" in edge:
        quick = TOKEN_LOSSES_OF_JAX if implementation == "jax-chunked" else OF_TOKEN_LOSSES
        return edge.removeprefix("edge-") not in quick
    if "saved" in edge:
        return implementation == "jax-chunked" or edge.removeprefix("edge-") not in OF_SAVED_ROWS
    if "hidden64" in edge:  # for the Hopper kernels, which run only on a GPU
        return implementation == "jax-chunked" or not edge.endswith("hidden64")
    if implementation == "jax-chunked":
        return edge.removeprefix("edge-") not in OF_JAX
    # If a mean has the same contents, a few of the unreduced losses represent all of them.
    mean = edge.removesuffix("none") + "mean"
    return edge.endswith("-none") and mean in edges() and not edge.endswith(FEW_OF_NONE)


def shared_dtype(edge: Case) -> str:
    """One dtype per reduction, so that edges that differ only in their values share a compiled program."""
    return {"mean": "bfloat16", "sum": "float16", "none": "float32"}[edge.spec.reduction]


def interpreted_dtype(edge: Case) -> str:
    """bfloat16, which has the most kernels, if values are special, and otherwise the dtype that takes least time."""
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
    """Returns the names of a few cases that together contain every pair of options in the pairwise tables.

    The tables contain every pair for each dtype and reduction. Here function, dtype and reduction are options like the
    others. With "strata", only pairs that include one of these three count.
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


@cache
def token_loss_names() -> frozenset[str]:
    """Returns the names of a few cases that together have every value of every factor of token losses, and every
    reduction in every dtype."""
    tables = [case.name for case in cases() if case.name.startswith("token_loss")]
    values: dict[str, set[Any]] = {
        name: {*row.items(), (row["dtype"], row["reduction"])}
        for name, row in zip(tables, token_loss_table(), strict=True)
    }
    missing, chosen = set[Any]().union(*values.values()), []
    while missing:
        chosen.append(max(values, key=lambda name: len(values[name] & missing)))
        missing -= values[chosen[-1]]
    return frozenset(chosen)


@cache
def common_names() -> frozenset[str]:
    """Returns the names of the cases that every pair of options needs, of all token losses and, in rotation, of one
    dtype for each edge."""
    token_losses = {case.name for case in cases() if case.name.startswith("token_loss")}
    of_edges = {variants[number % len(variants)].name for number, variants in enumerate(edges().values())}
    return pairwise_names() | QUICK_SHARP | token_losses | of_edges


def edges() -> dict[str, list[Case]]:
    """Returns the cases of each edge, one for each of its dtypes."""
    found: dict[str, list[Case]] = {}
    for case in cases():
        if case.name.startswith("edge"):
            found.setdefault(case.name.removesuffix(f"-{DTYPE_LABELS[case.dtype]}"), []).append(case)
    return found
