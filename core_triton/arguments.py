"""The arguments of the public functions: their checks, and a call with leading axes made one."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from core_triton import device as devices
from core_triton import ops
from core_triton.grad_into import check_grad_into
from core_triton.plan import DeviceInfo
from core_triton.problem import DTYPE_NAMES, layout_of
from core_triton.token_hook import TokenLoss
from core_triton.token_losses import Named
from core_triton.transforms import check_transforms
from core_triton.vocab_shard import REDUCE_DTYPES, check_agreements, check_group, joint_normalizer, shard_of
from linear_ce.spec import (
    ArrayInfo,
    LossSpec,
    check_arrays,
    check_batch_invariant,
    check_choice,
    check_flag,
    check_memory_budget,
    check_normalizer,
    check_saved_budget,
)

T = TypeVar("T")

IMPLEMENTATIONS = ("triton", "triton_sm80", "chunked")


class Implementation(NamedTuple):
    """Which implementation a call runs, and why."""

    name: str
    reason: str


def choose(device: torch.device, implementation: str | None, gpu: DeviceInfo | None = None) -> Implementation:
    """Returns the implementation of a call on a device, or on `gpu`, where the kernels can run."""
    obstacle = _triton_obstacle(device) if gpu is None else None
    if implementation is None:
        if obstacle is None:
            return Implementation("triton", f"the kernels for {device.type if gpu is None else gpu.type} devices")
        return Implementation("chunked", obstacle)
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation != "chunked" and obstacle is not None and not _interpreted():
        raise ValueError(f"implementation {implementation!r} cannot serve this call: {obstacle}")
    return Implementation(implementation, "asked for by name")


def _triton_obstacle(device: torch.device) -> str | None:
    """Returns why the kernels do not run on a device, or None."""
    if torch.compiler.is_compiling():
        from core_triton.compiling import triton_obstacle  # loads torch._dynamo

        return triton_obstacle(device)
    return devices.triton_obstacle(device)


def _interpreted() -> bool:
    """Whether Triton's interpreter was switched on: then the kernels run on any device when asked for by name."""
    if find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _cached(function: Callable[..., T], maxsize: int) -> Callable[..., T]:
    """Returns a function that keeps its results. With an argument that cannot be hashed it is `function` itself, which
    names that argument."""
    kept = lru_cache(maxsize, typed=True)(function)

    def call(*arguments: Any) -> T:
        try:
            return kept(*arguments)
        except TypeError:  # not called here, where its error would have this one as its context
            pass
        return function(*arguments)

    return call


_cached_spec = _cached(LossSpec, 1024)


def spec_of(*options: Any) -> LossSpec:
    """Returns the options of a call, which are checked once for each combination."""
    return LossSpec(*options) if torch.compiler.is_compiling() else _cached_spec(*options)


class Decision(NamedTuple):
    """What `decide` found."""

    classes: int  # K
    memory_budget: int
    saved_budget: int
    implementation: str
    offset: int  # class index of linear_weight's first row
    shard_rows: int  # of the largest shard; 0 where linear_weight is the whole head


class Groups(NamedTuple):
    """The arguments of a call that name process groups."""

    vocab_group: Any = None
    token_group: Any = None  # a process group, or a tuple of several, all of whose ranks have different tokens
    reduce_dtype: torch.dtype = torch.float32
    check_agreement: bool = False
    rank_tokens: int = 0  # `groups.Options.rank_tokens`, which `dtensors.py` passes as sequence_parallel

    def of_tokens(self) -> "tuple[dist.ProcessGroup, ...]":
        """Returns the groups of token_group."""
        return tuple([check_group("token_group", group) for group in self.given_of_tokens()])

    def given_of_tokens(self) -> tuple[Any, ...]:
        """Returns what was given as token_group, which may be no process group."""
        groups = self.token_group if isinstance(self.token_group, tuple) else (self.token_group,)
        return tuple([group for group in groups if group is not None])


