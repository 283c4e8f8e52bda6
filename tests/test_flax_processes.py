"""Tests training in several processes: how they find each other, the same curve as in one process, and how they end.

Runs have two processes of two CPU devices each, which are forked from a process that has imported everything.
"""

import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import jax
import pytest
from flax_runs import SMALL, learned, run_alone, start

from flax_models.errors import RunError
from flax_models.train.checkpoint import steps_in
from flax_models.train.config import RunConfig, from_json, to_json
from flax_models.train.metrics import read_rows
from flax_models.train.processes import Launch, find_launch

DIVISIBLE = ["--num-kv-heads=2", "--batch-size=4"]
BOUND = 1e-5  # of a loss in float32, relative
WITHIN = 30  # seconds in which the others end after one is killed
TORCHRUN = {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, None),
        ({"MASTER_ADDR": "host", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "SLURM_JOB_ID": "7"}, None),
        (TORCHRUN, Launch("RANK", "host:29500", 4, 3)),
        ({**TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Launch("RANK", "host:29500", 4, 3, [1])),
        ({**TORCHRUN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, Launch("RANK", "host:29500", 4, 3)),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, Launch("RANK", "host:29501", 4, 3)),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, None),
        ({**SLURM, "SLURM_LOCALID": "0"}, Launch("SLURM")),
        ({**SLURM, "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}, None),
        (SLURM, None),  # not a step of a job
        ({f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "RANK", "LOCAL_RANK")}, Launch("Open MPI")),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, Launch("Kubernetes")),
    ],
)
def test_the_environment_says_which_processes_there_are(environment: dict[str, str], launch: Launch | None) -> None:
    assert find_launch(None, None, None, environment) == launch


def test_options_name_the_processes_before_the_environment() -> None:
    assert find_launch("a:1", 2, 1, SLURM) == Launch("--coordinator", "a:1", 2, 1)
    assert find_launch("[::1]:1", 4, 3, TORCHRUN) == Launch("--coordinator", "[::1]:1", 4, 3)


