"""`python -m linear_ce doctor`."""

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch

import core_triton
import flax_models
import jax_pallas
import linear_ce
from core_triton import launch
from linear_ce import doctor
from linear_ce.__main__ import main
from linear_ce.children import started_without_interrupts


@pytest.mark.parametrize("package", doctor.PACKAGES)
def test_a_package_is_reported_and_checked(
    package: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["doctor", "--packages", package]) == 0
    printed = capfd.readouterr().out
    head, about, *plan, check = printed.partition("\n\n")[2].splitlines()
    assert printed.startswith("linear-ce ")
    assert head.startswith(f"{package}: {doctor.PACKAGES[package]} ")
    assert "device" in about if package == "jax_pallas" else "no NVIDIA GPU" in about
    assert plan[1] == "  implementation: chunked, no kernel for cpu devices"
    assert check.startswith("  check in float32: errors of loss ")
    assert ": passed in " in check


@pytest.mark.parametrize("direct", [True, False])
def test_a_version_of_triton_that_takes_longer_is_reported(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(launch, "is_direct", lambda: direct)
    _, about, *more = doctor.torch_package().about.splitlines()
    assert about == "  1 NVIDIA GPU: NVIDIA H200, compute capability 9.0, 132 multiprocessors, 140 GiB"
    assert len(more) == (0 if direct else 1)
    assert direct or "launched by Triton's launcher" in more[0]
    assert direct or more[0].endswith(": ours is tested with Triton 3.6.x")


@pytest.mark.parametrize(
    ("kind", "capability", "version", "spills"),
    [
        ("NVIDIA H200", "9.0", (0, 12, 0, 1), True),
        ("NVIDIA H200", "9.0", (0, 11, 2), False),
        ("NVIDIA A100", "8.0", (0, 12, 0, 1), False),
    ],
)
def test_a_version_of_jax_whose_kernels_may_spill_is_reported(
    kind: str, capability: str, version: tuple[int, ...], spills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    monkeypatch.setattr(jax, "__version_info__", version)
    _, about, *more = doctor.jax_package().about.splitlines()
    assert about == f"  1 device: {kind} (gpu)"
    assert len(more) == spills
    assert not spills or more[0].endswith(': "linear-ce[jax,cuda]" installs JAX 0.11')


@pytest.mark.parametrize("device", ["a100", "h100", "rtx4090"])
def test_the_check_runs_the_kernels_of_the_plan(device: str) -> None:
    plans = []
    for n, d, v in (doctor.SHAPE, (doctor.TOKENS, doctor.HIDDEN, doctor.CLASSES)):
        arrays: Any = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((n, d), (v, d)))
        found = jax_pallas.explain(*arrays, device=device)
        plans.append((found.name, found.plan.path, found.plan.d_weight_kernel))
    assert plans[0] == plans[1]
    assert plans[0][1] == "scaled_exp"


@pytest.mark.parametrize("name", doctor.RESULTS)
@pytest.mark.parametrize("wrong", [1e-2, np.nan])
def test_wrong_results_are_found(name: str, wrong: float) -> None:
    arrays = doctor.draw("bfloat16")
    results = doctor.exact_results(arrays)
    assert doctor.compare(arrays, "bfloat16", results)[0] is False
    place = doctor.RESULTS.index(name)
    results[place] = results[place] * (1 + wrong)
    found, line = doctor.compare(arrays, "bfloat16", results)
    assert found is True
    assert f"{name} {wrong:.1e}" in line


def test_a_failed_check_and_a_failed_process_are_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first package is not installed, which is no failure."""
    package = doctor.Package(
        "torch 2.11", "float32", lambda: "a plan", lambda arrays: [2 * one for one in doctor.exact_results(arrays)]
    )
    monkeypatch.setattr(doctor, "torch_package", lambda: package)
    assert doctor.report("core_triton") == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "core_triton: torch 2.11"
    assert ": FAILED in " in printed[-1]

    installed: dict[str, Any] = {"jax": "0.11.2"}
    monkeypatch.setattr(doctor, "version_of", installed.get)
    ended = SimpleNamespace(wait=lambda: 139, kill=lambda: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: ended)
    assert main([]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"linear-ce {linear_ce.__version__}, NumPy ")
    assert 'core_triton: torch is not installed: pip install "linear-ce[torch]"' in printed
    assert "jax_pallas: FAILED, exit status 139" in printed


def test_all_packages_have_the_version_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"linear-ce {linear_ce.__version__}\n"
    packages = core_triton, jax_pallas, flax_models
    assert {package.__version__ for package in packages} == {linear_ce.__version__}


def test_ctrl_c_ends_the_process_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def sleeping(*_: Any, **__: Any) -> Any:
        process = start([sys.executable, "-c", "import time; time.sleep(60)"])
        started.append(process)
        waits = iter([KeyboardInterrupt])

        def wait() -> int:
            for interrupt in waits:
                raise interrupt
            return process.wait()

        return SimpleNamespace(wait=wait, kill=process.kill)

    monkeypatch.setattr(subprocess, "Popen", sleeping)
    assert main([]) == 130
    assert started[0].returncode == -signal.SIGKILL


def test_children_that_the_command_ends_ignore_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGINT)
    with started_without_interrupts():
        child = subprocess.Popen([sys.executable, "-c", "import signal; print(signal.getsignal(2))"], stdout=-1)
    assert signal.getsignal(signal.SIGINT) is before
    assert child.communicate()[0] == b"1\n"  # SIG_IGN
