"""`python -m flax_models.train`: trains a language model on text and says how well it did.

Without an argument it trains the `tiny` config on the Python standard library's sources, and ends with the held-out
loss beside three baselines and a sample of generated text. Everything it learns stays in runs/NAME/.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from flax_models.data.batches import Sampler
from flax_models.data.vocabulary import decoded_after
from flax_models.display import Display, duration
from flax_models.errors import RunError, Stopped
from flax_models.hub.adapter_folder import load_adapter
from flax_models.hub.config import RUN_FIELDS, config_note
from flax_models.hub.weights import check_weights, load
from flax_models.model.attention_choice import AttentionChoice, explain_attention
from flax_models.model.decoder import Decoder, ModelConfig
from flax_models.model.lora import adapt, adapted_shapes
from flax_models.model.sampling import generate
from flax_models.train.accounting import (
    describe_bytes,
    device_memory,
    device_peak,
    flops_per_token,
    step_memory,
)
from flax_models.train.arguments import check_shape, parse
from flax_models.train.baselines import Baselines
from flax_models.train.checkpoint import Checkpoints
from flax_models.train.config import RunConfig, TrainConfig
from flax_models.train.loop import Cost, RunParts, train
from flax_models.train.metrics import MetricsLog, read_rows
from flax_models.train.optimizers import learning_rate_schedule
from flax_models.train.plot import plot_losses
from flax_models.train.profile import SKIPPED, Clock, Tracer, device_table, operation_parts, operations
from flax_models.train.run_folder import (
    RunLock,
    RunRecord,
    extend,
    has_checkpoint,
    how_to_go_on,
    make_folder,
    move_failed,
    new_folder,
    read_record,
)
from flax_models.train.step import Trainer, TrainState
from flax_models.train.task_data import Data, Text, make_data, read_text
from jax_pallas.linear_ce import explain

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"  # no atomics, and no choice of kernels by measured time
LESS_MEMORY = "--accumulate in more micro-batches, --remat full, or a smaller --batch-size or --max-seq-len take less"


@dataclass
class Written:
    """What a run that is stopped leaves behind."""

    folder: Path | None = None  # None until it is made


def run(config: RunConfig, resumed: Path | None, display: Display, written: Written | None = None) -> None:
    """Trains, measures and samples one run.

    Args:
        config: its options.
        resumed: folder of the run to continue, None for a new one.
        display: where to say what happens.
        written: told the run's folder once there is one.

    Raises:
        RunError: anything the person who started it can mend.
    """
    began, written = time.monotonic(), written or Written()
    _attention(config.model, packed=False)  # told before anything is read
    folder = resumed or new_folder(config)
    written.folder = resumed
    with ExitStack() as stack:
        if resumed:
            _hold(stack, RunLock(folder), display)
        origin = config.config if config.weights is None else f"from {config.weights}"
        display.fact("run", f"{folder} ({'continued' if resumed else origin})")
        if config.weights is not None and not resumed:
            if note := config_note(config.weights, config.ignore_config_fields):
                display.fact("note", note)
            check_weights(config.weights, config.model)
        text = read_text(config, resumed, display)
        model_config = text.vocabulary.fit(config.model)
        length = model_config.max_seq_len
        train_config = config.train.with_rows(length)
        data = make_data(text, train_config, length, config.seed, model_config.vocab_size)
        stack.callback(data.sampler.close)
        for label, words in data.facts:
            display.fact(label, words)

        from_checkpoint = resumed is not None and has_checkpoint(folder, train_config)
        model = adapted_shapes(model_config, config.lora) if from_checkpoint else _first_model(config, model_config)
        trainer = Trainer(model, train_config, config.lora)
        del model  # or it would take the device's memory beside the state for as long as the run lasts
        cost = _describe_costs(trainer, model_config, train_config, data, display, traceable=config.profile)
        display.fact(
            "training",
            f"{train_config.steps:,} steps of {train_config.batch_size} x {length} = "
            f"{train_config.batch_size * length:,} tokens, "
            f"{train_config.steps * data.tokens / data.size:.2f} passes over the text",
        )

        if not resumed:
            record, with_weights = RunRecord(config, text.corpus.sha256), config.weights is not None
            if moved := move_failed(folder):
                display.fact("moved", f"the earlier {folder}, which has no checkpoint, is {moved} now")
            lock = make_folder(folder, record, lambda part: text.vocabulary.write(part, weights=with_weights))
            written.folder = folder
            _hold(stack, lock, display)
        checkpoints = Checkpoints(folder / "checkpoints", writes=True)
        stack.callback(checkpoints.close)
        state = _continued(trainer, data.sampler, checkpoints, display) if from_checkpoint else trainer.initial
        if resumed and not from_checkpoint:
            display.fact("continued", "from the beginning: it ended before its first checkpoint")
        state = jax.device_put(state, jax.devices()[0])  # as a restored one is: both take the same compiled step
        del trainer.initial  # as the model above
        start = int(state.step)
        if resumed:
            _extend(folder, config.train, start, display)
        parts = RunParts(
            trainer=trainer,
            sampler=data.sampler,
            held_out=data.held_out,
            checkpoints=checkpoints,
            metrics=MetricsLog(folder, after=start),
            display=display,
            cost=cost,
            describe=data.describe,
            clock=Clock(),
            tracer=Tracer(folder / "profile" if config.profile else None, start + 1, train_config.steps),
        )
        trained = time.monotonic()
        try:
            state = train(state, train_config, parts)
            trained = time.monotonic() - trained
        finally:
            parts.tracer.stop()
            parts.metrics.close()
            _plot(folder, data.judged, display)
        if config.profile:
            _report_times(parts, train_config.steps - start, trained)

        learned = trainer.evaluated(state)
        loss = trainer.held_out_loss(learned, data.held_out)
        _report(loss, data, display)
        display.line()
        display.line(_sample(trainer.model(learned), text, config))
        seconds = time.monotonic() - began
        result = {
            "held_out_loss": loss,
            **data.judged._asdict(),
            "held_out_tokens": data.held_out.counted,
            "train_seconds": round(trained, 1),
            "seconds": round(seconds, 1),
        }
        (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    display.line()
    display.line(
        f"{duration(seconds)} in all, {duration(trained)} of them training; {folder}/ holds the run and loss.png"
    )


def _hold(stack: ExitStack, lock: RunLock, display: Display) -> None:
    """Keeps a run's lock until the stack ends."""
    stack.enter_context(lock)
    if lock.fault is not None:
        display.fact("warning", f"no lock on the run's folder ({lock.fault}): let no other process write there")


