"""Checks of calls on DTensors, which `torch_ranks.py` runs on all of its ranks."""

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import core_triton
from core_triton import head_scatter, token_losses
from core_triton.parallel import VocabParallel

TOKENS, HIDDEN, CLASSES = 45, 16, 101  # none is a multiple of the ranks
BUDGET = 44_000  # several chunks of the tokens
ON_GPUS = sys.argv[2:3] == ["gpu"]

Arrays = dict[str, Tensor]


def use_small_parts() -> None:
    """Makes this process send the gradient of a gathered head in several parts."""
    head_scatter.PROGRAMS, head_scatter.BLOCK_V = 1, 256 if ON_GPUS else 4


def drawn() -> Arrays:
    """Returns the arrays of a call. The tokens of the first rank of four, and some others, are ignored. Every third
    target of the others has the largest logit."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    target = torch.randint(CLASSES, (TOKENS,), generator=generator)
    target[:13] = target[20] = -100
    x, w, b = normal(TOKENS, HIDDEN), normal(CLASSES, HIDDEN) / 2, normal(CLASSES)
    target[21::3] = (x @ w.T + b).argmax(1)[21::3]
    return {
        "input": x,
        "linear_weight": w,
        "linear_bias": b,
        "target": target,
        "token_weight": torch.rand(TOKENS, generator=generator),
    }


DIFFERENTIATED = ("input", "linear_weight", "linear_bias")
OF_TOKENS = ("input", "target", "token_weight")
UPSTREAM = torch.linspace(-1, 1, TOKENS)


@cache
def mesh_of(ranks: int, device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (ranks,))


@cache
def grid_of(ranks: int) -> DeviceMesh:
    """Returns a mesh of two dimensions. It is made once, because it makes process groups."""
    return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "tensor"))


def loss_and_gradients(function: Callable[..., Any], arrays: Arrays, upstream: Tensor | None) -> list[Tensor]:
    """Returns the loss and its gradients, each of all ranks."""
    loss = function(**arrays)
    leaves = [arrays[name] for name in DIFFERENTIATED]
    found = [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in found]


def mean(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return core_triton.linear_cross_entropy(input, linear_weight, target, memory_budget=BUDGET, **options)


def total(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return mean(input, linear_weight, target, reduction="sum", z_loss_weight=1e-3, label_smoothing=0.1, **options)


def each(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return mean(input, linear_weight, target, reduction="none", softcap=3.0, **options)


def log_probs(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    options.pop("token_weight")
    found = core_triton.linear_log_probs(input, linear_weight, target, memory_budget=BUDGET, **options)
    return found.log_prob + 0.1 * found.entropy


def token_loss(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    weights = options.pop("token_weight")
    arguments = input, linear_weight, target, token_losses.weighted_nll(), weights
    return core_triton.linear_token_loss(*arguments, memory_budget=BUDGET, **options)


# Placements of the tokens and of the head on a mesh of one or two dimensions.
ONE = (
    ([Replicate()], [Shard(0)]),
    ([Shard(0)], [Replicate()]),
    ([Shard(0)], [Shard(0)]),
    ([Replicate()], [Replicate()]),
)
TWO = (
    ([Shard(0), Replicate()], [Replicate(), Shard(0)]),
    ([Replicate(), Shard(0)], [Shard(0), Replicate()]),
    ([Shard(0), Replicate()], [Shard(0), Replicate()]),
    ([Shard(0), Shard(0)], [Replicate(), Shard(0)]),
    ([Shard(0), Shard(0)], [Shard(0), Replicate()]),
    ([Shard(0), Shard(0)], [Replicate(), Replicate()]),
)
FUNCTIONS: tuple[tuple[Callable[..., Tensor], bool], ...] = (
    (mean, False),
    (total, False),
    (each, True),
    (log_probs, True),
    (token_loss, False),
)


def distributed(
    arrays: Arrays, mesh: DeviceMesh, of_tokens: Sequence[Placement], of_head: Sequence[Placement]
) -> Arrays:
    found = {}
    for name, array in arrays.items():
        found[name] = distribute_tensor(array, mesh, of_tokens if name in OF_TOKENS else of_head)
        found[name].requires_grad_(name in DIFFERENTIATED)
    return found


def check_placements(rank: int, ranks: int, *, every: bool = False) -> None:
    """Every placement gives the loss and the gradients of one process, with one function, or with `every` all."""
    arrays, one = drawn(), mesh_of(ranks)
    meshes = [(one, *placements) for placements in ONE]
    if ranks > 2:
        meshes += [(grid_of(ranks), *placements) for placements in TWO]
    ways: list[tuple[DeviceMesh, Sequence[Placement], Sequence[Placement], str | None]] = []
    for mesh, of_tokens, of_head in meshes:
        both = any(x == w == Shard(0) for x, w in zip(of_tokens, of_head, strict=True))
        ways += [(mesh, of_tokens, of_head, gather) for gather in ((None, "tokens", "head") if both else (None,))]
    for shift, (function, by_token) in enumerate(FUNCTIONS):
        leaves = {name: one.clone().requires_grad_(name in DIFFERENTIATED) for name, one in arrays.items()}
        expected = loss_and_gradients(function, leaves, UPSTREAM if by_token else None)
        for number, (mesh, of_tokens, of_head, gather) in enumerate(ways):
            if not every and (number + shift) % len(FUNCTIONS):
                continue
            upstream = distribute_tensor(UPSTREAM, mesh, of_tokens) if by_token else None
            given: Any = distributed(arrays, mesh, of_tokens, of_head)
            found = loss_and_gradients(function, given | ({"gather": gather} if gather else {}), upstream)
            name = f"{function.__name__} {of_tokens} {of_head} {gather}"
            for got, want in zip(found, expected, strict=True):
                torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, msg=lambda text, name=name: name + text)


def check_sequence_parallel(rank: int, ranks: int) -> None:
    """Each rank has its part of the tokens and of the classes."""
    arrays, tokens = drawn(), TOKENS // ranks * ranks
    arrays = {name: one[:tokens] if name in OF_TOKENS else one for name, one in arrays.items()}
    for function, by_token in FUNCTIONS:
        leaves = {name: one.clone().requires_grad_(name in DIFFERENTIATED) for name, one in arrays.items()}
        upstream = UPSTREAM[:tokens] if by_token else None
        loss, *gradients = loss_and_gradients(function, leaves, upstream)
        mine: Any = {name: one.chunk(ranks)[rank].clone() for name, one in arrays.items()}
        for name in DIFFERENTIATED:
            mine[name].requires_grad_()
        mine |= {"vocab_group": dist.group.WORLD, "vocab_size": CLASSES, "sequence_parallel": True}
        own = None if upstream is None else upstream.chunk(ranks)[rank]
        found = loss_and_gradients(function, mine, own)
        expected = [loss.chunk(ranks)[rank] if by_token else loss, *(one.chunk(ranks)[rank] for one in gradients)]
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def with_stats(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> dict[str, Tensor]:
    loss, stats = core_triton.linear_cross_entropy_with_stats(
        input, linear_weight, target, memory_budget=BUDGET, z_loss_weight=1e-3, **options
    )
    return {"loss": loss, **stats._asdict()}


def token_loss_with_stats(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> dict[str, Tensor]:
    options.pop("token_weight")
    arguments = input, linear_weight, target, token_losses.reinforce(), input[..., 0]
    loss, stats = core_triton.linear_token_loss_with_stats(
        *arguments, memory_budget=BUDGET, stats=("log_prob", "argmax", "is_top1"), **options
    )
    return {"loss": loss, **{name: one for name, one in stats._asdict().items() if one is not None}}


def check_dtensor_statistics(rank: int, ranks: int) -> None:
    """Statistics by token are those of a rank's tokens, and numbers those of all tokens."""
    arrays, mesh = drawn(), mesh_of(ranks)
    forms: list[tuple[DeviceMesh, list[Placement], list[Placement], str | None]] = [
        (mesh, [Replicate()], [Shard(0)], None),
        (mesh, [Shard(0)], [Replicate()], None),
        (mesh, [Shard(0)], [Shard(0)], "tokens"),
        (mesh, [Shard(0)], [Shard(0)], "head"),
    ]
    if ranks > 2:
        grid = grid_of(ranks)
        forms.append((grid, [Shard(0), Shard(0)], [Replicate(), Shard(0)], None))
    for function, reduction in (
        (with_stats, "mean"),
        (with_stats, "none"),
        (token_loss_with_stats, "sum"),
        (token_loss_with_stats, "none"),
    ):
        expected = function(**arrays, reduction=reduction)
        for on, of_tokens, of_head, gather in forms:
            given: Any = distributed(arrays, on, of_tokens, of_head)
            found = function(**given, reduction=reduction, gather=gather)
            for name, one in found.items():
                assert isinstance(one, DTensor)
                assert one.placements == (tuple(of_tokens) if one.ndim else (Replicate(),) * on.ndim)
                torch.testing.assert_close(one.full_tensor().detach(), expected[name], rtol=2e-5, atol=2e-5)
    tokens = TOKENS // ranks * ranks
    arrays = {name: one[:tokens] if name in OF_TOKENS else one for name, one in arrays.items()}
    mine = {name: one.chunk(ranks)[rank] for name, one in arrays.items()}
    for function in (with_stats, token_loss_with_stats):
        expected = function(**arrays)
        options: Any = {"vocab_group": dist.group.WORLD, "vocab_size": CLASSES, "sequence_parallel": True}
        for name, one in function(**mine, **options).items():
            want = expected[name]
            torch.testing.assert_close(one, want.chunk(ranks)[rank] if want.ndim else want, rtol=2e-5, atol=2e-5)


def check_many_dimensions(rank: int, ranks: int) -> None:
    """Tokens on both dimensions of a mesh, and on the ranks of a group besides, with statistics and a padded head whose
    rows the ranks do not divide."""
    arrays, mesh = drawn(), grid_of(ranks)
    arrays["target"].clamp_(max=CLASSES - 3)
    own = [dist.new_group([one]) for one in range(ranks)][rank]
    options: dict[str, Any] = {"weight": torch.linspace(0.5, 1.5, CLASSES), "z_loss_weight": 0.1}
    options |= {"vocab_size": CLASSES - 2, "memory_budget": BUDGET}
    leaves = {name: one.clone().requires_grad_(name in DIFFERENTIATED) for name, one in arrays.items()}
    found: dict[str, tuple[Any, ...]] = {}

    def loss(**given: Any) -> Tensor:
        kept = core_triton.linear_cross_entropy_with_stats(**given)
        found["stats"] = kept[1]
        return kept[0]

    for reduction, group in (("mean", None), ("sum", own)):
        options["reduction"] = reduction
        expected = loss_and_gradients(loss, leaves | options, None)
        stats = found["stats"]
        for of_head in ([Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(0), Replicate()]):
            for gather in (None, "tokens", "head") if Shard(0) in of_head else (None,):
                given: Any = distributed(arrays, mesh, [Shard(0), Shard(0)], of_head)
                got = loss_and_gradients(loss, given | options | {"gather": gather, "token_group": group}, None)
                torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
                whole = tuple(one.full_tensor() for one in found["stats"])
                torch.testing.assert_close(whole, tuple(stats))


