"""Tests core_triton's operators with torch.library.opcheck, and its functions in torch.compile without graph breaks."""

import io
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.compiled_autograd import _enable
from torch_problem import FUNCTIONS, leaves, problem, total

import core_triton
from core_triton.groups import Options

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


Arguments = tuple[Any, ...]


def operator_arguments(
    dtype: torch.dtype, *, smoothing: float, softcap: float | None, bias: bool
) -> tuple[Arguments, Arguments, Arguments]:
    """Returns the arrays, the token weights and the options of an operator call."""
    arrays = problem(dtype=dtype)
    tensors = (
        arrays["input"],
        arrays["linear_weight"],
        arrays["linear_bias"] if bias else None,
        arrays["target"].clamp(max=44),
        torch.linspace(0.5, 2.0, 45) if smoothing else None,
    )
    weights = torch.linspace(0.0, 1.0, 12), torch.tensor(7.5) if bias else None
    options = (
        bias,  # mean
        -100,  # ignore_index
        smoothing,
        0.01,  # z_loss_weight
        softcap,
        0.5,  # logit_scale
        45,  # vocab_size
        2**20,  # memory_budget
        "chunked",
        False,  # splits_head
        0,  # saved_budget
        *Options._field_defaults.values(),
    )
    return tensors, weights, options


OPTIONS = [{"smoothing": 0.0, "softcap": None, "bias": True}, {"smoothing": 0.1, "softcap": 4.0, "bias": False}]


# opcheck of torch 2.15 reads .grad of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:])])
@pytest.mark.parametrize("options", OPTIONS)
def test_opcheck(dtype: torch.dtype, options: dict[str, Any]) -> None:
    tensors, weights, settings = operator_arguments(dtype, **options)
    arguments = (*tensors, *weights, *settings)
    bias = options["bias"]
    # Different summation orders make the traced and the eager gradients round differently in 16 bits.
    close: dict[str, Any] = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for needs_grad in ((True, True, bias), (False, True, False)):
        for statistics in (True, False):
            torch.library.opcheck(
                torch.ops.linear_ce.loss_and_gradients.default, (*arguments, statistics, True, *needs_grad), **close
            )
    torch.library.opcheck(
        torch.ops.linear_ce.loss_and_gradients.default, (*arguments, True, False, True, False, False), **close
    )
    torch.library.opcheck(torch.ops.linear_ce.losses.default, (*arguments, True, True, True, bias), **close)
    torch.library.opcheck(torch.ops.linear_ce.log_probs.default, (*tensors, *settings, True, True, bias), **close)
    rows = torch.linspace(-1.0, 1.0, 12)
    plain = tuple(a.detach() if isinstance(a, Tensor) else a for a in tensors)
    sigma = rows if options["smoothing"] else None
    recomputed = (*plain, *settings, weights[0], rows + 5.0, rows, rows, None, sigma, True, True, bias)
    torch.library.opcheck(torch.ops.linear_ce.gradients.default, recomputed, **close)
    of_rows = (*plain, *settings, rows, rows + 5.0, True, True, bias)
    torch.library.opcheck(torch.ops.linear_ce.row_gradients.default, of_rows, **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [torch.tensor(2.0), torch.linspace(0.0, 3.0, 12)[:, None]])
def test_opcheck_of_the_scaling(dtype: torch.dtype, factor: Tensor) -> None:
    gradient = torch.linspace(-1.0, 1.0, 96).reshape(12, 8).to(dtype)
    head = torch.linspace(-1.0, 1.0, 80).reshape(10, 8).to(dtype)
    torch.library.opcheck(torch.ops.linear_ce.scaled.default, (factor, torch.tensor(0.5), gradient, head, None, 100))


