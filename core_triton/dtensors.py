"""Calls whose arguments are DTensors, and tokens or heads that are gathered for a call.

The placements of input and linear_weight on each dimension of their mesh say what its ranks share, and that says how
the call on local tensors runs (`Form`):

    input       linear_weight  gather    the ranks share     the local call
    Replicate   Replicate                tokens and head     is that of one rank
    Replicate   Shard(0)                 the tokens          has `vocab_group`
    Shard(i)    Replicate                the head            has `token_group`; the gradients of the head are summed
    Shard(i)    Shard(0)       "tokens"  nothing             has `vocab_group`, and the tokens of all its ranks
    Shard(i)    Shard(0)       "head"    nothing             has `token_group`, and the head of all its ranks, whose
                                                             gradients are summed
    plain       Shard(0)                 nothing: FSDP2      has the head of all ranks, whose gradients are averaged
    plain       Replicate                the head: HSDP      the gradients of the head are averaged

Numbers of a call, such as the loss, are those of all tokens, and Replicate. What it returns of each token has the
placements of input, and gradients have the placements of what they are of. Gradients are those of the loss of all
tokens. A rank's gradient of the head is added to those of the others in float32, and the sum is rounded once.
"""

import inspect
import math
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist

from core_triton import ops, vocab_shard
from core_triton.arguments import Groups, autocast_dtype, check_before_gather, class_indices
from core_triton.gathered_tokens import gathered_tokens, own_tokens
from core_triton.head_scatter import HeadScatter, sum_of_copies
from core_triton.problem import Gradients
from core_triton.scaling import Factors, scaled
from core_triton.transforms import check_transforms
from linear_ce.spec import check_flag, check_memory_budget

Function = TypeVar("Function", bound=Callable[..., Any])
Gather = Literal["tokens", "head"]

OF_HEAD = ("linear_weight", "linear_bias")
OF_TOKENS = ("input", "target", "token_weight")  # and the arrays of a token loss


def is_dtensor(value: Any) -> bool:
    return type(value).__name__ == "DTensor" and type(value).__module__.startswith("torch.distributed")


# What layers of `parallelize_module` return while their collective runs.
ARRIVING = "AsyncCollectiveTensor"


