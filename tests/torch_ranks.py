"""Runs cases of the contract, and checks, on several processes of one machine and prints one JSON line for each:
`python torch_ranks.py RANKS IMPLEMENTATION FORM:NAME... check:NAME...`. After another number, requests run on so many
ranks. With the implementation "gpu" the kernels run on GPUs, which the ranks share if there are fewer. Then gloo
connects them, and otherwise NCCL.

A form says what the ranks share. "vocabulary": the ranks have the same tokens, and each has a shard of the head.
"tokens": each has the whole head and other tokens, not the same number. "both": half of each, on a grid of ranks. The
outputs of the ranks are put together to those of the case, and rank 0 compares them with the float64 reference. The
forms of `PLACEMENTS` are calls on DTensors, whose outputs are whole.
"""

import gc
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial, reduce
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from operator import add
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

if sys.argv[2:3] == ["triton"]:
    import interpret_loss  # before core_triton: the kernels run in Triton's interpreter

    interpret_loss.prepare_process()
from allocations import Meter, bytes_of
from assertions import least_budget
from dtensor_checks import DTENSOR_CHECKS, mesh_of, use_small_parts
from gathered_checks import GATHERED_CHECKS, error
from head_checks import HEAD_CHECKS
from host_checks import HOST_CHECKS, VERL_CHECKS, ZERO3_CHECKS
from parallel_host_checks import PARALLEL_HOST_CHECKS

import core_triton
from core_triton import vocab_shard
from parity.arrays import make_arrays
from parity.backends import dtype_names, options_of, torch_outputs
from parity.cases import Case, cases
from parity.expected import GRADIENT_OF, compare, expected

FORMS = ("vocabulary", "tokens", "both")
# Placements of the tokens and of the head, and what is gathered.
PLACEMENTS: dict[str, tuple[Placement, Placement, str | None]] = {
    "dtensor_vocabulary": (Replicate(), Shard(0), None),
    "dtensor_tokens": (Shard(0), Replicate(), None),
    "gathered_tokens": (Shard(0), Shard(0), "tokens"),
    "gathered_head": (Shard(0), Shard(0), "head"),
}
TIMEOUT = timedelta(seconds=60)
OF_TOKENS = ("input", "target", "token_weight", "d_log_prob", "d_entropy", "d_lse")  # their first axis is split


