"""`python -m flax_models.train`: trains a language model and reports its held-out loss.

Without arguments, it trains the `tiny` config on the source code of the Python standard library. At the end, it prints
the held-out loss, three baselines and a generated sample. All results are in runs/NAME/.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from flax_models.data.batches import Sampler
from flax_models.display import Display, duration
from flax_models.errors import RunError, Stopped, UsageError
from flax_models.hub.adapter_folder import check_adapter, load_adapter
from flax_models.hub.config import RUN_FIELDS, config_note
from flax_models.hub.weights import check_tensors, check_weights, load
from flax_models.model.attention_choice import AttentionChoice, explain_attention
from flax_models.model.decoder import Decoder, ModelConfig
from flax_models.model.lora import adapt, adapted_shapes
from flax_models.train.accounting import (
    LeastMemory,
    check_parameters,
    describe_bytes,
    device_memory,
    device_peak,
    flops_per_token,
    least_memory,
    step_memory,
)
from flax_models.train.arguments import check_shape, parse
from flax_models.train.baselines import Baselines
from flax_models.train.checkpoint import Checkpoints
from flax_models.train.config import RunConfig, TrainConfig, to_json
from flax_models.train.loop import Cost, RunParts, train
from flax_models.train.mesh import (
    check_sizes,
    check_vocabulary,
    loss_of_device,
    made_on,
    make_mesh,
    parameter_shards,
)
from flax_models.train.metrics import MetricsLog, NoMetrics, read_rows
from flax_models.train.optimizers import learning_rate_schedule
from flax_models.train.plot import plot_losses
from flax_models.train.processes import (
    GRACE,
    Peers,
    check_agreement,
    check_on_first,
    find_launch,
    from_first,
    is_first,
    join,
    wait_for_all,
)
from flax_models.train.profile import SKIPPED, Clock, Tracer, device_table, operation_parts, operations
from flax_models.train.run_folder import (
    RunLock,
    RunRecord,
    extend,
    has_checkpoint,
    make_folder,
    move_failed,
    new_folder,
    read_record,
    resume_advice,
)
from flax_models.train.sample import generate_sample, make_prompt
from flax_models.train.step import Trainer, TrainState
from flax_models.train.task_data import Data, make_data, read_text
from jax_pallas import explain

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"  # no atomics, and no autotuning of kernels
LESS_MEMORY = (
    "to reduce it, use a larger --accumulate, --remat full, a smaller --batch-size or --max-seq-len, or more devices "
    "(--mesh)"
)


@dataclass
class RunStatus:
    """State of a run that its caller reads after an exception."""

    folder: Path | None = None  # None until the folder exists


def run(config: RunConfig, resumed: Path | None, display: Display, status: RunStatus | None = None) -> None:
    """Trains a model, measures the held-out loss and prints a sample.

    Args:
        config: options of the run.
        resumed: folder of the run to continue; None: start a new run.
        display: prints progress and results.
        status: `folder` is set when the run's folder exists.

    Raises:
        RunError: an error that the user can fix.
    """
    began, status = time.monotonic(), status or RunStatus()
    # Report a model that is too large and an unsupported implementation before anything else is read. A size that the
    # tensors of --weights do not have is a fault of the folder, not of the options.
    if config.weights is not None and not resumed:
        check_tensors(config.weights, config.model)
    mesh = None if config.mesh is None else make_mesh(config.mesh)
    check_parameters(config.model, config.lora, device_memory(jax.local_devices()[0]), shards=parameter_shards(mesh))
    _attention(config.model, packed=False)
    train_config = config.train.with_rows(config.model.max_seq_len)
    if mesh is not None:
        rows = train_config.batch_size // train_config.accumulate
        check_sizes(mesh, config.model, rows, "--batch-size divided by --accumulate")
        if config.weights is not None:
            check_vocabulary(mesh, config.model, "of --weights")
    check_agreement("the options", json.dumps(to_json(config)))
    first = is_first()
    folder = resumed or Path(from_first(str(new_folder(config)) if first else ""))
    status.folder = resumed
    with ExitStack() as stack:
        if resumed and first:
            _hold(stack, RunLock(folder), display)
        origin = config.config if config.weights is None else f"from {config.weights}"
        display.fact("run", f"{folder} ({'continued' if resumed else origin})")
        if config.weights is not None and not resumed:
            if note := config_note(config.weights, config.ignore_config_fields):
                display.fact("note", note)
            check_on_first(partial(check_weights, config.weights, config.model))
        if config.lora.adapter is not None and not resumed:
            check_on_first(partial(check_adapter, config.lora.adapter, config.model, config.lora))
        text = read_text(config, resumed, display)
        check_agreement("the text", text.corpus.sha256)
        check_agreement("the tokenizer", text.vocabulary.tokenizer.to_str())
        if isinstance(text.train, list):
            check_agreement("the chat template and its date", "\0".join(text.vocabulary.format.key))
        prompt = make_prompt(text, config.prompt)  # before training, because an invalid --prompt is an error
        model_config = text.vocabulary.fit(config.model)
        if mesh is not None:
            check_vocabulary(mesh, model_config, "--vocab-size" if config.tokenizer is None else "of --tokenizer")
        length = model_config.max_seq_len
        data = make_data(text, train_config, length, config.seed, model_config.vocab_size)
        stack.callback(data.sampler.close)
        for label, fact in data.facts:
            display.fact(label, fact)

        from_checkpoint = bool(from_first("yes" if resumed and has_checkpoint(folder, train_config) else ""))
        if from_checkpoint:
            model = adapted_shapes(model_config, config.lora)
        else:
            model = _initial_model(config, model_config, mesh)
        trainer = Trainer(model, train_config, config.lora, mesh)
        del model  # frees its device memory
        cost = _describe_costs(trainer, model_config, train_config, data, display, traceable=config.profile)
        display.fact(
            "training",
            f"{train_config.steps:,} steps of {train_config.batch_size} x {length} = "
            f"{train_config.batch_size * length:,} tokens, "
            f"{train_config.steps * data.tokens / data.size:.2f} passes over the data",
        )

        if not resumed and first:
            record, with_weights = RunRecord(config, text.corpus.sha256), config.weights is not None
            if moved := move_failed(folder):
                display.fact("moved", f"an earlier {folder} without a checkpoint to {moved}")
            lock = make_folder(folder, record, lambda part: text.vocabulary.write(part, weights=with_weights))
            _hold(stack, lock, display)
        wait_for_all("the run's folder exists")
        status.folder = folder
        checkpoints = Checkpoints(folder / "checkpoints", writes=True)
        stack.callback(checkpoints.close)
        state = _restore(trainer, data.sampler, checkpoints, display) if from_checkpoint else trainer.initial
        if resumed and not from_checkpoint:
            display.fact("continued", "from the beginning, because the run has no checkpoint")
        if mesh is None:
            state = jax.device_put(state, jax.devices()[0])  # like a restored state, so that both use one compiled step
        del trainer.initial  # frees its device memory
        start = int(state.step)
        if resumed and first:
            _extend(folder, config.train, start, display)
        parts = RunParts(
            trainer=trainer,
            sampler=data.sampler,
            held_out=data.held_out,
            checkpoints=checkpoints,
            metrics=MetricsLog(folder, after=start) if first else NoMetrics(),
            display=display,
            cost=cost,
            describe=data.describe,
            clock=Clock(),
            tracer=Tracer(folder / "profile" if config.profile and first else None, start + 1, train_config.steps),
        )
        trained = time.monotonic()
        try:
            state, loss = train(state, train_config, parts)
            trained = time.monotonic() - trained
        finally:
            parts.tracer.stop()
            parts.metrics.close()
            if first:
                _plot(folder, data.baselines, display)
        if config.profile and first:
            _report_times(parts, train_config.steps - start, trained)

        _report(loss, data, display)
        display.line()
        with trainer.context():
            sample = generate_sample(trainer.model(trainer.evaluated(state)), prompt, text, config)
        display.line(sample)
        seconds = time.monotonic() - began
        result = {
            "held_out_loss": loss,
            **data.baselines._asdict(),
            "held_out_tokens": data.held_out.counted,
            "train_seconds": round(trained, 1),
            "seconds": round(seconds, 1),
        }
        if first:
            (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    display.line()
    display.line(
        f"{duration(seconds)} in total, of which {duration(trained)} training; the run and loss.png are in {folder}/"
    )


def _hold(stack: ExitStack, lock: RunLock, display: Display) -> None:
    """Holds a run's lock until the stack is closed."""
    stack.enter_context(lock)
    if lock.fault is not None:
        display.fact(
            "warning",
            f"cannot lock the run's folder ({lock.fault}); make sure that no other process writes to it",
        )


