"""core_triton on an NVIDIA GPU: every case of the contract, memory, repeatability, and what PyTorch puts around a call.

Runs with `pytest -m gpu`.
"""

import math
import shutil
from collections.abc import Iterator
from itertools import batched
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from programs import Command, Printed, each, python
from run_cases import assert_passed, commands
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_problem import FUNCTIONS, leaves, problem, total
from walks import walks

import core_triton
from core_triton import ops
from parity.cases import Case, cases

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gpu_problem(
    n: int = 300, d: int = 64, v: int = 1001, *, dtype: torch.dtype = torch.bfloat16, bias: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Returns `torch_problem.problem` on the GPU, with logits of order 1."""
    arrays = problem(n, d, v, dtype=dtype, bias=bias, seed=seed)
    with torch.no_grad():
        arrays["linear_weight"] *= d**-0.5
    arrays = {name: a.detach().to(DEVICE).requires_grad_(a.requires_grad) for name, a in arrays.items()}
    assert core_triton.explain(arrays["input"], arrays["linear_weight"]).name == "triton"
    return arrays


def results(function: str, arrays: dict[str, Any], **options: Any) -> list[Tensor]:
    """Returns a scalar made of a function's results, and its gradients."""
    value = total(function, arrays, **options)
    return [value.detach(), *torch.autograd.grad(value, leaves(arrays))]


def assert_close(got: list[Tensor], want: list[Tensor], bound: float) -> None:
    """Fails if the norm of a difference exceeds `bound` of that of `want`."""
    for mine, theirs in zip(got, want, strict=True):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert error <= bound, f"error {error:.3g} of {bound:.3g} in {tuple(theirs.shape)}"


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}


# Every case of the contract.


SHARES = 24  # of the cases, each a process


def kinds(case: Case) -> tuple[Any, ...]:
    """What a case's kernels depend on most: cases of a kind in one process compile them once."""
    options = case.spec.reduction == "none", case.spec.softcap is not None, case.has_bias, case.vocab_axis
    return case.dtype, case.function, *options


COMMANDS = commands("torch-triton", batched(sorted(cases(), key=kinds), math.ceil(len(cases()) / SHARES)))


@pytest.mark.parametrize("name", each(COMMANDS))
def test_case(name: str, printed: Printed) -> None:
    assert_passed(printed[name], ("triton", DEVICE))


# More than 2**31 logits.


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("budget", [2**29, 2**34], ids=["512 MiB", "16 GiB"])  # pieces, and one piece of 5 GB
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_more_logits_than_32_bits_count(reduction: Any, budget: int) -> None:
    arrays = gpu_problem(20000, 64, 128256)
    assert arrays["input"].shape[0] * arrays["linear_weight"].shape[0] > 2**31
    arrays["target"][-1] = 128255
    x, w, y = arrays["input"].detach().float(), arrays["linear_weight"].detach().float(), arrays["target"]
    upstream = torch.ones((), device=DEVICE) if reduction == "mean" else torch.linspace(-1.0, 1.0, 20000, device=DEVICE)
    scale = upstream / 20000 if reduction == "mean" else upstream
    loss = core_triton.linear_cross_entropy(**arrays, reduction=reduction, memory_budget=budget)
    found = torch.autograd.grad(loss, leaves(arrays), upstream)
    losses, d_input, d_weight = torch.empty(20000, device=DEVICE), torch.empty_like(x), torch.zeros_like(w)
    for chunk in torch.arange(20000, device=DEVICE).split(2000):
        logits = x[chunk] @ w.T
        losses[chunk] = F.cross_entropy(logits, y[chunk], reduction="none")
        d_logits = logits.softmax(1)
        d_logits[chunk - chunk[0], y[chunk]] -= 1
        d_logits *= scale if scale.ndim == 0 else scale[chunk][:, None]
        d_input[chunk], d_weight = d_logits @ w, d_weight.addmm_(d_logits.T, x[chunk])
    assert_close([loss.detach()], [losses.mean() if reduction == "mean" else losses], 1e-5)
    assert_close([*found], [d_input, d_weight], ROUNDING[torch.bfloat16])
    assert_close([found[0][-100:], found[1][-100:]], [d_input[-100:], d_weight[-100:]], 2 * ROUNDING[torch.bfloat16])


