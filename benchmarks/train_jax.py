"""JAX's side of `benchmarks.train`: the trainer as it is, and the same with optax's loss on the logits.

The step is compiled from shapes, before anything is drawn: what XLA tries out while it compiles is then no part of the
peak. Memory is that of the whole process: parameters, optimizer, batches and all.
"""

import itertools
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.methods import UnavailableError, check_errors, describe, installed, load
from benchmarks.timing import WARM_UP, Sensor, host_blocks
from benchmarks.train_process import Request
from benchmarks.train_rows import LORA_RANK, Row, draw, speed_figures
from flax_models.data.batches import IGNORED, Batch, BatchSampler
from flax_models.data.corpus import load_corpus
from flax_models.hub import weights
from flax_models.model.config import Dtype, ModelConfig
from flax_models.model.decoder import Decoder
from flax_models.model.lora import adapt, adapted_shapes
from flax_models.model.lora_config import LoraConfig
from flax_models.train.accounting import Memory, device_memory, step_memory
from flax_models.train.config import TrainConfig
from flax_models.train.mesh import made_on, make_mesh
from flax_models.train.profile import SKIPPED, TRACED, Tracer, operation_parts, operations, part_times
from flax_models.train.step import StepMetrics, Trainer, TrainState

CONVERGENCE_STEPS = 300
VARIANTS: tuple[tuple[Dtype, bool], ...] = ("float32", False), ("bfloat16", False), ("bfloat16", True)  # and cast_head
SEEN = 0.9  # least share of a step's time that the operations of a split must cover


class LogitsTrainer(Trainer):
    """The trainer with optax's loss on the logits, and nothing else changed."""

    def _loss(self, params: nnx.State, batch: Batch, counted: jax.Array) -> jax.Array:
        hidden, model = self._hidden(params, batch)
        targets = jnp.asarray(batch.targets)
        with jax.named_scope("loss"):
            losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), jnp.maximum(targets, 0))
            return jnp.sum(jnp.where(targets == IGNORED, 0.0, losses)) / counted


def versions() -> dict[str, str]:
    return installed("jax", "jaxlib", "flax", "optax")


def device_name() -> str:
    device = jax.devices()[0]
    return "CPU (times are no results)" if device.platform == "cpu" else device.device_kind


def train_config(row: Row, batch: int, **options: Any) -> TrainConfig:
    """Returns how a row is trained."""
    values = {name: getattr(row, name) for name in ("optimizer", "cast_head")}
    return TrainConfig(**{"batch_size": batch, "learning_rate": 1e-4, "beta2": 0.95, **values, **options})


def make_trainer(row: Row, config: ModelConfig, train: TrainConfig, *, drawn: bool, loss: str | None = None) -> Trainer:
    """Returns the trainer of a row.

    Args:
        row: its mode, its loss and its seed.
        config: of the model.
        train: of the optimizer.
        drawn: draw parameters; otherwise the trainer has only shapes.
        loss: "fused" or "unfused" in the place of the row's.
    """
    kind = LogitsTrainer if (loss or row.loss) == "unfused" else Trainer
    adapters = LoraConfig(lora_rank=LORA_RANK if row.mode == "lora" else 0)
    mesh = None if row.mesh is None else make_mesh(row.mesh)
    if not drawn:
        return kind(adapted_shapes(config, adapters), train, adapters, mesh)

    def make() -> Decoder:
        rngs = nnx.Rngs(row.seed)
        model = Decoder(config, rngs=rngs)
        adapt(model, adapters, rngs)
        return model

    return kind(make() if mesh is None else made_on(mesh, make), train, adapters, mesh)


class Run:
    """Steps of a trainer, enqueued one after another, with batches taken in turn."""

    def __init__(self, trainer: Trainer, state: TrainState, batches: Iterator[Batch]) -> None:
        self._trainer, self._state, self._batches = trainer, state, batches
        self.metrics: StepMetrics | None = None

    def by(self, trainer: Trainer) -> "Run":
        """Returns the run in the form in which another trainer continues it."""
        return Run(trainer, self._state, self._batches)

    def step(self) -> StepMetrics:
        self._state, self.metrics = self._trainer.step(self._state, next(self._batches))
        return self.metrics

    def wait(self) -> None:
        jax.block_until_ready(self.metrics)


