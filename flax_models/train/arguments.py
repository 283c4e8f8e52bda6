"""The command line of `python -m flax_models.train`, read into a `RunConfig`.

Defaults come from elsewhere than the class: `--config` names a set of them, `--weights` takes the model's shape from a
folder, `--adapter` that of adapters, and `--resume` takes all of them from the run that it continues. So these are
looked for first.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from flax_models.command_line import OneLineParser, one_line_errors
from flax_models.errors import RunError
from flax_models.hub.adapter_folder import read_adapter_config
from flax_models.hub.config import differing, read_config
from flax_models.model.config import ModelConfig
from flax_models.model.lora_config import LoraConfig
from flax_models.train.checkpoint import steps_in
from flax_models.train.config import CONFIGS, UNUSED, RunConfig, TrainConfig, check_same, fine_tuning
from flax_models.train.run_folder import default_name, folder_to_resume, read_record

PROGRAM = "python -m flax_models.train"


def parse(arguments: Sequence[str]) -> tuple[RunConfig, Path | None]:
    """Returns the options, and the folder of the run to continue if one is.

    Args:
        arguments: of the command line.

    Returns:
        (config, folder to continue or None).

    Raises:
        RunError: there is nothing to continue, an option differs from the run's or is not for the run's optimiser, or
            the folder of --weights or --adapter cannot be read or holds other than the options ask for.
        SystemExit: an option is wrong, or --help.
    """
    first = OneLineParser(add_help=False, allow_abbrev=False, prog=PROGRAM)
    first.add_argument("--config", choices=tuple(CONFIGS))
    first.add_argument("--weights", type=Path)
    first.add_argument("--adapter", type=Path)
    first.add_argument("--ignore-config-fields", nargs="*", default=())
    first.add_argument("--name")
    first.add_argument("--runs", type=Path, default=RunConfig.runs)
    first.add_argument("--resume", action="store_true")
    known, _ = first.parse_known_args(arguments)
    if known.resume:
        folder = folder_to_resume(known.runs, known.name, default_name(known.config, known.weights))
        stored = read_record(folder).config
        config = _read_all(arguments, dataclasses.replace(stored, name=folder.name))
        steps, taken = config.train.steps, max(steps_in(folder / "checkpoints"), default=0)
        as_before = dataclasses.replace(config.train, steps=stored.train.steps)
        check_same(dataclasses.replace(config, train=as_before), stored, folder / "config.json")
        if steps < taken:
            raise RunError(f"--steps must be at least {taken}, which {folder} has taken, got {steps}")
        return config, folder
    if known.weights is None:
        return _read_all(arguments, CONFIGS[known.config or "tiny"]), None
    defaults = fine_tuning(known.config, known.weights, _shape_of(known.weights, known.ignore_config_fields))
    if known.adapter is not None:
        defaults = dataclasses.replace(defaults, lora=read_adapter_config(known.adapter))
    config = _read_all(arguments, defaults)
    check_shape(config.model, known.weights, config.ignore_config_fields)
    if known.adapter is not None:
        _check_adapter(config.lora, defaults.lora)
    return config, None


def _check_adapter(asked: LoraConfig, found: LoraConfig) -> None:
    """Raises RunError unless a folder holds the adapters that are asked for; they may be trained otherwise."""
    for name in ("lora_rank", "lora_alpha", "lora_targets", "dora"):
        ours, theirs = getattr(asked, name), getattr(found, name)
        if ours != theirs:
            raise RunError(f"--{name.replace('_', '-')} is {theirs} in the folder of --adapter, got {ours}")


def _read_all(arguments: Sequence[str], defaults: RunConfig) -> RunConfig:
    import tyro

    with one_line_errors():
        config = tyro.cli(
            RunConfig,
            prog=PROGRAM,
            args=list(arguments),
            default=defaults,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        )
    _check_used(config.train, defaults.train)
    return config


def _check_used(asked: TrainConfig, defaults: TrainConfig) -> None:
    """Raises RunError for an option that was given and that the optimiser does not read."""
    for name in UNUSED.get(asked.optimizer, ()):
        if (value := getattr(asked, name)) != getattr(defaults, name):
            raise RunError(f"--{name} is not for --optimizer {asked.optimizer}, got {value}")


def _shape_of(weights: Path, ignored: Sequence[str]) -> ModelConfig:
    try:
        return read_config(weights, ignored)
    except RunError as error:
        raise RunError(f"--weights: {error}") from None


def check_shape(asked: ModelConfig, weights: Path, ignored: Sequence[str]) -> None:
    """Raises RunError unless a folder holds the model that is asked for; it may be trained on shorter sequences."""
    found = _shape_of(weights, ignored)
    if odd := differing(dataclasses.replace(asked, max_seq_len=found.max_seq_len), found):
        shown = ", ".join(f"{name} {theirs!r} there and {ours!r} here" for name, (ours, theirs) in odd.items())
        raise RunError(f"--weights: {weights} holds another model than the options ask for: {shown}")
    if asked.max_seq_len > found.max_seq_len:
        raise RunError(
            f"--max-seq-len must be at most {found.max_seq_len} (max_position_embeddings in {weights}), "
            f"got {asked.max_seq_len}"
        )