GATHERED_TARGETS = (("tokens", torch.uint8), ("tokens", torch.int16), ("head", torch.uint8))


def check_uneven_axis(rank: int, ranks: int) -> None:
    """Ranks with different numbers of tokens on the second axis of input, some with none: the gradient has the
    placements of input. Targets cannot be ignore_index, and the tokens that gathered ranks lack are ignored. Gloo and
    NCCL do not gather int16."""
    arrays, mesh = drawn(), mesh_of(ranks)
    x, target = arrays["input"].reshape(9, 5, HIDDEN), arrays["target"].reshape(9, 5).clamp(min=0).to(torch.uint8)
    leaves = {"input": x.clone().requires_grad_(), "linear_weight": arrays["linear_weight"].clone().requires_grad_()}
    expected = torch.autograd.grad(mean(**leaves, target=target), list(leaves.values()))
    for of_head in (Replicate(), Shard(0)):
        for gather, dtype in ((None, torch.uint8),) if of_head == Replicate() else GATHERED_TARGETS:
            mine: Any = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
            w: Any = distribute_tensor(arrays["linear_weight"], mesh, [of_head]).requires_grad_()
            mean(mine, w, distribute_tensor(target, mesh, [Shard(1)]).to(dtype), gather=gather).backward()
            assert (mine.grad.placements, w.grad.placements) == (mine.placements, w.placements)
            torch.testing.assert_close((mine.grad.full_tensor(), w.grad.full_tensor()), expected)
    # As int64 it would be ignore_index.
    x, w = (distribute_tensor(one, mesh, [Shard(0)]) for one in (arrays["input"], arrays["linear_weight"]))
    beyond = torch.full((len(x.to_local()),), 2**64 - 100, dtype=torch.uint64)  # which gloo does not scatter
    assert mean(
        x, w, DTensor.from_local(beyond, mesh, [Shard(0)], shape=torch.Size((TOKENS,)), stride=(1,)), gather="tokens"
    ).isnan()