def arrived(value: Any) -> Any:
    """Returns a value. A tensor whose collective still runs becomes the plain one that it is when that ends."""
    return _Arrived.apply(value) if type(value).__name__ == ARRIVING else value


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return value.wait().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def takes_dtensors(function: Function) -> Function:
    """Makes a public function take DTensors, gather="head", sequence_parallel=True, and tensors whose collective still
    runs."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        of_devices = kwargs.get("gather") is not None or kwargs.get("sequence_parallel", False) is not False
        for values in (args, kwargs.values()):
            for value in values:
                kind = type(value).__name__
                if kind == ARRIVING:
                    return call(*map(arrived, args), **{name: arrived(one) for name, one in kwargs.items()})
                of_devices = of_devices or (kind == "DTensor" and is_dtensor(value))
        return _run(function, *args, **kwargs) if of_devices else function(*args, **kwargs)

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
    check_flag("sequence_parallel", sequence_parallel)
    check_flag("check_agreement", given.get("check_agreement", False))
    if given.get("grad_into") is not None:
        raise ValueError("grad_into must be None with DTensors, gather or sequence_parallel")
    for name, value in given.items():
        if isinstance(value, Tensor):
            check_transforms(name, value)
    x: Any = given.get("input")
    w: Any = given.get("linear_weight")
    if sequence_parallel:
        return _run_form(function, *_of_sequence_parallel(given, gather))
    if not is_dtensor(x) and not is_dtensor(w):
        names = [name for name, value in given.items() if is_dtensor(value)]
        if names:
            raise ValueError(f"{names[0]} must be a plain Tensor beside a plain input and linear_weight, got DTensor")
        raise ValueError(f"gather must be None without DTensors, got {gather!r}")
    if not is_dtensor(w):
        raise ValueError("linear_weight must be a DTensor beside a DTensor input, got Tensor")
    bias: Any = given.get("linear_bias")
    # Shards that are gathered may have any sizes.
    if is_dtensor(bias) and w.ndim == 2 and bias.shape != w.shape[:1]:
        shape = f"({w.shape[0]},) (a number for each class of linear_weight, padding included)"
        raise ValueError(f"linear_bias must have shape {shape}, got {tuple(bias.shape)}")
    if not is_dtensor(x):
        if not isinstance(x, Tensor):
            raise TypeError(f"input must be a Tensor, got {type(x).__name__}")
        return _run_form(function, *_of_fsdp(given, gather))
    return _wrapped(_run_form(function, *_of_placements(given, gather)), x)


class Head(NamedTuple):
    """How a call gets the head, and this rank the gradient of what it has of it."""

    rows: int = 0  # V, of a head that is gathered
    gathered: "dist.ProcessGroup | None" = None  # its ranks have shards, as `torch.chunk` divides the head
    shared: "tuple[dist.ProcessGroup, ...]" = ()  # their ranks have other tokens, and the same rows
    mean: bool = False  # the gradient is the mean of those of the ranks, as with FSDP2, and not their sum

    def whole(self, own: Tensor) -> Tensor:
        """Returns the rows of the call, given those of this rank."""
        return own if self.gathered is None else _all_rows(own, self.gathered, self.rows)

    def scatter(self, own: Tensor) -> HeadScatter | None:
        """Returns how the gradient of the rows of the call is sent, if they are gathered, for this rank's rows."""
        if self.gathered is None:
            return None
        return HeadScatter(self.gathered, self.rows, own, shared=self.shared, ranks=self._ranks())

    def own_gradient(self, gradient: Tensor, scatter: HeadScatter | None) -> Tensor:
        """Returns the gradient of this rank's rows, given that of its tokens and the rows of the call."""
        if scatter is not None:
            return scatter.send(gradient)
        part = gradient.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        return sum_of_copies(part, self.shared, self._ranks(), torch.empty_like(part, dtype=gradient.dtype))

    def _ranks(self) -> int:
        """Returns what a sum over all ranks is divided by."""
        groups = self.shared if self.gathered is None else (self.gathered, *self.shared)
        return math.prod(group.size() for group in groups) if self.mean else 1


class Form(NamedTuple):
    """How a call on local tensors runs."""

    head: Head
    vocab_group: "dist.ProcessGroup | None" = None  # its ranks have different classes
    classes: int | None = None  # K, with vocab_group; None for all rows of its ranks
    rank_tokens: int | None = None  # the most tokens of a rank of vocab_group, whose ranks gather theirs; None: no rank
    token_groups: "tuple[dist.ProcessGroup, ...]" = ()  # their ranks have different tokens


def _run_form(function: Callable[..., Any], given: dict[str, Any], form: Form) -> Any:
    """Runs a call on local tensors. Its results are those of this rank's tokens, and numbers of all tokens."""
    local, head = dict(given), form.head
    reduction = given.get("reduction", "mean" if "reduction" in _signature(function).parameters else "none")
    if form.token_groups and reduction != "none":
        of_caller = given.get("token_group")
        local["token_group"] = form.token_groups if of_caller is None else (*form.token_groups, of_caller)
    own: list[Any] = [given.get(name) for name in OF_HEAD]
    in_forward = function.__name__ == "linear_cross_entropy" and reduction != "none" and not _in_float16(given["input"])
    if head.gathered is not None and in_forward and torch.is_grad_enabled() and own[0].requires_grad:
        found = _LossOfGatheredHead.apply((function, local, head), given["input"], *own)
    else:
        if head.gathered is not None or head.shared:
            local |= {name: _Head.apply(one, head) for name, one in zip(OF_HEAD, own, strict=True) if one is not None}
        found = _with_vocabulary(function, local, form)
    return _of_all_ranks(found, local, form) if form.token_groups else found


def _in_float16(x: Tensor) -> bool:
    """Whether the matmuls of a call are those of float16. The range of its gradients is that of float16 too, and only
    the backward pass knows their upstream gradient, so they are not rounded before."""
    return (autocast_dtype(x.device) or x.dtype) == torch.float16


