"""What the loss runs on this machine: versions, devices, the plan of a call, and a check against the reference.

Each package runs in a separate process. If one does not import or ends its process, the other is still reported.
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np

from linear_ce import __version__
from linear_ce.children import started_without_interrupts
from linear_ce.gpus import known_gpu
from linear_ce.reference import LossResult, reference_loss, unfused
from linear_ce.rounding import round_to

PACKAGES = {"core_triton": "torch", "jax_pallas": "jax"}  # each with the module, and extra, that it needs
SHAPE = (8192, 4096, 128256)  # of the plan: tokens, hidden size and vocabulary size of Llama-3 8B

# Of the check: three blocks of rows, and several of classes, the last ones not full. All kernels take the hidden size.
# On each GPU the check has the path of SHAPE: "pallas_triton" stores exponentials of multiples of 64 classes only.
TOKENS, HIDDEN, CLASSES, SEED = 300, 128, 1088, 0
MOST = 2.0  # an error relative to that of an unfused computation in the same dtype with float32 logits
LEAST_ERROR = 8 * float(np.finfo(np.float32).eps)  # no smaller error is wrong
RESULTS = ("loss", "d_input", "d_weight")


class Arrays(NamedTuple):
    """The arrays of the check."""

    input: np.ndarray  # (TOKENS, HIDDEN) float32, rounded to the dtype of the check
    linear_weight: np.ndarray  # (CLASSES, HIDDEN), likewise
    target: np.ndarray  # (TOKENS,) int64, a tenth of them -100


class Package(NamedTuple):
    """How one package is reported.

    Args:
        about: lines about the framework and its devices.
        dtype: of the check.
        explain: returns the plan of a call of SHAPE.
        compute: returns `RESULTS` of the mean loss.
    """

    about: str
    dtype: str
    explain: Callable[[], Any]
    compute: Callable[[Arrays], list[np.ndarray]]


def main(packages: Sequence[str]) -> int:
    """Reports on `packages`; returns 1 if one that is installed fails, and otherwise 0."""
    system = f"Python {platform.python_version()}, {platform.platform()}"
    print(f"linear-ce {__version__}, NumPy {version_of('numpy')}, {system}")
    failed = False
    for package in packages:
        module = PACKAGES[package]
        print(flush=True)
        if version_of(module) is None:
            print(f'{package}: {module} is not installed: pip install "linear-ce[{module}]"')
            continue
        command = [sys.executable, "-c", f"from linear_ce import doctor; raise SystemExit(doctor.report({package!r}))"]
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}  # or JAX takes most of the GPU's memory
        with started_without_interrupts():
            process = subprocess.Popen(command, env=environment)
        try:
            status = process.wait()
        finally:
            process.kill()  # if it still runs, after Ctrl-C
            process.wait()
        if status:
            print(f"{package}: FAILED, exit status {status}")
        failed |= status != 0
    return int(failed)


def version_of(distribution: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def report(name: str) -> int:
    """Prints what is known of a package; returns 1 if its check fails, and otherwise 0."""
    package = torch_package() if name == "core_triton" else jax_package()
    n, d, v = SHAPE
    plan = f"a call of {n:,} tokens, D {d:,}, V {v:,} in bfloat16, with gradients:\n{package.explain()}"
    print("\n  ".join([f"{name}: {package.about}", *plan.splitlines()]), flush=True)
    start = time.perf_counter()
    arrays = draw(package.dtype)
    wrong, line = compare(arrays, package.dtype, package.compute(arrays))
    seconds = time.perf_counter() - start
    print(f"  check in {package.dtype}: {line}: {'FAILED' if wrong else 'passed'} in {seconds:.1f} s", flush=True)
    return int(wrong)


def torch_package() -> Package:
    import torch

    import core_triton

    about = f"torch {torch.__version__}, triton {version_of('triton') or 'not installed'}\n  "
    device, dtype, name = torch.device("cpu"), "float32", None
    if torch.cuda.is_available():
        device, dtype = torch.device("cuda", 0), "bfloat16"
        gpu, count = torch.cuda.get_device_properties(device), torch.cuda.device_count()
        name = known_gpu(gpu.name, 10 * gpu.major + gpu.minor)
        about += f"{count} NVIDIA GPU{'s, the first' if count > 1 else ''}: {gpu.name}, compute capability {gpu.major}."
        about += f"{gpu.minor}, {gpu.multi_processor_count} multiprocessors, {gpu.total_memory / 2**30:.0f} GiB"
        from core_triton import launch  # imports triton, which PyTorch may lack on a machine without a GPU

        if not launch.is_direct():
            tested = " and ".join(f"{one}x" for one in launch.DIRECT_VERSIONS)
            about += "\n  kernels are launched by Triton's launcher, which takes more time of the CPU than ours: "
            about += f"ours is tested with Triton {tested}"
    elif torch.version.cuda is None:
        about += "no NVIDIA GPU: this build of PyTorch has no CUDA"
    else:
        about += f"no NVIDIA GPU found; PyTorch is built for CUDA {torch.version.cuda}"

    def explain() -> Any:
        n, d, v = SHAPE
        where = "cpu" if name is None else "meta"  # no memory of the GPU
        x, w = (torch.empty(one, dtype=torch.bfloat16, device=where) for one in ((n, d), (v, d)))
        return core_triton.explain(x, w, device=name)

    def compute(arrays: Arrays) -> list[np.ndarray]:
        x, w = (torch.tensor(one, dtype=getattr(torch, dtype), device=device) for one in arrays[:2])
        leaves = x.requires_grad_(), w.requires_grad_()
        loss = core_triton.linear_cross_entropy(*leaves, torch.tensor(arrays.target, device=device))
        return [one.detach().double().cpu().numpy() for one in (loss, *torch.autograd.grad(loss, leaves))]

    return Package(about, dtype, explain, compute)


def jax_package() -> Package:
    import jax
    import jax.numpy as jnp

    import jax_pallas

    devices = jax.devices()
    on_cpu = devices[0].platform == "cpu"
    dtype = "float32" if on_cpu else "bfloat16"
    about = f"jax {jax.__version__}, jaxlib {version_of('jaxlib')}\n  {len(devices)} device"
    about += f"{'s, the first' if len(devices) > 1 else ''}: {devices[0].device_kind} ({devices[0].platform})"
    if on_cpu and version_of("jax-cuda13-plugin") is None:
        about += '; on NVIDIA GPUs install "linear-ce[jax,cuda]"'
    if getattr(devices[0], "compute_capability", None) == "9.0" and (0, 12) <= jax.__version_info__ < (0, 13):
        about += "\n  with JAX 0.12 the kernels may spill registers, which makes them slower: "
        about += '"linear-ce[jax,cuda]" installs JAX 0.11'

    def explain() -> Any:
        n, d, v = SHAPE
        arrays: Any = (jax.ShapeDtypeStruct(one, "bfloat16") for one in ((n, d), (v, d)))
        return jax_pallas.explain(*arrays)

    def compute(arrays: Arrays) -> list[np.ndarray]:
        x, w = (jnp.asarray(one, dtype) for one in arrays[:2])
        loss_and_gradients = jax.jit(jax.value_and_grad(jax_pallas.linear_cross_entropy, argnums=(0, 1)))
        loss, gradients = loss_and_gradients(x, w, jnp.asarray(arrays.target, jnp.int32))
        return [np.asarray(one, np.float64) for one in (loss, *gradients)]

    return Package(about, dtype, explain, compute)


def draw(dtype: str) -> Arrays:
    """Returns the arrays of the check."""
    random = np.random.default_rng(SEED)
    x, w = random.standard_normal((TOKENS, HIDDEN)), random.standard_normal((CLASSES, HIDDEN)) * HIDDEN**-0.5
    target = random.integers(0, CLASSES, TOKENS)
    target[::10] = -100
    return Arrays(round_to(x.astype(np.float32), dtype), round_to(w.astype(np.float32), dtype), target)


def exact_results(arrays: Arrays) -> list[np.ndarray]:
    """Returns `RESULTS` in float64."""
    x, w = arrays.input.astype(np.float64), arrays.linear_weight.astype(np.float64)
    return results_of(reference_loss(x, w, arrays.target))


def compare(arrays: Arrays, dtype: str, results: Sequence[np.ndarray]) -> tuple[bool, str]:
    """Returns whether results are wrong, and a line with their errors."""
    exact = exact_results(arrays)
    usual = results_of(reference_loss(arrays.input, arrays.linear_weight, arrays.target, arithmetic=unfused(dtype)))

    def errors(results: Sequence[np.ndarray]) -> list[float]:
        return [
            float(np.linalg.norm(one - true) / np.linalg.norm(true)) for one, true in zip(results, exact, strict=True)
        ]

    ours = errors(results)
    most = [max(MOST * one, LEAST_ERROR) for one in errors(usual)]
    wrong = any(not one <= limit for one, limit in zip(ours, most, strict=True))  # NaN is wrong
    return wrong, "errors of " + ", ".join(f"{name} {one:.1e}" for name, one in zip(RESULTS, ours, strict=True))


def results_of(result: LossResult) -> list[np.ndarray]:
    return [np.asarray(getattr(result, name), np.float64) for name in RESULTS]