def check_float16_gathered_head(rank: int, ranks: int) -> None:
    """The upstream gradient, as of a gradient scaler, is that without which float16 would round the gradients to 0."""
    arrays, mesh, scale = drawn(), mesh_of(ranks), 2.0**24
    names, target = ("input", "linear_weight"), distribute_tensor(arrays["target"], mesh, [Shard(0)])
    exact: Any = [arrays[name].clone().requires_grad_() for name in names]
    expected = torch.autograd.grad(mean(exact[0], exact[1], arrays["target"], reduction="sum"), exact)
    given: Any = [distribute_tensor(arrays[name].half(), mesh, [Shard(0)]).requires_grad_() for name in names]
    found: Any = torch.autograd.grad(mean(given[0], given[1], target, normalizer=scale, gather="head") * scale, given)
    for one, want in zip(found, expected, strict=True):
        torch.testing.assert_close(one.full_tensor().float(), want, rtol=2e-3, atol=2e-3 * float(want.abs().max()))


def check_data_parallel(rank: int, ranks: int) -> None:
    """DTensors on a dimension of the mesh, and ranks of another one that have other tokens: token_group."""
    arrays, grid = drawn(), grid_of(ranks)
    data, mesh = grid["data"].get_group(), grid["tensor"]
    leaves = [arrays[name].clone().requires_grad_() for name in ("input", "linear_weight")]
    exact = mean(leaves[0], leaves[1], arrays["target"])
    exact_d_weight = torch.autograd.grad(exact, leaves[1])[0]
    own = (slice(0, 19), slice(19, TOKENS))[data.rank()]
    for place, gather in ((Replicate(), None), (Shard(0), "tokens"), (Shard(0), "head")):
        x, target = (distribute_tensor(arrays[name][own], mesh, [place]) for name in ("input", "target"))
        w: Any = distribute_tensor(arrays["linear_weight"], mesh, [Shard(0)]).requires_grad_()
        loss: Any = mean(x, w, target, token_group=data, gather=gather)
        d_weight: Any = torch.autograd.grad(loss, w)[0]
        for got, want in ((loss.detach(), exact), (d_weight, exact_d_weight)):
            total = got.full_tensor()
            dist.all_reduce(total, group=data)
            torch.testing.assert_close(total / 2, want.detach(), rtol=2e-5, atol=2e-5)


def check_fsdp2_parameter(rank: int, ranks: int) -> None:
    """The function on a parameter of FSDP2, outside of the forward pass of its module."""
    arrays, mesh = drawn(), mesh_of(ranks)
    x, w = (arrays[name].clone().requires_grad_() for name in ("input", "linear_weight"))
    expected = torch.autograd.grad(core_triton.linear_cross_entropy(x, w, arrays["target"]), (x, w))
    head = torch.nn.Linear(HIDDEN, CLASSES, bias=False)
    with torch.no_grad():
        head.weight.copy_(arrays["linear_weight"])
    fully_shard(head, mesh=mesh)
    own = slice(0, 9) if rank == 0 else slice(9 + (rank - 1) * 12, 9 + rank * 12 if rank < ranks - 1 else TOKENS)
    x = arrays["input"][own].clone().requires_grad_()
    options: dict[str, Any] = {"token_group": dist.group.WORLD, "memory_budget": BUDGET}
    core_triton.linear_cross_entropy(x, head.weight, arrays["target"][own], **options).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad / ranks, expected[0][own])
    gradient: Any = head.weight.grad
    torch.testing.assert_close(gradient.full_tensor(), expected[1])


