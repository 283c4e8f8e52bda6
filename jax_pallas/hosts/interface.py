"""What adapters share: checks of a host's functions and of options, and what `patch` returns."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from jax_pallas.arguments import IMPLEMENTATIONS
from linear_ce.spec import check_later_options


def check_interface(
    adapter: str, tested: str, installed: str, function: Callable[..., Any], names: Sequence[str]
) -> None:
    """Checks the names of a function's arguments, in order.

    Args:
        adapter: the module, for the message.
        tested: the versions of the host that the adapter is tested with.
        installed: the host's version.
        function: of the host.
        names: of its arguments in the tested versions.

    Raises:
        ImportError: they are others. The message names the tested versions.
    """
    found = tuple(inspect.signature(function).parameters)
    if found != tuple(names):
        raise ImportError(
            f"{adapter} is tested with {tested}, got {installed}, whose {function.__name__} has the arguments "
            f"{', '.join(found)} in place of {', '.join(names)}"
        )


def check_options(options: Mapping[str, Any], *names: str) -> None:
    """Checks the options that a user gives an adapter, as far as they do not depend on a call.

    Args:
        options: by name.
        names: of the arguments that the adapter passes.

    Raises:
        TypeError: an option is one of them, or its type is wrong.
        ValueError: the value of an option, or two options that exclude each other.
    """
    for name in names:
        if name in options:
            raise TypeError(f"{name} is set by the adapter, got {name}={options[name]!r}")
    check_later_options(options, IMPLEMENTATIONS)


class Patch:
    """What `patch` of an adapter returns. The end of its `with` block calls `unpatch`."""

    def __init__(self, unpatch: Callable[[], None]) -> None:
        self._unpatch = unpatch

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unpatch()
