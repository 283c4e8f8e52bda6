"""Settings of the whole suite."""

import gc
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from programs import LONG, Command, Printed, Programs
from slow_tests import is_slow, unknown

# Mosaic's interpreter waits for itself where XLA has fewer threads than two programs of three and their caller.
if len(os.sched_getaffinity(0)) < 8:
    os.environ.setdefault("NPROC", "8")

# Two options make XLA compile the tests' small programs faster. It does not split them, which takes an eighth of the
# time. On a CPU it does not use its newer code generator for fusions, which takes three quarters of the rest.
COMPILATION = {
    "--xla_cpu_parallel_codegen_split_count": "1",
    "--xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
}
for name, value in COMPILATION.items():
    if name not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} {name}={value}".strip()

# Programs that tests start import the checkout, which has packages that the wheel has not: parity and benchmarks.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")))
)

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
# Hypothesis also draws constants from the project's modules that are imported so far. Other tests decide which.
providers.is_local_module_file = lambda path: False  # pyright: ignore[reportPrivateImportUsage]


# What imports and collection make stays to the end: to look through it again and again takes 3% of all time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 100)
    gc.enable()


def pytest_unconfigure() -> None:
    gc.freeze()  # the process ends: nothing is looked for once more


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and config.getoption("markexpr") == "gpu":
        raise pytest.UsageError("-m gpu goes without -n: each worker would start the programs of all tests")


QUICKLY_COMPILED = ("test_flax_", "test_examples", "test_jax_pallas_", "test_parity", "test_benchmarks")
# Programs on a GPU have all optimizations, as have programs that a test measures or that depend on fused multiply-add.
WELL_COMPILED = ("_gpu", "_memory", "_sign")


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles with few optimizations: each program runs only a few times. `python -m parity` compiles with all."""
    name = request.module.__name__
    if not name.startswith(QUICKLY_COMPILED):
        yield
        return
    from compiling import quick_callbacks, quick_compilation  # PyTorch's tests have no need of JAX

    with quick_callbacks(), nullcontext() if name.endswith(WELL_COMPILED) else quick_compilation():
        yield


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of compiled programs, which all tests share: of a session, or of a worker of pytest-xdist."""
    from flax_runs import compilation_cache

    folder = tmp_path_factory.getbasetemp() / "compiled"
    folder.mkdir(exist_ok=True)
    with compilation_cache(folder):
        yield folder


@pytest.fixture
def place(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts in data/, the cache beside it, and runs/ to come."""
    from flax_runs import write_texts

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_texts(tmp_path / "data")
    return tmp_path


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


TIMES = pytest.StashKey[dict[Command, tuple[float, float]]]()


@pytest.fixture(scope="session", autouse=True)
def programs(request: pytest.FixtureRequest) -> Iterator[Programs]:
    """The programs of all selected tests, which run from the first test on.

    A worker of pytest-xdist does not know which of the tests will be its own: there programs start when a test asks.
    """
    found = Programs()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        found.start(command for item in request.session.items for command in commands_of(item))
    request.config.stash[TIMES] = found.times
    yield found
    found.stop()


@pytest.fixture
def printed(request: pytest.FixtureRequest, programs: Programs) -> Printed:
    """What the programs of this test printed."""
    return programs.printed(commands_of(request.node))


@pytest.fixture
def no_other_programs(programs: Programs) -> None:
    """Waits for all programs to end before the test, which measures or needs much of a GPU's memory."""
    programs.wait()


def turn(item: pytest.Item) -> tuple[bool, float]:
    """Returns the sort key of a test.

    Tests that need no program run first. Then follow those that need some, with long programs first, because programs
    start in this order. Tests that wait for all programs run last.
    """
    seconds = [mark.kwargs.get("seconds", LONG) for mark in item.iter_markers("programs")]
    return "no_other_programs" in getattr(item, "fixturenames", ()), -max(seconds, default=math.inf)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names: dict[str, set[str]] = {}
    for item in items:
        names.setdefault(item.path.name, set()).add(item.name)
        if is_slow(item.path.name, item.name):
            item.add_marker(pytest.mark.slow)
    if not any("::" in argument for argument in config.args):
        stale = {file: found for file in names if (found := unknown(file, names[file]))}
        if stale:
            raise pytest.UsageError(f"slow_tests.py names tests that are not there: {stale}")
    items.sort(key=turn)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With --durations, says how long the programs took: where they should start, and what to make shorter."""
    times = config.stash.get(TIMES, {})
    durations = config.getoption("durations")
    if not times or durations is None:
        return
    terminalreporter.section("slowest programs")
    slowest = sorted(times.items(), key=lambda timed: timed[1][0] - timed[1][1])
    for command, (start, end) in slowest[: durations or None]:
        words = " ".join(Path(word).name for word in command[1:])
        terminalreporter.write_line(f"{end - start:.2f}s from {start:.0f}s on  {words:.100}")