def _of_placements(given: dict[str, Any], gather: Gather | None) -> tuple[dict[str, Any], Form]:
    """Returns the local arguments and the form of a call of a DTensor input and head."""
    from torch.distributed.tensor import Replicate, Shard

    x, w = given["input"], given["linear_weight"]
    if x.device_mesh != w.device_mesh:
        raise ValueError("linear_weight must have the device_mesh of input")
    if given.get("vocab_group") is not None:
        raise ValueError("vocab_group must be None with DTensors, whose placements say what is shared")
    of_classes, of_tokens = list[Any](), list[Any]()  # groups whose ranks have different classes, different tokens
    for index, (of_x, of_w) in enumerate(zip(x.placements, w.placements, strict=True)):
        group = x.device_mesh.get_group(index)
        if type(of_x) is Shard and of_x.dim % x.ndim != x.ndim - 1:
            of_tokens.append(group)
        elif type(of_x) is not Replicate:
            raise ValueError(
                f"input must be Replicate, or Shard on an axis of tokens, on dimension {index}, got {of_x}"
            )
        if type(of_w) is Shard and of_w.dim % 2 == 0:
            of_classes.append(group)
        elif type(of_w) is not Replicate:
            raise ValueError(f"linear_weight must be Replicate or Shard(0) on dimension {index}, got {of_w}")
    if len(of_classes) > 1:
        raise ValueError(f"linear_weight must be sharded on one dimension of the mesh, got {w.placements}")
    of_vocabulary = of_classes[0] if of_classes else None
    gathers = of_vocabulary in of_tokens
    if gather is not None and not gathers:
        raise ValueError(f"gather must be None where input and linear_weight are not both sharded, got {gather!r}")
    local, rows = _local(given, x, shards_tokens=bool(of_tokens)), w.shape[0]
    shared = tuple(group for group in of_tokens if group is not of_vocabulary)
    classes = given.get("vocab_size") or rows
    if gathers and gather is None:
        tokens = x.shape[:-1].numel() / math.prod(group.size() for group in shared)  # of the ranks of of_vocabulary
        gather = "tokens" if tokens < classes else "head"
    if of_vocabulary is not None:
        sizes = {f"the shape of {name}": tuple(given[name].shape) for name in ("input", "linear_weight")}
        of_mesh = [("the mesh", group, sizes) for group in (of_vocabulary, *shared)]
        _check_before_exchange(of_mesh, given, local)
    if of_vocabulary is None or gather == "head":
        return local, Form(Head(rows, of_vocabulary, shared), token_groups=tuple(of_tokens))
    most = _most_tokens(x, of_vocabulary) if gathers else None
    local |= _of_equal_shards(local, rows, of_vocabulary.size(), classes)
    return local, Form(Head(shared=shared), of_vocabulary, classes, most, shared)


def _check_before_exchange(
    of_groups: list[tuple[str, Any, dict[str, Any]]], given: dict[str, Any], local: dict[str, Any]
) -> None:
    """Checks the arguments of this rank before it exchanges tokens or a head with the others of a group, and compares
    the sizes by which they do that: `vocab_shard.check_agreements`. An error of a rank is one of all."""
    always = given.get("check_agreement", False)
    try:
        check_before_gather(local)
        for argument in ("input", "linear_weight"):
            if is_dtensor(given[argument]):
                _check_local(argument, given[argument], local[argument])
    except (TypeError, ValueError) as failure:
        vocab_shard.check_agreements(of_groups, always=always, failure=failure)
        raise
    vocab_shard.check_agreements(of_groups, always=always)


