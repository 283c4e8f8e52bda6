"""The training loop: dispatches steps, fetches metrics asynchronously, and saves only finite states.

Steps are dispatched without waiting for the device. Every `log_every` steps, the loop fetches the metrics of all steps
except the newest, so that the device has work while Python writes them. Before a checkpoint, the loop also fetches the
newest metrics. A state is saved only if loss and gradient were finite in all steps, so a diverged run does not replace
its last good checkpoint.

The loop reports throughput only for a model that trains. If all gradients are exactly zero, or a part of the model
never has a nonzero gradient, the run ends with an error.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from flax_models.data.batches import Batch, Sampler
from flax_models.display import Display
from flax_models.errors import RunError, Stopped
from flax_models.model.parameters import Part
from flax_models.train.accounting import describe_flops
from flax_models.train.checkpoint import Checkpoints
from flax_models.train.config import TrainConfig
from flax_models.train.metrics import MetricsLog
from flax_models.train.profile import Clock, Tracer
from flax_models.train.step import StepMetrics, Trainer, TrainState
from flax_models.train.stopping import StopRequest


class Cost(NamedTuple):
    """The flops of a token, and the device's peak."""

    flops_per_token: float
    peak: float | None  # flops/s of all devices; None if unknown


class RunParts(NamedTuple):
    """The objects that the training loop uses."""

    trainer: Trainer
    sampler: Sampler
    held_out: Batch
    checkpoints: Checkpoints
    metrics: MetricsLog
    display: Display
    cost: Cost
    describe: Callable[[np.ndarray], str]  # describes a batch, given the sampler's `starts`
    clock: Clock
    tracer: Tracer


class _Step(NamedTuple):
    """A step whose metrics are still on the device."""

    step: int
    metrics: StepMetrics
    starts: np.ndarray
    tokens: int  # 0 if the step does not count in tokens/s


class _Fetcher:
    """Fetches and writes the metrics of steps, and raises an error at the first value that is not finite."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._waiting: list[_Step] = []
        self._trained = np.zeros(len(parts.trainer.parts), bool)
        self._began = self._last = time.monotonic()

    def add(self, step: int, metrics: StepMetrics) -> None:
        """Adds the metrics of a step, whose batch is the sampler's latest."""
        sampler = self._parts.sampler
        self._waiting.append(_Step(step, metrics, sampler.starts, sampler.tokens))

    def fetch(self, *, keep: int) -> None:
        """Fetches and writes the metrics of all waiting steps except the newest `keep`."""
        count = len(self._waiting) - keep
        if count < 1:
            return
        block, self._waiting = self._waiting[:count], self._waiting[count:]
        with self._parts.clock.part("waiting for the device"):
            values: list[StepMetrics] = jax.device_get([step.metrics for step in block])
        with self._parts.clock.part("metrics"):
            self._write(block, values)

    def _write(self, block: list[_Step], values: list[StepMetrics]) -> None:
        now = time.monotonic()
        tokens = sum(step.tokens for step in block)
        clocked, speed = self._speed(tokens / (now - self._last)) if tokens else ({}, "")
        self._last = now
        for (step, _, starts, _), (loss, grad_norm, learning_rate, trained) in zip(block, values, strict=True):
            self._parts.metrics.write(
                step,
                loss=float(loss),
                grad_norm=float(grad_norm),
                learning_rate=float(learning_rate),
                **clocked,
                seconds=round(now - self._began, 3),
            )
            for what, value in (("loss", loss), ("gradient norm", grad_norm)):
                if not math.isfinite(value):
                    self._parts.metrics.flush()
                    raise RunError(self._diverged(what, float(value), step, starts))
            self._trained |= trained
        self._parts.metrics.flush()
        self._check_learning(block, values)
        loss = sum(float(value.loss) for value in values) / len(block)
        grad_norm = float(values[-1].grad_norm)
        self._parts.display.progress(block[-1].step, f"loss {loss:.3f}  grad {grad_norm:.2f}{speed}")

    def _speed(self, tokens_per_s: float) -> tuple[dict[str, float], str]:
        """Returns the speed as fields of a metrics row, and as text for the progress line."""
        flops_per_token, peak = self._parts.cost
        flops_per_s = tokens_per_s * flops_per_token
        clocked = {"tokens_per_s": round(tokens_per_s, 1), "flops_per_s": round(flops_per_s)}
        utilization = describe_flops(flops_per_s)
        if peak is not None:
            clocked["mfu"], utilization = round(flops_per_s / peak, 4), f"{flops_per_s / peak:.1%} MFU"
        return clocked, f"  {tokens_per_s:,.0f} tokens/s  {utilization}"

    def _diverged(self, what: str, value: float, step: int, starts: np.ndarray) -> str:
        checkpoint = self._parts.checkpoints.latest_step()
        kept = "there is no checkpoint yet" if checkpoint is None else f"the checkpoint of step {checkpoint} is kept"
        return (
            f"the {what} is {value} at step {step}; {kept}. Batch: {self._parts.describe(starts)}. "
            f"Try a smaller --learning-rate or --clip-norm"
        )

    def _check_learning(self, block: list[_Step], values: list[StepMetrics]) -> None:
        """Raises RunError if gradients are zero, because tokens/s would be meaningless."""
        if not any(value.trained.any() for value in values):
            raise RunError(
                f"no throughput to report: the gradients of steps {block[0].step} to {block[-1].step} are exactly zero"
            )
        parts, last = self._parts.trainer.parts, block[-1].step
        idle = [
            part for part, trained in zip(parts, self._trained, strict=True) if part.first_step <= last and not trained
        ]
        if idle:
            raise RunError(f"no throughput to report: {_describe_idle(idle, parts)}")

    def skip_time(self) -> None:
        """Excludes the time since the last fetch from tokens/s: the first step, evaluations and checkpoints."""
        self._waiting = [step._replace(tokens=0) for step in self._waiting]
        self._last = time.monotonic()


