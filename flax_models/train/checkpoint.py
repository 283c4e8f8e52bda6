"""Checkpoints of a run: parameters, optimizer state, step, and position in the data.

Saving is synchronous. A step donates its buffers to the next one, so on the CPU a checkpoint written in the background
would read buffers that have already been overwritten.

Orbax writes a checkpoint to a temporary folder and renames it when it is complete. A process killed at any time leaves
complete checkpoints, and possibly a temporary folder that the next run removes. Then `files.json` is added, with the
size and CRC-32 of each file and the shape and dtype of each array. It is verified before a checkpoint is read. If a
file is truncated, missing or changed, the error names it on one line, and an older checkpoint is used. If a file
cannot be read, for example because of an I/O error, its content may be right. Then a run ends with an error.

If a run has several processes, each writes and reads the arrays of its devices, in a folder that all of them have.
Process 0 writes and verifies `files.json`.
"""

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax

from flax_models.data.atomic_file import atomic_file
from flax_models.errors import RunError, first_line
from flax_models.train.processes import from_first, is_first, wait_for_all
from flax_models.train.step import TrainState

KEPT = 2  # number of checkpoints kept: the latest, and the one before in case the latest is damaged
MANIFEST = "files.json"
BROKEN = ".broken"  # suffix of the folder of a damaged checkpoint


