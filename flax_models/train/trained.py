"""Reads the model and the vocabulary of a run of `flax_models.train`."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

from flax_models.data.vocabulary import HUB, Vocabulary, read_run_vocabulary
from flax_models.errors import RunError
from flax_models.hub.config import read_config
from flax_models.model.decoder import Decoder
from flax_models.model.lora import adapted_shapes
from flax_models.train.checkpoint import Checkpoints
from flax_models.train.config import RunConfig
from flax_models.train.run_folder import read_record
from flax_models.train.step import Trainer


class TrainedRun(NamedTuple):
    """The model of a run's checkpoint, including adapters if it has any, with vocabulary, step and options."""

    model: Decoder
    vocabulary: Vocabulary
    step: int
    config: RunConfig


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options --step and --allow-older, which are arguments of `read_run`, to a command line."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="step of the checkpoint of --run to use (default: the latest)")
    which.add_argument(
        "--allow-older",
        action="store_true",
        help="if the latest checkpoint of --run cannot be read, use an older one and print a warning",
    )


def read_run(folder: Path, *, step: int | None = None, allow_older: bool = False) -> TrainedRun:
    """Reads the trained model of a run.

    If the run started from a folder's weights, max_seq_len is that of the folder, not that of the run.

    Args:
        folder: folder of the run, for example `runs/tiny`.
        step: use the checkpoint of this step; None: the latest.
        allow_older: if the latest checkpoint cannot be read, use an older one and print a warning on stderr.

    Raises:
        RunError: the folder is not a run, it has no checkpoint of this step, or the checkpoint cannot be read.
    """
    config = read_record(folder).config
    vocabulary = read_run_vocabulary(folder)
    if not (folder / "checkpoints").is_dir():
        raise RunError(f"{folder} has no checkpoint yet")
    shape = vocabulary.fit(config.model)
    if config.weights is not None:
        shape = dataclasses.replace(
            shape, max_seq_len=read_config(folder / HUB, config.ignore_config_fields).max_seq_len
        )
    trainer = Trainer(adapted_shapes(shape, config.lora), config.train, config.lora)
    checkpoints = Checkpoints(folder / "checkpoints")
    try:
        if checkpoints.latest_step() is None:
            raise RunError(f"{folder} has no checkpoint yet")
        state, _ = checkpoints.restore(trainer.evaluated_part(trainer.initial), step=step, allow_older=allow_older)
    finally:
        checkpoints.close()
    for fault in checkpoints.skipped:
        print(f"warning: {fault}; the checkpoint of step {int(state.step)} is used", file=sys.stderr)
    return TrainedRun(trainer.model(trainer.evaluated(state)), vocabulary, int(state.step), config)
