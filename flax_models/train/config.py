"""The options of a training run, the named configs, and how a run's options are written down and read back.

Only what the command line offers stands here; `flax_models.train` turns it into a command line.
"""

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flax_models.errors import RunError
from flax_models.model.config import ModelConfig
from flax_models.model.families import PUBLISHED
from flax_models.model.lora_config import LoraConfig

if TYPE_CHECKING:
    type ConfigName = str
else:  # at run time the names that there are, for the command line and for config.json
    ConfigName = Literal["tiny", "micro", *PUBLISHED]

Optimizer = Literal["adamw", "muon", "schedule_free_adamw", "adafactor"]
UNUSED: dict[Optimizer, tuple[str, ...]] = {"adafactor": ("beta1", "beta2")}  # options that an optimiser does not read
Packing = Literal["windows", "best_fit", "none"]

# May differ between a run and its continuation: they change what is seen, never what is learned. The text may have
# moved: its hash says whether it is the same.
FREE_ON_RESUME = frozenset({"resume", "runs", "name", "data", "log_every", "prompt", "sample_tokens", "profile"})


@dataclass(frozen=True)
class TrainConfig:
    """How the model is trained."""

    steps: int = 2000
    """Optimiser steps of the whole run. With --resume it continues a run, also a finished one, to this many steps: the
    schedule is laid over the new number, so the learning rate goes on with the value that it has there at that step."""
    batch_size: int = 2
    """Rows a step; each is --max-seq-len tokens long."""
    batch_tokens: int | None = None
    """Tokens a step, padding among them, in place of --batch-size: as many rows of --max-seq-len as they fill."""
    packing: Packing | None = None
    """How rows are filled: windows of all texts on end; best_fit, whole dialogues or texts that do not see each other;
    none, one of these a row. Without a name: windows for texts, best_fit for dialogues."""
    accumulate: int = 1
    """Micro-batches that a step's sequences are worked through in, one after another: less memory, the same step."""
    optimizer: Optimizer = "adamw"
    """What takes the steps: adamw; muon (the blocks' matrices by orthogonalised momentum, the rest by adamw);
    schedule_free_adamw (judged and saved by an average of the parameters); adafactor (the least memory)."""
    learning_rate: float = 2e-3
    """Peak of the schedule: linear warm-up, then a cosine down to zero; schedule_free_adamw stays at the peak."""
    warmup_steps: int = 100
    """Steps of the warm-up."""
    weight_decay: float = 0.1
    """Decay of matrices, times the learning rate; norms are left alone."""
    beta1: float = 0.9
    """AdamW's average of gradients; schedule_free_adamw's share of the average in what gradients are taken at. Not for
    adafactor, nor for muon's own matrices, whose momentum is 0.95."""
    beta2: float = 0.997
    """AdamW's average of squared gradients; steps of few tokens want a long one. Not for adafactor."""
    clip_norm: float = 1.0
    """Longest gradient; longer ones are scaled down to it. inf: none is."""
    z_loss_weight: float = 0.0
    """Adds so much times the square of the logits' log-sum-exp to each token's training loss; PaLM takes 1e-4."""
    label_smoothing: float = 0.0
    """Share of each target that is spread over the vocabulary in the training loss."""
    cast_head: bool = True
    """Whether the loss takes a copy of the head in the computation's dtype, as other matrices are multiplied: three
    products where a float32 head takes four, for the copy's memory and a gradient that is rounded to that dtype.
    --no-cast-head leaves the head as it is kept."""
    freeze: tuple[str, ...] = ()
    """Parts of the model that keep their values, by name: embedding (a tied head with it), head, norms, blocks,
    attention, feed_forward, attention.query, ...; their gradients are not computed."""
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
        for name in ("eval_every", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_flag(name)} must not be negative, got {getattr(self, name)}")
        for name in ("weight_decay", "z_loss_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{_flag(name)} must be finite and not negative, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"--learning-rate must be positive and finite, got {self.learning_rate}")
        if not self.clip_norm > 0:
            raise ValueError(f"--clip-norm must be positive, got {self.clip_norm}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must lie in [0, 1), got {getattr(self, name)}")
        if self.optimizer == "schedule_free_adamw" and not self.beta1:
            raise ValueError("--beta1 must be positive with --optimizer schedule_free_adamw, got 0")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"--label-smoothing must lie in [0, 1], got {self.label_smoothing}")
        if self.batch_tokens is None and self.batch_size % self.accumulate:
            raise ValueError(f"--accumulate must divide --batch-size {self.batch_size}, got {self.accumulate}")

    def with_rows(self, length: int) -> "TrainConfig":
        """Returns the config with the rows a step that --batch-tokens fill, of rows of `length` tokens.

        Raises:
            RunError: they fill none, or --accumulate does not divide them.
        """
        if self.batch_tokens is None:
            return self
        rows = self.batch_tokens // length
        if rows < 1:
            raise RunError(f"--batch-tokens must be at least --max-seq-len {length}, got {self.batch_tokens}")
        if rows % self.accumulate:
            raise RunError(
                f"--accumulate must divide the {rows} rows of {length} tokens that --batch-tokens fill, "
                f"got {self.accumulate}"
            )
        return dataclasses.replace(self, batch_size=rows, batch_tokens=None)