def _describe_idle(idle: list[Part], parts: tuple[Part, ...]) -> str:
    expected = sum(part.size for part in parts)
    trained = expected - sum(part.size for part in idle)
    more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
    return f"only {trained:,} of {expected:,} parameters train; the gradient is always zero for {idle[0].name}{more}"


def train(state: TrainState, config: TrainConfig, parts: RunParts) -> tuple[TrainState, float]:
    """Runs the remaining steps and returns the final state and its held-out loss.

    Args:
        state: state to continue from.
        config: number of steps, and intervals of evaluations, checkpoints and logging.
        parts: all other objects; the sampler must be at the position of `state`.

    Returns:
        (state after `config.steps` steps, held-out loss in nats per token). The state has been saved.

    Raises:
        RunError: a loss or a gradient is not finite, gradients are zero, or a file cannot be written.
        Stopped: SIGINT or SIGTERM was received, by this process or another; the current step was finished and saved.
    """
    start = int(jax.device_get(state.step))
    fetcher, clock = _Fetcher(parts), parts.clock
    loss = None

    def held_out_loss() -> float:
        with clock.part("held-out losses"):
            return parts.trainer.held_out_loss(parts.trainer.evaluated(state), parts.held_out)

    def save(step: int) -> None:
        with clock.part("checkpoints"):
            parts.metrics.flush()
            parts.checkpoints.save(step, state, parts.sampler.state())

    with parts.display.start(start, config.steps), StopRequest() as stop:
        for step in range(start + 1, config.steps + 1):
            with clock.part("tracing"):
                parts.tracer.before(step)
            with clock.part("data"):
                batch = parts.trainer.put(parts.sampler.next())
            first = step == start + 1
            with clock.part("first step" if first else "dispatch"):
                state, metrics = parts.trainer.step(state, batch)
                if first:
                    jax.block_until_ready(metrics)
            fetcher.add(step, metrics)
            with clock.part("tracing"):
                parts.tracer.after(step, metrics)
            if first:
                fetcher.skip_time()
                parts.display.start_clock(step)
            last = step == config.steps
            evaluate = last or (config.eval_every > 0 and step % config.eval_every == 0)
            keep = last or step % config.checkpoint_every == 0
            if evaluate or keep:
                fetcher.fetch(keep=0)
                if evaluate:
                    loss = held_out_loss()
                    parts.metrics.write(step, held_out_loss=loss)
                    parts.display.line(f"step {step:>6,}/{config.steps:,}  held-out loss {loss:.3f}")
                if keep:
                    save(step)
                fetcher.skip_time()
            elif step % config.log_every == 0:
                fetcher.fetch(keep=1)
            if (received := stop.after(step)) is not None:
                fetcher.fetch(keep=0)
                save(step)
                raise Stopped(received, f"step {step:,} of {config.steps:,} is saved; --resume continues from it")
    return state, held_out_loss() if loss is None else loss  # None: no step was left
