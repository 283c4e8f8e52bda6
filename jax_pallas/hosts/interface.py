"""A check that a function of a host has the arguments that an adapter was written for."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any


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
