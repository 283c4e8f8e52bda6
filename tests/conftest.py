"""Settings of the whole suite."""

import os
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import HealthCheck, settings
from programs import Command, Printed, Programs

if len(os.sched_getaffinity(0)) == 1:  # Mosaic's interpreter waits for itself where XLA has one thread
    os.environ.setdefault("NPROC", "2")

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch and other processes share a GPU with JAX

# A test run repeats: hypothesis draws the same examples every time, and a slow machine fails none of them.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("repeatable")


@pytest.fixture(scope="module")
def torch_poisons_buffers() -> Iterator[None]:
    """Fills new PyTorch buffers with NaN: an element that is not written shows."""
    import torch  # the tests of JAX have no need of it

    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(3)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def commands_of(item: pytest.Item) -> Iterable[Command]:
    return (command for mark in item.iter_markers("programs") for command in mark.args)


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Iterator[Programs]:
    """The programs of all selected tests, which run from now on."""
    found = Programs(command for item in request.session.items for command in commands_of(item))
    yield found
    found.stop()


@pytest.fixture
def printed(request: pytest.FixtureRequest, programs: Programs) -> Printed:
    """What the programs of this test printed."""
    return programs.printed(commands_of(request.node))


@pytest.fixture
def alone(programs: Programs) -> None:
    """Lets no program run beside the test: it measures, or takes much of a GPU's memory."""
    programs.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests that wait for all programs last; the others run beside the programs."""
    items.sort(key=lambda item: "alone" in getattr(item, "fixturenames", ()))