def check_hsdp_parameter(rank: int, ranks: int) -> None:
    """The function on a parameter of FSDP2 that the ranks of the first dimension have copies of, or all ranks."""
    arrays = drawn()
    x, target = arrays["input"][: TOKENS // ranks * ranks], arrays["target"][: TOKENS // ranks * ranks]
    mesh = grid_of(ranks)
    w, b = (arrays[name].clone().requires_grad_() for name in ("linear_weight", "linear_bias"))
    expected = torch.autograd.grad(mean(x, w, target, linear_bias=b), (w, b))
    head = torch.nn.Linear(HIDDEN, CLASSES)
    with torch.no_grad():
        head.weight.copy_(w)
        head.bias.copy_(b)
    fully_shard(head, mesh=mesh)
    copies = [distribute_tensor(one.detach(), mesh, [Replicate()] * 2).requires_grad_() for one in (w, b)]
    for weight, bias in ((head.weight, head.bias), copies):
        mine = x.chunk(ranks)[rank], weight, target.chunk(ranks)[rank]
        mean(*mine, linear_bias=bias, token_group=dist.group.WORLD).backward()
        gradients: Any = weight.grad, bias.grad
        torch.testing.assert_close(tuple(one.full_tensor() for one in gradients), expected)


def check_vocab_parallel(rank: int, ranks: int) -> None:
    """`parallelize_module`, with the same tokens on all ranks, and with a part of them on each."""
    arrays, mesh = drawn(), mesh_of(ranks)
    tokens = TOKENS // ranks * ranks
    x, target = arrays["input"][:tokens], arrays["target"][:tokens]
    for layout, own in (
        (Replicate(), slice(None)),
        (Shard(0), slice(tokens // ranks * rank, tokens // ranks * (rank + 1))),
    ):
        torch.manual_seed(0)
        whole = core_triton.LinearCrossEntropy(HIDDEN, CLASSES, bias=True, weight=1 + torch.rand(CLASSES))
        head = core_triton.LinearCrossEntropy(HIDDEN, CLASSES, bias=True, weight=whole.class_weight)
        head.load_state_dict(whole.state_dict())
        parallelize_module(head, mesh, VocabParallel(input_layouts=layout))
        expected = whole(x, target)
        expected.backward()
        loss = head(x[own], target[own])
        loss.backward()
        torch.testing.assert_close(loss, expected)
        for parameter, exact in zip(head.parameters(), whole.parameters(), strict=True):
            gradient: Any = parameter.grad
            torch.testing.assert_close(gradient.full_tensor(), exact.grad)
    with pytest.raises(TypeError, match="module must be a LinearCrossEntropy for VocabParallel, got Linear"):
        parallelize_module(torch.nn.Linear(4, 4), mesh, VocabParallel())


def check_vocab_parallel_arguments(rank: int, ranks: int) -> None:
    """Arguments by name have the layout too, the output of another style is taken, and a tied weight stays tied."""
    arrays, mesh = drawn(), mesh_of(ranks)
    w, target, ids = arrays["linear_weight"], arrays["target"], torch.arange(TOKENS) % CLASSES
    tied = w.clone().requires_grad_()
    loss = core_triton.linear_cross_entropy(tied[ids], tied, target, token_weight=arrays["token_weight"])
    expected = torch.autograd.grad(loss, tied)[0]
    embedding = torch.nn.Embedding(CLASSES, HIDDEN)
    with torch.no_grad():
        embedding.weight.copy_(w)
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()))
    head: Any = core_triton.LinearCrossEntropy(HIDDEN, CLASSES)
    head.weight = embedding.weight
    parallelize_module(head, mesh, VocabParallel())
    assert head.weight is embedding.weight
    hidden = embedding(ids)  # while its collective runs
    found = head(hidden, target=target, token_weight=arrays["token_weight"])
    found.backward()
    gradient: Any = embedding.weight.grad
    torch.testing.assert_close((found.detach(), gradient.full_tensor()), (loss.detach(), expected))
    with torch.no_grad():
        plain = core_triton.linear_cross_entropy(hidden, w, target, token_weight=arrays["token_weight"])
    torch.testing.assert_close(plain, loss.detach())
    divided: Any = core_triton.LinearCrossEntropy(HIDDEN, CLASSES)
    divided.weight = embedding.weight
    parallelize_module(divided, mesh, VocabParallel(input_layouts=Shard(0)))
    own = slice(rank * 11, rank * 11 + 11)  # the same number on all of four ranks
    with torch.no_grad():
        named = {name: arrays[name][own] for name in ("target", "token_weight")}
        parts = divided(arrays["input"][own], **named)
        first, weight = arrays["input"][:44], arrays["token_weight"][:44]
        whole = core_triton.linear_cross_entropy(first, w, target[:44], token_weight=weight)
        torch.testing.assert_close(parts, whole)
    for layout in (Shard(-2), Partial()):
        with pytest.raises(
            ValueError, match="input_layouts must be Replicate\\(\\) or Shard\\(i\\) with an i of 0 or more"
        ):
            VocabParallel(input_layouts=layout)


def check_rank_errors(rank: int, ranks: int) -> None:
    """What one rank has in another way than the others is an error of all ranks, before they wait for each other."""
    arrays, mesh, world = drawn(), mesh_of(ranks), dist.group.WORLD
    x, w, target = (arrays[name] for name in ("input", "linear_weight", "target"))
    loss: Any = partial(core_triton.linear_cross_entropy, check_agreement=True)
    own = w.chunk(ranks)[rank]
    of_head: Any = distribute_tensor(w, mesh, [Shard(0)])
    shared, sharded = (
        [distribute_tensor(one, mesh, [place]) for one in (x, target)] for place in (Replicate(), Shard(0))
    )
    tokens = slice(rank * 12, rank * 12 + 12)  # the last rank has fewer
    guessed = [DTensor.from_local(one[tokens], mesh, [Shard(0)], run_check=False) for one in (x, target, w[:TOKENS])]
    short = x[:8], of_head, target[: 8 if rank != 1 else 7]
    moved = of_head.to_local() if rank != 1 else of_head.to_local()[1:]
    moved = DTensor.from_local(moved, mesh, [Shard(0)], run_check=False, shape=w.shape, stride=w.stride())
    of_shards: dict[str, Any] = {"vocab_group": world, "vocab_size": CLASSES}
    given, given_weight = (None if rank == 1 else one for one in (torch.tensor(44.0), torch.ones(TOKENS)))
    shape = r"the shape of {} must be the same on all ranks of the mesh.* got \(48, 16\) on rank 0 and \(36, 16\) on"
    for message, arguments, options in (
        ("linear_weight must be this rank's shard", (x, own[rank == 1 :], target), of_shards),
        ("linear_weight must be float32, got float16", (x, own.half() if rank == 1 else own, target), of_shards),
        ("token_weight must have shape", (x, w, target), {"token_group": world, "token_weight": x[rank == 1 :, 0]}),
        ("the values of target .* must be the same on all", (x, own, (target + (rank == 1)) % CLASSES), of_shards),
        ("normalizer must be the same on all", (x, w, target), {"token_group": world, "normalizer": 44.0 + rank}),
        ("label_smoothing must lie in", (x, w, target), {"token_group": world, "label_smoothing": 2.0 * (rank == 1)}),
        ("normalizer are given must be the same", (x, w, target), {"token_group": world, "normalizer": given}),
        ("token_weight is given must be the same", (x, own, target), of_shards | {"token_weight": given_weight}),
        ("target must have shape \\(8,\\)", short, {"token_group": world}),
        ("target must have shape \\(8,\\)", short, {"gather": "head", "reduction": "none"}),
        (shape.format("input"), (guessed[0], of_head, guessed[1]), {"gather": "tokens"}),
        (shape.format("linear_weight"), (shared[0], guessed[2], shared[1]), {}),
        (shape.format("linear_weight"), (sharded[0], guessed[2], sharded[1]), {"gather": "head"}),
        (shape.format("linear_weight"), (x[tokens], guessed[2], target[tokens]), {"token_group": world}),
        ("linear_weight must have local shape \\(26, 16\\)", (sharded[0], moved, sharded[1]), {"gather": "head"}),
    ):
        with pytest.raises((TypeError, ValueError), match=message) as caught:
            loss(*arguments, **options)
        assert "values" in message or "same" in message or (rank == 1) != ("rank 1 of " in str(caught.value))
    once: Any = core_triton.linear_cross_entropy
    for message, options in (
        ("check_agreement must be the same", {"check_agreement": rank != 1}),
        ("check_agreement must be a bool, got str", {"check_agreement": "yes" if rank == 1 else False}),
        ("normalizer must be the same", {"normalizer": np.float32(44 + rank)}),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            once(x, w, target, token_group=dist.new_group(), **options)
    values, group = arrays["token_weight"][rank == 1 :], cast(dist.ProcessGroup, dist.new_group())
    with pytest.raises(ValueError, match=r"per_token\[0\] must have shape"):
        core_triton.linear_token_loss(x, w, target, torch.mul, values, token_group=group)


def check_rank_errors_of_two_groups(rank: int, ranks: int) -> None:
    """An error of one rank reaches those that are in no group with it."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("tokens", "classes"))
    arrays = drawn()
    x, w, target = arrays["input"][:44], arrays["linear_weight"][:100], arrays["target"][:44]
    head: Any = distribute_tensor(w, mesh, [Replicate(), Shard(0)])
    of_tokens = [Shard(0), Replicate()]
    parts = [DTensor.from_local(one, mesh, of_tokens, run_check=False) for one in (x, target[rank == 1 :])]
    groups: dict[str, Any] = {"vocab_group": mesh.get_group("classes"), "token_group": mesh.get_group("tokens")}
    own = head.to_local()
    loss: Any = partial(core_triton.linear_cross_entropy, check_agreement=True)
    for arguments, options in (
        ((x, own, target[rank == 1 :]), groups),
        ((x, own, target[rank == 1 :]), groups | {"sequence_parallel": True}),
        ((parts[0], head, parts[1]), {}),
        ((x, head, target[rank == 1 :]), {"gather": "head"}),
    ):
        message = r"^target must" if rank == 1 else r"rank \d of .* raised ValueError: target must have shape \(44,\)"
        with pytest.raises(ValueError, match=message):
            loss(*arguments, **options)
    given = x.clone()
    kept = weakref.ref(given)
    gc.collect()
    gc.disable()
    with suppress(ValueError):
        loss(given, own, target[rank == 1 :], **groups)
    del given
    assert kept() is None  # an error that was caught keeps no tensor in a cycle of references
    gc.enable()


def check_vocab_parallel_and_fsdp2(rank: int, ranks: int) -> None:
    """A module whose classes are divided on one dimension, and its parameters with FSDP2 on another, whose ranks have
    different tokens."""
    arrays, mesh = drawn(), grid_of(ranks)
    x, target = arrays["input"][:44], arrays["target"][:44]
    w, b = (arrays[name].clone().requires_grad_() for name in ("linear_weight", "linear_bias"))
    loss = mean(x, w, target, linear_bias=b)
    expected = torch.autograd.grad(loss, (w, b))
    group = mesh.get_group("data")
    own = slice(22 * mesh.get_local_rank("data"), 22 * mesh.get_local_rank("data") + 22)
    part = slice(None)
    for layout in (Replicate(), Shard(0)):
        head = core_triton.LinearCrossEntropy(HIDDEN, CLASSES, bias=True, token_group=group, memory_budget=BUDGET)
        head.load_state_dict({"weight": w.detach(), "bias": b.detach()})
        parallelize_module(head, mesh["tensor"], VocabParallel(input_layouts=layout))
        fully_shard(head, mesh=mesh["data"], reshard_after_forward=False)
        if layout == Shard(0):
            half, at = 22 // (ranks // 2), mesh.get_local_rank("tensor")
            part = slice(at * half, at * half + half)
        found = head(x[own][part], target[own][part])
        found.backward()
        total = found.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / ranks, loss.detach())
        gradients: Any = tuple(one.grad for one in head.parameters())
        torch.testing.assert_close(tuple(one.full_tensor() for one in gradients), expected)


def check_compiled(rank: int, ranks: int) -> None:
    """torch.compile runs a call with DTensors between two graphs. fullgraph=True is an error that says so."""
    from torch._dynamo.exc import Unsupported  # takes two seconds

    arrays, mesh = drawn(), DeviceMesh("cpu", [0, 1])
    if rank > 1:  # to compile takes a second on each rank
        return
    w = distribute_tensor(arrays["linear_weight"], mesh, [Shard(0)]).requires_grad_()
    x, target = (distribute_tensor(arrays[name], mesh, [Replicate()]) for name in ("input", "target"))

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return core_triton.linear_cross_entropy(x * 2, w, target) * 3

    found: Any = torch.compile(loss, backend="aot_eager")(x, w)
    expected: Any = loss(x, w)
    torch.testing.assert_close(found.full_tensor(), expected.full_tensor())
    gradients: Any = [torch.autograd.grad(one, w)[0] for one in (found, expected)]
    torch.testing.assert_close(gradients[0].full_tensor(), gradients[1].full_tensor())
    torch._dynamo.reset()  # what is compiled is found by its code
    with pytest.raises(Unsupported, match="because of DTensors"):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(x, w)


def check_dtensor_errors(rank: int, ranks: int) -> None:
    arrays, mesh = drawn(), mesh_of(ranks)
    x, w, target = (arrays[name] for name in ("input", "linear_weight", "target"))
    loss: Any = core_triton.linear_cross_entropy

    def on(array: Tensor, placement: Placement) -> DTensor:
        return distribute_tensor(array, mesh, [placement])

    shared, sharded = on(x, Replicate()), on(x, Shard(0))
    head, given = on(w, Shard(0)), (sharded, on(w, Shard(0)), on(target, Shard(0)))
    world, bias, named = dist.group.WORLD, arrays["linear_bias"], {"gather": "head"}
    short = {"token_weight": on(x[:41, 0], Shard(0)), "gather": "tokens"}
    for message, arguments, options in (
        ("input must be a DTensor beside a DTensor linear_weight", (x, head, target), {}),
        ("linear_weight must be a DTensor beside a DTensor input", (shared, w, target), {}),
        ("input must be Replicate, or Shard on an axis of tokens", (on(x, Shard(1)), head, target), {}),
        ("linear_weight must be Replicate or Shard\\(0\\)", (shared, on(w, Shard(1)), target), {}),
        ("target must be a DTensor with the placements of input", (sharded, head, target), {}),
        ("target must have the mesh of input and placements", (sharded, head, on(target, Replicate())), {}),
        ("linear_bias must be a DTensor with the placements of", (shared, head, target), {"linear_bias": bias}),
        ("linear_bias must be a DTensor with the placements of", (x, head, target), {"linear_bias": bias, **named}),
        ("linear_weight must be Shard\\(0\\) on one dimension of its mesh", (x, on(w, Shard(1)), target), named),
        ("linear_bias must have shape \\(101,\\)", given, {"linear_bias": on(bias[1:], Shard(0)), **named}),
        ("token_weight must have shape .* \\(target's shape\\)", given, short),
        ("vocab_group must be None with DTensors", (shared, head, target), {"vocab_group": world}),
        ("gather must be None where input", (shared, head, target), {"gather": "head"}),
        ('gather must be "tokens", "head" or None', (shared, head, target), {"gather": "all"}),
        ("gather must be None without DTensors", (x, w, target), {"gather": "head"}),
        ("grad_into must be None with DTensors", (shared, head, target), {"grad_into": torch.zeros(CLASSES, HIDDEN)}),
        ("vocab_group must be a process group with sequence_parallel", (x, w, target), {"sequence_parallel": True}),
        (
            "token_weight must be a plain Tensor beside a plain input",
            (x, w, target),
            {"token_weight": on(x[:, 0], Shard(0))},
        ),
    ):
        with pytest.raises(ValueError, match=message):
            loss(*arguments, **options)
    rows = slice(0, 4 + rank)
    options = {"vocab_group": world, "vocab_size": CLASSES, "sequence_parallel": True, "check_agreement": True}
    with pytest.raises(
        ValueError, match="the shape of target must be the same on all ranks of vocab_group, got \\(4,\\)"
    ):
        loss(x[rows], w.chunk(ranks)[rank], target[rows], **options)
    del options["check_agreement"]
    with pytest.raises(ValueError, match="target must have shape \\(5, 9\\) \\(input without its last axis\\)"):
        loss(x.reshape(5, 9, HIDDEN), w.chunk(ranks)[rank], target, **options)
    with pytest.raises(TypeError, match="input comes from a torch\\.func transform"):
        torch.func.grad(lambda x: loss(x, w.chunk(ranks)[rank], target, **options))(x)
    partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    with pytest.raises(ValueError, match="input must be Replicate, or Shard"):
        loss(partial, head, target)


DTENSOR_CHECKS: dict[str, Callable[[int, int], None]] = {
    "placements": check_placements,
    "every_placement": partial(check_placements, every=True),
    "sequence_parallel": check_sequence_parallel,
    "dtensor_statistics": check_dtensor_statistics,
    "many_dimensions": check_many_dimensions,
    "uneven_axis": check_uneven_axis,
    "float16_gathered_head": check_float16_gathered_head,
    "data_parallel": check_data_parallel,
    "fsdp2_parameter": check_fsdp2_parameter,
    "hsdp_parameter": check_hsdp_parameter,
    "vocab_parallel": check_vocab_parallel,
    "vocab_parallel_arguments": check_vocab_parallel_arguments,
    "rank_errors": check_rank_errors,
    "rank_errors_of_two_groups": check_rank_errors_of_two_groups,
    "vocab_parallel_and_fsdp2": check_vocab_parallel_and_fsdp2,
    "dtensor_compiled": check_compiled,
    "dtensor_errors": check_dtensor_errors,
}