def assert_compiles(function: Any, arrays: dict[str, Any], *, dynamic: bool | None = None) -> None:
    """Compiles `function` without graph breaks, and compares its value and gradients with those of eager mode."""
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    want, got = function(arrays), compiled(arrays)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves(arrays)), torch.autograd.grad(want, leaves(arrays)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_compile_without_graph_breaks(function: str) -> None:
    arrays = problem()
    arrays["target"] %= 45
    assert_compiles(lambda arrays: total(function, arrays, softcap=5.0, vocab_size=45, memory_budget=2**20), arrays)


def test_options_compile_without_graph_breaks() -> None:
    extra: dict[str, Any] = {"weight": torch.linspace(0.5, 2.0, 50), "token_weight": torch.linspace(0.0, 1.0, 12)}

    def function(arrays: dict[str, Any]) -> Tensor:
        return core_triton.linear_cross_entropy(
            **arrays, **extra, normalizer=7.5, label_smoothing=0.1, z_loss_weight=0.01, logit_scale=0.5
        )

    assert_compiles(function, problem())


def test_a_number_as_normalizer_does_not_compile_again_for_each_value() -> None:
    arrays = problem()
    with mock.patch.dict("torch._dynamo.utils.counters", clear=True) as counters:
        function = torch.compile(core_triton.linear_cross_entropy, fullgraph=True, backend="aot_eager")
        for number in (3.0, 5.0, 7.5, 11.0):
            want = core_triton.linear_cross_entropy(**arrays, normalizer=number)
            torch.testing.assert_close(function(**arrays, normalizer=number), want)
        assert counters["stats"]["unique_graphs"] == 2  # one of the first number, and one of any


def test_statistics_compile_without_graph_breaks() -> None:
    arrays = problem()
    compiled = torch.compile(core_triton.linear_cross_entropy_with_stats, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**arrays), core_triton.linear_cross_entropy_with_stats(**arrays))


def test_evaluation_compiles_without_graph_breaks() -> None:
    arrays = problem()

    @torch.no_grad()
    def function(arrays: dict[str, Any]) -> Tensor:
        return core_triton.linear_cross_entropy(**arrays)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(arrays), function(arrays))


@pytest.mark.parametrize("function", ["mean", "none"])
def test_dynamic_shapes_compile_once(function: str) -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(lambda arrays: total(function, arrays), fullgraph=True, backend=backend, dynamic=True)
    for n in (12, 31, 5):
        arrays = problem(n)
        want = torch.autograd.grad(total(function, arrays), leaves(arrays))
        torch.testing.assert_close(torch.autograd.grad(compiled(arrays), leaves(arrays)), want)
    assert len(compilations) == 1


def test_dynamic_shapes_with_aot_autograd() -> None:
    for n in (12, 31):
        assert_compiles(lambda arrays: total("mean", arrays), problem(n), dynamic=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_model_around_the_loss_compiles_without_graph_breaks(reduction: Any) -> None:
    torch.manual_seed(0)
    head = core_triton.LinearCrossEntropy(8, 50, bias=True, reduction=reduction)
    body = nn.Sequential(nn.Linear(6, 8), nn.GELU())
    x, target = torch.randn(3, 4, 6), torch.randint(0, 50, (3, 4))

    def model(x: Tensor, target: Tensor) -> Tensor:
        return (2.0 * head(body(x), target)).sum()

    parameters = [*body.parameters(), *head.parameters()]
    want = torch.autograd.grad(model(x, target), parameters)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x, target), parameters), want)


def test_compiled_second_backward_repeats_the_first() -> None:
    arrays = problem(dtype=torch.float16)
    compiled = torch.compile(lambda arrays: total("mean", arrays), fullgraph=True, backend="aot_eager")
    value = compiled(arrays)
    upstream = torch.tensor(3.0)
    first = [g.clone() for g in torch.autograd.grad(value, leaves(arrays), upstream, retain_graph=True)]
    second = torch.autograd.grad(value, leaves(arrays), upstream)
    torch.testing.assert_close(list(second), first, rtol=0, atol=0)


