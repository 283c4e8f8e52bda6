"""A run's folder has one writer. Other processes get an error that names it, and a dead process holds no lock."""

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from flax_runs import train

from flax_models.data.atomic_file import part_path
from flax_models.errors import RunError
from flax_models.train.config import RunConfig
from flax_models.train.run_folder import RunLock, RunRecord, make_folder


def new_run(folder: Path) -> RunLock:
    return make_folder(folder, RunRecord(RunConfig(), "0" * 64), lambda part: None)


def test_second_writer_gets_an_error_that_names_the_first(tmp_path, capsys):
    folder = tmp_path / "runs" / "a"
    with new_run(folder):
        assert train(tmp_path, "--name", "a", "--resume") == 1
        err = capsys.readouterr().err
        assert re.match(rf"error: .*runs/a is in use by process {os.getpid()} on {socket.gethostname()}; ", err)
        assert err.count("\n") == 1
        with pytest.raises(RunError, match="is in use by process"):
            RunLock(folder)
    with RunLock(folder):
        pass


def test_killed_process_releases_the_lock(tmp_path):
    folder = tmp_path / "a"
    new_run(folder).close()
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom flax_models.train.run_folder import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"is in use by process {process.pid} on "):
            RunLock(folder)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    with RunLock(folder) as lock:
        assert (folder / "lock").read_text().startswith(f"process {os.getpid()} on ")
        assert lock.fault is None


def test_file_system_without_locks_prints_a_warning(tmp_path, monkeypatch):
    def unsupported(file, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with new_run(tmp_path / "a") as lock:
        assert lock.fault == "Operation not supported"


def test_folder_that_cannot_be_created_leaves_no_lock(tmp_path):
    new_run(tmp_path / "a").close()
    with pytest.raises(RunError, match="another run has just been created with this name"):
        new_run(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with pytest.raises(RunError, match=r"cannot write .*absent/lock: No such file or directory"):
        RunLock(tmp_path / "absent")


def test_a_new_folder_has_nothing_of_a_killed_process_of_the_same_id(tmp_path):
    part = part_path(tmp_path / "a")
    assert socket.gethostname() in part.name, "containers on several hosts may have the same process ids"
    (part / "hub").mkdir(parents=True)
    (part / "chat_date.txt").write_text("2020-01-01\n")
    make_folder(tmp_path / "a", RunRecord(RunConfig(), "0" * 64), lambda part: (part / "hub").mkdir()).close()
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"config.json", "hub", "lock"}
    assert not part.exists()
