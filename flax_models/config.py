"""The options of a training run, the named configs, and how a run's options are written down and read back.

Only what the command line offers stands here; `flax_models.train` turns it into a command line.
"""

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from flax_models.errors import RunError
from flax_models.families import PUBLISHED, published
from flax_models.model_config import ModelConfig

ConfigName = Literal[
    "tiny",
    "micro",
    "llama2-7b",
    "llama3-8b",
    "llama3.2-1b",
    "llama3.2-3b",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-7b",
    "qwen3-0.6b",
    "qwen3-8b",
    "mistral-7b",
    "gemma-2b",
    "gemma2-2b",
    "gemma2-9b",
    "phi3-mini",
]

# May differ between a run and its continuation: they change what is seen, never what is learned. The text may have
# moved: its hash says whether it is the same.
FREE_ON_RESUME = frozenset({"resume", "runs", "name", "data", "log_every", "prompt", "sample_tokens", "profile"})


@dataclass(frozen=True)
class TrainConfig:
    """How the model is trained."""

    steps: int = 2000
    """Optimiser steps of the whole run."""
    batch_size: int = 2
    """Sequences a step; each is --max-seq-len tokens long."""
    accumulate: int = 1
    """Micro-batches that a step's sequences are worked through in, one after another: less memory, the same step."""
    learning_rate: float = 2e-3
    """Peak of the schedule: linear warm-up, then a cosine down to zero."""
    warmup_steps: int = 100
    """Steps of the warm-up."""
    weight_decay: float = 0.1
    """AdamW's decay of matrices; norms are left alone."""
    beta1: float = 0.9
    """AdamW's average of gradients."""
    beta2: float = 0.997
    """AdamW's average of squared gradients; steps of few tokens want a long one."""
    clip_norm: float = 1.0
    """Longest gradient; longer ones are scaled down to it."""
    z_loss_weight: float = 0.0
    """Adds so much times the square of the logits' log-sum-exp to each token's training loss; PaLM takes 1e-4."""
    label_smoothing: float = 0.0
    """Share of each target that is spread over the vocabulary in the training loss."""
    held_out_windows: int = 256
    """Most held-out sequences the held-out loss and the baselines are measured on."""
    eval_every: int = 250
    """Steps between held-out losses; 0 for one at the end only."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last step always has one."""
    log_every: int = 20
    """Steps between fetches of what the device computed; every step is written to metrics.jsonl whatever it is."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "held_out_windows", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must be at least 1, got {getattr(self, name)}")
        for name in ("eval_every", "warmup_steps", "weight_decay", "z_loss_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_flag(name)} must not be negative, got {getattr(self, name)}")
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{_flag(name)} must be positive, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must lie in [0, 1), got {getattr(self, name)}")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"--label-smoothing must lie in [0, 1], got {self.label_smoothing}")
        if self.batch_size % self.accumulate:
            raise ValueError(f"--accumulate must divide --batch-size {self.batch_size}, got {self.accumulate}")


@dataclass(frozen=True)
class RunConfig:
    """Train a small language model through the fused linear + cross-entropy loss."""

    config: ConfigName = "tiny"
    """Named config that sets every default below: tiny (about two minutes on two cores), micro (seconds), or the shape
    of a published model, for a large GPU."""
    data: tuple[Path, ...] = ()
    """Text files or folders to train on; none: the Python standard library's sources."""
    name: str | None = None
    """Name of the run, its folder under --runs; none: the config's name, numbered if it is taken."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    resume: bool = False
    """Continue a run from its last checkpoint, with the options it was started with."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    prompt: str = ""
    """Text that the sample at the end continues; empty: the beginning of a document."""
    sample_tokens: int = 160
    """Longest sample at the end, in tokens."""
    profile: bool = False
    """Trace some steps into the run's folder, and say at the end where the time of steps went."""
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def _of_published_shape(name: ConfigName) -> RunConfig:
    """Returns a run from random weights of a published model's shape: bf16 products, float32 parameters.

    Sequences have 4,096 tokens at most; the optimiser's numbers are those of Llama's pretraining (Touvron et al.,
    "LLaMA", section 2.3).
    """
    shape = published(name)
    model = dataclasses.replace(shape, max_seq_len=min(shape.max_seq_len, 4096), dtype="bfloat16", remat="attention")
    return RunConfig(config=name, model=model, train=TrainConfig(learning_rate=3e-4, beta2=0.95, warmup_steps=200))


# tiny, 2,000 steps, held-out loss: 4.89 at beta2 0.997, 4.96 at 0.99; 4.91 at learning rate 3e-3. At beta2 0.99 a width
# of 192 gives 5.04 and takes a fifth longer, and an untied head 4.99. At beta2 0.95 and learning rate 1.5e-3: 5.16.
CONFIGS: dict[ConfigName, RunConfig] = {
    "tiny": RunConfig(),
    "micro": RunConfig(
        config="micro",
        model=ModelConfig(
            vocab_size=1024,
            hidden_size=64,
            num_layers=2,
            num_heads=2,
            head_dim=32,
            intermediate_size=128,
            max_seq_len=64,
        ),
        train=TrainConfig(
            steps=400, batch_size=4, learning_rate=1e-2, warmup_steps=40, eval_every=100, checkpoint_every=200
        ),
    ),
    **{name: _of_published_shape(name) for name in get_args(ConfigName) if name in PUBLISHED},
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def to_json(config: RunConfig) -> dict[str, Any]:
    """Returns the options as plain JSON."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_json(values: dict[str, Any]) -> RunConfig:
    """Returns the options that `to_json` wrote; raises RunError naming a field it does not know or finds missing."""
    return _build(RunConfig, values)


def _build[T](cls: type[T], values: dict[str, Any]) -> T:
    hints = typing.get_type_hints(cls)
    if odd := set(values) ^ set(hints):
        raise RunError(
            f"config.json and this version differ in {', '.join(sorted(odd))}: it was written by another version"
        )
    return cls(**{name: _value(hints[name], value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value)
    if typing.get_origin(hint) is tuple:
        return tuple(typing.get_args(hint)[0](item) for item in value)
    if typing.get_origin(hint) in (Literal, types.UnionType):
        return value
    return hint(value)


def check_same(config: RunConfig, stored: RunConfig, where: Path) -> None:
    """Raises RunError naming the first option in which a continuation differs from the run that it continues."""
    ours, theirs = _flat(to_json(config)), _flat(to_json(stored))
    for name, value in ours.items():
        if name not in FREE_ON_RESUME and value != theirs[name]:
            raise RunError(
                f"--resume continues a run with its own options: "
                f"{_flag(name)} is {theirs[name]} in {where}, got {value}"
            )


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat
