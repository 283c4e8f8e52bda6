"""Settings of the whole suite."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

if len(os.sched_getaffinity(0)) == 1:  # Mosaic's interpreter waits for itself where XLA has one thread
    os.environ.setdefault("NPROC", "2")

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
