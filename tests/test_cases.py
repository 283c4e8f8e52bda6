"""Tests the table of cases: what it covers, and whether its arrays match their description."""

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
from assertions import expected_of
from quick_cases import QUICK_SHARP, common_names, quick_parameters

from linear_ce.reference import reference_log_probs
from linear_ce.rounding import round_to
from linear_ce.spec import FLOAT_DTYPES
from parity.arrays import make_arrays
from parity.cases import (
    POISONS,
    SHAPES,
    STRATA,
    TOKEN_LOSS_FACTORS,
    Case,
    cases,
    exhaustive_cases,
    select,
    sharp_cases,
    stratum_table,
    token_loss_table,
)
from parity.expected import outputs_of
from parity.pairwise import pairs, pairwise
from parity.token_losses import FORMS


def test_there_are_about_380_cases_of_distinct_names() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    assert 330 <= len(names) <= 430


def test_exhaustive_names_are_distinct_and_hold_the_edges() -> None:
    names = [case.name for case in exhaustive_cases()]
    assert len(set(names)) == len(names) > 5000
    assert {case.name for case in cases() if case.name.startswith("edge")} <= set(names)


@pytest.mark.parametrize(
    ("factors", "rows"),
    [*map(stratum_table, range(len(STRATA))), (TOKEN_LOSS_FACTORS, token_loss_table())],
    ids=[*("-".join(stratum) for stratum in STRATA), "token_loss"],
)
def test_every_pair_of_options_occurs(factors: dict[str, tuple[Any, ...]], rows: list[dict[str, Any]]) -> None:
    covered = {
        frozenset(((a, factors[a].index(row[a])), (b, factors[b].index(row[b]))))
        for row in rows
        for a in factors
        for b in factors
        if a < b
    }
    assert covered == set(pairs(factors))


def test_sharp_cases_have_every_pair_of_options_and_few_likely_classes() -> None:
    rows = [(case, make_arrays(case)) for case in sharp_cases()]
    assert {case.name for case, _ in rows} >= QUICK_SHARP
    for dtype, std, shape in product(("bfloat16", "float32"), (3.5, 8.0), SHAPES):
        assert any((case.dtype, case.logit_std, case.lead) == (dtype, std, shape[0]) for case, _ in rows)
    for case, arrays in rows:
        assert len(np.unique(arrays["target"])) == 1
        logits = arrays["input"].reshape(case.n, -1) @ arrays["linear_weight"].T
        assert np.std(logits) == pytest.approx(case.logit_std, rel=0.1)
        assert case.checks_rows
    assert not any(case.checks_rows for case in cases() if not case.name.startswith("sharp"))


def test_token_losses_have_clipped_tokens_but_no_ratio_near_a_bound() -> None:
    for case in cases():
        if "old_log_prob" not in case.per_token or case.n < 50 or case.ignored == "all":
            continue
        arrays, form = make_arrays(case), FORMS[case.token_loss]
        head = round_to(arrays["linear_weight"], case.dtype)
        bias = arrays.get("linear_bias")
        log_prob = reference_log_probs(
            arrays["input"], head, arrays["target"], linear_bias=bias, spec=case.spec
        ).log_prob
        with np.errstate(invalid="ignore"):
            ratio = np.exp(log_prob - arrays["old_log_prob"])
        for bound in form.clip_bounds:
            beyond = (ratio > bound) == (bound > 1)
            assert bound == 0 or beyond.sum() >= 3
            assert not (abs(ratio - bound) < 1e-3).any(), case.name


def test_pairwise_repeats_and_is_shorter_than_the_product() -> None:
    factors = {"a": (0, 1, 2), "b": "xy", "c": (None, 1.5), "d": (False, True)}
    assert pairwise(factors, seed=3) == pairwise(factors, seed=3)
    assert len(pairwise(factors)) <= 9
    assert pairwise(factors)[0] == {"a": 0, "b": "x", "c": None, "d": False}


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_every_dtype_has_every_edge_of_numbers(dtype: str) -> None:
    mine = [case for case in cases() if case.dtype == dtype]
    poisons = Counter(poison for case in mine for poison in case.poison)
    always = {"ignored_rows", "masked_rows", "padding", "bias_neg_inf", "target_range"}
    assert (set(POISONS) if dtype != "float16" else always) <= set(poisons)
    assert {case.function for case in mine if case.tight_memory} == {"loss", "log_probs", "token_loss"}