def _initial_model(config: RunConfig, model_config: ModelConfig, mesh: Mesh | None) -> Decoder:
    """Returns the initial model: random or loaded from --weights, with adapters if requested."""

    def drawn() -> Decoder:
        rngs = nnx.Rngs(config.seed)
        model = Decoder(model_config, rngs=rngs)
        adapt(model, config.lora, rngs)
        return model

    if config.weights is None:
        return made_on(mesh, drawn)
    ignored = config.ignore_config_fields
    # Checked again, because the folder may have changed since a run without a checkpoint was started.
    check_shape(model_config, config.weights, ignored)
    how = {name: getattr(model_config, name) for name in ("max_seq_len", *RUN_FIELDS)}
    model = load(config.weights, ignore_config_fields=ignored, mesh=mesh, **how)
    adapt(model, config.lora, nnx.Rngs(config.seed))
    if config.lora.adapter is not None:
        load_adapter(model, config.lora.adapter)
    return model


def _attention(config: ModelConfig, *, packed: bool) -> AttentionChoice:
    """Returns the attention implementation; raises RunError if the requested one is not supported."""
    try:
        return explain_attention(config, config.max_seq_len, packed=packed)
    except ValueError as error:
        raise RunError(f"--{str(error).replace('_', '-', 1)}") from None