def steps_in(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, including damaged ones; none if there is no folder.

    Raises:
        OSError: the folder cannot be read. It may have checkpoints.
    """
    try:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    except FileNotFoundError:
        return []


def unused_path(folder: Path, suffix: str) -> Path:
    """Returns a path that does not exist: the folder's name with a suffix, and with -2, -3, ... if that is taken."""
    path, number = folder.with_name(folder.name + suffix), 1
    while path.exists():
        number += 1
        path = folder.with_name(f"{folder.name}{suffix}-{number}")
    return path


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        folder: folder of the run's checkpoints; created if it does not exist.
        writes: this process is the run, and no other process writes to the folder. Temporary folders of killed
            processes are removed, and damaged checkpoints are renamed, because the run reaches their steps again.

    Attributes:
        skipped: messages about damaged checkpoints that are later than the one that `restore` returned.

    Raises:
        RunError: the folder cannot be created.
    """

    def __init__(self, folder: Path, *, writes: bool = False) -> None:
        import orbax.checkpoint as ocp

        self._ocp, self._folder, self._writes = ocp, folder, writes
        self.skipped: list[str] = []
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=writes
        )
        try:
            self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        except OSError as error:
            raise RunError(f"cannot create the folder {folder}: {error.strerror or error}") from None

    def latest_step(self) -> int | None:
        """Returns the step of the latest checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, sampler: dict[str, Any]) -> None:
        """Writes a checkpoint; does nothing if the latest checkpoint is of the same step.

        Args:
            step: number of steps done.
            state: the training state.
            sampler: `Sampler.state()`.

        Raises:
            RunError: the checkpoint cannot be written; earlier checkpoints are unchanged.
        """
        if step == self.latest_step():
            return
        kept = self.latest_step()
        args = self._ocp.args
        try:
            free, size = shutil.disk_usage(self._folder).free, _size(state)
            if free < size:  # checked first, because a partial checkpoint would use up the remaining space
                raise OSError(f"it needs {size:,} bytes, and the disk has {free:,} bytes free")
            self._manager.save(
                step,
                args=args.Composite(state=args.StandardSave(state._asdict()), sampler=args.JsonSave(sampler)),
            )
            if is_first():
                _write_manifest(self._folder / str(step), state)
        except Exception as error:  # for a full disk, OSError or an exception type of the storage library
            raise RunError(
                f"cannot write the checkpoint of step {step} to {self._folder}: {first_line(error)}; "
                f"{'there is no earlier checkpoint' if kept is None else f'the checkpoint of step {kept} is kept'}"
            ) from None

    def restore(
        self, like: TrainState, *, step: int | None = None, allow_older: bool = True
    ) -> tuple[TrainState, dict[str, Any]]:
        """Returns the training state and the sampler's state of the latest checkpoint that can be read.

        `skipped` has messages about later, damaged checkpoints.

        Args:
            like: a state with the same shapes and dtypes; its leaves may be `jax.ShapeDtypeStruct`. An array is read
                to where that of `like` is, which may be another mesh than the one that wrote the checkpoint, and to
                the first device if `like` has no sharding. If its `optimizer` is None, that of the result is too, and
                the optimizer's arrays are not read. An object reads either whole states or such parts.
            step: read the checkpoint of this step instead.
            allow_older: use an older checkpoint if the latest is damaged.

        Returns:
            (state, sampler state).

        Raises:
            RunError: there is no checkpoint, none can be read, the latest is damaged and `allow_older` is False, the
                arrays of the checkpoint have other shapes or dtypes than `like`, or the run itself (`writes`) cannot
                read a checkpoint whose content is not known to be wrong. Nothing is renamed then.
        """
        found = from_first(" ".join(map(str, sorted(self._manager.all_steps(), reverse=True))))
        steps = [*map(int, found.split())]  # another host may not see the newest folder yet
        if not steps:
            raise RunError(f"--resume: nothing to continue, {self._folder} has no checkpoint")
        available = ", ".join(map(str, reversed(steps)))
        if step is not None:
            if step not in steps:
                raise RunError(f"--step must be one of the checkpoints in {self._folder} ({available}), got {step}")
            steps = [step]
        faults: list[str] = []
        for step in steps:
            folder = self._folder / str(step)
            fault, damaged = json.loads(from_first(json.dumps(_fault(folder) if is_first() else None)))
            if fault is None:
                _check_arrays(folder, like)
                try:
                    restored = self._read(step, like)
                except Exception as error:  # a damaged file raises one of many types, with a long message
                    fault = first_line(error)
                    # Files that match MANIFEST are not damaged, and other processes may have read them.
                    damaged = not (
                        isinstance(error, OSError) or (folder / MANIFEST).exists() or jax.process_count() > 1
                    )
                else:
                    if self._writes:
                        self._set_aside(steps[: len(faults)])
                    self.skipped = faults
                    return restored
            faults.append(f"cannot read the checkpoint {folder}: {fault}")
            if not damaged and (self._writes or jax.process_count() > 1):
                raise RunError(f"{'; '.join(faults)}; nothing was renamed, and --resume tries again")
            if not allow_older and len(steps) > 1:
                raise RunError(
                    f"{faults[0]}; use --allow-older for the latest checkpoint that can be read, "
                    f"or --step N for the checkpoint of step N ({available})"
                )
        raise RunError("; ".join(faults))

    def _read(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        args = self._ocp.args
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or device), like._asdict()
        )
        arrays = args.StandardRestore(shapes)
        if like.optimizer is None:
            del shapes["optimizer"]
            how = self._ocp.checkpoint_utils.construct_restore_args(shapes)
            arrays = args.PyTreeRestore(shapes, how, partial_restore=True)
        restored = self._manager.restore(step, args=args.Composite(state=arrays, sampler=args.JsonRestore()))
        return TrainState(**{"optimizer": None, **restored["state"]}), restored["sampler"]

    def _set_aside(self, steps: list[int]) -> None:
        for step in steps if is_first() else ():
            folder = self._folder / str(step)
            folder.rename(unused_path(folder, BROKEN))
        if steps:
            wait_for_all("damaged checkpoints are renamed")
            self._manager.reload()

    def close(self) -> None:
        """Stops the threads of the checkpoint manager."""
        self._manager.close()


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
    with atomic_file(folder / MANIFEST) as part:
        part.write_text(json.dumps({"files": files, "arrays": _arrays(state)}, indent=1) + "\n", encoding="utf-8")


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Returns the content of MANIFEST; None if there is none because the process was killed before writing it."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _fault(folder: Path) -> tuple[str | None, bool]:
    """Returns why a checkpoint cannot be used, None if all files match MANIFEST, and whether its content is wrong."""
    name = MANIFEST
    try:
        manifest = _manifest(folder)
        for name, (size, checksum) in ({} if manifest is None else manifest["files"]).items():
            path = folder / name
            if (found := path.stat().st_size) != size:
                return f"{name} has {found:,} bytes instead of {size:,}", True
            if _checksum(path) != checksum:
                return f"{name} was changed after it was written (its checksum differs)", True
    except FileNotFoundError:
        return f"{name} is missing", True
    except OSError as error:
        return f"{name}: {first_line(error)}", False
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"{MANIFEST}: {first_line(error)}", True
    return None, False


def _check_arrays(folder: Path, like: TrainState) -> None:
    """Raises RunError if the arrays of a checkpoint have other names, shapes or dtypes than those of a state."""
    manifest = _manifest(folder)
    if manifest is None:
        return
    found, expected = manifest["arrays"], _arrays(like)
    if like.optimizer is None:
        found = {name: entry for name, entry in found.items() if not name.startswith("['optimizer']")}
    for name in [*expected, *(set(found) - set(expected))]:
        if found.get(name) != expected.get(name):
            raise RunError(
                f"the checkpoint {folder} does not match the model: "
                f"{name} must be {_shape(expected.get(name))}, got {_shape(found.get(name))}"
            )


def _shape(entry: list[Any] | None) -> str:
    return "absent" if entry is None else f"{entry[1]} {tuple(entry[0])}"
