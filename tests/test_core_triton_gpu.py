"""Tests core_triton on an NVIDIA GPU: every case of the contract, memory, and PyTorch's transformations.

Run with `pytest -m gpu`.
"""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from markov_data import markov_tokens
from programs import Command, Printed, each, python
from run_cases import assert_passed, commands
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_gpu import (
    DEVICE,
    DTYPES,
    ROUNDING,
    Model,
    assert_close,
    assert_same,
    gpu_problem,
    model_and_tokens,
    model_results,
    results,
)
from torch_problem import FUNCTIONS, leaves, total

import core_triton
from core_triton import replay, tile_config
from core_triton.plan import make_plan
from parity.cases import Case, cases

pytestmark = pytest.mark.gpu

# Every case of the contract.


KERNELS = ("triton", "triton_sm80")  # the default, and the kernels for compute capability 8.x
SHARES = 16  # processes that share the cases


def kinds(case: Case) -> tuple[Any, ...]:
    """Returns what a case's kernels depend on most. One process runs cases of a kind, so that kernels compile once."""
    options = case.spec.reduction == "none", case.spec.softcap is not None, case.has_bias, case.vocab_axis
    return case.dtype, case.function, *options


def every_case(backend: str) -> dict[str, Command]:
    """Returns the program that runs each case on a backend."""
    ordered, share = sorted(cases(), key=kinds), math.ceil(len(cases()) / SHARES)
    return commands(backend, (ordered[start : start + share] for start in range(0, len(ordered), share)))


@pytest.mark.parametrize(
    ("implementation", "name"),
    [
        pytest.param(implementation, *case.values, marks=case.marks)
        for implementation in KERNELS
        for case in each(every_case(f"torch-{implementation}"), seconds=80)
    ],
)
def test_case(implementation: str, name: str, printed: Printed) -> None:
    assert_passed(printed[name], (implementation, DEVICE))


# A first chunk in pieces.


@pytest.mark.parametrize(
    ("implementation", "dtype", "head", "transposed"),
    [
        ("triton", torch.bfloat16, torch.bfloat16, False),
        ("triton", torch.bfloat16, torch.float32, False),
        ("triton", torch.float16, torch.float16, False),
        ("triton_sm80", torch.bfloat16, torch.bfloat16, False),
        ("triton_sm80", torch.bfloat16, torch.bfloat16, True),
        ("triton_sm80", torch.float16, torch.float16, False),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 30.0, "logit_scale": 0.5}, {"logit_scale": 6.0}, {"logit_scale": 20.0}], ids=str
)
@pytest.mark.parametrize(("n", "mebibytes"), [(1000, 24), (1500, 60)])
def test_a_first_chunk_in_the_memory_of_d_weight(
    n: int,
    mebibytes: int,
    options: dict[str, Any],
    implementation: str,
    dtype: torch.dtype,
    head: torch.dtype,
    transposed: bool,
) -> None:
    """Compares with `chunked` in float32. Where logits are multiplied by 20, most row blocks are computed again. Where
    they are multiplied by 6, most rows of float16 are shifted."""
    if implementation == "triton" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only the kernels for Hopper and for compute capability 8.x have pieces")
    check_a_first_chunk(n, mebibytes, options, implementation, dtype, head, transposed)


def check_a_first_chunk(
    n: int,
    mebibytes: int,
    options: dict[str, Any],
    implementation: str,
    dtype: torch.dtype,
    head: torch.dtype,
    transposed: bool,
) -> None:
    d, v = 1024, 40008
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, w, bias = (torch.randn(*shape, device=DEVICE, generator=generator) for shape in ((n, d), (v, d), (v,)))
    x, w, bias = x.to(dtype), (w / d**0.5).to(head), bias.to(head)
    if transposed:
        w = w.T.contiguous().T
    upstream = torch.tensor(1.0 if dtype == torch.bfloat16 else 8.0 * n, device=DEVICE)  # of a mean
    target = torch.randint(0, v - 18, (n,), device=DEVICE, generator=generator)
    target[::7] = -100
    shared: dict[str, Any] = {"vocab_size": v - 18, **options}
    ours: dict[str, Any] = {"memory_budget": mebibytes * 2**20, "implementation": implementation}
    if head == torch.float32:
        ours |= {"head_precision": "float32"}
    chunks: Any = core_triton.explain(x, w, vocab_size=v - 18, **ours).plan.chunks
    if mebibytes < 100:
        assert chunks.first_rows > 0
        assert 0 < chunks.piece < v // 2 + 1024  # at least two pieces
    else:
        assert chunks.rows == n

    def run(*arrays: Tensor, **more: Any) -> list[Tensor]:
        x, w, bias = (array.clone().requires_grad_() for array in arrays)
        loss = core_triton.linear_cross_entropy(x, w, target, linear_bias=bias, **shared, **more)
        return [loss.detach(), *torch.autograd.grad(loss, (x, w, bias), upstream)]

    with core_triton.range_report() as report:
        found = run(x, w, bias, **ours)
    if dtype == torch.float16 and options.get("logit_scale") == 6.0:
        assert report.shifted_rows > n / 2
    wanted = run(x.float(), w.float(), bias.float(), implementation="chunked")
    assert_close(found[:1], wanted[:1], 1e-5)
    assert_close(found[1:], wanted[1:], 6e-3 if dtype == torch.bfloat16 else 1e-3)
    assert_same(found, run(x, w, bias, **ours))


