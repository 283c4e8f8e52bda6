"""Every array argument gives the same result in every layout as its contiguous copy. Unsupported kinds of tensors are
refused. The loss of a confident token is never negative, and as accurate as the loss of materialized float32 logits."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import contiguous_copy, layouts_of
from torch import Tensor
from torch.autograd import forward_ad

import core_triton

pytestmark = pytest.mark.apart(programs=5, seconds=130)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FUNCTIONS = ("mean", "none", "log_probs", "stats")
ARGUMENTS = ("input", "linear_weight", "target", "linear_bias", "weight", "token_weight")


def arrays_of(dtype: torch.dtype, device: str, n: int, d: int, v: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    target = torch.randint(0, v, (n,), generator=generator)
    target[::5] = -100
    made = {
        "input": normal(n, d).to(dtype),
        "linear_weight": (2 * normal(v, d) / d**0.5).to(dtype),
        "target": target,
        "linear_bias": normal(v).to(dtype),
        "weight": torch.rand(v, generator=generator) + 0.5,
        "token_weight": torch.rand(n, generator=generator) + 0.5,
    }
    return {name: array.to(device) for name, array in made.items()}


def results(function: str, arrays: dict[str, Tensor], implementation: str, backward: bool = True) -> list[Tensor]:
    """Returns a function's results and its gradients."""
    given = dict(arrays)
    differentiable = ("input", "linear_weight", "linear_bias")
    if function == "log_probs":
        given = {name: array for name, array in given.items() if name not in ("weight", "token_weight")}
    leaves = [given[name].detach().requires_grad_(backward) for name in differentiable]
    given |= dict(zip(differentiable, leaves, strict=True))
    call: Any = {
        "mean": core_triton.linear_cross_entropy,
        "none": core_triton.linear_cross_entropy,
        "log_probs": core_triton.linear_log_probs,
        "stats": core_triton.linear_cross_entropy_with_stats,
    }[function]
    options: dict[str, Any] = {"implementation": implementation}
    if function == "none":
        options["reduction"] = "none"
    found = call(given.pop("input"), given.pop("linear_weight"), given.pop("target"), **given, **options)
    found = [found] if isinstance(found, Tensor) else [found[0], *found[1]] if function == "stats" else list(found)
    if not backward:
        return found
    differentiated = [result for result in found if result.requires_grad]
    weights = [torch.linspace(0.5, 1.5, result.numel(), device=result.device) for result in differentiated]
    total = torch.stack([(r.flatten() * w).sum() for r, w in zip(differentiated, weights, strict=True)]).sum()
    return [*(result.detach() for result in found), *torch.autograd.grad(total, leaves)]


def most_of_a_row(function: str, arrays: dict[str, Tensor]) -> float:
    """Returns the largest factor of a row's gradients in `results` of a loss."""
    most = float(arrays["weight"].max() * arrays["token_weight"].max())
    if function == "none":
        return 1.5 * most
    target = arrays["target"]
    return 1.5 * most / float(arrays["weight"][target[target != -100]].sum())


