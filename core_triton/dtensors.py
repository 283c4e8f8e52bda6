"""Calls whose arguments are DTensors, and tokens or heads that are gathered for a call.

The placements of input and linear_weight on a dimension of their mesh say what its ranks share:

    input        linear_weight
    Replicate    Shard(0)       the tokens; each rank has some classes: the call gets `vocab_group`
    Shard(i)     Replicate      the head; each rank has some tokens: one sum of the losses, one of d_weight
    Shard(i)     Shard(0)       nothing: the tokens are gathered, which makes it the first case, or the head, the second

`takes_dtensors` turns such a call into one on local tensors with process groups, whose results it makes DTensors again.
Gradients are those of the loss of all tokens. The gradients that a call sums itself are summed in float32.
"""

import inspect
import math
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch import distributed as dist

from core_triton import vocab_shard
from core_triton.gathered_tokens import gathered_tokens, own_tokens

Gather = Literal["tokens", "head"]

OF_HEAD = ("linear_weight", "linear_bias")
SENT_BYTES = 2**27  # of a gradient of the head at a time
OF_TOKENS = ("input", "target", "token_weight")  # and the arrays of a token loss


def is_dtensor(value: Any) -> bool:
    return type(value).__name__ == "DTensor" and type(value).__module__.startswith("torch.distributed")


