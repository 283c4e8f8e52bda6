"""What a finished or stopped run of `flax_models.train` holds: its model and its vocabulary."""

import dataclasses
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


def read_run(folder: Path) -> TrainedRun:
    """Returns what a run has learned.

    A model that started from a folder's weights takes sequences as long as before, however long those of the run were.

    Args:
        folder: of the run, as `runs/tiny`.

    Raises:
        RunError: it is no run, or has no checkpoint that can be read.
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
        state, _ = checkpoints.restore(trainer.initial)
    finally:
        checkpoints.close()
    return TrainedRun(trainer.model(trainer.evaluated(state)), vocabulary, int(state.step), config)
