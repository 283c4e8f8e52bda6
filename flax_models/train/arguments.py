"""Parses the command line of `python -m flax_models.train` into a `RunConfig`.

A first pass reads the options that change the defaults of others: `--config` selects a set of defaults, `--weights`
takes the model's shape from a folder, `--adapter` takes the adapters' shape from a folder, and `--resume` takes all
defaults from the run that it continues.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from flax_models.command_line import OneLineParser, one_line_errors
from flax_models.errors import RunError, UsageError, naming
from flax_models.hub.adapter_folder import read_adapter_config
from flax_models.hub.config import differing, read_config
from flax_models.model.config import ModelConfig
from flax_models.model.lora_config import LoraConfig
from flax_models.model.rope import USED
from flax_models.train.checkpoint import steps_in
from flax_models.train.config import CONFIGS, UNUSED, RunConfig, check_same, fine_tuning
from flax_models.train.run_folder import default_name, folder_to_resume, read_record

PROGRAM = "python -m flax_models.train"


def parse(arguments: Sequence[str]) -> tuple[RunConfig, Path | None]:
    """Parses the command line.

    Args:
        arguments: arguments of the command line.

    Returns:
        (config, folder of the run to continue or None).

    Raises:
        RunError: there is no run to continue, an option differs from the run's or is not used by its optimizer, or the
            folder of --weights or --adapter cannot be read or does not match the options.
        SystemExit: an option is invalid, or --help is given.
    """
    first = OneLineParser(add_help=False, allow_abbrev=False, prog=PROGRAM)
    first.add_argument("--config", choices=tuple(CONFIGS))
    first.add_argument("--weights", type=Path)
    first.add_argument("--adapter", type=Path)
    first.add_argument("--ignore-config-fields", nargs="*", default=())
    first.add_argument("--name")
    first.add_argument("--runs", type=Path, default=RunConfig.runs)
    first.add_argument("--resume", action="store_true")
    early, _ = first.parse_known_args(arguments)
    if early.resume:
        folder = folder_to_resume(early.runs, early.name, default_name(early.config, early.weights))
        stored = read_record(folder).config
        config = _read_all(arguments, dataclasses.replace(stored, name=folder.name))
        steps, taken = config.train.steps, max(steps_in(folder / "checkpoints"), default=0)
        as_before = dataclasses.replace(config.train, steps=stored.train.steps)
        check_same(dataclasses.replace(config, train=as_before), stored, folder / "config.json")
        if steps < taken:
            raise RunError(f"--steps must be at least {taken}, the steps that {folder} has done, got {steps}")
        return config, folder
    if early.weights is None:
        if early.adapter is not None:
            first.error(f"--adapter requires the --weights that it was trained on, got only {early.adapter}")
        return _read_all(arguments, CONFIGS[early.config or "tiny"]), None
    defaults = fine_tuning(early.config, early.weights, _shape_of(early.weights, early.ignore_config_fields))
    if early.adapter is not None:
        with naming("--adapter"):
            adapter = read_adapter_config(early.adapter, trains=True)
        defaults = dataclasses.replace(defaults, lora=adapter)
    config = _read_all(arguments, defaults)
    check_shape(config.model, early.weights, config.ignore_config_fields)
    if early.adapter is not None:
        _check_adapter(config.lora, defaults.lora)
    return config, None


def _check_adapter(requested: LoraConfig, found: LoraConfig) -> None:
    """Raises RunError unless the shape of the adapters in a folder matches the options; other options may differ."""
    for name in ("lora_rank", "lora_alpha", "lora_targets", "dora"):
        ours, theirs = getattr(requested, name), getattr(found, name)
        if ours != theirs:
            raise RunError(f"--{name.replace('_', '-')} must be {theirs}, as in the folder of --adapter, got {ours}")


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
    _check_used(config, defaults)
    return config


def _check_used(config: RunConfig, defaults: RunConfig) -> None:
    """Raises UsageError if an option is given that another option leaves without effect."""
    train, rope = config.train, config.model.rope
    unused = dict.fromkeys(UNUSED.get(train.optimizer, ()), f"--optimizer {train.optimizer}")
    if train.batch_tokens is not None:
        unused["batch_size"] = "--batch-tokens"
    of_others = [name for name in vars(rope) if name not in {"rope_type", *USED[rope.rope_type]}]
    unused |= dict.fromkeys(of_others, f"--rope-type {rope.rope_type}")
    given, before = ({**vars(one.train), **vars(one.model.rope)} for one in (config, defaults))
    for name, other in unused.items():
        if given[name] != before[name]:
            raise UsageError(f"--{name.replace('_', '-')} has no effect with {other}, got {given[name]}")


def _shape_of(weights: Path, ignored: Sequence[str]) -> ModelConfig:
    with naming("--weights"):
        return read_config(weights, ignored)


def check_shape(requested: ModelConfig, weights: Path, ignored: Sequence[str]) -> None:
    """Raises RunError unless the model in a folder matches the options; max_seq_len may be smaller."""
    found = _shape_of(weights, ignored)
    if different := differing(dataclasses.replace(requested, max_seq_len=found.max_seq_len), found):
        shown = ", ".join(
            f"{name} {theirs!r} in the folder, got {ours!r}" for name, (ours, theirs) in different.items()
        )
        raise RunError(f"--weights: the options do not match the model in {weights}: {shown}")
    if requested.max_seq_len > found.max_seq_len:
        raise RunError(
            f"--max-seq-len must be at most {found.max_seq_len} (max_position_embeddings in {weights}), "
            f"got {requested.max_seq_len}"
        )
