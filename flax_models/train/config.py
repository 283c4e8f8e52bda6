"""The options of a training run, the named configs, and the JSON form of a run's options.

The fields of these dataclasses are the options of the command line of `flax_models.train`.
"""

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flax_models.errors import RunError, UsageError
from flax_models.model.config import MOST, ModelConfig
from flax_models.model.families import PUBLISHED
from flax_models.model.lora_config import LoraConfig
from flax_models.train.mesh import mesh_sizes

if TYPE_CHECKING:
    type ConfigName = str
else:  # at run time, the valid names, for the command line and for config.json
    ConfigName = Literal["tiny", "micro", *PUBLISHED]

Optimizer = Literal["adamw", "muon", "schedule_free_adamw", "adafactor"]
UNUSED: dict[Optimizer, tuple[str, ...]] = {"adafactor": ("beta1", "beta2")}  # options that an optimizer does not use
Packing = Literal["windows", "best_fit", "none"]

MOST_SAMPLE_TOKENS = 1_000_000  # the random keys of all tokens are made at once
SEEDS = 2**32  # JAX uses the lowest 32 bits: larger seeds would repeat the results of smaller ones

# Options that may differ between a run and its continuation, because they do not affect the trained model, but for the
# rounding of another mesh. The text may have another path; its hash must be the same.
FREE_ON_RESUME = frozenset(
    {"resume", "runs", "name", "data", "log_every", "prompt", "sample_tokens", "profile", "mesh"}
)
# Options of one process. They are not options of its run, so config.json does not have them.
OF_PROCESS = ("coordinator", "process_count", "process_id")


