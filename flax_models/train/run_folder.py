"""The folder of a run: naming, creation, locking and resuming.

runs/NAME/config.json      options, and the hash of the corpus
runs/NAME/tokenizer.json   the tokenizer, so that the run does not depend on the cache; or
runs/NAME/hub/             config.json and tokenizer files of a Hugging Face folder (flax_models.data.vocabulary)
runs/NAME/lock             locked by the process that writes to the folder
runs/NAME/metrics.jsonl    one line per step (flax_models.train.metrics); TensorBoard event files are next to it
runs/NAME/checkpoints/     the last two checkpoints (flax_models.train.checkpoint)
runs/NAME/loss.png         plot of the losses (flax_models.train.plot)
runs/NAME/result.json      the held-out loss and the baselines
runs/NAME/profile/         the trace of --profile (flax_models.train.profile)

The files from config.json to the lock are written to a temporary folder, which is then renamed. A run that is killed at
any time leaves either no folder, so that its name is free, or a folder that --resume can read.

A run that ended before its first checkpoint, for example because it diverged or the disk was full, does not keep its
name. --resume starts it from the beginning. A new run of the same name moves the folder to runs/NAME.failed,
NAME.failed-2 and so on, so that its metrics can still be read. Nothing is deleted.
"""

import dataclasses
import fcntl
import glob
import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from flax_models.data.atomic_file import atomic_file, part_path
from flax_models.errors import RunError, UsageError, check_writable
from flax_models.train.checkpoint import steps_in, unused_path
from flax_models.train.config import RunConfig, TrainConfig, from_json, to_json
from flax_models.train.metrics import read_rows

FAILED = ".failed"  # suffix of the folder of a run that ended before its first checkpoint


