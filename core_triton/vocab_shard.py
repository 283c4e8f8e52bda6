"""A head whose vocabulary is split over the ranks of a process group, and tokens that are split over one.

Each rank holds some rows of the head. For each chunk of rows of the input, all ranks compute the statistics of their
own classes, exchange them and merge them in the order of the ranks, so that every rank has the same bits: MATH.md (26).
The gradients of a rank's rows of the head are complete then. d_input is a sum over the ranks.

An operator of torch.compile cannot have a group as an argument, so a group is passed by its name.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from core_triton import row_math
from core_triton.row_math import Partial

REDUCE_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

# Functions of torch.distributed, which are looked up at each call. PyTorch 2.14 warns of the names that 2.11 has.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

AGREEMENT_CALLS = 3  # of a group, whose ranks compare what they were given


@dataclass(frozen=True)
class VocabShard:
    """Which classes of the vocabulary this rank holds.

    Args:
        group: name of the process group.
        ranks: of the group.
        offset: class index of the first row of this rank's shard.
        rows: of the largest shard. Chunks are chosen by it, so that all ranks have the same.
        reduce_dtype: "float32" or "bfloat16", of the sum of d_input over the ranks.
        tokens: of each rank, where the ranks have different tokens, which they gather chunk by chunk (`token_slices`);
            0 where all ranks have the same tokens.
    """

    group: str
    ranks: int
    offset: int
    rows: int
    reduce_dtype: str
    tokens: int = 0

    @property
    def rank(self) -> int:
        """This rank: `shard_of`."""
        return self.offset // self.rows

    @property
    def dtype(self) -> torch.dtype:
        """reduce_dtype, as one of PyTorch's."""
        return torch.float32 if self.reduce_dtype == "float32" else torch.bfloat16


def own_tokens(shard: VocabShard | None, rows: int) -> slice:
    """Returns which tokens of a call are those of this rank, which has `rows` of them."""
    if shard is None or not shard.tokens:
        return slice(0, rows)
    first = shard.rank * shard.tokens
    return slice(first, first + rows)


def merged(shard: VocabShard, partial: Partial) -> Partial:
    """Returns the statistics of rows over all shards, given those over the classes of this rank: MATH.md (26)."""
    fields = [name for name, one in partial._asdict().items() if one is not None]
    # Bits are exchanged, so an index may stand among float32 numbers.
    own = [getattr(partial, name) for name in fields]
    own = [one.int().view(torch.float32) if one.dtype == torch.int64 else one for one in own]
    gathered = gather(torch.stack(own), shard.ranks, shard.group).view(shard.ranks, len(fields), -1)

    def of_rank(numbers: Tensor) -> Partial:
        found = dict(zip(fields, numbers, strict=True))
        if "argmax" in found:
            found["argmax"] = found["argmax"].view(torch.int32).long()
        return partial._replace(**found)

    return reduce(row_math.merge, map(of_rank, gathered))


def sum_of_d_input(shard: VocabShard, d_input: Tensor) -> Tensor:
    """Returns the sum over all shards of their parts of rows of d_input, (n, D) float32 and contiguous, which it may
    overwrite."""
    return all_sum(d_input.to(shard.dtype), shard.group).float()


def sent_by_sum(ranks: int, size: float, *, of_own: bool) -> float:
    """Returns the bytes that each rank sends for a sum of `size` bytes, or with `of_own` for that of its own rows."""
    return (1 if of_own else 2) * (ranks - 1) / ranks * size


def all_sum(tensor: Tensor, group: str) -> Tensor:
    """Returns the sum of a contiguous tensor over the ranks of a group, which it may overwrite."""
    if torch.compiler.is_compiling():
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(tensor, "sum", group))
    dist.all_reduce(tensor, group=group_of(group))
    return tensor


def ordered_sum(tensor: Tensor, ranks: int, group: str) -> Tensor:
    """Returns the sum of a contiguous tensor (n, ...) over the ranks of a group, in their order for each element.

    The order in which NCCL and gloo add depends on the place of an element and on n. Here each rank adds n / ranks of
    the rows, and gives the sums to the others. It takes the memory of two more such tensors.
    """
    n, size = len(tensor), -(-len(tensor) // ranks)
    parts = tensor.new_zeros((ranks * size, *tensor.shape[1:]))
    parts[:n] = tensor
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group_of(group))
    own = received[:size]
    for rank in range(1, ranks):
        own += received[rank * size : (rank + 1) * size]
    getattr(dist, ALL_GATHER)(parts, own, group=group_of(group))
    return parts[:n]


def start_all_sum(tensor: Tensor, group: str) -> Any:
    """Starts the sum of a contiguous tensor over the ranks of a group, which it overwrites. Returns a handle whose
    `wait` must be called before the sum is read."""
    return dist.all_reduce(tensor, group=group_of(group), async_op=True)


def start_gather(result: Tensor, own: Tensor, group: str) -> Any:
    """Starts to write the contiguous tensors `own` of all ranks to `result`, one after the other along the first axis.
    `own` may be this rank's part of it. Returns a handle as `start_all_sum` does."""
    return getattr(dist, ALL_GATHER)(result, own, group=group_of(group), async_op=True)


def start_own_sum(own: Tensor, tensor: Tensor, group: str) -> Any:
    """Starts to write to `own` this rank's rows of the sum of a contiguous tensor over the ranks of a group, of which
    each has as many rows. Returns a handle as `start_all_sum` does."""
    return getattr(dist, REDUCE_SCATTER)(own, tensor, group=group_of(group), async_op=True)


