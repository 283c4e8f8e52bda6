"""What adapters share: checks of a host's version and of options, a module's call with another forward method, and what
`patch` returns."""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import nn

from core_triton.arguments import IMPLEMENTATIONS, Groups, of_vocab_group
from linear_ce.spec import check_later_options

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


def call_with_forward(module: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    """Calls a module whose forward method is another function in this call.

    The hooks of the module run as in any call, such as those of FSDP2, which gather its weight for the call, and those
    of Megatron's distributed optimizer, which wait for it.

    Args:
        module: of the host.
        forward: gets `args` after the hooks.

    Returns:
        What `forward` returns, after the hooks.
    """
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        return module(*args)
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