@dataclass(frozen=True)
class Place:
    """The part of a case that a rank has: shard `part` of `parts` of the vocabulary, and the same of the tokens."""

    part: int
    parts: int
    vocab_group: Any
    share: int
    shares: int
    token_group: Any

    def shard(self, rows: Tensor, classes: int | None, *, fill: float = float("nan")) -> Tensor:
        """Returns this rank's shard of the rows of the head, or of its bias."""
        if self.vocab_group is None:
            return rows
        size = -(-len(rows) // self.parts)
        if classes is None:  # vocab_size is the number of rows, divided as torch.chunk divides them
            return rows[self.part * size :][:size].clone()
        short = self.parts * size - len(rows)  # the same number of rows on every rank
        rows = torch.cat([rows, torch.full((short, *rows.shape[1:]), fill, dtype=rows.dtype)])
        return rows[self.part * size :][:size].clone()

    def tokens(self, values: Tensor) -> Tensor:
        """Returns this rank's tokens. The first rank has fewer than the others."""
        if self.token_group is None:
            return values
        cuts = [len(values) * share * share // self.shares**2 for share in range(self.shares + 1)]
        return values[cuts[self.share] : cuts[self.share + 1]].clone()


def budget_of(case: Case, parts: int) -> int:
    """Returns bytes for a fourth of the tokens, or for 16: several chunks."""
    classes, rows = -(-case.classes // parts), max(16, case.n // 4)
    per_token = 96 + 16 * (3 + len(case.per_token))
    return 65536 + per_token * case.n + 8 * case.classes + rows * (4 * classes + 64 * case.hidden + 2048)


def saved_of(case: Case, parts: int) -> dict[str, int]:
    """Returns the option of saved rows: bytes for all rows, or for those that the budget of the case holds on one
    device."""
    if not case.saved_budget or case.saved_budget >= 2**24:
        return {}
    whole, part = (32 + 2 * (case.hidden + -(-case.vocab // ranks // 64) * 64) for ranks in (1, parts))
    return {"saved_budget": 4096 + (case.saved_budget - 4096) // whole * part}


def run(case: Case, arrays: Mapping[str, np.ndarray], place: Place, implementation: str | None) -> dict[str, Any]:
    """Returns this rank's outputs."""
    dtypes, padded = dtype_names(case, arrays), case.spec.vocab_size
    tensors = {name: torch.tensor(value, dtype=getattr(torch, dtypes[name])) for name, value in arrays.items()}
    for name in tensors:
        per_token = name in (*OF_TOKENS, *case.per_token) or (name == "d_loss" and tensors[name].ndim)
        if per_token:
            flat = tensors[name].reshape(-1, *([case.hidden] if name == "input" else []))
            tensors[name] = place.tokens(flat)
    for name in ("linear_weight", "linear_bias"):
        if name in tensors:
            tensors[name] = place.shard(tensors[name], padded)
    if place.vocab_group is not None and "weight" in tensors:
        tensors["weight"] = tensors["weight"][: case.classes]
    if implementation == "gpu":
        tensors, implementation = {name: tensor.cuda() for name, tensor in tensors.items()}, "triton"
    options = options_of(case, implementation) | {"memory_budget": budget_of(case, place.parts)}
    options |= saved_of(case, place.parts)
    if place.vocab_group is not None:
        options |= {"vocab_group": place.vocab_group, "vocab_size": padded or case.vocab}
    if place.token_group is not None:
        options["token_group"] = place.token_group
    outputs = torch_outputs(case, tensors, options)
    return {name: one.detach().float().cpu().numpy() for name, one in outputs.items()}


def run_dtensors(
    case: Case, arrays: Mapping[str, np.ndarray], form: str, ranks: int, implementation: str
) -> dict[str, Any]:
    """Returns the outputs of a case on DTensors, whole."""
    of_tokens, of_head, gather = PLACEMENTS[form]
    device = "cuda" if implementation == "gpu" else "cpu"
    dtypes, mesh, tensors = dtype_names(case, arrays), mesh_of(ranks, device), dict[str, Tensor]()
    for name, value in arrays.items():
        made, placement = torch.tensor(value, dtype=getattr(torch, dtypes[name]), device=device), Replicate()
        if name in (*OF_TOKENS, *case.per_token) or (name == "d_loss" and made.ndim):
            made, placement = made.reshape(-1, *([case.hidden] if name == "input" else [])), of_tokens
        elif name in ("linear_weight", "linear_bias"):
            placement = of_head
        plain = name in ("weight", "normalizer")
        tensors[name] = made if plain else distribute_tensor(made, mesh, [placement])
    parts = 1 if of_head == Replicate() or gather == "head" else ranks
    options = options_of(case, "triton" if implementation == "gpu" else implementation)
    options |= {"memory_budget": budget_of(case, parts), "gather": gather} | saved_of(case, parts)
    outputs = {}
    for name, one in torch_outputs(case, tensors, options).items():
        assert isinstance(one, DTensor), name
        expected = of_head if name in ("d_weight", "d_bias") else Replicate() if one.ndim == 0 else of_tokens
        assert one.placements == (expected,), (name, one.placements)
        whole: Any = one.detach()
        outputs[name] = whole.full_tensor().float().cpu().numpy()
    return outputs


def joined(case: Case, found: Mapping[tuple[int, int], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the outputs of a case from those of the ranks, which are found by part of the vocabulary and share of the
    tokens. Asserts that what the ranks of a vocabulary share is the same, bit for bit."""
    parts, shares = (max(place) + 1 for place in zip(*found, strict=True))
    outputs: dict[str, np.ndarray] = {}
    for name in found[0, 0]:
        of_head = name in ("d_weight", "d_bias")
        of_shares = []
        for share in range(shares):
            of_parts = [found[part, share][name] for part in range(parts)]
            if of_head and parts > 1:
                of_shares.append(np.concatenate(of_parts)[: case.vocab])
                continue
            for one in of_parts:
                np.testing.assert_array_equal(one, of_parts[0], err_msg=f"{name} differs between ranks")
            of_shares.append(of_parts[0])
        if shares == 1:
            outputs[name] = of_shares[0]
        elif of_head or of_shares[0].ndim == 0:
            # The mean of the ranks' losses and gradients is that of all tokens.
            outputs[name] = np.sum(of_shares, 0) if name == "n_valid" else np.mean(of_shares, 0)
        else:
            outputs[name] = np.concatenate(of_shares) / (shares if name in GRADIENT_OF else 1)
    return outputs


def check(
    case: Case, arrays: Mapping[str, np.ndarray], outputs: dict[str, np.ndarray], *, shares: int, whole: bool = False
) -> Any:
    """Returns which part of its budget each output used, in percent. `whole`: the statistics are of all tokens."""
    reference = expected(case, arrays)
    shaped = {}
    for name, one in reference.items():
        if shares > 1 and name == "accuracy" and not whole:  # of each rank's tokens
            one = one._replace(value=np.asarray(outputs[name]))
        if shares > 1 and name == "d_bias" and case.weight_dtype != "float32":
            continue  # rounded on each rank before their mean, which cancels where all targets are one class
        shaped[name] = one
    given = {name: outputs[name].reshape(one.value.shape) for name, one in shaped.items()}
    return {name: comparison.percent for name, comparison in compare(case, shaped, given).items()}


# Checks. Each runs on all ranks.


def head_and_tokens(rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor, slice]:
    """Returns input (N, D), head (V, D) and targets (N,) of all ranks, some of them ignored, and which tokens are this
    rank's: none of those of rank 0 count."""
    drawn = torch.Generator().manual_seed(0)
    cuts = [0, 5, *range(17, 17 + 12 * (ranks - 1), 12)]
    x, w = torch.randn(cuts[-1], 16, generator=drawn), torch.randn(37, 16, generator=drawn)
    target = torch.randint(37, (len(x),), generator=drawn)
    target[:5] = -100
    target[9] = -100
    return x, w, target, slice(cuts[rank], cuts[rank + 1])


def whole_gradients(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the mean loss of all tokens and its gradients."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x @ w.T, target)
    loss.backward()
    assert x.grad is not None
    assert w.grad is not None
    return loss.detach(), x.grad, w.grad


def mean_of(value: Tensor) -> Tensor:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def check_data_parallel(rank: int, ranks: int, wrap: Callable[[torch.nn.Module], Any]) -> None:
    x, w, target, own = head_and_tokens(rank, ranks)
    loss, d_input, d_weight = whole_gradients(x, w, target)
    head = core_triton.LinearCrossEntropy(16, 37, token_group=dist.group.WORLD)
    with torch.no_grad():
        head.weight.copy_(w)
    wrapped = wrap(head)
    mine = x[own].clone().requires_grad_()
    found = wrapped(mine, target[own])
    found.backward()
    assert mine.grad is not None
    torch.testing.assert_close(mean_of(found), loss)
    torch.testing.assert_close(mine.grad / ranks, d_input[own])
    grad: Any = next(wrapped.parameters()).grad
    torch.testing.assert_close(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, d_weight)


def check_ddp(rank: int, ranks: int) -> None:
    check_data_parallel(rank, ranks, torch.nn.parallel.DistributedDataParallel)


def check_fsdp2(rank: int, ranks: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    check_data_parallel(rank, ranks, lambda module: fully_shard(module, mesh=mesh))


def check_errors(rank: int, ranks: int) -> None:
    x, w, target = torch.randn(6, 16), torch.randn(8, 16), torch.zeros(6, dtype=torch.long)
    world, loss = dist.group.WORLD, cast("Any", core_triton.linear_cross_entropy)
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "vocab_group must be a torch.distributed.ProcessGroup", lambda: loss(x, w, target, vocab_group=1)),
        (
            ValueError,
            "vocab_group must be a process group that this rank is in, got GroupMember.NON_GROUP_MEMBER: torch",
            lambda: loss(x, w, target, vocab_group=dist.GroupMember.NON_GROUP_MEMBER),
        ),
        (ValueError, "reduce_dtype must be", lambda: loss(x, w, target, reduce_dtype=torch.float16)),
        (
            ValueError,
            'token_group must be None with reduction "none"',
            lambda: loss(x, w, target, token_group=world, reduction="none"),
        ),
        (
            ValueError,
            "saved_budget must be the same on all ranks of vocab_group, got 100 on rank 0 and 101 on rank 1",
            lambda: loss(
                x, w, target, vocab_group=world, reduction="none", saved_budget=100 + rank, check_agreement=True
            ),
        ),
        (
            ValueError,
            "batch_invariant=True needs the kernels",
            lambda: loss(x, w, target, vocab_group=world, batch_invariant=True),
        ),
        (
            ValueError,
            "linear_weight must be this rank's shard of vocab_size 1000",
            lambda: loss(x, w, target, vocab_group=world, vocab_size=1000),
        ),
        (
            ValueError,
            "linear_weight must have at least one row",
            lambda: loss(x, w[:0], target, vocab_group=world),
        ),
        (
            ValueError,
            "weight must have shape",
            lambda: loss(x, w, target, vocab_group=world, weight=torch.ones(8)),
        ),
        (
            ValueError,
            "memory_budget must be the same on all ranks of vocab_group, got 1000000 on rank 0 and 1000001 on rank 1",
            lambda: loss(x, w, target, vocab_group=world, memory_budget=10**6 + rank, check_agreement=True),
        ),
        (
            ValueError,
            "reduction must be the same on all ranks of token_group",
            lambda: loss(x, w, target, token_group=world, reduction=("sum" if rank else "mean"), check_agreement=True),
        ),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=re.escape(message)):
            call()


def check_a_rank_without_classes(rank: int, ranks: int) -> None:
    """Five classes on four ranks: two, two, one and none."""
    x, target = torch.linspace(-1, 1, 60).reshape(20, 3), torch.arange(20) % 5
    w = torch.linspace(2, -2, 15).reshape(5, 3)
    loss, d_input, d_weight = whole_gradients(x, w, target)
    x, own = x.requires_grad_(), w[2 * rank : 2 * rank + 2].clone().requires_grad_()
    found = core_triton.linear_cross_entropy(x, own, target, vocab_group=dist.group.WORLD, vocab_size=5)
    found.backward()
    torch.testing.assert_close(found.detach(), loss)
    torch.testing.assert_close(x.grad, d_input)
    torch.testing.assert_close(own.grad, d_weight[2 * rank : 2 * rank + 2])


SHARDS_OF_SAVED = ((5, False), (5, True), (1, False))  # numbers of classes, and whether shards have padding


def check_saved_rows(
    rank: int, ranks: int, *, shards: tuple[Any, ...] = SHARDS_OF_SAVED, kernels: bool = False
) -> None:
    """Saved rows exchange nothing in the backward pass. The sum of a chunk's d_input ends after the next one's logits.
    Ranks have shards of different sizes, or with padding, or no class, or different tokens."""
    for classes, padded in shards:
        assert_saved_rows(rank, ranks, classes, padded=padded, kernels=kernels)


def assert_saved_rows(rank: int, ranks: int, classes: int, *, padded: bool, kernels: bool) -> None:
    steps, dtype = list[str](), torch.bfloat16 if kernels else torch.float32
    watched = [(dist, "all_reduce", "sum"), (dist, vocab_shard.ALL_GATHER, "numbers")]
    if kernels:
        from core_triton import scaled_exp, shard_rows

        watched += [(scaled_exp.ScaledExpCall, "_store_exponentials", "logits"), (shard_rows, "put_sum", "put")]

    def step(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            steps.append(name)
            return function(*arguments, **named)

        return call

    drawn = torch.Generator().manual_seed(0)
    x, w = torch.randn(60, 16, generator=drawn).to(dtype), torch.randn(classes, 16, generator=drawn).to(dtype)
    bias, target = torch.randn(classes, generator=drawn), torch.randint(classes, (60,), generator=drawn)
    target[::7] = -100
    upstream = torch.linspace(-1, 2, 60)
    whole = [one.detach().float().requires_grad_() for one in (x, w, bias)]
    logits = whole[0] @ whole[1].T + whole[2]
    loss = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    loss = loss + 0.1 * torch.where(target == -100, 0.0, logits.logsumexp(1).square())
    want = torch.autograd.grad(loss, whole, upstream)
    place = Place(rank, ranks, dist.group.WORLD, 0, 1, None)
    of_rank = [place.shard(one, classes if padded else None).requires_grad_() for one in (w, bias)]
    options: dict[str, Any] = {"vocab_group": dist.group.WORLD, "vocab_size": classes, "z_loss_weight": 0.1}
    options |= {"implementation": "triton" if kernels else "chunked", "linear_bias": of_rank[1], "saved_budget": 2**20}

    def run(own: slice, **more: Any) -> tuple[Tensor, ...]:
        mine = x[own].clone().requires_grad_()
        steps.clear()
        found = core_triton.linear_cross_entropy(
            mine,
            of_rank[0],
            target[own],
            reduction="none",
            **options,
            **more,
        )
        steps.append("backward")
        return torch.autograd.grad(found, (mine, *of_rank), upstream[own])

    def check(found: tuple[Tensor, ...], own: slice) -> None:
        wanted = want[0][own], *(place.shard(one, classes if padded else None, fill=0.0) for one in want[1:])
        assert all(error(*pair) < (2e-2 if kernels else 1e-6) for pair in zip(found, wanted, strict=True))

    every = slice(0, 60)
    budget = least_budget(lambda budget: run(every, memory_budget=budget))
    with ExitStack() as patches:
        for module, name, called in watched:
            patches.enter_context(mock.patch.object(module, name, step(called, getattr(module, name))))
        found = run(every, memory_budget=budget)
    chunks, numbers = steps.count("numbers"), ["numbers", "sum"]
    if kernels:
        numbers = ["logits", "numbers", "put", "sum"]
        assert steps == ["sum", "logits", "numbers", "sum", *numbers * (chunks - 1), "put", "backward"], steps
    else:
        assert steps == [*numbers * chunks, "backward"], steps
    assert chunks >= 3, steps
    check(found, every)
    with Meter() as meter:
        found = run(every, memory_budget=budget)
    check(found, every)
    of_call = {name: options[name] for name in ("vocab_group", "vocab_size", "implementation", "saved_budget")}
    plan = core_triton.explain(x, of_rank[0], reduction="none", **of_call).plan
    assert plan.saved is not None
    assert plan.saved.rows == 60
    assert meter.peak <= budget + plan.saved.bytes + bytes_of(x, *found), (meter.peak, budget, plan.saved)
    own = slice(rank * 60 // ranks, (rank + 1) * 60 // ranks)
    check(run(own, sequence_parallel=True), own)


KILLED = "check:killed"


def killed_rank(rank: int, store: str, errors: Connection) -> None:
    """A rank of two, the second of which ends after a call. The first sends its error."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=20))
    x, w, target = torch.randn(64, 16), torch.randn(50, 16, requires_grad=True), torch.arange(64)

    def call() -> Any:
        return core_triton.linear_cross_entropy(x, w, target, vocab_group=dist.group.WORLD)

    call()
    if rank:
        os._exit(0)
    try:
        call()
    except Exception as error:
        errors.send(f"{type(error).__name__}: {error}")
    else:
        errors.send("")
    os._exit(0)


def failure_of_killed(folder: str) -> str:
    """A rank that ends ends the others with an error. These ranks are processes of their own, which fork before those
    of the other checks. Returns what is wrong."""
    context = get_context("fork")
    errors, sent = context.Pipe(duplex=False)
    processes = [context.Process(target=killed_rank, args=(rank, f"{folder}/killed", sent)) for rank in range(2)]
    for process in processes:
        process.start()
    found = errors.recv() if errors.poll(40) else "no result in 40 s"
    for process in processes:
        process.kill()
        process.join()
    return "" if "Error" in found else f"the other rank went on: {found}"


def check_reduce_dtype(rank: int, ranks: int) -> None:
    """The parts of d_input are rounded to bfloat16 before they are added."""
    x, w, target, _ = head_and_tokens(rank, ranks)
    w = torch.cat([w, w[: -len(w) % ranks]])
    _, d_input, _ = whole_gradients(x, w, target)
    rows = len(w) // ranks
    for dtype, least, most in ((torch.float32, 0.0, 1e-6), (torch.bfloat16, 1e-4, 1e-2)):
        mine = x.clone().requires_grad_()
        own = w[rank * rows :][:rows]
        options: dict[str, Any] = {"vocab_group": dist.group.WORLD, "reduce_dtype": dtype}
        core_triton.linear_cross_entropy(mine, own, target, **options).backward()
        assert mine.grad is not None
        error = (mine.grad - d_input).norm() / d_input.norm()
        assert least <= error < most, (dtype, float(error))


def check_compile(rank: int, ranks: int) -> None:
    """torch.compile traces the exchange of a vocabulary, and the sum of the counted tokens, without a graph break."""
    ranks, group = 2, dist.new_group([0, 1])
    if rank >= ranks:  # to compile takes a second on each rank
        return
    x, w, target, own = head_and_tokens(rank, ranks)
    rows = torch.arange(len(w)).chunk(ranks)[rank]
    of_group: list[tuple[dict[str, Any], tuple[Tensor, ...]]] = [
        ({"vocab_group": group, "vocab_size": len(w)}, (x, w[rows], target)),
        ({"token_group": group}, (x[own], w, target[own])),
    ]
    for options, arrays in of_group:
        loss = partial(core_triton.linear_cross_entropy, **options)
        found = torch.compile(loss, fullgraph=True, backend="aot_eager")(*arrays)
        torch.testing.assert_close(found, loss(*arrays))
    x, own = x.requires_grad_(), w[rows].requires_grad_()
    options = {"vocab_group": group, "vocab_size": len(w), "reduction": "none", "saved_budget": 2**20}

    def gradients(loss: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(x, own, target), (x, own), torch.linspace(-1, 2, len(x)))

    loss = partial(core_triton.linear_cross_entropy, **options)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled), gradients(loss))


def check_explain(rank: int, ranks: int) -> None:
    """The plan of a shard has its rows, and the two passes."""
    x, w = torch.empty(100, 16, dtype=torch.bfloat16), torch.empty(64 // ranks, 16, dtype=torch.bfloat16)
    options: dict[str, Any] = {"vocab_group": dist.group.WORLD, "vocab_size": 62}
    text = str(core_triton.explain(x, w, **options))
    assert "path: chunked" in text, text
    w, options["sequence_parallel"] = torch.empty(1024, 16, dtype=torch.bfloat16), True
    options |= {"vocab_size": 1024 * ranks, "memory_budget": 300_000, "device": "h100"}
    text = str(core_triton.explain(x, w, **options))
    assert "path: scaled_exp" in text, text
    assert re.search(f"tokens: gathered chunk by chunk, up to \\d+ of each of {ranks} ranks", text), text
    text = str(core_triton.explain(x, w, reduction="none", **options))
    assert "tokens" not in text, text
    del options["memory_budget"]
    for tokens in (100 * ranks, 100):  # of all ranks, or the same on each
        saved_budget = 4096 + -(-tokens // 8) * 8 * (32 + 2 * (16 + 1024))  # of a rank's classes
        text = str(core_triton.explain(x, w, reduction="none", saved_budget=saved_budget, **options))
        assert "path: scaled_exp" in text, text
        assert re.search(f"saved: {tokens} of {tokens} rows in .* MiB: 3 matmuls", text), text
        options.pop("sequence_parallel", None)


def assert_shards_err_as_one(x: Tensor, w: Tensor, target: Tensor, bias: Tensor, part: slice, **options: Any) -> None:
    """Asserts that the kernels give the loss of all classes, and that the errors of its gradients are those of one
    process, or of parts of d_input that are rounded to bfloat16."""

    def run(head: Tensor, bias: Tensor, **more: Any) -> tuple[Tensor, list[Tensor]]:
        mine, head, bias = (one.detach().clone().requires_grad_() for one in (x.to(head.dtype), head, bias))
        loss = core_triton.linear_cross_entropy(mine, head, target, linear_bias=bias, **options, **more)
        return loss.detach(), list(torch.autograd.grad(loss, (mine, head, bias)))

    loss, exact = run(w.float(), bias, implementation="chunked")

    def errors(found: tuple[Tensor, list[Tensor]], shard: slice) -> list[float]:
        torch.testing.assert_close(found[0], loss, atol=1e-4, rtol=1e-4)
        pairs = zip(found[1], (exact[0], exact[1][shard], exact[2][shard]), strict=True)
        return [float((gradient.float() - one).norm() / one.norm()) for gradient, one in pairs]

    of_one = errors(run(w, bias, implementation="triton"), slice(None))
    for dtype, more in ((torch.float32, 1.1), (torch.bfloat16, 1.8)):
        of_group: dict[str, Any] = {"vocab_group": dist.group.WORLD, "reduce_dtype": dtype}
        of_shards = errors(run(w[part], bias[part], implementation="triton", **of_group), part)
        assert of_shards[0] < more * of_one[0], (dtype, of_shards, of_one)
        for of_shard, whole in zip(of_shards[1:], of_one[1:], strict=True):  # of other classes
            assert of_shard < 2 * whole, (dtype, of_shards, of_one)


def check_far_logits(rank: int, ranks: int) -> None:
    """Logits that are all about -700 have exponentials of 0 unless all ranks know the logit of the target."""
    x, w, target, _ = head_and_tokens(rank, ranks)
    w = torch.cat([w, w[: -len(w) % ranks]]).bfloat16()
    part = slice(rank * len(w) // ranks, (rank + 1) * len(w) // ranks)
    assert_shards_err_as_one(x.bfloat16(), w, target, torch.full((len(w),), -700.0), part)


def check_smoothing(rank: int, ranks: int) -> None:
    """With 256 classes or more on each rank, label smoothing adds terms of rank one."""
    drawn, classes = torch.Generator().manual_seed(0), 300 * ranks
    x = torch.randn(40, 32, generator=drawn).bfloat16()
    w = (torch.randn(classes, 32, generator=drawn) / 4).bfloat16()
    target, bias = torch.randint(classes, (40,), generator=drawn), torch.randn(classes, generator=drawn)
    target[::7] = -100
    part = slice(300 * rank, 300 * (rank + 1))
    weight = 0.5 + torch.rand(classes, generator=drawn)
    for options in ({}, {"weight": weight, "logit_scale": 0.7, "z_loss_weight": 1e-3}):
        assert_shards_err_as_one(x, w, target, bias, part, label_smoothing=0.1, memory_budget=2**18, **options)


def check_statistics(rank: int, ranks: int) -> None:
    """The largest logits of several class blocks on each rank, in float16, whose blocks have shifts too."""
    drawn, rows = torch.Generator().manual_seed(0), 600
    x = torch.randn(40, 32, generator=drawn).half()
    w = torch.randn(rows * ranks, 32, generator=drawn).half()
    logits = x.float() @ w.float().T
    largest = logits.argmax(1)
    last_block = torch.arange(rows * ranks) % rows >= 512
    target = logits.masked_fill(last_block, -torch.inf).argmax(1)
    assert 0 < (target == largest).sum() < 40
    options: dict[str, Any] = {"vocab_group": dist.group.WORLD, "implementation": "triton", "memory_budget": 2**18}
    mine, own = x.requires_grad_(), w[rows * rank : rows * (rank + 1)].clone().requires_grad_()
    _, stats = core_triton.linear_cross_entropy_with_stats(mine, own, target, **options)
    assert float(stats.accuracy) == float((largest == target).float().mean())


def check_batch_invariant(rank: int, ranks: int, **options: Any) -> None:
    """The results of a row are the same bits among any rows. All ranks' parts of d_input are added in their order."""
    world = dist.group.WORLD
    assert world is not None
    options |= {"vocab_group": world, "vocab_size": 300}
    with mock.patch.object(vocab_shard, "start_all_sum", None):
        found = interpret_loss.batch_invariant_differences((rank, ranks), "triton", **options)
    if "sequence_parallel" in options:
        del found["repaired rows"]
    assert not [(name, key) for name, of_name in found.items() for key, differs in of_name.items() if differs], found
    parts = torch.randn(ranks, 7, 3, generator=torch.Generator().manual_seed(0))
    want = reduce(add, parts)
    assert torch.equal(vocab_shard.ordered_sum(parts[rank].clone(), ranks, world.group_name), want)


def check_batch_invariant_gathered(rank: int, ranks: int, *, of_rows: bool) -> None:
    """All tokens, which are gathered at once, are those of a rank, twice."""
    check_batch_invariant(rank, ranks, sequence_parallel=True, budget=60_000, of_rows=of_rows)


CHECKS: dict[str, Callable[[int, int], None]] = {
    "ddp": check_ddp,
    "fsdp2": check_fsdp2,
    "errors": check_errors,
    "a_rank_without_classes": check_a_rank_without_classes,
    "saved_rows": check_saved_rows,
    "reduce_dtype": check_reduce_dtype,
    "compile": check_compile,
    "explain": check_explain,
    **DTENSOR_CHECKS,
}
KERNEL_CHECKS: dict[str, Callable[[int, int], None]] = {
    "saved_rows_by_kernels": partial(check_saved_rows, shards=SHARDS_OF_SAVED[1:], kernels=True),
    "saved_rows_of_different_sizes": partial(check_saved_rows, shards=SHARDS_OF_SAVED[:1], kernels=True),
    "far_logits": check_far_logits,
    "smoothing": check_smoothing,
    "statistics": check_statistics,
    "batch_invariant": check_batch_invariant,
    "batch_invariant_gathered": partial(check_batch_invariant_gathered, of_rows=False),
    "batch_invariant_gathered_rows": partial(check_batch_invariant_gathered, of_rows=True),
    **GATHERED_CHECKS,
    **HEAD_CHECKS,
}


def run_check(
    request: str, check: Callable[[int, int], None], rank: int, ranks: int, write: Callable[..., None]
) -> None:
    failure = ""
    try:
        check(rank, ranks)
    except (Exception, pytest.fail.Exception):
        failure = f"rank {rank}: {traceback.format_exc()[-2000:]}"
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, failure)
    if rank == 0:
        write(json.dumps({"name": request, "failure": next(filter(None, every), "")}))


def worker(
    rank: int, ranks: int, implementation: str, requests: list[str], store: str, write: Callable[..., None]
) -> None:
    torch.set_num_threads(1)
    use_small_parts()
    backend = "gloo"
    if implementation == "gpu":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= ranks else "gloo"
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT)
    half = ranks // 2
    rows, columns = [], []  # of a grid of 2 parts of the vocabulary and `half` shares of the tokens
    for share in range(half):
        rows.append(dist.new_group([2 * share, 2 * share + 1]))
    for part in range(2):
        columns.append(dist.new_group(list(range(part, ranks, 2))))
    world = dist.group.WORLD
    places = {
        "vocabulary": Place(rank, ranks, world, 0, 1, None),
        "tokens": Place(0, 1, None, rank, ranks, world),
        "both": Place(rank % 2, 2, rows[rank // 2], rank // 2, half, columns[rank % 2]),
    }
    whole = Place(0, 1, None, 0, 1, None)
    by_name = {case.name: case for case in cases()}
    for request in requests:
        form, name = request.split(":", 1)
        if form == "check":
            checks = CHECKS | KERNEL_CHECKS | HOST_CHECKS | ZERO3_CHECKS | VERL_CHECKS | PARALLEL_HOST_CHECKS
            run_check(request, checks[name], rank, ranks, write)
            continue
        case = replace(by_name[name], tight_memory=True)
        arrays, place, of_dtensors = make_arrays(by_name[name]), places.get(form, whole), form in PLACEMENTS
        try:
            if of_dtensors:
                outcome: Any = run_dtensors(case, arrays, form, ranks, implementation)
            else:
                outcome = run(case, arrays, place, implementation)
        except Exception as failure:  # one failing case must not hide the others, and the ranks fail together
            outcome = f"{type(failure).__name__}: {failure}"
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, ((place.part, place.share), outcome))
        if rank:
            continue
        result: dict[str, Any] = {"name": request}
        failures = [one for _, one in every if isinstance(one, str)]
        try:
            if failures:
                raise RuntimeError(failures[0])
            shares = ranks if form in ("dtensor_tokens", "gathered_head") else place.shares
            result["used"] = check(case, arrays, joined(case, dict(every)), shares=shares, whole=of_dtensors)
        except Exception as failure:
            result["failure"] = f"{type(failure).__name__}: {failure}"
        write(json.dumps(result))
    dist.destroy_process_group()


def import_compiler() -> None:
    """Imports the 900 modules that torch.compile imports when it compiles a function. A gradient would start threads,
    which do not survive a fork, so the modules that only a backward pass or a dynamic size needs are named here."""
    torch.compile(torch.sin, fullgraph=True, backend="aot_eager")(torch.zeros(2))
    for name in ("torch._inductor.pattern_matcher", "sympy.physics.units"):
        import_module(name)


def by_ranks(arguments: list[str]) -> list[tuple[int, list[str]]]:
    """Returns numbers of ranks, each with the requests that follow it."""
    found: list[tuple[int, list[str]]] = []
    for argument in arguments:
        if argument.isdecimal():
            found.append((int(argument), []))
        else:
            found[-1][1].append(argument)
    return found


def main() -> None:
    first, implementation, *others = sys.argv[1:]
    requests = [other for other in others if not other.isdecimal()]
    # Gloo prints its lines in parts, which end up before a result on the same line. So all else goes to stderr.
    write = partial(print, file=os.fdopen(os.dup(sys.stdout.fileno()), "w"), flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with tempfile.TemporaryDirectory() as folder:
        if KILLED in requests:
            others.remove(KILLED)
            write(json.dumps({"name": KILLED, "failure": failure_of_killed(folder)}))
        # Forked, so that the processes share what this one has imported and computed.
        if not {"check:compile", "check:dtensor_compiled"}.isdisjoint(requests):
            import_compiler()
        cases()
        gc.disable()  # the processes end before cycles take much memory
        failed = []
        for number, (ranks, of_ranks) in enumerate(by_ranks([first, *others])):
            arguments = ranks, implementation, of_ranks, f"{folder}/store{number}", write
            processes = [get_context("fork").Process(target=worker, args=(rank, *arguments)) for rank in range(ranks)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            failed += [process.exitcode for process in processes if process.exitcode]
    sys.stdout.flush()
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    main()