@dataclass(frozen=True)
class RunConfig:
    """Train a language model through the fused linear + cross-entropy loss."""

    config: ConfigName | None = "tiny"
    """Named config that sets every default below: tiny (about two minutes on two cores), micro (seconds), or the shape
    of a published model, for a large GPU; none: that of the folder of --weights."""
    weights: Path | None = None
    """Hugging Face folder whose weights and tokenizer the run starts from; none: random weights."""
    tokenizer: Path | None = None
    """Hugging Face folder whose tokenizer random weights are trained with; none: one made from the text."""
    ignore_config_fields: tuple[str, ...] = ()
    """Fields in the config.json of --weights to ignore, though this decoder does not know them: only fields that do not
    change what the model computes."""
    data: tuple[Path, ...] = ()
    """Texts or dialogues: text files, JSON lines, or folders of them (docs/data.md); none: the Python standard
    library's sources."""
    name: str | None = None
    """Name of the run, its folder under --runs; none: the config's name, or that of --weights, numbered if it is
    taken."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    resume: bool = False
    """Continue a run from its last checkpoint, with the options it was started with. On a CPU the numbers are those of
    an uninterrupted run to the bit, and on a GPU if both ran under XLA_FLAGS=--xla_gpu_deterministic_ops=true."""
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
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        if self.config is None and self.weights is None:
            raise ValueError("--config must name a config where there are no --weights, got none")
        if self.weights is not None and self.tokenizer is not None:
            raise ValueError(f"--tokenizer goes with random weights, --weights has its own: got {self.tokenizer}")
        if self.weights is None and self.ignore_config_fields:
            raise ValueError(
                f"--ignore-config-fields goes with --weights, got {' '.join(self.ignore_config_fields)} alone"
            )
        if self.weights is None and self.lora.adapter is not None:
            raise ValueError(f"--adapter goes with the --weights that it was trained on, got {self.lora.adapter} alone")


def _to_train(shape: ModelConfig) -> ModelConfig:
    """Returns a published shape as it is trained: 4,096 tokens at most, bf16 products over float32 parameters.

    Each layer is compiled by itself, which takes two to three times as long: a loop over the layers copies what each of
    them keeps for the backward pass into arrays of all layers, and keeps more of it (docs/throughput.md has figures).
    """
    how: dict[str, Any] = {"dtype": "bfloat16", "remat": "attention", "scan_layers": False}
    return dataclasses.replace(shape, max_seq_len=min(shape.max_seq_len, 4096), **how)


def _of_published_shape(name: str) -> RunConfig:
    """Returns a run from random weights of a published model's shape.

    The optimiser's numbers are those of Llama's pretraining (Touvron et al., "LLaMA", section 2.3).
    """
    train = TrainConfig(learning_rate=3e-4, beta2=0.95, warmup_steps=200)
    return RunConfig(config=name, model=_to_train(PUBLISHED[name]), train=train)


def fine_tuning(name: str | None, weights: Path, shape: ModelConfig) -> RunConfig:
    """Returns the defaults of a run that starts from a folder's weights.

    The optimiser's numbers are those of Llama 2's fine-tuning (Touvron et al., "Llama 2", section 3.1).

    Args:
        name: of the config that the folder is said to be of, None for its own shape.
        weights: the folder.
        shape: what its config.json says.
    """
    named = RunConfig(config=None, weights=weights, model=_to_train(shape)) if name is None else CONFIGS[name]
    train = TrainConfig(learning_rate=2e-5, beta2=0.95, warmup_steps=100)
    return dataclasses.replace(named, weights=weights, train=train)


# tiny, 2,000 steps, held-out loss: 4.89 at beta2 0.997, 4.96 at 0.99; 4.91 at learning rate 3e-3. At beta2 0.99 a width
# of 192 gives 5.04 and takes a fifth longer, and an untied head 4.99. At beta2 0.95 and learning rate 1.5e-3: 5.16.
CONFIGS: dict[str, RunConfig] = {
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
    **{name: _of_published_shape(name) for name in PUBLISHED},
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
        return tuple(_value(typing.get_args(hint)[0], item) for item in value)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # of a type and None
        return None if value is None else _value(typing.get_args(hint)[0], value)
    if typing.get_origin(hint) is Literal:
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
