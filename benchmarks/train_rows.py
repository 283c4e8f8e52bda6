"""What `benchmarks.train` measures: named rows in groups, and the batches that they train on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.timing import BATCHES
from flax_models.data.batches import IGNORED, Batch
from flax_models.data.packing import best_fit, room_for
from flax_models.model.config import Dtype, ModelConfig, Remat
from flax_models.model.families import PUBLISHED
from flax_models.train.accounting import device_peak, flops_per_token
from flax_models.train.mesh import mesh_sizes

Kind = Literal["speed", "check", "largest", "converge"]
Loss = Literal["fused", "unfused", "hf", "hf+liger"]
Mode = Literal["full", "lora"]
Data = Literal["whole", "padded", "packed"]
Size = tuple[int, int | None]

MODELS = ("llama3.2-1b", "qwen2.5-0.5b")
# Tokens of a sequence, and sequences of a step; none: the most that fit.
LONG, SHORT, MOST = (4096, 8), (512, 16), (4096, None)
CHECKED = (512, 2)
CHECKED_BY = {"llama3-8b": "llama3.2-1b"}  # of a model whose check in float32 needs more memory than one GPU has
LORA_RANK = 32
POOL = 1024  # examples that are packed together, for a batch to draw rows from
SPREAD = 0.8  # of the logarithms of their lengths
MESHES = None, "data=2", "fsdp=2"
SEEDS, REPEATS = 4, 2  # runs on text of each loss
SMOKE = ModelConfig(  # for the tests of the harness, on a CPU
    vocab_size=512, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)


# What a row's name says where it is not as usual.
OPTIONS = [
    "remat",
    "attention",
    "data",
    "optimizer",
    "compile",
    "scan_layers",
    "cast_head",
    "mesh",
    "seed",
    "repeat",
]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
        config: name of a published shape, or "smoke".
        loss: "fused" is flax_models' `Trainer` as it is, "unfused" the same with optax's loss on the logits, "hf"
            transformers and PyTorch, with FSDP2 on a mesh, "hf+liger" those with Liger's kernels.
        mode: "full" fine-tuning, or "lora": adapters of rank LORA_RANK on every projection.
        seq: T, tokens of a row.
        batch: B, rows of a step; None: the most that fit.
        kind: "speed" of steps; "check": fused against unfused, loss and gradients; "largest" batch that fits, and its
            speed; "converge": losses of a run on text.
        remat: what the backward pass computes again.
        attention: "cudnn" or "xla" in JAX, "sdpa" in PyTorch.
        data: "whole" rows; "padded": an example and padding in each; "packed": several examples in a row.
        optimizer: its name in `flax_models.train.config`.
        compile: have PyTorch compile the model; JAX always does.
        scan_layers: compile one block and loop over the layers; otherwise each layer separately.
        cast_head: the fused loss takes a copy of the head in the computation's dtype, as the trainer does by default
            otherwise; the unfused one does so anyway, and so do all where the head is frozen.
        mesh: the trainer's option `--mesh`; None: one device.
        seed: of the parameters, and of the order of what a run on text reads.
        repeat: which of several rows that differ in nothing.
    """

    config: str
    loss: Loss = "fused"
    mode: Mode = "full"
    seq: int = LONG[0]
    batch: int | None = LONG[1]
    kind: Kind = "speed"
    remat: Remat = "none"
    attention: Literal["cudnn", "xla", "sdpa"] = "cudnn"
    data: Data = "whole"
    optimizer: str = "adamw"
    compile: bool = True
    scan_layers: bool = True
    cast_head: bool = False
    mesh: str | None = None
    seed: int = 0
    repeat: int = 0

    @property
    def in_torch(self) -> bool:
        return self.loss in ("hf", "hf+liger")

    @property
    def gpus(self) -> int:
        return _gpus(self.mesh)

    @property
    def name(self) -> str:
        """Returns what the row is called; no other row is called the same."""
        size = f"{self.seq}x{self.batch}" if self.batch else str(self.seq)
        words = [self.config, self.mode] if self.kind == "check" else [self.config, self.loss, self.mode, size]
        usual = {field.name: field.default for field in fields(self)}
        usual["attention"] = _usual_attention(self.config, self.loss)
        for option in OPTIONS:
            if getattr(self, option) != usual[option]:
                words.append(f"{option}={str(getattr(self, option)).lower()}")
        return "/".join(words if self.kind == "speed" else [self.kind, *words])

    def check(self) -> "Row":
        """Returns the check that must have passed before a row of JAX is measured, on one device."""
        return _row(CHECKED_BY.get(self.config, self.config), "fused", self.mode, CHECKED, kind="check")

    def model(self, dtype: Dtype = "bfloat16") -> ModelConfig:
        """Returns the shape as it is trained: matmuls in `dtype`, float32 parameters."""
        shape = SMOKE if self.config == "smoke" else PUBLISHED[self.config]
        by = "cudnn" if self.attention == "cudnn" and dtype == "bfloat16" else "xla"
        how: dict[str, Any] = {"remat": self.remat, "scan_layers": self.scan_layers, "attention_implementation": by}
        return replace(shape, max_seq_len=self.seq, dtype=dtype, **how)


def _usual_attention(config: str, loss: Loss) -> Literal["cudnn", "xla", "sdpa"]:
    if loss in ("hf", "hf+liger"):
        return "sdpa"
    return "xla" if config == "smoke" else "cudnn"


def _gpus(mesh: str | None) -> int:
    return 1 if mesh is None else math.prod(mesh_sizes(mesh).values())


def _row(config: str, loss: Loss = "fused", mode: Mode = "full", size: Size = LONG, **options: Any) -> Row:
    return Row(config, loss, mode, *size, **{"attention": _usual_attention(config, loss), **options})


def _trained(config: str, loss: Loss = "fused", mode: Mode = "full", size: Size = LONG, **options: Any) -> Row:
    """Returns a row with the defaults of published shapes: each layer compiled separately, the head cast."""
    if loss not in ("hf", "hf+liger"):
        options = {"scan_layers": False, "cast_head": (loss, mode) == ("fused", "full"), **options}
    return _row(config, loss, mode, size, **options)


def _added_one_by_one(config: str) -> list[Row]:
    """Returns rows of which each has one thing more than the one before."""
    rows = [_row(config, "unfused", remat="full", attention="xla", data="padded", cast_head=True)]
    changes: tuple[dict[str, Any], ...] = (
        {"attention": "cudnn"},
        {"loss": "fused"},
        {"data": "packed"},
        {"remat": "none"},
        {"scan_layers": False},
        {"optimizer": "adafactor"},
    )
    for change in changes:
        rows.append(replace(rows[-1], **change))
    return rows


_OURS: tuple[Loss, ...] = ("fused", "unfused")
_MODES: tuple[Mode, ...] = ("full", "lora")
_PEERS: tuple[Loss, ...] = ("hf", "hf+liger")
_LARGEST: tuple[tuple[Loss, dict[str, Any]], ...] = (
    ("fused", {"cast_head": True}),
    ("unfused", {}),
    ("hf+liger", {"compile": False}),
)