def assert_layouts_agree(
    function: str, dtype: torch.dtype, device: str, implementation: str, n: int, d: int, v: int
) -> None:
    arrays = arrays_of(dtype, device, n, d, v)
    names = ARGUMENTS if function != "log_probs" else ARGUMENTS[:4]
    for name in names:
        for layout, made in layouts_of(arrays[name]):
            want = results(function, arrays | {name: contiguous_copy(made)}, implementation)
            got = results(function, arrays | {name: made}, implementation)
            for index, (a, b) in enumerate(zip(got, want, strict=True)):
                what = f"{function} {dtype}: {layout} {name} differs in result {index}"
                if name == "linear_weight" or (name == "input" and implementation == "chunked"):
                    # Another layout may use another GEMM, which sums in a different order.
                    close = 2e-5 if dtype == torch.float32 else 4e-3 if dtype == torch.float16 else 2e-2
                    size = float(b.abs().max())
                    equal_rows = (layout, name) == ("expanded", "linear_weight") and function != "log_probs"
                    if equal_rows and index == len(want) - 3:  # its terms cancel, and it is 0 but for rounding
                        size = float(made.abs().max()) * most_of_a_row(function, arrays)
                        torch.testing.assert_close(b, torch.zeros_like(b), rtol=0, atol=close * size, msg=what)
                    torch.testing.assert_close(a, b, rtol=close, atol=close * size, msg=what)
                else:
                    assert torch.equal(a, b), what


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_layouts_agree_in_chunked(function: str, dtype: torch.dtype) -> None:
    assert_layouts_agree(function, dtype, "cpu", "chunked", 33, 16, 40)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "triton_sm80", "chunked"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_layouts_agree_on_a_gpu(function: str, dtype: torch.dtype, implementation: str) -> None:
    assert_layouts_agree(function, dtype, "cuda", implementation, 300, 128, 1000)
    assert_layouts_agree(function, dtype, "cuda", implementation, 300, 72, 1001)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "triton_sm80"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_after_a_transposed_head_is_not_read(function: str, dtype: torch.dtype, implementation: str) -> None:
    """The hidden size is no multiple of a step of any kernel, nor of the 8 elements of a copy of 16 bytes."""
    arrays = arrays_of(dtype, "cuda", 300, 100, 1024)
    head = arrays["linear_weight"].detach()
    buffer = head.new_full((164, 1024), float("nan"))
    buffer[:100] = head.T
    got = results(function, arrays | {"linear_weight": buffer[:100].T}, implementation)
    want = results(function, arrays | {"linear_weight": contiguous_copy(head.T).T}, implementation)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(result.isfinite().all() for result in got)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_stay_within_the_memory_budget(dtype: torch.dtype) -> None:
    arrays = arrays_of(dtype, "cuda", 2048, 256, 8192)
    budget = 24 * 2**20
    from core_triton import replay  # some machines have PyTorch without Triton

    for name in ARGUMENTS:
        for layout, made in layouts_of(arrays[name]):
            given = dict(arrays) | {name: made}
            leaves = {n: given[n].detach().requires_grad_() for n in ("input", "linear_weight", "linear_bias")}
            given |= leaves
            for attempt in range(3):  # a warm-up, in which cuBLAS allocates its workspace, then recording and replaying
                if attempt == 1:
                    replay._recordings.clear()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                loss = core_triton.linear_cross_entropy(
                    given["input"], given["linear_weight"], given["target"], linear_bias=given["linear_bias"],
                    weight=given["weight"], token_weight=given["token_weight"], memory_budget=budget,
                )  # fmt: skip
                gradients = torch.autograd.grad(loss, list(leaves.values()))
                torch.cuda.synchronize()
                taken = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in gradients)
                assert attempt == 0 or taken <= budget, (
                    f"{layout} {name}: {taken} bytes of workspace for a budget of {budget}"
                )
                del loss, gradients


# Confident tokens.


def confident(dtype: torch.dtype, device: str, n: int, d: int, v: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(n, d, generator=generator)).to(dtype).to(device)
    w = (torch.randn(v, d, generator=generator) / d**0.5).to(dtype).to(device)
    return x, w, (x.double() @ w.double().T).argmax(1)