def _describe_costs(
    trainer: Trainer, config: ModelConfig, train_config: TrainConfig, data: Data, display: Display, *, traceable: bool
) -> Cost:
    """Compiles the step, prints the implementations and the memory, and returns the cost of a token."""
    device, length = jax.local_devices()[0], config.max_seq_len
    parameters = sum(np.size(leaf) for leaf in jax.tree.leaves(trainer.initial.params))
    trainable = sum(part.size for part in trainer.parts)
    display.fact(
        "model",
        f"{parameters:,} parameters, {100 * trainable / parameters:.3g}% trainable, on {device.device_kind}",
    )
    devices = 1
    if trainer.mesh is not None:
        devices = trainer.mesh.size
        sizes = " x ".join(f"{axis} {size}" for axis, size in trainer.mesh.shape.items())
        display.fact("mesh", f"{sizes}, of {devices} devices")
    attention = _attention(config, packed=data.columns is not None)
    display.fact("attention", f"{attention.name}: {attention.reason}")
    rows = train_config.batch_size // train_config.accumulate * length
    head: Any = nnx.eval_shape(trainer.head, trainer.model(trainer.initial.params))
    classes, axes = head.shape[0], None
    if trainer.mesh is not None:
        rows, classes, axes = loss_of_device(trainer.mesh, rows, classes)
    hidden: Any = jax.ShapeDtypeStruct((rows, config.hidden_size), config.dtype)
    head = jax.ShapeDtypeStruct((classes, config.hidden_size), head.dtype)
    chosen = explain(hidden, head, vocab_axis_name=axes)
    display.fact("loss", f"jax_pallas, {chosen.name}: {chosen.reason}")
    if trainer.mesh is not None:
        _check_least(least_memory(trainer, config, rows), device, display)
    if device.platform == "gpu":
        if DETERMINISTIC in os.environ.get("XLA_FLAGS", ""):
            repeats = f"bit for bit, because of XLA_FLAGS={DETERMINISTIC}"
        else:
            repeats = f"up to rounding; for bit-for-bit repeats, set XLA_FLAGS={DETERMINISTIC}"
        display.fact("repeats", repeats)
    _compile(trainer, (train_config.batch_size, length, data.columns), display, traceable=traceable)
    peak = device_peak(device.device_kind)
    if peak is None:
        display.fact("throughput", f"in FLOP/s, not MFU: the peak of {device.device_kind} is unknown")
    else:
        times = "" if devices == 1 else f"{devices} times "
        display.fact("throughput", f"MFU relative to {times}{peak / 1e12:,.0f} TFLOP/s, the device's dense bf16 peak")
    return Cost(flops_per_token(config, data.lengths, trainer.trained), None if peak is None else devices * peak)