def takes_dtensors[Function: Callable[..., Any]](function: Function) -> Function:
    """Makes a public function take DTensors, gather="head" and sequence_parallel=True."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs and (kwargs.get("gather") is not None or kwargs.get("sequence_parallel")):
            return _run(function, *args, **kwargs)
        for value in args:
            if is_dtensor(value):
                return _run(function, *args, **kwargs)
        for value in kwargs.values():
            if is_dtensor(value):
                return _run(function, *args, **kwargs)
        return function(*args, **kwargs)

    return cast(Function, call)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _call(function: Callable[..., Any], arguments: dict[str, Any], **more: Any) -> Any:
    """Calls a public function. The arrays of a token loss are positional arguments, after those before them."""
    named = {**arguments, **more}
    first = [named.pop(name) for name in ("input", "linear_weight", "target", "token_loss") if name in named]
    return function(*first, *named.pop("per_token", ()), **named)


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        from core_triton.compiling import call_between_graphs  # loads torch._dynamo

        return call_between_graphs(_run, function, *args, **kwargs)
    bound = _signature(function).bind(*args, **kwargs)
    given = bound.arguments
    gather, sequence_parallel = given.pop("gather", None), given.pop("sequence_parallel", False)
    if gather not in (None, "tokens", "head"):
        raise ValueError(f'gather must be "tokens", "head" or None, got {gather!r}')
    if given.get("grad_into") is not None:
        raise ValueError("grad_into must be None with DTensors, gather or sequence_parallel")
    x, w = given.get("input"), given.get("linear_weight")
    if sequence_parallel:
        return _sequence_parallel(function, bound, gather)
    if not is_dtensor(x) and not is_dtensor(w):
        names = [name for name, value in given.items() if is_dtensor(value)]
        if names:
            raise ValueError(f"{names[0]} must be a plain Tensor beside a plain input and linear_weight, got DTensor")
        raise ValueError(f"gather must be None without DTensors, got {gather!r}")
    if not is_dtensor(w):
        raise ValueError("linear_weight must be a DTensor beside a DTensor input, got Tensor")
    if not is_dtensor(x):
        return _head_of_fsdp(function, bound, gather)
    return _of_placements(function, bound, gather)


class Dimension(NamedTuple):
    """What the ranks of a dimension of a mesh share."""

    group: "dist.ProcessGroup"
    kind: Literal["classes", "tokens", "neither"]


def _dimensions(x: Any, w: Any) -> list[Dimension]:
    """Returns the dimensions of the mesh of input and linear_weight whose ranks do not share both."""
    from torch.distributed.tensor import Replicate, Shard

    if x.device_mesh != w.device_mesh:
        raise ValueError("linear_weight must have the device_mesh of input")
    found, last = list[Dimension](), x.ndim - 1
    for index, (of_x, of_w) in enumerate(zip(x.placements, w.placements, strict=True)):
        tokens = type(of_x) is Shard and of_x.dim % x.ndim != last
        classes = type(of_w) is Shard and of_w.dim % 2 == 0
        if not tokens and type(of_x) is not Replicate:
            raise ValueError(
                f"input must be Replicate, or Shard on an axis of tokens, on dimension {index}, got {of_x}"
            )
        if not classes and type(of_w) is not Replicate:
            raise ValueError(f"linear_weight must be Replicate or Shard(0) on dimension {index}, got {of_w}")
        if tokens or classes:
            kind = "neither" if tokens and classes else "tokens" if tokens else "classes"
            found.append(Dimension(x.device_mesh.get_group(index), kind))
    kinds = [one.kind for one in found]
    if kinds.count("classes") + kinds.count("neither") > 1:
        raise ValueError(f"linear_weight must be sharded on one dimension of the mesh, got {w.placements}")
    if kinds.count("tokens") > 1:
        raise ValueError(
            f"input must be sharded on one dimension of the mesh where linear_weight is not, got {x.placements}"
        )
    return found


def _of_placements(function: Callable[..., Any], bound: inspect.BoundArguments, gather: Gather | None) -> Any:
    """Runs a call of a DTensor input and head."""
    given = bound.arguments
    x, w = given["input"], given["linear_weight"]
    group_of = {one.kind: one.group for one in _dimensions(x, w)}
    of_tokens, of_classes, of_neither = (group_of.get(kind) for kind in ("tokens", "classes", "neither"))
    if given.get("vocab_group") is not None:
        raise ValueError("vocab_group must be None with DTensors, whose placements say what is shared")
    if given.get("token_group") is not None and of_tokens is not None:
        raise ValueError(
            "token_group must be None where a dimension of the mesh shards input and not linear_weight, got a group"
        )
    if gather is not None and of_neither is None:
        raise ValueError(f"gather must be None where input and linear_weight are not both sharded, got {gather!r}")
    more_tokens = of_tokens is not None or given.get("token_group") is not None
    if gather == "head" and more_tokens:
        raise ValueError('gather must be "tokens" where ranks of another group have other tokens, got "head"')
    classes = given.get("vocab_size") or w.shape[0]
    local = _local(given, x, shards_tokens=of_tokens is not None or of_neither is not None)
    reduction = given.get("reduction", "mean" if "reduction" in _signature(function).parameters else "none")
    if of_tokens is not None:
        for name in OF_HEAD:
            if local.get(name) is not None:
                local[name] = cast(Tensor, _Shared.apply(local[name], of_tokens, False))
        if reduction != "none":
            local["token_group"] = of_tokens
    if of_neither is None:
        of_shard = {} if of_classes is None else {"vocab_group": of_classes, "vocab_size": classes}
        found = _call(function, local, **of_shard)
    elif gather == "tokens" or more_tokens or (gather is None and x.shape[:-1].numel() < classes):
        found = _with_all_tokens(function, local, of_neither, classes, _most_tokens(x, of_neither))
    else:
        found = _of_gathered_head(function, local, of_neither, w.shape[0], reduction, mean=False)
        return _wrapped(_of_all_ranks(found, local, of_neither), x)
    if of_tokens is not None:
        found = _of_all_ranks(found, local, of_tokens, of_neither)
    return _wrapped(found, x)


def _mapped(change: Callable[[Tensor], Any], found: Any) -> Any:
    """Returns results, a tensor or tuples of them, with each tensor changed."""
    if isinstance(found, Tensor):
        return change(found)
    if isinstance(found, tuple):
        made = [_mapped(change, one) for one in found]
        return type(found)(*made) if hasattr(found, "_fields") else tuple(made)
    return found


def _of_all_ranks(
    found: Any, local: dict[str, Any], group: "dist.ProcessGroup", gathered: "dist.ProcessGroup | None" = None
) -> Any:
    """Returns results of this rank's tokens, or of those of the ranks of `gathered`, with the numbers of the tokens of
    all ranks of `group` in place of theirs: the loss and z_loss, which `token_group` makes the ranks' mean, accuracy
    and n_valid."""

    def summed(one: Tensor) -> Tensor:
        return cast(Tensor, _Summed.apply(one / group.size(), group)) if one.ndim == 0 else one

    if type(found) is tuple:
        return tuple(_of_all_ranks(one, local, group, gathered) for one in found)
    if not hasattr(found, "accuracy"):
        return _mapped(summed, found)
    contributes = local["target"] != local.get("ignore_index", -100)
    if local.get("token_weight") is not None:
        contributes &= local["token_weight"] != 0
    count = contributes.sum()
    if gathered is not None:
        count = vocab_shard.all_sum(count, gathered.group_name)
    correct = (found.accuracy.double() * count).round()
    numbers = torch.stack([found.n_valid.double(), count.double(), correct])
    n_valid, count, correct = vocab_shard.all_sum(numbers, group.group_name)
    accuracy = (correct / count.clamp(min=1)).to(found.accuracy.dtype)
    return found._replace(z_loss=summed(found.z_loss), accuracy=accuracy, n_valid=n_valid.to(found.n_valid.dtype))


def _local(given: dict[str, Any], x: Any, *, shards_tokens: bool) -> dict[str, Any]:
    """Returns the arguments of a call with local tensors. Those of tokens must have the placements of input."""
    from torch.distributed.tensor import Replicate

    found: dict[str, Any] = {}
    for name, value in given.items():
        values = value if name == "per_token" else (value,)
        made = []
        for one in values:
            tokens = name in OF_TOKENS or name == "per_token"
            if is_dtensor(one):
                expected = tuple(x.placements) if tokens else None
                if name not in ("input", *OF_HEAD):
                    expected = expected or (Replicate(),) * x.device_mesh.ndim
                if expected is not None and (one.device_mesh != x.device_mesh or tuple(one.placements) != expected):
                    raise ValueError(
                        f"{name} must have the mesh of input and placements {expected}, got {one.placements}"
                    )
                if name == "linear_bias" and one.placements != given["linear_weight"].placements:
                    raise ValueError(f"linear_bias must have the placements of linear_weight, got {one.placements}")
                one = one.to_local()
            elif isinstance(one, Tensor) and one.ndim and tokens and shards_tokens:
                raise ValueError(
                    f"{name} must be a DTensor with the placements of input {tuple(x.placements)}, got Tensor"
                )
            made.append(one)
        found[name] = tuple(made) if name == "per_token" else made[0]
    return found


def _wrapped(found: Any, x: Any) -> Any:
    """Returns results as DTensors: those of tokens with the placements of input `x`, and numbers, which all ranks
    have."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh, shape = x.device_mesh, x.shape[:-1]
    stride = torch.empty(shape, device="meta").stride()

    def wrap(one: Tensor) -> Any:
        if one.ndim == 0:
            return DTensor.from_local(one, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return DTensor.from_local(one, mesh, x.placements, run_check=False, shape=shape, stride=stride)

    return _mapped(wrap, found)


def _head_of_fsdp(function: Callable[..., Any], bound: inspect.BoundArguments, gather: Gather | None) -> Any:
    """Runs a call of a plain input and a DTensor head, which FSDP2 divides among ranks with different tokens."""
    from torch.distributed.tensor import Replicate, Shard

    given = bound.arguments
    w = given["linear_weight"]
    if gather == "tokens" or (gather is None and given.get("token_group") is None):
        raise ValueError(
            "input must be a DTensor beside a DTensor linear_weight, whose placements say which ranks have the same "
            'tokens, got Tensor. If all ranks have different tokens, as with FSDP2, pass gather="head" or token_group'
        )
    if given.get("vocab_group") is not None:
        raise ValueError("vocab_group must be None with a DTensor linear_weight")
    others = [place for place in w.placements if place not in (Shard(0), Replicate())]
    sharded = [index for index, place in enumerate(w.placements) if place == Shard(0)]
    if others or len(sharded) > 1:
        raise ValueError(f"linear_weight must be Shard(0) on one dimension of its mesh, got {w.placements}")
    local = dict(given)
    for name in OF_HEAD:
        one = given.get(name)
        if one is None:
            continue
        if not is_dtensor(one) or one.placements != w.placements:
            raise ValueError(f"{name} must be a DTensor with the placements of linear_weight, got {one}")
        local[name] = one.to_local()
        for index, place in enumerate(w.placements):  # of HSDP, whose ranks have copies
            if place == Replicate() and w.device_mesh.size(index) > 1:
                local[name] = cast(Tensor, _Shared.apply(local[name], w.device_mesh.get_group(index), True))
    if not sharded:
        return _call(function, local)
    reduction = local.get("reduction", "mean")
    return _of_gathered_head(function, local, w.device_mesh.get_group(sharded[0]), w.shape[0], reduction, mean=True)


def _of_gathered_head(
    function: Callable[..., Any],
    local: dict[str, Any],
    group: "dist.ProcessGroup",
    rows: int,
    reduction: str,
    *,
    mean: bool,
) -> Any:
    """Runs a call on this rank's tokens and the whole head, of which it has a shard. The gradient of the head is the
    sum of those of all ranks, or with `mean`, for FSDP2, their mean. Without it the call has the group as
    `token_group`, unless its reduction is "none"."""
    if not mean and reduction != "none":
        local = local | {"token_group": group}
    shards: list[Any] = [local.get(name) for name in OF_HEAD]
    if (
        function.__name__ == "linear_cross_entropy"
        and reduction != "none"
        and torch.is_grad_enabled()
        and shards[0].requires_grad
    ):
        call = function, local, group, rows, mean
        return _LossOfGatheredHead.apply(call, local["input"], *shards)
    for name, shard in zip(OF_HEAD, shards, strict=True):
        if shard is not None:
            local[name] = gathered_head(shard, group, rows, mean=mean)
    return _call(function, local)


class _LossOfGatheredHead(torch.autograd.Function):
    """The gradients exist when the forward pass ends. So the head is gathered once, and its gradient is scattered
    there. The backward pass multiplies what a rank keeps."""

    @staticmethod
    def forward(ctx: Any, call: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        function, local, group, rows, mean = call
        shards, needed = {"linear_weight": weight, "linear_bias": bias}, ctx.needs_input_grad[1:]
        with torch.enable_grad():
            arrays: dict[str, Any] = {"input": input.detach()}
            for name, shard in shards.items():
                arrays[name] = None if shard is None else _all_rows(shard.detach(), group, rows)
            for one, need in zip(arrays.values(), needed, strict=True):
                if one is not None:
                    one.requires_grad_(need)
            loss = _call(function, local | arrays)
            leaves = {name: one for name, one in arrays.items() if one is not None and one.requires_grad}
            gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        del arrays, leaves  # the head is not needed any more
        for name, shard in shards.items():
            if name in gradients:
                gradients[name] = _own_rows(gradients[name], group, cast(Tensor, shard), mean=mean)
        ctx.save_for_backward(*(gradients.get(name) for name in ("input", *OF_HEAD)))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *(None if one is None else (one * d_loss).to(one.dtype) for one in ctx.saved_tensors)


def _sequence_parallel(function: Callable[..., Any], bound: inspect.BoundArguments, gather: Gather | None) -> Any:
    """Runs a call whose ranks of vocab_group have different tokens, as many on each."""
    given = bound.arguments
    group = given.get("vocab_group")
    if group is None:
        raise ValueError("vocab_group must be a process group with sequence_parallel=True, got None")
    if gather is not None:
        raise ValueError(f"gather must be None with sequence_parallel=True, got {gather!r}")
    vocab_shard.check_group("vocab_group", group)
    local = dict(given)
    local.pop("vocab_group")
    shape, always = local["target"].shape, local.get("check_agreement", False)
    vocab_shard.check_agreement("vocab_group", group, {"the shape of target": tuple(shape)}, always=always)
    return _with_all_tokens(function, local, group, local.pop("vocab_size", None), shape.numel())


def _with_all_tokens(
    function: Callable[..., Any], local: dict[str, Any], group: "dist.ProcessGroup", classes: int | None, most: int
) -> Any:
    """Runs a call on the tokens of all ranks of a group, at most `most` of each, each with its shard of the head.
    Returns results by token of this rank's, and numbers of all tokens."""
    given, ignore_index = dict(local), local.get("ignore_index", -100)
    shape, x = given["target"].shape, given["input"]
    given["input"] = x.reshape(-1, x.shape[-1])
    fill: dict[str, Any] = {"target": ignore_index}
    for name in ("target", "token_weight", "per_token"):
        if given.get(name) is None:
            continue
        value = given[name]
        ones = value if name == "per_token" else (value,)
        made = tuple(gathered_tokens(one, group, most, len(shape), fill.get(name, 0)) for one in ones)
        given[name] = made if name == "per_token" else made[0]
    found = _call(function, given, vocab_group=group, vocab_size=classes, sequence_parallel=most)

    def own(one: Tensor) -> Tensor:
        if one.ndim == 0:
            return one
        return own_tokens(one, group, most, shape.numel()).reshape(shape)

    return _mapped(own, found)


def _most_tokens(x: Any, group: "dist.ProcessGroup") -> int:
    """Returns the most tokens that a rank of a dimension of the mesh of a DTensor has: the first one."""
    mesh, sizes = x.device_mesh, list(x.shape)
    for index, place in enumerate(x.placements):
        if place.is_shard():
            size = sizes[place.dim]
            most = -(-size // mesh.size(index))
            first = 0 if mesh.get_group(index) is group else mesh.get_local_rank(index)
            sizes[place.dim] = max(min(most, size - most * first), 0)
    return math.prod(sizes[:-1])


def gathered_head(local: Tensor, group: "dist.ProcessGroup", rows: int, *, mean: bool) -> Tensor:
    """Returns the head (rows, ...) of shards that are divided as `torch.chunk` divides them. The backward pass adds the
    gradients of all ranks in float32, or with `mean` takes their mean."""
    return cast(Tensor, _GatheredHead.apply(local, group, rows, mean))


class _GatheredHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any, rows: int, mean: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.mean = group, mean
        ctx.save_for_backward(local)
        return _all_rows(local, group, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _own_rows(gradient, ctx.group, ctx.saved_tensors[0], mean=ctx.mean), None, None, None


def _all_rows(local: Tensor, group: "dist.ProcessGroup", rows: int) -> Tensor:
    """Returns the rows of all ranks, which `torch.chunk` divides."""
    most = -(-rows // group.size())
    if len(local) < most:
        local = torch.cat([local, local.new_zeros(most - len(local), *local.shape[1:])])
    return vocab_shard.gather(local.contiguous(), group.size(), group.group_name)[:rows]


def _own_rows(gradient: Tensor, group: "dist.ProcessGroup", like: Tensor, *, mean: bool) -> Tensor:
    """Returns this rank's rows of the sum of the ranks' gradients, or of their mean, with the rows and dtype of `like`.
    They are added in float32, some rows of each rank at a time: while these are sent, the next ones are cast."""
    ranks = group.size()
    most, own = -(-len(gradient) // ranks), torch.empty_like(like)
    if len(gradient) < ranks * most:
        gradient = torch.cat([gradient, gradient.new_zeros(ranks * most - len(gradient), *gradient.shape[1:])])
    by_rank = gradient.view(ranks, most, *gradient.shape[1:])
    step = max(1, SENT_BYTES // (4 * ranks * max(by_rank[0, :1].numel(), 1)))
    sent: list[tuple[int, Tensor, Any]] = []

    def receive(start: int, part: Tensor, work: Any) -> None:
        work.wait()
        place = own[start : start + step]
        place.copy_(part[: len(place)].div_(ranks) if mean else part[: len(place)])

    for start in range(0, most, step):
        rows = by_rank[:, start : start + step].to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        part = rows.new_empty(rows.shape[1:])
        work = dist.reduce_scatter_tensor(part, rows.flatten(0, 1), group=group, async_op=True)
        sent.append((start, part, work))
        if len(sent) > 1:
            receive(*sent.pop(0))
    for one in sent:
        receive(*one)
    return own


class _Shared(torch.autograd.Function):
    """An array that ranks share. The backward pass adds its gradients of all ranks in float32, or with `mean` takes
    their mean."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any, mean: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.mean = group, mean
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = gradient.float().contiguous()
        total = vocab_shard.all_sum(total.clone() if total is gradient else total, ctx.group.group_name)
        return (total / ctx.group.size() if ctx.mean else total).to(gradient.dtype), None, None


class _Summed(torch.autograd.Function):
    """The sum of numbers over ranks. The gradient with respect to each is that with respect to the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return vocab_shard.all_sum(value.detach().clone(), group.group_name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None