def measure(row: Row, request: Request, figures: dict[str, Any]) -> None:
    """Compiles a row's step, checks its first ones, and times it.

    Args:
        row: what is measured.
        request: how.
        figures: filled on the way; what an error leaves in it holds.

    Raises:
        MemoryError: the plan exceeds the request's memory.
        UnavailableError: there are not as many devices as the row's mesh has.
        ValueError: the steps do not train what is to train.
    """
    batch, memory_limit = request.batch, request.memory
    if row.mesh is not None and row.gpus != len(jax.devices()):
        raise UnavailableError(f"needs {row.gpus} devices, got {len(jax.devices())}")
    config, train, drawn = row.model(), train_config(row, batch), draw(row, batch)
    trainer = make_trainer(row, config, train, drawn=False)
    start = time.perf_counter()
    lengths = drawn.batches[0].lengths
    shape = batch, row.seq, None if lengths is None else lengths.shape[1]
    compiled = trainer.compile(*shape)
    figures |= {"compile_s": time.perf_counter() - start, "xla_flags": os.environ.get("XLA_FLAGS")}
    device = jax.devices()[0]
    plan, there = step_memory(trainer, compiled), device_memory(device)
    if plan is not None:
        limit = memory_limit or (there.size if there is not None and there.limit else None)
        figures |= {"planned_bytes": plan.total, "plan": plan._asdict(), "estimate": _estimate(plan, batch, limit)}
        if memory_limit is not None and plan.total > memory_limit:
            raise MemoryError(f"the step's plan of {plan.total:,} bytes exceeds --memory")
    run = Run(trainer, _first_state(row, config, train), itertools.cycle([trainer.put(one) for one in drawn.batches]))
    once = row.kind == "largest"  # the most that fit take many seconds a step
    figures |= check_steps([run.step() for _ in range(1 if once else WARM_UP)], [part.name for part in trainer.parts])
    sensor = Sensor(gpu=device.platform == "gpu")
    blocks = host_blocks(run.step, run.wait, 0 if once else request.seconds, sensor)
    assert run.metrics is not None
    figures |= {
        **blocks.figures(),
        **speed_figures(row, drawn, blocks.figures()["step_ms"], trainer.trained, device.device_kind),
        "gpus": row.gpus,
        "peak_bytes": _peak(jax.devices()[: row.gpus]),
        "last_loss": float(run.metrics.loss),
    }
    if not math.isfinite(figures["last_loss"]):
        raise ValueError(f"the loss became {figures['last_loss']}")
    if request.split:
        try:
            traced = make_trainer(row, config, train, drawn=False)
            program = traced.compile(*shape, traceable=True).as_text() or ""
            figures["split"] = _split(run.by(traced), program)
            seen = sum(figures["split"].values()) / figures["step_ms"]
            if device.platform == "gpu" and seen < SEEN:
                raise ValueError(f"the trace has {seen:.0%} of a step")
        except Exception as error:  # a profiler may fail in any way, and the steps are timed by now
            figures["split"] = None
            figures["note"] = f"no split: {describe(error)}"


def _first_state(row: Row, config: ModelConfig, train: TrainConfig) -> TrainState:
    """Returns the state of random parameters, which nothing else holds: a step can take its memory over."""
    trainer = make_trainer(row, config, train, drawn=True)
    state = trainer.initial if row.mesh is not None else jax.device_put(trainer.initial, jax.devices()[0])
    del trainer.initial
    return state


def _peak(devices: Sequence[Any]) -> int | None:
    """Returns the peak of memory of the device with the highest, in bytes; None if they do not report it."""
    peaks: list[Any] = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return None if None in peaks else max(peaks)


def _estimate(plan: Memory, batch: int, limit: int | None) -> int | None:
    """Returns about how many rows fit, where parameters, their gradients and the optimizer do not grow with them."""
    if limit is None:
        return None
    fixed = 2 * plan.parameters + plan.optimizer
    return max(int((limit - fixed) * batch / max(plan.total - fixed, 1)), 0)


def check_steps(metrics: Sequence[StepMetrics], parts: Sequence[str]) -> dict[str, Any]:
    """Returns figures of the first steps; raises ValueError if they do not train what is to train.

    Args:
        metrics: of the steps.
        parts: names of what trains, in the order of `StepMetrics.trained`.
    """
    fetched: list[StepMetrics] = jax.device_get(list(metrics))
    for step in fetched:
        if not (math.isfinite(step.loss) and math.isfinite(step.grad_norm)):
            raise ValueError(f"loss {float(step.loss)} and gradient norm {float(step.grad_norm)} must be finite")
    trained = np.any([step.trained for step in fetched], axis=0)
    if not trained.all():
        idle = [name for name, moves in zip(parts, trained, strict=True) if not moves]
        raise ValueError(f"{len(idle)} of {len(parts)} parts have no gradient other than zero, the first is {idle[0]}")
    return {"first_loss": float(fetched[0].loss), "first_grad_norm": float(fetched[0].grad_norm)}


def _split(run: Run, program: str) -> dict[str, float]:
    """Returns the milliseconds of a step's operations by part: model, loss, optimizer, other."""
    with tempfile.TemporaryDirectory() as folder:
        tracer = Tracer(Path(folder), 1, SKIPPED + TRACED)
        for step in range(1, SKIPPED + TRACED + 1):
            tracer.before(step)
            tracer.after(step, run.step())
        times = part_times(operations(Path(folder)), operation_parts(program))
    return {part: nanoseconds / 1e6 / TRACED for part, nanoseconds in times.items()}


