"""What a finished or stopped run of `flax_models.train` holds: its model and its tokenizer."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flax import nnx

from flax_models import tokenizer as tokenizers_of_runs
from flax_models.checkpoint import Checkpoints
from flax_models.errors import RunError
from flax_models.model import Decoder
from flax_models.run_folder import read_record
from flax_models.step import Trainer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TrainedRun(NamedTuple):
    """The model of a run's latest checkpoint, and the run's tokenizer."""

    model: Decoder
    tokenizer: "Tokenizer"
    step: int


def read_run(folder: Path) -> TrainedRun:
    """Returns what a run has learned.

    Args:
        folder: of the run, as `runs/tiny`.

    Raises:
        RunError: it is no run, or has no checkpoint that can be read.
    """
    record = read_record(folder)
    tokenizer = tokenizers_of_runs.read(folder / "tokenizer.json")
    if not (folder / "checkpoints").is_dir():
        raise RunError(f"{folder} has no checkpoint yet")
    config = dataclasses.replace(record.config.model, vocab_size=tokenizer.get_vocab_size())
    trainer = Trainer(Decoder(config, rngs=nnx.Rngs(record.config.seed)), record.config.train)
    checkpoints = Checkpoints(folder / "checkpoints")
    try:
        if checkpoints.latest_step() is None:
            raise RunError(f"{folder} has no checkpoint yet")
        state, _ = checkpoints.restore(trainer.initial)
    finally:
        checkpoints.close()
    return TrainedRun(trainer.model(state.params), tokenizer, int(state.step))
