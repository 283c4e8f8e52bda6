"""Checks of tokens that ranks gather chunk by chunk. `torch_ranks.py` runs them with the kernels, on all of its
ranks."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from allocations import Meter
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import core_triton
from core_triton import token_losses

ON_GPUS = sys.argv[2:3] == ["gpu"]
DEVICE, TOKENS, HIDDEN = ("cuda", 4096, 512) if ON_GPUS else ("cpu", 96, 64)  # tokens of all ranks
MORE_CLASSES, MORE_BYTES = (16, 60) if ON_GPUS else (1, 1)
BUDGET = 80_000 * MORE_BYTES  # three chunks or more

Arrays = dict[str, Tensor]

OF_HEAD = ("linear_weight", "linear_bias")
DIFFERENTIATED = ("input", *OF_HEAD)


def drawn(ranks: int, *, dtype: torch.dtype = torch.bfloat16, classes: int = 37) -> Arrays:
    """Returns the arrays of a call, `classes` classes for each rank, more on GPUs. The ranks have different numbers of
    counted tokens, and the first has none. What is ignored is NaN."""
    generator, classes = torch.Generator().manual_seed(ranks), classes * MORE_CLASSES
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, target = normal(TOKENS, HIDDEN), torch.randint(ranks * classes, (TOKENS,), generator=generator)
    target[: TOKENS // ranks] = target[TOKENS // ranks + 1 :: 7] = -100
    target[-12:] = target[-13]
    x[target == -100] = torch.nan
    arrays = {
        "input": x.to(dtype),
        "linear_weight": (normal(ranks * classes, HIDDEN) * 2 / HIDDEN**0.5).to(dtype),
        "linear_bias": normal(ranks * classes),
        "target": target,
        "token_weight": 0.5 + torch.rand(TOKENS, generator=generator),
    }
    return {name: one.to(DEVICE) for name, one in arrays.items()}


@contextmanager
def chunks_of_calls() -> Iterator[list[int]]:
    """Collects the number of chunks of each call that gathers tokens chunk by chunk. Asserts that its rows are packed
    as they should be."""
    from core_triton import token_slices

    found, pack = list[int](), token_slices.TokenSlices.__init__

    def packed(self: Any, *arguments: Any, **options: Any) -> None:
        pack(self, *arguments, **options)
        found.append(len(self.chunks))
        assert_packed(self)

    token_slices.TokenSlices.__init__ = packed
    try:
        yield found
    finally:
        token_slices.TokenSlices.__init__ = pack


def assert_packed(slices: Any) -> None:
    """Asserts that chunk c has slice c of the packed rows of each rank, and that rows that contribute come first, both
    in the order of the ranks."""
    problem, rows, ranks, tokens = slices.problem, slices.rows, slices.shard.ranks, slices.shard.tokens
    contributes = (problem.row_weight != 0).view(ranks, tokens)
    number = torch.arange(tokens, device=rows.order.device)
    by_rank = [torch.cat([number[one], number[~one]]) for one in contributes]
    own = slices.shard.rank
    torch.testing.assert_close(slices.own_order, by_rank[own])
    torch.testing.assert_close(slices.own_counts, contributes[own][by_rank[own]].float())
    for index, chunk in enumerate(slices.chunks):
        size = (chunk.stop - chunk.start) // ranks
        place = index * slices.slice_rows + number[:size]
        order = torch.cat([rank * tokens + one[place] for rank, one in enumerate(by_rank)])
        counted = contributes.flatten()[order]
        slot = torch.cat([counted.nonzero()[:, 0], (~counted).nonzero()[:, 0]])
        torch.testing.assert_close(slices.slot[chunk], slot)
        torch.testing.assert_close(slices.place[chunk], place.repeat(ranks)[slot])
        torch.testing.assert_close(rows.order[chunk], order[slot])
        torch.testing.assert_close(rows.target[chunk], problem.target[order[slot]])
        torch.testing.assert_close(rows.row_weight[chunk], problem.row_weight[order[slot]])
        assert int(slices.counts[index, 0]) == chunk.start + int(counted.sum())


class Result(NamedTuple):
    """The results of a call by name, and its gradients by argument."""

    values: Arrays
    gradients: Arrays


def run(function: Callable[..., Any], arrays: Arrays, frozen: tuple[str, ...], upstream: Tensor | None) -> Result:
    leaves = {name: one.detach().clone() for name, one in arrays.items()}
    differentiated = [name for name in DIFFERENTIATED if name in leaves and name not in frozen]
    for name in differentiated:
        leaves[name].requires_grad_()
    values = function(**leaves)
    gradients = torch.autograd.grad(values["loss"], [leaves[name] for name in differentiated], upstream)
    return Result(values, dict(zip(differentiated, gradients, strict=True)))


def part(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns a rank's part, as `torch.chunk` divides."""
    size = -(-len(whole) // ranks)
    return whole[rank * size :][:size]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm().clamp(min=1e-30))