# In the order of measuring: what matters most first.
GROUPS: dict[str, tuple[Row, ...]] = {
    "full": tuple(
        _trained(model, loss, size=size) for size in (LONG, SHORT) for model in MODELS for loss in (*_OURS, *_PEERS)
    ),
    "memory": tuple(kind(model, loss, remat="full") for kind in (_trained, _row) for model in MODELS for loss in _OURS),
    "float32-head": tuple(_trained(model, size=size, cast_head=False) for size in (LONG, SHORT) for model in MODELS),
    "layers": tuple(
        _row(model, size=size, remat=remat, scan_layers=scan, cast_head=True)
        for size in (LONG, SHORT)
        for model in MODELS
        for remat, scan in (("none", True), ("elementwise", True), ("elementwise", False))
    ),
    "packed": tuple(_trained(model, size=size, data="packed") for size in (LONG, SHORT) for model in MODELS),
    "lora": tuple(_trained(model, loss, "lora", size) for size in (LONG, SHORT) for model in MODELS for loss in _OURS),
    "largest": tuple(
        kind(model, loss, size=MOST, kind="largest", remat="full", **options)
        for kind in (_trained, _row)
        for model in MODELS
        for loss, options in _LARGEST
    ),
    "converge": tuple(
        _trained(MODELS[1], loss, size=SHORT, kind="converge", seed=seed, repeat=repeat)
        for seed in range(SEEDS)
        for loss in _OURS
        for repeat in range(REPEATS)
    ),
    "ablation": tuple(_added_one_by_one(MODELS[0])),
    "remat": (
        *(_row(MODELS[1], size=SHORT, attention="xla", remat=remat) for remat in ("none", "attention", "full")),
        _row(MODELS[1], size=SHORT, remat="full"),
    ),
    "optimizer": tuple(_trained(MODELS[0], optimizer=name) for name in ("adafactor", "muon", "schedule_free_adamw")),
    # The batch is that of all GPUs. The short rows check each other's first losses.
    "mesh": (
        _trained(MODELS[0], size=(512, 4)),
        *(
            _trained(MODELS[0], size=(tokens, rows * _gpus(mesh)), mesh=mesh)
            for tokens, rows in ((512, 2), LONG)
            for mesh in MESHES
        ),
    ),
    "mesh-8b": tuple(
        _trained("llama3-8b", size=(4096, 8), mesh="fsdp=2", remat="full", optimizer=name)
        for name in ("adafactor", "adamw")
    ),
    "mesh-hf": (
        _row(MODELS[0], "hf+liger", compile=False),
        _row(MODELS[0], "hf+liger", size=(4096, 16), compile=False, mesh="fsdp=2"),
        _row("llama3-8b", "hf+liger", size=(4096, 8), compile=False, mesh="fsdp=2", remat="full"),
    ),
    "lora-peers": tuple(
        _row(model, loss, "lora", size) for size in (LONG, SHORT) for model in MODELS for loss in _PEERS
    ),
    "liger": tuple(
        _row(model, "hf+liger", mode, size, compile=False)
        for mode in _MODES
        for size in (LONG, SHORT)
        for model in MODELS
    ),
    "ablation-qwen": tuple(_added_one_by_one(MODELS[1])),
    "smoke": (
        *(_row("smoke", loss, size=(64, 2)) for loss in (*_OURS, *_PEERS)),
        *(_row("smoke", loss, "lora", (64, 2)) for loss in (*_OURS, "hf")),
        *(_row("smoke", size=(64, 2), data=data) for data in ("padded", "packed")),
        _row("smoke", size=(64, None), kind="largest"),
        _row("smoke", size=(64, 2), kind="converge"),
        *(_row("smoke", size=(64, 4), mesh=mesh) for mesh in MESHES),
        _row("smoke", "hf", size=(64, 4), compile=False, mesh="fsdp=2"),
    ),
}


def select(names: Sequence[str] | None = None) -> list[Row]:
    """Returns rows in the order of measuring, each once.

    Args:
        names: groups, or names of rows, in which * stands for anything, but for smoke only where that is in the name;
            None: all groups but smoke.

    Raises:
        ValueError: no row has such a name; the message lists the names.

    Example:
        >>> [row.name for row in select(["qwen2.5-0.5b/*fused/full/512x16"])]
        ['qwen2.5-0.5b/fused/full/512x16', 'qwen2.5-0.5b/unfused/full/512x16']
    """
    rows = list(dict.fromkeys(row for group in GROUPS.values() for row in group))
    rows += list(dict.fromkeys(row.check() for row in rows if not row.in_torch))
    if names is None:
        names = [group for group in GROUPS if group != "smoke"]
    chosen: set[Row] = set()
    for name in names:
        candidates = rows if "smoke" in name else [row for row in rows if row.config != "smoke"]
        found = GROUPS.get(name) or [row for row in candidates if fnmatchcase(row.name, name)]
        if not found:
            raise ValueError(f"rows must be of {', '.join(GROUPS)}, or names as {rows[0].name}, got {name}")
        chosen.update(found)
    return [row for row in rows if row in chosen]