def _check_local(name: str, whole: Any, local: Tensor) -> None:
    """Raises ValueError if this rank's part of a DTensor is not the one that its shape and placements say."""
    sizes, mesh = list(whole.shape), whole.device_mesh
    for index, place in enumerate(whole.placements):
        if place.is_shard():
            most = -(-sizes[place.dim] // mesh.size(index))
            sizes[place.dim] = max(min(most, sizes[place.dim] - most * mesh.get_local_rank(index)), 0)
    if list(local.shape) != sizes:
        raise ValueError(
            f"{name} must have local shape {tuple(sizes)} on this rank, a part of {tuple(whole.shape)} with placements "
            f"{whole.placements}, got {tuple(local.shape)}"
        )


def _of_equal_shards(local: dict[str, Any], rows: int, ranks: int, classes: int) -> dict[str, Any]:
    """Returns arguments of a rank that has a shard of a head whose `rows` end with padding. All ranks then have as many
    rows: where only classes are divided, it is known how many a rank has, but not where rows of padding follow them."""
    found, most = dict[str, Any](), -(-rows // ranks)
    for name in OF_HEAD if classes < rows else ():
        own = local.get(name)
        if own is not None and len(own) < most:
            found[name] = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
    weight = local.get("weight")
    if weight is not None and weight.shape == (rows,):
        found["weight"] = weight[:classes]
    return found


def _mapped(change: Callable[[Tensor], Any], found: Any) -> Any:
    """Returns results, a tensor or tuples of them, with each tensor changed."""
    if isinstance(found, Tensor):
        return change(found)
    if isinstance(found, tuple):
        made = [_mapped(change, one) for one in found]
        return type(found)(*made) if hasattr(found, "_fields") else tuple(made)
    return found


def _of_all_ranks(found: Any, local: dict[str, Any], form: Form) -> Any:
    """Returns results with the numbers of all tokens in place of those of the tokens of a call: the loss and z_loss,
    which `token_group` makes the mean over the ranks of its groups, accuracy and n_valid."""
    groups = form.token_groups
    ranks = math.prod(group.size() for group in groups)

    def summed(one: Tensor) -> Tensor:
        return one if one.ndim else cast(Tensor, _Summed.apply(one / ranks, groups))

    if type(found) is tuple:
        return tuple(_of_all_ranks(one, local, form) for one in found)
    if not hasattr(found, "accuracy"):
        return _mapped(summed, found)
    ignore_index = local.get("ignore_index", -100)
    contributes = class_indices(local["target"], ignore_index) != ignore_index
    if local.get("token_weight") is not None:
        contributes &= local["token_weight"] != 0
    count = contributes.sum()
    if form.vocab_group is not None and form.rank_tokens is not None:
        count = vocab_shard.all_sum(count, form.vocab_group.group_name)
    correct = (found.accuracy.double() * count).round()
    numbers = torch.stack([found.n_valid.double(), count.double(), correct])
    n_valid, count, correct = _Summed.apply(numbers, groups)
    accuracy = (correct / count.clamp(min=1)).to(found.accuracy.dtype)
    return found._replace(z_loss=summed(found.z_loss), accuracy=accuracy, n_valid=n_valid.to(found.n_valid.dtype))


def _local(given: dict[str, Any], x: Any, *, shards_tokens: bool) -> dict[str, Any]:
    """Returns the arguments of a call with local tensors. Those of tokens must have the placements of input, and those
    of the head the placements of linear_weight."""
    from torch.distributed.tensor import Replicate

    mesh, of_head = x.device_mesh, given["linear_weight"].placements

    def local(name: str, one: Any) -> Any:
        of_tokens = name in OF_TOKENS or name == "per_token"
        like, expected = "input", x.placements if of_tokens else (Replicate(),) * mesh.ndim
        if name in OF_HEAD:
            like, expected = "linear_weight", of_head
        if is_dtensor(one):
            if one.device_mesh != mesh or one.placements != expected:
                raise ValueError(f"{name} must have the mesh of input and placements {expected}, got {one.placements}")
            return _Local.apply(one)
        if isinstance(one, Tensor) and (name in OF_HEAD or (of_tokens and shards_tokens and one.ndim)):
            raise ValueError(f"{name} must be a DTensor with the placements of {like} {expected}, got Tensor")
        return one

    return {
        name: tuple(local(name, one) for one in value) if name == "per_token" else local(name, value)
        for name, value in given.items()
    }


class _Local(torch.autograd.Function):
    """What this rank has of a DTensor. The gradient has the placements of the DTensor also where its ranks have
    different sizes on another axis than the first. There that of `to_local` has other strides than the DTensor, and
    autograd replaces it by one that is Replicate."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        local = arrived(value.to_local())
        ctx.given = value.device_mesh, value.placements, value.shape, value.stride(), local.stride()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        mesh, placements, shape, stride, own_stride = ctx.given
        return _dtensor(gradient, mesh, placements, shape, stride if gradient.stride() == own_stride else None)


def _dtensor(local: Tensor, mesh: Any, placements: Any, shape: Any, stride: tuple[int, ...] | None = None) -> Any:
    """Returns the DTensor (*shape) of the ranks' local tensors, contiguous if there is no stride."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _wrapped(found: Any, x: Any) -> Any:
    """Returns results as DTensors: those of tokens with the placements of input `x`, and numbers, which all ranks
    have."""
    from torch.distributed.tensor import Replicate

    mesh = x.device_mesh

    def wrap(one: Tensor) -> Any:
        of_tokens = one.ndim > 0
        placements = x.placements if of_tokens else [Replicate()] * mesh.ndim
        return _dtensor(one, mesh, placements, x.shape[:-1] if of_tokens else one.shape)

    return _mapped(wrap, found)


def _of_fsdp(given: dict[str, Any], gather: Gather | None) -> tuple[dict[str, Any], Form]:
    """Returns the local arguments and the form of a call of a plain input and a DTensor head, which FSDP2 divides among
    ranks with different tokens."""
    from torch.distributed.tensor import Replicate, Shard

    w = given["linear_weight"]
    if gather == "tokens" or (gather is None and given.get("token_group") is None):
        raise ValueError(
            "input must be a DTensor beside a DTensor linear_weight, whose placements say which ranks have the same "
            'tokens, got Tensor. If all ranks have different tokens, as with FSDP2, pass gather="head" or token_group'
        )
    if given.get("vocab_group") is not None:
        raise ValueError("vocab_group must be None with a DTensor linear_weight")
    mesh, places = w.device_mesh, list(enumerate(w.placements))
    sharded = [mesh.get_group(index) for index, place in places if place == Shard(0)]
    if len(sharded) > 1 or any(place not in (Shard(0), Replicate()) for place in w.placements):
        raise ValueError(f"linear_weight must be Shard(0) on one dimension of its mesh, got {w.placements}")
    local = dict(given)
    for name in OF_HEAD:
        one = given.get(name)
        if one is None:
            continue
        if not is_dtensor(one) or one.placements != w.placements or one.device_mesh != mesh:
            got = one.placements if is_dtensor(one) else type(one).__name__
            raise ValueError(f"{name} must be a DTensor with the placements of linear_weight {w.placements}, got {got}")
        local[name] = _Local.apply(one)
    copies = [mesh.get_group(index) for index, place in places if place == Replicate() and mesh.size(index) > 1]
    if sharded:
        sizes = {"the shape of linear_weight": tuple(w.shape)}
        _check_before_exchange([("the mesh of linear_weight", one, sizes) for one in (*sharded, *copies)], given, local)
    return local, Form(Head(w.shape[0], sharded[0] if sharded else None, tuple(copies), mean=True))


class _LossOfGatheredHead(torch.autograd.Function):
    """The gradients exist when the forward pass ends. So the head is gathered once, and its gradient is scattered
    there. The backward pass multiplies what a rank keeps."""

    @staticmethod
    def forward(ctx: Any, call: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        function, local, head = call
        shards, needed = {"linear_weight": weight, "linear_bias": bias}, ctx.needs_input_grad[1:]
        scatter = cast(HeadScatter, head.scatter(weight))
        with torch.enable_grad():
            arrays: dict[str, Any] = {"input": input.detach()}
            for name, shard in shards.items():
                arrays[name] = None if shard is None else head.whole(shard.detach())
            for one, need in zip(arrays.values(), needed, strict=True):
                if one is not None:
                    one.requires_grad_(need)
            with scatter.offered():
                loss = _call(function, local | arrays)
            leaves = {name: one for name, one in arrays.items() if one is not None and one.requires_grad}
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            gradients = dict(zip(leaves, found, strict=True))
        loss = loss.detach()
        del arrays, leaves, found, one  # the head is not needed any more
        for name, shard in shards.items():
            if name == "linear_weight" and scatter.result is not None:
                gradients[name] = scatter.result
            elif name in gradients:
                gradients[name] = head.own_gradient(gradients[name], head.scatter(cast(Tensor, shard)))
        ctx.budget = check_memory_budget(local.get("memory_budget"))
        ctx.save_for_backward(*(gradients.get(name) for name in ("input", *OF_HEAD)))
        return loss

    @staticmethod
    @ops.no_double_backward
    def backward(ctx: Any, d_loss: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *scaled(Gradients(*ctx.saved_tensors), Factors(d_loss, d_loss), ctx.budget)


class _Head(torch.autograd.Function):
    """The head of a call, or its bias, given what this rank has of it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, head: Head) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.head, ctx.scatter = head, head.scatter(own)
        whole = head.whole(own)
        return own.view_as(own) if whole is own else whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.head.own_gradient(gradient, ctx.scatter), None


def _of_sequence_parallel(given: dict[str, Any], gather: Gather | None) -> tuple[dict[str, Any], Form]:
    """Returns the arguments and the form of a call whose ranks of vocab_group have different tokens, as many on
    each."""
    group = given.get("vocab_group")
    if group is None:
        raise ValueError("vocab_group must be a process group with sequence_parallel=True, got None")
    if gather is not None:
        raise ValueError(f"gather must be None with sequence_parallel=True, got {gather!r}")
    vocab_shard.check_group("vocab_group", group)
    local = {name: value for name, value in given.items() if name not in ("vocab_group", "vocab_size")}
    shape = getattr(local["target"], "shape", torch.Size())  # what is no tensor is an error of this call
    of_groups = [("vocab_group", group, {"the shape of target": tuple(shape)})]
    # The ranks of token_group would wait for one that raises here.
    of_groups += [("token_group", one, {}) for one in Groups(token_group=given.get("token_group")).given_of_tokens()]
    _check_before_exchange(of_groups, given, local)
    return local, Form(Head(), group, given.get("vocab_size"), shape.numel())


def _with_vocabulary(function: Callable[..., Any], local: dict[str, Any], form: Form) -> Any:
    """Runs a call whose ranks of vocab_group, if there is one, have different classes. If they have different tokens
    too, it is one of the tokens of all these ranks. Returns results by token of this rank's, and numbers of all
    tokens."""
    group, most = form.vocab_group, form.rank_tokens
    if group is None:
        return _call(function, local)
    if most is None:
        return _call(function, local, vocab_group=group, vocab_size=form.classes)
    given, target, x = dict(local), local["target"], local["input"]
    shape = target.shape
    given["input"] = x.reshape(shape.numel(), x.shape[-1])
    ignore_index = local.get("ignore_index", -100)
    # int64 can be ignore_index, and the backends of groups can gather it.
    given["target"] = class_indices(target, ignore_index)
    fill: dict[str, Any] = {"target": ignore_index}
    for name in ("target", "token_weight", "per_token"):
        if given.get(name) is None:
            continue
        value = given[name]
        ones = value if name == "per_token" else (value,)
        made = tuple(gathered_tokens(one, group, most, len(shape), fill.get(name, 0)) for one in ones)
        given[name] = made if name == "per_token" else made[0]
    found = _call(function, given, vocab_group=group, vocab_size=form.classes, sequence_parallel=most)

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


def _all_rows(local: Tensor, group: "dist.ProcessGroup", rows: int) -> Tensor:
    """Returns the rows of all ranks, which `torch.chunk` divides."""
    most = -(-rows // group.size())
    if len(local) < most:
        local = torch.cat([local, local.new_zeros(most - len(local), *local.shape[1:])])
    return vocab_shard.gather(local.contiguous(), group.size(), group.group_name)[:rows]


class _Summed(torch.autograd.Function):
    """The sum of numbers over the ranks of groups. The gradient with respect to each is that with respect to the
    sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, groups: "tuple[dist.ProcessGroup, ...]") -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        value = value.detach().clone()
        for group in groups:
            value = vocab_shard.all_sum(value, group.group_name)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None