def assert_confident(
    dtype: torch.dtype, device: str, implementation: str, n: int, d: int, v: int, scale: float = 40.0
) -> None:
    x, w, target = confident(dtype, device, n, d, v, scale)
    exact = F.cross_entropy(x.double() @ w.double().T, target, reduction="none")
    float32 = F.cross_entropy(x.float() @ w.float().T, target, reduction="none").double()
    bound = 3 * float((float32 - exact).abs().max())
    for backward in (False, True):
        a, b = x.clone().requires_grad_(backward), w.clone().requires_grad_(backward)
        losses = core_triton.linear_cross_entropy(a, b, target, reduction="none", implementation=implementation)
        mean, stats = core_triton.linear_cross_entropy_with_stats(a, b, target, implementation=implementation)
        log_probs = core_triton.linear_log_probs(a, b, target, implementation=implementation)
        assert losses.min() >= 0
        assert log_probs.log_prob.max() <= 0
        for found in (losses, -log_probs.log_prob, stats.lse - stats.target_logit):
            assert (found.detach().double() - exact).abs().max() <= bound + 1e-6
        assert mean.detach() >= 0
        assert abs(float(mean.detach()) - float(exact.mean())) <= bound
        # Losses far below the rounding error of the logits, which the difference of two logits would lose.
        small = exact < 1e-3
        if small.any():
            difference = (losses.detach().double() - exact)[small].abs()
            assert (difference <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", [None, 40_000])
def test_a_confident_token_has_no_negative_loss(dtype: torch.dtype, budget: int | None) -> None:
    assert_confident(dtype, "cpu", "chunked", 64, 32, 300)
    x, w, target = confident(dtype, "cpu", 64, 32, 300, 40.0)
    assert core_triton.linear_cross_entropy(x, w, target, reduction="none", memory_budget=budget).min() >= 0


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 40.0, 2000.0])  # logits up to 1e4
@pytest.mark.parametrize("implementation", ["triton", "triton_sm80", "chunked"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_confident_token_has_no_negative_loss_on_a_gpu(dtype: torch.dtype, implementation: str, scale: float) -> None:
    if dtype == torch.float16 and scale > 40.0:
        scale = 1000.0  # inputs stay within float16
    assert_confident(dtype, "cuda", implementation, 512, 256, 4096, scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "triton_sm80"])
def test_repaired_rows_have_no_negative_loss(implementation: str) -> None:
    """Half of the rows have a target far below the largest logit, so their blocks are repaired."""
    x, w, target = confident(torch.bfloat16, "cuda", 512, 256, 4096, 200.0)
    target[::2] = (target[::2] + 1) % 4096
    exact = F.cross_entropy(x.double() @ w.double().T, target, reduction="none")
    for backward in (False, True):
        a, b = x.clone().requires_grad_(backward), w.clone().requires_grad_(backward)
        losses = core_triton.linear_cross_entropy(a, b, target, reduction="none", implementation=implementation)
        assert losses.min() >= 0
        torch.testing.assert_close(losses.detach().double(), exact, rtol=1e-5, atol=1e-3)
        mean = core_triton.linear_cross_entropy(a, b, target, implementation=implementation)
        torch.testing.assert_close(mean.detach().double(), exact.mean(), rtol=1e-5, atol=1e-4)


# Tensor types.


# PyTorch's first dual level compiles decompositions with torch.jit.script.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch 2.15 changed the category
def test_a_forward_mode_tangent_is_refused() -> None:
    x, w, target = torch.randn(4, 8), torch.randn(10, 8), torch.zeros(4, dtype=torch.long)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="input has a forward-mode tangent"):
            core_triton.linear_cross_entropy(dual, w, target)
        with pytest.raises(RuntimeError, match="linear_weight has a forward-mode tangent"):
            core_triton.linear_log_probs(x, forward_ad.make_dual(w, torch.ones_like(w)), target)
        assert core_triton.linear_cross_entropy(x, w, target).isfinite()


def test_meta_tensors_give_shapes() -> None:
    x, w = (torch.empty(*shape, device="meta", requires_grad=True) for shape in ((3, 4, 8), (10, 8)))
    target = torch.empty(3, 4, dtype=torch.long, device="meta")
    loss = core_triton.linear_cross_entropy(x, w, target)
    assert loss.shape == ()
    assert loss.is_meta
    d_input, d_weight = torch.autograd.grad(loss, (x, w))
    assert d_input.shape == x.shape
    assert d_weight.shape == w.shape
    assert core_triton.linear_cross_entropy(x, w, target, reduction="none").shape == (3, 4)
    assert core_triton.linear_log_probs(x, w, target).entropy.shape == (3, 4)


@pytest.fixture
def fake_group() -> Iterator[Any]:
    """A process group of two ranks whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["vocab_group", "token_group"])
def test_tensors_without_values_of_two_ranks(fake_group: Any, name: str) -> None:
    x, w = (torch.empty(*shape, device="meta", requires_grad=True) for shape in ((12, 8), (10, 8)))
    target, groups = torch.empty(12, dtype=torch.long, device="meta"), {name: fake_group}
    loss = core_triton.linear_cross_entropy(x, w, target, **groups)
    assert [one.shape for one in torch.autograd.grad(loss, (x, w))] == [x.shape, w.shape]


@pytest.mark.usefixtures("fake_group")
def test_a_distributed_head_beside_a_plain_input_is_refused() -> None:
    """Nothing says whether the ranks have the same tokens. `dtensor_checks.py` has the calls that run."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (2,))
    x, w, target = torch.randn(4, 8), torch.randn(10, 8), torch.zeros(4, dtype=torch.long)
    shared = DTensor.from_local(w, mesh, [Replicate()])
    with pytest.raises(ValueError, match="input must be a DTensor beside a DTensor linear_weight"):
        core_triton.linear_cross_entropy(x, shared, target)
