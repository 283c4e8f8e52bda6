"""The adapters of `jax_pallas.hosts` with released packages of tunix, MaxText and levanter, which `make test-hosts`
installs: losses, gradients and 20 steps with and without the adapter, and the interfaces that other tests imitate.

`jax_hosts.py` runs each host in a program of its own. Equinox and flax are in `test_hosts_jax.py`.
"""

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
from programs import Printed, python

# The distribution, its version and the arguments of `jax_hosts.py`
RELEASES = {
    "tunix": ("google-tunix", "0.1.7", ()),
    "maxtext": ("maxtext", "0.2.5", ("skip_jax_distributed_system=True",)),
    "levanter": ("marin-levanter", "0.2.227.dev40316220070", ()),
}


def released(host: str, seconds: float) -> Any:
    """Returns the marks of the tests of a host: slow ones, with its program if it is installed."""
    if find_spec(host) is None:
        reason = f"{host} is not installed (`make test-hosts` installs it)"
        return lambda test: pytest.mark.slow(pytest.mark.skip(reason)(test))
    mark = pytest.mark.programs(python("jax_hosts.py", host, *RELEASES[host][2]), seconds=seconds)
    return lambda test: pytest.mark.slow(pytest.mark.timeout(600)(mark(test)))


def check_release(host: str, printed: Printed, limits: dict[str, float]) -> None:
    """Checks the version and the interface of a host, and the differences by name."""
    name, tested, _ = RELEASES[host]
    assert version(name) == tested
    assert printed[f"{host} interface"]["interface"] == []
    found = {name: row["difference"] for name, row in printed.items() if "difference" in row}
    assert set(found) == set(limits)
    for name, limit in limits.items():
        assert found[name] <= limit, name
    first, last = printed[f"{host} steps"]["losses"]
    assert last < 0.9 * first  # the model trains, so that the steps depend on the gradients


@released("tunix", seconds=100)
def test_tunix(printed: Printed) -> None:
    models = [f"tunix {name}, tied {tied}" for name in ("gemma", "gemma3", "qwen2", "qwen3") for tied in (False, True)]
    check_release("tunix", printed, dict.fromkeys(models, 2e-6) | {"tunix steps": 2e-6})
    for name in ("gemma4", "llama3"):
        assert "must take skip_lm_head or output_hidden_states" in printed[f"tunix {name}, tied True"]["refused"]
    assert "got google-tunix 0.1.7, which has no compute_chunked_logps" in printed["tunix patch"]["refused"]
    assert printed["tunix page"]["programs"] == 1


@released("maxtext", seconds=60)
def test_maxtext(printed: Printed) -> None:
    # MaxText rounds the gradient of a tied embedding to bfloat16.
    limits = {"maxtext tied False": 2e-6, "maxtext tied True": 8e-3, "maxtext steps": 5e-6}
    check_release("maxtext", printed, limits)
    assert printed["maxtext config"]["interface"] == []
    assert printed["maxtext page"]["programs"] == 1


@released("levanter", seconds=20)
def test_levanter(printed: Printed) -> None:
    check_release("levanter", printed, {"levanter": 5e-6, "levanter steps": 5e-6})
    names = printed["levanter"]["implementations"]
    assert names[-1] == "linear_ce"
    assert "xla" in names
    assert "linear_ce" not in printed["levanter default"]["implementations"]
    assert printed["levanter page"]["programs"] == 1