# Memory.

MODELS = {"llama3-8b": (4096, 128256), "qwen2.5-0.5b": (896, 151936), "gemma2-2b": (2304, 256000)}  # D, V
BUDGETS = {"128 MiB": 2**27, "512 MiB": 2**29, "2 GiB": 2**31}
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "mean": ("mean", ()),
    "none": ("none", ()),
    "no gradient": ("mean", ("input", "linear_weight")),
    "frozen weight": ("mean", ("linear_weight",)),
    "frozen input": ("mean", ("input",)),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("model", MODELS)
def test_workspace_is_within_budget(model: str) -> None:
    d, v = MODELS[model]
    x = torch.randn(4096, d, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(v, d, device=DEVICE, dtype=torch.bfloat16) * d**-0.5
    y = torch.randint(0, v, (4096,), device=DEVICE)
    upstream = {"mean": torch.ones((), device=DEVICE), "none": torch.rand(4096, device=DEVICE)}

    def call(kind: str, budget: int) -> int:
        """Returns the bytes of gradients."""
        reduction, frozen = KINDS[kind]
        arrays = {"input": x.detach(), "linear_weight": w.detach()}
        for name, array in arrays.items():
            array.requires_grad_(name not in frozen)
        loss = core_triton.linear_cross_entropy(**arrays, target=y, reduction=reduction, memory_budget=budget)
        if not loss.requires_grad:
            return 0
        wanted = leaves(arrays)
        return sum(gradient.nbytes for gradient in torch.autograd.grad(loss, wanted, upstream[reduction]))

    used = {}
    for kind in KINDS:
        for name, budget in BUDGETS.items():
            call(kind, budget)  # the library's own workspace is made once, and stays
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            gradients = call(kind, budget)
            used[kind, name] = (torch.cuda.max_memory_allocated() - before - gradients) / budget
    over = {key: f"{share:.1%}" for key, share in used.items() if share > 1}
    assert not over, f"of its budget: {over}"


# Repeatability.


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_are_bitwise_equal(function: str, dtype: torch.dtype) -> None:
    arrays = gpu_problem(1500, 256, 5003, dtype=dtype, bias=True)
    arrays["target"][::3] = 7  # many rows add to one of d_weight
    first = results(function, arrays, memory_budget=2**23)
    for _ in range(3):
        assert_same(results(function, arrays, memory_budget=2**23), first)


# What PyTorch puts around a call.


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_graph_replays_with_changed_inputs(function: str, dtype: torch.dtype) -> None:
    arrays = gpu_problem(dtype=dtype)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and makes the library's workspace
        results(function, arrays)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(function, arrays)
    for seed in (1, 2):
        with torch.no_grad():
            for name, tensor in gpu_problem(dtype=dtype, seed=seed).items():
                arrays[name].copy_(tensor)
            arrays["target"][: 50 * seed] = -100
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        assert_same(replayed, results(function, arrays))


class Model(nn.Module):
    """A small language model, without attention: each token foretells the next."""

    def __init__(self, v: int = 2003, d: int = 128, dtype: torch.dtype = torch.float32, fused: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(v, d, device=DEVICE, dtype=dtype)
        self.body = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d), nn.LayerNorm(d))
        self.body.to(DEVICE, dtype)
        self.head = core_triton.LinearCrossEntropy(d, v, device=DEVICE, dtype=dtype)
        self.fused = fused

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        hidden = self.body(self.embedding(tokens))
        if self.fused:
            assert core_triton.explain(hidden, self.head.weight).name == "triton"
            return self.head(hidden, target)
        return F.cross_entropy(F.linear(hidden, self.head.weight).float().flatten(0, -2), target.flatten())


def model_and_tokens(**options: Any) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Model(**options)
    tokens = torch.randint(0, 2003, (4, 33), device=DEVICE)
    return model, tokens[:, :-1], tokens[:, 1:]


