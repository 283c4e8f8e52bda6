"""Settings for the whole test suite."""

import fcntl
import gc
import math
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from programs import APART, LONG, Command, Printed, Programs, python
from slow_tests import is_slow, unknown

# Mosaic's interpreter deadlocks if XLA has too few threads: two programs of three threads each, and their caller.
if len(os.sched_getaffinity(0)) < 8:
    os.environ.setdefault("NPROC", "8")

# Three options make XLA compile the tests' small programs faster. The first stops XLA from splitting programs, which
# takes an eighth of the time. The second turns off its newer code generator for fusions on CPUs, which takes three
# quarters of the rest. The third stops XLA from verifying each of its own passes: 5% of the rest.
COMPILATION = {
    "--xla_cpu_parallel_codegen_split_count": "1",
    "--xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
    "--xla_disable_hlo_passes": "hlo-verifier",
}
for name, value in COMPILATION.items():
    if name not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} {name}={value}".strip()

# Programs that tests start import from the checkout, because the wheel does not contain parity and benchmarks.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")))
)

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch and other processes share a GPU with JAX

# Test runs are repeatable: hypothesis draws the same examples every time, and no example fails on a slow machine.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("repeatable")
# Hypothesis would also draw constants from the project's imported modules, which depend on the tests that ran before.
providers.is_local_module_file = lambda path: False  # pyright: ignore[reportPrivateImportUsage]


# Objects from imports and collection live until the end. Scanning them repeatedly takes 3% of the total time.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    if APART not in os.environ:
        run_apart(session.items)
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Lets one worker of pytest-xdist after the other collect the tests of a new checkout. The first one compiles the
    files, which takes six seconds, and the others read what it has written."""
    if "PYTEST_XDIST_WORKER" not in os.environ or any(Path(__file__).parent.glob(COMPILED_LAST)):
        return (yield)
    folder = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        return (yield)
    finally:
        os.close(folder)


COMPILED_LAST = "__pycache__/test_wheel.*pytest*.pyc"  # of the last file that is collected


def pytest_unconfigure() -> None:
    gc.freeze()  # the process ends, so a last scan is useless


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and config.getoption("markexpr") == "gpu":
        raise pytest.UsageError("-m gpu does not work with -n: each worker would start the programs of all tests")


QUICKLY_COMPILED = (
    *("test_flax_", "test_examples", "test_hosts_jax", "test_jax_pallas_", "test_parity", "test_benchmarks"),
    *("test_pages", "test_sequence_losses"),
)
# Programs on a GPU use all optimizations, and so do programs that a test measures or that depend on fused multiply-add.
WELL_COMPILED = ("_gpu", "_memory", "_sign")
# Tests of programs with kernels as Pallas lowers them, and of what depends on how each operation rounds.
LOWERED = ("_gpu", "_memory", "_export", "_sign")


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles with few optimizations, because each program runs only a few times. `python -m parity` uses all."""
    name = request.module.__name__
    if not name.startswith(QUICKLY_COMPILED):
        yield
        return
    # PyTorch's tests do not need JAX
    import jax
    from compiling import no_interpreter_before_jax_0_11_2, quick_callbacks, quick_compilation
    from kernels_in_numpy import kernels_in_numpy

    compilation = nullcontext() if name.endswith(WELL_COMPILED) else quick_compilation()
    lowered = name.endswith(LOWERED)
    in_numpy = nullcontext() if lowered else kernels_in_numpy()
    if lowered:
        jax.clear_caches()
    with quick_callbacks(), no_interpreter_before_jax_0_11_2(), compilation, in_numpy:
        yield
    if lowered:
        jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def sources_are_hashed_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Benchmarks hash the sources for every row and every run, which takes a second. No test changes the checkout."""
    if not request.module.__name__.startswith("test_benchmarks"):
        yield
        return
    from benchmarks import results

    kernel_files, file_hash, hashes = results.kernel_files, results.file_hash, HASHES

    def files_once(framework: str, root: Path) -> set[Path]:
        if root != results.ROOT:
            return kernel_files(framework, root)
        if framework not in hashes:
            hashes[framework] = kernel_files(framework, root)
        return hashes[framework]

    def hash_once(*files: Path, root: Path = results.ROOT) -> str:
        if root != results.ROOT:
            return file_hash(*files, root=root)
        names = frozenset(files)
        if names not in hashes:
            hashes[names] = file_hash(*files)
        return hashes[names]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "kernel_files", files_once)
        patch.setattr(results, "file_hash", hash_once)
        yield


HASHES: dict[Any, Any] = {}  # by framework, the files of its kernels, and by files, their hash


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of compiled programs, which all tests of a session or of a pytest-xdist worker share."""
    from flax_runs import compilation_cache

    folder = tmp_path_factory.getbasetemp() / "compiled"
    folder.mkdir(exist_ok=True)
    with compilation_cache(folder):
        yield folder