@dataclass(frozen=True)
class TrainConfig:
    """How the model is trained."""

    steps: int = 2000
    """Optimizer steps of the whole run. With --resume, this extends a run, including a finished one, to this many
    steps. The learning-rate schedule is recomputed for the new number of steps, and the run continues with its value at
    the current step."""
    batch_size: int = 2
    """Rows per step, each of --max-seq-len tokens."""
    batch_tokens: int | None = None
    """Tokens per step, including padding, instead of --batch-size: as many rows of --max-seq-len as they fill."""
    packing: Packing | None = None
    """How rows are filled. windows: windows of the concatenated texts. best_fit: several whole dialogues or texts per
    row, without attention between them. none: one dialogue or text per row. Default: windows for texts, best_fit for
    dialogues."""
    accumulate: int = 1
    """Number of micro-batches per step (gradient accumulation). More micro-batches need less memory and give the same
    step."""
    optimizer: Optimizer = "adamw"
    """adamw; muon (orthogonalized momentum for the blocks' matrices, adamw for all other parameters);
    schedule_free_adamw (evaluates and saves an average of the parameters); adafactor (least memory)."""
    learning_rate: float = 2e-3
    """Peak learning rate: linear warm-up, then cosine decay to zero; schedule_free_adamw stays at the peak."""
    warmup_steps: int = 100
    """Number of warm-up steps."""
    weight_decay: float = 0.1
    """Weight decay of matrices, multiplied by the learning rate; norms and biases have none."""
    beta1: float = 0.9
    """Decay rate of AdamW's average of gradients. For schedule_free_adamw, the weight of the averaged parameters in the
    point at which gradients are computed. Not used by adafactor, nor by muon for the blocks' matrices, whose momentum
    is 0.95."""
    beta2: float = 0.997
    """Decay rate of AdamW's average of squared gradients; use a value close to 1 if steps have few tokens. Not used by
    adafactor."""
    clip_norm: float = 1.0
    """Maximum norm of the gradient; larger gradients are scaled down. inf: no clipping."""
    z_loss_weight: float = 0.0
    """Weight of the squared log-sum-exp of the logits, which is added to each token's training loss; PaLM uses 1e-4."""
    label_smoothing: float = 0.0
    """Share of each target that is spread over the vocabulary in the training loss."""
    cast_head: bool = True
    """Whether to cast the head to the computation's dtype before the loss, like the other matrices. With the cast, the
    loss takes three matmuls instead of four for a float32 head. The cast needs memory for the copy, and the gradient of
    the head is rounded to that dtype. --no-cast-head passes the head in the dtype of the parameters."""
    freeze: tuple[str, ...] = ()
    """Parameters that do not train, by name: embedding (includes a tied head), head, norms, blocks, attention,
    feed_forward, attention.query, ... Their gradients are not computed."""
    held_out_windows: int = 256
    """Maximum number of held-out sequences for the held-out loss and the baselines."""
    eval_every: int = 250
    """Steps between evaluations of the held-out loss; 0: only at the end."""
    checkpoint_every: int = 500
    """Steps between checkpoints; there is always one at the last step."""
    log_every: int = 20
    """Steps between transfers of metrics from the device. metrics.jsonl has a line for every step in any case."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and value > MOST:
                raise ValueError(f"{_flag(name)} must be at most {MOST:,}, got {value}")
        for name in ("steps", "batch_size", "accumulate", "held_out_windows", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must be at least 1, got {getattr(self, name)}")
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise ValueError(f"--batch-tokens must be at least 1, got {self.batch_tokens}")
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
                raise ValueError(f"{_flag(name)} must be in [0, 1), got {getattr(self, name)}")
        if self.optimizer == "schedule_free_adamw" and not self.beta1:
            raise ValueError("--beta1 must be positive with --optimizer schedule_free_adamw, got 0")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"--label-smoothing must be in [0, 1], got {self.label_smoothing}")
        if self.batch_tokens is None and self.batch_size % self.accumulate:
            raise ValueError(f"--accumulate must divide --batch-size {self.batch_size}, got {self.accumulate}")

    def with_rows(self, length: int) -> "TrainConfig":
        """Returns the config with batch_tokens converted to batch_size, for rows of `length` tokens.

        Raises:
            UsageError: --batch-tokens is less than one row, or --accumulate does not divide the number of rows.
        """
        if self.batch_tokens is None:
            return self
        rows = self.batch_tokens // length
        if rows < 1:
            raise UsageError(f"--batch-tokens must be at least --max-seq-len {length}, got {self.batch_tokens}")
        if rows % self.accumulate:
            raise UsageError(
                f"--accumulate must divide the {rows} rows of {length} tokens of --batch-tokens, got {self.accumulate}"
            )
        return dataclasses.replace(self, batch_size=rows, batch_tokens=None)


@dataclass(frozen=True)
class RunConfig:
    """Train a language model with the fused linear + cross-entropy loss."""

    config: ConfigName | None = "tiny"
    """Named config, which sets the defaults of all other options: tiny (three to six minutes on two cores), micro
    (seconds), or the shape of a published model, for a large GPU; None: the shape of the model in --weights."""
    weights: Path | None = None
    """Hugging Face folder whose weights and tokenizer the run starts from; None: random weights."""
    tokenizer: Path | None = None
    """Hugging Face folder whose tokenizer is used with random weights; None: train a tokenizer on the text."""
    ignore_config_fields: tuple[str, ...] = ()
    """Unknown fields in the config.json of --weights to ignore; they must not change what the model computes."""
    data: tuple[Path, ...] = ()
    """Texts or dialogues: text files, JSON lines, or folders of them (docs/data.md); empty: the Python standard
    library's sources."""
    name: str | None = None
    """Name of the run and of its folder in --runs; None: the name of the config or of --weights, with a number if it is
    already in use."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    resume: bool = False
    """Continue a run from its last checkpoint with its original options. On the CPU, the results are bit-for-bit those
    of an uninterrupted run; on a GPU, they are if both runs use XLA_FLAGS=--xla_gpu_deterministic_ops=true."""
    mesh: str | None = None
    """Sizes of the axes of the mesh, such as data=2,fsdp=2,tensor=1, whose product is the number of devices; the others
    have size 1 (docs/scale.md); None: one device. With --resume, it may be another mesh than before."""
    coordinator: str | None = None
    """HOST:PORT of process 0 of a run in several processes, with --process-count and --process-id; None: SLURM, Open
    MPI, Kubernetes or torchrun's variables say which processes there are, if there are several (docs/scale.md)."""
    process_count: int | None = None
    """Number of processes, with --coordinator."""
    process_id: int | None = None
    """Which of the processes this is, from 0, with --coordinator."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    prompt: str = ""
    """Prompt of the sample that is generated at the end; empty: start of a document."""
    sample_tokens: int = 160
    """Maximum length of the sample in tokens."""
    profile: bool = False
    """Write a trace of some steps to the run's folder, and report at the end how the time of a step is spent."""
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        if self.config is None and self.weights is None:
            raise ValueError("--config is required without --weights")
        if self.weights is not None and self.tokenizer is not None:
            raise ValueError(
                f"--tokenizer cannot be used with --weights, whose folder has a tokenizer, got {self.tokenizer}"
            )
        if self.weights is None and self.ignore_config_fields:
            raise ValueError(
                f"--ignore-config-fields requires --weights, got only {' '.join(self.ignore_config_fields)}"
            )
        if self.weights is None and self.lora.adapter is not None:
            raise ValueError(f"--adapter requires the --weights that it was trained on, got only {self.lora.adapter}")
        if self.mesh is not None:
            mesh_sizes(self.mesh)
        for name in OF_PROCESS:
            if self.mesh is None and (value := getattr(self, name)) is not None:
                raise ValueError(f"{_flag(name)} requires --mesh, got only {value}")
        check_seed(self.seed)
        if not 0 <= self.sample_tokens <= MOST_SAMPLE_TOKENS:
            raise ValueError(f"--sample-tokens must be in [0, {MOST_SAMPLE_TOKENS:,}], got {self.sample_tokens}")
        if self.model.num_layers < 1:
            raise ValueError(f"--num-layers must be at least 1, got {self.model.num_layers}")
        if self.model.max_seq_len < 2:
            raise ValueError(
                f"--max-seq-len must be at least 2, got {self.model.max_seq_len}: attention over one token has no "
                "gradient"
            )
        if self.lora.lora_rank and self.train.freeze:
            raise ValueError(
                "--freeze cannot be used with --lora-rank, whose adapters freeze all other parameters, "
                f"got {' '.join(self.train.freeze)}"
            )


