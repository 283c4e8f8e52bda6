"""Runs the checks of a test file in a process with several CPU devices, whose number must be set before JAX starts."""

import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from kernels_in_numpy import kernels_in_numpy

DEVICES = 4


def failures_of(request: pytest.FixtureRequest, devices: int = DEVICES) -> dict[str, str]:
    """Returns the failures of the checks that the selected tests of a file name, with the fixture `failures`. One
    process runs all of them."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items if "failures" in item.fixturenames]
    return failures_in(request.path, names, devices)


def failures_in(file: Path, names: Iterable[str], devices: int = DEVICES) -> dict[str, str]:
    """Returns the failures of checks of a file, which run in one process."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    paths = os.pathsep.join([str(Path(__file__).parent.parent), str(Path(__file__).parent)])
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # like compiling.quick_compilation
    done = subprocess.run(
        [sys.executable, str(file), *names], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def run_named(checks: Mapping[str, Callable[[], None]], devices: int = DEVICES) -> None:
    """Runs the checks that the command line names and prints their failures as a JSON object, by name."""
    assert jax.device_count() == devices
    gc.freeze()  # as in conftest.py, no scan visits what was imported, and scans are rare
    gc.set_threshold(10_000, 10, 100)
    found: dict[str, str] = {}
    with kernels_in_numpy():
        for name in sys.argv[1:]:
            try:
                checks[name]()
            except Exception:  # one failing check must not hide the others
                found[name] = traceback.format_exc(limit=-5)[-3000:]
    print(json.dumps(found))