def test_arrays_repeat() -> None:
    case = cases()[5]
    first, second = make_arrays(case), make_arrays(case)
    assert list(first) == list(second)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("case", quick_parameters(common_names()))
def test_arrays_and_truth_of_a_case(case: Case) -> None:
    arrays = make_arrays(case)
    assert arrays["input"].shape == (*case.lead, case.hidden)
    assert arrays["target"].shape == case.lead
    assert arrays["target"].dtype == case.target_dtype
    for name in ("input", "linear_bias", "weight", *([] if case.head_dtype else ["linear_weight"])):
        if name in arrays:
            assert arrays[name].dtype == np.float32
            np.testing.assert_array_equal(arrays[name], round_to(arrays[name], case.dtype))
    valid = arrays["target"] != case.spec.ignore_index
    in_range = (arrays["target"] >= 0) & (arrays["target"] < case.classes)
    assert "target_range" in case.poison or np.all(in_range | ~valid)
    assert not case.ignored or case.n == 0 or not np.all(valid)
    want = expected_of(case)
    assert tuple(want) == outputs_of(case)
    # With an infinite budget, which means that the unfused computation overflows or has NaN elsewhere, a case tests
    # nothing.
    assert all(0 < budget < 0.02 for one in want.values() for budget in (one.budget, *(one.row_budgets or ()))), want


def test_poison_is_in_place() -> None:
    for case in cases():
        arrays = make_arrays(case)
        flat = arrays["input"].reshape(case.n, case.hidden)
        clean = np.isfinite(flat).all(axis=1)
        ignored = arrays["target"].reshape(-1) == case.spec.ignore_index
        if "ignored_rows" in case.poison:
            np.testing.assert_array_equal(clean, ~ignored)
        if "masked_rows" in case.poison:
            np.testing.assert_array_equal(clean, arrays["token_weight"].reshape(-1) != 0)
        for name in case.per_token:
            left_out = ignored & ("ignored_rows" in case.poison)
            if "masked_rows" in case.poison:
                left_out |= arrays["token_weight"].reshape(-1) == 0
            np.testing.assert_array_equal(np.isfinite(arrays[name]).reshape(-1), ~left_out)
        if "padding" in case.poison:
            assert not np.isfinite(arrays["linear_weight"][case.classes :]).any()
            assert np.isfinite(arrays["linear_weight"][: case.classes]).all()
        if "bias_neg_inf" in case.poison:
            assert np.isneginf(arrays["linear_bias"]).sum() > case.vocab // 4
            assert np.isfinite(arrays["linear_bias"][arrays["target"][arrays["target"] >= 0]]).all()


def test_unknown_poison_is_refused() -> None:
    with pytest.raises(ValueError, match=r"poison must be among ignored_rows, .*, got arsenic"):
        make_arrays(Case(name="bad", poison=("arsenic",)))


def test_select_takes_part_of_a_name() -> None:
    chosen = [case.name for case in select("edge-empty")]
    assert chosen
    assert all("edge-empty" in name for name in chosen)
    assert not list(select("no such case"))


def test_extra_roundings_are_those_of_a_16_bit_head_in_chunks() -> None:
    assert Case(name="a", dtype="bfloat16", tight_memory=True).extra_roundings == 1.5
    assert Case(name="a", dtype="bfloat16").extra_roundings == 0
    assert Case(name="a", dtype="bfloat16", head_dtype="float32", tight_memory=True).extra_roundings == 0
    assert Case(name="a", dtype="float32", tight_memory=True).extra_roundings == 0