class Drawn(NamedTuple):
    """Batches of random tokens, BATCHES of them, and the lengths of all their examples, padding left out."""

    batches: list[Batch]
    lengths: np.ndarray  # (n,) int

    @property
    def tokens(self) -> float:
        """Tokens of a batch that are no padding, on average."""
        return float(np.sum(self.lengths)) / len(self.batches)

    @property
    def padding(self) -> float:
        """Share of the batches' positions."""
        return 1.0 - self.tokens / self.batches[0].tokens.size


def draw(row: Row, batch: int) -> Drawn:
    """Returns the batches of a row, always the same.

    Lengths of examples that are padded or packed are log-normal, as an instruction set's are, with a mean of T/4. They
    are packed by best fit, as `flax_models.data.packing` does it.

    Args:
        row: its shape and data.
        batch: B.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    size, vocab = BATCHES * batch, row.model().vocab_size
    stream = generator.integers(vocab, size=(size, row.seq + 1), dtype=np.int32)
    tokens, targets = stream[:, :-1].copy(), stream[:, 1:].copy()
    examples = np.full((size, 1), row.seq)
    lengths = None
    if row.data == "padded":
        examples = _drawn_lengths(generator, size, row.seq)[:, None]
    elif row.data == "packed":
        examples = _packed(generator, size, row.seq)
        padding = row.seq - examples.sum(axis=1)
        lengths = np.zeros((size, examples.shape[1] + 1), np.int32)
        for line, parts, rest in zip(lengths, examples, padding, strict=True):
            there = [*parts[parts > 0], *([rest] if rest else [])]
            line[: len(there)] = there
    targets[np.arange(row.seq) >= examples.sum(axis=1, keepdims=True)] = IGNORED
    parts = [slice(i, i + batch) for i in range(0, size, batch)]
    batches = [Batch(tokens[i], targets[i], None if lengths is None else lengths[i]) for i in parts]
    return Drawn(batches, examples[examples > 0])


def _drawn_lengths(generator: np.random.Generator, count: int, length: int) -> np.ndarray:
    drawn = generator.lognormal(np.log(length / 4) - SPREAD**2 / 2, SPREAD, count)
    return np.clip(drawn, 2, length).astype(np.int64)


def _packed(generator: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Returns (rows, room) lengths of the examples in packed rows, zeros after the last: a sample of a pool's rows."""
    examples = _drawn_lengths(generator, max(POOL, 16 * rows), length)
    packed = best_fit(examples, length, room_for(examples, length))
    return packed[generator.choice(len(packed), rows, replace=False)]


def speed_figures(
    row: Row, drawn: Drawn, step_ms: float, trained: Mapping[str, int] | None, device_kind: str
) -> dict[str, Any]:
    """Returns the speed of a row's steps, by one formula for all frameworks.

    Args:
        row: its shape and its GPUs. `mfu` is relative to the peak of all of them.
        drawn: what the steps trained on; padding counts neither as tokens nor as flops.
        step_ms: median time of a step.
        trained: names and sizes of the parameters that train, as `accounting.flops_per_token` takes them.
        device_kind: of JAX or PyTorch, for the peak.
    """
    tokens_per_s = 1000 * drawn.tokens / step_ms
    flops, peak = flops_per_token(row.model(), drawn.lengths, trained), device_peak(device_kind)
    return {
        "tokens_per_s": tokens_per_s,
        "mfu": None if peak is None else tokens_per_s * flops / (row.gpus * peak),
        "flops_per_token": flops,
        "tokens": drawn.tokens,
        "padding": drawn.padding,
        "mean_length": float(np.mean(drawn.lengths)),
    }