@pytest.fixture
def place(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts in data/. The cache is in cache/, and tests write runs/."""
    from flax_runs import write_texts

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_texts(tmp_path / "data")
    return tmp_path


@pytest.fixture(scope="module")
def torch_poisons_buffers() -> Iterator[None]:
    """Fills new PyTorch buffers with NaN, so that unwritten elements show."""
    import torch  # JAX's tests do not need it

    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(3)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def commands_of(item: pytest.Item) -> Iterable[Command]:
    return (command for mark in item.iter_markers("programs") for command in mark.args)


def run_apart(items: list[pytest.Item]) -> None:
    """Makes the tests on a GPU with the mark `apart` wait for programs that run them, as many as the mark says for each
    file. They spend their time in Triton's compiler, which uses one core."""
    of_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("apart") is not None and item.get_closest_marker("gpu") is not None:
            of_file.setdefault(item.path, []).append(item)
    for marked in of_file.values():
        mark = marked[0].get_closest_marker("apart")
        assert mark is not None
        for part in range(mark.kwargs["programs"]):
            share = marked[part :: mark.kwargs["programs"]]
            command = python("run_tests.py", *(item.nodeid for item in share))
            for item in share:
                item.add_marker(pytest.mark.programs(command, seconds=mark.kwargs["seconds"]))
                item.runtest = partial(outcome_of, item)
    items.sort(key=turn)


def outcome_of(item: Any) -> None:
    """Waits for the program of a test that runs apart, and has the test's outcome."""
    result = item.funcargs["programs"].printed(commands_of(item))[item.nodeid]
    if result["outcome"] == "skipped":
        pytest.skip(result["text"])
    if result["outcome"] == "failed":
        pytest.fail(result["text"], pytrace=False)


TIMES = pytest.StashKey[dict[Command, tuple[float, float]]]()


@pytest.fixture(scope="session", autouse=True)
def programs(request: pytest.FixtureRequest) -> Iterator[Programs]:
    """The programs of all selected tests, which start before the first test.

    A pytest-xdist worker does not know which tests it will get, so there a program starts when a test requests it.
    """
    found = Programs()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        found.start(command for item in request.session.items for command in commands_of(item))
    request.config.stash[TIMES] = found.times
    yield found
    found.stop()


@pytest.fixture
def printed(request: pytest.FixtureRequest, programs: Programs) -> Printed:
    """The output of this test's programs."""
    return programs.printed(commands_of(request.node))


@pytest.fixture
def no_other_programs(programs: Programs) -> None:
    """Waits for all programs to end before the test, which measures or needs much of a GPU's memory."""
    programs.wait()


def turn(item: pytest.Item) -> tuple[bool, float]:
    """Returns the sort key of a test.

    Tests without programs run first. Tests with programs follow, those with long programs first, because programs start
    in this order. Tests that wait for all programs run last.
    """
    seconds = [mark.kwargs.get("seconds", LONG) for mark in item.iter_markers("programs")]
    return "no_other_programs" in getattr(item, "fixturenames", ()), -max(seconds, default=math.inf)


@pytest.hookimpl(tryfirst=True)  # before pytest drops the tests that -m does not select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names: dict[str, set[str]] = {}
    for item in items:
        names.setdefault(item.path.name, set()).add(item.name)
        if is_slow(item.path.name, item.name):
            item.add_marker(pytest.mark.slow)
    if not any("::" in argument for argument in config.args):
        stale = {file: found for file in names if (found := unknown(file, names[file]))}
        if stale:
            raise pytest.UsageError(f"slow_tests.py names tests that do not exist: {stale}")
    items.sort(key=turn)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With --durations, prints how long the programs took. This shows what to start earlier and what to shorten."""
    times = config.stash.get(TIMES, {})
    durations = config.getoption("durations")
    if not times or durations is None:
        return
    terminalreporter.section("slowest programs")
    slowest = sorted(times.items(), key=lambda timed: timed[1][0] - timed[1][1])
    for command, (start, end) in slowest[: durations or None]:
        words = " ".join(Path(word).name for word in command[1:])
        terminalreporter.write_line(f"{end - start:.2f}s from {start:.0f}s on  {words:.100}")
