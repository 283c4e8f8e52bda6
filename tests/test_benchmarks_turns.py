"""Processes that share a device: whatever is timed is timed alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import turns

COUNT = """
import sys, time
from benchmarks import turns
turns.join()
while True:
    open(sys.argv[1], "a").write(".")
    time.sleep(0.01)
"""
HOLD = """
import sys, time
from benchmarks import turns
turns.join()
with turns.alone():
    open(sys.argv[1], "a").write(".")
    time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], tuple[int, Path]]]:
    monkeypatch.setenv(turns.VARIABLE, str(tmp_path / "turns"))
    started: list[subprocess.Popen[bytes]] = []

    def _start(program: str, name: str) -> tuple[int, Path]:
        path = tmp_path / name
        command = [sys.executable, "-c", program, str(path)]
        started.append(subprocess.Popen(command, cwd=Path(__file__).parent.parent, start_new_session=True))
        _until(path.exists)
        return started[-1].pid, path

    yield _start
    for process in started:
        process.kill()
        process.wait()


def _until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


def _moves(path: Path) -> bool:
    before = path.stat().st_size
    time.sleep(0.3)
    return path.stat().st_size > before


def test_what_is_timed_has_the_device_alone(start: Callable[[str, str], tuple[int, Path]]) -> None:
    _, path = start(COUNT, "count")
    assert _moves(path)
    with turns.alone():
        time.sleep(0.1)  # for the signal to arrive
        assert not _moves(path)
    assert _moves(path)


def test_one_that_ends_while_it_is_timed_leaves_no_other_stopped(start: Callable[[str, str], tuple[int, Path]]) -> None:
    _, path = start(COUNT, "count")
    pid, _ = start(HOLD, "hold")
    time.sleep(0.1)
    assert not _moves(path)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    turns.leave(pid)
    assert _moves(path)


def test_without_a_folder_nothing_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(turns.VARIABLE, raising=False)
    turns.join()
    turns.leave(os.getpid())
    with turns.alone():
        pass


def test_memory_is_waited_for(start: Callable[[str, str], tuple[int, Path]], tmp_path: Path) -> None:
    turns.join()
    pid, _ = start(COUNT, "count")
    (tmp_path / "turns" / str(pid)).write_text("70")
    turns.reserve(30, limit=100)
    (tmp_path / "turns" / str(os.getpgrp())).write_text("0")
    with ThreadPoolExecutor() as pool:
        more = pool.submit(turns.reserve, 31, 100)
        with pytest.raises(TimeoutError):
            more.result(3 * turns.POLL)
        turns.leave(pid)
        more.result(30)
    turns.reserve(101, limit=100)  # nobody else holds anything
    turns.end()