@pytest.mark.parametrize(
    ("options", "environment", "error"),
    [
        (("a:1", None, None), {}, "--coordinator requires --process-count and --process-id too"),
        ((None, 2, 1), {}, "--process-count requires --coordinator too"),
        (("a", 2, 1), {}, "--coordinator must be HOST:PORT, got 'a'"),
        (("a:70000", 2, 1), {}, "--coordinator must be HOST:PORT, got 'a:70000'"),
        (("a:1", 2, 2), {}, "--process-id must be in [0, --process-count), got 2 of 2"),
        (("a:1", 2, 1), TORCHRUN, "--process-count 2 contradicts WORLD_SIZE 4"),
        (("a:1", 4, 1), TORCHRUN, "--process-id 1 contradicts RANK 3"),
        ((None,) * 3, {"RANK": "0", "MASTER_ADDR": "a"}, "MASTER_PORT and WORLD_SIZE must be set too, because "),
        ((None,) * 3, {**TORCHRUN, "RANK": "4"}, "RANK must be in [0, WORLD_SIZE), got 4 of 4"),
        ((None,) * 3, {**TORCHRUN, "WORLD_SIZE": "x"}, "WORLD_SIZE must be a number, got 'x'"),
        ((None,) * 3, {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK must be set too"),
    ],
)
def test_incomplete_or_contradicting_processes_are_one_error(
    options: tuple[Any, Any, Any], environment: dict[str, str], error: str
) -> None:
    with pytest.raises(RunError, match=re.escape(error)):
        find_launch(*options, environment)


def test_the_options_of_a_process_are_not_those_of_its_run() -> None:
    config = RunConfig(mesh="data=2", coordinator="a:1", process_count=2, process_id=1)
    assert from_json(to_json(config)) == RunConfig(mesh="data=2")
    with pytest.raises(ValueError, match="--coordinator requires --mesh, got only a:1"):
        RunConfig(coordinator="a:1")


def run_process(options: list[str], compiled: str, cache: str, out: Path, err: Path) -> None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    jax.config.update("jax_disable_most_optimizations", True)
    run_alone(options, compiled, cache, out, err)


class TwoProcesses:
    """A run in two processes, which is started again until it is finished."""

    def __init__(self, place: Path, name: str, *options: str) -> None:
        self.place, self.folder, self.options = place, place / "runs" / name, options
        self.processes: list[ForkServerProcess] = []

    def launch(self, *of_last: str) -> None:
        """Starts the processes, the last one with more options."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        options = ["--runs", str(self.folder.parent), "--name", self.folder.name]
        if self.folder.exists():
            options.append("--resume")
        else:
            options += ["--data", str(self.place / "data"), *SMALL, *DIVISIBLE, "--mesh=data=2,fsdp=2", *self.options]
        options += [f"--coordinator=127.0.0.1:{port}", "--process-count=2"]
        self.processes = []
        for index in range(2):
            cache = (jax.config.jax_compilation_cache_dir, str(self.place / "cache"))
            arguments = [*options, f"--process-id={index}", *(of_last if index else ())]
            process = get_context("forkserver").Process(
                target=run_process, args=(arguments, *cache, self.out(index), self.err(index))
            )
            process.start()
            self.processes.append(process)

    def out(self, index: int) -> Path:
        return self.place / f"{self.folder.name}.{index}.out"

    def err(self, index: int) -> Path:
        return self.place / f"{self.folder.name}.{index}.err"

    def errors(self) -> list[str]:
        """Returns what each process has written to stderr, without JAX's log."""
        lines = [self.err(index).read_text().splitlines(keepends=True) for index in range(2)]
        return ["".join(line for line in part if not re.match(r"[WE]\d{4} ", line)) for part in lines]

    def after_row(self, step: int) -> None:
        """Waits until the metrics have the row of a step, or a process has ended."""
        while all(process.is_alive() for process in self.processes):
            if self.folder.exists() and any(row["step"] >= step for row in read_rows(self.folder)):
                return
            time.sleep(0.01)

    def codes(self) -> list[int | None]:
        """Waits for the end of the processes, and returns their exit statuses."""
        ending = time.monotonic() + 2 * WITHIN
        for process in self.processes:
            process.join(max(0.0, ending - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def finish(self) -> None:
        self.launch()
        for process in self.processes:
            process.join()
        assert ([process.exitcode for process in self.processes], self.errors()) == ([0, 0], ["", ""])


@pytest.fixture
def two(place: Path) -> Iterator[TwoProcesses]:
    get_context("forkserver").set_forkserver_preload(
        ["flax_models.train.main", "flax_runs", "orbax.checkpoint", "tyro", "test_flax_processes"]
    )
    run = TwoProcesses(place, "two", "--log-every=1", "--eval-every=0", "--sample-tokens=0")
    yield run
    for process in run.processes:
        process.kill()


def assert_same(rows: list[dict], others: list[dict]) -> None:
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        assert all(abs(row[name] - other[name]) <= BOUND * max(abs(row[name]), 1) for name in row), (row, other)


def test_a_killed_process_ends_the_other_with_one_line(two: TwoProcesses, place: Path) -> None:
    two.launch()
    two.after_row(5)
    two.processes[1].kill()
    began = time.monotonic()
    assert two.codes() == [1, -signal.SIGKILL], two.errors()
    assert time.monotonic() - began < WITHIN
    saved = max(steps_in(two.folder / "checkpoints"))
    line = f"error: process 1 of 2 was lost; --resume continues from the checkpoint of step {saved}\n"
    assert two.errors()[0] == line
    assert "of 4 devices" in two.out(0).read_text()
    assert len([*two.folder.glob("events.*")]) == 1
    assert re.sub(r"\[Gloo\].*\n", "", two.out(1).read_text()) == ""
    rows = learned(two.folder)
    assert start(place, "one", *DIVISIBLE, *two.options) == 0
    assert_same(rows, learned(place / "runs" / "one")[: len(rows)])


@pytest.mark.slow
def test_processes_stop_after_the_same_step_and_continue_with_the_same_curve(two: TwoProcesses, place: Path) -> None:
    two.options = ("--log-every=1", "--sample-tokens=4", "--steps=200", "--checkpoint-every=150")
    two.launch()
    two.after_row(5)
    assert two.processes[1].pid is not None
    os.kill(two.processes[1].pid, signal.SIGTERM)
    assert two.codes() == [143, 143], two.errors()
    (saved,) = steps_in(two.folder / "checkpoints")
    stopped = f"stopped by SIGTERM: step {saved} of 200 is saved; --resume continues from it\n"
    assert two.errors() == [stopped, ""]
    assert len(learned(two.folder)) >= saved
    two.finish()
    assert f"from step {saved}" in two.out(0).read_text()
    assert start(place, "one", *DIVISIBLE, *two.options) == 0
    assert_same(learned(two.folder), learned(place / "runs" / "one"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_processes_are_killed_ten_times_has_the_same_curve(two: TwoProcesses, place: Path) -> None:
    """A random process is killed at a random time."""
    two.options = ("--log-every=1", "--sample-tokens=4", "--steps=50", "--checkpoint-every=2")
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")  # shown when the test fails
    moments = random.Random(seed)
    for number in range(10):
        two.launch()
        two.after_row(max(steps_in(two.folder / "checkpoints"), default=0) + moments.randint(0, 4))
        time.sleep(moments.uniform(0, 0.2))
        killed = moments.randrange(2)
        two.processes[killed].kill()
        began = time.monotonic()
        codes = two.codes()
        assert time.monotonic() - began < WITHIN
        assert codes[killed] == -signal.SIGKILL, (number, two.errors())
        assert codes[1 - killed] == (1 if killed else codes[1 - killed]) != 0, (number, two.errors())
        # JAX aborts the others at once if process 0 is lost, perhaps before the line is printed.
        lost = f"error: process {killed} of 2 was lost; "
        assert lost in two.errors()[1 - killed] or (killed == 0 and codes[1] == -signal.SIGABRT), (number, two.errors())
    two.finish()
    assert start(place, "one", *DIVISIBLE, *two.options) == 0
    assert_same(learned(two.folder), learned(place / "runs" / "one"))


def test_a_process_with_other_options_is_one_error(two: TwoProcesses) -> None:
    two.launch("--seed=1")
    assert two.codes() == [1, 1]
    error = "error: the options must be the same on all processes, but process 1 has another than 0\n"
    assert two.errors() == [error, ""]
    assert not two.folder.exists()
