"""The folder of a run: its name, what is written there first, and what a continuation finds.

runs/NAME/config.json      options and the corpus's hash
runs/NAME/tokenizer.json   the tokenizer, so that the run does not depend on the cache; or
runs/NAME/hub/             config.json and tokenizer files of a Hugging Face folder (flax_models.data.vocabulary)
runs/NAME/lock             held by the process that writes here
runs/NAME/metrics.jsonl    one line a step (flax_models.train.metrics), beside TensorBoard's event files
runs/NAME/checkpoints/     the last two (flax_models.train.checkpoint)
runs/NAME/loss.png         (flax_models.train.plot), and result.json: the held-out loss and the baselines
runs/NAME/profile/         the trace of --profile (flax_models.train.profile)

All down to the lock are written in a folder of another name, which is then renamed: a run that is killed at any moment
has either no folder, and its name is free, or one that --resume can read.

A run that ended before its first checkpoint (it diverged at once, the disk was full) does not keep its name. --resume
starts it from its beginning. A new run of that name moves its folder to runs/NAME.failed, or NAME.failed-2 and so on,
so that its metrics can still be read. Nothing is deleted.
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

from flax_models.errors import RunError
from flax_models.train.checkpoint import steps_in
from flax_models.train.config import RunConfig, TrainConfig, from_json, to_json
from flax_models.train.metrics import read_rows

FAILED = ".failed"  # what is added to the name of a run that ended before its first checkpoint


class RunLock:
    """Holds a run's folder against other processes until it is closed, or the process ends in whatever way.

    Args:
        folder: of the run.

    Attributes:
        fault: why nothing is held, where the file system knows no locks; None otherwise.

    Raises:
        RunError: another process holds it; names the process.
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
            raise RunError(f"{folder} is being written by {holder}: wait for its end, or stop it") from None
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
        """Lets others have the folder."""
        self._file.close()


def has_checkpoint(folder: Path, config: TrainConfig) -> bool:
    """Returns whether a run has a checkpoint to go on from, or should have one: losing it must not start it anew."""
    last_row = max((row["step"] for row in read_rows(folder)), default=0)
    return bool(steps_in(folder / "checkpoints")) or last_row > config.checkpoint_every


def how_to_go_on(folder: Path | None) -> str:
    """Returns in words how a stopped run is started again.

    Args:
        folder: of the run, None if it was not made yet.
    """
    if folder is None:
        return "nothing of the run was written yet, the same command starts it again"
    if steps := steps_in(folder / "checkpoints"):
        return f"--resume continues from the checkpoint of step {steps[-1]:,}"
    return "no checkpoint was made yet, --resume starts the run from its beginning"


class RunRecord(NamedTuple):
    """What config.json holds."""

    config: RunConfig
    corpus_sha256: str


def default_name(config: str | None, weights: Path | None) -> str:
    """Returns the name of a run that nobody named: the config's, or that of the folder whose weights it starts from."""
    if config is not None:
        return config
    return "tiny" if weights is None else weights.resolve().name


def new_folder(config: RunConfig) -> Path:
    """Returns the folder for a new run, not yet made; raises RunError if the name asked for is taken.

    If a run is there that ended before its first checkpoint, `move_failed` makes room.
    """
    if config.name is not None:
        _check_name(config.name)
        folder = config.runs / config.name
        if folder.exists() and not _ended_early(folder):
            if not (folder / "config.json").is_file():
                raise RunError(f"{folder} exists already and holds no run: another --name starts a new run")
            raise RunError(f"{folder} exists already: --resume continues it, another --name starts a new run")
        return folder
    name, number = default_name(config.config, config.weights), 1
    folder = config.runs / name
    while folder.exists() and not _ended_early(folder):
        number += 1
        folder = config.runs / f"{name}-{number}"
    return folder


def _ended_early(folder: Path) -> bool:
    """Returns whether a folder holds a run without a checkpoint that no process writes any more."""
    try:
        if has_checkpoint(folder, read_record(folder).config.train):
            return False
        with RunLock(folder) as lock:
            return lock.fault is None
    except RunError:  # it cannot be read, or is being written
        return False


def move_failed(folder: Path) -> Path | None:
    """Makes room for a new run where one ended before its first checkpoint; returns where that is now, if there is one.

    Raises:
        RunError: a process has begun to write there, or the folder cannot be moved.
    """
    if not _ended_early(folder):
        return None
    with RunLock(folder):
        aside, number = folder.with_name(f"{folder.name}{FAILED}"), 1
        while aside.exists():
            number += 1
            aside = folder.with_name(f"{folder.name}{FAILED}-{number}")
        try:
            folder.rename(aside)
        except OSError as error:
            raise RunError(f"cannot move {folder} to {aside}: {error.strerror}") from None
    return aside


def folder_to_resume(runs: Path, name: str | None, default: str) -> Path:
    """Returns the folder of the run to continue: the named one, or the latest of a `default_name`.

    Raises:
        RunError: there is none.
    """
    if name is not None:
        _check_name(name)
        folder = runs / name
        if not (folder / "config.json").is_file():
            raise RunError(f"--resume: nothing to continue, {folder} holds no run")
        return folder
    found = [
        path.parent
        for path in runs.glob(f"{glob.escape(default)}*/config.json")
        if path.parent.name.removeprefix(default).removeprefix("-").isdigit() or path.parent.name == default
    ]
    if not found:
        raise RunError(f"--resume: nothing to continue, {runs} holds no {default} run; --name names another")
    return max(found, key=lambda folder: (folder / "config.json").stat().st_mtime)


def _check_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise RunError(f"--name must be the name of one folder, got {name!r}")


def make_folder(folder: Path, record: RunRecord, fill: Callable[[Path], None]) -> RunLock:
    """Makes the folder of a new run, whole or not at all.

    Args:
        folder: to be made.
        record: of config.json.
        fill: writes what else must be there from the first moment into the folder it is given.

    Returns:
        The lock on it, held from the moment it is there.

    Raises:
        RunError: it cannot be made, or is there by now.
    """
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        with ExitStack() as unless_made:
            part.mkdir(parents=True, exist_ok=True)
            _write_record(part / "config.json", record)
            fill(part)
            lock = unless_made.enter_context(RunLock(part))
            if folder.exists():  # an empty one would be replaced
                raise RunError(f"{folder} exists already: another run has just taken the name")
            part.rename(folder)
            unless_made.pop_all()
            return lock
    except OSError as error:
        raise RunError(f"cannot make the run folder {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def extend(folder: Path, steps: int) -> None:
    """Makes config.json say that a run takes so many steps; raises RunError if it cannot be written."""
    record = read_record(folder)
    config = dataclasses.replace(record.config, train=dataclasses.replace(record.config.train, steps=steps))
    path = folder / "config.json"
    part = path.with_suffix(".part")
    try:
        _write_record(part, record._replace(config=config))
        part.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None


def _write_record(path: Path, record: RunRecord) -> None:
    text = json.dumps({**to_json(record.config), "corpus_sha256": record.corpus_sha256}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def read_record(folder: Path) -> RunRecord:
    """Returns what config.json holds; raises RunError if it cannot be read."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        sha256 = values.pop("corpus_sha256")
        return RunRecord(from_json(values), sha256)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{folder} holds no run: it has no config.json") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise RunError(f"cannot read {path}: {type(error).__name__}: {error}") from None
