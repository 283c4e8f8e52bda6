"""The folder of a run: its name, what is written there first, and what a continuation finds.

runs/NAME/config.json      options and the corpus's hash
runs/NAME/tokenizer.json   the tokenizer, so that the run does not depend on the cache
runs/NAME/metrics.jsonl    one line a step (flax_models.metrics), beside TensorBoard's event files
runs/NAME/checkpoints/     the last two (flax_models.checkpoint)
runs/NAME/loss.png         (flax_models.plot), and result.json: the held-out loss and the baselines
runs/NAME/profile/         the trace of --profile (flax_models.profile)

The first two are written in a folder of another name, which is then renamed: a run that is killed at any moment has
either no folder, and its name is free, or one that --resume can read.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flax_models.config import RunConfig, from_json, to_json
from flax_models.errors import RunError


class RunRecord(NamedTuple):
    """What config.json holds."""

    config: RunConfig
    corpus_sha256: str


def new_folder(config: RunConfig) -> Path:
    """Returns the folder for a new run, not yet made; raises RunError if the name asked for is taken."""
    if config.name is not None:
        _check_name(config.name)
        folder = config.runs / config.name
        if folder.exists():
            raise RunError(f"{folder} exists already: --resume continues it, another --name starts a new run")
        return folder
    folder, number = config.runs / config.config, 1
    while folder.exists():
        number += 1
        folder = config.runs / f"{config.config}-{number}"
    return folder


def folder_to_resume(runs: Path, name: str | None, config_name: str) -> Path:
    """Returns the folder of the run to continue, the named one or the config's latest; raises RunError without one."""
    if name is not None:
        _check_name(name)
        folder = runs / name
        if not (folder / "config.json").is_file():
            raise RunError(f"--resume: nothing to continue, {folder} holds no run")
        return folder
    found = [
        path.parent
        for path in runs.glob(f"{config_name}*/config.json")
        if path.parent.name.removeprefix(config_name).removeprefix("-").isdigit() or path.parent.name == config_name
    ]
    if not found:
        raise RunError(f"--resume: nothing to continue, {runs} holds no {config_name} run; --name names another")
    return max(found, key=lambda folder: (folder / "config.json").stat().st_mtime)


def _check_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise RunError(f"--name must be the name of one folder, got {name!r}")


def make_folder(folder: Path, record: RunRecord, fill: Callable[[Path], None]) -> None:
    """Makes the folder of a new run, whole or not at all.

    Args:
        folder: to be made.
        record: of config.json.
        fill: writes what else must be there from the first moment into the folder it is given.

    Raises:
        RunError: it cannot be made, or is there by now.
    """
    text = json.dumps({**to_json(record.config), "corpus_sha256": record.corpus_sha256}, indent=2)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True, exist_ok=True)
        (part / "config.json").write_text(text + "\n", encoding="utf-8")
        fill(part)
        if folder.exists():  # an empty one would be replaced
            raise RunError(f"{folder} exists already: another run has just taken the name")
        part.rename(folder)
    except OSError as error:
        raise RunError(f"cannot make the run folder {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_record(folder: Path) -> RunRecord:
    """Returns what config.json holds; raises RunError if it cannot be read."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        sha256 = values.pop("corpus_sha256")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise RunError(f"cannot read {path}: {type(error).__name__}: {error}") from None
    return RunRecord(from_json(values), sha256)