def _first_model(config: RunConfig, model_config: ModelConfig) -> Decoder:
    """Returns the model that a run begins with: random, or the folder's of --weights, with its adapters if any."""
    rngs = nnx.Rngs(config.seed)
    if config.weights is None:
        model = Decoder(model_config, rngs=rngs)
    else:
        ignored = config.ignore_config_fields
        check_shape(
            model_config, config.weights, ignored
        )  # a run that is continued from its beginning may find another
        how = {name: getattr(model_config, name) for name in ("max_seq_len", *RUN_FIELDS)}
        model = load(config.weights, ignore_config_fields=ignored, **how)
    adapt(model, config.lora, rngs)
    if config.lora.adapter is not None:
        load_adapter(model, config.lora.adapter)
    return model


def _attention(config: ModelConfig, *, packed: bool) -> AttentionChoice:
    """Returns what attention runs by; raises RunError where the one that is named cannot."""
    try:
        return explain_attention(config, config.max_seq_len, packed=packed)
    except ValueError as error:
        raise RunError(f"--{str(error).replace('_', '-', 1)}") from None


def _describe_costs(
    trainer: Trainer, config: ModelConfig, train_config: TrainConfig, data: Data, display: Display, *, traceable: bool
) -> Cost:
    """Says what is trained, by what, and how much memory that takes; compiles the step and returns a token's cost."""
    device, length = jax.devices()[0], config.max_seq_len
    parameters = sum(np.size(leaf) for leaf in jax.tree.leaves(trainer.initial.params))
    trainable = sum(part.size for part in trainer.parts)
    display.fact(
        "model",
        f"{parameters:,} parameters, {100 * trainable / parameters:.3g}% of them to train, on {device.device_kind}",
    )
    attention = _attention(config, packed=data.columns is not None)
    display.fact("attention", f"{attention.name}: {attention.reason}")
    rows = train_config.batch_size // train_config.accumulate * length
    hidden: Any = jax.ShapeDtypeStruct((rows, config.hidden_size), config.dtype)
    head: Any = nnx.eval_shape(trainer.head, trainer.model(trainer.initial.params))
    chosen = explain(hidden, head)
    display.fact("loss", f"jax_pallas.linear_ce, {chosen.name}: {chosen.reason}")
    if device.platform == "gpu":
        much = "to the bit, by" if DETERMINISTIC in os.environ.get("XLA_FLAGS", "") else "to rounding, to the bit under"
        display.fact("repeats", f"{much} XLA_FLAGS={DETERMINISTIC}")
    _compile(trainer, (train_config.batch_size, length, data.columns), display, traceable=traceable)
    cost = Cost(flops_per_token(config, data.lengths, trainer.trained), device_peak(device.device_kind))
    if cost.peak is None:
        display.fact("throughput", f"in FLOP/s: the peak of {device.device_kind}, to be a share of, is not known")
    else:
        display.fact("throughput", f"MFU is the share of {cost.peak / 1e12:,.0f} TFLOP/s, the device's dense bf16 peak")
    return cost