def model_results(model: nn.Module, *batch: Tensor) -> list[Tensor]:
    loss = model(*batch)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what PyTorch's compiler imports
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores.*available but not enabled:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_around_the_loss_compiles_whole(dtype: torch.dtype) -> None:
    torch.compiler.reset()
    model, *batch = model_and_tokens(dtype=dtype)
    want = model_results(model, *batch)
    compiled: Any = torch.compile(model, fullgraph=True)
    # The compiled body rounds to bfloat16 in other places.
    assert_close(model_results(compiled, *batch), want, 1e-4 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_autocast_runs_the_products_in_its_dtype(function: str) -> None:
    arrays = gpu_problem(dtype=torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        value = total(function, arrays)
    got = [value.detach(), *torch.autograd.grad(value, leaves(arrays))]
    rounded = {n: t.detach().bfloat16().float().requires_grad_() if t.requires_grad else t for n, t in arrays.items()}
    want = results(function, rounded)
    assert all(tensor.dtype == torch.float32 for tensor in got)
    assert_close(got[:1], want[:1], 1e-5)
    assert_close(got[1:], want[1:], 2 * ROUNDING[torch.bfloat16])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(function: str, use_reentrant: bool) -> None:
    arrays = gpu_problem()

    def body(*tensors: Tensor) -> Tensor:
        return total(function, dict(zip(arrays, tensors, strict=True)))

    value = checkpoint(body, *arrays.values(), use_reentrant=use_reentrant)
    assert isinstance(value, Tensor)
    value.backward()
    gradients = [leaf.grad for leaf in leaves(arrays) if leaf.grad is not None]
    assert_same([value.detach(), *gradients], results(function, arrays))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_side_stream(function: str) -> None:
    arrays = gpu_problem()
    want = results(function, arrays)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = results(function, arrays)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(got, want)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_device_that_is_not_the_current_one(function: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    arrays = gpu_problem()
    want = results(function, arrays)
    moved = {name: a.detach().to("cuda:1").requires_grad_(a.requires_grad) for name, a in arrays.items()}
    assert torch.cuda.current_device() == 0
    assert_same([tensor.to(DEVICE) for tensor in results(function, moved)], want)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    from torch import distributed

    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("nccl", store, rank=0, world_size=1, device_id=torch.device(DEVICE, 0))
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("one_process")
def test_a_head_wrapped_by_fsdp2(dtype: torch.dtype) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, *batch = model_and_tokens(dtype=dtype)
    want = model_results(model, *batch)
    mesh = init_device_mesh(DEVICE, (1,))
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = model(*batch)
    loss.backward()
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    assert_close([loss.detach(), *(gradient.full_tensor() for gradient in gradients)], want, 1e-5)


def test_function_transforms_are_refused() -> None:
    arrays = gpu_problem()
    others = {name: tensor.detach() for name, tensor in arrays.items() if name != "input"}

    def loss(x: Tensor) -> Tensor:
        return core_triton.linear_cross_entropy(x, **others)

    for transformed in (torch.func.grad(loss), torch.func.vmap(lambda row: loss(row[None]))):
        with pytest.raises(TypeError, match=r"comes from a torch\.func transform, which is not supported"):
            transformed(arrays["input"].detach())


def test_arguments_on_another_device_are_refused() -> None:
    arrays = gpu_problem()
    with pytest.raises(ValueError, match=r"target must be on input's device cuda:0, got cpu"):
        core_triton.linear_cross_entropy(**arrays | {"target": arrays["target"].cpu()})


# Operators.


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [(0.0, None, True), (0.1, 4.0, False)], ids=["bias", "smoothing-softcap"])
def test_opcheck(dtype: torch.dtype, options: tuple[float, float | None, bool]) -> None:
    smoothing, softcap, bias = options
    arrays = gpu_problem(12, 8, 50, dtype=dtype, bias=bias)
    arguments: tuple[Any, ...] = (
        arrays["input"],
        arrays["linear_weight"],
        arrays.get("linear_bias"),
        arrays["target"].clamp(max=44),
        torch.linspace(0.0, 1.0, 12, device=DEVICE),
        torch.linspace(0.5, 2.0, 45, device=DEVICE) if smoothing else None,
    )
    # z_loss_weight, logit_scale, vocab_size, memory_budget
    settings = (smoothing, 0.01, softcap, 0.5, 45, 2**20, "triton")
    close: dict[str, Any] = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for wanted in ((True, True, bias), (False, True, False), (True, False, False)):
        for statistics in (True, False):
            torch.library.opcheck(ops.loss_and_gradients, (*arguments, *settings, statistics, True, *wanted), **close)
    torch.library.opcheck(ops.loss_and_gradients, (*arguments, *settings, True, False, True, False, False), **close)
    for statistics in (True, False):
        torch.library.opcheck(ops.row_losses, (*arguments, *settings, statistics, True, bias), **close)
    torch.library.opcheck(ops.log_probs, (*arguments, *settings, bias, True), **close)
    rows = torch.linspace(-1.0, 1.0, 12, device=DEVICE)
    plain = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
    sigma = rows if smoothing else None
    recomputed = (*plain, rows + 5.0, rows, rows, None, sigma, *settings, True, True, bias)
    torch.library.opcheck(ops.recomputed_gradients, recomputed, **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [False, True])
def test_opcheck_of_the_scaling(dtype: torch.dtype, rows: bool) -> None:
    gradient = torch.linspace(-1.0, 1.0, 96, device=DEVICE).reshape(12, 8).to(dtype)
    factor = torch.linspace(0.0, 3.0, 12, device=DEVICE)[:, None] if rows else torch.tensor(2.0, device=DEVICE)
    torch.library.opcheck(ops.scaled, (gradient, factor, 100))
    torch.library.opcheck(ops.scale_, (gradient.clone(), factor, 100))


# The host never waits.


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ignored", [False, True])
def test_nothing_waits_for_the_device(function: str, dtype: torch.dtype, ignored: bool) -> None:
    arrays = gpu_problem(dtype=dtype)
    if ignored:
        arrays["target"][::2] = -100
    options: dict[str, Any] = {"memory_budget": 2**22}
    if function != "log_probs":
        options |= {"normalizer": 7.0} if function == "mean" else {}
        options |= {"token_weight": torch.linspace(0.0, 1.0, 300, device=DEVICE)}
    results(function, arrays, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(function, arrays, **options)
        with torch.no_grad():
            total(function, arrays, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Training.


def curve(fused: bool, steps: int = 300) -> Tensor:
    """Trains a model in bfloat16; returns the mean losses of every 50 steps."""
    torch.manual_seed(0)
    model = Model(v=503, dtype=torch.bfloat16, fused=fused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for tokens in torch.from_numpy(walks(steps, batch=32, length=32, v=503)).to(DEVICE, torch.int64):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu().reshape(-1, 50).mean(1)


def test_a_model_trains_as_with_the_unfused_loss() -> None:
    fused, unfused = curve(fused=True), curve(fused=False)
    assert unfused[-1] < 0.5 * unfused[0]
    torch.testing.assert_close(fused, unfused, rtol=0.01, atol=0)


# Accesses to memory.


def under_sanitizer(name: str) -> Command:
    """Returns the program that runs a case where each access to the device's memory is checked."""
    each_its_own = "PYTORCH_NO_CUDA_MEMORY_CACHING=1"  # or an access past one tensor would fall into another
    options = ("--tool", "memcheck", "--error-exitcode", "9")
    return ("env", each_its_own, "compute-sanitizer", *options, *python("run_cases.py", "torch-triton", name))


CHECKED = ("mean-bf16-n123", "log_probs-bf16-n123", "mean-fp32-n123")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on PATH")
@pytest.mark.parametrize("name", each({name: under_sanitizer(name) for name in CHECKED}))
def test_memcheck_finds_nothing(name: str, printed: Printed) -> None:
    assert_passed(printed[name], ("triton", DEVICE))
