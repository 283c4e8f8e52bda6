"""Tests training in several processes: how they find each other, the same curve as in one process, and how they end.

Runs have two processes of two CPU devices each, which are forked from a process that has imported everything.
"""

import os
import queue
import random
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import jax
import pytest
from flax_runs import SMALL, learned, run_alone

from flax_models.errors import RunError
from flax_models.train import processes
from flax_models.train.checkpoint import steps_in
from flax_models.train.config import RunConfig, from_json, to_json
from flax_models.train.metrics import read_rows
from flax_models.train.processes import Launch, check_on_first, find_launch
from flax_models.train.relay import start_relay

DIVISIBLE = ["--num-kv-heads=2", "--batch-size=4"]
DEVICES = 4
BOUND = 1e-5  # of a loss in float32, over SAME_STEPS: another number of processes adds in another order
SAME_STEPS = 50
QUICK = ("--eval-every=0", "--sample-tokens=0")
# What Gloo writes to stdout, in pieces between which another thread may write.
GLOO = re.compile(r"\[Gloo\] Rank|\d+|is connected to|peer ranks\.|Expected number of connected peer ranks is :|\s")
WITHIN = 30  # seconds in which the others end after one is killed
STARTED = {  # the variables of each process of a cluster on this host
    "torchrun": {"MASTER_ADDR": "localhost", "MASTER_PORT": "{port}", "WORLD_SIZE": "2", "RANK": "{index}"},
    "srun": {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "{index}",
        "SLURM_LOCALID": "{index}",
        "JAX_COORDINATOR_PORT": "{port}",
    },
}
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


def test_process_0_alone_checks_files_and_all_report_what_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RunError("a fault")

    check_on_first(lambda: None)
    with pytest.raises(RunError, match=r"^a fault$"):
        check_on_first(fails)
    monkeypatch.setattr(processes, "is_first", lambda: False)
    check_on_first(fails)  # not called
    monkeypatch.setattr(processes, "from_first", lambda text: text + "of process 0")
    with pytest.raises(RunError, match=r"^of process 0$"):
        check_on_first(fails)


def test_a_relay_keeps_a_connection_whose_other_end_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(("127.0.0.1", start_relay("127.0.0.1", server.getsockname()[1])), 5)
        service, _ = server.accept()
        service.settimeout(5)
        for source, target in ((client, service), (service, client)):
            source.sendall(b"word")
            assert target.recv(9) == b"word"
        service.close()
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):  # neither data nor the end
            client.recv(1)
        client.sendall(b"lost")
        with client:
            client.sendall(b"lost too")
            with socket.create_connection(client.getpeername()):
                service, _ = server.accept()
        with service:
            service.settimeout(5)
            assert service.recv(1) == b""  # the end of the process reaches the service


def test_process_0_ignores_connections_of_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "from_first", said.put)
    monkeypatch.setattr(processes, "CONNECTING", 5.0)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)

    def connect() -> None:
        port, token = said.get().split()
        for sent in (b"GET / HTTP/1.1\r\n", b""):
            with socket.create_connection(("127.0.0.1", int(port))) as other:
                other.sendall(sent)
                if not sent:  # resets the connection
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.append(socket.create_connection(("127.0.0.1", int(port))))
        connection[0].sendall(f"{token} 1\nleft\n".encode())

    connection: list[socket.socket] = []
    connecting = threading.Thread(target=connect)
    connecting.start()
    peers = processes.Peers(str, "127.0.0.1")
    connecting.join()
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    peers.leave()
    assert (connection[0].recv(5), ended) == (b"left\n", [])
    connection[0].close()


def run_process(
    devices: int, options: list[str], environment: dict[str, str], compiled: str, cache: str, out: Path, err: Path
) -> None:
    os.environ |= environment
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    jax.config.update("jax_disable_most_optimizations", True)
    run_alone(options, compiled, cache, out, err)


