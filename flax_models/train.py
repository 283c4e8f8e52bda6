"""`python -m flax_models.train`: trains a language model on text and says how well it did.

Without an argument it trains the `tiny` config on the Python standard library's sources, and ends with the held-out
loss beside three baselines and a sample of generated text. Everything it learns stays in runs/NAME/.
"""

import argparse
import dataclasses
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
from flax import nnx
from rich.console import Console

from flax_models import tokenizer as tokenizers_of_runs
from flax_models.accounting import (
    describe_bytes,
    device_memory,
    device_peak,
    flops_per_token,
    memory_estimate,
)
from flax_models.baselines import Baselines, baselines
from flax_models.batches import Batch, BatchSampler, Places, held_out_windows
from flax_models.checkpoint import Checkpoints
from flax_models.config import CONFIGS, RunConfig, TrainConfig, check_same
from flax_models.corpus import Corpus, load_corpus
from flax_models.display import Display, duration
from flax_models.errors import RunError, Stopped
from flax_models.generate import generate
from flax_models.loop import Cost, RunParts, train
from flax_models.metrics import MetricsLog, read_rows
from flax_models.model import Decoder, ModelConfig
from flax_models.plot import plot_losses
from flax_models.profile import SKIPPED, Clock, Tracer, device_table, operation_parts, operations
from flax_models.run_folder import RunRecord, folder_to_resume, make_folder, new_folder, read_record
from flax_models.step import Trainer, TrainState
from flax_models.tokenizer import END_ID
from jax_pallas.linear_ce import explain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROGRAM = "python -m flax_models.train"


