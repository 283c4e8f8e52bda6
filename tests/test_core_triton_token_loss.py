"""Tests `core_triton.linear_token_loss` on CPU: values and gradients, rows that do not contribute, PyTorch's features,
and errors."""

import pickle
from functools import partial, wraps
from typing import Any

import pytest
import torch
from allocations import Meter, bytes_of
from assertions import least_budget
from token_loss_problem import (
    LOSSES,
    NAMED,
    TokenProblem,
    assert_within_budget,
    call,
    counted_chunks,
    make_problem,
    outputs,
    tensors,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_problem import problem

import core_triton
from core_triton import ops, token_losses
from linear_ce.spec import FLOAT_DTYPES, LossSpec
from linear_ce.statistics import TOKEN_STATS

pytestmark = pytest.mark.usefixtures("torch_poisons_buffers")

PPO = token_losses.ppo_clip()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_within_its_error_budget(name: str, dtype: str) -> None:
    made = make_problem(name, dtype)
    assert_within_budget(made, outputs(made))


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {
        "spec": LossSpec("mean", -1, softcap=3.0, logit_scale=0.6, vocab_size=280),
        "bias": True,
        "token_weight": True,
        "normalizer": 7.0,
    },
    "sum": {"spec": LossSpec("sum"), "token_weight": True, "bias": True},
    "none": {"spec": LossSpec("none", softcap=3.0, vocab_size=280), "token_weight": True, "bias": True},
    "out of range": {"bias": True, "out_of_range": True},
    "out of range, none": {"spec": LossSpec("none"), "out_of_range": True, "token_weight": True},
    "two axes": {"lead": (5, 14)},
    "two axes, none": {"lead": (5, 14), "spec": LossSpec("none")},
    "bfloat16 per_token": {"per_token_dtype": "bfloat16"},
    "float16 per_token, none": {"per_token_dtype": "float16", "spec": LossSpec("none")},
}


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("name", ["grpo-k3", "custom-entropy"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_options(options: dict[str, Any], name: str, dtype: str) -> None:
    made = make_problem(name, dtype, **options)
    assert_within_budget(made, outputs(made))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("name", ["custom", "custom-entropy"])
@pytest.mark.parametrize("lead", [(70,), (400,)])  # kept logits of all rows, and chunks
def test_several_chunks(lead: tuple[int, ...], name: str, dtype: str) -> None:
    made = make_problem(name, dtype, lead, d=8, bias=True, token_weight=True, spec=LossSpec("sum"))
    least = least_budget(lambda budget: outputs(made, memory_budget=budget))
    with counted_chunks() as chunks:
        found = outputs(made, memory_budget=least + 100_000 * (lead == (400,)))
    assert chunks.call_count >= 3
    assert_within_budget(made, found, chunks.call_count)


@pytest.mark.parametrize("name", ["custom", "custom-entropy"])
def test_a_loss_takes_three_matmuls(name: str) -> None:
    made = make_problem(name, d=24, v=300)
    named, per_token = tensors(made)
    with FlopCounterMode(display=False) as counter:
        call(made, named, per_token).backward()
    assert counter.get_total_flops() == 3 * 2 * 70 * 24 * 300


@pytest.mark.parametrize(("name", "least"), [("custom", 2), ("custom-entropy", 3)])
def test_the_loss_of_each_row_takes_fewer_matmuls_with_a_frozen_head(name: str, least: int) -> None:
    made = make_problem(name, spec=LossSpec("none"))
    for frozen, matmuls in ((False, 4), (True, least)):
        named, per_token = tensors(made)
        named["linear_weight"].requires_grad_(not frozen)
        with Meter() as meter:
            call(made, named, per_token).sum().backward()
        assert len(meter.matmuls) == matmuls


@pytest.mark.parametrize("name", ["grpo-k3", "grpo-k2-entropy"])
def test_the_workspace_is_within_the_budget(name: str) -> None:
    made = make_problem(name, "bfloat16", (257,), d=32)
    least = least_budget(lambda budget: outputs(made, memory_budget=budget))
    for budget in (least, 3 * least):
        named, per_token = tensors(made)
        leaves = [named["input"], named["linear_weight"], *per_token]
        with Meter() as meter:
            found = torch.autograd.grad(call(made, named, per_token, memory_budget=budget), leaves)
        # What the token loss allocates is not part of the budget: 30 vectors at most.
        assert meter.peak - bytes_of(*found) <= budget + 30 * 4 * 257


@pytest.mark.parametrize("frozen", [("input",), ("linear_weight",), ("input", "linear_weight"), ("per_token",)])
@pytest.mark.parametrize(
    ("name", "dtype"), [*(("ppo_clip", dtype) for dtype in FLOAT_DTYPES), ("grpo-k2-entropy", "float16")]
)
def test_frozen_arguments_change_nothing_else(frozen: tuple[str, ...], name: str, dtype: str) -> None:
    made = make_problem(name, dtype)
    want = gradients_of(made, ())
    found = gradients_of(made, frozen)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-6, atol=0)
    assert want.keys() - found.keys() == {*frozen}


def gradients_of(made: TokenProblem, frozen: tuple[str, ...]) -> dict[str, Any]:
    named, per_token = tensors(made)
    leaves = {"input": named["input"], "linear_weight": named["linear_weight"], "per_token": per_token[0]}
    for name in frozen:
        leaves.pop(name).requires_grad_(False)
    loss = call(made, named, per_token)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)) | {"loss": loss.detach()}


@pytest.mark.parametrize("name", ["cispo", "custom-entropy"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_without_gradients(reduction: Any, name: str) -> None:
    made = make_problem(name, spec=LossSpec(reduction))
    named, per_token = tensors(made)
    with torch.no_grad():
        found = call(made, named, per_token)
    assert not found.requires_grad
    torch.testing.assert_close(found, call(made, named, per_token).detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("lead", [(0,), (0, 3)])
def test_empty_batch(reduction: Any, lead: tuple[int, ...]) -> None:
    assert_zero(make_problem("grpo-k2-entropy", lead=lead, spec=LossSpec(reduction), bias=True))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_token_counts(reduction: Any, dtype: str) -> None:
    made = make_problem("grpo-k2-entropy", dtype, spec=LossSpec(reduction), bias=True)
    made.arrays["target"][:] = -100
    for array in (made.arrays["input"], *made.per_token):
        array[...] = torch.nan
    assert_zero(made)


def test_zero_denominator() -> None:
    assert_zero(make_problem("ppo_clip", normalizer=0.0))


def assert_zero(made: TokenProblem) -> None:
    for name, found in outputs(made).items():
        assert (found == 0).all(), name


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_bonus_of_the_entropy_alone(reduction: Any) -> None:
    """The gradient of the logits is that of `linear_log_probs`, and a row without a derivative has none."""
    arrays: Any = problem(bias=False, dtype=torch.float32)
    x, w, y = arrays["input"], arrays["linear_weight"], arrays["target"]
    weight = torch.linspace(-1, 1, 12).index_fill(0, torch.tensor([4]), 0.0)

    def token_loss(log_prob: Tensor, entropy: Tensor, weight: Tensor) -> Tensor:
        return weight * entropy

    options: Any = {"with_entropy": True, "reduction": reduction}
    found = torch.autograd.grad(core_triton.linear_token_loss(x, w, y, token_loss, weight, **options).mean(), (x, w))
    want = torch.autograd.grad((weight * core_triton.linear_log_probs(x, w, y).entropy).mean(), (x, w))
    torch.testing.assert_close(found, want)
    assert (found[0][4] == 0).all()


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_target_that_is_not_a_class_gives_nan_whatever_the_token_loss_returns(
    reduction: Any, with_entropy: bool
) -> None:
    arrays: Any = problem(bias=False)
    arrays["target"][3] = 50
    u = torch.ones(12, requires_grad=True)

    def token_loss(log_prob: Tensor, *others: Tensor) -> Tensor:
        return 0.0 * others[-1] * log_prob.nan_to_num(0.0)

    x, w, y = arrays["input"], arrays["linear_weight"], arrays["target"]
    loss = core_triton.linear_token_loss(x, w, y, token_loss, u, reduction=reduction, with_entropy=with_entropy)
    d_input, d_weight, d_u = torch.autograd.grad(loss.sum(), (x, w, u))
    assert loss.isnan().sum() == 1
    assert torch.equal(d_input.isnan().any(1), torch.arange(12) == 3)
    assert torch.equal(d_u.isnan(), torch.arange(12) == 3)
    assert d_weight.isnan().all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_a_token_loss_is_constant_in_has_no_gradient_of_rows(reduction: Any) -> None:
    """With a scalar loss, a derivative of 0 becomes NaN where the target is not a class."""
    arrays: Any = problem(bias=False)
    arrays["target"][3] = 50
    per_token = advantage, old_log_prob = [torch.ones(12, requires_grad=True) for _ in range(2)]
    named = arrays["input"], arrays["linear_weight"], arrays["target"]
    core_triton.linear_token_loss(*named, token_losses.cispo(), *per_token, reduction=reduction).sum().backward()
    not_a_class = torch.arange(12) == 3
    d_advantage, d_old_log_prob = advantage.grad, old_log_prob.grad
    assert d_advantage is not None
    assert torch.equal(d_advantage.isnan(), not_a_class)
    assert (d_old_log_prob is None) == (reduction == "none")
    assert d_old_log_prob is None or torch.equal(d_old_log_prob.isnan(), not_a_class)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_log_probabilities_are_not_positive(reduction: Any) -> None:
    arrays: Any = {"input": 60 * torch.eye(8, requires_grad=True), "linear_weight": torch.eye(8, requires_grad=True)}
    seen = []

    def token_loss(log_prob: Tensor) -> Tensor:
        seen.append(log_prob.detach())
        return -log_prob

    core_triton.linear_token_loss(**arrays, target=torch.arange(8), token_loss=token_loss, reduction=reduction)
    (log_prob,) = seen
    assert (log_prob == 0).all()
    assert not log_prob.signbit().any()


# Statistics.


def stats_of(made: TokenProblem, **options: Any) -> core_triton.TokenStats:
    named, per_token = tensors(made)
    first: list[Any] = [named.pop(name) for name in ("input", "linear_weight", "target")]
    spec = {"softcap": made.spec.softcap, "reduction": made.spec.reduction, "vocab_size": made.spec.vocab_size}
    arguments: list[Any] = [*first, made.token_loss, *per_token]
    return core_triton.linear_token_loss_with_stats(*arguments, **named, **spec, **options)[1]


@pytest.mark.parametrize(
    ("loss", "reduction"), [("ppo_clip", "mean"), ("ppo_clip", "none"), ("grpo-k2-entropy", "none")]
)
@pytest.mark.parametrize("name", TOKEN_STATS)
def test_each_statistic_alone_is_as_among_all(name: str, loss: str, reduction: Any) -> None:
    made = make_problem(loss, "bfloat16", spec=LossSpec(reduction, softcap=3.0), token_weight=True)
    alone, found = stats_of(made, stats=[name])._asdict(), stats_of(made)._asdict()
    assert torch.equal(alone.pop(name), found[name])
    assert set(alone.values()) == {None}
    assert not found[name].requires_grad


def test_the_lowest_of_equal_logits_is_the_argmax() -> None:
    x, w = torch.ones(3, 2), torch.zeros(700, 2)
    w[[3, 500, 699]] = 1.0  # in three vocabulary chunks of the smallest budget
    y = torch.tensor([3, 500, 4])
    call = partial(core_triton.linear_token_loss_with_stats, x, w, y, torch.neg, stats=("argmax", "is_top1"))
    for budget in (None, least_budget(lambda budget: call(memory_budget=budget))):
        stats = call(memory_budget=budget)[1]
        assert stats.argmax is not None
        assert stats.is_top1 is not None
        assert stats.argmax.tolist() == [3, 3, 3]
        assert stats.is_top1.tolist() == [True, True, False]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_finite_logits_has_no_argmax(value: float) -> None:
    w = torch.randn(5, 4)
    b = torch.full((5,), value) if value == -torch.inf else torch.zeros(5).index_fill(0, torch.tensor(2), value)
    loss, stats = core_triton.linear_token_loss_with_stats(
        torch.randn(3, 4), w, torch.tensor([1, -100, 2]), torch.neg, linear_bias=b
    )
    assert loss.isnan()
    assert stats.argmax is not None
    assert stats.argmax.tolist() == [-1, 0, -1]


def test_statistics_are_those_of_the_loss() -> None:
    made = make_problem("weighted_nll", "bfloat16", token_weight=True)
    named: dict[str, Any] = tensors(made)[0]
    loss_stats = core_triton.linear_cross_entropy_with_stats(**named)[1]
    stats = stats_of(made)
    assert stats.is_top1 is not None
    contributes = (named["target"] != -100) & (named["token_weight"] != 0)
    assert torch.equal(stats.is_top1.sum() / contributes.sum(), loss_stats.accuracy)
    torch.testing.assert_close(stats.lse, loss_stats.lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_log_probs_are_those_of_linear_log_probs_bit_for_bit(dtype: str) -> None:
    """Where both have one chunk. Otherwise PyTorch's matmuls may differ in the last bit."""
    made = make_problem("weighted_nll", dtype, (400,), d=24, v=300)
    named, _ = tensors(made)
    counts = made.arrays["target"] != -100
    want = core_triton.linear_log_probs(named["input"], named["linear_weight"], named["target"])
    for reduction in ("mean", "none"):
        stats = stats_of(made._replace(spec=LossSpec(reduction)))
        assert stats.log_prob is not None
        assert torch.equal(stats.log_prob[counts], want.log_prob[counts])


def test_statistics_of_a_loss_of_the_entropy() -> None:
    made = make_problem("grpo-k2-entropy", "bfloat16", token_weight=True)
    for reduction in ("mean", "none"):
        stats = stats_of(made._replace(spec=LossSpec(reduction)))
        want = stats_of(make_problem("grpo-k3", "bfloat16", token_weight=True))
        for one, other in zip(stats, want, strict=True):
            assert one is not None
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
            assert not one.requires_grad


def test_statistics_take_no_matmul() -> None:
    made = make_problem("custom", d=24, v=300)
    with FlopCounterMode(display=False) as counter:
        stats_of(made)
    assert counter.get_total_flops() == 3 * 2 * 70 * 24 * 300


@pytest.mark.parametrize(
    ("stats", "error", "message"),
    [
        ("entropy", TypeError, "stats must be a tuple of names, got str"),
        (None, TypeError, "stats must be a tuple of names, got NoneType"),
        (["entropy", "top1"], ValueError, "stats must be one of 'log_prob', .*, got 'top1'"),
    ],
)
def test_stats_that_do_not_exist(stats: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stats_of(make_problem("ppo_clip"), stats=stats)


# PyTorch's features.


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_a_second_backward_repeats_the_first(dtype: str) -> None:
    made = make_problem("ppo_clip", dtype)
    named, per_token = tensors(made)
    leaves = [named["input"], named["linear_weight"], *per_token]
    loss, upstream = call(made, named, per_token), torch.tensor(3.0)
    first = [g.clone() for g in torch.autograd.grad(loss, leaves, upstream, retain_graph=True)]
    second = torch.autograd.grad(loss, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivative_is_refused(reduction: Any) -> None:
    made = make_problem("ppo_clip", spec=LossSpec(reduction))
    named, per_token = tensors(made)
    with pytest.raises(RuntimeError, match="no second derivative: use create_graph=False"):
        torch.autograd.grad(call(made, named, per_token).sum(), named["input"], create_graph=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_activation_checkpointing(reduction: Any, use_reentrant: bool) -> None:
    made = make_problem("custom", spec=LossSpec(reduction))
    named, per_token = tensors(made)
    x, calls = named.pop("input"), []

    def body(x: Tensor) -> Tensor:
        calls.append(x)
        return call(made, {"input": 2.0 * x, **named}, per_token).sum()

    (want,) = torch.autograd.grad(body(x), x)
    loss = checkpoint(body, x, use_reentrant=use_reentrant)
    assert isinstance(loss, Tensor)
    loss.backward()
    assert len(calls) == 3
    assert x.grad is not None
    assert torch.equal(x.grad, want)


def test_autocast_changes_only_the_matmuls() -> None:
    made = make_problem("ppo_clip")
    named, per_token = tensors(made)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = call(made, named, per_token)
    found = torch.autograd.grad(loss, [named["input"], *per_token[:1]])
    rounded = {name: a.detach().bfloat16().requires_grad_() if a.requires_grad else a for name, a in named.items()}
    want_loss = call(made, rounded, per_token)
    want = torch.autograd.grad(want_loss, [rounded["input"], *per_token[:1]])
    assert torch.equal(loss, want_loss)
    assert torch.equal(found[0], want[0].float())
    assert torch.equal(found[1], want[1])


@pytest.fixture
def _fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", ["ppo_clip", "grpo-k2-entropy"])
@pytest.mark.parametrize(("reduction", "dtype"), [("mean", "float16"), ("sum", "bfloat16"), ("none", "float32")])
def test_a_named_loss_compiles_without_graph_breaks(
    name: str, reduction: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, keys = ops.recorded, set[Any]()  # of calls that are recorded on a GPU
    monkeypatch.setattr(
        ops, "recorded", lambda key, *inputs, **others: keys.add(key) or recorded(key, *inputs, **others)
    )
    made = make_problem(name, dtype, spec=LossSpec(reduction), bias=True, token_weight=True)
    named, per_token = tensors(made)

    def function(named: dict[str, Tensor], per_token: list[Tensor]) -> Tensor:
        return call(made, named, per_token).sum()

    leaves = [one for one in (*named.values(), *per_token) if one.requires_grad]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    want, found = function(named, per_token), compiled(named, per_token)
    torch.testing.assert_close(found, want)
    for one, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(named, per_token), want)
    assert len(keys) == (3 if reduction == "none" and not made.form.with_entropy else 2)  # as many in both modes


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_named_loss_may_be_made_in_a_compiled_function(reduction: Any) -> None:
    x, w, advantage, old_log_prob = (torch.randn(size, requires_grad=True) for size in ((6, 8), (20, 8), (6,), (6,)))
    target = torch.arange(6)

    def function() -> Tensor:
        loss = token_losses.ppo_clip(0.2, 0.3)
        return core_triton.linear_token_loss(x, w, target, loss, advantage, old_log_prob, reduction=reduction).sum()

    want, found = function(), torch.compile(function, fullgraph=True, backend="aot_eager")()
    torch.testing.assert_close(found, want)
    for one, other in zip(*(torch.autograd.grad(loss, [x, w]) for loss in (found, want)), strict=True):
        torch.testing.assert_close(one, other)


def test_losses_that_differ_are_recorded_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU replays the launches of an earlier call with the same key and layouts."""
    recorded, keys = ops.recorded, list[Any]()
    monkeypatch.setattr(
        ops, "recorded", lambda key, *inputs, **others: keys.append(key) or recorded(key, *inputs, **others)
    )
    x, w, first, second = (torch.randn(size) for size in ((6, 8), (20, 8), (6,), (6,)))
    target = torch.arange(6)
    for token_loss, wanted, stats in (
        (PPO, (x, w), ()),
        (token_losses.ppo_clip(0.2, 0.3), (x, w), ()),
        (token_losses.ppo_clip(entropy_weight=0.1), (x, w), ()),
        (PPO, (x,), ()),
        (PPO, (x, w, first), ()),
        (PPO, (x, w, second), ()),
        (PPO, (x, w), ("log_prob",)),
        (PPO, (x, w), ("lse",)),
    ):
        for one in (x, w, first, second):
            one.requires_grad_(any(one is each for each in wanted))
        core_triton.linear_token_loss_with_stats(x, w, target, token_loss, first, second, reduction="sum", stats=stats)
    assert len(set(keys)) == len(keys) == 8


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("reduction", "token_loss"), [("mean", PPO), ("none", PPO), ("none", token_losses.ppo_clip(entropy_weight=0.1))]
)
def test_statistics_compile_without_graph_breaks(reduction: Any, token_loss: Any) -> None:
    made = make_problem("ppo_clip", "bfloat16", spec=LossSpec(reduction))
    named, per_token = tensors(made)
    names = ("log_prob", "entropy", "argmax", "is_top1")

    def function(named: dict[str, Any], per_token: list[Any]) -> tuple[Tensor, core_triton.TokenStats]:
        x, w, y = named.values()
        options: Any = {"reduction": reduction, "stats": names}
        return core_triton.linear_token_loss_with_stats(x, w, y, token_loss, *per_token, **options)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    (want, want_stats), (found, stats) = function(named, per_token), compiled(named, per_token)
    leaves = [named["input"], named["linear_weight"], per_token[0]]
    for one, other in zip(stats, want_stats, strict=True):
        assert (one is None) == (other is None)
        torch.testing.assert_close(one, other)
    for one, other in zip(
        torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.usefixtures("_fresh_compiler")
def test_dynamic_shapes_compile_once() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def function(x: Tensor, w: Tensor, y: Tensor, *per_token: Tensor) -> Tensor:
        return core_triton.linear_token_loss(x, w, y, token_losses.grpo(), *per_token)

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for n in (12, 31, 5):
        named, per_token = tensors(make_problem("ppo_clip", lead=(n,)))
        arguments = (*named.values(), *per_token)
        leaves = [one for one in arguments if one.requires_grad]
        want = torch.autograd.grad(function(*arguments), leaves)
        torch.testing.assert_close(torch.autograd.grad(compiled(*arguments), leaves), want, equal_nan=True)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of dynamo
@pytest.mark.usefixtures("_fresh_compiler")
def test_another_function_breaks_the_graph() -> None:
    made = make_problem("custom")
    named, per_token = tensors(made)

    def function(named: dict[str, Tensor], per_token: list[Tensor]) -> Tensor:
        return 2.0 * call(made, named, per_token)

    want = function(named, per_token)
    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(named, per_token), want)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"token_loss of linear_token_loss is not one of core_triton\.token_losses"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(named, per_token)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("stats", [[False] * 7, [True] * 7, [False, True, False, True, True, False, False]])
def test_opcheck(stats: list[bool]) -> None:
    made = make_problem("grpo-k2-entropy", "float16", d=8, v=50, token_weight=True)
    named, per_token = tensors(made)
    arrays = named["input"].detach().nan_to_num().requires_grad_(), named["linear_weight"], None, named["target"], None
    options = ops.Options(True, -100, 0.0, 0.0, None, 1.0, 50, 2**20, "chunked", False, 0)
    per_token = [one.detach().nan_to_num().requires_grad_() for one in per_token]
    loss = made.token_loss
    of_loss = loss.name, list(loss.parameters), loss.kl, loss.entropy_weight
    rest = *of_loss, per_token, True, True, False, [True, False, True], stats
    torch.library.opcheck(
        torch.ops.linear_ce.token_loss.default,
        (*arrays, named["token_weight"], None, *options, *rest),
        rtol=2e-2,
        atol=2e-2,
    )


# Named losses.


def test_named_losses_are_values() -> None:
    losses = list(NAMED.values())
    assert len(set(losses)) == len(losses)
    for loss in losses:
        assert pickle.loads(pickle.dumps(loss)) == loss
    assert token_losses.ppo_clip() == token_losses.ppo_clip(0.2, 0.2)
    assert token_losses.cispo() == token_losses.cispo(1.0, 0.28)
    assert token_losses.grpo() == token_losses.grpo(0.2, 0.2, 0.0, "k3")
    assert token_losses.grpo().per_token == ("advantage", "old_log_prob")
    assert token_losses.grpo(entropy_weight=0.1) != token_losses.grpo()
    assert token_losses.grpo(entropy_weight=0.1).per_token == token_losses.grpo().per_token
    assert token_losses.grpo(beta=0.1).per_token == ("advantage", "old_log_prob", "ref_log_prob")


ANY: Any = "a"  # of any type
BAD_PARAMETERS: list[tuple[Any, type[Exception], str]] = [
    (lambda: token_losses.ppo_clip(-0.1), ValueError, "epsilon_low must not be negative, got -0.1"),
    (
        lambda: token_losses.cispo(1.0, float("inf")),
        ValueError,
        "epsilon_high must be finite, got inf",
    ),
    (lambda: token_losses.grpo(beta=ANY), TypeError, "beta must be a Python number, got str"),
    (lambda: token_losses.reinforce(entropy_weight=1e39), ValueError, r"entropy_weight must fit float32, got 1e\+39"),
    (lambda: token_losses.reinforce(0.1, "k4"), ValueError, "kl must be one of 'k1', 'k2', 'k3', got 'k4'"),
]


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (0.0, 0.2), (0.2, 0.0)])
def test_a_ratio_at_a_bound_is_not_clipped(low: float, high: float) -> None:
    for given in (torch.tensor([1.0, -1.0]), torch.zeros(2)):
        log_prob, advantage = torch.zeros(2, requires_grad=True), given.clone().requires_grad_()
        loss = token_losses.ppo_clip(low, high)(log_prob, advantage, torch.zeros(2))
        found = torch.autograd.grad(loss.sum(), [log_prob, advantage])
        torch.testing.assert_close(found, (-given, -torch.ones(2)))


@pytest.mark.parametrize(("make", "kind", "message"), BAD_PARAMETERS, ids=["low", "high", "beta", "entropy", "kl"])
def test_bad_parameters(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


# Errors.

ONES = torch.ones(12)
NOT_A_LOSS: dict[str, tuple[Any, tuple[Any, ...], type[Exception], str]] = {
    "callable": ("ppo", (), TypeError, "token_loss must be callable, got str"),
    "not called": (
        token_losses.ppo_clip,
        (ONES, ONES),
        TypeError,
        r"token_loss must be a loss, got token_losses.ppo_clip, which returns one: pass token_losses.ppo_clip\(\)$",
    ),
    "number": (lambda p: 1.0, (), TypeError, r"token_loss must return a float32 Tensor of shape \(12,\).* got float"),
    "dtype": (lambda p: p.half(), (), TypeError, "token_loss must return a float32 Tensor .* got float16"),
    "sum": (lambda p: p.sum(), (), ValueError, r"token_loss must return .* of shape \(12,\).* got shape \(\)"),
    "device": (lambda p: p.to("meta"), (), ValueError, "token_loss must return .* on cpu, got one on meta"),
    "raises": (lambda p, u: p, (), RuntimeError, r"token_loss raised TypeError: .* missing 1 required .*'u'"),
    "shape": (
        PPO,
        (ONES[:11], ONES),
        ValueError,
        r"per_token\[0\] must have shape \(12,\) .* got \(11,\)",
    ),
    "integers": (PPO, (ONES, ONES.long()), TypeError, r"per_token\[1\] must have a floating-point dtype, got int64"),
    "list": (PPO, (ONES, [0.0] * 12), TypeError, r"per_token\[1\] must be a Tensor, got list"),
    "meta": (PPO, (ONES, ONES.to("meta")), ValueError, r"per_token\[1\] must be on target's device cpu, got meta"),
    "no entropy": (lambda p, h: p - h, (), RuntimeError, r"token_loss raised TypeError: .* missing 1 required .*'h'"),
    "number of": (
        PPO,
        (ONES,),
        ValueError,
        "per_token of token_losses.ppo_clip must be advantage, old_log_prob, got 1",
    ),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("token_loss", "per_token", "kind", "message"), NOT_A_LOSS.values(), ids=list(NOT_A_LOSS))
def test_what_is_not_a_token_loss_is_refused(
    token_loss: Any, per_token: tuple[Any, ...], kind: type[Exception], message: str, reduction: Any
) -> None:
    arrays = problem(bias=False)
    with pytest.raises(kind, match=message):
        core_triton.linear_token_loss(*arrays.values(), token_loss, *per_token, reduction=reduction)


@pytest.mark.parametrize(
    ("token_loss", "value", "kind", "message"),
    [
        (torch.neg, 1, TypeError, "with_entropy must be a bool, got int"),
        (torch.neg, None, TypeError, "with_entropy must be a bool, got NoneType"),
        (token_losses.ppo_clip(), True, ValueError, "with_entropy must be False for token_losses.ppo_clip without "),
    ],
)
def test_with_entropy_is_checked(token_loss: Any, value: Any, kind: type[Exception], message: str) -> None:
    arrays: Any = problem(bias=False)
    with pytest.raises(kind, match=message):
        core_triton.linear_token_loss(*arrays.values(), token_loss, with_entropy=value)
    with pytest.raises(kind, match=message):
        core_triton.check_token_loss(token_loss, torch.ones(3), torch.ones(3), with_entropy=value)


def test_the_exception_of_a_token_loss_is_the_cause() -> None:
    def token_loss(log_prob: Tensor) -> Tensor:
        raise KeyError("advantage")

    functions: dict[str, Any] = {"token_loss": token_loss, "the backward pass of token_loss": _Broken.apply}
    arrays: Any = problem(bias=False)
    for said, function in functions.items():
        with pytest.raises(RuntimeError, match=f"^{said} raised KeyError: 'advantage'$") as raised:
            core_triton.linear_token_loss(**arrays, token_loss=function)
        assert isinstance(raised.value.__cause__, KeyError)


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_prob: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -log_prob

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise KeyError("advantage")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softcap": -1.0}, "softcap must be positive or None, got -1.0"),
        ({"vocab_size": 51}, "vocab_size must not exceed linear_weight's 50 rows, got 51"),
        ({"normalizer": 2.0, "reduction": "sum"}, 'normalizer needs reduction "mean"'),
        ({"token_weight": torch.ones(12, requires_grad=True)}, "token_weight is not differentiated"),
    ],
)
def test_options_of_the_cross_entropy_are_checked(change: dict[str, Any], message: str) -> None:
    arrays: Any = problem()
    with pytest.raises(ValueError, match=message):
        core_triton.linear_token_loss(**arrays, token_loss=lambda log_prob: -log_prob, **change)


# What would give a wrong gradient.


def _in_place(log_prob: Tensor) -> Tensor:
    return (log_prob * 0.1).exp().add_(1.0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_change_in_place_is_found(reduction: Any) -> None:
    arrays = problem(6, 8, 20, dtype=torch.float32)
    named = arrays["input"], arrays["linear_weight"], arrays["target"]
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        core_triton.linear_token_loss(*named, _in_place, reduction=reduction).sum().backward()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_closure_that_requires_grad_is_refused_or_differentiated(frozen: bool) -> None:
    arrays = problem(6, 8, 20, dtype=torch.float32)
    named = arrays["input"], arrays["linear_weight"], arrays["target"]
    if frozen:
        named = arrays["input"].detach(), arrays["linear_weight"].detach(), arrays["target"]
    factor = torch.tensor(2.0, requires_grad=True)

    def token_loss(log_prob: Tensor) -> Tensor:
        return -(3 * factor) * log_prob

    message = r"must not close over a tensor that requires grad, got one that depends on a tensor of shape \(\)"
    with pytest.raises(ValueError, match=message):
        core_triton.linear_token_loss(*named, token_loss)
    with torch.no_grad():
        mean = core_triton.linear_token_loss(*named, token_loss)
    (found,) = torch.autograd.grad(core_triton.linear_token_loss(*named, token_loss, reduction="none").mean(), factor)
    torch.testing.assert_close(found, mean / 2)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_nan_logit_gives_nan_whatever_the_token_loss_returns(reduction: Any) -> None:
    arrays = problem(6, 8, 20, dtype=torch.float32)
    with torch.no_grad():
        arrays["input"][1] = torch.nan
    named = arrays["input"], arrays["linear_weight"], arrays["target"]
    loss = core_triton.linear_token_loss(*named, lambda log_prob: -log_prob.nan_to_num(), reduction=reduction)
    d_input, d_weight = torch.autograd.grad(loss.sum(), named[:2])
    assert (loss[1] if reduction == "none" else loss).isnan()
    assert d_input[1].isnan().all()
    assert not d_input[2:].isnan().any()
    assert d_weight.isnan().all()


def test_running_out_of_memory_keeps_its_type() -> None:
    def token_loss(log_prob: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    arrays = problem(6, 8, 20, dtype=torch.float32)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        core_triton.linear_token_loss(arrays["input"], arrays["linear_weight"], arrays["target"], token_loss)


# check_token_loss.


def _mean(log_prob: Tensor, advantage: Tensor) -> Tensor:
    return -(advantage - advantage.mean()) * log_prob


def _derivative_of_the_mean(log_prob: Tensor, advantage: Tensor) -> Tensor:
    same = log_prob.mean() - log_prob.mean().detach()  # 0, but its derivative is not
    return -advantage * log_prob + same


def _order(log_prob: Tensor, advantage: Tensor) -> Tensor:
    return -advantage * log_prob * torch.arange(len(log_prob), device=log_prob.device)


def _mean_entropy(log_prob: Tensor, entropy: Tensor, advantage: Tensor) -> Tensor:
    return -advantage * log_prob - (entropy - entropy.mean())


def _derivative_of_the_mean_entropy(log_prob: Tensor, entropy: Tensor, advantage: Tensor) -> Tensor:
    return -advantage * log_prob + (entropy.mean() - entropy.mean().detach())


def test_check_token_loss_accepts_what_is_elementwise() -> None:
    for name in (token_losses.ppo_clip(), token_losses.cispo(), token_losses.grpo(beta=0.1)):
        core_triton.check_token_loss(name, *(torch.randn(3, 4) for _ in name.per_token))
    core_triton.check_token_loss(lambda log_prob: log_prob.exp())
    core_triton.check_token_loss(lambda log_prob, entropy: log_prob - entropy.exp(), with_entropy=True)
    core_triton.check_token_loss(token_losses.ppo_clip(entropy_weight=-0.1), torch.randn(6), torch.randn(6))
    core_triton.check_token_loss(lambda log_prob, a: log_prob * (0 * a).log(), torch.randn(6))  # NaN and infinities


def test_check_token_loss_does_not_depend_on_defaults_of_pytorch() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        core_triton.check_token_loss(lambda log_prob, entropy: entropy - log_prob, with_entropy=True)
    finally:
        torch.set_default_dtype(before)
    with torch.device("meta"):
        core_triton.check_token_loss(lambda log_prob: -log_prob)


@pytest.mark.parametrize(
    ("token_loss", "message"),
    [
        (_mean, r"loss of token \d+ is [-.\de]+ with all tokens and [-.\de]+ without the first half"),
        (_derivative_of_the_mean, r"derivative with respect to log_prob of token \d+"),
        (_mean_entropy, r"loss of token \d+ is [-.\de]+ with all tokens and [-.\de]+ without the first half"),
        (_derivative_of_the_mean_entropy, r"derivative with respect to entropy of token \d+"),
        (_order, r"loss of token \d+ is [-.\de]+ with all tokens and [-.\de]+ in reverse order"),
    ],
)
def test_check_token_loss_finds_what_is_not(token_loss: Any, message: str) -> None:
    with_entropy = "entropy" in token_loss.__name__
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=message):
        core_triton.check_token_loss(token_loss, values, with_entropy=with_entropy)


def test_check_token_loss_needs_two_tokens() -> None:
    with pytest.raises(ValueError, match=r"per_token\[0\] must be a Tensor of two tokens or more, got shape \(1,\)"):
        core_triton.check_token_loss(token_losses.weighted_nll(), torch.ones(1))
    with pytest.raises(TypeError, match="token_loss must be callable, got int"):
        core_triton.check_token_loss(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"token_loss must be a loss, got token_losses.grpo, which returns one"):
        core_triton.check_token_loss(token_losses.grpo)  # pyright: ignore[reportArgumentType]
    named = token_losses.weighted_nll()
    of_module: Any = wraps(named)  # gives a function the module of the named losses
    core_triton.check_token_loss(of_module(lambda *arrays: 2 * named(*arrays)), torch.ones(2))
    with pytest.raises(
        ValueError, match=r"per_token\[1\] must have shape \(3,\) \(per_token\[0\]'s shape\), got \(4,\)"
    ):
        core_triton.check_token_loss(token_losses.ppo_clip(), torch.ones(3), torch.ones(4))
