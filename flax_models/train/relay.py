"""A relay between a process and JAX's coordination service, which is in process 0. It is a separate program.

JAX's client aborts its process, with a long log, as soon as its connection to the service ends, which happens when
process 0 is killed. No option of JAX prevents this: `jax_enable_recoverability` concerns the other processes, and
jaxlib 0.11 cannot call a `missed_heartbeat_callback` of Python. A connection through the relay stays open until the
process ends, so the client notices only after its heartbeat. `flax_models.train.processes.Peers` ends the process
before that.

A thread of the process could not relay: it waits while other Python code holds the interpreter's lock, perhaps for
longer than the heartbeat.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading


def start_relay(host: str, port: int) -> int:
    """Starts a relay to a port of a host, and returns the port of 127.0.0.1 to connect to. It ends with this process.

    Raises:
        OSError: the relay cannot be started.
    """
    command = [sys.executable, "-I", "-S", __file__, host, str(port)]
    relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    _RELAYS.append(relay)
    assert relay.stdout is not None
    line = relay.stdout.readline()
    if not line:
        raise OSError("the relay to process 0 has ended")
    return int(line)


_RELAYS: list[subprocess.Popen[bytes]] = []  # kept, because a relay ends when its stdin is closed


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Sends what one end receives to the other, until the first has ended. What the other cannot receive is dropped."""
    with contextlib.suppress(OSError):
        while block := source.recv(1 << 16):
            with contextlib.suppress(OSError):
                target.sendall(block)


def _serve(client: socket.socket, address: tuple[str, int]) -> None:
    with client, contextlib.suppress(OSError), socket.create_connection(address) as service:
        for end in (client, service):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_copy, args=(service, client), daemon=True)
        back.start()
        _copy(client, service)  # does not return when the service has ended
        service.shutdown(socket.SHUT_RDWR)  # ends `back`
        back.join()


def _accept(server: socket.socket, address: tuple[str, int]) -> None:
    while True:
        client, _ = server.accept()
        threading.Thread(target=_serve, args=(client, address), daemon=True).start()


def main() -> None:
    """Relays to the host and port of the command line until stdin ends, after printing the port to connect to."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # the process decides when it ends
        signal.signal(number, signal.SIG_IGN)
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    address = (sys.argv[1], int(sys.argv[2]))
    threading.Thread(target=_accept, args=(server, address), daemon=True).start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