# Dynamo reads .grad of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("options", [{}, {"saved_budget": 10**6}])
@pytest.mark.parametrize("function", ["none", "log_probs"])
def test_compiled_autograd_runs_the_backward_pass_of_an_eager_call(function: str, options: dict[str, Any]) -> None:
    """Its trace would contain changes of PyTorch's settings for matmuls, and NamedTuples that Dynamo makes empty."""
    arrays = problem()
    eager: Any = torch.compiler.disable(lambda: total(function, arrays, **options))

    def step() -> None:
        eager().backward()

    want = torch.autograd.grad(eager(), leaves(arrays))
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")()
    torch.testing.assert_close([leaf.grad for leaf in leaves(arrays)], list(want))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_autograd_traces_a_backward_pass_that_scales_gradients() -> None:
    """It runs no plan, so it does not divide the graph."""
    arrays = problem()
    want = torch.autograd.grad(total("mean", arrays), leaves(arrays))
    value = total("mean", arrays)
    with _enable(torch.compile(backend="aot_eager", fullgraph=True)):
        value.backward()
    torch.testing.assert_close([leaf.grad for leaf in leaves(arrays)], list(want))


def of_frozen_head(arrays: dict[str, Any]) -> Tensor:
    return total("none", arrays | {"linear_weight": arrays["linear_weight"].detach()})


def of_tokens(arrays: dict[str, Any]) -> Tensor:
    named = core_triton.token_losses.reinforce()
    x, w, target = arrays["input"], arrays["linear_weight"], arrays["target"]
    return core_triton.linear_token_loss(x, w, target, named, torch.ones(len(target)), reduction="sum")


@pytest.mark.parametrize("function", [*FUNCTIONS, "frozen head", "token loss"])
def test_compiled_second_derivative_is_refused(function: str) -> None:
    """A gradient penalty would be left out of the gradients if create_graph=True gave gradients without a graph."""
    arrays = problem(bias=False)
    found = {"frozen head": of_frozen_head, "token loss": of_tokens}.get(
        function, lambda arrays: total(function, arrays)
    )
    x = arrays["input"]
    value = torch.compile(found, fullgraph=True, backend="aot_eager")(arrays)

    def penalized() -> None:
        (d_x,) = torch.autograd.grad(value, x, create_graph=True)
        (d_x.square().sum() + x.square().sum()).backward()

    with pytest.raises(RuntimeError, match=r"no second derivative|not currently support double backward"):
        penalized()


@pytest.mark.parametrize(("obstacle", "name"), [(None, "triton"), ("no GPU", "chunked")])
def test_a_compiled_function_chooses_like_an_eager_one(obstacle: str | None, name: str) -> None:
    x, w = torch.ones(3, 16), torch.ones(5, 16)

    def chosen(x: Tensor, w: Tensor) -> Tensor:
        return x.new_ones(()) * (core_triton.explain(x, w).name == name)

    with mock.patch("core_triton.device.triton_obstacle", return_value=obstacle):
        assert torch.compile(chosen, fullgraph=True, backend="aot_eager")(x, w) == 1


def test_bad_input_raises_in_a_compiled_function_too() -> None:
    compiled = torch.compile(lambda arrays: total("mean", arrays, softcap=-1.0), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"softcap must be positive or None, got -1\.0"):
        compiled(problem())


RESULTS: dict[str, Any] = {
    "LogProbs": core_triton.linear_log_probs,
    "LossStats": core_triton.linear_cross_entropy_with_stats,
    "TokenStats": lambda input, linear_weight, target, linear_bias: core_triton.linear_token_loss_with_stats(
        *(input, linear_weight, target, core_triton.token_losses.weighted_nll(), torch.ones(12)),
        linear_bias=linear_bias,
        stats=("lse", "argmax"),
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_saved_program_returns_named_results(name: str) -> None:
    class Calls(nn.Module):
        def forward(self, arrays: dict[str, Tensor]) -> Any:
            return RESULTS[name](**arrays)

    arrays = {key: value.detach() for key, value in problem().items()}
    stored = io.BytesIO()
    torch.export.save(torch.export.export(Calls(), (arrays,)), stored)
    stored.seek(0)
    got, want = torch.export.load(stored).module()(arrays), Calls()(arrays)
    results = got if name == "LogProbs" else got[1]
    assert type(results) is getattr(core_triton, name)
    torch.testing.assert_close(got, want)
