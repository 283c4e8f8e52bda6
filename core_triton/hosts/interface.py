"""What adapters share: checks of a host's version and of options, and what `patch` returns."""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

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
    """Checks the names of the options that a user gives an adapter.

    Raises:
        TypeError: an option is none of `names`.
    """
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise TypeError(f"options must be among {', '.join(names)}, got {', '.join(unknown)}")


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