def _check_least(memory: LeastMemory, device: Any, display: Display) -> None:
    """Prints the least memory of a device; raises RunError if it exceeds the memory that JAX may use."""
    details = ", ".join(f"{name.replace('_', ' ')} {describe_bytes(size)}" for name, size in memory._asdict().items())
    needed, found = f"at least {describe_bytes(memory.total)} on each device", device_memory(device)
    display.fact("estimate", f"{needed}: {details}")
    if found is not None and found.limit and memory.total > found.size:
        raise RunError(
            f"a step needs {needed}, more than the {describe_bytes(found.size)} {found.whose}; {LESS_MEMORY}"
        )


def _compile(trainer: Trainer, shape: tuple[int, int, int | None], display: Display, *, traceable: bool) -> None:
    """Compiles the step and prints its memory; raises RunError if it exceeds the memory that JAX may use."""
    device, began = jax.local_devices()[0], time.monotonic()
    try:
        compiled = trainer.compile(*shape, traceable=traceable)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(f"a step does not fit into the memory of {device.device_kind}; {LESS_MEMORY}") from error
    display.fact("compiled", f"the step in {duration(time.monotonic() - began)}")
    memory, found = step_memory(trainer, compiled), device_memory(device)
    if memory is None:
        display.fact("memory", f"not reported by {device.platform} devices")
        return
    details = ", ".join(f"{name} {describe_bytes(size)}" for name, size in memory._asdict().items())
    of_device = "" if trainer.mesh is None else " on each device"
    display.fact("memory", f"{describe_bytes(memory.total)} per step{of_device}: {details}")
    if found is None:
        return
    relation = "MORE THAN" if memory.total > found.size else "of"
    display.fact("", f"{relation} the {describe_bytes(found.size)} {found.whose}")
    if found.limit and memory.total > found.size:
        raise RunError(
            f"a step needs {describe_bytes(memory.total)} of memory, more than the {describe_bytes(found.size)} "
            f"{found.whose}; {LESS_MEMORY}"
        )


def _restore(trainer: Trainer, sampler: Sampler, checkpoints: Checkpoints, display: Display) -> TrainState:
    """Returns the state of the latest checkpoint, and restores the sampler."""
    state, sampler_state = checkpoints.restore(trainer.initial)
    sampler.restore(sampler_state)
    for fault in checkpoints.skipped:
        display.fact("warning", f"{fault}; an older checkpoint is used")
    display.fact("continued", f"from step {int(state.step):,}")
    return state


def _extend(folder: Path, config: TrainConfig, start: int, display: Display) -> None:
    """Records a changed number of steps in config.json, and prints how the learning rate continues."""
    before = read_record(folder).config.train.steps
    if config.steps == before:
        return
    extend(folder, config.steps)
    display.fact("note", f"--steps is {config.steps:,} instead of {before:,}, with which the run was started")
    if start < config.steps:
        rate = float(learning_rate_schedule(config)(start))
        constant = config.optimizer == "schedule_free_adamw"
        how = "stays at its peak" if constant else f"follows the schedule of {config.steps:,} steps"
        display.fact("", f"the learning rate {how}: {rate:.3g} at step {start + 1:,}")