class RunLock:
    """An exclusive lock on a run's folder, held until it is closed or the process ends.

    Args:
        folder: folder of the run.

    Attributes:
        fault: error message if the file system does not support locks, so that none is held; None otherwise.

    Raises:
        RunError: another process, which the message names, holds the lock.
    """

    def __init__(self, folder: Path) -> None:
        self.fault: str | None = None
        try:
            self._file = (folder / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise RunError(f"cannot write {folder / 'lock'}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise RunError(f"{folder} is in use by {holder}; wait until it ends, or stop it") from None
        except OSError as error:
            self.fault = str(error.strerror)
            return
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lock."""
        self._file.close()


def has_checkpoint(folder: Path, config: TrainConfig) -> bool:
    """Returns whether a run has or had a checkpoint. A run that lost its checkpoints must not restart silently."""
    last_row = max((row["step"] for row in read_rows(folder)), default=0)
    return bool(steps_in(folder / "checkpoints")) or last_row > config.checkpoint_every


def resume_advice(folder: Path | None) -> str:
    """Returns a message on how to continue a stopped run.

    Args:
        folder: folder of the run; None if it was not created yet.
    """
    if folder is None:
        return "the run has not been created yet; run the same command again to start it"
    try:
        steps = steps_in(folder / "checkpoints")
    except OSError as error:  # must not replace the reason why the run was stopped
        return f"its checkpoints cannot be read now ({error.strerror}); --resume tries again"
    if steps:
        return f"--resume continues from the checkpoint of step {steps[-1]:,}"
    return "there is no checkpoint yet; --resume starts the run from the beginning"


class RunRecord(NamedTuple):
    """The content of config.json."""

    config: RunConfig
    corpus_sha256: str


def default_name(config: str | None, weights: Path | None) -> str:
    """Returns the default name of a run: the name of the config or of the folder of weights."""
    if config is not None:
        return config
    return "tiny" if weights is None else weights.resolve().name


def new_folder(config: RunConfig) -> Path:
    """Returns the path of the folder for a new run; raises RunError if the requested name is in use, or if the folder
    cannot be created.

    The path may be that of a run that ended before its first checkpoint; `move_failed` moves that run.
    """
    check_writable(config.runs)
    if config.name is not None:
        _check_name(config.name)
        folder = config.runs / config.name
        if folder.exists() and not _ended_early(folder):
            if not (folder / "config.json").is_file():
                raise RunError(f"{folder} already exists and is not a run; choose another --name for a new run")
            raise RunError(f"{folder} already exists; use --resume to continue it, or another --name for a new run")
        return folder
    name, number = default_name(config.config, config.weights), 1
    folder = config.runs / name
    while folder.exists() and not _ended_early(folder):
        number += 1
        folder = config.runs / f"{name}-{number}"
    return folder


def _ended_early(folder: Path) -> bool:
    """Returns whether a folder holds a run without a checkpoint that no process is writing."""
    try:
        if has_checkpoint(folder, read_record(folder).config.train):
            return False
        with RunLock(folder) as lock:
            return lock.fault is None
    except RunError:  # the folder cannot be read, or another process has the lock
        return False


def move_failed(folder: Path) -> Path | None:
    """Renames the folder of a run that ended before its first checkpoint; returns the new path, None if there is none.

    Raises:
        RunError: another process has started to write to the folder, or it cannot be renamed.
    """
    if not _ended_early(folder):
        return None
    with RunLock(folder):
        path = unused_path(folder, FAILED)
        try:
            folder.rename(path)
        except OSError as error:
            raise RunError(f"cannot move {folder} to {path}: {error.strerror}") from None
    return path


def folder_to_resume(runs: Path, name: str | None, default: str) -> Path:
    """Returns the folder of the run to continue: the named run, or the latest run with the default name.

    Raises:
        RunError: there is no such run.
    """
    if name is not None:
        _check_name(name)
        folder = runs / name
        if not (folder / "config.json").is_file():
            raise RunError(f"--resume: nothing to continue, {folder} is not a run")
        return folder
    found = [
        path.parent
        for path in runs.glob(f"{glob.escape(default)}*/config.json")
        if path.parent.name.removeprefix(default).removeprefix("-").isdigit() or path.parent.name == default
    ]
    if not found:
        raise RunError(f"--resume: nothing to continue, {runs} has no run {default}; use --name for another run")
    return max(found, key=lambda folder: (folder / "config.json").stat().st_mtime)


def _check_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise UsageError(f"--name must be a folder name without a path, got {name!r}")


def make_folder(folder: Path, record: RunRecord, fill: Callable[[Path], None]) -> RunLock:
    """Creates the folder of a new run atomically.

    Args:
        folder: folder to create.
        record: content of config.json.
        fill: writes the other initial files to the folder that it is given.

    Returns:
        The lock on the folder, which is held from the creation on.

    Raises:
        RunError: the folder cannot be created, or another run has created it in the meantime.
    """
    part = part_path(folder)
    try:
        with ExitStack() as unless_made:
            shutil.rmtree(part, ignore_errors=True)  # of a killed process that had this process's id
            part.mkdir(parents=True)
            _write_record(part / "config.json", record)
            fill(part)
            lock = unless_made.enter_context(RunLock(part))
            if folder.exists():  # rename would replace an empty folder
                raise RunError(f"{folder} already exists: another run has just been created with this name")
            part.rename(folder)
            unless_made.pop_all()
            return lock
    except OSError as error:
        raise RunError(f"cannot create the run folder {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def extend(folder: Path, steps: int) -> None:
    """Changes the number of steps in config.json; raises RunError if it cannot be written."""
    record = read_record(folder)
    config = dataclasses.replace(record.config, train=dataclasses.replace(record.config.train, steps=steps))
    path = folder / "config.json"
    try:
        with atomic_file(path) as part:
            _write_record(part, record._replace(config=config))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None


def _write_record(path: Path, record: RunRecord) -> None:
    text = json.dumps({**to_json(record.config), "corpus_sha256": record.corpus_sha256}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def read_record(folder: Path) -> RunRecord:
    """Reads config.json; raises RunError if it cannot be read."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        sha256 = values.pop("corpus_sha256")
        return RunRecord(from_json(values), sha256)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{folder} is not a run: it has no config.json") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise RunError(f"cannot read {path}: {type(error).__name__}: {error}") from None