class Run:
    """A run in one process or two, which is started again until it is finished."""

    def __init__(self, place: Path, name: str, count: int, *options: str, started_by: str | None = None) -> None:
        self.place, self.folder, self.count, self.options = place, place / "runs" / name, count, options
        self.started_by = started_by
        self.running: list[ForkServerProcess] = []

    def launch(self, *of_last: str) -> None:
        """Starts the processes, the last one with more options."""
        options = ["--runs", str(self.folder.parent), "--name", self.folder.name]
        if self.folder.exists():
            options.append("--resume")
        else:
            options += ["--data", str(self.place / "data"), *SMALL, *DIVISIBLE, "--mesh=data=2,fsdp=2", *self.options]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.running = []
        for index in range(self.count):
            self.out(index).unlink(missing_ok=True)
            cache = (jax.config.jax_compilation_cache_dir, str(self.place / "cache"))
            arguments = [*options, *(of_last if index else ())]
            environment = {}
            if self.started_by is not None:
                environment = {
                    name: text.format(port=port, index=index) for name, text in STARTED[self.started_by].items()
                }
            elif self.count > 1:
                arguments += [
                    f"--coordinator=127.0.0.1:{port}",
                    f"--process-count={self.count}",
                    f"--process-id={index}",
                ]
            process = get_context("forkserver").Process(
                target=run_process,
                args=(DEVICES // self.count, arguments, environment, *cache, self.out(index), self.err(index)),
            )
            process.start()
            self.running.append(process)

    def out(self, index: int) -> Path:
        return self.place / f"{self.folder.name}.{index}.out"

    def err(self, index: int) -> Path:
        return self.place / f"{self.folder.name}.{index}.err"

    def errors(self) -> list[str]:
        """Returns what each process has written to stderr, without warnings of JAX."""
        lines = [self.err(index).read_text().splitlines(keepends=True) for index in range(self.count)]
        return ["".join(line for line in part if not re.match(r"[WE]\d{4} ", line)) for part in lines]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition is true, or a process has ended."""
        while all(process.is_alive() for process in self.running) and not condition():
            time.sleep(0.01)

    def has_row(self, step: int) -> bool:
        return self.folder.exists() and any(row["step"] >= step for row in read_rows(self.folder))

    def has_saved_after(self, step: int) -> bool:
        return max(steps_in(self.folder / "checkpoints"), default=0) > step

    def has_joined(self) -> bool:
        return self.out(0).exists() and "corpus" in self.out(0).read_text()

    def kill(self, index: int) -> None:
        """Kills a process, and asserts that the other one ends in time with one line about it."""
        self.running[index].kill()
        began = time.monotonic()
        codes = self.codes()
        assert time.monotonic() - began < WITHIN
        assert (codes[index], codes[1 - index]) == (-signal.SIGKILL, 1), (index, codes, self.errors())
        (line,) = self.errors()[1 - index].splitlines()
        assert line.startswith(f"error: process {index} of 2 was lost; "), line

    def codes(self) -> list[int | None]:
        """Waits for the end of the processes, and returns their exit statuses."""
        ending = time.monotonic() + 2 * WITHIN
        for process in self.running:
            process.join(max(0.0, ending - time.monotonic()))
        return [process.exitcode for process in self.running]

    def finish(self) -> list[dict]:
        """Runs to the end, and returns the rows of the metrics."""
        self.launch()
        assert (self.codes(), self.errors()) == ([0] * self.count, [""] * self.count)
        return learned(self.folder)


@pytest.fixture
def started(place: Path) -> Iterator[Callable[..., Run]]:
    """Returns a function that makes runs, whose processes end with the test."""
    get_context("forkserver").set_forkserver_preload(["tests.preloaded"])
    runs: list[Run] = []

    def make(name: str, count: int, *options: str, **more: str) -> Run:
        runs.append(Run(place, name, count, "--log-every=1", *options, **more))
        return runs[-1]

    yield make
    for run in runs:
        for process in run.running:
            process.kill()


def assert_same(rows: list[dict], others: list[dict]) -> None:
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        assert all(abs(row[name] - other[name]) <= BOUND * max(abs(row[name]), 1) for name in row), (row, other)


def drawn_numbers() -> random.Random:
    """Returns random numbers of a new seed, which is shown if the test fails."""
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize(
    ("variables", "changed"),
    [
        ({}, {}),
        ({"http_proxy": "a"}, {"no_proxy": "127.0.0.1"}),
        ({"https_proxy": "a", "no_proxy": "b,c"}, {"no_proxy": "b,c,127.0.0.1"}),
        ({"grpc_proxy": "a", "no_proxy": "b", "no_grpc_proxy": "c"}, {"no_grpc_proxy": "c,127.0.0.1"}),
    ],
)
def test_no_proxy_is_asked_for_the_relay(
    variables: dict[str, str], changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "start_relay", lambda host, port: 1234)
    monkeypatch.setattr(os, "environ", dict(variables))
    assert processes._through_relay("host", 1) == "127.0.0.1:1234"
    assert os.environ == variables | changed


def test_a_killed_process_ends_the_other_with_one_line(started: Callable[..., Run]) -> None:
    two = started("two", 2, *QUICK)
    two.launch()
    two.wait_for(lambda: two.has_row(5))
    killed = drawn_numbers().randrange(2)
    two.kill(killed)
    line = two.errors()[1 - killed]
    before, saved = line.rsplit(maxsplit=1)
    assert before == f"error: process {killed} of 2 was lost; --resume continues from the checkpoint of step"
    # Process 0 may complete another one in the moment before it ends.
    assert int(saved) in steps_in(two.folder / "checkpoints")
    assert "of 4 devices" in two.out(0).read_text()
    assert len([*two.folder.glob("events.*")]) == 1
    assert GLOO.sub("", two.out(1).read_text()) == ""
    rows = learned(two.folder)
    assert_same(rows, started("one", 1, *QUICK, "--checkpoint-every=8").finish()[: len(rows)])


@pytest.mark.slow
@pytest.mark.parametrize("started_by", STARTED)
def test_processes_of_a_cluster_end_if_process_0_is_killed(started: Callable[..., Run], started_by: str) -> None:
    two = started("two", 2, *QUICK, started_by=started_by)
    two.launch()
    two.wait_for(lambda: two.has_row(1))
    two.kill(0)
    assert two.finish()[-1]["step"] == 8


@pytest.mark.slow
def test_processes_stop_after_the_same_step_and_continue_with_the_same_curve(started: Callable[..., Run]) -> None:
    options = ("--sample-tokens=4", "--steps=200", "--checkpoint-every=150")
    one, two, undisturbed = (
        started("one", 1, *options),
        started("two", 2, *options),
        started("undisturbed", 2, *options),
    )
    two.launch()
    two.wait_for(lambda: two.has_row(5))
    assert two.running[1].pid is not None
    os.kill(two.running[1].pid, signal.SIGTERM)
    assert two.codes() == [143, 143], two.errors()
    (saved,) = steps_in(two.folder / "checkpoints")
    stopped = f"stopped by SIGTERM: step {saved} of 200 is saved; --resume continues from it\n"
    assert two.errors() == [stopped, ""]
    rows = two.finish()
    assert f"from step {saved}" in two.out(0).read_text()
    assert rows == undisturbed.finish()
    whole = one.finish()
    assert [row["step"] for row in rows] == [row["step"] for row in whole]
    same = [sum(row["step"] <= SAME_STEPS for row in part) for part in (rows, whole)]
    assert_same(rows[: same[0]], whole[: same[1]])
    outputs = [re.sub(r"\[Gloo\].*\n", "", run.out(0).read_text()) for run in (two, undisturbed)]
    samples = [text[text.index("sample:") :].splitlines()[:2] for text in outputs]
    assert samples[0] == samples[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_processes_are_killed_ten_times_has_the_same_curve(started: Callable[..., Run]) -> None:
    """A random process is killed at a random time after it has joined the other, often during a checkpoint."""
    options = ("--sample-tokens=0", f"--steps={SAME_STEPS}", "--checkpoint-every=2")
    one, two, undisturbed = (
        started("one", 1, *options),
        started("two", 2, *options),
        started("undisturbed", 2, *options),
    )
    moments = drawn_numbers()
    saved: list[int] = []
    for saving in (False, True) * 5:
        two.launch()
        two.wait_for(two.has_joined)
        if saving:
            two.wait_for(partial(two.has_saved_after, max(saved, default=0)))
        time.sleep(moments.uniform(0, 0.2 if saving else 3))
        two.kill(moments.randrange(2))
        saved = steps_in(two.folder / "checkpoints")
    rows = two.finish()
    assert rows == undisturbed.finish()
    assert_same(rows, one.finish())


def test_a_process_with_other_options_is_one_error(started: Callable[..., Run]) -> None:
    two = started("two", 2)
    two.launch("--seed=1")
    assert two.codes() == [1, 1]
    error = "error: the options must be the same on all processes, but process 1 has another than 0\n"
    assert two.errors() == [error, ""]
    assert not two.folder.exists()