def _compile(trainer: Trainer, shape: tuple[int, int, int | None], display: Display, *, traceable: bool) -> None:
    """Compiles the step and says what memory it takes; raises RunError if that is more than JAX may use."""
    device, began = jax.devices()[0], time.monotonic()
    try:
        compiled = trainer.compile(*shape, traceable=traceable)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(f"the step does not fit into {device.device_kind}'s memory; {LESS_MEMORY}") from error
    display.fact("compiled", f"the step, in {duration(time.monotonic() - began)}")
    memory, found = step_memory(trainer, compiled), device_memory(device)
    if memory is None:
        display.fact("memory", f"not told by {device.platform} devices")
        return
    words = ", ".join(f"{name} {describe_bytes(size)}" for name, size in memory._asdict().items())
    display.fact("memory", f"{describe_bytes(memory.total)} in a step: {words}")
    if found is None:
        return
    much = "MORE THAN" if memory.total > found.size else "of"
    display.fact("", f"{much} the {describe_bytes(found.size)} {found.whose}")
    if found.limit and memory.total > found.size:
        raise RunError(
            f"a step needs {describe_bytes(memory.total)} of memory, more than the {describe_bytes(found.size)} "
            f"{found.whose}; {LESS_MEMORY}"
        )


def _continued(trainer: Trainer, sampler: Sampler, checkpoints: Checkpoints, display: Display) -> TrainState:
    """Returns the state of the latest checkpoint, with the sampler put where it belongs."""
    state, place = checkpoints.restore(trainer.initial)
    sampler.restore(place)
    for fault in checkpoints.passed_over:
        display.fact("warning", f"{fault}; an older checkpoint is used")
    display.fact("continued", f"from step {int(state.step):,}")
    return state


def _extend(folder: Path, config: TrainConfig, start: int, display: Display) -> None:
    """Takes another number of steps into a run's record, and says what the learning rate does."""
    before = read_record(folder).config.train.steps
    if config.steps == before:
        return
    extend(folder, config.steps)
    display.fact("note", f"{config.steps:,} steps instead of the {before:,} that the run was started with")
    if start < config.steps:
        rate = float(learning_rate_schedule(config)(start))
        kept = config.optimizer == "schedule_free_adamw"
        how = "stays at its peak" if kept else f"follows the schedule of {config.steps:,} steps"
        display.fact("", f"the learning rate {how}: {rate:.3g} at step {start + 1:,}")