def decide(
    spec: LossSpec,
    device: torch.device,
    infos: tuple[tuple[str, torch.Size, torch.dtype], ...],
    memory_budget: int | None,
    implementation: str | None,
    batch_invariant: bool,
    saved_budget: int,
    rank: int = 0,
    ranks: int = 0,
    gpu: DeviceInfo | None = None,
) -> Decision:
    """Checks shapes, dtypes and what else does not depend on values. The head is the shard of `rank` of `ranks`, or
    whole where `ranks` is 0."""
    named = {name: ArrayInfo(tuple(shape), str(dtype).removeprefix("torch.")) for name, shape, dtype in infos}
    offset = rows = 0
    classes = None
    if ranks and len(named["linear_weight"].shape) == 2:
        own = named["linear_weight"].shape[0]
        offset, rows, classes = shard_of(own, rank, ranks, spec.vocab_size)
        if "weight" in named and named["weight"].shape == (own * ranks,):  # the padding has class weights too
            named["weight"] = named["weight"]._replace(shape=(classes,))
    check_arrays(spec=spec, classes=classes, **named)  # pyright: ignore[reportArgumentType]
    budget = check_memory_budget(memory_budget)
    into, precision = "grad_into" in named, spec.head_precision
    saved_budget = check_saved_budget(saved_budget, spec.reduction, grad_into=into, head_precision=precision)
    chosen = choose(device, implementation, gpu)
    check_batch_invariant(
        batch_invariant,
        label_smoothing=spec.label_smoothing,
        saved_budget=saved_budget,
        implementation=chosen.name,
        reason=chosen.reason,
    )
    if classes is None:
        classes = spec.classes(named["linear_weight"].shape[0])
    return Decision(classes, budget, saved_budget, chosen.name, offset, rows)


_cached_decide = _cached(decide, 4096)


class Call(NamedTuple):
    """One call, checked and flattened."""

    spec: LossSpec
    arrays: ops.Arrays
    weights: ops.TokenWeights
    options: ops.Options
    grad_into: Tensor | None
    per_token: list[Tensor]  # of a token loss


