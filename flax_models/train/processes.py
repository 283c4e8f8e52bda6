"""The processes of a run on several hosts: how they find each other, what they agree on, and how they end together.

Every process runs the same program. Process 0 alone writes to the run's folder, except for the arrays of checkpoints,
reads whole weights and checkpoints to check them, and prints. All processes read the same files, draw the same batches,
and take part in each step, held-out loss, sample and checkpoint.

JAX's coordination service aborts the processes that remain after HEARTBEAT seconds without a sign of life from another
one, with a long log. So each process is also connected to process 0, and these connections end when a process does:
`Peers` then prints one line, and ends all processes at once. Without an error, each process says that it leaves. If
process 0 ends, JAX would abort the others at once, because the service is in process 0. The others are connected to it
through `flax_models.train.relay`, so that JAX notices after HEARTBEAT seconds too.
"""

import contextlib
import hashlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from flax_models.errors import RunError, UsageError, first_line
from flax_models.train.relay import start_relay

LOCAL = "127.0.0.1"  # where the relay listens
HEARTBEAT = 15  # seconds without a sign of life after which JAX ends all processes
KEEPALIVE = (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 4), ("TCP_KEEPCNT", 2))  # a lost host: in 12 seconds, before JAX
JOINING = 300  # seconds for all processes to start
QUIET = 20.0  # seconds without all processes after which a line says so
CONNECTING = 60.0  # seconds for all processes to connect to process 0
GRACE = 2.0  # seconds in which another process may report the cause of an error, or the same error
ENDING = 0.5  # seconds in which the others end before process 0, whose end they would report
MOST_BYTES = 4096  # of a text that process 0 tells all others

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
# The variables with which JAX detects a cluster, and the one that has the number of processes; None: JAX asks the
# cluster for it. Every pod of Kubernetes has its first variable, and only those of an indexed job have the second.
CLUSTERS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "SLURM": (
        ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
        "SLURM_NTASKS",
    ),
    "Open MPI": (
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        "OMPI_COMM_WORLD_SIZE",
    ),
    "Kubernetes": (("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"), None),
}


class Launch(NamedTuple):
    """How a process joins the others: arguments of `jax.distributed.initialize`, None if JAX detects them.

    Args:
        origin: the option, variable or cluster that has the processes, for messages.
        coordinator: address of process 0.
        count: number of processes.
        index: this process.
        local_devices: devices of this process; None with a coordinator: all of its host.
    """

    origin: str
    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    local_devices: list[int] | None = None