def check(row: Row, batch: int, figures: dict[str, Any], *, with_weights: bool) -> None:
    """Compares the fused loss and its gradients with the unfused ones, in float32 and in bfloat16.

    In bfloat16 the head is float32 and, if it trains, also a copy of it in bfloat16.

    Args:
        row: of kind "check".
        batch: B.
        figures: filled on the way: for each of them relative errors of the loss and of all gradients as one vector,
            and the array whose own is the largest.
        with_weights: write the weights as a Hugging Face folder, and have transformers compute the loss too.

    Raises:
        ValueError: they differ by more than the bounds of `benchmarks.methods`, or a gradient is 0 or not finite.
    """
    data = draw(row, batch).batches[0]
    for dtype, cast_head in VARIANTS if row.mode == "full" else VARIANTS[:2]:
        config, train = row.model(dtype), train_config(replace(row, cast_head=cast_head), batch)
        of = f"{dtype}_cast_head" if cast_head else dtype
        fused = make_trainer(row, config, train, drawn=True, loss="fused")
        unfused = make_trainer(row, config, train, drawn=False, loss="unfused")
        params = _with_adapters(fused.initial.params)
        del fused.initial
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            compared = jax.device_get(jax.jit(partial(_compare, fused, unfused))(params, data))
        names = list(fused.trained)
        errors = {"err_loss": float(compared.loss), "err_gradient": float(compared.gradient)}
        figures |= {f"{name}_{of}": error for name, error in errors.items()}
        worst = int(np.argmax(compared.arrays))
        figures[f"worst_{of}"] = f"{names[worst]}: {compared.arrays[worst]:.1e}"
        if wrong := check_errors(errors, dtype):
            raise ValueError(f"{of}: {wrong}")
        if not compared.moved.all():
            raise ValueError(f"{of}: {names[int(np.argmin(compared.moved))]} has no gradient other than zero")
        if with_weights and dtype == "float32" and row.mode == "full":
            figures["err_weights"] = abs(_loss_by_transformers(fused.model(params), data) / float(compared.unfused) - 1)
            if wrong := check_errors({"err_loss": figures["err_weights"]}, dtype):
                raise ValueError(f"transformers with the same weights: {wrong}")


class Compared(NamedTuple):
    """Fused against unfused: relative errors, and which arrays have a gradient."""

    unfused: jax.Array  # () the loss
    loss: jax.Array  # ()
    gradient: jax.Array  # () of all arrays as one vector
    arrays: jax.Array  # (A,) of each
    moved: jax.Array  # (A,) bool: by both losses, finite and not 0


def _compare(fused: Trainer, unfused: Trainer, params: nnx.State, batch: Batch) -> Compared:
    (loss, gradients), (expected, exact) = (trainer._gradients(params, batch) for trainer in (fused, unfused))
    pairs = list(zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True))
    squares = jnp.stack([jnp.stack([_squares(ours - theirs), _squares(theirs)]) for ours, theirs in pairs])  # (A, 2)
    moved = jnp.stack([jnp.all(jnp.stack([_moves(ours), _moves(theirs)])) for ours, theirs in pairs])
    whole = jnp.sqrt(jnp.sum(squares[:, 0]) / jnp.sum(squares[:, 1]))
    return Compared(expected, jnp.abs(loss / expected - 1), whole, jnp.sqrt(squares[:, 0] / squares[:, 1]), moved)


def _squares(array: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(array.astype(jnp.float32)))


def _moves(gradient: jax.Array) -> jax.Array:
    return jnp.isfinite(_squares(gradient)) & jnp.any(gradient != 0)


def _with_adapters(params: nnx.State) -> nnx.State:
    """Returns parameters with nonzero adapters, because every array has a gradient only then."""

    def with_adapter(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return 0.02 * jax.random.normal(jax.random.key(0), leaf.shape, leaf.dtype) if "lora_b" in str(path) else leaf

    return jax.tree_util.tree_map_with_path(with_adapter, params)


def _loss_by_transformers(model: Decoder, batch: Batch) -> float:
    theirs = load("benchmarks.train_torch")
    with tempfile.TemporaryDirectory() as folder:
        weights.save(model, Path(folder) / "model")
        return theirs.loss_of(Path(folder) / "model", batch)


def converge(row: Row, batch: int, figures: dict[str, Any]) -> None:
    """Trains on the standard library's sources, a byte a token, and keeps the loss of every step.

    Args:
        row: of kind "converge".
        batch: B.
        figures: filled: losses.
    """
    config = row.model()
    train = train_config(row, batch, steps=CONVERGENCE_STEPS, learning_rate=3e-4, warmup_steps=30)
    text = "".join(document.text for document in load_corpus().train)
    stream = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    sampler = BatchSampler(stream, batch, row.seq, seed=row.seed)
    trainer = make_trainer(row, config, train, drawn=False)
    run = Run(trainer, _first_state(row, config, train), (sampler.next() for _ in range(CONVERGENCE_STEPS)))
    losses = jax.device_get([run.step().loss for _ in range(CONVERGENCE_STEPS)])
    if not np.isfinite(losses).all():
        raise ValueError(f"the loss of step {int(np.argmin(np.isfinite(losses))) + 1} is not finite")
    figures["losses"] = [round(float(loss), 6) for loss in losses]