def prepare(
    options: tuple[Any, ...],
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | float | None,
    memory_budget: int | None,
    implementation: str | None,
    grad_into: Tensor | None,
    batch_invariant: bool,
    saved_budget: int,
    groups: Groups,
    token_loss: TokenLoss | None = None,
    per_token: tuple[Tensor, ...] = (),
) -> Call:
    """Checks every argument and flattens the leading axes. `options` are those of `spec_of`."""
    compiling = torch.compiler.is_compiling()
    named: dict[str, Any] = {
        "input": input,
        "linear_weight": linear_weight,
        "target": target,
        "linear_bias": linear_bias,
        "weight": weight,
        "token_weight": token_weight,
        "grad_into": grad_into,
    }
    normalizer = as_number(normalizer)
    number = normalizer if isinstance(normalizer, (int, float)) else None
    compares = not compiling and (groups.vocab_group is not None or groups.token_group is not None)
    try:
        spec = spec_of(*options)
        check_are_tensors(named)
        if target.dtype == torch.uint64:
            target = named["target"] = class_indices(target, spec.ignore_index)
        if normalizer is not None:
            named["normalizer"] = normalizer = _scalar(normalizer, input.device)
        compute = autocast_dtype(input.device)
        if compute is not None:
            for name in _OF_MATMUL:
                if named[name] is not None:
                    named[name] = named[name].to(dtype_of_matmul(name, named[name].dtype, compute))
            input, linear_weight, linear_bias = named["input"], named["linear_weight"], named["linear_bias"]
        device, infos = input.device, []
        shape = input.shape  # of the input of all ranks, where they have different tokens
        if groups.rank_tokens:
            ranks = check_group("vocab_group", groups.vocab_group).size()
            shape = torch.Size((ranks * groups.rank_tokens, input.shape[-1]))
        for name, tensor in named.items():
            if tensor is None:
                continue
            if tensor.device != device:
                raise ValueError(f"{name} must be on input's device {device}, got {tensor.device}")
            if name in _CONSTANT and tensor.requires_grad:
                raise ValueError(f"{name} is not differentiated and must not require grad; pass {name}.detach()")
            infos.append((name, shape if name == "input" else tensor.shape, tensor.dtype))
        checked = decide if compiling else _cached_decide
        how = memory_budget, implementation, batch_invariant, saved_budget
        name, rank, ranks, reduce_dtype = of_vocab_group(groups)
        found = checked(spec, device, tuple(infos), *how, rank, ranks)
        grad_into = check_grad_into(grad_into, input, linear_weight)
        of_tokens = [] if token_loss is None else check_per_token(token_loss, per_token, target)
    except (TypeError, ValueError) as failure:
        if compares:  # the other ranks would wait for this one
            _compare(groups, dict.fromkeys(COMPARED), failure)
        raise
    classes = found.classes
    class_weight = None if weight is None else weight[:classes].float()
    flat = _flat(input, 2)
    if compares:
        differentiated = tuple(one is not None and one.requires_grad for one in (input, linear_weight, linear_bias))
        compared = (
            (shape, input.dtype, target.shape, target.dtype),
            partial(_checksum, target),
            linear_weight.dtype,
            spec.reduction,
            tuple(name for name in ("linear_bias", "weight", "normalizer") if named.get(name) is not None),
            number,
            token_weight is not None,
            groups.check_agreement,
            (replace(spec, reduction="sum"), classes, found.shard_rows, str(reduce_dtype)),
            (torch.is_grad_enabled(), *differentiated, named["grad_into"] is not None),
            found.memory_budget,
            found.saved_budget,
            found.implementation,
            _readable(found.implementation, *([] if groups.rank_tokens else [flat]), linear_weight),
        )
        _compare(groups, dict(zip(COMPARED, compared, strict=True)))
    if groups.token_group is not None:
        spec, normalizer = _of_all_tokens(groups, spec, normalizer, target, class_weight, classes)
    token_weight = None if token_weight is None else _flat(token_weight, 1)
    return Call(
        spec,
        ops.Arrays(flat, linear_weight, linear_bias, _flat(target, 1).long(), class_weight),
        ops.TokenWeights(token_weight, normalizer),
        ops.Options(
            spec.reduction == "mean",
            spec.ignore_index,
            spec.label_smoothing,
            spec.z_loss_weight,
            spec.softcap,
            spec.logit_scale,
            classes,
            found.memory_budget,
            found.implementation,
            spec.splits_head,
            found.saved_budget,
            batch_invariant,
            name,
            ranks,
            found.offset,
            found.shard_rows,
            reduce_dtype,
            int(groups.rank_tokens),
        ),
        grad_into,
        of_tokens,
    )


def of_vocab_group(groups: Groups) -> tuple[str, int, int, str]:
    """Returns the name of the group whose ranks have shards of the head ("" where the head is whole), this rank, the
    number of ranks, and the name of reduce_dtype."""
    check_flag("check_agreement", groups.check_agreement)
    given = groups.reduce_dtype
    reduce_dtype = REDUCE_DTYPES.get(given) if isinstance(given, torch.dtype) else None  # a list cannot be hashed
    if reduce_dtype is None:
        raise ValueError(f"reduce_dtype must be torch.float32 or torch.bfloat16, got {given!r}")
    if groups.vocab_group is None:
        return "", 0, 0, reduce_dtype
    group = check_group("vocab_group", groups.vocab_group)
    return group.group_name, group.rank(), group.size(), reduce_dtype


def _readable(implementation: str, *matrices: Tensor) -> list[tuple[bool, ...]]:
    """Returns the properties of the matrices' layouts that the chunks of kernels depend on."""
    layouts = map(layout_of, matrices) if implementation != "chunked" else ()
    return [
        (
            one.tma_compatible(),
            one.tma_compatible(by_row=True),
            one.tma_compatible(pointers=True),
            one.gemm_compatible(),
        )
        for one in layouts
    ]