def find_launch(
    coordinator: str | None, count: int | None, index: int | None, environment: Mapping[str, str]
) -> Launch | None:
    """Returns how this process joins others; None if it is alone.

    Args:
        coordinator: `--coordinator`, HOST:PORT of process 0; None: the environment has the processes.
        count: `--process-count`.
        index: `--process-id`.
        environment: environment variables.

    Raises:
        UsageError: options are incomplete or invalid.
        RunError: variables are incomplete or invalid, or options and variables contradict each other.

    Example:
        >>> find_launch(None, None, None, {"MASTER_ADDR": "a", "MASTER_PORT": "9", "WORLD_SIZE": "2", "RANK": "1"})
        Launch(origin='RANK', coordinator='a:9', count=2, index=1, local_devices=None)
        >>> find_launch(None, None, None, {}) is None
        True
    """
    options = {"--coordinator": coordinator, "--process-count": count, "--process-id": index}
    given = [name for name, value in options.items() if value is not None]
    if given:
        if missing := [name for name, value in options.items() if value is None]:
            raise UsageError(f"{given[0]} requires {' and '.join(missing)} too")
        assert coordinator is not None
        assert count is not None
        assert index is not None
        _check_address("--coordinator", coordinator, UsageError)
        _check_index("--process-id", index, "--process-count", count, UsageError)
        for option, variable in (("--process-count", "WORLD_SIZE"), ("--process-id", "RANK")):
            if environment.get(variable, str(options[option])) != str(options[option]):
                raise RunError(f"{option} {options[option]} contradicts {variable} {environment[variable]}")
        return Launch("--coordinator", coordinator, count, index)
    if "WORLD_SIZE" in environment or "RANK" in environment:
        if missing := [name for name in TORCHRUN if name not in environment]:
            raise RunError(f"{' and '.join(missing)} must be set too, because {', '.join(TORCHRUN)} need each other")
        count, index = _number(environment, "WORLD_SIZE"), _number(environment, "RANK")
        _check_index("RANK", index, "WORLD_SIZE", count)
        # The agent of torchrun listens on the port itself.
        port = _number(environment, "MASTER_PORT") + (environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
        address = f"{environment['MASTER_ADDR']}:{port}"
        _check_address("MASTER_ADDR and MASTER_PORT", address)
        several = _number(environment, "LOCAL_WORLD_SIZE") > 1 if "LOCAL_WORLD_SIZE" in environment else False
        local = [_number(environment, "LOCAL_RANK")] if several else None
        return Launch("RANK", address, count, index, local) if count > 1 else None
    for name, (variables, size) in CLUSTERS.items():
        if all(variable in environment for variable in variables):
            return None if size is not None and _number(environment, size) == 1 else Launch(name)
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    if name not in environment:
        raise RunError(f"{name} must be set too")
    text = environment[name]
    if not text.isascii() or not text.isdigit():
        raise RunError(f"{name} must be a number, got {text!r}")
    return int(text)


def _check_address(name: str, address: str, error: type[RunError] = RunError) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise error(f"{name} must be HOST:PORT, got {address!r}")


def _check_index(name: str, index: int, size: str, count: int, error: type[RunError] = RunError) -> None:
    if count < 1 or not 0 <= index < count:
        raise error(f"{name} must be in [0, {size}), got {index} of {count}")


def is_first() -> bool:
    """Returns whether this is process 0, which writes and prints; true for a process that is alone."""
    return jax.process_index() == 0


def from_first(text: str) -> str:
    """Returns the text of process 0 on all processes, which call it at the same point. At most MOST_BYTES bytes."""
    if jax.process_count() == 1:
        return text
    encoded = text.encode()[:MOST_BYTES]
    padded = np.zeros(MOST_BYTES, np.uint8)
    padded[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8)
    return told.tobytes().rstrip(b"\0").decode(errors="ignore")


def check_on_first(check: Callable[[], None]) -> None:
    """Runs a check on process 0 alone, and raises its RunError on all processes, which call this at the same point."""
    fault = ""
    if is_first():
        try:
            check()
        except RunError as error:
            fault = str(error)
    if fault := from_first(fault):
        raise RunError(fault)


def check_agreement(what: str, text: str) -> None:
    """Raises RunError on all processes if the text is not the same on each of them.

    Args:
        what: what the text is, for the message.
        text: any length.
    """
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    digests = np.asarray(multihost_utils.process_allgather(digest))
    if different := np.flatnonzero((digests != digests[0]).any(axis=1)).tolist():
        raise RunError(f"{what} must be the same on all processes, but process {different[0]} has another than 0")


def wait_for_all(what: str) -> None:
    """Returns when all processes have called it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def join(launch: Launch, advice: Callable[[], str]) -> "Peers":
    """Joins the other processes, before anything else uses a device.

    Args:
        launch: how.
        advice: returns how to continue the run, for the line that `Peers` prints.

    Raises:
        RunError: the processes cannot be joined.
    """
    note = f"waiting for the other processes ({launch.origin}); JAX aborts this one after {JOINING // 60} minutes"
    waiting = threading.Timer(QUIET, partial(print, note, file=sys.stderr, flush=True))
    waiting.daemon = True
    waiting.start()
    try:
        _, coordinator, count, index, local_devices = launch if launch.coordinator else _detected(launch)
        if coordinator is None or count is None or index is None:
            raise ValueError("JAX does not detect the address of process 0, the number of processes or the index")
        host, port = coordinator.rsplit(":", 1)
        host = host.strip("[]")
        jax.distributed.initialize(
            _through_relay(host, int(port)) if index else coordinator,
            count,
            index,
            local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=JOINING,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise RunError(f"cannot join the other processes ({launch.origin}): {first_line(error)}") from None
    finally:
        waiting.cancel()
    return Peers(advice, host)


def _detected(launch: Launch) -> Launch:
    """Returns what JAX detects, as `jax.distributed.initialize` does; None where it does not."""
    from jax._src.clusters import ClusterEnv  # no public function detects them without connecting

    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    found = ClusterEnv.auto_detect_unset_distributed_params(address, None, None, None, None, JOINING)
    coordinator, count, index, local_devices = found
    if local_devices is None or "JAX_LOCAL_DEVICE_IDS" in os.environ:  # JAX reads it
        return Launch(launch.origin, coordinator, count, index)
    return Launch(launch.origin, coordinator, count, index, [*local_devices])


def _through_relay(host: str, port: int) -> str:
    """Starts a relay to process 0, and returns the address to connect to. gRPC does not ask a proxy for it."""
    if any(name in os.environ for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        name = "no_grpc_proxy" if "no_grpc_proxy" in os.environ else "no_proxy"  # which gRPC reads
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), LOCAL)))
    return f"{LOCAL}:{start_relay(host, port)}"


class Peers:
    """The connections of process 0 with all other processes, on which each reports an error or that it leaves.

    If one process fails or is killed, all others end. Process 0 prints a line about it. If process 0 itself is lost,
    each of the others prints one.

    Args:
        advice: returns how to continue the run.
        host: host of process 0.
    """

    def __init__(self, advice: Callable[[], str], host: str) -> None:
        self._advice, self._host, self._ending = advice, host, threading.Lock()
        self._index, self._count = jax.process_index(), jax.process_count()
        self._connections: dict[int, socket.socket] = {}
        try:
            if self._index == 0:
                self._accept()
            else:
                self._connect()
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            self._end(f"error: the processes cannot connect to process 0: {first_line(error)}", 1)
        self._listeners = [
            threading.Thread(target=self._listen, args=(index, connection), daemon=True)
            for index, connection in self._connections.items()
        ]
        for listener in self._listeners:
            listener.start()

    def _accept(self) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        token = secrets.token_hex(8)
        with socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=self._count) as server:
            from_first(f"{server.getsockname()[1]} {token}")
            server.settimeout(CONNECTING)
            while len(self._connections) < self._count - 1:
                connection, _ = server.accept()
                connection.settimeout(CONNECTING)
                try:
                    sent, _, index = _word(connection).partition(" ")
                except OSError:
                    sent = ""
                if sent != token:  # not a process of this run
                    connection.close()
                    continue
                self._connections[int(index)] = _watched(connection)

    def _connect(self) -> None:
        port, token = from_first("").split()
        connection = socket.create_connection((self._host, int(port)), CONNECTING)
        connection.sendall(f"{token} {self._index}\n".encode())
        self._connections[0] = _watched(connection)

    def _listen(self, index: int, connection: socket.socket) -> None:
        """Waits for the message of another process, and ends this process unless the other one only leaves."""
        try:
            what, _, text = _word(connection).partition(" ")
        except OSError:  # no answer: its host is lost
            what, text = "", ""
        if what == "left":
            return
        if what == "end":
            self._exit(int(text))
        if what == "error":
            time.sleep(GRACE)  # process 0 may be about to report the same error
            self._end(f"error: process {index} of {self._count}: {text}", 1)
        self._end(f"error: process {index} of {self._count} was lost; {self._advice()}", 1)

    def leave(self) -> None:
        """Waits until all processes leave, and disconnects them."""
        if self._index:
            self._tell(0, "left")
        for listener in self._listeners:
            listener.join()
        if self._index == 0:
            for index in self._connections:
                self._tell(index, "left")
        for connection in self._connections.values():
            connection.close()
        jax.distributed.shutdown()

    def end(self, line: str, status: int) -> NoReturn:
        """Ends all processes because of an error in this one. Process 0 prints a line about it.

        Args:
            line: what happened.
            status: the exit status, not 0.
        """
        if self._index:
            self._tell(0, f"error {' '.join(line.removeprefix('error: ').split())}")
            self._listeners[0].join(3 * GRACE)  # process 0 answers, and its listener ends this process
        self._end(line, status)

    def _end(self, line: str, status: int) -> NoReturn:
        with self._ending:  # only the first cause is printed
            print(line, file=sys.stderr, flush=True)
            for index in self._connections:
                self._tell(index, f"end {status}")
            if self._index == 0:
                time.sleep(ENDING)
            self._exit(status)

    def _tell(self, index: int, word: str) -> None:
        with contextlib.suppress(OSError):  # it is lost, which its listener notices
            self._connections[index].sendall(f"{word}\n".encode())

    def _exit(self, status: int) -> NoReturn:
        sys.stdout.flush()
        os._exit(status)  # without JAX's shutdown, which would wait for a lost process


def _word(connection: socket.socket) -> str:
    """Returns the line that a process sends, and nothing after it, or "" if the connection ends before."""
    line = b""
    while not line.endswith(b"\n"):
        if not (one := connection.recv(1)):
            return ""
        line += one
    return line[:-1].decode(errors="replace")


def _watched(connection: Any) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):  # not on macOS
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
