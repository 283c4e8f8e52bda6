"""What a finished or stopped run of `flax_models.train` holds: its model and its vocabulary."""

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
    """The model of a run's latest checkpoint, with its adapters if it has any, and what else belongs to the run."""

    model: Decoder
    vocabulary: Vocabulary
    step: int
    config: RunConfig


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Adds --step and --allow-older, which say what `read_run` takes, to a command line."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="take exactly this checkpoint of --run (the newest)")
    which.add_argument(
        "--allow-older",
        action="store_true",
        help="take an older checkpoint of --run, with a warning, where the newest cannot be read",
    )


def read_run(folder: Path, *, step: int | None = None, allow_older: bool = False) -> TrainedRun:
    """Returns what a run has learned.

    A model that started from a folder's weights takes sequences as long as before, however long those of the run were.

    Args:
        folder: of the run, as `runs/tiny`.
        step: take exactly this checkpoint; None: the newest.
        allow_older: take an older checkpoint where the newest cannot be read, and print a warning on stderr.

    Raises:
        RunError: it is no run, or has no checkpoint that can be read, or not the one that is asked for.
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
        state, _ = checkpoints.restore(trainer.initial, step=step, allow_older=allow_older)
    finally:
        checkpoints.close()
    for fault in checkpoints.passed_over:
        print(f"warning: {fault}; the checkpoint of step {int(state.step)} is used", file=sys.stderr)
    return TrainedRun(trainer.model(trainer.evaluated(state)), vocabulary, int(state.step), config)