# What the ranks of vocab_group compare, and then those of token_group. A normalizer is compared if it is a number.
COMPARED = (
    "the shapes and dtypes of input and target",
    "the values of target (a checksum)",
    "linear_weight's dtype",
    "reduction",
    "which of linear_bias, weight and normalizer are given",
    "normalizer",
    "whether token_weight is given",
    "check_agreement",
    "the other options",
    "which arguments require grad",
    "memory_budget",
    "saved_budget",
    "implementation",
    "how kernels can read input and linear_weight",
)
COMPARED_FOR_TOKENS = (
    "reduction",
    "which of linear_bias, weight and normalizer are given",
    "normalizer",
    "check_agreement",
    "the other options",
)


def _compare(groups: Groups, given: dict[str, Any], failure: Exception | None = None) -> None:
    """Compares what the ranks of each group were given, of those that must be the same: `check_agreements`."""
    for_tokens = {key: given[key] for key in COMPARED_FOR_TOKENS}
    of_groups = [("token_group", group, for_tokens) for group in groups.given_of_tokens()]
    if groups.vocab_group is not None:
        of_groups.insert(0, ("vocab_group", groups.vocab_group, given))
    check_agreements(of_groups, always=groups.check_agreement, failure=failure)


def _checksum(target: Tensor) -> int:
    """Returns a number that differs for most other targets, and for most other orders of the same. It waits for the
    device. Tensors without values have none."""
    if target.is_meta:
        return 0
    flat = target.reshape(-1).long()
    return int((flat * (1 + torch.arange(len(flat), device=flat.device) % 9973)).sum())


def _of_all_tokens(
    groups: Groups,
    spec: LossSpec,
    normalizer: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    classes: int,
) -> tuple[LossSpec, Tensor]:
    """Returns the options and the normalizer with which the mean of the losses of the ranks of token_group is the loss
    of all their tokens."""
    if spec.reduction == "none":
        raise ValueError('token_group must be None with reduction "none", whose losses have no denominator')
    normalizer = joint_normalizer(
        groups.of_tokens(),
        reduction=spec.reduction,
        normalizer=normalizer,
        target=target,
        class_weight=class_weight,
        ignore_index=spec.ignore_index,
        classes=classes,
    )
    return replace(spec, reduction="mean"), normalizer


def as_number(normalizer: Any) -> Any:
    """Returns a normalizer, and one of NumPy as a Python number, because its value can be checked: it is in the memory
    of the host."""
    on_host = isinstance(normalizer, (np.ndarray, np.number)) and not normalizer.shape
    return normalizer.item() if on_host else normalizer


def check_per_token(
    token_loss: TokenLoss, per_token: tuple[Tensor, ...], like: Tensor, name_of_like: str = "target"
) -> list[Tensor]:
    """Checks the arguments of a token loss, which must have shape and device of `like`, and flattens their axes."""
    if isinstance(token_loss, Named) and len(per_token) != len(token_loss.per_token):
        names = ", ".join(token_loss.per_token)
        raise ValueError(f"per_token of token_losses.{token_loss.name} must be {names}, got {len(per_token)} tensors")
    for index, tensor in enumerate(per_token):
        name = f"per_token[{index}]"
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
        _check_kind(name, tensor)
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must have a floating-point dtype, got {str(tensor.dtype).removeprefix('torch.')}")
        if tensor.shape != like.shape:
            raise ValueError(
                f"{name} must have shape {tuple(like.shape)} ({name_of_like}'s shape), got {tuple(tensor.shape)}"
            )
        if tensor.device != like.device:
            raise ValueError(f"{name} must be on {name_of_like}'s device {like.device}, got {tensor.device}")
    return [_flat(tensor, 1) for tensor in per_token]


_OPTIONAL = "linear_bias", "weight", "token_weight", "grad_into"

_CONSTANT = "weight", "token_weight", "normalizer", "grad_into"

_OF_MATMUL = "input", "linear_weight", "linear_bias"


