"""What adapters share: checks of a host's version and of options, a module's call with another forward method, and what
`patch` returns."""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from core_triton.arguments import IMPLEMENTATIONS, Groups, of_vocab_group
from linear_ce.spec import check_later_options

# Hooks of these packages gather and free weights. They return an output as it is, in another tensor or another dtype.
SHARDING = ("torch", "deepspeed", "megatron")
OPTIONS = ("implementation", "memory_budget", "head_precision", "batch_invariant")  # of `linear_cross_entropy`


def check_version(adapter: str, host: str, found: str, tested: Sequence[str]) -> None:
    """Checks the version of a host.

    Args:
        adapter: the module, for the message.
        host: the name of the host's package.
        found: the installed version.
        tested: the versions that the adapter is tested with. "5.23" stands for 5.23.0, 5.23.1 and so on.

    Raises:
        RuntimeError: the version was not tested. The message names those that were.
    """
    parts = found.split("+")[0].split(".")  # without what a build adds, such as +cu130
    if not any(parts[: len(one)] == one for one in (version.split(".") for version in tested)):
        raise RuntimeError(f"{adapter} was tested with {host} {', '.join(tested)}, found {found}")


def check_options(options: Mapping[str, Any], names: Sequence[str] = OPTIONS) -> None:
    """Checks the options that a user gives an adapter, as far as they do not depend on a call.

    Raises:
        TypeError: an option is none of `names`, or its type is wrong.
        ValueError: the value of an option, or two options that exclude each other.
    """
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise TypeError(f"options must be among {', '.join(names)}, got {', '.join(unknown)}")
    check_later_options(options, IMPLEMENTATIONS)
    if "reduce_dtype" in options:
        of_vocab_group(Groups(reduce_dtype=options["reduce_dtype"]))


def check_hooks(module: nn.Module, name: str, computed: Tensor, output: Any) -> None:
    """Checks that forward hooks of an output layer left the loss as it is, because they are meant to change logits.

    Args:
        module: the output layer, after a call that computed a loss.
        name: of the output layer, for the message.
        computed: the loss before the hooks.
        output: what the call returned.

    Raises:
        ValueError: a hook changed the loss.
    """
    hooks = [
        hook
        for hook in module._forward_hooks.values()
        if (getattr(hook, "__module__", None) or "").split(".")[0] not in SHARDING
    ]
    if not hooks:
        return
    names = ""
    if not torch.compiler.is_compiling():  # torch.compile cannot trace versions, values and names
        in_place = not computed.is_inference() and computed._version > 0  # inference_mode counts no versions
        if not in_place and isinstance(output, Tensor) and output.shape == computed.shape:
            value = computed.detach().to(output.dtype)
            if output is computed or bool(((output.detach() == value) | value.isnan()).all()):
                return
        names = ": " + ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
    elif output is computed:
        return
    raise ValueError(
        f"a forward hook of {name} changes what it returns, which is the loss and not the logits{names}. Remove the "
        "hook, or compute the loss without core_triton"
    )


def call_with_forward(module: nn.Module, forward: Callable[..., Tensor], *args: Any) -> Any:
    """Calls a module whose forward method is another function in this call.

    The hooks of the module run as in any call, such as those of FSDP2, which gather its weight for the call, and those
    of Megatron's distributed optimizer, which wait for it.

    Args:
        module: of the host.
        forward: gets `args` after the hooks.

    Returns:
        What `forward` returns, after the hooks.

    Raises:
        ValueError: a hook that is not one of these changed it.
    """
    own = vars(module).get("forward")
    computed: list[Tensor] = []

    def recorded(*args: Any) -> Tensor:
        computed.append(forward(*args))
        return computed[0]

    vars(module)["forward"] = recorded
    try:
        output = module(*args)
        check_hooks(module, "the output layer", computed[0], output)
        return output
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


class Patch:
    """What `patch` of an adapter returns. The end of its `with` block undoes the patch.

    Args:
        unpatch: undoes it.
        patched: what the `with` statement gives.
    """

    def __init__(self, unpatch: Callable[[], None], patched: Any = None) -> None:
        self._unpatch = unpatch
        self._patched = patched

    def __enter__(self) -> Any:
        return self._patched

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unpatch()