@pytest.fixture
def tiles_of_ada(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives "triton_sm80" the tiles that it has for compute capability 8.9 and 12.x, which take less shared memory."""

    def forget() -> None:
        make_plan.cache_clear()
        replay._recordings.clear()

    monkeypatch.setattr(tile_config, "kernel_capability", lambda capability: 89 if capability == 80 else capability)
    forget()
    yield
    forget()


@pytest.mark.usefixtures("tiles_of_ada")
@pytest.mark.parametrize(
    ("dtype", "transposed"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)], ids=str
)
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "logit_scale": 0.5}, {"logit_scale": 20.0}], ids=str)
@pytest.mark.parametrize("mebibytes", [24, 400])
def test_tiles_of_ada(mebibytes: int, options: dict[str, Any], dtype: torch.dtype, transposed: bool) -> None:
    """A first chunk in pieces and other chunks, and one chunk."""
    x, w = (torch.empty(*shape, device="meta", dtype=dtype) for shape in ((1000, 1024), (40008, 1024)))
    tile: Any = core_triton.explain(x, w, implementation="triton_sm80", device="h200").plan.ampere_tile
    assert (tile.block_d, tile.num_stages) == (32, 3)
    check_a_first_chunk(1000, mebibytes, options, "triton_sm80", dtype, dtype, transposed)


# The range of float16.


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(("deviation", "shifted", "repaired"), [(1.0, 0.05, 0), (8.0, 0.95, 0.9), (40.0, 1.0, 1)])
@pytest.mark.parametrize("budget", [2**25, 2**29], ids=["32 MiB", "512 MiB"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_exponentials_fit_in_float16(
    implementation: Any, deviation: float, shifted: float, repaired: float, budget: int, smoothing: float
) -> None:
    """Compares with float64, over chunks and class blocks. `shifted` and `repaired` are the most that is expected."""
    n, d, v = 2000, 256, 5001
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, w = (torch.randn(rows, d, device=DEVICE, generator=generator) for rows in (n, v))
    x, w = (x * deviation).half().requires_grad_(), (w / d**0.5).half().requires_grad_()
    target = torch.randint(0, v, (n,), device=DEVICE, generator=generator)
    options: dict[str, Any] = {"memory_budget": budget, "implementation": implementation, "label_smoothing": smoothing}
    assert core_triton.explain(x, w, **options).plan.path == "scaled_exp"
    with core_triton.range_report() as report:
        loss = core_triton.linear_cross_entropy(x, w, target, **options)
    (loss * 1024).backward()
    assert report.rows == n
    assert report.shifted_rows <= shifted * n
    assert report.repaired_blocks <= repaired * report.blocks
    exact = [one.detach().double().requires_grad_() for one in (x, w)]
    wanted = F.cross_entropy(exact[0] @ exact[1].T, target, label_smoothing=smoothing)
    (wanted * 1024).backward()
    assert abs(loss.item() - wanted.item()) < 1e-5 * wanted.item()
    for one, other in zip((x, w), exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad.double() - other.grad).norm() < 6e-4 * other.grad.norm()


@pytest.mark.parametrize("implementation", KERNELS)
def test_rows_beside_a_repair_keep_their_shifts(implementation: Any) -> None:
    """A token loss computes only the rows again that need it. The others keep exponentials that were divided."""
    n, d, v = 700, 64, 3001
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, w = (torch.randn(rows, d, device=DEVICE, generator=generator) for rows in (n, v))
    x[::50] *= 10
    x, w = (x * 8).half().requires_grad_(), (w / d**0.5).half().requires_grad_()
    target, factor = torch.randint(0, v, (n,), device=DEVICE, generator=generator), torch.ones(n, device=DEVICE)
    with core_triton.range_report() as report:
        loss = core_triton.linear_token_loss(
            x, w, target, core_triton.token_losses.weighted_nll(), factor, implementation=implementation
        )
    (loss * 1024).backward()
    assert report.repaired_blocks > 0
    assert report.shifted_rows > n / 10
    exact = [one.detach().double().requires_grad_() for one in (x, w)]
    (F.cross_entropy(exact[0] @ exact[1].T, target) * 1024).backward()
    assert x.grad is not None
    assert exact[0].grad is not None
    error = (x.grad.double() - exact[0].grad).norm(dim=1) / exact[0].grad.norm(dim=1)
    assert error.max() < 2e-3


# More than 2**31 logits.


@pytest.mark.usefixtures("no_other_programs")
@pytest.mark.parametrize("budget", [2**29, 2**34], ids=["512 MiB", "16 GiB"])  # several chunks, or one chunk of 5 GB
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("implementation", KERNELS)
def test_more_logits_than_32_bits_count(implementation: str, reduction: Any, budget: int) -> None:
    arrays = gpu_problem(20000, 64, 128256)
    assert arrays["input"].shape[0] * arrays["linear_weight"].shape[0] > 2**31
    arrays["target"][-1] = 128255
    x, w, y = arrays["input"].detach().float(), arrays["linear_weight"].detach().float(), arrays["target"]
    upstream = torch.ones((), device=DEVICE) if reduction == "mean" else torch.linspace(-1.0, 1.0, 20000, device=DEVICE)
    scale = upstream / 20000 if reduction == "mean" else upstream
    loss = core_triton.linear_cross_entropy(
        **arrays, reduction=reduction, memory_budget=budget, implementation=implementation
    )
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


# Chunks add to d_weight in three ways: `gpus.share_added_in_l2`. A GPU uses some of them.


@pytest.mark.parametrize("in_l2", [0, 0.5, 1])
def test_chunks_add_to_d_weight(in_l2: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from core_triton import hopper_gradients, replay

    arrays, budget = gpu_problem(8192, 192, 1001, dtype=torch.bfloat16), 2**21
    plan = core_triton.explain(arrays["input"], arrays["linear_weight"], memory_budget=budget).plan
    assert 512 <= plan.chunks.rows <= 1024
    monkeypatch.setattr(hopper_gradients, "share_added_in_l2", lambda rows, gpu: in_l2)
    replay._recordings.clear()  # an equal call may have been recorded with another share
    found = results("sum", arrays, memory_budget=budget)
    replay._recordings.clear()
    exact = {name: a.detach().float().requires_grad_() if a.requires_grad else a for name, a in arrays.items()}
    assert_close(found, results("sum", exact, implementation="chunked"), ROUNDING[torch.bfloat16])


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


@pytest.mark.usefixtures("no_other_programs")
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
        needed = leaves(arrays)
        return sum(gradient.nbytes for gradient in torch.autograd.grad(loss, needed, upstream[reduction]))

    used = {}
    for kind in KINDS:
        for name, budget in BUDGETS.items():
            call(kind, budget)  # cuBLAS allocates its workspace once and keeps it
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            gradients = call(kind, budget)
            used[kind, name] = (torch.cuda.max_memory_allocated() - before - gradients) / budget
    over = {key: f"{share:.1%}" for key, share in used.items() if share > 1}
    assert not over, f"used of its budget: {over}"


# PyTorch features around a call.


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_graph_replays_with_changed_inputs(function: str, dtype: torch.dtype) -> None:
    arrays = gpu_problem(dtype=dtype)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and allocates the workspace of cuBLAS
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


@pytest.mark.parametrize("function", FUNCTIONS)
def test_autocast_runs_the_matmuls_in_its_dtype(function: str) -> None:
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
    """Trains a bfloat16 model and returns the mean losses of every 50 steps."""
    torch.manual_seed(0)
    model = Model(v=503, dtype=torch.bfloat16, fused=fused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for tokens in torch.from_numpy(markov_tokens(steps, batch=32, length=32, v=503)).to(DEVICE, torch.int64):
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


# Memory accesses.


def under_sanitizer(implementation: str, name: str) -> Command:
    """Returns the program that runs a case with kernels and checks each access to device memory."""
    each_its_own = "PYTORCH_NO_CUDA_MEMORY_CACHING=1"  # otherwise an access past one tensor would hit another
    options = ("--tool", "memcheck", "--error-exitcode", "9")
    return (
        "env",
        each_its_own,
        "compute-sanitizer",
        *options,
        *python("run_cases.py", f"torch-{implementation}", name),
    )


CHECKED = ("mean-bf16-n123", "log_probs-bf16-n123", "mean-fp32-n123")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on PATH")
@pytest.mark.parametrize(
    ("implementation", "name"),
    [
        pytest.param(implementation, *case.values, marks=case.marks)
        for implementation in KERNELS
        for case in each({name: under_sanitizer(implementation, name) for name in CHECKED}, seconds=40)
    ],
)
def test_memcheck_finds_nothing(implementation: str, name: str, printed: Printed) -> None:
    assert_passed(printed[name], (implementation, DEVICE))


@pytest.mark.parametrize("normalizer", [-1.0, float("nan"), float("inf"), 0.0, 3.0])
def test_a_normalizer_on_the_gpu(normalizer: float) -> None:
    """Only a negative or non-finite normalizer makes the loss NaN. A normalizer of 0 makes it 0."""
    arrays: dict[str, Any] = {
        "input": torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True),
        "linear_weight": torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True),
        "target": torch.randint(0, 4096, (300,), device="cuda"),
    }
    loss = core_triton.linear_cross_entropy(**arrays, normalizer=torch.tensor(normalizer, device="cuda"))
    gradients = torch.autograd.grad(loss, (arrays["input"], arrays["linear_weight"]))
    right = 0 <= normalizer < float("inf")
    assert loss.isfinite() == right
    assert all(gradient.isfinite().all() == right for gradient in gradients)
    assert (loss == 0) == (normalizer == 0)
