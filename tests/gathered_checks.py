"""Checks of tokens that ranks gather chunk by chunk, which `torch_ranks.py` runs on all of its ranks with the kernels."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from allocations import Meter
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import core_triton
from core_triton import token_losses

TOKENS, HIDDEN = 160, 64  # of all ranks

Arrays = dict[str, Tensor]

OF_HEAD = ("linear_weight", "linear_bias")
DIFFERENTIATED = ("input", *OF_HEAD)


def drawn(ranks: int, *, dtype: torch.dtype = torch.bfloat16, classes: int = 37) -> Arrays:
    """Returns the arrays of a call, `classes` classes for each rank. The ranks have different numbers of counted
    tokens, and the first has none. What is ignored is NaN."""
    generator = torch.Generator().manual_seed(ranks)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, target = normal(TOKENS, HIDDEN), torch.randint(ranks * classes, (TOKENS,), generator=generator)
    target[: TOKENS // ranks] = target[TOKENS // ranks + 1 :: 7] = -100
    target[-20:] = target[-21]
    x[target == -100] = torch.nan
    return {
        "input": x.to(dtype),
        "linear_weight": (normal(ranks * classes, HIDDEN) / 4).to(dtype),
        "linear_bias": normal(ranks * classes),
        "target": target,
        "token_weight": 0.5 + torch.rand(TOKENS, generator=generator),
    }


@contextmanager
def chunks_of_calls() -> Iterator[list[int]]:
    """Collects the number of chunks of each call that gathers tokens chunk by chunk."""
    from core_triton import token_slices

    found, pack = list[int](), token_slices.TokenSlices.__init__

    def packed(self: Any, *arguments: Any, **options: Any) -> None:
        pack(self, *arguments, **options)
        found.append(len(self.chunks))

    token_slices.TokenSlices.__init__ = packed
    try:
        yield found
    finally:
        token_slices.TokenSlices.__init__ = pack


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


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm().clamp(min=1e-30))


def check(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    arrays: Arrays,
    *,
    budget: int = 90_000,
    frozen: tuple[str, ...] = (),
    rounded: float = 1.0,
    of_shards: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Asserts that ranks with their own tokens and classes get the results of one process in float32, and that the
    errors of the gradients are those of one process by the kernels.

    Args:
        function: returns results by name, of which "loss" is differentiated.
        budget: bytes for three chunks or more.
        frozen: arguments that are not differentiated.
        rounded: how much larger the error of d_input may be.
        of_shards: options of the ranks alone.
        options: of all calls.
    """
    upstream = torch.linspace(-1, 1, len(arrays["target"])) if options.get("reduction") == "none" else None
    in_float32 = {name: one.float() if one.is_floating_point() else one for name, one in arrays.items()}
    plain = options | {"implementation": "chunked", "head_precision": None}
    exact = run(partial(function, **plain), in_float32, frozen, upstream)
    function = partial(function, implementation="triton", **options)
    of_one = run(partial(function, memory_budget=budget), arrays, frozen, upstream)
    mine = {name: one if name == "weight" else one.chunk(ranks)[rank] for name, one in arrays.items()}
    given = {"vocab_group": dist.group.WORLD, "vocab_size": len(arrays["linear_weight"]), "sequence_parallel": True}
    function = partial(function, memory_budget=budget, **given, **(of_shards or {}))
    with chunks_of_calls() as chunks:
        found = run(function, mine, frozen, None if upstream is None else upstream.chunk(ranks)[rank])
    assert len(chunks) == 1, f"{len(chunks)} calls gathered tokens chunk by chunk"
    assert chunks[0] >= 3, chunks
    for name, one in found.values.items():
        want = exact.values[name].detach()
        want = want.chunk(ranks)[rank] if want.ndim else want
        torch.testing.assert_close(one.detach(), want, atol=2e-3, rtol=2e-3, msg=lambda text, name=name: name + text)
    for name, gradient in found.gradients.items():
        parts: list[Any] = [None] * ranks
        dist.all_gather_object(parts, gradient)
        most = (1.1 * rounded if name == "input" else 2.0) * error(of_one.gradients[name], exact.gradients[name])
        of_ranks = error(torch.cat(parts), exact.gradients[name])
        assert of_ranks <= most + 1e-6, f"{name}: error {of_ranks}, and at most {most}"


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
    arrays["weight"] = torch.linspace(0.5, 1.5, len(arrays["linear_weight"]))
    check(with_stats, rank, ranks, arrays, softcap=3.0, **options)


def check_gathered_smoothing(rank: int, ranks: int) -> None:
    check(with_stats, rank, ranks, drawn(ranks, classes=300), label_smoothing=0.1, logit_scale=0.7, budget=150_000)


def check_gathered_float16(rank: int, ranks: int) -> None:
    check(with_stats, rank, ranks, drawn(ranks, dtype=torch.float16))


def check_gathered_token_loss(rank: int, ranks: int) -> None:
    check(token_loss, rank, ranks, drawn(ranks), budget=110_000)


def check_gathered_token_losses(rank: int, ranks: int) -> None:
    check(token_loss, rank, ranks, drawn(ranks), budget=110_000, frozen=OF_HEAD, reduction="none")


def check_gathered_one_gradient(rank: int, ranks: int) -> None:
    check(loss, rank, ranks, drawn(ranks), frozen=("input",), budget=75_000)


def check_gathered_split_head(rank: int, ranks: int) -> None:
    arrays = drawn(ranks)
    arrays["linear_weight"] = arrays["linear_weight"].float() * 1.001
    check(loss, rank, ranks, arrays, head_precision="float32", of_shards={"check_agreement": True})


def check_gathered_reduce_dtype(rank: int, ranks: int) -> None:
    check(loss, rank, ranks, drawn(ranks), rounded=1.7, of_shards={"reduce_dtype": torch.bfloat16})


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
}