def _plot(folder: Path, judged: Baselines, display: Display) -> None:
    try:
        plot_losses(folder / "loss.png", read_rows(folder), judged, title=folder.name)
    except OSError as error:  # a full disk must not hide what ended the run
        display.line(f"loss.png could not be written: {error.strerror}")


def _report_times(parts: RunParts, steps: int, seconds: float) -> None:
    parts.display.line()
    for line in parts.clock.table(steps, seconds):
        parts.display.line(line)
    if not parts.tracer.steps or parts.tracer.folder is None:
        parts.display.line(f"no step was traced: the run took {steps:,}, and the trace begins after {SKIPPED}")
        return
    program = parts.trainer.compile(*parts.held_out.tokens.shape).as_text() or ""  # the one that ran
    found = operations(parts.tracer.folder)
    for line in device_table(found, operation_parts(program), parts.tracer.steps):
        parts.display.line(line)
    parts.display.line(f"the trace is in {parts.tracer.folder}, for TensorBoard's profile plugin or Perfetto")


def _report(loss: float, data: Data, display: Display) -> None:
    display.line()
    display.line(f"held-out loss, nats a token over {data.held_out.counted:,} tokens")
    judged = data.judged._asdict()
    for name, value in judged.items():
        display.line(f"  {name:<10}{value:6.3f}")
    gaps = ", ".join(
        f"{abs(value - loss):.2f} {'below' if loss < value else 'above'} {name}" for name, value in judged.items()
    )
    display.line(f"  {'model':<10}{loss:6.3f}   {gaps}")


def _sample(model: Decoder, text: Text, config: RunConfig) -> str:
    """Returns a text that the model draws: after --prompt, or of dialogues as the answer to one that was held out."""
    vocabulary, ends = text.vocabulary, (text.vocabulary.needed_end(),)
    if isinstance(text.held_out, list):
        ends = (*vocabulary.ends, *vocabulary.format.ends)
        asked = text.held_out[0]
        prompt = asked.tokens[: np.argmax(asked.counted)].tolist()
        if config.prompt:
            prompt = vocabulary.chat_prompt(config.prompt)
        shown = vocabulary.tokenizer.decode(prompt)
    else:
        prompt, shown = vocabulary.prompt(config.prompt) or [*ends], config.prompt
    drawn = generate(model, prompt, length=config.sample_tokens, key=jax.random.key(config.seed), ends=ends)
    return f"sample:\n{shown}{decoded_after(vocabulary.tokenizer, prompt, drawn)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 for what a person can mend, 130 for Ctrl-C, 143 for SIGTERM.

    What a person can mend is one line on stderr.
    """
    _hush_libraries()
    console = Console()
    before, written = _stop_on_terminate(), Written()
    try:
        config, resumed = parse(sys.argv[1:] if arguments is None else arguments)
        run(config, resumed, Display(console), written)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"{stopped}: {stopped.saved or how_to_go_on(written.folder)}", file=sys.stderr)
        return stopped.status
    except KeyboardInterrupt:
        print(f"stopped: {how_to_go_on(written.folder)}", file=sys.stderr)
        return 130
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    return 0


def _hush_libraries() -> None:
    """Keeps orbax and the library under it from printing pages about what comes as an error of one line anyway.

    Matplotlib would warn of a cache folder that it cannot write, which costs the run nothing.
    """
    # absl is orbax's, asyncio that of its tasks whose exceptions nobody asks for.
    for name in ("absl", "asyncio", "matplotlib"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if getattr(sys.unraisablehook, "__name__", "") == "without_closed_loops":
        return
    inner = sys.unraisablehook

    def without_closed_loops(unraisable: Any) -> None:
        # After one file cannot be written, each of the others calls back into an event loop that is gone.
        if str(unraisable.exc_value) != "Event loop is closed":
            inner(unraisable)

    sys.unraisablehook = without_closed_loops


def _stop_on_terminate() -> Any:
    """Makes SIGTERM raise Stopped as Ctrl-C raises KeyboardInterrupt; returns the handler that it had, None without."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped(signal.Signals(number))

    return signal.signal(signal.SIGTERM, stop)