def _scalar(normalizer: Any, device: torch.device) -> Tensor:
    """Returns a normalizer as a tensor."""
    if isinstance(normalizer, Tensor):
        _check_kind("normalizer", normalizer)
        return normalizer
    if isinstance(normalizer, bool) or not isinstance(normalizer, (int, float)):
        raise TypeError(f"normalizer must be a number, a scalar Tensor or None, got {type(normalizer).__name__}")
    number = check_normalizer(normalizer)
    if torch.compiler.is_compiling():  # which would compile again for each number that `full` gets
        return number * torch.ones((), dtype=torch.float32, device=device)
    return torch.full((), number, dtype=torch.float32, device=device)


def class_indices(target: Tensor, ignore_index: int) -> Tensor:
    """Returns targets as int64. Those of uint64 that do not fit become a number that is no class and is not ignored."""
    found = target.long()
    if target.dtype == torch.uint64:
        found = torch.where(found < 0, -1 if ignore_index != -1 else -2, found)
    return found


def _flat(tensor: Tensor, axes: int) -> Tensor:
    """Returns a tensor with its leading axes made one, without `reshape`, a node for autograd, if it has the shape."""
    return tensor if tensor.ndim == axes else tensor.reshape(-1, *tensor.shape[tensor.ndim + 1 - axes :])


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype of matmuls under autocast, or None without autocast."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def dtype_of_matmul(name: str, dtype: torch.dtype, compute: torch.dtype | None) -> torch.dtype:
    """Returns the dtype that an argument gets from autocast's `compute`: the head's matmul is in that dtype, as
    torch.nn.functional.linear's is. A float32 head and bias stay, and so do dtypes that the loss refuses."""
    stays = name not in _OF_MATMUL or dtype not in DTYPE_NAMES or (name != "input" and dtype == torch.float32)
    return dtype if compute is None or stays else compute


def check_are_tensors(named: dict[str, Any]) -> None:
    """Raises for an argument that is not a plain tensor."""
    for name, tensor in named.items():
        if tensor is None and name in _OPTIONAL:
            continue
        if not isinstance(tensor, Tensor):
            optional = " or None" if name in _OPTIONAL else ""
            is_layer = name == "linear_weight" and isinstance(tensor, torch.nn.Module)
            layer = ": pass its weight, and a bias as linear_bias" if is_layer else ""
            raise TypeError(f"{name} must be a Tensor{optional}, got {type(tensor).__name__}{layer}")
        _check_kind(name, tensor)


def check_before_gather(arguments: dict[str, Any]) -> None:
    """Checks the types, dtypes and shapes of a rank's arguments before its tokens are gathered."""
    names = "input", "linear_weight", "target", "linear_bias", "token_weight"
    named: dict[str, Any] = {name: arguments.get(name) for name in names}
    check_are_tensors(named)
    compute, infos = autocast_dtype(named["input"].device), []
    for name, tensor in named.items():
        if tensor is not None:
            infos.append((name, tuple(tensor.shape), dtype_of_matmul(name, tensor.dtype, compute)))
    _check_infos(tuple(infos))
    if "token_loss" in arguments:
        check_per_token(arguments["token_loss"], arguments.get("per_token", ()), arguments["target"])


@lru_cache(4096)
def _check_infos(infos: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]) -> None:
    named: dict[str, Any] = {name: ArrayInfo(shape, str(dtype).removeprefix("torch.")) for name, shape, dtype in infos}
    # Any number of classes in all says that linear_weight is a shard, which may have no rows.
    check_arrays(spec=spec_of(), classes=1, **named)


def _check_kind(name: str, tensor: Tensor) -> None:
    """Raises for a tensor that looks like one and would be treated as another."""
    check_transforms(name, tensor)
    if torch.compiler.is_compiling():
        return
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name} must be a dense Tensor, got {kind}")
    if type(tensor).__module__.startswith("torch.distributed"):
        raise TypeError(
            f"{name} must be a plain Tensor, got {type(tensor).__name__}: pass {name}.to_local(), with token_group "
            "where each rank holds its own tokens and vocab_group where each holds a shard of the head, or "
            f"{name}.full_tensor()"
        )
