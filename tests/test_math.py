"""Compares the chunked, vocabulary-split, scaled-exponential and power-of-two forms of MATH.md with the reference in
float64."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from small_problem import N, V, problem

from linear_ce.reference import reference_log_probs, reference_loss
from linear_ce.spec import LossSpec

SPEC = LossSpec("sum", label_smoothing=0.1, z_loss_weight=0.02, softcap=4.0, logit_scale=0.6)


def logits_of(arrays: dict[str, Any], spec: LossSpec) -> np.ndarray:
    raw = spec.logit_scale * (arrays["input"] @ arrays["linear_weight"].T + arrays["linear_bias"])
    return raw if spec.softcap is None else spec.softcap * np.tanh(raw / spec.softcap)


def partial(z: np.ndarray, target: np.ndarray, c: np.ndarray, start: int) -> list[np.ndarray]:
    """MATH.md (25) for the classes that begin at `start` and have logits z."""
    with np.errstate(invalid="ignore"):
        m = np.max(z, axis=1, initial=-np.inf)
        shifted = np.where(z == -np.inf, 0, z - m[:, None])
        e = np.where(z == -np.inf, 0, np.exp(shifted))
        o = np.sum(np.where(target[:, None] == np.arange(start, start + z.shape[1]), z, 0), axis=1)
        return [m, e.sum(axis=1), o, np.sum(c * z, axis=1), np.sum(e * shifted, axis=1)]


def merge(a: list[np.ndarray], b: list[np.ndarray]) -> list[np.ndarray]:
    """MATH.md (26)."""
    m = np.maximum(a[0], b[0])
    q = u = np.zeros_like(m)
    for part in (a, b):
        masked = part[0] == -np.inf
        delta = np.where(masked, 0, np.where(masked, 0, part[0]) - m)
        q = q + np.where(masked, 0, np.exp(delta) * part[1])
        u = u + np.where(masked, 0, np.exp(delta) * (part[4] + delta * part[1]))
    return [m, q, a[2] + b[2], a[3] + b[3], u]


@pytest.mark.parametrize("cuts", [[], [4], [1, 5, 6], [0, 3, 3, 11]])
@pytest.mark.parametrize("reverse", [False, True])
def test_partial_statistics_of_vocab_chunks_merge(cuts: list[int], reverse: bool) -> None:
    arrays, c = problem(10), np.random.default_rng(10).uniform(0.5, 2, V)
    z, target = logits_of(arrays, SPEC), arrays["target"]
    edges = [0, *cuts, V]
    parts = [partial(z[:, a:b], target, c[a:b], a) for a, b in pairwise(edges)]
    parts = parts[::-1] if reverse else parts
    whole = parts[0]
    for part in parts[1:]:
        whole = merge(whole, part)
    m, q, o, weighted, u = whole
    lse = m + np.log(q)
    loss = reference_loss(**arrays, weight=c, spec=SPEC)
    log_probs = reference_log_probs(**arrays, spec=SPEC)
    np.testing.assert_allclose(lse, loss.lse, rtol=1e-13)
    np.testing.assert_allclose(o, loss.target_logit, rtol=1e-13)
    np.testing.assert_allclose(np.log(q) - u / q, log_probs.entropy, rtol=1e-12)  # (27)
    eps, c_target = SPEC.label_smoothing, c[target]  # (7)
    row_loss = (1 - eps) * c_target * (lse - o) + eps / V * (c.sum() * lse - weighted) + SPEC.z_loss_weight * lse**2
    assert np.sum(row_loss) == pytest.approx(float(loss.loss), rel=1e-12)


def test_vocab_chunks_of_masked_classes_merge() -> None:
    arrays = problem(11, target=np.array([0, 1, 2, 0, 1, 2, 0]))
    arrays["linear_bias"][3:9] = -np.inf
    spec = LossSpec("sum")
    z, ones = logits_of(arrays, spec), np.ones(V)
    with np.errstate(invalid="ignore"):
        parts = [partial(z[:, a : a + 3], arrays["target"], ones[a : a + 3], a) for a in (0, 3, 6, 9)]
    whole = merge(merge(parts[1], parts[2]), merge(parts[0], parts[3]))
    want = reference_log_probs(**arrays, spec=spec)
    np.testing.assert_allclose(whole[0] + np.log(whole[1]), want.lse, rtol=1e-13)
    np.testing.assert_allclose(np.log(whole[1]) - whole[4] / whole[1], want.entropy, rtol=1e-12)


def test_four_coefficients_per_row_and_vocab_chunks_give_the_gradients() -> None:
    arrays, c = problem(12), np.random.default_rng(12).uniform(0.5, 2, V)
    d_log_prob, d_entropy, d_lse = np.random.default_rng(13).standard_normal((3, N))
    z, y, zero = logits_of(arrays, SPEC), arrays["target"], np.zeros(N)
    loss = reference_loss(**arrays, weight=c, spec=SPEC, d_loss=1.5)
    log_probs = reference_log_probs(**arrays, spec=SPEC, d_log_prob=d_log_prob, d_entropy=d_entropy, d_lse=d_lse)
    eps = SPEC.label_smoothing
    alpha = 1.5 * ((1 - eps) * c[y] + eps / V * c.sum() + 2 * SPEC.z_loss_weight * loss.lse)
    of_loss = alpha, zero, 1.5 * (1 - eps) * c[y], np.full(N, 1.5 * eps / V)
    of_log_probs = d_lse - d_log_prob - d_entropy * log_probs.entropy, -d_entropy, -d_log_prob, zero
    for want, (alpha, beta, tau, sigma) in ((loss, of_loss), (log_probs, of_log_probs)):
        log_p = z - want.lse[:, None]
        d_logits = np.exp(log_p) * (alpha[:, None] + beta[:, None] * log_p) - sigma[:, None] * c  # (23)
        d_logits[np.arange(N), y] -= tau
        d_raw = SPEC.logit_scale * d_logits * (1 - (z / 4.0) ** 2)
        d_input = sum(d_raw[:, a : a + 4] @ arrays["linear_weight"][a : a + 4] for a in (0, 4, 8))  # (28)
        d_weight = sum(d_raw[i : i + 3].T @ arrays["input"][i : i + 3] for i in (0, 3, 6))  # (24)
        np.testing.assert_allclose(d_input, want.d_input, rtol=1e-11, atol=1e-14)
        np.testing.assert_allclose(d_weight, want.d_weight, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("ref_exponent", [-60, 0, 70])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_scaled_exponentials_give_loss_and_gradients(ref_exponent: int, softcap: float | None) -> None:
    spec = LossSpec("sum", z_loss_weight=0.02, softcap=softcap, logit_scale=0.6)
    arrays, t = problem(14), np.random.default_rng(14).standard_normal(N)
    z, y, x, w = logits_of(arrays, spec), arrays["target"], arrays["input"], arrays["linear_weight"]
    want = reference_loss(**arrays, token_weight=t, spec=spec)
    k = np.round(z.max(axis=1) * np.log2(np.e)).astype(int) + ref_exponent + np.arange(N) % 5
    e = np.exp2(z * np.log2(np.e) - k[:, None])  # (29), unrounded: the identities are exact
    lse = (k + np.log2(e.sum(axis=1))) * np.log(2)
    slope = np.ones_like(z) if softcap is None else 1 - (z / softcap) ** 2
    h = t * (1 + 2 * spec.z_loss_weight * lse)
    rho = h * np.exp2(k) * np.exp(-lse)
    f = e * slope * (np.arange(V) != y[:, None])
    row = np.arange(N)
    theta = (h * np.exp(z[row, y] - lse) - t) * slope[row, y]  # (31)
    d_input = spec.logit_scale * (rho[:, None] * (f @ w) + theta[:, None] * w[y])
    d_weight, d_bias = f.T @ (rho[:, None] * x), f.T @ rho
    np.add.at(d_weight, y, theta[:, None] * x)
    np.add.at(d_bias, y, theta)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-13)
    np.testing.assert_allclose(d_input, want.d_input, rtol=1e-11)
    np.testing.assert_allclose(spec.logit_scale * d_weight, want.d_weight, rtol=1e-10, atol=1e-13)
    assert want.d_bias is not None
    np.testing.assert_allclose(spec.logit_scale * d_bias, want.d_bias, rtol=1e-10, atol=1e-13)


def test_label_smoothing_without_a_softcap_is_linear_beside_another_loss() -> None:
    spec = LossSpec("sum", label_smoothing=0.2, z_loss_weight=0.02, logit_scale=0.6)
    arrays, c = problem(15), np.random.default_rng(15).uniform(0.5, 2, V)
    t, (x, w, b, y) = (
        np.random.default_rng(16).standard_normal(N),
        (arrays[name] for name in ("input", "linear_weight", "linear_bias", "target")),
    )
    want = reference_loss(**arrays, weight=c, token_weight=t, spec=spec)
    eps, s, mean = spec.label_smoothing, spec.logit_scale, c.mean()
    other = replace(spec, label_smoothing=0.0)
    base = reference_loss(**arrays, weight=(1 - eps) * c + eps * mean, token_weight=t, spec=other)
    mean_w, mean_b = c @ w / V, c @ b / V
    linear = mean * logits_of(arrays, other)[np.arange(N), y] - s * (x @ mean_w + mean_b)
    assert base.loss + eps * (t @ linear) == pytest.approx(want.loss, rel=1e-12)  # (37)
    d_input = base.d_input + s * eps * t[:, None] * (mean * w[y] - mean_w)  # (38)
    d_weight, d_bias = (-s * eps / V * np.multiply.outer(c, sums) for sums in (t @ x, t.sum()))
    np.add.at(d_weight, y, s * eps * mean * t[:, None] * x)
    np.add.at(d_bias, y, s * eps * mean * t)
    np.testing.assert_allclose(d_input, want.d_input, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(base.d_weight + d_weight, want.d_weight, rtol=1e-10, atol=1e-13)
    assert base.d_bias is not None
    assert want.d_bias is not None
    np.testing.assert_allclose(base.d_bias + d_bias, want.d_bias, rtol=1e-10, atol=1e-13)


def test_saved_rows_give_the_gradients_and_the_entropy() -> None:
    spec = LossSpec("none", softcap=4.0, logit_scale=0.6)
    arrays, d_loss = problem(17), np.random.default_rng(17).standard_normal(N)
    z, y, x, w = logits_of(arrays, spec), arrays["target"], arrays["input"], arrays["linear_weight"]
    want, found = reference_loss(**arrays, spec=spec, d_loss=d_loss), reference_log_probs(**arrays, spec=spec)
    row, k = np.arange(N), np.round(z.max(axis=1) * np.log2(np.e)) + 3
    e, slope = np.exp2(z * np.log2(np.e) - k[:, None]), 1 - (z / 4.0) ** 2
    f, rho = e * slope * (np.arange(V) != y[:, None]), 1 / e.sum(axis=1)
    theta = (e[row, y] * rho - 1) * slope[row, y]
    d_input = spec.logit_scale * (rho[:, None] * (f @ w) + theta[:, None] * w[y])  # (41)
    d_weight = f.T @ ((d_loss * rho)[:, None] * x)  # (42)
    np.add.at(d_weight, y, (d_loss * theta)[:, None] * x)
    np.testing.assert_allclose(d_loss[:, None] * d_input, want.d_input, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(spec.logit_scale * d_weight, want.d_weight, rtol=1e-10, atol=1e-13)
    q, u = e.sum(1), np.sum(e * (z * np.log2(np.e) - k[:, None]), 1)
    np.testing.assert_allclose((np.log2(q) - u / q) * np.log(2), found.entropy, rtol=1e-12)


def test_powers_of_two_of_a_row_cancel() -> None:
    rng = np.random.default_rng(16)
    d_raw, x, w = rng.standard_normal((N, V)), rng.standard_normal((N, 5)), rng.standard_normal((V, 5))
    power = np.exp2(rng.integers(-20, 20, N))[:, None]
    np.testing.assert_array_equal(power * ((d_raw / power) @ w), d_raw @ w)  # (34)
    np.testing.assert_allclose((d_raw / power).T @ (power * x), d_raw.T @ x, rtol=1e-13)
