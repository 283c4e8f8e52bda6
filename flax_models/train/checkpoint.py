"""Checkpoints of a run: parameters, optimiser, step, and the place in the data's order.

Saving is synchronous. A step gives its buffers to the next one (they are donated), and on the CPU a checkpoint written
in the background would read buffers that already hold something else.

Orbax writes a checkpoint into a folder of another name and renames it when all is there, so a process killed at any
moment leaves whole checkpoints and perhaps a folder that the next save clears away. Once it stands, `files.json` goes
into it: size and CRC-32 of each file, shape and dtype of each array. A checkpoint is held against that before it is
read, so that a file cut short, lost or changed is named in one line, and an older checkpoint takes its place.
"""

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax

from flax_models.errors import RunError
from flax_models.train.step import TrainState

KEPT = 2  # the last one, and one before it in case the last is broken
MANIFEST = "files.json"
BROKEN = ".broken"  # what is added to the name of a checkpoint that was passed over


def steps_in(folder: Path) -> list[int]:
    """Returns the steps that a folder has checkpoints of, broken ones among them; none where there is no folder."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        folder: of the run's checkpoints; made if it is not there.
        writes: this is the run itself, and no other process writes there: what a killed one left half written is
            cleared away, and a broken checkpoint whose step comes again is renamed.

    Attributes:
        passed_over: what `restore` found wrong with checkpoints later than the one that it gave.

    Raises:
        RunError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, writes: bool = False) -> None:
        import orbax.checkpoint as ocp

        self._ocp, self._folder, self._writes = ocp, folder, writes
        self.passed_over: list[str] = []
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=writes
        )
        try:
            self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        except OSError as error:
            raise RunError(f"cannot make the folder {folder}: {error.strerror or error}") from None

    def latest_step(self) -> int | None:
        """Returns the step of the latest checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, sampler: dict[str, Any]) -> None:
        """Writes a checkpoint; one of the same step is left as it is.

        Args:
            step: steps taken.
            state: everything on the device.
            sampler: `BatchSampler.state()`.

        Raises:
            RunError: it cannot be written; earlier checkpoints are as they were.
        """
        if step == self.latest_step():
            return
        kept = self.latest_step()
        args = self._ocp.args
        try:
            free, size = shutil.disk_usage(self._folder).free, _size(state)
            if free < size:  # told before it fails half-way, which leaves less room still
                raise OSError(f"it takes {size:,} bytes, and the disk has {free:,} left")
            self._manager.save(
                step,
                args=args.Composite(state=args.StandardSave(state._asdict()), sampler=args.JsonSave(sampler)),
            )
            _write_manifest(self._folder / str(step), state)
        except Exception as error:  # a full disk surfaces as OSError or as one of the storage library's own types
            raise RunError(
                f"cannot write the checkpoint of step {step} to {self._folder}: {_first_line(error)}; "
                f"{'no checkpoint was made before it' if kept is None else f'the checkpoint of step {kept} is kept'}"
            ) from None

    def restore(
        self, like: TrainState, *, step: int | None = None, allow_older: bool = True
    ) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state and the sampler's place of the latest checkpoint that is whole.

        Broken ones later than it are told in `passed_over`.

        Args:
            like: a state of the same shapes and dtypes, or those alone (`jax.ShapeDtypeStruct`).
            step: take the checkpoint of exactly this step instead.
            allow_older: whether an older checkpoint may take the place of a broken one.

        Returns:
            (state, sampler).

        Raises:
            RunError: there is none, none can be read, the latest is broken and no older one is allowed, or the latest
                whole one holds arrays of other shapes.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        if not steps:
            raise RunError(f"--resume: nothing to continue, {self._folder} holds no checkpoint")
        known = ", ".join(map(str, reversed(steps)))
        if step is not None:
            if step not in steps:
                raise RunError(f"--step must be one of the checkpoints in {self._folder} ({known}), got {step}")
            steps = [step]
        faults: list[str] = []
        for step in steps:
            folder = self._folder / str(step)
            fault = _fault(folder)
            if fault is None:
                _check_arrays(folder, like)
                try:
                    restored = self._read(step, like)
                except Exception as error:  # a broken file surfaces as one of many types, with a page of text
                    fault = _first_line(error)
                else:
                    if self._writes:
                        self._set_aside(steps[: len(faults)])
                    self.passed_over = faults
                    return restored
            faults.append(f"cannot read the checkpoint {folder}: {fault}")
            if not allow_older and len(steps) > 1:
                raise RunError(
                    f"{faults[0]}; --allow-older takes the newest checkpoint that can be read, "
                    f"--step N exactly that of step N ({known})"
                )
        raise RunError("; ".join(faults))

    def _read(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        args = self._ocp.args
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), like._asdict())
        restored = self._manager.restore(
            step, args=args.Composite(state=args.StandardRestore(shapes), sampler=args.JsonRestore())
        )
        return TrainState(**restored["state"]), restored["sampler"]

    def _set_aside(self, steps: list[int]) -> None:
        for step in steps:
            folder = self._folder / str(step)
            aside, number = folder.with_name(folder.name + BROKEN), 1
            while aside.exists():
                number += 1
                aside = folder.with_name(f"{folder.name}{BROKEN}-{number}")
            folder.rename(aside)
        if steps:
            self._manager.reload()

    def close(self) -> None:
        """Ends the manager's threads."""
        self._manager.close()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _size(state: TrainState) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state._asdict()))


def _arrays(state: TrainState) -> dict[str, list[Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state._asdict())
    return {jax.tree_util.keystr(path): [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves}


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total = zlib.crc32(block, total)
    return total


def _write_manifest(folder: Path, state: TrainState) -> None:
    files = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, _checksum(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    part = folder / f"{MANIFEST}.part"
    part.write_text(json.dumps({"files": files, "arrays": _arrays(state)}, indent=1) + "\n", encoding="utf-8")
    os.replace(part, folder / MANIFEST)


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Returns what MANIFEST holds; None without one: the process was killed before it could write it."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _fault(folder: Path) -> str | None:
    """Returns what is wrong with the files of a checkpoint, None if they are as they were written."""
    try:
        manifest = _manifest(folder)
        for name, (size, checksum) in ({} if manifest is None else manifest["files"]).items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
            if _checksum(path) != checksum:
                return f"{name} is not what was written (its checksum is another)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {_first_line(error)}"
    return None


def _check_arrays(folder: Path, like: TrainState) -> None:
    """Raises RunError if a checkpoint holds other arrays than a state has."""
    manifest = _manifest(folder)
    if manifest is None:
        return
    found, wanted = manifest["arrays"], _arrays(like)
    for name in [*wanted, *(set(found) - set(wanted))]:
        if found.get(name) != wanted.get(name):
            raise RunError(
                f"the checkpoint {folder} is of another model: "
                f"{name} is {_shape(found.get(name))} there and {_shape(wanted.get(name))} here"
            )


def _shape(entry: list[Any] | None) -> str:
    return "absent" if entry is None else f"{entry[1]} {tuple(entry[0])}"