def gather(tensor: Tensor, ranks: int, group: str) -> Tensor:
    """Returns the contiguous tensors of all ranks of a group, one after the other along the first axis."""
    result = tensor.new_empty((ranks * len(tensor), *tensor.shape[1:]))
    getattr(dist, ALL_GATHER)(result, tensor, group=group_of(group))
    return result


def group_of(name: str) -> "dist.ProcessGroup":
    """Returns the group of this name."""
    from torch._C import _distributed_c10d  # not in every build of PyTorch

    return _distributed_c10d._resolve_process_group(cast("Any", name))


def check_group(name: str, group: Any) -> "dist.ProcessGroup":
    """Returns a process group; raises TypeError or ValueError if it is none, or if this rank is not in it."""
    if dist.is_available() and isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{name} must be a process group that this rank is in, got GroupMember.NON_GROUP_MEMBER: "
            "torch.distributed.new_group returns it on all other ranks"
        )
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        kind = type(group).__name__
        hint = ": pass mesh.get_group()" if kind == "DeviceMesh" else ""
        raise TypeError(f"{name} must be a torch.distributed.ProcessGroup or None, got {kind}{hint}")
    return group


def shard_of(rows: int, rank: int, ranks: int, vocab_size: int | None) -> tuple[int, int, int]:
    """Returns the first class of a rank's shard, the rows of the largest shard, and the number of classes K.

    A shard has as many rows on every rank, or vocab_size classes are divided as `torch.chunk` and DTensor's Shard(0)
    divide them: ceil(K / ranks) rows each, until there are no more.

    Args:
        rows: of this rank's shard.
        rank, ranks: of the group.
        vocab_size: K, or None for all rows of all ranks.

    Raises:
        ValueError: the shard has neither of these sizes.
    """
    classes = rows * ranks if vocab_size is None else vocab_size
    if rows * ranks >= classes:
        return rank * rows, rows, classes
    most = -(-classes // ranks)
    if rows != max(min(most, classes - rank * most), 0):
        raise ValueError(
            f"linear_weight must be this rank's shard of vocab_size {classes} classes on {ranks} ranks: at least "
            f"{most} rows on every rank, or {max(min(most, classes - rank * most), 0)} rows on rank {rank}, got {rows}"
        )
    return rank * most, most, classes


def joint_normalizer(
    groups: "Sequence[dist.ProcessGroup]",
    *,
    reduction: str,
    normalizer: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    classes: int,
) -> Tensor:
    """Returns the () float32 denominator with which the mean of the ranks' losses is the loss of all their tokens.

    Args:
        groups: their ranks have different tokens.
        reduction: "mean" or "sum".
        normalizer: the denominator of all tokens, or None for the number of counted tokens of all ranks.
        target: (...,) of this rank.
        class_weight: (K,) float32 or None.
    """
    ranks = math.prod([group.size() for group in groups])
    if reduction == "sum":
        return torch.full((), 1.0 / ranks, device=target.device)
    if normalizer is None:
        target = target.long()  # a number of 8 bits without a sign may be ignore_index modulo 256
        counted = target != ignore_index
        if class_weight is None:
            normalizer = counted.sum().float()
        else:
            weights = row_math.target_class_weight(target, class_weight, classes)
            normalizer = torch.where(counted, weights, 0.0).sum()
        for group in groups:
            normalizer = all_sum(normalizer, group.group_name)
    return normalizer.float() / ranks


_calls: dict[tuple[str, ...], int] = {}  # of each group, by its name, and of what was compared


def check_agreements(
    of_groups: "Iterable[tuple[str, Any, Mapping[str, Any]]]", *, always: bool, failure: Exception | None = None
) -> None:
    """Compares what the ranks of several groups were given: `check_agreement` of each. Raises what it finds after the
    last group, whose other ranks may not be in the one where it was found and would wait for this rank.

    Args:
        of_groups: for each group the name of its argument, the group, and what must be the same.
        always: as in `check_agreement`.
        failure: what this rank will raise after this call, which then raises nothing.

    Raises:
        TypeError, ValueError: the first error of a group.
    """
    found: Exception | None = None
    for name, group, given in of_groups:
        try:
            group = check_group(name, group)
            # What is no bool is an error of this rank, which the others may not compare.
            check_agreement(name, group, given, always=always is True, failure=failure or found)
        except (TypeError, ValueError) as error:
            found = found or error
    try:
        if found is not None and failure is None:
            raise found
    finally:
        del found  # its traceback has this frame, and would keep the tensors of the call


def check_agreement(
    name: str, group: "dist.ProcessGroup", given: Mapping[str, Any], *, always: bool, failure: Exception | None = None
) -> None:
    """Raises ValueError on all ranks of a group if they were not given the same, or if one has a failure. Compares the
    first calls of each group, and every call if `always`. Collectives of ranks that disagree would wait for each other
    until the group's timeout.

    Args:
        name: of the argument that has the group.
        given: what must be the same. A function is called for its value, if the call is compared.
        failure: what this rank will raise. Its `given` has the names of the other ranks, and any values.
    """
    key = group.group_name, *given
    count = _calls[key] = _calls.get(key, 0) + 1
    if not always and count > AGREEMENT_CALLS:
        return
    own = None if failure is not None else {key: one() if callable(one) else one for key, one in given.items()}
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, (own, f"{type(failure).__name__}: {failure}"), group=group)
    if failure is not None:
        return
    for rank, (other, text) in enumerate(every):
        if other is None:
            raise ValueError(f"rank {rank} of {name} raised {text}")
    for argument, value in every[0][0].items():
        for rank, (other, _) in enumerate(every):
            if other.get(argument) != value:
                raise ValueError(
                    f"{argument} must be the same on all ranks of {name}, got {value} on rank 0 and "
                    f"{other.get(argument)} on rank {rank}"
                )