def _plot(folder: Path, baselines: Baselines, display: Display) -> None:
    try:
        plot_losses(folder / "loss.png", read_rows(folder), baselines, title=folder.name)
    except OSError as error:  # must not replace the exception that ended the run
        display.line(f"cannot write loss.png: {error.strerror}")


def _report_times(parts: RunParts, steps: int, seconds: float) -> None:
    parts.display.line()
    for line in parts.clock.table(steps, seconds):
        parts.display.line(line)
    if not parts.tracer.steps or parts.tracer.folder is None:
        parts.display.line(f"no step was traced: the run had {steps:,} steps, and the trace starts after {SKIPPED}")
        return
    program = parts.trainer.compile(*parts.held_out.tokens.shape).as_text() or ""  # already compiled: returns that step
    found = operations(parts.tracer.folder)
    for line in device_table(found, operation_parts(program), parts.tracer.steps):
        parts.display.line(line)
    parts.display.line(f"the trace is in {parts.tracer.folder}, for TensorBoard's profile plugin or Perfetto")


def _report(loss: float, data: Data, display: Display) -> None:
    display.line()
    display.line(f"held-out loss in nats per token, over {data.held_out.counted:,} tokens")
    baselines = data.baselines._asdict()
    for name, value in baselines.items():
        display.line(f"  {name:<10}{value:6.3f}")
    gaps = ", ".join(
        f"{abs(value - loss):.2f} {'below' if loss < value else 'above'} {name}" for name, value in baselines.items()
    )
    display.line(f"  {'model':<10}{loss:6.3f}   {gaps}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status.

    The status is 0 for success, 2 for a wrong command line, 1 for another error that the user can fix, 130 for Ctrl-C
    and 143 for SIGTERM. An error that the user can fix is one line on stderr.
    """
    _silence_libraries()
    before, status = _stop_on_terminate(), RunStatus()
    peers: Peers | None = None
    line, code, together = "", 0, True  # the line to print, the exit status, and whether all processes end with these
    try:
        config, resumed = parse(sys.argv[1:] if arguments is None else arguments)
        if config.mesh is not None:
            launch = find_launch(config.coordinator, config.process_count, config.process_id, os.environ)
            peers = None if launch is None else join(launch, lambda: resume_advice(status.folder))
        run(config, resumed, Display(Console(quiet=peers is not None and not is_first())), status)
    except (RunError, OSError) as error:
        line, code, together = f"error: {error}", 2 if isinstance(error, UsageError) else 1, False
    except Stopped as stopped:
        line, code = f"{stopped}: {stopped.saved or resume_advice(status.folder)}", stopped.status
        together = stopped.saved is not None
    except KeyboardInterrupt:
        line, code, together = f"stopped: {resume_advice(status.folder)}", 130, False
    except Exception as error:
        if peers is None:
            raise
        time.sleep(GRACE)  # if another process is lost, so that an exchange failed, `peers` ends this one here
        traceback.print_exc()
        line, code, together = f"error: {type(error).__name__} (see above)", 1, False
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    if peers is not None:
        if not together:
            peers.end(line, code)
        peers.leave()
    if line and (peers is None or is_first()):
        print(line, file=sys.stderr)
    return code


def _silence_libraries() -> None:
    """Suppresses long log output of orbax for errors that are reported on one line.

    Also suppresses matplotlib's warning about a cache folder that it cannot write, which does not affect the run.
    """
    # Orbax logs through absl; asyncio logs exceptions of its tasks that are never retrieved.
    for name in ("absl", "asyncio", "matplotlib"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if getattr(sys.unraisablehook, "__name__", "") == "without_closed_loops":
        return
    inner = sys.unraisablehook

    def without_closed_loops(unraisable: Any) -> None:
        # If one file cannot be written, the tasks of the other files call back into a closed event loop.
        if str(unraisable.exc_value) != "Event loop is closed":
            inner(unraisable)

    sys.unraisablehook = without_closed_loops


def _stop_on_terminate() -> Any:
    """Makes SIGTERM raise Stopped; returns the previous handler, or None outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped(signal.Signals(number))

    return signal.signal(signal.SIGTERM, stop)
