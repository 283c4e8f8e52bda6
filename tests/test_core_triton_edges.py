"""Edge cases of core_triton, compared with torch.nn.functional.cross_entropy on materialized logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch_problem import FUNCTIONS, leaves, problem, total

import core_triton

pytestmark = pytest.mark.usefixtures("torch_poisons_buffers")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def assert_zero_gradients(value: torch.Tensor, arrays: dict[str, Any], upstream: float = 3.0) -> None:
    for leaf, gradient in zip(
        leaves(arrays), torch.autograd.grad(value, leaves(arrays), torch.tensor(upstream)), strict=True
    ):
        assert gradient.shape == leaf.shape
        assert gradient.dtype == leaf.dtype
        assert (gradient == 0).all()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
def test_empty_batch(function: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    arrays = problem(0, dtype=dtype)
    arrays["input"] = torch.zeros(*shape, 8, dtype=dtype, requires_grad=True)
    arrays["target"] = torch.zeros(shape, dtype=torch.long)
    value = total(function, arrays)
    assert value.item() == 0
    assert_zero_gradients(value, arrays)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", [0.0, float("nan"), float("inf")])
def test_all_targets_ignored(function: str, dtype: torch.dtype, held: float) -> None:
    arrays = problem(dtype=dtype)
    arrays["input"] = torch.full((12, 8), held, dtype=dtype, requires_grad=True)
    arrays["target"] = torch.full((12,), -100)
    value = total(function, arrays)
    assert value.item() == 0
    assert_zero_gradients(value, arrays)


@pytest.mark.parametrize("options", [{"normalizer": 0}, {"weight": torch.zeros(50)}, {"token_weight": torch.zeros(12)}])
def test_zero_denominator_or_weights(options: dict[str, Any]) -> None:
    arrays = problem()
    loss, stats = core_triton.linear_cross_entropy_with_stats(**arrays, **options)
    assert loss.item() == 0
    assert_zero_gradients(loss, arrays)
    assert stats.n_valid.item() == 12
    assert stats.accuracy.item() == 0


@pytest.mark.parametrize("function", ["none", "log_probs"])
def test_no_upstream_gradient_reaches_an_ignored_row(function: str) -> None:
    arrays = problem()
    arrays["target"][::2] = -100
    name = {"none": "linear_cross_entropy", "log_probs": "linear_log_probs"}[function]
    results = getattr(core_triton, name)(**arrays, **({"reduction": "none"} if function == "none" else {}))
    results = (results,) if function == "none" else tuple(results)
    upstream = torch.ones(12)
    upstream[::2] = float("nan")
    for frozen in (False, True):  # plan C, and plan A with scaled rows
        if frozen and function == "none":
            head = {name: arrays[name].detach() for name in ("linear_weight", "linear_bias")}
            results = (core_triton.linear_cross_entropy(**arrays | head, reduction="none"),)
        d_input = torch.autograd.grad(results, arrays["input"], [upstream] * len(results), retain_graph=True)[0]
        assert (d_input[::2] == 0).all()
        assert (d_input[1::2] != 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [50, -1, 2**31 - 1, -(2**31), 2**40])
def test_out_of_range_target(dtype: torch.dtype, target: int) -> None:
    arrays = problem(dtype=dtype)
    arrays["target"][3] = target
    others = torch.arange(12) != 3
    loss = core_triton.linear_cross_entropy(**arrays, reduction="none")
    assert loss.isnan().tolist() == (~others).tolist()
    d_input, d_weight, d_bias = torch.autograd.grad(loss.sum(), leaves(arrays))
    assert d_input[3].isnan().all()
    assert d_input[others].isfinite().all()
    assert d_weight.isnan().all()
    assert d_bias.isnan().all()
    mean = core_triton.linear_cross_entropy(**arrays)
    assert mean.isnan()
    d_input = torch.autograd.grad(mean, arrays["input"])[0]
    assert d_input[3].isnan().all()
    assert d_input[others].isfinite().all()  # without class weights, the denominator is a count


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_cross_entropy_of_materialized_logits(reduction: Any, smoothing: float, weighted: bool) -> None:
    arrays = problem(30)
    arrays["target"][::7] = -100
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    options["weight"] = torch.linspace(0.5, 2.0, 50) if weighted else None
    upstream = torch.linspace(-1.0, 2.0, 30) if reduction == "none" else torch.tensor(1.5)
    logits = F.linear(arrays["input"], arrays["linear_weight"], arrays["linear_bias"])
    want = F.cross_entropy(logits, arrays["target"], **options)
    got = core_triton.linear_cross_entropy(**arrays, **options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(got, leaves(arrays), upstream)
    torch.testing.assert_close(gradients, torch.autograd.grad(want, leaves(arrays), upstream), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("held", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["bias", "target's bias", "input"])
def test_non_finite_values_propagate_as_in_cross_entropy(held: float, where: str) -> None:
    arrays = problem()
    arrays["target"][:] = torch.arange(12)
    with torch.no_grad():
        if where == "input":
            arrays["input"][3, 2] = held
        else:
            arrays["linear_bias"][40 if where == "bias" else 5] = held
    logits = F.linear(arrays["input"], arrays["linear_weight"], arrays["linear_bias"])
    want = F.cross_entropy(logits, arrays["target"], reduction="none")
    got = core_triton.linear_cross_entropy(**arrays, reduction="none")
    torch.testing.assert_close(got, want, equal_nan=True)
    mine, theirs = (torch.autograd.grad(loss.sum(), arrays["input"])[0] for loss in (got, want))
    torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalizer", [-1.0, float("nan"), float("inf")])
def test_an_invalid_normalizer_tensor_makes_the_loss_nan(normalizer: float) -> None:
    arrays = problem()
    value = core_triton.linear_cross_entropy(**arrays, normalizer=torch.tensor(normalizer))
    assert value.isnan()
    for gradient in torch.autograd.grad(value, leaves(arrays)):
        assert gradient.isnan().any()
    arrays["target"] = torch.full_like(arrays["target"], -100)
    assert core_triton.linear_cross_entropy(**arrays, normalizer=torch.tensor(normalizer)) == 0


@pytest.mark.parametrize("normalizer", [7, 7.0, torch.tensor(7), torch.tensor(7.0, dtype=torch.float64)])
def test_normalizer_of_any_type(normalizer: Any) -> None:
    arrays = problem()
    logits = F.linear(arrays["input"], arrays["linear_weight"], arrays["linear_bias"])
    want = F.cross_entropy(logits, arrays["target"], reduction="sum") / 7
    torch.testing.assert_close(core_triton.linear_cross_entropy(**arrays, normalizer=normalizer), want)


def test_statistics_of_a_loss() -> None:
    arrays = problem(30)
    arrays["target"][::7] = -100
    token_weight = torch.ones(30)
    token_weight[1::7] = 0
    logits = F.linear(arrays["input"], arrays["linear_weight"], arrays["linear_bias"]).detach()
    arrays["target"][2] = logits[2].argmax()
    _, stats = core_triton.linear_cross_entropy_with_stats(**arrays, token_weight=token_weight, z_loss_weight=0.1)
    contributes = (arrays["target"] != -100) & (token_weight != 0)
    lse = torch.where(contributes, logits.logsumexp(1), 0.0)
    torch.testing.assert_close(stats.lse, lse)
    picked = logits.gather(1, arrays["target"].clamp(min=0)[:, None])[:, 0]
    torch.testing.assert_close(stats.target_logit, torch.where(contributes, picked, 0.0))
    n_valid = (arrays["target"] != -100).sum()
    torch.testing.assert_close(stats.z_loss, 0.1 * lse.square().sum() / n_valid)
    hits = contributes & (logits.argmax(1) == arrays["target"])
    torch.testing.assert_close(stats.accuracy, hits.sum() / contributes.sum())
    assert stats.n_valid == n_valid


def test_ties_count_as_correct() -> None:
    x, w = torch.ones(4, 3), torch.ones(6, 3)
    _, stats = core_triton.linear_cross_entropy_with_stats(x, w, torch.tensor([0, 5, 2, -100]))
    assert stats.accuracy.item() == 1


@pytest.mark.parametrize("implementation", [None, "chunked"])
def test_an_implementation_may_be_named(implementation: str | None) -> None:
    arrays = problem()
    logits = F.linear(arrays["input"], arrays["linear_weight"], arrays["linear_bias"])
    want = F.cross_entropy(logits, arrays["target"])
    torch.testing.assert_close(core_triton.linear_cross_entropy(**arrays, implementation=implementation), want)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_bitwise_repeatable(function: str) -> None:
    arrays = problem(60, 16, 200, dtype=torch.bfloat16)
    runs = []
    for _ in range(2):
        value = total(function, arrays, memory_budget=100_000)
        runs.append([value.detach(), *torch.autograd.grad(value, leaves(arrays))])
    torch.testing.assert_close(*runs, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", [(), ("linear_weight", "linear_bias"), ("input",)])
@pytest.mark.parametrize("results", [("loss",), ("log_prob",), ("log_prob", "entropy", "lse")])
def test_a_row_of_nan_whose_upstream_gradient_is_0_changes_no_gradient(
    results: tuple[str, ...], frozen: tuple[str, ...], dtype: torch.dtype
) -> None:
    arrays = problem(dtype=dtype)
    names = [name for name in ("input", "linear_weight", "linear_bias") if name not in frozen]
    upstream = torch.arange(12.0) - 2  # 0 in row 2
    gradients = []
    for bad in (False, True):
        x, target = arrays["input"].detach().clone(), arrays["target"].clone()
        target[1] = 999 if bad else target[1]
        x[2] = float("nan") if bad else x[2]
        given = {"input": x, **{name: arrays[name].detach() for name in ("linear_weight", "linear_bias")}}
        leaves = [given[name].requires_grad_() for name in names]
        factor = torch.where(torch.arange(12) == 1, 0.0, upstream)
        if results == ("loss",):
            found = [core_triton.linear_cross_entropy(**given, target=target, reduction="none")]
        else:
            of_tokens = core_triton.linear_log_probs(**given, target=target)
            found = [getattr(of_tokens, name) for name in results]
        gradients.append(torch.autograd.grad(found, leaves, [factor] * len(found)))
    for with_nan, without in zip(*gradients, strict=True):
        torch.testing.assert_close(with_nan, without)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_results_are_float32_for_every_default_dtype(default: torch.dtype) -> None:
    arrays = problem(bias=False)
    want = core_triton.linear_cross_entropy_with_stats(**arrays, z_loss_weight=0.1)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        loss, stats = core_triton.linear_cross_entropy_with_stats(**arrays, z_loss_weight=0.1)
    finally:
        torch.set_default_dtype(usual)
    assert {one.dtype for one in (loss, *stats[:-1])} == {torch.float32}
    torch.testing.assert_close((loss, stats), want, rtol=0, atol=0)
