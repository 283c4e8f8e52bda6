"""The training loop: steps, numbers fetched late, checkpoints that are known to be good.

Nothing in a step waits for the device. Every `log_every` steps the loop fetches the numbers of all steps but the
newest, so that the device always has work in hand while Python writes. Before a checkpoint it fetches the newest too:
what is saved comes from steps whose loss and gradient were finite, and a diverged run never replaces its last good
checkpoint.
"""

import math
import time
from typing import NamedTuple

import jax

from flax_models.batches import Batch, BatchSampler
from flax_models.checkpoint import Checkpoints
from flax_models.config import TrainConfig
from flax_models.display import Display
from flax_models.errors import RunError
from flax_models.metrics import MetricsLog
from flax_models.step import StepMetrics, Trainer, TrainState


class RunParts(NamedTuple):
    """What the loop works with."""

    trainer: Trainer
    sampler: BatchSampler
    held_out: Batch
    checkpoints: Checkpoints
    metrics: MetricsLog
    display: Display


class _Fetcher:
    """Brings the numbers of steps to the host, writes them, and stops the run at the first that is not finite."""

    def __init__(self, parts: RunParts, tokens_per_step: int) -> None:
        self._parts, self._tokens_per_step = parts, tokens_per_step
        self._waiting: list[tuple[int, StepMetrics]] = []
        self._began = self._last = time.monotonic()

    def add(self, step: int, metrics: StepMetrics) -> None:
        self._waiting.append((step, metrics))

    def fetch(self, *, keep: int) -> None:
        """Writes the rows of all waiting steps but the newest `keep`."""
        count = len(self._waiting) - keep
        if count < 1:
            return
        block, self._waiting = self._waiting[:count], self._waiting[count:]
        values = jax.device_get([metrics for _, metrics in block])
        now = time.monotonic()
        tokens_per_s = count * self._tokens_per_step / (now - self._last)
        self._last = now
        for (step, _), (loss, grad_norm, learning_rate) in zip(block, values, strict=True):
            self._parts.metrics.write(
                step,
                loss=float(loss),
                grad_norm=float(grad_norm),
                learning_rate=float(learning_rate),
                tokens_per_s=round(tokens_per_s, 1),
                seconds=round(now - self._began, 3),
            )
            for what, value in (("loss", loss), ("gradient norm", grad_norm)):
                if not math.isfinite(value):
                    self._parts.metrics.flush()
                    raise RunError(_diverged(what, float(value), step, self._parts.checkpoints.latest_step()))
        self._parts.metrics.flush()
        self._parts.display.progress(block[-1][0], sum(float(loss) for loss, *_ in values) / count, tokens_per_s)

    def skip_time(self) -> None:
        """Leaves what was done since the last fetch out of tokens/s: compiling, held-out losses, checkpoints."""
        self._last = time.monotonic()


def _diverged(what: str, value: float, step: int, checkpoint: int | None) -> str:
    kept = f"the checkpoint of step {checkpoint} is kept" if checkpoint else "no checkpoint was made yet"
    return f"the {what} is {value} at step {step}; {kept}. A smaller --learning-rate or --clip-norm may help"


def train(state: TrainState, config: TrainConfig, parts: RunParts) -> TrainState:
    """Takes the steps that are left and returns the last state.

    Args:
        state: to go on from.
        config: how many steps, and what happens every so many of them.
        parts: everything else; its sampler stands where the state does.

    Returns:
        The state after `config.steps` steps, saved.

    Raises:
        RunError: a loss or a gradient is not finite, or a checkpoint cannot be written.
    """
    start = int(state.step)
    batch_tokens = config.batch_size * parts.held_out.tokens.shape[1]
    fetcher = _Fetcher(parts, batch_tokens)
    with parts.display.start(start, config.steps):
        for step in range(start + 1, config.steps + 1):
            state, metrics = parts.trainer.step(state, parts.sampler.next())
            fetcher.add(step, metrics)
            if step == start + 1:
                jax.block_until_ready(metrics)
                fetcher.skip_time()
                parts.display.compiled(step)
            last = step == config.steps
            evaluate = last or (config.eval_every > 0 and step % config.eval_every == 0)
            save = last or step % config.checkpoint_every == 0
            if not (evaluate or save):
                if step % config.log_every == 0:
                    fetcher.fetch(keep=1)
                continue
            fetcher.fetch(keep=0)
            if evaluate:
                loss = parts.trainer.held_out_loss(state.params, parts.held_out)
                parts.metrics.write(step, held_out_loss=loss)
                parts.display.say(f"step {step:>6,}/{config.steps:,}  held-out loss {loss:.3f}")
            if save:
                parts.metrics.flush()
                parts.checkpoints.save(step, state, parts.sampler.state())
            fetcher.skip_time()
    return state