def parse(arguments: Sequence[str]) -> tuple[RunConfig, Path | None]:
    """Returns the options, and the folder of the run to continue if one is.

    `--config` names the defaults of all other options, and `--resume` takes them from the run that it continues, so
    both are looked for before the rest is read.

    Args:
        arguments: of the command line.

    Returns:
        (config, folder to continue or None).

    Raises:
        RunError: there is nothing to continue, or an option differs from the run's.
        SystemExit: an option is wrong, or --help.
    """
    import tyro

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, prog=PROGRAM)
    first.add_argument("--config", choices=tuple(CONFIGS), default="tiny")
    first.add_argument("--name")
    first.add_argument("--runs", type=Path, default=RunConfig.runs)
    first.add_argument("--resume", action="store_true")
    known, _ = first.parse_known_args(arguments)
    defaults, folder = CONFIGS[known.config], None
    if known.resume:
        folder = folder_to_resume(known.runs, known.name, known.config)
        stored = read_record(folder).config
        defaults = dataclasses.replace(stored, name=folder.name)
    config = tyro.cli(
        RunConfig,
        prog=PROGRAM,
        args=list(arguments),
        default=defaults,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    if folder is not None:
        check_same(config, stored, folder / "config.json")
    return config, folder


def run(config: RunConfig, resumed: Path | None, display: Display) -> None:
    """Trains, measures and samples one run.

    Args:
        config: its options.
        resumed: folder of the run to continue, None for a new one.
        display: where to say what happens.

    Raises:
        RunError: anything the person who started it can mend.
    """
    began = time.monotonic()
    folder = resumed or new_folder(config)
    display.fact("run", f"{folder} ({'continued' if resumed else config.config})")
    corpus = load_corpus(config.data)
    display.fact("corpus", _describe_corpus(corpus))
    if resumed:
        if read_record(folder).corpus_sha256 != corpus.sha256:
            raise RunError(f"--resume: the text has changed since {folder} was started (its hash is another)")
        tokenizer, origin = tokenizers_of_runs.read(folder / "tokenizer.json"), "the run's own"
    else:
        tokenizer, origin = tokenizers_of_runs.load_or_train(
            corpus.train, config.model.vocab_size, tokenizers_of_runs.cache_folder()
        )
    vocab_size = tokenizer.get_vocab_size()
    display.fact("tokenizer", f"{vocab_size:,} entries, {origin}")
    stream = tokenizers_of_runs.encode(tokenizer, corpus.train)
    held_out = tokenizers_of_runs.encode(tokenizer, corpus.held_out)
    display.fact("tokens", f"{len(stream):,} to train on, {len(held_out):,} held out")

    train_config = config.train
    # Little text may not fill the vocabulary asked for; rows without a token would flatter nobody and cost time.
    model_config = dataclasses.replace(config.model, vocab_size=vocab_size)
    length = model_config.max_seq_len
    sampler = BatchSampler(stream, train_config.batch_size, length, config.seed)
    windows = held_out_windows(held_out, length, train_config.held_out_windows)
    judged = baselines(stream, windows.tokens.ravel(), windows.targets.ravel(), vocab_size)

    trainer = Trainer(Decoder(model_config, rngs=nnx.Rngs(config.seed)), train_config)
    cost = _describe_costs(trainer, model_config, train_config, display)
    tokens = train_config.batch_size * length
    display.fact(
        "training",
        f"{train_config.steps:,} steps of {train_config.batch_size} x {length} = {tokens:,} tokens, "
        f"{train_config.steps * tokens / len(stream):.2f} passes over the text",
    )

    if not resumed:
        make_folder(
            folder,
            RunRecord(config, corpus.sha256),
            lambda part: tokenizers_of_runs.write(tokenizer, part / "tokenizer.json"),
        )
    checkpoints = Checkpoints(folder / "checkpoints", writes=True)
    state = _continued(folder, trainer, sampler, checkpoints, train_config, display) if resumed else trainer.initial
    state = jax.device_put(state, jax.devices()[0])  # as a restored one is: both take the same compiled step
    del trainer.initial  # or it would take the device's memory beside the state for as long as the run lasts
    start = int(state.step)
    metrics = MetricsLog(folder, after=start)
    places = Places(stream, END_ID, [document.name for document in corpus.train])
    clock = Clock()
    tracer = Tracer(folder / "profile" if config.profile else None, start + 1, train_config.steps)
    parts = RunParts(
        trainer,
        sampler,
        windows,
        checkpoints,
        metrics,
        display,
        cost,
        lambda starts: places.describe(starts, length),
        clock,
        tracer,
    )
    trained = time.monotonic()
    try:
        state = train(state, train_config, parts)
        trained = time.monotonic() - trained
    finally:
        tracer.stop()
        metrics.close()
        checkpoints.close()
        _plot(folder, judged, display)
    if config.profile:
        _report_times(parts, state, train_config.steps - start, trained)

    loss = trainer.held_out_loss(state.params, windows)
    _report(loss, judged, windows, display)
    display.say()
    display.say(_sample(trainer.model(state.params), tokenizer, config))
    seconds = time.monotonic() - began
    result = {
        "held_out_loss": loss,
        **judged._asdict(),
        "held_out_tokens": windows.targets.size,
        "train_seconds": round(trained, 1),
        "seconds": round(seconds, 1),
    }
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    display.say()
    display.say(
        f"{duration(seconds)} in all, {duration(trained)} of them training; {folder}/ holds the run and loss.png"
    )


def _describe_corpus(corpus: Corpus) -> str:
    size = sum(len(document.text) for document in (*corpus.train, *corpus.held_out)) / 1e6
    skipped = f", {corpus.skipped} not UTF-8 left out" if corpus.skipped else ""
    return (
        f"{corpus.source}: {len(corpus.train)} texts and {len(corpus.held_out)} held out, {size:.1f} million characters"
        f"{skipped}, sha256 {corpus.sha256[:16]}"
    )


def _describe_costs(trainer: Trainer, config: ModelConfig, train_config: TrainConfig, display: Display) -> Cost:
    """Says what is trained, how much memory that takes, and by which loss; returns what a token costs."""
    device, length = jax.devices()[0], config.max_seq_len
    parameters = sum(np.size(leaf) for leaf in jax.tree.leaves(trainer.initial.params))
    trainable = sum(part.size for part in trainer.parts)
    display.fact(
        "model",
        f"{parameters:,} parameters, {trainable / parameters:.0%} of them to train, on {device.device_kind}",
    )
    memory = memory_estimate(
        trainer, config, batch_size=train_config.batch_size, accumulate=train_config.accumulate, length=length
    )
    words = ", ".join(f"{name} {describe_bytes(size)}" for name, size in memory._asdict().items())
    found = device_memory(device)
    display.fact("memory", f"about {describe_bytes(memory.total)}: {words}")
    if found is not None:
        much = "MORE THAN" if memory.total > found[0] else "of"
        display.fact("", f"{much} the {describe_bytes(found[0])} {found[1]}")
    rows = train_config.batch_size // train_config.accumulate * length
    chosen = explain(
        jax.ShapeDtypeStruct((rows, config.hidden_size), config.dtype),  # type: ignore[arg-type]
        jax.ShapeDtypeStruct((config.vocab_size, config.hidden_size), config.param_dtype),  # type: ignore[arg-type]
    )
    display.fact("loss", f"jax_pallas.linear_ce, {chosen.name}: {chosen.reason}")
    cost = Cost(flops_per_token(config, length), device_peak(device.device_kind))
    if cost.peak is None:
        display.fact("throughput", f"in FLOP/s: the peak of {device.device_kind}, to be a share of, is not known")
    else:
        display.fact("throughput", f"MFU is the share of {cost.peak / 1e12:,.0f} TFLOP/s, the device's dense bf16 peak")
    return cost


def _continued(
    folder: Path,
    trainer: Trainer,
    sampler: BatchSampler,
    checkpoints: Checkpoints,
    config: TrainConfig,
    display: Display,
) -> TrainState:
    """Returns the state that a run goes on from, with the sampler put where it belongs."""
    if checkpoints.latest_step() is None and _last_step(folder) <= config.checkpoint_every:
        display.fact("continued", "from the beginning: it ended before its first checkpoint")
        return trainer.initial
    state, place = checkpoints.restore(trainer.initial)
    sampler.restore(place)
    for fault in checkpoints.passed_over:
        display.fact("warning", f"{fault}; an older checkpoint is used")
    display.fact("continued", f"from step {int(state.step):,}")
    return state


def _last_step(folder: Path) -> int:
    return max((row["step"] for row in read_rows(folder)), default=0)


def _plot(folder: Path, judged: Baselines, display: Display) -> None:
    try:
        plot_losses(folder / "loss.png", read_rows(folder), judged, title=folder.name)
    except OSError as error:  # a full disk must not hide what ended the run
        display.say(f"loss.png could not be written: {error.strerror}")


def _report_times(parts: RunParts, state: TrainState, steps: int, seconds: float) -> None:
    parts.display.say()
    for line in parts.clock.table(steps, seconds):
        parts.display.say(line)
    if not parts.tracer.steps or parts.tracer.folder is None:
        parts.display.say(f"no step was traced: the run took {steps:,}, and the trace begins after {SKIPPED}")
        return
    program = parts.trainer.program(state, parts.sampler.next())
    found = operations(parts.tracer.folder)
    for line in device_table(found, operation_parts(program), parts.tracer.steps):
        parts.display.say(line)
    parts.display.say(f"the trace is in {parts.tracer.folder}, for TensorBoard's profile plugin or Perfetto")


def _report(loss: float, judged: Baselines, windows: Batch, display: Display) -> None:
    display.say()
    display.say(f"held-out loss, nats a token over {windows.targets.size:,} tokens")
    for name, value in judged._asdict().items():
        display.say(f"  {name:<10}{value:6.3f}")
    gaps = ", ".join(
        f"{abs(value - loss):.2f} {'below' if loss < value else 'above'} {name}"
        for name, value in judged._asdict().items()
    )
    display.say(f"  {'model':<10}{loss:6.3f}   {gaps}")


def _sample(model: Decoder, tokenizer: "Tokenizer", config: RunConfig) -> str:
    prompt = [END_ID, *tokenizer.encode(config.prompt, add_special_tokens=False).ids]
    drawn = generate(model, prompt, length=config.sample_tokens, key=jax.random.key(config.seed), end=END_ID)
    return f"sample:\n{config.prompt}{tokenizer.decode(drawn)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 for what a person can mend, 130 for Ctrl-C, 143 for SIGTERM.

    What a person can mend is one line on stderr.
    """
    _hush_storage()
    console = Console()
    before = _stop_on_terminate()
    try:
        config, resumed = parse(sys.argv[1:] if arguments is None else arguments)
        run(config, resumed, Display(console))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.status
    except KeyboardInterrupt:
        print("stopped; --resume continues from the last checkpoint", file=sys.stderr)
        return 130
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    return 0


def _hush_storage() -> None:
    """Keeps orbax and the library under it from printing pages about what comes as an error of one line anyway."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
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
        raise Stopped(signal.Signals(number), "--resume continues from the last checkpoint")

    return signal.signal(signal.SIGTERM, stop)


if __name__ == "__main__":
    sys.exit(main())