def of_whole(
    function: Callable[..., Any], arrays: Arrays, frozen: tuple[str, ...], budget: int, upstream: Tensor | None
) -> tuple[Result, Result]:
    """Returns the results of one process: those of float32, and those by the kernels."""
    in_float32 = {name: one.float() if one.is_floating_point() else one for name, one in arrays.items()}
    exact = run(partial(function, implementation="chunked", head_precision=None), in_float32, frozen, upstream)
    return exact, run(partial(function, implementation="triton", memory_budget=budget), arrays, frozen, upstream)


def assert_errs_as_one(name: str, found: Tensor, exact: Tensor, of_one: Tensor, factor: float) -> None:
    """Asserts that the error of a gradient of all ranks is at most `factor` times that of one process, if it is not
    tiny."""
    of_ranks, most = error(found, exact), factor * error(of_one, exact)
    assert of_ranks <= most + 1e-6, f"{name}: error {of_ranks}, and at most {most}"


def check(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    arrays: Arrays,
    *,
    budget: int = BUDGET,
    frozen: tuple[str, ...] = (),
    rounded: float = 1.1,
    rounded_head: float = 1.5,
    of_shards: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Asserts that ranks with their own tokens and classes get the results of one process in float32, and that the
    errors of the gradients are those of one process by the kernels.

    Args:
        function: returns results by name, of which "loss" is differentiated.
        budget: bytes for three chunks or more.
        frozen: arguments that are not differentiated.
        rounded, rounded_head: how much larger the errors of d_input and of the gradients of the head may be.
        of_shards: options of the ranks alone.
        options: of all calls.
    """
    upstream = torch.linspace(-1, 1, TOKENS, device=DEVICE) if options.get("reduction") == "none" else None
    function = partial(function, **options)
    exact, of_one = of_whole(function, arrays, frozen, budget, upstream)
    mine = {name: one if name == "weight" else part(one, rank, ranks) for name, one in arrays.items()}
    given = {"vocab_group": dist.group.WORLD, "vocab_size": len(arrays["linear_weight"]), "sequence_parallel": True}
    function = partial(function, memory_budget=budget, implementation="triton", **given, **(of_shards or {}))
    with chunks_of_calls() as chunks:
        found = run(function, mine, frozen, None if upstream is None else part(upstream, rank, ranks))
    assert len(chunks) == 1, f"{len(chunks)} calls gathered tokens chunk by chunk"
    assert chunks[0] >= 3, chunks
    for name, one in found.values.items():
        want = exact.values[name].detach()
        want = part(want, rank, ranks) if want.ndim else want
        torch.testing.assert_close(one.detach(), want, atol=2e-3, rtol=2e-3, msg=lambda text, name=name: name + text)
    for name, gradient in found.gradients.items():
        parts: list[Any] = [None] * ranks
        dist.all_gather_object(parts, gradient.cpu())
        factor = rounded if name == "input" else rounded_head
        assert_errs_as_one(name, torch.cat(parts).to(DEVICE), exact.gradients[name], of_one.gradients[name], factor)


def loss(input: Tensor, linear_weight: Tensor, target: Tensor, token_weight: Tensor, **options: Any) -> Arrays:
    return {"loss": core_triton.linear_cross_entropy(input, linear_weight, target, **options)}


def with_stats(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Arrays:
    found, stats = core_triton.linear_cross_entropy_with_stats(input, linear_weight, target, **options)
    return {"loss": found, **stats._asdict()}


def token_loss(input: Tensor, linear_weight: Tensor, target: Tensor, token_weight: Tensor, **options: Any) -> Arrays:
    arguments = input, linear_weight, target, token_losses.weighted_nll(), token_weight
    found, stats = core_triton.linear_token_loss_with_stats(*arguments, **options)
    return {"loss": found, **{name: one for name, one in stats._asdict().items() if one is not None}}


def check_gathered(rank: int, ranks: int) -> None:
    check(loss, rank, ranks, drawn(ranks))


def check_gathered_options(rank: int, ranks: int) -> None:
    arrays, options = drawn(ranks), {"reduction": "sum", "z_loss_weight": 1e-3, "logit_scale": 0.7}
    arrays["weight"] = torch.linspace(0.5, 1.5, len(arrays["linear_weight"]), device=DEVICE)
    check(with_stats, rank, ranks, arrays, softcap=3.0, **options)


def check_gathered_smoothing(rank: int, ranks: int) -> None:
    check(
        with_stats,
        rank,
        ranks,
        drawn(ranks, classes=300),
        label_smoothing=0.1,
        logit_scale=0.7,
        budget=110_000 * MORE_BYTES,
    )


def check_gathered_float16(rank: int, ranks: int) -> None:
    arrays = drawn(ranks, dtype=torch.float16)
    with core_triton.range_report() as report:
        check(with_stats, rank, ranks, arrays)
    assert report.rows == 2 * int((arrays["target"] != -100).sum())  # of one process, and of the ranks
    assert 0 <= report.shifted_rows <= report.rows


def check_gathered_token_loss(rank: int, ranks: int) -> None:
    check(token_loss, rank, ranks, drawn(ranks), budget=90_000 * MORE_BYTES)


def check_gathered_token_losses(rank: int, ranks: int) -> None:
    check(token_loss, rank, ranks, drawn(ranks), budget=90_000 * MORE_BYTES, frozen=OF_HEAD, reduction="none")


def check_gathered_one_gradient(rank: int, ranks: int) -> None:
    """Without d_input, and d_bias alone, whose terms of the targets need no rows of the input. There all tokens
    count, so that the rows of two chunks are not all that contribute."""
    arrays = drawn(ranks)
    check(loss, rank, ranks, arrays, frozen=("input",), budget=60_000 * MORE_BYTES)
    arrays |= {"input": arrays["input"].nan_to_num(0.5), "target": arrays["target"].clamp(min=0)}
    check(loss, rank, ranks, arrays, frozen=("input", "linear_weight"), budget=60_000 * MORE_BYTES)


def check_gathered_split_head(rank: int, ranks: int) -> None:
    arrays = drawn(ranks)
    arrays["linear_weight"] = arrays["linear_weight"].float() * 1.001
    check(loss, rank, ranks, arrays, head_precision="float32", of_shards={"check_agreement": True})


def check_gathered_reduce_dtype(rank: int, ranks: int) -> None:
    check(loss, rank, ranks, drawn(ranks), rounded=1.8, of_shards={"reduce_dtype": torch.bfloat16})


def check_gathered_dtensors(rank: int, ranks: int) -> None:
    """The numbers of tokens and of classes are no multiples of the number of ranks."""
    arrays = drawn(ranks)
    arrays = {name: one[:-3] for name, one in arrays.items()}
    arrays["linear_weight"], arrays["linear_bias"] = arrays["linear_weight"][:-1], arrays["linear_bias"][:-1]
    arrays["target"] = arrays["target"].clamp(max=len(arrays["linear_bias"]) - 1)
    mesh = init_device_mesh(DEVICE, (ranks,))
    exact, of_one = of_whole(loss, arrays, (), BUDGET, None)
    mine: Any = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in arrays.items()}
    call = partial(loss, implementation="triton", memory_budget=BUDGET, gather="tokens")
    with chunks_of_calls() as chunks:
        found: Any = run(call, mine, (), None)
    assert len(chunks) == 1
    assert chunks[0] >= 3
    torch.testing.assert_close(found.values["loss"].full_tensor(), exact.values["loss"].detach(), atol=2e-3, rtol=2e-3)
    for name, one in found.gradients.items():
        assert one.placements == (Shard(0),)
        assert_errs_as_one(name, one.full_tensor(), exact.gradients[name], of_one.gradients[name], 1.5)


def check_gathered_few_classes(rank: int, ranks: int) -> None:
    """The last rank has no class. The targets' terms are added in ten parts, each of which is rounded."""
    arrays = drawn(ranks, classes=5)
    classes = 2 * ranks - 3 if ranks > 2 else 1
    arrays |= {name: arrays[name][:classes] for name in OF_HEAD} | {"target": arrays["target"].clamp(max=classes - 1)}
    check(loss, rank, ranks, arrays, budget=70_000, rounded_head=2.5)


def check_gathered_memory(rank: int, ranks: int) -> None:
    """No tensor has as many bytes as the input of all ranks. A call without gradients gathers it."""
    arrays = {name: part(one, rank, ranks).clone() for name, one in drawn(ranks).items()}
    differentiated = [arrays[name].requires_grad_() for name in DIFFERENTIATED]
    given: dict[str, Any] = {"vocab_group": dist.group.WORLD, "sequence_parallel": True, "implementation": "triton"}
    call = partial(loss, **arrays, memory_budget=BUDGET, **given)
    with chunks_of_calls() as chunks:
        gradients = torch.autograd.grad(call()["loss"], differentiated)
        with Meter() as meter:
            found = torch.autograd.grad(call()["loss"], differentiated)
        assert len(chunks) == 2
        assert chunks[1] >= 3
        every = arrays["input"].nbytes * ranks
        assert meter.largest < every, (meter.largest, every)
        for one, other in zip(found, gradients, strict=True):
            torch.testing.assert_close(one, other, atol=0, rtol=0)
        with Meter() as meter, torch.no_grad():
            call()
        assert len(chunks) == 2
        assert meter.largest >= every


GATHERED_CHECKS: dict[str, Callable[[int, int], None]] = {
    "gathered": check_gathered,
    "gathered_options": check_gathered_options,
    "gathered_smoothing": check_gathered_smoothing,
    "gathered_float16": check_gathered_float16,
    "gathered_token_loss": check_gathered_token_loss,
    "gathered_token_losses": check_gathered_token_losses,
    "gathered_one_gradient": check_gathered_one_gradient,
    "gathered_split_head": check_gathered_split_head,
    "gathered_reduce_dtype": check_gathered_reduce_dtype,
    "gathered_dtensors": check_gathered_dtensors,
    "gathered_few_classes": check_gathered_few_classes,
    "gathered_memory": check_gathered_memory,
}