def check_seed(seed: int) -> None:
    """Raises ValueError unless a seed is one of JAX's."""
    if not 0 <= seed < SEEDS:
        raise ValueError(f"--seed must be in [0, {SEEDS:,}), got {seed}")


def _to_train(shape: ModelConfig) -> ModelConfig:
    """Returns a published shape with training options: at most 4,096 tokens, bf16 computation, float32 parameters.

    Each layer is compiled separately, which takes two to three times as long. A loop over the layers would copy what
    each layer saves for the backward pass into stacked arrays, and would save more (docs/throughput.md has figures).
    """
    how: dict[str, Any] = {"dtype": "bfloat16", "remat": "attention", "scan_layers": False}
    return dataclasses.replace(shape, max_seq_len=min(shape.max_seq_len, 4096), **how)


def _of_published_shape(name: str) -> RunConfig:
    """Returns the defaults of a run with random weights and the shape of a published model.

    The optimizer's options are those of Llama's pretraining (Touvron et al., "LLaMA", section 2.3).
    """
    train = TrainConfig(learning_rate=3e-4, beta2=0.95, warmup_steps=200)
    return RunConfig(config=name, model=_to_train(PUBLISHED[name]), train=train)


def fine_tuning(name: str | None, weights: Path, shape: ModelConfig) -> RunConfig:
    """Returns the defaults of a run that starts from a folder's weights.

    The optimizer's options are those of Llama 2's fine-tuning (Touvron et al., "Llama 2", section 3.1).

    Args:
        name: named config of --config; None: use `shape`.
        weights: the folder.
        shape: the model's shape in the folder's config.json.
    """
    named = RunConfig(config=None, weights=weights, model=_to_train(shape)) if name is None else CONFIGS[name]
    train = TrainConfig(learning_rate=2e-5, beta2=0.95, warmup_steps=100)
    return dataclasses.replace(named, weights=weights, train=train)


# Held-out loss of tiny after 2,000 steps: 4.89 with beta2 0.997, 4.96 with 0.99; 4.91 with learning rate 3e-3. With
# beta2 0.99, a width of 192 gives 5.04 and takes a fifth longer, and an untied head gives 4.99. With beta2 0.95 and
# learning rate 1.5e-3: 5.16.
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
    """Returns the options of a run as a JSON object."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in OF_PROCESS}
    return json.loads(json.dumps(values, default=str))


def from_json(values: dict[str, Any]) -> RunConfig:
    """Converts the result of `to_json` back; raises RunError, which names the field, if one is unknown or missing."""
    return _build(RunConfig, values)


def _build[T](cls: type[T], values: dict[str, Any]) -> T:
    hints = {name: hint for name, hint in typing.get_type_hints(cls).items() if name not in OF_PROCESS}
    if odd := set(values) ^ set(hints):
        raise RunError(
            f"config.json was written by another version, which differs in these fields: {', '.join(sorted(odd))}"
        )
    return cls(**{name: _value(hints[name], value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value)
    if typing.get_origin(hint) is tuple:
        return tuple(_value(typing.get_args(hint)[0], item) for item in value)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # a type or None
        return None if value is None else _value(typing.get_args(hint)[0], value)
    if typing.get_origin(hint) is Literal:
        return value
    return hint(value)


def check_same(config: RunConfig, stored: RunConfig, where: Path) -> None:
    """Raises RunError, which names the option, if an option differs from that of the run to continue."""
    ours, theirs = _flat(to_json(config)), _flat(to_json(stored))
    for name, value in ours.items():
        if name not in FREE_ON_RESUME and value != theirs[name]:
            raise RunError(
                f"--resume continues a run with its original options: "
                f"{_flag(name)} must be {theirs[name]}, as in {where}, got {value}"
            )


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat
