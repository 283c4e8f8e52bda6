"""Checkpoints of a run: parameters, optimiser, step, and the place in the data's order.

Saving is synchronous. A step gives its buffers to the next one (they are donated), and on the CPU a checkpoint written
in the background would read buffers that already hold something else.
"""

from pathlib import Path
from typing import Any

import jax

from flax_models.errors import RunError
from flax_models.step import TrainState

KEPT = 2  # the last one, and one before it in case the machine stops while it is written


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        folder: made when the first one is saved.
    """

    def __init__(self, folder: Path) -> None:
        import orbax.checkpoint as ocp

        self._ocp, self._folder = ocp, folder
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

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
            RunError: it cannot be written.
        """
        if step == self.latest_step():
            return
        args = self._ocp.args
        try:
            self._manager.save(
                step,
                args=args.Composite(state=args.StandardSave(state._asdict()), sampler=args.JsonSave(sampler)),
            )
        except OSError as error:
            raise RunError(f"cannot write the checkpoint of step {step} to {self._folder}: {error}") from None

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state and the sampler's place of the latest checkpoint.

        Args:
            like: a state of the same shapes and dtypes.

        Returns:
            (state, sampler).

        Raises:
            RunError: there is none, or it cannot be read.
        """
        step = self.latest_step()
        if step is None:
            raise RunError(f"--resume: nothing to continue, {self._folder} holds no checkpoint")
        args = self._ocp.args
        shapes = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, like._asdict())
        try:
            restored = self._manager.restore(
                step, args=args.Composite(state=args.StandardRestore(shapes), sampler=args.JsonRestore())
            )
        except Exception as error:  # a broken file surfaces as one of many types, with a page of text
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise RunError(f"cannot read the checkpoint {self._folder / str(step)}: {first_line}") from None
        return TrainState(**restored["state"]), restored["sampler"]

    def close(self) -> None:
        """Ends the manager's threads."""
        self._manager.close()
